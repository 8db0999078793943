"""Connections of a simulated world. Each delivers in order and at its own pace, until it is cut.

`Pipe` is one direction of a control connection and carries whole messages. `SimTransport` is the
data plane of one slot process (engine.core.interfaces.Transport): pulled like the real one, with a bounded
number of bytes on the wire, fenced by job, attempt and pair of slots.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from midstream.engine.core.interfaces import ConnectionEnd
from midstream.simulation.trace import Kind
from midstream.simulation.world import Process, World

SIM: Final = "[sim]"
"""The mark in every reason that the simulator gives: a failure with such a reason is not a bug."""
HANDSHAKE_S: Final = 30.0
STALL_US: Final = 2_000_000
"""The longest time for which a connection delivers nothing; it is shorter than the heartbeat timeout."""
TOGETHER: Final = 0.7
"""The probability that a message arrives together with the one before it, if both were sent in one step."""
_LENGTH: Final = struct.Struct("<I")
_CONTROL: Final = Kind.CONTROL
_PUMP: Final = Kind.PUMP
_FRAMES: Final = Kind.FRAMES


class Pipe:
    """One direction of a connection: messages arrive in order, together or each after its own delay."""

    def __init__(self, world: World, receiver: Process, deliver: Callable[[Any], None]) -> None:
        self._world = world
        self._receiver = receiver
        self._deliver = deliver
        self._last_at_us = 0
        self._last_step = -1
        self.is_cut = False

    def send(self, message: Any, delay_us: int | None = None) -> None:
        if self.is_cut:
            return
        world = self._world
        behind_us = self._last_at_us - world.now_us
        if delay_us is not None:
            delay = max(delay_us, behind_us)
        elif world.step_number == self._last_step and world.chance() < TOGETHER:
            delay = behind_us
        else:
            delay = max(world.delay(world.tempo.control_us), behind_us)
        self._last_step = world.step_number
        self._last_at_us = world.schedule(delay, self._receiver, _CONTROL, partial(self._arrive, message), message)

    def hold(self, delay_us: int) -> None:
        """Delay everything that is sent from now on to at least `delay_us` from now."""
        self._last_at_us = max(self._last_at_us, self._world.now_us + delay_us)

    def close(self, then: Callable[[], None]) -> None:
        """Close the connection; the receiver notices after it has received everything that was sent."""
        world = self._world
        delay = max(world.delay(world.tempo.control_us), self._last_at_us - world.now_us)
        self._last_at_us = world.schedule(delay, self._receiver, Kind.CONTROL, then, "connection closed")

    def _arrive(self, message: Any) -> None:
        if not self.is_cut:
            self._deliver(message)


class Network:
    """All data connections of a world. Peers find each other here, and faults find connections."""

    def __init__(self, world: World, *, wire_bytes_max: int, pull_bytes_max: int) -> None:
        self.world = world
        self.wire_bytes_max = wire_bytes_max
        self.pull_bytes_max = pull_bytes_max
        self.waiting: dict[tuple[str, int, int, int], SimDataConnection] = {}
        """Ends whose peer has not opened yet, by job, attempt and the two slots, the lower first."""
        self.connected: dict[tuple[str, int, int, int], SimDataConnection] = {}
        """One end of each established connection."""
        self.frames = 0

    def pair(self, connection: SimDataConnection) -> None:
        other = self.waiting.pop(connection.key, None)
        world = self.world
        if other is None:
            self.waiting[connection.key] = connection
            connection.process.call_later(HANDSHAKE_S, connection.too_late)
            return
        connection.peer, other.peer = other, connection
        self.connected[connection.key] = connection
        for end in (connection, other):
            world.schedule(world.delay(world.tempo.data_us), end.process, Kind.LINK, end.up, f"connected {end.name}")

    def ends(self) -> list[SimDataConnection]:
        """Return both ends of all established connections; each sends in one direction."""
        return [
            end for connection in self.connected.values() for end in (connection, connection.peer) if end is not None
        ]

    def forget(self, connection: SimDataConnection) -> None:
        if self.waiting.get(connection.key) is connection:
            del self.waiting[connection.key]
        self.connected.pop(connection.key, None)

    def cut(self, connection: SimDataConnection, reason: str) -> None:
        """Cut a connection: each side notices after its own delay, and data on the wire may still arrive before."""
        self.connected.pop(connection.key, None)
        for end in (connection, connection.peer):
            if end is not None:
                end.lose_later(reason)


def stall(ways: Sequence[Pipe | SimDataConnection], victim: int) -> bool:
    """Stop deliveries in one direction of one connection for a while, as if packets were lost and sent again late."""
    if not ways:
        return False
    delay_us = 1_000 + victim * 7919 % (STALL_US if victim % 2 else STALL_US // 10)
    ways[victim // 2 % len(ways)].hold(delay_us)
    return True


class SimTransport:
    """The data connections of one slot process."""

    def __init__(self, network: Network, process: Process, job_id: str) -> None:
        self.slot: int | None = None
        self.connections: dict[tuple[int, int], SimDataConnection] = {}
        self._network = network
        self._process = process
        self._job_id = job_id
        process.on_death.append(self.gone)

    def open(self, slot: int, host: str, port: int, attempt: int, end: ConnectionEnd) -> SimDataConnection:
        assert self.slot is not None and slot != self.slot, (slot, self.slot)
        assert (slot, attempt) not in self.connections, f"slot {slot} opened twice in attempt {attempt}"
        low, high = min(slot, self.slot), max(slot, self.slot)
        connection = SimDataConnection(
            self, self._network, self._process, end, (self._job_id, attempt, low, high), (slot, attempt)
        )
        self.connections[slot, attempt] = connection
        self._network.pair(connection)
        return connection

    def gone(self) -> None:
        """Let the peers notice that the process is dead."""
        for connection in list(self.connections.values()):
            connection.drop(f"{SIM} {self._process.name} is gone")


class SimDataConnection:
    """The engine.core.interfaces.DataConnection of one side of a connection."""

    def __init__(
        self,
        transport: SimTransport,
        network: Network,
        process: Process,
        end: ConnectionEnd,
        key: tuple[str, int, int, int],
        slot_attempt: tuple[int, int],
    ) -> None:
        self.key = key
        self.name = f"slots {key[2]}-{key[3]} attempt {key[1]}"
        self.process = process
        self.peer: SimDataConnection | None = None
        self._transport = transport
        self._network = network
        self._world = network.world
        self._end: ConnectionEnd | None = end
        self._slot_attempt = slot_attempt
        self._is_up = False
        self._pump_is_due = False
        self._may_have_more = False
        """Whether a pull may return something."""
        self._wire: deque[tuple[int, list[bytearray]]] = deque()
        """The data that were sent and not yet received: their size in bytes, and the frames without their length."""
        self._wire_bytes = 0
        self._last_at_us = 0
        self._is_cut = False

    # ---- DataConnection

    def wake(self) -> None:
        self._may_have_more = True
        self._pump_soon()

    def _pump_soon(self) -> None:
        if (
            self._may_have_more
            and self._is_up
            and not self._pump_is_due
            and not self._is_cut
            and self._wire_bytes < self._network.wire_bytes_max
        ):
            self._pump_is_due = True
            world = self._world
            delay = 1 + int(world.chance() * self.process.mail_us)
            world.schedule(delay, self.process, _PUMP, self._pump, self.name)

    def close(self) -> None:
        self.drop(f"{SIM} the other side has closed the connection")

    def hold(self, delay_us: int) -> None:
        """Delay everything that is sent to the peer from now on to at least `delay_us` from now."""
        self._last_at_us = max(self._last_at_us, self._world.now_us + delay_us)

    # ---- life

    def up(self) -> None:
        if self._end is not None and not self._is_cut:
            self._is_up = True
            self._pump_soon()

    def too_late(self) -> None:
        if self.peer is None and self._end is not None:
            self._lost(f"{SIM} the other side did not connect in time")

    def drop(self, reason: str) -> None:
        """Drop this side; the other side notices after it has received everything that was sent."""
        if self._end is None:
            return
        self._end = None
        self._transport.connections.pop(self._slot_attempt, None)
        self._network.forget(self)
        peer = self.peer
        if peer is not None and peer._end is not None and not self._is_cut:
            peer.lose_later(reason, after_us=max(0, self._last_at_us - self._world.now_us))

    def lose_later(self, reason: str, after_us: int = 0) -> None:
        world = self._world
        self._network.connected.pop(self.key, None)
        delay = after_us + world.delay(world.tempo.data_us)
        world.schedule(delay, self.process, Kind.LINK, partial(self._lost, reason), f"lost {self.name}: {reason}")
        if self.peer is not None:
            self.peer._is_cut = True  # everything that the peer sends from now on is lost

    def _lost(self, reason: str) -> None:
        end = self._end
        if end is None:
            return
        self._end = None
        self._is_cut = True
        self._transport.connections.pop(self._slot_attempt, None)
        self._network.forget(self)
        end.lost(reason)

    # ---- traffic

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._end is None or self._is_cut:
            return
        network, world = self._network, self._world
        self._may_have_more = False
        pieces = self._end.pull(network.pull_bytes_max)
        if not pieces:
            return
        data = b"".join(pieces)
        if len(data) >= network.pull_bytes_max:
            self._may_have_more = True
        frames: list[bytearray] = []
        start = 0
        while start < len(data):
            (length,) = _LENGTH.unpack_from(data, start)
            start += _LENGTH.size
            frames.append(bytearray(data[start : start + length]))
            start += length
        assert start == len(data), "a connection gave less than a whole frame"
        network.frames += len(frames)
        self._wire.append((len(data), frames))
        self._wire_bytes += len(data)
        peer = self.peer
        assert peer is not None
        delay = max(world.delay(world.tempo.data_us), self._last_at_us - world.now_us)
        shown = None if world.trace is None else [bytes(frame) for frame in frames]
        self._last_at_us = world.schedule(delay, peer.process, _FRAMES, peer._arrive, shown)
        self._pump_soon()

    def _arrive(self) -> None:
        sender = self.peer
        assert sender is not None
        size, frames = sender._wire.popleft()
        sender._wire_bytes -= size
        for frame in frames:
            if self._end is None:
                return
            self._end.receive(memoryview(frame))
            frame[:] = b"\xdb" * len(frame)  # overwritten, since the receiver must not keep the view
        sender._pump_soon()
