"""Reports that a slot is alive while its loop is inside one call of a user's function.

Once per heartbeat a thread checks how long the loop has been in its current mail. While that is short, the loop sends
heartbeats itself; otherwise this thread sends `InCall` on the same authenticated connection, between two frames. The
thread shares the fate of the process: a stopped or frozen process is silent, and so is one whose function holds the
interpreter's lock for the whole time.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from midstream.engine.core.error_rows import sendable
from midstream.engine.operators.base import Operator
from midstream.engine.protocol.messages import InCall
from midstream.engine.worker.task import Task
from midstream.runtime.event_loop import EventLoop

JOIN_S: Final = 1.0
_NOT_USERS: Final = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)


class HeartbeatThread:
    """The second heartbeat, from the constructor, which is called on the loop thread, until `end`."""

    def __init__(self, loop: EventLoop, interval_s: float, beat: Callable[[InCall], None]) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._interval_s = interval_s
        self._beat = beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="midstream-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            busy_s = time.monotonic() - self._loop.busy_since_s
            if busy_s >= self._interval_s:
                self._report(busy_s)

    def _report(self, busy_s: float) -> None:
        # a variable of `_run` would keep the frame, and so the task in it, until the next long call
        operator, line = _seen(sys._current_frames().get(self._loop_thread))
        self._beat(InCall(operator, int(busy_s * 1000), line))


def _seen(frame: FrameType | None) -> tuple[str, str]:
    """Return whose call it is, and which line. A proxy object may raise when it is examined: heartbeats continue."""
    try:
        return sendable(operator_in(frame)), sendable(line_in(frame))
    except Exception:  # noqa: BLE001 - the user's objects may raise anything when they are inspected
        return "the slot", ""


def operator_in(frame: FrameType | None) -> str:
    """Return the operator whose call the loop is in, as displayed, found by the objects whose methods are on the stack."""
    found: Operator | None = None
    for of in _outwards(frame):
        owner = of.f_locals.get("self")
        if found is None and isinstance(owner, Operator):
            found = owner
        elif isinstance(owner, Task):
            names = [spec.name for spec in owner.vertex.operators if spec.operator is found]
            return f"operator {(names[0] if names else owner.vertex.name)!r} (subtask {owner.ref.subtask})"
    return "the slot"


def line_in(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own code: file, line, function."""
    for of in _outwards(frame):
        file = of.f_code.co_filename
        if not file.startswith(_NOT_USERS):
            return f"{file}:{of.f_lineno} in {of.f_code.co_name}"
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the current mail, from the innermost. The loop's own lasts: its `f_locals`, once they are read,
    keep the mail of that time.
    """
    while frame is not None and frame.f_code is not EventLoop.run.__code__:
        yield frame
        frame = frame.f_back
