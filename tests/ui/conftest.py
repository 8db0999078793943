from __future__ import annotations

import pytest

from midstream.protocol.job_status import JobStatus
from sample_status import sample


@pytest.fixture
def status() -> JobStatus:
    return sample()
