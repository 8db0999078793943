"""Known bugs of operators that get no late rows, to be put back on purpose. See `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from midstream.engine.operators.functions import duplicates
from midstream.engine.operators.functions.on_time_functions import PROGRESS, OnTimeFunctionOperator
from midstream.engine.state.state_parts import StatePart
from midstream.engine.state.table_state import TableState
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of
from midstream_lab.scenarios.scenario import draw


def late_rows_are_on_time_after_a_restore() -> Replacements:
    """The progress of event time is not restored."""
    original = OnTimeFunctionOperator.restore

    def restore(self: Any, parts: Mapping[str, StatePart]) -> None:
        original(self, {name: part for name, part in parts.items() if name != PROGRESS})

    return [(OnTimeFunctionOperator, "restore", restore)]


def late_rows_are_processed() -> Replacements:
    """All rows are given to the function, whatever event time has passed."""

    def process(self: Any, batch: pa.RecordBatch, port: int) -> None:
        self._call(batch, port)

    return [(OnTimeFunctionOperator, "process", process)]


def rows_are_due_too_soon() -> Replacements:
    """Rows leave their table some milliseconds before event time has passed them."""
    original = TableState.pop_until_tick
    return [(TableState, "pop_until_tick", lambda self, column, tick: original(self, column, tick + 3_000))]


def other_kept_rows_are_not_compared() -> Replacements:
    """If several rows of a key were kept before, none of them is compared with new ones."""
    return [(duplicates, "_near_known", lambda numbers, *rest: np.zeros(len(numbers) - rest[1], np.bool_))]


def later_rows_of_a_batch_are_dropped() -> Replacements:
    """Of each key and batch one row is kept at most."""
    return [(duplicates, "_keep_one_by_one", lambda *_: None)]


MUTATIONS: Final = named(
    Mutation(
        "after a restore, late rows are processed",
        late_rows_are_on_time_after_a_restore,
        partial(draw, topology="unique_near", faults=("kill_slot",), rows=200),
    ),
    Mutation("late rows are processed", late_rows_are_processed, of("unique_near")),
    Mutation("rows are sorted before event time has passed them", rows_are_due_too_soon, of("sorted")),
    Mutation(
        "of several kept rows of a key none is compared with new ones",
        other_kept_rows_are_not_compared,
        of("unique_near"),
    ),
    Mutation(
        "of the rows of a key that share a batch one is kept", later_rows_of_a_batch_are_dropped, of("unique_near")
    ),
)
