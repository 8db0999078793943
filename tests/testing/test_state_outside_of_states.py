"""What a function keeps in variables of modules and classes: gone after a restore, and never seen by another run."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import pytest

from midstream import Environment, KeyedProcessFunction, ValueState, testing

SEEN: list[int] = []


class Registry:
    seen: list[int] = []
    UNKNOWN = object()


class BadOrder(Exception):
    pass


@dataclass
class Money:
    cents: int


def counted(row):
    SEEN.append(row["n"])
    Registry.seen.append(row["n"])
    return {"variable": len(SEEN), "attribute": len(Registry.seen)}


COUNTED = {"variable": int, "attribute": int}
HELPER = """
import threading

SEEN = []

class Registry:
    seen = []

class BadOrder(Exception):
    pass

def counted(row):
    SEEN.append(row["n"])
    Registry.seen.append(row["n"])
    return {"variable": len(SEEN), "attribute": len(Registry.seen)}

def refused(row):
    raise BadOrder(row["n"])
"""


def numbers():
    return Environment().from_collection([], schema={"n": int}).uid("numbers")


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """A module of the user's that slots import."""
    (tmp_path / "helper_of_a_job.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("helper_of_a_job")
    del sys.modules["helper_of_a_job"]


def begun_again(function):
    """What it counts in a first run, after a restore, and in another run."""
    stream = numbers().map(function, COUNTED)
    with testing.job(stream) as job:
        first = [list(row.values()) for row in job.feed([{"n": 1}, {"n": 2}]).take()]
        job.snapshot_and_restore()
        restored = [list(row.values()) for row in job.feed([{"n": 3}]).take()]
    return first, restored, [list(row.values()) for row in testing.run(stream, [{"n": 4}]).rows]


def test_variables_of_the_jobs_file_and_of_its_classes_start_again():
    assert begun_again(counted) == ([[1, 1], [2, 2]], [[1, 1]], [[1, 1]])
    assert (SEEN, Registry.seen) == ([], [])


def test_variables_of_modules_that_the_job_imports_start_again(helper):
    assert begun_again(helper.counted) == ([[1, 1], [2, 2]], [[1, 1]], [[1, 1]])
    assert (helper.SEEN, helper.Registry.seen) == ([], [])


def test_a_module_that_cannot_travel_by_value_is_used_as_it_is(helper):
    helper.LOCK = helper.threading.Lock()
    exec(
        "def counted(row):\n    with LOCK:\n        SEEN.append(1)\n    return {'variable': len(SEEN), 'attribute': 0}",
        vars(helper),
    )
    stream = numbers().map(helper.counted, COUNTED)
    assert testing.run(stream, [{"n": 1}, {"n": 2}]).rows[-1]["variable"] == 2


def test_the_programs_classes_stay_as_they_are():
    unknown = Registry.UNKNOWN
    begun_again(counted)
    assert Registry.UNKNOWN is unknown


def test_an_exception_of_the_users_is_of_the_class_in_the_test(helper):
    def refused(row):
        raise BadOrder(row["n"])

    with pytest.raises(BadOrder, match="3"):
        testing.run(numbers().map(refused, {"n": int}), [{"n": 3}])
    with pytest.raises(helper.BadOrder, match="4"):
        testing.run(numbers().map(helper.refused, {"n": int}), [{"n": 4}])


class Purse(KeyedProcessFunction):
    money = ValueState()

    def process(self, row, ctx):
        self.money.value = Money(row["n"] + (self.money.value.cents if self.money.value else 0))


def test_values_in_states_are_of_the_classes_of_the_test():
    purse = testing.harness(Purse(), {"k": str, "n": int}, {"n": int}, key="k")
    purse.process([{"k": "a", "n": 1}, {"k": "a", "n": 2}])
    assert purse.state["money"] == {"a": Money(3)}
    purse.snapshot_and_restore(parallelism=2).process({"k": "a", "n": 4})
    assert purse.state["money"] == {"a": Money(7)}
    assert type(purse.state["money"]["a"]) is Money
