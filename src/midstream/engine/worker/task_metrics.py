"""The metrics that a task reports in a heartbeat: totals since it was deployed.

Everything is counted where it happens, once per batch. Sums over channels are made here, once per heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.protocol.task_metrics import SPLIT_CHARS_MAX, EdgeMetrics, SplitMetrics, TaskMetrics, UserMetric
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.source_reader import SourceReader

if TYPE_CHECKING:
    from midstream.engine.worker.task import Task


def task_metrics(task: Task) -> TaskMetrics:
    """Return the metrics of a task since it was deployed."""
    chain, source, uids = task.operators.chain, task.operators.source, task.operators.uids
    outputs = chain.outputs
    rows = [(uid, chain.rows_in[index], outputs[index + 1].rows_out) for index, uid in enumerate(uids)]
    worked_us = [round(1e6 * worked_s) for worked_s in chain.worked_s[: len(uids)]]
    busy_s = task.busy_s
    if source is not None and task.vertex.source is not None:
        busy_s += source.read_s
        rows.insert(0, (task.vertex.source.uid, 0, outputs[0].rows_out))
        # The source has worked in its reads, and in all steps of the task while no operator and no edge did.
        worked_us.insert(0, max(0, round(1e6 * (busy_s - sum(chain.worked_s[:-1])))))
    left_bytes = sum(gate.recovered.left_bytes() for gate in task.gates if isinstance(gate.recovered, GateRecovery))
    return TaskMetrics(
        task=task.ref,
        rows_in=task.input.rows_in,
        rows_out=outputs[-1].rows_out,
        busy_ms=int(busy_s * 1000),
        backpressured_ms=int(task.backpressured_s * 1000),
        watermark_us=chain.watermark_us,
        operators=tuple(rows),
        worked_us=tuple(worked_us),
        late=tuple((uid, outputs[i + 1].late_rows) for i, uid in enumerate(uids) if outputs[i + 1].late_rows),
        failed=tuple(
            (uid, operator.failed_rows)
            for uid, operator in zip(uids, chain.operators, strict=True)
            if operator.failed_rows
        ),
        timers_dropped=tuple(
            (uid, operator.timers_dropped)
            for uid, operator in zip(uids, chain.operators, strict=True)
            if operator.timers_dropped
        ),
        bad_records=0 if source is None else source.tally.total,
        to_recover_bytes=task.input.to_recover_bytes,
        recovered_bytes=task.input.to_recover_bytes - left_bytes,
        edges=tuple(
            EdgeMetrics(each.edge.id, each.rows_out, each.bytes_out, each.batches_out) for each in task.partitions
        ),
        inputs=task.input.event_times(),
        slowest_split=None if source is None else _slowest_split(chain, source),
        user=tuple(_user_metrics(uids, chain)),
        splits_ahead=0 if source is None else source.splits_ahead,
    )


def has_dropped(task: Task) -> bool:
    """Whether the task has dropped rows, timers or records, which must be reported even if it is lost soon."""
    chain, source = task.operators.chain, task.operators.source
    return (
        any(output.late_rows for output in chain.outputs)
        or any(operator.timers_dropped or operator.failed_rows for operator in chain.operators)
        or (source is not None and source.tally.total > 0)
    )


def _user_metrics(uids: Sequence[str], chain: OperatorChain) -> Iterator[UserMetric]:
    for uid, operator in zip(uids, chain.operators, strict=True):
        if operator.user_metrics is not None:
            for name, count in operator.user_metrics.counters.items():
                yield UserMetric(uid, name, True, float(count))
            for name, value in operator.user_metrics.gauges.items():
                yield UserMetric(uid, name, False, float(value))


def _slowest_split(chain: OperatorChain, source: SourceReader) -> SplitMetrics | None:
    for operator in chain.operators:
        if isinstance(operator, TimestampsOperator):
            found = operator.slowest_split()
            if found is not None and (name := source.split_id(found.split)) is not None:
                return SplitMetrics(name[-SPLIT_CHARS_MAX:], found.reached_us, found.furthest_us)
    return None
