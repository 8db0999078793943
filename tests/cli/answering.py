"""A job as the command line sees it: a real driver with its port and its page, and a coordinator that is scripted."""

from __future__ import annotations

from typing import Protocol

import msgspec
import pytest

from in_memory import NoRows
from midstream.cli.main import main
from midstream.engine.coordinator.events import (
    CancelRequested,
    ClientRequested,
    CoordinatorEvent,
    Instruction,
    JobEnded,
    JobPlan,
    ReplyTo,
)
from midstream.engine.core.config import JobConfig
from midstream.engine.graph.job_graph import JobGraph, SourceSpec, Vertex
from midstream.engine.protocol.job_status import JobStatus, WaitStatus
from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoSavepoint, DoStop, GetStatus, Reply
from midstream.page.address import PageAddress
from midstream.page.server import PageServer
from midstream.runtime.driver.driver import Driver
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample

TOKEN = "a-token-of-the-tests"


class Answering:
    """Needs no slots; answers what the command line asks."""

    def __init__(self, plan: JobPlan, now_ms: int) -> None:
        self._plan = plan
        self.refuses = False
        self.stop_waits: list[int] = []
        """For a stop that has not been answered: who asked."""
        self.is_slow = False
        self.asked: list[object] = []
        self.driver: Driver
        self.link: str
        """To its page, with the token."""

    def status(self, now_ms: int, state: str = "running") -> JobStatus:
        return msgspec.structs.replace(sample(), state=state, job_id=self._plan.job_id, name=self._plan.config.name)

    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]:
        if isinstance(event, CancelRequested):
            return [JobEnded("failed", None, self.status(now_ms, "failed"))]
        if not isinstance(event, ClientRequested):
            return []
        self.asked.append(event.request)
        match event.request:
            case DoStop() if self.is_slow:
                self.stop_waits.append(event.client)
                return []
            case GetStatus() if self.stop_waits and len(self.asked) < 3:
                what = "the metadata of checkpoint 5 to be written in /data"
                status = msgspec.structs.replace(self.status(now_ms), waiting=(WaitStatus(what, 31_000, 600_000),))
                return [ReplyTo(event.client, Reply(status=status))]
            case GetStatus() if self.stop_waits:  # what it waits for has been said
                return [
                    ReplyTo(event.client, Reply(status=self.status(now_ms))),
                    ReplyTo(self.stop_waits.pop(), Reply(checkpoint="/data/chk-5")),
                    JobEnded("stopped", None, self.status(now_ms, "stopped"), "/data/chk-5"),
                ]
            case DoCheckpoint() if self.refuses:
                return [ReplyTo(event.client, Reply(error="checkpoint 4 failed: the disk is full"))]
            case DoCheckpoint():
                return [ReplyTo(event.client, Reply(checkpoint="/data/chk-4"))]
            case DoRescale() if self.refuses:
                why = (
                    "could not rescale to parallelism 3; the job continues at 2: the job needs 3 slots, but there are 2"
                )
                return [ReplyTo(event.client, Reply(error=why))]
            case DoRescale(parallelism):
                return [ReplyTo(event.client, Reply(checkpoint="/data/chk-6" if parallelism != 2 else None))]
            case DoSavepoint() | DoStop(savepoint=str()) if self.refuses:
                why = "no savepoint was made: /data/saved: the place is taken (it has notes.txt)"
                return [ReplyTo(event.client, Reply(error=why))]
            case DoSavepoint(place):
                return [ReplyTo(event.client, Reply(checkpoint=place or "/data/savepoints/1"))]
            case DoStop(savepoint=str() as place):
                return [
                    ReplyTo(event.client, Reply(checkpoint=place)),
                    JobEnded("stopped", None, self.status(now_ms, "stopped"), place),
                ]
            case DoStop():
                ended = JobEnded("stopped", None, self.status(now_ms, "stopped"), "/data/chk-5")
                return [ReplyTo(event.client, Reply(checkpoint="/data/chk-5")), ended]
            case _:
                return [ReplyTo(event.client, Reply(status=self.status(now_ms)))]


class Start(Protocol):
    """Begins a job of that id and name."""

    def __call__(self, job_id: str, name: str, *, has_page: bool = False) -> Answering: ...


def begun(job_id: str, name: str, has_page: bool) -> Answering:
    """Its driver has started; whoever calls ends it."""
    graph = JobGraph((Vertex(0, 1, SourceSpec("source", "source", NoRows()), ()),), (), 128)
    made: list[Answering] = []

    def make(plan: JobPlan, now_ms: int) -> Answering:
        made.append(Answering(plan, now_ms))
        return made[0]

    page = PageServer(PageAddress(), TOKEN) if has_page else None
    driver = Driver(JobPlan(job_id, graph, b"", JobConfig(name=name)), ProcessSlots(), make, page)
    made[0].driver, made[0].link = driver, page.link if page else ""
    driver.start()
    return made[0]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return " ".join((out if status == 0 else err).split())
