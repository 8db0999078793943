"""Failures that a restart cannot mend end the job within seconds, and name the place and the way out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from machine import limit_s
from midstream import DataError, Environment, JobError, MidstreamError
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

ENDS_WITHIN_S = 10.0


def lines(directory: Path, name: str, text: str) -> None:
    """Write a file that has been at rest for long enough to be read now."""
    (directory / f".{name}").write_text(text)
    past_s = time.time() - 10
    os.utime(directory / f".{name}", (past_s, past_s))
    (directory / f".{name}").rename(directory / name)


def link(directory: Path) -> None:
    os.symlink(directory / "a.csv", directory / "b.csv")


def changed(directory: Path) -> None:
    lines(directory, "a.csv", "n\n1\n2\n3\n")


def bad_line(directory: Path) -> None:
    lines(directory, "b.csv", "n\n7\n7,8\n")


def no_division(directory: Path) -> None:
    lines(directory, "b.csv", "n\n7\n0\n")


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (link, r"b\.csv: is the same file as .*a\.csv, by a link.*; remove the link"),
        (changed, r"a\.csv: was changed after it was taken.*Move it away"),
        (bad_line, r"b\.csv, line 3: .*Expected 1 columns, got 2"),
        (no_division, r"of the same row, 2 times(.|\n)*ZeroDivisionError for the row \{'n': 0\}.*b\.csv"),
    ],
)
def test_a_running_job_ends_within_seconds(tmp_path: Path, happens: Callable[[Path], None], expected: str) -> None:
    directory = tmp_path / "in"
    directory.mkdir()
    lines(directory, "a.csv", "n\n1\n")
    env = Environment("ends", parallelism=1, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval=None)
    stream = env.read_files(directory, format="csv", schema={"n": int}, watch=True, interval="100 ms")
    rows = stream.map(lambda row: {"n": 12 // row["n"]}).collect()
    job = env.start(slots=ProcessSlots())
    until("the first file is read", lambda: (job.checkpoint(timeout_s=limit_s(60)), rows.rows())[1])
    happens(directory)
    began_s = time.monotonic()
    with pytest.raises(MidstreamError, match=expected) as raised:
        job.wait(timeout_s=limit_s(60))
    assert time.monotonic() - began_s < limit_s(ENDS_WITHIN_S)
    status = job.status()
    assert status.state == "failed"
    assert status.restarts == (1 if happens is no_division else 0)
    assert isinstance(raised.value, (DataError, JobError))
