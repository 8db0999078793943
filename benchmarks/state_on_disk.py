"""What it costs that state lies on the local disk. Run: python benchmarks/state_on_disk.py [--rows 20000000]

`drop_duplicates` of distinct keys in one slot process, or, with `--table`, a table of keys and texts of 40 bytes to which
each batch is upserted, and in which it looks up as many earlier keys. For each limit: rows/s, rows per second of the slot's processor time, the peak of the slot's anonymous memory (RssAnon, what the kernel cannot drop), and the state on disk at
the end. No checkpoints.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import polars as pl
import psutil

from midstream import Environment, KeyedBatchFunction, TableState, no_restart
from midstream.runtime.process.process_slots import ProcessSlots

POLL_S = 0.05
FACTOR = np.int64(0x1E3779B97F4A7C15)
"""Makes keys that are in no order."""


class Latest(KeyedBatchFunction):
    texts = TableState({"k": int, "text": str})

    def process(self, rows, ctx):
        found = self.texts.lookup(rows.select(k=pl.col("earlier")))
        self.texts.upsert(rows.select("k", "text"))
        return pl.DataFrame({"k": [found.height]})


def rows(i):
    return {"k": i * FACTOR, "n": i}


def table_rows(i):
    text = pl.Series("text", i).cast(pl.String).str.zfill(40)
    return pl.DataFrame({"k": i * FACTOR, "earlier": i // 2 * FACTOR}).with_columns(text)


def anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def processor_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def measure(count: int, state_memory: str, has_table: bool) -> dict[str, object]:
    env = Environment("state on disk", state_memory=state_memory, restart=no_restart())
    if has_table:
        keyed = env.generate(table_rows, count=count, splits=1).key_by("k")
        result = keyed.process_batches(Latest(), {"k": int})
    else:
        result = env.generate(rows, count=count, splits=1).drop_duplicates("k").select("n")
    result.filter(pl.col(result.schema.names[0]) < 0).print()
    began = time.perf_counter()
    job = env.start(slots=ProcessSlots())
    peak, in_memory, on_disk, busy_s = 0, 0, 0, 0.0
    while not (status := job.status()).has_ended:
        peak = max([peak, *map(anonymous_bytes, status.slot_pids)])
        busy_s = max([busy_s, *map(processor_s, status.slot_pids)])
        in_memory = max([in_memory, *status.slot_state_memory_bytes])
        on_disk = max([on_disk, *status.slot_state_disk_bytes])
        time.sleep(POLL_S)  # between two samples of the memory
    job.wait()
    return {
        "state_memory": state_memory,
        "rows_per_s": round(count / (time.perf_counter() - began)),
        "rows_per_processor_s": round(count / busy_s),
        "peak_anonymous_mib": peak >> 20,
        "state_in_memory_max_mib": in_memory >> 20,
        "state_on_disk_max_mib": on_disk >> 20,
        "warnings": len(job.status().warnings),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=20_000_000)
    arguments.add_argument("--table", action="store_true")
    arguments.add_argument("--limits", nargs="+", default=["unlimited", "256 MiB"])
    given = arguments.parse_args()
    for limit in given.limits:
        print(json.dumps(measure(given.rows, limit, given.table)))


if __name__ == "__main__":
    main()
