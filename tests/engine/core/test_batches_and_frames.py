"""Record batches to polars and back: the quick ways give what the plain ones do."""

from __future__ import annotations

import decimal
from random import Random
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.lib import concat_batches

from midstream.engine.core.batches import (
    from_polars,
    invalid_value,
    rows_at,
    rows_where,
    single_batch,
    stacked,
    to_arrow,
    to_polars,
    without,
)
from midstream.engine.core.errors import SchemaError

COLUMNS: dict[str, pa.Array[Any]] = {
    "small integers": pa.array([-1, None, 3], pa.int8()),
    "large integers": pa.array([1, 2**64 - 1, None], pa.uint64()),
    "floats": pa.array([-0.0, float("inf"), None], pa.float32()),
    "booleans": pa.array([True, None, False]),
    "text": pa.array(["a", None, "a text that is longer than a view holds"], pa.large_string()),
    "bytes": pa.array([b"a", None, b""], pa.large_binary()),
    "times with a zone": pa.array([1, None, 3], pa.timestamp("ns", "Europe/Berlin")),
    "times": pa.array([1, None, 3], pa.timestamp("ms")),
    "durations": pa.array([1, None, 2], pa.duration("us")),
    "dates": pa.array([1, None, 2], pa.date32()),
    "times of day": pa.array([1, None, 2], pa.time64("us")),
    "decimals": pa.array([decimal.Decimal("1.20"), None, decimal.Decimal("3.45")], pa.decimal128(20, 2)),
    "lists": pa.array([[1, 2], None, []], pa.large_list(pa.int64())),
    "lists of two": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)),
    "structs": pa.array([{"a": 1}, None, {"a": 3}], pa.struct([("a", pa.int64())])),
    "nulls": pa.nulls(3),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(("first", "rows"), [(0, 3), (1, 2), (2, 1), (1, 0)])
def test_a_batch_is_the_frame_that_from_arrow_makes_of_it_and_comes_back_as_it_was(
    name: str, first: int, rows: int
) -> None:
    batch = pa.record_batch({name: COLUMNS[name], "more": pa.array([1, 2, 3])}).slice(first, rows)
    copied = batch.take(pa.array(np.arange(rows), pa.int64()))
    expected = cast(pl.DataFrame, pl.from_arrow(copied))
    frame = to_polars(batch)
    assert frame.schema == expected.schema
    assert frame.equals(expected)
    assert frame.n_chunks() == expected.n_chunks()
    if name != "times of day":  # polars has them in nanoseconds only
        assert from_polars(frame, batch.schema, "test").equals(copied)


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_are_chosen_and_put_together_as_polars_does_it(name: str) -> None:
    once = to_polars(pa.record_batch({name: COLUMNS[name], "more": pa.array([1, 2, 3])}))
    uneven = pl.concat([once.slice(1), once], rechunk=False)
    for frame in (once, once.slice(1, 2), once.clear(), uneven):
        random = Random(frame.height)
        positions = np.array([random.randrange(frame.height) for _ in range(7 if frame.height else 0)], np.int64)
        kept = np.array([random.random() < 0.5 for _ in range(frame.height)], np.bool_)
        for made, expected in (
            (rows_at(frame, positions), frame[positions]),
            (rows_where(frame, kept), frame.filter(pl.Series(kept, dtype=pl.Boolean))),
            (stacked([frame, once, frame]), pl.concat([frame, once, frame])),
            (stacked([frame]), frame),
            (without(frame, [name]), frame.drop(name)),
        ):
            assert made.schema == expected.schema
            assert made.equals(expected)
    if name != "times of day":
        schema = pa.schema({name: COLUMNS[name].type, "more": pa.int64()})
        expected_batch = pa.record_batch({name: COLUMNS[name], "more": pa.array([1, 2, 3])}).take([1, 2, 0, 1, 2])
        assert from_polars(uneven.select("more", name), schema, "test").equals(expected_batch)


@pytest.mark.parametrize("kind", [pl.Int64, pl.List(pl.Int64)])
def test_a_name_with_a_nul_is_refused_whatever_the_types_are(kind: Any) -> None:
    with pytest.raises(SchemaError, match=r"'a\\x00b' has a NUL in its name"):
        from_polars(pl.DataFrame(schema={"a\0b": kind}), pa.schema({"a": pa.int64()}), "test")


def test_many_chunks_become_one_batch_and_none_an_empty_one() -> None:
    table = pa.concat_tables([pa.table({"x": [1]}), pa.table({"x": [2, 3]})])
    assert single_batch(table).column(0).to_pylist() == [1, 2, 3]
    assert single_batch(table.slice(1, 1)).column(0).to_pylist() == [2]
    assert single_batch(pa.schema([("x", pa.int64())]).empty_table()).num_rows == 0
    uneven = pa.table({"x": pa.chunked_array([[1], [2, 3]]), "y": pa.chunked_array([[1, 2], [3]])})
    assert single_batch(uneven).to_pydict() == {"x": [1, 2, 3], "y": [1, 2, 3]}


BYTES = (
    st.none() | st.sampled_from([b"a", b"", "é".encode(), b"caf\xe9", b"\xc3", b"\xa9", b"\xed\xa0\x80"]) | st.binary()
)


@given(texts=st.lists(BYTES, max_size=12), first=st.integers(0, 3), nested=st.sampled_from(["", "struct", "list"]))
def test_the_first_text_that_python_cannot_decode_is_found(texts: list[bytes | None], first: int, nested: str) -> None:
    column: pa.Array[Any] = _as_text(pa.array(texts, pa.large_binary()))
    if nested == "struct":
        column = pa.StructArray.from_arrays([column, column], names=["a", "b"])
    elif nested == "list":
        column = pa.LargeListArray.from_arrays(pa.array(range(len(texts) + 1), pa.int64()), column)
    batch = pa.record_batch({"n": pa.array(range(len(texts)), pa.int64()), "t": column}).slice(first)
    wrong = [
        (row, f"column 't' has the text {text!r:.200}, ")
        for row, text in enumerate(texts[first:])
        if not _is_utf8(text)
    ]
    assert _first_invalid(batch, wrong)


def _first_invalid(batch: pa.RecordBatch, wrong: list[tuple[int, str]]) -> bool:
    """Whether the first of the wrong values is found; each is a row, and how its description begins."""
    found = invalid_value(batch)
    if found is None or not wrong:
        return found is None and not wrong
    return found[0] == wrong[0][0] and found[1].startswith(wrong[0][1])


IN_A_DAY = {
    pa.time32("s"): 86_400,
    pa.time32("ms"): 86_400_000,
    pa.time64("us"): 86_400 * 10**6,
    pa.time64("ns"): 86_400 * 10**9,
}


@given(
    data=st.data(),
    kind=st.sampled_from(list(IN_A_DAY)),
    first=st.integers(0, 3),
    nested=st.sampled_from(["", "struct", "list"]),
)
def test_the_first_time_beyond_the_day_is_found(
    data: st.DataObject, kind: pa.DataType, first: int, nested: str
) -> None:
    day, largest = IN_A_DAY[kind], 2 ** (kind.bit_width - 1) - 1
    tick = st.sampled_from([0, day - 1]) | st.integers(0, day - 1)
    odd = st.sampled_from([day, -1, largest, -largest - 1]) | st.integers(-largest - 1, largest)
    ticks = data.draw(
        st.lists(st.none() | tick, max_size=8).flatmap(
            lambda some: st.lists(st.none() | odd, max_size=3).map(some.__add__)
        )
    )
    column: pa.Array[Any] = pa.array(ticks, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    if nested == "struct":
        column = pa.StructArray.from_arrays([column, column], names=["a", "b"])
    elif nested == "list":
        column = pa.LargeListArray.from_arrays(pa.array(range(len(ticks) + 1), pa.int64()), column)
    batch = pa.record_batch({"n": pa.array(range(len(ticks)), pa.int64()), "t": column}).slice(first)
    assert _first_invalid(
        batch,
        [
            (row, f"column 't' has {tick} as {kind}, which is no time of day: ")
            for row, tick in enumerate(ticks[first:])
            if tick is not None and not 0 <= tick < day
        ],
    )


MAPS = st.none() | st.lists(st.tuples(st.sampled_from(["a", "b", "", "c"]), st.none() | st.integers(0, 1)), max_size=3)


@given(
    maps=st.lists(MAPS, max_size=6),
    first=st.integers(0, 3),
    nested=st.sampled_from(["", "struct", "list", "map"]),
    keys=st.sampled_from(["text", "structs"]),
)
def test_the_first_map_with_a_key_twice_is_found(
    maps: list[list[tuple[str, int | None]] | None], first: int, nested: str, keys: str
) -> None:
    """polars keeps one entry of each key, where it keeps rows at all."""
    column: Any = pa.array(maps, pa.map_(pa.large_string(), pa.int64()))
    if keys == "structs":
        structs = [None if each is None else [({"x": key}, value) for key, value in each] for each in maps]
        column = pa.array(structs, pa.map_(pa.struct([("x", pa.large_string())]), pa.int64()))
    if nested == "struct":
        column = pa.StructArray.from_arrays([column, column], names=["a", "b"])
    elif nested == "list":
        column = pa.LargeListArray.from_arrays(pa.array(range(len(maps) + 1), pa.int64()), column)
    elif nested == "map":
        ends: Any = pa.array(range(len(maps) + 1), pa.int32())
        column = pa.MapArray.from_arrays(ends, pa.array(range(len(maps)), pa.int64()), column)
    batch = pa.record_batch({"n": pa.array(range(len(maps)), pa.int64()), "t": column}).slice(first)
    wrong = []
    for row, entries in enumerate(maps[first:]):
        names = [key for key, _ in entries or ()]
        again = next((key for at, key in enumerate(names) if key in names[:at]), None)
        if again is not None:
            text = repr(again if keys == "text" else {"x": again})
            wrong.append((row, f"column 't' has a map with the key {text} twice; "))
    found = invalid_value(batch)
    assert _first_invalid(batch, wrong), found


def _is_utf8(text: bytes | None) -> bool:
    try:
        (text or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _as_text(values: pa.Array[Any]) -> pa.Array[Any]:
    """Declare bytes to be text, which Arrow does not check."""
    return pa.Array.from_buffers(pa.large_string(), len(values), values.buffers(), values.null_count)


_LISTS = pl.DataFrame({"l": [[-1, -1], [], [7], None, [None], [3, None, 3]]}, schema={"l": pl.List(pl.Int64)})
_SHORTENED = {
    "drop_nulls": pl.col("l").list.drop_nulls(),
    "head": pl.col("l").list.head(0),
    "gather_every": pl.col("l").list.gather_every(5, 4),
    "filter": pl.col("l").list.eval(pl.element().filter(pl.element() > 100)),
    "unique": pl.col("l").list.unique(maintain_order=True),
}
_NESTED = {
    "lists": pl.col("l"),
    "lists of lists": pl.col("l").implode().over(pl.int_range(pl.len())),
    "structs": pl.struct("l"),
    "structs of structs": pl.struct(inner=pl.struct("l", more=pl.lit(1))),
}


@pytest.mark.parametrize("nesting", _NESTED)
@pytest.mark.parametrize("shortened", _SHORTENED)
def test_batches_of_empty_lists_can_be_put_together(shortened: str, nesting: str) -> None:
    """polars shortens lists by offsets into values that it has cut off: what Arrow gets must be whole."""
    for start in range(_LISTS.height):
        for count in (1, 2, 3):
            made = _LISTS.slice(start, count).select(_SHORTENED[shortened]).select(_NESTED[nesting])
            batch = from_polars(made, made.clear().to_arrow(compat_level=pl.CompatLevel.oldest()).schema, "here")
            batch.validate(full=True)
            twice = concat_batches([batch, batch])
            assert to_polars(twice).equals(pl.concat([made, made]))
            assert batch.take(pa.array([0])).to_pylist() == batch.to_pylist()[:1]


def test_lists_of_structs_that_are_all_empty_can_be_written_and_read() -> None:
    """polars may begin the fields of their values past the end of a buffer without bytes, for instance in a join."""
    kind = pl.List(pl.Struct({"x": pl.Int64, "y": pl.Int64}))
    random = Random(0)

    def rows(count: int, share: float) -> pl.DataFrame:
        values = [[{"x": 1, "y": 2}] if random.random() < share else random.choice([None, []]) for _ in range(count)]
        return pl.DataFrame({"i": range(count), "v": values}, {"i": pl.Int64, "v": kind})

    for _ in range(2000):
        share = random.random() / 2
        parts = pl.concat([rows(random.randrange(9), share) for _ in range(random.randrange(1, 5))])
        asked = pl.DataFrame({"i": [random.randrange(12) for _ in range(5)]})
        found = asked.join(parts, on="i", how="left").rechunk()
        for batch in to_arrow(found).to_batches():
            read = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
            read.validate(full=True)
            assert read.equals(batch)
            assert pa.concat_arrays([batch.column("v")] * 2).to_pylist() == found["v"].to_list() * 2
