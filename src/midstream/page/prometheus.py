"""A JobStatus in the text format of Prometheus, version 0.0.4.

Names and labels follow its conventions: base units, `_total` for what only grows, one name for one meaning. Metrics are
per operator (`operator` is its uid, which stays the same over restarts of the program) and per task (a chain of
operators; `task` is its name on the page); per subtask only on request, as there may be thousands. docs/operations/monitoring.md
explains each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.protocol.job_status import CheckpointStatus, JobStatus, OperatorStatus, VertexStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
STATES: Final = (
    "created",
    "deploying",
    "running",
    "restarting",
    "rescaling",
    "moving",
    "stopping",
    "finished",
    "stopped",
    "failed",
)

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


class Family(NamedTuple):
    """A metric with its samples. `kind`: counter or gauge."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


def metrics_text(status: JobStatus, per_subtask: bool = False) -> str:
    """Return all metrics as text; families without a sample are left out."""
    job: Labels = (("job_name", status.name), ("job_id", status.job_id))
    lines: list[str] = []
    for name, kind, text, samples in families(status, per_subtask):
        if not samples:
            continue
        lines += [f"# HELP {name} {_help(text)}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels((*job, *labels))} {_number(value)}" for labels, value in samples]
    return "\n".join([*lines, ""])


def families(status: JobStatus, per_subtask: bool) -> Iterator[Family]:
    """Yield all families, in a fixed order."""
    yield from _of_job(status)
    yield from _of_checkpoints(status)
    yield from _of_operators(status)
    yield from _of_tasks(status)
    yield from _of_edges(status)
    if per_subtask:
        yield from _of_subtasks(status)


def _of_job(status: JobStatus) -> Iterator[Family]:
    waits_s = max((wait.for_ms / 1e3 for wait in status.waiting), default=0.0)
    yield _gauge("job_state", "1 for the state that the job is in.", _one_of(STATES, status.state))
    yield _gauge("job_start_time_seconds", "When the job's driver was started.", _single(status.started_ms / 1e3))
    yield _counter("job_restarts_total", "Restarts after failures.", _single(status.restarts))
    yield _gauge("job_slots", "Slots that are connected.", _single(status.slots))
    yield _gauge("job_slots_needed", "Slots that the job needs to run.", _single(status.slots_needed))
    yield _gauge("job_waiting_seconds", "How long its longest wait has lasted; 0 for none.", _single(waits_s))
    yield _gauge("job_warnings", "Warnings in the job's status.", _single(len(status.warnings)))
    scale = [] if status.autoscale is None else [status.autoscale]
    yield _gauge("job_parallelism", "Its parallelism, with autoscale=.", [((), each.parallelism) for each in scale])
    yield _gauge("job_parallelism_desired", "What its load asks for.", [((), each.desired) for each in scale])
    memory, limits = _by_slot(status.slot_memory_bytes), _by_slot(status.slot_memory_limit_bytes)
    yield _gauge("slot_memory_bytes", "Resident memory of a slot's process, by its place among the slots.", memory)
    yield _gauge("slot_memory_limit_bytes", "Memory limit of that process; a container's limit is shared.", limits)
    in_memory = _by_slot(status.slot_state_memory_bytes, unknown=None)
    on_disk = _by_slot(status.slot_state_disk_bytes, unknown=None)
    yield _gauge(
        "slot_state_memory_bytes", "State in columns, without Python objects, that a slot holds in memory.", in_memory
    )
    yield _gauge("slot_state_disk_bytes", "State in columns that lies on a slot's local disk.", on_disk)


def _of_checkpoints(status: JobStatus) -> Iterator[Family]:
    yield _counter("checkpoints_completed_total", "Checkpoints completed.", _single(status.checkpoints_completed))
    yield _counter("checkpoints_failed_total", "Checkpoints failed.", _single(status.checkpoints_failed))
    last = [] if status.last_checkpoint is None else [status.last_checkpoint]
    running = next((one.duration_ms for one in status.checkpoints if one.state == "in_progress"), 0)
    yield _gauge(
        "checkpoint_in_progress_seconds", "Age of the checkpoint in progress; 0 for none.", _single(running / 1e3)
    )

    def of_last(name: str, text: str, value: Iterable[float]) -> Family:
        return _gauge(f"last_checkpoint_{name}", text, [((), each) for each in value])

    yield of_last("timestamp_seconds", "When the last checkpoint completed.", (_ended_ms(one) / 1e3 for one in last))
    yield of_last("duration_seconds", "How long it took.", (one.duration_ms / 1e3 for one in last))
    yield of_last("state_bytes", "Bytes that it has written.", (one.state_bytes for one in last))
    yield of_last("in_flight_bytes", "Bytes of rows in flight that it holds.", (one.in_flight_bytes for one in last))
    yield _gauge("last_checkpoint_phase_seconds", "How its time was spent.", _phases(last))
    yield of_last(
        "alignment_seconds", "The longest wait of a task for its barriers.", (one.alignment_ms / 1e3 for one in last)
    )


def _phases(last: Sequence[CheckpointStatus]) -> list[tuple[tuple[tuple[str, str], ...], float]]:
    """Return the phases of the subtask that acknowledged last, then those of the driver."""
    return [
        ((("phase", phase.removesuffix("_ms")),), took_ms / 1e3)
        for one in last
        if one.phases is not None
        for phase, took_ms in {
            **msgspec.structs.asdict(one.phases),
            "metadata": one.metadata_ms,
            "commit": one.commit_ms or 0,
        }.items()
    ]


def _of_operators(status: JobStatus) -> Iterator[Family]:
    operators = [operator for vertex in status.vertices for operator in vertex.operators]
    labels = {operator.uid: (("operator", operator.uid), ("operator_name", operator.name)) for operator in operators}

    def each(value: Callable[[OperatorStatus], float | None]) -> list[Sample]:
        return _known((labels[op.uid], value(op)) for op in operators)

    again = "Rows read again after a failure count again."
    yield _counter("operator_rows_in_total", f"Rows received. {again}", each(lambda op: op.rows_in))
    yield _counter("operator_rows_out_total", f"Rows emitted. {again}", each(lambda op: op.rows_out))
    yield _counter("operator_late_rows_total", "Rows dropped as late.", each(lambda op: op.late_rows))
    failed = "Rows for which the function failed, dropped or emitted apart."
    yield _counter("operator_failed_rows_total", failed, each(lambda op: op.failed_rows))
    yield _counter("operator_bad_records_total", "Bad records dropped by a source.", each(lambda op: op.bad_records))
    of_checkpoint = "of its state in the newest completed checkpoint."
    yield _gauge("operator_state_rows", f"Rows {of_checkpoint}", each(lambda op: op.state_rows))
    yield _gauge("operator_state_bytes", f"Bytes {of_checkpoint}", each(lambda op: op.state_bytes))
    work = each(lambda op: op.work)
    yield _gauge("operator_work_ratio", "Its share of the work of its task's operators.", work)
    yield from _of_functions(operators, labels)


def _of_functions(operators: Sequence[OperatorStatus], labels: Mapping[str, Labels]) -> Iterator[Family]:
    """Yield one family for all metrics of users' functions, named by the label `name`: names cannot clash, and each
    keeps its kind.

    promtool refuses family names with the words counter and gauge.
    """

    def named(operator: OperatorStatus, name: str) -> Labels:
        return (*labels[operator.uid], ("name", name))

    counters = [(named(op, name), value) for op in operators for name, value in op.counters.items()]
    yield _counter("user_total", "A counter of a function, since the attempt began.", counters)
    gauges = [(named(op, name), gauge) for op in operators for name, gauge in op.gauges.items()]
    yield _gauge(
        "user_value", "A gauge of a function, the sum over subtasks.", [(at, gauge.sum) for at, gauge in gauges]
    )
    yield _gauge("user_value_min", "The minimum over subtasks.", [(at, gauge.min) for at, gauge in gauges])
    yield _gauge("user_value_max", "The maximum over subtasks.", [(at, gauge.max) for at, gauge in gauges])


def _of_tasks(status: JobStatus) -> Iterator[Family]:
    vertices = status.vertices

    def of_each(name: str, text: str, values: Iterable[float | None]) -> Family:
        return _gauge(f"task_{name}", text, _known(zip(map(_task, vertices), values, strict=True)))

    yield of_each("parallelism", "Subtasks of the task.", (v.parallelism for v in vertices))
    yield of_each("subtasks_running", "Subtasks that run.", (v.states.get("running", 0) for v in vertices))
    yield of_each("busy_ratio", "Share of time spent working, mean over subtasks.", (v.busy for v in vertices))
    yield of_each(
        "busy_max_ratio", "The same of the busiest subtask.", (_most(v, [s.busy for s in v.subtasks]) for v in vertices)
    )
    yield of_each(
        "backpressured_ratio",
        "Share of time spent waiting for room downstream, mean over subtasks.",
        (v.backpressured for v in vertices),
    )
    yield of_each(
        "backpressured_max_ratio",
        "The same of the most backpressured subtask.",
        (_most(v, [s.backpressured for s in v.subtasks]) for v in vertices),
    )
    yield of_each(
        "watermark_timestamp_seconds",
        "Event time up to which all rows are expected to have arrived, minimum over subtasks.",
        (_watermark_s(v.watermark_us) for v in vertices),
    )
    yield of_each(
        "to_recover_bytes",
        "Bytes of rows in flight with which the task began and which it has not read yet.",
        (sum(r.to_recover_bytes - r.recovered_bytes for r in v.recovering) for v in vertices),
    )
    held = [vertex.held_back for vertex in vertices]
    yield of_each(
        "watermark_held_back_seconds",
        "How far the input or split that event time waits for is behind the most advanced one.",
        (None if each is None or each.behind_us is None else each.behind_us / 1e6 for each in held),
    )
    yield of_each(
        "splits_ahead",
        "Splits that are not read because they are further ahead of the slowest one than the drift allows.",
        (float(vertex.splits_ahead) for vertex in vertices),
    )
    found = status.bottleneck
    named = [] if found is None else [(_task(v), 1.0) for v in vertices if v.id == found.vertex]
    yield _gauge("task_bottleneck", "1 for the task that the others wait for.", named)


def _of_edges(status: JobStatus) -> Iterator[Family]:
    uids = {vertex.id: dict(_task(vertex))["task"] for vertex in status.vertices}
    labels: list[Labels] = [
        (("edge", str(number)), ("source", uids[source]), ("target", uids[target]), ("partitioning", partitioning))
        for number, (source, target, partitioning) in enumerate(status.edges)
    ]
    found = list(zip(labels, status.flows, strict=True))
    again = "Rows emitted again after a failure count again."
    yield _counter("edge_rows_total", f"Rows that passed the edge. {again}", [(at, one.rows) for at, one in found])
    yield _counter("edge_bytes_total", f"Their bytes in memory. {again}", [(at, one.bytes) for at, one in found])
    yield _gauge(
        "edge_watermark_timestamp_seconds",
        "Event time of rows on the edge, minimum over the subtasks that are waited for.",
        _known((at, _watermark_s(one.watermark_us)) for at, one in found),
    )
    yield _counter("edge_batches_total", f"Their batches. {again}", [(at, one.batches) for at, one in found])


def _of_subtasks(status: JobStatus) -> Iterator[Family]:
    found = [
        ((*_task(vertex), ("subtask", str(subtask.subtask))), subtask)
        for vertex in status.vertices
        for subtask in vertex.subtasks
    ]
    since = "since the subtask was deployed."
    yield _counter("subtask_rows_in_total", f"Rows received {since}", [(at, one.rows_in) for at, one in found])
    yield _counter("subtask_rows_out_total", f"Rows emitted {since}", [(at, one.rows_out) for at, one in found])
    yield _gauge("subtask_busy_ratio", "Share of time spent working.", [(at, one.busy) for at, one in found])
    yield _gauge(
        "subtask_backpressured_ratio",
        "Share of time spent waiting for room downstream.",
        [(at, one.backpressured) for at, one in found],
    )
    yield _gauge(
        "subtask_watermark_timestamp_seconds",
        "Event time up to which all rows are expected to have arrived.",
        _known((at, _watermark_s(one.watermark_us)) for at, one in found),
    )


def _gauge(name: str, text: str, samples: list[Sample]) -> Family:
    return Family(f"midstream_{name}", "gauge", text, samples)


def _counter(name: str, text: str, samples: list[Sample]) -> Family:
    return Family(f"midstream_{name}", "counter", text, samples)


def _known(samples: Iterable[tuple[Labels, float | None]]) -> list[Sample]:
    """Leave out the samples whose value is not known."""
    return [(labels, value) for labels, value in samples if value is not None]


def _by_slot(sizes: Iterable[int], *, unknown: int | None = 0) -> list[Sample]:
    return [((("slot", str(number)),), float(size)) for number, size in enumerate(sizes) if size != unknown]


def _single(value: float) -> list[Sample]:
    return [((), value)]


def _one_of(names: Iterable[str], name: str) -> list[Sample]:
    return [((("state", each),), float(each == name)) for each in names]


def _task(vertex: VertexStatus) -> Labels:
    """Return the labels of a task, by the uid of its first operator: a vertex's number may change with the program."""
    uid = vertex.operators[0].uid if vertex.operators else str(vertex.id)
    return ("task", uid), ("task_name", vertex.name)


def _most(vertex: VertexStatus, shares: list[float]) -> float | None:
    return max(shares) if len(shares) == vertex.parallelism else None


def _watermark_s(watermark_us: int | None) -> float | None:
    """Return the watermark in seconds; None before the first one and after the end of the data."""
    return None if watermark_us in (None, MAX_WATERMARK_US) else watermark_us / 1e6


def _ended_ms(checkpoint: CheckpointStatus) -> int:
    return checkpoint.created_ms + checkpoint.duration_ms


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(float(value))
