"""The events of the window and exchange benchmarks, and what their sums must come to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

KEYS = 10_000
EVENTS_PER_MS = 50
WINDOW_MS = 10_000

SCHEMA = pa.schema([("ts", pa.timestamp("ms")), ("key", pa.int64()), ("value", pa.float64())])


class Events:
    """Event i of `count`, in two equal halves that cover the same time; call it with indices.

    `ts = (i mod count/2) // 50` ms, `key = (i * 2654435761 & 0xffffffff) % 10000`, `value = (i % 1000) * 0.5`.
    """

    def __init__(self, count: int) -> None:
        assert count > 0 and count % 2 == 0, count
        self.count = count

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        ts = (i % (self.count // 2)) // EVENTS_PER_MS
        key = ((i * 2654435761) & 0xFFFFFFFF) % KEYS
        value = (i % 1000) * 0.5
        return pa.RecordBatch.from_arrays(
            [pa.array(ts.view("M8[ms]"), SCHEMA.field("ts").type), pa.array(key), pa.array(value)], schema=SCHEMA
        )

    @property
    def value_sum(self) -> float:
        """The sum of `value` over all events: exact, for every partial sum is a multiple of 0.5 far below 2**52."""
        cycles, rest = divmod(self.count, 1000)
        return 0.5 * (cycles * 499_500 + rest * (rest - 1) // 2)

    @property
    def windows(self) -> int:
        """How many windows have rows."""
        return ((self.count // 2 - 1) // EVENTS_PER_MS) // WINDOW_MS + 1
