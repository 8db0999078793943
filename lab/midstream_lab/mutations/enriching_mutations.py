"""Known bugs of joins with tables that are loaded, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.batches import empty_batch
from midstream.engine.operators.base import NOTHING
from midstream.engine.operators.table_join import TableJoinOperator
from midstream.engine.state.state_parts import Chunk
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios.scenario import Scenario, draw


def rows_before_the_table() -> Replacements:
    """Rows are let through before the table is there, as if it were empty."""
    ready, process = TableJoinOperator.ready, TableJoinOperator.process

    def is_ready(self: Any, wake: Any) -> bool:
        ready(self, wake)
        return True

    def process_without(self: Any, batch: pa.RecordBatch, port: int) -> None:
        if self._version is None:
            columns = empty_batch(self.schema).columns[batch.num_columns :]
            nulls = [pa.nulls(batch.num_rows, column.type) for column in columns]
            self._out.emit(pa.RecordBatch.from_arrays([*batch.columns, *nulls], schema=self.schema))
        else:
            process(self, batch, port)

    return [(TableJoinOperator, "ready", is_ready), (TableJoinOperator, "process", process_without)]


def tables_are_loaded_again() -> Replacements:
    """A restore does not continue with the version of the checkpoint, but loads the next."""
    return [(TableJoinOperator, "restore", nothing)]


def tables_are_not_stored() -> Replacements:
    """A checkpoint does not have the version of the table."""
    return [(TableJoinOperator, "snapshot", lambda self, checkpoint_id: NOTHING)]


def versions_share_a_chunk() -> Replacements:
    """A version has the id of the chunk of the one before, so that it is not stored where a checkpoint holds that."""
    original = TableJoinOperator._replace

    def _replace(self: Any, version: Any) -> None:
        before = self._version
        if before is not None:
            version = replace(version, chunk=Chunk(before.chunk.id, version.chunk.table))
        original(self, version)

    return [(TableJoinOperator, "_replace", _replace)]


def enriching(seed: int) -> Scenario:
    drawn = draw(seed, topology="enriched", faults=("kill_slot",), rows=150)
    return replace(drawn, interval_s=0.01)


MUTATIONS: Final = named(
    Mutation("rows are joined with a table before it is loaded", rows_before_the_table, enriching),
    Mutation("a restore loads the table again", tables_are_loaded_again, enriching),
    Mutation("checkpoints lack the table", tables_are_not_stored, enriching),
    Mutation("two versions of a table have one chunk", versions_share_a_chunk, enriching),
)
