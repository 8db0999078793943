"""A coordinator on a bench: slots that answer as told, storage in memory, timers that fire when time is moved on."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from in_memory import MemoryStorage, NeverRun
from midstream.coordinator import Coordinator
from midstream.coordinator.events import (
    CancelTimer,
    ClientAsked,
    CloseSlot,
    CoordinatorEvent,
    IoDone,
    JobEnded,
    JobPlan,
    NewerOutput,
    ReplyTo,
    RequestSlot,
    RunIo,
    Send,
    SetTimer,
    SlotConnected,
    SlotLost,
    SlotMessage,
    Started,
    Tell,
    TimePassed,
    TimerFired,
)
from midstream.coordinator.slots import PYTHON
from midstream.core.config import JobConfig, RestartStrategy
from midstream.core.errors import ConfigError
from midstream.core.ids import TaskId
from midstream.core.seams import Done, Failed
from midstream.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.operators.sink import Committer, Sink, SinkWriter, WriterContext
from midstream.operators.source import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.protocol import messages as m
from midstream.protocol.job_status import JobStatus

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

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        self.positions.append(position)
        if self.error is not None:
            raise self.error
        done = int(position or b"0")
        found = self.rounds[done] if done < len(self.rounds) else ()
        splits = tuple(Split(i, b"", follows=i in self.following) for i in found)
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

    def committer(self, job_id: str) -> Committer:
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


class Bench:
    """Runs a coordinator. What is in `held` (prefixes of I/O tokens) waits for `release`.

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
        self.job = Coordinator(plan, START_MS, self._open_storage)
        self.sent: list[tuple[int, m.ToSlot]] = []
        self.closed: list[int] = []
        self.requests: list[str] = []
        self.replies: dict[int, m.Reply] = {}
        self.ended: JobEnded | None = None
        self.timers: dict[str, int] = {}
        self.told: list[str] = []
        self.waiting: list[RunIo] = []
        """I/O that is held back."""
        self.answers: dict[type, bool] = {m.Deploy: True, m.Start: True, m.Cancel: True}
        self._tokens: set[str] = set()
        self._events: deque[CoordinatorEvent] = deque()
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

    def feed(self, event: CoordinatorEvent) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for instruction in self.job.handle(self._events[0], self.now_ms):
                self._execute(instruction)
            self.job.check()
            self._events.popleft()

    def _execute(self, instruction: Any) -> None:
        assert self.ended is None or isinstance(instruction, ReplyTo), instruction
        assert instruction.cause > 0
        match instruction:
            case Send(slot, message):
                self.sent.append((slot, message))
                self._answer(slot, message)
            case RequestSlot(request):
                assert request not in self.requests
                self.requests.append(request)
            case CloseSlot(slot):
                self.closed.append(slot)
            case SetTimer(token, delay_s):
                self._use(token)
                self.timers[token] = self.now_ms + round(delay_s * 1000)
            case CancelTimer(token):
                self.timers.pop(token, None)
            case RunIo(token, _):
                self._use(token)
                if any(token.startswith(prefix) for prefix in self.held):
                    self.waiting.append(instruction)
                else:
                    self._run(instruction)
            case ReplyTo(client, reply):
                assert client not in self.replies
                self.replies[client] = reply
            case Tell(text):
                self.told.append(text)
            case JobEnded():
                self.ended = instruction

    def _use(self, token: str) -> None:
        assert token not in self._tokens, token
        self._tokens.add(token)

    def _run(self, io: RunIo) -> None:
        try:
            outcome: Done[object] | Failed = Done(io.work())
        except Exception as error:  # noqa: BLE001 - an outcome like another
            outcome = Failed(error)
        self._events.append(IoDone(io.token, outcome))
        if len(self._events) == 1:
            self._events.clear()
            self.feed(IoDone(io.token, outcome))

    def release(self, prefix: str = "") -> None:
        """Run what was held back."""
        chosen = [io for io in self.waiting if io.token.startswith(prefix)]
        assert chosen, (prefix, self.waiting)
        for io in chosen:
            self.waiting.remove(io)
            self._run(io)

    def _answer(self, slot: int, message: m.ToSlot) -> None:
        if not self.answers.get(type(message), False):
            return
        match message:
            case m.Deploy(attempt=attempt):
                self._events.append(SlotMessage(slot, m.Deployed(attempt)))
            case m.Start(attempt):
                for ref in self.tasks_on(slot):
                    self._events.append(SlotMessage(slot, m.TaskRunning(attempt, ref)))
            case m.Cancel(attempt):
                self._events.append(SlotMessage(slot, m.Cancelled(attempt)))

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire in their order."""
        until_ms = self.now_ms + round(seconds * 1000)
        for _ in range(1000):
            due = [(at, token) for token, at in self.timers.items() if at <= until_ms]
            if not due:
                break
            at, token = min(due)
            del self.timers[token]
            self.now_ms = max(self.now_ms, at)
            self.feed(TimerFired(token))
        else:
            raise AssertionError("timers fire without end")
        self.now_ms = until_ms

    def wait(self, seconds: int) -> None:
        """The same, and the coordinator is told of it, second by second, as it is while a job runs."""
        for _ in range(seconds):
            self.advance(1)
            if self.ended is None:
                self.feed(TimePassed(1.0))

    # ---- slots ----

    def start(self) -> Bench:
        """Up to the point where all slots are asked for."""
        self.feed(Started())
        return self

    def connect(self, count: int | None = None, python: str = PYTHON) -> list[int]:
        """Slots register for the open requests."""
        connected = []
        for request in self.requests[self._slots :][:count]:
            slot = self._slots
            self._slots += 1
            connected.append(slot)
            self.feed(SlotConnected(slot, m.Register(f"host{slot}", 7000 + slot, 100 + slot, python, request)))
        return connected

    def run(self) -> Bench:
        """A job whose tasks are running."""
        self.start().connect()
        assert self.state == "running", (self.state, self.ended)
        return self

    def lose(self, slot: int, crash: str = "", last_lines: str = "") -> None:
        self.feed(SlotLost(slot, "connection reset", crash, last_lines))

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
        self.feed(SlotMessage(self.slots[ref.subtask], message))

    def fail(self, ref: TaskId, summary: str = "ValueError: row 7 is bad", fatal: bool = False, same: str = "") -> None:
        self.say(ref, m.TaskFailed(self.attempt, ref, summary, f"Traceback …\n{summary}\n", fatal, same=same))

    def end_of_data(self, *refs: TaskId) -> None:
        for ref in refs:
            self.say(ref, m.TaskEndOfData(self.attempt, ref))

    def finish(self, *refs: TaskId, committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()) -> None:
        for ref in refs:
            self.say(ref, m.TaskFinished(self.attempt, ref, committables))

    def feed_from(self, slot: int, message: m.FromSlot) -> None:
        self.feed(SlotMessage(slot, message))

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
            self.advance(0.2)
        pending = self.job.checkpoints.pending
        assert pending is not None
        self.ack(pending.checkpoint_id, *sorted(pending.missing), finished=finished)
        return pending.checkpoint_id

    # ---- outside ----

    def ask(self, request: m.ClientRequest) -> int:
        self._clients += 1
        self.feed(ClientAsked(self._clients, request))
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
