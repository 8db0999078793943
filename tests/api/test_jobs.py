"""Whole jobs through the API on plain processes: what every operator does to its rows, and how jobs end."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from jobs import check_gapless
from midstream import (
    LATE,
    Accumulator,
    BroadcastProcessFunction,
    BroadcastState,
    CollectSink,
    ConfigError,
    CoProcessFunction,
    Count,
    Environment,
    First,
    JobError,
    KeyedProcessFunction,
    Last,
    ListState,
    MapState,
    Max,
    Mean,
    Min,
    ReducingState,
    Sink,
    Source,
    Sum,
    Tuning,
    ValueState,
    WatermarkStrategy,
    fixed_restarts,
    no_restart,
    session,
    sliding,
    tumbling,
)
from midstream.engine.operators.sink_api import SinkWriter
from midstream.engine.operators.source_api import Discovery, Split, SplitReader
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

START = datetime(2024, 1, 1)


def run(env: Environment, **settings: Any) -> None:
    status = env.execute(slots=ProcessSlots(), **settings)
    assert status.state == "finished"


def values(sink: CollectSink, *columns: str) -> list[Any]:
    """The rows as sorted tuples; plain values when one column is requested."""
    rows = [tuple(row[column] for column in columns) for row in sink.rows()]
    return sorted(row[0] if len(columns) == 1 else row for row in rows)


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


# ---- rows to rows


@pytest.mark.systems
def test_operators_without_state_and_every_partitioning():
    env = Environment("stateless", parallelism=2)
    numbers = env.generate(lambda i: {"n": i}, count=100)
    even = numbers.filter(pl.col("n") % 2 == 0)
    by_function = numbers.filter(lambda row: row["n"] >= 90).parallelism(1).collect()
    selected = (
        even.select("n", half=pl.col("n") // 2).rebalance().with_columns(text=pl.format("<{}>", "half")).collect()
    )
    mapped = even.map(lambda row: {"square": row["n"] ** 2}, {"square": int}).global_().map(lambda row: row).collect()
    doubled = even.forward().flat_map(lambda row: [row] * 2 if row["n"] < 4 else None).collect()
    polars = even.map_batches(lambda frame: frame.filter(pl.col("n") > 95)).collect()
    arrow = even.map_batches(lambda batch: batch.slice(0, 0), form="arrow").collect()
    everywhere = numbers.broadcast().filter(pl.col("n") == 7).collect()
    both = even.union(numbers.filter(pl.col("n") % 2 == 1)).collect()
    run(env)
    assert values(by_function, "n") == list(range(90, 100))
    assert values(selected, "n", "half", "text") == sorted((2 * h, h, f"<{h}>") for h in range(50))
    assert values(mapped, "square") == [n * n for n in range(0, 100, 2)]
    assert values(doubled, "n") == [0, 0, 2, 2]
    assert values(polars, "n") == [96, 98]
    assert arrow.rows() == []
    assert arrow.table().schema == pa.schema({"n": pa.int64()})
    assert values(everywhere, "n") == [7, 7]
    assert values(both, "n") == list(range(100))


def test_files_go_in_and_come_out(tmp_path):
    for part in range(3):
        pl.DataFrame({"n": range(part * 10, part * 10 + 10)}).write_parquet(tmp_path / f"in-{part}.parquet")
    env = Environment("files", parallelism=2, checkpoint_dir=tmp_path / "checkpoints")
    numbers = env.read_files(tmp_path / "in-*.parquet")
    numbers.write_parquet(tmp_path / "parquet")
    numbers.write_jsonl(tmp_path / "jsonl")
    run(env)
    assert sorted(pl.read_parquet(tmp_path / "parquet/*.parquet")["n"]) == list(range(30))
    assert sorted(pl.read_ndjson(tmp_path / "jsonl/*.jsonl")["n"]) == list(range(30))
    again = Environment("files", parallelism=2, checkpoint_dir=tmp_path / "checkpoints")
    again.read_files(tmp_path / "in-*.parquet").write_parquet(tmp_path / "parquet")
    with pytest.raises(ConfigError, match=r"has checkpoints of this job, the newest is 1: .*--from latest"):
        again.execute(slots=ProcessSlots())
    with pytest.raises(ConfigError, match=r"parquet.*not empty|parquet.*files"):
        again.execute(slots=ProcessSlots(), fresh=True)


# ---- windows


class Longest(Accumulator[str]):
    columns = ("word",)
    type = pa.large_string()

    def init(self):
        return ""

    def add(self, accumulator, row):
        return max(accumulator, row["word"], key=len)

    def merge(self, first, second):
        return max(first, second, key=len)

    def result(self, accumulator):
        return accumulator


WORDS = [
    {"t": at(minute), "k": key, "v": value, "word": "x" * value}
    for minute, key, value in [(0, "a", 1), (1, "a", 2), (2, "b", 3), (11, "a", 4), (12, "b", 5), (25, "a", 6)]
]


def test_windows_compute_every_aggregate():
    env = Environment("windows", parallelism=2)
    words = env.from_collection(WORDS, splits=1).with_watermarks("t", WatermarkStrategy.monotonous())
    keyed = words.key_by("k")
    every = keyed.window(tumbling("10 min")).aggregate(
        n=Count(),
        total=Sum("v"),
        low=Min("v"),
        high=Max("v"),
        mean=Mean("v"),
        first=First("v"),
        last=Last("v"),
        longest=Longest(),
    )
    tumbled = every.collect()
    slid = keyed.window(sliding("20 min", "10 min")).aggregate(n=Count()).collect()
    sessions = keyed.window(session("9 min")).aggregate(n=Count()).collect()
    overall = words.window_all(tumbling("10 min")).aggregate(n=Count()).collect()
    again = (
        every.with_watermarks("window_start", WatermarkStrategy.bounded("10 min"))
        .select("window_start", "n")
        .window_all(tumbling("1 h"))
        .aggregate(n=Sum("n"))
        .collect()
    )
    run(env)
    assert values(tumbled, "k", "window_start", "n", "total", "low", "high", "mean", "first", "last", "longest") == [
        ("a", at(0), 2, 3, 1, 2, 1.5, 1, 2, "xx"),
        ("a", at(10), 1, 4, 4, 4, 4.0, 4, 4, "xxxx"),
        ("a", at(20), 1, 6, 6, 6, 6.0, 6, 6, "xxxxxx"),
        ("b", at(0), 1, 3, 3, 3, 3.0, 3, 3, "xxx"),
        ("b", at(10), 1, 5, 5, 5, 5.0, 5, 5, "xxxxx"),
    ]
    assert values(slid, "k", "window_end", "n") == [
        ("a", at(10), 2),
        ("a", at(20), 3),
        ("a", at(30), 2),
        ("a", at(40), 1),
        ("b", at(10), 1),
        ("b", at(20), 2),
        ("b", at(30), 1),
    ]
    assert values(sessions, "k", "window_start", "window_end", "n") == [
        ("a", at(0), at(10), 2),
        ("a", at(11), at(20), 1),
        ("a", at(25), at(34), 1),
        ("b", at(2), at(11), 1),
        ("b", at(12), at(21), 1),
    ]
    assert values(overall, "window_start", "n") == [(at(0), 3), (at(10), 2), (at(20), 1)]
    assert values(again, "n") == [6]


def test_a_source_that_ends_long_before_another_does_not_become_idle_and_hold_the_last_windows_back(tmp_path):
    def slow_second_half(indices):
        if len(indices) and indices[0] >= 20:
            time.sleep(0.1)
        return {"k": indices % 3, "t": np.datetime64(START, "us") + indices * np.timedelta64(1, "m")}

    env = Environment(parallelism=2, tuning=Tuning(batch_rows=4), checkpoint_dir=tmp_path, checkpoint_interval=None)
    counts = (
        env.generate(slow_second_half, 40)
        .with_watermarks("t", WatermarkStrategy.bounded("1 s", idle_after="50 ms"))
        .key_by("k")
        .window(tumbling("10 min"))
        .aggregate(n=Count())
        .collect()
    )
    run(env)
    assert sum(values(counts, "n")) == 40


def test_late_rows_update_within_the_lateness_and_go_aside_after_it():
    env = Environment("late", tuning=Tuning(batch_rows=1))
    minutes = [(0, 1), (21, 2), (5, 4), (40, 8), (6, 16)]
    made = (
        env.from_collection([{"t": at(m), "k": 0, "v": v} for m, v in minutes], splits=1)
        .with_watermarks("t", WatermarkStrategy.monotonous())
        .key_by("k")
        .window(tumbling("10 min"))
        .allowed_lateness("20 min")
        .aggregate(total=Sum("v"))
    )
    late = made.side_output(LATE).collect()
    totals = made.collect()
    run(env)
    assert values(totals, "window_start", "total") == [(at(0), 1), (at(0), 5), (at(20), 2), (at(40), 8)]
    assert values(late, "v") == [16]


# ---- functions


class Everything(KeyedProcessFunction):
    count = ValueState(default=0)
    seen = ListState()
    by_parity = MapState()
    total = ReducingState(lambda a, b: a + b)

    def process(self, row, ctx):
        self.count.value += 1
        self.seen.append(row["v"])
        self.by_parity[row["v"] % 2] = self.by_parity.get(row["v"] % 2, 0) + 1
        self.total.add(row["v"])
        ctx.timers.event_time(at(60))
        ctx.side_output("rows", {"v": row["v"]})

    def on_timer(self, time, ctx):
        yield {
            "k": ctx.key,
            "time": time,
            "count": self.count.value,
            "seen": len(self.seen),
            "odd": self.by_parity.get(1, 0),
            "total": self.total.value,
        }
        self.count.clear()


def test_keyed_functions_have_every_kind_of_state_timers_and_side_outputs():
    env = Environment("process", parallelism=2)
    made = (
        env.from_collection([{"t": at(0), "k": v % 3, "v": v} for v in range(30)])
        .with_watermarks("t", WatermarkStrategy.monotonous())
        .key_by("k")
        .process(
            Everything(),
            {"k": int, "time": datetime, "count": int, "seen": int, "odd": int, "total": int},
            side_outputs={"rows": {"v": int}},
        )
    )
    aside = made.side_output("rows").collect()
    result = made.collect()
    run(env)
    expected = [(k, at(60), 10, 10, 5, sum(range(k, 30, 3))) for k in range(3)]
    assert values(result, "k", "time", "count", "seen", "odd", "total") == expected
    assert values(aside, "v") == list(range(30))


class Later(KeyedProcessFunction):
    def process(self, row, ctx):
        ctx.timers.processing_time(ctx.now + timedelta(milliseconds=50))

    def on_timer(self, time, ctx):
        return {"k": ctx.key, "in_time": ctx.now >= time}


def test_processing_time_timers_fire_by_the_clock(tmp_path):
    env = Environment("timers", checkpoint_dir=tmp_path, checkpoint_interval="100 ms")
    rows = env.generate(lambda i: {"k": i % 5}, rows_per_s=200)
    result = rows.key_by("k").process(Later(), {"k": int, "in_time": bool}).collect()
    job = env.start(slots=ProcessSlots())
    until("a timer of every key", lambda: len({row["k"] for row in result.rows()}) == 5)
    job.stop()
    assert all(row["in_time"] for row in result.rows())


class Join(CoProcessFunction):
    left = ListState()
    right = ListState()

    def process1(self, row, ctx):
        self.left.append(row["a"])
        return [{"k": ctx.key, "a": row["a"], "b": b} for b in self.right]

    def process2(self, row, ctx):
        self.right.append(row["b"])
        return [{"k": ctx.key, "a": a, "b": row["b"]} for a in self.left]


class Merge(CoProcessFunction):
    def process1(self, row, ctx):
        return {"v": row["a"]}

    def process2(self, row, ctx):
        yield {"v": -row["b"]}


class Named(BroadcastProcessFunction):
    """Rows wait for their name until event time has passed in both inputs, and so the names have ended."""

    names = BroadcastState()
    waiting = ListState()

    def process(self, row, ctx):
        self.waiting.append(row)
        ctx.timers.event_time(row["t"])

    def process_broadcast(self, row, ctx):
        self.names[row["k"]] = row["name"]

    def on_timer(self, time, ctx):
        for row in self.waiting:
            yield {"a": row["a"], "name": self.names.get(ctx.key, "nobody")}
        self.waiting.clear()


class Copies(BroadcastProcessFunction):
    def process(self, row, ctx):
        return None

    def process_broadcast(self, row, ctx):
        return {"name": row["name"]}


def test_two_inputs_meet_by_key_without_key_and_by_broadcast():
    env = Environment("inputs", parallelism=2)
    left = env.from_collection([{"t": at(0), "k": k, "a": k * 10 + i} for k in range(4) for i in range(2)])
    right = env.from_collection([{"key": k, "b": k * 100} for k in range(2, 6)])
    names = env.from_collection([{"k": k, "name": f"n{k}"} for k in range(3)])
    joined = left.key_by("k").connect(right.key_by("key")).process(Join(), {"k": int, "a": int, "b": int}).collect()
    merged = left.connect(right).process(Merge(), {"v": int}).collect()
    timed = left.with_watermarks("t", WatermarkStrategy.monotonous())
    named = timed.key_by("k").connect(names.broadcast()).process(Named(), {"a": int, "name": str}).collect()
    copies = left.connect(names.broadcast()).process(Copies(), {"name": str}).collect()
    run(env)
    assert values(joined, "k", "a", "b") == [(2, 20, 200), (2, 21, 200), (3, 30, 300), (3, 31, 300)]
    assert values(merged, "v") == sorted([0, 1, 10, 11, 20, 21, 30, 31, -200, -300, -400, -500])
    assert values(named, "a", "name") == [
        *((k * 10 + i, f"n{k}") for k in range(3) for i in range(2)),
        (30, "nobody"),
        (31, "nobody"),
    ]
    assert Counter(values(copies, "name")) == {"n0": 2, "n1": 2, "n2": 2}


# ---- how jobs end


def test_a_failing_function_fails_the_job_with_operator_row_and_the_users_traceback():
    def explode(row):
        if row["n"] == 3:
            raise ValueError("three is too many")
        return row

    env = Environment("fails", restart=no_restart())
    env.generate(lambda i: {"n": i}, count=10).map(explode).name("exploding").print(limit=0)
    with pytest.raises(
        JobError, match=r"operator 'exploding': the function raised ValueError for the row \{'n': 3\}"
    ) as caught:
        env.execute(slots=ProcessSlots())
    assert "three is too many" in str(caught.value)
    assert "in explode" in str(caught.value)


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("not even that")


def exits(indices):
    sys.exit(3)


def has_no_text(indices):
    raise NoText


def says_too_much(indices):
    raise ValueError("x" * 1_000_000)


@pytest.mark.parametrize(
    ("function", "message"),
    [(exits, "SystemExit: 3"), (has_no_text, "NoText"), (says_too_much, r"ValueError: x+ … \(\d+ characters left out")],
)
def test_whatever_a_function_raises_is_reported(function, message):
    env = Environment(restart=no_restart())
    env.generate(function, 10, schema={"n": int}).collect()
    with pytest.raises(JobError, match=message) as caught:
        env.execute(slots=ProcessSlots())
    assert len(str(caught.value)) < 200_000


class ExitsAtTheEnd(KeyedProcessFunction):
    def process(self, row, ctx):
        return row

    def close(self):
        sys.exit(3)


def test_a_job_ends_whatever_closing_its_functions_raises(tmp_path):
    env = Environment(checkpoint_dir=tmp_path)
    rows = env.generate(lambda i: {"n": i}, 10).key_by("n").process(ExitsAtTheEnd(), schema={"n": int}).collect()
    run(env)
    assert values(rows, "n") == list(range(10))


def test_a_schema_that_the_function_breaks_ends_the_job_immediately():
    env = Environment("breaks", restart=fixed_restarts(100, "10 s"))
    env.generate(lambda i: {"n": i}, count=10).map_batches(lambda f: f.rename({"n": "m"})).print(limit=0)
    with pytest.raises(JobError, match=r"SchemaError: operator 'map_batches'.*column 'n' is missing; got m"):
        env.execute(slots=ProcessSlots())


@pytest.mark.systems
def test_rows_stay_exactly_once_through_a_failure(tmp_path):
    trap = tmp_path / "sprung"

    def once(row):
        if row["n"] == 700 and not trap.exists():
            trap.touch()
            raise OSError("the network is down")
        return row

    env = Environment(
        "restarts",
        parallelism=2,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_interval="50 ms",
        restart=fixed_restarts(1, "10 ms"),
    )
    numbers = env.generate(lambda i: {"n": i}, count=1000, rows_per_s=2000).map(once)
    numbers.write_parquet(tmp_path / "out")
    sums = numbers.with_columns(k=pl.col("n") % 10).key_by("k").process(Sums(), {"k": int, "total": int}).collect()
    status = env.execute(slots=ProcessSlots())
    assert status.restarts == 1
    assert sorted(pl.read_parquet(tmp_path / "out/*.parquet")["n"]) == list(range(1000))
    totals = sums.frame().group_by("k").agg(pl.col("total").max()).sort("k")
    assert totals["total"].to_list() == [sum(range(k, 1000, 10)) for k in range(10)]
    assert len(sums.rows()) == 1000


class Sums(KeyedProcessFunction):
    total = ValueState(pa.int64(), default=0)

    def process(self, row, ctx):
        self.total.value += row["n"]
        return {"k": ctx.key, "total": self.total.value}


@pytest.mark.systems
def test_a_stopped_job_goes_on_where_it_was_and_prints_where_that_is(tmp_path, capsys):
    def program() -> tuple[Environment, CollectSink]:
        env = Environment("goes on", parallelism=2, checkpoint_dir=tmp_path / "c", checkpoint_interval="50 ms")
        numbers = env.generate(lambda i: {"n": i, "k": i % 2}, rows_per_s=400)
        return env, numbers.key_by("k").process(Sums(), {"k": int, "total": int}).uid("sums").collect()

    env, first = program()
    job: Job = env.start(slots=ProcessSlots())
    until("the first results", lambda: len(first.rows()) > 50)
    assert job.stop() is not None
    assert job.wait().state == "stopped"
    env, second = program()
    assert capsys.readouterr().err == ""
    job = env.start(slots=ProcessSlots(), resume=True)
    printed = capsys.readouterr().err
    assert re.match(rf"job goes on resumes from checkpoint \d+ in {tmp_path}/c\n", printed)
    until("more results", lambda: len(second.rows()) > 50)
    job.stop(drain=True)
    numbers: list[int] = []
    for k in range(2):
        totals = [row["total"] for row in [*first.rows(), *second.rows()] if row["k"] == k]
        own = np.diff(sorted(totals), prepend=0)  # each total is the one before it and the number of its row
        assert (own % 2 == k).all()
        numbers += own.tolist()
    check_gapless(numbers)


def stopped_at(env: Environment, result: CollectSink) -> str:
    """Run the job until it has given something; the checkpoint that it was stopped at."""
    job = env.start(slots=ProcessSlots())
    until("the first results", result.rows)
    checkpoint = job.stop()
    assert checkpoint is not None
    return checkpoint


def counted(env: Environment, uid: str = "sums", key: type = int) -> CollectSink:
    numbers = env.generate(lambda i: {"n": i}, rows_per_s=400).uid("numbers")
    keyed = numbers.with_columns(k=(pl.col("n") % 2).cast(key)).key_by("k")
    return keyed.process(Sums(), {"k": key, "total": int}).uid(uid).collect()


def test_what_a_checkpoint_holds_must_fit_the_job_that_goes_on_from_it(tmp_path):
    def program() -> Environment:
        return Environment("fits", checkpoint_dir=tmp_path / "c", checkpoint_interval="50 ms")

    env = program()
    checkpoint = stopped_at(env, counted(env))
    number = int(checkpoint.rpartition("-")[2])

    env = program()
    counted(env, key=str)
    with pytest.raises(
        ConfigError, match=r"operator 'process' \(uid 'sums'\): .* the key was k int64, now it is .*a new uid"
    ):
        env.execute(restore_from="latest", slots=ProcessSlots())

    env = program()
    counted(env, uid="others")
    with pytest.raises(ConfigError, match=r"has state of 'sums' \(process: .*--allow-dropped-state"):
        env.execute(restore_from=number, slots=ProcessSlots())
    env = program()
    result = counted(env, uid="others")
    job = env.start(restore_from=number, allow_dropped_state=True, slots=ProcessSlots())
    until("results without the old state", result.rows)
    job.cancel()

    (tmp_path / "in").mkdir()
    pl.DataFrame({"n": [1]}).write_parquet(tmp_path / "in" / "a.parquet")
    env = program()
    files = env.read_files(tmp_path / "in", watch=True).uid("numbers").with_columns(k=pl.col("n") % 2)
    files.key_by("k").process(Sums(), {"k": int, "total": int}).uid("sums").collect()
    with pytest.raises((JobError, ConfigError), match="was written by another kind of source"):
        env.execute(restore_from="latest", allow_dropped_state=True, slots=ProcessSlots())


def test_a_pool_that_is_too_small_reports_how_much_the_job_needs():
    env = Environment("small", parallelism=4, tuning=Tuning(pool_size="64 KiB"))
    env.from_collection([{"n": 1}]).key_by("n").process(Sums(), {"k": int, "total": int}).rebalance().map(
        lambda row: row
    ).print()
    with pytest.raises(
        ConfigError, match=r"pool_size: the tasks of one slot need at least \d+ buffers of 32768 bytes \(\d+"
    ):
        run(env)


def test_a_drained_job_lets_everything_flow_out(tmp_path):
    env = Environment("drains", checkpoint_dir=tmp_path, checkpoint_interval="50 ms")
    counts = (
        env.generate(lambda i: {"t": i.astype("datetime64[ms]"), "k": i % 2}, rows_per_s=1000)
        .with_watermarks("t", WatermarkStrategy.monotonous())
        .key_by("k")
        .window(tumbling("1 d"))
        .aggregate(n=Count())
        .collect()
    )
    job = env.start(slots=ProcessSlots())
    until("some rows", lambda: sum(o.rows_out for v in job.status().vertices for o in v.operators[:1]) > 100)
    assert "chk-" in job.checkpoint()
    job.stop(drain=True)
    assert job.wait().state == "finished"
    assert len(counts.rows()) == 2
    assert sum(row["n"] for row in counts.rows()) > 100


# ---- sources and sinks of one's own


class Countdown(Source):
    """One split that counts down to 1."""

    blocking = False
    schema = pa.schema({"n": pa.int64()})

    def __init__(self, start: int) -> None:
        self.start = start

    def discover(self, position, context):
        splits = () if position else (Split("all", b""),)
        return Discovery(splits, b"all", exhausted=True)

    def open_split(self, split):
        return CountdownReader(self.start, split.offset)


class CountdownReader(SplitReader):
    def __init__(self, start: int, done: int) -> None:
        self.rest = range(start - done, 0, -1)
        self.done = done

    def read(self, rows_max):
        numbers, self.rest = self.rest[:rows_max], self.rest[rows_max:]
        if not numbers:
            return None
        self.done += len(numbers)
        return pa.RecordBatch.from_arrays([pa.array(numbers, pa.int64())], ["n"]), self.done


class AppendTo(Sink):
    """Appends numbers to a file, at least once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def writer(self, context):
        return AppendWriter(self.path)


class AppendWriter(SinkWriter):
    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")

    def write(self, batch):
        self.file.writelines(f"{n}\n" for n in batch.column("n").to_pylist())

    def close(self):
        self.file.close()


def test_a_source_and_a_sink_of_ones_own_travel_with_the_job(tmp_path):
    env = Environment("own", tuning=Tuning(batch_rows=10))
    env.source(Countdown(100)).uid("countdown").sink(AppendTo(tmp_path / "numbers")).uid("numbers")
    assert "countdown → appendto" in env.explain()
    run(env)
    assert (tmp_path / "numbers").read_text().split() == [str(n) for n in range(100, 0, -1)]
