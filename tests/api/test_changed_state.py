"""`write_savepoint`: what a job finds there is what the tables had; or nothing is there, and the reason is named."""

from __future__ import annotations

import dataclasses
import random
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
import released_job
from effort import examples
from machine import limit_s
from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    ConfigError,
    Count,
    Environment,
    First,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    MidstreamError,
    ReducingState,
    SchemaError,
    StateTtl,
    StorageError,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    read_state,
    testing,
    tumbling,
    write_savepoint,
)
from midstream import (
    count as count_of,
)
from midstream.api import changed_state
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.engine.checkpoint import changed_savepoint
from midstream.engine.checkpoint.extents import files_of
from midstream.engine.checkpoint.metadata import CheckpointMetadata, Committables, encode_metadata
from midstream.engine.checkpoint.other_key_groups import progress_of, regrouped
from midstream.engine.checkpoint.store import metadata_path
from midstream.engine.checkpoint.stored_states import StoredState
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import is_held_by_polars
from midstream.engine.core.python_values import ValueMisfit, is_nan, to_array, to_python
from midstream.engine.core.schemas import as_type
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.protocol.messages import ChannelState
from midstream.engine.state import columnar, table_runs
from midstream.inprocess.in_process_job import JobSnapshot
from midstream.inprocess.virtual_loop import MemoryStorage
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.storage.file_storage import FileStorage, LocalStorage
from midstream.runtime.storage.stored_checkpoint import open_checkpoint
from waiting import until

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
        if isinstance(state, StoredState) and state.kind and (uids is None or state.uid in uids)
    }


def chunk_ids(path: str, uid: str) -> set[str]:
    operators = open_checkpoint(path).metadata.operators
    (subtasks,) = [operator.subtasks for operator in operators if operator.uid == uid]
    return {chunk.id for subtask in subtasks for part in subtask.parts for chunk in part.chunks}


# ---- any contents, of any types ---------------------------------------------

HELD = KINDS.filter(
    lambda kind: (
        is_held_by_polars(kind) and "null" not in str(kind) and (kind == pa.date64() or "date64" not in str(kind))
    )
)
"""But for dates in milliseconds in lists of a fixed size and in maps: polars has timestamps in their place."""
MAP_KEYS = st.sampled_from([kind for kind in SCALAR_KEYS if is_held_by_polars(kind)])
KEYS: dict[str, tuple[pa.Schema, Any]] = {
    "one": (pa.schema([("k", pa.int64())]), st.tuples(st.integers(-5, 5))),
    "text": (pa.schema([("k", pa.large_string())]), st.tuples(st.text("ab", max_size=2))),
    "instant": (
        pa.schema([("k", pa.timestamp("ms", "UTC"))]),
        st.tuples(st.integers(0, 9).map(lambda hours: EPOCH + timedelta(hours=hours))),
    ),
    "two": (
        schema_of([("k", pa.int32()), ("items", pa.large_string())]),
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
            timers += [(at, operator._encoding.shown(key)) for at, key in operator._timers.event.timers()]
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
        """As they come back, those that fit."""
        found = []
        for value in draw(st.lists(fitting(of), max_size=size)):
            with suppress(ValueMisfit):
                found += to_python(to_array([value], of))
        return found

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


@settings(max_examples=examples(60))
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


# ---- jobs of all kinds -------------------------------------------------------


def environment(name: str, max_parallelism: int = 16, inline_bytes: int = 0) -> Environment:
    env = Environment(name, parallelism=2, max_parallelism=max_parallelism)
    env.program.config = msgspec.structs.replace(env.program.config, inline_bytes=inline_bytes)
    checkpointed_jobs.JOBS[name](env)
    return env


def continued(env: Environment, snapshot: JobSnapshot, parallelism: int) -> list[str]:
    """What a restored job emits for more rows, and at the end."""
    with testing.job(env, parallelism=parallelism, restore=snapshot) as job:
        job.feed_all(dict.fromkeys(job._sources, checkpointed_jobs.MORE), cut="whole").end()
        return sorted(str((name, row)) for name, rows in job.result().tables().items() for row in rows.to_pylist())


@pytest.mark.parametrize("inline_bytes", [0, 2**16], ids=["in files", "in the metadata"])
@pytest.mark.parametrize("name", checkpointed_jobs.JOBS)
def test_jobs_go_on_the_same_from_unchanged_states_and_in_other_key_groups(
    name: str, inline_bytes: int, tmp_path: Path
) -> None:
    with testing.job(environment(name, inline_bytes=inline_bytes), parallelism=2) as job:
        job.feed_all(dict.fromkeys(job._sources, checkpointed_jobs.ROWS), cut="whole")
        snapshot = job.snapshot()
    now = datetime.fromtimestamp(snapshot.now_us / 1e6, UTC).replace(tzinfo=None)
    like = saved(snapshot, tmp_path / "like")
    assert bool(open_checkpoint(like).metadata.files) is (inline_bytes == 0)
    expected = continued(environment(name), snapshot, 2)
    assert expected
    states = every_state(like, uids=("everything", "totals", "allowed"))
    assert bool(states) is (name in ("functions", "tables", "broadcasts"))
    same_again = write_savepoint(tmp_path / "again", like=like, states=states)
    assert continued(environment(name), loaded(same_again, now), 2) == expected
    for groups in (3, 200):
        moved = write_savepoint(tmp_path / f"of {groups}", like=same_again, max_parallelism=groups)
        assert read_report(moved).max_parallelism == groups
        for parallelism in (2, 3):
            assert continued(environment(name, groups), loaded(moved, now), parallelism) == expected
        back = write_savepoint(
            tmp_path / f"{groups} back", like=moved, max_parallelism=16, states=every_state(moved, uids=("everything",))
        )
        assert continued(environment(name), loaded(back, now), 2) == expected


def other_operators(max_parallelism: int) -> Environment:
    """Operators with state that the jobs above lack."""
    env = Environment("others", parallelism=2, max_parallelism=max_parallelism)
    rows = checkpointed_jobs._rows(env, "rows")
    keyed = rows.key_by("k")
    keyed.aggregate(n=Count(), s=Sum("x")).uid("running").collect()
    keyed.aggregate(n=Count(), every="10 s").uid("periodic").collect()
    keyed.window(count_of(3)).aggregate(n=Count(), f=First("name")).uid("counted").collect()
    keyed.sort_by_time().uid("sorted").collect()
    rows.drop_duplicates("k", "name").uid("firsts").collect()
    rows.drop_duplicates("name", within="1 min").uid("apart").collect()
    rows.window_all(tumbling("30 s")).aggregate(n=Count()).uid("all").collect()
    rows.select("k").distinct().uid("distinct").collect()
    rows.join_asof(checkpointed_jobs._rows(env, "right").select("k", "at", y="x"), on="k").uid("asof").collect()
    return env


def test_state_of_every_operator_can_be_in_other_key_groups(tmp_path: Path) -> None:
    with testing.job(other_operators(16), parallelism=2) as job:
        job.feed_all(dict.fromkeys(job._sources, checkpointed_jobs.ROWS), cut="whole")
        snapshot = job.snapshot()
    expected = continued(other_operators(16), snapshot, 2)
    like = saved(snapshot, tmp_path / "like")
    uids = {"running", "periodic", "counted", "sorted", "firsts", "apart", "all", "distinct", "asof"}
    assert {state.uid for state in open_checkpoint(like).states} >= uids
    for groups in (5, 77):
        moved = loaded(write_savepoint(tmp_path / str(groups), like=like, max_parallelism=groups))
        moved = dataclasses.replace(moved, now_us=snapshot.now_us)
        assert continued(other_operators(groups), moved, 3) == expected
    tables = every_state(like, uids=("sorted", "firsts", "apart", "distinct", "asof"))
    assert len(tables) >= 5
    again = dataclasses.replace(
        loaded(write_savepoint(tmp_path / "again", like=like, states=tables)), now_us=snapshot.now_us
    )
    assert continued(other_operators(16), again, 2) == expected
    for uid, name in (("running", "parts"), ("periodic", "parts"), ("counted", "parts")):
        with pytest.raises(ConfigError, match=f"the rows of state '{name}' depend on one another"):
            write_savepoint(tmp_path / "no", like=like, states={(uid, name): read_state(like, uid, name)})


def test_states_that_a_release_has_stored_are_written_unchanged(tmp_path: Path) -> None:
    with zipfile.ZipFile(released_job.FOLDER / "0.1.0.zip") as archive:
        archive.extractall(tmp_path / "job")
    opened = open_checkpoint(str(tmp_path / "job" / "state"))
    with pytest.raises(ConfigError, match="this checkpoint has rows in flight"):
        write_savepoint(tmp_path / "no", like=opened.path)
    at_rest = msgspec.structs.replace(opened.metadata, channels=(), committables=())
    like = stored(at_rest, opened.storage, tmp_path / "like")
    states = every_state(like, uids=("keyed", "tables", "ruled"))
    assert len(states) >= sum(len(released_job.STATE[uid]) for uid in ("keyed", "tables", "ruled"))
    moved = write_savepoint(tmp_path / "moved", like=like, states=states, max_parallelism=50)
    for (uid, name), rows in states.items():
        found = read_state(moved, uid, name).collect()
        assert sorted(map(str, found.rows())) == sorted(map(str, rows.collect().rows()))


# ---- what is refused ---------------------------------------------------------


class Keeper(KeyedProcessFunction):
    number = ValueState(pa.int32())
    thing = ValueState()
    items = ListState(str)
    pages = MapState(key=float, value=datetime)
    things = MapState(value=int)

    def process(self, row: Any, ctx: Any) -> Any:
        self.number.value = 1
        self.thing.value = (1, 2)
        self.things["a", 1] = 2

    def on_timer(self, time: Any, ctx: Any) -> Any:
        pass


class Ruled(BroadcastProcessFunction):
    rules = BroadcastState(key=str, value=int)

    def process(self, row: Any, ctx: Any) -> Any:
        return None

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        self.rules[row["k"]] = 1


def small_job() -> Environment:
    env = Environment("small", parallelism=2, max_parallelism=8)
    rows = env.from_collection([{"k": "a"}]).uid("rows")
    rows.key_by("k").process(Keeper(), {"k": str}).uid("keeper").collect()
    rows.connect(rows.broadcast()).process(Ruled(), {"k": str}).uid("ruled").collect()
    return env


@pytest.fixture
def like(tmp_path: Path) -> str:
    with testing.job(small_job(), parallelism=2) as job:
        return saved(job.feed({"k": "a"}).snapshot(), tmp_path / "like")


K = {"k": ["a", "b"]}
LATER = pa.array([2**62, 0], pa.int64()).cast(pa.timestamp("us"))
REFUSED: list[tuple[str, Any, str]] = [
    (
        "number",
        {"k": ["a"]},
        r"has no column 'number'. The columns of state 'number' of operator 'keeper' are k large_string",
    ),
    ("number", {**K, "number": [1, 2], "x": [1, 2]}, "has a column 'x', which this state has not"),
    ("number", {**K, "number": [1, 2**40]}, r"column 'number', row 1, value 1099511627776: int64 does not fit int32"),
    ("number", {**K, "number": [1.0, 2.5]}, r"column 'number': double does not fit int32; state 'number' of operator"),
    ("number", {**K, "number": ["1", "2"]}, "column 'number': large_string does not fit int32"),
    ("number", {"k": ["a", None], "number": [1, 2]}, r"key column 'k' is null in row 1, \{'k': None, 'number': 2\}"),
    (
        "number",
        {"k": ["a", "b", "a"], "number": [1, 2, 3]},
        r"2 rows have \{'k': 'a'\} \(rows 0, 2\), and each key has",
    ),
    ("number", 7, "int is not a table; give a DataFrame of polars, pandas or Spark, or an Arrow Table"),
    ("items", {**K, "position": [0, None], "items": ["x", "y"]}, "column 'position' is null in row 1"),
    ("items", {**K, "position": [0, 1], "items": ["x", "y"]}, r"list of k='b' has 1 item at positions from 1 to 1"),
    (
        "items",
        {"k": ["a", "a"], "position": [0, 2], "items": ["x", "y"]},
        r"has 2 items at positions from 0 to 2; .* number",
    ),
    ("items", {"k": ["a", "a"], "position": [0, 0], "items": ["x", "y"]}, "each position in a list has one row"),
    ("pages", {"k": ["a", "a"], "map_key": [0.0, -0.0], "pages": [None, None]}, "each key of a map has one row"),
    (
        "pages",
        {**K, "map_key": [1.0, float("nan")], "pages": [None, None]},
        "row 1: NaN as a key of the map equals nothing",
    ),
    ("pages", {**K, "map_key": [1.0, 2.0], "pages": LATER}, "column 'pages', .* value in row 0 that Python cannot"),
    ("thing", {**K, "thing": [1, 2]}, "are pickled, since the state has no type, .* the table has int64. To write"),
    ("thing", {**K, "thing": [b"a", b"b"]}, "column 'thing', row 0: these bytes are none that the state has"),
    ("thing", {**K, "thing": [None, b"b"]}, "column 'thing' is null in row 0"),
    ("thing", {**K, "thing": [None, None]}, "column 'thing' is null in row 0"),
    ("things", {**K, "map_key": [b"x", b"y"], "things": [1, 2]}, "column 'map_key', row 0: these bytes are none that"),
    (
        "timers:event",
        {**K, "time": [START, START]},
        r"column 'time': timestamp\[us\] does not fit .* which zone is meant",
    ),
    ("timers:event", {"k": ["a", "a"], "time": [EPOCH, EPOCH]}, "a timer is set once for a key and a time"),
    (
        "nope",
        K,
        "operator 'keeper' has no state 'nope'; it has 'number', 'thing', 'items', 'pages', 'things', 'timers:event'",
    ),
]


@pytest.mark.parametrize(("name", "table", "message"), REFUSED)
def test_a_table_that_does_not_fit_is_refused_with_its_place(
    name: str, table: Any, message: str, like: str, tmp_path: Path
) -> None:
    given = pl.DataFrame(table, strict=False) if isinstance(table, dict) else table
    with pytest.raises(MidstreamError, match=message) as raised:
        write_savepoint(tmp_path / "new", like=like, states={("keeper", name): given})
    assert str(raised.value).startswith(f"states[('keeper', '{name}')]: ")
    assert not (tmp_path / "new").exists()


def test_types_that_hold_the_same_values_are_taken(like: str, tmp_path: Path) -> None:
    """Of polars, lazy or not, of Arrow and of pandas, in any order of columns."""
    rows: dict[str, Any] = {"number": [1, None], "k": ["a", "b"]}
    categories = pl.DataFrame(rows).with_columns(pl.col("k").cast(pl.Categorical))
    forms = [pl.DataFrame(rows), pl.LazyFrame(rows), pa.table(rows), pa.RecordBatch.from_pydict(rows), categories]
    forms.append(pl.DataFrame({"k": ["a", "b"], "number": [1, None]}).to_pandas(use_pyarrow_extension_array=True))
    for number, form in enumerate(forms):
        path = write_savepoint(tmp_path / str(number), like=like, states={("keeper", "number"): form})
        found = read_state(path, "keeper", "number").collect().sort("k")
        assert found.rows() == [("a", 1), ("b", None)] and found.schema["number"] == pl.Int32


def test_an_empty_table_empties_a_state_and_every_subtask_gets_a_broadcast_state(like: str, tmp_path: Path) -> None:
    states = {
        ("keeper", "number"): pl.DataFrame({"k": [], "number": []}),
        ("keeper", "things"): pl.DataFrame({"k": [], "map_key": [], "things": []}),
        ("ruled", "rules"): pl.DataFrame({"map_key": ["x", "y"], "rules": [3, 4]}),
    }
    path = write_savepoint(tmp_path / "new", like=like, states=states)
    with pytest.raises(ConfigError, match="has no state 'number' there"):
        read_state(path, "keeper", "number")
    with testing.job(small_job(), parallelism=3, restore=loaded(path)) as job:
        assert job.state("keeper")["number"] == {} and job.state("keeper")["thing"] == {"a": (1, 2)}
        for operator in job.operators("ruled"):
            assert isinstance(operator, ProcessOperator)
            assert operator.contents()["rules"] == {"x": 3, "y": 4}


def test_a_job_that_has_never_run_begins_with_history_of_other_types(tmp_path: Path) -> None:
    def program(**states: Any) -> Environment:
        env = Environment("history", max_parallelism=8)
        function: Any = type("Old", (KeyedProcessFunction,), {**states, "process": lambda self, row, ctx: None})
        rows = env.from_collection([{"k": "a"}]).uid("rows")
        rows.key_by("k").process(function(), {"k": str}).uid("f").collect()
        return env

    env = program(number=ValueState(pa.int32()), names=MapState(key=int, value=int))
    numbers, names = pl.DataFrame({"k": ["a"], "number": [1]}), pl.DataFrame({"k": ["a"], "map_key": [1], "names": [2]})
    states = {("f", "number"): numbers, ("f", "names"): names}
    path = write_savepoint(tmp_path / "new", like=env, states=states)
    changed = program(number=ValueState(int), words=MapState(key=int, value=str, was="names", migrate=str))
    with testing.job(changed, restore=loaded(path)) as job:
        assert job.state("f") == {"number": {"a": 1}, "words": {"a": {1: "2"}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"states": {("nope", "number"): pl.DataFrame()}},
            "has no operator with the uid 'nope'; it has 'rows', 'keeper'",
        ),
        ({"states": {"keeper": pl.DataFrame()}}, "'keeper' does not name a state; write"),
        ({"states": [("keeper", "number")]}, r"states is a dict; write \{\(uid, name\): table\}"),
        ({"drop": "keeper"}, r"write drop=\['keeper'\]"),
        ({"drop": ["nope"]}, "no operator with the uid 'nope' has state there; with state: 'keeper', 'ruled'"),
        ({"max_parallelism": 1}, "max_parallelism=1 is less than the parallelism of"),
        ({"max_parallelism": 0}, "max_parallelism=0 is not from 1 to 32768"),
        ({"like": 7}, "like is a path such as 'saved/orders', not 7"),
    ],
)
def test_arguments_that_contradict_the_checkpoint_are_refused(
    arguments: dict[str, Any], message: str, like: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_savepoint(tmp_path / "new", **{"like": like, **arguments})
    assert not (tmp_path / "new").exists()


def test_what_is_dropped_and_replaced_is_refused_and_so_is_a_state_with_two_names(like: str, tmp_path: Path) -> None:
    rows = read_state(like, "keeper", "number")
    with pytest.raises(ConfigError, match="operator 'keeper' is dropped too"):
        write_savepoint(tmp_path / "new", like=like, states={("keeper", "number"): rows}, drop=["keeper"])
    with pytest.raises(ConfigError, match="this state is given twice, under two of its names"):
        states = {("keeper", "number"): rows, ("keeper", "value:number"): rows}
        write_savepoint(tmp_path / "new", like=like, states=states)


def test_a_dropped_operator_begins_without_state(like: str, tmp_path: Path) -> None:
    path = write_savepoint(tmp_path / "new", like=like, drop=["keeper"])
    assert {state.uid for state in open_checkpoint(path).states} == {"ruled"}
    with testing.job(small_job(), parallelism=2, restore=loaded(path)) as job:
        assert job.state("keeper")["number"] == {}


def test_rows_in_flight_and_output_to_commit_are_refused(like: str, tmp_path: Path) -> None:
    metadata = open_checkpoint(like).metadata
    pending = (Committables(1, "keeper", "keeper", (b"file",)),)
    flying = (ChannelState(0, 0, 0, False, ()),)
    for number, (changes, what) in enumerate(
        [({"committables": pending}, "output to commit"), ({"channels": flying}, "rows in flight")]
    ):
        place = stored(msgspec.structs.replace(metadata, **changes), MemoryStorage(), tmp_path / str(number))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"this checkpoint has {what}, .* make a savepoint of the job"):
            write_savepoint(tmp_path / "new", like=place)


def test_operators_that_had_finished_are_refused(like: str, tmp_path: Path) -> None:
    metadata = open_checkpoint(like).metadata
    for finished, what in (((0,), "some"), ((0, 1), "all")):
        operators = tuple(
            msgspec.structs.replace(operator, finished=finished) if operator.uid == "keeper" else operator
            for operator in metadata.operators
        )
        place = stored(msgspec.structs.replace(metadata, operators=operators), MemoryStorage(), tmp_path / what)
        with pytest.raises(ConfigError, match=f"{what} subtasks of operator 'keeper' had finished"):
            write_savepoint(tmp_path / "new", like=place, states={("keeper", "number"): pl.DataFrame()})
    with pytest.raises(ConfigError, match=r"some subtasks of operator 'keeper' had finished, .* must remain as it is"):
        write_savepoint(tmp_path / "new", like=str(tmp_path / "some"), max_parallelism=20)
    write_savepoint(tmp_path / "new", like=str(tmp_path / "all"), max_parallelism=20)


def test_event_time_that_differs_among_keys_cannot_be_divided_by_other_groups() -> None:
    schema = pa.schema([("__key_group", pa.int32()), ("watermark", pa.int64())])
    even = pa.table([[0, 1, 2], [7, 7, 7]], schema=schema)
    assert progress_of([even.slice(0, 1), even.slice(1)], 3, 5, "w").column(1).to_pylist() == [7] * 5
    for uneven in (even.slice(1), pa.table([[0, 1, 2], [7, 7, 8]], schema=schema)):
        with pytest.raises(ConfigError, match="has not reached the same point for all keys"):
            progress_of([uneven], 3, 5, "w")


def test_rows_that_do_not_show_their_keys_cannot_be_divided_by_other_groups() -> None:
    table = pa.table({"__key_group": pa.array([3], pa.int32()), "k": [1], "x": [1.5]})
    for keys, names in ((["k"], "k"), (["other"], "other"), (["x"], "x"), ([], "of any key")):
        with pytest.raises(ConfigError, match=f"do not follow from the columns {names}, so it cannot be divided"):
            regrouped(table, keys, 2**15, 8, "w")


# ---- places and failures -----------------------------------------------------


def test_a_place_that_is_taken_or_belongs_to_a_job_is_refused(like: str, tmp_path: Path) -> None:
    write_savepoint(tmp_path / "new", like=like)
    for place, message in ((tmp_path / "new", "the place is taken"), (Path(like) / "new", "in the job's checkpoint")):
        with pytest.raises(StorageError, match=message):
            write_savepoint(place, like=like)
    below = write_savepoint(Path(like) / "savepoints" / "1", like=like)
    assert open_checkpoint(below).states


class Killed(BaseException):
    """The process ends."""


class Mortal(LocalStorage):
    """Dies at one of its writes, of which a part is done. `left`: the writes until then."""

    left = 0

    def write(self, path: str, parts: Any) -> None:
        Mortal.left -= 1
        if Mortal.left < 0:
            raise Killed
        super().write(path, parts)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        Mortal.left -= 1
        if Mortal.left < 0:
            raise Killed
        return super().create(path, data, durable)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_failure_at_any_write_leaves_no_savepoint(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves what it has written; one that fails removes it."""
    with testing.job(environment("functions"), parallelism=2) as job:
        job.feed_all(dict.fromkeys(job._sources, checkpointed_jobs.ROWS), cut="whole")
        like = saved(job.snapshot(), tmp_path / "like")
    states = {("everything", "number"): read_state(like, "everything", "number")}
    monkeypatch.setattr(changed_state, "FileStorage", Mortal)
    monkeypatch.setattr(changed_savepoint, "inline_bytes_max", lambda requested_bytes, tasks: 0)
    if is_killed:
        monkeypatch.setattr(changed_state, "discard", lambda location: None)
    for writes in count():
        Mortal.left = writes
        place = tmp_path / f"after {writes}"
        try:
            write_savepoint(place, like=like, states=states)
        except Killed:
            pass
        else:
            assert loaded(str(place))
            break
        if not place.exists() or not any(place.iterdir()):
            assert not is_killed or writes == 0
            continue
        assert is_killed
        with pytest.raises(StorageError, match="a savepoint was begun here and never completed"):
            read_report(str(place))
        Mortal.left = 1000
        with pytest.raises(StorageError, match="the place is taken"):
            write_savepoint(place, like=like)
    assert writes == 5, "the claim, the files of two subtasks, that of the new state, the metadata"


def test_a_savepoint_that_reads_back_otherwise_is_not_completed(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lying(LocalStorage):
        def read_range(self, path: str, offset: int, length: int) -> bytes:
            return super().read_range(path, offset, length)[:-1] + b"?"

    monkeypatch.setattr(changed_state, "FileStorage", Lying)
    rows = pl.DataFrame({"k": [str(n) for n in range(50_000)], "number": range(50_000)})
    with pytest.raises(StorageError, match="its checksum is wrong"):
        write_savepoint(tmp_path / "new", like=like, states={("keeper", "number"): rows})
    assert not any((tmp_path / "new").iterdir())


# ---- whole jobs --------------------------------------------------------------


class Totals(KeyedProcessFunction):
    total = ValueState(int, default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.total.value += 1
        return {"k": ctx.key, "total": self.total.value}


def totals(directory: Path, rows_per_s: float | None) -> Environment:
    env = Environment("totals", parallelism=2, checkpoint_dir=directory / "state", checkpoint_interval="200 ms")
    rows = env.generate(lambda i: {"k": i % 5}, count=20_000, splits=1, rows_per_s=rows_per_s).uid("rows")
    made = rows.key_by("k").process(Totals(), {"k": int, "total": int}).uid("totals")
    made.write_jsonl(directory / "out").uid("out")
    return env


def written(directory: Path) -> list[tuple[int, int]]:
    return sorted(pl.concat(map(pl.read_ndjson, (directory / "out").glob("*.jsonl"))).select("k", "total").rows())


@pytest.mark.systems
def test_an_entry_is_set_right_while_a_job_is_stopped_and_each_row_is_there_once(
    running: list[Job], tmp_path: Path
) -> None:
    job = totals(tmp_path, 4_000).start(slots=ProcessSlots())
    running.append(job)
    until("some rows", lambda: job.status().rows_read > 1_000)
    path = job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    assert path is not None

    found = read_state(path, "totals", "total").collect()
    assert set(found["k"]) == set(range(5))
    right = found.with_columns(total=pl.when(pl.col("k") == 3).then(1_000_000).otherwise("total"))
    repaired = write_savepoint(tmp_path / "right", like=path, states={("totals", "total"): right})

    job = totals(tmp_path, None).start(slots=ProcessSlots(), restore_from=repaired)
    running.append(job)
    assert job.wait(limit_s(60)).state == "finished"
    before = dict(found.rows())
    expected = [(k, n) for k in range(5) if k != 3 for n in range(1, 4_001)]
    expected += [(3, n) for n in range(1, before[3] + 1)]
    expected += [(3, 1_000_000 + n) for n in range(1, 4_001 - before[3])]
    assert written(tmp_path) == sorted(expected)


@pytest.mark.systems
def test_a_job_that_has_never_run_begins_with_its_history(running: list[Job], tmp_path: Path) -> None:
    env = totals(tmp_path, None)
    history = pl.DataFrame({"k": [1, 2], "total": [100, 200]})
    begin = write_savepoint(tmp_path / "begin", like=env, states={("totals", "total"): history})
    job = env.start(slots=ProcessSlots(), restore_from=begin)
    running.append(job)
    assert job.wait(limit_s(60)).state == "finished"
    first = {0: 0, 1: 100, 2: 200, 3: 0, 4: 0}
    assert written(tmp_path) == sorted((k, first[k] + n) for k in range(5) for n in range(1, 4_001))


def test_state_that_expires_keeps_the_times_of_its_entries_and_is_renewed_without_them(tmp_path: Path) -> None:
    class Expiring(KeyedProcessFunction):
        value = ValueState(int, ttl=StateTtl("1 h", by="clock"))
        pages: MapState[int, int] = MapState(key=int, value=int, ttl=StateTtl("1 h", by="clock"))

        def process(self, row: Any, ctx: Any) -> None:
            self.value.value = self.pages[row["n"]] = row["n"]

    env = Environment("expiring")
    rows = env.from_collection([{"k": 1, "n": 1}], schema={"k": int, "n": int}).uid("rows")
    stream = rows.key_by("k").process(Expiring(), {"k": int}).uid("f")
    with testing.job(stream) as job:
        job.feed("rows", [{"k": 1, "n": 1}, {"k": 2, "n": 2}])
        job.advance_processing_time("40 min")
        job.feed("rows", [{"k": 1, "n": 3}])
        like = saved(job.snapshot(), tmp_path / "like")
        now = job.now.replace(tzinfo=None)
    values, pages = (read_state(like, "f", name).collect() for name in ("value", "pages"))
    assert values.columns == ["k", "value", "written_at"] and pages.columns == ["k", "map_key", "pages", "written_at"]
    assert (values["written_at"].max() - values["written_at"].min()) == timedelta(minutes=40)  # type: ignore[operator]
    kept, renewed = tmp_path / "kept", tmp_path / "renewed"
    write_savepoint(str(kept), like=like, states={("f", "value"): values, ("f", "pages"): pages})
    write_savepoint(str(renewed), like=like, states={("f", "value"): values.drop("written_at")})
    for path, living in ((kept, {1: 3}), (renewed, {1: 3, 2: 2})):
        with testing.job(stream, restore=loaded(str(path), now)) as job:
            assert job.state("f") == {"value": {1: 3, 2: 2}, "pages": {1: {1: 1, 3: 3}, 2: {2: 2}}}
            job.advance_processing_time("30 min")
            assert job.state("f") == {"value": living, "pages": {1: {3: 3}}}
            job.advance_processing_time("40 min")
            assert job.state("f") == {"value": {}, "pages": {}}


class Items(KeyedProcessFunction):
    items: ListState[int] = ListState(int, ttl="10 s")
    pages: MapState[int, int] = MapState(key=int, value=int, ttl="10 s")

    def process(self, row: Any, ctx: Any) -> Any:
        found = {"k": ctx.key, "found": [*self.items], "names": [*self.pages]}
        if row["n"]:
            self.items.append(row["n"])
            self.pages[row["n"]] = 0
        return found


ITEMS = {"k": int, "found": list[int], "names": list[int]}


def at_s(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.fixture
def items() -> Any:
    env = Environment("items", max_parallelism=8)
    rows = env.from_collection([], schema={"k": int, "n": int, "at": datetime}).uid("rows")
    return rows.with_watermarks("at", WatermarkStrategy.bounded(0)).key_by("k").process(Items(), ITEMS).uid("f")


@pytest.fixture
def like_items(items: Any, tmp_path: Path) -> str:
    """Two keys, with three items and entries each, of 0, 3 and 6 seconds."""
    with testing.job(items) as job:
        rows = [{"k": k, "n": n, "at": at_s(3 * n - 3)} for n in (1, 2, 3) for k in (1, 2)]
        return saved(job.feed(rows, cut="whole").snapshot(), tmp_path / "like")


def test_what_expires_does_so_at_its_time_in_whatever_order_its_rows_are(
    items: Any, like_items: str, tmp_path: Path
) -> None:
    written = {("f", name): read_state(like_items, "f", name).collect() for name in ("items", "pages")}
    renewed = pl.when(map_key=2).then(None).otherwise("written_at").alias("written_at")
    for number, (states, last) in enumerate(
        (
            ({name: table.reverse() for name, table in written.items()}, []),
            (
                {("f", "pages"): written["f", "pages"].with_columns(renewed).sample(fraction=1, shuffle=True, seed=1)},
                [2],
            ),
        )
    ):
        path = write_savepoint(tmp_path / str(number), like=like_items, states=states)
        with testing.job(items, restore=loaded(path)) as job:
            found = [row["names"] for row in job.feed([{"k": 1, "n": 0, "at": at_s(s)} for s in (11, 14, 17)]).take()]
            assert [sorted(each) for each in found] == [[2, 3], sorted({3, *last}), last]
            job.feed({"k": 1, "n": 0, "at": at_s(30)})
            assert job.take() == [{"k": 1, "found": [], "names": []}]


@pytest.mark.parametrize("wrong", [None, EPOCH])
def test_items_of_a_list_are_not_older_than_those_before_them(
    wrong: datetime | None, like_items: str, tmp_path: Path
) -> None:
    table = read_state(like_items, "f", "items").collect().sort("k", "position").with_row_index("row")
    is_wrong = pl.col("row") == 4
    changed = table.with_columns(pl.when(is_wrong).then(wrong).otherwise("written_at").alias("written_at")).drop("row")
    message = r"states\[\('f', 'items'\)\]: row 4, .*: an item of a list is written after those before it, and 'written_at' is"
    with pytest.raises(SchemaError, match=message):
        write_savepoint(tmp_path / "new", like=like_items, states={("f", "items"): changed})


# ---- rows that were removed from what is stored ------------------------------


class Newest(KeyedBatchFunction):
    rows = TableState({"k": int, "n": int})

    def process(self, rows: pl.DataFrame, ctx: Any) -> None:
        self.rows.upsert(rows.unique("k", keep="last"))


class Renamed(KeyedBatchFunction):
    held = TableState({"more": str, "n": int, "k": int}, was="rows")

    def process(self, rows: pl.DataFrame, ctx: Any) -> None: ...


def of_table(function: Any, max_parallelism: int = 16) -> Environment:
    env = Environment("newest", parallelism=2, max_parallelism=max_parallelism)
    rows = env.from_collection([], schema={"k": int, "n": int}).uid("rows").key_by("k")
    rows.process_batches(function, {"k": int}).uid("f").collect()
    return env


def test_whatever_reads_state_leaves_out_the_rows_that_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "OWN_CHUNK_ROWS", 1)
    monkeypatch.setattr(table_runs, "TIDY_ROWS", 10**6)
    expected = {k: k for k in range(40)}
    with testing.job(of_table(Newest()), parallelism=2) as job:
        job.feed("rows", [{"k": k, "n": n} for k, n in expected.items()], cut="whole")
        job.snapshot()
        for n in (100, 200):
            changed = dict.fromkeys(range(n // 50, 40, n // 20), n)
            job.feed("rows", [{"k": k, "n": n} for k, n in changed.items()], cut="whole")
            expected |= changed
            snapshot = job.snapshot()
    (operator,) = [each for each in snapshot.metadata.operators if each.uid == "f"]
    chunks = [chunk for subtask in operator.subtasks for part in subtask.parts for chunk in part.chunks]
    assert sum(bool(chunk.removed) for chunk in chunks) >= 2
    like = saved(snapshot, tmp_path / "like")
    (stored,) = [state for state in open_checkpoint(like).states if state.uid == "f"]
    assert stored.rows == len(expected)
    (report,) = [each for each in read_report(like).operators if each.uid == "f"]
    assert report.rows == len(expected)
    copied = write_savepoint(tmp_path / "copied", like=like)
    moved = write_savepoint(tmp_path / "moved", like=like, max_parallelism=7)
    states = every_state(like)
    assert list(states) == [("f", "rows")]
    given = write_savepoint(tmp_path / "given", like=like, states=states)
    for path, groups in ((like, 16), (copied, 16), (moved, 7), (given, 16)):
        assert dict(read_state(path, "f", "rows").collect().rows()) == expected
        for parallelism in (1, 2, 3):
            with testing.job(of_table(Newest(), groups), restore=loaded(path), parallelism=parallelism) as job:
                assert dict(job.state("f")["rows"].rows()) == expected
        with testing.job(of_table(Renamed(), groups), restore=loaded(path), parallelism=3) as job:
            assert dict(job.state("f")["held"].select("k", "n").rows()) == expected
