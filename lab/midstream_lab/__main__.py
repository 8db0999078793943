"""The commands of the laboratory: `python -m midstream_lab simulate`, `mutations` and `bench`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Group, Parameter

from midstream.cli.main import main
from midstream.cli.output import Answer
from midstream.cli.parameters import Json, refuse, whole_number

lab = App(
    name="python -m midstream_lab",
    help="Tests and measurements of midstream itself.",
    version_flags=[],
    result_action="return_value",
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
OF_A_TRACE = Group("Options for the trace of one run", sort_key=2)


@lab.command
def simulate(  # noqa: PLR0913 - one flag each
    *,
    topology: str | None = None,
    seeds: str | None = None,
    seed: Annotated[int | None, Parameter(converter=whole_number)] = None,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rescale_to: Annotated[int | None, Parameter(converter=whole_number)] = None,
    faults: str | None = None,
    rows: Annotated[int | None, Parameter(converter=whole_number)] = None,
    jobs: Annotated[int | None, Parameter(converter=whole_number)] = None,
    seconds: float | None = None,
    coverage: Annotated[bool, Parameter(negative=())] = False,
    trace: Annotated[bool, Parameter(negative=(), group=OF_A_TRACE)] = False,
    channel: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    checkpoint: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    pattern: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    tail: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    json: Json = False,
) -> Answer:
    """Run the simulator's own jobs, and count runs that lose or duplicate rows or get stuck.

    Parameters
    ----------
    topology
        The shape of the job; "random" (the default) is a different one for every seed.
    seeds
        A:B, without B; each seed is one run. Default: 0:100.
    seed
        Run only this seed.
    parallelism
        Subtasks per operator; by default the seed decides.
    rescale_to
        The parallelism after a restart; by default the seed decides.
    faults
        Kinds of faults, separated by commas, or none; by default all.
    rows
        The number of rows of a run.
    jobs
        The number of processes; by default one per core.
    seconds
        Begin no further run after this time.
    coverage
        Show which states of each state machine have met which events, and which never have.
    trace
        Show every event of the run of --seed.
    channel
        Show only events of channel edge:producer:consumer, such as 3:0:1 or 3:: (all of edge 3).
    checkpoint
        Show only events of the checkpoint with this number.
    pattern
        Show only lines that match this regular expression.
    tail
        Show only this many of the last lines.
    """
    from midstream.simulation.trace import Filters
    from midstream_lab.simulate import Scenarios
    from midstream_lab.simulate_command import run_seeds, show_trace

    scenarios = Scenarios(
        topology=topology or "random",
        parallelism=parallelism,
        rescale_to=rescale_to,
        faults=faults,
        rows=rows,
    )
    if trace:
        choice = {"--seeds": seeds, "--seconds": seconds, "--coverage": coverage or None, "--jobs": jobs}
        refuse(choice, "--trace shows a single run, that of --seed")
        return show_trace(scenarios, seed, Filters(channel, checkpoint, pattern, tail))
    filtered = {"--channel": channel, "--checkpoint": checkpoint, "--pattern": pattern, "--tail": tail}
    refuse(filtered, "filters the lines of a trace: add --trace")
    if seed is not None:
        refuse({"--seeds": seeds}, "give either this or --seed")
    chosen = str(seed) if seed is not None else seeds or "0:100"
    return run_seeds(scenarios, chosen, jobs=jobs, seconds=seconds, coverage=coverage, silent=json)


@lab.command
def mutations(
    *names: str,
    seeds_max: Annotated[int | None, Parameter(converter=whole_number)] = None,
    jobs: Annotated[int | None, Parameter(converter=whole_number)] = None,
    seconds: float | None = None,
    json: Json = False,
) -> Answer:
    """Put known bugs back one by one, and show how many seeds it takes to find each.

    Parameters
    ----------
    names
        The known bugs; by default all.
    seeds_max
        The number of random seeds (2,000) that a bug may survive; 0: only scenarios made for it.
    jobs
        The number of processes; by default one per core.
    seconds
        The processor time for each bug.
    """
    from midstream_lab.simulate_command import run_mutations

    return run_mutations(names, seeds_max, jobs, seconds, json)


@lab.command
def bench(
    name: str,
    /,
    *,
    events: Annotated[int | None, Parameter(converter=whole_number)] = None,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    keys: Annotated[int | None, Parameter(converter=whole_number)] = None,
    columns: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rate: Annotated[int | None, Parameter(converter=whole_number)] = None,
    query: str | None = None,
    source: str | None = None,
    backlog: Annotated[int | None, Parameter(converter=whole_number)] = None,
    state: Annotated[int | None, Parameter(converter=whole_number)] = None,
    slots: str = "spark",
    json: Json = False,
) -> Answer:
    """Run a benchmark.

    Parameters
    ----------
    name
            window, udf, lookup, keyed_process, strings, sliding, exchange, latency, checkpoint, recovery, large_state, nexmark,
        operators, kafka, latency_kafka, lakehouse, or simulate.
        events
        The number of events; with fewer than the default the result is not comparable.
    parallelism
        Slots, and subtasks of each operator (2). Not for latency, checkpoint, recovery and large_state.
    keys
        The number of keys, for window (10,000) and sliding (1,000,000).
    columns
        The number of columns that are summed, for window (1).
    rate
        Rows per second, for latency (20,000), kafka (5,000), latency_kafka (10,000) and lakehouse (50,000).
    query
        The query, for nexmark: q0 to q5, q7 to q9, q11, q12, q14 to q18, q20, q21 or q22; by default all, one after the
        other. For operators: running_aggregate (default), drop_duplicates, interval_join or asof_join. For lakehouse:
        delta (default), iceberg, delta_changes or iceberg_changes. For latency_kafka: stateless (default), count or join.
    source
        Where the events come from, for nexmark: generator (default) or parquet, files that the first run writes.
    backlog
        MiB in flight when the job fails, for recovery (256).
    state
        MiB of state, for large_state (256).
    slots
        "spark": slots on an embedded Spark session; "process": plain processes, without a JVM.
    """
    from midstream_lab.bench.command import run_bench

    given = {"events": events, "parallelism": parallelism, "keys": keys, "columns": columns, "rate": rate}
    return run_bench(name, slots, json, {**given, "query": query, "source": source, "backlog": backlog, "state": state})


if __name__ == "__main__":
    sys.exit(main(commands=lab))
