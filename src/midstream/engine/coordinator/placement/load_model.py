"""Predicts the load of the slots at another parallelism, from the busy shares of the tasks.

Subtask i of every task runs on slot i, which has one core. A task that follows the job's parallelism shares its work
evenly among more subtasks, unless one of them is much busier than the others: a hot key, or fewer splits than subtasks,
which more subtasks do not relieve. A task with a parallelism of its own works as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from midstream.engine.graph.job_graph import Vertex

TARGET: Final = 0.7
"""The busy share of the busiest slot at the parallelism that is chosen: room for peaks, and for catching up."""
FULL: Final = 0.85
"""The busy share from which a slot counts as having no time left."""
UNEVEN: Final = 1.5
"""How many times as busy as the mean the busiest subtask must be for more subtasks not to relieve it."""
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

    def share_at(self, parallelism: int) -> float:
        """Return the busy share of each subtask, or of the busiest one, at another parallelism of the job."""
        even = sum(self.busy) / parallelism
        return max(even, *self.busy) if self.is_uneven else even


@dataclass(frozen=True, slots=True)
class Load:
    """The load of all tasks of a job at its parallelism."""

    tasks: Sequence[TaskLoad]
    parallelism: int

    @property
    def busiest(self) -> float:
        """The busy share of the busiest slot."""
        slots = [0.0] * max(len(task.busy) for task in self.tasks)
        for task in self.tasks:
            for index, busy in enumerate(task.busy):
                slots[index] += busy
        return max(slots)

    def busiest_at(self, parallelism: int) -> float:
        """Return the busy share that the busiest slot would have: more than 1 if it could not keep up."""
        if parallelism == self.parallelism:
            return self.busiest
        fixed = [0.0] * max(len(task.busy) for task in self.tasks)
        for task in self.tasks:
            for index, busy in enumerate(task.busy if task.is_fixed else ()):
                fixed[index] += busy
        return max(fixed) + sum(task.share_at(parallelism) for task in self.tasks if not task.is_fixed)

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
