"""Following a job in the foreground: what is printed where there is no terminal, and what Ctrl-C does."""

from __future__ import annotations

import io
import logging
import signal
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from machine import limit_s
from midstream.cli import follow as following
from midstream.cli.follow import Interrupted, Interrupts, display, ending_at_a_signal, follow
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol.job_status import FailureStatus, JobStatus
from sample_status import later


class ScriptedJob:
    """Answers with one status after the other, and is stopped as a job is: some time after it was asked."""

    def __init__(self, *statuses: JobStatus, on_stop: Callable[[], str | None] = lambda: "/data/chk-4") -> None:
        self._statuses = list(statuses)
        self._on_stop = on_stop
        self.stops: list[bool] = []

    def status(self) -> JobStatus:
        if self.stops and len(self._statuses) == 1:
            return msgspec.structs.replace(self._statuses[0], state="stopped")
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]

    def stop(self, drain: bool = False) -> str | None:
        self.stops.append(drain)
        return self._on_stop()


@pytest.fixture(autouse=True)
def _at_full_speed(monkeypatch):
    monkeypatch.setattr(following, "REFRESH_S", 0.0)
    monkeypatch.setattr(following, "POLL_S", 0.001)


def ended(status: JobStatus, state: str = "finished") -> JobStatus:
    return msgspec.structs.replace(later(status, 20, 0), state=state)


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=150, height=40, force_terminal=terminal, legacy_windows=False)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_at_every_change_of_state(status):
    steps = [later(status, second, second * 1000) for second in range(12)]
    screen = console()
    with display(screen, silent=False) as shown:
        last = follow(ScriptedJob(*steps, ended(status)), shown, Interrupts())  # type: ignore[arg-type]  # a stand-in
    assert last.state == "finished"
    lines = printed(screen).splitlines()
    running = [line for line in lines if "flights running" in line]
    assert len(running) == 3
    assert "flights finished" in lines[-1]
    assert "\x1b" not in printed(screen)


def test_on_a_terminal_the_tables_are_drawn(status):
    screen = console(terminal=True)
    with display(screen, silent=False) as shown:
        follow(ScriptedJob(status, ended(status)), shown, Interrupts())  # type: ignore[arg-type]  # a stand-in
    assert "rows/s" in printed(screen)
    assert "finished" in printed(screen)


def test_what_a_job_prints_goes_where_standard_output_goes_and_scrolls_above_the_tables_if_that_is_the_terminal(
    status, monkeypatch
):
    for is_terminal in (False, True):
        screen, stdout = console(terminal=True), io.StringIO()
        monkeypatch.setattr(stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr("sys.stdout", stdout)
        with display(screen, silent=False) as shown:
            shown.show(status)
            print("{'n': 1}")
        assert ("{'n': 1}" in printed(screen)) == is_terminal
        assert stdout.getvalue() == ("" if is_terminal else "{'n': 1}\n")


def test_for_machines_nothing_is_printed(status):
    screen = console()
    with display(screen, silent=True) as shown:
        follow(ScriptedJob(status, ended(status)), shown, Interrupts())  # type: ignore[arg-type]  # a stand-in
    assert printed(screen) == ""


def test_what_is_logged_scrolls_by_above_the_tables_and_a_failure_is_not_told_a_second_time(status, monkeypatch):
    failure = FailureStatus(status.now_ms, 0, "slot 1 was lost", "")
    failing = msgspec.structs.replace(later(status, 1, 0), state="restarting", failures=(failure,), restarts=1)
    screen = console(terminal=True)
    handler = logging.StreamHandler()
    monkeypatch.setattr(sys, "__stderr__", handler.stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    before = handler.stream
    with display(screen, silent=False) as shown:
        logging.getLogger("midstream").warning("job flights: slot 1 was lost")
        follow(ScriptedJob(failing, failing, ended(failing)), shown, Interrupts())  # type: ignore[arg-type]  # a stand-in
    assert printed(screen).count("slot 1 was lost") == 1
    assert "last failure 21 s ago" in printed(screen)
    assert handler.stream is before


def test_the_first_interrupt_stops_the_job_at_a_checkpoint(status):
    job = ScriptedJob(status)
    screen = console()
    interrupts = Interrupts()
    with display(screen, silent=False) as shown, interrupts.installed():
        signal.raise_signal(signal.SIGINT)
        last = follow(job, shown, interrupts)  # type: ignore[arg-type]  # a stand-in
    assert last.state == "stopped"
    assert job.stops == [False]
    assert interrupts.last_signal == signal.SIGINT
    assert "stopping at a checkpoint; Ctrl-C again to leave immediately" in printed(screen)


def test_termination_is_an_interrupt_too_and_handlers_are_put_back(status):
    before = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    with interrupts.installed():
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.last_signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_there_is_a_job_a_signal_ends_what_is_done_for_it(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as interrupted, ending_at_a_signal():
        signal.raise_signal(number)
    assert interrupted.value.number == number
    assert signal.getsignal(number) == before


class SignalledAtItsEnd:
    """Python ignores what is raised while an object is deleted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_arrives_where_exceptions_are_ignored_counts_too():
    with pytest.raises(Interrupted) as interrupted, ending_at_a_signal():
        SignalledAtItsEnd()
        threading.Event().wait(limit_s(20))  # what the signal interrupts
    assert interrupted.value.number == signal.SIGINT


def test_a_stop_that_fails_is_said_and_ends_the_watch(status):
    def refuse() -> str | None:
        raise ClusterError("the checkpoint was not completed")

    screen = console()
    interrupts = Interrupts()
    interrupts.count = 1
    job = ScriptedJob(status, msgspec.structs.replace(status, now_ms=status.now_ms + 1), on_stop=refuse)
    job.status = lambda: status  # type: ignore[method-assign]
    with display(screen, silent=False) as shown:
        last = follow(job, shown, interrupts)  # type: ignore[arg-type]  # a stand-in
    assert last.state == "running"
    assert "could not be stopped cleanly: the checkpoint was not completed" in printed(screen)
