"""Random operations on few keys, cut at random into checkpoints, subtasks and batches: the table is what a dict would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import polars as pl
import psycopg
import pyarrow as pa
from connector_worlds import Loop, open_writer, prepared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog

from committers import committer_of
from effort import examples
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.operators.sink_api import Sink

TEXT = pa.large_string()
COLUMNS = schema_of([("who", TEXT), ("n", pa.int64()), ("op", TEXT), ("city", TEXT), ("value", pa.int64())])
Row = tuple[str, int, str, str | None, int | None]

OPERATIONS = st.tuples(
    st.sampled_from(["", "'", "É"]),
    st.sampled_from([-(2**63), 0, 2**63 - 1]),
    st.sampled_from(["insert", "update", "delete"]),
    st.sampled_from(["a", "b", None]),
    st.integers(0, 9) | st.none(),
)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, list[list[Row]], int]]:
    """Checkpoints: how many subtasks each has, the batches that arrive, and how often it is committed."""
    checkpoint = st.tuples(
        st.integers(1, 3),
        st.lists(st.lists(OPERATIONS, min_size=1, max_size=6), min_size=1, max_size=4),
        st.integers(1, 3),
    )
    return draw(st.lists(checkpoint, min_size=1, max_size=6))


def written_by(
    sink: Sink, subtask: int, attempt: int, batches: Sequence[Sequence[Row]], checkpoint_id: int
) -> list[bytes]:
    loop = Loop()
    writer = open_writer(sink, COLUMNS, loop, subtask=subtask, attempt=attempt)
    for rows in batches:
        writer.write(pa.RecordBatch.from_pylist([dict(zip(COLUMNS.names, row, strict=True)) for row in rows], COLUMNS))
        loop.run()
    assert loop.failures == []
    return prepared(writer, checkpoint_id)


def check(
    history: list[tuple[int, list[list[Row]], int]], sink: Sink, rows: Callable[[], list[tuple[Any, ...]]]
) -> None:
    sink.validate(COLUMNS, restoring=False)
    expected: dict[tuple[str, int], tuple[str | None, int | None]] = {}
    committer = committer_of(sink, "job-a")
    for checkpoint_id, (subtasks, batches, commits) in enumerate(history, 1):
        committables: list[bytes] = []
        for subtask in range(subtasks):
            own = [[row for row in batch if crc32(repr(row[:2]).encode()) % subtasks == subtask] for batch in batches]
            committables += written_by(sink, subtask, checkpoint_id, [batch for batch in own if batch], checkpoint_id)
        for who, n, op, city, value in (row for batch in batches for row in batch):
            if op == "delete":
                expected.pop((who, n), None)
            else:
                expected[who, n] = (city, value)
        for _ in range(commits):
            committer.commit(checkpoint_id, committables)
            committer = committer_of(sink, "job-a")  # as after a restart
        assert sorted(rows(), key=repr) == sorted(((*key, *kept) for key, kept in expected.items()), key=repr)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(history=histories(), partitioned=st.booleans())
def test_a_delta_table_is_what_a_dict_would_be(history, partitioned):
    with TemporaryDirectory() as directory:
        table = Path(directory) / "table"
        sink = DeltaSink(table, key=["who", "n"], op="op", partition_by=["city"] if partitioned else [])
        check(history, sink, lambda: pl.read_delta(str(table)).select("who", "n", "city", "value").rows())


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    history=histories(),
    by=st.sampled_from([(), ("city",), ("bucket(2, n)",), ("who", "truncate(10, value)")]),
)
def test_an_iceberg_table_is_what_a_dict_would_be(history, by):
    with TemporaryDirectory() as directory:
        catalog = load_catalog(
            "midstream", type="sql", uri=f"sqlite:///{directory}/c.db", warehouse=f"file://{directory}/w"
        )
        sink = IcebergSink("lake.kept", catalog=catalog, key=["who", "n"], op="op", partition_by=by)

        def rows() -> list[tuple[Any, ...]]:
            return pl.scan_iceberg(catalog.load_table("lake.kept")).select("who", "n", "city", "value").collect().rows()

        check(history, sink, rows)
        catalog.close()


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(history=histories())
def test_a_postgres_table_is_what_a_dict_would_be(database, history):
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        sink = PostgresSink(database, "kept", key=["who", "n"], op="op")
        check(history, sink, lambda: connection.execute("SELECT who, n, city, value FROM kept").fetchall())
