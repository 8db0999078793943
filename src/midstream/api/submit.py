"""Starting a program: its graph is built, shipped, and passed to a driver."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from midstream.api.user_modules import top_level_names
from midstream.engine.checkpoint.store import split_restore
from midstream.engine.coordinator.events import JobPlan, NewerOutput
from midstream.engine.coordinator.restore.open_directory import check_plan, check_start, find_start
from midstream.engine.core.config import Duration, JobConfig, duration_text
from midstream.engine.core.errors import ClusterError, ConfigError, JobError, MidstreamError
from midstream.engine.core.job_pickle import pickled, unpickled_apart
from midstream.engine.exchange.pool_minimum import check_pool
from midstream.engine.graph.drift_groups import drift_groups, drifts_without_splits
from midstream.engine.graph.graph_builder import build_job_graph, warnings_of
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.graph.logical_graph import LogicalGraph, Node
from midstream.engine.operators.base import Operator
from midstream.engine.protocol.messages import JobModules
from midstream.engine.state.job_code import own_code
from midstream.page import PageAddress, open_page
from midstream.page.job_observers import begin_observing
from midstream.page.lineage import open_lineage
from midstream.page.traces import open_traces
from midstream.runtime.driver.job import Job, start_job
from midstream.runtime.process.slot_provider import SlotProvider
from midstream.runtime.random_ids import RandomIds
from midstream.runtime.storage.file_storage import FileStorage, absolute, check_can_create

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The arguments of `Environment.start`, which describes them."""

    parallelism: int | None = None
    master: str | None = None
    restore_from: str | int | None = None
    allow_dropped_state: bool = False
    newer_output: NewerOutput | None = None
    fresh: bool = False
    resume: bool = False
    checkpoint_dir: str | os.PathLike[str] | None = None
    aligned_timeout: Duration | None = None
    slots: SlotProvider | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that has passed every check that is possible without slots."""

    plan: JobPlan
    nodes: tuple[Node, ...]
    master: str | None
    slots: SlotProvider | None
    """None for slots on Spark, which is started if necessary."""
    checkpoint: int | None
    """The completed checkpoint to resume from, as far as is known before the start. None: the job starts at the beginning."""
    restoring: bool
    """Whether sources may continue with what an earlier start has prepared."""

    @property
    def resumption(self) -> str:
        """Which checkpoint a start with `resume` resumes from; "" if it does not, which is a warning of its own."""
        if not self.plan.resume or self.checkpoint is None:
            return ""
        config = self.plan.config
        return f"job {config.name} resumes from checkpoint {self.checkpoint} in {config.checkpoint_dir}"

    def start(self, page: str | None = None) -> Job:
        """Start the job and return immediately. Raises the errors of `Environment.start`.

        `page`: where the job's page is served, see `page.PageAddress.of`.
        """
        plan, graph = self.plan, self.plan.graph
        address = PageAddress.of(page)
        observers = [each for each in (open_traces(), open_lineage(graph)) if each is not None]
        with ExitStack() as undo:
            for observer in observers:
                undo.callback(observer.close)
            served = open_page(address, plan.config.name)
            if served is not None:
                undo.callback(served.end)
            slots = self.slots
            if slots is None:
                slots = _spark_slots(self.master, plan.slots_max)
                undo.callback(slots.close)
            _check_bounds(plan, slots)
            for vertex in graph.vertices:
                if vertex.source is not None:
                    undo.callback(vertex.source.source.close)
                    vertex.source.source.prepare(vertex.source.uid, plan.config.checkpoint_dir, self.restoring)
            graph.set_own_code(own_code(graph, top_level_names(plan.modules), plan.config.trusted_packages))
            plan = replace(
                plan,
                graph_bytes=pickled(graph),
                rescaled=lambda parallelism: rescaled(plan, LogicalGraph(list(self.nodes)), slots, parallelism),
            )
            job = start_job(plan, slots, served)
            undo.pop_all()
        for observer in observers:
            begin_observing(job, observer)
        return job


def submission(
    logical: LogicalGraph,
    config: JobConfig,
    modules: Callable[[bytes], JobModules],
    options: StartOptions,
) -> Submission:
    """Check the job, which runs with `config`, and return its Submission.

    `modules`: returns the modules that the slots need for the pickled graph.
    """
    if options.slots is not None and options.master is not None:
        raise JobError("give master= or slots=, not both: slots= defines where slots run, in place of Spark")
    restore_from = None if options.restore_from is None else str(options.restore_from)
    if options.resume:
        _check_resume(options)
        restore_from = "latest"
    if config.autoscale is not None and not config.autoscale.is_advice and config.checkpoint_dir is None:
        raise ConfigError(
            "autoscale: a job changes its parallelism by a checkpoint: give checkpoint_dir= too, or autoscale='advise'"
        )
    if restore_from is not None and config.checkpoint_dir is None:
        raise JobError(
            f"the job {config.name!r} has no checkpoint_dir, so there is nothing to resume from, and nowhere to copy a "
            "savepoint to; give Environment(checkpoint_dir=…) or --checkpoint-dir"
        )
    if restore_from is not None and split_restore(restore_from, "")[0] is not None:
        restore_from = absolute(restore_from)
    if config.checkpoint_dir is not None:
        check_can_create(config.checkpoint_dir)
    graph = build_job_graph(logical, config)
    _check_output_can_appear(graph, config)
    _check_drifts(graph, logical)
    for warning in warnings_of(graph):
        _log.warning("job %s: %s", config.name, warning)
    plan = JobPlan(
        RandomIds().new_id(),
        graph,
        b"",
        config,
        restore_from,
        options.allow_dropped_state,
        newer_output=options.newer_output,
        fresh=options.fresh,
        resume=options.resume,
    )
    check_plan(plan)
    start = find_start(plan, FileStorage)
    _check_sinks(graph, logical, restoring=start.metadata is not None)
    for warning in check_start(plan, start, FileStorage):
        _log.warning("job %s: %s", config.name, warning)  # the status, which has it too, is read later
    # an error in the modules is reported before Spark starts
    plan = replace(plan, modules=modules(pickled(graph)))
    checkpoint = None if start.metadata is None else start.metadata.checkpoint_id
    restoring = plan.restore is not None and not start.starts_over
    return Submission(plan, tuple(logical.nodes), options.master, options.slots, checkpoint, restoring)


def _check_resume(options: StartOptions) -> None:
    given = (
        ("--from", options.restore_from),
        ("--newer-output", options.newer_output),
        ("--fresh", options.fresh or None),
    )
    for option, value in given:
        if value is not None:
            raise ConfigError(
                f"--resume (resume=True) resumes from the newest checkpoint, or begins if there is none; leave {option} out, or "
                f"start the job once with {option}, and with --resume when it has completed a checkpoint"
            )


def rescaled(plan: JobPlan, logical: LogicalGraph, slots: SlotProvider, parallelism: int) -> JobPlan:
    """Return the plan of the same job at another parallelism, for the operators that do not set their own.

    Sources and sinks are shipped as they were with `plan`, because those on the driver have been in use since.
    Raises ConfigError, JobError, or ClusterError if that many slots are not available.
    """
    config = msgspec.structs.replace(plan.config, parallelism=parallelism)
    graph = build_job_graph(logical, config)
    slots.check(graph.slots)
    _check_parallelism(graph)
    check_pool(graph, config)
    shipped: JobGraph = unpickled_apart(plan.graph_bytes)
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
    return replace(plan, graph=graph, graph_bytes=pickled(replace(graph, vertices=vertices)), config=config)


def _check_bounds(plan: JobPlan, slots: SlotProvider) -> None:
    """Check that there can be as many slots as the job may choose to have. Raises ClusterError."""
    if plan.slots_max > plan.graph.slots:
        try:
            slots.check(plan.slots_max)
        except ClusterError as error:
            raise ClusterError(f"autoscale goes up to parallelism {plan.slots_max}: {error}") from error


def _spark_slots(master: str | None, slots: int) -> SlotProvider:
    try:
        from midstream.spark.session import get_session
        from midstream.spark.spark_slots import SparkSlots
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"pyspark", "py4j"}:
            raise
        raise ClusterError(
            f"Spark needs PySpark 4, and {sys.executable} has no module {error.name!r}; "
            "install it (pip install 'pyspark>=4.0'), or run the job with the Python that has it"
        ) from error
    return SparkSlots(get_session(master, slots=slots))


def _check_sinks(graph: JobGraph, logical: LogicalGraph, restoring: bool) -> None:
    """Raises what a sink raises that cannot be used, with its name and its line in the program."""
    for vertex in graph.vertices:
        for spec in vertex.operators:
            if spec.sink is None:
                continue
            try:
                spec.sink.validate(spec.operator.schema, restoring)  # type: ignore[attr-defined]
            except MidstreamError as error:
                place = next((node.location for node in logical.nodes if node.sink is spec.sink), "")
                sink = f"{f'{place}: ' if place else ''}sink {spec.name!r}"
                raise type(error)(f"{sink}: {error}").with_traceback(error.__traceback__) from error.__cause__
    _check_parallelism(graph)


def _check_parallelism(graph: JobGraph) -> None:
    sinks = [(spec.sink, vertex.parallelism) for vertex in graph.vertices for spec in vertex.operators if spec.sink]
    for i, (sink, subtasks) in enumerate(sinks):
        sink.check_parallelism(subtasks, sinks[:i] + sinks[i + 1 :])


def _check_drifts(graph: JobGraph, logical: LogicalGraph) -> None:
    """Raises JobError if an operator limits the drift of splits that it does not see, or a source would always wait for
    another one whose rows are further out of order.
    """

    def label(operator: Operator) -> str:
        return next(node.label for node in logical.nodes if node.operator is operator)

    for operator in drifts_without_splits(graph):
        raise JobError(
            f"{label(operator)}: drift= keeps the splits of a source in step, and rows of several splits arrive here mixed. "
            "Call with_watermarks() directly after the source, before the stream divides, or leave drift out"
        )
    for group in drift_groups(graph):
        late = max(group, key=lambda source: source.operator.strategy.delay_us)
        for source in group:
            if source.drift_us < (delay_us := late.operator.strategy.delay_us):
                raise JobError(
                    f"{label(source.operator)}: drift={duration_text(source.drift_us)!r} is less than the max_delay of "
                    f"{duration_text(delay_us)} of {label(late.operator)}, so rows would always be read that much later. "
                    f"Give at least {duration_text(delay_us)}"
                )


def _check_output_can_appear(graph: JobGraph, config: JobConfig) -> None:
    """Raises JobError if a sink commits with checkpoints, but the job has no checkpoint directory and no end."""
    if config.checkpoint_dir is not None:
        return
    endless = [v.source.name for v in graph.vertices if v.source is not None and not v.source.source.bounded]
    for vertex in graph.vertices:
        for spec in vertex.operators:
            if spec.sink is not None and spec.sink.needs_checkpoints:
                raise JobError(
                    f"sink {spec.name!r} keeps rows in the checkpoint until it is complete, and the job has no checkpoint_dir; "
                    "give Environment(checkpoint_dir=…), or write with guarantee='at_least_once'"
                )
            if endless and spec.sink is not None and spec.sink.is_transactional:
                raise JobError(
                    f"sink {spec.name!r} shows its rows when a checkpoint completes, but the job has no checkpoint_dir, "
                    f"and source {endless[0]!r} never ends; give Environment(checkpoint_dir=…)"
                )
