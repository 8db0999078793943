"""Runs the queries, each as a job of its own, and checks the results."""

from __future__ import annotations

from typing import Final

import msgspec

from midstream.api.data_stream import DataStream
from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.nexmark.expected import EXPECTED
from midstream_lab.bench.nexmark.files import written
from midstream_lab.bench.nexmark.generator import EPOCH, Events
from midstream_lab.bench.nexmark.queries import QUERIES

EVENTS: Final = 10_000_000
PARALLELISM: Final = 2
WARM_UP_PER_SUBTASK: Final = 400 * EPOCH
CHECKPOINT_INTERVAL_S: Final = 1.0
SOURCES: Final = ("generator", "parquet")
TOLERANCE: Final = 1e-9
"""The tolerance for sums of floats; those of integers are exact."""


class QueryResult(Measured, frozen=True, kw_only=True):
    """The figures of a query. `events`: persons, auctions and bids together, whichever of them the query needs."""

    query: str
    source: str
    """Where the events come from: made in the source, or read from Parquet files."""
    result: dict[str, float]
    """The number of rows, and sums over them."""


class NexmarkResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "nexmark"
    events: int
    """The events of each query."""
    source: str
    parallelism: int
    slots: str
    seconds: float
    """The time of all queries."""
    queries: dict[str, QueryResult]


def run(
    slots: Slots,
    *,
    query: str = "all",
    source: str = "generator",
    events: int = EVENTS,
    parallelism: int = PARALLELISM,
) -> QueryResult | NexmarkResult:
    """Run one query, or "all". Raises InvariantError for a wrong result."""
    if source not in SOURCES:
        raise ConfigError(f"--source: {source!r} is not one of {', '.join(SOURCES)}")
    if query in QUERIES:
        return run_query(query, slots, source, events, parallelism)
    if query != "all":
        raise ConfigError(f"--query: there is no query {query!r}; there are: {', '.join(QUERIES)}, all")
    results = {name: run_query(name, slots, source, events, parallelism) for name in QUERIES}
    return NexmarkResult(
        events=events,
        source=source,
        parallelism=parallelism,
        slots=slots,
        seconds=round(sum(result.seconds for result in results.values()), 3),
        queries=results,
    )


def run_query(name: str, slots: Slots, source: str, events: int, parallelism: int) -> QueryResult:
    query = QUERIES[name]
    sink = query.sink()

    def read(env: Environment, workload: Events) -> DataStream:
        if source == "parquet":
            return env.read_files(written(workload.count), schema=workload.schema)
        return env.source(GeneratorSource(workload, workload.count, schema=workload.schema))

    def build(env: Environment, workload: Events) -> None:
        query.build(read(env, workload).with_watermarks("time", WatermarkStrategy.monotonous())).sink(sink)

    workload = Events(events, lanes=parallelism, columns=query.reads)
    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism, columns=query.reads)
    run = measure(f"nexmark-{name}", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    checked = ("rows", *query.checked)
    result = dict(zip(checked, sink.total.tolist(), strict=True))
    for what, expected in zip(checked, EXPECTED[name](events), strict=True):
        if expected is not None:
            require(f"{name}: {what}", expected, result[what], TOLERANCE if query.has_floats else 0.0)
    return QueryResult(query=name, source=source, result=result, **run.figures("nexmark", slots, events, parallelism))
