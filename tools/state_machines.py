"""Prints docs/internals/state-machines.md with the tables on which the state machines run; the site has it so."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from midstream.engine.core.state_machine import Transition, TransitionTable, name_of
from midstream.engine.protocol import messages
from midstream_lab.impossible_pairs import MACHINES

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "midstream"
PAGE = ROOT / "docs" / "internals" / "state-machines.md"
DECLARED = re.compile(r"^(\w+)\b[^\n]*= TransitionTable\(\s*\"([^\"]+)\"", re.MULTILINE)


def declared() -> dict[str, tuple[str, str]]:
    """File and name of each table in the source, by the name of its machine."""
    return {
        machine: (file.relative_to(SOURCE).as_posix(), name)
        for file in sorted(SOURCE.rglob("*.py"))
        for name, machine in DECLARED.findall(file.read_text(encoding="utf-8"))
    }


def page() -> str:
    tables = {machine.table.machine: machine.table for machine in MACHINES if machine.table is not None}
    places = declared()
    sections = [section(table, *places[name]) for name, table in tables.items()]
    return "\n".join([PAGE.read_text(encoding="utf-8"), *sections])


def section(table: TransitionTable[Any, Any], file: str, name: str) -> str:
    lines = [f"## {table.machine[0].upper()}{table.machine[1:]}", "", f"`{name}` in `{file}`.", ""]
    lines += ["```mermaid", *diagram(table), "```", "", *rows(table), "", *meanings(table)]
    return "\n".join(lines) + "\n"


def diagram(table: TransitionTable[Any, Any]) -> Iterator[str]:
    """What leads from one state to another, the events of one arrow together."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for row in table.rows:
        for then in row.then:
            if then is not row.state:
                arrows.setdefault((row.state, then), []).append(name_of(row.event))
    yield "stateDiagram-v2"
    yield f"    [*] --> {table.rows[0].state.name}"
    yield from (f"    {state.name} --> {then.name}: {', '.join(events)}" for (state, then), events in arrows.items())
    left = {state for state, _ in arrows}
    yield from (f"    {then.name} --> [*]" for then in dict.fromkeys(then for _, then in arrows) if then not in left)


def rows(table: TransitionTable[Any, Any]) -> Iterator[str]:
    """In the order of the states; what is the same for several states, and then for several events, is one row."""
    yield from ("| in state | on event | next state | what is done |", "|---|---|---|---|")
    order = list(states_of(table))
    found = sorted(table.rows, key=lambda row: order.index(row.state))
    states: dict[tuple[str, str, str], list[str]] = {}
    for row in found:
        states.setdefault((name_of(row.event), next_states(row), row.what), []).append(row.state.name)
    events: dict[tuple[str, str, str], list[str]] = {}
    for (event, then, what), of in states.items():
        events.setdefault((", ".join(of), then, what), []).append(event)
    every = ", ".join(dict.fromkeys(row.state.name for row in found))
    for (in_states, then, what), on in events.items():
        yield f"| {'any' if in_states == every else in_states} | {', '.join(on)} | {then} | {what} |"


def meanings(table: TransitionTable[Any, Any]) -> Iterator[str]:
    """What the source says of states and events whose names alone do not say it. Messages are left to their module."""
    for named in (*states_of(table), *dict.fromkeys(row.event for row in table.rows)):
        if isinstance(named, type) and named.__module__ == messages.__name__:
            continue
        about = member_doc(named) if isinstance(named, Enum) else vars(named).get("__doc__") or ""
        if about and not about.startswith(f"{name_of(named)}("):  # that is what dataclasses say if nothing is said
            yield f"- **{name_of(named)}**: {' '.join(about.partition(chr(10) * 2)[0].split())}"


def member_doc(member: Enum) -> str:
    """The string that follows the member in the source of its class."""
    body = ast.parse(inspect.getsource(type(member))).body[0]
    assert isinstance(body, ast.ClassDef)
    for assigned, following in pairwise(body.body):
        match assigned, following:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(ast.Constant(str(about))) if name == member.name:
                return about
    return ""


def states_of(table: TransitionTable[Any, Any]) -> type[Enum]:
    kind: type[Enum] = type(table.rows[0].state)
    return kind


def next_states(row: Transition[Any, Any]) -> str:
    return ", ".join("the same" if then is row.state else then.name for then in row.then)


if __name__ == "__main__":
    print(page(), end="")
