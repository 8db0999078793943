"""Channel state comes back as it was written, or with an error that says what is wrong with which file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from in_memory import MemoryStorage
from midstream.engine.checkpoint.channel_state import (
    Captured,
    channel_text,
    read_segment,
    rows_of,
    store_channels,
    verify_channels,
)
from midstream.engine.checkpoint.state_files import StateFile, channel_file, state_file
from midstream.engine.core.errors import StorageError
from midstream.engine.core.key_groups import key_group_range, key_groups
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.protocol.messages import ChannelState
from recovering import SCHEMA, SameRows, batch, rows_in, store

EDGE = Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("key",))
FILE = "shared/e1-a0-c1-v1-s0.channels"


def read(storage: MemoryStorage, state: ChannelState) -> list[pa.RecordBatch]:
    return [b for segment in state.segments for b in read_segment(storage, segment, [SCHEMA], channel_text(state))]


@settings(max_examples=examples(80))
@given(
    channels=st.lists(st.lists(st.integers(0, 400), max_size=6), max_size=5),
    segment_bytes=st.sampled_from([1, 700, 5_000, 10**9]),
)
def test_batches_come_back_as_they_were_in_segments_of_a_size(channels: list[list[int]], segment_bytes: int) -> None:
    captured = [
        Captured(3, i, 7, i % 2 == 1, tuple(batch([(n, n) for n in range(rows)]) for rows in sizes))
        for i, sizes in enumerate(channels)
    ]
    storage = MemoryStorage()
    states, written = store_channels(storage, captured, FILE, segment_bytes)
    assert written.inline_bytes == 0 and written.files == ((FILE,) if states else ())
    assert [(s.edge, s.producer, s.consumer, s.is_output) for s in states] == [
        (3, c.producer, 7, c.is_output) for c in captured if c.batches
    ]
    for item, state in zip([c for c in captured if c.batches], states, strict=True):
        found = read(storage, state)
        assert [b.equals(a) for a, b in zip(item.batches, found, strict=True)] == [True] * len(item.batches)
        assert all(segment.batches >= 1 for segment in state.segments)
        for segment in state.segments[:-1]:
            assert segment.length >= segment_bytes, "only the last segment is smaller"
        assert sum(s.rows for s in state.segments) == sum(b.num_rows for b in item.batches)
    extents = sorted((s.offset, s.length) for state in states for s in state.segments)
    assert [offset for offset, _ in extents] == [sum(length for _, length in extents[:i]) for i in range(len(extents))]
    assert sum(length for _, length in extents) == written.stored_bytes == len(storage.files.get(FILE, b""))


def test_of_a_slice_only_its_own_rows_are_stored() -> None:
    whole = batch([(n, n) for n in range(10_000)])
    _, written = store_channels(MemoryStorage(), [Captured(0, 0, 0, False, (whole.slice(9_990),))], FILE, 1)
    assert 0 < written.stored_bytes < 1_000


def test_what_is_stored_already_is_referred_to_and_not_written_again() -> None:
    storage = MemoryStorage()
    old = store(storage, [Captured(0, 1, 2, True, (batch([(1, 1)]),))], "shared/old")
    states, written = store_channels(storage, [Captured(0, 0, 2, False, stored=old)], FILE, 1)
    assert written.files == () and states == old and FILE not in storage.files


def test_text_and_nulls_come_back() -> None:
    schema = pa.schema([("text", pa.large_string()), ("list", pa.large_list(pa.int64()))])
    rows = pa.RecordBatch.from_pydict({"text": ["ä", None, ""], "list": [[1], None, []]}, schema=schema)
    storage = MemoryStorage()
    (state,), _ = store_channels(storage, [Captured(0, 0, 0, False, (rows.slice(1),))], FILE, 1)
    (found,) = read_segment(storage, state.segments[0], [schema], "here")
    assert found.equals(rows.slice(1))


# ---- damage ----------------------------------------------------------------


def damaged(change: Callable[[bytearray], None]) -> tuple[MemoryStorage, ChannelState]:
    storage = MemoryStorage()
    (state,) = store(storage, [Captured(0, 4, 5, False, (batch([(1, 1)] * 50), batch([(2, 2)] * 50)))], FILE, 1)
    assert len(state.segments) == 2
    content = bytearray(storage.files[FILE])
    change(content)
    storage.files[FILE] = bytes(content)
    return storage, state


def cut(content: bytearray) -> None:
    del content[-1:]


def flip(content: bytearray) -> None:
    content[-20] ^= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"only \d+ bytes of it are present: it was truncated or replaced"),
        (bytearray.clear, "only 0 bytes of it are present"),
        (flip, "its checksum is wrong: the file is damaged"),
    ],
)
def test_a_short_or_altered_file_is_named_with_the_channel_and_a_way_out(
    change: Callable[[bytearray], None], message: str
) -> None:
    storage, state = damaged(change)
    for attempt, expected in (
        (lambda: read(storage, state), message),
        (lambda: verify_channels(storage, [state]), "wrong" if change is flip else "its last byte is missing"),
    ):
        with pytest.raises(StorageError, match=expected) as error:
            attempt()
        text = str(error.value)
        assert FILE in text and "edge 0, subtask 4 to 5" in text and "--from" in text


def test_a_file_that_is_short_is_found_before_another_is_read() -> None:
    """Looking for the last byte of each costs next to nothing; reading what is in flight may take a while."""
    storage = MemoryStorage()
    (whole,) = store(storage, [Captured(0, 4, 5, False, (batch([(1, 1)] * 50),))], "shared/whole")
    (short,) = store(storage, [Captured(0, 4, 5, False, (batch([(1, 1)] * 50),))], "shared/short")
    storage.files["shared/short"] = storage.files["shared/short"][:-1]
    lengths: list[int] = []
    original = storage.read_range

    def read_range(path: str, offset: int, length: int) -> bytes:
        lengths.append(length)
        return original(path, offset, length)

    storage.read_range = read_range  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="shared/short"):
        verify_channels(storage, [whole, short])
    assert lengths == [1, 1]


def test_what_was_verified_is_handed_out_up_to_a_limit_and_read_no_second_time() -> None:
    storage = MemoryStorage()
    (state,) = store(storage, [Captured(0, 4, 5, False, (batch([(1, 1)] * 50), batch([(2, 2)] * 50)))], FILE, 1)
    first, second = state.segments
    assert verify_channels(storage, [state]) == {}
    kept = verify_channels(storage, [state], first.length + second.length - 1)
    assert list(kept) == [(FILE, first.offset)]
    storage.files.clear()
    (found,) = read_segment(storage, first, [SCHEMA], "here", kept[FILE, first.offset])
    assert rows_in(found) == [(1, 1)] * 50


# ---- in the metadata ---------------------------------------------------------


def test_few_bytes_are_in_their_handles_and_need_no_file() -> None:
    storage = MemoryStorage()
    rows = batch([(1, 1), (2, 2)])
    captured = [Captured(0, 4, 5, False, (rows,)), Captured(0, 4, 6, True, (rows, rows))]
    _, written = store_channels(MemoryStorage(), captured, FILE, 1)
    states, inline = store_channels(storage, captured, FILE, 1, written.stored_bytes)
    assert storage.files == {} and inline.files == () and inline.inline_bytes == written.stored_bytes
    assert [[rows_in(b) for b in read(storage, state)] for state in states] == [[rows_in(rows)], [rows_in(rows)] * 2]
    assert verify_channels(storage, states) == {}
    _, too_many = store_channels(storage, captured, FILE, 1, written.stored_bytes - 1)
    assert too_many.files == (FILE,) and too_many.inline_bytes == 0


def test_what_an_older_checkpoint_holds_inline_counts_and_moves_into_a_file_when_it_is_too_much() -> None:
    storage = MemoryStorage()
    older, written = store_channels(storage, [Captured(0, 4, 5, True, (batch([(1, 1)]),))], "shared/old", 1, 10_000)
    more = Captured(0, 4, 5, False, (batch([(2, 2)]),), older)
    both, inline = store_channels(storage, [more], FILE, 1, written.inline_bytes + 10_000)
    assert storage.files == {} and both[0] == older[0] and inline.stored_bytes < 2 * written.inline_bytes
    moved, spilled = store_channels(storage, [more], FILE, 1, written.inline_bytes - 1)
    assert spilled.files == (FILE,) and all(not s.inline for state in moved for s in state.segments)
    assert [state.is_output for state in moved] == [True, False]
    assert [rows_in(b) for state in moved for b in read(storage, state)] == [[(1, 1)], [(2, 2)]]


def test_encoding_keeps_no_more_than_a_segment_however_much_is_written() -> None:
    class Counting(MemoryStorage):
        most_bytes = 0

        def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
            before = pa.total_allocated_bytes()
            for _ in parts:
                self.most_bytes = max(self.most_bytes, pa.total_allocated_bytes() - before)

    storage = Counting()
    rows = batch([(n, n) for n in range(6_400)])  # 100 KiB
    captured = [Captured(0, i, 5, False, (rows,) * 20) for i in range(10)]
    _, written = store_channels(storage, captured, FILE, 1)
    assert written.stored_bytes > 20_000_000
    assert 0 < storage.most_bytes < 300_000


def test_a_missing_file_is_named_before_anything_is_read() -> None:
    storage, state = damaged(cut)
    del storage.files[FILE]
    with pytest.raises(StorageError, match=r"in-flight data of edge 0, subtask 4 to 5: cannot read .*no such file"):
        verify_channels(storage, [state])


def test_damage_in_what_has_been_consumed_is_no_hindrance() -> None:
    storage, state = damaged(lambda content: content.__setitem__(10, content[10] ^ 1))
    verify_channels(storage, [msgspec.structs.replace(state, skip=1)])
    with pytest.raises(StorageError, match="checksum"):
        verify_channels(storage, [state])


def test_whole_bytes_that_are_something_else_are_told_from_damage() -> None:
    storage, state = damaged(lambda content: None)
    segment = state.segments[0]
    with pytest.raises(StorageError, match="it does not hold 2 batches of 50 rows"):
        read_segment(storage, msgspec.structs.replace(segment, batches=2), [SCHEMA], "here")
    with pytest.raises(StorageError, match="it does not hold 1 batches of 51 rows"):
        read_segment(storage, msgspec.structs.replace(segment, rows=51), [SCHEMA], "here")
    with pytest.raises(StorageError, match="are not batches of this edge"):
        read_segment(storage, segment, [pa.schema([*SCHEMA, ("more", pa.large_string())])], "here")


def test_a_length_that_lies_is_refused_before_memory_is_taken() -> None:
    import xxhash

    storage = MemoryStorage()
    (state,) = store(storage, [Captured(0, 0, 0, False, (batch([(1, 1)]),))], FILE)
    rest = storage.files[FILE][8:]
    for number, wrong in (
        (2**55, r"a batch of \d+ bytes is announced where \d+ are left"),
        (2**57 + len(rest), "a batch of layout 2 is announced where there are 1"),
    ):
        storage.files[FILE] = content = number.to_bytes(8, "little") + rest
        lying = msgspec.structs.replace(state.segments[0], checksum=xxhash.xxh3_64_intdigest(content))
        with pytest.raises(StorageError, match=wrong):
            read_segment(storage, lying, [SCHEMA], "here")


def test_combined_batches_come_back_as_such_and_are_counted() -> None:
    storage, rows, combiner = MemoryStorage(), batch([(1, 1), (2, 2)]), SameRows()
    sent = (rows, combiner.combine(rows), combiner.combine(rows), rows)
    (state,) = store(storage, [Captured(0, 0, 0, False, sent, layouts=(0, 1, 1, 0))], FILE, 10**6)
    (segment,) = state.segments
    assert (segment.batches, segment.rows, segment.combined) == (4, 8, 2)
    assert read_segment(storage, segment, [SCHEMA, combiner.schema], "here") == list(sent)
    with pytest.raises(StorageError, match="a batch of layout 1 is announced where there are 1"):
        read_segment(storage, segment, [SCHEMA], "here")


# ---- filter and names ------------------------------------------------------


@given(batches=st.lists(st.lists(st.integers(-100, 100), max_size=20), max_size=4), parallelism=st.integers(1, 8))
@settings(max_examples=examples(60))
def test_the_filters_of_all_consumers_together_keep_each_row_once_and_in_order(
    batches: list[list[int]], parallelism: int
) -> None:
    rows = [batch([(key, n) for n, key in enumerate(keys)]) for keys in batches]
    kept: list[list[tuple[int, int]]] = [[] for _ in rows]
    for subtask in range(parallelism):
        own = key_group_range(subtask, parallelism, 16)
        parts = rows_of(
            rows, EDGE.keys, EDGE.layouts, ChannelState(0, 0, 0, False, (), 0, (own.start, own.stop)), 0, 16
        )
        assert len(parts) == len(rows)
        for found, part in zip(kept, parts, strict=True):
            assert rows_in(part) == sorted(rows_in(part), key=lambda row: row[1])
            assert all(group in own for group in key_groups(part, ("key",), 16).tolist())
            found += rows_in(part)
    assert [sorted(found, key=lambda row: row[1]) for found in kept] == [rows_in(whole) for whole in rows]
    assert rows_of(rows, EDGE.keys, EDGE.layouts, ChannelState(0, 0, 0, False, ()), 0, 16) is rows


def test_files_of_one_task_and_checkpoint_have_names_of_their_own() -> None:
    paths = [state_file(1, 2, 3, 4, 5), *(channel_file(1, 2, 3, 4, 5, part) for part in range(3))]
    assert len(set(paths)) == 4
    parsed = [StateFile.parse(path) for path in paths]
    assert [file.kind for file in parsed if file] == ["state", "channels", "channels-1", "channels-2"]
    assert [file.path for file in parsed if file] == paths
    for wrong in ("channels-", "channels-0", "channels-01", "channels--1", "state-1"):
        assert StateFile.parse(f"shared/e1-a2-c3-v4-s5.{wrong}") is None
