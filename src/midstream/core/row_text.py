"""A row as an error shows it: its values, so that whoever reads the message can find it in the input. And what of a job's
text can be printed."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from midstream.core.values import to_python

VALUE_CHARS_MAX: Final = 80
ROW_CHARS_MAX: Final = 600


def row_text(batch: pa.RecordBatch, row: int) -> str:
    """`{'n': 4, 's': 'abc'}`; long values and long rows are shortened."""
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
    """The first value, as people write it: text as it is, others as Python shows them."""
    try:
        value = to_python(column)[0]
        return value if isinstance(value, str) else repr(value) if isinstance(value, bytes) else str(value)
    except Exception:  # noqa: BLE001 - a value that Python cannot represent is shown as Arrow does
        return _as_arrow_shows(column)


def _as_arrow_shows(column: pa.Array[Any]) -> str:
    """Not by way of a scalar: those that Python cannot represent have no text either."""
    shown = column.slice(0, 1).to_string(indent=0, window=1, skip_new_lines=True)
    return " ".join(shown.removeprefix("[").removesuffix("]").split())


def _value(column: pa.Array[Any]) -> str:
    try:
        text = repr(to_python(column)[0])
    except Exception:  # noqa: BLE001 - a value that Python cannot represent may be what the error is about
        text = _as_arrow_shows(column)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"


def sendable(text: str) -> str:
    """`text` as UTF-8 can hold it: half a surrogate pair, as in the name of a file that is no UTF-8, is written out."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """`text` without control characters: a name or a value in a job must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def counted(number: int, one: str) -> str:
    """Such as "1 row" and "2,000 rows", of a word that takes an s."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"
