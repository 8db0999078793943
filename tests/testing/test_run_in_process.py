"""`testing.run` and `testing.job`: rows in, rows out, and time in the test's hand."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    LATE,
    BroadcastProcessFunction,
    BroadcastState,
    ConfigError,
    CoProcessFunction,
    Count,
    DataStream,
    Environment,
    JobError,
    KeyedProcessFunction,
    ListState,
    MapState,
    Mean,
    SchemaError,
    Sum,
    ValueState,
    WatermarkStrategy,
    testing,
    tumbling,
)

ORDER = {"user": str, "price": int, "at": datetime}
NOON = datetime(2024, 1, 1, 12)


def order(user: str, price: int, seconds: float) -> dict[str, object]:
    return {"user": user, "price": price, "at": NOON + timedelta(seconds=seconds)}


def orders(env: Environment):
    stream = env.from_collection([], schema=ORDER).uid("orders")
    return stream.with_watermarks("at", WatermarkStrategy.bounded("1 s"))


class Running(KeyedProcessFunction):
    total = ValueState(default=0)

    def process(self, row, ctx):
        self.total.value += row["price"]
        if row["price"] > 100:
            ctx.side_output("large", {"user": row["user"]})
        return {"user": row["user"], "total": self.total.value}


class Reminder(KeyedProcessFunction):
    """A row a minute of event time, and another one ten seconds of processing time, after the order."""

    seen = ListState()

    def process(self, row, ctx):
        self.seen.append(row["price"])
        ctx.timers.event_time(ctx.timestamp + timedelta(minutes=1))
        ctx.timers.processing_time(ctx.now + timedelta(seconds=10))

    def on_timer(self, at, ctx):
        return {"user": ctx.key, "at": at, "seen": sum(self.seen)}


REMINDER = {"user": str, "at": datetime, "seen": int}


def test_two_lines_are_a_test():
    stream = Environment().from_collection([{"n": 1}, {"n": 2}]).map(lambda row: {"n": row["n"] * 10})
    assert testing.run(stream).rows == [{"n": 10}, {"n": 20}]


def test_every_sink_and_side_output_is_there_by_uid_by_name_and_by_object():
    env = Environment(parallelism=4)
    running = (
        orders(env)
        .key_by("user")
        .process(Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}})
    )
    running.write_parquet("/nowhere/at/all").uid("running").name("running totals")
    collected = running.filter(pl.col("total") > 100).collect()
    result = testing.run(env, {"orders": [order("ann", 50, 0), order("bob", 200, 1), order("ann", 60, 2)]})
    totals = [{"user": "ann", "total": 50}, {"user": "bob", "total": 200}, {"user": "ann", "total": 110}]
    assert result["running"] == result["running totals"] == totals
    assert result[collected] == result["collect-1"] == totals[1:]
    assert result["large"] == result["process-1", "large"] == [{"user": "bob"}]
    assert result.table("running").schema == running.schema
    assert result.frame(collected)["total"].to_list() == [200, 110]
    with pytest.raises(ConfigError, match="there are 2 outputs; name one: 'running', 'collect-1'"):
        _ = result.rows
    with pytest.raises(ConfigError, match="'totals': the job has none of that name; it has: 'running'"):
        _ = result["totals"]
    assert "'total': 110" in repr(result)


def test_only_what_a_stream_needs_is_run():
    env = Environment()
    env.from_collection([{"n": 1}]).map(lambda row: 1 / 0).print()  # type: ignore[arg-type, return-value]
    wanted = env.from_collection([{"n": 2}]).filter(pl.col("n") > 0)
    assert testing.run(wanted).rows == [{"n": 2}]
    assert testing.run([wanted])[wanted] == [{"n": 2}]


def test_a_union_and_a_side_output_can_be_read():
    env = Environment()
    one, two = env.from_collection([{"n": 1}]).uid("one"), env.from_collection([{"n": 2}]).uid("two")
    assert sorted(row["n"] for row in testing.run(one.union(two)).rows) == [1, 2]
    window = orders(env).key_by("user").window(tumbling("1 min")).aggregate(n=Count())
    late = window.side_output(LATE)
    rows = [order("ann", 1, 0), order("ann", 2, 100), order("ann", 3, 1)]
    assert testing.run(late, rows)[late] == [rows[2]]


def test_each_row_is_a_batch_so_rows_can_be_late():
    env = Environment()
    window = orders(env).key_by("user").window(tumbling("1 min")).aggregate(total=Sum("price"))
    rows = [order("ann", 1, 0), order("ann", 2, 70), order("ann", 4, 30)]
    one_by_one, whole = testing.run(window, rows), testing.run(window, rows, cut="whole")
    assert [row["total"] for row in one_by_one.rows] == [1, 2]
    assert one_by_one.late == {"window-1": [rows[2]]}
    assert [row["total"] for row in whole.rows] == [5, 2]
    assert whole.late == {}


def test_the_test_holds_event_time():
    env = Environment()
    stream = orders(env).key_by("user").process(Reminder(), REMINDER)
    with testing.job(stream) as job:
        job.feed(order("ann", 3, 0))
        job.advance_to("2024-01-01 12:00:59")
        assert job.take() == []
        job.advance_to("2024-01-01 12:01:00")
        assert job.take() == [{"user": "ann", "at": NOON + timedelta(minutes=1), "seen": 3}]
        job.advance_to("2024-01-01 12:00:30")  # it never goes back
        job.feed(order("ann", 4, 30))
        assert job.take() == []
        job.advance_to(NOON + timedelta(hours=1))
        assert [row["at"] for row in job.take()] == [NOON + timedelta(seconds=90)]


def test_the_test_holds_processing_time():
    stream = orders(Environment()).key_by("user").process(Reminder(), REMINDER)
    with testing.job(stream, now="2030-05-05 08:00") as job:
        job.feed(order("ann", 3, 0)).advance_processing_time("9.999 s")
        assert job.take() == []
        job.advance_processing_time("1 ms")
        assert job.take() == [{"user": "ann", "at": datetime(2030, 5, 5, 8, 0, 10), "seen": 3}]
        assert job.now == datetime(2030, 5, 5, 8, 0, 10, tzinfo=UTC)


def test_at_the_end_all_timers_and_windows_fire():
    env = Environment()
    stream = orders(env).key_by("user").process(Reminder(), REMINDER)
    rows = [order("ann", 3, 0), order("bob", 4, 1)]
    assert len(testing.run(stream, rows).rows) == 4
    assert testing.run(stream, rows, ends=False).rows == []
    with testing.job(stream) as job:
        job.feed_all({"orders": rows}).end()
        assert len(job.take()) == 4
        with pytest.raises(JobError, match="input 'orders' has ended"):
            job.feed(rows[0])


def test_an_input_becomes_idle_when_the_test_lets_time_pass():
    env = Environment()
    strategy = WatermarkStrategy.monotonous("5 s")
    fast = env.generate(lambda i: {}, schema=ORDER).uid("fast").with_watermarks("at", strategy)
    slow = env.generate(lambda i: {}, schema=ORDER).uid("slow").with_watermarks("at", strategy)
    window = fast.union(slow).key_by("user").window(tumbling("1 min")).aggregate(n=Count())
    with testing.job(window) as job:
        job.feed("slow", order("ann", 1, 0)).feed("fast", order("ann", 1, 0))
        job.advance_processing_time("4 s")
        job.feed("fast", order("ann", 1, 90))
        assert job.take() == []
        job.advance_processing_time("2 s")
        assert [row["n"] for row in job.take()] == [2]


def test_a_bounded_input_never_becomes_idle_as_in_a_real_job():
    env = Environment()
    strategy = WatermarkStrategy.monotonous("5 s")
    stream = env.generate(lambda i: {}, schema=ORDER).uid("stream").with_watermarks("at", strategy)
    file = env.from_collection([], schema=ORDER).uid("file").with_watermarks("at", strategy)
    window = stream.union(file).key_by("user").window(tumbling("1 min")).aggregate(n=Count())
    with testing.job(window) as job:
        job.feed("stream", [order("ann", 1, 0), order("ann", 1, 90)]).advance_processing_time("1 h")
        assert job.take() == []
        job.end("file")
        assert [row["n"] for row in job.take()] == [1]


class Named(CoProcessFunction):
    name = ValueState(str)

    def process1(self, row, ctx):
        ctx.timers.event_time(row["at"])

    def process2(self, row, ctx):
        self.name.value = row["name"]

    def on_timer(self, time, ctx):
        yield {"user": ctx.key, "at": time, "name": self.name.value}


USER = {"user": str, "name": str}


def named(names, *, first: bool):
    env = Environment()
    timed, table = orders(env), names(env).uid("names")
    streams = timed.key_by("user"), table.key_by("user")
    if first:
        return streams[1].connect(streams[0]).process(NamedByTable(), {"user": str, "at": datetime, "name": str})
    return streams[0].connect(streams[1]).process(Named(), {"user": str, "at": datetime, "name": str})


class NamedByTable(Named):
    process1, process2 = Named.process2, Named.process1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_bounded_table_is_complete_before_a_timer_fires_however_batches_are_cut(first, parallelism):
    stream = named(lambda env: env.from_collection([], schema=USER), first=first)
    rows = {
        "orders": [order(user, 1, 10 * i) for i in range(9) for user in "ab"],
        "names": [{"user": user, "name": name} for name in ("old", "new") for user in "xyab"],
    }
    result = testing.check_cuts(stream, rows, parallelism=parallelism)
    assert [row["name"] for row in result.rows] == ["new"] * 18


@pytest.mark.parametrize("first", [True, False])
def test_a_bounded_table_ends_after_its_last_row_also_if_the_input_does_not(first):
    stream = named(lambda env: env.from_collection([], schema=USER), first=first)
    rows = [order("a", 1, 10 * i) for i in range(5)]
    for names, expected in (([{"user": "a", "name": "new"}], ["new"] * 4), ([], [None] * 4)):
        for cut in (1, "whole"):
            result = testing.run(stream, {"orders": rows, "names": names}, cut=cut, ends=False)
            assert [row["name"] for row in result.rows] == expected


@pytest.mark.parametrize("first", [True, False])
def test_a_bounded_table_holds_back_event_time_until_the_test_ends_it(first):
    stream = named(lambda env: env.from_collection([], schema=USER), first=first)
    with testing.job(stream) as job:
        job.feed("orders", [order("a", 1, 10 * i) for i in range(5)]).advance_to("2024-01-02")
        assert job.take() == []
        job.feed("names", {"user": "a", "name": "new"}).end("names")
        assert [row["name"] for row in job.take()] == ["new"] * 5


@pytest.mark.parametrize("first", [True, False])
def test_an_unbounded_table_does_not_hold_back_event_time(first):
    stream = named(lambda env: env.generate(lambda i: {}, schema=USER), first=first)
    with testing.job(stream) as job:
        job.feed("orders", [order("a", 1, 10 * i) for i in range(5)])
        assert [row["name"] for row in job.take()] == [None] * 4


def test_event_time_of_two_inputs_is_the_lower_one():
    env = Environment()
    first = env.from_collection([], schema=ORDER).uid("first").with_watermarks("at", WatermarkStrategy.monotonous())
    second = env.from_collection([], schema=ORDER).uid("second").with_watermarks("at", WatermarkStrategy.monotonous())
    joined = first.key_by("user").connect(second.key_by("user")).process(Both(), {"user": str, "text": str})
    with testing.job(joined) as job:
        job.feed("first", order("ann", 1, 0)).feed("second", order("ann", 2, 1))
        job.advance_to(NOON + timedelta(minutes=5), "first")
        assert job.take() == []
        job.advance_to(NOON + timedelta(minutes=5), "second")
        assert job.take() == [{"user": "ann", "text": "1+2"}]
        job.feed("first", order("bob", 1, 600))
        job.end("second")
        job.advance_to(NOON + timedelta(minutes=15))
        assert job.take() == [{"user": "bob", "text": "1"}]


class Both(CoProcessFunction):
    values = ListState()

    def process1(self, row, ctx):
        self.values.append(row["price"])
        ctx.timers.event_time(ctx.timestamp + timedelta(minutes=1))

    process2 = process1

    def on_timer(self, at, ctx):
        if not self.values:
            return None
        text = "+".join(map(str, self.values))
        self.values.clear()
        return {"user": ctx.key, "text": text}


class Priced(BroadcastProcessFunction):
    factor = BroadcastState()
    counts = MapState()

    def process(self, row, ctx):
        self.counts[row["price"]] = self.counts.get(row["price"], 0) + 1
        return {"user": row["user"], "price": row["price"] * self.factor.get("factor", 1)}

    def process_broadcast(self, row, ctx):
        self.factor["factor"] = row["factor"]


def test_state_can_be_read_and_survives_another_parallelism():
    env = Environment()
    factors = env.from_collection([], schema={"factor": int}).uid("factors")
    stream = (
        orders(env)
        .key_by("user")
        .connect(factors.broadcast())
        .process(Priced(), {"user": str, "price": int})
        .uid("priced")
    )
    with testing.job(stream) as job:
        job.feed("factors", {"factor": 2})
        for user in "abcdefgh":
            job.feed("orders", order(user, 3, 0))
        assert job.state("priced")["factor"] == {"factor": 2}
        before = job.state("priced")["counts"]
        assert before == {user: {3: 1} for user in "abcdefgh"}
        for parallelism in (3, 2, 5, 1):
            job.snapshot_and_restore(parallelism)
            assert job.state("priced") == {"factor": {"factor": 2}, "counts": before}
        job.take()
        job.feed("orders", order("a", 3, 0))
        assert job.take() == [{"user": "a", "price": 6}]
        assert job.state("priced")["counts"]["a"] == {3: 2}


def test_a_changed_job_goes_on_from_a_snapshot():
    def totals(factor: int):
        env = Environment()
        scaled = orders(env).with_columns(price=pl.col("price") * factor)
        return scaled.key_by("user").process(
            Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}}
        )

    with testing.job(totals(1)) as job:
        snapshot = job.feed(order("ann", 3, 0)).snapshot()
        job.feed(order("ann", 90, 0))
    assert testing.run(totals(10), [order("ann", 1, 1)], restore=snapshot).rows == [{"user": "ann", "total": 13}]
    assert testing.run(totals(2), [order("ann", 1, 1)], restore=snapshot).rows == [{"user": "ann", "total": 5}]


def test_what_two_jobs_store_after_one_snapshot_is_apart_and_beside_what_it_holds():
    """State as large as this is in files, to which later snapshots refer by chunks."""
    env = Environment()
    totals = (
        orders(env)
        .key_by("user")
        .process(Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}})
    )
    users = [f"user {n}" for n in range(6_000)]
    with testing.job(totals.uid("totals")) as job:
        first = job.feed([order(user, 1, 0) for user in users], cut="whole").snapshot()
    seconds = []
    for price in (5, 7):
        with testing.job(totals, restore=first) as job:
            seconds.append(job.feed([order(user, price, 0) for user in users[:4_000]], cut="whole").snapshot())
    for price, second in zip((5, 7), seconds, strict=True):
        with testing.job(totals, restore=second) as job:
            held = job.state("totals")["total"]
        assert (held["user 0"], held["user 5999"]) == (1 + price, 1)


def test_what_a_function_keeps_outside_of_its_states_is_gone_after_a_restore():
    class Forgetful(KeyedProcessFunction):
        def open(self, context):
            self.seen = set()

        def process(self, row, ctx):
            if row["user"] not in self.seen:
                self.seen.add(row["user"])
                return {"user": row["user"]}
            return None

    stream = orders(Environment()).key_by("user").process(Forgetful(), {"user": str})
    with testing.job(stream) as job:
        job.feed(order("ann", 1, 0)).feed(order("ann", 1, 0))
        assert len(job.take()) == 1
        job.snapshot_and_restore().feed(order("ann", 1, 0))
        assert len(job.take()) == 1


def test_two_runs_of_one_job_share_nothing():
    stream = (
        orders(Environment())
        .key_by("user")
        .process(Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}})
    )
    assert [testing.run(stream, [order("ann", 5, 0)]).rows[-1]["total"] for _ in range(3)] == [5, 5, 5]


def test_a_function_that_raises_raises_in_the_test_with_its_place():
    def reciprocal(row):
        return {"n": 1 / row["n"]}

    stream = Environment().from_collection([{"n": 2.0}, {"n": 0.0}]).map(reciprocal).name("reciprocal")
    with pytest.raises(ZeroDivisionError) as caught:
        testing.run(stream)
    notes = " ".join(caught.value.__notes__)
    assert "operator 'reciprocal'" in notes
    assert "{'n': 0.0}" in notes
    assert "row 1 of the input 'collection-1'" in notes


def test_an_error_after_a_shuffle_names_the_row_of_the_input_too():
    class Fails(KeyedProcessFunction):
        def process(self, row, ctx):
            raise LookupError(row["user"])

    stream = orders(Environment()).key_by("user").process(Fails(), {"user": str})
    with pytest.raises(LookupError, match="ann") as caught:
        testing.run(stream, [order("ann", 1, 0)])
    assert "row 0 of the input 'orders'" in " ".join(caught.value.__notes__)


def test_an_error_of_midstreams_own_stays_what_it_is():
    stream = Environment().from_collection([{"n": 1}]).map(lambda row: {"m": 1})
    with pytest.raises(JobError, match="no column 'n'"):
        testing.run(stream)


def test_a_function_that_fails_to_open_raises():
    class Opening(KeyedProcessFunction):
        def open(self, context):
            raise PermissionError("no key")

        def process(self, row, ctx):
            return None

    stream = orders(Environment()).key_by("user").process(Opening(), {"user": str})
    with pytest.raises(PermissionError, match="no key"):
        testing.run(stream, [order("ann", 1, 0)])


def test_inputs_are_dicts_frames_or_tables_and_become_what_the_source_would_give():
    env = Environment()
    stream = env.from_collection([], schema={"n": pa.int32(), "at": datetime, "text": str})
    at = datetime(2024, 1, 1, 12, 5)
    for rows in (
        [{"n": 1, "at": "2024-01-01 12:05"}],
        {"n": 1, "at": at},
        pl.DataFrame({"n": [1], "at": [at], "text": [None]}),
        pa.table({"n": [1], "at": [at], "text": pa.nulls(1)}),
        pa.RecordBatch.from_pydict({"text": pa.nulls(1), "n": [1], "at": [at]}),
    ):
        table = testing.run(stream, {"collection-1": rows}).table(stream)
        assert table.schema == stream.schema
        assert table.to_pylist() == [{"n": 1, "at": at, "text": None}]


def test_one_row_of_the_only_source_needs_no_name():
    stream = orders(Environment()).filter(pl.col("price") > 1)
    assert len(testing.run(stream, order("ann", 2, 0)).rows) == 1
    assert len(testing.run(stream, [order("ann", 2, 0)]).rows) == 1


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"order": []}, ConfigError, "'order' is no source of the job; name one by its uid: 'orders', 'others'"),
        ([{"price": 1}], ConfigError, "has 2 sources, so name the source of these rows"),
        (
            {"orders": [{"prize": 1}]},
            SchemaError,
            "input 'orders': column 'prize' of row 0 is not in the declared schema",
        ),
        ({"orders": [{"price": "1"}]}, SchemaError, "input 'orders': column 'price' of row 0"),
        ({"orders": [{"at": "noon"}]}, SchemaError, "'noon' is not a time"),
        ({"orders": [1]}, SchemaError, "row 0 is 1, not a dict"),
        ({"orders": "ann"}, SchemaError, "are not rows"),
    ],
    ids=["name", "whose", "column", "type", "time", "row", "text"],
)
def test_inputs_that_do_not_fit_are_refused(inputs, error, message):
    env = Environment()
    orders(env).print()
    env.from_collection([], schema=ORDER).uid("others").print()
    with pytest.raises(error, match=message):
        testing.run(env, inputs)


def test_a_source_that_only_a_real_job_can_read_is_refused_by_name(tmp_path):
    pl.DataFrame({"n": [1]}).write_parquet(tmp_path / "in.parquet")
    env = Environment()
    files = env.read_files(tmp_path).uid("numbers").filter(pl.col("n") > 0)
    endless = env.generate(lambda i: {"n": i}).uid("ticks")
    with pytest.raises(JobError, match=r"source 'numbers' \(FileSource\) is not in memory"):
        testing.run(files)
    with pytest.raises(JobError, match=r"source 'ticks' \(GeneratorSource\) has no end"):
        testing.run(endless)
    assert testing.run(files, {"numbers": [{"n": 5}]}).rows == [{"n": 5}]
    assert testing.run(endless, {"ticks": [{"n": 5}]}).rows == [{"n": 5}]
    assert len(testing.run(env.generate(lambda i: {"n": i}, count=7)).rows) == 7


@pytest.mark.parametrize("cut", [0, -1, True, "half", [], [2, 0], 1.5], ids=str)
def test_a_cut_that_is_none_is_refused(cut):
    with pytest.raises(ConfigError, match="give a number of rows, 'whole', or a list"):
        testing.run(Environment().from_collection([{"n": 1}]), cut=cut)


def test_batches_are_cut_as_the_test_requests():
    stream = (
        Environment()
        .from_collection([{"n": i} for i in range(6)])
        .map_batches(lambda frame: frame.select(n=pl.len().cast(pl.Int64)).head(1))
    )
    assert [row["n"] for row in testing.run(stream).rows] == [1] * 6
    assert [row["n"] for row in testing.run(stream, cut="whole").rows] == [6]
    assert [row["n"] for row in testing.run(stream, cut=[1, 2]).rows] == [1, 2, 2, 1]


def test_advance_to_without_event_time_is_refused():
    env = Environment()
    plain = env.from_collection([], schema=ORDER).uid("plain")
    timed = orders(env)
    with testing.job(plain) as job, pytest.raises(JobError, match="the job has no event time"):
        job.advance_to(NOON)
    with testing.job([plain, timed]) as job:
        with pytest.raises(JobError, match="rows of 'plain' have no event time"):
            job.advance_to(NOON, "plain")
        with pytest.raises(ConfigError, match="'soon' is not a time"):
            job.advance_to("soon")


@pytest.mark.parametrize("what", [None, [], 3, [3], "job.py"], ids=str)
def test_what_is_no_job_is_refused(what):
    with pytest.raises(ConfigError, match="neither an Environment nor a stream"):
        testing.run(what)


def test_a_job_without_streams_is_refused():
    with pytest.raises(JobError, match="no streams"):
        testing.run(Environment())


def test_at_another_parallelism_the_rows_are_the_same():
    env = Environment()
    stream = (
        orders(env)
        .key_by("user")
        .process(Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}})
    )
    rows = [order(user, price, 0) for price in range(5) for user in "abcdef"]
    expected = sorted(map(str, testing.run(stream, rows).rows))
    for parallelism in (2, 3, 7):
        assert sorted(map(str, testing.run(stream, rows, parallelism=parallelism).rows)) == expected
    with pytest.raises(ConfigError, match="parallelism"):
        testing.run(stream, rows, parallelism=0)


# ---- the same whatever the cuts ----


def test_a_job_that_treats_rows_one_by_one_does_not_depend_on_the_cuts():
    stream = (
        orders(Environment())
        .key_by("user")
        .process(Running(), {"user": str, "total": int}, side_outputs={"large": {"user": str}})
    )
    rows = [order("ann" if i % 3 else "bob", i * 10, i) for i in range(20)]
    assert len(testing.check_cuts(stream, rows).rows) == 20


def test_a_function_that_depends_on_the_whole_batch_is_reported():
    stream = (
        Environment()
        .from_collection([{"n": i} for i in range(9)])
        .map_batches(lambda frame: frame.select(pl.col("n") - pl.col("n").min()))
    )
    with pytest.raises(
        AssertionError,
        match=r"(?s)depends on where batches are cut.*map_batches-1.*only with the whole input in one batch:.*'n': 5",
    ):
        testing.check_cuts(stream)


def test_rows_that_are_late_with_some_cuts_only_are_reported_as_such():
    window = orders(Environment()).key_by("user").window(tumbling("1 min")).aggregate(total=Sum("price"))
    rows = [order("ann", 1, 0), order("ann", 2, 70), order("ann", 4, 30)]
    with pytest.raises(AssertionError, match=r"(?s)side output 'late'.*later\s+than with_watermarks\(\) allows"):
        testing.check_cuts(window, rows)


def test_splits_with_event_times_of_their_own_are_refused_not_mixed() -> None:
    """If fed one after the other, the rows of the second would be late, which they are not in a job."""

    def windows(splits: int) -> DataStream:
        made = Environment().generate(
            lambda i: {"at": (i % 50).astype("datetime64[s]"), "n": i}, count=100, splits=splits
        )
        timed = made.with_watermarks("at", WatermarkStrategy.bounded("1 h"))
        return timed.window_all(tumbling("10 s")).aggregate(n=Count())

    assert [row["n"] for row in testing.run(windows(1)).rows] == [20] * 5
    with pytest.raises(
        JobError, match=r"is read in 2 splits, each with its own event time.* splits=1, or give it rows"
    ):
        testing.run(windows(2))
    plain = Environment().generate(lambda i: {"n": i}, count=10, splits=2)
    assert sorted(row["n"] for row in testing.run(plain).rows) == list(range(10))


def test_the_last_digits_of_a_sum_do_not_depend_on_where_batches_are_cut() -> None:
    chance = random.Random(1)
    start = datetime(2024, 1, 1)
    rows = [{"k": "a", "x": chance.random(), "at": start + timedelta(seconds=i)} for i in range(20)]
    timed = Environment().from_collection(rows, splits=1).with_watermarks("at", WatermarkStrategy.bounded("5 s"))
    sums = timed.key_by("k").window(tumbling("20 s")).aggregate(s=Sum("x"), m=Mean("x"))
    assert len(testing.check_cuts(sums).rows) == 1


def test_rows_of_an_iterator_are_read_again_for_each_cut() -> None:
    stream = Environment().from_collection([], schema={"n": int}).map(lambda row: row)
    assert len(testing.check_cuts(stream, ({"n": i} for i in range(5))).rows) == 5
    assert len(testing.check_cuts(stream, {"collection-1": ({"n": i} for i in range(5))}).rows) == 5


def test_floats_that_differ_by_the_order_of_adding_do_not_depend_on_cuts():
    def scaled(batch):
        return batch.select(n=pl.col("n") * 0.1 * (3 if batch.height == 1 else 1) / (3 if batch.height == 1 else 1))

    def lost(batch):
        return batch.select(n=pl.col("n") * 1e-10 * batch.height)

    numbers = Environment().from_collection([{"n": float(n)} for n in range(1, 9)])
    testing.check_cuts(numbers.map_batches(scaled, {"n": float}))
    with pytest.raises(AssertionError, match="depends on where batches are cut"):
        testing.check_cuts(numbers.map_batches(lost, {"n": float}))


def test_a_stream_has_the_settings_of_its_environment():
    env = Environment("narrow", max_parallelism=4)
    numbers = env.from_collection([{"n": 1}])
    for what in (env, numbers, [numbers]):
        with pytest.raises(ConfigError, match="max_parallelism"):
            testing.run(what, parallelism=8)


def failing(row):
    return {"n": 1 // row["n"]}


def test_an_operator_that_fails_is_named_by_its_uid():
    numbers = Environment().from_collection([{"n": 1}, {"n": 0}])
    stream = numbers.map(lambda row: row).map(failing, {"n": int}).uid("inverted").map(lambda row: row)
    with pytest.raises(ZeroDivisionError) as raised:
        testing.run(stream)
    assert "uid 'inverted'" in " ".join(raised.value.__notes__)


def test_a_result_that_depends_on_chance_is_not_blamed_on_cuts():
    stream = (
        Environment()
        .from_collection([{"n": n} for n in range(20)])
        .map(lambda row: {"n": random.random()}, {"n": float})
    )
    with pytest.raises(AssertionError, match="the result differs from run to run, with the same cuts too"):
        testing.check_cuts(stream)


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there is none")


def fail_at_three(failure: BaseException):
    def fail(row):
        if row["n"] == 3:
            raise failure
        return row

    class Fails(KeyedProcessFunction):
        def process(self, row, ctx):
            return fail(row)

    class FailsLater(KeyedProcessFunction):
        def process(self, row, ctx):
            ctx.timers.event_time(row["n"])

        def on_timer(self, time, ctx):
            return fail({"n": ctx.key})

    def batches(frame):
        fail({"n": 3})

    numbers = Environment().from_collection([{"n": i} for i in range(5)])
    return {
        "map": numbers.map(fail),
        "filter": numbers.filter(fail),
        "flat_map": numbers.flat_map(lambda row: [fail(row)]),
        "map_batches": numbers.map_batches(batches),
        "process": numbers.key_by("n").process(Fails(), {"n": int}),
        "on_timer": numbers.key_by("n").process(FailsLater(), {"n": int}),
    }


@pytest.mark.parametrize("kind", fail_at_three(ValueError()))
@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (NoText(), "NoText.*no text: its __str__ raised RuntimeError"),
        (SystemExit("enough"), "SystemExit.*: enough; a fun"),
    ],
)
def test_what_a_function_raises_is_shown_with_its_type_and_its_row(kind, failure, text):
    with pytest.raises((NoText, JobError)) as raised:
        testing.run(fail_at_three(failure)[kind])
    shown = " ".join(raised.value.__notes__)
    assert re.search(f"raised {text}", shown)
    assert kind == "map_batches" or re.search(r"'n': 3|\(key 3\)", shown)


def test_arithmetic_with_event_time_before_the_first_watermark_is_explained():
    class WeekAgo(KeyedProcessFunction):
        def process(self, row, ctx):
            return {"late": row["at"] < ctx.watermark - timedelta(days=7)}

    stream = orders(Environment()).key_by("user").process(WeekAgo(), {"late": bool})
    with pytest.raises(OverflowError) as raised:
        testing.run(stream, [order("ann", 1, 0)])
    assert "ctx.watermark is datetime.min, as before the first watermark" in " ".join(raised.value.__notes__)
