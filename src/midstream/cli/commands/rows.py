"""`midstream rows`: shows rows that an operator emits at the moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.error_text import RequestFailed
from midstream.cli.job_targets import client_of, named
from midstream.cli.output import Answer
from midstream.engine.core.errors import ConfigError
from midstream.engine.protocol.live_rows import ROWS_MAX, WAIT_S, GetRows, LiveRows

ANSWER_S_MAX = WAIT_S + 15.0
_NULL: Final = Text("null", style="dim")


def show_rows(job: str, operator: str, rows: int) -> Answer:
    """Show up to `rows` of the next rows that an operator emits or, for a sink, receives.

    Raises ConfigError for a number that is not from 1 to ROWS_MAX, JobError when there is no such job, RequestFailed
    when it has no such operator.
    """
    if not 1 <= rows <= ROWS_MAX:
        raise ConfigError(f"-n: {rows} is not from 1 to {ROWS_MAX}")
    if not 1 <= len(operator) <= 1000:
        raise ConfigError(f"operator {operator[:50]!r}: give the uid or the name of an operator of the job")
    entry = named(job)
    with client_of(entry) as client:
        reply = client.request(GetRows(operator, rows), ANSWER_S_MAX)
    if reply.rows is None:
        raise RequestFailed(f"job {entry.name} ({entry.job_id}): {reply.error}")
    return Answer(reply.rows, rows_view(reply.rows))


def rows_view(seen: LiveRows) -> RenderableType:
    """Return a table with the types of columns in its header."""
    name, giver = formatting.printable(seen.name), formatting.printable(seen.given_out_by)
    what = f"{name} emits" if name == giver else f"{giver} sends to {name}"
    shown = seen.shown
    if shown is None:
        return Text(f"no rows that {what} passed within {seen.waited_s:g} s")
    table = table_of_values(((column.name, column.type) for column in shown.columns), shown.rows)
    more = f"; {shown.columns_left_out} more columns are left out" if shown.columns_left_out else ""
    heading = f"{len(shown.rows)} of the {formatting.rows(shown.batch_rows)} rows of a batch that {what}, subtask {shown.subtask}{more}"
    return Group(Text(heading, style="dim"), table)


def table_of_values(columns: Iterable[tuple[str, str]], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table with the name and type of each column in its header, and a line for each row."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, kind in columns:
        table.add_column(Text(formatting.printable(f"{name}\n{kind}")), overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(_NULL if value is None else Text(formatting.on_one_line(str(value))) for value in row))
    return table
