"""The handle on a running job, for the program that started it. Its methods may be called from any thread."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from html import escape
from typing import Final

from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.errors import JobError
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.driver.driver import Driver, DriverPage
from midstream.runtime.process.slot_provider import SlotProvider
from midstream.runtime.storage.file_storage import absolute

POLL_INTERVAL_S: Final = 0.2
"""How often a waiting thread checks whether it has been interrupted."""


def start_job(plan: JobPlan, slots: SlotProvider, page: DriverPage | None = None) -> Job:
    """Start a job on a separate thread and return immediately. `slots` and `page` are closed when the job has ended.

    Raises ClusterError if the cluster is too small for it.
    """
    driver = Driver(plan, slots, page=page)
    driver.start()
    return Job(driver)


class Job:
    """The handle that `Environment.start` returns. A job ends at the latest when the program that started it ends.

    Its methods may be called from any thread.

        job = env.start(checkpoint_dir="state/visits")
        print(job.status().rows_read, job.page)
        path = job.stop()
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __repr__(self) -> str:
        return f"<midstream job {self.name!r} {self.job_id}: {self._state()}>"

    def _repr_html_(self) -> str:
        """Show the job in a notebook, with the link to its page."""
        shown = f"<code>{escape(repr(self))}</code>"
        if self.page is None or self.ended:
            return shown
        return f'{shown} <a href="{escape(self.page)}" target="_blank" rel="noopener">page</a>'

    def _state(self) -> str:
        """Return the state without a long wait, for `repr` in a shell."""
        if self.ended:
            return self.status().state
        done, _ = wait([question := self._driver.request(m.GetStatus())], POLL_INTERVAL_S)
        reply = question.result() if done else m.Reply()
        return reply.status.state if reply.status is not None else "busy"

    @property
    def job_id(self) -> str:
        """The id of this start of the job, which no other start has."""
        return self._driver.plan.job_id

    @property
    def name(self) -> str:
        """The name of the job, as the Environment has it."""
        return self._driver.plan.config.name

    @property
    def checkpoint_dir(self) -> str | None:
        """The directory or storage URL of the checkpoints, or None; a local path is absolute."""
        return self._driver.plan.config.checkpoint_dir

    @property
    def page(self) -> str | None:
        """The link to the job's page, with the token that its buttons need; None if it has none."""
        return None if self._driver.page is None else self._driver.page.link

    @property
    def ended(self) -> bool:
        """Whether the job has ended and everything that was opened for it is closed."""
        return self._driver.ended.is_set()

    def status(self) -> JobStatus:
        """Return the status of the job as it is now, or as it was at its end.

        A state that no job leaves (`has_ended`) is returned once everything that was opened for the job is closed.

        For example:

            job = env.start()
            if job.status().bottleneck is not None:
                print(job.status().bottleneck.name)
        """
        if not self.ended:
            reply = self._driver.request(m.GetStatus()).result()
            if reply.status is not None and not reply.status.has_ended:
                return reply.status
            self._driver.ended.wait()  # a job that has ended answers while its slots are still being released
        assert self._driver.outcome is not None
        return self._driver.outcome.status

    def checkpoint(self, timeout_s: float | None = None) -> str:
        """Take a checkpoint and wait until it is complete.

        `timeout_s`: how long to wait, in seconds; None for no limit.

        Returns the path of the checkpoint. Raises JobError if it fails, or if the job has no checkpoint directory or
        has ended; TimeoutError if it takes longer.

            path = job.checkpoint(timeout_s=60)
        """
        reply = self._request(m.DoCheckpoint(), timeout_s)
        assert reply.checkpoint is not None
        return reply.checkpoint

    def savepoint(self, directory: str | os.PathLike[str] | None = None, timeout_s: float | None = None) -> str:
        """Write a savepoint while the job runs on, and wait until it is complete.

        A savepoint holds everything it needs, may be moved, and is never deleted.

        `directory`: a path or storage URL that is empty or does not exist; None for one below the checkpoint directory.
        `timeout_s`: how long to wait, in seconds; None for no limit.

        Returns the path of the savepoint. Raises JobError if it cannot be written, TimeoutError if it takes longer.

            path = job.savepoint("savepoints/before-upgrade")
        """
        savepoint_dir = None if directory is None else absolute(os.fspath(directory))
        path = self._request(m.DoSavepoint(savepoint_dir), timeout_s).checkpoint
        assert path is not None
        return path

    def rescale(self, parallelism: int, timeout_s: float | None = None) -> str | None:
        """Continue at another parallelism, from a checkpoint taken for it, and wait until all tasks run again.

        `parallelism`: the number of subtasks from then on. Operators whose parallelism the program sets keep it.
        `timeout_s`: how long to wait, in seconds; None for no limit.

        Returns the checkpoint's path, or None if the job already had that parallelism. Raises JobError if the rescale
        is not possible (the job then runs on unchanged), TimeoutError if it takes longer.

            job.rescale(7)
        """
        return self._request(m.DoRescale(parallelism), timeout_s).checkpoint

    def stop(
        self,
        drain: bool = False,
        timeout_s: float | None = None,
        savepoint: str | os.PathLike[str] | None = None,
    ) -> str | None:
        """Stop at a checkpoint, or end the sources and process all rows, and wait for the end.

        `drain`: end the sources and process all rows: windows and timers fire.
        `timeout_s`: how long to wait, in seconds; None for no limit.
        `savepoint`: the directory of a savepoint to stop with, as for `savepoint()`.

        Returns the path of the checkpoint or savepoint from which the job can resume, or None if there is none. Raises
        JobError if the job cannot be stopped in this way (it then runs on), or has ended; TimeoutError if it takes
        longer.

            path = job.stop()
            env.start(restore_from=path)
        """
        savepoint_dir = None if savepoint is None else absolute(os.fspath(savepoint))
        reply = self._request(m.DoStop(drain, savepoint_dir), timeout_s)
        _wait(self._driver.ended.wait, timeout_s)
        return reply.checkpoint

    def cancel(self, reason: str = "it was cancelled", timeout_s: float | None = None) -> JobStatus:
        """End the job now, without a checkpoint, and wait for it. Does nothing if the job has ended.

        `reason`: why, for the status and the log.
        `timeout_s`: how long to wait, in seconds; None for no limit.

        Returns the final status. Raises TimeoutError if it takes longer.

            job.cancel("the input was the wrong one")
        """
        self._driver.cancel(reason)
        if not _wait(self._driver.ended.wait, timeout_s):
            raise TimeoutError(f"job {self.name} has not ended within {timeout_s} s")
        return self.status()

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait for the end of the job.

        `timeout_s`: how long to wait, in seconds; None for no limit.

        Returns the final status. Raises the error that the job failed with (a JobError has the user's traceback), and
        TimeoutError if the job still runs after that time.

            status = env.start().wait()
            assert status.state == "finished"
        """
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
        """Keep the job's failure out of the log while a caller waits that will report it."""
        self._driver.awaited += 1
        try:
            yield
        finally:
            self._driver.awaited -= 1

    def _request(self, request: m.ClientRequest, timeout_s: float | None) -> m.Reply:
        future: Future[m.Reply] = self._driver.request(request)
        if not _wait(lambda seconds: bool(wait([future], seconds).done), timeout_s):
            waiting = "".join(f"; {wait.sentence}" for wait in self.status().waiting)
            raise TimeoutError(f"job {self.name} did not answer within {timeout_s} s{waiting}")
        reply = future.result()
        if reply.error:
            raise JobError(f"job {self.name}: {reply.error}")
        return reply


def _wait(done: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Return whether it is done in time; `done` waits at most the number of seconds that it is given.

    The waits are short, because a signal handler such as that of polars makes system calls resume, so that a
    Ctrl-C would only take effect after a long wait.
    """
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not done(max(0.0, min(POLL_INTERVAL_S, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
    return True
