"""Measures how long a checkpoint takes before a slow sink: source → rebalance → map → rebalance → sink, 1 ms a row."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream import Tuning
from midstream.api.environment import Environment
from midstream.api.restart_strategies import no_restart
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import InvariantError, JobError
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.driver.job import Job
from midstream.runtime.storage.file_storage import FileStorage
from midstream_lab.bench.measuring import Slots, start_on

PARALLELISM: Final = 4
ROW_BYTES: Final = 1024
ROW_S: Final = 0.001
BUFFER_BYTES: Final = 4096
BATCH_ROWS: Final = 4
POOL_BYTES: Final = 2**20
WARM_UP: Final = 100
CHECKPOINTS: Final = 300
BACKLOG_CHECKPOINTS: Final = 30
MODE_S_MAX: Final = 45.0
"""How long a mode may take; aligned checkpoints wait for the sink, so fewer of them fit."""
FILLED: Final = 0.7
"""The share of the requested backlog that must be in flight before measuring."""
FILL_S_MAX: Final = 30.0
POLL_S: Final = 0.05
WRITES: Final = 9
SEGMENT_BYTES: Final = 2**19

SCHEMA = schema_of([("n", pa.int64()), ("text", pa.large_binary())])


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Times from the request for a checkpoint until it can be restored, one after the other without a pause."""

    checkpoints: int
    failed: int
    checkpoints_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    in_flight_mib: float
    """The MiB in flight in the last one."""


class BacklogFigures(ModeFigures, frozen=True, kw_only=True):
    """The cost of a backlog is the time for its bytes to become durable; the rest should not grow with it."""

    write_ms: float
    """The median time to write as many bytes, one file per slot at the same time, to the same storage."""
    rest_ms: float
    """The median checkpoint without that time."""


class CheckpointResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "checkpoint"
    parallelism: int = PARALLELISM
    slots: str
    row_bytes: int = ROW_BYTES
    sink_row_ms: float = ROW_S * 1000
    buffer_bytes: int = BUFFER_BYTES
    batch_rows: int = BATCH_ROWS
    warm_up: int
    aligned: ModeFigures
    unaligned: ModeFigures
    unaligned_1: ModeFigures
    """The figures with barriers that may overtake after 1 ms."""
    backlog_1_mib: BacklogFigures
    backlog_10_mib: BacklogFigures
    backlog_100_mib: BacklogFigures
    """Unaligned, with about this much in flight, in buffers of 4, 32 and 128 KiB."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbered rows of `ROW_BYTES` bytes."""

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        length = ROW_BYTES - 8
        offsets = pa.py_buffer((np.arange(len(i) + 1, dtype=np.int64) * length).data)
        text = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(i), [None, offsets, pa.py_buffer(bytes(len(i) * length))]
        )
        return pa.RecordBatch.from_arrays([pa.array(i), text], schema=SCHEMA)


class SlowSink(Sink):
    """A sink that takes time for every row, on the slot's loop, like a user's function."""

    def writer(self, context: WriterContext) -> SinkWriter:
        return _SlowWriter()


class _SlowWriter(SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        time.sleep(batch.num_rows * ROW_S)


def run(slots: Slots) -> CheckpointResult:
    """Run the benchmark. Raises InvariantError if a checkpoint fails, JobError if the backlog does not build up."""
    count, warm_up, few = CHECKPOINTS, WARM_UP, BACKLOG_CHECKPOINTS
    return CheckpointResult(
        slots=slots,
        warm_up=warm_up,
        aligned=_measured(slots, None, count, warm_up),
        unaligned=_measured(slots, 0, count, warm_up),
        unaligned_1=_measured(slots, 0.001, count, warm_up),
        backlog_1_mib=_with_backlog(slots, 1, few, buffer_bytes=4 * 1024, pool_bytes=2**20),
        backlog_10_mib=_with_backlog(slots, 10, few, buffer_bytes=32 * 1024, pool_bytes=128 * 2**20),
        backlog_100_mib=_with_backlog(slots, 100, few, buffer_bytes=128 * 1024, pool_bytes=256 * 2**20),
    )


def _with_backlog(slots: Slots, mib: int, count: int, *, buffer_bytes: int, pool_bytes: int) -> BacklogFigures:
    """Measure with a backlog; the credit windows of all channels, counted in buffers, limit what can be in flight."""
    found = _measured(
        slots,
        0,
        count,
        count // 3,
        backlog_bytes=mib * 2**20,
        buffer_bytes=buffer_bytes,
        batch_rows=buffer_bytes // ROW_BYTES,
        pool_bytes=pool_bytes,
    )
    write_ms = _write_ms(int(found.in_flight_mib * 2**20) // PARALLELISM)
    rest_ms = round(found.p50_ms - write_ms, 1)
    return BacklogFigures(**msgspec.structs.asdict(found), write_ms=write_ms, rest_ms=rest_ms)


def _write_ms(file_bytes: int) -> float:
    """Return how long it takes until one file of each slot is durable."""
    pieces = [bytes(SEGMENT_BYTES)] * (file_bytes // SEGMENT_BYTES) + [bytes(file_bytes % SEGMENT_BYTES)]
    took_ms = []
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory, ThreadPoolExecutor(PARALLELISM) as pool:
        storage = FileStorage(directory)
        for number in range(WRITES):
            began_s = time.perf_counter()
            for _ in pool.map(lambda slot, n=number: storage.write(f"{n}-{slot}", pieces), range(PARALLELISM)):
                pass
            took_ms.append((time.perf_counter() - began_s) * 1000)
            for slot in range(PARALLELISM):
                storage.delete(f"{number - 2}-{slot}")  # as old checkpoints are: disks are slower on new ground
    return round(float(np.median(took_ms)), 1)


def _measured(
    slots: Slots,
    aligned_timeout_s: float | None,
    count: int,
    warm_up: int,
    *,
    backlog_bytes: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    batch_rows: int = BATCH_ROWS,
    pool_bytes: int = POOL_BYTES,
) -> ModeFigures:
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        env = Environment(
            "bench-checkpoint",
            parallelism=PARALLELISM,
            checkpoint_dir=directory,
            checkpoint_interval=None,
            aligned_timeout=aligned_timeout_s,
            tuning=Tuning(
                queue_time=None if backlog_bytes else "10 ms",
                buffer_size=buffer_bytes,
                batch_rows=batch_rows,
                pool_size=pool_bytes,
            ),
            restart=no_restart(),
        )
        source = env.source(GeneratorSource(Rows(), None, schema=SCHEMA))
        source.rebalance().map(lambda row: row).rebalance().sink(SlowSink())
        job = start_on(slots, env, PARALLELISM)
        try:
            await_running(job)
            if backlog_bytes:
                fill(job, backlog_bytes)
            take(job, warm_up)
            before = job.status()
            took_s = take(job, count)
            after = job.status()
        finally:
            job.cancel("measured")
    return mode_figures(before, after, took_s)


def mode_figures(before: JobStatus, after: JobStatus, took_s: Sequence[float]) -> ModeFigures:
    """Return the figures of the checkpoints between the two. Raises InvariantError if one failed, or there are none."""
    failed = after.checkpoints_failed - before.checkpoints_failed
    if failed or not took_s:
        raise InvariantError(f"{failed} checkpoints failed, {len(took_s)} completed: there are no figures")
    ms = np.array(took_s) * 1000
    return ModeFigures(
        checkpoints=len(took_s),
        failed=failed,
        checkpoints_per_s=round(len(took_s) / sum(took_s), 2),
        p50_ms=round(float(np.percentile(ms, 50)), 1),
        p99_ms=round(float(np.percentile(ms, 99)), 1),
        max_ms=round(float(ms.max()), 1),
        in_flight_mib=round(in_flight_bytes(after) / 2**20, 2),
    )


def take(job: Job, count: int) -> Sequence[float]:
    """Take checkpoints one after the other, until there are enough or the time is up; return the seconds of each."""
    took_s: list[float] = []
    deadline_s = time.perf_counter() + MODE_S_MAX
    while len(took_s) < count and (not took_s or time.perf_counter() < deadline_s):
        began_s = time.perf_counter()
        job.checkpoint()
        took_s.append(time.perf_counter() - began_s)
    return took_s


def fill(job: Job, backlog_bytes: int) -> None:
    deadline_s = time.perf_counter() + FILL_S_MAX
    while True:
        job.checkpoint()
        found = in_flight_bytes(job.status())
        if found >= FILLED * backlog_bytes:
            return
        if time.perf_counter() > deadline_s:
            raise JobError(
                f"only {found:,} of {backlog_bytes:,} bytes are in flight after {FILL_S_MAX:g} s: the source is hardly "
                "faster than the sink here; try a larger backlog, or a machine with less other work"
            )
        time.sleep(POLL_S)


def await_running(job: Job) -> None:
    while (state := job.status().state) != "running":
        if job.ended:
            raise JobError(f"the benchmark's job ended before it ran: it is {state}")
        time.sleep(POLL_S)


def in_flight_bytes(status: JobStatus) -> int:
    """Return the bytes in flight of the last checkpoint, including what it holds of earlier ones."""
    return status.last_checkpoint.in_flight_bytes if status.last_checkpoint is not None else 0
