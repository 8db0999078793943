"""A column of any type goes through every operator unchanged, or is refused when the job is built: nothing panics."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from operator_world import World

from midstream.engine.core.batches import canonical_schema, check_held_by_polars, conform
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import MidstreamError, SchemaError
from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import interval_join_operator
from midstream.engine.operators.stateless import ColumnsOperator, FilterOperator, ProjectOperator
from midstream.engine.operators.windows.aggregates import Accumulator, Count, First, Last
from midstream.engine.operators.windows.window_factory import session, sliding, tumbling, window_operator
from midstream.engine.state.table_state import TableState


class Fahrenheit(pa.ExtensionType):
    """A type that a program defines, without a hash."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "test.fahrenheit")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Fahrenheit:
        return cls()


CATEGORIES: Any = pa.array(["a", "b"]).dictionary_encode()
ENDS: Any = pa.array([0, 1, 2], pa.int32())
SORTED: Any = pa.map_(pa.int64(), pa.int64(), keys_sorted=True)  # type: ignore[call-overload]  # the stub has another name
UNHELD = {
    "a type of the program": pa.ExtensionArray.from_storage(Fahrenheit(), pa.array([1, None], pa.int64())),
    "list of a type of the program": pa.ListArray.from_arrays(
        [0, 1, 2], pa.ExtensionArray.from_storage(Fahrenheit(), pa.array([1, 2], pa.int64()))
    ),
    "decimal256": pa.array([Decimal(1), None], pa.decimal256(50, 2)),
    "list of decimal256": pa.array([[Decimal(1)], None], pa.list_(pa.decimal256(50, 2))),
    "decimal of tens": pa.array([Decimal(1500), None], pa.decimal128(10, -2)),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3]), None], pa.month_day_nano_interval()),  # type: ignore[arg-type,call-arg]  # the stub is wrong
    "sparse union": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]),
    "dense union": pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["b"])]
    ),
    "run-end encoded": pa.RunEndEncodedArray.from_arrays([2], pa.array([3])),  # type: ignore[call-overload]  # the stub is wrong
    "a zone of half hours": pa.array([1, None], pa.timestamp("us", "+05:30")),
}
HELD = {
    "half float": pa.array([np.float16(1.5), None], pa.float16()),
    "map": pa.array([[(1, 2)], None], pa.map_(pa.int64(), pa.int64())),
    "fixed-size list": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
    "fixed-size binary": pa.array([b"ab", None], pa.binary(2)),
    "null": pa.nulls(2),
    "decimal128": pa.array([Decimal("1.5"), None], pa.decimal128(38, 2)),
    "date64": pa.array([86_400_000, None], pa.int64()).cast(pa.date64()),
    "time32": pa.array([1, None], pa.time32("ms")),
    "time64": pa.array([1, None], pa.time64("us")),
    "duration of seconds": pa.array([1, None], pa.duration("s")),
    "duration": pa.array([1000, None], pa.duration("ns")),
    "zoned": pa.array([1, None], pa.timestamp("ms", "+02:00")),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "struct": pa.array([{"at": timedelta(1)}, None], pa.struct([("at", pa.duration("s"))])),
    "list": pa.array([["a", "b"], None], pa.list_(pa.string())),
    "fixed-size list of text that is a category": pa.FixedSizeListArray.from_arrays(CATEGORIES, 1),
    "fixed-size list of days": pa.array([[date(2024, 1, 1)], None], pa.list_(pa.date64(), 1)),
    "map of days": pa.array([[(1, date(2024, 1, 1))], None], pa.map_(pa.int64(), pa.date64())),
    "map of categories": pa.MapArray.from_arrays(ENDS, CATEGORIES, CATEGORIES),
    "map of small decimals": pa.array([[(1, Decimal("1.5"))], None], pa.map_(pa.int64(), pa.decimal32(5, 2))),
    "map of views": pa.array([[("a", "b")], None], pa.map_(pa.string_view(), pa.string_view())),
    "map with sorted keys": pa.array([[(1, 2)], None], SORTED),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16))),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a":1}', None])),
    "list of json": pa.ListArray.from_arrays(
        [0, 1, 2], pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", None]))
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], None], pa.list_(pa.int32(), 2))
    ),
    "float": pa.array([float("inf"), None]),
}


def rows_with(column: pa.Array[Any]) -> pa.RecordBatch:
    """The column `x` with a key and a time, as a source gives them."""
    rows = pa.record_batch({"x": column, "k": pa.array([1, 2]), "t": pa.array([1, 2], pa.timestamp("ms"))})
    return conform(rows, canonical_schema(rows.schema), "the source")


def whole_window(window: Any, aggregate: Any) -> Callable[[pa.Schema], Operator]:
    return lambda schema: window_operator(
        "it", window=window, keys=["k"], event_time="t", aggregates={"x": aggregate}, schema=schema
    )


class Newest(Accumulator[Any]):
    columns = ("x",)
    type = pa.int64()

    def init(self) -> Any:
        return None

    def add(self, accumulator: Any, row: dict[str, object]) -> Any:
        return 1

    def merge(self, first: Any, second: Any) -> Any:
        return second

    def result(self, accumulator: Any) -> object:
        return 1


def on_batches(schema: pa.Schema) -> Operator:
    class Same(KeyedBatchFunction):
        table = TableState(schema)

        def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
            self.table.append(rows)
            return self.table.frame

    return BatchFunctionOperator("it", Same(), [Port("process", ("k",), "t", schema)], schema)


def join(schema: pa.Schema) -> Operator:
    other = pa.schema([("k", pa.int64()), ("u", pa.timestamp("ms"))])
    return interval_join_operator(
        "it", [Port("process1", ("k",), "t", schema), Port("process2", ("k",), "u", other)], 0, 1
    )


TOUCHING: dict[str, Callable[[pa.Schema], Operator]] = {
    "filter": lambda schema: FilterOperator("it", pl.col("x").is_not_null() | pl.col("x").is_null(), schema),
    "select": lambda schema: ProjectOperator("it", [pl.col("x").alias("x")], schema, keep=False),
    "select all": lambda schema: ProjectOperator("it", [pl.all()], schema, keep=False),
    "with_columns": lambda schema: ProjectOperator("it", [pl.col("x").is_null().alias("n")], schema, keep=True),
    "tumbling": whole_window(tumbling("1 s"), First("x")),
    "sliding": whole_window(sliding("2 s", "1 s"), Last("x")),
    "session": whole_window(session("1 s"), First("x")),
    "accumulator": whole_window(tumbling("1 s"), Newest()),
    "count": whole_window(tumbling("1 s"), Count("x")),
    "process_batches": on_batches,
    "join": join,
}


@pytest.mark.parametrize("name", UNHELD)
@pytest.mark.parametrize("operator", TOUCHING)
def test_what_polars_cannot_hold_is_refused_when_the_job_is_built(operator: str, name: str) -> None:
    with pytest.raises(SchemaError, match=r"operator 'it'.*column 'x' is .*polars cannot hold .* leave it out"):
        TOUCHING[operator](rows_with(UNHELD[name]).schema)


BESIDE: dict[str, Callable[[pa.Schema], Operator]] = {
    "filter": lambda schema: FilterOperator("it", pl.col("k") > 0, schema),
    "filter by nothing": lambda schema: FilterOperator("it", pl.lit(True), schema),
    "select": lambda schema: ProjectOperator("it", [pl.col("x"), (pl.col("k") + 1).alias("n")], schema, keep=False),
    "select as it is": lambda schema: ProjectOperator("it", [pl.col("x")], schema, keep=False),
    "with_columns": lambda schema: ProjectOperator("it", [(pl.col("k") + 1).alias("n")], schema, keep=True),
    "with_columns as it is": lambda schema: ProjectOperator("it", [pl.col("x")], schema, keep=True),
    "rename": lambda schema: ColumnsOperator("it", {"x": "x", "k": "n"}, schema),
    "with a literal": lambda schema: ProjectOperator("it", [pl.lit(1).alias("n")], schema, keep=True),
}


@pytest.mark.parametrize("name", [*UNHELD, *HELD])
@pytest.mark.parametrize("operator", BESIDE)
def test_a_column_that_is_only_handed_on_stays_as_it_is(operator: str, name: str) -> None:
    rows = rows_with({**UNHELD, **HELD}[name])
    world = World(BESIDE[operator](rows.schema))
    world.process(rows)
    ((_, made),) = world.out.batches
    assert made.schema == world.operator.schema  # type: ignore[attr-defined]  # of the operator that it is
    assert made.column("x").type == rows.column("x").type and made.column("x").equals(rows.column("x"))


@pytest.mark.parametrize("name", UNHELD)
def test_a_window_is_indifferent_to_columns_that_it_does_not_read(name: str) -> None:
    rows = rows_with(UNHELD[name])
    world = World(whole_window(tumbling("1 s"), Count())(rows.schema))
    world.process(rows)
    world.advance(MAX_WATERMARK_US)
    assert [row["x"] for row in world.out.rows()] == [1, 1]


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("operator", TOUCHING)
def test_what_polars_can_hold_comes_out_as_it_went_in(operator: str, name: str) -> None:
    rows = rows_with(HELD[name])
    try:
        world = World(TOUCHING[operator](rows.schema))
    except MidstreamError as error:
        pytest.fail(str(error))
    world.process(rows)
    if operator == "join":
        assert world.snapshot()["table:left"].table().sort_by("t").column("x").combine_chunks().equals(rows.column("x"))
        return
    world.advance(MAX_WATERMARK_US)
    out = pa.Table.from_batches([batch for _, batch in world.out.batches])
    assert out.schema == world.operator.schema  # type: ignore[attr-defined]  # of the operator that it is
    if operator not in ("accumulator", "count"):
        assert set(map(str, out.column("x").to_pylist())) == set(map(str, rows.column("x").to_pylist()))


def test_selecting_is_the_way_out() -> None:
    rows = rows_with(UNHELD["decimal256"])
    without = ProjectOperator("it", [pl.col("k"), pl.col("t")], rows.schema, keep=False)
    check_held_by_polars(without.schema, "it")
    assert without.schema.names == ["k", "t"]
