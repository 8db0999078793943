"""The number of files and connections that a process may have open (`ulimit -n`).

Each slot has a connection to every other one, and the driver has one to each slot, besides one of Spark's own. The soft
limit is often 1,024, an old default; the hard limit, up to which a process may raise it, is much higher.
"""

from __future__ import annotations

import resource
from typing import Final

DRIVER_OWN: Final = 100
PER_SLOT: Final = 3
"""Descriptors per slot on the driver: the slot's connection, Spark's, and the one for its process's output."""
SLOT_DESCRIPTORS: Final = 65_536
"""More than any job has slots: a slot learns too late how many there are."""


def allow(needed: int) -> int:
    """Raise the soft limit to `needed`, as far as the hard limit permits; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the system has a limit of its own
            return soft
    return max(soft, wanted)
