"""One run: a scenario's world is built, the job is driven to its end through all faults, and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Final

import msgspec

from midstream.checkpoint.metadata import decode_metadata
from midstream.coordinator import Coordinator
from midstream.coordinator.events import JobEnded, JobPlan
from midstream.core.config import JobConfig, RestartStrategy
from midstream.graph.job_graph import JobGraph
from midstream.protocol.messages import Deploy
from midstream.sim.cluster import Cluster, Driver, MakeCoordinator
from midstream.sim.disk import Disk
from midstream.sim.faults import strike
from midstream.sim.network import SIM, Network
from midstream.sim.oracle import CHECKPOINT, Oracle
from midstream.sim.recoveries import Recoveries
from midstream.sim.report import who_waits
from midstream.sim.rows import IN_PARTS, LedgerSink, Outside, SimSource
from midstream.sim.savepoints import Saved, Savepoints
from midstream.sim.scenario import REQUESTS, Scenario
from midstream.sim.tally import ToldSource
from midstream.sim.topologies import Shape, job_graph, uid_of, with_parallelism
from midstream.sim.trace import Kind, Trace, following_elements
from midstream.sim.world import World

JOB: Final = "simulated"
ROOT: Final = "sim://checkpoints"
STILL_STEPS: Final = 4_000
STILL_MAX: Final = 10
"""Nothing has moved for `STILL_MAX` times `STILL_STEPS` steps: the run hangs."""
KEEPER_US: Final = 20_000
"""How long it takes until somebody starts a job again."""
LAUNCHES_MAX: Final = 50
SAME_FAILURES: Final = 3
"""So often in a row the same failure is met by a restart; then the keeper starts the job again."""
NEVER: Final = 1 << 62
"""A step that no run comes to."""
FORKED: Final = 0.4
"""Of the runs that have made a savepoint, how many end with a fork from it."""
INLINE_BYTES: Final = (0, 0, 1500, 64 * 2**10)
"""By seed: all state in files, some, none."""
GENEROUS_S: Final = 60.0
"""A checkpoint that may overtake rows is done by then."""


@dataclass(slots=True)
class Outcome:
    """What a run came to. `failures` is empty when all was as it should be."""

    scenario: Scenario
    failures: list[str] = field(default_factory=list)
    is_stuck: bool = False
    hash: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Of the world's time."""
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    checkpoints: int = 0
    finished_in_checkpoint: int = 0
    in_flight_in_checkpoint: int = 0
    checkpoints_during_recovery: int = 0
    recovering_restores: int = 0
    """From checkpoints that were taken during recovery."""
    recovering_rescaled_restores: int = 0
    """Of these, at another parallelism."""
    recovering_failures: int = 0
    """Of attempts, while rows were being recovered."""
    launches: int = 0
    attempts: int = 0
    rescaled_restores: int = 0
    rescales: int = 0
    """While it ran."""
    savepoints: int = 0
    """That somebody was told of."""
    savepoints_failed: int = 0
    """Requests for one that were answered by a reason."""
    savepoints_restored: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None


def run(scenario: Scenario, *, keep_trace: bool = False, make_coordinator: MakeCoordinator | None = None) -> Outcome:
    """The outcome, a pure function of the scenario and the code."""
    prepared = Run(scenario, keep_trace, make_coordinator or Coordinator)
    if not keep_trace:
        return prepared.go()
    with following_elements(prepared.world.note):
        return prepared.go()


class Run:
    """Implements `faults.Stage`."""

    def __init__(self, scenario: Scenario, keep_trace: bool, make_coordinator: MakeCoordinator) -> None:
        self.scenario = scenario
        self.outcome = Outcome(scenario)
        self.world = World(scenario.seed, scenario.tempo, keep_trace=keep_trace)
        self.outside = Outside(self.world)
        self.outside.row_us = scenario.row_us
        self._disks: dict[str, Disk] = {}
        self._root = self._new_directory()
        self.sources: Mapping[str, SimSource] = self._make_sources(scenario.shape)
        self.drained = False
        self._oracle = Oracle(scenario.shape, self.sources, self.outside, self.disk, scenario.key_groups)
        self._sink = LedgerSink(self.outside, capacity_rows=scenario.sink_rows, pause_s=scenario.sink_pause_s)
        externals: dict[str, object] = {"outside": self.outside, "sink": self._sink}
        externals.update({f"source {uid}": source for uid, source in self.sources.items()})
        network = Network(
            self.world, wire_bytes_max=scenario.wire_bytes, pull_bytes_max=max(4096, scenario.wire_bytes // 4)
        )
        self.savepoints = Savepoints(self.world, self._oracle, self._disks)
        self.cluster = Cluster(self.world, self.savepoints.open, network, make_coordinator, externals)
        self.cluster.answered = self.savepoints.answered
        self.outside.finished = self.cluster.finished
        self.cluster.deployed = self._deployed
        self.recoveries = Recoveries()
        self.cluster.failed = self.recoveries.failed
        self._is_over = False
        self._launch_is_due = False
        self._is_given_up = False
        self._origin: str | None = None
        """The savepoint that the job goes on from while its directory holds no checkpoint."""
        self._is_restored = True
        """Nothing is to be copied into its directory any more."""
        self._still = 0
        self._last_progress: object = None
        self._next_look = STILL_STEPS
        self._faults_left = list(scenario.faults)
        self._next_fault = self._faults_left[0].step if self._faults_left else NEVER
        self.driver: Driver

    def _new_directory(self) -> str:
        """An empty checkpoint directory for the launches from now on: its root."""
        root = f"{ROOT}-{self.outcome.launches}" if self._disks else ROOT
        self.disk = self._disks[root] = Disk(self.world)
        self.disk.on_write = partial(self._on_write, root)
        return root

    def _make_sources(self, shape: Shape) -> dict[str, SimSource]:
        s = self.scenario
        sources = {}
        for index, node in enumerate(shape):
            if node.chain[0] == "source":
                rows = max(1, int(s.rows * node.rows_share))
                splits = [rows // s.splits + (i < rows % s.splits) for i in range(s.splits)]
                kind = ToldSource if Random(f"told {s.seed} {index}").random() < 0.2 else SimSource
                in_parts = Random(f"parts {s.seed} {index}").random() < 0.3
                sources[uid_of(index, 0, "source")] = kind(
                    self.outside,
                    index + IN_PARTS * in_parts,
                    splits,
                    keys=s.keys,
                    skew=s.skew,
                    text_bytes=s.text_bytes,
                    blocking=s.blocking,
                    rounds=s.rounds,
                    readers=s.readers,
                )
        return sources

    # ---- driving

    def go(self) -> Outcome:
        world, scenario, outcome = self.world, self.scenario, self.outcome
        self._launch(scenario.shape, restore=None)
        world.run(self._look, scenario.steps_max)
        if not self._is_over and not world.bugs:
            outcome.is_stuck = True
            world.bug("the job is stuck\n" + "\n".join(who_waits(self.cluster, self.driver)))
        elif not world.bugs:
            self._wind_up()
            self._fork()
        outcome.failures = world.bugs
        outcome.hash = world.hash
        outcome.steps = world.step_number
        outcome.seconds = world.now_us / 1e6
        outcome.checkpoints = self._oracle.checkpoints
        outcome.finished_in_checkpoint = self._oracle.finished_in_checkpoint
        outcome.in_flight_in_checkpoint = self._oracle.in_flight
        outcome.rows = sum(sum(source.rows) for source in self.sources.values())
        outcome.lost, outcome.doubled = self._oracle.lost, self._oracle.doubled
        outcome.rescales = sum(driver.rescales for driver in self.cluster.drivers)
        outcome.savepoints, outcome.savepoints_failed = self.savepoints.made, self.savepoints.failed
        outcome.checkpoints_during_recovery = self.recoveries.checkpoints
        outcome.recovering_restores = self.recoveries.restores
        outcome.recovering_rescaled_restores = self.recoveries.rescaled_restores
        outcome.recovering_failures = self.recoveries.failures
        outcome.trace = world.trace
        return outcome

    def _launch(self, shape: Shape, restore: str | None) -> None:
        self.outcome.launches += 1
        self._launch_is_due = self._is_given_up = False
        self._is_restored = restore in (None, "latest")
        self.driver = self.cluster.submit(self._plan(f"job{self.outcome.launches}", shape, restore))

    def _rescaled(self, job_id: str, shape: Shape, restore: str | None, parallelism: int) -> JobPlan:
        """The same job at another parallelism; some plans do not work, because their pool is too small."""
        self.world.io_point()
        random = Random(f"rescale {self.scenario.seed} {parallelism}")
        then = self._plan(job_id, with_parallelism(shape, parallelism, random, same=random.random() < 0.5), restore)
        if random.random() < 0.1:
            too_small = msgspec.structs.replace(then.config, pool_bytes=2 * then.config.buffer_bytes)
            return replace(then, config=too_small)
        return then

    def _plan(self, job_id: str, shape: Shape, restore: str | None) -> JobPlan:
        s = self.scenario
        graph = job_graph(shape, self.outside, list(self.sources.values()), self._sink, s.key_groups)
        config = JobConfig(
            name=JOB,
            parallelism=graph.slots,
            max_parallelism=s.key_groups,
            checkpoint_dir=self._root if s.has_checkpoints else None,
            checkpoint_interval_s=s.interval_s if s.has_checkpoints else None,
            checkpoint_timeout_s=s.timeout_s,
            aligned_timeout_s=s.aligned_timeout_s,
            queue_time_s=s.queue_time_s,
            min_pause_s=s.min_pause_s,
            tolerable_failures=1000,
            retained_checkpoints=s.retained,
            inline_bytes=INLINE_BYTES[s.seed % len(INLINE_BYTES)],
            restart=RestartStrategy(
                kind="exponential",
                attempts=0,
                delay_s=0.001,
                max_delay_s=0.01,
                same_failures=SAME_FAILURES if s.has_checkpoints else 0,
            ),
            buffer_bytes=s.buffer_bytes,
            pool_bytes=s.buffer_bytes * (least_buffers(graph) + s.pool_buffers),
            batch_rows=s.batch_rows,
            slot_timeout_s=30.0,
            heartbeat_timeout_s=3.0,
        ).check()
        rescaled = partial(self._rescaled, job_id, shape, restore)
        return JobPlan(job_id, graph, self.cluster.pickle(graph), config, restore, rescaled=rescaled)

    def _look(self) -> bool:
        """Whether all is over; also where faults strike and the job's keeper acts."""
        step = self.world.step_number
        while step >= self._next_fault:
            fault = self._faults_left.pop(0)
            self._next_fault = self._faults_left[0].step if self._faults_left else NEVER
            if strike(self, fault):
                self.outcome.faults[fault.kind] += 1
        if not self._launch_is_due and (self.driver.is_over or self._is_given_up):
            self._after_end()
        if step >= self._next_look:
            self._next_look += STILL_STEPS
            self._look_for_progress()
        return self._is_over or self._still >= STILL_MAX

    def give_up_driver(self) -> None:
        self._is_given_up = True

    def _look_for_progress(self) -> None:
        rows = sum(
            task.rows_in + sum(partition.bytes_out for partition in task.partitions)
            for slot in self.cluster.live_slots
            if slot.machine
            for task in slot.machine.tasks.values()
        )
        attempts = tuple(slot.machine.attempt for slot in self.cluster.live_slots if slot.machine)
        progress = (rows, len(self.outside.committed), attempts, len(self.cluster.drivers), len(self._faults_left))
        self._still = self._still + 1 if progress == self._last_progress else 0
        self._last_progress = progress

    def _after_end(self) -> None:
        """The keeper of the job: what has stopped, died or failed by a fault is started again from latest."""
        ended = None if self._is_given_up else self.driver.outcome
        world = self.world
        if ended is None or ended.state == "failed" or self.driver.is_cancelled:
            self.recoveries.failed(self.driver)
        if ended is not None and ended.state == "failed" and SIM not in str(ended.error):
            world.bug(f"the job failed: {ended.error}")
            return
        if ended is not None and ended.state in ("finished", "stopped"):
            if ended.state == "finished" or (self.drained and not self.driver.is_cancelled):
                self._is_over = True
                return
            if not self.driver.is_cancelled:
                self._complain(self._oracle.check_stopped())
        if self.outcome.launches >= LAUNCHES_MAX:
            world.bug(f"the job was started {LAUNCHES_MAX} times")
            return
        shape = self.scenario.shape
        if self.scenario.rescaled is not None and self.outcome.launches % 2:
            shape = self.scenario.rescaled
            self.outcome.rescaled_restores += 1
        self._launch_is_due = True
        restore = self._restore(ended) if self.scenario.has_checkpoints else None
        world.schedule(KEEPER_US, None, Kind.CLUSTER, lambda: self._launch(shape, restore), "the job is started again")

    def _restore(self, ended: JobEnded | None) -> str:
        """From what the job is started again: what it has stopped with, or else the newest there is."""
        if ended is not None and ended.checkpoint is not None:
            for saved in self.savepoints.saved:
                if saved.url == ended.checkpoint:
                    self._complain(self._oracle.check_stopped_with(saved.cut))
                    return self._go_on_from(saved)
        if self._origin is not None and not any(CHECKPOINT.fullmatch(path) for path in self.disk.files):
            return self._origin
        return "latest"

    def _go_on_from(self, saved: Saved) -> str:
        """From a savepoint that has perhaps been moved, in the same directory, or in another while that one is gone."""
        random = Random(f"go on {self.scenario.seed} {self.outcome.launches}")
        is_alone = all(driver.is_over for driver in self.cluster.drivers)  # a zombie would miss its directory
        elsewhere = is_alone and random.random() < 0.4
        if random.random() < 0.4 or (elsewhere and saved.url.startswith(f"{self._root}/")):
            self.savepoints.move(saved)
        if elsewhere:
            self.savepoints.forget_below(self._root)
            self._root = self._new_directory()
            self._oracle.storage, self._origin = self.disk, saved.url
        elif random.random() < 0.2:
            return "latest"
        return saved.url

    def _fork(self, share: float = FORKED) -> None:
        """Much later somebody goes on from a savepoint, in a directory of its own, with what had been put out by then."""
        world, random = self.world, Random(f"fork {self.scenario.seed}")
        if world.bugs or self.drained or not self.savepoints.saved or random.random() > share:
            return
        saved = random.choice(self.savepoints.saved)
        world.note(("fork of", saved.url))
        self._root, self._origin = self._new_directory(), saved.url
        self._oracle.begin_again(self.disk, saved.cut)
        self._is_over, self._still = False, 0
        self._launch(self.scenario.rescaled or self.scenario.shape, saved.url)
        world.run(self._look, world.step_number + self.scenario.steps_max)
        if not self._is_over and not world.bugs:
            self.outcome.is_stuck = True
            world.bug("the fork of the job is stuck\n" + "\n".join(who_waits(self.cluster, self.driver)))
        elif not world.bugs:
            self._wind_up()

    def _wind_up(self) -> None:
        """The output is judged; all slots end; nothing is left behind."""
        world = self.world
        self._complain(self._oracle.check_stopped() if self.drained else self._oracle.check_end())
        for process in world.processes:
            if process.alive and process.paused:
                process.resume()
        drivers = self.cluster.drivers
        world.run(
            lambda: not self.cluster.live_slots and all(driver.is_over for driver in drivers),
            world.step_number + 50_000,
        )
        for slot in self.cluster.live_slots:
            world.bug(f"{slot.process.name} lives on after the end of the job")
        for driver in drivers:
            if not driver.is_over:
                world.bug(f"{driver.process.name}, a zombie, goes on after the end of the job")
        self._complain(self._oracle.check_stopped() if self.drained else self._oracle.check_end())
        self._complain(self._without_reason())
        self._complain(self.savepoints.check_end())
        if not self.outcome.faults and not self.scenario.tempo.clock_tick_us:  # else it may still be deleting files
            self._complain(self._oracle.check_left_over(self.disk.files, self.scenario.retained))

    def _without_reason(self) -> Iterator[str]:
        """Checkpoints that failed although nothing was in their way: no fault, and no row that they had to wait for."""
        may_wait = self.scenario.aligned_timeout_s != 0.0 or self.scenario.timeout_s < GENEROUS_S
        if may_wait or self.outcome.faults.keys() - REQUESTS:
            return
        for driver in self.cluster.drivers:
            yield from driver.failed_checkpoints

    def _on_write(self, root: str, path: str, data: bytes) -> None:
        if not path.endswith("/_metadata"):
            return
        if not CHECKPOINT.fullmatch(path):
            self.savepoints.written(root, path, data)
        elif root == self._root:
            self.outcome.savepoints_restored += not self._is_restored
            self._is_restored = True
            self.recoveries.completed(root, decode_metadata(data, path), self.cluster.live_slots)
            self._complain(self._oracle.check_checkpoint(data))

    def _deployed(self, driver: Driver, deploy: Deploy) -> None:
        restored_from = driver.coordinator.status(driver.process.now_ms()).restored_from
        self.recoveries.deployed(driver, deploy, restored_from)

    def _complain(self, complaints: Iterable[str]) -> None:
        for complaint in complaints:
            self.world.bug(complaint)


def least_buffers(graph: JobGraph) -> int:
    """Buffers that every slot's tasks need at least, in the worst placement: all channels remote."""
    needed = 0
    for edge in graph.edges:
        producers, consumers = graph.vertices[edge.source].parallelism, graph.vertices[edge.target].parallelism
        needed += consumers + 1 + 2 * producers
    return 2 * needed
