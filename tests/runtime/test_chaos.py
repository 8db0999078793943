"""Random programs on real processes give exact output, whatever is killed, frozen, rescaled or stopped meanwhile.

CHAOS_SECONDS: for how long to run programs of fresh seeds; by default there is one short program.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos import RUN_S_MAX, Run, main

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))


@pytest.mark.timeout(2 * RUN_S_MAX + 60)
def test_one_program(tmp_path: Path) -> None:
    run = Run(tmp_path, 23)
    assert run.go() == "", run.said
    assert len(run.said) > 2, "nothing has happened to it"


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 2 * RUN_S_MAX + 60)
def test_programs_of_fresh_seeds(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"python {Path(__file__).with_name('chaos.py')} DIRECTORY {seed} {SECONDS:.0f}")
    assert main(tmp_path, seed, SECONDS) == 0
