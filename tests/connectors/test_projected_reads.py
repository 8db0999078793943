"""A source that reads some of its columns has exactly the rows and offsets that it has with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import all_splits
from table_worlds import WORLDS

from midstream import SchemaError, Source
from midstream.connectors.files.file_source import FileSource
from midstream.engine.operators.source_api import Split, SplitReader

FIELDS: list[pa.Field[Any]] = [
    pa.field("n", pa.int64()),
    pa.field("who", pa.large_string()),
    pa.field("day", pa.large_string()),
    pa.field("at", pa.timestamp("us")),
    pa.field("box", pa.struct([("x", pa.int64())])),
]
COLUMNS = pa.schema(FIELDS)


def table(first: int, rows: int) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "n": [*numbers],
            "who": [f"w{n}" if n % 3 else None for n in numbers],
            "day": [f"d{first}"] * rows,
            "at": [n * 1_000_000 for n in numbers],
            "box": [{"x": n} for n in numbers],
        },
        COLUMNS,
    )


def files(path: Path) -> Source:
    (path / "in").mkdir()
    for first in (0, 40):
        pq.write_table(table(first, 40), path / "in" / f"{first}.parquet", row_group_size=15)
    return FileSource(path / "in")


def declared_files(path: Path) -> Source:
    """Columns in another order, one that no value of may be null, and one that the second file lacks."""
    (path / "in").mkdir()
    pq.write_table(table(0, 40), path / "in" / "0.parquet", row_group_size=15)
    pq.write_table(table(40, 40).drop_columns(["who", "at"]), path / "in" / "1.parquet")
    names = ("at", "box", "who", "n")
    return FileSource(path / "in", schema=pa.schema([COLUMNS.field(n).with_nullable(n != "n") for n in names]))


def files_in_folders(path: Path) -> Source:
    for first in (0, 40):
        folder = path / "in" / f"day=d{first}"
        folder.mkdir(parents=True)
        pq.write_table(table(first, 40).drop_columns(["day"]), folder / "a.parquet")
    return FileSource(path / "in")


def of_table(kind: str, *, is_partitioned: bool) -> Callable[[Path], Source]:
    def made(path: Path) -> Source:
        world = WORLDS[kind](path)
        world.create(COLUMNS, partition_by=["day"] if is_partitioned else ())
        world.add(table(0, 40))
        world.add(table(40, 40))
        if not is_partitioned:
            world.delete_positions(7)
        world.add_column("late")
        return world.source()

    return made


SOURCES = {
    "files": files,
    "declared files": declared_files,
    "files in folders": files_in_folders,
    **{kind: of_table(kind, is_partitioned=False) for kind in WORLDS},
    **{f"partitioned {kind}": of_table(kind, is_partitioned=True) for kind in WORLDS},
}


def rest(reader: SplitReader) -> pa.Table | None:
    batches = []
    while (found := reader.read(17)) is not None:
        batches.append(found[0])
    reader.close()
    return pa.Table.from_batches(batches) if batches else None


def offsets(source: Source, split: Split, columns: pa.Schema) -> list[int]:
    reader, found = source.open_projected(split, columns), [split.offset]
    while (batch := reader.read(17)) is not None:
        found.append(batch[1])
    reader.close()
    return found


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_some_columns_are_read_as_they_are_read_with_all(make, tmp_path):
    source = make(tmp_path)
    assert source.supports_projection
    names: Sequence[str] = source.schema.names
    subsets = [each for size in (1, 2, len(names) - 1) for each in combinations(names, size)]
    splits = all_splits(source)
    assert len(splits) >= 2
    for split in splits:
        all_offsets = offsets(source, split, source.schema)
        for offset in (0, 17, all_offsets[-1]):
            at = msgspec.structs.replace(split, offset=offset)
            everything = rest(source.open_split(at))
            for subset in subsets:
                columns = pa.schema([source.schema.field(name) for name in subset])
                found = rest(source.open_projected(at, columns))
                if everything is None:
                    assert found is None
                else:
                    assert found is not None and found.schema.equals(columns)
                    assert found.equals(everything.select(list(subset)))
                    assert offsets(source, split, columns) == all_offsets


def test_a_value_that_must_not_be_missing_is_checked_although_nothing_reads_it(tmp_path):
    pl.DataFrame({"n": [1, None], "m": [1, 2]}).write_parquet(tmp_path / "a.parquet")
    source = FileSource(
        tmp_path, schema=pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("m", pa.int64())])
    )
    (split,) = all_splits(source)
    with pytest.raises(SchemaError, match="row 2: column 'n' has no value"):
        rest(source.open_projected(split, pa.schema([("m", pa.int64())])))


def test_columns_of_a_file_are_checked_although_nothing_reads_them(tmp_path):
    pl.DataFrame({"n": [1], "m": [1]}).write_parquet(tmp_path / "a.parquet")
    pl.DataFrame({"n": [2], "m": ["text"]}).write_parquet(tmp_path / "b.parquet")
    source = FileSource(tmp_path)
    _, second = all_splits(source)
    with pytest.raises(SchemaError, match=r"b\.parquet: column 'm' is large_string, in other files as int64"):
        rest(source.open_projected(second, pa.schema([("n", pa.int64())])))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_lines_are_read_as_a_whole_since_any_value_may_be_bad(tmp_path, name):
    (tmp_path / name).write_text("n,m\n1,2\n" if name == "a.csv" else '{"n": 1, "m": 2}\n')
    assert not FileSource(tmp_path / name).supports_projection
