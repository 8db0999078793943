"""Parts by key and end, against a plain list: taken, dropped and stored are the right ones, in the order they were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import to_polars
from midstream.engine.core.key_groups import key_groups
from midstream.engine.state import columnar
from midstream.engine.state.columnar import StateLayout, snapshot_runs
from midstream.engine.state.session_index import RUNS_MAX, SessionIndex
from midstream.engine.state.state_parts import KEY_GROUP, Chunk
from on_disk import move_all

Part = tuple[str, int, tuple[int, ...]]
"""Its key, when it ends, and the numbers of the parts that it was made of."""
SCHEMA = schema_of([("k", pa.large_string()), ("end", pa.int64()), ("made_of", pa.large_list(pa.int64()))])

keys = st.sets(st.sampled_from("abcdef"), min_size=1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30)), max_size=9)),
        st.tuples(st.just("take"), keys),
        st.tuples(st.just("take and put back"), keys),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("ended"), st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))),
    ),
    max_size=20,
)


def frame_of(parts: Sequence[Part]) -> pl.DataFrame:
    columns = [list(column) for column in zip(*parts, strict=True)] or [[], [], []]
    schema: dict[str, Any] = {"k": pl.String, "end": pl.Int64, "made_of": pl.List(pl.Int64)}
    return pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)


def merge(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """One part for each key and end."""
    grouped = pl.concat(frames).group_by("k", "end", maintain_order=True)
    return grouped.agg(pl.col("made_of").explode())


def merged(parts: Sequence[Part]) -> dict[tuple[str, int], list[int]]:
    made: dict[tuple[str, int], list[int]] = {}
    for key, end, numbers in parts:
        made.setdefault((key, end), []).extend(numbers)
    return made


def found(frames: Sequence[pl.DataFrame]) -> dict[tuple[str, int], list[int]]:
    return merged([(key, end, tuple(numbers)) for frame in frames for key, end, numbers in frame.iter_rows()])


class Beside:
    """An index, and the same parts in a list."""

    def __init__(self, on_disk: bool = False) -> None:
        self.index = SessionIndex(["k"], "end", merge)
        self.on_disk = on_disk
        self.parts: list[Part] = []
        self.count = 0
        self.stored: list[tuple[list[pl.DataFrame], dict[tuple[str, int], list[int]]]] = []
        self.snapshots: list[tuple[Callable[[], tuple[Chunk, ...]], dict[tuple[str, int], list[int]]]] = []
        self.layout, self.ids = StateLayout(SCHEMA, ("k",), 16), CountingIds()

    def take(self, wanted: set[str]) -> pl.DataFrame | None:
        taken = self.index.take(frame_of([(key, 0, ()) for key in sorted(wanted)]).select("k"))
        assert taken is None or taken.height
        assert found([] if taken is None else [taken]) == merged([part for part in self.parts if part[0] in wanted])
        self.parts = [part for part in self.parts if part[0] not in wanted]
        return taken

    def step(self, step: str, argument: Any) -> None:
        match step:
            case "append":
                new = [(key, end, (self.count + at,)) for at, (key, end) in enumerate(argument)]
                self.count += len(new)
                self.parts += new
                self.index.append(frame_of(new))
            case "take":
                self.take(argument)
            case "take and put back":
                before = [part for part in self.parts if part[0] in argument]
                taken = self.take(argument)
                if taken is not None:
                    self.index.append(merge([taken]))
                self.parts += before
            case "remove":
                self.index.remove_ended(argument)
                self.parts = [part for part in self.parts if part[1] > argument]
            case "compact":
                self.index.compact()
            case "ended":
                after, until, again = argument[0], argument[1], min(argument[1:])
                keys_found = self.index.keys_of_ended(after, until, again)
                expected = {key for key, end, _ in self.parts if end <= until and (end > after or end <= again)}
                listed = [] if keys_found is None else keys_found.get_column("k").to_list()
                assert len(listed) == len(set(listed)) and set(listed) == expected
        self.check()

    def check(self) -> None:
        if self.on_disk:
            move_all(self.index.runs)
        living = [run.living for run in self.index.runs]
        assert found([run.frame for run in living]) == merged(self.parts)
        assert [run.rows for run in living] == [run.frame.height for run in living]
        assert all(run.rows for run in living), "a run without rows"
        assert self.index.first_end <= min((end for _, end, _ in self.parts), default=2**63)
        for frames, expected in self.stored:
            assert found(frames) == expected, "what a snapshot refers to has changed"
        self.stored.append(([run.frame for run in living], merged(self.parts)))
        self.snapshots.append(
            (snapshot_runs([(0, self.index.runs)], self.layout, self.ids).beside(), merged(self.parts))
        )

    def check_snapshots(self) -> None:
        """They are written late, and hold what was there when they were taken. One id stands for one content."""
        seen: dict[str, pa.Table] = {}
        for write, expected in self.snapshots:
            chunks = write()
            assert found([to_polars(chunk.table.drop_columns([KEY_GROUP])) for chunk in chunks]) == expected
            for each in (each for chunk in chunks for each in (chunk, *chunk.removed)):
                assert seen.setdefault(each.id, each.stored).equals(each.stored)


@settings(max_examples=examples(400))
@given(steps, st.sampled_from([1, 3, 8_192]), st.booleans())
def test_an_index_has_what_a_list_of_parts_has(plan: list[tuple[str, Any]], own: int, on_disk: bool) -> None:
    with patch.object(columnar, "OWN_CHUNK_ROWS", own):
        beside = Beside(on_disk)
        for step, argument in plan:
            beside.step(step, argument)
        beside.check_snapshots()


@settings(max_examples=examples(200))
@given(steps)
def test_keys_with_the_same_hash_are_distinguished(plan: list[tuple[str, Any]]) -> None:
    def hashes(_: object, frame: pl.DataFrame) -> Any:
        return np.array([ord(key) % 2 for key in frame.get_column("k")], np.uint64)

    with patch.object(SessionIndex, "_hashes", hashes):
        beside = Beside()
        for step, argument in plan:
            beside.step(step, argument)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_there_are_few_runs_however_much_is_appended(rows: int) -> None:
    index = SessionIndex(["k"], "end", merge)
    for number in range(300):
        index.append(frame_of([(f"{number} {at}", at, (0,)) for at in range(rows)]))
        index.compact()
        assert len(index.runs) <= RUNS_MAX
    assert sum(run.rows for run in index.runs) == 300 * rows


def test_what_a_snapshot_refers_to_is_the_same_run_as_long_as_nothing_of_it_goes() -> None:
    index = SessionIndex(["k"], "end", merge)
    index.append(frame_of([(f"{at}", at, (at,)) for at in range(9)]))
    index.remove_ended(2)
    living = index.runs[0].living
    index.append(frame_of([("new", 20, (9,))]))
    assert index.runs[0].living is living
    index.remove_ended(3)
    assert index.runs[0].living is not living
    assert living.rows == 6 and living.frame.height == 6


def test_a_snapshot_that_is_written_when_parts_have_gone_leaves_the_key_groups_of_the_others_right() -> None:
    layout, ids = StateLayout(SCHEMA, ("k",), 16), CountingIds()
    index = SessionIndex(["k"], "end", merge)
    index.append(frame_of([(f"first {at}", 1, (at,)) for at in range(3)]))
    index.append(frame_of([(f"second {at}", 5, (at,)) for at in range(20)]))
    write = snapshot_runs([(0, index.runs)], layout, ids).beside()
    index.remove_ended(1)
    write()
    (chunk,) = snapshot_runs([(0, index.runs)], layout, ids).beside()()
    keys = pa.record_batch([chunk.table.column("k").combine_chunks()], ["k"])
    assert chunk.table.column(KEY_GROUP).to_pylist() == key_groups(keys, ("k",), 16).tolist()
