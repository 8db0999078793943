"""Commands that ask a running job: list, status, logs, checkpoint, savepoint, rescale, stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from midstream.core.config import MAX_PARALLELISM_MAX, check_parallelism
from midstream.core.errors import ClusterError, ConfigError, JobError, MidstreamError
from midstream.core.tracebacks import users_part
from midstream.protocol.job_status import JobStatus
from midstream.protocol.messages import (
    ClientRequest,
    DoCheckpoint,
    DoRescale,
    DoSavepoint,
    DoStop,
    GetLogs,
    GetStatus,
    LogEntry,
    Reply,
)
from midstream.runtime import registry
from midstream.runtime.client import Client
from midstream.runtime.registry import JobEntry
from midstream.runtime.storage import absolute
from midstream.ui import text
from midstream.ui.answer import Answer, Stream, busy_with
from midstream.ui.failures import RequestFailed
from midstream.ui.tables import job_view, jobs_table

STATUS_TIMEOUT_S = 10.0
LOOK_S = 2.0
"""How often a command that waits looks what the job waits for."""
SAY_AGAIN_S = 30.0
FOLLOW_S = 0.3


def list_jobs() -> Answer:
    """All jobs of this user on this machine; one whose driver does not answer is named as such."""
    statuses: list[JobStatus] = []
    silent: list[JobEntry] = []
    for entry in registry.list_jobs():
        try:
            statuses.append(_status_of(entry))
        except RequestFailed:
            continue  # it has just ended
        except ClusterError:
            silent.append(entry)
    if silent:  # a driver that ended meanwhile has taken its entry away
        alive = {entry.job_id for entry in registry.list_jobs()}
        silent = [entry for entry in silent if entry.job_id in alive]
    if not statuses and not silent:
        return Answer([], Text("no job runs on this machine"))
    data = [*statuses, *({"job_id": e.job_id, "name": e.name, "state": "unreachable"} for e in silent)]
    notes = [
        Text(f"{text.printable(e.name)} ({e.job_id}): process {e.pid} lives but does not answer", "yellow")
        for e in silent
    ]
    view: list[RenderableType] = [jobs_table(statuses)] if statuses else []
    return Answer(data, Group(*view, *notes))


def show_status(job: str | None) -> Answer:
    """Everything that can be seen of one job. Raises JobError when there is no such job."""
    status = _status_of(_named(job))
    return Answer(status, Group(job_view(status), *_last_failure(status)))


def show_logs(job: str | None, follow: bool, operator: str | None) -> Stream:
    """What the slots of a job have printed and logged. Raises JobError when there is no such job."""
    return Stream(_log_pieces(_named(job), follow, operator))


def _log_pieces(entry: JobEntry, follow: bool, operator: str | None) -> Iterator[tuple[object, str]]:
    after = -1
    with Client(entry) as line:
        while True:
            try:
                found = line.ask(GetLogs(after), STATUS_TIMEOUT_S).logs
            except ClusterError:
                if follow and entry.job_id not in {running.job_id for running in registry.list_jobs()}:
                    return  # it has ended
                raise
            for logged in found:
                if after >= 0 and logged.number > after + 1:
                    yield {"dropped": logged.number - after - 1}, f"({logged.number - after - 1} lines left out)"
                after = logged.number
                if operator is None or operator in (logged.line.operator, logged.line.uid):
                    data = {"number": logged.number, "slot": logged.slot, **msgspec.structs.asdict(logged.line)}
                    yield data, _log_line(logged)
            if not found:
                if not follow:
                    return
                time.sleep(FOLLOW_S)


def _log_line(logged: LogEntry) -> str:
    line = logged.line
    level = f"{logging.getLevelName(line.level)} " if line.level else ""
    at = f"{line.operator}/{line.subtask}" if line.operator else f"slot {logged.slot}"
    return text.printable(f"{text.clock(line.at_ms)} {at} {level}{line.logger}: {line.text}")


def make_checkpoint(job: str | None, silent: bool) -> Answer:
    """Make a checkpoint and wait until it is complete. Raises RequestFailed when it is not completed."""
    entry = _named(job)
    with busy_with(f"checkpoint of {entry.name}", silent) as say:
        reply = _ask_patiently(entry, DoCheckpoint(), say)
    return Answer({"job_id": entry.job_id, "checkpoint": reply.checkpoint}, Text(reply.checkpoint or ""))


def make_savepoint(job: str | None, place: str | None, silent: bool) -> Answer:
    """Make a savepoint and wait until it is complete. Raises RequestFailed when it is not made."""
    entry = _named(job)
    with busy_with(f"savepoint of {entry.name}", silent) as say:
        reply = _ask_patiently(entry, DoSavepoint(None if place is None else absolute(place)), say)
    return Answer({"job_id": entry.job_id, "savepoint": reply.checkpoint}, Text(reply.checkpoint or ""))


def rescale_job(job: str | None, parallelism: int, silent: bool) -> Answer:
    """Change a job's parallelism and wait until it runs again.

    Raises ConfigError for one that no job can have, RequestFailed when the job runs on as it was.
    """
    check_parallelism(parallelism, MAX_PARALLELISM_MAX, "rescale")
    entry = _named(job)
    with busy_with(f"rescaling {entry.name} to parallelism {parallelism}", silent) as say:
        reply = _ask_patiently(entry, DoRescale(parallelism), say)
    line = Text(f"{text.printable(entry.name)} runs at parallelism {parallelism}")
    line.append(f"\nfrom: {reply.checkpoint}" if reply.checkpoint else ", as it did before")
    return Answer({"job_id": entry.job_id, "parallelism": parallelism, "checkpoint": reply.checkpoint}, line)


def stop_job(job: str | None, drain: bool, savepoint: str | None, silent: bool) -> Answer:
    """Stop a job and wait until it has ended.

    Raises ConfigError for both ways at once, RequestFailed when it goes on instead.
    """
    if drain and savepoint is not None:
        raise ConfigError(
            "--drain, --savepoint: a drained job has finished, a savepoint is for going on; give only one"
        )
    entry = _named(job)
    place = None if savepoint is None else absolute(savepoint)
    with busy_with(f"{'draining' if drain else 'stopping'} {entry.name}", silent) as say:
        reply = _ask_patiently(entry, DoStop(drain, place), say)
    line = Text(f"{text.printable(entry.name)} {'finished' if drain else 'stopped'}")
    if reply.checkpoint:
        line.append(f"\ngo on from: {reply.checkpoint}" if not drain else f"\nlast checkpoint: {reply.checkpoint}")
    made = {"checkpoint" if place is None else "savepoint": reply.checkpoint}
    return Answer({"job_id": entry.job_id, "drained": drain, **made}, line)


def _named(job: str | None) -> JobEntry:
    """The job of that id or name; without one, the only job there is."""
    if job is not None:
        return registry.find(job)
    entries = registry.list_jobs()
    if len(entries) == 1:
        return entries[0]
    if not entries:
        raise JobError("no job runs on this machine")
    running = ", ".join(f"{e.name} ({e.job_id})" for e in entries)
    raise JobError(f"{len(entries)} jobs run on this machine; say which one: {running}")


def _ask(entry: JobEntry, request: ClientRequest, timeout_s: float | None) -> Reply:
    with Client(entry) as line:
        reply = line.ask(request, timeout_s)
    if reply.error:
        raise RequestFailed(f"job {entry.name} ({entry.job_id}): {reply.error}")
    return reply


def _ask_patiently(entry: JobEntry, request: ClientRequest, say: Callable[[str], None]) -> Reply:
    """As long as it takes; meanwhile `say` is told what the job waits for."""
    over = threading.Event()

    def look() -> None:
        last: dict[str, float] = {}
        while not over.wait(LOOK_S):
            try:
                waiting = _status_of(entry).waiting
            except MidstreamError:
                continue  # it is ending; the answer says how
            for wait in waiting:
                now_s = time.monotonic()
                if now_s - last.get(wait.what, -SAY_AGAIN_S) >= SAY_AGAIN_S and not over.is_set():
                    last[wait.what] = now_s
                    say(wait.sentence)

    looking = threading.Thread(target=look, name="midstream-look", daemon=True)
    looking.start()
    try:
        return _ask(entry, request, timeout_s=None)
    except ClusterError as error:  # the job was there, and is not any more
        raise RequestFailed(f"{error}") from error
    finally:
        over.set()


def _status_of(entry: JobEntry) -> JobStatus:
    status = _ask(entry, GetStatus(), STATUS_TIMEOUT_S).status
    if status is None:
        raise ClusterError(f"job {entry.name} ({entry.job_id}) answered without a status")
    return status


def _last_failure(status: JobStatus) -> list[Text]:
    trace = users_part(status.failures[0].details) if status.failures else ""
    return [Text(text.printable(trace), style="dim")] if trace else []
