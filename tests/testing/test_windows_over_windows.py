"""Windows over windows of every kind: what a firing emits, in whichever pieces, is not late for the windows after it.

A watermark may be made of the first results of a firing, before the others have left the operator.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import Count, Environment, Sum, WatermarkStrategy, session, sliding, testing, tumbling
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.window_factory import Window

START = datetime(2024, 1, 1)
COLUMNS = {"k": int, "at": datetime}
WINDOWS: dict[str, Window] = {"tumbling": tumbling(3), "sliding": sliding(6, 2), "session": session(2)}
TIMES_IN = {"tumbling": 1, "sliding": 3, "session": 1}
"""In how many windows a row is."""


def counted(rows: list[dict[str, Any]], column: str) -> Counter[tuple[int, datetime]]:
    """The rows of each key and each window of 10 s, of results with an end in it."""
    found: Counter[tuple[int, datetime]] = Counter()
    for row in rows:
        seconds = int((row[column] - START).total_seconds())
        found[row["k"], START + timedelta(seconds=seconds // 10 * 10)] += row["n"]
    return found


@settings(max_examples=examples(30), deadline=None)
@given(
    first=st.sampled_from(sorted(WINDOWS)),
    second=st.sampled_from(sorted(WINDOWS)),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=40),
    bound=st.sampled_from([0, 5, 50]),
    cut=st.sampled_from([1, 2, 7, "whole", [8, 1, 3]]),
    parallelism=st.sampled_from([1, 2, 3]),
    piece_rows=st.sampled_from([1, 3, 65_536]),
)
def test_no_result_is_late_for_the_windows_after_it(first, second, rows, bound, cut, parallelism, piece_rows) -> None:
    given_rows = [{"k": key, "at": START + timedelta(seconds=s)} for key, s in sorted(rows, key=lambda row: row[1])]
    source = Environment().from_collection([], schema=COLUMNS)
    timed = source.with_watermarks("at", WatermarkStrategy.bounded(bound))
    results = timed.key_by("k").window(WINDOWS[first]).aggregate(n=Count())
    again = results.with_watermarks("window_end", WatermarkStrategy.monotonous()).key_by("k")
    per_ten = again.window(tumbling(10)).aggregate(n=Sum("n"))
    other = again.window(WINDOWS[second]).aggregate(n=Sum("n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_base, "PIECE_ROWS", piece_rows)
        patch.setattr(window_base, "SLICE_ROWS", 2 * piece_rows)
        found = testing.run([results, per_ten, other], given_rows, cut=cut, parallelism=parallelism)
    assert not any(found.late.values())
    made = found[results]
    assert sum(row["n"] for row in made) == TIMES_IN[first] * len(rows)
    assert counted(found[per_ten], "window_start") == counted(made, "window_end")
    assert sum(row["n"] for row in found[other]) == TIMES_IN[first] * TIMES_IN[second] * len(rows)
