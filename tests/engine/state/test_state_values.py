"""What is put into a state is what is in it, before a restore and after it, or is refused immediately."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "core"))
from test_values import KINDS, ODD, SCALAR_KEYS, SCALARS, VALUES, copied, equals, fitting, same

from effort import examples
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.base import never_stored
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, state_table
from midstream.engine.state.keyed_states import (
    BroadcastState,
    KeyScope,
    ListState,
    MapState,
    ReducingState,
    State,
    ValueState,
)
from midstream.engine.state.safe_pickle import OwnCode

ENCODING = KeyEncoding([pa.field("k", pa.int64())], 128)
UNKEYED = KeyEncoding((), 1)


def bound(state: State) -> tuple[State, KeyEncoding]:
    is_keyed = state.is_keyed
    scope = KeyScope(7 if is_keyed else None, is_set=True)
    return state.bound("held", scope), ENCODING if is_keyed else UNKEYED


def restored(declared: State, state: State, encoding: KeyEncoding) -> Any:
    frozen = state.snapshot(lambda: "chunk", never_stored)
    again, _ = bound(declared)
    if frozen is not None:
        table = state_table(state, frozen, encoding, OwnCode(), "here")
        again.restore(state_rows(again, table, encoding, OwnCode(), "here")[1])
    return again


def content(state: Any) -> Any:
    if isinstance(state, MapState):
        return dict(state.items())
    return list(state) if isinstance(state, ListState) else state.value


def held_or_refused(declared: State, put: Any, expected: Any) -> None:
    state, encoding = bound(declared)
    try:
        put(state)
    except JobError as error:
        assert "'held'" in str(error)  # noqa: PT017 - either is right
        return
    before = content(state)
    assert equals(before, expected), (before, expected)
    again = restored(declared, state, encoding)
    assert same(content(again), before), (content(again), before)
    assert same(content(restored(declared, again, encoding)), before)


def try_all(value: Any, kind: pa.DataType) -> None:
    def set_value(state: Any) -> None:
        state.value = copied(value)

    held_or_refused(ValueState(kind), set_value, value)
    held_or_refused(ReducingState(lambda a, b: b, kind), lambda state: state.add(copied(value)), value)
    held_or_refused(ListState(kind), lambda state: state.append(copied(value)), [value])
    held_or_refused(ListState(kind), lambda state: state.set([copied(value)]), [value])
    held_or_refused(ListState(kind), lambda state: state.extend([copied(value)]), [value])
    for states in (MapState, BroadcastState):
        held_or_refused(
            states(key=pa.large_string(), value=kind), lambda state: state.update({"a": copied(value)}), {"a": value}
        )


@settings(max_examples=examples(150))
@given(kind=KINDS, value=VALUES)
def test_any_value_in_a_state_of_any_type_is_kept_or_refused(kind: pa.DataType, value: Any) -> None:
    try_all(value, kind)


@settings(max_examples=examples(150))
@given(data=st.data(), kind=KINDS)
def test_values_that_nearly_fit_a_state_are_kept_or_refused(data: st.DataObject, kind: pa.DataType) -> None:
    try_all(data.draw(fitting(kind)), kind)


def test_every_odd_value_as_a_value_and_as_a_key() -> None:
    for kind in SCALARS:
        for value in ODD:
            held_or_refused(ListState(kind), lambda state, value=value: state.append(value), [value])
    for kind in SCALAR_KEYS:
        for value in ODD:
            try:
                hash(value)
            except TypeError:
                continue
            held_or_refused(
                MapState(key=kind, value=pa.int64()), lambda state, value=value: state.update({value: 1}), {value: 1}
            )


@settings(max_examples=examples(200))
@given(data=st.data(), kind=st.sampled_from(SCALAR_KEYS))
def test_keys_of_a_map_stay_apart_or_are_refused(data: st.DataObject, kind: pa.DataType) -> None:
    """Each key that was put in is found again, and a restore makes neither two of one nor one of two."""
    keys = data.draw(st.lists(fitting(kind).filter(lambda key: key is None or key.__hash__), max_size=5))
    declared: MapState[Any, int] = MapState(key=kind, value=pa.int64())
    state, encoding = bound(declared)
    put = {}
    for number, key in enumerate(keys):
        try:
            state[key] = number  # type: ignore[index]
        except (JobError, TypeError):
            continue
        put[number] = key
        assert state[key] == number  # type: ignore[index]
    before = content(state)
    again = restored(declared, state, encoding)
    assert same(content(again), before)
    for key in put.values():
        assert again[key] == state[key]  # type: ignore[index]


def test_the_two_hours_at_the_end_of_summer_time_are_two_keys() -> None:
    paris = ZoneInfo("Europe/Paris")
    first, second = (datetime(2024, 10, 27, 2, 30, tzinfo=paris, fold=fold) for fold in (0, 1))
    with pytest.raises(SchemaError, match="the repeated hour at the end of daylight saving time"):
        MapState(key=pa.timestamp("us", "Europe/Paris"), value=pa.int64())
    declared: MapState[datetime, int] = MapState(key=pa.timestamp("us", "UTC"), value=pa.int64())
    state, encoding = bound(declared)
    assert isinstance(state, MapState)
    state[first], state[second] = 1, 2
    assert (state[first], state[second], len(state)) == (1, 2, 2)
    assert restored(declared, state, encoding)[first.astimezone(UTC)] == 1


def test_types_are_written_as_in_schemas() -> None:
    assert ValueState(int).type == pa.int64() and ListState(str).type == pa.large_string()
    mapped: MapState[date, dict[str, int]] = MapState(key=date, value=dict[str, int])
    assert mapped.key_type == pa.date32() and mapped.type == pa.map_(pa.large_string(), pa.int64())
    assert ReducingState(max, pl.Int16).type == pa.int16()
    same = [
        (str, pa.string(), pa.string_view(), pl.String, pa.dictionary(pa.int8(), pa.string())),
        (list[bytes], pa.list_(pa.binary()), pa.large_list(pa.large_binary()), pl.List(pl.Binary)),
        (date, pa.date32(), pa.date64(), pl.Date),
        (int, pa.int64(), pl.Int64),
    ]
    for kinds in same:  # so that a job may write another one when it resumes
        assert {ValueState(kind).type_text() for kind in kinds} == {ValueState(kinds[0]).type_text()}
        keys = [MapState(key=kind, value=kind).type_text() for kind in kinds] if kinds[0] != list[bytes] else []
        assert len(set(keys)) <= 1


@dataclass
class Pair:
    one: int


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: ValueState(pa.int64(), default=0.5), "ValueState: the default: 0.5, declared as int64"),
        (lambda: ValueState(Pair, default=Pair(1)), r"an? Pair is not a dict; write dataclasses.asdict\(x\)"),
        (lambda: ValueState(object), "ValueState: <class 'object'> is not a type; use a pyarrow type"),
        (
            lambda: ListState(list),
            r"ListState: <class 'list'> is not a type; declare what it contains, for example list\[int\]",
        ),
        (lambda: ValueState(int | str), r"ValueState: int \| str is not a type"),
        (
            lambda: MapState(pa.int64(), pa.string()),  # type: ignore[arg-type]  # the mistake under test
            r"the types have names: write for example MapState\(key=str, value=int\)",
        ),
        (lambda: MapState(key=object), "MapState: <class 'object'> is not a type"),
        (lambda: ValueState(pa.month_day_nano_interval()), "ValueState: there are no Python values"),
        (
            lambda: MapState(key=pa.list_(pa.int64()), value=pa.int64()),
            "MapState: the keys of a dict cannot be large_list",
        ),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused_where_it_is_declared(declare: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        declare()


def test_a_key_that_equals_nothing_is_refused() -> None:
    state, _ = bound(MapState(value=pa.int64()))
    assert isinstance(state, MapState)
    with pytest.raises(JobError, match="'held': nan as a key equals nothing"):
        state[float("nan")] = 1


def test_a_list_that_is_refused_leaves_nothing() -> None:
    state, _ = bound(ListState(pa.int64()))
    assert isinstance(state, ListState)
    with pytest.raises(JobError):
        state.extend([1, 2.5])
    assert len(state) == 0


def test_what_reads_the_list_that_it_extends_loses_nothing() -> None:
    state, _ = bound(ListState(pa.int64()))
    assert isinstance(state, ListState)
    state.extend([1, 2, 3])

    def doubled() -> Any:
        old = list(state)
        state.clear()
        yield from (n * 2 for n in old)

    state.extend(doubled())
    assert list(state) == [2, 4, 6]


def test_setdefault_gives_what_is_kept() -> None:
    state, _ = bound(MapState(value=pa.float64()))
    assert isinstance(state, MapState)
    assert same(state.setdefault("a", 1), 1.0)
    assert same(state.setdefault("a", 2), 1.0)
