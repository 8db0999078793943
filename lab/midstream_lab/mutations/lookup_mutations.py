"""Known bugs of functions that are called outside of the loop, to be put back on purpose. See `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from midstream.engine.operators.async_map import AsyncMapOperator
from midstream.engine.operators.base import NOTHING
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.task_operators import TaskOperators
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.scenario import draw


def rows_in_flight_are_not_stored() -> Replacements:
    """Rows that have been called are not in the checkpoint."""
    return [(AsyncMapOperator, "snapshot", lambda self, checkpoint_id: NOTHING)]


def watermark_overtakes_calls() -> Replacements:
    """A watermark leaves before the results of the rows before it."""

    def advance_watermark(self: Any, watermark_us: int) -> bool:
        self._out.watermark(watermark_us)
        return True

    return [(AsyncMapOperator, "advance_watermark", advance_watermark)]


def results_as_they_come() -> Replacements:
    """Results that must have the order of their rows are emitted as they come."""
    original = AsyncMapOperator._emit_in_order

    def emit_in_order(self: Any, segment: Any) -> None:
        for rows in list(segment.rows):
            while rows in segment.rows and rows.emitted == 0 and all(type(each) is dict for each in rows.results):
                self._emit_results(rows, range(len(rows.results)))
        original(self, segment)

    return [(AsyncMapOperator, "_emit_in_order", emit_in_order)]


def emitted_rows_are_stored() -> Replacements:
    """Rows of a batch that have been emitted remain in the checkpoint until its last one has been."""
    original = AsyncMapOperator.snapshot

    def snapshot(self: Any, checkpoint_id: int) -> Any:
        kept = [(rows, rows.results) for segment in self._segments for rows in segment.rows]
        for rows, results in kept:
            rows.results = [None] * len(results)
        try:
            return original(self, checkpoint_id)
        finally:
            for rows, results in kept:
                rows.results = results

    return [(AsyncMapOperator, "snapshot", snapshot)]


def calls_under_way_at_the_end_are_dropped() -> Replacements:
    """A task ends its data while calls are under way."""
    return [(OperatorChain, "awaits_work", False)]


def outcomes_wait_in_line() -> Replacements:
    """An outcome that must wait for operators after its own holds up all that came later."""

    def next_due(self: Any) -> int | None:
        return 0 if self.due and self.are_ready(self.due[0][0]) else None

    return [(TaskOperators, "next_due", next_due)]


MUTATIONS: Final = named(
    Mutation(
        "rows that have been called are not in the checkpoint",
        rows_in_flight_are_not_stored,
        partial(draw, topology="lookup", faults=("kill_slot",)),
    ),
    Mutation(
        "a watermark overtakes rows that have been called",
        watermark_overtakes_calls,
        partial(draw, topology="lookup", faults=()),
    ),
    Mutation(
        "ordered results are emitted as they come",
        results_as_they_come,
        partial(draw, topology="lookup_in_order", faults=()),
    ),
    Mutation(
        "rows are called again, and emitted twice, after a restore",
        emitted_rows_are_stored,
        partial(draw, topology="lookup", faults=("kill_slot",)),
    ),
    Mutation(
        "an outcome that must wait holds up those of the operators it waits for",
        outcomes_wait_in_line,
        partial(draw, topology="lookup_in_order", faults=()),
    ),
    Mutation(
        "a task ends its data while calls are under way",
        calls_under_way_at_the_end_are_dropped,
        partial(draw, topology="lookup", faults=()),
    ),
)
