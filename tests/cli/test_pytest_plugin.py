"""The fixture `simulate` in a project of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import midstream
from machine import limit_s

TESTS = """
from midstream import Environment

ROWS = [{"n": n} for n in range(20)]

class Counted:
    def __init__(self):
        self.count = 0

    def __call__(self, row):
        self.count += 1
        return {"n": self.count}

def test_a_right_job(simulate):
    report = simulate(Environment("right").from_collection(ROWS).map(lambda row: row))
    print("seeds:", report.seeds)

def test_a_wrong_job(simulate):
    simulate(Environment("wrong").from_collection(ROWS).map(Counted(), {"n": int}), seeds=range(200))
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(midstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    plugin = ["-p", "midstream.cli.pytest_plugin"] if not _is_registered() else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", *plugin, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s(150),
        check=False,
    )


def _is_registered() -> bool:
    """Whether midstream was installed since it has the plugin; a source tree beside an older installation has not."""
    from importlib.metadata import entry_points

    return any(entry.value == "midstream.cli.pytest_plugin" for entry in entry_points(group="pytest11"))


@pytest.mark.systems
def test_the_fixture_finds_a_mistake_and_blames_no_right_job(tmp_path):
    (tmp_path / "test_jobs.py").write_text(TESTS)
    done = run(tmp_path, "--midstream-seeds", "3:12")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "seeds: 9" in done.stdout
    assert "A function keeps state outside of its declared state" in done.stdout
    assert "test_jobs.py:11: keeps state in an attribute of the function object: self.count += 1" in done.stdout


@pytest.mark.systems
def test_seeds_that_are_none_are_refused(tmp_path):
    (tmp_path / "test_jobs.py").write_text(TESTS)
    done = run(tmp_path, "--midstream-seeds", "many")
    assert "--midstream-seeds: seeds: 'many' is not A:B" in done.stdout + done.stderr


def test_pytest_finds_the_plugin_where_midstream_is_installed():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nmidstream = "midstream.cli.pytest_plugin"\n' in project
