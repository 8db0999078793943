"""Messages of logical replication: decoded as they were sent, or refused; and offsets in the log."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest

from midstream.connectors.postgres.change_offsets import ChangeOffsets, LogPosition, is_exact
from midstream.connectors.postgres.replication_messages import (
    Delete,
    Insert,
    Keepalive,
    Relation,
    RelationColumn,
    TransactionBegin,
    TransactionCommit,
    Truncate,
    Unchanged,
    Update,
    decode,
    decode_stream,
    lsn_text,
    parse_lsn,
)
from midstream.engine.core.errors import DataError


def row(*cells: bytes | Unchanged | None) -> bytes:
    parts = [struct.pack("!H", len(cells))]
    for cell in cells:
        if isinstance(cell, bytes):
            parts.append(b"t" + struct.pack("!i", len(cell)) + cell)
        else:
            parts.append(b"n" if cell is None else b"u")
    return b"".join(parts)


OID = struct.pack("!I", 16384)
RELATION = (
    b"R" + OID + b"public\0t\0d\0\x02\x01id\0" + struct.pack("!Ii", 23, -1) + b"\0x\0" + struct.pack("!Ii", 25, 7)
)
MESSAGES = {
    b"B" + struct.pack("!QqI", 2**40, 0, 7): TransactionBegin(2**40),
    b"C" + struct.pack("!BQQq", 0, 80, 96, 0): TransactionCommit(80, 96),
    RELATION: Relation(
        16384, "public", "t", "d", (RelationColumn("id", True, 23, -1), RelationColumn("x", False, 25, 7))
    ),
    b"I" + OID + b"N" + row(b"1", "é".encode()): Insert(16384, [b"1", "é".encode()]),
    b"U" + OID + b"N" + row(b"1", Unchanged.TOAST): Update(16384, None, False, [b"1", Unchanged.TOAST]),
    b"U" + OID + b"K" + row(b"1", None) + b"N" + row(b"2", b""): Update(16384, [b"1", None], True, [b"2", b""]),
    b"U" + OID + b"O" + row(b"1", b"a") + b"N" + row(b"1", b"b"): Update(16384, [b"1", b"a"], False, [b"1", b"b"]),
    b"D" + OID + b"K" + row(b"1", None): Delete(16384, [b"1", None]),
    b"T" + struct.pack("!IBII", 2, 1, 5, 6): Truncate((5, 6)),
}


@pytest.mark.parametrize("data", MESSAGES, ids=lambda data: data[:1].decode())
def test_a_message_is_decoded_and_no_part_of_it(data):
    assert decode(data) == MESSAGES[data]
    for size in range(len(data)):
        with pytest.raises(DataError, match="cannot be decoded"):
            decode(data[:size])
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(data + b"\0")


def test_what_is_no_message_is_refused():
    for data in (
        b"",
        b"X123",
        b"S" + bytes(20),
        b"I" + OID + b"O" + row(b"1"),
        b"D" + OID + b"N" + row(b"1"),
        b"I" + OID + b"N" + b"\0\x01b" + struct.pack("!i", 1) + b"1",
        b"I" + OID + b"N" + b"\0\x01t" + struct.pack("!i", -5) + b"12345",
        b"I" + OID + b"N" + b"\0\x01t" + struct.pack("!i", 2**31 - 1) + b"1",
        b"T" + struct.pack("!IB", 2**32 - 1, 0),
        b"R" + OID + b"\xff\xfe\0t\0d\0\0",
    ):
        with pytest.raises(DataError, match="cannot be decoded"):
            decode(data)
    assert decode(b"Y" + bytes(5)) is None
    for data in (b"", b"w123", b"k123", b"z" + bytes(30), b"k" + bytes(18)):
        with pytest.raises(DataError, match="cannot be decoded"):
            decode_stream(data)
    assert decode_stream(b"k" + struct.pack("!QqB", 77, 0, 1)) == Keepalive(77, True)
    assert decode_stream(b"w" + bytes(24) + b"B12") == b"B12"


def test_damaged_messages_are_decoded_or_refused_and_nothing_else():
    rng = random.Random(7)
    for _ in range(20_000):
        data = bytearray(rng.choice(list(MESSAGES)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(DataError):
            decode(bytes(data))


def test_positions_in_the_log_are_read_and_written_as_sql_does():
    assert parse_lsn("16/B374D848") == 0x16_B374D848
    assert lsn_text(0x16_B374D848) == "16/B374D848"
    with pytest.raises(DataError):
        parse_lsn("none")


BASE = 0x1529_5A0


def test_an_offset_is_one_position_and_grows_with_it():
    offsets = ChangeOffsets(1000, BASE)
    assert offsets.decode(0) == offsets.decode(1000) == LogPosition(BASE)
    assert offsets.encode(LogPosition(BASE)) == 1000
    changes = [number for number in range(100_000) if is_exact(number)]
    assert changes[:8193] == list(range(8193))
    encoded = [offsets.encode(LogPosition(BASE + 80, number)) for number in changes]
    assert encoded == sorted(set(encoded))
    assert offsets.encode(LogPosition(BASE + 72, 2**43 - 2**30)) < encoded[0] < offsets.encode(LogPosition(BASE + 88))
    rng = random.Random(1)
    for _ in range(10_000):
        number = rng.randrange(1 << rng.randrange(1, 40))
        zeros = max(0, number.bit_length() - 13)
        position = LogPosition(BASE + 8 * rng.randrange(1 << rng.randrange(1, 45)), number >> zeros << zeros)
        assert offsets.decode(offsets.encode(position)) == position


def test_a_position_without_an_offset_is_refused():
    offsets = ChangeOffsets(0, BASE)
    for position in (LogPosition(BASE - 8), LogPosition(BASE + 4), LogPosition(BASE, 8193)):
        with pytest.raises(DataError, match="has no position"):
            offsets.encode(position)
    assert offsets.encode(LogPosition(BASE + 2**49 - 8)) < 2**63
    with pytest.raises(DataError, match="is more than"):
        offsets.encode(LogPosition(BASE + 2**49))
    with pytest.raises(DataError, match="is more than"):
        offsets.encode(LogPosition(BASE, 2**50))
