"""Memory of batches is used again, not fetched from the kernel for each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from machine import limit_s
from midstream.runtime.process.slot_memory import memory_limit

FAULTS = """
import resource
import numpy as np
from midstream.runtime.process.slot_memory import keep_freed_memory

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
        timeout=limit_s(60),
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly")
def test_memory_of_temporaries_is_kept_unless_the_environment_says_otherwise() -> None:
    assert faults() < 1000
    assert faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072", NUMPY_MADVISE_HUGEPAGE="0") > 1000


MACHINE = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        pytest.param("0::/pod/box\n", {"pod/box/memory.max": "max", "pod/memory.max": "4096"}, 4096, id="above"),
        pytest.param("0::/\n", {"memory.max": "8192"}, 8192, id="own_namespace"),
        pytest.param("0::/pod/box\n", {"memory.max": "max"}, MACHINE, id="none"),
        pytest.param("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "512"}, 512, id="first_version"),
        pytest.param("4:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, MACHINE, id="unlimited"),
        pytest.param("0::/a:b\n", {"a:b/memory.max": "77"}, 77, id="colon"),
        pytest.param(None, {}, MACHINE, id="no_linux"),
    ],
)
def test_memory_is_limited_by_every_cgroup_above_the_process(
    own: str | None, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    cgroups = tmp_path / "cgroup"
    for name, text in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert memory_limit(tmp_path / "own", cgroups) == expected


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, resource.RLIM_INFINITY))
from midstream.runtime.process.slot_memory import memory_limit
print(memory_limit())
"""


def test_sparks_limit_of_a_worker_counts() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=limit_s(60)
    )
    assert int(run.stdout) <= 3 * 2**30


GARBAGE = """
import gc, weakref
from midstream.runtime.process.slot_memory import collect_rarely, collect_recent

class Batch: ...

collect_rarely()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
batch = Batch()
batch.own = batch
gone = weakref.ref(batch)
del batch
calls = [[] for _ in range(5000)]
print(len(collections), gone() is None)
collect_recent()
print(gone() is None)
"""


def test_thousands_of_calls_start_no_collection_and_a_heartbeat_frees_what_garbage_holds() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=True, timeout=limit_s(60)
    )
    assert run.stdout.split() == ["0", "False", "True"]
