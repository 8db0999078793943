"""The functions that pickles of state call in place of types: each makes one value and can do nothing else.

`list(range(10**10))` is a pickle of 30 bytes; so is setting an attribute of a class. Each function here makes what the
writer has reduced to it, and checks its arguments.
"""

from __future__ import annotations

import array
import collections
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from midstream.engine.state import pickled_arrays


def set_state(made: Any, state: Any) -> None:
    """Set what pickle's own instruction would set, but on no class, function, module or member of an enum: these are
    the process's, and not the pickle's.
    """
    if isinstance(made, (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Enum)):
        raise ValueError(f"a pickle sets the state of {made!r}, which it has not made")
    own = getattr(made, "__setstate__", None)
    if own is not None:
        own(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        attributes = made.__dict__
        for name, value in state.items():
            attributes[sys.intern(name) if type(name) is str else name] = value
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def counter(counts: dict[Any, Any]) -> collections.Counter[Any]:
    return collections.Counter(_exactly(dict, counts))


def deque(items: tuple[()], maxlen: int | None = None) -> collections.deque[Any]:
    """Without items, which the pickle appends."""
    if items:
        raise ValueError("a pickle makes a deque of something else than its items")
    return collections.deque(maxlen=maxlen)


def fraction(*parts: Any) -> Fraction:
    numerator, denominator = (_exactly(int, part) for part in parts)
    return Fraction(numerator, denominator)


def typed_array(typecode: str, data: bytes) -> array.array[Any]:
    made: array.array[Any] = array.array(_exactly(str, typecode))
    made.frombytes(_exactly(bytes, data))
    return made


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a pickle has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def reduced(item: Any) -> tuple[Any, ...] | None:
    """Return how the functions here rebuild an item; None if they do not."""
    kind = type(item)
    if kind is collections.Counter and not vars(item):
        return counter, (dict(item),)
    if kind is collections.deque:
        return deque, ((),) if item.maxlen is None else ((), item.maxlen), None, iter(item)
    if kind is Fraction:
        return fraction, (item.numerator, item.denominator)
    if kind is array.array:
        return typed_array, (item.typecode, item.tobytes())
    return pickled_arrays.reduced(item)


MAKERS: Final[Mapping[str, Callable[..., Any]]] = {
    each.__name__: each for each in (set_state, counter, deque, fraction, typed_array)
}
NEVER_CALLED: Final[frozenset[type]] = frozenset(
    (
        bytearray,
        bytes,
        collections.Counter,
        collections.deque,
        dict,
        frozenset,
        Fraction,
        int,
        list,
        set,
        tuple,
        array.array,
    )
)
"""Types that a value may refer to (the factory of a defaultdict), and that no pickle calls: called with a range or a
number they would take memory that the pickle's bytes do not account for.
"""
