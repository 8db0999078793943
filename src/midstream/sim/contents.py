"""What is in a row, column by column: a function of its id, and of the operator that has counted it.

A row of a source is the same wherever it lies: at a sink, in flight, held back in an operator. Only
its `n` changes on the way. It is one of the numbers that one of the last counting operators has given
the row, 0 where none has; and where all rows of one such operator come by one way, those of a key are
1, 2, 3, … up to its count, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.core.batches import concat
from midstream.core.keys import key_groups
from midstream.sim.lateness import LENIENT
from midstream.sim.rows import N_BITS, SOURCE_IDS, Int64s, SimSource, numbered
from midstream.sim.shapes import Shape
from midstream.sim.topologies import uid_of

Bools = npt.NDArray[np.bool_]
SAMPLES: Final = 5
_NUMBERS: Final = ("id", "key", "sequence", "ts", "n")
COUNTING: Final = frozenset(("count", "share"))
MAKING: Final = frozenset(("window", "slide", "session", "total", "join", *LENIENT))
"""Operators whose main output is made of rows, and is no rows of the sources."""


def column(rows: pa.RecordBatch, name: str) -> Int64s:
    """One that holds whole numbers, or times."""
    values = rows.column(name)
    if name == "ts":
        values = values.view(pa.int64())
    found: Int64s = values.to_numpy()
    return found


class Contents:
    """Of all rows of `sources`, by their ids in ascending order."""

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
        """Which of the rows these sources have, by their numbers."""
        return np.isin(self.ids // SOURCE_IDS, sorted(sources))

    def places(self, ids: Int64s) -> tuple[Int64s, Bools]:
        """Where each of them is in `ids`, and whether it is there at all; if not, its place is any."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return places, self.ids[places] == ids

    def amounts(self, ids: Int64s, times: Int64s | None = None) -> Int64s:
        """How often each row is among them, or is according to `times`; what is no row of the sources is left out."""
        places, known = self.places(ids)
        counted = np.bincount(places[known], None if times is None else times[known], minlength=len(self.ids))
        return counted.astype(np.int64)

    def check(self, rows: pa.RecordBatch, counted: Sequence[Set[int] | None]) -> str:
        """What is wrong with rows of the sources; "" for nothing.

        `counted`: what each of the operators that may have counted them last has given out (see `rows.numbered`);
        None among them: there are rows that nobody has counted.
        """
        if not rows.num_rows:
            return ""
        found = {name: column(rows, name) for name in _NUMBERS}
        ids = found["id"]
        places, known = self.places(ids)
        if not known.all():
            return f"rows {some(ids[~known])}, which there are not"
        for name in ("key", "sequence", "ts"):
            wrong = found[name] != self._expected[name][places]
            if wrong.any():
                return f"another {name} than they should in rows {some(ids[wrong])}: {some(found[name][wrong])}"
        text = rows.column("text")
        expected = self.rows.column("text").take(pa.array(places))
        if not text.equals(expected):
            wrong = np.array([a != b for a, b in zip(text.to_pylist(), expected.to_pylist(), strict=True)])
            return f"another text than they should in rows {some(ids[wrong])}"
        return self._check_n(ids, found["n"], counted)

    def _check_n(self, ids: Int64s, n: Int64s, counted: Sequence[Set[int] | None]) -> str:
        if counted == [None]:
            wrong = n != 0
            return f"an n in rows {some(ids[wrong])}, which nobody has counted: {some(n[wrong])}" if wrong.any() else ""
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
    """What is wrong with the columns that nobody fills of rows that say a sum; "" for nothing."""
    wrong = [name for name in ("key", "sequence", "ts", "n") if column(rows, name).any()]
    if any(rows.column("text").to_pylist()):
        wrong.append("text")
    return f"something in the columns {', '.join(wrong)} of rows that say a sum" if wrong else ""


# ---- who has counted what ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """What comes out of a node."""

    counted: frozenset[str | None] = frozenset()
    """The operators that may have counted its rows last; None: there are rows that none has."""
    whole: str | None = None
    """The operator all of whose rows come by here, by this way alone."""
    nodes: tuple[int, ...] = ()
    """On the way from there to here, in which rows may be in flight, or wait."""


def ways(shape: Shape) -> list[Way]:
    """What goes out of each node; of a sink, what comes into it."""
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
            elif kind in ("side", "tags") or kind in MAKING:
                way = Way(way.counted)
        out.append(way)
    return out


def codes(rows: pa.RecordBatch) -> Int64s:
    """The key and the n of each row, as one number."""
    return column(rows, "key") << N_BITS | column(rows, "n")


def check_numbers(found: Sequence[Int64s], counts: Mapping[int, tuple[int, int]]) -> str:
    """What is wrong with the codes of all rows of one operator, whose `counts` are these; "" for nothing."""
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
