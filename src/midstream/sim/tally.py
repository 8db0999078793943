"""An operator with state that has no key: a list that is dealt out, and numbers that everybody gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from midstream.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.sim.rows import Outside
from midstream.state.parts import Chunk, Redistribute, StatePart

LIST: Final = "list"
UNION: Final = "union"
_LIST_STATE: Final = pa.schema([("id", pa.int64())])
_UNION_STATE: Final = pa.schema([("count", pa.int64())])


class Tally(Operator):
    """Hands every row on, remembers its id (split state), and counts it (union state: subtask 0 goes on from the sum)."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._ids: list[int] = []
        self._count = 0
        self._list: Chunk | None = None
        """As captured last, until more comes."""
        self._out: Output
        self._context: OperatorContext

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open()
        self._out = out
        self._context = context

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if LIST in parts:
            self._ids = parts[LIST].table().column("id").to_pylist()
        if UNION in parts and self._context.subtask == 0:
            self._count = sum(parts[UNION].table().column("count").to_pylist())

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        ids = batch.column("id").to_pylist()
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(ids)
        self._ids += ids
        self._count += len(ids)
        self._list = None
        self._out.emit(batch)

    def finish(self) -> None:
        context = self._context
        if context.uid in self._outside.finished.get((context.job_id, context.attempt), ()):
            self._outside.world.bug(f"{context.uid}/{context.subtask} finishes, and had finished in the checkpoint")

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        parts: dict[str, StatePart] = {}
        new_id = self._context.ids.new_id
        if self._ids:
            self._list = self._list or Chunk(new_id(), pa.table([self._ids], schema=_LIST_STATE))
            parts[LIST] = StatePart(Redistribute.SPLIT, (self._list,))
        counts = Chunk(new_id(), pa.table([[self._count]], schema=_UNION_STATE))
        parts[UNION] = StatePart(Redistribute.UNION, (counts,))
        return Snapshot(SnapshotResult(parts))
