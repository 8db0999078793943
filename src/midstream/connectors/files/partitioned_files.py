"""Rows of a subtask in Parquet files by partition of a table, between two checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from midstream.connectors.common.async_writer import AsyncPart
from midstream.connectors.common.table_columns import as_stored, check_required, nan_columns, nullable
from midstream.connectors.files.rolling_files import OpenFile, RollingFiles, explained

Partition = tuple[object, ...]
"""The values of a partition."""

HELD_BYTES: Final = 64 * 2**20
"""The memory for rows of one subtask, over all partitions."""
OPEN_MAX: Final = 32
"""The number of files of one subtask, one per partition, that stay open when memory is short."""


class PartitionedPart(AsyncPart):
    """The files of one subtask between two checkpoints, at least one per partition that has rows.

    `schema`: the stream's columns in the table's types; where a column is not nullable, a null is refused.
    `roll_bytes`: a file is closed when it has about this size.
    """

    def __init__(self, schema: pa.Schema, roll_bytes: int, where: str) -> None:
        super().__init__()
        self._schema = schema
        self._nullable = nullable(schema)
        self._roll_bytes = roll_bytes
        self._where = where
        self._partitions: dict[Partition, RollingFiles] = {}
        self._ended: list[tuple[Partition, OpenFile]] = []
        self._rows = 0
        """The number of rows before the batch that is being written."""
        self._unbounded: set[str] = set()
        """Columns with NaN."""

    @abstractmethod
    def _parts(self, batch: pa.RecordBatch) -> Iterable[tuple[Partition, pa.RecordBatch]]:
        """Group rows by partition, with the columns that its files have. Raises SchemaError for a row without one."""

    def _arranged(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a row group in the order in which they are written."""
        return rows

    @abstractmethod
    def _new_file(self, values: Partition) -> OpenFile: ...

    @abstractmethod
    def _committables(self, ended: Sequence[tuple[Partition, OpenFile]], checkpoint_id: int) -> list[bytes]: ...

    def _write(self, batch: pa.RecordBatch) -> None:
        batch = check_required(as_stored(batch, self._nullable, self._where), self._schema, self._where)
        self._unbounded |= nan_columns(batch)
        with explained(f"{self._where}: cannot write"):
            for values, rows in self._parts(batch):
                if values not in self._partitions:
                    new_file = partial(self._new_file, values)
                    self._partitions[values] = RollingFiles(new_file, self._roll_bytes, self._arranged)
                self._partitions[values].write(rows)
            if sum(files.held_bytes for files in self._partitions.values()) >= HELD_BYTES:
                self._flush()
        self._rows += batch.num_rows

    def _flush(self) -> None:
        for files in self._partitions.values():
            files.flush()
        if len(self._partitions) > OPEN_MAX:
            self._end_all()

    def _end_all(self) -> None:
        for values, files in self._partitions.items():
            self._ended += [(values, file) for file in files.end()]
        self._partitions.clear()

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        with explained(f"{self._where}: cannot write"):
            self._end_all()
            return self._committables(self._ended, checkpoint_id)

    def _discard(self) -> None:
        for files in self._partitions.values():
            files.discard()
        for _, file in self._ended:
            file.discard()
