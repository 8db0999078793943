"""Every Python block of docs/guide/streams.md and docs/guide/sinks.md runs as it stands, on plain processes instead of Spark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midstream.api import submit
from midstream.runtime.process.process_slots import ProcessSlots

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """Heading and code, in order."""
    found, heading = [], ""
    for match in re.finditer(
        r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S
    ):
        heading = match.group(1) or heading
        if match.group(2):
            found.append((heading, match.group(2)))
    return found


def test_the_page_has_an_example_for_each_part():
    assert {"Sources", "Windows", "Two inputs", "Sinks", "Sources and sinks of your own", "Testing"} <= {
        heading for heading, _ in blocks("guide/streams.md")
    }
    assert [heading for heading, _ in blocks("guide/sinks.md")] == ["Delta", "A sink of your own"]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=heading)
        for page in ("guide/streams.md", "guide/sinks.md")
        for heading, code in blocks(page)
    ],
)
def test_the_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "_spark_slots", lambda master, slots: ProcessSlots())
    exec(compile(code, str(tmp_path / "example.py"), "exec"), {"__name__": "__main__"})
