"""The newest lines that a job's slots have printed and logged, on the driver, and their way into the program's own
logging.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from typing import Final

from midstream.engine.protocol.messages import LogEntry, Logged, LogLine

ENTRIES_MAX: Final = 10_000
CHARS_MAX: Final = 4 * 2**20
ANSWER_CHARS_MAX: Final = 2**20
LAST_LINES: Final = 10
LOGGERS_MAX: Final = 1_000
"""The limit on loggers made for lines of slots: a logger is never deleted."""
OTHERS: Final = "midstream.slots"

_log = logging.getLogger(__name__)


class JobLogs:
    """The lines of a job. Loop thread only."""

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque()
        self._chars = 0
        self._count = 0
        self._loggers: set[str] = set()

    def add(self, slot: int, logged: Logged) -> None:
        if logged.dropped:
            at_ms = logged.lines[0].at_ms if logged.lines else 0
            self._keep(slot, LogLine(at_ms, f"({logged.dropped} lines left out: there were too many)", "midstream"))
        for line in logged.lines:
            self._keep(slot, line)
            if line.level:
                self._log(slot, line)

    def since(self, after: int) -> tuple[LogEntry, ...]:
        """Return the entries after number `after`, as many as fit into an answer."""
        entries = self._entries
        first = max(0, after + 1 - entries[0].number) if entries else 0
        found: list[LogEntry] = []
        left = ANSWER_CHARS_MAX
        for entry in islice(entries, first, None):
            left -= len(entry.line.text)
            if left < 0 and found:
                break
            found.append(entry)
        return tuple(found)

    def last_of(self, slot: int) -> str:
        """Return the last lines of a slot."""
        lines = [entry.line.text for entry in reversed(self._entries) if entry.slot == slot]
        return "\n".join(reversed(lines[:LAST_LINES]))

    def _keep(self, slot: int, line: LogLine) -> None:
        self._entries.append(LogEntry(self._count, slot, line))
        self._count += 1
        self._chars += len(line.text)
        while len(self._entries) > ENTRIES_MAX or self._chars > CHARS_MAX:
            self._chars -= len(self._entries.popleft().line.text)

    def _log(self, slot: int, line: LogLine) -> None:
        """Log a line as if it came from this program, which decides where it goes and from which level on."""
        name = line.logger
        if name not in self._loggers:
            if len(self._loggers) >= LOGGERS_MAX:
                name = OTHERS
            self._loggers.add(name)
        try:
            logger = logging.getLogger(name)
            if logger.isEnabledFor(line.level):
                made = logging.makeLogRecord(
                    {
                        "name": line.logger,
                        "levelno": line.level,
                        "levelname": logging.getLevelName(line.level),
                        "msg": "%s",
                        "args": (line.text,),
                        "created": line.at_ms / 1000,
                        "msecs": line.at_ms % 1000,
                        "operator": line.operator,
                        "slot": slot,
                    }
                )
                logger.handle(made)
        except Exception:  # noqa: BLE001 - filters belong to the program, and the job must not fail if one raises
            _log.exception("a line of slot %d could not be logged", slot)
