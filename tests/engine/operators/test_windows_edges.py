"""Windows at the edges: late rows, odd values, types, bad declarations, memory, state at rest."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from math import isnan
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from operator_world import World, deal_out

from midstream.engine.core.arrow_types import schema_of as arrow_schema
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import canonical_schema, canonical_type
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import (
    Accumulator,
    Aggregate,
    Columns,
    Count,
    First,
    Last,
    Max,
    Mean,
    Min,
    Sum,
)
from midstream.engine.operators.windows.window_factory import LATE, session, sliding, tumbling, window_operator

EPOCH = datetime(1970, 1, 1)


def schema_of(value: pa.DataType, unit: str = "ms", key: pa.DataType | None = None) -> pa.Schema:
    return pa.schema([("k", key or pa.large_string()), ("t", pa.timestamp(unit)), ("v", value)])


INTS = schema_of(pa.int64())


def rows(schema: pa.Schema, *values: tuple[Any, Any, Any]) -> pa.RecordBatch:
    """(key, time in ms, value)"""
    columns = list(zip(*values, strict=True)) or [(), (), ()]
    times = pa.array(list(columns[1]), pa.timestamp("ms")).cast(schema.field("t").type)
    arrays = [
        pa.array(list(columns[0]), schema.field("k").type),
        times,
        pa.array(list(columns[2]), schema.field("v").type),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def operator_of(window: Any, schema: pa.Schema = INTS, lateness: Any = 0, keys: Any = ("k",), **aggregates: Any) -> Any:
    return window_operator(
        "hourly",
        window=window,
        keys=keys,
        event_time="t",
        aggregates=aggregates or {"n": Count()},
        schema=schema,
        allowed_lateness=lateness,
    )


def results(schema: pa.Schema, values: list[Any], **aggregates: Any) -> dict[str, Any]:
    """Of one window with these values, one batch each and in one batch: both must agree."""
    found = []
    for size in (1, len(values)):
        world = World(operator_of(tumbling("1 s"), schema, **aggregates))
        numbered = [("a", i, value) for i, value in enumerate(values)]
        for start in range(0, len(values), size):
            world.process(rows(schema, *numbered[start : start + size]))
        world.advance(MAX_WATERMARK_US)
        (row,) = world.out.rows()
        found.append({name: row[name] for name in aggregates})
    assert repr(found[0]) == repr(found[1])
    return found[0]


# ---- event time ----


def test_a_window_fires_exactly_when_the_watermark_reaches_its_last_instant() -> None:
    world = World(operator_of(tumbling("10 ms")))
    world.process(rows(INTS, ("a", 0, 1), ("a", 9, 1)))
    world.advance(8_999)
    assert world.out.rows() == []
    world.advance(9_000)  # no row at 9 ms, the last instant that a column of milliseconds has, will follow
    assert [row["n"] for row in world.out.rows()] == [2]


def test_a_row_is_late_from_the_instant_at_which_its_window_is_forgotten() -> None:
    for watermark_us, is_late in ((13_999, False), (14_000, True)):
        world = World(operator_of(tumbling("10 ms"), lateness="5 ms"))
        world.advance(watermark_us)
        late = rows(INTS, ("a", 9, 1))
        world.process(late)
        assert world.out.rows(LATE) == (late.to_pylist() if is_late else [])
        assert len(world.out.rows()) == (0 if is_late else 1)


def test_a_late_row_updates_only_the_windows_that_are_not_forgotten() -> None:
    world = World(operator_of(sliding("20 ms", "10 ms"), lateness="5 ms"))
    world.process(rows(INTS, ("a", 12, 1)))
    world.advance(25_000)  # [0, 20) is forgotten at 24; [10, 30) has not fired
    world.out.clear()
    world.process(rows(INTS, ("a", 13, 1)))
    assert world.out.rows() == [] and world.out.rows(LATE) == []
    world.advance(29_000)
    assert [(row["window_start"], row["n"]) for row in world.out.rows()] == [(EPOCH + timedelta(milliseconds=10), 2)]


def test_a_late_row_that_joins_a_live_session_is_not_late() -> None:
    world = World(operator_of(session("10 ms")))
    world.process(rows(INTS, ("a", 20, 1)))
    world.advance(25_000)
    world.process(rows(INTS, ("a", 12, 1), ("a", 1, 1), ("a", 5, 1)))  # 1 is alone when it comes, 5 joins 12
    assert [row["t"] for row in world.out.rows(LATE)] == [EPOCH + timedelta(milliseconds=1)]
    world.advance(MAX_WATERMARK_US)
    (row,) = world.out.rows()
    assert (row["window_start"], row["n"]) == (EPOCH + timedelta(milliseconds=5), 3)


def test_a_session_that_has_fired_is_kept_while_a_row_that_joins_it_keeps_it_open() -> None:
    world = World(operator_of(session("10 ms"), lateness="5 ms"))
    world.process(rows(INTS, ("a", 0, 1)))
    world.advance(12_000)
    world.process(rows(INTS, ("a", 8, 1)))  # not late, and its session ends at 18 now
    world.advance(15_000)  # what ended at 10 alone would be forgotten here
    world.advance(20_000)
    found = [(row["n"], row["window_start"], row["window_end"] - EPOCH) for row in world.out.rows()]
    assert found == [(1, EPOCH, timedelta(milliseconds=10)), (2, EPOCH, timedelta(milliseconds=18))]


def test_rows_exactly_a_gap_apart_are_one_session_and_a_little_more_are_two() -> None:
    world = World(operator_of(session("10 ms")))
    world.process(rows(INTS, ("a", 0, 1), ("a", 10, 1), ("a", 21, 1)))
    world.advance(MAX_WATERMARK_US)
    assert [row["n"] for row in world.out.rows()] == [2, 1]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_windows_before_1970_and_with_an_offset_round_down_in_every_unit(unit: str) -> None:
    schema = schema_of(pa.int64(), unit)
    world = World(operator_of(tumbling("1 h", offset="15 min"), schema))
    world.process(rows(schema, ("a", -1, 1), ("a", -3_600_000 * 24 * 365 * 40, 1)))
    world.advance(14 * 60_000_000)
    assert [row["n"] for row in world.out.rows()] == [1]  # the first one ends at 00:15 after the epoch
    world.advance(15 * 60_000_000 - 1)
    first, second = world.out.rows()
    assert second["window_start"].replace(tzinfo=None) == EPOCH - timedelta(minutes=45)
    assert first["window_start"].minute == 15 and first["window_start"].year == 1930


def test_days_are_utc_days_whatever_the_zone_of_the_column() -> None:
    schema = arrow_schema([("k", pa.large_string()), ("t", pa.timestamp("us", "Europe/Berlin")), ("v", pa.int64())])
    world = World(operator_of(tumbling("1 d"), schema))
    times = [datetime(2024, 3, 31, hour, 30, tzinfo=UTC) for hour in (0, 1, 23)]
    world.process(pa.RecordBatch.from_pylist([{"k": "a", "t": t, "v": 1} for t in times], schema=schema))
    world.advance(MAX_WATERMARK_US)
    (row,) = world.out.rows()
    assert row["n"] == 3
    assert row["window_start"].astimezone(UTC) == datetime(2024, 3, 31, tzinfo=UTC)
    assert row["window_end"].astimezone(UTC) == datetime(2024, 4, 1, tzinfo=UTC)


def test_first_and_last_go_by_event_time_and_then_by_arrival() -> None:
    world = World(operator_of(tumbling("1 s"), first=First("v"), last=Last("v")))
    world.process(rows(INTS, ("a", 5, 1), ("a", 3, 2), ("a", 3, 3), ("a", 8, 4), ("a", 8, None)))
    world.process(rows(INTS, ("a", 3, 6), ("a", 8, 7), ("a", 4, 8)))
    world.advance(MAX_WATERMARK_US)
    assert [(row["first"], row["last"]) for row in world.out.rows()] == [(2, 7)]


def test_an_empty_batch_changes_nothing() -> None:
    for window in (tumbling("1 s"), session("1 s")):
        world = World(operator_of(window))
        world.process(rows(INTS))
        world.advance(MAX_WATERMARK_US)
        assert world.out.batches == []


def test_windows_without_keys_are_one_window_for_all() -> None:
    for window, count in ((tumbling("10 ms"), 2), (session("100 ms"), 3)):
        world = World(operator_of(window, keys=()))
        world.process(rows(INTS, ("a", 1, 1), ("b", 2, 1), ("c", 12, 1)))
        world = World(operator_of(window, keys=()), parts=world.snapshot())
        world.advance(MAX_WATERMARK_US)
        assert world.out.rows()[0]["n"] == count
        assert "k" not in world.out.rows()[0]
    with pytest.raises(ConfigError, match="parallelism 1"):
        World(operator_of(tumbling("1 s"), keys=()), parallelism=2)


# ---- values ----


def test_sums_are_widened() -> None:
    assert results(schema_of(pa.int8()), [100, 100, None], s=Sum("v")) == {"s": 200}
    assert results(schema_of(pa.int32()), [2**31 - 1] * 3, s=Sum("v")) == {"s": 3 * (2**31 - 1)}
    assert results(schema_of(pa.uint64()), [2**63, 2**62], s=Sum("v")) == {"s": 2**63 + 2**62}
    assert results(schema_of(pa.bool_()), [True, None, True], s=Sum("v"), m=Mean("v")) == {"s": 2, "m": 1.0}
    assert results(schema_of(pa.float32()), [0.5, 0.25], s=Sum("v")) == {"s": 0.75}
    assert results(schema_of(pa.duration("ms")), [timedelta(seconds=1)] * 2, s=Sum("v")) == {"s": timedelta(seconds=2)}
    decimals = schema_of(pa.decimal128(10, 2))
    assert results(decimals, [Decimal("0.10")] * 3, s=Sum("v"), m=Max("v")) == {
        "s": Decimal("0.30"),
        "m": Decimal("0.10"),
    }
    assert operator_of(tumbling("1 s"), schema_of(pa.int8()), s=Sum("v")).schema.field("s").type == pa.int64()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [2**63 - 1, 1]),
        (pa.int64(), [-(2**63), -(2**63), -(2**63)]),
        (pa.uint64(), [2**64 - 1, 1]),
        (pa.decimal128(38, 0), [Decimal("9" * 38)] * 4),
    ],
)
def test_a_sum_that_does_not_fit_fails_instead_of_wrapping_around(kind: pa.DataType, values: list[Any]) -> None:
    with pytest.raises(JobError, match=r"'s' does not fit .* for k='a'"):
        results(schema_of(kind), values, s=Sum("v"))


def test_a_sum_that_fits_in_the_end_is_exact_even_if_it_did_not_in_between() -> None:
    assert results(INTS, [2**63 - 1, 5, -7], s=Sum("v")) == {"s": 2**63 - 3}


def test_nan_and_null_values() -> None:
    floats = schema_of(pa.float64())
    found = results(floats, [1.0, math.nan, None], lo=Min("v"), hi=Max("v"), s=Sum("v"), n=Count("v"), m=Mean("v"))
    assert (found["lo"], found["hi"], found["n"]) == (1.0, 1.0, 2)
    assert math.isnan(found["s"]) and math.isnan(found["m"])
    found = results(floats, [None, None], lo=Min("v"), s=Sum("v"), n=Count("v"), m=Mean("v"), all=Count())
    assert found == {"lo": None, "s": 0.0, "n": 0, "m": None, "all": 2}
    assert math.isnan(results(floats, [math.nan], lo=Min("v"))["lo"])


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (pa.int8(), [1, -2]),
        (pa.uint64(), [2**64 - 1, 5]),
        (pa.bool_(), [True, False]),
        (pa.date32(), [date(2020, 1, 1), date(1960, 1, 1)]),
        (pa.date64(), [date(2020, 1, 1), date(1960, 1, 1)]),
        (pa.time32("s"), [time(1), time(2)]),
        (pa.time64("us"), [time(1), time(2)]),
        (pa.timestamp("us"), [EPOCH, EPOCH + timedelta(1)]),
        (pa.duration("ms"), [timedelta(1), timedelta(2)]),
        (pa.large_binary(), [b"x", b""]),
        (pa.large_string(), ["ü", ""]),
    ],
)
def test_keys_of_every_type_survive_a_rescale(kind: pa.DataType, keys: list[Any]) -> None:
    schema = canonical_schema(schema_of(pa.int64(), key=kind))  # as sources give it
    world = World(operator_of(tumbling("1 s"), schema))
    world.process(rows(schema, *[(key, 1, 1) for key in keys]))
    snapshot, found = world.snapshot(), []
    for subtask in range(2):
        parts = deal_out([snapshot], key_group_range(subtask, 2, 16))
        part = World(operator_of(tumbling("1 s"), schema), subtask=subtask, parallelism=2, parts=parts)
        part.advance(MAX_WATERMARK_US)
        assert all(batch.schema.field("k").type == canonical_type(kind) for _, batch in part.out.batches)
        found += [row["k"] for row in part.out.rows()]
    assert sorted(found, key=repr) == sorted(keys, key=repr)


def test_null_keys_and_null_times_are_refused_with_their_row() -> None:
    for window in (tumbling("1 s"), session("1 s")):
        world = World(operator_of(window))
        with pytest.raises(JobError, match=r"operator 'hourly': key 'k' is null in the row {'k': None, "):
            world.process(rows(INTS, ("a", 1, 1), (None, 1, 1)))
        with pytest.raises(
            JobError, match=r"operator 'hourly': event-time column 't' is null in the row {'k': 'a', 't': None, 'v': 1}"
        ):
            world.process(rows(INTS, ("a", 1, 1), ("a", None, 1)))


# ---- aggregates of the user's own ----


class Spread(Aggregate):
    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"low": pl.col(self.columns[0]).min(), "high": pl.col(self.columns[0]).max()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"low": part("low").min(), "high": part("high").max()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("high") - part("low")


class Distinct(Accumulator[set[int]]):
    columns = ("v",)
    type = pa.int64()

    def init(self) -> set[int]:
        return set()

    def add(self, accumulator: set[int], row: dict[str, object]) -> set[int]:
        value = row["v"]
        assert isinstance(value, int)
        if value == 13:
            raise ValueError("unlucky")
        accumulator.add(value)
        return accumulator

    def merge(self, first: set[int], second: set[int]) -> set[int]:
        return first | second

    def result(self, accumulator: set[int]) -> object:
        return len(accumulator)


class Reuses(Accumulator[list[int]]):
    """Gives the same list for each key."""

    columns = ("v",)
    type = pa.list_(pa.int64())

    def __init__(self) -> None:
        self.given: list[int] = []

    def init(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], row: dict[str, object]) -> list[int]:
        assert isinstance(row["v"], int)
        return [*accumulator, row["v"]]

    def merge(self, first: list[int], second: list[int]) -> list[int]:
        return first + second

    def result(self, accumulator: list[int]) -> object:
        self.given[:] = accumulator
        return self.given


def test_a_result_that_is_used_again_for_the_next_key_is_taken_as_it_is() -> None:
    world = World(operator_of(tumbling("1 s"), all=Reuses()))
    world.process(rows(INTS, ("a", 1, 1), ("a", 2, 2), ("b", 3, 3)))
    world.advance(MAX_WATERMARK_US)
    assert {row["k"]: row["all"] for row in world.out.rows()} == {"a": [1, 2], "b": [3]}


def test_aggregates_of_the_users_own() -> None:
    assert results(INTS, [3, 9, 3, 4], spread=Spread("v"), distinct=Distinct()) == {"spread": 6, "distinct": 3}
    world = World(operator_of(session("1 s"), distinct=Distinct()))
    world.process(rows(INTS, ("a", 1, 1), ("a", 2000, 2)))
    world = World(operator_of(session("1 s"), distinct=Distinct()), parts=world.snapshot())
    world.process(rows(INTS, ("a", 1001, 2)))
    world.advance(MAX_WATERMARK_US)
    assert [row["distinct"] for row in world.out.rows()] == [2]


def test_an_accumulator_that_raises_names_operator_and_method_and_keeps_the_users_traceback() -> None:
    world = World(operator_of(tumbling("1 s"), d=Distinct()))
    with pytest.raises(
        JobError, match=r"operator 'hourly': aggregate 'd': Distinct.add raised ValueError: unlucky"
    ) as e:
        world.process(rows(INTS, ("a", 1, 13)))
    assert 'raise ValueError("unlucky")' in "".join(traceback.format_exception(e.value))


# ---- bad declarations ----


def test_bad_declarations_are_refused_immediately() -> None:
    text = schema_of(pa.large_string())
    with pytest.raises(SchemaError, match=r"key column 'x' is not in the stream's schema \(k, t, v\)"):
        operator_of(tumbling("1 s"), keys=("x",))
    with pytest.raises(SchemaError, match="cannot be a key"):
        operator_of(tumbling("1 s"), schema_of(pa.float64()), keys=("v",))
    with pytest.raises(SchemaError, match=r"aggregate 's': column 'x' is not in"):
        operator_of(tumbling("1 s"), s=Sum("x"))
    with pytest.raises(SchemaError, match=r"sum of column 'v', which is large_string"):
        operator_of(tumbling("1 s"), text, s=Sum("v"))
    with pytest.raises(SchemaError, match=r"mean of column 'v'"):
        operator_of(tumbling("1 s"), text, s=Mean("v"))
    with pytest.raises(SchemaError, match="have no order"):
        operator_of(tumbling("1 s"), schema_of(pa.large_list(pa.int64())), s=Max("v"))
    with pytest.raises(ConfigError, match="two output columns are called 'k'"):
        operator_of(tumbling("1 s"), k=Count())
    with pytest.raises(
        ConfigError, match="an output column must not be called '__end', as one that windows add is; rename it"
    ):
        operator_of(tumbling("1 s"), __end=Count())
    with pytest.raises(ConfigError, match="is not an aggregate"):
        operator_of(tumbling("1 s"), n=len)
    with pytest.raises(ConfigError, match="finer than the event time 't'"):
        operator_of(tumbling("500 us"))
    with pytest.raises(SchemaError, match="not a timestamp"):
        window_operator("w", window=tumbling("1 s"), keys=["k"], event_time="v", aggregates={"n": Count()}, schema=INTS)
    with pytest.raises(ConfigError, match="longer than size"):
        sliding("1 s", "2 s")
    with pytest.raises(ConfigError, match="longer than 0"):
        tumbling(0)
    with pytest.raises(ConfigError, match="longer than 0"):
        session("0 s")


def test_state_of_other_aggregates_is_refused() -> None:
    world = World(operator_of(tumbling("1 s")))
    world.process(rows(INTS, ("a", 1, 1)))
    with pytest.raises(JobError, match=r"column 's:sum' of the state in the checkpoint is missing"):
        World(operator_of(tumbling("1 s"), s=Sum("v")), parts=world.snapshot())


# ---- slices, memory, snapshots ----


def test_a_large_window_fires_in_bounded_pieces_and_a_snapshot_in_between_loses_nothing() -> None:
    schema = schema_of(pa.int64(), key=pa.int64())
    keys = 300_000
    batch = pa.RecordBatch.from_arrays(
        [pa.array(np.arange(keys)), pa.array(np.zeros(keys, "M8[ms]")), pa.array(np.ones(keys, np.int64))],
        schema=schema,
    )
    world = World(operator_of(tumbling("1 s"), schema), max_parallelism=128)
    world.clock.step_s = 0.02
    world.process(batch)
    assert not world.operator.advance_watermark(MAX_WATERMARK_US)
    sizes = [batch.num_rows for _, batch in world.out.batches]
    restored = World(operator_of(tumbling("1 s"), schema), max_parallelism=128, parts=world.snapshot())
    assert world.advance(MAX_WATERMARK_US) > 2
    restored.advance(MAX_WATERMARK_US)
    sizes += [batch.num_rows for _, batch in world.out.batches[len(sizes) :]]
    assert max(sizes) < 2 * window_base.PIECE_ROWS
    first_slice = to_list(world.out.batches[0][1].column("k"))
    rest = [key for _, batch in restored.out.batches for key in to_list(batch.column("k"))]
    assert sorted(first_slice + rest) == list(range(keys))


def test_state_is_bounded_by_keys_and_open_windows_not_by_rows() -> None:
    for window in (tumbling("1 s"), sliding("1 s", "250 ms"), session("5 ms")):
        world = World(operator_of(window))
        for second in range(40):
            for part in range(20):
                millis = second * 1000 + part * 50
                world.process(rows(INTS, *[(f"k{i % 50}", millis + i % 50, 1) for i in range(500)]))
            world.advance((second * 1000 + 900) * 1000)
        assert sum(part.table().num_rows for part in world.snapshot().values()) < 50 * 64 + 64


def test_a_large_window_of_several_panes_is_merged_in_pieces_and_fires_once_in_each_key_group() -> None:
    schema = schema_of(pa.int64(), key=pa.int64())
    keys = np.arange(100_000)
    window = sliding("2 s", "1 s")
    world = World(operator_of(window, schema), max_parallelism=128)
    for millis in (0, 1000):
        times = np.full(len(keys), millis).astype("M8[ms]")
        world.process(pa.RecordBatch.from_arrays([pa.array(keys), pa.array(times), pa.array(keys)], schema=schema))
    world.advance(1_000_000 - 1)
    before = len(world.out.batches)
    world.clock.step_s = 0.02
    assert not world.operator.advance_watermark(2_000_000 - 1)
    first = [batch for _, batch in world.out.batches[before:]]
    restored = World(operator_of(window, schema), max_parallelism=128, parts=world.snapshot())
    restored.advance(2_000_000 - 1)
    made = pa.Table.from_batches([*first, *(batch for _, batch in restored.out.batches)]).sort_by("k")
    assert len(first) < len(restored.out.batches)
    assert made.column("k").to_numpy().tolist() == keys.tolist()
    assert set(made.column("n").to_pylist()) == {2}


def test_unchanged_large_parts_keep_their_chunk_between_snapshots() -> None:
    schema = schema_of(pa.int64(), key=pa.int64())
    keys = np.arange(20_000)
    world = World(operator_of(tumbling("1 s"), schema))
    for number in range(2):
        times = np.full(len(keys), number * 1000).astype("M8[ms]")
        world.process(pa.RecordBatch.from_arrays([pa.array(keys), pa.array(times), pa.array(keys)], schema=schema))
    first = {chunk.id: chunk.table for chunk in world.snapshot()["parts"].chunks}
    world.process(rows(schema, (1, 1, 1)))
    second = {chunk.id: chunk.table for chunk in world.snapshot()["parts"].chunks}
    assert len(first) == 2 and first.keys() < second.keys() and len(second) == 3
    assert all(second[chunk_id].equals(table) for chunk_id, table in first.items())


def test_a_snapshot_completed_later_is_that_of_its_moment() -> None:
    world = World(operator_of(tumbling("1 s"), s=Sum("v")))
    world.process(rows(INTS, ("a", 1, 1)))
    snapshot = world.operator.snapshot(1)
    world.process(rows(INTS, ("a", 2, 10)))
    world.advance(MAX_WATERMARK_US)
    restored = World(operator_of(tumbling("1 s"), s=Sum("v")), parts=snapshot.complete().parts)
    restored.advance(MAX_WATERMARK_US)
    assert [row["s"] for row in restored.out.rows()] == [1]


def test_state_at_rest_is_a_readable_table() -> None:
    world = World(operator_of(tumbling("1 s"), total=Sum("v")))
    world.process(rows(INTS, ("a", 1500, 7)))
    table = world.snapshot()["parts"].table()
    assert table.column_names == ["__key_group", "__pane", "k", "total:sum", "total:rough"]
    assert table.column("__pane").to_pylist() == [EPOCH + timedelta(seconds=1)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, None], {"sum": 0.0, "mean": None, "min": None, "max": None, "first": None, "last": None, "n": 0}),
        ([1.5, None], {"sum": 1.5, "mean": 1.5, "min": 1.5, "max": 1.5, "first": 1.5, "last": None, "n": 1}),
        ([2.0, float("nan")], {"sum": "nan", "mean": "nan", "min": 2.0, "max": 2.0, "first": 2.0, "last": "nan", "n": 2}),
        ([float("nan"), None], {"sum": "nan", "mean": "nan", "min": "nan", "max": "nan", "first": "nan", "last": None, "n": 1}),
    ],
)  # fmt: skip
def test_nulls_and_nan_are_what_the_documentation_states(values: list[float | None], expected: dict[str, Any]) -> None:
    schema = arrow_schema([("t", pa.timestamp("ms")), ("v", pa.float64())])
    aggregates: dict[str, Aggregate] = {"sum": Sum("v"), "mean": Mean("v"), "min": Min("v"), "max": Max("v")}
    aggregates |= {"first": First("v"), "last": Last("v"), "n": Count("v")}
    world = World(
        window_operator("w", window=tumbling("1 s"), keys=[], event_time="t", aggregates=aggregates, schema=schema)
    )
    for at, value in enumerate(values):
        world.process(
            pa.record_batch([pa.array([at], pa.timestamp("ms")), pa.array([value], pa.float64())], schema=schema)
        )
    world.advance(MAX_WATERMARK_US)
    (row,) = world.out.rows()
    made = {name: row[name] for name in expected}
    assert {name: "nan" if value is not None and isnan(value) else value for name, value in made.items()} == expected


# ---- the ends of time ----

WINDOWS = {"tumbling": tumbling("10 s", "3 s"), "sliding": sliding("20 s", "10 s"), "session": session("10 s")}


def at(unit: str, *times: int) -> pa.RecordBatch:
    """Times since 1970 in that unit."""
    schema = schema_of(pa.int64(), unit)
    columns = [
        pa.array(["a"] * len(times), schema.field("k").type),
        pa.array(times, pa.int64()).view(pa.timestamp(unit)),
    ]
    return pa.RecordBatch.from_arrays([*columns, pa.array(range(len(times)), pa.int64())], schema=schema)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("time", [-(2**63), -(2**63) + 1, 2**63 - 1, 2**63 - 10])
def test_a_time_that_int64_could_not_add_a_window_to_is_refused_with_its_row(window: str, unit: str, time: int) -> None:
    world = World(operator_of(WINDOWS[window], schema_of(pa.int64(), unit)))
    with pytest.raises(JobError, match=rf"^operator 'hourly': event-time column 't' is {time} .*'v': 1.*; times from"):
        world.process(at(unit, 0, time))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("unit", "first", "last"),
    [
        ("ms", -62_135_596_800_000, 253_402_300_799_999),
        ("us", -62_135_596_800_000_000, 253_402_300_799_999_999),
        ("ns", -(2**63) + 30 * 10**9, 2**63 - 1 - 30 * 10**9),
    ],
)
def test_the_first_and_the_last_time_that_are_taken_are_in_their_windows(
    window: str, unit: str, first: int, last: int
) -> None:
    world = World(operator_of(WINDOWS[window], schema_of(pa.int64(), unit)))
    world.process(at(unit, last, first))
    world.advance(MAX_WATERMARK_US)
    found = [
        tuple(column.cast(pa.int64()).to_pylist()[row] for column in (batch["window_start"], batch["window_end"]))
        for _, batch in world.out.batches
        for row in range(batch.num_rows)
    ]
    second = {"ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    expected = []
    for native in (first, last):
        if window == "session":
            expected.append((native, native + 10 * second))
        elif window == "tumbling":
            start = (native - 3 * second) // (10 * second) * 10 * second + 3 * second
            expected.append((start, start + 10 * second))
        else:
            start = native // (10 * second) * 10 * second
            expected += [(start - 10 * second, start + 10 * second), (start, start + 20 * second)]
    assert sorted(found) == expected


def test_windows_that_no_two_times_are_apart_are_refused_when_they_are_declared() -> None:
    for window in (tumbling("36525 d"), session("73050 d")):
        with pytest.raises(
            ConfigError, match=r"^operator 'hourly': .* d are longer than event times of timestamp\[ns\]"
        ):
            operator_of(window, schema_of(pa.int64(), "ns"))
        operator_of(window, INTS)


def test_a_column_cannot_become_the_event_time_with_values_that_are_no_times() -> None:
    schema = schema_of(pa.int64(), "us")
    world = World(TimestampsOperator("times", "t", WatermarkStrategy.monotonous(), schema))
    with pytest.raises(
        JobError, match=r"'t' is 253402300800000000 microseconds .*'v': 1.* to 9999-12-31T23:59:59.999999"
    ):
        world.process(at("us", 0, 253_402_300_800_000_000))
    assert world.out.batches == []
