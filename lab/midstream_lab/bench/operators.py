"""Measures the everyday operators over much state: running aggregates, duplicates, and joins by event time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream_lab.bench.events import VALUES, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM, WARM_UP_PER_SUBTASK

EVENTS: Final = 10_000_000
WITHIN_MS: Final = 10_000
REPEATED_AFTER: Final = 40_000
"""A repeated event is at most this many events of its lane after the one that it repeats, which is less than a second."""

Int64s: TypeAlias = npt.NDArray[np.int64]


class OperatorEvents(Events):
    """The events of a case: `ts` as in `Events`; `key`, `value` and `side` (0: left, 1: right) depend on the case.

    The times of rows of equal keys and sides may be equal, but then so are the values, or their order makes no
    difference to the sums.
    """

    def __init__(self, count: int, *, lanes: int, case: str) -> None:
        super().__init__(count, lanes=lanes, keys=CASES[case].keys)
        self._case = case
        self.schema = schema_of(
            [("ts", pa.timestamp("ms")), ("key", pa.int64()), ("value", pa.float64()), ("side", pa.int8())]
        )

    def __call__(self, i: Int64s) -> pa.RecordBatch:
        ms, key, value, side = self.columns(i)
        arrays = [pa.array(ms.view("M8[ms]")), pa.array(key), pa.array(value), pa.array(side.astype(np.int8))]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def columns(self, i: Int64s) -> tuple[Int64s, Int64s, npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        case = CASES[self._case]
        ms, key = self.ms(i), case.key(self, i)
        side = np.zeros(len(i), np.bool_)
        if case.right_every:
            side[:] = i % case.right_every == 0
        return ms, key, (case.number(i, ms, key) % VALUES).astype(np.float64) / 2, side


@dataclass(frozen=True)
class Case:
    """`number`: from indices, times and keys to what the values are multiples of. `right_every`: one event of so many
    belongs to the right stream. `checked`: the sums of columns of the result that `expected` returns, after the number
    of rows.
    """

    build: Callable[[DataStream], DataStream]
    checked: tuple[str, ...]
    expected: Callable[[OperatorEvents], list[float]]
    keys: int = 1_000_000
    key: Callable[[OperatorEvents, Int64s], Int64s] = Events.key
    number: Callable[[Int64s, Int64s, Int64s], Int64s] = lambda i, ms, key: i
    right_every: int = 0


def _repeated_keys(events: Events, i: Int64s) -> Int64s:
    """Return each event's own number; for one in four, that of an event of its lane that came before it."""
    lane_start = i - i % (events.count // events.lanes)
    earlier = i - 1 - ((i * 2654435761) & 0xFFFFFFFF) % REPEATED_AFTER
    return np.where((i % 4 == 3) & (earlier >= lane_start), earlier, i)


def running_aggregate(events: DataStream) -> DataStream:
    return events.key_by("key").aggregate(n=Count(), total=Sum("value"))


def drop_duplicates(events: DataStream) -> DataStream:
    return events.drop_duplicates("key", within=f"{WITHIN_MS} ms")


def interval_join(events: DataStream) -> DataStream:
    left, right = _sides(events)
    return left.join(right, on="key", within=(0, f"{WITHIN_MS} ms"))


def asof_join(events: DataStream) -> DataStream:
    left, right = _sides(events)
    return left.join_asof(right, on="key")


def _sides(events: DataStream) -> tuple[DataStream, DataStream]:
    left = events.filter(pl.col("side") == 0).select("ts", "key", "value")
    right = events.filter(pl.col("side") == 1).select("ts", "key", other="value")
    return left, right


# ---- the expected results, computed with numpy over all events together ----


def _running_totals(events: OperatorEvents) -> list[float]:
    """After the k-th row of a key, its aggregates are those of k rows, all with the same value."""
    _, key, value, _ = events.columns(np.arange(events.count))
    rows = np.bincount(key, minlength=events.keys)
    updates = rows * (rows + 1) // 2
    of_key = np.zeros(events.keys)
    of_key[key] = value
    return [float(events.count), float(updates.sum()), float((updates * of_key).sum())]


def _distinct_keys(events: OperatorEvents) -> list[float]:
    """All rows of a key are within a second."""
    keys = np.unique(events.columns(np.arange(events.count))[1])
    return [float(len(keys)), float(keys.sum())]


def _by_key_and_time(events: OperatorEvents) -> tuple[tuple[Int64s, ...], ...]:
    """Return codes that sort by key and time, and the doubled values, of the left events and of the right ones."""
    ms, key, value, side = events.columns(np.arange(events.count))
    code, doubled = key << 32 | ms, (value * 2).astype(np.int64)
    order = np.argsort(code[side])
    return (key[~side], code[~side], doubled[~side]), (key[side][order], code[side][order], doubled[side][order])


def _pairs(events: OperatorEvents) -> list[float]:
    (key, code, value), (_, codes, others) = _by_key_and_time(events)
    begin, end = codes.searchsorted(code, "left"), codes.searchsorted(code + WITHIN_MS, "right")
    until = np.concatenate([[0], others.cumsum()])
    pairs = end - begin
    return [
        float(pairs.sum()),
        float((pairs * key).sum()),
        float((pairs * value).sum()) / 2,
        float((until[end] - until[begin]).sum()) / 2,
    ]


def _with_newest(events: OperatorEvents) -> list[float]:
    (key, code, value), (keys, codes, others) = _by_key_and_time(events)
    at = codes.searchsorted(code, "right") - 1
    has_one = (at >= 0) & (keys[at] == key)
    return [float(len(key)), float(value.sum()) / 2, float(others[at[has_one]].sum()) / 2]


CASES: Final[Mapping[str, Case]] = {
    "running_aggregate": Case(running_aggregate, ("n", "total"), _running_totals, number=lambda i, ms, key: key),
    "drop_duplicates": Case(drop_duplicates, ("key",), _distinct_keys, key=_repeated_keys),
    "interval_join": Case(interval_join, ("key", "value", "other"), _pairs, right_every=3),
    "asof_join": Case(
        asof_join,
        ("value", "other"),
        _with_newest,
        keys=10_000,
        number=lambda i, ms, key: np.where(i % 11 == 0, key * 7 + ms, i),
        right_every=11,
    ),
}


class OperatorResult(Measured, frozen=True, kw_only=True):
    query: str
    result: dict[str, float]
    """The number of rows, and sums over them."""


def expected(name: str, events: int, parallelism: int = PARALLELISM) -> dict[str, float]:
    """Return what the result of a case must come to."""
    case = CASES[name]
    totals = case.expected(OperatorEvents(events, lanes=parallelism, case=name))
    return dict(zip(("rows", *case.checked), totals, strict=True))


def run(
    slots: Slots, *, query: str = "running_aggregate", events: int = EVENTS, parallelism: int = PARALLELISM
) -> OperatorResult:
    """Run the case `query`. Raises InvariantError for a wrong result."""
    if query not in CASES:
        raise ConfigError(f"--query: there is no query {query!r}; there are: {', '.join(CASES)}")
    case = CASES[query]
    sink = summing(*case.checked)

    def build(env: Environment, workload: OperatorEvents) -> None:
        source = env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
        case.build(source.with_watermarks("ts", WatermarkStrategy.monotonous())).sink(sink)

    workload = OperatorEvents(events, lanes=parallelism, case=query)
    warm_up = OperatorEvents(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism, case=query)
    run = measure(f"operators-{query}", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    wanted = expected(query, events, parallelism)
    result = dict(zip(wanted, sink.total.tolist(), strict=True))
    for what, total in wanted.items():
        require(f"{query}: {what}", total, result[what])
    return OperatorResult(query=query, result=result, **run.figures("operators", slots, events, parallelism))
