"""What `compare.py` runs: per workload the engines, the command of each, and which of their figures count."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIDSTREAM = ".venv/bin/midstream"
PYTHON = ".venv/bin/python"


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
    return Contender(engine, (MIDSTREAM, "bench", name, "--json", *options), part)


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
    "q0": "All bids pass.",
    "q1": "Bids with their price in another currency.",
    "q2": "Bids on some auctions.",
    "q3": "Auctions of a category joined with sellers of three states, without bounds in time.",
    "q4": "Average of the winning bids per category, per auction as it ends.",
    "q5": "The auctions with the most bids in windows of 10 s every 2 s.",
    "q7": "The highest bids of every 10 s.",
    "q8": "Persons who opened an auction in the 10 s in which they came.",
    "q9": "Auctions as they end, with the bid that has won.",
    "q11": "Bids of each user per session, 10 s apart.",
    "q12": "Bids of each user in 10 s by the wall clock.",
    "q14": "Bids of some prices in another currency, with the time of day in words and a character counted.",
    "q15": "Bids, distinct bidders and distinct auctions of a day, in all and by three ranks of price.",
    "q16": "The same for each of 10,004 channels.",
    "q17": "Bids and prices of each auction on a day.",
    "q18": "The last bid of each bidder for each auction on a day.",
    "q20": "The bids for auctions of one category, with their auction.",
    "q21": "Bids with their channel's number, by its name or out of their URL.",
    "q22": "Bids with the three directories of their URL.",
}
NOT_ON_SPARK = ("q9", "q12", "q15", "q16", "q18", "q20")
"""What is not a few lines of Structured Streaming."""

SLOW = {"q4": ("--events", "400000")}
"""What would take Structured Streaming longer than a run may. A part of a query's result cannot be checked, so it
has fewer events instead of a time limit."""


def nexmark(query: str) -> tuple[Contender, ...]:
    native = spark(query, *SLOW.get(query, ()), engine="Structured Streaming, native")
    return ours("nexmark", "--query", query), flink(query), *(() if query in NOT_ON_SPARK else once(native))


BINDS = {
    "q0": "generating the events: half of the slots' time; then polars' expressions",
    "q1": "generating the events: half of the slots' time or more; then polars' expressions",
    "q2": "generating the events: half of the slots' time or more; then polars' expressions",
    "q3": "polars' expressions and filters, then the join's function",
    "q4": "the query's functions, then splitting and sending",
    "q5": "group_by, over five panes, and merging them",
    "q7": "generating the events, then polars' expressions",
    "q8": "group_by",
    "q9": "generating the texts, the query's functions, and polars' expressions",
    "q14": "polars' expressions, then generating the texts",
    "q15": "generating the events: half of the slots' time; then group_by",
    "q16": "group_by of few bids for each of many channels",
    "q17": "group_by, then generating the events",
    "q18": "group_by of texts, and turning them from Arrow into polars and back",
    "q20": "generating the texts, the query's functions, and turning texts from Arrow into polars and back",
    "q21": "polars' expressions over texts: more than half of the slots' time",
    "q22": "polars' expressions over texts, then generating the texts",
}
"""What takes most of the slots' time in a query of NEXMark."""

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
        limit="splitting and sending what is left after combining, then the generator",
    ),
    "window_keys": Workload(
        "20 M events of 1 M keys through a keyed exchange into tumbling windows of 10 s, a checkpoint each second.",
        (EVENTS_PER_S, MEMORY),
        (ours("window", "--keys", "1000000"), flink("window_keys")),
        limit="group_by, and a result for nearly every event",
    ),
    "udf": Workload(
        "4 M events through a Python function, dict to dict, then keyed windows.",
        (EVENTS_PER_S, MEMORY),
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
        limit="the function, which takes and returns a dict for each row",
    ),
    "keyed_process": Workload(
        "4 M events of 1 M keys, four hours of event time: a running total per key in state, which a timer puts out and clears "
        "an hour after the key's first event; a checkpoint each second.",
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
        limit="Python, for each row and timer: three quarters of the slots' time are the function, its state and its timers",
    ),
    "strings": Workload(
        "10 M events with text keys and 100 bytes of text each: count, sum, and the largest text, per key and window.",
        (EVENTS_PER_S, MEMORY),
        (
            ours("strings"),
            flink("strings"),
            spark("strings", engine="Structured Streaming, native"),
            bytewax("strings", engine="Bytewax, columns by hand"),
        ),
        limit="gathering the texts and building polars' views of them",
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
        limit="group_by, over five panes",
    ),
    **{
        f"exchange-{parallelism}": Workload(
            f"The keyed exchange alone, {parallelism} to {parallelism} subtasks on two cores.",
            (EVENTS_PER_S, MEMORY),
            (
                ours("exchange", "--parallelism", str(parallelism)),
                flink("exchange", "--parallelism", str(parallelism)),
            ),
        )
        for parallelism in (2, 4, 8)
    },
    "kafka": Workload(
        "5 M JSON records from Kafka through a keyed exchange into tumbling windows of 10 s, 10,000 keys; the results as "
        "JSON to Kafka, a checkpoint each second, exactly once except where the table says otherwise. One broker, on the "
        "same two cores.",
        (EVENTS_PER_S, MEMORY, Figure("latency_p50_ms", "p50 ms at 5,000 rows/s", more_is_better=False)),
        tuple(
            beside_a_broker(contender)
            for contender in (
                ours("kafka"),
                flink("kafka"),
                spark("kafka", engine="Structured Streaming, at least once", needs=(".peers/spark/jars",)),
            )
        ),
        limit="the reader: half of all processor time, and half of that is parsing",
    ),
    "latency": Workload(
        "20,000 rows/s, each from when its source made it to the sink behind a keyed exchange, an exactly-once "
        "checkpoint each second. Sources make rows each millisecond, Structured Streaming's each ten.",
        (P99, P50),
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
    "checkpoint": Workload(
        "Checkpoints one after the other behind a sink that takes 1 ms a row, parallelism 4, buffers of 4 KiB.",
        (Figure("checkpoints_per_s", "checkpoints/s"), P50, P99),
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
        limit="the slice of the sink that a barrier waits for: rows of 1 ms",
    ),
    "recovery": Workload(
        "As much in flight as the engine holds (up to 256 MiB), a failure, and the way back.",
        (
            Figure("first_checkpoint_s", "first checkpoint s", more_is_better=False),
            Figure("first_row_s", "first row s", more_is_better=False),
            Figure("drained_s", "drained s", more_is_better=False),
            Figure("in_flight_mib", "in flight MiB", is_compared=False),
        ),
        once(
            ours("recovery", part=("same",)),
            flink("recovery", "--variant", "during", engine="Flink Java, checkpoints during recovery"),
            flink("recovery", "--variant", "off", engine="Flink Java, by default"),
        ),
    ),
    **{
        query: Workload(
            f"NEXMark {query}: {what}",
            (EVENTS_PER_S, MEMORY),
            nexmark(query),
            limit=BINDS.get(query, ""),
        )
        for query, what in QUERIES.items()
    },
}
