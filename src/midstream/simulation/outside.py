"""What lies outside of a simulated job's processes: the target of its sinks, and the faults of users' code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.sink_api import WriterContext
from midstream.simulation.network import SIM
from midstream.simulation.world import World

SPLIT_IDS: Final = 10_000
SOURCE_IDS: Final = 10_000_000


def row_id(source: int, split: int, offset: int) -> int:
    """Return the number by which faults know a row: `source` and `split` are numbers, `offset` is its place in the split."""
    return source * SOURCE_IDS + split * SPLIT_IDS + offset


class UserError(Exception):
    """The error of a user's function that fails because of a fault."""


class Outside:
    """The world outside of the job's processes, which outlives them: the sinks' target, and faults of users' code.

    It is pickled by reference, so all operators use the same object.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.staged: dict[str, Staged] = {}
        self.committed: dict[str, None] = {}
        """The committed names, in the order of their first commits."""
        self.under_way: dict[str, None] = {}
        """The names in commits that have begun and not ended."""
        self.newest_committed: dict[str, int] = {}
        """The newest checkpoint with committed output, by sink and job id."""
        self.aborted: dict[str, None] = {}
        self.rolled_back: dict[str, None] = {}
        """The names of output that a sink has removed, or must not commit any more."""
        self.poison: dict[int, int] = {}
        """How many more times a row makes a function fail, by its `row_id`."""
        self.before_commit: Callable[[], None] | None = None
        """Called once in the next commit."""
        self.before_rollback: Callable[[], None] | None = None
        """Called once before a sink rolls back output."""
        self.commit_failures = 0
        """How many of the next commits fail."""
        self.read_failures = 0
        """How many of the next reads of blocking sources fail."""
        self.open_failures = 0
        """How many of the next operators that are opened fail."""
        self.finished: Mapping[tuple[str, int], Set[tuple[str, int]]] = {}
        """The uid and subtask of the operators that had finished in an attempt's checkpoint, by job id and attempt."""
        self.drained: Set[str] = frozenset()
        """The ids of jobs whose sources got the request to end."""

    def strike_commit(self) -> None:
        """Call `before_commit`, once."""
        before_commit, self.before_commit = self.before_commit, None
        if before_commit is not None:
            before_commit()

    def strike_rollback(self) -> None:
        """Call `before_rollback`, once."""
        before_rollback, self.before_rollback = self.before_rollback, None
        if before_rollback is not None:
            before_rollback()

    def check_poison(self, ids: Sequence[int]) -> None:
        for row in ids:
            left = self.poison.get(row, 0)
            if left:
                self.poison[row] = left - 1
                raise UserError(f"{SIM} row {row} is poisonous")

    def check_open(self, context: OperatorContext | WriterContext) -> None:
        if (context.uid, context.subtask) in self.finished.get((context.job_id, context.attempt), ()):
            self.world.bug(f"{context.uid}/{context.subtask} is opened, and had finished in the checkpoint")
        if self.open_failures:
            self.open_failures -= 1
            raise UserError(f"{SIM} this operator cannot be opened")


@dataclass(frozen=True, slots=True)
class Staged:
    sink: str
    rows: pa.RecordBatch
    ids: tuple[int, ...]
    """The ids of the rows, if the sink knows them."""
    job_id: str
    checkpoint_id: int
