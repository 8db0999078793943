"""Checkpoints that someone has changed, checksums included: a clear error, or a result; see `mutated_checkpoints`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

TESTS = Path(__file__).parents[2]
SEEDS = 150
NIGHTLY_SECONDS = float(os.environ.get("MUTANT_SECONDS", "60"))


def tried(first: int, stop: int, seconds: float = 0.0) -> tuple[Counter[str], list[str]]:
    """Try the mutants of these seeds, and return the outcomes and what is wrong. A process that died has one seed to
    blame, and the next one continues after it.
    """
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    until_s = time.monotonic() + seconds
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((*sys.path, str(TESTS))), "POLARS_MAX_THREADS": "1"}
    while first < stop and (not seconds or time.monotonic() < until_s):
        left = str(max(until_s - time.monotonic(), 1.0) if seconds else 0.0)
        command = [sys.executable, str(TESTS / "mutated_checkpoints.py"), str(first), str(stop), left]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        for line in ended.stdout.splitlines():
            if line.startswith("["):
                wrong.append(msgspec.json.decode(line)[1])
            elif line.startswith("{"):
                outcomes.update(msgspec.json.decode(line))
        if ended.returncode == 0:
            break
        begun = [int(line.split()[0]) for line in ended.stdout.splitlines() if line.endswith(" begins")]
        assert begun, ended.stderr
        wrong.append(f"seed {begun[-1]}: the process ended with {ended.returncode}: {ended.stderr[-5000:]}")
        first = begun[-1] + 1
    return outcomes, wrong


@pytest.mark.systems
def test_a_changed_checkpoint_is_refused_or_restored() -> None:
    outcomes, wrong = tried(0, SEEDS)
    assert not wrong, "\n\n".join(wrong)
    for what in ("inspect", "restore"):  # mutants that are all refused by one check would try nothing
        assert outcomes[f"{what}: result"] > SEEDS // 10 and outcomes[f"{what}: StorageError"] > SEEDS // 10, outcomes


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_SECONDS + 300)
def test_changed_checkpoints_of_fresh_seeds() -> None:
    first = time.time_ns() % 2**40
    _, wrong = tried(first, first + 10**9, NIGHTLY_SECONDS)
    assert not wrong, "\n\n".join(wrong)


if __name__ == "__main__":
    found, complaints = tried(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    print("\n\n".join(complaints), found, sep="\n\n")
