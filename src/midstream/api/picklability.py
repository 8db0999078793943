"""Detects objects that cannot be sent to the slots, at the call that is given them, and names them.

cloudpickle pickles functions and classes of the job's own file by value, wherever that file is imported from: slots do
not run the file, which creates an Environment. Functions and classes of other modules are referred to by name, and
these modules travel as files (`api.user_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from midstream.engine.core.errors import JobError
from midstream.engine.core.job_pickle import pickled

_ADVICE = (
    "create connections, locks, files and sessions inside the function, or in open() of a function that is an object, "
    "and use plain values outside it"
)
_SPARK_ADVICE = (
    "a Spark session and its DataFrames live on the driver only: make a stream of the frame with "
    "env.from_dataframe(), or collect() the few rows a function needs before it"
)


def check_shippable(thing: object, where: str) -> None:
    """Raises JobError for an object that cannot be sent to a slot, naming operator and, if possible, variable."""
    try:
        pickled(thing)
    except Exception as error:
        found = _culprit(thing)
        if found is None:
            raise JobError(f"{where}: cannot be sent to the slots: {_one_line(error)}; {_ADVICE}") from error
        name, value = found
        uses = f"it uses {name!r} (a {type(value).__name__})"
        if type(value).__module__.split(".")[0] in ("pyspark", "py4j"):
            raise JobError(f"{where}: cannot be sent to the slots: {uses}; {_SPARK_ADVICE}") from error
        raise JobError(f"{where}: cannot be sent to the slots: {uses}: {_one_line(error)}; {_ADVICE}") from error


def _culprit(thing: object) -> tuple[str, object] | None:
    """Return the first variable of a function, or attribute of an object, that does not pickle on its own."""
    if isinstance(thing, FunctionType):
        used = _variables(thing)
    else:
        used = getattr(thing, "__dict__", {})
    for name, value in used.items():
        if isinstance(value, ModuleType):
            continue
        try:
            pickled(value)
        except Exception:  # noqa: BLE001 - pickling may raise anything; this is the variable
            inner = _culprit(value) if isinstance(value, FunctionType) else None
            return inner or (name, value)
    return None


def _variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    assert isinstance(function, FunctionType)
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            found[name] = function.__globals__[name]
    return found


def _global_names(code: CodeType) -> list[str]:
    """Return the names that the function, and the functions in it, may look up in its module."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.extend(_global_names(constant))
    return names


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
