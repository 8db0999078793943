"""The parameters of `midstream simulate`, and which of them can be combined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from midstream.engine.core.errors import ConfigError
from midstream.cli.output import Answer
from midstream.cli.parameters import Json, refuse, whole_number

OF_A_JOB = Group("Options for a job file", sort_key=2)
OF_A_TRACE = Group("Options for the trace of one run", sort_key=3)
OWN = Group("Options for the simulator's own jobs, which test midstream itself", sort_key=4)


def simulate(  # noqa: PLR0913 - one flag each
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
    """Run a job through simulated failures, restarts and rescales, and check that its output stays the same.

    Its sources are replaced by recorded rows and its sinks by ones that record theirs; everything else is the engine
    itself, in one thread with a simulated clock. If the output differs, the command shows the shortest schedule that
    causes this, and the reason. Without the file of a job, it runs the simulator's own jobs, and counts runs that lose
    or duplicate rows or get stuck.

    Parameters
    ----------
    job
        A Python file that makes one Environment.
    topology
        The shape of the job; "random" (the default) is a different one for every seed.
    seeds
        A:B, without B; each seed is one run. Default: 0:100, or 0:200 for the file of a job.
    seed
        Run only this seed.
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
    parallelism
        Subtasks per operator; by default the seed decides.
    rescale_to
        The parallelism after a restart; by default the seed decides.
    faults
        Kinds of faults, separated by commas, or none; by default all.
    rows
        UID=FILE, a Parquet, CSV or JSON lines file with the rows of the source with that uid; may be given several
        times. For the simulator's own jobs: the number of rows of a run.
    rows_max
        The number of rows to read from each source without given rows (200).
    latest
        SINK=KEY[,KEY], for a sink that gets a stream of updates: only the last row of each key counts.
    ignore
        SINK=COLUMN[,COLUMN], columns that may differ.
    py_files
        Python files, package directories and zips that the job imports, separated by commas.
    jobs
        The number of processes; by default one per core.
    seconds
        Begin no further run after this time; with --mutations: for each of them, in processor time.
    coverage
        Show which states of each state machine have met which events, and which never have.
    mutations
        Instead of runs: reintroduce known bugs one by one, all or the named ones, and show how many seeds it takes to
        find each, in scenarios made for it and in random ones. The bugs are
        only in a checkout of the source.
    seeds_max
        With --mutations: the number of random seeds (2,000) that a bug may survive; 0: only scenarios made for it.
    """
    from midstream_lab.simulate import Filters, Scenarios
    from midstream_lab.simulate_command import run_mutations, run_seeds, show_trace

    filters = Filters(channel, checkpoint, pattern, tail)

    choice = {"--seed": seed, "--seeds": seeds, "--seconds": seconds, "--coverage": coverage or None}
    filtered = {"--channel": channel, "--checkpoint": checkpoint, "--pattern": pattern, "--tail": tail}
    if job is not None:
        from midstream.cli.commands.simulate import JobOptions, simulate_job

        refuse(
            {
                "--topology": topology,
                "--faults": faults,
                "--coverage": coverage or None,
                "--mutations": mutations,
                "--seeds-max": seeds_max,
            },
            "applies to the simulator's own jobs, not to the file of a job",
        )
        if seed is not None or trace:
            refuse({"--seeds": seeds}, "give either this or --seed, and --trace with --seed")
        if not trace:
            refuse(filtered, "filters the lines of a trace: add --trace")
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
        "applies to a job in a file: give the file",
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
            "--mutations determines the seeds and jobs itself",
        )
        return run_mutations(mutations, seeds_max, jobs, seconds, json)
    refuse({"--seeds-max": seeds_max}, "limits the search for reintroduced bugs: add --mutations")
    scenarios = Scenarios(
        topology=topology or "random",
        parallelism=parallelism,
        rescale_to=rescale_to,
        faults=faults,
        rows=_count_of(rows),
    )
    if trace:
        refuse({**choice, "--seed": None, "--jobs": jobs}, "--trace shows a single run, that of --seed")
        return show_trace(scenarios, seed, filters)
    refuse(filtered, "filters the lines of a trace: add --trace")
    if seed is not None:
        refuse({"--seeds": seeds}, "give either this or --seed")
    chosen = str(seed) if seed is not None else seeds or "0:100"
    return run_seeds(scenarios, chosen, jobs=jobs, seconds=seconds, coverage=coverage, silent=json)


def _count_of(rows: Sequence[str] | None) -> int | None:
    """Return the number given as --rows. Raises ConfigError."""
    if rows is None:
        return None
    try:
        [count] = map(int, rows)
    except ValueError:
        raise ConfigError(f"--rows: {' '.join(rows)!r} is not a whole number") from None
    return count
