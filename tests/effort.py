"""How much a property test tries: all in `make nightly`, a third of it before a change lands."""

from __future__ import annotations

import os

_SHARE = 1 if os.environ.get("NIGHTLY") else 3


def examples(nightly: int) -> int:
    """For `max_examples` of hypothesis."""
    return max(nightly // _SHARE, 10)
