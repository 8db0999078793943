"""Live rows: a sample of the rows that an operator emits at the moment, requested by users and taken from the next
batch.

    client ─GetRows→ driver ─SampleRows→ every slot ─RowSample→ driver ─Reply→ client

The coordinator is not involved. Values travel as text, and everything is bounded, so that a sample of a wide table or
of large values costs a job no more than one of small values.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

ROWS_MAX: Final = 100
COLUMNS_MAX: Final = 50
VALUE_CHARS_MAX: Final = 200
NAME_CHARS_MAX: Final = 200
CHARS_MAX: Final = 256 * 1024
"""The limit on the characters of all values together."""
WAIT_S: Final = 5.0
"""The time for which the next batch is awaited."""

Uid = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
RowCount = Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Value = Annotated[str, msgspec.Meta(max_length=VALUE_CHARS_MAX)]


class GetRows(msgspec.Struct, frozen=True, tag="get_rows"):
    """Request up to `rows` of the next rows that an operator emits, or, for a sink, receives."""

    operator: Uid
    """The operator's uid or name."""
    rows: RowCount = 20


class SampleRows(msgspec.Struct, frozen=True, tag="sample_rows"):
    number: int
    operator: Uid
    """The uid of the operator whose output is shown."""
    side_output: str | None
    rows: RowCount


class Column(msgspec.Struct, frozen=True):
    name: _Name
    type: _Name
    """The Arrow type, as text."""


class RowSample(msgspec.Struct, frozen=True, tag="row_sample"):
    """The first rows of one batch."""

    number: int
    subtask: int
    columns: Annotated[tuple[Column, ...], msgspec.Meta(max_length=COLUMNS_MAX)]
    rows: Annotated[
        tuple[Annotated[tuple[_Value | None, ...], msgspec.Meta(max_length=COLUMNS_MAX)], ...],
        msgspec.Meta(max_length=ROWS_MAX),
    ]
    """The values as text, shortened if they are long; None for null."""
    batch_rows: int
    """The number of rows of the batch."""
    columns_left_out: int = 0


class LiveRows(msgspec.Struct, frozen=True):
    """The rows seen; empty if none arrived in time."""

    operator: str
    """The uid of the operator requested."""
    name: str
    given_out_by: str
    """The name of the operator whose output this is: the requested one, or the one before a sink."""
    shown: RowSample | None
    waited_s: float = WAIT_S
