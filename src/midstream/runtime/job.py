"""The handle on a running job, for the program that started it. Any thread may use it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Final

from midstream.coordinator.events import JobPlan
from midstream.core.errors import JobError
from midstream.protocol.job_status import JobStatus
from midstream.protocol.messages import ClientRequest, DoCheckpoint, DoRescale, DoSavepoint, DoStop, GetStatus, Reply
from midstream.runtime.driver import Driver
from midstream.runtime.provider import SlotProvider
from midstream.runtime.storage import absolute

LOOK_S: Final = 0.2
"""How often a thread that waits looks whether it has been interrupted."""


def start_job(plan: JobPlan, slots: SlotProvider) -> Job:
    """Start a job on a thread of its own and return at once. `slots` is closed when the job has ended.

    Raises ClusterError when the cluster is too small for it.
    """
    driver = Driver(plan, slots)
    driver.start()
    return Job(driver)


class Job:
    """A job ends with the program that started it, at the latest."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __repr__(self) -> str:
        return f"<midstream job {self.name!r} {self.job_id}: {self._state()}>"

    def _state(self) -> str:
        """Without a long wait: it is for people who look at the job in a shell."""
        if self.ended:
            return self.status().state
        done, _ = wait([question := self._driver.ask(GetStatus())], LOOK_S)
        reply = question.result() if done else Reply()
        return reply.status.state if reply.status is not None else "busy"

    @property
    def job_id(self) -> str:
        return self._driver.plan.job_id

    @property
    def name(self) -> str:
        return self._driver.plan.config.name

    @property
    def checkpoint_dir(self) -> str | None:
        """A local path is absolute."""
        return self._driver.plan.config.checkpoint_dir

    @property
    def ended(self) -> bool:
        """Whether the job is over and everything that was opened for it is closed."""
        return self._driver.ended.is_set()

    def status(self) -> JobStatus:
        """What is to be seen of the job now, or was at its end."""
        if not self.ended:
            reply = self._driver.ask(GetStatus()).result()
            if reply.status is not None:
                return reply.status
            self._driver.ended.wait()
        assert self._driver.outcome is not None
        return self._driver.outcome.status

    def checkpoint(self, timeout_s: float | None = None) -> str:
        """Take a checkpoint and wait until it is complete: its path.

        Raises JobError when it fails, or the job has no checkpoint directory or has ended;
        TimeoutError when it takes longer.
        """
        reply = self._ask(DoCheckpoint(), timeout_s)
        assert reply.checkpoint is not None
        return reply.checkpoint

    def savepoint(self, directory: str | os.PathLike[str] | None = None, timeout_s: float | None = None) -> str:
        """Make a savepoint, while the job runs on, and wait until it is complete: its path.

        `directory` (or storage URL) must be empty or not exist; None: one below the checkpoint
        directory. A savepoint holds all that it needs, may be moved, and is never deleted. Raises
        JobError when it cannot be made, TimeoutError when it takes longer.
        """
        place = None if directory is None else absolute(os.fspath(directory))
        path = self._ask(DoSavepoint(place), timeout_s).checkpoint
        assert path is not None
        return path

    def rescale(self, parallelism: int, timeout_s: float | None = None) -> str | None:
        """Go on at another parallelism, from a checkpoint made for it, and wait until all tasks run again.

        Operators whose parallelism the program sets keep it. Returns the checkpoint's path; None when
        the job was at that parallelism. Raises JobError when that cannot be (the job then runs on as
        it was), TimeoutError when it takes longer.
        """
        return self._ask(DoRescale(parallelism), timeout_s).checkpoint

    def stop(
        self,
        drain: bool = False,
        timeout_s: float | None = None,
        savepoint: str | os.PathLike[str] | None = None,
    ) -> str | None:
        """Stop at a checkpoint, or (`drain`) end the sources and let everything flow out; wait for the end.

        `savepoint`: the directory of a savepoint to stop with, see `savepoint()`. Returns the path of
        the checkpoint or savepoint to go on from; None when there is none. Raises JobError when the
        job cannot be stopped so (it runs on), or has ended; TimeoutError when it takes longer.
        """
        place = None if savepoint is None else absolute(os.fspath(savepoint))
        reply = self._ask(DoStop(drain, place), timeout_s)
        _wait(self._driver.ended.wait, timeout_s)
        return reply.checkpoint

    def cancel(self, reason: str = "it was cancelled", timeout_s: float | None = None) -> JobStatus:
        """End the job now, without a checkpoint, and wait for it. Nothing if it has ended."""
        self._driver.cancel(reason)
        if not _wait(self._driver.ended.wait, timeout_s):
            raise TimeoutError(f"job {self.name} has not ended within {timeout_s} s")
        return self.status()

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait for the end. Raises what the job failed with (JobError carries the user's traceback), TimeoutError if it goes on."""
        with self.awaited():
            if not _wait(self._driver.ended.wait, timeout_s):
                raise TimeoutError(f"job {self.name} is still running after {timeout_s} s")
        outcome = self._driver.outcome
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        return outcome.status

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """While somebody waits who says why the job has failed, if it does: then it is not logged."""
        self._driver.awaited += 1
        try:
            yield
        finally:
            self._driver.awaited -= 1

    def _ask(self, request: ClientRequest, timeout_s: float | None) -> Reply:
        future: Future[Reply] = self._driver.ask(request)
        if not _wait(lambda seconds: bool(wait([future], seconds).done), timeout_s):
            waiting = "".join(f"; {wait.sentence}" for wait in self.status().waiting)
            raise TimeoutError(f"job {self.name} did not answer within {timeout_s} s{waiting}")
        reply = future.result()
        if reply.error:
            raise JobError(f"job {self.name}: {reply.error}")
        return reply


def _wait(done: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Whether it is done in time; `done` waits so many seconds at most.

    In short waits: a signal handler such as that of polars has system calls go on, and a Ctrl-C would
    only be seen after a long one.
    """
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not done(max(0.0, min(LOOK_S, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
    return True
