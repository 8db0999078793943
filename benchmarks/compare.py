"""midstream and its peers on the same workloads, in turns, in one run.

    .venv/bin/python benchmarks/compare.py all --rounds 3           every workload of PLAN
    .venv/bin/python benchmarks/compare.py window udf --rounds 5    some of them
    .venv/bin/python benchmarks/compare.py nexmark                  those of one shared table (TOGETHER)
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
from pathlib import Path
from typing import Any

from plan import PLAN, TOGETHER, Contender, Figure, Workload
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


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join([*PLAN, *TOGETHER])}; or all"
    )
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--engines", help="only those whose name contains one of these, separated by commas")
    arguments.add_argument("--report", action="store_true", help="measure nothing, write the tables and plots")
    options = arguments.parse_args()
    wanted = [*PLAN] if options.workloads in ([], ["all"]) else expanded(options.workloads)
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


def expanded(names: Iterable[str]) -> list[str]:
    """With the workloads of a shared table in place of its name."""
    return list(dict.fromkeys(each for name in names for each in TOGETHER.get(name, (name,))))


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
    text = REPORT.read_text(encoding="utf-8")
    shared = {name for names in TOGETHER.values() for name in names}
    for name, workload in PLAN.items():
        rows = [] if name in shared else newest(name)
        if rows:
            text = replaced(text, name, "\n".join(table(name, workload, rows)))
    for title, names in TOGETHER.items():
        measured = {name: rows for name in names if name in PLAN and (rows := newest(name))}
        if measured:
            text = replaced(text, title, "\n".join(joint_table(title, measured)))
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
    rounds = 1 + max(row["round"] for row in rows)
    figures = [figure for figure in workload.figures if any(row.get(figure.name) is not None for row in runs)]
    titles = [title for f in figures for title in ([f.title, "midstream is"] if f.is_compared else [f.title])]
    absent = [c.engine for c in workload.contenders if c.engine not in engines]
    lines = [
        f"{how_measured(name, rows)}. {workload.what}"
        + (f" Bound by {workload.limit}." if workload.limit else "")
        + (f" Not run: {', '.join(absent)}." if absent else ""),
        "",
        f"| engine | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for engine in engines:
        remark = remarks(of_engine(runs, engine), of_engine(rows, engine), rounds)
        cells = [f"{engine} ({remark})" if remark else engine]
        for figure in figures:
            if figure.is_compared:
                cells.append(spread(values_of(runs, engine, figure)))
                cells.append(ratio(runs, workload.base_of(engine), engine, figure))
            else:
                cells.append(median_of(runs, engine, figure))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def how_measured(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """The command, the days, the rounds, and how busy the machine was."""
    loads = [row["load"] for row in rows if "failure" not in row] or [0.0]
    days = {row["run"][:10] for row in rows}
    rounds = {1 + max(row["round"] for row in rows if row["run"] == run) for run in {row["run"] for row in rows}}
    return (
        f"`.venv/bin/python benchmarks/compare.py {name}`, {' to '.join(sorted({min(days), max(days)}))}, "
        f"{' to '.join(map(str, sorted({min(rounds), max(rounds)})))} round{'s' if max(rounds) > 1 else ''}, "
        f"load {min(loads)} to {max(loads)}"
    )


def joint_table(title: str, measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row for each workload, with the fastest of the other engines, by the workload's first figure."""
    figure = PLAN[next(iter(measured))].figures[0]
    rows_of_all: list[tuple[str, str, str, str, str]] = []
    for name, rows in measured.items():
        workload = PLAN[name]
        runs = [row for row in rows if "failure" not in row]
        engines = [c.engine for c in workload.contenders if c.is_engine and values_of(runs, c.engine, figure)]
        peer = ""
        if peers := [each for each in engines if each != "midstream"]:
            medians = {each: statistics.median(values_of(runs, each, figure)) for each in peers}
            peer = (max if figure.more_is_better else min)(peers, key=medians.__getitem__)
        what = f"{name}: {workload.what.rstrip('.')}" if workload.what else name
        times = ratio(runs, "midstream", peer, figure) if peer else ""
        ours, theirs = median_of(runs, "midstream", figure), median_of(runs, peer, figure)
        rows_of_all.append((what, ours, peer, theirs, times))
    best = {peer for *_, peer, _, _ in rows_of_all}
    lines = [
        how_measured(title, [row for rows in measured.values() for row in rows]) + ".",
        "",
        f"| {figure.title} | midstream | {next(iter(best)) if len(best) == 1 else 'best other engine'} | midstream is |",
        "|---" * 4 + "|",
    ]
    for what, ours, peer, theirs, times in rows_of_all:
        lines.append(f"| {what} | {ours} | {theirs if len(best) == 1 or not peer else f'{peer}: {theirs}'} | {times} |")
    return lines


def of_engine(rows: Sequence[dict[str, Any]], engine: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["engine"] == engine]


def values_of(runs: Sequence[dict[str, Any]], engine: str, figure: Figure) -> list[float]:
    return [row[figure.name] for row in of_engine(runs, engine) if row.get(figure.name) is not None]


def median_of(runs: Sequence[dict[str, Any]], engine: str, figure: Figure) -> str:
    values = values_of(runs, engine, figure)
    return number(statistics.median(values)) if values else ""


def remarks(runs: Sequence[dict[str, Any]], all_runs: Sequence[dict[str, Any]], rounds: int) -> str:
    """What must be known of an engine's figures: runs that failed, ended by their bound, were smaller, or fewer."""
    found = []
    failures = [row["failure"] for row in all_runs if "failure" in row]
    if LEFT_OUT in failures:
        found.append(LEFT_OUT)
    elif failures:
        found.append(f"{len(failures)} of {len(all_runs)} failed: {failures[-1]}")
    if any(row.get("bounded") for row in runs):
        found.append("bounded")
    elif "--events" in (runs[0]["command"] if runs else ""):
        found.append("given " + spread([row["events"] for row in runs]) + " events")
    turns = {row["round"] for row in all_runs}
    if runs and 1 < len(turns) < rounds:  # a figure of one round has no brackets
        found.append(f"{len(turns)} rounds")
    return "; ".join(found)


def curve_table(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each curve: its command, and the median at each point."""
    loads = [row["load"] for row in rows]
    days = {row["run"][:10] for row in rows}
    when = f"{' to '.join(sorted({min(days), max(days)}))}, load {min(loads)} to {max(loads)}"
    lines = [
        f"`.venv/bin/python benchmarks/curves.py`, {when}; medians.",
        "",
        "| curve | figure | at each point |",
        "|---" * 3 + "|",
    ]
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [row for row in rows if row["curve"] == curve]
        medians = {x: statistics.median(row["y"] for row in mine if row["x"] == x) for x in {row["x"] for row in mine}}
        points = "; ".join(f"{x:,}: {number(medians[x])}" for x in sorted(medians))
        lines.append(
            f"| {mine[0]['x_title']} | {mine[0]['y_title']}, `{benchmark_of(mine[0]['command'])}` | {points} |"
        )
    return lines


def benchmark_of(command: str) -> str:
    """The benchmark in a command."""
    words = shlex.split(command)
    return " ".join(words[words.index("bench") :][:2]) if "bench" in words else command


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    return number(median) + limits(values, median)


def limits(values: Sequence[float], median: float) -> str:
    """The lowest and the highest of several."""
    if len(values) < 2:
        return ""
    low, high = (number(value, like=median) for value in (min(values), max(values)))
    return f" ({low}–{high})"


def ratio(rows: list[dict[str, Any]], base: str, engine: str, figure: Any) -> str:
    """How many times better `base` is than `engine`, round by round."""
    if engine == base:
        return ""
    here = {row["round"]: row.get(figure.name) for row in rows if row["engine"] == base}
    there = {row["round"]: row.get(figure.name) for row in rows if row["engine"] == engine}
    pairs = [(here[turn], value) for turn, value in there.items() if value and here.get(turn)]
    ratios = [mine / other if figure.more_is_better else other / mine for mine, other in pairs]
    return f"{number(statistics.median(ratios))}×{limits(ratios, statistics.median(ratios))}" if ratios else ""


def number(value: float, *, like: float | None = None) -> str:
    """Three significant digits. With `like` in millions of that number, if it is so large, without its unit."""
    if (value if like is None else like) >= 1e6:
        return f"{three(value / 1e6)}{'M' if like is None else ''}"
    return three(value)


def three(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def replaced(text: str, name: str, body: str) -> str:
    """The text between the markers of `name`; at the end when there are none yet."""
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    block = f"{begin}\n{body}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n## {name}\n\n{block}\n"
    head, rest = text.split(begin, 1)
    return head + block + rest.split(end, 1)[1]


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    sys.exit(main())
