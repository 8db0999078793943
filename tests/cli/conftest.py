from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import Answering, Start, begun

from machine import limit_s
from midstream.engine.protocol.job_status import JobStatus
from sample_status import sample


@pytest.fixture
def status() -> JobStatus:
    return sample()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Begins jobs whose coordinators are scripted, by id and name."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    jobs: list[Answering] = []

    def begin(job_id: str, name: str, *, has_page: bool = False) -> Answering:
        jobs.append(begun(job_id, name, has_page))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.driver.cancel("the test is over")
        assert job.driver.ended.wait(limit_s(20))
