"""Runs one job with its input cut into batches in many ways: the output rows must always be the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT
from midstream.testing.float_compare import close_of, is_near, remove_near
from midstream.testing.inputs import Cut, Rows
from midstream.testing.jobs import What, run
from midstream.testing.results import Result

ROWS_SHOWN_MAX: Final = 5


def check_cuts(
    what: What, inputs: Mapping[str, Rows] | Rows | None = None, *, cuts: int = 20, parallelism: int = 1
) -> Result:
    """Run a job with its input cut into batches in many ways: the output must always be the same.

    On a cluster, where batches are cut is arbitrary, so a result must not depend on it. The order of rows does not
    matter.

    `what`: an Environment, a stream, or several streams of one.
    `inputs`: rows by the uid or name of a source, or just rows if there is one source; as for `run`.
    `cuts`: the number of ways at most.
    `parallelism`: the number of subtasks of each operator.

    Returns the output. Raises AssertionError showing which rows occur with one cut and not with another: a function
    depends on the whole batch, or keeps something between calls outside of its states; or a row is late with one cut
    and not with another, because it is later than the watermark strategy allows; or if the result differs from
    run to run. Other errors as of `run`.

        >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int})
        >>> len(testing.check_cuts(per_user, cuts=5).rows)
        3
    """
    inputs = _kept(inputs)
    first = run(what, inputs, cut=1, parallelism=parallelism)
    for cut in _cuts(cuts):
        other = run(what, inputs, cut=cut, parallelism=parallelism)
        difference = _difference(first, other, cut)
        if difference and _difference(first, run(what, inputs, cut=1, parallelism=parallelism), 1):
            raise AssertionError(
                "the result differs from run to run, with the same cuts too: it depends on chance, on the time, or on what a "
                "former run has left behind"
            )
        if difference:
            raise AssertionError(difference)
    return first


def _kept(inputs: Mapping[str, Rows] | Rows | None) -> Mapping[str, Rows] | Rows | None:
    """Return rows that can be read again for each cut, which an iterator cannot."""
    if isinstance(inputs, Mapping):
        return {name: list(rows) if isinstance(rows, Iterator) else rows for name, rows in inputs.items()}
    return list(inputs) if isinstance(inputs, Iterator) else inputs


def _cuts(number: int) -> Iterator[Cut]:
    """Yield cuts other than one row per batch: the whole, even parts, then parts of all sizes; the same in each call."""
    fixed: list[Cut] = ["whole", 2, 3, 5]
    chance = random.Random(0)
    for at in range(number - 1):
        yield fixed[at] if at < len(fixed) else [chance.choice((1, 1, 2, 3, 4, 8, 50)) for _ in range(64)]


def _difference(first: Result, other: Result, cut: Cut) -> str:
    """Describe which rows differ; "" if none do."""
    texts = []
    is_late = False
    theirs = other.tables()
    for label, table in first.tables().items():
        if table.equals(theirs[label]):
            continue
        one, two = table_rows(table), table_rows(theirs[label])
        close = {field.name: close_of(field.type) for field in table.schema}
        only_one, only_two = _only_in_one(one, two, close)
        if only_one or only_two:
            is_late = is_late or label.endswith((f"side output {LATE!r}", f"side output {LATE_RIGHT!r}"))
            texts.append(f"{label}:")
            texts += _shown("one row a batch", only_one)
            texts += _shown(_cut_text(cut), only_two)
    if not texts:
        return ""
    why = (
        "a row is late with one cut and not with another: a watermark follows each batch, and the row is later "
        "than with_watermarks() allows"
        if is_late
        else "the engine decides where batches are cut. A function on batches must treat each row independently, and keep "
        "what it has to remember in its declared states. A timer fires between two batches: on_timer(time) should only "
        "count rows whose time is at or before `time`. Rows of two inputs arrive in any order. "
        "(midstream simulate JOB.py finds the reason)"
    )
    return "\n".join(["the result depends on where batches are cut", *texts, why])


def _shown(cut: str, rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    more = [f"    … {len(rows) - ROWS_SHOWN_MAX} more"] if len(rows) > ROWS_SHOWN_MAX else []
    return [f"  only with {cut}:", *(f"    {row}" for row in rows[:ROWS_SHOWN_MAX]), *more]


def _cut_text(cut: Cut) -> str:
    if cut == "whole":
        return "the whole input in one batch"
    return (
        f"{cut} rows per batch" if isinstance(cut, int) else f"batches of {', '.join(map(str, list(cut)[:8]))} … rows"
    )


def _without(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the first that the second does not have, or has less often. Rows may hold unhashable values."""
    left = Counter(map(repr, others))
    found = []
    for row in rows:
        text = repr(row)
        if left[text]:
            left[text] -= 1
        else:
            found.append(row)
    return found


def _only_in_one(
    one: list[dict[str, Any]], two: list[dict[str, Any]], close: Mapping[str, float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of each that the other does not have; floats may differ by the order of summation (`float_compare`)."""
    only_one, only_two = _without(one, two), _without(two, one)
    remove_near(only_one, only_two, lambda a, b: all(is_near(value, b[name], close[name]) for name, value in a.items()))
    return only_one, only_two
