"""Connections to a PostgreSQL server."""

from __future__ import annotations

import os
from getpass import getuser
from typing import Any, Final

import psycopg
from psycopg import Connection, Error
from psycopg.conninfo import conninfo_to_dict

from midstream.engine.core.errors import ConfigError, StorageError

PATIENCE: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""How long to wait for a server that has gone silent, unless `dsn` sets it."""
_LIMITS: Final = ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout")
"""Settings of which older servers do not have all."""


def checked_dsn(dsn: str, where: str) -> str:
    """Check the connection string. One that cannot be parsed is not shown, since it may contain a password."""
    readable = isinstance(dsn, str)
    if readable:
        try:
            conninfo_to_dict(dsn)
        except Error:
            readable = False
    if not readable:
        raise ConfigError(
            f"{where}: dsn= is not a connection string; write for example 'host=db dbname=shop user=etl' "
            "or 'postgresql://etl@db/shop' (with special characters in a URL percent-encoded)"
        )
    return dsn


def dataset(dsn: str, table: str) -> str:
    """Return the URI of a table, which is named with its schema."""
    said = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value}
    host = (said.get("host") or said.get("hostaddr") or os.environ.get("PGHOST") or "localhost").partition(",")[0]
    port = (said.get("port") or os.environ.get("PGPORT") or "").partition(",")[0] or "5432"
    user = said.get("user") or os.environ.get("PGUSER") or getuser()
    database = said.get("dbname") or os.environ.get("PGDATABASE") or user
    if host.startswith(("/", "@")):  # the directory of a socket
        host = "localhost"
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    return f"postgres://{host}:{port}/{database}.{table}"


def connect(dsn: str, where: str) -> Connection[Any]:
    """Connect once. The call blocks. Raises StorageError if that fails."""
    said = conninfo_to_dict(dsn)
    defaults = {name: value for name, value in PATIENCE.items() if name not in said}
    try:
        return psycopg.connect(
            dsn,
            prepare_threshold=None,  # a pooler may give every transaction another server connection
            client_encoding="utf8",
            fallback_application_name="midstream",
            **defaults,  # type: ignore[arg-type]
        )
    except psycopg.Error as error:
        raise StorageError(
            f"{where}: cannot connect: {' '.join(str(error).split())}. Is the server running, and are host, port, "
            "database and user correct? A password comes from PGPASSWORD, a password file or a service file"
        ) from error


def lift_limits(connection: Connection[Any], *, in_transaction: bool) -> None:
    """Let statements and transactions take as long as they need, whatever is set for the role or the database.

    `in_transaction`: only until the end of the current one.
    """
    connection.execute(
        "SELECT set_config(name, '0', %s) FROM pg_settings WHERE name = ANY (%s)", [in_transaction, list(_LIMITS)]
    )
