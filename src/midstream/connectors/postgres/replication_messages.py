"""The messages of logical replication, decoded: those of the stream, and those of pgoutput (protocol version 1) within.

Nothing here does I/O. Lengths are checked: what is not exactly a message raises DataError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from midstream.engine.core.errors import DataError

LSN_MAX: Final = 2**64 - 1
_U16, _I32, _U32 = struct.Struct("!H"), struct.Struct("!i"), struct.Struct("!I")
_BEGIN, _COMMIT = struct.Struct("!QqI"), struct.Struct("!BQQq")
_XLOG_DATA, _KEEPALIVE, _STATUS = struct.Struct("!QQq"), struct.Struct("!QqB"), struct.Struct("!cQQQqB")


class Unchanged(Enum):
    """The value of a column that was stored apart (TOAST), and that an update did not change: it is not sent."""

    TOAST = 0


_TOAST: Final = Unchanged.TOAST
Cell: TypeAlias = bytes | Unchanged | None
"""A value as text, or null."""
Row: TypeAlias = list[Cell]


@dataclass(frozen=True, slots=True)
class TransactionBegin:
    commit_lsn: int
    """Where the transaction's commit is in the log."""


@dataclass(frozen=True, slots=True)
class TransactionCommit:
    commit_lsn: int
    end_lsn: int
    """Where the log continues after the commit."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    is_key: bool
    """Whether it belongs to the replica identity."""
    type_oid: int
    modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it is in the changes that follow."""

    oid: int
    schema: str
    name: str
    identity: str
    """pg_class.relreplident"""
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    relation: int
    new: Row


@dataclass(frozen=True, slots=True)
class Update:
    relation: int
    old: Row | None
    """The row before, if the replica identity is FULL or has changed."""
    old_is_key: bool
    """Whether `old` has only the columns of the replica identity."""
    new: Row


@dataclass(frozen=True, slots=True)
class Delete:
    relation: int
    old: Row
    """Without a replica identity FULL, only its columns are not null."""


@dataclass(frozen=True, slots=True)
class Truncate:
    relations: tuple[int, ...]


Message: TypeAlias = TransactionBegin | TransactionCommit | Relation | Insert | Update | Delete | Truncate


@dataclass(frozen=True, slots=True)
class Keepalive:
    wal_end: int
    """All transactions whose commit is before this have been sent."""
    wants_reply: bool


def parse_lsn(text: str) -> int:
    """Parse an LSN as SQL shows it, such as 0/15295A0."""
    high, _, low = text.partition("/")
    try:
        return int(high, 16) << 32 | int(low, 16)
    except ValueError as error:
        raise DataError(f"{text!r} is not a position in the server's log") from error


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def status_update(received: int, confirmed: int) -> bytes:
    """Return the message that reports which part of the log was received, and which the server may forget."""
    return _STATUS.pack(b"r", received, confirmed, confirmed, 0, 0)


def decode_stream(data: bytes) -> Keepalive | bytes:
    """Return a keepalive, or the message of pgoutput that `data` contains."""
    try:
        if data[:1] == b"w":
            _XLOG_DATA.unpack_from(data, 1)
            return data[25:]
        if data[:1] == b"k" and len(data) == 18:
            wal_end, _, wants_reply = _KEEPALIVE.unpack_from(data, 1)
            return Keepalive(wal_end, bool(wants_reply))
    except struct.error as error:
        raise _wrong(data, str(error)) from error
    raise _wrong(data, "it is not a message of the replication protocol")


def decode(data: bytes) -> Message | None:
    """Return a message of pgoutput; None if it is of a kind that changes no rows."""
    decoder = _DECODERS.get(data[:1])
    if decoder is None:
        if data[:1] in (b"O", b"Y", b"M"):
            return None
        raise _wrong(data, "its kind is not known")
    try:
        message, end = decoder(data)
    except (struct.error, IndexError) as error:
        raise _wrong(data, f"it ends early: {error}") from error
    except ValueError as error:
        raise _wrong(data, str(error)) from error
    if end != len(data):
        raise _wrong(data, f"it has {len(data)} bytes, and its contents {end}")
    return message


def _wrong(data: bytes, why: str) -> DataError:
    return DataError(f"the server has sent a message {data[:1]!r} of {len(data)} bytes that cannot be decoded: {why}")


def _begin(data: bytes) -> tuple[TransactionBegin, int]:
    return TransactionBegin(_BEGIN.unpack_from(data, 1)[0]), 21


def _commit(data: bytes) -> tuple[TransactionCommit, int]:
    _, commit_lsn, end_lsn, _ = _COMMIT.unpack_from(data, 1)
    return TransactionCommit(commit_lsn, end_lsn), 26


def _relation(data: bytes) -> tuple[Relation, int]:
    (oid,) = _U32.unpack_from(data, 1)
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    identity = chr(data[at])
    (count,) = _U16.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        is_key = bool(data[at] & 1)
        column, at = _text(data, at + 1)
        (type_oid,), (modifier,) = _U32.unpack_from(data, at), _I32.unpack_from(data, at + 4)
        columns.append(RelationColumn(column, is_key, type_oid, modifier))
        at += 8
    return Relation(oid, schema or "pg_catalog", name, identity, tuple(columns)), at


def _insert(data: bytes) -> tuple[Insert, int]:
    (relation,) = _U32.unpack_from(data, 1)
    _require(data[5] == _NEW, "it has no new row")
    new, at = _row(data, 6)
    return Insert(relation, new), at


def _update(data: bytes) -> tuple[Update, int]:
    (relation,) = _U32.unpack_from(data, 1)
    at, kind, old = 5, data[5], None
    if kind in (_KEY, _OLD):
        old, at = _row(data, 6)
    _require(data[at] == _NEW, "it has no new row")
    new, at = _row(data, at + 1)
    return Update(relation, old, kind == _KEY, new), at


def _delete(data: bytes) -> tuple[Delete, int]:
    (relation,) = _U32.unpack_from(data, 1)
    _require(data[5] in (_KEY, _OLD), "it has no old row")
    old, at = _row(data, 6)
    return Delete(relation, old), at


def _truncate(data: bytes) -> tuple[Truncate, int]:
    (count,) = _U32.unpack_from(data, 1)
    _require(count <= (len(data) - 6) // 4, f"it has less than {count} tables")
    return Truncate(struct.unpack_from(f"!{count}I", data, 6)), 6 + 4 * count


_NEW, _KEY, _OLD = b"NKO"
_VALUE, _NULL, _UNCHANGED = b"tnu"


def _row(data: bytes, at: int) -> tuple[Row, int]:
    (count,) = _U16.unpack_from(data, at)
    at += 2
    row: Row = []
    append, unpack, end = row.append, _I32.unpack_from, len(data)
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == _VALUE:
            (size,) = unpack(data, at)
            start = at + 4
            at = start + size
            if size < 0 or at > end:
                raise ValueError(f"a value has {size} bytes")
            append(data[start:at])
        elif kind == _NULL:
            append(None)
        elif kind == _UNCHANGED:
            append(_TOAST)
        else:
            raise ValueError(f"a value is of the unknown kind {kind}")
    return row, at


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.find(0, at)
    _require(end >= 0, "a name does not end")
    return data[at:end].decode(), end + 1


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


_DECODERS: Final[dict[bytes, Callable[[bytes], tuple[Message, int]]]] = {
    b"B": _begin,
    b"C": _commit,
    b"R": _relation,
    b"I": _insert,
    b"U": _update,
    b"D": _delete,
    b"T": _truncate,
}
