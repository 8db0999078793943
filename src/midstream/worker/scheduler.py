"""Which task of a slot runs next. Tasks take turns; those with mails go first, but not without bound."""

from __future__ import annotations

from collections import deque

from midstream.core.seams import Clock, Executor
from midstream.worker.task import MAILS_IN_A_ROW_MAX, Task

STEPS_PER_MAIL = 8
RUN_S = 0.001
"""Between two looks at the sockets there are at most so many steps, and no new one begins after so long."""


class Scheduler:
    """The tasks of one attempt that have something to do. None runs before `start`, nor after `stop`."""

    def __init__(self, clock: Clock, executor: Executor) -> None:
        self._clock = clock
        self._executor = executor
        self._is_running = False
        self._ready: deque[Task] = deque()
        self._scheduled: set[Task] = set()
        """Those in `_ready`."""
        self._is_posted = False
        self._favoured = 0
        """How often in a row a task went first because it had mail."""
        self.at_work: Task | None = None
        """The task whose step it is."""

    def start(self) -> None:
        self._is_running = True

    def stop(self) -> None:
        """For good. A mail that is still posted for it keeps no task alive."""
        self._is_running = False
        self._ready.clear()
        self._scheduled.clear()

    def schedule(self, task: Task) -> None:
        """Have a step of it run soon."""
        if task not in self._scheduled and self._is_running:
            self._scheduled.add(task)
            self._ready.append(task)
            if not self._is_posted:
                self._is_posted = True
                self._executor.post(self._run)

    def _run(self) -> None:  # noqa: PLR0912 - the order of steps is decided in one place
        """A few steps, then back to the loop: sockets and completions must not wait for long."""
        clock, ready = self._clock, self._ready
        if not self._is_running:
            return
        now_s = clock.monotonic_s()
        deadline_s = now_s + RUN_S
        had_mail = False
        for _ in range(STEPS_PER_MAIL):
            if not ready:
                break
            may_favour = self._favoured < MAILS_IN_A_ROW_MAX
            task = ready[0]
            if may_favour and not task.mails:
                for other in ready:
                    if other.mails:
                        task = other
                        break
            if may_favour and task.mails:
                self._favoured += 1
            elif had_mail and may_favour:
                break  # a barrier must not wait in a socket for the slice of a slow function
            else:
                self._favoured = 0
            had_mail = bool(task.mails)
            ready.remove(task)
            self._scheduled.discard(task)
            self.at_work = task
            if task.step(now_s):
                self.schedule(task)
            self.at_work = None
            before_s, now_s = now_s, clock.monotonic_s()
            task.busy_s += now_s - before_s
            if now_s >= deadline_s:
                break
        if ready:
            self._executor.post(self._run)
        else:
            self._is_posted = False
