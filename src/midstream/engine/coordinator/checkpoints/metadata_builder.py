"""Builds the metadata of a checkpoint from its acknowledgements. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import itemgetter

import msgspec

from midstream.engine.checkpoint.extents import files_of
from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    Committables,
    OperatorState,
    forms_of,
    layout_of,
    settings_of,
)
from midstream.engine.checkpoint.state_files import location_of
from midstream.engine.coordinator.checkpoints.pending_checkpoint import PendingCheckpoint
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import OperatorSpec
from midstream.engine.protocol.messages import ChannelState, CheckpointAck, OperatorSnapshot
from midstream.engine.state.state_parts import Redistribute


def committables_of(
    acks: Mapping[TaskId, CheckpointAck], names: Mapping[str, str], newest_completed: int
) -> tuple[Committables, ...]:
    """Return the committables that these acknowledgements hold and no completed checkpoint does.

    A task reports again what it prepared for older checkpoints that it does not know to be completed. What was prepared
    for checkpoints up to the newest completed one is in the metadata of that one.
    """
    items = []
    for ref, ack in acks.items():
        for op in ack.operators:
            items += [(e.checkpoint_id, ref, op.uid, e.committables) for e in op.earlier]
            items.append((ack.checkpoint_id, ref, op.uid, op.committables))
    return merged((item for item in items if item[0] > newest_completed), names)


def merged(
    items: Iterable[tuple[int, TaskId, str, tuple[bytes, ...]]], names: Mapping[str, str]
) -> tuple[Committables, ...]:
    """Merge committables into one entry per checkpoint and sink, in the order of checkpoints, of the graph, and of
    subtasks.

    `items`: (checkpoint, task, uid, committables). `names`: the operators' names by uid, in the order of the graph.
    """
    order = {uid: i for i, uid in enumerate(names)}
    found: dict[tuple[int, int], list[bytes]] = {}
    uids = list(names)
    for checkpoint_id, _, uid, committables in sorted(items, key=itemgetter(0, 1)):
        if committables:
            found.setdefault((checkpoint_id, order[uid]), []).extend(committables)
    return tuple(
        Committables(checkpoint_id, uids[i], names[uids[i]], tuple(entries))
        for (checkpoint_id, i), entries in sorted(found.items())
    )


def operator_states(
    plan: JobPlan, acks: Mapping[TaskId, CheckpointAck], finished: Set[TaskId], before: CheckpointMetadata | None
) -> tuple[OperatorState, ...]:
    """Return the state of every operator of the graph. `finished`: the tasks that had finished before the trigger.

    The state of a subtask that has finished is never restored, but it is kept as it was in the checkpoint `before` this
    one: for a source that was drained, it says how far the source had read.
    """
    old = {op.uid: op for op in before.operators} if before else {}
    states = []
    for vertex in plan.graph.vertices:
        refs = [TaskId(vertex.id, i) for i in range(vertex.parallelism)]
        ended = tuple(ref.subtask for ref in refs if ref in finished or acks[ref].finished)
        for spec in vertex.specs:
            settings = settings_of(spec.operator) if isinstance(spec, OperatorSpec) else ()
            forms = forms_of(spec.operator) if isinstance(spec, OperatorSpec) else ()
            earlier = _readable(old.get(spec.uid), dict(forms))
            subtasks = tuple(_snapshot(spec.uid, ref, acks, earlier) for ref in refs)
            states.append(
                OperatorState(spec.uid, spec.name, vertex.id, vertex.parallelism, subtasks, ended, settings, forms)
            )
    return tuple(states)


def _readable(before: OperatorState | None, forms: Mapping[str, bytes]) -> OperatorState | None:
    """Return an operator without the state that it declares otherwise now, as what is read in a checkpoint has one form."""
    changed = () if before is None else {part for part, form in before.forms if forms.get(part) != form}
    if before is None or not changed:
        return before
    kept = (
        msgspec.structs.replace(subtask, parts=tuple(part for part in subtask.parts if part.name not in changed))
        for subtask in before.subtasks
    )
    return msgspec.structs.replace(before, subtasks=tuple(kept))


def _snapshot(
    uid: str, ref: TaskId, acks: Mapping[TaskId, CheckpointAck], before: OperatorState | None
) -> OperatorSnapshot:
    """Return the state of one subtask of an operator, without committables, which are stored separately."""
    if ref in acks:
        of_task = (op for op in acks[ref].operators if op.uid == uid)
        return next((msgspec.structs.replace(op, committables=(), earlier=()) for op in of_task), OperatorSnapshot(uid))
    if before is not None and ref.subtask in before.finished and ref.subtask < len(before.subtasks):
        return before.subtasks[ref.subtask]
    return OperatorSnapshot(uid)


def channels_of(acks: Mapping[TaskId, CheckpointAck]) -> tuple[ChannelState, ...]:
    """Return what was in flight, task by task in the order of the graph."""
    return tuple(state for _, ack in sorted(acks.items(), key=itemgetter(0)) for state in ack.channels)


def refusal(operators: Iterable[OperatorState], channel_files: Set[str], readable: Set[str]) -> str:
    """Return why a checkpoint of these states could not be restored; "" if it can be.

    `readable`: the files that retained checkpoints hold or that were written for this one. Barriers name the newest
    completed checkpoint, so no task should refer to any other file; if one does, this refusal prevents a loss.
    """
    for op in operators:
        if op.finished and not op.fully_finished:
            for subtask in op.subtasks:  # what a finished one holds is not restored either
                for part in subtask.parts:
                    if part.redistribute == Redistribute.UNION.value:
                        return (
                            f"operator {op.name!r} has union state {part.name!r} and only some of its subtasks have "
                            "finished: the state of the others is not all of it"
                        )
        missing = files_of(op.subtasks) - readable
        if missing:
            return f"operator {op.name!r} refers to {min(missing)}, which is no longer kept"
    lost = channel_files - readable
    return f"a channel refers to {min(lost)}, which is no longer kept" if lost else ""


def build_metadata(
    plan: JobPlan,
    pending: PendingCheckpoint,
    epoch: int,
    completed_ms: int,
    operators: tuple[OperatorState, ...],
    committables: tuple[Committables, ...],
) -> CheckpointMetadata:
    """Build the metadata of this checkpoint, with the size and files of all state it refers to."""
    vertices, edges = layout_of(plan.graph)
    snapshots = [snapshot for op in operators for snapshot in op.subtasks]
    chunks = {location_of(c): c.length for s in snapshots for part in s.parts for c in part.extents}
    return CheckpointMetadata(
        job_name=plan.config.name,
        job_id=plan.job_id,
        checkpoint_id=pending.checkpoint_id,
        epoch=epoch,
        attempt=pending.attempt.number,
        created_ms=pending.created_ms,
        completed_ms=completed_ms,
        max_parallelism=plan.graph.max_parallelism,
        vertices=vertices,
        edges=edges,
        operators=operators,
        sources=pending.sources,
        committables=committables,
        state_bytes=sum(chunks.values()) + pending.in_flight.bytes,
        files=tuple(sorted(files_of(snapshots) | pending.in_flight.files)),
        channels=channels_of(pending.acks),
    )
