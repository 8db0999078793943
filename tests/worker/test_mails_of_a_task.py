"""Mails go before rows, but not without bound; and none of them is ever left lying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from midstream.core.config import JobConfig
from midstream.core.ids import TaskId
from midstream.core.seams import Storage
from midstream.graph.job_graph import SourceSpec, Vertex
from midstream.operators.source import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.worker.task import MAILS_IN_A_ROW_MAX, Task, TaskSeams
from recovering import Steps


class Clock:
    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return 0.0


class Ids:
    def new_id(self) -> str:
        raise AssertionError("nothing is stored here")


class Silent(Source):
    """No split ever comes."""

    schema = pa.schema([("n", pa.int64())])

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("on the driver only")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("there is none")


class Slot:
    """Runs the steps of one task for as long as it wants to be run."""

    def __init__(self) -> None:
        self.is_scheduled = False
        storage: Storage | None = None
        seams = TaskSeams(
            job_id="job",
            attempt=0,
            epoch=1,
            clock=Clock(),
            executor=Steps(),
            ids=Ids(),
            storage=storage,
            inline_bytes_max=0,
            send=lambda message: None,
            schedule=self.schedule,
        )
        vertex = Vertex(0, 1, SourceSpec("source", "source", Silent()), ())
        self.task = Task(TaskId(0, 0), vertex, JobConfig(name="job"), seams, [], [])
        self.task.open({}, {}, {})
        self.task.start()
        self.run()

    def schedule(self, task: Any) -> None:
        self.is_scheduled = True

    def run(self) -> None:
        for _ in range(1_000):
            if not self.is_scheduled:
                return
            self.is_scheduled = False
            if self.task.step(0.0):
                self.is_scheduled = True
        raise AssertionError("the task never rests")


@pytest.mark.parametrize("mails", [1, MAILS_IN_A_ROW_MAX, MAILS_IN_A_ROW_MAX + 1, 3 * MAILS_IN_A_ROW_MAX])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_task_that_has_nothing_to_read_handles_every_mail(mails: int, at_once: bool) -> None:
    slot = Slot()
    handled: list[int] = []

    def mail(number: int) -> Callable[[], None]:
        return lambda: handled.append(number)

    for number in range(mails):
        slot.task.mail(mail(number))
        if not at_once:
            slot.run()
    slot.run()
    assert handled == list(range(mails))
