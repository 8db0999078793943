"""Metadata comes back as it was written, or not at all."""

from __future__ import annotations

import struct

import pytest
import xxhash
from checkpoint_samples import metadata_of, pipeline

from midstream.checkpoint.metadata import MAGIC, VERSION, decode_metadata, encode_metadata
from midstream.core.errors import StorageError


def test_it_comes_back() -> None:
    metadata = metadata_of(pipeline(), finished={"read": (0, 1)})
    again = decode_metadata(encode_metadata(metadata), "chk-1/_metadata")
    assert again == metadata
    assert again.finished_vertices == (0,)


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


def test_something_else_is_no_metadata() -> None:
    with pytest.raises(StorageError, match="no checkpoint metadata"):
        decode_metadata(b"PAR1" + bytes(100), "it")
