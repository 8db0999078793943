"""A table with one row per key against a dict: both find, replace, expire, undo and store the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table_lookups import GROUPS, KINDS, START

from effort import examples
from in_memory import CountingIds
from midstream.engine.state import code_index, columnar, ordered_tables, table_runs
from midstream.engine.state.columnar import OWN_CHUNK_ROWS
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.ordered_tables import RowPerKey
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_runs import stable_order
from on_disk import move_all

Given = Sequence[tuple[int, int | None]]
"""Keys, by number, and values."""
VALUE = st.one_of(st.integers(0, 20), st.integers(0, 20), st.none())
ROWS = st.lists(st.tuples(st.integers(0, 5), VALUE), min_size=1, max_size=9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["replace", "replace", "undone"]), ROWS),
        st.tuples(st.just("pop"), st.lists(st.integers(0, 5), max_size=3)),
        st.tuples(st.just("pop_until"), st.integers(-1, 20)),
        st.tuples(st.sampled_from(["restore", "store", "read", "move"]), st.none()),
    ),
    max_size=25,
)


class Compared:
    """A table, and the same rows in a dict. `nulls`: whether values may be null, so that they are not overwritten."""

    def __init__(self, kind: pa.DataType, keys: Sequence[Any], nulls: bool) -> None:
        self.kind, self.keys, self.nulls = kind, keys, nulls
        self.schema = pa.schema([("v", pa.float64()), ("k", kind), ("at", pa.timestamp("ms"))])
        self.state, self.rows, self.ids = self._new(), dict[Any, int | None](), CountingIds()
        self.stored: list[tuple[Callable[[], tuple[Chunk, ...]] | None, dict[Any, int | None]]] = []

    def _new(self) -> RowPerKey:
        return RowPerKey(self.schema).bound("rows", ["k"], range(GROUPS), GROUPS)  # type: ignore[return-value]

    def _frame(self, keys: Sequence[Any]) -> pl.DataFrame:
        return pl.DataFrame(pa.table({"k": pa.array(keys, self.kind)}))

    def _at(self, value: int | None) -> Any:
        return None if value is None else START + timedelta(seconds=value)

    def replace(self, rows: Given) -> None:
        given = [(self.keys[key % len(self.keys)], value if self.nulls else value or 0) for key, value in rows]
        order = KeyOrder(self._frame([key for key, _ in given]))
        keys = order.keys_of(np.arange(len(order.codes)))["k"].to_list()
        found = self.state.find(order)
        seen = dict(zip((keys[number] for number in found.numbers), found.rows["v"], strict=True))
        assert seen == {key: self.rows[key] for key in keys if key in self.rows}
        assert found.rows["at"].to_list() == [self._at(value) for value in seen.values()]
        columns = found.columns()
        if columns is not None:
            assert columns["v"].tolist() == found.rows["v"].to_list()
            assert columns["at"].tolist() == found.rows["at"].to_physical().to_list()
        else:
            assert self.nulls
        latest = dict(given)
        values = [latest[key] for key in keys]
        at = pl.Series(list(map(self._at, values)), dtype=pl.Datetime("ms"))
        self.state.replace(order, found, pl.DataFrame({"v": pl.Series(values, dtype=pl.Float64), "at": at}))
        self.rows |= latest

    def step(self, step: str, argument: Any) -> None:
        match step:
            case "replace":
                self.replace(argument)
            case "undone":
                mark, before = self.state.mark(), dict(self.rows)
                self.replace(argument)
                self.state.roll_back(mark)
                self.rows = before
            case "pop":
                keys = [self.keys[key % len(self.keys)] for key in argument]
                found = self.state.pop(self._frame(keys))
                assert dict(found.select("k", "v").iter_rows()) == {
                    k: self.rows.pop(k) for k in set(keys) & {*self.rows}
                }
            case "pop_until":
                found = self.state.pop_until("at", START + timedelta(seconds=argument))
                due = {key: value for key, value in self.rows.items() if value is not None and value <= argument}
                assert dict(found.select("k", "v").iter_rows()) == due
                self.rows = {key: value for key, value in self.rows.items() if key not in due}
            case "store":
                self.stored.append((self.state.snapshot(self.ids, "here"), dict(self.rows)))
            case "move":
                move_all(self.state.held_runs())
            case "read":
                assert dict(self.state.frame.select("k", "v").iter_rows()) == self.rows
            case "restore":
                chunks = self.state.snapshot(self.ids, "here")
                self.state = self._new()
                if chunks is not None:
                    self.state.restore(chunks(), "here")

    def check_stored(self) -> None:
        """Snapshots are written late, and hold what was there when they were taken. One id stands for one content."""
        seen: dict[str, pa.Table] = {}
        for snapshot, there in self.stored:
            chunks = () if snapshot is None else snapshot()
            stored = [pl.DataFrame(chunk.table.select(["k", "v"])) for chunk in chunks]
            assert dict(row for frame in stored for row in frame.iter_rows()) == there
            assert sum(frame.height for frame in stored) == len(there)
            for chunk in chunks:
                for each in (chunk, *chunk.removed):
                    assert seen.setdefault(each.id, each.stored).equals(each.stored)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(
    plan=STEPS,
    run_rows=st.sampled_from([1, 4, 1000]),
    runs_max=st.sampled_from([0, 3]),
    own=st.sampled_from([1, 1000]),
    sparse=st.sampled_from([0, 1, 4]),
    settled=st.sampled_from([0, 2]),
    same_hash=st.booleans(),
    nulls=st.booleans(),
)
def test_a_table_has_the_row_of_each_key_that_a_dict_has(
    kind: str,
    plan: list[tuple[str, Any]],
    run_rows: int,
    runs_max: int,
    own: int,
    sparse: int,
    settled: int,
    same_hash: bool,
    nulls: bool,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(patch.object(table_runs, "RUN_ROWS", run_rows))
        stack.enter_context(patch.object(ordered_tables, "RUN_ROWS", run_rows))
        stack.enter_context(patch.object(ordered_tables, "SETTLED", settled))
        stack.enter_context(patch.object(table_runs, "RUNS_MAX", runs_max))
        stack.enter_context(patch.object(table_runs, "SPARSE", sparse))
        stack.enter_context(patch.object(table_runs, "RADIX_ROWS_MIN", 2))
        stack.enter_context(patch.object(code_index, "BUCKETED_MIN", 1))
        stack.enter_context(patch.object(columnar, "OWN_CHUNK_ROWS", own))
        if same_hash:  # keys that are hashed meet, not all of them
            hashes = lambda keys, _: pl.Series([len(repr(key)) % 2 for (key,) in keys.rows()], dtype=pl.UInt64)  # noqa: E731
            stack.enter_context(patch.object(pl.DataFrame, "hash_rows", hashes))
        compared = Compared(*KINDS[kind], nulls)
        for step, argument in plan:
            compared.step(step, argument)
        compared.step("read", None)
        compared.check_stored()


def put(state: RowPerKey, keys: Any) -> None:
    order = KeyOrder(pl.DataFrame({"k": keys}, schema={"k": pl.Int64}))
    state.replace(order, state.find(order), pl.DataFrame({"v": np.zeros(len(order.codes), np.int64)}))


def test_rows_that_change_often_leave_those_that_do_not_so_that_these_are_not_stored_again() -> None:
    ids = CountingIds()
    state: Any = RowPerKey({"k": int, "v": int}).bound("rows", ["k"], range(GROUPS), GROUPS)
    put(state, np.arange(4 * OWN_CHUNK_ROWS))

    def stored() -> dict[str, int]:
        return {chunk.id: chunk.table.num_rows for chunk in state.snapshot(ids, "here")()}

    before: dict[str, int] = {}
    for _ in range(3):
        before = stored()
        put(state, np.arange(10) * 1000)
    after = stored()
    assert sum(rows for id_, rows in after.items() if id_ not in before) == 10
    assert sum(after.values()) == 4 * OWN_CHUNK_ROWS


def test_rows_that_all_change_are_overwritten_where_they_are() -> None:
    ids = CountingIds()
    state: Any = RowPerKey({"k": int, "v": int}).bound("rows", ["k"], range(GROUPS), GROUPS)
    put(state, np.arange(1000))
    indexes = [run._index for run in state._runs]
    for _ in range(20):
        for part in range(4):
            put(state, np.arange(part, 1000, 4))
        assert sum(chunk.table.num_rows for chunk in state.snapshot(ids, "here")()) == 1000
    assert [run._index for run in state._runs] == indexes


def test_short_runs_that_are_searched_often_are_merged_once() -> None:
    state: Any = RowPerKey({"k": int, "v": int}).bound("rows", ["k"], range(GROUPS), GROUPS)
    for first in range(4):
        put(state, np.arange(first, 1000, 4))
    merged_at = []
    for step in range(100):
        before = state._runs
        put(state, np.arange(step % 10, 1000, 10))
        if len(state._runs) < len(before):
            merged_at.append(step)
    assert len(merged_at) == 1 and 20 < merged_at[0] < 40, merged_at
    assert [run.rows for run in state._runs] == [1000]


@given(st.lists(st.integers(0, 2**64 - 1)), st.sampled_from([1, 2**16, 2**32, 2**48]))
def test_codes_are_sorted_in_rounds_as_by_one_stable_sort(codes: list[int], distance: int) -> None:
    with patch.object(table_runs, "RADIX_ROWS_MIN", 1):
        for each in (codes, [code % 5 * distance for code in codes]):
            values = np.array([code % 2**64 for code in each], np.uint64)
            assert stable_order(values).tolist() == values.argsort(kind="stable").tolist()


def test_rows_are_due_as_before_when_an_overwrite_is_undone() -> None:
    state: Any = RowPerKey({"k": int, "at": pa.timestamp("ms")}).bound("rows", ["k"], range(GROUPS), GROUPS)
    order = KeyOrder(pl.DataFrame({"k": [1, 2]}))
    at = [
        pl.DataFrame({"at": pl.Series([START + timedelta(seconds=each)] * 2, dtype=pl.Datetime("ms"))})
        for each in (5, 9)
    ]
    state.replace(order, state.find(order), at[0])
    assert not state.pop_until("at", START).height
    mark = state.mark()
    state.replace(order, state.find(order), at[1])
    assert not state.pop_until("at", START + timedelta(seconds=5)).height
    state.roll_back(mark)
    assert state.pop_until("at", START + timedelta(seconds=5)).height == 2
