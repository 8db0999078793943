"""A Spark task of its own for each subtask of a slot.

A slot is one task of Spark's, but runs many subtasks side by side. Code written for Spark asks
`TaskContext.get()` which partition it is; on the threads that run such code it gets its own answer.
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
    """Stands for the context of the calling thread, else for that of the process."""

    def __init__(self, of_process: TaskContext | None) -> None:
        self.of_process = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_own, "context", None) or self.of_process, name)


@contextmanager
def task_context(partition: int, attempt: int, task: int) -> Iterator[None]:
    """On this thread, for now: `partitionId()`, `attemptNumber()` and `taskAttemptId()` are these."""
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
    """While anybody uses it, and no longer: where a process has no context, `get()` must say None."""
    global _users
    with _installing:
        _users += change
        present = TaskContext._taskContext
        if _users and not isinstance(present, _PerThread):
            TaskContext._taskContext = cast("TaskContext", _PerThread(present))
        elif not _users and isinstance(present, _PerThread):
            TaskContext._taskContext = present.of_process
