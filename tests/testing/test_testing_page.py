"""The examples of docs/guide/testing.md are one file, and its tests pass."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "testing.md"
CODE = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S))
TESTS = re.findall(r"^def (test_\w+)", CODE, re.M)


@pytest.fixture(scope="module")
def page() -> ModuleType:
    module = ModuleType("__main__")
    exec(compile(CODE, str(PAGE), "exec"), module.__dict__)
    return module


def test_there_is_an_example_for_each_part():
    assert len(TESTS) >= 8


@pytest.mark.parametrize("name", TESTS)
def test_the_example_passes(page, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(page, name)()
    assert list(tmp_path.iterdir()) == []
