"""Windows with early results in a simulated job.

When they come depends on the wall clock; that each has what its window holds then, and that none is missing, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.interfaces import Timer
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.windows.window_specs import IS_EARLY, WINDOW_END, WINDOW_START
from midstream.engine.state.state_parts import StatePart
from midstream_lab.jobs.lateness import ALLOWED_MS, LENIENT, Window, windows_of
from midstream_lab.jobs.recorded_rows import Outside, time_ms
from midstream_lab.jobs.timed import window

PERIOD = "15 ms"
_Place = tuple[int, int]
"""The key and the start of a window, in microseconds."""


class EarlyWindow(Window):
    """Checks, in addition, that a round of early results has what has changed in open windows, once, as it is."""

    def __init__(self, uid: str, outside: Outside, kind: str, *, combines: bool) -> None:
        self._given = uid, outside, kind, combines
        of = LENIENT[kind]
        inner = window(uid, of, f"{ALLOWED_MS} ms", combines=combines, emit_every=PERIOD)
        super().__init__(outside, inner, of, ALLOWED_MS)
        self._timers = 0
        """How many calls are due."""
        self._changed: set[_Place] = set()
        """What has changed after the round began, or after the last one."""
        self._awaited: set[_Place] = set()
        """What the round has still to emit."""

    def __reduce__(self) -> tuple[Callable[..., EarlyWindow], tuple[object, ...]]:
        return _again, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        def call_later(delay_s: float, mail: Callable[[], None]) -> Timer:
            def run() -> None:
                self._timers -= 1
                if delay_s:
                    self._awaited, self._changed = self._changed, set()
                mail()
                self._check_round()

            self._timers += 1
            return context.call_later(delay_s, run)

        super().open(replace(context, call_later=call_later), out)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore(parts)
        self._changed = set(self._open())
        self._check_round()

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        super().process(batch, port)
        keys = to_list(batch.column("key"))
        ids = (
            to_list(batch.column("ids:ids")) if "ids:ids" in batch.schema.names else [[row] for row in self._ids(batch)]
        )
        for key, rows in zip(keys, ids, strict=True):
            for row in rows:
                self._changed.update((key, 1000 * start_ms) for start_ms in windows_of(self._kind, time_ms(row)) or ())
        self._check_round()

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        is_early = {False} if tag is not None else {*to_list(batch.column(IS_EARLY))}
        if is_early == {True}:
            self._check_early(batch)
            self._out.emit(batch, tag)
            return
        if is_early != {False}:
            self._bug("it emits early results together with others")
        super().emit(batch, tag)

    def _check_early(self, batch: pa.RecordBatch) -> None:
        held = self._open()
        bounds = (to_list(batch.column(name).cast(pa.int64())) for name in (WINDOW_START, WINDOW_END))
        for key, start_us, end_us, ids in zip(
            to_list(batch.column("key")), *bounds, to_list(batch.column("ids")), strict=True
        ):
            place = key, start_us
            found = end_us, tuple(sorted(ids))
            is_older = place in self._changed and place in held and {*ids} <= {*held[place][1]}
            if found != held.get(place) and not is_older:
                self._bug(f"an early result of key {key} at {start_us} is {found} instead of {held.get(place)}")
            if place not in self._awaited:
                self._bug(f"an early result of key {key} at {start_us}, which has not changed")
            self._awaited.discard(place)

    def _open(self) -> dict[_Place, tuple[int, tuple[int, ...]]]:
        """Return the end and the rows of each window that has not fired."""
        fired = self._emitted if self._is_firing else ()
        due = self._reference.due(MAX_WATERMARK_US)
        return {(each[0], each[1]): (each[2], each[3]) for each in due if each not in fired}

    def _check_round(self) -> None:
        """Check that what has changed will be emitted, and has been if the round is over."""
        if self._timers or not (self._changed or self._awaited):
            return
        missing = self._open().keys() & (self._changed | self._awaited)
        for key, start_us in islice(missing, 3):
            self._bug(f"the window of key {key} at {start_us} has changed, and no early result follows")


def _again(uid: str, outside: Outside, kind: str, combines: bool) -> EarlyWindow:
    return EarlyWindow(uid, outside, kind, combines=combines)
