"""The parameters of `midstream simulate`, and which of them go together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from midstream.core.errors import ConfigError
from midstream.ui.answer import Answer
from midstream.ui.parameters import Json, refuse, whole_number

OF_A_JOB = Group("Of a job file", sort_key=2)
OF_A_TRACE = Group("Of the trace of one run", sort_key=3)
OWN = Group("Of the simulator's own jobs, which test midstream itself", sort_key=4)


def simulate(
    job: Path | None = None,
    /,
    *,
    topology: Annotated[str | None, Parameter(group=OWN)] = None,
    seeds: str | None = None,
    seed: Annotated[int | None, Parameter(converter=whole_number)] = None,
    trace: Annotated[bool, Parameter(negative=(), group=OF_A_TRACE)] = False,
    channel: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    checkpoint: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    pattern: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    tail: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rescale_to: Annotated[int | None, Parameter(converter=whole_number)] = None,
    faults: Annotated[str | None, Parameter(group=OWN)] = None,
    rows: Annotated[list[str] | None, Parameter(negative=(), group=OF_A_JOB)] = None,
    rows_max: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_JOB)] = None,
    latest: Annotated[list[str] | None, Parameter(negative=(), group=OF_A_JOB)] = None,
    ignore: Annotated[list[str] | None, Parameter(negative=(), group=OF_A_JOB)] = None,
    py_files: Annotated[str | None, Parameter(group=OF_A_JOB)] = None,
    jobs: Annotated[int | None, Parameter(converter=whole_number)] = None,
    seconds: float | None = None,
    coverage: Annotated[bool, Parameter(negative=(), group=OWN)] = False,
    mutations: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=(), group=OWN)] = None,
    seeds_max: Annotated[int | None, Parameter(converter=whole_number, group=OWN)] = None,
    json: Json = False,
) -> Answer:
    """Put a job through failures, restarts and rescales of every kind, and check that its output is the same without.

    Its sources are replaced by recorded rows and its sinks by ones that keep book; everything else is the engine itself,
    in one thread with a simulated clock. If the output differs, you get the shortest schedule with which it does, and
    the reason. Without the file of a job the simulator's own jobs are run, and what is lost, doubled or stuck is counted.

    Parameters
    ----------
    job
        A Python file that makes one Environment.
    topology
        The shape of the job; "random" (the default) makes another one for every seed.
    seeds
        A:B, B not included; each seed is one run. Default: 0:100, of a job file 0:200.
    seed
        Just this one.
    trace
        Show every event of the run of --seed.
    channel
        Only what happens to channel edge:producer:consumer, such as 3:0:1 or 3:: (all of edge 3).
    checkpoint
        Only what has to do with the checkpoint of that number.
    pattern
        Only lines in which this regular expression is found.
    tail
        Only the last so many lines.
    parallelism
        Subtasks per operator; by default the seed decides.
    rescale_to
        The parallelism after a restart; by default the seed decides.
    faults
        Kinds of faults, separated by commas, or none; by default all.
    rows
        UID=FILE, a Parquet, CSV or JSON lines file with the rows of the source with that uid; may be given several
        times. Of the simulator's own jobs: how many rows a run has.
    rows_max
        How many rows are read from each source that has none given (200).
    latest
        SINK=KEY[,KEY], for a sink that gets a stream of updates: only the last row of each key counts.
    ignore
        SINK=COLUMN[,COLUMN], columns that may differ.
    py_files
        Python files, packages' directories and zips that it imports, separated by commas.
    jobs
        How many processes work; by default one per core.
    seconds
        Begin no further run after so long; with --mutations: for each of them, in processor time.
    coverage
        Say which state of each state machine has met which event, and which never.
    mutations
        Instead: put known bugs back one by one, all or those named, and say how many seeds it takes to find each: in
        a scenario made for it, and in random ones. The bugs are in a checkout of the source only.
    seeds_max
        Of --mutations: how many random seeds (2,000) a bug may survive; 0: only the scenarios made for them.
    """
    from midstream.ui.simulating import Filters, Scenarios, run_mutations, run_seeds, show_trace

    choice = {"--seed": seed, "--seeds": seeds, "--seconds": seconds, "--coverage": coverage or None}
    filtered = {"--channel": channel, "--checkpoint": checkpoint, "--pattern": pattern, "--tail": tail}
    if job is not None:
        from midstream.ui.simulating_jobs import JobOptions, simulate_job

        refuse(
            {
                "--topology": topology,
                "--faults": faults,
                "--coverage": coverage or None,
                "--mutations": mutations,
                "--seeds-max": seeds_max,
            },
            "is for the simulator's own jobs, not for the file of a job",
        )
        if seed is not None or trace:
            refuse({"--seeds": seeds}, "give either this or --seed, and --trace with --seed")
        if not trace:
            refuse(filtered, "chooses lines of a trace: add --trace")
        filters = Filters(channel=channel, checkpoint=checkpoint, pattern=pattern, tail=tail)
        options = JobOptions(
            path=job,
            rows=tuple(rows or ()),
            rows_max=rows_max,
            parallelism=parallelism,
            rescale_to=rescale_to,
            latest=tuple(latest or ()),
            ignore=tuple(ignore or ()),
            py_files=py_files,
            jobs=jobs,
            seconds=seconds,
        )
        return simulate_job(options, seeds, seed, filters if trace else None, silent=json)
    refuse(
        {"--rows-max": rows_max, "--latest": latest, "--ignore": ignore, "--py-files": py_files},
        "is about the job in a file: name the file",
    )
    shape = {
        "--topology": topology,
        "--parallelism": parallelism,
        "--rescale-to": rescale_to,
        "--faults": faults,
        "--rows": rows,
    }
    if mutations is not None:
        refuse(
            {**choice, **shape, **filtered, "--seconds": None, "--trace": trace or None},
            "--mutations says which seeds and jobs it tries",
        )
        return run_mutations(mutations, seeds_max, jobs, seconds, json)
    refuse({"--seeds-max": seeds_max}, "says how long to look for bugs that were put back: add --mutations")
    scenarios = Scenarios(
        topology=topology or "random",
        parallelism=parallelism,
        rescale_to=rescale_to,
        faults=faults,
        rows=_count_of(rows),
    )
    if trace:
        refuse({**choice, "--seed": None, "--jobs": jobs}, "--trace shows one run, that of --seed")
        return show_trace(scenarios, seed, Filters(channel=channel, checkpoint=checkpoint, pattern=pattern, tail=tail))
    refuse(filtered, "chooses lines of a trace: add --trace")
    if seed is not None:
        refuse({"--seeds": seeds}, "give either this or --seed")
    chosen = str(seed) if seed is not None else seeds or "0:100"
    return run_seeds(scenarios, chosen, jobs=jobs, seconds=seconds, coverage=coverage, silent=json)


def _count_of(rows: Sequence[str] | None) -> int | None:
    """Of --rows where it is a number. Raises ConfigError."""
    if rows is None:
        return None
    try:
        [count] = map(int, rows)
    except ValueError:
        raise ConfigError(f"--rows: {' '.join(rows)!r} is not a whole number") from None
    return count
