"""The answer of a command, and the one place where it is printed. The form for programs: `cli.json_types`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from midstream.cli.formatting import printable

SLOTS: Final = ("spark", "process")
"""The values of `--slots`."""


FILE_COLUMNS: Final = 160


class Exit(IntEnum):
    """The exit status of the command line; 128 + n after signal n. Supervisors act on it: docs/deploy/supervision.md."""

    OK = 0
    JOB_FAILED = 1
    BAD_INPUT = 2
    BROKEN = 70
    """A bug in midstream, or a Python error outside of the job's functions."""
    UNAVAILABLE = 75
    """The environment of the job has ended, or is not available."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: `data` for programs (a Struct or a dict), `view` for display."""

    data: object
    view: RenderableType
    exit: int = Exit.OK


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer in pieces: pairs `(data, line)`, of which programs get the first and users the second."""

    pieces: Iterator[tuple[object, str]]


def print_stream(stream: Stream, json: bool, out: TextIO) -> None:
    """Print one line per piece; for programs, one JSON object per line."""
    for data, line in stream.pieces:
        out.write((written(data) if json else line) + "\n")
        out.flush()


def written(data: object) -> str:
    """Encode `data` for programs: one JSON object, with `format_version`."""
    from midstream.page.request_types import document

    return document(data).decode()


def print_answer(answer: Answer, json: bool, stream: TextIO) -> None:
    if json:
        stream.write(written(answer.data) + "\n")
        stream.flush()
    else:
        # lines are not wrapped, so that commands can be copied and other tools can read them
        Console(file=stream, highlight=False, width=width_of(stream)).print(answer.view, soft_wrap=True)


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a table in a file, where no terminal determines them; None for those of the terminal."""
    return None if stream.isatty() or "COLUMNS" in os.environ else FILE_COLUMNS


@contextmanager
def busy_with(what: str, silent: bool) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done while it takes seconds, unless `silent`; the yielded function shows more."""
    console = Console(stderr=True, highlight=False)

    def log(more: str) -> None:
        if not silent:
            console.print(printable(more), markup=False, soft_wrap=True)

    if silent:
        yield log
    elif console.is_terminal:
        spinner = Spinner("dots", Text(printable(what)))
        with Live(spinner, console=console, transient=True, redirect_stdout=sys.stdout.isatty()):
            yield log
    else:
        log(what)
        yield log


@contextmanager
def stdout_kept_for_the_answer() -> Iterator[TextIO]:
    """Redirect what a job prints, in this process or a child, to stderr meanwhile; yields the real stdout."""
    real = sys.stdout
    real.flush()
    try:
        number = real.fileno()
    except (io.UnsupportedOperation, OSError):  # captured by a test or a notebook: it has no file descriptor
        number = -1
    sys.stdout = sys.stderr
    if number < 0:
        try:
            yield real
        finally:
            sys.stdout = real
        return
    kept = os.dup(number)
    os.dup2(2, number)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        os.dup2(kept, number)
        os.close(kept)
        sys.stdout = real
