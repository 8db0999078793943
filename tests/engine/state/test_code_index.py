"""The index of a run finds the same codes as a dict, however they are spread."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.state import code_index
from midstream.engine.state.code_index import Index

LAST = 2**64 - 1
CODE = st.one_of(
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(LAST - 9, LAST),
    st.sampled_from([2**63 - 1, 2**63, 2**40]),
    st.integers(0, LAST),
)
CODES = st.lists(CODE, max_size=40)


@settings(max_examples=examples(200))
@given(CODES, st.lists(CODES, min_size=1, max_size=4), st.sampled_from([1, 2, 16]), st.sampled_from([1, 10**9]))
def test_an_index_finds_the_rows_that_a_dict_has(
    held: list[int], searches: list[list[int]], codes_max: int, share: int
) -> None:
    with (
        patch.object(code_index, "BUCKETED_MIN", 1),
        patch.object(code_index, "CODES_MAX", codes_max),
        patch.object(code_index, "SEARCHED_SHARE", share),
    ):
        codes = np.array(held, np.uint64)
        order = codes.argsort(kind="stable")
        index = Index.of(codes[order], order)
        for search in searches:
            requested = np.unique(np.array(search, np.uint64))
            rows, numbers = index.find(requested)
            assert rows.dtype == numbers.dtype == np.int64
            expected = [
                (row, number)
                for number, code in enumerate(requested.tolist())
                for row, other in enumerate(held)
                if other == code
            ]
            assert list(zip(rows.tolist(), numbers.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    "codes", [np.arange(0, 60_000, 3), np.random.default_rng(1).integers(0, LAST, 20_000, np.uint64)]
)
def test_codes_that_are_spread_evenly_are_found_without_a_search(codes: np.ndarray) -> None:
    codes = np.sort(codes.astype(np.uint64))
    index = Index.of(codes, np.arange(len(codes)))
    index.find(codes)
    with patch.object(code_index, "found_in", side_effect=AssertionError("searched by halves")):
        rows, numbers = index.find(codes[::7])
    assert rows.tolist() == list(range(0, len(codes), 7))
    assert numbers.tolist() == list(range(len(rows)))
