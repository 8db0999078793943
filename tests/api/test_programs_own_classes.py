"""What travels by value is unpickled apart: the program that starts a job keeps its classes as they were."""

from __future__ import annotations

import fnmatch
import functools

import pytest

from midstream import Environment
from midstream.api.user_modules import JobFile, collect
from midstream.engine.core.job_pickle import ApartUnpickler, in_the_programs_classes, pickled, unpickled_apart

SEEN: list[int] = []


class Unit:
    UNKNOWN = object()

    def see(self, n: int) -> None:
        SEEN.append(n)


@functools.lru_cache(maxsize=7)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Cached:
    @functools.cached_property
    def once(self) -> int:
        return 3

    @functools.lru_cache  # noqa: B019 - people do it
    def doubled(self, n: int) -> int:
        return 2 * n


def used(row):
    Unit().see(row["n"])
    return row if Unit.UNKNOWN is not None else None


@pytest.fixture
def by_value(monkeypatch):
    """This module's code travels by value, as that of a job file does."""
    monkeypatch.setattr(Unit, "__module__", "__main__")
    monkeypatch.setattr(Cached, "__module__", "__main__")
    monkeypatch.setattr(used, "__module__", "__main__")
    monkeypatch.setattr(fibonacci, "__module__", "__main__")


def test_collecting_the_modules_of_a_job_leaves_its_classes_as_they_are(by_value):
    unknown, see = Unit.UNKNOWN, Unit.see
    collect(JobFile(None, ""), (), pickled(used))
    assert Unit.UNKNOWN is unknown
    assert Unit.see is see
    Unit().see(1)
    assert SEEN.pop() == 1


def test_a_class_that_was_unpickled_is_another_one_and_names_its_origin(by_value):
    unpickler = ApartUnpickler(pickled((Unit, Unit())))
    made, item = unpickler.load()
    assert made is not Unit
    assert type(item) is made
    assert unpickler.originals == {made: Unit}
    assert type(in_the_programs_classes([item], unpickler.originals)[0]) is Unit


def test_a_function_with_a_cache_travels_by_value_with_an_empty_one(by_value):
    fibonacci(5)
    copied = unpickled_apart(pickled(fibonacci))
    assert copied is not fibonacci
    assert copied.cache_info().currsize == 0
    assert copied(20) == 6765
    assert copied.cache_info().currsize == 7
    assert copied.cache_parameters() == {"maxsize": 7, "typed": False}
    assert copied.__name__ == "fibonacci"


def test_a_function_with_a_cache_in_a_module_that_slots_import_travels_by_name():
    cached = vars(fnmatch)["_compile_pattern"]
    assert unpickled_apart(pickled(cached)) is cached


def test_cached_methods_and_properties_travel_by_value(by_value):
    copied = unpickled_apart(pickled(Cached()))
    assert (copied.once, copied.doubled(4)) == (3, 8)


JOB = """
import functools
from midstream import Environment

@functools.lru_cache
def doubled(n):
    return 2 * n

class Squares:
    @functools.cached_property
    def of_three(self):
        return 9

env = Environment("cached")
squares = Squares()
rows = env.from_collection([{"n": 3}, {"n": 3}]).map(lambda row: {"n": doubled(row["n"]) + squares.of_three})
found = rows.collect()
"""


def test_a_cached_function_of_the_job_file_runs_on_slots(tmp_path):
    from midstream.api.job_file import load_job
    from midstream.connectors.memory.collect_sink import CollectSink
    from midstream.runtime.process.process_slots import ProcessSlots

    (tmp_path / "cached.py").write_text(JOB)
    env = load_job(tmp_path / "cached.py")
    assert isinstance(env, Environment)
    env.execute(slots=ProcessSlots())
    [sink] = [node.sink for node in env.program.graph.nodes if node.sink is not None]
    assert isinstance(sink, CollectSink)
    assert sink.rows() == [{"n": 15}, {"n": 15}]
