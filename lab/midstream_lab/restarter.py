"""Restarts a job whenever the job has stopped, died, or failed because of a fault.

Mostly the job continues from its newest checkpoint, sometimes at another parallelism, from a savepoint, or in another
directory. If a fault demands it, the restarter rewinds to an older checkpoint or savepoint and decides what happens
to the output since then, or it starts the job over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.engine.checkpoint.store import is_metadata_path, is_superseded, jobs_of, list_checkpoints
from midstream.engine.coordinator.events import JobEnded, JobPlan, NewerOutput
from midstream.engine.protocol.messages import Deploy
from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
from midstream.simulation.network import SIM
from midstream.simulation.trace import Kind
from midstream.simulation.world import World
from midstream_lab.checkers.checkpoint_checker import CheckpointChecker, Cut
from midstream_lab.checkers.directory_checker import overtaken_where_none_may_be
from midstream_lab.checkers.lineage import After
from midstream_lab.faulty_disk import FaultyDisk
from midstream_lab.jobs.shapes import Shape
from midstream_lab.savepoints import Saved, Savepoints
from midstream_lab.scenarios.changed_programs import contradictions, ends_in_flight
from midstream_lab.scenarios.scenario import Scenario

ROOT: Final = "sim://checkpoints"
RESTART_DELAY_US: Final = 20_000
"""The time until a job is started again."""
LAUNCHES_MAX: Final = 50
IS_NEWER: Final = "is older than what has been committed"
STARTED_OVER: Final = "the job was started over since checkpoint"
LAST_STARTED: Final = "the job was last started from checkpoint"
NOT_THERE: Final = ("is not in the checkpoint directory", "is being deleted")


@dataclass(frozen=True, slots=True)
class StartedJob:
    """The options with which the job is started, named as on the command line."""

    restore: str | None = None
    newer_output: NewerOutput | None = None
    fresh: bool = False
    resume: bool = False
    copies: Cut | None = None
    """The cut of the savepoint from which the job is started; None if it is not started from one."""

    @property
    def named(self) -> int | None:
        """The id of the checkpoint of the job's own directory that the start names; None if it names none."""
        if self.restore is None or self.restore == "latest" or self.copies is not None:
            return None
        return int(self.restore.rpartition("chk-")[2])


LATEST: Final = StartedJob("latest")
RESUME: Final = StartedJob("latest", resume=True)
MakePlan = Callable[[str, str, Shape, int, StartedJob], JobPlan]
"""Returns the plan for a job id, a checkpoint directory, a shape, a version of the program, and a start."""


class Restarter:
    """Keeps one job running. `driver` is its current driver; `root` and `disk` are its checkpoint directory."""

    def __init__(
        self,
        scenario: Scenario,
        world: World,
        cluster: SimulatedCluster,
        checker: CheckpointChecker,
        savepoints: Savepoints,
        disk: FaultyDisk,
        new_directory: Callable[[str], FaultyDisk],
        make_plan: MakePlan,
    ) -> None:
        self.root = ROOT
        self.disk = disk
        self.driver: SimulatedDriver
        self.launches = 0
        self.rescaled = 0
        self.savepoints_restored = 0
        self.rewinds = 0
        """The number of starts from an older checkpoint than the newest, or from the beginning again."""
        self.changed = 0
        """The number of starts with another program than the one that made the checkpoint."""
        self.contradicted = 0
        """The number of starts that were refused because the program could not continue from the checkpoint."""
        self.is_over = False
        self.is_given_up = False
        self.launch_is_due = False
        self._scenario = scenario
        self._world = world
        self._cluster = cluster
        self._checker = checker
        self._savepoints = savepoints
        self._new_directory = new_directory
        self._make_plan = make_plan
        self._rewind_choice: int | None = None
        """Chooses how the next start rewinds, or starts the job over; None if it does neither."""
        self._start = StartedJob()
        self._starts: dict[str, StartedJob] = {}
        """Each start, by its job id."""
        self._begun_at_launch: StartedJob | None = None
        """See `_begun`, when the current driver was submitted."""
        self._origin: StartedJob | None = None
        """The start from the savepoint from which the job continues while its directory holds no checkpoint."""
        self._is_restored = True
        """Whether the savepoint of the current start, if any, has been copied into the job's directory."""
        self._completed: dict[str, CheckpointMetadata] = {}
        """The metadata of each completed checkpoint, by its path."""
        self._versions: dict[str, int] = {}
        """The version of each start's program, by job id."""

    # ---- starting

    def launch(self, shape: Shape, start: StartedJob, version: int = 0) -> None:
        self.launches += 1
        self.launch_is_due = self.is_given_up = False
        self._start = start
        self._is_restored = start.copies is None
        job_id = f"job{self.launches}"
        self._starts[job_id] = start
        self._begun_at_launch = self._begun(job_id)
        self._versions[job_id] = version
        self.driver = self._cluster.submit(self._make_plan(job_id, self.root, shape, version, start))

    def after_end(self, ended: JobEnded | None) -> Iterator[str]:
        """Start the job again if it has stopped, died or failed by a fault; it is over if it has finished. Yields
        complaints.
        """
        is_contradicted = False
        if ended is not None and ended.state == "failed" and not self._may_fail(str(ended.error)):
            is_contradicted = any(self._contradictions(self.driver))
            self.contradicted += is_contradicted
            if not is_contradicted:
                yield f"the job failed: {ended.error}"
                return
        if ended is not None and ended.state == "finished":
            yield from self.begins(self.driver)
            self.is_over = True
            return
        if ended is not None and ended.state == "stopped":
            has_opened = not self.driver.is_cancelled or self.driver.coordinator.restored_from is not None
            if has_opened:  # even if no task was deployed, it stands for the checkpoint that it resumes from
                yield from self.begins(self.driver)
            if not self.driver.is_cancelled:
                yield from self._checker.check_stopped(self.driver.uncertain)
        if self.launches >= LAUNCHES_MAX:
            yield f"the job was started {LAUNCHES_MAX} times"
            return
        shape = self._scenario.shape
        if self._scenario.rescaled is not None and self.launches % 2:
            shape = self._scenario.rescaled
            self.rescaled += 1
        self.launch_is_due = True
        if not self._scenario.has_checkpoints:
            start = StartedJob()
        elif is_contradicted:
            start = self._start
        else:
            is_refused = ended is not None and ended.state == "failed" and SIM not in str(ended.error)
            start = self._rewound_start(is_refused) or (yield from self._usual(ended))
        version = self._next_version(start, may_change=not is_contradicted)
        launch = partial(self.launch, shape, start, version)
        self._world.schedule(RESTART_DELAY_US, None, Kind.CLUSTER, launch, "the job is started again")

    def _may_fail(self, error: str) -> bool:
        """Whether the job may fail with this error: because of a fault; because its start rewound without a decision
        about newer output, or to a checkpoint that the leader before it has deleted meanwhile; or because it
        was to continue from the newest checkpoint, and the last start had begun elsewhere.
        """
        start = self._start
        if SIM in error or (any(text in error for text in NOT_THERE) and self._may_be_deleted(start)):
            return True
        if IS_NEWER in error and start.newer_output is None and start.restore not in (None, "latest"):
            return True
        if start.restore != "latest":
            return False
        begun = [found for found in (self._begun_at_launch, self._begun()) if found is not None]
        over = [found for found in begun if found.fresh]
        copied = [found for found in begun if found.copies is not None]
        back = [found for found in begun if found not in over and found not in copied]
        if start.resume:
            return bool(copied) and LAST_STARTED in error
        return (bool(over) and STARTED_OVER in error) or (bool(back or copied) and LAST_STARTED in error)

    def _may_be_deleted(self, start: StartedJob) -> bool:
        """Whether the checkpoint that a start names may have been deleted since the start was chosen.

        A driver that was considered dead leads the job until another one takes over, and deletes what it does not have
        to retain. The checkpoint from which the last start began is retained until that start has completed a newer one.
        """
        number, begun = start.named, self._begun()
        if number is None or (begun is not None and begun.named == number):
            return False
        with self._world.inspecting():
            listed = [entry.checkpoint_id for entry in list_checkpoints(self.disk)]
        return number not in listed and sum(there > number for there in listed) >= self._scenario.retained

    def _usual(self, ended: JobEnded | None) -> Generator[str, None, StartedJob]:
        """Yield complaints, and return the usual start: from the savepoint of a stop, or else from the newest
        checkpoint.
        """
        if ended is not None and ended.checkpoint is not None:
            for saved in self._savepoints.saved:
                if saved.url == ended.checkpoint:
                    yield from self._checker.check_stopped_with(saved.cut)
                    return self._continue_from(saved)
        if self._origin is not None and not any(is_metadata_path(path) for path in self.disk.files):
            return self._origin
        return LATEST

    # ---- other programs

    def _next_version(self, start: StartedJob, *, may_change: bool) -> int:
        """Return the program's version for the next start: sometimes another one, otherwise that of the checkpoint."""
        random = Random(f"version {self._scenario.seed} {self.launches}")
        if may_change and random.random() < self._scenario.changes:
            return random.choice((0, self.launches, self.launches))
        made_by = start.copies.job_id if start.copies is not None else None
        if made_by is None and start.restore is not None:
            begun = self._begun() if start.resume else None
            name = ((begun.restore if begun is not None else None) or start.restore).rpartition("chk-")[2]
            with self._world.inspecting():
                listed = [
                    entry for entry in list_checkpoints(self.disk) if name in ("latest", str(entry.checkpoint_id))
                ]
            made_by = listed[-1].metadata.job_id if listed and listed[-1].metadata is not None else None
        return self._versions.get(made_by or "", 0)

    def _contradictions(self, driver: SimulatedDriver) -> Iterator[str]:
        """Yield the reasons why the driver's program cannot continue from a checkpoint that its start may have meant."""
        graph = driver.plan.graph
        if self._start.copies is not None:
            yield from contradictions(self._start.copies.operators, frozenset(), graph)
        with self._world.inspecting():
            listed = [entry.metadata for entry in list_checkpoints(self.disk) if entry.metadata is not None]
        for metadata in listed:
            yield from contradictions(metadata.operators, ends_in_flight(metadata), graph)

    def _continue_from(self, saved: Saved) -> StartedJob:
        """Return a start from a savepoint, which may have been moved, in the same directory, or in another one after
        the first was deleted.
        """
        random = Random(f"go on {self._scenario.seed} {self.launches}")
        is_alone = all(driver.is_over for driver in self._cluster.drivers)  # a zombie would fail without its directory
        elsewhere = is_alone and random.random() < 0.4
        if random.random() < 0.4 or (elsewhere and saved.url.startswith(f"{self.root}/")):
            self._savepoints.move(saved)
        start = StartedJob(saved.url, copies=saved.cut)
        if elsewhere:
            self._savepoints.forget_below(self.root)
            self._begin_directory(start)
        elif random.random() < 0.2:
            return LATEST
        return start

    def _begin_directory(self, origin: StartedJob) -> None:
        self.root = f"{ROOT}-{self.launches}"
        self.disk = self._checker.storage = self._new_directory(self.root)
        self._origin = origin

    def fork(self, saved: Saved) -> None:
        """Start another job from a savepoint, in its own directory and with the output of the savepoint."""
        start = StartedJob(saved.url, copies=saved.cut)
        self._begin_directory(start)
        self._checker.begin_again(self.disk, saved.cut)
        self.is_over = False
        version = self._next_version(start, may_change=True)
        self.launch(self._scenario.rescaled or self._scenario.shape, start, version)

    # ---- rewinding

    def rewind(self, victim: int) -> None:
        """Rewind with the next start."""
        self._rewind_choice = victim

    def _rewound_start(self, is_refused: bool) -> StartedJob | None:
        """Return a start that rewinds, or starts over; None if the next start should do neither."""
        start, job_id = self._start, self.driver.plan.job_id
        begun = self._begun()
        is_over = begun is not None and begun.fresh
        random = Random(f"over {self._scenario.seed} {self.launches}")
        if is_refused and is_over:
            return StartedJob(fresh=True)
        if is_refused and start.restore == "latest":
            return self._named_start(begun, random)
        if is_refused:
            self._rewind_choice = 4 * self.launches  # the next start decides what happens to the newer output
        elif is_over and random.random() < 0.5:
            return random.choice((LATEST, RESUME))  # the first must be refused
        elif is_over or (start.fresh and not self._checker.lineage.has_begun(job_id)):
            return StartedJob(fresh=True)
        elif start.newer_output is not None and not self._checker.lineage.has_begun(job_id):
            # The driver may have been killed while it rolled output back.
            return (
                start if random.random() < 0.5 else random.choice((LATEST, RESUME, replace(start, newer_output=None)))
            )
        if begun is not None and begun.copies is None and not is_refused:
            if self._rewind_choice is None or random.random() < 0.5:
                return random.choice((LATEST, RESUME, RESUME))  # the first must be refused
        if self._rewind_choice is None:
            return None
        victim, self._rewind_choice = self._rewind_choice, None
        if victim % 4 == 3:
            return StartedJob(fresh=True)
        random = Random(f"back {self._scenario.seed} {self.launches} {victim}")
        there = self._older()
        if not there:
            return None
        restore, cut = random.choice(there)
        choices: tuple[NewerOutput | None, ...] = ("rollback", "rollback", "keep", None)
        return StartedJob(restore, random.choice(choices[:3] if is_refused else choices), copies=cut)

    def _named_start(self, begun: StartedJob | None, random: Random) -> StartedJob | None:
        """Return a start from a checkpoint by its name, after "latest" was refused: what the last one began with is newer."""
        with self._world.inspecting():
            named = [str(entry.checkpoint_id) for entry in list_checkpoints(self.disk)[-1:]]
        if begun is not None and begun.restore is not None and begun.copies is None:
            named.append(begun.restore)
        if named:
            return StartedJob(random.choice(named), random.choice(("rollback", "keep")))
        if begun is not None and begun.copies is not None:  # it died before it had copied the whole savepoint
            return replace(begun, newer_output=random.choice(("rollback", "keep")))
        return self._origin

    def _begun(self, until: str | None = None) -> StartedJob | None:
        """Return the last start that took effect, if it has completed no checkpoint and did not begin at the newest.

        `until`: see `_last`.
        """
        start, newest = self._last(until)
        if start is None or start.copies is not None:
            return start
        if start.fresh:
            return start if newest else None
        return None if start.restore is None or start.named == newest else start

    def _last(self, until: str | None = None) -> tuple[StartedJob | None, int]:
        """Return the last start that took effect, if it has completed no checkpoint, and the newest checkpoint.

        `until`: the job id of a start; only those before it count. A start that continued from the newest
        checkpoint, or as `RESUME` did, stands for the one before it.
        """
        with self._world.inspecting():
            jobs = jobs_of(self.disk)
            listed = [entry.metadata for entry in list_checkpoints(self.disk) if entry.metadata is not None]
        last = max((epoch for epoch, job_id in jobs.items() if job_id == until), default=max(jobs, default=0) + 1)
        listed = [metadata for metadata in listed if metadata.epoch < last]
        made_by, newest = (listed[-1].epoch, listed[-1].checkpoint_id) if listed else (0, 0)
        for epoch in sorted((epoch for epoch in jobs if made_by < epoch < last), reverse=True):
            start = self._starts[jobs[epoch]]
            if f"epochs/{epoch:08}.from" in self.disk.files and start.restore != "latest":
                return start, newest
        return None, newest

    def _older(self) -> list[tuple[str, Cut | None]]:
        """Return the older checkpoints and savepoints to which a start may rewind."""
        committed = self._checker.committed()
        with self._world.inspecting():
            listed = [
                entry.checkpoint_id
                for entry in list_checkpoints(self.disk)[:-1]
                if not self._scenario.target or committed >= _output_of(entry.metadata)
            ]  # sinks with pending files may have deleted those that no start needs: such a start is refused before it runs
        found: list[tuple[str, Cut | None]] = [
            (name.format(self.root, number), None)
            for number, name in zip(listed, ("{1}", "chk-{1}", "{0}/chk-{1}"), strict=False)
        ]
        for saved in self._savepoints.saved:
            if committed >= set(saved.cut.output) and not self._is_given_up(saved):  # otherwise it is refused
                found.append((saved.url, saved.cut))
        return found

    def _is_given_up(self, saved: Saved) -> bool:
        """Whether the job has rewound to before a savepoint, perhaps without output that had to be rolled back."""
        (data,) = (data for path, data in saved.files.items() if is_metadata_path(path))
        metadata = decode_metadata(data, saved.url)
        with self._world.inspecting():
            return jobs_of(self.disk).get(metadata.epoch) == metadata.job_id and is_superseded(self.disk, metadata)

    # ---- checkpoints and starts

    def written(self, metadata: CheckpointMetadata) -> list[str]:
        """Check a checkpoint whose metadata was written to the job's directory, and return complaints."""
        self._completed[f"{self.root}/chk-{metadata.checkpoint_id}"] = metadata
        is_copy = not self._is_restored and self._world.writer is self.driver.process
        if is_copy:
            self._is_restored = True
            self.savepoints_restored += 1
        complaints = self._checker.check_checkpoint(metadata, self._start.copies if is_copy else None)
        return complaints if is_copy else complaints + overtaken_where_none_may_be(metadata)

    def completed(self, path: str | None) -> CheckpointMetadata | None:
        """Return the metadata of the checkpoint at this path, if one was completed there."""
        return None if path is None else self._completed.get(path)

    def deployed(self, driver: SimulatedDriver, deploy: Deploy) -> Iterator[str]:
        if not self._checker.lineage.has_begun(deploy.job_id):
            yield from self.begins(driver)
        if not self._checker.has_begun(deploy.job_id, deploy.attempt):
            restored_from = driver.coordinator.restored_from
            restored = self.completed(restored_from)
            if restored_from is not None and restored is None:
                yield f"attempt {deploy.attempt} of {deploy.job_id} resumes from {restored_from}, which was never completed"
            yield from self._checker.attempt_begins(deploy.job_id, deploy.attempt, restored, driver.uncertain)

    def begins(self, driver: SimulatedDriver) -> Iterator[str]:
        """Record the checkpoint from which a start continues, and yield complaints."""
        plan = driver.plan
        if self._checker.lineage.has_begun(plan.job_id):
            return
        restored_from = driver.coordinator.restored_from
        cut = None
        if restored_from is not None:
            metadata = self._completed.get(restored_from)
            cut = None if metadata is None else self._checker.cut_of(metadata)
            if cut is None:
                yield f"{plan.job_id} resumes from {restored_from}, which was never completed, or is superseded"
                return
        if driver is not self.driver:
            self._checker.lineage.continues(plan.job_id, () if cut is None else cut.output)
            return
        yield from self._check_start(plan.job_id, restored_from)
        if cut is not None and self._versions[cut.job_id] != self._versions[plan.job_id]:
            self.changed += 1
            in_flight = ends_in_flight(self._completed[restored_from or ""])
            for contradiction in contradictions(cut.operators, in_flight, plan.graph):
                yield f"{plan.job_id} resumes from {restored_from} with a program that cannot: {contradiction}"
        self.rewinds += plan.fresh or plan.newer_output is not None
        last, _ = self._last(plan.job_id)
        start = last if last is not None and self._start.restore == "latest" else self._start
        stops_commits = last is not None and last.newer_output == "rollback" and start.newer_output is None
        after: After | None = "fresh" if start.fresh else "rollback" if stops_commits else start.newer_output
        yield from self._checker.continues(plan.job_id, cut, after)

    def _check_start(self, job_id: str, restored_from: str | None) -> Iterator[str]:
        """Yield complaints unless the job continues from the checkpoint that its start requested."""
        start = self._start
        if start.restore == "latest":
            begun = self._begun(job_id)
            if begun is not None and (not start.resume or begun.copies is not None):
                where = "at the beginning" if begun.fresh else f"from {begun.restore}"
                yield f"the job resumes from {restored_from}, and the last start, which has completed nothing, began {where}"
                return
            start = begun or start
        if start.fresh and restored_from is not None:
            yield f"the job should start over, and resumes from {restored_from}"
        if start.named is not None and restored_from != f"{self.root}/chk-{start.named}":
            yield f"the job should resume from {start.restore}, and resumes from {restored_from}"


def _output_of(metadata: CheckpointMetadata | None) -> set[str]:
    """Return the names of the output that a checkpoint has to commit."""
    return {item.decode() for entry in (() if metadata is None else metadata.committables) for item in entry.items}
