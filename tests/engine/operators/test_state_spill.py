"""Entries of keyed state that are spilled to columns: a function sees exactly what it sees without."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import Parts, World, restored

from effort import examples
from in_memory import CountingIds
from key_samples import is_of_python, key_samples
from machine import limit_s
from midstream import KeyedProcessFunction, ListState, MapState, ReducingState, StorageError, ValueState
from midstream.engine.core.batches import canonical_schema, conform
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.core.schemas import as_schema
from midstream.engine.operators.functions import state_spill
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.functions.state_spill import TIMER_BYTES, EntrySize, size_of
from midstream.engine.state import columnar, spilled_state, table_runs
from midstream.engine.state.spilled_state import SPILLED_ID, SpilledTimers
from midstream.engine.state.state_parts import Chunk, StatePart
from midstream.engine.state.timers import STRETCH_BITS, TimerQueue
from process_operators import process_operator

START = datetime(2024, 1, 1)
ROW = canonical_schema(as_schema({"k": int, "at": datetime, "do": str, "n": int}, "rows"))
SEEN = as_schema({"k": int, "seen": str}, "results")
MAX_PARALLELISM = 16


def limited_to(entry_bytes: int | None) -> Callable[[], int | None]:
    return lambda: entry_bytes


class Everything(KeyedProcessFunction):
    """Changes and reads a state of each kind, of plain values and of those that can be changed in place."""

    number = ValueState(int, default=-1)
    things = ValueState(list[int], default=[])
    items = ListState(int)
    lists = ListState(list[str])
    pages = MapState(key=str, value=int)
    nested = MapState(key=int, value=list[int])
    highest = ReducingState(max, float)
    pickled: ValueState[Any] = ValueState(default=None)
    forever = ValueState(int, default=0, ttl="1 d")

    def process(self, row: Any, ctx: Any) -> Any:
        return {"k": ctx.key, "seen": repr(self.act(row["do"], row["n"], row["at"], ctx))}

    def act(self, do: str, n: int, at: datetime, ctx: Any) -> Any:
        match do:
            case "set":
                self.number.value = n
                self.highest.add(n / 2)
                self.pickled.value = (n, "two")
                self.forever.value += n
            case "change":
                self.things.value.append(n)
                self.nested.setdefault(n, []).append(n)
                self.lists.append([str(n), ""])
            case "append":
                self.items.extend([n, n + 1])
                self.pages[f"page {n}"] = self.pages.get(f"page {n}", 0) + 1
            case "empty":
                self.items.set([])
                self.things.value = []
                self.pages.pop(f"page {n}", None)
            case "clear":
                for state in (self.number, self.things, self.items, self.pages, self.highest, self.pickled):
                    state.clear()
            case "timer":
                ctx.timers.event_time(at + timedelta(seconds=n))
            case "lists":
                return [list(self.items), list(self.lists), len(self.items), dict(self.nested)]
            case "look":
                return self.number.value, self.highest.value, self.forever.value, len(self.pages), len(self.items)
        return self.number.value, self.things.value, self.highest.value, dict(self.pages), self.pickled.value

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        self.items.append(-1)
        ctx.timers.event_time(time + timedelta(seconds=7))
        return {"k": ctx.key, "seen": repr((time, list(self.items), self.number.value, self.forever.value))}


def operator() -> ProcessOperator:
    made = process_operator("op", Everything(), keys=["k"], event_time="at", input_schema=ROW, schema=SEEN)
    assert isinstance(made, ProcessOperator)
    return made


DOINGS = ["set", "look", "change", "append", "empty", "clear", "timer", "lists"]
ROWS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(DOINGS), st.integers(0, 3)), max_size=30)
STEP = st.one_of(ROWS, st.sampled_from(["watermark", "snapshot", "restore 1", "restore 3", "restore 2 in memory"]))


class Subtasks:
    def __init__(self, entry_bytes: int | None) -> None:
        self.context: dict[str, Any] = {
            "entry_bytes": limited_to(entry_bytes),
            "stored_bytes": self.stored_bytes,
            "ids": CountingIds(),
        }
        self.worlds = [World(operator(), max_parallelism=MAX_PARALLELISM, **self.context)]
        self.stored: dict[str, int] = {}
        """The chunks of the last checkpoint, with their bytes."""
        self.tables: dict[str, pa.Table] = {}

    def stored_bytes(self, chunk_id: str) -> int | None:
        return self.stored.get(chunk_id)

    def process(self, batch: pa.RecordBatch) -> None:
        owners = subtask_of(key_groups(batch, ("k",), MAX_PARALLELISM), len(self.worlds), MAX_PARALLELISM)
        for subtask, world in enumerate(self.worlds):
            world.process(batch.filter(pa.array(owners == subtask)))

    def snapshot(self) -> list[Parts]:
        """Take a checkpoint, which completes."""
        taken = [world.snapshot() for world in self.worlds]
        chunks = {chunk.id: chunk for parts in taken for part in parts.values() for chunk in part.chunks}
        vectors = {vector.id: vector for chunk in chunks.values() for vector in chunk.removed}
        self.tables = {
            each: self.tables[each] if chunk.made is None else chunk.stored
            for each, chunk in (chunks | vectors).items()
        }
        self.stored = {each: table.nbytes for each, table in self.tables.items()}
        return [
            {name: StatePart(part.redistribute, tuple(map(self.whole, part.chunks))) for name, part in parts.items()}
            for parts in taken
        ]

    def whole(self, chunk: Chunk) -> Chunk:
        return Chunk(chunk.id, self.tables[chunk.id], tuple(map(self.whole, chunk.removed)))

    def restore(self, parallelism: int, *, in_memory: bool) -> None:
        """At one subtask what is stored stays stored; at several, chunks are split."""
        snapshots = self.snapshot()
        context = self.context | ({"entry_bytes": limited_to(None)} if in_memory else {})
        self.worlds = restored(operator, snapshots, parallelism, MAX_PARALLELISM, **context)

    def out(self) -> Counter[tuple[int, str]]:
        found = Counter((row["k"], row["seen"]) for world in self.worlds for row in world.out.rows())
        for world in self.worlds:
            world.out.clear()
        return found

    def contents(self) -> dict[str, dict[Any, Any]]:
        found: dict[str, dict[Any, Any]] = {}
        for world in self.worlds:
            assert isinstance(world.operator, ProcessOperator)
            for name, entries in world.operator.contents().items():
                found.setdefault(name, {}).update(
                    {key: entry for key, entry in entries.items() if entry not in ([], {})}
                )
        return found


def batch_of(rows: list[tuple[int, str, int]], at: datetime) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "at": at, "do": do, "n": n} for k, do, n in rows], ROW)


@given(
    st.lists(STEP, min_size=5, max_size=25), st.sampled_from([0, 1_000, 5_000, 15_000]), st.sampled_from([1, 3, 1000])
)
@settings(max_examples=examples(150), deadline=None)
def test_a_function_sees_what_it_sees_when_all_is_in_memory(steps: list[Any], entry_bytes: int, run_rows: int):
    with patch.object(table_runs, "RUN_ROWS", run_rows), patch.object(columnar, "OWN_CHUNK_ROWS", run_rows):
        check_same(steps, entry_bytes)


def test_the_rows_of_a_key_stay_together_when_long_runs_are_cut():
    """Otherwise the second part would replace the first one where they are read as objects."""
    appended = [(k, "append", n) for n in range(3) for k in range(4)]
    steps = [appended, [(9, "look", 0)], "restore 2 in memory", [(k, "lists", 0) for k in range(4)]]
    for run_rows in range(1, 8):
        with patch.object(table_runs, "RUN_ROWS", run_rows), patch.object(columnar, "OWN_CHUNK_ROWS", 1):
            check_same(steps, 0)


def check_same(steps: list[Any], entry_bytes: int) -> None:
    plain, spilling = Subtasks(None), Subtasks(entry_bytes)
    at = START
    for step in steps:
        at += timedelta(seconds=1)
        for each in (plain, spilling):
            if step == "watermark":
                for world in each.worlds:
                    world.advance((at - datetime(1970, 1, 1)) // timedelta(microseconds=1))
            elif step == "snapshot":
                each.snapshot()
            elif isinstance(step, str):
                each.restore(int(step.split()[1]), in_memory="memory" in step)
            elif step:
                each.process(batch_of(step, at))
        assert spilling.out() == plain.out()
    assert spilling.contents() == plain.contents()


SAMPLES = {name: values for name, values in key_samples(40).items() if is_of_python(values.type) and "view" not in name}


class Counts(KeyedProcessFunction):
    seen = ValueState(int, default=0)
    rows = ListState(int)
    pages = MapState(key=str, value=int)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.value += 1
        self.rows.append(row["n"])
        self.pages["last"] = row["n"]
        return {"id": row["id"], "seen": self.seen.value, "rows": list(self.rows), "last": self.pages["last"]}


def counted(batches: list[pa.RecordBatch], keys: list[str], entry_bytes: int | None) -> list[dict[str, Any]]:
    schema = as_schema({"id": int, "seen": int, "rows": list[int], "last": int}, "results")

    def make() -> ProcessOperator:
        made = process_operator(
            "op", Counts(), keys=keys, event_time=None, input_schema=batches[0].schema, schema=schema
        )
        assert isinstance(made, ProcessOperator)
        return made

    context: dict[str, Any] = {"entry_bytes": limited_to(entry_bytes), "ids": CountingIds()}
    world, rows = World(make(), max_parallelism=MAX_PARALLELISM, **context), []
    for at, batch in enumerate(batches):
        world.process(batch)
        rows += world.out.rows()
        world.out.clear()
        if at % 2:
            world = restored(make, [world.snapshot()], 1, MAX_PARALLELISM, **context)[0]
    return rows


@pytest.mark.parametrize(
    "names", [*([name] for name in SAMPLES), ["string", "int64"], ["timestamp[us, tz=America/New_York]", "bool"]]
)
def test_keys_of_every_type_are_found_again(names: list[str]):
    columns = [SAMPLES[name] for name in names]
    height = max(map(len, columns))
    keys = [f"k{i}" for i in range(len(columns))]
    numbers = pa.array(range(height))
    arrays = [column.take(np.arange(height) % len(column)) for column in columns]
    given_batch = pa.RecordBatch.from_arrays([*arrays, numbers, numbers], [*keys, "id", "n"])
    batch = conform(given_batch, canonical_schema(given_batch.schema), "rows")
    batches = [batch, batch.slice(0, height // 2), batch, batch.slice(3)]
    assert counted(batches, keys, 0) == counted(batches, keys, None)


def test_entries_leave_the_dict_and_come_back_with_the_keys_of_a_batch():
    spilling = Subtasks(0)
    spilling.process(batch_of([(k, "set", k) for k in range(100)], START))
    world = spilling.worlds[0]
    states = world.operator._states  # type: ignore[attr-defined]
    assert not states["number"].entries()
    assert not states["forever"].entries()
    assert len(states["pickled"].entries()) == 100
    parts = spilling.snapshot()[0]
    assert [chunk.id.startswith(SPILLED_ID) for chunk in parts["value:number"].chunks] == [True]
    assert parts["value:number"].chunks[0].table.column_names == ["__key_group", "key", "value"]
    world.out.clear()
    spilling.process(batch_of([(7, "lists", 0), (7, "set", 8), (200, "lists", 0)], START))
    assert [row["k"] for row in world.out.rows()] == [7, 7, 200]
    assert spilling.contents()["number"] == {**{k: k for k in range(100)}, 7: 8}


def test_what_exceeds_the_limit_is_spilled_in_pieces_the_oldest_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_spill, "SPILL_KEYS", 10)
    spilling = Subtasks(1)
    spilling.process(batch_of([(k, "set", k) for k in range(100)], START))
    states = spilling.worlds[0].operator._states  # type: ignore[attr-defined]
    held = [len(states[name].entries()) for name in ("number", "highest", "things", "forever")]
    spillable = 8 + 2  # states, and queues of timers
    assert sum(held) == 400 - 10 * (spillable + 100 // 5)
    assert list(states["number"].entries()) == list(range(100 - held[0], 100))


def test_a_checkpoint_with_spilled_rows_of_another_type_is_refused():
    spilling = Subtasks(0)
    spilling.process(batch_of([(1, "set", 1)], START))
    part = spilling.snapshot()[0]["value:number"]
    table = part.chunks[0].table
    wrong = table.set_column(2, "value", pa.array(["text"], pa.large_string()))
    parts = {"value:number": StatePart(part.redistribute, (Chunk(part.chunks[0].id, wrong),))}
    with pytest.raises(StorageError, match="state 'number': stored as large_string, now declared as int64"):
        World(operator(), max_parallelism=MAX_PARALLELISM, parts=parts, **spilling.context)


def test_entries_are_measured_again_when_their_number_has_changed():
    entries: dict[Any, Any] = {}
    size = EntrySize(entries)
    assert size.total == 0
    entries[1] = "x" * 1_000
    assert 1_000 < size.total < 1_500
    entries.update(dict.fromkeys(range(2, 100), "x" * 10000))
    assert 900_000 < size.total < 1_100_000
    entries.clear()
    assert size.total == 0


def test_the_size_of_nested_values_follows_from_some_of_their_items():
    many = list(range(1_000, 101_000))
    assert 3_000_000 < size_of(many) < 5_000_000
    assert size_of({"a": [1, 2]}) > size_of({"a": [1]}) > size_of({})
    recursive: list[Any] = []
    recursive.append(recursive)
    assert size_of(recursive) < 1_000


class Fires(KeyedProcessFunction):
    """Sets, deletes and fires timers."""

    fired = ValueState(int, default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        at = START + timedelta(seconds=row["n"])
        if row["do"] == "set":
            ctx.timers.event_time(at)
        else:
            ctx.timers.delete_event_time(at)

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        self.fired.value += 1
        if self.fired.value % 3 == 1:
            ctx.timers.event_time(time + timedelta(seconds=self.fired.value))
        elif self.fired.value % 3 == 2:
            ctx.timers.delete_event_time(time + timedelta(seconds=self.fired.value))
        return {"k": ctx.key, "seen": f"{time} {self.fired.value}"}


def fires() -> ProcessOperator:
    made = process_operator("op", Fires(), keys=["k"], event_time="at", input_schema=ROW, schema=SEEN)
    assert isinstance(made, ProcessOperator)
    return made


TIMER_ROWS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["set", "set", "delete"]), st.integers(0, 60)))


@given(
    st.lists(st.one_of(TIMER_ROWS, st.integers(0, 90)), max_size=12),
    st.sampled_from([1, 5, 65_536]),
    st.sampled_from([0, 20 * TIMER_BYTES]),
)
@settings(max_examples=examples(150), deadline=None)
def test_timers_fire_in_the_order_of_time_wherever_they_are(steps: list[Any], timers_max: int, entry_bytes: int):
    patch = pytest.MonkeyPatch()
    patch.setattr(spilled_state, "TIMERS_MAX", timers_max)
    context: dict[str, Any] = {"ids": CountingIds()}
    worlds = [
        World(
            fires(),
            max_parallelism=MAX_PARALLELISM,
            entry_bytes=limited_to(limit),
            **context,
        )
        for limit in (None, entry_bytes)
    ]
    reached = 0
    for number, step in enumerate([*steps, 1_000]):
        if isinstance(step, list):
            for world in worlds:
                world.process(batch_of(step, START))
            continue
        reached = max(reached, step)
        for world in worlds:
            world.advance(
                MAX_WATERMARK_US
                if step == 1_000
                else (START + timedelta(seconds=reached) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
            )
        plain, spilled = ([row["seen"] for row in world.out.rows()] for world in worlds)
        assert spilled == sorted(spilled, key=lambda seen: seen[:19])
        assert Counter(spilled) == Counter(plain)
        for world in worlds:
            world.out.clear()
        if number % 4 == 3:
            worlds = [
                restored(
                    fires,
                    [world.snapshot()],
                    1,
                    MAX_PARALLELISM,
                    entry_bytes=limited_to(limit),
                    **context,
                )[0]
                for world, limit in zip(worlds, (None, entry_bytes), strict=True)
            ]
    patch.undo()


def test_a_spilled_timer_that_is_set_again_fires_once():
    world = World(fires(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    world.process(batch_of([(1, "set", 1_000)], START))
    queue = world.operator._queues()["timers:event"]  # type: ignore[attr-defined]
    assert len(queue) == 0
    world.process(batch_of([(1, "set", 1_000), (2, "set", 1_000), (1, "delete", 1_000)], START))
    world.process(batch_of([(2, "set", 1_000)], START))
    world.advance(MAX_WATERMARK_US)
    assert [row["k"] for row in world.out.rows()] == [2, 2]


class Work:
    """Counts the timers that become objects, and those that become rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.revived = self.spilled = 0
        revive, append = SpilledTimers._revive, SpilledTimers.append

        def reviving(timers: SpilledTimers, rows: pl.DataFrame) -> None:
            self.revived += rows.height
            revive(timers, rows)

        def appending(timers: SpilledTimers, frame: pl.DataFrame) -> None:
            self.spilled += frame.height
            append(timers, frame)

        monkeypatch.setattr(SpilledTimers, "_revive", reviving)
        monkeypatch.setattr(SpilledTimers, "append", appending)


@pytest.mark.parametrize("rows", [100, 1_000])
def test_each_timer_is_spilled_once_and_fetched_once_however_many_its_key_has(
    rows: int, monkeypatch: pytest.MonkeyPatch
):
    world = World(fires(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    work = Work(monkeypatch)
    for n in range(0, rows, 10):
        world.process(batch_of([(i % 2, "set", 100 + i) for i in range(n, n + 10)], START))
    world.process(batch_of([(i % 2, "delete", 100 + i) for i in range(10)], START))
    assert (work.revived, work.spilled) == (0, rows)
    world.advance((START + timedelta(seconds=100 + rows // 2) - datetime(1970, 1, 1)) // timedelta(microseconds=1))
    assert work.revived < rows * 3 // 4 and work.spilled < rows * 3 // 2


def test_a_timer_that_every_row_sets_is_one_row_on_disk(monkeypatch: pytest.MonkeyPatch):
    world = World(fires(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    work = Work(monkeypatch)
    for _ in range(20):
        world.process(batch_of([(k, "set", 1_000) for k in range(30)], START))
        world = restored(fires, [world.snapshot()], 1, MAX_PARALLELISM, entry_bytes=limited_to(0), ids=CountingIds())[0]
    assert work.spilled == 30
    chunks = world.snapshot()["timers:event"].chunks
    assert sum(chunk.stored.num_rows for chunk in chunks) == 30
    world.advance((START + timedelta(seconds=1_000) - datetime(1970, 1, 1)) // timedelta(microseconds=1))
    assert sorted(row["k"] for row in world.out.rows()) == list(range(30))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_timer_that_is_a_row_and_an_object_fires_once_after_a_restore(in_memory: bool):
    limit = 20 * TIMER_BYTES
    world = World(fires(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(limit), ids=CountingIds())
    world.process(batch_of([(k, "set", 1_000) for k in range(40)], START))
    queue = world.operator._queues()["timers:event"]  # type: ignore[attr-defined]
    spilled = sorted({*range(40)} - {key for _, key in queue.timers()})
    world.process(batch_of([(spilled[0], "set", 1_000), (spilled[1], "delete", 1_000)], START))
    assert spilled[0] in {key for _, key in queue.timers()}
    parts = [world.snapshot()]
    context = {"entry_bytes": limited_to(None if in_memory else limit), "ids": CountingIds()}
    worlds = restored(fires, parts, 3, MAX_PARALLELISM, **context)
    worlds = restored(fires, [world.snapshot() for world in worlds], 1, MAX_PARALLELISM, **context)
    worlds[0].process(batch_of([(spilled[2], "delete", 1_000)], START))
    worlds[0].advance((START + timedelta(seconds=1_000) - datetime(1970, 1, 1)) // timedelta(microseconds=1))
    expected = [k for k in range(40) if k not in spilled[1:3]]
    assert sorted(row["k"] for row in worlds[0].out.rows()) == expected


class Rings(KeyedProcessFunction):
    """Timers of processing time, each of which sets the next one, and at times deletes the one after it."""

    def process(self, row: Any, ctx: Any) -> None:
        ctx.timers.processing_time(START + timedelta(seconds=row["n"]))

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        seconds = (time - START) // timedelta(seconds=1)
        if seconds % 40 == 0:
            ctx.timers.delete_processing_time(time + timedelta(seconds=20))
            ctx.timers.processing_time(time + timedelta(seconds=20))
        ctx.timers.processing_time(time + timedelta(seconds=10))
        return {"k": ctx.key, "seen": str(seconds)}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20).map(lambda n: 10 * n)), max_size=40))
@settings(max_examples=examples(50), deadline=None)
def test_attempts_to_set_timers_after_the_end_are_counted_wherever_the_timers_are(timers: list[tuple[int, int]]):
    found = []
    for limit in (None, 0):
        made = process_operator("op", Rings(), keys=["k"], event_time="at", input_schema=ROW, schema=SEEN)
        world = World(made, max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(limit))
        world.process(batch_of([(k, "set", n) for k, n in timers], START))
        world.advance(MAX_WATERMARK_US)
        found.append((Counter((row["k"], row["seen"]) for row in world.out.rows()), made.timers_dropped))
    assert found[1] == found[0]


def test_a_timer_at_the_end_of_time_fires_once_at_the_end():
    class AtTheEnd(Fires):
        def process(self, row: Any, ctx: Any) -> Any:
            ctx.timers.event_time(MAX_WATERMARK_US - row["n"])

        def on_timer(self, time: datetime, ctx: Any) -> Any:
            return {"k": ctx.key, "seen": ""}

    made = process_operator("op", AtTheEnd(), keys=["k"], event_time="at", input_schema=ROW, schema=SEEN)
    world = World(made, max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    world.process(batch_of([(1, "set", 0), (2, "set", 1), (3, "set", 10_000_000)], START))
    world.process(batch_of([(3, "set", 0)], START))
    world.advance(MAX_WATERMARK_US)
    assert [row["k"] for row in world.out.rows()] == [3, 2, 1, 3]


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_is_fetched_and_not_changed_is_in_the_next_checkpoint(in_memory: bool):
    spilling = Subtasks(60_000)
    spilling.process(batch_of([(k, "set", k) for k in range(200)], START))
    entries = spilling.worlds[0].operator._states["number"].entries()  # type: ignore[attr-defined]
    assert len(entries) < 200
    spilled = [k for k in range(200) if k not in entries][:5]
    spilling.snapshot()
    spilling.process(batch_of([(k, "look", 0) for k in spilled], START))
    assert all(k in entries for k in spilled)
    spilling.restore(1, in_memory=in_memory)
    assert spilling.contents()["number"] == {k: k for k in range(200)}


def test_timers_far_apart_are_spilled_in_time_that_follows_from_their_number():
    queue = TimerQueue()
    for number in range(50_000):
        queue.add(number << STRETCH_BITS, number)
    began = time.thread_time()
    popped = [timer for _ in range(5) for timer in queue.pop_late(10_000)]
    assert time.thread_time() - began < limit_s(2)
    assert sorted(popped) == [(number << STRETCH_BITS, number) for number in range(50_000)]
    assert len(queue) == 0 and queue.pop(MAX_WATERMARK_US) is None


def test_entries_that_grow_are_measured_again():
    entries: dict[Any, Any] = {k: [1] for k in range(10)}
    size = EntrySize(entries)
    small = size.total
    for values in entries.values():
        values.extend(range(10_000))
    found = [size.total for _ in range(state_spill.MEASURED_EVERY)]
    assert found[0] == small
    assert found[-1] > 100 * small


def test_a_damaged_checkpoint_with_a_spilled_timer_at_the_end_of_time_ends():
    world = World(fires(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    world.process(batch_of([(1, "set", 1_000)], START))
    part = world.snapshot()["timers:event"]
    table = part.chunks[0].table
    last = table.set_column(2, "time_us", pa.array([MAX_WATERMARK_US], pa.int64()))
    parts = {"timers:event": StatePart(part.redistribute, (Chunk(part.chunks[0].id, last),))}
    again = World(fires(), max_parallelism=MAX_PARALLELISM, parts=parts, entry_bytes=limited_to(0))
    assert len(again.operator._queues()["timers:event"]) == 1  # type: ignore[attr-defined]


def test_timers_whose_entries_were_fetched_fire_although_fetching_takes_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch,
):
    world = World(operator(), max_parallelism=MAX_PARALLELISM, entry_bytes=limited_to(0))
    for do in ("set", "timer"):
        world.process(batch_of([(k, do, 1) for k in range(50)], START))
    fetch = state_spill.StateSpill.fetch

    def slowly(spill: state_spill.StateSpill, keys: Any) -> None:
        world.clock.ms += 50
        fetch(spill, keys)

    monkeypatch.setattr(state_spill.StateSpill, "fetch", slowly)
    fired = len(world.out.rows())
    until_us = (START + timedelta(seconds=2) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    slices = 1
    while not world.operator.advance_watermark(until_us):
        slices += 1
        assert slices < 5, "a slice fires hardly more than one timer"
    assert len(world.out.rows()) - fired == 50
