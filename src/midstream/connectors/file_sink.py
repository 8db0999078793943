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
from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.encoders import check_encodable
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
from midstream.connectors.rolling import OpenFile, RollingFiles, explained
from midstream.connectors.taking_back import JOURNAL, CommittedFiles, file_token
from midstream.core.config import Size, size_bytes
from midstream.core.errors import ConfigError, StorageError
from midstream.operators.sink import Committer, Output, Sink, SinkWriter, WriterContext

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
        with explained(f"cannot list {self.directory}"):
            names = names_in(self.filesystem, self.directory)
        if names:
            raise ConfigError(
                f"FileSink: {self.directory} is not empty (it has {names[0]}); give another directory, go on from a "
                "checkpoint, or add to what is there with append=True"
            )

    def writer(self, context: WriterContext) -> SinkWriter:
        folder = f"{_folder(context.uid)}/{context.job_id}"
        numbers = count()

        def next_pending() -> str:
            return f"{folder}/{context.attempt}-{context.subtask}-{next(numbers)}"

        return QueuedWriter(context, lambda: _FilesPart(self, context, next_pending))

    def committer(self, job_id: str) -> Committer | None:
        return _FileCommitter(self, job_id)

    def newest_committed(self, output: Output) -> int:
        """Raises StorageError when the directory cannot be read."""
        with explained(f"cannot look into {self.directory}"):
            return self._files_of(output).newest()

    def check_take_back(self, output: Output, after: int) -> None:
        """Raises ConfigError when somebody has taken away newer files: it is not known who has read them."""
        with explained(f"cannot look into {self.directory}"):
            self._files_of(output).check(after)

    def take_back(self, output: Output, after: int, kept: Sequence[bytes]) -> None:
        files = (msgspec.msgpack.decode(committable, type=PendingFile) for committable in kept)
        with explained(f"cannot delete from {self.directory}"):
            self._files_of(output).take_back(after, {file.pending for file in files})

    def _files_of(self, output: Output) -> CommittedFiles:
        return CommittedFiles(self.filesystem, self.directory, self.hidden, _folder(output.uid), output, self.append)


class _FilesPart(Part):
    def __init__(self, sink: FileSink, context: WriterContext, next_pending: Callable[[], str]) -> None:
        super().__init__()
        self._sink = sink
        self._context = context
        self._where = f"operator {context.name!r}: cannot write below {sink.hidden}"
        self._files = RollingFiles(
            lambda: OpenFile(sink.filesystem, sink.hidden, next_pending(), sink.format, context.schema), sink.roll_bytes
        )

    def _write(self, batch: pa.RecordBatch) -> None:
        with explained(self._where):
            self._files.write(batch)

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        with explained(self._where):
            files = self._files.end()
        return [msgspec.msgpack.encode(self._committable(file, checkpoint_id)) for file in files]

    def _committable(self, file: OpenFile, checkpoint_id: int) -> PendingFile:
        context = self._context
        token = file_token(context.job_id, context.uid, context.attempt)
        number = int(file.name.rpartition("-")[2])
        name = f"part-{checkpoint_id:06d}-{context.subtask:04d}-{number:04d}-{token}.{self._sink.format}"
        return PendingFile(context.job_id, context.attempt, file.name, name, file.size, file.rows)

    def _discard(self) -> None:
        self._files.discard()


class _FileCommitter(Committer):
    def __init__(self, sink: FileSink, job_id: str) -> None:
        self._sink = sink
        self._filesystem = sink.filesystem
        self._job_id = job_id
        self._swept: tuple[str, int] | None = None

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        files = [msgspec.msgpack.decode(committable, type=PendingFile) for committable in committables]
        with explained(f"cannot commit checkpoint {checkpoint_id} to {self._sink.directory}"):
            make_directory(self._filesystem, self._sink.directory)
            for file in files:
                self._publish(file, checkpoint_id)
            make_durable(self._filesystem, self._sink.directory)
            for folder in sorted({_folder_of(file) for file in files}):
                self._write_journal(folder, checkpoint_id)
            self._sweep(files)

    def abort(self, committables: Sequence[bytes]) -> None:
        with explained(f"cannot clean up below {self._sink.hidden}"):
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
        path = f"{self._sink.hidden}/{folder}/{JOURNAL}"
        if self._filesystem.get_file_info(path).type != pyarrow.fs.FileType.File:
            return -1
        with self._filesystem.open_input_stream(path) as stream:
            return int(stream.read())

    def _write_journal(self, folder: str, checkpoint_id: int) -> None:
        if self._committed(folder) >= checkpoint_id:
            return
        path = f"{self._sink.hidden}/{folder}/{JOURNAL}"
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
