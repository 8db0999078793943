"""Going back to an older checkpoint: what is refused, kept and rolled back, also after a kill in the middle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from connector_worlds import SCHEMA, batch, open_writer, prepared
from going_back_world import Loud, Mute, Start, World, committed, graph_of, must_say

from in_memory import MemoryStorage
from midstream.connectors.files import file_sink
from midstream.connectors.files.file_sink import FileSink
from midstream.connectors.memory.collect_sink import CollectSink
from midstream.engine.checkpoint.metadata import encode_metadata
from midstream.engine.checkpoint.store import FencedError
from midstream.engine.coordinator.events import NewerOutput
from midstream.engine.coordinator.restore import open_directory as opening
from midstream.engine.coordinator.restore.open_directory import check_start, find_start, open_checkpoints
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput

pytestmark = pytest.mark.usefixtures("few_attempts")


# ---- refused ----


def test_an_older_checkpoint_is_refused_naming_the_sinks_and_the_ways_on(world: World) -> None:
    committed(world)
    before = dict(world.storage.files), world.rows(), world.rows("shared")
    plan = world.plan("3")
    with pytest.raises(ConfigError) as caught:
        check_start(plan, find_start(plan, world.open), world.open)
    for words in (
        "checkpoint 3 is older than what has been committed: sink 'out' up to checkpoint 5, sink 'shared' up to checkpoint 5",
        "produces the rows in between again",
        "--newer-output rollback",
        'newer_output="rollback"',
        "--newer-output keep",
        "--from latest",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="checkpoint 3 is older"):
        open_checkpoints(plan, world.open)
    assert (world.rows(), world.rows("shared")) == before[1:]
    assert {path for path in world.storage.files if not path.startswith("epochs/")} == {
        path for path in before[0] if not path.startswith("epochs/")
    }


def test_latest_is_refused_where_sinks_are_further_than_the_directory_that_was_brought_back(world: World) -> None:
    start = committed(world, 3)
    backup = dict(world.storage.files)
    start.complete(2)
    world.storage.files = backup
    for newer_output in (None, "rollback", "keep"):
        with pytest.raises(ConfigError, match=r"'out' up to checkpoint 4.*--from 3 --newer-output rollback"):
            world.start("latest", newer_output)
    world.start("3", "rollback").complete(1)
    assert world.rows() == list(range(7))
    assert world.start("latest").row == 7


def test_an_older_checkpoint_after_which_there_is_no_output_is_gone_on_from(world: World) -> None:
    start = committed(world, 3)
    start.complete(0)
    world.start("3").complete(2)
    assert world.rows() == list(range(8))


def test_output_that_may_be_in_a_commit_that_has_begun_is_newer_too(world: World) -> None:
    late = committed(world, 3)
    late.complete(2, commit=False)
    possibly = r"sink 'out' possibly \(a driver that was presumed dead may be committing it\) up to checkpoint 4"
    with pytest.raises(ConfigError, match=possibly):
        world.start("3")
    kept = world.start("3", "keep")
    assert re.search(possibly + " is kept", kept.opened.opened.warnings[0])
    again = world.start("3", "rollback")
    with pytest.raises(StorageError, match="it is missing"):
        late.commit()
    again.complete(2)
    assert world.rows() == list(range(8))


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("resume", [True, False])
def test_a_start_that_was_killed_before_sinks_took_back_is_made_good_by_the_next(
    world: World, names: bool, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has recorded that checkpoint 3 does not count, so the next one does not see what that holds."""
    late = committed(world, 2)
    late.complete(2, commit=False)

    def killed(*_: object) -> None:
        raise StorageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "roll_back", killed)
        with pytest.raises(StorageError, match="killed"):
            world.start("2", "rollback")
    assert world.storage.exists("chk-3/_metadata")
    again = world.start("2") if names else world.start("latest", resume=resume)
    with pytest.raises(StorageError, match="it is missing"):
        late.commit()
    again.complete(2)
    assert world.rows() == list(range(6))


def test_a_start_that_was_killed_while_sinks_took_back_does_not_decide_about_output_before_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(world, 3).complete(2, commit=False)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "roll_back", lambda *_: (_ for _ in ()).throw(StorageError("killed")))
        with pytest.raises(StorageError, match="killed"):
            world.start("3", "rollback")
    with pytest.raises(ConfigError, match=r"checkpoint 2 is older than what has been committed.*up to checkpoint 3"):
        world.start("2")
    assert world.rows() == list(range(6))


@pytest.mark.parametrize("fresh", [False, True])
def test_output_that_is_committed_only_when_its_checkpoint_is_named_is_in_no_other_line(
    world: World, fresh: bool
) -> None:
    """The start between them was killed before it committed anything, so nothing has to be said about its output."""
    start = committed(world, 1)
    start.complete(2, commit=False)
    says: NewerOutput | None = None if fresh else "keep"
    between = world.start(None, fresh=True) if fresh else world.start("1", says)
    assert between.complete(0 if fresh else 2, commit=False) == 3
    named = world.start("2", says)
    assert any(text.startswith("checkpoints after 2 no longer count") for text in named.opened.opened.warnings)
    with pytest.raises(StorageError, match="checkpoint 3 is not in the checkpoint directory"):
        world.start("3")
    world.start("2" if fresh else "latest").complete(1)
    assert world.rows() == list(range(5))


def test_output_of_which_a_part_is_committed_only_when_its_checkpoint_is_named_is_in_no_other_line(
    tmp_path: Path,
) -> None:
    """The sink reports that it has committed checkpoint 2; the driver was killed after one of its two files."""
    world = World(tmp_path, only="out")
    start = committed(world, 1)
    another = open_writer(world.files["out"], SCHEMA, start.loop, job_id=start.job_id, uid="out", subtask=1)
    another.write(batch(100))
    start.complete(1)
    assert start.newest is not None
    (held,) = start.newest.committables
    both = msgspec.structs.replace(held, items=(*held.items, *prepared(another, 2)))
    world.storage.files["chk-2/_metadata"] = encode_metadata(
        msgspec.structs.replace(start.newest, committables=(both,))
    )
    world.start("1", "keep").complete(0)
    world.start(None, fresh=True).complete(0)
    assert world.rows() == [0, 1, 2]
    named = world.start("2", "rollback")
    assert any(text.startswith("checkpoints after 2 no longer count") for text in named.opened.opened.warnings)
    assert world.rows() == [0, 1, 2, 100]
    for checkpoint in ("3", "4"):
        with pytest.raises(StorageError, match=f"checkpoint {checkpoint} is not in the checkpoint directory"):
            world.start(checkpoint, "rollback")


def test_output_that_is_committed_beside_newer_output_that_is_kept_is_in_no_other_line(tmp_path: Path) -> None:
    """The sink has committed output of another line since, which says nothing of what is pending."""
    world = World(tmp_path, only="shared")
    committed(world, 1).complete(2, commit=False)
    world.start(None, fresh=True).complete(1)  # checkpoint 3
    kept = world.start("2", "keep")
    assert kept.opened.opened.warnings[1].startswith("checkpoints after 2 no longer count: what checkpoint 2 holds")
    with pytest.raises(StorageError, match="checkpoint 3 is not in the checkpoint directory"):
        world.start("3", "rollback")
    for resume in (False, True):
        again = world.start("latest", resume=resume)
        assert again.row == 4, "it goes on as the start that has completed nothing, and nothing is asked for again"
    with pytest.raises(ConfigError, match="checkpoint 2 is older than what has been committed"):
        world.start("latest", "rollback")
    again.complete(1)
    assert world.rows("shared") == [-1, 0, 0, 1, 2, 3, 4]


def test_what_was_committed_after_output_was_kept_was_not_accepted(world: World) -> None:
    """The checkpoint directory is restored from a copy that was made before."""
    committed(world, 2)
    world.storage.delete("chk-2")
    kept = world.start("1", "keep")
    backup = dict(world.storage.files)
    kept.complete(1)
    world.storage.files = backup
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"checkpoint 1 is older.*'out' up to checkpoint 3"):
            world.start("latest", resume=resume)


@pytest.mark.parametrize("behind", ["itself", "the next start", "the one after a start that completed nothing"])
def test_newer_checkpoints_count_beside_kept_output_if_they_show_that_nothing_is_pending(
    world: World, behind: str
) -> None:
    start = committed(world, 2)
    if behind == "itself":
        start.complete(2)
    else:
        if behind != "the next start":
            world.start("latest")
        world.start("latest").complete(2)
    world.start(None, fresh=True).complete(1)
    kept = world.start("2", "keep")
    assert not [text for text in kept.opened.opened.warnings if "count" in text]
    assert world.start("4", "keep").row == 1


def test_a_newer_checkpoint_that_still_holds_what_is_pending_does_not_show_that_it_is_committed(tmp_path: Path) -> None:
    world = World(tmp_path, only="shared")
    start = committed(world, 1)
    start.complete(2, commit=False)
    held = start.newest
    start.complete(2, commit=False)
    assert held is not None and start.newest is not None
    both = msgspec.structs.replace(start.newest, committables=(*held.committables, *start.newest.committables))
    world.storage.files["chk-3/_metadata"] = encode_metadata(both)
    world.start(None, fresh=True).complete(1)
    assert any("no longer count" in text for text in world.start("2", "keep").opened.opened.warnings)


def test_a_checkpoint_directory_that_was_emptied_is_no_beginning(world: World) -> None:
    committed(world)
    for checkpoint_id in range(1, 6):
        world.storage.delete(f"chk-{checkpoint_id}")
    with pytest.raises(ConfigError, match=r"there is output of this job: sink 'out' up to checkpoint 5.*--fresh"):
        world.start("latest")


def test_a_savepoint_is_refused_where_more_is_committed_since(world: World) -> None:
    start = committed(world, 2)
    url = world.save(start)
    start.complete(2)
    with pytest.raises(
        ConfigError, match="checkpoint 2 is older than what has been committed: sink 'out' up to checkpoint 3"
    ):
        world.start(url)
    again = world.start(url, "rollback")
    assert again.row == 4
    again.complete(3)
    assert world.rows() == list(range(7))


def test_a_savepoint_in_a_new_directory_is_refused_where_more_is_committed_since(world: World) -> None:
    start = committed(world, 2)
    url = world.save(start)
    start.complete(2)
    world.storage = MemoryStorage()
    with pytest.raises(ConfigError, match="checkpoint 2 is older"):
        world.start(url)
    kept = world.start(url, "keep")
    kept.complete(1)
    assert world.start("latest").row == 5, "what was accepted once is not asked for again"
    assert Counter(world.rows()) == Counter([*range(6), 4])


def test_who_cannot_say_is_taken_to_have_committed_what_the_directory_has(tmp_path: Path) -> None:
    world = World(tmp_path, others={"mute": Mute()}, only="out")
    committed(world)
    with pytest.raises(
        ConfigError,
        match=r"sink 'mute' possibly \(it cannot determine this\) up to checkpoint 5.*'mute' cannot: it cannot roll back",
    ):
        world.start("3")
    with pytest.raises(ConfigError, match=r"sink 'mute' cannot roll back.*Nothing has been changed"):
        world.start("3", "rollback")
    assert world.rows() == list(range(10))
    world.start("3", "keep")


@pytest.mark.parametrize("says", [None, "rollback"])
def test_what_a_sink_shows_of_one_start_only_is_never_newer(tmp_path: Path, says: NewerOutput | None) -> None:
    world = World(tmp_path, only="out" if says else "none")
    world.files["collected"] = CollectSink()  # type: ignore[assignment]
    world.graph = graph_of({**world.files})
    committed(world)
    assert world.start("3", says).row == world.start("latest", resume=True).row == 6


def test_who_cannot_roll_back_and_had_nothing_newer_is_not_asked_to_when_that_is_repeated(tmp_path: Path) -> None:
    class Immutable(FileSink):
        def check_rollback(self, output: CommittedOutput, after: int) -> None:
            raise ConfigError("it cannot")

    world = World(tmp_path, only="out", others={"still": Immutable(tmp_path / "still")})
    committed(world)
    world.start("3", "rollback")
    (kept,) = world.start("3", "keep").opened.opened.warnings
    assert re.search(r"'out' possibly .* up to checkpoint 5 is kept, and the job resumes from checkpoint 3", kept)
    world.start("3", "rollback")
    world.start("latest", resume=True).complete(1)
    assert world.rows() == list(range(7))


def test_without_sinks_that_commit_an_older_checkpoint_doubles_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, others={"loud": Loud()}, only="none")
    committed(world)
    plan = world.plan("3")
    assert check_start(plan, find_start(plan, world.open), world.open) == (
        "sink 'loud' receives the rows since checkpoint 3 again",
    )
    assert world.start("3").row == 6


# ---- kept ----


def test_what_is_kept_is_there_twice_and_said_so(world: World) -> None:
    committed(world)
    plan = world.plan("3", "keep")
    warnings = check_start(plan, find_start(plan, world.open), world.open)
    assert warnings[0].startswith("sink 'out' up to checkpoint 5 is kept, and the job resumes from checkpoint 3")
    again = world.start("3", "keep")
    assert any("will be duplicated" in warning for warning in again.opened.opened.warnings)
    assert again.complete(2) == 6
    assert Counter(world.rows()) == Counter([*range(10), 6, 7])
    assert world.start("latest").row == 8


# ---- rolled back ----


def test_what_is_rolled_back_is_not_there_twice(world: World) -> None:
    committed(world)
    again = world.start("3", "rollback")
    assert world.rows() == list(range(6))
    again.complete(5)
    assert world.rows() == list(range(11))
    assert world.rows("shared") == [-1, *range(11)]
    assert world.storage.checkpoints() == [1, 2, 3, 6]


def test_a_checkpoint_whose_output_was_rolled_back_is_never_offered_again(world: World) -> None:
    start = committed(world)
    url = world.save(start)
    world.start("3", "rollback")
    assert world.start("latest").row == 6
    with pytest.raises(StorageError, match="checkpoint 5 is not in the checkpoint directory"):
        world.start("5", "keep")
    with pytest.raises(StorageError, match=r"gone back to a checkpoint before checkpoint 5 since.*was rolled back"):
        world.start(url, "keep")


def test_a_driver_that_wakes_up_commits_nothing_of_what_was_rolled_back(world: World) -> None:
    zombie = committed(world, 4)
    zombie.complete(2, commit=False)
    again = world.start("2", "rollback")
    with pytest.raises(StorageError, match="it is missing"):
        zombie.commit()
    again.complete(1)
    assert world.rows() == list(range(5))


@pytest.mark.parametrize("only", ["out", "shared"])
@pytest.mark.parametrize("before", [0, 4])
def test_a_journal_written_after_its_output_was_rolled_back_does_not_block_later_starts(
    tmp_path: Path, only: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is frozen after it has moved its files, and continues after they have been deleted."""
    world = World(tmp_path, only=only)
    late = world.start(None)
    late.complete(before)
    late.complete(2, commit=False)
    note = file_sink.write_journal

    def stopped(*given: Any) -> None:
        monkeypatch.setattr(file_sink, "write_journal", note)
        world.start("1", "rollback")
        note(*given)

    monkeypatch.setattr(file_sink, "write_journal", stopped)
    late.commit()
    world.start("latest", resume=True).complete(3)
    assert world.rows(only)[-before - 3 :] == list(range(before + 3))
    world.start("1", "rollback").complete(1)
    assert [row for row in world.rows(only) if row >= 0] == list(range(before + 1))


def test_files_that_somebody_has_taken_away_cannot_be_rolled_back(world: World) -> None:
    committed(world)
    for file in (world.directory / "out").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"sink 'out' cannot roll back.*files of checkpoint 5 are no longer in"):
        world.start("3", "rollback")
    assert world.rows("shared") == [-1, *range(10)], "refused before anything is changed"


def test_a_damaged_newest_checkpoint_is_gone_back_behind(world: World) -> None:
    committed(world)
    world.storage.files["chk-5/_metadata"] = world.storage.files["chk-5/_metadata"][:-1] + b"?"
    with pytest.raises(StorageError, match=r"checkpoint 5, the newest, cannot be used.*--from 4 --newer-output"):
        world.start("latest")
    world.start("4", "rollback").complete(3)
    assert world.rows() == list(range(11))
    assert not world.storage.exists("chk-5"), "what counts no more does not keep others from being cleaned up"


@pytest.mark.parametrize("only", ["out", "shared"])
def test_killed_at_any_step_of_rolling_back_it_ends_right_when_it_is_asked_for_again(tmp_path: Path, only: str) -> None:
    for step in range(1, 200):
        world = World(tmp_path / str(step), only=only)
        committed(world, 4).complete(2, commit=False)
        world.fate.left = step
        try:
            started = world.start("2", "rollback")
        except (StorageError, OSError) as error:
            must_say(error, "killed")
            world.fate.left = None
            started = None
        else:
            world.fate.left = None
        if started is None:
            started = world.start("2", "rollback")
        started.complete(1)
        assert [row for row in world.rows(only) if row >= 0] == list(range(5)), step
        if started.job_id == "start2":
            break
    else:
        raise AssertionError("never got to the end")
    assert step > 8


@pytest.mark.parametrize("seed", range(12))
def test_wherever_one_goes_back_to_and_is_killed_every_row_is_there_once(tmp_path: Path, seed: int) -> None:
    random = Random(f"going back {seed}")
    world = World(tmp_path)
    current: Start | None = world.start(None)
    zombies: list[Start] = []
    saved: list[str] = []
    asked, foreign = "latest", 1

    def mortally(what: Callable[[], Any]) -> Any:
        """None if it was killed, or fenced, in the midst of it."""
        world.fate.left = random.choice((None, None, random.randrange(1, 40)))
        try:
            return what()
        except FencedError:
            return None
        except (StorageError, OSError) as error:
            if "killed" not in str(error):
                raise
            return None
        finally:
            world.fate.left = None

    def again() -> Start | None:
        nonlocal asked
        choices = [str(n) for n in world.storage.checkpoints()] + saved
        asked = random.choice(("latest", asked, random.choice(choices or ["latest"])))
        resumes = asked == "latest" and random.random() < 0.5
        try:
            return mortally(lambda: world.start(asked, None if asked == "latest" else "rollback", resume=resumes))
        except ConfigError as error:
            refusals = [
                "is older than what has been committed",
                "has completed none of its own",
                "has completed none since",
            ]
            must_say(error, *(refusals if asked == "latest" else ["checkpoint 0"]))
            asked = random.choice(re.findall(r"--from (\d+)", str(error)) or ["0"])
        except StorageError as error:
            must_say(error, "is not in the checkpoint directory", "was rolled back")
            asked = "latest"
        return None

    for _ in range(40):
        step = random.choice(("complete", "complete", "complete", "again", "zombie", "save", "foreign"))
        if current is None or step == "again":
            if current is not None:
                zombies.append(current)
            current = again()
        elif step == "complete":
            rows = random.randrange(3)
            if mortally(lambda rows=rows, current=current: current.complete(rows)) is None:  # type: ignore[misc]  # mypy infers no lambda with defaults
                zombies.append(current)
                current = None
        elif step == "zombie" and zombies:
            try:
                random.choice(zombies).commit()
            except StorageError as error:
                must_say(error, "it is missing")
        elif step == "save" and current.newest is not None and current.newest.job_id == current.job_id:
            current.commit()
            saved.append(world.save(current))
        elif step == "foreign":
            foreign += 1
            world.foreign(-foreign)
    for _ in range(20):
        if current is not None:
            break
        current = again()
    assert current is not None
    current.complete(1)
    assert world.rows() == list(range(current.row))
    assert world.rows("shared") == [*range(-foreign, 0), *range(current.row)]
