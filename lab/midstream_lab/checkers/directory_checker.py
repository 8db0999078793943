"""The rules for the contents of a checkpoint directory, at all times and when a run has settled.

A checkpoint that can be restored has all its files from the moment when its metadata exists until that is deleted.
Files that can never be needed must not be left over. These files may rightly be left:

- files of a checkpoint whose outcome is unknown to the coordinator: its metadata may still be written;
- files that a driver considered dead, or its slots, have written after the next driver had cleaned up;
- files that an abandoned slot has written after its attempt was cleaned up;
- files that are being written for a checkpoint when the job ends;
- files of which every deletion that the coordinator tries until the job ends is reported as failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from midstream.engine.checkpoint.directory_records import OwnerFile, unsealed
from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.engine.checkpoint.state_files import StateFile
from midstream.engine.checkpoint.store import is_metadata_path, is_superseded, jobs_of
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning, Vertex
from midstream.engine.graph.unaligned_edges import unaligned_edges
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.world import World
from midstream_lab.faulty_disk import FaultyDisk

SAMPLES: Final = 5
PASSES: Final = 8
"""The number of checkpoints after a refusal of the storage by which deletions that had failed have been retried."""
TRIES: Final = 4
"""How often a coordinator tries to delete a file before the job ends: once and again when it is not needed any more, and
once and again at the end. Only the next coordinator deletes it if all of these fail."""
CLAIM: Final = re.compile(r"chk-\d+/_owner")


def overtaken_where_none_may_be(metadata: CheckpointMetadata) -> list[str]:
    """Return complaints about rows in flight in a checkpoint, on edges on which barriers do not overtake."""
    if not metadata.channels:
        return []
    vertices = tuple(Vertex(vertex.id, vertex.parallelism, None, ()) for vertex in metadata.vertices)
    edges = tuple(
        Edge(edge.id, edge.source, edge.target, Partitioning(edge.partitioning), pa.schema([]))
        for edge in metadata.edges
    )
    may_be = unaligned_edges(JobGraph(vertices, edges, metadata.max_parallelism))
    wrong = sorted({state.edge for state in metadata.channels} - may_be)
    where = f"checkpoint {metadata.checkpoint_id}: rows in flight on edge"
    return [f"{where} {edge}, on which barriers do not overtake" for edge in wrong]


class DirectoryChecker:
    """The rules for one checkpoint directory. It is notified of every change of a file."""

    def __init__(self, world: World, disk: FaultyDisk) -> None:
        self._world = world
        self._disk = disk
        self._born: dict[str, int] = {}
        """The step in which each file was written, by path."""
        self._metadata: dict[str, CheckpointMetadata] = {}
        """The metadata of the existing checkpoints, by path."""
        self._began: dict[int, int] = {}
        """The step in which the coordinator of each epoch began, and from which it cleans up the files of others."""
        self._made: dict[tuple[int, int], dict[int, int]] = {}
        """The checkpoints by epoch and attempt, with the step in which the metadata of each was written."""
        self._claimed: dict[int, set[int]] = {}
        """The epochs that have claimed the id of each checkpoint."""
        self._taken: dict[int, frozenset[int]] = {}
        """The ids that were already claimed when the coordinator of each epoch began."""
        self._seen: dict[int, int] = {}
        """The newest checkpoint that existed when the coordinator of each epoch began; 0 if there was none."""
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
        elif is_metadata_path(path):
            metadata = self._metadata[path] = decode_metadata(data, path)
            self._check_author(metadata)
            self._made.setdefault((metadata.epoch, metadata.attempt), {})[metadata.checkpoint_id] = step
            lost = [file for file in metadata.files if file not in self._disk.files]
            if lost and not self._is_superseded(metadata):
                self._world.bug(f"checkpoint {metadata.checkpoint_id} refers to {_some(lost)}, which is not there")

    def _check_claim(self, checkpoint_id: int, epoch: int) -> None:
        """Check that a coordinator does not use an id that was claimed before it began: it may still be written to."""
        if checkpoint_id in self._taken.get(epoch, ()):
            self._world.bug(f"epoch {epoch} makes checkpoint {checkpoint_id}, an id that was claimed before it began")
        self._claimed.setdefault(checkpoint_id, set()).add(epoch)

    def _check_author(self, metadata: CheckpointMetadata) -> None:
        """Check that a coordinator has claimed the id under which it writes metadata, and that this metadata does not
        count if it is written after the next coordinator has begun.
        """
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
        with self._world.inspecting():
            return is_superseded(self._disk, metadata)

    # ---- when the run has settled

    def check_settled(self, drivers: Sequence[SimulatedDriver], retained: int) -> Iterator[str]:
        """Yield complaints about files that are left when the job has ended and nothing runs any more."""
        if not self._began:
            return
        with self._world.inspecting():
            jobs = jobs_of(self._disk)
        head = max(self._began)
        driver = next(driver for driver in drivers if driver.plan.job_id == jobs[head])
        steps = (step for (epoch, _), made in self._made.items() if epoch == head for step in made.values())
        if self._disk.refused_in > self._began[head] and sum(step > self._disk.refused_in for step in steps) < PASSES:
            return  # files that could not be deleted at the end would be found by the next coordinator
        if sum(step > self._began[head] for step in self._disk.undeleted_in) >= TRIES:
            return  # so would these
        if not driver.coordinator.status(
            driver.process.now_ms()
        ).had_finished:  # otherwise nothing has run, and nothing was cleaned up
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

    def _check_number(self, head: int, driver: SimulatedDriver, retained: int) -> Iterator[str]:
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
            yield f"checkpoints {own} of the last start are left, {retained} must be retained"
        if len(counted) > retained:
            yield f"checkpoints {counted} are left, {retained} must be retained"

    def _check_files(self, head: int, driver: SimulatedDriver) -> Iterator[str]:
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

    def _is_settled(self, path: str, head: int, driver: SimulatedDriver, written_in: int) -> bool:
        """Whether a state file of this name, written in this step, must be deleted if no checkpoint refers to it."""
        file = StateFile.parse(path)
        if file is None or file.epoch > head:
            return False
        if file.epoch < head:
            return written_in < self._began[head]
        made = [(attempt, ids) for (epoch, attempt), ids in self._made.items() if epoch == head]
        notified = [(a, number, step) for a, ids in made for number, step in ids.items() if number in driver.completed]
        if any(attempt > file.attempt for attempt, _, _ in notified):  # an attempt cleans up at its first checkpoint
            return written_in < min(step for attempt, _, step in notified if attempt > file.attempt)
        return any(attempt == file.attempt and number > file.checkpoint_id for attempt, number, _ in notified)


def _number_of(claim: str) -> int:
    """Return the id of the checkpoint that a file `chk-N/_owner` claims."""
    return int(claim[len("chk-") : claim.index("/")])


TORN: Final = "/.midstream-"


def _some(paths: Sequence[str]) -> str:
    more = f", … ({len(paths)})" if len(paths) > SAMPLES else ""
    return ", ".join(paths[:SAMPLES]) + more
