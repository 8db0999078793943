"""PostgreSQL to Iceberg, exactly once: a table is changed all the time, and a slot is killed on the way.

    make lakehouse-demo                                                        # starts a server on loopback for it
    POSTGRES_DSN="host=db dbname=shop user=etl" .venv/bin/python examples/lakehouse.py     # with your own server

The job reads the table demo_orders, then its changes, and keeps an Iceberg table equal to it. At the end both are compared,
as two readers of Iceberg see it. The table and the replication slot are dropped.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
import psycopg
from pyiceberg.catalog import load_catalog

from midstream import Environment

TABLE, SLOT = "demo_orders", "demo_orders_stream"
ORDERS = 10_000
SECONDS = 10


def copy_of_orders(dsn: str, catalog: dict[str, str], checkpoints: Path) -> Environment:
    """Define the job: each change of an order is in the Iceberg table once, with the checkpoint that covers it."""
    env = Environment("lakehouse-demo", parallelism=2, checkpoint_dir=checkpoints, checkpoint_interval="1 s")
    changes = env.read_postgres_changes(dsn, TABLE, slot=SLOT).uid("changes")
    changes.write_iceberg("shop.orders", catalog=catalog, key=["id"], op="_op").uid("orders")
    return env


# ---- around the job: the changes, a kill, and a check of the copy ----


def change(connection: psycopg.Connection, draws: random.Random) -> int:
    """Insert, update and delete some orders in one transaction; return how many."""
    with connection.transaction():
        for _ in range(20):
            order, price = draws.randrange(2 * ORDERS), round(draws.uniform(1, 500), 2)
            if draws.random() < 0.2:
                connection.execute(f"DELETE FROM {TABLE} WHERE id = %s", [order])
            else:
                connection.execute(
                    f"INSERT INTO {TABLE} VALUES (%s, %s, 'new')"
                    f" ON CONFLICT (id) DO UPDATE SET price = EXCLUDED.price, state = 'changed'",
                    [order, price],
                )
    return 20


def report(what: str, text: str) -> None:
    print(f"{what:<10} {text}", flush=True)


def run(dsn: str, directory: Path, **options) -> bool:
    """Run the demo. `options`: those of `Environment.start`, which by default runs the job on an embedded Spark session."""
    catalog = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/warehouse"}
    draws = random.Random(1)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {TABLE} (id bigint PRIMARY KEY, price float8 NOT NULL, state text)")
        connection.execute(f"INSERT INTO {TABLE} SELECT n, n / 100.0, 'old' FROM generate_series(1, {ORDERS}) AS n")
        report("made", f"{TABLE} with {ORDERS:,} orders")
        job = copy_of_orders(dsn, catalog, directory / "checkpoints").start(**options)
        try:
            report("started", "the job, a checkpoint each second")
            changes, end_s, killed = 0, time.monotonic() + SECONDS, False
            while time.monotonic() < end_s or not killed:
                changes += change(connection, draws)
                status = job.status()
                if not killed and status.checkpoints_completed >= 3 and status.slot_pids:
                    os.kill(status.slot_pids[0], signal.SIGKILL)
                    report("killed", f"a slot (kill -9 {status.slot_pids[0]}) after {changes:,} changes")
                    killed = True
            report("changed", f"{changes:,} times; the job restarts, and catches up")
            wanted = dict(connection.execute(f"SELECT id, price FROM {TABLE}").fetchall())
            return compared(job, catalog, wanted)
        finally:
            job.cancel("the demo is over")
            job.wait()
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [SLOT]
            )
            connection.execute(f"DROP PUBLICATION IF EXISTS {SLOT}")
            connection.execute(f"DROP TABLE {TABLE}")


def compared(job, catalog: dict[str, str], wanted: dict[int, float]) -> bool:
    """Wait until the copy is equal to the table, and report what two readers find in it."""
    end_s = time.monotonic() + 60
    while True:
        table = load_catalog("midstream", **catalog).load_table("shop.orders")
        found = dict(zip(*table.scan(selected_fields=("id", "price")).to_arrow().to_pydict().values(), strict=True))
        if found == wanted or time.monotonic() > end_s or job.ended:
            break
        time.sleep(0.2)
    by_polars = dict(pl.scan_iceberg(table).select("id", "price").collect().rows())
    report(
        "compared",
        f"{len(wanted):,} orders in PostgreSQL, {len(found):,} as pyiceberg reads the copy, {len(by_polars):,} as polars does",
    )
    report("equal", str(found == by_polars == wanted))
    return found == by_polars == wanted


if __name__ == "__main__":
    if "POSTGRES_DSN" not in os.environ:
        raise SystemExit("POSTGRES_DSN is not set: name a server, or run make lakehouse-demo")
    with tempfile.TemporaryDirectory(prefix="midstream-lakehouse-demo-") as where:
        sys.exit(0 if run(os.environ["POSTGRES_DSN"], Path(where)) else 1)
