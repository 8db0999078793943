"""Binds the production coordinator and slots to a simulated world, as `midstream.runtime` binds them to real processes.

A driver process runs one coordinator and carries out its instructions; slot processes run one
SlotMachine each. Control connections are pairs of pipes. Every decision made here is one that
`midstream.runtime` makes in the same way.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.store import FencedError, UnknownOutcomeError
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import JobEnded, JobPlan
from midstream.engine.coordinator.placement.rescale import RescaleStage
from midstream.engine.core.errors import ClusterError
from midstream.engine.core.interfaces import Done, Failed, LocalDisk, Signal, Storage
from midstream.engine.protocol import messages as m
from midstream.simulation.checked_shell import CheckedShell
from midstream.simulation.graph_pickle import GraphUnpickler, Pickler
from midstream.simulation.message_checker import MessageChecker
from midstream.simulation.network import SIM, Network
from midstream.simulation.simulated_slot import HEARTBEAT_S, ControlConnection, SimulatedSlot
from midstream.simulation.trace import Kind
from midstream.simulation.world import Process, SimSignal, World

LAUNCH_US: Final = 20_000
"""How long a slot process takes to start."""
REPORT_US_MAX: Final = 1_000_000
"""The longest delay of the report that a process has ended. Mostly it takes much less, and the driver may not wait."""
RUN_AGAIN: Final = 0.15
"""The probability that the task of a killed slot is run again, as Spark may do, instead of being reported as ended."""
_to_slot: Final = msgspec.msgpack.Decoder(m.ToSlot)
_encoder: Final = msgspec.msgpack.Encoder()

_RESTART: Final = re.compile(r"^Restart (\d+) in ", re.MULTILINE)
_IN_A_ROW: Final = re.compile(r"the same failure(?:, of the same row,)? (\d+) times in a row without a checkpoint")

MakeCoordinator = Callable[[JobPlan, int, Callable[[str], Storage], Signal], Coordinator]


class DriverObserver:
    """Is notified of what one driver does: the laboratory checks there why it fails, and what comes in time."""

    def on_request(self, client: int, request: m.ClientRequest) -> None: ...

    def on_answer(self, client: int, request: m.ClientRequest, reply: m.Reply) -> None: ...

    def deployed(self, deploy: m.Deploy) -> None: ...

    def triggered(self, checkpoint_id: int) -> None:
        """A slot is notified of a checkpoint to take."""

    def location_claimed(self, client: int) -> None:
        """The directory of the savepoint requested by `client` has been claimed."""

    def commits_here(self) -> None:
        """The driver itself is about to commit, or to clean up."""

    def checkpoint_failed(self, checkpoint_id: int, reason: str) -> None: ...

    def on_message(self, message: m.FromSlot, pending_id: int | None) -> None:
        """A message of a slot has arrived. `pending_id`: the checkpoint for which the driver waits, if there is one."""

    def handled(self, message: m.FromSlot) -> None:
        """The coordinator has handled that message."""

    def cancelled(self) -> None: ...

    def ended(self) -> None: ...


class SimulatedCluster:
    """All drivers and slots of a world. `externals` are pickled by reference."""

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
        self.answered: Callable[[SimulatedDriver, int, m.ClientRequest, m.Reply], None] | None = None
        self.deployed: Callable[[SimulatedDriver, m.Deploy], None] = lambda driver, deploy: None
        """Called with each message that deploys an attempt on a slot."""
        self.released: Callable[[SimulatedDriver, SimulatedSlot], None] = lambda driver, slot: None
        """Called when a driver releases a slot."""
        self.failed: Callable[[SimulatedDriver], None] = lambda driver: None
        """Called when an attempt has failed and another one will follow."""
        self.open_local_disk: Callable[[str], LocalDisk | None] = lambda name: None
        """Opens the local disk of a slot, by the name of its process."""
        self.network = network
        self.make_coordinator = make_coordinator
        self.drivers: list[SimulatedDriver] = []
        self.slots: list[SimulatedSlot] = []
        self.struck_us: list[int] = []
        """The times at which faults have struck."""
        self.observe: Callable[[SimulatedDriver], DriverObserver] = lambda driver: DriverObserver()
        """Called with each new driver."""
        self.slot_failures = 0
        """How many of the next requests for a slot fail."""
        self.load_failures = 0
        """How many of the next slots that load sinks to commit with cannot open the storage for them at first."""
        self.finished: dict[tuple[str, int], set[tuple[str, int]]] = {}
        """The uid and subtask of each operator that is deployed as finished, by job id and attempt."""
        self.drained: set[str] = set()
        """The ids of jobs whose sources got the request to end."""
        self._externals = dict(externals)
        self._names = {id(value): name for name, value in externals.items()}

    def submit(self, plan: JobPlan) -> SimulatedDriver:
        """Start a driver for the job."""
        driver = SimulatedDriver(self, plan, f"driver{len(self.drivers)}")
        self.drivers.append(driver)
        return driver

    def pickle(self, value: object) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer, self._names, self._externals).dump(value)
        return buffer.getvalue()

    def unpickle(self, data: bytes) -> Any:
        return GraphUnpickler(data, self._externals).load()

    def reported_late(self, uid: str) -> int:
        """Return how many late rows of an operator the drivers have reported as dropped."""
        return sum(driver.coordinator.slots.late.counts()[uid] for driver in self.drivers)

    @property
    def live_slots(self) -> list[SimulatedSlot]:
        return [slot for slot in self.slots if slot.process.alive]


class SimulatedDriver:
    """One run of one job: a coordinator in its shell, with the connections and the host of a simulated world."""

    def __init__(self, cluster: SimulatedCluster, plan: JobPlan, name: str) -> None:
        world = cluster.world
        self.cluster = cluster
        self.plan = plan
        self.process = Process(world, name)
        stopped = SimSignal(world)
        self.coordinator = cluster.make_coordinator(plan, self.process.now_ms(), cluster.open_storage, stopped)
        self.shell = CheckedShell(self.coordinator, self)
        self.slots_gone = ""
        self._failures_reported = 0
        """The number of failures reported to users since a checkpoint completed."""
        self._restarts_reported = 0
        self.is_cancelled = False
        self.replies: dict[int, m.Reply] = {}
        self.slots_late, self.has_late_slots = 0, False
        """How many of the next requested slots start only after their timeout, and whether any did before."""
        self._aborted: set[int] = set()
        """The checkpoints that slots were notified to give up."""
        self.completed: set[int] = set()
        """The checkpoints whose completion was reported to slots."""
        self.uncertain: dict[int, frozenset[str]] = {}
        """The checkpoints that may or may not exist, as far as the driver knows, with the files that they refer to."""
        self._publishing: dict[int, frozenset[str]] = {}
        self.slots_refused = 0
        """The number of slot processes that registered and were refused."""
        self._requests: dict[int, m.ClientRequest] = {}
        """The unanswered requests, by client."""
        self.connections: dict[int, ControlConnection] = {}
        """The open connections, by slot number."""
        self._watched_us = cluster.world.now_us
        """When heartbeats were last checked."""
        self.message_checker = MessageChecker(
            plan.config, self.connections, lambda: world.now_us, self._is_for_savepoint, self.unexplained
        )
        self._slot_count = self._clients = 0
        self._processes: dict[str, list[SimulatedSlot]] = {}
        """The processes that were started for each request: its task may be run more than once."""
        self.observer = cluster.observe(self)
        self.process.on_death.append(self._died)
        self.process.post(self._begin)

    def _begin(self) -> None:
        self.shell.start()
        self._watch()

    @property
    def outcome(self) -> JobEnded | None:
        return self.shell.outcome

    @property
    def is_over(self) -> bool:
        """Whether the job has ended or this driver has died."""
        return self.shell.outcome is not None or not self.process.alive

    @property
    def state(self) -> str:
        """The state of the job, as users see it."""
        return self.coordinator.status(self.process.now_ms()).state

    def request(self, request: m.ClientRequest) -> int:
        """Send a request of the command line, and return its number, under which `replies` will have the answer."""
        self._clients += 1
        client = self._clients
        world = self.cluster.world
        world.schedule(
            world.delay(world.tempo.control_us),
            self.process,
            Kind.CONTROL,
            partial(self._receive, client, request),
            request,
        )
        return client

    def _receive(self, client: int, request: m.ClientRequest) -> None:
        self._requests[client] = request
        self.message_checker.on_request(client, request)
        self.observer.on_request(client, request)
        self.shell.request(client, request)

    def cancel(self, reason: str) -> None:
        self.is_cancelled = True
        self.observer.cancelled()
        self.process.post(partial(self.shell.cancel, reason))

    # ---- the shell's connections

    def send(self, slot: int, message: m.ToSlot) -> None:
        self.message_checker.sent(slot, message)
        if isinstance(message, m.Deploy):
            self._note_finished(message)
            self.observer.deployed(message)
            self.cluster.deployed(self, message)
        elif isinstance(message, m.TriggerCheckpoint):
            self.observer.triggered(message.checkpoint_id)
        elif isinstance(message, m.CheckpointAborted) and message.checkpoint_id not in self._aborted:
            self._note_failed(message.checkpoint_id)
        elif isinstance(message, m.StopSources):
            self.cluster.drained.add(self.plan.job_id)
        elif isinstance(message, m.Cancel) and self.coordinator.rescaling.stage is RescaleStage.SWITCHING:
            self._check_held(slot)
        elif isinstance(message, m.CheckpointCompleted):
            self._failures_reported = 0
            self.completed.add(message.checkpoint_id)
        connection = self.connections.get(slot)
        if connection is not None:
            connection.to_slot.send(_to_slot.decode(_encoder.encode(message)))

    def _check_held(self, number: int) -> None:
        """Check that sources have read nothing since the newest checkpoint, from which the job continues elsewhere."""
        connection, newest = self.connections.get(number), self.coordinator.checkpoints.newest
        assert newest is not None
        machine = connection.slot.machine if connection is not None else None
        for ref, task in machine.tasks.items() if machine is not None else ():
            if task.vertex.source is not None:
                self.message_checker.switches(newest.checkpoint_id, ref, task.metrics())

    def release(self, slot: int) -> None:
        connection = self.connections.pop(slot, None)
        if connection is not None:
            self.cluster.released(self, connection.slot)
            connection.release()

    def drop(self, slot: int) -> bool:
        connection = self.connections.pop(slot, None)
        if connection is None:
            return False
        connection.cut()
        connection.slot.lose_driver(f"{SIM} the driver has given the slot up")
        return True

    # ---- the shell's host

    def request_slot(self, request: str) -> None:
        cluster, world = self.cluster, self.cluster.world
        if self.slots_gone:
            raise ClusterError(self.slots_gone)
        if cluster.slot_failures:
            cluster.slot_failures -= 1
            self.process.call_later(0.01, partial(self.shell.slot_failed, request, f"no core {SIM}"))
            return
        delay_us = 500 + world.delay(LAUNCH_US)
        if self.slots_late:
            self.slots_late -= 1
            self.has_late_slots = True
            delay_us = int(self.plan.config.slot_timeout_s * 1.1e6)
        world.schedule(delay_us, None, Kind.CLUSTER, partial(self._launch, request), f"launch slot for {request}")

    def _launch(self, request: str) -> None:
        if self.is_over:
            return
        if self.slots_gone:
            self.process.post(partial(self.shell.slot_failed, request, self.slots_gone))
            return
        slot = SimulatedSlot(self.cluster, self, request)
        self.cluster.slots.append(slot)
        self._processes.setdefault(request, []).append(slot)

    def abandon(self, request: str) -> None:
        """Kill the processes of this request; one that is stopped dies when it resumes."""
        world = self.cluster.world
        for slot in self._processes.pop(request, ()):
            world.schedule(
                world.delay(REPORT_US_MAX), slot.process, Kind.CLUSTER, slot.process.crash, f"{request} is abandoned"
            )

    def process_died(self, slot: SimulatedSlot, reason: str) -> None:
        """Run the task again, or report its end to the driver, before or after the connection is found closed."""
        processes, world = self._processes.get(slot.request, []), self.cluster.world
        if self.is_over or slot not in processes:
            return
        again = world.chance() < RUN_AGAIN and not self.slots_gone
        processes.remove(slot)
        if again:
            delay_us = 500 + world.delay(LAUNCH_US)
            run = partial(self._launch, slot.request)
            world.schedule(delay_us, None, Kind.CLUSTER, run, f"the task of {slot.request} is run again")
        elif not processes:
            crash = "" if world.chance() < 0.5 else f"{SIM} a process has crashed"
            report = partial(self.shell.slot_failed, slot.request, reason, crash)
            world.schedule(
                world.delay(REPORT_US_MAX), self.process, Kind.CLUSTER, report, f"the process of {slot.request} is gone"
            )

    def last_lines(self, slot: int) -> str:
        return ""

    def answer(self, client: int, reply: m.Reply) -> None:
        if client in self.replies:
            self.bug(f"client {client} is answered twice")
        self.replies[client] = reply
        request = self._requests.pop(client)
        self.observer.on_answer(client, request, reply)
        self._check_reply(request, reply)
        self.message_checker.on_reply(client, reply)
        if self.cluster.answered is not None:
            self.cluster.answered(self, client, request, reply)
        self.cluster.world.note(("reply", f"{client}:", reply.error or reply.checkpoint or "ok"))

    def notify_user(self, text: str) -> None:
        self._failures_reported += 1
        self.cluster.failed(self)
        self.message_checker.on_notification(text)
        number = _RESTART.search(text)
        if number is not None:
            self._restarts_reported += 1
            if int(number[1]) != self._restarts_reported:
                self.bug(f"restart {number[1]} is reported after restart {self._restarts_reported - 1}")
        self.cluster.world.note(("reported to users:", text))

    def ended_with(self, outcome: JobEnded) -> None:
        self.observer.ended()
        self.cluster.world.note(("job ended:", outcome.state, str(outcome.error) if outcome.error else ""))
        for number in list(self.connections):
            self.release(number)

    # ---- what only the shell sees

    def bug(self, text: str) -> None:
        self.cluster.world.bug(text)

    def unexplained(self, text: str) -> None:
        """Report a bug, unless this driver was replaced: it may miss files that its successor has deleted."""
        if self is self.cluster.drivers[-1]:
            self.bug(text)

    def _note_failed(self, checkpoint_id: int) -> None:
        self._aborted.add(checkpoint_id)
        for status in self.coordinator.checkpoints.history.newest_first:
            if status.id == checkpoint_id:  # otherwise the checkpoint is only taken again
                self.observer.checkpoint_failed(checkpoint_id, status.reason)

    def _is_for_savepoint(self) -> bool:
        pending = self.coordinator.checkpoints.pending
        return pending is not None and pending.is_savepoint

    def publishing(self, metadata: CheckpointMetadata) -> None:
        """The metadata of a checkpoint is about to be written; `published` gets the outcome."""
        self._publishing[metadata.checkpoint_id] = frozenset(metadata.files)

    def checkpoint_expired(self) -> None:
        self.uncertain.update(self._publishing)

    def published(self, outcome: Done[object] | Failed) -> None:
        if isinstance(outcome, Failed) and isinstance(outcome.error, UnknownOutcomeError):
            self.uncertain.update(self._publishing)
        elif isinstance(outcome, Failed) and not isinstance(outcome.error, FencedError):
            with self.cluster.world.inspecting():
                certain = self._publishing.keys() - self.uncertain  # one that had expired may still be written
                self.message_checker.not_published(self.plan.job_id, certain, self.cluster.open_storage)
        self._publishing.clear()

    def about_to_end(self, outcome: JobEnded) -> None:
        self._check_row(str(outcome.error))
        if self._requests:
            self.bug(f"the job ends without an answer to {list(self._requests.values())}")
        if outcome.status.restarts != self._restarts_reported:
            self.bug(
                f"the job was restarted {outcome.status.restarts} times, {self._restarts_reported} restarts were reported"
            )

    def _note_finished(self, deploy: m.Deploy) -> None:
        vertices = self.plan.graph.vertices  # the same at any parallelism
        places = {(spec.uid, ref.subtask) for ref in deploy.finished for spec in vertices[ref.vertex].specs}
        self.cluster.finished.setdefault((deploy.job_id, deploy.attempt), set()).update(places)

    def _check_reply(self, request: m.ClientRequest, reply: m.Reply) -> None:
        if isinstance(request, m.DoRescale) and not reply.error:
            status = self.coordinator.status(self.process.now_ms())
            if status.slots_needed != request.parallelism:
                self.bug(f"rescaled to {request.parallelism}, but the job runs at {status.slots_needed}")
            if reply.checkpoint is not None and status.restored_from != reply.checkpoint:
                self.bug(f"rescaled from {reply.checkpoint}, but restored from {status.restored_from}")

    def _check_row(self, why: str) -> None:
        """Check that a job which ends because of repeated failures has failed as often since its last checkpoint."""
        row = _IN_A_ROW.match(why)
        if row is not None and self._failures_reported < int(row[1]) - 1:
            self.bug(
                f"the job ends after {row[1]} failures in a row, {self._failures_reported + 1} of them since a checkpoint"
            )

    # ---- slots

    def register(self, slot: SimulatedSlot, register: m.Register) -> None:
        """Accept or refuse a slot process that has connected and authenticated."""
        if not slot.process.alive:
            return
        connection = slot.connection = ControlConnection(self, slot)
        reason = self.shell.refusal(register)
        if reason:
            self.slots_refused += 1
            self.cluster.world.note((slot.process.name, "is refused:", reason))
            connection.release()
            return
        number = connection.number = self._slot_count
        self._slot_count += 1
        self.connections[number] = connection
        connection.to_slot.send(m.Welcome(number, HEARTBEAT_S, self.plan.config.heartbeat_timeout_s))
        self.shell.slot_registered(number, register)

    def received(self, connection: ControlConnection, message: m.FromSlot) -> None:
        if connection.is_open:
            connection.received_us = self.cluster.world.now_us
            pending = self.coordinator.checkpoints.pending
            self.observer.on_message(message, pending.checkpoint_id if pending is not None else None)
            self.message_checker.on_message(connection.number, message)
            self.shell.slot_message(connection.number, message)
            self.observer.handled(message)

    def connection_lost(self, connection: ControlConnection, reason: str) -> None:
        """Report that a slot's process, or the connection to it, is gone."""
        if connection.is_open and self.drop(connection.number):
            self.shell.slot_lost(connection.number, reason)

    def _watch(self) -> None:
        """Send heartbeats, and drop silent slots, as the production connections do.

        The world has one clock: a step that takes longer than the limit delays the heartbeats of all slots.
        """
        world = self.cluster.world
        limit_us = self.plan.config.heartbeat_timeout_s * 1e6
        were_delayed = world.now_us - self._watched_us > limit_us
        self._watched_us = world.now_us
        for connection in list(self.connections.values()):
            if were_delayed:
                connection.received_us = world.now_us
            if connection.slot.calls_since_us is not None:  # the slot's second thread sends heartbeats
                connection.received_us = world.now_us
                for_ms = (world.now_us - connection.slot.calls_since_us) // 1000
                self.shell.slot_message(connection.number, m.InCall(f"a function {SIM}", for_ms, ""))
            elif world.now_us - connection.received_us > limit_us:
                self.connection_lost(connection, f"no heartbeat {SIM}")
            else:
                connection.to_slot.send(m.Heartbeat())
        if self.outcome is None:
            self.process.call_later(HEARTBEAT_S, self._watch)

    def lose_cluster(self, reason: str) -> None:
        """End the cluster for good: all slots die, and no new ones can be started."""
        self.slots_gone = reason
        for processes in list(self._processes.values()):
            for slot in list(processes):
                slot.process.crash()

    def _died(self) -> None:
        for connection in self.connections.values():
            connection.cut()
        self.connections.clear()
        for slot in self.cluster.live_slots:
            if slot.driver is self:
                slot.lose_driver(f"{SIM} the driver is gone")
