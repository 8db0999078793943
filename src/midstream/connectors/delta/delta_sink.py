"""Rows into a Delta table, exactly once: subtasks write files, and the committer adds them to the table's log.

    table/part-<attempt>-<subtask>-<n>-<token>.parquet    invisible to readers until the log names it
    table/_delta_log/00000000000000000007.json            adds the files of a checkpoint, and names their job

Each commit is one transaction of the table, with an application id for the job and sink and the checkpoint's id as its
version. The log keeps the newest version of each application, and accepts a transaction from only one of two writers:
the other one finds that there is nothing left to do. With a key, rows are merged instead of added (`delta_merges`).

A committable names the table to which its file belongs, and is committed there even if the sink now writes to another
one. It comes from a checkpoint, so it is not trusted: it can only name files below their table whose names have the
form that such a sink gives them.

A job that resumes from another's checkpoint writes `_SUPERSEDED` plus that checkpoint as the other's version:
afterwards the other job can commit nothing more, even if it has not yet learned that it is over.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.common.async_writer import AsyncWriter
from midstream.connectors.common.dataset_uris import file_uri
from midstream.connectors.common.filesystem import (
    below,
    delete_if_there,
    directory_of,
    is_local,
    location_of,
    make_durable,
    names_in,
    resolve,
)
from midstream.connectors.common.optional_packages import require
from midstream.connectors.common.row_operations import check_columns, checked_key, written_columns
from midstream.connectors.common.table_columns import fitted
from midstream.connectors.delta import delta_evolution, delta_merges
from midstream.connectors.delta.column_mapping import ColumnMapping, mapping_of
from midstream.connectors.delta.delta_compaction import DeltaCompactor, NewestTable, changes_no_rows, check_compactable
from midstream.connectors.delta.delta_files import AppendedPart, WrittenFile
from midstream.connectors.delta.delta_merges import MergedPart
from midstream.connectors.delta.delta_tables import (
    check_features,
    check_partitioning,
    check_unchanged,
    delta_schema,
    parquet_schema,
    partition_folder,
    schema_of,
)
from midstream.connectors.files.keyed_files import FOLDER, MergedFiles, file_token, merged_columns
from midstream.connectors.files.rolling_files import explained, roll_bytes_of
from midstream.engine.core.config import Size
from midstream.engine.core.errors import UNDECODABLE, ConfigError, InvariantError, SchemaError, StorageError
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
    decoded,
)

if TYPE_CHECKING:
    import os

    from deltalake import CommitProperties, DeltaTable, Transaction
    from deltalake.transaction import AddAction

_NAME: Final = re.compile(r"part-\d+-\d+-\d+-[0-9a-f]{16}\.parquet")
_SUPERSEDED: Final = 2**62
_TRIES_MAX: Final = 5
"""The number of attempts when other writers' transactions intervene; when files are added, those that only add files do
not count.
"""


class DeltaSink(Sink):
    """Writes every row once into a Delta table.

    Rows appear, in one version of the table, when the checkpoint that covers them completes. Files of killed attempts
    are in no version; VACUUM deletes them, like those of any other writer. Delta has no empty string as a partition
    value: it becomes NULL.

    The arguments are those of `DataStream.write_delta`, which also brings the rows of a key to one subtask, so that the last
    of several rows remains.

    Raises ConfigError for invalid arguments; the table is checked when the job starts.

        orders.sink(DeltaSink("s3://lake/orders", partition_by=["user"])).uid("orders-table")
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        key: Sequence[str] = (),
        op: str | None = None,
        partition_by: Sequence[str] = (),
        append: bool = False,
        evolve: bool = False,
        auto_compact: bool = False,
        roll_size: Size = "128 MiB",
        storage_options: Mapping[str, str] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> None:
        require("deltalake", "delta", "DeltaSink")
        if isinstance(partition_by, str):
            raise ConfigError(f"DeltaSink: partition_by={partition_by!r} is a string; give a list: [{partition_by!r}]")
        self.key = checked_key(key, op, "DeltaSink")
        self.op = op
        self.roll_bytes = roll_bytes_of(roll_size)
        self.filesystem, self.directory = resolve(table, filesystem, "DeltaSink")
        self._uri = self.directory if is_local(self.filesystem) else str(table)
        self._storage_options = dict(storage_options) if storage_options else None
        self.partition_by = tuple(partition_by)
        self.append = append
        self.table_id = ""
        """The id of the table's metadata, which it keeps until it is dropped. Set by `validate`."""
        self.evolve = evolve
        self.auto_compact = auto_compact
        self._stored: pa.Schema | None = None
        """The stream's columns in the types of a table that would be made for it. Set by `validate`."""
        self._schema: pa.Schema | None = None
        """The stream's columns in the table's types. Set by `validate`."""
        self._described: pa.Schema | None = None
        """The table's columns that statistics describe, as files have them: all but partition columns. Set by `validate`."""
        self.mapping = ColumnMapping("none", {})
        """That of the table. Set by `validate`."""
        self._where = f"DeltaSink on {self.directory}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage_options": None}

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Check the stream against the table, which is created if it does not exist.

        Raises SchemaError for columns that do not fit, ConfigError for a table that is in use or needs unsupported
        features, StorageError if it cannot be read or created.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        check_columns(schema, self.key, self.op, self._where)
        schema = written_columns(schema, self.op)
        if len(schema) == 0:
            raise SchemaError(f"{self._where}: the stream has no columns to write")
        self._stored = made = delta_schema(schema, self._where)
        try:
            if not DeltaTable.is_deltatable(self._uri, self._storage_options):
                check_partitioning(self.partition_by, made, self._where)
                self._check_free()
                options = self._storage_options
                DeltaTable.create(
                    self._uri, made, mode="ignore", partition_by=list(self.partition_by), storage_options=options
                )
            table = self.opened()
        except (DeltaError, OSError) as error:
            raise StorageError(f"{self._where}: cannot be opened or made: {error}") from error
        check_features(table, self._where)
        self.mapping = mapping_of(table, self._where)
        partition_by = tuple(table.metadata().partition_columns)
        if self.partition_by and self.partition_by != partition_by:
            raise ConfigError(
                f"{self._where}: the table is partitioned by ({', '.join(partition_by)}), not by "
                f"({', '.join(self.partition_by)}); leave partition_by out, or name another table"
            )
        if not (self.key or restoring or self.append) and table.file_uris():
            raise ConfigError(
                f"{self._where}: the table is not empty; name another one, resume from a checkpoint, add to the table with "
                "append=True, or replace rows by a key"
            )

        def fit(there: pa.Schema) -> pa.Schema:
            columns = fitted(schema, made, there, self._where, is_keyed=bool(self.key), evolves=self.evolve)
            check_partitioning(partition_by, columns, self._where)
            if self.key:
                delta_merges.check_keys(table, columns, self.key, self._where)
            return columns

        if self.evolve:
            self._evolve(table, made, fit)
            self.mapping = mapping_of(table, self._where)
        there = schema_of(table)
        self._schema = fit(there)
        self._described = self.mapping.stored(pa.schema([field for field in there if field.name not in partition_by]))
        self.partition_by = partition_by
        self.table_id = str(table.metadata().id)
        if self.key:
            delta_merges.check_mergeable(table, self._schema, self.key, self._where)
        if self.auto_compact:
            check_compactable(self, table)

    def datasets(self) -> Sequence[str]:
        return [file_uri(self._uri, self.filesystem, self.directory)]

    def _evolve(self, table: DeltaTable, stream: pa.Schema, check: Callable[[pa.Schema], object]) -> None:
        from deltalake.exceptions import CommitFailedError, DeltaError

        for tries in range(1, _TRIES_MAX + 1):
            before = table.version()
            try:
                delta_evolution.evolve(table, stream, self.key, check, self._where)
                _make_log_durable(self, table, before)
                return
            except CommitFailedError as error:
                if tries == _TRIES_MAX:
                    raise StorageError(
                        f"{self._where}: others keep changing the table's columns first: {error}"
                    ) from error
                table.update_incremental()
            except (DeltaError, OSError) as error:
                raise StorageError(f"{self._where}: columns cannot be added: {error}") from error

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError if files of these were deleted before their commit, ConfigError if they are elsewhere."""
        _DeltaCommitter(self, "").check(checkpoint_id, committables)

    def writer(self, context: WriterContext) -> SinkWriter:
        if self._schema is None:
            raise InvariantError(f"{self._where}: was shipped before it was validated")
        schema, numbers, part = self._schema, count(), MergedPart if self.key else AppendedPart
        origin = f"{context.job_id}/{context.uid}/{context.attempt}/{context.subtask}"
        token = xxhash.xxh3_64_hexdigest(origin.encode())
        if self.key:
            token = file_token(context.job_id, context.uid)

        def next_name() -> str:
            return f"part-{context.attempt:04d}-{context.subtask:04d}-{next(numbers):06d}-{token}.parquet"

        return AsyncWriter(context, lambda: part(self, context, schema, next_name))

    def committer(self, context: CommitterContext) -> _DeltaCommitter:
        compactor = DeltaCompactor(self, _make_log_durable, context.metrics) if self.auto_compact else None
        return _DeltaCommitter(self, context.job_id, compactor)

    def newest_committed(self, output: CommittedOutput) -> int:
        marks = self._marks(self._opened_to_read(), output)
        newest = [_checkpoint_of(mark) for mark in marks.values()]
        for checkpoint_id, committable in output.held:
            for _, _, location in _grouped([committable]):
                try:
                    at = self.at(location)
                except ConfigError:
                    newest.append(checkpoint_id)  # it may have been committed there
                    continue
                if at is not self:
                    newest += map(_checkpoint_of, at._marks(at._opened_to_read(), output).values())
        return max(newest, default=0)

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        """Raise ConfigError if rows are in another table, if this one has other writers, or if its log is too short or its
        old files are deleted.
        """
        from deltalake.exceptions import DeltaError

        for checkpoint_id, committable in output.held:
            for _, _, location in _grouped([committable]):
                if self.at(location) is not self:
                    raise ConfigError(
                        f"{self._where}: rows of checkpoint {checkpoint_id} were written to {location}, and the sink now "
                        f"writes to {self.location}; roll back with the sink as it was"
                    )
        table = self._opened_to_read()
        version = self._version_before(table, output, after)
        if version < table.version():
            older = self._opened_to_read()
            try:
                older.load_as_version(version)
                delta_merges.check_restorable(self, table, older)
                delta_evolution.check_columns_restorable(table, older, self._where)
            except (DeltaError, OSError) as error:
                raise StorageError(f"{self._where}: version {version} cannot be read: {error}") from error

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        """Restore the table to its earlier state and mark these jobs as unable to commit more, in one transaction."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError

        table = self._opened_to_read()
        marks = self._marks(table, output)
        # also those that have committed nothing: the first commit of one may be under way
        ended = {app: _SUPERSEDED + min(_checkpoint_of(marks.get(app, 0)), after) for app in _applications(output)}
        if ended == marks:
            self._restore_columns(table)
            return
        version, newest = self._version_before(table, output, after), table.version()
        properties = CommitProperties(app_transactions=[Transaction(app, mark) for app, mark in ended.items()])
        try:
            if version == newest:
                _add(table, [], properties)
            else:
                table.restore(version, commit_properties=properties)
                table.update_incremental()
            _make_log_durable(self, table, newest)
        except (DeltaError, OSError) as error:
            raise StorageError(f"{self._where}: {error}") from error
        self._restore_columns(table)

    def _restore_columns(self, table: DeltaTable) -> None:
        """If the newest version has set the table back, add the columns again that were added since."""
        from deltalake.exceptions import DeltaError

        try:
            newest = table.version()
            delta_evolution.restore_columns(table, self.opened, self._where)
            _make_log_durable(self, table, newest)
        except (DeltaError, OSError) as error:
            raise StorageError(f"{self._where}: columns of the table cannot be kept: {error}") from error

    def _opened_to_read(self) -> DeltaTable:
        from deltalake.exceptions import DeltaError

        try:
            return self.opened()
        except (DeltaError, OSError) as error:
            raise StorageError(f"{self._where}: cannot be read: {error}") from error

    def _marks(self, table: DeltaTable, output: CommittedOutput) -> dict[str, int]:
        """Return the last commit of each application of `output` that has committed something."""
        found = {app: table.transaction_version(app) for app in _applications(output)}
        return {app: mark for app, mark in found.items() if mark is not None}

    def _version_before(self, table: DeltaTable, output: CommittedOutput, after: int) -> int:
        """Return the newest version with nothing newer than `after`. Raises ConfigError, see `check_rollback`."""
        if all(_checkpoint_of(mark) <= after for mark in self._marks(table, output).values()):
            return table.version()
        applications = set(_applications(output))
        before, newest = table.version(), table.version()
        others: list[tuple[int, str]] = []
        for version in range(newest, -1, -1):
            path = f"{self.directory}/_delta_log/{version:020d}.json"
            try:
                with self.filesystem.open_input_stream(path) as stream:
                    actions = [msgspec.json.decode(line) for line in stream.read().splitlines() if line.strip()]
            except FileNotFoundError:
                raise ConfigError(
                    f"{self._where}: the table's log no longer goes back to checkpoint {after}: version {version} is "
                    "no longer in it"
                ) from None
            except (OSError, *UNDECODABLE) as error:
                raise StorageError(f"{path}: cannot be read: {error}") from error
            ours = [a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] in applications]
            if ours and max(map(_checkpoint_of, ours)) <= after:
                break
            info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
            if changes_no_rows(actions) or info.get("operation") == delta_evolution.ADDED:
                continue
            if ours:
                before = version - 1
            else:
                others.append((version, str(info.get("operation", "a commit"))))
        for version, operation in others:
            if version > before:
                raise ConfigError(
                    f"{self._where}: other writers have changed the table since: version {version} is {operation}; "
                    "only the newest versions can be rolled back"
                )
        return before

    # ---- for this module

    def opened(self) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable(self._uri, storage_options=self._storage_options)

    @property
    def location(self) -> str:
        return location_of(self.filesystem, self.directory)

    def at(self, location: str) -> DeltaSink:
        """Return this sink as it was when it wrote to `location`; the sink itself if there is no table any more, since the
        table may have moved.

        Raises ConfigError for a location that cannot be reached from here.
        """
        from deltalake import DeltaTable

        if location == self.location:
            return self
        directory = directory_of(location, self.filesystem, self._where)
        if directory is None or not self._uri.endswith(self.directory):
            raise ConfigError(
                f"{self._where}: rows of the checkpoint were to be committed to {location}, which cannot be reached from "
                "here; resume with the sink as it was, and before you change it, stop with a savepoint, which leaves "
                "nothing to commit"
            )
        found = copy(self)
        found.directory = directory
        found._uri = self._uri.removesuffix(self.directory) + directory
        found._where = f"DeltaSink on {directory}"
        found.evolve = False
        return found if DeltaTable.is_deltatable(found._uri, self._storage_options) else self

    def _check_free(self) -> None:
        """Check that the directory is empty: as plain Parquet, old and new files would be read together; as Delta, only
        new ones.
        """
        names = names_in(self.filesystem, self.directory)
        if names:
            raise ConfigError(
                f"{self._where}: is not empty (it has {names[0]}) and is not a Delta table; name another directory, "
                "or convert it to a Delta table first (deltalake.convert_to_deltalake)"
            )


def _applications(output: CommittedOutput) -> list[str]:
    return [_application(job, output.uid) for job in sorted(output.jobs)]


def _application(job_id: str, uid: str) -> str:
    return f"midstream/{job_id}/{uid}"


def _checkpoint_of(mark: int) -> int:
    return mark - _SUPERSEDED if mark >= _SUPERSEDED else mark


class _DeltaCommitter(Committer):
    def __init__(self, sink: DeltaSink, job_id: str, compactor: DeltaCompactor | None = None) -> None:
        self._sink = sink
        self._job_id = job_id
        self._table = NewestTable(sink)
        self._elsewhere: dict[str, _DeltaCommitter] = {}
        """Committers by location, for what the sink wrote to other tables before this one."""
        self._merged = MergedFiles(job_id)
        self._compactor = compactor

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for (job_id, uid, location), files in _grouped(committables).items():
            at = self._at(location)
            where = f"{at._sink._where}: cannot commit checkpoint {checkpoint_id}"
            compactor = self._compactor if at is self else None
            with nullcontext() if compactor is None else compactor.turn:
                wrong = at._commit(_application(job_id, uid), job_id != self._job_id, checkpoint_id, files, where)
            if files[0].key:
                names = [file.name for file in files]
                self._merged.add(at._sink.filesystem, at._sink.directory, job_id, uid, names)
            if wrong:
                raise ConfigError(f"{at._sink._where}: after the commit of checkpoint {checkpoint_id}: {wrong}")
            if compactor is not None:
                compactor.committed()

    def close(self) -> None:
        if self._compactor is not None:
            self._compactor.close()

    def check(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        from deltalake.exceptions import DeltaError

        for (job_id, uid, location), files in _grouped(committables).items():
            at = self._at(location)
            where = f"{at._sink._where}: cannot commit checkpoint {checkpoint_id}"
            try:
                table = at._table.newest()
                newest, _ = _committed(table, _application(job_id, uid))
                if newest < checkpoint_id:
                    at._actions(files, where)
                    _check_same(table, files, where)
            except (DeltaError, OSError) as error:
                raise StorageError(f"{where}: {error}") from error

    def abort(self, committables: Sequence[bytes]) -> None:
        with explained(f"{self._sink._where}: cannot clean up"):
            for (_, _, location), files in _grouped(committables).items():
                sink = self._sink.at(location)
                for file in files:
                    delete_if_there(sink.filesystem, below(sink.filesystem, sink.directory, file.name))

    def _at(self, location: str) -> _DeltaCommitter:
        if location not in self._elsewhere:
            sink = self._sink.at(location)
            self._elsewhere[location] = self if sink is self._sink else _DeltaCommitter(sink, self._job_id)
        return self._elsewhere[location]

    def _commit(
        self, application: str, superseding: bool, checkpoint_id: int, files: Sequence[WrittenFile], where: str
    ) -> str | None:
        """Commit, unless that is done. Return what the commit has shown to be wrong with the table."""
        from deltalake import Transaction
        from deltalake.exceptions import CommitFailedError, DeltaError

        for tries in range(1, _TRIES_MAX + 1):
            try:
                table = self._table.newest()
                newest, is_superseded = _committed(table, application)
                if checkpoint_id <= newest and (is_superseded or not superseding):
                    return None
                if is_superseded and not superseding:
                    raise ConfigError(
                        f"{where}: another job has resumed from checkpoint {newest} of this one in the meantime; it writes the "
                        "rows after that checkpoint, so this job must not be started again"
                    )
                before = table.version()
                mark = Transaction(application, max(newest, checkpoint_id) + (_SUPERSEDED if superseding else 0))
                new = files if checkpoint_id > newest else []
                if new and self._sink.evolve:
                    assert self._sink._stored is not None, "commits on the driver, where it has been validated"
                    _check_same(table, new, where)
                    check_features(table, where)
                    delta_evolution.add_missing(table, self._sink._stored, self._sink.key, where)
                wrong = self._write(table, new, mark, superseding, where)
                _make_log_durable(self._sink, table, before)
                return wrong
            except CommitFailedError as error:
                if tries == _TRIES_MAX:
                    raise StorageError(f"{where}: other writers keep committing first: {error}") from error
            except (DeltaError, OSError, pa.ArrowException) as error:
                raise StorageError(f"{where}: {error}") from error
        raise InvariantError(f"{where}: tried {_TRIES_MAX} times")

    def _write(
        self, table: DeltaTable, files: Sequence[WrittenFile], mark: Transaction, superseding: bool, where: str
    ) -> str | None:
        """Add or merge files, and note that, in one transaction."""
        from deltalake import CommitProperties

        actions, wrong = [], None
        if files:
            now, partition_by = mapping_of(table, where), table.metadata().partition_columns
            stored_names = now.stored_names(partition_by)
            if not files[0].key and any([*file.partition] != stored_names for file in files):
                raise ConfigError(f"{where}: the table is now partitioned by ({', '.join(partition_by)})")
            actions = self._actions(files, where)
            _check_same(table, files, where)
            check_features(table, where)
            there, names = schema_of(table), self._sink.mapping.names
            for schema in self._schemas(files, superseding):
                check_unchanged(schema, now.stored(there), names | now.names, where)
        if files and files[0].key:
            before = table.version()
            # a merge is of one version of the table: deltalake must not repeat its commit after that of another writer
            properties = CommitProperties(app_transactions=[mark], max_commit_retries=0)
            wrong = delta_merges.merge_files(self._sink, table, files, properties)
            if table.version() > before:
                return wrong
            actions = []
        _add(table, actions, CommitProperties(app_transactions=[mark]))
        return wrong

    def _schemas(self, files: Sequence[WrittenFile], superseding: bool) -> list[pa.Schema]:
        """Return the table's schema, as files have it, when these were written, by this job or by the one before."""
        sink = self._sink
        if not superseding:
            assert sink._schema is not None, "commits on the driver, where it has been validated"
            return [sink.mapping.stored(sink._schema)]
        paths = [below(sink.filesystem, sink.directory, file.name) for file in files]
        return [*{merged_columns(parquet_schema(sink.filesystem, path)) for path in paths}]

    def _actions(self, files: Sequence[WrittenFile], where: str) -> list[Any]:
        from deltalake.transaction import AddAction

        sink, actions = self._sink, []
        infos = sink.filesystem.get_file_info([below(sink.filesystem, sink.directory, file.name) for file in files])
        for file, info in zip(files, infos, strict=True):
            if info.type != pyarrow.fs.FileType.File:
                raise StorageError(
                    f"{where}: {info.path} with {file.rows} rows is missing; only a job may delete it before it is "
                    "committed: restore the file, or start from another checkpoint"
                )
            written_ms = (info.mtime_ns or 0) // 1_000_000
            actions.append(AddAction(file.name, file.size, file.partition, written_ms, True, file.statistics))
        return actions


def _add(table: DeltaTable, actions: Sequence[AddAction], properties: CommitProperties) -> None:
    partition_by = table.metadata().partition_columns
    table.create_write_transaction([*actions], "append", table.schema(), partition_by, commit_properties=properties)


def _make_log_durable(sink: DeltaSink, table: DeltaTable, before: int) -> None:
    """Sync a local log to disk, from version `before` on, which deltalake leaves to the operating system."""
    table.update_incremental()
    for version in range(before + 1, table.version() + 1):
        make_durable(sink.filesystem, f"{sink.directory}/_delta_log/{version:020d}.json")
    make_durable(sink.filesystem, f"{sink.directory}/_delta_log")
    make_durable(sink.filesystem, sink.directory)


def _grouped(committables: Sequence[bytes]) -> dict[tuple[str, str, str], list[WrittenFile]]:
    """Group committables by job, uid and location. Raises StorageError for what no Delta sink has written."""
    groups: defaultdict[tuple[str, str, str], list[WrittenFile]] = defaultdict(list)
    for committable in committables:
        file = decoded(committable, WrittenFile, "a Delta sink", "DeltaSink")
        folder, slash, name = file.name.rpartition("/")
        expected = FOLDER if file.key else partition_folder(file.partition)
        if not (_NAME.fullmatch(name) and folder + slash == expected):
            raise StorageError(
                f"DeltaSink: no Delta sink writes a file {file.name!r}; the checkpoint is corrupt or forged"
            )
        group = groups[file.job_id, file.uid, file.place]
        group.append(file)
        if file.key != group[0].key:
            raise StorageError("DeltaSink: one sink's files have several keys; the checkpoint is corrupt or forged")
    return groups


def _check_same(table: DeltaTable, files: Sequence[WrittenFile], where: str) -> None:
    """Raise ConfigError if files were written for another table, which was where this one is."""
    if any(file.table_id not in ("", str(table.metadata().id)) for file in files):
        raise ConfigError(
            f"{where}: the table was replaced by another since rows were written for it; they can be committed only to the "
            "table that they were written for: restore that, or start with --fresh"
        )


def _committed(table: DeltaTable, application: str) -> tuple[int, bool]:
    """Return the application's newest checkpoint in the table, or -1, and whether another job has resumed from it."""
    found = table.transaction_version(application)
    newest = -1 if found is None else found
    return (newest - _SUPERSEDED, True) if newest >= _SUPERSEDED else (newest, False)
