"""Splits: found by `Source.discover`, assigned to the subtasks that request them, kept in every checkpoint.

A checkpoint's `pending` splits are taken in the step that triggers it. A split that was assigned before the trigger is
in its reader's state, one that was not is in `pending`, and control messages to a slot stay in order, so no split is in
both or in none.

Nothing more is discovered while splits wait to be assigned. So all waiting splits were found by one discovery. Event
time waits for them (see `engine.operators.watermarks`), and no newer splits can prolong that wait. A subtask is sent from
where on with each of its own splits: by then no split waits that did not wait before, so what it knows may be too early,
and never too late.

Each message about splits has how many are assigned. A subtask with this count has all of its own among them, since messages
to a slot stay in order. Once no split waits, all subtasks have been sent the same count. Tasks downstream rely on both (see
`engine.worker.watermark_valve`).

At most one call of a source runs at a time, so a source needs no locks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from midstream.engine.checkpoint.metadata import SourcePosition
from midstream.engine.checkpoint.state_files import read_parts
from midstream.engine.coordinator.effects import Effects, IoKind, TimerKind
from midstream.engine.coordinator.failures import failure_of, warn_if_failed
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.source_drift import SourceDrift
from midstream.engine.coordinator.restore.open_directory import OpenedStorage
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, Storage
from midstream.engine.graph.job_graph import JobGraph, SourceSpec
from midstream.engine.graph.source_event_time import source_event_time
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, checked_discovery
from midstream.engine.protocol.messages import (
    AssignSplit,
    NoMoreSplits,
    PartHandle,
    RequestSplit,
    SourceProgress,
    SplitsAssigned,
)
from midstream.engine.worker.source_reader import SPLITS, splits_of

if TYPE_CHECKING:
    from midstream.engine.coordinator.checkpoints.pending_checkpoint import CompletedCheckpoint

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Split)


@dataclass(frozen=True, slots=True)
class _Notice:
    """What a source is notified of after a checkpoint."""

    position: bytes | None
    pending: tuple[bytes, ...]
    parts: tuple[PartHandle, ...]


class WaitingReaders:
    """The subtasks that wait for a split, in the order of their requests.

    There may be thousands, and all may have their share while one has still to request a split. So those that have
    their share are not examined again for each split, but set aside until the share changes.
    """

    def __init__(self) -> None:
        self._ready: dict[TaskId, int] = {}
        """The subtasks that are not set aside, with the number of their request, which counts requests."""
        self._aside: dict[TaskId, int] = {}
        """The subtasks that have `_share` splits or more, with the number of their request."""
        self._share = 0
        self._count = 0

    def __contains__(self, ref: TaskId) -> bool:
        return ref in self._ready or ref in self._aside

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside)

    def add(self, ref: TaskId) -> None:
        self._count += 1
        self._ready[ref] = self._count

    def remove(self, ref: TaskId) -> None:
        if self._ready.pop(ref, None) is None:
            del self._aside[ref]

    def clear(self) -> None:
        self._ready.clear()
        self._aside.clear()

    def first(self) -> TaskId:
        self._restore_aside()
        return next(iter(self._ready))

    def first_below(self, share: int, assigned: Mapping[TaskId, int]) -> TaskId | None:
        """Return the first subtask that has been assigned fewer than `share` splits."""
        if share != self._share:
            self._restore_aside()
            self._share = share
        while self._ready:
            ref = next(iter(self._ready))
            if assigned.get(ref, 0) < share:
                return ref
            self._aside[ref] = self._ready.pop(ref)
        return None

    def _restore_aside(self) -> None:
        if self._aside:
            together = {**self._ready, **self._aside}
            self._ready = dict(sorted(together.items(), key=itemgetter(1)))
            self._aside = {}


@dataclass(slots=True)
class _State:
    spec: SourceSpec
    vertex: int
    parallelism: int
    finished: bool = False
    """Whether all its subtasks had finished in the checkpoint from which the attempt began: then it is not called."""
    called: bool = False
    """Whether it was called in this job, and so has to be closed."""
    position: bytes | None = None
    exhausted: bool = False
    event_time: str | None = None
    """See `DiscoveryContext`."""
    pending: deque[bytes] = field(default_factory=deque)
    waiting_us: deque[int] = field(default_factory=deque)
    """For each split in `pending`, up to where event time need not wait for it and those after it."""
    reported: int | None = None
    """The `assigned_count` with which all subtasks were last notified that event time waits for no split in `pending`; None
    if it has waited since, or they have not been notified yet."""
    waiting: WaitingReaders = field(default_factory=WaitingReaders)
    """The subtasks that have requested a split and have no answer yet."""
    unanswered: set[TaskId] = field(default_factory=set)
    """Those in `waiting` to which no SplitsAssigned was sent after their request."""
    assigned: Counter[TaskId] = field(default_factory=Counter)
    """The number of splits that each subtask was assigned in this attempt."""
    assigned_count: int = 0
    """The number of splits that all subtasks together were assigned in this attempt."""
    generation: int = 0
    """The number of resets and pauses: the result of a discovery that began before one of them is ignored."""
    busy: bool = False
    """Whether a call of the source is running."""
    timer: str | None = None
    notice: _Notice | None = None

    @property
    def waiting_from_us(self) -> int:
        """The highest watermark that need not wait for the splits in `pending`."""
        return self.waiting_us[0] if self.waiting_us else MAX_WATERMARK_US

    def wait_for(self, splits: Sequence[Split]) -> None:
        """Have these splits wait to be assigned."""
        self.pending = deque(map(_encoder.encode, splits))
        waiting_us = accumulate((_held_back_at_us(split) for split in reversed(splits)), min)
        self.waiting_us = deque(reversed(list(waiting_us)))

    def next_split(self) -> bytes:
        self.waiting_us.popleft()
        return self.pending.popleft()


class SplitAssignment:
    def __init__(self, effects: Effects, graph: JobGraph) -> None:
        self.storage: Storage | None = None
        self.are_reset = False
        """Whether the sources are at the positions from which the next attempt begins, and discover."""
        self._effects = effects
        self._attempt: Attempt | None = None
        self._discovers = False
        """Whether sources discover: not before the first reset, and never again after `stop`."""
        self._stopped = False
        self._states = {
            vertex.source.uid: _State(
                vertex.source, vertex.id, vertex.parallelism, event_time=source_event_time(vertex)
            )
            for vertex in graph.vertices
            if vertex.source is not None
        }
        self._by_vertex = {state.vertex: state for state in self._states.values()}
        self.drift = SourceDrift(effects, self, graph)
        """Which of the assigned splits may be read."""

    def storage_opened(self, found: OpenedStorage) -> None:
        self.storage = found.storage

    # ---- attempts ----

    def rescale(self, graph: JobGraph) -> None:
        """Continue with the same sources in another graph of the same job. This is called between two attempts."""
        assert self._attempt is None
        for vertex in graph.vertices:
            if vertex.source is not None:
                state = self._states[vertex.source.uid]
                state.vertex, state.parallelism = vertex.id, vertex.parallelism
        self._by_vertex = {state.vertex: state for state in self._states.values()}
        self.drift.rescale(graph)

    def reset(self, positions: Mapping[str, SourcePosition], finished: Set[TaskId]) -> None:
        """Set the sources to these positions (to the beginning, for those that have none), and begin to discover.

        `finished`: the tasks that are not run again.
        """
        self._attempt = None
        self.are_reset = True
        self._discovers = not self._stopped
        for uid, state in self._states.items():
            self._quiesce(state)
            old = positions.get(uid)
            state.generation += 1
            state.position = old.position if old else None
            state.finished = all(TaskId(state.vertex, i) in finished for i in range(state.parallelism))
            source = state.spec.source
            goes_on = source.continues_past_end and not source.bounded  # it had an end when the checkpoint was made
            state.exhausted = state.finished or (old is not None and old.exhausted and not goes_on)
            state.wait_for([_decoder.decode(split) for split in old.pending] if old else [])
            self._next_call(state)

    def deployed(self, attempt: Attempt) -> None:
        """The attempt is deployed: splits are assigned to its tasks from now on."""
        assert all(not state.waiting for state in self._states.values())
        self._attempt = attempt
        for state in self._states.values():
            state.assigned.clear()
            state.assigned_count = 0
            state.reported = None
            self._report_assigned(state)
        self.drift.deployed(attempt)

    def pause(self) -> None:
        """The attempt is over; `reset` comes before the next one."""
        self._attempt = None
        self.are_reset = False
        self.drift.attempt_over()
        for state in self._states.values():
            self._quiesce(state)
            state.generation += 1

    def stop(self) -> None:
        """Discover nothing more in this job, and assign no further split."""
        self._stopped = True
        self._discovers = False
        for state in self._states.values():
            self._effects.cancel_timer(state.timer)
            state.timer = None
            self._assign_splits(state)
        self.drift.advance()

    def end(self, *_: object) -> None:
        self.pause()
        self.stop()

    def _quiesce(self, state: _State) -> None:
        self._effects.cancel_timer(state.timer)
        state.timer = None
        state.waiting.clear()
        state.unanswered.clear()

    def handle(self, message: RequestSplit | SourceProgress) -> None:
        """Handle the message of a source subtask of the current attempt."""
        if isinstance(message, SourceProgress):
            self.drift.report(message)
        else:
            self.request(message.task)

    # ---- assignment ----

    def request(self, ref: TaskId) -> None:
        """A subtask requests a split."""
        state = self._by_vertex.get(ref.vertex)
        if state is None or self._attempt is None or ref in state.waiting:
            return
        state.waiting.add(ref)
        state.unanswered.add(ref)
        self._assign_splits(state)
        self.drift.advance()
        self._next_call(state)

    def _assign_splits(self, state: _State) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        while state.waiting:
            if state.pending and self._discovers:
                ref = _next_reader(state)
                if ref is None:
                    return
                state.waiting.remove(ref)
                state.unanswered.discard(ref)
                state.assigned[ref] += 1
                state.assigned_count += 1
                split = state.next_split()
                assign = AssignSplit(attempt.number, ref, split, state.waiting_from_us, state.assigned_count)
                self._effects.send(attempt.slot_of(ref), assign)
                if state.waiting_from_us < MAX_WATERMARK_US:
                    state.reported = None
                self._report_assigned(state)
            elif state.exhausted or not self._discovers:
                ref = state.waiting.first()
                state.waiting.remove(ref)
                state.unanswered.discard(ref)
                self._effects.send(attempt.slot_of(ref), NoMoreSplits(attempt.number, ref))
            else:
                self._report_none(state, attempt)
                return

    def _report_none(self, state: _State, attempt: Attempt) -> None:
        """Report to each subtask that waits that there is no split for it at present: it may be idle from now on."""
        if state.position is not None:
            for ref in sorted(state.unanswered):
                none_waits = SplitsAssigned(attempt.number, ref, none_waits=True, assigned=state.assigned_count)
                self._effects.send(attempt.slot_of(ref), none_waits)
            state.unanswered.clear()

    def _report_assigned(self, state: _State) -> None:
        """Notify all subtasks that event time need not wait for splits that are still to be assigned, and how many are
        assigned. Only a subtask can determine whether it has rows for which event time waits.

        Splits that follow all others may still be assigned after that. Then all subtasks are notified again once the last
        of them is: until then event time waits for those that are idle, if any are.
        """
        attempt = self._attempt
        if attempt is None or state.position is None or state.waiting_from_us < MAX_WATERMARK_US:
            return
        if state.reported is not None and (state.pending or state.reported == state.assigned_count):
            return
        state.reported = state.assigned_count
        for subtask in range(state.parallelism):
            ref = TaskId(state.vertex, subtask)
            self._effects.send(attempt.slot_of(ref), SplitsAssigned(attempt.number, ref, assigned=state.assigned_count))

    def check(self) -> None:
        """Assert that all subtasks have been notified of all splits that are assigned, unless some still are not."""
        self.drift.check()
        for state in self._states.values() if self._attempt is not None else ():
            is_due = state.position is not None and not state.pending
            assert not is_due or state.reported == state.assigned_count, (state.spec.uid, state.reported)

    # ---- for the limit of the drift ----

    def has_discovered(self, vertex: int) -> bool:
        """Whether the splits of this source are known, or nothing more will be discovered."""
        state = self._by_vertex[vertex]
        return state.position is not None or state.exhausted or not self._discovers

    def has_backlog(self, vertex: int) -> bool:
        """Whether event time of this source waits for splits that are still to be assigned."""
        return self._discovers and self._by_vertex[vertex].waiting_from_us < MAX_WATERMARK_US

    def assigned_to(self, ref: TaskId) -> int:
        """Return how many splits the subtask was assigned in this attempt."""
        return self._by_vertex[ref.vertex].assigned[ref]

    # ---- checkpoints ----

    def snapshot(self) -> tuple[SourcePosition, ...]:
        return tuple(
            SourcePosition(uid, state.position, state.exhausted, tuple(state.pending))
            for uid, state in self._states.items()
        )

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        """Notify the sources that override `checkpoint_completed`. Of several checkpoints, only the newest matters."""
        positions = {position.uid: position for position in completed.metadata.sources}
        for operator in completed.metadata.operators:
            state, position = self._states.get(operator.uid), positions.get(operator.uid)
            if state is None or position is None or state.finished:
                continue
            if type(state.spec.source).checkpoint_completed is Source.checkpoint_completed:
                continue
            # of finished subtasks, too: the rest of a split that a drain has cut off was never read
            parts = tuple(part for subtask in operator.subtasks for part in subtask.parts if part.name == SPLITS)
            state.notice = _Notice(position.position, position.pending, parts)
            self._next_call(state)

    # ---- calls of the source, one at a time ----

    def _next_call(self, state: _State) -> None:
        if state.busy:
            return
        if state.notice is not None:
            notice, state.notice = state.notice, None
            state.busy = state.called = True
            work = partial(_notify_source, state.spec, notice, self.storage)
            what = f"source {state.spec.name!r} to take note of a checkpoint"
            notified = partial(self._notified, state)
            self._effects.run_io(IoKind.NOTIFY, work, notified, about=state.spec.uid, waits_for=what, has_limit=True)
        elif self._discovers and not state.exhausted and state.timer is None and not state.pending:
            state.busy = state.called = True
            context = DiscoveryContext(state.spec.uid, state.parallelism, self.storage, state.event_time)
            work_discover = partial(_discover, state.spec.source, state.position, context)
            self._effects.run_io(
                IoKind.DISCOVER,
                work_discover,
                partial(self._discovered, state, state.generation),
                about=state.spec.uid,
                waits_for=f"source {state.spec.name!r} to find its splits",
                has_limit=True,
            )

    def _notified(self, state: _State, outcome: Done[None] | Failed) -> None:
        state.busy = False
        # The next completed checkpoint includes what this one contains.
        warn_if_failed(self._effects, f"source {state.spec.name!r}, after a checkpoint", outcome)
        self._next_call(state)

    def _discovered(self, state: _State, generation: int, outcome: Done[Discovery] | Failed) -> None:
        state.busy = False
        if generation != state.generation or not self._discovers:
            self._next_call(state)
            return
        if isinstance(outcome, Failed):
            state.generation += 1
            failure = failure_of(outcome.error, f"source {state.spec.name!r}: finding its splits failed")
            self._effects.notifications.start_failed(failure)
            return
        found = outcome.value
        assert not state.pending, state.spec.uid
        state.wait_for(_without_follows(found.splits))
        state.position = found.position
        state.exhausted = found.exhausted
        if not state.exhausted:
            again = partial(self._timer_fired, state)
            interval_s = state.spec.source.discovery_interval_s
            state.timer = self._effects.set_timer(TimerKind.DISCOVER, interval_s, again, state.spec.uid)
        self._report_assigned(state)
        self._assign_splits(state)
        self.drift.advance()
        self._next_call(state)

    def _timer_fired(self, state: _State) -> None:
        state.timer = None
        self._next_call(state)

    def close(self) -> None:
        """Close every source that has been called. None of them is in a call."""
        for state in self._states.values():
            assert not state.busy, state.spec.uid
            if not state.called:
                continue
            state.busy = True
            what = f"source {state.spec.name!r} to be closed"
            closed = partial(warn_if_failed, self._effects, f"source {state.spec.name!r}: closing it failed")
            self._effects.run_io(IoKind.CLOSE, state.spec.source.close, closed, about=state.spec.uid, waits_for=what)


def _discover(source: Source, position: bytes | None, context: DiscoveryContext) -> Discovery:
    return checked_discovery(source.discover(position, context))


def _next_reader(state: _State) -> TaskId | None:
    """Return the waiting subtask that gets the next split; None: the split is for one that has not requested it yet, as
    the waiting ones have their share.

    All subtasks of a source run as long as splits are pending: each ends only after `NoMoreSplits`.
    """
    if not state.spec.source.equal_shares:
        return state.waiting.first()
    share = ceil((state.assigned_count + len(state.pending)) / state.parallelism)
    return state.waiting.first_below(share, state.assigned)


def _without_follows(splits: Sequence[Split]) -> list[Split]:
    """Return the splits with `follows` cleared, unless each of them follows the one before.

    Among several files, event time also waits for the second part of one: once its first part has been read, only other
    files would hold event time back for it, and these may be far ahead, or end.
    """
    if all(split.follows for split in splits[1:]):
        return [*splits]
    return [msgspec.structs.replace(split, follows=False) for split in splits]


def _held_back_at_us(split: Split) -> int:
    return MAX_WATERMARK_US if split.follows and split.min_time_us is None else split.held_back_at_us


def _notify_source(spec: SourceSpec, notice: _Notice, storage: Storage | None) -> None:
    """Read which splits are unfinished, and notify the source. For the I/O pool."""
    unfinished = [_decoder.decode(split) for split in notice.pending]
    if notice.parts:
        assert storage is not None
        parts = read_parts(storage, notice.parts, range(0), f"source {spec.uid!r}")
        for part in parts.values():
            unfinished += splits_of(part)
    spec.source.checkpoint_completed(notice.position, unfinished)
