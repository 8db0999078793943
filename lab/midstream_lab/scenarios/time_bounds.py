"""How long the jobs of a scenario may take for a checkpoint, and may owe an answer or their end."""

from __future__ import annotations

import math
from typing import Final

from midstream.engine.coordinator.checkpoints.schedule import RETRY_MS
from midstream_lab.checkers.liveness_checker import COMMIT_S_MAX
from midstream_lab.scenarios.scenario import Scenario

COMMITS_MAX: Final = 3
"""How many checkpoints' commits may be added in front of what is owed: one under way, one more, and its own."""
SLOTS_S: Final = 30.0
"""The `slot_timeout` of all simulated jobs."""
MAILS_MAX: Final = 20
"""How many mails a message may wait for, and be followed by, in processes that do nothing else."""
HELD_US: Final = 1_000
"""What is added to that."""
LATE_SLOTS_MAX: Final = 2
"""How many slots, one after the other, a fault lets come late: each costs an attempt its `slot_timeout`."""


def bound_s(scenario: Scenario) -> float:
    """Return how long a job that is not disturbed may owe something.

    That is two checkpoints, one under way and its own, whose barriers wait for all rows of the job, and the commits of
    both and of one more; and slots that come late, for which a job waits up to its limit. Infinite if a checkpoint
    may run out of time without a fault: then it is not known how often it does.
    """
    s = scenario
    checkpoint_s = aligned_s(s)
    if s.timeout_s < checkpoint_s:
        return math.inf
    sinks = sum("sink" in kind for node in s.shape for kind in node.chain)
    commit_s = sinks * (COMMIT_S_MAX if s.on_slots else 0.0)
    # faults that strike one soon after the other leave all their late slots to the same restart
    late = LATE_SLOTS_MAX * max(1, sum(fault.kind == "slots_late" for fault in s.faults))
    return 2 * checkpoint_s + COMMITS_MAX * commit_s + RETRY_MS / 1000 + late * SLOTS_S


def patience_s(scenario: Scenario) -> float:
    """Return a generous bound for the time that a checkpoint of this scenario may take while no fault strikes."""
    if _overtakes_everywhere(scenario):  # a barrier that overtakes waits only for the rows that a task has taken
        return _time_s(scenario, min(scenario.rows, 4 * scenario.batch_rows), waits_for_sinks=False)
    return aligned_s(scenario)


def aligned_s(scenario: Scenario) -> float:
    """Return the same bound for a checkpoint whose barriers wait for all rows of the job, as at the end of its data."""
    return _time_s(scenario, scenario.rows, waits_for_sinks=scenario.sink_rows > 0)


def held_us_max(scenario: Scenario) -> int | None:
    """Return how long a split may be held back that could be read; None if it is not known how long messages take.

    Those are a report and a ceiling, and at both ends of each the mails before it.
    """
    s = scenario
    if s.faults or s.row_us or s.sink_rows or s.tempo.clock_tick_us:
        return None
    return 2 * s.tempo.control_us + MAILS_MAX * s.tempo.mail_us + HELD_US


def outdated_us_max(scenario: Scenario) -> int | None:
    """Return how long an idle channel may not consider splits that another one considers; None if that is not known.

    That is a message to each subtask, and the way from the source to the task that waits, with the mails before it.
    """
    s = scenario
    if s.faults or not (s.is_watched or s.has_lulls) or s.row_us or s.sink_rows or s.tempo.clock_tick_us:
        return None
    return s.tempo.control_us + len(s.shape) * (s.tempo.data_us + MAILS_MAX * s.tempo.mail_us) + HELD_US


def _time_s(scenario: Scenario, rows: int, *, waits_for_sinks: bool) -> float:
    s, tempo = scenario, scenario.tempo
    hops = len(s.shape)
    work_us = hops * rows * (s.row_us + tempo.clock_tick_us)
    pause_us = 1e6 * s.sink_pause_s * (rows / s.sink_rows) if waits_for_sinks else 0.0
    way_us = hops * (8 * tempo.data_us + 8 * tempo.control_us + 30 * tempo.io_us + 100 * tempo.mail_us)
    ticks_us = hops * 200 * tempo.clock_tick_us
    return 3 * (work_us + pause_us + way_us + ticks_us) / 1e6 + (s.aligned_timeout_s or 0.0)


def _overtakes_everywhere(scenario: Scenario) -> bool:
    """Whether barriers may overtake on every possible edge, so that none waits until a sink takes a row."""
    if scenario.aligned_timeout_s is None or scenario.changes:
        return False
    inputs = [each for shape in (scenario.shape, scenario.rescaled or ()) for node in shape for each in node.inputs]
    return all(each.partitioning.redistributable and not each.adapts for each in inputs)
