"""Checks of the functions that are called with rows or batches, at the call that is given them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, get_args

import pyarrow as pa

from midstream.api.picklability import check_shippable
from midstream.engine.core.config import Duration, interval_s, is_whole
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.operators.async_map import CallLimits
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedMax, OnError, function_name

CAPACITY_MAX: Final = 100_000
"""Rows in flight are in memory, and in each checkpoint."""


def check_function(
    function: object, method: str, example: str, *, takes: str = "row", yields: bool = False, awaits: bool = False
) -> None:
    """Raise JobError unless slots can call `function` with one argument, a row or a batch (`takes`).

    An object may have `open(ctx)` and `close()`. `yields`: whether the function may be a generator. `awaits`: whether it
    may be a coroutine function.
    """
    _check_kind(function, method, example)
    assert callable(function)
    name = function_name(function)
    call = (
        function if inspect.isroutine(function) or isinstance(function, functools.partial) else type(function).__call__
    )
    is_coroutine = any(map(inspect.iscoroutinefunction, (function, call)))
    if any(map(inspect.isasyncgenfunction, (function, call))):
        raise JobError(
            f"{method}: {name} is an asynchronous generator (async def with yield); return the result instead"
        )
    if is_coroutine and not awaits:
        raise JobError(
            f"{method}: {name} is a coroutine function (async def), which returns a coroutine in place of its result; "
            "map_async(), which awaits it for many rows at a time, takes coroutine functions"
        )
    if not yields and any(map(inspect.isgeneratorfunction, (function, call))):
        raise JobError(f"{method}: {name} yields, but {method}() takes what it returns; use return, or flat_map()")
    _check_arguments(function, 1, f"{method}: {name}", f"with one argument, the {takes}")
    for life, count, called in (("open", 1, "with one argument, the context"), ("close", 0, "without arguments")):
        part = None if isinstance(function, type) else getattr(function, life, None)
        if part is None:
            continue
        if not callable(part) or (inspect.iscoroutinefunction(part) and not is_coroutine):
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
                f"{method}: failed_max={failed_max!r} is not a pair (failed rows, rows) of which the first is less, such as (100, 10_000)"
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


def call_limits(capacity: int, timeout: Duration, retries: int, ordered: bool) -> CallLimits:
    """Return how `map_async` calls its function. Raises ConfigError for other arguments."""
    if not is_whole(capacity) or not 1 <= capacity <= CAPACITY_MAX:
        raise ConfigError(f"map_async: capacity={capacity!r} is not a whole number from 1 to {CAPACITY_MAX:,}")
    if not is_whole(retries) or retries < 0:
        raise ConfigError(f"map_async: retries={retries!r} is not a whole number of calls; 0 calls each row once")
    if not isinstance(ordered, bool):
        raise ConfigError(f"map_async: ordered={ordered!r} is not True or False")
    return CallLimits(capacity, interval_s(timeout, "map_async: timeout"), retries, ordered)
