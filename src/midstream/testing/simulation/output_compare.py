"""Compares what sinks received with what they should have received: rows of each as a multiset, in any order.

The order of rows is not compared: which of two keys comes first, when a window fires, and how inputs are interleaved
may differ between any two runs. Floating-point numbers may differ by the effects of the order of summation
(`float_compare`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.errors import SchemaError
from midstream.testing.float_compare import CANCELLED, MATCHED_MAX, close_of, has_cancelled, is_near, remove_near
from midstream.testing.simulation.simulated_job import SourceLine

SHOWN: Final = 3
"""The number of rows of each kind that a report shows."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contract:
    """How the rows of one sink are compared."""

    latest: tuple[str, ...] = ()
    """The keys of a stream of updates: only the last row of each key counts."""
    ignored: tuple[str, ...] = ()
    """Columns that may have any value."""


@dataclass(slots=True)
class Difference:
    """The difference between the rows of a sink, or an operator, and those of the reference run."""

    source_line: SourceLine
    missing: list[Row] = field(default_factory=list)
    surplus: list[Row] = field(default_factory=list)
    doubled: list[Row] = field(default_factory=list)
    """Rows that the reference run has less often."""
    changed: list[tuple[Row, Row]] = field(default_factory=list)
    """Changed rows: that of the reference run, and the one that replaces it."""

    def lines(self) -> list[str]:
        """Describe, for display, what differs, with the first few rows."""
        parts = [
            _count(self.missing, "is missing", "are missing"),
            _count(self.doubled, "is there too often", "occur too often"),
            _count(self.changed, "has changed", "have changed"),
            _count(self.surplus, "should not be there", "should not be there"),
        ]
        lines = [f"{self.source_line}: {', '.join(text for text in parts if text)}"]
        lines += [f"  missing:   {_text(row)}" for row in self.missing[:SHOWN]]
        lines += [f"  too often: {_text(row)}" for row in self.doubled[:SHOWN]]
        for before, after in self.changed[:SHOWN]:
            lines += [f"  expected:  {_text(before)}", f"  instead:   {_text(after)}"]
        lines += [f"  surplus:   {_text(row)}" for row in self.surplus[:SHOWN]]
        if self.changed and all(_has_only_cancelled(before, after) for before, after in self.changed):
            lines.append(f"  {CANCELLED}")
        return lines


def differences(
    expected: Mapping[str, pa.Table],
    found: Mapping[str, pa.Table],
    source_lines: Iterable[SourceLine],
    contracts: Mapping[str, Contract],
) -> list[Difference]:
    """Return the difference of each of `source_lines` whose rows differ, in their order."""
    differing = []
    for source_line in source_lines:
        contract = contracts.get(source_line.uid, Contract())
        before, after = rows_of(expected.get(source_line.uid), contract), rows_of(found.get(source_line.uid), contract)
        if before != after:
            close = _closeness(expected.get(source_line.uid), found.get(source_line.uid))
            difference = _difference(source_line, before, after, close)
            if difference is not None:
                differing.append(difference)
    return differing


def rows_of(table: pa.Table | None, contract: Contract = Contract()) -> Counter[tuple[tuple[str, Any], ...]]:
    """Return how often each row occurs."""
    if table is None or not table.num_rows:
        return Counter()
    names = [name for name in table.column_names if name not in contract.ignored]
    columns = [_values(table.column(name)) for name in names]
    if contract.latest:
        keys = zip(*(map(_frozen, _values(table.column(name))) for name in contract.latest), strict=True)
        last = sorted({key: index for index, key in enumerate(keys)}.values())
        columns = [[column[index] for index in last] for column in columns]
    plain = [column if _is_plain(column) else [_frozen(value) for value in column] for column in columns]
    return Counter(tuple(zip(names, row, strict=True)) for row in zip(*plain, strict=True))


def _values(column: pa.ChunkedArray[Any]) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:  # a time that no datetime can hold
        try:
            values = column.cast(pa.int64()).to_pylist()
        except pa.ArrowException:
            raise SchemaError(f"a column of {column.type} has a value that Python cannot represent: {error}") from error
    return values


def _is_plain(column: Sequence[Any]) -> bool:
    return all(type(value) in (int, str, bool, bytes, type(None)) for value in column)


def _frozen(value: Any) -> Any:
    """Return the value in a hashable form."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return value


Rows = Counter[tuple[tuple[str, Any], ...]]


Closeness = Mapping[str, float]
"""The relative error of floats, by column, that the order of summation explains."""


def _closeness(*tables: pa.Table | None) -> Closeness:
    return {field.name: close_of(field.type) for table in tables if table is not None for field in table.schema}


def _difference(source_line: SourceLine, before: Rows, after: Rows, close: Closeness) -> Difference | None:
    """Return the difference; None if only the order of summation of floats explains it."""
    missing, surplus = list((before - after).elements()), list((after - before).elements())
    remove_near(missing, surplus, lambda row, other: _alike(row, other, close) == len(row))
    if not missing and not surplus:
        return None
    found = Difference(source_line)
    for row in list(surplus):
        if before[row]:
            surplus.remove(row)
            found.doubled.append(dict(row))
    if len(missing) <= MATCHED_MAX and len(surplus) <= MATCHED_MAX:
        for row in list(missing):
            like = max(surplus, key=lambda other: _alike(row, other, close), default=None)
            if like is not None and 2 * _alike(row, like, close) >= len(row):
                missing.remove(row)
                surplus.remove(like)
                found.changed.append((dict(row), dict(like)))
    found.missing = [dict(row) for row in missing]
    found.surplus = [dict(row) for row in surplus]
    return found


def _alike(one: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]], close: Closeness) -> int:
    """Count the columns with the same value, in two rows of one sink."""
    pairs = zip(one, other, strict=True)
    return sum(is_near(before, after, close[name]) for (name, before), (_, after) in pairs)


def _has_only_cancelled(before: Row, after: Row) -> bool:
    differing = [(before[name], after[name]) for name in before if before[name] != after[name]]
    return bool(differing) and all(has_cancelled(one, other) for one, other in differing)


def _count(rows: Sequence[object], one: str, many: str) -> str:
    if not rows:
        return ""
    return f"{len(rows):,} row{'' if len(rows) == 1 else 's'} {one if len(rows) == 1 else many}"


def _text(row: Row) -> str:
    text = ", ".join(f"{name}={value!r}" for name, value in row.items())
    return text if len(text) <= 200 else text[:199] + "…"
