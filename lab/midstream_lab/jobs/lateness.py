"""Windows with allowed lateness, which are emitted again with late rows.

Each emission of a window contains all rows of the earlier ones, and more. So each emission with a certain row is part
of the next larger one, and the largest is the final contents of the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import is_list_array, to_list
from midstream.engine.core.elements import MIN_WATERMARK_US, Assigned
from midstream.engine.core.key_groups import key_groups
from midstream.engine.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult, never_stored
from midstream.engine.operators.windows.pane_windows import PANE
from midstream.engine.operators.windows.window_combiner import ROWS
from midstream.engine.operators.windows.window_factory import LATE
from midstream.engine.operators.windows.window_operator import PARTS, PROGRESS, WindowOperator
from midstream.engine.operators.windows.window_specs import END, IS_EARLY, START, WINDOW_END, WINDOW_START
from midstream.engine.state.state_parts import KEY_GROUP, StatePart
from midstream_lab.jobs.days import DAYS, Days
from midstream_lab.jobs.recorded_rows import SCHEMA, Int64s, Outside, time_ms
from midstream_lab.jobs.timed import (
    GAP_MS,
    GAPS_SCHEMA,
    HIGHEST,
    IDS,
    LOWEST,
    ROW_IDS,
    SIZE_MS,
    SLIDE_MS,
    TUMBLING_MS,
    due_us,
    gap_ms,
    window,
    window_of_gaps,
    window_of_rows,
)
from midstream_lab.jobs.window_reference import Emission, WindowReference, difference, wrong_marks
from midstream_lab.jobs.wrapped_operator import Around

OF_ROWS: Final[Mapping[str, str]] = {"rows_window": "window", "rows_slide": "slide", "rows_session": "session"}
"""Those whose windows are given to a function with all their rows."""
OWN_GAPS: Final = "gap_session"
"""The kind whose sessions have gaps from a column."""
LENIENT: Final[Mapping[str, str]] = {
    "late_window": "window",
    "late_slide": "slide",
    "late_session": "session",
    **OF_ROWS,
    OWN_GAPS: "session",
    "early_window": "window",
    "early_slide": "slide",
    **{kind: kind for kind in DAYS},
}
"""The kinds of nodes with allowed lateness, and their kinds of windows."""
ALLOWED_MS: Final = 30
_SIZES: Final = 100_000
_PANE_US: Final[Mapping[str, int]] = {"window": 1000 * TUMBLING_MS, "slide": 1000 * SLIDE_MS}


def windows_of(kind: str, time_ms: int) -> list[int] | None:
    """Return the starts, in milliseconds, of the windows of a row, ascending; None if they depend on other rows."""
    if kind == "window":
        return [time_ms // TUMBLING_MS * TUMBLING_MS]
    if kind == "slide":
        last = time_ms // SLIDE_MS * SLIDE_MS
        return list(range(last - SIZE_MS + SLIDE_MS, last + 1, SLIDE_MS))
    if kind in DAYS:
        return [start_us // 1000 for start_us, _ in DAYS[kind].windows(time_ms * 1000)]
    return None


def checked_window(uid: str, outside: Outside, kind: str, *, combines: bool) -> Window:
    """Return the window operator of a node of this kind. `combines`: whether no node reads its late rows."""
    allowed_ms = ALLOWED_MS if kind in LENIENT else 0
    of = LENIENT.get(kind, kind)
    if kind == OWN_GAPS:
        return WindowOfGaps(outside, window_of_gaps(uid, f"{allowed_ms} ms"), of, allowed_ms)
    if kind in DAYS:
        return WindowOfDays(outside, DAYS[kind].operator(uid, allowed_ms), of, allowed_ms)
    if kind in OF_ROWS:
        return Window(outside, window_of_rows(uid, of, f"{allowed_ms} ms"), of, allowed_ms)
    return Window(outside, window(uid, of, f"{allowed_ms} ms", combines=combines), of, allowed_ms)


class Window(Around):
    """A window operator, compared with a `WindowReference` at every batch, watermark and snapshot."""

    def __init__(self, outside: Outside, inner: WindowOperator, kind: str, allowed_ms: int = 0) -> None:
        super().__init__(outside, inner)
        self._kind = kind
        self._allowed_us = allowed_ms * 1000
        self._forgotten_us = MIN_WATERMARK_US
        """The event time for which everything that cannot change any more has been dropped. A restore drops nothing."""
        self._late: Counter[int] = Counter()
        """The late rows of the batch that is being processed."""
        self._late_combined = 0
        """How many rows of it were late if it was combined."""
        self._emitted: Counter[Emission] = Counter()
        """The windows emitted during this batch, or since the last watermark for which everything had fired."""
        self._is_firing = False
        self._fired_end_us: int | None = None
        """The end of the last window emitted since the firing began; None while rows are processed."""
        self._reference: WindowReference
        self._out: Output
        self._context: OperatorContext

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        self._context = context
        self._reference = self._new_reference(context.key_groups)
        super().open(replace(context, stored_bytes=never_stored), self)  # it checks the tables of all chunks

    def _new_reference(self, key_groups: range) -> WindowReference:
        return WindowReference(self._kind, self._allowed_us, key_groups)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """Record and forward the output of the operator, as its `Output`."""
        if tag == LATE and ROWS in batch.schema.names:
            self._late_combined += batch.num_rows
        elif tag == LATE:
            self._late.update(to_list(batch.column("id")))
        else:
            if LOWEST in batch.schema.names and not _bounds_are_right(batch, "ids", LOWEST, HIGHEST):
                self._bug("it emits a window whose lowest or highest id is not that of its rows")
            self._check_order(batch.column(WINDOW_END).cast(pa.int64()).to_numpy())
            bounds = (batch.column(name).cast(pa.int64()).to_pylist() for name in (WINDOW_START, WINDOW_END))
            ids = (tuple(sorted(each)) for each in to_list(batch.column("ids")))
            self._emitted.update(zip(to_list(batch.column("key")), *bounds, ids, strict=True))
        self._out.emit(batch, tag)

    def _check_order(self, ends_us: Int64s) -> None:
        """Check that a watermark made of the results so far passes none that the same firing has still to emit."""
        if self._fired_end_us is None:
            return
        if int(ends_us[0]) < self._fired_end_us or (np.diff(ends_us) < 0).any():
            self._bug("it emits a window after one that ends later, for the same watermark")
        self._fired_end_us = int(ends_us[-1])

    def watermark(self, watermark_us: int) -> None:
        raise AssertionError("windows make no watermarks")

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        raise AssertionError("windows are never idle")

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        held = parts[PARTS].table() if PARTS in parts else None
        self._reference.restore(self._marks_us(parts), () if held is None else _held(held))
        super().restore(parts)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if self._is_firing:
            self._bug("rows come while a watermark that came before them is firing")
        self._late.clear()
        self._late_combined = 0
        self._emitted.clear()
        self._fired_end_us = None
        super().process(batch, port)
        groups = key_groups(batch, ("key",), self._context.max_parallelism).tolist()
        keys = to_list(batch.column("key"))
        if IDS in batch.schema.names:
            late, due = self._reference.take_combined(zip(to_list(batch.column(IDS)), keys, groups, strict=True))
            if late.total() != self._late_combined:
                self._bug(f"{self._late_combined} rows of a combined batch are late instead of {late.total()}")
            late.clear()
        else:
            late, due = self._reference.take(zip(to_list(batch.column("id")), keys, groups, strict=True))
        if late != self._late:
            self._bug(
                f"rows {sorted(self._late - late)} are late and should not be, {sorted(late - self._late)} are not"
            )
        self._compare(due, "with late rows")

    def advance_watermark(self, watermark_us: int) -> bool:
        if not self._is_firing:
            self._emitted.clear()
            self._fired_end_us = MIN_WATERMARK_US
        self._is_firing = not super().advance_watermark(self._own_watermark(watermark_us))
        if not self._is_firing:
            self._compare(self._reference.due(watermark_us), f"at event time {watermark_us}")
            self._reference.reach(watermark_us)
            self._forgotten_us = self._reference.lowest_us
        return not self._is_firing

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        snapshot, forgotten_us = super().snapshot(checkpoint_id), self._forgotten_us
        fired_before = self._reference.fired(self._emitted if self._is_firing else Counter())

        def later() -> SnapshotResult:
            made = snapshot.complete()
            if PARTS in made.parts:
                self._check_state(made.parts[PARTS].table(), forgotten_us)
            for complaint in islice(wrong_marks(fired_before, self._marks_us(made.parts)), 3):
                self._bug(f"checkpoint {checkpoint_id}: {complaint}")
            return made

        return Snapshot(later=later)

    def _ids(self, batch: pa.RecordBatch) -> list[int]:
        if IDS in batch.schema.names:
            return [row for rows in to_list(batch.column(IDS)) for row in rows]
        return super()._ids(batch)

    def _compare(self, due: Counter[Emission], when: str) -> None:
        wrong = difference(self._emitted, due)
        if wrong:
            self._bug(f"{when} it {wrong}")

    def _own_watermark(self, watermark_us: int) -> int:
        """Return the watermark for the operator."""
        return watermark_us

    def _marks_us(self, parts: Mapping[str, StatePart]) -> dict[int, int]:
        """Return how far event time has come, by key group."""
        return _marks_us(parts)

    def _last_ends_us(self, table: pa.Table) -> Int64s:
        """Return the end of the last window of each part of the state."""
        if self._kind == "session":
            return table.column(END).to_numpy()
        panes = to_list(table.column(PANE).cast(pa.int64()))
        return np.array([_last_end_ms(self._kind, pane // 1000) * 1000 for pane in panes])

    def _check_state(self, table: pa.Table, forgotten_us: int) -> None:
        ends_us = self._last_ends_us(table)
        over = due_us(self._kind, ends_us) + self._allowed_us <= forgotten_us
        if over.any():
            self._bug(f"event time is {forgotten_us}, and these windows are in state, which end at {ends_us[over][:5]}")

    def _bug(self, what: str) -> None:
        self._outside.world.bug(f"{self._context.uid}/{self._context.subtask}: {what}")


class WindowOfGaps(Window):
    """The operator of sessions whose rows have their own gaps, in a column that only this operator sees."""

    def _new_reference(self, key_groups: range) -> WindowReference:
        return WindowReference(self._kind, self._allowed_us, key_groups, lambda row: gap_ms(row) * 1000)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        super().emit(batch.select(SCHEMA.names) if tag == LATE else batch, tag)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        gaps = gap_ms(batch.column("id").to_numpy())
        columns = [*batch.columns, pa.array(gaps).view(pa.duration("ms"))]
        super().process(pa.RecordBatch.from_arrays(columns, schema=GAPS_SCHEMA), port)


class WindowOfDays(Window):
    """The operator of windows of local days, whose rows are at other times than those of the run."""

    @property
    def _days(self) -> Days:
        return DAYS[self._kind]

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        if tag == LATE:
            super().emit(batch.select(SCHEMA.names), tag)
            return
        wrong = self._days.wrong_values(batch)
        if wrong:
            self._bug(wrong)
        bounds = [
            [self._days.time_of_run(bound) for bound in to_list(batch.column(name).cast(pa.int64()))]
            for name in (WINDOW_START, WINDOW_END)
        ]
        columns = [batch.column("key"), *(pa.array(each, pa.timestamp("us")) for each in bounds), batch.column("ids")]
        super().emit(pa.RecordBatch.from_arrays(columns, ["key", WINDOW_START, WINDOW_END, "ids"]))

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        super().process(self._days.with_values(batch), port)

    def _own_watermark(self, watermark_us: int) -> int:
        return self._days.watermark(watermark_us)

    def _marks_us(self, parts: Mapping[str, StatePart]) -> dict[int, int]:
        return {group: self._days.watermark_of_run(mark_us) for group, mark_us in super()._marks_us(parts).items()}

    def _last_ends_us(self, table: pa.Table) -> Int64s:
        panes = to_list(table.column(PANE).cast(pa.int64()))
        return np.array([self._days.last_end(pane) for pane in panes], np.int64)


def _bounds_are_right(batch: pa.RecordBatch, ids: str, lowest: str, highest: str) -> bool:
    """Return whether these columns have the lowest and the highest of each row's ids."""
    found = zip(*(to_list(batch.column(name)) for name in (ids, lowest, highest)), strict=True)
    return all((low, high) == (min(rows), max(rows)) for rows, low, high in found)


def uncombined(batch: pa.RecordBatch, kind: str) -> tuple[list[int], str]:
    """Return the ids of the rows that a combined batch stands for, and a description of what is wrong with it, or "".

    `kind`: "window", "slide" or "session".
    """
    wrong = "" if _bounds_are_right(batch, IDS, f"{LOWEST}:min", f"{HIGHEST}:max") else "another lowest or highest id"
    names = (IDS, ROWS, *((START, END) if kind == "session" else (PANE, PANE)))
    for ids, rows, start_us, end_us in zip(*(to_list(batch.column(name)) for name in names), strict=True):
        times_us = [time_ms(row) * 1000 for row in ids]
        if rows != len(ids):
            wrong = f"{rows} rows, and the ids of {len(ids)}"
        elif kind == "session" and (start_us, end_us) != (min(times_us), max(times_us) + GAP_MS * 1000):
            wrong = "a session with other bounds than its rows"
        elif kind != "session" and {time // _PANE_US[kind] * _PANE_US[kind] for time in times_us} != {start_us}:
            wrong = "a pane with rows of another one"
    return [row for ids in to_list(batch.column(IDS)) for row in ids], wrong


def _marks_us(parts: Mapping[str, StatePart]) -> dict[int, int]:
    """Return how far event time has come, by key group."""
    if PROGRESS not in parts:
        return {}
    table = parts[PROGRESS].table()
    return dict(zip(to_list(table.column(KEY_GROUP)), to_list(table.column("watermark")), strict=True))


def _held(table: pa.Table) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Yield the key group, the key, the bounds and the ids of each part of a window operator's state."""
    of_rows = ROW_IDS in table.schema.names
    names = [KEY_GROUP, "key", *((PANE, PANE) if PANE in table.schema.names else (START, END))]
    columns = [table.column(name) for name in (*names, ROW_IDS if of_rows else IDS)]
    columns[2:4] = [column.cast(pa.int64()) for column in columns[2:4]]
    for group, key, start, end, ids in zip(*(column.to_pylist() for column in columns), strict=True):
        yield group, key, start, end, [ids] if of_rows else ids


def _last_end_ms(kind: str, at_ms: int) -> int:
    """Return the end of the last window that contains a time."""
    starts = windows_of(kind, at_ms)
    assert starts is not None, kind
    return starts[-1] + (TUMBLING_MS if kind == "window" else SIZE_MS)


class Stack(Operator):
    """Emits one row for each row of each emission but early ones, which depend on the wall clock. `n` encodes the window's
    start and the number of rows in the emission.
    """

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if IS_EARLY in batch.schema.names:
            batch = batch.filter(pc.invert(batch.column(IS_EARLY)))
        ids = batch.column("ids")
        assert is_list_array(ids)
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
    emitted: Iterable[tuple[int, int, int]],
    late: Counter[int] | None,
    *,
    never_late: bool,
) -> Iterator[str]:
    """Yield complaints about all emissions. `got`: the rows that the windows have received. `emitted`: the id, the key and
    the n of rows from `Stack`. `late`: None if late rows are not read, so that a row that is missing may be one.
    """
    emissions: dict[tuple[int, int, int], Counter[int]] = {}
    for row, key, n in emitted:
        start_ms, size = divmod(n, _SIZES)
        emissions.setdefault((key, start_ms, size), Counter())[row] += 1
    of_row: dict[int, dict[int, list[Counter[int]]]] = {}
    """The emissions that contain each row, the smallest first, by row and start of the window (0 for sessions)."""
    for (key, start_ms, size), rows in sorted(emissions.items(), key=lambda entry: entry[0][2]):
        if rows.total() != size:
            yield f"{uid}: the window of key {key} at {start_ms} ms has emitted {size} rows instead of {rows.total()}"
        for row in rows:
            if keys.get(row) != key:
                yield f"{uid}: row {row} is in a window of key {key}"
            at = 0 if kind in ("session", "periodic", "first_rows") else start_ms
            of_row.setdefault(row, {}).setdefault(at, []).append(rows)
    for row in sorted({*got, *of_row, *(late or ())}):
        found = of_row.get(row, {})
        for start_ms, chain in found.items():
            if any(not before < after for before, after in pairwise(chain)):
                yield f"{uid}: what the windows of row {row} at {start_ms} ms have emitted is not always more than before"
            if never_late and len(chain) > 1 and kind not in ("periodic", "first_rows"):
                yield f"{uid}: a window of row {row} at {start_ms} ms is emitted again, and no row can be late"
        due = windows_of(kind, time_ms(row)) or [0]
        counts = [max((rows[row] for rows in found.get(start_ms, ())), default=0) for start_ms in due]
        times_late = late[row] if late is not None else max(0, got[row] - counts[-1])
        surplus = counts[-1] + times_late - got[row]
        elsewhere = sorted(found.keys() - set(due))
        if surplus or elsewhere or counts != sorted(counts) or (never_late and (times_late or counts[0] < counts[-1])):
            yield (
                f"{uid} has got row {row} {got[row]} times; it is in its windows {counts} times, in others at "
                f"{elsewhere} ms, late {times_late} times"
            )
