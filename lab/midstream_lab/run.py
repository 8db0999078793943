"""One run: it builds a scenario's world, drives the job through all faults to its end, and judges it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import msgspec

from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.checkpoint.store import is_metadata_path
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.config import JobConfig, RestartStrategy
from midstream.engine.protocol.messages import Deploy
from midstream.engine.worker.task import TaskState
from midstream.simulation.chunk_sizes import least_buffers
from midstream.simulation.cluster import MakeCoordinator, SimulatedCluster, SimulatedDriver
from midstream.simulation.network import Network
from midstream.simulation.trace import Trace, following_elements
from midstream.simulation.world import World
from midstream_lab.autoscaling import bounds_of, quick_changes, scales
from midstream_lab.checkers.checkpoint_checker import CheckpointChecker
from midstream_lab.checkers.directory_checker import DirectoryChecker
from midstream_lab.checkers.drift_checker import DriftChecker, drift_is_checked
from midstream_lab.checkers.driver_checker import DriverChecker, checker_of
from midstream_lab.checkers.watermark_checker import watermarks_are_checked
from midstream_lab.chunk_sizes import chunk_sizes_of
from midstream_lab.faults import strike
from midstream_lab.faulty_disk import FaultyDisk
from midstream_lab.jobs.recorded_rows import IN_PARTS, Outside, SimSource
from midstream_lab.jobs.shapes import Shape
from midstream_lab.jobs.tally import NotifiedSource
from midstream_lab.jobs.topologies import job_graph, uid_of, with_parallelism
from midstream_lab.local_disk import SimLocalDisk, spills
from midstream_lab.real_sinks import RealSinks
from midstream_lab.recoveries import Recoveries
from midstream_lab.restarter import ROOT, Restarter, StartedJob
from midstream_lab.savepoints import Savepoints
from midstream_lab.scenarios.changed_programs import changed
from midstream_lab.scenarios.scenario import Scenario
from midstream_lab.scenarios.time_bounds import bound_s, held_us_max, outdated_us_max, patience_s
from midstream_lab.slot_ledger_sink import Calls, RowLedgerSink, SlotLedgerSink, SomeOnSlots
from midstream_lab.stuck_report import who_waits

if TYPE_CHECKING:
    from midstream_lab.real_targets import Targets

JOB: Final = "simulated"
STILL_STEPS: Final = 4_000
STILL_MAX: Final = 10
"""A run hangs if it makes no progress for `STILL_MAX` times `STILL_STEPS` steps."""
CIRCLES_MAX: Final = 20
"""The same limit for a run in which checkpoints still complete: it goes round in circles."""
SAME_FAILURES: Final = 3
"""The job fails after this many equal failures in a row; then the restarter starts it again."""
NEVER: Final = 1 << 62
"""A step that no run reaches."""
FORKED: Final = 0.4
"""The share of runs with savepoints that end with a fork from one of them."""


@dataclass(slots=True)
class Outcome:
    """The result of a run. `failures` is empty if no rule was broken."""

    scenario: Scenario
    failures: list[str] = field(default_factory=list)
    is_stuck: bool = False
    is_long: bool = False
    """Whether the run still made progress when its steps were used up; no rule was broken until then."""
    hash: int = 0
    steps: int = 0
    seconds: float = 0.0
    """The duration in the world's time."""
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    checkpoints: int = 0
    finished_in_checkpoint: int = 0
    in_flight_in_checkpoint: int = 0
    checkpoints_during_recovery: int = 0
    recovering_restores: int = 0
    """The number of restores from checkpoints that were taken during recovery."""
    recovering_rescaled_restores: int = 0
    """The number of these restores at another parallelism."""
    recovering_failures: int = 0
    """The number of attempts that failed while rows were being recovered."""
    launches: int = 0
    attempts: int = 0
    rescaled_restores: int = 0
    rescales: int = 0
    """The number of rescales while the job ran, at the request of clients."""
    scalings: int = 0
    """The number of times that the job has changed its parallelism by itself."""
    savepoints: int = 0
    """The number of savepoints that were reported to clients."""
    savepoints_failed: int = 0
    """The number of requests for savepoints that were refused, with a reason."""
    savepoints_restored: int = 0
    changed: int = 0
    """The number of starts with another program than the one that made the checkpoint."""
    contradicted: int = 0
    """The number of starts that were refused because the program could not continue from the checkpoint."""
    rewinds: int = 0
    """The number of starts from older checkpoints than the newest, or from the beginning again."""
    faults: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None

    @property
    def why_not_passed(self) -> list[str]:
        """The failures of the run; if there are none, but its steps were used up, a text that says so.

        This is for callers that set a bound on the steps.
        """
        return self.failures or [f"the run is not over after {self.steps} steps"] * self.is_long


def run(scenario: Scenario, *, keep_trace: bool = False, make_coordinator: MakeCoordinator | None = None) -> Outcome:
    """Run a scenario. The outcome is a pure function of the scenario and the code."""
    prepared = Run(scenario, keep_trace, make_coordinator or Coordinator)
    sizes = chunk_sizes_of(
        scenario.seed,
        small=scenario.small_chunks,
        combined_rows_min=scenario.combined_rows_min,
        on_disk=prepared.is_on_disk,
        sink_pause_s=scenario.sink_pause_s,
    )
    with ExitStack() as stack:
        stack.enter_context(sizes)
        for module, name, value in quick_changes(scenario.seed) if prepared.is_scaling else ():
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(watermarks_are_checked(prepared.world, outdated_us_max(scenario)))
        if scenario.drift_us is not None:
            drift = DriftChecker(prepared.world, scenario.drift_us, held_us_max(scenario))
            stack.enter_context(drift_is_checked(drift))
        if keep_trace:
            stack.enter_context(following_elements(prepared.world.note))
        return prepared.go()


class Run:
    """The parts of one run; implements `faults.LabTarget`."""

    def __init__(self, scenario: Scenario, keep_trace: bool, make_coordinator: MakeCoordinator) -> None:
        self.scenario = scenario
        self.outcome = Outcome(scenario)
        self.world = World(scenario.seed, scenario.tempo, keep_trace=keep_trace)
        self.outside = Outside(self.world)
        self.outside.row_us = scenario.row_us
        self._disks: dict[str, FaultyDisk] = {}
        self._on_disk: dict[str, DirectoryChecker] = {}
        """The rules for each checkpoint directory, by its root."""
        self.sources: Mapping[str, SimSource] = self._make_sources(scenario.shape)
        self.has_checkpoints = scenario.has_checkpoints
        self.calls = Calls(self.outside, scenario.has_checkpoints)
        pace = scenario.sink_rows, scenario.sink_pause_s
        on_slots = SlotLedgerSink(self.outside, self.calls, scenario.seed, *pace)
        self._sink = SomeOnSlots(self.outside, on_slots, scenario.seed, scenario.on_slots)
        self.targets = _targets_of(scenario, self.outside)
        self._starts: dict[str, RealSinks] = {}
        """The sinks of each start with real targets, by job id."""
        externals: dict[str, object] = {"outside": self.outside, "sink": self._sink, "sink on slots": on_slots}
        externals.update({f"source {uid}": source for uid, source in self.sources.items()})
        network = Network(
            self.world, wire_bytes_max=scenario.wire_bytes, pull_bytes_max=max(4096, scenario.wire_bytes // 4)
        )
        disk = self._new_directory(ROOT)
        is_aligned = scenario.aligned_timeout_s is None
        self._checker = CheckpointChecker(
            scenario.shape, self.sources, self.outside, disk, scenario.key_groups, is_aligned
        )
        self.savepoints = Savepoints(self.world, self._checker, self._disks)
        self.cluster = SimulatedCluster(self.world, self.savepoints.open, network, make_coordinator, externals)
        self.calls.watch(self.cluster)
        self.restarter = Restarter(
            scenario, self.world, self.cluster, self._checker, self.savepoints, disk, self._new_directory, self._plan
        )
        self.recoveries = Recoveries()
        self.polls = 0
        self.cluster.answered = self.savepoints.answered
        self.is_on_disk = scenario.on_disk or spills(scenario.seed)
        if self.is_on_disk:
            self.cluster.open_local_disk = partial(SimLocalDisk, self.world)
        self.is_scaling = scenario.has_checkpoints and (scenario.is_scaling or scales(scenario.seed))
        self.cluster.deployed = self._deployed
        self.cluster.failed = self.recoveries.failed
        self.cluster.observe = self._checked
        self._checker.reported_late = self.cluster.reported_late
        self.outside.finished = self.cluster.finished
        self.outside.drained = self.cluster.drained
        self._still = 0
        self._is_held_up = False
        self._last_progress: object = None
        self._made_nothing = 0
        self._last_made: object = None
        self._next_check = STILL_STEPS
        self._faults_left = list(scenario.faults)
        self._next_fault = self._faults_left[0].step if self._faults_left else NEVER

    def _checked(self, driver: SimulatedDriver) -> DriverChecker:
        return DriverChecker(driver, patience_s(self.scenario), bound_s(self.scenario), self._is_denied)

    def _is_denied(self, directory: str) -> bool:
        """Whether a file in this directory may rightly be reported as existing.

        A driver considered dead may have created it after its successor had checked, or the disk may have lied.
        """
        return len(self.cluster.drivers) > 1 or any(directory in disk.denied for disk in self._disks.values())

    def _new_directory(self, root: str) -> FaultyDisk:
        """Return a new, empty checkpoint directory."""
        disk = self._disks[root] = FaultyDisk(self.world)
        disk.on_write = partial(self._on_write, root)
        self._on_disk[root] = DirectoryChecker(self.world, disk)
        return disk

    def _make_sources(self, shape: Shape) -> dict[str, SimSource]:
        s = self.scenario
        sources = {}
        for index, node in enumerate(shape):
            if node.chain[0] == "source":
                rows = max(1, int(s.rows * node.rows_share))
                splits = [rows // s.splits + (i < rows % s.splits) for i in range(s.splits)]
                kind = NotifiedSource if Random(f"told {s.seed} {index}").random() < 0.2 else SimSource
                in_parts = Random(f"parts {s.seed} {index}").random() < 0.3 and not s.is_watched
                is_timed, idle = "idle" in node.chain, Random(f"idle {s.seed} {index}")
                endless = "lulls" if is_timed and s.blocking else ""
                kinds = ("bounded", "splits", endless, endless) if is_timed else ("bounded", "bounded", endless)
                ends = idle.choice(kinds)
                if is_timed and s.has_lulls:
                    ends = "many lulls"
                if is_timed and s.is_watched:
                    ends = "splits"
                if is_timed and idle.random() < 0.3 and len(splits) > 1:
                    splits[-1] += splits[0]
                    splits[0] = 0
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
                    ends=ends,
                    has_chaff="sieve" in node.chain,
                    is_found_late=is_timed and (idle.random() < 0.3 or s.is_watched),
                    knows_times=Random(f"times {s.seed} {index}").random() < 0.4,
                )
        return sources

    # ---- driving

    def go(self) -> Outcome:
        with self.targets.used(self.scenario.seed) if self.targets is not None else nullcontext():
            return self._go()

    def _go(self) -> Outcome:
        world, scenario, outcome = self.world, self.scenario, self.outcome
        self.restarter.launch(scenario.shape, StartedJob())
        if self._continue("the job"):
            self._wind_up()
            self._fork()
        outcome.failures = world.bugs
        outcome.hash = world.hash
        outcome.steps = world.step_number
        outcome.seconds = world.now_us / 1e6
        outcome.checkpoints = self._checker.checkpoints
        outcome.finished_in_checkpoint = self._checker.finished_in_checkpoint
        outcome.in_flight_in_checkpoint = self._checker.in_flight
        outcome.rows = sum(sum(source.rows) for source in self.sources.values())
        outcome.lost, outcome.doubled = self._checker.lost, self._checker.doubled
        outcome.scalings = sum(checker_of(driver).scalings for driver in self.cluster.drivers)
        outcome.rescales = sum(checker_of(driver).rescales for driver in self.cluster.drivers)
        outcome.savepoints, outcome.savepoints_failed = self.savepoints.made, self.savepoints.failed
        outcome.checkpoints_during_recovery = self.recoveries.checkpoints
        outcome.recovering_restores = self.recoveries.restores
        outcome.recovering_rescaled_restores = self.recoveries.rescaled_restores
        outcome.recovering_failures = self.recoveries.failures
        outcome.launches, outcome.rescaled_restores = self.restarter.launches, self.restarter.rescaled
        outcome.savepoints_restored = self.restarter.savepoints_restored
        outcome.rewinds = self.restarter.rewinds
        outcome.changed, outcome.contradicted = self.restarter.changed, self.restarter.contradicted
        outcome.trace = world.trace
        return outcome

    def _continue(self, what: str) -> bool:
        """Run until the job is over; return False if that does not happen."""
        world = self.world
        last_step = world.step_number + self.scenario.steps_max
        world.run(self._poll, last_step)
        if world.bugs or self.restarter.is_over:
            return not world.bugs
        if self._is_stuck and self._is_held_up:
            self.outcome.is_long = True  # a task may be waiting for no more than I/O that cannot end yet
        elif self._is_stuck or world.step_number < last_step:  # or no step is scheduled
            self.outcome.is_stuck = True
            world.bug(f"{what} is stuck\n" + "\n".join(who_waits(self.cluster, self.driver)))
        else:
            self.outcome.is_long = True
        return False

    def _rescaled(
        self, job_id: str, root: str, shape: Shape, version: int, start: StartedJob, parallelism: int
    ) -> JobPlan:
        """Return the plan of the same job at another parallelism. Some plans cannot run: their pool is too small."""
        self.world.io_point()
        random = Random(f"rescale {self.scenario.seed} {parallelism}")
        shape = with_parallelism(shape, parallelism, random, same=random.random() < 0.5)
        then = self._plan(job_id, root, shape, version, start)
        if random.random() < 0.1 and self.driver.state == "running":  # what has no slots cannot return to a plan before
            too_small = msgspec.structs.replace(then.config, pool_bytes=2 * then.config.buffer_bytes)
            return replace(then, config=too_small)
        return then

    def _plan(self, job_id: str, root: str, shape: Shape, version: int, start: StartedJob) -> JobPlan:
        s = self.scenario
        sink = self._sinks_of(job_id)
        original = job_graph(shape, self.outside, list(self.sources.values()), sink, s.key_groups, s.drift_us)
        graph = changed(original, shape, self.outside, s.seed, version, generators=s.new_generators)
        buffers = least_buffers(graph) // 2 if s.is_scant else least_buffers(graph) + s.pool_buffers
        config = JobConfig(
            name=JOB,
            parallelism=graph.slots,
            autoscale=bounds_of(s.seed, s.key_groups) if self.is_scaling else None,
            max_parallelism=s.key_groups,
            checkpoint_dir=root if s.has_checkpoints else None,
            checkpoint_interval_s=s.interval_s if s.has_checkpoints else None,
            checkpoint_timeout_s=s.timeout_s,
            aligned_timeout_s=s.aligned_timeout_s,
            queue_time_s=s.queue_time_s,
            min_pause_s=s.min_pause_s,
            tolerable_failures=s.tolerable_failures,
            retained_checkpoints=s.retained,
            inline_bytes=s.inline_bytes,
            restart=RestartStrategy(
                kind="exponential",
                attempts=0,
                delay_s=s.restart_delay_s,
                max_delay_s=10 * s.restart_delay_s,
                same_failures=SAME_FAILURES if s.has_checkpoints else 0,
            ),
            buffer_bytes=s.buffer_bytes,
            pool_bytes=s.buffer_bytes * buffers,
            batch_rows=s.batch_rows,
            state_memory=Random(f"state memory {s.seed}").choice((1, 500, 5000)) if self.is_on_disk else "auto",
            slot_timeout_s=30.0,
            heartbeat_timeout_s=s.heartbeat_timeout_s,
        ).check()
        return JobPlan(
            job_id,
            graph,
            self.cluster.pickle(graph),
            config,
            start.restore,
            newer_output=start.newer_output,
            fresh=start.fresh,
            resume=start.resume,
            rescaled=partial(self._rescaled, job_id, root, shape, version, start),
        )

    def _sinks_of(self, job_id: str) -> RowLedgerSink:
        """Return the sinks of a start, which are the same at any parallelism."""
        if self.targets is None:
            return self._sink
        if job_id not in self._starts:
            sink = self._sink
            launch = len(self._starts) + 1
            self._starts[job_id] = RealSinks(self.outside, self.targets, launch, sink.capacity_rows, sink.pause_s)
        return self._starts[job_id]

    def _poll(self) -> bool:
        """Let faults strike and the restarter act when due, and return whether the run is over."""
        step = self.world.step_number
        while step >= self._next_fault:
            fault = self._faults_left.pop(0)
            self._next_fault = self._faults_left[0].step if self._faults_left else NEVER
            if strike(self, fault):
                self.outcome.faults[fault.kind] += 1
        restarter = self.restarter
        if not restarter.launch_is_due and (restarter.driver.is_over or restarter.is_given_up):
            self._after_end()
        if step >= self._next_check:
            self._next_check += STILL_STEPS
            if self.driver.process.alive and not self.driver.process.paused and self.driver.outcome is None:
                checker_of(self.driver).check()
            self._check_progress()
        return restarter.is_over or (self._still > 0 and self._is_stuck)

    def give_up_driver(self) -> None:
        self.restarter.is_given_up = True

    def rewind(self, victim: int) -> None:
        self.restarter.rewind(victim)

    @property
    def driver(self) -> SimulatedDriver:
        return self.restarter.driver

    @property
    def disk(self) -> FaultyDisk:
        return self.restarter.disk

    @property
    def in_flight_checkpoints(self) -> int:
        return self.recoveries.in_flight

    @property
    def _is_stuck(self) -> bool:
        return self._still >= (STILL_MAX if self._made_nothing >= STILL_MAX else CIRCLES_MAX)

    def _check_progress(self) -> None:
        """Check for progress: of rows, ending tasks, attempts and faults, and separately of checkpoints."""
        moved, ending = 0, 0
        attempts = []
        for slot in self.cluster.live_slots:
            if slot.machine is not None:
                attempts.append(slot.machine.attempt)
                for task in slot.machine.tasks.values():
                    moved += task.input.rows_in + sum(partition.bytes_out for partition in task.partitions)
                    ending += task.is_finishing or task.state is TaskState.FINISHED
        progress = (
            moved,
            ending,
            attempts,
            len(self.outside.committed),
            len(self.cluster.drivers),
            len(self._faults_left),
            self.polls,  # a fault that waits to strike takes steps in which the job need not make progress
        )
        # a slot that is stopped, or in a long call, continues by itself, and all others may wait for it
        is_awaited = any(slot.process.paused for slot in self.cluster.live_slots)
        self._still = self._still + 1 if progress == self._last_progress and not is_awaited else 0
        self._is_held_up = self.world.is_held_up
        self._last_progress = progress
        made = self._checker.checkpoints, self.savepoints.made, self.savepoints.failed
        self._made_nothing = self._made_nothing + 1 if made == self._last_made else 0
        self._last_made = made

    def _after_end(self) -> None:
        ended = None if self.restarter.is_given_up else self.driver.outcome
        if ended is None or ended.state == "failed" or self.driver.is_cancelled:
            self.recoveries.failed(self.driver)
        self._complain(self.restarter.after_end(ended))

    def _fork(self, share: float = FORKED) -> None:
        """Start another job from one of the savepoints after the end of this one, in its own directory."""
        world, random = self.world, Random(f"fork {self.scenario.seed}")
        if world.bugs or not self.savepoints.saved or random.random() > share or self.targets is not None:
            return  # what a real target shows cannot be set back to the savepoint
        saved = random.choice(self.savepoints.saved)
        world.note(("fork of", saved.url))
        self._still = 0
        self.restarter.fork(saved)
        if self._continue("the fork of the job"):
            self._wind_up()

    def _wind_up(self) -> None:
        """Judge the output, and check that all processes end and nothing is left over."""
        world = self.world
        self._complain(self._checker.check_end())
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
                world.bug(f"{driver.process.name}, a zombie, continues after the end of the job")
        self._complain(self._checker.check_end())
        for target in self.outside.targets.values():
            target.inspect()
        self._complain(self.savepoints.check_end())
        self._complain(self._checker.lineage.check_end())
        self._complain(self._on_disk[self.restarter.root].check_settled(self.cluster.drivers, self.scenario.retained))

    def _on_write(self, root: str, path: str, data: bytes) -> None:
        if not path.endswith("/_metadata"):
            return
        if not is_metadata_path(path):
            self.savepoints.written(root, path, data)
        elif root == self.restarter.root:
            metadata = decode_metadata(data, path)
            self.recoveries.completed(root, metadata, self.cluster.live_slots)
            self._complain(self.restarter.written(metadata))

    def _deployed(self, driver: SimulatedDriver, deploy: Deploy) -> None:
        restored_from = driver.coordinator.restored_from
        self.recoveries.deployed(driver, deploy, restored_from)
        self._complain(self.restarter.deployed(driver, deploy))
        self.calls.deployed(driver, self.restarter.completed(restored_from))

    def _complain(self, complaints: Iterable[str]) -> None:
        for complaint in complaints:
            self.world.bug(complaint)


def _targets_of(scenario: Scenario, outside: Outside) -> Targets | None:
    """Return the real targets of a run, if it has any: their libraries are optional."""
    if not scenario.target:
        return None
    from midstream_lab.real_targets import Targets

    return Targets(outside, scenario.target)
