"""`midstream run JOB.py --preview 20`: shows the first rows of each stream with which a job ends, without running it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group
from rich.text import Text

from midstream.cli.commands.run import Overrides, load_with_its_own_logging
from midstream.cli.formatting import printable
from midstream.cli.json_types import Previewed, ShownStream
from midstream.cli.output import Answer
from midstream.engine.core.errors import ConfigError, JobError, MidstreamError


def preview_job(path: Path, rows: int, overrides: Overrides) -> Answer:
    """Preview a job. Raises MidstreamError if its streams cannot be shown."""
    if overrides.of_a_run:
        raise ConfigError(f"--preview starts no job, so {overrides.of_a_run[0]} has no effect; leave it out")
    environment = load_with_its_own_logging(path, overrides.modules)
    try:
        previews = environment.preview(rows)
    except MidstreamError:
        raise
    except Exception as error:
        where = " ".join(getattr(error, "__notes__", ())) or f"{type(error).__name__}: {error}"
        raise JobError(f"{path}: {where}") from error
    data = Previewed(tuple(ShownStream(each.name, each.rows, each.note) for each in previews))
    return Answer(data, Group(*(Text(printable(f"{each!r}\n")) for each in previews)))
