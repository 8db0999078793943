"""Times before the year 1 and after 9999, which no datetime can hold: refused by name, wherever a test meets them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from midstream import ConfigError, Count, Environment, JobError, SchemaError, WatermarkStrategy, testing, tumbling
from midstream.engine.core.arrow_types import schema_of
from midstream.testing.inputs import FIRST_US, LAST_US

FAR = pa.table({"k": ["a"], "at": pa.array([1 << 62], pa.timestamp("us"))})
ROW = {"k": str, "at": datetime}


def untimed():
    return Environment().from_collection([], schema=ROW).uid("rows")


def timed():
    return untimed().with_watermarks("at", WatermarkStrategy.bounded("5 s"))


def counted():
    return timed().key_by("k").window(tumbling("1 min")).aggregate(n=Count())


@pytest.mark.parametrize("us", [FIRST_US - 1, LAST_US + 1, 1 << 62, -(1 << 62)])
def test_a_time_in_the_tests_hand_is_refused(us):
    with pytest.raises(ConfigError, match=r"now: .* outside of the years 1 to 9999"):
        testing.job(timed(), now=us)
    with (
        testing.job(timed()) as job,
        pytest.raises(ConfigError, match=r"advance_to: .* outside of the years 1 to 9999"),
    ):
        job.advance_to(us)


def test_the_wall_clock_goes_to_the_last_moment_and_no_further():
    with testing.job(timed(), now=datetime.max - timedelta(days=1)) as job:
        assert job.now == datetime.max.replace(tzinfo=UTC) - timedelta(days=1)
        job.advance_processing_time("24 h")
        assert job.now == datetime.max.replace(tzinfo=UTC)
        with pytest.raises(ConfigError, match=r"advance_processing_time: 1 s from .* is after the year 9999"):
            job.advance_processing_time("1 s")
    with testing.job(timed(), now=datetime.min) as job:
        assert job.now == datetime.min.replace(tzinfo=UTC)


def test_rows_with_such_a_time_are_in_tables_and_are_named_elsewhere():
    result = testing.run(untimed(), FAR)
    assert result.table(next(iter(result))).num_rows == 1
    with pytest.raises(SchemaError, match=r"column 'at' is timestamp.*, and Python cannot hold its value"):
        _ = result.rows
    testing.check_cuts(untimed(), FAR)  # equal rows need not be Python objects
    last = [{"k": "a", "at": "9999-12-31 23:59:59.999999"}]
    with pytest.raises(SchemaError, match=r"column 'window_end'"):
        _ = testing.run(counted(), last).rows


def test_a_function_that_gets_such_a_time_fails_with_the_columns_name():
    with pytest.raises(JobError, match=r"column 'at', timestamp.* has a value that Python cannot represent"):
        testing.run(untimed().map(lambda row: row), FAR)


def test_such_a_time_is_no_event_time():
    with pytest.raises(
        JobError, match=r"event-time column 'at' is 4611686018427387904 microseconds since 1970 in the row"
    ):
        testing.run(timed(), FAR)


def test_the_last_nanosecond_is_no_event_time_and_the_one_before_is():
    schema = schema_of([("k", pa.string()), ("at", pa.timestamp("ns"))])
    rows = Environment().from_collection([], schema=schema).uid("rows")
    in_order = rows.with_watermarks("at", WatermarkStrategy.bounded("5 s")).key_by("k").sort_by_time()

    def read(ns):
        found = testing.run(in_order, pa.table({"k": ["a"], "at": pa.array([ns], pa.timestamp("ns"))}, schema=schema))
        return [number for stream in found for number in found.table(stream)["at"].cast(pa.int64()).to_pylist()]

    assert read(2**63 - 2) == [2**63 - 2]
    with pytest.raises(JobError, match=r"event-time column 'at' is 9223372036854775807 nanoseconds since 1970"):
        read(2**63 - 1)


def test_a_job_with_such_times_is_simulated():
    assert testing.simulate(untimed(), {"rows": FAR}, seeds=range(3)).ok
    assert testing.simulate(counted(), {"rows": [{"k": "a", "at": "9999-12-31 23:59:59"}]}, seeds=range(3)).ok
