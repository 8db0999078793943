"""The rows of a keyed stream, indexed by key and time, so that the matches of a few rows are looked up.

Rows lie in runs in the order of arrival; a run is sorted by a hash of the key, then by time, so two binary searches
find all rows of a key and an interval. A row is held for some time after its event time, unless it is taken out before.
A run whose rows have all expired is dropped; in other runs, expired rows are skipped until they make up half of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.engine.core.batches import rows_at, rows_where, selected, stacked
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import StorageError
from midstream.engine.core.schemas import SchemaLike
from midstream.engine.state.columnar import Columns, Int32s
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_runs import hashes_of
from midstream.engine.state.table_state import TableState
from midstream.engine.state.tombstones import Bools, TombstonedRun

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


class TimedRun(TombstonedRun):
    """Rows sorted by `codes`: 32 bits of the key's hash, then 32 of the time since the first row, in ticks of 2^shift
    µs.
    """

    __slots__ = ("_by_time", "codes", "dead_until", "first", "last", "middle", "shift", "times")

    def __init__(self, frame: pl.DataFrame, hashes: UInt64s, times: Int64s) -> None:
        """Sort rows; `hashes` have 32 bits. Sorting rows that are nearly sorted costs little more than a copy."""
        self.first, self.last = int(times.min()), int(times.max())
        self.shift = max(0, (self.last - self.first).bit_length() - 32)
        codes = self._codes(hashes, times)
        order = codes.argsort(kind="stable")
        super().__init__(rows_at(frame, order))
        self.codes, self.times = codes[order], times[order]
        sample = self.times[:: 1 + len(times) // 1024]
        self.middle = int(np.partition(sample, len(sample) // 2)[len(sample) // 2])
        """About half of the rows are of this time or earlier."""
        self.dead_until = MIN_WATERMARK_US
        """Rows up to this time have expired."""
        self._by_time: tuple[Int64s, Int64s] | None = None
        """The positions of the rows in the order of time, and their times. Built when the first row is due."""

    def columns(self) -> Columns:
        order, times = self._by_time or (None, None)
        return *super().columns(), self.codes, self.times, order, times

    def move(self, columns: Columns) -> None:
        *columns_of_all, codes, own, order, times = columns
        super().move(tuple(columns_of_all))
        self.codes, self.times = cast("tuple[UInt64s, Int64s]", (codes, own))
        if self._by_time is not None:
            self._by_time = cast("tuple[Int64s, Int64s]", (order, times))

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
        if self.there is not None:
            fit &= self.there[mine]
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

    def due(self, until: int) -> Int64s:
        """Return the positions of the rows that expire at `until` and have not been removed, in the order of time."""
        if self.first > until:
            return np.empty(0, np.int64)
        if self._by_time is None:
            order = self.times.argsort(kind="stable")
            self._by_time = order, self.times[order]
        order, times = self._by_time
        begin, end = times.searchsorted([self.dead_until, until], "right")
        return self.living_of(order[begin:end])

    def remaining(self) -> tuple[pl.DataFrame, UInt64s, Int64s]:
        if self.first > self.dead_until and self.there is None:
            return self.frame, self.hashes, self.times
        alive = self.times > self.dead_until
        return self.only(alive if self.there is None else alive & self.there)

    def only(self, some: Bools) -> tuple[pl.DataFrame, UInt64s, Int64s]:
        return rows_where(self.frame, some), self.hashes[some], self.times[some]


class Matches(NamedTuple):
    """Pairs of rows with equal keys: their positions in the run that was looked up and in the index, and the rows."""

    theirs: Int64s
    mine: Int64s
    their_rows: pl.DataFrame
    rows: pl.DataFrame

    def only(self, some: Bools) -> Matches:
        rows = rows_where(self.their_rows, some), rows_where(self.rows, some)
        return Matches(self.theirs[some], self.mine[some], *rows)


class JoinIndex(TableState):
    """The rows of one stream.

    A row is held until event time is `held_us` past the row's own time, which `times` computes from column `event_time`.
    `equal`: the columns in which the rows of a pair are equal, with the keys among them; by default only these.
    """

    def __init__(
        self, schema: SchemaLike, event_time: str, held_us: int, times: pl.Expr, equal: Sequence[str] = ()
    ) -> None:
        super().__init__(schema)
        self._event_time = event_time
        self._time_us = times.dt.epoch("us")
        self._held_us = held_us
        self._equal = tuple(equal)

    @property  # type: ignore[misc]  # it cannot be replaced
    def frame(self) -> pl.DataFrame:
        """All rows that are held."""
        frames = [run.remaining()[0] for run in self._timed()]
        return pl.concat(frames) if frames else self._empty.clone()

    def run_of(self, frame: pl.DataFrame) -> TimedRun | None:
        """Return rows, which conform to the schema, as a run that can be looked up in the other stream; None if empty."""
        rows = self._conforming(frame)
        return self._run(rows) if rows.height else None

    def append(self, frame: pl.DataFrame) -> None:
        run = self.run_of(frame)
        if run is not None:
            self.put(run)

    def matches(self, rows: TimedRun, low: int, high: int) -> Matches | None:
        """Return the pairs of a row of `rows` and a row held here that is `low` to `high` later; None if there is none."""
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
        at_theirs, at_mine = np.concatenate(theirs), np.concatenate(mine)
        left, right = rows_at(rows.frame, at_theirs), rows_at(self._whole, at_mine)
        equal = self._equal or self._layout.keys
        same = np.ones(len(at_mine), np.bool_)
        for name in equal:
            same &= (left.get_column(name) == right.get_column(name)).to_numpy()
        pairs = Matches(at_theirs, at_mine, left, right)
        if same.all():
            return pairs
        return pairs.only(same) if same.any() else None

    def take(self, positions: Int64s) -> pl.DataFrame:
        """Remove the rows at these positions, as `matches` returns them, and return each of them once."""
        runs, frames, before = [], [], 0
        positions = np.unique(positions)
        for run in self._timed():
            begin, end = positions.searchsorted([before, before + run.frame.height])
            if begin < end:
                at = positions[begin:end] - before
                frames.append(run.frame[at])
                run.remove(at)
            before += run.frame.height
            if run.is_mostly_there:
                runs.append(run)
            elif run.rows:
                remaining = run.remaining()
                runs += [TimedRun(*remaining)] if remaining[0].height else []
        self._hold(runs)
        return pl.concat(frames)

    def pop_expired(self, watermark_us: int) -> pl.DataFrame:
        """Remove the rows that have expired at this watermark, and return them: those of a key and a time in the order in
        which they were added."""
        until = self._expired_at(watermark_us)
        due = [run.frame[at] for run in self._timed() if len(at := run.due(until))]
        self.advance(watermark_us)
        return pl.concat(due) if due else self._empty.clone()

    def advance(self, watermark_us: int) -> None:
        """Drop rows that have expired at this watermark."""
        dead_until = self._expired_at(watermark_us)
        runs = self._timed()
        for run in runs:
            run.dead_until = max(run.dead_until, dead_until)
        if any(run.middle <= run.dead_until for run in runs):
            kept = []
            for run in runs:  # each stays in its place: the order of runs is that of arrival
                if run.middle > run.dead_until:
                    kept.append(run)
                elif run.last > run.dead_until:
                    remaining = run.remaining()
                    kept += [TimedRun(*remaining)] if remaining[0].height else []
            self._hold(kept)

    def _expired_at(self, watermark_us: int) -> int:
        if watermark_us == MAX_WATERMARK_US:
            return MAX_WATERMARK_US
        return max(MIN_WATERMARK_US, min(watermark_us - self._held_us, MAX_WATERMARK_US))

    def drop(self, watermarks_of: Callable[[Int32s], Int64s]) -> None:
        """Drop rows that have expired, given the watermark of each key group."""
        runs = []
        for run in self._timed():
            held = _later(run.times, self._held_us) > watermarks_of(self._layout.groups_of(run))
            if held.all():
                runs.append(run)
            elif held.any():
                runs.append(TimedRun(*run.only(held)))
        self._hold(runs)

    def _timed(self) -> list[TimedRun]:
        return cast("list[TimedRun]", self._bound_runs())

    def _run(self, rows: pl.DataFrame) -> TimedRun:
        hashes = hashes_of(selected(rows, self._layout.keys)) >> _HALF
        return TimedRun(rows, hashes, rows.select(self._time_us).to_series().to_numpy())

    def put(self, run: TimedRun) -> None:
        """Append a run, merging runs so that each is more than twice as long as the next, except those of `RUN_ROWS` or
        more.
        """
        runs, merged, rows = list(self._timed()), [run], run.frame.height
        while runs and runs[-1].frame.height <= min(2 * rows, RUN_ROWS - 1):
            merged.append(runs.pop())
            rows += merged[-1].frame.height
        if len(merged) > 1:
            frames, hashes, times = zip(*(each.remaining() for each in reversed(merged)), strict=True)
            run = TimedRun(stacked(frames), np.concatenate(hashes), np.concatenate(times))
        self._hold([*runs, run])

    # ---- for the operator ----

    def _never_null(self) -> Sequence[str]:
        return *self._layout.keys, self._event_time

    def restore(self, chunks: Sequence[Chunk], where: str) -> None:
        """Restore such chunks, of one old subtask or several.

        Raises StorageError if they have other columns, or rows of keys that are not of this subtask.
        """
        rows = pl.concat(self._restored_frames(chunks, where)).sort(self._time_us, maintain_order=True)
        self._hold([self._run(rows.slice(start, RUN_ROWS)) for start in range(0, rows.height, RUN_ROWS)])
        for run in self._timed():
            groups = self._layout.groups_of(run)
            if not self._key_groups.start <= groups.min() <= groups.max() < self._key_groups.stop:
                raise StorageError(
                    f"{where}: state {self.name!r} in the checkpoint has rows of the key groups {groups.min()} to "
                    f"{groups.max()}, and this subtask has {self._key_groups.start} to {self._key_groups.stop - 1}: it is "
                    "damaged, or midstream has not written it. To go back to an older checkpoint, name it with --from"
                )
