"""What user code prints and logs in a slot: taken note of line by line, within a budget, and told on the driver."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from midstream.engine.protocol.messages import LOG_LINE_CHARS_MAX, LogEntry, Logged, LogLine
from midstream.runtime.driver import job_logs as keeping
from midstream.runtime.driver.job_logs import JobLogs
from midstream.runtime.process import process_slots
from midstream.runtime.process import slot_output as capturing
from midstream.runtime.process.slot_output import SlotOutput, levels_set


class Slot:
    """A capture whose lines are sent nowhere."""

    def __init__(self, capture: SlotOutput, streams: Streams) -> None:
        self.capture, self.streams = capture, streams
        self.sent: list[Logged] = []
        self.posted: list[Callable[[], None]] = []
        self.at_work = ("divide", "map-1", 3)
        capture.begin(self.sent.append, self.posted.append, lambda: self.at_work)

    @property
    def lines(self) -> list[LogLine]:
        return [line for logged in self.sent for line in logged.lines]

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]


Begin = Callable[[], Slot]


class Streams:
    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Streams]:
    """Puts others in place of those of pytest, which it sets anew when a test begins."""

    def put() -> Streams:
        streams = Streams()
        monkeypatch.setattr(sys, "stdout", streams.out)
        monkeypatch.setattr(sys, "stderr", streams.err)
        return streams

    return put


@pytest.fixture
def slot(streams: Callable[[], Streams]) -> Iterator[Callable[[], Slot]]:
    with ExitStack() as stack:

        def begin() -> Slot:
            put = streams()
            capture = stack.enter_context(SlotOutput({"": logging.WARNING, "app": logging.INFO}, keeps_records=False))
            return Slot(capture, put)

        yield begin


def test_what_is_printed_is_sent_line_by_line_and_printed_all_the_same(slot: Begin) -> None:
    running = slot()
    print("one")
    assert running.texts == ["one"], "before the call returns: the process may die of the next"
    sys.stdout.write("a\nb\nc")
    sys.stderr.write("oh\n")
    sys.stdout.write("d\n")
    assert running.texts == ["one", "a", "b", "oh", "cd"]
    assert [line.logger for line in running.lines] == ["stdout", "stdout", "stdout", "stderr", "stdout"]
    assert {(line.operator, line.uid, line.subtask, line.level) for line in running.lines} == {
        ("divide", "map-1", 3, 0)
    }
    assert running.streams.out.getvalue() == "one\na\nb\ncd\n"


def test_what_is_logged_is_sent_with_its_level_and_logger_from_the_level_on_that_the_program_has_set(
    slot: Begin,
) -> None:
    running = slot()
    logging.getLogger("app.rows").info("row %d", 7)
    logging.getLogger("app.rows").debug("too much")
    logging.getLogger("other").info("not asked for")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("other").exception("it failed")
    assert [(line.logger, line.level) for line in running.lines] == [("app.rows", 20), ("other", 40)]
    assert running.texts[0] == "row 7"
    assert running.texts[1].startswith("it failed\nTraceback")
    assert running.streams.err.getvalue() == "", "the driver writes it"


def test_everything_is_put_back_and_what_comes_later_goes_to_stderr(streams: Callable[[], Streams]) -> None:
    put = streams()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with SlotOutput({"": logging.ERROR}, keeps_records=False) as capture:
        running = Slot(capture, put)
        capture.end()
        logging.getLogger("app").error("the driver is gone")
        print("alone")
    assert put.err.getvalue() == "ERROR app: the driver is gone\n"
    assert not running.sent
    assert (root.handlers, root.level, sys.stdout) == (handlers, level, put.out)


def test_where_people_look_at_the_files_of_a_worker_records_are_written_there_too(
    streams: Callable[[], Streams],
) -> None:
    put = streams()
    with SlotOutput({"": logging.WARNING}, keeps_records=True) as capture:
        running = Slot(capture, put)
        logging.getLogger("app").warning("on the worker")
    assert put.err.getvalue() == "WARNING app: on the worker\n"
    assert running.texts == ["on the worker"]


def test_other_threads_wait_for_the_loop_and_name_no_operator(slot: Begin) -> None:
    running = slot()
    thread = threading.Thread(target=lambda: [print("from"), print("a thread")])
    thread.start()
    thread.join()
    assert not running.sent and len(running.posted) == 1
    running.posted.pop()()
    assert running.texts == ["from", "a thread"]
    assert running.lines[0].operator == ""


def test_a_function_that_prints_every_row_has_a_budget_and_what_is_dropped_is_counted(
    slot: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(capturing.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # what threads of other tests log counts too
    running = slot()
    running.capture._refilled_s = now_s
    for index in range(100_000):
        print("x" * 50, index)
    taken = len(running.texts)
    assert 2_000 < taken < 3_000
    now_s += 1.0
    print("later")
    assert running.sent[-1].dropped == 100_000 - taken
    assert running.texts[-1] == "later"


def test_a_long_line_is_shortened_to_what_the_driver_takes(slot: Begin) -> None:
    running = slot()
    print("y" * 100_000)
    logging.getLogger("n" * 1000).warning("z" * 100_000)
    assert all(len(text) <= LOG_LINE_CHARS_MAX and "left out" in text for text in running.texts)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(running.sent[1]), type=Logged)
    assert again == running.sent[1]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Logged((LogLine(0, "q" * 5000, "l"),))), type=Logged)


def test_a_forked_child_sends_nothing_over_the_connection_of_its_parent(
    slot: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = slot()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    print("in the child")
    assert not running.sent


def test_half_a_surrogate_pair_is_written_out_and_fails_nobody(slot: Begin) -> None:
    """As names of files have them that are no UTF-8. Streams that take them are those of processes without a locale."""
    here = slot()
    print("file \udcff.csv")
    logging.getLogger("a\udcffb").warning("file %s", "\udcff.csv")
    assert here.texts == ["file \\udcff.csv"] * 2
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here.sent[0]), type=Logged) == here.sent[0]
    msgspec.msgpack.encode(here.sent[1])


def test_who_prints_while_lines_of_other_threads_are_sent_waits_for_nobody(slot: Begin) -> None:
    """A signal handler does, or a `__del__`: it may come between any two instructions."""
    here = slot()
    thread = threading.Thread(target=lambda: print("from a thread"))
    thread.start()
    thread.join()
    real, here.capture._lock = here.capture._lock, Printing(here.capture._lock)  # type: ignore[assignment]
    here.posted.pop()()
    here.capture._lock = real
    assert here.texts == ["from a thread"]


class Printing:
    """A lock under which something is printed by the thread that holds it."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        assert self.lock.acquire(timeout=1), "it waits for itself"
        print("meanwhile")

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_what_sending_logs_is_not_sent(slot: Begin) -> None:
    sent: list[Logged] = []

    def send(logged: Logged) -> None:
        logging.getLogger("loop").warning("about to send")
        sent.append(logged)

    slot().capture.begin(send, lambda call: call(), lambda: ("", "", -1))
    print("hello")
    assert [line.text for logged in sent for line in logged.lines] == ["hello"]


def test_the_levels_are_those_that_the_program_has_set() -> None:
    logger = logging.getLogger("test_slot_output.set")
    logger.setLevel(logging.DEBUG)
    try:
        assert levels_set()["test_slot_output.set"] == logging.DEBUG
        assert levels_set()[""] == logging.getLogger().level
        assert "test_slot_output.unset" not in levels_set()
    finally:
        logger.setLevel(logging.NOTSET)


# ---- on the driver


def line(text: str, level: int = 0, logger: str = "stdout") -> LogLine:
    return LogLine(1_700_000_000_000, text, logger, level)


def texts(entries: tuple[LogEntry, ...]) -> list[str]:
    return [entry.line.text for entry in entries]


def test_the_driver_keeps_the_newest_and_says_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ENTRIES_MAX", 5)
    logs = JobLogs()
    for index in range(4):
        logs.add(0, Logged((line(f"a{index}"),)))
    logs.add(1, Logged((line("b"), line("c")), dropped=9))
    assert texts(logs.since(-1)) == ["a2", "a3", "(9 lines left out: there were too many)", "b", "c"]
    assert [entry.number for entry in logs.since(-1)] == [2, 3, 4, 5, 6]
    assert texts(logs.since(5)) == ["c"]
    assert logs.since(6) == ()
    assert logs.last_of(0) == "a2\na3"


def test_an_answer_has_a_size_and_memory_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ANSWER_CHARS_MAX", 100)
    monkeypatch.setattr(keeping, "CHARS_MAX", 400)
    logs = JobLogs()
    for index in range(100):
        logs.add(0, Logged((line(f"{index:040d}"),)))
    first = logs.since(-1)
    assert len(first) == 2 and first[0].number == 90
    assert [entry.number for entry in logs.since(first[-1].number)] == [92, 93]


def test_what_was_logged_in_a_slot_is_logged_on_the_driver_as_its_program_has_set_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "app")
    logs = JobLogs()
    logs.add(
        2, Logged((line("100 % of it", logging.INFO, "app.rows"), line("no", logging.DEBUG, "app"), line("print")))
    )
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("app.rows", logging.INFO, "100 % of it")
    assert record.created == 1_700_000_000


def test_a_line_of_megabytes_is_passed_on_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To collect all of it first takes time with the square of its length, and as much memory."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", written.append)
    path = tmp_path / "printed"
    path.write_text("short\n" + "y" * 5_000_000 + "\nend")
    process_slots._copy_stdout(path.open("rb"))
    assert "".join(written) == path.read_text()
    assert max(map(len, written)) < 2_000_000
