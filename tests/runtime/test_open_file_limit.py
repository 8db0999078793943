"""The limit of open files is raised where it may be, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from midstream.runtime.process.open_file_limit import allow
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow(needed), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "expected"),
    [(100, 500, 300, "300 300 500"), (100, 200, 300, "200 200 200"), (200, 500, 100, "100 200 500")],
    ids=["raised", "as far as it goes", "enough"],
)
def test_the_soft_limit_is_raised_up_to_the_hard_one(soft: int, hard: int, needed: int, expected: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, needed))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()
