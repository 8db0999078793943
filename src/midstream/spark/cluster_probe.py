"""A probe of a cluster's executors, made by processes on as many cores as a job needs concurrently.

One Spark job with a task per slot. Each task connects to this program, as slots do, reports what it has found where it
runs, and waits. When all have connected, or no more connect in time, each learns of the others and tries to connect to
them, as slots do, and to use the checkpoint storage.

    task → driver   the token, then what it is (JSON, one line)
    driver → task   the others: [[host, port], …]
    task → driver   what it could not do (JSON, one line)
    driver → task   end of the connection: the task may end

The token travels inside the task's serialised function, through Spark's own channel.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Final, TypeVar

import msgspec
from py4j.protocol import Py4JError
from pyspark import SparkContext

from midstream.engine.core.errors import MidstreamError
from midstream.runtime.network.ports import Ports, listen
from midstream.runtime.network.tls import keys_for
from midstream.runtime.process.slot_provider import SlotProvider
from midstream.runtime.storage.file_storage import FileStorage
from midstream.runtime.storage.local_disk import DiskProbe, probe_directories
from midstream.spark.spark_slots import explain

PACKAGES: Final = ("midstream", "cloudpickle", "msgspec", "numpy", "polars", "psutil", "pyarrow", "pyspark", "xxhash")
"""The packages that slots import."""
LINE_BYTES_MAX: Final = 2**20
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 60.0
"""The limit on the tests: storage may be far away, and many peers unreachable."""
QUESTION_TIMEOUT_S: Final = 600.0
"""The limit on the arrival of the other slots, which `doctor` waits for before its requests."""
CONNECTING_AT_ONCE: Final = 16

T = TypeVar("T")


class Found(msgspec.Struct, frozen=True):
    """The findings of one process on an executor."""

    host: str
    """The address from which it has reached the driver, and at which other slots connect to it."""
    port: int
    name: str
    """The name of its machine."""
    pid: int
    python: str
    packages: dict[str, str | None]
    """The version of each of `PACKAGES`; None if it is not installed."""
    clock_s: float
    """The seconds since the epoch, by its machine's clock, at the request."""


class Tried(msgspec.Struct, frozen=True):
    """The problems that a process has found."""

    unreachable: dict[int, str]
    """The other processes to which it could not connect, by index, with the reason."""
    storage: str
    """Why it could not use the checkpoint storage, or ""."""
    tls: str = ""
    """Why it could not use its certificate, or ""."""
    disks: tuple[DiskProbe, ...] = ()
    """What writing to its local directories has shown."""


@dataclass(frozen=True, slots=True)
class ProbedSlot:
    """A process that has connected. `asked_s`, `answered_s`: the driver's clock around `found.clock_s`."""

    found: Found
    asked_s: float
    answered_s: float
    tried: Tried | None
    """The results of its tests; None: it has not answered in time."""


@dataclass(frozen=True, slots=True)
class ClusterProbe:
    slots: tuple[ProbedSlot, ...]
    failure: str
    """Why some did not connect, as far as Spark reports it; "" if none failed."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The instructions to a task."""

    host: str
    port: int
    token: str = field(repr=False)
    storage: str | None
    probe: str
    """A directory in the storage, with a file `driver` whose content is the token."""
    ports: Ports
    """The ports on which it listens for others."""
    certificates: str
    """The directory of certificates that every machine has, or ""."""


def survey(
    context: SparkContext,
    provider: SlotProvider,
    slots: int,
    timeout_s: float,
    storage: str | None,
    probe: str,
    token: str,
    certificates: str = "",
) -> ClusterProbe:
    """Start `slots` processes together, of which those take part that connect within `timeout_s`.

    `provider`: that of a job's slots. `storage`, `probe`, `certificates`: see `_Request`. Raises ClusterError if nothing
    can listen where the driver would.
    """
    group = f"midstream-doctor-{secrets.token_hex(4)}"
    failures: list[str] = []
    ended = threading.Event()
    with listen(provider.bind_host, provider.driver_ports) as server:
        request = _Request(
            provider.driver_host, server.getsockname()[1], token, storage, probe, provider.slot_ports, certificates
        )
        running = threading.Thread(
            target=_run, args=(context, group, slots, request, failures, ended), name=group, daemon=True
        )
        running.start()
        connections: list[_ProbeConnection] = []
        try:
            _gather(server, connections, slots, timeout_s, token, ended)
            peers = [[connection.found.host, connection.found.port] for connection in connections]
            with ThreadPoolExecutor(max(len(connections), 1)) as threads:
                tried = list(threads.map(lambda connection: connection.request_tests(peers), connections))
        finally:
            for connection in connections:
                connection.close()
            with contextlib.suppress(Py4JError, OSError, AttributeError):  # Spark has ended
                context.cancelJobGroup(group)
            running.join(CONNECT_TIMEOUT_S)
    return ClusterProbe(
        tuple(
            ProbedSlot(connection.found, connection.asked_s, connection.answered_s, answer)
            for connection, answer in zip(connections, tried, strict=True)
        ),
        failures[0] if failures and len(connections) < slots else "",
    )


def _run(
    context: SparkContext, group: str, slots: int, request: _Request, failures: list[str], ended: threading.Event
) -> None:
    """Run the Spark job, on a thread of its own, since Spark's job groups belong to threads."""
    try:
        context.setJobGroup(group, "midstream doctor", interruptOnCancel=True)
        context.parallelize(range(slots), slots).mapPartitions(partial(_examine, request)).collect()
    except Exception as error:  # noqa: BLE001 - the errors of Spark have no common base; all contain why slots did not come
        failures.append(explain(error))
    finally:
        ended.set()


class _ProbeConnection:
    """The connection of one authenticated task."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        """Raises OSError or ValueError for a connection that is not from a task."""
        connection.settimeout(CONNECT_TIMEOUT_S)
        self._connection = connection
        self._stream = connection.makefile("rb")
        received = self._stream.readline(len(token) + 2)
        if not hmac.compare_digest(received.rstrip(b"\n"), token.encode()):
            raise ValueError("the token is wrong")
        self.asked_s = time.time()
        connection.sendall(b"\n")
        self.found = _decoded(self._stream.readline(LINE_BYTES_MAX), Found)
        self.answered_s = time.time()

    def request_tests(self, peers: Sequence[Sequence[str | int]]) -> Tried | None:
        """Request the tests. None: no answer in time, or an invalid one."""
        try:
            self._connection.settimeout(ANSWER_TIMEOUT_S)
            self._connection.sendall(msgspec.json.encode(peers) + b"\n")
            return _decoded(self._stream.readline(LINE_BYTES_MAX), Tried)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


def _gather(
    server: socket.socket,
    connections: list[_ProbeConnection],
    slots: int,
    timeout_s: float,
    token: str,
    ended: threading.Event,
) -> None:
    deadline_s = time.monotonic() + timeout_s
    server.settimeout(0.2)
    while len(connections) < slots and time.monotonic() < deadline_s and not ended.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        try:
            connections.append(_ProbeConnection(connection, token))
        except (OSError, ValueError):  # a stranger, or a task that has ended
            connection.close()


def _decoded(line: bytes, kind: type[T]) -> T:
    """Decode a line. Raises ValueError for an invalid one."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{kind.__name__} cannot be read: {error}") from error


# ---- on the executors ----


def _examine(request: _Request, _nothing: Iterable[int]) -> Iterator[str]:
    with socket.create_connection((request.host, request.port), ANSWER_TIMEOUT_S) as driver:
        stream = driver.makefile("rb")
        host = driver.getsockname()[0]
        with listen(host, request.ports) as listener:
            listener.settimeout(None)
            accepting = threading.Thread(target=_accept, args=(listener,), daemon=True)
            accepting.start()
            driver.sendall(request.token.encode() + b"\n")
            stream.readline(LINE_BYTES_MAX)
            driver.sendall(msgspec.json.encode(_what_is_here(host, listener.getsockname()[1])) + b"\n")
            driver.settimeout(QUESTION_TIMEOUT_S)
            peers_line = stream.readline(LINE_BYTES_MAX)
            if peers_line:
                peers: list[tuple[str, int]] = _decoded(peers_line, list[tuple[str, int]])
                with ThreadPoolExecutor(CONNECTING_AT_ONCE) as threads:
                    reasons = list(threads.map(_connect, peers))
                unreachable = {index: reason for index, reason in enumerate(reasons) if reason}
                disks = tuple(probe_directories(os.environ))
                tried = Tried(unreachable, _use_storage(request), _use_certificates(request), disks)
                driver.sendall(msgspec.json.encode(tried) + b"\n")
                stream.readline(LINE_BYTES_MAX)  # others may still connect
    return iter(())


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        while True:
            listener.accept()[0].close()


def _what_is_here(host: str, port: int) -> Found:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return Found(
        host, port, socket.gethostname(), os.getpid(), platform.python_version(), versions, clock_s=time.time()
    )


def _connect(peer: tuple[str, int]) -> str:
    try:
        socket.create_connection(peer, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def _use_certificates(request: _Request) -> str:
    """Return why the certificates cannot be used on this machine, or ""."""
    try:
        if request.certificates:
            keys_for(request.certificates, "", b"")
    except (MidstreamError, OSError) as error:
        return str(error)
    return ""


def _use_storage(request: _Request) -> str:
    """Return why the storage cannot be used from here, or ""."""
    if request.storage is None:
        return ""
    name = f"{request.probe}/{secrets.token_hex(8)}"
    try:
        storage = FileStorage(request.storage)
        if (
            not storage.exists(f"{request.probe}/driver")
            or storage.read(f"{request.probe}/driver") != request.token.encode()
        ):
            return "what the driver has written there is not visible: it is another directory, or not mounted here"
        storage.write(name, [b"written"])
        storage.delete(name)
    except (MidstreamError, OSError) as error:
        return str(error)
    return ""
