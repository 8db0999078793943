"""A wheel leaves out the known bugs that measure the simulator; what users simulate and test with needs none of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from machine import limit_s

ROOT = Path(__file__).parent.parent
EXCLUDED = re.search(r"^exclude = (\[.*?\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
assert EXCLUDED is not None
LEFT_OUT = {file for pattern in ast.literal_eval(EXCLUDED[1]) for file in ROOT.glob(pattern)}
WITHOUT_THEM = """
import importlib, sys
for name in {left_out}:
    sys.modules[name] = None
for name in {kept}:
    importlib.import_module(name)
sys.argv = ["midstream", "simulate", *{arguments}]
from midstream.cli.main import main
sys.exit(main())
"""


def names(files: set[Path]) -> list[str]:
    return sorted(f"midstream.simulation.{file.stem}" for file in files)


def simulate_without_them(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = set((ROOT / "src" / "midstream" / "sim").glob("[!_]*.py")) - LEFT_OUT
    code = WITHOUT_THEM.format(left_out=names(LEFT_OUT), kept=names(kept), arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s(120), check=False
    )


def test_every_file_of_mutations_is_left_out() -> None:
    assert len(LEFT_OUT) > 20
    files = (ROOT / "src" / "midstream").rglob("*.py")
    about = re.compile(r"^(MUTATIONS\b|from midstream.simulation.(mutation|kills))", re.MULTILINE)
    assert {file for file in files if about.search(file.read_text(encoding="utf-8"))} <= LEFT_OUT


def test_seeds_are_simulated_without_them() -> None:
    done = simulate_without_them("--seeds", "0:1", "--topology", "keyed", "--rows", "40", "--jobs", "1")
    assert done.returncode == 0, done.stderr


def test_mutations_are_refused_where_there_are_none() -> None:
    done = simulate_without_them("--mutations", "skip_alignment")
    assert done.returncode == 2, done.stderr
    assert "run this in a checkout" in " ".join(done.stderr.split())
