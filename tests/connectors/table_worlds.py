"""Lakehouse tables as their sources meet them: what other writers do to one, and what is read."""

from __future__ import annotations

import json
import shutil
import struct
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _FastAppendFiles, _OverwriteFiles
from pyiceberg.typedef import Record
from pyiceberg.types import LongType
from pyroaring import BitMap64

from midstream.connectors.delta.delta_source import DeltaSource
from midstream.connectors.files.table_source import TableSource
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable
from midstream.connectors.iceberg.iceberg_source import IcebergSource
from midstream.engine.core.arrow_types import to_list
from midstream.engine.operators.source_api import DiscoveryContext, Split

NUMBERS = pa.schema([("n", pa.int64())])
CONTEXT = DiscoveryContext("in", 2, None)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
NESTED = pa.table(
    {
        "n": pa.array([1, 2], pa.int64()),
        "s": pa.array([{"a": 1, "b": {"c": "x"}}, None], pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))])),
        "l": pa.array([[{"q": 1}, {"q": None}], []], pa.list_(pa.struct([("q", pa.int64())]))),
        "raw": pa.array([b"\0\xff", None], pa.binary()),
        "upper Case.dot": pa.array([1.5, float("-inf")], pa.float64()),
    }
)  # fmt: skip
DEEP = pa.table(
    {
        "n": pa.array([1], pa.int64()),
        "s": pa.array([{"a": 5, "b": {"c": "x"}}], pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string())]))])),
        "l": pa.array([[{"q": 7}]], pa.list_(pa.struct([("q", pa.int64())]))),
        "m": pa.array([[("k", {"z": 1})]], pa.map_(pa.string(), pa.struct([("z", pa.int32())]))),
    }
)  # fmt: skip


class TableWorld(ABC):
    """A table with a column `n` of 64 bits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def create(self, columns: pa.Schema = NUMBERS, partition_by: Sequence[str] = ()) -> None: ...
    @abstractmethod
    def add(self, rows: pa.Table) -> None: ...
    @abstractmethod
    def compact(self) -> None:
        """Put the rows of all files into one."""

    @abstractmethod
    def delete(self, number: int) -> None: ...
    @abstractmethod
    def delete_positions(self, number: int) -> None:
        """Delete rows of the first file that has this number, without writing the file anew."""

    @abstractmethod
    def add_column(self, name: str) -> None: ...
    @abstractmethod
    def widen(self, name: str) -> None:
        """Make a column of 32 bits one of 64."""

    @abstractmethod
    def drop(self) -> None: ...
    @abstractmethod
    def forget(self) -> None:
        """Clean up the metadata of all versions but the newest, as time does."""

    @abstractmethod
    def files(self) -> list[Path]: ...
    @abstractmethod
    def version(self) -> int: ...
    @abstractmethod
    def numbers(self) -> list[int]:
        """What another reader finds."""

    @abstractmethod
    def source(self, **arguments: Any) -> TableSource: ...

    def append(self, *numbers: int) -> None:
        self.add(pa.table({"n": pa.array(numbers, pa.int64())}))


class DeltaWorld(TableWorld):
    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path / "t")

    def create(self, columns: pa.Schema = NUMBERS, partition_by: Sequence[str] = ()) -> None:
        protocol = {"delta.enableDeletionVectors": "true"}
        DeltaTable.create(self.path / "t", columns, partition_by=list(partition_by), configuration=protocol)

    def add(self, rows: pa.Table) -> None:
        write_deltalake(self.path / "t", rows, mode="append", schema_mode="merge")

    def compact(self) -> None:
        self.table.optimize.compact()

    def delete(self, number: int) -> None:
        self.table.delete(f"n = {number}")

    def delete_positions(self, number: int) -> None:
        for version in range(self.version() + 1):
            for line in (self.path / f"t/_delta_log/{version:020d}.json").read_text().splitlines():
                add = json.loads(line).get("add")
                if add and self._deletes(add, number):
                    return
        raise AssertionError(f"no file has {number}")

    def _deletes(self, add: dict[str, Any], number: int) -> bool:
        numbers = pl.read_parquet(self.path / "t" / unquote(add["path"]))["n"].to_list()
        if number not in numbers:
            return False
        rows = [row for row, each in enumerate(numbers) if each == number]
        vector = stored_vector(self.path / "t", rows)
        remove = {"path": add["path"], "dataChange": True, "deletionTimestamp": 1, "partitionValues": {}}
        actions = [
            {"commitInfo": {"timestamp": 1, "operation": "DELETE"}},
            {"remove": remove},
            {"add": {**add, "deletionVector": vector}},
        ]
        log = self.path / f"t/_delta_log/{self.version() + 1:020d}.json"
        log.write_text("\n".join(map(json.dumps, actions)))
        return True

    def add_column(self, name: str) -> None:
        write_deltalake(
            self.path / "t", pa.table({"n": pa.array([], pa.int64()), name: pa.array([], pa.int64())}),
            mode="append", schema_mode="merge",
        )  # fmt: skip

    def widen(self, name: str) -> None:
        old = self.table.schema().to_json()
        new = old.replace(f'"name":"{name}","type":"integer"', f'"name":"{name}","type":"long"')
        assert new != old
        found = self.table.metadata()
        described = {
            "id": str(found.id), "schemaString": new, "partitionColumns": found.partition_columns,
            "format": {"provider": "parquet", "options": {}}, "configuration": found.configuration,
        }  # fmt: skip
        log = self.path / f"t/_delta_log/{self.version() + 1:020d}.json"
        log.write_text(json.dumps({"metaData": described}))

    def drop(self) -> None:
        shutil.rmtree(self.path / "t")

    def forget(self) -> None:
        self.table.create_checkpoint()
        for path in sorted((self.path / "t/_delta_log").glob("0*.json"))[:-1]:
            path.unlink()

    def files(self) -> list[Path]:
        return [Path(uri) for uri in self.table.file_uris()]

    def version(self) -> int:
        return self.table.version()

    def numbers(self) -> list[int]:
        return sorted(pl.read_delta(str(self.path / "t"))["n"].to_list())

    def source(self, **arguments: Any) -> TableSource:
        return DeltaSource(self.path / "t", **arguments)


def stored_vector(table: Path, rows: Sequence[int], *, inline: bool = False, prefix: str = "") -> dict[str, Any]:
    """Store a deletion vector as Spark does, in a file (with another one before it) or inline; return its descriptor."""
    data = struct.pack("<I", 1681511377) + BitMap64(rows).serialize()
    described = {"sizeInBytes": len(data), "cardinality": len(rows)}
    if inline:
        padded = data + bytes(-len(data) % 4)
        return {"storageType": "i", "pathOrInlineDv": _z85(padded), **described}
    name = uuid.uuid4()
    checked = struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (table / prefix).mkdir(exist_ok=True)
    (table / prefix / f"deletion_vector_{name}.bin").write_bytes(b"\x01" + checked + checked)
    at = {"storageType": "u", "pathOrInlineDv": prefix + _z85(name.bytes), "offset": 1 + len(checked)}
    return {**at, **described}


def _z85(data: bytes) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    text = ""
    for start in range(0, len(data), 4):
        number = int.from_bytes(data[start : start + 4], "big")
        text += "".join(digits[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text


class _WithCatalog(IcebergSource):
    """Keeps the catalog when it is copied, for `check_source`, which discovers with a copy."""

    properties: dict[str, str]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": CatalogTable(self.properties, ("lake", "t"), None, self._where)}


class _ReplaceFiles(_OverwriteFiles):
    def _summary(self, snapshot_properties: Any = MappingProxyType({})) -> Summary:
        return Summary(Operation.REPLACE)


class _DeleteWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES


class IcebergWorld(TableWorld):
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{self.path}/c.db", "warehouse": f"file://{self.path}/warehouse"}

    @property
    def catalog(self) -> Catalog:
        return load_catalog("midstream", **self.properties())

    @property
    def table(self) -> Table:
        return self.catalog.load_table("lake.t")

    def create(self, columns: pa.Schema = NUMBERS, partition_by: Sequence[str] = ()) -> None:
        catalog = self.catalog
        catalog.create_namespace_if_not_exists("lake")
        made = catalog.create_table("lake.t", columns)
        with made.update_spec() as spec:
            for name in partition_by:
                spec.add_identity(name)

    def add(self, rows: pa.Table) -> None:
        self.table.append(
            rows.cast(pa.schema([field for field in self.table.schema().as_arrow() if field.name in rows.column_names]))
        )

    def compact(self) -> None:
        table = self.table
        old = [task.file for task in table.scan().plan_files()]
        with table.transaction() as changed:
            update = _ReplaceFiles(operation=Operation.OVERWRITE, transaction=changed, io=table.io)
            for file in old:
                update.delete_data_file(file)
            rows = table.scan().to_arrow()
            for file in _dataframe_to_data_files(table.metadata, rows, table.io) if rows.num_rows else ():
                update.append_data_file(file)
            update.commit()

    def delete(self, number: int) -> None:
        self.table.delete(f"n = {number}")

    def delete_positions(self, number: int) -> None:
        table = self.table
        for task in table.scan().plan_files():
            numbers = pl.read_parquet(task.file.file_path.removeprefix("file://"))["n"].to_list()
            rows = [row for row, each in enumerate(numbers) if each == number]
            if rows:
                break
        path = self.path / f"warehouse/{uuid.uuid4()}-deletes.parquet"
        pl.DataFrame({"file_path": [task.file.file_path] * len(rows), "pos": rows}).write_parquet(path)
        file = DataFile.from_args(
            content=DataFileContent.POSITION_DELETES, file_path=f"file://{path}", file_format=FileFormat.PARQUET,
            partition=Record(), record_count=len(rows), file_size_in_bytes=path.stat().st_size,
        )  # fmt: skip
        file.spec_id = 0
        with table.transaction() as changed:
            _AddDeletes(file, Operation.OVERWRITE, changed, table.io).commit()

    def add_column(self, name: str) -> None:
        with self.table.update_schema() as update:
            update.add_column(name, LongType())

    def widen(self, name: str) -> None:
        with self.table.update_schema() as update:
            update.update_column(name, LongType())

    def drop(self) -> None:
        self.catalog.drop_table("lake.t")

    def forget(self) -> None:
        path = Path(self.table.metadata_location.removeprefix("file://"))
        found = json.loads(path.read_text())
        newest = found["current-snapshot-id"]
        found["snapshots"] = [each for each in found["snapshots"] if each["snapshot-id"] == newest]
        found["snapshot-log"] = [each for each in found["snapshot-log"] if each["snapshot-id"] == newest]
        path.write_text(json.dumps(found))

    def files(self) -> list[Path]:
        return [Path(task.file.file_path.removeprefix("file://")) for task in self.table.scan().plan_files()]

    def version(self) -> int:
        newest = self.table.current_snapshot()
        assert newest is not None
        return newest.snapshot_id

    def numbers(self) -> list[int]:
        return sorted(to_list(self.table.scan().to_arrow()["n"]))

    def source(self, **arguments: Any) -> TableSource:
        source = _WithCatalog("lake.t", catalog=self.properties(), **arguments)
        source.properties = self.properties()
        return source


class _AddDeletes(_FastAppendFiles):
    def __init__(self, file: DataFile, operation: Operation, transaction: Any, io: Any) -> None:
        super().__init__(operation, transaction, io)
        self.append_data_file(file)

    def new_manifest_writer(self, spec: Any) -> Any:
        manifest = self.new_manifest_output()
        return _DeleteWriter(spec, self._transaction.table_metadata.schema(), manifest, self._snapshot_id, "null")


WORLDS: dict[str, type[TableWorld]] = {"delta": DeltaWorld, "iceberg": IcebergWorld}


class Job:
    """Reads a source as a job does, split by split; restarts from its position."""

    def __init__(self, source: TableSource, position: bytes | None = None) -> None:
        self.source = source
        self.position = position

    def splits(self) -> tuple[Split, ...]:
        found = self.source.discover(self.position, CONTEXT)
        again = self.source.discover(self.position, CONTEXT)
        assert self.position is None or found == again, "a discovery can be repeated"
        self.position = found.position
        return found.splits

    def rows(self, rows_max: int = 1000) -> list[dict[str, Any]]:
        return [row for split in self.splits() for row in read(self.source, split, rows_max)]

    def numbers(self) -> list[int]:
        return sorted(row["n"] for row in self.rows())


def read(source: TableSource, split: Split, rows_max: int = 1000) -> Iterator[dict[str, Any]]:
    reader = source.open_split(split)
    while (found := reader.read(rows_max)) is not None:
        yield from found[0].to_pylist()
    reader.close()
