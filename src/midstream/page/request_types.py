"""The types of requests to a page and of its answers: requests are checked against them, and `openapi` describes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import cleandoc
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from midstream.engine.core.config import MAX_PARALLELISM_MAX
from midstream.engine.protocol.live_rows import RowCount, Uid
from midstream.engine.protocol.messages import LOG_NAME_CHARS_MAX, LogEntry

FORMAT_VERSION: Final = 1
"""The version of the JSON that pages and `--json` produce. It grows when a field is removed or changes its meaning; new
fields do not change it.
"""

_EXAMPLE: Final = re.compile(r"\n\n(For example:\n\n)?(    .*(\n|$)|\n)+")
"""An example at the end of a docstring."""

_Place: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^[^\u0000]*$")]
"""A path or a storage URL; no file system has names with a NUL."""


def document(data: object) -> bytes:
    """Encode `data`, a Struct or a dict, as one JSON object whose first field is `format_version`."""
    encoded = msgspec.json.encode(data)
    if encoded[:1] != b"{":
        raise TypeError(f"a document must be a JSON object, which {type(data).__name__} is not")
    return b'{"format_version":%d%s%s' % (FORMAT_VERSION, b"" if encoded == b"{}" else b",", encoded[1:])


class FormatVersion(msgspec.Struct, frozen=True):
    """The first field of every document."""

    format_version: Literal[1]


assert msgspec.convert({"format_version": FORMAT_VERSION}, FormatVersion)


# ---- requests


class _Action(msgspec.Struct, frozen=True, tag_field="action", forbid_unknown_fields=True):
    pass


class Checkpoint(_Action, frozen=True, tag="checkpoint"):
    """Take a checkpoint now."""


class Savepoint(_Action, frozen=True, tag="savepoint"):
    """Make a savepoint. `directory`: a path or a storage URL, empty or new; by default one below the checkpoint
    directory.
    """

    directory: _Place | None = None


class Rescale(_Action, frozen=True, tag="rescale"):
    """Change the parallelism of the operators whose parallelism the job does not set."""

    parallelism: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARALLELISM_MAX)]


class StopRequest(_Action, frozen=True, tag="stop"):
    """Stop at a checkpoint, from which the job can resume.

    `savepoint`: the directory of a savepoint with which to stop; if it cannot be made, the job does not stop.
    """

    savepoint: _Place | None = None


class Drain(_Action, frozen=True, tag="drain"):
    """End the sources and process everything in flight."""


Action: TypeAlias = Checkpoint | Savepoint | Rescale | StopRequest | Drain


class LiveRowsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for up to `rows` of the next rows that an operator, given by uid or name, emits."""

    operator: Uid
    rows: RowCount = 20


class MetricsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of metrics. `subtasks`: include those of each subtask."""

    subtasks: bool = False


class LogsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of logs: lines after number `after`, only of that slot and of that operator (name or uid) if they are
    given.
    """

    after: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = -1
    slot: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARALLELISM_MAX)] | UnsetType = UNSET
    operator: Annotated[str, msgspec.Meta(min_length=1, max_length=LOG_NAME_CHARS_MAX)] | UnsetType = UNSET


# ---- answers


class ActionState(msgspec.Struct, frozen=True):
    """The state of an action."""

    id: int
    action: str
    state: Literal["waiting", "done", "failed"]
    began_ms: int
    answer: str = ""
    """Why the action failed, or the path of what it created."""


class LogRecord(msgspec.Struct, frozen=True):
    """A line that a function has printed or logged; see LogLine."""

    number: int
    """The number of the line, from 0, over all slots."""
    slot: int
    at_ms: int
    text: str
    logger: str
    level: int
    operator: str
    uid: str
    subtask: int

    @staticmethod
    def of(entry: LogEntry) -> LogRecord:
        return LogRecord(entry.number, entry.slot, **msgspec.structs.asdict(entry.line))


class Logs(msgspec.Struct, frozen=True):
    lines: tuple[LogRecord, ...]
    after: int
    """The value of `after` for the next request; unchanged if there are no newer lines yet."""
    dropped: int
    """The number of lines after the request's `after` that were no longer kept; they are not in `lines`."""


def logs_of(entries: Sequence[LogEntry], query: LogsQuery) -> Logs:
    """Return the answer to a request for logs, from `entries` after `query.after`."""
    lines = tuple(
        LogRecord.of(entry)
        for entry in entries
        if query.slot in (UNSET, entry.slot) and query.operator in (UNSET, entry.line.operator, entry.line.uid)
    )
    after = entries[-1].number if entries else query.after
    missed = after - query.after - len(entries) if query.after >= 0 else 0
    return Logs(lines, after, missed)


def components(types: Sequence[Any], ref_template: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return JSON Schemas of `types`, and of what they refer to by `ref_template`.

    Their descriptions are those of the classes, without the examples, which are in Python.
    """
    schemas, defined = msgspec.json.schema_components(types, ref_template=ref_template)
    for each in defined.values():
        if "description" in each:
            each["description"] = _EXAMPLE.sub("", cleandoc(each["description"]))
    return list(schemas), defined
