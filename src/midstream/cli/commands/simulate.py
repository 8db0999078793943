"""`midstream simulate JOB.py`: a user's job through failures, and the report if its output differs."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from midstream.cli import formatting
from midstream.cli.json_types import SimulatedRuns, TracedRun
from midstream.cli.output import Answer, Exit
from midstream.cli.parameters import module_paths
from midstream.cli.progress import progress_line
from midstream.engine.core.error_rows import counted
from midstream.engine.core.errors import ConfigError
from midstream.simulation.seeds import parse_seeds
from midstream.simulation.trace import Filters, trace_patterns
from midstream.testing.simulate import campaign_of
from midstream.testing.simulation.campaign import Campaign, Report
from midstream.testing.simulation.job_scenario import REFERENCE
from midstream.testing.simulation.simulated_run import run_job
from midstream.testing.simulation.verdict import judge

SEEDS = "0:200"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options as they were given."""

    path: Path
    rows: tuple[str, ...]
    rows_max: int | None
    parallelism: int | None
    rescale_to: int | None
    latest: tuple[str, ...]
    ignore: tuple[str, ...]
    py_files: str | None
    jobs: int | None
    seconds: float | None

    @property
    def command(self) -> str:
        """The command that simulates the job again, except for the seed."""
        parts = ["midstream", "simulate", str(self.path)]
        for name, values in (("--rows", self.rows), ("--latest", self.latest), ("--ignore", self.ignore)):
            parts += [part for value in values for part in (name, value)]
        for name, value in (
            ("--rows-max", self.rows_max),
            ("--parallelism", self.parallelism),
            ("--rescale-to", self.rescale_to),
            ("--py-files", self.py_files),
        ):
            parts += [] if value is None else [name, str(value)]
        return shlex.join(parts)


def simulate_job(
    options: JobOptions, seeds: str | None, seed: int | None, trace: Filters | None, silent: bool
) -> Answer:
    """Simulate a job. Raises MidstreamError for one that cannot be simulated; output that differs is an answer with
    status 1.
    """
    if options.seconds is not None and options.seconds <= 0:
        raise ConfigError(f"--seconds: {options.seconds:g} is not a time")
    with progress_line(silent) as show:
        campaign = _campaign(options)
        campaign.progress = lambda runs: show(
            f"simulating {campaign.name}: {counted(runs, 'run')}, all as it should be"
        )
        campaign.notify = show
        if trace is not None:
            return _traced(campaign, seed, trace)
        report = campaign.go(parse_seeds(seeds or SEEDS) if seed is None else [seed])
    return Answer(_data(report), Text(formatting.printable(report.text)), Exit.OK if report.ok else Exit.JOB_FAILED)


def _campaign(options: JobOptions) -> Campaign:
    from midstream.api.job_file import load_job

    widths = tuple(width for width in (options.parallelism, options.rescale_to) if width is not None)
    return campaign_of(
        load_job(options.path, module_paths(options.py_files)),
        dict(_pair("--rows", given, "UID=FILE") for given in options.rows),
        rows_max=200 if options.rows_max is None else options.rows_max,
        parallelism=widths or None,
        latest=_columns("--latest", options.latest),
        ignore=_columns("--ignore", options.ignore),
        jobs=os.cpu_count() or 1 if options.jobs is None else options.jobs,
        seconds=options.seconds,
        replay=options.command,
    )


def _pair(option: str, given: str, form: str) -> tuple[str, str]:
    uid, equals, value = given.partition("=")
    if not (uid and equals and value):
        raise ConfigError(f"{option}: {given!r} is not {form}")
    return uid, value


def _columns(option: str, given: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    pairs = (_pair(option, each, "SINK=COLUMN[,COLUMN]") for each in given)
    return {uid: tuple(names.split(",")) for uid, names in pairs}


def _traced(campaign: Campaign, seed: int | None, filters: Filters) -> Answer:
    """Show every event of the run of one seed."""
    if seed is None:
        raise ConfigError("--trace shows a single run: give it as --seed N")
    patterns = trace_patterns(filters)
    scenario = campaign.scenario(seed)
    reference = run_job(campaign.job, REFERENCE)
    ran = run_job(campaign.job, scenario, keep_trace=True)
    verdict = judge(campaign.job, reference, ran, campaign.contracts)
    assert ran.trace is not None
    events = list(ran.trace.lines(*patterns, tail=filters.tail))
    lines = [f"seed {seed}: {scenario.describe()}", *events, *(verdict.lines() or ["all as it should be"])]
    data = TracedRun(seed=seed, steps=ran.steps, kind=verdict.kind, found=verdict.lines(), trace=events)
    return Answer(data, Text(formatting.printable("\n".join(lines))), Exit.JOB_FAILED if verdict.kind else Exit.OK)


def _data(report: Report) -> SimulatedRuns:
    diagnosis = report.diagnosis
    return SimulatedRuns(
        job=report.job,
        ok=report.ok,
        runs=report.seeds,
        long=report.long,
        rows=report.rows,
        has_more_rows=list(report.cut),
        seconds=round(report.seconds, 3),
        seed=report.seed,
        kind=report.kind,
        found=report.found,
        schedule=report.schedule,
        cause=None if diagnosis is None else diagnosis.cause.name.lower(),
        operator=None if diagnosis is None or diagnosis.suspect is None else diagnosis.suspect.uid,
        look_at=[] if diagnosis is None else [f"{clue.file}:{clue.line}" for clue in diagnosis.clues],
        warnings=report.warnings,
        replay=None if report.seed is None else f"{report.replay} --seed {report.seed}",
    )
