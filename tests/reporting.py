"""What a test run reports: how long each folder took, which tests were slowest, and the command that repeats a failure."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

import pytest
import pytest_timeout

from machine import limit_s

SLOWEST = 10


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Limits of whole tests are for an idle machine, and stretch with it."""
    stretched = settings._replace(timeout=limit_s(settings.timeout))
    return bool(pytest_timeout.pytest_timeout_set_timer(item, stretched))


def _folder(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    if len(seconds) < SLOWEST:
        return
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for nodeid, took_s in seconds.items():
        folders[_folder(nodeid)] += took_s
        tests[_folder(nodeid)] += 1
    terminalreporter.section("seconds in each folder, summed over the processes")
    for folder, took_s in folders.most_common():
        terminalreporter.line(f"{took_s:8.1f} s  {folder} ({tests[folder]} tests)")
    terminalreporter.section(f"the {SLOWEST} slowest tests")
    for nodeid, took_s in seconds.most_common(SLOWEST):
        terminalreporter.line(f"{took_s:8.1f} s  {nodeid}")
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if failed:
        terminalreporter.section("to repeat what failed, alone")
        for report in failed:
            terminalreporter.line(f".venv/bin/pytest {shlex.quote(report.nodeid)}")
