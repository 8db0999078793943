"""The page of state machines has all tables, and no table is left out of the coverage report."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import state_machines

from midstream_lab.impossible_pairs import MACHINES


def test_the_page_has_each_table_with_its_diagram() -> None:
    page = state_machines.page()
    assert page.startswith(state_machines.PAGE.read_text(encoding="utf-8"))
    for machine, (file, name) in state_machines.declared().items():
        heading = f"## {machine[0].upper()}{machine[1:]}\n\n`{name}` in `{file}`.\n\n```mermaid\nstateDiagram-v2\n"
        assert heading in page, machine


def test_every_table_is_in_the_coverage_and_so_on_the_page() -> None:
    covered = {machine.table.machine for machine in MACHINES if machine.table is not None}
    missing = {
        f"{file}: {name}" for machine, (file, name) in state_machines.declared().items() if machine not in covered
    }
    assert not missing, (
        "give each a machine, or machine_of(table), in MACHINES of lab/midstream_lab/impossible_pairs.py"
    )
