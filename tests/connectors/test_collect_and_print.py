"""Sinks that show rows: to the program (collect, exactly once) and to people (print)."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from connector_worlds import SCHEMA, Loop, batch, open_writer, prepared, values

from committers import committer_of
from midstream.connectors.memory import collect_sink as collect
from midstream.connectors.memory.collect_sink import CollectSink
from midstream.connectors.memory.print_sink import PrintSink
from midstream.engine.core.errors import ConfigError, JobError, SchemaError, StorageError


@pytest.fixture
def job_id(request: pytest.FixtureRequest) -> str:
    return request.node.name


def test_rows_are_there_once_their_checkpoint_is_committed(job_id):
    sink, loop = CollectSink(), Loop()
    with pytest.raises(ConfigError, match="no job with this sink has started yet"):
        sink.rows()
    sink.validate(SCHEMA, restoring=False)
    assert sink.rows() == []
    writer = open_writer(pickle.loads(pickle.dumps(sink)), SCHEMA, loop, job_id=job_id)
    writer.write(batch(1, 2))
    committables = prepared(writer, 1)
    assert prepared(writer, 2) == []
    assert sink.rows() == []
    committer_of(sink, job_id).commit(1, committables)
    assert sink.rows() == [{"n": 1}, {"n": 2}]
    assert sink.table().schema == SCHEMA
    assert sink.frame()["n"].to_list() == [1, 2]


def collected(column: pa.Array[Any], job_id: str) -> CollectSink:
    rows = pa.record_batch({"n": pa.array(range(len(column))), "v": column})
    sink, loop = CollectSink(), Loop()
    sink.validate(rows.schema, restoring=False)
    writer = open_writer(sink, rows.schema, loop, job_id=job_id)
    writer.write(rows)
    committer_of(sink, job_id).commit(1, prepared(writer, 1))
    return sink


LATE = pa.array([0, 253402300800000000])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (
            LATE.cast(pa.timestamp("us", "UTC")),
            r"timestamp\[us, tz=UTC\], and Python cannot hold its value 10000-01-01 00:00:00.000000Z",
        ),
        (LATE.cast(pa.timestamp("us")), r"timestamp\[us\], and Python cannot hold its value 10000-01-01"),
        (
            pa.array([0, -2_000_000], pa.int32()).cast(pa.date32()),
            r"date32\[day\], and Python cannot hold its value -3506-03-09",
        ),
        (
            pa.array([0, 1]).cast(pa.time64("ns")),
            r"time64\[ns\], and Python cannot hold its value 00:00:00.000000001: .*nanoseconds",
        ),
        (pa.array([0, 1]).cast(pa.timestamp("ns")), r".*00:00:00.000000001: .*nanoseconds"),
        (pa.ListArray.from_arrays([0, 1, 2], LATE.cast(pa.timestamp("us"))), "list.* 10000-01-01"),
    ],
)
def test_a_value_that_python_cannot_hold_is_named_and_is_in_the_table(job_id, column, says):
    sink = collected(column, job_id)
    with pytest.raises(SchemaError, match=rf"CollectSink: row 1: column 'v' is {says}.*; use table\(\) or frame\(\)"):
        sink.rows()
    assert sink.table()["v"].combine_chunks() == column


def test_what_another_kind_of_sink_has_prepared_is_refused():
    with pytest.raises(
        StorageError, match="CollectSink: what the checkpoint has to commit was not prepared by a CollectSink"
    ):
        CollectSink().check_committables(1, [msgspec.msgpack.encode(["job", 0, "pending"])])


def test_maps_are_dicts(job_id):
    assert collected(pa.array([{"a": 1}, None], pa.map_(pa.string(), pa.int64())), job_id).rows() == [
        {"n": 0, "v": {"a": 1}},
        {"n": 1, "v": None},
    ]


def test_rows_committed_again_after_a_restore_are_not_shown_twice(job_id):
    sink, loop = CollectSink(), Loop()
    writer = open_writer(sink, SCHEMA, loop, job_id=job_id)
    writer.write(batch(1))
    first = prepared(writer, 1)
    committer_of(sink, job_id).commit(1, first)
    committer_of(sink, job_id).commit(1, first)
    assert values(sink.rows()) == [1]
    again = CollectSink()
    again.validate(SCHEMA, restoring=True)
    committer_of(again, job_id + "-restored").commit(1, first)
    assert again.rows() == [], "the first sink has shown them"


def test_what_was_never_committed_in_this_process_is_shown_by_the_restored_job(job_id):
    sink, loop = CollectSink(), Loop()
    writer = open_writer(sink, SCHEMA, loop, job_id=job_id)
    writer.write(batch(1))
    lost = prepared(writer, 1)
    restored = CollectSink()
    committer_of(restored, job_id + "-restored").commit(1, lost)
    assert values(restored.rows()) == [1]


def test_equal_rows_of_two_attempts_and_subtasks_are_different_rows(job_id):
    sink, loop = CollectSink(), Loop()
    committer = committer_of(sink, job_id)
    for attempt, subtask in ((0, 0), (0, 1), (1, 0)):
        writer = open_writer(sink, SCHEMA, loop, job_id=job_id, attempt=attempt, subtask=subtask)
        for checkpoint_id in (1, 2):
            writer.write(batch(7))
            committer.commit(checkpoint_id, prepared(writer, checkpoint_id))
    assert values(sink.rows()) == [7] * 6


def test_a_new_job_begins_with_no_rows(job_id):
    sink, loop = CollectSink(), Loop()
    for name in ("x", "y"):
        writer = open_writer(sink, SCHEMA, loop, job_id=job_id + name)
        writer.write(batch(1))
        committer_of(sink, job_id + name).commit(1, prepared(writer, 1))
        assert values(sink.rows()) == [1]


def test_more_rows_than_fit_into_messages_are_refused_with_advice(job_id, monkeypatch):
    monkeypatch.setattr(collect, "BYTES_MAX", 1000)
    writer = open_writer(CollectSink(), SCHEMA, Loop(), job_id=job_id)
    with pytest.raises(JobError, match=r"operator 'sink out': .* bytes of rows .* write them with a FileSink"):
        writer.write(pa.record_batch({"n": pa.array(range(1000))}))


def test_print_writes_one_line_a_row_up_to_the_limit(capfd):
    loop = Loop()
    writer = open_writer(PrintSink("> ", limit=3), SCHEMA, loop)
    writer.write(batch(1, 2))
    writer.write(batch(3, 4))
    assert prepared(writer, 1) == []
    writer.write(batch(5))
    loop.run()
    assert capfd.readouterr().out == "> {'n': 1}\n> {'n': 2}\n> {'n': 3}\n"


def test_print_writes_everything_without_a_limit(capfd):
    loop = Loop()
    writer = open_writer(PrintSink(), SCHEMA, loop)
    writer.write(pa.record_batch({"n": pa.array(range(5000))}))
    loop.run()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 5000
    assert lines[-1] == "{'n': 4999}"
    writer.close()
    loop.run()
    assert loop.failures == []


def test_print_writes_values_that_python_cannot_hold_as_arrow_shows_them(capfd):
    loop = Loop()
    columns = {
        "late": LATE.cast(pa.timestamp("us")),
        "day": pa.array([0, 3_000_000], pa.int32()).view(pa.date32()),
        "took": pa.array([None, 2**62], pa.duration("ms")),
        "at": pa.array([1, 2000], pa.time64("ns")),
        "days": pa.array([[1], [3_000_000]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
        "text": pa.array(["a", "b"]),
    }
    writer = open_writer(PrintSink(), pa.record_batch(columns).schema, loop)
    writer.write(pa.record_batch(columns))
    loop.run()
    assert loop.failures == []
    assert capfd.readouterr().out.splitlines() == [
        (
            "{'late': datetime.datetime(1970, 1, 1, 0, 0), 'day': datetime.date(1970, 1, 1), 'took': None, "
            "'at': 00:00:00.000000001, 'days': [datetime.date(1970, 1, 2)], 'text': 'a'}"
        ),
        (
            "{'late': 10000-01-01 00:00:00.000000, 'day': 10183-09-21, 'took': 4611686018427387904, "
            "'at': datetime.time(0, 0, 0, 2), 'days': [10183-09-21], 'text': 'b'}"
        ),
    ]


def test_print_limit_must_be_a_count():
    with pytest.raises(ConfigError, match="limit -1"):
        PrintSink(limit=-1)
    assert committer_of(PrintSink(), "job") is None
