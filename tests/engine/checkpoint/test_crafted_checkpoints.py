"""Bytes with a right checksum that midstream has not written are refused before anything is computed with them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import xxhash

from checkpoint_samples import metadata_of, pipeline
from in_memory import MemoryStorage
from midstream.engine.checkpoint.channel_state import read_segment
from midstream.engine.checkpoint.metadata import CheckpointMetadata, SourcePosition, decode_metadata, encode_metadata
from midstream.engine.checkpoint.state_files import read_parts, state_file, store_parts
from midstream.engine.checkpoint.stored_states import StoredState
from midstream.engine.core.batch_framing import prefix
from midstream.engine.core.errors import StorageError
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, PartHandle, Segment
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute, StatePart

replace = msgspec.structs.replace
CHUNK = ChunkHandle("c", "shared/f", 0, 10, 7, 3)
PART = PartHandle("rows", "keyed", (CHUNK,))
CHANNEL = ChannelState(0, 0, 0, False, (Segment("shared/f", 0, 10, 7, 1, 3),))


def with_part(part: PartHandle) -> Callable[[CheckpointMetadata], CheckpointMetadata]:
    def changed(metadata: CheckpointMetadata) -> CheckpointMetadata:
        first, *others = metadata.operators
        subtasks = (OperatorSnapshot(first.uid, (part,)), *first.subtasks[1:])
        return replace(metadata, operators=(replace(first, subtasks=subtasks), *others))

    return changed


def with_chunk(**fields: Any) -> Callable[[CheckpointMetadata], CheckpointMetadata]:
    return with_part(replace(PART, chunks=(replace(CHUNK, **fields),)))


def with_first(name: str, **fields: Any) -> Callable[[CheckpointMetadata], CheckpointMetadata]:
    def changed(metadata: CheckpointMetadata) -> CheckpointMetadata:
        first, *others = getattr(metadata, name)
        return replace(metadata, **{name: (replace(first, **fields), *others)})

    return changed


def with_channel(**fields: Any) -> Callable[[CheckpointMetadata], CheckpointMetadata]:
    return lambda metadata: replace(metadata, channels=(replace(CHANNEL, **fields),))


CRAFTED: list[tuple[Callable[[CheckpointMetadata], CheckpointMetadata], str]] = [
    (lambda m: replace(m, max_parallelism=0), "max_parallelism is 0"),
    (lambda m: replace(m, max_parallelism=10**9), "max_parallelism is 1000000000"),
    (lambda m: replace(m, checkpoint_id=-1), "checkpoint_id is -1"),
    (lambda m: replace(m, files=("../../etc/passwd",)), "not a path within the checkpoint directory"),
    (lambda m: replace(m, vertices=m.vertices[1:]), "vertex 0 has the id 1"),
    (lambda m: replace(m, operators=(*m.operators, m.operators[0])), "two operators have the uid"),
    (with_first("vertices", parallelism=0), "vertex 0 has a parallelism of 0"),
    (with_first("vertices", parallelism=2**40), "vertex 0 has a parallelism of 1099511627776"),
    (with_first("vertices", uids=()), "vertex 0 has no operators"),
    (with_chunk(), "file 'shared/f' is referred to, and is not among its files"),
    (with_channel(), "file 'shared/f' is referred to, and is not among its files"),
    (with_chunk(offset=2**63 - 1), "in 10 bytes at 9223372036854775807"),
    (with_channel(segments=(Segment("f", 0, 2**63, 7, 1, 1),)), "in 9223372036854775808 bytes at 0"),
    (with_channel(segments=(Segment("f", 0, 1, 7, 0, 1),)), "combined batches of 0"),
    (with_first("edges", target=99), "leads from vertex 0 to 99"),
    (with_first("edges", partitioning="anyhow"), "the partitioning 'anyhow'"),
    (with_first("operators", parallelism=7), "has a parallelism of 7"),
    (with_first("operators", subtasks=()), "has 0 subtasks"),
    (with_first("operators", vertex=12), "its vertex 12"),
    (with_first("operators", finished=(1, 0)), "the finished subtasks"),
    (with_first("operators", finished=(99,)), "the finished subtasks"),
    (with_part(replace(PART, stride=0)), "the rows from 0 by 0"),
    (with_part(replace(PART, index=-1)), "the rows from -1 by 1"),
    (with_part(replace(PART, redistribute="by chance")), "redistributed as 'by chance'"),
    (with_chunk(key_group_max=10**6), "the key groups"),
    (with_chunk(key_group_min=5, key_group_max=3), "the key groups"),
    (with_chunk(rows=-3), "-3 rows"),
    (with_chunk(offset=-3), "at -3"),
    (with_chunk(file="/etc/passwd"), "not a path within"),
    (with_chunk(file="shared/../../x"), "not a path within"),
    (with_chunk(removed=(replace(CHUNK, offset=-3),)), "deletion vector c: 3 rows in 10 bytes at -3"),
    (with_chunk(removed=(replace(CHUNK, file="/etc/passwd"),)), "not a path within"),
    (with_chunk(removed=(replace(CHUNK, rows=2), replace(CHUNK, rows=2))), "4 of its 3 rows have been removed"),
    (with_chunk(removed=(replace(CHUNK, removed=(CHUNK,)),)), "deletion vector c has deletion vectors"),
    (
        with_part(replace(PART, redistribute="split", chunks=(replace(CHUNK, removed=(CHUNK,)),))),
        "redistributed as 'split'",
    ),
    (with_chunk(file="", removed=(CHUNK,)), "file 'shared/f' is referred to, and is not among its files"),
    (with_channel(edge=99), "there are"),
    (with_channel(producer=-1), "there is no such producer"),
    (with_channel(consumer=99), "it leads to"),
    (with_channel(skip=-2), "-2 batches"),
    (with_channel(key_groups=(5, 10**6)), "the key groups 5 to 1000000"),
    (with_channel(ahead=((9, 3, 1),)), "the key groups 9 to 3"),
    (with_channel(segments=(Segment("../f", 0, 1, 7, 1, 1),)), "not a path within"),
    (with_channel(segments=(Segment("f", 0, 1, 7, 1, 1, combined=2),)), "2 combined batches of 1"),
    (with_channel(segments=(Segment("f", 0, 1, 7, -1, 1),)), "combined batches of -1"),
]


@pytest.mark.parametrize(("crafted", "message"), CRAFTED, ids=[message for _, message in CRAFTED])
def test_metadata_that_was_not_written_is_refused_by_its_place(
    crafted: Callable[[CheckpointMetadata], CheckpointMetadata], message: str
) -> None:
    metadata = metadata_of(pipeline())
    assert decode_metadata(encode_metadata(metadata), "chk-1") == metadata
    with pytest.raises(StorageError, match=r"^chk-1: the checksum is correct but the content is invalid: ") as refused:
        decode_metadata(encode_metadata(crafted(metadata)), "chk-1")
    assert message in str(refused.value)


def test_splits_that_would_unpack_to_more_than_their_bytes_account_for_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("midstream.engine.checkpoint.metadata._UNPACKED_BYTES_MAX", 10**6)
    packed = zlib.compress(msgspec.msgpack.encode((bytes(10**7),)))
    metadata = replace(metadata_of(pipeline()), sources=(SourcePosition("read", None, True, (), packed),))
    with pytest.raises(StorageError, match=r"chk-1: .* the splits of source 'read' take more than"):
        decode_metadata(encode_metadata(metadata), "chk-1")


COLUMNS: dict[str, pa.Array[Any]] = {
    "text": pa.array(["ab", "cd", "é"]),
    "large text": pa.array(["ab", "cd", "é"], pa.large_string()),
    "bytes": pa.array([b"ab", b"cd", b"e"]),
    "list": pa.array([[1], [2, 3], []]),
    "large list": pa.array([[1], [2, 3], []], pa.large_list(pa.int64())),
    "map": pa.array([[("a", 1)], [], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
    "struct": pa.array([{"a": "x"}, {"a": "yz"}, {"a": ""}]),
    "text view": pa.array(["ab", "a text that is longer than twelve", "é"], pa.string_view()),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
}


def crafted_bytes(data: bytes) -> list[bytes]:
    """Each four bytes of them as a large number, and as a negative one."""
    return [
        data[:at] + value + data[at + 4 :]
        for at in range(0, len(data) - 3, 4)
        for value in (b"\xff\xff\xff\x7f", b"\xf0\xff\xff\xff")
    ]


@pytest.mark.parametrize("name", COLUMNS)
def test_state_with_a_right_checksum_is_read_whole_or_refused(name: str) -> None:
    table = pa.table({"x": COLUMNS[name]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    refused = 0
    for data in crafted_bytes(sink.getvalue().to_pybytes()):
        chunk = ChunkHandle("c", "", 0, len(data), xxhash.xxh3_64_intdigest(data), 3, inline=data)
        handles = (PartHandle("rows", "union", (chunk,)),)
        try:
            [part] = read_parts(MemoryStorage(), handles, range(128), "op").values()
        except StorageError:
            refused += 1
        else:
            assert [len(each.table.to_pylist()) for each in part.chunks] == [3]
    assert refused


GROUPS = pa.array([1, 2], pa.int32())
STATE_WITH_WRONG_GROUPS = {
    "no column": ("keyed", {"x": GROUPS}, "not one column '__key_group'"),
    "of another type": ("keyed", {KEY_GROUP: pa.array([1, 2])}, "of the type int64 instead of int32"),
    "null": ("keyed", {KEY_GROUP: pa.array([1, None], pa.int32())}, "1 nulls in column '__key_group'"),
    "of others": (
        "keyed",
        {KEY_GROUP: pa.array([1, 9], pa.int32())},
        "the key groups 1 to 9, and the metadata has 1 to 2",
    ),
    "keyed, and said to be dealt out": ("split", {KEY_GROUP: GROUPS}, "redistributed as 'split'"),
}


@pytest.mark.parametrize("name", STATE_WITH_WRONG_GROUPS)
def test_state_of_keys_has_the_key_groups_that_the_metadata_says_and_no_other_state_has_any(name: str) -> None:
    rule, columns, message = STATE_WITH_WRONG_GROUPS[name]
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    chunk = ChunkHandle("c", "", 0, len(data), xxhash.xxh3_64_intdigest(data), 2, 1, 2, inline=data)
    with pytest.raises(StorageError, match="operator 'x'") as refused:
        read_parts(MemoryStorage(), (PartHandle("rows", rule, (chunk,)),), range(128), "operator 'x'")
    assert message in str(refused.value)


@pytest.mark.parametrize("other", ["rows", "n"])
def test_state_of_which_one_subtask_has_other_columns_is_not_shown(other: str) -> None:
    tables = [
        pa.table({KEY_GROUP: pa.array([1], pa.int32()), "n": [1], "x": ["a"]}),
        pa.table({KEY_GROUP: pa.array([2], pa.int32()), other: [1.5], "x": ["b"]}),
    ]
    storage = MemoryStorage()
    handles = [
        handle
        for number, table in enumerate(tables)
        for handle in store_parts(
            storage,
            [{"table:rows": StatePart(Redistribute.KEYED, (Chunk(f"c{number}", table),))}],
            {},
            state_file(1, 1, 1, 0, number),
        ).parts[0]
    ]
    state = StoredState("op", "op", "table:rows", Redistribute.KEYED, tuple(handles), "n", 128)
    with pytest.raises(
        StorageError, match="chk-1: state 'table:rows' of operator 'op': the columns of one subtask are"
    ):
        list(state.frames(storage, "chk-1"))


def test_state_without_columns_is_not_shown() -> None:
    part = StatePart(Redistribute.SPLIT, (Chunk("c", pa.table({"x": [1]}).select([])),))
    storage = MemoryStorage()
    handles = store_parts(storage, [{"splits": part}], {}, state_file(1, 1, 1, 0, 0)).parts[0]
    state = StoredState("op", "op", "splits", Redistribute.SPLIT, handles, "", 128)
    with pytest.raises(StorageError, match="chk-1: state 'splits' of operator 'op': a chunk has no columns"):
        list(state.frames(storage, "chk-1"))


def test_state_of_keys_without_key_groups_is_not_shown() -> None:
    storage = MemoryStorage()
    part = StatePart(Redistribute.SPLIT, (Chunk("c", pa.table({"split": [b"a"]})),))
    [handle] = store_parts(storage, [{"splits": part}], {}, state_file(1, 1, 1, 0, 0)).parts[0]
    keyed = msgspec.structs.replace(handle, redistribute=Redistribute.KEYED.value)
    state = StoredState("op", "op", "splits", Redistribute.KEYED, (keyed,), "", 128)
    with pytest.raises(StorageError, match="chk-1: state 'splits' of operator 'op': its rows are in no key group"):
        list(state.frames(storage, "chk-1"))


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_in_flight_with_a_right_checksum_are_read_whole_or_refused(name: str) -> None:
    if name == "dictionary":
        return  # a batch in flight has its dictionary outside of itself; no edge carries one
    batch = pa.record_batch({"x": COLUMNS[name]})
    refused = 0
    for message in crafted_bytes(batch.serialize().to_pybytes()):
        data = prefix(len(message), 0) + message
        segment = Segment("", 0, len(data), xxhash.xxh3_64_intdigest(data), 1, 3, data)
        try:
            [found] = read_segment(MemoryStorage(), segment, [batch.schema], "a channel")
        except StorageError:
            refused += 1
        else:
            assert len(found.to_pylist()) == 3
    assert refused
