"""The state with which the next attempt begins: that of a checkpoint, distributed to the slots once for each restart.

For a large job with rows in flight this takes seconds (there are more than 200,000 handles), for which the loop must
not be blocked, since it also handles heartbeats. So the I/O pool distributes the state, and encodes that of each slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from midstream.engine.checkpoint.metadata import CheckpointMetadata, SourcePosition
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.source_api import decoded_splits
from midstream.engine.protocol.messages import Restored


@dataclass(frozen=True, slots=True)
class DistributedState:
    finished: Set[TaskId]
    """The tasks that had finished, which are not run again."""
    sources: Mapping[str, SourcePosition]
    dropped: tuple[str, ...]
    """The uids whose state is dropped."""
    slots: tuple[bytes, ...]
    """The encoded state of each slot, see `Deploy.restore`."""


NOTHING = DistributedState(frozenset(), {}, (), ())
"""The state with which a job begins at the beginning."""


def distribute(metadata: CheckpointMetadata, plan: JobPlan) -> DistributedState:
    """Distribute the state of a checkpoint. For the I/O pool. Raises what `assign_state` raises."""
    graph = plan.graph
    state = assign_state(metadata, graph, plan.allow_dropped_state)
    for uid, position in state.sources.items():
        # validated here: the coordinator decodes them one by one, without checks
        decoded_splits(position.pending, f"source {uid!r}")
    slots = []
    for subtask in range(graph.slots):
        refs = [TaskId(vertex.id, subtask) for vertex in graph.vertices if subtask < vertex.parallelism]
        tasks = tuple((ref, state.tasks[ref]) for ref in refs if ref in state.tasks)
        channels = tuple((ref, state.channels[ref]) for ref in refs if ref in state.channels)
        slots.append(msgspec.msgpack.encode(Restored(tasks, channels)) if tasks or channels else b"")
    return DistributedState(state.finished, state.sources, state.dropped, tuple(slots))


_Of: TypeAlias = tuple[CheckpointMetadata, JobGraph]


class StateDistribution:
    """Distributes the state for the next attempt, and keeps it until it has been sent."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._distributed: tuple[_Of, DistributedState] | None = None
        self._requested: _Of | None = None
        """The checkpoint that is being distributed for the next attempt, and its graph."""

    def state_of(self, metadata: CheckpointMetadata | None, graph: JobGraph) -> DistributedState:
        """Return the state of this checkpoint for this graph. It `is_ready`."""
        state = self._find(metadata, graph)
        assert state is not None
        return state

    def _find(self, metadata: CheckpointMetadata | None, graph: JobGraph) -> DistributedState | None:
        """Return the state of this checkpoint for this graph; None if it has not been distributed yet."""
        if metadata is None:
            return NOTHING
        if self._distributed is not None and _is_same(self._distributed[0], (metadata, graph)):
            return self._distributed[1]
        return None

    def keep(self, metadata: CheckpointMetadata, graph: JobGraph, state: DistributedState) -> None:
        self._distributed = (metadata, graph), state

    def forget(self) -> None:
        """Release the state: the slots have received it, and it is not needed again before the next attempt."""
        self._distributed = None

    def distribute(self, metadata: CheckpointMetadata, plan: JobPlan, done: Callable[[Failed | None], bool]) -> None:
        """Distribute the state, then call `done` with the failure or None. The result is kept only if `done` returns
        True.
        """
        ready = partial(self._ready, (metadata, plan.graph), done)
        what = f"checkpoint {metadata.checkpoint_id} to be distributed to the slots"
        self._effects.run_io(IoKind.DISTRIBUTE, partial(distribute, metadata, plan), ready, waits_for=what)

    def is_ready(self, metadata: CheckpointMetadata | None, plan: JobPlan, failed: Callable[[Failed], None]) -> bool:
        """Return whether the state has been distributed. If not, this begins to distribute it, and an event follows."""
        if self._find(metadata, plan.graph) is not None:
            return True
        assert metadata is not None
        if self._requested is None or not _is_same(self._requested, (metadata, plan.graph)):
            requested = self._requested = metadata, plan.graph

            def done(failure: Failed | None) -> bool:
                if self._requested is not requested:
                    return False
                self._requested = None
                if failure is not None:
                    failed(failure)
                return True

            self.distribute(metadata, plan, done)
        return False

    def _ready(self, of: _Of, done: Callable[[Failed | None], bool], outcome: Done[DistributedState] | Failed) -> None:
        is_used = done(outcome if isinstance(outcome, Failed) else None)
        if is_used and isinstance(outcome, Done):
            self._distributed = of, outcome.value


def _is_same(one: _Of, other: _Of) -> bool:
    return one[0] is other[0] and one[1] is other[1]
