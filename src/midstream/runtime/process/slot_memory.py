"""The memory of a slot process: its limit, what its allocator keeps of freed memory, and how often garbage is collected.

Batches and numpy's temporaries are megabytes that live for milliseconds. By default glibc returns such memory to the
kernel at once and gets it back page by page, which took about a seventh of the processor time of `python -m midstream_lab bench
window`.

Python collects garbage whenever 700 more objects have been made than freed. That is less than a call of `map_async` for
each of 100 rows, whose objects live as long as their calls do, and are examined again and again: a third of the processor
time of `python -m midstream_lab bench lookup`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 2**20
"""The memory that may lie free at the end of the heap."""
IN_HEAP_BYTES_MAX: Final = 32 * 2**20
"""Larger allocations are never kept; glibc accepts no higher value."""
GARBAGE_OBJECTS: Final = 10_000
"""How many more objects are made than freed before garbage is collected between two heartbeats."""


def collect_rarely() -> None:
    """Collect garbage rarely in this process; `collect_recent` collects it from time to time."""
    gc.freeze()  # modules are never garbage
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)


def collect_recent() -> None:
    """Collect recent garbage. It may be few objects, but hold batches of rows."""
    gc.collect(1)


def keep_freed_memory() -> None:
    """Keep freed memory in this process, unless there is no glibc or the environment configures malloc."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, IN_HEAP_BYTES_MAX)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def memory_limit(own_cgroups: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the most bytes this process can have: the least of what its cgroups, RLIMIT_AS and the machine allow.

    A cgroup's limit, such as a container's, applies to all of its processes together. Spark sets RLIMIT_AS if
    `spark.executor.pyspark.memory` is set.
    """
    import psutil

    limits: list[int] = [psutil.virtual_memory().total, *_limits_of_cgroups(own_cgroups, cgroups)]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits)


def _limits_of_cgroups(own_cgroups: Path, cgroups: Path) -> list[int]:
    """Return the limits of the process's own cgroup and those above it, as far as they are visible."""
    try:
        lines = own_cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):
            with suppress(OSError, ValueError):  # not visible in this container, or "max"
                limits.append(int((root / each / name).read_text(encoding="ascii")))
    return [limit for limit in limits if limit > 0]
