"""Who gets the rows in flight back: channel state dealt out to the consumers of a graph.

Always to consumers: what a producer had not sent is theirs too, behind what they had received. An
edge is known by the operators at its ends, since its number may be another in the graph as it is now.

    partitioning now   consumer j of q gets
    keyed              every state that can hold rows of its key groups; the reader filters them
    global             everything, if j is 0
    rebalance,forward  with the parallelism it had what was its own, else whole states in turn

Pure functions; only handles are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from midstream.checkpoint.metadata import CheckpointMetadata, EdgeLayout, columns_of
from midstream.core.errors import ConfigError
from midstream.core.ids import TaskId
from midstream.core.keys import key_group_range
from midstream.graph.job_graph import Edge, JobGraph, Partitioning
from midstream.protocol.messages import ChannelState

_Ends = tuple[str, str, int, str | None, int]
"""uid of the last operator before an edge and of the first one behind it, input port, side output; which of those alike."""


def assign_channels(
    metadata: CheckpointMetadata, graph: JobGraph, allow_dropped_state: bool = False
) -> dict[TaskId, tuple[ChannelState, ...]]:
    """For each task that gets any: the states to read before its channels, in order, with the edges of `graph`.

    Raises ConfigError when rows were in flight on an edge that is gone, has other columns now, or cannot
    tell whom to give them.
    """
    there = dict(zip(_ends_now(graph), graph.edges, strict=True))
    found: dict[TaskId, list[ChannelState]] = {}
    for ends, old in zip(_ends_then(metadata), metadata.edges, strict=True):
        states = _in_order(metadata, old)
        if not states:
            continue
        edge = there.get(ends)
        if edge is None or edge.partitioning is Partitioning.BROADCAST:
            if allow_dropped_state:
                continue
            raise _nowhere(metadata, old, states, edge)
        _check_columns(metadata, old, edge)
        had = metadata.vertices[old.target].parallelism
        for subtask, state in _deal(states, old, edge, had, graph):
            # A later checkpoint may hold it still: it knows only its own consumers, and what lay with them then
            # (all of this) comes before what did not.
            placed = msgspec.structs.replace(state, edge=edge.id, consumer=subtask, is_output=False)
            found.setdefault(TaskId(edge.target, subtask), []).append(placed)
    return {ref: tuple(states) for ref, states in found.items()}


def _in_order(metadata: CheckpointMetadata, edge: EdgeLayout) -> list[ChannelState]:
    """By consumer, and for each: what it had received (in the order noted), then what it had not."""
    mine = [state for state in metadata.channels if state.edge == edge.id]
    return sorted(mine, key=lambda state: (state.consumer, state.is_output))


def _deal(
    states: list[ChannelState], old: EdgeLayout, edge: Edge, had: int, graph: JobGraph
) -> Iterator[tuple[int, ChannelState]]:
    parallelism = graph.vertices[edge.target].parallelism
    if edge.partitioning is Partitioning.KEYED:
        yield from _by_key(states, old, edge, had, parallelism, graph.max_parallelism)
        return
    for index, state in enumerate(states):
        if state.key_groups is not None:
            raise _was_keyed(edge)
        if edge.partitioning is Partitioning.GLOBAL:
            yield 0, state
        else:
            yield (state.consumer if had == parallelism else index % parallelism), state


def _by_key(
    states: list[ChannelState], old: EdgeLayout, edge: Edge, had: int, parallelism: int, max_parallelism: int
) -> Iterator[tuple[int, ChannelState]]:
    """A state is filtered where it may hold rows of others; the ranges of all consumers together cover it once."""
    same_keys = old.partitioning == Partitioning.KEYED.value and old.keys == edge.keys
    for subtask in range(parallelism):
        own = key_group_range(subtask, parallelism, max_parallelism)
        for state in states:
            first, behind = 0, max_parallelism
            if same_keys:
                whose = key_group_range(state.consumer, had, max_parallelism)
                first, behind = state.key_groups or (whose.start, whose.stop)
            elif state.key_groups is not None:
                raise _was_keyed(edge)
            low, high = max(first, own.start), min(behind, own.stop)
            if low >= high:
                continue
            narrower = (low, high) != (first, behind) or state.key_groups is not None or not same_keys
            yield subtask, msgspec.structs.replace(state, key_groups=(low, high)) if narrower else state


def _ends_now(graph: JobGraph) -> list[_Ends]:
    vertices = graph.vertices
    return _numbered(
        (vertices[e.source].specs[-1].uid, vertices[e.target].specs[0].uid, e.port, e.tag) for e in graph.edges
    )


def _ends_then(metadata: CheckpointMetadata) -> list[_Ends]:
    vertices = metadata.vertices
    return _numbered((vertices[e.source].uids[-1], vertices[e.target].uids[0], e.port, e.tag) for e in metadata.edges)


def _numbered(ends: Iterable[tuple[str, str, int, str | None]]) -> list[_Ends]:
    """A stream may be united with itself, by other keys: then two edges have the same ends."""
    seen: Counter[tuple[str, str, int, str | None]] = Counter()
    found = []
    for end in ends:
        found.append((*end, seen[end]))
        seen[end] += 1
    return found


def _check_columns(metadata: CheckpointMetadata, old: EdgeLayout, edge: Edge) -> None:
    now = columns_of(edge)
    if old.columns in ((), now):
        return
    then = ", ".join(f"{name} {kind}" for name, kind in old.columns)
    source, target = metadata.vertices[old.source].uids[-1], metadata.vertices[old.target].uids[0]
    raise ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds rows in flight from {source!r} to {target!r} with the columns "
        f"{then}; now they are {', '.join(f'{name} {kind}' for name, kind in now)}. Go on with the columns as they "
        "were, or stop it with a savepoint first, which has no rows in flight"
    )


def _was_keyed(edge: Edge) -> ConfigError:
    return ConfigError(
        f"rows are still being recovered on their way to {edge.target}, which were keyed in another way; go on with "
        "the keys as they were until a checkpoint holds none of them any more, then change the keys"
    )


def _nowhere(
    metadata: CheckpointMetadata, old: EdgeLayout, states: list[ChannelState], edge: Edge | None
) -> ConfigError:
    source, target = metadata.vertices[old.source].uids[-1], metadata.vertices[old.target].uids[0]
    rows = sum(segment.rows for state in states for segment in state.segments)
    why = "they are not connected like this any more" if edge is None else "that edge is a broadcast now"
    return ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds up to {rows} rows in flight from {source!r} to {target!r}, but {why} "
        "(or run in one task at this parallelism). Go on with the graph as it was, stop it with a savepoint "
        "(which has no rows in flight), or give the rows up (--allow-dropped-state)"
    )
