"""Finds the checkpoint from which a job begins, and takes over its checkpoint directory. For the I/O pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.checkpoint.savepoint import copy_in
from midstream.engine.checkpoint.store import (
    LastStart,
    ListedCheckpoint,
    RetainedCheckpoint,
    StartState,
    begin,
    begun_since,
    check_owner,
    choose,
    jobs_of,
    list_checkpoints,
    load,
    next_checkpoint_id,
    publish,
    record_start,
    shows_committed,
    split_restore,
    take_over,
    was_rewound_past,
)
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.restore.distribute import NOTHING, DistributedState, distribute
from midstream.engine.coordinator.restore.newer_output import (
    Decision,
    Held,
    JobStart,
    decide,
    find_committed,
    roll_back,
)
from midstream.engine.core.errors import ConfigError, MidstreamError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.exchange.pool_minimum import check_pool
from midstream.engine.graph.job_graph import JobGraph

TRIES_MAX: Final = 10
"""The number of attempts to read the latest checkpoint of another job, which may complete newer ones meanwhile."""

HAD_FINISHED: Final = (
    "its input was read to the end or the job was drained, and all its output is committed, so nothing is run. To run it "
    "again, start it over (--fresh, fresh=True)"
)

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class OpenedStorage:
    storage: Storage
    opened: StartState
    state: DistributedState
    """The state with which the first attempt begins."""


def check_plan(plan: JobPlan) -> None:
    """Raise ConfigError if the settings of the plan contradict one another."""
    if plan.restore is not None and plan.config.checkpoint_dir is None:
        raise ConfigError(
            f"cannot start from checkpoint {plan.restore!r}: the job has no checkpoint directory; "
            "pass checkpoint_dir=…, the directory that the checkpoint is in, or that a savepoint is to be copied to"
        )
    if plan.restore is not None and plan.fresh:
        raise ConfigError(
            f"--from {plan.restore!r} and --fresh cannot be combined (restore_from= and fresh=): leave one of them out"
        )
    if plan.restore is None and plan.newer_output is not None:
        raise ConfigError(
            f"newer_output={plan.newer_output!r} applies only when resuming from a named checkpoint; name it (--from, "
            "restore_from=), or leave newer_output out"
        )
    check_pool(plan.graph, plan.config)


def find_start(plan: JobPlan, open_storage: Callable[[str], Storage]) -> JobStart:
    """Find the checkpoint from which the job would begin. Changes nothing. Raises as `open_checkpoints` does.

    This is done before the cluster is started, so that errors are reported early.
    """
    root = plan.config.checkpoint_dir
    if root is None:
        return JobStart(None, None, 0, frozenset())
    storage = open_storage(root)
    check_owner(storage, plan.config.name)

    def find(_: int) -> JobStart:
        start = _find(plan, root, storage, list_checkpoints(storage), open_storage)
        _check_fits(plan, start)
        return start

    return _while_a_job_runs(plan, open_storage, find)


def check_start(plan: JobPlan, start: JobStart, open_storage: Callable[[str], Storage]) -> tuple[str, ...]:
    """Check that the output of the job's sinks allows it to begin there, and return warnings. Changes nothing."""
    if plan.restore is None or start.starts_over:
        return start.warnings
    if start.metadata is not None:
        _check_committables(start.metadata, plan.graph)
    committed = find_committed(plan.graph, start.jobs, start.held)
    if _is_newer(committed, start):
        start = find_start(plan, open_storage)  # a job that is still running may have completed another one since
    return start.warnings + decide(plan, start, committed).warnings


def copies_in(plan: JobPlan) -> bool:
    """Return whether opening the directory copies a checkpoint from elsewhere, which takes long if it is large."""
    root = plan.config.checkpoint_dir
    return plan.restore is not None and root is not None and split_restore(plan.restore, root)[0] is not None


def describe_opening(plan: JobPlan) -> str:
    """Complete "waiting for …" while the directory is opened."""
    what = f"the checkpoint directory {plan.config.checkpoint_dir} to be opened"
    return f"{what}, and {plan.restore} to be copied to it" if copies_in(plan) else what


def open_checkpoints(plan: JobPlan, open_storage: Callable[[str], Storage]) -> OpenedStorage:
    """Take over the directory, and check that the graph can resume from the requested checkpoint.

    A checkpoint elsewhere, such as a savepoint, is copied into the directory and is this job's own from then on. Raises
    StorageError if the directory or the checkpoint cannot be used, and ConfigError if the graph does not fit to it, or
    if output is newer than it.
    """
    root = plan.config.checkpoint_dir
    assert root is not None
    storage = open_storage(root)
    taken = take_over(storage, root, plan.config.name, plan.job_id)

    def find(number: int) -> tuple[JobStart, Decision, CheckpointMetadata | None]:
        # the leader before this one commits nothing more that is newer than what is listed now
        start = _find(plan, root, storage, taken.listed, open_storage)
        decision = Decision(0)
        if plan.restore is not None and not start.starts_over:
            committed = find_committed(plan.graph, start.jobs, start.held)
            if start.elsewhere is not None and _is_newer(committed, start):
                start = _find(plan, root, storage, taken.listed, open_storage)  # see `check_start`
            decision = decide(plan, start, committed)
        if decision.counts_until is not None or start.elsewhere is not None:
            _check_fits(plan, start)  # before anything is changed
        if start.metadata is None or start.elsewhere is None:
            return start, decision, None
        # under another id each time: files of the previous try may exist
        next_id = next_checkpoint_id(storage, decision.newest_seen) + number
        try:
            copied = copy_in(open_storage(start.elsewhere), start.metadata, storage, taken.epoch, next_id)
        except StorageError as error:
            raise StorageError(f"{start.elsewhere}: {error}") from error
        return start, decision, copied

    start, decision, copied = _while_a_job_runs(plan, open_storage, find)
    first = next_checkpoint_id(storage, decision.newest_seen)
    if copied is not None and copied.checkpoint_id < first:  # an earlier coordinator has claimed that id meanwhile
        copied = msgspec.structs.replace(copied, checkpoint_id=first)
    taken = record_start(
        storage,
        taken,
        first=first,
        giving_up_after=decision.counts_until,
        fresh=start.starts_over,
        source=None if start.metadata is None else (copied or start.metadata).checkpoint_id,
        keeps=bool(decision.newer) and not decision.rolls_back,
        rolls_back=decision.rolls_back,
    )
    if start.metadata is not None:
        roll_back(decision, start.metadata)
    warnings = start.warnings + decision.warnings
    opened = begin(storage, taken, start.metadata if copied is None else None, decision.newest_seen, warnings)
    if copied is not None:
        publish(storage, copied)
        opened = replace(
            opened,
            next_checkpoint_id=max(copied.checkpoint_id + 1, opened.next_checkpoint_id),
            restore=copied,
            retained=(*opened.retained, RetainedCheckpoint(copied.checkpoint_id, frozenset(copied.files))),
        )
    return OpenedStorage(storage, opened, NOTHING if opened.restore is None else distribute(opened.restore, plan))


def _while_a_job_runs(plan: JobPlan, open_storage: Callable[[str], Storage], find: Callable[[int], Found]) -> Found:
    """Call `find`, with the number of calls before, until it does not fail because of a job that still runs.

    Such a job deletes its latest checkpoint as soon as it has newer ones; `find` is then called for these.
    """
    assert plan.config.checkpoint_dir is not None
    elsewhere, which = (None, "") if plan.restore is None else split_restore(plan.restore, plan.config.checkpoint_dir)
    if elsewhere is None or which != "latest":
        return find(0)
    storage = open_storage(elsewhere)
    for number in range(TRIES_MAX - 1):
        newest = _newest(storage)
        try:
            return find(number)
        except StorageError:
            if _newest(storage) == newest:
                raise
    return find(TRIES_MAX - 1)


def _newest(storage: Storage) -> int:
    return max((entry.checkpoint_id for entry in list_checkpoints(storage)), default=0)


def _is_newer(committed: Mapping[str, int | None], start: JobStart) -> bool:
    """Return whether a sink has committed output that is newer than the start."""
    after = 0 if start.metadata is None else start.metadata.checkpoint_id
    return any(found is not None and found > after for found in committed.values())


def _check_committables(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Have the sinks check that they can commit what the checkpoint holds: the job would retry it indefinitely."""
    sinks = {spec.uid: spec for vertex in graph.vertices for spec in vertex.operators if spec.sink is not None}
    for entry in metadata.committables:
        spec = sinks.get(entry.uid)
        if spec is not None and spec.sink is not None:
            try:
                spec.sink.check_committables(entry.checkpoint_id, entry.items)
            except MidstreamError as error:
                raise type(error)(f"sink {spec.name!r}: checkpoint {metadata.checkpoint_id}: {error}") from error


def _find(
    plan: JobPlan,
    root: str,
    storage: Storage,
    listed: Collection[ListedCheckpoint],
    open_storage: Callable[[str], Storage],
) -> JobStart:
    newest_known = max((entry.checkpoint_id for entry in listed), default=0)
    jobs = frozenset(jobs_of(storage).values()) - {plan.job_id}
    if plan.restore is None:
        if listed and not plan.fresh:
            raise ConfigError(
                f"{root} has checkpoints of this job, the newest is {newest_known}: resume from it with --from latest "
                '(start(restore_from="latest")), or start over with --fresh (start(fresh=True)), which deletes none of them before '
                "the new job has one of its own"
            )
        return JobStart(None, None, newest_known, jobs, starts_over=plan.fresh)
    elsewhere, which = split_restore(plan.restore, root)
    if elsewhere is not None:
        return _find_elsewhere(plan, storage, open_storage(elsewhere), elsewhere, which, listed, jobs)
    metadata = choose(listed, which, plan.config.name, storage)
    begun = begun_since(storage, _newest_usable(listed))
    if which != "latest":
        assert metadata is not None  # it is named
        return replace(_start_from(metadata, storage, listed, jobs), begun=begun)
    if begun is not None and begun.source is not None:
        found = _begun_again(plan, storage, listed, metadata, begun)
        text = f"the job was last started from checkpoint {begun.source} and has completed none since: it resumes from there"
        return replace(_start_from(found, storage, listed, jobs), warnings=(text,), begun=begun)
    if metadata is None:
        text = f"no checkpoint has been completed in {root} yet: starting from the beginning"
        return JobStart(None, None, newest_known, jobs, (text,))
    if begun is not None:
        if plan.resume:  # that start has committed nothing, so it is repeated
            text = (
                f"the job was started over since checkpoint {metadata.checkpoint_id} and has completed none since: starting from "
                "the beginning"
            )
            return JobStart(None, None, newest_known, jobs, (text,), starts_over=True)
        raise ConfigError(
            f"the job was started over since checkpoint {metadata.checkpoint_id}, the newest there is, and has completed none of "
            f"its own: --from {metadata.checkpoint_id} resumes from before that, --fresh starts over again"
        )
    return _start_from(metadata, storage, listed, jobs)


def _start_from(
    metadata: CheckpointMetadata, storage: Storage, listed: Collection[ListedCheckpoint], jobs: frozenset[str]
) -> JobStart:
    return JobStart(
        metadata,
        None,
        max(entry.checkpoint_id for entry in listed),
        jobs | {metadata.job_id},
        held=_held(listed, metadata),
        leaves_usable=_has_usable(listed, metadata) and not shows_committed(storage, listed, metadata),
    )


def _begun_again(
    plan: JobPlan,
    storage: Storage,
    listed: Collection[ListedCheckpoint],
    newest: CheckpointMetadata | None,
    begun: LastStart,
) -> CheckpointMetadata:
    """Return the checkpoint from which the last start resumed, if that start must be repeated.

    Raises ConfigError if the user has to choose whether it is, or if that checkpoint does not exist.
    """
    last = f"the job was last started from checkpoint {begun.source}"
    or_newest = (
        "--fresh starts over" if newest is None else f"--from {newest.checkpoint_id} resumes from the newest one"
    )
    if begun.source not in [entry.checkpoint_id for entry in listed]:
        raise ConfigError(
            f"{last}, which is not there, and has completed none since. If it was being copied from a savepoint, or from another "
            f"directory, start from that again (--from PATH); {or_newest}"
        )
    if not plan.resume and (newest is None or begun.source != newest.checkpoint_id):
        option = f" --newer-output {begun.newer_output}" if begun.newer_output else ""
        raise ConfigError(
            f"{last}, which is not the newest one, and has completed none since: --from {begun.source}{option} resumes from there, "
            f"{or_newest}"
        )
    found = choose(listed, str(begun.source), plan.config.name, storage)
    assert found is not None  # it is named
    return found


def _find_elsewhere(
    plan: JobPlan,
    own: Storage,
    storage: Storage,
    url: str,
    which: str,
    listed: Collection[ListedCheckpoint],
    jobs: frozenset[str],
) -> JobStart:
    try:
        if not storage.list(""):
            raise StorageError(
                "there is no such directory, or nothing is in it; start from latest, the number of a checkpoint, or the "
                "path of a checkpoint or a savepoint"
            )
        before = list_checkpoints(storage)  # a job that runs there may complete others meanwhile: see `_is_newer`
        metadata = load(storage, plan.config.name, which)
        theirs = jobs_of(storage)
        known = (*listed, *list_checkpoints(storage))
        newest_known = max(entry.checkpoint_id for entry in known)
    except StorageError as error:
        raise StorageError(f"{url}: {error}") from error
    if jobs_of(own).get(metadata.epoch) == metadata.job_id and was_rewound_past(own, metadata):
        raise StorageError(
            f"{url}: the job has gone back to a checkpoint before checkpoint {metadata.checkpoint_id} since, and its output from "
            "there on was rolled back, or never committed: the sinks no longer hold exactly the output that this one records"
        )
    return JobStart(
        metadata,
        url,
        newest_known,
        jobs.union(theirs.values(), {metadata.job_id}),
        held=_held((*listed, *before), metadata),
        begun=begun_since(own, _newest_usable(listed)),
        leaves_usable=_has_usable(listed, metadata)
        and not (shows_committed(own, listed, metadata) or shows_committed(storage, before, metadata)),
    )


def _newest_usable(listed: Collection[ListedCheckpoint]) -> CheckpointMetadata | None:
    return max((entry.metadata for entry in listed if entry.metadata), key=lambda m: m.checkpoint_id, default=None)


def _has_usable(listed: Iterable[ListedCheckpoint], start: CheckpointMetadata) -> bool:
    """Return whether a newer one of these checkpoints can be read, so that a later start may resume from it."""
    return any(entry.metadata is not None and entry.checkpoint_id > start.checkpoint_id for entry in listed)


def _held(listed: Iterable[ListedCheckpoint], start: CheckpointMetadata) -> Held:
    """Return what the checkpoints that are newer than `start` hold for sinks."""
    held: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    for entry in listed:
        for of in () if entry.metadata is None else entry.metadata.committables:
            if of.checkpoint_id > start.checkpoint_id:
                held[of.uid] += [(of.checkpoint_id, item) for item in of.items]
    return {uid: tuple(items) for uid, items in held.items()}


def _check_fits(plan: JobPlan, start: JobStart) -> None:
    if start.metadata is not None:
        try:
            assign_state(start.metadata, plan.graph, plan.allow_dropped_state)
        except StorageError as error:
            raise StorageError(f"{start.elsewhere}: {error}" if start.elsewhere else str(error)) from error
        _check_sources(start.metadata, plan.graph)


def _check_sources(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Have the sources check that they can continue: one that had ended is not called again, and would be silent."""
    positions = {position.uid: position for position in metadata.sources}
    finished = {operator.uid for operator in metadata.operators if operator.fully_finished}
    for spec in (vertex.source for vertex in graph.vertices if vertex.source is not None):
        found = positions.get(spec.uid)
        if found is None or found.position is None:
            continue
        where = f"source {spec.name!r}: checkpoint {metadata.checkpoint_id}"
        try:
            spec.source.check_resume(found.position)
        except MidstreamError as error:
            raise type(error)(f"{where}: {error}") from error
        had_ended = found.exhausted and spec.uid in finished
        if had_ended and spec.source.continues_past_end and not spec.source.bounded:
            raise ConfigError(
                f"{where}: the source had been read to its end, so nothing of it runs again, and now it does not end "
                "(watch=True, or no stop=); start over with --fresh, and where the source has start=, after what was read"
            )
