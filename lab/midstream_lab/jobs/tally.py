"""Parts that only some jobs have: an operator with state without a key (a list that is distributed, and counts that every
subtask receives), and a source that is notified of completed checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.source_api import Split
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.simulation.network import SIM
from midstream_lab.jobs.recorded_rows import Outside, SimSource

LIST: Final = "list"
UNION: Final = "union"
_LIST_STATE: Final = pa.schema([("id", pa.int64())])
_UNION_STATE: Final = pa.schema([("count", pa.int64())])


class Tally(Operator):
    """Forwards every row, keeps its id (split state), and counts it (union state: subtask 0 continues from the sum)."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._ids: list[int] = []
        self._count = 0
        self._list: Chunk | None = None
        """The chunk of the last snapshot, until more rows arrive."""
        self._out: Output
        self._context: OperatorContext

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open(context)
        self._out = out
        self._context = context

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if LIST in parts:
            self._ids = to_list(parts[LIST].table().column("id"))
        if UNION in parts and self._context.subtask == 0:
            self._count = sum(to_list(parts[UNION].table().column("count")))

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        ids = to_list(batch.column("id"))
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(ids)
        self._ids += ids
        self._count += len(ids)
        self._list = None
        self._out.emit(batch)

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        parts: dict[str, StatePart] = {}
        new_id = self._context.ids.new_id
        if self._ids:
            self._list = self._list or Chunk(new_id(), pa.table([self._ids], schema=_LIST_STATE))
            parts[LIST] = StatePart(Redistribute.SPLIT, (self._list,))
        counts = Chunk(new_id(), pa.table([[self._count]], schema=_UNION_STATE))
        parts[UNION] = StatePart(Redistribute.UNION, (counts,))
        return Snapshot(SnapshotResult(parts))


class NotifiedSource(SimSource):
    """A source that is notified of completed checkpoints, and checks that their unfinished splits have been discovered."""

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        world = self.outside.world
        world.io_point()
        if self.outside.read_failures:
            self.outside.read_failures -= 1
            raise StorageError(f"the system of the source does not answer {SIM}")
        safe = position, frozenset((split.id, split.offset) for split in unfinished or ())
        if safe not in self.outside.safe.get(self.number, ()):
            world.bug(f"source {self.number} is notified that {safe} is in a complete checkpoint, and it is in none")
        found = int(position) if position else 0
        for split in unfinished or ():
            number = int(split.id.split("-")[1])
            if number >= found or split.offset > self.rows[number]:
                world.bug(f"split {split.id} is unfinished at row {split.offset}, in a checkpoint with {found} splits")
