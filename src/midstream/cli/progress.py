"""A line of progress on stderr, for commands that count what they have done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

LOG_S = 10.0
"""The interval between lines if there is no terminal."""


@contextmanager
def progress_line(silent: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress: in place on a terminal, else now and then."""
    console = Console(stderr=True, highlight=False)
    if silent:
        yield lambda line: None
    elif console.is_terminal:
        with console.status("simulating") as status:
            yield status.update
    else:
        last_s = time.monotonic()

        def log(line: str) -> None:
            nonlocal last_s
            if time.monotonic() - last_s >= LOG_S:
                last_s = time.monotonic()
                console.print(line, markup=False)

        yield log
