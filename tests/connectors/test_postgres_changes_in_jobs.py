"""Changes of a table in real jobs: slots are killed, the server restarted, the job restored, and each change arrives once."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import psycopg
import pytest
from test_postgres_changes import SLOT, ask, drop_all
from test_postgres_query import run

from machine import limit_s
from midstream import ConfigError, Environment, Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

pytestmark = pytest.mark.systems
ROWS = 3000
_TABLES = """
    CREATE TABLE t (id int8 PRIMARY KEY, v int8); ALTER TABLE t REPLICA IDENTITY FULL;
    CREATE TABLE log (op text, id int8, v int8);
    CREATE FUNCTION logged() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND OLD.id <> NEW.id THEN
            INSERT INTO log VALUES ('delete', OLD.id, OLD.v); END IF;
        IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND OLD.id <> NEW.id THEN
            INSERT INTO log VALUES ('insert', NEW.id, NEW.v); END IF;
        IF TG_OP = 'UPDATE' AND OLD.id = NEW.id THEN
            INSERT INTO log VALUES ('update', NEW.id, NEW.v); END IF;
        RETURN NULL; END $$;
    CREATE TRIGGER logged AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION logged();
    CREATE SEQUENCE vs"""


@pytest.fixture
def db(database: str) -> Iterator[str]:
    """The table `t`, and `log` with each change of it that was committed."""
    drop_all(database)
    run(database, "DROP FUNCTION IF EXISTS logged CASCADE")
    run(database, _TABLES)
    run(database, f"INSERT INTO t SELECT n, nextval('vs') FROM generate_series(1, {ROWS}) n")
    yield database
    drop_all(database)


def copying(database: str, path: Path) -> Environment:
    env = Environment("copy", parallelism=2, checkpoint_dir=path / "chk", checkpoint_interval="200 ms")
    changes = env.read_postgres_changes(database, "t", slot=SLOT).uid("in")
    changes.write_parquet(path / "out").uid("out")
    return env


def committed(path: Path) -> Counter[tuple[str, int, int]]:
    files = [*(path / "out").glob("*.parquet")]
    return Counter(row for file in files for row in pl.read_parquet(file).select("_op", "id", "v").rows())


def logged(database: str) -> Counter[tuple[str, int, int]]:
    return Counter(ask(database, "SELECT op, id, v FROM log"))


def changed(database: str, seed: int, turns: int) -> None:
    rng = random.Random(seed)
    with psycopg.connect(database) as connection:
        for _ in range(turns):
            first = rng.randrange(ROWS * 2)
            match rng.randrange(4):
                case 0:
                    connection.execute("DELETE FROM t WHERE id BETWEEN %s AND %s", [first, first + rng.randrange(20)])
                case 1:
                    connection.execute(
                        "UPDATE t SET id = -id WHERE id = %s AND NOT EXISTS (SELECT FROM t WHERE id = -%s)",
                        [first, first],
                    )
                case _:
                    last = first + rng.choice((1, 10, 1500))
                    connection.execute(
                        "INSERT INTO t SELECT n, nextval('vs') FROM generate_series(%s::int8, %s::int8) n "
                        "ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v",
                        [first, last],
                    )
            connection.rollback() if rng.random() < 0.2 else connection.commit()


def until_more_than(rows: int, path: Path) -> None:
    until("more", lambda: committed(path).total() > rows)


def until_restarted(job: Job, restarts: int) -> None:
    until("the restart", lambda: job.status().restarts >= restarts)


def until_all_is_there(database: str, path: Path) -> None:
    expected = logged(database)
    until("all changes", lambda: committed(path).total() >= expected.total(), found=lambda: committed(path).total())
    assert committed(path) == expected


def test_changes_arrive_exactly_once_although_slots_are_killed_and_the_job_is_restored(db, tmp_path):
    job = copying(db, tmp_path).start(slots=ProcessSlots())
    until("the snapshot", lambda: committed(tmp_path).total() == ROWS)
    writer = threading.Thread(target=changed, args=(db, 1, 300))
    writer.start()
    for restarts in (1, 2):
        until_more_than(committed(tmp_path).total(), tmp_path)
        os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
        until_restarted(job, restarts)
    writer.join()
    until_all_is_there(db, tmp_path)
    job.stop(timeout_s=limit_s(60))
    changed(db, 2, 50)
    job = copying(db, tmp_path).start(slots=ProcessSlots(), restore_from="latest")
    until_all_is_there(db, tmp_path)
    [(is_past,)] = ask(db, "SELECT confirmed_flush_lsn > restart_lsn FROM pg_replication_slots")
    assert is_past
    job.stop(timeout_s=limit_s(60))
    assert not list((tmp_path / "chk" / "plans" / "in" / SLOT).glob("*/*.parquet"))


def test_the_server_is_restarted_while_the_job_reads_it(db, tmp_path, postgres_server):
    job = copying(db, tmp_path).start(slots=ProcessSlots())
    until("the snapshot", lambda: committed(tmp_path).total() == ROWS)
    changed(db, 3, 30)
    postgres_server.stop()
    postgres_server.start()
    changed(db, 4, 30)
    until_all_is_there(db, tmp_path)
    job.stop(timeout_s=limit_s(60))


def test_a_job_whose_slot_was_dropped_ends_at_once_and_says_why(db, tmp_path):
    job = copying(db, tmp_path).start(slots=ProcessSlots())
    until("the snapshot", lambda: committed(tmp_path).total() == ROWS)
    job.stop(timeout_s=limit_s(60))
    until("the slot is free", lambda: not ask(db, "SELECT 1 FROM pg_replication_slots WHERE active"))
    run(db, f"SELECT pg_drop_replication_slot('{SLOT}')")
    job = copying(db, tmp_path).start(slots=ProcessSlots(), restore_from="latest")
    with pytest.raises(ConfigError, match=r"the replication slot 'changes' no longer exists"):
        job.wait(limit_s(60))
    assert job.status().restarts == 0
