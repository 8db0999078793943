"""Pickling of a job, and unpickling in the process that pickled it.

Functions and classes of the job's own file travel by value, with the variables that they use. Objects unpickled in the
program's own process must be separate from the program: see `ApartUnpickler`.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import CodeType
from typing import Any, Final, TypeVar

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID

T = TypeVar("T")
_TRACKED: Final = frozenset(("_make_skeleton_class", "_make_skeleton_enum", "_make_typevar"))
"""The functions with which cloudpickle makes classes."""
_Cached: Final = type(functools.lru_cache(lambda: None))


class JobPickler(cloudpickle.CloudPickler):
    """cloudpickle, extended to `functools.lru_cache` and `cached_property` in code that travels by value.

    The copy of a function with a cache has an empty cache of its own. Code keeps the name of its file, by which a
    failure names the user's line: cloudpickle drops it since 3.1.3.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)  # type: ignore[no-untyped-call]  # cloudpickle has no annotations

    def reducer_override(self, item: Any) -> Any:
        if type(item) is _Cached and _travels_by_value(item):
            attributes = {name: value for name, value in vars(item).items() if name != "__wrapped__"}
            return _cached, (item.__wrapped__, item.cache_parameters()), attributes
        if type(item) is functools.cached_property:  # it has a lock before Python 3.12
            return _cached_property, (item.func, item.attrname)
        if type(item) is CodeType:
            return _code_of_file, (self.dispatch_table[CodeType](item), item.co_filename)
        return super().reducer_override(item)  # type: ignore[no-untyped-call]  # as above


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _code_of_file(reduced: tuple[Callable[..., CodeType], tuple[Any, ...]], filename: str) -> CodeType:
    make, arguments = reduced
    return make(*arguments).replace(co_filename=filename)


def _travels_by_value(item: Any) -> bool:
    """Whether the item is pickled by value, by cloudpickle's rule for functions.

    It is, unless its name means the same item in a module that slots import.
    """
    name = getattr(item, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__":
        return True
    parts = name.split(".") if isinstance(name, str) else []
    shipped = cloudpickle.list_registry_pickle_by_value()
    if any(".".join(parts[:end]) in shipped for end in range(1, len(parts) + 1)):
        return True
    found: Any = module
    for part in getattr(item, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is not item


def pickled(thing: object) -> bytes:
    """Pickle an object for a slot or another process. Raises whatever pickling `thing` raises."""
    buffer = io.BytesIO()
    JobPickler(buffer).dump(thing)  # type: ignore[no-untyped-call]  # cloudpickle has no annotations
    return buffer.getvalue()


class ApartUnpickler(pickle.Unpickler):
    """Creates new copies of classes that travel by value, as another process would.

    cloudpickle creates such a class once per process and gives it to all that unpickle it, including the program that
    pickled it. There it would set the attributes of the program's own class to copies: `UNKNOWN = object()` would
    become another object, and methods would use copies of their module's variables.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.originals: dict[type, type] = {}
        """The program's class that was pickled, by the class that was created from it."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(self._untracked, found) if name in _TRACKED and module.startswith("cloudpickle") else found

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            self.memo = {}  # the memo refers back to this object, and Python 3.10 does not collect that cycle

    def _untracked(self, make: Callable[..., Any], *arguments: Any) -> Any:
        at = list(signature(make).parameters).index("class_tracker_id")
        made = make(*arguments[:at], None, *arguments[at + 1 :])
        original = _DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[at])
        if isinstance(made, type) and isinstance(original, type):
            self.originals[made] = original
        return made


def unpickled_apart(data: bytes) -> Any:
    """Unpickle the result of `pickled`, sharing nothing with the program's own functions and classes."""
    return ApartUnpickler(data).load()


def in_the_programs_classes(value: T, originals: dict[type, type]) -> T:
    """Copy a plain value or a user's object, replacing copies of classes by the program's own classes."""
    if not originals:
        return value
    buffer = io.BytesIO()
    _Translating(buffer, originals).dump(value)
    translated: T = _Translated(buffer, originals).load()
    return translated


class _Translating(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, originals: dict[type, type]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = {made: number for number, made in enumerate(originals)}

    def persistent_id(self, item: Any) -> object:
        return self._numbers.get(item) if isinstance(item, type) else None


class _Translated(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, originals: dict[type, type]) -> None:
        super().__init__(io.BytesIO(buffer.getvalue()))
        self._originals = list(originals.values())

    def persistent_load(self, number: Any) -> Any:
        return self._originals[number]
