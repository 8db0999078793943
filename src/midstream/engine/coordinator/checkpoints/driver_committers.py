"""The committers of the job's sinks, one for each sink and lane. They are made and used on the I/O pool, one call at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from midstream.engine.checkpoint.metadata import Committables
from midstream.engine.checkpoint.store import check_epoch
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.restore.open_directory import OpenedStorage
from midstream.engine.core.interfaces import Signal, Storage
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink
from midstream.engine.operators.user_metrics import UserMetrics


class DriverCommitters:
    """Makes the committers when they are needed, and calls them. Once `stopped` is set, they end long calls."""

    def __init__(self, plan: JobPlan, stopped: Signal) -> None:
        self.sinks: dict[str, tuple[str, Sink]] = {
            spec.uid: (spec.name, spec.sink) for vertex in plan.graph.vertices for spec in vertex.operators if spec.sink
        }
        """The name and the sink of each transactional operator, by uid."""
        self._job_id = plan.job_id
        self._stopped = stopped
        self._storage: Storage | None = None
        self._epoch = 0
        self._made: dict[tuple[str, int], Committer | None] = {}
        """The committers made so far, by uid and lane; None if the sink has none."""
        self.metrics: dict[str, UserMetrics] = {uid: UserMetrics() for uid in self.sinks}
        """What the committers of each sink count."""

    def storage_opened(self, found: OpenedStorage) -> None:
        self._storage, self._epoch = found.storage, found.opened.epoch

    def stop(self) -> None:
        self._stopped.set()

    def commit(self, committables: Committables, lanes: Mapping[int, tuple[bytes, ...]]) -> None:
        """Commit the items of each lane. Raises what the committer raises, and FencedError."""
        for lane, items in lanes.items():
            committer = self._committer(committables.uid, lane)
            if committer is not None:
                if self._storage is not None:
                    check_epoch(self._storage, self._epoch)
                committer.commit(committables.checkpoint_id, items)

    def abort(self, committables: Committables, lanes: Mapping[int, tuple[bytes, ...]]) -> None:
        for lane, items in lanes.items():
            committer = self._committer(committables.uid, lane)
            if committer is not None:
                committer.abort(items)

    def take_to_close(self) -> Iterator[tuple[str, Committer]]:
        """Remove all committers, and yield those that have something to close, each with its sink's uid."""
        made, self._made = self._made, {}
        for (uid, _), committer in made.items():
            if committer is not None and type(committer).close is not Committer.close:
                yield uid, committer

    def _committer(self, uid: str, lane: int) -> Committer | None:
        if (uid, lane) not in self._made:
            name, sink = self.sinks[uid]
            context = CommitterContext(uid, name, self._job_id, self._storage, self._stopped, self.metrics[uid])
            self._made[uid, lane] = sink.committer(context)
        return self._made[uid, lane]
