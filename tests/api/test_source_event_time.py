"""Which column a source is asked for the earliest times of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import polars as pl
import pytest

from midstream import DataStream, Environment, WatermarkStrategy
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.source_event_time import source_event_time

NONE_LATE = WatermarkStrategy.monotonous()
ROWS = [{"at": datetime(2026, 1, 1, tzinfo=UTC), "seen": datetime(2026, 1, 2, tzinfo=UTC), "n": 1}]


@pytest.mark.parametrize(
    ("program", "column"),
    [
        (lambda rows: rows.with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.filter(pl.col("n") > 0).with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.filter(lambda row: row["n"] > 0).with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.expect(pl.col("n") > 0, on_error="drop").with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.select("n", "at").with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.rename({"at": "time"}).with_watermarks("time", NONE_LATE), "at"),
        (lambda rows: rows.rename({"at": "seen", "seen": "at"}).with_watermarks("at", NONE_LATE), "seen"),
        (lambda rows: rows.with_columns(m=pl.col("n") + 1).with_watermarks("at", NONE_LATE), "at"),
        (lambda rows: rows.with_columns(at=pl.col("at").dt.offset_by("-1d")).with_watermarks("at", NONE_LATE), None),
        (lambda rows: rows.select(at=pl.col("seen")).with_watermarks("at", NONE_LATE), None),
        (lambda rows: rows.map(lambda row: row, schema=rows.schema).with_watermarks("at", NONE_LATE), None),
        (lambda rows: rows.with_watermarks("at", NONE_LATE).with_watermarks("seen", NONE_LATE), None),
        (
            lambda rows: rows.with_watermarks("at", NONE_LATE).filter(pl.col("n") > 0).with_watermarks("at", NONE_LATE),
            "at",
        ),
        (lambda rows: rows, None),
    ],
)
def test_the_column_that_becomes_event_time_is_found_where_nothing_changes_it(
    program: Callable[[DataStream], DataStream], column: str | None
) -> None:
    env = Environment("job", parallelism=1)
    program(env.from_collection(ROWS)).print()
    source = build_job_graph(env.program.graph, env.program.config).vertices[0]
    assert source_event_time(source) == column


def test_times_of_two_streams_of_a_source_are_of_no_column() -> None:
    env = Environment("job", parallelism=1)
    rows = env.from_collection(ROWS)
    rows.with_watermarks("at", NONE_LATE).print()
    rows.with_watermarks("seen", NONE_LATE).print()
    source = build_job_graph(env.program.graph, env.program.config).vertices[0]
    assert source_event_time(source) is None
