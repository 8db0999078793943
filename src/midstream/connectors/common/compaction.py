"""Small files of a table that are written again as larger ones, on a thread of its own.

A table gets a file for each subtask, partition and checkpoint. Compaction begins after a commit, and its own commit
changes no row. Files are written while checkpoints are committed; only its commit takes turns with theirs.

Files of one partition and of like size become one, as in a log-structured merge tree: a row is written again two or
three times in its life, and no partition has more than some fifty small files for long. One commit is for many partitions,
since its cost depends on the size of the table.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from midstream.engine.core.errors import ConfigError, MidstreamError
from midstream.engine.operators.user_metrics import UserMetrics

FILES_MIN: Final = 16
"""The number of files of like size from which they are compacted, and of commits after which they are looked for again."""
TARGET_BYTES_MIN: Final = 2**20
_CLOSE_S_MAX: Final = 30.0
_DOUBLED_MAX: Final = 10
"""How often the number of commits until the next try is doubled."""
_FILES_MAX: Final = 1000
"""The number of files that are compacted together."""

_log = logging.getLogger(__name__)


class LiveFile(NamedTuple):
    """A file of a table. `order`: when it was added, in relation to others."""

    path: str
    size: int
    partition: tuple[Any, ...]
    order: tuple[int, str]


def files_to_compact(files: Iterable[LiveFile], target_bytes: int) -> list[list[LiveFile]]:
    """Return groups of files, at most one of a partition, each of which should become one file. None has too few.

    A group has its oldest files, in the order in which they were added, as time is then the same in them. All groups
    together are not larger than one may be: so much is written for nothing if another commit comes first.
    """
    alike: defaultdict[tuple[tuple[Any, ...], int], list[LiveFile]] = defaultdict(list)
    for file in files:
        if is_small(file.size, target_bytes):
            alike[file.partition, _tier(file.size, target_bytes)].append(file)
    found: dict[tuple[Any, ...], list[LiveFile]] = {}
    left_bytes, left_files = target_bytes, _FILES_MAX
    for (partition, _), candidates in sorted(alike.items(), key=lambda item: -len(item[1])):
        if len(candidates) < FILES_MIN:
            break
        group = _oldest(candidates, target_bytes)
        size = sum(file.size for file in group)
        if partition not in found and size <= left_bytes and len(group) <= left_files:
            found[partition] = group
            left_bytes, left_files = left_bytes - size, left_files - len(group)
    return list(found.values())


def _oldest(files: Iterable[LiveFile], bytes_max: int) -> list[LiveFile]:
    found: list[LiveFile] = []
    for file in sorted(files, key=lambda file: file.order)[:_FILES_MAX]:
        bytes_max -= file.size
        if bytes_max < 0:
            break
        found.append(file)
    return found


def is_small(size: int, target_bytes: int) -> bool:
    return 2 * size < target_bytes


def _tier(size: int, target_bytes: int) -> int:
    """Return which files are alike: 0 for those of nearly half the target size, 1 and 2 for smaller ones."""
    return sum(size * 2 * FILES_MIN**step < target_bytes for step in (1, 2))


def check_target(roll_bytes: int, where: str) -> None:
    """Raise ConfigError for files that are always small."""
    if roll_bytes < TARGET_BYTES_MIN:
        raise ConfigError(
            f"{where}: auto_compact makes files of up to roll_size, which is {roll_bytes} bytes; make it at least 1 MiB"
        )


class Compacted(NamedTuple):
    """How many files have become how many others, of which size together."""

    old: int
    new: int
    size_bytes: int

    def text(self) -> str:
        return f"compacted {self.old} files into {self.new} of {self.size_bytes / 2**20:.1f} MiB together"


class GivenUpError(MidstreamError):
    """The compaction is no longer needed, since the job ends."""


class Compactor(ABC):
    """Compacts the small files of one table, a few at a time, as long as there are enough of them.

    What fails is logged, and tried again later: it must not fail the job, whose output is complete without it. Each
    failure in a row doubles the number of commits until then, since it may leave files that are in no table. Metrics count
    the files that have been compacted, and the failures.
    """

    def __init__(self, where: str, metrics: UserMetrics) -> None:
        self.turn = threading.Lock()
        """Held during a commit, of a checkpoint or of a compaction."""
        self._where = where
        self._stopped = threading.Event()
        self._commits = FILES_MIN - 1
        """The number of commits since it last began. The first commit is followed by one, for files that were there before."""
        self._failures = 0
        """In a row."""
        self._thread: threading.Thread | None = None
        self._reported = ""
        self._compacted = metrics.counter("compacted_files")
        self._failed = metrics.counter("failed_compactions")

    @abstractmethod
    def compact_once(self) -> Compacted | None:
        """Compact some files, and return what was done; None if there are too few, or if others have changed them since."""

    def committed(self) -> None:
        """A checkpoint is committed. Called by one thread at a time."""
        self._commits += 1
        if self._commits >= FILES_MIN << min(self._failures, _DOUBLED_MAX) and not self._is_running:
            self._commits = 0
            self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until what has begun has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Give up what has begun. Storage that does not answer is not waited for: what has been written there is in no
        table, and the thread ends with the process.
        """
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)

    def check_stopped(self) -> None:
        """Raise GivenUpError if the job has ended."""
        if self._stopped.is_set():
            raise GivenUpError

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (done := self.compact_once()) is not None:
                self._compacted.inc(done.old)
                _log.info("%s: %s", self._where, done.text())
                self.check_stopped()
            self._failures, self._reported = 0, ""
        except GivenUpError:
            pass
        except (MidstreamError, OSError, pa.ArrowException) as error:
            self._failures += 1
            self._failed.inc()
            if str(error) != self._reported:  # it may fail each time
                self._reported = str(error)
                _log.warning("%s: small files could not be compacted: %s", self._where, error)
