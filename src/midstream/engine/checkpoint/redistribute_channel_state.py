"""Assigns the rows in flight of a checkpoint to the consumers of a graph.

Rows are always assigned to consumers: what a producer had not sent follows what its consumer had received. An edge is
identified by its ends (`engine/checkpoint/edge_identity.py`), since its number may be different in the new graph.

    partitioning now   consumer j of q gets
    keyed              every state that can hold rows of its key groups; the reader filters them. States split by
                       an earlier rescale are merged first, so each segment is read once
    global             everything, if j is 0
    rebalance,forward  at the same parallelism its own states, else whole states in turn

Pure functions; only handles are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from midstream.engine.checkpoint.channel_state_references import (
    Piece,
    left_of,
    merge_shares,
    pieces_of,
    segments_left,
    sharing,
)
from midstream.engine.checkpoint.edge_identity import EdgeIdentity, edge_identities
from midstream.engine.checkpoint.metadata import CheckpointMetadata, EdgeLayout, columns_of, combined_of, layout_of
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning
from midstream.engine.protocol.messages import ChannelState


def assign_channels(
    metadata: CheckpointMetadata, graph: JobGraph, allow_dropped_state: bool = False
) -> dict[TaskId, tuple[ChannelState, ...]]:
    """Return, for each task that gets some, the states to read before its channels, in order, with the edges of
    `graph`.

    Raises ConfigError if rows were in flight on an edge that no longer exists, now has other columns, or does not
    determine their consumer.
    """
    there = dict(zip(edge_identities(*layout_of(graph)), graph.edges, strict=True))
    of_edge: dict[int, list[ChannelState]] = {}
    for state in metadata.channels:
        of_edge.setdefault(state.edge, []).append(state)
    found: dict[TaskId, list[ChannelState]] = {}
    for ends, old in zip(edge_identities(metadata.vertices, metadata.edges), metadata.edges, strict=True):
        if old.id not in of_edge:
            continue
        states = _in_order(of_edge[old.id])
        edge = there.get(ends)
        if edge is None or edge.partitioning is Partitioning.BROADCAST:
            if allow_dropped_state:
                continue
            raise _lost_edge_error(metadata, ends, states, edge)
        _check_columns(metadata, ends, old, edge)
        _check_combined(metadata, ends, old, states, combined_of(edge, graph))
        had = metadata.vertices[old.target].parallelism
        # A later checkpoint may still hold these rows. It refers only to its own consumers, and what these had received
        # (all of this) precedes what they had not. So everything becomes the consumers' input part.
        refs = [TaskId(edge.target, subtask) for subtask in range(graph.vertices[edge.target].parallelism)]
        for state in _distribute(states, old, edge, had, graph):
            found.setdefault(refs[state.consumer], []).append(state)
    return {ref: tuple(states) for ref, states in found.items()}


def _in_order(states: list[ChannelState]) -> list[ChannelState]:
    """Order states by consumer: for each, what it had received (in the recorded order), then what it had not."""
    by_consumer: dict[int, tuple[list[ChannelState], list[ChannelState]]] = {}
    for state in states:  # sorting them makes a key of each, and takes three times as long
        parts = by_consumer.get(state.consumer)
        if parts is None:
            parts = by_consumer[state.consumer] = [], []
        parts[state.is_output].append(state)
    return [state for consumer in sorted(by_consumer) for part in by_consumer[consumer] for state in part]


def _distribute(
    states: list[ChannelState], old: EdgeLayout, edge: Edge, had: int, graph: JobGraph
) -> Iterator[ChannelState]:
    """Yield what each consumer gets of everything on one edge, in order, as its input part."""
    target = graph.vertices[edge.target]
    parallelism = target.parallelism
    if not _same_keys(old, edge) and any(state.key_groups is not None for state in states):
        raise ConfigError(
            f"rows in flight to {target.specs[0].uid!r} were keyed by other columns and are still being recovered; keep "
            "the old keys until a checkpoint no longer holds such rows"
        )
    if edge.partitioning is Partitioning.KEYED:
        yield from _by_key(states, old, edge, had, parallelism, graph.max_parallelism)
        return
    for index, state in enumerate(states):
        if edge.partitioning is Partitioning.GLOBAL:
            subtask = 0
        else:
            subtask = state.consumer if had == parallelism else index % parallelism
        yield ChannelState(edge.id, state.producer, subtask, False, state.segments, state.skip)


def _same_keys(old: EdgeLayout, edge: Edge) -> bool:
    return old.partitioning == edge.partitioning.value == Partitioning.KEYED.value and old.keys == edge.keys


def _by_key(
    states: list[ChannelState], old: EdgeLayout, edge: Edge, had: int, parallelism: int, max_parallelism: int
) -> Iterator[ChannelState]:
    """Distribute states by key: filtered where they may hold other rows; all consumers together cover each key group
    once.
    """
    same_keys = _same_keys(old, edge)
    everything = 0, max_parallelism
    whose = _ranges(had, max_parallelism) if same_keys else [everything] * had
    owned = _ranges(parallelism, max_parallelism)
    shares: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
    for number, (state, pieces) in enumerate(_each_once(states, whose)):
        if pieces is None:  # nearly always; there may be 130,000 of them
            first_and_end = state.key_groups or whose[state.consumer]
            is_whole = same_keys and state.key_groups is None
            for subtask, groups in _share(first_and_end, owned, max_parallelism, shares):
                kept = None if is_whole and groups == first_and_end == owned[subtask] else groups
                yield ChannelState(edge.id, state.producer, subtask, False, state.segments, 0, kept, (), number)
            continue
        by_consumer: dict[int, list[Piece]] = {}
        for first, end, skip in pieces:
            for subtask, (low, high) in _share((first, end), owned, max_parallelism, shares):
                by_consumer.setdefault(subtask, []).append((low, high, skip))
        for subtask, mine in by_consumer.items():
            left = left_of(state, mine)
            if left is not None:
                segments, skip, groups, ahead = left
                is_all = same_keys and state.key_groups is None and groups == whose[state.consumer] == owned[subtask]
                kept = None if is_all and not ahead else groups
                yield ChannelState(edge.id, state.producer, subtask, False, segments, skip, kept, ahead, number)


def _share(
    key_groups: tuple[int, int],
    owned: list[tuple[int, int]],
    max_parallelism: int,
    known: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]],
) -> list[tuple[int, tuple[int, int]]]:
    """Return which consumers own which of these key groups; they are contiguous, and few ranges occur, so `known`
    caches them.
    """
    share = known.get(key_groups)
    if share is None:
        first, end = key_groups
        last = (end - 1) * len(owned) // max_parallelism
        consumers = range(first * len(owned) // max_parallelism, last + 1)
        share = known[key_groups] = [(i, (max(first, owned[i][0]), min(end, owned[i][1]))) for i in consumers]
    return share


def _ranges(parallelism: int, max_parallelism: int) -> list[tuple[int, int]]:
    """Return the key groups of each subtask: the first, and one past the last."""
    ranges = (key_group_range(subtask, parallelism, max_parallelism) for subtask in range(parallelism))
    return [(groups.start, groups.stop) for groups in ranges]


def _each_once(
    states: list[ChannelState], whose: list[tuple[int, int]]
) -> Iterator[tuple[ChannelState, list[Piece] | None]]:
    """Yield states in one order for all consumers that keeps the order of each old consumer; without pieces, nothing
    has been consumed.

    States that had been distributed before are ordered by their numbers, so that all consumers have them in the same
    order, and merged. They come after what an old consumer began with, and before what it has received since.
    """
    front: list[ChannelState] = []
    shared: list[ChannelState] = []
    later: list[ChannelState] = []
    distributed_to = None
    for state in states:
        if state.number is not None:
            shared.append(state)
            distributed_to = state.consumer
        else:
            (later if state.consumer == distributed_to else front).append(state)
    for sharers in chain(([state] for state in front), sharing(shared), ([state] for state in later)):
        state = sharers[0]
        if len(sharers) > 1:
            yield merge_shares(sharers, [whose[sharer.consumer] for sharer in sharers])
        else:
            yield state, pieces_of(state, whose[state.consumer]) if state.skip or state.ahead else None


def _check_columns(metadata: CheckpointMetadata, ends: EdgeIdentity, old: EdgeLayout, edge: Edge) -> None:
    now = columns_of(edge)
    if old.columns == now:
        return
    then = ", ".join(f"{name} {kind}" for name, kind in old.columns)
    raise ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds rows in flight from {ends.source!r} to {ends.target!r} with the columns "
        f"{then}; they are now {', '.join(f'{name} {kind}' for name, kind in now)}. Resume with the columns as they "
        "were, or stop the job with a savepoint first, which has no rows in flight"
    )


def _check_combined(
    metadata: CheckpointMetadata,
    ends: EdgeIdentity,
    old: EdgeLayout,
    states: list[ChannelState],
    now: tuple[tuple[str, str], ...],
) -> None:
    """Check that the operator still combines rows in the way in which the stored ones were combined."""
    if old.combined == now or not any(segment.combined for state in states for segment in segments_left(state)):
        return
    then, today = dict(old.combined), dict(now)
    what = next(what for what in (*then, *today) if then.get(what) != today.get(what))
    changed = f"{what} was {then.get(what)} then, and is {today.get(what)} now" if now else "they would not be now"
    raise ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds rows in flight from {ends.source!r} to {ends.target!r} that were "
        f"combined before they were sent; {changed}. Resume with the program as it was, or stop the job with a "
        "savepoint first, which has no rows in flight"
    )


def _lost_edge_error(
    metadata: CheckpointMetadata, ends: EdgeIdentity, states: list[ChannelState], edge: Edge | None
) -> ConfigError:
    rows = sum(segment.rows for state in states for segment in state.segments)
    why = "they are no longer connected in this way" if edge is None else "that edge is a broadcast now"
    return ConfigError(
        f"checkpoint {metadata.checkpoint_id} holds up to {rows} rows in flight from {ends.source!r} to {ends.target!r}, but {why} "
        "(or run in one task at this parallelism). Resume with the graph as it was, stop the job with a savepoint "
        "(which has no rows in flight), or drop the rows (--allow-dropped-state)"
    )
