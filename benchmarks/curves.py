"""How midstream's cost grows: with slots, keys, columns, and what is in flight.

    .venv/bin/python benchmarks/curves.py                    all curves, three rounds
    .venv/bin/python benchmarks/curves.py keys --rounds 1    one of them

Each round measures every point of a curve, the largest first in every other round. The runs are
appended to benchmarks/results/curves.jsonl; `.venv/bin/python benchmarks/compare.py --report` makes plots and
tables of the newest of each curve, and is called at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

from compare import RESULTS, report, run, say
from plan import BENCH


@dataclass(frozen=True)
class Curve:
    """`y` of `python -m midstream_lab bench BENCHMARK --OPTION x` for each x; `events`: not the benchmark's own number, by x.

    Without an option one run has all points; `y` is then where in its result, with x in it.
    """

    benchmark: str
    option: str | None
    points: tuple[int, ...]
    y: str
    x_title: str
    y_title: str
    events: tuple[int, ...] = ()


CURVES = {
    "slots": Curve("window", "parallelism", (1, 2, 4, 8), "events_per_s", "slots on 2 cores", "events/s"),
    "exchange": Curve("exchange", "parallelism", (1, 2, 4, 8), "events_per_s", "slots on 2 cores", "events/s"),
    "keys": Curve("window", "keys", (1000, 10_000, 100_000, 1_000_000, 10_000_000), "events_per_s", "keys", "events/s"),
    "memory": Curve("window", "keys", (1000, 10_000, 100_000, 1_000_000, 10_000_000), "memory_mb", "keys", "MB"),
    "columns": Curve(
        "window", "columns", (1, 4, 16, 64), "events_per_s", "columns", "events/s", (20_000_000, 10_000_000) + 2 * (4_000_000,)
    ),
    "backlog": Curve("checkpoint", None, (1, 10, 100), "backlog_{x}_mib.p50_ms", "MiB in flight, about", "unaligned checkpoint, ms"),
}  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("curves", nargs="*", metavar="CURVE", help=f"of {', '.join(CURVES)}; all by default")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    if unknown := [name for name in options.curves if name not in CURVES]:
        arguments.error(f"there is no curve {unknown[0]!r}; there are: {', '.join(CURVES)}")
    if options.rounds < 1:
        arguments.error("--rounds must be at least 1")
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    wanted = options.curves or list(CURVES)
    failed = 0
    for turn in range(options.rounds):
        known: dict[tuple[str, ...], dict[str, Any] | str] = {}  # two curves may be of the same runs
        for name in wanted:
            failed += measure(name, CURVES[name], began, turn, known)
    report()
    return 1 if failed else 0


def measure(name: str, curve: Curve, began: str, turn: int, known: dict[tuple[str, ...], dict[str, Any] | str]) -> int:
    """How many runs failed."""
    failed = 0
    events = dict(zip(curve.points, curve.events, strict=False))
    for x in curve.points[:: -1 if turn % 2 else 1]:
        command: tuple[str, ...] = (*BENCH, curve.benchmark, "--json")
        if curve.option is not None:
            command += (f"--{curve.option}", str(x))
        if x in events:
            command += ("--events", str(events[x]))
        load = os.getloadavg()[0]
        if command not in known:
            say(f"{name}, round {turn + 1}, load {load:.1f}: {shlex.join(command)}")
            known[command] = run(command)
        result = known[command]
        if isinstance(result, str):
            failed += 1
            say(f"  failed: {result}")
            continue
        y = figure(result, curve.y.format(x=x))
        say(f"  {curve.y.format(x=x)} {y}")
        row = {
            "curve": name, "run": began, "round": turn, "load": round(load, 2), "x": x, "y": y,
            "x_title": curve.x_title, "y_title": curve.y_title, "command": shlex.join(command),
        }  # fmt: skip
        with (RESULTS / "curves.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
    return failed


def figure(result: dict[str, Any], path: str) -> float:
    """What stands at a path such as `unaligned.p50_ms`."""
    found: Any = result
    for name in path.split("."):
        found = found[name]
    return float(found)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    sys.exit(main())
