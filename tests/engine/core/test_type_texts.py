"""The texts of types, as settings of state have them, name the same types again."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_values import KINDS

from effort import examples
from midstream.engine.core.type_texts import columns_of_text, type_of_text
from midstream.engine.operators.row_conversion import fields_text


@settings(max_examples=examples(500))
@given(kind=KINDS)
def test_every_type_is_known_by_its_text(kind: pa.DataType) -> None:
    assert type_of_text(str(kind)) == kind


NAMES = st.sampled_from(["a", "b c", "d: e", "f, g", "int64", "k int64", "", "<h>", "é"])


@settings(max_examples=examples(200))
@given(columns=st.lists(st.tuples(NAMES, KINDS), min_size=1, max_size=4))
def test_columns_are_known_by_their_text(columns: list[tuple[str, pa.DataType]]) -> None:
    """Names that look like types are ambiguous, and then some columns with this text are found."""
    text = fields_text(pa.field(name, kind) for name, kind in columns)
    found = columns_of_text(text)
    assert found is not None and fields_text(found) == text
    if all(" " not in name and name for name, _ in columns):
        assert [(field.name, field.type) for field in found] == columns


@pytest.mark.parametrize(
    "text",
    ["", "int65", "pickled", "list<item: int64", "struct<a int64>", "map<int64>", "fixed_size_list<item: int64>[]"]
    + [
        "decimal128(99, 2)",
        "timestamp[us, tz=]",
        "int64 ",
        "my_extension",
        "list<item: int64>>",
        "fixed_size_binary[-1]",
    ],
)
def test_a_text_that_names_no_type_is_none(text: str) -> None:
    assert type_of_text(text) is None


@pytest.mark.parametrize("text", ["", "int64", "k", "k int65", "k int64,", "k int64, ", "k decimal128(99, 2)"])
def test_a_text_that_lists_no_columns_is_none(text: str) -> None:
    assert columns_of_text(text) is None
