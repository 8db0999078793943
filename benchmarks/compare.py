"""midstream and its peers on the same workloads, in turns, in one run.

    .venv/bin/python benchmarks/compare.py all --rounds 3           every workload of PLAN
    .venv/bin/python benchmarks/compare.py window udf --rounds 5    some of them
    .venv/bin/python benchmarks/compare.py --report                 RESULTS.md and the plots again, from what was measured

Each round runs every engine once, beginning with another one each time; some only in the first rounds. A run is a process of its
own, whose last line on standard output is one JSON object; what it prints and the load of the
machine at its start are appended to benchmarks/results/WORKLOAD.jsonl. The newest run of this
program per workload is what the tables show: medians over its rounds, the lowest and highest
in brackets, and the ratio to midstream taken within each round. `make peers` installs the peers;
an engine that is not there is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan import PLAN, Contender, Workload
from plots import curve_rows, plot_all

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
REPORT = HERE / "RESULTS.md"
RUN_S_MAX = 300
"""A run that takes longer is ended, and is no result."""
END_S_MAX = 60
"""How long it may take to end what it has started."""
LEFT_OUT = "not installed"


@dataclass(frozen=True)
class Cell:
    """One figure of one engine over the rounds of a run."""

    median: float
    low: float
    high: float


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(PLAN)}; or all")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--engines", help="only those whose name contains one of these, separated by commas")
    arguments.add_argument("--report", action="store_true", help="measure nothing, write the tables and plots")
    options = arguments.parse_args()
    wanted = [*PLAN] if options.workloads in ([], ["all"]) else options.workloads
    if unknown := [name for name in wanted if name not in PLAN]:
        arguments.error(f"there is no workload {unknown[0]!r}; there are: {', '.join(PLAN)}")
    if options.rounds < 1:
        arguments.error("--rounds must be at least 1")
    failed = 0
    if not options.report:
        for name in wanted:
            began_s = time.monotonic()
            failed += measure(name, PLAN[name], options.rounds, (options.engines or "").split(","))
            say(f"{name} took {(time.monotonic() - began_s) / 60:.1f} minutes")
    report()
    return 1 if failed else 0


# ---- measuring ----


def measure(name: str, workload: Workload, rounds: int, wanted: Sequence[str]) -> int:
    """How many runs failed."""
    contenders = [
        c for c in workload.contenders if any(part in c.engine for part in wanted) or c.engine.startswith("midstream")
    ]
    present: list[Contender] = []
    left_out: list[dict[str, Any]] = []
    for contender in contenders:
        missing = [path for path in contender.needs if not (ROOT / path).exists()]
        if missing:
            say(f"{name}: {contender.engine} is left out, {missing[0]} is missing (make peers)")
            left_out.append({"engine": contender.engine, "failure": LEFT_OUT})
        else:
            present.append(contender)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    failed = 0
    append(name, [row | {"run": began, "round": 0, "load": 0.0} for row in left_out])
    for turn in range(rounds):
        commands = list(dict.fromkeys(c.command for c in present if turn < c.rounds_max))
        start = turn % max(1, len(commands))
        for command in commands[start:] + commands[:start]:
            engines = [c for c in present if c.command == command]
            load = os.getloadavg()[0]
            say(f"{name}, round {turn + 1} of {rounds}, load {load:.1f}: {shlex.join(command)}")
            began_s = time.monotonic()
            result = run(command)
            took_s = round(time.monotonic() - began_s, 1)
            when = {"run": began, "round": turn, "load": round(load, 2), "took_s": took_s}
            if isinstance(result, str):
                failed += 1
                say(f"  failed: {result}")
                append(name, [{"engine": c.engine, "failure": result, **when} for c in engines])
                continue
            rows = [row_of(c, result) | when for c in engines]
            append(name, rows)
            for row in rows:
                say(f"  {row['engine']}: " + ", ".join(f"{f.name} {row.get(f.name)}" for f in workload.figures))
    return failed


def run(command: Sequence[str]) -> dict[str, Any] | str:
    """What the command's last line says, or why there is nothing."""
    environment = os.environ | {"SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")}
    with (RESULTS / "last.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log)
        try:
            printed, _ = process.communicate(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends what it has started
            try:
                process.communicate(timeout=END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            return f"no result within {RUN_S_MAX} s"
    lines = printed.decode(errors="replace").strip().splitlines()
    if process.returncode or not lines:
        said = (RESULTS / "last.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = said[-1][:200].replace("|", "/") if said else "it says nothing"
        return f"exit status {process.returncode}: {reason}"
    try:
        result = json.loads(lines[-1])
    except ValueError:
        return f"its last line is not JSON: {lines[-1][:200]}"
    if not isinstance(result, dict):
        return f"its last line is not an object: {lines[-1][:200]}"
    return result


def row_of(contender: Contender, result: dict[str, Any]) -> dict[str, Any]:
    """The figures at the top, those of the contender's part of the result over them, and who it is."""
    row = {key: value for key, value in result.items() if not isinstance(value, (dict, list))}
    part: Any = result
    for step in contender.part:
        part = part[step]
    row |= {key: value for key, value in part.items() if not isinstance(value, (dict, list))}
    return row | {"engine": contender.engine, "command": shlex.join(contender.command)}


def append(name: str, rows: Iterable[dict[str, Any]]) -> None:
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- reporting ----


def report() -> None:
    text = replaced(REPORT.read_text(encoding="utf-8"), "summary", "\n".join(summary_table()))
    for name, workload in PLAN.items():
        rows = newest(name)
        if rows:
            text = replaced(text, name, "\n".join(table(name, workload, rows)))
    curves = curve_rows(RESULTS / "curves.jsonl")
    if curves:
        text = replaced(text, "curves", "\n".join(curve_table(curves)))
    REPORT.write_text(text, encoding="utf-8")
    plot_all(HERE / "plots", {name: newest(name) for name in PLAN}, curves)


def newest(name: str) -> list[dict[str, Any]]:
    """The rows of the newest run."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = max(row["run"] for row in rows)
    return [row for row in rows if row["run"] == last]


def table(name: str, workload: Workload, rows: list[dict[str, Any]]) -> list[str]:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    runs = [row for row in rows if "failure" not in row]
    loads = [row["load"] for row in runs] or [0.0]
    rounds = 1 + max(row["round"] for row in rows)
    figures = [figure for figure in workload.figures if any(row.get(figure.name) is not None for row in runs)]
    titles = [title for f in figures for title in ([f.title, "midstream is"] if f.is_compared else [f.title])]
    plural = "s" if rounds > 1 else ""
    how = f"`.venv/bin/python benchmarks/compare.py {name}`, {rows[0]['run'][:10]}, {rounds} round{plural}"
    absent = [c.engine for c in workload.contenders if c.engine not in engines]
    lines = [
        f"{how}, load {min(loads)} to {max(loads)} at the start of a run. {workload.what}"
        + (f" Not run: {', '.join(absent)}." if absent else ""),
        "",
        f"| engine | {' | '.join(titles)} | |",
        "|---" * (len(titles) + 2) + "|",
    ]
    for engine in engines:
        mine = [row for row in runs if row["engine"] == engine]
        line = f"| {engine} "
        for figure in figures:
            line += f"| {spread([row[figure.name] for row in mine if row.get(figure.name) is not None])} "
            if figure.is_compared:
                line += f"| {ratio(runs, workload.base_of(engine), engine, figure)} "
        lines.append(f"{line}| {remarks(mine, [row for row in rows if row['engine'] == engine], rounds)} |")
    return lines


def summary_table() -> list[str]:
    """A row for each of midstream's, with the fastest of the engines that are compared with it, by the first figure."""
    lines = [
        "| workload | | midstream | the best peer | | midstream is | what binds midstream | |",
        "|---" * 8 + "|",
    ]
    for name, workload in PLAN.items():
        runs = [row for row in newest(name) if "failure" not in row]
        figure = workload.figures[0]
        values: dict[str, list[float]] = {}
        for row in runs:
            if row.get(figure.name) is not None:
                values.setdefault(row["engine"], []).append(row[figure.name])
        engines = [c.engine for c in workload.contenders if c.is_engine and c.engine in values]
        for ours in (engine for engine in engines if engine.startswith("midstream")):
            mode = ours.removeprefix("midstream").removeprefix(", ")
            peers = [each for each in engines if not each.startswith("midstream") and workload.base_of(each) == ours]
            best, theirs, times = "", "", ""
            if peers:
                best = (max if figure.more_is_better else min)(peers, key=lambda each: statistics.median(values[each]))
                theirs, times = spread(values[best]), ratio(runs, ours, best, figure)
            which = f"[{name}](#{name})" + (f", {mode}" if mode else "")
            figures = f"{figure.title} | {spread(values[ours])} | {best} | {theirs} | {times}"
            lines.append(f"| {which} | {figures} | {workload.limit} | {runs[0]['run'][:10]} |")
    return lines


def remarks(runs: Sequence[dict[str, Any]], all_runs: Sequence[dict[str, Any]], rounds: int) -> str:
    """What must be known of an engine's figures: runs that failed, ended by their bound, were smaller, or fewer."""
    found = []
    failures = [row["failure"] for row in all_runs if "failure" in row]
    if LEFT_OUT in failures:
        found.append(LEFT_OUT)
    elif failures:
        found.append(f"{len(failures)} of {len(all_runs)} failed: {failures[-1]}")
    if any(row.get("bounded") for row in runs):
        unit = "events" if "events_per_s" in runs[0] else "checkpoints"
        found.append(f"bounded by time, to {spread([row['events'] for row in runs])} {unit}")
    elif "--events" in (runs[0]["command"] if runs else ""):
        found.append("bounded to " + spread([row["events"] for row in runs]) + " events")
    turns = {row["round"] for row in all_runs}
    if runs and len(turns) < rounds:
        found.append(f"{len(turns)} round{'s' if len(turns) > 1 else ''}")
    return "; ".join(found)


def curve_table(rows: list[dict[str, Any]]) -> list[str]:
    loads = [row["load"] for row in rows]
    lines = [
        f"`.venv/bin/python benchmarks/curves.py`, load {min(loads)} to {max(loads)} at the start of a run.",
        "",
        "| | at | is | after, rounds |",
        "|---|---|---|---|",
    ]
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [row for row in rows if row["curve"] == curve]
        for x in sorted({row["x"] for row in mine}):
            at = [row for row in mine if row["x"] == x]
            values = spread([row["y"] for row in at])
            lines.append(
                f"| {at[0]['y_title']} | {x:,} {at[0]['x_title']} | {values} | `{at[0]['command']}`, {len(at)} |"
            )
    return lines


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return number(values[0])
    return f"{number(statistics.median(values))} ({number(min(values))}–{number(max(values))})"


def ratio(rows: list[dict[str, Any]], base: str, engine: str, figure: Any) -> str:
    """How many times better `base` is than `engine`, round by round."""
    if engine == base:
        return ""
    here = {row["round"]: row.get(figure.name) for row in rows if row["engine"] == base}
    there = {row["round"]: row.get(figure.name) for row in rows if row["engine"] == engine}
    pairs = [(here[turn], value) for turn, value in there.items() if value and here.get(turn)]
    ratios = [mine / other if figure.more_is_better else other / mine for mine, other in pairs]
    return f"{spread(ratios)} ×" if ratios else ""


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def replaced(text: str, name: str, body: str) -> str:
    """The text between the markers of `name`; at the end when there are none yet."""
    begin, end = f"<!-- compare {name} -->", f"<!-- end of {name} -->"
    block = f"{begin}\n{body}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n## {name}\n\n{block}\n"
    head, rest = text.split(begin, 1)
    return head + block + rest.split(end, 1)[1]


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    sys.exit(main())
