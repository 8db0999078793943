"""The events of the window and exchange benchmarks, and their expected sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError

KEYS = 10_000
EVENTS_PER_MS = 100
WINDOW_MS = 10_000
VALUES = 1000
"""The number of distinct values of a column."""


class Events:
    """`count` events in `lanes` equal parts that cover the same time; call it with indices.

    `ts = (i mod count/lanes) * lanes // 100` ms, `key = (i * 2654435761 & 0xffffffff) % keys`, `value = (i % 1000) *
    0.5`. With several `columns`, column k (`value_1`, `value_2` …) is `((i + k) % 1000) * 0.5`.
    """

    def __init__(self, count: int, *, lanes: int = 2, keys: int = KEYS, columns: int = 1) -> None:
        if count <= 0 or count % lanes:
            raise ConfigError(
                f"{count:,} events cannot be distributed evenly to {lanes} subtasks; take a multiple of {lanes}"
            )
        self.count = count
        self.lanes = lanes
        self.keys = keys
        self.values = tuple("value" if k == 0 else f"value_{k}" for k in range(columns))
        self.schema = schema_of(
            [("ts", pa.timestamp("ms")), ("key", pa.int64()), *((name, pa.float64()) for name in self.values)]
        )

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        values = [((i + k) % VALUES) * 0.5 for k in range(len(self.values))]
        columns = [pa.array(self.ms(i).view("M8[ms]")), pa.array(self.key(i)), *map(pa.array, values)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def ms(self, i: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (i % (self.count // self.lanes)) * self.lanes // EVENTS_PER_MS

    def key(self, i: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return ((i * 2654435761) & 0xFFFFFFFF) % self.keys

    @property
    def value_sums(self) -> Sequence[float]:
        """Return the sum of each column over all events, which is exact: partial sums are multiples of 0.5 far below
        2**52.
        """
        cycles, rest = divmod(self.count, VALUES)
        full = cycles * VALUES * (VALUES - 1) // 2
        return [0.5 * (full + int(((np.arange(rest) + k) % VALUES).sum())) for k in range(len(self.values))]

    def pairs(self, *, slide_ms: int = WINDOW_MS, keys: int | None = None) -> int:
        """Count the pairs of a window and a key that have rows; `keys`: use `key` modulo this."""
        keys = keys or self.keys
        lane, panes = self.count // self.lanes, WINDOW_MS // slide_ms
        seen: deque[npt.NDArray[np.bool_]] = deque(maxlen=panes)
        """The keys in the panes of a window."""
        in_use = int(self.ms(np.array([lane - 1]))[0]) // slide_ms + 1
        begins = [min(lane, -(-pane * slide_ms * EVENTS_PER_MS // self.lanes)) for pane in range(in_use + panes)]
        found = 0
        for begin, end in pairwise(begins):
            seen.append(np.zeros(keys, np.bool_))
            for number in range(self.lanes):
                seen[-1][self.key(np.arange(begin, end) + number * lane) % keys] = True
            found += int(np.any(seen, axis=0).sum())
        return found
