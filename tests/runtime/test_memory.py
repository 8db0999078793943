"""Memory of batches is used again, not fetched from the kernel for each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from midstream.runtime.memory import keep_freed_memory

keep_freed_memory()
def work():
    for _ in range(20):
        np.ones(2**20).sum()  # 8 MiB, 2,048 pages
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly")
def test_memory_of_temporaries_is_kept_unless_the_environment_says_otherwise() -> None:
    assert faults() < 1000
    assert faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072", NUMPY_MADVISE_HUGEPAGE="0") > 1000
