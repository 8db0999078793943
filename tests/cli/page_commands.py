"""The code blocks of a page, and a `midstream` command that runs while others do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def blocks(page: Path) -> list[tuple[str, str]]:
    """Kind and text of each block, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@contextmanager
def running(arguments: Sequence[str], stdout: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run `midstream` with these arguments in a process of its own; `stdout`: the file that gets what it prints."""
    with open(os.devnull if stdout is None else stdout, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from midstream.cli.main import main; sys.exit(main())", *arguments],
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=os.environ,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
