"""Regions of scenarios around the end of a job, in which no other checkpoint comes to repair what one has left undone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from midstream.sim.scenario import SAVEPOINTS, STALLS, Fault, Scenario, draw


def ending_without_another(seed: int) -> Scenario:
    """No checkpoint is due by itself: those for the end of the job fail, and word of that comes late to some slots."""
    random = Random(f"ending without another {seed}")
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=random.choice((10, 25)))
    horizon = random.choice((300, 600, 900))
    found = ((STALLS, random.choice((10, 20, 40))), ("write_fails", random.choice((4, 8, 16))))
    faults = tuple(
        Fault(random.randrange(horizon), kind, random.randrange(1 << 20)) for kind, count in found for _ in range(count)
    )
    drawn = replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.step)), interval_s=None)
    return replace(drawn, timeout_s=random.choice((0.2, 1.0)), sink_rows=0, row_us=0, aligned_timeout_s=0.0)


def intolerant_saving(seed: int) -> Scenario:
    """Checkpoints of savepoints cannot be written, and neither can others, of which the job tolerates hardly any."""
    random = Random(f"intolerant saving {seed}")
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=200)
    kinds = ("savepoint", "write_fails", "write_fails", "publish_fails", "savepoint")
    steps = sorted(random.randrange(60, 600) for _ in range(16))
    faults = tuple(Fault(step, random.choice(kinds), random.randrange(1 << 20)) for step in steps)
    tempo = replace(drawn.tempo, mail_us=40, io_us=2000, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.02, timeout_s=60.0, row_us=1000, inline_bytes=0)
    return replace(drawn, tolerable_failures=random.choice((0, 1)), batch_rows=3, sink_rows=1, sink_pause_s=0.003)


def ending_in_good_time(seed: int) -> Scenario:
    """Nothing befalls the job but requests, and checkpoints are due seldom or never."""
    random = Random(f"ending in good time {seed}")
    kinds = ("stop", "drain", "checkpoint", "rescale", "cancel", *SAVEPOINTS[:2])
    drawn = draw(seed, topology=("keyed", "union", "window")[seed % 3], faults=kinds, rows=random.choice((25, 100)))
    tempo = replace(drawn.tempo, clock_tick_us=0, io_us=random.choice((100, 2000)), mail_us=40, control_us=400)
    return replace(drawn, tempo=tempo, interval_s=random.choice((None, 20.0)), timeout_s=60.0)
