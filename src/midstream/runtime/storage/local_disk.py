"""Files in local directories that have no name and go with the process: for state that does not fit into memory."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

FILE_BYTES_MIN: Final = 2**20
IN_MEMORY: Final = ("tmpfs", "ramfs")

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


def _filesystem(directory: Path, mounts: Path) -> str:
    """Return the kind of file system that a directory is on; "" if it is unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        path = directory.resolve()
    except OSError:  # not on Linux
        return ""
    found = [(len(at), kind) for _, at, kind, *_ in map(str.split, lines) if path.is_relative_to(at)]
    return max(found)[1] if found else ""
