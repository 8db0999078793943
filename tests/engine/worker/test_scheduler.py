"""Tasks of a slot take turns; those with mails go first, for a while; none is kept when the attempt is over."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from midstream.engine.worker.task import MAILS_IN_A_ROW_MAX, Task
from midstream.engine.worker.task_scheduler import STEPS_PER_MAIL, TaskScheduler
from recovering import Steps
from standing_clock import StandingClock


class Stepping:
    """Notes its steps, and always has more to do."""

    def __init__(self, name: str, steps: list[str]) -> None:
        self.name, self.steps = name, steps
        self.mails: deque[Callable[[], None]] = deque()
        self.busy_s = 0.0

    def step(self, started_s: float) -> bool:
        self.steps.append(self.name)
        return True


class World:
    def __init__(self, names: str) -> None:
        self.io = Steps()
        self.steps: list[str] = []
        self.scheduler = TaskScheduler(StandingClock(), self.io)
        self.tasks = {name: Stepping(name, self.steps) for name in names}

    def schedule(self) -> None:
        for task in self.tasks.values():
            self.scheduler.schedule(cast(Task, task))

    def run(self, times: int = 1) -> str:
        self.steps.clear()
        for _ in range(times):
            self.io.mails.popleft()()
        return "".join(self.steps)


def test_no_task_runs_before_the_start() -> None:
    world = World("ab")
    world.schedule()
    assert not world.io.mails
    world.scheduler.start()
    world.schedule()
    world.schedule()
    assert len(world.io.mails) == 1, "one mail for all of them"


def test_tasks_take_turns_a_few_steps_at_a_time() -> None:
    world = World("abc")
    world.scheduler.start()
    world.schedule()
    assert world.run() == "abcabcab"
    assert world.run() == "cabcabca"
    assert len(world.io.mails) == 1


def test_a_task_with_mail_goes_first() -> None:
    world = World("abc")
    world.scheduler.start()
    world.schedule()
    world.tasks["b"].mails.append(lambda: None)
    assert world.run() == "b" * STEPS_PER_MAIL
    world.tasks["b"].mails.clear()
    assert world.run() == "acbacbac"


def test_mails_that_always_come_leave_the_others_their_turn() -> None:
    world = World("ab")
    world.scheduler.start()
    world.schedule()
    world.tasks["b"].mails.append(lambda: None)
    steps = world.run(2 * MAILS_IN_A_ROW_MAX // STEPS_PER_MAIL)
    assert steps.startswith("b" * MAILS_IN_A_ROW_MAX + "a")


def test_a_scheduler_that_has_stopped_runs_nothing_and_keeps_no_task() -> None:
    world = World("a")
    world.scheduler.start()
    world.schedule()
    kept: Any = weakref.ref(world.tasks.pop("a"))
    world.scheduler.stop()
    gc.collect()
    assert kept() is None, "the mail that is posted has it"
    assert world.run() == "" and not world.io.mails
