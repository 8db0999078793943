"""Which expressions compute each row on its own: every function of polars, and what hides in an expression."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from expression_calls import COLUMNS, columns_of, expression_of, functions, read_table, reason_to_refuse
from operator_world import World

from midstream.core.arrow_types import schema_of
from midstream.core.errors import JobError
from midstream.operators.expressions import EXPRESSION_ERRORS
from midstream.operators.row_by_row import check_row_by_row, faults_of
from midstream.operators.stateless import FilterOperator, ProjectOperator

TABLE = read_table()
ACCEPTED = [call for calls in TABLE.values() for call in calls.get("accepted", ())]


def test_the_table_has_every_function_of_polars() -> None:
    assert functions() == TABLE.keys(), "run python tests/operators/expression_calls.py"


def test_every_function_has_a_call_or_cannot_compute_rows() -> None:
    without = {name for name, calls in TABLE.items() if not any(calls.values())}
    assert without == {
        *("cs.categorical", "cs.digit", "cs.enum", "cs.map"),  # no column of theirs can be in a stream, or is here
        "cs.is_selector",  # returns no expression
        "ext.to",  # needs an extension type that the job registers
        *("pl.date_range", "pl.datetime_range"),  # need scalars
        "pl.self_dtype",  # is part of no expression
    }


def test_each_call_is_accepted_or_refused_as_the_table_says() -> None:
    for name, calls in TABLE.items():
        for verdict, listed in calls.items():
            for call in listed:
                reason = reason_to_refuse(call)
                assert ("refused" if reason else "accepted") == verdict, (name, call, reason)


# ---- what is accepted computes each row on its own ----


def random_frame(random: Random, rows: int) -> pl.DataFrame:
    def value(kind: Any) -> Any:
        if random.random() < 0.15:
            return None
        match kind:
            case pl.List():
                return [value(kind.inner) for _ in range(random.randrange(4))]
            case pl.Array():
                return [value(kind.inner) for _ in range(kind.size)]
            case pl.Struct():
                return {field.name: value(field.dtype) for field in kind.fields}
            case pl.Datetime(time_zone=str()):
                return datetime(2024, 10, random.randrange(26, 29), random.randrange(24), 30, tzinfo=UTC)
            case pl.Datetime():
                return datetime(2024, random.choice((3, 10)), random.randrange(26, 32), random.randrange(5), 30)
        return random.choice(values[type(kind)])

    texts = ["", "a", "ab", "b", "A,b", "2024-02-29", "2023-02-29", "12:00:00", "7", "-1.5", "é", "null", '{"a":1}']
    values: dict[type[pl.DataType], list[Any]] = {
        pl.Int64: [-2, -1, 0, 1, 1, 2, 3, 30],
        pl.UInt32: [0, 1, 1, 4],
        pl.Float64: [float("nan"), float("inf"), -0.0, 0.0, 0.25, 1.0, 1.0, -3.5],
        pl.String: [*texts, "2024-02-29 12:00:00", "ff", "$.a", "1h"],
        pl.Binary: [text.encode() for text in [*texts, "abcdefgh"]],
        pl.Boolean: [True, False],
        pl.Date: [date(2024, 2, 28), date(2024, 2, 29), date(2024, 3, 2), date(1969, 12, 31)],
        pl.Duration: [timedelta(0), timedelta(hours=-1), timedelta(days=2)],
        pl.Time: [time(0), time(12), time(23, 59, 59)],
        pl.Decimal: [Decimal("0.25"), Decimal("-1.00"), Decimal("1.00")],
    }
    columns = {name: [value(kind) for _ in range(rows)] for name, kind in COLUMNS.items()}
    return pl.DataFrame(columns, schema=COLUMNS, strict=False)


def outcome(rows: pl.DataFrame, expr: pl.Expr) -> pl.DataFrame | BaseException:
    try:
        return rows.with_columns(expr)
    except EXPRESSION_ERRORS as error:
        return error


@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_computes_random_rows_as_each_alone(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    random = Random(seed)
    wrong = []
    for call in ACCEPTED:
        frame = random_frame(random, random.randrange(8, 14))
        rows, expr = frame.select(*columns_of(call)), expression_of(call)
        alone = [outcome(rows.slice(row, 1), expr) for row in range(rows.height)]
        computed = [row for row, made in enumerate(alone) if isinstance(made, pl.DataFrame)]
        for _ in range(3):
            chosen = [random.choice(computed) for _ in range(random.randrange(1, 15))] if computed else []
            if not chosen:
                continue
            together = outcome(rows[chosen], expr)
            expected = pl.concat([made for row in chosen if isinstance(made := alone[row], pl.DataFrame)], how="vertical_relaxed")
            if not isinstance(together, pl.DataFrame):
                wrong.append((call, str(together).splitlines()[:1]))
            elif not together.cast(dict(expected.schema)).equals(expected):
                wrong.append((call, rows[chosen], expected, together))
    assert not wrong, wrong[:5]
