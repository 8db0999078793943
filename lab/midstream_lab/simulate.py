"""Many runs of the simulator's own jobs, or one with its trace: arguments and results. `__main__` prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from midstream.engine.core.errors import ConfigError
from midstream.simulation.faults import RECOVERING
from midstream.simulation.seeds import parse_seeds
from midstream.simulation.trace import Filters, trace_patterns
from midstream_lab.campaign import Options, Summary, campaign, shrink
from midstream_lab.coverage import lines_of, report
from midstream_lab.fault_kinds import BACKLOGGED, FAULTS
from midstream_lab.jobs.shapes import COMBINED, SHAPES
from midstream_lab.run import Outcome, run
from midstream_lab.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from typing_extensions import Unpack

TOPOLOGIES = (*SHAPES, *COMBINED, "days", "random")
PARALLELISM_MAX = 64
ALL = Filters()
JOBS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Simulated:
    """A result: `data` for programs, `text` for users; `ok` is false if anything was lost, doubled, stuck or broken."""

    data: dict[str, Any]
    text: str
    ok: bool


class Scenarios(TypedDict, total=False):
    """What scenarios are drawn from. `faults`: comma-separated kinds, "none", or None for all."""

    topology: str
    parallelism: int | None
    rescale_to: int | None
    faults: str | None
    rows: int | None


def simulate(
    *,
    seeds: str = "0:100",
    jobs: int | None = None,
    seconds: float | None = None,
    coverage: bool = False,
    failures_max: int = 1,
    make_small: bool = True,
    progress: Callable[[Summary], None] | None = None,
    **scenarios: Unpack[Scenarios],
) -> Simulated:
    """Run the seeds `A:B` (B not included).

    `jobs`: the number of processes, by default one per core. `seconds`: the time after which no further run begins.
    `coverage`: report which events came in which states. Raises ConfigError for anything that does not exist.
    """
    if jobs is not None and not 1 <= jobs <= JOBS_MAX:
        raise ConfigError(f"jobs: {jobs} is not between 1 and {JOBS_MAX}")
    check_seconds(seconds)
    options = replace(_options(**scenarios), coverage=coverage)
    summary = campaign(
        options,
        parse_seeds(seeds),
        processes=jobs,
        progress=progress,
        failures_max=max(1, failures_max),
        seconds_max=seconds,
    )
    data = {f.name: getattr(summary, f.name) for f in fields(summary) if f.name != "pairs"}
    data["faults"] = dict(sorted(summary.faults.items()))
    data["runs_per_s"] = round(summary.runs_per_s, 1)
    data["replay"] = None
    restarts = (
        f"{summary.restarts_of_the_job} restarts of the job, {summary.rescaled_restores} of them at another parallelism; "
        f"rescaled {summary.rescales_while_running} times while running, and {summary.changes_by_load} times by load"
    )
    checkpoints = (
        f"{summary.checkpoints_completed} checkpoints ({summary.checkpoints_with_rows_in_flight} with rows in flight, "
        f"{summary.checkpoints_during_recovery} during recovery, "
        f"{summary.checkpoints_with_finished_tasks} with finished tasks)"
    )
    recoveries = (
        f"{summary.restores_during_recovery} restores of checkpoints taken during recovery, "
        f"{summary.rescaled_restores_during_recovery} of them at another parallelism; "
        f"{summary.failures_during_recovery} failures during recovery"
    )
    savepoints = (
        f"{summary.savepoints_made} savepoints ({summary.savepoints_failed} more were refused or failed), "
        f"{summary.savepoints_restored} of them restored"
    )
    lines = [
        f"{summary.runs} runs in {summary.seconds:.1f} s ({data['runs_per_s']} runs/s), {summary.records_in} rows in",
        f"{checkpoints}, {restarts}",
        recoveries,
        savepoints,
        "faults: " + (", ".join(f"{kind} {count}" for kind, count in data["faults"].items()) or "none"),
        f"lost {summary.lost}, duplicated {summary.duplicated}, stuck {summary.deadlocks}, failed {summary.failures}"
        + (f", not over after all their steps: {summary.long}" if summary.long else ""),
    ]
    if summary.first_failing_seed is not None:
        data["replay"] = replay_command(options, summary.first_failing_seed)
        lines += [f"seed {summary.first_failing_seed}: {summary.failure}", f"replay: {data['replay']}"]
        if make_small:
            scenario, failure = shrink(options.scenario(summary.first_failing_seed))
            data["shrunk"] = describe_scenario(scenario)
            lines += ["made smaller, it still fails:", *(f"  {line}" for line in data["shrunk"]), failure]
    if coverage:
        found = report(summary.pairs)
        data["coverage"] = msgspec.to_builtins(found)
        lines += ["", *lines_of(found)]
    return Simulated(data, "\n".join(lines), ok=summary.failures == 0)


def replay(seed: int, filters: Filters = ALL, **scenarios: Unpack[Scenarios]) -> Simulated:
    """Run one seed again and show all its events, or those that pass the filters.

    In the trace, channels read `e1:0>2`, checkpoints `chk 3`, tasks `v1/0`.
    """
    options = _options(**scenarios)
    patterns = trace_patterns(filters)
    scenario = options.scenario(seed)
    outcome = run(scenario, keep_trace=True)
    assert outcome.trace is not None
    shown = list(outcome.trace.lines(*patterns, tail=filters.tail))
    lines = [*describe_scenario(scenario), *shown, *_verdict(outcome)]
    data = {
        "seed": seed,
        "hash": f"{outcome.hash:016x}",
        "steps": outcome.steps,
        "failures": outcome.failures,
        "trace": shown,
    }
    return Simulated(data, "\n".join(lines), ok=not outcome.failures)


def _verdict(outcome: Outcome) -> list[str]:
    head = f"{outcome.steps} steps, {outcome.seconds:.3f} s of the world's time, hash {outcome.hash:016x}"
    return [head, *(outcome.why_not_passed or ["all as it should be"])]


def replay_command(options: Options, seed: int) -> str:
    parts = [f"python -m midstream_lab simulate --seed {seed} --trace --topology {options.topology}"]
    if options.parallelism is not None:
        parts.append(f"--parallelism {options.parallelism}")
    if options.rescale_to is not None:
        parts.append(f"--rescale-to {options.rescale_to}")
    if options.faults is not None:
        parts.append(f"--faults {','.join(options.faults) or 'none'}")
    if options.rows is not None:
        parts.append(f"--rows {options.rows}")
    return " ".join(parts)


def describe_scenario(scenario: Scenario) -> list[str]:
    lines = [f"seed {scenario.seed}, topology {scenario.topology}"]
    for title, shape in (("", scenario.shape), ("after a restart: ", scenario.rescaled)):
        for index, node in enumerate(shape or ()):
            inputs = ", ".join(
                f"{entry.partitioning.value} from {entry.node}"
                + (f" ({entry.tag})" if entry.tag else "")
                + (f" to port {entry.port}" if entry.port else "")
                for entry in node.inputs
            )
            chain = " → ".join(node.chain)
            lines.append(f"{title}v{index} {chain} ×{node.parallelism}{': ' + inputs if inputs else ''}")
    skipped = {"seed", "topology", "shape", "rescaled", "faults"}
    lines.append(", ".join(f"{f.name} {getattr(scenario, f.name)}" for f in fields(scenario) if f.name not in skipped))
    lines += [f"fault: {fault.kind} ({fault.victim}) before step {fault.step}" for fault in scenario.faults]
    return lines


def _options(
    topology: str = "random",
    parallelism: int | None = None,
    rescale_to: int | None = None,
    faults: str | None = None,
    rows: int | None = None,
) -> Options:
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology: there is no {topology!r}; there are {', '.join(TOPOLOGIES)}")
    for name, value in (("parallelism", parallelism), ("rescale-to", rescale_to)):
        if value is not None and not 1 <= value <= PARALLELISM_MAX:
            raise ConfigError(f"{name}: {value} is not between 1 and {PARALLELISM_MAX}")
    if rows is not None and not 1 <= rows <= 9_000:
        raise ConfigError(f"rows: {rows} is not between 1 and 9000")
    kinds: tuple[str, ...] | None = None
    if faults is not None:
        kinds = () if faults == "none" else tuple(kind.strip() for kind in faults.split(","))
        unknown = [kind for kind in kinds if kind not in (*FAULTS, BACKLOGGED, RECOVERING)]
        if unknown:
            raise ConfigError(
                f"faults: there is no {unknown[0]!r}; there are {', '.join((*FAULTS, BACKLOGGED, RECOVERING))}, or none"
            )
    return Options(topology, parallelism, rescale_to, kinds, rows)


def check_seconds(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds: {seconds:g} is no time to run anything")
