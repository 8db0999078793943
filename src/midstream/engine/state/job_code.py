"""Determines which code is the job's own, from what is sent to its slots."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from midstream.engine.core.job_pickle import JobPickler
from midstream.engine.core.site_packages import is_installed
from midstream.engine.state.safe_pickle import OwnCode

_ENGINES = ("midstream", "pyspark")


def own_code(shipped: object, modules: Iterable[str] = (), trusted: Iterable[str] = ()) -> OwnCode:
    """Return the classes that travel with `shipped` by value, and the user's packages that slots import.

    `modules`: the top-level names of the modules that travel as files. Imports between these cannot be seen in
    `shipped`, which refers to their contents by name. A package in `shipped` is the user's if it is not installed,
    or if a function, source, sink or accumulator is defined in it. Raises whatever pickling `shipped` raises.
    """
    recorder = _ModuleRecorder(io.BytesIO())
    recorder.dump(shipped)  # type: ignore[no-untyped-call]  # cloudpickle has no annotations
    return OwnCode(tuple(recorder.named_classes()), frozenset(recorder.packages.union(modules)), frozenset(trusted))


class _ModuleRecorder(JobPickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.classes: dict[int, type] = {}
        self.packages: set[str] = set()
        self._variables: dict[int, Mapping[str, Any]] = {}
        """The variables of the modules that define functions which travel by value."""

    def named_classes(self) -> Iterator[type]:
        """Yield the shipped classes, except those whose name refers to another shipped class.

        `dataclass(slots=True)` creates the class again while its methods still refer to the first one; and a notebook cell
        may have run twice.
        """
        meant = {}
        for each in self.classes.values():
            if any(_variable(variables, each) is each for variables in self._variables.values()):
                meant[each.__module__, each.__qualname__] = each
        for each in self.classes.values():
            if meant.get((each.__module__, each.__qualname__), each) is each:
                yield each

    def reducer_override(self, item: Any) -> Any:
        reduced = super().reducer_override(item)
        if isinstance(item, FunctionType) and reduced is not NotImplemented:
            self._variables[id(item.__globals__)] = item.__globals__
        if isinstance(item, type) and reduced is not NotImplemented:
            if item.__module__ != "builtins":
                self.classes[id(item)] = item
        elif isinstance(item, (type, FunctionType)):
            if reduced is NotImplemented and (_is_users(item.__module__) or _extends_an_engine(item)):
                self.packages.add(_package(item.__module__))
        elif isinstance(item, ModuleType) and _is_users(item.__name__):
            self.packages.add(_package(item.__name__))
        return reduced


def _variable(variables: Mapping[str, Any], named: type) -> Any:
    """Return what the class's name means in the module that has these variables."""
    first, *rest = named.__qualname__.split(".")
    found = variables.get(first) if variables.get("__name__") == named.__module__ else None
    for part in rest:
        found = getattr(found, part, None)
    return found


def _package(module: str) -> str:
    return module.partition(".")[0]


def _extends_an_engine(item: object) -> bool:
    """Whether `item` is a user's class that extends a class of midstream or Spark."""
    if not isinstance(item, type) or _package(item.__module__) in _ENGINES:
        return False
    return any(_package(base.__module__) in _ENGINES for base in item.__mro__)


@cache
def _is_users(module: str) -> bool:
    """Whether the module is neither installed nor part of the standard library."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and _package(module) not in _ENGINES and not is_installed(file)
