"""Cost curves: which runs they ask for, and what they take from them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import curves


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """The commands that were run, each of which gives the same result."""
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> dict[str, Any]:
        commands.append(command)
        backlogs = {f"backlog_{mib}_mib": {"p50_ms": 10.0 + mib} for mib in (1, 10, 100)}
        return {"events_per_s": 7, "memory_mb": 5.0, **backlogs}

    monkeypatch.setattr(curves, "run", run)
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    return commands


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (directory / "curves.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["curve"], []).append((row["x"], row["y"]))
    return found


def test_a_curve_without_an_option_is_of_one_run(asked: list[Sequence[str]], tmp_path: Path) -> None:
    assert curves.measure("backlog", curves.CURVES["backlog"], "now", 0, {}) == 0
    assert points(tmp_path) == {"backlog": [(1, 11.0), (10, 20.0), (100, 110.0)]}
    assert len(asked) == 1


def test_two_curves_of_the_same_runs_share_them(asked: list[Sequence[str]], tmp_path: Path) -> None:
    known: dict[tuple[str, ...], dict[str, Any] | str] = {}
    for name in "keys", "memory":
        curves.measure(name, curves.CURVES[name], "now", 1, known)
    keys = curves.CURVES["keys"].points
    assert points(tmp_path) == {"keys": [(x, 7.0) for x in keys[::-1]], "memory": [(x, 5.0) for x in keys[::-1]]}
    assert [command[-1] for command in asked] == [str(x) for x in keys[::-1]]
