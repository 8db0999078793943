"""Rows that are removed from what is stored: a checkpoint stores which ones, and whatever reads it leaves them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from in_memory import CountingIds, MemoryStorage
from midstream.engine.checkpoint.held_chunks import HeldChunk, HeldChunks
from midstream.engine.checkpoint.metadata import OperatorState
from midstream.engine.checkpoint.redistribute_state import assign_operator
from midstream.engine.checkpoint.state_files import in_files, known_chunks, read_parts, store_parts, verify_chunks
from midstream.engine.core.arrow_bytes import read_table
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.key_groups import key_group_range, key_groups, subtask_of
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot, PartHandle
from midstream.engine.state import columnar, table_runs, tombstones
from midstream.engine.state.columnar import OWN_CHUNK_ROWS
from midstream.engine.state.state_parts import KEY_GROUP, REMOVED, Chunk, Redistribute, StatePart
from midstream.engine.state.table_state import TableState

GROUPS = 16
START = datetime(2024, 1, 1)
SCHEMA = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us")), ("id", pa.int64())])
Row = tuple[int, int, int]
"""Its key, when it is due, and its number."""


def frame_of(rows: Sequence[Row]) -> pl.DataFrame:
    keys, at, numbers = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    times = [START + timedelta(seconds=second) for second in at]
    made = pl.from_arrow(pa.table([keys, times, numbers], schema=SCHEMA))
    assert isinstance(made, pl.DataFrame)
    return made


def owners(keys: Sequence[int], parallelism: int) -> list[int]:
    groups = key_groups(pa.record_batch({"k": pa.array(keys, pa.int64())}), ("k",), GROUPS)
    return [int(owner) for owner in subtask_of(groups, parallelism, GROUPS)]


def table(groups: range = range(GROUPS)) -> TableState:
    return TableState(SCHEMA).bound("rows", ["k"], groups, GROUPS)


@dataclass
class Subtasks:
    """The tables of all subtasks of an operator, their checkpoints, and the same rows in a list."""

    parallelism: int
    rows: list[Row] = field(default_factory=list)
    count: int = 0
    ids: CountingIds = field(default_factory=CountingIds)
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    written: int = 0
    """The files."""
    taken: int = 0
    """How many chunks were taken over by a restore."""

    def __post_init__(self) -> None:
        self._begin(self.parallelism)

    def _begin(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.tables = [table(key_group_range(i, parallelism, GROUPS)) for i in range(parallelism)]
        self.known: list[dict[str, ChunkHandle]] = [{} for _ in range(parallelism)]

    def step(self, step: str, argument: Any) -> None:
        match step:
            case "append" | "upsert":
                new = [(key, at, self.count + place) for place, (key, at) in enumerate(argument)]
                self.count += len(new)
                if step == "upsert":
                    self.rows = [row for row in self.rows if row[0] not in {key for key, _, _ in new}]
                self.rows += new
                for state, mine in self._of_each(new):
                    getattr(state, step)(frame_of(mine))
            case "pop":
                for state, mine in self._of_each([(key, 0, 0) for key in argument]):
                    state.pop(frame_of(mine))
                self.rows = [row for row in self.rows if row[0] not in argument]
            case "pop_until":
                for state in self.tables:
                    state.pop_until("at", START + timedelta(seconds=argument))
                self.rows = [row for row in self.rows if row[1] > argument]
            case "undo":
                for state, mine in self._of_each([(key, 0, 0) for key in argument]):
                    mark = state.mark()
                    state.pop(frame_of(mine))
                    state.roll_back(mark)
            case "checkpoint":
                self.checkpoint(completes=argument)
            case "restore":
                handles, held = self.checkpoint(completes=True), self.held()
                self._begin(argument)
                for index, (given, parts) in enumerate(self.read(handles, argument, held)):
                    if parts:
                        self.tables[index].restore(parts["table:rows"].chunks, "here")
                        self.known[index] = known_chunks(given, parts)

    def _of_each(self, rows: Sequence[Row]) -> Iterator[tuple[TableState, list[Row]]]:
        by = owners([row[0] for row in rows], self.parallelism)
        for index, state in enumerate(self.tables):
            if mine := [row for row, owner in zip(rows, by, strict=True) if owner == index]:
                yield state, mine

    def checkpoint(self, *, completes: bool) -> list[tuple[PartHandle, ...]]:
        found = []
        for index, state in enumerate(self.tables):
            chunks = state.snapshot(self.ids, "here")
            parts = {"table:rows": StatePart(Redistribute.KEYED, chunks())} if chunks else {}
            self.written += 1
            stored = store_parts(self.storage, [parts], self.known[index], f"{self.written}", self.written % 3 * 1000)
            if completes:
                self.known[index] = stored.in_files
            found.append(stored.parts[0])
        return found

    def held(self) -> HeldChunks:
        """Return what the slots of all subtasks still have, each of which is compared with what is stored."""

        def check(storage: Storage, handle: ChunkHandle, made: pa.Table) -> None:
            stored = read_table(storage.read_range(handle.file, handle.offset, handle.length))
            assert stored.equals(made)
            self.taken += 1

        held = HeldChunks(check)
        for state, known in zip(self.tables, self.known, strict=True):
            for run, made in state.stored_runs():
                held.add([known[str(run.chunk_id)]] if run.chunk_id in known else [], HeldChunk(run, made))
        return held

    def read(
        self, handles: Sequence[tuple[PartHandle, ...]], parallelism: int, held: HeldChunks | None = None
    ) -> list[tuple[tuple[PartHandle, ...], dict[str, StatePart]]]:
        """Return what is assigned to each of other subtasks, and what it restores."""
        snapshots = tuple(OperatorSnapshot("op", parts) for parts in handles)
        graph: Any = type("Graph", (), {"max_parallelism": GROUPS})
        given = assign_operator(OperatorState("op", "op", 0, len(handles), snapshots), parallelism, graph)
        owned = [key_group_range(index, parallelism, GROUPS) for index in range(parallelism)]
        return [
            (parts, read_parts(self.storage, parts, groups, "operator 'op'", held=held))
            for parts, groups in zip([snapshot.parts for snapshot in given], owned, strict=True)
        ]

    def check(self, parallelism: int) -> None:
        """The rows of each key are those that there were, in their order; of another parallelism, too."""
        expected = by_key(self.rows)
        assert by_key([row for state in self.tables for row in rows_of(state)]) == expected
        handles = self.checkpoint(completes=False)
        for index, stored in enumerate(handles):
            groups = key_group_range(index, self.parallelism, GROUPS)
            for chunk in (chunk for part in stored for chunk in part.chunks):
                assert groups.start <= chunk.key_group_min <= chunk.key_group_max < groups.stop, (
                    "it goes to others, too"
                )
        verify_chunks(self.storage, [each for stored in handles for each in stored], "here")
        assert sum(chunk.live_rows for stored in handles for part in stored for chunk in part.chunks) == len(self.rows)
        back = []
        for index, (_, parts) in enumerate(self.read(handles, parallelism)):
            state = table(key_group_range(index, parallelism, GROUPS))
            if parts:
                state.restore(parts["table:rows"].chunks, "here")
            mine = rows_of(state)
            assert set(owners([row[0] for row in mine], parallelism)) <= {index}
            back += mine
        assert by_key(back) == expected


def rows_of(state: TableState) -> list[Row]:
    return [(key, (at - START) // timedelta(seconds=1), number) for key, at, number in state.frame.rows()]


def by_key(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


KEY = st.integers(0, 30)
ROWS = st.lists(st.tuples(KEY, st.integers(0, 20)), min_size=1, max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["append", "upsert"]), ROWS),
        st.tuples(st.sampled_from(["pop", "undo"]), st.lists(KEY, min_size=1, max_size=5)),
        st.tuples(st.just("pop_until"), st.integers(-1, 20)),
        st.tuples(st.just("checkpoint"), st.booleans()),
        st.tuples(st.just("restore"), st.integers(1, 5)),
    ),
    max_size=25,
)


@settings(max_examples=examples(300))
@given(
    plan=STEPS,
    parallelism=st.integers(1, 4),
    then=st.integers(1, 5),
    run_rows=st.sampled_from([4, 16, 1000]),
    tidy=st.sampled_from([1, 8, 1000]),
    own=st.sampled_from([1, 5]),
    vector=st.sampled_from([0, 2, 1024]),
)
def test_what_was_removed_stays_removed_at_any_parallelism(
    plan: list[tuple[str, Any]], parallelism: int, then: int, run_rows: int, tidy: int, own: int, vector: int
) -> None:
    with ExitStack() as stack:
        stack.enter_context(patch.object(table_runs, "RUN_ROWS", run_rows))
        stack.enter_context(patch.object(table_runs, "TIDY_ROWS", tidy))
        stack.enter_context(patch.object(columnar, "OWN_CHUNK_ROWS", own))
        stack.enter_context(patch.object(tombstones, "VECTOR_ROWS_MIN", vector))
        subtasks = Subtasks(parallelism)
        for step, argument in plan:
            subtasks.step(step, argument)
        subtasks.check(then)


@pytest.mark.parametrize(("then", "written_max", "taken"), [(2, 0, 2), (3, 26, 4), (1, 42, 2)])
def test_a_restore_takes_over_chunks_and_the_next_checkpoint_stores_only_what_has_moved(
    then: int, written_max: int, taken: int
) -> None:
    with patch.object(columnar, "OWN_CHUNK_ROWS", 1):
        subtasks = Subtasks(2)
        subtasks.written = -1  # the first file is the second one: nothing is inline in it
        subtasks.step("append", [(key, 0) for key in range(60)])
        subtasks.step("pop", [7, 8])
        subtasks.step("restore", then)
        assert subtasks.taken == taken, "each that was held is taken by every subtask that has rows of it"
        handles = subtasks.checkpoint(completes=False)
        file = f"{subtasks.written}"
        again = {
            chunk.id: chunk.rows for parts in handles for part in parts for chunk in part.chunks if chunk.file == file
        }
        inline = [chunk.rows for parts in handles for part in parts for chunk in part.chunks if chunk.inline]
        assert sum(again.values()) + sum(inline) <= written_max
        subtasks.check(2)


def bytes_written(keys: int, changes: int, checkpoints: int = 40) -> list[int]:
    """Return the bytes that each checkpoint of a table writes; between two checkpoints, `changes` random rows are replaced."""
    random, ids, storage = np.random.default_rng(1), CountingIds(), MemoryStorage()
    state = TableState({"k": int, "total": int}).bound("totals", ["k"], range(GROUPS), GROUPS)
    state.append(pl.DataFrame({"k": np.arange(keys), "total": np.zeros(keys, np.int64)}))
    known: dict[str, ChunkHandle] = {}
    written = []
    for number in range(checkpoints):
        if number:
            changed = random.choice(keys, changes, replace=False)
            state.upsert(pl.DataFrame({"k": changed, "total": np.full(changes, number)}))
        chunks = state.snapshot(ids, "here")
        assert chunks is not None
        part = StatePart(Redistribute.KEYED, chunks())
        stored = store_parts(storage, [{"table:totals": part}], known, f"{number}")
        known, ((handles,),) = stored.in_files, stored.parts
        written.append(stored.written.stored_bytes)
        (file,) = stored.written.files
        assert len(storage.files[file]) == written[-1]
    assert sum(1 for _ in handles.extents) < 30
    (read,) = read_parts(storage, [handles], range(GROUPS), "here").values()
    back = TableState({"k": int, "total": int}).bound("totals", ["k"], range(GROUPS), GROUPS)
    back.restore(read.chunks, "here")
    assert back.frame.sort("k").equals(state.frame.sort("k"))
    return written


def test_a_checkpoint_writes_what_has_changed_and_not_what_is_held() -> None:
    of_half, of_all = bytes_written(250_000, 2_000), bytes_written(500_000, 2_000)
    assert 1.9 < of_all[0] / of_half[0] < 2.1
    assert 0.8 < sum(of_all[1:]) / sum(of_half[1:]) < 1.25
    assert np.mean(of_all[1:]) < 0.05 * of_all[0]


def test_a_run_is_stored_again_without_what_was_removed_once_that_is_half_of_it() -> None:
    ids, state = CountingIds(), TableState({"k": int}).bound("rows", ["k"], range(GROUPS), GROUPS)
    state.append(pl.DataFrame({"k": np.arange(2 * OWN_CHUNK_ROWS)}))

    def chunk() -> Chunk:
        made = state.snapshot(ids, "here")
        assert made is not None
        (found,) = made()
        return found

    first = chunk()
    for step in range(1, 4):
        state.pop(pl.DataFrame({"k": np.arange(5) + 5 * step}))
        assert chunk().id == first.id and [each.table.num_rows for each in chunk().removed] == [5 * step]
    state.pop(pl.DataFrame({"k": np.arange(OWN_CHUNK_ROWS)}))
    again = chunk()
    assert again.id != first.id and again.removed == () and again.stored.num_rows == OWN_CHUNK_ROWS


def test_what_is_undone_after_a_snapshot_is_in_the_next_one() -> None:
    ids, state = CountingIds(), table()
    with patch.object(columnar, "OWN_CHUNK_ROWS", 1):
        state.append(frame_of([(key, 0, key) for key in range(10)]))
        state.pop(frame_of([(3, 0, 0)]))
        assert state.snapshot(ids, "here") is not None
        mark = state.mark()
        state.pop(frame_of([(5, 0, 0)]))
        between = state.snapshot(ids, "here")
        state.roll_back(mark)
        state.pop(frame_of([(6, 0, 0)]))
        after = state.snapshot(ids, "here")
    assert between is not None and after is not None
    for snapshot, gone in ((between, {3, 5}), (after, {3, 6})):
        (chunk,) = snapshot()
        assert chunk.table.column("id").to_pylist() == [key for key in range(10) if key not in gone]


def vector(*positions: Any, name: str = "position", kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({name: pa.array(positions, kind or pa.uint32())})


DAMAGED: dict[str, tuple[list[pa.Table], str]] = {
    "a position without a row": ([vector(0), vector(1, 4)], "row 4 has been removed, .* and there are 4 rows"),
    "a position twice": ([vector(1, 1)], "2 rows have been removed, .* some of them twice"),
    "a position in two vectors": ([vector(0, 1), vector(3, 1)], "4 rows have been removed, .* some of them twice"),
    "another column": ([vector(1, name="row")], "has the columns row, and not one column 'position'"),
    "another type": ([vector(1, kind=pa.int64())], "column 'position' of the type int64 instead of uint32"),
    "a null": ([vector(1, None)], "1 nulls in column 'position'"),
    "a chunk of rows": ([pa.table({KEY_GROUP: pa.array([1], pa.int32())})], "not one column 'position'"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("groups", [range(GROUPS), range(2)])
def test_a_damaged_deletion_vector_is_refused(name: str, groups: range) -> None:
    vectors, message = DAMAGED[name]
    rows = pa.table({KEY_GROUP: pa.array([0, 1, 2, 3], pa.int32()), "id": [0, 1, 2, 3]})
    removed = tuple(Chunk(f"v{at}", each) for at, each in enumerate(vectors))
    storage = MemoryStorage()
    stored = {
        "rows": StatePart(Redistribute.KEYED, (Chunk("c", rows),)),
        "removed": StatePart(Redistribute.UNION, removed),
    }
    ((whole, apart),) = store_parts(storage, [stored], {}, "f").parts
    damaged = msgspec.structs.replace(whole.chunks[0], removed=apart.chunks)
    handles = (PartHandle("table:rows", "keyed", (damaged,)),)
    with pytest.raises(StorageError, match=rf"^operator 'op': state 'table:rows': chunk c: .*{message}.*--from"):
        read_parts(storage, handles, groups, "operator 'op'")


def test_a_chunk_of_which_rows_were_removed_is_another_one_and_is_in_a_file_with_its_vectors() -> None:
    rows = pa.table({KEY_GROUP: pa.array([0, 9], pa.int32()), "id": [0, 1]})
    chunk = Chunk("c", rows, (Chunk("v", pa.table([[1]], schema=REMOVED)),))
    storage = MemoryStorage()
    stored = store_parts(storage, [{"s": StatePart(Redistribute.KEYED, (chunk,))}], {}, "f")
    (handles,) = stored.parts
    assert set(stored.in_files) == set(in_files(handles)) == {"c", "v"}
    (read,) = read_parts(storage, handles, range(GROUPS), "here")["s"].chunks
    assert read.id not in stored.in_files and read.removed == () and read.table.column("id").to_pylist() == [0]
    assert read_parts(storage, handles, range(8, GROUPS), "here") == {}, "the row of these key groups was removed"
    later = Chunk("c", None, (Chunk("v", None), Chunk("w", pa.table([[0]], schema=REMOVED))))
    again = store_parts(storage, [{"s": StatePart(Redistribute.KEYED, (later,))}], stored.in_files, "g")
    (part,) = again.parts[0]
    assert [extent.file for extent in part.extents] == ["f", "f", "g"] and part.chunks[0].live_rows == 0
    assert read_parts(storage, [part], range(GROUPS), "here") == {}
    earlier = msgspec.structs.replace(part, chunks=(msgspec.structs.replace(part.chunks[0], removed=()),))
    assert read_parts(storage, [earlier], range(GROUPS), "here")["s"].table().num_rows == 2
