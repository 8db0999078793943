"""Jobs that are late by design: which rows come too late differs from run to run, and each is somewhere exactly once."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from midstream import (
    LATE,
    CoProcessFunction,
    Count,
    Environment,
    KeyedProcessFunction,
    ValueState,
    WatermarkStrategy,
    tumbling,
)
from midstream.testing import simulate
from midstream.testing.simulate import campaign_of
from midstream.testing.simulation.job_scenario import REFERENCE, Cuts
from midstream.testing.simulation.simulated_run import run_job
from midstream.testing.simulation.verdict import DIFFERS, judge

pytestmark = pytest.mark.turns(2)

NOON = datetime(2024, 1, 1, 12)
ROWS = [{"id": i, "k": "ab"[i % 2], "at": NOON + timedelta(seconds=(i * 37) % 60)} for i in range(60)]
LATE_COUNT = {"k": str, "id": int}


class Doubling:
    """A mistake: it counts in an attribute."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"k": row["k"], "id": self.count}


def job(allowed: str = "0 s", late_too: bool = True, mistake: bool = False) -> Environment:
    env = Environment("late")
    rows = env.from_collection(ROWS).with_watermarks("at", WatermarkStrategy.bounded("3 s"))
    counted = rows.key_by("k").window(tumbling("10 s")).allowed_lateness(allowed).aggregate(n=Count()).uid("counted")
    counted.collect()
    if late_too:
        late = counted.side_output(LATE)
        if mistake:
            late = late.map(Doubling(), LATE_COUNT).uid("mistake")
        late.collect()
    return env


def test_a_job_that_reads_its_late_rows_is_right_whichever_rows_are_late():
    report = simulate(job(), seeds=range(30))
    assert "Late rows of 'counted' may differ from run to run" in report.text
    campaign = campaign_of(job(), {}, latest={}, ignore={})
    [output_uid] = campaign.job.late_outputs.values()
    late = run_job(campaign.job, replace(REFERENCE, cuts=Cuts(3))).output[output_uid]
    assert late.num_rows > 0


@pytest.mark.parametrize("rows", ["fewer", "more"])
def test_a_late_row_that_is_nowhere_or_there_twice_is_reported(rows):
    campaign = campaign_of(job(), {}, latest={}, ignore={})
    [output_uid] = campaign.job.late_outputs.values()
    reference = run_job(campaign.job, REFERENCE)
    ran = run_job(campaign.job, replace(REFERENCE, cuts=Cuts(3)))
    assert judge(campaign.job, reference, ran, {}).kind == ""
    late = ran.output[output_uid]
    ran.output[output_uid] = (
        late.slice(1) if rows == "fewer" else late.from_batches([*late.to_batches(), *late.slice(0, 1).to_batches()])
    )
    assert judge(campaign.job, reference, ran, {}).kind == DIFFERS


def test_a_mistake_in_what_becomes_of_late_rows_is_found():
    with pytest.raises(AssertionError) as raised:
        simulate(job(mistake=True), seeds=range(200))
    assert "'mistake'" in str(raised.value)
    assert "self.count += 1" in str(raised.value)


def test_late_rows_that_are_not_read_are_reported():
    with pytest.raises(AssertionError, match="Rows are too late"):
        simulate(job(late_too=False), seeds=range(200))


def test_windows_that_fire_again_give_updates():
    with pytest.raises(AssertionError, match="--latest SINK=KEY,window_start"):
        simulate(job(allowed="1 min"), seeds=range(50))
    latest = {"collect-1": ["k", "window_start"]}
    assert simulate(job(allowed="1 min"), seeds=range(15), latest=latest).ok
    assert simulate(job(allowed="10 s"), seeds=range(15), latest=latest).ok


class Limits(CoProcessFunction):
    """A mistake: what it answers depends on whether the limit or the row comes first."""

    limit = ValueState(default=0)

    def process1(self, row: dict[str, Any], ctx: Any) -> dict[str, Any] | None:
        return {"k": row["k"], "id": row["id"]} if row["id"] > self.limit.value else None

    def process2(self, row: dict[str, Any], ctx: Any) -> None:
        self.limit.value = row["limit"]


class Alarms(KeyedProcessFunction):
    """Right, and with timers, which the mistake has none of."""

    last = ValueState(default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        ctx.timers.event_time(row["at"])

    def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
        return {"k": ctx.key, "id": time.second}


def test_a_mistake_elsewhere_in_such_a_job_is_given_its_own_reason():
    env = job()
    timed = env.from_collection(ROWS).with_watermarks("at", WatermarkStrategy.bounded("1 min")).key_by("k")
    timed.process(Alarms(), LATE_COUNT).uid("alarms").collect()
    rows = env.from_collection(ROWS).uid("rows").key_by("k")
    limits = env.from_collection([{"k": k, "limit": 30} for k in "ab"]).uid("limits").key_by("k")
    rows.connect(limits).process(Limits(), LATE_COUNT).uid("limited").collect()
    with pytest.raises(AssertionError, match="depends on the order in which rows of two inputs") as raised:
        simulate(env, seeds=range(20))
    assert "Look at" not in str(raised.value)
