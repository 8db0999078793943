"""Columns in a file have the values and the types that they had in memory, and take no memory."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import IO, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from midstream.engine.core.batches import to_polars
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.columns_on_disk import bytes_of, on_disk
from midstream.engine.state.join_index import TimedRun
from midstream.engine.state.session_index import IndexedRun
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.tombstones import TombstonedRun
from on_disk import MemoryDisk, move_all

COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "integers": (pa.int64(), [1, None, -(2**63), 2**63 - 1]),
    "small": (pa.int8(), [1, None, -128, 127]),
    "unsigned": (pa.uint64(), [1, None, 0, 2**64 - 1]),
    "floats": (pa.float64(), [0.5, None, float("-inf"), -0.0]),
    "halves": (pa.float32(), [0.5, None, 1.5, -0.0]),
    "truth": (pa.bool_(), [True, None, False, True]),
    "texts": (pa.large_string(), ["", None, "short", "longer than twelve bytes, ä"]),
    "bytes": (pa.large_binary(), [b"", None, b"\0", b"longer than twelve bytes\xff"]),
    "decimals": (pa.decimal128(38, 3), [Decimal("1.500"), None, Decimal("-0.001"), Decimal(10**30)]),
    "dates": (pa.date32(), [date(1970, 1, 1), None, date(1, 1, 1), date(9999, 12, 31)]),
    "instants": (pa.timestamp("ns", "Europe/Berlin"), [datetime(1970, 1, 1), None, datetime(2024, 6, 1), None]),
    "spans": (pa.duration("us"), [timedelta(1), None, timedelta(-1), timedelta(0)]),
    "times": (pa.time64("ns"), [time(1, 2, 3), None, time(0), time(23, 59, 59)]),
    "lists": (pa.large_list(pa.large_string()), [["a" * 20, None], None, [], ["b"]]),
    "arrays": (pa.list_(pa.int16(), 2), [[1, 2], [3, None], [5, 6], [7, 8]]),
    "structs": (
        pa.struct([("x", pa.int64()), ("y", pa.large_list(pa.decimal128(5, 1)))]),
        [{"x": 1, "y": [Decimal("1.5")]}, None, {"x": None, "y": None}, {"x": 2, "y": []}],
    ),
    "categories": (pa.dictionary(pa.uint32(), pa.large_string()), ["a", None, "b" * 20, "a"]),
    "nothing": (pa.null(), [None] * 4),
}


def frame_of(*kinds: str) -> pl.DataFrame:
    return to_polars(pa.table({kind: pa.array(COLUMNS[kind][1], COLUMNS[kind][0]) for kind in kinds}))


def moved(frame: pl.DataFrame) -> pl.DataFrame:
    (there,) = on_disk((frame,), MemoryDisk())
    assert isinstance(there, pl.DataFrame)
    return there


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 3), slice(1, 2)])
def test_a_column_of_every_type_is_the_same_on_disk(kind: str, rows: slice) -> None:
    for frame in (frame_of(kind), pl.concat([frame_of(kind), frame_of(kind)], rechunk=False)):
        part = frame[rows]
        there = moved(part)
        assert there.schema == part.schema
        assert there.equals(part)


def test_a_frame_of_all_types_keeps_its_columns_in_their_order_and_with_their_names() -> None:
    frame = frame_of(*COLUMNS)
    there = moved(frame)
    assert there.schema == frame.schema and there.equals(frame)
    odd = pl.DataFrame({"1": [1], "0": [2], "": [3], "________0": [4]})
    assert moved(odd).equals(odd)


def test_an_enumeration_keeps_its_members() -> None:
    frame = pl.DataFrame({"e": pl.Series(["b", "a"], dtype=pl.Enum(["a", "b", "c"]))})
    assert moved(frame).schema == frame.schema and moved(frame).equals(frame)


def test_a_slice_of_a_large_text_column_is_stored_without_the_rest() -> None:
    frame = pl.DataFrame({"s": [f"a text of more than twelve bytes {i}" for i in range(10_000)]})
    sizes: list[int] = []

    class Measured(MemoryDisk):
        def map(self, write: Any) -> memoryview:
            data = super().map(write)
            sizes.append(len(data))
            return data

    on_disk((frame.slice(5_000, 10),), Measured())
    assert sizes[0] < 5_000


def test_nothing_is_copied_when_a_file_is_mapped() -> None:
    """Not even decimals, which have to begin at a multiple of 16 bytes."""
    for names in (["d"], ["s", "d"], ["d", "s", "n"]):
        mapped: list[tuple[int, int]] = []

        class Noting(MemoryDisk):
            def map(self, write: Any, mapped: list[tuple[int, int]] = mapped) -> memoryview:
                data = super().map(write)
                start = pa.py_buffer(data).address
                mapped.append((start, start + len(data)))
                return data

        frame = pl.DataFrame({"d": [Decimal("1.5")] * 100, "s": ["longer than twelve bytes"] * 100, "n": range(100)})
        there, array = on_disk((frame.select(names), np.arange(100)), Noting())
        assert isinstance(there, pl.DataFrame) and isinstance(array, np.ndarray)
        begin, end = mapped[-1]
        assert begin <= array.ctypes.data < end and not array.flags.writeable
        newest = there.to_arrow(compat_level=pl.CompatLevel.newest())
        for column in newest.columns:
            for chunk in column.chunks:
                for buffer in chunk.buffers():
                    assert buffer is None or begin <= buffer.address < end, (names, column.type)


def test_arrays_that_are_moved_later_do_not_need_the_frame() -> None:
    codes, none, rows = on_disk((np.arange(5, dtype=np.uint64), None, np.arange(5)[::-1]), MemoryDisk())
    assert none is None
    assert isinstance(codes, np.ndarray) and isinstance(rows, np.ndarray)
    assert codes.dtype == np.uint64 and codes.tolist() == [0, 1, 2, 3, 4] and rows.tolist() == [4, 3, 2, 1, 0]


def test_every_kind_of_run_finds_the_same_rows_on_disk() -> None:
    frame = pl.DataFrame({"k": [3, 1, 2, 1], "s": ["a", "b", "c", "d"]})
    hashes, times = np.array([3, 1, 2, 1], np.uint64), np.array([5, 6, 7, 8])
    table, timed, indexed = TableRun(frame), TimedRun(frame, hashes, times), IndexedRun(frame, hashes, times)
    table.positions(np.array([1], np.uint64), ["k"])
    assert timed.due(6).tolist() == [3, 0]
    for run in (FrameRun(frame), table, timed, indexed):
        before = run.frame
        move_all([run])
        assert run.frame is not before and run.frame.equals(before)
    assert table.positions(np.array([1, 3], np.uint64), ["k"]).tolist() == [0, 1, 3]
    assert timed.due(6).tolist() == [3, 0] and timed.hashes.tolist() == [1, 1, 2, 3]
    assert indexed.positions(np.array([1, 3], np.uint64)).tolist() == [0, 1, 3]
    indexed.remove(np.array([0]))
    assert indexed.positions(np.array([1, 3], np.uint64)).tolist() == [1, 3]


def test_rows_that_are_overwritten_are_not_moved_before_their_frame_is_read() -> None:
    run = TableRun(pl.DataFrame({"k": [1, 2], "v": [10, 20]}))
    changed = run.overwritten(np.array([1]), {"v": np.array([21])}, np.array([0]))
    assert changed is not None and changed is not run
    assert changed.columns() == ()
    assert changed.frame["v"].to_list() == [10, 21]
    move_all([run, changed])
    again = changed.overwritten(np.array([0]), {"v": np.array([11])}, np.array([0]))
    assert again is not None and again is not changed, "what lies on disk is copied before it is overwritten"
    assert again.frame["v"].to_list() == [11, 21]
    assert changed.frame["v"].to_list() == [10, 21] and run.frame["v"].to_list() == [10, 20]


def test_the_living_rows_of_a_run_stay_the_same_object_and_hold_no_copy() -> None:
    """A checkpoint recognises it, and does not store the rows again."""
    run = TombstonedRun(pl.DataFrame({"k": [1, 2, 3]}))
    run.remove(np.array([1]))
    living = run.living
    living.chunk_id = "stored"
    assert living.frame["k"].to_list() == [1, 3]
    move_all([run])
    assert run.living is living and living.chunk_id == "stored"
    assert living.frame["k"].to_list() == [1, 3] and living.frame is not living.frame


def test_the_size_of_columns_is_that_of_their_values() -> None:
    assert bytes_of(None) == 0
    assert bytes_of(np.zeros(10, np.int32)) == 40
    frame = pl.DataFrame({"n": np.arange(100_000)})
    assert bytes_of(frame) == 800_000 and bytes_of(frame.slice(0, 1000)) == 8_000
    texts = pl.DataFrame({"s": ["x" * 40] * 1000})
    assert 56_000 <= bytes_of(texts) <= 60_000, "of each text its bytes, and what refers to them"


def test_a_disk_that_fails_is_reported_and_changes_nothing() -> None:
    disk = MemoryDisk()
    disk.is_full = True
    with pytest.raises(OSError, match="No space left on device"):
        on_disk((pl.DataFrame({"k": [1]}),), disk)


def test_a_disk_that_fails_in_the_middle_is_reported_as_it_is() -> None:
    class Failing:
        def write(self, data: bytes) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None: ...

    class Broken(MemoryDisk):
        def map(self, write: Any) -> memoryview:
            file: IO[bytes] = Failing()  # type: ignore[assignment]
            write(file)
            raise AssertionError("it was written")

    with pytest.raises(OSError, match="Input/output error"):
        on_disk((pl.DataFrame({"k": [1]}),), Broken())
