"""The fluent API at build time: schemas at every step, the graph that comes of it, and every refusal."""

from __future__ import annotations

import re
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import midstream
import midstream.connectors
from midstream import (
    LATE,
    BroadcastProcessFunction,
    ClusterError,
    CollectSink,
    ConfigError,
    CoProcessFunction,
    Count,
    Environment,
    First,
    JobError,
    KeyedProcessFunction,
    Last,
    Max,
    Mean,
    SchemaError,
    Sum,
    Tuning,
    ValueState,
    Variance,
    WatermarkStrategy,
    WindowContext,
    WindowFunction,
    exponential_restarts,
    fixed_restarts,
    no_restart,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.cli.commands import new
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.job_graph import JobGraph, Partitioning

ROWS = [{"t": datetime(2020, 1, 1), "k": "a", "v": 1, "x": 1.5}]
HERE = Path(__file__).name


def env(**settings) -> Environment:
    return Environment("test", parallelism=2, **settings)


def stream(environment: Environment | None = None) -> midstream.DataStream:
    return (environment or env()).from_collection(ROWS)


def timed(environment: Environment | None = None) -> midstream.DataStream:
    return stream(environment).with_watermarks("t", WatermarkStrategy.bounded("5 s"))


def graph_of(environment: Environment) -> JobGraph:
    return build_job_graph(environment.program.graph, environment.program.config)


class Keep(KeyedProcessFunction):
    def process(self, row, ctx):
        return row


class Misspelt(KeyedProcessFunction):
    def proces(self, row, ctx):
        return row


class OnTheObject(Keep):
    def __init__(self):
        self.seen = ValueState(default=0)


class HalfOfBoth(CoProcessFunction):
    def process1(self, row, ctx):
        return row


class Both(CoProcessFunction):
    def process1(self, row, ctx):
        return {"k": row["k"]}

    def process2(self, row, ctx):
        return None


class Enrich(BroadcastProcessFunction):
    def process(self, row, ctx):
        return {"k": row["k"]}

    def process_broadcast(self, row, ctx):
        return None


# ---- schemas


@pytest.mark.parametrize("module", [midstream, midstream.connectors, testing])
def test_every_exported_name_can_be_imported(module):
    for name in module.__all__:
        assert getattr(module, name) is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    declared = set(re.findall(r"^ *(?:from midstream\.\S+ import )?\(?\s*(\w+) as \1\b", text, re.MULTILINE))
    assert declared == set(module.__all__)
    listed = dir(module)
    assert set(module.__all__) <= set(listed) and len(listed) == len(set(listed))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = module.nope


def test_the_version_is_exported():
    assert midstream.__version__.startswith("0.") and "__version__" in dir(midstream)


IMPORT = re.compile(r"^(?:\s|>|\.)*(?:from|import) +(midstream(?:\.\w+)*)", re.MULTILINE)
ROOT = Path(__file__).parents[2]


def test_users_are_shown_no_import_but_from_the_public_modules():
    """In the README, the docs, the examples, new projects and docstrings; records of decisions are about the inside."""
    public = {"midstream", "midstream.connectors", "midstream.testing"}
    docs = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"]
    pages = [ROOT / "README.md", *docs, *(ROOT / "examples").rglob("*.py")]
    shown = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    shown |= {"a new job": new.JOB, "its test": new.TEST}
    for file in sorted((ROOT / "src" / "midstream").rglob("*.py")):
        shown[file.relative_to(ROOT).as_posix()] = "\n".join(re.findall(r"^ *>>> .*", file.read_text(), re.MULTILINE))
    found = [(name, module) for name, text in shown.items() for module in IMPORT.findall(text) if module not in public]
    assert found == []


def test_the_schema_is_known_after_every_step():
    made = (
        stream()
        .filter(pl.col("v") > 0)
        .with_columns(double=pl.col("v") * 2, name=pl.lit("n"))
        .select("k", "name", pl.col("double").cast(pl.Float64))
    )
    assert made.schema == schema_of([("k", pa.large_string()), ("name", pa.large_string()), ("double", pa.float64())])
    assert made.map(lambda row: row).schema == made.schema
    assert made.flat_map(lambda row: [], schema={"n": int}).schema == pa.schema({"n": pa.int64()})
    assert made.map_batches(lambda frame: frame, {"d": pl.Date, "b": bytes}).schema == schema_of(
        [("d", pa.date32()), ("b", pa.large_binary())]
    )


def test_event_time_stays_as_long_as_its_column_holds_timestamps():
    assert stream().event_time is None
    at = timed()
    assert at.event_time == "t"
    assert at.filter(pl.col("v") > 0).select("t", "k").event_time == "t"
    assert at.select("k").event_time is None
    assert at.with_columns(t=pl.col("v")).event_time is None
    assert at.map(lambda row: row, schema={"t": datetime}).event_time == "t"
    assert at.union(at.filter(pl.col("v") > 1)).event_time == "t"


def test_windows_add_their_bounds_and_offer_late_rows():
    made = timed().key_by("k").window(tumbling("1 h")).allowed_lateness("5 min").aggregate(n=Count(), total=Sum("v"))
    assert made.schema.names == ["k", "window_start", "window_end", "n", "total"]
    assert made.event_time == "window_end"
    late = made.side_output(LATE)
    assert late.schema == stream().schema
    assert late.event_time == "t"


@pytest.mark.parametrize("window", [tumbling("1 h"), sliding("1 h", "5 min"), session("10 min")])
def test_a_window_over_all_rows_runs_in_one_subtask(window):
    environment = env()
    timed(environment).window_all(window).aggregate(n=Count()).print()
    graph = graph_of(environment)
    [vertex] = [v for v in graph.vertices if "window_all" in v.name]
    assert vertex.parallelism == 1
    assert graph.inputs(vertex.id)[0].partitioning is Partitioning.GLOBAL


def test_functions_declare_rows_and_side_outputs():
    made = timed().key_by("k").process(Keep(), {"t": datetime, "k": str}, side_outputs={"odd": {"v": int}})
    assert made.schema.names == ["t", "k"]
    assert made.event_time == "t"
    assert made.side_output("odd").schema == pa.schema({"v": pa.int64()})


def test_connected_streams_are_two_ports_with_their_keys():
    environment = env()
    left, right = stream(environment), environment.from_collection([{"key": "a", "w": 1}])
    left.key_by("k").connect(right.key_by("key")).process(Both(), {"k": str}).print()
    left.connect(right.broadcast()).process(Enrich(), {"k": str}).print()
    left.key_by("k").connect(right.broadcast()).process(Enrich(), {"k": str}).print()
    left.connect(right).process(Both(), {"k": str}).print()
    graph = graph_of(environment)
    edges = {v.name: [(e.port, e.partitioning.value, e.keys) for e in graph.inputs(v.id)] for v in graph.vertices[2:]}
    assert [*edges] == ["co_process → print", "broadcast_process → print"]
    ports = [[(e.port, e.partitioning.value, e.keys) for e in graph.inputs(v.id)] for v in graph.vertices[2:]]
    assert ports == [
        [(0, "keyed", ("k",)), (1, "keyed", ("key",))],
        [(0, "forward", ()), (1, "broadcast", ())],
        [(0, "keyed", ("k",)), (1, "broadcast", ())],
        [(0, "forward", ()), (1, "forward", ())],
    ]


def test_partitioning_methods_name_the_next_edge():
    environment = env()
    head = stream(environment)
    for method in (head.rebalance, head.forward, head.global_, head.broadcast):
        method().filter(pl.col("v") > 0).print()
    kinds = [edge.partitioning for edge in graph_of(environment).edges]
    assert kinds == [Partitioning.REBALANCE, Partitioning.FORWARD, Partitioning.GLOBAL, Partitioning.BROADCAST]


def test_setters_name_the_operator_in_front_and_reach_its_messages():
    environment = env()
    (
        stream(environment)
        .uid("in")
        .filter(pl.col("v") > 0)
        .uid("positive")
        .name("only positive")
        .parallelism(1)
        .sink(CollectSink())
        .uid("out")
        .parallelism(1)
    )
    graph = graph_of(environment)
    assert [v.name for v in graph.vertices] == ["collection", "only positive → collect"]
    assert graph.vertices[0].source is not None
    assert graph.vertices[0].source.uid == "in"
    assert [op.uid for op in graph.vertices[1].operators] == ["positive", "out"]
    assert [v.parallelism for v in graph.vertices] == [2, 1]
    assert "only positive" in environment.explain()
    assert graph.vertices[1].operators[0].operator._where == "operator 'only positive'"  # type: ignore[attr-defined]  # what is not there, or private


def test_a_union_reads_from_all_its_streams():
    environment = env()
    one, two = stream(environment), stream(environment)
    one.union(two).key_by("k").process(Keep(), one.schema).print()
    assert [(e.source, e.target, e.port) for e in graph_of(environment).edges] == [(0, 2, 0), (1, 2, 0)]


# ---- refusals


def refused(kind: type[Exception], *parts: str):
    """The message begins with this file and the line of the call, and contains `parts`."""
    pattern = rf"^{HERE}:\d+: " + "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(kind, match=pattern)


def test_unknown_columns_in_expressions_name_the_column_and_what_there_is():
    for call in (
        lambda: stream().filter(pl.col("w") > 0),
        lambda: stream().select("w"),
        lambda: stream().with_columns(y=pl.col("w")),
    ):
        with refused(SchemaError, "'w'", r"\(t, k, v, x\)"):
            call()


def test_expressions_must_compute_each_row_on_its_own():
    with refused(SchemaError, "a filter must be boolean"):
        stream().filter(pl.col("v"))
    with refused(JobError, "3 is not a column or a polars expression"):
        stream().filter(3)  # type: ignore[call-overload]  # the mistake under test
    with refused(JobError, "is not a polars expression"):
        stream().with_columns(y=[3])  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "select: name at least one"):
        stream().select()
    with refused(JobError, "each row on its own"):
        stream().select(pl.col("v").sum())


def test_key_columns_are_checked():
    with refused(SchemaError, "key column 'w' is not in the stream's schema"):
        stream().key_by("w")
    with refused(SchemaError, "key column 'x' is double, which cannot be a key"):
        stream().key_by("x")
    with refused(JobError, "name at least one column"):
        stream().key_by()
    with refused(JobError, "named twice in k, k"):
        stream().key_by("k", "k")
    with refused(JobError, r"so does rebalance\(\)"):
        stream().rebalance().key_by("k")


def test_watermarks_need_a_timestamp_column_and_a_strategy():
    with refused(SchemaError, "column 'when' is not in the stream's schema"):
        stream().with_watermarks("when", WatermarkStrategy.monotonous())
    with refused(SchemaError, "event-time column 'v' is int64, not a timestamp"):
        stream().with_watermarks("v", WatermarkStrategy.monotonous())
    with refused(SchemaError, r"convert it first, for example with with_columns\(pl.col\('s'\).str.to_datetime\("):
        stream().with_columns(s=pl.lit("2024-01-01")).with_watermarks("s", WatermarkStrategy.monotonous())
    with refused(JobError, "is not a WatermarkStrategy"):
        stream().with_watermarks("t", "5 s")  # type: ignore[arg-type]  # the mistake under test


def test_windows_need_event_time_and_sensible_sizes():
    with refused(JobError, "window: the stream has no event time; call with_watermarks", r"timestamp columns: t"):
        stream().key_by("k").window(tumbling("1 h"))
    with refused(JobError, "'1 h' is not a window"):
        timed().key_by("k").window("1 h")  # type: ignore[arg-type]  # the mistake under test
    with refused(ConfigError, "allowed_lateness: 'soon' is not a duration"):
        timed().key_by("k").window(tumbling("1 h")).allowed_lateness("soon")
    with pytest.raises(ConfigError, match="'1 fortnight' is not a duration"):
        tumbling("1 fortnight")
    with pytest.raises(ConfigError, match=r"'1 month' is not a duration.* units are us, ms, s, min, h and d, or their"):
        tumbling("1 month")
    for negative in ("-1 h", "- 1 hour", -3600, timedelta(hours=-1)):
        with pytest.raises(ConfigError, match=r"size: .* must (not be negative|be less than 115,741 days)"):
            tumbling(negative)
    with pytest.raises(ConfigError, match="offset: 'soon' is not a duration"):
        tumbling("1 h", offset="-soon")
    with pytest.raises(ConfigError, match="must be longer than 0"):
        tumbling(0)


def test_units_may_be_written_in_full():
    for text in ("120000000 us", "120000 milliseconds", "120 seconds", "2 min", "2 minutes", "2 Minutes", "2m"):
        assert tumbling(text) == tumbling(120), text
    assert tumbling("1 hour") == tumbling("60 mins") and tumbling("2 days") == tumbling("48 hours")


def test_an_offset_may_be_negative():
    assert tumbling("1 d", offset="-2 h") == tumbling("1 d", offset="22 h") == tumbling("1 d", offset=-7200)
    assert str(tumbling("1 d", offset=timedelta(hours=-26))) == "tumbling windows of 1 d shifted by 22 h"
    assert sliding("1 h", "20 min", offset="-5 min") == sliding("1 h", "20 min", offset="15 min")
    assert tumbling("1 h", offset="-1 d") == tumbling("1 h")


def test_aggregates_are_checked():
    windows = timed().key_by("k").window(tumbling("1 h"))
    with refused(JobError, "name at least one aggregate"):
        windows.aggregate()
    with refused(JobError, "n='count' is not an aggregate"):
        windows.aggregate(n="count")  # type: ignore[arg-type]  # the mistake under test
    with refused(SchemaError, "'w'"):
        windows.aggregate(n=Sum("w"))
    with refused(SchemaError, "k"):
        windows.aggregate(n=Sum("k"))
    with refused(ConfigError, "window_start"):
        windows.aggregate(window_start=Count())


def test_running_aggregates_have_the_keys_the_time_and_a_column_each():
    for keyed, names in ((stream().key_by("k"), ["k", "n", "mean"]), (timed().key_by("k"), ["k", "t", "n", "mean"])):
        assert keyed.aggregate(n=Count(), mean=Mean("v")).schema.names == names
    assert timed().key_by("k").aggregate(n=Count()).event_time == "t"
    assert timed().key_by("t").aggregate(n=Count()).schema.names == ["t", "n"]
    per_minute = timed().key_by("k").aggregate(n=Count(), every="1 min")
    assert per_minute.schema.names == ["k", "t", "n"]
    per_minute.key_by("k").window(tumbling("1 h")).aggregate(most=Max("n"))
    assert timed().key_by("k").aggregate(n=Count(), ttl="1 d").side_output(LATE).schema == timed().schema
    with refused(JobError, "late"):
        timed().key_by("k").aggregate(n=Count()).side_output(LATE)


@pytest.mark.parametrize("name", ["*", "^.*$"])
def test_a_result_may_have_a_name_that_polars_reads_as_a_pattern(name: str) -> None:
    keyed = timed().key_by("k")
    named: Any = {name: Sum("v")}
    for made in (
        timed().with_columns(**{name: pl.lit(7)}),
        keyed.aggregate(**named),
        keyed.aggregate(**named, every="1 s"),
        keyed.window(tumbling("1 h")).aggregate(**{name: Sum("v")}),
        keyed.window(midstream.count(1)).aggregate(**{name: Sum("v")}),
        keyed.window(tumbling("1 h")).process(Values(name), {name: int}),
    ):
        rows = testing.run(made, [{"t": datetime(2020, 1, 1), "k": "a", "v": 7}]).rows
        assert [row[name] for row in rows] == [7], made


class Values(WindowFunction):
    """Returns the column v under another name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
        return rows.rename({"v": self.name})[[self.name]]


def test_running_aggregates_are_checked():
    keyed = timed().key_by("k")
    options: tuple[dict[str, Any], dict[str, Any]]
    for option in ("every", "ttl"):
        options = {option: "1 min"}, {option: 0}
        with refused(
            ConfigError, f"{option} is a duration of event time, and the stream has none; call with_watermarks"
        ):
            stream().key_by("k").aggregate(n=Count(), **options[0])
        with refused(ConfigError, f"aggregate: {option}: 0 is not an interval"):
            keyed.aggregate(n=Count(), **options[1])
    with refused(JobError, "Count has no column"):
        keyed.aggregate(Count())  # type: ignore[arg-type]  # the mistake under test
    with refused(ConfigError, "two output columns are called 't'; rename the aggregate"):
        keyed.aggregate(t=Count())
    with refused(ConfigError, "'t' has the time of the result, so it cannot be a key"):
        timed().key_by("t").aggregate(n=Count(), every="1 s")
    with pytest.raises(ConfigError, match="Variance: ddof is -1"):
        Variance("v", ddof=-1)


def test_the_condition_of_an_aggregate_is_an_expression_of_a_row():
    wrong: list[tuple[Any, type[Exception], str]]
    for keyed in (timed().key_by("k"), timed().key_by("k").window(tumbling("1 h"))):
        wrong = [
            ("v > 0", SchemaError, "where='v > 0' is not a polars expression"),
            (pl.col("v"), SchemaError, "is int64; it must be one condition of a row"),
            (pl.selectors.boolean(), SchemaError, "is no column; it must be one condition of a row"),
            (pl.col("w") > 0, SchemaError, "'w' is not in the stream's schema"),
            (pl.col("v") > pl.col("v").mean(), JobError, "does not compute each row on its own"),
        ]
        for where, error, text in wrong:
            with refused(error, text):
                keyed.aggregate(total=Sum("v", where=where))
        with refused(SchemaError, "sum of column 'k', which is large_string"):
            keyed.aggregate(total=Sum("k", where=pl.col("v") > 0))
        assert keyed.aggregate(n=Count(where=pl.col("v") > 0)).schema.names[-1] == "n"


def test_a_running_sum_that_does_not_fit_names_its_key():
    numbers = env().from_collection([{"k": "a", "v": 2**62}] * 2).key_by("k")
    with pytest.raises(JobError, match=r"^operator 'aggregate': aggregate 'total' does not fit int64 for k='a'; cast"):
        testing.run(numbers.aggregate(total=Sum("v")))


def test_a_time_column_may_be_called_like_a_part_of_an_aggregate():
    made = timed().rename({"t": "n:n"}).key_by("k").aggregate(n=Count())
    assert testing.run(made).rows == [{"k": "a", "n:n": ROWS[0]["t"], "n": 1}]


def test_without_event_time_first_and_last_depend_on_arrival():
    rows = [{"k": "a", "v": v} for v in (3, 1, 2)]
    made = env().from_collection(rows).key_by("k").aggregate(first=First("v"), last=Last("v"))
    for cut in (1, 2, "whole"):
        assert [(row["first"], row["last"]) for row in testing.run(made, cut=cut).rows] == [(3, 3), (3, 1), (3, 2)]


def test_a_union_needs_equal_schemas_and_event_times():
    environment = env()
    head = stream(environment)
    with refused(SchemaError, "column 'x' is missing in one", r"use select\(\)"):
        head.union(head.select("t", "k", "v"))
    with refused(SchemaError, "column 'v' is int64 in one and double in another"):
        head.union(head.with_columns(v=pl.col("x")))
    with refused(SchemaError, "different order"):
        head.union(head.select("k", "t", "v", "x"))
    with refused(JobError, "event time None, another 't'"):
        head.union(head.with_watermarks("t", WatermarkStrategy.monotonous()))
    with refused(JobError, "two Environments"):
        head.union(stream())
    with refused(JobError, "needs a DataStream, got a list"):
        head.union([head])  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "at least one other"):
        head.union()


def test_connect_refuses_what_does_not_match():
    environment = env()
    head = stream(environment)
    with refused(JobError, r"the keys do not match: k \(large_string\) and v \(int64\)"):
        head.key_by("k").connect(head.key_by("v"))
    with refused(JobError, "connects with another keyed stream"):
        head.key_by("k").connect(head)  # type: ignore[call-overload]  # the mistake under test
    with refused(JobError, "both sides of connect"):
        head.connect(head.key_by("k"))  # type: ignore[call-overload]  # the mistake under test
    with refused(JobError, r"stream.connect\(small.broadcast\(\)\)"):
        head.broadcast().connect(head)
    with refused(JobError, "is not a CoProcessFunction"):
        head.connect(head).process(Enrich(), {"k": str})  # type: ignore[arg-type]  # the mistake under test


def test_process_functions_are_instances_with_a_schema():
    head = stream()
    keyed = head.key_by("k")
    with refused(JobError, r"Keep is a class; give an instance: Keep\("):
        keyed.process(Keep, {"k": str})  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "is not a KeyedProcessFunction"):
        keyed.process(lambda row: row, {"k": str})  # type: ignore[arg-type]  # the mistake under test
    with refused(SchemaError, "column 'k': 'text' is not a type"):
        keyed.process(Keep(), {"k": "text"})
    with refused(SchemaError, "is not a schema"):
        keyed.process(Keep(), [str])  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, r"Misspelt has no method process\(\); that is what takes the rows"):
        keyed.process(Misspelt(), {"k": str})
    with refused(JobError, r"state 'seen' of OnTheObject is set on the object.*seen = ValueState\("):
        keyed.process(OnTheObject(), {"k": str})
    with refused(JobError, r"HalfOfBoth has no method process2\(\)"):
        head.connect(head).process(HalfOfBoth(), {"k": str})


def test_side_outputs_must_exist():
    with refused(JobError, "no side output 'early' here", "'late'"):
        timed().key_by("k").window(tumbling("1 h")).aggregate(n=Count()).side_output("early")
    with refused(JobError, r"no side output 'late' here \(there is: none\)"):
        stream().side_output(LATE)


def test_uids_names_and_parallelisms_are_checked_and_need_an_operator():
    with refused(ConfigError, "uid 'a b' cannot be one"):
        stream().uid("a b")
    with refused(ConfigError, "parallelism 0 is not a positive whole number"):
        stream().parallelism(0)
    with refused(ConfigError, "name '' is not a text"):
        stream().name("")
    with refused(JobError, r"uid\(\) configures the operator that it is called on"):
        stream().rebalance().uid("x")
    with refused(JobError, "runs in one subtask"):
        timed().window_all(tumbling("1 h")).aggregate(n=Count()).parallelism(2)


def test_two_equal_uids_name_both_places():
    environment = env()
    stream(environment).uid("same").filter(pl.col("v") > 0).uid("same").print()
    with pytest.raises(JobError, match=rf"uid 'same' is given to two operators: .*{HERE}:\d+.*{HERE}:\d+"):
        environment.explain()


def test_an_unused_stream_is_named_with_its_line():
    environment = env()
    head = stream(environment)
    head.print()
    head.filter(pl.col("v") > 0).name("forgotten")
    with pytest.raises(JobError, match=rf"operator 'forgotten' \({HERE}:\d+\): its stream is never used"):
        environment.explain()


def test_a_job_needs_a_source_and_a_sink():
    with pytest.raises(JobError, match="begin with a source"):
        env().execute()
    environment = env()
    stream(environment)
    with pytest.raises(JobError, match="the job has no sink"):
        environment.execute()


def test_what_cannot_be_pickled_is_named_with_its_variable_and_lambdas_can_be():
    lock = threading.Lock()

    class Holder(KeyedProcessFunction):
        def __init__(self):
            self.lock = lock

    with refused(JobError, r"map: cannot be sent to the slots: it uses 'lock' \(a lock\)", "inside the function"):
        stream().map(lambda row: {**row, "v": lock.locked()})
    with refused(JobError, r"Holder: cannot be sent to the slots: it uses 'lock' \(a lock\)"):
        stream().key_by("k").process(Holder(), {"k": str})
    factor = 3
    assert stream().map(lambda row: {**row, "v": row["v"] * factor}).schema == stream().schema


@pytest.mark.spark
def test_a_spark_session_or_frame_in_a_function_is_named_with_what_to_do(spark):
    frame = spark.range(3)
    with refused(JobError, r"map: .* it uses 'frame' \(a DataFrame\)", r"env.from_dataframe\(\)"):
        stream().map(lambda row: {**row, "v": frame.count()})
    with refused(JobError, r"it uses 'spark' \(a SparkSession\)", "live on the driver only"):
        stream().filter(lambda row: spark.range(row["v"]).count() > 0)


def test_sources_refuse_what_they_cannot_read():
    with refused(ConfigError, "there is no file"):
        env().read_files("/nowhere/at/all.parquet")
    with refused(SchemaError, "no rows to infer"):
        env().from_collection([])
    with refused(JobError, "a str is no collection of rows"):
        env().from_collection("abc")  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "a table has its own"):
        env().from_collection(pa.table({"v": [1]}), schema={"v": int})
    with refused(JobError, "generate: 3 is not a function"):
        env().generate(3)  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "is not a Source"):
        env().source([1])  # type: ignore[arg-type]  # the mistake under test
    with refused(JobError, "is not a Sink"):
        stream().sink(print)  # type: ignore[arg-type]  # the mistake under test


def test_rows_tables_and_frames_are_collections():
    table = pa.table({"v": [1, 2]})
    for data in ([{"v": 1}], table, table.to_batches()[0], pl.DataFrame({"v": [1]}), iter([{"v": 1}])):
        assert env().from_collection(data).schema == pa.schema({"v": pa.int64()})
    assert env().from_collection([{"v": 1}], schema={"v": float}).schema == pa.schema({"v": pa.float64()})
    assert env().from_collection([], schema={"v": float}).schema == pa.schema({"v": pa.float64()})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallelism": 0}, "parallelism 0 is not a positive whole number"),
        ({"parallelism": 129}, "parallelism 129 is above max_parallelism 128"),
        ({"max_parallelism": 0}, "max_parallelism: 0 is not between"),
        ({"max_parallelism": 1.5}, "max_parallelism: 1.5 is not a whole number"),
        ({"checkpoint_interval": "soon"}, "checkpoint_interval: 'soon' is not a duration"),
        ({"checkpoint_interval": 0}, "checkpoint_interval: 0 is not an interval"),
        ({"tuning": Tuning(slot_timeout="-1 s")}, "slot_timeout: '-1 s'"),
        ({"aligned_timeout": "never"}, "aligned_timeout: 'never' is not a duration"),
        ({"tuning": Tuning(buffer_size="1 KiB")}, "buffer_size: 1024 bytes is below"),
        ({"tuning": Tuning(buffer_size="big")}, "buffer_size: 'big' is not a size"),
        ({"checkpoint_dir": ""}, "checkpoint_dir: '' is not a directory"),
        ({"retained_checkpoints": 0}, "retained_checkpoints: 0 is less than 1"),
        (
            {"state_memory": 0},
            "state_memory: 0 bytes is too little; give a size such as '1 GiB', 'auto' or 'unlimited'",
        ),
        ({"state_memory": "0 MiB"}, "state_memory: 0 bytes is too little"),
        ({"state_memory": -1}, "state_memory: -1 is not a size; write for example '32 KiB' or '64 MiB', or 'auto' or"),
        ({"state_memory": "12 parsecs"}, "state_memory: '12 parsecs' is not a size"),
        ({"state_memory": True}, "state_memory: True is not a size"),
        ({"state_memory": None}, "state_memory: None is not a size"),
        ({"restart": "always"}, "restart: 'always' is not a strategy"),
        ({"tuning": {"pool_size": "1 MiB"}}, "tuning: {'pool_size': '1 MiB'} is not a Tuning; use Tuning"),
        ({"name": " "}, "a job needs a name"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with refused(ConfigError, message):
        Environment(**{"name": "test", **settings})


def test_the_memory_of_state_is_a_size_or_a_word():
    for given, expected in (("1 GiB", 2**30), (5, 5), ("auto", "auto"), ("unlimited", "unlimited")):
        assert Environment("test", state_memory=given).program.config.state_memory == expected
    assert Environment("test").program.config.state_memory == "auto"


def test_restart_strategies_are_functions_with_checks():
    assert no_restart().kind == "none"
    assert (fixed_restarts(3, "2 s").attempts, fixed_restarts(3, "2 s").delay_s) == (3, 2.0)
    assert exponential_restarts("1 s", "1 min").max_delay_s == 60.0
    with pytest.raises(ConfigError, match="attempts 0"):
        fixed_restarts(0)
    with pytest.raises(ConfigError, match="no longer than max_delay"):
        exponential_restarts("2 min", "1 min")


def test_an_endless_job_without_checkpoints_may_print_but_not_commit(tmp_path):
    environment = env()
    environment.generate(lambda i: {"n": i}).write_parquet(tmp_path / "out")
    with pytest.raises(
        JobError, match=r"sink 'parquet' shows its rows when a checkpoint completes.*'generate' never ends"
    ):
        environment.start()


def test_going_on_needs_a_checkpoint_dir_and_slots_exclude_a_master():
    environment = env()
    stream(environment).print()
    with pytest.raises(JobError, match="no checkpoint_dir, so there is nothing to resume from"):
        environment.start(restore_from="latest")
    with pytest.raises(JobError, match="give master= or slots=, not both"):
        environment.start(master="local[2]", slots=object())  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="the job: parallelism 0"):
        environment.start(parallelism=0)
    with pytest.raises(ConfigError, match="parallelism 1000 is above max_parallelism 128"):
        environment.start(parallelism=1000)


def test_a_python_without_pyspark_is_one_clear_error(monkeypatch):
    if "midstream.spark" in sys.modules:  # modules that are imported again below must not replace it
        monkeypatch.setattr(midstream, "spark", midstream.spark)  # type: ignore[attr-defined]  # what is not there, or private
    for module in [name for name in sys.modules if name.startswith("midstream.spark")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyspark", None)  # as if it were not installed
    environment = env()
    stream(environment).print()
    with pytest.raises(
        ClusterError, match=r"Spark needs PySpark 4, and .*python.* has no module 'pyspark'; install it"
    ):
        environment.start(master="local[2]")


def test_a_keyed_stream_is_written_with_all_rows_of_a_key_in_one_subtask(tmp_path):
    env = Environment(parallelism=3)
    keyed = env.from_collection([{"k": i % 5, "n": i} for i in range(40)], splits=1).key_by("k")
    kept = keyed.collect()
    keyed.write_parquet(tmp_path / "out").uid("files")
    keyed.sink(CollectSink()).uid("sink")
    graph = build_job_graph(env.program.graph, env.program.config)
    assert {(edge.partitioning, edge.keys) for edge in graph.edges} == {(Partitioning.KEYED, ("k",))}
    for rows in (testing.run(env, parallelism=3)[kept], testing.run(env, parallelism=3)["files"]):
        assert len(rows) == 40
        for k in range(5):
            assert [row["n"] for row in rows if row["k"] == k] == list(range(k, 40, 5))


def test_rows_that_replace_others_by_a_key_are_partitioned_by_it(tmp_path):
    def edge_of(stream: Any, **options: Any) -> Any:
        stream.write_delta(tmp_path / "out", key=["k", "v"], **options)
        program = stream.core.program
        *_, edge = build_job_graph(program.graph, program.config).edges
        return edge.partitioning, edge.keys

    def rows() -> Any:
        return env().from_collection([{"k": "a", "v": 1, "x": 1.5, "op": "insert"}])

    by_key = Partitioning.KEYED, ("k", "v")
    assert edge_of(rows(), op="op") == by_key
    assert edge_of(rows().key_by("k")) == by_key
    assert edge_of(rows().key_by("v", "k")) == (Partitioning.KEYED, ("v", "k")), "one exchange is enough"
    assert edge_of(rows().filter(pl.col("v") > 0).global_()) == (Partitioning.GLOBAL, ())
    decimal = rows().with_columns(v=pl.col("v").cast(pl.Decimal(10, 2)))
    assert edge_of(decimal) == (Partitioning.KEYED, ("k",))
    iceberg = rows()
    iceberg.write_iceberg("lake.out", catalog={"type": "sql"}, key=["k", "v"], op="op")
    program = iceberg.core.program
    *_, edge = build_job_graph(program.graph, program.config).edges
    assert (edge.partitioning, edge.keys) == by_key
    kept = rows().key_by("k", "v").aggregate(n=Count()).forward()
    kept.write_postgres("dbname=x", "kept", key=["k", "v"])
    assert [edge.partitioning for edge in build_job_graph(kept.core.program.graph, kept.core.program.config).edges] == [
        Partitioning.KEYED
    ], "rows stay where the keyed operator has put them"
    for refused in (rows().rebalance(), rows().broadcast()):
        with pytest.raises(
            JobError, match=r"write_delta: defines where rows go, and so does (rebalance|broadcast)\(\)"
        ):
            edge_of(refused)
    with pytest.raises(
        SchemaError, match=r"write_delta: key column 'x' is double, which cannot be a key; .*before write_delta"
    ):
        rows().write_delta(tmp_path / "out", key=["x"])
    with pytest.raises(SchemaError, match="write_postgres: operation column 'v' is int64; it must be text"):
        rows().write_postgres("dbname=x", "kept", key=["k"], op="v")
    with pytest.raises(ConfigError, match="needs the columns by which rows are found"):
        rows().write_delta(tmp_path / "out", op="op")
