"""`midstream run --supervise`: a process that only starts the job's driver, and starts it again when it dies.

Whether it is started again depends on how it has ended (docs/deploy/supervision.md):

    finished, failed, stopped by a signal      not again: the supervisor ends with the same exit status
    refused (BAD_INPUT) at the first start     not again; a later start may be refused for what is not there now
    anything else                              again with exponential back-off, at most RESTARTS_MAX times within WITHIN_S

Each start is like one with --resume. Signals are passed on to the driver, which has a session of its own, so that a
Ctrl-C reaches it once; the second signal kills it. A driver whose supervisor dies stops as after a SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Final, TextIO

from midstream.cli.output import Exit, written
from midstream.engine.core.errors import ConfigError
from midstream.runtime.process.process_slots import how_it_ended

RESTARTS_MAX: Final = 10
WITHIN_S: Final = 600.0
FIRST_DELAY_S: Final = 1.0
DELAY_S_MAX: Final = 60.0
POLL_INTERVAL_S: Final = 0.1

_PIPE: Final = "MIDSTREAM_SUPERVISOR"
"""The environment variable with the descriptor of a pipe whose other end the supervisor holds."""
_STOPPED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_FINAL: Final = (Exit.OK, Exit.JOB_FAILED, *_STOPPED)

_log = logging.getLogger("midstream")


@dataclass(frozen=True, slots=True)
class Supervised:
    """The answer of `run --supervise`: the command line has to be run again, as a supervised process."""


@dataclass(slots=True)
class BackOff:
    """The delay before the next restart; each restart counts for `within_s` seconds."""

    restarts_max: int = RESTARTS_MAX
    within_s: float = WITHIN_S
    first_s: float = FIRST_DELAY_S
    total: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def next_s(self, now_s: float) -> float | None:
        """Count the next restart and return its delay in seconds; None if the limit is reached."""
        while self._recent and now_s - self._recent[0] > self.within_s:
            self._recent.popleft()
        if len(self._recent) >= self.restarts_max:
            return None
        delay_s = min(self.first_s * 2.0 ** len(self._recent), DELAY_S_MAX)
        self._recent.append(now_s)
        self.total += 1
        return delay_s


class Signals:
    """The signals to end that this process has received, in order of arrival."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)

    def noted(self) -> AbstractContextManager[None]:
        return handled_by(self._note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)


def supervise_driver(arguments: Sequence[str], answer_to: TextIO | None) -> int:
    """Run this program's command line again, supervised, and return the exit status.

    `answer_to`: where the JSON of the last driver goes, and of no other; None: each prints its own. Raises ConfigError
    if `arguments` are not this program's.
    """
    if sys.orig_argv[-len(arguments) :] != list(arguments):
        raise ConfigError(
            "--supervise runs the program's own command line again, so it must be given on the command line"
        )
    own = [argument for argument in arguments if argument.partition("=")[0] not in ("--supervise", "--resume")]
    command = [sys.executable, *sys.orig_argv[1 : -len(arguments)], *own, "--resume"]
    signals = Signals()
    with signals.noted(), tempfile.TemporaryFile() as answer:
        status = supervise(command, signals, BackOff(), answer if answer_to is not None else None)
        if answer_to is not None:
            answer.seek(0)
            printed = answer.read().decode(errors="replace")
            error = f"the driver ended with exit status {status} and printed nothing"
            answer_to.write(printed or written({"error": error}) + "\n")
            answer_to.flush()
        return status


def supervise(command: Sequence[str], signals: Signals, back_off: BackOff, answer: IO[bytes] | None) -> int:
    """Run `command` until it need not be run again; return its exit status, 128 + n after signal n."""
    is_first = True
    while True:
        began_s = time.monotonic()
        status, how = _run_once(command, signals, answer)
        if signals.came or status in _FINAL or (is_first and status == Exit.BAD_INPUT):
            return status
        is_first = False
        now_s = time.monotonic()
        delay_s = back_off.next_s(now_s)
        how = f"the job's driver {how} after {now_s - began_s:.0f} s"
        if delay_s is None:
            within = f"{back_off.restarts_max} restarts within {back_off.within_s / 60:g} min"
            _log.error("%s: it is not started again after %s; the log above shows how each of them ended", how, within)
            return status
        _log.warning("%s: it is started again in %g s (restart %d)", how, delay_s, back_off.total)
        while time.monotonic() < now_s + delay_s:
            if signals.came:
                return 128 + signals.came[0]
            time.sleep(POLL_INTERVAL_S)


def _run_once(command: Sequence[str], signals: Signals, answer: IO[bytes] | None) -> tuple[int, str]:
    """Run a driver from its start to its end; return its exit status, and how it ended."""
    if answer is not None:
        answer.seek(0)
        answer.truncate()
    reading, writing = os.pipe()
    try:
        driver = subprocess.Popen(
            command,
            stdout=answer,
            start_new_session=True,
            pass_fds=(reading,),
            env={**os.environ, _PIPE: str(reading)},
        )
    except OSError as error:  # no memory or no process is available, which may pass
        os.close(writing)
        return Exit.UNAVAILABLE, f"could not be started ({error.strerror})"
    finally:
        os.close(reading)
    try:
        return _watch(driver, signals)
    finally:
        os.close(writing)


def _watch(driver: subprocess.Popen[bytes], signals: Signals) -> tuple[int, str]:
    """Pass signals on until the driver has ended."""
    passed_on = 0
    while True:
        while passed_on < len(signals.came):
            _pass_on(driver, signals.came[passed_on], is_first=not passed_on)
            passed_on += 1
        try:
            code = driver.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            continue
        if code < 0 and signals.came:
            return 128 + signals.came[-1], how_it_ended(code)
        return (code if code >= 0 else 128 - code), f"(process {driver.pid}) {how_it_ended(code)}"


def _pass_on(driver: subprocess.Popen[bytes], number: int, is_first: bool) -> None:
    if is_first:  # a driver does not handle SIGHUP: it must stop at a checkpoint
        driver.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
    else:
        driver.kill()


def end_with_the_supervisor() -> None:
    """Stop this driver cleanly, as after a SIGTERM, once its supervisor is gone."""
    number = os.environ.pop(_PIPE, None)
    if number is not None:
        threading.Thread(target=_await_the_end, args=(int(number),), name="midstream-supervisor", daemon=True).start()


def _await_the_end(reading: int) -> None:
    while os.read(reading, 1):  # nothing is ever written: it ends with the process that has the other end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
