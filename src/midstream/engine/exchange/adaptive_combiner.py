"""Decides batch by batch whether rows are combined before they are sent.

Combining (pre-aggregation) costs as much as the reduction that it saves the consumer. It also saves hashing, splitting,
sending and reading the rows it removes, so it pays off only when few remain. Where it did not pay off, it is tried
again after a growing number of batches, first on a part of a batch: if too many rows remain of this part, the whole is
not combined. So a stream whose keys never repeat pays almost nothing for it. The decision depends on the rows alone.
"""

from __future__ import annotations

from typing import Final

from midstream.engine.core.elements import Batch
from midstream.engine.operators.base import Combiner

ROWS_MIN: Final = 32_768
"""Batches of fewer rows are sent as they are: the fixed cost of a call exceeds the saving."""
REDUCTION_MIN: Final = 6
"""Combining pays off if it reduces the rows at least by this factor."""
PROBE_PARTS: Final = 4
"""The batch's first 1/PROBE_PARTS is combined as a probe. It must hold more rows than 1/REDUCTION_MIN of the batch,
otherwise it could never fail. With a smaller probe, round-robin keys (sensors reporting in turn) look unique."""
PAUSE_MAX: Final = 64
"""The largest number of batches until combining is tried again."""


class AdaptiveCombiner:
    """Combines the batches that one subtask emits on one edge."""

    def __init__(self, combiner: Combiner) -> None:
        self._combiner = combiner
        self._pays_off = False
        """Whether combining has paid off for the last batch for which it was tried."""
        self._retry_after_batches = 0
        """How many batches are sent as they are after the next failed try. 0 after a success, because a batch that
        spans two windows leaves twice as many rows as its neighbours."""
        self._batches_until_retry = 0
        """The number of batches to send as they are before the next try."""

    def apply(self, batch: Batch) -> Batch:
        """Return the batch to send for `batch`. Raises what the consumer would raise for its rows."""
        if batch.num_rows < ROWS_MIN:
            return batch
        if self._batches_until_retry:
            self._batches_until_retry -= 1
            return batch
        combined = self._combine_if_worthwhile(batch)
        self._pays_off = combined is not None
        if combined is not None:
            self._retry_after_batches = 0
            return combined
        self._batches_until_retry, self._retry_after_batches = (
            self._retry_after_batches,
            min(2 * self._retry_after_batches or 1, PAUSE_MAX),
        )
        return batch

    def _combine_if_worthwhile(self, batch: Batch) -> Batch | None:
        """Return the combined batch, or None if it does not pay off."""
        left_max = batch.num_rows // REDUCTION_MIN
        if not self._pays_off:
            first = self._combiner.combine(batch.slice(0, -(-batch.num_rows // PROBE_PARTS)))
            if first.num_rows > left_max:
                return None
        combined = self._combiner.combine(batch)
        return combined if combined.num_rows <= left_max else None
