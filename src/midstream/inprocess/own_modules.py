"""The user's functions and classes in a job; their modules can be pickled by value for a while.

In slots, each process imports the user's modules itself, so their variables are its own. If several subtasks, or several
runs, share a process, pickling the modules by value has the same effect.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from midstream.engine.core.job_pickle import JobPickler, pickled, unpickled_apart
from midstream.engine.core.site_packages import is_installed
from midstream.engine.graph.logical_graph import LogicalGraph
from midstream.engine.state.safe_pickle import OwnCode


def own_modules(logical: LogicalGraph) -> list[ModuleType]:
    """Return the user's modules from which functions in the graph come: slots import them again, with variables of their
    own.

    Modules that hold what cannot be pickled, such as a lock, are left out: all tasks share one. So is the job's file,
    which always travels by value.
    """
    found: dict[str, ModuleType] = {"__main__": sys.modules["__main__"]}
    taken: list[ModuleType] = []
    while True:
        with by_value(taken):
            named = {item.__module__ or "" for item in user_code(logical)} - found.keys()
        new = [sys.modules[name] for name in sorted(named) if name in sys.modules]
        before = len(taken)
        already = cloudpickle.list_registry_pickle_by_value()
        for module in new:
            found[module.__name__] = module
            if module.__name__ not in already and _is_separable(logical, [*taken, module]):
                taken.append(module)
        if len(taken) == before:  # the job refers to no other modules than before
            return taken


def _is_separable(logical: LogicalGraph, modules: list[ModuleType]) -> bool:
    try:
        with by_value(modules):
            unpickled_apart(pickled(logical))
    except Exception:  # noqa: BLE001 - any __reduce__, and what it returns, may raise anything
        return False
    return True


def user_code(item: object, *, brought_along: bool = True) -> list[FunctionType | type]:
    """Return the user's functions and classes to which `item` refers, each once.

    `brought_along`: include all of the job's classes that an operator only has because its state may hold instances of
    them.
    """
    recorder = _ImportRecorder(io.BytesIO(), brought_along)
    recorder.dump(item)  # type: ignore[no-untyped-call]  # cloudpickle has no annotations
    return list(recorder.found.values())


class _ImportRecorder(JobPickler):
    def __init__(self, buffer: io.BytesIO, brought_along: bool) -> None:
        super().__init__(buffer)
        self.found: dict[int, FunctionType | type] = {}
        self._brought_along = brought_along

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, OwnCode) and not self._brought_along:
            return OwnCode, ()
        if isinstance(item, (FunctionType, type)) and is_users(item):
            self.found[id(item)] = item
        return super().reducer_override(item)


def is_users(item: FunctionType | type) -> bool:
    """Whether the item is the user's own: not part of midstream, an installed package or the standard library."""
    module = sys.modules.get(item.__module__ or "")
    file = getattr(module, "__file__", None) if module is not None else file_of(item)
    return (
        isinstance(file, str)
        and (item.__module__ or "").partition(".")[0] not in ("midstream", "pyspark", "cloudpickle")
        and not is_installed(file)
    )


def file_of(item: FunctionType | type) -> str | None:
    """Return the file in which the item was written; None if its code does not name one."""
    if isinstance(item, FunctionType):
        return item.__code__.co_filename
    return next((m.__code__.co_filename for m in methods_of(item)), None)


def methods_of(item: type) -> Iterator[FunctionType]:
    """Yield functions written in the class itself, including those in property, staticmethod and classmethod."""
    for value in vars(item).values():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            yield inner


@contextmanager
def by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Pickle functions of `modules` with the variables that they use, within the block."""
    already = cloudpickle.list_registry_pickle_by_value()
    with ExitStack() as undo:
        for module in modules:
            if module.__name__ not in already and sys.modules.get(module.__name__) is module:
                cloudpickle.register_pickle_by_value(module)
                undo.callback(cloudpickle.unregister_pickle_by_value, module)
        yield
