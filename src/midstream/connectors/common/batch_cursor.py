"""A split reader over any iterator of batches, which slices them to size and uses the number of rows as the offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from midstream.engine.core.errors import DataError
from midstream.engine.operators.source_api import SplitReader


class BatchCursor(SplitReader):
    """Reads `batches` except for the first `skip_rows`; `offset_rows` is the offset after those.

    `where` names the split in errors. Raises DataError if there are fewer rows than `skip_rows`: the split has
    changed since its offset was recorded.
    """

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        *,
        where: str,
        offset_rows: int = 0,
        skip_rows: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        assert 0 <= skip_rows <= offset_rows, (skip_rows, offset_rows)
        self._batches = batches
        self._where = where
        self._offset_rows = offset_rows
        self._skip_rows = skip_rows
        self._on_close = on_close
        self._rest: pa.RecordBatch | None = None

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        assert rows_max > 0, rows_max
        batch = self._rest if self._rest is not None else self._next()
        if batch is None:
            return None
        self._rest = batch.slice(rows_max) if batch.num_rows > rows_max else None
        batch = batch.slice(0, rows_max)
        self._offset_rows += batch.num_rows
        return batch, self._offset_rows

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch that has rows beyond those to skip."""
        for batch in self._batches:
            if batch.num_rows <= self._skip_rows:
                self._skip_rows -= batch.num_rows
                continue
            batch = batch.slice(self._skip_rows)
            self._skip_rows = 0
            return batch
        if self._skip_rows:
            raise DataError(
                f"{self._where}: ends {self._skip_rows} rows before row {self._offset_rows}, where reading is to "
                "resume; it has changed since it was read"
            )
        return None

    def close(self) -> None:
        self._rest = None
        self._batches = iter(())
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
