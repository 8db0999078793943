"""What the allocator of a slot process keeps of freed memory.

Batches and the temporaries that numpy makes of them are megabytes, for milliseconds. By default glibc
gives such memory back to the kernel at once and gets it again page by page, which took about a seventh of
the processor time of `midstream bench window`.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 2**20
"""So much may lie free at the end of the heap."""
IN_HEAP_BYTES_MAX: Final = 32 * 2**20
"""What is larger is never kept: glibc takes no more for this."""


def keep_freed_memory() -> None:
    """Of this process; nothing where there is no glibc, or where the environment sets what malloc is to do."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, IN_HEAP_BYTES_MAX)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
