"""The benchmarks' workloads and how results are gathered: closed forms against plain sums."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from committers import committer_of
from midstream import Environment, WatermarkStrategy, testing
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.operators.sink_api import WriterContext
from midstream_lab.bench import checkpoint, exchange, keyed_process, lookup, operators, sliding, strings, udf, window
from midstream_lab.bench.events import Events
from midstream_lab.bench.latency import BUCKETS, GROWTH, percentile_ms
from midstream_lab.bench.measuring import require
from midstream_lab.bench.summing_sink import SummingSink, column_sum


@pytest.mark.parametrize(
    ("count", "lanes", "columns"), [(2, 2, 1), (1000, 2, 1), (1002, 2, 3), (31_998, 1, 2), (2_000_000, 8, 1)]
)
def test_the_closed_forms_are_those_of_the_events(count, lanes, columns):
    events = Events(count, lanes=lanes, columns=columns)
    batch = events(np.arange(count))
    assert [column_sum(batch, name) for name in events.values] == events.value_sums
    assert len(events.values) == columns


@pytest.mark.parametrize(("count", "lanes", "keys"), [(2, 2, 10), (1_234_002, 3, 1000), (2_000_000, 8, 7), (90, 1, 50)])
def test_pairs_of_windows_and_keys_are_counted_as_they_are(count, lanes, keys):
    events = Events(count, lanes=lanes, keys=keys)
    batch = events(np.arange(count))
    ms, key = milliseconds(batch), batch.column("key").to_numpy()
    assert events.pairs() == len(np.unique(ms // 10_000 * keys + key))
    assert events.pairs(keys=3) == len(np.unique(ms // 10_000 * 3 + key % 3))
    sliding = [(ms // 2_000 + later) * keys + key for later in range(5)]
    assert events.pairs(slide_ms=2_000) == len(np.unique(np.concatenate(sliding)))


def milliseconds(batch: pa.RecordBatch) -> np.ndarray:
    return batch.column("ts").cast(pa.int64()).to_numpy()


@pytest.mark.parametrize("lanes", [1, 2, 4, 5])
def test_all_parts_of_the_events_cover_the_same_time_and_all_keys(lanes):
    events = Events(1_000_000, lanes=lanes)
    batch = events(np.arange(events.count))
    parts = milliseconds(batch).reshape(lanes, -1)
    assert (parts == parts[0]).all()
    assert (np.diff(parts[0]) >= 0).all()
    assert parts.max() == 9_999  # a hundred events a millisecond, however many parts there are
    assert len(np.unique(batch.column("key"))) == 10_000


def test_events_that_cannot_be_dealt_out_evenly_are_refused():
    with pytest.raises(ConfigError, match="1,001 events cannot be distributed evenly to 2 subtasks"):
        Events(1001)


def test_what_scores_come_to_is_what_the_function_makes_of_the_rows():
    events = Events(30_000)
    rows = events(np.arange(events.count)).to_pylist()
    assert math.isclose(udf.score_sum(events), sum(udf.label(row)["score"] for row in rows), rel_tol=1e-12)


def test_payloads_are_as_long_as_they_should_be_and_their_numbers_those_of_the_events():
    texts = strings.Texts(140_000)
    batch = texts(np.arange(texts.count))
    assert set(pc.binary_length(cast("pa.LargeStringArray", batch.column("payload"))).to_pylist()) == {
        strings.PAYLOAD_BYTES
    }
    largest: dict[tuple[int, str], str] = {}
    for ms, key, payload in zip(
        milliseconds(batch), to_list(batch.column("key")), to_list(batch.column("payload")), strict=True
    ):
        at = (ms // 10_000, key)
        largest[at] = max(largest.get(at, ""), payload)
    assert texts.numbers_sum() == sum(int(payload[:4], 16) for payload in largest.values())


@pytest.mark.parametrize("name", operators.CASES)
def test_what_is_expected_of_an_operator_is_what_it_makes_of_the_events(name, monkeypatch):
    case = replace(operators.CASES[name], keys=40)
    monkeypatch.setitem(cast("dict[str, operators.Case]", operators.CASES), name, case)
    monkeypatch.setattr(operators, "WITHIN_MS", 20)
    monkeypatch.setattr(operators, "REPEATED_AFTER", 700)
    events = operators.OperatorEvents(6000, lanes=1, case=name)
    source = Environment("bench").source(GeneratorSource(events, events.count, schema=events.schema, splits=1))
    rows = testing.run(case.build(source.with_watermarks("ts", WatermarkStrategy.monotonous())), cut="whole").rows
    sums = [sum(row[column] or 0 for row in rows) for column in case.checked]
    assert dict(zip(("rows", *case.checked), [len(rows), *sums], strict=True)) == operators.expected(name, 6000, 1)
    assert sums[0] > 0


@pytest.mark.systems
@pytest.mark.parametrize("benchmark", [window, udf, lookup, keyed_process, strings, sliding, operators, exchange])
def test_a_benchmark_of_few_events_has_a_right_result_and_figures(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "WARM_UP_PER_SUBTASK", 100)
    result = benchmark.run("process", events=3000, parallelism=1)
    assert (result.events, result.parallelism, result.correct) == (3000, 1, True)
    assert result.events_per_s > 0
    assert result.memory_mb == result.slot_memory_mb > 0


class Rows:
    def __call__(self, batch: pa.RecordBatch) -> np.ndarray:
        return np.array([float(batch.num_rows)])


def writer(sink: SummingSink, subtask: int, attempt: int = 0):
    nothing = lambda *_: None  # noqa: E731
    return sink.writer(WriterContext("s", "sink", subtask, attempt, "job", pa.schema([]), None, nothing))  # type: ignore[arg-type]  # a stand-in


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch({"x": list(range(count))})


def test_what_is_committed_counts_once_however_often_it_is_committed():
    sink = SummingSink(Rows(), 1)
    committer = committer_of(sink, "job")
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
    committer = committer_of(sink, "job")
    first = writer(sink, 0)
    first.write(rows(3))
    committer.commit(1, first.prepare(1)())
    assert pickle.loads(pickle.dumps(sink)).total.tolist() == [0.0]
    committer_of(sink, "another job")
    assert sink.total.tolist() == [0.0]


def test_percentiles_are_those_of_the_histogram():
    counts = np.zeros(BUCKETS)
    counts[100], counts[200] = 90, 10
    assert percentile_ms(counts, 0.5) == round(GROWTH**101 / 1000, 2)
    assert percentile_ms(counts, 0.99) == round(GROWTH**201 / 1000, 2)


def test_a_wrong_result_is_an_error_and_not_a_figure():
    with pytest.raises(InvariantError, match="but must be 20"):
        require("the sum", 20, 19)
    with pytest.raises(InvariantError, match="nan"):
        require("the sum", 20, float("nan"), 0.5)
    require("the sum", 20, 19, 0.1)


def test_rows_of_the_checkpoint_benchmark_have_their_size():
    batch = checkpoint.Rows()(np.arange(3))
    assert batch.column("n").to_pylist() == [0, 1, 2]
    assert batch.get_total_buffer_size() - 4 * 8 == 3 * checkpoint.ROW_BYTES


@pytest.mark.systems
def test_a_mode_of_the_checkpoint_benchmark_has_figures_and_rows_in_flight():
    figures = checkpoint._measured("process", 0, 5, 5)
    assert (figures.checkpoints, figures.failed) == (5, 0)
    assert 0 < figures.p50_ms <= figures.p99_ms <= figures.max_ms
    assert figures.in_flight_mib > 0
