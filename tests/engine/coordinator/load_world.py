"""A job under a load that is computed: rows arrive at a rate, slots process what they can, and report how busy they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.core.config import AutoscaleBounds
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics

SOURCE_SHARE = 0.2
"""The part of a slot's work that is the source's."""


class LoadedJob:
    """`arrivals`: rows per second at a time. `rows_per_s`: what one slot processes. `cores`: the slots there can be.

    `pause_s`: for how long tasks restore their state. `has_time`: rows have event times, those of their arrival.
    `hot`: the share of all rows that subtask 0 has to process.
    """

    def __init__(
        self,
        arrivals: Callable[[float], float],
        bounds: AutoscaleBounds | None,
        *,
        parallelism: int = 1,
        rows_per_s: float = 1000.0,
        cores: int = 16,
        pause_s: float = 2.0,
        has_time: bool = True,
        hot: float = 0.0,
        graph: Callable[[int], JobGraph] | None = None,
        **config: Any,
    ) -> None:
        self.arrivals = arrivals
        self.rows_per_s = rows_per_s
        self.cores = cores
        self.pause_s = pause_s
        self.has_time = has_time
        self.hot = hot
        source, sink = ScriptedSource(("a",)), Ledger()
        self.graph = graph or (lambda parallelism: two_vertices(source, sink, parallelism, parallelism))
        self.bench = Bench(
            self.graph(parallelism),
            graphs=self.graph,
            parallelism=parallelism,
            autoscale=bounds,
            slot_timeout_s=20.0,
            checkpoint_interval_s=None,
            **config,
        ).run()
        self.bench.answers[m.Start] = False  # tasks of later attempts run after `pause_s`
        self.now_s = 0.0
        self.backlog = 0.0
        self.slot_seconds = 0.0
        self.lag_s = 0.0
        self.lags: list[float] = []
        self.parallelisms: list[int] = []
        self._runs_at_s = 0.0
        self._attempt = self.bench.attempt
        self._busy: dict[TaskId, float] = {}
        self._waited: dict[TaskId, float] = {}

    def run(self, seconds: float) -> LoadedJob:
        for _ in range(round(seconds)):
            self._second()
        return self

    @property
    def parallelism(self) -> int:
        return self.bench.job.plan.config.parallelism

    @property
    def reason(self) -> str:
        status = self.bench.status.autoscale
        assert status is not None
        return status.reason

    def _second(self) -> None:
        bench = self.bench
        self.now_s += 1.0
        bench.wait(1.0)
        if bench.ended is not None:
            return
        if len(bench.job.slots.live) < min(self.cores, bench.job.slots.needed):
            bench.connect(min(self.cores, bench.job.slots.needed) - len(bench.job.slots.live))
        pending = bench.job.checkpoints.pending
        if pending is not None:
            bench.ack(pending.checkpoint_id, *sorted(pending.missing))
        if bench.attempt != self._attempt:
            self._attempt, self._runs_at_s = bench.attempt, self.now_s + self.pause_s
            self._busy.clear()
            self._waited.clear()
        if bench.job.phase is Phase.STARTING and self.now_s >= self._runs_at_s:
            for ref in bench.tasks:
                bench.say(ref, m.TaskRunning(bench.attempt, ref))
        self.slot_seconds += len(bench.job.slots.live)
        self.parallelisms.append(self.parallelism)
        arrived = self.arrivals(self.now_s)
        self.backlog += arrived
        if bench.state != "running":
            self._measure(arrived)
            return
        each = [
            self.hot + (1 - self.hot) / self.parallelism,
            *[(1 - self.hot) / self.parallelism] * (self.parallelism - 1),
        ]
        processed = min(self.backlog, self.rows_per_s / max(each))
        self.backlog -= processed
        self._measure(arrived)
        is_full = self.backlog > 0
        for subtask, share in enumerate(each):
            busy = processed * share / self.rows_per_s
            source, write = TaskId(0, subtask), TaskId(1, subtask)
            self._count(source, busy * SOURCE_SHARE, 1.0 - busy * SOURCE_SHARE if is_full else 0.0)
            self._count(write, busy * (1 - SOURCE_SHARE), 0.0)
            watermark_us = round((self.bench.now_ms / 1e3 - self.lag_s) * 1e6) if self.has_time else MIN_WATERMARK_US
            metrics = [
                TaskMetrics(ref, 0, 0, round(1000 * self._busy[ref]), round(1000 * self._waited[ref]), watermark_us)
                for ref in (source, write)
            ]
            metrics += [
                TaskMetrics(ref, 0, 0, 0, 0, MIN_WATERMARK_US)
                for ref in bench.tasks
                if ref.vertex > 1 and ref.subtask == subtask
            ]
            bench.say(source, m.SlotStatus(bench.attempt, tuple(metrics)))

    def _count(self, ref: TaskId, busy: float, waited: float) -> None:
        self._busy[ref] = self._busy.get(ref, 0.0) + busy
        self._waited[ref] = self._waited.get(ref, 0.0) + waited

    def _measure(self, arrived: float) -> None:
        self.lag_s = self.backlog / arrived if arrived else 0.0
        self.lags.append(self.lag_s)


def on(least: int, most: int) -> AutoscaleBounds:
    return AutoscaleBounds(least, most)
