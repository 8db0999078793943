"""The rules for the results of a window operator, at the end and at any checkpoint.

Which rows are late depends on the order of everything, so each row is looked up wherever it can be:
in emitted windows, in the state of the others, and in the late output. The state has a mark for each
key group, which records how far event time has come: a window must have fired if a mark has passed its
end, and only then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import is_list_array
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.windows.window_specs import END, START
from midstream_lab.checkers.content_checker import Bools, Contents, column, some
from midstream_lab.jobs.recorded_rows import Int64s
from midstream_lab.jobs.timed import GAP_MS, IDS, SIZE_MS, SLIDE_MS, TUMBLING_MS, due_us

BOUNDS_US: Final = {"window": (1000 * TUMBLING_MS, 1000 * TUMBLING_MS), "slide": (1000 * SIZE_MS, 1000 * SLIDE_MS)}
"""The size and the slide of windows of fixed size; sessions depend on the other rows."""
GAP_US: Final = 1000 * GAP_MS
_PANE: Final = "__pane"


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows in windows: the id of each, and the bounds of the window, or of the pane."""

    ids: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    starts_us: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    ends_us: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    @staticmethod
    def joined(parts: Sequence[Spans]) -> Spans:
        if len(parts) < 2:
            return parts[0] if parts else Spans()
        names = ("ids", "starts_us", "ends_us")
        return Spans(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(slots=True)
class Made:
    """Everything that exists of one window operator's rows."""

    got: Counter[int]
    """The ids of the rows that it has received."""
    emitted: Spans
    late: Int64s | None
    """The ids of the late rows; None if they are not read."""
    held: Spans = field(default_factory=Spans)
    """The rows in its state; for windows of fixed size, in panes."""
    marks_us: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """How far event time has come, for each key group."""


@dataclass(slots=True)
class WindowVerdict:
    complaints: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    dropped: int = 0
    """The number of rows that must have been late, if late rows are not read."""


def unpacked(rows: pa.RecordBatch, contents: Contents) -> tuple[Spans, str]:
    """Return the windows in rows of `timed.Pack`, and a description of what is wrong with a row; "" if nothing is."""
    ids, keys, starts_us = column(rows, "id"), column(rows, "key"), column(rows, "ts")
    positions, known = contents.positions(ids)
    wrong = ~known | (contents.keys[positions] != keys) | (column(rows, "n") != starts_us // 1000 + 1)
    complaint = f"rows {some(ids[wrong])} of windows with another key or start" if wrong.any() else ""
    if any(rows.column("text").to_pylist()):
        complaint = "a text in rows of windows"
    return Spans(ids, starts_us, column(rows, "sequence")), complaint


def held_in(table: pa.Table, contents: Contents) -> tuple[Spans, str]:
    """Return the rows in a part of a window operator's state, and a complaint or "". Panes are returned without an end."""
    batch = table.combine_chunks().to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], table.schema)
    listed = batch.column(IDS)
    assert is_list_array(listed)
    counts, ids = listed.value_lengths().to_numpy(), listed.flatten().to_numpy()
    has_panes = batch.schema.get_field_index(_PANE) >= 0
    starts = batch.column(_PANE).view(pa.int64()) if has_panes else batch.column(START)
    starts_us = np.repeat(starts.to_numpy(), counts)
    ends_us = starts_us if has_panes else np.repeat(batch.column(END).to_numpy(), counts)
    positions, known = contents.positions(ids)
    wrong = ~known | (contents.keys[positions] != np.repeat(column(batch, "key"), counts))
    return Spans(ids, starts_us, ends_us), f"rows {some(ids[wrong])} under another key" if wrong.any() else ""


def no_marks(key_groups: int, *, all_fired: bool = False) -> Int64s:
    return np.full(key_groups, MAX_WATERMARK_US if all_fired else MIN_WATERMARK_US, np.int64)


def check_windows(contents: Contents, kind: str, made: Made, on_time: Bools, late_us: int) -> WindowVerdict:
    """Check all rules for one operator. `on_time`: which rows never arrive once event time is `late_us` past them."""
    got = contents.amounts(np.array(list(made.got), np.int64), np.array(list(made.got.values()), np.int64))
    late = None if made.late is None else contents.amounts(made.late)
    verdict = WindowVerdict()
    rules = _sessions if kind == "session" else _fixed
    for what, found, wrong in rules(contents, kind, made, on_time, late_us, got, late):
        if wrong.any():
            rows = contents.ids[wrong][:SAMPLES].tolist()
            times = got[wrong][:SAMPLES].tolist()
            shown = [(row, f"{n} times", _where(made, row)) for row, n in zip(rows, times, strict=True)]
            verdict.complaints.append(f"{what}: it has got {shown} ({int(wrong.sum())} such rows)")
        if found is not None:
            surplus = found + (0 if late is None else late) - got
            if late is None:
                may_be_late = ~on_time & (surplus < 0)
                verdict.dropped += int(-surplus[may_be_late].sum())
                surplus[may_be_late] = 0
            verdict.lost += int(-surplus[surplus < 0].sum())
            verdict.doubled += int(surplus[surplus > 0].sum())
    return verdict


SAMPLES: Final = 3
Rule = tuple[str, Int64s | None, Bools]
"""A rule: its complaint; how often each row was found, if the rule counts that; and the rows that break it."""


def _where(made: Made, row: int) -> str:
    def spans(of: Spans) -> dict[tuple[int, int], int]:
        mine = of.ids == row
        return dict(Counter(zip(of.starts_us[mine].tolist(), of.ends_us[mine].tolist(), strict=True)))

    late = "late rows are not read" if made.late is None else f"late {int((made.late == row).sum())} times"
    return f"emitted in windows {spans(made.emitted)}, held in {spans(made.held)}, {late}"


def _assumed(got: Int64s, found: Int64s, on_time: Bools) -> Int64s:
    """Return how often each row must have been late if late rows are not read; on-time rows never are."""
    lacking: Int64s = np.where(on_time, 0, np.maximum(got - found, 0))
    return lacking


def _fixed(
    contents: Contents, kind: str, made: Made, on_time: Bools, late_us: int, got: Int64s, late: Int64s | None
) -> Iterator[Rule]:
    size_us, slide_us = BOUNDS_US[kind]
    count = size_us // slide_us
    times_us, rows = contents.times_us, len(contents.ids)
    first_us = times_us // slide_us * slide_us - size_us + slide_us
    ends_us = first_us[:, None] + slide_us * np.arange(count) + size_us
    fired = due_us(kind, ends_us) <= made.marks_us[contents.groups][:, None]
    emitted = made.emitted
    positions, known = contents.positions(emitted.ids)
    number = (emitted.starts_us - first_us[positions]) // slide_us
    fits = known & (number >= 0) & (number < count) & (emitted.ends_us == emitted.starts_us + size_us)
    fits &= emitted.starts_us == first_us[positions] + number * slide_us
    yield "in a window that it does not belong to", None, _marked(rows, positions[~fits])
    found = np.bincount(positions[fits] * count + number[fits], minlength=rows * count).reshape(rows, count)
    held_positions, held_known = contents.positions(made.held.ids)
    panes_us = times_us[held_positions] // slide_us * slide_us  # both sizes are whole numbers of slides
    yield "in another pane", None, _marked(rows, held_positions[~held_known | (panes_us != made.held.starts_us)])
    held = contents.amounts(made.held.ids)
    last = np.where(fired[:, -1], found[:, -1], held)
    if late is None:
        late = _assumed(got, last, on_time & (late_us == 0))
    taken = got - late
    yield "lost, doubled, or emitted before its time", last, (last != taken) | (held > taken)
    early = _any_of(found > np.where(fired, taken[:, None], 0))
    yield "too often in a window, or before the window has ended", None, early
    gaps = _any_of((found[:, :-1] > found[:, 1:]) & fired[:, 1:])
    yield "in a window, but not in the next one", None, gaps
    must = on_time[:, None] & (ends_us - 1 >= times_us[:, None] + late_us)
    lacking = _any_of(must & fired & (found != got[:, None])) | (must[:, -1] & (late > 0))
    yield "late, and was in time", None, lacking


def _sessions(
    contents: Contents, kind: str, made: Made, on_time: Bools, late_us: int, got: Int64s, late: Int64s | None
) -> Iterator[Rule]:
    """Yield the rules for sessions: the bounds of a session are those of its rows, and no gap between rows is too long.

    How the rows of a key are divided depends on which of them were late. If none can be late, sessions of a key neither
    overlap nor touch.
    """
    rows = len(contents.ids)
    marks_us = made.marks_us[contents.groups]
    emitted, held = made.emitted, made.held
    positions, known = contents.positions(emitted.ids)
    early = ~known | (due_us(kind, emitted.ends_us) > marks_us[positions])
    yield "emitted before its session has ended", None, _marked(rows, positions[early])
    held_positions, held_known = contents.positions(held.ids)
    waits = held_known & (due_us(kind, held.ends_us) > marks_us[held_positions])
    found = contents.amounts(emitted.ids) + contents.amounts(held.ids[waits])
    if late is None:
        late = _assumed(got, found, on_time & (late_us == 0))
    yield "lost or doubled", found, found + late != got
    for spans, where in ((emitted, positions), (held, held_positions)):
        yield (
            "in a session with other bounds than its rows",
            None,
            _marked(rows, where[_misfit(contents, spans, where)]),
        )
    if late_us:
        return
    yield "late, and was in time", None, on_time & (late > 0)
    if on_time[got > 0].all():
        yield "in a session that overlaps or touches another", None, _overlapping(contents, emitted, held)


def _misfit(contents: Contents, spans: Spans, positions: Int64s) -> Bools:
    """Return which rows are in sessions whose bounds do not follow from the rows in them."""
    if not len(positions):
        return np.empty(0, np.bool_)
    times, keys = contents.times_us[positions], contents.keys[positions]
    order = np.lexsort((times, spans.ends_us, spans.starts_us, keys))
    times, keys, starts, ends = times[order], keys[order], spans.starts_us[order], spans.ends_us[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (keys[1:] != keys[:-1]) | (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    finishes = np.append(begins[1:], True)
    wrong = (begins & (times != starts)) | (finishes & (times + GAP_US != ends))
    wrong[1:] |= ~begins[1:] & (times[1:] - times[:-1] > GAP_US)
    found = np.empty(len(order), np.bool_)
    found[order] = wrong
    return found


def _overlapping(contents: Contents, emitted: Spans, held: Spans) -> Bools:
    """Return which rows are in sessions that overlap or touch. Held sessions are not merged yet, so they may overlap each other."""
    positions, held_positions = contents.positions(emitted.ids)[0], contents.positions(held.ids)[0]
    keys = contents.keys[positions]
    order = np.lexsort((emitted.ends_us, emitted.starts_us, keys))
    keys, starts, ends = keys[order], emitted.starts_us[order], emitted.ends_us[order]
    another = (keys[1:] == keys[:-1]) & ((starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1]))
    found = _marked(len(contents.ids), positions[order][1:][another & (starts[1:] <= ends[:-1])])
    latest: dict[int, int] = dict(zip(keys.tolist(), ends.tolist(), strict=True))  # ends ascend with the starts
    reached = np.array([latest.get(key, MIN_WATERMARK_US) for key in contents.keys[held_positions].tolist()], np.int64)
    waits = held.ends_us > reached  # otherwise it has fired, and is about to be dropped
    return found | _marked(len(contents.ids), held_positions[waits & (held.starts_us <= reached)])


def _marked(rows: int, positions: Int64s) -> Bools:
    found = np.zeros(rows, np.bool_)
    found[positions] = True
    return found


def _any_of(windows: Bools) -> Bools:
    """Return for each row whether the condition holds for any of its windows."""
    found: Bools = np.logical_or.reduce(windows, axis=1)
    return found
