"""A coordinator on a bench: slots that answer as told, storage in memory, timers that fire when time is moved on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from in_memory import MemoryStorage, NeverRun
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import (
    CoordinatorEvent,
    Instruction,
    JobEnded,
    JobPlan,
    NewerOutput,
    RunIo,
    SetTimer,
)
from midstream.engine.coordinator.placement.slot_pool import PYTHON
from midstream.engine.coordinator.shell import Shell
from midstream.engine.core.config import JobConfig, RestartStrategy
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, Mail, SlotAvailability
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import JobStatus

SCHEMA = pa.schema([("n", pa.int64())])
ROOT = "memory://checkpoints"
START_MS = 1_000_000
T = TypeVar("T")


class ScriptedSource(Source):
    """`rounds[i]` are the ids of the splits that the i-th discovery finds."""

    schema = SCHEMA

    def __init__(self, *rounds: Sequence[str], error: Exception | None = None) -> None:
        self.rounds = rounds
        self.error = error
        self.positions: list[bytes | None] = []
        self.settled: list[tuple[bytes | None, list[str]]] = []
        self.closed = 0
        self.following: Sequence[str] = ()
        """Ids of splits that follow the one before."""
        self.times: dict[str, int] = {}
        """The earliest times of splits, by their ids."""
        self.event_times: set[str | None] = set()

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        self.positions.append(position)
        self.event_times.add(context.event_time)
        if self.error is not None:
            raise self.error
        done = int(position or b"0")
        found = self.rounds[done] if done < len(self.rounds) else ()
        splits = tuple(Split(i, b"", follows=i in self.following, min_time_us=self.times.get(i)) for i in found)
        return Discovery(splits, b"%d" % (done + 1), done + 1 >= len(self.rounds))

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("read on slots only")

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        assert unfinished is not None
        self.settled.append((position, [split.id for split in unfinished]))

    def close(self) -> None:
        self.closed += 1


class Ledger(Sink, Committer):
    """A sink whose committer writes down what it is asked."""

    def __init__(self) -> None:
        self.committed: list[tuple[int, tuple[bytes, ...]]] = []
        self.aborted: list[bytes] = []
        self.failures = 0

    def writer(self, context: WriterContext) -> SinkWriter:
        raise AssertionError("made on slots only")

    def committer(self, context: CommitterContext) -> Committer:
        return self

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the target is away")
        self.committed.append((checkpoint_id, tuple(committables)))

    def abort(self, committables: Sequence[bytes]) -> None:
        self.aborted += committables


def restored(deploy: m.Deploy) -> m.Restored:
    """What this slot takes over."""
    return msgspec.msgpack.decode(deploy.restore, type=m.Restored)


def two_vertices(source: Source, sink: Sink, sources: int = 2, sinks: int = 2, keyed: bool = True) -> JobGraph:
    """read → write."""
    kind = Partitioning.KEYED if keyed else Partitioning.FORWARD
    return JobGraph(
        vertices=(
            Vertex(0, sources, SourceSpec("read", "read", source), ()),
            Vertex(1, sinks, None, (OperatorSpec("write", "write", NeverRun(), sink),)),
        ),
        edges=(Edge(0, 0, 1, kind, SCHEMA, ("n",) if keyed else ()),),
        max_parallelism=16,
    )


class BenchTimer:
    def __init__(self, at_ms: int, mail: Mail) -> None:
        self.at_ms = at_ms
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None


class Surroundings:
    """All that the shell of a bench runs on: its loop, its lines and its host."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.slots_gone = ""
        self.gone: set[int] = set()
        """Slots whose connections are."""
        self.elapsed_ms = 0
        """On the clock that nobody sets."""
        self.timers: list[BenchTimer] = []
        self.abandoned: list[str] = []

    def now_ms(self) -> int:
        return self.bench.now_ms

    def monotonic_s(self) -> float:
        return self.elapsed_ms / 1000

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0

    def post(self, mail: Mail) -> None:
        raise AssertionError("the shell posts nothing")

    def call_later(self, delay_s: float, mail: Mail) -> BenchTimer:
        timer = BenchTimer(self.elapsed_ms + round(delay_s * 1000), mail)
        self.timers.append(timer)
        return timer

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        try:
            outcome: Done[T] | Failed = Done(work())
        except Exception as error:  # noqa: BLE001 - an outcome like another
            outcome = Failed(error)
        done(outcome)

    def send(self, slot: int, message: m.ToSlot) -> None:
        self.bench.sent.append((slot, message))
        self.bench.answer(slot, message)

    def release(self, slot: int) -> None:
        self.bench.closed.append(slot)

    def drop(self, slot: int) -> bool:
        return slot not in self.bench.closed and slot not in self.gone

    def request_slot(self, request: str) -> None:
        self.bench.requests.append(request)

    def abandon(self, request: str) -> None:
        self.abandoned.append(request)

    def last_lines(self, slot: int) -> str:
        return ""

    def answer(self, client: int, reply: m.Reply) -> None:
        self.bench.replies[client] = reply

    def notify_user(self, text: str) -> None:
        self.bench.notified.append(text)

    def ended_with(self, outcome: JobEnded) -> None:
        self.bench.ended = outcome


class CheckedShell(Shell):
    """Looks at each instruction before it is carried out, and at the coordinator's invariants after each event."""

    def __init__(self, bench: Bench, surroundings: Surroundings) -> None:
        super().__init__(bench.job, surroundings, surroundings, surroundings)
        self._bench = bench
        self._tokens: set[str] = set()

    def _step(self, event: CoordinatorEvent) -> None:
        super()._step(event)
        self._bench.job.check()

    def _execute(self, instruction: Instruction) -> None:
        assert self.outcome is None, instruction
        assert instruction.cause > 0
        if isinstance(instruction, (SetTimer, RunIo)):
            assert instruction.token not in self._tokens, instruction.token
            self._tokens.add(instruction.token)
        if isinstance(instruction, RunIo) and any(instruction.token.startswith(prefix) for prefix in self._bench.held):
            self._bench.waiting.append(instruction)
        else:
            super()._execute(instruction)

    def run(self, io: RunIo) -> None:
        """I/O that was held back."""
        super()._execute(io)

    @property
    def tokens(self) -> list[str]:
        """Of the coordinator's timers that are set."""
        return list(self._timers)

    def fire(self, token: str) -> None:
        """A timer, before its time."""
        timer = self._timers[token]
        assert isinstance(timer, BenchTimer) and timer.mail is not None
        mail, timer.mail = timer.mail, None
        mail()


class Bench:
    """Runs a coordinator in its shell, and is all that this runs on. What is in `held` (prefixes of I/O tokens) waits
    for `release`.

    Slots answer deployments and cancellations at once unless told otherwise; checkpoints are
    acknowledged when the test says so.
    """

    def __init__(
        self,
        graph: JobGraph | None = None,
        *,
        storage: MemoryStorage | None = None,
        restore: str | None = None,
        job_id: str = "job1",
        allow_dropped_state: bool = False,
        newer_output: NewerOutput | None = None,
        fresh: bool = False,
        held: tuple[str, ...] = (),
        checkpoint_dir: str | None = ROOT,
        graphs: Callable[[int], JobGraph] | None = None,
        elsewhere: Mapping[str, MemoryStorage] | None = None,
        **config: Any,
    ) -> None:
        self.source = ScriptedSource(("a", "b", "c"))
        self.sink = Ledger()
        self.graph = graph or two_vertices(self.source, self.sink)
        self.storage = storage or MemoryStorage()
        self.elsewhere: dict[str, MemoryStorage] = dict(elsewhere or {})
        """Storage below other roots."""
        self.held = held
        self.now_ms = START_MS
        config = {
            "restart": RestartStrategy(kind="fixed", attempts=3, delay_s=0.5),
            "checkpoint_interval_s": 10.0,
            "max_parallelism": self.graph.max_parallelism,
            "parallelism": self.graph.slots,
            **config,
        }
        plan = JobPlan(
            job_id,
            self.graph,
            b"graph",
            JobConfig(name="bench", checkpoint_dir=checkpoint_dir, **config),
            restore,
            allow_dropped_state,
            newer_output,
            fresh,
            rescaled=self._rescaled,
        )
        self._graphs = graphs
        self.plan = plan
        self.availability = SlotAvailability()
        """What the cluster reports when slots do not come."""
        self.job = Coordinator(plan, START_MS, self._open_storage, threading.Event(), lambda: self.availability)
        self.sent: list[tuple[int, m.ToSlot]] = []
        self.closed: list[int] = []
        self.requests: list[str] = []
        self.replies: dict[int, m.Reply] = {}
        self.ended: JobEnded | None = None
        self.notified: list[str] = []
        self.waiting: list[RunIo] = []
        """I/O that is held back."""
        self.answers: dict[type, bool] = {m.Deploy: True, m.Start: True, m.Cancel: True}
        self.surroundings = Surroundings(self)
        self.shell = CheckedShell(self, self.surroundings)
        self.feed = self.shell.feed
        self._slots = 0
        self._clients = 0
        self._prepared = 0

    def _open_storage(self, root: str) -> MemoryStorage:
        return self.storage if root == ROOT else self.elsewhere.setdefault(root, MemoryStorage())

    def _rescaled(self, parallelism: int) -> JobPlan:
        if parallelism > self.graph.max_parallelism:
            raise ConfigError(f"parallelism {parallelism} is above max_parallelism {self.graph.max_parallelism}")
        make = self._graphs or (lambda n: two_vertices(self.source, self.sink, n, n))
        config = msgspec.structs.replace(self.plan.config, parallelism=parallelism)
        return dataclasses.replace(
            self.plan, graph=make(parallelism), graph_bytes=b"graph of %d" % parallelism, config=config
        )

    # ---- driving ----

    def release(self, prefix: str = "") -> None:
        """Run what was held back."""
        chosen = [io for io in self.waiting if io.token.startswith(prefix)]
        assert chosen, (prefix, self.waiting)
        for io in chosen:
            self.waiting.remove(io)
            self.shell.run(io)

    def answer(self, slot: int, message: m.ToSlot) -> None:
        """As the slot does, if it is to."""
        if not self.answers.get(type(message), False):
            return
        match message:
            case m.Deploy(attempt=attempt):
                self.shell.slot_message(slot, m.Deployed(attempt))
            case m.Start(attempt):
                for ref in self.tasks_on(slot):
                    self.shell.slot_message(slot, m.TaskRunning(attempt, ref))
            case m.Cancel(attempt):
                self.shell.slot_message(slot, m.Cancelled(attempt))

    def wait(self, seconds: float) -> None:
        """Time passes; timers fire in their order."""
        surroundings = self.surroundings
        until_ms = surroundings.elapsed_ms + round(seconds * 1000)
        surroundings.timers = [timer for timer in surroundings.timers if timer.mail is not None]
        for _ in range(1000 + 2 * round(seconds)):
            due = [timer for timer in surroundings.timers if timer.at_ms <= until_ms and timer.mail is not None]
            if not due:
                break
            timer = min(due, key=lambda timer: timer.at_ms)
            surroundings.timers.remove(timer)
            self._move_to(max(surroundings.elapsed_ms, timer.at_ms))
            assert timer.mail is not None
            timer.mail()
        else:
            raise AssertionError("timers fire without end")
        self._move_to(until_ms)

    def _move_to(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms - self.surroundings.elapsed_ms
        self.surroundings.elapsed_ms = elapsed_ms

    @property
    def timers(self) -> list[str]:
        """Tokens of the coordinator's timers that are set."""
        return self.shell.tokens

    # ---- slots ----

    def start(self) -> Bench:
        """Up to the point where all slots are asked for."""
        self.shell.start()
        return self

    def connect(self, count: int | None = None, python: str = PYTHON) -> list[int]:
        """Slots register for the open requests."""
        connected = []
        for request in self.requests[self._slots :][:count]:
            slot = self._slots
            self._slots += 1
            connected.append(slot)
            register = m.Register(f"host{slot}", 7000 + slot, 100 + slot, python, request)
            assert not self.shell.refusal(register)
            self.shell.slot_registered(slot, register)
        return connected

    def run(self) -> Bench:
        """A job whose tasks are running."""
        self.start().connect()
        assert self.state == "running", (self.state, self.ended)
        return self

    def lose(self, slot: int, crash: str = "", last_lines: str = "") -> None:
        """Its process has ended."""
        self.shell.slot_failed(self.requests[slot], "connection reset", crash, last_lines)

    def leaves(self, slot: int, reason: str = "its node is drained") -> None:
        self.shell.slot_leaving(self.requests[slot], reason)

    # ---- tasks ----

    @property
    def attempt(self) -> int:
        assert self.job.attempt is not None
        return self.job.attempt.number

    @property
    def slots(self) -> tuple[int, ...]:
        assert self.job.attempt is not None
        return self.job.attempt.slots

    @property
    def tasks(self) -> list[TaskId]:
        assert self.job.attempt is not None
        return list(self.job.attempt.phases)

    def tasks_on(self, slot: int) -> tuple[TaskId, ...]:
        assert self.job.attempt is not None
        return tuple(self.job.attempt.tasks_by_slot()[slot])

    def say(self, ref: TaskId, message: m.FromSlot) -> None:
        self.shell.slot_message(self.slots[ref.subtask], message)

    def fail(
        self,
        ref: TaskId,
        summary: str = "ValueError: row 7 is bad",
        fatal: bool = False,
        same: str = "",
        of_one_row: bool = False,
    ) -> None:
        details = f"Traceback …\n{summary}\n"
        self.say(ref, m.TaskFailed(self.attempt, ref, summary, details, fatal, same=same, of_one_row=of_one_row))

    def end_of_data(self, *refs: TaskId) -> None:
        for ref in refs:
            self.say(ref, m.TaskEndOfData(self.attempt, ref))

    def finish(self, *refs: TaskId, committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()) -> None:
        for ref in refs:
            self.say(ref, m.TaskFinished(self.attempt, ref, committables))

    def feed_from(self, slot: int, message: m.FromSlot) -> None:
        self.shell.slot_message(slot, message)

    def feed_cancelled(self, slot: int) -> None:
        self.feed_from(slot, m.Cancelled(self.attempt))

    # ---- checkpoints ----

    @property
    def triggers(self) -> list[int]:
        """Ids of the checkpoints triggered, each once."""
        ids: list[int] = []
        for _, message in self.sent:
            if isinstance(message, m.TriggerCheckpoint) and message.checkpoint_id not in ids:
                ids.append(message.checkpoint_id)
        return ids

    def triggered_tasks(self, checkpoint_id: int) -> set[TaskId]:
        return {
            ref
            for _, message in self.sent
            if isinstance(message, m.TriggerCheckpoint) and message.checkpoint_id == checkpoint_id
            for ref in message.tasks
        }

    def ack(
        self,
        checkpoint_id: int,
        *refs: TaskId,
        finished: bool = False,
        items: tuple[bytes, ...] | None = None,
        earlier: tuple[m.EarlierCommittables, ...] = (),
        parts: Callable[[TaskId], tuple[m.PartHandle, ...]] | None = None,
        files: Callable[[TaskId], tuple[str, ...]] | None = None,
        alignment_ms: float = 0.0,
    ) -> None:
        """Acknowledge. Each sink subtask has prepared one thing, named after checkpoint and subtask, unless `items` says."""
        for ref in refs:
            uid = "read" if ref.vertex == 0 else "write"
            written = files(ref) if files else (self.state_file(checkpoint_id, ref),)
            for file in written:
                if file not in self.storage.files:
                    self.storage.write(file, [b"state"])
            prepared: tuple[bytes, ...] = ()
            if uid == "write":
                prepared = items if items is not None else (b"%d/%d" % (checkpoint_id, ref.subtask),)
            snapshot = m.OperatorSnapshot(uid, parts(ref) if parts else (), prepared, earlier if uid == "write" else ())
            self.say(
                ref,
                m.CheckpointAck(
                    self.attempt, checkpoint_id, ref, (snapshot,), written, 10, alignment_ms, finished=finished
                ),
            )

    def state_file(self, checkpoint_id: int, ref: TaskId) -> str:
        return (
            f"shared/e{self.job.checkpoints.epoch}-a{self.attempt}-c{checkpoint_id}-v{ref.vertex}-s{ref.subtask}.state"
        )

    def checkpoint(self, finished: bool = False) -> int:
        """Have one made and acknowledged by all."""
        self.ask(m.DoCheckpoint())
        if self.job.checkpoints.pending is None:
            self.wait(0.2)
        pending = self.job.checkpoints.pending
        assert pending is not None
        self.ack(pending.checkpoint_id, *sorted(pending.missing), finished=finished)
        return pending.checkpoint_id

    # ---- outside ----

    def ask(self, request: m.ClientRequest) -> int:
        self._clients += 1
        self.shell.request(self._clients, request)
        return self._clients

    @property
    def state(self) -> str:
        return self.job.status(self.now_ms).state

    @property
    def status(self) -> JobStatus:
        status = self.job.status(self.now_ms)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=JobStatus) == status
        return status

    def messages(self, kind: type[T]) -> list[T]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    @property
    def error(self) -> str:
        assert self.ended is not None and self.ended.state == "failed", self.ended
        return str(self.ended.error)
