"""The walks in docs/internals/walks.md lead through code that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "midstream"
WALKS = (ROOT / "docs" / "internals" / "walks.md").read_text(encoding="utf-8")
HEAD = "| step | where | what is done |\n|---|---|---|\n"
QUOTED = re.compile(r"`([^`]+)`")
WALKED = {
    "A record",
    "A barrier",
    "A recovered row",
    "A commit",
    "The end of a task",
    "A lost slot",
    "A rescale",
    "A user's exception",
}


def walks(text: str) -> dict[str, list[list[str]]]:
    """The rows of each walk, cell by cell."""
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        table = rest.partition(HEAD)[2].partition("\n\n")[0]
        found[title] = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    return found


def places(cell: str) -> Iterator[tuple[str, str]]:
    """(file, class, function or method) for each place that a cell names; each comes after its file."""
    file = ""
    for quoted in QUOTED.findall(cell):
        if quoted.endswith(".py"):
            file = quoted
        else:
            yield file, quoted


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Classes, functions and methods, as `function`, `Class` and `Class.method`."""
    names = set()
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, kinds):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds))
    return frozenset(names)


def gone(cell: str) -> list[str]:
    """The places of a cell that do not exist, and files behind which nothing is named."""
    found = list(places(cell))
    files = {quoted for quoted in QUOTED.findall(cell) if quoted.endswith(".py")}
    missing = [file for file in files if file not in {named for named, _ in found}]
    for file, name in found:
        path = SOURCE / file
        if not path.is_file() or name not in defined_in(path):
            missing.append(f"{file}: {name}")
    return missing


def test_there_is_a_walk_of_each():
    assert walks(WALKS).keys() == WALKED


@pytest.mark.parametrize("walk", sorted(WALKED))
def test_the_steps_of_a_walk_are_numbered_and_few(walk):
    steps = walks(WALKS)[walk]
    assert [step[0] for step in steps] == [str(number) for number in range(1, len(steps) + 1)]
    assert 6 <= len(steps) <= 19
    assert all(len(step) == 3 and all(step) for step in steps)


@pytest.mark.parametrize("walk", sorted(WALKED))
def test_every_step_happens_where_the_walk_says(walk):
    wheres = [where for _, where, _ in walks(WALKS)[walk]]
    assert all(list(places(where)) for where in wheres)
    assert [missing for where in wheres for missing in gone(where)] == []


def test_what_does_not_exist_is_found():
    assert gone("`engine/worker/task.py`: `Task.step`, `Task.stroll`; `worker/walk.py`: `walk`") == [
        "engine/worker/task.py: Task.stroll",
        "worker/walk.py: walk",
    ]
    assert gone("`engine/worker/task.py`; `engine/worker/slot_machine.py`: `SlotMachine`") == ["engine/worker/task.py"]
