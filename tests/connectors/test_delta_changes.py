"""What versions do to the rows of a Delta table, as rows with their operation: applied in order, they make the table."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from table_worlds import CONTEXT, DeltaWorld, stored_vector

from effort import examples
from midstream import testing
from midstream.connectors.delta import delta_changes
from midstream.connectors.delta.delta_changes import DeltaChangesSplit
from midstream.connectors.delta.delta_source import DeltaSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.source_api import Source, Split

SCHEMA = schema_of([("n", pa.int64()), ("v", pa.int64()), ("part", pa.large_string())])
ROW = st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from(["a", "b"]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(ROW, min_size=1, max_size=4)),
        st.tuples(st.just("delete"), st.integers(0, 5)),
        st.tuples(st.just("update"), st.integers(0, 5)),
        st.tuples(st.just("overwrite"), st.lists(ROW, max_size=3)),
        st.tuples(st.just("merge"), st.lists(ROW, max_size=3, unique_by=lambda row: row[0])),
        st.tuples(st.just("compact"), st.none()),
    ),
    max_size=6,
)


def rows_of(values: list[tuple[int, int, str]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in values], schema=SCHEMA)


def new_table(path: Path, *, records: bool, partition_by: list[str] | None = None, mapping: str = "none") -> DeltaTable:
    configuration = {"delta.columnMapping.mode": mapping} if mapping != "none" else {}
    configuration |= {"delta.enableChangeDataFeed": "true"} if records else {}
    return DeltaTable.create(path, SCHEMA, partition_by=partition_by, configuration=configuration)


def do(path: Path, step: tuple[str, Any]) -> None:
    table, (what, value) = DeltaTable(path), step
    match what:
        case "append":
            write_deltalake(path, rows_of(value), mode="append")
        case "delete":
            table.delete(f"n = {value}")
        case "update":
            table.update({"v": "v + 1"}, predicate=f"n = {value}")
        case "overwrite":
            write_deltalake(path, rows_of(value), mode="overwrite")
        case "merge":
            merged = table.merge(rows_of(value), "t.n = s.n and t.part = s.part", source_alias="s", target_alias="t")
            merged.when_matched_update_all().when_not_matched_insert_all().execute()
        case "compact" if "delta.columnMapping.mode" not in table.metadata().configuration:  # else deltalake refuses
            table.optimize.compact()


def applied(changes: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The multiset of rows by their key after all changes; an update replaces a row with its n and part."""
    found: list[tuple[int, ...]] = []
    for change in changes:
        row = (change["n"], change["v"], change["part"])
        if change["_op"] == "delete":
            found.remove(row)
        elif change["_op"] == "insert":
            found.append(row)
        else:
            old = next(each for each in found if (each[0], each[2]) == (row[0], row[2]))
            found.remove(old)
            found.append(row)
    return sorted(found)


def table_rows(path: Path) -> list[tuple[int, ...]]:
    found = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT n, v, part FROM t").read_all()
    return sorted(tuple(row.values()) for row in pa.table(found).to_pylist())


def read_all(source: Source, split: Split, rows_max: int = 1000) -> tuple[list[dict[str, Any]], int]:
    """What there is at present."""
    reader = source.open_split(split)
    rows, offset = [], split.offset
    while (found := reader.read(rows_max)) is not None:
        offset = found[1]
        if not found[0].num_rows:
            break
        rows += found[0].to_pylist()
    reader.close()
    return rows, offset


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("partition_by", [[], ["part"]])
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=STEPS, after=STEPS, rows_max=st.integers(1, 5), mapping=st.sampled_from(["none", "name", "id"]))
def test_changes_in_their_order_make_the_table(records, partition_by, before, after, rows_max, mapping):
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t"
        new_table(path, records=records, partition_by=partition_by, mapping=mapping)
        unique = keyed(before + after)
        steps_before = [step for step in before if unique or step[0] not in ("update", "merge")]
        steps_after = [step for step in after if unique or step[0] not in ("update", "merge")]
        for step in steps_before:
            do(path, step)
        source = DeltaSource(path, changes=True, watch=True, interval="1 ms")
        (split,) = source.discover(None, CONTEXT).splits
        changes, offset = read_all(source, split, rows_max)
        assert applied(changes) == table_rows(path)
        for step in steps_after:
            do(path, step)
        again = DeltaSource(path, changes=True, watch=True, interval="1 ms")
        more, _ = read_all(again, Split(split.id, split.payload, offset), rows_max)
        assert applied(changes + more) == table_rows(path)
        whole, _ = read_all(again, split)
        assert whole == changes + more, "offsets do not depend on where reading resumes"


def keyed(steps: list[tuple[str, Any]]) -> bool:
    """Whether no step appends: then a merge keeps rows unique by n and part, and an update is of one row."""
    return not any(step[0] in ("append", "overwrite") for step in steps)


def test_reading_resumes_after_each_row(tmp_path):
    path = tmp_path / "t"
    new_table(path, records=True)
    for step in [("append", [(1, 1, "a"), (2, 2, "b")]), ("append", [(3, 3, "a")])]:
        do(path, step)
    source = DeltaSource(path, changes=True)
    position = source.discover(None, CONTEXT)
    (split,) = position.splits
    assert testing.check_source(source).num_rows == 3
    later: list[tuple[str, Any]] = [("update", 1), ("delete", 2), ("compact", None), ("append", [(4, 4, "a")])]
    for step in later:
        do(path, step)
    live = DeltaSource(path, changes=True, watch=True)
    whole, _ = read_all(live, live_split(split))
    assert [(row["n"], row["_op"]) for row in whole] == [
        (1, "insert"), (2, "insert"), (3, "insert"), (1, "update"), (2, "delete"), (4, "insert"),
    ]  # fmt: skip
    reader, rows = live.open_split(live_split(split)), 0
    while (found := reader.read(1)) is not None and found[0].num_rows:
        rows += 1
        rest, _ = read_all(live, Split(split.id, live_split(split).payload, found[1]))
        assert rest == whole[rows:]


def live_split(split: Split) -> Split:
    part = msgspec.msgpack.decode(split.payload, type=DeltaChangesSplit)
    return Split(split.id, msgspec.msgpack.encode(msgspec.structs.replace(part, stop=None)))


def test_a_job_that_resumes_ends_as_its_own_source_does(tmp_path):
    new_table(tmp_path, records=True)
    do(tmp_path, ("append", [(1, 1, "a")]))
    watched = DeltaSource(tmp_path, changes=True, watch=True, interval="1 ms")
    (split,) = watched.discover(None, CONTEXT).splits
    do(tmp_path, ("append", [(2, 2, "b")]))
    once = DeltaSource(tmp_path, changes=True)
    do(tmp_path, ("append", [(3, 3, "c")]))
    ends = once.begin_split(split)
    reader, found = once.open_split(ends), []
    while (batch := reader.read(10)) is not None and len(found) < 10:
        found += batch[0].to_pylist()
    assert batch is None, "it ends"
    assert len(found) == 2
    assert once.begin_split(ends) == ends
    assert watched.begin_split(ends) == split


def test_changes_and_rows_are_not_continued_as_the_other(tmp_path):
    new_table(tmp_path, records=True)
    for changes in (False, True):
        position = DeltaSource(tmp_path, changes=changes, watch=True).discover(None, CONTEXT).position
        assert position is not None
        DeltaSource(tmp_path, changes=changes, watch=True).check_resume(position)
        with pytest.raises(ConfigError, match=f"of a job with changes={changes}"):
            DeltaSource(tmp_path, changes=not changes, watch=True).check_resume(position)


def test_without_watch_it_ends_with_the_version_that_there_was(tmp_path):
    path = tmp_path / "t"
    new_table(path, records=True)
    do(path, ("append", [(1, 1, "a")]))
    do(path, ("update", 1))
    source = DeltaSource(path, changes=True, start=1)
    found = source.discover(None, CONTEXT)
    assert found.exhausted
    do(path, ("delete", 1))
    reader = source.open_split(found.splits[0])
    ops = []
    while (read := reader.read(10)) is not None:
        ops += read[0].column("_op").to_pylist()
    assert ops == ["insert", "update"]
    assert source.discover(found.position, CONTEXT).splits == ()


def test_recorded_updates_are_updates_and_keep_to_the_columns_chosen(tmp_path):
    path = tmp_path / "t"
    new_table(path, records=True, partition_by=["part"])
    do(path, ("append", [(1, 1, "a"), (1, 7, "b"), (2, 2, "b")]))
    do(path, ("update", 1))
    source = DeltaSource(path, changes=True, start=2, columns=["part", "v"])
    (split,) = source.discover(None, CONTEXT).splits
    rows, _ = read_all(source, split)
    assert sorted(rows, key=str) == [
        {"part": "a", "v": 2, "_op": "update"}, {"part": "b", "v": 8, "_op": "update"},
    ]  # fmt: skip


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("partition_by", [[], ["part"]])
@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    moves=st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4), max_size=4),
    rows_max=st.integers(1, 3),
)
@example(moves=[[(0, 1), (1, 2), (3, 0)], [(0, 0)]], rows_max=1)
def test_an_update_of_the_key_deletes_the_row_under_the_old_one(records, partition_by, moves, rows_max):
    """Several rows move at a time, also to the key that another one leaves."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t"
        new_table(path, records=records, partition_by=partition_by)
        do(path, ("append", [(n, n, "ab"[n % 2]) for n in range(6)]))
        source = DeltaSource(path, changes=True, key=["n"], watch=True, interval="1 ms")
        (split,) = source.discover(None, CONTEXT).splits
        changes, offset = read_all(source, split, rows_max)
        for unused, step in zip((100, 10_000, 1_000_000, 100_000_000), moves, strict=False):
            now = dict(pl.read_delta(str(path)).select("v", "n").rows())
            wanted = {**now, **dict(step)}
            kept = {v: n for v, n in wanted.items() if v in now and list(wanted.values()).count(n) == 1}
            if kept:
                cases = " ".join(f"WHEN v = {v} THEN {n}" for v, n in kept.items())
                DeltaTable(path).update({"n": f"CASE {cases} ELSE n + {unused} END"})
            more, offset = read_all(source, Split(split.id, split.payload, offset), rows_max)
            changes += more
        by_key: dict[int, tuple[int, ...]] = {}
        for change in changes:
            by_key.pop(change["n"], None)
            if change["_op"] != "delete":
                by_key[change["n"]] = (change["n"], change["v"], change["part"])
        assert sorted(by_key.values()) == table_rows(path)
        assert read_all(source, split)[0] == changes, "offsets do not depend on where reading resumes"


def test_a_key_is_that_of_the_checkpoint(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    (split,) = world.source(changes=True, key=["n"]).discover(None, CONTEXT).splits
    with pytest.raises(ConfigError, match=r"the checkpoint was made with key=\['n'\]; give that"):
        world.source(changes=True).open_split(split)
    with pytest.raises(ConfigError, match="has no meaning without changes=True"):
        world.source(key=["n"])
    with pytest.raises(SchemaError, match="key column 'm' is not in the stream"):
        world.source(changes=True, key=["m"])


def test_what_cannot_be_read_is_refused(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1, 2, 3)
    with pytest.raises(ConfigError, match="on_change='skip' has no meaning with changes=True"):
        world.source(changes=True, on_change="skip")
    source = world.source(changes=True, watch=True)
    (split,) = source.discover(None, CONTEXT).splits
    damaged = DeltaChangesSplit("x", 1, None, b"zz", None)
    with pytest.raises(StorageError, match="the checkpoint is damaged where it has the files of the table"):
        source.open_split(Split("changes", msgspec.msgpack.encode(damaged)))
    plain = world.source()
    with pytest.raises(ConfigError, match="was written by another kind of source"):
        plain.open_split(split)
    with pytest.raises(ConfigError, match="was written by another kind of source"):
        source.open_split(plain.discover(None, CONTEXT).splits[0])


def commit(table: Path, *actions: dict[str, Any]) -> None:
    number = len(list((table / "_delta_log").glob("*.json")))
    (table / f"_delta_log/{number:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def added(table: Path, name: str, first: int) -> dict[str, Any]:
    """Write a file of ROWS rows, and return the action that adds it."""
    rows = [(first + row, row, "a") for row in range(ROWS)]
    pq.write_table(rows_of(rows), table / name)
    return {"path": name, "partitionValues": {}, "size": (table / name).stat().st_size, "modificationTime": 1, "dataChange": True}  # fmt: skip


ROWS = 6
GONE = st.sets(st.integers(0, ROWS - 1))
VERSIONS = st.lists(st.dictionaries(st.integers(0, 3), st.one_of(st.none(), GONE), min_size=1), max_size=5)
"""What each version does to four files: it removes the file, or there is one with these rows gone."""


@settings(max_examples=examples(60), deadline=None)
@given(versions=VERSIONS, where=st.sampled_from(["file", "folder", "inline"]), rows_max=st.integers(1, 5))
@example(
    versions=[{0: set()}, {0: {1, 2}}, {0: {2}}, {0: None, 1: {3}}, {1: set(range(ROWS))}], where="file", rows_max=2
)
def test_deletion_vectors_are_changes_where_none_are_recorded(versions, where, rows_max):
    """Spark records none for a DELETE by vectors, also of a table that has a change data feed."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t"
        new_table(path, records=True)
        source = DeltaSource(path, changes=True, watch=True, interval="1 ms")
        (split,) = source.discover(None, CONTEXT).splits
        files = {number: added(path, f"{number}", number * ROWS) for number in range(4)}
        there: dict[int, tuple[dict[str, Any], set[int]]] = {}
        for version in versions:
            actions = []
            for number, gone in version.items():
                if number in there:
                    actions.append({"remove": {**there.pop(number)[0], "deletionTimestamp": 1}})
                if gone is not None:
                    form = {"inline": where == "inline", "prefix": "ab" if where == "folder" else ""}
                    vector = {"deletionVector": stored_vector(path, sorted(gone), **form)} if gone else {}
                    there[number] = {**files[number], **vector}, gone
                    actions.append({"add": there[number][0]})
            commit(path, *actions)
        changes, _ = read_all(source, split, rows_max)
        alive: list[tuple[Any, ...]] = [
            (n * ROWS + row, row, "a") for n, (_, gone) in there.items() for row in range(ROWS) if row not in gone
        ]
        assert applied(changes) == sorted(alive)
        whole, _ = read_all(source, split)
        assert whole == changes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda vector, _: {**vector, "cardinality": 3}, "it names 2 rows, and the log says 3"),
        (lambda vector, _: {**vector, "sizeInBytes": vector["sizeInBytes"] - 1}, "has another one at offset"),
        (lambda vector, _: {**vector, "offset": 10**6}, "cannot be read"),
        (lambda vector, _: {**vector, "pathOrInlineDv": "0" * 20}, "deletion_vector_00000000-0000-0000-0000-000000000000"),
        (lambda vector, _: {**vector, "pathOrInlineDv": "short"}, "cannot be read"),
        (lambda vector, _: {**vector, "storageType": "p", "pathOrInlineDv": "s3://other/v.bin"}, "lies outside of the table"),
        (lambda vector, file: file.write_bytes(file.read_bytes()[:-1] + b"x") and vector, "does not match its checksum"),
        (lambda vector, file: file.write_bytes(file.read_bytes()[:-8]) and vector, "cannot be read"),
    ],
)  # fmt: skip
def test_a_deletion_vector_that_is_none_is_named(tmp_path, damage, message):
    path = tmp_path / "t"
    new_table(path, records=False)
    source = DeltaSource(path, changes=True, watch=True, interval="1 ms")
    (split,) = source.discover(None, CONTEXT).splits
    add = added(path, "a", 0)
    commit(path, {"add": add})
    vector = stored_vector(path, [1, 2])
    (file,) = path.glob("deletion_vector_*")
    commit(path, {"remove": add}, {"add": {**add, "deletionVector": damage(vector, file)}})
    with pytest.raises((StorageError, ConfigError), match=message):
        read_all(source, split)


def test_a_deletion_vector_of_another_file_is_refused(tmp_path):
    path = tmp_path / "t"
    new_table(path, records=False)
    source = DeltaSource(path, changes=True, watch=True, interval="1 ms")
    (split,) = source.discover(None, CONTEXT).splits
    add = added(path, "a", 0)
    commit(path, {"add": {**add, "deletionVector": stored_vector(path, [ROWS])}})
    with pytest.raises(StorageError, match=f"a has {ROWS} rows, and its deletion vector names row {ROWS}"):
        read_all(source, split)


def test_a_table_that_was_replaced_and_versions_that_are_gone_are_named(tmp_path, monkeypatch):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    source = world.source(changes=True, watch=True, interval="1 ms")
    (split,) = source.discover(None, CONTEXT).splits
    _, offset = read_all(source, split)
    resumed = Split(split.id, split.payload, offset)
    world.append(2)
    world.append(3)
    world.forget()
    with pytest.raises(ConfigError, match="version 2 is to be read next, and is no longer in the table's log"):
        read_all(source, resumed)
    world.drop()
    world.create()
    world.append(5)
    world.append(6)
    with pytest.raises(ConfigError, match="version 1 was read, and the table was replaced by another one"):
        read_all(source, resumed)
    world.add_column("more")
    with pytest.raises((ConfigError, SchemaError)):
        read_all(world.source(changes=True, columns=["n"]), resumed)


def test_a_column_may_not_be_called_as_the_operation(tmp_path):
    write_deltalake(tmp_path / "t", pa.table({"_op": ["x"]}))
    with pytest.raises(SchemaError, match="more than one column '_op'"):
        DeltaSource(tmp_path / "t", changes=True)
    assert DeltaSource(tmp_path / "t").schema.names == ["_op"]
    assert delta_changes.OP == "_op"
