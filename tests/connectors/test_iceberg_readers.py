"""What readers of an Iceberg table find by a filter, with the bounds and partitions that they skip files by."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from connector_worlds import written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg import expressions
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from committers import committer_of
from effort import examples
from midstream.connectors.iceberg import iceberg_tables
from midstream.connectors.iceberg.iceberg_sink import IcebergSink

PREDICATES: Any = expressions
"""They take positional arguments, which pyiceberg's types do not show."""
EPOCH = datetime(1970, 1, 1)
OPERATORS: tuple[tuple[Callable[..., expressions.BooleanExpression], Callable[[Any, Any], Any]], ...] = (
    (PREDICATES.EqualTo, operator.eq),
    (PREDICATES.NotEqualTo, operator.ne),
    (PREDICATES.LessThan, operator.lt),
    (PREDICATES.LessThanOrEqual, operator.le),
    (PREDICATES.GreaterThan, operator.gt),
    (PREDICATES.GreaterThanOrEqual, operator.ge),
)
CHARACTERS = st.sampled_from("aZ\0\u00e9\ud7ff\ue000\uffff\U00010000\U0010ffff")
BEGINNINGS = ("", "a" * 15, "a" * 32, "\U0010ffff" * 33, "b" * 5000)
NEAR_ZERO = st.integers(-20, 20)
DAYS = (st.integers(-719_162, 2_932_896) | st.integers(-800, 800)).map(lambda n: date(1970, 1, 1) + timedelta(n))
MOMENTS = (
    st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999) | st.integers(-40_000_000_000_000, 40_000_000_000_000)
).map(lambda us: EPOCH + timedelta(microseconds=us))
TIMES = tuple(f"{unit}(v)" for unit in ("year", "month", "day", "hour"))
WIDTHS = ("v", "bucket(3, v)", "truncate(7, v)", "truncate(40, v)")
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], tuple[str, ...]]] = {
    "bool": (pa.bool_(), st.booleans(), ("v",)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1) | NEAR_ZERO, WIDTHS),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | NEAR_ZERO, WIDTHS),
    "float32": (pa.float32(), st.floats(width=32, allow_infinity=False), ()),  # pyiceberg takes -inf for too small
    "float64": (pa.float64(), st.floats(), ()),
    "money": (pa.decimal128(5, 2), st.decimals(-999, 999, places=2), WIDTHS),
    "decimal": (pa.decimal128(15, 2), st.integers(1 - 10**15, 10**15 - 1).map(lambda n: Decimal(f"{n}E-2")), WIDTHS),
    "long": (pa.decimal128(38, 3), st.integers(1 - 10**38, 10**38 - 1).map(lambda n: Decimal(f"{n}E-3")), WIDTHS),
    "text": (
        pa.large_string(),
        st.builds(operator.add, st.sampled_from(BEGINNINGS), st.text(CHARACTERS, max_size=4)),
        WIDTHS,
    ),
    "bytes": (pa.large_binary(), st.binary(max_size=40) | st.sampled_from((b"\xff" * 20, b"\xff" * 5000)), WIDTHS),
    "day": (pa.date32(), DAYS, (*WIDTHS[:2], *TIMES[:3])),
    "clock": (pa.time64("us"), MOMENTS.map(datetime.time), WIDTHS[:2]),
    "local": (pa.timestamp("us"), MOMENTS, (*WIDTHS[:2], *TIMES)),
    "moment": (pa.timestamp("us", "UTC"), MOMENTS.map(lambda at: at.replace(tzinfo=UTC)), (*WIDTHS[:2], *TIMES)),
}
METRICS = st.sampled_from(("none", "counts", "full", "truncate(1)", "truncate(16)"))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[list[Any]], Any, tuple[str, ...]]:
    """A kind, the values of each file, a value to compare with, and a partitioning."""
    name = draw(st.sampled_from(sorted(KINDS)))
    _, values, by = KINDS[name]
    files = draw(st.lists(st.lists(st.none() | values, min_size=1, max_size=4), min_size=1, max_size=2))
    some = [value for file in files for value in file if value is not None]
    other = draw(st.sampled_from(some) | values if some else values)
    return name, files, other, draw(st.sampled_from([(), *((each,) for each in by)]))


def filters(values: list[Any], other: Any) -> list[tuple[expressions.BooleanExpression, list[bool]]]:
    """Filters of column v, with the rows for which each is true."""
    found: list[tuple[expressions.BooleanExpression, list[bool]]] = [
        (PREDICATES.IsNull("v"), [value is None for value in values]),
        (PREDICATES.NotNull("v"), [value is not None for value in values]),
    ]
    if isinstance(other, float):
        found.append((PREDICATES.IsNaN("v"), [is_nan(value) for value in values]))
    if isinstance(other, str):
        for end in (1, 3, 33):
            begins = [value is not None and value.startswith(other[:end]) for value in values]
            found += [(PREDICATES.StartsWith("v", other[:end]), begins)] if other else []
    if not is_nan(other):
        if not isinstance(other, float):  # 0.0 is not in [-0.0] to pyiceberg
            found.append((PREDICATES.In("v", [other]), [value == other for value in values]))
        for condition, compare in OPERATORS if not isinstance(other, bool) else OPERATORS[:2]:
            found.append((condition("v", other), [value is not None and compare(value, other) for value in values]))
    return found


def check_polars(table: Table, values: list[Any], other: Any, kind: pa.DataType) -> None:
    column = pl.from_arrow(pa.array([], kind))
    assert isinstance(column, pl.Series)
    literal = pl.lit(other, dtype=column.dtype)
    for _, compare in OPERATORS:
        lazy = pl.scan_iceberg(table, reader_override="native").filter(compare(pl.col("v"), literal))
        found = set(lazy.select("n").collect()["n"].to_list())
        assert {n for n, value in enumerate(values) if value is not None and compare(value, other)} <= found


@pytest.mark.systems
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Iceberg scan planning")
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(drawn=tables(), metrics=METRICS, version=st.sampled_from(("1", "2")))
def test_a_filter_finds_the_rows_that_it_is_true_for(drawn, metrics, version):
    name, files, other, by = drawn
    kind = KINDS[name][0]
    schema = pa.schema([("n", pa.int64()), ("v", kind)])
    with TemporaryDirectory() as place:
        catalog = load_catalog(
            "lake", type="sql", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}/lake"
        )
        catalog.create_namespace("lake")
        columns = iceberg_tables.new_schema(schema)
        spec = iceberg_tables.new_spec(by, columns, "here")
        properties = {"format-version": version, "write.metadata.metrics.default": metrics}
        catalog.create_table("lake.t", columns, partition_spec=spec, properties=properties)
        sink = IcebergSink("lake.t", catalog=catalog)
        sink.validate(schema, restoring=False)
        values: list[Any] = []
        for n, file in enumerate(files, 1):
            numbers = range(len(values), len(values) + len(file))
            rows = pa.record_batch([pa.array(numbers), pa.array(file, kind)], schema=schema)
            committer_of(sink, "job").commit(n, written(sink, rows, n, subtask=n))
            values += [pa.scalar(value, kind).as_py() for value in file]
        table, other = catalog.load_table("lake.t"), pa.scalar(other, kind).as_py()
        unordered = {n for n, value in enumerate(values) if value is None or is_nan(value)}
        file_of = [n for n, file in enumerate(files, 1) for _ in file]
        for condition, there in filters(values, other):
            expected = {n for n, is_there in enumerate(there) if is_there}
            if pa.types.is_floating(kind):  # Arrow itself hides NaN among equal numbers, so only the plan is compared
                planned = {Path(task.file.file_path).name.split("-")[2] for task in table.scan(condition).plan_files()}
                assert {file_of[n] for n in expected} <= set(map(int, planned)), f"{condition} of {files}: {planned}"
                continue
            found = set(table.scan(condition, selected_fields=("n",)).to_arrow()["n"].to_pylist())
            # pyiceberg returns nulls for some filters that are not true for them
            assert expected <= found <= expected | unordered, f"{condition} of {files}: {expected}, not {found}"
        if not any(map(is_nan, [*values, other])):
            check_polars(table, values, other, kind)
