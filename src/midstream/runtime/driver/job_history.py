"""The history of this user's jobs: one private file each, which remains when the job has ended.

`$MIDSTREAM_HOME/history/<job id>.json` (default `~/.midstream`), mode 0600 in a directory of mode 0700: the status of
the job as it was a few seconds ago, or at its end. A separate thread writes it, so that a slow home directory delays no
job. A killed driver leaves its last status, by which such a job is distinguished from one that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import msgspec

from midstream.engine.core.errors import UNDECODABLE, JobError, StorageError
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.driver import job_registry

KEEP_EVERY_S: Final = 10.0
"""The greatest age of the record of a job whose driver was killed."""
LAST_WRITE_S_MAX: Final = 5.0
"""How long the end of a job waits for its last record."""
RECORDS_MAX: Final = 100
"""The number of records kept; the oldest one makes room for a new one."""
LEFT_OVER_S: Final = 3600.0
"""The age at which a temporary file is that of a killed writer."""
LOST: Final = "lost"
"""The state of a job whose driver's process is gone and has not reported how the job ended."""

_log = logging.getLogger(__name__)


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last known status of a job."""

    status: JobStatus
    pid: int
    process_started: str
    machine: str
    """The machine of the driver's process, see `registry.JobEntry`."""

    @property
    def runs(self) -> bool:
        """Whether the driver's process lives on this machine, or may live on another."""
        if self.status.has_ended:
            return False
        if self.machine != socket.gethostname():
            return time.time() - self.status.now_ms / 1e3 < 3 * KEEP_EVERY_S
        return job_registry.process_started(self.pid) == self.process_started

    @property
    def seen(self) -> JobStatus:
        """The status; if it is neither the final one nor that of a running job, its state is `LOST`."""
        if self.status.has_ended or self.runs:
            return self.status
        return msgspec.structs.replace(self.status, state=LOST, waiting=(), bottleneck=None)


class HistoryWriter:
    """Writes the record of one job, on a thread of its own, from `start` to `end`."""

    def __init__(self, entry: job_registry.JobEntry) -> None:
        self._entry = entry
        self._statuses: SimpleQueue[JobStatus] = SimpleQueue()
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="midstream-history", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def keep(self, status: JobStatus) -> None:
        """Write the record; returns immediately."""
        self._statuses.put(status)

    def end(self, last: JobStatus) -> None:
        """Write the last record, waiting at most `LAST_WRITE_S_MAX` for a disk that does not answer."""
        assert last.has_ended
        self._statuses.put(last)
        self._thread.join(LAST_WRITE_S_MAX)

    def _run(self) -> None:
        while True:
            status = self._statuses.get()
            while not self._statuses.empty():  # after a slow write, only the newest status is written
                status = self._statuses.get()
            self._write(status)
            if status.has_ended:
                return

    def _write(self, status: JobStatus) -> None:
        record = JobRecord(
            status=status.shortened(),
            pid=self._entry.pid,
            process_started=self._entry.process_started,
            machine=self._entry.machine,
        )
        try:
            directory = _directory()
            job_registry.write_private(directory, f"{self._entry.job_id}.json", msgspec.json.encode(record))
            _make_room(directory)
        except (OSError, StorageError) as error:
            if not self._has_warned:
                _log.warning("the history of job %s cannot be written at present: %s", self._entry.job_id, error)
            self._has_warned = True


def records() -> tuple[list[JobRecord], int]:
    """Return the jobs of this user, newest first, and how many records this version cannot read."""
    found: list[JobRecord] = []
    unreadable = 0
    for path in _directory().glob("*.json"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=JobRecord))
        except FileNotFoundError:
            continue  # it was deleted just now, to make room for another
        except (OSError, *UNDECODABLE):
            unreadable += 1
    return sorted(found, key=lambda record: (-record.status.started_ms, record.status.job_id)), unreadable


def find(job: str) -> JobRecord:
    """Return the record of the job with this id or the beginning of its id, or the newest one of this name.

    Raises JobError if there is none, or if several ids begin like that.
    """
    found, unreadable = records()
    named = [record for record in found if record.status.name == job]
    begun = [record for record in found if job and record.status.job_id.startswith(job)]
    if named:
        return named[0]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise JobError(f"{job!r} matches {len(begun)} job ids ({', '.join(each.status.job_id for each in begun)})")
    names = ", ".join(dict.fromkeys(record.status.name for record in found)) or "none"
    others = f"; {unreadable} more of another version of midstream" if unreadable else ""
    raise JobError(f"no record of a job {job!r} in {_directory()}; there are: {names}{others}")


def _directory() -> Path:
    return job_registry.home() / "history"


def _make_room(directory: Path) -> None:
    """Make room for the newest records; also remove what killed writers have left."""
    ages: list[tuple[float, Path]] = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            written_s = os.stat(path).st_mtime
            if path.suffix == ".json":
                ages.append((written_s, path))
            elif time.time() - written_s > LEFT_OVER_S:
                path.unlink()
    for _, path in sorted(ages, reverse=True)[RECORDS_MAX:]:
        path.unlink(missing_ok=True)
