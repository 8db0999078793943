"""Checks the contract of an `Aggregate` or an `Accumulator`: the result does not depend on how parts are merged."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.connectors.memory.collection_source import from_rows
from midstream.engine.core.batches import to_polars
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.window_aggregation import ALL, WindowAggregation
from midstream.engine.state.job_code import own_code
from midstream.testing.float_compare import is_near
from midstream.testing.inputs import as_batch, as_sent

RESULT: Final = "result"
WAYS: Final = 30
CLOSE: Final = 1e-9
"""The relative tolerance: a result such as a variance has larger errors than the sums from which it is computed."""


def check_aggregate(
    aggregate: AnyAggregate, rows: Sequence[Mapping[str, Any]], schema: SchemaLike | None = None
) -> Any:
    """Check that an aggregate returns the same result however its rows are cut and its parts merged.

    `aggregate`: an instance of an Aggregate or an Accumulator.
    `rows`: those of one window, at least three, in order of arrival.
    `schema`: their columns, by default inferred.

    Returns the result; floats may differ by rounding, one part in 1e9. Raises AssertionError showing two ways of
    merging the same rows, and their results: `merge` is not associative, `merge` of a single part changes it, or
    something is kept from one call to the next. Exceptions of the functions are raised as a JobError.

        >>> testing.check_aggregate(Sum("price"), [{"price": 3}, {"price": 9}, {"price": 5}])
        17
    """
    name = type(aggregate).__name__
    if len(rows) < 3:
        raise AssertionError("check_aggregate: give at least three rows, so that there is something to merge")
    columns = from_rows(rows).schema if schema is None else as_schema(schema, "check_aggregate")
    batch = as_batch(rows, columns, "check_aggregate")
    timed = batch.append_column(_time_column(columns), pa.array(range(batch.num_rows), pa.timestamp("us")))
    frame = to_polars(timed)
    aggregation = _aggregation(aggregate, timed.schema, name)
    whole = _result(aggregation, _part(aggregation, frame))
    again = _result(aggregation, _part(aggregation, frame))
    if not is_near(whole, again, CLOSE):
        raise AssertionError(
            f"{name}: the same rows give {whole!r} the first time and {again!r} the second time: something is kept "
            "from one call to the next; init() must return a new accumulator each time"
        )
    alone = _result(aggregation, aggregation.merge([_part(aggregation, frame)]))
    if not is_near(whole, alone, CLOSE):
        raise AssertionError(
            f"{name}: all rows together give {whole!r}, and {alone!r} after merge is called with nothing else: windows merge "
            "one part or several, so merge of a single part must not change it"
        )
    for text, cuts, right_first, count in _ways(frame.height):
        other = _aggregation(aggregate, timed.schema, name)
        parts = [_part(other, frame[first:end]) for first, end in cuts]
        found = _result(other, _folded(other, parts, right_first, count))
        if not is_near(whole, found, CLOSE):
            raise AssertionError(
                f"{name}: {text} give {found!r}, but all rows together give {whole!r}: windows reduce rows batch by "
                "batch and merge "
                "the parts in groups, so merge must be associative, and add and merge must keep nothing elsewhere"
            )
    return whole


def _time_column(columns: pa.Schema) -> pa.Field[Any]:
    return pa.field("at" if "at" not in columns.names else "event_time_of_the_check", pa.timestamp("us"))


def _aggregation(aggregate: AnyAggregate, schema: pa.Schema, name: str) -> WindowAggregation:
    """Return the reduction that a window in one slot would use."""
    sent = as_sent(aggregate, name)
    aggregation = WindowAggregation(name, (), schema.names[-1], {RESULT: sent}, schema)
    aggregation.check_expressions()
    aggregation.pickles_of(own_code(sent))  # it may have copies of the classes of the program's main file
    return aggregation


def _part(aggregation: WindowAggregation, rows: pl.DataFrame) -> pl.DataFrame:
    return aggregation.reduce(aggregation.prepare(rows.select(aggregation.columns)))


def _folded(aggregation: WindowAggregation, parts: list[pl.DataFrame], right_first: bool, count: int) -> pl.DataFrame:
    """Merge `count` neighbours at a time, from the left or from the right, keeping their order."""
    while len(parts) > 1:
        at = max(0, len(parts) - count) if right_first else 0
        parts = [*parts[:at], aggregation.merge(parts[at : at + count]), *parts[at + count :]]
    return parts[0]


def _result(aggregation: WindowAggregation, merged: pl.DataFrame) -> Any:
    return aggregation.finish(merged).drop(ALL).get_column(RESULT).to_list()[0]


def _ways(rows: int) -> list[tuple[str, list[tuple[int, int]], bool, int]]:
    """Return ways of merging: the name, the ranges of rows in each part, whether the last ones are merged first, and how
    many at a time.
    """
    chance = random.Random(0)
    found: list[tuple[str, list[tuple[int, int]], bool, int]] = []
    for way in range(WAYS):
        if way < 4:
            inner = list(range(1, rows))
        else:
            inner = sorted(chance.sample(range(1, rows), chance.randint(1, min(rows - 1, 8))))
        bounds = [0, *inner, rows]
        cuts = list(pairwise(bounds))
        right_first = bool(way % 2)
        sizes = ", ".join(str(end - first) for first, end in cuts[:12]) + (" …" if len(cuts) > 12 else "")
        count = (2, 2, 3, rows)[way % 4]
        order = "the last parts merged first" if right_first else "the first parts merged first"
        if count == rows:
            order = "merged together"
        found.append((f"parts of {sizes} rows, {order},", cuts, right_first, count))
    return found
