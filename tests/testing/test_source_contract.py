"""`testing.check_source`: it passes for the project's own sources, and reports what is wrong with others."""

from __future__ import annotations

import json
import os
import threading

import polars as pl
import pyarrow as pa
import pytest

from midstream import Source, testing
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Split, SplitReader
from midstream.testing import sources

ROWS = 20


class Numbers(Source):
    """Two splits of ten numbers, found one after the other. `wrong` names its mistake."""

    schema = pa.schema([("n", pa.int64())])

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        if wrong == "schema":
            self.schema = pa.schema([("n", pa.string())])
        if wrong == "lock":
            self.lock = threading.Lock()
        self.found = 0

    def discover(self, position, context):
        number = 0 if position is None else json.loads(position)
        if self.wrong == "memory":
            number, self.found = self.found, self.found + 1
        self.opened = True
        name = "same" if self.wrong == "ids" else f"split {number}"
        split = Split(name, str(number).encode(), offset=3 if self.wrong == "new offset" else 0)
        splits = (split,)
        if self.wrong == "parallelism" and context.parallelism > 1:
            splits = (split, Split(f"more {number}", str(number).encode()))  # type: ignore[assignment]
        exhausted = number >= 1 and self.wrong != "endless"
        return Discovery(splits, number + 1 if self.wrong == "position" else str(number + 1).encode(), exhausted)  # type: ignore[arg-type]

    def open_split(self, split):
        if self.wrong == "driver":
            assert self.opened
        return Reader(self.wrong, int(split.payload) * 10, 0 if self.wrong == "from the start" else split.offset)

    def checkpoint_completed(self, position, unfinished=None):
        if self.wrong == "forgets":
            FORGOTTEN.update(int(split.payload) for split in unfinished)


FORGOTTEN: set[int] = set()


class Reader(SplitReader):
    def __init__(self, wrong: str, first: int, done: int) -> None:
        self.wrong = wrong
        self.first = first
        self.done = done

    def read(self, rows_max):
        if self.wrong == "forgets" and self.first // 10 in FORGOTTEN:
            return None
        rows = list(
            range(self.first + self.done, self.first + min(10, self.done + rows_max + (self.wrong == "too many")))
        )
        if self.wrong == "empty" and not rows:
            return pa.RecordBatch.from_pydict({"n": pa.array([], pa.int64())}), self.done
        if not rows:
            return None
        self.done += len(rows)
        batch = pa.RecordBatch.from_pydict({"n": pa.array(rows, pa.int32() if self.wrong == "type" else pa.int64())})
        if self.wrong == "batch":
            return batch
        if self.wrong == "large batches" and rows_max < 1000:
            batch = pa.RecordBatch.from_pydict({"n": pa.array([row + 1 for row in rows])})
        offset = {"standing": 0, "behind": self.done - 1, "ahead": self.done + 1, "text": str(self.done)}
        return batch, offset.get(self.wrong, self.done)


def test_a_source_that_keeps_to_the_contract_passes_and_gives_its_rows():
    rows = testing.check_source(Numbers())
    assert rows.column("n").to_pylist() == list(range(ROWS))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("schema", "column 'n' is string; the engine's type for it is large_string"),
        ("lock", "Numbers does not pickle"),
        ("memory", "discover, called by a new driver from the position"),
        ("ids", "two splits have the id 'same'"),
        ("new offset", "is new, and has the offset 3, not 0"),
        ("parallelism", r"parallelism 4\), stands for other rows than the first time: 20 new"),
        ("endless", "has not returned exhausted=True"),
        ("position", "the position is 1; it is stored in checkpoints, so it must be bytes"),
        ("driver", "open_split raised AttributeError.*another process than discover"),
        ("from the start", "does not resume with the row after that.*row 0 should be {'n': 1}, but is {'n': 0}"),
        ("too many", r"read\(1\) returned 2 rows, more than requested"),
        ("empty", "returned nothing but empty batches for 0.2 s after 10 rows, but the source is bounded"),
        ("type", "has the columns n: int32, but the source's schema has n: int64"),
        ("batch", "returned RecordBatch; return"),
        (
            "large batches",
            "read 1 rows at a time has other rows: row 0 should be {'n': 0}, but is {'n': 1}".replace(
                "rows:", "rows than read 1000 at a time:"
            ),
        ),
        ("standing", "read returned 10 rows and the offset before, 0"),
        ("behind", "row 0 should be {'n': 1}, but is {'n': 0}|the offset before,"),
        ("ahead", "row 0 should be {'n': 1}, but is {'n': 2}"),
        ("text", "the offset '10'; it is stored in checkpoints, so it must be a whole number"),
        ("forgets", "has other rows after checkpoint_completed, which named it as unfinished"),
    ],
)
def test_what_breaks_the_contract_is_reported(wrong, message, monkeypatch):
    monkeypatch.setattr(sources, "MISSING_S", 0.2)
    FORGOTTEN.clear()
    with pytest.raises(AssertionError, match=message):
        testing.check_source(Numbers(wrong))


def test_the_projects_own_sources_keep_to_it(tmp_path):
    frame = pl.DataFrame({"n": range(ROWS), "text": [f"row {n}" for n in range(ROWS)]})
    for format, write in (("parquet", frame.write_parquet), ("csv", frame.write_csv), ("jsonl", frame.write_ndjson)):
        for part in ("a", "b"):
            directory = tmp_path / format
            directory.mkdir(exist_ok=True)
            write(directory / f"{part}.{format}")
            os.utime(directory / f"{part}.{format}", (1_700_000_000, 1_700_000_000))
        for watch in (False, True):
            table = testing.check_source(FileSource(directory, watch=watch))
            assert table.num_rows == 2 * ROWS
    assert testing.check_source(from_rows(frame.to_dicts())).num_rows == ROWS
    assert testing.check_source(GeneratorSource(lambda i: {"n": i}, ROWS)).num_rows == ROWS
    assert testing.check_source(GeneratorSource(lambda i: {"n": i}), rows_max=50).num_rows >= 50


class Live(Source):
    """A topic that never ends: after each row there is none for some reads, as where rows come over a network."""

    bounded = False
    schema = pa.schema([("n", pa.int64())])

    def __init__(self, wrong=""):
        self.wrong = wrong
        self.blocking = wrong != "not blocking"

    def discover(self, position, context):
        splits = () if position else (Split("topic-0", b"0"), Split("topic-1", b"1"))
        return Discovery(splits, b"all", exhausted=False)

    def open_split(self, split):
        return LiveReader(self.wrong, int(split.payload) * 10, split.offset)


class LiveReader(SplitReader):
    def __init__(self, wrong, first, done):
        self.wrong = wrong
        self.first = first
        self.done = done
        self.reads = 0

    def read(self, rows_max):
        self.reads += 1
        if self.done == 5 or self.reads % 4 or (self.wrong == "not blocking" and self.done == 3):
            return pa.RecordBatch.from_pydict({"n": pa.array([], pa.int64())}), self.done
        self.done += 1
        shown = self.done + (self.wrong == "by batches" and rows_max == 7)
        return pa.RecordBatch.from_pydict({"n": pa.array([self.first + shown])}), self.done


def test_a_live_source_has_nothing_for_now_again_and_again():
    assert testing.check_source(Live()).column("n").to_pylist() == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("by batches", "read 7 rows at a time has other rows"),
        ("not blocking", "a source with blocking = False is called again immediately"),
    ],
    ids=["by batches", "not blocking"],
)
def test_what_is_wrong_with_a_live_source_is_reported(wrong, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_source(Live(wrong))


class OfColumns(Source):
    """A source of two columns; `wrong` is what it does wrong when it reads one of them."""

    blocking = False
    supports_projection = True
    schema = pa.schema({"a": pa.int64(), "b": pa.int64()})

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        return Discovery((Split("all", b""),) if position is None else (), b"all", exhausted=True)

    def open_split(self, split: Split) -> SplitReader:
        return ColumnReader(self.schema, split.offset, "")

    def open_projected(self, split: Split, columns: pa.Schema) -> SplitReader:
        return ColumnReader(columns, split.offset, self.wrong)


class ColumnReader(SplitReader):
    def __init__(self, columns: pa.Schema, done: int, wrong: str) -> None:
        self.columns, self.done, self.wrong = columns, done, wrong

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        end = min(self.done + rows_max, 5)
        if end == self.done:
            return None
        numbers, self.done = range(self.done, end), end
        factor = {"a": 1, "b": 3 if self.wrong == "values" else 2}
        made = {name: [n * factor[name] for n in numbers] for name in self.columns.names}
        return pa.RecordBatch.from_pydict(made, schema=self.columns), self.done + (self.wrong == "offsets")


def test_each_column_alone_is_read_as_with_all():
    assert testing.check_source(OfColumns()).num_rows == 5
    with pytest.raises(AssertionError, match=r"open_projected of split 'all' with the column 'b' has other values"):
        testing.check_source(OfColumns("values"))
    with pytest.raises(AssertionError, match=r"'a' has the offsets \[6\], and open_split has \[5\]"):
        testing.check_source(OfColumns("offsets"))
