"""The main of a slot process: it connects to the driver, registers, and runs the SlotMachine until released.

While a user's function occupies the loop, another thread reports that the slot is alive (`heartbeat_thread`).

A slot ends when it is released, when the driver is silent for longer than the heartbeat timeout, when the control
connection closes, or on a bug. One that was stopped (SIGSTOP) and resumed later finds its connection closed, or the
silence too long: a zombie ends by itself. However the slot ends, its tasks are cancelled, its sockets closed and its
I/O threads joined before `run_slot` returns.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from midstream.connectors.common import external_waits
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.framing import CONTROL_FRAME_BYTES_MAX, ProtocolViolation
from midstream.engine.protocol.handshake import NONCE_BYTES, Dialer, Identity, Role
from midstream.engine.protocol.live_rows import SampleRows
from midstream.engine.worker.interfaces import SlotServices
from midstream.runtime.concurrent_calls import ConcurrentCalls
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.connection import Connection, dial
from midstream.runtime.network.message_channel import RECEIVE_BUFFER_BYTES, MessageChannel
from midstream.runtime.network.tls import tls_of
from midstream.runtime.network.transport import DIAL_TIMEOUT_S, REDIAL_S, TcpTransport
from midstream.runtime.process.open_file_limit import SLOT_DESCRIPTORS, allow
from midstream.runtime.process.slot_memory import collect_rarely, collect_recent, keep_freed_memory, memory_limit
from midstream.runtime.process.slot_output import SlotOutput
from midstream.runtime.process.slot_provider import SlotLaunch
from midstream.runtime.process.thread_limits import limit_threads
from midstream.runtime.process.unpacked_modules import UnpackedModules
from midstream.runtime.random_ids import RandomIds
from midstream.runtime.storage.file_storage import FileStorage
from midstream.runtime.storage.local_disk import LocalDirectories, local_directories

if TYPE_CHECKING:
    from midstream.engine.worker.slot_machine import SlotMachine
    from midstream.runtime.process.heartbeat_thread import HeartbeatThread

WELCOME_TIMEOUT_S: Final = 30.0
LOG_BYTES_MAX: Final = 2**20
"""The unread bytes at which no more lines are sent to the driver."""

_log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[m.ToSlot | SampleRows] = msgspec.msgpack.Decoder(m.ToSlot | SampleRows)


def run_slot(
    launch: SlotLaunch, capture: SlotOutput | None = None, resources: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Run a slot until it is released. Call it on the main thread of a separate process.

    `capture`: captures what user code prints and logs. `resources`: what the cluster has assigned to the slot. Raises ClusterError if the driver cannot be reached, and any bug
    that ended the machine.
    """
    limit_threads()
    keep_freed_memory()
    allow(SLOT_DESCRIPTORS)
    _SlotProcess(launch, capture, resources or {}).run()


class _SlotProcess:
    def __init__(self, launch: SlotLaunch, capture: SlotOutput | None, resources: Mapping[str, Sequence[str]]) -> None:
        import psutil

        from midstream.engine.worker.slot_machine import (
            SlotMachine,  # before the slot registers, since it takes a while
        )

        self._make_machine = SlotMachine
        self._capture = capture
        self._resources = resources
        self._launch = launch
        self._loop = EventLoop("slot", fatal=self._fatal)
        self._memory = psutil.Process().memory_info
        self._memory_limit_bytes = memory_limit()
        self._transport: TcpTransport | None = None
        self._channel: MessageChannel[m.ToSlot | SampleRows] | None = None
        self._machine: SlotMachine | None = None
        self._welcome: m.Welcome | None = None
        self._beating: HeartbeatThread | None = None
        self._modules: UnpackedModules | None = None
        self._dials_until_s = self._loop.monotonic_s() + DIAL_TIMEOUT_S
        self._ending = False
        self._error: BaseException | None = None
        """The error that ends the slot; None if it is released."""

    def run(self) -> None:
        try:
            self._loop.post(self._connect)
            self._loop.run()
        finally:
            self._close()
        if self._error is not None:
            raise self._error

    # ---- joining

    def _connect(self) -> None:
        launch = self._launch
        try:
            host = socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise ClusterError(f"cannot find the driver's host {launch.host!r}: {error.strerror or error}") from error
        try:
            identity = Identity(Role.SLOT_CONTROL, launch.job_id)
            Connection(
                self._loop,
                dial(str(host), launch.port),
                Dialer(launch.keys.secret, identity, secrets.token_bytes(NONCE_BYTES)),
                self._connected,
                self._unreachable,
                frame_bytes_max=CONTROL_FRAME_BYTES_MAX,
                buffer_bytes=RECEIVE_BUFFER_BYTES,
                tls=tls_of(launch.keys),
                connecting=True,
            )
        except ClusterError as error:
            raise ClusterError(f"a slot on {socket.gethostname()} cannot reach its driver: {error}") from error

    def _unreachable(self, connection: Connection, reason: str) -> None:
        """Dial again for a while: a flood of the driver's port may have closed this connection."""
        if connection.is_established and not connection.is_judged and self._loop.monotonic_s() < self._dials_until_s:
            self._loop.call_later(REDIAL_S, self._connect)
            return
        where = f"{self._launch.host}:{self._launch.port}"
        advice = "" if connection.is_judged else "; check spark.driver.host, and any firewall between the two machines"
        self._end(
            ClusterError(f"a slot on {socket.gethostname()} cannot reach its driver at {where}: {reason}{advice}")
        )

    def _connected(self, connection: Connection) -> None:
        launch = self._launch
        self._channel = MessageChannel(connection, _decoder, self._received, self._lost)
        self._transport = TcpTransport(
            self._loop, launch.keys, launch.job_id, connection.local_host, ports=launch.ports
        )
        self._channel.send(
            m.Register(
                host=self._transport.host,
                port=self._transport.port,
                pid=os.getpid(),
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                request=launch.request,
            )
        )
        self._loop.call_later(WELCOME_TIMEOUT_S, self._check_welcome)

    def _check_welcome(self) -> None:
        if self._welcome is None:
            self._lost("it did not answer")

    # ---- being a slot

    def _received(self, message: m.ToSlot | SampleRows) -> None:
        if self._ending:
            return
        if isinstance(message, m.Welcome):
            self._begin(message)
        elif isinstance(message, m.Heartbeat):
            return  # its bytes have already counted as a sign of life
        elif isinstance(message, m.Release):
            self._end(None, released=True)
        elif self._machine is None:
            raise ProtocolViolation(f"{type(message).__name__} before Welcome")
        elif isinstance(message, SampleRows):
            assert self._channel is not None
            self._machine.sample_rows(message, self._channel.send)
        else:
            if isinstance(message, m.Cancel):
                self._report()  # the last figures of tasks that end with it
            if isinstance(message, m.Deploy):
                # The tasks and the state of the previous attempt refer to each other. Python's collector examines old
                # objects only after many more have become old, so a job would need more memory with every restart.
                gc.collect()
            self._machine.handle(message)

    def _begin(self, welcome: m.Welcome) -> None:
        if self._welcome is not None:
            raise ProtocolViolation("a second Welcome")
        assert self._transport is not None and self._channel is not None
        self._welcome = welcome
        self._transport.slot = welcome.slot
        self._modules = UnpackedModules(welcome.modules)
        self._machine = self._make_machine(
            SlotServices(
                clock=self._loop,
                executor=self._loop,
                ids=RandomIds(),
                transport=self._transport,
                open_storage=FileStorage,
                send=self._channel.send,
                make_signal=threading.Event,
                open_calls=ConcurrentCalls(self._loop).open,
                unpickle=self._modules.unpickle,
                resources=self._resources,
                local_disk=LocalDirectories(local_directories(os.environ)),
                memory_limit_bytes=self._memory_limit_bytes,
            )
        )
        self._machine.handle(welcome)
        self._channel.share()
        from midstream.runtime.process.heartbeat_thread import (
            HeartbeatThread,  # after the threads of the libraries that it imports are limited
        )

        collect_rarely()
        self._beating = HeartbeatThread(self._loop, welcome.heartbeat_interval_s, self._channel.send_aside)
        if self._capture is not None:
            self._capture.begin(self._send_log, self._loop.post, self._machine.current_operator)
        self._beat()

    def _beat(self) -> None:
        """Send a heartbeat; check whether the driver and the machines of the other slots can still be reached."""
        if self._ending:
            return
        assert self._welcome is not None and self._channel is not None and self._machine is not None
        silent_s = self._loop.monotonic_s() - self._channel.received_s
        if silent_s > self._welcome.heartbeat_timeout_s:
            self._lost(f"it has been silent for {silent_s:.1f} s")
            return
        self._report()
        collect_recent()
        assert self._transport is not None
        self._transport.check_answers(self._welcome.heartbeat_timeout_s)
        self._loop.call_later(self._welcome.heartbeat_interval_s, self._beat)

    def _report(self) -> None:
        assert self._channel is not None and self._machine is not None
        status = self._machine.status()
        warnings = (*status.warnings, *external_waits.warnings())
        longest = external_waits.waits(time.monotonic())[: m.SLOT_WAITS_MAX]
        waits = tuple(m.SlotWait(what[: m.WAIT_CHARS_MAX], for_ms) for what, for_ms in longest)
        status = msgspec.structs.replace(
            status,
            memory_bytes=self._memory().rss,
            memory_limit_bytes=self._memory_limit_bytes,
            waits=waits,
            warnings=tuple(text[: m.WAIT_CHARS_MAX] for text in warnings[: m.SLOT_WARNINGS_MAX]),
        )
        self._channel.send(status)

    def _send_log(self, logged: m.Logged) -> None:
        """Send captured lines, from inside the printing call. A driver that does not read gets no more of them."""
        if self._channel is not None and self._channel.waiting_bytes < LOG_BYTES_MAX:
            self._channel.send_inside(logged)

    # ---- ending

    def _lost(self, reason: str) -> None:
        """End the slot: the driver is gone, or has given the slot up, and nothing needs its work any more."""
        if self._ending:
            return
        _log.warning("slot %s ends: lost its driver: %s", self._welcome.slot if self._welcome else "?", reason)
        self._end(None if self._welcome else ClusterError(f"the driver did not accept the slot: {reason}"))

    def _fatal(self, error: BaseException) -> None:
        _log.error("slot %s ends on an error", self._welcome.slot if self._welcome else "?", exc_info=error)
        self._end(error)

    def _end(self, error: BaseException | None, released: bool = False) -> None:
        if self._ending:
            return
        self._ending = True
        self._error = error
        try:
            if self._machine is not None:
                self._machine.close()
        finally:
            if self._capture is not None:
                self._capture.end()
            if released and self._channel is not None:
                self._channel.finish(self._loop.stop)
            else:
                self._loop.stop()

    def _close(self) -> None:
        if self._beating is not None:
            self._beating.end()
        if self._channel is not None:
            self._channel.close()
        if self._transport is not None:
            self._transport.close()
        self._loop.close()
        if self._modules is not None:
            self._modules.close()
