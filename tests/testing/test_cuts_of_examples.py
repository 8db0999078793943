"""The jobs of the documentation and the examples give the same result wherever batches are cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import pytest

from midstream import Environment, testing
from midstream.connectors.memory.generator_source import GeneratorSource, call_generator

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
GENERATED_ROWS: Final = 300
"""Of a generator the first rows are enough."""
NOT_CHECKED: Final = {
    "event-time.md: Late rows": "which rows are late depends on it",
    "sources.md: Sources": "reads a file",
    "sources.md: Tables": "reads a table",
    "sources.md: A source of your own": "a source of its own, which only a real job reads",
    "state.md: Two inputs": "its broadcast function shows that no order holds between two inputs",
    "examples/flights.py": "reads files that are downloaded",
    "examples/kafka.py": "reads from a broker",
    "examples/lakehouse.py": "reads from a database",
}


class Formed(BaseException):
    """A program has formed its job and would run it; no program catches this."""


def programs() -> Iterator[tuple[str, str]]:
    """Yield each Python block of the documentation, and each example: its place and its code."""
    for page in PAGES:
        heading = ""
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", text, re.M | re.S):
            heading = match.group(1) or heading
            if match.group(2) and re.search(r"\.execute\(\)|\.start\(|\.print\(\)", match.group(2)):
                yield f"{page.name}: {heading}", match.group(2)
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


PROGRAMS: Final = dict(programs())


def test_what_is_not_checked_exists_and_most_is_checked():
    assert NOT_CHECKED.keys() <= PROGRAMS.keys()
    assert len(PROGRAMS.keys() - NOT_CHECKED.keys()) >= 13


def test_examples_with_tests_of_their_own_check_their_cuts_there():
    tests = sorted((ROOT / "examples").glob("*/test_*.py"))
    assert len(tests) == len(
        [each for each in (ROOT / "examples").iterdir() if each.is_dir() and each.name != "__pycache__"]
    )
    assert all("testing.check_cuts(" in test.read_text(encoding="utf-8") for test in tests)


@pytest.mark.parametrize("place", sorted(PROGRAMS.keys() - NOT_CHECKED.keys()))
def test_the_result_does_not_depend_on_where_batches_are_cut(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = formed(place, monkeypatch)
    with testing.job(env) as job:
        generators = {uid: each for uid, (_, each) in job._sources.items() if isinstance(each, GeneratorSource)}
    indices = np.arange(GENERATED_ROWS)
    testing.check_cuts(env, {uid: call_generator(each._fn, indices) for uid, each in generators.items()}, cuts=5)


def formed(place: str, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Run a program until it would run its job, and return that."""
    made: list[Environment] = []

    def stop(env: Environment, *_: Any, **__: Any) -> NoReturn:
        made.append(env)
        raise Formed

    monkeypatch.setattr(Environment, "execute", stop)
    monkeypatch.setattr(Environment, "start", stop)
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(ROOT / place)}
    try:
        exec(compile(PROGRAMS[place], place, "exec"), space)
    except Formed:
        return made[0]
    return next(value for value in space.values() if isinstance(value, Environment))
