"""The record of a run: always a hash, and readable lines on demand.

Every step of the world goes into the running hash as plain integers, so that two runs can be
compared on any machine. The full record is kept only on request: as tuples, formatted when read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final
from unittest.mock import patch

import msgspec
import pyarrow as pa

from midstream.engine.core.elements import Element, Event, decode_event
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import ChannelId, TaskId
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.frame_layout import HEADER, FrameKind
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.subpartition import Subpartition

_TEXT_MAX: Final = 220
_IDS_MAX: Final = 12


class Kind(IntEnum):
    """The kind of a step, as lines of the trace show it."""

    MAIL = 1
    TIMER = 2
    IO = 3
    IO_DONE = 4
    CONTROL = 5
    LINK = 6
    """A data connection is established or lost."""
    PUMP = 7
    """The transport pulls frames from a connection."""
    FRAMES = 8
    FAULT = 9
    CLUSTER = 10
    NOTE = 11
    """Not a step, but an event inside one (a file written, rows committed)."""


Entry = tuple[int, int, int, str, Kind, Any]
"""The step, its cause (a step), the time in µs, the process, the kind, and the detail."""


class Trace:
    """The full record of a run."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, step: int, cause: int, at_us: int, process: str, kind: Kind, detail: Any) -> None:
        self._entries.append((step, cause, at_us, process, kind, detail))

    def __len__(self) -> int:
        return len(self._entries)

    def lines(self, *patterns: str, tail: int | None = None) -> Iterator[str]:
        """Yield one line per event: of those that match all `patterns` (regular expressions), the last `tail`.

        Channels read `e1:0>2`, checkpoints `chk 3`, tasks `v1/0`, so that a pattern can select each of them.
        """
        searches = [re.compile(pattern).search for pattern in patterns]
        entries = self._entries if tail is None or searches else self._entries[-tail:]
        lines = map(format_entry, entries)
        shown = (line for line in lines if all(search(line) for search in searches)) if searches else lines
        yield from shown if tail is None else deque(shown, maxlen=tail)


def channel_pattern(channel: str) -> str:
    """Return the pattern for `edge:producer:consumer`; an empty part stands for all. Raises ConfigError."""
    parts = channel.split(":")
    if len(parts) != 3 or any(part and not part.isdecimal() for part in parts):
        raise ConfigError(
            f"channel: {channel!r} is not edge:producer:consumer, such as 3:0:1, or 3:: for all of an edge"
        )
    edge, producer, consumer = (part or r"\d+" for part in parts)
    return rf"\be{edge}:{producer}>{consumer}\b"


def checkpoint_pattern(checkpoint_id: int) -> str:
    """Return the pattern that finds a checkpoint in messages, barriers, and the names of files."""
    return rf"\bchk[ -]{checkpoint_id}\b|\bc{checkpoint_id}-[vs]\d"


@contextmanager
def following_elements(note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` for every element that is put into a channel (`e1:0>2 + …`) or taken out of one (`e1:0>2 - …`)."""
    add, poll = Subpartition.add, InputGate.poll

    def noted_add(self: Subpartition, element: Element) -> None:
        note(f"{self.channel} + {describe_element(element)}")
        add(self, element)

    def noted_poll(self: InputGate, rows_max: int) -> LeasedBatch | tuple[int, Event] | None:
        polled = poll(self, rows_max)
        if isinstance(polled, LeasedBatch):
            from_one = self.channels[self.read_from[0]].id if self.read_from else None
            note(f"{from_one or f'e{self.edge.id}:*>{self.consumer} recovered'} - {describe_element(polled.batch)}")
        elif polled is not None:
            note(f"{self.channels[polled[0]].id} - {describe_element(polled[1])}")
        return polled

    with patch.object(Subpartition, "add", noted_add), patch.object(InputGate, "poll", noted_poll):
        yield


def describe_element(element: Element) -> str:
    """Describe an event with its fields, or a batch with its number of rows and their ids, if it has that column."""
    if not isinstance(element, pa.RecordBatch):
        return describe_message(element)
    if element.schema.get_field_index("id") < 0:
        return f"{element.num_rows} rows"
    ids = element.column("id").to_pylist()
    shown = " ".join(map(str, ids[:_IDS_MAX]))
    return f"{element.num_rows} rows: {shown}{' …' if len(ids) > _IDS_MAX else ''}"


def format_entry(entry: Entry) -> str:
    step, cause, at_us, process, kind, detail = entry
    number = f"#{step:<6}" if kind is not Kind.NOTE else " " * 7
    return f"{number} {at_us / 1e6:11.6f} {process:<14} {kind.name.lower():<8} {describe(detail)}  ← #{cause}"


def describe(detail: Any) -> str:
    """Describe, in one line, the detail with which a step was scheduled."""
    if isinstance(detail, str):
        text = detail
    elif isinstance(detail, msgspec.Struct):
        text = describe_message(detail)
    elif isinstance(detail, tuple):
        text = " ".join(describe(part) for part in detail)
    elif isinstance(detail, list):
        text = " | ".join(describe_frame(frame) for frame in detail)
    else:
        text = describe_call(detail)
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 1] + "…"


def describe_call(call: Any) -> str:
    """Describe a call by the function's name and, for a partial, the arguments."""
    arguments = ""
    while hasattr(call, "func"):
        arguments = ", ".join(_short(argument) for argument in call.args)
        call = call.func
    owner = getattr(call, "__self__", None)
    name = getattr(call, "__qualname__", None) or type(call).__name__
    reference = getattr(owner, "ref", None) or getattr(owner, "id", None)
    where = f" {reference}" if isinstance(reference, tuple) else ""
    return f"{name.replace('.<locals>', '')}({arguments}){where}"


def _short(value: Any) -> str:
    if isinstance(value, pa.RecordBatch):
        return f"{value.num_rows} rows"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return str(value)
    return type(value).__name__


def describe_message(message: msgspec.Struct) -> str:
    """Describe a message, such as `TriggerCheckpoint attempt=1 chk 3 tasks=[v0/0 v0/1]`."""
    parts = [type(message).__name__]
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name == "checkpoint_id":
            parts.append(f"chk {value}")
        elif name in ("details", "config") or value in ((), None, ""):
            continue
        else:
            parts.append(f"{name}={_field(value)}")
    return " ".join(parts)


def _field(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, TaskId):
        return str(value)
    if isinstance(value, tuple | list):
        return f"[{' '.join(_field(item) for item in value)}]"
    fields = getattr(value, "__struct_fields__", ())
    if fields:
        return f"({' '.join(_field(getattr(value, name)) for name in fields)})"
    return str(value)


def describe_frame(frame: bytes | bytearray | memoryview) -> str:
    """Describe a data frame by its channel, number and content."""
    kind, edge, producer, consumer, sequence, value = HEADER.unpack_from(frame)
    channel = ChannelId(edge, producer, consumer)
    if kind == FrameKind.CREDIT:
        return f"{channel} credit +{value}"
    if kind == FrameKind.EVENT:
        event = decode_event(bytes(frame[HEADER.size :]))
        return f"{channel} {sequence}: {describe_message(event)}"
    return f"{channel} {sequence}: {len(frame) - HEADER.size} bytes"


@dataclass(frozen=True, slots=True)
class Filters:
    """The lines of a trace that are shown: the last `tail` of those to which all conditions apply."""

    channel: str | None = None
    """edge:producer:consumer."""
    checkpoint: int | None = None
    """Its number."""
    pattern: str | None = None
    """A regular expression."""
    tail: int | None = None


def trace_patterns(filters: Filters) -> list[str]:
    """Return regular expressions all of which must match a line of a trace. Raises ConfigError."""
    patterns: list[str] = []
    if filters.channel is not None:
        patterns.append(channel_pattern(filters.channel))
    if filters.checkpoint is not None:
        patterns.append(checkpoint_pattern(filters.checkpoint))
    if filters.tail is not None and filters.tail < 1:
        raise ConfigError(f"tail: {filters.tail} is not a number of lines")
    if filters.pattern is not None:
        patterns.append(filters.pattern)
        try:
            re.compile(filters.pattern)
        except re.error as error:
            raise ConfigError(f"pattern: {filters.pattern!r} is not a regular expression: {error}") from error
    return patterns
