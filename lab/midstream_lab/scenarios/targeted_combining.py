"""Regions of scenarios in which rows are combined before they are sent, and combined batches are in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from midstream.simulation.faults import IN_RECOVERY, RECOVERING, Fault
from midstream_lab.fault_kinds import BACKLOGGED, FAULTS
from midstream_lab.jobs.shapes import COMBINED
from midstream_lab.scenarios.scenario import Scenario, draw, with_backlog
from midstream_lab.scenarios.targeted_at_rest import windowed


def combining(seed: int) -> Scenario:
    """Whatever befalls a job that combines rows."""
    return draw(seed, topology=Random(f"combining {seed}").choice(tuple(COMBINED)))


def combining_of_few_kinds(seed: int) -> Scenario:
    """The same, with faults of one or two kinds, and mostly checkpoints in quick succession."""
    random = Random(f"combining of few kinds {seed}")
    kinds = random.sample(FAULTS, random.choice((1, 2)))
    drawn = draw(seed, topology=random.choice(tuple(COMBINED)), faults=kinds, rows=random.choice((50, 100, 200)))
    return replace(drawn, interval_s=random.choice((0.0005, 0.002, drawn.interval_s)))


combining_windowed = windowed(*COMBINED)


def combined_behind(*topologies: str) -> Callable[[int], Scenario]:
    """Of a seed: windows that are slow, so that much is in flight to them when the job continues at another parallelism."""

    def scenario(seed: int) -> Scenario:
        before, after = ((3, 2), (2, 3), (1, 4), (4, 3))[seed // len(topologies) % 4]
        drawn = draw(
            seed, topology=topologies[seed % len(topologies)], parallelism=before, rescale_to=after, faults=(), rows=200
        )
        random = Random(f"combined behind {seed}")
        drawn = with_backlog(drawn, random)
        drawn = replace(drawn, aligned_timeout_s=0.0, batch_rows=random.choice((5, 10)), row_us=1000, sink_rows=0)
        return replace(drawn, rows=200, keys=random.choice((3, 10)), skew=0.0, key_groups=16, pool_buffers=1024)

    return scenario


combining_behind = combined_behind(*COMBINED)


def combining_joined(seed: int) -> Scenario:
    """Small combined batches of few keys wait in many channels: slots take long for every mail."""
    topology = tuple(COMBINED)[seed % len(COMBINED)]
    drawn = draw(seed, topology=topology, parallelism=3, rows=300, faults=())
    tempo = replace(drawn.tempo, mail_us=400, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0, keys=3, skew=0.0)
    return replace(drawn, batch_rows=5, splits=7, rounds=1, row_us=0, sink_rows=0, queue_time_s=None)


def _rejoined(scenario_of: Callable[[int], Scenario], seed: int) -> Scenario:
    """Again and again the job continues at another parallelism while it recovers."""
    random = Random(f"combining rejoined {seed}")
    stop = IN_RECOVERY.index("stop")
    faults = tuple(
        Fault(100 * i, RECOVERING if i > 1 else BACKLOGGED, stop + len(IN_RECOVERY) * random.randrange(7 * 20_000))
        for i in range(1, 7)
    )
    return replace(scenario_of(seed), rows=400, batch_rows=20, text_bytes=200, interval_s=0.005, faults=faults)


def combining_rejoined(seed: int) -> Scenario:
    """The same while rows are recovered of which some are combined: if that pays, with about two of each key in a batch."""
    return replace(_rejoined(combining_behind, seed), keys=10)


_without_lateness = combined_behind("combined_window", "combined_slide", "combined_session")
"""In these, rows that were lost have shown in every second seed; in eight seeds of those with lateness they have not."""


def rejoined_in_both_forms(seed: int) -> Scenario:
    """The same where full batches are combined and the rest of each split is not: of its 28 rows, 20 are and 8 are not.

    There are more keys than key groups, so that consumers come to different places in what they share.
    """
    return replace(_rejoined(_without_lateness, seed), combined_rows_min=10, splits=14, rounds=1, keys=50)
