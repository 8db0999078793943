"""Combines the watermarks of a task's channels: its event time is the minimum over those channels that it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from midstream.engine.core.elements import ALL_ASSIGNED, MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.graph.idleness import IdleOrigin


class WatermarkValve:
    """Merges the watermarks of channels into their growing minimum. Idle and ended channels do not hold it back.

    An idle channel counts as active as long as it does not consider all splits of a source that another channel considers
    (see `WatermarkStatus`): one of them may have been assigned to a subtask that is about to become active, and that may be
    earlier than the split from which the other channel's watermark is. It holds event time until its next status.

    The valve still waits for an idle channel while another channel is active whose origins are all among those of the
    idle one. It will become active soon, possibly with earlier rows, which must not be late only because the other
    channel's watermark arrived first. In the same way it waits for the idle channels of
    the subtasks of an operator, if all of these are idle, and the origins of an active channel are all among those of
    the subtasks taken together: then one of them is about to become active.

    Once all channels are idle or have ended, event time is that of the furthest channel. But the watermark of a channel
    counts only up to that of each channel whose origins include all of its own, and up to the furthest of subtasks
    whose origins together do.

    Channels without an origin have no event time and no foreseeable end. If there are others, the valve waits for these
    only; when they have ended, the task is idle until the channels without an origin have ended, too.
    """

    def __init__(self, origins: Sequence[IdleOrigin]) -> None:
        """`origins` has the origin of each channel."""
        self.watermarks = [MIN_WATERMARK_US] * len(origins)
        self._is_reported_idle = [False] * len(origins)
        self._idle = [False] * len(origins)
        """The channels that are reported idle, and consider all splits that any channel considers."""
        self._idle_count = 0
        self._sources = [tuple(origin.every | origin.one) for origin in origins]
        self._considered: list[dict[int, int]] = [{} for _ in origins]
        """How many splits of each source each channel considers."""
        self._newest: dict[int, int] = {}
        """The most splits of each source that any channel has considered."""
        channels = Counter(source for sources in self._sources for source in sources)
        self._lowest = {source: (0, count) for source, count in channels.items()}
        """For each source the lowest number of splits that a channel considers, and how many channels consider just these.
        It is determined again only when none does, as for `_at_lowest`."""
        self.assigned: Assigned = ()
        """The splits that all channels consider."""
        self._reached = [MIN_WATERMARK_US] * len(origins)
        """The last watermark of each channel before its end."""
        self._families = _families(origins)
        empty = {channel for channel, origin in enumerate(origins) if origin.is_empty}
        self._untimed = empty if len(empty) < len(origins) else set[int]()
        """The channels without event time that have not ended. They count as ended, but for the end of event time."""
        for channel in self._untimed:
            self.watermarks[channel] = MAX_WATERMARK_US
        self._lowest_us = MIN_WATERMARK_US
        """The lowest watermark of all channels, as it was last determined."""
        self._at_lowest = len(origins) - len(self._untimed)
        """How many channels are still at the lowest watermark. It is determined again only when none is: comparing
        all of a thousand channels whenever one advances would be too slow."""
        self.watermark_us = MIN_WATERMARK_US

    def advance(self, channel: int, watermark_us: int) -> int | None:
        """The watermark of a channel has advanced. Returns the task's new watermark, or None if it has not grown."""
        if watermark_us == MAX_WATERMARK_US and channel in self._untimed:
            self._untimed.remove(channel)
            return self._merged()
        if watermark_us <= self.watermarks[channel]:
            return None
        self._at_lowest -= self.watermarks[channel] == self._lowest_us
        self.watermarks[channel] = watermark_us
        if watermark_us == MAX_WATERMARK_US:
            self._is_reported_idle[channel] = False  # the channel has ended, and the valve no longer waits for it
            self._set_idle(channel)
            self._consider(channel, dict.fromkeys(self._sources[channel], ALL_ASSIGNED))
        else:
            self._reached[channel] = watermark_us
        return self._merged()

    def set_idle(self, channel: int, idle: bool, assigned: Assigned = ()) -> int | None:
        """A channel has become idle or active, or considers more splits. Returns the task's new watermark, or None if it has
        not grown.

        A channel that has ended is never idle.
        """
        if self.watermarks[channel] == MAX_WATERMARK_US:
            return None
        self._is_reported_idle[channel] = idle
        considered = dict(assigned)
        if considered != self._considered[channel]:
            self._consider(channel, considered)
            if self._raise_newest(assigned):
                for other, was_idle in enumerate(self._idle):
                    if was_idle:
                        self._set_idle(other)
        self._set_idle(channel)
        return self._merged()

    def _set_idle(self, channel: int) -> None:
        considered = self._considered[channel]
        idle = self._is_reported_idle[channel] and all(
            considered.get(source, 0) >= self._newest.get(source, 0) for source in self._sources[channel]
        )
        self._idle_count += idle - self._idle[channel]
        self._idle[channel] = idle

    def _raise_newest(self, assigned: Assigned) -> bool:
        """Returns whether a channel that considers these splits considers more than all others."""
        higher = {source: n for source, n in assigned if self._newest.get(source, 0) < n < ALL_ASSIGNED}
        self._newest.update(higher)
        return bool(higher)

    def _consider(self, channel: int, considered: dict[int, int]) -> None:
        """Note how many splits of each source a channel considers now. There are never fewer than before."""
        before, self._considered[channel] = self._considered[channel], considered
        for source in self._sources[channel]:
            lowest, at_lowest = self._lowest[source]
            if before.get(source, 0) == lowest < considered.get(source, 0):
                self._lowest[source] = (lowest, at_lowest - 1) if at_lowest > 1 else self._determine_lowest(source)
                if at_lowest == 1:
                    self.assigned = tuple(sorted((each, count) for each, (count, _) in self._lowest.items() if count))

    def _determine_lowest(self, source: int) -> tuple[int, int]:
        each = [
            considered.get(source, 0)
            for sources, considered in zip(self._sources, self._considered, strict=True)
            if source in sources
        ]
        return min(each), each.count(min(each))

    @property
    def is_idle(self) -> bool:
        """Whether some channels have not ended, and all of these are idle or without event time."""
        return (self._idle_count > 0 or bool(self._untimed)) and all(
            idle or mark == MAX_WATERMARK_US for idle, mark in zip(self._idle, self.watermarks, strict=True)
        )

    def _merged(self) -> int | None:
        if self.is_idle:
            mark = self._furthest()
        elif self._idle_count:
            mark = min(
                (self.watermarks[channel] for channel in self._waited_for_despite_idle()), default=MAX_WATERMARK_US
            )
        else:
            if not self._at_lowest:
                self._lowest_us = min(self.watermarks, default=MAX_WATERMARK_US)
                self._at_lowest = self.watermarks.count(self._lowest_us)
            mark = self._lowest_us
        if mark <= self.watermark_us:
            return None
        self.watermark_us = mark
        return mark

    def waited_for(self) -> list[int]:
        """The channels that may hold event time back: those that have not ended, except for idle ones that the valve
        does not wait for."""
        if self.is_idle:
            return []
        channels = self._waited_for_despite_idle() if self._idle_count else range(len(self.watermarks))
        return [channel for channel in channels if self.watermarks[channel] != MAX_WATERMARK_US]

    def _waited_for_despite_idle(self) -> Iterator[int]:
        active = [family.active(self.watermarks, self._idle) for family in self._families]
        for family, own in zip(self._families, active, strict=True):
            is_followed = any(active[other] for other in family.within_all) or (
                not own and any(active[other] for other in family.within_together)
            )
            for subtask, channels in family.channels.items():
                if is_followed or subtask in own or any(subtask in active[other] for other in family.within_alike):
                    yield from channels

    def _furthest(self) -> int:
        """The event time of a task whose channels are all idle or have ended."""
        unended = [family.lowest(self.watermarks) for family in self._families]
        capped_all = [MAX_WATERMARK_US] * len(unended)
        """The limit on the watermarks of all channels of a family, by the family's number."""
        capped_alike: list[dict[int, int]] = [{} for _ in unended]
        for family, marks in zip(self._families, unended, strict=True):
            lowest = min(marks.values(), default=MAX_WATERMARK_US)
            for other in family.within_all:
                capped_all[other] = min(capped_all[other], lowest)
            for other in family.within_alike:
                capped = capped_alike[other]
                for subtask, mark in marks.items():
                    capped[subtask] = min(capped.get(subtask, MAX_WATERMARK_US), mark)
            if marks and family.within_together:
                ended = (self._last_of(channels) for each, channels in family.channels.items() if each not in marks)
                ahead = max((*marks.values(), *ended))
                for other in family.within_together:
                    capped_all[other] = min(capped_all[other], ahead)
        furthest = MIN_WATERMARK_US
        for family, cap, capped in zip(self._families, capped_all, capped_alike, strict=True):
            for subtask, channels in family.channels.items():
                furthest = max(furthest, min(self._last_of(channels), cap, capped.get(subtask, MAX_WATERMARK_US)))
        return furthest

    def _last_of(self, channels: Sequence[int]) -> int:
        """The furthest watermark of these channels, before the ends of those that have ended."""
        return max(self._reached[channel] for channel in channels)


class _Family:
    """A set of channels whose origins differ in the subtask only."""

    def __init__(self) -> None:
        self.channels: dict[int, list[int]] = {}
        """The channels of the family by the subtask in their origins."""
        self.within_all: list[int] = []
        """The numbers of the families whose origins are all among those of each channel of this one."""
        self.within_alike: list[int] = []
        """The numbers of the families in which the origins of each channel are all among those of the channel of the
        same subtask here."""
        self.within_together: list[int] = []
        """The numbers of the families whose origins are all among those of the channels of this one taken together.

        Empty if the task reads only one of several subtasks, as over a forward edge.
        """

    def active(self, watermarks: Sequence[int], idle: Sequence[bool]) -> set[int]:
        return {
            subtask
            for subtask, channels in self.channels.items()
            if any(not idle[channel] and watermarks[channel] != MAX_WATERMARK_US for channel in channels)
        }

    def lowest(self, watermarks: Sequence[int]) -> dict[int, int]:
        """The lowest watermark of each subtask's channels, without the subtasks that have ended."""
        marks = {subtask: min(watermarks[channel] for channel in each) for subtask, each in self.channels.items()}
        return {subtask: mark for subtask, mark in marks.items() if mark != MAX_WATERMARK_US}


def _families(origins: Sequence[IdleOrigin]) -> list[_Family]:
    found: dict[tuple[frozenset[int], frozenset[int]], _Family] = {}
    example: list[IdleOrigin] = []
    for channel, origin in enumerate(origins):
        kind = origin.every, origin.one
        if kind not in found:
            found[kind] = _Family()
            example.append(origin)
        found[kind].channels.setdefault(origin.subtask, []).append(channel)
    families = list(found.values())
    for family, origin in zip(families, example, strict=True):
        for number, other in enumerate(example):
            if other.is_within_all(origin):
                family.within_all.append(number)
            elif other.is_within_alike(origin):
                family.within_alike.append(number)
            if len(family.channels) > 1 and other.is_within_together(origin):
                family.within_together.append(number)
    return families
