"""Three ways to split a batch by owner; rows per second of each. Run: python benchmarks/split_rows.py"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.exchange.result_partition import split_rows

ROWS = 131_072


def by_masks(batch: pa.RecordBatch, owners: npt.NDArray[np.int32], consumers: int) -> list[pa.RecordBatch]:
    return [batch.filter(pa.array(owners == consumer)) for consumer in range(consumers)]


def by_sort(batch: pa.RecordBatch, owners: npt.NDArray[np.int32], consumers: int) -> list[pa.RecordBatch]:
    order = np.argsort(owners.astype(np.uint8), kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=consumers))))
    gathered = batch.take(order)
    return [gathered.slice(starts[i], starts[i + 1] - starts[i]) for i in range(consumers)]


def main() -> None:
    i = np.arange(ROWS)
    batch = pa.RecordBatch.from_pydict(
        {"ts": (i // 50).astype("M8[ms]"), "key": ((i * 2654435761) & 0xFFFFFFFF) % 10000, "value": (i % 1000) * 0.5}
    )
    ways: dict[str, Callable[[pa.RecordBatch, npt.NDArray[np.int32], int], list[pa.RecordBatch]]] = {
        "one gather per consumer": partial(split_rows, buffer_bytes=32 * 2**10),
        "boolean masks": by_masks,
        "stable sort": by_sort,
    }
    groups = key_groups(batch, ("key",), 128)
    for consumers in (2, 8, 32):
        owners = subtask_of(groups, consumers, 128)
        for name, split in ways.items():
            split(batch, owners, consumers)
            start = time.perf_counter()
            for _ in range(30):
                split(batch, owners, consumers)
            rate = 30 * ROWS / (time.perf_counter() - start)
            print(f"{consumers:3} consumers  {name:24} {rate / 1e6:8.1f} M rows/s")


if __name__ == "__main__":
    main()
