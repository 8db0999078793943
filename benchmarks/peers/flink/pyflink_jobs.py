"""PyFlink's side of the benchmarks; `run.py --engine python` starts it. One workload, once; figures on the last line.

Source and sink are those of the Java programs, so that Python does what is measured and no more. Times are Flink's own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import pandas as pd
import pyflink.version
from pyflink.common import Row, Time, Types, WatermarkStrategy
from pyflink.datastream import (
    AggregateFunction,
    DataStream,
    KeyedProcessFunction,
    RuntimeContext,
    StreamExecutionEnvironment,
)
from pyflink.datastream.connectors.base import Source
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.datastream.window import TumblingEventTimeWindows
from pyflink.java_gateway import get_gateway
from pyflink.table import DataTypes, Schema, StreamTableEnvironment
from pyflink.table.udf import udf

WINDOW_S = 10
HOUR_MS = 3_600_000
WARM_UP = 5_000
"""Events of a job of the same kind before: it is the JVM that loads and compiles. Python's processes are each job's own
and run before it does, and some modes do no more than this in ten seconds."""
NAMED = Types.ROW_NAMED(["ts", "name", "score"], [Types.LONG(), Types.STRING(), Types.DOUBLE()])
COUNT_AND_SUM = Types.ROW([Types.LONG(), Types.DOUBLE()])

Build = Callable[[StreamExecutionEnvironment, int, float], None]


class CountAndSum(AggregateFunction):  # type: ignore[misc]
    """Of one field."""

    def __init__(self, field: int) -> None:
        self._field = field

    def create_accumulator(self) -> tuple[int, float]:
        return 0, 0.0

    def add(self, value: Any, accumulator: tuple[int, float]) -> tuple[int, float]:
        return accumulator[0] + 1, accumulator[1] + value[self._field]

    def get_result(self, accumulator: tuple[int, float]) -> Row:
        return Row(*accumulator)

    def merge(self, a: tuple[int, float], b: tuple[int, float]) -> tuple[int, float]:
        return a[0] + b[0], a[1] + b[1]


def label(row: Row) -> Row:
    name = f"user-{row['key'] % 1000}"
    return Row(ts=row["ts"], name=name, score=round(row["value"] * 1.07 + len(name), 2))


@udf(
    result_type=DataTypes.ROW(
        [DataTypes.FIELD("name", DataTypes.STRING()), DataTypes.FIELD("score", DataTypes.DOUBLE())]
    )
)
def label_columns(key: int, value: float) -> Row:
    name = f"user-{key % 1000}"
    return Row(name, round(value * 1.07 + len(name), 2))


@udf(result_type=DataTypes.STRING(), func_type="pandas")
def name_column(key: pd.Series) -> pd.Series:
    return "user-" + (key % 1000).astype(str)


@udf(result_type=DataTypes.DOUBLE(), func_type="pandas")
def score_column(value: pd.Series, name: pd.Series) -> pd.Series:
    return (value * 1.07 + name.str.len()).round(2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["window", "udf", "keyed_process"])
    for name in ("directory", "cluster", "variant"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--parallelism", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=30.0)
    options = parser.parse_args()
    options.parallelism = options.parallelism or 2
    options.variant = options.variant or ("table_pandas" if options.workload == "udf" else "process")
    workloads = {"window": _window, "udf": _udf, "keyed_process": _keyed_process}
    figures = workloads[options.workload](options)
    print(json.dumps(figures), flush=True)
    os._exit(0)  # the gateway's JVM ends when its standard input does


def _peers() -> Any:
    return get_gateway().jvm.midstream.peers.PythonPeers


class _Runs:
    """A mini cluster in the gateway's JVM, and jobs on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        mode = "thread" if "thread" in options.variant else "process"
        settings = {"python.execution-mode": mode, "python.executable": os.environ["PEER_PYTHON"]}
        self._settings = _peers().ofJob(options.directory, settings)
        self._cluster = get_gateway().jvm.midstream.peers.Cluster(
            options.cluster, options.parallelism, _peers().ofCluster()
        )

    def run(self, build: Callable[[StreamExecutionEnvironment], None]) -> Any:
        env = StreamExecutionEnvironment(self._cluster.environment(self._settings, self._options.parallelism))
        build(env)
        client = env.execute_async("benchmark")
        return self._cluster.finished(client._j_job_client)


def _read(env: StreamExecutionEnvironment, source: Any, type_info: Any) -> DataStream:
    read = env.from_source(Source(source), WatermarkStrategy.for_monotonous_timestamps(), "events", type_info=type_info)
    _peers().count(read._j_data_stream)
    return read


def _window(options: argparse.Namespace) -> dict[str, Any]:
    events = options.events or 20_000_000

    def build(env: StreamExecutionEnvironment, count: int, max_seconds: float) -> None:
        source = _peers().numbers(count, options.parallelism, max_seconds)
        results = (
            _read(env, source, Types.TUPLE([Types.LONG(), Types.DOUBLE()]))
            .key_by(lambda row: row[0], Types.LONG())
            .window(TumblingEventTimeWindows.of(Time.seconds(WINDOW_S)))
            .aggregate(
                CountAndSum(1), accumulator_type=Types.TUPLE([Types.LONG(), Types.DOUBLE()]), output_type=COUNT_AND_SUM
            )
        )
        _peers().addUp(results._j_data_stream)

    return _bounded(options, events, build)


class HourTotals(KeyedProcessFunction):  # type: ignore[misc]
    """The sum of a key's values within an hour of its first one."""

    def open(self, context: RuntimeContext) -> None:
        self._total = context.get_state(ValueStateDescriptor("total", Types.DOUBLE()))

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> None:
        total = self._total.value()
        if total is None:
            total = 0.0
            ctx.timer_service().register_event_time_timer(ctx.timestamp() + HOUR_MS)
        self._total.update(total + value[1])

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Any:
        yield Row(self._total.value())
        self._total.clear()


def _keyed_process(options: argparse.Namespace) -> dict[str, Any]:
    def build(env: StreamExecutionEnvironment, count: int, max_seconds: float) -> None:
        source = _peers().hours(count, options.parallelism, max_seconds)
        results = (
            _read(env, source, Types.TUPLE([Types.LONG(), Types.DOUBLE()]))
            .key_by(lambda row: row[0], Types.LONG())
            .process(HourTotals(), Types.ROW([Types.DOUBLE()]))
        )
        _peers().addUpTotals(results._j_data_stream)

    return _bounded(options, options.events or 4_000_000, build)


def _udf(options: argparse.Namespace) -> dict[str, Any]:
    build = _labelled_table if options.variant.startswith("table") else _labelled_stream
    return _bounded(options, options.events or 4_000_000, lambda env, n, seconds: build(options, env, n, seconds))


def _labelled_stream(options: argparse.Namespace, env: StreamExecutionEnvironment, count: int, seconds: float) -> None:
    source = _peers().rows(count, options.parallelism, seconds)
    fields = Types.ROW_NAMED(["ts", "key", "value"], [Types.LONG(), Types.LONG(), Types.DOUBLE()])
    results = (
        _read(env, source, fields)
        .map(label, NAMED)
        .key_by(lambda row: row["name"], Types.STRING())
        .window(TumblingEventTimeWindows.of(Time.seconds(WINDOW_S)))
        .aggregate(
            CountAndSum(2), accumulator_type=Types.TUPLE([Types.LONG(), Types.DOUBLE()]), output_type=COUNT_AND_SUM
        )
    )
    _peers().addUp(results._j_data_stream)


def _labelled_table(options: argparse.Namespace, env: StreamExecutionEnvironment, count: int, seconds: float) -> None:
    """The function in Python, the windows in Flink SQL: the nearest that the Table API has."""
    tables = StreamTableEnvironment.create(env)
    source = _peers().rows(count, options.parallelism, seconds)
    fields = Types.ROW_NAMED(["ts", "key", "value"], [Types.LONG(), Types.LONG(), Types.DOUBLE()])
    schema = (
        Schema.new_builder()
        .column("ts", DataTypes.BIGINT())
        .column("key", DataTypes.BIGINT())
        .column("value", DataTypes.DOUBLE())
        .column_by_metadata("rowtime", DataTypes.TIMESTAMP_LTZ(3))
        .watermark("rowtime", "SOURCE_WATERMARK()")
        .build()
    )
    tables.create_temporary_view("events", _read(env, source, fields), schema)
    if "pandas" in options.variant:
        tables.create_temporary_function("name_column", name_column)
        tables.create_temporary_function("score_column", score_column)
        labelled = """
            SELECT rowtime, name, score_column(`value`, name) AS score
            FROM (SELECT rowtime, `value`, name_column(`key`) AS name FROM events)"""
    else:
        tables.create_temporary_function("label_columns", label_columns)
        labelled = """
            SELECT rowtime, labelled.name AS name, labelled.score AS score
            FROM (SELECT rowtime, label_columns(`key`, `value`) AS labelled FROM events)"""
    tables.create_temporary_view("labelled", tables.sql_query(labelled))
    results = tables.sql_query(f"""
        SELECT n, total FROM (
            SELECT name, window_start, COUNT(*) AS n, SUM(score) AS total
            FROM TABLE(TUMBLE(TABLE labelled, DESCRIPTOR(rowtime), INTERVAL '{WINDOW_S}' SECOND))
            GROUP BY name, window_start, window_end)""")
    _peers().addUp(tables.to_data_stream(results)._j_data_stream)


def _bounded(options: argparse.Namespace, events: int, build: Build) -> dict[str, Any]:
    """`run.py` checks `result` against what each subtask has read."""
    runs = _Runs(options)
    runs.run(lambda env: build(env, min(events, WARM_UP), 0.0))
    outcome = runs.run(lambda env: build(env, events, options.max_seconds))
    return {
        "engine": "pyflink",
        "version": pyflink.version.__version__,
        "workload": options.workload,
        "variant": options.variant,
        "cluster": options.cluster,
        "parallelism": options.parallelism,
        "events": events,
        "seconds": outcome.seconds(),
        "read": list(outcome.sums("read"))[: options.parallelism],
        "result": list(outcome.sums("results")),
        "checkpoints_completed": outcome.checkpoints().size(),
    }


if __name__ == "__main__":
    main()
