"""Commits on a slot: one call of a lane at a time, told to stop with its attempt, and closed behind it."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest

from in_memory import CountingIds, MemoryStorage, NeverRun, NoRows
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.core.interfaces import Done, Failed, Transport
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.engine.protocol import messages as m
from midstream.engine.worker.interfaces import SlotServices
from midstream.engine.worker.slot_committers import SlotCommitters
from standing_clock import StandingClock


class Pool:
    """A WallClockExecutor whose I/O runs when the test says so, in any order."""

    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def post(self, mail: Callable[[], None]) -> None:
        raise AssertionError("nothing is posted")

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> Any:
        raise AssertionError("nothing waits")

    def call_at(self, time_ms: int, mail: Callable[[], None]) -> Any:
        raise AssertionError("nothing waits")

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work.append((work, done))

    def run(self, at: int = 0) -> None:
        work, done = self.work[at]
        del self.work[at]
        try:
            outcome: Any = Done(work())
        except Exception as error:  # noqa: BLE001 - the outcome
            outcome = Failed(error)
        done(outcome)

    def run_all(self) -> None:
        while self.work:
            self.run()


class Noting(Sink):
    """Notes what its committers are asked, in `notes`; every copy of the sink has the same."""

    commits_on_slots = True
    notes: list[Any] = []
    contexts: list[CommitterContext] = []
    failure: BaseException | None = None
    has_committer = True

    def writer(self, context: WriterContext) -> SinkWriter:
        raise AssertionError("it only commits here")

    def committer(self, context: CommitterContext) -> Committer | None:
        self.contexts.append(context)
        return NotingCommitter(len(self.contexts) - 1) if self.has_committer else None


class NotingCommitter(Committer):
    def __init__(self, number: int) -> None:
        self.number = number

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        if Noting.failure is not None:
            raise Noting.failure
        Noting.notes.append((self.number, "commit", checkpoint_id, tuple(committables)))

    def abort(self, committables: Sequence[bytes]) -> None:
        Noting.notes.append((self.number, "abort", tuple(committables)))

    def close(self) -> None:
        Noting.notes.append((self.number, "close"))


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "notes", [])
    monkeypatch.setattr(Noting, "contexts", [])
    monkeypatch.setattr(Noting, "failure", None)
    monkeypatch.setattr(Noting, "has_committer", True)


GRAPH = JobGraph(
    (
        Vertex(0, 1, SourceSpec("read", "read", NoRows()), ()),
        Vertex(1, 1, None, (OperatorSpec("write", "to kafka", NeverRun(), Noting()),)),
    ),
    (Edge(0, 0, 1, Partitioning.FORWARD, pa.schema([("n", pa.int64())])),),
    16,
)


class World:
    def __init__(self, unpickle: Callable[[bytes], Any] = pickle.loads, root: str | None = "memory://here") -> None:
        self.pool = Pool()
        self.said: list[Any] = []
        self.storage = MemoryStorage()
        self.roots: list[str] = []
        services = SlotServices(
            clock=StandingClock(),
            executor=self.pool,
            ids=CountingIds(),
            transport=cast(Transport, None),
            open_storage=self._open,
            send=self.said.append,
            make_signal=threading.Event,
            unpickle=unpickle,
        )
        self.commits = SlotCommitters(services)
        self.commits.load(m.CommitSinks("job-a", pickle.dumps(GRAPH), root, epoch=1))

    def _open(self, root: str) -> MemoryStorage:
        self.roots.append(root)
        return self.storage

    def commit(self, request: int, lane: int = 0, checkpoint_id: int = 1, aborts: bool = False) -> None:
        self.commits.commit(m.Commit(request, "write", lane, checkpoint_id, (b"%d" % request,), aborts))


def test_the_sinks_are_loaded_once_and_commits_wait_for_that() -> None:
    world = World()
    world.commit(1)
    world.commit(2, lane=1)
    assert len(world.pool.work) == 1
    world.pool.run()
    assert len(world.pool.work) == 2, "both lanes at the same time"
    world.pool.run(at=1)
    world.pool.run()
    assert world.said == [m.CommitDone(2), m.CommitDone(1)]
    assert Noting.notes == [(0, "commit", 1, (b"2",)), (1, "commit", 1, (b"1",))], (
        "each lane has a committer of its own"
    )
    world.commit(3, checkpoint_id=2)
    world.pool.run_all()
    assert Noting.notes[-1] == (1, "commit", 2, (b"3",))
    assert world.roots == ["memory://here"]
    context = Noting.contexts[0]
    assert (context.uid, context.name, context.job_id, context.storage) == ("write", "to kafka", "job-a", world.storage)
    assert not context.stopped.is_set()


def test_a_job_without_checkpoints_has_no_storage() -> None:
    world = World(root=None)
    world.commit(1)
    world.pool.run_all()
    assert world.roots == [] and Noting.contexts[0].storage is None


def test_a_second_commit_of_a_lane_before_the_first_is_answered_is_a_bug_of_the_driver() -> None:
    world = World()
    world.commit(1)
    with pytest.raises(InvariantError, match="'write', lane 0: commit 2 arrives before commit 1 is answered"):
        world.commit(2)
    world.pool.run_all()
    world.commit(3)
    world.pool.run_all()
    assert world.said == [m.CommitDone(1), m.CommitDone(3)]


@pytest.mark.parametrize(
    ("error", "fatal"), [(OSError("away"), False), (ConfigError("no topic"), True)], ids=["io", "config"]
)
def test_an_error_is_answered_with_its_text(error: Exception, fatal: bool) -> None:
    world = World()
    Noting.failure = error
    world.commit(1)
    world.pool.run_all()
    (answer,) = world.said
    assert isinstance(answer, m.CommitFailed)
    assert answer.request == 1 and answer.summary == f"{type(error).__name__}: {error}"
    assert "Traceback" in answer.details and answer.fatal is fatal and not answer.stopped


def test_what_cannot_be_unpickled_fails_every_commit() -> None:
    def unpickle(data: bytes) -> Any:
        raise ModuleNotFoundError("No module named 'theirs'")

    world = World(unpickle)
    world.commit(1)
    world.pool.run_all()
    world.commit(2)
    world.pool.run_all()
    assert [(x.request, x.summary) for x in world.said] == [
        (n, "ModuleNotFoundError: No module named 'theirs'") for n in (1, 2)
    ]


def test_sinks_that_could_not_be_loaded_are_loaded_by_the_next_commit() -> None:
    failures = [OSError("the storage does not answer")]

    def unpickle(data: bytes) -> Any:
        if failures:
            raise failures.pop()
        return pickle.loads(data)

    world = World(unpickle)
    world.commit(1)
    world.commit(2, lane=1)
    world.pool.run_all()
    assert [(x.request, x.summary) for x in world.said] == [(n, "OSError: the storage does not answer") for n in (1, 2)]
    world.commit(3)
    world.commit(4, lane=1)
    world.pool.run_all()
    assert world.said[2:] == [m.CommitDone(3), m.CommitDone(4)]


def test_when_the_attempt_is_over_its_commits_are_told_to_stop_and_its_committers_closed() -> None:
    world = World()
    world.commit(1)
    world.pool.run_all()
    stopped = Noting.contexts[0].stopped
    world.commit(2, checkpoint_id=2)
    Noting.failure = OSError("told to stop")
    world.commits.end_attempt()
    assert stopped.is_set()
    world.pool.run()
    assert world.said[-1].request == 2 and world.said[-1].stopped
    Noting.failure = None
    world.commit(3, checkpoint_id=2)
    world.pool.run_all()
    assert Noting.notes == [(0, "commit", 1, (b"1",)), (0, "close"), (1, "commit", 2, (b"3",))]
    assert not Noting.contexts[1].stopped.is_set()
    world.commits.end_attempt()
    world.commits.end_attempt()
    world.pool.run_all()
    assert Noting.notes[-1] == (1, "close") and len(Noting.notes) == 4, "closed once"


def test_a_commit_that_had_not_begun_when_the_attempt_ended_sees_that_it_is_to_stop() -> None:
    world = World()
    world.commit(1)
    world.commits.end_attempt()
    world.pool.run_all()
    assert Noting.contexts[0].stopped.is_set()
    assert Noting.notes == [(0, "commit", 1, (b"1",)), (0, "close")]
    assert world.said == [m.CommitDone(1)], "it was committed all the same"


def test_an_abort_is_no_commit() -> None:
    world = World()
    world.commit(1, aborts=True)
    world.pool.run_all()
    assert Noting.notes == [(0, "abort", (b"1",))] and world.said == [m.CommitDone(1)]


def test_a_sink_that_has_nothing_to_commit_is_done_at_once() -> None:
    Noting.has_committer = False
    world = World()
    world.commit(1)
    world.commits.end_attempt()
    world.pool.run_all()
    assert world.said == [m.CommitDone(1)] and Noting.notes == []


def test_nothing_is_committed_for_a_coordinator_that_another_one_has_followed() -> None:
    world = World()
    world.storage.create("epochs/00000001", b"")
    world.commit(1)
    world.pool.run_all()
    world.storage.create("epochs/00000002", b"")
    world.commit(2, checkpoint_id=2)
    world.pool.run_all()
    assert Noting.notes == [(0, "commit", 1, (b"1",))]
    refused = world.said[-1]
    assert isinstance(refused, m.CommitFailed) and refused.request == 2
    assert "another coordinator has taken over" in refused.summary
