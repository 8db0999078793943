"""A coordinator that does what the test says, for tests of what runs one."""

from __future__ import annotations

from typing import Any

from in_memory import NoRows
from midstream.engine.coordinator.events import (
    CancelRequested,
    ClientRequested,
    CloseSlot,
    CoordinatorEvent,
    Instruction,
    JobEnded,
    JobPlan,
    ReplyTo,
    RequestSlot,
    SlotConnected,
    SlotLost,
    SlotMessage,
    SlotRequestFailed,
    Started,
)
from midstream.engine.core.config import JobConfig
from midstream.engine.graph.job_graph import JobGraph, SourceSpec, Vertex
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.messages import DoStop, Reply


def plan(slots: int = 2, job_id: str = "job-0001", **config: Any) -> JobPlan:
    graph = JobGraph((Vertex(0, slots, SourceSpec("source", "source", NoRows()), ()),), (), 128)
    settings = {"name": "scripted", "parallelism": slots, **config}
    return JobPlan(job_id, graph, b"", JobConfig(**settings))


class Scripted:
    """Asks for the job's slots, asks again for each one lost, ends when stopped or cancelled."""

    def __init__(self, plan: JobPlan, now_ms: int) -> None:
        self.plan = plan
        self.events: list[CoordinatorEvent] = []
        self.slots: dict[int, int] = {}
        """Process of each slot that is connected."""
        self.requests = 0
        self.state: Any = "running"

    def _request(self) -> RequestSlot:
        self.requests += 1
        return RequestSlot(f"{self.plan.job_id}-request-{self.requests}")

    def _end(self, state: Any) -> list[Instruction]:
        slots = [CloseSlot(slot, "the end") for slot in self.slots]
        self.slots = {}
        self.state = state
        return [*slots, JobEnded(state, None, self.status(0))]

    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]:
        self.events.append(event)
        match event:
            case Started():
                return [self._request() for _ in range(self.plan.graph.slots)]
            case SlotConnected(slot, register):
                self.slots[slot] = register.pid
            case SlotLost(slot):
                del self.slots[slot]
                return [self._request()]
            case CancelRequested():
                return self._end("failed")
            case ClientRequested(client, DoStop()):
                return [ReplyTo(client, Reply()), *self._end("stopped")]
            case ClientRequested(client):
                return [ReplyTo(client, Reply(status=self.status(now_ms)))]
            case _:
                pass
        return []

    def status(self, now_ms: int) -> JobStatus:
        return JobStatus(
            job_id=self.plan.job_id,
            name=self.plan.config.name,
            state=self.state,
            attempt=0,
            started_ms=0,
            now_ms=now_ms,
            slots=len(self.slots),
            slots_needed=self.plan.graph.slots,
            vertices=(),
            edges=(),
            checkpoints_completed=0,
            checkpoints_failed=0,
            last_checkpoint=None,
            checkpoints=(),
            failures=(),
            restarts=0,
            restored_from=None,
            checkpoint_dir=None,
            slot_pids=tuple(self.slots.values()),
        )

    def of_type(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def lost(self) -> list[SlotLost]:
        return self.of_type(SlotLost)

    @property
    def failed(self) -> list[SlotRequestFailed]:
        return self.of_type(SlotRequestFailed)

    @property
    def said(self) -> list[SlotMessage]:
        return self.of_type(SlotMessage)
