"""The small files of a checkpoint directory: its job, the starts of the job, where they began, and the owner of each
checkpoint.

Each is a line of JSON, whose last field is a checksum of the rest and of the file's name. A wrong digit in one of them
could hide the newest checkpoint, so a damaged file is an error that names the file's purpose and the remedy.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec
import xxhash

from midstream.engine.core.errors import UNDECODABLE, StorageError


class JobDescriptor(msgspec.Struct, frozen=True):
    job: str


class EpochFile(msgspec.Struct, frozen=True):
    job_id: str


class OwnerFile(msgspec.Struct, frozen=True):
    epoch: int


class FromFile(msgspec.Struct, frozen=True, omit_defaults=True):
    newest: int
    """The id of the newest checkpoint that counted when this coordinator started; 0 if there was none.

    Newer ones of earlier coordinators do not count from then on.
    """
    first: int
    """The id from which its own checkpoints are numbered, so that later coordinators begin no lower.

    Ids that were claimed and never completed are invisible after the cleanup, but their owner may still write them.
    """
    counted: tuple[int, ...]
    """The ids of all checkpoints that counted when this coordinator started.

    One of an earlier coordinator that is missing here was written later, when its files might have been deleted.
    """
    source: int | None = None
    """The id of the checkpoint from which the job resumes, which may be a copy that is still to be published. None if
    it began at the beginning.
    """
    fresh: bool = False
    """The job began at the beginning, although there were checkpoints."""
    keeps: bool = False
    """The user has requested that output newer than `source` is kept, although its rows are produced again."""
    rolls_back: bool = False
    """Sinks roll back output newer than `source`. This is recorded before the first of them does."""


_Record = TypeVar("_Record", JobDescriptor, EpochFile, OwnerFile, FromFile)
_SEALED: Final = re.compile(rb'(\{.+),"checksum":"([0-9a-f]{16})"\}', re.DOTALL)

_REMEDIES: Final = {
    JobDescriptor: "It records to which job the directory belongs. If that is this job, delete the file: the next start "
    "writes it again",
    EpochFile: "It records which start of the job this was. Restore it from a copy of the directory; or delete it, but "
    "then the output of that start is ignored when the job is rewound to an older checkpoint",
    OwnerFile: "It records which start of the job has made this checkpoint, as the metadata also does: delete the file",
    FromFile: "It records which checkpoints of earlier starts count; without it, one that does not count could be "
    "mistaken for the newest, and output lost or duplicated. Restore it from a copy of the directory; or copy the "
    "checkpoint from which to resume, with shared/, to another place, and start from there (--from PATH) with another "
    "checkpoint directory",
}
"""The meaning of a damaged file, and the remedy."""


def sealed(path: str, record: msgspec.Struct) -> bytes:
    content = msgspec.json.encode(record)[:-1]
    return b'%s,"checksum":"%s"}' % (content, _checksum(path, content))


def unsealed(data: bytes, kind: type[_Record], path: str) -> _Record:
    """Decode a record. Raises StorageError for anything that was not written there."""
    match = _SEALED.fullmatch(data)
    if match is None:
        raise StorageError(f"{path}: not what midstream writes there: the file is damaged. {_REMEDIES[kind]}")
    if _checksum(path, match[1]) != match[2]:
        raise StorageError(f"{path}: the checksum is wrong: the file is damaged. {_REMEDIES[kind]}")
    try:
        return msgspec.json.decode(match[1] + b"}", type=kind)
    except UNDECODABLE as error:
        raise StorageError(f"{path}: not what midstream writes there: {error}. {_REMEDIES[kind]}") from error


def _checksum(path: str, content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(path.encode() + b"\0" + content).encode()
