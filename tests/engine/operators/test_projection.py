"""Which columns a source reads: those that the operators of its task need, and the result is the same."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World

from effort import examples
from midstream import Count, DataStream, Environment, Source, WatermarkStrategy, tumbling
from midstream.engine.core.batches import to_polars
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.job_graph import Vertex

NAMES = ("a", "b", "c", "d")
SCHEMA = pa.schema([*((name, pa.int64()) for name in NAMES), ("at", pa.timestamp("us"))])


class Columns(Source):
    """Is never read here."""

    schema = SCHEMA
    supports_projection = True

    def discover(self, position: Any, context: Any) -> Any: ...

    def open_split(self, split: Any) -> Any: ...

    def open_projected(self, split: Any, columns: Any) -> Any: ...


def stream_of() -> tuple[Environment, DataStream]:
    env = Environment("projection", parallelism=2)
    return env, env.source(Columns()).with_watermarks("at", WatermarkStrategy.monotonous())


def source_vertex(env: Environment) -> Vertex:
    return build_job_graph(env.program.graph, env.program.config).vertices[0]


def columns_read(env: Environment) -> list[str]:
    source = source_vertex(env).source
    assert source is not None
    return list((source.source.schema if source.columns is None else source.columns).names)


@pytest.mark.parametrize(
    ("build", "read"),
    [
        (lambda s: s.select("a"), ["a", "at"]),
        (lambda s: s.filter(pl.col("b") > 1).select("a"), ["a", "b", "at"]),
        (lambda s: s.with_columns(x=pl.col("b") + 1).filter(pl.col("x") > 1).select("a"), ["a", "b", "at"]),
        (lambda s: s.with_columns(b=pl.lit(1)).select("a", "b"), ["a", "at"]),
        (lambda s: s.rename({"a": "x", "b": "y"}).select("x"), ["a", "at"]),
        (lambda s: s.drop("a", "b"), ["c", "d", "at"]),
        (lambda s: s.select(one=pl.lit(1)), ["a", "at"]),
        (lambda s: s.select(sum=pl.sum_horizontal("b", "c")), ["b", "c", "at"]),
        (lambda s: s.select("a").map(lambda row: row), ["a", "at"]),
        (lambda s: s, SCHEMA.names),
        (lambda s: s.filter(pl.col("b") > 1), SCHEMA.names),
        (lambda s: s.map(lambda row: row).select("a"), SCHEMA.names),
        (lambda s: s.map_batches(lambda frame: frame).select("a"), SCHEMA.names),
        (lambda s: s.expect(pl.col("a") > 1, on_error="side_output").select("a"), SCHEMA.names),
        (lambda s: s.key_by("a").window(tumbling("1 s")).aggregate(n=Count()), SCHEMA.names),
    ],
)
def test_a_source_reads_what_the_operators_of_its_task_need(build, read):
    env, stream = stream_of()
    build(stream).collect()
    assert columns_read(env) == read


def test_a_source_that_cannot_read_some_columns_reads_all(monkeypatch):
    monkeypatch.setattr(Columns, "supports_projection", False)
    env, stream = stream_of()
    stream.select("a").collect()
    assert columns_read(env) == SCHEMA.names


def test_a_source_that_opens_splits_in_its_own_way_reads_all():
    class Wrapped(Columns):
        def open_split(self, split: Any) -> Any: ...

    class Both(Wrapped):
        def open_projected(self, split: Any, columns: Any) -> Any: ...

    for source, read in ((Wrapped(), SCHEMA.names), (Both(), ["a"])):
        env = Environment("projection")
        env.source(source).select("a").collect()
        assert columns_read(env) == read


def test_two_consumers_of_a_source_get_all_columns():
    env, stream = stream_of()
    stream.select("a").collect()
    stream.select("b").collect()
    assert columns_read(env) == SCHEMA.names


def test_a_graph_that_was_built_before_does_not_narrow_a_later_one():
    env, stream = stream_of()
    wide = stream.with_columns(x=pl.col("a") + 1)
    wide.select("x").collect()
    assert columns_read(env) == ["a", "at"]
    wide.collect()
    assert columns_read(env) == SCHEMA.names
    assert "reads" not in env.explain()


def test_the_explanation_says_which_columns_are_read():
    env, stream = stream_of()
    stream.select("a").collect()
    assert "      reads 2 of 5 columns: a, at\n" in env.explain() + "\n"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("filter"), st.sampled_from(NAMES)),
        st.tuples(st.just("with"), st.sampled_from(NAMES), st.sampled_from((*NAMES, "e"))),
        st.tuples(st.just("constant"), st.sampled_from((*NAMES, "e"))),
        st.tuples(st.just("swap"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
        st.tuples(st.just("drop"), st.sampled_from(NAMES)),
        st.tuples(st.just("select"), st.sets(st.sampled_from(NAMES), min_size=1)),
        st.tuples(st.just("all"), st.sampled_from(NAMES)),
    ),
    min_size=1,
    max_size=7,
)


def built(stream: DataStream, steps: list[Any]) -> DataStream:
    """Steps that name a column which is no longer there are left out."""
    for kind, *names in steps:
        there = stream.schema.names
        match kind, *names:
            case "filter", name if name in there:
                stream = stream.filter(pl.col(name) % 3 != 1)
            case "with", name, made if name in there:
                stream = stream.with_columns((pl.col(name) * 2 + 1).alias(made))
            case "constant", made:
                stream = stream.with_columns(pl.lit(7).alias(made))
            case "swap", one, other if one in there and other in there and one != other:
                stream = stream.rename({one: other, other: one})
            case "drop", name if name in there and len(there) > 1:
                stream = stream.drop(name)
            case "select", chosen if chosen <= set(there):
                stream = stream.select(*sorted(chosen))
            case "all", name if name in there:
                stream = stream.with_columns(pl.all().exclude("at") + 1)
            case _:
                pass
    return stream


def emitted(vertex: Vertex, batch: pa.RecordBatch) -> pl.DataFrame | None:
    """What the operators before the sink make of a batch; None if nothing is left."""
    for spec in vertex.operators[:-1]:
        world = World(spec.operator)
        world.process(batch)
        if not world.out.batches:
            return None
        ((_, batch),) = world.out.batches
    return to_polars(batch)


@settings(max_examples=examples(150), deadline=None)
@given(steps=STEPS, values=st.lists(st.tuples(*[st.integers(-9, 9)] * 4), min_size=1, max_size=8))
def test_whatever_is_not_read_changes_nothing(steps, values):
    env, stream = stream_of()
    built(stream, steps).collect()
    vertex = source_vertex(env)
    times = [datetime(2026, 1, 1) + timedelta(seconds=n) for n in range(len(values))]
    columns = [pa.array(column, pa.int64()) for column in zip(*values, strict=True)]
    batch = pa.RecordBatch.from_arrays([*columns, pa.array(times, pa.timestamp("us"))], schema=SCHEMA)
    Columns.supports_projection = False
    try:
        whole = emitted(source_vertex(env), batch)
    finally:
        Columns.supports_projection = True
    narrow = batch if vertex.source is None or vertex.source.columns is None else batch.select(columns_read(env))
    found = emitted(vertex, narrow)
    assert (found is None) == (whole is None)
    if found is not None and whole is not None:
        assert found.equals(whole) and found.columns == whole.columns
