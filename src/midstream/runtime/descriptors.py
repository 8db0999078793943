"""How many files and connections a process may have open at once (`ulimit -n`).

Each slot has a connection to every other one, and the driver has one to each slot, besides one of Spark's own. The soft
limit is often 1,024, which is an old default; the hard limit, up to which a process may raise it itself, is far above.
"""

from __future__ import annotations

import resource
from typing import Final

DRIVER_OWN: Final = 100
PER_SLOT: Final = 3
"""On the driver: the slot's connection, Spark's, and what its process has for its output."""
SLOT_DESCRIPTORS: Final = 65_536
"""More than there are slots in any job: a slot hears too late how many there are."""


def allow(needed: int) -> int:
    """Raise the soft limit to `needed`, as far as the hard one permits; returns what is allowed then."""
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
