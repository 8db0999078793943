"""Every operator of event time under every cut, where times differ by exactly the gaps, sizes and bounds: the same rows.

No row is late here, so nothing may depend on where batches are cut, or on the rows of other keys in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import polars as pl
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    LATE,
    CoProcessFunction,
    Count,
    DataStream,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    Sum,
    TableState,
    WatermarkStrategy,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.engine.operators.windows.window_specs import Window

NOON = datetime(2024, 1, 1, 12)
GAP = timedelta(seconds=2)
ROW = {"k": int, "at": datetime, "n": int}
OTHER = {"k": int, "then": datetime, "m": int}
WINDOWS: dict[str, Window] = {
    "tumbling": tumbling("2 s"),
    "shifted": tumbling("3 s", offset="1 s"),
    "sliding": sliding("4 s", "2 s"),
    "overlapping": sliding("5 s", "2 s"),
    "session": session("2 s"),
    "short_session": session("1 s"),
}


class SessionsByHand(KeyedProcessFunction):
    """What `session("2 s")` does: at the end of a session no other row has come."""

    times: MapState[datetime, int] = MapState()

    def process(self, row, ctx):
        self.times[row["at"]] = row["n"]
        ctx.timers.event_time(row["at"] + GAP)

    def on_timer(self, time, ctx):
        if not any(time - GAP < at <= time for at in self.times):
            yield {"k": ctx.key, "at": time, "n": 0}


class RowsUntil(KeyedProcessFunction):
    """Counts the rows until each row's time, and until two seconds later."""

    seen: MapState[datetime, int] = MapState()

    def process(self, row, ctx):
        self.seen[row["at"]] = self.seen.get(row["at"], 0) + 1
        ctx.timers.event_time(row["at"])
        ctx.timers.event_time(row["at"] + GAP)

    def on_timer(self, time, ctx):
        assert ctx.watermark >= time
        yield {"k": ctx.key, "at": time, "n": sum(n for at, n in self.seen.items() if at <= time)}


class Once(KeyedProcessFunction):
    """Lets the first row of a key pass, and then none until event time is two seconds past that one."""

    let_pass = ListState()

    def process(self, row, ctx):
        ctx.timers.event_time(row["at"])

    def on_timer(self, time, ctx):
        if all(time > at + GAP for at in self.let_pass):
            self.let_pass.append(time)
            yield {"k": ctx.key, "at": time, "n": 1}


class Released(KeyedBatchFunction):
    """Holds rows until event time has reached them."""

    rows = TableState(ROW)

    def process(self, rows, ctx):
        self.rows.append(rows)

    def on_watermark(self, ctx):
        return self.rows.pop_until("at", ctx.watermark)


class SumUntil(CoProcessFunction):
    """Each row of the first stream with the sum of the second until its time."""

    waiting = ListState()
    sums: MapState[datetime, int] = MapState()

    def process1(self, row, ctx):
        self.waiting.append(row["at"])
        ctx.timers.event_time(row["at"])

    def process2(self, row, ctx):
        self.sums[row["then"]] = self.sums.get(row["then"], 0) + row["m"]

    def on_timer(self, time, ctx):
        total = sum(m for at, m in self.sums.items() if at <= time)
        yield from ({"k": ctx.key, "at": at, "n": total} for at in self.waiting if at == time)


def made_of(bound: int) -> tuple[list[DataStream], list[DataStream]]:
    """Return every operator of event time, of two inputs whose rows are out of order by `bound` seconds; and what is
    late.
    """
    env = Environment("cuts")
    strategy = WatermarkStrategy.bounded(bound)
    first = env.from_collection([], schema=ROW, splits=1).uid("first").with_watermarks("at", strategy)
    plain = env.from_collection([], schema=OTHER, splits=1).uid("second")
    second = plain.with_watermarks("then", strategy)
    renamed = plain.select("k", at=pl.col("then"), n=pl.col("m")).with_watermarks("at", strategy)
    keyed, other = first.key_by("k"), second.key_by("k")
    made, late = [], []
    for name, window in WINDOWS.items():
        counted = keyed.window(window).aggregate(n=Count(), total=Sum("n")).uid(name)
        made.append(counted)
        if name in ("tumbling", "session"):  # with a reader of late rows, rows are not combined before they are sent
            lenient = keyed.window(window).allowed_lateness("2 s").aggregate(n=Count()).uid(f"{name}_again")
            made.append(lenient)
            late += [counted.side_output(LATE), lenient.side_output(LATE)]
    made.append(keyed.window(session("2 s")).aggregate(n=Count()).uid("combined"))
    made.append(first.window_all(session("1 s")).aggregate(n=Count()).uid("session_of_all"))
    joins = [
        first.join(second, on="k", how=how, within=("-2 s", 0)).uid(f"{how}_joined")
        for how in ("inner", "left", "right", "semi", "anti")
    ]
    same = second.rename({"then": "at"})
    joins.append(first.join(same, on="k", how="full", within=(0, "2 s")).uid("full_joined"))
    joins.append(first.join_asof(second, on="k", tolerance="2 s").uid("asof_joined"))
    joins += [
        first.join(second, on="k", how=how, window=sliding("5 s", "2 s")).uid(f"{how}_joined_in_windows")
        for how in ("inner", "left", "right", "full", "semi", "anti")
    ]
    third = renamed.select("k", nanoseconds=pl.col("at").dt.cast_time_unit("ns"), o="n")
    third = third.with_watermarks("nanoseconds", strategy)
    chained = joins[1].join(third, on="k", how="left", within=("-1 s", "2 s"))
    chained = chained.join_asof(second.select("k", "then", version="m"), on="k").uid("chained")
    chained = chained.join(same.rename({"at": "again"}), on="k", how="full", window=tumbling("4 s")).uid("chain_joined")
    made += [*joins, chained]
    made.append(keyed.top(2, by="n", every="2 s").uid("first_rows"))
    for joined in (*joins[:3], joins[6], joins[7], joins[9], joins[10], chained):
        again = joined.key_by("k").window(session("2 s")).aggregate(n=Count()).uid(f"session_{len(made)}")
        made.append(again)
        late.append(again.side_output(LATE))
    made.append(first.union(renamed).key_by("k").window(session("2 s")).aggregate(n=Count()).uid("session_of_both"))
    for function in (SessionsByHand(), RowsUntil(), Once()):
        made.append(keyed.process(function, ROW).uid(type(function).__name__))
    released = keyed.process_batches(Released(), ROW).uid("released")
    made += [released, keyed.connect(other).process(SumUntil(), ROW).uid("sum_until")]
    return made, late


def rows_of(moves: Sequence[tuple[int, int, bool]], bound: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows whose times are whole seconds. `moves`: the key; how far event time moves; whether the row is as far out of
    order as it may be.
    """
    key, at, number = names
    rows, second = [], bound
    for n, (k, move, is_old) in enumerate(moves):
        second += move
        rows.append({key: k, at: NOON + timedelta(seconds=second - (bound if is_old else 0)), number: n})
    return rows


moves = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([0, 0, 1, 2, 2, 2, 3, 4]), st.booleans()), max_size=9)
cuts = st.one_of(st.just("whole"), st.integers(2, 3), st.lists(st.integers(1, 4), min_size=1, max_size=6))


@settings(max_examples=examples(12))
@given(st.sampled_from([0, 2]), moves, moves, cuts, st.integers(1, 2))
@example(0, [(1, 0, False), (2, 7, False), (1, 0, False)], [], "whole", 1)
@example(2, [(1, 0, False), (2, 4, False), (1, 0, True), (1, 2, True)], [(1, 2, False), (1, 2, True)], 2, 2)
def test_results_do_not_depend_on_where_batches_are_cut(bound, of_first, of_second, cut, parallelism):
    made, late = made_of(bound)
    inputs = {"first": rows_of(of_first, bound, ROW), "second": rows_of(of_second, bound, OTHER)}
    one, other = (testing.run(made + late, inputs, cut=each, parallelism=parallelism) for each in (1, cut))
    one_tables, other_tables = one.tables(), other.tables()
    assert len(one_tables) >= len(made) + len(late)
    for label, table in one_tables.items():
        assert in_any_order(table) == in_any_order(other_tables[label]), label
        assert "'late'" not in label or not table.num_rows
    event(f"pairs: {any('_joined' in label and table.num_rows for label, table in one_tables.items())}")


def in_any_order(table: Any) -> list[str]:
    return sorted(map(repr, table.to_pylist()))
