"""Checks of arguments that all calls of the API share, and the line of a call in the user's code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any

import polars as pl
import pyarrow as pa

import midstream
from midstream.engine.core.errors import ConfigError, JobError, SchemaError

_PACKAGE = os.path.dirname(os.path.abspath(midstream.__file__)) + os.sep
_UID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


def is_own_file(filename: str) -> bool:
    """Return whether that source file belongs to midstream rather than to the user."""
    return os.path.abspath(filename).startswith(_PACKAGE)


def calling_file() -> str | None:
    """Return the file of the nearest caller outside midstream; None if its code has no file (a shell)."""
    frame = _user_frame()
    return frame.f_code.co_filename if frame is not None and os.path.exists(frame.f_code.co_filename) else None


def calling_module() -> dict[str, Any]:
    """Return the global variables of the nearest caller outside midstream."""
    frame = _user_frame()
    return {} if frame is None else frame.f_globals


def calling_line() -> str:
    """Return `job.py:12`, the line at which the user's code called midstream; "" if it is unknown."""
    frame = _user_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def raised_at(error: BaseException) -> str:
    """Return `job.py:12`, the innermost line of the user's code that the exception passed; "" if there is none."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_own_file(frame.f_code.co_filename):
            location = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return location


def _user_frame() -> Any:
    frame = sys._getframe(1)
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def check_uid(uid: str | None, where: str) -> None:
    if uid is not None and (not isinstance(uid, str) or not _UID.fullmatch(uid)):
        raise ConfigError(
            f"{where}: uid {uid!r} cannot be one; use up to 128 letters, digits, '_', '.', ':' or '-', "
            "beginning with a letter, digit or '_'"
        )


def check_name(name: str | None, kind: str) -> str:
    """Return the operator's display name."""
    if name is None:
        return kind
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"operator {kind!r}: name {name!r} is not a text to show")
    return name


def columns_text(schema: pa.Schema) -> str:
    return ", ".join(schema.names) or "no columns"


def require_column(schema: pa.Schema, name: object, where: str, what: str, advice: str) -> pa.Field[Any]:
    """Return the field of that name. Raises SchemaError with the existing columns and what to do."""
    if not isinstance(name, str):
        raise JobError(f"{where}: {name!r} is not a column name. {advice}")
    index = schema.get_field_index(name)
    if index < 0:
        raise SchemaError(f"{where}: {what} {name!r} is not in the stream's schema ({columns_text(schema)}). {advice}")
    return schema.field(index)


def check_no_patterns(schema: pa.Schema, where: str) -> None:
    """Raise SchemaError for a column whose name polars reads as a pattern: an aggregate of it would read other columns."""
    for name in schema.names:
        if pl.col(name).meta.has_multiple_outputs():
            raise SchemaError(
                f"{where}: polars reads the name of column {name!r} as a pattern of names; rename it before, for example "
                f"with rename({{{name!r}: 'c'}})"
            )


def require_callable(function: object, where: str, example: str) -> None:
    if not callable(function):
        raise JobError(f"{where}: {function!r} is not a function; {example}")
