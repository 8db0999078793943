"""Tells installed files from the user's own code."""

from __future__ import annotations

import os
import sysconfig
from functools import cache, lru_cache


@cache
def _standard() -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(sysconfig.get_path(kind)), "") for kind in ("stdlib", "platstdlib"))


def is_installed(path: str) -> bool:
    """Whether a module's file, or its directory, was put there by an installer."""
    return _is_file_of_installers(path if os.path.isabs(path) else os.path.abspath(path))


@lru_cache(16384)
def _is_file_of_installers(path: str) -> bool:
    """Whether a file was put there by an installer; cached, since each Environment checks every module of the
    process.
    """
    return _is_of_installers(os.path.dirname(os.path.abspath(path)))


@lru_cache(4096)
def _is_of_installers(directory: str) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(directory.split(os.sep)):
        return True
    return os.path.join(os.path.realpath(directory), "").startswith(_standard())
