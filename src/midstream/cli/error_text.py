"""Errors as users see them: the user's traceback first, then one message."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import midstream
from midstream.cli import formatting
from midstream.cli.output import Exit
from midstream.engine.checkpoint.store import FencedError
from midstream.engine.core.errors import InvariantError, MidstreamError, UnavailableError
from midstream.engine.core.tracebacks import is_users, users_part
from midstream.engine.protocol.job_status import JobStatus

_OUR_CODE = str(Path(midstream.__file__).parent)
_LOADERS = ("<frozen runpy>", "<frozen importlib", "runpy.py")


class RequestFailed(MidstreamError):
    """A running job could not carry out a request."""


def print_error(console: Console, message: str, hint: str = "") -> None:
    """Print an error: as a panel on a terminal, as greppable lines elsewhere."""
    if console.is_terminal:
        body = Text(formatting.printable(message.strip()))
        console.print(Panel(body, title="error", title_align="left", border_style="red", expand=False))
        if hint:  # a command that one may want to copy: neither framed nor broken into lines
            console.print(Text(formatting.printable(hint), style="dim"), soft_wrap=True)
        return
    line = Text("error: ", style="bold red")
    line.append(formatting.printable(message.strip()), style="not bold default")
    console.print(line, soft_wrap=True)
    if hint:
        console.print(Text(f"hint: {hint}", style="dim"), soft_wrap=True)


def print_midstream_error(console: Console, error: MidstreamError) -> Exit:
    """Print one message without a traceback of midstream's; that of the user's code, if it raised, precedes it."""
    trace = user_traceback(error.__cause__)
    if trace:
        console.print(Text(formatting.printable(trace)), soft_wrap=True)
    if isinstance(error, InvariantError):
        print_error(console, f"{error}", "this is a bug in midstream; please report it with the lines above")
        return Exit.BROKEN
    print_error(console, f"{error}")
    if isinstance(error, UnavailableError):
        return Exit.UNAVAILABLE
    return Exit.JOB_FAILED if isinstance(error, (RequestFailed, FencedError)) else Exit.BAD_INPUT


def exit_after(error: MidstreamError) -> Exit:
    """Return the exit status of a program whose job has failed with `error`."""
    if isinstance(error, InvariantError):
        return Exit.BROKEN
    return Exit.UNAVAILABLE if isinstance(error, UnavailableError) else Exit.JOB_FAILED


def user_traceback(error: BaseException | None) -> str:
    """Return the traceback of an exception from the user's code, without frames of midstream; otherwise nothing."""
    if error is None or isinstance(error, (MidstreamError, OSError)):
        return ""
    report = traceback.TracebackException.from_exception(error)
    users = [f for f in report.stack if not f.filename.startswith((_OUR_CODE, *_LOADERS)) and "runpy" not in f.filename]
    if not users and not isinstance(error, SyntaxError):
        return ""
    if users and not any(is_users(frame.filename) for frame in users):
        return ""  # we called a library: the message has the reason, and where that is in the user's code
    report.stack = traceback.StackSummary.from_list(users)
    report.__cause__ = report.__context__ = None
    if isinstance(error, SyntaxError):  # the message contains the last line
        return "".join(list(report.format_exception_only())[:-1])
    return "".join(report.format())


def print_job_failure(console: Console, status: JobStatus, why: str, hint: str = "") -> None:
    """Print the failure of a job: the user's frames of the last failure, then why the job ended."""
    trace = users_part(status.failures[0].details)
    if trace:
        console.print(Text(formatting.printable(trace)), soft_wrap=True)
    print_error(console, why, hint)


def log_to_stderr() -> None:
    """Log warnings to stderr, except py4j's when a Ctrl-C interrupts it. Does nothing if logging is set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
