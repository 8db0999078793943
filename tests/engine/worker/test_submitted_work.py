"""Work that an operator submits: its outcome arrives in a step of the task, and the task waits for it at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from in_memory import MemoryStorage
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import MAX_WATERMARK_US, CheckpointBarrier, WatermarkStatus
from midstream.engine.core.errors import JobError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.protocol import messages as m
from midstream.engine.worker.operator_chain import OperatorChain, TaskOutputs
from midstream.engine.worker.task import Step, Task, TaskState
from midstream.engine.worker.task_operators import RestoredOperators
from recovering import Steps, task_seams
from standing_clock import StandingClock

SCHEMA = pa.schema([("n", pa.int64())])
REF = TaskId(0, 0)


def row(n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": [n]}, schema=SCHEMA)


class NoSplits(Source):
    schema = SCHEMA

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("on the driver only")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("there is none")


class Looks(Operator):
    """Emits what its work returns; it holds the watermarks, and is not ready, until all of it has come."""

    holds_watermarks = True

    def __init__(self) -> None:
        self.under_way = 0
        self.held: list[int] = []
        self.context: OperatorContext
        self.out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self.context, self.out = context, out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self.begin(lambda: batch)

    def begin(self, work: Callable[[], pa.RecordBatch]) -> None:
        self.under_way += 1
        self.context.submit(work, self._done)

    def _done(self, outcome: Done[pa.RecordBatch] | Failed) -> None:
        self.under_way -= 1
        if isinstance(outcome, Failed):
            raise JobError("the table could not be read") from outcome.error
        self.out.emit(outcome.value)
        if not self.under_way:
            for watermark_us in self.held:
                self.out.watermark(watermark_us)
            self.held.clear()

    def ready(self, wake: Callable[[], None]) -> bool:
        return not self.under_way

    @property
    def awaits_work(self) -> bool:
        return self.under_way > 0

    def advance_watermark(self, watermark_us: int) -> bool:
        if self.under_way:
            self.held.append(watermark_us)
        else:
            self.out.watermark(watermark_us)
        return True


class Takes(Operator):
    """Keeps the rows and the watermarks that reach it, while it `is_ready`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.watermarks: list[int] = []
        self.is_ready = True
        self.wake: Callable[[], None]

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        assert self.is_ready
        self.rows += to_list(batch.column("n"))

    def ready(self, wake: Callable[[], None]) -> bool:
        self.wake = wake
        return self.is_ready

    def advance_watermark(self, watermark_us: int) -> bool:
        self.watermarks.append(watermark_us)
        return True


class World:
    def __init__(self, *more: Operator) -> None:
        self.io = Steps()
        self.sent: list[m.FromSlot] = []
        self.looks, self.takes = Looks(), Takes()
        specs = (
            OperatorSpec("looks", "the lookup", self.looks),
            *(OperatorSpec(f"more {number}", "more", operator) for number, operator in enumerate(more)),
            OperatorSpec("takes", "takes", self.takes),
        )
        graph = JobGraph((Vertex(0, 1, SourceSpec("source", "source", NoSplits()), specs),), (), 128)
        self.task = Task(REF, graph, task_seams(self.io, MemoryStorage(), send=self.sent.append), [], [])
        self.task.open(RestoredOperators())
        self.task.start()
        self.run()

    def state(self) -> TaskState:
        return self.task.state

    def run(self) -> list[Step]:
        taken: list[Step] = []
        goes_on = True
        while goes_on and self.task.is_live:
            assert len(taken) < 100, "the task never rests"
            taken.append(self.task.next_step())
            goes_on = self.task.step(0.0)
            self.task.check()
        return taken

    def complete(self) -> list[Step]:
        while self.io.run_io():
            pass
        return self.run()


def test_the_outcome_arrives_in_a_step_of_its_own_although_the_operator_takes_no_rows() -> None:
    world = World()
    world.looks.begin(lambda: row(1))
    assert world.run() == [Step.WAIT], "it takes no rows"
    assert world.takes.rows == []
    assert world.complete() == [Step.TIMER, Step.READ_SOURCE]
    assert world.takes.rows == [1]


def test_the_outcome_waits_for_the_operators_after_it() -> None:
    world = World()
    world.takes.is_ready = False
    world.looks.begin(lambda: row(1))
    assert world.complete() == [Step.WAIT]
    world.takes.is_ready = True
    world.takes.wake()
    assert Step.TIMER in world.run()
    assert world.takes.rows == [1]


def test_an_outcome_that_must_wait_does_not_hold_up_that_of_an_operator_after_it() -> None:
    second = Looks()
    world = World(second)
    second.begin(lambda: row(2))
    world.looks.begin(lambda: row(1))
    world.io.io.reverse()  # the first operator's work completes first, and the second one takes no rows yet
    assert world.complete()[:2] == [Step.TIMER, Step.TIMER]
    world.complete()
    assert world.takes.rows == [2, 1]


def test_work_that_fails_is_the_failure_of_its_operator() -> None:
    world = World()

    def work() -> Any:
        raise OSError("no such table")

    world.looks.begin(work)
    world.complete()
    failed = world.sent[-1]
    assert isinstance(failed, m.TaskFailed)
    assert "the table could not be read" in failed.summary and "the lookup" in failed.summary
    assert isinstance(world.task.failure, JobError) and isinstance(world.task.failure.__cause__, OSError)


def test_an_outcome_after_the_end_of_the_attempt_is_dropped() -> None:
    world = World()
    world.looks.begin(lambda: row(1))
    world.task.close()
    assert world.complete() == []
    assert world.takes.rows == []


def test_the_data_ends_when_the_work_has_completed_and_checkpoints_go_on() -> None:
    world = World()
    world.task.stop_source()
    world.looks.ready = lambda wake: True  # type: ignore[method-assign]
    world.looks.begin(lambda: row(1))
    assert world.run()[-1] is Step.READ_GATES
    assert world.state() is TaskState.EMITTING_LAST
    assert world.looks.held == [MAX_WATERMARK_US] and world.takes.watermarks == []
    world.task.trigger_checkpoint(CheckpointBarrier(1, 0))
    world.run()
    assert world.state() is TaskState.EMITTING_LAST
    world.complete()
    assert world.takes.rows == [1] and world.takes.watermarks == [MAX_WATERMARK_US]
    assert world.state() is TaskState.AWAITS_CHECKPOINT
    [ack] = [message for message in world.sent if isinstance(message, m.CheckpointAck)]
    assert not ack.finished


@pytest.mark.parametrize("under_way", [True, False])
def test_a_restored_watermark_is_offered_once_more_to_the_operator_that_held_it(under_way: bool) -> None:
    looks, takes = Looks(), Takes()
    looks.under_way, looks.out = int(under_way), None  # type: ignore[assignment]
    chain = OperatorChain([looks, takes], TaskOutputs([]), StandingClock())
    looks.out = chain.outputs[1]
    chain.restore({0: (20, 10), 1: (10, 10)})
    while chain.is_firing:
        chain.pump()
    assert takes.watermarks == ([] if under_way else [20])
    assert looks.held == ([20] if under_way else [])
    chain.check()


def test_a_chain_is_idle_only_when_its_work_has_completed() -> None:
    sent: list[object] = []
    outputs = TaskOutputs([])
    outputs.broadcast = sent.append  # type: ignore[method-assign, assignment]
    looks = Looks()
    chain = OperatorChain([looks], outputs, StandingClock())
    looks.under_way = 1
    chain.outputs[0].idle(True)
    assert sent == []
    looks.under_way = 0
    chain.completed_work()
    assert sent == [WatermarkStatus(True)]


@pytest.mark.parametrize("is_own", [True, False])
def test_to_wait_for_its_own_work_is_work_and_to_wait_for_the_operators_after_it_is_not(is_own: bool) -> None:
    world = World()
    world.takes.is_ready = is_own
    world.looks.begin(lambda: row(1))
    assert world.run() == [Step.WAIT]
    now_s = round(StandingClock().monotonic_s())
    assert now_s > 7
    for at_s in (5.0, 7.0):
        world.task.step(at_s)
    for _ in range(2):  # what is measured once is not counted again
        metrics = world.task.metrics()
        assert (metrics.busy_ms, metrics.backpressured_ms) == ((now_s * 1000, 0) if is_own else (0, now_s * 1000))
        assert metrics.worked_us[1:] == (now_s * 1_000_000 if is_own else 0, 0)
