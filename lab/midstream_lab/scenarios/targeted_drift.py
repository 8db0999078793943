"""Regions of scenarios whose sources are kept in step in event time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from midstream_lab.jobs.shapes import Shape
from midstream_lab.scenarios.scenario import Scenario, draw

_FAULTS: Final = ("kill_slot", "user_error", "kill_driver", "rescale", "stop", "drain", "checkpoint", "cut_control")


def in_step(seed: int) -> Scenario:
    """Two sources whose splits advance at different speeds, several splits at a time; in every other run with failures."""
    random = Random(f"in step {seed}")
    topology = ("splits", "asof_join", "window", "full_join")[seed % 4]
    drawn = draw(seed, topology=topology, parallelism=random.choice((1, 2, 3)), faults=_FAULTS[: 8 * (seed % 2)])
    return _paced(replace(drawn, drift_us=random.choice((3_000, 10_000, 40_000)), rounds=random.choice((1, 1, 2))))


def in_step_with_lulls(seed: int) -> Scenario:
    """The same with sources that have no rows now and then, and nothing else befalls the job."""
    random = Random(f"in step with lulls {seed}")
    drawn = draw(seed, topology=("splits", "full_join")[seed % 2], parallelism=2, faults=())
    drawn = replace(drawn, shape=_idle(drawn.shape), has_lulls=True, splits=4, readers=2, rounds=1, rescaled=None)
    return replace(_paced(drawn), drift_us=random.choice((3_000, 10_000)), blocking=True, rows=50, interval_s=0.05)


def _paced(scenario: Scenario) -> Scenario:
    """Return the scenario without anything that makes messages wait, and with batches of a few rows."""
    tempo = replace(scenario.tempo, mail_us=5, control_us=50, data_us=20, io_us=100, clock_tick_us=0, interleave=0.0)
    random = Random(f"paced {scenario.seed}")
    return replace(
        scenario,
        tempo=tempo,
        row_us=0,
        sink_rows=0,
        timeout_s=60.0,
        batch_rows=random.choice((1, 3)),
        rows=random.choice((50, 100)),
        splits=random.choice((3, 4, 7)),
        readers=random.choice((1, 2, 3)),
    )


def _idle(shape: Shape) -> Shape:
    return tuple(
        replace(node, chain=tuple("idle" if kind in ("tight", "times") else kind for kind in node.chain))
        for node in shape
    )
