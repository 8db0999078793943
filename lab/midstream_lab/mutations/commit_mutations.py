"""Known bugs of the commit protocol: what sinks have prepared, who makes it visible and when; see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from midstream.engine.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from midstream.engine.coordinator.checkpoints import driver_committers, metadata_builder
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.commit_queue import CommitQueue
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.core.interfaces import Done
from midstream.engine.operators.base import Snapshot, SnapshotResult
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.worker.task_snapshots import TaskSnapshots
from midstream.simulation.faults import Fault
from midstream_lab.mutations.mutation import Mutation, Replacements, named, owner_of
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import committing, outcome_unknown


def unknown_outcome_is_aborted() -> Replacements:
    """What was prepared for a checkpoint whose outcome is unknown is thrown away."""

    def take_to_abort(self: Any) -> Any:
        known, self._uncertain_id = self._uncertain_id, 0
        taken = original(self)
        self._uncertain_id = known
        return taken

    original = CheckpointCoordinator.take_to_abort
    return [(CheckpointCoordinator, "take_to_abort", take_to_abort)]


def failed_is_aborted_at_once() -> Replacements:
    """What was prepared for a checkpoint that fails is thrown away, though it is reported again with the next one."""

    def abort(self: Any, pending: Any, *arguments: Any, **more: Any) -> None:
        owner = owner_of(self)
        owner.commits.add_aborts(metadata_builder.committables_of(pending.acks, self._names, self._newest_id))
        original(self, pending, *arguments, **more)

    original = CheckpointCoordinator._abort
    return [(CheckpointCoordinator, "_abort", abort)]


def earlier_under_the_new_id() -> Replacements:
    """What is reported again is committed for the checkpoint that it is reported with."""

    def committables_of(acks: Any, names: Any, newest_completed: int) -> Any:
        items = []
        for ref, ack in acks.items():
            for op in ack.operators:
                for earlier in (e for e in op.earlier if e.checkpoint_id > newest_completed):
                    items.append((ack.checkpoint_id, ref, op.uid, earlier.committables))
                items.append((ack.checkpoint_id, ref, op.uid, op.committables))
        return metadata_builder.merged(items, names)

    return [(checkpoints, "committables_of", committables_of)]


def earlier_is_committed_again() -> Replacements:
    """What is reported again and has been committed meanwhile is committed once more, for the new checkpoint."""

    def committables_of(acks: Any, names: Any, newest_completed: int) -> Any:
        items = []
        for ref, ack in acks.items():
            for op in ack.operators:
                items += [(ack.checkpoint_id, ref, op.uid, e.committables) for e in op.earlier]
                items.append((ack.checkpoint_id, ref, op.uid, op.committables))
        return metadata_builder.merged(items, names)

    return [(checkpoints, "committables_of", committables_of)]


def older_is_committed_last() -> Replacements:
    """Of what was prepared for several checkpoints, the newest is committed first."""

    def committables_of(*arguments: Any) -> Any:
        return tuple(reversed(original(*arguments)))

    original = metadata_builder.committables_of
    return [(checkpoints, "committables_of", committables_of)]


def output_of_finished_is_forgotten() -> Replacements:
    """A restart does not commit what operators have prepared that had finished."""

    def opened(self: Any, outcome: Any) -> None:
        if isinstance(outcome, Done) and outcome.value.opened.restore is not None:
            found, restore = outcome.value, outcome.value.opened.restore
            finished = {op.uid for op in restore.operators if op.fully_finished}
            kept = tuple(c for c in restore.committables if c.uid not in finished)
            restore = msgspec.structs.replace(restore, committables=kept)
            outcome = Done(replace(found, opened=replace(found.opened, restore=restore)))
        original(self, outcome)

    original = Coordinator._opened
    return [(Coordinator, "_opened", opened)]


def uncommitted_is_left_out() -> Replacements:
    """A checkpoint does not hold what was prepared for earlier ones and is not committed yet."""
    return [(CommitQueue, "uncommitted", ())]


def failed_commit_counts() -> Replacements:
    """A commit that has failed counts as done."""

    def committed(self: Any, what: Any, outcome: Any) -> None:
        original(self, what, Done(None))

    original = CommitQueue._committed
    return [(CommitQueue, "_committed", committed)]


def given_up_after_failures() -> Replacements:
    """What could not be committed when all tries were used up is dropped when the job continues."""

    def retry_stalled(self: Any) -> None:
        self._commits.popleft()
        original(self)

    original = CommitQueue.retry_stalled
    return [(CommitQueue, "retry_stalled", retry_stalled)]


def ended_before_committed() -> Replacements:
    """The job ends, or stops, with the commit that is under way; later commits are dropped."""

    def run_on(self: Any) -> bool:
        stop = self.requests.stop
        if self.attempt.all_finished or (stop is not None and stop.is_stored):
            while len(self.commits._commits) > 1:
                self.commits._commits.pop()
        return original(self)

    original = Coordinator._step_running
    return [(Coordinator, "_step_running", run_on)]


def finished_is_not_asked() -> Replacements:
    """What a sink prepares in its last snapshot is left out of the acknowledgement."""

    def acknowledge(self: Any, checkpoint_id: int, taken: Any, stored: Any, in_flight: Any) -> None:
        if taken.finished and checkpoint_id % 2:
            stored = replace(stored, committables=())
        original(self, checkpoint_id, taken, stored, in_flight)

    original = TaskSnapshots._acknowledge
    return [(TaskSnapshots, "_acknowledge", acknowledge)]


def confirmed_with_the_next() -> Replacements:
    """That a checkpoint has completed clears what was prepared for the one after it as well."""

    def completed(self: Any, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        for stored in [known for known in self._unconfirmed if known == checkpoint_id + 1]:
            self._unconfirmed[stored] = replace(self._unconfirmed[stored], committables=())

    original = TaskSnapshots.completed
    return [(TaskSnapshots, "completed", completed)]


def prepared_late() -> Replacements:
    """A sink prepares what it has when the snapshot is stored, not when it is taken."""

    def snapshot(self: Any, checkpoint_id: int) -> Any:
        writer = self._open_writer

        def later() -> Any:
            store = writer.prepare(checkpoint_id)
            return SnapshotResult(committables=() if store is None else tuple(store()))

        return Snapshot(later=later)

    return [(SinkOperator, "snapshot", snapshot)]


def abort_follows_the_restart() -> Replacements:
    """What an attempt has prepared stays on the list of what must be deleted."""

    def take_to_abort(self: Any) -> Any:
        unsettled = dict(self._prepared)
        taken = original(self)
        self._prepared.update(unsettled)
        return taken

    original = CheckpointCoordinator.take_to_abort
    return [(CheckpointCoordinator, "take_to_abort", take_to_abort)]


def settled_stays_unsettled() -> Replacements:
    """What a completed checkpoint holds is thrown away when the attempt ends."""

    def published(self: Any, *arguments: Any) -> None:
        unsettled = dict(self._prepared)
        original(self, *arguments)
        self._prepared = unsettled

    original = CheckpointCoordinator._published
    return [(CheckpointCoordinator, "_published", published)]


def zombie_driver_commits() -> Replacements:
    """A driver that was considered dead continues to commit, although another one has taken over."""
    return [(driver_committers, "check_epoch", lambda storage, epoch: None)]


# ---- where they are searched


def _out_of_tries(seed: int) -> Scenario:
    """The sinks' target does not answer for longer than a commit is tried."""
    drawn = committing("commit_fails")(seed)
    return replace(drawn, faults=tuple(replace(fault, step=150, victim=2) for fault in drawn.faults))


def _at_the_end(seed: int) -> Scenario:
    """The only checkpoint is the last one, and the driver dies when it is complete."""
    drawn = committing("crash_at_publish")(seed)
    crash = Fault(50, "crash_at_publish", 1 + 15 * (seed % 97))
    return replace(drawn, interval_s=20.0, faults=(crash,))


def _confirmed_late(seed: int) -> Scenario:
    """A barrier overtakes the message that the checkpoint before has completed, and its own checkpoint fails."""
    drawn = draw(seed, topology="pipeline", parallelism=3, faults=(), rows=200)
    faults = tuple(Fault(100 + 60 * i + seed * 37 % 60, "publish_fails", 2 * i) for i in range(12))
    tempo = replace(drawn.tempo, mail_us=5, control_us=5000, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.0005, min_pause_s=0.0, aligned_timeout_s=0.0)
    return replace(drawn, timeout_s=60.0, batch_rows=1, row_us=0, retained=1, rounds=1)


_struck = committing("kill_slot", "kill_driver", "write_fails")
_failing = committing("commit_fails", "kill_slot")
_refused = committing("write_fails", "publish_fails")
_stopped = committing("stop_driver")

MUTATIONS: Final = named(
    Mutation("output of a checkpoint of unknown outcome is thrown away", unknown_outcome_is_aborted, outcome_unknown),
    Mutation("output is thrown away and committed with the next checkpoint", failed_is_aborted_at_once, _refused),
    Mutation("output is committed for another checkpoint", earlier_under_the_new_id, _refused),
    Mutation("output is committed for two checkpoints", earlier_is_committed_again, _refused),
    Mutation("newer output is committed before older", older_is_committed_last, _refused),
    Mutation(
        "a restart forgets the output of operators that had finished", output_of_finished_is_forgotten, _at_the_end
    ),
    Mutation("what is not committed yet is not in the next checkpoint", uncommitted_is_left_out, _struck),
    Mutation("a commit that fails counts as done", failed_commit_counts, _failing),
    Mutation("what could not be committed is dropped", given_up_after_failures, _out_of_tries),
    Mutation("a job ends before its output is committed", ended_before_committed, _struck),
    Mutation("the last output of a sink is left out", finished_is_not_asked, _struck),
    Mutation(
        "output of the checkpoint after the completed one is forgotten", confirmed_with_the_next, targeted.undisturbed
    ),
    Mutation("a sink prepares rows from after the barrier", prepared_late, _struck),
    Mutation("output of an attempt is thrown away again and again", abort_follows_the_restart, _struck),
    Mutation("a driver commits although another one has taken over", zombie_driver_commits, _stopped),
    Mutation("committed output is thrown away", settled_stays_unsettled, _struck),
)
