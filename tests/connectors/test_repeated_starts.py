"""Starting over, and starts that went back and have completed nothing since: what the next start resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from going_back_world import ROOT, World, committed

from midstream.engine.coordinator.events import JobPlan, NewerOutput
from midstream.engine.coordinator.restore import open_directory as opening
from midstream.engine.coordinator.restore.open_directory import check_start, find_start, open_checkpoints
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput

pytestmark = pytest.mark.usefixtures("few_attempts")


# ---- starting over ----


def test_a_start_over_completed_checkpoints_is_refused_unless_it_is_meant(world: World) -> None:
    committed(world)
    with pytest.raises(ConfigError, match=r"has checkpoints of this job, the newest is 5: .*--from latest.*--fresh"):
        world.start(None)
    fresh = world.start(None, fresh=True)
    assert fresh.row == 0
    assert world.storage.checkpoints() == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"was started over since checkpoint 5.*--from 5.*--fresh"):
        world.start("latest")
    assert world.start("5").row == 10
    assert world.start(None, fresh=True).complete(1) == 6
    assert world.start("latest").row == 1


def test_a_start_over_that_completed_nothing_is_begun_again_by_a_start_that_resumes(world: World) -> None:
    committed(world)
    world.start(None, fresh=True)
    assert world.start("latest", resume=True).row == 0
    with pytest.raises(ConfigError, match="was started over since checkpoint 5"):
        world.start("latest")
    again = world.start("latest", resume=True)
    assert (again.row, again.complete(1)) == (0, 6)
    assert world.start("latest", resume=True).row == 1


def test_a_start_that_left_a_start_over_is_the_one_that_counts(world: World) -> None:
    committed(world, 2)
    world.start(None, fresh=True)
    world.start("2")  # both completed nothing
    assert world.start("latest", resume=True).row == 4
    world.start("latest").complete(1)
    assert world.rows() == list(range(5))


@pytest.mark.parametrize("says", ["rollback", "keep"])
def test_output_of_before_a_start_over_is_in_no_other_line(world: World, says: NewerOutput) -> None:
    world.start(None).complete(2, commit=False)
    world.start(None, fresh=True).complete(3, commit=False)
    world.start("1", says)  # commits what checkpoint 1 holds, and is killed
    assert world.start("latest").row == 2
    assert world.rows() == [0, 1]


# ---- gone back, and nothing completed since ----


@pytest.mark.parametrize("says", ["rollback", "keep"])
def test_of_two_lines_that_were_killed_before_they_committed_one_has_the_output(
    world: World, says: NewerOutput
) -> None:
    committed(world, 1).complete(2, commit=False)
    world.start("1", "keep").complete(3, commit=False)
    world.start("2", says)  # commits what checkpoint 2 holds, and is killed
    assert world.start("latest").row == 4
    assert world.rows() == list(range(4))


@pytest.mark.parametrize("says", [None, "rollback", "keep"])
def test_a_start_that_went_back_and_completed_nothing_is_begun_again_by_a_start_that_resumes(
    world: World, says: NewerOutput | None
) -> None:
    committed(world, 1).complete(2 if says else 0, commit=False)
    world.start("1", says)
    keep = " --newer-output keep" if says == "keep" else ""
    refused = f"last started from checkpoint 1, which is not the newest one.*: --from 1{keep} resumes from there, --from 2 resumes from"
    for _ in range(2):
        if says != "rollback":  # checkpoint 2 does not count any more
            with pytest.raises(ConfigError, match=refused):
                world.start("latest")
        again = world.start("latest", resume=True)
        assert again.row == 2
        assert any(
            "last started from checkpoint 1 and has completed none" in text for text in again.opened.opened.warnings
        )
    assert again.complete(3) == 3
    assert world.start("latest", resume=True).row == world.start("latest").row == 5
    assert world.rows() == list(range(5))


def test_a_start_that_went_back_keeps_newer_output_when_it_is_begun_again(world: World) -> None:
    committed(world, 2)
    world.start("1", "keep")
    with pytest.raises(ConfigError, match="--from 1 --newer-output keep resumes from there, --from 2 resumes from"):
        world.start("latest")
    for _ in range(2):
        again = world.start("latest", resume=True)
        assert "the rows after it will be duplicated" in " ".join(again.opened.opened.warnings)
    again.complete(2)
    assert world.rows() == [0, 1, 2, 2, 3, 3]
    assert world.start("latest", resume=True).row == 4


def test_a_commit_that_was_under_way_is_kept_when_the_start_that_kept_it_is_begun_again(world: World) -> None:
    late = committed(world, 1)
    late.complete(2, commit=False)
    world.start("1", "keep")
    late.commit()
    world.start("latest", resume=True).complete(1)
    assert world.rows() == [0, 1, 2, 2, 3]


def test_the_newest_checkpoint_is_gone_on_from_when_it_is_named_although_the_last_start_went_back(world: World) -> None:
    committed(world, 1).complete(2, commit=False)
    world.start("1", "keep")
    world.start("2")
    assert world.start("latest").row == world.start("latest", resume=True).row == 4
    assert world.rows() == list(range(4))


def test_a_start_that_took_no_effect_leaves_what_was_begun(world: World) -> None:
    committed(world, 1).complete(2, commit=False)
    world.start("1", "keep")
    with pytest.raises(StorageError, match="checkpoint 9 is not in the checkpoint directory"):
        world.start("9")
    world.fate.left = 1  # it takes its epoch
    with pytest.raises(StorageError, match="killed"):
        world.start("2")
    world.fate.left = None
    assert world.start("latest", resume=True).row == 2


def test_a_start_over_leaves_what_was_begun(world: World) -> None:
    committed(world, 1).complete(2, commit=False)
    world.start("1", "keep")
    world.start(None, fresh=True)
    with pytest.raises(ConfigError, match="started over since checkpoint 2"):
        world.start("latest")
    assert world.start("latest", resume=True).row == 0


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_savepoint_that_was_not_copied_completely_has_to_be_named_again(world: World, is_empty: bool) -> None:
    start = committed(world, 1)
    url = world.save(start)
    if is_empty:
        world.storage = type(world.storage)(world.fate)  # type: ignore[call-arg]  # it is a MortalStorage
    else:
        start.complete(0)
    before = len(world.storage.checkpoints())

    def opened(plan: JobPlan) -> None:
        with pytest.MonkeyPatch.context() as patch:

            def publish(*_: object) -> str:
                raise StorageError("killed")

            patch.setattr(opening, "publish", publish)
            open_checkpoints(plan, world.open)

    with pytest.raises(StorageError, match="killed"):
        opened(world.plan(url))
    assert len(world.storage.checkpoints()) == before
    ways = r"start from that again \(--from PATH\); " + ("--fresh starts over" if is_empty else "--from 2 resumes from")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"which is not there, and has completed none since.*{ways}"):
            world.start("latest", resume=resume)
    world.start(url, None if is_empty else "rollback").complete(1)
    assert world.start("latest", resume=True).row == 3
    assert world.rows() == list(range(3))


def test_a_start_that_resumes_is_refused_behind_what_is_committed_as_latest_is(world: World) -> None:
    committed(world)
    for checkpoint in world.storage.checkpoints():
        world.storage.delete(f"chk-{checkpoint}")
    with pytest.raises(ConfigError, match=r"there is no checkpoint to resume from, but there is output of this job"):
        world.start("latest", resume=True)


def test_what_contradicts_itself_is_refused(world: World) -> None:
    from midstream.engine.coordinator.restore.open_directory import check_plan

    with pytest.raises(ConfigError, match="cannot be combined"):
        check_plan(world.plan("latest", fresh=True))
    with pytest.raises(ConfigError, match="newer_output='keep'"):
        check_plan(world.plan(None, "keep"))


def test_the_beginning_is_said_at_once(world: World) -> None:
    plan = world.plan("latest")
    (warning,) = check_start(plan, find_start(plan, world.open), world.open)
    assert warning == f"no checkpoint has been completed in {ROOT} yet: starting from the beginning"


def test_what_is_newer_is_of_these_jobs_only(world: World) -> None:
    committed(world)
    sink = world.files["shared"]
    assert sink.newest_committed(CommittedOutput("shared", frozenset(["start1"]))) == 5
    assert sink.newest_committed(CommittedOutput("shared", frozenset(["foreign1"]))) == 900
    assert sink.newest_committed(CommittedOutput("shared", frozenset(["another-job"]))) == 0
    assert world.files["out"].newest_committed(CommittedOutput("out", frozenset(["another-job"]))) == 5, (
        "the directory is one job's"
    )


def test_what_the_chosen_checkpoint_still_has_to_commit_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, only="shared")
    committed(world, 2).complete(2, commit=False)
    world.start("2", "keep").complete(2)
    world.start("3", "rollback").complete(1)
    assert world.rows("shared") == [-1, *range(7)]
