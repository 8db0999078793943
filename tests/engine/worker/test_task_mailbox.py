"""Mails go before rows, but not without bound; and none of them is ever left lying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from in_memory import MemoryStorage
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Storage
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.base import OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.operators.stateless import Stateless
from midstream.engine.protocol import messages as m
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.engine.worker.task import MAILS_IN_A_ROW_MAX, Task
from midstream.engine.worker.task_operators import RestoredOperators
from recovering import Steps, task_seams


class Clock:
    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return 0.0

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0


class Silent(Source):
    """No split ever comes."""

    schema = pa.schema([("n", pa.int64())])

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("on the driver only")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("there is none")


class AlwaysDue(Stateless):
    """Wants to be woken at once, whenever it has been woken."""

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        self._context = context
        self.woken = 0
        self._wake()

    def _wake(self) -> None:
        self.woken += 1
        self._context.call_at(0, self._wake)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        raise AssertionError("there are no rows")


class Slot:
    """Runs the steps of one task for as long as it wants to be run."""

    def __init__(
        self, storage: Storage | None = None, operators: tuple[OperatorSpec, ...] = (), inline_bytes_max: int = 2**16
    ) -> None:
        self.is_scheduled = False
        self.io = Steps()
        self.sent: list[m.FromSlot] = []
        services = task_seams(
            self.io,
            storage,
            clock=Clock(),
            inline_bytes_max=inline_bytes_max,
            send=self.sent.append,
            schedule=self.schedule,
        )
        vertex = Vertex(0, 1, SourceSpec("source", "source", Silent()), operators)
        self.task = Task(TaskId(0, 0), JobGraph((vertex,), (), 128), services, [], [])
        self.task.open(RestoredOperators())
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


def test_timers_that_are_always_due_and_mails_that_always_come_leave_rows_their_turn() -> None:
    due = AlwaysDue("due", Silent.schema)
    slot = Slot(MemoryStorage(), (OperatorSpec("due", "due", due),))
    slot.task.no_more_splits()
    for _ in range(8 * (MAILS_IN_A_ROW_MAX + 1)):
        for _, timer in slot.io.timers:
            timer.ring()
        slot.io.timers.clear()
        slot.task.mail(lambda: None)
        slot.task.step(0.0)
    assert isinstance(slot.sent[-1], m.TaskEndOfData), "its source's turn never came"
    assert due.woken > 1


def test_a_task_ends_behind_its_final_checkpoint_although_the_next_one_is_triggered_with_it() -> None:
    """Where checkpoints take longer than their interval, each is triggered in the step in which the last one completes."""
    slot = Slot(MemoryStorage())
    slot.task.no_more_splits()
    slot.run()
    assert isinstance(slot.sent[-1], m.TaskEndOfData)
    slot.task.trigger_checkpoint(CheckpointBarrier(1, 0))
    slot.run()
    slot.io.run_io()
    assert isinstance(slot.sent[-1], m.CheckpointAck)
    slot.task.checkpoint_completed(1)
    slot.task.trigger_checkpoint(CheckpointBarrier(2, 0))
    slot.run()
    assert isinstance(slot.sent[-1], m.TaskFinished)


def test_a_task_that_has_joined_the_next_checkpoint_before_it_hears_of_the_final_one_answers_and_ends() -> None:
    slot = Slot(MemoryStorage())
    slot.task.no_more_splits()
    slot.task.trigger_checkpoint(CheckpointBarrier(1, 0))
    slot.run()
    slot.task.trigger_checkpoint(CheckpointBarrier(2, 0))
    slot.run()
    slot.task.checkpoint_completed(1)
    slot.task.checkpoint_completed(2)
    slot.run()
    assert not any(isinstance(message, m.TaskFinished) for message in slot.sent)
    while slot.io.run_io():
        slot.run()
    slot.run()
    assert [type(message) for message in slot.sent[-3:]] == [m.CheckpointAck, m.CheckpointAck, m.TaskFinished]


class Unchanged(AlwaysDue):
    """Its state is one chunk, always the same."""

    def _wake(self) -> None:
        pass

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        chunk = Chunk("c", pa.table({"n": [1]}))
        return Snapshot(SnapshotResult({"all": StatePart(Redistribute.SPLIT, (chunk,))}))


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_snapshot_refers_to_the_newest_checkpoint_that_had_completed_when_it_was_triggered(is_heard: bool) -> None:
    """The barrier may come before the coordinator's own word, and what older checkpoints hold may be gone by then."""
    slot = Slot(MemoryStorage(), (OperatorSpec("same", "same", Unchanged("same", Silent.schema)),), 0)

    def file_of(checkpoint_id: int, completed_id: int) -> str:
        slot.task.trigger_checkpoint(CheckpointBarrier(checkpoint_id, 0, completed_id=completed_id))
        slot.run()
        while slot.io.run_io():
            slot.run()
        ack = slot.sent[-1]
        assert isinstance(ack, m.CheckpointAck) and ack.checkpoint_id == checkpoint_id
        return ack.operators[-1].parts[0].chunks[0].file

    first = file_of(1, 0)
    second = file_of(2, 0)
    assert first != second, "of the first it was not known yet that it had completed"
    if is_heard:
        slot.task.checkpoint_completed(1)
        slot.task.checkpoint_completed(2)
    assert file_of(3, 2) == second
    slot.task.checkpoint_completed(1)
    slot.task.checkpoint_completed(2)
    assert file_of(4, 3) == second


class Asks(AlwaysDue):
    """Wants to be woken in a while; and once more, behind the end."""

    def _wake(self) -> None:
        self.woken += 1
        self._context.call_at(1_000, self._wake)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._context.call_at(0, self._wake)


def test_timers_end_with_the_data_and_none_is_set_behind_it() -> None:
    asks = Asks("asks", Silent.schema)
    slot = Slot(MemoryStorage(), (OperatorSpec("asks", "asks", asks),))
    ((_, pending),) = slot.io.timers
    slot.task.no_more_splits()
    pending.ring()  # it is due, and waits for its turn
    before = asks.woken
    for _ in range(2):
        slot.task.step(0.0)
    assert asks.woken == before + 1
    assert any(timer.mail is not None for _, timer in slot.io.timers), "it has asked again"
    slot.run()
    assert isinstance(slot.sent[-1], m.TaskEndOfData)
    for _, timer in slot.io.timers:
        if timer.mail is not None:
            timer.ring()
    slot.run()
    assert asks.woken == before + 1, "it would emit behind the end"
    slot.task.checkpoint_completed(1)
    slot.run()
    failed = slot.sent[-1]
    assert isinstance(failed, m.TaskFailed)
    assert "has ended its data, and sets a timer at 0 ms" in failed.summary
