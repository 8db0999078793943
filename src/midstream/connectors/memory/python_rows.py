"""Rows as dicts of Python values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import first_without_python, to_python


def table_rows(
    table: pa.Table, where: str = "", instead: str = "look at the rows as an Arrow table"
) -> list[dict[str, Any]]:
    """Return rows as dicts. Raises SchemaError for a value without a Python form, such as a time after the year 9999.

    `where`: what the message begins with. `instead`: what to do with such rows.
    """
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(to_python(column))
        except (ValueError, OverflowError) as error:
            row, why = first_without_python(column)
            raise SchemaError(
                f"{where}row {row}: column {name!r} is {column.type}, and Python cannot hold its value "
                f"{_text(column, row)}: {why}; {instead}"
            ) from error
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _text(column: pa.ChunkedArray[Any], number: int) -> str:
    """Format a value that has no Python form, as Arrow writes it."""
    try:
        text = str(column.slice(number, 1).cast(pa.string())[0].as_py())
    except pa.ArrowException:  # a list, a struct, a map
        text = " ".join(str(column.slice(number, 1).combine_chunks()).split())
    return f"{text[:80]}…" if len(text) > 80 else text
