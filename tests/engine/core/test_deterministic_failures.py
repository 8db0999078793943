"""Which exceptions of a function come each time for the same row, as far as their types show."""

from __future__ import annotations

import concurrent.futures
import decimal
import http.client
import json
import sqlite3

import polars as pl
import pytest

from midstream.engine.core.errors import JobError
from midstream.engine.core.tracebacks import depends_on_values


class OrderRefused(Exception):
    """A class of the user."""


class OfAScript(Exception):
    """A class of a job that was started with `python job.py`; a slot has another `__main__`."""

    __module__ = "__main__"


def wrapped(error: BaseException) -> JobError:
    """As an operator wraps it."""
    made = JobError("map raised")
    made.__cause__ = error
    return made


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__context__ = by
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        ZeroDivisionError("x"),
        AssertionError("x"),
        RecursionError("x"),
        RuntimeError("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
        json.JSONDecodeError("x", "{", 0),
        decimal.InvalidOperation("x"),
        pl.exceptions.ComputeError("x"),
        OrderRefused("x"),
        OfAScript("x"),
        caused(ValueError("x"), KeyError("x")),
    ],
    ids=repr,
)
def test_wrong_values_fail_each_time(error: BaseException) -> None:
    assert depends_on_values(wrapped(error))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("x"),
        TimeoutError("x"),
        concurrent.futures.TimeoutError("x"),
        MemoryError("x"),
        EOFError("x"),
        http.client.IncompleteRead(b""),
        sqlite3.OperationalError("database is locked"),
        caused(ValueError("no rate"), ConnectionResetError("x")),
        caused(OrderRefused("no answer"), TimeoutError("x")),
    ],
    ids=repr,
)
def test_what_is_not_available_may_be_so_the_next_time(error: BaseException) -> None:
    assert not depends_on_values(wrapped(error))


def test_errors_of_a_database_client_may_be_temporary() -> None:
    psycopg = pytest.importorskip("psycopg", reason="the client of PostgreSQL is not installed")
    assert not depends_on_values(wrapped(psycopg.OperationalError("the server closed the connection")))


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second = ValueError("x"), KeyError("y")
    first.__context__, second.__context__ = second, first
    assert depends_on_values(first)
