"""When the next checkpoint is due: one interval after the last one began, and after a pause; earlier if requested.

If commits take longer than the interval, or do not succeed because the sink's system does not answer, completed
checkpoints would accumulate: each is retained until its output is committed, and all of that output is in the metadata
of each later one. So the interval doubles with each of them from the second on: after an outage of any length there are
few, and the next ones hold more rows each, which are committed with fewer calls.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from midstream.engine.coordinator.effects import Effects, TimerKind
from midstream.engine.core.config import JobConfig

RETRY_MS: Final = 100
"""The pause after a failed checkpoint, before the next one that a client or the coordinator waits for."""
FINAL_RETRY_MS: Final = 1_000
"""The pause before the next final checkpoint, without which the job cannot end; it doubles with each failure."""
FINAL_RETRY_MS_MAX: Final = 60_000
DOUBLED_MAX: Final = 20
"""How often the interval doubles at most while output is not committed."""


class CheckpointSchedule:
    def __init__(self, effects: Effects, config: JobConfig) -> None:
        self.failures = 0
        """The number of checkpoints that have failed in a row, of failures that count."""
        self.retry = False
        """Whether the last checkpoint was aborted although nothing is wrong: a new one must be triggered soon."""
        self.triggered_s = 0.0
        """When the last checkpoint was triggered, on the clock of `Effects.elapsed_s`."""
        self._effects = effects
        self._config = config
        self._began_ms = 0
        self._ended_ms = 0
        self._not_before_ms = 0
        self._wake: tuple[int, str] | None = None
        """When the timer fires at which the next checkpoint may be due, and the timer's token."""
        self._woken_for_ms = -1
        """The due time for which the timer has fired: a checkpoint is due then even if the wall clock was set back."""

    def running(self) -> None:
        """The first checkpoint of an attempt comes one interval after its start."""
        self._began_ms = self._ended_ms = self._effects.now_ms
        self.retry = False

    def triggered(self) -> None:
        self._began_ms, self.retry = self._effects.now_ms, False
        self.triggered_s = self._effects.elapsed_s
        self._not_before_ms = 0  # the wall clock may be set back, to long before it

    def ended(self) -> None:
        """The checkpoint is over. The wall clock may have been set back since it began: the next one must not wait for
        that long.
        """
        self._ended_ms = self._effects.now_ms
        self._began_ms = min(self._began_ms, self._ended_ms)

    def failed(self) -> None:
        self.ended()
        self._not_before_ms = self._ended_ms + RETRY_MS

    def attempt_over(self) -> None:
        self.failures = 0
        self.retry = False

    def is_now(self, is_requested: bool, is_final: bool, uncommitted: int) -> bool:
        """Return whether to trigger a checkpoint now; if not, a timer will fire when one may be due.

        `is_requested`: a client, a stop, a rescale or a savepoint waits for it. `is_final`: the end of the job does.
        `uncommitted`: the number of completed checkpoints of which not all is committed.
        """
        due_ms = self._due_ms(is_requested, is_final, uncommitted)
        if due_ms is None:
            return False
        now_ms = self._effects.now_ms
        if now_ms < due_ms != self._woken_for_ms and (self._wake is None or self._wake[0] != due_ms):
            if self._wake is not None:
                self._effects.cancel_timer(self._wake[1])
            woken = partial(self._woken, due_ms)
            self._wake = due_ms, self._effects.set_timer(TimerKind.WAKE, (due_ms - now_ms) / 1000, woken)
        return now_ms >= due_ms or self._woken_for_ms == due_ms

    def _woken(self, due_ms: int) -> None:
        self._wake = None
        self._woken_for_ms = due_ms

    def _due_ms(self, is_requested: bool, is_final: bool, uncommitted: int) -> int | None:
        """Return when the next checkpoint is due; None: not before one is requested."""
        if is_requested or self.retry or (is_final and not self.failures):
            return self._not_before_ms
        due_ms = []
        if is_final:
            pause_ms = min(FINAL_RETRY_MS << min(self.failures - 1, 20), FINAL_RETRY_MS_MAX)
            due_ms.append(max(self._ended_ms + pause_ms, self._not_before_ms))
        config = self._config
        if config.checkpoint_interval_s is not None:
            interval_ms, pause_ms = int(config.checkpoint_interval_s * 1000), int(config.min_pause_s * 1000)
            interval_ms <<= min(max(uncommitted - 1, 0), DOUBLED_MAX)
            due_ms.append(max(self._began_ms + interval_ms, self._ended_ms + pause_ms, self._not_before_ms))
        return min(due_ms, default=None)
