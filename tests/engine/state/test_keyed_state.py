"""Declared states on their own: what they hold, and that what a snapshot holds never changes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import JobError, StorageError
from midstream.engine.operators.base import never_stored
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, state_table
from midstream.engine.state.keyed_states import KeyScope, ListState, MapState, ReducingState, State, ValueState
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.timers import STRETCH_BITS, TimerQueue

KEYS = st.sampled_from(["a", "b", "c"])
OWN = OwnCode()
ENCODING = KeyEncoding([pa.field("k", pa.large_string())], 8)


def stored(state: State, encoding: KeyEncoding, where: str) -> pa.Table:
    """All of it at rest."""
    frozen = state.snapshot(lambda: "chunk", never_stored)
    assert frozen is not None
    return state_table(state, frozen, encoding, OWN, where)


class States(RuleBasedStateMachine):
    """Random use, in place too, compared with plain dicts; every snapshot must stay as it was when taken."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = KeyScope(is_set=True)
        self.value: ValueState[list[int]] = ValueState[list[int]](default=[]).bound("value", self.scope)
        self.list: ListState[list[int]] = ListState().bound("list", self.scope)
        self.map: MapState[int, list[int]] = MapState().bound("map", self.scope)
        self.sum: ReducingState[list[int]] = ReducingState(lambda a, b: a + b).bound("sum", self.scope)
        self.plain: dict[str, dict[str, Any]] = {"value": {}, "list": {}, "map": {}, "sum": {}}
        self.snapshots: list[tuple[dict[str, Mapping[Any, Any]], dict[str, Any]]] = []

    @property
    def states(self) -> list[State]:
        return [self.value, self.list, self.map, self.sum]

    @rule(key=KEYS, number=st.integers(0, 3))
    def change_in_place(self, key: str, number: int) -> None:
        self.scope.key = key
        self.value.value.append(number)
        self.plain["value"].setdefault(key, []).append(number)

    @rule(key=KEYS, number=st.integers(0, 3))
    def append(self, key: str, number: int) -> None:
        self.scope.key = key
        self.list.append([number])
        self.plain["list"].setdefault(key, []).append([number])
        for inner, other in zip(self.list, self.plain["list"][key], strict=True):
            inner.append(number)
            other.append(number)

    @rule(key=KEYS, name=st.integers(0, 2), number=st.integers(0, 3))
    def put(self, key: str, name: int, number: int) -> None:
        self.scope.key = key
        self.map.setdefault(name, []).append(number)
        self.plain["map"].setdefault(key, {}).setdefault(name, []).append(number)

    @rule(key=KEYS, name=st.integers(0, 2))
    def remove(self, key: str, name: int) -> None:
        self.scope.key = key
        mine = self.plain["map"].get(key, {})
        assert self.map.pop(name, None) == mine.pop(name, None)

    @rule(key=KEYS, number=st.integers(0, 3))
    def add(self, key: str, number: int) -> None:
        self.scope.key = key
        self.sum.add([number])
        self.plain["sum"][key] = self.plain["sum"].get(key, []) + [number]

    @rule(key=KEYS, which=st.sampled_from(["value", "list", "map", "sum"]))
    def clear(self, key: str, which: str) -> None:
        self.scope.key = key
        getattr(self, which).clear()
        self.plain[which].pop(key, None)

    @rule()
    def snapshot(self) -> None:
        frozen = {s.name: s.snapshot(lambda: "chunk", never_stored) for s in self.states}
        self.snapshots.append(
            ({name: found.entries if found else {} for name, found in frozen.items()}, copy.deepcopy(self.plain))
        )

    @rule()
    def restore(self) -> None:
        for state in self.states:
            bound = type(state).bound(state, state.name, self.scope)
            if state.entries():
                bound.restore(state_rows(bound, stored(state, ENCODING, "test"), ENCODING, OWN, "test")[1])
            setattr(self, state.name, bound)

    @invariant()
    def snapshots_stay_as_they_were(self) -> None:
        now: dict[str, Mapping[Any, Any]] = {state.name: state.entries() for state in self.states}
        for frozen, plain in [*self.snapshots, (now, self.plain)]:
            assert {n: _without_empty(entries) for n, entries in frozen.items()} == {
                n: _without_empty(entries) for n, entries in plain.items()
            }


def _without_empty(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value}


TestStates = States.TestCase
TestStates.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_a_state_that_is_not_bound_or_has_no_key_reports_it() -> None:
    with pytest.raises(JobError, match="only works inside a process function"):
        _ = ValueState(default=0).value
    with pytest.raises(JobError, match="no current key"):
        _ = ValueState(default=0).bound("n", KeyScope()).value


def test_typed_state_is_stored_in_its_type_and_other_types_are_refused_on_restore() -> None:
    state = ValueState(pa.int32(), default=0).bound("n", KeyScope("a", is_set=True))
    state.value = 5
    table = stored(state, ENCODING, "operator 'x'")
    assert table.schema.field("value").type == pa.int32()
    assert table.column("key").to_pylist() == ["a"]
    now = ValueState(pa.int64(), default=0).bound("n", KeyScope())
    with pytest.raises(StorageError, match=r"operator 'x': state 'n': stored as int32, now declared as int64"):
        state_rows(now, table, ENCODING, OWN, "operator 'x'")
    with pytest.raises(StorageError, match="keys in the checkpoint are large_string"):
        state_rows(state, table, KeyEncoding([pa.field("k", pa.int64())], 8), OWN, "operator 'x'")


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    state: ValueState[Any] = ValueState().bound("n", KeyScope("a", is_set=True))
    state.value = (i for i in range(3))
    with pytest.raises(JobError, match="a value of state 'n' cannot be pickled: TypeError"):
        stored(state, ENCODING, "operator 'x'")


@pytest.mark.parametrize(
    "value",
    [
        {"id": 1, "at": datetime(2024, 5, 1, tzinfo=UTC), "price": Decimal("1.50")},
        [(b"x", 2.5, True, None), {1, 2}, timedelta(hours=1)],
        OrderedDict(a=1),
    ],
)
def test_a_pickled_value_comes_back_as_it_was(value: Any) -> None:
    state: ValueState[Any] = ValueState().bound("n", KeyScope("a", is_set=True))
    state.value = value
    table = stored(state, ENCODING, "operator 'x'")
    ((_, _, found),) = state_rows(state, table, ENCODING, OWN, "operator 'x'")[1]
    assert found == value and type(found) is type(value)


def test_a_crafted_value_in_a_checkpoint_calls_nothing() -> None:
    state: ValueState[Any] = ValueState().bound("n", KeyScope("a", is_set=True))
    state.value = 1
    table = stored(state, ENCODING, "operator 'x'")
    crafted = table.set_column(
        table.column_names.index("value"),
        "value",
        pa.array([b"\x80\x05\x8c\x02os\x8c\x06system\x93."], pa.large_binary()),
    )
    with pytest.raises(StorageError, match=r"operator 'x': state 'n': os\.system is neither"):
        state_rows(state, crafted, ENCODING, OWN, "operator 'x'")


# ---- timers ----


ALL = MAX_WATERMARK_US
STRETCH = 1 << STRETCH_BITS


def test_timers_come_in_order_of_time_and_each_once() -> None:
    queue = TimerQueue()
    for time_us, key in ((5, "a"), (3, "b"), (5, "a"), (3, "a"), (-7, "a"), (4, "x")):
        queue.add(time_us, key)
    queue.delete(4, "x")
    queue.delete(4, "nobody")
    frozen = queue.timers()
    order = [queue.pop(ALL) for _ in range(5)]
    assert order == [(-7, "a"), (3, "b"), (3, "a"), (5, "a"), None]
    restored = TimerQueue()
    restored.restore(frozen)
    assert [restored.pop(ALL) for _ in range(5)] == order


TIMES = st.one_of(
    st.integers(-2, 2),
    st.sampled_from([k * STRETCH + d for k in (-1, 1, 2, 1000) for d in (-1, 0, 1)]),
    st.sampled_from([MIN_WATERMARK_US, MAX_WATERMARK_US]),
)


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "delete", "pop", "next"]), TIMES, st.integers(0, 2))))
def test_timers_are_those_that_were_set_and_not_deleted_at_any_time(steps: list[tuple[str, int, int]]) -> None:
    queue, expected = TimerQueue(), list[tuple[int, int]]()
    for what, time_us, key in steps:
        timer = time_us, key
        if what == "add":
            queue.add(*timer)
            expected += [timer] if timer not in expected else []
        elif what == "delete":
            queue.delete(*timer)
            expected = [each for each in expected if each != timer]
        first = min(expected, key=itemgetter(0), default=None)
        if what == "pop":
            due = first if first is not None and first[0] <= time_us else None
            assert queue.pop(time_us) == due
            expected = [each for each in expected if each != due]
        elif what == "next":
            assert queue.next_us() == (first and first[0])
        assert queue.timers() == expected


@pytest.mark.parametrize("step_us", [1, STRETCH])
def test_timers_that_are_moved_again_and_again_do_not_pile_up(step_us: int) -> None:
    queue = TimerQueue()
    for turn in range(10_000):
        queue.delete((turn - 1) * step_us, "a")
        queue.add(turn * step_us, "a")
    assert len(queue) == 1
    held = len(queue._sorted) + len(queue._heap) + sum(map(len, queue._closed.values()))
    assert held + len(queue._stretches) < 400
    assert queue.next_us() == 9_999 * step_us


def test_deleted_timers_do_not_make_those_of_their_stretch_the_first_to_be_spilled() -> None:
    queue = TimerQueue()
    for stretch in range(1, 4):
        queue.restore((stretch * STRETCH + n, "a") for n in range(8))
    queue.forget([(STRETCH + n, "a") for n in range(6)])
    assert {time_us // STRETCH for time_us, _ in queue.pop_late(16)} == {2, 3}
    assert queue.timers() == [(STRETCH + 6, "a"), (STRETCH + 7, "a")]
