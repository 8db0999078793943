"""The joins of two streams by time in a simulated job, and the rules for their results.

A pair is lost only if one of its rows is late. If no row can be late, the pairs are exactly those of the rows received,
the state has every row that will still find a partner, and the rows without a partner are those that never get one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.functions.asof_join import asof_join_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import interval_join_operator
from midstream.engine.operators.functions.window_join import window_join_operator
from midstream.engine.operators.windows.window_specs import WINDOW_END, WINDOW_START, sliding
from midstream_lab.jobs.key_types import PLAIN, KeyLayout
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside, time_ms
from midstream_lab.jobs.timed import SIZE_MS, SLIDE_MS
from midstream_lab.jobs.wrapped_operator import Around

LOWER_MS: Final = -2
UPPER_MS: Final = 1
TOLERANCE_MS: Final = 3
"""How old the version of an as-of join may be."""
LEFT: Final = ("table:left", "table:left_unmatched", "table:left_waiting")
RIGHT: Final = ("table:right", "table:right_unmatched", "table:right_waiting", "table:newest")
"""The parts of the state that have the rows of each side."""
HOW: Final = {
    "join": "inner",
    "full_join": "full",
    "anti_join": "anti",
    "asof_join": "asof",
    "window_join": "full in windows",
}
"""The kinds of joins."""
IN_WINDOWS: Final = HOW["window_join"]
NONE: Final = -1
"""Stands for the id of the partner of a row that has none."""
_SECOND: Final = "2"
"""The suffix of the names of the second stream's columns."""


class Join(Around):
    """The operator of `interval_join`, with renamed columns of the second stream."""

    def __init__(self, uid: str, outside: Outside, layout: KeyLayout, how: str) -> None:
        self._given = uid, outside, layout, how
        self._second = pa.schema([field.with_name(field.name + _SECOND) for field in layout.schema])
        second_keys = tuple(name + _SECOND for name in layout.keys)
        ports = [
            Port("process1", layout.keys, "ts", layout.schema),
            Port("process2", second_keys, "ts" + _SECOND, self._second),
        ]
        inner: Operator
        if how == "asof":
            inner = asof_join_operator(uid, ports, TOLERANCE_MS * 1000)
        elif how == IN_WINDOWS:
            inner = window_join_operator(uid, ports, sliding(f"{SIZE_MS} ms", f"{SLIDE_MS} ms"), "full")
        else:
            inner = interval_join_operator(uid, ports, LOWER_MS * 1000, UPPER_MS * 1000, how)
        super().__init__(outside, inner)

    def __reduce__(self) -> tuple[type[Join], tuple[str, Outside, KeyLayout, str]]:
        return Join, self._given

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(to_list(batch.column("id")))
        second = pa.RecordBatch.from_arrays(batch.columns, schema=self._second) if port else batch
        self._inner.process(second, port)


class Couple(Operator):
    """Emits one row of SCHEMA for each row of a join: the first stream's, with the id of the second's as `n`. NONE stands
    for the id of one that is missing, whose other columns are those of its partner."""

    def __init__(self, outside: Outside, layout: KeyLayout) -> None:
        self._outside = outside
        self._layout = layout
        self._watermark_us = MIN_WATERMARK_US
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def advance_watermark(self, watermark_us: int) -> bool:
        self._watermark_us = watermark_us
        return True

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        times = batch.column("ts" if WINDOW_END not in batch.schema.names else WINDOW_END).view(pa.int64()).to_numpy()
        if WINDOW_END in batch.schema.names:
            times = times - 1
            self._check_windows(batch, times)
        if (times <= self._watermark_us).any():
            self._outside.world.bug(
                f"a join has emitted rows of {times.min()} after the watermark {self._watermark_us}"
            )
        key = "key" if self._layout is PLAIN else "was"
        sides = [("", key)]
        if "id" + _SECOND in batch.schema.names:
            sides.append((_SECOND, key if key == "key" else key + _SECOND))
        for end, name in sides:
            self._check_batch(batch.filter(batch.column("id" + end).is_valid()), end, name)
        columns = {name: _either(batch, name) for name in SCHEMA.names}
        n = batch.column("id" + _SECOND).fill_null(NONE) if len(sides) > 1 else pa.array([NONE] * batch.num_rows)
        columns |= {"id": batch.column("id").fill_null(NONE), "key": _either(batch, key), "n": n}
        self._out.emit(pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA))

    def _check_windows(self, batch: pa.RecordBatch, lasts_us: Int64s) -> None:
        """Check that the rows of both sides are in the window that they are emitted with."""
        firsts_us = batch.column(WINDOW_START).view(pa.int64()).to_numpy()
        is_window = (firsts_us % (SLIDE_MS * 1000) == 0) & (lasts_us - firsts_us == SIZE_MS * 1000 - 1)
        for name in ("ts", "ts" + _SECOND):
            rows = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
            times_us = batch.column(name).view(pa.int64()).fill_null(0).to_numpy()
            is_window &= ~rows | ((firsts_us <= times_us) & (times_us <= lasts_us))
        if not is_window.all():
            self._outside.world.bug(
                f"joined rows are not in their windows: {batch.filter(pa.array(~is_window)).to_pylist()}"
            )

    def _check_batch(self, batch: pa.RecordBatch, end: str, key: str) -> None:
        """Check that the rows whose columns end in `end` are unchanged. `key`: the column with their original keys."""
        ids = to_list(batch.column("id" + end))
        due_us = np.array([time_ms(row) * 1000 for row in ids])
        expected = self._layout.arrays(ids, to_list(batch.column(key)))
        if (batch.column("ts" + end).view(pa.int64()).to_numpy() != due_us).any():
            self._outside.world.bug(f"joined rows have other times than they had: {ids}")
        if batch.column("text" + end).null_count:
            self._outside.world.bug(f"joined rows lack their text: {ids}")
        if any(not batch.column(name).equals(keys) for name, keys in zip(self._layout.keys, expected, strict=True)):
            self._outside.world.bug(f"joined rows have other keys than they had: {ids}")


def _either(batch: pa.RecordBatch, name: str) -> pa.Array[Any]:
    """Return a column of the first stream, with the values of the second where there is no row of the first."""
    if name + _SECOND not in batch.schema.names:
        return batch.column(name)
    return pc.coalesce(batch.column(name), batch.column(name + _SECOND))


@dataclass(frozen=True, slots=True)
class Joined:
    """The kind of a join, the ids that both of its sides have received, and the keys of all rows by id."""

    how: str
    left: Counter[int]
    right: Counter[int]
    keys: Mapping[int, int]
    layout: KeyLayout

    def pairs(self) -> Counter[tuple[int, int]]:
        return _pairs(self.left, self.right, self._key, self.how)

    def alone(self) -> Counter[tuple[int, int]]:
        """Return the rows without a partner that the join emits if no others arrive, as pairs with NONE."""
        if self.how == IN_WINDOWS:
            return self._alone_in_windows()
        pairs = self.pairs()
        left, right = {row for row, _ in pairs}, {row for _, row in pairs}
        found = {(row, NONE): n for row, n in self.left.items() if self.how != "inner" and row not in left}
        if self.how == "full":
            found |= {(NONE, row): n for row, n in self.right.items() if row not in right}
        return Counter(found)

    def _alone_in_windows(self) -> Counter[tuple[int, int]]:
        sides = [{(self._key(row), end) for row in side for end in ends_ms(row)} for side in (self.left, self.right)]
        found: Counter[tuple[int, int]] = Counter()
        for rows, others, is_left in ((self.left, sides[1], True), (self.right, sides[0], False)):
            for row, n in rows.items():
                alone = n * sum((self._key(row), end) not in others for end in ends_ms(row))
                if alone:
                    found[(row, NONE) if is_left else (NONE, row)] = alone
        return found

    def versions(self) -> Callable[[int], set[int]]:
        """Return a function that returns the rows of the right of which an as-of join must choose one for a row of the
        left: those at the newest time."""
        at: dict[object, dict[int, set[int]]] = {}
        for row in self.right:
            at.setdefault(self._key(row), {}).setdefault(time_ms(row), set()).add(row)

        def of(row: int) -> set[int]:
            times, time = at.get(self._key(row), {}), time_ms(row)
            newest = max((t for t in times if time - TOLERANCE_MS <= t <= time), default=None)
            return {NONE} if newest is None else times[newest]

        return of

    def awaited(self, then: Joined) -> tuple[Counter[int], Counter[int]]:
        """Return the rows of each side that will find partners among those that arrive until the join is as `then`."""
        more = then.left - self.left, then.right - self.right
        left = {row for row, _ in _pairs(self.left, more[1], then._key, self.how)}
        right = {row for _, row in _pairs(more[0], self.right, then._key, self.how)}
        return Counter({row: self.left[row] for row in left}), Counter({row: self.right[row] for row in right})

    def _key(self, row: int) -> object:
        return self.layout.stored_key(row, self.keys[row])


def ends_ms(row: int) -> range:
    """Return the ends of the windows of a row, of which there are `SIZE_MS // SLIDE_MS`."""
    first = time_ms(row) // SLIDE_MS * SLIDE_MS + SLIDE_MS
    return range(first, first + SIZE_MS, SLIDE_MS)


def _pairs(left: Counter[int], right: Counter[int], key: Callable[[int], object], how: str) -> Counter[tuple[int, int]]:
    """Return how often each pair is joined: in windows, once for each that both rows are in."""
    if how == IN_WINDOWS:
        others: dict[tuple[object, int], list[int]] = {}
        for row in right:
            for end in ends_ms(row):
                others.setdefault((key(row), end), []).append(row)
        made: Counter[tuple[int, int]] = Counter()
        for row, n in left.items():
            for end in ends_ms(row):
                for partner in others.get((key(row), end), ()):
                    made[row, partner] += n * right[partner]
        return made
    at: dict[tuple[object, int], list[int]] = {}
    for row in right:
        at.setdefault((key(row), time_ms(row)), []).append(row)
    found: Counter[tuple[int, int]] = Counter()
    for row, n in left.items():
        mine, time = key(row), time_ms(row)
        for other in range(time + LOWER_MS, time + UPPER_MS + 1):
            for partner in at.get((mine, other), ()):
                found[row, partner] = n * right[partner]
    return found


def wrong_results(
    uid: str,
    joined: Joined,
    then: Joined | None,
    found: Counter[tuple[int, int]],
    *,
    is_exact: bool,
    is_over: bool,
) -> Iterator[str]:
    """Yield complaints about the results of a join.

    `then`: what it will have received at the end if no row can be late; otherwise None. `is_exact`: nothing is missing.
    `is_over`: event time has passed all rows.
    """
    if joined.how == "asof":
        yield from _wrong_versions(uid, joined, then, found, is_exact=is_exact and is_over)
        return
    alone = Counter({pair: n for pair, n in found.items() if NONE in pair})
    if joined.how != "anti":
        yield from _differing(uid, "pairs", joined.pairs(), found - alone, is_exact=is_exact)
    elif pairs := found - alone:
        yield f"{uid} has emitted pairs: {sorted(pairs)[:5]}"
    if then is not None:
        yield from _differing(uid, "rows without a partner", then.alone(), alone, is_exact=is_exact and is_over)
    else:
        most = SIZE_MS // SLIDE_MS if joined.how == IN_WINDOWS else 1
        got = {(row, NONE): n * most for row, n in joined.left.items()}
        got |= {(NONE, row): n * most for row, n in joined.right.items()}
        yield from _differing(uid, "rows without a partner", Counter(got), alone, is_exact=False)


def _wrong_versions(
    uid: str, joined: Joined, then: Joined | None, found: Counter[tuple[int, int]], *, is_exact: bool
) -> Iterator[str]:
    emitted: Counter[int] = Counter()
    for (row, _), n in found.items():
        emitted[row] += n
    if surplus := emitted - joined.left:
        yield f"{uid} has emitted {surplus.total()} rows too many: {sorted(surplus)[:5]}"
    if is_exact and (lost := joined.left - emitted):
        yield f"{uid} has not emitted {lost.total()} rows: {sorted(lost)[:5]}"
    if foreign := {version for _, version in found} - {NONE, *joined.right}:
        yield f"{uid} has joined versions that it has not received: {sorted(foreign)[:5]}"
    if then is not None:
        versions = then.versions()
        if wrong := sorted((row, version) for row, version in found if version not in versions(row)):
            yield f"{uid} has joined {len(wrong)} rows with a version that is not the newest: {wrong[:5]}"


def _differing(
    uid: str, what: str, expected: Counter[tuple[int, int]], found: Counter[tuple[int, int]], *, is_exact: bool
) -> Iterator[str]:
    lost, surplus = expected - found, found - expected
    if lost and is_exact:
        yield f"{uid} has not made {lost.total()} {what}: {sorted(lost)[:5]}"
    if surplus:
        yield f"{uid} has made {surplus.total()} {what} too many: {sorted(surplus)[:5]}"


def wrong_sides(
    uid: str, joined: Joined, then: Joined | None, left: Iterable[int], right: Iterable[int]
) -> Iterator[str]:
    """Yield complaints about the rows in state: all must have been received, and none may be missing that will find a
    partner until the join is as `then` (None: unknown).
    """
    awaited = (Counter[int](), Counter[int]()) if then is None else joined.awaited(then)
    if joined.how in ("anti", "asof"):  # rows leave as soon as they are certain; the right rows of "anti" have no ids
        awaited = Counter(), Counter()
        left, right = (
            set(left),
            set(right),
        )  # a version that no longer waits lies in both of its tables until they merge
    most = 1
    if joined.how == IN_WINDOWS:  # a row is held for each of its windows
        most = SIZE_MS // SLIDE_MS
    for side, kept, got, needed in (
        ("left", Counter(left), joined.left, awaited[0]),
        ("right", Counter(right), joined.right, awaited[1]),
    ):
        if surplus := kept - Counter({row: n * most for row, n in got.items()}):
            yield f"{uid} keeps rows on the {side} that have not come, or more often: {sorted(surplus)[:5]}"
        if missing := needed - kept:
            yield f"{uid} has forgotten rows on the {side} that others will need: {sorted(missing)[:5]}"
