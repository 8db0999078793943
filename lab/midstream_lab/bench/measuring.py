"""Runs a job and measures it: the time until it runs, the time for which it runs, and the peak memory of a slot."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import psutil

from midstream.api.environment import Environment
from midstream.api.restart_strategies import no_restart
from midstream.engine.core.errors import InvariantError
from midstream.engine.protocol.job_status import JobStatus, VertexStatus
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots

Slots: TypeAlias = Literal["spark", "process"]
W = TypeVar("W")

POLL_S = 0.02
_GOING = frozenset({"running", "finishing", "finished"})


class CheckpointFigures(msgspec.Struct, frozen=True):
    completed: int
    failed: int
    duration_ms_mean: float
    """The mean over the most recent completed checkpoints."""
    duration_ms_max: int
    state_mb_max: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of every bounded job, whose result is checked first: a wrong result is an error."""

    benchmark: str
    events: int
    parallelism: int
    slots: str
    seconds: float
    """The time from all tasks running to the job's end, including the last checkpoint and commit."""
    events_per_s: int
    job_start_s: float
    """The time from the start call, on a warm session, to all tasks running."""
    slot_memory_mb: float
    """The largest peak of a slot process's resident size."""
    memory_mb: float
    """The sum of the peaks of all slot processes."""
    checkpoints: CheckpointFigures
    correct: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    start_s: float
    """The time from the start call until every task runs."""
    run_s: float
    """The time from then to the job's end."""
    peak_bytes: tuple[int, ...]
    """The peak resident size of each slot's process."""
    status: JobStatus

    def figures(self, benchmark: str, slots: Slots, events: int, parallelism: int) -> dict[str, Any]:
        """Return the fields of `Measured`."""
        return {
            "benchmark": benchmark,
            "events": events,
            "parallelism": parallelism,
            "slots": slots,
            "seconds": round(self.run_s, 3),
            "events_per_s": round(events / self.run_s),
            "job_start_s": round(self.start_s, 3),
            "slot_memory_mb": round(max(self.peak_bytes, default=0) / 1e6, 1),
            "memory_mb": self.memory_mb,
            "checkpoints": self.checkpoints,
        }

    @property
    def memory_mb(self) -> float:
        return round(sum(self.peak_bytes) / 1e6, 1)

    @property
    def checkpoints(self) -> CheckpointFigures:
        completed = [c for c in self.status.checkpoints if c.state == "completed"]
        durations = [c.duration_ms for c in completed]
        return CheckpointFigures(
            completed=self.status.checkpoints_completed,
            failed=self.status.checkpoints_failed,
            duration_ms_mean=round(sum(durations) / len(durations), 1) if durations else 0.0,
            duration_ms_max=max(durations, default=0),
            state_mb_max=round(max((c.state_bytes for c in completed), default=0) / 1e6, 1),
        )


def measure(
    name: str,
    slots: Slots,
    parallelism: int,
    checkpoint_interval_s: float | None,
    build: Callable[[Environment, W], None],
    workload: W,
    warm_up: W,
) -> MeasuredRun:
    """Run the job that `build` makes from `workload`, after one from `warm_up` that warms the session.

    `checkpoint_interval_s` None: no checkpoints. Raises the error of a failed job.
    """
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:

        def begin(load: W, sub: str) -> Job:
            env = Environment(
                f"bench-{name}",
                parallelism=parallelism,
                checkpoint_dir=None if checkpoint_interval_s is None else f"{directory}/{sub}",
                checkpoint_interval=checkpoint_interval_s,
                restart=no_restart(),
            )
            build(env, load)
            return start_on(slots, env, parallelism)

        begin(warm_up, "warm-up").wait()
        return run_measured(lambda: begin(workload, "run"))


def start_on(slots: Slots, env: Environment, cores: int, **options: Any) -> Job:
    """Start a job. `cores`: the number for an embedded Spark session. `options`: of `Environment.start`."""
    if slots == "process":
        return env.start(slots=ProcessSlots(), **options)
    return env.start(master=f"local[{cores}]", **options)


def run_measured(start: Callable[[], Job]) -> MeasuredRun:
    """Measure a job. `start` starts a bounded job. Raises its error, and InvariantError if it was restarted."""
    began_s = time.perf_counter()
    job = start()
    running_s: float | None = None
    now_s = began_s
    peaks: dict[int, int] = {}
    while True:
        status = job.status()
        before_s, now_s = now_s, time.perf_counter()
        if running_s is None and all(_all_running(vertex) for vertex in status.vertices):
            running_s = before_s if status.has_ended else now_s  # it may have run and ended between two polls
        for pid, reported in zip(status.slot_pids, status.slot_memory_bytes, strict=True):
            peaks[pid] = max(peaks.get(pid, 0), reported, _peak_memory(pid))
        if status.has_ended:
            break
        time.sleep(POLL_S)
    status = job.wait()
    if status.restarts:
        raise InvariantError(
            f"the job was restarted {status.restarts} times, so its figures mean nothing: {status.failures[0].summary}"
        )
    running_s = began_s if running_s is None else running_s
    return MeasuredRun(running_s - began_s, now_s - running_s, tuple(peaks.values()), status)


def _all_running(vertex: VertexStatus) -> bool:
    return sum(count for state, count in vertex.states.items() if state in _GOING) == vertex.parallelism


def _peak_memory(pid: int) -> int:
    """Return the peak memory so far in bytes, or the current size if the system does not record it; 0 for a process
    that is gone.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0
    except OSError:
        pass
    try:
        resident: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return resident


def require(what: str, expected: float, got: float, tolerance: float = 0.0) -> None:
    """Raise InvariantError for a wrong result, which makes figures meaningless. `tolerance` is relative."""
    if not abs(got - expected) <= tolerance * abs(expected):  # nan is wrong
        raise InvariantError(f"the benchmark's result is wrong: {what} is {got:,.1f}, but must be {expected:,.1f}")
