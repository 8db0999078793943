"""How much a test tries: all in `make nightly`, a part of it before a change lands."""

from __future__ import annotations

import os
from collections.abc import Iterable

_IS_NIGHTLY = bool(os.environ.get("NIGHTLY"))
_SHARE = 1 if _IS_NIGHTLY else 3


def examples(nightly: int) -> int:
    """For `max_examples` of hypothesis."""
    return max(nightly // _SHARE, 10)


def some(seeds: range) -> range:
    """The seeds of the simulator that a test runs. `make simulate` adds fresh ones before a change lands."""
    return seeds[: -(-len(seeds) // _SHARE)]


def known(seeds: Iterable[int], nightly: range) -> Iterable[int]:
    """The seeds that meet what a test waits for; in `make nightly` a whole range, in which others may."""
    return nightly if _IS_NIGHTLY else seeds
