"""Random programs on real processes give exact output, whatever is killed, frozen, rescaled or stopped meanwhile.

One short program, and with NIGHTLY=1 those of fresh seeds, for CHAOS_SECONDS (600 by default) each on processes of their
own and on executors of Spark.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from chaos import PROCESSES, RUN_S_MAX, Run, compared, main, rows_of

pytestmark = pytest.mark.systems

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))


@pytest.mark.timeout(2 * RUN_S_MAX + 60)
def test_one_program(tmp_path: Path) -> None:
    run = Run(tmp_path, 23)
    assert run.go() == "", run.said
    assert len(run.said) > 2, "nothing has happened to it"


def test_rows_that_are_lost_doubled_or_changed_are_told(tmp_path: Path) -> None:
    at = datetime(2024, 1, 1)
    rows = pl.DataFrame({"key": ["a", "a", "b"], "id": [1, 1, 2], "at": [at] * 3, "x": [5, 5, 6]})
    for name, written in (("all", rows), ("lost", rows[1:]), ("doubled", rows[[0, 1, 2, 2]])):
        (tmp_path / name).mkdir()
        written[:2].write_parquet(tmp_path / name / "0.parquet")
        written[2:].write_parquet(tmp_path / name / "1.parquet")
    expected = rows_of(tmp_path / "all")
    assert compared(expected, rows_of(tmp_path / "all")) == ""
    assert "expected [('a', 1," in compared(expected, rows_of(tmp_path / "lost"))
    assert "found [('b', 2," in compared(expected, rows_of(tmp_path / "doubled"))
    assert "expected" in compared(expected, expected.with_columns(x=pl.col("x") + 1))
    assert "expected" in compared(expected, rows_of(tmp_path / "nothing"))


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 4 * RUN_S_MAX + 60)
@pytest.mark.parametrize("master", [PROCESSES, "local-cluster[2,2,1024]"])
def test_programs_of_fresh_seeds(tmp_path: Path, master: str) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"python {Path(__file__).with_name('chaos.py')} DIRECTORY {seed} {SECONDS:.0f} '{master}'")
    assert main(tmp_path, seed, SECONDS, master) == 0
