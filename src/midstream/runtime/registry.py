"""Which jobs run on this machine: one private file each, so that the command line finds their drivers.

`$MIDSTREAM_HOME/jobs/<job id>.json` (default `~/.midstream`), mode 0600 in a directory of mode
0700: it holds the job's secret. The driver writes it when it begins to listen and removes it when
the job has ended; what a killed driver leaves behind is recognised by its process being gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec
import psutil

from midstream.core.errors import JobError, StorageError


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    name: str
    host: str
    port: int
    secret: bytes
    pid: int
    process_started_s: float
    """When that process began (the system's figure): a process id alone may be someone else's by now."""
    started_ms: int
    machine: str
    """Where that process runs: the home directory may be shared with other machines."""

    def __repr__(self) -> str:
        return f"JobEntry({self.job_id!r}, {self.name!r}, {self.host}:{self.port}, pid {self.pid})"


def home() -> Path:
    """Raises StorageError for a user without one."""
    try:
        return Path(os.environ.get("MIDSTREAM_HOME") or Path.home() / ".midstream")
    except RuntimeError as error:
        raise StorageError(
            f"there is no home directory ({error}); set MIDSTREAM_HOME to a directory of yours"
        ) from error


def entry_of_this_process(job_id: str, name: str, host: str, port: int, secret: bytes) -> JobEntry:
    started_s = process_started_s(os.getpid())
    assert started_s is not None
    return JobEntry(
        job_id=job_id,
        name=name,
        host=host,
        port=port,
        secret=secret,
        pid=os.getpid(),
        process_started_s=started_s,
        started_ms=time.time_ns() // 1_000_000,
        machine=socket.gethostname(),
    )


def announce(entry: JobEntry) -> Path:
    """The file that says so, to be given to `withdraw`. Raises StorageError when the directory cannot be written."""
    directory = home() / "jobs"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(directory, 0o700)
        temporary = directory / f".{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entry))
        return temporary.rename(directory / f"{entry.job_id}.json")
    except OSError as error:
        raise StorageError(
            f"cannot announce the job in {directory}: {error.strerror}; set MIDSTREAM_HOME to a directory of yours"
        ) from error


def withdraw(announced: Path) -> None:
    """What cannot be removed is, once the process has ended, by whoever lists the jobs."""
    with contextlib.suppress(OSError):
        announced.unlink(missing_ok=True)


def list_jobs() -> list[JobEntry]:
    """The jobs of this machine whose drivers live, oldest first. Entries of dead ones are removed on the way."""
    entries: list[JobEntry] = []
    directory = home() / "jobs"
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=JobEntry)
        except FileNotFoundError:
            continue  # it ended just now
        except (OSError, msgspec.MsgspecError):
            entry = None
        if entry is not None and entry.machine != socket.gethostname():
            continue
        if entry is not None and _lives(entry):
            entries.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(entries, key=lambda e: (e.started_ms, e.job_id))


def find(job: str) -> JobEntry:
    """The running job with this id, the beginning of its id, or its name. Raises JobError when there is not exactly one."""
    entries = list_jobs()
    for matching in (
        [e for e in entries if e.job_id == job],
        [e for e in entries if e.name == job],
        [e for e in entries if job and e.job_id.startswith(job)],
    ):
        if len(matching) == 1:
            return matching[0]
        if matching:
            ids = ", ".join(e.job_id for e in matching)
            raise JobError(f"{job!r} names {len(matching)} running jobs ({ids}); use the id of one")
    running = ", ".join(f"{e.name} ({e.job_id})" for e in entries) or "none"
    raise JobError(f"no running job {job!r} on this machine; running: {running}")


def process_started_s(pid: int) -> float | None:
    """When that process began, or None when there is no such process."""
    try:
        started: float = psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return started


def _lives(entry: JobEntry) -> bool:
    started_s = process_started_s(entry.pid)
    return started_s is not None and abs(started_s - entry.process_started_s) < 1.0
