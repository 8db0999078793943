"""Chooses the number of rows of a source's next batch, and the time at which the source's rate allows it."""

from __future__ import annotations

from midstream.engine.worker.batch_sizer import BatchSizer

FIRST_ROWS = 256
"""The rows of the first batch, before the cost of a row has been measured."""
RATE_BATCH_S = 0.001
"""A rate-limited source emits this much time's worth of rows per batch, so that no row waits longer for its batch."""
RATE_BATCH_ROWS_MIN = 8
"""The minimum number of rows of such a batch: fewer are not worth one."""
RATE_BATCH_S_MAX = 0.05
"""A batch has the rows of no more than this time, even if they are fewer than RATE_BATCH_ROWS_MIN."""
SOURCE_SLICE_S = 0.02
"""The target for the chain's time per batch: mails and other tasks wait for it."""
CATCH_UP_S_MAX = 1.0
"""The limit on the time that a delayed rate-limited source catches up on: on a busy machine it has no core at times."""
DOWNSTREAM_BATCH_S = 0.1
"""The limit on the time that the tasks downstream take for one batch: barriers wait for whole batches."""
MEASURED_BATCHES = 8
"""Batches per measurement: with room in the queues several leave back to back, so only the mean interval is
meaningful."""
SETTLING_BATCHES = 4
"""Batches between two measurements, which still wait for batches of the previous size."""
MEASUREMENT_S_MAX = 2.0
"""The time limit of a measurement, even if downstream has taken fewer batches. A batch that takes as long is a
measurement of its own."""


class SourceRate:
    """The batch size of one source subtask: a batch has the rows that the chain processes in SOURCE_SLICE_S and that
    the tasks downstream take in DOWNSTREAM_BATCH_S, whichever are fewer.

    `rows_per_s` is the rate of this subtask, or None if the source has none.
    """

    def __init__(self, rows_max: int, rows_per_s: float | None) -> None:
        self._chain = BatchSizer(SOURCE_SLICE_S)
        self._downstream = BatchSizer(DOWNSTREAM_BATCH_S)
        self._measured_batches = self._measured_rows = 0
        """The batches that downstream has taken in the current measurement, and their rows. Here and below, the last
        batch is not among them."""
        self._measured_s = 0.0
        """The time between those batches and the next ones."""
        self._settling = SETTLING_BATCHES
        """The number of batches still to leave before the next measurement."""
        self._last: tuple[int, float] | None = None
        """The rows of the batch emitted last, and when it was emitted."""
        self._has_paused = False
        """Whether the source has had no rows since then."""
        self._paused_batches = self._paused_rows = 0
        """The batches after which the source has paused, since the last bound, and their rows."""
        self._paused_s = 0.0
        """The time between those batches and the next ones."""
        self.read_s = 0.0
        """The processor time of all reads on the I/O pool so far."""
        self._rows_per_s = rows_per_s or 0.0
        self.has_rate = bool(rows_per_s)
        self._limit = self._batch_rows = rows_max
        if rows_per_s:
            few = min(RATE_BATCH_ROWS_MIN, round(rows_per_s * RATE_BATCH_S_MAX))
            self._rate_batch_rows = max(1, few, int(rows_per_s * RATE_BATCH_S))
            self._limit = min(rows_max, self._rate_batch_rows)
        self.rows_max = min(self._limit, FIRST_ROWS)
        """The maximum number of rows of the next batch."""
        self.next_emit_s = float("-inf")
        """When the rate allows the next batch. Before the first rows none is late."""

    def keep_rate(self, rows: int, now_s: float) -> None:
        """Count `rows` towards the rate.

        A delayed source catches up on at most CATCH_UP_S_MAX, with larger batches: with small ones it would lag further
        and further.
        """
        start_s = max(self.next_emit_s, now_s - CATCH_UP_S_MAX) if self.next_emit_s > float("-inf") else now_s
        self._limit = min(self._batch_rows, max(self._rate_batch_rows, int((now_s - start_s) * self._rows_per_s)))
        self.next_emit_s = start_s + rows / self._rows_per_s

    def record_emitted(self, rows: int, started_s: float, ended_s: float) -> None:
        """Record a batch of `rows` rows. The times are of the clock of the slot's own core."""
        self._chain.record(rows, ended_s - started_s)
        if self._last is not None:
            measure = self._bound_downstream if self._has_paused else self._measure_downstream
            measure(self._last[0], started_s - self._last[1])
        self._last, self._has_paused = (rows, started_s), False
        fitting = min(self._chain.rows(1), self._downstream.rows(FIRST_ROWS))
        # The size changes at most by a factor of two at a time, because one batch may have been slow by chance.
        self.rows_max = max(1, min(self._limit, max(self.rows_max // 2, min(fitting, self.rows_max * 2))))

    def _measure_downstream(self, rows: int, seconds: float) -> None:
        if (
            seconds >= MEASUREMENT_S_MAX
        ):  # a measurement of its own: rows have become slower, and batches must not wait to shrink
            self._measured_batches = self._settling = 0
            self._measured_rows, self._measured_s = 0, 0.0
        elif self._settling:
            self._settling -= 1
            return
        self._measured_batches += 1
        self._measured_rows += rows
        self._measured_s += seconds
        if self._measured_batches == MEASURED_BATCHES or self._measured_s >= MEASUREMENT_S_MAX:
            mean_rows = round(self._measured_rows / self._measured_batches)
            self._downstream.record(mean_rows, self._measured_s / self._measured_batches, self._measured_batches)
            self._measured_batches, self._settling = 0, SETTLING_BATCHES
            self._measured_rows, self._measured_s = 0, 0.0

    def _bound_downstream(self, rows: int, seconds: float) -> None:
        """Record the mean interval between batches of a source that pauses, if it allows more rows than are known to fit.

        The tasks downstream keep up with such a source, so they take no longer than that. Without this, batches of a
        source that reads more slowly than rows are processed would stay as small as the first one, and the fixed cost of
        each read would keep the source slow.
        """
        self._paused_batches += 1
        self._paused_rows += rows
        self._paused_s += seconds
        if self._paused_batches == MEASURED_BATCHES:
            mean_rows, mean_s = round(self._paused_rows / MEASURED_BATCHES), self._paused_s / MEASURED_BATCHES
            known = self._downstream.rows(FIRST_ROWS)
            if mean_rows * DOWNSTREAM_BATCH_S > mean_s * known and mean_rows * MEASURED_BATCHES > known:
                self._downstream.record(mean_rows, mean_s, MEASURED_BATCHES)
            self._paused_batches = self._paused_rows = 0
            self._paused_s = 0.0

    def pause(self) -> None:
        """Note that the source has no rows: the time until it has some does not show how fast batches are taken."""
        self._has_paused = True
