"""Decides batch by batch whether rows are combined before they are sent.

Combining costs as much as the reduction that it saves the consumer. What it spares is to hash, split, send and read
all rows but those that are left, so it pays where few are left. Where it did not, it is tried again after a pause,
which grows, and with the first part of a batch: if this alone leaves too many, so does the whole. So a stream of ever
new keys pays almost nothing for it. The decision depends on the rows alone.
"""

from __future__ import annotations

from typing import Final

from midstream.engine.core.elements import Batch
from midstream.engine.operators.base import Combiner

ROWS_MIN: Final = 32_768
"""Batches of fewer rows are sent as they are: what a call takes whatever its rows is more than what is spared."""
REDUCTION_MIN: Final = 6
"""Combining pays if at most one row is left of so many."""
PROBE_PARTS: Final = 4
"""The first one of so many parts of a batch is tried before the whole. It has more rows than may be left, or it could not
say anything. Keys that come in turn, such as those of sensors that report one after the other, are like ever new ones in
a part that is smaller.
"""
PAUSE_MAX: Final = 64
"""The largest number of batches until combining is tried again."""


class AdaptiveCombiner:
    """Combines the batches that one subtask emits on one edge."""

    def __init__(self, combiner: Combiner) -> None:
        self._combiner = combiner
        self._pays = False
        """Whether combining has paid for the last batch for which it was tried."""
        self._pause = 0
        """How many batches follow the next failed try until another one. It is 0 where combining has paid before, because a
        batch that reaches into the next window leaves twice as many rows as its neighbours."""
        self._left = 0
        """How many of these are still to come."""

    def apply(self, batch: Batch) -> Batch:
        """Return the batch to send for `batch`. Raises what the consumer would raise for its rows."""
        if batch.num_rows < ROWS_MIN:
            return batch
        if self._left:
            self._left -= 1
            return batch
        combined = self._combine_if_worthwhile(batch)
        self._pays = combined is not None
        if combined is not None:
            self._pause = 0
            return combined
        self._left, self._pause = self._pause, min(2 * self._pause or 1, PAUSE_MAX)
        return batch

    def _combine_if_worthwhile(self, batch: Batch) -> Batch | None:
        """Return the combined batch, or None if it does not pay."""
        left_max = batch.num_rows // REDUCTION_MIN
        if not self._pays:
            first = self._combiner.combine(batch.slice(0, -(-batch.num_rows // PROBE_PARTS)))
            if first.num_rows > left_max:
                return None
        combined = self._combiner.combine(batch)
        return combined if combined.num_rows <= left_max else None
