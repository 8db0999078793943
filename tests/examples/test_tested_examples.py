"""The examples with tests of their own: these pass, wherever they are started, and the jobs can be previewed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import midstream
from machine import limit_s
from midstream.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
CARTS = EXAMPLES / "carts"


def pytest_in(directory: Path, *arguments: str) -> str:
    """What pytest says that runs there, as for people who have midstream installed."""
    path = os.pathsep.join([str(Path(midstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.systems
@pytest.mark.parametrize(("name", "tests"), [("carts", 7), ("clickstream", 8), ("devices", 9), ("orders", 9)])
def test_its_tests_pass(name, tests, tmp_path):
    copied = shutil.copytree(EXAMPLES / name, tmp_path / name)
    assert f"{tests} passed" in pytest_in(tmp_path, str(copied))


def test_a_simulation_with_the_rows_of_its_files_finds_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", str(EXAMPLES / "clickstream" / "clickstream.py"), "--seeds", "0:2"]) == 0
    assert "the output with failures equals the output without" in capsys.readouterr().out


def test_its_first_rows_can_be_looked_at(capsys):
    assert main(["run", str(CARTS / "carts.py"), "--preview", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["streams"]
    assert [(each["stream"].split(" ")[0], len(each["rows"])) for each in shown] == [
        ("abandoned", 1),
        ("sold", 2),
        ("late", 0),
    ]
    assert shown[0]["rows"][0]["user"] == "bob"
    assert not (CARTS / "sold").exists()


def test_people_see_tables(capsys):
    assert main(["run", str(CARTS / "carts.py"), "--preview", "5"]) == 0
    out = capsys.readouterr().out
    assert "abandoned (jsonl): 1 row" in out
    assert "bob" in out
