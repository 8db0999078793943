"""Jobs of the laboratory that scale themselves: their bounds, their loads, and the times after which they change."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from midstream.engine.coordinator import shell
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.coordinator.placement import autoscaler
from midstream.engine.coordinator.placement.attempt import TaskPhase
from midstream.engine.coordinator.placement.load_model import Load, TaskLoad
from midstream.engine.core.config import AutoscaleBounds

SHARE: Final = 0.1
"""The share of runs whose job scales itself by chance."""
MOST: Final = 8
"""No job of the laboratory begins at a higher parallelism."""


def scales(seed: int) -> bool:
    """Whether the job of a run of this seed scales itself by chance."""
    return Random(f"autoscale {seed}").random() < SHARE


def bounds_of(seed: int, key_groups: int) -> AutoscaleBounds | None:
    """Return bounds for all starts of a run; None if there is only one parallelism that its job could have."""
    most = min(key_groups, MOST)
    return AutoscaleBounds(1, most, is_advice=Random(f"bounds {seed}").random() < 0.1) if most > 1 else None


def drawn_load(seed: int) -> Callable[[Coordinator], Load]:
    """Return a measurement whose loads are drawn: simulated jobs are hardly busy, and end before they could change."""
    random = Random(f"load {seed}")

    def load(job: Coordinator) -> Load:
        parallelism, mean = job.plan.config.parallelism, random.choice((0.01, 0.2, 0.5, 0.9))
        tasks = [
            TaskLoad(
                vertex,
                [min(1.0, mean * random.choice((0.5, 1.0, 1.0, 1.2))) for _ in range(vertex.parallelism)],
                is_fixed=vertex.parallelism != parallelism,
            )
            for vertex in job.plan.graph.vertices
        ]
        return Load(tasks, parallelism)

    return load


def quick_changes(seed: int) -> list[tuple[Any, str, Any]]:
    """Return times that fit a run of seconds, and loads that change as quickly."""
    random = Random(f"scaling {seed}")
    every_s = random.choice((0.01, 0.05))
    return [
        (shell, "TIME_INTERVAL_S", every_s),
        (autoscaler, "EVALUATE_S", every_s),
        (autoscaler, "SETTLE_S", random.choice((0.0, every_s, 5 * every_s))),
        (autoscaler, "SETTLE_FACTOR", random.choice((0, 3))),
        (autoscaler, "GROW_AFTER_S", every_s * random.choice((1, 3))),
        (autoscaler, "SHRINK_AFTER_S", every_s * random.choice((1, 4))),
        (autoscaler, "RETRY_S", random.choice((0.0, 0.1))),
        (autoscaler, "CHANGES_MAX", random.choice((2, 3, 12))),
        (autoscaler, "_load", drawn_load(seed)),
        (autoscaler, "_is_measured", lambda job, now_ms: True),
        (autoscaler, "_input_ends", _has_ended),
    ]


def _has_ended(job: Coordinator) -> bool:
    """Whether all input has ended, which is later than what the engine takes as the end."""
    return job.attempt is None or TaskPhase.RUNNING not in job.attempt.phases.values()
