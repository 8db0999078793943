"""Who is in the call that keeps a slot's loop, as its second thread sees it."""

from __future__ import annotations

import sys

from midstream.runtime.process.heartbeat_thread import _seen


class Unready:
    """Stands for another object, as lazy imports and request contexts do, and there is none yet."""

    @property  # type: ignore[misc]  # as such objects do
    def __class__(self) -> type:
        raise RuntimeError("no context")

    def call(self) -> tuple[str, str]:
        return _seen(sys._getframe())


def test_an_object_that_cannot_be_looked_at_does_not_end_the_heartbeats() -> None:
    assert Unready().call()[0] == "the slot"
