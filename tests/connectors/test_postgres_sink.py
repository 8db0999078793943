"""The PostgreSQL sink on a real server: what is in the table at each step, and what is refused before any of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from connector_worlds import SCHEMA, Loop, batch, open_writer, prepared, written
from psycopg import sql

from committers import committer_of
from machine import limit_s
from midstream import Environment
from midstream.connectors.postgres import postgres_sink as postgres
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.connectors.postgres.staged_rows import StagedRows
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, MidstreamError, SchemaError, StorageError
from midstream.engine.operators.sink_api import SinkWriter
from midstream.runtime.process.process_slots import ProcessSlots
from postgres_server import PASSWORD, Server
from waiting import until


def ask(database: str, query: str) -> list[Any]:
    with psycopg.connect(database, autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else []


def numbers(database: str, table: str = "numbers") -> list[int]:
    return [n for (n,) in ask(database, f"SELECT n FROM {table} ORDER BY n")]


def staged(database: str) -> list[str]:
    found = ask(database, "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'midstream\\_%'")
    return sorted(name for (name,) in found if name != "midstream_commits")


def new_sink(database: str, schema: pa.Schema = SCHEMA, table: str = "numbers", **options: Any) -> PostgresSink:
    sink = PostgresSink(database, table, **options)
    sink.validate(schema, restoring=False)
    return sink


def failure_of(sink: PostgresSink, rows: pa.RecordBatch) -> MidstreamError:
    loop = Loop()
    writer: SinkWriter = open_writer(sink, rows.schema, loop)
    writer.write(rows)
    loop.run()
    try:
        prepared(writer, 1)
    except MidstreamError as error:
        return error
    raise AssertionError("it was prepared")


# ---- exactly once -----------------------------------------------------------


def test_rows_are_in_the_table_after_the_commit_and_not_before(database):
    sink = new_sink(database)
    committables = written(sink, batch(1, 2, 3)) + written(sink, batch(4, 5), subtask=1)
    assert numbers(database) == []
    assert len(staged(database)) == 2
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(database) == [1, 2, 3, 4, 5]
    assert staged(database) == []


def test_committing_twice_changes_nothing_whoever_does_it(database):
    sink = new_sink(database)
    committables = written(sink, batch(1, 2))
    for job in ("job-a", "job-a", "job-b", "job-b", "job-a"):
        committer_of(sink, job).commit(1, committables)
    assert numbers(database) == [1, 2]


def test_a_commit_is_all_or_nothing(database):
    sink = new_sink(database)
    ask(database, "ALTER TABLE numbers ADD UNIQUE (n)")
    first, second = written(sink, batch(1, 2)), written(sink, batch(2, 3), subtask=1)
    with pytest.raises(
        SchemaError, match=r"cannot commit checkpoint 1: duplicate key .*\(Key \(n\)=\(2\) already exists"
    ):
        committer_of(sink, "job-a").commit(1, first + second)
    assert numbers(database) == []
    assert len(staged(database)) == 2, "they wait until somebody has made room"
    ask(database, "ALTER TABLE numbers DROP CONSTRAINT numbers_n_key")
    committer_of(sink, "job-b").commit(1, first + second)
    assert numbers(database) == [1, 2, 2, 3]


def failing_inserts(database: str, sqlstate: str, times: int) -> None:
    """Let the server end the next transactions that insert, as it ends those that deadlock."""
    ask(
        database,
        f"""
        CREATE SEQUENCE tries;
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('tries') <= {times} THEN RAISE 'ended by a test' USING ERRCODE = '{sqlstate}'; END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER fails AFTER INSERT ON numbers FOR EACH STATEMENT EXECUTE FUNCTION fail();
        """,
    )


@pytest.fixture
def _without_tries(database):
    yield
    ask(database, "DROP TRIGGER fails ON numbers; DROP FUNCTION fail; DROP SEQUENCE tries")


@pytest.mark.usefixtures("_without_tries")
@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "55P03"])
def test_a_commit_that_deadlocks_is_repeated_alone_and_leaves_no_staged_table(database, sqlstate, monkeypatch):
    monkeypatch.setattr(postgres, "_PAUSE_MAX_S", 0.02)
    sink = new_sink(database)
    committables = written(sink, batch(1, 2)) + written(sink, batch(3), subtask=1)
    failing_inserts(database, sqlstate, 7)
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(database) == [1, 2, 3]
    assert staged(database) == []


@pytest.mark.usefixtures("_without_tries")
@pytest.mark.parametrize(("sqlstate", "error", "tries"), [("23505", SchemaError, 1), ("57014", StorageError, 1)])
def test_a_commit_that_fails_for_another_reason_is_not_repeated_here(database, sqlstate, error, tries):
    sink = new_sink(database)
    failing_inserts(database, sqlstate, 100)
    with pytest.raises(error, match="ended by a test"):
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert ask(database, "SELECT last_value FROM tries") == [(tries,)]


@pytest.mark.usefixtures("_without_tries")
def test_a_commit_that_deadlocks_always_ends_after_its_time(database, monkeypatch):
    monkeypatch.setattr(postgres, "_CONFLICTS_S", 0.3)
    sink = new_sink(database)
    failing_inserts(database, "40P01", 1_000_000)
    with pytest.raises(StorageError, match="ended by a test"):
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert len(staged(database)) == 1


def test_an_aborted_checkpoint_leaves_nothing(database):
    sink = new_sink(database)
    committables = written(sink, batch(1))
    committer_of(sink, "job-a").abort(committables)
    committer_of(sink, "job-a").abort(committables)
    assert staged(database) == []
    with pytest.raises(StorageError, match="with 1 rows is missing; only a job may drop such tables"):
        committer_of(sink, "job-a").commit(1, committables)


def test_a_writer_that_is_closed_or_dies_leaves_nothing(database):
    sink, loop = new_sink(database), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    loop.run()
    assert staged(database) == [], "it is in a transaction that is still open"
    writer.close()
    loop.run()
    assert staged(database) == []
    assert ask(database, "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'") == [(0,)]


def test_what_older_attempts_have_staged_is_dropped_once_a_newer_one_commits(database):
    sink = new_sink(database)
    committer = committer_of(sink, "job-a")
    for attempt in (0, 1):
        written(sink, batch(attempt), attempt=attempt)
    others = written(sink, batch(7), job_id="job-of-others")
    newest = written(sink, batch(2), 2, attempt=2)
    later = written(sink, batch(3), 3, attempt=2, subtask=1)
    committer.commit(2, newest)
    assert len(staged(database)) == 2, "what the same attempt has staged since, and what another job has, stays"
    committer.commit(3, later)
    assert numbers(database) == [2, 3]
    committer_of(sink, "job-of-others").commit(1, others)
    assert numbers(database) == [2, 3, 7]


def test_an_old_attempt_can_stage_nothing_after_a_newer_one_has_committed(database):
    sink, loop = new_sink(database), Loop()
    zombie = open_writer(sink, SCHEMA, loop, attempt=0)
    zombie.write(batch(1))
    loop.run()
    committer_of(sink, "job-a").commit(1, written(sink, batch(2), attempt=1))
    with pytest.raises(StorageError, match="a newer attempt than 0 has committed"):
        prepared(zombie, 1)
    assert staged(database) == []
    assert numbers(database) == [2]


def test_a_job_that_another_has_gone_on_from_can_neither_stage_nor_commit(database):
    sink, loop = new_sink(database), Loop()
    zombie = open_writer(sink, SCHEMA, loop, subtask=1)
    zombie.write(batch(0))
    loop.run()
    old, new = committer_of(sink, "job-a"), committer_of(sink, "job-b")
    first, second = written(sink, batch(1), 1), written(sink, batch(2), 2, subtask=2)
    new.commit(1, first)
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        old.commit(2, second)
    with pytest.raises(StorageError, match="a newer attempt"):
        prepared(zombie, 2)
    old.commit(1, first)
    assert numbers(database) == [1]
    new.commit(2, written(sink, batch(3), 2, job_id="job-b"))
    assert staged(database) == [], "no start can resume from what came after checkpoint 1"
    assert numbers(database) == [1, 3]


def test_all_that_a_restored_checkpoint_holds_of_several_is_committed(database):
    sink = new_sink(database)
    old, new = committer_of(sink, "job-a"), committer_of(sink, "job-b")
    held = [written(sink, batch(n), n, subtask=n) for n in (1, 2, 3)]
    old.commit(1, held[0])
    for checkpoint_id, committables in enumerate(held, 1):
        new.commit(checkpoint_id, committables)
    assert numbers(database) == [1, 2, 3]
    for checkpoint_id, committables in enumerate(held, 1):
        committer_of(sink, "job-c").commit(checkpoint_id, committables)
    assert numbers(database) == [1, 2, 3]
    assert staged(database) == []


def test_the_commit_of_a_zombie_waits_for_that_of_its_successor_and_finds_nothing_to_do(database):
    sink = new_sink(database)
    committables = written(sink, batch(1, 2, 3))
    with psycopg.connect(database) as blocker:
        blocker.execute("LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE")
        pool = ThreadPoolExecutor(3)
        commits = [pool.submit(committer_of(sink, job).commit, 1, committables) for job in ("job-a", "job-b", "job-a")]
        blocker.commit()
    for commit in commits:
        commit.result(limit_s(30))
    pool.shutdown()
    assert numbers(database) == [1, 2, 3]


# ---- upserting --------------------------------------------------------------

VISITS = schema_of([("who", pa.large_string()), ("day", pa.int64()), ("visits", pa.int64())])


def visits(*rows: tuple[str | None, int, int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(VISITS.names, row, strict=True)) for row in rows], VISITS)


def test_a_row_replaces_the_one_with_the_same_key_and_the_last_one_stays(database):
    sink = new_sink(database, VISITS, "visits", key=["who", "day"])
    committer = committer_of(sink, "job-a")
    big = visits(*((f"w{i % 10}", 1, i) for i in range(5000)))
    committer.commit(
        1, written(sink, visits(("ann", 1, 1), ("bob", 1, 1), ("ann", 1, 2))) + written(sink, big, subtask=1)
    )
    committer.commit(2, written(sink, visits(("ann", 1, 3), ("ann", 2, None)), 2))
    found = ask(database, "SELECT who, day, visits FROM visits WHERE who NOT LIKE 'w%' ORDER BY 1, 2")
    assert found == [("ann", 1, 3), ("ann", 2, None), ("bob", 1, 1)]
    assert ask(database, "SELECT min(visits), max(visits), count(*) FROM visits WHERE who LIKE 'w%'") == [
        (4990, 4999, 10)
    ]
    assert staged(database) == []


def test_the_last_row_of_a_key_stays_although_long_and_short_rows_fill_pages_out_of_order(database):
    rows = pa.RecordBatch.from_pylist(
        [{"k": i % 3, "n": i, "fill": "x" * (3000 if i % 2 else 10)} for i in range(300)],
        schema_of([("k", pa.int64()), ("n", pa.int64()), ("fill", pa.large_string())]),
    )
    sink = new_sink(database, rows.schema, key=["k"])
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert ask(database, "SELECT k, n FROM numbers ORDER BY k") == [(0, 297), (1, 298), (2, 299)]


def test_rows_that_are_all_key_are_kept_once(database):
    sink = new_sink(database, key=["n"])
    committer_of(sink, "job-a").commit(1, written(sink, batch(1, 2, 2)))
    committer_of(sink, "job-a").commit(2, written(sink, batch(2, 3), 2))
    assert numbers(database) == [1, 2, 3]


def test_a_key_without_a_value_fails_before_the_checkpoint(database):
    sink = new_sink(database, VISITS, "visits", key=["who", "day"])
    error = failure_of(sink, visits((None, 1, 1)))
    assert isinstance(error, SchemaError)
    assert "row 0 since the last checkpoint: key column 'who' is null" in str(error)


def test_a_key_needs_a_unique_constraint_of_just_these_columns(database):
    ask(database, "CREATE TABLE visits (who text, day int8, visits int8, UNIQUE (who, day, visits))")
    with pytest.raises(SchemaError, match=r'ALTER TABLE "public"."visits" ADD UNIQUE \("who", "day"\)'):
        new_sink(database, VISITS, "visits", key=["who", "day"])
    ask(database, "CREATE UNIQUE INDEX ON visits (day, who)")
    new_sink(database, VISITS, "visits", key=["who", "day"])


@pytest.mark.parametrize("kind", ["inet", "cidr", "jsonb", "text COLLATE ci", "anyhow"])
def test_a_key_of_which_several_texts_are_one_to_the_server_needs_one_subtask(database, kind):
    """Rows of such texts come to different subtasks, and the last of them would not be known."""
    ask(database, "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    ask(database, "CREATE DOMAIN anyhow AS inet")
    ask(database, f"CREATE TABLE keyed (day int8, who {kind}, visits int8, PRIMARY KEY (day, who))")
    sink = new_sink(database, VISITS, "keyed", key=["who", "day"])
    sink.check_parallelism(1)
    with pytest.raises(ConfigError, match=r"key column 'who' of table public\.keyed is .*write with parallelism\(1\)"):
        sink.check_parallelism(2)


def test_a_uuid_in_a_key_has_one_form(database):
    ask(database, "CREATE TABLE keyed (who uuid, day int8, visits int8, PRIMARY KEY (day, who))")
    sink, who = new_sink(database, VISITS, "keyed", key=["who", "day"]), "f47ac10b-58cc-4372-a567-0e02b2c3d479"
    sink.check_parallelism(2)
    for other in (who.upper(), who.replace("-", ""), f"{{{who}}}", f"{who}\n"):
        error = failure_of(sink, visits((who, 1, 1), (other, 1, 2)))
        assert isinstance(error, SchemaError)
        assert "row 1 since the last checkpoint: key column 'who' is" in str(error)
        assert "must be in lower case, with hyphens" in str(error)
    committer_of(sink, "job-a").commit(1, written(sink, visits((who, 1, 1), (who, 1, 2))))
    assert ask(database, "SELECT who::text, visits FROM keyed") == [(who, 2)]


# ---- types ------------------------------------------------------------------


def test_values_of_all_types_come_back_as_they_were(database):
    moment = datetime(2024, 2, 29, 23, 59, 59, 123456)
    nasty = 'a,"b"\n\\.\n\r\n\\N\ttab ; é 日本 \x01 NULL'
    columns: dict[str, Any] = {
        "flag": pa.array([True, None]),
        "tiny": pa.array([-128, None], pa.int8()),
        "small": pa.array([255, None], pa.uint8()),
        "whole": pa.array([-(2**31), None], pa.int32()),
        "big": pa.array([2**63 - 1, None], pa.int64()),
        "huge": pa.array([2**64 - 1, None], pa.uint64()),
        "half": pa.array([0.5, None], pa.float32()),
        "real": pa.array([0.1 + 0.2, None]),
        "money": pa.array([Decimal("-12345678901234567890.123"), None], pa.decimal128(30, 3)),
        "words": pa.array([nasty, None], pa.large_string()),
        "empty": pa.array(["", None], pa.large_string()),
        "raw": pa.array([b"\x00\xff\\,", None], pa.large_binary()),
        "day": pa.array([date(1, 1, 1), None]),
        "hour": pa.array([time(23, 59, 59, 999999), None], pa.time64("us")),
        "local": pa.array([moment, None], pa.timestamp("us")),
        "moment": pa.array([moment.replace(tzinfo=UTC), None], pa.timestamp("us", "Europe/Berlin")),
        "exact": pa.array([moment, None], pa.timestamp("ns")),
        "lasting": pa.array([timedelta(days=-1, microseconds=7), None], pa.duration("ns")),
        "ints": pa.array([[1, None, -3], None], pa.large_list(pa.int64())),
        "texts": pa.array([['a"b\\', None, "", "NULL", "{,}"], None], pa.large_list(pa.large_string())),
        "floats": pa.array([[0.1, float("inf")], []], pa.large_list(pa.float64())),
        'strange "name", %s': pa.array([1, None]),
    }
    rows = pa.RecordBatch.from_pydict(columns)
    sink = new_sink(database, rows.schema, 'a "table".%s')
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    with psycopg.connect(database) as connection:
        got = connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier('a "table".%s'))).fetchall()
    expected = rows.to_pylist()
    expected[0]["exact"] = moment
    expected[0]["lasting"] = timedelta(days=-1, microseconds=7)
    for column, value in zip(rows.schema.names, got[0], strict=True):
        assert value == expected[0][column], column
    assert [value for value in got[1] if value is not None] == [[]]


def test_floats_that_are_no_numbers_and_a_single_null_column_survive(database):
    rows = pa.RecordBatch.from_pydict({"n": pa.array([float("nan"), float("inf"), float("-inf"), None])})
    sink = new_sink(database, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert str(ask(database, "SELECT n FROM numbers")) == "[(nan,), (inf,), (-inf,), (None,)]"


def test_columns_of_the_table_may_have_types_and_defaults_of_their_own(database):
    ask(
        database,
        """CREATE TYPE mood AS ENUM ('glad', 'sad'); CREATE DOMAIN percent AS numeric(5,2) CHECK (VALUE <= 100);
        CREATE TABLE things (id bigserial PRIMARY KEY, made timestamptz NOT NULL DEFAULT now(), doc jsonb, what mood,
            who uuid, share percent, n integer, twice int8 GENERATED ALWAYS AS (n * 2) STORED)""",
    )
    rows = pa.RecordBatch.from_pydict(
        {
            "n": pa.array([1, 2]),
            "doc": ['{"a": 1}', None],
            "what": ["sad", "glad"],
            "who": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None],
            "share": pa.array([Decimal("99.50"), None], pa.decimal128(4, 2)),
        }
    )
    sink = new_sink(database, rows.schema, "things")
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert ask(database, "SELECT id, doc->>'a', what::text, share, n, twice FROM things ORDER BY id") == [
        (1, "1", "sad", Decimal("99.50"), 1, 2),
        (2, None, "glad", None, 2, 4),
    ]


@pytest.mark.parametrize(
    ("ddl", "rows", "said"),
    [
        ("n integer", {"n": pa.array([2**40])}, r'value "1099511627776" is out of range for type integer .*column n'),
        ("n int8 CHECK (n < 10)", {"n": pa.array([10])}, "violates check constraint"),
        ("n int8 NOT NULL", {"n": pa.array([None], pa.int64())}, "null value"),
        ("n varchar(3)", {"n": pa.array(["long"])}, r"row 0 .*column 'n' is character varying\(3\).*'long'.*too long"),
        (
            "n text",
            {"n": pa.array(["a", "a\0b"])},
            r"row 1 since .*column 'n' is text.* change 'a\\x00b': .*cannot contain NUL",
        ),
        ("n jsonb", {"n": pa.array(["{"])}, "invalid input syntax for type json"),
        ("n timestamp", {"n": pa.array([1], pa.timestamp("ns"))}, "has no form in PostgreSQL.*would lose data"),
        ("n date", {"n": pa.array([65_566 * 365 + 16_000], pa.date32())}, "it is beyond the years 1 to 9999"),
        (
            "n timestamptz",
            {"n": pa.array([65_566 * 31_556_952 * 10**6], pa.timestamp("us", "UTC"))},
            "it is beyond the years 1 to 9999",
        ),
        ("n jsonb", {"n": pa.array(['{"n":' + "1" * 5000 + ',"a":1,"a":2}'])}, "jsonb keeps one of several equal keys"),
        (
            "n jsonb",
            {"n": pa.array(['{"a":1,"a":2,"z":' + "[" * 5000 + "]" * 5000 + "}"])},
            "nested too deeply to check",
        ),
    ],
)
def test_a_value_that_does_not_fit_fails_before_the_checkpoint_is_complete(database, ddl, rows, said):
    ask(database, f"CREATE TABLE numbers ({ddl})")
    rows = pa.RecordBatch.from_pydict(rows)
    error = failure_of(new_sink(database, rows.schema), rows)
    assert isinstance(error, SchemaError), "starting over would not help"
    assert re.search(said, str(error)), str(error)
    assert "operator 'sink out'" in str(error)
    assert staged(database) == []


def test_a_value_that_would_change_is_named_with_its_row_since_the_last_checkpoint(database):
    ask(database, "CREATE TABLE numbers (n timestamp(0))")
    sink, loop = new_sink(database, pa.schema([("n", pa.timestamp("us"))])), Loop()
    good, bad = datetime(2024, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 600001)
    writer = open_writer(sink, pa.schema([("n", pa.timestamp("us"))]), loop)
    for values in ([good] * 3, [good, None, bad]):
        writer.write(pa.RecordBatch.from_pydict({"n": pa.array(values)}))
        loop.run()
    (error,) = loop.failures
    assert isinstance(error, SchemaError)
    assert (
        "operator 'sink out': PostgresSink on numbers: row 5 since the last checkpoint: column 'n' is timestamp(0) without "
        "time zone in the table, which would change '2024-01-01 00:00:00.600001': 0 digits of a second are kept"
    ) in str(error)
    assert staged(database) == []


def test_a_list_that_would_change_is_named_by_its_row(database):
    ask(database, "CREATE TABLE numbers (n varchar(3)[])")
    rows = pa.RecordBatch.from_pydict({"n": pa.array([["a", "b"], None, [], ["abc", "abcd"]])})
    error = failure_of(new_sink(database, rows.schema), rows)
    assert re.search(r"row 3 since .*character varying\(3\)\[\] in the table, which would change 'abcd'", str(error))


def test_a_null_in_a_list_stays_one_whatever_is_set_for_the_role(database):
    ask(database, "CREATE TABLE numbers (n text[]); ALTER ROLE midstream SET array_nulls = off")
    rows = pa.RecordBatch.from_pydict({"n": pa.array([["a", None]])})
    sink = new_sink(database, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert ask(database, "SELECT n[2] IS NULL FROM numbers") == [(True,)]


def test_rows_that_wait_are_kept_when_their_column_is_altered_or_the_commit_is_refused(database):
    rows = pa.RecordBatch.from_pydict({"n": pa.array([Decimal("1.2345"), None]), "k": pa.array([1, 2])})
    ask(database, "CREATE TABLE numbers (n numeric(10,4), k integer)")
    sink = new_sink(database, rows.schema)
    committables = written(sink, rows)
    for kind in ("numeric(10,2)", "numeric(10,4)[] USING ARRAY[n]", "double precision"):
        ask(database, f"ALTER TABLE numbers ALTER n TYPE {kind}")
        with pytest.raises(
            SchemaError, match=r"column 'n' of table public.numbers was numeric\(10,4\) when rows were staged"
        ):
            committer_of(sink, "job-a").commit(1, committables)
        ask(database, "ALTER TABLE numbers DROP n; ALTER TABLE numbers ADD n numeric(10,4)")
    ask(database, "ALTER TABLE numbers ALTER n TYPE numeric(12,6); ALTER TABLE numbers ALTER k TYPE bigint")
    committer_of(sink, "job-a").commit(1, committables)
    assert ask(database, "SELECT n, k FROM numbers ORDER BY k") == [(Decimal("1.234500"), 1), (None, 2)]


@pytest.fixture(params=["DATABASE test", "ROLE midstream", "SYSTEM"])
def other_isolation(database: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Set for the database, the role or the server; in force for new connections."""

    def alter(what: str) -> None:
        ask(database, f"ALTER {request.param} {what}")
        ask(database, "SELECT pg_reload_conf()")

    def level() -> str:
        return str(ask(database, "SHOW default_transaction_isolation")[0][0])

    before = level()
    alter("SET default_transaction_isolation = 'serializable'")
    until("it is set", lambda: level() == "serializable")
    yield
    alter("RESET default_transaction_isolation")
    until("it is reset", lambda: level() == before)


@pytest.mark.usefixtures("other_isolation")
def test_commits_of_others_come_between_whatever_isolation_is_the_default(database):
    sink, loop = new_sink(database), Loop()
    committer = committer_of(sink, "job-a")
    for n in (1, 2, 3):
        writer = open_writer(sink, SCHEMA, loop, subtask=n)
        writer.write(batch(n))
        loop.run()
        committer.commit(n, written(sink, batch(10 * n), n, subtask=10 * n))
        committer.commit(n, prepared(writer, n))
    assert numbers(database) == [1, 2, 3, 10, 20, 30]


@pytest.fixture
def intern(database: str, postgres_server: Server) -> Iterator[str]:
    """The connection string of a role whom limits bind."""
    ask(database, "CREATE ROLE intern LOGIN PASSWORD 'p'; GRANT ALL ON SCHEMA public TO intern")
    yield postgres_server.dsn("test", "intern", "p")
    ask(database, "ALTER DATABASE test CONNECTION LIMIT -1")
    ask(database, "DROP OWNED BY intern; DROP ROLE intern")


def test_a_running_job_waits_for_a_connection_while_all_are_in_use(database, intern, monkeypatch):
    sink, connect_now, refused = new_sink(intern), PostgresSink._connect_now, []

    def connecting(self: PostgresSink, where: str) -> Any:
        try:
            return connect_now(self, where)
        except StorageError as error:
            refused.append(str(error))
            if len(refused) == 2:
                blocker.close()
            raise

    ask(database, "ALTER ROLE intern CONNECTION LIMIT 1")
    monkeypatch.setattr(PostgresSink, "_connect_now", connecting)
    with psycopg.connect(intern) as blocker:
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert numbers(database) == [1]
    assert 'too many connections for role "intern"' in refused[0]


def test_a_connection_is_not_waited_for_without_end_nor_at_the_start(database, intern, monkeypatch):
    sink, tries, connect_now = new_sink(intern), [], PostgresSink._connect_now
    monkeypatch.setattr(postgres, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(
        PostgresSink, "_connect_now", lambda self, where: (tries.append(where), connect_now(self, where))[1]
    )
    ask(database, "ALTER ROLE intern CONNECTION LIMIT 1")
    with psycopg.connect(intern):
        with pytest.raises(StorageError, match=r"cannot connect: .*too many connections for role"):
            PostgresSink(intern, "numbers").validate(SCHEMA, restoring=False)
        assert len(tries) == 1
        assert "too many connections for role" in str(failure_of(sink, batch(1)))
        assert len(tries) > 2


# ---- a sink that writes elsewhere now ---------------------------------------


def test_what_was_staged_for_another_table_is_committed_there_by_its_key(database):
    ask(
        database,
        "CREATE SCHEMA desk; CREATE TABLE numbers (n int8 PRIMARY KEY, k int8); INSERT INTO numbers VALUES (1, 0)",
    )
    keyed = pa.schema([("n", pa.int64()), ("k", pa.int64())])
    old = new_sink(database, keyed, key=["n"], staging_schema="desk")
    committables = written(old, pa.record_batch({"n": [1, 2], "k": [1, 2]}))
    written(old, pa.record_batch({"n": [9], "k": [9]}), 2, subtask=1)  # for no checkpoint that completed
    moved = new_sink(database, table="elsewhere")
    committer = committer_of(moved, "job-b")
    for _ in range(2):
        moved.check_committables(1, committables)
        committer.commit(1, committables)
    committer.commit(2, written(moved, batch(3), 2, job_id="job-b"))
    assert ask(database, "SELECT n, k FROM numbers ORDER BY n") == [(1, 1), (2, 2)]
    assert numbers(database, "elsewhere") == [3]
    assert staged(database) == [], "what was left is dropped with the first commit of the job's own"


def test_a_table_may_be_renamed_while_rows_wait_for_it(database):
    sink = new_sink(database)
    first, second = written(sink, batch(1)), written(sink, batch(2), 2, subtask=1)
    committer_of(sink, "job-a").commit(1, first)
    ask(database, "ALTER TABLE numbers RENAME TO elsewhere")
    renamed = PostgresSink(database, "elsewhere")
    renamed.validate(SCHEMA, restoring=True)
    for checkpoint_id, committables in ((1, first), (2, second)):
        renamed.check_committables(checkpoint_id, committables)
        committer_of(renamed, "job-b").commit(checkpoint_id, committables)
    assert numbers(database, "elsewhere") == [1, 2]


def test_what_was_staged_in_another_database_is_refused_before_anything_runs(database, postgres_server):
    sink = new_sink(database)
    committables = written(sink, batch(1, 2))
    other = new_sink(postgres_server.dsn("template1"), table="numbers_of_another")
    try:
        with pytest.raises(
            StorageError,
            match=r"public\.midstream_.* with 2 rows is missing.*If the sink's database was changed, resume with",
        ):
            other.check_committables(3, committables)
    finally:
        ask(postgres_server.dsn("template1"), "DROP TABLE numbers_of_another, midstream_commits")
    committer_of(sink, "job-a").commit(3, committables)
    sink.check_committables(3, committables)


@pytest.mark.parametrize("table", ["numbers", "midstream_commits", "midstream_0123456789abcdef_0_0_0", "desk.x_0_0_0"])
def test_a_checkpoint_cannot_have_any_other_table_moved_or_dropped(database, table):
    sink = new_sink(database)
    (committable,) = written(sink, batch(1))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=StagedRows), table=table)
    committer = committer_of(sink, "job-b")
    for act in (sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match="is corrupt or forged"):
            act(1, [msgspec.msgpack.encode(crafted)])
    with pytest.raises(StorageError, match="not prepared by a PostgreSQL sink"):
        sink.check_committables(1, [msgspec.msgpack.encode(["id", b"rows"])])


# ---- what is refused at the start -------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "schema", "said"),
    [
        (
            "m int8",
            SCHEMA,
            r"table public.numbers has no column 'n'; it has m\. Add it there \(evolve=True does\), or leave it out",
        ),
        ("n text", SCHEMA, r"column 'n' is int64 in the stream and text in table public.numbers; cast one of them"),
        ("n int8, must int8 NOT NULL", SCHEMA, "column 'must' of table public.numbers must have a value"),
        ("n int8 GENERATED ALWAYS AS IDENTITY", SCHEMA, "is generated by the server"),
        ("n numeric(5,1)", pa.schema([("n", pa.decimal128(5, 2))]), "would round digits"),
        ("n timestamptz", pa.schema([("n", pa.timestamp("us"))]), r"\(timestamp\[us\] fits timestamp\)"),
        ("n real", pa.schema([("n", pa.float64())]), "is double in the stream and real"),
        (
            None,
            pa.schema([("n", pa.struct([("x", pa.int64())]))]),
            "this sink has no PostgreSQL type; cast it .*json_encode",
        ),
        (None, pa.schema([("n", pa.null())]), "for which this sink has no PostgreSQL type"),
        (None, pa.schema([]), "no columns"),
        (
            "n numeric",
            pa.schema([("n", pa.float64())]),
            r"is double in the stream and numeric .*\(double fits double prec",
        ),
        (
            "n interval day",
            pa.schema([("n", pa.duration("us"))]),
            "would drop what is smaller than its fields; make it interval",
        ),
        (None, pa.schema([("c" * 64, pa.int64())]), f"column '{'c' * 64}': it has 64 bytes, .* at most 63; rename it"),
        (None, pa.schema([("é" * 32, pa.int64())]), "it has 64 bytes"),
        (None, pa.schema([("", pa.int64())]), "column '': a column must have a name; rename it"),
        (None, pa.schema([("a\0", pa.int64())]), r"column 'a\\x00': a name has no NUL; rename it"),
        ("n int8", pa.schema([("ctid", pa.int64())]), "column 'ctid': PostgreSQL has a system column of that name"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_runs(database, ddl, schema, said):
    if ddl:
        ask(database, f"CREATE TABLE numbers ({ddl})")
    with pytest.raises(SchemaError, match=said):
        new_sink(database, schema)
    assert staged(database) == []


def test_a_table_with_rows_is_refused_unless_they_are_to_be_added_to(database):
    ask(database, "CREATE TABLE numbers (n int8); INSERT INTO numbers VALUES (0)")
    with pytest.raises(ConfigError, match=r"table public\.numbers is not empty; resume from a checkpoint"):
        new_sink(database)
    PostgresSink(database, "numbers").validate(SCHEMA, restoring=True)
    sink = new_sink(database, append=True)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert numbers(database) == [0, 1]


def test_rights_that_are_missing_are_named_before_anything_runs(database, postgres_server):
    ask(
        database,
        "CREATE ROLE intern LOGIN PASSWORD 'p'; CREATE TABLE numbers (n int8); CREATE SCHEMA desk AUTHORIZATION intern",
    )
    intern = postgres_server.dsn("test", "intern", "p")
    try:
        with pytest.raises(ConfigError, match="permission denied for schema public"):
            PostgresSink(intern, "absent").validate(SCHEMA, restoring=False)
        with pytest.raises(ConfigError, match="permission denied for table numbers"):
            PostgresSink(intern, "numbers", append=True, staging_schema="desk").validate(SCHEMA, restoring=False)
        ask(database, "GRANT INSERT ON numbers TO intern")
        with pytest.raises(ConfigError, match="permission denied for schema public"):
            PostgresSink(intern, "numbers", append=True).validate(SCHEMA, restoring=False)
        sink = PostgresSink(intern, "numbers", append=True, staging_schema="desk")
        sink.validate(SCHEMA, restoring=False)
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
        assert numbers(database) == [1]
    finally:
        ask(database, "DROP OWNED BY intern; DROP ROLE intern")


@pytest.mark.parametrize("what", ["ROLE intern", "DATABASE test"])
def test_fewer_connections_than_the_subtasks_need_are_refused_before_anything_runs(database, intern, what):
    ask(database, f"ALTER {what} CONNECTION LIMIT 5")
    sink = new_sink(intern)
    sink.check_parallelism(2)
    named = what.replace("ROLE", "role").replace("DATABASE", "database")
    with pytest.raises(
        ConfigError,
        match=rf"PostgresSink on numbers: 3 subtasks need up to 7 connections, two each and one to commit, but CONNECTION "
        rf"LIMIT of {named} allows 5; raise it, or write with fewer subtasks: parallelism\(2\)",
    ):
        sink.check_parallelism(3)
    env = Environment("connections", parallelism=3)
    rows = env.generate(lambda i: {"n": i}, count=1).rebalance()
    rows.write_postgres(intern, "numbers").uid("out")
    with pytest.raises(ConfigError, match="3 subtasks need up to 7 connections"):
        env.start(slots=ProcessSlots())
    with pytest.raises(
        ConfigError, match=r"1 subtasks and 2 of other sinks need up to 7 connections.*parallelism\(1\)"
    ):
        sink.check_parallelism(1, [(PostgresSink(intern, "other"), 2), (PostgresSink(database, "third"), 9)])
    PostgresSink(database, "numbers").check_parallelism(3)  # limits do not hold for superusers


def test_more_connections_than_the_server_has_are_refused(database):
    with pytest.raises(
        ConfigError, match=r"2001 connections, .* but max_connections less those reserved allows [0-9]+;"
    ):
        PostgresSink(database, "numbers").check_parallelism(1000)


def test_a_wrong_password_user_or_database_and_no_server_at_all_are_readable(database, postgres_server):
    for dsn, said in (
        (postgres_server.dsn("test", password="guess-7"), 'password authentication failed for user "midstream"'),
        (postgres_server.dsn("nowhere"), 'database "nowhere" does not exist'),
        ("postgresql://midstream:guess-7@127.0.0.1:1/x", "Connection refused"),
    ):
        with pytest.raises(
            StorageError, match=f"PostgresSink on numbers: cannot connect: .*{said}.*Is the server"
        ) as error:
            PostgresSink(dsn, "numbers").validate(SCHEMA, restoring=False)
        assert "guess-7" not in str(error.value)
        assert PASSWORD not in str(error.value)


@pytest.mark.parametrize("dsn", ["password=guess-7 nonsense", "postgresql://a:guess-7@[/", 7])
def test_a_connection_string_that_cannot_be_read_is_refused_and_not_shown(dsn):
    with pytest.raises(ConfigError, match="dsn= is not a connection string") as error:
        PostgresSink(dsn, "numbers")
    assert "guess-7" not in str(error.value)
    assert error.value.__cause__ is None


def test_arguments_that_cannot_be_meant_are_refused(database):
    with pytest.raises(ConfigError, match=r"key='n' is a string; give a list of columns: key=\['n'\]"):
        PostgresSink(database, "numbers", key="n")
    with pytest.raises(ConfigError, match="table='' is not a name"):
        PostgresSink(database, "")
    with pytest.raises(ConfigError, match=r"staging_schema='s+' has 64 bytes, but names in PostgreSQL have at most 63"):
        PostgresSink(database, "numbers", staging_schema="s" * 64)
    with pytest.raises(SchemaError, match="key column 'm' is not in the stream; it has n"):
        new_sink(database, key=["m"])
    ask(database, "CREATE VIEW numbers AS SELECT 1::int8 AS n")
    with pytest.raises(ConfigError, match=r"public\.numbers is not a table"):
        new_sink(database)


def test_a_server_that_crashes_loses_nothing_that_was_prepared(database, postgres_server: Server):
    sink = new_sink(database)
    ask(database, "ALTER DATABASE test SET synchronous_commit = off")
    committables = written(sink, batch(1, 2))
    postgres_server.stop("immediate")
    with pytest.raises(StorageError, match="cannot connect"):
        committer_of(sink, "job-a").commit(1, committables)
    postgres_server.start()
    committer_of(sink, "job-a").commit(1, committables)
    postgres_server.stop("immediate")
    postgres_server.start()
    assert numbers(database) == [1, 2]
