"""How much a test tries: all in `make nightly`, a part of it before a change lands."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

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


def is_its_turn(test: str, shares: int) -> bool:
    """Whether this commit runs a test with the marker `turns`: one commit after another runs another share of them."""
    return _IS_NIGHTLY or zlib.crc32(test.encode()) % shares == _commit() % shares


@cache
def _commit() -> int:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return int(head.stdout.strip() or "0", 16)
