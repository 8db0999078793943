"""What must be in a checkpoint directory, at all times and when a run has settled.

A checkpoint that can be restored has all its files, from the moment at which its metadata is there until that is
deleted. Files that can never be needed are not left behind. These may rightly be left:

- files of a checkpoint whose outcome the coordinator does not know: its metadata may yet be written;
- what a driver that was thought dead, or its slots, have written after the next one had cleaned up;
- what a slot that was given up has written after its attempt was cleaned up;
- what is being written for a checkpoint when the job ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from midstream.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.checkpoint.records import OwnerFile, unsealed
from midstream.checkpoint.state_files import StateFile
from midstream.checkpoint.store import is_superseded, jobs_of
from midstream.sim.cluster import Driver
from midstream.sim.disk import Disk
from midstream.sim.oracle import CHECKPOINT
from midstream.sim.world import World

SAMPLES: Final = 5
PASSES: Final = 8
"""So many checkpoints behind the last refusal of the storage, what could not be deleted then has been tried again."""
CLAIM: Final = re.compile(r"chk-\d+/_owner")


class OnDisk:
    """One checkpoint directory. It is told of every file."""

    def __init__(self, world: World, disk: Disk) -> None:
        self._world = world
        self._disk = disk
        self._born: dict[str, int] = {}
        """By file: the step in which it was written."""
        self._metadata: dict[str, CheckpointMetadata] = {}
        """Of the checkpoints that are there, by path."""
        self._began: dict[int, int] = {}
        """By epoch: the step from which on its coordinator cleans up what it has found."""
        self._made: dict[tuple[int, int], dict[int, int]] = {}
        """By epoch and attempt: its checkpoints, and the steps in which their metadata was written."""
        self._claimed: dict[int, set[int]] = {}
        """By checkpoint: the epochs that have claimed its id."""
        self._taken: dict[int, frozenset[int]] = {}
        """By epoch: the ids that others had claimed when its coordinator began."""
        self._seen: dict[int, int] = {}
        """By epoch: the newest checkpoint that was there when its coordinator began."""
        disk.on_change.append(self._changed)

    def _changed(self, path: str, data: bytes | None) -> None:
        step = self._world.step_number
        if data is None:
            self._deleted(path)
            return
        self._born[path] = step
        if path.startswith("epochs/") and path.endswith(".from"):
            epoch = int(path[len("epochs/") : -len(".from")])
            there = [metadata for metadata in self._metadata.values() if not self._is_superseded(metadata)]
            self._seen[epoch] = max((metadata.checkpoint_id for metadata in there), default=0)
            claims = (name for name in self._disk.files if CLAIM.fullmatch(name))
            self._taken[epoch] = frozenset(map(_number_of, claims))
            self._began[epoch] = step
        elif CLAIM.fullmatch(path):
            self._check_claim(_number_of(path), unsealed(data, OwnerFile, path).epoch)
        elif CHECKPOINT.fullmatch(path):
            metadata = self._metadata[path] = decode_metadata(data, path)
            self._check_author(metadata)
            self._made.setdefault((metadata.epoch, metadata.attempt), {})[metadata.checkpoint_id] = step
            lost = [file for file in metadata.files if file not in self._disk.files]
            if lost and not self._is_superseded(metadata):
                self._world.bug(f"checkpoint {metadata.checkpoint_id} refers to {_some(lost)}, which is not there")

    def _check_claim(self, checkpoint_id: int, epoch: int) -> None:
        """An id that was claimed before a coordinator began is never its own: it may yet be written to."""
        if checkpoint_id in self._taken.get(epoch, ()):
            self._world.bug(f"epoch {epoch} makes checkpoint {checkpoint_id}, an id that was claimed before it began")
        self._claimed.setdefault(checkpoint_id, set()).add(epoch)

    def _check_author(self, metadata: CheckpointMetadata) -> None:
        """Metadata is written under an id that its coordinator has claimed; and does not count behind the next one's start."""
        checkpoint_id, epoch = metadata.checkpoint_id, metadata.epoch
        if epoch not in self._claimed.get(checkpoint_id, ()):
            self._world.bug(f"epoch {epoch} writes checkpoint {checkpoint_id}, an id that it has not claimed")
        heads = [head for head, newest in self._seen.items() if head > epoch and checkpoint_id > newest]
        if heads and not self._is_superseded(metadata):
            self._world.bug(f"checkpoint {checkpoint_id} of epoch {epoch} counts, and {heads[0]} had begun without it")

    def _deleted(self, path: str) -> None:
        self._born.pop(path, None)
        self._metadata.pop(path, None)
        if not path.startswith("shared/"):
            return
        for metadata in self._metadata.values():
            if path in metadata.files and not self._is_superseded(metadata):
                self._world.bug(f"{path} is deleted, and checkpoint {metadata.checkpoint_id} refers to it")

    def _is_superseded(self, metadata: CheckpointMetadata) -> bool:
        with self._world.looking():
            return is_superseded(self._disk, metadata)

    # ---- when the run has settled

    def check_settled(self, drivers: Sequence[Driver], retained: int) -> Iterator[str]:
        """Complaints about what is left when the job has come to its end, and nothing goes on."""
        if not self._began:
            return
        with self._world.looking():
            jobs = jobs_of(self._disk)
        head = max(self._began)
        driver = next(driver for driver in drivers if driver.plan.job_id == jobs[head])
        steps = (step for (epoch, _), made in self._made.items() if epoch == head for step in made.values())
        if self._disk.refused_in > self._began[head] and sum(step > self._disk.refused_in for step in steps) < PASSES:
            return  # what could not be deleted in the end is found by the next coordinator
        if not driver.coordinator.status(
            driver.process.now_ms()
        ).had_finished:  # then nothing has run: it drops nothing
            yield from self._check_number(head, driver, retained)
        yield from self._check_files(head, driver)
        yield from self._check_claims(head)
        torn = [
            path
            for path in self._disk.torn
            if self._is_settled(path.replace(TORN, "/"), head, driver, self._disk.torn_in[path])
        ]
        if torn:
            yield f"files that were never finished are left: {_some(torn)}"

    def _check_number(self, head: int, driver: Driver, retained: int) -> Iterator[str]:
        counted = [
            metadata.checkpoint_id
            for path, metadata in self._metadata.items()
            if (
                metadata.checkpoint_id not in driver.uncertain
                if metadata.epoch == head
                else self._born[path] < self._began[head]
            )
        ]
        written = (metadata for metadata in self._metadata.values() if metadata.epoch == head)
        own = [metadata.checkpoint_id for metadata in written if metadata.checkpoint_id not in driver.uncertain]
        if len(own) < min(retained, len(driver.completed)):
            yield f"checkpoints {own} of the last start are left, {retained} are to be retained"
        if len(counted) > retained:
            yield f"checkpoints {counted} are left, {retained} are to be retained"

    def _check_files(self, head: int, driver: Driver) -> Iterator[str]:
        refer = [frozenset(metadata.files) for metadata in self._metadata.values()]
        needed = frozenset[str]().union(*refer, *driver.uncertain.values())
        newest_uncertain = max(driver.uncertain, default=0)
        left = []
        for path in self._disk.files:
            file = StateFile.parse(path)
            if file is None or path in needed or (file.epoch == head and file.checkpoint_id <= newest_uncertain):
                continue
            if self._is_settled(path, head, driver, self._born[path]):
                left.append(path)
        if left:
            yield f"state files that no checkpoint refers to are left: {_some(left)}"

    def _check_claims(self, head: int) -> Iterator[str]:
        left = []
        for path in self._disk.files:
            directory, _, name = path.partition("/")
            if directory.startswith("chk-") and name == "_owner" and f"{directory}/_metadata" not in self._metadata:
                if self._born[path] < self._began[head]:
                    left.append(path)
        if left:
            yield f"claims of checkpoints that were never completed are left: {_some(left)}"

    def _is_settled(self, path: str, head: int, driver: Driver, written_in: int) -> bool:
        """Whether a state file of this name, written then, must be gone if no checkpoint refers to it."""
        file = StateFile.parse(path)
        if file is None or file.epoch > head:
            return False
        if file.epoch < head:
            return written_in < self._began[head]
        made = [(attempt, ids) for (epoch, attempt), ids in self._made.items() if epoch == head]
        told = [(a, number, step) for a, ids in made for number, step in ids.items() if number in driver.completed]
        if any(attempt > file.attempt for attempt, _, _ in told):  # with its first checkpoint an attempt cleans up
            return written_in < min(step for attempt, _, step in told if attempt > file.attempt)
        return any(attempt == file.attempt and number > file.checkpoint_id for attempt, number, _ in told)


def _number_of(claim: str) -> int:
    """The id of the checkpoint that a file `chk-N/_owner` claims."""
    return int(claim[len("chk-") : claim.index("/")])


TORN: Final = "/.midstream-"


def _some(paths: Sequence[str]) -> str:
    more = f", … ({len(paths)})" if len(paths) > SAMPLES else ""
    return ", ".join(paths[:SAMPLES]) + more
