"""Servers for tests that need one: one of each for all of them, an empty database for each, topics of its own for each;
and a job that can go back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from going_back_world import World

from kafka_broker import Broker, Kafka, find_jars, running_brokers
from midstream.connectors.files import rollback
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
        connection.execute("ALTER ROLE CURRENT_USER RESET ALL")
    dsn = postgres_server.dsn("test")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS public, desk CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
    return dsn


@pytest.fixture(scope="session")
def kafka_broker_of_all() -> Iterator[Broker]:
    jars = find_jars()
    if isinstance(jars, str):
        pytest.skip(jars)
    with running_brokers(jars) as [broker]:
        yield broker


@pytest.fixture
def kafka_broker(kafka_broker_of_all: Broker) -> Iterator[Broker]:
    """One that tests may stop and start. A test that fails in between leaves the next one a broker that runs."""
    yield kafka_broker_of_all
    if not kafka_broker_of_all.is_running:
        kafka_broker_of_all.stop()  # if it has ended by itself
        kafka_broker_of_all.start()


@pytest.fixture
def kafka(request: pytest.FixtureRequest) -> Kafka:
    """The broker of KAFKA_BOOTSTRAP, or one of our own."""
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    return Kafka(servers or request.getfixturevalue("kafka_broker").servers)


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying all takes a tenth of a second for each start."""
    monkeypatch.setattr(rollback, "ATTEMPTS_MAX", 3)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A job with a file sink, in an empty directory."""
    return World(tmp_path)
