"""Jobs of the laboratory that scale themselves: their bounds, and the times after which they change."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from midstream.engine.coordinator import shell
from midstream.engine.coordinator.placement import autoscaler, load_model
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


def quick_times(seed: int) -> list[tuple[Any, str, Any]]:
    """Return times that fit a run of seconds, and shares at which a simulated job, hardly busy, has reasons to change."""
    random = Random(f"scaling {seed}")
    every_s = random.choice((0.01, 0.05))
    settle_s = random.choice((0.0, every_s, 5 * every_s))
    return [
        (shell, "TIME_INTERVAL_S", every_s),
        (autoscaler, "EVALUATE_S", every_s),
        (autoscaler, "SETTLE_S", settle_s),
        (autoscaler, "GROW_AFTER_S", every_s * random.choice((1, 3))),
        (autoscaler, "SHRINK_AFTER_S", every_s * random.choice((1, 4))),
        (autoscaler, "RETRY_S", random.choice((0.0, 0.1))),
        (autoscaler, "CHANGES_MAX", random.choice((1, 3, 12))),
        (load_model, "TARGET", random.choice((0.001, 0.05, 0.7))),
        (autoscaler, "FULL", random.choice((0.001, 0.1, 0.85))),
    ]
