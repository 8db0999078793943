"""When a slot fails: has Spark ended under it, as far as one can tell?"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JNetworkError

from midstream.spark import session


class Context:
    """Of a Spark whose JVM is `process`, and which says `stopped`, or does not answer (None)."""

    def __init__(self, process: Any, stopped: bool | None) -> None:
        self._gateway = SimpleNamespace(proc=process)
        self._jsc = self
        self._stopped = stopped

    def sc(self) -> Context:
        return self

    def isStopped(self) -> bool:
        if self._stopped is None:
            raise Py4JNetworkError("no answer")
        return self._stopped


def ended(process: Any, stopped: bool | None) -> str:
    return session.how_spark_ended(cast(Any, Context(process, stopped)))


def test_spark_has_ended_when_it_says_so_or_its_jvm_is_gone_and_not_when_it_gives_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "STOPPING_WAIT_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert ended(process, stopped=False) == ""
        assert ended(process, stopped=None) == ""
        assert ended(process, stopped=True) == "the Spark session was stopped"
    finally:
        process.kill()
        process.communicate()
    for stopped in (False, None, True):
        assert ended(process, stopped) == f"Spark's JVM (process {process.pid}) was killed by SIGKILL"
    assert ended(None, stopped=False) == ""
    assert ended(None, stopped=None) == "Spark's JVM has ended"
