"""tools/setup.sh: what is missing is said at once, with what helps, before anything is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from machine import limit_s

ROOT = Path(__file__).parent.parent


@pytest.fixture
def setup(tmp_path: Path):
    """Run the script in a tree of its own, in which nothing is installed; exit status and all it said."""
    tree = tmp_path / "a clone with blanks"
    (tree / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", tree / "tools")
    shutil.copy(ROOT / "tools" / "locked.txt", tree / "tools")
    shutil.copy(ROOT / "pyproject.toml", tree)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "JAVA_HOME")}
        done = subprocess.run(
            ["bash", str(tree / "tools" / "setup.sh"), *arguments],
            env={**clean, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s(60),
        )
        return done.returncode, done.stdout + done.stderr

    run.tree = tree  # type: ignore[attr-defined]  # functions take attributes
    return run


def test_java_is_looked_for_before_anything_is_installed(setup):
    status, said = setup(JAVA_HOME="/nowhere")
    assert status == 1
    assert "Spark needs Java 17 or newer; /nowhere/bin/java was not found" in said
    assert "--slots process" in said and "installing" not in said and "\x1b" not in said
    assert not (setup.tree / ".venv").exists()


def test_a_python_that_is_none_is_not_replaced_by_another(setup):
    status, said = setup("--without-java", PYTHON="/nope")
    assert (status, "PYTHON=/nope is no Python 3.11 or newer" in said) == (1, True)
    assert not (setup.tree / ".venv").exists()


def test_without_any_python_that_is_new_enough_the_advice_does_not_lead_back_here(setup, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "cksum", "sed"):
        (tools / name).symlink_to(shutil.which(name) or name)
    status, said = setup("--without-java", PATH=str(tools))
    assert status == 1
    assert "no Python 3.11 or newer found" in said and "older ones, whose python3 is older: https" in said


def test_another_python_than_that_of_the_venv_is_said_to_be_ignored(setup):
    venv = setup.tree / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "bin" / "midstream").symlink_to(sys.executable)
    both = (setup.tree / "pyproject.toml").read_bytes() + (setup.tree / "tools" / "locked.txt").read_bytes()
    crc = subprocess.run(["cksum"], input=both, capture_output=True, check=True).stdout.decode().strip()
    (venv / ".installed").write_text(f"{setup.tree} {crc}\n")
    assert setup("--without-java") == (0, "")
    assert setup("--without-java", PYTHON=sys.executable) == (0, "")
    status, said = setup("--without-java", PYTHON="/nope")
    assert status == 0
    assert said.startswith("PYTHON=/nope is not used: .venv is there, with Python 3.") and "rm -rf .venv" in said


def test_the_versions_of_everything_that_pyproject_names_are_known():
    """Else `make setup` installs another version tomorrow."""
    lines = [line for line in (ROOT / "tools" / "locked.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(
        re.fullmatch(r'[\w.-]+==[\w.+!]+ ; python_version == "3\.\d+" and sys_platform == "\w+"', line)
        for line in lines
    )
    locked = {re.sub(r"[._-]+", "-", line.partition("==")[0]).lower() for line in lines}
    named = set(re.findall(r'^  "([\w-]+)[^"]*[<>=]=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert len(named) > 15
    assert {name.lower() for name in named} <= locked, "run make lock"
