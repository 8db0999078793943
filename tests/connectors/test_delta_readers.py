"""What readers of a Delta table find by a filter, with the bounds that the sink gives them to skip files by."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from connector_worlds import written
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from committers import committer_of
from effort import examples
from midstream.connectors.delta.delta_sink import DeltaSink

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
INT64 = st.integers(-(2**63), 2**63 - 1)
CHARACTERS = st.sampled_from("aZ\0\u00e9\ud7ff\ue000\uffff\U00010000\U0010ffff")
BEGINNINGS = ("", "a" * 31, "a" * 32, "\U0010ffff" * 33, "b" * 5000)
MILLENNIUM_US, MILLENNIUM_DAYS = 253_402_300_800_000_000, 2_932_897  # year 10000
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), INT64),
    "float32": (pa.float32(), st.floats(width=32)),
    "float64": (pa.float64(), st.floats()),
    "finite": (pa.float64(), st.floats(allow_nan=False)),
    "money": (pa.decimal128(5, 2), st.decimals(-999, 999, places=2)),
    "long decimal": (pa.decimal128(38, 3), st.integers(1 - 10**38, 10**38 - 1).map(lambda n: Decimal(f"{n}E-3"))),
    "small decimal": (pa.decimal128(10, 10), st.integers(1 - 10**10, 10**10 - 1).map(lambda n: Decimal(f"{n}E-10"))),
    "text": (pa.large_string(), st.builds(operator.add, st.sampled_from(BEGINNINGS), st.text(CHARACTERS, max_size=4))),
    "bytes": (pa.large_binary(), st.binary(max_size=40)),
    "day": (pa.date32(), st.integers(-719_162, MILLENNIUM_DAYS - 1)),
    "any day": (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    "local": (pa.timestamp("us"), st.integers(-62_135_596_800_000_000, MILLENNIUM_US - 1)),
    "moment": (pa.timestamp("us", "UTC"), st.integers(-62_135_596_800_000_000, MILLENNIUM_US - 1)),
    "any moment": (pa.timestamp("us", "UTC"), INT64),
}
COMPARED = {"any day": "day", "any moment": "moment"}
"""Kinds with values that cannot be given to a filter in Python, and the kind of those that are."""
PARTITIONING = ("bool", "int8", "int64", "text", "day")


def total(value: Any) -> Any:
    """What orders values as polars does: NaN equals itself and is the greatest."""
    return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value


def polars_type(kind: pa.DataType) -> Any:
    column = pl.from_arrow(pa.array([], kind))
    assert isinstance(column, pl.Series)
    return column.dtype


def found_by_arrow(table: Path, condition: pc.Expression) -> list[Any]:
    return sorted(DeltaTable(table).to_pyarrow_table(columns=["n"], filters=condition)["n"].to_pylist())


def found_by_polars(table: Path, condition: pl.Expr) -> list[Any]:
    found = sorted(pl.scan_delta(str(table)).filter(condition).select("n").collect()["n"].to_list())
    assert found == sorted(pl.read_delta(str(table)).filter(condition)["n"].to_list())
    return found


def found_by_polars_with_arrow(table: Path, condition: pl.Expr) -> list[Any]:
    lazy = pl.scan_delta(str(table), use_pyarrow=True).filter(condition).select("n")
    return sorted(lazy.collect()["n"].to_list())


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[list[Any]], Any]:
    """A kind, the values of each file, and a value to compare with."""
    name = draw(st.sampled_from(sorted(KINDS)))
    values = KINDS[name][1]
    files = draw(st.lists(st.lists(st.none() | values, min_size=1, max_size=4), min_size=1, max_size=2))
    some = [value for file in files for value in file if value is not None and name not in COMPARED]
    others = KINDS[COMPARED.get(name, name)][1]
    return name, files, draw(st.sampled_from(some) | others if some else others)


@pytest.mark.systems
@pytest.mark.timeout(600)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(drawn=tables(), op=st.sampled_from(sorted(OPERATORS)), partitioned=st.booleans())
def test_a_filter_finds_the_rows_that_it_is_true_for(drawn, op, partitioned):
    (name, files, other), compare = drawn, OPERATORS[op]
    kind = KINDS[name][0]
    inner = pa.struct([("v", kind)])
    with TemporaryDirectory() as directory:
        table = Path(directory) / "t"
        made = pa.schema(
            [("n", pa.int64()), ("v", kind), ("s", inner), ("l", pa.large_list(kind)), ("p", kind)]
            + [("more", kind), ("more_s", inner)]
        )
        by = ["p"] if partitioned and name in PARTITIONING else []
        DeltaTable.create(table, made, partition_by=by)
        stream = pa.schema(list(made)[:5])
        sink = DeltaSink(table)
        sink.validate(stream, restoring=False)
        values: list[Any] = []
        kept: list[list[Any]] = []
        for checkpoint_id, file in enumerate(files, 1):
            if by:  # readers take empty text for NULL, and folders have no long names
                file = [None if value == "" else value[:20] if isinstance(value, str) else value for value in file]
            column = pa.array(file, kind)
            numbers = pa.array(range(len(values), len(values) + len(file)))
            structs = pa.StructArray.from_arrays(
                [column], fields=list(inner), mask=pa.array([value is None for value in file])
            )
            offsets = pa.array(range(len(file) + 1), pa.int64())
            lists: Any = pa.LargeListArray.from_arrays(offsets, column)
            rows = pa.RecordBatch.from_arrays([numbers, column, structs, lists, column], schema=stream)
            committer_of(sink, "job").commit(checkpoint_id, written(sink, rows, checkpoint_id, subtask=checkpoint_id))
            values += file
            kept.append(file)
        places: list[tuple[pc.Expression, pl.Expr, list[Any]]] = [
            (pc.field("v"), pl.col("v"), values),
            (pc.field("s", "v"), pl.col("s").struct.field("v"), values),
            (pc.field("p"), pl.col("p"), values),
            (pc.field("more"), pl.col("more"), [None] * len(values)),
        ]
        literal = pl.lit(pa.scalar(other, kind).as_py(), dtype=polars_type(kind))
        for arrow, polars, there in places:
            what = f"{arrow} {op} {other!r} of {kept}"
            some = [(n, value) for n, value in enumerate(there) if value is not None]
            ieee = [n for n, value in some if compare(value, other)]
            ordered = [n for n, value in some if compare(total(value), total(other))]
            assert found_by_arrow(table, compare(arrow, pa.scalar(other, kind))) == ieee, what
            condition = compare(polars, literal)
            assert found_by_polars(table, condition) == ordered, what
            # arrow, to which polars leaves it here, knows no order of NaN, and polars cannot tell it of NaN
            if ieee == ordered and total(other) != total(math.nan):
                assert found_by_polars_with_arrow(table, condition) == ieee, what
        for arrow, polars, there in [
            *places,
            (pc.field("s"), pl.col("s"), values),
            (pc.field("more_s"), pl.col("more_s"), [None] * len(values)),
        ]:
            null = [n for n, value in enumerate(there) if value is None]
            valid = [n for n, value in enumerate(there) if value is not None]
            for found, arrow_condition, condition in (
                (null, pc.is_null(arrow), polars.is_null()),
                (valid, pc.is_valid(arrow), polars.is_not_null()),
            ):
                what = f"{arrow_condition} of {kept}"
                assert found_by_arrow(table, arrow_condition) == found, what
                assert found_by_polars(table, condition) == found, what
                assert found_by_polars_with_arrow(table, condition) == found, what
