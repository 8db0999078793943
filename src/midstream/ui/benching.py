"""`midstream bench`: run one benchmark, print its parameters and figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from rich.table import Table

from midstream.core.errors import ConfigError
from midstream.ui import text
from midstream.ui.answer import Answer, busy_with

NAMES = ("window", "exchange", "latency", "checkpoint", "recovery", "simulate")
SLOTS = ("spark", "process")
BACKLOG_MIB_MAX = 4096


def run_bench(name: str, events: int | None, backlog_mib: int | None, slots: str, silent: bool) -> Answer:
    """Raises ConfigError for what does not exist, InvariantError when the benchmark's result is wrong."""
    if name not in NAMES:
        raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(NAMES)}")
    if slots not in SLOTS:
        raise ConfigError(f"--slots: {slots!r} is neither of {', '.join(SLOTS)}")
    if events is not None and (events < 1000 or events % 2):
        raise ConfigError(f"--events: {events} is not an even number of at least 1000")
    if events is not None and name in ("simulate", "checkpoint", "recovery"):
        raise ConfigError(f"--events: the benchmark {name} has a fixed number of runs")
    if backlog_mib is not None and name != "recovery":
        raise ConfigError(f"--backlog: the benchmark {name} has none; recovery has")
    if backlog_mib is not None and not 1 <= backlog_mib <= BACKLOG_MIB_MAX:
        raise ConfigError(f"--backlog: {backlog_mib} is not between 1 and {BACKLOG_MIB_MAX} (MiB)")
    with busy_with(f"benchmark {name}: warming up, then measuring", silent):
        result = _benchmark(name, backlog_mib)(events, slots)
    return Answer(result, figures_table(msgspec.to_builtins(result)))


def _benchmark(name: str, backlog_mib: int | None) -> Callable[[int | None, Any], msgspec.Struct]:
    from midstream.bench import checkpoint, exchange, latency, recovery, simulate, window

    if name == "simulate":
        return lambda events, slots: simulate.run()
    if name == "checkpoint":
        return lambda events, slots: checkpoint.run(None, slots)
    if name == "recovery":
        return lambda events, slots: recovery.run(backlog_mib, slots)
    return {"window": window.run, "exchange": exchange.run, "latency": latency.run}[name]


def figures_table(figures: dict[str, Any]) -> Table:
    """One row per figure; those in groups follow their group's name."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in figures.items():
        if isinstance(value, dict):
            for inner, figure in value.items():
                table.add_row(f"{name} {inner}", _figure(figure))
        else:
            table.add_row(name, _figure(value))
    return table


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return text.printable(str(value))
