"""The rows of a frame brought together key by key, by a sort of the codes of their keys instead of a hash table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from midstream.engine.state.table_runs import codes_of
from midstream.engine.state.tombstones import Bools, Int64s, UInt64s

RADIX_ROWS_MIN: Final = 2_048
"""Fewer rows are sorted faster by comparing their codes."""


class KeyOrder:
    """The rows of `keys`, key by key: those of a key in their order in `of`, or in that of the frame.

    `is_exact`: whether the codes of all keys are numbers of their own, and not hashes.
    """

    __slots__ = ("codes", "is_exact", "is_first", "rows", "starts")

    def __init__(self, keys: pl.DataFrame, of: Int64s | None = None) -> None:
        codes, self.is_exact = codes_of(keys)
        self._sort(codes, of)
        if not self.is_exact and not self._are_equal(keys):
            # two keys have one hash: the code of each key is the position of its first row
            number = "".join(keys.columns) + "_"  # the name of no key column
            firsts = keys.with_row_index(number).select(pl.col(number).first().over(keys.columns)).to_series()
            self._sort(firsts.to_numpy().astype(np.uint64), of)

    def _sort(self, codes: UInt64s, of: Int64s | None) -> None:
        order = stable_order(codes if of is None else codes[of])
        self.rows: Int64s = order if of is None else of[order]
        """The rows, key by key."""
        ordered = codes[self.rows]
        self.is_first: Bools = np.ones(len(ordered), np.bool_)
        """For each of `rows`, whether it is the first of its key."""
        self.is_first[1:] = ordered[1:] != ordered[:-1]
        self.starts: Int64s = np.flatnonzero(self.is_first)
        self.codes: UInt64s = ordered[self.starts]
        """The code of each key, in ascending order."""

    def _are_equal(self, keys: pl.DataFrame) -> bool:
        """Whether all rows that have one code have one key."""
        later = np.flatnonzero(~self.is_first)
        firsts = self.starts[np.cumsum(self.is_first)[later] - 1]
        return are_same(keys[self.rows[later]], keys[self.rows[firsts]], keys.columns)


def are_same(some: pl.DataFrame, others: pl.DataFrame, columns: Sequence[str]) -> bool:
    """Whether the rows of two frames, one by one, have equal values in these columns."""
    return all(bool((some.get_column(name) == others.get_column(name)).all()) for name in columns)


def stable_order(codes: UInt64s) -> Int64s:
    """Return the positions of the codes in ascending order, those of equal codes in their order.

    Codes of 16 bits are counted, not compared, so that a few rounds of 16 bits take a fraction of the time of one sort.
    """
    if len(codes) < RADIX_ROWS_MIN:
        return codes.argsort(kind="stable")
    rest = codes - codes.min()
    bits = int(rest.max()).bit_length()
    order = rest.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, bits, 16):
        order = order[(rest >> np.uint64(shift)).astype(np.uint16)[order].argsort(kind="stable")]
    return order
