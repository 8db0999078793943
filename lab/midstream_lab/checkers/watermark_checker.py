"""Compares the event time of each task of a simulated job with the watermarks of its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from midstream.engine.core.elements import ALL_ASSIGNED, MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned, Event, Watermark
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.worker import task_input
from midstream.engine.worker.operator_chain import TaskOutputs
from midstream.engine.worker.task_input import TaskInput
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream.simulation.world import World


class CheckedWatermarkValve(WatermarkValve):
    """Checks a valve: event time is the minimum over the open channels that are waited for. A channel that is reported idle
    is active nevertheless while it considers fewer splits of one of its sources than any channel has considered; but for no
    longer than `outdated_us_max`, unless that is None.

    These are the active channels, the idle channels whose origins include all those of an active one, and the channels
    of subtasks that are all idle or have ended, if their origins together include all those of an active one. If all
    open channels are idle, event time is that of the furthest channel, including those that have ended; but a channel
    must not pass an open one whose origins include all of its own, nor the furthest of subtasks, some of them open, whose
    origins together do. Channels without an origin, where others have one, count for the end only. Event time never decreases, and begins where a restore puts it.
    """

    def __init__(self, world: World, origins: Sequence[IdleOrigin], *, outdated_us_max: int | None = None) -> None:
        super().__init__(origins)
        self._world = world
        self._origins = origins
        self._siblings = [_siblings(origin, origins) for origin in origins]
        """The channels of all subtasks of the producer of each channel; empty if only one of the subtasks is read."""
        self._reported_us = [MIN_WATERMARK_US] * len(origins)
        self._without_time = {c for c, origin in enumerate(origins) if origin.is_empty}
        """The channels without event time that have not ended; none if no channel has event time."""
        if len(self._without_time) == len(origins):
            self._without_time.clear()
        for channel in self._without_time:
            self._reported_us[channel] = MAX_WATERMARK_US
        self._reported_before_the_end_us = [MIN_WATERMARK_US] * len(origins)
        self._reported_idle = [False] * len(origins)
        self._split_counts: list[dict[int, int]] = [{} for _ in origins]
        """How many splits of each source each channel considers."""
        self._most_splits: Counter[int] = Counter()
        self._outdated_us_max = outdated_us_max
        self._outdated_since_us: dict[int, int] = {}
        """Since when event time has waited for channels that are reported idle."""
        self._waited_for: list[int] | None = None
        """The channels whose watermarks are waited for while some are active; None until they are determined.

        They depend only on which channels are open and which are idle.
        """

    def advance(self, channel: int, watermark_us: int) -> int | None:
        self._check_outdated()
        self._reported_us[channel] = max(self._reported_us[channel], watermark_us)
        if watermark_us == MAX_WATERMARK_US:
            self._without_time.discard(channel)
        if watermark_us != MAX_WATERMARK_US:
            self._reported_before_the_end_us[channel] = self._reported_us[channel]
        else:
            self._waited_for = None
        before_us = self.watermark_us
        return self._compared(before_us, super().advance(channel, watermark_us))

    def set_idle(self, channel: int, idle: bool, assigned: Assigned = ()) -> int | None:
        self._check_outdated()
        self._reported_idle[channel] = idle
        known, self._split_counts[channel] = self._split_counts[channel], dict(assigned)
        if any(self._split_counts[channel].get(source, 0) < count for source, count in known.items()):
            self._world.bug(f"a channel considers {assigned} splits, and has considered {known}")
        self._most_splits |= Counter({source: count for source, count in assigned if count < ALL_ASSIGNED})
        self._waited_for = None
        self._check_outdated()
        before_us = self.watermark_us
        return self._compared(before_us, super().set_idle(channel, idle, assigned))

    def _is_outdated(self, channel: int) -> bool:
        """Whether another channel has considered more splits of a source of this one."""
        origin, counts = self._origins[channel], self._split_counts[channel]
        sources = origin.every | origin.one
        return any(counts.get(source, 0) < most for source, most in self._most_splits.items() if source in sources)

    def _is_active(self, channel: int) -> bool:
        return self._is_outdated(channel) or not self._reported_idle[channel]

    def _check_outdated(self) -> None:
        """Check that event time has not waited for too long for channels that are reported idle."""
        if self._outdated_us_max is None:
            return
        now_us, since_us = self._world.now_us, self._outdated_since_us
        for channel, idle in enumerate(self._reported_idle):
            if not (idle and self._reported_us[channel] != MAX_WATERMARK_US and self._is_outdated(channel)):
                since_us.pop(channel, None)
            elif now_us - since_us.setdefault(channel, now_us) > self._outdated_us_max:
                self._world.bug(
                    f"event time has waited for channel {channel}, which is idle, since {since_us[channel]} µs"
                )

    def _due_us(self) -> int:
        origins, reported_us = self._origins, self._reported_us
        if self._waited_for:
            return min([reported_us[channel] for channel in self._waited_for])
        open_ = [channel for channel, mark_us in enumerate(reported_us) if mark_us != MAX_WATERMARK_US]
        active = {origins[channel] for channel in open_ if self._is_active(channel)}
        if active:
            self._waited_for = [channel for channel in open_ if self._is_waited_for(channel, active)]
            return min([reported_us[channel] for channel in self._waited_for])
        if not open_ and not self._without_time:
            return MAX_WATERMARK_US
        return max(
            min(
                [reported_us[c] for c in open_ if origin.is_within(origins[c])]
                + [self._furthest_us(c) for c in open_ if self._siblings[c] and origin.is_within_together(origins[c])]
                + [before_the_end_us]
            )
            for origin, before_the_end_us in zip(origins, self._reported_before_the_end_us, strict=True)
        )

    def _is_waited_for(self, channel: int, active: set[IdleOrigin]) -> bool:
        """Whether an open channel is waited for while the channels of these origins are active."""
        origin, siblings = self._origins[channel], self._siblings[channel]
        if any(other.is_within(origin) for other in active):
            return True
        are_silent = active.isdisjoint(self._origins[sibling] for sibling in siblings)
        return bool(siblings) and are_silent and any(other.is_within_together(origin) for other in active)

    def _furthest_us(self, channel: int) -> int:
        """Return how far the furthest of the subtasks has come whose channels are siblings of this one."""
        marks_us: list[int] = []
        for subtask in {self._origins[sibling].subtask for sibling in self._siblings[channel]}:
            each = [sibling for sibling in self._siblings[channel] if self._origins[sibling].subtask == subtask]
            open_us = [self._reported_us[c] for c in each if self._reported_us[c] != MAX_WATERMARK_US]
            marks_us.append(min(open_us) if open_us else max(self._reported_before_the_end_us[c] for c in each))
        return max(marks_us)

    def _compared(self, before_us: int, reported_us: int | None) -> int | None:
        sources = {source for counts in self._split_counts for source in counts}
        for source in sources:
            each = [
                counts.get(source, 0) if reported_us != MAX_WATERMARK_US else ALL_ASSIGNED
                for origin, counts, reported_us in zip(
                    self._origins, self._split_counts, self._reported_us, strict=True
                )
                if source in origin.every | origin.one
            ]
            if each and dict(self.assigned).get(source, 0) != min(each):
                self._world.bug(f"a task considers {self.assigned} splits, and its channels {each} of source {source}")
        due_us = max(before_us, self._due_us())
        if self.watermark_us != due_us or reported_us != (due_us if due_us > before_us else None):
            self._world.bug(
                f"event time of a task is {self.watermark_us}, was {before_us}, and should be {due_us}: its channels have "
                f"reported {self._reported_us} (idle: {self._reported_idle})"
            )
        return reported_us


def _siblings(origin: IdleOrigin, origins: Sequence[IdleOrigin]) -> list[int]:
    alike = [c for c, other in enumerate(origins) if (origin.every, origin.one) == (other.every, other.one)]
    return alike if len({origins[c].subtask for c in alike}) > 1 else []


@contextmanager
def watermarks_are_checked(world: World, outdated_us_max: int | None = None) -> Iterator[None]:
    """Check the watermarks of all tasks in this block; `outdated_us_max` as for `CheckedWatermarkValve`."""
    original = ResultPartition.broadcast

    def broadcast(partition: ResultPartition, event: Event) -> None:
        """Check that the last watermark leaves the one before it, which is that of the channel once it has ended."""
        if not isinstance(event, Watermark) or event.timestamp_us != MAX_WATERMARK_US:
            original(partition, event)
            return
        before = [list(sub.queue)[-1:] for sub in partition.subpartitions]
        original(partition, event)
        for sub, last in zip(partition.subpartitions, before, strict=True):
            if last and isinstance(last[0], Watermark) and last[0] not in sub.queue:
                world.bug(f"{sub.channel}: the last watermark replaces {last[0]}")

    valve = partial(CheckedWatermarkValve, world, outdated_us_max=outdated_us_max)
    with (
        patch.object(task_input, "WatermarkValve", valve),
        patch.object(ResultPartition, "broadcast", broadcast),
        _order_is_checked(world),
    ):
        yield


@contextmanager
def _order_is_checked(world: World) -> Iterator[None]:
    """Check that a watermark leaves a task after the splits on which it may depend."""
    advance, broadcast = TaskInput._advance, TaskOutputs.broadcast
    advancing: list[TaskInput] = []

    def noted_advance(task: TaskInput, watermark_us: int | None) -> None:
        advancing.append(task)
        try:
            advance(task, watermark_us)
        finally:
            advancing.pop()

    def checked_broadcast(outputs: TaskOutputs, event: Event) -> None:
        chain = advancing[-1]._chain if advancing else None
        if chain is not None and chain._task_outputs is outputs and isinstance(event, Watermark):
            considered = advancing[-1]._valve.assigned
            makes_time = any(operator.makes_watermarks for operator in chain.operators)
            if chain._status_sent.assigned != considered and not makes_time:
                world.bug(f"{event} leaves a task after {chain._status_sent}, and depends on the splits {considered}")
        broadcast(outputs, event)

    with (
        patch.object(TaskInput, "_advance", noted_advance),
        patch.object(TaskOutputs, "broadcast", checked_broadcast),
    ):
        yield
