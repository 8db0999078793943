"""`Environment(autoscale=…)`: bounds, and what is no bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from midstream import Environment
from midstream.api.submit import StartOptions
from midstream.engine.core.config import AutoscaleBounds
from midstream.engine.core.errors import ClusterError, ConfigError
from midstream.runtime.process.process_slots import ProcessSlots


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ((8, 2), "(8, 2) are no bounds, the lower one first"),
        ((4, 4), "a job that stays at one parallelism has parallelism=4"),
        ((0, 4), "autoscale: parallelism 0"),
        ((1, 200), "max_parallelism 128"),
        ((1,), "is not a pair of bounds such as (2, 16), nor 'advise'"),
        ((1, 2, 3), "is not a pair"),
        (4, "4 is not a pair"),
        (True, "True is not a pair"),
        ("on", "'on' is not a pair"),
        ("(2, 16)", "is not a pair"),
        ((1.0, 4), "1.0 is not a whole number"),
        ((True, 4), "True is not a whole number"),
        ((1, None), "None is not a whole number"),
        ({1, 4}, "is not a pair"),
    ],
)
def test_what_is_no_bounds_is_refused(bounds: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        Environment("job", autoscale=bounds)
    assert "autoscale" in str(refused.value)


def test_a_job_begins_at_the_lower_bound_unless_it_is_told_otherwise() -> None:
    assert Environment("job", autoscale=(2, 16)).program.config.parallelism == 2
    assert Environment("job", autoscale=[2, 16], parallelism=3).program.config.parallelism == 3  # type: ignore[arg-type]
    assert Environment("job", autoscale="advise").program.config.parallelism == 1
    assert Environment("job").program.config.parallelism == 1


def test_a_parallelism_outside_of_the_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("parallelism: 1 is not between the bounds of autoscale, 2 and 16")):
        Environment("job", autoscale=(2, 16), parallelism=1)
    env = Environment("job", autoscale=(2, 16), checkpoint_dir=tmp_path)
    env.from_collection([{"n": 1}]).collect()
    with pytest.raises(ConfigError, match="parallelism: 17 is not between"):
        env.execute(parallelism=17, slots=ProcessSlots())


def test_advice_needs_no_bounds_and_no_directory() -> None:
    env = Environment("job", autoscale="advise", parallelism=2)
    assert env.program.config.autoscale == AutoscaleBounds(1, 128, is_advice=True)
    assert Environment("job", autoscale="advise", max_parallelism=1).program.config.autoscale is not None
    env.from_collection([{"n": 1}]).collect()
    status = env.execute(slots=ProcessSlots())
    assert status.autoscale is not None and status.autoscale.is_advice


def test_a_job_without_a_checkpoint_directory_cannot_scale_itself() -> None:
    env = Environment("job", autoscale=(1, 2))
    env.from_collection([{"n": 1}]).collect()
    with pytest.raises(
        ConfigError, match="autoscale: a job changes its parallelism by a checkpoint: give checkpoint_dir="
    ):
        env.execute(slots=ProcessSlots())


def test_more_than_the_slots_that_there_can_be_are_refused_at_the_start(tmp_path: Path) -> None:
    env = Environment("job", autoscale=(1, 4), checkpoint_dir=tmp_path)
    env.from_collection([{"n": 1}]).collect()
    with pytest.raises(
        ClusterError, match="autoscale goes up to parallelism 4: the job needs 4 slots, but there are 2"
    ):
        env.execute(slots=ProcessSlots(slots_max=2))


def test_what_checks_for_room_before_the_start_asks_for_as_many_slots_as_the_job_may_want(tmp_path: Path) -> None:
    """`midstream doctor` does, and the embedded Spark is made as large."""
    for bounds, slots in (((1, 4), 4), ("advise", 1), (None, 1)):
        env = Environment("job", autoscale=bounds, checkpoint_dir=tmp_path)  # type: ignore[arg-type]  # a literal in a tuple
        env.from_collection([{"n": 1}]).collect()
        assert env.submission(StartOptions()).plan.slots_max == slots
