"""Values are parsed a batch at a time, and come out as if each had been parsed alone; no broker is needed for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.kafka.fetched_records import ObjectRecords
from midstream.connectors.kafka.record_parser import RecordParser
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import SchemaError

SCHEMA = schema_of([("n", pa.int64()), ("t", pa.large_string())])
FRAGMENTS = [
    b"{",
    b"}",
    b'{"n":1}',
    b'{"n": 2, "t": "x"}',
    b'"n":3',
    b",",
    b"\n",
    b"\r",
    b" ",
    b'"',
    b"[",
    b"]",
    b"null",
    b"{}",
]
FRAGMENTS += [b'{"t":"', b'"}', b"\xff", b"\\", b"\x00", b"\xef\xbb\xbf", "é".encode(), b'{"n":9223372036854775808}']


@dataclass(frozen=True)
class Record:
    """What the parser uses of a message."""

    content: bytes | None
    number: int

    def value(self) -> bytes | None:
        return self.content

    def offset(self) -> int:
        return self.number

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def key(self) -> bytes:
        return b"k%d" % self.number

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000 + self.number


PARSERS = {how: RecordParser("json", SCHEMA, ["offset"], how == "drop", "test") for how in ("fail", "drop")}


def parse(values: list[bytes | None], on_bad_record: str, first: int = 0) -> list[dict[str, Any]]:
    records = ObjectRecords([Record(value, at) for at, value in enumerate(values, first)])  # type: ignore[misc]
    batch, bad = PARSERS[on_bad_record].rows(records, "t")
    rows: list[dict[str, Any]] = batch.to_pylist()
    missing = set(range(first, first + len(values))) - {row["offset"] for row in rows}
    assert [each.position for each in bad] == sorted(missing), "each record is a row or a bad record"
    for each in bad:
        assert each.at == each.position - first and each.data == values[each.at]
        assert (each.source, each.partition, each.key) == ("t", 3, b"k%d" % each.position)
        assert each.error.startswith("the record's value is not json"), each.error
    return rows


def alone(value: bytes | None, offset: int) -> list[dict[str, Any]]:
    """The row of one record; none if it is bad."""
    return parse([value], "drop", offset)


def is_object(value: bytes | None) -> bool:
    """By another parser."""
    try:
        return value is None or isinstance(msgspec.json.decode(value), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


HALVES = [
    b"",
    b" ",
    b'{"n":1}',
    b'{"n":1}{"n":2}',
    b'{"n":1}\n{"n":2}',
    b'{"n":1',
    b"}",
    b'}{"n":3}',
    b'{"t":"',
    b'"}',
    b'{"n":\n4}',
]
"""What a neighbour may complete, or make up for."""
made_up = st.lists(st.sampled_from(FRAGMENTS), max_size=4).map(b"".join)
records = st.lists(st.none() | st.sampled_from(HALVES) | made_up, min_size=1, max_size=6)


@given(records)
@settings(max_examples=examples(400))
def test_records_of_a_batch_come_out_as_each_would_alone(values):
    single = [row for offset, value in enumerate(values) for row in alone(value, offset)]
    assert parse(values, "drop") == single
    if len(single) == len(values):
        assert parse(values, "fail") == single
    else:
        bad = min(set(range(len(values))) - {row["offset"] for row in single})
        with pytest.raises(SchemaError, match=f"t, offset {bad}: "):
            parse(values, "fail")


@given(records)
@settings(max_examples=examples(400))
def test_what_is_taken_for_an_object_is_one(values):
    for value in values:
        assert not alone(value, 0) or is_object(value), value
