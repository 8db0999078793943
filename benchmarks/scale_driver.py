"""The driver's side of a job in `scale.py`: its coordinator in the shell that drivers use, and slots that answer at once."""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from midstream import Environment, Tuning
from midstream.api.submit import StartOptions, rescaled
from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.effects import IoKind, io_kind
from midstream.engine.coordinator.events import Instruction, JobEnded, JobPlan, RunIo
from midstream.engine.coordinator.placement.slot_pool import PYTHON
from midstream.engine.coordinator.shell import Shell
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, Mail
from midstream.engine.core.job_pickle import pickled
from midstream.engine.graph.logical_graph import LogicalGraph
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import EdgeMetrics, InputMetrics, TaskMetrics
from midstream.page.prometheus import metrics_text
from midstream.runtime.network.message_channel import SharedEncoding
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.storage.file_storage import FileStorage

PARALLELISMS: Final = (64, 256, 1024, 4096)
KEY_GROUPS: Final = 8192
Program: TypeAlias = Callable[[Environment, int, float, int], None]
"""Builds the job: parallelism, rows per second, bytes that its functions carry."""
_decoder: msgspec.msgpack.Decoder[m.FromSlot] = msgspec.msgpack.Decoder(m.FromSlot)
T = TypeVar("T")


class Timer:
    def __init__(self, mail: Mail) -> None:
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None


class MeasuredShell(Shell):
    """Records the kind of each I/O before it is run."""

    def __init__(self, job: Coordinator, world: World) -> None:
        super().__init__(job, world, world, world)
        self._world = world

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, RunIo):
            self._world.kind = io_kind(instruction.token)
        super()._execute(instruction)


class World:
    """All that a driver's shell runs on, and the slots, which answer at once."""

    core_share = 1.0

    def __init__(self, plan: JobPlan) -> None:
        self.job = Coordinator(plan, 0, FileStorage, threading.Event())
        self.shell = MeasuredShell(self.job, self)
        self.loop_s = 0.0
        """CPU time of the loop's thread."""
        self.io_s: dict[IoKind, float] = {}
        """CPU time of I/O threads."""
        self.kind = IoKind.OPEN
        self.sent: list[tuple[int, m.ToSlot]] = []
        self.sent_bytes = 0
        self.largest: dict[type, int] = {}
        """The longest message of each kind, in bytes."""
        self.replies: dict[int, m.Reply] = {}
        self.outcome: JobEnded | None = None
        self.slots_gone = ""
        self._elapsed_s = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._mails: list[Mail] = []
        self._requests: list[str] = []
        self._slots = 0
        self._request_of: dict[int, str] = {}
        self._tasks: dict[int, tuple[TaskId, ...]] = {}
        self._encoding = SharedEncoding()
        self.ends: set[TaskId] = set()
        """Tasks at the end of their data: their acknowledgements say so."""

    # what the shell runs on

    def now_ms(self) -> int:
        return round(self._elapsed_s * 1000)

    def monotonic_s(self) -> float:
        return self._elapsed_s

    own_core_s = stopwatch_s = processor_s = monotonic_s

    def post(self, mail: Mail) -> None:
        self._mails.append(mail)

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        timer = Timer(mail)
        self._count += 1
        heapq.heappush(self._timers, (self._elapsed_s + delay_s, self._count, timer))
        return timer

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        began = time.thread_time()
        kind = self.kind
        try:
            outcome: Done[T] | Failed = Done(work())
        except Exception as error:  # noqa: BLE001 - an outcome like another
            outcome = Failed(error)
        took_s = time.thread_time() - began
        self.io_s[kind] = self.io_s.get(kind, 0.0) + took_s
        self.loop_s -= took_s
        self._mails.append(lambda: done(outcome))

    def send(self, slot: int, message: m.ToSlot) -> None:
        size = self._size(message)
        self.sent_bytes += size
        self.largest[type(message)] = max(self.largest.get(type(message), 0), size)
        self.sent.append((slot, message))

    def _size(self, message: m.ToSlot) -> int:
        return len(self._encoding.encode(message))

    def release(self, slot: int) -> None:
        self.send(slot, m.Release())

    def drop(self, slot: int) -> bool:
        return True

    def request_slot(self, request: str) -> None:
        self._requests.append(request)

    def abandon(self, request: str) -> None:
        pass

    def last_lines(self, slot: int) -> str:
        return ""

    def answer(self, client: int, reply: m.Reply) -> None:
        self.replies[client] = reply

    def notify_user(self, text: str) -> None:
        pass

    def ended_with(self, outcome: JobEnded) -> None:
        self.outcome = outcome

    # driving it

    def timed(self, work: Callable[[], T]) -> T:
        """On the loop's thread, with all that follows at once."""
        gc.collect()
        began = time.thread_time()
        found = work()
        while self._mails:
            mails, self._mails = self._mails, []
            for mail in mails:
                mail()
        self.loop_s += time.thread_time() - began
        return found

    def settle(self) -> None:
        """Until no message is left."""
        while self._requests or self.sent:
            arriving = self._registering()
            messages = []
            sent, self.sent = self.sent, []
            for slot, message in sent:
                messages += [(slot, msgspec.msgpack.encode(answer)) for answer in self._answers(slot, message)]

            def deliver(
                arriving: list[tuple[int, m.Register]] = arriving, messages: list[tuple[int, bytes]] = messages
            ) -> None:
                for slot, register in arriving:
                    assert not self.shell.refusal(register)
                    self.shell.slot_registered(slot, register)
                self.deliver(messages)

            self.timed(deliver)

    def deliver(self, messages: Sequence[tuple[int, bytes]]) -> None:
        for slot, data in messages:
            self.shell.slot_message(slot, _decoder.decode(data))

    def pass_time(self, seconds: float) -> None:
        until_s = self._elapsed_s + seconds
        while self._timers and self._timers[0][0] <= until_s:
            self._elapsed_s, _, timer = heapq.heappop(self._timers)
            if timer.mail is not None:
                self.timed(timer.mail)
                self.settle()
        self._elapsed_s = until_s

    def _registering(self) -> list[tuple[int, m.Register]]:
        found = []
        for request in self._requests:
            slot = self._slots
            self._slots += 1
            self._request_of[slot] = request
            found.append((slot, m.Register(f"10.0.{slot // 250}.{slot % 250}", 40_000, slot, PYTHON, request)))
        self._requests.clear()
        return found

    def lose(self, slot: int) -> None:
        self.shell.slot_failed(self._request_of[slot], "process 17 was killed by SIGKILL")

    # the slots

    def _answers(self, slot: int, message: m.ToSlot) -> Iterator[msgspec.Struct]:
        match message:
            case m.Deploy(attempt=attempt, tasks=tasks):
                self._tasks[slot] = tasks
                yield m.Deployed(attempt)
            case m.Start(attempt):
                for ref in self._tasks[slot]:
                    yield m.TaskRunning(attempt, ref)
                    if ref.vertex == 0:
                        yield m.RequestSplit(attempt, ref)
            case m.TriggerCheckpoint(attempt=attempt, checkpoint_id=checkpoint_id):
                for ref in self._tasks[slot]:
                    yield self._acknowledgement(attempt, checkpoint_id, ref)
            case m.CheckpointCompleted(attempt=attempt):
                for ref in self._tasks[slot]:
                    if ref in self.ends:
                        yield m.TaskFinished(attempt, ref)
            case m.Commit(request=request):
                yield m.CommitDone(request)
            case m.Cancel(attempt):
                yield m.Cancelled(attempt)

    def _acknowledgement(self, attempt: int, checkpoint_id: int, ref: TaskId) -> m.CheckpointAck:
        vertex = self.job.plan.graph.vertices[ref.vertex]
        file = f"shared/e1-a{attempt}-c{checkpoint_id}-v{ref.vertex}-s{ref.subtask}.state"
        low, high = (KEY_GROUPS * (ref.subtask + i) // vertex.parallelism for i in range(2))
        operators = []
        for spec in vertex.specs:
            parts: tuple[m.PartHandle, ...] = ()
            if spec is vertex.source:
                chunk = m.ChunkHandle(f"c{ref.subtask}", "", 0, 200, 77_777, 1, inline=b"s" * 200)
                parts = (m.PartHandle("splits", "split", (chunk,)),)
            elif spec is vertex.specs[0]:
                chunk = m.ChunkHandle(f"c{ref.subtask}", file, 0, 1000, 77_777, 100, low, high - 1)
                parts = (m.PartHandle("parts", "keyed", (chunk,)),)
            prepared = (b"%d" % ref.subtask,) if spec is vertex.specs[-1] and ref.vertex else ()
            operators.append(m.OperatorSnapshot(spec.uid, parts, prepared))
        files = (file,) if ref.vertex else ()
        return m.CheckpointAck(
            attempt,
            checkpoint_id,
            ref,
            tuple(operators),
            files,
            1000,
            finished=ref in self.ends,
            metrics=self._metrics(ref),
        )

    def _metrics(self, ref: TaskId) -> TaskMetrics:
        vertex = self.job.plan.graph.vertices[ref.vertex]
        rows = round(self._elapsed_s * 1000)
        return TaskMetrics(
            task=ref,
            rows_in=rows,
            rows_out=rows,
            busy_ms=rows,
            backpressured_ms=0,
            watermark_us=rows * 1000,
            operators=tuple((spec.uid, rows, rows) for spec in vertex.specs),
            worked_us=tuple(rows for _ in vertex.specs),
            edges=(EdgeMetrics(0, rows, rows * 16, 7),) if ref.vertex == 0 else (),
            inputs=(InputMetrics(0, rows * 1000, 0, rows * 1000),) if ref.vertex else (),
        )

    def beats(self) -> list[tuple[int, bytes]]:
        assert self.job.attempt is not None
        number = self.job.attempt.number
        return [
            (slot, msgspec.msgpack.encode(m.SlotStatus(number, tuple(map(self._metrics, tasks)), 200 * 2**20)))
            for slot, tasks in self._tasks.items()
        ]

    def everybody(self, make: Callable[[int, TaskId], m.FromSlot]) -> list[tuple[int, bytes]]:
        assert self.job.attempt is not None
        number = self.job.attempt.number
        refs = [(slot, ref) for slot, tasks in self._tasks.items() for ref in tasks]
        refs.sort(key=lambda each: each[1])
        return [(slot, msgspec.msgpack.encode(make(number, ref))) for slot, ref in refs]


class Figures:
    """What one size has cost: milliseconds, or bytes, by what was done."""

    def __init__(self, world: World) -> None:
        self.of: dict[str, float] = {}
        self._world = world

    @contextlib.contextmanager
    def measure(self, what: str, *io: IoKind) -> Iterator[None]:
        """`io`: what of it on the I/O threads is shown, too."""
        world = self._world
        world.loop_s, world.io_s = 0.0, {}
        yield
        self.of[what] = world.loop_s * 1000
        if io:
            self.of[f"{what}, I/O threads"] = sum(world.io_s.get(kind, 0.0) for kind in io) * 1000


def measure_driver(program: Program, parallelism: int, program_bytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="midstream-scale-") as directory:
        env = Environment(
            "scale",
            parallelism=parallelism,
            max_parallelism=KEY_GROUPS,
            checkpoint_dir=directory,
            checkpoint_interval=None,
            tuning=Tuning(buffer_size="4 KiB"),
        )
        program(env, parallelism, 1000.0, program_bytes)
        submitted = env.submission(StartOptions(slots=ProcessSlots()))
        nodes, plan = submitted.nodes, submitted.plan
        plan = replace(plan, graph_bytes=pickled(plan.graph))
        plan = replace(plan, rescaled=lambda wanted: rescaled(plan, LogicalGraph(list(nodes)), ProcessSlots(), wanted))
        world = World(plan)
        figures = Figures(world)
        _live(world, figures, parallelism, directory)
        return figures.of


def _live(world: World, figures: Figures, parallelism: int, directory: str) -> None:
    with figures.measure("start, until all tasks run"):
        world.timed(world.shell.start)
        world.settle()
    assert world.job.status(0).state == "running", world.job.status(0).state
    figures.of["a Deploy, bytes"] = world.largest[m.Deploy]
    figures.of["its graph, bytes"] = len(world.job.plan.graph_bytes)
    figures.of["a Start, bytes"] = world.largest[m.Start]
    figures.of["start: all sent, bytes"] = world.sent_bytes
    world.pass_time(1.0)
    for _ in range(2):  # the second one has something to compare with
        beats = world.beats()
        with figures.measure("a round of heartbeats, received"):
            world.timed(partial(world.deliver, beats))
        world.pass_time(1.0)
    with figures.measure("a status"):
        status = world.timed(lambda: world.job.status(world.now_ms()))
    with figures.measure("it as JSON and as metrics, every subtask"):
        world.timed(lambda: (msgspec.json.encode(status), metrics_text(status, per_subtask=True)))
    world.pass_time(1.0)
    _checkpoint(world, figures, directory)
    with figures.measure("a failover, until all tasks run", IoKind.DISTRIBUTE):
        before = world.sent_bytes
        world.timed(lambda: world.lose(parallelism // 2))
        world.settle()
        world.pass_time(1.0)
    assert world.job.status(0).state == "running" and world.job.status(0).restarts == 1
    figures.of["failover: all sent, bytes"] = world.sent_bytes - before
    with figures.measure("a rescale to half of it", IoKind.RESCALE, IoKind.PUBLISH, IoKind.DISTRIBUTE):
        world.timed(lambda: world.shell.request(1, m.DoRescale(parallelism // 2)))
        world.settle()
        world.pass_time(1.0)
    assert not world.replies[1].error and world.job.status(0).slots == parallelism // 2, world.replies[1]
    _end(world, figures)


def _checkpoint(world: World, figures: Figures, directory: str) -> None:
    with figures.measure("a checkpoint, committed on the slots", IoKind.PUBLISH):
        world.timed(lambda: world.shell.request(0, m.DoCheckpoint()))
        world.settle()
    assert world.replies[0].checkpoint is not None and world.job.checkpoints.history.completed_count == 1, world.replies
    assert not world.job.commits.uncommitted
    file = Path(directory, world.replies[0].checkpoint.rsplit("/", 1)[-1], "_metadata")
    data = file.read_bytes()
    figures.of["its metadata, bytes"] = len(data)
    with figures.measure("its metadata, read"):
        world.timed(lambda: decode_metadata(data, "benchmark"))


def _end(world: World, figures: Figures) -> None:
    """All sources come to the end of their data, then the tasks behind them; one more checkpoint, and all finish."""
    tasks = world.job.attempt
    assert tasks is not None
    world.ends.update(tasks.phases)
    messages = world.everybody(m.TaskEndOfData)
    with figures.measure("the end, with its last checkpoint"):
        world.timed(lambda: world.deliver(messages))
        world.settle()
    assert world.outcome is not None and world.outcome.state == "finished", world.outcome


def show(sizes: Sequence[int], found: Sequence[dict[str, float]]) -> None:
    print("| driver, ms (µs a subtask) | " + " | ".join(f"{size:,} slots" for size in sizes) + " | grows by |")
    print("|---" * (len(sizes) + 2) + "|")
    for what in found[0]:
        values = [each[what] for each in found]
        if what.endswith("bytes"):
            cells = [f"{value:,.0f}" for value in values]
        else:
            cells = [
                f"{value:,.1f} ({value * 1000 / 2 / size:,.1f})" for value, size in zip(values, sizes, strict=True)
            ]
        exponent = ""
        if len(sizes) > 1 and values[-2] > 0 and values[-1] > 0:
            exponent = f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"
        print(f"| {what} | {' | '.join(cells)} | {exponent} |")


def driver(program: Program, sizes: Sequence[int], program_bytes: int) -> None:
    measure_driver(program, sizes[0], program_bytes)  # imports, and what is done once in a process
    show(sizes, [measure_driver(program, size, program_bytes) for size in sizes])
