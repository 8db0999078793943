"""Sources without an outside: the same rows for the same offset, always, and no faster than asked."""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Callable
from datetime import datetime
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from connector_worlds import all_splits, read_all, read_split, values
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.memory.collection_source import CollectionSource, from_rows
from midstream.connectors.memory.generator_source import GeneratorSource, call_generator
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.source_api import DiscoveryContext
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.source_reader import ReadProgress, SourceReader
from recovering import task_seams


def square(indices: np.ndarray) -> dict[str, Any]:
    return {"n": indices, "square": indices * indices}


# ---- generator ----


@settings(max_examples=examples(60))
@given(count=st.integers(0, 200), splits=st.integers(1, 9), rows_max=st.integers(1, 50), data=st.data())
def test_from_every_offset_exactly_the_rest_is_generated(count, splits, rows_max, data):
    source = GeneratorSource(square, count, splits=splits)
    assert source.bounded
    assert read_all(source, rows_max) == [{"n": n, "square": n * n} for n in range(count)]
    found = all_splits(source)
    assert len(found) == min(count, splits)
    if found:
        split = data.draw(st.sampled_from(found))
        rows, offsets = read_split(source, split, rows_max=1)
        for done, offset in enumerate(offsets, 1):
            assert read_split(source, msgspec.structs.replace(split, offset=offset), rows_max)[0] == rows[done:]


def test_without_a_number_of_splits_each_subtask_has_one():
    source = GeneratorSource(square, 10)
    assert len(all_splits(source, parallelism=3)) == 3
    assert source.splits_per_reader(3) == 1


def test_an_endless_generator_deals_out_all_indices_and_never_ends():
    source = GeneratorSource(square, splits=3)
    assert not source.bounded
    splits = all_splits(source, parallelism=2)
    assert len(splits) == 3
    assert source.splits_per_reader(2) == 2
    seen: list[int] = []
    for split in splits:
        reader = source.open_split(split)
        for _ in range(4):
            part = reader.read(5)
            assert part is not None
            batch, offset = part
            seen += to_list(batch.column("n"))
        assert offset == 20
        later_part = source.open_split(msgspec.structs.replace(split, offset=7)).read(5)
        assert later_part is not None
        later, _ = later_part
        assert later.column("n").to_pylist() == list(range(int(split.id) + 21, int(split.id) + 36, 3))
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(
    "form",
    [
        lambda i: {"n": i, "s": [f"x{k}" for k in i]},
        lambda i: pa.record_batch({"n": pa.array(i), "s": pa.array([f"x{k}" for k in i])}),
        lambda i: pl.DataFrame({"n": i, "s": [f"x{k}" for k in i]}),
    ],
)
def test_every_form_of_rows_is_taken(form):
    source = cloudpickle.loads(cloudpickle.dumps(GeneratorSource(form, 5)))
    assert source.schema == schema_of([("n", pa.int64()), ("s", pa.large_string())])
    assert read_all(source, rows_max=2) == [{"n": n, "s": f"x{n}"} for n in range(5)]


def later_only(wrong: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    """Right for the sample that the schema is taken from."""
    return lambda i: square(i) if i[0] < 4 else wrong(i)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (
            lambda i: 1 / 0,
            JobError,
            "called with an array of the indices 4 to 7, failed: ZeroDivisionError: division by zero",
        ),
        (
            lambda i: [1, 2],
            JobError,
            "returned list; it must return a record batch, a polars frame or a dict of columns",
        ),
        (
            lambda i: {"n": i[:1], "square": i[:1]},
            JobError,
            "returned 1 rows; it must return one for each of the 4 indices",
        ),
        (lambda i: {"n": i}, SchemaError, "GeneratorSource: column 'square' is missing; got n"),
        (lambda i: {"n": i, "square": ["x"] * len(i)}, SchemaError, "column 'square' is string, declared as int64"),
        (lambda i: {**square(i), "z": i}, SchemaError, "column 'z' is not in the declared schema"),
        (lambda i: {"n": i, "square": i[:1]}, SchemaError, "column 'square' has 1 rows, column 'n' 4"),
        (lambda i: {}, SchemaError, "the function returned no columns"),
    ],
)
def test_what_the_function_does_wrong_is_named_with_the_indices(wrong, kind, says):
    source = GeneratorSource(later_only(wrong), 8, splits=2)
    with pytest.raises(kind) as caught:
        read_all(source)
    assert says in str(caught.value)


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="3 is not a function of an array of indices"):
        GeneratorSource(3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="count -1 is not a whole number"):
        GeneratorSource(square, -1)
    with pytest.raises(ConfigError, match="splits 0 is not a positive whole number"):
        GeneratorSource(square, 1, splits=0)
    with pytest.raises(ConfigError, match="rows_per_s -5 is not a positive number"):
        GeneratorSource(square, 1, rows_per_s=-5)
    with pytest.raises(JobError, match="called with an array of the indices 0 to 3, failed: KeyError"):
        GeneratorSource(lambda i: {"n": {"n": i}}["x"])


# ---- rate ----


class FakeTime:
    """Clock and executor in one: time passes only when everything waits for it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> Any:
        heapq.heappush(self._timers, (self.now_s + delay_s, len(self._timers), mail))
        return self

    def cancel(self) -> None:
        self._timers.clear()

    def pass_until_next_timer(self) -> None:
        self.now_s, _, mail = heapq.heappop(self._timers)
        mail()


@pytest.mark.parametrize("rows_per_s", [3.0, 1000.0, 250_000.0])
def test_a_rate_limit_is_kept_over_any_second_and_reached_in_the_long_run(rows_per_s):
    time = FakeTime()
    emitted: list[tuple[float, int]] = []
    source = GeneratorSource(square, rows_per_s=rows_per_s, splits=2)
    driver = SourceReader(
        source,
        1,
        task_seams(time, None, clock=time, config=JobConfig(name="job", batch_rows=131_072)),  # type: ignore[arg-type]  # a stand-in
        emit=lambda batch: emitted.append((time.now_s, batch.num_rows)),
        emit_bad=pytest.fail,  # type: ignore[arg-type]  # a stand-in
        request_split=lambda: None,
        limit=DriftLimit(lambda lowest_us, splits: None),
        wake=lambda: None,
        fail=pytest.fail,  # type: ignore[arg-type]  # a stand-in
    )
    for split in all_splits(source):
        driver.add_split(msgspec.msgpack.encode(split))
    while time.now_s < 120.0:
        if driver.step() is ReadProgress.WAITING:
            time.pass_until_next_timer()
    driver.close()
    total = sum(rows for _, rows in emitted)
    assert rows_per_s * 20 * 0.99 - 1 <= total <= rows_per_s * 20 * 1.01 + 2
    for second in range(100, 119):
        within = sum(rows for at, rows in emitted if second <= at < second + 1)
        assert within <= rows_per_s * 1.2 + 1


# ---- collections ----


@settings(max_examples=examples(40))
@given(count=st.integers(0, 60), splits=st.integers(1, 5), rows_max=st.integers(1, 25), data=st.data())
def test_from_every_offset_exactly_the_rest_of_a_collection_is_read(count, splits, rows_max, data):
    source = pickle.loads(
        pickle.dumps(CollectionSource(pa.table({"n": pa.array(range(count), pa.int64())}), splits=splits))
    )
    assert source.bounded
    assert values(read_all(source, rows_max)) == list(range(count))
    found = all_splits(source)
    if found:
        split = data.draw(st.sampled_from(found))
        rows, offsets = read_split(source, split, rows_max=1)
        for done, offset in enumerate(offsets, 1):
            assert read_split(source, msgspec.structs.replace(split, offset=offset), rows_max)[0] == rows[done:]


def test_rows_of_dicts_are_inferred_or_declared():
    at = datetime(2020, 1, 1)
    inferred = from_rows([{"a": 1, "t": at}, {"a": None, "s": "x"}])
    assert inferred.schema == schema_of([("a", pa.int64()), ("t", pa.timestamp("us")), ("s", pa.large_string())])
    assert read_all(inferred) == [{"a": 1, "t": at, "s": None}, {"a": None, "t": None, "s": "x"}]
    declared = from_rows([{"a": 1}], schema_of([("a", pa.float64()), ("b", pa.string())]))
    assert read_all(declared) == [{"a": 1.0, "b": None}]
    assert read_all(from_rows([], pa.schema([("a", pa.int64())]))) == []


def test_tables_and_batches_are_taken():
    frame = pl.DataFrame({"n": [1, 2], "c": pl.Series(["x", "y"], dtype=pl.Categorical)})
    expected = [{"n": 1, "c": "x"}, {"n": 2, "c": "y"}]
    assert read_all(CollectionSource(frame.to_arrow())) == expected
    assert read_all(CollectionSource(frame.to_arrow().to_batches()[0])) == expected
    chunked = pa.concat_tables([frame.to_arrow()] * 3)
    assert read_all(CollectionSource(chunked)) == expected * 3


@pytest.mark.parametrize(
    ("values", "row", "says"),
    [
        ([1, None, "x", "y"], 2, r"with 'x' \(str\), after values of type int64; give a schema"),
        ([None, None, object()], 2, r"with <object .*> \(object\); give a schema"),
        ([2**70], 0, r"with 1180591620717411303424 \(int\); give a schema"),
        ([1, [1]], 1, r"with \[1\] \(list\), after values of type int64"),
        (["a", "\ud800"], 1, r"with '\\ud800' \(str\), after values of type string"),
    ],
)
def test_the_first_value_with_which_no_type_can_be_inferred_is_named(values, row, says):
    with pytest.raises(SchemaError, match=f"^from_collection: column 'a' of row {row}: no type can be inferred {says}"):
        from_rows([{"a": value} for value in values])


def test_what_is_no_collection_of_rows_is_refused():
    with pytest.raises(SchemaError, match="row 1 is int, not a dict"):
        from_rows([{"a": 1}, 3])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(SchemaError, match=r"a pandas DataFrame; convert it with pl\.from_pandas\(…\)"):
        from_rows(pd.DataFrame({"a": [1]}))
    with pytest.raises(SchemaError, match="no rows to infer the columns from; give a schema"):
        from_rows([])
    with pytest.raises(SchemaError, match="column 'b' of row 0 is not in the declared schema"):
        from_rows([{"b": 1}], pa.schema([("a", pa.int64())]))


def test_a_source_is_asked_once_and_says_that_there_is_no_more():
    context = DiscoveryContext("src", 2, None)
    for source in (GeneratorSource(square, 4), from_rows([{"a": 1}])):
        found = source.discover(None, context)
        assert found.exhausted
        assert source.discover(found.position, context).splits == ()


@pytest.mark.parametrize("column", ["abcd", b"abcd", 1, np.int64(1), None, {1, 2, 3, 4}, {"a": 1}, iter([1, 2, 3, 4])])
def test_a_column_of_the_generator_is_not_a_text_or_a_single_value(column: Any) -> None:
    with pytest.raises(
        JobError, match=r"column 'c' is .*; return an array, a list or a Series with a value for each index"
    ):
        call_generator(lambda i: {"i": i, "c": column}, np.arange(4))


@pytest.mark.parametrize("column", [[1, 2], (1, 2), range(1, 3), pl.Series([1, 2]), pa.array([1, 2]), np.array([1, 2])])
def test_a_column_of_the_generator_is_anything_with_a_value_for_each_index(column: Any) -> None:
    assert call_generator(lambda i: {"c": column}, np.arange(2)).column("c").to_pylist() == [1, 2]
