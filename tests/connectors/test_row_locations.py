"""Where a source says that rows are, for whoever looks for the one that a function has failed on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from midstream.connectors.files import file_source as files
from midstream.connectors.files import line_splitter
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.collection_source import CollectionSource
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split


def splits_of(source: Source, parallelism: int = 2) -> tuple[Split, ...]:
    return source.discover(None, DiscoveryContext("read", parallelism, None)).splits


def test_rows_of_a_collection_and_indices_of_a_generator_are_those_of_the_whole() -> None:
    source = CollectionSource(pa.table({"n": range(100)}))
    second = Split("1", splits_of(source)[1].payload, offset=10)
    assert source.place(second, 3, 3) == "row 63 of the collection, counted from 0"
    assert source.place(second, 0, 4) == "one of the rows 60 to 64 of the collection, counted from 0"
    endless = GeneratorSource(lambda indices: {"n": indices}, splits=4)
    stream = splits_of(endless)[1]
    assert endless.place(stream, 0, 0) == "index 1"
    assert endless.place(Split(stream.id, stream.payload, offset=5), 1, 2) == "one of the indices 25 to 29"


def test_rows_of_a_parquet_file_are_counted_from_where_the_split_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(100)}), path)
    source = FileSource(path)
    (split,) = splits_of(source)
    at = Split(split.id, split.payload, offset=40)
    assert source.place(at, 2, 2) == f"{path}, row 42, counted from 0"


def test_rows_of_a_text_file_are_counted_from_a_byte_that_people_can_cut_at(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(1000)))
    source = FileSource(path)
    (split,) = splits_of(source)
    reader = source.open_split(split)
    seen = 0
    for _ in range(40):
        read = reader.read(3)
        assert read is not None
        batch, offset = read
        for row, n in enumerate(batch.column("n").to_pylist()):
            place = source.place(split, row, row)
            number, byte = int(place.split(" row ")[1].split()[0]), int(place.split(" byte ")[1].split()[0])
            assert path.read_text()[byte:].splitlines()[number] == f'{{"n": {n}}}'
        split = Split(split.id, split.payload, offset)
        seen += batch.num_rows
    reader.close()
    assert seen > 60


def test_the_first_rows_of_a_text_file_or_a_part_of_one_are_counted_from_a_line(tmp_path: Path, monkeypatch) -> None:
    """A part is cut anywhere, and a header is no row."""
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", 1000)
    path = tmp_path / "a.csv"
    path.write_text("n,text\n" + "".join(f"{n},some text\n" for n in range(200)))
    source = FileSource(path)
    first, second, *_ = splits_of(source)
    assert source.place(first, 0, 0) == f"{path}, row 0 from byte 0 on, counted from 0 after the header"
    reader = source.open_split(second)
    read = reader.read(3)
    reader.close()
    assert read is not None
    place = source.place(second, 1, 1)
    assert place.startswith(f"{path}, row 1 from the first line that begins at byte ")
    cut = int(place.split(" byte ")[1].split()[0])
    lines_behind = path.read_text()[cut - 1 :].split("\n")[1:]
    assert lines_behind[1].split(",")[0] == str(read[0].column("n").to_pylist()[1])
