"""Microseconds per batch of few rows in each operator alone, and how often its thread waits for another one.

    python benchmarks/small_batches.py [--rows 64] [OPERATOR ...]

A live job has small batches, in which the rows cost little and the calls much. Where polars hands work to a thread of its
own, the slot's thread waits for that: on a busy machine for far longer than the work takes. To compare with another
commit, run it there too, in turns: machines change their speed.
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from aggregate import opened

from midstream.engine.operators.base import Operator
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.asof_join import asof_join_operator
from midstream.engine.operators.functions.duplicates import drop_duplicates_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import interval_join_operator
from midstream.engine.operators.functions.running_aggregate import running_aggregate_operator
from midstream.engine.operators.row_functions import MapOperator
from midstream.engine.operators.stateless import FilterOperator, ProjectOperator
from midstream.engine.operators.windows.aggregates import AnyAggregate, Count, Last, Max, Mean, Sum
from midstream.engine.operators.windows.window_factory import Window, session, sliding, tumbling, window_operator
from midstream.engine.state.job_code import own_code

KEYS = 10_000
BATCHES = 600
ROWS_PER_S = 5_000
"""Of event time, in which a watermark follows each batch."""
COLUMNS: dict[str, pa.DataType] = {
    "at": pa.timestamp("us"),
    "user": pa.large_string(),
    "n": pa.int64(),
    "value": pa.float64(),
    "text": pa.large_string(),
}
SCHEMA = pa.schema(COLUMNS)
_AT = TimeColumn("at")


def batches(rows: int) -> list[pa.RecordBatch]:
    made = []
    for first in range(0, 2 * BATCHES * rows, rows):
        i = np.arange(first, first + rows)
        key = i * 2654435761 % KEYS
        columns = {
            "at": pa.array((i * 1_000_000 // ROWS_PER_S).astype("M8[us]")),
            "user": pa.array([f"{k:08d}" for k in key], pa.large_string()),
            "n": pa.array(i),
            "value": pa.array((i % 1000) * 0.5),
            "text": pa.array([f"{k:010d} {k:016d} " for k in i], pa.large_string()),
        }
        made.append(pa.RecordBatch.from_pydict(columns, SCHEMA))
    return made


def _running(**aggregates: AnyAggregate) -> Operator:
    return running_aggregate_operator("op", keys=["user"], event_time=None, aggregates=aggregates, schema=SCHEMA)


def _windows(window: Window, **aggregates: AnyAggregate) -> Operator:
    return window_operator("op", window=window, keys=["user"], event_time="at", aggregates=aggregates, schema=SCHEMA)


def _increased(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": row["n"] + 1}


def _port(method: str = "process") -> Port:
    return Port(method, ("user",), _AT, SCHEMA)


def _sides() -> list[Port]:
    return [_port("process1"), _port("process2")]


OPERATORS: Mapping[str, Callable[[], Operator]] = {
    "filter": lambda: FilterOperator("op", pl.col("n") >= 0, SCHEMA),
    "select": lambda: ProjectOperator("op", [pl.col("text").str.to_uppercase(), pl.col("n") + 1], SCHEMA, keep=False),
    "map": lambda: MapOperator("op", _increased, SCHEMA),
    "count": lambda: _running(count=Count()),
    "count, last": lambda: _running(count=Count(), last=Last("text")),
    "sum, max, mean": lambda: _running(sum=Sum("value"), max=Max("n"), mean=Mean("value")),
    "drop_duplicates": lambda: drop_duplicates_operator("op", _port(), None),
    "drop_duplicates within": lambda: drop_duplicates_operator("op", _port(), 1_000_000),
    "tumbling 1 s": lambda: _windows(tumbling("1 s"), count=Count(), total=Sum("value")),
    "sliding 10 s by 1 s": lambda: _windows(sliding("10 s", "1 s"), count=Count(), total=Sum("value")),
    "session 100 ms": lambda: _windows(session("100 ms"), count=Count(), total=Sum("value")),
    "interval_join 1 s": lambda: interval_join_operator("op", _sides(), -1_000_000, 1_000_000),
    "asof_join": lambda: asof_join_operator("op", _sides()),
}


def measure(name: str, rows: int) -> str:
    operator = OPERATORS[name]()
    operator.own = own_code(operator)
    opened(operator, name)
    two = name.endswith("join") or "join " in name
    worked_s = cpu_s = switches = 0.0
    for number, batch in enumerate(batches(rows)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        operator.process(batch, number % 2 if two else 0)
        while not operator.advance_watermark(batch.column("at")[-1].value - 100_000):
            pass
        if number >= BATCHES:
            worked_s += time.perf_counter() - began_s
            cpu_s += time.process_time() - began_cpu_s
            switches += resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    figures = f"{1e6 * worked_s / BATCHES:,.0f} | {1e6 * cpu_s / BATCHES:,.0f} | {switches / BATCHES:.1f}"
    return f"| {name} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("operators", nargs="*", default=list(OPERATORS))
    chosen = parser.parse_args()
    print(f"| batches of {chosen.rows} rows | µs | of a core | waits |\n|---|---|---|---|")
    for name in chosen.operators:
        print(measure(name, chosen.rows), flush=True)


if __name__ == "__main__":
    main()
