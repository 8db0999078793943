"""The inputs of a test: rows as batches of a source's schema, instants, and where batches are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, TypeVar

import polars as pl
import pyarrow as pa

from midstream.connectors.memory.collection_source import from_rows
from midstream.engine.core.arrow_types import TimestampType
from midstream.engine.core.batches import conform, single_batch, to_arrow
from midstream.engine.core.errors import ConfigError, MidstreamError, SchemaError
from midstream.engine.core.job_pickle import pickled, unpickled_apart
from midstream.engine.operators.functions.process_context import instant_us

T = TypeVar("T")
Rows: TypeAlias = "Iterable[Mapping[str, Any]] | Mapping[str, Any] | pl.DataFrame | pa.Table | pa.RecordBatch"
"""Dicts, a single dict, a polars frame, or an Arrow table or batch."""
Instant: TypeAlias = "str | datetime | int"
"""An ISO string such as "2024-01-01 12:05", a datetime (UTC if it has no zone), or microseconds since 1970."""
Cut: TypeAlias = 'int | Literal["whole"] | Sequence[int]'
"""The most rows of a batch; "whole" for all of one input; or that of each batch, of which the last one is repeated."""


FIRST_US: Final = instant_us(datetime.min)
LAST_US: Final = instant_us(datetime.max)


def as_batch(rows: Rows | str, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Convert `rows` to exactly the columns and types of `schema`, as the source would return them.

    A column that a dict does not have is null; a string in a timestamp column is read as ISO. Raises SchemaError for a
    column that is not in the schema or a value that does not fit.
    """
    if isinstance(rows, pa.RecordBatch):
        return conform(rows, schema, where)
    if isinstance(rows, (pa.Table, pl.DataFrame)):
        return conform(single_batch(to_arrow(rows) if isinstance(rows, pl.DataFrame) else rows), schema, where)
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise SchemaError(f"{where}: {rows!r} are not rows; give a list of dicts, a polars frame or an Arrow table")
    listed = [rows] if isinstance(rows, Mapping) else list(rows)
    for at, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise SchemaError(f"{where}: row {at} is {row!r}, not a dict of column names to values")
    instants = {field.name: kind for field in schema if pa.types.is_timestamp(kind := field.type)}
    made = [_with_instants(row, instants, f"{where}: row {at}") for at, row in enumerate(listed)]
    try:
        return from_rows(made, schema)._batch
    except SchemaError as error:
        raise SchemaError(f"{where}: {str(error).removeprefix('from_collection: ')}") from error


def _with_instants(row: Mapping[str, Any], instants: Mapping[str, TimestampType], where: str) -> Mapping[str, Any]:
    texts = {name: value for name, value in row.items() if name in instants and isinstance(value, str)}
    if not texts:
        return row
    return {**row, **{name: _datetime(text, instants[name].tz, f"{where}: {name}") for name, text in texts.items()}}


def _datetime(text: str, zone: str | None, where: str) -> datetime:
    at = _parsed(text, where, SchemaError)
    if zone is not None:
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    if at.tzinfo is not None:
        raise SchemaError(f"{where}: {text!r} has a zone, but the column has none")
    return at


def _parsed(text: str, where: str, error: type[MidstreamError]) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise error(f"{where}: {text!r} is not a time; write for example '2024-01-01 12:05:30'") from None


def as_us(at: Instant, where: str) -> int:
    """Convert an instant to microseconds since the epoch. Raises ConfigError for any other value."""
    if isinstance(at, str):
        at = _parsed(at, where, ConfigError)
    if isinstance(at, bool) or not isinstance(at, (datetime, int)):
        raise ConfigError(f"{where}: {at!r} is not a time; give a datetime, or a string such as '2024-01-01 12:05:30'")
    if isinstance(at, int) and not FIRST_US <= at <= LAST_US:
        raise ConfigError(f"{where}: {at} is, in microseconds since 1970, outside of the years 1 to 9999")
    return instant_us(at)


def as_sent(thing: T, name: str, advice: str = "") -> T:
    """Return a copy, as a slot or a restarted driver gets it. Raises AssertionError if it does not pickle."""
    try:
        copied: T = unpickled_apart(pickled(thing))
    except Exception as error:
        raise AssertionError(
            f"{name} does not pickle ({type(error).__name__}: {error}), so it cannot be sent to the slots{advice}"
        ) from error
    return copied


def batches(batch: pa.RecordBatch, cut: Cut) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in parts. Raises ConfigError for an invalid cut."""
    if cut == "whole":
        sizes: Sequence[Any] = [max(1, batch.num_rows)]
    else:
        sizes = cut if isinstance(cut, (list, tuple)) else [cut]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"cut: {cut!r}; give a number of rows, 'whole', or a list of numbers of rows")
    first = number = 0
    while first < batch.num_rows:
        size = sizes[min(number, len(sizes) - 1)]
        yield batch.slice(first, size)
        first, number = first + size, number + 1
