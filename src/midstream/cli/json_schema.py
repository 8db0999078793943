"""The JSON Schema of what each command prints with `--json`; docs/json.schema.json is generated here."""

from __future__ import annotations

import types
import typing
from typing import Any, Final

import msgspec

from midstream.cli import json_types as t
from midstream.cli.commands.doctor import Doctored
from midstream.cli.commands.inspect_checkpoint import CheckpointReport
from midstream.cli.commands.inspect_upgrade import UpgradeReport
from midstream.cli.commands.state import StateEntries, StateList
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import LiveRows
from midstream.page.request_types import FormatVersion, LogRecord, components

SHAPES: Final[dict[str, Any]] = {
    "run": t.RanJob | t.Previewed,
    "new": t.NewFiles,
    "list": t.ListedJobs,
    "status": JobStatus,
    "top": JobStatus,
    "history": JobStatus,
    "rows": LiveRows,
    "logs": LogRecord | t.DroppedLines,
    "page": t.PageLink,
    "checkpoint": t.MadeCheckpoint,
    "savepoint": t.MadeSavepoint,
    "rescale": t.Rescaled,
    "stop": t.StoppedJob,
    "inspect": CheckpointReport | UpgradeReport,
    "state": StateList | StateEntries,
    "doctor": Doctored,
    "simulate": t.SimulatedRuns | t.TracedRun,
}
"""The shape of each command's output; for commands that print lines (logs, top, page), of each line."""


def _structs(shape: Any) -> list[Any]:
    """Return the structs of a union, or the one struct that the shape is."""
    return list(typing.get_args(shape)) if isinstance(shape, types.UnionType) else [shape]


def schema() -> bytes:
    """Return the JSON Schema of each command, as `#/$defs/COMMAND`; docs/json.schema.json holds it."""
    structs = {command: _structs(shape) for command, shape in SHAPES.items()}
    every = list(dict.fromkeys([FormatVersion, t.CommandFailed, *(each for some in structs.values() for each in some)]))
    _, defined = components(every, "#/$defs/{name}")
    reference = {each: {"$ref": f"#/$defs/{each.__name__}"} for each in every}
    commands = {
        command: {
            "allOf": [
                reference[FormatVersion],
                {"anyOf": [reference[t.CommandFailed], *(reference[each] for each in some)]},
            ]
        }
        for command, some in structs.items()
    }
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What midstream COMMAND --json prints, as #/$defs/COMMAND; of logs, top and page each line",
        "$defs": {**commands, **defined},
    }
    return msgspec.json.format(msgspec.json.encode(made)) + b"\n"
