"""Known bugs of what is on the disk and of rewinding, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from midstream.engine.checkpoint import store
from midstream.engine.checkpoint.directory_records import FromFile, OwnerFile, sealed
from midstream.engine.checkpoint.metadata import CheckpointMetadata, encode_metadata
from midstream.engine.checkpoint.store import ClaimedDirectory, ListedCheckpoint, RetainedCheckpoint
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from midstream.engine.coordinator.checkpoints import cleanup
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.cleanup import CheckpointCleanup
from midstream.engine.coordinator.restore import newer_output, open_directory
from midstream.engine.coordinator.restore.newer_output import Decision, SinkAhead
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import CheckpointAck
from midstream.engine.worker.task_snapshots import StoredInFlight, TaskSnapshots
from midstream.simulation.faults import Fault
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted import hanging
from midstream_lab.scenarios.targeted_at_rest import (
    back_behind_a_commit,
    back_to_pending_keeping,
    back_to_the_deleted,
    deleted_again,
    frozen,
    given_up_and_frozen,
    going_back_and_forth,
)

# ---- in which they show ----


def left_behind(seed: int) -> Scenario:
    """Slots die, checkpoints fail, files are large enough to be files."""
    kinds = ("kill_slot", "write_fails", "publish_fails", "storage_lies", "kill_driver")
    drawn = draw(4 * seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=kinds, rows=100)
    faults = tuple(Fault(80 + 90 * i + seed * 37 % 90, kinds[(seed + i) % 5], seed * 31 + i) for i in range(5))
    return replace(
        drawn, interval_s=0.002, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003, retained=2, faults=faults
    )


def long_in_flight(seed: int) -> Scenario:
    """Connections are so slow that barriers come long after each other: what comes in between is stored bit by bit."""
    drawn = draw(4 * seed, topology="keyed", parallelism=3, rows=100, faults=())
    return replace(
        drawn,
        tempo=replace(drawn.tempo, data_us=600_000, io_us=100, clock_tick_us=0, interleave=0.0),
        interval_s=0.02,
        min_pause_s=0.0,
        timeout_s=60.0,
        aligned_timeout_s=0.0,
        batch_rows=1,
        row_us=4000,
        text_bytes=10,
        sink_rows=0,
        pool_buffers=1024,
        queue_time_s=None,
    )


# ---- bugs ----


def epoch_checked_before() -> Replacements:
    """Check the epoch only before the write: a driver that is frozen then reports its checkpoint as complete."""

    def publish(storage: Storage, metadata: CheckpointMetadata) -> str:
        store.check_epoch(storage, metadata.epoch)
        path = store.checkpoint_path(metadata.checkpoint_id)
        owner = f"{path}/_owner"
        if not storage.create(owner, sealed(owner, OwnerFile(metadata.epoch)), durable=False):
            raise StorageError(f"{path} exists already")
        storage.write(store.metadata_path(metadata.checkpoint_id), [encode_metadata(metadata)])
        return path

    return [(checkpoints, "publish", publish)]


def superseded_is_offered() -> Replacements:
    return [(store, "_superseded", lambda *_: False)]


def older_than_the_newest_counts() -> Replacements:
    """Metadata that was given up, and is written when another driver has taken over, counts if it is not the newest."""

    def superseded(made_by: int, checkpoint_id: int, starts: Mapping[int, FromFile]) -> bool:
        return any(epoch > made_by and checkpoint_id > start.newest for epoch, start in starts.items())

    return [(store, "_superseded", superseded)]


def marks_are_not_looked_at() -> Replacements:
    """A start rewinds to a checkpoint that the driver before it is about to delete."""
    return [(store, "_is_being_deleted", lambda *_: False)]


def epoch_checked_before_the_mark() -> Replacements:
    """A driver that is frozen before it marks a checkpoint deletes it when another driver has gone back to it."""
    original = store.drop

    def drop(storage: Storage, epoch: int, checkpoints: Iterable[int], files: Iterable[str]) -> None:
        original(_CheckedOnce(storage), epoch, checkpoints, files)

    return [(cleanup, "drop", drop)]


class _CheckedOnce:
    """A storage that shows no epoch that is newer than those of the first read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._epochs: list[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def list(self, path: str) -> Any:
        if path != "epochs":
            return self._storage.list(path)
        if self._epochs is None:
            self._epochs = self._storage.list(path)
        return self._epochs


def attempts_leak() -> Replacements:
    """What earlier attempts have left is never deleted."""
    return [(CheckpointCleanup, "drop_attempts_before", lambda *_: None)]


def epochs_leak() -> Replacements:
    """What drivers that have died have left is never deleted."""
    return [(store, "clean_up", lambda *_: ())]


def deleted_later() -> Replacements:
    """What could not be deleted is not tried again immediately."""
    original = CheckpointCleanup._done

    def done(self: Any, *arguments: Any) -> None:
        self._has_failed = True
        original(self, *arguments)

    return [(CheckpointCleanup, "_done", done)]


def aborted_leak() -> Replacements:
    """Files that were written for a checkpoint that fails stay."""
    original = CheckpointCoordinator._abort

    def abort(self: Any, pending: Any, reason: str, *, counts: bool, retry: bool, delete: bool = True) -> None:
        original(self, pending, reason, counts=counts, retry=retry, delete=False)

    return [(CheckpointCoordinator, "_abort", abort)]


def late_files_leak() -> Replacements:
    """The files of an acknowledgement that arrives when its checkpoint has failed stay."""
    original = CheckpointCoordinator.acknowledge

    def acknowledge(self: Any, slot: int, ack: CheckpointAck, attempt: Any) -> None:
        pending = self.pending
        is_late = pending is None or pending.checkpoint_id != ack.checkpoint_id
        original(self, slot, msgspec.structs.replace(ack, files=()) if is_late else ack, attempt)

    return [(CheckpointCoordinator, "acknowledge", acknowledge)]


def declined_leak() -> Replacements:
    """A task that declines does not report which files it has written."""
    original = TaskSnapshots.decline

    def decline(self: Any, checkpoint_id: int, reason: str, counts: bool, files: tuple[str, ...] = ()) -> None:
        original(self, checkpoint_id, reason, counts)

    return [(TaskSnapshots, "decline", decline)]


def earlier_flushes_left_out() -> Replacements:
    """An acknowledgement names the last file of rows in flight only."""

    def with_more(self: StoredInFlight, more: StoredInFlight) -> StoredInFlight:
        return StoredInFlight(
            self.channels + more.channels,
            more.files,
            self.state_bytes + more.state_bytes,
            self.inline_bytes + more.inline_bytes,
            self.error or more.error,
        )

    return [(StoredInFlight, "with_more", with_more)]


def retained_loses_files() -> Replacements:
    """With a checkpoint go the files that the older of those that are kept refer to."""

    def split_retained(
        retained: tuple[RetainedCheckpoint, ...], keep: int, in_use: Collection[str] = ()
    ) -> tuple[tuple[RetainedCheckpoint, ...], tuple[RetainedCheckpoint, ...], frozenset[str]]:
        kept, dropped, _ = store.split_retained(retained, keep, in_use)
        referenced = frozenset(in_use).union(*(r.files for r in kept[-1:]))
        return kept, dropped, frozenset().union(*(r.files for r in (*dropped, *kept))) - referenced

    return [(checkpoints, "split_retained", split_retained)]


def one_too_many() -> Replacements:
    """One more checkpoint is kept than there should be."""
    original = store.split_retained
    return [(checkpoints, "split_retained", lambda retained, keep, in_use=(): original(retained, keep + 1, in_use))]


def id_is_reused() -> Replacements:
    """Ids begin after the newest checkpoint that is complete."""

    def next_checkpoint_id(storage: Storage, newest_seen: int) -> int:
        return max((entry.checkpoint_id for entry in store.list_checkpoints(storage)), default=0) + 1

    return [
        (store, "next_checkpoint_id", next_checkpoint_id),
        (open_directory, "next_checkpoint_id", next_checkpoint_id),
    ]


def goes_back_without_a_word() -> Replacements:
    """A start does not check whether there is output that is newer than its checkpoint."""
    return [(newer_output, "_newer", lambda *_: ())]


def rolls_back_too_much() -> Replacements:
    """Sinks also roll back what belongs to the checkpoint from which the job starts."""
    return [(newer_output, "roll_back", _rolling_back(-1)), (open_directory, "roll_back", _rolling_back(-1))]


def rolls_back_too_little() -> Replacements:
    """Sinks do not roll back what belongs to the checkpoint right after it."""
    return [(newer_output, "roll_back", _rolling_back(1)), (open_directory, "roll_back", _rolling_back(1))]


def _rolling_back(more: int) -> Callable[..., None]:
    original = newer_output.roll_back

    def roll_back(decision: Any, metadata: CheckpointMetadata) -> None:
        original(replace(decision, after=decision.after + more), metadata)

    return roll_back


def commits_under_way_are_overlooked() -> Replacements:
    """What newer checkpoints hold for sinks counts as newer output only once it is committed."""
    original = newer_output._newer

    def newer(*arguments: Any) -> Iterator[SinkAhead]:
        return (found for found in original(*arguments) if found.doubt != newer_output.UNDER_WAY)

    return [(newer_output, "_newer", newer)]


def rolling_back_is_not_written_down() -> Replacements:
    """A start after one that was killed before its sinks rolled anything back does not stop commits that are under way."""
    original = store.record_start

    def record_start(storage: Storage, taken: ClaimedDirectory, **named: Any) -> ClaimedDirectory:
        return original(storage, taken, **{**named, "rolls_back": False})

    return [(open_directory, "record_start", record_start)]


def newer_ones_still_count() -> Replacements:
    """What a rewind has dropped is offered again when the driver dies before it has completed a checkpoint."""
    original = store.record_start

    def record_start(storage: Storage, taken: ClaimedDirectory, **named: Any) -> ClaimedDirectory:
        return original(storage, taken, **{**named, "giving_up_after": None})

    return [(open_directory, "record_start", record_start)]


def newer_ones_count_beside_pending_output() -> Replacements:
    """So is what a rewind has dropped although what the job rewinds to may be committed only now, and newer output is
    kept, or there is none.
    """
    original = newer_output.decide

    def decide(*arguments: Any) -> Decision:
        found = original(*arguments)
        return found if found.rolls_back else replace(found, counts_until=None)

    return [(open_directory, "decide", decide)]


def goes_back_to_the_newest() -> Replacements:
    """A job starts from the newest checkpoint, whatever number is given."""

    def choose(listed: Collection[ListedCheckpoint], which: str, *rest: Any) -> CheckpointMetadata | None:
        return store.choose(listed, "latest", *rest)

    return [(open_directory, "choose", choose)]


def fresh_is_not_written_down() -> Replacements:
    """A start from latest after a fresh start resumes from a checkpoint before that."""
    original = store.record_start

    def record_start(storage: Storage, taken: ClaimedDirectory, **named: Any) -> ClaimedDirectory:
        return original(storage, taken, **{**named, "fresh": False})

    return [(open_directory, "record_start", record_start)]


def where_it_went_back_is_not_written_down() -> Replacements:
    """A start from latest, after one that went back has completed nothing, resumes from a checkpoint that was left."""
    original = store.record_start

    def record_start(storage: Storage, taken: ClaimedDirectory, **named: Any) -> ClaimedDirectory:
        return original(storage, taken, **{**named, "source": None})

    return [(open_directory, "record_start", record_start)]


def uncertain_is_aborted() -> Replacements:
    """What was prepared for a checkpoint of unknown outcome is cleaned up."""
    original = CheckpointCoordinator.take_to_abort

    def take_to_abort(self: Any) -> Any:
        before, self._uncertain_id = self._uncertain_id, 0
        try:
            return original(self)
        finally:
            self._uncertain_id = before

    return [(CheckpointCoordinator, "take_to_abort", take_to_abort)]


_Bug = tuple[str, Callable[[], Replacements], Callable[[int], Scenario]]
MUTATIONS: Final = named(
    Mutation("the epoch is checked only before metadata is written", epoch_checked_before, frozen),
    Mutation("a superseded checkpoint is offered", superseded_is_offered, frozen),
    Mutation(
        "metadata that is written late counts if it is not the newest",
        older_than_the_newest_counts,
        given_up_and_frozen,
    ),
    Mutation("a job rewinds to a checkpoint that is being deleted", marks_are_not_looked_at, back_to_the_deleted),
    Mutation(
        "the epoch is checked only before a checkpoint is marked", epoch_checked_before_the_mark, back_to_the_deleted
    ),
    Mutation("files of dead attempts are not deleted", attempts_leak, left_behind),
    Mutation("files of dead drivers are not deleted", epochs_leak, left_behind),
    Mutation("files of checkpoints that fail are not deleted", aborted_leak, left_behind),
    Mutation("files that are acknowledged late are not deleted", late_files_leak, left_behind),
    Mutation("files of tasks that decline are not deleted", declined_leak, left_behind),
    Mutation("files of earlier flushes are left out of an acknowledgement", earlier_flushes_left_out, long_in_flight),
    Mutation("output of a checkpoint of unknown outcome is cleaned up", uncertain_is_aborted, hanging),
    Mutation("a retained checkpoint loses files", retained_loses_files, left_behind),
    Mutation("one checkpoint too many is kept", one_too_many, left_behind),
    Mutation("ids of checkpoints are used again", id_is_reused, going_back_and_forth),
    Mutation("a job rewinds without checking for newer output", goes_back_without_a_word, going_back_and_forth),
    Mutation("what cannot be deleted waits for the next pass", deleted_later, deleted_again),
    Mutation("sinks roll back too much", rolls_back_too_much, going_back_and_forth),
    Mutation("sinks roll back too little", rolls_back_too_little, going_back_and_forth),
    Mutation(
        "a job rewinds to before output that is being committed, and does not stop that",
        commits_under_way_are_overlooked,
        back_behind_a_commit,
    ),
    Mutation(
        "a start that was killed before sinks took anything back is forgotten",
        rolling_back_is_not_written_down,
        back_behind_a_commit,
    ),
    Mutation("what a rewind has dropped still counts", newer_ones_still_count, going_back_and_forth),
    Mutation(
        "what a rewind has dropped still counts if output is pending",
        newer_ones_count_beside_pending_output,
        back_to_pending_keeping,
    ),
    Mutation(
        "a job resumes from the newest checkpoint, whatever is given", goes_back_to_the_newest, going_back_and_forth
    ),
    Mutation("that a job was started over is not written down", fresh_is_not_written_down, going_back_and_forth),
    Mutation(
        "the checkpoint from which a start resumes is not written down",
        where_it_went_back_is_not_written_down,
        going_back_and_forth,
    ),
)
