"""Where rows wait for their checkpoint: staging tables, and the table of commits, `midstream_commits`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, LiteralString

import msgspec
import xxhash
from psycopg import Connection
from psycopg.sql import SQL, Composable, Literal

from midstream.connectors.postgres.postgres_tables import identifier
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.sink_api import decoded

COMMITS: Final = "midstream_commits"
SUPERSEDED: Final = 2**31 - 1
"""The attempt of a job from whose checkpoint another job has resumed; it may do nothing more."""


class StagingLocation(msgspec.Struct, frozen=True, array_like=True):
    """The staging table of rows, and their target table; plain names, not quoted for SQL."""

    staging: str
    schema: str
    table: str
    key: tuple[str, ...]

    def staged(self, name: str) -> Composable:
        return identifier(self.staging, name)

    def sink_of(self, uid: str) -> str:
        """Return the sink's name in `midstream_commits`; it includes the table, so each table has its own commits."""
        return f"{uid} > {self.schema}.{self.table}"


class StagedRows(msgspec.Struct, frozen=True, array_like=True):
    """A committable. `table` lies in the staging schema."""

    job_id: str
    uid: str
    attempt: int
    table: str
    rows: int
    place: StagingLocation


def sweep_staged(connection: Connection[Any], location: StagingLocation, job_id: str, uid: str, newer: int) -> None:
    """Drop what attempts before `newer` have staged.

    Tasks are deployed only after everything in the restored checkpoint is committed: once something of the new attempt,
    or of this job, is prepared, nothing needs the earlier tables.
    """
    prefix = token_of(job_id, uid) + "_"
    tables = connection.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s)",
        [location.staging, prefix],
    ).fetchall()
    for (name,) in tables:
        if int(name[len(prefix) :].partition("_")[0]) < newer:
            drop_staged(connection, location, name)


def drop_staged(connection: Connection[Any], location: StagingLocation, name: str) -> None:
    connection.execute(SQL("DROP TABLE IF EXISTS {}").format(location.staged(name)))


def last_commit(
    connection: Connection[Any], location: StagingLocation, job_id: str, uid: str, *, alone: bool
) -> tuple[int, int]:
    """Return the attempt and checkpoint that this sink of that job has committed last.

    They stay the same until this transaction ends. `alone`: until then no other transaction can read them either.
    """
    insert = SQL("INSERT INTO {} (job, sink) VALUES ({}, {}) ON CONFLICT DO NOTHING")
    connection.execute(insert.format(location.staged(COMMITS), Literal(job_id), Literal(location.sink_of(uid))))
    return commit_of(connection, location, job_id, uid, "FOR UPDATE" if alone else "FOR SHARE")


def commit_of(
    connection: Connection[Any], location: StagingLocation, job_id: str, uid: str, lock: LiteralString = ""
) -> tuple[int, int]:
    """Like `last_commit`, but without that guarantee; return the checkpoint, or -1 if there was none."""
    select = SQL("SELECT attempt, checkpoint FROM {} WHERE job = {} AND sink = {} {}")
    values = (Literal(job_id), Literal(location.sink_of(uid)), SQL(lock))
    found = connection.execute(select.format(location.staged(COMMITS), *values)).fetchone()
    attempt, checkpoint_id = found or (0, -1)
    return attempt, checkpoint_id


def missing_rows(location: StagingLocation, part: StagedRows, where: str) -> StorageError:
    return StorageError(
        f"{where}: {location.staging}.{part.table} with {part.rows} rows is missing; only a job may drop such tables. If "
        "the sink's database was changed, resume with the sink as it was, and before you change it, stop with a "
        "savepoint, which leaves nothing to commit"
    )


def grouped_rows(committables: Sequence[bytes]) -> dict[tuple[str, str, StagingLocation], list[StagedRows]]:
    """Group committables by job, uid and location. Raises StorageError for what no PostgreSQL sink has staged."""
    groups: defaultdict[tuple[str, str, StagingLocation], list[StagedRows]] = defaultdict(list)
    for committable in committables:
        staged = decoded(committable, StagedRows, "a PostgreSQL sink", "PostgresSink")
        if not re.fullmatch(f"{token_of(staged.job_id, staged.uid)}_{staged.attempt}_[0-9]+_[0-9]+", staged.table):
            raise StorageError(
                f"PostgresSink: no PostgreSQL sink stages rows in {staged.table!r}; the checkpoint is corrupt or forged"
            )
        groups[staged.job_id, staged.uid, staged.place].append(staged)
    return groups


def token_of(job_id: str, uid: str) -> str:
    return f"midstream_{xxhash.xxh3_64_hexdigest(f'{job_id}/{uid}'.encode())}"
