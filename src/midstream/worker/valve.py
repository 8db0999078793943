"""Event time of a task: the minimum over its channels, as far as they are active."""

from __future__ import annotations

from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US


class WatermarkValve:
    """Watermarks of `channels` channels in, the growing minimum out. Idle and ended channels do not hold it back.

    Once all are idle it is as late as in the furthest of them: nobody is left to wait for.
    """

    def __init__(self, channels: int) -> None:
        self._watermarks = [MIN_WATERMARK_US] * channels
        self._idle = [False] * channels
        self.watermark_us = MIN_WATERMARK_US

    def advance(self, channel: int, watermark_us: int) -> int | None:
        """The task's new watermark, or None if it did not grow."""
        if watermark_us <= self._watermarks[channel]:
            return None
        self._watermarks[channel] = watermark_us
        if watermark_us == MAX_WATERMARK_US:
            self._idle[channel] = False  # it has ended, and is not waited for any more
        return self._merged()

    def set_idle(self, channel: int, idle: bool) -> int | None:
        """Likewise. A channel that has ended is never idle: nothing more is expected of it."""
        self._idle[channel] = idle and self._watermarks[channel] != MAX_WATERMARK_US
        return self._merged()

    @property
    def is_idle(self) -> bool:
        """Whether all channels that have not ended are idle, and there are some."""
        return any(self._idle) and all(
            idle or mark == MAX_WATERMARK_US for idle, mark in zip(self._idle, self._watermarks, strict=True)
        )

    def _merged(self) -> int | None:
        marks = list(zip(self._watermarks, self._idle, strict=True))
        active = [mark for mark, idle in marks if not idle and mark != MAX_WATERMARK_US]
        silent = [mark for mark, idle in marks if idle]
        mark = min(active) if active else max(silent, default=MAX_WATERMARK_US)
        if mark <= self.watermark_us:
            return None
        self.watermark_us = mark
        return mark
