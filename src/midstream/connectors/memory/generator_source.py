"""Rows computed from their index: the deterministic source of benchmarks, examples and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, conform, single_batch, to_arrow
from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.core.python_values import kind_of, shown
from midstream.engine.core.schemas import check_schema, checked_name
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
)

Rows: TypeAlias = pa.RecordBatch | Mapping[str, Any] | pl.DataFrame
Generate: TypeAlias = Callable[[npt.NDArray[np.int64]], Rows]

_ALL = b"all"
"""With this begins the position, which is after all splits."""
_ENDLESS_SPLITS = 16
_ENDLESS_ROWS_MAX = 8192
"""The rows per turn of an endless split; splits are read in turns, and small steps keep their indices close together."""


class IndexRange(msgspec.Struct, frozen=True):
    """The indices start, start + step … below `stop` (None: no limit). A split's offset counts the indices done."""

    start: int
    stop: int | None
    step: int = 1


class IndexSource(Source):
    """Base of sources whose rows have indices, from 0 to `count` (None: endless), which are cut into `splits`.

    `splits`: by default one per subtask. Indices are cut into contiguous ranges of almost equal length, endless ones
    into interleaved streams.
    """

    blocking = False

    def __init__(self, schema: pa.Schema, count: int | None, splits: int | None, rows_per_s: float | None) -> None:
        where = type(self).__name__
        if splits is not None and not is_whole(splits, 1):
            raise ConfigError(f"{where}: splits {splits!r} is not a positive whole number")
        check_rate(rows_per_s, where)
        self.rows_per_s = rows_per_s
        self.schema = schema
        self._count = count
        self._splits = splits

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        splits = self._splits or context.parallelism
        if position is not None:
            ranges = []
        elif self._count is None:
            ranges = [IndexRange(k, None, splits) for k in range(splits)]
        else:
            cuts = [self._count * k // splits for k in range(splits + 1)]
            ranges = [IndexRange(a, b) for a, b in pairwise(cuts) if a < b]
        found = tuple(Split(f"{k:06d}", msgspec.msgpack.encode(span)) for k, span in enumerate(ranges))
        return Discovery(found, self._all(), exhausted=True)

    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError for a position of another kind of source, or of one with another number of rows."""
        where = type(self).__name__
        if not position.startswith(_ALL):
            raise ConfigError(
                f"{where}: the position to resume from was written by another kind of source; use the source of the "
                "checkpoint, or give this one a new uid"
            )
        if position not in (_ALL, self._all()):
            then, now = (each.removeprefix(_ALL).decode() for each in (position, self._all()))
            raise ConfigError(
                f"{where}: the checkpoint is of a source of{then} rows, and now it has{now}: those that were cut into "
                f"splits then are all that is read; resume with{then} rows, or start over with --fresh"
            )

    def _all(self) -> bytes:
        return _ALL + (b" endless" if self._count is None else b" %d" % self._count)

    def readers_max(self, parallelism: int) -> int:
        """Return how many subtasks have something to read."""
        most = parallelism if self._splits is None else min(parallelism, self._splits)
        return most if self._count is None else max(1, min(most, self._count))


class GeneratorSource(IndexSource):
    """Rows from a function: `fn(indices)` returns one row per index, as a record batch, a polars frame, or a dict of
    columns.

    `count`: rows in all, cut into `splits` contiguous ranges, by default one per subtask. None: endless, as `splits`
    (by default 16) interleaved streams: stream k has the indices k, k + splits, k + 2 * splits …; their number stays
    the same when the job is rescaled. `schema`: by default that of `fn` for the indices 0 to 3. `rows_per_s`: rows per
    second over all subtasks. `fn` must always return the same row for the same index.

    Raises JobError if `fn` fails or returns anything but rows, SchemaError if its columns change.
    """

    def __init__(
        self,
        fn: Generate,
        count: int | None = None,
        *,
        schema: pa.Schema | None = None,
        splits: int | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"GeneratorSource: {fn!r} is not a function of an array of indices")
        if count is not None and not is_whole(count):
            raise ConfigError(f"GeneratorSource: count {count!r} is not a whole number; None means endless")
        if schema is None:
            sample = np.arange(4 if count is None else max(1, min(4, count)), dtype=np.int64)
            schema = call_generator(fn, sample).schema
        check_schema(schema, "GeneratorSource")
        splits = splits if splits is not None or count is not None else _ENDLESS_SPLITS
        super().__init__(canonical_schema(schema), count, splits, rows_per_s)
        self.bounded = count is not None
        self._fn = fn

    def splits_per_reader(self, parallelism: int) -> int:
        if self._count is not None:
            return 1
        assert self._splits is not None
        return -(-self._splits // parallelism)

    def open_split(self, split: Split) -> SplitReader:
        return _GeneratorReader(
            self._fn, self.schema, decoded(split.payload, IndexRange, "GeneratorSource"), split.offset
        )

    def place(self, split: Split, first: int, last: int) -> str:
        span = decoded(split.payload, IndexRange, "GeneratorSource")
        start, end = (span.start + (split.offset + row) * span.step for row in (first, last))
        return f"index {start}" if start == end else f"one of the indices {start} to {end}"


class _GeneratorReader(SplitReader):
    def __init__(self, fn: Generate, schema: pa.Schema, span: IndexRange, done: int) -> None:
        self._fn = fn
        self._schema = schema
        self._span = span
        self._done = done

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        span = self._span
        first = span.start + self._done * span.step
        rows = min(rows_max, _ENDLESS_ROWS_MAX) if span.stop is None else min(rows_max, span.stop - first)
        if rows <= 0:
            return None
        indices = np.arange(first, first + rows * span.step, span.step, dtype=np.int64)
        batch = conform(call_generator(self._fn, indices), self._schema, "GeneratorSource")
        self._done += rows
        return batch, self._done


def call_generator(fn: Generate, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Return what `fn` returns for `indices`, as one batch with a row for each."""
    where = f"GeneratorSource: the function, called with an array of the indices {indices[0]} to {indices[-1]},"
    try:
        rows = fn(indices)
        if isinstance(rows, pa.RecordBatch):
            batch = rows
        elif isinstance(rows, pl.DataFrame):
            batch = single_batch(to_arrow(rows))
        elif isinstance(rows, Mapping):
            batch = _from_columns(rows)
        else:
            raise JobError(
                f"{where} returned {type(rows).__name__}; it must return a record batch, a polars frame or a dict of "
                "columns"
            )
    except (JobError, SchemaError):
        raise
    except Exception as error:
        raise JobError(f"{where} failed: {type(error).__name__}: {error}") from error
    if batch.num_rows != len(indices):
        raise JobError(
            f"{where} returned {batch.num_rows} rows; it must return one for each of the {len(indices)} indices"
        )
    return batch


def _column(name: str, column: Any) -> pa.Array[Any]:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, np.ndarray):
        column = column.copy()  # a function may fill the same array again for the next batch
    is_array = hasattr(column, "__array__") or hasattr(column, "__arrow_c_array__") or isinstance(column, Sequence)
    if not is_array or isinstance(column, (str, bytes, bytearray, np.generic)):  # a text is a sequence of characters
        raise JobError(
            f"GeneratorSource: column {name!r} is {kind_of(column)}: {shown(column)}; return an array, a list or a Series with a "
            "value for each index, for a constant [value] * len(indices)"
        )
    made: pa.Array[Any] = pa.array(column)
    return made


def _from_columns(columns: Mapping[str, Any]) -> pa.RecordBatch:
    if not columns:
        raise SchemaError("GeneratorSource: the function returned no columns")
    arrays = [_column(name, column) for name, column in columns.items()]
    for name, array in zip(columns, arrays, strict=True):
        if len(array) != len(arrays[0]):
            raise SchemaError(
                f"GeneratorSource: column {name!r} has {len(array)} rows, column {next(iter(columns))!r} {len(arrays[0])}"
            )
    return pa.RecordBatch.from_arrays(arrays, names=[checked_name(name, "GeneratorSource") for name in columns])
