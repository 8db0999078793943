"""Starting what a program describes: its graph is built, shipped, and given to a driver."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import replace

import cloudpickle
import msgspec

from midstream.api.shipping import register_modules_below
from midstream.checkpoint.store import split_restore
from midstream.coordinator.events import JobPlan, NewerOutput
from midstream.coordinator.opening import check_plan, check_start, find_start
from midstream.core.config import JobConfig
from midstream.core.errors import ClusterError, JobError
from midstream.graph.build import build_job_graph
from midstream.graph.job_graph import JobGraph
from midstream.graph.logical import LogicalGraph
from midstream.operators.sink import Sink
from midstream.runtime.ids import RandomIds
from midstream.runtime.job import Job, start_job
from midstream.runtime.provider import SlotProvider
from midstream.runtime.storage import FileStorage, absolute

_log = logging.getLogger(__name__)


def submit(
    logical: LogicalGraph,
    config: JobConfig,
    directory: str | None,
    restore_from: str | None,
    allow_dropped_state: bool,
    newer_output: NewerOutput | None,
    fresh: bool,
    master: str | None,
    slots: SlotProvider | None,
) -> Job:
    """`directory`: modules loaded from below it are shipped with the job. For the rest see `Environment.start`."""
    if slots is not None and master is not None:
        raise JobError("give master= or slots=, not both: slots= says where slots run, in place of Spark")
    if restore_from is not None and config.checkpoint_dir is None:
        raise JobError(
            f"the job {config.name!r} has no checkpoint_dir, so there is nothing to go on from, and nowhere to copy a "
            "savepoint to; give Environment(checkpoint_dir=…) or --checkpoint-dir"
        )
    if restore_from is not None and split_restore(restore_from, "")[0] is not None:
        restore_from = absolute(restore_from)
    if directory is not None:
        register_modules_below(directory)  # sinks pickle what they make in validate()
    graph = build_job_graph(logical, config)
    _check_output_can_appear(graph, config)
    plan = JobPlan(RandomIds().new_id(), graph, b"", config, restore_from, allow_dropped_state, newer_output, fresh)
    check_plan(plan)
    start = find_start(plan, FileStorage)
    _check_sinks(graph, restoring=start.metadata is not None)
    for warning in check_start(plan, start, FileStorage):
        _log.warning("job %s: %s", config.name, warning)  # at once: the status, which has it too, is looked at later
    nodes = list(logical.nodes)
    with ExitStack() as undo:
        if slots is None:
            slots = _spark_slots(master)
            undo.callback(slots.close)
        for vertex in graph.vertices:
            if vertex.source is not None:
                undo.callback(vertex.source.source.close)
                vertex.source.source.prepare(vertex.source.uid, config.checkpoint_dir, restore_from is not None)
        plan = replace(
            plan,
            graph_bytes=cloudpickle.dumps(graph),
            rescaled=lambda parallelism: rescaled(plan, LogicalGraph(nodes), slots, parallelism),
        )
        job = start_job(plan, slots)
        undo.pop_all()
    return job


def rescaled(plan: JobPlan, logical: LogicalGraph, slots: SlotProvider, parallelism: int) -> JobPlan:
    """The plan of the same job at another parallelism, of the operators that do not say their own.

    What is shipped is what was shipped with `plan`: on the driver, sources and sinks have been at
    work since. Raises ConfigError, JobError, or ClusterError when there cannot be so many slots.
    """
    config = msgspec.structs.replace(plan.config, parallelism=parallelism)
    graph = build_job_graph(logical, config)
    slots.check(graph.slots)
    shipped: JobGraph = cloudpickle.loads(plan.graph_bytes)
    sources = {vertex.source.uid: vertex.source for vertex in shipped.vertices if vertex.source}
    operators = {spec.uid: spec for vertex in shipped.vertices for spec in vertex.operators}
    vertices = tuple(
        replace(
            vertex,
            source=sources[vertex.source.uid] if vertex.source else None,
            operators=tuple(operators[spec.uid] for spec in vertex.operators),
        )
        for vertex in graph.vertices
    )
    return replace(plan, graph=graph, graph_bytes=cloudpickle.dumps(replace(graph, vertices=vertices)), config=config)


def _spark_slots(master: str | None) -> SlotProvider:
    try:
        from midstream.spark.session import get_session
        from midstream.spark.slots import SparkSlots
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"pyspark", "py4j"}:
            raise
        raise ClusterError(
            f"Spark needs PySpark 4, and {sys.executable} has no module {error.name!r}; "
            "install it (pip install 'pyspark>=4.0'), or run the job with the Python that has it"
        ) from error
    return SparkSlots(get_session(master))


def _check_sinks(graph: JobGraph, restoring: bool) -> None:
    for vertex in graph.vertices:
        for spec in vertex.operators:
            if spec.sink is not None:
                spec.sink.validate(spec.operator.schema, restoring)  # type: ignore[attr-defined]
                spec.sink.check_parallelism(vertex.parallelism)


def _check_output_can_appear(graph: JobGraph, config: JobConfig) -> None:
    """Raises JobError when a sink commits with checkpoints, there are none, and the job has no end either."""
    if config.checkpoint_dir is not None:
        return
    endless = [v.source.name for v in graph.vertices if v.source is not None and not v.source.source.bounded]
    for vertex in graph.vertices:
        for spec in vertex.operators:
            if endless and spec.sink is not None and type(spec.sink).committer is not Sink.committer:
                raise JobError(
                    f"sink {spec.name!r} shows its rows when a checkpoint completes, but the job has no checkpoint_dir, "
                    f"and source {endless[0]!r} never ends; give Environment(checkpoint_dir=…)"
                )
