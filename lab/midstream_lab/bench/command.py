"""`python -m midstream_lab bench`: runs one benchmark and prints its parameters and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import msgspec
from rich.table import Table

from midstream.cli import formatting
from midstream.cli.output import SLOTS, Answer, busy_with
from midstream.engine.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """The limits of an integer option."""

    least: int
    most: int


OPTIONS: Final = {
    "events": Option(1000, 10**11),
    "parallelism": Option(1, 64),
    "keys": Option(1, 10**8),
    "columns": Option(1, 1000),
    "rate": Option(1, 10**9),
    "backlog": Option(1, 4096),
    "state": Option(8, 2**20),
}
BENCHMARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "window": ("events", "parallelism", "keys", "columns"),
    "udf": ("events", "parallelism"),
    "lookup": ("events", "parallelism"),
    "keyed_process": ("events", "parallelism", "keys"),
    "strings": ("events", "parallelism"),
    "sliding": ("events", "parallelism", "keys"),
    "exchange": ("events", "parallelism"),
    "latency": ("events", "rate"),
    "checkpoint": (),
    "recovery": ("backlog",),
    "large_state": ("state",),
    "nexmark": ("events", "parallelism", "query", "source"),
    "operators": ("events", "parallelism", "query"),
    "simulate": (),
    "kafka": ("events", "parallelism", "rate"),
    "latency_kafka": ("query", "rate"),
    "lakehouse": ("events", "parallelism", "query", "rate"),
}
"""The modules of `midstream_lab.bench`, and the options that the `run` of each accepts by name."""


def run_bench(name: str, slots: str, silent: bool, given: Mapping[str, int | str | None]) -> Answer:
    """Run a benchmark. `given`: options by name, None for the benchmark's own value.

    Raises ConfigError for unknown names, InvariantError if the benchmark's result is wrong.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    if slots not in SLOTS:
        raise ConfigError(f"--slots: {slots!r} is not one of {', '.join(SLOTS)}")
    options = {option: value for option, value in given.items() if value is not None}
    for option, value in options.items():
        _check(name, option, value)
    with busy_with(f"benchmark {name}: warming up, then measuring", silent):
        run = import_module(f"midstream_lab.bench.{name}").run
        result: msgspec.Struct = run(slots, **options)
    return Answer(result, figures_table(msgspec.to_builtins(result)))


def _check(name: str, option: str, value: int | str) -> None:
    if option not in BENCHMARKS[name]:
        others = [other for other, options in BENCHMARKS.items() if option in options]
        has = "have" if len(others) > 1 else "has"
        raise ConfigError(f"--{option}: the benchmark {name} has no such option; {', '.join(others)} {has}")
    limits = OPTIONS.get(option)
    if limits is not None and isinstance(value, int) and not limits.least <= value <= limits.most:
        raise ConfigError(f"--{option}: {value:,} is not between {limits.least:,} and {limits.most:,}")


def figures_table(figures: Mapping[str, Any]) -> Table:
    """Return a table with one row per figure; those in groups follow their group's name."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    _add_rows(table, figures, "")
    return table


def _add_rows(table: Table, figures: Mapping[str, Any], group: str) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _add_rows(table, value, f"{group}{name} ")
        else:
            table.add_row(f"{group}{name}", _figure(value))


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return formatting.printable(str(value))
