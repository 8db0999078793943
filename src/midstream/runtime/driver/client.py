"""A blocking connection to a running job's driver, for the command line: one question, one answer."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from typing import Final

import msgspec

from midstream.engine.core.errors import UNDECODABLE, ClusterError
from midstream.engine.protocol.framing import (
    CONTROL_FRAME_BYTES_MAX,
    LENGTH_BYTES,
    MESSAGE,
    UNAUTHENTICATED_FRAME_BYTES_MAX,
    FrameDecoder,
    ProtocolViolation,
    frame,
)
from midstream.engine.protocol.handshake import NONCE_BYTES, Dialer, Identity, Role
from midstream.engine.protocol.live_rows import GetRows
from midstream.engine.protocol.messages import ClientRequest, GetLogs, Reply
from midstream.runtime.driver.job_registry import JobEntry
from midstream.runtime.network.tls import tls_of

CONNECT_TIMEOUT_S: Final = 10.0
REDIAL_AFTER_S: Final = (0.05, 0.1, 0.2, 0.4)
"""The pauses before dialling again: a driver whose port is flooded may close unauthenticated connections."""
_RECEIVE_BUFFER_BYTES: Final = 64 * 2**10

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Reply)


class _ClosedError(ClusterError):
    """The driver has closed the connection."""


class Client:
    """A connection to a driver. Not thread-safe.

    Call `request` any number of times, then `close`. Raises ClusterError if the job does not answer.
    """

    def __init__(self, entry: JobEntry, connect_timeout_s: float | None = None) -> None:
        self.entry = entry
        deadline_s = time.monotonic() + (CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s)
        for pause_s in REDIAL_AFTER_S:
            try:
                self._connect(deadline_s)
                return
            except _ClosedError:
                time.sleep(pause_s)
        self._connect(deadline_s)

    def _connect(self, deadline_s: float) -> None:
        entry, connect_timeout_s = self.entry, max(0.001, deadline_s - time.monotonic())
        try:
            self._sock = socket.create_connection((entry.host, entry.port), timeout=connect_timeout_s)
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            raise ClusterError(
                f"job {entry.name} ({entry.job_id}) does not answer at {entry.host}:{entry.port}: "
                f"{error.strerror or error}; it may have ended just now"
            ) from error
        tls = tls_of(entry.keys)
        self._decoder = FrameDecoder(UNAUTHENTICATED_FRAME_BYTES_MAX, UNAUTHENTICATED_FRAME_BYTES_MAX + LENGTH_BYTES)
        try:
            dialer = Dialer(entry.keys.secret, Identity(Role.CLIENT, entry.job_id), secrets.token_bytes(NONCE_BYTES))
            if tls is not None:
                self._sock = encrypted = tls.connect(self._sock)
                dialer.channel = tls.channel(encrypted)
            self._sock.sendall(dialer.start())
            while not dialer.done:
                self._sock.sendall(dialer.receive(self._next_frame(deadline_s)))
        except BaseException as error:
            self._sock.close()
            if isinstance(error, TimeoutError):
                raise self._silent() from error
            if isinstance(error, OSError):
                raise self._broken(error) from error
            if isinstance(error, _ClosedError):  # which is tried again
                raise
            if isinstance(error, ClusterError) and entry.job_id not in str(error):
                raise ClusterError(
                    f"job {entry.name} ({entry.job_id}): what answers at {entry.host}:{entry.port} is not its driver: {error}"
                ) from error
            raise
        self._decoder.allow(CONTROL_FRAME_BYTES_MAX, _RECEIVE_BUFFER_BYTES)

    def request(self, request: ClientRequest | GetLogs | GetRows, timeout_s: float | None = None) -> Reply:
        """Send a request and wait for the answer; a checkpoint is answered when it is complete, a stop when the job has
        ended.

        Raises ClusterError if the driver goes away or `timeout_s` passes; afterwards the client must not be used.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._sock.settimeout(CONNECT_TIMEOUT_S if timeout_s is None else timeout_s)
            self._sock.sendall(b"".join(frame(MESSAGE, _encode(request))))
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            raise self._broken(error) from error
        received = self._next_frame(deadline_s)
        if received[0] != MESSAGE:
            raise ProtocolViolation(f"a frame of type {received[0]:#x} where a reply was expected")
        try:
            return _decoder.decode(received[1:])
        except UNDECODABLE as error:
            raise ProtocolViolation(f"an invalid reply: {error}") from error

    def close(self) -> None:
        self._sock.close()

    def give_up(self) -> None:
        """End an `request` that waits on another thread: it raises ClusterError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _silent(self) -> ClusterError:
        entry = self.entry
        return ClusterError(
            f"job {entry.name} ({entry.job_id}): its driver, process {entry.pid}, is alive but not responding at "
            f"{entry.host}:{entry.port}; it may be stopped (`kill -CONT {entry.pid}` resumes it), swapped out, or have too "
            "little of a core. If it never responds again, end it with "
            f"`kill -9 {entry.pid}`, and start the job again with --from latest"
        )

    def _broken(self, error: OSError) -> ClusterError:
        kind = _ClosedError if isinstance(error, ConnectionError) else ClusterError
        return kind(f"job {self.entry.name}: the connection broke: {error.strerror or error}")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_frame(self, deadline_s: float | None) -> memoryview:
        while True:
            received = self._decoder.next_frame()
            if received is not None:
                return received
            try:
                self._sock.settimeout(None if deadline_s is None else max(0.001, deadline_s - time.monotonic()))
                count = self._sock.recv_into(self._decoder.space())
            except TimeoutError as error:
                raise self._silent() from error
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise _ClosedError(
                    f"job {self.entry.name} ({self.entry.job_id}) closed the connection; it may have ended"
                )
            self._decoder.received(count)
