"""Lakehouse tables, as the common contracts of their sinks meet them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from midstream.connectors.delta.delta_files import WrittenFile
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.iceberg.iceberg_catalog import IcebergFile
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.engine.core.arrow_types import schema_of

TEXT = pa.large_string()
USERS = schema_of([("id", pa.int64()), ("name", TEXT), ("op", TEXT)])
KEYED = {"key": ["id"], "op": "op"}


def users(*rows: tuple[Any, ...]) -> pa.RecordBatch:
    return rows_of(USERS, *rows)


def rows_of(schema: pa.Schema, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


class KeyedTable(ABC):
    """`what`: the sink's class. `committable`: its committables' type. `by_id`: a partitioning by the column `id`."""

    what: str
    committable: type[msgspec.Struct]
    by_id: list[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, columns: pa.Schema = USERS, *, restoring: bool = False, **options: Any) -> Any:
        sink = self.unchecked(**{**KEYED, **options})
        sink.validate(columns, restoring=restoring)
        return sink

    def appending(self, columns: pa.Schema, table: str = "users", *, restoring: bool = False, **options: Any) -> Any:
        """Return a sink without keys."""
        sink = self.unchecked(table, **options)
        sink.validate(columns, restoring=restoring)
        return sink

    def files(self) -> list[Path]:
        """Return the data files of all tables."""
        return sorted(self.path.rglob("*.parquet"))

    @abstractmethod
    def unchecked(self, table: str = "users", **options: Any) -> Any:
        """Return a sink before its validation."""

    @abstractmethod
    def fill(self, *parts: pa.Table) -> None:
        """Create the table, with a file for each part."""

    @abstractmethod
    def found(self, table: str = "users") -> list[tuple[Any, ...]]:
        """Return the rows, as two readers find them."""

    @abstractmethod
    def commits(self) -> int: ...

    @abstractmethod
    def waiting(self) -> list[Path]:
        """Return the files of rows that wait for their commit."""


class KeyedDelta(KeyedTable):
    what = "DeltaSink"
    committable = WrittenFile
    by_id: list[str] = []

    def unchecked(self, table: str = "users", **options: Any) -> DeltaSink:
        return DeltaSink(self.path / table, **options)

    def fill(self, *parts: pa.Table) -> None:
        for part in parts:
            write_deltalake(self.path / "users", part, mode="append")

    def found(self, table: str = "users") -> list[tuple[Any, ...]]:
        rows = sorted(pl.read_delta(str(self.path / table)).rows(), key=repr)
        read = DeltaTable(self.path / table).to_pyarrow_table().to_pylist()
        assert sorted((tuple(row.values()) for row in read), key=repr) == rows
        return rows

    def commits(self) -> int:
        return DeltaTable(self.path / "users").version()

    def waiting(self) -> list[Path]:
        return sorted(self.path.glob("users/_midstream/*"))


class KeyedIceberg(KeyedTable):
    what = "IcebergSink"
    committable = IcebergFile
    by_id = ["bucket(3, id)"]

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        uri, warehouse = f"sqlite:///{path}/catalog.db", f"file://{path}/warehouse"
        self.catalog = load_catalog("midstream", type="sql", uri=uri, warehouse=warehouse)

    def unchecked(self, table: str = "users", **options: Any) -> IcebergSink:
        return IcebergSink(f"lake.{table}", catalog=self.catalog, **options)

    def fill(self, *parts: pa.Table) -> None:
        self.catalog.create_namespace("lake")
        table = self.catalog.create_table("lake.users", parts[0].schema)
        for part in parts:
            table.append(part)

    def found(self, table: str = "users") -> list[tuple[Any, ...]]:
        there = self.catalog.load_table(f"lake.{table}")
        rows = sorted(pl.scan_iceberg(there).collect().rows(), key=repr)
        assert sorted((tuple(row.values()) for row in there.scan().to_arrow().to_pylist()), key=repr) == rows
        return rows

    def commits(self) -> int:
        return len(self.catalog.load_table("lake.users").metadata.snapshots)

    def waiting(self) -> list[Path]:
        return sorted(self.path.glob("warehouse/lake/users/data/_midstream/*"))
