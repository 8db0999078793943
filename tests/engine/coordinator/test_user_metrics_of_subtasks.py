"""Metrics of functions, put together from those of the subtasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine.coordinator.requests.metric_totals import NAMES_MAX
from midstream.engine.core.ids import TaskId
from midstream.engine.operators.sink_api import Committer, CommitterContext
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import GaugeStatus, OperatorStatus
from midstream.engine.protocol.task_metrics import TaskMetrics, UserMetric

WRITE0, WRITE1 = TaskId(1, 0), TaskId(1, 1)


def heard(bench: Bench, ref: TaskId, *user: tuple[str, bool, float]) -> None:
    found = tuple(UserMetric("write", *one) for one in user)
    bench.say(ref, m.SlotStatus(bench.attempt, (TaskMetrics(ref, 0, 0, 0, 0, 0, user=found),)))


def write(bench: Bench) -> OperatorStatus:
    (operator,) = bench.status.vertices[1].operators
    return operator


def test_counters_are_summed_and_gauges_have_the_least_and_the_most_and_begin_anew_with_an_attempt() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    assert (write(bench).counters, write(bench).gauges) == ({}, {})
    heard(bench, WRITE0, ("calls", True, 3.0), ("depth", False, -1.0))
    heard(bench, WRITE0, ("calls", True, 5.0), ("depth", False, 2.0), ("only", False, 0.0))
    heard(bench, WRITE1, ("calls", True, 4.0), ("depth", False, 7.0), ("errors", True, 0.0))
    assert write(bench).counters == {"calls": 9, "errors": 0}
    assert write(bench).gauges == {"depth": GaugeStatus(2, 7, 9), "only": GaugeStatus(0, 0, 0)}
    assert bench.status.vertices[0].operators[0].counters == {}
    bench.fail(WRITE0)
    bench.wait(1)
    assert (write(bench).counters, write(bench).gauges) == ({}, {})
    heard(bench, WRITE1, ("calls", True, 1.0))
    assert write(bench).counters == {"calls": 1}


class Counting(Ledger):
    """Counts its commits, as the subtasks do, and sets a gauge."""

    def committer(self, context: CommitterContext) -> Committer:
        self.metrics = context.metrics
        return self

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        super().commit(checkpoint_id, committables)
        self.metrics.counter("calls").inc()
        self.metrics.gauge("depth").set(checkpoint_id)


def test_metrics_of_a_committer_are_among_those_of_its_operator_and_continue_in_the_next_attempt() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Counting())).run()
    heard(bench, WRITE0, ("calls", True, 3.0), ("depth", False, -1.0))
    bench.checkpoint()
    assert write(bench).counters == {"calls": 4}
    assert write(bench).gauges == {"depth": GaugeStatus(-1, 1, 0)}
    assert bench.status.vertices[0].operators[0].counters == {}
    bench.fail(WRITE0)
    bench.wait(1)
    assert (write(bench).counters, write(bench).gauges) == ({"calls": 1}, {"depth": GaugeStatus(1, 1, 1)})


def test_what_is_shown_of_an_operator_is_bounded_and_finite() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    most = sys.float_info.max
    for subtask, ref in enumerate((WRITE0, WRITE1)):
        heard(bench, ref, ("most", True, most), *((f"n{subtask}{i:03d}", True, 1.0) for i in range(NAMES_MAX)))
    assert len(write(bench).counters) == NAMES_MAX
    assert write(bench).counters["most"] == most
