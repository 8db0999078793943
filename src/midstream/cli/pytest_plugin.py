"""The pytest plugin: the fixture `simulate`, and options of pytest's command line for its extent.

pytest loads this file wherever midstream is installed, so it imports nothing of the engine before a test needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from midstream.testing.simulation.campaign import Report

SEEDS: Final = "0:50"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("midstream", "simulated jobs (midstream)")
    group.addoption(
        "--midstream-seeds", default=SEEDS, metavar="A:B", help=f"seeds of the fixture simulate (default: {SEEDS})"
    )
    group.addoption(
        "--midstream-jobs",
        type=int,
        default=1,
        metavar="N",
        help="how many processes simulate one job; 0: one per core (default: 1)",
    )


@pytest.fixture
def simulate(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`midstream.testing.simulate` with the seeds and processes given on pytest's command line.

    def test_my_job_survives_failures(simulate):
        simulate(env, {"clicks": [{"user": 1, "ms": 5}, {"user": 2, "ms": 7}]})
    """
    from midstream.engine.core.errors import ConfigError
    from midstream.simulation.seeds import parse_seeds
    from midstream.testing import simulate as simulated

    try:
        seeds = parse_seeds(request.config.getoption("--midstream-seeds"))
    except ConfigError as error:
        raise pytest.UsageError(f"--midstream-seeds: {error}") from None
    jobs = request.config.getoption("--midstream-jobs") or os.cpu_count() or 1

    def with_options(job: Any, inputs: Any = None, **options: Any) -> Report:
        return simulated(job, inputs, **{"seeds": seeds, "jobs": jobs, **options})

    return with_options
