"""`on_error=` of functions on two streams, on a broadcast stream and on batches: what fails leaves no trace."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    FAILED,
    FAILED_RIGHT,
    BroadcastProcessFunction,
    BroadcastState,
    CoBatchFunction,
    ConfigError,
    CoProcessFunction,
    Environment,
    JobError,
    KeyedBatchFunction,
    ListState,
    TableState,
    testing,
)
from midstream.engine.state import table_runs, table_state

SCHEMA = {"k": int, "n": int}
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20)
BAD = 3
"""The functions fail for rows whose n is divisible by this."""


def dicts(rows: list[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"k": k, "n": n} for k, n in rows]


def totals(rows: list[tuple[int, int]], *, fails: bool = True) -> list[dict[str, int]]:
    """The sum of the n of each key so far, for each row that does not fail."""
    found: dict[int, int] = {}
    made = []
    for k, n in rows:
        if n % BAD or not fails:
            found[k] = found.get(k, 0) + n
            made.append({"k": k, "n": found[k]})
    return made


class Totals(KeyedBatchFunction):
    """Fails after it has removed, replaced and added rows."""

    sums = TableState(SCHEMA)
    seen = TableState(SCHEMA)

    def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        before = self.sums.pop(rows)
        known = rows.join(before, on="k", how="left", maintain_order="left")
        made = known.select("k", n=pl.col("n_right").fill_null(0) + pl.col("n").cum_sum().over("k"))
        self.sums.append(made.unique("k", keep="last"))
        self.seen.upsert(rows.unique("k", keep="last"))
        if (rows["n"] % BAD == 0).any():
            raise ValueError("divisible")
        return made


class BothTotals(CoBatchFunction):
    sums = TableState(SCHEMA)

    process1 = Totals.process
    process2 = Totals.process
    seen = TableState(SCHEMA)


class Both(CoProcessFunction):
    before: ListState[int] = ListState(int)

    def process1(self, row: dict[str, int], ctx: Any) -> Any:
        self.before.append(row["n"])
        yield {"k": row["k"], "n": sum(self.before)}
        if row["n"] % BAD == 0:
            raise ValueError("divisible")

    process2 = process1


@settings(max_examples=examples(80))
@given(ROWS, st.sampled_from([1, 2, 5, "whole"]), st.booleans())
def test_a_batch_function_processes_all_other_rows_as_one_by_one(
    rows: list[tuple[int, int]], cut: Any, runs_are_short: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if runs_are_short:
            patched.setattr(table_runs, "RUNS_MAX", 1)
            patched.setattr(table_runs, "TIDY_ROWS", 1)
            patched.setattr(table_state, "PIECES_MAX", 1)
        stream = Environment("doc").from_collection([], schema=SCHEMA).uid("rows").key_by("k")
        made = stream.process_batches(Totals(), SCHEMA, on_error="side_output").uid("totals")
        with testing.job(made) as job:
            middle = len(rows) // 2
            job.feed("rows", dicts(rows[:middle]), cut=cut)
            job.snapshot_and_restore(2)
            job.feed("rows", dicts(rows[middle:]), cut=cut)
            state = job.state("totals")
            result = job.result()
    by_key: dict[int, list[int]] = {}
    for k, n in rows:
        by_key.setdefault(k, []).append(n)
    for k, numbers in by_key.items():
        mine = [(k, n) for n in numbers]
        assert [row for row in result.rows if row["k"] == k] == totals(mine)
        assert [one["row"]["n"] for one in result[FAILED] if one["row"]["k"] == k] == [
            n for n in numbers if n % BAD == 0
        ]
        good = [n for n in numbers if n % BAD]
        assert state["seen"].filter(pl.col("k") == k)["n"].to_list() == good[-1:]
        assert state["sums"].filter(pl.col("k") == k)["n"].to_list() == ([sum(good)] if good else [])
    names = {(one["function"], one["error_type"], one["error"]) for one in result[FAILED]}
    assert names <= {("Totals.process", "ValueError", "divisible")}


@settings(max_examples=examples(40))
@given(ROWS, ROWS, st.sampled_from([1, 3, "whole"]), st.booleans())
def test_rows_of_both_streams_that_fail_go_to_the_side_output_of_their_stream(
    left: list[tuple[int, int]], right: list[tuple[int, int]], cut: Any, in_batches: bool
) -> None:
    env = Environment("doc")
    one, two = (env.from_collection([], schema=SCHEMA).uid(name).key_by("k") for name in ("left", "right"))
    both = one.connect(two)
    if in_batches:
        made = both.process_batches(BothTotals(), SCHEMA, on_error="side_output")
    else:
        made = both.process(Both(), SCHEMA, on_error="side_output")
    with testing.job(made) as job:
        job.feed("left", dicts(left), cut=cut)
        job.feed("right", dicts(right), cut=cut)
        result = job.result()
    order = str
    assert sorted(map(order, result.rows)) == sorted(map(order, totals([*left, *right])))
    for tag, rows in ((FAILED, left), (FAILED_RIGHT, right)):
        assert [failed["row"] for failed in result[tag]] == dicts([(k, n) for k, n in rows if n % BAD == 0])


def test_rows_of_both_streams_count_together() -> None:
    env = Environment("doc")
    one, two = (env.from_collection([], schema=SCHEMA).uid(name).key_by("k") for name in ("left", "right"))
    made = one.connect(two).process(Both(), SCHEMA, on_error="drop", failed_max=(1, 10)).uid("both")
    with testing.job(made) as job:
        job.feed("left", [{"k": 1, "n": 3}])
        job.snapshot_and_restore()
        assert job.operators("both")[0].failed_rows == 0
        with pytest.raises(ValueError, match="divisible"):
            job.feed("right", [{"k": 1, "n": 4}, {"k": 1, "n": 3}])


class Limited(BroadcastProcessFunction):
    limits: BroadcastState[str, int] = BroadcastState()

    def process(self, row: dict[str, int], ctx: Any) -> Any:
        if row["n"] > self.limits.get("most", 5):
            raise ValueError("too large")
        return row

    def process_broadcast(self, row: dict[str, int], ctx: Any) -> None:
        self.limits["most"] = 100 // row["most"]


def test_a_broadcast_row_that_fails_fails_the_job_and_others_do_not() -> None:
    env = Environment("doc")
    rows, limits = env.from_collection([], schema=SCHEMA).uid("rows"), env.from_collection([], schema={"most": int})
    made = rows.connect(limits.uid("limits").broadcast()).process(Limited(), SCHEMA, on_error="side_output")
    with testing.job(made, parallelism=2) as job:
        job.feed("limits", {"most": 10})
        job.feed("rows", dicts([(1, 10), (1, 11), (2, 9)]))
        result = job.result()
        assert [row["n"] for row in result.rows] == [10, 9]
        assert [one["row"]["n"] for one in result[FAILED]] == [11]
        with pytest.raises(ZeroDivisionError):
            job.feed("limits", {"most": 0})


def test_other_policies_and_tags_are_refused_at_the_call() -> None:
    env = Environment("doc")
    one, two = (env.from_collection([], schema=SCHEMA).key_by("k") for _ in range(2))
    with pytest.raises(ConfigError, match="on_error 'ignore' is not one of fail, drop, side_output"):
        one.process_batches(Totals(), SCHEMA, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"failed_max= requires on_error='drop' or 'side_output'"):
        one.connect(two).process(Both(), SCHEMA, failed_max=(1, 2))
    with pytest.raises(JobError, match="'failed rows of the right' is the side output of on_error='side_output'"):
        one.connect(two).process(Both(), SCHEMA, on_error="side_output", side_outputs={FAILED_RIGHT: SCHEMA})
