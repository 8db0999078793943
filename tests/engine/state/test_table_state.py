"""Tables as state: what may be put into one, and what a snapshot holds of it."""

from __future__ import annotations

import pickle
from datetime import datetime
from pathlib import Path

import cloudpickle
import polars as pl
import pyarrow as pa
import pytest

from in_memory import CountingIds
from midstream.engine.checkpoint.state_files import store_parts
from midstream.engine.core.errors import JobError, SchemaError, StorageError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.state.columnar import OWN_CHUNK_ROWS
from midstream.engine.state.state_parts import KEY_GROUP, Redistribute, StatePart
from midstream.engine.state.table_state import PIECES_MAX, TableState
from midstream.runtime.storage.file_storage import FileStorage

GROUPS = 16
SCHEMA = {"k": int, "n": int}


def table(key_group_range: range = range(GROUPS), schema: object = None) -> TableState:
    declared = TableState(schema or SCHEMA)  # type: ignore[arg-type]
    return declared.bound("rows", ["k"], key_group_range, GROUPS)


def rows(*pairs: tuple[int, int]) -> pl.DataFrame:
    return pl.DataFrame(pairs, schema={"k": pl.Int64, "n": pl.Int64}, orient="row")


def many(count: int, start: int = 0) -> pl.DataFrame:
    return pl.DataFrame({"k": range(start, start + count), "n": [7] * count})


def test_a_table_is_empty_at_first_and_then_what_it_was_given() -> None:
    state = table()
    assert state.frame.equals(rows())
    state.frame = rows((1, 10), (2, 20))
    state.append(rows((1, 11)))
    state.append(rows())
    assert state.frame.equals(rows((1, 10), (2, 20), (1, 11)))
    state.frame = state.frame.filter(pl.col("k") == 2)
    assert state.frame.equals(rows((2, 20)))
    state.frame = state.frame.clear()
    assert state.frame.equals(rows())
    assert state.snapshot(CountingIds(), "here") is None


def test_columns_may_come_in_any_order_and_in_types_that_lose_nothing() -> None:
    state = table()
    state.frame = pl.DataFrame({"n": [5], "k": [1]}, schema={"n": pl.Int8, "k": pl.UInt32})
    assert state.frame.equals(rows((1, 5)))
    times = table(schema={"k": int, "at": pa.timestamp("ms")})
    times.append(pl.DataFrame({"k": [1], "at": [datetime(2024, 1, 1)]}))
    assert times.frame.schema == {"k": pl.Int64, "at": pl.Datetime("ms")}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pl.DataFrame({"k": [1]}), "state 'rows': column 'n' is missing; got k"),
        (pl.DataFrame({"k": [1], "n": ["x"]}), "state 'rows': column 'n' is large_string, declared as int64"),
        (pl.DataFrame({"k": [1], "n": [2.5]}), "state 'rows': column 'n' is double, declared as int64"),
        (pl.DataFrame({"k": [1], "n": [1], "m": [1]}), "state 'rows': column 'm' is not in the declared schema"),
        (rows().lazy(), "state 'rows' is a table: give it a polars DataFrame, not LazyFrame"),
        ([{"k": 1, "n": 2}], "give it a polars DataFrame, not list"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_naming_the_column_and_changes_nothing(
    frame: pl.DataFrame, message: str
) -> None:
    state = table()
    state.frame = rows((1, 10))
    with pytest.raises(SchemaError, match=message):
        state.frame = frame
    with pytest.raises(SchemaError, match=message):
        state.append(frame)
    assert state.frame.equals(rows((1, 10)))


@pytest.mark.parametrize(
    ("kind", "fitting", "other"),
    [
        (pa.time64("us"), pl.lit(7_000).cast(pl.Time), pl.lit(7_001).cast(pl.Time)),
        (pa.time32("ms"), pl.lit(7_000_000).cast(pl.Time), pl.lit(7_000_001).cast(pl.Time)),
    ],
)
def test_what_polars_holds_more_finely_than_declared_is_refused_immediately_and_not_by_a_snapshot(
    kind: pa.DataType, fitting: pl.Expr, other: pl.Expr
) -> None:
    state = table(schema=pa.schema({"k": pa.int64(), "n": kind}))
    polars_kind = state.frame.schema["n"]
    state.frame = pl.select(k=pl.lit(1, pl.Int64)).with_columns(n=fitting.cast(polars_kind))
    with pytest.raises(SchemaError, match=r"state 'rows': column 'n' is .* would lose data"):
        state.append(pl.select(k=pl.lit(1, pl.Int64)).with_columns(n=other.cast(polars_kind)))
    snapshot = state.snapshot(CountingIds(), "here")
    assert snapshot is not None and snapshot()[0].table.num_rows == 1


def test_a_row_without_its_key_is_refused() -> None:
    state = table()
    with pytest.raises(JobError, match="state 'rows': key column 'k' is null in some row"):
        state.frame = pl.DataFrame({"k": [1, None], "n": [1, 2]})
    state.frame = pl.DataFrame({"k": [1], "n": [None]}, schema={"k": pl.Int64, "n": pl.Int64})


def test_a_declaration_needs_a_schema_pickles_and_holds_no_rows() -> None:
    with pytest.raises(SchemaError, match="TableState: column 'n': 'int' is not a type"):
        TableState({"n": "int"})
    declared: TableState = pickle.loads(cloudpickle.dumps(TableState(SCHEMA)))
    assert declared.schema == pa.schema({"k": pa.int64(), "n": pa.int64()})
    for use in (lambda: declared.frame, lambda: declared.append(rows())):
        with pytest.raises(JobError, match="only works inside a function on batches, declared as an attribute"):
            use()
    with pytest.raises(JobError, match="only works inside a function on batches"):
        declared.frame = rows()


def test_a_snapshot_stays_what_it_was_whatever_is_done_to_the_table_and_its_frames() -> None:
    state = table()
    given = rows((1, 10), (2, 20))
    state.frame = given
    snapshot = state.snapshot(CountingIds(), "here")
    assert snapshot is not None
    given.extend(rows((3, 30)))
    state.frame.extend(rows((4, 40)))
    handed_out = state.frame
    handed_out.drop_in_place("n")
    assert state.frame.equals(rows((1, 10), (2, 20)))
    state.append(rows((5, 50)))
    state.frame = rows()
    (chunk,) = snapshot()
    assert chunk.table.select(["k", "n"]).to_pylist() == [{"k": 1, "n": 10}, {"k": 2, "n": 20}]
    keys = pa.record_batch({"k": pa.array([1, 2])})
    assert chunk.table.column(KEY_GROUP).to_pylist() == key_groups(keys, ("k",), GROUPS).tolist()


def test_a_table_that_has_not_changed_is_the_same_chunks_and_one_that_has_is_others() -> None:
    ids, state = CountingIds(), table()

    def chunks() -> list[str]:
        snapshot = state.snapshot(ids, "here")
        assert snapshot is not None
        return [chunk.id for chunk in snapshot()]

    state.frame = many(10)
    first = chunks()
    assert state.frame.height == 10  # looking is no change
    assert chunks() == first
    state.frame = many(10)
    assert set(chunks()).isdisjoint(first)


def test_what_is_appended_to_a_large_table_leaves_its_chunks_alone() -> None:
    ids, state = CountingIds(), table()
    state.frame = many(8 * OWN_CHUNK_ROWS)
    stored: set[str] = set()
    written = 0
    for step in range(200):
        state.append(many(100, start=step))
        snapshot = state.snapshot(ids, "here")
        assert snapshot is not None
        made = snapshot()
        assert len(made) <= 5
        written += sum(chunk.table.num_rows for chunk in made if chunk.id not in stored)
        stored |= {chunk.id for chunk in made}
    assert written < 30 * 8 * OWN_CHUNK_ROWS  # and not 200 times
    assert state.frame["k"].to_list() == [*range(8 * OWN_CHUNK_ROWS), *(s + i for s in range(200) for i in range(100))]
    assert state.frame.n_chunks() < 20


def test_a_frame_in_many_pieces_is_put_together() -> None:
    state = table()
    for step in range(3 * PIECES_MAX):
        state.frame = pl.concat([state.frame, rows((step, step))], rechunk=False)
        assert state.frame.n_chunks() <= PIECES_MAX + 1
    assert state.frame["k"].to_list() == list(range(3 * PIECES_MAX))
    for step in range(3 * PIECES_MAX):  # the first column in one piece, the other in many
        longer = pl.concat([state.frame, rows((step, step))], rechunk=False)
        state.frame = longer.with_columns(longer["k"].rechunk())
        assert max(state.frame.n_chunks("all")) <= PIECES_MAX + 1


def test_a_row_of_another_subtasks_key_is_an_error_of_the_snapshot(tmp_path: Path) -> None:
    groups = key_groups(pa.record_batch({"k": pa.array(range(100))}), ("k",), GROUPS).tolist()
    mine = [k for k in range(100) if groups[k] < 8]
    foreign = [k for k in range(100) if groups[k] >= 8]
    state = table(range(8))
    state.frame = rows(*((k, 0) for k in mine))
    snapshot = state.snapshot(CountingIds(), "operator 'x'")
    assert snapshot is not None and snapshot()
    state.append(rows((mine[0], 1), (foreign[0], 1), (foreign[1], 1)))
    snapshot = state.snapshot(CountingIds(), "operator 'x'")
    assert snapshot is not None
    message = (
        rf"operator 'x': state 'rows' holds 2 rows of keys .* the first with k={foreign[0]}: at another parallelism"
    )
    part = StatePart(Redistribute.KEYED, snapshot())
    with pytest.raises(JobError, match=message):
        store_parts(FileStorage(str(tmp_path)), [{"rows": part}], {}, "shared/file")
    assert not any(each.is_file() for each in tmp_path.rglob("*"))


def test_tables_of_several_subtasks_come_back_as_one() -> None:
    parts = []
    for start in (0, 100):
        state = table()
        state.frame = many(3, start)
        state.append(many(OWN_CHUNK_ROWS, start + 1000))
        snapshot = state.snapshot(CountingIds(), "here")
        assert snapshot is not None
        parts.extend(snapshot())
    back = table()
    back.restore(parts, "here")
    expected = [k for s in (0, 100) for k in (*range(s, s + 3), *range(s + 1000, s + 1000 + OWN_CHUNK_ROWS))]
    assert back.frame["k"].to_list() == expected
    other = table(schema={"k": int, "n": str})
    with pytest.raises(
        StorageError, match=r"here: state 'rows' in .* columns k int64, n int64; .*k int64, n large_string"
    ):
        other.restore(parts, "here")
