"""The checkpoint directory: one head at a time, nothing torn is ever offered, nothing needed is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from checkpoint_samples import metadata_of, pipeline
from in_memory import MemoryStorage
from midstream.engine.checkpoint.state_files import state_file
from midstream.engine.checkpoint.store import (
    SAVEPOINT,
    ClaimedDirectory,
    FencedError,
    RetainedCheckpoint,
    StartState,
    UnknownOutcomeError,
    begin,
    check_records,
    choose,
    drop,
    drop_attempts_before,
    list_checkpoints,
    load,
    next_checkpoint_id,
    publish,
    record_start,
    split_restore,
    split_retained,
    take_over,
    was_rewound_past,
)
from midstream.engine.core.errors import StorageError

ROOT = "/data/flights"


def opened(storage: MemoryStorage, restore: str | None = None, job: str = "job") -> StartState:
    taken = take_over(storage, ROOT, job, "id")
    found = None if restore is None else choose(taken.listed, restore, job, storage)
    return begin(storage, recorded(storage, taken), found, 0, ())


def recorded(storage: MemoryStorage, taken: ClaimedDirectory) -> ClaimedDirectory:
    return record_start(storage, taken, first=next_checkpoint_id(storage, 0), fresh=False)


def made(storage: MemoryStorage, checkpoint_id: int, epoch: int = 1, files: tuple[str, ...] = ()) -> None:
    for file in files:
        storage.files.setdefault(file, b"state")
    publish(storage, metadata_of(pipeline(), checkpoint_id=checkpoint_id, epoch=epoch, files=files))


def test_epochs_only_grow_and_checkpoint_ids_go_on() -> None:
    storage = MemoryStorage()
    first = opened(storage)
    assert (first.epoch, first.next_checkpoint_id, first.restore) == (1, 1, None)
    made(storage, 1)
    second = opened(storage)
    assert (second.epoch, second.next_checkpoint_id) == (2, 2)
    assert second.retained == (RetainedCheckpoint(1, frozenset()),)


def test_a_superseded_coordinator_can_neither_publish_nor_delete() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    opened(storage)
    before = dict(storage.files)
    with pytest.raises(FencedError, match="another coordinator has taken over"):
        made(storage, 2)
    with pytest.raises(FencedError):
        drop(storage, 1, [1], [])
    assert storage.files == before


def test_a_checkpoint_that_slips_in_while_another_takes_over_is_never_offered() -> None:
    class SlowStorage(MemoryStorage):
        def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
            if path.endswith("/_metadata") and not self.taken_over:
                self.taken_over = True
                opened(self)
            super().write(path, parts)

        taken_over = False

    storage = SlowStorage()
    opened(storage)
    with pytest.raises(FencedError):
        made(storage, 1, epoch=1)
    assert storage.exists("chk-1/_metadata")
    assert list_checkpoints(storage) == []
    made(storage, 2, epoch=2)
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [2]
    third = opened(storage, "latest")
    assert third.restore is not None and third.restore.checkpoint_id == 2
    assert not storage.exists("chk-1")


def test_metadata_that_was_given_up_and_is_written_after_another_took_over_is_never_offered() -> None:
    """Its maker had completed a newer checkpoint meanwhile, so that it is older than the newest one that counts."""

    class SlowStorage(MemoryStorage):
        def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
            if path == "chk-2/_metadata":
                made(self, 3, epoch=1)
                opened(self, "latest")
            super().write(path, parts)

    storage = SlowStorage()
    opened(storage)
    made(storage, 1)
    file = state_file(1, 0, 2, 0, 0)
    with pytest.raises(FencedError):
        made(storage, 2, epoch=1, files=(file,))
    assert storage.exists("chk-2/_metadata")
    assert not storage.exists(file)
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [1, 3]
    with pytest.raises(StorageError, match="checkpoint 2 is not in the checkpoint directory, which has: 1, 3"):
        load(storage, "job", "2")
    assert opened(storage, "latest").retained == (
        RetainedCheckpoint(1, frozenset()),
        RetainedCheckpoint(3, frozenset()),
    )
    assert not storage.exists("chk-2")


def _drops(storage: MemoryStorage, meanwhile: Callable[[], object], before: str) -> None:
    """Epoch 1 drops checkpoint 1 and its file; `meanwhile` happens right before it writes or deletes `before`."""
    file = state_file(1, 0, 1, 0, 0)

    def look(path: str) -> bool:
        if path == before:
            storage.refuse = storage.refuse_delete = lambda _: False
            meanwhile()
        return False

    opened(storage)
    made(storage, 1, files=(file,))
    made(storage, 2)
    storage.refuse = storage.refuse_delete = look
    drop(storage, 1, [1], [file])


def test_a_checkpoint_is_not_deleted_when_another_coordinator_takes_over_before_it_is_marked() -> None:
    """The mark that is made behind that one does not count for the coordinators after it either."""
    storage = MemoryStorage()
    with pytest.raises(FencedError):
        _drops(storage, lambda: opened(storage, "1"), before="chk-1/_dropped.00000001")
    assert "chk-1/_dropped.00000001" in storage.files
    third = opened(storage, "1")
    assert third.restore is not None
    assert load(storage, "job", "1").files == third.restore.files
    assert storage.checkpoints() == [1, 2]
    drop(storage, third.epoch, [1], third.restore.files)
    assert [name for name in storage.files if "chk-1" in name or "shared" in name] == []


@pytest.mark.parametrize("before", ["chk-1/_metadata", "chk-1", state_file(1, 0, 1, 0, 0)])
def test_a_coordinator_that_takes_over_while_a_checkpoint_is_deleted_begins_without_it(before: str) -> None:
    def take_the_newest() -> None:
        with pytest.raises(StorageError, match=r"checkpoint 1 is .*; the .*directory has: 2|in the .*, which has: 2"):
            load(storage, "job", "1")
        second = opened(storage, "latest")
        assert second.restore is not None and second.restore.checkpoint_id == 2
        assert second.retained == (RetainedCheckpoint(2, frozenset()),)

    storage = MemoryStorage()
    _drops(storage, take_the_newest, before)
    assert [name for name in storage.files if "chk-1" in name or "shared" in name] == []
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [2]


def test_a_checkpoint_that_is_being_deleted_is_refused_by_its_name() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    storage.refuse_delete = lambda path: True
    with pytest.raises(StorageError, match="permission denied"):
        drop(storage, 1, [1], [])
    with pytest.raises(StorageError, match="checkpoint 1 is being deleted; the checkpoint directory has: 2"):
        load(storage, "job", "1")
    storage.refuse_delete = lambda path: False
    assert opened(storage, "latest").retained == (RetainedCheckpoint(2, frozenset()),)
    assert not storage.exists("chk-1")


def test_a_mark_counts_if_the_coordinator_that_took_over_before_it_recorded_nothing() -> None:
    storage = MemoryStorage()
    with pytest.raises(FencedError):
        _drops(storage, lambda: take_over(storage, ROOT, "job", "id"), before="chk-1/_dropped.00000001")
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [2]


def test_a_mark_that_is_there_already_or_whose_making_is_reported_as_failed_counts() -> None:
    class LyingStorage(MemoryStorage):
        lies = 1

        def create(self, path: str, data: bytes, durable: bool = True) -> bool:
            created = super().create(path, data, durable)
            if "_dropped" in path and self.lies:
                self.lies -= 1
                raise StorageError("no answer")
            return created

    storage = LyingStorage()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    with pytest.raises(StorageError, match="no answer"):
        drop(storage, 1, [1], [])
    assert storage.checkpoints() == [1, 2]
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [2]
    drop(storage, 1, [1], [])
    assert not storage.exists("chk-1")


def test_a_copy_of_a_checkpoint_that_was_dropped_is_not_taken_for_one_that_was_gone_back_behind() -> None:
    storage = MemoryStorage()
    opened(storage)
    for checkpoint_id in (1, 2, 3):
        made(storage, checkpoint_id)
    first, _, third = (entry.metadata for entry in list_checkpoints(storage))
    assert first is not None and third is not None
    drop(storage, 1, [1], [])
    taken = take_over(storage, ROOT, "job", "id")
    record_start(storage, taken, first=4, giving_up_after=2, fresh=False)
    assert not was_rewound_past(storage, first)
    assert was_rewound_past(storage, third)


def test_a_checkpoint_without_metadata_is_no_checkpoint_and_is_cleaned_up() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1, files=(state_file(1, 0, 1, 0, 0),))
    storage.files["chk-2/_owner"] = b"1"
    storage.files[state_file(1, 0, 2, 0, 0)] = b"half"
    storage.files["plans/read/1"] = b"belongs to a source"
    again = opened(storage, "latest")
    assert again.restore is not None and again.restore.checkpoint_id == 1
    assert again.next_checkpoint_id == 3
    assert sorted(f for f in storage.files if f.startswith(("chk", "shared", "plans"))) == [
        "chk-1/_metadata",
        "chk-1/_owner",
        "plans/read/1",
        state_file(1, 0, 1, 0, 0),
    ]


def test_while_any_metadata_cannot_be_read_nothing_is_deleted() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    storage.files["chk-2/_metadata"] = b"MIDSTRM"
    storage.files[state_file(1, 0, 2, 0, 0)] = b"state"
    with pytest.raises(StorageError, match=r"checkpoint 2, the newest, cannot be used: .*--from 1 --newer-output"):
        opened(storage, "latest")
    again = opened(storage, "1")
    assert again.restore is not None and again.restore.checkpoint_id == 1
    assert storage.exists(state_file(1, 0, 2, 0, 0))
    assert any("not deleted, because" in warning for warning in again.warnings)


def test_a_checkpoint_whose_state_file_is_missing_is_not_offered() -> None:
    storage = MemoryStorage()
    opened(storage)
    file = state_file(1, 0, 2, 0, 0)
    made(storage, 1)
    made(storage, 2, files=(file,))
    storage.delete(file)
    with pytest.raises(StorageError, match=r"checkpoint 2, the newest, .* is missing\. The newest usable one is 1"):
        load(storage, "job", "latest")
    assert load(storage, "job", "1").checkpoint_id == 1
    with pytest.raises(StorageError, match=f"{file} is missing"):
        load(storage, "job", "2")


def test_when_no_checkpoint_can_be_used_latest_is_an_error_and_not_a_fresh_start() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    storage.files["chk-1/_metadata"] = b""
    with pytest.raises(StorageError, match="none of the checkpoints can be used"):
        opened(storage, "latest")


def test_latest_where_nothing_was_ever_completed_is_a_fresh_start() -> None:
    storage = MemoryStorage()
    assert opened(storage, "latest").restore is None
    with pytest.raises(StorageError, match="no checkpoint has been completed"):
        load(storage, None, "latest")


@pytest.mark.parametrize(
    "which", ["1", "chk-1", "/data/flights/chk-1", "flights/chk-1/", "file:///data/flights/chk-1/_metadata"]
)
def test_a_checkpoint_has_many_names(which: str) -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    found = opened(storage, which).restore
    assert found is not None and found.checkpoint_id == 1


@pytest.mark.parametrize(
    ("which", "place"),
    [
        ("latest", (None, "latest")),
        ("17", (None, "17")),
        ("chk-17", (None, "chk-17")),
        ("/data/flights/chk-17", (None, "chk-17")),
        ("file:///data/flights/chk-17/_metadata", (None, "chk-17")),
        ("/data/flights/", (None, "latest")),
        ("/other/flights/chk-17/", ("/other/flights", "chk-17")),
        ("/data/flights/savepoints/3", ("/data/flights/savepoints/3", "latest")),
        ("s3://bucket/saved/", ("s3://bucket/saved", "latest")),
        ("s3://bucket/saved/chk-7/?region=r", ("s3://bucket/saved?region=r", "chk-7")),
        ("/what?/chk-7", ("/what?", "chk-7")),
    ],
)
def test_a_checkpoint_is_in_the_jobs_directory_or_elsewhere(which: str, place: tuple[str | None, str]) -> None:
    assert split_restore(which, ROOT) == place


def test_a_checkpoint_is_found_behind_a_url_with_parameters() -> None:
    root = "s3://bucket/job?region=r&scheme=http"
    assert split_restore("s3://bucket/job/chk-7?region=r&scheme=http", root) == (None, "chk-7")
    assert split_restore("s3://bucket/job/chk-7/_metadata", root) == (None, "chk-7")
    assert split_restore("s3://bucket/job?region=r&scheme=http", root) == (None, "latest")
    elsewhere = "s3://bucket/job/savepoints/1?region=r&scheme=http"
    assert split_restore(elsewhere, root) == (elsewhere, "latest")
    assert split_restore("s3://bucket/job/chk-7?region=other", root) == ("s3://bucket/job?region=other", "chk-7")


def test_nonsense_names_no_checkpoint() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    for which in ("yesterday", "chk-", "-1", "../chk-x"):
        with pytest.raises(StorageError):
            opened(storage, which)


def test_a_savepoint_is_no_checkpoint_directory() -> None:
    storage = MemoryStorage()
    storage.create(SAVEPOINT, b"{}")
    with pytest.raises(StorageError, match="holds a savepoint, which a job must not change"):
        opened(storage)
    assert list(storage.files) == [SAVEPOINT]


def test_the_directory_belongs_to_one_job() -> None:
    storage = MemoryStorage()
    opened(storage)
    with pytest.raises(StorageError, match="of 'job', not of 'other'"):
        opened(storage, job="other")


def test_metadata_that_was_copied_to_another_id_is_refused() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    storage.files["chk-5/_metadata"] = storage.files["chk-1/_metadata"]
    with pytest.raises(StorageError, match="copied by hand"):
        load(storage, "job", "5")


def test_publishing_undoes_what_it_cannot_finish_and_says_when_it_cannot_undo() -> None:
    class Failing(MemoryStorage):
        deletes = True

        def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
            if path.endswith("/_metadata"):
                raise StorageError("the disk is full")
            super().write(path, parts)

        def delete(self, path: str) -> None:
            if not self.deletes:
                raise StorageError("the disk is away")
            super().delete(path)

    storage = Failing()
    opened(storage)
    with pytest.raises(StorageError, match="the disk is full"):
        made(storage, 1)
    assert not storage.exists("chk-1")
    storage.deletes = False
    with pytest.raises(UnknownOutcomeError, match=r"the disk is full.*the disk is away"):
        made(storage, 2)


def test_a_checkpoint_that_is_written_but_not_known_to_count_has_an_unknown_outcome() -> None:
    class Away(MemoryStorage):
        def list(self, path: str) -> list[str]:
            if path == "epochs" and self.exists("chk-1/_metadata"):
                raise StorageError("the disk is away")
            return super().list(path)

    storage = Away()
    opened(storage)
    with pytest.raises(UnknownOutcomeError, match="the disk is away"):
        made(storage, 1)  # restored by whoever comes next: its state files must stay
    assert storage.exists("chk-1/_metadata")


def test_an_id_that_is_taken_is_not_overwritten() -> None:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    before = storage.files["chk-1/_metadata"]
    with pytest.raises(StorageError, match="exists already"):
        made(storage, 1)
    assert storage.files["chk-1/_metadata"] == before


def test_files_are_kept_as_long_as_anybody_references_them() -> None:
    retained = tuple(RetainedCheckpoint(n, frozenset(files)) for n, files in ((1, "ab"), (2, "bc"), (3, "cd")))
    kept, dropped, files = split_retained(retained, keep=1, in_use=["a"])
    assert [r.checkpoint_id for r in kept] == [3]
    assert [r.checkpoint_id for r in dropped] == [1, 2]
    assert files == {"b"}


def test_only_state_files_are_ever_deleted() -> None:
    storage = MemoryStorage()
    opened(storage)
    for path in ("_job", "../outside", "shared/notes.txt"):
        with pytest.raises(StorageError, match="refusing to delete"):
            drop(storage, 1, (), [path])


def test_leavings_of_earlier_attempts_go_but_not_those_referenced_or_of_other_epochs() -> None:
    storage = MemoryStorage()
    opened(storage)
    kept = [state_file(1, 0, 1, 0, 0), state_file(1, 1, 3, 0, 0), state_file(2, 0, 1, 0, 0)]
    gone = state_file(1, 0, 2, 0, 0)
    for file in (*kept, gone):
        storage.files[file] = b""
    drop_attempts_before(storage, 1, 1, {kept[0]})
    assert [file for file in (*kept, gone) if storage.exists(file)] == kept


def test_metadata_that_cannot_be_read_now_is_not_taken_for_damaged() -> None:
    class Unreachable(MemoryStorage):
        def read(self, path: str) -> bytes:
            if path == "chk-2/_metadata":
                raise StorageError("the network is down")
            return super().read(path)

    storage = Unreachable()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    with pytest.raises(StorageError, match="the network is down"):
        opened(storage, "latest")


def test_a_checkpoint_that_is_dropped_while_somebody_looks_is_not_listed() -> None:
    class Dropping(MemoryStorage):
        def read(self, path: str) -> bytes:
            if path == "chk-1/_metadata":
                self.files.pop(path, None)
            return super().read(path)

    storage = Dropping()
    opened(storage)
    made(storage, 1)
    made(storage, 2)
    assert [entry.checkpoint_id for entry in list_checkpoints(storage)] == [2]


# ---- the small files ----


RECORDS = ("_job", "epochs/00000001", "epochs/00000001.from", "chk-1/_owner")


def small_files() -> MemoryStorage:
    storage = MemoryStorage()
    opened(storage)
    made(storage, 1)
    return storage


@pytest.mark.parametrize("path", RECORDS)
def test_a_flipped_bit_in_a_small_file_is_found_wherever_it_is(path: str) -> None:
    content = small_files().files[path]
    for bit in range(8 * len(content)):
        storage = small_files()
        data = bytearray(content)
        data[bit // 8] ^= 1 << bit % 8
        storage.files[path] = bytes(data)
        problems = check_records(storage)
        assert len(problems) == 1, (path, bit, bytes(data))
        assert problems[0].startswith(f"{path}: "), problems
        assert "It records" in problems[0], "what it is for, and the remedy"


@pytest.mark.parametrize("path", RECORDS)
def test_small_files_that_are_torn_or_another_ones_are_found(path: str) -> None:
    for content in (b"", b"{", small_files().files[path][:-3]):
        storage = small_files()
        storage.files[path] = content
        assert len(check_records(storage)) == 1, content
    storage = small_files()
    opened(storage)
    storage.files["epochs/00000002.from"] = storage.files["epochs/00000001.from"]
    assert check_records(storage)[0].startswith("epochs/00000002.from: the checksum is wrong")


def test_a_wrong_digit_does_not_hide_the_newest_checkpoint() -> None:
    storage = small_files()
    made(storage, 2)
    made(storage, 3)
    opened(storage)
    path = "epochs/00000002.from"
    storage.files[path] = storage.files[path].replace(b'"newest":3', b'"newest":2')
    with pytest.raises(StorageError, match=r"epochs/00000002.from: the checksum is wrong.*Restore it from a copy"):
        opened(storage, "latest")


def test_an_id_that_was_claimed_is_never_used_again_by_those_who_come_later() -> None:
    """The first coordinator is frozen behind its claim, the second cleans that up and completes nothing."""
    storage = MemoryStorage()
    first = opened(storage)
    storage.create("chk-1/_owner", b"1")
    second = opened(storage)
    assert not storage.exists("chk-1/_owner")
    third = opened(storage)
    assert (first.next_checkpoint_id, second.next_checkpoint_id, third.next_checkpoint_id) == (1, 2, 2)


def test_a_claim_that_comes_while_another_coordinator_begins_keeps_its_id() -> None:
    """The coordinator that begins has recorded that it numbers from there, and completes nothing."""
    storage = MemoryStorage()
    opened(storage)
    taken = recorded(storage, take_over(storage, ROOT, "job", "id"))
    storage.create("chk-1/_owner", b"1")  # of the first one, which was frozen behind its look at the epochs
    assert begin(storage, taken, None, 0, ()).next_checkpoint_id == 2
    assert storage.exists("chk-1/_owner")
    assert opened(storage).next_checkpoint_id == 2  # or the first one would write its metadata over another's
    assert not storage.exists("chk-1/_owner")
    assert opened(storage).next_checkpoint_id == 2


def test_a_coordinator_that_is_frozen_in_its_clean_up_deletes_no_checkpoint_that_a_later_one_makes() -> None:
    """A third one's claim, made while it began and withdrawn since, has had the id of that checkpoint."""

    class SlowStorage(MemoryStorage):
        meanwhile: Callable[[], None] | None = None

        def delete(self, path: str) -> None:
            self._freeze()
            super().delete(path)

        def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
            self._freeze()
            super().sweep(path, unwanted)

        def _freeze(self) -> None:
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()

    def withdraw_and_take_over() -> None:
        storage.delete("chk-1")  # its metadata could not be written
        third = opened(storage)
        made(storage, third.next_checkpoint_id, epoch=third.epoch)

    storage = SlowStorage()
    opened(storage)
    taken = recorded(storage, take_over(storage, ROOT, "job", "id"))
    storage.create("chk-1/_owner", b"1")
    storage.meanwhile = withdraw_and_take_over
    with pytest.raises(FencedError):
        begin(storage, taken, None, 0, ())
    assert load(storage, "job", "latest").epoch == 3


def test_a_directory_that_was_emptied_gets_no_checkpoints_of_the_start_that_had_claimed_it() -> None:
    """Else what they refer to is missing, and another start there would have the same epoch."""
    storage = MemoryStorage()
    with pytest.raises(StorageError, match=r"lost the record of this start \(epochs/00000001\).*cancel this start"):
        publish(storage, metadata_of(pipeline(), checkpoint_id=1, epoch=1, files=()))
    assert storage.files == {}
