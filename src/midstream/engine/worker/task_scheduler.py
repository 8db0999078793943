"""Chooses the task of a slot that runs next, in turn. Tasks with pending mail run first, up to MAILS_IN_A_ROW_MAX times
in a row."""

from __future__ import annotations

from collections import deque

from midstream.engine.core.interfaces import Clock, Executor
from midstream.engine.worker.task import MAILS_IN_A_ROW_MAX, Task

STEPS_PER_MAIL = 8
"""The maximum number of steps in one mail of the loop, before the loop reads its sockets again."""
RUN_S = 0.001
"""The time after which no further step begins in a mail of the loop."""


class TaskScheduler:
    """The tasks of one attempt that have something to do. No task runs before `start` or after `stop`."""

    def __init__(self, clock: Clock, executor: Executor) -> None:
        self._clock = clock
        self._executor = executor
        self._is_running = False
        self._ready: deque[Task] = deque()
        self._scheduled: set[Task] = set()
        """The tasks in `_ready`."""
        self._is_posted = False
        self._mails_in_a_row = 0
        """How many times in a row a task with mails ran first."""
        self.current_task: Task | None = None
        """The task whose step runs now."""

    def start(self) -> None:
        self._is_running = True

    def stop(self) -> None:
        """Run no more steps. All tasks are dropped here, so that a mail still posted keeps none of them in memory."""
        self._is_running = False
        self._ready.clear()
        self._scheduled.clear()

    def schedule(self, task: Task) -> None:
        """Have a step of this task run soon."""
        if task not in self._scheduled and self._is_running:
            self._scheduled.add(task)
            self._ready.append(task)
            if not self._is_posted:
                self._is_posted = True
                self._executor.post(self._run)

    def _run(self) -> None:  # noqa: PLR0912 - the order of steps is decided in one place
        """Run a few steps, then return to the loop: sockets and completions must not wait for long."""
        clock, ready = self._clock, self._ready
        if not self._is_running:
            return
        now_s = clock.monotonic_s()
        deadline_s = now_s + RUN_S
        had_mail = False
        for _ in range(STEPS_PER_MAIL):
            if not ready:
                break
            may_favour = self._mails_in_a_row < MAILS_IN_A_ROW_MAX
            task = ready[0]
            if may_favour and not task.mails:
                for other in ready:
                    if other.mails:
                        task = other
                        break
            if may_favour and task.mails:
                self._mails_in_a_row += 1
            elif had_mail and may_favour:
                break  # a barrier must not wait in a socket for the slice of a slow function
            else:
                self._mails_in_a_row = 0
            had_mail = bool(task.mails)
            ready.remove(task)
            self._scheduled.discard(task)
            self.current_task = task
            if task.step(now_s):
                self.schedule(task)
            self.current_task = None
            before_s, now_s = now_s, clock.monotonic_s()
            task.busy_s += now_s - before_s
            if now_s >= deadline_s:
                break
        if ready:
            self._executor.post(self._run)
        else:
            self._is_posted = False
