"""The workload `window` in a bare loop around polars, with and without an exchange: the limits of this machine.

No checkpoints, no failure handling, one process per core. Rows travel as the bytes of their columns.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
from definitions import EVENTS_PER_MS, KEYS, MULTIPLIER, WINDOW_MS

BATCH = 100_000
QUEUED_MAX = 8
HEADER = struct.Struct("<qq")
"""Number of rows, and the watermark behind them in ms."""
END_MS = 2**62
CONNECT_S_MAX = 60.0
SEND_S = 0.001

Column: TypeAlias = npt.NDArray[Any]
Columns: TypeAlias = tuple[Column, Column, Column]


def batches(first: int, count: int) -> Iterator[Columns]:
    """ts, key, value."""
    for begin in range(0, count, BATCH):
        offset = np.arange(begin, min(count, begin + BATCH), dtype=np.int64)
        i = first + offset
        yield offset // EVENTS_PER_MS, ((i * MULTIPLIER) & 0xFFFFFFFF) % KEYS, (i % 1000) * 0.5


class Windows:
    """Counts and sums per window and key, batch by batch; a window's results are added up when it fires."""

    def __init__(self) -> None:
        self._partial: dict[int, list[pl.DataFrame]] = {}
        self.counted = 0
        self.value_sum = 0.0
        self.rows = 0

    def add(self, columns: Columns) -> None:
        ts, key, value = columns
        frame = pl.DataFrame({"window": ts // WINDOW_MS, "key": key, "value": value})
        partial = frame.group_by("window", "key").agg(n=pl.len(), total=pl.col("value").sum())
        for (window,), part in partial.partition_by("window", as_dict=True).items():
            self._partial.setdefault(int(window), []).append(part)

    def fire(self, watermark_ms: int) -> None:
        for window in [window for window in self._partial if (window + 1) * WINDOW_MS <= watermark_ms]:
            parts = pl.concat(self._partial.pop(window))
            result = parts.group_by("key").agg(pl.col("n").sum(), pl.col("total").sum())
            self.counted += int(result["n"].sum())
            self.value_sum += float(result["total"].sum())
            self.rows += result.height


def without_exchange(
    begin: Callable[[], None], first: int, count: int, max_seconds: float | None
) -> tuple[int, int, float, int]:
    """How many events were read, then counts, sums and rows of the results. After `max_seconds` the input ends."""
    windows, read = Windows(), 0
    begin()
    deadline_s = time.monotonic() + (max_seconds or float("inf"))
    for columns in batches(first, count):
        windows.add(columns)
        windows.fire(int(columns[0][-1]))
        read += len(columns[0])
        if time.monotonic() > deadline_s:
            break
    windows.fire(END_MS)
    return read, windows.counted, windows.value_sum, windows.rows


def with_exchange(
    begin: Callable[[], None], first: int, count: int, max_seconds: float | None, subtask: int, ports: tuple[int, int]
) -> tuple[int, int, float, int]:
    """As `without_exchange`; of two processes each owns half of the keys, and sends the other's rows over TCP."""
    listener = socket.create_server(("127.0.0.1", ports[subtask]))
    outgoing = _connect(ports[1 - subtask])
    incoming, _ = listener.accept()
    listener.close()
    received: queue.Queue[tuple[Columns, int]] = queue.Queue(QUEUED_MAX)
    to_send: queue.Queue[tuple[Columns, int]] = queue.Queue(QUEUED_MAX)
    threads = [
        threading.Thread(target=_receive, args=(incoming, received), daemon=True),
        threading.Thread(target=_send, args=(outgoing, to_send), daemon=True),
    ]
    windows, read = Windows(), 0
    watermarks = [0, 0]  # own, the other's

    def take(entry: tuple[Columns, int], input_number: int) -> None:
        columns, watermarks[input_number] = entry
        if len(columns[0]):
            windows.add(columns)
        windows.fire(min(watermarks))

    def drain() -> None:
        while not received.empty():
            take(received.get(), 1)

    def send(entry: tuple[Columns, int]) -> None:
        while True:  # never wait without reading: the other process might wait for this one
            try:
                return to_send.put(entry, timeout=SEND_S)
            except queue.Full:
                drain()

    begin()
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + (max_seconds or float("inf"))
    for ts, key, value in batches(first, count):
        owner = ((key.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(63)).astype(bool)
        mine, theirs = np.flatnonzero(owner == bool(subtask)), np.flatnonzero(owner != bool(subtask))
        watermark_ms = int(ts[-1])
        send(((ts[theirs], key[theirs], value[theirs]), watermark_ms))
        take(((ts[mine], key[mine], value[mine]), watermark_ms), 0)
        drain()
        read += len(ts)
        if time.monotonic() > deadline_s:
            break
    nothing: Columns = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    send((nothing, END_MS))
    take((nothing, END_MS), 0)
    while watermarks[1] < END_MS:
        take(received.get(), 1)
    for thread in threads:
        thread.join()
    outgoing.close()
    incoming.close()
    return read, windows.counted, windows.value_sum, windows.rows


def _connect(port: int) -> socket.socket:
    deadline_s = time.monotonic() + CONNECT_S_MAX
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def _send(connection: socket.socket, entries: queue.Queue[tuple[Columns, int]]) -> None:
    watermark_ms = 0
    while watermark_ms < END_MS:
        columns, watermark_ms = entries.get()
        connection.sendmsg([HEADER.pack(len(columns[0]), watermark_ms)])
        for column in columns:
            connection.sendall(column)


def _receive(connection: socket.socket, entries: queue.Queue[tuple[Columns, int]]) -> None:
    header = bytearray(HEADER.size)
    watermark_ms = 0
    while watermark_ms < END_MS:
        _fill(connection, memoryview(header))
        rows, watermark_ms = HEADER.unpack(header)
        columns = (np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows))
        for column in columns:
            if rows:
                _fill(connection, memoryview(column).cast("B"))
        entries.put((columns, watermark_ms))


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other process closed its connection in the middle of a batch")
        view = view[got:]
