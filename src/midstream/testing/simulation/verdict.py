"""Decides whether a run has the result of the reference run, and finds the smallest scenario in which it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from midstream.engine.core.error_rows import counted
from midstream.testing.simulation.job_scenario import REFERENCE, SIDES, Cuts, JobScenario, Width, without
from midstream.testing.simulation.late_rows import held_late
from midstream.testing.simulation.output_compare import Contract, Difference, differences, rows_of
from midstream.testing.simulation.simulated_job import SimulatedJob, SourceLine
from midstream.testing.simulation.simulated_run import Ran, run_job
from midstream.testing.simulation.surroundings import Effect

SHRINK_TRIES_MAX: Final = 60
PLAINEST: Final = "kill_slot"
"""The fault that is easiest to understand."""
SHRINK_S: Final = 15.0
"""The limit on processor time."""


@dataclass(slots=True)
class Verdict:
    """The verdict on a run. `kind` is "" if the run passed."""

    kind: str = ""
    differences: list[Difference] = field(default_factory=list)
    error: str = ""
    effects: list[tuple[Effect, int, int]] = field(default_factory=list)
    """Effects that occurred more often than in the reference run, with both numbers."""

    def lines(self) -> list[str]:
        lines = [line for difference in self.differences for line in difference.lines()]
        if self.error:
            lines += _short(self.error)
        for effect, before, after in self.effects:
            lines.append(f"{effect.location}: a function {effect.what}: {counted(after, 'time')} instead of {before}")
        return lines


def _short(error: str) -> list[str]:
    """Return what the function raised and where, without the engine's part of the error."""
    return error.partition("\nThe above exception was the direct cause")[0].splitlines()[:LINES_MAX]


LINES_MAX: Final = 30
DIFFERS: Final = "differs"
FAILS: Final = "fails"
ENGINE: Final = "engine"
EFFECT: Final = "effect"
LONG: Final = "long"


def judge(job: SimulatedJob, reference: Ran, ran: Ran, contracts: Mapping[str, Contract]) -> Verdict:
    if ran.engine_bugs:
        return Verdict(ENGINE, error="\n".join(ran.engine_bugs))
    if ran.error:
        return Verdict(FAILS, error=ran.error)
    if not ran.is_over:
        return Verdict(LONG, error=f"the job had not ended after {ran.steps:,} steps")
    reference = reference_of(job, reference, ran)
    found = differences(reference.output, ran.output, compared(job), contracts)
    if found:
        return Verdict(DIFFERS, found)
    more = [
        (effect, reference.effects[effect], count)
        for effect, count in ran.effects.items()
        if count > reference.effects[effect]
    ]
    return Verdict(EFFECT, effects=more) if more else Verdict()


def reference_of(job: SimulatedJob, reference: Ran, ran: Ran) -> Ran:
    """Return what to compare `ran` with: a run without failures over the rows that `ran` has read, with the same late
    rows.
    """
    late = {uid: ran.output.get(output_uid) for uid, output_uid in job.late_outputs.items()}
    is_late = any(
        reference.output.get(output_uid) or ran.output.get(output_uid) for output_uid in job.late_outputs.values()
    )
    are_others = any(
        rows_of(reference.output.get(output_uid)) != rows_of(ran.output.get(output_uid))
        for output_uid in job.late_outputs.values()
    )
    if ran.drained is None and not are_others:
        return reference
    if ran.drained is not None:
        job = job.cut_off(ran.drained)
    return run_job(held_late(job, late) if is_late else job, REFERENCE)


def compared(job: SimulatedJob) -> list[SourceLine]:
    """Return the program's sinks, and the late rows that it uses."""
    outputs = job.outputs
    return [*job.sinks.values(), *(outputs[output_uid] for output_uid in job.late_outputs.values())]


@dataclass(slots=True)
class Small:
    """A failing scenario after shrinking."""

    job: SimulatedJob
    reference: Ran
    scenario: JobScenario
    verdict: Verdict


def shrink(small: Small, contracts: Mapping[str, Contract]) -> Small:
    """Shrink: fewer sides that differ from the reference run, fewer faults, fewer rows, as long as the failure is the
    same.
    """
    kind = small.verdict.kind
    left = SHRINK_TRIES_MAX
    end_s = time.process_time() + SHRINK_S
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for scenario in _smaller(small.scenario):
            if left <= 0 or time.process_time() > end_s:
                return small
            left -= 1
            verdict = judge(small.job, small.reference, run_job(small.job, scenario), contracts)
            if verdict.kind == kind:
                small = replace(small, scenario=scenario, verdict=verdict)
                has_shrunk = True
                break
        if has_shrunk:
            continue
        for job in _shorter(small.job):
            if left <= 0 or time.process_time() > end_s:
                return small
            left -= 2
            reference = run_job(job, REFERENCE)
            verdict = judge(job, reference, run_job(job, small.scenario), contracts)
            if verdict.kind == kind and not reference.error:
                small = Small(job, reference, small.scenario, verdict)
                has_shrunk = True
                break
    return small


def _smaller(scenario: JobScenario) -> Iterator[JobScenario]:
    """Yield scenarios that differ less from the reference run, the smallest first."""
    for side in SIDES:
        if getattr(scenario, side) != getattr(REFERENCE, side):
            yield without(scenario, side)
    outer = scenario.outer
    for smaller in (replace(outer, clock_s=0.0), replace(outer, random=0), replace(outer, hash=0)):
        if smaller != outer:
            yield replace(scenario, outer=smaller)
    faults = scenario.failures.faults
    for index in range(len(faults)):
        yield replace(scenario, failures=replace(scenario.failures, faults=faults[:index] + faults[index + 1 :]))
    for index, fault in enumerate(faults):
        if fault.kind != PLAINEST and not scenario.failures.drains:  # see DRAIN_FAULTS
            plainer = (*faults[:index], replace(fault, kind=PLAINEST), *faults[index + 1 :])
            yield replace(scenario, failures=replace(scenario.failures, faults=plainer))
    plain = replace(REFERENCE.failures, faults=faults, interval_s=scenario.failures.interval_s)
    if scenario.failures != plain:
        yield replace(scenario, failures=plain)
    width = scenario.width
    if width.then != width.first:
        yield replace(scenario, width=Width(width.first, width.first))
    if scenario.cuts.are_random:
        yield replace(scenario, cuts=Cuts(scenario.cuts.batch_rows))
    if any(scenario.order.rates):
        yield replace(scenario, order=replace(scenario.order, rates=()))


def _shorter(job: SimulatedJob) -> Iterator[SimulatedJob]:
    """Yield the job with fewer rows of one source."""
    for uid, recorded in job.inputs.items():
        for rows in (recorded.rows // 4, recorded.rows // 2, recorded.rows * 3 // 4):
            if len(recorded.splits) <= rows < recorded.rows:
                yield replace(job, inputs={**job.inputs, uid: recorded.first(rows)})
