"""Rows in the text of errors, with the values by which they can be found in the input; and safe printing of a job's
text.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.python_values import to_python

VALUE_CHARS_MAX: Final = 80
ROW_CHARS_MAX: Final = 600


def row_text(batch: pa.RecordBatch, row: int) -> str:
    """Format a row, such as `{'n': 4, 's': 'abc'}`; long values and long rows are shortened."""
    shown: list[str] = []
    left = ROW_CHARS_MAX
    for field, column in zip(batch.schema, batch.columns, strict=True):
        text = f"{field.name!r}: {_value(column.slice(row, 1))}"
        left -= len(text)
        if left < 0 and shown:
            shown.append(f"… {batch.num_columns - len(shown)} more columns")
            break
        shown.append(text)
    return f"{{{', '.join(shown)}}}"


def value_text(column: pa.Array[Any]) -> str:
    """Format the first value: strings as they are, others as Python shows them."""
    try:
        value = to_python(column)[0]
        return value if isinstance(value, str) else repr(value) if isinstance(value, bytes) else str(value)
    except Exception:  # noqa: BLE001 - a value that Python cannot represent is shown as Arrow does
        return _as_arrow_shows(column)


def _as_arrow_shows(column: pa.Array[Any]) -> str:
    """Format the first value with Arrow, from the array: a scalar that Python cannot represent has no text."""
    shown = column.slice(0, 1).to_string(indent=0, window=1, skip_new_lines=True)
    return " ".join(shown.removeprefix("[").removesuffix("]").split())


def literal_text(column: pa.Array[Any]) -> str:
    """Format the first value as in a program, strings in quotes."""
    try:
        return repr(to_python(column)[0])
    except Exception:  # noqa: BLE001 - a value that Python cannot represent may be what the error is about
        return _as_arrow_shows(column)


def _value(column: pa.Array[Any]) -> str:
    text = literal_text(column)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"


def sendable(text: str) -> str:
    """Return `text` as UTF-8 can hold it: an unpaired surrogate, as in a file name that is not UTF-8, is escaped."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """Replace the control characters in `text`: a name or value in a job must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def counted(number: int, one: str) -> str:
    """Format a count, such as "1 row" and "2,000 rows", for a noun whose plural ends in s."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"
