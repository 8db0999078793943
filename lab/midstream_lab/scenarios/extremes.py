"""Settings far from the usual ones, in some of the random runs: each from the rest of its range.

Most runs have short intervals, large tolerances and buffers in reserve, because much happens in them then. What goes wrong
only if no other checkpoint follows, if the first failure is one too many, or if there is no credit left, needs the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final

from midstream_lab.scenarios.scenario import Scenario

SHARE: Final = 0.12
"""The share of random runs that have such settings."""
OF_A_SETTING: Final = 0.3
"""In these runs, the share of each setting."""
EXTREMES: Final[Mapping[str, tuple[Any, ...]]] = {
    "interval_s": (0.2, 20.0, None, None, None),
    "tolerable_failures": (0, 0, 1, 3),
    "is_scant": (True,),
    "aligned_timeout_s": (0.1, 1.0, 60.0),
    "queue_time_s": (0.1, 10.0),
    "timeout_s": (600.0,),
    "min_pause_s": (0.05, 1.0),
    "retained": (10, 100),
    "inline_bytes": (1, 16 * 2**20),
    "buffer_bytes": (2**20,),
    "wire_bytes": (256, 2**24),
    "batch_rows": (1000,),
    "restart_delay_s": (0.0001, 1.0, 10.0),
    "heartbeat_timeout_s": (1.5, 60.0),
}
"""The values that `scenario.draw` and the regions do not draw, by setting."""
WITH_CHECKPOINTS: Final = ("interval_s", "tolerable_failures", "aligned_timeout_s", "min_pause_s", "inline_bytes")


def with_extremes(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario, in `SHARE` of all seeds with some settings that are far from the usual ones."""
    if Random(f"extremes {seed}").random() >= SHARE:
        return scenario
    changes: dict[str, Any] = {}
    for name, values in EXTREMES.items():
        random = Random(f"extreme {name} {seed}")  # of its own, so that a new setting leaves the others as they are
        if random.random() < OF_A_SETTING and (scenario.has_checkpoints or name not in WITH_CHECKPOINTS):
            changes[name] = random.choice(values)
    return replace(scenario, **changes)
