"""docs/tutorial.md works as it stands: its commands and its code in order, and what it shows is what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
from page_commands import blocks, running

import midstream
from machine import limit_s
from midstream.cli.main import main
from waiting import until

ROOT = Path(__file__).parents[2]
BLOCKS = blocks(ROOT / "docs" / "tutorial.md")
INSTALLING = ("make ", "source ")
FIGURE = re.compile(r"\d+(?:\.\d+)? (?:MiB|ms|s)\b|process \d+")
"""What differs from run to run in a line that the page shows."""


class Reader:
    """Does what the page says, in an empty directory. The second terminal is this process."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str], jobs: ExitStack) -> None:
        self._directory = directory
        self._capfd = capfd
        self._jobs = jobs
        self._first_terminal = directory / "first-terminal.txt"
        self._pid = 0
        """Of the slot that the last status has shown."""

    def go(self, kind: str, text: str, shown: list[str]) -> None:
        """`shown`: lines that the last command of the block prints."""
        if kind == "sh":
            *before, last = [line for line in text.splitlines() if not line.startswith(INSTALLING)] or [""]
            for command in before:
                self._enter(command)
            if last:
                self._see(last, shown)
        elif kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None, "which file a block is, is said in its first line"
            Path(name[1]).write_text(text.partition("\n")[2])
        elif kind == "diff":
            edit(Path("shop.py"), text.splitlines(keepends=True))

    def _see(self, command: str, shown: Sequence[str]) -> None:
        words = shlex.split(command)
        if words[:2] == ["midstream", "run"] and "--preview" not in words:
            self._jobs.enter_context(running(words[1:], self._first_terminal))
            until(
                command,
                lambda: holds(self._first_terminal.read_text(), shown),
                60,
                found=self._first_terminal.read_text,
            )
        elif words[0] == "cat" or words[:2] == ["midstream", "status"]:  # may be repeated until what they show is there
            until(command, lambda: holds(self._enter(command), shown), 60, found=lambda: self._enter(command))
        else:
            printed = self._enter(command)
            assert holds(printed, shown) or self._appears(shown), printed

    def _appears(self, shown: Sequence[str]) -> bool:
        """In the first terminal."""
        return bool(until(f"{shown}", lambda: holds(self._first_terminal.read_text(), shown), 60))

    def _enter(self, command: str) -> str:
        """Run a command of the second terminal, and return what it prints."""
        words = shlex.split(command)
        if words[0] == "cd":
            os.chdir(words[1])
            return ""
        if words[0] == "midstream":
            status = main(words[1:])
            assert status == 0 or words[1] == "status", command  # which is repeated
            printed = self._capfd.readouterr().out
            for pid in re.findall(r"\(process (\d+)\)", printed):
                self._pid = int(pid)
            return printed
        if words[0] == "pytest":
            command = shlex.join([sys.executable, "-m", *words, "-p", "no:cacheprovider"])
        if words[0] == "kill":
            command = shlex.join([*words[:-1], str(self._pid)])
        path = os.pathsep.join([str(Path(midstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=limit_s(120),
            check=False,
        )
        assert done.returncode == 0 or words[0] == "cat", done.stdout + done.stderr
        return done.stdout


def holds(printed: str, shown: Sequence[str]) -> bool:
    """Whether each line is there, in this order, but for figures; a shown line may be the beginning of a printed one."""
    lines = iter(printed.splitlines())
    return all(any(FIGURE.sub("#", line).startswith(FIGURE.sub("#", wanted)) for line in lines) for wanted in shown)


def edit(file: Path, lines: Sequence[str]) -> None:
    """Apply a block of a diff, in which all lines follow one another in the file."""
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


def steps() -> Iterator[tuple[str, str, list[str]]]:
    """Kind and text of each block, and the lines that the page shows after it."""
    for (kind, text), (next_kind, next_text) in zip_longest(BLOCKS, BLOCKS[1:], fillvalue=("", "")):
        if kind != "text":
            yield kind, text, next_text.splitlines() if next_kind == "text" else []


@pytest.mark.systems
@pytest.mark.timeout(600)
def test_the_page_does_what_it_says(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with ExitStack() as jobs:
        reader = Reader(tmp_path, capfd, jobs)
        for kind, text, shown in steps():
            reader.go(kind, text, shown)
    rows = Path("spent").glob("*")
    assert sorted(line for file in rows for line in file.read_text().splitlines()) == sorted(
        f'{{"user":"{user}","spent":{spent}}}'
        for user, spent in (("ann", 3), ("ann", 7), ("ann", 9), ("ann", 13), ("bob", 5))
    )


def test_every_block_is_a_step():
    assert {kind for kind, _ in BLOCKS} == {"sh", "text", "python", "diff"}
    assert all(before == "sh" for (before, _), (kind, _) in pairwise(BLOCKS) if kind == "text")
    commands = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    assert [line for line in commands if line.startswith(INSTALLING)] == commands[:2]
    assert f"\n{commands[0].removeprefix('make ')}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
