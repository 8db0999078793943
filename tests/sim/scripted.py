"""A coordinator of a page: just enough to drive slots through deployment, checkpoints and failover."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from midstream.checkpoint.assign import assign_state
from midstream.checkpoint.metadata import (
    CheckpointMetadata,
    Committables,
    OperatorState,
    SourcePosition,
    layout_of,
    names_of,
)
from midstream.coordinator import events as e
from midstream.core.seams import Done, Storage
from midstream.operators.source import DiscoveryContext, Split
from midstream.protocol import messages as m

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Split).decode


class ScriptedCoordinator:
    def __init__(self, plan: e.JobPlan, now_ms: int, open_storage: Callable[[str], Storage]) -> None:
        self.plan = plan
        self.storage = open_storage("root")
        self.attempt = 0
        self.slots: list[int] = []
        self.registers: dict[int, m.Register] = {}
        self.state = "waiting"
        self.answered: set[int] = set()
        self.positions: dict[str, SourcePosition] = {}
        self.checkpoints = 0
        self.pending: dict[str, Any] | None = None
        self.completed: CheckpointMetadata | None = None
        self.all_completed: list[int] = []
        self.finished: set[m.TaskRef] = set()
        self.at_end: set[m.TaskRef] = set()
        self.asking: list[m.TaskRef] = []
        self.uncommitted = 0
        self.out: list[e.Instruction] = []
        self.failures: list[str] = []
        self.tokens = 0
        self.after_io: dict[str, Callable[[Any], None]] = {}
        self.tasks = [m.TaskRef(v.id, i) for v in plan.graph.vertices for i in range(v.parallelism)]

    def status(self, now_ms: int) -> Any:
        return None

    def handle(self, event: e.CoordinatorEvent, now_ms: int) -> list[e.Instruction]:
        self.now_ms = now_ms
        match event:
            case e.Started():
                for vertex in self.plan.graph.vertices:
                    if vertex.source:
                        uid = vertex.source.uid
                        self.discover(uid, None)
            case e.SlotConnected(slot, register):
                self.slots.append(slot)
                self.registers[slot] = register
                self.send(slot, m.Welcome(slot, 1.0, 10.0))
                if len(self.slots) == self.plan.graph.slots:
                    self.deploy()
            case e.SlotMessage(slot, message):
                if not isinstance(message, m.SlotStatus) and message.attempt == self.attempt:
                    self.on_message(slot, message)
            case e.SlotLost(slot, _):
                self.slots.remove(slot)
                self.request()
                if self.state != "waiting":
                    self.fail("slot lost")
            case e.TimerFired(token):
                self.after_io.pop(token)(None)
            case e.IoDone(token, outcome):
                assert isinstance(outcome, Done), outcome
                self.after_io.pop(token)(outcome.value)
            case _:
                raise AssertionError(event)
        out, self.out = self.out, []
        return out

    # ---- helpers

    def send(self, slot: int, message: Any) -> None:
        self.out.append(e.Send(slot, message))

    def send_all(self, message: Any) -> None:
        for slot in self.slots:
            self.send(slot, message)

    def io(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.tokens += 1
        self.after_io[f"io{self.tokens}"] = then
        self.out.append(e.RunIo(f"io{self.tokens}", work))

    def timer(self, delay_s: float, then: Callable[[Any], None]) -> None:
        self.tokens += 1
        self.after_io[f"t{self.tokens}"] = then
        self.out.append(e.SetTimer(f"t{self.tokens}", delay_s))

    def request(self) -> None:
        self.tokens += 1
        self.out.append(e.RequestSlot(f"r{self.tokens}"))

    def source(self, uid: str) -> Any:
        return next(v for v in self.plan.graph.vertices if v.source and v.source.uid == uid)

    def discover(self, uid: str, position: bytes | None) -> None:
        vertex = self.source(uid)
        context = DiscoveryContext(uid, vertex.parallelism, self.storage)

        def found(discovery: Any) -> None:
            pending = tuple(_encode(split) for split in discovery.splits)
            self.positions[uid] = SourcePosition(uid, discovery.position, discovery.exhausted, pending)
            if len(self.positions) == sum(v.source is not None for v in self.plan.graph.vertices):
                for _ in range(self.plan.graph.slots):
                    self.request()

        self.io(partial(vertex.source.source.discover, position, context), found)

    # ---- deployment

    def deploy(self) -> None:
        self.attempt += 1
        self.state = "deploying"
        self.answered = set()
        self.finished, self.at_end, self.asking = set(), set(), []
        self.pending = None
        restore: dict[m.TaskRef, Any] = {}
        finished: tuple[int, ...] = ()
        if self.completed is not None:
            assignment = assign_state(self.completed, self.plan.graph)
            restore = dict(assignment.tasks)
            finished = assignment.finished
            self.positions = dict(assignment.sources)
        elif self.attempt > 1:
            for uid, position in self.positions.items():
                source = self.source(uid).source.source
                splits = source.discover(None, DiscoveryContext(uid, 1, None)) if False else None
                assert splits is None
                self.positions[uid] = msgspec.structs.replace(position, pending=self.first[uid])
        if self.attempt == 1:
            self.first = {uid: position.pending for uid, position in self.positions.items()}
        for index, slot in enumerate(self.slots):
            tasks = tuple(ref for ref in self.tasks if ref.subtask == index)
            self.send(
                slot,
                m.Deploy(
                    self.plan.job_id,
                    self.attempt,
                    msgspec.msgpack.encode(self.plan.config),
                    self.plan.graph_bytes,
                    tuple(self.slots),
                    tasks,
                    tuple((ref, restore[ref]) for ref in tasks if ref in restore),
                    finished,
                    "root",
                    1,
                ),
            )

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.state = "cancelling"
        self.answered = set()
        self.send_all(m.Cancel(self.attempt))

    def on_message(self, slot: int, message: Any) -> None:
        match message:
            case m.Deployed() if self.state == "deploying":
                self.answered.add(slot)
                if len(self.answered) == len(self.slots) == self.plan.graph.slots:
                    peers = tuple(m.Peer(s, self.registers[s].host, 1) for s in self.slots)
                    for to in self.slots:
                        self.send(to, m.Start(self.attempt, tuple(p for p in peers if p.slot != to)))
                    self.state = "running"
                    self.answered = set()
                    attempt = self.attempt
                    self.timer(self.plan.config.checkpoint_interval_s or 1.0, lambda _: self.trigger(attempt))
            case m.DeployFailed() | m.TaskFailed():
                if self.state != "cancelling":
                    self.fail(message.details)
            case m.Cancelled() if self.state == "cancelling":
                self.answered.add(slot)
                if self.answered >= set(self.slots):
                    if len(self.slots) == self.plan.graph.slots:
                        self.deploy()
                    else:
                        self.state = "waiting"
            case m.TaskRunning():
                pass
            case m.RequestSplit(_, ref) if self.state == "running":
                self.give_split(ref)
            case m.TaskEndOfData(_, ref):
                self.at_end.add(ref)
                if len(self.at_end | self.finished) == len(self.tasks) and self.pending is None:
                    self.trigger(self.attempt)
            case m.TaskFinished(_, ref):
                self.finished.add(ref)
                if self.pending and ref in self.pending["waits"] - set(self.pending["acks"]):
                    self.abort()
                self.maybe_end()
            case m.CheckpointAck(_, checkpoint_id, ref) if self.pending and checkpoint_id == self.pending["id"]:
                self.pending["acks"][ref] = message
                self.maybe_complete()
            case m.CheckpointDecline(_, checkpoint_id, ref, reason) if (
                self.pending and checkpoint_id == self.pending["id"]
            ):
                self.abort()

    def abort(self) -> None:
        assert self.pending is not None
        self.send_all(m.CheckpointAborted(self.attempt, self.pending["id"]))
        self.pending = None

    def give_split(self, ref: m.TaskRef) -> None:
        uid = self.plan.graph.vertices[ref.vertex].source.uid
        position = self.positions[uid]
        slot = self.slots[ref.subtask]
        if position.pending:
            self.send(slot, m.AssignSplit(self.attempt, ref, position.pending[0]))
            self.positions[uid] = msgspec.structs.replace(position, pending=position.pending[1:])
        else:
            assert position.exhausted
            self.send(slot, m.NoMoreSplits(self.attempt, ref))

    # ---- checkpoints

    def trigger(self, attempt: int) -> None:
        if attempt != self.attempt or self.state != "running":
            return
        if self.pending is None:
            running = [ref for ref in self.tasks if ref not in self.finished]
            graph = self.plan.graph
            by_vertex = {ref.vertex for ref in running}
            to_trigger = [
                ref for ref in running if not any(edge.source in by_vertex for edge in graph.inputs(ref.vertex))
            ]
            if not running:
                return
            self.checkpoints += 1
            self.pending = {
                "id": self.checkpoints,
                "acks": {},
                "waits": set(running),
                "positions": tuple(self.positions.values()),
            }
            for index, slot in enumerate(self.slots):
                tasks = tuple(ref for ref in to_trigger if ref.subtask == index)
                if tasks:
                    self.send(slot, m.TriggerCheckpoint(attempt, self.checkpoints, self.now_ms, tasks))
        self.timer(self.plan.config.checkpoint_interval_s or 1.0, lambda _: self.trigger(attempt))

    def maybe_complete(self) -> None:
        pending = self.pending
        assert pending is not None
        if not pending["waits"] <= set(pending["acks"]):
            return
        self.pending = None
        checkpoint_id, attempt = pending["id"], self.attempt
        graph = self.plan.graph
        names = names_of(graph)
        by_uid: dict[str, dict[int, m.OperatorSnapshot]] = {}
        done: dict[int, set[int]] = {}
        committables: dict[tuple[int, str], list[bytes]] = {}
        for ref in self.tasks:
            ack = pending["acks"].get(ref)
            if ack is None or ack.finished:
                done.setdefault(ref.vertex, set()).add(ref.subtask)
            if ack is None:
                continue
            for op in ack.operators:
                for older in op.earlier:
                    if older.checkpoint_id not in self.all_completed:
                        committables.setdefault((older.checkpoint_id, op.uid), []).extend(older.committables)
                if op.committables:
                    committables.setdefault((checkpoint_id, op.uid), []).extend(op.committables)
                by_uid.setdefault(op.uid, {})[ref.subtask] = m.OperatorSnapshot(op.uid, op.parts)
        operators = []
        for vertex in graph.vertices:
            uids = [*([vertex.source.uid] if vertex.source else []), *(op.uid for op in vertex.operators)]
            for uid in uids:
                subtasks = tuple(by_uid.get(uid, {}).get(i, m.OperatorSnapshot(uid)) for i in range(vertex.parallelism))
                operators.append(
                    OperatorState(
                        uid, names[uid], vertex.id, vertex.parallelism, subtasks, tuple(sorted(done.get(vertex.id, ())))
                    )
                )
        vertices, edges = layout_of(graph)
        self.completed = CheckpointMetadata(
            job_name="job",
            job_id=self.plan.job_id,
            checkpoint_id=checkpoint_id,
            epoch=1,
            attempt=attempt,
            created_ms=0,
            completed_ms=self.now_ms,
            max_parallelism=graph.max_parallelism,
            vertices=vertices,
            edges=edges,
            operators=tuple(operators),
            sources=pending["positions"],
            committables=tuple(
                Committables(number, uid, names[uid], tuple(items)) for (number, uid), items in committables.items()
            ),
            state_bytes=0,
            files=(),
        )
        self.all_completed.append(checkpoint_id)
        sinks = {op.uid: op.sink for v in graph.vertices for op in v.operators if op.sink}
        for entry in self.completed.committables:
            committer = sinks[entry.uid].committer(self.plan.job_id)  # type: ignore[union-attr]
            assert committer is not None
            self.uncommitted += 1
            self.io(partial(committer.commit, entry.checkpoint_id, entry.items), self.committed)
        self.send_all(m.CheckpointCompleted(attempt, checkpoint_id))

    def committed(self, _: object) -> None:
        self.uncommitted -= 1
        self.maybe_end()

    def maybe_end(self) -> None:
        if len(self.finished) == len(self.tasks) and not self.uncommitted and self.state != "over":
            self.state = "over"
            self.out.append(e.JobEnded("finished", None, None))  # type: ignore[arg-type]
