"""Known bugs of the project's own sinks, which write to real targets; see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final

from pyiceberg.exceptions import CommitStateUnknownException

from midstream.connectors.common.filesystem import names_in
from midstream.connectors.delta import delta_sink
from midstream.connectors.delta.delta_compaction import _CompactedFiles
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.files import keyed_files
from midstream.connectors.files.file_sink import _FileCommitter, _FilesPart, _OutputDirectory
from midstream.connectors.files.rollback import CommittedFiles
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable
from midstream.connectors.iceberg.iceberg_commits import SnapshotCommit
from midstream.connectors.iceberg.iceberg_rewrites import RewrittenFiles
from midstream_lab.fault_kinds import COMMIT_FROZEN, ROLLBACK_FROZEN
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.targeted_targets import committing_to


def delta_mark_is_not_read() -> Replacements:
    """A commit to a Delta table does not look for the checkpoint's mark before."""
    return [(delta_sink, "_committed", lambda table, application: (-1, False))]


def iceberg_mark_is_not_read() -> Replacements:
    """A commit to an Iceberg table does not look for the checkpoint's mark before."""
    return [(CatalogTable, "mark", lambda self, table, app: None)]


def delta_rollback_only_marks() -> Replacements:
    """A rollback of a Delta table marks the jobs, and leaves the newer versions."""
    return [(DeltaSink, "_version_before", lambda self, table, output, after: table.version())]


def iceberg_rollback_only_marks() -> Replacements:
    """A rollback of an Iceberg table marks the jobs, and leaves the newer snapshots."""

    def replace(self: Any, files: Any, is_removed: Any, properties: Any, summary: Any) -> None:
        self.append(files, properties, summary)

    def set_back(self: Any, parent: Any, properties: Any, summary: Any) -> None:
        self.append((), properties, summary)

    return [(SnapshotCommit, "replace", replace), (SnapshotCommit, "set_back", set_back)]


def delta_predecessor_may_commit() -> Replacements:
    """A rollback of a Delta table does not keep the jobs from further commits."""
    original = delta_sink._committed
    return [(delta_sink, "_committed", lambda table, application: (original(table, application)[0], False))]


def iceberg_predecessor_may_commit() -> Replacements:
    """A rollback of an Iceberg table does not keep the jobs from further commits."""

    def rollback(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        return found._replace(ended={app: mark._replace(is_superseded=False) for app, mark in found.ended.items()})

    original = CatalogTable.rollback
    return [(CatalogTable, "rollback", rollback)]


def first_row_of_a_key_remains() -> Replacements:
    """Of several rows with one key in a checkpoint, an earlier one is merged."""

    def last_rows(keys: Any) -> Any:
        names = [f"k{i}" for i in range(keys.width)]
        first = (
            keys.rename(dict(zip(keys.columns, names, strict=True))).with_row_index("row").unique(names, keep="first")
        )
        return first.sort("row").get_column("row").to_numpy()

    return [(keyed_files, "_last_rows", last_rows)]


def unconfirmed_files_are_deleted() -> Replacements:
    """The first commit of an attempt deletes what other subtasks of it have written for the next checkpoint."""

    def delete_pending(self: Any, folder: str, before_attempt: int | None) -> None:
        original(self, folder, None)

    original = _OutputDirectory.delete_pending
    return [(_OutputDirectory, "delete_pending", delete_pending)]


def files_have_no_attempt() -> Replacements:
    """The names of committed files do not depend on the attempt that wrote them."""

    def committable(self: Any, file: Any, checkpoint_id: int) -> Any:
        made = original(self, file, checkpoint_id)
        name = f"part-{self._context.subtask:06d}-0000-0000-{0:016x}.{self._sink.format}"
        return type(made)(made.job_id, made.attempt, made.pending, name, made.size, made.rows, made.place)

    original = _FilesPart._committable
    return [(_FilesPart, "_committable", committable)]


def files_must_be_pending() -> Replacements:
    """A repeated commit does not find the files that were moved before."""
    return [(_OutputDirectory, "final", lambda self, file: f"{self.hidden}/nowhere")]


def rollback_leaves_pending_files() -> Replacements:
    """A rollback deletes committed files, and leaves pending ones to a driver that is still in its commit."""

    def roll_back(self: Any, after: int, kept: Any) -> None:
        folders = [(job, f"{self._above}/{job}") for job in self._jobs]
        names = (f"{self._folder}/{job}/{name}" for job, path in folders for name in names_in(self._filesystem, path))
        original(self, after, {*kept, *names})

    original = CommittedFiles.roll_back
    return [(CommittedFiles, "roll_back", roll_back)]


def files_of_later_jobs_are_swept() -> Replacements:
    """The first commit of an attempt deletes the pending files of all other jobs, also of later ones."""

    def sweep(self: Any, files: Any) -> None:
        above = f"{self._own.hidden}/{files[0].pending.partition('/')[0]}"
        self._earlier = [job for job in names_in(self._own.filesystem, above) if job != self._job_id]
        original(self, files)

    original = _FileCommitter._sweep
    return [(_FileCommitter, "_sweep", sweep)]


def files_of_later_jobs_are_rolled_back() -> Replacements:
    """A rollback deletes all newer files of the directory."""
    return [(CommittedFiles, "_files", CommittedFiles._all_files)]


def rollback_leaves_files() -> Replacements:
    """A rollback leaves the newest committed files."""

    def files(self: Any, after: int) -> Any:
        found = original(self, after)
        newest = max((number for number, _ in found), default=0)
        return [each for each in found if each[0] < newest]

    original = CommittedFiles._files
    return [(CommittedFiles, "_files", files)]


class _AlwaysThere(frozenset[Any]):
    """Files that seem to be in any set of files."""

    def __le__(self, other: object) -> bool:
        return True


def files_that_changed_are_compacted() -> Replacements:
    """A compaction of a Delta table does not look whether the files that it replaces are still in the table."""

    def made(self: Any, *given: Any) -> None:
        original(self, *given)
        self.old = _AlwaysThere(self.old)

    original = _CompactedFiles.__init__
    return [(_CompactedFiles, "__init__", made)]


def compaction_forgets_a_file() -> Replacements:
    """A compaction of a Delta table writes the rows of all files but the newest."""

    def made(self: Any, sink: Any, table: Any, chosen: Any, *given: Any) -> None:
        original(self, sink, table, chosen[:-1], *given)
        self.old = frozenset(chosen)

    original = _CompactedFiles.__init__
    return [(_CompactedFiles, "__init__", made)]


def rollback_stops_at_compactions() -> Replacements:
    """A rollback of a Delta table takes a compaction for a change by another writer."""
    return [(delta_sink, "changes_no_rows", lambda actions: False)]


def files_of_unanswered_commits_are_deleted() -> Replacements:
    """The new files of a commit to an Iceberg table are deleted if no answer comes, though it may have succeeded."""

    def send(self: Any, table: Any, snapshot: Any, new: Any, *given: Any, **named: Any) -> None:
        try:
            original(self, table, snapshot, new, *given, **named)
        except CommitStateUnknownException:
            filesystem, directory = self._there.data_directory(table)
            self._delete(filesystem, [f"{directory}/{file.name}" for file in new])
            raise

    original = RewrittenFiles._send
    return [(RewrittenFiles, "_send", send)]


_DELTA: Final = committing_to("delta", "delta partitioned", "delta evolving")
_ICEBERG: Final = committing_to("iceberg", "iceberg partitioned", "iceberg evolving")
_FILES: Final = committing_to("parquet", "jsonl")
_STOPPED: Final = (COMMIT_FROZEN, COMMIT_FROZEN, "stop_driver")
_FROZEN: Final = committing_to("parquet", "jsonl", strikes=_STOPPED)
_DELTA_FROZEN: Final = committing_to("delta", "delta partitioned", "delta evolving", strikes=_STOPPED)
_ROLLING_BACK: Final = committing_to("parquet", "jsonl", strikes=("go_back", "go_back", ROLLBACK_FROZEN))
_COMPACTING: Final = committing_to("delta compacting", "delta keyed compacting")

MUTATIONS: Final = named(
    Mutation("a Delta table gets a checkpoint's rows twice", delta_mark_is_not_read, _DELTA),
    Mutation("an Iceberg table gets a checkpoint's rows twice", iceberg_mark_is_not_read, _ICEBERG),
    Mutation("rows that were rolled back remain in a Delta table", delta_rollback_only_marks, _DELTA),
    Mutation("rows that were rolled back remain in an Iceberg table", iceberg_rollback_only_marks, _ICEBERG),
    Mutation("a job that was rolled back commits to a Delta table", delta_predecessor_may_commit, _DELTA_FROZEN),
    Mutation("a job that was rolled back commits to an Iceberg table", iceberg_predecessor_may_commit, _ICEBERG),
    Mutation(
        "an earlier row of a key remains", first_row_of_a_key_remains, committing_to("delta keyed", "iceberg keyed")
    ),
    Mutation("pending files of the running attempt are deleted", unconfirmed_files_are_deleted, _FILES),
    Mutation("files of two attempts have one name", files_have_no_attempt, _FILES),
    Mutation("a repeated commit does not find its files", files_must_be_pending, _FILES),
    Mutation("pending files of a later job are deleted", files_of_later_jobs_are_swept, _FROZEN),
    Mutation("files of a later job are rolled back", files_of_later_jobs_are_rolled_back, _ROLLING_BACK),
    Mutation("a rollback leaves pending files", rollback_leaves_pending_files, _FROZEN),
    Mutation("a rollback leaves committed files", rollback_leaves_files, _FILES),
    Mutation("a compaction brings rows back", files_that_changed_are_compacted, _COMPACTING),
    Mutation("a compaction loses rows", compaction_forgets_a_file, _COMPACTING),
    Mutation("a table that was compacted cannot be rolled back", rollback_stops_at_compactions, _COMPACTING),
    Mutation(
        "files of a commit without an answer are deleted",
        files_of_unanswered_commits_are_deleted,
        committing_to("iceberg keyed", "iceberg compacting", "iceberg keyed compacting", strikes=("commit_fails",)),
    ),
)
