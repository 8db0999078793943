"""Runs that go back to older checkpoints and savepoints or start over, and drivers that wake up behind others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from effort import known, some
from midstream.engine.checkpoint import savepoint, store
from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.engine.checkpoint.state_files import StateFile
from midstream.engine.checkpoint.store import begin, next_checkpoint_id, record_start, split_retained, take_over
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator, cleanup
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.metadata_builder import build_metadata
from midstream.engine.coordinator.events import JobEnded, JobPlan
from midstream.engine.coordinator.requests import savepoints
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import DoStop
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.faults import Fault
from midstream_lab.checkers.directory_checker import TRIES
from midstream_lab.fault_kinds import HANGS
from midstream_lab.faulty_disk import FaultyDisk
from midstream_lab.mutations.catalog import MUTATIONS
from midstream_lab.mutations.mutation_score import applied
from midstream_lab.restarter import LAST_STARTED, Restarter
from midstream_lab.run import Run, run
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import (
    back_to_the_deleted,
    cancelled_and_frozen,
    frozen,
    going_back_and_forth,
)

pytestmark = pytest.mark.turns(3)

RUNS_MAX = 200


class _Followed(Run):
    """It counts in what ways its job was started."""

    starts: Counter[str] = Counter()

    def _plan(self, *given: object) -> JobPlan:
        plan = super()._plan(*given)  # type: ignore[arg-type]
        by_name = plan.restore is not None and plan.restore != "latest"
        self.starts["fresh" if plan.fresh else str(plan.newer_output) if by_name else "as usual"] += 1
        return plan


def test_a_job_goes_back_and_what_it_puts_out_is_exact_or_what_was_asked_for() -> None:
    rewinds = 0
    _Followed.starts.clear()
    for seed in range(12):
        outcome = _Followed(going_back_and_forth(seed), False, Coordinator).go()
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        rewinds += outcome.rewinds
    assert rewinds > 12
    assert all(_Followed.starts[way] > 0 for way in ("rollback", "keep", "None", "fresh")), _Followed.starts


def test_a_job_that_goes_back_and_is_stopped_before_its_tasks_are_deployed_has_what_it_has_gone_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands for that, although newer checkpoints are complete, and whether or not any output is newer."""
    stopped: list[SimulatedDriver] = []
    launch = Restarter.launch

    def launch_and_stop(self: Restarter, *given: Any) -> None:
        launch(self, *given)
        goes_back = self.driver.plan.fresh or self.driver.plan.restore not in (None, "latest")
        if goes_back and self.launches % 2 == 0:  # a start over is repeated when it was stopped
            self.driver.request(DoStop())
            stopped.append(self.driver)

    monkeypatch.setattr(Restarter, "launch", launch_and_stop)
    for seed in range(1, 13):
        outcome = run(going_back_and_forth(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    early = [driver for driver in stopped if (driver.plan.job_id, 0) not in driver.cluster.finished]  # not deployed
    ways = Counter(
        "fresh" if driver.plan.fresh else driver.plan.newer_output
        for driver in early
        if driver.outcome is not None and driver.outcome.state == "stopped"
    )
    assert all(ways[way] > 0 for way in ("rollback", "keep", None, "fresh")), ways


def test_a_start_that_went_back_and_completed_nothing_is_begun_again_and_nothing_else_goes_on_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it kept newer output, took it back, or there was none."""
    resumed: Counter[str] = Counter()
    refused: list[str] = []
    begins, after_end = Restarter.begins, Restarter.after_end

    def count(self: Restarter, driver: SimulatedDriver) -> Iterator[str]:
        begun = self._begun(driver.plan.job_id) if driver.plan.resume and driver is self.driver else None
        if begun is not None and not self._checker.lineage.has_begun(driver.plan.job_id):
            resumed["fresh" if begun.fresh else str(begun.newer_output)] += 1
        yield from begins(self, driver)

    def note(self: Restarter, ended: JobEnded | None) -> Iterator[str]:
        refused.extend([str(ended.error)] if ended is not None and LAST_STARTED in str(ended.error) else [])
        yield from after_end(self, ended)

    monkeypatch.setattr(Restarter, "begins", count)
    monkeypatch.setattr(Restarter, "after_end", note)
    for seed in known((111, 113, 119, 126), range(100, 140)):
        outcome = run(going_back_and_forth(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert all(resumed[way] > 0 for way in ("rollback", "keep", "None", "fresh")), resumed
    assert refused, "no start from the newest checkpoint had to say which of the two it meant"


@pytest.mark.parametrize("topology", ["window", "totals", "tables", "random"])
def test_state_of_every_kind_is_that_of_the_checkpoint_that_is_gone_back_to(topology: str) -> None:
    rewinds = 0
    for seed in some(range(6)):
        outcome = run(draw(seed, topology=topology, faults=("go_back", "savepoint", "kill_slot"), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        rewinds += outcome.rewinds
    assert rewinds > 0


def test_a_driver_that_is_frozen_before_it_writes_metadata_disturbs_nobody_when_it_wakes_up() -> None:
    late = 0
    for seed in some(range(8)):
        outcome = run(frozen(seed), keep_trace=True)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.trace is not None
        order = list(outcome.trace.lines(r"Deploy job_id=job2|driver0 .*note +wrote chk-\d+/_metadata"))
        late += any("Deploy" in line for line in order) and "wrote" in order[-1]
    assert late > 0, "none wrote behind the next one"


def test_an_id_that_a_frozen_driver_has_claimed_is_not_used_by_the_third_one() -> None:
    """It would overwrite that one's checkpoint when it wakes up."""
    for seed in some(range(20, 30)):
        outcome = run(draw(seed, topology="keyed", faults=("go_back", "freeze_at_publish", "kill_slot"), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"


def test_files_that_are_said_not_to_be_written_are_not_left_behind() -> None:
    lied = 0
    for seed in some(range(8)):
        drawn = draw(seed, topology="keyed", faults=(), rows=100)
        faults = tuple(Fault(60 + 40 * i, "storage_lies", seed + i) for i in range(4))
        outcome = run(replace(drawn, faults=faults))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        lied += outcome.faults["storage_lies"]
    assert lied > 0


def _lied_to_at_the_end(lies: int) -> Iterator[tuple[Run, list[str]]]:
    """Run a job whose storage lies about the last deletions, each time from another step on: yield runs and failures.

    `lies`: how many operations in a row are reported as failed.
    """
    drawn = replace(draw(6, topology="keyed", faults=(), rows=40), retained=1, inline_bytes=0)
    steps = run(drawn).steps
    for before in range(1, 50):
        fault = Fault(steps - before, "storage_lies", 1 + 3 * (lies - 1))
        lied_to = Run(replace(drawn, faults=(fault,)), False, Coordinator)
        yield lied_to, lied_to.go().failures


def _unreferenced(disk: FaultyDisk) -> set[str]:
    metadata = [decode_metadata(data, path) for path, data in disk.files.items() if path.endswith("/_metadata")]
    return {path for path in disk.files if StateFile.parse(path)}.difference(*(found.files for found in metadata))


def test_what_the_last_coordinator_cannot_delete_however_often_it_tries_is_deleted_by_the_next_one() -> None:
    left = 0
    for lied_to, failures in _lied_to_at_the_end(TRIES):
        assert not failures, failures[0]
        disk = lied_to.disk
        if _unreferenced(disk):
            left += 1
            with lied_to.world.inspecting():
                job = lied_to.driver.plan.config.name
                taken = take_over(disk, "sim://checkpoints", job, "next")
                taken = record_start(disk, taken, first=next_checkpoint_id(disk, 0), fresh=False)
                begin(disk, taken, None, 0, ())
            assert not _unreferenced(disk)
    assert left > 0


def test_what_can_be_deleted_at_the_last_try_is_not_left() -> None:
    assert all(not failures and not _unreferenced(lied_to.disk) for lied_to, failures in _lied_to_at_the_end(TRIES - 1))
    with applied(MUTATIONS["deleted_later"]):
        assert any("no checkpoint refers to" in "".join(failures) for _, failures in _lied_to_at_the_end(TRIES - 1))


def test_a_driver_that_wakes_up_between_two_commits_commits_nothing_of_a_line_that_was_left() -> None:
    outcome = run(draw(251_534_597))
    assert not outcome.failures, outcome.failures[0]


def test_a_job_goes_on_from_what_the_start_that_started_it_over_completes_before_the_next_start_takes_over() -> None:
    """Driver 1 starts the job over, is presumed dead, and wakes up before driver 2 is the leader."""
    drawn = random_scenario(110_123_539)
    assert drawn.rescaled is not None
    scenario = replace(
        drawn,
        shape=drawn.shape[:4],  # without what another kind of operator has added
        rescaled=tuple(replace(node, parallelism=4) for node in drawn.rescaled[:4]),
        tempo=replace(drawn.tempo, clock_tick_us=100, interleave=0.2),
        timeout_s=10.0,
        min_pause_s=0.0,
        sink_rows=1,
    )
    found = 0
    for seed in known((97,), range(85, 115)):
        outcome = run(replace(scenario, seed=seed), keep_trace=True)
        assert not outcome.failures, (seed, outcome.failures[0])
        assert outcome.trace is not None
        order = "".join(outcome.trace.lines(r"publish\(|created epochs/00000003|Deploy job_id=job3"))
        if re.search(r"driver1 +io +publish.*created epochs/00000003 .*Deploy job_id=job3", order):
            found += 1
    assert found


def test_a_start_may_name_a_checkpoint_that_the_leader_before_it_deletes_when_it_wakes_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Driver 0 is presumed dead while it deletes checkpoint 1, and driver 1 is to resume from that.

    It makes no mark before: with one the start would rarely choose that checkpoint.
    """

    def drop(storage: Storage, epoch: int, checkpoints: Iterable[int], files: Iterable[str]) -> None:
        store.check_epoch(storage, epoch)
        store._delete(storage, checkpoints, files)

    monkeypatch.setattr(cleanup, "drop", drop)
    outcome = run(back_to_the_deleted(20), keep_trace=True)
    assert not outcome.failures, outcome.failures[0]
    assert outcome.trace is not None
    order = "".join(outcome.trace.lines(r"driver1 +mail +SimulatedDriver|driver0 wakes up|deleted chk-1/|ended"))
    refused = r"job ended: failed checkpoint 1 is not in the checkpoint directory, which has: 2"
    assert re.search(rf"(?s)driver1 .*driver0 wakes up.*deleted chk-1/_metadata.*{refused}", order), order


def test_that_the_checkpoint_from_which_the_last_start_began_is_deleted_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [cancelled_and_frozen(seed) for seed in known((65, 74, 75, 82), range(60, 90))]
    assert not [failure for scenario in scenarios for failure in run(scenario).failures]

    def retain(self: Any, uncommitted: int | None, for_savepoint: int | None) -> None:
        keep = self._plan.config.retained_checkpoints
        if self.pending is None and self.newest is not None and len(self.retained) > keep:
            self.retained, dropped, files = split_retained(self.retained, keep, self._uncertain_files)
            self._cleanup.drop([each.checkpoint_id for each in dropped], files)

    monkeypatch.setattr(CheckpointCoordinator, "retain", retain)
    failures = {failure for scenario in scenarios for failure in run(scenario).failures}
    assert any("the job was last started from checkpoint " in failure for failure in failures)
    for failure in failures:
        assert re.match(
            r"the job failed: (the job was last started from )?checkpoint \d, which is not there|"
            r"the job failed: checkpoint \d is not in the checkpoint directory",
            failure,
        ), failure


@pytest.mark.parametrize("mutation", ["epoch_checked_before_the_mark", "marks_are_not_looked_at"])
def test_a_driver_that_wakes_up_while_it_deletes_a_checkpoint_takes_it_from_no_start_that_goes_back(
    mutation: str,
) -> None:
    """It is frozen before it marks a checkpoint, to which the next driver goes back, or right behind that."""
    scenario = back_to_the_deleted(0)
    outcome = run(scenario)
    assert not outcome.failures
    assert outcome.rewinds > 0
    with applied(MUTATIONS[mutation]):
        assert "there is no such file" in run(scenario).failures[0]


def test_a_driver_that_wakes_up_behind_others_completes_no_savepoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one to copy while its successor rolls back the output that the savepoint covers."""
    seeds = (110_123_266, 110_123_279)
    for seed in seeds:
        outcome = run(going_back_and_forth(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    for module in (savepoint, savepoints):
        monkeypatch.setattr(module, "check_epoch", lambda *_, **__: None)
    for seed in seeds:
        outcome = run(going_back_and_forth(seed))
        assert any("completed after a later start" in failure for failure in outcome.failures), outcome.failures


def _given_up(seed: int, topology: str) -> Scenario:
    """A checkpoint is written when it has been given up; while a call keeps newer ones from completing a slot dies."""
    drawn = draw(seed, topology=topology, parallelism=2, rows=100, faults=())
    random = Random(f"given up {seed}")
    step = 120 + seed % 100
    faults = (
        Fault(step, HANGS, 6 * random.randrange(1 << 20) + 2),  # for 300 ms at most, and nothing dies meanwhile
        Fault(step + 100, "long_call", random.randrange(1 << 20)),
        Fault(step + 200, "kill_slot", seed),
    )
    tempo = replace(drawn.tempo, mail_us=400, control_us=5000, data_us=200, io_us=100, clock_tick_us=0)
    return replace(
        drawn,
        tempo=tempo,
        timeout_s=0.2,
        interval_s=0.02,
        min_pause_s=0.002,
        aligned_timeout_s=0.0,
        sink_rows=1,
        sink_pause_s=0.01,
        faults=faults,
        row_us=1000,
        batch_rows=3,
    )


@pytest.mark.parametrize("topology", ["window", "timers"])
def test_a_restart_does_not_go_on_from_a_checkpoint_that_was_written_when_it_had_been_given_up(topology: str) -> None:
    restarted = 0
    for seed in range(8, 16):
        outcome = run(_given_up(seed, topology), keep_trace=True)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.trace is not None
        order = list(outcome.trace.lines(r"Deploy job_id=job1 attempt=1|_metadata"))
        late = next((index for index, line in enumerate(order) if "continues" in line), len(order))
        restarted += "attempt=1" in "".join(order[late + 2 : late + 3])
    assert restarted > 3, "none was restarted between the late checkpoint and the next one"


def test_what_had_finished_in_a_checkpoint_that_is_written_during_the_next_attempt_runs_in_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: dict[int, set[str]] = {}

    def noted(*given: Any, **more: Any) -> CheckpointMetadata:
        made = build_metadata(*given, **more)
        finished[made.checkpoint_id] = {each.uid for each in made.operators if each.finished}
        return made

    monkeypatch.setattr(checkpoint_coordinator, "build_metadata", noted)
    drawn = draw(28, topology="window", parallelism=2, rows=100, faults=())
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=100, clock_tick_us=0)
    scenario = replace(drawn, tempo=tempo, timeout_s=0.1, sink_rows=1, row_us=0)
    random = Random("given up")
    for _ in range(RUNS_MAX):
        # Its metadata hangs, a slot dies meanwhile, and it is written when all of that has been deployed again.
        victim = next(
            victim
            for victim in (6 * random.randrange(10_000_000) for _ in range(10_000))
            if victim // 5 % 300_000 > 270_000 and victim // 7 % 300_000 < 40_000
        )
        interval_s, pause_s = random.choice((0.02, 0.04, 0.08)), random.choice((0.002, 0.005, 0.01))
        drawn = replace(scenario, seed=random.randrange(1000), interval_s=interval_s, sink_pause_s=pause_s)
        finished.clear()
        outcome = run(replace(drawn, faults=(Fault(150, HANGS, victim),)), keep_trace=True)
        assert not outcome.failures, outcome.failures[0]
        assert outcome.trace is not None
        order = "".join(outcome.trace.lines(r"Deploy job_id=job1 attempt=1|_metadata"))
        is_late = re.search(
            r"chk-1/_metadata hangs.*attempt=1.*wrote chk-1/_metadata.*wrote chk-[2-9]/_metadata", order
        )
        if is_late and {"source0", "window2"} <= finished[1]:
            return
    pytest.fail(
        f"in none of {RUNS_MAX} runs is a checkpoint in which much had finished written during the next attempt"
    )


@pytest.mark.parametrize(("seed", "hangs", "stops"), [(119, 93, 245), (146, 54, 185), (154, 72, 324), (268, 101, 182)])
def test_a_job_that_stops_while_a_checkpoint_may_exist_leaves_its_output_to_the_next_start(
    seed: int, hangs: int, stops: int
) -> None:
    """The write of its metadata has timed out, no task has run since, and the write takes effect all the same."""
    random = Random(seed)
    random.randrange(130), random.randrange(340)
    which = 6 * random.randrange(1 << 18) + random.randrange(6)
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=100)
    faults = (Fault(hangs, "publish_hangs", which), Fault(stops, "stop", 0))
    outcome = run(replace(drawn, faults=faults, timeout_s=0.2, interval_s=0.02))
    assert not outcome.failures, outcome.failures[0]


def test_a_restart_that_forgets_a_complete_checkpoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CheckpointCoordinator._published

    def published(self: Any, *given: Any) -> None:
        before = self.newest
        original(self, *given)
        self.newest = before

    monkeypatch.setattr(CheckpointCoordinator, "_published", published)
    drawn = draw(0, topology="timers", parallelism=2, rows=100, faults=())
    outcome = run(replace(drawn, interval_s=0.01, sink_rows=1, sink_pause_s=0.01, faults=(Fault(500, "kill_slot", 0),)))
    found = next(failure for failure in outcome.failures if "of job1 resumes from" in failure)
    assert re.fullmatch(r"attempt 1 of job1 resumes from checkpoint 0, and \d+ is complete", found)
