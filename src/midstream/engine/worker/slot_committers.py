"""Commits on this slot, for sinks with `commits_on_slots`. Each lane has one committer, and makes one call at a time.

When an attempt is over, its calls in progress are signalled to stop, and its committers are closed. The next commit of
a lane creates another committer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from midstream.engine.checkpoint.store import check_epoch
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Done, Failed, Signal, Storage
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink
from midstream.engine.protocol import messages as m
from midstream.engine.worker.failure_reports import commit_failed
from midstream.engine.worker.interfaces import SlotServices

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    job_id: str
    sinks: dict[str, tuple[str, Sink]]
    """The name and the sink of each operator that has one, by uid."""
    storage: Storage | None
    epoch: int


Work: TypeAlias = "Callable[[Done[_Loaded] | Failed], None]"
"""A call for the I/O pool, with the sinks, or the failure to load them."""


@dataclass(slots=True)
class _Lane:
    uid: str
    committer: Committer | None = None
    """The lane's committer. It is created, used and closed on the I/O pool."""
    queued_calls: deque[tuple[Work, Callable[[Done[None] | Failed], None]]] = field(default_factory=deque)
    """Calls for the I/O pool that wait for their turn, each with the callback for its outcome."""
    busy: bool = False
    """Whether one of the calls is on the I/O pool."""
    open_request: int | None = None
    """The request that has not been answered yet."""


class SlotCommitters:
    """The lanes of one slot."""

    def __init__(self, services: SlotServices) -> None:
        self._services = services
        self._sinks: m.CommitSinks | None = None
        self._loaded: Done[_Loaded] | Failed | None = None
        self._lanes: dict[tuple[str, int], _Lane] = {}
        """Every lane that has had a commit, by the sink's uid and the lane's number."""
        self._stopped = services.make_signal()
        """The signal for the calls of the current attempt, or of the next one, to stop."""

    def load(self, message: m.CommitSinks) -> None:
        """Load the sinks. The driver sends this message once.

        If that fails, for instance because the storage does not respond, the next commit loads them again.
        """
        self._sinks = message
        self._loaded = None

        def work() -> _Loaded:
            graph: JobGraph = self._services.unpickle(message.graph)
            specs = (spec for vertex in graph.vertices for spec in vertex.operators)
            sinks = {spec.uid: (spec.name, spec.sink) for spec in specs if spec.sink is not None}
            root = message.checkpoint_root
            return _Loaded(
                message.job_id, sinks, None if root is None else self._services.open_storage(root), message.epoch
            )

        def done(outcome: Done[_Loaded] | Failed) -> None:
            self._loaded = outcome
            for lane in self._lanes.values():
                self._start_next(lane)

        self._services.executor.submit(work, done)

    def commit(self, message: m.Commit) -> None:
        lane = self._lanes.setdefault((message.uid, message.lane), _Lane(message.uid))
        if lane.open_request is not None:
            raise InvariantError(
                f"sink {message.uid!r}, lane {message.lane}: commit {message.request} arrives before commit "
                f"{lane.open_request} is answered"
            )
        lane.open_request = message.request
        if isinstance(self._loaded, Failed) and self._sinks is not None:
            self.load(self._sinks)
        stopped = self._stopped
        lane.queued_calls.append(
            (partial(self._work, lane, message, stopped), partial(self._done, lane, message, stopped))
        )
        self._start_next(lane)

    def end_attempt(self) -> None:
        """Stop the calls in progress, and close all committers: the attempt is over, or the slot ends."""
        self._stopped.set()
        self._stopped = self._services.make_signal()
        for lane in self._lanes.values():
            if lane.committer is not None or lane.open_request is not None:
                lane.queued_calls.append((partial(self._close, lane), partial(self._closed, lane)))
                self._start_next(lane)

    def _start_next(self, lane: _Lane) -> None:
        if self._loaded is None or lane.busy or not lane.queued_calls:
            return
        work, done = lane.queued_calls.popleft()
        lane.busy = True

        def finished(outcome: Done[None] | Failed) -> None:
            lane.busy = False
            done(outcome)
            self._start_next(lane)

        self._services.executor.submit(partial(work, self._loaded), finished)

    def _done(self, lane: _Lane, message: m.Commit, stopped: Signal, outcome: Done[None] | Failed) -> None:
        lane.open_request = None
        if isinstance(outcome, Failed):
            self._services.send(commit_failed(message.request, outcome.error, stopped.is_set()))
        else:
            self._services.send(m.CommitDone(message.request))

    def _closed(self, lane: _Lane, outcome: Done[None] | Failed) -> None:
        if isinstance(outcome, Failed):
            _log.warning("sink %r: closing a committer", lane.uid, exc_info=outcome.error)

    # ---- on the I/O pool ----

    def _work(self, lane: _Lane, message: m.Commit, stopped: Signal, outcome: Done[_Loaded] | Failed) -> None:
        if isinstance(outcome, Failed):
            raise outcome.error
        loaded = outcome.value
        if lane.committer is None:
            name, sink = loaded.sinks[message.uid]
            lane.committer = sink.committer(CommitterContext(message.uid, name, loaded.job_id, loaded.storage, stopped))
        if lane.committer is None:
            return
        if message.aborts:
            lane.committer.abort(message.committables)
        else:
            if loaded.storage is not None:
                check_epoch(loaded.storage, loaded.epoch)
            lane.committer.commit(message.checkpoint_id, message.committables)

    def _close(self, lane: _Lane, _: Done[_Loaded] | Failed) -> None:
        committer, lane.committer = lane.committer, None
        if committer is not None:
            committer.close()
