"""Tries mutated checkpoints, in a process that is limited: `python tests/mutated_checkpoints.py FIRST STOP [SECONDS]`.

Each is inspected, its state is read, and it is restored. Afterwards there must be a result, or an error that midstream raises on purpose: no other
exception, no signal, no loop without an end, and no more memory than a small checkpoint accounts for.
"""

from __future__ import annotations

import faulthandler
import io
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa

import checkpointed_jobs
from checkpoint_mutations import Mutant, mutate
from checkpointed_jobs import JOBS, MORE, ROWS
from in_memory import MemoryStorage
from midstream import Environment, MidstreamError, read_state
from midstream.cli.commands.inspect_checkpoint import inspect_checkpoint
from midstream.cli.output import print_answer
from midstream.engine.checkpoint.channel_state import Captured, store_channels
from midstream.engine.checkpoint.extents import files_of
from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    Committables,
    SourcePosition,
    decode_metadata,
    encode_metadata,
)
from midstream.engine.checkpoint.savepoint import copy_in
from midstream.engine.checkpoint.state_files import channel_file, state_file, store_parts
from midstream.engine.checkpoint.store import load
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.key_groups import key_group_range, key_groups
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.operators.source_api import Split
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.engine.worker.source_reader import SPLITS, SPLITS_SCHEMA
from midstream.inprocess.in_process_job import JobSnapshot
from midstream.runtime.storage.file_storage import FileStorage
from midstream.runtime.storage.stored_checkpoint import open_checkpoint
from midstream.testing import job

MEMORY_BYTES = 768 * 2**20
"""How much more than before the first mutant the process may take."""
TRIAL_S = 20
KEY_GROUPS = 16
ENGINE = str(Path(sys.modules[Environment.__module__].__file__ or "").parents[1])


def environment(name: str) -> Environment:
    env = Environment(name, parallelism=2, max_parallelism=KEY_GROUPS)
    JOBS[name](env)
    return env


class Base:
    """A job, and a checkpoint of it."""

    def __init__(self, name: str, *, has_splits: bool = False) -> None:
        self.name = name
        self.is_restored = not has_splits
        with job(environment(name), parallelism=2) as running:
            running.feed_all(dict.fromkeys(running._sources, ROWS), cut="whole")
            snapshot = running.snapshot()
            graph = running._engine.graph
        edges = [edge for edge in graph.edges if edge.partitioning.redistributable and edge.combiner is None]
        captured = [
            Captured(edge.id, 0, consumer, is_output, (_batch(edge, consumer), _batch(edge, consumer)))
            for edge in edges
            for consumer, is_output in ((0, False), (1, True))
        ]
        storage = MemoryStorage()
        channels, _ = store_channels(storage, captured, channel_file(0, 0, 1, 0, 0), 1, 0)
        metadata = msgspec.structs.replace(snapshot.metadata, epoch=1, channels=channels)
        self.now_us = snapshot.now_us
        subtasks = [subtask for op in metadata.operators for subtask in op.subtasks]
        if has_splits:
            metadata = _with_splits(metadata)
        metadata = msgspec.structs.replace(metadata, files=tuple(sorted(files_of(subtasks, channels))))
        encoded = encode_metadata(metadata)
        assert decode_metadata(encoded, "") == metadata
        self.mutant = Mutant(msgspec.msgpack.decode(encoded[28:]), dict(storage.files))

    def copy(self) -> Mutant:
        return Mutant(msgspec.msgpack.decode(msgspec.msgpack.encode(self.mutant.metadata)), dict(self.mutant.files))


def _batch(edge: Edge, consumer: int) -> pa.RecordBatch:
    """Return rows that may be in flight to a consumer."""
    names = {"other": "name", "began": "at"}
    rows = [{field.name: row[names.get(field.name, field.name)] for field in edge.schema} for row in ROWS[:6]]
    batch = pa.RecordBatch.from_pylist(rows, schema=edge.schema)
    if edge.partitioning is not Partitioning.KEYED:
        return batch
    groups, owned = key_groups(batch, edge.keys, KEY_GROUPS), key_group_range(consumer, 2, KEY_GROUPS)
    return batch.filter(pa.array((groups >= owned.start) & (groups < owned.stop)))


def _with_splits(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """Add what the source of a real job has in a checkpoint. Such a checkpoint is only inspected."""
    splits = [msgspec.msgpack.encode(Split(f"in/{n}.csv", b"payload", n)) for n in range(3)]
    part = StatePart(Redistribute.SPLIT, (Chunk("splits", pa.table({"split": splits}, schema=SPLITS_SCHEMA)),))
    parts = store_parts(MemoryStorage(), [{SPLITS: part}], {}, "", 2**20).parts[0]
    source, *others = metadata.operators
    subtasks = (msgspec.structs.replace(source.subtasks[0], parts=parts), *source.subtasks[1:])
    operators = (msgspec.structs.replace(source, subtasks=subtasks, finished=(1,)), *others)
    waiting = SourcePosition(source.uid, b"5", False, tuple(splits))
    committables = (Committables(1, "sink", "sink", (b"a", b"b")),)
    return msgspec.structs.replace(metadata, operators=operators, sources=(waiting,), committables=committables)


def in_files(mutant: Mutant) -> None:
    """Put the state of the metadata into files."""
    for operator in mutant.metadata["operators"]:
        for subtask, snapshot in enumerate(operator["subtasks"]):
            file, data = state_file(1, 0, 1, operator["vertex"], subtask), b""
            for part in snapshot["parts"]:
                for chunk in part["chunks"]:
                    chunk |= {"file": file, "offset": len(data)}
                    data += chunk.pop("inline")
            if data:
                mutant.files[file] = mutant.files.get(file, b"") + data
    mutant.metadata["files"] = sorted(mutant.files)


class Trials:
    def __init__(self) -> None:
        self.bases = [*map(Base, JOBS), Base("tables", has_splits=True)]
        self.outcomes: Counter[str] = Counter()

    def mutant(self, seed: int) -> tuple[Base, Mutant, Random]:
        random = Random(seed)
        base = random.choice(self.bases)
        mutant = base.copy()
        if random.random() < 0.3 and base.name != "windows":
            in_files(mutant)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            mutate(mutant, random)
        return base, mutant, random

    def try_one(self, seed: int) -> str:
        """Return what is wrong; "" if nothing is."""
        base, mutant, random = self.mutant(seed)
        with tempfile.TemporaryDirectory() as directory:
            mutant.write(Path(directory))
            wrong = [*self._try("inspect", self.inspect, directory, random.random() < 0.5)]
            wrong += self._try("state", self.state, directory)
            parallelism = random.choice((1, 2, 2, 2, 3))
            if base.is_restored:
                wrong += self._try("restore", self.restore, base, directory, parallelism, random.random() < 0.3)
        return "\n".join((f"seed {seed}, {base.name}:", *mutant.story, *wrong)) if wrong else ""

    def _try(self, what: str, work: Any, *arguments: Any) -> Iterator[str]:
        try:
            work(*arguments)
            self.outcomes[f"{what}: result"] += 1
        except MidstreamError as error:
            self.outcomes[f"{what}: {type(error).__name__}"] += 1
            if isinstance(error, InvariantError) or not str(error) or "MemoryError" in str(error):
                yield f"{what}: {traceback.format_exc()}"
        except Exception as error:  # noqa: BLE001 - any other is a finding
            if _is_of_a_function(error) or isinstance(error, RecursionError):
                self.outcomes[f"{what}: error of a function"] += 1
            else:
                yield f"{what}: {traceback.format_exc()}"

    def inspect(self, directory: str, json: bool) -> None:
        print_answer(inspect_checkpoint(directory), json, io.StringIO())

    def state(self, directory: str) -> None:
        """Read every state; the first that is refused is the result."""
        for state in open_checkpoint(directory).states:
            read_state(directory, state.uid, state.name).collect()

    def restore(self, base: Base, directory: str, parallelism: int, copies: bool) -> None:
        storage: Any = FileStorage(directory)
        metadata = load(storage, base.name, "latest")
        if copies:
            here = MemoryStorage()
            metadata = decode_metadata(encode_metadata(copy_in(storage, metadata, here, 1, 1)), "copy")
            storage = here
        snapshot = JobSnapshot(metadata, storage, base.now_us)
        with job(environment(base.name), parallelism=parallelism, restore=snapshot) as running:
            running.feed_all(dict.fromkeys(running._sources, MORE), cut="whole")
            running.snapshot()
            running.end()
            print(str(running.result())[:0], end="")


def _is_of_a_function(error: BaseException) -> bool:
    """Whether a function of the job raised it itself: a mutated value is still a value."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [file for file in files if file.startswith(ENGINE) or file == checkpointed_jobs.__file__]
    return bool(ours) and ours[-1] == checkpointed_jobs.__file__


def main(first: int, stop: int, seconds: float) -> None:
    faulthandler.enable()
    trials = Trials()
    for base in trials.bases:  # what is loaded lazily is loaded, and each of them is right
        with tempfile.TemporaryDirectory() as directory:
            base.mutant.write(Path(directory))
            trials.inspect(directory, False)
            trials.state(directory)
            if base.is_restored:
                trials.restore(base, directory, 2, base.name == "functions")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began_s = time.monotonic()
    for seed in range(first, stop):
        if seconds and time.monotonic() - began_s > seconds:
            break
        print(f"{seed} begins", flush=True)
        faulthandler.dump_traceback_later(TRIAL_S, exit=True)
        wrong = trials.try_one(seed)
        faulthandler.cancel_dump_traceback_later()
        if wrong:
            print(msgspec.json.encode([seed, wrong]).decode(), flush=True)
    print(msgspec.json.encode(trials.outcomes).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
