"""Tables of which small files are compacted, and the drivers that do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
from connector_worlds import SCHEMA, batch, written
from keyed_tables import KEYED, USERS, rows_of
from table_worlds import IcebergWorld, TableWorld

from committers import committer_of
from midstream.connectors.common.compaction import Compacted
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.engine.core.arrow_types import schema_of

FEW: Final = 4
"""The number of small files that are compacted, in tests."""


def new_sink(world: TableWorld, columns: pa.Schema = SCHEMA, *, restoring: bool = False, **options: Any) -> Any:
    options = {"auto_compact": True, **options}
    if isinstance(world, IcebergWorld):
        sink: Any = IcebergSink("lake.t", catalog=world.catalog, **options)
    else:
        sink = DeltaSink(world.path / "t", **options)
    sink.validate(columns, restoring=restoring)
    return sink


class Driver:
    """Commits checkpoints, each with one subtask's rows, and compacts on request."""

    def __init__(self, sink: Any, job_id: str = "job-a", first: int = 1) -> None:
        self.sink = sink
        self.job_id = job_id
        self.checkpoint = first - 1
        self.committer = committer_of(sink, job_id)
        self.compactor = self.committer._compactor
        self.compactor._commits = -(10**9)

    def commit(self, rows: pa.RecordBatch) -> int:
        self.checkpoint += 1
        self.committer.commit(
            self.checkpoint,
            written(self.sink, rows, self.checkpoint, attempt=self.checkpoint, job_id=self.job_id),
        )
        return self.checkpoint

    def commit_numbers(self, *values: int) -> None:
        for value in values:
            self.commit(batch(value))

    def compact(self) -> Compacted | None:
        found: Compacted | None = self.compactor.compact_once()
        return found


def kind_of(keyed: bool) -> tuple[pa.Schema, dict[str, Any]]:
    return (USERS, KEYED) if keyed else (SCHEMA, {})


def live(world: TableWorld) -> list[str]:
    return sorted(path.name for path in world.files())


def on_disk(world: TableWorld) -> list[str]:
    return sorted(path.name for path in world.path.rglob("compacted-*.parquet"))


def partitioned(world: TableWorld) -> tuple[Driver, Callable[[], list[tuple[int, int]]]]:
    """Return the driver of a table with some files in each of several partitions, and what reads it."""
    columns = schema_of([("n", pa.int64()), ("p", pa.int64())])
    driver = Driver(new_sink(world, columns, partition_by=["p"]))
    for n in range(FEW):
        driver.commit(rows_of(columns, *((n, p) for p in range(3))))

    def rows() -> list[tuple[int, int]]:
        found = pl.scan_iceberg(world.table).collect() if isinstance(world, IcebergWorld) else pl.read_delta(str(world.path / "t"))  # fmt: skip
        return sorted(found.select("n", "p").rows())

    return driver, rows


def before_the_commit(driver: Driver, act: Callable[[], object]) -> None:
    """Let something happen when the files are written, and not yet committed."""
    real = driver.compactor._commit

    def commit(*arguments: Any) -> Any:
        driver.compactor._commit = real
        act()
        return real(*arguments)

    driver.compactor._commit = commit
