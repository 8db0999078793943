"""A database for tests that need one: one server for all of them, a database of its own for each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from postgres_server import Server, find_binaries, running_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here; Debian, Ubuntu: sudo apt install postgresql")
    with running_server(binaries) as server:
        yield server


@pytest.fixture
def database(postgres_server: Server) -> str:
    """The connection string of a new, empty database."""
    import psycopg

    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
    return postgres_server.dsn(name)
