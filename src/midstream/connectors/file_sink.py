"""Files as an exactly-once sink: written beside the directory, moved into it when the checkpoint completes.

    out/part-000007-0001-0000-<token>.parquet           committed: whole, final, never touched again
    .out.midstream/<uid>/<job>/<attempt>-<subtask>-<n>  pending
    .out.midstream/<uid>/<job>/committed                the newest checkpoint that is committed

Pending files are not below the directory, as not every reader leaves out hidden names. A move is a
rename where there is one; on object stores it is a server-side copy, then a delete, and as every
file has a name of its own, doing it again after a crash in between writes the same bytes once more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.encoders import check_encodable, new_encoder
from midstream.connectors.filesystem import (
    delete_if_there,
    file_info,
    is_local,
    make_directory,
    make_durable,
    names_in,
    resolve,
)
from midstream.connectors.queued import Part, QueuedWriter
from midstream.core.batches import batch_bytes, concat
from midstream.core.config import Size, size_bytes
from midstream.core.errors import ConfigError, StorageError
from midstream.operators.sink import Committer, Sink, SinkWriter, WriterContext

_HELD_BYTES = 16 * 2**20
_HELD_ROWS = 131_072
"""So much becomes a row group of its own."""
_JOURNAL = "committed"
_PENDING = re.compile(r"(\d+)-\d+-\d+")


class PendingFile(msgspec.Struct, frozen=True, array_like=True):
    """A committable. `pending` is relative to the hidden directory, `name` to the sink's."""

    job_id: str
    attempt: int
    pending: str
    name: str
    size: int
    rows: int


class FileSink(Sink):
    """Every row once, in Parquet or JSON lines files below `directory`.

    `directory`: a local path or a URL that pyarrow knows; with `filesystem`, a path inside it. A
    fresh job needs it to be empty or absent, unless `append`. Files become visible, whole, when the
    checkpoint that covers their rows completes: `part-<checkpoint>-<subtask>-<n>-<token>.<format>`.
    `roll_size`: a file is ended when it has grown to about this size, and with every checkpoint.

    JSON lines: times are written as text, decimals too, NaN and infinity as null.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Literal["parquet", "jsonl"] = "parquet",
        roll_size: Size = "128 MiB",
        append: bool = False,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> None:
        if format not in ("parquet", "jsonl"):
            raise ConfigError(f"FileSink: format {format!r} is not one of parquet, jsonl")
        self.roll_bytes = size_bytes(roll_size, "roll_size")
        if self.roll_bytes < 1:
            raise ConfigError("roll_size: 0 bytes is not a size to write files of; give for example '128 MiB'")
        self.filesystem, self.directory = resolve(directory, filesystem, "FileSink")
        parent, _, name = self.directory.rpartition("/")
        if not name or not (parent or self.directory.startswith("/")):
            raise ConfigError(
                f"FileSink: {self.directory} is a root; name a directory in it, where files can be put beside"
            )
        if is_local(self.filesystem) and os.path.ismount(self.directory):
            raise ConfigError(
                f"FileSink: {self.directory} is a mount point, into which files beside it cannot be moved; name a directory in it"
            )
        self.hidden = f"{parent}/.{name}.midstream"
        self.format = format
        self.append = append

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Raises SchemaError for columns that the format cannot hold, ConfigError for a directory that is not free."""
        check_encodable(schema, self.format, "FileSink")
        found = file_info(self.filesystem, self.directory).type
        if found == pyarrow.fs.FileType.File:
            raise ConfigError(f"FileSink: {self.directory} is a file; give a directory")
        if is_local(self.filesystem):
            _check_writable(self.directory)
            _check_writable(self.hidden)
        if restoring or self.append or found == pyarrow.fs.FileType.NotFound:
            return
        with _explained(f"cannot list {self.directory}"):
            names = names_in(self.filesystem, self.directory)
        if names:
            raise ConfigError(
                f"FileSink: {self.directory} is not empty (it has {names[0]}); give another directory, go on from a "
                "checkpoint, or add to what is there with append=True"
            )

    def writer(self, context: WriterContext) -> SinkWriter:
        folder = f"{_folder(context.uid)}/{context.job_id}"
        token = xxhash.xxh3_64_hexdigest(f"{context.job_id}/{context.uid}/{context.attempt}".encode())
        numbers = count()

        def next_names() -> tuple[str, str]:
            n = next(numbers)
            return (
                f"{folder}/{context.attempt}-{context.subtask}-{n}",
                f"{context.subtask:04d}-{n:04d}-{token}.{self.format}",
            )

        return QueuedWriter(context, lambda: _FilesPart(self, context, next_names))

    def committer(self, job_id: str) -> Committer | None:
        return _FileCommitter(self, job_id)


class _FilesPart(Part):
    """One file after the other, each until it is large enough."""

    def __init__(self, sink: FileSink, context: WriterContext, next_names: Callable[[], tuple[str, str]]) -> None:
        super().__init__()
        self._sink = sink
        self._context = context
        self._next_names = next_names
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._held_rows = 0
        self._file: _OpenFile | None = None
        self._finished: list[_OpenFile] = []

    def _write(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self._held_bytes += batch_bytes(batch)
        self._held_rows += batch.num_rows
        if self._held_bytes >= _HELD_BYTES or self._held_rows >= _HELD_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        batch, self._held, self._held_bytes, self._held_rows = concat(self._held), [], 0, 0
        with _explained(f"operator {self._context.name!r}: cannot write below {self._sink.hidden}"):
            if self._file is None:
                self._file = _OpenFile(self._sink, *self._next_names(), self._context.schema)
            self._file.write(batch)
            if self._file.size >= self._sink.roll_bytes:
                self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.end()
            self._finished.append(self._file)
            self._file = None

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        self._flush()
        with _explained(f"operator {self._context.name!r}: cannot write below {self._sink.hidden}"):
            self._end_file()
        return [
            msgspec.msgpack.encode(
                PendingFile(
                    self._context.job_id,
                    self._context.attempt,
                    file.pending,
                    f"part-{checkpoint_id:06d}-{file.name}",
                    file.size,
                    file.rows,
                )
            )
            for file in self._finished
        ]

    def _discard(self) -> None:
        self._held.clear()
        files = self._finished if self._file is None else [*self._finished, self._file]
        for file in files:
            file.discard()


class _OpenFile:
    def __init__(self, sink: FileSink, pending: str, name: str, schema: pa.Schema) -> None:
        self.pending = pending
        self.name = name
        self.rows = 0
        self.size = 0
        self._filesystem = sink.filesystem
        self._path = f"{sink.hidden}/{pending}"
        make_directory(self._filesystem, self._path.rpartition("/")[0])
        self._stream = self._filesystem.open_output_stream(self._path)
        self._encoder = new_encoder(sink.format, self._stream, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._encoder.write(batch)
        self.rows += batch.num_rows
        self.size = self._stream.tell()

    def end(self) -> None:
        self._encoder.close()
        self.size = self._stream.tell()
        self._stream.close()
        make_durable(self._filesystem, self._path)
        make_durable(self._filesystem, self._path.rpartition("/")[0])

    def discard(self) -> None:
        """What cannot be deleted now is an orphan, which the committer of a later attempt deletes."""
        with suppress(OSError, pa.ArrowException):
            if not self._stream.closed:
                self._encoder.close()
                self._stream.close()
        with suppress(OSError):
            delete_if_there(self._filesystem, self._path)


class _FileCommitter(Committer):
    def __init__(self, sink: FileSink, job_id: str) -> None:
        self._sink = sink
        self._filesystem = sink.filesystem
        self._job_id = job_id
        self._swept: tuple[str, int] | None = None

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        files = [msgspec.msgpack.decode(committable, type=PendingFile) for committable in committables]
        with _explained(f"cannot commit checkpoint {checkpoint_id} to {self._sink.directory}"):
            make_directory(self._filesystem, self._sink.directory)
            for file in files:
                self._publish(file, checkpoint_id)
            make_durable(self._filesystem, self._sink.directory)
            for folder in sorted({_folder_of(file) for file in files}):
                self._write_journal(folder, checkpoint_id)
            self._sweep(files)

    def abort(self, committables: Sequence[bytes]) -> None:
        with _explained(f"cannot clean up below {self._sink.hidden}"):
            for committable in committables:
                file = msgspec.msgpack.decode(committable, type=PendingFile)
                delete_if_there(self._filesystem, f"{self._sink.hidden}/{file.pending}")

    def _publish(self, file: PendingFile, checkpoint_id: int) -> None:
        pending, final = f"{self._sink.hidden}/{file.pending}", f"{self._sink.directory}/{file.name}"
        if self._filesystem.get_file_info(pending).type == pyarrow.fs.FileType.File:
            self._filesystem.move(pending, final)
            return
        if self._filesystem.get_file_info(final).type == pyarrow.fs.FileType.File:
            return
        if self._committed(_folder_of(file)) < checkpoint_id:
            raise StorageError(
                f"{pending}: the {file.rows} rows in it were to be committed with checkpoint {checkpoint_id}, and it is gone; "
                f"nothing but a job may delete from {self._sink.hidden}: restore the file, or start from another checkpoint"
            )
        # else it was committed, and somebody has taken it away since, as one may

    def _committed(self, folder: str) -> int:
        """The newest checkpoint of that job of which everything was committed; -1 if there is none."""
        path = f"{self._sink.hidden}/{folder}/{_JOURNAL}"
        if self._filesystem.get_file_info(path).type != pyarrow.fs.FileType.File:
            return -1
        with self._filesystem.open_input_stream(path) as stream:
            return int(stream.read())

    def _write_journal(self, folder: str, checkpoint_id: int) -> None:
        if self._committed(folder) >= checkpoint_id:
            return
        path = f"{self._sink.hidden}/{folder}/{_JOURNAL}"
        with self._filesystem.open_output_stream(f"{path}.new") as stream:
            stream.write(str(checkpoint_id).encode())
        make_durable(self._filesystem, f"{path}.new")
        self._filesystem.move(f"{path}.new", path)

    def _sweep(self, files: Sequence[PendingFile]) -> None:
        """Delete the pending files of ended attempts, once something of a new one is committed.

        By then the checkpoint that it was restored from is committed, so nobody waits for them.
        """
        own = [file for file in files if file.job_id == self._job_id]
        if not own:
            return
        newest = max(own, key=lambda file: file.attempt)
        folder, attempt = _folder_of(newest), newest.attempt
        if self._swept == (folder, attempt):
            return
        above = folder.rpartition("/")[0]
        # other jobs may be at work where adding is allowed
        jobs = [self._job_id] if self._sink.append else names_in(self._filesystem, f"{self._sink.hidden}/{above}")
        for job in jobs:
            for name in names_in(self._filesystem, f"{self._sink.hidden}/{above}/{job}"):
                found = _PENDING.fullmatch(name)
                if found and (job != self._job_id or int(found[1]) < attempt):
                    delete_if_there(self._filesystem, f"{self._sink.hidden}/{above}/{job}/{name}")
        self._swept = (folder, attempt)


def _folder(uid: str) -> str:
    """A name for `uid` that every filesystem takes."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", uid)[:64] + "-" + xxhash.xxh3_64_hexdigest(uid.encode())[:8]


def _folder_of(file: PendingFile) -> str:
    return file.pending.rpartition("/")[0]


def _check_writable(path: str) -> None:
    """Whether `path`, or the directory in which it would be made, can be written."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise ConfigError(f"FileSink: {path} is a file, not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"FileSink: {path} may not be written; permission denied")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error
