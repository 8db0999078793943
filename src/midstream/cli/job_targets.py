"""Finds the job of a command: on this machine by id or name, on any by the link to its page."""

from __future__ import annotations

from typing import TypeAlias

from midstream.engine.core.errors import JobError
from midstream.page.remote_client import PageJob, RemoteClient, is_link, job_at
from midstream.runtime.driver import job_registry as registry
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job_registry import JobEntry

Target: TypeAlias = JobEntry | PageJob


def named(job: str | None) -> Target:
    """Return the job of that id, name or link; without one, the only job on this machine.

    Raises JobError unless there is exactly one, ClusterError if no page answers at the link.
    """
    if job is not None:
        return job_at(job) if is_link(job) else registry.find(job)
    entries = registry.list_jobs()
    if len(entries) == 1:
        return entries[0]
    if not entries:
        raise JobError("no job runs on this machine; for a job on another one, give the link to its page")
    running = ", ".join(f"{e.name} ({e.job_id})" for e in entries)
    raise JobError(f"{len(entries)} jobs run on this machine; choose one: {running}")


def client_of(target: Target) -> Client | RemoteClient:
    return RemoteClient(target) if isinstance(target, PageJob) else Client(target)
