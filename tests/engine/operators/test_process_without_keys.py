"""Process functions on streams without keys: side outputs, metrics and failed rows, and what is refused."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World

from effort import examples
from midstream import testing
from midstream.api.environment import Environment
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.operators.failed_rows import FAILED
from midstream.engine.operators.functions.batch_functions import KeyedBatchFunction
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessFunction
from midstream.engine.state.keyed_states import ValueState

TYPES: dict[str, pa.DataType] = {"n": pa.int64(), "text": pa.string()}
SCHEMA = pa.schema(TYPES)
rows = st.lists(
    st.fixed_dictionaries({"n": st.integers(-20, 20) | st.none(), "text": st.text(max_size=3) | st.none()}), max_size=30
)


class Sorting(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        ctx.metrics.counter("rows").inc()
        assert ctx.key is None
        n = row["n"]
        if n is None:
            return None
        if n % 7 == 0:
            ctx.side_output("sevens", {"n": n})
        if n % 5 == 0:
            raise ValueError(n)
        if n % 2:
            return row
        return ({"n": n + add, "text": row["text"]} for add in range(n % 3))


def by_hand(given: list[dict[str, Any]]) -> dict[str, list[Any]]:
    main, sevens, failed = [], [], []
    for row in given:
        n = row["n"]
        if n is None:
            continue
        if n % 5 == 0:
            failed.append(row)
            continue
        if n % 7 == 0:
            sevens.append({"n": n})
        main += [row] if n % 2 else [{**row, "n": n + add} for add in range(n % 3)]
    return {"main": main, "sevens": sevens, "failed": failed}


@settings(max_examples=examples(60))
@given(rows, st.lists(st.integers(0, 30), max_size=4), st.integers(1, 3))
def test_results_do_not_depend_on_cuts(given: list[dict[str, Any]], cuts: list[int], parallelism: int) -> None:
    stream = Environment("p").from_collection(given, schema=SCHEMA, splits=1)
    made = stream.process(Sorting(), SCHEMA, side_outputs={"sevens": {"n": int}}, on_error="side_output")
    operator = made.core.program.graph.nodes[made.core.origins[0].node].operator
    assert operator is not None
    worlds = [World(operator, subtask=subtask, parallelism=parallelism) for subtask in range(parallelism)]
    batch = pa.RecordBatch.from_pylist(given, stream.schema)
    bounds = sorted({0, *(min(cut, len(given)) for cut in cuts), len(given)})
    found: dict[str, list[Any]] = {"main": [], "sevens": [], "failed": []}
    for turn, (start, stop) in enumerate(pairwise(bounds)):
        world = worlds[turn % parallelism]
        world.process(batch.slice(start, stop - start))
        found["main"] += world.out.rows()
        found["sevens"] += world.out.rows("sevens")
        found["failed"] += [row["row"] for row in world.out.rows(FAILED)]
        world.out.clear()
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
        assert not world.out.rows()
    assert found == by_hand(given)


class Same(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        return row


def test_watermarks_after_it_may_follow_each_split() -> None:
    """A watermark generator after it, in the task of the source, has the rows of each split apart."""
    stream = Environment("p").from_collection([{"n": 1}])
    keyed = stream.key_by("n").process(Keyed(), stream.schema)
    kept = []
    for made in (stream.process(Same(), stream.schema), keyed):
        operator = made.core.program.graph.nodes[made.core.origins[0].node].operator
        assert operator is not None
        kept.append(operator.keeps_splits)
    assert kept == [True, False]


def test_the_harness_calls_it() -> None:
    sorting = testing.harness(Sorting(), SCHEMA, SCHEMA, side_outputs={"sevens": {"n": int}})
    assert sorting.process([{"n": 7, "text": "a"}, {"n": 1, "text": None}]) == [
        {"n": 7, "text": "a"},
        {"n": 1, "text": None},
    ]
    assert sorting.side_output("sevens") == [{"n": 7}]


class Keyed(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        return row


class WithState(Same):
    seen = ValueState(bool)


class WithTimers(Same):
    def on_timer(self, time: datetime, ctx: Any) -> None: ...


class SetsTimers(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> None:
        ctx.timers.processing_time(ctx.now)


class Later(KeyedProcessFunction):
    count = ValueState(int, default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        self.count.value += 1
        ctx.timers.processing_time(ctx.now + timedelta(minutes=1))

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        return {"n": self.count.value}


class OfBatches(KeyedBatchFunction):
    def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        return rows


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Keyed(), "Keyed is a KeyedProcessFunction, whose states and timers belong to keys; call key_by(…) first"),
        (
            WithState(),
            "ValueState 'seen' needs a key, but the stream has none; call key_by() first (by a column with one",
        ),
        (WithTimers(), "has on_timer(), and timers belong to keys. Call key_by(…) first"),
        (Same, "Same is a class; give an instance: Same("),
        (lambda row: row, "is not a ProcessFunction; subclass it and give an instance"),
    ],
)
def test_what_needs_keys_is_refused_at_the_call(function: Any, message: str) -> None:
    stream = Environment("p").from_collection([{"n": 1}])
    with pytest.raises(JobError, match=r"test_process_without_keys\.py:\d+: .*" + re.escape(message)):
        stream.process(function, stream.schema)


def test_a_timer_is_refused_when_it_is_set_and_the_cure_works() -> None:
    stream = Environment("p").from_collection([{"n": 1}])
    with pytest.raises(JobError, match="timers belong to a key, and this stream is not keyed"):
        testing.run(stream.process(SetsTimers(), stream.schema))
    cured = stream.with_columns(all=pl.lit(0)).key_by("all").process(Later(), {"n": int})
    with testing.job(cured) as job:
        assert job.feed([{"n": 1}, {"n": 2}]).take() == []
        assert job.advance_processing_time("1 min").take() == [{"n": 2}]


def test_a_harness_for_keys_names_key() -> None:
    for function in (Keyed(), OfBatches()):
        with pytest.raises(ConfigError, match="is for a keyed stream; give key="):
            testing.harness(function, {"n": int}, {"n": int})
