"""The index of a run: the sorted codes of its keys, which are searched by halves, or from the start of a bucket.

Buckets divide the codes from the first to the last into equal parts, about as many as there are codes. Numbers that lie
close together are evenly spread over them, and so are hashes: the code of a key is found within a step or two, where a
search by halves takes twenty, each of which may wait for memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from midstream.engine.state.tombstones import Int64s, UInt64s, found_in

BUCKETED_MIN: Final = 1_024
"""Fewer codes are always searched by halves."""
SEARCHED_SHARE: Final = 4
"""Buckets are made once as many codes as one in this many have been searched for: that takes about as long as making them."""
CODES_MAX: Final = 16
"""The number of codes of one bucket above which codes are searched by halves: they are not spread evenly."""


class Index:
    """The codes of the keys of a run, sorted, and the position of the row of each."""

    __slots__ = ("_buckets", "_is_even", "_searched", "codes", "is_distinct", "rows")

    def __init__(self, codes: UInt64s, rows: Int64s, is_distinct: bool) -> None:
        self.codes = codes
        self.rows = rows
        self.is_distinct = is_distinct
        """Whether no two rows have one code."""
        self._is_even = is_distinct and len(codes) >= BUCKETED_MIN
        """Whether the codes are spread evenly enough for buckets, as far as is known."""
        self._searched = 0
        """How many codes have been searched for by halves."""
        self._buckets: _Buckets | None = None

    @classmethod
    def of(cls, codes: UInt64s, rows: Int64s) -> Index:
        return cls(codes, rows, not (codes[1:] == codes[:-1]).any())

    def find(self, requested: UInt64s) -> tuple[Int64s, Int64s]:
        """Return the positions of all rows whose keys have one of these codes, sorted and distinct, and the number of each
        one's code, in ascending order.
        """
        if self._buckets is None and self._is_even:
            self._searched += len(requested)
            if SEARCHED_SHARE * self._searched >= len(self.codes):
                self._buckets = _Buckets.of(self.codes)
                self._is_even = self._buckets is not None
        if self._buckets is None:
            at, numbers = found_in(self.codes, requested, is_distinct=self.is_distinct)
        else:
            at, numbers = self._buckets.find(requested)
        return self.rows[at], numbers


class _Buckets:
    """`starts`: the position of the first code of each bucket, or of the next one if it has none."""

    __slots__ = ("_codes", "_shift", "_starts")

    def __init__(self, codes: UInt64s, shift: np.uint64, starts: npt.NDArray[np.int32]) -> None:
        self._codes = codes
        self._shift = shift
        self._starts = starts

    @classmethod
    def of(cls, codes: UInt64s) -> _Buckets | None:
        """Return the buckets of codes, sorted and distinct; None if they are not spread evenly."""
        span = int(codes[-1] - codes[0])
        shift = np.uint64(max(0, span.bit_length() - len(codes).bit_length()))
        counts = np.bincount(((codes - codes[0]) >> shift).view(np.int64))
        if counts.max() > CODES_MAX:
            return None
        return cls(codes, shift, (np.cumsum(counts) - counts).astype(np.int32))

    def find(self, requested: UInt64s) -> tuple[Int64s, Int64s]:
        """Do what `found_in` does."""
        codes = self._codes
        begin, end = requested.searchsorted(codes[0]), requested.searchsorted(codes[-1], "right")
        inside = requested[begin:end]
        at = self._starts[((inside - codes[0]) >> self._shift).view(np.int64)]
        there = codes[at]
        lower = np.flatnonzero(there < inside)
        while len(lower):
            at[lower] += 1
            there[lower] = codes[at[lower]]
            lower = lower[there[lower] < inside[lower]]
        numbers = np.flatnonzero(there == inside)
        return at[numbers].astype(np.int64), numbers + begin
