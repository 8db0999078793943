"""A job that chooses its parallelism by its load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
from coordinator_world import SCHEMA, Bench, Ledger, ScriptedSource, two_vertices
from load_world import LoadedJob, on

from midstream.engine.coordinator import shell
from midstream.engine.coordinator.placement import autoscaler
from midstream.engine.core.config import AutoscaleBounds, RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning, SourceSpec, Vertex
from midstream.engine.protocol import messages as m

GROWS_WITHIN_S = autoscaler.SETTLE_S + autoscaler.GROW_AFTER_S + 15


def changes_of(job: LoadedJob) -> int:
    return sum(a != b for a, b in zip(job.parallelisms, job.parallelisms[1:], strict=False))


def test_a_job_that_falls_behind_grows_to_what_catches_up() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8)).run(GROWS_WITHIN_S)
    assert job.parallelism > 1
    job.run(600)
    assert job.lag_s < 1
    assert 3000 / (job.parallelism * 1000) <= autoscaler.FULL
    assert job.parallelism == 5
    status = job.bench.status.autoscale
    assert status is not None
    assert [(change.before, change.after) for change in status.changes][-1][0] == 1
    assert "event time" in status.changes[-1].reason


def test_a_job_without_event_time_grows_by_what_its_sources_could_emit() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8), has_time=False).run(1200)
    assert job.parallelism == 5
    assert job.lag_s < 1
    status = job.bench.status.autoscale
    assert status is not None
    assert "sources could emit" in status.changes[-1].reason


def test_a_job_that_keeps_up_stays_as_it_is() -> None:
    job = LoadedJob(lambda _: 1300.0, on(1, 8), parallelism=2).run(1200)
    assert set(job.parallelisms) == {2}
    assert "the busiest slot works 65% of the time" in job.reason


def test_a_job_shrinks_after_five_minutes_with_little_to_do() -> None:
    job = LoadedJob(lambda s: 3000.0 if s < 120 else 600.0, on(1, 8), parallelism=5)
    job.run(120 + autoscaler.SHRINK_AFTER_S - 20)
    assert job.parallelism == 5
    job.run(60)
    assert job.parallelism == 1
    assert max(job.lags[-30:]) < 3
    status = job.bench.status.autoscale
    assert status is not None
    assert "at parallelism 1 it would work 60%" in status.changes[0].reason


def test_a_peak_in_the_five_minutes_keeps_the_slots() -> None:
    job = LoadedJob(lambda s: 3000.0 if s % 240 < 60 else 300.0, on(1, 8), parallelism=5).run(1500)
    assert set(job.parallelisms) == {5}


def test_it_stays_within_its_bounds() -> None:
    busy = LoadedJob(lambda _: 50_000.0, on(2, 4), parallelism=2).run(600)
    assert set(busy.parallelisms) == {2, 4}
    idle = LoadedJob(lambda _: 1.0, on(2, 4), parallelism=4).run(600)
    assert set(idle.parallelisms) == {4, 2}


def test_slots_that_do_not_come_leave_the_job_as_it_runs_and_are_asked_for_ever_less_often() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8), cores=3).run(3600)
    assert job.parallelism == 3, "of the four more that it wants it tries two"
    assert job.bench.state == "running"
    assert job.bench.status.restarts == 0
    assert "slots" in job.reason
    assert "the next change is tried in" in job.reason
    requests = len(job.bench.requests)
    assert 3 < requests < 80
    job.cores = 8
    job.run(3600)
    assert job.parallelism == 5


def test_a_job_that_loses_slots_for_good_continues_on_those_that_are_left() -> None:
    job = LoadedJob(lambda _: 1500.0, on(2, 8), parallelism=4).run(30)
    job.cores = 3
    job.bench.lose(job.bench.slots[1])
    job.run(15)
    assert job.bench.state == "restarting"
    job.run(20)
    assert (job.bench.state, job.parallelism, job.bench.status.slots_needed) == ("running", 3, 3)
    assert job.bench.status.restarts == 1
    status = job.bench.status.autoscale
    assert status is not None
    assert (status.changes[0].before, status.changes[0].after) == (4, 3)
    assert "3 came within 20 s" in status.changes[0].reason
    assert any("the parallelism was 4 and is 3" in text for text in job.bench.notified)
    job.run(60)
    assert job.lag_s < 1


def test_too_few_slots_are_waited_for_as_in_any_job() -> None:
    restart = RestartStrategy(kind="fixed", attempts=100, delay_s=0.5)
    job = LoadedJob(lambda _: 1500.0, on(3, 8), parallelism=4, restart=restart).run(30)
    job.cores = 2
    job.bench.lose(job.bench.slots[1])
    job.bench.lose(job.bench.slots[2])
    job.run(60)
    assert job.bench.state == "restarting"
    assert job.parallelism == 4
    job.cores = 4
    job.run(30)
    assert job.bench.state == "running"


def test_an_operator_that_needs_more_slots_than_are_left_keeps_the_job_as_it_is() -> None:
    source, sink = ScriptedSource(("a",)), Ledger()
    restart = RestartStrategy(kind="fixed", attempts=100, delay_s=0.5)
    graph = partial(two_vertices, source, sink, sinks=4)
    bench = Bench(graph(2), graphs=graph, parallelism=2, autoscale=on(1, 4), slot_timeout_s=20.0, restart=restart).run()
    for slot in bench.slots[1:]:
        bench.lose(slot)
    bench.wait(50)
    assert bench.state == "restarting"
    assert bench.job.plan.config.parallelism == 2
    bench.connect()
    bench.wait(2)
    bench.connect()
    assert bench.state == "running"


def test_slots_that_come_while_the_smaller_plan_is_made_are_used() -> None:
    job = LoadedJob(lambda _: 1500.0, on(2, 8), parallelism=4, held=("rescale",)).run(30)
    job.cores = 3
    job.bench.lose(job.bench.slots[1])
    while not job.bench.waiting:
        job.run(1)
        assert job.now_s < 120
    job.bench.lose(job.bench.slots[2])  # it asks for slots again
    job.cores = 4
    job.run(5)
    assert (job.bench.state, job.parallelism) == ("running", 4)
    job.bench.release("rescale")
    assert (job.bench.state, job.parallelism) == ("running", 4)


def test_a_hot_key_is_named_instead_of_more_slots() -> None:
    job = LoadedJob(lambda _: 1100.0, on(1, 8), parallelism=4, hot=0.9).run(900)
    assert set(job.parallelisms) == {4}
    assert "subtask 0 of 'write' works" in job.reason
    assert "more subtasks do not relieve it" in job.reason


def test_a_task_with_a_parallelism_of_its_own_is_named() -> None:
    source, sink = ScriptedSource(("a",)), Ledger()
    job = LoadedJob(lambda _: 3000.0, on(2, 8), parallelism=2, graph=lambda n: two_vertices(source, sink, n, n)).run(
        600
    )
    assert job.parallelism == 5


def test_advice_changes_nothing_and_is_given_once() -> None:
    job = LoadedJob(lambda _: 3000.0, AutoscaleBounds(1, 8, is_advice=True)).run(1200)
    assert set(job.parallelisms) == {1}
    status = job.bench.status.autoscale
    assert status is not None
    assert status.is_advice
    assert status.desired > 1
    assert not status.changes
    advice = [text for text in job.bench.notified if "would be better than 1" in text]
    assert 1 <= len(advice) <= 3


def test_a_load_that_swings_at_the_worst_pace_changes_ever_less_often() -> None:
    """It shrinks just before the load comes back, again and again."""
    period_s = autoscaler.SHRINK_AFTER_S + 90
    job = LoadedJob(lambda s: 3000.0 if s % period_s < 60 else 500.0, on(1, 8), parallelism=5).run(2 * 3600)
    changed_s = [s for s, (a, b) in enumerate(zip(job.parallelisms, job.parallelisms[1:], strict=False)) if a != b]
    assert len(changed_s) <= 4, "eighteen periods"


def test_no_more_than_so_many_changes_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "SHRINK_AFTER_S", 20.0)
    monkeypatch.setattr(autoscaler.Autoscaler, "_learn", lambda *_: None)
    job = LoadedJob(lambda s: 3000.0 if s % 200 < 100 else 500.0, on(1, 8), parallelism=1).run(3000)
    assert autoscaler.CHANGES_MAX // 2 <= changes_of(job) <= autoscaler.CHANGES_MAX
    assert job.parallelism == 5, "it may still grow, but not shrink any more"
    job.run(190)
    assert "changes in the last hour, the parallelism stays" in job.reason


def test_a_job_that_has_changed_often_still_grows() -> None:
    """It has grown and shrunk all the time, and is small when the load comes to stay."""
    job = LoadedJob(lambda s: 3000.0 if s % 720 < 60 or s > 2500 else 500.0, on(1, 8)).run(3700)
    assert max(job.lags) < 100
    assert job.parallelism == 5


@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("pause_s", [60.0, 300.0])
def test_a_change_that_takes_long_does_not_cause_the_next_one(has_time: bool, pause_s: float) -> None:
    """What has arrived while tasks restored their state says nothing about their parallelism."""
    job = LoadedJob(lambda _: 3000.0, on(1, 16), has_time=has_time, pause_s=pause_s).run(2400)
    assert job.parallelism == 5
    assert changes_of(job) == 1
    assert job.lag_s < 1


@pytest.mark.parametrize("hot", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_keys_that_are_spread_unevenly_do_not_make_it_swing(hot: float) -> None:
    job = LoadedJob(lambda _: 2400.0, on(1, 16), parallelism=3, hot=hot).run(1200)
    assert changes_of(job) <= 2
    assert job.lag_s < 1


def test_a_failed_change_is_not_reported_once_the_load_has_fallen() -> None:
    job = LoadedJob(lambda s: 3000.0 if s < 100 else 500.0, on(1, 8), cores=1).run(95)
    assert "the next change is tried in" in job.reason
    job.run(700)
    assert job.reason == "the busiest slot works 50% of the time"


def test_a_change_may_fail_for_months() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8)).run(5)
    for _ in range(2000):
        job.bench.job.autoscaler._answered(0.0, 1, 5, "", m.Reply(error="no slots"))
    assert "the next change is tried in 60 min" in job.reason


def test_a_slot_that_does_not_report_is_not_judged_by_what_it_did_before() -> None:
    job = LoadedJob(lambda _: 600.0, on(1, 8), parallelism=3, heartbeat_timeout_s=3600.0).run(100)
    job.bench.wait(600)  # its function does not return
    assert job.parallelism == 3
    assert not job.bench.job.rescaling.is_under_way
    job.run(400)
    assert job.parallelism == 1


@pytest.mark.parametrize("every_s", [1.0, 1.001, 1.07, 1.34, 1.9])
def test_it_shrinks_however_often_it_evaluates(monkeypatch: pytest.MonkeyPatch, every_s: float) -> None:
    monkeypatch.setattr(shell, "TIME_INTERVAL_S", every_s)
    job = LoadedJob(lambda _: 600.0, on(1, 8), parallelism=3).run(400)
    assert job.parallelism == 1


def test_a_source_without_event_time_does_not_hide_that_of_another() -> None:
    def graph(parallelism: int) -> JobGraph:
        timed = two_vertices(ScriptedSource(("a",)), Ledger(), parallelism, parallelism)
        untimed = Vertex(2, 1, SourceSpec("names", "names", ScriptedSource(("b",))), ())
        edge = Edge(1, 2, 1, Partitioning.BROADCAST, SCHEMA, ())
        return dataclasses.replace(timed, vertices=(*timed.vertices, untimed), edges=(*timed.edges, edge))

    job = LoadedJob(lambda _: 3000.0, on(1, 8), graph=graph).run(600)
    status = job.bench.status.autoscale
    assert status is not None
    assert "event time" in status.changes[-1].reason


def test_nothing_changes_at_the_end_of_the_input() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8), parallelism=2)
    job.bench.end_of_data(TaskId(0, 1))
    job.run(300)
    assert set(job.parallelisms) == {2}
    assert "the input ends" in job.reason


def test_a_client_may_rescale_within_the_bounds_only() -> None:
    job = LoadedJob(lambda _: 1300.0, on(2, 4), parallelism=2).run(30)
    client = job.bench.ask(m.DoRescale(5))
    assert "scales itself between 2 and 4" in job.bench.replies[client].error
    client = job.bench.ask(m.DoRescale(4))
    job.run(10)
    assert job.bench.replies[client].checkpoint is not None
    assert job.parallelism == 4


def test_a_job_that_is_stopped_while_it_grows_stops() -> None:
    job = LoadedJob(lambda _: 3000.0, on(1, 8), cores=1)
    while not job.bench.job.rescaling.is_under_way:
        job.run(1)
        assert job.now_s < 300
    client = job.bench.ask(m.DoStop())
    job.run(10)
    assert job.bench.ended is not None and job.bench.ended.state == "stopped", job.bench.ended
    assert job.bench.replies[client].checkpoint is not None


def lags_at(parallelism: int, load: Callable[[float], float], seconds: int) -> list[float]:
    """How far a job of a fixed parallelism lags in each second."""
    backlog, lags = 0.0, []
    for s in range(1, seconds + 1):
        backlog = max(0.0, backlog + load(s) - 1000.0 * parallelism)
        lags.append(backlog / load(s))
    return lags


def test_a_day_costs_less_than_the_best_fixed_parallelism_and_lags_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of a day, and all times, at twelve times the speed: a night, two peaks, and noise."""
    for name in ("EVALUATE_S", "SETTLE_S", "GROW_AFTER_S", "SHRINK_AFTER_S", "CATCH_UP_S", "HOUR_S"):
        monkeypatch.setattr(autoscaler, name, getattr(autoscaler, name) / 12)

    def load(s: float) -> float:
        hour = s / 300 % 24
        base = 500 + 3000 * max(0.0, math.sin((hour - 6) / 12 * math.pi)) + (1500 if 18 <= hour < 20 else 0)
        return base * (1 + 0.1 * math.sin(s / 8) + 0.05 * math.sin(s))

    day_s = 24 * 300
    scaled = LoadedJob(load, on(1, 8), pause_s=1.0).run(day_s)
    assert max(lags_at(4, load, day_s)) < 10
    assert max(lags_at(3, load, day_s)) > 30  # a slot less, and there is a backlog for hours
    assert scaled.slot_seconds < 0.75 * 4 * day_s
    assert sorted(scaled.lags)[round(0.99 * day_s)] < 5
    assert max(scaled.lags) < 15
    assert changes_of(scaled) <= 30
