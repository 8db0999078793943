"""What people do to `testing` that is not in its page."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    FAILED,
    ConfigError,
    CoProcessFunction,
    Count,
    Environment,
    JobError,
    KeyedProcessFunction,
    ListState,
    MapState,
    SchemaError,
    ValueState,
    WatermarkStrategy,
    testing,
    tumbling,
)
from midstream.inprocess import in_process_job

ROW = {"user": str, "n": int}


@dataclasses.dataclass
class Basket:
    items: list[int]


class Baskets(KeyedProcessFunction):
    """Untyped state of a class of the job's own, changed in place."""

    basket = ValueState()
    seen = ListState()
    counts = MapState()

    def process(self, row, ctx):
        basket = self.basket.value or Basket([])
        basket.items.append(row["n"])
        self.basket.value = basket
        self.seen.append(basket)
        self.counts[row["n"]] = basket
        return {"user": row["user"], "n": sum(basket.items)}


def baskets():
    stream = Environment().from_collection([], schema=ROW).uid("rows")
    return stream.key_by("user").process(Baskets(), ROW).uid("baskets")


def test_objects_of_the_jobs_own_survive_every_restore():
    with testing.job(baskets()) as job:
        for number in range(4):
            for user in "abcdef":
                job.feed({"user": user, "n": number})
            job.snapshot_and_restore(number + 2)
            assert len(job.operators("baskets")) == number + 2
        state = job.state("baskets")
        assert state["basket"] == {user: Basket([0, 1, 2, 3]) for user in "abcdef"}
        state["basket"]["a"].items.clear()  # the test gets a copy
        assert job.state("baskets")["basket"]["a"] == Basket([0, 1, 2, 3])
        assert len(job.take()) == 24


def test_looking_at_the_state_changes_nothing():
    with testing.job(baskets()) as job:
        for number in range(5):
            job.feed({"user": "a", "n": number})
            before = job.state("baskets")
            snapshot = job.snapshot()
            assert job.state("baskets") == before
        job.feed({"user": "a", "n": 100})
    with testing.job(baskets(), restore=snapshot) as other:
        assert other.state("baskets")["basket"]["a"] == Basket([0, 1, 2, 3, 4])


def test_a_job_that_has_failed_refuses_to_go_on_and_another_goes_on_from_its_snapshot():
    class Fails(Baskets):
        def process(self, row, ctx):
            if row["n"] == 3:
                raise RuntimeError("three")
            return super().process(row, ctx)

    stream = Environment().from_collection([], schema=ROW).uid("rows")
    stream = stream.key_by("user").process(Fails(), ROW).uid("baskets")
    with testing.job(stream) as job:
        snapshot = job.feed({"user": "a", "n": 1}).snapshot()
        with pytest.raises(RuntimeError, match="three"):
            job.feed({"user": "a", "n": 3})
        for call in (
            lambda: job.feed({"user": "a", "n": 1}),
            job.end,
            job.snapshot,
            job.snapshot_and_restore,
            lambda: job.advance_processing_time("1 s"),
        ):
            with pytest.raises(JobError, match="the job has failed: process"):
                call()
        assert job.take() == [{"user": "a", "n": 1}]
    assert testing.run(baskets(), [{"user": "a", "n": 5}], restore=snapshot).rows == [{"user": "a", "n": 6}]


class Again(KeyedProcessFunction):
    """A timer that sets itself again, without an end."""

    def process(self, row, ctx):
        ctx.timers.event_time(0)

    def on_timer(self, at, ctx):
        ctx.timers.event_time(at + timedelta(microseconds=1))


def test_a_timer_without_an_end_does_not_hang_the_test(monkeypatch):
    monkeypatch.setattr(in_process_job, "CALL_S_MAX", 0.2)
    stream = Environment().from_collection([{"user": "a"}]).key_by("user").process(Again(), {"user": str})
    with pytest.raises(JobError, match=r"seems endless: a timer may set itself again"):
        testing.run(stream)


def test_a_timer_of_the_wall_clock_that_is_always_due_does_not_hang_it_either(monkeypatch):
    class Now(Again):
        def process(self, row, ctx):
            ctx.timers.processing_time(ctx.now)

        def on_timer(self, at, ctx):
            ctx.timers.processing_time(ctx.now)

    monkeypatch.setattr(in_process_job, "CALL_S_MAX", 0.2)
    stream = Environment().from_collection([{"user": "a"}]).key_by("user").process(Now(), {"user": str})
    with testing.job(stream) as job, pytest.raises(JobError, match="seems endless"):
        job.feed_all().advance_processing_time("1 s")


def test_no_rows_at_all():
    assert testing.run(baskets(), []).rows == []
    assert testing.run(baskets()).rows == []
    assert testing.check_cuts(baskets(), []).rows == []
    with testing.job(baskets()) as job:
        assert job.feed([]).end().take() == []


def test_a_stream_after_a_rebalance_or_a_broadcast_is_what_it_is_made_of():
    stream = Environment().from_collection([{"n": 1}])
    for other in (stream.rebalance(), stream.global_(), stream.broadcast(), stream.forward()):
        assert testing.run(other).rows == [{"n": 1}]


def test_one_stream_read_twice_is_two_outputs():
    env = Environment()
    numbers = env.from_collection([{"n": 1}, {"n": 2}])
    numbers.filter(pl.col("n") > 1).print().uid("large")
    numbers.filter(pl.col("n") < 2).print().uid("small")
    result = testing.run(env)
    assert (result["large"], result["small"]) == ([{"n": 2}], [{"n": 1}])


def test_operators_that_set_their_parallelism_run_at_that_of_the_test():
    env = Environment(parallelism=8)
    stream = env.from_collection([], schema=ROW).uid("rows").parallelism(4).map(lambda row: row).parallelism(2)
    stream = stream.key_by("user").process(Baskets(), ROW).parallelism(6).uid("baskets")
    with testing.job(stream) as job:
        assert len(job.operators("baskets")) == 1
        job.snapshot_and_restore(3)
        assert len(job.operators("baskets")) == 3
        job.feed([{"user": user, "n": 1} for user in "abc"])
        assert len(job.take()) == 3


def test_event_time_with_a_zone():
    class Hourly(KeyedProcessFunction):
        def process(self, row, ctx):
            assert ctx.timestamp.tzinfo is not None
            ctx.timers.event_time(ctx.timestamp + timedelta(hours=1))

        def on_timer(self, at, ctx):
            return {"user": ctx.key, "at": at}

    columns = {"user": str, "at": pa.timestamp("us", "Europe/Berlin")}
    function = testing.harness(Hourly(), columns, columns, key="user", event_time="at")
    function.process([{"user": "a", "at": "2024-01-01T12:00:00+01:00"}, {"user": "b", "at": "2024-01-01 12:00"}])
    assert [at for at, _ in function.timers[0]] == [datetime(2024, 1, 1, hour, tzinfo=UTC) for hour in (12, 13)]
    assert [row["user"] for row in function.advance_to(datetime(2024, 1, 1, 12, tzinfo=UTC))] == ["a"]
    assert [row["user"] for row in function.fire_timers()] == ["b"]
    with pytest.raises(SchemaError, match="has a zone, but the column has none"):
        testing.run(Environment().from_collection([], schema={"at": datetime}), [{"at": "2024-01-01T12:00:00+01:00"}])


def test_keys_of_two_columns_and_of_instants():
    class Counter(KeyedProcessFunction):
        n = ValueState(default=0)

        def process(self, row, ctx):
            self.n.value += 1

    columns = {"a": int, "at": pa.timestamp("ms", "UTC")}
    function = testing.harness(Counter(), columns, {"n": int}, key=("a", "at"))
    at = datetime(2024, 1, 1, tzinfo=UTC)
    function.process([{"a": 1, "at": at}, {"a": 1, "at": at}, {"a": 2, "at": at}])
    assert function.snapshot_and_restore(4).state == {"n": {(1, at): 2, (2, at): 1}}


def test_columns_of_a_row_are_not_taken_for_names_of_inputs():
    stream = Environment().from_collection(
        [], schema={"rows": pa.list_(pa.int64()), "x": pa.struct([("y", pa.int64())])}
    )
    stream = stream.uid("input")
    row = {"rows": [1, 2], "x": {"y": 3}}
    assert testing.run(stream, row).rows == [row]
    assert testing.run(stream, {"input": row}).rows == [row]
    with pytest.raises(Exception, match="'inputs' is no source of the job; name one by its uid: 'input'"):
        testing.run(stream, {"inputs": [row]})
    with pytest.raises(SchemaError, match="column 'z' of row 0 is not in the declared schema"):
        testing.run(stream, {"rows": [1], "z": 3})


class Pairs(CoProcessFunction):
    last = ValueState()

    def process1(self, row, ctx):
        self.last.value = row["n"]

    def process2(self, row, ctx):
        return {"user": row["user"], "n": self.last.value}


def test_inputs_take_turns_and_the_test_may_order_them_itself():
    env = Environment()
    left = env.from_collection([], schema=ROW).uid("left").key_by("user")
    right = env.from_collection([], schema=ROW).uid("right").key_by("user")
    pairs = left.connect(right).process(Pairs(), ROW)
    rows = [{"user": "a", "n": n} for n in range(3)]
    assert [row["n"] for row in testing.run(pairs, {"right": rows, "left": rows}).rows] == [0, 1, 2]
    with testing.job(pairs) as job:
        job.feed("right", rows).feed("left", rows).feed("right", rows[:1])
        assert [row["n"] for row in job.take()] == [None, None, None, 2]


def test_a_window_of_a_job_with_watermarks_of_its_own_needs_no_help():
    stream = Environment().from_collection([], schema={"at": datetime, "n": int}).uid("rows")
    window = stream.with_watermarks("at", WatermarkStrategy.bounded("5 s")).window_all(tumbling("1 min"))
    counted = window.aggregate(n=Count())
    with testing.job(counted) as job:
        job.feed([{"at": f"2024-01-01 12:00:{second:02d}"} for second in (1, 59)])
        job.feed({"at": "2024-01-01 12:01:04"})
        assert job.take() == []
        job.feed({"at": "2024-01-01 12:01:05"})
        assert [row["n"] for row in job.take()] == [2]


def test_many_rows_in_large_batches():
    stream = Environment().from_collection(pl.DataFrame({"n": range(200_000)})).filter(pl.col("n") % 2 == 0)
    assert testing.run(stream, cut=50_000).table(stream).num_rows == 100_000


def test_after_the_block_nothing_more_is_fed():
    with testing.job(baskets()) as job:
        job.feed({"user": "a", "n": 1})
    with pytest.raises(JobError, match="the job is closed"):
        job.feed({"user": "a", "n": 1})
    assert job.take() == [{"user": "a", "n": 1}]


def test_a_snapshot_of_another_job_is_refused():
    with testing.job(baskets()) as job:
        snapshot = job.feed({"user": "a", "n": 1}).snapshot()
    other = Environment().from_collection([], schema=ROW).uid("rows").filter(pl.col("n") > 0)
    with pytest.raises(Exception, match="'baskets'"):
        testing.job(other, restore=snapshot)


def test_a_function_that_exits_does_not_end_the_test_run():
    def leaves(row):
        raise SystemExit(3)

    stream = Environment().from_collection([{"n": 1}]).map(leaves)
    for call in (lambda: testing.run(stream), stream.preview):
        with pytest.raises(JobError, match=r"SystemExit for the row \{'n': 1\}: 3") as caught:
            call()
        assert isinstance(caught.value.__cause__, SystemExit)


def test_an_exception_without_a_text_is_raised_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise IndexError("no text")

    def raises(row):
        raise Mute

    with pytest.raises(Exception) as caught:
        testing.run(Environment().from_collection([{"n": 1}]).map(raises))
    assert isinstance(caught.value, (Mute, IndexError))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: testing.job(baskets(), restore="latest"), "restore: 'latest' is not a snapshot"),  # type: ignore[arg-type]
        (lambda: testing.job(baskets()).state("basket"), "the job has 0 of that name; uids are baskets"),
        (lambda: testing.check_source(5), "5 is not a Source"),  # type: ignore[arg-type]
        (lambda: testing.check_sink(5), "5 is not a function that returns a sink"),  # type: ignore[arg-type]
        (lambda: testing.check_sink(lambda: 5), r"target\(\) returned 5"),  # type: ignore[arg-type, return-value]
    ],
    ids=["restore", "operator", "source", "target", "sink"],
)
def test_what_is_given_in_the_wrong_position_is_reported(call, message):
    with pytest.raises((AssertionError, ConfigError), match=message):
        call()


class LastText(KeyedProcessFunction):
    text = ValueState[str](pa.string_view(), default="")

    def process(self, row, ctx):
        self.text.value = row["text"]


def test_state_in_views_of_text_comes_back_at_another_parallelism() -> None:
    """Arrow has no filter for them."""
    function = testing.harness(LastText(), {"k": int, "text": str}, {"k": int}, key="k")
    texts = {k: f"text {k} of more than twelve bytes" for k in range(20)}
    function.process([{"k": k, "text": text} for k, text in texts.items()])
    assert function.snapshot_and_restore(3).state == {"text": texts}


def test_a_function_that_exits_outside_of_the_loop_has_failed_like_another():
    def leaves(*row):
        raise SystemExit(3)

    async def leaves_awaited(row):
        raise SystemExit(3)

    stream = Environment().from_collection([{"n": 1}])
    for made in (
        stream.map_async(leaves, retries=0),
        stream.map_async(leaves_awaited, {"n": int}, retries=0),
        stream.join_table(leaves, on="n", schema={"n": int, "name": str}),
    ):
        with pytest.raises(JobError, match=r"SystemExit.*3") as caught:
            testing.run(made)
        assert isinstance(caught.value.__cause__, SystemExit)
    apart = stream.map_async(leaves, retries=0, on_error="side_output")
    [failed] = testing.run(apart.side_output(FAILED)).rows
    assert failed["error_type"] == "SystemExit"


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_snapshot_is_taken_while_rows_wait_for_calls_that_are_to_be_repeated(tmp_path, parallelism):
    down = tmp_path / "down"

    def may_fail(row):
        if down.exists():
            raise LookupError("not there")
        return row

    down.touch()
    stream = Environment().from_collection([], schema=ROW).uid("rows")
    made = stream.rebalance().map_async(may_fail, ROW, capacity=1, retries=1000).uid("calls")
    with testing.job(made) as job:
        job.feed([{"user": "ann", "n": n} for n in range(6)])
        snapshot = job.snapshot()
        job.advance_processing_time("1 s")
        job.snapshot()
    down.unlink()
    with testing.job(made, restore=snapshot, parallelism=parallelism) as job:
        job.end()
        assert sorted(row["n"] for row in job.take()) == list(range(6))


def test_a_snapshot_that_rows_of_a_broadcast_hold_up_is_refused_and_taken_later():
    class Fails:
        calls = 0

        def __call__(self, row):
            Fails.calls += 1
            if self.calls < 3:
                raise LookupError("not there")
            return row

    stream = Environment().from_collection([], schema=ROW)
    made = stream.broadcast().map_async(Fails(), ROW, capacity=1, retries=1000)
    with testing.job(made) as job:
        job.feed([{"user": "ann", "n": n} for n in range(6)])
        with pytest.raises(
            JobError, match=r"rows wait for 'map_async.*Let time pass first, with advance_processing_time"
        ):
            job.snapshot()
        job.advance_processing_time("1 min")
        snapshot = job.snapshot()
        assert [row["n"] for row in job.take()] == list(range(6))
    with testing.job(made, restore=snapshot) as job:
        job.end()
        assert job.take() == []
