"""What is written is read back, by whoever owns it now; what is damaged is found before it is parsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from unittest.mock import patch

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_samples import MAX_PARALLELISM, metadata_of, pipeline
from effort import examples
from in_memory import MemoryStorage
from midstream.engine.checkpoint import state_files
from midstream.engine.checkpoint.extents import INLINE_JOB_BYTES_MAX, KINDS, inline_bytes_max
from midstream.engine.checkpoint.redistribute_state import assign_operator
from midstream.engine.checkpoint.state_files import (
    StateFile,
    known_chunks,
    read_parts,
    state_file,
    store_parts,
    verify_chunks,
)
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.protocol.framing import CONTROL_FRAME_BYTES_MAX
from midstream.engine.protocol.messages import OperatorSnapshot, PartHandle
from midstream.engine.state.columns_on_disk import table_on_disk
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute, StatePart
from on_disk import MemoryDisk

EVERYTHING = range(MAX_PARALLELISM)
FILE = state_file(1, 0, 1, 1, 0)


def table(groups: list[int], values: list[int]) -> pa.Table:
    return pa.table({KEY_GROUP: pa.array(groups, pa.int32()), "v": pa.array(values, pa.int64())})


def part(rule: Redistribute, *tables: pa.Table, prefix: str = "c") -> StatePart:
    if rule is not Redistribute.KEYED:  # only keyed state has key groups
        tables = tuple(t.rename_columns(["g", "v"]) for t in tables)
    return StatePart(rule, tuple(Chunk(f"{prefix}{i}", t) for i, t in enumerate(tables)))


def store(storage: MemoryStorage, parts: dict[str, StatePart], file: str = FILE) -> tuple[PartHandle, ...]:
    return store_parts(storage, [parts], {}, file).parts[0]


def values(parts: dict[str, StatePart], name: str = "s") -> list[int]:
    return to_list(parts[name].table().column("v")) if name in parts else []


def test_names_of_state_files_say_who_wrote_them_and_nothing_else_is_one() -> None:
    file = StateFile(epoch=7, attempt=2, checkpoint_id=17, vertex=3, subtask=0)
    assert file.path == "shared/e7-a2-c17-v3-s0.state"
    assert StateFile.parse(file.path) == file
    for other in (
        "shared/e07-a2-c17-v3-s0.state",
        "e7-a2-c17-v3-s0.state",
        "shared/x",
        "../shared/e1-a1-c1-v1-s1.state",
    ):
        assert StateFile.parse(other) is None


def test_chunks_that_are_stored_already_are_not_written_again() -> None:
    storage = MemoryStorage()
    first = {"s": part(Redistribute.KEYED, table([1], [10]))}
    handles = store(storage, first)
    known = known_chunks(handles, read_parts(storage, handles, EVERYTHING, "operator 'x'"))
    more = {"s": part(Redistribute.KEYED, table([1], [10]), table([2], [20]))}
    later = state_file(1, 0, 2, 1, 0)
    (again,) = store_parts(storage, [more], known, later).parts
    assert [chunk.file for chunk in again[0].chunks] == [FILE, later]
    assert len(storage.files[later]) == again[0].chunks[1].length
    assert values(read_parts(storage, again, EVERYTHING, "operator 'x'")) == [10, 20]


def test_tables_are_made_as_they_are_written_one_after_the_other() -> None:
    events: list[str] = []

    class Watched(MemoryStorage):
        def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
            def watched() -> Iterator[bytes | memoryview]:
                for piece in parts:
                    events.append("written")
                    yield piece

            super().write(path, watched())

    def made(value: int) -> pa.Table:
        events.append("made")
        return table([value], [value])

    storage = Watched()
    chunks = tuple(Chunk(f"c{i}", partial(made, i)) for i in range(3))
    first = store(storage, {"s": StatePart(Redistribute.KEYED, chunks)})
    assert events == ["made", "written"] * 3
    assert values(read_parts(storage, first, EVERYTHING, "here")) == [0, 1, 2]
    known = {chunk.id: chunk for handle in first for chunk in handle.chunks}
    events.clear()
    store_parts(storage, [{"s": StatePart(Redistribute.KEYED, chunks)}], known, state_file(1, 0, 2, 1, 0))
    assert events == []


def test_a_chunk_of_which_only_some_rows_are_ours_gets_another_id_and_is_not_known() -> None:
    storage = MemoryStorage()
    handles = store(storage, {"s": part(Redistribute.KEYED, table([1, 9], [10, 90]))})
    half = read_parts(storage, handles, range(8), "operator 'x'")
    assert values(half) == [10]
    assert half["s"].chunks[0].id != "c0"
    assert known_chunks(handles, half) == {}


def test_what_lies_between_chunks_is_read_only_if_it_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Watched(MemoryStorage):
        def read_range(self, path: str, offset: int, length: int) -> bytes:
            read.append(length)
            return super().read_range(path, offset, length)

    storage = Watched()
    groups = [[1], [9], [2], [3]]
    (handle,) = store(storage, {"s": part(Redistribute.KEYED, *(table(each, each) for each in groups))})
    lengths = [chunk.length for chunk in handle.chunks]
    assert values(read_parts(storage, [handle], range(8), "operator 'x'")) == [1, 2, 3]
    assert read == [sum(lengths)]
    read.clear()
    monkeypatch.setattr(state_files, "GAP_BYTES_MAX", lengths[1] - 1)
    assert values(read_parts(storage, [handle], range(8), "operator 'x'")) == [1, 2, 3]
    assert read == [lengths[0], lengths[2] + lengths[3]]


def test_several_operators_share_one_file() -> None:
    storage = MemoryStorage()
    one = {"s": part(Redistribute.UNION, table([0], [1]), prefix="a")}
    two = {"s": part(Redistribute.UNION, table([0], [2]), prefix="b")}
    first, second = store_parts(storage, [one, two], {}, FILE).parts
    assert values(read_parts(storage, first, EVERYTHING, "operator 'x'")) == [1]
    assert values(read_parts(storage, second, EVERYTHING, "operator 'x'")) == [2]
    assert verify_chunks(storage, [*first, *second], "test") == len(storage.files[FILE])


def test_little_state_is_in_its_handles_and_is_stored_again_with_each_checkpoint() -> None:
    """It is in no file that a later checkpoint could refer to."""
    storage = MemoryStorage()
    small = {"s": part(Redistribute.KEYED, table([1], [10]))}
    stored = store_parts(storage, [small], {}, FILE, 10_000)
    (handles,) = stored.parts
    assert storage.files == {} and stored.written.files == () and stored.in_files == {}
    assert 0 < stored.written.inline_bytes == stored.written.stored_bytes == handles[0].chunks[0].length
    found = read_parts(storage, handles, EVERYTHING, "operator 'x'")
    assert values(found) == [10] and known_chunks(handles, found) == {}
    assert verify_chunks(storage, handles, "test") == stored.written.inline_bytes
    more = {"s": StatePart(Redistribute.KEYED, (*small["s"].chunks, Chunk("more", table([2], [20]))))}
    again = store_parts(storage, [more], stored.in_files, FILE, stored.written.inline_bytes)
    assert again.written.files == (FILE,) and set(again.in_files) == {"c0", "more"}
    assert values(read_parts(storage, again.parts[0], EVERYTHING, "operator 'x'")) == [10, 20]


def test_damage_in_the_metadata_is_found_too() -> None:
    (handle,) = store_parts(
        MemoryStorage(), [{"s": part(Redistribute.KEYED, table([1], [10]))}], {}, FILE, 10**6
    ).parts[0]
    (chunk,) = handle.chunks
    altered = msgspec.structs.replace(chunk, inline=chunk.inline[:-1] + bytes([chunk.inline[-1] ^ 1]))
    handle = msgspec.structs.replace(handle, chunks=(altered,))
    with pytest.raises(StorageError, match=r"chunk c0 \(in the metadata\): its checksum is wrong"):
        read_parts(MemoryStorage(), [handle], EVERYTHING, "operator 'x'")


@given(tasks=st.integers(1, 40_000), wanted=st.integers(0, 2**20))
def test_all_tasks_together_leave_no_more_to_the_metadata_than_its_limit(tasks: int, wanted: int) -> None:
    each = inline_bytes_max(wanted, tasks)
    assert each <= wanted and KINDS * tasks * each <= INLINE_JOB_BYTES_MAX < CONTROL_FRAME_BYTES_MAX


def test_keyed_state_without_key_groups_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="no column"):
        store_parts(MemoryStorage(), [{"s": part(Redistribute.KEYED, pa.table({"v": [1]}))}], {}, FILE)


def test_large_chunks_are_compressed_and_come_back() -> None:
    storage = MemoryStorage()
    rows = 50_000
    big = table([3] * rows, list(range(rows)))
    handles = store(storage, {"s": part(Redistribute.KEYED, big)})
    assert len(storage.files[FILE]) < big.nbytes
    assert read_parts(storage, handles, EVERYTHING, "operator 'x'")["s"].table().equals(big)


@pytest.mark.parametrize("window", [1, 3000])
def test_a_long_file_is_read_in_parts(window: int) -> None:
    class Noting(MemoryStorage):
        def read(self, path: str) -> bytes:
            raise AssertionError(f"{path} was read as a whole")

        def read_range(self, path: str, offset: int, length: int) -> bytes:
            ranges.append((offset, length))
            return self.files[path][offset : offset + length]

    ranges: list[tuple[int, int]] = []
    storage = Noting()
    tables = [table([i] * 50, list(range(50 * i, 50 * i + 50))) for i in range(8)]
    handles = store(storage, {"s": part(Redistribute.KEYED, *tables)})
    with patch.object(state_files, "WINDOW_BYTES", window):
        assert values(read_parts(storage, handles, EVERYTHING, "operator 'x'")) == list(range(400))
        longest = max(chunk.length for chunk in handles[0].chunks)
        assert all(length <= max(window, longest) for _, length in ranges)
        assert len(ranges) == 8 if window == 1 else 1 < len(ranges) < 8
        data = storage.files[FILE]
        storage.files[FILE] = data[:-1]
        with pytest.raises(StorageError, match="chunk c7"):
            read_parts(storage, handles, EVERYTHING, "operator 'x'")
        storage.files[FILE] = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
        with pytest.raises(StorageError, match="chunk c7"):
            verify_chunks(storage, handles, "operator 'x'")


def test_each_table_is_kept_where_the_caller_wants_it() -> None:
    storage, kept = MemoryStorage(), []

    def keep(read: pa.Table) -> pa.Table:
        kept.append(read.num_rows)
        return table_on_disk(read, MemoryDisk())

    handles = store(storage, {"s": part(Redistribute.KEYED, table([1, 9], [10, 11]), table([2], [20]))})
    assert values(read_parts(storage, handles, EVERYTHING, "operator 'x'", keep)) == [10, 11, 20]
    assert kept == [2, 1]
    assert values(read_parts(storage, handles, range(2), "operator 'x'", keep)) == [10]


@pytest.mark.parametrize("damage", ["flip", "short", "missing", "replaced"])
def test_damage_is_found_and_names_operator_and_file(damage: str) -> None:
    storage = MemoryStorage()
    handles = store(storage, {"s": part(Redistribute.KEYED, table([1, 2], [10, 20]))})
    data = bytearray(storage.files[FILE])
    if damage == "flip":
        data[len(data) // 2] ^= 1
        storage.files[FILE] = bytes(data)
    elif damage == "short":
        storage.files[FILE] = bytes(data[:-1])
    elif damage == "replaced":
        storage.files[FILE] = b""
    else:
        del storage.files[FILE]
    for read in (
        lambda: read_parts(storage, handles, EVERYTHING, "operator 'x'"),
        lambda: verify_chunks(storage, handles, "operator 'x'"),
    ):
        with pytest.raises(StorageError, match="operator 'x'") as caught:
            read()
        assert FILE in str(caught.value)


def test_an_unknown_rule_is_an_error_and_so_are_two_rules_for_one_part() -> None:
    storage = MemoryStorage()
    handles = store(storage, {"s": part(Redistribute.UNION, table([0], [1]))})
    odd = PartHandle("s", "magic", handles[0].chunks)
    with pytest.raises(StorageError, match="unknown rule 'magic'"):
        read_parts(storage, [odd], EVERYTHING, "operator 'x'")
    with pytest.raises(StorageError, match="union in one subtask and split in another"):
        read_parts(storage, [*handles, PartHandle("s", "split", handles[0].chunks)], EVERYTHING, "operator 'x'")


# ---- through metadata and back at another parallelism ----------------------

rows_of_subtask = st.lists(
    st.lists(st.tuples(st.integers(0, MAX_PARALLELISM - 1), st.integers(0, 10**6)), max_size=8), max_size=3
)


def snapshots(
    storage: MemoryStorage, rule: Redistribute, subtasks: list[list[list[tuple[int, int]]]]
) -> tuple[OperatorSnapshot, ...]:
    """Old subtask i holds these chunks of (key group, value)."""
    out = []
    for i, chunks in enumerate(subtasks):
        tables = [table([g for g, _ in rows], [v for _, v in rows]) for rows in chunks]
        handles = store(storage, {"s": part(rule, *tables, prefix=f"{i}-")}, state_file(1, 0, 1, 1, i))
        out.append(OperatorSnapshot("count", handles))
    return tuple(out)


def restored(storage: MemoryStorage, snaps: tuple[OperatorSnapshot, ...], new: int) -> list[list[tuple[int, int]]]:
    """Rows of each new subtask."""
    graph = pipeline(workers=len(snaps))
    old = metadata_of(graph, {"count": snaps}).operators[1]
    out = []
    for j, assigned in enumerate(assign_operator(old, new, graph)):
        parts = read_parts(storage, assigned.parts, key_group_range(j, new, MAX_PARALLELISM), "operator 'x'")
        found = parts["s"].table() if "s" in parts else table([], [])
        out.append(list(zip(to_list(found.column(0)), to_list(found.column("v")), strict=True)))
    return out


@settings(max_examples=examples(60))
@given(rows=st.lists(rows_of_subtask, min_size=1, max_size=4), new=st.integers(1, 5))
def test_keyed_rows_reach_the_owner_of_their_key_group_once(rows: list[list[list[tuple[int, int]]]], new: int) -> None:
    old = len(rows)
    for i, chunks in enumerate(rows):  # each old subtask holds only what it owned
        owned = key_group_range(i, old, MAX_PARALLELISM)
        rows[i] = [[(owned.start + g % len(owned), v) for g, v in chunk] for chunk in chunks]
    storage = MemoryStorage()
    after = restored(storage, snapshots(storage, Redistribute.KEYED, rows), new)
    assert sorted(row for task in after for row in task) == sorted(r for task in rows for chunk in task for r in chunk)
    for j, task in enumerate(after):
        owned = key_group_range(j, new, MAX_PARALLELISM)
        assert all(group in owned for group, _ in task)


@settings(max_examples=examples(60))
@given(rows=st.lists(rows_of_subtask, min_size=1, max_size=4), new=st.integers(1, 5))
def test_split_rows_are_dealt_out_evenly_and_once(rows: list[list[list[tuple[int, int]]]], new: int) -> None:
    storage = MemoryStorage()
    after = restored(storage, snapshots(storage, Redistribute.SPLIT, rows), new)
    assert sorted(row for task in after for row in task) == sorted(r for task in rows for chunk in task for r in chunk)
    if new != len(rows):
        sizes = [len(task) for task in after]
        assert max(sizes) - min(sizes) <= 1
    else:
        assert [sorted(task) for task in after] == [sorted(r for chunk in task for r in chunk) for task in rows]


@settings(max_examples=examples(30))
@given(rows=st.lists(rows_of_subtask, min_size=1, max_size=4), new=st.integers(1, 5))
def test_union_rows_reach_everybody(rows: list[list[list[tuple[int, int]]]], new: int) -> None:
    storage = MemoryStorage()
    after = restored(storage, snapshots(storage, Redistribute.UNION, rows), new)
    everything = sorted(r for task in rows for chunk in task for r in chunk)
    assert all(sorted(task) == everything for task in after)


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_broadcast_rows_reach_everybody_in_one_copy(new: int) -> None:
    storage = MemoryStorage()
    same = [[(0, 1), (0, 2)]]
    after = restored(storage, snapshots(storage, Redistribute.BROADCAST, [same, same, same]), new)
    assert after == [[(0, 1), (0, 2)]] * new


def test_a_restore_of_a_restore_keeps_every_row() -> None:
    storage = MemoryStorage()
    rows = [[(g, g * 10 + i) for i in range(3)] for g in range(MAX_PARALLELISM)]
    snaps = snapshots(storage, Redistribute.KEYED, [rows])
    for step, new in enumerate((3, 2, 5, 1)):
        graph = pipeline(workers=len(snaps))
        old = metadata_of(graph, {"count": snaps}).operators[1]
        following = []
        for j, assigned in enumerate(assign_operator(old, new, graph)):
            handles = assigned.parts
            parts = read_parts(storage, handles, key_group_range(j, new, MAX_PARALLELISM), "operator 'x'")
            file = state_file(1, step + 1, step + 2, 1, j)
            (written,) = store_parts(storage, [parts], known_chunks(handles, parts), file).parts
            following.append(OperatorSnapshot("count", written))
        snaps = tuple(following)
    (after,) = restored(storage, snaps, 1)
    assert sorted(after) == sorted(row for chunk in rows for row in chunk)
    assert np.unique([v for _, v in after]).size == len(after)
