"""The commit to Kafka against a simulated transaction coordinator: every order of steps of two committers, every fault.

One lane, two checkpoints. A committer that is thought dead and the one in its place do the same commits, step by step in
any order; answers are lost before or after their effect, transactions expire, markers are forgotten, committers are
killed and start again. In no state that can be reached is a row in the topic twice, out of order, or lost.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from midstream.connectors.kafka.commit_protocol import CommitStep, KnownMarker, MarkedCommit
from midstream.engine.core.errors import InvariantError

CHECKPOINTS = (1, 2)
FAULTS_MAX = 3


class Fenced(Exception):
    """The broker's answer to a producer that is not the newest of its id."""


class FileGone(Exception):
    """What was staged is not there any more: the call fails, and the coordinator calls again."""


class Wrong(AssertionError):
    pass


@dataclass
class Cluster:
    """One transactional id, one topic, one group; and the checkpoint storage."""

    epoch: int = 0
    open: tuple[tuple[int, ...], int | None] | None = None
    """Rows (the checkpoint's id stands for its rows) and the marker of the transaction that is open."""
    log: tuple[int, ...] = ()
    marker: int | None = 0
    forgotten: bool = False
    note: int | None = None
    files: frozenset[int] = frozenset(CHECKPOINTS)

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced

    def init(self) -> int:
        self.open = None
        self.epoch += 1
        return self.epoch

    def produce(self, epoch: int, row: int) -> None:
        self.check(epoch)
        rows, marker = self.open or ((), None)
        self.open = (*rows, row), marker

    def mark(self, epoch: int, checkpoint_id: int) -> None:
        self.check(epoch)
        rows, _ = self.open or ((), None)
        self.open = rows, checkpoint_id

    def commit(self, epoch: int) -> None:
        self.check(epoch)
        assert self.open is not None
        rows, marker = self.open
        self.log += rows
        self.marker = self.marker if marker is None else marker
        self.open = None

    def expire(self) -> None:
        self.open = None
        self.epoch += 1


class Committer:
    """Commits one checkpoint after the other, until it is killed."""

    commit_class: type[MarkedCommit] = MarkedCommit

    def __init__(self) -> None:
        self.epoch = 0
        self.known = KnownMarker()
        self.left = list(CHECKPOINTS)
        self.call: MarkedCommit | None = None
        self.is_lost = False
        self._begin()

    def _begin(self) -> None:
        self.call = self.commit_class(self.known, self.left[0], self.left[0] - 1) if self.left else None

    def again(self, *, killed: bool) -> None:
        """The call has failed, and comes again; a process that was killed begins with what its checkpoint holds."""
        self.epoch, self.known = 0, KnownMarker()
        self.left = list(CHECKPOINTS) if killed else self.left
        self._begin()

    def step(self, cluster: Cluster, fault: str = "") -> None:
        assert self.call is not None
        at_storage = self.call.step in (CommitStep.LOOK_UP, CommitStep.RECORD, CommitStep.CLEAN)
        try:
            found = None if fault == "before" else self.do(cluster, self.call)
            if fault:
                raise Fenced  # for all that the client knows
        except FileGone:
            self.again(killed=False)
            return
        except Fenced:
            if at_storage:
                self.again(killed=False)
            else:
                self.call.failed()
        else:
            self.call.succeeded(found)
        self._ended(cluster)

    def _ended(self, cluster: Cluster) -> None:
        assert self.call is not None
        match self.call.step:
            case CommitStep.DONE:
                if self.left[0] not in cluster.log:
                    raise Wrong(f"{self.left[0]} is taken for committed")
                del self.left[0]
                self._begin()
            case CommitStep.MARKER_MISSING:
                if not cluster.forgotten:
                    raise Wrong("a marker is missed that is there")
                self.is_lost, self.call = True, None
            case CommitStep.TOO_EARLY:
                raise Wrong("in order, and yet too early")

    def do(self, cluster: Cluster, call: MarkedCommit) -> int | None:
        match call.step:
            case CommitStep.LOOK_UP:
                return cluster.note
            case CommitStep.FENCE:
                self.epoch = cluster.init()
            case CommitStep.READ:
                return cluster.marker
            case CommitStep.BEGIN:
                pass
            case CommitStep.PRODUCE:
                if call.checkpoint_id not in cluster.files:
                    raise FileGone
                cluster.produce(self.epoch, call.checkpoint_id)
            case CommitStep.MARK:
                cluster.mark(self.epoch, call.checkpoint_id)
            case CommitStep.COMMIT:
                cluster.commit(self.epoch)
            case CommitStep.RECORD:
                cluster.note = call.checkpoint_id
            case CommitStep.CLEAN:
                cluster.files -= {call.checkpoint_id}
        return None

    def copy(self) -> Committer:
        other = copy.copy(self)
        other.known, other.left, other.call = copy.copy(self.known), self.left.copy(), copy.copy(self.call)
        if other.call is not None:
            other.call.known = other.known
        return other

    def key(self) -> Any:
        call = self.call and (self.call.step, self.call.checkpoint_id, self.call.was_ours)
        return self.epoch, self.known.marker, len(self.left), call, self.is_lost


@dataclass
class World:
    committers: list[Committer]
    cluster: Cluster = field(default_factory=Cluster)
    faults: int = 0

    def key(self) -> Any:
        """Epochs count by which committer has the newest, not by their number."""
        cluster = self.cluster
        theirs = tuple((each.epoch == cluster.epoch, *each.key()[1:]) for each in self.committers)
        return (
            theirs,
            cluster.open,
            cluster.log,
            cluster.marker,
            cluster.note,
            cluster.files,
            cluster.forgotten,
            self.faults,
        )

    def check(self) -> None:
        log = self.cluster.log
        if list(log) != sorted(set(log)):
            raise Wrong(f"the topic has {log}")
        if lost := set(CHECKPOINTS) - self.cluster.files - set(log):
            raise Wrong(f"{lost} is neither in the topic nor staged")

    def next(self) -> list[World]:
        """All that may happen now."""
        found = []
        for i, committer in enumerate(self.committers):
            if committer.call is not None:
                found.append(self._after(lambda world, i=i: world.committers[i].step(world.cluster)))
                if self.faults < FAULTS_MAX:
                    for fault in ("before", "after"):
                        found.append(
                            self._after(lambda w, i=i, f=fault: w.committers[i].step(w.cluster, f), fault=True)
                        )
            if self.faults < FAULTS_MAX and not committer.is_lost:
                found.append(self._after(lambda world, i=i: world.committers[i].again(killed=True), fault=True))
        if self.faults < FAULTS_MAX:
            if self.cluster.open is not None:
                found.append(self._after(lambda world: world.cluster.expire(), fault=True))
            if self.cluster.marker is not None:
                found.append(self._after(_forget, fault=True))
        return found

    def _after(self, happens: Any, *, fault: bool = False) -> World:
        committers = [each.copy() for each in self.committers]
        world = World(committers, dataclasses.replace(self.cluster), self.faults + fault)
        happens(world)
        world.check()
        return world


def _forget(world: World) -> None:
    world.cluster.marker, world.cluster.forgotten = None, True


def explore(make: type[Committer], committers: int) -> dict[str, int]:
    """Every state that can be reached. Raises Wrong."""
    start = World([make() for _ in range(committers)])
    seen, left, ends = {start.key()}, [start], {"states": 0, "complete": 0, "lost": 0}
    while left:
        world = left.pop()
        ends["states"] += 1
        if all(each.call is None for each in world.committers):
            is_lost = any(each.is_lost for each in world.committers)
            ends["lost" if is_lost else "complete"] += 1
            if not is_lost and world.cluster.log != CHECKPOINTS:
                raise Wrong(f"all is committed, and the topic has {world.cluster.log}")
        for following in world.next():
            key = following.key()
            if key not in seen:
                seen.add(key)
                left.append(following)
    return ends


@pytest.mark.parametrize("committers", [1, 2])
def test_no_order_of_steps_and_no_fault_loses_or_doubles_a_row(committers):
    ends = explore(Committer, committers)
    assert ends["complete"] > 5 and ends["lost"] > 5, ends
    assert ends["states"] > (200, 10_000)[committers - 1], ends


# ---- known bugs, each of which must be found ----------------------------------------


class MarkerNotReadAgain(MarkedCommit):
    """Behind a fence it continues with what it knew before it."""

    def failed(self) -> None:
        marker = self.known.marker
        super().failed()
        self.stale_marker = marker

    def succeeded(self, found: int | None = None) -> None:
        super().succeeded(found)
        if self.step is CommitStep.READ and getattr(self, "stale_marker", None) is not None:
            self.known.marker = self.stale_marker
            self._decide(self.stale_marker)


class MarkerReadBeforeTheFence(MarkedCommit):
    def succeeded(self, found: int | None = None) -> None:
        match self.step:
            case CommitStep.LOOK_UP:
                super().succeeded(found)
                self.step = CommitStep.READ if self.step is CommitStep.FENCE else self.step  # type: ignore[comparison-overlap]  # which that has set
            case CommitStep.READ:
                self.early = found
                self.step = CommitStep.FENCE
            case CommitStep.FENCE:
                self.known.marker = self.early
                self._decide(self.early)
            case _:
                super().succeeded(found)

    def failed(self) -> None:
        super().failed()
        self.step = CommitStep.READ


class ProducerKeptAfterAFailure(MarkedCommit):
    def failed(self) -> None:
        marker = self.known.marker
        super().failed()
        if marker is not None:
            self.known.marker, self.step = marker, CommitStep.BEGIN


class LostAnswerTakenForDone(MarkedCommit):
    def failed(self) -> None:
        was = self.step
        super().failed()
        if was is CommitStep.COMMIT:
            self.known.marker, self.step = self.checkpoint_id, CommitStep.RECORD


class DeletedBeforeTheCommit(MarkedCommit):
    def succeeded(self, found: int | None = None) -> None:
        match self.step:
            case CommitStep.MARK:
                self.step = CommitStep.CLEAN
            case CommitStep.CLEAN if (
                not self.was_ours and self.known.marker is not None and self.known.marker < self.checkpoint_id
            ):
                self.step = CommitStep.COMMIT
            case CommitStep.RECORD:
                self.step = CommitStep.DONE
            case _:
                super().succeeded(found)


class NotedBeforeTheCommit(MarkedCommit):
    def succeeded(self, found: int | None = None) -> None:
        match self.step:
            case CommitStep.MARK:
                self.step = CommitStep.RECORD
            case CommitStep.RECORD if self.known.marker is not None and self.known.marker < self.checkpoint_id:
                self.step = CommitStep.COMMIT
            case _:
                super().succeeded(found)


class MissingMarkerTakenForNotCommitted(MarkedCommit):
    def _decide(self, marker: int | None) -> None:
        super()._decide(0 if marker is None and self.after == 0 else marker)


class MissingMarkerTakenForCommitted(MarkedCommit):
    def _decide(self, marker: int | None) -> None:
        super()._decide(self.checkpoint_id if marker is None else marker)


class MarkerOfTheCheckpointBeforeIsEnough(MarkedCommit):
    def _decide(self, marker: int | None) -> None:
        super()._decide(None if marker is None else marker + 1)


class OwnMarkerIsNotEnough(MarkedCommit):
    def _decide(self, marker: int | None) -> None:
        super()._decide(None if marker is None else max(marker - 1, self.after))


class MarkerOutsideOfTheTransaction(Committer):
    def do(self, cluster: Cluster, call: MarkedCommit) -> int | None:
        if call.step is CommitStep.MARK:
            cluster.check(self.epoch)
            cluster.marker = call.checkpoint_id
            return None
        return super().do(cluster, call)


class MarkerWrittenAfterTheTransaction(Committer):
    def do(self, cluster: Cluster, call: MarkedCommit) -> int | None:
        if call.step is CommitStep.MARK:
            cluster.check(self.epoch)
            cluster.commit(self.epoch)
            return None
        if call.step is CommitStep.COMMIT:
            cluster.check(self.epoch)
            cluster.marker = call.checkpoint_id
            return None
        return super().do(cluster, call)


def with_commit(bug: type[MarkedCommit]) -> type[Committer]:
    return type(bug.__name__, (Committer,), {"commit_class": bug})


BUGS = [
    *(
        with_commit(bug)
        for bug in (
            MarkerNotReadAgain,
            MarkerReadBeforeTheFence,
            ProducerKeptAfterAFailure,
            LostAnswerTakenForDone,
            DeletedBeforeTheCommit,
            NotedBeforeTheCommit,
            MissingMarkerTakenForNotCommitted,
            MissingMarkerTakenForCommitted,
            MarkerOfTheCheckpointBeforeIsEnough,
            OwnMarkerIsNotEnough,
        )
    ),
    MarkerOutsideOfTheTransaction,
    MarkerWrittenAfterTheTransaction,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_known_bug_is_found(bug):
    with pytest.raises(Wrong):
        explore(bug, committers=2)


# ---- what the walk through all states does not show ----------------------------------


def test_a_checkpoint_is_not_committed_before_the_one_before_it():
    call = MarkedCommit(KnownMarker(), checkpoint_id=7, after=5)
    for found in (None, None, 3):
        call.succeeded(found)
    assert call.step is CommitStep.TOO_EARLY


def test_a_producer_that_was_not_fenced_needs_no_second_look():
    known = KnownMarker()
    first = MarkedCommit(known, 1, 0)
    taken = []
    while not first.is_over:
        taken.append(first.step)
        first.succeeded(0 if first.step is CommitStep.READ else None)
    assert [step.name for step in taken] == [
        "LOOK_UP",
        "FENCE",
        "READ",
        "BEGIN",
        "PRODUCE",
        "MARK",
        "COMMIT",
        "RECORD",
        "CLEAN",
    ]
    assert MarkedCommit(known, 2, 1).step is CommitStep.BEGIN


@pytest.mark.parametrize(("checkpoint_id", "after"), [(3, 3), (3, 4), (3, -1)], ids=["same", "later", "negative"])
def test_impossible_orders_are_refused(checkpoint_id, after):
    with pytest.raises(InvariantError, match="is committed after"):
        MarkedCommit(KnownMarker(), checkpoint_id, after)
