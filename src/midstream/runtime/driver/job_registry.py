"""The jobs that run on this machine: one private file each, so that the command line finds their drivers.

`$MIDSTREAM_HOME/jobs/<job id>.json` (default `~/.midstream`), mode 0600 in a directory of mode 0700: it holds the job's
keys. The driver writes it when it begins to listen and removes it when the job has ended; what a killed driver leaves
behind is recognised by its process being gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Final

import msgspec
import psutil

from midstream.engine.core.errors import UNDECODABLE, JobError, StorageError
from midstream.runtime.network.tls import JobKeys


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    name: str
    host: str
    port: int
    keys: JobKeys
    pid: int
    process_started: str
    """Identifies the process, see `process_started`: a process id alone may have been reused."""
    started_ms: int
    machine: str
    """The machine of that process: the home directory may be shared with other machines."""
    page: str = ""
    """The link to the job's page, with its token; empty if it has none."""

    def __repr__(self) -> str:
        return f"JobEntry({self.job_id!r}, {self.name!r}, {self.host}:{self.port}, pid {self.pid})"


class _OfSomeVersion(msgspec.Struct):
    pid: int


_START_TICKS: Final = 22 - 3
"""The position of the start time in /proc/PID/stat, after the process's name, which is its second field."""


def home() -> Path:
    """Return midstream's directory in the user's home. Raises StorageError if there is no home."""
    try:
        return Path(os.environ.get("MIDSTREAM_HOME") or Path.home() / ".midstream")
    except RuntimeError as error:
        raise StorageError(
            f"there is no home directory ({error}); set MIDSTREAM_HOME to one of your directories"
        ) from error


def entry_of_this_process(job_id: str, name: str, host: str, port: int, keys: JobKeys, page: str = "") -> JobEntry:
    started = process_started(os.getpid())
    assert started is not None
    return JobEntry(
        job_id=job_id,
        name=name,
        host=host,
        port=port,
        keys=keys,
        pid=os.getpid(),
        process_started=started,
        started_ms=time.time_ns() // 1_000_000,
        machine=socket.gethostname(),
        page=page,
    )


def announce(entry: JobEntry) -> Path:
    """Write the file that announces the job, and return its path for `withdraw`.

    Raises StorageError if the directory cannot be written.
    """
    directory = home() / "jobs"
    try:
        return write_private(directory, f"{entry.job_id}.json", msgspec.json.encode(entry))
    except OSError as error:
        raise StorageError(
            f"cannot announce the job in {directory}: {error.strerror}; set MIDSTREAM_HOME to one of your directories"
        ) from error


def write_private(directory: Path, name: str, data: bytes) -> Path:
    """Write a file that only this user can read, completely or not at all. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(directory, 0o700)
    temporary = directory / f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        return temporary.rename(directory / name)
    finally:
        temporary.unlink(missing_ok=True)  # it exists only if writing has failed


def withdraw(announced: Path) -> None:
    """Remove the file. If that fails, listing the jobs removes it once the process has ended."""
    with contextlib.suppress(OSError):
        announced.unlink(missing_ok=True)


def list_jobs() -> list[JobEntry]:
    """Return the jobs of this machine whose drivers live, oldest first. Entries of dead ones are removed."""
    entries: list[JobEntry] = []
    directory = home() / "jobs"
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            data = path.read_bytes()
        except OSError:
            continue  # it ended just now, or is not ours to read
        try:
            entry = msgspec.json.decode(data, type=JobEntry)
        except UNDECODABLE:
            if not _may_live(data):
                withdraw(path)
            continue
        if entry.machine != socket.gethostname():
            continue
        if process_started(entry.pid) == entry.process_started:
            entries.append(entry)
        else:
            withdraw(path)
    return sorted(entries, key=lambda e: (e.started_ms, e.job_id))


def find(job: str) -> JobEntry:
    """Return the running job with this id, beginning of its id, or name. Raises JobError unless there is exactly one."""
    found = find_running(job)
    if found is None:
        running = ", ".join(f"{e.name} ({e.job_id})" for e in list_jobs()) or "none"
        raise JobError(f"no running job {job!r} on this machine; running: {running}")
    return found


def find_running(job: str) -> JobEntry | None:
    """Like `find`, but None if no such job runs. Raises JobError if several do."""
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
            raise JobError(f"{job!r} matches {len(matching)} running jobs ({ids}); use the id of one")
    return None


def process_started(pid: int) -> str | None:
    """Return what distinguishes the process from others with the same id; None if there is no such process.

    The wall clock would not do, since a start time changes when the clock is set. On Linux it is the boot, and the
    ticks from it to the start of the process.
    """
    if Path("/proc/self/stat").exists():
        try:
            after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if after_name[0] == b"Z":  # it has ended; in a container there may be no parent that reaps it
            return None
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {int(after_name[_START_TICKS])}"
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None


def _may_live(data: bytes) -> bool:
    """Whether an entry that another version of midstream has written may be that of a living process."""
    try:
        pid = msgspec.json.decode(data, type=_OfSomeVersion).pid
    except UNDECODABLE:
        return False
    return 0 < pid < 2**31 and bool(psutil.pid_exists(pid))
