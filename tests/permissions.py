"""Tests of what may not be read or written, which count for root too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NOBODY: Final = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """For root: as nobody, whom permissions bind. The directories above a test's own must let everyone pass."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
