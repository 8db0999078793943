"""Rows into an Iceberg table, exactly once: subtasks write data files, and the committer adds them in a snapshot.

    <table>/data/part-<attempt>-<subtask>-<n>-<token>.parquet    invisible to readers until a snapshot has it
    property `midstream/<job>/<uid>`                             the newest checkpoint of that job and sink in the table

Each commit is one snapshot with the files of a checkpoint, and sets the property of its job and sink. The summary of the
snapshot has the same, but snapshots expire, while properties stay. A committer that lost a race against another commit,
or whose own commit has an unknown outcome, loads the table again, and reads the property before it decides.

A committable names the table, by its identifier and its UUID, to which its file belongs, and is committed there even if
the sink now writes to another one. It comes from a checkpoint, so it is not trusted: it can only name files in their
table's data directory whose names have the form that such a sink gives them.

With a key, rows are merged instead of added (`iceberg_merges`). A checkpoint that changes nothing then makes no snapshot,
but its mark is set.

A job that resumes from another's checkpoint adds `superseded` to the other's property: afterwards the other job can
commit nothing more, even if it is still running.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
import xxhash
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.connectors.common.dataset_uris import location_uri
from midstream.connectors.common.filesystem import delete_if_there
from midstream.connectors.common.row_operations import check_columns, checked_key, written_columns
from midstream.connectors.common.table_columns import fitted
from midstream.connectors.files.keyed_files import FOLDER, MergedFiles, check_key_columns, file_token
from midstream.connectors.files.rolling_files import explained, roll_bytes_of
from midstream.connectors.iceberg.iceberg_catalog import (
    CHECKPOINT,
    JOB,
    PREVIOUS,
    ROLLED_BACK,
    SINK,
    CatalogTable,
    IcebergFile,
    Mark,
    application,
    checked_catalog,
    checked_identifier,
    has_files,
)
from midstream.connectors.iceberg.iceberg_commits import (
    CommitUnknownError,
    LostRaceError,
    SnapshotCommit,
    catalog_errors,
)
from midstream.connectors.iceberg.iceberg_compaction import IcebergCompactor, check_compactable
from midstream.connectors.iceberg.iceberg_evolution import Append, Evolving
from midstream.connectors.iceberg.iceberg_merges import Merge
from midstream.connectors.iceberg.iceberg_parts import IcebergKeyedPart, IcebergPart, TableTarget, target_of
from midstream.connectors.iceberg.iceberg_rewrites import deletes_of
from midstream.connectors.iceberg.iceberg_tables import (
    check_metrics,
    check_rewritable,
    check_supported,
    columns_of,
    iceberg_schema,
    new_spec,
    same_partitioning,
    spec_text,
)
from midstream.engine.core.config import Size
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError, StorageError
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
    decoded,
)

_NAME: Final = re.compile(r"part-\d+-\d+-\d+-[0-9a-f]{16}\.parquet")
_TRIES_MAX: Final = 20
"""The number of attempts when other writers commit first."""
_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 2.0


class IcebergSink(Sink):
    """Writes every row once into an Iceberg table.

    Rows appear, in one snapshot of the table, when the checkpoint that covers them completes. Files of killed attempts
    are in no snapshot; the removal of orphan files deletes them, like those of any other writer. With a `key`, the driver
    has the rows of a checkpoint in memory, and rewrites the files that have their keys, one after the other. Other
    writers, compaction and the expiration of snapshots may run at the same time.

    The arguments are those of `DataStream.write_iceberg`, which also brings the rows of a key to one subtask, so that the
    last of several rows remains.

    Raises ConfigError for invalid arguments; the table is checked when the job starts.

        orders.sink(IcebergSink("lake.orders", catalog="prod", partition_by=["day(at)"])).uid("orders-table")
    """

    def __init__(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str] | Catalog,
        key: Sequence[str] = (),
        op: str | None = None,
        partition_by: Sequence[str] = (),
        append: bool = False,
        evolve: bool = False,
        auto_compact: bool = False,
        roll_size: Size = "128 MiB",
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> None:
        given, identifier = checked_catalog(catalog, "IcebergSink"), checked_identifier(table, "IcebergSink")
        if isinstance(partition_by, str):
            raise ConfigError(
                f"IcebergSink: partition_by={partition_by!r} is a string; give a list: [{partition_by!r}]"
            )
        self.key = checked_key(key, op, "IcebergSink")
        self.op = op
        self.roll_bytes = roll_bytes_of(roll_size)
        self.partition_by = tuple(partition_by)
        self.append = append
        self.evolve = evolve
        self.auto_compact = auto_compact
        self._evolving: Evolving | None = None
        """Set by `validate`, if the sink evolves the table."""
        self._table: CatalogTable | None = CatalogTable(given, identifier, filesystem, f"IcebergSink on {table}")
        """None on the slots."""
        self._target: TableTarget | None = None
        """Set by `validate`."""
        self._where = self._table.where

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Check the stream against the table, which is created if it does not exist.

        Raises SchemaError for columns that do not fit, ConfigError for a table that is in use or has an unsupported
        format, StorageError if the catalog or the table cannot be reached or created.
        """
        check_columns(schema, self.key, self.op, self._where)
        schema = written_columns(schema, self.op)
        if len(schema) == 0:
            raise SchemaError(f"{self._where}: the stream has no columns to write")
        stored, there = iceberg_schema(schema, self._where), self._on_driver()
        table = there.opened_or_made(stored, self.partition_by)
        check_supported(table, self._where)
        found, spec = table.metadata.schema(), table.metadata.spec()
        if self.partition_by and not same_partitioning(new_spec(self.partition_by, found, self._where), spec):
            raise ConfigError(
                f"{self._where}: the table is partitioned by ({spec_text(spec, found)}), not by "
                f"({', '.join(self.partition_by)}); leave partition_by out, or name another table"
            )
        check_metrics(found, table.metadata.properties, self._where)
        if self.key:
            check_rewritable(table, "key", self._where)
            with catalog_errors(f"{self._where}: its files cannot be listed"):
                deletes_of(table, self._where)
        elif not (restoring or self.append):
            with catalog_errors(f"{self._where}: its files cannot be listed"):
                is_in_use = has_files(table)
            if is_in_use:
                raise ConfigError(
                    f"{self._where}: the table is not empty; name another one, resume from a checkpoint, add to the table "
                    "with append=True, or replace rows by a key"
                )

        def fit(columns: pa.Schema) -> pa.Schema:
            fitting = fitted(schema, stored, columns, self._where, is_keyed=bool(self.key), evolves=self.evolve)
            if self.key:
                check_key_columns(fitting, self.key, self._where)
            return fitting

        if self.evolve:
            table = self._evolved(there, Evolving(stored, self.key), fit)
            self._evolving = Evolving(stored, self.key, table.metadata.current_schema_id)
        self._target = target_of(there, table, fit(columns_of(table.metadata.schema())))
        if self.auto_compact:
            check_compactable(there, table, self.roll_bytes)

    def _evolved(self, there: CatalogTable, evolving: Evolving, check: Callable[[pa.Schema], object]) -> Table:
        def attempt(table: Table) -> None:
            evolving.evolved(there, table, check)

        _repeated(there, attempt, f"{self._where}: cannot change the table's columns", lambda pause_s: None)
        return there.opened()

    def datasets(self) -> Sequence[str]:
        return [location_uri(self._on_driver().opened().location())]

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError if files of these were deleted before their commit, ConfigError if they are elsewhere."""
        _IcebergCommitter(self._on_driver(), "", None, self.roll_bytes, None).check(checkpoint_id, committables)

    def writer(self, context: WriterContext) -> SinkWriter:
        if self._target is None:
            raise InvariantError(f"{self._where}: was shipped before it was validated")
        target, key, op, numbers = self._target, self.key, self.op, count()
        job_id, uid, roll_bytes = context.job_id, context.uid, self.roll_bytes
        origin = f"{context.job_id}/{context.uid}/{context.attempt}/{context.subtask}"
        token = file_token(job_id, uid) if key else xxhash.xxh3_64_hexdigest(origin.encode())

        def next_name() -> str:
            return f"part-{context.attempt:04d}-{context.subtask:04d}-{next(numbers):06d}-{token}.parquet"

        def next_part() -> AsyncPart:
            if key:
                return IcebergKeyedPart(target, key, op, job_id, uid, roll_bytes, next_name, where)
            return IcebergPart(target, job_id, uid, roll_bytes, next_name, where)

        where = f"operator {context.name!r}: {self._where}"
        return AsyncWriter(context, next_part)

    def committer(self, context: CommitterContext) -> _IcebergCommitter:
        there, compactor = self._on_driver(), None
        if self.auto_compact:
            compactor = IcebergCompactor(there, context.job_id, context.uid, self.roll_bytes, context.metrics)
        return _IcebergCommitter(there, context.job_id, context, self.roll_bytes, self._evolving, compactor)

    def newest_committed(self, output: CommittedOutput) -> int:
        there = self._on_driver()
        newest = [mark.checkpoint for mark in there.marks(there.opened(), output).values()]
        for checkpoint_id, committable in output.held:
            for _, _, identifier, uuid in _grouped([committable]):
                try:
                    other = there.at(identifier, uuid)
                except ConfigError:
                    newest.append(checkpoint_id)  # it may have been committed there
                    continue
                if other is not there:
                    newest += [mark.checkpoint for mark in other.marks(other.opened(), output).values()]
        return max(newest, default=0)

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        """Raise ConfigError if rows are in another table, if other writers have rewritten the files of newer checkpoints,
        or if their snapshots have expired; with a key also if others have changed the table since.
        """
        there = self._on_driver()
        for checkpoint_id, committable in output.held:
            for _, _, identifier, uuid in _grouped([committable]):
                if there.at(identifier, uuid) is not there:
                    raise ConfigError(
                        f"{self._where}: rows of checkpoint {checkpoint_id} were written to {'.'.join(identifier)}, and the "
                        "sink now writes to another table; roll back with the sink as it was"
                    )
        there.rollback(there.opened(), output, after)

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        """Undo newer checkpoints and mark these jobs as unable to commit more, in one snapshot."""
        there = self._on_driver()

        def attempt(table: Table) -> None:
            rollback = there.rollback(table, output, after)
            if rollback.ended == there.marks(table, output):
                return
            properties = {app: mark.text() for app, mark in rollback.ended.items()}
            summary = {SINK: output.uid, ROLLED_BACK: str(after)}
            commit = SnapshotCommit(table)
            if rollback.has_replaced:
                commit.set_back(rollback.before, properties, summary)
            elif rollback.newer:
                commit.replace((), lambda entry: entry.snapshot_id in rollback.newer, properties, summary)
            else:
                commit.append((), properties, summary)

        _repeated(there, attempt, f"{self._where}: cannot roll back", lambda pause_s: None)

    def _on_driver(self) -> CatalogTable:
        if self._table is None:
            raise InvariantError(f"{self._where}: the catalog is used by the driver only")
        return self._table


def _repeated(there: CatalogTable, attempt: Callable[[Table], None], where: str, wait: Callable[[float], None]) -> None:
    """Try a commit to the table as it is, again and again while other commits come first."""
    last: LostRaceError | CommitUnknownError | None = None
    for tries in range(_TRIES_MAX):
        if last is not None:
            wait(min(_PAUSE_S * 2**tries, _PAUSE_MAX_S) * random.uniform(0.5, 1))
        try:
            with catalog_errors(where):
                attempt(there.opened())
            return
        except (LostRaceError, CommitUnknownError) as error:
            last = error
    reason = (
        "other writers keep committing first" if isinstance(last, LostRaceError) else "the catalog does not confirm it"
    )
    raise StorageError(f"{where}: {reason}: {last}") from last


class _IcebergCommitter(Committer):
    def __init__(
        self,
        there: CatalogTable,
        job_id: str,
        context: CommitterContext | None,
        roll_bytes: int,
        evolving: Evolving | None,
        compactor: IcebergCompactor | None = None,
    ) -> None:
        self._there = there
        self._evolving = evolving
        self._compactor = compactor
        self._job_id = job_id
        self._context = context
        self._roll_bytes = roll_bytes
        self._merged = MergedFiles(job_id)
        self._elsewhere: dict[str, CatalogTable] = {}
        """Tables by their UUIDs."""

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for (job_id, uid, identifier, uuid), files in _grouped(committables).items():
            there = self._at(identifier, uuid)
            where = f"{there.where}: cannot commit checkpoint {checkpoint_id}"
            superseding = job_id != self._job_id
            evolving = self._evolving if there is self._there else None
            by_name = () if evolving is None else evolving.stream.names
            merge = Merge(there, job_id, uid, files, self._roll_bytes, by_name, where) if files[0].key else None
            append = Append(there, files, self._roll_bytes, evolving, not superseding, where)
            attempt = _CheckpointCommit(
                there, uuid, job_id, uid, superseding, checkpoint_id, append, merge, evolving, where
            )
            compactor = self._compactor if there is self._there else None
            with nullcontext() if compactor is None else compactor.turn:
                _repeated(there, attempt, where, self._wait)
                if merge is None:
                    append.clean_up()
                else:
                    table = there.opened()
                    merge.delete_lost(table)
            if merge is not None:
                self._merged.add(*there.data_directory(table), job_id, uid, [file.name for file in files])
                if merge.wrong:
                    raise ConfigError(f"{there.where}: after the commit of checkpoint {checkpoint_id}: {merge.wrong}")
            if compactor is not None:
                compactor.committed()

    def close(self) -> None:
        if self._compactor is not None:
            self._compactor.close()

    def check(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for (job_id, uid, identifier, uuid), files in _grouped(committables).items():
            there = self._at(identifier, uuid)
            where = f"{there.where}: cannot commit checkpoint {checkpoint_id}"
            table = there.opened()
            mark = there.mark(table, application(job_id, uid))
            if mark is None or mark.checkpoint < checkpoint_id:
                with catalog_errors(where):
                    if files[0].key:
                        there.existing(table, files, where)
                    else:
                        there.data_files(table, files, where)

    def abort(self, committables: Sequence[bytes]) -> None:
        for (_, _, identifier, uuid), files in _grouped(committables).items():
            there = self._at(identifier, uuid)
            where = f"{there.where}: cannot clean up"
            table = there.opened()
            filesystem, _ = there.data_directory(table)
            with explained(where):
                for path in there.paths(table, files, where):
                    delete_if_there(filesystem, path)

    def _at(self, identifier: tuple[str, ...], uuid: str) -> CatalogTable:
        if uuid not in self._elsewhere:
            self._elsewhere[uuid] = self._there.at(identifier, uuid)
        return self._elsewhere[uuid]

    def _wait(self, pause_s: float) -> None:
        if self._context is not None and self._context.stopped.wait(pause_s):
            raise StorageError(f"{self._there.where}: the commit was given up, since the attempt is over")


@dataclass(frozen=True, slots=True)
class _CheckpointCommit:
    """One attempt to commit the files of a checkpoint, unless that has been done."""

    there: CatalogTable
    uuid: str
    job_id: str
    uid: str
    superseding: bool
    checkpoint_id: int
    append: Append
    merge: Merge | None
    """None: the files are added."""
    evolving: Evolving | None
    where: str

    def __call__(self, table: Table) -> None:
        if str(table.metadata.table_uuid) != self.uuid:
            raise ConfigError(
                f"{self.where}: the table was dropped and made again since rows were written for it; they can be committed "
                "only to the table that they were written for"
            )
        app = application(self.job_id, self.uid)
        mark = self.there.mark(table, app) or Mark(-1, False, -1)
        newest, is_superseded, _ = mark
        if self.checkpoint_id <= newest and (is_superseded or not self.superseding):
            return
        if is_superseded and not self.superseding:
            raise ConfigError(
                f"{self.where}: another job has resumed from checkpoint {newest} of this one in the meantime; it writes the "
                "rows after that checkpoint, so this job must not be started again"
            )
        summary = {JOB: self.job_id, SINK: self.uid, CHECKPOINT: str(self.checkpoint_id)}
        if self.checkpoint_id <= newest:
            noted = mark._replace(is_superseded=True)
            SnapshotCommit(table).append((), {app: noted.text()}, summary)
            return
        check_supported(table, self.where)
        if self.evolving is not None:
            table = self.evolving.completed(self.there, table, self.where)
        changed = Mark(self.checkpoint_id, self.superseding, self.checkpoint_id)
        unchanged = changed._replace(changed=max(mark.changed, 0))
        complete = {**summary, PREVIOUS: str(max(mark.changed, 0))}
        if self.merge is None:
            self.append.commit(table, self.checkpoint_id, {app: changed.text()}, complete)
        elif not self.merge.commit(table, self.checkpoint_id, {app: changed.text()}, complete):
            # so that a commit of the superseded job, made for this snapshot, fails
            if self.superseding:
                SnapshotCommit(table).append((), {app: unchanged.text()}, summary)
            else:  # a late commit of the same job for this snapshot has no effect either
                SnapshotCommit(table).note({app: unchanged.text()})


def _grouped(committables: Sequence[bytes]) -> dict[tuple[str, str, tuple[str, ...], str], list[IcebergFile]]:
    """Group committables by job, uid and table. Raises StorageError for what no Iceberg sink has written."""
    groups: defaultdict[tuple[str, str, tuple[str, ...], str], list[IcebergFile]] = defaultdict(list)
    for committable in committables:
        file = decoded(committable, IcebergFile, "an Iceberg sink", "IcebergSink")
        name = file.name.removeprefix(FOLDER) if file.key else file.name
        if not _NAME.fullmatch(name) or (file.key and name == file.name):
            raise StorageError(
                f"IcebergSink: no Iceberg sink writes a file {file.name!r}; the checkpoint is corrupt or forged"
            )
        group = groups[file.job_id, file.uid, file.table, file.table_uuid]
        group.append(file)
        if file.key != group[0].key:
            raise StorageError("IcebergSink: one sink's files have several keys; the checkpoint is corrupt or forged")
    return groups
