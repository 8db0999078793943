"""The production coordinator and slots, bound to a world: what `midstream.runtime` is to real processes.

A driver process runs one coordinator and carries out its instructions; slot processes run one
SlotMachine each. Control connections are pairs of pipes. Nothing here decides anything that
`midstream.runtime` does not decide in the same way.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa

from midstream.checkpoint.store import UnknownOutcomeError
from midstream.coordinator.events import (
    CancelRequested,
    CancelTimer,
    ClientAsked,
    CloseSlot,
    CoordinatorEvent,
    Instruction,
    IoDone,
    JobEnded,
    JobPlan,
    ReplyTo,
    RequestSlot,
    RunIo,
    Send,
    SetTimer,
    SlotConnected,
    SlotLost,
    SlotMessage,
    SlotRequestFailed,
    Started,
    Tell,
    TimePassed,
    TimerFired,
)
from midstream.coordinator.slots import PYTHON
from midstream.core.seams import Done, Failed, Storage, Timer
from midstream.graph.job_graph import Edge, JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.operators.reduction import Reduction
from midstream.protocol import messages as m
from midstream.protocol.job_status import JobStatus
from midstream.sim.network import SIM, Network, Pipe, SimTransport
from midstream.sim.trace import Kind
from midstream.sim.world import Process, World
from midstream.worker.slot import SlotMachine

HEARTBEAT_S: Final = 0.5
CHECK_STEPS: Final = 16
CLAIM: Final = "savepoint-place"
"""How tokens of I/O begin that claims the place of a savepoint."""
PUBLISH: Final = "publish:"
"""And that of I/O which writes the metadata of a checkpoint."""
_to_slot: Final = msgspec.msgpack.Decoder(m.ToSlot)
_from_slot: Final = msgspec.msgpack.Decoder(m.FromSlot)
_encoder: Final = msgspec.msgpack.Encoder()


_IN_A_ROW: Final = re.compile(r"the same failure (\d+) times in a row without a checkpoint in between")


class CoordinatorMachine(Protocol):
    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]: ...

    def status(self, now_ms: int) -> JobStatus: ...

    def check(self) -> None: ...


MakeCoordinator = Callable[[JobPlan, int, Callable[[str], Storage]], CoordinatorMachine]


class Cluster:
    """All drivers and slots of a world. `externals` survive pickling by reference."""

    def __init__(
        self,
        world: World,
        open_storage: Callable[[str], Storage],
        network: Network,
        make_coordinator: MakeCoordinator,
        externals: Mapping[str, object],
    ) -> None:
        self.world = world
        self.open_storage = open_storage
        self.answered: Callable[[Driver, int, m.ClientRequest, m.Reply], None] | None = None
        self.deployed: Callable[[Driver, m.Deploy], None] = _nobody_looks
        """Called with what each slot of an attempt is told."""
        self.failed: Callable[[Driver], None] = _nobody_looks
        """Called when an attempt has failed and another one is to follow."""
        self.network = network
        self.make_coordinator = make_coordinator
        self.drivers: list[Driver] = []
        self.slots: list[Slot] = []
        self.slot_failures = 0
        """How many of the next requests for a slot fail."""
        self.finished: dict[tuple[str, int], set[tuple[str, int]]] = {}
        """By job id and attempt: uid and subtask of each operator that is deployed as finished."""
        self._externals = dict(externals)
        self._names = {id(value): name for name, value in externals.items()}

    def submit(self, plan: JobPlan) -> Driver:
        """Start a driver for the job."""
        driver = Driver(self, plan, f"driver{len(self.drivers)}")
        self.drivers.append(driver)
        return driver

    def pickle(self, value: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._names, self._externals).dump(value)
        return buffer.getvalue()

    def unpickle(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._externals.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    @property
    def live_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.process.alive]


def _nobody_looks(*_: object) -> None:
    pass


_CONSTANTS: Final = frozenset({Edge, Reduction, pa.Schema})


class _Pickler(pickle.Pickler):
    """Every task has a graph of its own, so what never changes is not copied, and the rest the quick way.

    `externals` grow by the constants that come by.
    """

    def __init__(self, file: io.BytesIO, names: Mapping[int, str], externals: dict[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._names = names
        self._externals = externals

    def persistent_id(self, item: Any) -> str | None:
        if type(item) in _CONSTANTS:
            name = f"constant {len(self._externals)}"
            self._externals[name] = item
            return name
        return self._names.get(id(item))

    def reducer_override(self, item: Any) -> Any:
        if type(item) in (JobGraph, Vertex, OperatorSpec, SourceSpec):
            return type(item), tuple(getattr(item, entry.name) for entry in fields(item))
        return NotImplemented


class Connection:
    """A control connection between a driver and a slot process, from the driver's side."""

    def __init__(self, driver: Driver, slot: Slot, number: int) -> None:
        world = driver.cluster.world
        self.number = number
        self.slot = slot
        self.to_slot = Pipe(world, slot.process, slot.received)
        self.to_driver = Pipe(world, driver.process, partial(driver.received, self))
        self.is_open = True
        """Whether the driver still listens to it."""
        self.heard_us = world.now_us

    def cut(self) -> None:
        """Neither side hears anything more."""
        self.is_open = False
        self.to_slot.is_cut = True
        self.to_driver.is_cut = True


class Driver:
    """One run of one job: a coordinator and everything that carries out its instructions."""

    def __init__(self, cluster: Cluster, plan: JobPlan, name: str) -> None:
        world = cluster.world
        self.cluster = cluster
        self.plan = plan
        self.process = Process(world, name)
        self.coordinator = cluster.make_coordinator(plan, self.process.now_ms(), cluster.open_storage)
        self.outcome: JobEnded | None = None
        self._told = 0
        """How many failures people were told of since a checkpoint completed."""
        self.is_cancelled = False
        self.replies: dict[int, m.Reply] = {}
        self.slots_late = 0
        """How many of the next slots that are asked for come later than anybody waits for them."""
        self.failed_checkpoints: list[str] = []
        """Checkpoints that were not complete in time, and those that tasks have declined for a fault: why."""
        self.completed: set[int] = set()
        """Checkpoints of which it has told the attempt that made them."""
        self.uncertain: dict[int, frozenset[str]] = {}
        """Checkpoints of which it does not know whether they are there, and the files that they refer to."""
        self._publishing: dict[int, frozenset[str]] = {}
        self.rescales = 0
        """How often the job has gone on at another parallelism."""
        self.triggered: list[int] = []
        """Checkpoints of its job as they were triggered, each once for every slot that was told."""
        self.claimed: dict[int, int] = {}
        """By client: how many there were of them when the place of its savepoint was claimed."""
        self._claims: dict[str, int] = {}
        """By token of the I/O: whose place it claims."""
        self._unanswered: dict[int, m.ClientRequest] = {}
        self.connections: dict[int, Connection] = {}
        """By slot number; open ones."""
        self._slot_count = 0
        self._clients = 0
        self._requests: dict[str, Slot | None] = {}
        self._timers: dict[str, Timer] = {}
        self._tokens_used: set[str] = set()
        self._events: deque[CoordinatorEvent] = deque()
        self.process.on_death.append(self._died)
        self.process.post(self._begin)

    def _begin(self) -> None:
        self._feed(Started())
        self._watch()

    @property
    def is_over(self) -> bool:
        """The job has ended, or this driver has died."""
        return self.outcome is not None or not self.process.alive

    @property
    def state(self) -> str:
        """Of the job, as people see it."""
        return self.coordinator.status(self.process.now_ms()).state

    def ask(self, request: m.ClientRequest) -> int:
        """A question of the command line; its answer will be in `replies` under the number returned."""
        self._clients += 1
        client = self._clients
        world = self.cluster.world
        world.schedule(
            world.delay(world.tempo.control_us),
            self.process,
            Kind.CONTROL,
            partial(self._asked, client, request),
            request,
        )
        return client

    def _asked(self, client: int, request: m.ClientRequest) -> None:
        self._unanswered[client] = request
        self._feed(ClientAsked(client, request))

    def cancel(self, reason: str) -> None:
        self.is_cancelled = True
        self.process.post(partial(self._feed, CancelRequested(reason)))

    # ---- events and instructions

    def _feed(self, event: CoordinatorEvent) -> None:
        """As in `runtime.driver`: one event after the other, each one's instructions before the next."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            after_end = self.outcome is not None
            for instruction in self.coordinator.handle(self._events[0], self.process.now_ms()):
                if after_end and not isinstance(instruction, ReplyTo):
                    self.cluster.world.bug(f"the coordinator asks for {instruction!r} after the end of the job")
                self._execute(instruction)
            self.coordinator.check()
            self._events.popleft()

    def _execute(self, instruction: Instruction) -> None:
        world = self.cluster.world
        match instruction:
            case Send(slot, message):
                connection = self.connections.get(slot)
                if connection is not None:
                    if isinstance(message, m.Deploy):
                        self._note_finished(message)
                        self.cluster.deployed(self, message)
                    elif isinstance(message, m.TriggerCheckpoint):
                        self.triggered.append(message.checkpoint_id)
                    elif isinstance(message, m.CheckpointCompleted):
                        self._told = 0
                        self.completed.add(message.checkpoint_id)
                    connection.to_slot.send(_to_slot.decode(_encoder.encode(message)))
            case RequestSlot(request):
                self._request_slot(request)
            case CloseSlot(slot, reason):
                self._close_slot(slot, reason)
            case SetTimer(token, delay_s):
                self._use(token)
                self._timers[token] = self.process.call_later(delay_s, partial(self._timer_fired, token))
            case CancelTimer(token):
                timer = self._timers.pop(token, None)
                if timer is not None:
                    timer.cancel()
            case RunIo(token, work):
                self._use(token)
                if token.startswith(CLAIM) and isinstance(event := self._events[0], ClientAsked):
                    self._claims[token] = event.client
                if token.startswith(PUBLISH):
                    _, metadata = work.args  # type: ignore[attr-defined]
                    self._publishing[metadata.checkpoint_id] = frozenset(metadata.files)
                self.process.submit(work, partial(self._io_done, token))
            case ReplyTo(client, reply):
                if client in self.replies:
                    world.bug(f"client {client} is answered twice")
                self.replies[client] = reply
                asked = self._unanswered.pop(client)
                self._check_reply(asked, reply)
                if self.cluster.answered is not None:
                    self.cluster.answered(self, client, asked, reply)
                world.note(("reply", f"{client}:", reply.error or reply.checkpoint or "ok"))
            case Tell(text):
                self._told += 1
                self.cluster.failed(self)
                world.note(("told", text))
            case JobEnded(state, error):
                self._check_row(str(error))
                if self.outcome is not None:
                    world.bug("the job ends twice")
                if self._unanswered:
                    world.bug(f"the job ends, and nobody has answered {list(self._unanswered.values())}")
                self.outcome = instruction
                world.note(("job ended:", state, str(error) if error else ""))
                for timer in self._timers.values():
                    timer.cancel()
                self._timers.clear()
                for number in list(self.connections):
                    self._close_slot(number, "the job has ended")

    def _note_finished(self, deploy: m.Deploy) -> None:
        vertices = self.plan.graph.vertices  # the same at any parallelism
        places = {(spec.uid, ref.subtask) for ref in deploy.finished for spec in vertices[ref.vertex].specs}
        self.cluster.finished.setdefault((deploy.job_id, deploy.attempt), set()).update(places)

    def _check_reply(self, request: m.ClientRequest, reply: m.Reply) -> None:
        if isinstance(request, m.DoRescale) and not reply.error:
            self.rescales += reply.checkpoint is not None
            status = self.coordinator.status(self.process.now_ms())
            if status.slots_needed != request.parallelism:
                self.cluster.world.bug(f"rescaled to {request.parallelism}, but the job runs at {status.slots_needed}")
            if reply.checkpoint is not None and status.restored_from != reply.checkpoint:
                self.cluster.world.bug(f"rescaled from {reply.checkpoint}, but restored from {status.restored_from}")

    def _check_row(self, why: str) -> None:
        """A job that ends of the same failure so many times in a row has failed so often since its last checkpoint."""
        row = _IN_A_ROW.match(why)
        if row is not None and self._told < int(row[1]) - 1:
            self.cluster.world.bug(f"the job ends of {row[1]} failures in a row, {self._told + 1} since a checkpoint")

    def _use(self, token: str) -> None:
        if token in self._tokens_used:
            self.cluster.world.bug(f"token {token} is used a second time")
        self._tokens_used.add(token)

    def _timer_fired(self, token: str) -> None:
        if self._timers.pop(token, None) is not None:
            if token.startswith("checkpoint:"):
                self.uncertain.update(self._publishing)
                self.failed_checkpoints.append(f"{token} has expired")
            self._feed(TimerFired(token))

    def _io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        client = self._claims.pop(token, None)
        if client is not None and isinstance(outcome, Done):
            self.claimed[client] = len(self.triggered)
        if token.startswith(PUBLISH):
            if isinstance(outcome, Failed) and isinstance(outcome.error, UnknownOutcomeError):
                self.uncertain.update(self._publishing)
            self._publishing.clear()
        self._feed(IoDone(token, outcome))

    # ---- slots

    def _request_slot(self, request: str) -> None:
        cluster, world = self.cluster, self.cluster.world
        if request in self._requests:
            world.bug(f"slot request {request} is made twice")
        self._requests[request] = None
        if cluster.slot_failures:
            cluster.slot_failures -= 1
            self.process.call_later(0.01, partial(self._feed, SlotRequestFailed(request, f"no core {SIM}")))
            return
        delay_us = 500 + world.delay(20_000)
        if self.slots_late:
            self.slots_late -= 1
            delay_us = int(self.plan.config.slot_timeout_s * 1.1e6)
        world.schedule(delay_us, None, Kind.CLUSTER, partial(self._launch, request), f"launch slot for {request}")

    def slot_failed(self, request: str, reason: str) -> None:
        """Its process ended before it was known."""
        if self.process.alive and self.outcome is None:
            self.process.post(partial(self._feed, SlotRequestFailed(request, reason)))

    def _launch(self, request: str) -> None:
        if self.process.alive and self.outcome is None:
            slot = Slot(self.cluster, self, request)
            self.cluster.slots.append(slot)
            self._requests[request] = slot

    def register(self, slot: Slot, register: m.Register) -> None:
        """A new slot process has connected and proved itself."""
        if not slot.process.alive:
            return
        number = self._slot_count
        self._slot_count += 1
        connection = Connection(self, slot, number)
        slot.connection = connection
        self.connections[number] = connection
        if self.outcome is not None:
            self._close_slot(number, "the job has ended")
        else:
            connection.to_slot.send(m.Welcome(number, HEARTBEAT_S, self.plan.config.heartbeat_timeout_s))
            self._feed(SlotConnected(number, register))

    def received(self, connection: Connection, message: m.FromSlot) -> None:
        if connection.is_open and self.outcome is None:
            connection.heard_us = self.cluster.world.now_us
            if isinstance(message, m.CheckpointDecline) and message.counts:
                self.failed_checkpoints.append(f"checkpoint {message.checkpoint_id} is declined: {message.reason}")
                if SIM not in message.reason:
                    self.cluster.world.bug(f"a declined checkpoint counts as a failure: {message.reason}")
            self._feed(SlotMessage(connection.number, message))

    def connection_lost(self, connection: Connection, reason: str) -> None:
        """The slot's process is gone, or its connection."""
        if connection.is_open:
            connection.is_open = False
            del self.connections[connection.number]
            connection.cut()
            connection.slot.lose_driver(f"{SIM} the driver has given the slot up")
            if self.outcome is None:
                self._feed(SlotLost(connection.number, reason))

    def _close_slot(self, number: int, reason: str) -> None:
        connection = self.connections.pop(number, None)
        if connection is not None:
            connection.is_open = False
            connection.to_driver.is_cut = True
            connection.to_slot.send(m.Release())

    def _watch(self) -> None:
        """Heartbeats are the business of the runner."""
        world = self.cluster.world
        limit_us = self.plan.config.heartbeat_timeout_s * 1e6
        for connection in list(self.connections.values()):
            if connection.slot.calls_since_us is not None:  # its other thread is heard
                connection.heard_us = world.now_us
                for_ms = (world.now_us - connection.slot.calls_since_us) // 1000
                self._feed(SlotMessage(connection.number, m.InCall(f"a function {SIM}", for_ms, "")))
            elif world.now_us - connection.heard_us > limit_us:
                self.connection_lost(connection, f"no heartbeat {SIM}")
            else:
                connection.to_slot.send(m.Heartbeat())
        if self.outcome is None:
            self._feed(TimePassed(HEARTBEAT_S))
            self.process.call_later(HEARTBEAT_S, self._watch)

    def _died(self) -> None:
        for connection in self.connections.values():
            connection.cut()
        self.connections.clear()
        for slot in self.cluster.live_slots:
            if slot.driver is self:
                slot.lose_driver(f"{SIM} the driver is gone")


class Slot:
    """A slot process: registers, runs a SlotMachine, ends when released or alone."""

    def __init__(self, cluster: Cluster, driver: Driver, request: str) -> None:
        world = self._world = cluster.world
        self.cluster = cluster
        self.driver = driver
        self.request = request
        self.process = Process(world, f"slot{len(cluster.slots)}")
        self.transport = SimTransport(cluster.network, self.process, driver.plan.job_id)
        self.connection: Connection | None = None
        self.calls_since_us: int | None = None
        """Since when its loop has been in one call."""
        self.machine: SlotMachine | None = None
        self.process.on_death.append(self._died)
        self.process.after_step = self._check
        register = m.Register(self.process.name, 1, len(cluster.slots), PYTHON, request)
        world.schedule(
            world.delay(world.tempo.control_us), self.process, Kind.CONTROL, partial(self._connect, register), register
        )

    def _connect(self, register: m.Register) -> None:
        driver = self.driver.process
        if driver.alive:
            self.cluster.world.schedule(0, driver, Kind.CONTROL, partial(self.driver.register, self, register))
        else:
            self.end()

    def received(self, message: m.ToSlot) -> None:
        if isinstance(message, m.Release):
            self.end()
        elif isinstance(message, m.Heartbeat):
            return
        elif isinstance(message, m.Welcome):
            self._begin(message)
        else:
            assert self.machine is not None
            self.machine.handle(message)

    def _begin(self, welcome: m.Welcome) -> None:
        connection = self.connection
        assert connection is not None
        self.transport.slot = welcome.slot
        self.machine = SlotMachine(
            clock=self.process,
            executor=self.process,
            ids=self.process,
            transport=self.transport,
            open_storage=self.cluster.open_storage,
            send=self._send,
            unpickle=self.cluster.unpickle,
        )
        self.machine.handle(welcome)
        self._beat()

    def _send(self, message: m.FromSlot) -> None:
        assert self.connection is not None
        self.connection.to_driver.send(_from_slot.decode(_encoder.encode(message)))

    def _beat(self) -> None:
        assert self.machine is not None
        self._send(self.machine.status())
        self.process.call_later(HEARTBEAT_S, self._beat)

    def _check(self) -> None:
        """The invariants of everything that runs here. Not after each step: that takes a quarter of the time."""
        if self._world.step_number % CHECK_STEPS == 0 and self.machine is not None:
            self.machine.check()

    def lose_driver(self, reason: str) -> None:
        """The control connection is gone: we find out in a while, and end."""
        if self.process.alive:
            world = self.cluster.world
            world.schedule(world.delay(world.tempo.control_us), self.process, Kind.CLUSTER, self.end, reason)

    def end(self) -> None:
        if self.machine is not None:
            self.machine.close()
        if self.connection is not None:
            self.connection.to_slot.is_cut = True
        self.process.end()

    def _died(self) -> None:
        """The driver finds the connection closed, after all that was sent on it."""
        connection = self.connection
        if connection is None:
            self.driver.slot_failed(self.request, f"{SIM} {self.process.name} died before it had registered")
            return
        connection.to_slot.is_cut = True
        driver = self.driver
        if connection.is_open and driver.process.alive:
            connection.to_driver.close(partial(driver.connection_lost, connection, f"{SIM} {self.process.name} died"))
