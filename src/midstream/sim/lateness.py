"""Windows that take late rows for a while, and are emitted again with them.

What a window says again has all that it has said before, and more. So of the emissions that hold a row each is part of
the next larger one, and the largest is what the window has come to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.core.elements import MIN_WATERMARK_US
from midstream.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.operators.sliding_windows import PANE
from midstream.operators.window_base import END, PARTS, PROGRESS, WindowOperator
from midstream.operators.windows import LATE
from midstream.sim.around import Around
from midstream.sim.rows import SCHEMA, Outside, time_ms
from midstream.sim.timed import GAP_MS, SIZE_MS, SLIDE_MS, TUMBLING_MS, window
from midstream.state.parts import StatePart

LENIENT: Final[Mapping[str, str]] = {"late_window": "window", "late_slide": "slide", "late_session": "session"}
"""Kinds of nodes, and of which windows they are."""
ALLOWED_MS: Final = 30
_SIZES: Final = 100_000


def windows_of(kind: str, time_ms: int) -> list[int] | None:
    """Starts, in milliseconds, of the windows that a row belongs to, ascending; None where other rows decide."""
    if kind == "window":
        return [time_ms // TUMBLING_MS * TUMBLING_MS]
    if kind == "slide":
        last = time_ms // SLIDE_MS * SLIDE_MS
        return list(range(last - SIZE_MS + SLIDE_MS, last + 1, SLIDE_MS))
    return None


def late_window(uid: str, outside: Outside, kind: str) -> Window:
    made = window(uid, LENIENT[kind], allowed_lateness=f"{ALLOWED_MS} ms")
    return Window(outside, made, LENIENT[kind], ALLOWED_MS)


class Window(Around):
    """A window operator, whose late rows must be late, and whose state must be of windows that still take rows.

    How far its event time has come is known within bounds: further than what it was told last it cannot be.
    """

    def __init__(self, outside: Outside, inner: WindowOperator, kind: str, allowed_ms: int = 0) -> None:
        super().__init__(outside, inner)
        self._kind = kind
        self._allowed_us = allowed_ms * 1000
        self._begun_us = MIN_WATERMARK_US
        """Event time of no key is further."""
        self._reached_us = MIN_WATERMARK_US
        """Event time of every key is here at least."""
        self._forgotten_us = MIN_WATERMARK_US
        """What nothing can change any more then has been dropped: at each watermark, not at a restore."""
        self._late: Counter[int] = Counter()
        """Of the batch that is being processed: rows that were late."""
        self._out: Output
        self._context: OperatorContext

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        self._context = context
        super().open(context, self)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """As `Output`, for what the operator emits."""
        if tag == LATE:
            self._late.update(batch.column("id").to_pylist())
        self._out.emit(batch, tag)

    def watermark(self, watermark_us: int) -> None:
        raise AssertionError("windows make no watermarks")

    def idle(self, idle: bool) -> None:
        raise AssertionError("windows are never idle")

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if PROGRESS in parts:
            marks = parts[PROGRESS].table().column("watermark").to_pylist()
            self._begun_us = max(marks, default=MIN_WATERMARK_US)
            if len(marks) == len(self._context.key_groups):  # else some belonged to a subtask without a watermark
                self._reached_us = min(marks)
        super().restore(parts)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._late.clear()
        super().process(batch, port)
        for row, n in Counter(batch.column("id").to_pylist()).items():
            is_late, over_us = self._late[row] == n, self._over_us(time_ms(row))
            if is_late and over_us > self._begun_us:
                self._bug(
                    f"row {row} is late when event time is at most {self._begun_us}, its windows end at {over_us}"
                )
            if not is_late and over_us <= self._reached_us and self._kind != "session":
                self._bug(f"row {row} is not late, and event time is {self._reached_us}, its windows end at {over_us}")

    def _over_us(self, at_ms: int) -> int:
        """When a row of that time is late (of a session: if it is the only row)."""
        last_ms = GAP_MS + at_ms if self._kind == "session" else _last_end_ms(self._kind, at_ms)
        return last_ms * 1000 - 1 + self._allowed_us

    def advance_watermark(self, watermark_us: int) -> bool:
        self._begun_us = max(self._begun_us, watermark_us)
        is_done = super().advance_watermark(watermark_us)
        if is_done:
            self._reached_us = max(self._reached_us, watermark_us)
            self._forgotten_us = self._reached_us
        return is_done

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        snapshot, forgotten_us = super().snapshot(checkpoint_id), self._forgotten_us

        def later() -> SnapshotResult:
            made = snapshot.complete()
            if PARTS in made.parts:
                table = made.parts[PARTS].table()
                self._check_state(table, forgotten_us)
            return made

        return Snapshot(later=later)

    def _check_state(self, table: pa.Table, forgotten_us: int) -> None:
        if self._kind == "session":
            ends_us = table.column(END).to_numpy()
        else:
            panes = table.column(PANE).cast(pa.int64()).to_pylist()
            ends_us = np.array([_last_end_ms(self._kind, pane // 1000) * 1000 for pane in panes])
        over = ends_us - 1 + self._allowed_us <= forgotten_us
        if over.any():
            self._bug(f"event time is {forgotten_us}, and these windows are in state, which end at {ends_us[over][:5]}")

    def _bug(self, what: str) -> None:
        self._outside.world.bug(f"{self._context.uid}/{self._context.subtask}: {what}")


def _last_end_ms(kind: str, at_ms: int) -> int:
    """When the last window of a time ends."""
    starts = windows_of(kind, at_ms)
    assert starts is not None, kind
    return starts[-1] + (TUMBLING_MS if kind == "window" else SIZE_MS)


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
            if any(not before < after for before, after in pairwise(chain)):
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
