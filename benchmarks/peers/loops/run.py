"""One run of one workload in a bare loop, two processes; the last line on stdout is the result as JSON.

usage: .venv/bin/python benchmarks/peers/loops/run.py WORKLOAD [--variant V] [--events N] [--max-seconds S]

Seconds count from both processes being ready (imported, connected) to the end of the later one.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
os.environ["POLARS_MAX_THREADS"] = "1"  # one core per process; read when polars is imported

import latency
import plain
import window
from definitions import (
    LATENCY_RATE_PER_S,
    LATENCY_S,
    arguments,
    expected,
    halves,
    print_result,
    require,
    require_rate,
    sum_of_values,
)
from processes import run_together

EVENTS = {"udf": 4_000_000, "keyed_process": 4_000_000, "window": 20_000_000, "latency": LATENCY_RATE_PER_S * LATENCY_S}
VARIANTS = {
    "udf": tuple(plain.VARIANTS),
    "keyed_process": ("numpy",),
    "window": ("exchange", "polars"),
    "latency": ("socket",),
}
PROCESSES = 2


def main() -> None:
    args = arguments(__doc__, [*EVENTS])
    if args.parallelism != PROCESSES:
        sys.exit(f"error: these loops run in {PROCESSES} processes, not {args.parallelism}")
    events = args.events or EVENTS[args.workload]
    variant = args.variant or VARIANTS[args.workload][0]
    if variant not in VARIANTS[args.workload]:
        sys.exit(f"error: {args.workload} has the variants {', '.join(VARIANTS[args.workload])}, not {variant}")
    if args.workload == "latency":
        _latency(events)
        return
    parts = [(first, end - first) for first, end in halves(events)]
    if args.workload == "udf":
        done = run_together(plain.label_and_count, [(variant, *own, args.max_seconds) for own in parts])
    elif args.workload == "keyed_process":
        done = run_together(plain.total_and_timers, [(*own, args.max_seconds) for own in parts])
    elif variant == "polars":
        done = run_together(window.without_exchange, [(*own, args.max_seconds) for own in parts])
    else:
        ports = _free_ports()
        done = run_together(
            window.with_exchange, [(*own, args.max_seconds, subtask, ports) for subtask, own in enumerate(parts)]
        )
    read, n, total, rows = (sum(column) for column in zip(*done.results, strict=True))
    ranges = [(first, first + result[0]) for (first, _), result in zip(parts, done.results, strict=True)]
    if args.workload == "keyed_process":
        require({"total": sum_of_values(ranges)}, {"total": total})
    else:
        wanted = expected(args.workload, ranges)
        if variant != "exchange":  # each process has windows of its own
            wanted["rows"] = sum(expected(args.workload, [own])["rows"] for own in ranges)
        require(wanted, {"rows": rows, "n": n, "total": total}, relative=1e-6 if args.workload == "udf" else 0.0)
    print_result(
        engine="loop",
        version=f"python {platform.python_version()}",
        workload=args.workload,
        variant=variant,
        events=read,
        parallelism=PROCESSES,
        seconds=done.seconds,
        memory_mb=done.memory_mb,
        result_rows=rows,
        **({"bounded": True} if read < events else {}),
    )


def _latency(rows: int) -> None:
    port = _free_ports()[0]
    done = run_together(_either, [("sink", port, rows), ("source", port, rows)])
    arrived, number_sum, percentiles = done.results[0]
    require({"n": rows, "numbers": rows * (rows - 1) // 2}, {"n": arrived, "numbers": number_sum})
    require_rate(rows, done.seconds)
    print_result(
        engine="loop",
        version=f"python {platform.python_version()}",
        workload="latency",
        variant="socket",
        events=rows,
        parallelism=PROCESSES,
        seconds=done.seconds,
        **percentiles,
        memory_mb=done.memory_mb,
    )


def _either(begin, role, port, rows):  # type: ignore[no-untyped-def]
    return (latency.sink if role == "sink" else latency.source)(begin, port, rows)


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


if __name__ == "__main__":
    main()
