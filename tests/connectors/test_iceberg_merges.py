"""Rows that put and delete rows of an Iceberg table by key: what remains, whoever commits, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import failure_of, written
from iceberg_rest import rest_catalog
from keyed_tables import TEXT, USERS, rows_of, users
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, MapType, NestedField, StringType, UUIDType

from committers import committer_of
from machine import limit_s
from midstream.connectors.iceberg import iceberg_commits, iceberg_merges, iceberg_rewrites, iceberg_sink
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput

NAME = "lake.users"
OUTPUT = CommittedOutput("out", frozenset(["job-a"]))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    return load_catalog("midstream", **properties)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)


def new_sink(catalog: Any, columns: pa.Schema = USERS, restoring: bool = False, **options: Any) -> IcebergSink:
    sink = IcebergSink(options.pop("table", NAME), catalog=catalog, **{"key": ["id"], "op": "op", **options})
    sink.validate(columns, restoring=restoring)
    return sink


def opened(catalog: Catalog, name: str = NAME) -> Table:
    return catalog.load_table(name)


def found(catalog: Catalog, name: str = NAME) -> list[Any]:
    """The rows, as two readers find them."""
    table = opened(catalog, name)
    by_pyiceberg = sorted((tuple(row.values()) for row in table.scan().to_arrow().to_pylist()), key=repr)
    by_polars = sorted(pl.scan_iceberg(table).collect().rows(), key=repr)
    assert by_polars == by_pyiceberg
    newest = table.current_snapshot()
    if newest is not None and newest.summary is not None and "total-position-deletes" in newest.summary:
        deleted = int(newest.summary.additional_properties["total-position-deletes"])
        assert newest.summary["total-records"] == str(len(by_polars)) or deleted
    return by_polars


def snapshots(catalog: Catalog) -> int:
    return len(opened(catalog).metadata.snapshots)


def waiting(catalog: Catalog, name: str = NAME) -> list[str]:
    return sorted(path.name for path in directory(catalog, name).glob("data/_midstream/*"))


def directory(catalog: Catalog, name: str = NAME) -> Path:
    return Path(opened(catalog, name).location().removeprefix("file://"))


def unused(catalog: Catalog) -> list[str]:
    """Data files that no snapshot has."""
    table = opened(catalog)
    known = {
        entry.data_file.file_path.removeprefix("file://")
        for snapshot in table.metadata.snapshots
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    }
    return sorted(str(path) for path in directory(catalog).glob("data/*.parquet") if str(path) not in known)


# ---- what is in the table ----------------------------------------------------


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_merge_replaces_files_in_one_snapshot(catalog, version):
    catalog.create_namespace("lake")
    stored = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    catalog.create_table(NAME, stored, properties={"format-version": version})
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "ann", "insert"), (2, "bob", "insert"), (4, "di", "update"))))
    changes = users((1, "anna", "update"), (2, None, "delete"), (4, "dee", "insert"), (5, "eve", "insert"))
    committer.commit(2, written(sink, changes, 2, subtask=2))
    assert found(catalog) == [(1, "anna"), (4, "dee"), (5, "eve")]
    newest = opened(catalog).current_snapshot()
    assert newest is not None and newest.summary is not None
    assert newest.summary.operation.value == "overwrite"
    assert (newest.summary["deleted-data-files"], newest.summary["added-data-files"]) == ("1", "1")
    assert newest.summary["total-records"] == "3"
    committer.commit(3, written(sink, users(*((n, None, "delete") for n in range(6))), 3, subtask=3))
    assert found(catalog) == []
    assert unused(catalog) == []


def test_nested_values_of_rows_stay_and_are_replaced(catalog):
    inner = pa.struct([("x", pa.int32()), ("tags", pa.large_list(TEXT))])
    columns = schema_of(
        [("id", pa.int64()), ("inner", inner), ("sizes", pa.large_list(pa.float64())), ("p", TEXT), ("op", TEXT)]
    )
    sink = new_sink(catalog, columns, partition_by=["p"])
    committer = committer_of(sink, "job-a")
    rows: list[tuple[Any, ...]] = [
        (1, {"x": 1, "tags": ["a", None]}, [0.5], "p"),
        (2, None, None, None),
        (3, {"x": None, "tags": None}, [], "q"),
        (4, {"x": 4, "tags": []}, [float("inf"), None], "p"),
    ]
    committer.commit(1, written(sink, rows_of(columns, *((*row, "insert") for row in rows))))
    rows[1] = (2, {"x": 2, "tags": [""]}, [1.0, 2.0], "q")
    rows[3] = (4, None, None, "q")
    changes = [(*rows[1], "update"), (*rows[3], "update")]
    committer.commit(2, written(sink, rows_of(columns, *changes), 2, subtask=1))
    assert found(catalog) == rows


NOON = datetime(2024, 1, 1)
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 0, 127]),
    "int32": (pa.int32(), [-(2**31), 0, 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, 2**53, 2**53 + 1]),
    "uint64": (pa.uint64(), [0, 2**64 - 1, 2**64 - 2]),
    "bool": (pa.bool_(), [True, False]),
    "text": (TEXT, ["", "'", "e\u0301", "\u00e9", "a\0b", "a\0c", "x" * 5000 + "1", "x" * 5000 + "2", "\U0010ffff" * 20, "\U0010ffff" * 21]),
    "binary": (pa.large_binary(), [b"", b"\0", b"\0\0", b"\xff" * 40 + b"a", b"\xff" * 40 + b"b"]),
    "date": (pa.date32(), [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(9999, 12, 31)]),
    "clock": (pa.time64("us"), [time.min, time(12, 0, 0, 1), time.max]),
    "time": (pa.timestamp("us"), [datetime.min, datetime(1969, 12, 31, 23), NOON, NOON.replace(microsecond=1), datetime.max]),
    "instant": (pa.timestamp("us", "Europe/Paris"), [datetime(1900, 1, 1, tzinfo=UTC), NOON.replace(tzinfo=UTC), NOON.replace(microsecond=999, tzinfo=UTC)]),
    "decimal": (pa.decimal128(38, 0), [Decimal("9" * 38), Decimal("9" * 37 + "8"), Decimal("-" + "9" * 38), Decimal(0)]),
    "small decimal": (pa.decimal128(5, 2), [Decimal("1.10"), Decimal("-1.10"), Decimal("1.11")]),
}  # fmt: skip
BY: dict[str, list[tuple[str, ...]]] = {
    "date": [("month(id)",), ("day(id)",)],
    "time": [("year(id)",), ("hour(id)",)],
    "instant": [("day(id)",), ("bucket(3, id)",)],
    "bool": [("id",), ()],
    "clock": [("id",), ("bucket(3, id)",)],
    "decimal": [("id",), ("bucket(3, id)",)],
}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_each_type_are_found_again_and_no_other_is(catalog, monkeypatch, kind, listed):
    if not listed:
        monkeypatch.setattr(iceberg_merges, "_LISTED_MAX", 0)
    of_type, keys = KEYS[kind]
    columns = schema_of([("id", of_type), ("n", pa.int64()), ("op", TEXT)])
    others = BY.get(kind, [("bucket(3, id)",), ("truncate(2, id)",)])
    for number, by in enumerate([(), others[0]] if listed else [("id",), others[1]]):
        name = f"lake.t{number}"
        sink = new_sink(catalog, columns, table=name, partition_by=by)
        committer, checkpoints = committer_of(sink, "job-a"), iter(range(1, 100))

        def commit(
            *rows: tuple[Any, ...], committer: Any = committer, checkpoints: Any = checkpoints, sink: Any = sink
        ) -> None:
            checkpoint_id = next(checkpoints)
            committer.commit(
                checkpoint_id, written(sink, rows_of(columns, *rows), checkpoint_id, subtask=checkpoint_id)
            )

        def numbers(name: str = name) -> list[int]:
            return sorted(pl.scan_iceberg(opened(catalog, name)).collect()["n"])

        for n, key in enumerate(keys):  # each in a file of its own
            commit((key, n, "insert"))
        commit(*((key, n + 100, "update") for n, key in enumerate(keys)))
        assert numbers() == [n + 100 for n in range(len(keys))]
        for n, key in enumerate(keys):
            commit((key, n + 200, "update"))
            assert numbers() == sorted(m + (200 if m <= n else 100) for m in range(len(keys)))
        commit(*((key, None, "delete") for key in keys[::2]))
        assert numbers() == [m + 200 for m in range(1, len(keys), 2)]


def test_dates_that_python_does_not_have_are_keys_as_well(catalog):
    columns = schema_of([("id", pa.date32()), ("n", pa.int64()), ("op", TEXT)])
    sink = new_sink(catalog, columns)
    committer = committer_of(sink, "job-a")
    days = pa.array([-1_000_000, 0], pa.int32()).cast(pa.date32())
    for n, op in enumerate(["insert", "update", "delete"], 1):
        rows = pa.record_batch([days, [n, n + 10], [op, "update"]], schema=columns)
        committer.commit(n, written(sink, rows, n, subtask=n))
    assert found(catalog) == [(date(1970, 1, 1), 13)]


def test_a_row_moves_to_another_partition_if_that_is_not_in_the_key(catalog):
    columns = schema_of([("id", pa.int64()), ("city", TEXT), ("n", pa.int64()), ("op", TEXT)])
    sink = new_sink(catalog, columns, partition_by=["city"])
    committer = committer_of(sink, "job-a")
    rows = rows_of(columns, (1, "a", 1, "insert"), (2, "b", 2, "insert"), (3, None, 3, "insert"), (4, "", 4, "insert"))
    committer.commit(1, written(sink, rows))
    odd = "a b/c=d%é'\"\\"
    moved = rows_of(columns, (1, odd, 10, "update"), (2, None, 20, "update"), (3, "a", 30, "update"), (4, "a", None, "delete"))  # fmt: skip
    committer.commit(2, written(sink, moved, 2, subtask=1))
    assert found(catalog) == [(1, odd, 10), (2, None, 20), (3, "a", 30)]
    partitions = {task.file.partition[0] for task in opened(catalog).scan().plan_files()}
    assert partitions == {odd, None, "a"}
    assert opened(catalog).scan("city == 'a'").to_arrow()["id"].to_pylist() == [3]
    committer.commit(3, written(sink, rows_of(columns, *((i, None, 0, "delete") for i in range(5))), 3, subtask=2))
    assert found(catalog) == []


def test_a_partition_column_in_the_key_says_which_files_are_read(catalog, monkeypatch):
    columns = schema_of([("day", pa.date32()), ("id", pa.large_binary()), ("n", pa.int64())])
    sink = new_sink(catalog, columns, key=["day", "id"], op=None, partition_by=["day"])
    committer = committer_of(sink, "job-a")
    days = [date(2024, 1, day) for day in (1, 2, 3)]
    committer.commit(1, written(sink, rows_of(columns, *((day, b"x", 1) for day in days))))
    read: list[str] = []
    real = iceberg_rewrites.ReplacedFile.read
    monkeypatch.setattr(
        iceberg_rewrites.ReplacedFile, "read", lambda self, schema: (read.append(self.location), real(self, schema))[1]
    )
    committer.commit(2, written(sink, rows_of(columns, (days[1], b"x", 2), (days[1], b"y", 2)), 2, subtask=1))
    assert found(catalog) == [(days[0], b"x", 1), (days[1], b"x", 2), (days[1], b"y", 2), (days[2], b"x", 1)]
    assert len(set(read)) == 1 and len(read) == 2, "its keys, then its rows"


# ---- exactly once ------------------------------------------------------------


def test_a_checkpoint_that_changes_nothing_is_noted_without_a_snapshot(catalog):
    sink = new_sink(catalog)
    committables = written(sink, users((1, None, "delete")))
    committer_of(sink, "job-a").commit(1, committables)
    assert waiting(catalog) == []
    assert sink.newest_committed(OUTPUT) == 1
    committer_of(sink, "job-a").commit(1, committables)
    assert snapshots(catalog) == 0
    committer_of(sink, "job-b").commit(1, committables)
    late = written(sink, users((1, "late", "insert")), 2, subtask=1)
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer_of(sink, "job-a").commit(2, late)
    held = written(sink, users((7, None, "delete")), 5, job_id="job-b")
    stale = opened(catalog)
    committer_of(sink, "job-c").commit(5, held)
    assert opened(catalog).current_snapshot() != stale.current_snapshot(), "so that a commit of job-b now fails"
    assert sink.newest_committed(CommittedOutput("out", frozenset(["job-b"]))) == 5


def stale_once(monkeypatch: pytest.MonkeyPatch, stale: Table) -> list[Table]:
    """Let the next one that loads the table get it as it was."""
    answers, real = [stale], CatalogTable.opened
    monkeypatch.setattr(CatalogTable, "opened", lambda self: answers.pop() if answers else real(self))
    return answers


def test_two_that_commit_the_same_at_once_agree_on_one(catalog, monkeypatch):
    sink = new_sink(catalog)
    one, other = committer_of(sink, "job-a"), committer_of(sink, "job-a")
    first = written(sink, users((1, "a", "insert"), (2, "b", "insert")))
    one.commit(1, first)
    other.commit(1, first)
    second = written(sink, users((1, None, "delete"), (3, "c", "insert")), 2, subtask=1)
    stale = opened(catalog)
    kept = {path: path.read_bytes() for path in directory(catalog).glob("data/_midstream/*")}
    one.commit(2, second)
    for path, data in kept.items():  # the other has opened them before
        path.write_bytes(data)
    answers = stale_once(monkeypatch, stale)
    other.commit(2, second)
    assert (found(catalog), snapshots(catalog), answers) == ([(2, "b"), (3, "c")], 2, [])
    assert waiting(catalog) == []
    assert unused(catalog) == [], "the new files of the one that lost are deleted"


def test_a_stale_commit_fails_although_the_table_was_rolled_back_in_between(catalog, monkeypatch):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"))))
    stale = opened(catalog)
    committer.commit(2, written(sink, users((1, "b", "update")), 2, subtask=1))
    late = written(sink, users((1, "late", "update")), 2, subtask=2)
    sink.roll_back(OUTPUT, 1, ())
    stale_once(monkeypatch, stale)
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer_of(sink, "job-a").commit(2, late)
    assert found(catalog) == [(1, "a")]


def test_committers_that_race_over_many_checkpoints_merge_each_once(catalog, tmp_path):
    """As two drivers of one job, each repeating a commit that fails, as the coordinator does; and a reader that appends."""
    sink = new_sink(catalog, partition_by=["name"])
    held = []
    for n in range(1, 9):
        rows = [(i % 5, str((n + i) % 3), ("insert", "update", "delete")[(n * i) % 3]) for i in range(n, n + 4)]
        held.append((n, rows, written(sink, users(*rows), n, subtask=n)))
    expected: dict[int, str] = {}
    for row in (row for _, rows, _ in held for row in rows):
        expected.pop(row[0], None)
        expected.update([row[:2]] if row[2] != "delete" else [])

    def commit_all(_: int) -> None:
        mine = load_catalog("midstream", **catalog.properties)
        committer = committer_of(new_sink(mine, restoring=True), "job-a")
        for checkpoint_id, _rows, committables in held:
            for tries in range(9):
                try:
                    committer.commit(checkpoint_id, committables)
                    break
                except StorageError:
                    assert tries < 8

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(commit_all, n) for n in range(2)]:
            done.result(limit_s(60))
    assert found(catalog) == sorted(expected.items())
    assert waiting(catalog) == []
    made = [s.summary["midstream.checkpoint"] for s in opened(catalog).metadata.snapshots if s.summary is not None]
    assert len(made) == len(set(made)), "no checkpoint twice"
    assert unused(catalog) == []


@pytest.mark.parametrize("between", ["append", "compact", "merge", "delete"])
def test_a_merge_begins_again_after_any_other_commit(catalog, monkeypatch, between):
    """What another writer commits in between may have rows with the same keys, or other files with the same rows."""
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"), (2, "b", "insert"))))
    committer.commit(2, written(sink, users((3, "c", "insert")), 2, subtask=1))
    stale = opened(catalog)
    if between == "append":
        opened(catalog).append(pa.table({"id": [4], "name": ["theirs"]}))
    elif between == "compact":
        opened(catalog).overwrite(opened(catalog).scan().to_arrow())
    elif between == "delete":
        opened(catalog).delete("id == 3")
    else:
        committer_of(sink, "job-x").commit(1, written(sink, users((4, "theirs", "insert")), job_id="job-x"))
    stale_once(monkeypatch, stale)
    committer.commit(3, written(sink, users((4, "ours", "update"), (1, None, "delete")), 3, subtask=2))
    assert found(catalog) == [(2, "b"), *([(3, "c")] if between != "delete" else []), (4, "ours")]
    assert unused(catalog) == []


def test_a_merge_that_others_always_overtake_ends(catalog, monkeypatch):
    sink = new_sink(catalog)
    committables = written(sink, users((1, "a", "insert")))

    def commit_table(*_: Any) -> Any:
        raise CommitFailedException("branch main has changed")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", commit_table)
        with pytest.raises(StorageError, match="cannot commit checkpoint 1: other writers keep committing first"):
            committer_of(sink, "job-a").commit(1, committables)
    assert unused(catalog) == []
    assert len(waiting(catalog)) == 1
    committer_of(sink, "job-a").commit(1, committables)
    assert found(catalog) == [(1, "a")]


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("change", [(1, "b", "update"), (2, "new", "insert"), (9, None, "delete")])
def test_a_commit_of_which_no_answer_comes_is_decided_by_what_the_table_has(catalog, monkeypatch, lands, change):
    sink = new_sink(catalog)
    committer_of(sink, "job-a").commit(1, written(sink, users((1, "a", "insert"))))
    before, committables = snapshots(catalog), written(sink, users(change), 2, subtask=1)
    real, calls = catalog.commit_table, []

    def commit_table(*arguments: Any) -> Any:
        calls.append(lands)
        if len(calls) > 1:
            return real(*arguments)
        if lands:
            real(*arguments)
        raise CommitStateUnknownException("502 Bad Gateway")

    monkeypatch.setattr(catalog, "commit_table", commit_table)
    committer_of(sink, "job-a").commit(2, committables)
    expected = {1: "a", **({change[0]: change[1]} if change[2] != "delete" else {})}
    assert found(catalog) == sorted(expected.items())
    assert snapshots(catalog) == before + (change[2] != "delete")
    assert len(calls) == (1 if lands else 2)
    assert unused(catalog) == []
    assert waiting(catalog) == []


@pytest.mark.parametrize("status", [200, 500, 502, 504])
def test_a_rest_catalog_whose_answers_are_lost_merges_each_checkpoint_once(catalog, status):
    """The commit is applied, and then the answer is lost, for each second commit."""
    with rest_catalog(catalog) as (server, url):
        server.before_answer = lambda: status if status != 200 and server.commits % 2 else None
        sink = new_sink({"type": "rest", "uri": url}, partition_by=["bucket(2, id)"])
        committer = committer_of(sink, "job-a")
        for n in range(1, 6):
            rows = users((n, "new", "insert"), (n - 1, str(n), "update"), (n - 2, None, "delete"))
            committer.commit(n, written(sink, rows if n != 4 else users((99, None, "delete")), n, attempt=n))
        assert found(catalog) == [(2, "3"), (4, "5"), (5, "new")]
        sink.roll_back(OUTPUT, 2, ())
        assert server.commits == 6
    assert found(catalog) == [(1, "2"), (2, "new")]
    assert unused(catalog) == []


def test_a_commit_whose_answer_is_lost_is_not_repeated_and_its_files_are_deleted(catalog, monkeypatch):
    sink = new_sink(catalog)
    committables = written(sink, users((1, "a", "insert")))
    real = catalog.commit_table

    def lose(*arguments: Any) -> Any:
        real(*arguments)
        raise OSError("the connection broke just then")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", lose)
        with pytest.raises(StorageError, match="the connection broke just then"):
            committer_of(sink, "job-a").commit(1, committables)
    before = snapshots(catalog)
    assert len(waiting(catalog)) == 1
    opened(catalog).overwrite(pa.table({"id": [1], "name": ["theirs"]}))
    committer_of(sink, "job-a").commit(1, committables)
    assert found(catalog) == [(1, "theirs")]
    assert snapshots(catalog) > before
    assert waiting(catalog) == []


def test_compaction_that_a_merge_overtakes_does_not_bring_rows_back(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    for n in (1, 2, 3):
        committer.commit(n, written(sink, users((n, "x", "insert")), n, subtask=n))
    compaction = opened(catalog).transaction()
    compaction.overwrite(opened(catalog).scan().to_arrow())
    committer.commit(4, written(sink, users((1, None, "delete"), (2, "y", "update")), 4, subtask=4))
    with pytest.raises(Exception, match=r"Added data files were found|has changed"):
        compaction.commit_transaction()
    assert found(catalog) == [(2, "y"), (3, "x")]


def test_many_small_manifests_become_one(catalog, monkeypatch):
    monkeypatch.setattr(iceberg_commits, "SMALL_MANIFESTS_MAX", 5)
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    for n in range(1, 20):
        rows = users((n, "x", "insert"), (n // 2, "y", "update"), (n - 9, None, "delete"))
        committer.commit(n, written(sink, rows, n, attempt=n))
        newest = opened(catalog).current_snapshot()
        assert newest is not None
        assert len(newest.manifests(opened(catalog).io)) <= 12
    kept = {n: "y" if n <= 9 else "x" for n in range(1, 20)}
    assert {row[0] for row in found(catalog)} <= {0, *kept}
    assert len({row[0] for row in found(catalog)}) == len(found(catalog))


# ---- files -------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "_midstream/../victim"},
        {"name": "victim"},
        {"name": "part-0000-0000-000000-0123456789abcdef.parquet"},
        {"name": "_midstream/_midstream/part-0000-0000-000000-0123456789abcdef.parquet"},
        {"key": ()},
        {"directory": "file:///tmp"},
    ],
)
def test_a_checkpoint_cannot_have_any_other_file_merged_or_deleted(catalog, tmp_path, changes):
    sink = new_sink(catalog)
    (committable,) = written(sink, users((1, "a", "insert")))
    before = sorted(tmp_path.rglob("*"))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=IcebergFile), **changes)
    committer = committer_of(sink, "job-b")
    acts: list[Callable[..., Any]] = [sink.check_committables, committer.commit, lambda _, what: committer.abort(what)]
    for act in acts:
        with pytest.raises(StorageError, match=r"is corrupt or forged|set the table's property write.data.path back"):
            act(1, [msgspec.msgpack.encode(crafted)])
    assert sorted(tmp_path.rglob("*")) == before


# ---- going back --------------------------------------------------------------


def test_a_table_rolls_back_what_was_merged_after_a_checkpoint(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    states: list[list[Any]] = [[]]
    changes: list[list[tuple[Any, ...]]] = [
        [(1, "a", "insert"), (2, "b", "insert")],
        [(1, "aa", "update"), (2, None, "delete")],
        [(9, None, "delete")],  # changes nothing
        [(2, "bb", "insert"), (3, "c", "insert")],
        [(3, "cc", "update")],
    ]
    for n, rows in enumerate(changes, 1):
        committer.commit(n, written(sink, users(*rows), n, subtask=n))
        states.append(found(catalog))
    assert sink.newest_committed(OUTPUT) == 5
    late = written(sink, users((1, "late", "update")), 6, subtask=6)
    for after in (4, 3, 2, 1):
        sink.check_rollback(OUTPUT, after)
        sink.roll_back(OUTPUT, after, ())
        assert (found(catalog), sink.newest_committed(OUTPUT)) == (states[after], after)
        before = snapshots(catalog)
        sink.roll_back(OUTPUT, after, ())
        assert snapshots(catalog) == before
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer.commit(6, late)
    successor = committer_of(sink, "job-b")
    successor.commit(6, written(sink, users((2, "again", "update")), 6, job_id="job-b"))
    assert found(catalog) == [(1, "a"), (2, "again")]
    opened(catalog).append(pa.table({"id": [100], "name": ["theirs"]}))
    with pytest.raises(
        ConfigError, match=r"other writers have changed the table since checkpoint 1: snapshot \d+ is append"
    ):
        sink.check_rollback(CommittedOutput("out", frozenset(["job-a", "job-b"])), 1)
    with pytest.raises(ConfigError, match="other writers have changed the table since"):
        sink.roll_back(CommittedOutput("out", frozenset(["job-a", "job-b"])), 1, ())


def test_what_only_added_rows_is_rolled_back_although_others_have_added_some_since(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"))))
    committer.commit(2, written(sink, users((2, "b", "insert")), 2, subtask=1))
    opened(catalog).append(pa.table({"id": [100], "name": ["theirs"]}))
    sink.roll_back(OUTPUT, 1, ())
    assert found(catalog) == [(1, "a"), (100, "theirs")]


def test_a_rollback_to_before_the_first_commit_empties_the_table(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    for n in (1, 2):
        committer.commit(n, written(sink, users((1, str(n), "update")), n, subtask=n))
    sink.roll_back(OUTPUT, 0, ())
    assert found(catalog) == []
    committer_of(sink, "job-b").commit(1, written(sink, users((1, "b", "insert")), job_id="job-b"))
    assert found(catalog) == [(1, "b")]


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_table_whose_older_snapshots_have_expired_is_not_rolled_back(catalog, version):
    catalog.create_namespace("lake")
    stored = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    catalog.create_table(NAME, stored, properties={"format-version": version})
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    for n in range(1, 5):
        committer.commit(n, written(sink, users((1, str(n), "update"), (n, "x", "insert")), n, subtask=n))
    before = found(catalog)
    ids = [snapshot.snapshot_id for snapshot in opened(catalog).metadata.snapshots]
    opened(catalog).maintenance.expire_snapshots().by_ids(ids[:2]).commit()
    with pytest.raises(ConfigError, match=r"no longer goes back to checkpoint 2: the snapshot before \d+ has expired"):
        sink.check_rollback(OUTPUT, 2)
    with pytest.raises(
        ConfigError, match=r"no longer goes back to checkpoint 1: the snapshot of checkpoint 2 has expired"
    ):
        sink.check_rollback(OUTPUT, 1)
    sink.check_rollback(OUTPUT, 3)
    assert found(catalog) == before


def test_a_rollback_after_that_of_another_job_keeps_what_this_one_has_committed_before(catalog):
    sink = new_sink(catalog)
    one = committer_of(sink, "job-a")
    one.commit(1, written(sink, users((1, "a", "insert"))))
    for n in (2, 3):
        one.commit(n, written(sink, users((1, f"a{n}", "update")), n, subtask=n))
    other = committer_of(sink, "job-b")  # has gone back to 1, and kept what was newer
    other.commit(2, written(sink, users((1, "b2", "update")), 2, job_id="job-b"))
    output = CommittedOutput("out", frozenset(["job-a", "job-b"]))
    with pytest.raises(ConfigError, match="other writers have changed the table since checkpoint 2"):
        sink.check_rollback(output, 2)
    sink.roll_back(output, 1, ())
    assert found(catalog) == [(1, "a")]


# ---- tables ------------------------------------------------------------------


def with_deletes(
    catalog: Catalog, content: DataFileContent, rows: pa.Table, equality_ids: list[int] | None = None
) -> None:
    """Commit a file of deletes, as other engines do."""
    table = opened(catalog)
    path = f"{table.location()}/data/deletes-{content.name}-{rows.num_rows}.parquet"
    pq.write_table(rows, path.removeprefix("file://"))
    size = Path(path.removeprefix("file://")).stat().st_size
    file = DataFile.from_args(
        content=content, file_path=path, file_format=FileFormat.PARQUET, partition=Record(), record_count=rows.num_rows,
        file_size_in_bytes=size, column_sizes={}, value_counts={}, null_value_counts={}, nan_value_counts={},
        lower_bounds={}, upper_bounds={}, key_metadata=None, split_offsets=None, equality_ids=equality_ids, sort_order_id=None,
    )  # fmt: skip
    file.spec_id = 0
    commit = iceberg_commits.SnapshotCommit(table)
    real = commit._added

    def added(files: Any) -> Any:
        manifest = real(files)
        manifest._data[[field.name for field in manifest_fields()].index("content")] = ManifestContent.DELETES
        return manifest

    commit._added = added  # type: ignore[method-assign]
    commit.append([file], {}, {})


def manifest_fields() -> Any:
    from pyiceberg.manifest import MANIFEST_LIST_FILE_SCHEMAS

    return MANIFEST_LIST_FILE_SCHEMAS[2].fields


def test_position_deletes_of_others_are_applied_to_files_that_are_rewritten(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"), (2, "b", "insert"), (3, "c", "insert"))))
    committer.commit(2, written(sink, users((5, "e", "insert"), (6, "f", "insert")), 2, subtask=1))
    first, second = (task.file.file_path for task in opened(catalog).scan().plan_files())
    if pq.read_table(first)["id"][0].as_py() != 1:
        first, second = second, first
    positions = pa.table({"file_path": [first, first, second], "pos": pa.array([0, 2, 1], pa.int64())})
    with_deletes(catalog, DataFileContent.POSITION_DELETES, positions)
    assert opened(catalog).scan().to_arrow().sort_by("id")["id"].to_pylist() == [2, 5]
    rows = users((2, "bb", "update"), (1, "back", "insert"), (3, None, "delete"))
    committer.commit(3, written(sink, rows, 3, subtask=2))
    assert found(catalog) == [(1, "back"), (2, "bb"), (5, "e")], "row 3 was deleted before"
    assert second in {task.file.file_path for task in opened(catalog).scan().plan_files()}
    sink.roll_back(OUTPUT, 2, ())
    assert found(catalog) == [(2, "b"), (5, "e")]


def test_deletes_by_equality_are_refused_even_of_other_keys(catalog):
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"), (2, "b", "insert"))))
    field = pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "1"})
    with_deletes(catalog, DataFileContent.EQUALITY_DELETES, pa.table([[2]], schema=pa.schema([field])), [1])
    with pytest.raises(ConfigError, match=r"the table has deletes that pyiceberg cannot read .*compact the table"):
        committer.commit(2, written(sink, users((1, "x", "update")), 2, subtask=1))
    with pytest.raises(ConfigError, match="the table has deletes that pyiceberg cannot read"):  # before anything runs
        new_sink(catalog)


def test_a_table_changes_its_columns_between_checkpoints_and_while_rows_wait(catalog):
    columns = schema_of([("id", pa.int32()), ("name", TEXT), ("x", pa.float32()), ("op", TEXT)])
    sink = new_sink(catalog, columns)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, rows_of(columns, (1, "a", 0.5, "insert"), (2, "b", 1.5, "insert"))))
    held = written(sink, rows_of(columns, (2, "bb", 2.5, "update"), (3, "c", 3.5, "insert")), 2, subtask=1)
    with opened(catalog).update_schema() as change:
        change.rename_column("id", "who")
        change.update_column("id", LongType())
        change.rename_column("name", "said")
        change.delete_column("x")
    with opened(catalog).update_schema() as change:
        change.add_column("name", LongType())
    committer.commit(2, held)
    assert found(catalog) == [(1, "a", None), (2, "bb", None), (3, "c", None)]
    columns = schema_of([("who", pa.int64()), ("name", pa.int64()), ("op", TEXT)])
    now = new_sink(catalog, columns, key=["who"], restoring=True)
    committer = committer_of(now, "job-b")
    rows = rows_of(columns, (1, 10, "update"), (2**40, 20, "insert"), (3, None, "delete"))
    committer.commit(3, written(now, rows, 3, job_id="job-b"))
    assert found(catalog) == [(1, "a", 10), (2**40, None, 20), (2, "bb", None)]


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_table_changes_its_partitioning_between_checkpoints_and_while_rows_wait(catalog, version):
    catalog.create_namespace("lake")
    stored = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    catalog.create_table(NAME, stored, properties={"format-version": version})
    with opened(catalog).update_spec() as change:
        change.add_identity("name")
    sink = new_sink(catalog, partition_by=["name"])
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"), (2, "b", "insert"), (3, "c", "insert"))))
    held = written(sink, users((2, "bb", "update"), (3, None, "delete")), 2, subtask=1)
    with opened(catalog).update_spec() as change:
        change.remove_field("name")
        change.add_field("id", BucketTransform(2), "id_bucket")
    committer.commit(2, held)
    assert found(catalog) == [(1, "a"), (2, "bb")]
    committer.commit(3, written(sink, users((1, "aa", "update"), (4, "d", "insert")), 3, subtask=2))
    assert found(catalog) == [(1, "aa"), (2, "bb"), (4, "d")]
    assert len({task.file.spec_id for task in opened(catalog).scan().plan_files()}) == 1
    assert opened(catalog).scan("id == 4").to_arrow()["name"].to_pylist() == ["d"]


def test_a_column_of_which_older_partitions_are_made_may_be_dropped(catalog):
    columns = schema_of([("id", pa.int64()), ("p", pa.int64()), ("op", TEXT)])
    sink = new_sink(catalog, columns, partition_by=["p"])
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, rows_of(columns, (1, 1, "insert"), (2, 2, "insert"))))
    with opened(catalog).update_spec() as change:
        change.remove_field("p")
    with opened(catalog).update_schema() as change:
        change.delete_column("p")
    narrow = schema_of([("id", pa.int64()), ("op", TEXT)])
    now = new_sink(catalog, narrow, restoring=True)
    rows = rows_of(narrow, (1, "delete"), (2, "update"), (3, "insert"))
    committer_of(now, "job-b").commit(2, written(now, rows, 2, job_id="job-b"))
    assert set(opened(catalog).scan().to_arrow()["id"].to_pylist()) == {2, 3}


def test_a_key_column_that_is_dropped_while_rows_wait_is_named(catalog):
    sink = new_sink(catalog)
    held = written(sink, users((1, "a", "insert")))
    with opened(catalog).update_schema() as change:
        change.delete_column("id")
    with pytest.raises(ConfigError, match="key column 'id' was dropped from the table"):
        committer_of(sink, "job-a").commit(1, held)


def test_a_column_that_was_made_required_since_is_not_given_a_null(catalog):
    sink = new_sink(catalog)
    held = written(sink, users((1, None, "insert"), (2, None, "delete")))
    with opened(catalog).update_schema(allow_incompatible_changes=True) as change:
        change.update_column("name", required=True)
    with pytest.raises(SchemaError, match="column 'name' of the table must have a value now"):
        committer_of(sink, "job-a").commit(1, held)
    sink = new_sink(catalog, restoring=True)
    committer_of(sink, "job-b").commit(1, written(sink, users((3, None, "delete"), (4, "d", "insert")), job_id="job-b"))
    assert found(catalog) == [(4, "d")]


@pytest.mark.parametrize(
    "kind", [UUIDType(), MapType(key_id=8, key_type=StringType(), value_id=9, value_type=StringType())]
)
def test_a_table_with_a_column_that_would_not_stay_as_it_is_is_refused(catalog, kind):
    catalog.create_namespace("lake")
    catalog.create_table(NAME, Schema(*(NestedField(n, name, each) for n, (name, each) in enumerate([("id", LongType()), ("name", StringType()), ("u", kind)], 1))))  # fmt: skip
    with pytest.raises(ConfigError, match=r"column 'u' of the table has the type .*drop the column, or leave key out"):
        new_sink(catalog)


def test_a_value_that_no_partition_can_have_fails_before_the_checkpoint(catalog):
    columns = schema_of([("id", pa.decimal128(38, 0)), ("op", TEXT)])
    sink = new_sink(catalog, columns, partition_by=["truncate(2, id)"])
    error = failure_of(sink, rows_of(columns, (Decimal(1), "insert"), (Decimal("-" + "9" * 38), "insert")))
    assert isinstance(error, SchemaError)
    assert f"has the value -{'9' * 38}, and the partition field truncate[2] of it is less than any" in str(error)
    assert waiting(catalog) == []
