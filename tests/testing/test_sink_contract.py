"""`testing.check_sink`: it passes for the project's own sinks, and reports what is wrong with others."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from midstream import Committer, ConfigError, Sink, SinkWriter, testing
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.files import rollback
from midstream.connectors.files.file_sink import FileSink
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable
from midstream.connectors.iceberg.iceberg_sink import IcebergSink


class Lines(Sink):
    """JSON lines below a directory: `pending/`, and what is visible in `out/`. `wrong` names its mistake."""

    def __init__(self, directory: Path, wrong: str = "") -> None:
        self.directory = directory
        self.wrong = wrong
        if wrong == "lock":
            self.lock = threading.Lock()

    def validate(self, schema, restoring):
        if self.wrong == "refuses":
            raise ValueError("the target is not empty")
        if restoring and self.wrong == "restoring":
            raise ValueError("there are files already")
        for name in ("pending", "out"):
            (self.directory / name).mkdir(exist_ok=True)

    def check_committables(self, checkpoint_id, committables):
        for committable in committables:
            json.loads(committable)

    def writer(self, context):
        return None if self.wrong == "no writer" else LinesWriter(self, context)

    def committer(self, context):
        return None if self.wrong in ("at least once", "forgotten committer") else LinesCommitter(self, context.job_id)

    def newest_committed(self, output):
        return (
            0
            if self.wrong == "reports nothing"
            else max((place.checkpoint for place in self.places("out", output)), default=0)
        )

    def check_rollback(self, output, after):
        self.before = [place.name for place in self.places("out")]
        if self.wrong == "cannot roll back":
            raise ConfigError("it appends")

    def roll_back(self, output, after, kept):
        folders = {"leaves pending": ("out",), "rolls back nothing": ()}.get(self.wrong, ("pending", "out"))
        also = {"rolls back all": "out", "forgets what is kept": "pending"}.get(self.wrong)
        for place in [place for folder in folders for place in self.places(folder, output)]:
            if place.checkpoint > after or place.folder == also:
                (self.directory / place.folder / place.name).unlink()

    def places(self, folder, output=None):
        """What is in a folder, of these jobs. A wrong one does not look whose it is."""
        found = [Place(folder, path.name) for path in sorted((self.directory / folder).glob("*-*"))]
        return [place for place in found if output is None or self.wrong == "successor" or place.job in output.jobs]


@dataclass(frozen=True)
class Place:
    folder: str
    name: str

    @property
    def checkpoint(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def job(self) -> str:
        return self.name.partition("+")[0]


class LinesWriter(SinkWriter):
    def __init__(self, sink: Lines, context) -> None:
        self.sink = sink
        self.wrong = sink.wrong
        attempt = 0 if self.wrong == "attempt" else context.attempt
        subtask = 0 if self.wrong == "subtask" else context.subtask
        job = "job" if self.wrong == "job" else context.job_id
        self.name = f"{job}+{context.uid}-{attempt}-{subtask}"
        self.lines: list[str] = []
        self.made: list[Path] = []
        self.fail = context.fail

    def ready(self):
        return self.wrong != "never ready"

    def write(self, batch):
        if self.wrong == "fails":
            self.fail(OSError("the disk is full"))
        self.lines += [json.dumps(row) for row in batch.to_pylist()]
        if self.wrong in ("at least once", "early"):
            with (self.sink.directory / "out" / f"{self.name}.early").open("a") as file:
                file.writelines(f"{line}\n" for line in self.lines)
            self.lines = []

    def prepare(self, checkpoint_id):
        if not self.lines or self.wrong in ("at least once", "nothing to commit"):
            return None
        lines = self.lines
        self.lines = lines if self.wrong == "again and again" else []
        name = f"{self.name}-{checkpoint_id}"

        def durable():
            path = self.sink.directory / "pending" / name
            path.write_text("".join(f"{line}\n" for line in (lines[:-1] if self.wrong == "last row" else lines)))
            self.made.append(path)
            return [name] if self.wrong == "text" else [json.dumps(name).encode()]

        return durable

    def close(self):
        if self.wrong == "tidies up":
            for path in (self.sink.directory / "pending").iterdir():
                path.unlink()


class LinesCommitter(Committer):
    def __init__(self, sink: Lines, job_id: str) -> None:
        self.sink = sink
        self.job_id = job_id

    def commit(self, checkpoint_id, committables):
        pending, out = self.sink.directory / "pending", self.sink.directory / "out"
        if self.sink.wrong == "sweeps":
            for place in self.sink.places("pending"):
                if place.job != self.job_id and json.dumps(place.name).encode() not in committables:
                    (pending / place.name).unlink()
        for committable in committables:
            name = json.loads(committable)
            if self.sink.wrong == "appends":
                with (out / "all").open("a") as file:
                    file.write((pending / name).read_text())
            elif self.sink.wrong == "moves":
                (pending / name).rename(out / name)
            elif (pending / name).exists():
                (pending / name).replace(out / name)

    def abort(self, committables):
        for committable in committables:
            (self.sink.directory / "pending" / json.loads(committable)).unlink(
                missing_ok=self.sink.wrong != "aborts once"
            )
            if self.sink.wrong == "aborts all":
                for path in (self.sink.directory / "out").iterdir():
                    path.unlink()


@pytest.fixture
def places() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def target_of(places: Path, wrong: str = ""):
    def target():
        directory = Path(tempfile.mkdtemp(dir=places))

        def read():
            return [
                json.loads(line) for path in (directory / "out").iterdir() for line in path.read_text().splitlines()
            ]

        return Lines(directory, wrong), read

    return target


def test_a_sink_that_keeps_to_the_contract_passes(places):
    testing.check_sink(target_of(places))


def test_a_sink_that_cannot_roll_back_passes(places):
    testing.check_sink(target_of(places, "cannot roll back"))


def test_a_sink_that_is_at_least_once_passes(places):
    testing.check_sink(target_of(places, "at least once"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("lock", "Lines does not pickle"),
        ("refuses", "validate refuses an empty target: ValueError: the target is not empty"),
        ("restoring", "validate refuses to resume: ValueError"),
        ("no writer", "writer returned None, not a SinkWriter"),
        ("never ready", r"ready\(\) stays False"),
        ("fails", "the writer failed"),
        ("early", "before anything was committed, rows that should not be there: 12, such as {'n': 0"),
        ("nothing to commit", "rows were written, but prepare returned nothing to commit"),
        ("forgotten committer", r"prepare returns committables, but committer\(\) is None"),
        ("text", "committables are stored in checkpoints and must be bytes"),
        ("last row", "after commit, rows missing: 1, such as {'n': 11"),
        ("appends", "after commit a second time, by another process each time, rows that should not be there: 12"),
        ("moves", "a second time, commit raised FileNotFoundError"),
        ("again and again", "rows that should not be there"),
        ("attempt", "attempt"),
        ("subtask", "rows missing"),
        ("tidies up", "rows missing"),
        ("aborts once", "abort"),
        ("aborts all", "after abandoned committables were aborted, twice, rows missing: 12"),
        (
            "sweeps",
            "of the next start, after a driver that it has overtaken has committed, commit raised|rows missing: 6",
        ),
        ("job", "after the next start has committed its first checkpoint, rows missing: 6"),
        ("reports nothing", "newest_committed returned 0 after the commit of checkpoint 3"),
        ("rolls back nothing", "after output newer than checkpoint 2 was rolled back the first time, rows that should"),
        ("rolls back all", "after output newer than checkpoint 2 was rolled back the first time, rows missing: 4"),
        ("leaves pending", "has committed a checkpoint that was rolled back, rows that should not be there: 2"),
        ("successor", "has rolled back output that the next start has committed, rows missing: 2"),
        ("forgets what is kept", "of the checkpoint to which output was rolled back, rows missing: 2"),
    ],
)
def test_what_breaks_the_contract_is_reported(places, wrong, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_sink(target_of(places, wrong))


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_file_sink_keeps_to_it(places, format, append, few_attempts):
    def target():
        directory = Path(tempfile.mkdtemp(dir=places))

        def read():
            files = sorted(directory.glob(f"*.{format}"))
            reader = pl.read_parquet if format == "parquet" else pl.read_ndjson
            return [row for file in files for row in reader(file).to_dicts()]

        return FileSink(directory, format=format, append=append), read

    testing.check_sink(target)


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying all takes a tenth of a second for each rollback."""
    monkeypatch.setattr(rollback, "ATTEMPTS_MAX", 3)


TABLES: dict[str, dict[str, Any]] = {
    "append": {},
    "partitioned": {"partition_by": ["text"]},
    "evolving": {"evolve": True},
    "keyed": {"key": ["n"]},
    "with operations": {"key": ["n"], "op": "op"},
}
"""The arguments of sinks for tables; those that evolve get a table with `n` only."""


def check_table_sink(how: str, target: Callable[[Mapping[str, Any]], testing.sinks.Target]) -> None:
    options = TABLES[how]
    rows: list[dict[str, Any]] = [{"n": n, "text": f"row {n}"} for n in range(12)]
    if "op" not in options:
        testing.check_sink(lambda: target(options), {"n": int, "text": str}, rows)
        return

    def with_operations() -> testing.sinks.Target:
        sink, read = target(options)
        return sink, lambda: [{**row, "op": "insert"} for row in read()]

    changes = [{**row, "op": "insert"} for row in rows]
    testing.check_sink(with_operations, {"n": int, "text": str, "op": str}, changes)


@pytest.mark.turns(2)
@pytest.mark.parametrize("how", TABLES)
def test_the_delta_sink_keeps_to_it(places, how):
    deltalake = pytest.importorskip("deltalake")

    def target(options):
        table = Path(tempfile.mkdtemp(dir=places)) / "table"
        if "evolve" in options:
            deltalake.DeltaTable.create(table, pa.schema([("n", pa.int64())]))
        sink = DeltaSink(table, **options)
        return sink, lambda: pl.read_delta(str(table)).to_dicts() if (table / "_delta_log").exists() else []

    check_table_sink(how, target)


class SharedCatalog(IcebergSink):
    """Has its catalog when it is copied: `check_sink` restarts drivers with copies."""

    properties: dict[str, str]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": CatalogTable(self.properties, ("lake", "t"), None, self._where)}


@pytest.mark.turns(5)
@pytest.mark.parametrize("how", TABLES)
def test_the_iceberg_sink_keeps_to_it(places, how):
    catalogs = pytest.importorskip("pyiceberg.catalog")

    def target(options):
        directory = tempfile.mkdtemp(dir=places)
        properties = {"type": "sql", "uri": f"sqlite:///{directory}/c.db", "warehouse": f"file://{directory}/lake"}
        catalog = catalogs.load_catalog("midstream", **properties)
        if "evolve" in options:
            catalog.create_namespace("lake")
            catalog.create_table("lake.t", pa.schema([("n", pa.int64())]))

        def read():
            return catalog.load_table("lake.t").scan().to_arrow().to_pylist() if catalog.table_exists("lake.t") else []

        sink = SharedCatalog("lake.t", catalog=properties, **options)
        sink.properties = properties
        return sink, read

    check_table_sink(how, target)


@pytest.mark.parametrize("rows", [[{"n": 1}] * 6, [{"n": n} for n in range(5)]], ids=["alike", "few"])
def test_rows_that_show_nothing_are_refused(places, rows):
    with pytest.raises(AssertionError, match="at least six rows, all different"):
        testing.check_sink(target_of(places), {"n": int}, rows)
