"""The workload `latency` between two processes with a bare socket: the floor."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import numpy as np
from definitions import LATENCY_KEYS, LATENCY_RATE_PER_S, LATENCY_WARM_UP_SHARE, percentiles_ms

TICK_S = 0.001
ROW = np.dtype([("i", np.int64), ("key", np.int64), ("created_ns", np.int64)])
CONNECT_S_MAX = 60.0


def source(begin: Callable[[], None], port: int, rows: int) -> int:
    """Every tick the rows that are due, stamped when they are made."""
    deadline_s = time.monotonic() + CONNECT_S_MAX
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin()
    began_s, made = time.monotonic(), 0
    while made < rows:
        due = min(rows, int((time.monotonic() - began_s) * LATENCY_RATE_PER_S))
        if due > made:
            batch = np.empty(due - made, ROW)
            batch["i"] = np.arange(made, due)
            batch["key"] = batch["i"] % LATENCY_KEYS
            batch["created_ns"] = time.time_ns()
            connection.sendall(batch)
            made = due
        time.sleep(TICK_S)
    connection.close()
    return made


def sink(begin: Callable[[], None], port: int, rows: int) -> tuple[int, int, dict[str, float]]:
    """How many rows arrived, the sum of their numbers, and the percentiles behind the warm-up."""
    listener = socket.create_server(("127.0.0.1", port))
    connection, _ = listener.accept()
    begin()
    latencies_ms = np.zeros(rows)
    arrived, number_sum = 0, 0
    buffer, filled = bytearray(1 << 20), 0
    while got := connection.recv_into(memoryview(buffer)[filled:]):
        filled += got
        whole = filled // ROW.itemsize
        batch = np.frombuffer(buffer, ROW, whole).copy()
        latencies_ms[batch["i"]] = (time.time_ns() - batch["created_ns"]) / 1e6
        arrived += whole
        number_sum += int(batch["i"].sum())
        rest = buffer[whole * ROW.itemsize : filled]
        buffer[: len(rest)] = rest
        filled = len(rest)
    connection.close()
    listener.close()
    return arrived, number_sum, percentiles_ms(latencies_ms[int(rows * LATENCY_WARM_UP_SHARE) :])
