"""What `compare.py` runs: per workload the engines, the command of each, and which of their figures count."""

from __future__ import annotations

from dataclasses import dataclass, replace

PYTHON = ".venv/bin/python"
BENCH = (PYTHON, "-m", "midstream_lab", "bench")


@dataclass(frozen=True)
class Figure:
    """`is_compared` False: something to know beside the others, of which no ratio is taken."""

    name: str
    title: str
    more_is_better: bool = True
    is_compared: bool = True


@dataclass(frozen=True)
class Contender:
    """`part`: where in the JSON object its figures are. `needs`: files without which it is left out.

    `rounds_max`: of a run so many, for what takes long and is far from the others. `is_engine` False: the same work
    without an engine, to see what one costs.
    """

    engine: str
    command: tuple[str, ...]
    part: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    rounds_max: int = 1000
    is_engine: bool = True


@dataclass(frozen=True)
class Workload:
    what: str
    figures: tuple[Figure, ...]
    contenders: tuple[Contender, ...]
    bases: tuple[tuple[str, str], ...] = ()
    """Which of midstream's rows an engine is compared with, by the beginning of its name; else "midstream"."""
    limit: str = ""
    """What keeps midstream from being faster, as far as it was measured."""

    def base_of(self, engine: str) -> str:
        return next((base for start, base in self.bases if engine.startswith(start)), "midstream")


EVENTS_PER_S = Figure("events_per_s", "events/s")
MEMORY = Figure("memory_mb", "memory MB", is_compared=False)
"""Of midstream's and Bytewax's workers; of others with the JVM, whose heap is as large as it is allowed to be."""
P50 = Figure("p50_ms", "p50 ms", more_is_better=False)
P99 = Figure("p99_ms", "p99 ms", more_is_better=False)


def ours(name: str, *options: str, engine: str = "midstream", part: tuple[str, ...] = ()) -> Contender:
    return Contender(engine, (*BENCH, name, "--json", *options), part)


def flink(workload: str, *options: str, engine: str = "Flink Java") -> Contender:
    """With task managers that talk by TCP, as slots do; in one JVM, which compiles and collects for all of them."""
    return Contender(
        engine,
        (PYTHON, "benchmarks/peers/flink/run.py", workload, "--timeout", "280", *options),
        needs=(".peers/flink/benchmarks.jar",),
    )


def pyflink(workload: str, variant: str, engine: str) -> Contender:
    """What it has read after ten seconds: some of its modes do less than a thousand events a second."""
    options = ("--engine", "python", "--cluster", "local", "--variant", variant, "--max-seconds", "10")
    return flink(workload, *options, engine=engine)


def beside_a_broker(contender: Contender) -> Contender:
    """With a Kafka broker of its own on this machine, whose start does not count."""
    return replace(contender, command=(PYTHON, "tools/kafka_server.py", *contender.command))


def once(*contenders: Contender) -> tuple[Contender, ...]:
    return tuple(replace(contender, rounds_max=1) for contender in contenders)


def spark(workload: str, *options: str, engine: str = "Structured Streaming", needs: tuple[str, ...] = ()) -> Contender:
    return Contender(engine, (PYTHON, "benchmarks/peers/spark/run.py", workload, *options), needs=needs)


def bytewax(workload: str, *options: str, engine: str = "Bytewax") -> Contender:
    return Contender(
        engine,
        (".peers/bytewax/bin/python", "benchmarks/peers/bytewax/run.py", workload, *options),
        needs=(".peers/bytewax/bin/python",),
    )


def loops(workload: str, variant: str, engine: str) -> Contender:
    return Contender(engine, (PYTHON, "benchmarks/peers/loops/run.py", workload, "--variant", variant), is_engine=False)


QUERIES = {
    "q0": "all bids",
    "q1": "bids in another currency",
    "q2": "bids on some auctions",
    "q3": "auctions joined with sellers of three states",
    "q4": "average final price per category",
    "q5": "auctions with most bids, sliding windows",
    "q7": "highest bids per window",
    "q8": "new persons who sell, per window",
    "q9": "winning bids",
    "q11": "bids per user and session",
    "q12": "bids per user, processing time",
    "q14": "bids filtered and computed",
    "q15": "distinct bidders and auctions per day",
    "q16": "the same per channel",
    "q17": "bids and prices per auction and day",
    "q18": "last bid per bidder and auction",
    "q20": "bids joined with auctions",
    "q21": "channel numbers",
    "q22": "directories of URLs",
}
OPERATORS = {
    "running_aggregate": "count and sum of 1 M keys, a row for each row",
    "drop_duplicates": "one row in four repeats one of the last second; 10 s are remembered, 1 M rows",
    "interval_join": "6.7 M rows with 3.3 M of the same 1 M keys in the next 10 s",
    "asof_join": "9.1 M rows with the newest of 0.9 M versions of 10,000 keys",
}
NOT_ON_SPARK = ("q9", "q12", "q15", "q16", "q18", "q20")
"""What is not a few lines of Structured Streaming."""

SLOW = {"q4": ("--events", "400000")}
"""What would take Structured Streaming longer than a run may. A part of a query's result cannot be checked, so it
has fewer events instead of a time limit."""


def nexmark(query: str) -> tuple[Contender, ...]:
    native = spark(query, *SLOW.get(query, ()), engine="Structured Streaming, native")
    return ours("nexmark", "--query", query), flink(query), *(() if query in NOT_ON_SPARK else once(native))


def nexmark_in_files(query: str) -> tuple[Contender, ...]:
    theirs = spark(query, "--variant", "parquet", *SLOW.get(query, ()))
    mine = ours("nexmark", "--query", query, "--source", "parquet")
    return mine, flink(query, "--variant", "parquet"), *(() if query in NOT_ON_SPARK else once(theirs))


LAKEHOUSE = {
    "delta": "5 M JSON records from Kafka into a Delta table, exactly once, a checkpoint each second; then 50,000 records/s with a "
    "checkpoint every 250 ms: from when a record is made until the table's version that has it is there.",
    "iceberg": "As `lakehouse_delta`, into an Iceberg table.",
    "delta_changes": "4 M updates and deletes of 500,000 keys from Kafka, merged into a Delta table, a checkpoint each second.",
    "iceberg_changes": "As `lakehouse_delta_changes`, into an Iceberg table.",
}
LAKEHOUSE_FIGURES = (
    EVENTS_PER_S,
    Figure("delay_mean_ms", "mean delay ms", more_is_better=False),
    Figure("delay_p99_ms", "p99 ms", is_compared=False),
)


LATENCY_KAFKA = {
    "stateless": "10,000 records/s of 1.2 KB from 8 partitions of Kafka, encoded as base64, into others, one broker on the same two "
    "cores: from when a record is handed to the producer until a reader of committed records has it. Checkpoints every second "
    "at least once, every 100 ms exactly once; real-time mode's batches take 5 s, its documented minimum.",
    "count": "The same, with a count per key, a row for each record.",
    "join": "The same, joined with a table of 10,000 rows.",
}


def latency_kafka(query: str) -> Workload:
    """Each guarantee of midstream and Flink is a row, and each mode of Spark, at least once."""
    rows: list[Contender] = []
    bases: list[tuple[str, str]] = []
    for guarantee in ("at_least_once", "exactly_once"):
        what, part = guarantee.replace("_", " "), (guarantee,)
        rows.append(ours("latency_kafka", "--query", query, engine=f"midstream, {what}", part=part))
        rows.append(replace(flink("latency_kafka", "--variant", query, engine=f"Flink Java, {what}"), part=part))
        bases.append((f"Flink Java, {what}", f"midstream, {what}"))
    if query != "count":
        for variant, mode in ((query, "micro-batches"), (f"{query}-real-time", "real-time mode")):
            engine = f"Structured Streaming, {mode}"
            one = spark("latency_kafka", "--variant", variant, engine=engine, needs=(".peers/spark/jars",))
            rows.append(replace(one, part=("at_least_once",)))
            bases.append((engine, "midstream, at least once"))
    if query == "stateless":
        alone = ours("latency_kafka", "--query", query, engine="a topic and nothing else", part=("topic_alone",))
        rows.append(replace(alone, is_engine=False))
        bases.append(("a topic", "midstream, at least once"))
    return Workload(
        LATENCY_KAFKA[query], (replace(P50, is_compared=False), P99), tuple(map(beside_a_broker, rows)), tuple(bases)
    )


def lakehouse(query: str) -> tuple[Contender, ...]:
    streaming = Contender(
        "Structured Streaming",
        (PYTHON, "benchmarks/peers/spark/lakehouse.py", query),
        needs=(".peers/spark/lakehouse-jars",),
    )
    flinks = (flink("lakehouse"),) if query == "iceberg" else ()
    return tuple(beside_a_broker(each) for each in (ours("lakehouse", "--query", query), *flinks, streaming))


ALIGNED = ("--max-seconds", "20")
"""Aligned checkpoints wait for the sink: so long to warm up, and so long measured."""

PLAN: dict[str, Workload] = {
    "window": Workload(
        "20 M events through a keyed exchange into tumbling windows of 10 s, 10,000 keys, a checkpoint each second.",
        (EVENTS_PER_S, MEMORY),
        (
            ours("window"),
            flink("window"),
            *once(
                flink("window", "--cluster", "local", engine="Flink Java, exchange in memory"),
                pyflink("window", "process", "PyFlink, process mode"),
                pyflink("window", "thread", "PyFlink, thread mode"),
                bytewax("window", "--variant", "stateful", "--max-seconds", "10", engine="Bytewax, a logic per key"),
            ),
            spark("window", engine="Structured Streaming, native"),
            bytewax("window", engine="Bytewax, columns by hand"),
            loops("window", "exchange", "loop with an exchange (numpy, Arrow)"),
            loops("window", "polars", "loop without one (polars)"),
        ),
        limit="splitting and sending what remains after combining, then the generator",
    ),
    "window_keys": Workload(
        "as `window`, with 1 M keys.",
        (EVENTS_PER_S, MEMORY),
        (ours("window", "--keys", "1000000"), flink("window_keys")),
    ),
    "udf": Workload(
        "4 M events through a Python function, dict to dict, then keyed windows.",
        (EVENTS_PER_S,),
        (
            ours("udf"),
            spark("udf", "--variant", "map-in-arrow", engine="Structured Streaming, map-in-arrow"),
            *once(
                *(
                    spark("udf", "--variant", variant, "--max-seconds", "20", engine=f"Structured Streaming, {variant}")
                    for variant in ("udf", "arrow-udf", "pandas-udf", "map-in-pandas")
                ),
                pyflink("udf", "process", "PyFlink, process mode"),
                pyflink("udf", "thread", "PyFlink, thread mode"),
                pyflink("udf", "table", "PyFlink Table API"),
                pyflink("udf", "table_pandas", "PyFlink Table API, pandas"),
                bytewax("udf", "--max-seconds", "10"),
            ),
            loops("udf", "numpy", "plain loops (columns by numpy)"),
            loops("udf", "python", "plain loops (all Python)"),
        ),
    ),
    "keyed_process": Workload(
        "4 M events of 1 M keys: a total per key in state; a timer emits and clears it after an hour of event time; a checkpoint "
        "each second.",
        (EVENTS_PER_S, MEMORY),
        (
            ours("keyed_process"),
            flink("keyed_process"),
            *once(
                pyflink("keyed_process", "process", "PyFlink, process mode"),
                pyflink("keyed_process", "thread", "PyFlink, thread mode"),
            ),
            loops("keyed_process", "numpy", "plain loops (a dict and a heap)"),
        ),
        limit="Python: three quarters of the slots' time are the function, its state and its timers",
    ),
    "strings": Workload(
        "10 M events with text keys and 100 bytes of text.",
        (EVENTS_PER_S, MEMORY),
        (
            ours("strings"),
            flink("strings"),
            spark("strings", engine="Structured Streaming, native"),
            bytewax("strings", engine="Bytewax, columns by hand"),
        ),
    ),
    "sliding": Workload(
        "10 M events, 1 M keys, windows of 10 s every 2 s.",
        (EVENTS_PER_S, MEMORY, Figure("bytes_per_key_and_window", "bytes per key and window", is_compared=False)),
        (
            ours("sliding"),
            *once(
                flink("sliding", "--heap", "8g", "--max-seconds", "30"),
                spark("sliding", "--max-seconds", "30", engine="Structured Streaming, native"),
            ),
        ),
    ),
    **{
        f"exchange-{parallelism}": Workload(
            f"keyed exchange, {parallelism} subtasks.",
            (EVENTS_PER_S, MEMORY),
            (
                ours("exchange", "--parallelism", str(parallelism)),
                flink("exchange", "--parallelism", str(parallelism)),
            ),
        )
        for parallelism in (2, 4, 8)
    },
    "kafka": Workload(
        "5 M JSON records from Kafka into tumbling windows of 10 s, 10,000 keys, results as JSON to Kafka; exactly once unless "
        "stated, a checkpoint each second. One broker on the same two cores.",
        (EVENTS_PER_S, Figure("latency_p50_ms", "p50 ms at 5,000 rows/s", is_compared=False)),
        tuple(
            beside_a_broker(contender)
            for contender in (
                ours("kafka"),
                flink("kafka"),
                spark("kafka", engine="Structured Streaming, at least once", needs=(".peers/spark/jars",)),
            )
        ),
        limit="the reader, half of whose time is parsing",
    ),
    **{
        f"lakehouse_{query}": Workload(what, LAKEHOUSE_FIGURES[: 1 if "changes" in query else 3], lakehouse(query))
        for query, what in LAKEHOUSE.items()
    },
    "latency": Workload(
        "20,000 rows/s, from creation to the sink after a keyed exchange, an exactly-once checkpoint each second. Sources create "
        "rows every millisecond, Structured Streaming's every ten.",
        (P99, replace(P50, is_compared=False)),
        (
            ours("latency"),
            flink("latency", "--variant", "1", engine="Flink Java, buffers wait 1 ms"),
            *once(
                flink("latency", engine="Flink Java, by default"),
                spark("latency", engine="Structured Streaming, micro-batches"),
                spark("latency", "--variant", "real-time", engine="Structured Streaming, real-time mode"),
                bytewax("latency"),
                loops("latency", "socket", "a socket and nothing else"),
            ),
        ),
    ),
    **{f"latency_kafka_{query}": latency_kafka(query) for query in LATENCY_KAFKA},
    "checkpoint": Workload(
        "Checkpoints one after the other in front of a sink that takes 1 ms per row; parallelism 4, buffers of 4 KiB.",
        (Figure("checkpoints_per_s", "checkpoints/s"), replace(P50, is_compared=False), P99),
        (
            ours("checkpoint", engine="midstream, aligned", part=("aligned",)),
            ours("checkpoint", engine="midstream, unaligned", part=("unaligned",)),
            ours("checkpoint", engine="midstream, unaligned after 1 ms", part=("unaligned_1",)),
            *once(
                flink("checkpoint", "--variant", "aligned", *ALIGNED, engine="Flink Java, aligned"),
                flink("checkpoint", "--variant", "aligned_debloat", *ALIGNED, engine="Flink Java, aligned, debloated"),
                flink(
                    "checkpoint",
                    "--variant",
                    "aligned_debloat_50",
                    *ALIGNED,
                    engine="Flink Java, aligned, debloated to 50 ms",
                ),
            ),
            flink("checkpoint", "--variant", "unaligned", engine="Flink Java, unaligned"),
            flink("checkpoint", "--variant", "unaligned_1", engine="Flink Java, unaligned after 1 ms"),
        ),
        (
            ("Flink Java, aligned", "midstream, aligned"),
            ("Flink Java, unaligned after", "midstream, unaligned after 1 ms"),
            ("Flink Java, unaligned", "midstream, unaligned"),
        ),
    ),
    "recovery": Workload(
        "Buffers for about 256 MiB in flight; a failure.",
        (
            Figure("first_checkpoint_s", "first checkpoint s", more_is_better=False),
            Figure("first_row_s", "first row s", more_is_better=False),
            Figure("drained_s", "drained s", is_compared=False),
            Figure("in_flight_mib", "in flight MiB", is_compared=False),
        ),
        once(
            ours("recovery", part=("same",)),
            flink("recovery", "--variant", "during", engine="Flink Java, checkpoints during recovery"),
            flink("recovery", "--variant", "off", engine="Flink Java, by default"),
        ),
    ),
    **{
        case: Workload(what, (EVENTS_PER_S, MEMORY), (ours("operators", "--query", case), flink(case)))
        for case, what in OPERATORS.items()
    },
    **{query: Workload(what, (EVENTS_PER_S, MEMORY), nexmark(query)) for query, what in QUERIES.items()},
    **{f"{query}-parquet": Workload("", (EVENTS_PER_S, MEMORY), nexmark_in_files(query)) for query in QUERIES},
}

TOGETHER: dict[str, tuple[str, ...]] = {
    "throughput": ("window_keys", "strings", "sliding", "exchange-2", "exchange-4", "exchange-8"),
    "operators": tuple(OPERATORS),
    "nexmark": tuple(QUERIES),
    "nexmark_parquet": tuple(f"{query}-parquet" for query in QUERIES),
}
"""Workloads that share one table of RESULTS.md, in which each has a row."""
