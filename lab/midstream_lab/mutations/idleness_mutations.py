"""Known bugs of how event time waits for source subtasks that are assigned splits while they are idle; to be put back on purpose, see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from midstream.engine.coordinator.placement import split_assignment
from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.protocol.messages import AssignSplit, SplitsAssigned
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.source_reader import SourceReader
from midstream.engine.worker.task_input import TaskInput
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.targeted_idleness import watching

# ---- in the coordinator


def splits_of_the_subtask_are_counted() -> Replacements:
    """A subtask is sent how many splits it has been assigned itself."""
    original = SplitAssignment._assign_splits

    def assign_splits(self: Any, state: Any) -> None:
        send = self._effects.send

        def send_own(slot: int, message: Any) -> None:
            if isinstance(message, AssignSplit | SplitsAssigned):
                message = msgspec.structs.replace(message, assigned=state.assigned[message.task])
            send(slot, message)

        self._effects.send = send_own
        try:
            original(self, state)
        finally:
            del self._effects.send

    return [(SplitAssignment, "_assign_splits", assign_splits)]


def splits_count_before_they_are_sent() -> Replacements:
    """Subtasks are sent how many splits are assigned, and then those that are their own."""
    original = SplitAssignment._assign_splits

    def assign_splits(self: Any, state: Any) -> None:
        send, kept = self._effects.send, list[tuple[int, AssignSplit]]()

        def send_others(slot: int, message: Any) -> None:
            if isinstance(message, AssignSplit):
                kept.append((slot, message))
            else:
                send(slot, message)

        self._effects.send = send_others
        try:
            original(self, state)
        finally:
            del self._effects.send
        for slot, message in kept:
            send(slot, msgspec.structs.replace(message, assigned=state.assigned_count))

    return [(SplitAssignment, "_assign_splits", assign_splits)]


def only_readers_are_notified() -> Replacements:
    """Once all subtasks were notified that none waits, those that get no split of a later discovery are not again."""
    original = SplitAssignment._report_assigned

    def report_assigned(self: Any, state: Any) -> None:
        if state.reported is not None and state.waiting_from_us == MAX_WATERMARK_US:
            state.reported = state.assigned_count
        original(self, state)

    return [(SplitAssignment, "_report_assigned", report_assigned)]


def answer_without_splits() -> Replacements:
    """The answer that there is no split does not have how many are assigned."""
    original = SourceReader.splits_assigned

    def splits_assigned(self: Any, none_waits: bool, assigned: Any) -> None:
        original(self, none_waits, () if none_waits else assigned)

    return [(SourceReader, "splits_assigned", splits_assigned)]


def only_the_next_split_is_waited_for() -> Replacements:
    """Of several splits that wait, event time waits for the one that is assigned next."""
    original = split_assignment._State.wait_for

    def wait_for(self: Any, splits: Any) -> None:
        original(self, splits)
        self.waiting_us = deque(map(split_assignment._held_back_at_us, splits))

    return [(split_assignment._State, "wait_for", wait_for)]


# ---- in the source


def assigned_split_is_not_waited_for() -> Replacements:
    """A split that was assigned holds nothing back before its first row."""
    return [(SourceReader, "held_back_at_us", lambda self, split: MAX_WATERMARK_US)]


def rows_of_an_unordered_split_advance_event_time() -> Replacements:
    """Event time follows the rows of a split, although later ones may be as early as its first."""
    return [(SourceReader, "is_held_to_its_end", lambda self, split: False)]


def splits_are_reported_with_idleness() -> Replacements:
    """A subtask reports which splits it considers only when it becomes idle or active."""
    original = TimestampsOperator._emit_idleness

    def emit_idleness(self: Any) -> None:
        is_idle = not self._is_held_back and self._idle_splits == self._reached_us.keys()
        if is_idle is not self._is_idle:
            original(self)

    return [(TimestampsOperator, "_emit_idleness", emit_idleness)]


# ---- downstream


def idle_channel_is_never_waited_for() -> Replacements:
    """An idle channel is idle, whatever splits it considers."""
    return [(WatermarkValve, "_raise_newest", lambda self, assigned: False)]


def idle_channels_stay_idle() -> Replacements:
    """A channel that is idle already stays idle, whatever splits another one considers from now on."""
    original = WatermarkValve._raise_newest

    def raise_newest(self: Any, assigned: Any) -> bool:
        original(self, assigned)
        return False

    return [(WatermarkValve, "_raise_newest", raise_newest)]


def furthest_channel_is_considered() -> Replacements:
    """Once all channels consider more splits than before, a task considers as many as any of them."""

    def determine_lowest(self: Any, source: int) -> tuple[int, int]:
        _, at_lowest = original(self, source)
        return max(considered.get(source, 0) for considered in self._considered), at_lowest

    original = WatermarkValve._determine_lowest
    return [(WatermarkValve, "_determine_lowest", determine_lowest)]


def ended_channel_considers_none() -> Replacements:
    """A channel that has ended considers the splits of its last status."""

    def consider(self: Any, channel: int, considered: dict[int, int]) -> None:
        if self.watermarks[channel] != MAX_WATERMARK_US:
            original(self, channel, considered)

    original = WatermarkValve._consider
    return [(WatermarkValve, "_consider", consider)]


def ended_source_is_ahead() -> Replacements:
    """That a source has ended for one channel counts as a split that all others have to consider."""

    def raise_newest(self: Any, assigned: Any) -> bool:
        higher = {source: n for source, n in assigned if self._newest.get(source, 0) < n}
        self._newest.update(higher)
        return bool(higher)

    return [(WatermarkValve, "_raise_newest", raise_newest)]


def watermark_before_its_splits() -> Replacements:
    """A task sends a watermark before it reports the splits on which that depends."""

    def advance(self: Any, watermark_us: int | None) -> None:
        if watermark_us is not None:
            self._chain.offer(0, watermark_us)
        self._pass_on(self._valve.is_idle)

    return [(TaskInput, "_advance", advance)]


def busy_chain_reports_nothing() -> Replacements:
    """A chain that is idle, and fires a watermark, does not report which splits it considers."""
    original = OperatorChain._broadcast_idle

    def broadcast_idle(self: Any) -> None:
        if not (self._status.idle and (self._pending or self.awaits_work)):
            original(self)

    return [(OperatorChain, "_broadcast_idle", broadcast_idle)]


MUTATIONS: Final[Mapping[str, Mutation]] = named(
    Mutation("a subtask is sent how many splits are its own", splits_of_the_subtask_are_counted, watching),
    Mutation("all are notified of splits before these are assigned", splits_count_before_they_are_sent, watching),
    Mutation("idle subtasks are not notified of others' splits", only_readers_are_notified, watching),
    Mutation("the answer that no split waits has no number of splits", answer_without_splits, watching),
    Mutation("event time waits for the next split that no reader has", only_the_next_split_is_waited_for, watching),
    Mutation("a split that was assigned is not waited for", assigned_split_is_not_waited_for, watching),
    Mutation("rows of an unordered split advance event time", rows_of_an_unordered_split_advance_event_time, watching),
    Mutation("splits are reported only with a change of idleness", splits_are_reported_with_idleness, watching),
    Mutation("an idle channel is never waited for", idle_channel_is_never_waited_for, watching),
    Mutation("a channel that is idle stays idle", idle_channels_stay_idle, watching),
    Mutation("a task considers what its furthest channel does", furthest_channel_is_considered, watching),
    Mutation("an ended channel considers no new splits", ended_channel_considers_none, watching),
    Mutation("the end of a source counts as a split", ended_source_is_ahead, watching),
    Mutation("a watermark leaves before the splits on which it depends", watermark_before_its_splits, watching),
    Mutation("a chain that fires does not report its splits", busy_chain_reports_nothing, watching),
)
