"""Metadata comes back as it was written, or not at all."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash

from checkpoint_samples import metadata_of, pipeline
from midstream.engine.checkpoint.metadata import (
    MAGIC,
    VERSION,
    WITH_DELETIONS,
    SourcePosition,
    decode_metadata,
    encode_metadata,
)
from midstream.engine.core.errors import StorageError
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, PartHandle, Segment


def test_it_comes_back() -> None:
    metadata = metadata_of(pipeline(), finished={"read": (0, 1)})
    again = decode_metadata(encode_metadata(metadata), "chk-1/_metadata")
    assert again == metadata
    assert again.finished_vertices == (0,)


def test_deletion_vectors_come_back_in_a_format_that_says_so() -> None:
    vector = ChunkHandle("v", "", 0, 3, 7, 1, inline=b"abc")
    chunk = ChunkHandle("c", "", 0, 3, 7, 5, 0, 15, b"def", (vector,))
    for removed, version in (((), VERSION), ((vector,), WITH_DELETIONS)):
        part = PartHandle("s", "keyed", (msgspec.structs.replace(chunk, removed=removed),))
        metadata = metadata_of(pipeline(), {"count": (OperatorSnapshot("count", (part,)),) * 2})
        encoded = encode_metadata(metadata)
        assert struct.unpack_from("<I", encoded, len(MAGIC)) == (version,)
        assert decode_metadata(encoded, "it") == metadata
    assert chunk.live_rows == 4 and chunk.stored_bytes == 6


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


@pytest.mark.parametrize("version", [VERSION - 1, WITH_DELETIONS + 1, 2**32 - 1])
def test_another_format_is_refused_by_its_number(version: int) -> None:
    payload = b"whatever is in it"
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<IQ", version, len(payload)) + payload)
    data = struct.pack("<8sIQQ", MAGIC, version, len(payload), checksum) + payload
    with pytest.raises(
        StorageError,
        match=rf"^it: written in format {version} by another version.* reads formats {VERSION} and {WITH_DELETIONS};",
    ):
        decode_metadata(data, "it")


def test_something_else_is_no_metadata() -> None:
    with pytest.raises(StorageError, match="not checkpoint metadata"):
        decode_metadata(b"PAR1" + bytes(100), "it")
