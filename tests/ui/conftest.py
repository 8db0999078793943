from __future__ import annotations

import pytest
from sample_status import sample

from midstream.protocol.job_status import JobStatus


@pytest.fixture
def status() -> JobStatus:
    return sample()
