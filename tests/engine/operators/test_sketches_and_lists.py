"""Sketches and lists of values against plain Python: the same for all orders of arrival, cuts and restores, within their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.windows.aggregates import First, Last
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.sketches import ApproxCountDistinct, Quantile
from midstream.engine.operators.windows.value_lists import Collect, TopN
from midstream.engine.operators.windows.window_factory import session, sliding, tumbling, window_operator

POINT = pa.struct([("x", pa.int64()), ("y", pa.large_string())])
SCHEMA = schema_of(
    [
        *(("k", pa.int64()), ("t", pa.timestamp("us")), ("i", pa.int64()), ("f", pa.float64())),
        *(("s", pa.large_string()), ("p", POINT), ("l", pa.large_list(pa.int64()))),
    ]
)
WHERE = pl.col("i") > 0
Rows = list[dict[str, Any]]

floats = st.sampled_from([None, 0.0, -0.0, math.nan, 1.5, -2.5, 1e300, math.inf, -math.inf, 7.0, 1e-300])
rows = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.integers(0, 1),
            "t": st.integers(0, 3),
            "i": st.one_of(st.none(), st.integers(-3, 3)),
            "f": floats,
            "s": st.sampled_from([None, "", "a", "b", "ä"]),
            "p": st.one_of(
                st.none(), st.fixed_dictionaries({"x": st.integers(0, 1), "y": st.sampled_from([None, "z"])})
            ),
            "l": st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=2)),
        }
    ),
    min_size=1,
    max_size=25,
)


def same(value: float) -> Any:
    return "nan" if math.isnan(value) else value + 0.0


def collected(rows: Rows, column: str) -> list[Any]:
    found = [(row["t"], row[column]) for row in rows if row[column] is not None]
    if column == "f":
        found = [(t, value + 0.0) for t, value in found]
        return [value for _, value in sorted(found, key=lambda each: (each[0], each[1] != each[1], each[1]))]
    return [value for _, value in sorted(found)]


def top(rows: Rows, count: int, descending: bool) -> list[str]:
    found = [(row["f"], row["s"]) for row in rows if None not in (row["f"], row["s"]) and row["f"] == row["f"]]
    return [s for _, s in sorted(found, key=lambda each: (-each[0] if descending else each[0], each[1]))][:count]


def nearest_rank(rows: Rows, column: str, q: float) -> float | None:
    values = sorted(row[column] for row in rows if row[column] is not None and row[column] == row[column])
    return values[max(1, math.ceil(Fraction(str(q)) * len(values))) - 1] + 0.0 if values else None


EXACT: dict[str, tuple[Any, Callable[[Rows], Any]]] = {
    "collect_i": (Collect("i"), lambda rows: collected(rows, "i")),
    "collect_f": (Collect("f", limit=3), lambda rows: list(map(same, collected(rows, "f")[:3]))),
    "collect_s": (Collect("s", limit=1), lambda rows: collected(rows, "s")[:1]),
    "collect_some": (
        Collect("s", where=WHERE),
        lambda rows: collected([row for row in rows if row["i"] and row["i"] > 0], "s"),
    ),
    "top": (TopN("s", 2, by="f"), lambda rows: top(rows, 2, True)),
    "bottom": (TopN("s", 5, by="f", descending=False), lambda rows: top(rows, 5, False)),
    "largest": (
        TopN("i", 3),
        lambda rows: sorted((row["i"] for row in rows if row["i"] is not None), reverse=True)[:3],
    ),
    "approx_i": (ApproxCountDistinct("i"), lambda rows: len({row["i"] for row in rows} - {None})),
    "approx_s": (ApproxCountDistinct("s"), lambda rows: len({row["s"] for row in rows} - {None})),
    "approx_f": (
        ApproxCountDistinct("f"),
        lambda rows: len({same(row["f"]) for row in rows if row["f"] is not None}),
    ),
    "pairs": (
        CountDistinct("i", "f", "s"),
        lambda rows: len(
            {(row["i"], same(row["f"]), row["s"]) for row in rows if None not in (row["i"], row["f"], row["s"])}
        ),
    ),
    "some_pairs": (
        CountDistinct("i", "s", where=WHERE),
        lambda rows: len({(row["i"], row["s"]) for row in rows if row["i"] and row["i"] > 0 and row["s"] is not None}),
    ),
}
QUANTILES = {"q0": 0, "q5": 0.5, "q99": 0.99, "q1": 1}


def made(aggregates: dict[str, Any], rows: Rows, cut: int, window: Any, restore_at: int, parallelism: int) -> Rows:
    def make() -> Any:
        return window_operator("w", window=window, keys=["k"], event_time="t", aggregates=aggregates, schema=SCHEMA)

    worlds = [World(make(), max_parallelism=2)]
    for number, start in enumerate(range(0, len(rows), cut)):
        if number == restore_at:
            worlds = restored(make, [world.snapshot() for world in worlds], parallelism, 2)
        batch = pa.RecordBatch.from_pylist(rows[start : start + cut], schema=SCHEMA)
        owners = owners_of(batch, len(worlds))
        for subtask, world in enumerate(worlds):
            world.process(batch.filter(pa.array(owners == subtask)))
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
    return sorted((row for world in worlds for row in world.out.rows()), key=lambda row: (row["window_end"], row["k"]))


def owners_of(batch: pa.RecordBatch, parallelism: int) -> np.ndarray[Any, Any]:
    return subtask_of(key_groups(batch, ("k",), 2), parallelism, 2)


windows = st.sampled_from([tumbling("1 s"), sliding("4 s", "1 s"), session("5 s")])


@settings(max_examples=examples(40))
@given(rows, st.randoms(use_true_random=False), st.integers(1, 25), windows, st.integers(0, 4), st.integers(1, 2))
def test_results_are_those_of_plain_python_and_the_same_for_all_arrivals_cuts_and_restores(
    rows: Rows, random: Any, cut: int, window: Any, restore_at: int, parallelism: int
) -> None:
    aggregates = {name: aggregate for name, (aggregate, _) in EXACT.items()}
    aggregates |= {name: Quantile("f", q) for name, q in QUANTILES.items()}
    found = made(aggregates, rows, len(rows), window, 9, 1)
    shuffled = random.sample(rows, len(rows))
    assert str(made(aggregates, shuffled, cut, window, restore_at, parallelism)) == str(found)
    for result in found:
        own = [row for row in rows if row["k"] == result["k"]]
        for name, (_, expected) in EXACT.items():
            value = result[name]
            assert (list(map(same, value)) if name == "collect_f" else value) == expected(own), name
        for name, q in QUANTILES.items():
            exact = nearest_rank(own, "f", q)
            assert (result[name] is None) == (exact is None)
            if exact is not None:
                assert result[name] == exact or abs(result[name] - exact) <= 0.01000001 * abs(exact)


@settings(max_examples=examples(40))
@given(rows, st.integers(1, 25), windows, st.integers(0, 4))
def test_values_that_are_lists_and_structs_are_collected_in_the_order_of_arrival(
    rows: Rows, cut: int, window: Any, restore_at: int
) -> None:
    aggregates = {
        **{f"{name}{limit}": Collect(name, limit=limit) for name in ("p", "l") for limit in (None, 2)},
        "first": First("p", order="arrival"),
        "last": Last("s", order="arrival"),
        "some": First("s", order="arrival", where=WHERE),
    }
    for result in made(aggregates, rows, cut, window, restore_at, 1):
        own = [row for row in rows if row["k"] == result["k"]]
        for name in ("p", "l"):
            expected = [row[name] for row in sorted(own, key=lambda row: row["t"]) if row[name] is not None]
            assert result[f"{name}None"] == expected
            assert result[f"{name}2"] == expected[:2]
        assert (result["first"], result["last"]) == (own[0]["p"], own[-1]["s"])
        assert result["some"] == next((row["s"] for row in own if row["i"] and row["i"] > 0), None)


@pytest.mark.parametrize("error", [0.5, 0.05, 0.01, 0.001])
def test_quantiles_are_within_their_bound_over_all_magnitudes(error: float) -> None:
    drawn = np.random.default_rng(int(error * 1000))
    values = np.concatenate([10 ** drawn.uniform(-290, 300, 3000) * drawn.choice([-1, 1], 3000), [0.0] * 50])
    for q in (0, 0.001, 0.25, 0.5, 0.507, 0.9, 0.999, 1):
        sketch = Quantile("f", q, relative_error=error)
        parts = [sketch._add(pl.Series(part)) for part in np.array_split(values, 7)]
        whole = sketch._add(pl.Series(values))
        assert sketch._union(parts) == sketch._union([sketch._union(parts[:3]), *parts[3:]]) == whole
        exact = np.sort(values)[max(1, math.ceil(Fraction(str(q)) * len(values))) - 1]
        assert abs(sketch._result(whole) - exact) <= error * abs(exact) * (1 + 1e-9)


def test_a_quantile_near_the_largest_float_is_within_its_bound() -> None:
    sketch = Quantile("f", 0.5)
    for values in ([9e307, 1e308, 1.7e308], [-1.7e308, -1e308, -9e307], [1.5e308, 1.6e308, 1.7976931348623157e308]):
        found = sketch._result(sketch._add(pl.Series(values)))
        assert abs(found - values[1]) <= 0.01 * abs(values[1]) * (1 + 1e-9)


@pytest.mark.parametrize("precision", [5, 8, 12])
def test_approximate_counts_are_within_their_bound_and_the_same_however_parts_are_merged(precision: int) -> None:
    sketch = ApproxCountDistinct("i", precision=precision)
    drawn, errors = np.random.default_rng(precision), list[float]()

    def merged(parts: list[bytes]) -> bytes:
        return sketch._merged([pl.Series(parts)])

    for count in (1, 2**precision, 2**precision + 1, 1000, 10_000, 60_000):
        values = drawn.integers(0, 2**62, count)
        exact = len(set(values.tolist()))
        parts = [sketch._add(pl.Series(part)) for part in np.array_split(drawn.permutation(np.tile(values, 2)), 5)]
        found = {
            float(sketch._results(pl.Series([each]))[0])
            for each in (merged(parts), merged([merged(parts[3:]), *parts[:3]]), sketch._add(pl.Series(values)))
        }
        assert len(found) == 1
        if exact <= 2**precision:
            assert found == {exact}
        errors.append(abs(found.pop() - exact) / exact)
    assert max(errors) <= 4 / math.sqrt(2**precision - 1)
    assert max(errors) > 0


def test_types_have_the_values_that_they_hold() -> None:
    kinds: dict[pa.DataType, list[Any]] = {
        pa.uint64(): [2**64 - 1, 2**63, 0, 2**64 - 1],
        pa.int64(): [-(2**63), 2**63 - 1, -1],
        pa.large_binary(): [b"", b"\0", b"a\0b", b"a"],
        pa.large_string(): ["", "\0", "a\0b", "a"],
        pa.decimal128(38, 2): [10**35, 10**35 + 1, 10**35],
        pa.bool_(): [True, False, True],
        pa.duration("ns"): [1, 2, 1],
        pa.float32(): [0.0, -0.0, math.nan, -math.nan],
    }
    for kind, values in kinds.items():
        column = pa.array(values, kind)
        sketch = ApproxCountDistinct("x").bind(pa.schema([("x", kind)]))
        assert isinstance(sketch, ApproxCountDistinct)
        frame = pl.DataFrame({"x": pl.from_arrow(column)})
        part = sketch._add(frame.select(sketch._values()).to_series())
        exact = {same(value) if kind == pa.float32() else value for value in values}
        assert sketch._results(pl.Series([part]))[0] == len(exact), kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantile("x", 1.5), "Quantile: q 1.5 is not a number from 0 to 1"),
        (lambda: Quantile("x", math.nan), "q nan"),
        (lambda: Quantile("x", True), "q True"),
        (lambda: Quantile("x", 0.5, relative_error=0), "relative_error 0"),
        (lambda: ApproxCountDistinct("x", precision=21), "precision 21 is not a whole number from 5 to 20"),
        (lambda: Collect("x", limit=0), "Collect: limit 0"),
        (lambda: TopN("x", 1.0), "TopN: count 1.0"),  # type: ignore[arg-type]
        (CountDistinct, "CountDistinct: name the column"),
        (lambda: First("x", order="time of day"), "First: order='time of day' is none of 'time', 'arrival'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "made", [Quantile("s", 0.5), ApproxCountDistinct("l"), TopN("s", 1, by="p"), CountDistinct("i", "l")]
)
def test_columns_that_do_not_fit_are_refused(made: Any) -> None:
    with pytest.raises(SchemaError, match=r"operator 'w': aggregate 'x': .* which is"):
        window_operator("w", window=tumbling("1 s"), keys=["k"], event_time="t", aggregates={"x": made}, schema=SCHEMA)
