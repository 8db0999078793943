"""What checkpoints of a process function's state take. Run: python benchmarks/function_state.py [--keys 1000000]

A running total per key and a timer that clears it, as users write them: a checkpoint each `--rows` rows of random keys,
all of which complete. Of one operator, without a job around it. Times are processor time of one thread: `rows_per_s` of
the function, `pause_ms` what a snapshot takes on the loop, `write_ms` what it takes on the I/O pool; `state_mb` the memory
of all keys once each has had a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pyarrow as pa
from aggregate import opened

from midstream.engine.operators.base import SnapshotResult
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.state.keyed_states import ValueState

SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("key", pa.int64()), ("value", pa.int64())])
BATCH_ROWS = 10_000


class Total(KeyedProcessFunction):
    total: ValueState[int] = ValueState(pa.int64(), default=0)
    until: ValueState[datetime | None] = ValueState(pa.timestamp("us"))

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        if self.until.value is None:
            self.until.value = at = row["ts"] + timedelta(hours=1)
            ctx.timers.event_time(at)
        self.total.value += row["value"]

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"ts": time, "key": ctx.key, "value": self.total.value}
        self.total.clear()
        self.until.clear()


def measure(keys: int, rows: int, checkpoints: int, entry_bytes: int | None) -> dict[str, float]:
    operator = ProcessOperator("total", Total(), [Port("process", ("key",), "ts", SCHEMA)], SCHEMA, {})
    stored: dict[str, int] = {}
    opened(operator, "total", stored_bytes=stored.get, entry_bytes=entry_bytes)
    before_mb = _resident_mb()
    random = np.random.default_rng(7)
    filling = range(0, keys, BATCH_ROWS)
    for first in filling:
        _process(operator, np.arange(first, min(first + BATCH_ROWS, keys)))
    held_mb = _resident_mb() - before_mb
    pauses, writes, written, busy = [], [], [], 0.0
    for checkpoint_id in range(1, checkpoints + 2):
        began = thread_time()
        for _ in range(0, rows, BATCH_ROWS):
            _process(operator, random.integers(0, keys, min(rows, BATCH_ROWS)))
        busy += thread_time() - began
        began = thread_time()
        later = operator.snapshot(checkpoint_id).later
        pauses.append(thread_time() - began)
        assert later is not None
        began = thread_time()
        result: SnapshotResult = later()
        writes.append(thread_time() - began)
        chunks = [chunk for part in result.parts.values() for chunk in part.chunks]
        new = {chunk.id: chunk.table.nbytes for chunk in chunks if chunk.id not in stored}
        written.append(sum(new.values()))
        kept = {chunk.id: stored[chunk.id] for chunk in chunks if chunk.id in stored}
        stored.clear()
        stored.update(kept | new)
    del pauses[0], writes[0], written[0]  # the first one stores everything
    return {
        "keys": keys,
        "rows_per_checkpoint": rows,
        "state_mb": round(held_mb, 1),
        "rows_per_s": round((checkpoints + 1) * rows / busy),
        "pause_ms_median": round(float(np.median(pauses)) * 1000, 1),
        "pause_ms_max": round(max(pauses) * 1000, 1),
        "write_ms_mean": round(float(np.mean(writes)) * 1000, 1),
        "write_ms_max": round(max(writes) * 1000, 1),
        "written_mib_mean": round(float(np.mean(written)) / 2**20, 2),
        "written_mib_max": round(max(written) / 2**20, 2),
        "chunks_at_the_end": len(stored),
    }


def _resident_mb() -> float:
    """The memory that is not backed by files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def _process(operator: Any, keys: np.ndarray[Any, Any]) -> None:
    columns: list[pa.Array[Any]] = [
        pa.array(np.zeros(len(keys), "M8[us]")),
        pa.array(keys, pa.int64()),
        pa.array(np.ones(len(keys), np.int64)),
    ]
    operator.process(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keys", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rows", type=int, default=20_000, help="between two checkpoints")
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--entry-bytes", type=int, help="above which entries and timers are rows")
    arguments = parser.parse_args()
    for keys in arguments.keys:
        print(json.dumps(measure(keys, arguments.rows, arguments.checkpoints, arguments.entry_bytes)), flush=True)


if __name__ == "__main__":
    main()
