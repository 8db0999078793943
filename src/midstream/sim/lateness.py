"""Windows that take late rows for a while, and are emitted again with them.

What a window says again has all that it has said before, and more. So of the emissions that hold a row each is part of
the next larger one, and the largest is what the window has come to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.operators.base import Operator, OperatorContext, Output
from midstream.operators.window_base import WindowOperator
from midstream.sim.rows import SCHEMA, time_ms
from midstream.sim.timed import window, windows_of

LENIENT: Final[Mapping[str, str]] = {"late_window": "window", "late_slide": "slide", "late_session": "session"}
"""Kinds of nodes, and of which windows they are."""
ALLOWED_MS: Final = 30
_SIZES: Final = 100_000


def late_window(uid: str, kind: str) -> WindowOperator:
    return window(uid, LENIENT[kind], allowed_lateness=f"{ALLOWED_MS} ms")


class Stack(Operator):
    """One row for each row of each emission: `n` is the start of the window and how many rows the emission has."""

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        ids = batch.column("ids")
        sizes = ids.value_lengths().to_numpy()
        rows = ids.flatten()
        start_us = batch.column("window_start").view(pa.int64()).to_numpy()
        columns = [
            rows,
            pa.array(np.repeat(batch.column("key").to_numpy(), sizes)),
            pa.array(np.zeros(len(rows), dtype=np.int64)),
            pa.array(np.repeat(start_us, sizes)).view(pa.timestamp("us")),
            pa.array(np.repeat(start_us // 1000 * _SIZES + sizes, sizes)),
            pa.array([""] * len(rows), pa.large_string()),
        ]
        self._out.emit(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def wrong_emissions(
    uid: str,
    kind: str,
    got: Counter[int],
    keys: Mapping[int, int],
    said: Iterable[tuple[int, int, int]],
    late: Counter[int],
    *,
    never_late: bool,
) -> Iterator[str]:
    """`got`: the rows that the windows have got. `said`: (id, key, n) of rows as `Stack` makes them."""
    emissions: dict[tuple[int, int, int], Counter[int]] = {}
    for row, key, n in said:
        start_ms, size = divmod(n, _SIZES)
        emissions.setdefault((key, start_ms, size), Counter())[row] += 1
    of_row: dict[int, dict[int, list[Counter[int]]]] = {}
    """By row and start of the window (0 for all of a session): the emissions that hold it, the smallest first."""
    for (key, start_ms, size), rows in sorted(emissions.items(), key=lambda entry: entry[0][2]):
        if rows.total() != size:
            yield f"{uid}: the window of key {key} at {start_ms} ms has said {size} rows, these are {rows.total()}"
        for row in rows:
            if keys.get(row) != key:
                yield f"{uid}: row {row} is in a window of key {key}"
            at = 0 if kind == "session" else start_ms
            of_row.setdefault(row, {}).setdefault(at, []).append(rows)
    for row in sorted({*got, *of_row, *late}):
        found = of_row.get(row, {})
        for start_ms, chain in found.items():
            if any(not before < after for before, after in zip(chain, chain[1:], strict=False)):
                yield f"{uid}: what the windows of row {row} at {start_ms} ms have said is not always more than before"
            if never_late and len(chain) > 1:
                yield f"{uid}: a window of row {row} at {start_ms} ms is said again, and no row can be late"
        due = windows_of(kind, time_ms(row)) or [0]
        counts = [max((rows[row] for rows in found.get(start_ms, ())), default=0) for start_ms in due]
        surplus = counts[-1] + late[row] - got[row]
        elsewhere = sorted(found.keys() - set(due))
        if surplus or elsewhere or counts != sorted(counts) or (never_late and (late[row] or counts[0] < counts[-1])):
            yield (
                f"{uid} has got row {row} {got[row]} times; it is in its windows {counts} times, in others at "
                f"{elsewhere} ms, late {late[row]} times"
            )
