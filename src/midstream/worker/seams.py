"""What a slot needs of its process, and a task of its slot."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.core.config import JobConfig
from midstream.core.seams import Clock, Executor, Ids, Signal, Storage, Transport
from midstream.protocol import messages as m

if TYPE_CHECKING:
    from midstream.worker.task import Task


@dataclass(frozen=True, slots=True)
class SlotSeams:
    clock: Clock
    executor: Executor
    ids: Ids
    transport: Transport
    open_storage: Callable[[str], Storage]
    send: Callable[[m.FromSlot], None]
    """To the coordinator, FIFO."""
    make_signal: Callable[[], Signal]
    unpickle: Callable[[bytes], Any] = pickle.loads
    """Makes a JobGraph of `Deploy.graph` and `CommitSinks.graph`."""


@dataclass(frozen=True, slots=True)
class TaskSeams:
    """The same for all tasks of one attempt in one slot."""

    job_id: str
    attempt: int
    epoch: int
    config: JobConfig
    clock: Clock
    executor: Executor
    ids: Ids
    storage: Storage | None
    overtakable: Set[int]
    """Edges, by id, on which barriers may overtake rows."""
    inline_bytes_max: int
    """What is stored inline in a checkpoint's metadata, at most, of its state and of what is in flight."""
    send: Callable[[m.FromSlot], None]
    """To the coordinator, FIFO."""
    schedule: Callable[[Task], None]
    """Have `step` called soon."""
