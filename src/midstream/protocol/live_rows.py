"""A look at the rows that an operator gives out right now: asked by people, answered by the next batch.

    client ─GetRows→ driver ─ShowRows→ every slot ─RowsShown→ driver ─Reply→ client

The coordinator has no part in it. Values travel as text, and everything is bounded, so that a look at a wide table or
at large values costs a job no more than one at small ones.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

ROWS_MAX: Final = 100
COLUMNS_MAX: Final = 50
VALUE_CHARS_MAX: Final = 200
NAME_CHARS_MAX: Final = 200
CHARS_MAX: Final = 256 * 1024
"""Of all values together."""
WAIT_S: Final = 5.0
"""So long the next batch is waited for."""

Uid = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
RowCount = Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Value = Annotated[str, msgspec.Meta(max_length=VALUE_CHARS_MAX)]


class GetRows(msgspec.Struct, frozen=True, tag="get_rows"):
    """Up to `rows` of the next rows that an operator gives out. Of a sink: that it takes in."""

    operator: Uid
    """Its uid or name."""
    rows: RowCount = 20


class ShowRows(msgspec.Struct, frozen=True, tag="show_rows"):
    number: int
    operator: Uid
    """The uid of the one whose output is shown."""
    side_output: str | None
    rows: RowCount


class Column(msgspec.Struct, frozen=True):
    name: _Name
    type: _Name
    """In Arrow's words."""


class RowsShown(msgspec.Struct, frozen=True, tag="rows_shown"):
    """The first rows of one batch."""

    number: int
    subtask: int
    columns: Annotated[tuple[Column, ...], msgspec.Meta(max_length=COLUMNS_MAX)]
    rows: Annotated[
        tuple[Annotated[tuple[_Value | None, ...], msgspec.Meta(max_length=COLUMNS_MAX)], ...],
        msgspec.Meta(max_length=ROWS_MAX),
    ]
    """Values as text, shortened where they are long; None for null."""
    batch_rows: int
    """How many rows the batch has."""
    columns_left_out: int = 0


class LiveRows(msgspec.Struct, frozen=True):
    """What has been seen; nothing is shown where no row came in time."""

    operator: str
    """The uid of the one that was asked about."""
    name: str
    given_out_by: str
    """The name of the one whose output this is: the operator, or the one before a sink."""
    shown: RowsShown | None
    waited_s: float = WAIT_S
