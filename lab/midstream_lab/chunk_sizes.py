"""The sizes of a run of the laboratory: those of `midstream.simulation.chunk_sizes`, of local disks, and of combining."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from midstream.engine.exchange import adaptive_combiner
from midstream.engine.worker import state_memory
from midstream.simulation.chunk_sizes import are_small, small_sizes


def of_local_disks(seed: int, sink_pause_s: float) -> list[tuple[Any, str, float]]:
    """Return how often state is moved to local disks, and how soon again after a failure.

    While all wait for a sink to take rows, nothing else happens: then that many steps are no sign of a stuck job.
    """
    random = Random(f"moving {seed}")
    return [
        (state_memory, "POLL_S", max(random.choice((0.0005, 0.005)), sink_pause_s / 200)),
        (state_memory, "RETRY_S", random.choice((0.0, 0.02))),
        (state_memory, "WRITES_MAX", random.choice((1, 2, 8))),
    ]


def small_combining(seed: int, rows_min: int) -> list[tuple[Any, str, int]]:
    """Return the sizes at which rows are combined. No run has batches as large as those for which it pays."""
    random = Random(f"combining {seed}")
    return [
        (adaptive_combiner, "ROWS_MIN", rows_min or random.choice((1, 1, 2, 5))),
        (adaptive_combiner, "REDUCTION_MIN", 1 if rows_min else random.choice((1, 1, 1, 2))),
        (adaptive_combiner, "PAUSE_MAX", random.choice((1, 1, 4))),
    ]


@contextmanager
def chunk_sizes_of(
    seed: int, *, small: bool, combined_rows_min: int, on_disk: bool = False, sink_pause_s: float = 0.0
) -> Iterator[None]:
    """Set the sizes of a run within the block, and restore the former ones however it ends."""
    with ExitStack() as stack:
        used = small or are_small(seed)
        sizes = small_sizes(seed) if used else ()
        disks = of_local_disks(seed, sink_pause_s) if on_disk else ()
        for module, name, value in (*small_combining(seed, combined_rows_min), *sizes, *disks):
            stack.enter_context(patch.object(module, name, value))
        yield
