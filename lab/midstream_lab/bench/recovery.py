"""Measures how soon a job with much in flight recovers from a failure: first row, first checkpoint, end of the drain.

The job of the checkpoint benchmark (source → rebalance → map → rebalance → slow sink) is filled, a slot is killed, and
the job recovers; it is filled again, cancelled, and started at another parallelism.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from midstream import Tuning
from midstream.api.environment import Environment
from midstream.api.restart_strategies import fixed_restarts
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import InvariantError
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.runtime.driver.job import Job
from midstream_lab.bench import checkpoint
from midstream_lab.bench.checkpoint import (
    ROW_BYTES,
    SCHEMA,
    ModeFigures,
    Rows,
    await_running,
    fill,
    in_flight_bytes,
    take,
)
from midstream_lab.bench.measuring import Slots, start_on

PARALLELISM: Final = 4
RESCALED: Final = 2
BACKLOG_MIB: Final = 256
ROW_S: Final = 0.0002
CHANNELS: Final = 2 * PARALLELISM * PARALLELISM
BUFFERS_PER_CHANNEL: Final = 16
"""The approximate number of buffers in flight per channel, over both edges, when nothing moves."""
CHECKPOINTS: Final = 100
WARM_UP: Final = 30
SHARE_MAX: Final = 0.1
"""The share of the drain after which the first checkpoint must have completed."""
SHARE_S_MIN: Final = 10.0
"""A shorter drain counts as this long, since a tenth of it would be too short."""
LOST_S_MAX: Final = 60.0
QUIET_S: Final = 3.0
"""Three heartbeats of a slot."""
DRAIN_S_MAX: Final = 600.0
POLL_S: Final = 0.01


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the failure, or from the start at another parallelism."""

    parallelism: int
    in_flight_mib: float
    running_s: float
    """All tasks run."""
    first_row_s: float
    """The sink receives its first row."""
    first_checkpoint_s: float
    """The first checkpoint has completed; it is requested as soon as all tasks run."""
    first_checkpoint_mib: float
    """The MiB that it had to write."""
    checkpoints_during_drain: int
    drained_s: float
    """The last recovered row has been read; known to within a heartbeat, which is a second."""


class RecoveryResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "recovery"
    slots: str
    backlog_mib: int
    row_bytes: int = ROW_BYTES
    sink_row_ms: float = ROW_S * 1000
    same: RecoveryFigures
    """A slot is killed, and the job recovers at the same parallelism."""
    rescaled: RecoveryFigures
    """The job is cancelled, and started again at another parallelism."""
    checkpoints_before: ModeFigures
    """Checkpoints with little in flight, as in mode `unaligned` of the checkpoint benchmark, in a job before any
    failure.
    """
    checkpoints_after: ModeFigures
    """Checkpoints of the same job after a failure and recovery: must be the same within noise."""


class MarkingSink(Sink):
    """A sink that takes time for every row. Each writer leaves a file with the time of its first row."""

    def __init__(self, directory: str, row_s: float) -> None:
        self.directory = directory
        self.row_s = row_s

    def writer(self, context: WriterContext) -> SinkWriter:
        return _MarkingWriter(f"{self.directory}/{context.job_id}-{context.attempt}-{context.subtask}", self.row_s)


class _MarkingWriter(SinkWriter):
    def __init__(self, mark: str, row_s: float) -> None:
        self._mark: str | None = mark
        self._row_s = row_s

    def write(self, batch: pa.RecordBatch) -> None:
        if self._mark is not None:
            Path(self._mark).write_text(repr(time.time()), encoding="ascii")
            self._mark = None
        time.sleep(batch.num_rows * self._row_s)


def run(slots: Slots, *, backlog: int = BACKLOG_MIB) -> RecoveryResult:
    """Run the benchmark with `backlog` in MiB.

    Raises InvariantError if a checkpoint fails, or the first one during recovery is late.
    """
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        same, rescaled = _with_backlog(Path(directory), backlog, slots)
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        before, after = _around_a_recovery(Path(directory), slots)
    return RecoveryResult(
        slots=slots,
        backlog_mib=backlog,
        same=same,
        rescaled=rescaled,
        checkpoints_before=before,
        checkpoints_after=after,
    )


def _with_backlog(directory: Path, mib: int, slots: Slots) -> tuple[RecoveryFigures, RecoveryFigures]:
    backlog_bytes = mib * 2**20
    buffer_bytes = max(4096, backlog_bytes // (CHANNELS * BUFFERS_PER_CHANNEL) // 4096 * 4096)
    env = _job(
        directory, ROW_S, buffer_bytes, batch_rows=max(1, buffer_bytes // ROW_BYTES), pool_bytes=2 * backlog_bytes
    )
    job = start_on(slots, env, PARALLELISM)
    try:
        await_running(job)
        fill(job, backlog_bytes)
        in_flight = in_flight_bytes(job.status())
        began_s = time.time()
        _kill_a_slot(job)
        same = _recovered(job, directory, began_s, PARALLELISM, in_flight)
        fill(job, backlog_bytes)
        in_flight = in_flight_bytes(job.status())
    finally:
        job.cancel("measured")
    began_s = time.time()
    job = start_on(slots, env, PARALLELISM, parallelism=RESCALED, restore_from="latest")
    try:
        rescaled = _recovered(job, directory, began_s, RESCALED, in_flight)
    finally:
        job.cancel("measured")
    return same, rescaled


def _around_a_recovery(directory: Path, slots: Slots) -> tuple[ModeFigures, ModeFigures]:
    env = _job(
        directory,
        checkpoint.ROW_S,
        checkpoint.BUFFER_BYTES,
        batch_rows=checkpoint.BATCH_ROWS,
        pool_bytes=checkpoint.POOL_BYTES,
    )
    job = start_on(slots, env, PARALLELISM)
    try:
        await_running(job)
        before = _measured(job)
        _kill_a_slot(job)
        await_running(job)
        _until_nothing_recovers(job)
        return before, _measured(job)
    finally:
        job.cancel("measured")


def _until_nothing_recovers(job: Job) -> None:
    """Wait until nothing recovers; so little was in flight that recovery may be over before a heartbeat reports it."""
    began_s = quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < QUIET_S:
        if any(vertex.recovering for vertex in job.status().vertices):
            quiet_since_s = time.monotonic()
        if quiet_since_s - began_s > DRAIN_S_MAX:
            raise InvariantError(f"after {DRAIN_S_MAX:g} s the job is still recovering")
        time.sleep(POLL_S)


def _measured(job: Job) -> ModeFigures:
    take(job, WARM_UP)
    before = job.status()
    took_s = take(job, CHECKPOINTS)
    return checkpoint.mode_figures(before, job.status(), took_s)


def _job(directory: Path, row_s: float, buffer_bytes: int, *, batch_rows: int, pool_bytes: int) -> Environment:
    marks = directory / "marks"
    marks.mkdir()
    env = Environment(
        "bench-recovery",
        parallelism=PARALLELISM,
        checkpoint_dir=directory / "checkpoints",
        checkpoint_interval=None,
        aligned_timeout=0,
        tuning=Tuning(queue_time=None, buffer_size=buffer_bytes, batch_rows=batch_rows, pool_size=pool_bytes),
        restart=fixed_restarts(1, "1 ms"),
    )
    source = env.source(GeneratorSource(Rows(), None, schema=SCHEMA)).uid("source")
    mapped = source.rebalance().map(lambda row: row).uid("map")
    mapped.rebalance().sink(MarkingSink(str(marks), row_s)).uid("sink")
    return env


def _kill_a_slot(job: Job) -> None:
    """Kill a slot, and return when the job has noticed."""
    os.kill(job.status().slot_pids[-1], signal.SIGKILL)
    deadline_s = time.monotonic() + LOST_S_MAX
    while job.status().restarts == 0:
        if time.monotonic() > deadline_s:
            raise InvariantError(f"a killed slot was not noticed after {LOST_S_MAX:g} s")
        time.sleep(POLL_S)


def _recovered(job: Job, directory: Path, began_s: float, parallelism: int, in_flight: int) -> RecoveryFigures:
    """Take checkpoints until nothing is left to recover, and return the times."""
    await_running(job)
    running_s = time.time() - began_s
    job.checkpoint()
    first_checkpoint_s = time.time() - began_s
    first = job.status().last_checkpoint
    assert first is not None
    during, was_seen = 1, False
    while True:
        status = job.status()
        is_recovering = any(vertex.recovering for vertex in status.vertices)
        was_seen |= is_recovering
        past_s = time.time() - began_s
        if was_seen and not is_recovering:
            break
        if past_s > running_s + (DRAIN_S_MAX if was_seen else 5.0):
            raise InvariantError(
                f"after {past_s:.0f} s the job {'recovers still' if was_seen else 'has nothing to recover'}"
            )
        job.checkpoint()
        during += 1
    first_row_s = min(
        float(mark.read_text()) for mark in (directory / "marks").iterdir() if mark.stat().st_mtime > began_s
    )
    drain_s = past_s - running_s
    if first_checkpoint_s - running_s > max(SHARE_S_MIN, drain_s) * SHARE_MAX:
        raise InvariantError(
            f"the first checkpoint took {first_checkpoint_s - running_s:.2f} s of a drain of {drain_s:.2f} s: "
            f"more than {SHARE_MAX:.0%}"
        )
    return RecoveryFigures(
        parallelism=parallelism,
        in_flight_mib=round(in_flight / 2**20, 1),
        running_s=round(running_s, 2),
        first_row_s=round(first_row_s - began_s, 2),
        first_checkpoint_s=round(first_checkpoint_s, 2),
        first_checkpoint_mib=round(first.state_bytes / 2**20, 2),
        checkpoints_during_drain=during,
        drained_s=round(past_s, 2),
    )
