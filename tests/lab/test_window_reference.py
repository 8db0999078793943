"""The reference of window operators: what it says must be emitted, held back for more, or turned away as late."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pyarrow as pa

from midstream_lab.jobs.days import DAYS, Days
from midstream_lab.jobs.timed import GAP_MS, TUMBLING_MS
from midstream_lab.jobs.window_reference import WindowReference, difference, wrong_marks

SESSION_US = 1000 * GAP_MS
WINDOW_US = 1000 * TUMBLING_MS
LAST = 1_000_000_000
"""Source 100 has parts of files, so that row n of its first split has the time n ms."""


def rows(*times_ms: int) -> list[tuple[int, int, int]]:
    """Of key 7 in key group 0."""
    return [(LAST + time_ms, 7, 0) for time_ms in times_ms]


def ids(*times_ms: int) -> tuple[int, ...]:
    return tuple(LAST + time_ms for time_ms in times_ms)


def test_a_window_is_due_at_its_last_microsecond_and_no_sooner() -> None:
    reference = WindowReference("window", 0, range(1))
    reference.take(rows(0, 1))
    assert not reference.due(WINDOW_US - 2)
    assert reference.due(WINDOW_US - 1) == Counter([(7, 0, WINDOW_US, ids(0, 1))])
    reference.reach(WINDOW_US - 1)
    assert not reference.due(WINDOW_US * 9)
    assert reference.take(rows(2))[0] == Counter(ids(2))


def test_sessions_that_touch_are_one() -> None:
    reference = WindowReference("session", 0, range(1))
    reference.take(rows(0, GAP_MS, 9 * GAP_MS))
    assert reference.due(1 << 60) == Counter(
        [
            (7, 0, 2 * SESSION_US, ids(0, GAP_MS)),
            (7, 9 * SESSION_US, 10 * SESSION_US, ids(9 * GAP_MS)),
        ]
    )


def test_a_row_that_is_late_by_itself_is_not_when_its_session_is_open() -> None:
    reference = WindowReference("session", 0, range(1))
    reference.take(rows(GAP_MS))
    reference.reach(SESSION_US)
    assert not reference.take(rows(0))[0]
    assert reference.take(rows(0, 50))[0] == Counter()
    reference.reach(90 * SESSION_US)
    assert reference.take(rows(0))[0] == Counter(ids(0))


def test_rows_within_the_allowed_lateness_emit_their_window_again_with_all_that_it_has() -> None:
    reference = WindowReference("window", 1000, range(1))
    reference.take(rows(0))
    reference.reach(WINDOW_US - 1)
    assert reference.take(rows(1)) == (Counter(), Counter([(7, 0, WINDOW_US, ids(0, 1))]))
    reference.reach(WINDOW_US - 1 + 1000)
    assert reference.take(rows(2)) == (Counter(ids(2)), Counter())


def test_a_snapshot_says_of_each_key_group_what_has_fired() -> None:
    reference = WindowReference("window", 0, range(2))
    reference.take([*rows(0), (LAST + 1, 8, 1)])
    said = reference.fired(Counter([(7, 0, WINDOW_US, ids(0))]))
    assert not list(wrong_marks(said, {0: WINDOW_US - 1}))
    assert len(list(wrong_marks(said, {}))) == 1
    assert len(list(wrong_marks(said, {0: WINDOW_US - 1, 1: WINDOW_US - 1}))) == 1


def test_a_restore_goes_on_from_the_marks_of_each_key_group() -> None:
    reference = WindowReference("window", 0, range(2))
    reference.restore({0: WINDOW_US - 1}, [(0, 7, 0, 0, [LAST]), (1, 8, 0, 0, [LAST + 1])])
    assert reference.lowest_us < 0
    assert reference.due(WINDOW_US) == Counter([(8, 0, WINDOW_US, ids(1))])


def test_what_is_emitted_is_compared_row_by_row() -> None:
    due = Counter([(7, 0, WINDOW_US, ids(0, 1))])
    assert difference(due, due) == ""
    assert "1" in difference(Counter([(7, 0, WINDOW_US, ids(0))]), due)


def test_the_days_of_the_reference_are_an_hour_longer_or_shorter_when_the_clock_changes():
    lengths = {}
    for name, days in DAYS.items():
        starts = [days.windows(at_ms * 1000)[-1][0] // 1000 for at_ms in range(5 * 48)]
        first = list(dict.fromkeys(starts))
        lengths[name] = {after - before for before, after in pairwise(first)} - {48}
    assert all(len(found) == 1 for found in lengths.values()), lengths
    assert set().union(*lengths.values()) == {46, 47, 49, 50}


def test_values_that_differ_from_those_of_the_rows_are_reported():
    days = Days("Europe/Paris", 1, 0, ("distinct", "words"))
    rows = pa.RecordBatch.from_pylist([{"ids": [1, 2], "distinct": 9, "words": ["?"]}])
    assert days.wrong_values(rows).startswith("distinct of the rows [1, 2] is 9 instead of ")
