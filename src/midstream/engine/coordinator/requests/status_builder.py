"""Makes the status of a job, for clients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.rescale import RescaleStage
from midstream.engine.coordinator.placement.slot_pool import Rate
from midstream.engine.coordinator.requests.event_time_status import edge_watermark_us, held_back
from midstream.engine.coordinator.requests.metric_totals import user_counters, user_gauges
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import assert_never
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Vertex
from midstream.engine.protocol.bottleneck import bottleneck_status
from midstream.engine.protocol.job_status import (
    FlowStatus,
    JobStatus,
    OperatorStatus,
    RecoveryStatus,
    SubtaskStatus,
    VertexStatus,
)
from midstream.engine.protocol.task_metrics import TaskMetrics

if TYPE_CHECKING:
    from midstream.engine.coordinator.coordinator import Coordinator

WORKED_US_MIN: Final = 10_000
"""The least work of all subtasks together for which the operators' shares are reported; those of less would be noise.
"""


def job_status(job: Coordinator, now_ms: int) -> JobStatus:
    """Return the status as of `now_ms`, with the rows and shares that tasks have reported last."""
    graph, config, checkpoints = job.plan.graph, job.plan.config, job.checkpoints
    in_progress = checkpoints.in_progress(now_ms)
    slots = [slot for _, slot in sorted(job.slots.live.items())]
    passed = job.slots.passed()
    metrics = {ref: rate.metrics for ref, rate in job.slots.rates.items()}
    counts = _Counts(job.slots.rows(), job.slots.late.counts(), job.slots.bad.counts(), job.slots.failed.counts())
    vertices = tuple(_vertex_status(job, vertex, metrics, counts) for vertex in graph.vertices)
    edges = tuple((edge.source, edge.target, edge.partitioning.value) for edge in graph.edges)
    return JobStatus(
        job_id=job.plan.job_id,
        name=config.name,
        state=state_of(job),
        attempt=job.attempt.number if job.attempt else 0,
        started_ms=job.started_ms,
        now_ms=now_ms,
        slots=len(slots),
        slots_needed=job.slots.needed,
        vertices=vertices,
        edges=edges,
        checkpoints_completed=checkpoints.history.completed_count,
        checkpoints_failed=checkpoints.history.failed_count,
        last_checkpoint=checkpoints.history.last_completed,
        checkpoints=(*([in_progress] if in_progress else []), *checkpoints.history.newest_first),
        failures=tuple(job.failures),
        restarts=job.restarts.restart_count,
        restored_from=job.restored_from,
        had_finished=job.had_finished,
        checkpoint_dir=config.checkpoint_dir,
        tls=config.tls,
        slot_memory_bytes=tuple(slot.status.memory_bytes if slot.status else 0 for slot in slots),
        slot_memory_limit_bytes=tuple(slot.status.memory_limit_bytes if slot.status else 0 for slot in slots),
        slot_state_memory_bytes=tuple(slot.status.state_memory_bytes if slot.status else 0 for slot in slots),
        slot_state_disk_bytes=tuple(slot.status.state_disk_bytes if slot.status else 0 for slot in slots),
        slot_pids=tuple(slot.register.pid for slot in slots),
        slot_hosts=tuple(slot.register.host for slot in slots),
        waiting=job.waits.shown(job),
        warnings=(
            *job.warnings,
            *job.slots.late.warnings(),
            *job.slots.failed.warnings(),
            *job.slots.timers.warnings(),
            *job.slots.bad.warnings(),
        ),
        bottleneck=bottleneck_status(vertices, edges) if job.phase is Phase.RUNNING else None,
        state_growth=tuple(checkpoints.state_sizes.growth),
        flows=tuple(
            FlowStatus(*passed.get(edge.id, (0, 0, 0)), watermark_us=edge_watermark_us(graph, edge, metrics))
            for edge in graph.edges
        ),
        autoscale=job.autoscaler.status(config.parallelism),
    )


def state_of(job: Coordinator) -> str:
    again = job.restarts.restart_count > 0
    if job.rescaling.stage is RescaleStage.SWITCHING:
        return "moving" if job.rescaling.is_move else "rescaling"
    match job.phase:
        case Phase.CREATED | Phase.OPENING:
            return "created"
        case Phase.WAITING_TO_DEPLOY:
            return "restarting" if again else "created"
        case Phase.DEPLOYING | Phase.STARTING:
            return "restarting" if again else "deploying"
        case Phase.RUNNING:
            return "stopping" if job.requests.stop is not None else "running"
        case Phase.CANCELLING:
            return "restarting"
        case Phase.ENDING:
            return "stopping"
        case Phase.ENDED:
            assert job.outcome is not None
            return job.outcome[0]
        case _:
            assert_never(job.phase)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts by operator uid, added up over all tasks once, and not for each vertex again."""

    rows: Mapping[str, tuple[int, int]]
    late: Mapping[str, int]
    bad: Mapping[str, int]
    failed: Mapping[str, int]


def _vertex_status(
    job: Coordinator, vertex: Vertex, metrics: Mapping[TaskId, TaskMetrics], counts: _Counts
) -> VertexStatus:
    refs = [TaskId(vertex.id, i) for i in range(vertex.parallelism)]
    phases = job.attempt.phases if job.attempt else {}
    without = "finished" if job.had_finished else "waiting"
    rates = [rate for ref in refs if (rate := job.slots.rates.get(ref)) is not None]
    works = job.phase not in (
        Phase.CANCELLING,
        Phase.WAITING_TO_DEPLOY,
        Phase.DEPLOYING,
    )  # in these phases, the last reports are of tasks that do not run any more
    work = _work(rates) if works else {}
    committers = {spec.uid: job.commits.metrics[spec.uid] for spec in vertex.specs if spec.uid in job.commits.metrics}
    counters, gauges = user_counters(rates, committers), user_gauges(rates, committers)
    watermark_us = min((rate.metrics.watermark_us for rate in rates), default=MIN_WATERMARK_US)
    return VertexStatus(
        id=vertex.id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        states=dict(Counter(phases[ref].value if ref in phases else without for ref in refs)),
        operators=tuple(
            OperatorStatus(
                spec.uid,
                spec.name,
                vertex.parallelism,
                *counts.rows.get(spec.uid, (0, 0)),
                counts.late.get(spec.uid, 0),
                counts.bad.get(spec.uid, 0),
                *job.checkpoints.state_sizes.of.get(spec.uid, (0, 0)),
                work=work.get(spec.uid),
                counters=counters.get(spec.uid, {}),
                gauges=gauges.get(spec.uid, {}),
                failed_rows=counts.failed.get(spec.uid, 0),
            )
            for spec in vertex.specs
        ),
        watermark_us=watermark_us if watermark_us != MIN_WATERMARK_US and len(rates) == len(refs) else None,
        busy=sum(rate.busy for rate in rates) / len(refs) if works else 0.0,
        backpressured=sum(rate.backpressured for rate in rates) / len(refs) if works else 0.0,
        recovering=_recovering(rates),
        subtasks=tuple(_subtask_status(rate, works) for rate in rates),
        held_back=held_back(job.plan.graph, vertex, metrics),
        splits_ahead=sum(rate.metrics.splits_ahead for rate in rates) if works else 0,
    )


def _work(rates: Sequence[Rate]) -> dict[str, float]:
    """Return, by operator uid, its share of the recent work of all operators of the task."""
    worked_us: defaultdict[str, float] = defaultdict(float)
    for rate in rates:
        for (uid, _, _), each_us in zip(rate.metrics.operators, rate.worked_us, strict=False):
            worked_us[uid] += each_us
    whole_us = sum(worked_us.values())
    return {uid: each_us / whole_us for uid, each_us in worked_us.items()} if whole_us >= WORKED_US_MIN else {}


def _subtask_status(rate: Rate, works: bool) -> SubtaskStatus:
    metrics = rate.metrics
    watermark_us = None if metrics.watermark_us == MIN_WATERMARK_US else metrics.watermark_us
    busy, backpressured = (rate.busy, rate.backpressured) if works else (0.0, 0.0)
    return SubtaskStatus(metrics.task.subtask, metrics.rows_in, metrics.rows_out, busy, backpressured, watermark_us)


def _recovering(rates: Sequence[Rate]) -> tuple[RecoveryStatus, ...]:
    """Return all subtasks that had something to recover, or none once all of that has been recovered."""
    tasks = [rate.metrics for rate in rates if rate.metrics.to_recover_bytes]
    if all(task.recovered_bytes == task.to_recover_bytes for task in tasks):
        return ()
    return tuple(RecoveryStatus(task.task.subtask, task.to_recover_bytes, task.recovered_bytes) for task in tasks)
