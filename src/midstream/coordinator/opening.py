"""What happens to the checkpoint directory before anything runs. For the I/O pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from midstream.checkpoint.assign import assign_state
from midstream.checkpoint.store import Opened, open_store
from midstream.coordinator.events import JobPlan
from midstream.core.errors import ConfigError
from midstream.core.seams import Storage


@dataclass(frozen=True, slots=True)
class OpenedStorage:
    storage: Storage
    opened: Opened
    dropped: tuple[str, ...]
    """uids whose state is left behind."""


def check_plan(plan: JobPlan) -> None:
    """Raises ConfigError."""
    if plan.restore is not None and plan.config.checkpoint_dir is None:
        raise ConfigError(
            f"cannot start from checkpoint {plan.restore!r}: the job has no checkpoint directory; "
            "pass checkpoint_dir=…, the directory that the checkpoint is in"
        )


def open_checkpoints(plan: JobPlan, open_storage: Callable[[str], Storage]) -> OpenedStorage:
    """Take over the directory and see that the graph can go on from the checkpoint asked for.

    Raises StorageError when the directory or the checkpoint cannot be used, ConfigError when the
    graph does not fit to it.
    """
    root = plan.config.checkpoint_dir
    assert root is not None
    storage = open_storage(root)
    opened = open_store(storage, root, plan.config.name, plan.job_id, plan.restore)
    dropped: tuple[str, ...] = ()
    if opened.restore is not None:
        dropped = assign_state(opened.restore, plan.graph, plan.allow_dropped_state).dropped
    return OpenedStorage(storage, opened, dropped)
