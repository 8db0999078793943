"""Folds against plain Python, and windows with them against windows without."""

from __future__ import annotations

import math
import random
from collections import Counter as Counts
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from operator_world import World, restored

from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.functions.running_aggregate import running_aggregate_operator
from midstream.engine.operators.windows import dense_groupby as folds
from midstream.engine.operators.windows.aggregates import ArgMax, ArgMin, Count, First, Last, Max, Mean, Min, Sum
from midstream.engine.operators.windows.dense_groupby import DenseGroupBy, fold
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.moments import Covariance, Variance
from midstream.engine.operators.windows.sketches import ApproxCountDistinct, Quantile
from midstream.engine.operators.windows.value_lists import Collect, TopN
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_factory import Window, session, sliding, tumbling, window_operator

KEYS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 0.1, 1e300)
TYPES: dict[str, pa.DataType] = {
    "k": pa.int32(),
    "t": pa.timestamp("ms"),
    "i": pa.int64(),
    "f": pa.float64(),
    "b": pa.bool_(),
}
SCHEMA = pa.schema(TYPES)
MAX_PARALLELISM = 8


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "ROWS_MIN", 1)


@pytest.mark.parametrize("seed", range(300))
def test_what_plain_python_computes(seed: int) -> None:
    drawn = random.Random(f"folds {seed}")
    rows, by = drawn.choice((1, 2, 10, 200)), ["a", "b"][: drawn.choice((1, 1, 2))]
    dtypes = {name: drawn.choice(KEYS) for name in by}
    lows = {name: drawn.choice((_least(dtypes[name]), _most(dtypes[name]) - 4, 0)) for name in by}
    table: dict[str, list[Any]] = {
        name: [lows[name] + drawn.randrange(drawn.choice((1, 5))) for _ in range(rows)] for name in by
    }
    number = drawn.choice(KEYS)
    table["i"] = [drawn.choice((_least(number), _most(number), drawn.randint(0, 100))) for _ in range(rows)]
    table["f"] = [drawn.choice((drawn.choice(ODD), drawn.gauss(0, 1e6))) for _ in range(rows)]
    frame = pl.DataFrame(table, schema={**dtypes, "i": number, "f": pl.Float64})
    wide = pl.UInt64() if number.is_unsigned_integer() else pl.Int64()
    wanted = {
        "n": DenseGroupBy("count"),
        "si": DenseGroupBy("sum", "i", wide),
        "sf": DenseGroupBy("sum", "f"),
        "li": DenseGroupBy("min", "i"),
        "hi": DenseGroupBy("max", "i"),
        "lf": DenseGroupBy("min", "f"),
        "hf": DenseGroupBy("max", "f"),
    }
    found = fold(frame, by, wanted)
    if found is None:
        spans = [max(table[name]) - min(table[name]) + 1 for name in by]
        assert math.prod(spans) > folds.GROUPS_PER_ROW * rows
        return
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(zip(*(table[name] for name in by), strict=True)):
        groups.setdefault(key, []).append(row)
    expected = []
    for key in sorted(groups):
        integers, floats = ([table[name][row] for row in groups[key]] for name in "if")
        numbers = [each for each in floats if not math.isnan(each)] or [math.nan]
        total = sum(integers) % 2**64
        if wide == pl.Int64() and total >= 2**63:
            total -= 2**64
        extremes = (min(integers), max(integers), min(numbers), max(numbers))
        expected.append((*key, len(integers), total, _added(floats), *extremes))
    assert [_comparable(row) for row in found.rows()] == [_comparable(row) for row in expected]
    of_polars = frame.group_by(by).agg(each.expression.alias(name) for name, each in wanted.items())
    assert found.schema == of_polars.schema
    assert found.drop("sf", *by).equals(of_polars.sort(by).drop("sf", *by))


def test_only_dense_integers_without_nulls_are_folded() -> None:
    plain = pl.DataFrame({"k": [1, 2, 1], "v": [1.0, 2.0, 3.0]})
    total = {"v": DenseGroupBy("sum", "v")}
    assert fold(plain, ["k"], total) is not None
    for name, values in {
        "k": (["a", "b", "a"], [1.0, 2.0, 1.0], [1, None, 1], [1, 2, 100], [True, False, True]),
        "v": ([1.0, None, 3.0], ["a", "b", "c"]),
    }.items():
        for other in values:
            assert fold(plain.with_columns(pl.Series(name, other, strict=False)), ["k"], total) is None, (name, other)
    assert fold(plain.with_columns(pl.col("v").cast(pl.Decimal(10, 2))), ["k"], total) is None
    assert fold(plain.clear(), ["k"], total) is None


class Doubled(Sum):
    """A sum with expressions of its own."""

    def partial(self, event_time: pl.Expr) -> Any:
        return {name: 2 * each for name, each in super().partial(event_time).items()}


def test_a_subclass_with_expressions_of_its_own_is_not_folded() -> None:
    rows = pl.DataFrame(_batch(random.Random(1), 0))
    for aggregate, factor in ((Sum("f"), 1), (Doubled("f"), 2)):
        aggregation = WindowAggregation("w", ["k"], "t", {"total": aggregate}, SCHEMA)
        total = aggregation.reduce(rows.select(aggregation.columns)).get_column("total:sum").sum()
        assert total == factor * rows.get_column("f").sum()


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_of_floats_does_not_depend_on_the_other_keys(seed: int) -> None:
    drawn = random.Random(f"sums {seed}")
    aggregation = WindowAggregation("w", ["k"], "t", {"sum": Sum("f"), "mean": Mean("f"), "n": Count()}, SCHEMA)
    batches = [_batch(drawn, 0) for _ in range(6)]
    parts = [aggregation.reduce(pl.DataFrame(batch).select(aggregation.columns)) for batch in batches]
    far = parts[0].head(1).with_columns(pl.lit(2**31 - 1, pl.Int32).alias("k"))
    own = [part.with_columns(pl.col("sum:sum") * drawn.random()) for part in parts]
    together = aggregation.merge([*own, far]).filter(pl.col("k") != 2**31 - 1)
    assert aggregation.merge(own).sort("k").equals(together.sort("k"))


VALUES: dict[pa.DataType, list[Any]] = {
    **{
        kind: [3, 1, 2]
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float16(), pa.float32(), pa.float64(), pa.duration("ms"), pa.timestamp("us"), pa.date32()),
            *(pa.time64("us"), pa.decimal128(20, 2), pa.decimal256(20, 2)),
        )
    },
    pa.bool_(): [True, False, True],
    pa.large_string(): ["b", "a", "c"],
    pa.large_binary(): [b"b", b"a", b"c"],
    pa.large_list(pa.int64()): [[1], [], [2, 3]],
    pa.struct([("x", pa.int64())]): [{"x": 1}, {"x": 2}, {"x": 3}],
    pa.null(): [None, None, None],
}


@pytest.mark.parametrize("has_nulls", [False, True])
@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize("aggregate", [Count, Sum, Min, Max, Mean])
def test_each_aggregate_of_each_type_is_the_same_without(
    monkeypatch: pytest.MonkeyPatch, aggregate: Callable[[str], Any], kind: pa.DataType, has_nulls: bool
) -> None:
    found = []
    for rows_min in (1, 10**9):
        monkeypatch.setattr(folds, "ROWS_MIN", rows_min)
        found.append(_outcome(aggregate, kind, VALUES[kind] + [None] * has_nulls))
    assert found[0] == found[1]


def _outcome(aggregate: Callable[[str], Any], kind: pa.DataType, values: list[Any]) -> Any:
    """Return the rows that a window emits, or the words with which it is refused."""
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("t", pa.timestamp("ms")), pa.field("v", kind)])
    try:
        made = window_operator(
            "w", window=tumbling("10 ms"), keys=["k"], event_time="t", aggregates={"v": aggregate("v")}, schema=schema
        )
    except SchemaError as error:
        return str(error)
    world = World(made, max_parallelism=MAX_PARALLELISM)
    column: pa.Array[Any] = (
        pa.nulls(len(values)) if pa.types.is_null(kind) else pa.array(values, _plain(kind)).cast(kind)
    )
    columns: list[pa.Array[Any]] = [pa.array([row % 2 for row in range(len(values))]), pa.array([0] * len(values))]
    arrays = [columns[0], columns[1].view(pa.timestamp("ms")), column]
    for _ in range(3):
        world.process(pa.RecordBatch.from_arrays(arrays, schema=schema))
    world.advance(MAX_WATERMARK_US)
    return sorted(map(str, world.out.rows()))


def _itself(chosen: Callable[..., Any]) -> Callable[[str], Any]:
    return lambda column: chosen(column, column)


@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize(
    "aggregate",
    [
        *(Count, Sum, Min, Max, Mean, First, Last, CountDistinct, Variance),
        *(pytest.param(_itself(each), id=each.__name__) for each in (ArgMin, ArgMax, Covariance)),
        *(ApproxCountDistinct, Collect),
        *(
            pytest.param(made, id=name)
            for name, made in {
                "Combinations": _itself(CountDistinct),
                "FirstToArrive": partial(First, order="arrival"),
                "LastToArrive": partial(Last, order="arrival"),
                "Median": lambda column: Quantile(column, 0.5),
                "SmallestTwo": lambda column: TopN(column, 2, descending=False),
                "FirstTwo": partial(Collect, limit=2),
            }.items()
        ),
    ],
)
def test_the_last_row_of_a_running_aggregate_has_the_value_of_a_window(
    aggregate: Callable[[str], Any], kind: pa.DataType
) -> None:
    """Whether the rows come one by one, or together and, for the window, combined; also of some of the rows."""
    values = [*VALUES[kind], None, *VALUES[kind], None]
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("t", pa.timestamp("ms")), pa.field("v", kind)])
    made = aggregate("v")
    some = copy(made)
    some._where = pl.col("t").dt.millisecond() % 2 == 0
    aggregates = {"all": made, "some": some}
    shared: dict[str, Any] = {"keys": ["k"], "event_time": "t", "aggregates": aggregates, "schema": schema}
    arrays: list[pa.Array[Any]] = [
        pa.array([row // 2 % 2 for row in range(len(values))]),
        pa.array(range(len(values))).view(pa.timestamp("ms")),
        pa.nulls(len(values)) if pa.types.is_null(kind) else pa.array(values, _plain(kind)).cast(kind),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    found: list[Any] = []
    for cut in (1, len(values)):
        try:
            makers = [window_operator("w", window=tumbling("1 s"), **shared), running_aggregate_operator("w", **shared)]
        except SchemaError:
            with pytest.raises(SchemaError, match="operator 'w': "):
                running_aggregate_operator("w", **shared)
            return
        for world in (World(each, max_parallelism=MAX_PARALLELISM) for each in makers):
            combiner = world.operator.combiner(()) if cut > 1 else None
            for start in range(0, len(values), cut):
                rows = batch.slice(start, cut)
                world.process(rows if combiner is None else combiner.combine(rows))
            world.advance(MAX_WATERMARK_US)
            last = {(row["k"], name): row[name] for row in world.out.rows() for name in aggregates}
            found.append({key: round(value, 9) if isinstance(value, float) else value for key, value in last.items()})
    assert len(found[0]) == 4
    assert found == [found[0]] * 4


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type that pyarrow makes of the plain values, and casts to `kind`."""
    if pa.types.is_time64(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) or pa.types.is_decimal(kind) or pa.types.is_float16(kind) else kind


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("window", [tumbling("10 ms"), sliding("20 ms", "5 ms"), session("3 ms")], ids=str)
def test_windows_are_the_same_without(monkeypatch: pytest.MonkeyPatch, window: Window, seed: int) -> None:
    calls = {True: 0, False: 0}
    original = folds.fold

    def counted(*arguments: Any) -> Any:
        found = original(*arguments)
        calls[found is not None] += 1
        return found

    monkeypatch.setattr("midstream.engine.operators.windows.window_aggregation.fold", counted)
    folded = _results(window, seed)
    assert calls[True], "folds must be used for this test to say anything"
    monkeypatch.setattr(folds, "ROWS_MIN", 10**9)
    calls[True] = 0
    assert _results(window, seed) == folded
    assert not calls[True]


def _results(window: Window, seed: int) -> Counts[Any]:
    drawn = random.Random(f"folded windows {seed}")

    def make() -> Any:
        aggregates = {
            "n": Count(),
            "nf": Count("f"),
            "si": Sum("i"),
            "sf": Sum("f"),
            "sb": Sum("b"),
            "low": Min("i"),
            "high": Max("f"),
            "mean": Mean("i"),
        }
        return window_operator(
            "w",
            window=window,
            keys=["k"],
            event_time="t",
            aggregates=aggregates,
            schema=SCHEMA,
            allowed_lateness="5 ms",
        )

    worlds, out, now = [World(make(), max_parallelism=MAX_PARALLELISM)], list[Any](), 0
    for _ in range(12):
        batch = _batch(drawn, now)
        if drawn.random() < 0.3:
            batch = make().combiner(()).combine(batch)
        owners = subtask_of(key_groups(batch, ("k",), MAX_PARALLELISM), len(worlds), MAX_PARALLELISM)
        for subtask, world in enumerate(worlds):
            world.process(batch.filter(pa.array(owners == subtask)))
        now += drawn.randrange(8)
        for world in worlds:
            world.advance(now * 1000)
        if drawn.random() < 0.2:
            out += [row for world in worlds for row in world.out.rows()]
            snapshots = [world.snapshot() for world in worlds]
            worlds = restored(make, snapshots, drawn.randint(1, 3), MAX_PARALLELISM)
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
        out += world.out.rows()
    return Counts(tuple(row.values()) for row in out)


def _batch(drawn: random.Random, now: int) -> pa.RecordBatch:
    rows = drawn.choice((1, 8, 40))
    values: dict[str, list[Any]] = {
        "k": [drawn.randrange(-3, 4) for _ in range(rows)],
        "t": [now + drawn.randrange(-8, 20) for _ in range(rows)],
        "i": [drawn.choice((drawn.randrange(-9, 9), 2**40, -(2**40))) for _ in range(rows)],
        "f": [drawn.randrange(-99, 99) / 4 for _ in range(rows)],
        "b": [drawn.random() < 0.5 for _ in range(rows)],
    }
    arrays: list[Any] = [pa.array(values[field.name], field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _least(dtype: Any) -> int:
    return int(pl.select(dtype.min()).item())


def _most(dtype: Any) -> int:
    return int(pl.select(dtype.max()).item())


def _added(floats: list[float]) -> float:
    total = np.float64(-0.0)
    with np.errstate(all="ignore"):
        for each in floats:
            total += each
    return float(total)


def _comparable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row in which NaN is equal to itself."""
    return tuple("NaN" if isinstance(each, float) and math.isnan(each) else each for each in row)
