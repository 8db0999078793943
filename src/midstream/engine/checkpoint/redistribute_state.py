"""Assigns a checkpoint's state to the subtasks of a graph.

It walks the new graph, vertex by vertex and operator by operator, including stateless ones, which may also have
finished. Pure functions; only handles are moved, so this costs no I/O, whatever the size of the state.

    rule        new subtask j of q gets, from old subtasks 0..p-1
    keyed       the chunks whose key groups intersect its own; the reader filters their rows
    split       with p == q its own rows, else every q-th of all rows, of each chunk apart
    union       everything
    broadcast   with p == q its own copy, else that of the first old subtask that was still running
    newest      with p == q its own version, else the newest of the old subtasks that were still running
    event time  the lowest watermark of the old subtasks: no row that any of them awaits is late

Only subtasks that had not finished have state to assign.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

from midstream.engine.checkpoint.changed_states import as_declared_now, check_fates, state_fates
from midstream.engine.checkpoint.compatibility import check_settings, dropped_state
from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState, SourcePosition
from midstream.engine.checkpoint.redistribute_channel_state import assign_channels
from midstream.engine.checkpoint.state_files import rule_of
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, StorageError, assert_never
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning, Vertex
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, PartHandle
from midstream.engine.state.state_parts import Redistribute


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a graph restores from a checkpoint."""

    tasks: Mapping[TaskId, tuple[OperatorSnapshot, ...]]
    """The state and event time of each task that gets some."""
    channels: Mapping[TaskId, tuple[ChannelState, ...]]
    """The rows in flight to each task, in the order in which they must be read."""
    finished: frozenset[TaskId]
    """The tasks that had finished, which are not run again."""
    sources: Mapping[str, SourcePosition]
    dropped: tuple[str, ...]
    """The uids whose state is dropped, since the graph no longer has them and this was allowed."""


def assign_state(metadata: CheckpointMetadata, graph: JobGraph, allow_dropped_state: bool = False) -> Assignment:
    """Assign the state of a checkpoint to the tasks of `graph`.

    Raises ConfigError if the graph contradicts the checkpoint: another max_parallelism, state of a missing operator, a
    source that is not one any more, another window or type of key or state, finished operators downstream of running
    ones.
    """
    if metadata.max_parallelism != graph.max_parallelism:
        raise ConfigError(
            f"checkpoint {metadata.checkpoint_id} was made with max_parallelism {metadata.max_parallelism}, but the "
            f"job has {graph.max_parallelism}: keys would belong to other key groups. Set max_parallelism="
            f"{metadata.max_parallelism}; or start from a savepoint that write_savepoint(…, like=…, max_parallelism="
            f"{graph.max_parallelism}) makes of one"
        )
    dropped = dropped_state(metadata, graph, allow_dropped_state)
    check_settings(metadata, graph)
    fates = state_fates(metadata, graph)
    check_fates(fates, metadata.checkpoint_id, allow_dropped_state)
    old = {op.uid: as_declared_now(op, fates) for op in metadata.operators}
    vertices = finished_vertices(old, graph)
    channels = assign_channels(metadata, graph, allow_dropped_state)
    finished = finished_tasks(old, graph, vertices, channels)
    return Assignment(
        tasks=_assign_tasks(old, graph, finished),
        channels=channels,
        finished=finished,
        sources={position.uid: position for position in metadata.sources if position.uid not in dropped},
        dropped=dropped,
    )


def _assign_tasks(
    old: Mapping[str, OperatorState], graph: JobGraph, finished: Set[TaskId]
) -> dict[TaskId, tuple[OperatorSnapshot, ...]]:
    tasks: dict[TaskId, tuple[OperatorSnapshot, ...]] = {}
    for vertex in graph.vertices:
        for spec in vertex.specs:
            op = old.get(spec.uid)
            if op is None:
                continue
            nothing = OperatorSnapshot(spec.uid)
            for subtask, snapshot in enumerate(assign_operator(op, vertex.parallelism, graph)):
                ref = TaskId(vertex.id, subtask)
                if snapshot != nothing and ref not in finished:
                    tasks[ref] = (*tasks.get(ref, ()), snapshot)
    return tasks


def assign_operator(old: OperatorState, parallelism: int, graph: JobGraph) -> list[OperatorSnapshot]:
    """Return the state of each of `parallelism` new subtasks."""
    by_name: dict[str, tuple[Redistribute, list[tuple[int, PartHandle]]]] = {}
    for i in old.running:
        for part in old.subtasks[i].parts:
            rule = rule_of(part, f"operator {old.uid!r}")
            first_rule, found = by_name.setdefault(part.name, (rule, []))
            if rule is not first_rule:
                raise StorageError(
                    f"operator {old.uid!r}: state {part.name!r} has two different rules in one checkpoint"
                )
            found.append((i, part))
    parts: list[list[PartHandle]] = [[] for _ in range(parallelism)]
    for name, (rule, found) in by_name.items():
        own = dict(found) if parallelism == old.parallelism else {}
        for subtask, handles in enumerate(_assign_part(name, rule, found, own, parallelism, graph.max_parallelism)):
            parts[subtask] += [handle for handle in handles if handle.chunks]
    in_us = min((old.subtasks[i].watermark_in_us for i in old.running), default=MIN_WATERMARK_US)
    out_us = min((old.subtasks[i].watermark_out_us for i in old.running), default=MIN_WATERMARK_US)
    return [
        OperatorSnapshot(old.uid, tuple(handles), watermark_in_us=in_us, watermark_out_us=out_us) for handles in parts
    ]


def _assign_part(
    name: str,
    rule: Redistribute,
    found: list[tuple[int, PartHandle]],
    own: Mapping[int, PartHandle],
    parallelism: int,
    max_parallelism: int,
) -> list[list[PartHandle]]:
    """Return the part of each new subtask. `own`: the part that a subtask had before, by subtask."""
    everything = tuple(chunk for _, part in found for chunk in part.chunks)
    stored = found[0][1].stored
    match rule:
        case Redistribute.KEYED:
            keyed: list[list[ChunkHandle]] = [[] for _ in range(parallelism)]
            for chunk in everything:
                if chunk.rows:  # subtasks with neighbouring key groups are neighbours
                    first = chunk.key_group_min * parallelism // max_parallelism
                    last = chunk.key_group_max * parallelism // max_parallelism
                    for subtask in range(first, last + 1):
                        keyed[subtask].append(chunk)
            return [[PartHandle(name, rule.value, tuple(chunks), stored=stored)] for chunks in keyed]
        case Redistribute.SPLIT:
            if own:
                return [[own[i]] if i in own else [] for i in range(parallelism)]
            distributed: list[list[PartHandle]] = [[] for _ in range(parallelism)]
            before = 0
            for chunk in everything:
                for index in range(chunk.rows)[:parallelism]:
                    handle = PartHandle(name, rule.value, (chunk,), index, parallelism, stored)
                    distributed[(before + index) % parallelism].append(handle)
                before += chunk.rows
            return distributed
        case Redistribute.UNION:
            return [[PartHandle(name, rule.value, everything, stored=stored)]] * parallelism
        case Redistribute.BROADCAST:
            return [[own.get(i, found[0][1])] for i in range(parallelism)]
        case Redistribute.NEWEST:
            newest = max((part for _, part in found), key=lambda part: [chunk.id for chunk in part.chunks])
            return [[own.get(i, newest)] for i in range(parallelism)]
        case _:
            assert_never(rule)


# ---- checks of the graph against the checkpoint ----------------------------


def has_finished(metadata: CheckpointMetadata, graph: JobGraph) -> bool:
    """Whether everything in `graph` had finished."""
    finished = {op.uid for op in metadata.operators if op.fully_finished}
    return all(spec.uid in finished for vertex in graph.vertices for spec in vertex.specs)


def finished_vertices(old: Mapping[str, OperatorState], graph: JobGraph) -> frozenset[int]:
    """Return the vertices of `graph` all of whose operators had finished.

    Raises ConfigError naming two operators if the graph contradicts this: a chain of which only some operators had
    finished, a finished vertex downstream of one that had not, or an operator some of whose keys had finished,
    downstream of a producer that had not and may still send such keys.
    """
    finished = frozenset(vertex.id for vertex in graph.vertices if _has_finished(old, vertex))
    for edge in graph.edges:
        if edge.source not in finished:
            _check_consumer(old, graph, edge, edge.target in finished)
    return finished


def finished_tasks(
    old: Mapping[str, OperatorState], graph: JobGraph, vertices: Set[int], in_flight: Collection[TaskId]
) -> frozenset[TaskId]:
    """Return the tasks of `graph` that had finished, which are not run again.

    Of `vertices`, which have finished, that is every subtask, at any parallelism. Of a vertex that had partly finished
    it is each subtask that had, with every operator of the vertex, if it is the same one (the parallelism has not
    changed) and nothing can reach it: it is not among those with rows `in_flight`, and its producers are not run again
    either.

    If the parallelism has changed, every subtask of such a vertex runs. A task also runs as a whole if it has an
    operator that is new, or of which this subtask had not finished. Nothing was still to reach a finished subtask,
    neither rows in flight nor from its producers, and its results were at its consumers or in flight to them. So only
    the work of the other subtasks remains, and any subtask may do it, wherever an edge now leads. But the state of a
    finished subtask is not restored (what it emitted at its end would be emitted again): no row of its keys may arrive
    again.
    """
    found: set[TaskId] = set()
    for vertex in graph.vertices:  # producers come before consumers
        for ref in (TaskId(vertex.id, i) for i in range(vertex.parallelism)):
            had_ended = ref not in in_flight and all(
                _had_ended(old.get(spec.uid), vertex, ref) for spec in vertex.specs
            )
            if vertex.id in vertices or (had_ended and found.issuperset(_producers(graph, ref))):
                found.add(ref)
    return frozenset(found)


def _producers(graph: JobGraph, ref: TaskId) -> Iterator[TaskId]:
    for edge in graph.inputs(ref.vertex):
        yield from (TaskId(edge.source, i) for i in graph.producers(edge, ref.subtask))


def _had_ended(op: OperatorState | None, vertex: Vertex, ref: TaskId) -> bool:
    """Whether this very subtask had finished."""
    return op is not None and op.parallelism == vertex.parallelism and ref.subtask in op.finished


def _has_finished(old: Mapping[str, OperatorState], vertex: Vertex) -> bool:
    shares = {spec.uid: _share(old.get(spec.uid)) for spec in vertex.specs}
    fully = [uid for uid, share in shares.items() if share == "fully"]
    others = [uid for uid, share in shares.items() if share != "fully"]
    if fully and others:
        raise ConfigError(
            f"operators {fully[0]!r} and {others[0]!r} run in one task, but in the checkpoint {fully[0]!r} had fully "
            f"finished and {others[0]!r} had {shares[others[0]]} finished. {_of_shifted_uids(old, vertex, fully[0])}Put "
            "rebalance() between them, or start from an older checkpoint"
        )
    return not others


_AUTOMATIC: Final = re.compile(r"([a-z_]+)-[0-9]+")
"""A uid that the program did not set: the kind of the operator, and its number among those of the kind."""


_MAY_HAVE_SHIFTED: Final = (
    " (a uid that the program does not set counts the operators of a kind, so it may have been another operator in the "
    "checkpoint: set the uids of the checkpoint with uid())"
)


def _of_shifted_uids(old: Mapping[str, OperatorState], vertex: Vertex, known: str) -> str:
    """Describe which automatic uids of a task have shifted since the checkpoint; "" if none has. `known`: a uid that
    the task had then.
    """
    now = [spec.uid for spec in vertex.specs]
    then = [uid for uid, op in old.items() if op.vertex == old[known].vertex]
    pairs = []
    for uid in now:
        kind = _AUTOMATIC.fullmatch(uid)
        left = [was for was in then if kind and was not in now and was.startswith(f"{kind[1]}-")]
        if uid not in then and left:
            then.remove(left[0])
            pairs.append(f"uid({left[0]!r}) on what is {uid!r} now")
    if not pairs:
        return ""
    return (
        "A uid that the program does not set counts the operators of a kind, so it shifts when one is added before it: to "
        f"continue with the operators of the checkpoint, call {', and '.join(pairs)}. Otherwise: "
    )


def _share(op: OperatorState | None) -> str:
    if op is None or not op.finished:
        return "not"
    return "fully" if op.fully_finished else "partly"


def _check_consumer(old: Mapping[str, OperatorState], graph: JobGraph, edge: Edge, has_finished: bool) -> None:
    """Check an edge whose producers continue to run."""
    fed, feeder = graph.vertices[edge.target].specs[0].uid, graph.vertices[edge.source].specs[-1].uid
    if has_finished:
        lost = "its rows would go nowhere"
    elif edge.partitioning is Partitioning.KEYED and _share(old.get(fed)) == "partly":
        lost = "its rows would not find the state of keys that had"
    else:
        return
    raise ConfigError(
        f"operator {fed!r} had {_share(old.get(fed))} finished in the checkpoint, but {feeder!r}, which feeds it now, "
        f"had {_share(old.get(feeder))} finished: {lost}. Give the fed operator a new uid, or start from an older "
        f"checkpoint{_MAY_HAVE_SHIFTED if _AUTOMATIC.fullmatch(fed) else ''}"
    )
