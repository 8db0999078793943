"""Rows are combined before they are sent where that leaves few of them, and it costs next to nothing where it does not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from midstream.engine.exchange.adaptive_combiner import (
    PAUSE_MAX,
    PROBE_PARTS,
    REDUCTION_MIN,
    ROWS_MIN,
    AdaptiveCombiner,
)
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning

SCHEMA = pa.schema([("key", pa.int64())])


class Distinct:
    """A combiner that leaves the distinct keys, and counts how often it is called."""

    schema = pa.schema([("key", pa.int64()), ("rows", pa.int64())])

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: list[int] = []

    def combine(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        self.calls += 1
        self.sizes.append(rows.num_rows)
        keys, counts = np.unique(rows.column("key").to_numpy(), return_counts=True)
        return pa.RecordBatch.from_arrays([pa.array(keys), pa.array(counts)], schema=self.schema)


def batch(rows: int, keys: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"key": [row % keys for row in range(rows)]}, schema=SCHEMA)


def test_a_batch_is_combined_if_few_rows_are_left() -> None:
    combining = AdaptiveCombiner(Distinct())
    keys = 10_000  # in turn, so that none of them comes twice in the first rows
    rows = keys * REDUCTION_MIN
    few, many = batch(rows, keys), batch(rows, keys + 1)
    combined = combining.apply(few)
    assert combined.schema == Distinct.schema and combined.num_rows == keys
    assert combined.column("rows").to_numpy().sum() == rows
    assert combining.apply(many) is many


def test_a_small_batch_is_not_even_tried() -> None:
    combiner = Distinct()
    rows = batch(ROWS_MIN - 1, 1)
    assert AdaptiveCombiner(combiner).apply(rows) is rows
    assert combiner.calls == 0


def test_where_it_never_pays_it_is_hardly_tried() -> None:
    combiner = Distinct()
    combining = AdaptiveCombiner(combiner)
    rows = batch(ROWS_MIN, ROWS_MIN)
    doublings = PAUSE_MAX.bit_length()
    for _ in range(100 * PAUSE_MAX):
        assert combining.apply(rows) is rows
    assert 90 < combiner.calls <= 100 + doublings


def test_no_more_than_the_first_rows_are_reduced_where_these_are_too_many() -> None:
    combiner = Distinct()
    combining = AdaptiveCombiner(combiner)
    many = batch(4 * ROWS_MIN, 4 * ROWS_MIN)
    for _ in range(10 * PAUSE_MAX):
        combining.apply(many)
    assert set(combiner.sizes) == {4 * ROWS_MIN // PROBE_PARTS}
    alike = batch(4 * ROWS_MIN, 1)
    few = [combining.apply(alike) for _ in range(PAUSE_MAX + 2)]
    assert {combined.num_rows for combined in few[-2:]} == {1}
    assert combiner.sizes[-1] == combiner.sizes[-2] == 4 * ROWS_MIN, "once it pays, nothing is tried first"


def test_where_it_pays_again_it_is_tried_again_and_then_always_done() -> None:
    combiner = Distinct()
    combining = AdaptiveCombiner(combiner)
    unlike, alike = batch(ROWS_MIN, ROWS_MIN), batch(ROWS_MIN, 1)
    for _ in range(10 * PAUSE_MAX):
        combining.apply(unlike)
    waited = 0
    while combining.apply(alike) is alike:
        waited += 1
    assert waited <= PAUSE_MAX
    assert all(combining.apply(alike) is not alike for _ in range(10))
    for _ in range(2):
        assert combining.apply(unlike) is unlike
        assert combining.apply(alike) is not alike, "after a single failure there is no pause"
    assert combining.apply(unlike) is unlike
    assert combining.apply(unlike) is unlike
    assert combining.apply(alike) is alike, "after a second one in a row there is"
    assert combining.apply(alike) is not alike


def test_rows_for_one_consumer_in_the_same_slot_are_not_combined() -> None:
    pool = BufferPool(64, 4096)
    for is_local, is_combined in ((True, False), (False, True)):
        combiner = Distinct()
        edge = Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("key",), combiner=combiner)
        partition = ResultPartition(edge, 0, range(1), 128, pool, 100)
        partition.subpartitions[0].is_local = is_local
        partition.emit(batch(ROWS_MIN, 10))
        assert partition.rows_out == (10 if is_combined else ROWS_MIN)
        assert bool(combiner.calls) == is_combined
