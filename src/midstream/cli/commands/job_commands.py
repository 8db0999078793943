"""Commands for a running job: list, status, logs, checkpoint, savepoint, rescale, stop."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.error_text import RequestFailed
from midstream.cli.follow import REFRESH_S, display
from midstream.cli.job_targets import Target, client_of, named
from midstream.cli.json_types import (
    DroppedLines,
    ListedJobs,
    MadeCheckpoint,
    MadeSavepoint,
    PageLink,
    Rescaled,
    SilentJob,
    StoppedJob,
)
from midstream.cli.output import Answer, Stream, busy_with
from midstream.cli.status_tables import job_view, jobs_table
from midstream.engine.core.config import MAX_PARALLELISM_MAX, check_parallelism
from midstream.engine.core.errors import ClusterError, ConfigError, MidstreamError
from midstream.engine.core.tracebacks import users_part
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import JobStatus
from midstream.page.address import PageAddress, token_of
from midstream.page.remote_client import PageJob, RemoteClient, is_link
from midstream.page.request_types import LogRecord
from midstream.page.server import PageServer
from midstream.page.site import EndedJob
from midstream.runtime.driver import job_history
from midstream.runtime.driver import job_registry as registry
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job_registry import JobEntry
from midstream.runtime.storage.file_storage import absolute

STATUS_TIMEOUT_S = 10.0
REQUESTS_MAX = 16
"""How many drivers are requested for their status at the same time."""
SILENCE_S_MAX = 60.0
"""How long a driver that carries out a request may give no status."""
POLL_INTERVAL_S = 2.0
"""The interval at which a waiting command checks what the job waits for."""
REPEAT_INTERVAL_S = 30.0
FOLLOW_S = 0.3
ENDING_S_MAX = 10.0
"""How long a driver that has gone away may take to record how its job ended."""


def list_jobs(also_ended: bool) -> Answer:
    """List the jobs of this user on this machine; one whose driver does not answer is marked.

    `also_ended`: include those that have ended, as far as there are records of them.
    """
    statuses: list[JobStatus] = []
    silent: dict[JobEntry, MidstreamError] = {}
    entries = registry.list_jobs()
    with ThreadPoolExecutor(REQUESTS_MAX) as threads:  # each driver that does not respond takes STATUS_TIMEOUT_S
        for entry, found in zip(entries, threads.map(_status_if_it_answers, entries), strict=True):
            if isinstance(found, JobStatus):
                statuses.append(found)
            elif found is not None:
                silent[entry] = found
    if silent:  # a driver that ended meanwhile has taken its entry away
        alive = {entry.job_id for entry in registry.list_jobs()}
        silent = {entry: error for entry, error in silent.items() if entry.job_id in alive}
    unreadable = 0
    if also_ended:
        known, unreadable = job_history.records()
        shown = {status.job_id for status in statuses} | {entry.job_id for entry in silent}
        statuses += [record.seen for record in known if record.status.job_id not in shown]
    if not statuses and not silent and not unreadable:
        return Answer(
            ListedJobs(()),
            Text(
                "no job runs on this machine"
                + (", and none has" if also_ended else "; a job that is starting is listed once Spark runs")
            ),
        )
    data = ListedJobs(tuple(statuses), tuple(SilentJob(e.job_id, e.name, e.pid) for e in silent), unreadable)
    notes = [
        Text(
            f"{formatting.printable(e.name)} ({e.job_id}): process {e.pid} is alive but not responding"
            if isinstance(error, ClusterError)
            else formatting.printable(f"{e.name} ({e.job_id}): {error}"),
            "yellow",
        )
        for e, error in silent.items()
    ]
    if unreadable:
        notes.append(Text(f"left out: {unreadable} recorded by another version of midstream", "yellow"))
    view: list[RenderableType] = [jobs_table(statuses)] if statuses else []
    return Answer(data, Group(*view, *notes))


def _status_if_it_answers(entry: JobEntry) -> JobStatus | ClusterError | ConfigError | None:
    """Return the status of a job, or why it cannot be had; None if the job has just ended."""
    try:
        return status_of(entry)
    except RequestFailed:
        return None
    except (ClusterError, ConfigError) as error:
        return error


def checkpoints_of(job_or_path: str) -> str:
    """Return where to read checkpoints: the path itself, or the checkpoint directory of a running job.

    Raises ConfigError if it is neither, or the job has no such directory; JobError if several jobs have that name.
    """
    if "/" in job_or_path or os.path.exists(job_or_path):  # Path.exists() raises if a name is too long
        return job_or_path
    entry = registry.find_running(job_or_path)
    if entry is None:
        raise ConfigError(f"{job_or_path!r}: there is no such directory, and no job with this name or id runs here")
    directory = status_of(entry).checkpoint_dir
    if directory is None:
        raise ConfigError(
            f"job {entry.name} ({entry.job_id}) has no checkpoints, since it runs without a checkpoint_dir"
        )
    return directory


def show_status(job: str | None) -> Answer:
    """Show the status of one job. Raises JobError if there is no such job."""
    entry = named(job)
    status = status_of(entry)
    page = [Text(f"page {entry.page}", style="dim")] if entry.page else []
    return Answer(status, Group(job_view(status), *_last_failure(status), *page))


def watch(job: str | None, json: bool) -> Answer | Stream:
    """Show a job as `midstream run` does, until it ends or Ctrl-C; the job runs on. Raises JobError if there is none."""
    entry = named(job)
    if json:
        return Stream((status, "") for status in _statuses(entry))
    console = Console(highlight=False)
    with suppress(KeyboardInterrupt), display(console, silent=False) as screen:
        for status in _statuses(entry):
            screen.show(status)
            if status.has_ended or status.state == job_history.LOST:
                how = f"{formatting.printable(status.name)} {status.state}"
                if isinstance(entry, JobEntry):  # records are of this machine
                    how = f"{how}; midstream history {status.job_id} has all of it"
                return Answer(status, Text(how, style="dim"))
    return Answer(None, Text(f"{formatting.printable(entry.name)} runs on", style="dim"))


def _statuses(entry: Target) -> Iterator[JobStatus]:
    """Yield a status every REFRESH_S; the last one shows how the job ended. Raises ClusterError if its driver stops
    answering.
    """
    try:
        with client_of(entry) as client:
            while True:
                reply = client.request(m.GetStatus(), STATUS_TIMEOUT_S)
                if reply.error or reply.status is None:
                    break
                yield reply.status
                if reply.status.has_ended:
                    return
                time.sleep(REFRESH_S)  # how often a live view is drawn
    except ClusterError as error:
        lost = error
    else:
        lost = ClusterError(f"job {entry.name} ({entry.job_id}) has ended, and there is no record of how")
    until_s = time.monotonic() + (0.0 if isinstance(entry, PageJob) else ENDING_S_MAX)  # records are of this machine
    while time.monotonic() < until_s:
        last = job_history.find(entry.job_id).seen
        if last.has_ended or last.state == job_history.LOST:
            yield last
            return
        time.sleep(FOLLOW_S)
    raise lost


def show_history(job: str) -> Answer:
    """Show the last known status of a job, ended or not. Raises JobError if there is no record of it."""
    if is_link(job):
        raise ConfigError(
            "history shows jobs that this user has started on this machine; for the link to a page, use status"
        )
    status = job_history.find(job).seen
    lost = (
        [
            Text(
                f"its driver disappeared without reporting how the job ended; last known at {formatting.clock(status.now_ms)}",
                "red",
            )
        ]
        if status.state == job_history.LOST
        else []
    )
    failures = [
        Text(formatting.printable(f"{formatting.minute(each.at_ms)}  attempt {each.attempt}: {each.summary}"))
        for each in status.failures
    ]
    heading = [Text("failures, the newest first", style="dim")] if failures else []
    return Answer(status, Group(job_view(status), *lost, *heading, *failures, *_last_failure(status)))


def serve_page(job: str, at: str | None) -> Stream:
    """Show the page of a job: its link if the job runs; otherwise serve it here, from the record, until Ctrl-C.

    Raises JobError if several running jobs have that name or there is no record of any, RequestFailed if the job runs
    without a page, ConfigError for an invalid address, ClusterError if the page cannot be served there.
    """
    if is_link(job):
        raise ConfigError("this is already the link to a page: open it in a browser")
    entry = registry.find_running(job)
    if entry is not None:
        if not entry.page:
            raise RequestFailed(f"job {entry.name} ({entry.job_id}) runs without a page")
        return Stream(iter([(PageLink(entry.page), f"page: {entry.page}")]))
    record = job_history.find(job)
    address = PageAddress.of(at)
    if address is None:
        raise ConfigError("--page: off, so there is nothing to serve")
    return Stream(_served(PageServer(address, token_of()), record.seen))


def _served(page: PageServer, status: JobStatus) -> Iterator[tuple[object, str]]:
    page.begin(EndedJob(status))
    try:
        what = f"job {formatting.printable(status.name)} ({status.job_id}) does not run; this is the record of its last start"
        shown = f"{what}: {status.state}, as of {formatting.minute(status.now_ms)}"
        yield PageLink(page.link), f"page: {page.link}\n{shown}; end with Ctrl-C"
        while not page.ended(FOLLOW_S):
            pass
    finally:
        page.end()


def show_logs(job: str | None, follow: bool, operator: str | None) -> Stream:
    """Print what the slots of a job have printed and logged. Raises JobError if there is no such job."""
    return Stream(_log_pieces(named(job), follow, operator))


def _log_pieces(entry: Target, follow: bool, operator: str | None) -> Iterator[tuple[object, str]]:
    after = -1
    if operator is not None:
        _check_operator(entry, operator)
    with client_of(entry) as client:
        while True:
            try:
                reply = client.request(m.GetLogs(after), STATUS_TIMEOUT_S)
            except ClusterError:
                if follow and isinstance(entry, JobEntry) and not _runs(entry):
                    return
                raise
            if reply.error and not follow:
                raise RequestFailed(f"job {entry.name} ({entry.job_id}): {reply.error}")
            if reply.error:
                return  # it has ended
            found = reply.logs
            for logged in found:
                if after >= 0 and logged.number > after + 1:
                    yield DroppedLines(logged.number - after - 1), f"({logged.number - after - 1} lines left out)"
                after = logged.number
                if operator is None or operator in (logged.line.operator, logged.line.uid):
                    yield LogRecord.of(logged), _log_line(logged)
            if not found:
                if not follow:
                    return
                time.sleep(FOLLOW_S)


def _check_operator(entry: Target, operator: str) -> None:
    operators = [each for vertex in status_of(entry).vertices for each in vertex.operators]
    if not any(operator in (each.uid, each.name) for each in operators):
        uids = ", ".join(each.uid for each in operators)
        raise RequestFailed(
            f"job {entry.name} ({entry.job_id}): there is no operator {operator!r}; the uids of all are: {uids}"
        )


def _runs(entry: JobEntry) -> bool:
    return entry.job_id in {running.job_id for running in registry.list_jobs()}


def _log_line(logged: m.LogEntry) -> str:
    line = logged.line
    level = f"{logging.getLevelName(line.level)} " if line.level else ""
    at = f"{line.operator}/{line.subtask}" if line.operator else f"slot {logged.slot}"
    return formatting.printable(f"{formatting.clock(line.at_ms)} {at} {level}{line.logger}: {line.text}")


def make_checkpoint(job: str | None, silent: bool) -> Answer:
    """Make a checkpoint and wait until it is complete. Raises RequestFailed if it fails."""
    entry = named(job)
    with busy_with(f"checkpoint of {entry.name}", silent) as log:
        reply = _request_and_wait(entry, m.DoCheckpoint(), log)
    return Answer(MadeCheckpoint(entry.job_id, reply.checkpoint), Text(reply.checkpoint or ""))


def make_savepoint(job: str | None, directory: str | None, silent: bool) -> Answer:
    """Make a savepoint and wait until it is complete. Raises RequestFailed if it fails."""
    entry = named(job)
    with busy_with(f"savepoint of {entry.name}", silent) as log:
        reply = _request_and_wait(
            entry, m.DoSavepoint(None if directory is None else _savepoint_path(entry, directory)), log
        )
    return Answer(MadeSavepoint(entry.job_id, reply.checkpoint), Text(reply.checkpoint or ""))


def rescale_job(job: str | None, parallelism: int, silent: bool) -> Answer:
    """Change a job's parallelism and wait until it runs again.

    Raises ConfigError for an impossible parallelism, RequestFailed if the job runs on unchanged.
    """
    check_parallelism(parallelism, MAX_PARALLELISM_MAX, "rescale")
    entry = named(job)
    with busy_with(f"rescaling {entry.name} to parallelism {parallelism}", silent) as log:
        reply = _request_and_wait(entry, m.DoRescale(parallelism), log)
    line = Text(f"{formatting.printable(entry.name)} runs at parallelism {parallelism}")
    line.append(f"\nfrom: {reply.checkpoint}" if reply.checkpoint else ", as it did before")
    return Answer(Rescaled(entry.job_id, parallelism, reply.checkpoint), line)


def stop_job(job: str | None, drain: bool, savepoint: str | None, silent: bool) -> Answer:
    """Stop a job and wait until it has ended.

    Raises ConfigError for both ways together, RequestFailed if the job runs on instead.
    """
    if drain and savepoint is not None:
        raise ConfigError(
            "--drain, --savepoint: a drained job has finished, but a savepoint is for resuming; give only one"
        )
    entry = named(job)
    directory = None if savepoint is None else _savepoint_path(entry, savepoint)
    with busy_with(f"{'draining' if drain else 'stopping'} {entry.name}", silent) as log:
        reply = _request_and_wait(entry, m.DoStop(drain, directory), log)
    line = Text(f"{formatting.printable(entry.name)} {'finished' if drain else 'stopped'}")
    if reply.checkpoint:
        line.append(f"\nresume from: {reply.checkpoint}" if not drain else f"\nlast checkpoint: {reply.checkpoint}")
    stopped = StoppedJob(entry.job_id, drain)
    made = {"checkpoint" if directory is None else "savepoint": reply.checkpoint}
    return Answer(msgspec.structs.replace(stopped, **made), line)


def _savepoint_path(entry: Target, directory: str) -> str:
    """Return the directory of a savepoint for the driver. Raises ConfigError for a path that means another one on its
    machine.
    """
    found = absolute(directory)
    if isinstance(entry, PageJob) and "://" not in directory and not directory.startswith(("/", "file:")):
        raise ConfigError(
            f"savepoint {directory!r} is a relative path, and the job may run on another machine; give an absolute path, as "
            "that machine sees it, or a storage URL"
        )
    return found


def _request(entry: Target, request: m.ClientRequest, timeout_s: float | None) -> m.Reply:
    with client_of(entry) as client:
        reply = client.request(request, timeout_s)
    if reply.error:
        raise RequestFailed(f"job {entry.name} ({entry.job_id}): {reply.error}")
    return reply


def _request_and_wait(entry: Target, request: m.ClientRequest, log: Callable[[str], None]) -> m.Reply:
    """Send a request and wait without a limit while the driver reports its status; `log` gets what the job waits for."""
    over = threading.Event()
    silent: list[MidstreamError] = []

    def report_waits(client: Client | RemoteClient) -> None:
        last: dict[str, float] = {}
        answered_s = time.monotonic()
        while not over.wait(POLL_INTERVAL_S):
            try:
                waiting = status_of(entry).waiting
                answered_s = time.monotonic()
            except MidstreamError as error:  # if it is ending, the answer reports how
                if isinstance(client, Client) and time.monotonic() - answered_s >= SILENCE_S_MAX and not over.is_set():
                    silent.append(error)
                    client.give_up()
                continue
            for wait in waiting:
                now_s = time.monotonic()
                if now_s - last.get(wait.what, -REPEAT_INTERVAL_S) >= REPEAT_INTERVAL_S and not over.is_set():
                    last[wait.what] = now_s
                    log(wait.sentence)

    try:
        with client_of(entry) as client:
            threading.Thread(target=report_waits, args=(client,), name="midstream-waits", daemon=True).start()
            reply = client.request(request)
    except ClusterError as error:  # the job was there, and is not any more
        raise RequestFailed(f"{silent[0] if silent else error}") from error
    finally:
        over.set()
    if reply.error:
        raise RequestFailed(f"job {entry.name} ({entry.job_id}): {reply.error}")
    return reply


def status_of(entry: Target) -> JobStatus:
    status = _request(entry, m.GetStatus(), STATUS_TIMEOUT_S).status
    if status is None:
        raise ClusterError(f"job {entry.name} ({entry.job_id}) answered without a status")
    return status


def _last_failure(status: JobStatus) -> list[Text]:
    trace = users_part(status.failures[0].details) if status.failures else ""
    return [Text(formatting.printable(trace), style="dim")] if trace else []
