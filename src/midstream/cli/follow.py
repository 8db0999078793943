"""Follows one job to its end in the foreground: live tables, or lines without a terminal.

The first Ctrl-C (or SIGTERM) stops the job at a checkpoint, the second leaves immediately.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.live import Live

from midstream.cli.rates import Rates
from midstream.cli.status_tables import LiveView, progress_line
from midstream.cli.supervisor import handled_by
from midstream.engine.core.errors import MidstreamError
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.driver.job import Job

POLL_S = 0.1
AGAIN_S = 0.05
"""How long after a signal that was ignored it is sent once more: the callback has ended."""
REFRESH_S = 0.5
LINE_EVERY_S = 5.0


class Display(Protocol):
    def show(self, status: JobStatus) -> None: ...

    def log(self, message: str) -> None: ...


class NoDisplay:
    """The display for `--json`: nothing before the answer."""

    def show(self, status: JobStatus) -> None: ...

    def log(self, message: str) -> None: ...


class LineDisplay:
    """One line every few seconds, and one for every change of state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rates = Rates()
        self._next_ms = 0
        self._state = ""

    def show(self, status: JobStatus) -> None:
        self._rates.add(status)
        if status.state != self._state or status.now_ms >= self._next_ms:
            self._state = status.state
            self._next_ms = status.now_ms + round(LINE_EVERY_S * 1000)
            self.log(progress_line(status, self._rates))

    def log(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


class TableDisplay:
    """The job's tables, redrawn in place; other lines scroll by above them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rates = Rates()

    def show(self, status: JobStatus) -> None:
        self._rates.add(status)
        self._live.update(LiveView(status, self._rates), refresh=True)

    def log(self, message: str) -> None:
        self._live.console.print(message, markup=False, highlight=False, style="yellow")


@contextmanager
def display(console: Console, silent: bool) -> Iterator[Display]:
    if silent:
        yield NoDisplay()
    elif console.is_terminal and not console.is_dumb_terminal:
        live = Live(
            console=console,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),  # else rows that a job prints, and that `> rows.txt` redirects, would come here
        )
        with live, _logging_above_it():
            yield TableDisplay(live)
    else:
        yield LineDisplay(console)


@contextmanager
def _logging_above_it() -> Iterator[None]:
    """Print log records to the terminal above the tables, as other output: otherwise the tables would overwrite them."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    streams = [(handler, handler.stream) for handler in handlers if handler.stream in (sys.__stderr__, sys.__stdout__)]
    for handler, _ in streams:
        handler.setStream(sys.stderr)  # that of the live display, as long as it is there
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)


class Interrupted(KeyboardInterrupt):
    """Raised by a signal, whose number it has."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_at_a_signal() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise Interrupted while there is no job that could be stopped.

    Python ignores what is raised in a callback, such as those of logging after a fork, which is how the JVM is launched.
    The signal is then sent once more.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
        else:
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        with handled_by(interrupt, signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        sys.unraisablehook = before


class Interrupts:
    """Counts Ctrl-C and SIGTERM. The handler only counts: the loop in `follow` acts."""

    def __init__(self) -> None:
        self.count = 0
        self.last_signal = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last_signal = number
        if self.count > 1:
            os.write(2, b"\nleft without stopping the job cleanly\n")
            os._exit(128 + number)

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Install the handlers after Spark has installed its own, which would end the slots under the job."""
        with handled_by(self.on_signal, signal.SIGINT, signal.SIGTERM):
            yield self


class _Stop(threading.Thread):
    """Requests the stop of the job while the display continues."""

    def __init__(self, job: Job) -> None:
        super().__init__(name="midstream-stop", daemon=True)
        self._job = job
        self.error = ""

    def run(self) -> None:
        try:
            self._job.stop(drain=False)
        except MidstreamError as error:
            self.error = str(error)


def follow(job: Job, screen: Display, interrupts: Interrupts) -> JobStatus:
    """Show the job until it has ended, or until stopping it failed; return its last status.

    Its failures are not shown here: they are logged when they occur.
    """
    stop: _Stop | None = None
    next_poll_s = 0.0
    while True:
        if interrupts.count and stop is None:
            screen.log("stopping at a checkpoint; Ctrl-C again to leave immediately")
            stop = _Stop(job)
            stop.start()
        if time.monotonic() >= next_poll_s:
            next_poll_s = time.monotonic() + REFRESH_S
            status = job.status()
            screen.show(status)
            if status.has_ended:
                return status
            if stop is not None and stop.error:
                screen.log(f"the job could not be stopped cleanly: {stop.error}")
                return status
        time.sleep(POLL_S)
