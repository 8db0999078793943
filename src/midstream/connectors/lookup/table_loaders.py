"""Tables that `join_table` loads: files, Delta tables, and what functions return."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.fs

from midstream.connectors.common.filesystem import file_info, resolve
from midstream.connectors.delta.delta_source import DeltaSource
from midstream.connectors.files.file_source import FileSource
from midstream.engine.core.errors import ConfigError, JobError, text_of
from midstream.engine.operators.failed_rows import function_name
from midstream.engine.operators.lookup_table import as_table
from midstream.engine.operators.source_api import DiscoveryContext, Source
from midstream.engine.operators.table_join import TableLoader

_READ_ROWS: Final = 131_072


@runtime_checkable
class StoredTable(TableLoader, Protocol):
    """A table that has columns before it is loaded."""

    def schema(self) -> pa.Schema:
        """Return the columns of the table as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class Files:
    """Parquet, CSV or JSON-lines files, read as `env.read_files` does. `declared`: the columns, if the program names them."""

    paths: tuple[str, ...]
    declared: pa.Schema | None

    @property
    def text(self) -> str:
        return ", ".join(self.paths)

    def datasets(self) -> Sequence[str]:
        return FileSource(self.paths, schema=self.declared).datasets()

    def schema(self) -> pa.Schema:
        return FileSource(self.paths, schema=self.declared).schema

    def load(self) -> pa.Table:
        return _all_rows(FileSource(self.paths, schema=self.declared), self.text)


@dataclass(frozen=True, slots=True)
class DeltaVersion:
    """The newest version of a Delta table."""

    uri: str

    @property
    def text(self) -> str:
        return self.uri

    def datasets(self) -> Sequence[str]:
        return DeltaSource(self.uri).datasets()

    def schema(self) -> pa.Schema:
        return DeltaSource(self.uri).schema

    def load(self) -> pa.Table:
        return _all_rows(DeltaSource(self.uri))


def _all_rows(source: Source, files: str | None = None) -> pa.Table:
    """Return the rows of a table. `files`: what to call files that must not all be empty, as such a file often is while it
    is written.
    """
    batches: list[pa.RecordBatch] = []
    splits = source.discover(None, DiscoveryContext("table", 1, None)).splits
    if files is not None and not splits:
        raise JobError(
            f"{files}: empty (0 bytes), as a file is while it is written. Write a new version under another name, and rename it; "
            "for a table without rows, write a CSV file with a header, or a Parquet file"
        )
    for split in splits:
        reader = source.open_split(split)
        try:
            while (read := reader.read(_READ_ROWS)) is not None:
                batches.append(read[0])
        finally:
            reader.close()
    return pa.Table.from_batches(batches, source.schema)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a function without arguments returns."""

    function: Callable[[], Any]

    @property
    def text(self) -> str:
        return f"{function_name(self.function)}()"

    def load(self) -> pa.Table:
        try:
            made = self.function()
        except Exception as error:
            raise JobError(f"{self.text} raised {type(error).__name__}: {text_of(error)}") from error
        return as_table(made, f"what {self.text} returned")


def of_paths(paths: Sequence[str | os.PathLike[str]], schema: pa.Schema | None) -> Files | DeltaVersion:
    """Return the loader of a path, or of several. Raises ConfigError for a path that is none, and for several tables."""
    texts = []
    for path in paths:
        filesystem, inner = resolve(path, None, "join_table")
        is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        texts.append(inner if is_local else os.fspath(path))
        if file_info(filesystem, f"{inner}/_delta_log").type == pyarrow.fs.FileType.Directory:
            if len(paths) > 1:
                raise ConfigError(f"join_table: {os.fspath(path)} is a Delta table, which is joined on its own")
            return DeltaVersion(texts[0])
    return Files(tuple(texts), schema)
