"""Measures Kafka to a table, exactly once: how many records a second, and how old a row is when readers see it.

The brokers are those of KAFKA_BOOTSTRAP; `tools/kafka_server.py` starts one on this machine for the command that
follows it. Tables are local directories, so a version is visible from the time at which its file was written.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.api.environment import Environment
from midstream.api.restart_strategies import no_restart
from midstream.connectors.common.optional_packages import require as require_extra
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream_lab.bench import kafka
from midstream_lab.bench.events import Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require, start_on

if TYPE_CHECKING:
    from pyiceberg.table import StaticTable

EVENTS: Final = 5_000_000
CHANGES: Final = 4_000_000
KEYS: Final = 500_000
"""Keys of the changed table."""
DELETED_EVERY: Final = 10
"""The share of deletes: one in this number of changes."""
PARALLELISM: Final = 2
RATE_PER_S: Final = 50_000
CHECKPOINT_INTERVAL_S: Final = 1.0
DELAY_INTERVAL_S: Final = 0.25
"""The interval of checkpoints when delays are measured."""
CHANGE_SCHEMA: Final = {"op": str, "key": int, "value": int}
ICEBERG_NAME: Final = "lake.rows"
_CHUNK_ROWS: Final = 100_000
_POLL_S: Final = 0.1
_COMPLETE_S: Final = 1.0
"""Metadata of this age has been written as a whole."""

Int64s: TypeAlias = npt.NDArray[np.int64]


class LakehouseResult(Measured, frozen=True, kw_only=True):
    query: str
    result_rows: int


class DelayResult(LakehouseResult, frozen=True, kw_only=True):
    rate_per_s: int
    delay_rows: int
    delay_mean_ms: float
    """The mean time from when a row was made for its producer until a reader of the table sees it."""
    delay_p50_ms: float
    delay_p99_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    servers: str
    source: str
    directory: str


def run(
    slots: Slots,
    *,
    query: str = "delta",
    events: int | None = None,
    parallelism: int = PARALLELISM,
    rate: int = RATE_PER_S,
) -> LakehouseResult:
    """Run the benchmark. `rate`: rows per second when delays are measured. Raises InvariantError for a wrong result."""
    if query not in JOBS:
        raise ConfigError(f"--query: there is no query {query!r}; there are: {', '.join(JOBS)}")
    require_extra("confluent_kafka", "kafka", "python -m midstream_lab bench lakehouse")
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise ConfigError(
            "the benchmark needs a broker on this machine: tools/kafka_server.py .venv/bin/python -m midstream_lab bench lakehouse"
        )
    is_changes, count = query.endswith("changes"), events or events_of(query)
    with (
        kafka.topics(servers, "warm-in", "in") as (warm_in, source),
        tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory,
    ):
        fill = fill_changes if is_changes else kafka.fill
        fill(servers, source, count)
        fill(servers, warm_in, kafka.WARM_UP_EVENTS)
        load, warm_up = Load(servers, source, f"{directory}/run"), Load(servers, warm_in, f"{directory}/warm-up")
        measured = measure("lakehouse", slots, parallelism, CHECKPOINT_INTERVAL_S, JOBS[query], load, warm_up)
        rows = check(query, load.directory, count)
    figures = measured.figures("lakehouse", slots, count, parallelism) | {"query": query, "result_rows": rows}
    if is_changes:
        return LakehouseResult(**figures)
    return DelayResult(**figures, rate_per_s=rate, **_delays(slots, query, servers, parallelism, rate))


def events_of(query: str) -> int:
    return CHANGES if query.endswith("changes") else EVENTS


# ---- the jobs ----


def _catalog(directory: str) -> dict[str, str]:
    Path(directory).mkdir(exist_ok=True)
    return {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}"}


def _delta(env: Environment, load: Load) -> None:
    rows = env.read_kafka(load.servers, load.source, schema={"ts": int, "key": int, "value": float}, stop="latest")
    rows.write_delta(table_in(load.directory))


def _iceberg(env: Environment, load: Load) -> None:
    rows = env.read_kafka(load.servers, load.source, schema={"ts": int, "key": int, "value": float}, stop="latest")
    rows.write_iceberg(ICEBERG_NAME, catalog=_catalog(load.directory))


def _delta_changes(env: Environment, load: Load) -> None:
    rows = env.read_kafka(load.servers, load.source, schema=CHANGE_SCHEMA, stop="latest")
    rows.write_delta(table_in(load.directory), key=["key"], op="op")


def _iceberg_changes(env: Environment, load: Load) -> None:
    rows = env.read_kafka(load.servers, load.source, schema=CHANGE_SCHEMA, stop="latest")
    rows.write_iceberg(ICEBERG_NAME, catalog=_catalog(load.directory), key=["key"], op="op")


JOBS: Final[dict[str, Callable[[Environment, Load], None]]] = {
    "delta": _delta,
    "iceberg": _iceberg,
    "delta_changes": _delta_changes,
    "iceberg_changes": _iceberg_changes,
}


def _delays(slots: Slots, query: str, servers: str, parallelism: int, rate: int) -> dict[str, Any]:
    with (
        kafka.topics(servers, "delay-in") as (source,),
        tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory,
    ):
        env = Environment(
            "bench-lakehouse-delay",
            parallelism=parallelism,
            checkpoint_dir=f"{directory}/checkpoints",
            checkpoint_interval=DELAY_INTERVAL_S,
            restart=no_restart(),
        )
        rows = env.read_kafka(servers, source, schema={"i": int, "made_us": int})
        if query == "delta":
            rows.write_delta(table_in(directory))
        else:
            rows.write_iceberg(ICEBERG_NAME, catalog=_catalog(directory))
        job = start_on(slots, env, parallelism)
        try:
            while job.status().state in ("created", "deploying"):
                time.sleep(0.05)
            return delays_at_rate(query, servers, source, directory, rate)
        finally:
            job.cancel("the benchmark is over")


# ---- what is in the topics ----


def changes_of(i: Int64s) -> tuple[npt.NDArray[np.bool_], Int64s]:
    """Return whether each change is a delete, and its key."""
    return i % DELETED_EVERY == DELETED_EVERY - 1, ((i * 2654435761) & 0xFFFFFFFF) % KEYS


def fill_changes(servers: str, topic: str, count: int) -> None:
    """Fill the topic with changes `{"op":"update","key":17,"value":3}`; all of a key are in one partition, in order."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for first in range(0, count, _CHUNK_ROWS):
        i = np.arange(first, min(first + _CHUNK_ROWS, count))
        is_deleted, key = changes_of(i)
        rows = pl.DataFrame({"op": np.where(is_deleted, "delete", "update"), "key": key, "value": i})
        for line, partition in zip(rows.write_ndjson().encode().splitlines(), key % kafka.PARTITIONS, strict=True):
            while True:
                try:
                    producer.produce(topic, line, partition=int(partition))
                    break
                except BufferError:
                    producer.poll(0.1)
    if producer.flush(kafka.ANSWER_S):
        raise InvariantError(f"the broker has not taken {count:,} records within {kafka.ANSWER_S:g} s")


# ---- what is in the tables ----


def table_in(directory: str) -> str:
    """The path of the Delta table, or of the Iceberg table of an engine whose catalog is a directory."""
    return f"{directory}/lake/rows"


def check(query: str, directory: str, count: int) -> int:
    """Check that the table has the right rows, and return their number. Raises InvariantError otherwise."""
    rows = live_rows(query, directory)
    if query.endswith("changes"):
        expected = _after_changes(count)
        got = rows.select("key", "value").sort("key")
        require("the number of rows", len(expected), len(got))
        if not got.equals(expected):
            raise InvariantError("the benchmark's result is wrong: the table has other values than the last changes")
        return len(got)
    events = Events(count, lanes=kafka.PARTITIONS)
    require("the number of rows", count, len(rows))
    require("the sum of all values", events.value_sums[0], float(rows["value"].to_numpy().sum()))
    require("the sum of all keys", int(events.key(np.arange(count)).sum()), int(rows["key"].to_numpy().sum()))
    return len(rows)


def _after_changes(count: int) -> pl.DataFrame:
    i = np.arange(count)
    is_deleted, key = changes_of(i)
    last = np.full(KEYS, -1)
    last[key] = i  # numpy keeps the last of equal indices
    keys = np.flatnonzero(last >= 0)
    kept = keys[~is_deleted[last[keys]]]
    return pl.DataFrame({"key": kept, "value": last[kept]})


def live_rows(query: str, directory: str) -> pl.DataFrame:
    if query.startswith("delta"):
        return pl.read_delta(table_in(directory))
    found = pl.from_arrow(_iceberg_table(_metadata_files(directory)[-1]).scan().to_arrow())
    assert isinstance(found, pl.DataFrame)
    return found


def _iceberg_table(metadata: Path) -> StaticTable:
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(str(metadata))


def _metadata_files(directory: str, age_s: float = 0.0) -> list[Path]:
    """The metadata files of the one Iceberg table below the directory, the oldest first; others are not yet complete.

    `age_s`: how old they are at least.
    """
    found = [
        (path.stat().st_mtime, path)
        for pattern in ("v[0-9]*", "[0-9]*-*")
        for path in Path(directory).glob(f"**/metadata/{pattern}.metadata.json")
    ]
    return [path for mtime_s, path in sorted(found) if time.time() - mtime_s >= age_s]


def commits(query: str, directory: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each version of the table that adds files: its name, when its file was written in µs, and the data files."""
    if query.startswith("delta"):
        for log in sorted(Path(table_in(directory), "_delta_log").glob("*.json")):
            actions = [json.loads(line) for line in log.read_text().splitlines()]
            added = [f"{table_in(directory)}/{unquote(a['add']['path'])}" for a in actions if "add" in a]
            if added:
                yield log.name, log.stat().st_mtime_ns // 1000, added
        return
    from pyiceberg.manifest import ManifestEntryStatus

    for metadata in _metadata_files(directory, _COMPLETE_S):
        table = _iceberg_table(metadata)
        if (snapshot := table.current_snapshot()) is None:
            continue
        added = [
            entry.data_file.file_path.removeprefix("file:").replace("//", "/")
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(table.io)
            if entry.status == ManifestEntryStatus.ADDED
        ]
        if added:
            yield str(snapshot.snapshot_id), metadata.stat().st_mtime_ns // 1000, added


def delays_at_rate(query: str, servers: str, source: str, directory: str, rate: int) -> dict[str, Any]:
    """Send rows to the topic `source` and find them in the table; return the figures of their delays.

    Raises InvariantError if the rate is missed, or rows are not in the table exactly once.
    """
    sent, took_s = kafka.send(servers, source, rate)
    if sent < rate * took_s * (1 - kafka.SHORTFALL_MAX):
        raise InvariantError(f"only {sent / took_s:,.0f} of {rate:,} rows/s were sent: the machine is too busy")
    known: dict[str, pl.DataFrame] = {}
    deadline_s = time.monotonic() + kafka.ANSWER_S
    while sum(map(len, known.values())) < sent and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        for name, visible_us, files in list(commits(query, directory)):
            if name not in known:
                rows = pl.concat([pl.read_parquet(file, columns=["i", "made_us"]) for file in files])
                known[name] = rows.select("i", delay_ms=(visible_us - pl.col("made_us")) / 1000)
    rows = pl.concat(known.values())
    require("the number of rows that arrived", sent, rows["i"].n_unique())
    require("the number of rows in the table", sent, len(rows))
    counted = rows.filter(pl.col("i") >= rate * kafka.WARM_UP_S)["delay_ms"].to_numpy()
    return {
        "delay_rows": len(counted),
        "delay_mean_ms": round(float(counted.mean()), 1),
        "delay_p50_ms": round(float(np.percentile(counted, 50)), 1),
        "delay_p99_ms": round(float(np.percentile(counted, 99)), 1),
    }
