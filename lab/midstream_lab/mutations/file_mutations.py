"""Known bugs of the checkpoint directory: which coordinator may write, what is kept and deleted; see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from midstream.engine.checkpoint import store
from midstream.engine.checkpoint.directory_records import FromFile, OwnerFile, sealed
from midstream.engine.checkpoint.metadata import encode_metadata
from midstream.engine.checkpoint.store import split_retained
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.cleanup import CheckpointCleanup
from midstream.engine.coordinator.restore import open_directory
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.worker.task_snapshots import StoredInFlight, TaskSnapshots
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import HANGS
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.mutations.on_disk_mutations import left_behind
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import frozen


def _nothing(*_: Any) -> None:
    pass


# ---- publishing


def _publishing(work: Callable[[Storage, Any], str]) -> Replacements:
    return [(checkpoints, "publish", work), (open_directory, "publish", work)]


def _claim(storage: Storage, metadata: Any) -> str:
    """Return the path of the checkpoint, which no other coordinator creates."""
    path = store.checkpoint_path(metadata.checkpoint_id)
    owner = f"{path}/_owner"
    if not storage.create(owner, sealed(owner, OwnerFile(metadata.epoch)), durable=False):
        raise StorageError(f"{path} exists already, though it is not in the list of checkpoints")
    return path


def _write(storage: Storage, metadata: Any, path: str) -> None:
    try:
        storage.write(store.metadata_path(metadata.checkpoint_id), [encode_metadata(metadata)])
    except StorageError:
        storage.delete(path)
        raise


def owner_is_not_claimed() -> Replacements:
    """A coordinator writes a checkpoint even if another one has claimed its id."""

    def publish(storage: Storage, metadata: Any) -> str:
        store.check_epoch(storage, metadata.epoch)
        path = store.checkpoint_path(metadata.checkpoint_id)
        _write(storage, metadata, path)
        store.check_epoch(storage, metadata.epoch)
        return path

    return _publishing(publish)


def failed_write_is_left() -> Replacements:
    """Metadata whose writing was reported as failed is not deleted."""

    class NeverDeletes:
        def __init__(self, storage: Storage) -> None:
            self._storage = storage

        def __getattr__(self, name: str) -> Any:
            return _nothing if name == "delete" else getattr(self._storage, name)

    original = store.publish
    return _publishing(lambda storage, metadata: original(NeverDeletes(storage), metadata))


def newer_than_seen_counts() -> Replacements:
    """A coordinator that begins also counts the next checkpoint of those before it."""

    def newer_sealed(path: str, record: Any) -> bytes:
        if isinstance(record, FromFile):
            following = record.newest + 1
            counted = (*(record.counted or ()), following)
            record = msgspec.structs.replace(record, newest=following, counted=counted)
        return original(path, record)

    original = sealed
    return [(store, "sealed", newer_sealed)]


def id_after_the_complete_ones() -> Replacements:
    """The next id is the one after the newest complete checkpoint, whatever was begun."""

    def next_checkpoint_id(storage: Storage, newest_seen: int) -> int:
        complete = (n for n in store._checkpoint_ids(storage) if storage.exists(store.metadata_path(n)))
        return max([0, newest_seen, *complete]) + 1

    return [
        (store, "next_checkpoint_id", next_checkpoint_id),
        (open_directory, "next_checkpoint_id", next_checkpoint_id),
    ]


def ids_in_the_order_of_text() -> Replacements:
    """The newest checkpoint is the one whose name comes last: chk-9, not chk-10."""

    def choose(listed: Any, which: str, *rest: Any) -> Any:
        if which == "latest":
            by_name = sorted(listed, key=lambda entry: str(entry.checkpoint_id))
            listed = by_name[-1:]
        return original(listed, which, *rest)

    original = store.choose
    return [(store, "choose", choose), (open_directory, "choose", choose)]


# ---- what is kept


def one_too_many_is_kept() -> Replacements:
    """One more checkpoint is kept than was configured."""
    return [(checkpoints, "split_retained", lambda retained, keep, in_use: split_retained(retained, keep + 1, in_use))]


def one_too_few_is_kept() -> Replacements:
    """Of several checkpoints that must be kept the oldest goes."""

    def one_less(retained: Any, keep: int, in_use: Any) -> Any:
        return split_retained(retained, max(1, keep - 1), in_use)

    return [(checkpoints, "split_retained", one_less)]


def files_of_the_newest_only() -> Replacements:
    """Of the checkpoints that are kept only the newest keeps its files."""

    def of_the_newest(retained: Any, keep: int, in_use: Any) -> Any:
        kept, dropped, files = split_retained(retained, keep, in_use)
        if dropped:
            older = frozenset[str]().union(*(r.files for r in kept[:-1]))
            files |= older - frozenset(in_use) - kept[-1].files
        return kept, dropped, files

    return [(checkpoints, "split_retained", of_the_newest)]


def files_that_may_be_needed_go() -> Replacements:
    """The files of a checkpoint whose outcome is unknown are not kept for it."""

    def mark_uncertain(self: Any, pending: Any) -> None:
        self._uncertain_id = pending.checkpoint_id

    return [(CheckpointCoordinator, "_mark_uncertain", mark_uncertain)]


def known_before_complete() -> Replacements:
    """A task refers to chunks of its last snapshot, whether its checkpoint has completed or not."""

    def acknowledge(self: Any, checkpoint_id: int, taken: Any, stored: Any, in_flight: Any) -> None:
        original(self, checkpoint_id, taken, stored, in_flight)
        self._stored = stored.chunks

    original = TaskSnapshots._acknowledge
    return [(TaskSnapshots, "_acknowledge", acknowledge)]


def earlier_flushes_are_left_out() -> Replacements:
    """Of the files that rows in flight were written to the acknowledgement names the last."""

    def with_more(self: Any, more: Any) -> Any:
        return replace(original(self, more), files=more.files or self.files)

    original = StoredInFlight.with_more
    return [(StoredInFlight, "with_more", with_more)]


# ---- what goes


def files_of_dead_attempts_stay() -> Replacements:
    """What attempts that have failed have written for checkpoints that never completed stays."""
    return [(CheckpointCleanup, "drop_attempts_before", _nothing)]


def files_of_earlier_starts_stay() -> Replacements:
    """What earlier starts of the job have left stays."""
    return [(store, "_drop_state_files", _only_of_this_start(store._drop_state_files))]


def _only_of_this_start(original: Callable[..., None]) -> Callable[..., None]:
    def drop_state_files(storage: Storage, epoch: int, unwanted: Callable[[Any], bool], referenced: Any) -> None:
        original(storage, epoch, lambda file: file.epoch == epoch and unwanted(file), referenced)

    return drop_state_files


def begun_checkpoints_stay() -> Replacements:
    """What is there of checkpoints that earlier starts have begun stays."""

    def delete(storage: Storage, checkpoints: Iterable[int], files: Iterable[str]) -> None:
        complete = [n for n in checkpoints if storage.exists(store.metadata_path(n))]
        original(storage, complete, files)

    original = store._delete
    return [(store, "_delete", delete)]


def files_of_failed_ones_stay() -> Replacements:
    """The files that were acknowledged for a checkpoint that fails stay."""

    def abort(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **(more | {"delete": False}))

    original = CheckpointCoordinator._abort
    return [(CheckpointCoordinator, "_abort", abort)]


def files_of_late_answers_stay() -> Replacements:
    """The files of an acknowledgement that comes when its checkpoint has failed stay."""

    def acknowledge(self: Any, slot: int, ack: Any, attempt: Any) -> None:
        pending = self.pending
        if pending is None or pending.checkpoint_id != ack.checkpoint_id:
            known, self._uncertain_id = self._uncertain_id, ack.checkpoint_id
            original(self, slot, ack, attempt)
            self._uncertain_id = known
        else:
            original(self, slot, ack, attempt)

    original = CheckpointCoordinator.acknowledge
    return [(CheckpointCoordinator, "acknowledge", acknowledge)]


def a_failed_pass_is_forgotten() -> Replacements:
    """What could not be deleted is not tried again."""

    def done(self: Any, doomed: Any, outcome: Any) -> None:
        original(self, type(doomed)(), outcome)

    original = CheckpointCleanup._done
    return [(CheckpointCleanup, "_done", done)]


# ---- where they are searched


def _failing(*kinds: str, retained: int = 3) -> Callable[[int], Scenario]:
    """Of a seed: checkpoints follow each other, and some of them fail."""

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=("keyed", "tally")[seed % 2], parallelism=2, faults=(), rows=200)
        faults = tuple(
            Fault(100 + 100 * i + seed * 37 % 100, kinds[(seed + i) % len(kinds)], seed + i)
            for i in range(5 * bool(kinds))
        )
        tempo = replace(drawn.tempo, mail_us=40, io_us=(100, 2000)[seed % 2], clock_tick_us=0)
        drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.0005, min_pause_s=0.0)
        return replace(drawn, timeout_s=60.0, retained=retained, batch_rows=3, keys=50, key_groups=16)

    return scenario


def _given_up(seed: int) -> Scenario:
    """Metadata hangs until it is given up, a slot dies, and the next attempt has a checkpoint before it is written."""
    drawn = targeted.hanging(4 * seed)  # state is in files
    hang = next(v for v in range(1_750_000 + seed * 7919 % 300_000, 1 << 22) if v % 2 and v // 2 % 3 == 0)
    faults = tuple(Fault(fault.step, fault.kind, hang if fault.kind == HANGS else 0) for fault in drawn.faults[:1])
    return replace(drawn, faults=faults, rows=200, row_us=2000, batch_rows=3, interval_s=0.01)


def _beyond_ten(seed: int) -> Scenario:
    """The driver dies when there are more than ten checkpoints."""
    drawn = _failing("kill_driver")(seed)
    faults = tuple(replace(fault, step=400 + fault.step) for fault in drawn.faults)
    return replace(drawn, faults=faults, row_us=1000, sink_rows=0, tempo=replace(drawn.tempo, io_us=100))


_quiet, _restarted = _failing(), _failing("kill_driver", "kill_slot")
_unwritten = _failing("write_fails", "publish_fails", "kill_slot")

MUTATIONS: Final = named(
    Mutation("checkpoint 9 counts as newer than 10", ids_in_the_order_of_text, _beyond_ten),
    Mutation("one checkpoint too many is kept", one_too_many_is_kept, _quiet),
    Mutation("a checkpoint of unknown outcome loses its files", files_that_may_be_needed_go, _given_up),
    Mutation("chunks of a checkpoint that failed are referred to", known_before_complete, _unwritten),
    Mutation("two coordinators write one checkpoint", owner_is_not_claimed, _quiet),
    Mutation("metadata that is there counts as not written", failed_write_is_left, targeted.lying),
    Mutation("one superseded checkpoint counts", newer_than_seen_counts, frozen),
    Mutation("the id of a checkpoint is used again", id_after_the_complete_ones, left_behind),
    Mutation("one checkpoint too few is kept", one_too_few_is_kept, _quiet),
    Mutation("older checkpoints that are kept lose files", files_of_the_newest_only, _quiet),
    Mutation("files with rows in flight are not acknowledged", earlier_flushes_are_left_out, targeted.ending_rescaled),
    Mutation("files of dead attempts leak", files_of_dead_attempts_stay, _restarted),
    Mutation("files of earlier starts leak", files_of_earlier_starts_stay, _restarted),
    Mutation("checkpoints that were begun leak", begun_checkpoints_stay, left_behind),
    Mutation("files of failed checkpoints leak", files_of_failed_ones_stay, _unwritten),
    Mutation("files of late acknowledgements leak", files_of_late_answers_stay, _unwritten),
    Mutation("files that could not be deleted leak", a_failed_pass_is_forgotten, _failing("disk_gone")),
)
