"""What happens to the checkpoint directory before anything runs. For the I/O pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from midstream.checkpoint.assign import assign_state
from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.checkpoint.savepoint import copy_in
from midstream.checkpoint.store import (
    Opened,
    Retained,
    choose,
    list_checkpoints,
    load,
    open_store,
    publish,
    split_restore,
)
from midstream.coordinator.events import JobPlan
from midstream.coordinator.restoring import NOTHING, Dealt, deal
from midstream.core.errors import ConfigError, MidstreamError, StorageError
from midstream.core.seams import Storage
from midstream.graph.job_graph import JobGraph

TRIES_MAX: Final = 10
"""How often the latest checkpoint of another job is taken up anew because it has made newer ones meanwhile."""


@dataclass(frozen=True, slots=True)
class OpenedStorage:
    storage: Storage
    opened: Opened
    dealt: Dealt
    """What the first attempt goes on with."""


def check_plan(plan: JobPlan) -> None:
    """Raises ConfigError."""
    if plan.restore is not None and plan.config.checkpoint_dir is None:
        raise ConfigError(
            f"cannot start from checkpoint {plan.restore!r}: the job has no checkpoint directory; "
            "pass checkpoint_dir=…, the directory that the checkpoint is in, or that a savepoint is to be copied to"
        )


def copies_in(plan: JobPlan) -> bool:
    """Whether to open its directory means to copy a checkpoint from elsewhere, which takes as long as it is large."""
    root = plan.config.checkpoint_dir
    return plan.restore is not None and root is not None and split_restore(plan.restore, root)[0] is not None


def open_checkpoints(plan: JobPlan, open_storage: Callable[[str], Storage]) -> OpenedStorage:
    """Take over the directory and see that the graph can go on from the checkpoint asked for.

    One elsewhere, such as a savepoint, is copied here and is this job's own from then on. Raises
    StorageError when the directory or the checkpoint cannot be used, ConfigError when the graph does
    not fit to it.
    """
    root = plan.config.checkpoint_dir
    assert root is not None
    storage = open_storage(root)
    elsewhere, which = (None, None) if plan.restore is None else split_restore(plan.restore, root)
    opened = open_store(storage, root, plan.config.name, plan.job_id, which if elsewhere is None else None)
    if elsewhere is not None:
        assert which is not None
        opened = _copied_in(plan, open_storage(elsewhere), elsewhere, which, storage, opened)
    return OpenedStorage(storage, opened, NOTHING if opened.restore is None else deal(opened.restore, plan))


def check_restorable(plan: JobPlan, open_storage: Callable[[str], Storage]) -> None:
    """See that the plan can go on from its checkpoint, without changing anything. Raises as `open_checkpoints` does.

    In time: to say so after the cluster has been started would be late.
    """
    root = plan.config.checkpoint_dir
    if plan.restore is None or root is None:
        return
    elsewhere, which = split_restore(plan.restore, root)
    if elsewhere is None:
        storage = open_storage(root)
        metadata, _ = choose(list_checkpoints(storage), which, plan.config.name, storage)
        if metadata is not None:
            assign_state(metadata, plan.graph, plan.allow_dropped_state)
            _check_committables(metadata, plan.graph)
        return
    storage = open_storage(elsewhere)
    try:
        metadata, _ = _while_it_moves_on(storage, which, lambda _: _fitting(plan, storage, which))
        _check_committables(metadata, plan.graph)
    except StorageError as error:
        raise StorageError(f"{elsewhere}: {error}") from error


def _fitting(plan: JobPlan, elsewhere: Storage, which: str) -> tuple[CheckpointMetadata, tuple[str, ...]]:
    """The checkpoint elsewhere, and warnings."""
    if not elsewhere.list(""):
        raise StorageError(
            "there is no such directory, or nothing is in it; start from latest, the number of a checkpoint, or the "
            "path of a checkpoint or a savepoint"
        )
    metadata, warnings = load(elsewhere, plan.config.name, which)
    assign_state(metadata, plan.graph, plan.allow_dropped_state)
    return metadata, warnings


def _while_it_moves_on(
    elsewhere: Storage, which: str, work: Callable[[int], tuple[CheckpointMetadata, tuple[str, ...]]]
) -> tuple[CheckpointMetadata, tuple[str, ...]]:
    """Work on the latest checkpoint of a job that may be running: it drops that one as soon as it has newer ones.

    `work` gets how often it was called before, and gives a checkpoint, and warnings about any skipped.
    """
    for number in range(TRIES_MAX):
        newest = _newest(elsewhere)
        has_moved_on = False
        try:
            found = work(number)
            has_moved_on = bool(found[1]) and _newest(elsewhere) != newest  # what was skipped may only be gone
        except StorageError:
            if which != "latest" or number + 1 == TRIES_MAX or _newest(elsewhere) == newest:
                raise
            continue
        if not has_moved_on:
            break
    return found


def _newest(storage: Storage) -> int:
    return max((entry.checkpoint_id for entry in list_checkpoints(storage)), default=0)


def _check_committables(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Have the sinks see that they can commit what the checkpoint holds: trying would not end, if they cannot."""
    sinks = {spec.uid: spec for vertex in graph.vertices for spec in vertex.operators if spec.sink is not None}
    for entry in metadata.committables:
        spec = sinks.get(entry.uid)
        if spec is not None and spec.sink is not None:
            try:
                spec.sink.check_committables(entry.checkpoint_id, entry.items)
            except MidstreamError as error:
                raise type(error)(f"sink {spec.name!r}: checkpoint {metadata.checkpoint_id}: {error}") from error


def _copied_in(plan: JobPlan, elsewhere: Storage, url: str, which: str, storage: Storage, opened: Opened) -> Opened:
    def copy(number: int) -> tuple[CheckpointMetadata, tuple[str, ...]]:
        metadata, warnings = _fitting(plan, elsewhere, which)  # before anything is copied
        # under another id each time: files of the time before may be there
        return copy_in(elsewhere, metadata, storage, opened.epoch, opened.next_checkpoint_id + number), warnings

    try:
        copied, warnings = _while_it_moves_on(elsewhere, which, copy)
    except StorageError as error:
        raise StorageError(f"{url}: {error}") from error
    publish(storage, copied)
    return replace(
        opened,
        next_checkpoint_id=copied.checkpoint_id + 1,
        restore=copied,
        retained=(*opened.retained, Retained(copied.checkpoint_id, frozenset(copied.files))),
        warnings=opened.warnings + warnings,
    )
