"""What each command prints with `--json`, as types, see `ui.json_schema`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from midstream.protocol.job_status import JobStatus


class Failed(msgspec.Struct, frozen=True):
    """Of any command that could not do what it was asked to."""

    error: str


class SilentJob(msgspec.Struct, frozen=True):
    """Its driver's process lives and does not answer."""

    job_id: str
    name: str
    pid: int


class ListedJobs(msgspec.Struct, frozen=True):
    jobs: tuple[JobStatus, ...]
    """Those that run, and then, with --all, those that have ended."""
    unreachable: tuple[SilentJob, ...] = ()
    unreadable: int = 0
    """Records of ended jobs that another version of midstream has made; they are left out."""


class RanJob(JobStatus, frozen=True, kw_only=True):
    """How the job ended."""

    error: str | UnsetType = UNSET
    """Of one that failed: why."""

    @staticmethod
    def of(status: JobStatus, error: str) -> RanJob:
        return RanJob(**{name: getattr(status, name) for name in status.__struct_fields__}, error=error)


class ShownStream(msgspec.Struct, frozen=True):
    stream: str
    rows: list[dict[str, Any]]
    note: str
    """What is special about these rows; empty when they are just the first ones."""


class Previewed(msgspec.Struct, frozen=True):
    """Of `run --preview`."""

    streams: tuple[ShownStream, ...]


class MadeCheckpoint(msgspec.Struct, frozen=True):
    job_id: str
    checkpoint: str | None
    """Its path."""


class MadeSavepoint(msgspec.Struct, frozen=True):
    job_id: str
    savepoint: str | None
    """Its path."""


class Rescaled(msgspec.Struct, frozen=True):
    job_id: str
    parallelism: int
    checkpoint: str | None
    """From which it went on; null if it had that parallelism."""


class StoppedJob(msgspec.Struct, frozen=True):
    """With `savepoint` if one was asked for, else with `checkpoint`."""

    job_id: str
    drained: bool
    checkpoint: str | UnsetType | None = UNSET
    savepoint: str | UnsetType | None = UNSET


class DroppedLines(msgspec.Struct, frozen=True):
    """In place of lines of a log that were no longer kept."""

    dropped: int


class PageLink(msgspec.Struct, frozen=True):
    page: str
    """With the token behind #."""


class NewFiles(msgspec.Struct, frozen=True):
    files: tuple[str, ...]


class SimulatedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Of `simulate JOB.py`. What follows `seed` is about the first run whose output was not that without failures."""

    job: str
    ok: bool
    runs: int
    long: int
    rows: int
    has_more_rows: list[str]
    """Uids of sources that have more rows than were read of them."""
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
    """Of `simulate JOB.py --trace`."""

    seed: int
    steps: int
    kind: str
    found: list[str]
    trace: list[str]
