"""Early results: which keys of open windows have changed since they were last emitted, and when they are emitted next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import polars as pl

from midstream.engine.core.interfaces import Timer
from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.state.columnar import PartLog

ChangedKeys = Mapping[int, pl.DataFrame]
"""The keys that have changed, by the start of the pane."""


class EarlyResults:
    """Has the keys that have changed, and the timer; `results` computes what is emitted of them, piece by piece.

    A result follows at most `period_us` after its first change, if no round lasts longer. Nothing of this is stored:
    after a restore, all keys in state count as changed. The keys are some of those in state, and leave with them.
    """

    def __init__(self, period_us: int, by: Sequence[str]) -> None:
        self._period_s = period_us / 1_000_000
        self._by = list(by)
        self._changed: dict[int, PartLog] = {}
        self._timer: Timer | None = None
        self._round: Iterator[pl.DataFrame] | None = None
        """What is left of the results that are being emitted."""
        self._context: OperatorContext
        self._results: Callable[[ChangedKeys], Iterator[pl.DataFrame]]
        self._emit: Callable[[pl.DataFrame], None]

    def open(
        self,
        context: OperatorContext,
        results: Callable[[ChangedKeys], Iterator[pl.DataFrame]],
        emit: Callable[[pl.DataFrame], None],
    ) -> None:
        self._context, self._results, self._emit = context, results, emit

    def add(self, pane: int, parts: pl.DataFrame) -> None:
        """Record that the keys of these parts have changed in a pane."""
        log = self._changed.get(pane)
        if log is None:
            log = self._changed[pane] = PartLog(self._distinct)
        log.append(parts.select(self._by), is_merged=False)
        if self._timer is None:
            self._timer = self._context.call_later(self._period_s, self._continue)

    def forget(self, pane: int) -> None:
        """Drop the keys of a pane that has left the state."""
        self._changed.pop(pane, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _distinct(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        return pl.concat(frames).unique(maintain_order=True)

    def _continue(self) -> None:
        """Emit results until the slice is used up; the rest follows in slices of their own, between other work."""
        self._timer = None
        if self._round is None:
            changed, self._changed = self._changed, {}
            self._round = self._results({pane: changed[pane].merged() for pane in sorted(changed)})
        clock, rows = self._context.clock, 0
        end_s = clock.monotonic_s() + self._context.slice_s
        for piece in self._round:
            self._emit(piece)
            rows += piece.height
            if rows >= window_base.SLICE_ROWS or clock.monotonic_s() >= end_s:
                self._timer = self._context.call_later(0, self._continue)
                return
        self._round = None
        if self._changed:
            self._timer = self._context.call_later(self._period_s, self._continue)
