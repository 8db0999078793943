"""`midstream simulate`: run seeds in the simulator with live counts, or replay one with its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from midstream.core.errors import ConfigError
from midstream.sim.campaign import Summary
from midstream.sim.command import replay, simulate
from midstream.ui import text
from midstream.ui.answer import Answer, Exit


def run_simulation(
    *,
    topology: str,
    seeds: str,
    seed: int | None,
    trace: bool,
    parallelism: int | None,
    rescale_to: int | None,
    faults: str | None,
    rows: int | None,
    silent: bool,
) -> Answer:
    """Raises ConfigError for anything that does not exist; lost, doubled or stuck rows are an answer with status 1."""
    if trace:
        if seed is None:
            raise ConfigError("--trace shows one run: name it with --seed N")
        done = replay(seed, topology=topology, parallelism=parallelism, rescale_to=rescale_to, faults=faults, rows=rows)
    else:
        with _counting(silent) as progress:
            done = simulate(
                seeds=seeds if seed is None else str(seed),
                topology=topology,
                parallelism=parallelism,
                rescale_to=rescale_to,
                faults=faults,
                rows=rows,
                progress=progress,
            )
    return Answer(done.data, Text(text.printable(done.text)), Exit.OK if done.ok else Exit.JOB_FAILED)


@contextmanager
def _counting(silent: bool) -> Iterator[Callable[[Summary], None] | None]:
    console = Console(stderr=True, highlight=False)
    if silent or not console.is_terminal:
        yield None
        return
    with console.status("simulating") as status:
        yield lambda s: status.update(f"simulating: {text.rows(s.runs)} runs, {s.failures} failed")
