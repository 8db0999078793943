"""A sink that commits on slots: rows are stored in the job's checkpoint storage, and commits append them to a file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from midstream import Environment
from midstream.engine.core.arrow_types import to_list
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext


class Appending(Sink):
    """One file for each lane, below `place`. While there is a file `hold` in it, commits from its checkpoint on wait."""

    commits_on_slots = True

    def __init__(self, place: Path) -> None:
        self.place = place

    def writer(self, context: WriterContext) -> SinkWriter:
        return AppendingWriter(context)

    def lane(self, committable: bytes) -> int:
        lane: int = json.loads(committable)["subtask"]
        return lane

    def committer(self, context: CommitterContext) -> Committer:
        return AppendingCommitter(self, context)


class AppendingWriter(SinkWriter):
    def __init__(self, context: WriterContext) -> None:
        self.context = context
        self.rows: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += to_list(batch.column("n"))

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]]:
        rows, self.rows = self.rows, []
        context = self.context
        file = f"sinks/{context.uid}/{context.job_id}-{context.attempt}-{context.subtask}-{checkpoint_id}"

        def store() -> Sequence[bytes]:
            assert context.storage is not None
            context.storage.write(file, [json.dumps(rows).encode()])
            return [json.dumps({"file": file, "subtask": context.subtask}).encode()]

        return store


class AppendingCommitter(Committer):
    def __init__(self, sink: Appending, context: CommitterContext) -> None:
        self.sink = sink
        self.context = context
        self.note("open")

    def note(self, what: str, **more: Any) -> None:
        """One line of the book of all committers."""
        with (self.sink.place / "book").open("a") as book:
            book.write(json.dumps({"what": what, "pid": os.getpid(), **more}) + "\n")

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for committable in map(json.loads, committables):
            self.note("begin", lane=committable["subtask"], checkpoint=checkpoint_id)
            is_noted = False
            while waits(self.sink.place, checkpoint_id):
                if not is_noted:  # only here: the file may come between two looks at it
                    self.note("hold", lane=committable["subtask"], checkpoint=checkpoint_id)
                    is_noted = True
                if self.context.stopped.wait(0.02):
                    raise OSError("told to stop")
            assert self.context.storage is not None
            rows = json.loads(self.context.storage.read(committable["file"]))
            self.append(committable["subtask"], committable["file"], rows)
            self.note("end", lane=committable["subtask"], checkpoint=checkpoint_id)

    def append(self, lane: int, file: str, rows: list[int]) -> None:
        """Once for each file, whoever comes again: what another one has left half done is written anew."""
        target = self.sink.place / f"lane-{lane}"
        with (self.sink.place / f"lock-{lane}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = target.read_text().splitlines() if target.exists() else []
            if any(json.loads(line)["file"] == file for line in lines):
                return
            made = target.with_suffix(".new")
            made.write_text("\n".join([*lines, json.dumps({"file": file, "rows": rows})]) + "\n")
            os.replace(made, target)

    def abort(self, committables: Sequence[bytes]) -> None:
        assert self.context.storage is not None
        for committable in map(json.loads, committables):
            self.context.storage.delete(committable["file"])

    def close(self) -> None:
        self.note("close")


def hold(place: Path, *, from_checkpoint: int = 1) -> None:
    """Commits of this checkpoint and of later ones wait until the file is gone; both lanes of each have something."""
    place.mkdir(exist_ok=True)
    (place / "hold.new").write_text(str(from_checkpoint))
    os.replace(place / "hold.new", place / "hold")


def waits(place: Path, checkpoint_id: int) -> bool:
    try:
        return checkpoint_id >= int((place / "hold").read_text())
    except FileNotFoundError:
        return False


def rows_at(place: Path) -> list[int]:
    """All that is committed."""
    lines = [line for file in sorted(place.glob("lane-?")) for line in file.read_text().splitlines()]
    return sorted(n for line in lines for n in json.loads(line)["rows"])


def book_of(place: Path) -> list[dict[str, Any]]:
    book = place / "book"
    return [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []


def job(place: Path, checkpoints: Path, *, rows_per_s: float = 10_000) -> Environment:
    place.mkdir(exist_ok=True)
    env = Environment("appending", parallelism=2, checkpoint_dir=checkpoints, checkpoint_interval="200 ms")
    stream = env.generate(lambda i: {"n": i}, rows_per_s=rows_per_s).uid("numbers").rebalance()
    stream.sink(Appending(place)).uid("out").name("out")
    return env
