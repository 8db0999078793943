"""Chunks of heap state: whatever becomes of checkpoints, those that completed hold what there was, and little is stored."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeAlias
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from effort import examples
from midstream.engine.checkpoint.stored_states import StoredState, frame_of
from midstream.engine.core.errors import InvariantError
from midstream.engine.operators.base import never_stored
from midstream.engine.state import changelog as entry_log
from midstream.engine.state.changelog import GONE, Changelog, ChangelogSnapshot
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, state_table, timer_rows, timers_table
from midstream.engine.state.keyed_states import KeyScope, ListState, MapState, State, ValueState
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute
from midstream.engine.state.timers import TimerQueue

OWN = OwnCode()
ENCODING = KeyEncoding([pa.field("k", pa.int64())], 4)
NUMBERS_MAX = 3
KEYS, NUMBERS = st.integers(0, 7), st.integers(0, NUMBERS_MAX)
Parts: TypeAlias = dict[str, tuple[str, ...]]
"""By name, the chunks of a checkpoint."""


class Keeper:
    """The states and timers of a process function, and how they come back."""

    def __init__(self) -> None:
        self.scope = KeyScope(is_set=True)
        self.value: ValueState[int | None] = ValueState(pa.int64()).bound("value", self.scope)
        self.any: ValueState[Any] = ValueState(default=[]).bound("any", self.scope)
        self.list: ListState[int] = ListState(pa.int64()).bound("list", self.scope)
        self.map: MapState[int, list[int]] = MapState(key=pa.int64()).bound("map", self.scope)
        self.timers = TimerQueue()

    @property
    def states(self) -> list[State]:
        return [self.value, self.any, self.list, self.map]

    def snapshot(self, stored_bytes: Any, ids: Iterator[int]) -> dict[str, tuple[ChangelogSnapshot, pa.Table] | None]:
        new_id = lambda: f"chunk {next(ids)}"  # noqa: E731
        found: dict[str, tuple[ChangelogSnapshot, pa.Table] | None] = {}
        for state in self.states:
            frozen = state.snapshot(new_id, stored_bytes)
            found[state.name] = None if frozen is None else (frozen, state_table(state, frozen, ENCODING, OWN, "test"))
        timers = self.timers.log.snapshot(new_id, stored_bytes)
        found["timers"] = None if timers is None else (timers, timers_table(timers, ENCODING))
        return found

    def restore(self, parts: Parts, tables: dict[str, pa.Table]) -> None:
        for state in self.states:
            for chunk_id in parts.get(state.name, ()):
                keys, rows = state_rows(state, tables[chunk_id], ENCODING, OWN, "test")
                state.forget(keys)
                state.restore(rows)
                state.log.restored(chunk_id, dict.fromkeys(keys), len(keys))
        for chunk_id in parts.get("timers", ()):
            named, rows_of_timers = timer_rows(tables[chunk_id], ENCODING)
            self.timers.forget(named)
            self.timers.restore(rows_of_timers)
            self.timers.log.restored(chunk_id, named, len(named))

    def contents(self) -> dict[str, Any]:
        found: dict[str, Any] = {state.name: copy.deepcopy(state.entries()) for state in self.states}
        found = {name: {key: entry for key, entry in of.items() if entry not in ([], {})} for name, of in found.items()}
        return {**found, "timers": self.timers.timers()}


def read(parts: Parts, tables: dict[str, pa.Table]) -> dict[str, Any]:
    """What a user who reads the state of these chunks finds, as `Keeper.contents` has it."""

    def rows(name: str, kind: str) -> list[dict[str, Any]]:
        chunks = [Chunk(chunk_id, tables[chunk_id]) for chunk_id in parts.get(name, ())]
        state = StoredState("op", "op", f"{kind}:{name}", Redistribute.KEYED, (), "k", 4)
        return frame_of(chunks, state, "test").to_dicts() if chunks else []

    lists: dict[int, list[int]] = {}
    for row in rows("list", "list"):
        assert row["position"] == len(lists.setdefault(row["k"], []))
        lists[row["k"]].append(row["list"])
    maps: dict[int, dict[int, list[int]]] = {}
    for row in rows("map", "map"):
        maps.setdefault(row["k"], {})[row["map_key"]] = pickle.loads(row["map"])
    anything = {row["k"]: pickle.loads(row["any"]) for row in rows("any", "value")}
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return {
        "value": {row["k"]: row["value"] for row in rows("value", "value")},
        "any": {key: value for key, value in anything.items() if value},
        "list": lists,
        "map": maps,
        "timers": sorted(
            ((row["time"] - epoch) // timedelta(microseconds=1), row["k"]) for row in rows("timers", "timers")
        ),
    }


class Checkpoints(RuleBasedStateMachine):
    """Changes of all kinds between checkpoints that complete, fail, or have everything in their metadata."""

    @initialize(
        chunks_max=st.integers(1, 4),
        least_rows=st.sampled_from([0, 3, 1000]),
        least_bytes=st.sampled_from([0, 1 << 20]),
    )
    def begin(self, chunks_max: int, least_rows: int, least_bytes: int) -> None:
        self.patches = [
            patch.object(entry_log, "CHUNKS_MAX", chunks_max),
            patch.object(entry_log, "LEAST_ROWS", least_rows),
            patch.object(entry_log, "LEAST_BYTES", least_bytes),
        ]
        for patched in self.patches:
            patched.start()
        self.now = Keeper()
        self.ids = itertools.count()
        self.tables: dict[str, pa.Table] = {}
        self.in_files: set[str] = set()
        self.completed: tuple[Parts, dict[str, Any]] = {}, Keeper().contents()
        self.restored: Keeper | None = None

    def stored_bytes(self, chunk_id: str) -> int | None:
        return self.tables[chunk_id].nbytes if chunk_id in self.in_files else None

    def teardown(self) -> None:
        for patched in getattr(self, "patches", ()):
            patched.stop()

    @rule(key=KEYS, number=NUMBERS)
    def set_value(self, key: int, number: int) -> None:
        self.now.scope.key = key
        self.now.value.value = number or None

    @rule(key=KEYS, number=NUMBERS)
    def change_in_place(self, key: int, number: int) -> None:
        self.now.scope.key = key
        self.now.any.value.append(number)

    @rule(key=KEYS, number=NUMBERS)
    def append(self, key: int, number: int) -> None:
        self.now.scope.key = key
        self.now.list.append(number)

    @rule(key=KEYS, number=NUMBERS)
    def set_list(self, key: int, number: int) -> None:
        self.now.scope.key = key
        self.now.list.set(range(number))

    @rule(key=KEYS, name=NUMBERS, number=NUMBERS)
    def put(self, key: int, name: int, number: int) -> None:
        self.now.scope.key = key
        self.now.map.setdefault(name, []).append(number)

    @rule(key=KEYS, name=NUMBERS)
    def remove(self, key: int, name: int) -> None:
        self.now.scope.key = key
        self.now.map.pop(name, None)

    @rule(key=KEYS, which=st.integers(0, 3))
    def clear(self, key: int, which: int) -> None:
        self.now.scope.key = key
        state: Any = self.now.states[which]
        state.clear()

    @rule(key=KEYS, at=NUMBERS)
    def set_timer(self, key: int, at: int) -> None:
        self.now.timers.add(at, key)

    @rule(key=KEYS, at=NUMBERS)
    def delete_timer(self, key: int, at: int) -> None:
        self.now.timers.delete(at, key)

    @rule()
    def fire(self) -> None:
        self.now.timers.pop(NUMBERS_MAX)

    @rule()
    def between_batches(self) -> None:
        for log in [self.now.timers.log, *(state.log for state in self.now.states)]:
            log.settle()

    @rule(outcome=st.sampled_from(["in a file", "in a file", "in a file", "in the metadata", "fails"]))
    def checkpoint(self, outcome: str) -> None:
        frozen = self.now.snapshot(self.stored_bytes, self.ids)
        parts: Parts = {}
        new: dict[str, pa.Table] = {}
        for name, found in frozen.items():
            if found is not None:
                stored, table = found
                assert self.in_files.issuperset(stored.stored), "refers to a chunk that no completed checkpoint has"
                new[stored.chunk_id] = table
                parts[name] = (*stored.stored, stored.chunk_id) if table.num_rows else stored.stored
        contents = self.now.contents()
        back = Keeper()
        back.restore(parts, self.tables | new)
        assert back.contents() == contents
        assert read(parts, self.tables | new) == contents | {"timers": sorted(contents["timers"])}
        if outcome != "fails":
            self.tables |= new
            self.completed = parts, contents
            held = {chunk_id for chunks in parts.values() for chunk_id in chunks}
            self.in_files = {c for c in held if c in self.in_files or (outcome == "in a file" and c in new)}

    @rule(kept=st.sampled_from([range(4), range(4), range(2)]))
    def restore(self, kept: range) -> None:
        """At another parallelism chunks come in part, under other names, and are in no file."""
        parts, contents = self.completed
        self.now = Keeper()
        if kept == range(4):
            self.now.restore(parts, self.tables)
        else:
            some: Parts = {}
            for name, chunks in parts.items():
                for chunk_id in chunks:
                    groups = self.tables[chunk_id].column(KEY_GROUP).to_numpy()
                    found = self.tables[chunk_id].filter(pa.array((groups >= kept.start) & (groups < kept.stop)))
                    if found.num_rows:
                        part_id = f"{chunk_id}/{next(self.ids)}"
                        self.tables[part_id] = found
                        some[name] = (*some.get(name, ()), part_id)
            self.now.restore(some, self.tables)
            self.in_files = set()
            owned = {key for key in range(8) if ENCODING.columns([key])[KEY_GROUP][0].as_py() in kept}
            contents = {
                name: {key: entry for key, entry in of.items() if key in owned}
                if isinstance(of, dict)
                else [(at, key) for at, key in of if key in owned]
                for name, of in contents.items()
            }
            self.completed = some, contents
        assert self.now.contents() == contents

    @invariant()
    def what_has_changed_is_what_there_is(self) -> None:
        if hasattr(self, "now"):
            for log in [self.now.timers.log, *(state.log for state in self.now.states)]:
                entries = log._entries
                assert all(entry is entries.get(key, GONE) for key, entry in log.changed.items())

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "now"):
            for state in self.now.states:
                assert len(state.log._chunks) <= entry_log.CHUNKS_MAX + 1


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=examples(150), stateful_step_count=40)


@pytest.mark.parametrize("seed", range(3))
def test_long_runs_of_checkpoints_in_files_hold_what_there_was(seed: int) -> None:
    """Removed entries and timers are in several chunks, which few drawn examples reach."""
    random = Random(seed)
    machine = Checkpoints()
    machine.begin(chunks_max=4, least_rows=1000, least_bytes=1 << 20)
    changes: list[Any] = [machine.set_value, machine.change_in_place, machine.append, machine.set_list]
    changes += [machine.clear, machine.set_timer, machine.set_timer, machine.delete_timer]
    try:
        for _ in range(60):
            for _ in range(random.randrange(6)):
                random.choice(changes)(random.randrange(8), random.randrange(4))
            machine.put(random.randrange(8), random.randrange(4), random.randrange(4))
            machine.remove(random.randrange(8), random.randrange(4))
            machine.checkpoint("in a file")
    finally:
        machine.teardown()


def written(log: Changelog, stored: set[str], ids: Iterator[int]) -> int:
    """The entries that a checkpoint writes, which completes."""
    frozen = log.snapshot(lambda: str(next(ids)), lambda chunk_id: 1000 if chunk_id in stored else None)
    assert frozen is not None
    stored.intersection_update(frozen.stored)
    if frozen.entries:
        stored.add(frozen.chunk_id)
    return len(frozen.entries)


def test_a_checkpoint_writes_what_changed_and_all_of_it_a_few_times() -> None:
    entries = dict.fromkeys(range(100_000), 0)
    log, stored, ids = Changelog(entries), set[str](), itertools.count()
    assert written(log, stored, ids) == 100_000
    total, most_chunks = 0, 0
    for turn in range(1_000):
        for key in range(turn * 100, turn * 100 + 100):
            entries[key % 100_000] = log.changed[key % 100_000] = turn
        log.settle()
        total += written(log, stored, ids)
        most_chunks = max(most_chunks, len(stored))
    assert 100_000 <= total <= 8 * 100_000, "each change is written a few times, whatever there is beside it"
    assert most_chunks <= entry_log.CHUNKS_MAX + 1
    assert written(log, stored, ids) == 0


def test_keys_that_come_and_go_between_two_checkpoints_take_no_memory() -> None:
    entries: dict[int, int] = {}
    log = Changelog(entries)
    for key in range(100_000):
        log.changed[key] = GONE
        if key % 100 == 0:
            log.settle()
    assert len(log.changed) <= entry_log.LEAST_ROWS + 100
    entries[7] = log.changed[7] = 1
    frozen = log.snapshot(lambda: "chunk", never_stored)
    assert frozen is not None and (frozen.stored, frozen.entries) == ((), {7: 1})


def test_a_chunk_of_which_everything_has_changed_is_not_referred_to() -> None:
    """One value of many bytes that is new in each checkpoint would be stored 32 times, and read 32 times by a restore."""
    for keys, hot in ((1, 1), (30, 30), (10_000, 1)):
        entries = dict.fromkeys(range(keys), 0)
        log, stored, ids = Changelog(entries), set[str](), itertools.count()
        for turn in range(100):
            for key in range(hot):
                entries[key] = log.changed[key] = turn
            assert written(log, stored, ids) == (hot if turn else keys)
            assert len(stored) == (1 if hot == keys or turn == 0 else 2)


def most_bytes(first: dict[int, int], rounds: Iterator[dict[int, int]]) -> float:
    """The most that a checkpoint refers to, in parts of what there is; `first` and `rounds`: sizes of entries set by key."""
    entries = dict(first)
    log, ids, sizes = Changelog(entries), itertools.count(), dict[str, int]()
    most = 0.0
    for sets in itertools.chain([{}], rounds):
        entries |= sets
        log.changed.update(sets)
        log.settle()
        frozen = log.snapshot(lambda: str(next(ids)), sizes.get)
        assert frozen is not None
        sizes = {chunk_id: sizes[chunk_id] for chunk_id in frozen.stored}
        sizes[frozen.chunk_id] = sum(frozen.entries.values())
        most = max(most, sum(sizes.values()) / sum(entries.values()))
    return most


def test_few_large_entries_with_small_ones_are_not_stored_over_and_over() -> None:
    """A restore reads all that a checkpoint refers to into memory."""
    large, random = 10 << 20, Random(7)
    entries = dict.fromkeys(range(10_000), 10) | dict.fromkeys(range(30), large)
    for held in (11, 30):
        some = (dict.fromkeys(random.sample(range(held), 10), large) for _ in range(100))
        assert most_bytes(entries, some) < 5.1


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_(pa.binary_view()), pa.list_(pa.int64(), 2), pa.null()])
def test_a_chunk_with_keys_that_are_gone_comes_back_in_any_type(kind: pa.DataType) -> None:
    scope, values = KeyScope(is_set=True), {pa.string_view(): "a", pa.null(): None, pa.list_(pa.int64(), 2): [1, 2]}
    now: ValueState[Any] = ValueState[Any](kind).bound("value", scope)
    back: ValueState[Any] = ValueState[Any](kind).bound("value", scope)
    ids = itertools.count()
    for sets, clears in (((1, 2, 3), ()), ((4,), (2, 3))):
        for key in (*sets, *clears):
            scope.key = key
            now.value = values.get(kind, [b"b"])
            if key in clears:
                now.clear()
        frozen = now.snapshot(lambda: str(next(ids)), lambda chunk_id: 1)
        assert frozen is not None
        keys, rows = state_rows(back, state_table(now, frozen, ENCODING, OWN, "test"), ENCODING, OWN, "test")
        back.forget(keys)
        back.restore(rows)
    assert back.entries() == now.entries() and back.entries().keys() == {1, 4}


def test_a_chunk_that_is_let_go_is_not_taken_for_there() -> None:
    with pytest.raises(InvariantError, match="chunk c was released"):
        _ = Chunk("c").table
