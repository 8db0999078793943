"""Sizes so small that small runs reach them: of pools, and of what the engine cuts, merges and compresses."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from midstream.engine.checkpoint import state_files
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.functions import process_operator
from midstream.engine.operators.windows import window_operator
from midstream.engine.state import (
    changelog,
    columnar,
    join_index,
    session_index,
    table_runs,
    table_state,
    timers,
    tombstones,
)

SHARE: Final = 0.1
"""The share of runs that have small chunks by chance."""


def are_small(seed: int) -> bool:
    """Whether a run of this seed has small chunks by chance."""
    return Random(f"chunks {seed}").random() < SHARE


def small_sizes(seed: int) -> list[tuple[Any, str, int]]:
    """Return the module, the constant and the value of each size, as the seed draws them."""
    random = Random(f"chunks {seed}")
    random.random()  # the first number is the one that `are_small` uses
    piece_rows = random.choice((1, 3, 10))
    return [
        (columnar, "OWN_CHUNK_ROWS", random.choice((1, 2, 5))),
        (columnar, "STAGED_ROWS", random.choice((1, 4, 16))),
        (columnar, "STAGED_RUNS", random.choice((2, 4))),
        (table_state, "PIECES_MAX", random.choice((1, 2, 8))),
        (changelog, "CHUNKS_MAX", random.choice((1, 2, 4))),
        (changelog, "LEAST_ROWS", random.choice((0, 4, 50))),
        (window_operator, "PIECE_ROWS", piece_rows),
        (window_operator, "SLICE_ROWS", 4 * piece_rows),
        (process_operator, "TIMERS_PER_SLICE", random.choice((1, 3))),
        (join_index, "RUN_ROWS", random.choice((2, 8, 32))),
        (state_files, "COMPRESS_FROM_BYTES", random.choice((1, 1000))),
        (timers, "STRETCH_BITS", random.choice((0, 12, 18))),
        (session_index, "RUNS_MAX", random.choice((0, 1, 3))),
        (table_runs, "RUN_ROWS", random.choice((2, 8, 32))),
        (table_runs, "RUNS_MAX", random.choice((0, 1, 3))),
        (table_runs, "TIDY_ROWS", random.choice((1, 4, 8192))),
        (tombstones, "VECTOR_ROWS_MIN", random.choice((0, 1, 4))),
    ]


def least_buffers(graph: JobGraph) -> int:
    """Return the buffers that every slot's tasks need at least, in the worst placement: all channels are remote."""
    needed = 0
    for edge in graph.edges:
        producers, consumers = graph.vertices[edge.source].parallelism, graph.vertices[edge.target].parallelism
        needed += consumers + 1 + 2 * producers
    return 2 * needed
