"""Regions of scenarios around the end of a job, in which no other checkpoint comes to repair what one has left undone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from midstream.simulation.faults import Fault
from midstream.simulation.network import STALL_US
from midstream_lab.fault_kinds import SAVEPOINTS, STALLS
from midstream_lab.scenarios.scenario import Scenario, draw


def ending_without_another(seed: int) -> Scenario:
    """No checkpoint is due by itself: the first for the end of the job fails, and its notification comes late to one slot."""
    random = Random(f"ending without another {seed}")
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=25)
    to_slot = random.randrange(2)
    victims = (2 * (6 * each + to_slot) + 1 for each in iter(lambda: random.randrange(1 << 16), None))  # see `stall`
    long = next(victim for victim in victims if victim * 7919 % STALL_US > STALL_US / 2)
    faults = (
        Fault(20, "write_fails", random.randrange(4)),
        Fault(random.randrange(80, 400), STALLS, long),
    )
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=20, io_us=2000, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=None, timeout_s=60.0, aligned_timeout_s=0.0)
    return replace(drawn, sink_rows=0, row_us=0, rounds=1, inline_bytes=0)


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
