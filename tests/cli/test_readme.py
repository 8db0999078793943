"""What README.md tells a newcomer to do works as it stands, on plain processes where it would be Spark."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import polars as pl
import pytest
from page_commands import blocks, running

from machine import limit_s
from midstream.cli.main import main
from midstream.runtime.driver.job_registry import list_jobs
from waiting import until

ROOT = Path(__file__).parents[2]
BLOCKS = blocks(ROOT / "README.md")


def commands() -> list[list[str]]:
    """Arguments of each `midstream` command, in order."""
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(".venv/bin/midstream ")]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory that has, of a clone, what the commands need: output and checkpoints stay out of the clone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_jobs_that_are_shown_are_files_of_the_clone():
    shown = [text for kind, text in BLOCKS if kind == "python"]
    assert len(shown) == 2
    for text in shown:
        name = re.match(r"# (examples/\w+\.py)\n", text)
        assert name is not None, "which file a block is, is said in its first line"
        assert (ROOT / name[1]).read_text(encoding="utf-8") == text


def test_the_first_job_prints_what_is_shown(files, capfd):
    assert main(commands()[0]) == 0
    [shown] = [text for kind, text in BLOCKS if kind == "text"]
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert sorted(printed) == sorted(shown.splitlines())


@pytest.mark.systems
@pytest.mark.timeout(600)
def test_the_commands_about_the_second_job_do_what_is_said(files, capfd):
    [first, again, *others] = commands()[1:]
    assert first == ["run", "examples/visits.py"]
    assert again == ["run", "examples/visits.py", "--from", "latest"]
    for arguments in (first, again):
        before = len(list((files / "out" / "visits").glob("*.parquet")))
        with running([*arguments, "--slots", "process"]) as process:
            until("the job to be announced", list_jobs, 120)
            until(
                "more rows in the sink",
                lambda before=before: len(list((files / "out" / "visits").glob("*.parquet"))) > before,  # type: ignore[misc]  # mypy infers no lambda with defaults
                120,
            )
            if arguments is again:
                for each in others:
                    assert main([*each, *(["--seconds", "1"] if each[0] == "simulate" else [])]) == 0, each
            process.send_signal(signal.SIGINT)
            assert process.wait(limit_s(120)) == 128 + signal.SIGINT
    out = capfd.readouterr().out
    assert "visits  running" in out and "watermark" in out
    windows = pl.read_parquet("out/visits/*.parquet")
    assert windows.group_by("page", "window_start").len()["len"].max() == 1
    asked = {each[0] for each in others}
    assert asked == {"list", "status", "inspect", "state", "simulate"}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [
        line.split()[1] for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line[:5] == "make "
    ]
    assert targets and all(f"\n{target}:" in makefile for target in targets)
