"""Tasks and slots run on their tables: what the tables do not say raises, with what happened before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any, cast, get_args

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_memory import CountingIds, MemoryStorage
from midstream.connectors.common.malformed_records import BadRecord, reported
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Transport
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.operators.stateless import Stateless
from midstream.engine.operators.windows.window_specs import LATE
from midstream.engine.protocol import messages as m
from midstream.engine.worker.interfaces import SlotServices
from midstream.engine.worker.slot_machine import SLOT_TABLE, SlotEvent, SlotMachine, SlotState
from midstream.engine.worker.task import LIVE, TASK_TABLE, Step, Task, TaskEvent, TaskState
from midstream.engine.worker.task_operators import RestoredOperators
from midstream.runtime.calls_in_turn import CallsInTurn
from on_disk import MemoryDisk
from recovering import Steps, task_seams
from standing_clock import StandingClock

SCHEMA = pa.schema([("n", pa.int64())])
REF = TaskId(0, 0)


class Silent(Source):
    """No split ever comes."""

    schema = SCHEMA

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("on the driver only")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("there is none")


class Wakes(Stateless):
    """Asks to be called once."""

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        context.call_at(0, lambda: None)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        raise AssertionError("there are no rows")


def graph() -> JobGraph:
    spec = OperatorSpec("wakes", "wakes", Wakes("wakes", SCHEMA))
    return JobGraph((Vertex(0, 1, SourceSpec("source", "source", Silent()), (spec,)),), (), 128)


class World:
    """One task of a source."""

    def __init__(self) -> None:
        self.io = Steps()
        self.sent: list[m.FromSlot] = []
        self.services = task_seams(self.io, MemoryStorage(), send=self.sent.append)
        self.task = Task(REF, graph(), self.services, [], [])
        self.task.open(RestoredOperators())

    def state(self) -> TaskState:
        return self.task.state

    def trigger(self, checkpoint_id: int, *, pauses_sources: bool = False) -> None:
        self.task.trigger_checkpoint(CheckpointBarrier(checkpoint_id, 0, pauses_sources=pauses_sources))

    def run(self) -> list[Step]:
        """The steps that it takes until it waits."""
        taken = []
        goes_on = True
        while goes_on and self.task.is_live:
            taken.append(self.task.next_step())
            assert self.task.next_step() is taken[-1], "to look changes nothing"
            goes_on = self.task.step(0.0)
        return taken


def test_a_task_does_one_step_at_a_time_and_says_which_comes_next() -> None:
    world = World()
    world.task.start()
    assert world.run() == [Step.READ_SOURCE]
    for _, timer in world.io.timers:
        timer.ring()
    assert world.run() == [Step.TIMER, Step.READ_SOURCE]
    world.trigger(1, pauses_sources=True)
    assert world.run() == [Step.MAIL, Step.PAUSE]
    assert world.state() is TaskState.PAUSED
    world.task.no_more_splits()
    assert world.run() == [Step.MAIL, Step.PAUSE], "it is not read"
    world.task.resume_source(1)
    assert world.run() == [Step.MAIL, Step.READ_SOURCE, Step.FLUSH, Step.READ_GATES]
    assert world.state() is TaskState.AWAITS_CHECKPOINT and world.task.is_finishing
    world.trigger(2)
    world.run()
    while world.io.run_io():
        pass
    world.task.checkpoint_completed(2)
    assert world.run() == [Step.MAIL, Step.FINISH]
    assert world.state() is TaskState.FINISHED


@pytest.mark.parametrize("aborted", [1, 2])
def test_a_source_holds_behind_the_checkpoint_that_asked_for_it_and_no_other(aborted: int) -> None:
    world = World()
    world.task.start()
    world.trigger(2, pauses_sources=True)
    world.run()
    world.task.checkpoint_aborted(aborted)
    world.run()
    assert world.state() is (TaskState.RUNNING if aborted == 2 else TaskState.PAUSED)


def late_row(task: Task) -> None:
    task.operators.chain.outputs[1].emit(pa.record_batch({"n": pa.array([1])}), LATE)


def late_timer(task: Task) -> None:
    task.operators.chain.operators[0].timers_dropped += 1


def failed_row(task: Task) -> None:
    task.operators.chain.operators[0].failed_rows = 1


def bad_record(task: Task) -> None:
    assert task.operators.source is not None
    task.operators.source.tally.count(0, reported([BadRecord(0, "in.csv", None, 0, b"x", "not a number")]))


@pytest.mark.parametrize(
    ("drop", "dropped"),
    [
        (None, None),
        (late_row, ((("wakes", 1),), (), (), 0)),
        (failed_row, ((), (("wakes", 1),), (), 0)),
        (late_timer, ((), (), (("wakes", 1),), 0)),
        (bad_record, ((), (), (), 1)),
    ],
)
def test_a_checkpoint_is_acknowledged_with_what_was_dropped_before_it(
    drop: Callable[[Task], None] | None, dropped: object
) -> None:
    """A restored task does not drop it again, and the slot may be lost before its next heartbeat."""
    world = World()
    world.task.start()
    world.run()
    if drop is not None:
        drop(world.task)
    world.trigger(1)
    world.run()
    while world.io.run_io():
        pass
    ack = world.sent[-1]
    assert isinstance(ack, m.CheckpointAck)
    metrics = ack.metrics
    assert (metrics and (metrics.late, metrics.failed, metrics.timers_dropped, metrics.bad_records)) == dropped


def test_to_resume_is_nothing_to_a_task_that_awaits_that_checkpoint_as_its_final_one() -> None:
    world = World()
    world.task.start()
    world.task.no_more_splits()
    world.run()
    world.trigger(1, pauses_sources=True)
    world.run()
    world.task.resume_source(1)
    world.task.checkpoint_completed(1)
    world.run()
    assert world.state() is TaskState.AWAITS_SENT


@given(st.data())
def test_a_task_ends_with_the_first_complete_checkpoint_that_it_has_joined_since_its_data_ended(
    data: st.DataObject,
) -> None:
    """Whatever has become of the others, and however late an abort of one of them arrives."""
    world = World()
    world.task.start()
    before = data.draw(st.integers(0, 2), "checkpoints before the end")
    for checkpoint_id in range(1, before + 1):
        world.trigger(checkpoint_id)
    world.run()
    world.task.no_more_splits()
    world.run()
    joined = range(before + 1, before + 1 + data.draw(st.integers(1, 4), "checkpoints after the end"))
    completes = data.draw(st.sampled_from(joined), "the one that completes")
    word: list[tuple[str, int]] = []
    """What the task learns, in an order that connections may bring: of each checkpoint its trigger, then its outcome."""
    late: list[tuple[str, int]] = [("aborted", before)] if before else []
    for checkpoint_id in joined:
        word.append(("trigger", checkpoint_id))
        if checkpoint_id < completes:
            late.append(("aborted", checkpoint_id))
        arrived: int = data.draw(st.integers(0, len(late)), "how many aborts arrive by now")
        word += late[:arrived]
        del late[:arrived]
    for kind, checkpoint_id in word:
        if kind == "trigger":
            world.trigger(checkpoint_id)
        else:
            world.task.checkpoint_aborted(checkpoint_id)
        world.run()
        assert world.state() is TaskState.AWAITS_CHECKPOINT
    while world.io.run_io():
        pass
    world.task.checkpoint_completed(completes)
    world.run()
    assert world.state() is TaskState.FINISHED


def test_a_checkpoint_joined_before_the_end_of_the_data_is_not_the_final_one() -> None:
    world = World()
    world.task.start()
    world.trigger(1)
    world.run()
    world.task.no_more_splits()
    world.run()
    world.trigger(2)
    world.run()
    world.task.checkpoint_completed(1)
    world.run()
    assert world.state() is TaskState.AWAITS_CHECKPOINT


def test_what_cannot_come_in_a_tasks_state_says_state_and_event_and_what_came_before() -> None:
    world = World()
    world.task.start()
    world.trigger(7)
    world.run()
    with pytest.raises(InvariantError) as caught:
        world.task.start()
    text = str(caught.value)
    assert text.startswith("task: START while RUNNING")
    assert text.index("START") < text.index("trigger of checkpoint 7")


def test_every_state_of_a_task_can_be_reached_and_every_live_one_can_fail_and_be_closed() -> None:
    reached = {state for row in TASK_TABLE.rows for state in row.then}
    assert reached == {*TaskState} - {TaskState.CREATED}
    for state in LIVE:
        assert TASK_TABLE.next(state, TaskEvent.FAIL) is TASK_TABLE.next(state, TaskEvent.CLOSE) is TaskState.CLOSED
    assert not any(row.state in (TaskState.FINISHED, TaskState.CLOSED) for row in TASK_TABLE.rows), "they are the ends"


class Slot:
    """One slot with one task; nothing answers."""

    def __init__(self, unpickle: Callable[[bytes], Any] = lambda data: graph(), **services: Any) -> None:
        self.io = Steps()
        self.sent: list[m.FromSlot] = []
        self.machine = SlotMachine(
            SlotServices(
                clock=StandingClock(),
                executor=self.io,
                ids=CountingIds(),
                transport=cast(Transport, None),
                open_storage=lambda root: MemoryStorage(),
                send=self.sent.append,
                make_signal=Event,
                open_calls=partial(CallsInTurn, self.io),
                unpickle=unpickle,
                **services,
            )
        )
        self.machine.handle(m.Welcome(0, 1.0, 10.0))

    def deploy(self, attempt: int = 0, tasks: tuple[TaskId, ...] = (REF,), slots: tuple[int, ...] = (0,)) -> None:
        config = msgspec.msgpack.encode(JobConfig(name="job"))
        self.machine.handle(m.Deploy("job", attempt, config, b"graph", slots, tasks))


def test_a_slot_goes_from_attempt_to_attempt() -> None:
    slot = Slot()
    states = [slot.machine.state]
    start, cancel = partial(slot.machine.handle, m.Start(0, ())), partial(slot.machine.handle, m.Cancel(0))
    steps: list[Callable[[], object]] = [slot.deploy, slot.io.run_io, start, cancel]
    for step in steps:
        step()
        states.append(slot.machine.state)
    assert states == [*SlotState, SlotState.IDLE]
    assert [type(message) for message in slot.sent] == [m.Deployed, m.TaskRunning, m.Cancelled]
    assert slot.machine.tasks == {} and slot.machine.pool is None


def test_what_cannot_come_in_a_slots_state_says_state_and_event_and_what_came_before() -> None:
    slot = Slot()
    slot.deploy()
    with pytest.raises(InvariantError) as caught:
        slot.machine.handle(m.Start(0, ()))
    text = str(caught.value)
    assert text.startswith("slot: Start while DEPLOYING")
    assert "Welcome" in text, "and what came before"


@pytest.mark.parametrize("is_deployed", [False, True])
def test_messages_of_an_attempt_that_is_over_or_not_the_current_one_are_ignored(is_deployed: bool) -> None:
    slot = Slot()
    slot.deploy(3)
    if is_deployed:
        slot.io.run_io()
    before = slot.machine.state
    for message in (m.Start(2, ()), m.TriggerCheckpoint(2, 1, 0, (REF,)), m.NoMoreSplits(2, REF)):
        slot.machine.handle(message)
    assert slot.machine.state is before
    slot.machine.handle(m.Cancel(2))
    assert slot.machine.state is before and slot.sent[-1] == m.Cancelled(2)
    slot.machine.handle(m.Cancel(3))
    slot.machine.handle(m.Start(3, ()))
    assert slot.machine.state is SlotState.IDLE


def test_an_attempt_that_comes_unasked_takes_the_place_of_the_one_that_runs() -> None:
    slot = Slot()
    slot.deploy(0)
    slot.io.run_io()
    slot.machine.handle(m.Start(0, ()))
    (task,) = slot.machine.tasks.values()
    slot.deploy(1)
    assert task.state is TaskState.CLOSED and slot.machine.state is SlotState.DEPLOYING
    slot.io.run_io()
    assert slot.sent[-1] == m.Deployed(1)


def test_a_task_that_cannot_be_opened_ends_the_attempt_in_its_slot() -> None:
    def unpickle(data: bytes) -> JobGraph:
        raise LookupError("no such class")

    slot = Slot(unpickle)
    slot.deploy()
    slot.io.run_io()
    (failed,) = slot.sent
    assert isinstance(failed, m.DeployFailed) and "no such class" in failed.summary
    assert slot.machine.state is SlotState.IDLE


def test_an_operator_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError("the target does not answer")

    monkeypatch.setattr(Wakes, "open", refuses)
    slot = Slot()
    slot.deploy()
    slot.io.run_io()
    (failed,) = slot.sent
    assert isinstance(failed, m.DeployFailed)
    assert failed.summary == ("wakes (subtask 0, uid 'wakes') could not be opened: OSError: the target does not answer")


def two_tasks(made: list[weakref.ref[object]]) -> JobGraph:
    (first,) = graph().vertices
    (second,) = graph().vertices
    vertices = first, replace(second, id=1)
    made += (weakref.ref(spec.operator) for vertex in vertices for spec in vertex.operators)
    return JobGraph(vertices, (), 128)


def alive(made: list[weakref.ref[object]]) -> int:
    gc.collect()
    return sum(of() is not None for of in made)


def test_a_slot_keeps_no_more_of_what_it_has_loaded_than_its_tasks_use() -> None:
    made: list[weakref.ref[object]] = []
    slot = Slot(lambda data: two_tasks(made))
    slot.deploy(tasks=(REF, TaskId(1, 0)))
    slot.io.run_io()
    assert len(made) == 4, "each task has a graph of its own"
    assert alive(made) == 2


def test_a_slot_keeps_nothing_of_an_attempt_that_could_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError("the target does not answer")

    made: list[weakref.ref[object]] = []
    slot = Slot(lambda data: two_tasks(made))
    with monkeypatch.context() as patched:
        patched.setattr(Wakes, "open", refuses)
        slot.deploy(tasks=(REF, TaskId(1, 0)))
        slot.io.run_io()
    slot.deploy(1, tasks=(REF, TaskId(1, 0)))
    slot.io.run_io()
    assert alive(made[:4]) == 0 and alive(made) == 2


@pytest.mark.parametrize(("hosts", "sharing"), [(("a", "b", "c", "d"), 1), (("a", "b", "a", "a"), 3)])
def test_slots_of_one_machine_share_its_memory(
    hosts: tuple[str, ...], sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python objects and columns get half of it each. Until all slots start, each counts on being one of all of them."""
    contexts: list[OperatorContext] = []
    monkeypatch.setattr(Wakes, "open", lambda self, context, out: contexts.append(context))
    monkeypatch.setattr(Wakes, "holds_entries", property(lambda self: True))
    slot = Slot(local_disk=MemoryDisk(), memory_limit_bytes=96 * 2**20)
    slot.deploy(slots=(0, 1, 2, 3))
    slot.io.run_io()
    (context,) = contexts
    assert context.entry_bytes() == 96 * 2**20 // 2 // 4 // 2
    peers = tuple(m.Peer(number, host, 1) for number, host in enumerate(hosts))
    slot.machine.handle(m.Start(0, peers))
    assert context.entry_bytes() == 96 * 2**20 // 2 // sharing // 2


def test_every_message_to_a_slot_is_expected_in_some_state() -> None:
    events = {row.event for row in SLOT_TABLE.rows}
    assert events == {*get_args(m.ToSlot), *SlotEvent}
