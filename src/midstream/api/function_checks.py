"""Checks of the functions that are called with rows or batches, at the call that is given them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import pyarrow as pa

from midstream.api.picklability import check_shippable
from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedMax, OnError, function_name


def check_function(function: object, method: str, example: str, *, takes: str = "row", yields: bool = False) -> None:
    """Raise JobError unless slots can call `function` with one argument, a row or a batch (`takes`).

    An object may have `open(ctx)` and `close()`. `yields`: whether the function may be a generator.
    """
    _check_kind(function, method, example)
    assert callable(function)
    name = function_name(function)
    call = (
        function if inspect.isroutine(function) or isinstance(function, functools.partial) else type(function).__call__
    )
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (function, call)):
        raise JobError(
            f"{method}: {name} is a coroutine function (async def), which returns a coroutine in place of its result; "
            "write it with def, and wait in it: asyncio.run(…)"
        )
    if not yields and any(map(inspect.isgeneratorfunction, (function, call))):
        raise JobError(f"{method}: {name} yields, but {method}() takes what it returns; use return, or flat_map()")
    _check_arguments(function, 1, f"{method}: {name}", f"with one argument, the {takes}")
    for life, count, called in (("open", 1, "with one argument, the context"), ("close", 0, "without arguments")):
        part = None if isinstance(function, type) else getattr(function, life, None)
        if part is None:
            continue
        if not callable(part) or inspect.iscoroutinefunction(part):
            raise JobError(f"{method}: {life} of {name} is not a plain function; it is called {called}")
        _check_arguments(part, count, f"{method}: {life} of {name}", called)
    check_shippable(function, method)


def check_table_function(function: object, method: str) -> None:
    """Raise JobError unless slots can call `function` without arguments."""
    _check_kind(function, method, "write for example join_table(load_users, on='id')")
    assert callable(function)
    name = function_name(function)
    call = function if inspect.isroutine(function) else type(function).__call__
    if any(map(inspect.iscoroutinefunction, (function, call))):
        raise JobError(
            f"{method}: {name} is a coroutine function (async def), which returns a coroutine in place of a frame; write it "
            "with def, and wait in it: asyncio.run(…)"
        )
    _check_arguments(function, 0, f"{method}: {name}", "without arguments")
    check_shippable(function, method)


def _check_kind(function: object, method: str, example: str) -> None:
    if isinstance(function, type) and function.__module__ != "builtins" and not issubclass(function, dict):
        raise JobError(f"{method}: {function.__name__} is a class; give an instance: {function.__name__}(…)")
    if not callable(function):
        if hasattr(function, "open") or hasattr(function, "close"):
            raise JobError(f"{method}: {type(function).__name__} has no method __call__(); that is what is called")
        raise JobError(f"{method}: {function!r} is not a function; {example}")


def _check_arguments(function: Callable[..., Any], count: int, who: str, called: str) -> None:
    try:
        # not the signature of what a decorator wraps: the decorator may add arguments
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        return  # of a builtin that does not have one
    try:
        signature.bind(*(None,) * count)
    except TypeError as error:
        raise JobError(f"{who} is called {called}, but takes {signature}: {error}") from None


def error_policy(
    on_error: OnError, failed_max: FailedMax | None, schema: pa.Schema, method: str, right: pa.Schema | None = None
) -> ErrorPolicy:
    """Return what is to happen to rows of `schema` for which a function fails, and to those of `right`, of a second stream.

    Raises ConfigError for other arguments.
    """
    if on_error not in get_args(OnError):
        raise ConfigError(
            f"{method}: on_error {on_error!r} is not one of fail, drop, side_output; with 'side_output' the rows and errors "
            "go to side_output(FAILED)"
        )
    if failed_max is not None:
        is_pair = isinstance(failed_max, (tuple, list)) and len(failed_max) == 2 and all(map(is_whole, failed_max))
        if not is_pair or not 0 <= failed_max[0] < failed_max[1]:
            raise ConfigError(
                f"{method}: failed_max={failed_max!r} is not a pair of numbers (failed rows, rows), such as (100, 10_000)"
            )
        if on_error == "fail":
            raise ConfigError(
                f"{method}: failed_max= requires on_error='drop' or 'side_output'; with 'fail' the first row that fails "
                "fails the job"
            )
    return (
        FAIL
        if on_error == "fail"
        else ErrorPolicy(on_error, None if failed_max is None else (failed_max[0], failed_max[1]), schema, right)
    )
