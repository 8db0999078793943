"""Predicts the load of the slots at another parallelism, from the busy shares of the tasks.

Subtask i of every task runs on slot i, which has one core. What the busiest slot has to do more than a usual one is
assumed to stay together: a hot key, or a split, which more subtasks do not relieve. All other work is shared evenly. A
task with a parallelism of its own works as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final

from midstream.engine.graph.job_graph import Vertex

TARGET: Final = 0.7
"""The busy share of the busiest slot at the parallelism that is chosen: room for peaks, and for catching up."""
FULL: Final = 0.85
"""The busy share from which a slot counts as having no time left."""
UNEVEN: Final = 1.5
"""How many times as busy as the mean the busiest subtask must be to be named as one that more subtasks do not relieve."""
NOTICED: Final = 0.05
"""The busy share below which that is noise."""


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """The busy share of each subtask of one task."""

    vertex: Vertex
    busy: Sequence[float]
    is_fixed: bool
    """Whether its parallelism is its own, and not the job's."""

    @property
    def mean(self) -> float:
        return sum(self.busy) / len(self.busy)

    @property
    def hottest(self) -> int:
        return max(range(len(self.busy)), key=self.busy.__getitem__)

    @property
    def is_uneven(self) -> bool:
        return max(self.busy) >= max(NOTICED, UNEVEN * self.mean) and len(self.busy) > 1


@dataclass(frozen=True)
class Load:
    """The load of all tasks of a job at its parallelism."""

    tasks: Sequence[TaskLoad]
    parallelism: int

    @cached_property
    def busiest(self) -> float:
        """The busy share of the busiest slot."""
        return max(_by_slot(self.tasks))

    @cached_property
    def _parts(self) -> tuple[float, float]:
        """The busy share of the busiest slot that stays at any parallelism, and that of all slots that is divided."""
        stays = max(_by_slot([task for task in self.tasks if task.is_fixed]), default=0.0)
        first, *others = sorted(_by_slot([task for task in self.tasks if not task.is_fixed]), reverse=True) or [0.0]
        hot = first - median(others) if others else 0.0
        return stays + hot, first - hot + sum(others)

    def busiest_at(self, parallelism: int) -> float:
        """Return the busy share that the busiest slot would have: more than 1 if it could not keep up."""
        if parallelism == self.parallelism:
            return self.busiest
        stays, divided = self._parts
        return stays + divided / parallelism

    def least_parallelism(self, parallelisms: Iterable[int], factor: float) -> int:
        """Return the lowest of these, in ascending order, at which the busiest slot would have `TARGET` at `factor` times
        the rows; if there is none, the lowest at which it would have hardly more than at the best of them.
        """
        busy = {each: self.busiest_at(each) for each in parallelisms}
        least = max(TARGET / factor, min(busy.values()) * 1.05)
        return next(each for each, share in busy.items() if share <= least)

    def limit(self) -> str:
        """Return what more subtasks do not relieve, as the end of a sentence. Empty: nothing is known."""
        held = [task for task in self.tasks if task.is_fixed or task.is_uneven]
        if not held:
            return ""
        task = max(held, key=lambda task: max(task.busy))
        if task.is_uneven:
            return (
                f"; subtask {task.hottest} of {task.vertex.name!r} works {max(task.busy):.0%} of the time, and a subtask "
                f"of it {task.mean:.0%} on average: more subtasks do not relieve it"
            )
        return (
            f"; {task.vertex.name!r} works {max(task.busy):.0%} of the time, and its own parallelism, "
            f"{task.vertex.parallelism}, stays"
        )


def _by_slot(tasks: Sequence[TaskLoad]) -> list[float]:
    """Return the busy share of each slot that these tasks take."""
    slots = [0.0] * max((len(task.busy) for task in tasks), default=0)
    for task in tasks:
        for index, busy in enumerate(task.busy):
            slots[index] += busy
    return slots
