"""Tests of devices.py: pytest examples/devices"""

from datetime import datetime, timedelta

import polars as pl
import pytest
from devices import ALERT, HOT_ROWS, HOT_WITHIN, INPUT, SILENCE, Alerts, env
from polars.testing import assert_frame_equal
from readings import DEVICES, readings

from midstream import testing

SOME = readings(45)
"""What the files in the directory `in` hold."""
READING = {"device": str, "celsius": float, "at": datetime, "site": str, "limit": float}


def test_the_table_is_that_of_the_input():
    assert_frame_equal(pl.read_csv(INPUT / "devices.csv"), DEVICES)


def test_statistics_are_those_of_each_ten_minutes():
    ends = [pl.col("at").dt.truncate("1m") + timedelta(minutes=minute) for minute in range(1, 11)]
    windows = SOME["readings"].with_columns(window_end=pl.concat_list(ends)).explode("window_end")
    expected = windows.group_by("device", "window_end").agg(mean=pl.mean("celsius"), deviation=pl.std("celsius"))
    result = testing.run(env, SOME, cut="whole").frame("statistics")
    assert_frame_equal(result.select(expected.columns), expected, check_row_order=False)


def expected_alerts() -> list[tuple]:
    """The alerts as a loop over the readings of each device in order finds them; those that were answered are left out."""
    found = []
    for (device,), rows in SOME["readings"].join(DEVICES, on="device", how="left").sort("at").group_by("device"):
        times, hot = rows["at"].to_list(), []
        for row, following in zip(rows.rows(named=True), [*times[1:], None], strict=True):
            if row["limit"] is not None and row["celsius"] > row["limit"]:
                hot = [at for at in hot if at > row["at"] - HOT_WITHIN] + [row["at"]]
            if len(hot) == HOT_ROWS:
                hot = []
                found.append((device, "hot", row["at"]))
            if following is None or following >= row["at"] + SILENCE:
                hot = []
                found.append((device, "silent", row["at"] + SILENCE))
    answers = SOME["answers"].rows()
    half = timedelta(minutes=30)
    return [each for each in found if not any(d == each[0] and at <= each[2] <= at + half for d, at in answers)]


def test_alerts_are_those_that_a_loop_finds():
    result = testing.run(env, SOME, cut="whole").frame("alerts")
    assert sorted(result.select("device", "kind", "at").rows()) == sorted(expected_alerts())
    alerts = result.rows_by_key("device", named=True)
    assert [row["kind"] for row in alerts["d9"]] == ["silent"]  # it has no limit
    assert alerts["d9"][0]["site"] is None
    assert [row["kind"] for row in alerts["d0"]].count("silent") == 2
    assert [row["kind"] for row in alerts["d1"]] == ["hot", "silent"]  # the others were answered


def test_a_device_that_is_silent_leaves_nothing_behind():
    alerts = testing.harness(Alerts(), READING, ALERT, key="device", event_time="at")
    row = {"device": "d1", "celsius": 30.0, "site": "cellar", "limit": 20.0}
    assert alerts.process([row | {"at": f"2024-07-01 12:0{minute}"} for minute in (0, 4)]) == []
    alerts.snapshot_and_restore(parallelism=3)
    assert alerts.advance_to("2024-07-01 12:13:59") == []
    assert [row["kind"] for row in alerts.advance_to("2024-07-01 12:14")] == ["silent"]
    assert not any(alerts.state.values())


def test_an_answer_at_the_instant_of_an_alert_counts():
    with testing.job(env) as job:
        for minute in (0, 1, 2):
            at = f"2024-07-01 12:0{minute}"
            job.feed("readings", [{"device": device, "celsius": 40.0, "at": at} for device in ("d1", "d2")])
        job.feed("answers", {"device": "d1", "at": "2024-07-01 12:02"})
        job.advance_to("2024-07-01 12:05")
        assert [row["device"] for row in job.take("alerts")] == ["d2"]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restart_in_the_middle_changes_nothing(parallelism):
    with testing.job(env) as job:
        job.feed("readings", SOME["readings"][:80], cut=10)
        job.snapshot_and_restore(parallelism)
        job.feed_all({"readings": SOME["readings"][80:], "answers": SOME["answers"]}, cut=10)
        result = job.end().result()
    expected = testing.run(env, SOME, cut="whole")
    for name in ("statistics", "alerts"):
        assert_frame_equal(result.frame(name), expected.frame(name), check_row_order=False)


def test_nothing_depends_on_where_batches_are_cut():
    testing.check_cuts(env, SOME, cuts=3)


def test_failures_change_nothing():
    testing.simulate(env, SOME, seeds=range(2))
