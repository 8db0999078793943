"""Rows by key and time: each leaves once, and rows of a key at the same time in the order in which they were added."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from in_memory import CountingIds
from midstream.engine.state import columnar, join_index
from midstream.engine.state.join_index import JoinIndex
from on_disk import move_all

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("n", pa.int64())])
HELD_US = 2
ROWS = st.lists(st.tuples(st.sampled_from([0, 0, 1]), st.sampled_from([1, 1, 4])), min_size=1, max_size=5)
STEP = st.one_of(
    st.tuples(st.just("append"), ROWS),
    st.tuples(st.just("append"), ROWS),
    st.tuples(st.just("advance"), st.sampled_from([1, 3])),
    st.tuples(st.just("take"), st.integers(0, 1)),
    st.tuples(st.just("restore"), st.none()),
)


def index_of() -> JoinIndex:
    declared = JoinIndex(SCHEMA, "t", HELD_US, pl.col("t"))
    bound = declared.bound("rows", ["k"], range(8), 8)
    assert isinstance(bound, JoinIndex)
    return bound


def frame_of(rows: list[tuple[int, int, int]]) -> pl.DataFrame:
    columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
    return pl.DataFrame(pa.table([columns[0], columns[1].cast(pa.timestamp("us")), columns[2]], schema=SCHEMA))


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(STEP, max_size=14), st.sampled_from([(262_144, 8_192), (3, 2), (1, 1)]), st.booleans())
def test_rows_leave_once_and_in_the_order_of_their_arrival(
    plan: list[tuple[str, Any]], sizes: tuple[int, int], on_disk: bool
) -> None:
    """Whatever runs are merged, written again without what has left, restored, or moved to a disk."""
    with patch.object(join_index, "RUN_ROWS", sizes[0]), patch.object(columnar, "OWN_CHUNK_ROWS", sizes[1]):
        index, watermark, count = index_of(), 0, 0
        held: list[tuple[int, int, int]] = []
        for step, argument in plan:
            if step == "append":
                rows = [(k, watermark + t, count + i) for i, (k, t) in enumerate(argument)]
                count += len(rows)
                index.append(frame_of(rows))
                held += rows
            elif step == "advance":
                watermark += argument
                due = [row for row in held if row[1] + HELD_US <= watermark]
                held = [row for row in held if row not in due]
                assert by_key_and_time(index.pop_expired(watermark)) == by_key_and_time(due)
            elif step == "take" and held:
                asked = index.run_of(frame_of([(argument, held[0][1], -1)]))
                assert asked is not None
                found = index.matches(asked, 0, 0)
                same = [row for row in held if row[:2] == (argument, held[0][1])]
                assert (found is None) == (not same)
                if found is not None:
                    twice = np.concatenate([found.mine, found.mine])
                    assert by_key_and_time(index.take(twice)) == by_key_and_time(same)
                held = [row for row in held if row not in same]
            elif step == "restore":
                chunks = index.snapshot(CountingIds(), "here")
                index, dropped = index_of(), watermark
                if chunks is not None:
                    index.restore(chunks(), "here")
                    index.drop(lambda groups, mark=dropped: np.full(len(groups), mark))  # type: ignore[misc]
            if on_disk:
                move_all(index.held_runs())
            assert sorted(index.frame["n"]) == [n for _, _, n in held]
        assert by_key_and_time(index.pop_expired(10_000)) == by_key_and_time(held)
        assert index.snapshot(CountingIds(), "here") is None


def by_key_and_time(rows: pl.DataFrame | list[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of the rows of each key and time, in their order."""
    found: dict[tuple[int, int], list[int]] = {}
    given = rows if isinstance(rows, list) else rows.with_columns(pl.col("t").dt.epoch("us")).rows()
    for k, t, n in given:
        found.setdefault((k, t), []).append(n)
    return found
