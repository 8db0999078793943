"""Measures what a lost slot and a rescale cost a job with much state: how long its sink gets no row, and what the first
checkpoint afterwards stores again.

source → key_by → a batch function that replaces the row of each key in a table → sink. Once the table is full, only a few
keys change.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.api.restart_strategies import fixed_restarts
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import InvariantError, JobError
from midstream.engine.operators.functions.batch_functions import BatchContext, KeyedBatchFunction
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.state.table_state import TableState
from midstream.runtime.driver.job import Job
from midstream_lab.bench.checkpoint import await_running, take
from midstream_lab.bench.measuring import Slots, start_on

PARALLELISM: Final = 4
STATE_MIB: Final = 256
COLUMNS: Final = tuple(f"c{number}" for number in range(15))
ROW_BYTES: Final = 8 * (1 + len(COLUMNS))
CHANGING_KEYS: Final = 50_000
ROWS_PER_S: Final = 100_000
FULL_RATE: Final = 0.9
WINDOW_S: Final = 0.5
"""The job is at its full rate once this many seconds have `FULL_RATE` of its rows."""
CHECKPOINTS_BEFORE: Final = 4
"""So many are without the cost of what was before."""
SECONDS_AFTER: Final = 10.0
FILL_S_MAX: Final = 900.0
POLL_S: Final = 0.2


class StateFigures(msgspec.Struct, frozen=True, kw_only=True):
    running_s: float
    """All tasks run again: since the slot was killed, or the rescale was requested."""
    without_rows_s: float
    """The longest time for which the sink got no row."""
    full_rate_s: float
    first_checkpoint_mib: float
    """What the first checkpoint afterwards stored."""


class LargeStateResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "large_state"
    slots: str
    state_mib: int
    parallelism: int = PARALLELISM
    rows_per_s: int = ROWS_PER_S
    lost: StateFigures
    """The first slot is killed."""
    fewer: StateFigures
    """The job is rescaled to one slot less."""
    more: StateFigures
    """And back; includes the start of a process, during which the job goes on."""


class Latest(KeyedBatchFunction):
    rows = TableState({"key": int, **dict.fromkeys(COLUMNS, int)})

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        self.rows.upsert(rows.unique("key", keep="last"))
        return rows.select("key")


class Rows:
    """A row for each of `keys` keys, then rows for `CHANGING_KEYS` of them without end; hardly compressible."""

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        key = np.where(i < self._keys, i, i % CHANGING_KEYS)
        columns = [(i * np.int64(0x9E3779B97F4A7C1 + 2 * number)) ^ (i >> 3) for number in range(len(COLUMNS))]
        return pa.RecordBatch.from_arrays([pa.array(each) for each in (key, *columns)], names=["key", *COLUMNS])


class TimingSink(Sink):
    """Each writer notes when it gets how many rows, in a file of its own."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def writer(self, context: WriterContext) -> SinkWriter:
        return _TimingWriter(f"{self._directory}/{context.attempt}-{context.subtask}")


class _TimingWriter(SinkWriter):
    def __init__(self, path: str) -> None:
        self._file = open(path, "w", buffering=1, encoding="ascii")  # noqa: SIM115 - closed with the process

    def write(self, batch: pa.RecordBatch) -> None:
        self._file.write(f"{time.time()} {batch.num_rows}\n")


def run(slots: Slots, *, state: int = STATE_MIB) -> LargeStateResult:
    """Run the benchmark with `state` in MiB. Raises JobError if the job does not fill its table in time."""
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        return _run(Path(directory), state, slots)


def _run(directory: Path, mib: int, slots: Slots) -> LargeStateResult:
    keys = mib * 2**20 // ROW_BYTES
    received = directory / "received"
    received.mkdir()
    env = Environment(
        "bench-large-state",
        parallelism=PARALLELISM,
        checkpoint_dir=directory / "checkpoints",
        checkpoint_interval="2 s",
        restart=fixed_restarts(3, "1 ms"),
    )
    source = env.source(GeneratorSource(Rows(keys), None, rows_per_s=ROWS_PER_S)).uid("source")
    latest = source.key_by("key").process_batches(Latest(), {"key": int}).uid("latest")
    latest.sink(TimingSink(str(received))).uid("sink")
    job = start_on(slots, env, PARALLELISM)
    try:
        await_running(job)
        _await_rows(received, keys + ROWS_PER_S)
        job.checkpoint()
        return LargeStateResult(
            slots=slots,
            state_mib=mib,
            lost=_measured(job, received, lambda: _lose_a_slot(job)),
            fewer=_measured(job, received, lambda: job.rescale(PARALLELISM - 1)),
            more=_measured(job, received, lambda: job.rescale(PARALLELISM)),
        )
    finally:
        job.cancel("measured")


def _measured(job: Job, received: Path, change: Callable[[], object]) -> StateFigures:
    take(job, CHECKPOINTS_BEFORE)
    began_s = time.time()
    change()
    running_s = time.time() - began_s
    job.checkpoint()
    first = job.status().last_checkpoint
    assert first is not None
    _await_rows(received, sum(rows for _, rows in _rows(received)) + int(SECONDS_AFTER * ROWS_PER_S))
    found = [(at_s, rows) for at_s, rows in _rows(received) if at_s > began_s - 1]
    at = np.array([at_s for at_s, _ in found])
    counts = np.cumsum([0, *(rows for _, rows in found)])
    last = int(np.diff(at).argmax()) + 1
    ends = at.searchsorted(at + WINDOW_S)
    full = np.flatnonzero(counts[ends] - counts[:-1] >= FULL_RATE * WINDOW_S * ROWS_PER_S)
    full = full[full >= last]
    if not len(full):
        raise InvariantError(
            f"{SECONDS_AFTER:g} s of rows later the job does not have its full rate of {ROWS_PER_S:,} rows/s"
        )
    return StateFigures(
        running_s=round(running_s, 2),
        without_rows_s=round(float(at[last] - at[last - 1]), 2),
        full_rate_s=round(float(at[full[0]]) - began_s, 2),
        first_checkpoint_mib=round(first.state_bytes / 2**20, 1),
    )


def _lose_a_slot(job: Job) -> None:
    restarts = job.status().restarts
    os.kill(job.status().slot_pids[0], signal.SIGKILL)
    deadline_s = time.monotonic() + FILL_S_MAX
    while job.status().restarts == restarts:
        if time.monotonic() > deadline_s:
            raise JobError(f"the job has not restarted {FILL_S_MAX:g} s after one of its slots was killed")
        time.sleep(POLL_S)
    await_running(job)


def _await_rows(received: Path, rows: int) -> None:
    deadline_s = time.monotonic() + FILL_S_MAX
    while sum(count for _, count in _rows(received)) < rows:
        if time.monotonic() > deadline_s:
            raise JobError(f"the sink does not have {rows:,} rows after {FILL_S_MAX:g} s; try less state")
        time.sleep(POLL_S)


def _rows(received: Path) -> list[tuple[float, int]]:
    """Return when rows were received, and how many."""
    lines = (line.split() for file in received.iterdir() for line in file.read_text("ascii").splitlines())
    return sorted((float(at_s), int(rows)) for at_s, rows in (line for line in lines if len(line) == 2))
