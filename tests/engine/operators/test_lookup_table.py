"""The index of a table by its keys finds what polars joins, for all types of keys."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.batches import to_polars
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators import lookup_table
from midstream.engine.operators.lookup_table import LookupTable, as_table, with_columns_of
from midstream.engine.state.table_runs import codes_of

_DAY = datetime(2024, 1, 1)
KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [0, -1, 7, 2**63 - 1, -(2**63)]),
    (pa.uint64(), [0, 7, 2**64 - 1, 2**63]),
    (pa.int8(), [0, -1, 7, 127]),
    (pa.bool_(), [True, False]),
    (pa.large_string(), ["", "a", "A", "é", "a" * 40]),
    (pa.large_binary(), [b"", b"\0", b"\xff"]),
    (pa.date32(), [date(1970, 1, 1), date(1, 1, 1), date(9999, 12, 31)]),
    (pa.timestamp("us"), [_DAY, _DAY + timedelta(microseconds=1)]),
    (pa.timestamp("ns", "Europe/Paris"), [_DAY.replace(tzinfo=UTC), _DAY.replace(tzinfo=UTC) + timedelta(hours=1)]),
    (pa.duration("ms"), [timedelta(0), timedelta(days=-1)]),
]


@st.composite
def keyed_tables(draw: Any) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Two batches with the same key columns, k0, k1, …; the second also with a number."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))

    def batch(rows: int, *, numbered: bool) -> pa.RecordBatch:
        columns = {
            f"k{at}": pa.array(
                [draw(st.sampled_from([None, *values])) for _ in range(rows)],
                kind,
            )
            for at, (kind, values) in enumerate(kinds)
        }
        if numbered:
            columns["n"] = pa.array(range(rows), pa.int64())
        return pa.record_batch(columns)

    return batch(draw(st.integers(0, 12)), numbered=False), batch(draw(st.integers(0, 8)), numbered=True)


@settings(max_examples=examples(300))
@given(keyed_tables(), st.booleans())
def test_the_rows_found_are_those_that_polars_joins(
    batches: tuple[pa.RecordBatch, pa.RecordBatch], one_hash: bool
) -> None:
    left, right = batches
    keys = left.schema.names
    expected = to_polars(right).unique(keys, keep="first", maintain_order=True)
    joined = to_polars(left).join(expected, on=keys, how="left", maintain_order="left").get_column("n")

    def codes(keys: pl.DataFrame) -> tuple[Any, bool]:
        found, is_exact = codes_of(keys)
        return (np.zeros_like(found), False) if one_hash else (found, is_exact)

    with patch.object(lookup_table, "codes_of", codes):
        table = LookupTable.of(right, keys, "the table", may_repeat=True)
        assert table.rows.num_rows == expected.drop_nulls(keys).height
        positions = table.positions(to_polars(left).rename(lambda name: name.replace("k", "left")))
        [numbers] = table.columns(["n"], positions)
    assert numbers.to_pylist() == joined.to_list()


def test_a_key_that_is_there_twice_is_refused_by_its_value_and_nulls_equal_nothing() -> None:
    rows = pa.record_batch({"user": ["ann", None, "bob", None, "ann", "bob", "bob"], "n": [1, 2, 3, 4, 5, 6, 7]})
    with pytest.raises(JobError, match="the table: key user='ann' is in 2 rows, and 1 other keys are repeated too"):
        LookupTable.of(rows, ["user"], "the table", may_repeat=False)
    table = LookupTable.of(rows.slice(0, 4), ["user"], "the table", may_repeat=False)
    assert table.rows.column("n").to_pylist() == [1, 3]
    assert table.positions(pl.DataFrame({"who": [None, "bob", "eve"]})).tolist() == [-1, 1, -1]


def test_frames_of_all_kinds_are_tables_and_their_columns_must_fit() -> None:
    schema = pa.schema([("a", pa.int64())])
    for made in (
        pl.DataFrame({"a": [1], "b": [2]}),
        pl.LazyFrame({"a": [1]}),
        pa.table({"a": pa.array([1], pa.int32())}),
    ):
        assert with_columns_of(as_table(made, "it"), schema, "it").to_pylist() == [{"a": 1}]
    with pytest.raises(JobError, match="it is a list; give a polars or pandas DataFrame"):
        as_table([1], "it")
    for wrong, why in (
        (pl.DataFrame({"b": [1]}), "column 'a' is missing; there are b"),
        (pl.DataFrame({"a": [0.5]}), "'a'"),
    ):
        with pytest.raises(SchemaError, match=why):
            with_columns_of(as_table(wrong, "it"), schema, "it")
