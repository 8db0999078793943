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

from collections.abc import Iterator

import msgspec

from midstream.checkpoint.metadata import CheckpointMetadata, EdgeLayout
from midstream.core.errors import ConfigError
from midstream.core.keys import key_group_range
from midstream.graph.job_graph import Edge, JobGraph, Partitioning
from midstream.protocol.messages import ChannelState, TaskRef

_Ends = tuple[str, str, int, str | None]
"""uid of the last operator before an edge and of the first one behind it, input port, side output."""


def assign_channels(
    metadata: CheckpointMetadata, graph: JobGraph, allow_dropped_state: bool = False
) -> dict[TaskRef, tuple[ChannelState, ...]]:
    """For each task that gets any: the states to read before its channels, in order, with the edges of `graph`.

    Raises ConfigError when rows were in flight on an edge that is gone or cannot tell whom to give them.
    """
    there = {_ends_now(graph, edge): edge for edge in graph.edges}
    found: dict[TaskRef, list[ChannelState]] = {}
    for old in metadata.edges:
        states = _in_order(metadata, old)
        if not states:
            continue
        edge = there.get(_ends_then(metadata, old))
        if edge is None or edge.partitioning is Partitioning.BROADCAST:
            if allow_dropped_state:
                continue
            raise _nowhere(metadata, old, states, edge)
        had = metadata.vertices[old.target].parallelism
        for subtask, state in _deal(states, old, edge, had, graph):
            placed = msgspec.structs.replace(state, edge=edge.id)
            found.setdefault(TaskRef(edge.target, subtask), []).append(placed)
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
                raise ConfigError(
                    f"rows are in flight to {edge.target} that were keyed by other columns; start from a checkpoint "
                    "that was made before the keys were changed, and without rows being recovered"
                )
            low, high = max(first, own.start), min(behind, own.stop)
            if low >= high:
                continue
            narrower = (low, high) != (first, behind) or state.key_groups is not None or not same_keys
            yield subtask, msgspec.structs.replace(state, key_groups=(low, high)) if narrower else state


def _ends_now(graph: JobGraph, edge: Edge) -> _Ends:
    return graph.vertices[edge.source].specs[-1].uid, graph.vertices[edge.target].specs[0].uid, edge.port, edge.tag


def _ends_then(metadata: CheckpointMetadata, edge: EdgeLayout) -> _Ends:
    return metadata.vertices[edge.source].uids[-1], metadata.vertices[edge.target].uids[0], edge.port, edge.tag


def _nowhere(
    metadata: CheckpointMetadata, old: EdgeLayout, states: list[ChannelState], edge: Edge | None
) -> ConfigError:
    source, target = metadata.vertices[old.source].uids[-1], metadata.vertices[old.target].uids[0]
    rows = sum(segment.rows for state in states for segment in state.segments)
    why = "they are not connected like this any more" if edge is None else "that edge is a broadcast now"
    return ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds up to {rows} rows in flight from {source!r} to {target!r}, but {why} "
        "(or run in one task at this parallelism). Go on with the graph as it was, stop at an aligned checkpoint first, "
        "or give the rows up (--allow-dropped-state)"
    )
