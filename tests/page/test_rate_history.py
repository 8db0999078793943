"""The last hour of a job, which a page that is opened now can draw."""

from __future__ import annotations

import msgspec
import pytest
from served import Asking, FakeJob

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.messages import Reply
from midstream.page.rate_history import SAMPLES_MAX, STEP_S, RateHistory, RateRecorder
from sample_status import later, sample


def recorded(*statuses: JobStatus) -> RateHistory:
    recorder = RateRecorder()
    for status in statuses:
        recorder.add(status)
    return recorder.history()


def with_event_time(status: JobStatus, *lags_s: float) -> JobStatus:
    times_us = [round((status.now_ms / 1e3 - lag_s) * 1e6) for lag_s in lags_s]
    vertices = tuple(
        msgspec.structs.replace(vertex, watermark_us=us) for vertex, us in zip(status.vertices, times_us, strict=True)
    )
    return msgspec.structs.replace(status, vertices=vertices)


def test_rates_are_those_since_the_sample_before():
    first = sample()
    history = recorded(first, later(first, 10, 5_000), later(first, 30, 6_000))
    assert history.at_ms == (first.now_ms, first.now_ms + 10_000, first.now_ms + 30_000)
    assert history.rows_read_per_s == (None, 500, 50)
    assert history.rows_written_per_s == (None, 500, 50)


def test_counts_that_begin_again_are_a_rate_of_zero():
    first = sample()
    assert recorded(later(first, 0, 1_000), later(first, 10, 0)).rows_read_per_s == (None, 0)


def test_a_status_of_the_same_time_is_no_sample():
    assert recorded(sample(), sample()).at_ms == (sample().now_ms,)
    assert recorded() == RateHistory((), (), (), ())


@pytest.mark.parametrize(("us", "lag_s"), [(None, None), (MIN_WATERMARK_US, None), (MAX_WATERMARK_US, None), (0, None)])
def test_there_is_no_lag_without_an_event_time_near_the_clock(us: int | None, lag_s: None):
    status = sample()
    vertices = tuple(msgspec.structs.replace(vertex, watermark_us=us) for vertex in status.vertices)
    assert recorded(msgspec.structs.replace(status, vertices=vertices)).event_time_lag_s == (lag_s,)


def test_the_lag_is_that_of_the_task_with_the_largest():
    assert recorded(with_event_time(sample(), 3, 75.5)).event_time_lag_s == (75.5,)


def test_an_hour_is_kept():
    first = sample()
    history = recorded(*(later(first, STEP_S * n, n) for n in range(2 * SAMPLES_MAX)))
    assert history.at_ms[-1] - history.at_ms[0] == 3_590_000
    assert {len(column) for column in msgspec.structs.astuple(history)} == {SAMPLES_MAX}


def samples_of(site: Asking) -> int:
    answer = site.get("/rates.json")
    assert answer is not None and answer.status == 200
    return len(msgspec.json.decode(answer.body, type=RateHistory).at_ms)


def test_a_page_takes_a_sample_every_ten_seconds_whether_somebody_looks_or_not():
    job = FakeJob()
    site = Asking(job)
    assert samples_of(site) == 0
    for n in range(1, 4):
        site.loop.passes(STEP_S)
        job.asked.pop()[1].set_result(Reply(status=later(sample(), STEP_S * n, n)))
        assert samples_of(site) == n


def test_a_driver_that_does_not_answer_gets_no_second_request():
    job = FakeJob()
    site = Asking(job)
    for _ in range(5):
        site.loop.passes(STEP_S)
    assert len(job.asked) == 1
    job.asked.pop()[1].set_result(Reply(error="it is busy"))
    site.loop.passes(STEP_S)
    assert len(job.asked) == 1 and samples_of(site) == 0


def test_the_last_sample_is_that_of_the_end():
    job = FakeJob()
    site = Asking(job)
    job.last = sample()
    site.loop.passes(STEP_S)
    site.loop.passes(10 * STEP_S)
    assert samples_of(site) == 1 and job.times_asked == 0
