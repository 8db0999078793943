"""Which expressions compute each row on its own: every function of polars, and what hides in an expression."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from expression_calls import COLUMNS, columns_of, expression_of, functions, read_table, reason_to_refuse
from operator_world import World

from midstream import Environment
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import JobError
from midstream.engine.operators.elementwise import check_row_by_row, faults_of
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, Evaluation
from midstream.engine.operators.probe_values import ROWS, probe
from midstream.engine.operators.row_differences import are_same
from midstream.engine.operators.stateless import FilterOperator, ProjectOperator
from midstream.engine.operators.windows.aggregates import Aggregate, Columns
from midstream.engine.operators.windows.window_factory import tumbling, window_operator

TABLE = read_table()
ACCEPTED = [call for calls in TABLE.values() for call in calls.get("accepted", ())]


def test_the_table_has_every_function_of_polars() -> None:
    assert functions() == TABLE.keys(), "run python tests/engine/operators/expression_calls.py"


def test_every_function_has_a_call_or_cannot_compute_rows() -> None:
    without = {name for name, calls in TABLE.items() if not any(calls.values())}
    assert without == {
        *("cs.categorical", "cs.digit", "cs.enum", "cs.map"),  # no column of theirs can be in a stream, or is here
        "cs.is_selector",  # returns no expression
        "ext.to",  # needs an extension type that the job registers
        *("pl.date_range", "pl.datetime_range"),  # need scalars
        "pl.self_dtype",  # is part of no expression
    }


def test_each_call_is_accepted_or_refused_as_in_the_table() -> None:
    for name, calls in TABLE.items():
        for verdict, listed in calls.items():
            for call in listed:
                reason = reason_to_refuse(call)
                assert ("refused" if reason else "accepted") == verdict, (name, call, reason)


# ---- what is accepted computes each row on its own ----


def random_frame(random: Random, rows: int) -> pl.DataFrame:
    def value(kind: Any) -> Any:
        if random.random() < 0.15:
            return None
        match kind:
            case pl.List():
                return [value(kind.inner) for _ in range(random.randrange(4))]
            case pl.Array():
                return [value(kind.inner) for _ in range(kind.size)]
            case pl.Struct():
                return {field.name: value(field.dtype) for field in kind.fields}
            case pl.Datetime(time_zone=str()):
                return datetime(2024, 10, random.randrange(26, 29), random.randrange(24), 30, tzinfo=UTC)
            case pl.Datetime():
                return datetime(2024, random.choice((3, 10)), random.randrange(26, 32), random.randrange(5), 30)
        return random.choice(values[type(kind)])

    texts = ["", "a", "ab", "b", "A,b", "2024-02-29", "2023-02-29", "12:00:00", "7", "-1.5", "é", "null", '{"a":1}']
    values: dict[type[pl.DataType], list[Any]] = {
        pl.Int64: [-2, -1, 0, 1, 1, 2, 3, 30],
        pl.UInt32: [0, 1, 1, 4],
        pl.Float64: [float("nan"), float("inf"), -0.0, 0.0, 0.25, 1.0, 1.0, -3.5],
        pl.String: [*texts, "2024-02-29 12:00:00", "ff", "$.a", "1h"],
        pl.Binary: [text.encode() for text in [*texts, "abcdefgh"]],
        pl.Boolean: [True, False],
        pl.Date: [date(2024, 2, 28), date(2024, 2, 29), date(2024, 3, 2), date(1969, 12, 31)],
        pl.Duration: [timedelta(0), timedelta(hours=-1), timedelta(days=2)],
        pl.Time: [time(0), time(12), time(23, 59, 59)],
        pl.Decimal: [Decimal("0.25"), Decimal("-1.00"), Decimal("1.00")],
    }
    columns = {name: [value(kind) for _ in range(rows)] for name, kind in COLUMNS.items()}
    return pl.DataFrame(columns, schema=COLUMNS, strict=False)


def outcome(rows: pl.DataFrame, expr: pl.Expr) -> pl.DataFrame | BaseException:
    try:
        return Evaluation([expr]).of(rows, lambda each: each.with_columns(expr))
    except EXPRESSION_ERRORS as error:
        return error


@pytest.mark.parametrize("seed", range(2))
def test_what_is_accepted_computes_random_rows_as_each_alone(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    random = Random(seed)
    wrong: list[tuple[object, ...]] = []
    for call in ACCEPTED:
        frame = random_frame(random, random.randrange(8, 14))
        rows, expr = frame.select(*columns_of(call)), expression_of(call)
        alone = [outcome(rows.slice(row, 1), expr) for row in range(rows.height)]
        computed = [row for row, made in enumerate(alone) if isinstance(made, pl.DataFrame)]
        for _ in range(3):
            chosen = [random.choice(computed) for _ in range(random.randrange(1, 15))] if computed else []
            if not chosen:
                continue
            together = outcome(rows[chosen], expr)
            expected = pl.concat(
                [made for row in chosen if isinstance(made := alone[row], pl.DataFrame)], how="vertical_relaxed"
            )
            if not isinstance(together, pl.DataFrame):
                wrong.append((call, str(together).splitlines()[:1]))
            elif not are_same(together.cast(expected.schema), expected):
                wrong.append((call, rows[chosen], expected, together))
    assert not wrong, wrong[:5]


DEPENDS_ON_PROCESS = "c.to_physical()"


def texts_of_results(first: list[str]) -> dict[str, str]:
    """Return what each accepted call computes in this process, whose categories begin with `first`."""
    categories = pl.Series(first, dtype=pl.Categorical)
    frame = random_frame(Random(5), 12)
    made = {}
    with pl.Config(tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=1000, fmt_table_cell_list_len=-1, tbl_width_chars=10_000):
        for call in [*ACCEPTED, DEPENDS_ON_PROCESS]:
            rows, expr = frame.select(*columns_of(call)), expression_of(call)
            results = [outcome(rows.slice(row, 1), expr) for row in range(rows.height)]
            made[call] = "".join(str(each) for each in results if isinstance(each, pl.DataFrame))
    assert categories.to_list() == first
    return made


def test_what_is_accepted_computes_the_same_in_every_process() -> None:
    script = (
        "import json; from test_row_by_row import *; print(json.dumps(texts_of_results(['7', 'ab', 'a', '', 'b'])))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    there, here = json.loads(done.stdout.splitlines()[-1]), texts_of_results(["null", "b", "é"])
    assert there.keys() == here.keys()
    assert here[DEPENDS_ON_PROCESS] != there[DEPENDS_ON_PROCESS]
    different = [(call, here[call], there[call]) for call in ACCEPTED if here[call] != there[call]]
    assert not different, different[:5]
    assert sum(map(bool, here.values())) > 0.95 * len(ACCEPTED), "most calls have results"


# ---- what an expression hides ----

SCHEMA = schema_of(
    [("a", pa.int64()), ("b", pa.int64()), ("s", pa.large_string()), ("tags", pa.large_list(pa.large_string()))]
)
ANY = pl.col("a")


def functions_that_cannot_be_pickled() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    lock = Lock()

    def same(value: Any) -> Any:
        with lock:
            return value

    def in_order(column: Any) -> Any:
        with lock:
            return column.sort()

    return same, in_order


locked, locked_sort = functions_that_cannot_be_pickled()


@pytest.mark.parametrize(
    "hidden",
    [
        pl.when(ANY == 123_456).then(ANY.sum()).otherwise(0),
        pl.when(pl.col("s") == "never").then(pl.col("s").str.split("|").explode()).otherwise(pl.lit("")),
        pl.when(ANY == 123_456).then(ANY.replace(pl.col("b"), ANY)).otherwise(ANY),
        pl.struct("a", "b").struct.with_fields(pl.when(pl.field("a") == 123_456).then(pl.field("b").cum_sum())),
        pl.struct("a", "b").struct.with_fields(pl.field("a").rank()),
        pl.col("s").cast(pl.Categorical).cast(pl.String).cast(pl.Categorical).to_physical(),
        pl.struct(pl.col("s").cast(pl.Categorical)).struct.field("s").to_physical(),
        pl.col("tags").cast(pl.List(pl.Categorical)).list.first().to_physical(),
        pl.col("tags").cast(pl.List(pl.Categorical)).cast(pl.List(pl.UInt32)),
        pl.col("tags").list.eval(pl.element().cast(pl.Categorical).to_physical()),
        pl.coalesce(pl.col("a"), pl.col("b").max()),
        pl.col("a").fill_null(pl.col("b").first()),
        pl.concat_list(pl.col("tags"), pl.col("tags").explode()),
        pl.when(never := ANY == 123_456).then(pl.col("tags").explode()).otherwise(ANY.map_elements(locked, pl.String)),
        pl.when(never).then(ANY.pipe_with_dtype(lambda expr, _: expr.sum())),
        pl.when(never).then(pl.col("tags").list.eval(pl.element().str.to_date(strict=False)).list.first()),
        ANY.is_in(pl.col("b").implode()),
        pl.len() > 100_000,
        pl.lit(pl.Series([1, 2, 3])),
        pl.lit(1).sample(1),
        pl.lit(0) + pl.len(),
        ANY + pl.lit(pl.Series(range(12))),
        pl.sql_expr("sum(a) + b"),
        ANY.filter(pl.col("b") == pl.col("b")).alias("x").name.suffix("y"),
        (cs.integer() - cs.integer().mean()).name.suffix("_centred"),
        pl.all().is_duplicated(),
        ANY.map_elements(locked, return_dtype=pl.Int64).sum(),
        ANY.map_batches(locked_sort, return_dtype=pl.Int64),
        (ANY.set_sorted() > 3) & (ANY < 10),
        pl.col("s").str.json_decode(pl.Int64) + 1,
    ],
    ids=str,
)
def test_what_depends_on_other_rows_or_at_the_process_is_found_wherever_it_is(hidden: pl.Expr) -> None:
    with pytest.raises(JobError, match="does not compute each row on its own"):
        check_row_by_row([pl.lit(1).alias("one"), hidden], SCHEMA, "here")


@pytest.mark.parametrize(
    "expr",
    [
        pl.col("s").str.split("|").list.get(0, null_on_oob=True),
        pl.col("tags").list.eval(pl.element().str.split("|").explode()),
        pl.col("tags").list.eval(pl.element().rank()),
        pl.lit(pl.Series([1, 2, 3])).mean() < ANY,
        ANY.is_in(pl.Series([1, 2, 3])),
        ANY.fill_null(0) / float("inf"),
        pl.col("s").cast(pl.Categorical) == pl.lit("a", dtype=pl.Categorical),
        pl.col("s").cast(pl.Enum(["a", "b"]), strict=False).to_physical(),
        pl.struct(pl.all()).struct.field("b"),
        pl.struct(pl.all()).struct.json_encode(),
        ANY.name.map({"a": "other"}.__getitem__),
        ANY.map_elements({1: 2}.__getitem__, return_dtype=pl.Int64),  # fails for every probe
        ANY.map_elements(locked, return_dtype=pl.Int64) + 1,
        pl.col("tags").list.eval(pl.element().map_elements(locked, return_dtype=pl.String).rank()),
        (cs.integer() + 1).name.suffix("_next"),
        cs.string().str.len_chars() + cs.by_name("a"),
        pl.max_horizontal(pl.all().exclude("s", "tags"), 3),
        pl.sql_expr("case when a > b then s else 'none' end"),
        pl.col("no such column") + 1,  # has another error
        ANY.str.len_chars(),  # as does this
        pl.concat_list("a", "b").list.diff(),
    ],
    ids=str,
)
def test_what_depends_on_its_row_alone_is_accepted(expr: pl.Expr) -> None:
    check_row_by_row([expr], SCHEMA, "here")


@pytest.mark.parametrize("name", ["number of the probe row", "midstream literal 0", "row", "operand 0", "result"])
def test_a_column_may_have_any_name(name: str) -> None:
    schema, column = {name: pl.Int64(), "b": pl.Int64()}, pl.col(name)
    for expr in (column + 1, column.is_in(pl.Series([1, 2])), pl.struct(name, z=pl.col("b") + 1), cs.integer() * 2):
        assert not faults_of([expr], schema)
    [(_, fault)] = faults_of([column - column.sum() + pl.col("b")], schema)
    assert "among others" in fault.reason


@pytest.mark.parametrize("name", ["*", "^.*$", "^b$"])
def test_a_name_that_polars_reads_as_a_pattern_hides_no_fault(name: str) -> None:
    """Columns of files may have such names."""
    schema = {name: pl.Float64(), "b": pl.Float64()}
    for expr in (cs.float() * 2, pl.col("b").alias(name), pl.col("b") + 1, pl.all()):
        assert not faults_of([expr], schema)
    for expr in (cs.float() - cs.float().sum(), pl.col("b").sum().alias(name)):
        [(_, fault)] = faults_of([expr], schema)
        assert "among others" in fault.reason


def test_nulls_of_no_type_become_nulls_of_the_declared_type() -> None:
    schema = schema_of([("n", pa.large_list(pa.int64()))])
    world = World(ProjectOperator("p", [pl.col("n").list.diff().alias("d")], schema, keep=False))
    for numbers in (None, [1, 3]):
        world.process(pa.RecordBatch.from_pylist([{"n": numbers}], schema=schema))
    assert world.out.rows() == [{"d": None}, {"d": [None, 2]}]


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (pl.col("tags").explode(), r"it returned 2 rows for 1; use flat_map\(\) to make any number of rows from one"),
        (ANY.replace(pl.col("b"), ANY), r"it fails for rows together, each of which has a result alone: "),
        (ANY.sum() + 1, r'col\("a"\)\.sum\(\) returned 2 for a row of 2 alone, and 57 among others; use a window'),
        (pl.col("s").str.to_date(), r"it infers the format of texts from those in a batch; state the format"),
        (ANY.shuffle(), "it is random; use a function of the row's own columns"),
        (ANY.set_sorted(), "it declares that the rows are sorted; leave it out"),
        (pl.col("s").cast(pl.Categorical).to_physical(), "numbers of categories, .*cast to pl.Enum"),
        (pl.col("s").str.json_decode(pl.Int64), "as one document.*json.loads"),
    ],
)
def test_a_refusal_names_the_expression_the_reason_and_the_way_out(expr: pl.Expr, message: str) -> None:
    with pytest.raises(JobError, match=f"operator 'p': .* does not compute each row on its own: .*{message}"):
        ProjectOperator("p", [expr], SCHEMA, keep=True)


def test_a_filter_cannot_have_another_number_of_rows() -> None:
    with pytest.raises(JobError, match=r'"tags"\)\.explode\(.*returned 2 rows for 1; use flat_map'):
        FilterOperator("f", pl.col("tags").explode() != "a", SCHEMA)


FLOATS = {
    "l": pl.List(pl.Float64()),
    "n": pl.List(pl.List(pl.Float32())),
    "p": pl.Array(pl.Float64(), 2),
    "e": pl.Array(pl.Float32(), 384),
    **dict.fromkeys("ij", pl.Float64()),
}


@pytest.mark.parametrize(
    "expr",
    [
        pl.col("l").list.sum(),
        pl.col("l").list.mean(),
        pl.col("n").list.eval(pl.element().list.sum()),
        pl.col("p").arr.sum(),
        pl.col("e").arr.sum(),
        pl.concat_list("i", "j").list.mean(),
        1 / pl.col("l").list.sum() > 0,
    ],
    ids=str,
)
def test_a_sum_of_floats_whose_order_or_zero_depends_on_nulls_of_other_rows_is_refused(expr: pl.Expr) -> None:
    schema = {name: FLOATS[name] for name in expr.meta.root_names()}
    [(_, fault)] = faults_of([expr], schema)
    assert "among others" in fault.reason
    assert ".list.agg(pl.element().sum())" in fault.remedy


@pytest.mark.parametrize(
    "expr",
    [
        pl.col("l").list.agg(pl.element().sum()),
        pl.col("l").list.agg(pl.element().mean()),
        pl.col("n").list.eval(pl.element().list.agg(pl.element().sum())),
        pl.col("e").arr.agg(pl.element().sum()),
        pl.sum_horizontal("i", "j"),
    ],
    ids=str,
)
def test_the_way_out_computes_the_same_among_nulls(expr: pl.Expr) -> None:
    schema = {name: FLOATS[name] for name in expr.meta.root_names()}
    assert not faults_of([expr], schema)
    random = Random(3)

    def value(kind: Any) -> Any:
        if isinstance(kind, (pl.List, pl.Array)):
            return [value(kind.inner) for _ in range(getattr(kind, "size", random.choice([0, 1, 300])))]
        return random.choice([-0.0, random.uniform(-1, 1) * 10.0 ** random.randrange(-8, 9)])

    values = [{name: value(kind) for name, kind in schema.items()} for _ in range(6)]
    rows = pl.DataFrame([*values, dict.fromkeys(schema), *values], schema=schema)
    nulls = {name: [[None] * getattr(kind, "size", 1) if kind.is_nested() else None] for name, kind in schema.items()}
    among = pl.concat([pl.DataFrame(nulls, schema=schema, strict=False), rows])
    alone = [repr(rows[row].select(expr).rows()) for row in range(rows.height)]
    together = among.select(expr)[1:]
    assert [repr(together[row].rows()) for row in range(rows.height)] == alone


def test_zeros_of_several_signs_are_different_results() -> None:
    zero = pl.cum_fold(pl.lit(0.0), lambda one, other: one + other, [pl.col("i"), pl.col("j")])
    for expr in (zero, pl.cum_sum_horizontal("i", "j")):
        [(_, fault)] = faults_of([expr], {"i": pl.Float64(), "j": pl.Float64()})
        assert "-0.0" in fault.reason


def test_one_malformed_text_can_shift_what_polars_decodes() -> None:
    """The reason why str.json_decode is refused."""
    texts = ['{"a":1},{"a":2}', '{"a":7}', '{"a":7', '"b":2}']
    made = pl.DataFrame({"s": texts}).with_columns(pl.col("s").str.json_decode(pl.Struct({"a": pl.Int64})))
    assert made.get_column("s").struct.field("a").to_list() == [1, 2, 7, 7]


def test_a_call_costs_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with_columns = pl.DataFrame.with_columns
    monkeypatch.setattr(pl.DataFrame, "with_columns", lambda *args, **named: [calls.append(0), with_columns(*args)][1])
    wide = [
        ((pl.col(name) + number) * 2).alias(f"{name}{number}") for name in "ab" for number in range(100_000, 100_050)
    ]
    check_row_by_row(wide[:1], SCHEMA, "here")
    assert 0 < len(calls) < 75, "two parts and the whole, each some 20 times"
    calls.clear()
    check_row_by_row([expr.alias("same") for expr in wide[:1]], SCHEMA, "here")
    assert 0 < len(calls) < 25, "parts are remembered"
    calls.clear()
    check_row_by_row([pl.col("s").is_in([str(number) for number in range(10_000)])], SCHEMA, "here")
    assert 0 < len(calls) < 25, "a part that is the whole is evaluated once, since it may have a large literal"
    calls.clear()
    check_row_by_row(wide, SCHEMA, "here")
    assert 0 < len(calls) < 25 * 50, (
        "a part is evaluated once for all columns of a type, the whole once for all columns"
    )


def test_what_a_check_costs_grows_with_the_columns_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame makes its schema, of all columns, for each call that asks for it."""
    calls: list[int] = []
    schema_property: Any = vars(pl.DataFrame)["schema"]

    def counted(frame: pl.DataFrame) -> object:
        calls.append(0)
        return schema_property.fget(frame)

    monkeypatch.setattr(pl.DataFrame, "schema", property(counted))

    def schemas_made(columns: int) -> int:
        schema = schema_of([(f"c{number}", pa.int64()) for number in range(columns)])
        calls.clear()
        check_row_by_row([pl.all() % 1_000_003], schema, "here")
        return len(calls)

    schemas_made(1)  # parts are remembered
    assert 0 < schemas_made(2) == schemas_made(70)


@pytest.mark.parametrize(
    "kind",
    [
        *(pl.Int8(), pl.UInt64(), pl.Int128(), pl.Float32(), pl.Decimal(38, 4), pl.Boolean(), pl.String(), pl.Binary()),
        *(pl.Date(), pl.Time(), pl.Datetime("ns"), pl.Datetime("ms", "Asia/Tokyo"), pl.Duration("us")),
        *(pl.Categorical(), pl.Enum(["x", "y", "z"])),
        *(pl.List(pl.String()), pl.List(pl.List(pl.Date())), pl.Array(pl.Int64(), 3), pl.Array(pl.Time(), (2, 3))),
        *(pl.Struct({"a": pl.List(pl.Int8()), "b": pl.String()}), pl.List(pl.Struct({"a": pl.Array(pl.Binary(), 1)}))),
        *(pl.Map(pl.String(), pl.Int64()), pl.List(pl.Categorical())),
    ],
    ids=str,
)
def test_probes_of_each_type_have_nulls_ties_and_several_values(kind: pl.DataType) -> None:
    for close_together in (False, True):
        made = probe(kind, close_together=close_together)
        assert (made.dtype, len(made)) == (kind, ROWS)
        values = made.cast(pl.Int64) if isinstance(kind, pl.Time) else made  # Python has no nanoseconds
        texts = [repr(value.to_list() if isinstance(value, pl.Series) else value) for value in values]
        assert "None" in texts
        assert 3 <= len(set(texts)) < ROWS
        if isinstance(kind, pl.List):
            assert {*made.list.len()} >= {None, 0, 1, 2, 3}


def test_an_expression_may_be_hundreds_of_parts_deep() -> None:
    for depth in (30, 300):
        chain: Any = pl.when(pl.col("b") == 123_456).then(pl.col("tags").explode().str.len_chars())
        for number in range(depth):
            chain = chain.when(ANY.eq(number)).then(number)
        [(_, fault)] = faults_of([chain.otherwise(0)], {"a": pl.Int64(), "b": pl.Int64(), "tags": pl.List(pl.String())})
        assert "returned 2 rows for 1" in fault.reason
        assert not faults_of([sum([ANY] * depth, start=ANY)], {"a": pl.Int64()})


def test_values_that_python_cannot_represent_do_not_end_the_check() -> None:
    schema = {"d": pl.Date()}
    far = pl.col("d").cast(pl.Int32) + 10_000_000
    [(_, fault)] = faults_of([far.cast(pl.Date).shift()], schema)
    assert "col" not in fault.reason


# ---- where expressions are accepted ----


def test_each_method_with_expressions_refuses_at_its_call() -> None:
    env = Environment("refused")
    rows = env.from_collection([{"a": 1, "b": 2, "tags": ["x", "y"]}], splits=1)
    exploded, mapped = pl.col("tags").explode(), pl.col("a").replace(pl.col("b"), pl.col("a"))
    for call in (
        lambda: rows.with_columns(tag=exploded),
        lambda: rows.select(tag=exploded),
        lambda: rows.filter(exploded != "a"),
        lambda: rows.select(z=mapped),
        lambda: rows.select(code=pl.col("tags").list.first().cast(pl.Categorical).to_physical()),
    ):
        with pytest.raises(
            JobError, match=r"^test_row_by_row\.py:\d+: operator '\w+': .* does not compute each row on its own"
        ):
            call()


class Odd(Aggregate):
    columns = ("a",)

    def __init__(self, **odd: pl.Expr) -> None:
        self.odd = odd

    def partial(self, event_time: pl.Expr) -> dict[str, pl.Expr]:
        return {"sum": self.odd.get("partial", pl.col("a").sum())}

    def merge(self, part: Columns) -> dict[str, pl.Expr]:
        return {"sum": self.odd.get("merge", part("sum").sum())}

    def finish(self, part: Columns) -> pl.Expr:
        return self.odd.get("finish", part("sum"))

    def overflow(self, part: Columns) -> pl.Expr | None:
        return self.odd.get("overflow")


CODE = pl.col("a").cast(pl.String).cast(pl.Categorical).to_physical().cast(pl.Int64)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"finish": pl.col("odd:sum") / pl.col("odd:sum").sum()}, "finish: .* does not compute each row on its own"),
        ({"finish": pl.col("odd:sum").rank()}, "finish: .* does not compute each row on its own"),
        ({"overflow": pl.col("odd:sum") > pl.col("odd:sum").mean()}, "finish: .* does not compute each row on its own"),
        ({"partial": CODE.max()}, "partial: .* depends on more than its rows: .*numbers of categories"),
        ({"partial": pl.col("a").sample(1).sum()}, "partial: .* depends on more than its rows: it is random"),
        ({"merge": pl.col("odd:sum").shuffle().first()}, "merge: .* depends on more than its rows: it is random"),
        ({"partial": 1}, "partial returns a dict of names with expressions, .* this one has 1"),
        ({"merge": "sum"}, "merge returns a dict of names with expressions, .* this one has 'sum'"),
        ({"finish": 1}, "finish returns an expression, .* this one has 1"),
    ],
)
def test_an_aggregate_is_refused_whose_result_depends_on_more_than_its_rows(odd: dict[str, Any], message: str) -> None:
    def make(aggregate: Aggregate) -> None:
        timed = SCHEMA.append(pa.field("at", pa.timestamp("us")))
        aggregates = {"odd": aggregate}
        window_operator("w", window=tumbling("1 s"), keys=["b"], event_time="at", aggregates=aggregates, schema=timed)

    make(Odd())
    with pytest.raises(JobError, match=f"operator 'w': aggregate 'odd': {message}"):
        make(Odd(**odd))
