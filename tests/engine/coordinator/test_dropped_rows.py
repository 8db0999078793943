"""What operators drop is counted through restarts, and warned of once."""

from __future__ import annotations

import logging

import pytest
from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics

WRITE0, WRITE1 = TaskId(1, 0), TaskId(1, 1)


def heard(bench: Bench, ref: TaskId, late: int) -> None:
    metrics = TaskMetrics(ref, 0, 0, 0, 0, 0, late=(("write", late),) if late else ())
    bench.say(ref, m.SlotStatus(bench.attempt, (metrics,)))


def late_rows(bench: Bench) -> list[int]:
    return [operator.late_rows for vertex in bench.status.vertices for operator in vertex.operators]


def test_late_rows_add_up_over_subtasks_and_attempts_and_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    with caplog.at_level(logging.WARNING, "midstream.engine.coordinator"):
        heard(bench, WRITE0, 0)
        assert (late_rows(bench), bench.status.warnings) == ([0, 0], ())
        heard(bench, WRITE0, 3)
        heard(bench, WRITE0, 5)
        heard(bench, WRITE1, 2)
        assert late_rows(bench) == [0, 7]
        bench.fail(WRITE0)
        bench.wait(1)
        assert late_rows(bench) == [0, 7]
        heard(bench, WRITE1, 4)
    assert late_rows(bench) == [0, 11]
    (warning,) = bench.status.warnings
    assert "operator 'write' has dropped 11 rows that came late" in warning
    assert len(caplog.records) == 1


def test_timers_that_were_dropped_at_the_end_are_warned_of_by_operator() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    for ref, dropped in ((WRITE0, 1), (WRITE0, 3), (WRITE1, 2)):
        metrics = TaskMetrics(ref, 0, 0, 0, 0, 0, timers_dropped=(("write", dropped),))
        bench.say(ref, m.SlotStatus(bench.attempt, (metrics,)))
    (warning,) = bench.status.warnings
    assert "operator 'write' has dropped 5 processing-time timers" in warning
    assert late_rows(bench) == [0, 0]


def test_failed_rows_add_up_over_subtasks_and_attempts_and_are_warned_of_by_operator() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    for ref, failed in ((WRITE0, 1), (WRITE0, 3), (WRITE1, 2)):
        metrics = TaskMetrics(ref, 0, 0, 0, 0, 0, failed=(("write", failed),))
        bench.say(ref, m.SlotStatus(bench.attempt, (metrics,)))
    bench.fail(WRITE0)
    bench.wait(1)
    assert [operator.failed_rows for vertex in bench.status.vertices for operator in vertex.operators] == [0, 5]
    (warning,) = bench.status.warnings
    assert "operator 'write' has taken aside 5 rows for which its function failed" in warning


def test_bad_records_add_up_over_subtasks_and_attempts_and_are_warned_of_by_source() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger())).run()
    for ref, bad in ((TaskId(0, 0), 1), (TaskId(0, 0), 3), (TaskId(0, 1), 2)):
        metrics = TaskMetrics(ref, 0, 0, 0, 0, 0, operators=(("read", 0, 5),), bad_records=bad)
        bench.say(ref, m.SlotStatus(bench.attempt, (metrics,)))
    bench.fail(WRITE0)
    bench.wait(1)
    assert [operator.bad_records for vertex in bench.status.vertices for operator in vertex.operators] == [5, 0]
    (warning,) = bench.status.warnings
    assert "source 'read' has skipped 5 records" in warning
