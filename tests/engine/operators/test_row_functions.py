"""Functions on rows and batches: their life, and rows for which they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import Parts, World

from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.base import Operator
from midstream.engine.operators.failed_rows import ERROR_CHARS_MAX, FAILED, ErrorPolicy, OnError, failed_schema
from midstream.engine.operators.row_functions import (
    FilterFunctionOperator,
    FlatMapOperator,
    MapBatchesOperator,
    MapOperator,
)

SCHEMA = schema_of([("n", pa.int64()), ("s", pa.large_string())])
Make = Callable[[ErrorPolicy], Operator]


def batch_of(numbers: Sequence[int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "s": f"s{n}"} for n in numbers], schema=SCHEMA)


def policy(on_error: OnError = "side_output", failed_max: tuple[int, int] | None = None) -> ErrorPolicy:
    return ErrorPolicy(on_error, failed_max, SCHEMA)


# ---- functions that fail for some rows, each in a way of its own; None is for rows for which they do not fail


def failure(n: int | None) -> str | None:
    """What fails for a row with this number."""
    return None if n is None else {1: "raises", 2: "misfits", 3: "lacks", 4: "exits"}.get(n % 7)


def mapped(row: dict[str, Any]) -> dict[str, Any]:
    match failure(row["n"]):
        case "raises":
            row["s"] = "changed before it failed"
            raise ValueError(f"no {row['n']}")
        case "misfits":
            return {"n": row["n"] + 0.25, "s": "a float"}
        case "lacks":
            return {"n": row["n"]}
        case "exits":
            raise SystemExit(3)
        case _:
            return {"n": row["n"], "s": row["s"] * 2}


def flat_mapped(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row
    yield mapped(dict(row))
    yield row


def is_kept(row: dict[str, Any]) -> bool:
    match failure(row["n"]):
        case "raises" | "lacks":
            raise KeyError(row["n"])
        case "misfits":
            return iter(())  # type: ignore[return-value]
        case "exits":
            raise SystemExit
        case _:
            return row["n"] is not None and row["n"] % 2 == 0


def on_batches(frame: pl.DataFrame) -> pl.DataFrame:
    made = [mapped(row) for row in frame.to_dicts()]
    numbers = [row["n"] for row in made]
    kind = pl.Float64 if any(type(n) is float for n in numbers) else pl.Int64
    return pl.DataFrame(
        {"n": pl.Series(numbers, dtype=kind), "s": pl.Series([row["s"] for row in made], dtype=pl.String)}
    )


MAKERS: Mapping[str, Make] = {
    "map": lambda policy: MapOperator("op", mapped, SCHEMA, policy),
    "flat_map": lambda policy: FlatMapOperator("op", flat_mapped, SCHEMA, policy),
    "filter": lambda policy: FilterFunctionOperator("op", is_kept, SCHEMA, policy),
    "map_batches": lambda policy: MapBatchesOperator("op", on_batches, SCHEMA, "polars", policy),
}


def expected_of(kind: str, numbers: Sequence[int | None]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """The rows that come out, and the numbers of those that fail."""
    out: list[dict[str, Any]] = []
    for n in numbers:
        row: dict[str, Any] = {"n": n, "s": f"s{n}"}
        made = {**row, "s": row["s"] * 2}
        if failure(n) is not None:
            continue
        if kind == "filter":
            out += [row] if n is not None and n % 2 == 0 else []
        else:
            out += [row, made, row] if kind == "flat_map" else [made]
    return out, [n for n in numbers if failure(n) is not None]


cut_rows = st.tuples(st.lists(st.none() | st.integers(0, 30), max_size=40), st.lists(st.integers(0, 40), max_size=5))


def cut(numbers: Sequence[int | None], cuts: Sequence[int]) -> list[pa.RecordBatch]:
    ends = sorted({0, len(numbers), *(min(at, len(numbers)) for at in cuts)})
    whole = batch_of(numbers)
    return [whole.slice(first, end - first) for first, end in pairwise(ends)]


@pytest.mark.parametrize("kind", MAKERS)
@given(cut_rows)
def test_each_row_comes_out_once_as_it_is_made_or_as_it_was(
    kind: str, drawn: tuple[list[int | None], list[int]]
) -> None:
    numbers, cuts = drawn
    made, lost = expected_of(kind, numbers)
    world = World(MAKERS[kind](policy()))
    for batch in cut(numbers, cuts):
        world.process(batch)
    assert world.out.rows() == made
    found = world.out.rows(FAILED)
    assert [one["row"] for one in found] == [{"n": n, "s": f"s{n}"} for n in lost]
    assert all(out.schema == failed_schema(SCHEMA) for tag, out in world.out.batches if tag == FAILED)
    assert world.operator.failed_rows == len(lost)
    dropping = World(MAKERS[kind](policy("drop")))
    for batch in cut(numbers, cuts):
        dropping.process(batch)
    assert dropping.out.rows() == made
    assert all(tag is None for tag, _ in dropping.out.batches)
    assert dropping.operator.failed_rows == len(lost)


@pytest.mark.parametrize("kind", MAKERS)
@given(cut_rows, st.integers(0, 3), st.integers(1, 8))
def test_the_row_that_is_one_too_many_is_the_same_however_batches_are_cut_and_after_restores(
    kind: str, drawn: tuple[list[int | None], list[int]], allowed: int, more: int
) -> None:
    numbers, cuts = drawn
    most = allowed, allowed + more
    lost = set(expected_of(kind, numbers)[1])
    failed_in_block, one_too_many = 0, None
    for at, n in enumerate(numbers):
        if at % most[1] == 0:
            failed_in_block = 0
        failed_in_block += n in lost
        if failed_in_block > allowed:
            one_too_many = n
            break

    def run() -> None:
        parts: Parts | None = None
        for batch in cut(numbers, cuts):
            world = World(MAKERS[kind](policy(failed_max=most)), parts=parts)
            world.process(batch)
            parts = world.snapshot()

    if one_too_many is None:
        run()
        return
    with pytest.raises(JobError, match=f"failed_max allows {allowed} of {most[1]}") as raised:
        run()
    assert f"{{'n': {one_too_many}, " in str(raised.value)
    assert raised.value.row is not None


def test_what_is_recorded_of_a_failed_row() -> None:
    world = World(MAKERS["map"](policy()))
    world.process(batch_of([1, 2, 4]))
    columns = [(one["function"], one["error_type"], one["error"]) for one in world.out.rows(FAILED)]
    assert columns[0] == ("mapped", "ValueError", "no 1")
    assert columns[1][:2] == ("mapped", "JobError")
    assert "column 'n'" in columns[1][2]
    assert columns[2] == ("mapped", "SystemExit", "3")


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Hostile(), "(no text: its __str__ raised RuntimeError)"),
        (ValueError("\udcff"), "\\udcff"),
        (ValueError("x" * 1_000_000), "x" * ERROR_CHARS_MAX + " …"),
        (StopIteration("ended"), "ended"),
        (RecursionError("deep"), "deep"),
    ],
)
def test_the_text_of_any_error_can_be_emitted(error: BaseException, text: str) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise error

    world = World(MapOperator("op", fails, SCHEMA, policy()))
    world.process(batch_of([1]))
    [found] = world.out.rows(FAILED)
    assert (found["error"], found["error_type"]) == (text, type(error).__name__)


def test_running_out_of_memory_is_no_fault_of_a_row() -> None:
    def fails(row: Any) -> Any:
        raise MemoryError

    for operator in (
        MapOperator("op", fails, SCHEMA, policy()),
        FlatMapOperator("op", fails, SCHEMA, policy()),
        FilterFunctionOperator("op", fails, SCHEMA, policy()),
        MapBatchesOperator("op", fails, SCHEMA, "arrow", policy()),
    ):
        with pytest.raises(MemoryError):
            World(operator).process(batch_of([1, 2]))


def test_a_row_that_python_cannot_represent_fails_alone() -> None:
    schema = schema_of([("at", pa.timestamp("ns"))])
    batch = pa.RecordBatch.from_arrays([pa.array([1_000, 1_001, 2_000], pa.timestamp("ns"))], schema=schema)
    world = World(MapOperator("op", lambda row: row, schema, ErrorPolicy("side_output", None, schema)))
    world.process(batch)
    [(_, main), (_, failed)] = world.out.batches
    assert main.column("at").cast(pa.int64()).to_pylist() == [1_000, 2_000]
    rows: Any = failed.column("row")
    assert rows.field("at").cast(pa.int64()).to_pylist() == [1_001]


def test_a_row_function_is_called_once_for_each_row() -> None:
    calls: list[int] = []

    def counted(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["n"])
        return mapped(row)

    operator = MapOperator("op", counted, SCHEMA, policy())
    world = World(operator)
    world.operator._function = counted  # type: ignore[attr-defined]  # not the copy that was pickled
    world.process(batch_of(range(10)))
    assert calls == list(range(10))


@pytest.mark.parametrize("form", ["polars", "arrow", "pandas"])
def test_a_batch_that_fails_is_reported_with_the_row_for_which_it_fails(form: Any) -> None:
    def fails(batch: Any) -> Any:
        if 5 in list(batch["n"] if form != "arrow" else batch.column("n").to_pylist()):
            raise ValueError("five")
        return batch

    with pytest.raises(JobError, match=r"ValueError for the row \{'n': 5, 's': 's5'\}: five") as raised:
        World(MapBatchesOperator("op", fails, SCHEMA, form)).process(batch_of(range(9)))
    assert raised.value.row == 5


def test_a_batch_for_which_a_service_is_away_is_not_processed_in_halves() -> None:
    calls = []

    def fails(batch: Any) -> Any:
        calls.append(batch)
        raise OSError("no route to host")

    world = World(MapBatchesOperator("op", fails, SCHEMA, "arrow"))
    world.operator._function = fails  # type: ignore[attr-defined]  # not the copy that was pickled
    with pytest.raises(JobError, match="raised OSError: no route"):
        world.process(batch_of(range(9)))
    assert len(calls) == 1


# ---- life


class Alive:
    """Records its life in its metrics, which outlive its pickling."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in

    def open(self, ctx: Any) -> None:
        self.ctx, self.metrics = ctx, ctx.metrics
        self.metrics.counter("opened").inc()
        if self.fails_in == "open":
            raise ConnectionError("refused")

    def __call__(self, rows: Any) -> Any:
        assert self.metrics.counter("opened").value == 1
        self.metrics.counter("calls").inc()
        if self.fails_in == "call":
            raise ValueError("wrong")
        return rows

    def close(self) -> None:
        self.metrics.counter("closed").inc()
        if self.fails_in == "close":
            raise ConnectionError("lost")


LIVES: Mapping[str, Callable[[Alive], Operator]] = {
    "map": lambda function: MapOperator("op", function, SCHEMA),
    "flat_map": lambda function: FlatMapOperator("op", Listed(function.fails_in), SCHEMA),
    "filter": lambda function: FilterFunctionOperator("op", function, SCHEMA),
    "map_batches": lambda function: MapBatchesOperator("op", function, SCHEMA),
}


class Listed(Alive):
    """Returns a list of the row."""

    def __call__(self, rows: Any) -> Any:
        return [super().__call__(rows)]


def counters(world: World) -> dict[str, float]:
    assert world.operator.user_metrics is not None
    return world.operator.user_metrics.counters


@pytest.mark.parametrize("kind", LIVES)
def test_a_function_is_opened_before_its_first_row_and_closed_once(kind: str) -> None:
    world = World(LIVES[kind](Alive()), subtask=2, parallelism=3)
    assert counters(world) == {"opened": 1}
    world.process(batch_of([1, 2]))
    world.operator.close()
    world.operator.close()
    assert counters(world) == {"opened": 1, "calls": 1 if kind == "map_batches" else 2, "closed": 1}
    context = world.operator._function.ctx  # type: ignore[attr-defined]
    assert (context.uid, context.name, context.subtask, context.parallelism) == ("op", "op", 2, 3)
    assert world.failures == []


@pytest.mark.parametrize("kind", LIVES)
def test_a_function_is_closed_after_a_failure_and_its_own_failures_name_the_operator(kind: str) -> None:
    world = World(LIVES[kind](Alive("call")))
    with pytest.raises(JobError, match="operator 'op': the function raised ValueError"):
        world.process(batch_of([1]))
    world.operator.close()
    assert counters(world)["closed"] == 1
    with pytest.raises(JobError, match="operator 'op': open raised ConnectionError: refused"):
        World(LIVES[kind](Alive("open")))
    world = World(LIVES[kind](Alive("close")))
    world.operator.close()
    [failed] = world.failures
    assert str(failed) == "operator 'op': close raised ConnectionError: lost"


# ---- pandas

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

_TYPES: Mapping[str, tuple[pa.DataType, list[Any]]] = {
    "int64": (pa.int64(), [None, 0, 2**63 - 1, -(2**63), 2**53 + 1]),
    "uint64": (pa.uint64(), [None, 2**64 - 1, 7]),
    "int8": (pa.int8(), [None, -128, 127]),
    "float64": (pa.float64(), [None, float("nan"), -0.0, float("inf"), 0.1]),
    "float32": (pa.float32(), [None, 0.5, float("nan")]),
    "bool": (pa.bool_(), [None, True, False]),
    "text": (pa.large_string(), [None, "", "ä", "x" * 40]),
    "bytes": (pa.large_binary(), [None, b"", b"\0\xff"]),
    "date": (pa.date32(), [None, date(1, 1, 1), date(9999, 12, 31)]),
    "us": (pa.timestamp("us"), [None, datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)]),
    "ns": (pa.timestamp("ns"), [None, 1, -1, 2**62]),
    "zoned": (pa.timestamp("ms", "Europe/Paris"), [None, datetime(2024, 3, 31, 1, 30, tzinfo=UTC)]),
    "duration": (pa.duration("us"), [None, timedelta(microseconds=1), timedelta(days=-9)]),
    "decimal": (pa.decimal128(38, 2), [None, Decimal("1.10"), Decimal("-99999999999999999999.99")]),
    "list": (pa.large_list(pa.int64()), [None, [], [1, None]]),
    "struct": (pa.struct([("a", pa.int64())]), [None, {"a": None}, {"a": 2**60}]),
    "map": (pa.map_(pa.large_string(), pa.int64()), [None, [], [("a", 1)]]),
    "time": (pa.time64("us"), [None, 0, 86_399_999_999]),
    "fixed": (pa.binary(2), [None, b"ab"]),
}


@given(st.data())
def test_what_pandas_passes_on_is_what_it_was_given(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(_TYPES)), min_size=1, max_size=4, unique=True))
    height = data.draw(st.integers(1, 5))
    arrays = []
    for kind in kinds:
        arrow, values = _TYPES[kind]
        arrays.append(pa.array(data.draw(st.lists(st.sampled_from(values), min_size=height, max_size=height)), arrow))
    schema = schema_of([(kind, array.type) for kind, array in zip(kinds, arrays, strict=True)])
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    for function in (
        lambda frame: frame,
        lambda frame: frame[list(reversed(frame.columns))],
        lambda frame: frame.copy(),
    ):
        world = World(MapBatchesOperator("op", function, schema, "pandas"))
        world.process(batch.slice(0, 1))
        world.process(batch.slice(1))
        made = pa.Table.from_batches([out for _, out in world.out.batches])
        assert repr(made.to_pylist()) == repr(batch.to_pylist())  # repr, as NaN is not equal to itself
        assert made.schema == schema


def of_pandas(function: Callable[[Any], Any], schema: Mapping[str, pa.DataType], given: pa.RecordBatch) -> list[Any]:
    world = World(MapBatchesOperator("op", function, schema_of(list(schema.items())), "pandas"))
    world.process(given)
    return world.out.rows()


def test_a_column_of_pandas_has_the_same_type_whether_a_batch_has_nulls_or_not() -> None:
    def kinds(frame: Any) -> Any:
        assert [str(kind) for kind in frame.dtypes] == ["int64[pyarrow]", "large_string[pyarrow]"]
        return frame

    for numbers in ([1, 2], [None, 2], [None]):
        assert of_pandas(kinds, {"n": pa.int64(), "s": pa.large_string()}, batch_of(numbers))


def test_the_types_of_numpy_and_the_others_of_pandas_come_back_exactly() -> None:
    def made(frame: Any) -> Any:
        return pandas.DataFrame(
            {
                "f": [0.5, float("nan")],
                "i": pandas.array([1, None], dtype="Int64"),
                "o": pandas.Series(["a", None], dtype=object),
                "c": pandas.Categorical(["x", None]),
                "at": pandas.to_datetime(["2024-01-01", None]),
                "s": pandas.Series(["a", None], dtype="str"),
                "l": pandas.Series([[1, 2], pandas.NA], dtype=object),
            }
        ).set_index(pandas.Index([7, 7]))

    types: dict[str, pa.DataType] = {"f": pa.float64(), "i": pa.int64(), "o": pa.large_string(), "c": pa.large_string()}
    types |= {"at": pa.timestamp("us"), "s": pa.large_string(), "l": pa.large_list(pa.int64())}
    found = of_pandas(made, types, batch_of([1]))
    assert repr(found[0]) == repr(
        {"f": 0.5, "i": 1, "o": "a", "c": "x", "at": datetime(2024, 1, 1), "s": "a", "l": [1, 2]}
    )
    assert repr(found[1]) == repr(
        {"f": float("nan"), "i": None, "o": None, "c": None, "at": None, "s": None, "l": None}
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda frame: frame.astype({"n": "float64"}).assign(n=[1.0, float("nan")]),
            "has a NaN, declared as int64.*Int64",
        ),
        (lambda frame: frame.assign(n=[1.5, 2.0]), "column 'n'"),
        (lambda frame: frame.set_index("n"), r"'n' is the index of the pandas frame.*reset_index\(\)"),
        (lambda frame: frame.drop(columns="n"), "column 'n' is missing"),
        (lambda frame: frame.assign(m=1), "column 'm' is not in the declared schema"),
        (lambda frame: frame.rename(columns={"n": 1}), "column 1 of the pandas frame is named by an int"),
        (lambda frame: frame.rename(columns={"s": "n"}), "two columns 'n'"),
        (lambda frame: frame.assign(n=pandas.Series([1, "x"], dtype=object)), "column 'n', object in pandas"),
        (lambda frame: frame.assign(n=pandas.date_range("2024-01-01", periods=2)), "column 'n'"),
        (lambda frame: frame.assign(n=pandas.period_range("2024-01", periods=2)), "column 'n'"),
        (lambda frame: frame["n"], "returned a Series"),
    ],
)
def test_a_frame_of_pandas_that_does_not_fit_is_refused_by_column(made: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((JobError, SchemaError), match=message):
        of_pandas(made, {"n": pa.int64(), "s": pa.large_string()}, batch_of([1, 2]))
