"""Regions of scenarios whose jobs write to the project's own sinks, which are struck while they commit and roll back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import COMMIT_FROZEN, FAULTS, ROLLBACK_FROZEN
from midstream_lab.scenarios.scenario import Scenario, draw

KINDS: Final = (
    *("parquet", "parquet shared", "jsonl"),
    *("delta", "delta partitioned", "delta evolving", "delta keyed", "delta deleting", "delta keyed evolving"),
    *("iceberg", "iceberg partitioned", "iceberg evolving"),
    *("iceberg keyed", "iceberg deleting", "iceberg keyed evolving"),
    *("delta mapped", "delta mapped deleting", "delta compacting", "delta keyed compacting"),
    *("iceberg compacting", "iceberg keyed compacting"),
)
"""The kinds of targets, see `real_targets.TARGETS`."""
_STRIKES: Final = (
    *("kill_driver", "stop_driver", "crash_at_publish", "freeze_at_publish", COMMIT_FROZEN, COMMIT_FROZEN),
    *("commit_fails", "commit_fails", "go_back", "go_back", "kill_slot", "publish_fails", "write_fails"),
    *("stop", "cancel", "rescale", "savepoint", "stop_savepoint", "drain", "user_error"),
)


def committing_to(*kinds: str, strikes: Sequence[str] = ()) -> Callable[[int], Scenario]:
    """Of a seed: much is committed to targets of one of these kinds, by drivers that are struck, overtaken and rewound.

    `strikes`: the faults; by default they are drawn.
    """

    def scenario(seed: int) -> Scenario:
        random = Random(f"real targets {seed}")
        topology = random.choice(("pipeline", "keyed", "keyed", "union", "timers"))
        rescale_to = random.choice((None, 1, 2, 3))
        drawn = draw(seed, topology=topology, parallelism=random.choice((1, 2, 3)), rescale_to=rescale_to, faults=())
        few = strikes or random.sample(FAULTS if random.random() < 0.2 else _STRIKES, random.choice((1, 2, 4)))
        kinds_of_faults = random.choices(few, k=random.choice((2, 4, 8)))
        if not strikes and random.random() < 0.5:
            kinds_of_faults += ("go_back", "go_back", "go_back", random.choice((ROLLBACK_FROZEN, COMMIT_FROZEN)))
        horizon = random.choice((300, 900, 1800))
        faults = (Fault(random.randrange(40, horizon), kind, random.randrange(1 << 20)) for kind in kinds_of_faults)
        tempo = replace(drawn.tempo, mail_us=40, io_us=random.choice((100, 2000)), clock_tick_us=0)
        tempo = replace(tempo, interleave=random.choice((0.0, 0.1, 0.3)))
        return replace(
            drawn,
            target=random.choice(kinds),
            faults=tuple(sorted((*drawn.faults, *faults), key=lambda fault: fault.step)),
            tempo=tempo,
            rows=random.choice((20, 50, 100)),
            batch_rows=random.choice((1, 3)),
            keys=random.choice((1, 3, 10)),
            interval_s=random.choice((0.001, 0.003, 0.01)),
            min_pause_s=random.choice((0.0, 0.002)),
            timeout_s=60.0,
            row_us=random.choice((0, 1000, 3000)),
            sink_rows=random.choice((0, 1, 3)),
            sink_pause_s=0.003,
            retained=random.choice((1, 2, 3)),
        )

    return scenario


into_real_targets = committing_to(*KINDS)
