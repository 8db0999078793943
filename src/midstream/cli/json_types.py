"""The types of what each command prints with `--json`; see `cli.json_schema`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from midstream.engine.protocol.job_status import JobStatus


class CommandFailed(msgspec.Struct, frozen=True):
    """A command failed."""

    error: str


class SilentJob(msgspec.Struct, frozen=True):
    """A job whose driver's process is alive and does not answer."""

    job_id: str
    name: str
    pid: int


class ListedJobs(msgspec.Struct, frozen=True):
    jobs: tuple[JobStatus, ...]
    """Running jobs and then, with --all, jobs that have ended."""
    unreachable: tuple[SilentJob, ...] = ()
    unreadable: int = 0
    """The number of records of ended jobs that another version of midstream has written; they are left out."""


class RanJob(JobStatus, frozen=True, kw_only=True):
    """The final status of a job."""

    error: str | UnsetType = UNSET
    """Why the job failed, if it did."""

    @staticmethod
    def of(status: JobStatus, error: str) -> RanJob:
        return RanJob(**{name: getattr(status, name) for name in status.__struct_fields__}, error=error)


class ShownStream(msgspec.Struct, frozen=True):
    stream: str
    rows: list[dict[str, Any]]
    note: str
    """A note about these rows; "" if there is none."""


class Previewed(msgspec.Struct, frozen=True):
    """The streams of `run --preview`."""

    streams: tuple[ShownStream, ...]


class MadeCheckpoint(msgspec.Struct, frozen=True):
    job_id: str
    checkpoint: str | None
    """The path of the checkpoint."""


class MadeSavepoint(msgspec.Struct, frozen=True):
    job_id: str
    savepoint: str | None
    """The path of the savepoint."""


class Rescaled(msgspec.Struct, frozen=True):
    job_id: str
    parallelism: int
    checkpoint: str | None
    """The checkpoint from which the job continued; null if it already had that parallelism."""


class StoppedJob(msgspec.Struct, frozen=True):
    """A job that was stopped, with `savepoint` if one was requested, else with `checkpoint`."""

    job_id: str
    drained: bool
    checkpoint: str | UnsetType | None = UNSET
    savepoint: str | UnsetType | None = UNSET


class DroppedLines(msgspec.Struct, frozen=True):
    """Replaces log lines that were no longer kept."""

    dropped: int


class PageLink(msgspec.Struct, frozen=True):
    page: str
    """The link to the page, with the token after #."""


class NewFiles(msgspec.Struct, frozen=True):
    files: tuple[str, ...]


class SimulatedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `simulate JOB.py`. The fields after `seed` concern the first run whose output differed."""

    job: str
    ok: bool
    runs: int
    long: int
    rows: int
    has_more_rows: list[str]
    """The uids of sources that have more rows than were read."""
    seconds: float
    seed: int | None
    kind: str
    found: list[str]
    schedule: str
    cause: str | None
    operator: str | None
    look_at: list[str]
    warnings: list[str]
    replay: str | None


class TracedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `simulate JOB.py --trace`."""

    seed: int
    steps: int
    kind: str
    found: list[str]
    trace: list[str]
