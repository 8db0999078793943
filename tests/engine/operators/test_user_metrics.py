"""Counters and gauges of functions: what they take, and what they refuse by name."""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from midstream.engine.core.errors import JobError
from midstream.engine.operators.user_metrics import NAMES_MAX, UserMetrics


def test_a_counter_adds_up_and_is_the_same_object_for_its_name():
    metrics = UserMetrics()
    calls = metrics.counter("calls")
    calls.inc()
    calls.inc(4)
    metrics.counter("calls").inc(0)
    metrics.counter("seconds").inc(0.25)
    metrics.counter("rows").inc(np.int64(7))  # type: ignore[arg-type]  # numpy no longer declares its numbers as float
    assert metrics.counters == {"calls": 5, "seconds": 0.25, "rows": 7}
    assert type(metrics.counters["rows"]) is int


def test_a_gauge_is_what_it_was_last_set_to_and_nothing_before():
    metrics = UserMetrics()
    depth = metrics.gauge("queue.depth")
    assert metrics.gauges == {}
    depth.set(3)
    depth.set(-1.5)
    assert metrics.gauges == {"queue.depth": -1.5} and metrics.counters == {}
    metrics.gauge("queue.depth").set(np.float32(0.5))  # type: ignore[arg-type]  # as above
    assert metrics.gauges == {"queue.depth": 0.5}


@pytest.mark.parametrize("value", [None, "3", True, Decimal(1), 1j, [1], np.bool_(True)])
def test_what_is_no_number_is_refused_with_the_value(value: Any):
    metrics = UserMetrics()
    for call in (metrics.counter("n").inc, metrics.gauge("g").set):
        with pytest.raises(JobError, match=r"(counter 'n'|gauge 'g'): .*not a number; give an int or a float") as said:
            call(value)
        assert repr(value) in str(said.value)
    assert metrics.counters == {"n": 0} and metrics.gauges == {}


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("-inf"), np.int64(-1)])
def test_a_counter_never_falls(value: Any):
    metrics = UserMetrics()
    with pytest.raises(JobError, match="a counter only grows; use a gauge"):
        metrics.counter("n").inc(value)
    assert metrics.counters == {"n": 0}


def test_what_cannot_be_sent_is_refused_where_it_is_given():
    metrics = UserMetrics()
    for value in (float("inf"), 10**400):
        with pytest.raises(JobError, match="beyond the largest float"):
            metrics.counter("n").inc(value)
    metrics.counter("n").inc(sys.float_info.max)
    with pytest.raises(JobError, match="beyond the largest float"):
        metrics.counter("n").inc(sys.float_info.max)
    for value in (float("nan"), float("inf"), 10**400, -(10**400)):
        with pytest.raises(JobError, match="a gauge is a finite number"):
            metrics.gauge("g").set(value)
    assert metrics.gauges == {}


@pytest.mark.parametrize("name", ["", "1st", "a b", "a-b", 'x"} 1\nevil', "größe", "a" * 101, None, 3, "a\n"])
def test_names_that_are_none_are_refused(name: Any):
    metrics = UserMetrics()
    for make in (metrics.counter, metrics.gauge):
        with pytest.raises(JobError, match="a name consists of letters, digits") as said:
            make(name)
        assert repr(name) in str(said.value)


def test_one_name_is_a_counter_or_a_gauge():
    metrics = UserMetrics()
    metrics.counter("a")
    metrics.gauge("b")
    with pytest.raises(JobError, match=r"gauge\('a'\): there is a counter of that name"):
        metrics.gauge("a")
    with pytest.raises(JobError, match=r"counter\('b'\): there is a gauge of that name"):
        metrics.counter("b")


def test_names_made_of_data_are_refused_before_they_are_too_many():
    metrics = UserMetrics()
    for n in range(NAMES_MAX):
        metrics.counter(f"user_{n}").inc()
    with pytest.raises(
        JobError, match=r"counter\('user_100'\).*has 100 metrics already.*'user_99'.*not depend on the data"
    ):
        metrics.counter("user_100")
    metrics.counter("user_0").inc()
    assert metrics.counters["user_0"] == 2
