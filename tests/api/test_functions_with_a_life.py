"""Functions with open() and close(), and functions that fail, in jobs; and what is refused at the call."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from pathlib import Path
from typing import Any, TypedDict

import polars as pl
import pytest

from midstream import (
    FAILED,
    ConfigError,
    DataStream,
    Environment,
    JobError,
    KeyedProcessFunction,
    SchemaError,
    ValueState,
    no_restart,
    testing,
)
from midstream.runtime.process.process_slots import ProcessSlots

HERE = re.escape(Path(__file__).name)
ROWS = [{"k": "ab"[n % 2], "n": n} for n in range(8)]


def stream(parallelism: int = 1) -> DataStream:
    return Environment("lives", parallelism=parallelism, restart=no_restart()).from_collection(ROWS)


class Scored:
    """Has what cannot be pickled, once it is open."""

    def open(self, ctx: Any) -> None:
        self.lock = threading.Lock()
        self.calls = ctx.metrics.counter("calls")
        ctx.metrics.counter("opened").inc()

    def __call__(self, row: Any) -> Any:
        with self.lock:
            self.calls.inc()
        return row

    def close(self) -> None:
        self.calls.inc(100)


class Refusing(Scored):
    def __call__(self, row: Any) -> Any:
        if row["n"] % 3 == 0:
            raise ValueError(f"no {row['n']}")
        return super().__call__(row)


def test_an_object_is_opened_in_each_subtask_and_its_metrics_are_in_the_status():
    env = Environment("lives", parallelism=2)
    made = env.from_collection(ROWS).rebalance().map(Scored()).uid("scored").collect()
    status = env.execute(slots=ProcessSlots())
    assert sorted(row["n"] for row in made.rows()) == list(range(8))
    [found] = [one for vertex in status.vertices for one in vertex.operators if one.uid == "scored"]
    assert found.counters["opened"] == 2
    assert found.counters["calls"] >= 8


def test_the_same_object_may_be_used_twice_and_in_every_method():
    scored = Scored()
    made = stream().map(scored).map(scored).filter(Kept()).flat_map(Listed()).map_batches(Doubled())
    assert testing.run(made).rows == [{"k": "b", "n": 2}, {"k": "b", "n": 6}, {"k": "b", "n": 10}, {"k": "b", "n": 14}]


class Kept(Scored):
    def __call__(self, row: Any) -> bool:
        return row["k"] == "b"


class Listed(Scored):
    def __call__(self, row: Any) -> Any:
        yield super().__call__(row)


class Doubled(Scored):
    def __call__(self, frame: Any) -> Any:
        return frame.with_columns(n=pl.col("n") * 2)


def test_failed_rows_are_counted_in_the_status_and_warned_of():
    env = Environment("failures", restart=no_restart())
    made = env.from_collection(ROWS).map(Refusing(), on_error="side_output").name("refusing").uid("refusing")
    main, failed = made.collect(), made.side_output(FAILED).collect()
    status = env.execute(slots=ProcessSlots())
    assert [row["n"] for row in main.rows()] == [1, 2, 4, 5, 7]
    assert [(one["row"]["n"], one["function"], one["error_type"], one["error"]) for one in failed.rows()] == [
        (n, "Refusing", "ValueError", f"no {n}") for n in (0, 3, 6)
    ]
    [found] = [one for vertex in status.vertices for one in vertex.operators if one.uid == "refusing"]
    assert found.failed_rows == 3
    assert [one for one in status.warnings if "operator 'refusing' has taken aside 3 rows" in one] != []


def test_failed_rows_do_not_depend_on_cuts():
    rows = [{"n": n} for n in (4, 1, 2, 0, 3, 8, 4, 5)]

    def function(row: Any) -> Any:
        return {"n": 12 // (row["n"] % 4)}

    def on_batches(frame: Any) -> Any:
        return pl.DataFrame([function(row) for row in frame.to_dicts()], {"n": pl.Int64})

    source = Environment("cuts").from_collection(rows)
    for made in (
        source.map(function, on_error="side_output"),
        source.flat_map(lambda row: [function(row)], on_error="side_output"),
        source.map_batches(on_batches, on_error="side_output"),
    ):
        testing.check_cuts(made)
        found = testing.run(made, cut="whole")
        assert [row["n"] for row in found.rows] == [12, 6, 4, 12]
        assert [one["row"]["n"] for one in found[FAILED]] == [4, 0, 8, 4]


def test_rows_that_failed_can_be_processed_again():
    failed = stream().map(Refusing(), on_error="side_output").side_output(FAILED)
    again = failed.select(pl.col("row").struct.field("k"), n=pl.col("row").struct.field("n") + 1)
    assert testing.run(again).rows == [{"k": "a", "n": 1}, {"k": "b", "n": 4}, {"k": "a", "n": 7}]


def test_a_job_fails_at_the_row_that_is_one_too_many():
    with pytest.raises(ValueError, match="no 3") as raised:
        testing.run(stream().map(Refusing(), on_error="drop", failed_max=(1, 5)))
    assert re.search("2 of the last 4 rows of this subtask have failed, .*allows 1 of 5", raised.value.__notes__[0])
    assert len(testing.run(stream().map(Refusing(), on_error="drop", failed_max=(1, 3))).rows) == 5


# ---- what is refused at the call


async def fetched(row: Any) -> Any:
    return row


async def fetches(row: Any) -> Any:
    yield row


class Fetching:
    async def __call__(self, row: Any) -> Any:
        return row


class OpenedLater(Scored):
    async def open(self, ctx: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)


class OpenedWithout(Scored):
    def open(self) -> None:  # type: ignore[override]
        pass


class ClosedWith(Scored):
    def close(self, error: Any) -> None:  # type: ignore[override]
        pass


class NotOpened(Scored):
    open = 3  # type: ignore[assignment]


class NotCalled:
    def open(self, ctx: Any) -> None:
        pass


class Locked(Scored):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def of_two(row: Any, client: Any) -> Any:
    return row


def yields(row: Any) -> Any:
    yield row


REFUSED: list[tuple[Any, str]] = [
    (Scored, r"Scored is a class; give an instance: Scored\(…\)"),
    (NotCalled(), r"NotCalled has no method __call__\(\)"),
    (3, "3 is not a function; write for example"),
    (None, "None is not a function"),
    (pl.DataFrame(), "is not a function"),
    (fetched, r"fetched is a coroutine function \(async def\)"),
    (fetches, "fetches is an asynchronous generator"),
    (Fetching(), "Fetching is a coroutine function"),
    (functools.partial(fetched), "fetched is a coroutine function"),
    (Fetching().__call__, "is a coroutine function"),
    (of_two, r"of_two is called with one argument, the (row|batch), but takes \(row: 'Any', client: 'Any'\).*missing"),
    (lambda: 3, "<lambda> is called with one argument"),
    (lambda *, row: row, "<lambda> is called with one argument"),
    (OpenedLater(), "open of OpenedLater is not a plain function"),
    (OpenedWithout(), "open of OpenedWithout is called with one argument, the context"),
    (ClosedWith(), "close of ClosedWith is called without arguments"),
    (NotOpened(), "open of NotOpened is not a plain function"),
    (Locked(), "cannot be sent to the slots: it uses 'lock'"),
]


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        (method, *one)
        for method in ("map", "flat_map", "map_batches", "filter")
        for one in REFUSED
        if method != "filter" or callable(one[0])  # a filter refuses what is not an expression
    ],
)
def test_what_cannot_be_called_with_a_row_is_refused_at_the_call(method: str, function: Any, message: str):
    with pytest.raises(JobError, match=rf"(?s)^{HERE}:\d+: {method}: .*{message}"):
        getattr(stream(), method)(function)


@pytest.mark.parametrize("method", ["map", "map_batches", "filter"])
def test_a_generator_is_for_flat_map(method: str):
    with pytest.raises(
        JobError, match=rf"{method}: yields yields, but {method}\(\) takes what it returns; use return, or flat_map"
    ):
        getattr(stream(), method)(yields)
    assert testing.run(stream().flat_map(yields)).rows == ROWS


class Rows(TypedDict):
    k: str
    n: int


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def with_client(row: Any) -> Any:
        return function(row, "client")

    return with_client


@pytest.mark.parametrize(
    "function",
    [
        dict,
        Rows,
        decorated(of_two),  # functools.wraps shows the signature of what is wrapped
        functools.partial(of_two, client=None),
        functools.partial(lambda client, row: row, None),
        lambda row, factor=2: row,
        lambda *rows: rows[0],
        lambda row, **more: row,
        Scored(),
    ],
)
def test_whatever_can_be_called_with_a_row_is_a_function(function: Any):
    assert testing.run(stream().map(function)).rows == ROWS


def test_builtin_functions_and_methods_are_functions():
    assert testing.run(stream().filter(bool)).rows == ROWS
    assert testing.run(stream().filter(len)).rows == ROWS
    assert testing.run(stream().map_batches(pl.DataFrame.clone)).rows == ROWS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "skip"}, "on_error 'skip' is not one of fail, drop, side_output"),
        ({"on_error": None}, "on_error None is not one of"),
        ({"failed_max": (1, 10)}, "failed_max= requires on_error='drop' or 'side_output'"),
        *(
            ({"on_error": "drop", "failed_max": most}, "is not a pair")
            for most in (3, (1,), (5, 5), (-1, 3), (1, 2, 3), ("1", 2), (0.0, 1), (True, 3), "12")
        ),
    ],
)
@pytest.mark.parametrize("method", ["map", "flat_map", "map_batches", "filter"])
def test_other_ways_to_handle_errors_are_refused(method: str, arguments: Any, message: str):
    with pytest.raises(ConfigError, match=rf"^{HERE}:\d+: {method}: .*{re.escape(message)}"):
        getattr(stream(), method)(lambda row: row, **arguments)


def test_there_are_failed_rows_only_where_they_are_taken_aside():
    for made in (stream().map(Scored()), stream().map(Scored(), on_error="drop"), stream().filter(pl.col("n") > 1)):
        with pytest.raises(JobError, match=r"failed rows are with the stream.*on_error='side_output'"):
            made.side_output(FAILED)
    made = stream().map(Scored(), on_error="side_output")
    assert made.side_output(FAILED).schema.names == ["row", "function", "error_type", "error"]
    with pytest.raises(JobError, match="failed rows are with"):
        made.rebalance().side_output(FAILED)


def test_an_expression_has_no_error_handling():
    with pytest.raises(JobError, match="on_error= is for a function; an expression that fails"):
        stream().filter(pl.col("n") > 1, on_error="drop")


def test_another_form_is_refused():
    with pytest.raises(JobError, match="form 'numpy' is not one of polars, arrow, pandas"):
        stream().map_batches(lambda frame: frame, form="numpy")  # type: ignore[arg-type]


def test_columns_of_any_name_can_fail():
    rows = [{"row": 1, "error": "x", "function": None, "error_type": 2.5}]
    made = Environment("names").from_collection(
        rows, schema={"row": int, "error": str, "function": str, "error_type": float}
    )
    found = testing.run(made.map(lambda row: {**row, "row": 1 // 0}, on_error="side_output"))
    assert [one["row"] for one in found[FAILED]] == rows


def test_schemas_are_still_checked():
    with pytest.raises(SchemaError):
        stream().map(Scored(), {"n": "no type"}, on_error="drop")


# ---- functions with state


class Totals(KeyedProcessFunction):
    total = ValueState(int, default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.total.value += row["n"]
        if row["n"] % 3 == 0:
            raise ValueError(f"no {row['n']}")
        return {"k": ctx.key, "total": self.total.value}


def test_what_a_function_with_state_has_done_for_a_failed_row_is_undone():
    made = stream().key_by("k").process(Totals(), {"k": str, "total": int}, on_error="side_output")
    testing.check_cuts(made)
    found = testing.run(made)
    assert [row["total"] for row in found.rows if row["k"] == "a"] == [2, 6]
    assert [row["total"] for row in found.rows if row["k"] == "b"] == [1, 6, 13]
    assert sorted(one["row"]["n"] for one in found[FAILED]) == [0, 3, 6]
    assert {one["function"] for one in found[FAILED]} == {"Totals.process"}


def test_a_side_output_of_the_users_cannot_have_the_name_of_failed_rows():
    keyed = stream().key_by("k")
    with pytest.raises(JobError, match="'failed rows' is the side output of on_error='side_output'"):
        keyed.process(Totals(), {"k": str}, side_outputs={FAILED: {"k": str}}, on_error="side_output")
    with pytest.raises(ConfigError, match="process: on_error 'skip' is not one of"):
        keyed.process(Totals(), {"k": str}, on_error="skip")  # type: ignore[arg-type]
