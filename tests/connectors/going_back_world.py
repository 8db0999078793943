"""Jobs whose sinks have committed more than the checkpoint that they go back to, on storage that may die at any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
from connector_worlds import SCHEMA, Loop, batch, open_writer, prepared

from committers import committer_of
from in_memory import MemoryStorage, NeverRun, NoRows
from midstream.connectors.files.file_sink import FileSink
from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    Committables,
    OperatorState,
    SourcePosition,
    layout_of,
    names_of,
)
from midstream.engine.checkpoint.savepoint import SavepointLocation, write_savepoint
from midstream.engine.checkpoint.store import SAVEPOINT, publish
from midstream.engine.coordinator.events import JobPlan, NewerOutput
from midstream.engine.coordinator.restore.open_directory import OpenedStorage, check_start, find_start, open_checkpoints
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import StorageError
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.engine.protocol.messages import OperatorSnapshot

ROOT = "memory://checkpoints"


class Fate:
    """After so many changes of files everywhere the process is dead, and does nothing more."""

    def __init__(self) -> None:
        self.left: int | None = None

    def change(self, what: Callable[[], Any]) -> Any:
        """The process may die before it or behind it."""
        self.look()
        if self.left is not None:
            self.left -= 1
            self.look()
        return what()

    def look(self) -> None:
        if self.left is not None and self.left <= 0:
            raise OSError("killed")


class MortalStorage(MemoryStorage):
    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.fate = fate

    def read(self, path: str) -> bytes:
        self._do(self.fate.look)
        return super().read(path)

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        self._do(lambda: self.fate.change(lambda: super(MortalStorage, self).write(path, parts)))

    def delete(self, path: str) -> None:
        self._do(lambda: self.fate.change(lambda: super(MortalStorage, self).delete(path)))

    def list(self, path: str) -> list[str]:
        self._do(self.fate.look)
        return super().list(path)

    def _do(self, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            raise StorageError(str(error)) from error


class MortalFiles(pyarrow.fs.FileSystemHandler):
    def __init__(self, fate: Fate) -> None:
        self.base = pyarrow.fs.LocalFileSystem()
        self.fate = fate

    def get_type_name(self) -> str:
        return "mortal"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:  # type: ignore[override]  # pyarrow gives it lists
        self.fate.look()
        return self.base.get_file_info(paths)

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> list[pyarrow.fs.FileInfo]:
        self.fate.look()
        return self.base.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.fate.look()
        self.base.create_dir(path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self.fate.change(lambda: self.base.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self.fate.change(lambda: self.base.move(src, dest))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        self.fate.look()
        return self.base.open_input_stream(path)

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        return self.fate.change(lambda: self.base.open_output_stream(path))


MortalFiles.__abstractmethods__ = frozenset()  # what no sink needs


class Mute(Sink):
    """Commits, and cannot say what."""

    def writer(self, context: WriterContext) -> SinkWriter:
        raise AssertionError("made on slots only")

    def committer(self, context: CommitterContext) -> Committer | None:
        raise AssertionError("nothing is committed here")


class Loud(Sink):
    """Shows rows as they come."""

    def writer(self, context: WriterContext) -> SinkWriter:
        raise AssertionError("made on slots only")


def graph_of(sinks: dict[str, Sink]) -> JobGraph:
    names = list(sinks)
    return JobGraph(
        (
            Vertex(0, 1, SourceSpec("read", "read", NoRows()), ()),
            *(
                Vertex(i + 1, 1, None, (OperatorSpec(name, name, NeverRun(), sinks[name]),))
                for i, name in enumerate(names)
            ),
        ),
        tuple(Edge(i, 0, i + 1, Partitioning.FORWARD, SCHEMA) for i in range(len(names))),
        16,
    )


@dataclass
class Start:
    """One start of the job: rows counted up into every file sink."""

    world: World
    job_id: str
    opened: OpenedStorage
    row: int = 0
    newest: CheckpointMetadata | None = None
    next_id: int = field(init=False)
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        opened = self.opened.opened
        self.next_id = opened.next_checkpoint_id
        self.newest = opened.restore
        if opened.restore is not None:
            self.row = int(opened.restore.sources[0].position or b"0")
        self.writers = {
            uid: open_writer(sink, SCHEMA, self.loop, job_id=self.job_id, uid=uid)
            for uid, sink in self.world.files.items()
        }

    def commit(self) -> None:
        """What the newest checkpoint holds; as often as one likes."""
        for entry in self.newest.committables if self.newest else ():
            committer = committer_of(self.world.files[entry.uid], self.job_id)
            assert committer is not None
            committer.commit(entry.checkpoint_id, entry.items)

    def complete(self, rows: int, *, commit: bool = True) -> int:
        """A checkpoint behind so many more rows: its id."""
        for _ in range(rows):
            for writer in self.writers.values():
                writer.write(batch(self.row))
            self.row += 1
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        prepared_by = {uid: tuple(prepared(writer, checkpoint_id)) for uid, writer in self.writers.items()}
        vertices, edges = layout_of(self.world.graph)
        names = names_of(self.world.graph)
        metadata = CheckpointMetadata(
            job_name="job",
            job_id=self.job_id,
            checkpoint_id=checkpoint_id,
            epoch=self.opened.opened.epoch,
            attempt=0,
            created_ms=1,
            completed_ms=2,
            max_parallelism=16,
            vertices=vertices,
            edges=edges,
            operators=tuple(OperatorState(uid, uid, i, 1, (OperatorSnapshot(uid),)) for i, uid in enumerate(names)),
            sources=(SourcePosition("read", b"%d" % self.row, False, ()),),
            committables=tuple(
                Committables(checkpoint_id, uid, uid, items) for uid, items in prepared_by.items() if items
            ),
            state_bytes=0,
            files=(),
        )
        publish(self.world.storage, metadata)
        self.newest = metadata
        if commit:
            self.commit()
        return checkpoint_id


class World:
    """A checkpoint directory, and file sinks: `out` for this job alone, `shared` with another job's files in it."""

    def __init__(self, directory: Path, *, others: dict[str, Sink] | None = None, only: str | None = None) -> None:
        self.directory = directory
        self.fate = Fate()
        self.storage: MemoryStorage = MortalStorage(self.fate)
        self.elsewhere: dict[str, MemoryStorage] = {}
        filesystem = pyarrow.fs.PyFileSystem(MortalFiles(self.fate))  # type: ignore[abstract]  # it has what is called
        self.files = {
            name: FileSink(directory / name, format="jsonl", append=name == "shared", filesystem=filesystem)
            for name in ("out", "shared")
            if only in (None, name)
        }
        if "shared" in self.files:
            self.foreign(-1)
        self.graph = graph_of({**self.files, **(others or {})})
        self.starts = 0

    def foreign(self, row: int) -> None:
        """Another job, whose sink has the same uid, adds a row to `shared`."""
        sink = self.files["shared"]
        writer = open_writer(sink, SCHEMA, Loop(), job_id=f"foreign{-row}", uid="shared")
        writer.write(batch(row))
        committer = committer_of(sink, f"foreign{-row}")
        assert committer is not None
        committer.commit(900, prepared(writer, 900))

    def plan(
        self, restore: str | None, newer_output: NewerOutput | None = None, fresh: bool = False, resume: bool = False
    ) -> JobPlan:
        self.starts += 1
        config = JobConfig(name="job", checkpoint_dir=ROOT)
        return JobPlan(f"start{self.starts}", self.graph, b"", config, restore, False, newer_output, fresh, resume)

    def open(self, root: str) -> MemoryStorage:
        return self.storage if root == ROOT else self.elsewhere[root]

    def start(
        self, restore: str | None, newer_output: NewerOutput | None = None, fresh: bool = False, resume: bool = False
    ) -> Start:
        plan = self.plan(restore, newer_output, fresh, resume)
        check_start(plan, find_start(plan, self.open), self.open)
        started = Start(self, plan.job_id, open_checkpoints(plan, self.open))
        started.commit()
        return started

    def save(self, start: Start) -> str:
        """A savepoint of its newest checkpoint: its URL."""
        assert start.newest is not None
        url = f"memory://saved/{len(self.elsewhere)}"
        place = self.elsewhere[url] = MemoryStorage()
        place.create(SAVEPOINT, b"{}")
        write_savepoint(self.storage, start.newest, SavepointLocation(url, place))
        return url

    def rows(self, name: str = "out") -> list[int]:
        files = sorted((self.directory / name).glob("*.jsonl"))
        return sorted(json.loads(line)["n"] for file in files for line in file.read_text().splitlines())


def must_say(error: Exception, *texts: str) -> None:
    """One of these."""
    assert any(text in str(error) for text in texts), error


def committed(world: World, checkpoints: int = 5) -> Start:
    """A first start that has completed so many checkpoints, of two rows each."""
    start = world.start(None)
    for _ in range(checkpoints):
        start.complete(2)
    return start
