"""Rows as the text that COPY reads.

The text is CSV, made by Arrow a column at a time. Strings are always quoted and NULL is not, which distinguishes them.
The server reads the text into the types of the table, and refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from midstream.connectors.postgres.postgres_tables import TableColumn
from midstream.connectors.postgres.postgres_types import first_misfit
from midstream.engine.core.arrow_types import is_list_of_any_length, is_text, join_texts
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import shown

_CSV = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


def encode(batch: pa.RecordBatch, targets: Sequence[TableColumn], before: int, where: str) -> bytes:
    """Encode the rows as CSV without a header, for the columns `targets`.

    Raises SchemaError if a value has no form in PostgreSQL, or would be changed by its column; `before` is the number
    of earlier rows of this part.
    """
    columns = []
    for name, column, target in zip(batch.schema.names, batch.columns, targets, strict=True):
        misfit = first_misfit(column, target.kept)
        if misfit is not None:
            row, value, why = misfit
            raise SchemaError(
                f"{where}: row {before + row} since the last checkpoint: column {name!r} is {target.type} in the "
                f"table, which would change {shown(value)}: {why}"
            )
        try:
            columns.append(_plain(column, target.kept.base))
        except pa.ArrowException as error:
            raise SchemaError(
                f"{where}: column {name!r} is {column.type}, and a value of it has no form in PostgreSQL: {error}"
            ) from error
    stream = pa.BufferOutputStream()
    plain = pa.RecordBatch.from_arrays(columns, names=[f"c{i}" for i in range(len(columns))])
    pyarrow.csv.write_csv(plain, stream, write_options=_CSV)
    encoded: bytes = stream.getvalue().to_pybytes()
    return encoded


def _plain(column: pa.Array[Any], base: str) -> pa.Array[Any]:
    """Convert the column to a type whose CSV form a column of type `base` reads."""
    kind = column.type
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        series = _series(column.cast(pa.large_binary()))
        return ("\\x" + series.bin.encode("hex")).to_arrow()
    if pa.types.is_duration(kind):
        microseconds = pc.cast(column, pa.duration("us")).cast(pa.int64()).cast(pa.large_string())
        words = (pa.scalar(text, pa.large_string()) for text in ("microseconds", " "))
        return join_texts(microseconds, *words)
    if pa.types.is_timestamp(kind):
        # in UTC, since the offsets of a zone's early years have seconds, which the text would lose
        return column.cast(pa.timestamp("us", None if kind.tz is None else "UTC"))
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return column.cast(pa.time64("us"))
    if pa.types.is_date64(kind):
        return column.cast(pa.date32())
    if pa.types.is_floating(kind):  # the digits that identify a 32-bit float identify another 64-bit float
        return column.cast(pa.float32() if base == "float4" else pa.float64())
    if is_list_of_any_length(kind):
        floats = pa.types.is_floating(kind.value_type) and base != "float4"
        return _array_literals(column.cast(pa.large_list(pa.float64())) if floats else column)
    return column


def _array_literals(column: pa.Array[Any]) -> pa.Array[Any]:
    """Format array literals, such as `{1,NULL,2}`; strings in quotes, with the special characters of arrays escaped."""
    element = pl.element().cast(pl.String)
    if is_text(column.type.value_type):
        for special in ("\\", '"'):
            element = element.str.replace_all(special, "\\" + special, literal=True)
        element = '"' + element + '"'
    joined = _series(column).list.eval(element.fill_null("NULL")).list.join(",")
    literals: pl.Series = "{" + joined + "}"
    return literals.to_arrow()


def _series(column: pa.Array[Any]) -> pl.Series:
    series = pl.from_arrow(column)
    assert isinstance(series, pl.Series)
    return series
