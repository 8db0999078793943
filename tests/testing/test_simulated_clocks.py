"""What functions see of clocks, random numbers and hash() in a simulated run, in whatever way they refer to them."""

from __future__ import annotations

import datetime as dt
import time as time_module
from dataclasses import replace
from datetime import date, datetime
from random import randint, random
from time import time

import numpy as np
import pytest
from numpy.random import rand

from midstream import Environment
from midstream.testing import simulate
from midstream.testing.simulate import campaign_of
from midstream.testing.simulation.job_scenario import REFERENCE, Outer
from midstream.testing.simulation.simulated_run import run_job

now = datetime.now
ROWS = [{"n": n} for n in range(12)]
LATER = Outer(clock_s=1e6)
OTHER_NUMBERS = Outer(random=1)
OTHER_HASH = Outer(hash=1)


def mapped(function):
    return Environment("job").from_collection(ROWS).map(function, {"n": int, "t": float})


def output(job, outer):
    return run_job(job, replace(REFERENCE, outer=outer)).output


@pytest.mark.parametrize(
    ("read", "other"),
    [
        (time, LATER),
        (lambda: time_module.time() + 1, LATER),
        (lambda: now().timestamp(), LATER),
        (lambda: datetime.now().timestamp(), LATER),
        (lambda: dt.datetime.now(dt.UTC).timestamp(), LATER),
        (lambda: float(date.today().toordinal()), LATER),
        (lambda: float(dt.date.today().toordinal()), LATER),
        (lambda: sum([datetime.now().timestamp() for _ in range(2)]), LATER),
        (random, OTHER_NUMBERS),
        (lambda: float(randint(0, 1 << 40)), OTHER_NUMBERS),
        (lambda: float(rand()), OTHER_NUMBERS),
        (lambda: float(np.random.rand()), OTHER_NUMBERS),
        (lambda: float(sum(hash(text) for text in ["a"])), OTHER_HASH),
    ],
    ids=[
        "a name of time",
        "the module time",
        "a name of now",
        "datetime.now",
        "the module datetime",
        "date.today",
        "date.today of the module",
        "in a comprehension",
        "a name of random",
        "a name of randint",
        "a name of NumPy's rand",
        "the module numpy.random",
        "hash in a generator",
    ],
)
def test_what_is_read_is_what_the_run_determines(read, other):
    job = campaign_of(mapped(lambda row: {"n": row["n"], "t": read()}), {}, latest={}, ignore={}).job
    assert output(job, Outer()) == output(job, Outer())
    assert output(job, Outer()) != output(job, other)


def looked_at(row):
    moment, day = datetime.now(), dt.date.today()
    assert type(moment) is datetime
    assert moment.__class__ is dt.datetime
    assert type(day) is date
    assert isinstance(moment, datetime)
    assert {datetime: 1, date: 2}[type(day)] == 2
    return {"n": row["n"], "t": datetime(2024, 1, 1).timestamp()}


def test_types_are_what_they_are_with_a_simulated_clock():
    assert simulate(mapped(looked_at), seeds=range(10)).ok
