"""The last hour of a job in a sample every ten seconds, so that the page's lines do not begin when a tab is opened."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from midstream.engine.protocol.job_status import JobStatus, event_time_lag_s

STEP_S: Final = 10.0
SAMPLES_MAX: Final = 360


class RateHistory(msgspec.Struct, frozen=True):
    """Samples of the last hour, oldest first, as columns of equal length; None: unknown at that time."""

    at_ms: tuple[int, ...]
    """When each sample was taken, in milliseconds since 1970."""
    rows_read_per_s: tuple[float | None, ...]
    """The rows that all sources emitted per second since the sample before."""
    rows_written_per_s: tuple[float | None, ...]
    """The rows that all sinks received per second since the sample before."""
    event_time_lag_s: tuple[float | None, ...]
    """The lag of the task whose event time is the furthest in the past."""


class RateRecorder:
    """Adds samples, and forgets those that are older than an hour."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float | None, float | None, float | None]] = deque(maxlen=SAMPLES_MAX)
        self._before: tuple[int, int, int] | None = None

    def add(self, status: JobStatus) -> None:
        now_ms, read, written = status.now_ms, status.rows_read, _rows_written(status)
        read_per_s = written_per_s = None
        if self._before is not None:
            before_ms, read_before, written_before = self._before
            if now_ms <= before_ms:
                return
            passed_s = (now_ms - before_ms) / 1e3
            read_per_s = max(0, read - read_before) / passed_s
            written_per_s = max(0, written - written_before) / passed_s
        self._before = now_ms, read, written
        lags_s = [event_time_lag_s(vertex.watermark_us, now_ms) for vertex in status.vertices]
        lag_s = max((each for each in lags_s if each is not None), default=None)
        self._samples.append((now_ms, read_per_s, written_per_s, lag_s))

    def history(self) -> RateHistory:
        at_ms, read, written, lag = zip(*self._samples, strict=True) if self._samples else ((), (), (), ())
        return RateHistory(at_ms, read, written, lag)


def _rows_written(status: JobStatus) -> int:
    followed = {source for source, _, _ in status.edges}
    return sum(v.operators[-1].rows_in for v in status.vertices if v.operators and v.id not in followed)
