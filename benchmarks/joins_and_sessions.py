"""What a batch, a watermark and a checkpoint cost an interval join and sessions, by how much they hold.

Run: python benchmarks/joins_and_sessions.py [join|behind|sessions] [--held N ...] [--batch-rows N]

Of one operator, without a job around it, in steady state: as many rows come as go. `join`: the second stream is kept
for an hour, all of which every row of the first asks for (a fifth of its keys are there). `behind`: the second stream
is ahead of the first by all that is held; each asks for a second. `sessions`: each row comes to one of as many keys as
sessions are held. Processor time of a batch, of a watermark and of a checkpoint, and what a checkpoint writes, one for
each 10 watermarks.
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from aggregate import opened

from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import interval_join_operator
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import session, window_operator

HOUR_US = 3_600_000_000
FIRST = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("a", pa.int64())])
SECOND = pa.schema([("k", pa.int64()), ("u", pa.timestamp("us")), ("b", pa.int64())])
ROUNDS = 60
CHECKPOINT_EACH = 10
FILL_ROWS = 50_000

Step = tuple[pa.RecordBatch, int]
Round = tuple[list[Step], int]
"""Batches, each with its port, and the watermark behind them."""


def rows(
    schema: pa.Schema, keys: int, start_us: float, end_us: float, count: int, random: np.random.Generator
) -> pa.RecordBatch:
    times = np.linspace(start_us, end_us, count, endpoint=False).astype(np.int64).view("M8[us]")
    columns = [random.integers(0, keys, count), times, random.integers(0, 1000, count)]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=schema)


def join(lower_us: int, upper_us: int) -> Operator:
    ports = [Port("process1", ("k",), "t", FIRST), Port("process2", ("k",), "u", SECOND)]
    return interval_join_operator("join", ports, lower_us, upper_us)


def joined(held: int, batch_rows: int) -> tuple[Operator, Callable[[int], Iterator[Round]]]:
    random = np.random.default_rng(held)
    rate = held / HOUR_US

    def rounds(count: int) -> Iterator[Round]:
        at = 0.0
        for number in range(-(-held // FILL_ROWS) + count):
            size = min(FILL_ROWS, held) if number < -(-held // FILL_ROWS) else batch_rows
            end = at + size / rate
            second = rows(SECOND, 5 * held, at, end, size, random)
            first = rows(FIRST, 5 * held, at, end, size, random) if size == batch_rows else second.slice(0, 0)
            steps = [(second, 1)] if not first.num_rows else [(second, 1), (first, 0)]
            yield steps, int(end)
            at = end

    return join(-HOUR_US, 0), rounds


def behind(held: int, batch_rows: int) -> tuple[Operator, Callable[[int], Iterator[Round]]]:
    random = np.random.default_rng(held)
    rate = held / HOUR_US

    def rounds(count: int) -> Iterator[Round]:
        for start in range(0, held, FILL_ROWS):
            size = min(FILL_ROWS, held - start)
            yield [(rows(SECOND, held, start / rate, (start + size) / rate, size, random), 1)], 0
        for number in range(count):
            at, end = number * batch_rows / rate, (number + 1) * batch_rows / rate
            second = rows(SECOND, held, at + HOUR_US, end + HOUR_US, batch_rows, random)
            yield [(second, 1), (rows(FIRST, held, at, end, batch_rows, random), 0)], int(end)

    return join(-1_000_000, 0), rounds


def sessions(held: int, batch_rows: int) -> tuple[Operator, Callable[[int], Iterator[Round]]]:
    random = np.random.default_rng(held)
    operator = window_operator(
        "sessions",
        window=session("1 h"),
        keys=["k"],
        event_time="t",
        aggregates={"total": Sum("a"), "n": Count()},
        schema=FIRST,
    )
    rate = held / HOUR_US

    def rounds(count: int) -> Iterator[Round]:
        at = 0.0
        for number in range(-(-held // FILL_ROWS) + count):
            size = min(FILL_ROWS, held) if number < -(-held // FILL_ROWS) else batch_rows
            end = at + size / rate
            yield [(rows(FIRST, held, at, end, size, random), 0)], int(end)
            at = end

    return operator, rounds


KINDS = {"join": joined, "behind": behind, "sessions": sessions}


def measure(kind: str, held: int, batch_rows: int) -> None:
    operator, rounds = KINDS[kind](held, batch_rows)
    out = opened(operator, kind)
    spent: dict[str, list[float]] = {"batch": [], "watermark": [], "snapshot": [], "checkpoint": []}
    stored: set[str] = set()
    written: list[int] = []
    full = 0

    def timed(what: str, call: Callable[[], object]) -> object:
        started_s = time.process_time()
        made = call()
        spent[what].append(time.process_time() - started_s)
        return made

    fill = sum(1 for _ in rounds(0))
    for number, (steps, watermark_us) in enumerate(rounds(ROUNDS)):
        if number == fill:
            for figures in spent.values():
                figures.clear()
        for batch, port in steps:
            timed("batch", lambda batch=batch, port=port: operator.process(batch, port))  # type: ignore[misc]
        timed("watermark", lambda mark=watermark_us: _fire(operator, mark))  # type: ignore[misc]
        if number >= fill - 1 and (number - fill + 1) % CHECKPOINT_EACH == 0:
            taken = timed("snapshot", lambda number=number: operator.snapshot(number))  # type: ignore[misc]
            result = timed("checkpoint", taken.complete)  # type: ignore[attr-defined]
            chunks = [chunk for part in result.parts.values() for chunk in part.chunks]  # type: ignore[attr-defined]
            chunks = [each for chunk in chunks for each in (chunk, *chunk.removed)]
            full = sum(chunk.stored.nbytes for chunk in chunks)
            written.append(sum(chunk.stored.nbytes for chunk in chunks if chunk.id not in stored))
            stored = {chunk.id for chunk in chunks}
    summary: dict[str, object] = {"kind": kind, "held": held, "batch_rows": batch_rows, "rows_out": out.rows}
    for what, values in spent.items():
        summary[f"{what}_ms_mean"] = round(1000 * float(np.mean(values)), 3)
        summary[f"{what}_ms_max"] = round(1000 * max(values), 2)
    summary["written_mib_mean"] = round(float(np.mean(written[1:])) / 2**20, 3)
    summary["full_mib"] = round(full / 2**20, 2)
    print(json.dumps(summary), flush=True)


def _fire(operator: Operator, watermark_us: int) -> None:
    while not operator.advance_watermark(watermark_us):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all if none is given")
    parser.add_argument("--held", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--batch-rows", type=int, nargs="+", default=[1_000, 10_000])
    arguments = parser.parse_args()
    for kind in arguments.kinds or KINDS:
        for batch_rows in arguments.batch_rows:
            for held in arguments.held:
                measure(kind, held, batch_rows)


if __name__ == "__main__":
    main()
