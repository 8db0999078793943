"""Servers for tests that need one: one of each for all of them, an empty database for each, topics of its own for each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kafka_broker import Broker, Kafka, find_jars, running_broker
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
    """The connection string of a database with nothing in it."""
    import psycopg

    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'test'")
        if connection.execute("SELECT FROM pg_database WHERE datname = 'test'").fetchone() is None:
            connection.execute("CREATE DATABASE test")
        connection.execute("ALTER DATABASE test RESET ALL")
    dsn = postgres_server.dsn("test")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS public, desk CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
    return dsn


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[Broker]:
    """One that tests may stop and start."""
    jars = find_jars()
    if isinstance(jars, str):
        pytest.skip(jars)
    with running_broker(jars) as broker:
        yield broker


@pytest.fixture
def kafka(request: pytest.FixtureRequest) -> Kafka:
    """The broker of KAFKA_BOOTSTRAP, or one of our own."""
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    return Kafka(servers or request.getfixturevalue("kafka_broker").servers)
