"""A job's own modules in Spark's Python workers, which serve one job after the other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from machine import limit_s
from midstream.api.job_file import load_job

pytestmark = pytest.mark.spark

JOB = """
from midstream import Environment
from mods_project import lib

env = Environment("modules", parallelism=2)
rows = env.from_collection([{"n": 1}, {"n": 2}], splits=2).map(lambda row: {"n": lib.times(row["n"])}).collect()
"""


def test_an_edited_module_that_was_loaded_again_is_what_the_next_job_runs(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "mods_project").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.py").write_text(JOB)
    seen = []
    for factor in (10, 100):
        (tmp_path / "mods_project" / "lib.py").write_text(f"def times(n): return n * {factor}\n")
        importlib.invalidate_caches()
        if "mods_project.lib" in sys.modules:
            importlib.reload(sys.modules["mods_project.lib"])
        env = load_job(tmp_path / "jobs" / "job.py")
        rows = env.program.graph.nodes[-1].operator.sink  # type: ignore[union-attr]  # of the operator that it is
        env.start().wait(limit_s(60))
        seen.append(sorted(row["n"] for row in rows.rows()))
    for name in ("mods_project", "mods_project.lib"):
        del sys.modules[name]
    assert seen == [[10, 20], [100, 200]]
