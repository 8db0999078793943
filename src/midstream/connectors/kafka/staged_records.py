"""Rows for a topic, staged in the checkpoint storage until their checkpoint is complete.

    sinks/<sink>/<job>-<attempt>-<subtask>-<n>-<m>.arrow    records, ready to be sent, of subtask's part n
    sinks/<sink>/<job>-<subtask>.committed                  the newest checkpoint of this subtask that is in the topic

Files of killed attempts are deleted with the first commit of a newer attempt; see `Leftovers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import xxhash

from midstream.connectors.kafka.client import NO_PARTITION, Record, as_headers
from midstream.engine.core.arrow_bytes import NOT_ARROW, read_table
from midstream.engine.core.errors import UNDECODABLE, StorageError
from midstream.engine.core.interfaces import Storage

VERSION: Final = 1
FOLDER: Final = "sinks"
_JOB: Final = r"[A-Za-z0-9_-]+"
_NAME: Final = re.compile(rf"({_JOB})-(\d+)-(\d+)-\d+-\d+\.arrow")
_NOTE: Final = re.compile(rf"({_JOB})-(\d+)\.committed")
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4")


class StagedFile(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    checksum: str


class StagedRecords(msgspec.Struct, frozen=True):
    """A committable, as JSON: what one subtask has staged for one checkpoint."""

    version: int
    checkpoint: int
    after: int
    """The previous checkpoint for which this attempt of the subtask staged something; 0 if none."""
    job: str
    uid: str
    attempt: int
    subtask: int
    topic: str
    rows: int
    files: tuple[StagedFile, ...]

    @property
    def transactional_id(self) -> str:
        """The transactional id of the subtask, which is also the group of its marker."""
        return transactional_id(self.job, self.uid, self.subtask)


def transactional_id(job_id: str, uid: str, subtask: int) -> str:
    return f"midstream-{job_id}-{_token(uid)}-{subtask}"


def encode(staged: StagedRecords) -> bytes:
    return msgspec.json.encode(staged)


def decode(committable: bytes) -> StagedRecords:
    """Decode a committable. Raises StorageError for what no exactly-once Kafka sink has staged, as it comes from a
    checkpoint.
    """
    try:
        staged = msgspec.json.decode(committable, type=StagedRecords)
    except UNDECODABLE as error:
        raise StorageError(
            f"KafkaSink: what the checkpoint has to commit was not prepared by a Kafka sink: {error}"
        ) from error
    if staged.version != VERSION:
        raise StorageError(
            f"KafkaSink: rows were staged in format {staged.version}, but this version of midstream reads {VERSION}; "
            "commit "
            "them with the version that wrote them: start the job with it, and stop it with a savepoint"
        )
    if not (0 <= staged.after < staged.checkpoint and staged.subtask >= 0 and staged.rows >= 0 and staged.topic):
        raise StorageError(
            "KafkaSink: the checkpoint has rows to commit with impossible numbers; it is corrupt or forged"
        )
    for file in staged.files:
        folder, _, name = file.path.rpartition("/")
        match = _NAME.fullmatch(name)
        if folder != _folder(staged.uid) or match is None or match[1] != staged.job or file.bytes < 0:
            raise StorageError(
                f"KafkaSink: no Kafka sink stages rows in {file.path!r}; the checkpoint is corrupt or forged"
            )
    return staged


# ---- files --------------------------------------------------------------------


def staged_path(job_id: str, uid: str, attempt: int, subtask: int, part: int, number: int) -> str:
    return f"{_folder(uid)}/{job_id}-{attempt}-{subtask}-{part}-{number}.arrow"


def write_staged(storage: Storage, path: str, batches: Sequence[pa.RecordBatch]) -> StagedFile:
    """Write records to a file, which is durable when this returns."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=_COMPRESSED) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = memoryview(sink.getvalue())
    storage.write(path, [data])
    return StagedFile(path, len(data), xxhash.xxh3_64_hexdigest(data))


def read_staged(storage: Storage, file: StagedFile) -> list[pa.RecordBatch]:
    """Read staged records. Raises StorageError if the file is missing, or is not what was written."""
    data = storage.read(file.path)
    if len(data) != file.bytes or xxhash.xxh3_64_hexdigest(data) != file.checksum:
        raise StorageError(
            f"{file.path} has {len(data)} bytes instead of the {file.bytes} that were written: it is damaged"
        )
    try:
        return read_table(data).to_batches()
    except NOT_ARROW as error:
        raise StorageError(f"{file.path}: its bytes are intact but are not an Arrow stream: {error}") from error


def delete_staged(storage: Storage, staged: Iterable[StagedRecords]) -> None:
    for records in staged:
        for file in records.files:
            storage.delete(file.path)


# ---- what was committed ---------------------------------------------------------


def recorded_checkpoint(storage: Storage, staged: StagedRecords) -> int | None:
    """Return the newest checkpoint of the subtask that is recorded as committed."""
    path = _record_path(staged)
    if not storage.exists(path):
        return None
    data = storage.read(path)
    if not data.isdigit():
        raise StorageError(f"{path} is damaged: it has {data[:40]!r} instead of a checkpoint's number")
    return int(data)


def record_committed(storage: Storage, staged: StagedRecords) -> None:
    storage.write(_record_path(staged), [str(staged.checkpoint).encode()])


def _record_path(staged: StagedRecords) -> str:
    return f"{_folder(staged.uid)}/{staged.job}-{staged.subtask}.committed"


# ---- what dead attempts leave ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files left by attempts and jobs older than that of `staged`, as they were when this object was created.

    Tasks are deployed only after everything in the restored checkpoint is committed: once the brokers have accepted
    something of a newer attempt, nothing of an older one is needed. Look first, then commit, then delete: a job that
    was superseded in the meantime cannot commit, so it deletes nothing of its successor.
    """

    folder: str
    job: str
    attempt: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, storage: Storage, staged: StagedRecords) -> Leftovers:
        folder = _folder(staged.uid)
        found = tuple(name for name in storage.list(folder) if _is_older(name, staged.job, staged.attempt))
        return cls(folder, staged.job, staged.attempt, found)

    def delete(self, storage: Storage) -> None:
        for name in self.names:
            storage.delete(f"{self.folder}/{name}")
        storage.sweep(self.folder, lambda name: _is_older(name, self.job, self.attempt))


def _is_older(name: str, job_id: str, attempt: int) -> bool:
    if match := _NAME.fullmatch(name):
        return match[1] != job_id or int(match[2]) < attempt
    match = _NOTE.fullmatch(name)
    return match is not None and match[1] != job_id


def _folder(uid: str) -> str:
    return f"{FOLDER}/{_token(uid)}"


def _token(uid: str) -> str:
    return xxhash.xxh3_64_hexdigest(uid.encode())


# ---- records --------------------------------------------------------------------


def records_of(batch: pa.RecordBatch) -> Iterator[Record]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    nothing = [None] * batch.num_rows
    partitions = (NO_PARTITION if each is None else each for each in columns.get("partition", nothing))
    headers = map(as_headers, columns.get("headers", nothing))
    return zip(columns["value"], columns.get("key", nothing), partitions, headers, strict=True)
