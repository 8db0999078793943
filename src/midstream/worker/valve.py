"""Event time of a task: the minimum over its channels, as far as they are waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.graph.origins import Origin


class WatermarkValve:
    """Watermarks of channels in, the growing minimum out. Idle and ended channels do not hold it back.

    A channel that says it is idle is waited for all the same while a channel is active whose origins are all among its
    own: then it is about to come back, and may hold rows that are due before it does. So its rows are not late only
    because the other one was heard first.

    Once all are idle it is as late as in the furthest of them, or of those that have ended: none is left to wait for.
    No channel is passed, though, by one whose origins are all among its own.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        """`origins`: of each channel."""
        self._watermarks = [MIN_WATERMARK_US] * len(origins)
        self._idle = [False] * len(origins)
        self._idle_count = 0
        self._reached = [MIN_WATERMARK_US] * len(origins)
        """The last watermark of each channel before its end."""
        self._families = _families(origins)
        self._lowest_us = MIN_WATERMARK_US
        """Of all channels, when it was looked last,"""
        self._at_lowest = len(origins)
        """and how many of them are still there. There may be a thousand, so not all are looked at whenever one advances."""
        self.watermark_us = MIN_WATERMARK_US

    def advance(self, channel: int, watermark_us: int) -> int | None:
        """The task's new watermark, or None if it did not grow."""
        if watermark_us <= self._watermarks[channel]:
            return None
        self._at_lowest -= self._watermarks[channel] == self._lowest_us
        self._watermarks[channel] = watermark_us
        if watermark_us == MAX_WATERMARK_US:
            self._set_idle(channel, False)  # it has ended, and is not waited for any more
        else:
            self._reached[channel] = watermark_us
        return self._merged()

    def set_idle(self, channel: int, idle: bool) -> int | None:
        """Likewise. A channel that has ended is never idle: nothing more is expected of it."""
        self._set_idle(channel, idle and self._watermarks[channel] != MAX_WATERMARK_US)
        return self._merged()

    def _set_idle(self, channel: int, idle: bool) -> None:
        self._idle_count += idle - self._idle[channel]
        self._idle[channel] = idle

    @property
    def is_idle(self) -> bool:
        """Whether all channels that have not ended are idle, and there are some."""
        return self._idle_count > 0 and all(
            idle or mark == MAX_WATERMARK_US for idle, mark in zip(self._idle, self._watermarks, strict=True)
        )

    def _merged(self) -> int | None:
        if self.is_idle:
            mark = self._furthest()
        elif self._idle_count:
            mark = min(
                (self._watermarks[channel] for channel in self._waited_for_beside_idle()), default=MAX_WATERMARK_US
            )
        else:
            if not self._at_lowest:
                self._lowest_us = min(self._watermarks, default=MAX_WATERMARK_US)
                self._at_lowest = self._watermarks.count(self._lowest_us)
            mark = self._lowest_us
        if mark <= self.watermark_us:
            return None
        self.watermark_us = mark
        return mark

    def watermark_of(self, channel: int) -> int:
        return self._watermarks[channel]

    def waited_for(self) -> list[int]:
        """The channels that may hold event time back: of those that have not ended, all but the idle ones (see above)."""
        if self.is_idle:
            return []
        channels = self._waited_for_beside_idle() if self._idle_count else range(len(self._watermarks))
        return [channel for channel in channels if self._watermarks[channel] != MAX_WATERMARK_US]

    def _waited_for_beside_idle(self) -> Iterator[int]:
        active = [family.active(self._watermarks, self._idle) for family in self._families]
        for family, own in zip(self._families, active, strict=True):
            is_followed = any(active[other] for other in family.within_all)
            for subtask, channels in family.channels.items():
                if is_followed or subtask in own or any(subtask in active[other] for other in family.within_alike):
                    yield from channels

    def _furthest(self) -> int:
        """Of channels that are all idle, or have ended."""
        open_ = [family.lowest(self._watermarks) for family in self._families]
        capped_all = [MAX_WATERMARK_US] * len(open_)
        """By family: no channel of it may be further."""
        capped_alike: list[dict[int, int]] = [{} for _ in open_]
        for family, marks in zip(self._families, open_, strict=True):
            lowest = min(marks.values(), default=MAX_WATERMARK_US)
            for other in family.within_all:
                capped_all[other] = min(capped_all[other], lowest)
            for other in family.within_alike:
                capped = capped_alike[other]
                for subtask, mark in marks.items():
                    capped[subtask] = min(capped.get(subtask, MAX_WATERMARK_US), mark)
        furthest = MIN_WATERMARK_US
        for family, cap, capped in zip(self._families, capped_all, capped_alike, strict=True):
            for subtask, channels in family.channels.items():
                reached = max(self._reached[channel] for channel in channels)
                furthest = max(furthest, min(reached, cap, capped.get(subtask, MAX_WATERMARK_US)))
        return furthest


class _Family:
    """Channels whose origins differ in the subtask only."""

    def __init__(self) -> None:
        self.channels: dict[int, list[int]] = {}
        """By subtask."""
        self.within_all: list[int] = []
        """Families whose origins are among those of each channel here."""
        self.within_alike: list[int] = []
        """Likewise, among those of the channel of the same subtask."""

    def active(self, watermarks: Sequence[int], idle: Sequence[bool]) -> set[int]:
        return {
            subtask
            for subtask, channels in self.channels.items()
            if any(not idle[channel] and watermarks[channel] != MAX_WATERMARK_US for channel in channels)
        }

    def lowest(self, watermarks: Sequence[int]) -> dict[int, int]:
        """By subtask that has not ended."""
        marks = {subtask: min(watermarks[channel] for channel in each) for subtask, each in self.channels.items()}
        return {subtask: mark for subtask, mark in marks.items() if mark != MAX_WATERMARK_US}


def _families(origins: Sequence[Origin]) -> list[_Family]:
    found: dict[tuple[frozenset[int], frozenset[int]], _Family] = {}
    example: list[Origin] = []
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
    return families
