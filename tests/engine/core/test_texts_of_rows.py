"""Rows as errors show them."""

from __future__ import annotations

import pyarrow as pa

from midstream.engine.core.error_rows import row_text, value_text


def test_a_value_that_python_cannot_represent_does_not_hide_the_error_that_it_is_part_of() -> None:
    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("s"), safe=False)
    nested = pa.StructArray.from_arrays([far], ["at"])
    shown = row_text(pa.RecordBatch.from_arrays([pa.array([4]), far, nested], ["n", "at", "o"]), 0)
    assert shown.startswith("{'n': 4, 'at': <value out of range: 4611686018427387904>, 'o': ")


def test_text_that_is_not_utf8_is_shown_wherever_it_lies() -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")])
    nested = pa.StructArray.from_arrays([broken], ["x"])
    listed = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), broken)
    encoded = pa.DictionaryArray.from_arrays(pa.array([0]), broken)
    for column in (broken, nested, listed, encoded):
        assert "a\ufffdb" in value_text(column)
        assert "a\ufffdb" in row_text(pa.RecordBatch.from_arrays([column], ["n"]), 0)
