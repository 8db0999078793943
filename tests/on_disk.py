"""A local disk in memory, and state of which everything has been moved to it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import IO

from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.columns_on_disk import on_disk


class MemoryDisk:
    """A engine.core.interfaces.LocalDisk. `is_full`: writing fails."""

    place = "/a/disk"
    file_bytes_min = 1

    def __init__(self) -> None:
        self.is_full = False
        self.files = 0

    def map(self, write: Callable[[IO[bytes]], None]) -> memoryview:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.files += 1
        file = io.BytesIO()
        write(file)
        return memoryview(file.getvalue())


def move_all(runs: Iterable[FrameRun]) -> None:
    """Move everything that can be moved to a disk."""
    for run in runs:
        columns = run.columns()
        if columns:
            run.move(on_disk(columns, MemoryDisk()))
