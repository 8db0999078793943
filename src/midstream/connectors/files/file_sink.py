"""Files as an exactly-once sink: written next to the directory, and moved into it when the checkpoint completes.

    out/part-000007-0001-0000-<token>.parquet           committed: whole, final, never touched again
    .out.midstream/<uid>/<job>/<attempt>-<subtask>-<n>  pending
    .out.midstream/<uid>/<job>/committed                the newest checkpoint that is committed

Pending files are not below the directory, since not every reader ignores hidden names. A move is a rename where the
filesystem has one; on object stores it is a server-side copy, then a delete. Every file has a unique name, so repeating
the move after a crash in between writes the same bytes again.

A committable names the directory to which its file belongs, and is committed there even if the sink now writes to
another one. It comes from a checkpoint, so it is not trusted: it can only name files whose names have the form that a
sink gives them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.connectors.common.dataset_uris import file_uri
from midstream.connectors.common.filesystem import (
    below,
    delete_if_there,
    directory_of,
    file_info,
    is_local,
    location_of,
    make_directory,
    make_durable,
    names_in,
    resolve,
)
from midstream.connectors.files.encoders import check_encodable
from midstream.connectors.files.rollback import (
    JOB_ID,
    JOURNAL,
    CommittedFiles,
    file_token,
    is_file,
    read_journal,
    write_journal,
)
from midstream.connectors.files.rolling_files import OpenFile, RollingFiles, explained, roll_bytes_of
from midstream.engine.core.config import Size
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
    decoded,
)

_PENDING = re.compile(r"(\d+)-\d+-\d+")
_PENDING_PATH = re.compile(r"[A-Za-z0-9_-]+/([A-Za-z0-9_-]+)/(\d+)-\d+-\d+")
_NAME = re.compile(r"part-\d+-\d+-\d+-[0-9a-f]{16}\.(parquet|jsonl)")


class PendingFile(msgspec.Struct, frozen=True, array_like=True):
    """A committable. `pending` is relative to the hidden directory of `place`, `name` to `place` itself."""

    job_id: str
    attempt: int
    pending: str
    name: str
    size: int
    rows: int
    place: str
    """The directory's location, see `location_of`."""


class FileSink(Sink):
    """Writes every row once, in Parquet or JSON lines files.

    Files become visible, whole, when the checkpoint that covers their rows completes:
    `part-<checkpoint>-<subtask>-<n>-<token>.<format>`. In JSON lines, times and decimals are written as strings;
    NaN and infinity are refused.

    The arguments are those of `DataStream.write_parquet`; `format`: "parquet" or "jsonl".

    Raises ConfigError for invalid arguments; a directory that is in use is refused when the job starts.

        >>> from midstream.connectors import FileSink
        >>> _ = orders.sink(FileSink("orders", format="jsonl", roll_size="16 MiB")).uid("kept")
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
        self.roll_bytes = roll_bytes_of(roll_size)
        self.filesystem, self.directory = resolve(directory, filesystem, "FileSink")
        self._dataset = file_uri(directory, self.filesystem, self.directory)
        parent, _, name = self.directory.rpartition("/")
        if not name or not (parent or self.directory.startswith("/")):
            raise ConfigError(
                f"FileSink: {self.directory} is a root; name a directory in it, so that pending files can lie next to "
                "that"
            )
        if is_local(self.filesystem) and os.path.ismount(self.directory):
            raise ConfigError(
                f"FileSink: {self.directory} is a mount point, and files next to it cannot be moved into it; name a "
                "directory in it"
            )
        self.hidden = _hidden(self.directory)
        self.format = format
        self.append = append
        self._earlier: dict[str, list[str]] = {}
        """The jobs that have written here before this one, by uid, as far as `check_rollback` has listed them."""

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Raise SchemaError for columns that the format cannot hold, ConfigError for a directory that is in use."""
        check_encodable(schema, self.format, "FileSink")
        found = file_info(self.filesystem, self.directory).type
        if found == pyarrow.fs.FileType.File:
            raise ConfigError(f"FileSink: {self.directory} is a file; give a directory")
        if not (restoring or self.append or found == pyarrow.fs.FileType.NotFound):
            with explained(f"cannot list {self.directory}"):
                names = names_in(self.filesystem, self.directory)
            if names:
                raise ConfigError(
                    f"FileSink: {self.directory} is not empty (it has {names[0]}); give another directory, resume "
                    "from a checkpoint, or add to the directory with append=True"
                )
        self._make_places()

    def datasets(self) -> Sequence[str]:
        return [self._dataset]

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError if files of these are neither pending nor committed, ConfigError if they are elsewhere."""
        committer = _FileCommitter(self, "")
        with explained(f"FileSink on {self.directory}: cannot check what checkpoint {checkpoint_id} has to commit"):
            for committable in committables:
                committer.find(_decoded(committable), checkpoint_id)

    def writer(self, context: WriterContext) -> SinkWriter:
        folder = f"{_folder(context.uid)}/{context.job_id}"
        numbers = count()

        def next_pending() -> str:
            return f"{folder}/{context.attempt}-{context.subtask}-{next(numbers)}"

        return AsyncWriter(context, lambda: _FilesPart(self, context, next_pending))

    def committer(self, context: CommitterContext) -> Committer:
        with explained(f"cannot look into {self.hidden}"):  # before the epoch is checked: a later job is not in it yet
            return _FileCommitter(self, context.job_id, self._jobs_before(context.uid))

    def _jobs_before(self, uid: str) -> list[str]:
        """Return the jobs that have written to the directory; none with `append`, since others may be writing as well."""
        names = [] if self.append else names_in(self.filesystem, f"{self.hidden}/{_folder(uid)}")
        return [name for name in names if JOB_ID.fullmatch(name)]

    def _make_places(self) -> None:
        """Create both directories, and check that files can be moved from one to the other by moving a hidden one."""
        probe = f".probe-{secrets.token_hex(8)}"
        try:
            for directory in (self.directory, self.hidden):
                make_directory(self.filesystem, directory)
            if is_local(self.filesystem):
                os.mkdir(f"{self.hidden}/{probe}")
                try:
                    os.rename(f"{self.hidden}/{probe}", f"{self.directory}/{probe}")
                except OSError:
                    os.rmdir(f"{self.hidden}/{probe}")
                    raise
                os.rmdir(f"{self.directory}/{probe}")
            else:
                self.filesystem.open_output_stream(f"{self.hidden}/{probe}").close()
                self.filesystem.delete_file(f"{self.hidden}/{probe}")
        except OSError as error:
            raise StorageError(
                f"FileSink: cannot write to {self.directory}: files are prepared in {self.hidden} and moved from there, so "
                f"both, and the directory they are in, must be writable and on one filesystem: {error}"
            ) from error

    def newest_committed(self, output: CommittedOutput) -> int:
        """Return the newest committed checkpoint. Raises StorageError if the directory cannot be read."""
        with explained(f"cannot look into {self.directory}"):
            return max([self._files_of(output).newest(), *self._committed_of(output.held)])

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        """Raise ConfigError if newer files are elsewhere, or have been removed, possibly after being read."""
        own = _OutputDirectory(self.filesystem, self.directory)
        with explained(f"cannot look into {self.directory}"):
            for checkpoint_id, committable in output.held:
                file = _decoded(committable)
                is_own = file.place in ("", location_of(self.filesystem, self.directory))
                if not (is_own or own.is_file(own.final(file)) or own.is_file(own.pending(file))):
                    raise ConfigError(
                        f"the {file.rows} rows in {file.name}, of checkpoint {checkpoint_id}, were written to "
                        f"{file.place}, and the sink now writes to {location_of(self.filesystem, self.directory)}; roll back with "
                        "the sink as it was"
                    )
            # not in `roll_back`, in which a driver may be stopped until the next one has written files
            self._earlier[output.uid] = self._jobs_before(output.uid)
            self._files_of(output).check(after)

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        files = map(_decoded, kept)
        with explained(f"cannot delete from {self.directory}"):
            self._files_of(output).roll_back(after, {file.pending for file in files})

    def _committed_of(self, held: Sequence[tuple[int, bytes]]) -> Iterator[int]:
        """Yield the checkpoints of these committables whose files are no longer pending where the sink wrote them."""
        committer = _FileCommitter(self, "")
        for checkpoint_id, committable in held:
            file = _decoded(committable)
            if not any(location.is_file(location.pending(file)) for location in committer.locations(file)):
                yield checkpoint_id

    def _files_of(self, output: CommittedOutput) -> CommittedFiles:
        jobs = output.jobs.union(self._earlier.get(output.uid, ()))
        folder = _folder(output.uid)
        return CommittedFiles(self.filesystem, self.directory, self.hidden, folder, output.uid, jobs, self.append)


class _FilesPart(AsyncPart):
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
        location = location_of(self._sink.filesystem, self._sink.directory)
        return PendingFile(context.job_id, context.attempt, file.name, name, file.size, file.rows, location)

    def _discard(self) -> None:
        self._files.discard()


@dataclass(frozen=True, slots=True)
class _OutputDirectory:
    """A sink's directory, and the hidden one next to it."""

    filesystem: pyarrow.fs.FileSystem = field(compare=False)
    """The sink's filesystem; a location in another one is out of reach."""
    directory: str

    @property
    def hidden(self) -> str:
        return _hidden(self.directory)

    def pending(self, file: PendingFile) -> str:
        return below(self.filesystem, self.hidden, file.pending)

    def final(self, file: PendingFile) -> str:
        return below(self.filesystem, self.directory, file.name)

    def is_file(self, path: str) -> bool:
        return is_file(self.filesystem, path)

    def committed(self, folder: str) -> int:
        """Return that job's newest checkpoint whose files are all committed; -1 if there is none."""
        path = below(self.filesystem, self.hidden, f"{folder}/{JOURNAL}")
        return read_journal(self.filesystem, path, otherwise=-1)

    def write_journal(self, folder: str, checkpoint_id: int) -> None:
        if self.committed(folder) >= checkpoint_id:
            return
        path = below(self.filesystem, self.hidden, f"{folder}/{JOURNAL}")
        make_directory(self.filesystem, path.rpartition("/")[0])
        write_journal(self.filesystem, path, checkpoint_id)

    def delete_pending(self, folder: str, before_attempt: int | None) -> None:
        """Delete pending files of attempts before `before_attempt`; None: of all attempts."""
        above = f"{self.hidden}/{folder}"
        for name in names_in(self.filesystem, above):
            found = _PENDING.fullmatch(name)
            if found and (before_attempt is None or int(found[1]) < before_attempt):
                delete_if_there(self.filesystem, f"{above}/{name}")


class _FileCommitter(Committer):
    def __init__(self, sink: FileSink, job_id: str, earlier: Sequence[str] = ()) -> None:
        """`earlier`: the jobs that have written here before this one."""
        self._sink = sink
        self._own = _OutputDirectory(sink.filesystem, sink.directory)
        self._job_id = job_id
        self._earlier = [job for job in earlier if job != job_id]
        self._swept: tuple[str, int] | None = None
        self._left: set[tuple[_OutputDirectory, str]] = set()
        """Folders of jobs from which this one resumed, in the locations where the sink wrote then."""

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        files = [_decoded(committable) for committable in committables]
        with explained(f"cannot commit checkpoint {checkpoint_id} to {self._sink.directory}"):
            folders: set[tuple[_OutputDirectory, str]] = set()
            made: set[_OutputDirectory] = set()
            for file in files:
                location, is_pending = self.find(file, checkpoint_id)
                if location not in made:
                    make_directory(location.filesystem, location.directory)
                    made.add(location)
                if is_pending:
                    location.filesystem.move(location.pending(file), location.final(file))
                folders.add((location, _folder_of(file)))
            for location in made:
                make_durable(location.filesystem, location.directory)
            for location, folder in folders:
                location.write_journal(folder, checkpoint_id)
            self._left |= {(location, folder) for location, folder in folders if location != self._own}
            self._sweep(files)

    def abort(self, committables: Sequence[bytes]) -> None:
        with explained(f"cannot clean up below {self._sink.hidden}"):
            for file in map(_decoded, committables):
                for location in self.locations(file):
                    delete_if_there(location.filesystem, location.pending(file))

    def find(self, file: PendingFile, checkpoint_id: int) -> tuple[_OutputDirectory, bool]:
        """Return where the file is or was committed, and whether it still has to be moved.

        That is the location where it was written or, if that was moved, the sink's own. Raises StorageError if the file is
        in neither, ConfigError if it was written where this sink has no access.
        """
        locations = self.locations(file)
        for location in locations:
            if location.is_file(location.pending(file)):
                return location, True
            if location.is_file(location.final(file)):
                return location, False
        for location in locations:
            if location.committed(_folder_of(file)) >= checkpoint_id:
                return location, False  # it was committed, and a reader has removed it since, as readers may
        if len(locations) == 1 and file.place != location_of(self._own.filesystem, self._own.directory):
            raise ConfigError(
                f"{file.rows} rows were to be committed with checkpoint {checkpoint_id} to {file.place}, and the "
                f"sink now writes to {location_of(self._own.filesystem, self._own.directory)}, from where it cannot "
                "determine whether they were; resume with the sink as it was, and before you change it, stop with a "
                "savepoint, which "
                "leaves nothing to commit"
            )
        raise StorageError(
            f"{locations[0].pending(file)}: the {file.rows} rows in it were to be committed with checkpoint {checkpoint_id}, and "
            f"it is missing; only a job may delete from {locations[0].hidden}: restore the file, or start from another checkpoint"
        )

    def locations(self, file: PendingFile) -> list[_OutputDirectory]:
        """Return the locations where the file may be."""
        if file.place == location_of(self._own.filesystem, self._own.directory):
            return [self._own]
        directory = directory_of(file.place, self._own.filesystem, "FileSink")
        return [self._own] if directory is None else [_OutputDirectory(self._own.filesystem, directory), self._own]

    def _sweep(self, files: Sequence[PendingFile]) -> None:
        """Delete the pending files of ended attempts, once something of a newer attempt is committed.

        By then the checkpoint from which that attempt was restored is committed, so nothing needs these files.
        """
        own = [file for file in files if file.job_id == self._job_id]
        if not own:
            return
        newest = max(own, key=lambda file: file.attempt)
        folder, attempt = _folder_of(newest), newest.attempt
        if self._swept == (folder, attempt):
            return
        above = folder.rpartition("/")[0]
        self._own.delete_pending(folder, attempt)
        for job in self._earlier:
            self._own.delete_pending(f"{above}/{job}", None)
        for location, left in self._left:
            location.delete_pending(left, None)
        self._left.clear()
        self._swept = (folder, attempt)


def _decoded(committable: bytes) -> PendingFile:
    """Decode a committable. Raises StorageError for what no file sink has written."""
    file = decoded(committable, PendingFile, "a file sink", "FileSink")
    found = _PENDING_PATH.fullmatch(file.pending)
    if found is None or found.groups() != (file.job_id, str(file.attempt)) or not _NAME.fullmatch(file.name):
        raise StorageError(
            f"FileSink: no file sink moves {file.pending!r} to {file.name!r}; the checkpoint is corrupt or forged"
        )
    return file


def _hidden(directory: str) -> str:
    parent, _, name = directory.rpartition("/")
    return f"{parent}/.{name}.midstream"


def _folder(uid: str) -> str:
    """Return a name for `uid` that every filesystem accepts."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", uid)[:64] + "-" + xxhash.xxh3_64_hexdigest(uid.encode())[:8]


def _folder_of(file: PendingFile) -> str:
    return file.pending.rpartition("/")[0]
