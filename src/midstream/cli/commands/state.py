"""`midstream state`: shows the entries of a job's state, read from the files of a checkpoint alone."""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

import msgspec
import polars as pl
import pyarrow as pa
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.commands.rows import table_of_values
from midstream.cli.output import Answer
from midstream.engine.checkpoint.stored_states import Readable
from midstream.engine.core.error_rows import sendable, value_text
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.python_values import to_python
from midstream.runtime.storage.stored_checkpoint import OpenedCheckpoint, open_checkpoint, rows_of

ROWS_MAX: Final = 10_000
_LITERALS: Final = "DATE '2024-01-31', TIMESTAMP '2024-01-31 12:00:00' or, for a column with a zone, TIMESTAMPTZ '2024-01-31 12:00:00Z'"
TRIES: Final = 5


class StateSummary(msgspec.Struct, frozen=True):
    uid: str
    operator: str
    """The name of the operator."""
    name: str
    rows: int
    """The number of rows that are stored, outdated entries included."""
    bytes: int


class StateList(msgspec.Struct, frozen=True):
    path: str
    """The checkpoint."""
    states: tuple[StateSummary, ...]


class StateColumn(msgspec.Struct, frozen=True):
    name: str
    type: str
    """The polars type, as text."""


class StateEntries(msgspec.Struct, frozen=True):
    path: str
    """The checkpoint."""
    uid: str
    name: str
    columns: tuple[StateColumn, ...]
    entries: tuple[dict[str, Any], ...]
    """The entries, with values in the forms that JSON has."""


def show_state(checkpoint: str, uid: str | None, name: str | None, where: str | None, rows: int) -> Answer:
    """List the states of a checkpoint or, with `uid`, show the entries of one.

    Raises StorageError if there is no checkpoint, ConfigError for a state or a condition that does not exist.
    """
    if not 1 <= rows <= ROWS_MAX:
        raise ConfigError(f"--rows: {rows} is not from 1 to {ROWS_MAX}")
    if uid is None and where is not None:
        raise ConfigError("--where selects entries of one state, so give the uid of its operator before it")
    opened = open_checkpoint(checkpoint)
    for _ in range(TRIES):
        try:
            return _listed(opened) if uid is None else _shown(opened, uid, name, where, rows)
        except StorageError:
            newest = open_checkpoint(checkpoint)
            if newest.path == opened.path:
                raise
            opened = newest  # the job has completed another checkpoint meanwhile, and deleted files of this one
    raise StorageError(
        f"{checkpoint}: the job deletes its checkpoints faster than they can be read; make a savepoint of it, and read that"
    )


def _listed(opened: OpenedCheckpoint) -> Answer:
    summaries = (StateSummary(each.uid, each.operator, each.name, each.rows, each.bytes) for each in opened.states)
    listed = StateList(opened.path, tuple(summaries))
    return Answer(listed, _list_view(listed))


def _shown(opened: OpenedCheckpoint, uid: str, name: str | None, where: str | None, rows: int) -> Answer:
    state = opened.state(uid, name)
    frame = _selected(rows_of(opened, state), where, state, rows)
    columns = tuple(StateColumn(column, str(kind)) for column, kind in frame.schema.items())
    values = [_values(column) for column in frame.to_arrow().columns]
    entries = tuple(dict(zip(frame.columns, row, strict=True)) for row in zip(*values, strict=True))
    shown = StateEntries(opened.path, uid, state.name, columns, entries)
    return Answer(shown, _entries_view(shown))


def _selected(found: pl.LazyFrame, where: str | None, state: Readable, rows: int) -> pl.DataFrame:
    if where is None:
        return found.head(rows).collect()
    if sendable(where) != where:
        raise ConfigError(f"--where {sendable(where)!r} is not text in UTF-8")
    schema = found.collect_schema()
    columns = ", ".join(f"{name} {kind}" for name, kind in schema.items())
    hint = f"--where {where!r} is not a condition in SQL on the columns of {state.name!r} ({columns})"
    if any(isinstance(kind, (pl.Date, pl.Datetime)) for kind in schema.values()):
        hint += f"; times are written {_LITERALS}"
    zoned = {name: kind for name, kind in schema.items() if isinstance(kind, pl.Datetime) and kind.time_zone}
    in_utc = [pl.col(name).dt.convert_time_zone("UTC") for name in zoned]  # SQL has times with a zone in UTC alone
    back = [pl.col(name).dt.convert_time_zone(str(kind.time_zone)) for name, kind in zoned.items()]
    try:
        condition = pl.sql_expr(where)
        kind = schema.to_frame().lazy().with_columns(in_utc).select(condition).collect_schema().dtypes()
    except (pl.exceptions.PolarsError, pl.exceptions.SQLInterfaceError) as error:
        raise ConfigError(f"{hint}: {str(error).splitlines()[0]}") from error
    if kind != [pl.Boolean]:
        raise ConfigError(f"{hint}: its values are {', '.join(map(str, kind))}, not true or false")
    try:
        return found.with_columns(in_utc).filter(condition).head(rows).collect().with_columns(back)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(f"{hint}: {str(error).splitlines()[0]}") from error


def _values(column: pa.ChunkedArray[Any]) -> list[object]:
    """Return the values of a column in forms that JSON has; as Arrow shows them if Python cannot hold one of them."""
    try:
        return [_plain(value) for value in to_python(column)]
    except (ValueError, OverflowError):
        whole = column.combine_chunks()
        missing = whole.is_null().to_pylist()
        return [None if missing[row] else value_text(whole.slice(row, 1)) for row in range(len(whole))]


def _plain(value: object) -> object:
    """Return a form of a value that JSON has."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _list_view(listed: StateList) -> RenderableType:
    heading = Text(f"state in {formatting.printable(listed.path)}", style="dim")
    if not listed.states:
        return Group(heading, Text("no operator has any state"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("uid", "operator", "state"):
        table.add_column(header, overflow="fold")
    for header in ("rows", "bytes"):
        table.add_column(header, justify="right", no_wrap=True)
    for state in listed.states:
        names = map(formatting.printable, (state.uid, state.operator, state.name))
        table.add_row(*names, f"≤ {formatting.rows(state.rows)}", formatting.size(state.bytes))
    return Group(heading, table)


def _entries_view(shown: StateEntries) -> RenderableType:
    columns = [(column.name, column.type) for column in shown.columns]
    table = table_of_values(columns, ([entry[name] for name, _ in columns] for entry in shown.entries))
    count = len(shown.entries)
    what = f"{count} entr{'y' if count == 1 else 'ies'} of {formatting.printable(shown.name)}"
    return Group(Text(f"{what} in {formatting.printable(shown.path)}", style="dim"), table)
