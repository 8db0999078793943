"""Captures what user code prints and logs in a slot, and sends it to the driver.

    print, sys.stdout, sys.stderr --> where they went before, and line by line ---+
    logging, from the level that the program has set on the driver ---------------+--> Logged --> driver

A line that the loop thread writes, which is where functions run, is sent before the call returns: a function's last
output reaches the driver even if its next action kills the process. Lines of other threads wait for the loop. There
is a budget, so that a function that prints every row neither fills memory nor occupies the network: excess lines are
dropped, counted, and reported.

Nothing here runs unless something is printed or logged.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TextIO

from midstream.engine.core.error_rows import sendable
from midstream.engine.protocol.messages import LOG_LINE_CHARS_MAX, LOG_LINES_MAX, LOG_NAME_CHARS_MAX, Logged, LogLine

CHARS_PER_S: Final = 64 * 2**10
CHARS_BURST: Final = 256 * 2**10
LINE_CHARS: Final = 50
"""The number of characters that are added to each line's length, for its metadata."""
FORMAT: Final = "%(levelname)s %(name)s: %(message)s"

AtWork = Callable[[], tuple[str, str, int]]
"""Returns the name, the uid and the subtask of the operator that is running."""


class SlotOutput:
    """Captures output. `levels`: by logger, "" for the root; see `levels_set`. `keeps_records`: also write records to
    stderr.

    A context manager, which restores what it changes, since Spark reuses processes.
    """

    def __init__(self, levels: Mapping[str, int], keeps_records: bool) -> None:
        self._levels = dict(levels)
        self._levels_before: dict[str, int] = {}
        self._keeps_records = keeps_records
        self._handler = _Handler(self)
        self._handlers_before: list[logging.Handler] = []
        self._streams: list[tuple[str, _Stream]] = []
        self._lock = threading.Lock()
        self._lines: list[LogLine] = []
        self._dropped = 0
        self._chars_left = float(CHARS_BURST)
        self._refilled_s = time.monotonic()
        self._posted = False
        self._busy = threading.local()
        self._pid = os.getpid()
        self._loop_thread = -1
        self._send: Callable[[Logged], None] | None = None
        self._post: Callable[[Callable[[], None]], None]
        self._at_work: AtWork

    def __enter__(self) -> SlotOutput:
        root = logging.getLogger()
        for name, level in self._levels.items():
            logger = logging.getLogger(name or None)
            self._levels_before[name] = logger.level
            logger.setLevel(level)
        self._handlers_before, root.handlers = root.handlers, [self._handler]
        for name in ("stdout", "stderr"):
            stream = _Stream(getattr(sys, name), name, self)
            setattr(sys, name, stream)
            self._streams.append((name, stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for name, stream in self._streams:
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.real)
        logging.getLogger().handlers = self._handlers_before
        for name, level in self._levels_before.items():
            logging.getLogger(name or None).setLevel(level)

    def begin(
        self, send: Callable[[Logged], None], post: Callable[[Callable[[], None]], None], at_work: AtWork
    ) -> None:
        """Begin sending lines with `send`, which may only be called on this thread; `post` runs a call on it."""
        self._loop_thread = threading.get_ident()
        self._post, self._at_work, self._send = post, at_work, send

    def end(self) -> None:
        """Send the last lines, while the connection still exists. Later lines only go to stderr."""
        if self._send is not None:
            self._flush_posted()
            self._send = None

    # ---- what comes in, on any thread

    def printed(self, stream: str, text: str) -> None:
        self._add(text.splitlines() or [""], stream, 0)

    def logged(self, record: logging.LogRecord, text: str) -> None:
        if self._keeps_records or not self._is_open:
            stderr = self._streams[1][1].real if self._streams else sys.stderr
            print(self._handler.format(record), file=stderr, flush=True)
        self._add([text], record.name, max(1, record.levelno))

    @property
    def _is_open(self) -> bool:
        return self._send is not None and os.getpid() == self._pid

    def _add(self, texts: list[str], logger: str, level: int) -> None:
        """Take lines, except those of a forked child, which must not get into the slot's connection."""
        if not self._is_open or getattr(self._busy, "now", False):
            return
        self._busy.now = True  # lines logged by the sending itself would be sent too, without end
        try:
            self._take(texts, logger, level)
        finally:
            self._busy.now = False

    def _take(self, texts: list[str], logger: str, level: int) -> None:
        on_loop = threading.get_ident() == self._loop_thread
        name, uid, subtask = self._at_work() if on_loop else ("", "", -1)
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            self._refill()
            for text in texts:
                text = _shortened(text)
                self._chars_left -= len(text) + LINE_CHARS
                if self._chars_left < 0 or len(self._lines) >= LOG_LINES_MAX:
                    self._chars_left += len(text) + LINE_CHARS
                    self._dropped += 1
                    continue
                self._lines.append(
                    LogLine(
                        now_ms,
                        text,
                        sendable(logger)[:LOG_NAME_CHARS_MAX],
                        level,
                        name[:LOG_NAME_CHARS_MAX],
                        uid[:LOG_NAME_CHARS_MAX],
                        subtask,
                    )
                )
            posted = self._posted or not self._lines
            self._posted = self._posted or not on_loop
        if on_loop:
            self._flush()
        elif not posted:
            self._post(self._flush_posted)

    def _refill(self) -> None:
        now_s = time.monotonic()
        self._chars_left = min(CHARS_BURST, self._chars_left + (now_s - self._refilled_s) * CHARS_PER_S)
        self._refilled_s = now_s

    def _flush_posted(self) -> None:
        """Flush in a separate mail. A signal handler or `__del__` that prints meanwhile must not deadlock. Loop thread
        only.
        """
        self._busy.now = True
        try:
            self._flush()
        finally:
            self._busy.now = False

    def _flush(self) -> None:
        """Send the captured lines. Loop thread only, while busy."""
        with self._lock:
            self._posted = False
            lines, self._lines = self._lines, []
            dropped = self._dropped if lines else 0
            self._dropped -= dropped
        if lines and self._send is not None:
            self._send(Logged(tuple(lines), dropped))


class _Handler(logging.Handler):
    def __init__(self, capture: SlotOutput) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._capture = capture
        self._text = logging.Formatter("%(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._capture.logged(record, self._text.format(record))
        except Exception:  # noqa: BLE001 - like every handler: a record that cannot be formatted must not end a task
            self.handleError(record)


class _Stream:
    """Replaces sys.stdout or sys.stderr: passes everything on, and captures whole lines."""

    def __init__(self, real: TextIO, name: str, capture: SlotOutput) -> None:
        self.real = real
        self._name = name
        self._capture = capture
        self._open_line = threading.local()
        """What each thread has written of a line that is not complete."""

    def write(self, text: str) -> int:
        count = self.real.write(text)
        begun = getattr(self._open_line, "text", "")
        whole, newline, rest = text.rpartition("\n")
        if newline:
            self._capture.printed(self._name, begun + whole)
            begun = rest
        else:
            begun += rest
        self._open_line.text = begun[: 2 * LOG_LINE_CHARS_MAX]
        return count

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def levels_set() -> dict[str, int]:
    """Return the levels that this program has set: its loggers get the same levels in the slots."""
    found = {"": logging.getLogger().level}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET:
            found[name] = logger.level
    return found


def _shortened(text: str) -> str:
    text = sendable(text)
    if len(text) <= LOG_LINE_CHARS_MAX:
        return text
    half = LOG_LINE_CHARS_MAX // 2 - 50
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"
