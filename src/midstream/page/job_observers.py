"""Threads that observe a job from outside: they request its status once a second, and share nothing with it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Final, Protocol

from midstream.engine.protocol.job_status import JobStatus

POLL_INTERVAL_S: Final = 1.0
THREAD_END_S: Final = 5.0

_log = logging.getLogger(__name__)


class ObservedJob(Protocol):
    """The part of a Job that observers need. Callable from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def ended(self) -> bool: ...

    def status(self) -> JobStatus: ...


class JobObserver(Protocol):
    """What is notified of each status of one job, on a thread of its own, where it may block."""

    what: str
    """Its subject, for messages."""

    def observe(self, status: JobStatus) -> None: ...

    def close(self) -> None:
        """Called once: after the last status, or after an error."""
        ...


def begin_observing(job: ObservedJob, observer: JobObserver) -> None:
    """Notify the observer until the job ends. An error of the observer is logged, and ends its thread alone."""
    thread = threading.Thread(target=_run, args=(job, observer), name=f"midstream-{observer.what}", daemon=True)
    thread.start()
    for ended in [each for each in _threads if not each.is_alive()]:
        _threads.pop(ended, None)
    _threads[thread] = job


def _run(job: ObservedJob, observer: JobObserver) -> None:
    try:
        pause = threading.Event()
        has_ended = False
        while not has_ended:
            pause.wait(POLL_INTERVAL_S)
            has_ended = job.ended  # before the status, which is then the last one
            observer.observe(job.status())
    except Exception:  # noqa: BLE001 - logged; an observer is no reason to end a job
        _log.exception("the %s of job %s have failed; the job continues without them", observer.what, job.name)
    finally:
        observer.close()


_threads: dict[threading.Thread, ObservedJob] = {}


@atexit.register
def end_observing() -> None:
    """Wait at the end of the program for the observers of ended jobs, which still send the last, up to THREAD_END_S."""
    until_s = time.monotonic() + THREAD_END_S
    for thread, job in list(_threads.items()):
        if job.ended:
            thread.join(max(0.0, until_s - time.monotonic()))
