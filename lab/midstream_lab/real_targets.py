"""The targets of the project's own sinks in simulated jobs: files and tables in a temporary directory.

The rows of a target carry the stamp of the part, of one writer between two checkpoints, that they were written in. So
what is visible names the parts that are committed, and is compared with the ledger's account of these parts.
"""

from __future__ import annotations

import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import polars as pl
import pyarrow as pa
import pyarrow.fs
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from midstream.connectors.common import compaction
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.files.file_sink import FileSink
from midstream.connectors.iceberg import iceberg_catalog, iceberg_commits, iceberg_sink
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.operators.sink_api import Sink
from midstream.simulation.network import SIM
from midstream.simulation.outside import Staged
from midstream_lab.jobs.recorded_rows import Outside

Row = tuple[str, int, int]
"""The stamp, the key and the id of a visible row."""
STAMP: Final = "part"
OP: Final = "op"
DELETED: Final = 5
"""Of the rows with operations, those delete whose ids are divisible by this."""
_TABLE: Final = "lake.{}"


class SteppedFiles(pyarrow.fs.FileSystemHandler):
    """The local filesystem, in which other processes run, or this one dies, between two operations."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def __getstate__(self) -> Outside:
        return self._outside

    def __setstate__(self, outside: Outside) -> None:
        self._outside = outside

    @property
    def _files(self) -> pyarrow.fs.LocalFileSystem:
        return pyarrow.fs.LocalFileSystem()

    def _step(self) -> pyarrow.fs.LocalFileSystem:
        step(self._outside)
        return self._files

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteppedFiles)

    def __hash__(self) -> int:
        return 0

    def get_type_name(self) -> str:
        return "stepped"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> Any:
        return self._step().get_file_info(list(paths))

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> Any:
        return self._step().get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._step().create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._step().delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._step().delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise AssertionError("no sink empties the root of a file system")

    def delete_file(self, path: str) -> None:
        self._step().delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._step().move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._step().copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        return self._step().open_input_stream(path, compression=None)

    def open_input_file(self, path: str) -> Any:
        return self._files.open_input_file(path)  # also by threads that read ahead, as they like

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._step().open_output_stream(path, compression=None)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._step().open_append_stream(path, compression=None)


def step(outside: Outside) -> None:
    """Let others run, or this process die, before an operation on a real target."""
    world = outside.world
    if threading.current_thread() is not threading.main_thread():
        return
    world.io_point()
    if world.is_inspecting or (outside.before_commit is None and outside.before_rollback is None):
        return
    targets = outside.targets.values()
    if any(call.process is world.writer for target in targets for call in target.commits) and world.chance() < 0.3:
        outside.strike_commit()
    if any(call.process is world.writer for target in targets for call in target.rollbacks) and world.chance() < 0.3:
        outside.strike_rollback()


@dataclass(eq=False, slots=True)
class UnderWay:
    """A commit, or a rollback, that is under way, and may take effect at any moment."""

    names: tuple[str, ...]
    process: object


class Target(ABC):
    """One sink's target. `launch`: the number of a start of the job."""

    key: tuple[str, ...] = ()
    is_atomic = True
    """Whether a commit becomes visible as a whole."""

    def __init__(self, outside: Outside, uid: str, directory: Path, options: Mapping[str, Any]) -> None:
        self.outside = outside
        self.uid = uid
        self.directory = directory
        self.options = dict(options)
        self.evolves = bool(options.get("evolve"))
        self.filesystem = pyarrow.fs.PyFileSystem(SteppedFiles(outside))
        self.stamps: dict[str, str] = {}
        """The stamp of each part, by the name under which the ledger has it."""
        self.committables: dict[str, tuple[bytes, ...]] = {}
        """What the real writer has prepared for it."""
        self.commits: list[UnderWay] = []
        self.rollbacks: list[UnderWay] = []

    @abstractmethod
    def sink(self) -> Sink: ...

    @abstractmethod
    def read(self) -> Iterable[Row]:
        """Return the visible rows."""

    def schema(self, launch: int) -> pa.Schema:
        fields: list[tuple[str, pa.DataType]] = [("id", pa.int64()), ("key", pa.int64()), (STAMP, pa.large_string())]
        if "op" in self.options:
            fields.append((OP, pa.large_string()))
        fields += [(f"added_{n}", pa.int64()) for n in range(1, launch if self.evolves else 1)]
        return schema_of(fields)

    def rows(self, batch: pa.RecordBatch, stamp: str, schema: pa.Schema) -> pa.RecordBatch:
        """Return what the real sink gets of the rows of the job."""
        ids = batch.column("id")
        given = {
            "id": ids,
            "key": batch.column("key"),
            STAMP: pa.array([stamp] * batch.num_rows, pa.large_string()),
            OP: pa.array(["delete" if _deletes(each) else "update" for each in to_list(ids)], pa.large_string()),
        }
        return pa.RecordBatch.from_arrays([given.get(name, ids) for name in schema.names], schema=schema)

    # ---- what is visible

    @contextmanager
    def under_way(self, calls: list[UnderWay], names: Iterable[str]) -> Iterator[UnderWay]:
        """Note a call for the time that it takes, and what it has made visible, or removed, even if it fails.

        What calls that are frozen have changed is noted before: this call may hide it.
        """
        if self.key and (self.commits or self.rollbacks):
            self.inspect()
        call = UnderWay(tuple(names), self.outside.world.writer)
        calls.append(call)
        try:
            yield call
        finally:
            self.inspect()
            calls.remove(call)

    def inspect(self) -> None:
        """Compare what is visible with the ledger, and enter what calls under way have changed."""
        with self.outside.world.inspecting():
            rows = list(self.read())
        if self.key:
            self._inspect_keyed(rows)
        else:
            self._inspect_added(rows)

    def confirm(self, names: Sequence[str]) -> None:
        """Check that exactly these parts are committed, after a call that has succeeded.

        Where it only deleted absent keys, or where such a commit was rolled back, that could not be seen.
        """
        before = self.committed
        if before == names:
            return
        with self.outside.world.inspecting():
            wrong = self._wrong(list(self.read()), names) if self.key else f"{before} is visible"
        if wrong:
            self.outside.world.bug(f"{self.uid}: {names} should be visible, and {wrong}")
        for name in before:
            if name not in names:
                self._remove(name)
        for name in names:
            self._enter(name)

    def _staged(self, name: str) -> Staged:
        return self.outside.staged[name]

    @property
    def committed(self) -> list[str]:
        return [name for name in self.outside.committed if self._staged(name).sink == self.uid]

    def _inspect_added(self, rows: Sequence[Row]) -> None:
        outside, world = self.outside, self.outside.world
        parts: dict[str, Counter[int]] = {}
        for stamp, _, row in rows:
            parts.setdefault(stamp, Counter())[row] += 1
        named = {stamp: name for name, stamp in self.stamps.items()}
        committed = self.committed
        for stamp, ids in parts.items():
            if stamp not in named:
                world.bug(f"{self.uid}: rows of {stamp} are visible, which was never prepared")
            elif ids != Counter(self._staged(named[stamp]).ids):
                world.bug(f"{self.uid}: of {named[stamp]}, not every row is visible once, but {dict(ids)}")
        visible = [named[stamp] for stamp in parts if stamp in named]
        coming = {name for call in self.commits for name in call.names}
        going = {name for call in self.rollbacks for name in call.names}
        for name in sorted(set(visible) - set(committed)):
            if name not in coming:
                world.bug(f"{self.uid}: {name} is visible, and no checkpoint has committed it")
            if name in outside.rolled_back:
                world.bug(f"{self.uid}: {name} is visible, and was rolled back")
            self._enter(name)
        for name in sorted(set(committed) - set(visible)):
            if name not in going:
                world.bug(f"{self.uid}: {name} was committed, and is not visible any more")
            self._remove(name)
        for call in self.commits if self.is_atomic else ():
            seen = [name for name in call.names if name in visible]
            if seen and len(seen) < len(call.names):
                world.bug(f"{self.uid}: of {call.names} only {seen} is visible")

    def _inspect_keyed(self, rows: Sequence[Row]) -> None:
        """Find the calls under way whose effects, one after the other, explain what is visible."""
        calls = [(call, call in self.commits) for call in (*self.commits, *self.rollbacks)]
        for count in range(len(calls) + 1):
            for chosen in permutations(calls, count):
                names = dict.fromkeys(self.committed)
                for call, commits in chosen:
                    for name in call.names:
                        names.setdefault(name) if commits else names.pop(name, None)
                if not self._wrong(rows, list(names)):
                    for name in [name for name in self.committed if name not in names]:
                        self._remove(name)
                    for name in names:
                        self._enter(name)
                    return
        wrong = self._wrong(rows, self.committed)
        self.outside.world.bug(f"{self.uid}: no order of commits gives what is visible: {wrong}")

    def _wrong(self, rows: Sequence[Row], names: Sequence[str]) -> str:
        """Return what is wrong if exactly this output is committed, in this order; an empty text if nothing is."""
        allowed: dict[int, set[tuple[str, int] | None]] = {}
        groups: dict[tuple[str, int], list[str]] = {}
        for name in names:
            groups.setdefault((self._staged(name).job_id, self._staged(name).checkpoint_id), []).append(name)
        for group in groups.values():
            last: dict[int, set[tuple[str, int] | None]] = {}
            for name in group:
                staged = self._staged(name)
                of_part = dict(zip(to_list(staged.rows.column("key")), staged.ids, strict=True))
                for key, row in of_part.items():  # subtasks that have rows of the same key have no order
                    gone = "op" in self.options and _deletes(row)
                    last.setdefault(key, set()).add(None if gone else (self.stamps[name], row))
            allowed.update(last)
        found: dict[int, tuple[str, int]] = {}
        for stamp, key, row in rows:
            if key in found:
                return f"key {key} is there twice"
            found[key] = stamp, row
        for key in sorted({*allowed, *found}):
            if found.get(key) not in allowed.get(key, {None}):
                return f"key {key} has {found.get(key)}, and not {allowed.get(key)}"
        return ""

    def _enter(self, name: str) -> None:
        if name not in self.outside.committed:
            self.outside.committed[name] = None
            self.outside.world.note(("visible", name))

    def _remove(self, name: str) -> None:
        self.outside.rolled_back.setdefault(name)
        del self.outside.committed[name]
        self.outside.world.note(("rolled back", name))


def _deletes(row: int) -> bool:
    return row % DELETED == 0


class Files(Target):
    is_atomic = False

    def sink(self) -> Sink:
        return FileSink(str(self.directory / "out"), filesystem=self.filesystem, **self.options)

    def read(self) -> Iterable[Row]:
        read = pl.read_parquet if self.options["format"] == "parquet" else pl.read_ndjson
        for path in sorted((self.directory / "out").glob("part-*")):
            yield from read(path).select(STAMP, "key", "id").rows()


class Delta(Target):
    def __init__(self, outside: Outside, uid: str, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(outside, uid, directory, options)
        self.key = tuple(options.get("key", ()))

    def sink(self) -> Sink:
        return DeltaSink(str(self.directory / "table"), filesystem=self.filesystem, **self.options)

    def read(self) -> Iterable[Row]:
        found = DeltaTable(self.directory / "table").to_pyarrow_table(columns=[STAMP, "key", "id"])
        return _rows(found)


class MappedDelta(Delta):
    """A table whose columns have other names in its files."""

    def __init__(self, outside: Outside, uid: str, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(outside, uid, directory, options)
        columns = pa.schema([field for field in self.schema(1) if field.name != OP])
        mode = {"delta.columnMapping.mode": "id"}
        DeltaTable.create(directory / "table", columns, partition_by=options.get("partition_by"), configuration=mode)

    def read(self) -> Iterable[Row]:
        found = QueryBuilder().register("t", DeltaTable(self.directory / "table"))
        return _rows(pa.table(found.execute(f"SELECT {STAMP}, key, id FROM t").read_all()))


class Iceberg(Target):
    def __init__(self, outside: Outside, uid: str, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(outside, uid, directory, options)
        self.key = tuple(options.get("key", ()))
        self._catalog = SteppedCatalog(outside, self)
        self._name = _TABLE.format(uid)

    def sink(self) -> Sink:
        return IcebergSink(self._name, catalog=self._catalog, filesystem=self.filesystem, **self.options)

    def read(self) -> Iterable[Row]:
        return _rows(SqlCatalog.load_table(self._catalog, self._name).scan().to_arrow().select([STAMP, "key", "id"]))


class SteppedCatalog(SqlCatalog):
    """Takes a step before and after each call; now and then it does not answer, whether or not it has committed."""

    def __init__(self, outside: Outside, target: Target) -> None:
        super().__init__(
            "lab",
            uri="sqlite://",
            warehouse=f"file://{target.directory}/warehouse",
        )
        self._outside = outside

    def load_table(self, identifier: Any) -> Any:
        step(self._outside)
        return super().load_table(identifier)

    def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
        outside = self._outside
        step(outside)
        chance = outside.world.chance()
        if not outside.commit_failures or outside.world.is_inspecting or chance < 0.5:
            made = super().commit_table(table, requirements, updates)
            step(outside)
            return made
        outside.commit_failures -= 1
        if chance < 0.6:
            raise CommitFailedException(f"another commit was first {SIM}")
        if chance < 0.85:
            super().commit_table(table, requirements, updates)
        raise CommitStateUnknownException(f"the catalog does not answer {SIM}")


def _rows(found: pa.Table) -> Iterable[Row]:
    return zip(*(found.column(name).to_pylist() for name in (STAMP, "key", "id")), strict=True)


_PARQUET: Final = {"format": "parquet"}
TARGETS: Final[Mapping[str, tuple[type[Target], Mapping[str, Any]]]] = {
    "parquet": (Files, _PARQUET),
    "parquet shared": (Files, {**_PARQUET, "append": True}),
    "jsonl": (Files, {"format": "jsonl"}),
    "delta": (Delta, {}),
    "delta partitioned": (Delta, {"partition_by": ["key"], "append": True}),
    "delta evolving": (Delta, {"evolve": True}),
    "delta keyed": (Delta, {"key": ["key"]}),
    "delta keyed evolving": (Delta, {"key": ["key"], "op": OP, "evolve": True}),
    "delta deleting": (Delta, {"key": ["key"], "op": OP}),
    "delta mapped": (MappedDelta, {"partition_by": ["key"], "append": True}),
    "delta mapped deleting": (MappedDelta, {"key": ["key"], "op": OP}),
    "iceberg": (Iceberg, {}),
    "iceberg partitioned": (Iceberg, {"partition_by": ["key"], "append": True}),
    "iceberg evolving": (Iceberg, {"evolve": True}),
    "iceberg keyed": (Iceberg, {"key": ["key"]}),
    "iceberg keyed evolving": (Iceberg, {"key": ["key"], "op": OP, "evolve": True}),
    "iceberg deleting": (Iceberg, {"key": ["key"], "op": OP}),
    "delta compacting": (Delta, {"partition_by": ["key"], "append": True, "auto_compact": True}),
    "delta keyed compacting": (Delta, {"key": ["key"], "op": OP, "auto_compact": True}),
    "iceberg compacting": (Iceberg, {"partition_by": ["key"], "append": True, "auto_compact": True}),
    "iceberg keyed compacting": (Iceberg, {"key": ["key"], "op": OP, "auto_compact": True}),
}
"""The kinds of targets, by name, with the arguments of their sinks."""


class Targets:
    """The targets of one run, in a temporary directory."""

    def __init__(self, outside: Outside, kind: str) -> None:
        self._outside = outside
        self._kind = kind
        self._directory = tempfile.TemporaryDirectory(prefix="midstream-lab-")

    def at(self, uid: str) -> Target:
        found = self._outside.targets.get(uid)
        if found is None:
            directory = Path(self._directory.name) / uid
            directory.mkdir()
            make, options = TARGETS[self._kind]
            found = self._outside.targets[uid] = make(self._outside, uid, directory, options)
        return found

    @contextmanager
    def used(self, seed: int) -> Iterator[None]:
        """Use the targets, whose outcome depends on the seed alone, and delete them. Small files are compacted after each
        commit, in place of the thread that would do it.
        """
        with ExitStack() as stack:
            stack.enter_context(self._directory)
            for module in (iceberg_commits, iceberg_catalog):
                stack.enter_context(patch.object(module, "answered", _call))
            stack.enter_context(patch.object(iceberg_sink, "random", Random(f"pauses {seed}")))
            stack.enter_context(patch.object(iceberg_commits, "_make_durable", lambda location: None))
            stack.enter_context(patch.object(compaction, "FILES_MIN", 2))
            stack.enter_context(patch.object(compaction.Compactor, "committed", compaction.Compactor._run))
            yield


def _call(work: Callable[[], Any]) -> Any:
    return work()
