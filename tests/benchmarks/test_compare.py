"""The harness that compares engines, with commands that only print: no engine is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare
from plan import BENCH, PLAN, Contender, Figure, Workload

from machine import limit_s
from midstream_lab.bench.command import BENCHMARKS

RATE = Figure("events_per_s", "events/s")
P99 = Figure("p99_ms", "p99 ms", more_is_better=False)
MEMORY = Figure("memory_mb", "memory MB", is_compared=False)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def printing(*lines: object) -> tuple[str, ...]:
    return command("".join(f"print({line if isinstance(line, str) else json.dumps(line)!r});" for line in lines))


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "REPORT", tmp_path / "RESULTS.md")
    monkeypatch.setattr(compare, "HERE", tmp_path)
    return tmp_path


# ---- a run ----


def test_the_last_line_is_the_result_whatever_was_printed_before():
    assert compare.run(printing("'warming up'", {"events": 5})) == {"events": 5}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('{}'); sys.exit(3)", "exit status 3: it says nothing"),
        ("import sys; sys.exit('no | rate')", "exit status 1: no / rate"),
        ("pass", "exit status 0"),
        ("print('done')", "its last line is not JSON: done"),
        ("print('[1]')", "its last line is not an object"),
    ],
)
def test_what_is_no_result_says_why(code, why):
    assert why in compare.run(command(code))


def test_a_run_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(compare, "RUN_S_MAX", 0.2)
    assert compare.run(command("import signal; signal.alarm(60); signal.pause()")) == "no result within 0.2 s"


def test_figures_of_a_part_go_over_those_of_the_whole():
    contender = Contender("a", ("run", "it"), ("modes", "fast"))
    result = {"p99_ms": 1, "events": 2, "modes": {"fast": {"p99_ms": 7, "list": [1]}}}
    assert compare.row_of(contender, result) == {"p99_ms": 7, "events": 2, "engine": "a", "command": "run it"}


# ---- rounds ----


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (compare.RESULTS / f"{name}.jsonl").read_text().splitlines()]


def workload(*contenders: Contender, figures=(RATE, MEMORY)) -> Workload:
    return Workload("What it is.", figures, contenders)


def test_engines_take_turns_and_begin_in_turn():
    one, two = (Contender(name, printing({"events_per_s": rate})) for name, rate in (("midstream", 4), ("Other", 2)))
    assert compare.measure("w", workload(one, two), 3, [""]) == 0
    assert [(row["round"], row["engine"]) for row in rows("w")] == [
        (0, "midstream"), (0, "Other"), (1, "Other"), (1, "midstream"), (2, "midstream"), (2, "Other"),
    ]  # fmt: skip


def test_engines_of_one_command_share_its_run_and_only_so_many_rounds_are_run():
    both = printing({"a": {"events_per_s": 1}, "b": {"events_per_s": 2}})
    slow = Contender("Slow", printing({"events_per_s": 3}), rounds_max=1)
    contenders = Contender("midstream, a", both, ("a",)), Contender("midstream, b", both, ("b",)), slow
    assert compare.measure("w", workload(*contenders), 2, [""]) == 0
    found = [(row["round"], row["engine"], row["events_per_s"]) for row in rows("w")]
    first = [(0, "midstream, a", 1), (0, "midstream, b", 2)]
    assert found == [*first, (0, "Slow", 3), *((1, engine, rate) for _, engine, rate in first)]


def test_failures_are_counted_and_kept_and_what_is_not_installed_is_left_out():
    broken = Contender("Broken", command("raise SystemExit(2)"))
    absent = Contender("Absent", printing({}), needs=("nowhere",))
    assert compare.measure("w", workload(broken, absent), 2, [""]) == 2
    lines = compare.table("w", workload(broken, absent), rows("w"))
    assert cells(lines, "Absent") == ["Absent (not installed)"]
    assert cells(lines, "Broken") == ["Broken (2 of 2 failed: exit status 2: it says nothing)"]


def test_only_wanted_engines_are_run_and_midstream_with_them():
    contenders = [Contender(name, printing({"events_per_s": 1})) for name in ("midstream", "Flink Java", "Bytewax")]
    compare.measure("w", workload(*contenders), 1, ["Java"])
    assert [row["engine"] for row in rows("w")] == ["midstream", "Flink Java"]


# ---- the table ----


def row(engine: str, turn: int, **figures: object) -> dict:
    return {"engine": engine, "run": "2026-01-02T03:04:05Z", "round": turn, "load": 0.5, "command": "it", **figures}


def cells(lines: list[str], engine: str) -> list[str]:
    line = next(line for line in lines if line.startswith(f"| {engine} "))
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_ratios_are_taken_within_each_round():
    ours = [row("midstream", turn, events_per_s=rate, memory_mb=100) for turn, rate in enumerate((10, 20, 60))]
    theirs = [row("Other", turn, events_per_s=rate, memory_mb=900) for turn, rate in enumerate((5, 20, 20))]
    plan = workload(Contender("midstream", ("it",)), Contender("Other", ("it",)), Contender("Third", ("it",)))
    lines = compare.table("w", plan, [*ours, *theirs])
    assert "3 rounds" in lines[0] and "2026-01-02" in lines[0] and "Not run: Third." in lines[0]
    assert cells(lines, "midstream") == ["midstream", "20 (10–60)", "", "100"]
    assert cells(lines, "Other") == ["Other", "20 (5–20)", "2× (1–3)", "900"]


def test_of_what_should_be_small_the_ratio_is_the_other_way_round_and_missing_figures_are_empty():
    plan = workload(Contender("midstream", ("it",)), Contender("Other", ("it",)), figures=(P99, RATE))
    lines = compare.table("w", plan, [row("midstream", 0, p99_ms=2.0), row("Other", 0, p99_ms=50.0)])
    assert lines[2] == "| engine | p99 ms | midstream is |"
    assert cells(lines, "Other") == ["Other", "50", "25×"]


def test_an_engine_is_compared_with_its_own_row_of_midstreams():
    contenders = [Contender(name, ("it",)) for name in ("midstream, slow", "midstream, fast", "Other, fast")]
    plan = Workload("What.", (RATE,), tuple(contenders), (("Other, fast", "midstream, fast"),))
    found = [row("midstream, slow", 0, events_per_s=1), row("midstream, fast", 0, events_per_s=8)]
    assert cells(compare.table("w", plan, [*found, row("Other, fast", 0, events_per_s=2)]), "Other, fast")[2] == "4×"


def test_the_table_says_what_was_bounded_and_what_ran_less_often():
    timed = row("Timed", 0, events_per_s=1, bounded=True, events=1200)
    smaller = [
        row("Smaller", turn, events_per_s=1, events=400_000, command="run --events 400000") for turn in (0, 1, 2)
    ]
    seldom = [row("Seldom", turn, events_per_s=1) for turn in (0, 1)]
    lines = compare.table("w", workload(), [timed, *smaller, *seldom])
    assert cells(lines, "Timed")[0] == "Timed (bounded)"
    assert cells(lines, "Smaller")[0] == "Smaller (given 400,000 (400,000–400,000) events)"
    assert cells(lines, "Seldom")[0] == "Seldom (2 rounds)"


def test_figures_have_three_digits_and_large_ones_are_in_millions():
    assert compare.spread([29_421_742, 29_126_328, 31_472_825]) == "29.4M (29.1–31.5)"
    assert compare.spread([1_030_000, 985_950]) == "1.01M (0.986–1.03)"
    assert [compare.number(value) for value in (992_161.0, 22_741.0, 100.4, 99.2, 0.0971)] == [
        "992,000", "22,700", "100", "99.2", "0.0971",
    ]  # fmt: skip


def test_only_the_newest_run_is_reported_between_its_markers(results, monkeypatch):
    monkeypatch.setattr(compare, "PLAN", {"w": workload(Contender("midstream", ("it",)))})
    monkeypatch.setattr(compare, "plot_all", lambda *_: None)
    compare.append("w", [row("midstream", 0, events_per_s=1) | {"run": "2025-01-01T00:00:00Z"}])
    compare.append("w", [row("midstream", 0, events_per_s=77)])
    compare.REPORT.write_text("# Words\n\n<!-- w -->\nold\n<!-- end -->\n\nMore words.\n")
    compare.report()
    text = compare.REPORT.read_text()
    assert text.startswith("# Words\n\n<!-- w -->\n`.venv/bin/python benchmarks/compare.py w`, 2026-01-02")
    assert "| midstream | 77 |" in text and "old" not in text and "| 1 |" not in text
    assert text.endswith("<!-- end -->\n\nMore words.\n")
    compare.report()
    assert compare.REPORT.read_text() == text


def test_workloads_of_a_shared_table_have_a_row_each_and_no_table_of_their_own(results, monkeypatch):
    plans = {name: workload(Contender("midstream", ("it",)), Contender("Other", ("it",))) for name in ("a", "b", "c")}
    monkeypatch.setattr(compare, "PLAN", plans)
    monkeypatch.setattr(compare, "TOGETHER", {"both": ("a", "b")})
    monkeypatch.setattr(compare, "plot_all", lambda *_: None)
    for name in plans:
        compare.append(name, [row("midstream", 0, events_per_s=6), row("Other", 0, events_per_s=2)])
    compare.REPORT.write_text("# Words\n")
    compare.report()
    text = compare.REPORT.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## c", "## both"]
    assert "`.venv/bin/python benchmarks/compare.py both`, 2026-01-02, 1 round, load 0.5 to 0.5." in text
    assert "| a: What it is | 6 | 2 | 3× |\n| b: What it is | 6 | 2 | 3× |" in text
    assert compare.expanded(["both", "c", "a"]) == ["a", "b", "c"]


def test_a_shared_table_names_the_best_engine_of_each_row(results, monkeypatch):
    names = ("midstream", "Other", "Third", "loop")
    contenders = [Contender(name, ("it",), is_engine=name != "loop") for name in names]
    monkeypatch.setattr(compare, "PLAN", {name: workload(*contenders, figures=(P99, RATE)) for name in ("v", "w")})
    p99_ms = {"midstream": 2.0, "Other": 8.0, "Third": 6.0, "loop": 0.1}
    measured = {"w": [row(engine, 0, p99_ms=value) for engine, value in p99_ms.items()]}
    measured["v"] = [row("midstream", 0, p99_ms=9.0), row("Other", 0, failure="exit status 1")]
    assert compare.joint_table("both", measured)[2:] == [
        "| p99 ms | midstream | best other engine | midstream is |",
        "|---|---|---|---|",
        "| w: What it is | 2 | Third: 6 | 3× |",
        "| v: What it is | 9 |  |  |",
    ]


def test_a_table_without_markers_yet_goes_to_the_end():
    assert compare.replaced("# Words\n", "w", "body") == ("# Words\n\n## w\n\n<!-- w -->\nbody\n<!-- end -->\n")


def test_every_workload_of_the_plan_has_a_base_for_each_engine_and_no_engine_twice():
    for name, plan in PLAN.items():
        engines = [contender.engine for contender in plan.contenders]
        assert len(set(engines)) == len(engines), name
        for engine in engines:
            if not engine.startswith("midstream"):
                assert plan.base_of(engine) in engines, (name, engine)


def test_every_benchmark_of_the_plan_is_one_that_the_laboratory_has_with_its_options():
    commands = {contender.command for plan in PLAN.values() for contender in plan.contenders}
    ours = [command[len(BENCH) :] for command in commands if command[: len(BENCH)] == BENCH]
    assert len(ours) > 20
    for name, json_, *options in ours:
        assert json_ == "--json"
        assert {option.removeprefix("--") for option in options[::2]} <= set(BENCHMARKS[name])


def test_the_laboratory_runs_benchmarks_by_the_command_of_the_plan():
    command = (sys.executable, *BENCH[1:], "--help")
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s(60)).stdout
    assert "operators" in printed
