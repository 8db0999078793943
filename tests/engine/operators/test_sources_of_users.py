"""What a user's source returns is checked before it becomes rows or a part of a checkpoint."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.source_api import (
    Discovery,
    Split,
    checked_count,
    checked_discovery,
    checked_read,
    decoded_splits,
)

COLUMNS: dict[str, pa.DataType] = {"n": pa.int64(), "word": pa.large_string()}
SCHEMA = pa.schema(COLUMNS)
ROW = pa.record_batch({"n": pa.array([1]), "word": pa.array(["a"], pa.large_string())}, schema=SCHEMA)
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just(Fraction(1)),
)


@given(ANYTHING)
def test_an_offset_that_is_accepted_can_be_read_from_a_checkpoint(offset: Any) -> None:
    if isinstance(offset, int) and not isinstance(offset, bool) and 0 <= offset < 2**63:
        _, accepted = checked_read((ROW, offset), SCHEMA, "split 'a'")
        assert decoded_splits([msgspec.msgpack.encode(Split("a", b"", accepted))], "here")[0].offset == offset
        return
    with pytest.raises(ConfigError, match="split 'a': the offset is"):
        checked_read((ROW, offset), SCHEMA, "split 'a'")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_an_offset_that_numpy_has_counted_is_a_whole_number(kind: Any) -> None:
    assert type(checked_read((ROW, kind(7)), SCHEMA, "split 'a'")[1]) is int


@given(
    st.lists(st.one_of(st.builds(Split, ANYTHING, ANYTHING, ANYTHING, st.booleans()), ANYTHING), max_size=2),
    ANYTHING,
    ANYTHING,
)
def test_a_discovery_that_is_accepted_can_be_read_from_a_checkpoint(splits: Any, position: Any, exhausted: Any) -> None:
    found = Discovery(tuple(splits), position, exhausted)
    try:
        assert checked_discovery(found) == found
    except ConfigError:
        return
    decoded = decoded_splits([msgspec.msgpack.encode(split) for split in found.splits], "here")
    assert decoded == list(found.splits)
    assert len({split.id for split in decoded}) == len(decoded)
    assert isinstance(position, bytes) or not splits
    assert isinstance(exhausted, bool)


@given(ANYTHING)
def test_what_is_no_discovery_is_refused(found: Any) -> None:
    with pytest.raises(ConfigError, match="not a Discovery"):
        checked_discovery(found)


def test_two_splits_of_one_name_are_refused_since_their_rows_could_be_the_same() -> None:
    with pytest.raises(ConfigError, match="two splits with the id 'a'"):
        checked_discovery(Discovery((Split("a", b"1"), Split("a", b"2")), b"2", exhausted=True))


def test_splits_without_a_position_are_refused_since_a_restart_would_find_them_again() -> None:
    with pytest.raises(ConfigError, match="the position None"):
        checked_discovery(Discovery((Split("a", b""),), None, exhausted=True))  # type: ignore[arg-type]


def test_splits_that_are_found_are_those_that_are_read_and_stored() -> None:
    every = [Split("a", b""), Split("b", b"")]
    for splits in (
        every,
        tuple(every),
        iter(every),
        (each for each in every),
        {each.id: each for each in every}.values(),
    ):
        found: Any = splits  # also what can be iterated over only once
        assert checked_discovery(Discovery(found, b"", exhausted=True)).splits == tuple(every)
    number: Any = np.int64(3)
    (split,) = checked_discovery(Discovery((Split("a", b"", number),), b"", exhausted=True)).splits
    assert split.offset == 3 and type(split.offset) is int
    others: list[Any] = [None, every[0], "ab", (Split("a\ud800", b""),), (Split("a", b"", follows=1),)]  # type: ignore[arg-type]  # the mistake under test
    for other in others:
        with pytest.raises(ConfigError, match="discover returned"):
            checked_discovery(Discovery(other, b"", exhausted=True))


@pytest.mark.parametrize("time_us", [1.5, True, "2026", 1_767_225_600_000_000_000, -(2**62)])
def test_an_earliest_time_that_no_row_may_have_is_refused(time_us: Any) -> None:
    """A number of nanoseconds would let event time pass all rows of the split."""
    found = Discovery((Split("a", b"", min_time_us=time_us),), b"", exhausted=True)
    with pytest.raises(
        ConfigError, match=r"split 'a' has min_time_us=.*microseconds since 1970, in the years 1 to 9999"
    ):
        checked_discovery(found)


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (ROW, "RecordBatch"),
        ((ROW,), r"\(RecordBatch\)"),
        ((pa.Table.from_batches([ROW]), 1), r"\(Table, int\)"),
        ((ROW, 1, None), r"\(RecordBatch, int, NoneType\)"),
        ({"n": [1]}, "dict"),
    ],
)
def test_what_is_no_batch_with_an_offset_is_refused(read: object, named: str) -> None:
    with pytest.raises(ConfigError, match=f"split 'a': read returned {named}; return a tuple"):
        checked_read(read, SCHEMA, "split 'a'")


def test_rows_have_the_columns_that_the_source_declares() -> None:
    text = ROW.set_column(1, "word", ROW.column("word").cast(pa.string()))
    for same in (ROW, text, text.select(["word", "n"])):
        assert checked_read((same, 1), SCHEMA, "split 'a'")[0].equals(ROW)
    for other, named in (
        (ROW.drop_columns(["n"]), "'n' is missing"),
        (ROW.append_column("more", pa.array([1])), "'more' is not in the declared schema"),
        (ROW.set_column(0, "n", pa.array([1.5])), "'n' is double, declared as int64"),
    ):
        with pytest.raises(SchemaError, match=f"split 'a': column {named}"):
            checked_read((other, 1), SCHEMA, "split 'a'")


@pytest.mark.parametrize("count", [0, -1, 1.5, None, "2"])
def test_a_source_that_requests_no_splits_is_refused_since_it_would_read_none(count: object) -> None:
    with pytest.raises(ConfigError, match="splits_per_reader returned"):
        checked_count(count, "splits_per_reader")
