"""Windows by count, against plain Python: all cuts, restores at another parallelism, with and without event time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored
from test_running_aggregates import Joined, Spread

from effort import examples
from midstream import Environment, WatermarkStrategy, testing, tumbling
from midstream.engine.core.errors import ConfigError, JobError, StorageError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions import count_windows
from midstream.engine.operators.functions.count_windows import count_window_operator
from midstream.engine.operators.windows.aggregates import Count, First, Last, Sum
from midstream.engine.operators.windows.value_lists import Collect
from midstream.engine.operators.windows.window_factory import CountWindow, count
from midstream.engine.state.state_parts import KEY_GROUP, Chunk

AGGREGATES: dict[str, Any] = {
    "n": Count(),
    "sum": Sum("i"),
    "first": First("i"),
    "spread": Spread(),
    "text": Joined(),
    "last": Last("i", order="arrival"),
    "all": Collect("i"),
}
Row = tuple[Any, int, int]


def operator(rows: int, time: pa.DataType | None, key: pa.DataType) -> Any:
    return count_window_operator(
        "w",
        window=count(rows),
        keys=["k"],
        event_time=None if time is None else TimeColumn("t"),
        aggregates=AGGREGATES,
        schema=schema_of(time, key),
    )


def schema_of(time: pa.DataType | None, key: pa.DataType) -> pa.Schema:
    fields = [("k", key), ("t", time or pa.int64()), ("i", pa.int64()), ("s", pa.large_string())]
    return pa.schema([pa.field(name, kind) for name, kind in fields])


def expected(rows: list[Row], size: int, has_time: bool) -> list[tuple[Any, ...]]:
    """The results in the order in which windows are completed."""
    begun: dict[Any, list[Row]] = {}
    made = []
    for row in rows:
        window = begun.setdefault(row[0], [])
        window.append(row)
        if len(window) == size:
            del begun[row[0]]
            times = [t if has_time else 0 for _, t, _ in window]
            values = [i for *_, i in window]
            by_time = [i for _, i in sorted(zip(times, values, strict=True), key=lambda each: each[0])]
            collected = [i for _, i in sorted(zip(times, values, strict=True))]
            bounds = (min(times), max(times)) if has_time else ()
            text = "".join(map(str, values))
            spread = max(values) - min(values)
            made.append((row[0], *bounds, size, sum(values), by_time[0], spread, text, values[-1], collected))
    return made


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(-9, 9)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([None, pa.timestamp("ms"), pa.timestamp("ns", "Asia/Tokyo")]),
    st.sampled_from([pa.int64(), pa.large_string(), pa.timestamp("ns")]),
)
def test_windows_are_those_of_plain_python_however_batches_are_cut(
    rows: list[Row],
    size: int,
    cut: int,
    restore_at: int,
    parallelism: int,
    time: pa.DataType | None,
    key: pa.DataType,
) -> None:
    schema = schema_of(time, key)

    def make() -> Any:
        return operator(size, time, key)

    if key == pa.large_string():
        rows = [(str(k), t, i) for k, t, i in rows]
    worlds = [World(make(), max_parallelism=4)]
    out: list[tuple[Any, ...]] = []

    def collect() -> None:
        for world in worlds:
            for _, batch in world.out.batches:
                names = [name for name in batch.schema.names if name.startswith("window") or name == "k"]
                plain = [
                    batch.column(name).cast(pa.int64()).to_pylist()
                    if pa.types.is_timestamp(batch.schema.field(name).type)
                    else batch.column(name).to_pylist()
                    for name in [*names, *AGGREGATES]
                ]
                out.extend(zip(*plain, strict=True))
            world.out.clear()

    for number, start in enumerate(range(0, len(rows), cut)):
        if number == restore_at:
            worlds = restored(make, [world.snapshot() for world in worlds], parallelism, 4)
        keys, times, values = map(list, zip(*rows[start : start + cut], strict=True))
        of_keys = pa.array(keys, key) if key == pa.large_string() else pa.array(keys, pa.int64()).view(key)
        of_times = pa.array(times, pa.int64()).view(time or pa.int64())
        arrays: list[Any] = [of_keys, of_times, pa.array(values), pa.array(list(map(str, values)), pa.large_string())]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        owners = subtask_of(key_groups(batch, ("k",), 4), len(worlds), 4)
        for subtask, world in enumerate(worlds):
            world.process(batch.filter(pa.array(owners == subtask)))
        collect()
    due = expected(rows, size, time is not None)
    if len(worlds) == 1:
        assert out == due
    assert sorted(map(str, out)) == sorted(map(str, due))
    held = [world.snapshot().get("table:parts") for world in worlds]
    assert sum(part.table().num_rows for part in held if part is not None) <= 4


def test_wrong_uses_are_refused() -> None:
    for wrong in (0, -1, 1.0, True, "2", 2**70):
        with pytest.raises(ConfigError, match="is not a whole number of rows from 1 to"):
            count(wrong)  # type: ignore[arg-type]
    env = Environment()
    stream = env.from_collection([{"k": 1, "x": 2}])
    with pytest.raises(ConfigError, match=r"window_all: windows by count are of the rows of a key; call key_by"):
        stream.window_all(count(2))  # type: ignore[arg-type]
    windowed = stream.key_by("k").window(count(2))
    with pytest.raises(ConfigError, match=r"top: windows by count have aggregate\(\) only"):
        windowed.top(1, by="x")
    with pytest.raises(ConfigError, match="allowed_lateness: windows by count"):
        windowed.allowed_lateness("1 s")
    with pytest.raises(JobError, match=r"is not a window; use .* count\(100\)"):
        stream.key_by("k").window(100)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="the stream has no event time"):
        stream.key_by("k").window(tumbling("1 s"))
    made = [operator(rows, None, pa.int64()).state_settings() for rows in (2, 3)]
    assert made[0] != made[1]


def test_windows_of_time_follow_windows_by_count() -> None:
    env = Environment()
    rows = [{"k": "a", "at": datetime(2024, 1, 1, 0, n), "x": n} for n in range(7)]
    stream = env.from_collection(rows).with_watermarks("at", WatermarkStrategy.bounded("0 s"))
    pairs = stream.key_by("k").window(count(2)).aggregate(total=Sum("x"))
    hours = pairs.key_by("k").window(tumbling("1 h")).aggregate(n=Count(), total=Sum("total"))
    assert [(row["n"], row["total"]) for row in testing.run(hours).rows] == [(3, 15)]
    assert CountWindow(2) == count(2)


@pytest.mark.parametrize(("keys", "counts"), [([1, 1], [1, 1]), ([1, 2], [1, 3]), ([1, 2], [0, 1]), ([1, 2], [-9, 1])])
def test_a_checkpoint_with_windows_that_cannot_be_open_is_refused(keys: list[int], counts: list[int]) -> None:
    open_windows = count_windows._OpenWindows(pa.schema([("k", pa.int64()), (count_windows.COUNT, pa.int64())]), 3)
    bound = open_windows.bound("parts", ["k"], range(16), 16)
    chunk = Chunk("c", pa.table({KEY_GROUP: pa.array([0, 0], pa.int32()), "k": keys, count_windows.COUNT: counts}))
    with pytest.raises(
        StorageError, match="operator 'w': the state in the checkpoint has several windows of a key, or"
    ):
        bound.restore([chunk], "operator 'w'")
