"""Entries of keyed state that expire: what a function sees, and what is left of them, against plain Python."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from effort import examples
from midstream import (
    BroadcastState,
    ConfigError,
    Environment,
    KeyedProcessFunction,
    ListState,
    MapState,
    ReducingState,
    SchemaError,
    StateTtl,
    ValueState,
    WatermarkStrategy,
    testing,
)
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy
from midstream.engine.operators.functions import process_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.functions.state_spill import StateSpill
from midstream.engine.state.expiring_states import CHECK_KEYS, ExpiringState, bound_state
from midstream.engine.state.keyed_states import KeyScope


@pytest.fixture(scope="module", params=["in memory", pytest.param("spilled", marks=pytest.mark.turns(3))], autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test may run twice: with all entries and timers in memory, and with all of them spilled between batches."""

    def spilling(states: Any, queues: Any, encoding: Any, own: Any, where: Any, context: OperatorContext) -> StateSpill:
        return StateSpill(states, queues, encoding, own, where, dataclasses.replace(context, entry_bytes=lambda: 0))

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "spilled":
            patch.setattr(process_operator, "StateSpill", spilling)
        yield


ROW = {"k": int, "at": datetime, "do": str, "n": int}
SEEN = {"k": int, "seen": str}
START = datetime(2024, 1, 1)
VALUE_TTL, LIST_TTL, MAP_TTL, REDUCED_TTL = 8, 16, 24, 5


def states(by: Any) -> dict[str, Any]:
    return {
        "value": ValueState(int, default=-1, ttl=StateTtl(VALUE_TTL, by=by)),
        "kept": ValueState(int, default=-1, ttl=StateTtl(VALUE_TTL, on="read", by=by)),
        "things": ValueState(default=None, ttl=StateTtl(VALUE_TTL, by=by)),
        "items": ListState(int, ttl=StateTtl(LIST_TTL, by=by)),
        "lists": ListState(ttl=StateTtl(LIST_TTL, on="read", by=by)),
        "pages": MapState(key=int, value=int, ttl=StateTtl(MAP_TTL, by=by)),
        "kept_pages": MapState(key=int, value=int, ttl=StateTtl(MAP_TTL, on="read", by=by)),
        "nested": MapState(ttl=StateTtl(MAP_TTL, by=by)),
        "total": ReducingState(lambda one, other: one + other, int, ttl=StateTtl(REDUCED_TTL, by=by)),
        "forever": ValueState(int, default=0),
    }


class Base(KeyedProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        return {"k": ctx.key, "seen": str(act(self, row["do"], row["n"]))}


class ByEventTime(Base):
    vars().update(states("event_time"))


class ByClock(Base):
    vars().update(states("clock"))


def act(on: Any, do: str, n: int) -> Any:
    """Change or read the states, and return what is seen; `on` has states, or stand-ins of plain Python."""
    name, _, rest = do.partition(" ")
    match name:
        case "set":
            on.value.value = on.kept.value = n
            on.total.add(n)
            on.forever.value += 1
        case "thing":
            if on.things.value is None:
                on.things.value = []
            on.things.value.append(n)
            return list(on.things.value)
        case "append":
            on.items.append(n)
            on.lists.extend([[n], [n, n]])
        case "replace":
            on.items.set(range(n))
        case "put":
            on.pages[n] = on.pages.get(n, 0) + 1
            on.kept_pages[n] = n
            on.nested.setdefault(n, []).append(n)
        case "remove":
            on.pages.pop(n, None)
        case "clear":
            getattr(on, rest).clear()
        case "read":
            return on.value.value, on.kept.value, on.total.value, list(on.items), list(on.lists), len(on.items)
        case "look":
            return list(on.pages.items()), n in on.kept_pages, on.kept_pages.get(0), list(on.nested), on.forever.value
    return None


class Oracle:
    """The states of one key, each value with the time at which it was written."""

    def __init__(self, by_name: dict[str, Any]) -> None:
        self.entries: dict[str, list[tuple[int, Any, Any]]] = {name: [] for name in by_name}
        """For each state, in the order of writing: the time, the name in a map, the value."""
        self.declared = by_name
        self.now = 0

    def begin(self, now: int) -> None:
        self.now = now
        for name, state in self.declared.items():
            if state.ttl is not None:
                ttl = int(state.ttl.duration)
                self.entries[name] = [entry for entry in self.entries[name] if entry[0] + ttl > now]

    def __getattr__(self, name: str) -> Any:
        state = self.declared[name]
        return {"value": OfValue, "reducing": OfValue, "list": OfList, "map": OfMap}[state.kind](self, name, state)


class Stand:
    def __init__(self, oracle: Oracle, name: str, state: Any) -> None:
        self.oracle, self.name, self.state = oracle, name, state

    @property
    def found(self) -> list[tuple[int, Any, Any]]:
        return self.oracle.entries[self.name]

    def stamp(self) -> int:
        return max([self.oracle.now, *(at for at, _, _ in self.found[-1:])])

    def renews(self) -> bool:
        return bool(self.state.ttl and self.state.ttl.on == "read")

    def clear(self) -> None:
        self.found.clear()


class OfValue(Stand):
    @property
    def value(self) -> Any:
        if not self.found:
            return getattr(self.state, "default", None)
        value = self.found[0][2]
        if self.renews() or isinstance(value, list):
            self.found[:] = [(self.stamp(), None, value)]
        return value

    @value.setter
    def value(self, value: Any) -> None:
        self.found[:] = [(self.stamp(), None, value)]

    def add(self, value: Any) -> None:
        self.found[:] = [(self.stamp(), None, self.found[0][2] + value if self.found else value)]


class OfList(Stand):
    def append(self, value: Any) -> None:
        self.found.append((self.stamp(), None, value))

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def set(self, values: Any) -> None:
        at = self.stamp()
        self.found[:] = [(at, None, value) for value in values]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Any]:
        if self.renews() and self.found:
            at = self.stamp()
            self.found[:] = [(at, None, value) for _, _, value in self.found]
        return iter([value for _, _, value in self.found])


class OfMap(Stand):
    def _find(self, name: Any) -> Any:
        return next((entry for entry in self.found if entry[1] == name), None)

    def __setitem__(self, name: Any, value: Any) -> None:
        at = self.stamp()
        self.found[:] = [*(entry for entry in self.found if entry[1] != name), (at, name, value)]

    def __contains__(self, name: Any) -> bool:
        entry = self._find(name)
        if entry is not None and self.renews():
            self[name] = entry[2]
        return entry is not None

    def get(self, name: Any, default: Any = None) -> Any:
        entry = self._find(name)
        if entry is None:
            return default
        if self.renews() or isinstance(entry[2], list):
            self[name] = entry[2]
        return entry[2]

    def setdefault(self, name: Any, default: Any) -> Any:
        if self._find(name) is None:
            self[name] = default
        return self.get(name)

    def pop(self, name: Any, default: Any) -> None:
        self.found[:] = [entry for entry in self.found if entry[1] != name]

    def items(self) -> list[tuple[Any, Any]]:
        return [(name, value) for _, name, value in self.found]

    def __iter__(self) -> Iterator[Any]:
        return iter([name for _, name, _ in self.found])


ACTIONS = [
    "set",
    "set",
    "thing",
    "append",
    "replace",
    "put",
    "remove",
    "read",
    "read",
    "look",
    "clear items",
    "clear value",
]
ACTS = st.tuples(st.sampled_from([0, 0, 1]), st.integers(-12, 12), st.sampled_from(ACTIONS), st.integers(0, 3))
STEPS = st.lists(
    st.one_of(
        ACTS,
        ACTS,
        ACTS,
        st.tuples(st.just("advance"), st.integers(0, 20)),
        st.tuples(st.just("restore"), st.integers(1, 3)),
    ),
    max_size=60,
)


def seconds(at: int) -> datetime:
    return START + timedelta(seconds=at)


class Runs:
    """A harness and the oracle, side by side. Times are in seconds after START."""

    def __init__(self, function: Any, advance: Callable[[Any, int, int], None]) -> None:
        self.harness = testing.harness(function(), ROW, SEEN, key="k", event_time="at", now=START)
        self.declared = states("event_time")
        self.oracles = {key: Oracle(self.declared) for key in range(4)}
        self.now = 0
        self.advance = advance

    def row(self, key: int, at: int, do: str, n: int, now: int) -> None:
        oracle = self.oracles[key]
        oracle.begin(now)
        seen = act(oracle, do, n)
        made = self.harness.process({"k": key, "at": seconds(at), "do": do, "n": n})
        assert made == [{"k": key, "seen": str(seen)}]

    def step(self, by: int) -> None:
        self.advance(self.harness, self.now, by)
        self.now += by
        self.bounded()

    def restore(self, parallelism: int) -> None:
        self.harness = self.harness.snapshot_and_restore(parallelism=parallelism)

    def bounded(self) -> None:
        """Nothing is held for longer than 9/8 of its time to live, and everything that lives is."""
        held = self.harness.state
        for name, state in self.declared.items():
            ttl = None if state.ttl is None else int(state.ttl.duration)
            for key, oracle in self.oracles.items():
                entries = oracle.entries[name]
                living = [entry for entry in entries if ttl is None or entry[0] + ttl > self.now]
                there = held[name].get(key)
                count = 0 if there is None else 1 if state.kind in ("value", "reducing") else len(there)
                most = len([entry for entry in entries if ttl is None or entry[0] + ttl * 9 / 8 > self.now])
                assert len(living) <= count <= most, (name, key, entries, there)


@settings(max_examples=examples(150))
@given(STEPS)
def test_by_event_time_a_function_sees_what_has_not_expired_at_its_row(steps: list[Any]) -> None:
    runs = Runs(ByEventTime, lambda harness, now, by: harness.advance_to(seconds(now + by)))
    runs.harness.advance_to(seconds(0))
    has_watermark = True
    for step in steps:
        if step[0] == "advance":
            runs.step(step[1])
            has_watermark = has_watermark or step[1] > 0
        elif step[0] == "restore":
            runs.restore(step[1])
            has_watermark = False
        else:
            key, offset, do, n = step
            at = runs.now + (offset if has_watermark else abs(offset))  # before a watermark, no row can be late
            runs.row(key, at, do, n, max(runs.now, at))


@settings(max_examples=examples(100))
@given(STEPS)
def test_by_the_clock_a_function_sees_what_has_not_expired_now(steps: list[Any]) -> None:
    runs = Runs(ByClock, lambda harness, now, by: harness.advance_processing_time(by) and None)
    for step in steps:
        if step[0] == "advance":
            runs.step(step[1])
        elif step[0] == "restore":
            runs.restore(step[1])
        else:
            key, _, do, n = step
            runs.row(key, 0, do, n, runs.now)


# ---- operators ---------------------------------------------------------------

ROWS = schema_of([("k", pa.int64()), ("n", pa.int64()), ("at", pa.timestamp("us"))])
FOUND = schema_of([("k", pa.int64()), ("found", pa.int64())])
S = 1_000_000


class Remembers(KeyedProcessFunction):
    """Returns what it remembers of a key, and sets timers at which it looks again."""

    last = ValueState(int, default=-1, ttl="10 s")

    def process(self, row: Any, ctx: Any) -> Any:
        found = self.last.value
        self.last.value = row["n"]
        for delay_s in (9, 10, 50):
            ctx.timers.event_time(row["at"] + timedelta(seconds=delay_s))
        ctx.timers.processing_time(datetime(2100, 1, 1))
        if row["n"] == 13:
            raise ValueError("thirteen")
        return {"k": ctx.key, "found": found}

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        return {"k": ctx.key, "found": self.last.value}


class ByTheClock(Remembers):
    last = ValueState(int, default=-1, ttl=StateTtl("10 s", by="clock"))


class ForEver(Remembers):
    last = ValueState(int, default=-1)


class ItemsForEver(Remembers):
    last = ValueState(int, default=-1)
    items: ListState[int] = ListState(int)
    pages: MapState[int, int] = MapState(key=int, value=int)

    def process(self, row: Any, ctx: Any) -> Any:
        self.items.append(row["n"])
        self.pages[row["n"]] = row["n"]
        return super().process(row, ctx)


class Items(ItemsForEver):
    last = ValueState(int, default=-1, ttl="10 s")
    items: ListState[int] = ListState(int, ttl="10 s")
    pages: MapState[int, int] = MapState(key=int, value=int, ttl="10 s")


class ItemsByTheClock(Items):
    last = ValueState(int, default=-1, ttl=StateTtl("10 s", by="clock"))
    items: ListState[int] = ListState(int, ttl=StateTtl("10 s", by="clock"))
    pages: MapState[int, int] = MapState(key=int, value=int, ttl=StateTtl("10 s", by="clock"))


def operator(function: type[KeyedProcessFunction], policy: ErrorPolicy = FAIL) -> ProcessOperator:
    return ProcessOperator("op", function(), [Port("process", ("k",), "at", ROWS)], FOUND, {}, policy)


def batch(*rows: tuple[int, int, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "n": n, "at": at * S} for k, n, at in rows], schema=ROWS)


def held(world: World) -> Any:
    operator: Any = world.operator
    return {name: entries for name, entries in operator.contents().items() if entries}


def found(world: World) -> list[int]:
    rows = [row["found"] for row in world.out.rows()]
    world.out.clear()
    return rows


def test_a_timer_sees_what_has_not_expired_at_its_time_however_far_the_watermark_is() -> None:
    for advances in ([9, 10, 50], [60], [5, 55]):
        world = World(operator(Remembers))
        world.process(batch((1, 7, 0)))
        for at in advances:
            world.advance(at * S)
        assert found(world) == [-1, 7, -1, -1]
        assert held(world) == {}


class AtTheEnd(Remembers):
    def process(self, row: Any, ctx: Any) -> Any:
        self.last.value = row["n"]
        ctx.timers.processing_time(datetime(2100, 1, 1))


def test_the_end_of_the_input_alone_makes_nothing_expire() -> None:
    world = World(operator(AtTheEnd))
    world.process(batch((1, 7, 0), (2, 8, 45)))
    world.advance(48 * S)
    world.advance(MAX_WATERMARK_US)
    assert found(world) == [-1, 8]


def test_nothing_is_left_of_a_state_that_has_expired() -> None:
    world = World(operator(Items))
    world.process(batch(*((k, 1, 0) for k in range(1000))))
    assert {name: len(entries) for name, entries in held(world).items()} == dict.fromkeys(
        ("last", "items", "pages"), 1000
    )
    world.advance(12 * S)
    assert held(world) == {}
    assert set(world.snapshot()) == {"timers:event", "timers:processing"}


def test_keys_are_swept_in_slices_and_what_is_written_meanwhile_stays() -> None:
    scope = KeyScope()
    state = bound_state(ValueState(int, ttl="10 s"), "state", scope)
    assert isinstance(state, ExpiringState)
    scope.is_set = True
    for key in range(10 * CHECK_KEYS):
        scope.key = key
        state.begin_call(0)
        state.value = key  # type: ignore[attr-defined]
    assert state.sweep(9 * S, lambda: True)
    assert len(state.entries()) == 10 * CHECK_KEYS
    slices = 1
    while not state.sweep(20 * S, lambda: True):
        scope.is_set, scope.key = True, slices
        state.begin_call(20 * S)
        state.value = slices  # type: ignore[attr-defined]
        slices += 1
    assert slices == 10
    assert set(state.entries()) == set(range(1, 10))
    assert state.next_sweep_us() == 30 * S


def test_by_the_clock_a_wake_up_removes_what_has_expired_and_a_clock_set_back_revives_nothing() -> None:
    world = World(operator(ByTheClock))
    world.process(batch((1, 7, 0), (2, 8, 0)))
    world.clock.set(9_999)
    world.process(batch((1, 9, 0)))
    world.clock.set(1)
    world.process(batch((1, 9, 0), (2, 9, 0)))
    world.clock.set(-5_000)
    world.process(batch((2, 10, 0)))
    assert found(world) == [-1, -1, 7, 9, -1, 9]
    world.advance_clock(world.clock.ms + 20_000)
    assert held(world) == {}


class Reads(KeyedProcessFunction):
    """Writes at the first row of a key, reads at its second, and returns what is left at its third."""

    ttl = StateTtl("8 s", on="read")
    count = ValueState(int, default=0)
    value = ValueState(int, ttl=ttl)
    total: ReducingState[int] = ReducingState(max, int, ttl=ttl)
    items: ListState[int] = ListState(int, ttl=ttl)
    got: MapState[int, int] = MapState(key=int, value=int, ttl=ttl)
    had: MapState[int, int] = MapState(key=int, value=int, ttl=ttl)

    def process(self, row: Any, ctx: Any) -> Any:
        self.count.value += 1
        if self.count.value == 1:
            self.value.value = self.got[1] = self.got[2] = self.had[1] = self.had[2] = 7
            self.total.add(7)
            self.items.extend([7, 8])
        elif self.count.value == 2 and row["n"]:
            return {
                "k": 1,
                "found": len([self.value.value, self.total.value, list(self.items), self.got[2], 2 in self.had]),
            }
        elif self.count.value == 3:
            everything = (self.value.value, self.total.value, *self.items, *self.got, *self.had)
            return {"k": 1, "found": sum(each or 0 for each in everything)}
        return None


def test_reading_renews_what_was_read_and_nothing_else() -> None:
    world = World(operator(Reads))
    world.process(batch((1, 1, 0), (1, 1, 6), (1, 1, 12), (2, 0, 0), (2, 0, 6), (2, 0, 12)))
    assert found(world) == [5, 7 + 7 + 7 + 8 + 2 + 2, 0]


def test_a_row_that_fails_renews_nothing() -> None:
    world = World(operator(Items, ErrorPolicy("drop", None, ROWS)))
    world.process(batch((1, 7, 0), (1, 13, 8), (1, 13, 9)))
    world.advance(10 * S)
    assert found(world)[:1] == [-1] and held(world) == {}


def test_of_state_that_was_stored_without_a_ttl_the_time_begins_with_the_first_watermark() -> None:
    world = World(operator(ItemsForEver))
    world.process(batch((1, 7, 0), (1, 8, 0), (2, 9, 0)))
    [world] = restored(lambda: operator(Items), [world.snapshot()], 1, 16)
    world.process(batch((1, 10, 100)))
    assert found(world) == [8]
    world.advance(90 * S)
    everything = {
        "last": {1: 10, 2: 9},
        "items": {1: [7, 8, 10], 2: [9]},
        "pages": {1: {7: 7, 8: 8, 10: 10}, 2: {9: 9}},
    }
    assert held(world) == everything
    [world] = restored(lambda: operator(Items), [world.snapshot()], 1, 16)  # the times were stored
    world.advance(99 * S)
    assert held(world) == everything
    world.advance(105 * S)
    assert held(world) == {"last": {1: 10}, "items": {1: [10]}, "pages": {1: {10: 10}}}
    [world] = restored(lambda: operator(ItemsForEver), [world.snapshot()], 1, 16)
    world.advance(1000 * S)
    assert held(world) == {"last": {1: 10}, "items": {1: [10]}, "pages": {1: {10: 10}}}


def test_what_was_written_before_the_first_watermark_expires_at_its_own_time() -> None:
    """In one entry with values that were stored without a ttl, or by another clock."""
    for stored in (ItemsForEver, ItemsByTheClock):
        world = World(operator(stored))
        world.process(batch((1, 7, 0)))
        for rows in ([(1, 8, 20), (1, 9, 27), (1, 10, 31)], [(1, 8, 20), (1, 9, 27), (2, 10, 31)]):
            [later] = restored(lambda: operator(Items), [world.snapshot()], 1, 16)
            later.process(batch(*rows))
            later.advance(31 * S)
            assert held(later)["items"][1] == [n for k, n, _ in rows if k == 1 and n > 8]
            assert set(held(later)["pages"][1]) == {7, *(n for k, n, _ in rows if k == 1 and n > 8)}
            later.advance(38 * S)
            later.process(batch((1, 11, 38)))
            assert (
                9 not in held(later)["items"][1] and 9 not in held(later)["pages"][1] and 7 in held(later)["pages"][1]
            )


def test_what_the_clock_has_dated_is_not_taken_for_event_time() -> None:
    world = World(operator(ByTheClock))
    world.process(batch((1, 7, 0)))
    [world] = restored(lambda: operator(Remembers), [world.snapshot()], 1, 16)
    world.advance(5 * S)
    assert held(world) == {"last": {1: 7}}
    world.advance(16 * S)
    assert held(world) == {}


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_late_row_finds_nothing_that_had_expired_before_a_restore(parallelism: int) -> None:
    """The restored operator has had no watermark yet, and the last sweep was too early for the entry."""
    columns = {"k": int, "at": datetime, "n": int}
    late = {"k": 1, "at": seconds(11), "n": 9}
    function = testing.harness(Quiet(), columns, {"k": int, "found": int}, key="k", event_time="at")
    function.process([{"k": 2, "at": seconds(1), "n": 7}, {"k": 1, "at": seconds(2), "n": 8}])
    function.advance_to(seconds(11))
    function.advance_to(seconds(12))
    assert function.state["last"] == {1: 8}
    function.snapshot_and_restore(parallelism)
    assert function.process(late) == [{"k": 1, "found": -1}]
    function.advance_to(seconds(21))
    assert function.process(late) == [{"k": 1, "found": 9}], "it was written at 12 s, when the late row arrived"


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=40))
def test_the_result_does_not_depend_on_where_batches_are_cut(drawn: list[tuple[int, int]]) -> None:
    latest = 0
    rows = []
    for n, (k, at) in enumerate(drawn):
        latest = max(latest, at)
        rows.append({"k": k, "at": seconds(max(at, latest - 8)), "n": n % 13})
    env = Environment("cuts")
    stream = env.from_collection(rows, schema={"k": int, "at": datetime, "n": int}).with_watermarks(
        "at", WatermarkStrategy.bounded("8 s")
    )
    testing.check_cuts(stream.key_by("k").process(Quiet(), {"k": int, "found": int}), cuts=8)


class Quiet(Remembers):
    def process(self, row: Any, ctx: Any) -> Any:
        found = self.last.value
        self.last.value = row["n"]
        return {"k": ctx.key, "found": found}


# ---- what is refused -----------------------------------------------------------


def test_without_event_time_a_ttl_needs_the_clock() -> None:
    with pytest.raises(
        SchemaError, match=r"ValueState 'last' has a ttl by event time, and the stream has none; .*by='clock'"
    ):
        testing.harness(Quiet(), {"k": int, "n": int}, {"k": int, "found": int}, key="k")


@pytest.mark.parametrize(
    ("ttl", "message"),
    [
        (0, "ttl: 0: no entry would live"),
        ("0 s", "ttl: '0 s': no entry would live"),
        (-1, "ttl: -1 must not be negative"),
        ("soon", "ttl: 'soon' is not a duration"),
        (True, "ttl: True is not a duration"),
        (float("nan"), "ttl: nan must be less than"),
    ],
)
def test_what_is_no_time_to_live_is_refused_where_it_is_declared(ttl: Any, message: str) -> None:
    for declare in (
        lambda: ValueState(int, ttl=ttl),
        lambda: ListState(int, ttl=ttl),
        lambda: MapState(key=int, value=int, ttl=ttl),
        lambda: ReducingState(max, int, ttl=ttl),
        lambda: StateTtl(ttl),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            declare()


def test_options_of_a_time_to_live_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"on='access'; it is 'write' or 'read'"):
        StateTtl("1 h", on="access")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"by='processing'; it is 'event_time' or 'clock'"):
        StateTtl("1 h", by="processing")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"BroadcastState has no ttl: .* remove entries in process_broadcast"):
        BroadcastState(key=int, value=int, ttl="1 h")
