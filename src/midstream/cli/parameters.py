"""Parameters shared by several commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from midstream.engine.core.errors import ConfigError


def whole_number(_: object, tokens: Sequence[cyclopts.Token]) -> int:
    """Convert strictly: cyclopts itself would convert 1.5 to 1."""
    token = tokens[0]
    try:
        return int(token.value)
    except ValueError:
        raise ConfigError(f"{token.keyword}: {token.value!r} is not a whole number") from None


_JOB = (
    "The job's id, the beginning of its id, its name, or the link to its page (see `midstream page`), which also works "
    "from another machine."
)
Job = Annotated[str, Parameter(help=_JOB)]
OptionalJob = Annotated[str | None, Parameter(help=f"{_JOB} Not needed if only one job runs here.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object instead of tables.")]


def module_paths(py_files: str | None) -> list[str]:
    """Return the paths of `--py-files`, which are separated by commas."""
    return [path for path in (py_files or "").split(",") if path]


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ConfigError naming the options that were given: an option without effect is a mistake."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")
