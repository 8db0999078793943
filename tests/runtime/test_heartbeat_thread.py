"""Who is in the call that keeps a slot's loop, as its second thread sees it."""

from __future__ import annotations

import math
import sys
import threading
import weakref

from machine import limit_s
from midstream.engine.protocol.messages import InCall
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.process.heartbeat_thread import HeartbeatThread, _seen
from waiting import until


class Unready:
    """Stands for another object, as lazy imports and request contexts do, and there is none yet."""

    @property  # type: ignore[misc]  # as such objects do
    def __class__(self) -> type:
        raise RuntimeError("no context")

    def call(self) -> tuple[str, str]:
        return _seen(sys._getframe())


def test_an_object_that_cannot_be_looked_at_does_not_end_the_heartbeats() -> None:
    assert Unready().call()[0] == "the slot"


class Attempt:
    """Stands for a task, its state, and its function, which takes long."""

    def __init__(self, reported: threading.Event) -> None:
        self.reported = reported

    def call(self) -> None:
        assert self.reported.wait(limit_s(10))


def test_nothing_of_a_call_that_took_long_is_kept_after_it() -> None:
    fatal: list[BaseException] = []
    loop = EventLoop("slot", fatal.append)
    reported = threading.Event()
    reports: list[InCall] = []

    def beat(report: InCall) -> None:
        reports.append(report)
        reported.set()

    def is_gone() -> None:
        loop.busy_since_s = math.inf  # this mail is not reported
        until("the attempt is gone", lambda: kept() is None, 10)

    attempt = Attempt(reported)
    kept = weakref.ref(attempt)
    loop.post(attempt.call)
    loop.post(is_gone)
    loop.stop()
    del attempt
    beating = HeartbeatThread(loop, 0.01, beat)
    try:
        loop.run()
    finally:
        beating.end()
        loop.close()
    assert not fatal
    assert "in call" in reports[0].where
