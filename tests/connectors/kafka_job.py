"""Kafka in, state by key, Kafka out exactly once. Run as a program it takes commands: "rescale N" and "stop"."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl

from midstream import Environment, KeyedProcessFunction, ProcessContext, ValueState
from midstream.engine.core.errors import MidstreamError
from midstream.runtime.process.process_slots import ProcessSlots

WHO = 7


class Counted(KeyedProcessFunction):
    """How many rows of its key there were up to this one."""

    rows = ValueState(default=0)

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> dict[str, Any]:
        self.rows.value += 1
        return {"who": row["who"], "n": row["n"], "rows": self.rows.value}


def counting(
    servers: str,
    source: str,
    sink: str,
    checkpoints: Path,
    *,
    parallelism: int,
    rows_per_s: float | None = None,
    stop: Literal["latest"] | None = "latest",
) -> Environment:
    env = Environment("counting", parallelism=parallelism, checkpoint_dir=checkpoints, checkpoint_interval="300 ms")
    schema = {"n": int, "who": int}
    stream = env.read_kafka(servers, source, schema=schema, stop=stop, rows_per_s=rows_per_s).uid("in")
    counted = stream.key_by("who").process(Counted(), schema={"who": int, "n": int, "rows": int}).uid("counted")
    named = counted.with_columns(key=pl.col("who").cast(pl.String))
    named.write_kafka(servers, sink, key="key").uid("out").name("out")
    return env


def assert_counted_once(messages: Sequence[Any], records: int) -> None:
    """The sink has each of 0 to `records` once, and in the order in which the rows of its key were counted."""
    numbers: set[int] = set()
    counts = dict.fromkeys(range(WHO), 0)
    for message in messages:
        row = json.loads(message.value())
        counts[row["who"]] += 1
        assert row["rows"] == counts[row["who"]], f"of key {row['who']}: {row} after {counts[row['who']] - 1} rows"
        numbers.add(row["n"])
    assert len(messages) == records and numbers == set(range(records)), (len(messages), records)


def main(
    servers: str, source: str, sink: str, checkpoints: str, parallelism: str, rows_per_s: str, restore: str
) -> None:
    env = counting(servers, source, sink, Path(checkpoints), parallelism=int(parallelism), rows_per_s=float(rows_per_s))
    job = env.start(slots=ProcessSlots(), restore_from=restore or None)
    while job.status().state == "created":
        time.sleep(0.05)
    print("started", flush=True)

    def obey() -> None:
        for line in sys.stdin:
            command, *arguments = line.split()
            try:
                if command == "rescale":
                    job.rescale(int(arguments[0]))
                else:
                    job.stop(timeout_s=120)
            except MidstreamError as error:
                print(f"{command}: {error}", flush=True)  # it has just ended, or begins anew after a failure

    threading.Thread(target=obey, daemon=True).start()
    print(job.wait(600).state, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
