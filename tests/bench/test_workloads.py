"""The benchmarks' workloads and how results are gathered: closed forms against plain sums."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from midstream.bench import checkpoint
from midstream.bench.events import Events
from midstream.bench.latency import BUCKETS, GROWTH, percentile_ms
from midstream.bench.measuring import require
from midstream.bench.summing_sink import SummingSink, column_sum
from midstream.core.errors import InvariantError
from midstream.operators.sink import WriterContext


@pytest.mark.parametrize("count", [2, 1000, 1002, 31_998, 2_000_000])
def test_the_closed_forms_are_those_of_the_events(count):
    events = Events(count)
    batch = events(np.arange(count))
    assert column_sum(batch, "value") == events.value_sum
    ms = batch.column("ts").cast(pa.int64()).to_numpy()
    assert len(np.unique(ms // 10_000)) == events.windows


def test_both_halves_of_the_events_cover_the_same_time_and_all_keys():
    events = Events(1_000_000)
    batch = events(np.arange(events.count))
    ms = batch.column("ts").cast(pa.int64()).to_numpy()
    assert np.array_equal(ms[:500_000], ms[500_000:])
    assert (np.diff(ms[:500_000]) >= 0).all()
    assert len(np.unique(batch.column("key"))) == 10_000


class Rows:
    def __call__(self, batch: pa.RecordBatch) -> np.ndarray:
        return np.array([float(batch.num_rows)])


def writer(sink: SummingSink, subtask: int, attempt: int = 0):
    nothing = lambda *_: None  # noqa: E731
    return sink.writer(WriterContext("s", "sink", subtask, attempt, "job", pa.schema([]), None, nothing))


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch({"x": list(range(count))})


def test_what_is_committed_counts_once_however_often_it_is_committed():
    sink = SummingSink(Rows(), 1)
    committer = sink.committer("job")
    first, second = writer(sink, 0), writer(sink, 1)
    first.write(rows(3))
    second.write(rows(4))
    prepared = [*first.prepare(1)(), *second.prepare(1)()]
    first.write(rows(100))  # never committed
    committer.commit(1, prepared)
    committer.commit(1, prepared)
    assert sink.total.tolist() == [7.0]
    assert second.prepare(2) is None


def test_a_sink_travels_without_its_results_and_starts_over_with_every_job():
    sink = SummingSink(Rows(), 1)
    committer = sink.committer("job")
    first = writer(sink, 0)
    first.write(rows(3))
    committer.commit(1, first.prepare(1)())
    assert pickle.loads(pickle.dumps(sink)).total.tolist() == [0.0]
    sink.committer("another job")
    assert sink.total.tolist() == [0.0]


def test_percentiles_are_those_of_the_histogram():
    counts = np.zeros(BUCKETS)
    counts[100], counts[200] = 90, 10
    assert percentile_ms(counts, 0.5) == round(GROWTH**101 / 1000, 2)
    assert percentile_ms(counts, 0.99) == round(GROWTH**201 / 1000, 2)


def test_a_wrong_result_is_an_error_and_not_a_figure():
    with pytest.raises(InvariantError, match="it must be 20"):
        require("the sum", 20, 19)


def test_rows_of_the_checkpoint_benchmark_have_their_size():
    batch = checkpoint.Rows()(np.arange(3))
    assert batch.column("n").to_pylist() == [0, 1, 2]
    assert batch.get_total_buffer_size() - 4 * 8 == 3 * checkpoint.ROW_BYTES


def test_a_mode_of_the_checkpoint_benchmark_has_figures_and_rows_in_flight():
    figures = checkpoint._measured("process", 0, 5, 5)
    assert (figures.checkpoints, figures.failed) == (5, 0)
    assert 0 < figures.p50_ms <= figures.p99_ms <= figures.max_ms
    assert figures.in_flight_mib > 0
