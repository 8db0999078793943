"""Once event time has passed what operators wait for, nothing of it is left in memory or in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest

from midstream import (
    CoProcessFunction,
    Count,
    DataStream,
    Environment,
    KeyedProcessFunction,
    ListState,
    MapState,
    ReducingState,
    Sum,
    ValueState,
    WatermarkStrategy,
    WindowFunction,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.engine.operators.windows.window_operator import PROGRESS

START = datetime(2024, 1, 1)
ROWS = [{"k": n % 7, "n": n, "at": START + timedelta(seconds=n)} for n in range(60)]
COLUMNS = {"k": int, "n": int, "at": datetime}
TTL: Any = "1 min"


class Expiring(KeyedProcessFunction):
    value = ValueState(int, ttl=TTL)
    items: ListState[int] = ListState(int, ttl=TTL)
    pages: MapState[int, int] = MapState(key=int, value=int, ttl=TTL)
    most: ReducingState[int] = ReducingState(max, int, ttl=TTL)

    def process(self, row: Any, ctx: Any) -> Any:
        self.value.value = self.pages[row["n"]] = row["n"]
        self.items.append(row["n"])
        self.most.add(row["n"])
        return row


class OfBoth(CoProcessFunction):
    seen = ValueState(int, ttl=TTL)

    def process1(self, row: Any, ctx: Any) -> Any:
        self.seen.value = row["n"]

    process2 = process1


class All(WindowFunction):
    def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        return rows.select("n")


Make = Callable[[DataStream, DataStream], DataStream]
OPERATORS: dict[str, Make] = {
    "tumbling": lambda a, _: a.key_by("k").window(tumbling("10 s")).aggregate(n=Count()),
    "tumbling, late rows allowed": lambda a, _: (
        a.key_by("k").window(tumbling("10 s")).allowed_lateness("30 s").aggregate(n=Count())
    ),
    "local days": lambda a, _: a.key_by("k").window(tumbling("1 d", zone="Europe/Paris")).aggregate(n=Count()),
    "sliding": lambda a, _: a.key_by("k").window(sliding("20 s", "5 s")).aggregate(n=Sum("n")),
    "sessions": lambda a, _: a.key_by("k").window(session("5 s")).aggregate(n=Count()),
    "window_all": lambda a, _: a.window_all(tumbling("10 s")).aggregate(n=Count()),
    "early results": lambda a, _: a.key_by("k").window(tumbling("10 s")).emit_every("2 s").aggregate(n=Count()),
    "top of a window": lambda a, _: a.key_by("k").window(tumbling("10 s")).top(2, by="n"),
    "window function": lambda a, _: a.key_by("k").window(tumbling("10 s")).process(All(), {"n": int}),
    "running aggregate": lambda a, _: a.key_by("k").aggregate(n=Count(), ttl="1 min"),
    "periodic aggregate": lambda a, _: a.key_by("k").aggregate(n=Count(), every="10 s", ttl="1 min"),
    "running top": lambda a, _: a.key_by("k").top(2, by="n", every="10 s", ttl="1 min"),
    "drop_duplicates": lambda a, _: a.drop_duplicates("n", within="1 min"),
    "sort_by_time": lambda a, _: a.key_by("k").sort_by_time(),
    "interval join": lambda a, b: a.join(b, on="k", within=("-5 s", "5 s"), how="full"),
    "window join": lambda a, b: a.join(b, on="k", window=tumbling("10 s"), how="full"),
    "join_asof": lambda a, b: a.join_asof(b, on="k", tolerance="10 s"),
    "expiring states": lambda a, _: a.key_by("k").process(Expiring(), COLUMNS),
    "expiring states of two inputs": lambda a, b: a.key_by("k").connect(b.key_by("k")).process(OfBoth(), COLUMNS),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_is_left_once_event_time_has_passed_it(name: str) -> None:
    env = Environment("leaves")
    strategy = WatermarkStrategy.monotonous()
    a, b = (env.from_collection([], schema=COLUMNS).uid(uid).with_watermarks("at", strategy) for uid in "ab")
    if "join" in name or "two inputs" in name:
        b = b.rename({"n": "m"}) if "join" in name else b
    made = OPERATORS[name](a, b).uid("operator")
    sources = ["a", "b"] if "join" in name or "two inputs" in name else ["a"]
    most = 0
    with testing.job(made, parallelism=2) as job:
        for at in (0, 20, 40):
            for source in sources:
                job.feed(source, ROWS[at : at + 20])
            most = max(most, rows_stored(job))
        job.advance_to(START + timedelta(days=2))
        assert most > 0
        assert rows_stored(job) == 0
        job.snapshot_and_restore(parallelism=3)
        assert rows_stored(job) == 0


def rows_stored(job: testing.RunningJob) -> int:
    """The rows of the operator's state in a checkpoint, but for the watermark of each key group."""
    [operator] = [each for each in job.snapshot().metadata.operators if each.uid == "operator"]
    parts = [part for subtask in operator.subtasks for part in subtask.parts if part.name != PROGRESS]
    return sum(chunk.rows for part in parts for chunk in part.chunks)
