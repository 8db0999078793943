"""Loads a job file and finds its Environment, for `midstream run`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from midstream.api.argument_checks import raised_at
from midstream.api.environment import FILES_BEING_LOADED, Environment
from midstream.api.user_modules import check_extra, is_zip
from midstream.engine.core.errors import JobError, MidstreamError

RUN_NAME = "__midstream__"
"""`__name__` in a job file while it is loaded, so that `if __name__ == "__main__":` does not run."""


def load_job(path: str | os.PathLike[str], modules: Sequence[str] = ()) -> Environment:
    """Run the file and return the one Environment among its global variables.

    Modules next to the file can be imported, now and later, and so can `modules`, which the Environment then
    sends to the slots. Raises ConfigError if one of these cannot be imported. Raises JobError if the file does
    not exist, cannot be compiled or raises (its exception is the cause), starts the job itself, or has no
    Environment or several.
    """
    shown = os.fspath(path)
    file = os.path.abspath(shown)
    code = _compiled(_source_of(file, shown), file, shown)
    extra = check_extra(modules)
    for directory in (os.path.dirname(file), *(each if is_zip(each) else os.path.dirname(each) for each in extra)):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    module = ModuleType(RUN_NAME)
    module.__file__ = file
    FILES_BEING_LOADED.append(file)
    before = sys.modules.get(RUN_NAME)
    sys.modules[RUN_NAME] = module  # dataclasses, among others, resolve annotations here
    try:
        exec(code, module.__dict__)
    except MidstreamError as error:
        line = raised_at(error)
        if not line or re.match(r"[^\s:]+:\d+: ", str(error)):
            raise
        raise type(error)(f"{line}: {error}").with_traceback(error.__traceback__) from error.__cause__
    except SystemExit as error:
        raise JobError(f"{shown}: ended the program (SystemExit: {error.code}) while it was being loaded") from error
    except Exception as error:
        raise JobError(f"{shown}: raised {type(error).__name__}: {error}") from error
    finally:
        FILES_BEING_LOADED.pop()
        sys.modules.pop(RUN_NAME, None)  # it is never imported: its functions travel by value
        if before is not None:
            sys.modules[RUN_NAME] = before
    environment = _only_environment(module, shown)
    environment.program.add_modules(extra)
    return environment


def _source_of(file: str, shown: str) -> bytes:
    if os.path.isdir(file):
        raise JobError(f"{shown}: is a directory; give the Python file that makes the job's Environment")
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        raise JobError(f"{shown}: there is no such file (looked for {file})") from None
    except OSError as error:
        raise JobError(f"{shown}: cannot be read: {error.strerror}") from error


def _compiled(source: bytes, file: str, shown: str) -> CodeType:
    try:
        code: CodeType = compile(source, file, "exec", dont_inherit=True)
        return code
    except SyntaxError as error:
        at = f", line {error.lineno}" if error.lineno else ""
        raise JobError(f"{shown}{at}: {error.msg}") from error
    except ValueError as error:  # the source has null bytes or a wrong encoding
        raise JobError(f"{shown}: is not Python source: {error}") from error


def _only_environment(module: ModuleType, shown: str) -> Environment:
    found: dict[int, tuple[str, Environment]] = {}
    for name, value in vars(module).items():
        if isinstance(value, Environment):
            found.setdefault(id(value), (name, value))
    if not found:
        raise JobError(
            f"{shown}: has no Environment among its global variables; write env = Environment(…) at the top level, "
            'not inside a function or under if __name__ == "__main__":'
        )
    if len(found) > 1:
        names = ", ".join(name for name, _ in found.values())
        raise JobError(f"{shown}: has {len(found)} Environments ({names}); a file is one job, so keep one of them")
    [(_, environment)] = found.values()
    return environment
