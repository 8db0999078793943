"""The types that expressions compute: a type means the same in the next operator, or is refused when the job is built."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, Final

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from expression_calls import COLUMNS, columns_of, expression_of, read_table
from operator_world import World

from midstream import Environment
from midstream.connectors.files.file_source import FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import conform, frame_schema, single_batch, to_arrow
from midstream.engine.core.errors import JobError, MidstreamError, SchemaError
from midstream.engine.core.schemas import as_schema
from midstream.engine.operators.elementwise import check_of_many_rows, check_row_by_row
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, infer_schema
from midstream.engine.operators.probe_values import ROW, probe, probe_frame
from midstream.engine.operators.stateless import FilterOperator, ProjectOperator
from midstream.engine.operators.windows.aggregates import Aggregate, Columns
from midstream.engine.operators.windows.window_factory import tumbling, window_operator

CALLS: Final = {
    verdict: [call for calls in read_table().values() for call in calls.get(verdict, ())]
    for verdict in ("accepted", "refused")
}
PRIORITY: Final = pl.Enum(["low", "mid", "high"])


def projected(batch: pa.RecordBatch, *exprs: pl.Expr) -> pa.RecordBatch:
    world = World(ProjectOperator("p", exprs, batch.schema, keep=False))
    world.process(batch)
    ((_, made),) = world.out.batches
    return made


def batch_of(frame: pl.DataFrame) -> pa.RecordBatch:
    return conform(single_batch(to_arrow(frame)), frame_schema(frame), "the source")


# ---- between operators ----


def one_call_of_each_type() -> list[pl.Expr]:
    """Return expressions: for each type that accepted calls have, the first that has it, and some of Enums."""
    empty = pl.DataFrame(schema=COLUMNS)
    found: dict[str, pl.Expr] = {}
    for call in CALLS["accepted"]:
        expr = expression_of(call)
        if not expr.meta.has_multiple_outputs():
            try:
                kind = empty.select(expr).dtypes[0]
            except EXPRESSION_ERRORS:
                continue
            found.setdefault(str(kind), expr)
    priority = pl.col("s").replace_strict({"a,b": "low", "7": "high"}, default="mid").cast(PRIORITY)
    enums = [priority, pl.concat_list(priority, priority), pl.struct(p=priority, s="s"), pl.col("i").cut([0, 9])]
    return [*found.values(), *enums]


NEXT: Final[dict[str, Callable[[pl.Expr], pl.Expr]]] = {
    "text": lambda value: value.cast(pl.String),
    "number": lambda value: value.to_physical(),
    "hash": lambda value: value.hash(),
    "smallest in list": lambda value: value.list.min(),
    "order": lambda value: value >= value.list.first(),
    "not less than mid": lambda value: value >= pl.lit("mid"),
    "largest": lambda value: pl.max_horizontal(value, pl.lit("mid")),
}


def outcome(rows: pa.RecordBatch | None, expr: pl.Expr) -> pa.RecordBatch | None:
    """Return the results; None if the operator is refused, or fails, or if there are no rows for it."""
    try:
        return None if rows is None else projected(rows, expr)
    except MidstreamError:
        return None


def test_an_expression_in_two_operators_computes_the_same_as_in_one_or_is_refused() -> None:
    rows = batch_of(probe_frame(COLUMNS, close_together=False).drop(ROW))
    compared, different = 0, []
    for expr in one_call_of_each_type():
        half = outcome(rows, expr.alias("v"))
        for name, following in NEXT.items() if half is not None else ():
            in_two = outcome(half, following(pl.col("v")).alias("out"))
            in_one = outcome(rows, following(expr.alias("v")).alias("out")) if in_two is not None else None
            if in_one is not None and in_two is not None:
                compared += 1
                if not pl.DataFrame(in_one).equals(pl.DataFrame(in_two)):
                    different.append((str(expr), name, in_one, in_two))
    assert not different, different[:3]
    assert compared > 60, compared


ENUMS: Final[list[pl.Expr]] = [
    pl.col("s").cast(PRIORITY),
    pl.col("s").cast(pl.Categorical),
    pl.struct(p=pl.col("s").cast(PRIORITY)),
    pl.concat_list(pl.col("s").cast(PRIORITY)),
    pl.concat_list(pl.struct(p=pl.col("s").cast(pl.Categorical))),
    pl.col("n").cut([1, 5]),
]
SCHEMA: Final = schema_of([("s", pa.large_string()), ("n", pa.int64()), ("at", pa.timestamp("us"))])


@pytest.mark.parametrize("expr", ENUMS, ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_an_enum_does_not_leave_an_operator(expr: pl.Expr, keep: bool) -> None:
    with pytest.raises(
        SchemaError,
        match=r"operator 'p': column 'out' is .*an? (Enum|Categorical), which rows .*\.cast\(pl\.String\) for the text",
    ):
        ProjectOperator("p", [expr.alias("out")], SCHEMA, keep=keep)


def test_within_one_expression_an_enum_keeps_its_order() -> None:
    frame = pl.DataFrame({"s": ["low", "mid", "high", None], "n": 1, "at": datetime(2024, 1, 1)})
    priority = pl.col("s").cast(PRIORITY)
    exprs = [(priority >= "mid").alias("urgent"), priority.to_physical().alias("order"), priority.cast(pl.String)]
    made = pl.from_arrow(projected(batch_of(frame), *exprs))
    assert isinstance(made, pl.DataFrame)
    assert made.equals(frame.select(exprs))
    world = World(FilterOperator("f", priority >= "mid", SCHEMA))
    world.process(conform(batch_of(frame), SCHEMA, "rows"))
    assert [row["s"] for row in world.out.rows()] == ["mid", "high"]


class OfEnum(Aggregate):
    columns = ("s",)

    def __init__(self, finish: Callable[[pl.Expr], pl.Expr], partial: pl.Expr) -> None:
        self._finish, self._partial = finish, partial

    def partial(self, event_time: pl.Expr) -> dict[str, pl.Expr]:
        return {"worst": self._partial}

    def merge(self, part: Columns) -> dict[str, pl.Expr]:
        return {"worst": part("worst").max()}

    def finish(self, part: Columns) -> pl.Expr:
        return self._finish(part("worst"))


@pytest.mark.parametrize(
    ("finish", "partial"),
    [
        (lambda part: part.cast(pl.String), pl.col("s").cast(PRIORITY).max()),  # parts are stored, and merged as texts
        (lambda part: part.cast(PRIORITY), pl.col("s").max()),
    ],
)
def test_an_enum_is_no_part_and_no_result_of_an_aggregate(
    finish: Callable[[pl.Expr], pl.Expr], partial: pl.Expr
) -> None:
    with pytest.raises(SchemaError, match=r"operator 'w': column '.*' is an Enum"):
        window_operator(
            "w",
            window=tumbling("1 s"),
            keys=["n"],
            event_time="at",
            aggregates={"x": OfEnum(finish, partial)},
            schema=SCHEMA,
        )


ORDERED: Final = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array(["x", "y"]), ordered=True)


def test_a_column_with_an_order_does_not_enter_a_job(tmp_path: Path) -> None:
    env = Environment("enters")
    frame = pl.DataFrame({"p": pl.Series(["mid", "low"], dtype=PRIORITY)})
    path = tmp_path / "rows.parquet"
    frame.write_parquet(path)
    refused = r"column 'p' is an ordered dictionary, .*\.cast\(pl\.String\) or \.to_physical\(\)"
    nested = pa.table({"p": pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), ORDERED)})
    for enter in (
        lambda: env.from_collection(frame),
        lambda: env.from_collection(pa.table({"p": ORDERED})),
        lambda: env.from_collection(nested),
        lambda: env.from_collection(frame.select(pl.struct("p").alias("p"))),
        lambda: FileSource(str(path)),
        lambda: as_schema({"p": PRIORITY}, "schema"),
        lambda: as_schema({"p": list[PRIORITY]}, "schema"),  # type: ignore[valid-type]  # an instance of a type
        lambda: as_schema({"p": ORDERED.type}, "schema"),
        lambda: as_schema(pa.schema([("p", pa.list_(ORDERED.type))]), "schema"),
        lambda: as_schema(pl.Schema({"p": pl.List(PRIORITY)}), "schema"),
    ):
        with pytest.raises(SchemaError, match=refused):
            enter()
    assert FileSource(str(path), schema=as_schema({"p": str}, "schema")).schema == schema_of([("p", pa.large_string())])
    unordered = frame.cast(pl.Categorical)
    assert env.from_collection(unordered).schema == schema_of([("p", pa.large_string())])


# ---- Python functions of no type ----


def with_a_lock(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    lock = Lock()  # which cannot be pickled

    def locked(value: Any) -> Any:
        with lock:
            return function(value)

    return locked


def large(value: Any) -> Any:
    return str(value) if value > 100 else None


N: Final = pl.col("n")


@pytest.mark.parametrize(
    "expr",
    [
        N.map_elements(large),
        N.map_elements(large).fill_null("none"),
        N.map_elements(large).is_null() & (N > 1),
        N.map_elements(with_a_lock(large)),
        N.map_elements(with_a_lock(large)).fill_null("none"),
        N.map_elements(lambda n: [n] if n > 100 else []),
        N.map_elements(lambda n: {"a": n, "b": large(n)}),
        N.map_batches(lambda column: column if 200 in column else pl.Series([None] * len(column))),
        pl.struct("n", "s").map_elements(lambda row: large(row["n"] or 0)),
        cs.integer().map_elements(large),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::polars.exceptions.MapWithoutReturnDtypeWarning")
def test_a_python_function_whose_type_would_be_null_is_refused(expr: pl.Expr) -> None:
    with pytest.raises(SchemaError, match=r"operator 'p': .* results have the type .*Null.*; state return_dtype="):
        ProjectOperator("p", [expr.alias("out")], SCHEMA, keep=True)


@pytest.mark.parametrize(
    "function", [lambda n: {"a": n} if n < 9 else {"a": n, "b": n}, lambda n: [{"a": n}], lambda n: {"a": {"b": n}}]
)
@pytest.mark.filterwarnings("ignore::polars.exceptions.MapWithoutReturnDtypeWarning")
def test_a_python_function_that_makes_structs_must_state_their_fields(function: Callable[[int], Any]) -> None:
    with pytest.raises(SchemaError, match=r"results have the type .*Struct.*; state return_dtype="):
        ProjectOperator("p", [N.map_elements(function).alias("out")], SCHEMA, keep=True)
    own = N.map_elements(lambda n: n + 1).alias("more")
    ProjectOperator("p", [pl.struct(own, "n").alias("out")], SCHEMA, keep=True)  # the function makes numbers
    stated = N.map_elements(function, return_dtype=pl.Struct({"a": pl.Int64(), "b": pl.Int64()}))
    ProjectOperator("p", [stated.alias("out")], SCHEMA, keep=True)


def test_with_a_stated_type_it_is_accepted() -> None:
    rows = batch_of(pl.DataFrame({"n": [1, 200, None]}))
    made = projected(rows, N.map_elements(large, return_dtype=pl.String).alias("out"))
    assert made.column("out").to_pylist() == [None, "200", None]


# ---- casts ----

KINDS: Final[list[pl.DataType]] = [
    *(pl.Int8(), pl.Int64(), pl.UInt64(), pl.Float32(), pl.Float64(), pl.Decimal(20, 2), pl.Boolean(), pl.String()),
    *(pl.Binary(), pl.Date(), pl.Time(), pl.Datetime("us"), pl.Datetime("ns", "Asia/Tokyo"), pl.Duration("us")),
    *(pl.List(pl.Int64()), pl.List(pl.String()), pl.Array(pl.Int64(), 2)),
]
PAIR: Final = pl.Struct({"a": pl.Int64(), "b": pl.String()})
TO: Final[list[pl.DataType]] = [*KINDS, PAIR, pl.Enum(["x", "y"]), pl.Map(pl.String(), pl.Int64())]


def has_cast(kind: pl.DataType, to: pl.DataType) -> bool:
    """Whether polars casts some value; one that does not fit becomes null."""
    values = probe(kind, close_together=False)
    for row in (values.slice(row, 1) for row in range(len(values))):
        if "null" in str(row) or "[]" in str(row):
            continue
        try:
            row.to_frame("x").select(pl.col("x").cast(to, strict=False))
        except EXPRESSION_ERRORS:
            continue
        return True
    return False


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_exactly_the_casts_that_polars_lacks_are_refused_when_a_job_is_built(kind: pl.DataType) -> None:
    schema = frame_schema(pl.DataFrame(schema={"x": kind}))
    wrong = []
    for to in TO:
        for expr in (pl.col("x").cast(to), pl.when(pl.col("x").is_null()).then(None).otherwise(pl.col("x").cast(to))):
            accepted = True
            try:
                check_row_by_row([expr], schema, "here")
            except SchemaError:
                accepted = False
            if accepted != has_cast(kind, to):
                wrong.append((str(expr), accepted))
    assert not wrong, wrong


def test_a_cast_is_found_wherever_it_is() -> None:
    text = pl.col("s")
    for expr in (
        text.cast(pl.Date).dt.year() + N,
        pl.concat_str("s", pl.col("at") - pl.col("at")),
        pl.when(N == 123_456).then(text.cast(pl.Boolean)).otherwise(False),
        pl.concat_list("s").list.eval(pl.element().cast(pl.Date)),
        N.cast(pl.Enum(["a", "b"])).cast(pl.String),
    ):
        with pytest.raises(
            SchemaError, match=r"operator 'p': .* fails for every value: .*cast.*; cast to another type"
        ):
            ProjectOperator("p", [expr.alias("out")], SCHEMA, keep=True)
    with pytest.raises(SchemaError, match=r"here: .* fails for every value: .*cast"):
        check_of_many_rows([text.cast(pl.Date).max()], SCHEMA, "here")


# ---- panics, and constants ----


def test_no_call_of_polars_panics_when_an_operator_is_built() -> None:
    built, unnamed = 0, []
    for call in [*CALLS["accepted"], *CALLS["refused"]]:
        schema = frame_schema(pl.DataFrame(schema=columns_of(call)))
        try:
            infer_schema(schema, [expression_of(call)], f"call {call}", keep=False)
        except MidstreamError as error:
            if call not in str(error):
                unnamed.append((call, error))
        else:
            built += 1
    assert not unnamed
    assert built > 700


def test_a_panic_is_an_error_that_names_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> pl.DataFrame:
        raise pl.exceptions.PanicException("index 0 is out of bounds\n")

    monkeypatch.setattr(pl.DataFrame, "select", panic)
    with pytest.raises(SchemaError, match=r'here: polars panics when it evaluates .*col\("n"\).*: index 0 is out'):
        infer_schema(SCHEMA, [N + 1], "here", keep=False)


def test_what_panics_only_without_rows_is_accepted() -> None:
    twice = pl.DataFrame({"t": [datetime(2024, 10, 27, 2, 30)] * 2, "dst": [True, False]})
    hour = pl.when("dst").then(pl.lit("earliest")).otherwise(pl.lit("latest"))
    local = pl.col("t").dt.replace_time_zone("Europe/Berlin", ambiguous=hour).alias("local")
    made = pl.from_arrow(projected(batch_of(twice), local))
    assert isinstance(made, pl.DataFrame)
    assert made.equals(twice.select(local))


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        (pl.lit(pl.Series([1, 2])).sum(), 3),
        (pl.lit(pl.Series([1, 2])).len(), 2),
        (pl.lit(pl.Series(range(12))).get(3), 3),
        (pl.lit(pl.Series(["b", "a"])).min(), "a"),
        (pl.int_range(0, 5).sum(), 10),
        (pl.lit(1).max() + pl.lit(pl.Series([4, 5])).first(), 5),
        (pl.lit(pl.Series([1, 2])).implode(), [1, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_a_constant_may_be_reduced_from_a_series(constant: pl.Expr, value: object, rows: int) -> None:
    made = projected(batch_of(pl.DataFrame({"n": range(rows)})), N, constant.alias("out"))
    assert made.column("out").to_pylist() == [value] * rows


@pytest.mark.parametrize("series", [[5], [1, 2], [*range(12)]], ids=len)
def test_a_series_is_no_constant(series: list[int]) -> None:
    with pytest.raises(JobError, match=r"is a series of values, not one value for each row; use pl\.lit\(\) of one"):
        ProjectOperator("p", [pl.lit(pl.Series(series)).alias("out")], SCHEMA, keep=True)


# ---- types that polars plans, and those that values have ----

_BOTH: Final[dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]]] = {
    "when": lambda one, other: pl.when(one.is_not_null()).then(one).otherwise(other),
    "coalesce": pl.coalesce,
    "difference": lambda one, other: one - other,
    "list": pl.concat_list,
    "steps": lambda one, other: pl.concat_list(one, other).list.diff(),
}
_KINDS: Final = {
    "int": pl.Int64(),
    "text": pl.String(),
    "float": pl.Float32(),
    "date": pl.Date(),
    "at": pl.Datetime("ms"),
    "time": pl.Time(),
    "took": pl.Duration("us"),
}


@pytest.mark.parametrize("how", _BOTH)
def test_an_expression_of_two_types_is_refused_or_has_the_declared_type(how: str) -> None:
    """polars plans another type than it computes for some expressions: no batch would fit the declared one."""
    pairs = [(one, other) for one in _KINDS for other in _KINDS]
    refused, failures = 0, list[str]()
    for one, other in pairs:
        schema = pl.DataFrame(schema={"one": _KINDS[one], "other": _KINDS[other]})
        rows = probe_frame(dict(schema.schema), close_together=True).drop(ROW)
        expr = _BOTH[how](pl.col("one"), pl.col("other")).alias("r")
        try:
            operator = ProjectOperator("p", [expr], frame_schema(schema), keep=False)
        except MidstreamError:
            refused += 1
            continue
        world = World(operator)
        for row in range(rows.height):
            try:
                world.process(batch_of(rows[row : row + 1]))
            except MidstreamError as error:
                failures.append(f"{one}, {other}: {error}")
    assert [failure for failure in failures if "declared as" in failure] == []
    assert 0 < refused < len(pairs)


@pytest.mark.parametrize("operations", [200, 700, 3000])
def test_what_is_wrong_far_within_an_expression_is_refused_too(operations: int) -> None:
    def within(value: pl.Expr) -> pl.Expr:
        for _ in range(operations):
            value = value + 1
        return value

    stream = Environment().from_collection(pl.DataFrame({"s": ["a", "b"], "n": [1, 2]}))
    for wrong in (
        pl.col("s").cast(pl.Categorical).to_physical(),
        pl.col("n").map_elements(lambda n: None if n < 100 else n),
        pl.col("n").set_sorted(descending=True),
        pl.col("n").cum_sum(),
    ):
        with pytest.raises((JobError, SchemaError)):
            stream.select(r=within(wrong.cast(pl.Int64)))
    if operations > 200:
        with pytest.raises(
            SchemaError, match="has too many parts within one another to be checked; compute it in several"
        ):
            stream.select(r=within(pl.col("n")))
    else:
        assert stream.select(r=within(pl.col("n"))).columns == ["r"]


@pytest.mark.parametrize(
    "expr",
    [
        pl.when("k").then(pl.col("o")).otherwise(0.0),
        pl.when("k").then(pl.col("t")).otherwise(1.5),
        pl.when("k").then(pl.col("t").dt.truncate("1d")).when(pl.col("i") > 0).then(pl.lit(float("nan"))),
    ],
)
def test_a_time_or_else_a_number_without_a_type_is_refused(expr: pl.Expr) -> None:
    schema = frame_schema(pl.DataFrame(schema=COLUMNS))
    with pytest.raises((JobError, SchemaError), match=r"for some rows and .* for others|planned type"):
        ProjectOperator("p", [expr.alias("out")], schema, keep=False)


def test_branches_of_one_type_and_a_branch_that_raises_for_other_rows_are_accepted() -> None:
    schema = frame_schema(pl.DataFrame(schema=COLUMNS))
    day = pl.when(pl.col("s").str.contains(r"^\d{4}-\d\d-\d\d$")).then(
        pl.col("s").str.to_date("%Y-%m-%d", strict=False)
    )
    number = pl.when("k").then(pl.col("i")).otherwise(0.5)
    ProjectOperator("p", [day.alias("day"), number.alias("number")], schema, keep=False)
