"""Computes how many buffers a slot needs at least, before anything runs.

A slot's tasks reserve, for each of their edges, the minimum that guarantees progress regardless of other tasks:

    output   one buffer for each consumer, and one more
    input    `WINDOW_BUFFERS_MIN` for each producer in another slot, and one for rows to recover

So an exchange between p subtasks and p others takes 3p buffers of each slot. All tasks share the other buffers of the
pool, and windows grow with them, up to `WINDOW_BUFFERS_MAX`.
"""

from __future__ import annotations

from typing import Final

from midstream.engine.core.config import BUFFER_BYTES_MIN, JobConfig
from midstream.engine.core.errors import ConfigError
from midstream.engine.graph.job_graph import JobGraph

WINDOW_BUFFERS_MAX: Final = 64
"""The largest credit window of a remote channel, and the bound of a subpartition's queue: enough for a batch in transit
and one being processed."""
WINDOW_BUFFERS_MIN: Final = 2
"""The smallest credit window: one buffer in transit or queued, and one of the batch being processed."""


def least_buffers(graph: JobGraph, slot: int) -> int:
    """The buffers that the slot needs which runs subtask `slot` of every vertex."""
    needed = 0
    for vertex in graph.vertices:
        if slot < vertex.parallelism:
            needed += sum(len(graph.consumers(edge, slot)) + 1 for edge in graph.outputs(vertex.id))
            for edge in graph.inputs(vertex.id):
                producers = graph.producers(edge, slot)
                needed += WINDOW_BUFFERS_MIN * (len(producers) - (slot in producers)) + 1
    return needed


def check_pool(graph: JobGraph, config: JobConfig) -> None:
    """Raises ConfigError when some slot's tasks need more buffers than its pool has."""
    needed = max(least_buffers(graph, slot) for slot in range(graph.slots))
    exchanges = sum(edge.partitioning.all_to_all for edge in graph.edges)
    if needed * config.buffer_bytes > config.pool_bytes:
        raise ConfigError(too_small(needed, config.buffer_bytes, config.pool_bytes, exchanges, graph.slots))


def too_small(needed: int, buffer_bytes: int, pool_bytes: int, exchanges: int = 0, parallelism: int = 0) -> str:
    """The message for a pool that has fewer than `needed` buffers. It names settings that would be enough."""
    smaller = buffer_bytes // 2
    while smaller > BUFFER_BYTES_MIN and 2 * needed * smaller > pool_bytes:
        smaller //= 2
    ways = []
    if smaller >= BUFFER_BYTES_MIN and needed * smaller <= pool_bytes:
        size = f"{smaller // 1024} KiB" if not smaller % 1024 else str(smaller)
        ways.append(f"set Tuning(buffer_size='{size}'), of which the same pool has more")
    ways.append(f"give each slot Tuning(pool_size='{-(-needed * buffer_bytes // 2**20)} MiB') or more")
    ways.append("lower the parallelism")
    of = ""
    if exchanges and parallelism > 1:
        several = "an exchange" if exchanges == 1 else f"{exchanges} exchanges"
        of = f", as each has a channel to and from every other one ({several}, up to {parallelism} subtasks)"
    return (
        f"pool_size: the tasks of one slot need at least {needed} buffers of {buffer_bytes} bytes "
        f"({needed * buffer_bytes} bytes){of}, the pool has {pool_bytes // buffer_bytes} ({pool_bytes} bytes); "
        f"{', or '.join(ways)}"
    )
