"""NumPy values in pickles: type, shape and bytes. NumPy's own format is not used, since its reader can be made to follow
addresses in the pickle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def reduced(item: Any) -> Reduced | None:
    """Return how to rebuild an array, a number or a type; None for anything else.

    Raises ValueError for what cannot be stored in this way.
    """
    if isinstance(item, np.dtype):
        return dtype, (_description(item),)
    if type(item) is np.ndarray:
        if item.dtype == object:
            return objects, (item.shape, item.ravel().tolist())
        by_columns = item.flags.f_contiguous and not item.flags.c_contiguous
        order: Literal["C", "F"] = "F" if by_columns else "C"
        return array, (_description(item.dtype), item.shape, item.tobytes(order), order)
    if isinstance(item, np.generic):
        return scalar, (_description(item.dtype), item.tobytes())
    return None


def dtype(description: Any) -> np.dtype[Any]:
    """Return the described type. Raises ValueError for a type that holds references."""
    made: np.dtype[Any] = np.lib.format.descr_to_dtype(description)
    if made.hasobject:
        raise ValueError(f"a pickle has an array of the type {made}, which holds references")
    return made


def array(description: Any, shape: tuple[int, ...], data: bytes, order: str) -> np.ndarray[Any, Any]:
    kind = dtype(description)
    if len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"a pickle has {len(data)} bytes for an array of {kind} with the shape {shape}")
    made = np.empty(shape[::-1] if order == "F" else shape, kind)
    if data:
        made.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return made.T if order == "F" else made


def objects(shape: tuple[int, ...], items: list[Any]) -> np.ndarray[Any, Any]:
    if len(items) != math.prod(shape):
        raise ValueError(f"a pickle has {len(items)} items for an array with the shape {shape}")
    made = np.empty(len(items), object)
    for at, item in enumerate(items):
        made[at] = item
    return made.reshape(shape)


def scalar(description: Any, data: bytes) -> Any:
    return array(description, (1,), data, "C")[0]


def _description(kind: np.dtype[Any]) -> Any:
    if kind.hasobject or kind.kind not in "?biufcmMOSUV":
        raise ValueError(f"an array of the type {kind} cannot be stored; store its values as a list")
    description = np.lib.format.dtype_to_descr(kind)
    if dtype(description) != kind:
        raise ValueError(f"the type {kind} cannot be stored")
    return description


MAKERS = {make.__name__: make for make in (array, dtype, objects, scalar)}
