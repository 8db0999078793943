"""Finds the frames of a traceback that are the user's own code, which are the ones to show."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import Final

from midstream.engine.core.errors import ClusterError, InvariantError, MidstreamError, StorageError

_CHAINED: Final = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
_FRAME: Final = re.compile(r'  File "(.+)", line \d+')
_ERROR_OF_OURS: Final = re.compile(r"^midstream\.[\w.]+\.(\w+): ", re.MULTILINE)
_OF_VALUES: Final = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
_OUR_ROOMS: Final = re.compile(
    r"[/\\]midstream[/\\](?:engine|connectors|runtime|spark|simulation|inprocess|testing)[/\\]|[/\\]midstream_lab[/\\]"
)
_LIBRARIES: Final = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3\.\d+[/\\]|\.px[di]$|\.pyx$|^<(?!stdin>|ipython)"
)


def users_part(details: str) -> str:
    """Reduce a traceback's text, as a slot sends it, to the frames of the user's code in each exception.

    Frames of libraries are left out where there are others. An exception that never passed through the user's code is
    shown whole if it is unexpected, and not at all if its message, which is in the failure's summary, is sufficient.
    """
    blocks = _CHAINED.split(details.rstrip())
    shown = [filtered for block in blocks if (filtered := _users_frames(block))]
    if shown:
        return "\n\n".join(shown)
    ours = _ERROR_OF_OURS.findall(blocks[-1])
    return "" if ours and ours[-1] != InvariantError.__name__ else details.rstrip()


def _users_frames(block: str) -> str:
    return _with_frames(block, is_users) or _with_frames(block, _is_not_ours)


def _with_frames(block: str, is_kept: Callable[[str], bool]) -> str:
    """Keep the frames for which `is_kept` is true, with their exception; empty if no frame is left."""
    kept: list[str] = []
    frames = 0
    keeping = True
    for line in block.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            keeping = is_kept(frame[1])
            frames += keeping
        elif not line.startswith("    "):  # the headline or the exception itself, not a line of source
            keeping = True
        if keeping:
            kept.append(line)
    return "\n".join(kept) if frames else ""


def _is_not_ours(file: str) -> bool:
    return not _OUR_ROOMS.search(file) and file != "<string>"


def is_users(file: str) -> bool:
    return _is_not_ours(file) and not _LIBRARIES.search(file)


def raised_by_users_code(error: BaseException) -> bool:
    """Whether the exception passed through a line of the user's code."""
    return any(is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def depends_on_values(error: BaseException) -> bool:
    """Whether an exception is raised each time for the same values, as far as its type shows.

    Exceptions of Python for wrong values, of polars, and of the user's own classes do. Those of other libraries may be
    a database's or a service's that is not available, and so may all that an OSError has led to.
    """
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    outside = (OSError, EOFError, MemoryError, StorageError, ClusterError)
    if any(isinstance(each, outside) or type(each).__name__ == "TimeoutError" for each in chain):
        return False  # before Python 3.11, not every TimeoutError of the standard library is an OSError
    cause = next((each for each in chain if not isinstance(each, MidstreamError)), error)
    return isinstance(cause, _OF_VALUES) or type(cause).__module__.startswith("polars") or _is_users_class(type(cause))


def _is_users_class(kind: type[BaseException]) -> bool:
    """Whether the class is Python's own, ours, or from a module that is the user's, such as the script that was started."""
    room = kind.__module__.partition(".")[0]
    if room in ("builtins", "midstream", "__main__"):  # a slot has another __main__, which has no classes
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return room not in sys.stdlib_module_names and (file is None or is_users(file))


def kind_and_line(error: BaseException) -> str:
    """Return what was raised and the innermost line of the user's code: equal whenever the same code fails the same
    way.

    Empty for failures of the outside world (files, networks, Spark), which may differ the next time.
    """
    while isinstance(error, MidstreamError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, (OSError, StorageError, ClusterError)):
        return ""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if is_users(frame[0])] or frames
    at = f" at {users[-1][0]}:{users[-1][1]}" if users else ""
    return f"{type(error).__name__}{at}"
