"""What stands for the outside where a test needs none: storage, ids, a source without rows, an operator that gets none."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from itertools import count

import pyarrow as pa

from midstream.engine.core.errors import StorageError
from midstream.engine.operators.base import Operator
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader

TORN = "torn-"
"""Names that begin so are of files that were never finished."""


class MemoryStorage:
    """core.interfaces.Storage. `refuse(path)` true: writing there fails."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.refuse: Callable[[str], bool] = lambda path: False
        self.refuse_delete: Callable[[str], bool] = lambda path: False

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise StorageError(f"cannot read {path}: there is no such file")
        return self.files[path]

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self.read(path)[offset : offset + length]

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.refuse(path):
            raise StorageError(f"cannot write {path}: the disk is full")
        assert path not in self.files, path
        self.files[path] = b"".join(parts)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        if path in self.files:
            return False
        self.write(path, [data])
        return True

    def delete(self, path: str) -> None:
        if self.refuse_delete(path):
            raise StorageError(f"cannot delete {path}: permission denied")
        for file in [file for file in self.files if file == path or file.startswith(f"{path}/")]:
            del self.files[file]

    def list(self, path: str) -> list[str]:
        below = f"{path}/" if path else ""
        return sorted({f[len(below) :].split("/", 1)[0] for f in self.files if f.startswith(below)})

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        below = f"{path}/{TORN}"
        for file in [file for file in self.files if file.startswith(below) and unwanted(file.removeprefix(below))]:
            del self.files[file]

    def exists(self, path: str) -> bool:
        return path in self.files or any(file.startswith(f"{path}/") for file in self.files)

    def checkpoints(self) -> builtins.list[int]:
        return sorted(int(f.split("/")[0][4:]) for f in self.files if f.endswith("/_metadata"))


class CountingIds:
    """core.interfaces.Ids."""

    def __init__(self) -> None:
        self._numbers = count()

    def new_id(self) -> str:
        return f"{next(self._numbers):016x}"


class NoRows(Source):
    schema = pa.schema([("n", pa.int64())])

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        return Discovery((), b"", True)

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("there are no splits")


class NeverRun(Operator):
    """Stands in a graph that is looked at and not run."""

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        raise AssertionError("nothing runs here")
