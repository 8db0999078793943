"""The bytes of rows are equal exactly if the rows are, wherever batches are cut."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.row_keys import RowKeysOperator, row_keys

VALUES: Final[list[tuple[pa.DataType, list[Any]]]] = [
    (pa.int8(), [-1, 0, 1, 127]),
    (pa.uint64(), [0, 2**64 - 1, 255, 256]),
    (pa.float64(), [0.0, -0.0, 1.5, math.nan, -math.nan, math.inf, 5e-324]),
    (pa.float32(), [0.0, -0.0, math.nan, 1.5]),
    (pa.float16(), [0.0, -0.0, math.nan, 1.5]),
    (pa.bool_(), [True, False]),
    (pa.large_string(), ["", "a", "ab", "b", "\0", "a\0"]),
    (pa.large_binary(), [b"", b"a", b"ab", b"\0"]),
    (pa.decimal128(38, 2), [Decimal("0"), Decimal("0.01"), Decimal(-(10**30))]),
    (pa.date32(), [date(1970, 1, 1), date(1, 1, 1)]),
    (pa.time32("s"), [time(0), time(23, 59)]),
    (pa.time64("ns"), [time(0), time(23, 59)]),
    (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1), datetime(2024, 1, 1)]),
    (pa.duration("ms"), [timedelta(0), timedelta(-1)]),
    (pa.binary(3), [b"abc", b"\0\0\0"]),
]


def canonical(value: Any) -> Any:
    """What of a value makes it equal to others."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_the_bytes_of_rows_are_equal_exactly_if_all_their_values_are(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
    row = st.tuples(*(st.one_of(st.none(), st.sampled_from(values)) for _, values in chosen))
    rows = data.draw(st.lists(row, min_size=1, max_size=12))
    schema = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(chosen)])
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)],
        schema=schema,
    )
    whole = row_keys(batch).to_pylist()
    start = data.draw(st.integers(0, len(rows)))
    assert row_keys(batch.slice(start)).to_pylist() == whole[start:]
    expected = [tuple(map(canonical, values)) for values in rows]
    for one, of_one in zip(whole, expected, strict=True):
        for other, of_other in zip(whole, expected, strict=True):
            assert (one == other) == (of_one == of_other), (of_one, of_other)


def test_the_bytes_stay_as_they_are() -> None:
    """They are in checkpoints."""
    batch = pa.record_batch(
        {"n": pa.array([1, None]), "s": pa.array(["ab", None], pa.large_string()), "x": pa.array([-0.0, math.nan])}
    )
    expected = [
        "00 0100000000000000 00 0200000000000000 00 0000000000000000 6162",
        "01 0000000000000000 01 0000000000000000 00 000000000000f87f",
    ]
    assert [bytes(key or b"").hex() for key in row_keys(batch).to_pylist()] == [
        row.replace(" ", "") for row in expected
    ]


@pytest.mark.parametrize("kind", [pa.large_list(pa.int64()), pa.struct([("a", pa.int64())]), pa.null()])
def test_columns_that_cannot_be_compared_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(
        SchemaError, match=r"operator 'd': column 'c' is .*, which cannot be compared; name the columns"
    ):
        RowKeysOperator("d", "__row", pa.schema([("c", kind)]))
