"""A Spark TaskContext for each subtask of a slot.

A slot is one Spark task, but runs many subtasks side by side. Code written for Spark calls `TaskContext.get()` for its
partition; on the threads that run such code it gets the subtask's context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from pyspark import TaskContext

_own = threading.local()
_installing = threading.Lock()
_users = 0


class _PerThread:
    """Replaces the context of the calling thread, or else that of the process."""

    def __init__(self, of_process: TaskContext | None) -> None:
        self.of_process = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_own, "context", None) or self.of_process, name)


@contextmanager
def task_context(partition: int, attempt: int, task: int) -> Iterator[None]:
    """Make `partitionId()`, `attemptNumber()` and `taskAttemptId()` return these values on this thread, within the
    block.
    """
    context: Any = object.__new__(TaskContext)
    context._partitionId = partition
    context._attemptNumber = attempt
    context._taskAttemptId = task
    context._stageId = 0
    context._localProperties = {}
    context._cpus = 1
    context._resources = {}
    _own.context = context
    _install(1)
    try:
        yield
    finally:
        _install(-1)
        del _own.context


def _install(change: int) -> None:
    """Install the context while it is in use, and no longer: in a process without one, `get()` must return None."""
    global _users
    with _installing:
        _users += change
        present = TaskContext._taskContext
        if _users and not isinstance(present, _PerThread):
            TaskContext._taskContext = cast("TaskContext", _PerThread(present))
        elif not _users and isinstance(present, _PerThread):
            TaskContext._taskContext = present.of_process
