"""Decides which values are equal except for the order in which floating-point numbers were summed.

A job may add numbers in any order: rows arrive in another order, and partial sums are merged in other groups. Each
addition rounds to the nearest float, by up to half a unit in the last place. Two sums of n numbers of one sign
therefore differ by at most 2 n such roundings *of the sum*, however small that is: the tolerance is relative, and there
is no absolute one. If numbers of both signs cancel out, only their rounding remains, in which no digit is certain: such
results differ, and `CANCELLED` says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pyarrow as pa

T = TypeVar("T")

ROUNDINGS: Final = 4_000
"""The roundings of two sums of 2,000 numbers each, more than a test has in one sum."""
_DIGITS: Final = {16: 11, 32: 24, 64: 53}
"""The number of binary digits of a float, by its bits."""
CLOSE: Final = ROUNDINGS * 2.0**-53
"""The tolerance for Python's floats: one part in some 2e12."""
CLOSE_MAX: Final = 1e-3
"""The largest tolerance: half floats have so few digits that sums of many are meaningless."""
CANCELLED_MAX: Final = 1e-9
MATCHED_MAX: Final = 400
"""If more rows differ, near matches are not searched."""
CANCELLED: Final = (
    "If positive and negative floats cancel out, only their rounding is left, which depends on the order of summation: "
    "round(…) such a result, or add integers or decimals (cents instead of euros)."
)


def close_of(kind: pa.DataType) -> float:
    """Return the relative error in values of a type that the order of summation explains: that of its shortest floats."""
    if pa.types.is_floating(kind):
        return min(CLOSE_MAX, ROUNDINGS * 2.0 ** -_DIGITS[kind.bit_width])
    return max((close_of(kind.field(i).type) for i in range(kind.num_fields)), default=CLOSE)


def is_near(one: Any, other: Any, close: float = CLOSE) -> bool:
    """Whether two values are equal except for a relative error of the floats in them."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=close)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(is_near(a, b, close) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_near(one[key], other[key], close) for key in one)
    return bool(one == other)


def remove_near(rows: list[T], others: list[T], are_near: Callable[[T, T], bool]) -> None:
    """Remove each row that is near one of the others, together with that one."""
    if len(rows) > MATCHED_MAX or len(others) > MATCHED_MAX:
        return
    for row in list(rows):
        near = next((at for at, other in enumerate(others) if are_near(row, other)), None)
        if near is not None:
            rows.remove(row)
            del others[near]


def has_cancelled(one: Any, other: Any) -> bool:
    """Whether two values may differ by what remains when floats cancel out."""
    return (
        isinstance(one, float)
        and isinstance(other, float)
        and one != other
        and max(abs(one), abs(other)) < CANCELLED_MAX
    )
