"""Tables as streams in real jobs: slots are killed, jobs stopped and restored, and each row arrives once."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from table_worlds import WORLDS, TableWorld

from machine import limit_s
from midstream import Count, DataError, Environment, Job, WatermarkStrategy, tumbling
from midstream.connectors.files.file_source import FileSource
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    found = WORLDS[request.param](tmp_path)
    found.create()
    return found


def copying(world: TableWorld, *, rows_per_s: float | None = None, start: str | None = None) -> Environment:
    env = Environment("copy", parallelism=2, checkpoint_dir=world.path / "chk", checkpoint_interval="200 ms")
    source = world.source(watch=True, interval="100 ms", rows_per_s=rows_per_s, start=start)
    env.source(source).uid("in").write_parquet(world.path / "out").uid("out")
    return env


def committed(world: TableWorld) -> list[int]:
    return sorted(n for path in (world.path / "out").glob("*.parquet") for n in pl.read_parquet(path)["n"].to_list())


class Directory:
    """Files without a table."""

    def __init__(self, path: Path) -> None:
        self.path = path / "in"

    def create(self, columns: pa.Schema) -> None:
        self.path.mkdir()

    def add(self, rows: pa.Table) -> None:
        pq.write_table(rows, self.path / f"{len(list(self.path.iterdir()))}.parquet", row_group_size=100)

    def source(self, **arguments: Any) -> FileSource:
        return FileSource(self.path, **arguments)


@pytest.mark.systems
@pytest.mark.parametrize("tables", [*WORLDS.values(), Directory], ids=[*WORLDS, "files"])
def test_event_time_advances_through_a_backlog_in_whatever_order_its_files_and_rows_were_written(tables, tmp_path):
    world = tables(tmp_path)
    world.create(pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))]))
    for day in (4, 1, 3, 2, 5, 0):
        times = [datetime(2026, 1, 1 + day, tzinfo=UTC) + timedelta(minutes=n * 7 % 300) for n in range(300)]
        kind = pa.timestamp("us", "UTC")
        world.add(pa.table({"n": pa.array(range(300), pa.int64()), "at": pa.array(times, kind)}))
    order = tmp_path / "order"

    def note(row: dict[str, Any]) -> dict[str, Any]:
        with order.open("a") as file:
            file.write("window\n" if "rows" in row else "row\n")
        return row

    env = Environment("backlog", parallelism=1)
    rows = env.source(world.source(rows_per_s=600)).uid("in")
    timed = rows.with_watermarks("at", WatermarkStrategy.monotonous()).map(note, schema=rows.schema)
    hours = timed.window_all(tumbling("1 h")).aggregate(rows=Count())
    kept = hours.map(note, schema=hours.schema).collect()
    env.execute(slots=ProcessSlots())
    assert [row["rows"] for row in kept.rows()] == 30 * [60], "no row is late"
    events = order.read_text().split()
    assert events.index("window") < 1200, "the first day is over before its last files are read"
    assert "row" in events[events.index("window") :]


@pytest.mark.systems
def test_a_table_is_followed_exactly_once_although_slots_are_killed_and_the_job_is_restored(world):
    for part in range(4):
        world.append(*range(part * 5000, part * 5000 + 5000))
    job = copying(world, rows_per_s=10_000).start(slots=ProcessSlots())
    until("something committed", lambda: len(committed(world)) > 0)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    world.append(*range(20_000, 21_000))
    world.compact()
    until("the restart", lambda: job.status().restarts)
    job.stop(timeout_s=limit_s(60))
    before = committed(world)
    assert before == sorted(set(before))
    world.append(*range(21_000, 22_000))
    job = copying(world).start(slots=ProcessSlots(), restore_from="latest")
    until("everything committed", lambda: len(committed(world)) >= 22_000)
    world.append(*range(22_000, 22_010))
    until("the last version", lambda: len(committed(world)) >= 22_010)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert committed(world) == list(range(22_010))


@pytest.mark.systems
def test_a_version_that_deletes_rows_ends_the_job_at_once_and_says_why(world):
    world.append(1, 2)
    job = copying(world).start(slots=ProcessSlots())
    until("the rows", lambda: committed(world) == [1, 2])
    world.delete(1)
    with pytest.raises(DataError, match=r"deletes or changes rows, which may have been read; .*on_change='skip'"):
        job.wait(limit_s(60))
    assert job.status().restarts == 0


@pytest.mark.systems
@pytest.mark.parametrize("records", [True, False])
def test_a_table_is_kept_equal_to_another_by_its_changes(tmp_path, records):
    columns = pa.schema({"id": pa.int64(), "v": pa.int64()})
    configuration = {"delta.enableChangeDataFeed": "true"} if records else {}
    original, copy = tmp_path / "original", tmp_path / "copy"
    DeltaTable.create(original, columns, configuration=configuration)
    write_deltalake(original, pa.table({"id": range(1000), "v": range(1000)}), mode="append")

    def start(**options: Any) -> Job:
        env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="200 ms")
        changes = env.read_delta(original, changes=True, watch=True, interval="50 ms", rows_per_s=3000).uid("in")
        changes.write_delta(copy, key=["id"], op="_op").uid("out")
        return env.start(slots=ProcessSlots(), **options)

    def rows(path: Path) -> list[tuple[int, int]]:
        is_table = DeltaTable.is_deltatable(path)
        return sorted(pl.read_delta(str(path)).select("id", "v").rows()) if is_table else []

    job = start()
    until("something committed", lambda: len(rows(copy)) > 0)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    table = DeltaTable(original)
    table.update({"v": "v + 1000"}, predicate="id % 3 = 0")
    table.delete("id % 7 = 0")
    table.optimize.compact()
    until("the restart", lambda: job.status().restarts)
    until("all changes", lambda: rows(copy) == rows(original))
    job.stop(timeout_s=limit_s(60))
    table.update({"v": "-v"}, predicate="id < 500")
    write_deltalake(original, pa.table({"id": [5000, 7], "v": [1, 2]}), mode="append")
    job = start(restore_from="latest")
    until("the rest", lambda: rows(copy) == rows(original))
    assert len(rows(original)) == 1000 - 143 + 2
    job.stop(drain=True, timeout_s=limit_s(60))
    assert rows(copy) == rows(original)
