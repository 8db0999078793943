"""Rows of a table by key and by time, against a plain list: found, removed, replaced and stored are the right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from in_memory import CountingIds
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.core.schemas import SchemaLike
from midstream.engine.state import columnar, table_runs
from midstream.engine.state.columnar import OWN_CHUNK_ROWS
from midstream.engine.state.state_parts import KEY_GROUP, Chunk
from midstream.engine.state.table_runs import RUNS_MAX, TableRun
from midstream.engine.state.table_state import TableState
from on_disk import move_all

GROUPS = 16
START = datetime(2024, 1, 1)
Row = tuple[Any, int | None, int]
"""Its key, when it is due, and its number."""

KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "integers": (pa.int64(), [0, 1, -1, 2**63 - 1, -(2**63), 7]),
    "small integers": (pa.int8(), [0, 1, -1, 127, -128]),
    "unsigned": (pa.uint64(), [0, 1, 2**64 - 1, 2**63]),
    "texts": (pa.large_string(), ["", "a", "ä", "a" * 40, "b", "a\0"]),
    "bytes": (pa.large_binary(), [b"", b"a", b"\0", b"a" * 40]),
    "truth": (pa.bool_(), [True, False]),
    "dates": (pa.date32(), [date(1970, 1, 1), date(1969, 12, 31), date(2024, 2, 29)]),
    "times": (
        pa.timestamp("us", "UTC"),
        [START.replace(tzinfo=UTC) + timedelta(days=d) for d in (0, 1, -2e4)],
    ),
}


def numbers(frame: pl.DataFrame) -> list[int]:
    return frame.get_column("id").to_list()


@dataclass
class Beside:
    """A table, and the same rows in a list."""

    kind: pa.DataType
    keys: Sequence[Any]
    on_disk: bool = False
    """Whether everything is moved to a disk after each step."""

    def __post_init__(self) -> None:
        self.schema = pa.schema([("k", self.kind), ("at", pa.timestamp("ms")), ("id", pa.int64())])
        self.state = self._new()
        self.rows: list[Row] = []
        self.count = 0
        self.stored: list[tuple[Callable[[], tuple[Chunk, ...]] | None, list[int]]] = []
        self.ids = CountingIds()

    def _new(self) -> TableState:
        return TableState(self.schema).bound("rows", ["k"], range(GROUPS), GROUPS)

    def frame_of(self, rows: Sequence[Row]) -> pl.DataFrame:
        columns = {
            "k": pa.array([self.keys[key % len(self.keys)] for key, _, _ in rows], self.kind),
            "at": pa.array(
                [None if at is None else START + timedelta(seconds=at) for _, at, _ in rows], pa.timestamp("ms")
            ),
            "id": pa.array([number for _, _, number in rows], pa.int64()),
        }
        made = pl.from_arrow(pa.table(columns, schema=self.schema))
        assert isinstance(made, pl.DataFrame)
        return made

    def _are(self, wanted: Sequence[int]) -> Callable[[Row], bool]:
        found = {self.keys[key % len(self.keys)] for key in wanted}
        return lambda row: self.keys[row[0] % len(self.keys)] in found

    def step(self, step: str, argument: Any) -> None:
        match step:
            case "append" | "upsert":
                new = [(key, at, self.count + place) for place, (key, at) in enumerate(argument)]
                self.count += len(new)
                if step == "upsert":
                    are = self._are([key for key, _, _ in new])
                    self.rows = [row for row in self.rows if not are(row)]
                getattr(self.state, step)(self.frame_of(new))
                self.rows += new
            case "lookup" | "pop":
                are = self._are(argument)
                found = getattr(self.state, step)(self.frame_of([(key, None, 0) for key in argument]))
                assert numbers(found) == [row[2] for row in self.rows if are(row)]
                if step == "pop":
                    self.rows = [row for row in self.rows if not are(row)]
            case "pop_until":
                found = self.state.pop_until("at", START + timedelta(seconds=argument))
                is_due = lambda row: row[1] is not None and row[1] <= argument  # noqa: E731
                assert numbers(found) == [row[2] for row in self.rows if is_due(row)]
                self.rows = [row for row in self.rows if not is_due(row)]
            case "keep":
                self.state.frame = self.state.frame.filter(pl.col("id") % 3 != argument)
                self.rows = [row for row in self.rows if row[2] % 3 != argument]
            case "restore":
                chunks, there = self.snapshot()
                self.state = self._new()
                if chunks is not None:
                    self.state.restore(chunks(), "here")
                assert numbers(self.state.frame) == there
        self.check()

    def snapshot(self) -> tuple[Callable[[], tuple[Chunk, ...]] | None, list[int]]:
        return self.state.snapshot(self.ids, "here"), [row[2] for row in self.rows]

    def check(self) -> None:
        if self.on_disk:
            move_all(self.state.held_runs())
        assert numbers(self.state.frame) == [row[2] for row in self.rows]
        expected = self.frame_of(self.rows)
        assert self.state.frame.equals(expected), (self.state.frame, expected)
        self.stored.append(self.snapshot())

    def check_stored(self) -> None:
        """Snapshots are written late, and hold what was there when they were taken. One id stands for one content."""
        seen: dict[str, pa.Table] = {}
        for snapshot, there in self.stored:
            chunks = () if snapshot is None else snapshot()
            assert [number for chunk in chunks for number in chunk.table.column("id").to_pylist()] == there
            for chunk in chunks:
                keys = pa.record_batch([chunk.table.column("k").combine_chunks()], ["k"])
                assert chunk.table.column(KEY_GROUP).to_pylist() == key_groups(keys, ("k",), GROUPS).tolist()
                for each in (chunk, *chunk.removed):
                    assert seen.setdefault(each.id, each.stored).equals(each.stored)


KEY = st.integers(0, 5)
AT = st.one_of(st.none(), st.integers(0, 20))
ROWS = st.lists(st.tuples(KEY, AT), max_size=9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["append", "upsert"]), ROWS),
        st.tuples(st.sampled_from(["lookup", "pop"]), st.lists(KEY, max_size=5)),
        st.tuples(st.just("pop_until"), st.integers(-1, 20)),
        st.tuples(st.just("keep"), st.integers(0, 2)),
        st.tuples(st.just("restore"), st.none()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(
    plan=STEPS,
    run_rows=st.sampled_from([1, 4, 16, 1000]),
    runs_max=st.sampled_from([0, 1, 3]),
    own=st.sampled_from([1, 5, 1000]),
    same_hash=st.booleans(),
    on_disk=st.booleans(),
)
def test_a_table_has_what_a_list_of_rows_has(
    kind: str, plan: list[tuple[str, Any]], run_rows: int, runs_max: int, own: int, same_hash: bool, on_disk: bool
) -> None:
    with ExitStack() as stack:
        stack.enter_context(patch.object(table_runs, "RUN_ROWS", run_rows))
        stack.enter_context(patch.object(table_runs, "RUNS_MAX", runs_max))
        stack.enter_context(patch.object(columnar, "OWN_CHUNK_ROWS", own))
        if same_hash:  # all keys that are hashed meet
            hashes = lambda keys, _: pl.Series(np.zeros(keys.height, np.uint64))  # noqa: E731
            stack.enter_context(patch.object(pl.DataFrame, "hash_rows", hashes))
        beside = Beside(*KINDS[kind], on_disk)
        for step, argument in plan:
            beside.step(step, argument)
        beside.check_stored()


def table(schema: SchemaLike, keys: Sequence[str] = ("k",)) -> TableState:
    return TableState(schema).bound("rows", keys, range(GROUPS), GROUPS)


def test_a_key_of_two_columns_is_both_of_them() -> None:
    state = table({"k": str, "j": int, "id": int}, ("k", "j"))
    state.append(pl.DataFrame({"k": ["a", "a", "b"], "j": [1, 2, 1], "id": [0, 1, 2]}))
    wanted = pl.DataFrame({"j": [1, 2, 1], "k": ["a", "b", "a"]})
    assert numbers(state.lookup(wanted)) == [0]
    state.upsert(pl.DataFrame({"id": [3], "k": ["a"], "j": [2]}))
    assert numbers(state.frame) == [0, 2, 3]
    assert numbers(state.pop(wanted)) == [0]


def test_key_columns_may_have_any_name() -> None:
    for names in (["__row"], ["__row", "__row_"], ["_", "__"]):
        state = table({**dict.fromkeys(names, str), "id": int}, names)
        state.append(pl.DataFrame({**{name: ["a", "b"] for name in names}, "id": [0, 1]}))
        assert numbers(state.pop(pl.DataFrame({name: ["b"] for name in names}))) == [1]


def test_what_is_looked_up_is_the_tables_type_or_is_refused() -> None:
    state = table({"k": int, "id": int})
    state.append(pl.DataFrame({"k": [1, 2], "id": [0, 1]}))
    for kind in (pl.Int8, pl.UInt64):
        assert numbers(state.lookup(pl.DataFrame({"k": [2]}, schema={"k": kind}))) == [1]
    assert numbers(state.lookup(pl.DataFrame({"k": [None, 1, None], "more": ["x", "y", "z"]}))) == [0]
    assert state.lookup(pl.DataFrame({"k": []}, schema={"k": pl.Int64})).equals(state.frame.clear())
    for wrong, message in (
        (
            pl.DataFrame({"k": ["1"]}),
            "state 'rows': the keys to look up: column 'k' is large_string, declared as int64",
        ),
        (pl.DataFrame({"k": [1.0]}), "state 'rows': the keys to look up: column 'k' is double, declared as int64"),
        (
            pl.DataFrame({"user": [1], "id": [2]}),
            r"the keys to look up have no column 'k' \(they have user, id\); give the key columns the names that they have",
        ),
        ([1], "keys are looked up with a polars DataFrame that has the columns k, not list"),
        (pl.LazyFrame({"k": [1]}), "not LazyFrame"),
    ):
        for look in (state.lookup, state.pop):
            with pytest.raises(SchemaError, match=message):
                look(wrong)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="state 'rows': column 'id' is missing; got k"):
        state.upsert(pl.DataFrame({"k": [1]}))
    with pytest.raises(JobError, match="key column 'k' is null in some row"):
        state.upsert(pl.DataFrame({"k": [None], "id": [1]}, schema={"k": pl.Int64, "id": pl.Int64}))
    assert numbers(state.frame) == [0, 1]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_rows_are_due_by_the_clock_in_every_unit_and_zone(unit: str, zone: str | None) -> None:
    state = table({"k": int, "at": pa.timestamp(unit, zone), "id": int})
    times = [datetime(1969, 12, 31, 23, 59, 59, 999_000), datetime(1970, 1, 1), START, None, datetime(2200, 1, 1)]
    at = pa.array(times, pa.timestamp("us")).cast(pa.timestamp(unit)).cast(pa.timestamp(unit, zone))
    state.append(pl.from_arrow(pa.table({"k": [0] * 5, "at": at, "id": range(5)})))  # type: ignore[arg-type]
    assert numbers(state.pop_until("at", datetime.min)) == []
    assert numbers(state.pop_until("at", datetime(1969, 12, 31, 23, 59, 59, 998_999))) == []
    assert numbers(state.pop_until("at", datetime(1969, 12, 31, 23, 59, 59, 999_000))) == [0]
    berlin = timezone(timedelta(hours=1))
    assert numbers(state.pop_until("at", datetime(2024, 1, 1, 1, tzinfo=berlin) - timedelta(microseconds=1))) == [1]
    assert numbers(state.pop_until("at", datetime(2024, 1, 1, 1, tzinfo=berlin))) == [2]
    assert numbers(state.pop_until("at", datetime.max.replace(tzinfo=UTC))) == [4]
    assert numbers(state.frame) == [3]  # it is never due


def test_nanoseconds_within_the_microsecond_of_a_watermark_are_due() -> None:
    """Event time counts microseconds, and has passed all of the one that it has reached: such rows would be late later."""
    state = table({"k": int, "at": pa.timestamp("ns"), "id": int})
    at = pl.Series([1_999, 2_000, 2_999, 3_000]).cast(pl.Datetime("ns"))
    state.append(pl.DataFrame({"k": [0] * 4, "at": at, "id": range(4)}))
    assert numbers(state.pop_until("at", datetime(1970, 1, 1, microsecond=2))) == [0, 1, 2]
    assert numbers(state.frame) == [3]


def test_due_is_what_a_column_of_timestamps_defines() -> None:
    state = table({"k": int, "day": date, "at": datetime})
    for column in ("day", "k", "nowhere"):
        with pytest.raises(SchemaError, match=rf"state 'rows' has no column '{column}' of timestamps, .*day date32"):
            state.pop_until(column, START)
    with pytest.raises(JobError, match=r"5 is not a datetime; give ctx\.watermark"):
        state.pop_until("at", 5)  # type: ignore[arg-type]


def test_a_table_that_is_not_in_a_function_cannot_be_read() -> None:
    declared = TableState({"k": int, "at": datetime})
    rows = pl.DataFrame({"k": [1], "at": [START]})
    for use in (declared.lookup, declared.pop, declared.upsert):
        with pytest.raises(JobError, match="only works inside a function on batches"):
            use(rows)
    with pytest.raises(JobError, match="only works inside a function on batches"):
        declared.pop_until("at", START)


def test_the_runs_of_a_table_are_few_however_it_grows_and_shrinks() -> None:
    state = table({"k": int, "id": int})
    for step in range(400):
        state.append(pl.DataFrame({"k": range(step * 50, step * 50 + 50), "id": [step] * 50}))
        if step % 3:  # a few rows of each batch stay indefinitely
            state.pop(pl.DataFrame({"k": range(step * 50, step * 50 + 48)}))
        assert len(state._bound_runs()) <= RUNS_MAX + 8, "each is twice as long as the next"
    assert state.frame.height == 400 * 50 - sum(48 for step in range(400) if step % 3)


def test_a_long_frame_is_searched_in_pieces_and_stays_in_order() -> None:
    state = table({"k": int, "id": int})
    rows = 5 * table_runs.RUN_ROWS
    state.frame = pl.DataFrame({"k": np.arange(rows) % 1000, "id": np.arange(rows)})
    assert numbers(state.lookup(pl.DataFrame({"k": [7, 3]})))[:4] == [3, 7, 1003, 1007]
    assert len(state._bound_runs()) == 5
    assert state.pop(pl.DataFrame({"k": [7]})).height == len(range(7, rows, 1000))
    assert state.frame["id"].is_sorted() and state.frame.height == rows - len(range(7, rows, 1000))


def test_restored_rows_are_not_copied_unless_their_chunks_are_short() -> None:
    """They may lie on disk."""
    state, ids = table({"k": int, "id": int}), CountingIds()
    long = pl.DataFrame({"k": np.arange(2 * OWN_CHUNK_ROWS), "id": 0})
    for rows in (long, long[:5], long, long[:5]):
        state.append(rows.with_columns(id=pl.lit(state.frame.height)))
    snapshot = state.snapshot(ids, "here")
    assert snapshot is not None
    chunks = snapshot()
    with patch.object(table_runs, "RUN_ROWS", 2 * OWN_CHUNK_ROWS):
        again = table({"k": int, "id": int})
        again.restore(chunks, "here")
    assert again.frame.equals(state.frame)
    first: Any = again._bound_runs()[0].frame["id"].to_arrow()
    stored: Any = chunks[0].table.column("id").chunk(0)
    assert first.buffers()[1].address == stored.buffers()[1].address


def test_neither_to_look_nor_rows_that_go_change_a_chunk() -> None:
    ids, state = CountingIds(), table({"k": int, "id": int})

    def chunks() -> list[tuple[str, list[int]]]:
        snapshot = state.snapshot(ids, "here")
        assert snapshot is not None
        return [(chunk.id, [vector.stored.num_rows for vector in chunk.removed]) for chunk in snapshot()]

    old = pl.DataFrame({"k": np.arange(4 * OWN_CHUNK_ROWS), "id": 0})
    state.append(old)
    state.append(pl.DataFrame({"k": np.arange(OWN_CHUNK_ROWS) + 10**6, "id": 1}))
    first = chunks()
    assert len(first) == 2
    state.lookup(old)
    assert chunks() == first
    state.upsert(pl.DataFrame({"k": [10**6], "id": [2]}))
    second = chunks()
    assert second[0] == first[0] and second[1] == (first[1][0], [1])
    assert [vectors for _, vectors in second[2:]] == [[]], "what was added"


def test_a_run_with_few_rows_left_is_written_again_and_found_by_the_same_codes() -> None:
    frame = pl.DataFrame({"k": [3, 1, 2, 1, 3, 2]})
    run = TableRun(frame)
    codes = np.array([1, 3], np.uint64)
    assert run.positions(codes, ["k"]).tolist() == [0, 1, 3, 4]
    run.remove(np.array([0, 1, 2]))
    again = table_runs.merged([run])
    assert again.frame["k"].to_list() == [1, 3, 2]
    with patch.object(table_runs, "codes_of", side_effect=AssertionError("made again")):
        assert again.positions(codes, ["k"]).tolist() == [0, 1]


@given(
    st.lists(st.integers(1, 9), max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_pieces_of_a_long_run_have_its_rows_and_all_of_a_key_if_they_must(
    sizes: list[int], run_rows: int, random: Any, together: bool
) -> None:
    frame = pl.DataFrame({"k": [str(k) for k, size in enumerate(sizes) for _ in range(size)]}, {"k": pl.String})
    frame = frame.with_row_index("n")
    run = TableRun(frame)
    gone = sorted(random.sample(range(frame.height), random.randint(0, frame.height)))
    if gone:
        run.remove(np.array(gone, np.int64))
    with patch.object(table_runs, "RUN_ROWS", run_rows):
        pieces = run.pieces(["k"] if together else None)
    rows = [row for piece in pieces for row in piece.living.frame.rows()]
    assert rows == [row for row in frame.rows() if row[0] not in gone]
    if together:
        keys = [key for piece in pieces for key in piece.living.frame["k"].unique()]
        assert len(keys) == len(set(keys))
