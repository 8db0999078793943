"""tools/setup.sh: what is missing is said at once, with what helps, before anything is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def setup(tmp_path: Path):
    """Run the script in a tree of its own, in which nothing is installed; exit status and all it said."""
    tree = tmp_path / "a clone with blanks"
    (tree / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", tree / "tools")
    shutil.copy(ROOT / "pyproject.toml", tree)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "JAVA_HOME")}
        done = subprocess.run(
            ["bash", str(tree / "tools" / "setup.sh"), *arguments],
            env={**clean, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
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
    assert (status, "PYTHON=/nope is no Python 3.10 or newer" in said) == (1, True)
    assert not (setup.tree / ".venv").exists()


def test_without_any_python_that_is_new_enough_the_advice_does_not_lead_back_here(setup, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cksum", "sed"):
        (tools / name).symlink_to(shutil.which(name) or name)
    status, said = setup("--without-java", PATH=str(tools))
    assert status == 1
    assert "no Python 3.10 or newer found" in said and "older ones, whose python3 is older: https" in said


def test_another_python_than_that_of_the_venv_is_said_to_be_ignored(setup):
    venv = setup.tree / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "bin" / "midstream").symlink_to(sys.executable)
    crc = subprocess.run(
        ["cksum"], stdin=(setup.tree / "pyproject.toml").open("rb"), capture_output=True, text=True, check=True
    ).stdout.strip()
    (venv / ".installed").write_text(f"{setup.tree} {crc}\n")
    assert setup("--without-java") == (0, "")
    assert setup("--without-java", PYTHON=sys.executable) == (0, "")
    status, said = setup("--without-java", PYTHON="/nope")
    assert status == 0
    assert said.startswith("PYTHON=/nope is not used: .venv is there, with Python 3.") and "rm -rf .venv" in said
