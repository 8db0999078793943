"""One run of a user's job in a simulated world: driver and slots face what the scenario draws, and sinks record their
rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Final
from unittest.mock import patch

import msgspec
import pyarrow as pa

from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.checkpoint.store import is_metadata_path
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import JobEnded, JobPlan
from midstream.engine.coordinator.placement import dropped_rows
from midstream.engine.core.batches import single_batch
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.protocol.messages import ClientRequest, DoSavepoint, DoStop, Reply
from midstream.simulation.chunk_sizes import are_small, least_buffers, small_sizes
from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
from midstream.simulation.disk import Disk, Folder
from midstream.simulation.faults import strike
from midstream.simulation.ledger_sink import LedgerSink
from midstream.simulation.network import SIM, Network
from midstream.simulation.outside import Outside, row_id
from midstream.simulation.trace import Kind, Trace, following_elements
from midstream.simulation.world import World
from midstream.testing.simulation.job_scenario import JobScenario
from midstream.testing.simulation.simulated_job import Recorded, SimulatedJob, Unpickler
from midstream.testing.simulation.surroundings import Effect, Surroundings, set_function_state, surroundings

ROOT: Final = "sim://checkpoints"
RESTART_DELAY_US: Final = 5_000
LAUNCHES_MAX: Final = 30
SAME_FAILURES: Final = 3
SETTLING_STEPS: Final = 20_000
LEAST_POOL: Final = 8


@dataclass(slots=True)
class Ran:
    """The result of a run."""

    scenario: JobScenario
    output: dict[str, pa.Table] = field(default_factory=dict)
    """The rows that each sink, and each tap, has committed, by uid."""
    error: str = ""
    """The error with which the job failed, if the scenario did not cause it."""
    engine_bugs: list[str] = field(default_factory=list)
    is_over: bool = True
    """False: the run had not ended when its steps were used up."""
    steps: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    effects: Counter[Effect] = field(default_factory=Counter)
    drained: dict[str, tuple[int, ...]] | None = None
    """For a job that was drained: the rows read of each split, by uid of the source."""
    trace: Trace | None = None


def run_job(job: SimulatedJob, scenario: JobScenario, *, keep_trace: bool = False) -> Ran:
    """Run a job. The result depends only on the job, the scenario and the code, except for what functions see of the
    real world.
    """
    prepared = _Run(job, scenario, keep_trace)
    with ExitStack() as stack:
        dropped_rows._log.addFilter(_first_of_operator)
        stack.callback(dropped_rows._log.removeFilter, _first_of_operator)
        if scenario.failures.small_chunks:
            for module, name, value in _small_chunks(scenario.seed):
                stack.enter_context(patch.object(module, name, value))
        if keep_trace:
            stack.enter_context(following_elements(prepared.world.note))
        around = stack.enter_context(surroundings(prepared.world, scenario.outer))
        return prepared.go(around)


_warned: set[str] = set()


def _first_of_operator(record: logging.LogRecord) -> bool:
    """Let the first warning of an operator pass: each run would repeat it, with another number of late rows."""
    operator = record.getMessage().partition(" has dropped ")[0]
    is_first = operator not in _warned
    _warned.add(operator)
    return is_first


def _small_chunks(seed: int) -> list[tuple[Any, str, int]]:
    return next(small_sizes(seed + n) for n in range(1000) if are_small(seed + n))


# ---- sources


class RecordedSource(Source):
    """Returns recorded rows, cut as the scenario determines."""

    discovery_interval_s = 0.002

    def __init__(self, outside: Outside, number: int, recorded: Recorded, scenario: JobScenario) -> None:
        self.outside = outside
        self.number = number
        self.rows = [table.num_rows for table in recorded.splits]
        self.schema = recorded.splits[0].schema
        self.blocking = (scenario.failures.faults != () or bool(scenario.order.seed)) and not scenario.failures.drains
        self.read = [0] * len(recorded.splits)
        """The position up to which each split was read by its last reader."""
        rates = scenario.order.rates
        self.rows_per_s = rates[number] if number < len(rates) else None
        self.batches = [single_batch(table) for table in recorded.splits]
        self._follows = recorded.follows
        self._cuts = scenario.cuts
        self._random = Random(f"cuts {scenario.seed} {number}")

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        self.outside.world.io_point()
        splits = (Split(f"{self.number}-{split}", b"", follows=follows) for split, follows in enumerate(self._follows))
        return Discovery(() if position else tuple(splits), b"all", exhausted=True)

    def open_split(self, split: Split) -> SplitReader:
        number = int(split.id.partition("-")[2])
        self.read[number] = split.offset
        return _RowReader(self, number, split.offset)

    def cut(self, start: int, rows_max: int, split: int) -> int:
        """Return where the batch that begins at `start` ends."""
        most = min(rows_max, self._cuts.batch_rows)
        if self._cuts.are_random:
            most = self._random.randint(1, most)
        return min(self.rows[split], start + most)


class _RowReader(SplitReader):
    def __init__(self, source: RecordedSource, split: int, offset: int) -> None:
        self._source = source
        self._split = split
        self._offset = offset

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        source, outside = self._source, self._source.outside
        if source.blocking:
            outside.world.io_point()
        if outside.read_failures:
            outside.read_failures -= 1
            raise StorageError(f"cannot read split {self._split} {SIM}")
        stop = source.cut(self._offset, rows_max, self._split)
        if stop == self._offset:
            return None
        if outside.poison:
            first = row_id(source.number, self._split, self._offset)
            outside.check_poison(range(first, first + stop - self._offset))
        batch = source.batches[self._split].slice(self._offset, stop - self._offset)
        self._offset = source.read[self._split] = stop
        return batch, stop


# ---- the run


class _JobCluster(SimulatedCluster):
    """Ships the job's graph."""

    job: SimulatedJob
    sink: LedgerSink
    sources: Mapping[str, RecordedSource]

    def unpickle(self, data: bytes) -> Any:
        return _with_sources(self.job.unpickled(data, self.sink, _Unpickler), self.sources)


class _Unpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_function_setstate" and module.startswith("cloudpickle"):
            return set_function_state
        return super().find_class(module, name)


def _with_sources(graph: JobGraph, sources: Mapping[str, RecordedSource]) -> JobGraph:
    vertices = tuple(
        replace(vertex, source=replace(vertex.source, source=sources[vertex.source.uid])) if vertex.source else vertex
        for vertex in graph.vertices
    )
    return replace(graph, vertices=vertices)


class _Savepoints:
    """All disks of the world by root, and the savepoints that were requested from the driver."""

    def __init__(self, world: World, disks: dict[str, Disk]) -> None:
        self.made: list[str] = []
        self._world = world
        self._disks = disks
        self._requested = 0

    def open(self, root: str) -> Storage:
        for known, disk in self._disks.items():
            if root == known:
                return disk
            if root.startswith(f"{known}/"):
                return Folder(disk, root[len(known) + 1 :])
        disk = self._disks[root] = Disk(self._world)
        return disk

    def request(self, driver: SimulatedDriver, victim: int, *, stop: bool) -> None:
        """Request a savepoint in a new directory."""
        self._requested += 1
        url = f"sim://saved/{self._requested}"
        driver.request(DoStop(savepoint=url) if stop else DoSavepoint(url))

    def answered(self, driver: SimulatedDriver, client: int, request: ClientRequest, reply: Reply) -> None:
        if isinstance(request, (DoStop, DoSavepoint)) and reply.checkpoint and not reply.error:
            self.made.append(reply.checkpoint)


class _Run:
    """Implements `faults.FaultTarget`; starts the job again when it has stopped, failed by a fault, or lost its driver."""

    def __init__(self, job: SimulatedJob, scenario: JobScenario, keep_trace: bool) -> None:
        self.job = job
        self.scenario = scenario
        world = self.world = World(scenario.order.seed, scenario.order.tempo, keep_trace=keep_trace)
        world.epoch_ms += int(scenario.outer.clock_s * 1000)
        self.outside = Outside(world)
        self.sources: Mapping[str, RecordedSource] = {
            uid: RecordedSource(self.outside, number, recorded, scenario)
            for number, (uid, recorded) in enumerate(job.inputs.items())
        }
        for node in job.logical.nodes:
            if node.source is not None:
                own = self.sources[str(node.uid)]
                own.bounded, own.splits_end = node.source.bounded, node.source.splits_end
        failures = scenario.failures
        self.disk = Disk(world)
        self._disks = {ROOT: self.disk}
        self.disk.on_write = self._written
        self.savepoints = _Savepoints(world, self._disks)
        network = Network(world, wire_bytes_max=65536, pull_bytes_max=16384)
        self.cluster = _JobCluster(world, self.savepoints.open, network, Coordinator, {})
        self.cluster.job = job
        self.cluster.sink = LedgerSink(self.outside, capacity_rows=failures.sink_rows, pause_s=0.001)
        self.cluster.sources = self.sources
        self.cluster.answered = self.savepoints.answered
        self.outside.finished = self.cluster.finished
        self.outside.drained = self.cluster.drained
        self.in_flight_checkpoints = self.polls = 0
        self.driver: SimulatedDriver
        self._launches = 0
        self._launch_is_due = False
        self._is_given_up = False
        self._is_over = False
        self._is_hopeless = False
        """Whether the job was started `LAUNCHES_MAX` times and has not ended."""
        self._error = ""
        self._struck: Counter[str] = Counter()
        self._faults_left = list(failures.faults)

    # ---- for faults

    def give_up_driver(self) -> None:
        self._is_given_up = True

    # ---- driving

    def go(self, around: Surroundings) -> Ran:
        world = self.world
        self._launch(None)
        world.run(self._advance, self.scenario.steps_max)
        if self._is_over and len(self.cluster.drivers) > 1:
            self._settle()
        return Ran(
            self.scenario,
            output=self._output(),
            error=self._error,
            engine_bugs=world.bugs,
            is_over=self._is_over,
            steps=world.step_number,
            struck=self._struck,
            effects=around.effects,
            drained={uid: tuple(source.read) for uid, source in self.sources.items()} if self.outside.drained else None,
            trace=world.trace,
        )

    def _settle(self) -> None:
        """Resume drivers that were believed dead, which must notice that they have been superseded."""
        world = self.world
        for process in world.processes:
            if process.alive and process.paused:
                process.resume()
        drivers = self.cluster.drivers
        world.run(lambda: all(driver.is_over for driver in drivers), world.step_number + SETTLING_STEPS)

    def _advance(self) -> bool:
        step = self.world.step_number
        while self._faults_left and step >= self._faults_left[0].step:
            fault = self._faults_left.pop(0)
            if strike(self, fault):
                self._struck[fault.kind] += 1
        if not self._launch_is_due and (self.driver.is_over or self._is_given_up):
            self._after_end(None if self._is_given_up else self.driver.outcome)
        return self._is_over or self._is_hopeless

    def _after_end(self, ended: JobEnded | None) -> None:
        if ended is not None and ended.state == "finished":
            self._is_over = True
            return
        if ended is not None and ended.state == "failed" and SIM not in str(ended.error):
            self._is_over = True
            self._error = str(ended.error)
            return
        if self._launches >= LAUNCHES_MAX:
            self._is_hopeless = True
            return
        restore = "latest"
        if ended is not None and ended.checkpoint is not None and ended.checkpoint in self.savepoints.made:
            restore = ended.checkpoint
        self._launch_is_due = True
        self.world.schedule(
            RESTART_DELAY_US, None, Kind.CLUSTER, partial(self._launch, restore), "the job is started again"
        )

    def _launch(self, restore: str | None) -> None:
        width = self.scenario.width
        parallelism = width.then if self._launches % 2 else width.first
        self._launches += 1
        self._launch_is_due = self._is_given_up = False
        self.driver = self.cluster.submit(self._plan(f"job{self._launches}", parallelism, restore))

    def _plan(self, job_id: str, parallelism: int, restore: str | None) -> JobPlan:
        failures, own = self.scenario.failures, self.job.config
        data = self.job.pickled(parallelism)
        graph: JobGraph = self.cluster.unpickle(data)
        config = msgspec.structs.replace(
            own,
            parallelism=parallelism,
            checkpoint_dir=ROOT,
            checkpoint_interval_s=failures.interval_s,
            checkpoint_timeout_s=600.0,
            aligned_timeout_s=failures.aligned_timeout_s,
            min_pause_s=0.001,
            tolerable_failures=1000,
            restart=RestartStrategy(
                kind="exponential", attempts=0, delay_s=0.001, max_delay_s=0.01, same_failures=SAME_FAILURES
            ),
            buffer_bytes=failures.buffer_bytes,
            pool_bytes=failures.buffer_bytes * (least_buffers(graph) + LEAST_POOL + failures.pool_buffers),
            batch_rows=self.scenario.cuts.batch_rows,
            slot_timeout_s=30.0,
            heartbeat_timeout_s=3.0,
        ).check()
        return JobPlan(job_id, graph, data, config, restore, rescaled=partial(self._rescaled, job_id, restore))

    def _rescaled(self, job_id: str, restore: str | None, parallelism: int) -> JobPlan:
        self.world.io_point()
        return self._plan(job_id, parallelism, restore)

    def _written(self, path: str, data: bytes) -> None:
        if is_metadata_path(path):
            self.in_flight_checkpoints += bool(decode_metadata(data, path).channels)

    # ---- the result

    def _output(self) -> dict[str, pa.Table]:
        parts: dict[str, list[pa.RecordBatch]] = {}
        for name in self.outside.committed:
            staged = self.outside.staged[name]
            parts.setdefault(staged.sink, []).append(staged.rows)
        return {uid: pa.Table.from_batches(rows) for uid, rows in parts.items()}
