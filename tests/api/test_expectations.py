"""`expect`: rows that do not meet the conditions fail the job, are dropped, or go to a side output with the reason."""

from __future__ import annotations

import re
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import FAILED, ConfigError, Environment, JobError, SchemaError, testing
from midstream.api.data_stream import DataStream
from midstream.engine.core.arrow_types import schema_of
from midstream.runtime.process.process_slots import ProcessSlots

SCHEMA = schema_of([("n", pa.int64()), ("0", pa.large_string())])
ROWS = st.lists(
    st.fixed_dictionaries({"n": st.none() | st.integers(-3, 3), "0": st.none() | st.sampled_from(["a", "b"])}),
    max_size=15,
)


def stream(rows: list[dict[str, Any]]) -> DataStream:
    return Environment("doc").from_collection(rows, SCHEMA, splits=1)


def is_met(row: dict[str, Any]) -> bool:
    return row["n"] is not None and row["n"] > 0 and row["0"] is not None and row["0"] != "b"


@settings(max_examples=examples(40), deadline=None)
@given(ROWS)
def test_rows_that_meet_all_conditions_are_passed_on_and_the_others_say_which_they_do_not(rows):
    checked = stream(rows).expect(pl.col("n") > 0, pl.col("0") != "b", on_error="side_output")
    failed, kept = testing.run(checked.side_output(FAILED)), testing.run(checked)
    assert kept.rows == [row for row in rows if is_met(row)]
    others = [row for row in rows if not is_met(row)]
    assert [each["row"] for each in failed.rows] == others
    for row, each in zip(others, failed.rows, strict=True):
        is_first = row["n"] is None or row["n"] <= 0
        value = row["n"] if is_first else row["0"]
        condition = 'col("n")) > (dyn int: 0)' if is_first else 'col("0")) != ("b")'
        assert condition in each["error"]
        assert each["error"].endswith(f", which is {'null' if value is None else 'false'}")
        assert (each["function"], each["error_type"]) == ("expect", "JobError")


def test_a_row_that_does_not_meet_them_fails_the_job_and_is_named():
    rows: list[dict[str, Any]] = [{"n": 1, "0": "a"}, {"n": -7, "0": "b"}, {"n": None, "0": "c"}]
    named = r"operator 'expect': expected .*col\(\"n\"\)\) > .*, which is false; the row is .*-7.*"
    with pytest.raises(JobError, match=named):
        testing.run(stream(rows).expect(pl.col("n") > 0))
    assert testing.run(stream(rows).expect(pl.col("n") > 0, on_error="drop")).rows == rows[:1]
    assert testing.run(stream(rows[:1]).expect(pl.col("n") > 0)).rows == rows[:1]


def test_a_condition_may_be_a_boolean_column_or_a_constant():
    flags = Environment("doc").from_collection([{"ok": True}, {"ok": False}, {"ok": None}], {"ok": bool}, splits=1)
    assert testing.run(flags.expect("ok", on_error="drop")).rows == [{"ok": True}]
    assert testing.run(flags.expect(pl.lit(True), on_error="drop")).rows == [{"ok": True}, {"ok": False}, {"ok": None}]
    assert testing.run(flags.expect(pl.lit(False), on_error="drop")).rows == []


def test_more_than_may_fail_ends_the_job():
    rows = [{"n": n % 2, "0": "a"} for n in range(40)]
    with pytest.raises(JobError, match=r"failed_max allows 3 of 20"):
        testing.run(stream(rows).expect(pl.col("n") > 0, on_error="drop", failed_max=(3, 20)))
    assert len(testing.run(stream(rows).expect(pl.col("n") > 0, on_error="drop", failed_max=(10, 20))).rows) == 20


def test_the_status_counts_the_rows():
    env = Environment("doc")
    rows = env.from_collection([{"n": n} for n in range(10)], splits=1)
    rows.expect(pl.col("n") > 2, on_error="drop").uid("checked").collect()
    status = env.execute(slots=ProcessSlots())
    assert sum(each.failed_rows for vertex in status.vertices for each in vertex.operators) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((), {}, JobError, "expect: name at least one condition"),
        ((pl.col("m") > 0,), {}, SchemaError, "column 'm' is not in the stream's schema"),
        (("m",), {}, JobError, "expect: 'm' is not a column"),
        ((pl.col("n") + 1,), {}, SchemaError, "a condition must be boolean; this one is int64"),
        (("n",), {}, SchemaError, "a condition must be boolean; this one is int64"),
        ((pl.col("n") > pl.col("n").mean(),), {}, JobError, "row"),
        ((lambda row: True,), {}, JobError, "expect"),
        ((pl.col("n") > 0,), {"on_error": "skip"}, ConfigError, "expect: on_error 'skip' is not one of fail, drop, side_output"),
        ((pl.col("n") > 0,), {"failed_max": (1, 2)}, ConfigError, "failed_max= requires on_error="),
    ],
)  # fmt: skip
def test_wrong_conditions_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        stream([]).expect(*arguments, **options)
    assert re.match(r"test_expectations\.py:\d+", str(caught.value))
