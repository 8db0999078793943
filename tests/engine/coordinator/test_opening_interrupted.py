"""Starts that are killed, frozen or refused by the storage at every step of opening a checkpoint directory of real files.

Whatever happened to the starts before it, the next one resumes from what it says, finds every checkpoint that counts
with all its files, and uses no id that anybody may still publish.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import pytest
import xxhash

from checkpoint_samples import MAX_PARALLELISM, metadata_of, pipeline
from midstream.engine.checkpoint.metadata import CheckpointMetadata, encode_metadata
from midstream.engine.checkpoint.savepoint import SavepointLocation, write_savepoint
from midstream.engine.checkpoint.state_files import state_file, verify_chunks
from midstream.engine.checkpoint.store import (
    SAVEPOINT,
    FencedError,
    StartState,
    checkpoint_path,
    drop,
    list_checkpoints,
    load,
    metadata_path,
    publish,
)
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.restore.open_directory import find_start, open_checkpoints
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot, PartHandle
from midstream.runtime.storage.file_storage import TEMPORARY, FileStorage

STEPS_MAX = 500
CHANGES = ("open", "writev", "rename", "link", "unlink", "mkdir", "rmdir")
"""The functions of `os` with which the storage changes what other processes see of its files."""
Way = Literal["first", "newest", "latest", "resume", "named", "fresh", "copy"]
WAYS: tuple[Way, ...] = ("latest", "resume", "named", "fresh", "copy")
THIRD = 3
"""The epoch of the third start."""
NAMED, NEWEST, UNFINISHED = 2, 3, 4
"""Of the checkpoints of the first start: the one that is named, the newest, and one whose maker was killed."""


class Killed(BaseException):
    """The process is dead: nothing of it may run any more, not even to clean up."""


@dataclass
class Directory:
    """A job's checkpoint directory. Its first start has completed checkpoints 1 to 3, each with a file, and was killed
    while it made the next; elsewhere is a savepoint.
    """

    path: Path
    open_storage: Callable[[str], Storage] = FileStorage
    starts: Iterator[int] = field(default_factory=lambda: count(1))
    ids: set[int] = field(default_factory=set)
    """All that have ever been claimed."""
    made: Counter[int] = field(default_factory=Counter)
    """The number of checkpoints that each start has begun, by epoch."""

    @property
    def root(self) -> str:
        return str(self.path / "job")

    @property
    def saved(self) -> str:
        return str(self.path / "saved")

    def prepare(self) -> None:
        first = self.start("first")
        for _ in range(NEWEST):
            self.complete(first)
        storage = FileStorage(self.root)
        storage.write(state_file(first.epoch, 0, UNFINISHED, 1, 0), [b"of the unfinished one"])
        assert storage.create(f"{checkpoint_path(UNFINISHED)}/_owner", b"1")
        place = FileStorage(self.saved)
        place.create(SAVEPOINT, b"{}")
        write_savepoint(storage, load(storage, "job", str(NAMED)), SavepointLocation(self.saved, place))

    def copied_to(self, path: Path, open_storage: Callable[[str], Storage] = FileStorage) -> Directory:
        shutil.copytree(self.path, path)
        return Directory(path, open_storage, count(2), set(self.ids))

    def plan(self, way: Way) -> JobPlan:
        restore = {
            "named": str(NAMED),
            "newest": str(NEWEST),
            "copy": self.saved,
            "latest": "latest",
            "resume": "latest",
        }.get(way)
        config = JobConfig(name="job", checkpoint_dir=self.root, max_parallelism=MAX_PARALLELISM)
        return JobPlan(
            f"start{next(self.starts)}", pipeline(), b"", config, restore, fresh=way == "fresh", resume=way == "resume"
        )

    def start(self, way: Way) -> StartState:
        """Open the directory, from where it was said that it would begin, under ids that are new."""
        plan = self.plan(way)
        said = find_start(plan, FileStorage)
        opened = self.open(plan)
        restored = opened.restore
        assert (restored is None) == (said.metadata is None)
        if restored is not None and said.metadata is not None:
            assert self.state_of(restored) == said.metadata.sources[0].position, "it is another one"
            assert said.elsewhere is not None or restored.checkpoint_id == said.metadata.checkpoint_id
        return opened

    def open(self, plan: JobPlan) -> StartState:
        self.ids |= self.claimed()
        used = max(self.ids, default=0)
        opened = open_checkpoints(plan, self.open_storage).opened
        if opened.restore is not None and opened.restore.epoch == opened.epoch:
            assert opened.restore.checkpoint_id > used, "the copy has an id that was used"
            used = opened.restore.checkpoint_id
        assert opened.next_checkpoint_id > used
        return opened

    def complete(self, opened: StartState) -> int:
        """Make the next checkpoint of this start. Return its id."""
        checkpoint_id = opened.next_checkpoint_id + self.made[opened.epoch]
        self.made[opened.epoch] += 1
        publish(self.open_storage(self.root), self.written(checkpoint_id, opened.epoch))
        self.ids.add(checkpoint_id)
        return checkpoint_id

    def written(self, checkpoint_id: int, epoch: int) -> CheckpointMetadata:
        """Write the file of a checkpoint, whose state is its id, and return the metadata to publish."""
        file, state = state_file(epoch, 0, checkpoint_id, 1, 0), b"state %d" % checkpoint_id
        self.open_storage(self.root).write(file, [state])
        chunk = ChunkHandle(f"c{checkpoint_id}", file, 0, len(state), xxhash.xxh3_64_intdigest(state), 1, 0, 15)
        snapshots = OperatorSnapshot("count", (PartHandle("s", "keyed", (chunk,)),)), OperatorSnapshot("count")
        metadata = metadata_of(pipeline(), {"count": snapshots}, checkpoint_id=checkpoint_id, epoch=epoch)
        position = msgspec.structs.replace(metadata.sources[0], position=state)
        return msgspec.structs.replace(metadata, files=(file,), sources=(position,))

    def claimed(self) -> set[int]:
        return {int(name[4:]) for name in FileStorage(self.root).list("") if name.startswith("chk-")}

    def state_of(self, metadata: CheckpointMetadata) -> bytes:
        """Read the state that a checkpoint refers to: it is whole, and belongs to its sources' positions."""
        storage = FileStorage(self.root)
        parts = [part for op in metadata.operators for snapshot in op.subtasks for part in snapshot.parts]
        position = metadata.sources[0].position
        assert position is not None
        assert verify_chunks(storage, parts, "here") == len(position)
        (file,) = metadata.files
        assert storage.read(file) == position
        return position

    def offered(self) -> list[int]:
        """The ids of the checkpoints that can be resumed from, all of whose state is there."""
        found = list_checkpoints(FileStorage(self.root))
        for entry in found:
            assert entry.metadata is not None, entry.error
            self.state_of(entry.metadata)
        return [entry.checkpoint_id for entry in found]

    def recorded(self) -> bool:
        """Whether the second start has said from where it begins."""
        return FileStorage(self.root).exists("epochs/00000002.from")

    def must_go_on(self, way: Way) -> None:
        """The same start is made again, completes a checkpoint, and is resumed."""
        before = self.offered()
        assert set(before) >= {NAMED, NEWEST}
        again = self.start(way)
        assert set(self.offered()) >= set(before), "what counted does not any more"
        made = self.complete(again)
        resumed = self.start("latest")
        assert resumed.restore is not None and resumed.restore.checkpoint_id == made
        assert not [*self.path.glob(f"job/{TEMPORARY}*-chk-*"), *self.path.glob(f"job/shared/{TEMPORARY}*")]
        referenced = {file for entry in list_checkpoints(FileStorage(self.root)) for file in entry.metadata.files}  # type: ignore[union-attr]  # `offered` has looked
        assert {f"shared/{name}" for name in FileStorage(self.root).list("shared")} == referenced

    def must_be_begun_again(self, way: Way, published: bool) -> None:
        """A start that resumes repeats the second one if that has recorded where it begins, and published nothing."""
        if way == "copy" and self.recorded() and not published:
            with pytest.raises(ConfigError, match="start from that again"):
                self.start("resume")
        else:
            source = {"named": NAMED, "fresh": None}.get(way, NEWEST) if self.recorded() else NEWEST
            restored = self.start("resume").restore
            expected = max(self.offered()) if published else source
            assert (None if restored is None else restored.checkpoint_id) == expected


def killed_at(step: int, what: Callable[[], object]) -> bool:
    """Do it, and kill the process before its `step`-th change of a file; return whether it was killed."""
    left = step

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            if call.__name__ == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **named)
            left -= 1
            if left <= 0:
                raise Killed
            return call(*arguments, **named)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, mortal(getattr(os, name)))
        try:
            what()
        except Killed:
            return True
        return False


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """Power does not fail here, so nothing waits for a disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    directory = Directory(tmp_path / "0")
    directory.prepare()
    return directory


@pytest.mark.parametrize("then", ["the same", "resume"])
@pytest.mark.parametrize("way", WAYS)
def test_a_start_that_is_killed_at_any_change_of_a_file_has_changed_nothing_for_the_next(
    tmp_path: Path, directory: Directory, way: Way, then: str
) -> None:
    for step in range(1, STEPS_MAX):
        one = directory.copied_to(tmp_path / str(step))
        was_killed = killed_at(step, lambda one=one: one.complete(one.start(way)))  # type: ignore[misc]  # mypy infers no lambda with defaults
        if then == "the same":
            one.must_go_on(way)
        else:
            one.must_be_begun_again(way, published=max(one.offered()) > NEWEST)
        shutil.rmtree(one.path)
        if not was_killed:
            break
    else:
        raise AssertionError("never got to the end")
    assert step > 20


ALL = ("read", "read_range", "write", "create", "delete", "list", "sweep", "exists")
WRITING = ("write", "create", "delete", "sweep")


class Interruption:
    """What happens at calls of storage, which are counted over everything that is opened with it."""

    def __init__(
        self, happens: Mapping[int, Callable[[Callable[[], Any]], Any]], methods: Collection[str] = ALL
    ) -> None:
        self.calls = 0
        self._happens = happens
        self._methods = methods

    def open(self, url: str) -> Storage:
        return _Interrupted(FileStorage(url), self)

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        self.calls += name in self._methods
        happens = self._happens.get(self.calls) if name in self._methods else None
        return do() if happens is None else happens(do)


class _Interrupted:
    def __init__(self, storage: Storage, interruption: Interruption) -> None:
        self._storage, self._interruption = storage, interruption

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._storage, name)
        return lambda *arguments, **named: self._interruption.call(name, partial(method, *arguments, **named))


def refused(_: Callable[[], Any]) -> Any:
    raise StorageError("the storage is away")


def done_and_reported_as_failed(do: Callable[[], Any]) -> Any:
    do()
    raise StorageError("the storage was away for the answer")


def done_twice(do: Callable[[], Any]) -> Any:
    """The request was sent twice: the file that was created exists already."""
    do()
    return False


@pytest.mark.parametrize(
    ("happens", "methods"), [(refused, ALL), (done_and_reported_as_failed, WRITING), (done_twice, ("create",))]
)
@pytest.mark.parametrize("way", ["latest", "fresh", "copy"])
def test_a_start_at_one_of_whose_calls_the_storage_fails_has_changed_nothing_for_the_next(
    tmp_path: Path, directory: Directory, way: Way, happens: Callable[[Callable[[], Any]], Any], methods: Sequence[str]
) -> None:
    refusals = 0
    for step in range(1, STEPS_MAX):
        interruption = Interruption({step: happens}, methods)
        one = directory.copied_to(tmp_path / str(step), interruption.open)
        try:
            one.complete(one.start(way))
        except StorageError:
            refusals += 1
        one.open_storage = FileStorage
        one.must_go_on(way)
        shutil.rmtree(one.path)
        if interruption.calls < step:
            break
    else:
        raise AssertionError("never got to the end")
    assert refusals > 0


@dataclass
class Successor:
    """Another start of the same job, from checkpoint 3, which completes a checkpoint and drops checkpoint 1."""

    directory: Directory
    epoch: int = 0
    offered: list[int] = field(default_factory=list)
    """What can be resumed from when it has."""

    def takes_over(self) -> None:
        directory, storage = self.directory, FileStorage(self.directory.root)
        other = Directory(directory.path, FileStorage, directory.starts, set(directory.ids))
        opened = other.start("newest")
        self.epoch = opened.epoch
        other.complete(opened)
        drop(storage, opened.epoch, [1], [state_file(1, 0, 1, 1, 0)])
        directory.ids |= other.ids
        self.offered = other.offered()

    def first(self, do: Callable[[], Any]) -> Any:
        self.takes_over()
        return do()


@pytest.mark.parametrize("way", ["latest", "fresh", "copy"])
def test_a_start_that_is_frozen_at_any_call_while_another_takes_over_takes_nothing_from_it(
    tmp_path: Path, directory: Directory, way: Way
) -> None:
    fenced = 0
    for step in range(1, STEPS_MAX):
        one = directory.copied_to(tmp_path / str(step))
        successor = Successor(one)
        interruption = Interruption({step: successor.first})
        one.open_storage = interruption.open
        error: StorageError | None = None
        try:
            one.complete(one.open(one.plan(way)))
        except StorageError as raised:
            error = raised
            assert one.offered() == successor.offered
        # while it copies, it may find its copies deleted before it finds the epoch
        assert error is None or isinstance(error, FencedError) or way == "copy"
        assert (error is None) == (successor.epoch < THIRD), "it takes over itself, or is fenced"
        fenced += error is not None
        one.open_storage = FileStorage
        one.must_go_on("latest")
        shutil.rmtree(one.path)
        if interruption.calls < step:
            break
    else:
        raise AssertionError("never got to the end")
    assert fenced > 20


class Zombie:
    """The first start, which was thought dead: it has looked at the epochs, and goes on to make its next checkpoint."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._storage = FileStorage(directory.root)
        self._metadata = directory.written(UNFINISHED + 1, 1)
        self._has_claimed = False

    def claims(self, do: Callable[[], Any]) -> Any:
        path = checkpoint_path(self._metadata.checkpoint_id)
        self._has_claimed = self._storage.create(f"{path}/_owner", b"1", durable=False)
        return do()

    def withdraws(self) -> None:
        """Its metadata could not be written."""
        if self._has_claimed:
            self._storage.delete(checkpoint_path(self._metadata.checkpoint_id))

    def writes(self) -> None:
        if self._has_claimed:
            path = metadata_path(self._metadata.checkpoint_id)
            self._storage.write(path, [encode_metadata(self._metadata)])


@pytest.mark.systems
@pytest.mark.parametrize("withdraws", [False, True])
@pytest.mark.parametrize("way", ["latest", pytest.param("copy", marks=pytest.mark.nightly)])
def test_what_an_old_start_claims_while_another_begins_costs_a_third_one_nothing(
    tmp_path: Path, directory: Directory, way: Way, withdraws: bool
) -> None:
    """The second one is frozen, or dies, at a later call, and the third completes a checkpoint. Then the first continues."""
    random = Random(f"claims {way} {withdraws}")
    calls = Interruption({})
    directory.copied_to(tmp_path / "calls", calls.open).start(way)
    for step in range(1, calls.calls + 1):
        for then in {random.randint(step, min(step + 20, calls.calls)), calls.calls + 1}:
            one = directory.copied_to(tmp_path / f"{step} {then}")
            zombie, successor = Zombie(one), Successor(one)

            def frozen(do: Callable[[], Any], zombie: Zombie = zombie, successor: Successor = successor) -> Any:
                if withdraws:
                    zombie.withdraws()
                return successor.first(do)

            one.open_storage = Interruption(
                {step: zombie.claims, then: frozen} if then > step else {step: zombie.claims}
            ).open
            with contextlib.suppress(StorageError):
                one.open(one.plan(way))
            if not successor.offered:
                frozen(lambda: None)
            if not withdraws:
                zombie.writes()
            offered = one.offered()
            assert offered == successor.offered or (
                successor.epoch < THIRD and set(offered) > set(successor.offered)  # the frozen one was to begin yet
            )
            one.open_storage = FileStorage
            one.must_go_on("latest")
            shutil.rmtree(one.path)
