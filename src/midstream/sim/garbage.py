"""When a process that runs many worlds looks for garbage: after each of them, and hardly ever in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

GARBAGE_OBJECTS: Final = 200_000


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """A world is one large knot of references, and looking through it again and again takes an eighth of the time.

    `collect` is to follow each run.
    """
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def collect() -> None:
    """The world that has just ended, while it is still in the caches: later that takes four times as long."""
    gc.collect(1)


def collect_rarely() -> None:
    """For as long as the process lives."""
    gc.freeze()  # the modules themselves stay
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
