"""Changes the parallelism of a running job by its load, within the bounds that the program gives.

Every `EVALUATE_S`, while all tasks run, it estimates how many times as many rows the job should process:

- 1 if the job keeps up: no slot is full, and no source waits for the tasks after it.
- Otherwise, from event time, if it is of the present: if it advances by 0.8 s in a second, 1 / 0.8 = 1.25 times as many
  rows arrive. The job is also to be up to date within `CATCH_UP_S`, for which slots may work all of the time: a lag of
  300 s asks for `TARGET` * (1 + 300 / 300) / 0.8 = 1.75 times as many rows.
- Without event time, from the sources: one that works for a tenth of the time and waits for four tenths could emit five
  times as many rows. If that is unknown, too, twice as many.

The parallelism that is wanted is the lowest at which the busiest slot would then work for `TARGET` of the time, as the
load model predicts it. The job grows if all evaluations of `GROW_AFTER_S` want more than it has; it shrinks if all
evaluations of the last `SHRINK_AFTER_S` want less. It grows to the median of what they want, and shrinks by the least.

After each change and each restart, the job is not evaluated until it has processed what was in flight and `SETTLE_S`
have passed. After a change it also waits for three times as long as the change took and, if it grew, as it had fallen
behind before: the rows that arrived meanwhile say nothing about the new parallelism.

A job that has to grow within `SHRINK_AFTER_S` after it has shrunk shrinks only after twice the time next, up to an hour.
There are at most `CHANGES_MAX` changes in an hour, and it does not shrink after the half of them. A change that fails,
such as for want of slots, leaves the job as it runs, and is tried again, by half as much, after a pause that doubles
each time.

If slots are lost and others do not come, the job continues on those that it has, if the lower bound allows it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec

from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.attempt import TaskPhase
from midstream.engine.coordinator.placement.load_model import FULL, TARGET, Load, TaskLoad
from midstream.engine.coordinator.placement.slot_pool import Rate
from midstream.engine.coordinator.restore.distribute import StateDistribution
from midstream.engine.core.config import AutoscaleBounds
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.protocol.bottleneck import BACKPRESSURED, MEASURABLE
from midstream.engine.protocol.job_status import AutoscaleChange, AutoscaleStatus, event_time_lag_s
from midstream.engine.protocol.messages import Reply

if TYPE_CHECKING:
    from midstream.engine.coordinator.coordinator import Coordinator

EVALUATE_S: Final = 5.0
SETTLE_S: Final = 15.0
"""The time for which nothing is concluded from a new attempt: caches are cold, and shares are averages over seconds."""
SETTLE_FACTOR: Final = 3
"""For how many times as long as a change took: at `TARGET`, slots catch up in 2.3 times the time that they have missed."""
GROW_AFTER_S: Final = 15.0
SHRINK_AFTER_S: Final = 300.0
CATCH_UP_S: Final = 300.0
STEP_MAX: Final = 3
"""How many times as many rows are aimed at with one change: at more, the estimate is worth little."""
CHOICES_MAX: Final = 5
"""How many times the present parallelism is the highest that is considered: enough for that many rows."""
HOUR_S: Final = 3600.0
CHANGES_MAX: Final = 12
RETRY_S: Final = 60.0
SLOWEST: Final = 0.1
"""Event time that advances by less than this in a second says only that the job falls behind."""
_NOT_MEASURED: Final = "its load is being measured"


class Autoscaler:
    """Nothing happens in it without `bounds`."""

    def __init__(self, effects: Effects, bounds: AutoscaleBounds | None, distribution: StateDistribution) -> None:
        self.changes: deque[AutoscaleChange] = deque(maxlen=20)
        """The most recent changes, newest first."""
        self._effects = effects
        self._bounds = bounds
        self._distribution = distribution
        self._next_s = 0.0
        """When the load is evaluated next, on the clock of `Effects.elapsed_s`, like all times here."""
        self._settled_s = 0.0
        """When the first evaluation may be made."""
        self._wanted: deque[tuple[float, int]] = deque()
        """When, and which parallelism, each evaluation since then has wanted."""
        self._lags: deque[tuple[float, float]] = deque()
        """When, and how far, event time has lagged in each of the evaluations of `GROW_AFTER_S`."""
        self._usual_lag_s: float | None = None
        """How far event time lags while the job keeps up: rows may be old when they arrive."""
        self._shrink_after_s = SHRINK_AFTER_S
        self._shrank_s: float | None = None
        """When the job has shrunk, if it has not grown since."""
        self._changed_s: deque[float] = deque(maxlen=CHANGES_MAX)
        self._retry_s = 0.0
        """When the next change may be tried, after one has failed."""
        self._failures = 0
        self._advised: int | None = None
        self._reason = _NOT_MEASURED
        self._failed = ""
        """Why the last change has failed; empty once one has been made."""

    # ---- interface ----

    def restarted(self, *_: object) -> None:
        """An attempt begins or ends: what was measured before says nothing about the next one."""
        self._settled_s, self._reason = max(self._settled_s, self._effects.elapsed_s + SETTLE_S), _NOT_MEASURED
        self._wanted.clear()
        self._lags.clear()

    def poll(self, job: Coordinator) -> None:
        """Evaluate the load if it is time to, and change the parallelism if the last evaluations agree."""
        now_s = self._effects.elapsed_s
        if self._bounds is None or job.phase is not Phase.RUNNING or now_s < self._next_s:
            return
        self._next_s = now_s + EVALUATE_S
        why = self._cannot_evaluate(job)
        if why:
            self.restarted()
            self._reason = why
            return
        sources = {vertex.id for vertex in job.plan.graph.vertices if vertex.source is not None}
        rates = [rate for ref, rate in job.slots.rates.items() if ref.vertex in sources]
        lag_s = self._lag_s(rates)
        if now_s >= self._settled_s:
            load = _load(job)
            wanted = self._evaluate(load, lag_s, [rate for rate in rates if rate.backpressured >= BACKPRESSURED])
            self._wanted.append((now_s, wanted))
            self._decide(job, load)

    def status(self, parallelism: int) -> AutoscaleStatus | None:
        if self._bounds is None:
            return None
        wanted = self._wanted[-1][1] if self._wanted else parallelism
        reason, pause_s = self._reason, self._retry_s - self._effects.elapsed_s
        if self._failed:
            reason += f"; {self._failed}"
            reason += f"; the next change is tried in {math.ceil(pause_s / 60)} min" if pause_s > 0 else ""
        bounds = self._bounds
        return AutoscaleStatus(
            bounds.min, bounds.max, bounds.is_advice, parallelism, wanted, reason, tuple(self.changes)
        )

    # ---- fewer slots than the job had ----

    def shrinks(self, job: Coordinator, failure: Failure) -> bool:
        """Return whether the job will continue on the slots that are there, after others were lost and do not come back.

        Then `failure` is the failure of the attempt only if that turns out to be impossible.
        """
        bounds, plan, there = self._bounds, job.plan, job.slots.staying
        if bounds is None or bounds.is_advice or failure.fatal or plan.rescaled is None or job.rescaling.is_under_way:
            return False
        waits = job.phase is Phase.WAITING_TO_DEPLOY and job.checkpoints.outcome_is_known
        if not waits or not bounds.min <= there < plan.config.parallelism:
            return False
        planned = partial(self._replanned, job, failure)
        what = f"the plan of the job at parallelism {there}"
        self._effects.run_io(IoKind.RESCALE, partial(plan.rescaled, there), planned, about=there, waits_for=what)
        return True

    def _replanned(self, job: Coordinator, failure: Failure, outcome: Done[JobPlan] | Failed) -> None:
        newest = job.checkpoints.newest
        if isinstance(outcome, Failed):
            self._shrink(job, failure, None)
        elif newest is None:
            self._shrink(job, failure, outcome.value)
        else:

            def distributed(failed: Failed | None) -> bool:
                self._shrink(job, failure, None if failed is not None else outcome.value)
                return failed is None

            self._distribution.distribute(newest, outcome.value, distributed)

    def _shrink(self, job: Coordinator, failure: Failure, plan: JobPlan | None) -> None:
        """Continue with this plan, whose tasks can resume from the newest checkpoint. None: there is no such plan.

        An operator with a parallelism of its own may need more slots than there are at any parallelism of the job.
        """
        if job.phase is not Phase.WAITING_TO_DEPLOY or job.slots.complete:
            return
        if plan is None or plan.graph.slots > job.slots.staying:
            job.fail_attempt(failure)
            return
        before, after = job.plan.config.parallelism, plan.config.parallelism
        job.switch_to(replace(plan, config=msgspec.structs.replace(plan.config, tls=job.plan.config.tls)))
        job.slots.gather()
        self._note(before, after, failure.summary)

    # ---- the evaluation ----

    def _cannot_evaluate(self, job: Coordinator) -> str:
        """Return why the present load says nothing about the next minutes; empty if it does."""
        assert job.attempt is not None
        if job.requests.stop is not None:
            return "the job stops"
        if job.rescaling.is_under_way:
            return "the job is being rescaled, or moves to other slots"
        if _input_ends(job):
            return "the input ends: the parallelism stays"
        rates = job.slots.rates
        if not _is_measured(job, self._effects.now_ms):
            return _NOT_MEASURED
        if any(rate.metrics.recovered_bytes < rate.metrics.to_recover_bytes for rate in rates.values()):
            return "the job processes what was in flight at its checkpoint"
        return ""

    def _evaluate(self, load: Load, lag_s: float | None, waiting: Sequence[Rate]) -> int:
        """Return the parallelism that is wanted, and set the reason. `waiting`: the source subtasks that wait."""
        bounds = self._bounds
        assert bounds is not None
        has, now = load.parallelism, load.busiest
        choices = range(bounds.min, min(bounds.max, CHOICES_MAX * has) + 1)
        state = f"the busiest slot works {min(1.0, now):.0%} of the time"
        if now < FULL and not waiting:
            self._usual_lag_s = self._usual_lag_s if lag_s is None else lag_s
            wanted = min(has, load.least_parallelism(choices, 1.0))
        elif now < FULL / 2:
            self._reason = f"{state}, and sources wait: for something that more slots do not relieve"
            return has
        else:
            factor, found = self._behind(lag_s, waiting)
            state += found
            wanted = max(has, load.least_parallelism(choices, factor))
            if wanted == has and factor > 1.0 and has < bounds.max:
                state += load.limit()
        if wanted != has:
            state += f"; at parallelism {wanted} it would work {min(1.0, load.busiest_at(wanted)):.0%}"
        self._reason = state
        return wanted

    def _behind(self, lag_s: float | None, waiting: Sequence[Rate]) -> tuple[float, str]:
        """Return how many times as many rows a job should process that does not keep up, and from what it is known."""
        if lag_s is not None and self._lags[-1][0] - self._lags[0][0] >= GROW_AFTER_S / 2:
            (then_s, then_lag_s), (now_s, _) = self._lags[0], self._lags[-1]
            advance = 1.0 - (lag_s - then_lag_s) / (now_s - then_s)
            late_s = max(0.0, lag_s - (self._usual_lag_s or 0.0))
            factor = max(1.0, TARGET * (1.0 + late_s / CATCH_UP_S)) / max(advance, SLOWEST)
            found = f", and event time, {late_s:.0f} s late, advances by {advance:.2g} s in a second"
        elif could_emit := [
            (rate.busy + rate.backpressured) / rate.busy for rate in waiting if rate.busy >= MEASURABLE
        ]:
            factor = max(could_emit)
            found = f", and sources could emit {factor:.1f} times as many rows"
        else:
            factor, found = 2.0, ", and how far the job falls behind is unknown"
        return min(factor, STEP_MAX), found

    def _lag_s(self, sources: Sequence[Rate]) -> float | None:
        """Return how far the slowest source's event time lags now, and record it."""
        found = {rate.metrics.watermark_us for rate in sources}
        lag_s = event_time_lag_s(min(found - {MIN_WATERMARK_US}, default=None), self._effects.now_ms)
        now_s = self._effects.elapsed_s
        if lag_s is None:
            self._lags.clear()
        else:
            self._lags.append((now_s, lag_s))
            while self._lags[0][0] < now_s - GROW_AFTER_S:
                self._lags.popleft()
        return lag_s

    # ---- the decision ----

    def _decide(self, job: Coordinator, load: Load) -> None:
        """Change the parallelism if all evaluations of the time that counts agree that it is too low, or too high."""
        now_s, has = self._effects.elapsed_s, load.parallelism
        keeps_s = max(GROW_AFTER_S, self._shrink_after_s)
        while len(self._wanted) > 1 and self._wanted[1][0] <= now_s - keeps_s:
            self._wanted.popleft()
        if self._wanted[-1][1] == has:
            self._failed = ""
        recent = [wanted for at_s, wanted in self._wanted if at_s > now_s - GROW_AFTER_S]
        if min(recent) > has and self._is_measured_for(GROW_AFTER_S):
            self._change(job, int(median(recent)))
        elif max(wanted for _, wanted in self._wanted) < has and self._is_measured_for(self._shrink_after_s):
            # What is wanted for less than GROW_AFTER_S would not make the job grow, so it does not keep it large either.
            highest = sorted((wanted for _, wanted in self._wanted), reverse=True)
            self._change(job, highest[min(int(GROW_AFTER_S / EVALUATE_S), len(highest) - 1)])
        else:
            self._advised = None

    def _is_measured_for(self, seconds: float) -> bool:
        """Whether evaluations have been made for this time, up to the interval between two of them."""
        return self._wanted[-1][0] - self._wanted[0][0] >= seconds - EVALUATE_S

    def _change(self, job: Coordinator, wanted: int) -> None:
        now_s, has = self._effects.elapsed_s, job.plan.config.parallelism
        bounds = self._bounds
        assert bounds is not None
        if bounds.is_advice:
            if self._advised != wanted:
                self._advised = wanted
                self._effects.notify_user(
                    f"autoscale: parallelism {wanted} would be better than {has}: {self._reason}."
                )
            return
        in_an_hour = sum(now_s - at_s < HOUR_S for at_s in self._changed_s)
        if in_an_hour >= (CHANGES_MAX if wanted > has else CHANGES_MAX // 2):
            self._failed = f"after {in_an_hour} changes in the last hour, the parallelism stays"
        elif now_s >= self._retry_s:
            if wanted > has:
                wanted = has + max(1, (wanted - has) >> self._failures)
            began_s = now_s - GROW_AFTER_S if wanted > has else now_s
            job.rescaling.request(partial(self._answered, began_s, has, wanted, self._reason), wanted, job.plan)

    def _answered(self, began_s: float, before: int, after: int, reason: str, reply: Reply) -> None:
        """The change has been made, or has failed."""
        now_s = self._effects.elapsed_s
        self.restarted()
        if reply.error:
            self._retry_s = now_s + min(RETRY_S * 2.0 ** min(self._failures, 20), HOUR_S)
            self._failures += 1
            self._failed = reply.error
            return
        self._failures, self._retry_s, self._failed = 0, 0.0, ""
        self._settled_s = max(self._settled_s, now_s + SETTLE_FACTOR * (now_s - began_s))
        self._changed_s.append(now_s)
        self._learn(after > before, now_s)
        self._note(before, after, reason)

    def _note(self, before: int, after: int, reason: str) -> None:
        self.changes.appendleft(AutoscaleChange(self._effects.now_ms, before, after, reason))
        self._effects.notify_user(f"autoscale: the parallelism was {before} and is {after}: {reason}.")

    def _learn(self, grew: bool, now_s: float) -> None:
        """Shrink later next time if the job had to grow again soon after it had shrunk."""
        if not grew:
            self._shrank_s = now_s
        elif self._shrank_s is not None:
            is_too_soon = now_s - self._shrank_s < self._shrink_after_s
            self._shrink_after_s = min(2 * self._shrink_after_s, HOUR_S) if is_too_soon else SHRINK_AFTER_S
            self._shrank_s = None


def _running(job: Coordinator) -> list[TaskId]:
    """Return the tasks that still have input."""
    assert job.attempt is not None
    return [ref for ref, phase in job.attempt.phases.items() if phase is TaskPhase.RUNNING]


def _input_ends(job: Coordinator) -> bool:
    """Whether a part of every source has ended: the rest would take less time than a change."""
    running = set(_running(job))
    sources = [vertex for vertex in job.plan.graph.vertices if vertex.source is not None]
    return all(any(TaskId(each.id, i) not in running for i in range(each.parallelism)) for each in sources)


def _is_measured(job: Coordinator, now_ms: int) -> bool:
    """Whether each task has reported twice, since a share is of the time between two reports, and recently: tasks on a
    slot whose function does not return report nothing.
    """
    rates, since_ms = job.slots.rates, now_ms - 1000 * GROW_AFTER_S
    return all(ref in rates and rates[ref].recent_ms and rates[ref].at_ms >= since_ms for ref in _running(job))


def _load(job: Coordinator) -> Load:
    """Return the load of all tasks; those that have finished have none."""
    plan, running = job.plan, set(_running(job))
    parallelism = plan.config.parallelism
    tasks = []
    for vertex in plan.graph.vertices:
        refs = [TaskId(vertex.id, index) for index in range(vertex.parallelism)]
        busy = [job.slots.rates[ref].busy if ref in running else 0.0 for ref in refs]
        tasks.append(TaskLoad(vertex, busy, is_fixed=vertex.parallelism != parallelism))
    return Load(tasks, parallelism)
