"""The changes of a table on a real server: each once and in their order, from any offset, and what is refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from test_postgres_query import VALUES, run

from machine import limit_s
from midstream import Environment, testing
from midstream.connectors import PostgresChangesSource, PostgresQuery
from midstream.connectors.postgres import change_reader, postgres_changes, table_snapshot
from midstream.connectors.postgres.change_offsets import LogPosition
from midstream.connectors.postgres.change_reader import ChangesSplit
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import ConfigError, DataError, MidstreamError, SchemaError, StorageError
from midstream.engine.operators.source_api import DiscoveryContext, Split, SplitReader
from postgres_server import PASSWORD, Server
from waiting import until

SLOT = "changes"
CONTEXT = DiscoveryContext("in", 1, None)


def ask(database: str, query: str) -> list[Any]:
    with psycopg.connect(database, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


def drop_all(database: str) -> None:
    """Drop slots and publications, which outlive tables."""
    run(database, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
    until("no slot is in use", lambda: not ask(database, "SELECT 1 FROM pg_replication_slots WHERE active"))
    ask(database, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    for (name,) in ask(database, "SELECT quote_ident(pubname) FROM pg_publication"):
        run(database, f"DROP PUBLICATION {name}")


@pytest.fixture
def db(database: str) -> Iterator[str]:
    drop_all(database)
    run(database, "CREATE TABLE t (id int8 PRIMARY KEY, x text)")
    yield database
    drop_all(database)


class Reading:
    """A source, whose one split is read from its beginning or from an offset."""

    def __init__(self, source: PostgresChangesSource, path: Path) -> None:
        self.source = source
        source.prepare("in", str(path), False)
        self.split = first_split(source)
        self.reader: SplitReader | None = None
        self.offset = 0
        self.rows: list[dict[str, Any]] = []

    def read(self, rows_max: int = 1000) -> int:
        if self.reader is None:
            split = msgspec.structs.replace(self.split, offset=self.offset)
            self.reader = self.source.open_split(split)
        found = self.reader.read(rows_max)
        assert found is not None
        batch, self.offset = found
        assert batch.schema == self.source.schema
        self.rows += batch.to_pylist()
        return batch.num_rows

    def read_until(self, count: int, rows_max: int = 1000) -> list[dict[str, Any]]:
        until(f"{count} rows", lambda: self.read(rows_max) >= 0 and len(self.rows) >= count)
        return self.rows

    def restart(self) -> None:
        """Go on with another reader, from the offset."""
        if self.reader is not None:
            self.reader.close()
        self.reader = None

    def complete(self) -> None:
        """A checkpoint at the offset is completed, and the server has taken note."""
        assert self.reader is not None
        self.reader.checkpointed(self.offset)
        self.read()


def first_split(source: PostgresChangesSource) -> Split:
    found: list[Split] = []
    until("the split", lambda: bool(found.extend(source.discover(None, CONTEXT).splits) or found))
    return found[0]


@pytest.fixture
def reading(db: str, tmp_path: Path) -> Iterator[Any]:
    """Begin to read a table."""
    made: list[Reading] = []

    def begin(table: str = "t", **options: Any) -> Reading:
        made.append(Reading(PostgresChangesSource(db, table, **{"slot": SLOT, **options}), tmp_path))
        return made[-1]

    yield begin
    for each in made:
        each.restart()
        each.source.close()


def ops(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [(row["_op"], *(row[name] for name in columns or ("id", "x"))) for row in rows]


# ---- rows -------------------------------------------------------------------


def test_the_rows_of_the_table_come_first_and_then_each_change(db, reading):
    run(db, "INSERT INTO t VALUES (1, 'a'), (2, NULL), (3, '')")
    read = reading()
    run(db, "INSERT INTO t VALUES (4, E'line\\nend \\\\ \"quoted\"')")
    run(db, "UPDATE t SET x = 'b' WHERE id = 1; DELETE FROM t WHERE id = 2; UPDATE t SET id = 5 WHERE id = 3")
    assert ops(read.read_until(8)) == [
        ("insert", 1, "a"),
        ("insert", 2, None),
        ("insert", 3, ""),
        ("insert", 4, 'line\nend \\ "quoted"'),
        ("update", 1, "b"),
        ("delete", 2, None),
        ("delete", 3, None),
        ("insert", 5, ""),
    ]


def test_names_may_need_quotes(db, reading):
    run(db, """CREATE TABLE "O'Neil ""x" (id int PRIMARY KEY, "a, b" text)""")
    read = reading("O'Neil \"x", publication='it\'s "one"')
    run(db, """INSERT INTO "O'Neil ""x" VALUES (1, 'y')""")
    assert ops(read.read_until(1), "a, b") == [("insert", "y")]


def test_without_a_snapshot_only_changes_come(db, reading):
    run(db, "INSERT INTO t VALUES (1, 'a')")
    read = reading(snapshot=False)
    run(db, "INSERT INTO t VALUES (2, 'b')")
    assert ops(read.read_until(1)) == [("insert", 2, "b")]


def test_with_the_whole_row_as_identity_a_delete_has_it(db, reading):
    run(db, "ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    read = reading()
    run(db, "UPDATE t SET x = 'c' WHERE id = 1; UPDATE t SET id = 3 WHERE id = 1; DELETE FROM t WHERE id = 2")
    changes = [("update", 1, "c"), ("delete", 1, "c"), ("insert", 3, "c"), ("delete", 2, "b")]
    assert ops(read.read_until(6))[2:] == changes


def test_without_a_key_the_whole_row_identifies(db, reading):
    run(db, "CREATE TABLE k (n int, x text); ALTER TABLE k REPLICA IDENTITY FULL; INSERT INTO k VALUES (1, 'a')")
    read = reading("k")
    run(db, "UPDATE k SET x = 'b'; UPDATE k SET x = 'b'")
    changes = [("insert", 1, "a"), ("delete", 1, "a"), ("insert", 1, "b"), ("update", 1, "b")]
    assert ops(read.read_until(4), "n", "x") == changes


def test_a_table_of_one_column_keeps_null_and_empty_text_apart(db, reading):
    run(db, "CREATE TABLE k (x text); ALTER TABLE k REPLICA IDENTITY FULL; INSERT INTO k VALUES (NULL), (''), (E'\\r')")
    read = reading("k")
    run(db, "DELETE FROM k WHERE x IS NULL OR x = ''")
    values = ["insert", None], ["insert", ""], ["insert", "\r"], ["delete", None], ["delete", ""]
    assert ops(read.read_until(5), "x") == [tuple(each) for each in values]


def test_a_unique_index_can_be_the_identity(db, reading):
    run(db, "CREATE TABLE k (n int NOT NULL, x text); CREATE UNIQUE INDEX i ON k (n)")
    run(db, "ALTER TABLE k REPLICA IDENTITY USING INDEX i; INSERT INTO k VALUES (1, 'a')")
    read = reading("k", columns=["n"])
    run(db, "UPDATE k SET n = 2; DELETE FROM k")
    changes = [("insert", 1), ("delete", 1), ("insert", 2), ("delete", 2)]
    assert ops(read.read_until(4), "n") == changes


def test_columns_that_an_index_only_includes_are_no_part_of_the_key(db, reading):
    run(db, "CREATE TABLE k (n int, x text, PRIMARY KEY (n) INCLUDE (x)); INSERT INTO k VALUES (1, 'a')")
    read = reading("k", columns=["n"])
    run(db, "UPDATE k SET x = 'b'; DELETE FROM k")
    assert ops(read.read_until(3), "n") == [("insert", 1), ("update", 1), ("delete", 1)]


@pytest.mark.parametrize("is_key_full", [False, True])
def test_values_that_are_stored_apart_are_never_lost(db, reading, is_key_full):
    run(db, "ALTER TABLE t ALTER x SET STORAGE EXTERNAL, ADD n int")
    if is_key_full:
        run(db, "ALTER TABLE t REPLICA IDENTITY FULL")
    run(db, "INSERT INTO t VALUES (1, repeat('x', 9000), 1)")
    read = reading()
    run(db, "UPDATE t SET n = 2")
    if is_key_full:
        assert ops(read.read_until(2), "id", "x", "n")[1] == ("update", 1, "x" * 9000, 2)
        return
    with pytest.raises(DataError, match=r"column 'x', which is stored apart .*ALTER TABLE … REPLICA IDENTITY FULL"):
        read.read_until(2)
    other = reading(columns=["id", "n"], slot="other")
    run(db, "UPDATE t SET n = 3")
    assert ops(other.read_until(2), "id", "n") == [("insert", 1, 2), ("update", 1, 3)]


MORE_VALUES: list[tuple[str, str, pa.DataType, Any]] = [
    ("1::numeric", "numeric", pa.large_string(), "1"),
    ("'{\"a\": 1}'::json", "json", pa.large_string(), '{"a": 1}'),
    ("'{1,NULL}'::int4[]", "int4[]", pa.large_string(), "{1,NULL}"),
    ("'f47ac10b-58cc-4372-a567-0e02b2c3d479'::uuid", "uuid", pa.large_string(), "f47ac10b-58cc-4372-a567-0e02b2c3d479"),
    ("'sad'::mood", "mood", pa.large_string(), "sad"),
    ("7::small", "small", pa.int16(), 7),
    ("1.25::price", "price", pa.decimal128(9, 2), None),
]


def test_values_have_the_types_of_a_query_in_the_snapshot_and_in_changes(db, reading):
    run(db, "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN small AS int2; CREATE DOMAIN price AS numeric(9, 2)")
    run(db, "CREATE TABLE v AS SELECT " + ", ".join(f"{value} AS c{n}" for n, (value, _, _) in enumerate(VALUES)))
    run(db, "ALTER TABLE v ADD id int8 PRIMARY KEY GENERATED ALWAYS AS IDENTITY")
    for n, (value, kind, _, _) in enumerate(MORE_VALUES):
        run(db, f"ALTER TABLE v ADD m{n} {kind}; UPDATE v SET m{n} = {value}")
    run(db, "ALTER DATABASE test SET datestyle = 'German'; ALTER DATABASE test SET intervalstyle = 'iso_8601'")
    run(db, "ALTER DATABASE test SET timezone = 'Asia/Tokyo'; ALTER DATABASE test SET bytea_output = 'escape'")
    read = reading("v")
    names = [name for name in read.source.schema.names if name.startswith("c")]
    assert [read.source.schema.field(name).type for name in names] == [kind for _, kind, _ in VALUES]
    assert [read.source.schema.field(f"m{n}").type for n in range(len(MORE_VALUES))] == [m[2] for m in MORE_VALUES]
    run(db, "UPDATE v SET c0 = NOT c0")
    run(db, "ALTER DATABASE test RESET ALL")
    expected = [PostgresQuery(db, f"SELECT {', '.join(names)} FROM v").load().to_pylist()[0]]
    snapshot, change = read.read_until(2)
    for row in (snapshot, change):
        assert repr([row[name] for name in names[1:]]) == repr([expected[0][name] for name in names[1:]])  # NaN
        for n, (_, _, _, value) in enumerate(MORE_VALUES[:-1]):
            assert row[f"m{n}"] == value
        assert str(row["m6"]) == "1.25"
    assert (snapshot["c0"], change["c0"]) == (True, False)


@pytest.mark.parametrize(
    "interval", ["1 year 2 mons -3 days +04:05:06.7", "-00:00:00.000001", "1000000:00:00", "0", "-1 mons +1 day -1:00"]
)
def test_intervals_are_those_of_a_query(db, reading, interval):
    run(db, f"CREATE TABLE v (id int PRIMARY KEY, i interval); INSERT INTO v VALUES (1, '{interval}')")
    assert reading("v").read_until(1)[0]["i"] == PostgresQuery(db, "SELECT i FROM v").load().to_pylist()[0]["i"]


@pytest.mark.parametrize(
    "value", ["'infinity'::timestamp", "'0044-03-15 BC'::date", "'24:00'::time", "'NaN'::numeric(5, 1)"]
)
def test_a_value_without_a_form_is_named_with_its_column(db, reading, value):
    run(db, f"CREATE TABLE v AS SELECT 1 AS id, {value} AS bad LIMIT 0; ALTER TABLE v ADD PRIMARY KEY (id)")
    read = reading("v")
    run(db, f"INSERT INTO v VALUES (1, {value})")
    with pytest.raises(DataError, match=r"PostgresChangesSource of v: before .*: column 'bad': a value has no form as"):
        read.read_until(1)


# ---- exactly once -----------------------------------------------------------


def state_of(rows: list[dict[str, Any]]) -> dict[int, str]:
    """The table that the changes make. Each operation fits what is there."""
    table: dict[int, str] = {}
    for row in rows:
        key = row["id"]
        assert (key in table) == (row["_op"] != "insert"), row
        if row["_op"] == "delete":
            del table[key]
        else:
            table[key] = row["x"]
    return table


def changed_at_random(database: str, seed: int, turns: int) -> None:
    """Transactions of several sizes, some of which are rolled back, or interleaved with others."""
    rng = random.Random(seed)
    with psycopg.connect(database) as one, psycopg.connect(database) as two:
        for turn in range(turns):
            connection = rng.choice((one, two))
            first = seed * 100_000 + rng.randrange(40)
            try:
                connection.execute("SET lock_timeout = '50ms'")
                for _ in range(rng.randrange(1, 30)):
                    key = seed * 100_000 + rng.randrange(40)
                    match rng.randrange(5):
                        case 0:
                            connection.execute("DELETE FROM t WHERE id = %s", [key])
                        case 1:
                            connection.execute(
                                "UPDATE t SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM t WHERE id = %s)",
                                [first, key, first],
                            )
                        case _:
                            connection.execute(
                                "INSERT INTO t VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET x = EXCLUDED.x",
                                [key, f"{turn} {rng.random()}"],
                            )
                connection.rollback() if rng.random() < 0.3 else connection.commit()
            except psycopg.Error:
                connection.rollback()


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_writers_readers_that_are_replaced_and_checkpoints_lose_and_repeat_nothing(db, reading, seed):
    rng = random.Random(seed)
    run(db, "INSERT INTO t SELECT n, 'old' FROM generate_series(0, 39) n")
    writers = [threading.Thread(target=changed_at_random, args=(db, number, 120)) for number in range(3)]
    for writer in writers:
        writer.start()
    read = reading()
    while any(writer.is_alive() for writer in writers):
        read.read(rng.choice((1, 3, 10, 1000)))
        if rng.random() < 0.1:
            read.complete()
        if rng.random() < 0.1:
            read.restart()
    expected = dict(ask(db, "SELECT id, x FROM t"))
    until("all changes", lambda: read.read() >= 0 and state_of(read.rows) == expected)
    assert read.read() == 0


def test_reading_resumes_at_each_change_of_a_transaction_also_of_one_larger_than_an_exact_offset(db, reading):
    read = reading()
    run(db, "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 20000) n; INSERT INTO t VALUES (0, 'last')")
    offsets: list[tuple[int, int]] = [(0, 0)]
    while len(read.rows) < 20_001:
        before = read.offset
        read.read(997)
        if read.offset != before:
            offsets.append((len(read.rows), read.offset))
    keys = [*range(1, 20_001), 0]
    assert [row["id"] for row in read.rows] == keys
    assert len(offsets) > 20
    for done, offset in offsets[::4]:
        read.restart()
        read.rows, read.offset = [], offset
        read.read_until(20_001 - done)
        assert [row["id"] for row in read.rows] == keys[done:]


def test_both_rows_of_a_changed_key_are_in_one_batch(db, reading):
    run(db, "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 10) n")
    read = reading(snapshot=False)
    run(db, "UPDATE t SET id = -id")
    for rows_max in (3, 5, 1, 2, 2):
        before = len(read.rows)
        until("rows", partial(read.read, rows_max))
        batch = read.rows[before:]
        assert len(batch) % 2 == 0
        read.restart()
    assert [row["id"] for row in read.read_until(20)] == [sign * n for n in range(1, 11) for sign in (1, -1)]


def test_the_server_forgets_only_what_a_completed_checkpoint_holds(db, reading):
    read = reading()
    begin = confirmed(db)
    run(db, "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 100) n")
    run(db, "INSERT INTO t VALUES (0, 'y')")
    until("50 rows", lambda: read.read(50 - len(read.rows)) >= 0 and len(read.rows) == 50)  # a batch may end early
    inside = read.offset
    read.read_until(101)
    assert confirmed(db) == begin
    assert read.reader is not None
    read.reader.checkpointed(inside)
    read.read()
    until("the server has taken note", lambda: confirmed(db) > begin)
    end = read.offset
    read.restart()
    read.rows, read.offset = [], inside
    assert len(read.read_until(51)) == 51
    read.offset = end
    read.complete()
    until("the server has taken note", lambda: read.read() == 0 and confirmed(db) > begin)
    kept = confirmed(db)
    read.restart()
    until("the slot is free", lambda: not ask(db, "SELECT 1 FROM pg_replication_slots WHERE active"))
    assert kept == confirmed(db)
    read.rows, read.offset = [], inside
    with pytest.raises(
        ConfigError, match=r"position 0/[0-9A-F]+, after change 50 of a transaction of the server's log, .* before 0/"
    ):
        read.read()


def confirmed(database: str) -> str:
    [(lsn,)] = ask(database, "SELECT confirmed_flush_lsn FROM pg_replication_slots")
    return str(lsn)


def test_a_table_without_changes_does_not_hold_the_log_of_others(db, reading):
    run(db, "CREATE TABLE other (n int)")
    read = reading()
    read.read()
    begin = confirmed(db)
    run(db, "INSERT INTO other SELECT generate_series(1, 10000)")
    [(end,)] = ask(db, "SELECT pg_current_wal_lsn()::text")
    place = f"'{end}'"

    def is_past() -> bool:
        read.complete()
        return bool(ask(db, f"SELECT confirmed_flush_lsn >= {place} FROM pg_replication_slots")[0][0])

    until("the slot has moved", is_past)
    assert not read.rows
    assert confirmed(db) != begin


def test_a_server_that_is_restarted_is_waited_for(db, reading, postgres_server):
    read = reading()
    run(db, "INSERT INTO t VALUES (1, 'a')")
    read.read_until(1)
    postgres_server.stop()
    until("the loss is noticed", lambda: read.read() == 0 and read.reader._stream is None)
    assert read.read() == 0
    postgres_server.start()
    run(db, "INSERT INTO t VALUES (2, 'b')")
    assert ops(read.read_until(2)) == [("insert", 1, "a"), ("insert", 2, "b")]


def test_the_contract_of_a_source_is_kept(db, tmp_path, monkeypatch):
    monkeypatch.setattr(table_snapshot, "BATCH_BYTES", 30)
    monkeypatch.setattr(table_snapshot, "FILE_ROWS", 6)
    run(db, "INSERT INTO t SELECT n, 'x' || n FROM generate_series(1, 20) n")
    source = PostgresChangesSource(db, "t", slot=SLOT)
    source.prepare("in", str(tmp_path), False)
    found = testing.check_source(source, discoveries=2)
    assert sorted(to_list(found.column("id"))) == list(range(1, 21))
    files = sorted(tmp_path.glob("plans/in/changes/*/*.parquet"))
    assert len(files) >= 3


# ---- the first discovery ----------------------------------------------------

STEPS = ("find_replicated_table", "ensure_publication", "check_publication", "copy_snapshot")


def main(database: str, path: str, step: str, after: str) -> None:
    """Die before or after a step of the first discovery."""
    from midstream.connectors.postgres.replication_stream import ReplicationConnection

    source = PostgresChangesSource(database, "t", slot=SLOT)
    source.prepare("in", path, False)
    owner: Any = (
        ReplicationConnection
        if step == "create_slot"
        else table_snapshot.SlotRecords
        if step == "add"
        else postgres_changes
    )
    original = getattr(owner, step)

    def dying(*args: Any, **options: Any) -> Any:
        if after:
            result = original(*args, **options)
            if step == "copy_snapshot":
                list(result)
        os._exit(9)

    setattr(owner, step, dying)
    first_split(source)


@pytest.mark.parametrize("after", ["", "after"])
@pytest.mark.parametrize("step", [*STEPS, "create_slot", "add"])
def test_a_driver_that_dies_in_the_first_discovery_leaves_nothing_in_the_way(db, reading, tmp_path, step, after):
    run(db, "INSERT INTO t VALUES (1, 'a')")
    paths = os.pathsep.join(str(path) for path in sys.path)
    killed = subprocess.run(
        [sys.executable, __file__, db, str(tmp_path), step, after],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=limit_s(60),
        check=False,
    )
    assert killed.returncode == 9
    run(db, "UPDATE t SET x = 'b'")
    read = reading()
    run(db, "UPDATE t SET x = 'c'")
    assert ops(read.read_until(2)) == [("insert", 1, "b"), ("update", 1, "c")]
    assert len(ask(db, "SELECT 1 FROM pg_replication_slots")) == 1


def test_a_restart_without_a_checkpoint_reads_the_same_rows_while_the_slot_has_their_changes(db, reading):
    run(db, "INSERT INTO t VALUES (1, 'a')")
    read = reading()
    run(db, "UPDATE t SET x = 'b'")
    assert first_split(read.source) == read.split
    read.read_until(2)
    read.complete()
    until("the server has taken note", lambda: read.read() == 0 and not read.source._copy.is_usable())
    read.restart()
    read.split, read.rows, read.offset = first_split(read.source), [], 0
    assert ops(read.read_until(1)) == [("insert", 1, "b")]


def test_snapshots_are_deleted_after_a_checkpoint_that_does_not_need_them(db, reading, tmp_path):
    run(db, "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    read = reading()
    position = read.source.discover(None, CONTEXT).position

    def files_after_checkpoint() -> int:
        split = msgspec.structs.replace(read.split, offset=read.offset)
        read.source.checkpoint_completed(position, [split])
        return len(list(tmp_path.glob("plans/in/changes/*/*.parquet")))

    read.read_until(1, 1)
    assert files_after_checkpoint() == 1
    read.read_until(2)
    assert files_after_checkpoint() == 1
    run(db, "DELETE FROM t WHERE id = 1")
    read.read_until(3)
    assert files_after_checkpoint() == 0


def test_a_failed_copy_drops_its_slot(db, reading):
    run(db, "CREATE TABLE v (id int PRIMARY KEY, at timestamp); INSERT INTO v VALUES (1, 'infinity')")
    with pytest.raises(DataError, match="column 'at'"):
        reading("v")
    assert ask(db, "SELECT 1 FROM pg_replication_slots") == []


# ---- what is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "options", "why"),
    [
        ("", {"table": "none"}, "there is no such table"),
        ("CREATE VIEW w AS SELECT 1", {"table": "w"}, "not an ordinary table"),
        ("CREATE UNLOGGED TABLE w (n int PRIMARY KEY)", {"table": "w"}, "not an ordinary table"),
        (
            "CREATE TABLE w (n int)",
            {"table": "w"},
            'has no primary key.*ALTER TABLE "public"."w" REPLICA IDENTITY FULL',
        ),
        ("CREATE TABLE w (n int PRIMARY KEY DEFERRABLE)", {"table": "w"}, "has no primary key that is not deferrable"),
        (
            "CREATE TABLE w (n int, m int GENERATED ALWAYS AS (n * 2) STORED, PRIMARY KEY (n, m))",
            {"table": "w"},
            'column \'m\' of its key is generated.*ALTER TABLE "public"."w" REPLICA IDENTITY USING INDEX',
        ),
        (
            "CREATE TABLE w (m int GENERATED ALWAYS AS (1) STORED NOT NULL UNIQUE); ALTER TABLE w REPLICA IDENTITY USING INDEX w_m_key",
            {"table": "w"},
            "column 'm' of its key is generated",
        ),
        ("ALTER TABLE t REPLICA IDENTITY NOTHING", {}, "has no replica identity"),
        ("", {"columns": ["id", "y"]}, "no column 'y'"),
        ("", {"columns": ["x"]}, "leaves out 'id', which belongs to the key"),
        ("ALTER TABLE t ADD _op int", {}, "column '_op' has the name"),
        ("", {"slot": "Not-a-name"}, "is not a name of a replication slot"),
        ("", {"schema": "none"}, "there is no such table"),
        ("", {"rows_per_s": 0}, "rows_per_s"),
    ],
)
def test_what_cannot_be_read_is_refused_when_the_source_is_made(db, sql, options, why):
    if sql:
        run(db, sql)
    with pytest.raises(MidstreamError, match=why) as caught:
        PostgresChangesSource(db, **{"table": "t", "slot": SLOT, **options})
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELECT pg_create_logical_replication_slot('changes', 'pgoutput')", "exists, and was not made by this job"),
        ("CREATE PUBLICATION changes", 'does not have the table: ALTER PUBLICATION "changes" ADD TABLE'),
        ("CREATE PUBLICATION changes FOR TABLE t WITH (publish = 'insert')", "leaves out some operations"),
        ("CREATE PUBLICATION changes FOR TABLE t WHERE (id > 1)", "has a WHERE clause"),
        ("CREATE PUBLICATION changes FOR TABLE t (id)", "leaves out column 'x'"),
    ],
)
def test_a_slot_or_publication_of_others_is_refused(db, reading, sql, why):
    run(db, sql)
    with pytest.raises(ConfigError, match=why):
        reading()


def test_a_slot_of_another_database_stays(db, reading, postgres_server):
    reading().source.close()
    run(db, "SELECT pg_drop_replication_slot('changes')")
    run(postgres_server.dsn(), "SELECT pg_create_logical_replication_slot('changes', 'pgoutput')")
    with pytest.raises(ConfigError, match="exists, and was not made by this job"):
        reading()
    assert ask(db, "SELECT database FROM pg_replication_slots") == [("postgres",)]


def test_limits_of_the_database_on_statements_do_not_end_the_copy(db, reading, monkeypatch):
    run(db, "ALTER DATABASE test SET statement_timeout = '1h'; INSERT INTO t VALUES (1, 'a')")
    copy, limits = postgres_changes.copy_snapshot, []

    def seen(connection: Any, *args: Any) -> Any:
        limits.append(connection.execute("SHOW statement_timeout").fetchone())
        return copy(connection, *args)

    monkeypatch.setattr(postgres_changes, "copy_snapshot", seen)
    assert ops(reading().read_until(1)) == [("insert", 1, "a")]
    assert limits == [("0",)]


def test_a_job_needs_a_checkpoint_directory(db):
    stream = Environment("doc").read_postgres_changes(db, "t", slot=SLOT).uid("in")
    with pytest.raises(ConfigError, match=r"the job has no checkpoint directory"):
        stream.preview()
    assert ask(db, "SELECT 1 FROM pg_replication_slots") == []
    assert PASSWORD not in repr(PostgresChangesSource(db, "t", slot=SLOT).__dict__["_changes"])


def test_a_user_without_the_right_to_replicate_is_told(db, postgres_server, tmp_path):
    run(db, "DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN PASSWORD 'x'; GRANT SELECT ON t TO reader")
    run(db, "GRANT CREATE ON DATABASE test TO reader")
    source = PostgresChangesSource(postgres_server.dsn("test", "reader", "x"), "t", slot=SLOT)
    source.prepare("in", str(tmp_path), False)
    with pytest.raises(MidstreamError, match=r"(?i)replication"):
        first_split(source)
    run(db, "REVOKE ALL ON t FROM reader; REVOKE ALL ON DATABASE test FROM reader; DROP ROLE reader")


def test_truncate_ends_the_job_and_says_what_to_use(db, reading):
    run(db, "INSERT INTO t VALUES (1, 'a')")
    read = reading()
    run(db, "TRUNCATE t")
    with pytest.raises(DataError, match=r"TRUNCATE has deleted all rows .* use DELETE"):
        read.read_until(2)


@pytest.mark.parametrize(
    ("alteration", "why"),
    [
        ("ALTER TABLE t DROP x", "the table has no column 'x'"),
        ("ALTER TABLE t ALTER x TYPE int USING 1", "column 'x' is not text, as it was"),
        ("ALTER TABLE t RENAME x TO y", "the table has no column 'x'"),
    ],
)
def test_a_column_that_is_gone_or_another_ends_the_job_at_its_position(db, reading, alteration, why):
    read = reading()
    run(db, "INSERT INTO t VALUES (1, 'a')")
    run(db, alteration)
    run(db, "INSERT INTO t VALUES (2)")
    with pytest.raises(SchemaError, match=rf"committed at [0-9A-F]+/[0-9A-F]+: {why}.*; choose others with columns="):
        read.read_until(2)
    assert ops(read.rows) in ([("insert", 1, "a")], [])


def test_a_column_that_is_added_is_ignored_and_a_table_may_be_renamed(db, reading):
    read = reading()
    run(db, "ALTER TABLE t ADD y int; INSERT INTO t VALUES (1, 'a', 7)")
    run(db, "ALTER TABLE t RENAME TO u; UPDATE u SET x = 'b'")
    assert ops(read.read_until(2)) == [("insert", 1, "a"), ("update", 1, "b")]
    position = read.source.discover(None, CONTEXT).position
    assert read.source.discover(position, CONTEXT).splits == ()


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELECT pg_drop_replication_slot('changes')", "the replication slot 'changes' no longer exists"),
        (
            "SELECT pg_drop_replication_slot('changes'), pg_create_logical_replication_slot('changes', 'test_decoding')",
            "is of the plugin test_decoding",
        ),
        ("DROP TABLE t", "the table was dropped"),
        ("DROP TABLE t; CREATE TABLE t (id int8 PRIMARY KEY, x text)", "the table was dropped"),
        ("ALTER TABLE t REPLICA IDENTITY NOTHING", "has no replica identity"),
        ("DROP PUBLICATION changes", "the publication 'changes' no longer exists"),
        (
            "DROP PUBLICATION changes; CREATE PUBLICATION changes FOR TABLE ONLY t",
            "changes made in between may be missing",
        ),
        (
            "ALTER PUBLICATION changes DROP TABLE t; ALTER PUBLICATION changes ADD TABLE ONLY t",
            "the publication 'changes' was altered, or the table was taken out of it",
        ),
        (
            "ALTER PUBLICATION changes SET (publish = 'insert'); ALTER PUBLICATION changes SET (publish = 'insert, update, delete, truncate')",
            "the publication 'changes' was altered",
        ),
    ],
)
def test_the_driver_notices_what_readers_may_never_see(db, reading, sql, why):
    read = reading()
    position = read.source.discover(None, CONTEXT).position
    assert read.source.discover(position, CONTEXT).splits == ()
    run(db, sql)
    with pytest.raises(ConfigError, match=why):
        read.source.discover(position, CONTEXT)


def test_a_publication_may_get_other_tables_and_another_owner(db, reading):
    read = reading()
    position = read.source.discover(None, CONTEXT).position
    run(db, "DROP ROLE IF EXISTS owner; CREATE ROLE owner SUPERUSER; CREATE TABLE u (n int)")
    run(db, "ALTER PUBLICATION changes ADD TABLE u; ALTER PUBLICATION changes OWNER TO owner")
    run(db, "ALTER PUBLICATION changes SET TABLE ONLY t")
    assert read.source.discover(position, CONTEXT).splits == ()
    run(db, "DROP PUBLICATION changes; DROP ROLE owner")


@pytest.mark.parametrize(
    "alteration", ["REPLICA IDENTITY USING INDEX u", "DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (n)"]
)
def test_another_replica_identity_that_lacks_the_key_ends_the_job(db, reading, alteration):
    """An update of the key would not have the old one, and a sink with that key would keep both rows."""
    run(db, "ALTER TABLE t ADD n int NOT NULL DEFAULT 1; CREATE UNIQUE INDEX u ON t (n); INSERT INTO t VALUES (1, 'a')")
    read = reading()
    run(db, f"ALTER TABLE t {alteration}; UPDATE t SET id = 2")
    with pytest.raises(SchemaError, match=r"column 'id' belongs to the key .* not to its replica identity \(n\)"):
        read.read_until(2)
    assert ops(read.rows) in ([("insert", 1, "a")], [])


def test_a_server_that_was_set_back_is_refused(db, reading):
    """It would send nothing of what it commits again, up to the position that the job has read."""
    read = reading()
    offsets = msgspec.msgpack.decode(read.split.payload, type=ChangesSplit).offsets
    later = offsets.decode(0).lsn + 2**30
    read.offset = offsets.encode(LogPosition(later))
    with pytest.raises(ConfigError, match=r"log, which now ends at [0-9A-F]+/[0-9A-F]+: the server was set back"):
        read.read()


def test_a_slot_that_is_gone_or_in_use_is_named(db, reading, monkeypatch):
    monkeypatch.setattr(change_reader, "_IN_USE_S", 0.5)
    read = reading()
    run(db, "INSERT INTO t VALUES (1, 'a')")
    read.read_until(1)
    other = read.source.open_split(msgspec.structs.replace(read.split, offset=read.offset))
    with pytest.raises(StorageError, match="another job or program reads the replication slot"):
        until("refused", lambda: other.read(10) is None)
    other.close()
    read.restart()
    until("the slot is free", lambda: not ask(db, "SELECT 1 FROM pg_replication_slots WHERE active"))
    run(db, "SELECT pg_drop_replication_slot('changes')")
    with pytest.raises(ConfigError, match="no longer exists"):
        read.read()


def test_log_that_the_server_has_deleted_is_named(db, reading):
    read = reading()
    run(db, "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    try:
        run(db, "SELECT pg_reload_conf()")

        def is_lost() -> bool:
            run(db, "INSERT INTO t VALUES (1, 'a') ON CONFLICT (id) DO UPDATE SET x = 'b'; SELECT pg_switch_wal()")
            run(db, "CHECKPOINT")
            return bool(ask(db, "SELECT 1 FROM pg_replication_slots WHERE wal_status = 'lost'"))

        until("the log is deleted", is_lost)
        with pytest.raises(ConfigError, match="has deleted log that the replication slot 'changes' needs"):
            read.read()
    finally:
        run(db, "ALTER SYSTEM RESET max_slot_wal_keep_size")
        run(db, "SELECT pg_reload_conf()")


def test_another_server_is_refused(db, reading):
    read = reading()
    split = msgspec.msgpack.decode(read.split.payload, type=ChangesSplit)
    other = msgspec.msgpack.encode(msgspec.structs.replace(split, system="7"))
    read.split = msgspec.structs.replace(read.split, payload=other)
    with pytest.raises(ConfigError, match="connect to that, or start again with --fresh"):
        read.read()


def test_a_slot_that_keeps_much_of_the_log_is_warned_of_once(db, reading, monkeypatch, caplog):
    monkeypatch.setattr(postgres_changes, "_KEPT_BYTES", -1)
    read = reading()
    position = read.source.discover(None, CONTEXT).position
    for _ in range(3):
        read.source.discover(position, CONTEXT)
    assert [record.message.count("of the server's log") for record in caplog.records if "keeps" in record.message] == [
        1
    ]


def test_another_slot_than_that_of_the_checkpoint_is_refused(db, reading):
    position = reading().source.discover(None, CONTEXT).position
    with pytest.raises(ConfigError, match=r"made with slot='changes'"):
        PostgresChangesSource(db, "t", slot="other").discover(position, CONTEXT)


def test_a_server_that_decodes_nothing_is_refused(db, monkeypatch, tmp_path, postgres_server: Server):
    source = PostgresChangesSource(f"{db} options='-c search_path=public'", "t", slot=SLOT)
    with psycopg.connect(db, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_level = replica")
    try:
        postgres_server.stop("fast")
        postgres_server.start()
        with pytest.raises(ConfigError, match="the server has wal_level=replica, and changes need logical"):
            source.prepare("in", str(tmp_path), False)
    finally:
        run(db, "ALTER SYSTEM RESET wal_level")
        postgres_server.stop("fast")
        postgres_server.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
