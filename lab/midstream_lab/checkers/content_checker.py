"""The contents of rows, column by column: a function of the row's id and of the operator that counted it last.

A row of a source is the same everywhere: at a sink, in flight, or held in an operator. Only its `n`
changes on the way: it is a number that one of the last counting operators has assigned to the row, or 0
if none has. Where all rows of one such operator arrive by a single path, the numbers of a key are 1, 2,
3, … up to its count, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.batches import concat
from midstream.engine.core.key_groups import key_groups
from midstream.simulation.outside import SOURCE_IDS
from midstream_lab.jobs.joins import HOW
from midstream_lab.jobs.lateness import LENIENT
from midstream_lab.jobs.lookups import LOOKUPS
from midstream_lab.jobs.recorded_rows import N_BITS, Int64s, SimSource, numbered
from midstream_lab.jobs.shapes import Shape
from midstream_lab.jobs.topologies import uid_of

Bools = npt.NDArray[np.bool_]
SAMPLES: Final = 5
_NUMBERS: Final = ("id", "key", "sequence", "ts", "n")
COUNTING: Final = frozenset(("count", "share", "running"))
MAPPING: Final = frozenset(
    ("side", "tags", "unique", "unique_near", "sorted", "failing", "failing_batches", "failing_process", *LOOKUPS)
)
"""The kinds of operators that emit rows of the sources, perhaps fewer or in another order."""
MAKING: Final = frozenset(("window", "slide", "session", "total", "periodic", "first_rows", "counted", *HOW, *LENIENT))
"""The kinds of operators that emit new rows on their main output, rather than rows of the sources."""


def column(rows: pa.RecordBatch, name: str) -> Int64s:
    """Return a column of integers or times."""
    values = rows.column(name)
    if name == "ts":
        values = values.view(pa.int64())
    found: Int64s = values.to_numpy()
    return found


class Contents:
    """The contents of all rows of `sources`, in ascending order of their ids."""

    def __init__(self, sources: Iterable[SimSource], max_parallelism: int) -> None:
        self._sources = sorted(sources, key=lambda source: source.number)
        self._max_parallelism = max_parallelism

    @cached_property
    def rows(self) -> pa.RecordBatch:
        batches = [source.batch(i, 0, count) for source in self._sources for i, count in enumerate(source.rows)]
        return concat(batches)

    @cached_property
    def ids(self) -> Int64s:
        return column(self.rows, "id")

    @cached_property
    def keys(self) -> Int64s:
        return column(self.rows, "key")

    @cached_property
    def times_us(self) -> Int64s:
        return column(self.rows, "ts")

    @cached_property
    def groups(self) -> npt.NDArray[np.int32]:
        return key_groups(self.rows, ("key",), self._max_parallelism)

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """The key group of each key."""
        return dict(zip(self.keys.tolist(), self.groups.tolist(), strict=True))

    @cached_property
    def _expected(self) -> dict[str, Int64s]:
        return {name: column(self.rows, name) for name in _NUMBERS}

    def are_of(self, sources: Set[int]) -> Bools:
        """Return which of the rows belong to the sources with these numbers."""
        return np.isin(self.ids // SOURCE_IDS, sorted(sources))

    def positions(self, ids: Int64s) -> tuple[Int64s, Bools]:
        """Return the position of each id in `self.ids`, and whether it is there; if not, the position is arbitrary."""
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return positions, self.ids[positions] == ids

    def amounts(self, ids: Int64s, times: Int64s | None = None) -> Int64s:
        """Return how often each row occurs in `ids`, weighted by `times` if given; ids of other rows are ignored."""
        positions, known = self.positions(ids)
        counted = np.bincount(positions[known], None if times is None else times[known], minlength=len(self.ids))
        return counted.astype(np.int64)

    def check(self, rows: pa.RecordBatch, counted: Sequence[Set[int] | None]) -> str:
        """Describe what is wrong with rows of the sources; "" if nothing is.

        `counted`: the numbers assigned by each operator that may have counted them last (see `rows.numbered`); None
        stands for rows that were not counted.
        """
        if not rows.num_rows:
            return ""
        found = {name: column(rows, name) for name in _NUMBERS}
        ids = found["id"]
        positions, known = self.positions(ids)
        if not known.all():
            return f"rows {some(ids[~known])}, which there are not"
        for name in ("key", "sequence", "ts"):
            wrong = found[name] != self._expected[name][positions]
            if wrong.any():
                return f"another {name} than they should in rows {some(ids[wrong])}: {some(found[name][wrong])}"
        text = rows.column("text")
        expected = self.rows.column("text").take(pa.array(positions, pa.int64()))
        if not text.equals(expected):
            wrong = np.array([a != b for a, b in zip(text.to_pylist(), expected.to_pylist(), strict=True)])
            return f"another text than they should in rows {some(ids[wrong])}"
        return self._check_n(ids, found["n"], counted)

    def _check_n(self, ids: Int64s, n: Int64s, counted: Sequence[Set[int] | None]) -> str:
        if counted == [None]:
            wrong = n != 0
            return f"an n in rows {some(ids[wrong])}, counted by no operator: {some(n[wrong])}" if wrong.any() else ""
        pairs = numbered(ids, n)
        given = [part for part in counted if part is not None]
        if None not in counted and len(given) == 1 and given[0] >= set(pairs):
            return ""
        bad = [
            (row, number)
            for pair, row, number in zip(pairs, ids.tolist(), n.tolist(), strict=True)
            if not (number == 0 and None in counted) and not any(pair in part for part in given)
        ]
        return f"an n that no operator has given them in rows (id, n) {some(bad)}" if bad else ""


def check_made(rows: pa.RecordBatch) -> str:
    """Describe what is wrong with the columns that rows with a sum leave empty; "" if nothing is."""
    wrong = [name for name in ("key", "sequence", "ts", "n") if column(rows, name).any()]
    if any(rows.column("text").to_pylist()):
        wrong.append("text")
    return f"something in the columns {', '.join(wrong)} of rows that hold a sum" if wrong else ""


# ---- which operators have counted the rows ---------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """The output of a node."""

    counted: frozenset[str | None] = frozenset()
    """The operators that may have counted its rows last; None stands for rows that were not counted."""
    whole: str | None = None
    """The operator whose rows all pass here, and by no other path; None if there is none."""
    nodes: tuple[int, ...] = ()
    """The nodes on the path from that operator, in which rows may be in flight or held."""


def ways(shape: Shape) -> list[Way]:
    """Return the output of each node; for a sink, its input."""
    out: list[Way] = []
    for index, node in enumerate(shape):
        came = [out[entry.node] for entry in node.inputs if entry.port == 0 or node.chain[0] not in ("share", "rules")]
        way = Way(frozenset[str | None]({None}))
        if came:
            is_whole = len(came) == 1 and node.inputs[0].tag is None and came[0].whole is not None
            way = Way(
                frozenset[str | None]().union(*(entry.counted for entry in came)),
                came[0].whole if is_whole else None,
                (*came[0].nodes, index) if is_whole else (),
            )
        for position, kind in enumerate(node.chain):
            if kind in COUNTING:
                uid = uid_of(index, position, kind)
                way = Way(frozenset[str | None]({uid}), uid)
            elif kind in MAPPING or kind in MAKING:
                way = Way(way.counted)
        out.append(way)
    return out


def codes(rows: pa.RecordBatch) -> Int64s:
    """Return the key and the n of each row as one integer."""
    return column(rows, "key") << N_BITS | column(rows, "n")


def check_numbers(found: Sequence[Int64s], counts: Mapping[int, tuple[int, int]]) -> str:
    """Describe what is wrong with the codes of all rows of one operator that has these `counts`; "" if nothing is."""
    have = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
    keys = np.array(sorted(counts), np.int64)
    upto = np.array([counts[key][0] for key in keys.tolist()], np.int64)
    before = np.cumsum(upto) - upto
    due = np.repeat(keys << N_BITS, upto) + np.arange(1, upto.sum() + 1) - np.repeat(before, upto)
    if np.array_equal(have, due):
        return ""
    shown = [(code >> N_BITS, code & ((1 << N_BITS) - 1)) for code in np.setdiff1d(due, have)[:SAMPLES].tolist()]
    return f"not each n of each key once, such as (key, n) {some(shown)}"


def some(items: Iterable[object]) -> str:
    listed = list(items.tolist() if isinstance(items, np.ndarray) else items)
    shown = ", ".join(str(item) for item in listed[:SAMPLES])
    return f"{shown}, … ({len(listed)})" if len(listed) > SAMPLES else shown or "nothing"
