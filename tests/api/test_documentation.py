"""Every Python block of the pages of docs/guide runs as it stands, on plain processes instead of Spark.

tests/testing/test_testing_page.py runs those of testing.md; the job of upgrades.md never ends.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midstream.api import submit
from midstream.runtime.process.process_slots import ProcessSlots

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
EXAMPLES = {
    "streams.md": [
        "Streams",
        "Environment",
        "Rows to rows",
        "Models and clients",
        "Calls that take time",
        "Running aggregates",
    ],
    "event-time.md": ["Event time and windows", "Sources in step", "Late rows", "Joins"],
    "state.md": [
        "State and timers",
        "Time to live",
        "Two inputs",
        "Functions on batches",
        "Aggregates of your own",
        "Look into the state, and set it right",
    ],
    "sources.md": ["Sources", "Tables", "A source of your own"],
    "sinks.md": ["Sinks", "Delta", "Iceberg", "A sink of your own"],
}
"""The headings of each page's blocks."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Heading and code, in order."""
    found, heading = [], ""
    for match in re.finditer(
        r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", (GUIDE / page).read_text(encoding="utf-8"), re.M | re.S
    ):
        heading = match.group(1) or heading
        if match.group(2):
            found.append((heading, match.group(2)))
    return found


@pytest.mark.parametrize(("page", "headings"), EXAMPLES.items())
def test_the_page_has_an_example_for_each_part(page, headings):
    assert [heading for heading, _ in blocks(page)] == headings


@pytest.mark.parametrize(
    "code", [pytest.param(code, id=heading) for page in EXAMPLES for heading, code in blocks(page)]
)
def test_the_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "_spark_slots", lambda master, slots: ProcessSlots())
    exec(compile(code, str(tmp_path / "example.py"), "exec"), {"__name__": "__main__"})
