"""Logs of parts: bounded by what they merge to, in order, and stored chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from in_memory import CountingIds
from midstream.engine.core.key_groups import key_groups
from midstream.engine.state.columnar import (
    OWN_CHUNK_ROWS,
    STAGED_ROWS,
    STAGED_RUNS,
    PartLog,
    StateLayout,
    snapshot_runs,
)
from midstream.engine.state.state_parts import KEY_GROUP

SCHEMA = pa.schema([("k", pa.int64()), ("first", pa.int64()), ("n", pa.int64())])


def merge(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(parts).group_by("k", maintain_order=True).agg(pl.col("first").first(), pl.col("n").sum())


def part(keys: range, number: int) -> pl.DataFrame:
    return pl.DataFrame(
        {"k": keys, "first": [number] * len(keys), "n": [1] * len(keys)},
        schema=dict.fromkeys("k", pl.Int64) | {"first": pl.Int64, "n": pl.Int64},
    )


def test_a_log_is_at_most_twice_its_merged_size_and_a_bit_and_keeps_the_order() -> None:
    log = PartLog(merge)
    for number in range(300):
        log.append(part(range(1000), number))
        assert log.rows <= 1000 + STAGED_ROWS
        assert len(log.runs) <= STAGED_RUNS
    merged = log.merged()
    assert merged.height == 1000
    assert merged["n"].to_list() == [300] * 1000
    assert merged["first"].to_list() == [0] * 1000


def test_many_small_parts_do_not_pile_up() -> None:
    log = PartLog(merge)
    for number in range(1000):
        log.append(part(range(1), number))
        assert len(log.runs) <= STAGED_RUNS


def test_chunks_carry_the_key_groups_of_their_rows_and_keep_the_order_of_parts() -> None:
    layout = StateLayout(SCHEMA, ("k",), 16, pa.field("__pane", pa.timestamp("ms")))
    log = PartLog(merge)
    for number, keys in enumerate((range(3), range(OWN_CHUNK_ROWS), range(2))):
        log.append(part(keys, number))
    chunks = snapshot_runs([(7, log.runs)], layout, CountingIds()).beside()()
    assert [chunk.table.num_rows for chunk in chunks] == [3, OWN_CHUNK_ROWS, 2]
    for chunk in chunks:
        key_rows = chunk.table.select(["k"]).combine_chunks().to_batches()[0]
        assert chunk.table.column(KEY_GROUP).to_pylist() == key_groups(key_rows, ("k",), 16).tolist()
        assert set(chunk.table.column("__pane").cast(pa.int64()).to_pylist()) == {7}
    restored = PartLog(merge)
    for chunk in chunks:
        frame = pl.from_arrow(chunk.table.select(SCHEMA.names))
        assert isinstance(frame, pl.DataFrame)
        restored.restore(frame)
    assert restored.merged().sort("k").equals(log.merged().sort("k"))


def test_small_frames_of_many_logs_share_one_table_that_distinguishes_them() -> None:
    layout = StateLayout(SCHEMA, ("k",), 16, pa.field("__pane", pa.timestamp("ms")))
    logs = []
    for number in range(40):
        log = PartLog(merge)
        for keys in (range(number % 3), range(number, number + 4)):
            log.append(part(keys, number))
        logs.append((1000 * number - 7000, log.runs))
    (chunk,) = snapshot_runs(logs, layout, CountingIds()).beside()()
    assert chunk.table.schema.types[:2] == [pa.int32(), pa.timestamp("ms")]
    assert chunk.table.select(SCHEMA.names).to_pylist() == [
        row for _, runs in logs for run in runs for row in run.frame.to_dicts()
    ]
    assert chunk.table.column("__pane").cast(pa.int64()).to_pylist() == [
        number for number, runs in logs for run in runs for _ in range(run.frame.height)
    ]
    groups = chunk.table.column(KEY_GROUP).to_pylist()
    assert groups == key_groups(chunk.table.select(["k"]).to_batches()[0], ("k",), 16).tolist()
    apart = [group for _, runs in logs for run in runs for group in layout.groups_of(run).tolist()]
    assert apart == groups
    logs[0][1][1].groups = None  # known of all frames but one
    (again,) = snapshot_runs(logs, layout, CountingIds()).beside()()
    assert again.table.equals(chunk.table)
