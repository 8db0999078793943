"""Files in local directories that have no name and go with the process: for state that does not fit into memory."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import msgspec

FILE_BYTES_MIN: Final = 2**20
IN_MEMORY: Final = ("tmpfs", "ramfs")
PROBE_BYTES: Final = 8 * 2**20

_log = logging.getLogger(__name__)


class LocalDirectories:
    """A engine.core.interfaces.LocalDisk. The directories are used in turn; each file's name is removed before its first
    byte is written, so that a killed process leaves nothing behind.
    """

    file_bytes_min: Final = FILE_BYTES_MIN

    def __init__(self, directories: Sequence[str], mounts: Path = Path("/proc/self/mounts")) -> None:
        self._directories = tuple(directories)
        self._turns = itertools.cycle(self._directories)
        self._mounts = mounts
        self._used: set[str] = set()

    @property
    def place(self) -> str:
        return ", ".join(self._directories)

    def map(self, write: Callable[[IO[bytes]], None]) -> memoryview:
        directory = next(self._turns)
        if directory not in self._used:
            self._used.add(directory)
            self._check(directory)
        Path(directory).mkdir(parents=True, exist_ok=True)  # a job that cleans up old files may have removed it
        descriptor, name = tempfile.mkstemp(prefix="midstream-state-", dir=directory)
        with os.fdopen(descriptor, "w+b") as file:
            os.unlink(name)
            write(file)
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def _check(self, directory: str) -> None:
        """Log a warning if the directory lies in memory: what is moved there saves none."""
        kind = _filesystem(Path(directory), self._mounts)
        if kind in IN_MEMORY:
            _log.warning(
                "the local directory %s lies in memory (%s), so state that is moved there saves none; name a directory on "
                "a disk in spark.local.dir or SPARK_LOCAL_DIRS, or TMPDIR without Spark",
                *(directory, kind),
            )


def local_directories(environment: Mapping[str, str]) -> list[str]:
    """Return where a process may write files for itself: the directories that Spark sets for its Python workers, TMPDIR
    without Spark.
    """
    listed = [each.strip() for each in environment.get("SPARK_LOCAL_DIRS", "").split(",")]
    return [each for each in listed if each] or [tempfile.gettempdir()]


class DiskProbe(msgspec.Struct, frozen=True):
    """What writing to a local directory has shown."""

    directory: str
    kind: str
    """The kind of its file system; "" if it is unknown."""
    free_bytes: int
    """What a process without special rights may still write there."""
    bytes_per_s: float
    """The rate at which data reaches the disk itself."""
    failure: str = ""
    """Why it cannot be used, or ""."""


def probe_directories(environment: Mapping[str, str], mounts: Path = Path("/proc/self/mounts")) -> list[DiskProbe]:
    """Write some data into each of the `local_directories`, as state would be written there, and leave nothing."""
    return [_probe(Path(each), mounts) for each in local_directories(environment)]


def _probe(directory: Path, mounts: Path) -> DiskProbe:
    piece = os.urandom(PROBE_BYTES)
    existed = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        with tempfile.TemporaryFile(dir=directory) as file:
            begun_s = time.perf_counter()
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            rate = PROBE_BYTES / (time.perf_counter() - begun_s)
    except OSError as error:
        return DiskProbe(str(directory), _filesystem(directory, mounts), 0, 0.0, str(error))
    finally:
        if not existed:
            with suppress(OSError):  # there is none, or something else has begun to use it
                directory.rmdir()
    return DiskProbe(str(directory), _filesystem(directory, mounts), free_bytes, rate)


def _filesystem(directory: Path, mounts: Path) -> str:
    """Return the kind of file system that a directory is on; "" if it is unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        path = directory.resolve()
    except OSError:  # not on Linux
        return ""
    found = [(len(at), kind) for _, at, kind, *_ in map(str.split, lines) if path.is_relative_to(at)]
    return max(found)[1] if found else ""
