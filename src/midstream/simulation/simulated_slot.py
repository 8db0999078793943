"""A slot of a simulated world: the production SlotMachine in a process of its own, as on an executor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from midstream.engine.coordinator.placement.slot_pool import PYTHON
from midstream.engine.core.arrow_bytes import read_table
from midstream.engine.core.errors import StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Storage
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.protocol import messages as m
from midstream.engine.worker.interfaces import SlotServices
from midstream.engine.worker.slot_machine import SlotMachine
from midstream.runtime.calls_in_turn import CallsInTurn
from midstream.simulation.message_checker import NOT_OPENED, OwedCommits
from midstream.simulation.network import SIM, Pipe, SimTransport
from midstream.simulation.trace import Kind
from midstream.simulation.world import Process, SimSignal

if TYPE_CHECKING:
    from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver

HEARTBEAT_S: Final = 0.5
CHECK_STEPS: Final = 16
_from_slot: Final = msgspec.msgpack.Decoder(m.FromSlot)
_encoder: Final = msgspec.msgpack.Encoder()


class ControlConnection:
    """The control connection between a driver and a slot process, from the driver's side."""

    def __init__(self, driver: SimulatedDriver, slot: SimulatedSlot) -> None:
        world = driver.cluster.world
        self.number = -1
        """The slot's number, once it has been accepted; -1 before."""
        self.slot = slot
        self.to_slot = Pipe(world, slot.process, slot.received)
        self.to_driver = Pipe(world, driver.process, partial(driver.received, self))
        self.is_open = True
        """Whether the driver still receives messages from it."""
        self.received_us = world.now_us

    def cut(self) -> None:
        """Cut the connection: neither side receives anything more."""
        self.is_open = False
        self.to_slot.is_cut = True
        self.to_driver.is_cut = True

    def release(self) -> None:
        """Release the slot: it ends once it has received everything that was sent, and the driver ignores it."""
        self.is_open = False
        self.to_driver.is_cut = True
        self.to_slot.send(m.Release())


class SimulatedSlot:
    """A slot process: it registers, runs a SlotMachine, and ends when it is released or loses its driver."""

    def __init__(self, cluster: SimulatedCluster, driver: SimulatedDriver, request: str) -> None:
        world = self._world = cluster.world
        self.cluster = cluster
        self.driver = driver
        self.request = request
        self.process = Process(world, f"slot{len(cluster.slots)}")
        self.transport = SimTransport(cluster.network, self.process, driver.plan.job_id)
        self.connection: ControlConnection | None = None
        self.is_released = False
        self.calls_since_us: int | None = None
        """The time since which its loop has been in one call; None if it is not."""
        self.machine: SlotMachine | None = None
        self.owed = OwedCommits(self._world.bug, self.process.name)
        self._opens = True
        """Whether it can open the storage, the next time that it does."""
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
            self.is_released = True
            self.end()
        elif isinstance(message, m.Heartbeat):
            return
        elif isinstance(message, m.Welcome):
            self._begin(message)
        else:
            assert self.machine is not None
            if isinstance(message, m.Commit):
                self.owed.on_request(message.request)
            elif isinstance(message, m.CommitSinks) and self.cluster.load_failures:
                self.cluster.load_failures -= 1
                self._opens = False
            self.machine.handle(message)

    def _begin(self, welcome: m.Welcome) -> None:
        connection = self.connection
        assert connection is not None
        self.transport.slot = welcome.slot
        self.machine = SlotMachine(
            SlotServices(
                clock=self.process,
                executor=self.process,
                ids=self.process,
                transport=self.transport,
                open_storage=self._open_storage,
                send=self._send,
                make_signal=partial(SimSignal, self._world),
                open_calls=partial(CallsInTurn, self.process),
                unpickle=self.cluster.unpickle,
                local_disk=self.cluster.open_local_disk(self.process.name),
                on_taken=self._check_taken,
            )
        )
        self.machine.handle(welcome)
        self._beat()

    def _open_storage(self, root: str) -> Storage:
        if not self._opens:
            self._opens = True
            self._world.note(("it cannot be opened:", root))
            self.owed.not_opened()
            raise StorageError(f"{NOT_OPENED} {SIM}")
        return self.cluster.open_storage(root)

    def _check_taken(self, storage: Storage, handle: m.ChunkHandle, table: pa.Table) -> None:
        """Check that state which is taken over from the attempt before is what the checkpoint has."""
        self._world.note(("taken over:", handle.id))
        with self._world.inspecting():
            stored = read_table(memoryview(storage.read_range(handle.file, handle.offset, handle.length)))
        if not stored.equals(table):
            self._world.bug(f"{self.process.name} takes over {handle.id}, and {handle.file} has other rows")

    def _send(self, message: m.FromSlot) -> None:
        assert self.connection is not None
        if isinstance(message, (m.CommitDone, m.CommitFailed)):
            self.owed.on_answer(message)
        if isinstance(message, m.TaskFinished) and self.driver.plan.config.checkpoint_dir is not None:
            for owed in _owed_at_the_end(self.machine, message.task):
                self._world.bug(f"{message.task} ends {owed}")
        self.connection.to_driver.send(_from_slot.decode(_encoder.encode(message)))

    def _beat(self) -> None:
        assert self.machine is not None
        self._send(self.machine.status())
        self.process.call_later(HEARTBEAT_S, self._beat)

    def _check(self) -> None:
        """Check the slot's invariants, but not after each step, which would take a quarter of the time."""
        if self._world.step_number % CHECK_STEPS == 0 and self.machine is not None:
            self.machine.check()

    def lose_driver(self, reason: str) -> None:
        """End the process soon, since the control connection is gone."""
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
        """Report the end of the process to the driver, and the closed connection after everything sent on it."""
        connection, driver = self.connection, self.driver
        if not driver.process.alive:
            return
        if not self.is_released:
            driver.process_died(self, f"{SIM} {self.process.name} died")
        if connection is not None:
            connection.to_slot.is_cut = True
            if connection.is_open:
                lost = partial(driver.connection_lost, connection, f"{SIM} {self.process.name} died")
                connection.to_driver.close(lost)


def _owed_at_the_end(slot: SlotMachine | None, ref: TaskId) -> Iterator[str]:
    """Yield what a task that ends still owes, and cannot give later: rows that are not sent, answers for checkpoints."""
    task = slot.tasks.get(ref) if slot is not None else None
    if task is None:
        return  # it had finished before
    for partition in task.partitions:
        for sub in partition.subpartitions:
            waiting = [item for item in (sub.sending, *sub.queue) if isinstance(item, LeasedBatch)]
            if waiting and not sub.is_local:
                yield f"with {len(waiting)} batches to {sub.channel} that have not been sent"
    if task._snapshots._unacknowledged:
        yield f"without an answer for checkpoints {sorted(task._snapshots._unacknowledged)}"
