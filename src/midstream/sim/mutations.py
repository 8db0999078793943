"""Known bugs, put back on purpose: how good the simulator is at finding them.

Each mutation replaces a piece of the engine while it is applied. One that survives is a hole in the
simulator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.checkpoint import barriers, state_files, store
from midstream.coordinator import checkpoints, completing, machine
from midstream.core.elements import EndOfPartition
from midstream.exchange.channel import RemoteChannel
from midstream.exchange.gate import InputGate
from midstream.exchange.partition import Subpartition
from midstream.exchange.queue import ElementQueue
from midstream.sim import (
    commit_mutations,
    file_mutations,
    request_mutations,
    split_mutations,
    state_mutations,
    window_mutations,
)
from midstream.sim import coordination_mutations as coordination
from midstream.sim import in_flight_mutations as in_flight
from midstream.sim import mutation_scenarios as scenarios
from midstream.sim import savepoint_mutations as savepoint
from midstream.sim import table_mutations as table
from midstream.sim.run import run
from midstream.sim.scenario import Scenario, draw
from midstream.worker import snapshots, task
from midstream.worker.recovery import GateRecovery
from midstream.worker.source import SourceDriver

Replacements = list[tuple[Any, str, Any]]
STEPS_MAX: Final = 60_000
"""Of a run: one that does not come to its end has failed."""


@dataclass(frozen=True, slots=True)
class Mutation:
    what: str
    replacements: Callable[[], Replacements]
    scenario: Callable[[int], Scenario] = lambda seed: draw(seed, rows=100)
    """Of a seed: one in which the bug can show."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in MUTATIONS[name].replacements():
            stack.enter_context(patch.object(owner, attribute, value))
        yield


def killed_after(name: str, seeds_max: int, start: int = 0) -> tuple[int, str] | None:
    """How many seeds it takes until a run fails under the mutation, and how; None if `seeds_max` all pass."""
    with applied(name):
        for index in range(seeds_max):
            scenario = MUTATIONS[name].scenario(start + index)
            failures = run(replace(scenario, steps_max=min(scenario.steps_max, STEPS_MAX))).failures
            if failures:
                return index + 1, failures[0]
    return None


class Kill(msgspec.Struct, frozen=True):
    name: str
    seeds: int | None
    """How many it took; None: the mutation survived."""
    failure: str


def kill_table(names: Sequence[str], seeds_max: int, jobs: int | None = None) -> Iterator[Kill]:
    """One after the other, in the order given, found by `jobs` processes (one per core)."""
    work = partial(_kill, seeds_max)
    processes = min(jobs or os.cpu_count() or 1, len(names))
    if processes == 1:
        yield from map(work, names)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(work, names)


def _kill(seeds_max: int, name: str) -> Kill:
    killed = killed_after(name, seeds_max)
    return Kill(name, None, "") if killed is None else Kill(name, *killed)


def _skip_alignment() -> Replacements:
    def on_received(self: Any, channel: int, barrier: Any) -> list[Any]:
        if barrier.checkpoint_id <= self._last_id:
            return []
        self._last_id = barrier.checkpoint_id
        return [barriers.TakeSnapshot(barrier)]

    return [(barriers.BarrierHandler, "_on_received", on_received)]


def _end_is_no_barrier() -> Replacements:
    def on_end(self: Any, channel: int) -> list[Any]:
        self._open.discard(channel)
        return []

    return [(barriers.BarrierHandler, "_on_end", on_end)]


def _barrier_after_snapshot_rows() -> Replacements:
    """The channel that is resumed after an alignment is not looked at again."""

    def resume(self: Any, channel: int) -> None:
        self._blocked.discard(channel)

    return [(InputGate, "resume", resume)]


def _block_nothing() -> Replacements:
    return [(InputGate, "block", lambda self, channel: self._blocked.add(channel)), (InputGate, "check", _nothing)]


def _ack_before_write() -> Replacements:
    original = snapshots.TaskSnapshots.take

    def take(self: Any, checkpoint_id: int, captured: Any, storage: Any, file: str, **more: Any) -> None:
        class Lazy:
            def write(self, path: str, parts: Any) -> None:
                for _ in parts:  # its handles are known only then
                    pass

        original(self, checkpoint_id, captured, Lazy(), file, **more)  # type: ignore[arg-type]

    return [(snapshots.TaskSnapshots, "take", take)]


def _metadata_before_acks() -> Replacements:
    """The checkpoint is published when one task has not answered yet."""
    original = checkpoints.Checkpoints.acknowledge

    def acknowledge(self: Any, slot: int, ack: Any, attempt: Any) -> None:
        original(self, slot, ack, attempt)
        pending = self.pending
        if pending is not None and not pending.publishing and len(pending.missing) == 1 and len(pending.acks) > 1:
            ref = next(iter(pending.missing))
            pending.acks[ref] = msgspec.structs.replace(ack, task=ref, operators=(), files=(), finished=False)
            self._publish(pending)

    return [(checkpoints.Checkpoints, "acknowledge", acknowledge)]


def _commit_before_completion() -> Replacements:
    original = checkpoints.Checkpoints._publish

    def publish(self: Any, pending: Any) -> None:
        own = completing.committables_of(pending.acks, self._names, self._newest_id)
        owner = self._listener.completed.__self__
        owner._committing._commits.extend(type("C", (), {"what": w, "holder": pending.checkpoint_id})() for w in own)
        owner._committing._next()
        original(self, pending)

    return [(checkpoints.Checkpoints, "_publish", publish)]


def _forget_committables_on_restore() -> Replacements:
    original = machine.Coordinator._opened

    def opened(self: Any, outcome: Any) -> None:
        add = self._committing.add
        self._committing.add = lambda holder, what: add(holder, ())
        original(self, outcome)
        self._committing.add = add

    return [(machine.Coordinator, "_opened", opened)]


def _forget_earlier_committables() -> Replacements:
    def completed(self: Any, checkpoint_id: int) -> None:
        self._unconfirmed.clear()

    original = snapshots.TaskSnapshots._acknowledge

    def acknowledge(self: Any, *arguments: Any) -> None:
        self._unconfirmed.clear()
        original(self, *arguments)

    return [(snapshots.TaskSnapshots, "_acknowledge", acknowledge), (snapshots.TaskSnapshots, "completed", completed)]


def _partition_ends_before_final_checkpoint() -> Replacements:
    original = task.Task._finish

    def finish(self: Any) -> None:
        original(self)
        if self.state is task.TaskState.FINISHING:
            self._edges.broadcast(EndOfPartition())
            self._end = lambda *_: task.Task._end(self)
            self._edges.broadcast = lambda event: None

    return [(task.Task, "_finish", finish)]


def _leak_credit() -> Replacements:
    original = RemoteChannel.freed

    def freed(self: Any, buffers: int) -> None:
        original(self, buffers)
        if buffers > 1:
            self._quota.take(1)

    return [(RemoteChannel, "freed", freed)]


def _grant_nothing_back() -> Replacements:
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if not self._sequence:
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def _rest_is_not_granted() -> Replacements:
    """A batch larger than its queue's limit never comes to its end."""
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if self._partial_buffers < max(1, self.queue.limit):
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def _read_rows_still_wait() -> Replacements:
    """What was read counts as waiting, so that the limit is reached for ever."""

    def take(self: Any, rows_max: int) -> Any:
        before = self.waiting
        taken = original(self, rows_max)
        self.waiting = before
        return taken

    original = ElementQueue.take
    return [(ElementQueue, "take", take), (ElementQueue, "check", _nothing)]


def _limit_of_nothing() -> Replacements:
    """Not even one batch is in order."""

    def set_limit(self: Any, *_: Any) -> None:
        self.limit = 0

    return [(ElementQueue, "_set_limit", set_limit), (ElementQueue, "check", _nothing)]


def _drop_an_element() -> Replacements:
    """A discarded batch of a blocked channel: in-flight data is forgotten at a barrier."""
    original = InputGate.block

    def block(self: Any, channel: int) -> None:
        original(self, channel)
        queue = self.channels[channel].queue
        if len(queue) and not queue.head_is_event():
            self.channels[channel].take(1)
            self.channels[channel].done()

    return [(InputGate, "block", block)]


def _shared_chunks_by_checkpoint() -> Replacements:
    def split_retained(retained: Any, keep: int, in_use: Any = ()) -> Any:
        ordered = tuple(sorted(retained, key=lambda r: r.checkpoint_id))
        cut = max(len(ordered) - keep, 0)
        dropped, kept = ordered[:cut], ordered[cut:]
        return kept, dropped, frozenset().union(*(r.files for r in dropped))

    return [(checkpoints, "split_retained", split_retained)]


def _old_parallelism() -> Replacements:
    return [(state_files, "_keyed_rows", lambda chunk, key_groups: state_files._ALL)]


def _failure_discards() -> Replacements:
    """A failed task drops its channels while its peers still use them."""
    original = task.Task.fail

    def fail(self: Any, error: BaseException, **symptom: bool) -> None:
        was_live = self.is_live
        original(self, error, **symptom)
        if was_live:
            self.close()

    return [(task.Task, "fail", fail)]


def _early_split() -> Replacements:
    def add_split(self: Any, split: bytes, is_last: bool) -> None:
        if self._source is not None and self.is_live:
            self._source.add_split(split, is_last=is_last)

    return [(task.Task, "add_split", add_split)]


def _offset_before_emit() -> Replacements:
    """What was read ahead counts as emitted."""
    original = SourceDriver.snapshot

    def snapshot(self: Any, chunk_id: str) -> Any:
        before = [current.split for current in self._open]
        for current in self._open:
            if current.ahead is not None:
                current.split = msgspec.structs.replace(current.split, offset=current.ahead[1])
        part = original(self, chunk_id)
        for current, split in zip(self._open, before, strict=True):
            current.split = split
        return part

    return [(SourceDriver, "snapshot", snapshot)]


def _pending_splits_late() -> Replacements:
    """The coordinator's splits are taken when the checkpoint completes, not when it is triggered."""
    original = checkpoints.Checkpoints._publish
    owner: dict[str, Any] = {}
    trigger = machine.Coordinator._trigger_when_due

    def trigger_when_due(self: Any) -> None:
        owner["sources"] = self._sources
        trigger(self)

    def publish(self: Any, pending: Any) -> None:
        pending.sources = owner["sources"].snapshot()
        original(self, pending)

    return [
        (machine.Coordinator, "_trigger_when_due", trigger_when_due),
        (checkpoints.Checkpoints, "_publish", publish),
    ]


def _no_fence() -> Replacements:
    return [(store, "check_epoch", lambda storage, epoch: None)]


def _finish_without_end_of_data() -> Replacements:
    """The end of data overtakes what waits in the subpartition."""
    original = Subpartition.add

    def add(self: Any, element: Any) -> None:
        original(self, element)
        if type(element).__name__ == "EndOfData" and len(self.queue) > 1:
            self.queue._items.rotate(1)

    return [(Subpartition, "add", add)]


def _remaining_behind_the_queue() -> Replacements:
    """A checkpoint during recovery forgets what has been read and not consumed."""
    original = GateRecovery.remaining

    def remaining(self: Any) -> Any:
        with patch.object(self, "_queue", ()):
            return original(self)

    return [(GateRecovery, "remaining", remaining)]


def _zombie_goes_on() -> Replacements:
    return [(checkpoints.Checkpoints, "look_at_the_epochs", _nothing)]


def _nothing(*_: Any) -> None:
    return None


def _in_flight(what: str, replacements: Callable[[], Replacements]) -> Mutation:
    return Mutation(what, replacements, scenarios.backpressured)


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "skip_alignment": Mutation("snapshot at the first barrier", _skip_alignment),
    "end_is_no_barrier": Mutation("the end of a channel does not complete an alignment", _end_is_no_barrier),
    "resume_forgets": Mutation("a resumed channel is not read again", _barrier_after_snapshot_rows),
    "block_nothing": Mutation("a blocked channel is read on", _block_nothing),
    "ack_before_write": Mutation("acknowledge without a file", _ack_before_write),
    "metadata_before_acks": Mutation("publish while a task has not answered", _metadata_before_acks),
    "commit_before_completion": Mutation("commit before the metadata is durable", _commit_before_completion),
    "forget_committables_on_restore": Mutation("forget committables on restore", _forget_committables_on_restore),
    "forget_earlier_committables": Mutation(
        "forget what was prepared for a checkpoint that failed", _forget_earlier_committables
    ),
    "partition_ends_early": Mutation(
        "EndOfPartition before the final checkpoint", _partition_ends_before_final_checkpoint
    ),
    "leak_credit": Mutation("a buffer of a large batch is never given back", _leak_credit),
    "grant_nothing_back": Mutation("credit is granted once only", _grant_nothing_back),
    "rest_is_not_granted": Mutation("a batch above the limit of its queue is not granted", _rest_is_not_granted),
    "read_rows_still_wait": Mutation("rows that were read still count as waiting", _read_rows_still_wait),
    "limit_of_nothing": Mutation("the queue of a slow reader takes nothing any more", _limit_of_nothing),
    "drop_an_element": Mutation("in-flight data is forgotten at a barrier", _drop_an_element),
    "shared_chunks_by_checkpoint": Mutation("shared chunks are deleted by checkpoint", _shared_chunks_by_checkpoint),
    "old_parallelism": Mutation("keyed state is not filtered", _old_parallelism, scenarios.backpressured),
    "failure_discards": Mutation("a failed task drops channels that peers still use", _failure_discards),
    "early_split": Mutation("a split that comes after the trigger is in the snapshot", _early_split),
    "offset_before_emit": Mutation("rows that were read ahead count as emitted", _offset_before_emit),
    "pending_splits_late": Mutation("pending splits are those at completion", _pending_splits_late),
    "no_fence": Mutation("a stale coordinator is not fenced", _no_fence),
    "remaining_behind_the_queue": Mutation(
        "recovered data is stored from where it has been read to", _remaining_behind_the_queue
    ),
    "zombie_goes_on": Mutation(
        "a stale coordinator without files restarts for ever", _zombie_goes_on, scenarios.superseded
    ),
    "end_overtakes": Mutation("the end of data overtakes rows", _finish_without_end_of_data),
    "forget_rest": _in_flight("the rest of a sliced batch is not captured", in_flight.forget_rest),
    "forget_partly_sent": _in_flight("a batch that is partly sent is not captured", in_flight.forget_partly_sent),
    "forget_arrivals": _in_flight("what arrives before its barrier is not captured", in_flight.forget_arrivals),
    "forget_output": _in_flight("queued output is not captured", in_flight.forget_output),
    "no_filter": _in_flight("rows in flight are not filtered by key group", in_flight.no_filter),
    "forget_recovered": _in_flight(
        "a checkpoint during recovery forgets what is not consumed", in_flight.forget_recovered
    ),
    "ignore_skip": _in_flight("what was consumed before a checkpoint is recovered again", in_flight.ignore_skip),
    "live_before_recovered": _in_flight("live data is read before recovered data", in_flight.live_before_recovered),
    "output_before_input": _in_flight("what had arrived is read behind what had not", in_flight.output_before_input),
    "old_ranges": _in_flight("rows in flight are dealt by the key groups of before", in_flight.old_ranges),
    "as_far_as_the_first": Mutation(
        "what consumers share is gone for all once it is for one", in_flight.as_far_as_the_first, scenarios.rejoined
    ),
    "joined_over_gaps": Mutation(
        "shared key groups are joined over gaps", in_flight.joined_over_gaps, scenarios.rejoined
    ),
    "ahead_counts_from_the_start": Mutation(
        "what is gone for some key groups is counted from a segment that is gone",
        in_flight.ahead_counts_from_the_start,
        scenarios.rejoined,
    ),
    "unannounced_barrier": Mutation(
        "a barrier that overtakes what waits for credit is not announced",
        in_flight.unannounced_barrier,
        scenarios.far_behind,
    ),
    "position_late": Mutation(
        "the place in recovered data moves when a batch is done, not when it is taken",
        in_flight.position_late,
        scenarios.sliced,
    ),
    "barrier_later": _in_flight("what is in flight is captured one mail after the operators", in_flight.barrier_later),
    "missing_barrier": _in_flight("one channel gets no barrier", in_flight.missing_barrier),
    "forgotten_channel_files": _in_flight(
        "files of rows in flight are not kept with their checkpoint", in_flight.forgotten_channel_files
    ),
    "recovery_waits_for_pool": Mutation(
        "recovered rows wait for room in the pool", in_flight.recovery_waits_for_pool, scenarios.tight_pool
    ),
    "every_decline_counts": Mutation("that a task is not ready counts as a failure", coordination.every_decline_counts),
    "watermark_of_the_fastest": Mutation(
        "event time is restored as of the fastest subtask", coordination.watermark_of_the_fastest, scenarios.on_time
    ),
    "event_time_of_the_fastest_split": Mutation(
        "event time is that of all splits together",
        coordination.event_time_of_the_fastest_split,
        scenarios.several_splits,
    ),
    "pending_splits_are_newer": Mutation(
        "event time does not wait for splits that nobody has",
        coordination.pending_splits_are_newer,
        scenarios.several_splits,
    ),
    "parts_among_files": Mutation(
        "event time does not wait for the second part of one file among several",
        coordination.parts_among_files,
        partial(scenarios.several_splits, splits=8),
    ),
    "broadcast_of_the_first": Mutation(
        "broadcast state is taken from subtask 0, finished or not",
        coordination.broadcast_of_the_first,
        scenarios.ending("broadcast"),
    ),
    "union_with_finished": Mutation(
        "union state is accepted when some subtasks have finished",
        coordination.union_with_finished,
        scenarios.ending_rescaled,
    ),
    "swallow_read_error": Mutation(
        "an error in recovering rows is swallowed", in_flight.swallow_read_error, scenarios.recovering
    ),
    "finished_runs_again": Mutation(
        "a finished operator runs again and gets the last watermark again",
        coordination.finished_runs_again,
        scenarios.summed,
    ),
    "finished_is_opened": Mutation(
        "a finished operator is opened again", coordination.finished_is_opened, scenarios.summed
    ),
    "last_timers_are_dropped": Mutation(
        "timers that wait for the clock at the end never fire", coordination.last_timers_are_dropped, scenarios.alarmed
    ),
    "timers_behind_the_end": Mutation(
        "timers that are due at the end fire behind it", coordination.timers_behind_the_end, scenarios.alarmed
    ),
    "timers_forgotten": Mutation(
        "timers that wait for the clock are not restored", coordination.timers_forgotten, scenarios.alarmed
    ),
    "watermark_before_timers": Mutation(
        "a watermark goes on before all its timers have fired", coordination.watermark_before_timers, scenarios.on_time
    ),
    "timers_before_rows": Mutation(
        "timers that are always due keep the rows waiting", coordination.timers_before_rows, scenarios.always_due
    ),
    "output_aside": Mutation(
        "output is kept beside the queues while the pool is empty", in_flight.output_aside, scenarios.tight_pool
    ),
    "checkpoint_while_draining": Mutation(
        "a checkpoint while only some sources have drained",
        coordination.checkpoint_while_draining,
        scenarios.draining,
    ),
    "late_metadata_is_failed": Mutation(
        "metadata that is not written in time is taken for failed",
        coordination.late_metadata_is_failed,
        scenarios.hanging,
    ),
    "late_metadata_completes": Mutation(
        "a checkpoint that was given up becomes complete", coordination.late_metadata_completes, scenarios.hanging
    ),
    "checkpoints_do_not_count": Mutation(
        "failures are in a row in spite of checkpoints", coordination.checkpoints_do_not_count, scenarios.poisoned
    ),
    "rescale_keeps_splits": Mutation(
        "a rescale goes on with the splits of now", coordination.rescale_keeps_splits, scenarios.rescaled
    ),
    "rescale_keeps_layout": Mutation(
        "checkpoints are described as before the rescale", coordination.rescale_keeps_layout, scenarios.rescaled
    ),
    "rescale_is_not_answered": Mutation(
        "a rescale that comes to nothing is not answered", coordination.rescale_is_not_answered, scenarios.rescaled
    ),
    "rescale_does_not_go_back": Mutation(
        "a plan that does not work is not left again", coordination.rescale_does_not_go_back, scenarios.rescaled
    ),
    "rescale_keeps_slots": Mutation(
        "slots that are too many stay", coordination.rescale_keeps_slots, scenarios.rescaled
    ),
    "rescale_before_stored": Mutation(
        "a rescale switches before its checkpoint is complete", coordination.rescale_before_stored, scenarios.rescaled
    ),
    **{name: Mutation(what, bug, scenarios.saving) for name, (what, bug) in savepoint.BUGS.items()},
    **{name: Mutation(what, bug, scenarios.in_tables) for name, (what, bug) in table.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in state_mutations.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in window_mutations.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in split_mutations.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in commit_mutations.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in file_mutations.BUGS.items()},
    **{name: Mutation(*bug) for name, bug in request_mutations.BUGS.items()},
}
