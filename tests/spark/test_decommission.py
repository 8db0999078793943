"""What Spark is asked of executors that have to end, and who is told; on real executors it is in test_slots.py."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark import SparkConf

from midstream.spark.decommission import LeavingSlots, leaving_settings


class Asked:
    """Slots by job group on executors, of which some have to end. `room` has what was asked for."""

    def __init__(self, **executors: str) -> None:
        self.executors = executors
        self.ending: set[str] = set()
        self.room: list[int] = []
        self.asked: Counter[str] = Counter()
        self.fails = False
        self.told: list[tuple[str, str]] = []
        self.slots = LeavingSlots(self, lambda: "")
        self.slots.close()  # its thread ends at once: the test looks
        for group in executors:
            self.slots.add(group, lambda reason, group=group: self.told.append((group, reason)))

    def executor_of(self, group: str) -> str:
        return self.executors[group]

    def has_to_end(self, executor: str) -> bool:
        self.asked[executor] += 1
        return executor in self.ending

    def make_room(self, leaving: int) -> None:
        if self.fails:
            raise OSError("no answer")
        self.room.append(leaving)

    def look(self) -> list[str]:
        self.slots.poll(dict(self.slots._slots))
        told, self.told = self.told, []
        return [group for group, _ in told]


def test_all_slots_of_an_executor_are_told_once_and_it_is_asked_about_once_a_round() -> None:
    spark = Asked(a="1", b="2", c="1")
    assert spark.look() == [] and spark.asked == {"1": 1, "2": 1} and spark.room == []
    spark.ending = {"1"}
    assert spark.look() == ["a", "c"] and spark.room == [1]
    assert spark.look() == [] and spark.asked["1"] == 3 and spark.room == [1]


def test_room_is_given_back_when_the_executor_has_ended() -> None:
    spark = Asked(a="1", b="2")
    spark.ending = {"1", "2"}
    assert spark.look() == ["a", "b"] and spark.room == [2]
    spark.ending = {"2"}
    assert spark.look() == [] and spark.room == [2, 1]
    spark.ending = set()
    spark.look()
    assert spark.room == [2, 1, 0]


def test_room_is_asked_for_when_one_executor_ends_while_another_has_to() -> None:
    spark = Asked(a="1", b="2")
    spark.ending = {"1"}
    spark.look()
    spark.ending = {"2"}
    assert spark.look() == ["b"] and spark.room == [1, 1]


def test_room_that_could_not_be_asked_for_is_asked_for_again() -> None:
    spark = Asked(a="1")
    spark.ending, spark.fails = {"1"}, True
    with pytest.raises(OSError, match="no answer"):
        spark.look()
    assert [group for group, _ in spark.told] == ["a"]
    spark.fails = False
    spark.look()
    assert spark.room == [1]


def test_a_slot_that_is_on_no_executor_yet_is_looked_for_again() -> None:
    spark = Asked(a="")
    assert spark.look() == [] and not spark.asked
    spark.executors["a"], spark.ending = "3", {"3"}
    assert spark.look() == ["a"]


def test_a_slot_that_is_given_up_is_not_asked_about() -> None:
    spark = Asked(a="1")
    spark.slots.remove("a")
    spark.ending = {"1"}
    assert spark.look() == [] and not spark.asked


def test_what_the_user_has_set_stays() -> None:
    conf = SparkConf(loadDefaults=False, _jvm=None)
    on_yarn = {"spark.yarn.executor.decommission.enabled": "true"}
    assert leaving_settings(conf) == {"spark.decommission.enabled": "true", **on_yarn}
    conf.set("spark.decommission.enabled", "true")
    assert leaving_settings(conf) == on_yarn
    conf.set("spark.decommission.enabled", "false")
    assert leaving_settings(conf) == {}
