"""Failures as people see them: their own frames, and one message."""

from __future__ import annotations

import io
import traceback

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from rich.console import Console

from midstream import Environment
from midstream.cli.error_text import exit_after, print_job_failure, print_midstream_error
from midstream.engine.checkpoint.store import FencedError
from midstream.engine.core.errors import (
    ClusterError,
    InvariantError,
    JobError,
    SchemaError,
    StorageError,
    UnavailableError,
)
from midstream.engine.core.tracebacks import users_part
from midstream.engine.operators.row_functions import MapOperator
from midstream.engine.protocol.job_status import FailureStatus

SCHEMA = pa.schema([("n", pa.int64())])


def bad_row(row):
    return {"n": row["n"] / (row["n"] - 2)}


class Nowhere:
    def emit(self, batch):
        raise AssertionError(batch)


def details_of(call) -> str:
    with pytest.raises(Exception) as raised:
        call()
    return "".join(traceback.format_exception(raised.value))


def run_the_users_function():
    operator = MapOperator("halve", bad_row, SCHEMA)
    operator._out = Nowhere()  # type: ignore[assignment]  # a stand-in
    operator.process(pa.record_batch({"n": [1, 2, 3]}), 0)


def test_of_an_operators_failure_only_the_users_frames_are_shown():
    details = details_of(run_the_users_function)
    assert "row_functions.py" in details
    shown = users_part(details)
    assert "in bad_row" in shown
    assert "ZeroDivisionError" in shown
    assert "row_functions.py" not in shown
    assert shown.startswith("Traceback (most recent call last):")


def test_an_error_of_ours_without_the_users_code_needs_no_traceback():
    error = StorageError("part-7.parquet: is not there any more")
    details = (
        "Traceback (most recent call last):\n" + '  File "/x/midstream/engine/worker/task.py", line 1, in f\n    g()\n'
    )
    assert users_part(f"{details}midstream.engine.core.errors.StorageError: {error}\n") == ""


def test_a_bug_is_shown_whole():
    details = 'Traceback (most recent call last):\n  File "/x/midstream/engine/worker/task.py", line 1, in f\n    g()\n'
    assert "task.py" in users_part(f"{details}midstream.engine.core.errors.InvariantError: torn")
    assert "task.py" in users_part(f"{details}KeyError: 3")


def printed(terminal: bool, call) -> str:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=terminal, color_system=None)
    call(console)
    return text.getvalue()


def test_the_users_traceback_comes_before_the_message(status):
    failure = FailureStatus(0, 0, "halve (subtask 0): ZeroDivisionError", details_of(run_the_users_function))
    failed = msgspec.structs.replace(status, state="failed", failures=(failure,))
    out = printed(
        False, lambda console: print_job_failure(console, failed, failure.summary, "resume with: midstream run")
    )
    assert out.index("in bad_row") < out.index("error: halve (subtask 0)") < out.index("hint: resume with")


def test_a_terminal_gets_a_panel():
    out = printed(True, lambda console: print_midstream_error(console, JobError("no such column")))
    assert "╭─ error" in out
    assert "no such column" in out


def test_the_exit_status_tells_bugs_from_bad_input():
    console = Console(file=io.StringIO())
    assert print_midstream_error(console, JobError("x")) == 2
    assert print_midstream_error(console, InvariantError("x")) == 70
    assert print_midstream_error(console, UnavailableError("x")) == 75
    assert print_midstream_error(console, ClusterError("x")) == 2
    assert print_midstream_error(console, FencedError("another coordinator has taken over")) == 1


def test_the_exit_status_of_a_failed_job_says_whether_it_was_the_jobs_own_fault():
    assert exit_after(JobError("a function raised")) == 1
    assert exit_after(ClusterError("a slot was lost, and restart=no_restart()")) == 1
    assert exit_after(FencedError("another coordinator has taken over")) == 1
    assert exit_after(UnavailableError("Spark's JVM was killed")) == 75
    assert exit_after(InvariantError("x")) == 70


def test_what_the_users_code_raised_while_it_was_loaded_comes_first():
    try:
        try:
            pl.DataFrame({"a": [1]}).get_column("b")
        except pl.exceptions.ColumnNotFoundError as cause:
            raise JobError("job.py: raised ColumnNotFoundError") from cause
    except JobError as error:
        out = printed(False, lambda console, error=error: print_midstream_error(console, error))
    assert out.index("test_failures.py") < out.index("error: job.py: raised")


def test_of_a_library_that_the_users_code_did_not_call_there_is_no_traceback():
    with pytest.raises(SchemaError) as raised:
        Environment("typo").from_collection([{"page": 1}]).filter(pl.col("pgae") > 1)
    out = printed(False, lambda console: print_midstream_error(console, raised.value))
    assert "Traceback" not in out and "polars" not in out
    assert "test_failures.py" in out and "column 'pgae' is not in the stream's schema (page)" in out
