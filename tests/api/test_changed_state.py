"""`write_savepoint`: what a job finds there is what the tables had; or nothing is there, and the reason is named."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "engine" / "core"))
from test_values import KINDS, SCALAR_KEYS, fitting, same

import checkpointed_jobs
from effort import examples
from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    ConfigError,
    Environment,
    KeyedProcessFunction,
    ListState,
    MapState,
    MidstreamError,
    ReducingState,
    SchemaError,
    StorageError,
    ValueState,
    read_state,
    testing,
    write_savepoint,
)
from midstream.api import changed_state
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.engine.checkpoint.extents import files_of
from midstream.engine.checkpoint.metadata import CheckpointMetadata, Committables, encode_metadata
from midstream.engine.checkpoint.store import metadata_path
from midstream.engine.core.batches import is_held_by_polars
from midstream.engine.core.python_values import is_nan, to_array, to_python
from midstream.engine.core.schemas import as_type
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.inprocess.in_process_job import JobSnapshot
from midstream.inprocess.virtual_loop import MemoryStorage
from midstream.runtime.storage.file_storage import FileStorage, LocalStorage
from midstream.runtime.storage.stored_checkpoint import open_checkpoint

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
START = datetime(2024, 1, 1)


def saved(snapshot: JobSnapshot, directory: Path) -> str:
    """A snapshot of a job in this process, as a checkpoint in files."""
    snapshots = [subtask for operator in snapshot.metadata.operators for subtask in operator.subtasks]
    files = tuple(sorted(files_of(snapshots)))
    return stored(msgspec.structs.replace(snapshot.metadata, files=files, epoch=1), snapshot.storage, directory)


def stored(metadata: CheckpointMetadata, files: Any, directory: Path) -> str:
    storage = FileStorage(str(directory))
    for file in metadata.files:
        storage.write(file, [files.read(file)])
    storage.write(metadata_path(metadata.checkpoint_id), [encode_metadata(metadata)])
    return str(directory)


def loaded(path: str, now: datetime = START) -> JobSnapshot:
    """What is in files, for a job in this process. Everything is verified."""
    assert read_report(path).problems == ()
    opened, storage = open_checkpoint(path), MemoryStorage()
    for file in opened.metadata.files:
        storage.write(file, [opened.storage.read(file)])
    return JobSnapshot(opened.metadata, storage, (now.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1))


def every_state(path: str, *, uids: Sequence[str] | None = None) -> dict[tuple[str, str], pl.LazyFrame]:
    """All states that `write_savepoint` takes, as `read_state` returns them."""
    found = open_checkpoint(path).states
    return {
        (state.uid, state.name): read_state(path, state.uid, state.part)
        for state in found
        if state.kind and (uids is None or state.uid in uids)
    }


def chunk_ids(path: str, uid: str) -> set[str]:
    operators = open_checkpoint(path).metadata.operators
    (subtasks,) = [operator.subtasks for operator in operators if operator.uid == uid]
    return {chunk.id for subtask in subtasks for part in subtask.parts for chunk in part.chunks}


# ---- any contents, of any types ---------------------------------------------

HELD = KINDS.filter(is_held_by_polars)
MAP_KEYS = st.sampled_from([kind for kind in SCALAR_KEYS if is_held_by_polars(kind)])
KEYS: dict[str, tuple[pa.Schema, Any]] = {
    "one": (pa.schema([("k", pa.int64())]), st.tuples(st.integers(-5, 5))),
    "text": (pa.schema([("k", pa.large_string())]), st.tuples(st.text("ab", max_size=2))),
    "instant": (
        pa.schema([("k", pa.timestamp("ms", "UTC"))]),
        st.tuples(st.integers(0, 9).map(lambda hours: EPOCH + timedelta(hours=hours))),
    ),
    "two": (
        pa.schema([("k", pa.int32()), ("items", pa.large_string())]),
        st.tuples(st.integers(0, 2), st.text("ab", max_size=2)),
    ),
}


def program(keys: pa.Schema, kind: pa.DataType, map_key: pa.DataType, max_parallelism: int, parallelism: int) -> Any:
    class Keeper(KeyedProcessFunction):
        value = ValueState(kind)
        items = ListState(kind)
        pages = MapState(key=map_key, value=kind)
        k = ReducingState(max, kind)

        def process(self, row: Any, ctx: Any) -> Any:
            return None

        def on_timer(self, time: Any, ctx: Any) -> Any:
            return None

    env = Environment("kept", parallelism=parallelism, max_parallelism=max_parallelism)
    rows = env.from_collection([], schema=keys).uid("rows")
    rows.key_by(*keys.names).process(Keeper(), keys).uid("keeper").collect()
    return env


Contents = Mapping[str, dict[Any, Any]]
Timer = tuple[int, tuple[Any, ...]]


def table_of(keys: pa.Schema, rows: Sequence[tuple[Any, ...]], others: Mapping[str, pa.DataType]) -> pa.Table:
    """`rows`: the key, a tuple, then the values of the other columns."""
    columns = [pa.array([row[0][i] for row in rows], field.type) for i, field in enumerate(keys)]
    columns += [to_array([row[1 + i] for row in rows], kind) for i, kind in enumerate(others.values())]
    return pa.table(columns, names=[*keys.names, *others])


def tables(keys: pa.Schema, kind: pa.DataType, map_key: pa.DataType, contents: Contents, timers: list[Timer]) -> Any:
    clash = "items_" if "items" in keys.names else "items"
    lists = [(key, at, item) for key, items in contents["items"].items() for at, item in enumerate(items)]
    random.Random(0).shuffle(lists)  # their positions say what the order is
    pages = [(key, name, item) for key, of in contents["pages"].items() for name, item in of.items()]
    zoned = pa.timestamp("us", "UTC")
    timer_rows = [(key, EPOCH + timedelta(microseconds=at)) for at, key in timers]
    return {
        ("keeper", "value"): table_of(keys, list(contents["value"].items()), {"value": kind}),
        ("keeper", "items"): table_of(keys, lists, {"position": pa.int64(), clash: kind}),
        ("keeper", "pages"): table_of(keys, pages, {"map_key": map_key, "pages": kind}),
        ("keeper", "k"): table_of(keys, list(contents["k"].items()), {"k_": kind}),
        ("keeper", "timers:event"): table_of(keys, timer_rows, {"time": zoned}),
    }


def held_by(path: str, env: Environment, parallelism: int) -> tuple[dict[str, dict[Any, Any]], list[Timer]]:
    """What a job has that is restored from there."""
    contents: dict[str, dict[Any, Any]] = {}
    timers: list[Timer] = []
    with testing.job(env, parallelism=parallelism, restore=loaded(path)) as job:
        for operator in job.operators("keeper"):
            assert isinstance(operator, ProcessOperator)
            for name, entries in operator.contents().items():
                shown = {key if isinstance(key, tuple) else (key,): entry for key, entry in entries.items()}
                assert not contents.setdefault(name, {}).keys() & shown.keys(), "in two subtasks"
                contents[name].update(shown)
            timers += [
                (at, operator._encoding.shown(key)) for at, key in operator._timers.event.timers()
            ]
    return contents, sorted((at, key if isinstance(key, tuple) else (key,)) for at, key in timers)


def check_same(found: Contents, expected: Contents) -> None:
    for name, entries in expected.items():
        assert found[name].keys() == entries.keys(), name
        for key, entry in entries.items():
            assert same(found[name][key], entry), (name, key, found[name][key], entry)
            if name == "pages":
                assert list(map(repr, found[name][key])) == list(map(repr, entry)), "the order of a map"


@st.composite
def drawn_contents(draw: Any, keys: Any, kind: pa.DataType, map_key: pa.DataType) -> Contents:
    def values(of: pa.DataType, size: int = 3) -> list[Any]:
        """As they come back."""
        return to_python(to_array(draw(st.lists(fitting(of), max_size=size)), of))

    some = draw(st.lists(keys, unique=True, max_size=5))
    singles = dict(zip(some, values(kind, 5), strict=False))
    pages = {}
    for key in some:
        names = [name for name in dict.fromkeys(values(map_key)) if not is_nan(name)]
        found = dict(zip(names, values(kind), strict=False))
        pages |= {key: found} if found else {}
    return {
        "value": singles,
        "items": {key: items for key in some if (items := values(kind))},
        "pages": pages,
        "k": dict(reversed(singles.items())),
    }


@settings(max_examples=examples(150))
@given(data=st.data(), which=st.sampled_from(sorted(KEYS)), kind=HELD, map_key=MAP_KEYS)
def test_a_job_finds_what_the_tables_had(
    data: Any, which: str, kind: pa.DataType, map_key: pa.DataType, tmp_path_factory: Any
) -> None:
    """Bootstrapped, unchanged, edited, in other key groups, and at another parallelism."""
    keys, some_keys = KEYS[which]
    kind, map_key = as_type(kind, "test"), as_type(map_key, "test")
    contents = data.draw(drawn_contents(some_keys, kind, map_key))
    timers = sorted(data.draw(st.lists(st.tuples(st.integers(0, 3), some_keys), unique=True, max_size=4)))
    groups, others = data.draw(st.tuples(st.integers(3, 16), st.integers(3, 200)))
    first, second = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    folder, number = tmp_path_factory.mktemp("savepoints"), count()
    env = program(keys, kind, map_key, groups, first)

    begun = write_savepoint(folder / "begun", like=env, states=tables(keys, kind, map_key, contents, timers))
    found, found_timers = held_by(begun, env, second)
    check_same(found, contents)
    assert found_timers == timers

    def again(like: str, **changes: Any) -> str:
        return write_savepoint(folder / str(next(number)), like=like, **changes)

    unchanged = again(begun, states=every_state(begun))
    assert not chunk_ids(unchanged, "keeper") & chunk_ids(begun, "keeper")
    moved = again(unchanged, max_parallelism=others)
    both = again(begun, states=every_state(begun), max_parallelism=others)
    for path, key_groups in ((unchanged, groups), (moved, others), (both, others)):
        found, found_timers = held_by(path, program(keys, kind, map_key, key_groups, second), second)
        check_same(found, contents)
        assert found_timers == timers

    if contents["value"]:
        gone = data.draw(st.sampled_from(sorted(contents["value"], key=repr)))
        edited = {name: {key: of for key, of in entries.items() if key != gone} for name, entries in contents.items()}
        states = tables(keys, kind, map_key, edited, [])
        repaired = again(moved, states={name: states[name] for name in states if name[1] != "timers:event"})
        found, found_timers = held_by(repaired, program(keys, kind, map_key, others, second), second)
        check_same(found, edited)
        assert found_timers == timers, "what is not given stays"
