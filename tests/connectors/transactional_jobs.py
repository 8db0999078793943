"""The same job into each transactional sink. Run as a program, its driver dies between a commit and the word of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from midstream import Environment
from midstream.connectors.delta import delta_sink
from midstream.connectors.files import keyed_files
from midstream.connectors.iceberg import iceberg_sink
from midstream.connectors.postgres import postgres_sink
from midstream.engine.core.arrow_types import to_list
from midstream.runtime.process.process_slots import ProcessSlots

ROWS = 20_000
COMMITTERS: dict[str, Any] = {
    "postgres": postgres_sink._PostgresCommitter,
    "delta": delta_sink._DeltaCommitter,
    "iceberg": iceberg_sink._IcebergCommitter,
}


@dataclass(frozen=True)
class Target:
    """`kind`: postgres, delta or iceberg; `place`: a connection string, or a directory."""

    kind: str
    place: str

    def job(self, checkpoints: Path, *, rows_per_s: float | None = 10_000, count: int | None = ROWS) -> Environment:
        env = Environment("numbers", parallelism=2, checkpoint_dir=checkpoints, checkpoint_interval="200 ms")
        stream = env.generate(lambda i: {"n": i}, count=count, rows_per_s=rows_per_s).uid("numbers").rebalance()
        if self.kind == "postgres":
            stream.write_postgres(self.place, "numbers").uid("out").name("out")
        elif self.kind == "iceberg":
            stream.write_iceberg("lake.numbers", catalog=self.catalog(), partition_by=["bucket(2, n)"]).uid("out").name(
                "out"
            )
        else:
            stream.write_delta(self.place).uid("out").name("out")
        return env

    def catalog(self) -> dict[str, str]:
        Path(self.place).mkdir(exist_ok=True)
        uri, warehouse = f"sqlite:///{self.place}/catalog.db", f"file://{self.place}/warehouse"
        return {"type": "sql", "uri": uri, "warehouse": warehouse}

    def table(self) -> Table | None:
        catalog = load_catalog("midstream", **self.catalog())
        return catalog.load_table("lake.numbers") if catalog.table_exists("lake.numbers") else None

    def rows(self) -> list[int]:
        """Committed."""
        if self.kind == "iceberg":
            table = self.table()
            return [] if table is None else sorted(to_list(table.scan().to_arrow()["n"]))
        if self.kind == "delta":
            return sorted(pl.read_delta(self.place)["n"].to_list()) if DeltaTable.is_deltatable(self.place) else []
        with psycopg.connect(self.place) as connection:
            if connection.execute("SELECT to_regclass('numbers') IS NULL").fetchone() == (True,):
                return []
            return [n for (n,) in connection.execute("SELECT n FROM numbers ORDER BY n")]

    def pending(self) -> list[str]:
        """Staged, and not committed."""
        if self.kind == "iceberg":
            table = self.table()
            assert table is not None
            known = {Path(task.file.file_path).name for task in table.scan().plan_files()}
            return sorted(path.name for path in Path(self.place).rglob("*.parquet") if path.name not in known)
        if self.kind == "delta":
            known = {Path(file).name for file in DeltaTable(self.place).file_uris()}
            return sorted(path.name for path in Path(self.place).glob("*.parquet") if path.name not in known)
        with psycopg.connect(self.place) as connection:
            found = connection.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^midstream_[0-9a-f]{16}_' ORDER BY 1"
            )
            return [name for (name,) in found]


def changes(i: Any) -> pl.DataFrame:
    """The keys in turn; every third time a key is deleted, and what is put has its number."""
    n, turn = pl.col("n"), pl.col("n") // 97 % 3
    return pl.DataFrame({"n": i}).select(
        who=n % 97,
        n=pl.when(turn < 2).then(n),
        op=turn.replace_strict({0: "insert", 1: "update", 2: "delete"}, return_dtype=pl.String),
    )


def after(count: int) -> dict[int, int]:
    """What is in the table after so many changes."""
    last = {who: (n, op) for who, n, op in changes(range(count)).rows()}
    return {who: n for who, (n, op) in last.items() if op != "delete"}


@dataclass(frozen=True)
class Changes:
    """A table that follows changes. `kind`: postgres, delta or iceberg; `place`: a connection string, or a directory."""

    kind: str
    place: str

    def job(self, checkpoints: Path, *, rows_per_s: float | None = 10_000, count: int | None = ROWS) -> Environment:
        env = Environment("changes", parallelism=2, checkpoint_dir=checkpoints, checkpoint_interval="200 ms")
        stream = env.generate(changes, count=count, rows_per_s=rows_per_s, splits=1).uid("changes").parallelism(1)
        if self.kind == "postgres":
            stream.write_postgres(self.place, "kept", key=["who"], op="op").uid("out").name("out")
        elif self.kind == "iceberg":
            catalog = Target(self.kind, self.place).catalog()
            partition_by = ["bucket(2, n)"]
            kept = stream.write_iceberg(
                "lake.numbers", catalog=catalog, key=["who"], op="op", partition_by=partition_by
            )
            kept.uid("out").name("out")
        else:
            stream.write_delta(self.place, key=["who"], op="op").uid("out").name("out")
        return env

    def rows(self) -> dict[int, int]:
        """Committed."""
        if self.kind == "delta":
            return dict(pl.read_delta(self.place).rows()) if DeltaTable.is_deltatable(self.place) else {}
        if self.kind == "iceberg":
            table = Target(self.kind, self.place).table()
            return {} if table is None else {row["who"]: row["n"] for row in table.scan().to_arrow().to_pylist()}
        with psycopg.connect(self.place) as connection:
            if connection.execute("SELECT to_regclass('kept') IS NULL").fetchone() == (True,):
                return {}
            return dict(connection.execute("SELECT who, n FROM kept").fetchall())

    def pending(self) -> list[str]:
        """Staged, and not committed."""
        if self.kind == "delta":
            return sorted(path.name for path in Path(self.place).glob("_midstream/*"))
        if self.kind == "iceberg":
            return sorted(path.name for path in Path(self.place).rglob("_midstream/*"))
        return Target(self.kind, self.place).pending()


def after_commit(kind: str, then: Callable[[int], None]) -> Callable[..., None]:
    """A `commit` that commits, and then does something else."""
    commit = COMMITTERS[kind].commit

    def committed(self: object, checkpoint_id: int, committables: object) -> None:
        commit(self, checkpoint_id, committables)
        then(checkpoint_id)

    return committed


def main(kind: str, place: str, checkpoints: str, what: str = "rows") -> None:
    """`what`: rows, changes, or files: of merged changes these are not deleted."""

    def die(checkpoint_id: int) -> None:
        if checkpoint_id >= 2:
            os._exit(9)

    job = Target(kind, place) if what == "rows" else Changes(kind, place)
    if what == "files":
        keyed_files.delete_files = lambda *_: os._exit(9)
    else:
        COMMITTERS[kind].commit = after_commit(kind, die)
    job.job(Path(checkpoints), rows_per_s=5_000).execute(slots=ProcessSlots())


if __name__ == "__main__":
    main(*sys.argv[1:])
