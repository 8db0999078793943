"""Committers as an engine makes them, without one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from midstream.engine.operators.sink_api import CommitterContext
from midstream.engine.operators.user_metrics import UserMetrics

if TYPE_CHECKING:
    from midstream.engine.core.interfaces import Storage
    from midstream.engine.operators.sink_api import Sink


def committer_of(
    sink: Sink, job_id: str, *, uid: str = "out", storage: Storage | None = None, metrics: UserMetrics | None = None
) -> Any:
    """The committer of a job without slots, which nothing stops."""
    stopped = threading.Event()
    return sink.committer(CommitterContext(uid, f"sink {uid}", job_id, storage, stopped, metrics or UserMetrics()))
