"""Runs seeds in the simulator with live counts, replays one with its trace, or measures it by mutations."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.output import Answer, Exit
from midstream.cli.progress import progress_line
from midstream.engine.core.errors import ConfigError
from midstream.simulation.trace import Filters
from midstream_lab.campaign import Summary
from midstream_lab.mutations.mutation_command import line_of, measure_mutations
from midstream_lab.mutations.mutation_score import RANDOM_SEEDS_MAX
from midstream_lab.simulate import Scenarios, Simulated, replay, simulate


def run_seeds(
    scenarios: Scenarios, seeds: str, *, jobs: int | None, seconds: float | None, coverage: bool, silent: bool
) -> Answer:
    """Run seeds. Raises ConfigError for unknown names; lost, duplicated or stuck rows are an answer with status 1."""
    with progress_line(silent) as show:

        def progress(s: Summary) -> None:
            show(f"simulating: {formatting.rows(s.runs)} runs, {s.runs_per_s:.1f} runs/s, {s.failures} failed")

        done = simulate(seeds=seeds, jobs=jobs, seconds=seconds, coverage=coverage, progress=progress, **scenarios)
    return _answer(done)


def show_trace(scenarios: Scenarios, seed: int | None, filters: Filters) -> Answer:
    """Show every event of one run that passes the filters."""
    if seed is None:
        raise ConfigError("--trace shows a single run: give it as --seed N")
    return _answer(replay(seed, filters, **scenarios))


def run_mutations(
    names: Sequence[str], seeds_max: int | None, jobs: int | None, seconds: float | None, silent: bool
) -> Answer:
    """Measure how many seeds it takes to find each known bug; a line for each as soon as it is known."""
    console = Console(stderr=True, highlight=False, quiet=silent, soft_wrap=True)
    done = measure_mutations(
        names=[name for entry in names for name in entry.split(",") if name],
        seeds_max=RANDOM_SEEDS_MAX if seeds_max is None else seeds_max,
        jobs=jobs,
        seconds=seconds,
        progress=lambda kill: console.print(formatting.printable(line_of(kill)), markup=False),
    )
    return _answer(done)


def _answer(done: Simulated) -> Answer:
    return Answer(done.data, Text(formatting.printable(done.text)), Exit.OK if done.ok else Exit.JOB_FAILED)
