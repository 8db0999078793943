"""Metadata comes back as it was written, or not at all."""

from __future__ import annotations

import dataclasses
import re
import struct

import msgspec
import pyarrow as pa
import pytest
import xxhash

from checkpoint_samples import metadata_of, pipeline
from midstream.checkpoint.compatible import check_hashes
from midstream.checkpoint.metadata import (
    MAGIC,
    VERSION,
    CheckpointMetadata,
    SourcePosition,
    decode_metadata,
    encode_metadata,
)
from midstream.core.errors import ConfigError, StorageError
from midstream.graph.job_graph import JobGraph
from midstream.protocol.messages import ChannelState, Segment


def test_it_comes_back() -> None:
    metadata = metadata_of(pipeline(), finished={"read": (0, 1)})
    again = decode_metadata(encode_metadata(metadata), "chk-1/_metadata")
    assert again == metadata
    assert again.finished_vertices == (0,)


def test_channels_come_back_however_many_there_are() -> None:
    file = Segment("shared/f", 30_000, 500, 7, 2, 20)
    inline = Segment("", 0, 3, 7, 1, 1, b"abc")
    for count in (0, 1, 15, 16, 4095, 4096, 4097, 70_000):
        channels = tuple(
            ChannelState(
                0, i % 2, i % 2, i % 2 == 0, (file, inline)[: i % 3], i % 4, None, ((0, 1, i),) * (i % 2), i or None
            )
            for i in range(count)
        )
        metadata = msgspec.structs.replace(metadata_of(pipeline(), files=(file.file,)), channels=channels)
        assert decode_metadata(encode_metadata(metadata), "it") == metadata


def test_splits_that_wait_come_back_and_many_of_them_take_little_room() -> None:
    for count in (0, 1, 1000, 100_000):
        pending = tuple(b"%08d:/data/in/part-%08d.csv:%d" % (n, n, n * 7919 % 1000) * 3 for n in range(count))
        metadata = msgspec.structs.replace(
            metadata_of(pipeline()), sources=(SourcePosition("in", b"p", True, pending),)
        )
        encoded = encode_metadata(metadata)
        assert decode_metadata(encoded, "it") == metadata
        assert len(encoded) < 4096 + max(64 * 2**10, sum(map(len, pending)) / 7)


def test_splits_of_an_older_format_are_read() -> None:
    content = msgspec.to_builtins(metadata_of(pipeline(), files=("f",)), builtin_types=(bytes,))
    waits = {"uid": "in", "position": b"p", "exhausted": False, "pending": [b"x" * 100_000, b"y"]}
    payload = msgspec.msgpack.encode({**content, "sources": [waits]})
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<IQ", 4, len(payload)) + payload)
    (source,) = decode_metadata(struct.pack("<8sIQQ", MAGIC, 4, len(payload), checksum) + payload, "it").sources
    assert source == SourcePosition("in", b"p", False, (b"x" * 100_000, b"y"))


def test_channels_of_an_older_format_are_read() -> None:
    """They say nothing of what consumers share: each has what it refers to for itself."""
    old = {"edge": 0, "producer": 1, "consumer": 1, "is_output": False, "skip": 3, "key_groups": (4, 8)}
    segment = {"file": "f", "offset": 1, "length": 2, "checksum": 3, "batches": 4, "rows": 5, "inline": b""}
    content = msgspec.to_builtins(metadata_of(pipeline(), files=("f",)), builtin_types=(bytes,))
    payload = msgspec.msgpack.encode({**content, "channels": [{**old, "segments": [segment]}]})
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<IQ", 3, len(payload)) + payload)
    (state,) = decode_metadata(struct.pack("<8sIQQ", MAGIC, 3, len(payload), checksum) + payload, "it").channels
    assert state == ChannelState(0, 1, 1, False, (Segment("f", 1, 2, 3, 4, 5),), 3, (4, 8))
    assert state.number is None and state.ahead == ()


def test_cut_short_anywhere_it_is_refused_naming_the_file() -> None:
    data = encode_metadata(metadata_of(pipeline()))
    for length in range(len(data)):
        with pytest.raises(StorageError, match="chk-1/_metadata"):
            decode_metadata(data[:length], "chk-1/_metadata")


def test_any_flipped_bit_is_found() -> None:
    data = encode_metadata(metadata_of(pipeline()))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(StorageError):
            decode_metadata(bytes(damaged), "it")


def test_longer_than_it_says_is_damaged_too() -> None:
    with pytest.raises(StorageError, match="too long"):
        decode_metadata(encode_metadata(metadata_of(pipeline())) + b"x", "it")


def test_a_newer_version_says_that_a_newer_midstream_is_needed() -> None:
    payload = b"whatever comes later"
    version = VERSION + 1
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<IQ", version, len(payload)) + payload)
    data = struct.pack("<8sIQQ", MAGIC, version, len(payload), checksum) + payload
    with pytest.raises(StorageError, match=f"written by a newer midstream .format {version}"):
        decode_metadata(data, "it")


def keyed_by(kind: pa.DataType) -> tuple[JobGraph, CheckpointMetadata]:
    graph = pipeline()
    edge = dataclasses.replace(graph.edges[0], schema=pa.schema([("n", kind)]))
    graph = dataclasses.replace(graph, edges=(edge,))
    return graph, metadata_of(graph)


def in_format(version: int, metadata: CheckpointMetadata) -> bytes:
    payload = msgspec.msgpack.encode(metadata)
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<IQ", version, len(payload)) + payload)
    return struct.pack("<8sIQQ", MAGIC, version, len(payload), checksum) + payload


OTHER_HASHES = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.duration("s"), pa.date64()]


@pytest.mark.parametrize("kind", OTHER_HASHES)
def test_keys_that_were_dealt_out_otherwise_by_an_older_version_are_refused(kind: pa.DataType) -> None:
    graph, metadata = keyed_by(kind)
    decode_metadata(in_format(3, metadata), "chk-1")  # it is whole, and may be looked at and deleted
    for version, columns in ((3, metadata.edges[0].columns), (2, ())):
        edge = msgspec.structs.replace(metadata.edges[0], columns=columns)
        older = in_format(version, msgspec.structs.replace(metadata, edges=(edge,)))
        with pytest.raises(ConfigError, match=f"older midstream.* keyed by 'n', a {re.escape(str(kind))}, to operator"):
            check_hashes(decode_metadata(older, "chk-1"), graph)
    check_hashes(decode_metadata(in_format(4, metadata), "chk-1"), graph)


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.time64("ns"), pa.date32(), pa.timestamp("ms", "UTC"), pa.duration("ms")]
)
def test_keys_that_are_dealt_out_as_ever_are_read(kind: pa.DataType) -> None:
    graph, metadata = keyed_by(kind)
    check_hashes(decode_metadata(in_format(3, metadata), "chk-1"), graph)


def test_something_else_is_no_metadata() -> None:
    with pytest.raises(StorageError, match="not checkpoint metadata"):
        decode_metadata(b"PAR1" + bytes(100), "it")
