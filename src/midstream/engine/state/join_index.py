"""The rows of a keyed stream, indexed by key and time, so that the matches of a few rows are looked up.

Rows lie in runs in the order of arrival; a run is sorted by a hash of the key, then by time, so two binary searches
find all rows of a key and an interval. A row is held for some time after its event time. A run whose rows have all
expired is dropped; in other runs, expired rows are skipped until they make up half of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.schemas import SchemaLike
from midstream.engine.state.columnar import FrameRun, Int32s
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_state import TableState

RUN_ROWS: Final = 262_144
"""A run of this many rows is not merged any more: merging it would block everything else for more than some 50 ms."""

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_HALF: Final = np.uint64(32)
_TICKS: Final = np.uint64(2**32 - 1)


def _later(times: Int64s, by_us: int) -> Int64s:
    """Shift times by `by_us`, limited to the range of valid times."""
    first, last = max(MIN_WATERMARK_US, MIN_WATERMARK_US - by_us), min(MAX_WATERMARK_US, MAX_WATERMARK_US - by_us)
    later: Int64s = np.clip(times, first, last) + by_us
    return later


class TimedRun(FrameRun):
    """Rows sorted by `codes`: 32 bits of the key's hash, then 32 of the time since the first row, in ticks of 2^shift
    µs.
    """

    __slots__ = ("codes", "dead_until", "first", "last", "middle", "shift", "times")

    def __init__(self, frame: pl.DataFrame, hashes: UInt64s, times: Int64s) -> None:
        """Sort rows; `hashes` have 32 bits. Sorting rows that are nearly sorted costs little more than a copy."""
        self.first, self.last = int(times.min()), int(times.max())
        self.shift = max(0, (self.last - self.first).bit_length() - 32)
        codes = self._codes(hashes, times)
        order = codes.argsort(kind="stable")
        super().__init__(frame[order])
        self.codes, self.times = codes[order], times[order]
        sample = self.times[:: 1 + len(times) // 1024]
        self.middle = int(np.partition(sample, len(sample) // 2)[len(sample) // 2])
        """About half of the rows are of this time or earlier."""
        self.dead_until = MIN_WATERMARK_US
        """Rows up to this time have expired."""

    @property
    def hashes(self) -> UInt64s:
        hashes: UInt64s = self.codes >> _HALF
        return hashes

    def _codes(self, hashes: UInt64s, times: Int64s) -> UInt64s:
        since = np.maximum(times, self.first).view(np.uint64) - np.int64(self.first).view(np.uint64)
        codes: UInt64s = (hashes << _HALF) | np.minimum(since >> np.uint64(self.shift), _TICKS)
        return codes

    def pairs_with(self, other: TimedRun, low: int, high: int) -> tuple[Int64s, Int64s]:
        """Return the positions of pairs: a row of `other`, and a row of this run with the same hash that is `low` to
        `high` later.
        """
        theirs, mine = self._near(other, low, high)
        times = self.times[mine]
        above_low = times.view(np.uint64) - other.times[theirs].view(np.uint64) - np.int64(low).view(np.uint64)
        fit = (above_low <= np.uint64(high - low)) & (times > self.dead_until)
        return theirs[fit], mine[fit]

    def _near(self, other: TimedRun, low: int, high: int) -> tuple[Int64s, Int64s]:
        """Return all pairs whose distance is within the interval, and some that miss it by one tick."""
        earliest, latest = _later(other.times, low), _later(other.times, high)
        lowest, highest = (self._codes(other.hashes, times) for times in (earliest, latest))
        begins = self.codes.searchsorted(lowest, "left")
        overlap = (latest >= self.first) & (earliest <= self.last)
        found = np.flatnonzero(overlap & (self.codes[np.minimum(begins, len(self.codes) - 1)] <= highest))
        begins = begins[found]
        counts = np.maximum(self.codes.searchsorted(highest[found], "right") - begins, 0)
        theirs = np.repeat(found, counts)
        mine = np.arange(len(theirs)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        return theirs, mine

    def remaining(self) -> tuple[pl.DataFrame, UInt64s, Int64s]:
        if self.first > self.dead_until:
            return self.frame, self.hashes, self.times
        alive = self.times > self.dead_until
        return self.frame.filter(pl.Series(alive)), self.hashes[alive], self.times[alive]


class JoinIndex(TableState):
    """The rows of one stream.

    A row is held until event time is `held_us` past the row's own time, which `times` computes from column `event_time`.
    """

    def __init__(self, schema: SchemaLike, event_time: str, held_us: int, times: pl.Expr) -> None:
        super().__init__(schema)
        self._event_time = event_time
        self._time_us = times.dt.epoch("us")
        self._held_us = held_us
        self._dead_until = MIN_WATERMARK_US
        """The latest time up to which rows have been dropped."""

    @property  # type: ignore[misc]  # it cannot be replaced
    def frame(self) -> pl.DataFrame:
        """All rows that are held."""
        frames = [run.remaining()[0] for run in self._timed()]
        return pl.concat(frames) if frames else self._empty.clone()

    def append(self, frame: pl.DataFrame) -> TimedRun | None:  # type: ignore[override]
        """Add rows, and return them as a run that can be looked up in the other stream."""
        rows = self._conforming(frame)
        if not rows.height:
            return None
        run = self._run(rows)
        self._put(run)
        return run

    def pairs(self, rows: TimedRun | None, low: int, high: int) -> tuple[pl.DataFrame, pl.DataFrame] | None:
        """Return two frames of equal length: the matching rows of `rows`, and their matches here, `low` to `high`
        later.
        """
        if rows is None:
            return None
        theirs, mine, before = [], [], 0
        for run in self._timed():
            if run.first <= rows.last + high and run.last >= max(rows.first + low, run.dead_until + 1):
                found, at = run.pairs_with(rows, low, high)
                if len(at):
                    theirs.append(found)
                    mine.append(at + before)
            before += run.frame.height
        if not mine:
            return None
        if self._whole is None:
            self._whole = pl.concat([run.frame for run in self._timed()], rechunk=False)
        left, right = rows.frame[np.concatenate(theirs)], self._whole[np.concatenate(mine)]
        equal = pl.all_horizontal(left.get_column(key) == right.get_column(key) for key in self._layout.keys)
        same = left.select(equal).to_series()
        return (left, right) if same.all() else (left.filter(same), right.filter(same))

    def advance(self, watermark_us: int) -> None:
        """Drop rows that have expired at this watermark."""
        dead_until = max(MIN_WATERMARK_US, min(watermark_us - self._held_us, MAX_WATERMARK_US))
        self._dead_until = max(self._dead_until, dead_until)
        runs = self._timed()
        for run in runs:
            run.dead_until = max(run.dead_until, dead_until)
        if any(run.middle <= run.dead_until for run in runs):
            self._hold([run for run in runs if run.middle > run.dead_until])
            for run in runs:
                if run.middle <= run.dead_until < run.last:
                    self._put(TimedRun(*run.remaining()))

    def drop(self, watermarks_of: Callable[[Int32s], Int64s]) -> None:
        """Drop rows that have expired, given the watermark of each key group."""
        runs = []
        for run in self._timed():
            held = _later(run.times, self._held_us) > watermarks_of(self._layout.groups_of(run))
            if held.all():
                runs.append(run)
            elif held.any():
                runs.append(TimedRun(run.frame.filter(pl.Series(held)), run.hashes[held], run.times[held]))
        self._hold(runs)

    def without_dead(self) -> None:
        """Remove expired rows."""
        if self.holds_dead:
            runs = [TimedRun(*run.remaining()) if run.first <= run.dead_until else run for run in self._timed()]
            self._hold(runs)

    def _timed(self) -> list[TimedRun]:
        return cast("list[TimedRun]", self._bound_runs())

    def _run(self, rows: pl.DataFrame) -> TimedRun:
        hashes = rows.select(self._layout.keys).hash_rows(0).to_numpy() >> _HALF
        return TimedRun(rows, hashes, rows.select(self._time_us).to_series().to_numpy())

    def _put(self, run: TimedRun) -> None:
        """Append a run, merging runs so that each is more than twice as long as the next, except those of `RUN_ROWS` or
        more.
        """
        runs, merged, rows = list(self._timed()), [run], run.frame.height
        while runs and runs[-1].frame.height <= min(2 * rows, RUN_ROWS - 1):
            merged.append(runs.pop())
            rows += merged[-1].frame.height
        if len(merged) > 1:
            frames, hashes, times = zip(*(each.remaining() for each in reversed(merged)), strict=True)
            run = TimedRun(pl.concat(frames, rechunk=True), np.concatenate(hashes), np.concatenate(times))
        self._hold([*runs, run])

    # ---- for the operator ----

    @property
    def holds_dead(self) -> bool:
        """Whether expired rows would be stored."""
        return any(run.first <= run.dead_until for run in self._timed())

    @property
    def holds_late(self) -> bool:
        """Whether rows are held that arrived after they should have been dropped; this lasts until the next watermark."""
        return any(run.dead_until < run.first <= self._dead_until for run in self._timed())

    def _never_null(self) -> Sequence[str]:
        return *self._layout.keys, self._event_time

    def restore(self, chunks: Sequence[Chunk], where: str) -> None:
        rows = self._restored_rows(chunks, where).sort(self._time_us)
        self._hold([self._run(rows.slice(start, RUN_ROWS)) for start in range(0, rows.height, RUN_ROWS)])
