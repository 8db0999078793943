"""State whose tables are valid Arrow, and not what midstream has written, is refused when it is restored."""

from __future__ import annotations

import pickle
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from in_memory import CountingIds
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.key_group_watermarks import KeyGroupWatermarks
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, timer_rows
from midstream.engine.state.join_index import JoinIndex
from midstream.engine.state.keyed_states import MapState, State, ValueState
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

ENCODING = KeyEncoding([pa.field("k", pa.int64())], 16)
KEYS = pa.array([1], pa.int64())
ONE = pa.array([pickle.dumps(1)], pa.large_binary())
CRAFTED: dict[str, tuple[State, dict[str, pa.Array[Any]], str]] = {
    "no key": (ValueState(), {"value": ONE}, "not one column 'key'"),
    "no value": (ValueState(), {"key": KEYS}, "not one column 'value'"),
    "no typed value": (ValueState(pa.int64()), {"key": KEYS}, "not one column 'value'"),
    "no value, but a null": (
        ValueState(),
        {"key": KEYS, "value": pa.nulls(1, pa.large_binary())},
        "1 nulls in column 'value'",
    ),
    "no key of a map": (MapState(), {"key": KEYS, "value": ONE}, "not one column 'namespace'"),
    "marks that are no marks": (
        ValueState(),
        {"key": KEYS, "value": ONE, "gone": KEYS},
        "of the type int64 instead of bool",
    ),
    "a date beyond Python's": (
        ValueState(pa.date32()),
        {"key": KEYS, "value": pa.array([2**31 - 1], pa.int32()).view(pa.date32())},
        "cannot be represented in Python",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_state_that_midstream_has_not_written_is_refused(name: str) -> None:
    state, columns, message = CRAFTED[name]
    state.name = "s"
    with pytest.raises(StorageError) as refused:
        state_rows(state, pa.table(columns), ENCODING, OwnCode(), "operator 'x'")
    assert message in str(refused.value)


def test_a_key_of_a_map_that_cannot_be_one_is_refused() -> None:
    state = MapState[Any, Any]()
    state.name, state._entries = "s", {}
    with pytest.raises(StorageError, match=r"cannot be one: TypeError: .*unhashable type: 'list'"):
        state.restore([(1, [], 2)])


@pytest.mark.parametrize("times", [pa.nulls(1, pa.int64()), pa.array(["a"])])
def test_timers_without_a_time_are_refused(times: pa.Array[Any]) -> None:
    with pytest.raises(StorageError, match="timers: the state in the checkpoint has"):
        timer_rows(pa.table({"key": KEYS, "time_us": times}), ENCODING)


def test_progress_of_which_one_chunk_has_other_columns_is_refused() -> None:
    marks = KeyGroupWatermarks(range(2))
    marks.reach(7)
    progress = marks.table()
    assert progress is not None
    chunks = [
        Chunk("1", progress),
        Chunk("2", progress.cast(progress.schema.set(1, pa.field("watermark", pa.string())))),
    ]
    with pytest.raises(StorageError, match="'watermark' of the type string instead of int64"):
        KeyGroupWatermarks(range(2)).restore(StatePart(Redistribute.KEYED, tuple(chunks)))


def test_joined_rows_of_a_key_of_another_subtask_are_refused() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us"))])
    declared = JoinIndex(schema, "t", 1, pl.col("t"))
    all_groups = declared.bound("rows", ["k"], range(16), 16)
    all_groups.append(pl.DataFrame({"k": range(50), "t": [0] * 50}).cast({"t": pl.Datetime("us")}))
    frozen = all_groups.snapshot(CountingIds(), "here")
    assert frozen is not None
    with pytest.raises(StorageError, match="key groups 0 to 15, and this subtask has 4 to 7: it is damaged"):
        declared.bound("rows", ["k"], range(4, 8), 16).restore(frozen(), "operator 'join'")
