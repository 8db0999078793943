"""The interfaces that a slot needs of its process, and a task of its slot."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from midstream.engine.checkpoint.held_chunks import OnTaken
from midstream.engine.core.config import JobConfig
from midstream.engine.core.interfaces import (
    Clock,
    Ids,
    LocalDisk,
    OpenCalls,
    Signal,
    Storage,
    Transport,
    WallClockExecutor,
    no_limit,
)
from midstream.engine.protocol import messages as m
from midstream.engine.worker.source_reads import SourceReads

if TYPE_CHECKING:
    from midstream.engine.worker.task import Task


@dataclass(frozen=True, slots=True)
class SlotServices:
    """The interfaces that a slot needs of its process."""

    clock: Clock
    executor: WallClockExecutor
    ids: Ids
    transport: Transport
    open_storage: Callable[[str], Storage]
    send: Callable[[m.FromSlot], None]
    """Sends a message to the coordinator. Messages arrive in the order of sending."""
    make_signal: Callable[[], Signal]
    open_calls: OpenCalls
    unpickle: Callable[[bytes], Any] = pickle.loads
    """Turns `Deploy.graph` and `CommitSinks.graph` into a JobGraph."""
    resources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the cluster has assigned to the slot: addresses by name."""
    local_disk: LocalDisk | None = None
    """Where state that exceeds its memory is moved; None: all of it stays in memory."""
    memory_limit_bytes: int = 0
    """The memory that the process may use, which the job's slots on the same machine may share; 0 if unknown."""
    on_taken: OnTaken | None = None
    """Called with each chunk that an attempt takes from the one before, on the I/O pool."""


@dataclass(frozen=True, slots=True)
class TaskServices:
    """The interfaces and settings that all tasks of one attempt in one slot share."""

    job_id: str
    attempt: int
    epoch: int
    config: JobConfig
    clock: Clock
    executor: WallClockExecutor
    ids: Ids
    storage: Storage | None
    unaligned_edges: Set[int]
    """The ids of the edges on which barriers may overtake rows."""
    inline_bytes_max: int
    """The maximum number of bytes that a task stores in the checkpoint's metadata of its operators' state, and the same
    number of its rows in flight."""
    send: Callable[[m.FromSlot], None]
    """Sends a message to the coordinator. Messages arrive in the order of sending."""
    open_calls: OpenCalls
    source_reads: SourceReads
    schedule: Callable[[Task], None]
    """Schedules a step of a task."""
    resources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    entry_bytes: Callable[[], int | None] = no_limit
    """See OperatorContext."""
