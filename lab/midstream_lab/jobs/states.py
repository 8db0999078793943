"""Process functions with every kind of state, typed and pickled, whose contents are functions of the rows alone.

The order of rows of different splits is unknown, so the contents do not depend on it: sums, lists that are compared
after sorting, and marks that the next row of the same class removes again. If a mark reappears, or if a snapshot shares
a list with the running function, the contents are different from then on.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

import pyarrow as pa

from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.functions.function_operator import Port, two_ports
from midstream.engine.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedProcessFunction,
    ProcessContext,
)
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import Row
from midstream.engine.state.keyed_states import BroadcastState, ListState, MapState, ReducingState, ValueState
from midstream.simulation.outside import SPLIT_IDS
from midstream_lab.jobs.key_types import KEY_LAYOUTS, PLAIN, KeyLayout, stored_keys
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside

BRIEF: Final = "brief"
"""The tag of a side output whose rows have the form `BRIEF_LAYOUT`."""
BRIEF_LAYOUT: Final = KEY_LAYOUTS["by_text"]
ASIDE: Final = "side"
_CLASSES: Final = 4
_US: Final = timedelta(microseconds=1)


class _Function:
    """Base of functions that take time and can fail, like all functions in a simulated job."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)

    def _take(self, row: Row) -> int:
        """Process a row for some time, and return its id."""
        self._outside.work(1)
        found: int = row["id"]
        if self._outside.poison:
            self._outside.check_poison([found])
        return found


class Typed(_Function, CoProcessFunction):
    """Forwards every row, and records the rows of each key in states with Arrow types."""

    mask: ValueState[Decimal] = ValueState(pa.decimal128(9, 2), default=Decimal(0))
    ids: ListState[int] = ListState(pa.int64())
    total: ReducingState[timedelta] = ReducingState(lambda total, more: total + more, pa.duration("us"))
    marks: MapState[str, list[int]] = MapState(key=str, value=list[int])

    def process1(self, row: Row, ctx: ProcessContext) -> Row:
        number = self._take(row)
        toggled = Decimal(int(self.mask.value * 4) ^ 1 << number % _CLASSES) / 4
        if toggled:
            self.mask.value = toggled
        else:
            self.mask.clear()
        self.ids.append(number)
        self.total.add(number * _US)
        _mark(self.marks, f"class {number % _CLASSES}", number)
        return row

    process2 = process1


class TypedMore(Typed):
    """The function `Typed` in a later version of the program, which also counts the rows of each key."""

    more: ValueState[int | None] = ValueState(pa.int64())

    def process1(self, row: Row, ctx: ProcessContext) -> Row:
        row = super().process1(row, ctx)
        before = self.more.value
        self.more.value = len(self.ids) if before is None else before + 1
        return row

    process2 = process1


class TypedWider(_Function, CoProcessFunction):
    """The function `TypedMore` in a later version of the program, with wider types, another name and another form."""

    mask: ValueState[Decimal] = ValueState(pa.decimal128(12, 4), default=Decimal(0))
    numbers: ListState[int] = ListState(pa.int64(), was="ids")
    total: ReducingState[int] = ReducingState(lambda total, more: total + more, int, migrate=lambda total: total // _US)
    marks: MapState[str, list[int]] = MapState(key=str, value=list[int])
    more: ValueState[int | None] = ValueState(pa.int64())

    def process1(self, row: Row, ctx: ProcessContext) -> Row:
        number = self._take(row)
        toggled = Decimal(int(self.mask.value * 4) ^ 1 << number % _CLASSES) / 4
        if toggled:
            self.mask.value = toggled
        else:
            self.mask.clear()
        self.numbers.append(number)
        self.total.add(number)
        _mark(self.marks, f"class {number % _CLASSES}", number)
        before = self.more.value
        self.more.value = len(self.numbers) if before is None else before + 1
        return row

    process2 = process1


def _extended(seen: list[int], more: list[int]) -> list[int]:
    seen.extend(more)
    return seen


class Pickled(_Function, CoProcessFunction):
    """Does the same as `Typed` with states of arbitrary Python values, which are changed in place and put back."""

    ids: ValueState[list[int] | None] = ValueState()
    marks: ListState[tuple[int, str]] = ListState()
    seen: ReducingState[list[int]] = ReducingState(_extended)
    groups: MapState[tuple[str, int], list[int]] = MapState()

    def process1(self, row: Row, ctx: ProcessContext) -> Row:
        number = self._take(row)
        ids = self.ids.value or []
        ids.append(number)
        self.ids.value = ids
        mark = (number % _CLASSES, "mark")
        others = [other for other in self.marks if other != mark]
        if len(others) == len(self.marks):
            self.marks.append(mark)
        elif others:
            self.marks.set(others)
        else:
            self.marks.clear()
        self.seen.add([number])
        _mark(self.groups, ("class", number % _CLASSES), number)
        return row

    process2 = process1


def _mark(marks: MapState[Any, list[int]], name: Any, number: int) -> None:
    """Record a row: for an even class in a list of all ids, changed in place; for an odd class by toggling its entry."""
    if number % 2 == 0:
        marks.setdefault(name, []).append(number)
    elif name in marks:
        del marks[name]
    else:
        marks[name] = [number % _CLASSES]


class Rules(_Function, BroadcastProcessFunction):
    """Forwards and counts the rows of port 0; every subtask keeps the same broadcast state from the rows of port 1."""

    marks: BroadcastState[int, str] = BroadcastState(key=pa.int64(), value=pa.large_string())
    lists: BroadcastState[tuple[int, ...], list[int]] = BroadcastState()
    count: ValueState[int] = ValueState(pa.int64(), default=0)

    def process(self, row: Row, ctx: ProcessContext) -> Row:
        number = self._take(row)
        self.count.value += 1
        name = number % _CLASSES
        if self.marks.get(name, f"mark {name}") != f"mark {name}":
            self._outside.world.bug(f"broadcast state has {self.marks[name]!r} for {name}")
        self.lists.get((name,), []).append(-1)  # this changes a copy, since broadcast state is read-only here
        return row

    def process_broadcast(self, row: Row, ctx: ProcessContext) -> None:
        number = self._take(row)
        name = number % _CLASSES
        if name in self.marks:
            del self.marks[name]
        else:
            self.marks[name] = f"mark {name}"
        listed = self.lists.get((name,), [])
        listed.append(number)
        self.lists[name,] = listed


class Tags(_Function, KeyedProcessFunction):
    """Forwards a third of the rows; another third goes to a side output, and the last to one with its own schema."""

    def process(self, row: Row, ctx: ProcessContext) -> Row | None:
        number = self._take(row)
        if number % 3 == 0:
            ctx.side_output(ASIDE, row)
        elif number % 3 == 1:
            (key,) = BRIEF_LAYOUT.key(number, row["key"])
            ctx.side_output(BRIEF, {**row, "key": key, "was": row["key"]})
        else:
            return row
        return None


def operator(kind: str, uid: str, outside: Outside, layout: KeyLayout) -> ProcessOperator:
    if kind == "tags":
        side_outputs = {ASIDE: SCHEMA, BRIEF: BRIEF_LAYOUT.schema}
        return ProcessOperator(uid, Tags(outside), [Port("process", (), None, SCHEMA)], SCHEMA, side_outputs)
    if kind == "rules":
        ports = [Port("process", ("key",), None, SCHEMA), Port("process_broadcast", (), None, SCHEMA, broadcast=True)]
        return ProcessOperator(uid, Rules(outside), ports, SCHEMA, {})
    function = {"typed": Typed, "typed more": TypedMore, "typed wider": TypedWider, "pickled": Pickled}[kind](outside)
    ports = two_ports((layout.keys, layout.keys), (None, None), (layout.schema, layout.schema))
    return ProcessOperator(uid, function, ports, layout.schema, {})


# ---- expected contents -------------------------------------------------------

Contents: TypeAlias = dict[tuple[str, Any], Any]
"""The contents of states, by part and key."""
_EMPTY: Final[tuple[object, ...]] = (None, [], {})
"""Contents for which a state has no entry."""


@dataclass(frozen=True, slots=True)
class Given:
    """The rows that an operator of this file has received. `keys`: the key of each row by id. `broadcast`: the ids of
    port 1.
    """

    kind: str
    rows: Counter[int]
    keys: Mapping[int, int]
    layout: KeyLayout = PLAIN
    broadcast: frozenset[int] = frozenset()
    is_ordered: bool = False
    """Whether the rows of a key and a split must have come in their order."""

    def contents(self) -> Contents:
        """Return the expected contents for all keys."""
        by_key: dict[Any, list[int]] = {}
        for row, n in self.rows.items():
            by_key.setdefault(self.layout.stored_key(row, self.keys[row]), []).extend([row] * n)
        return {
            (part, key): content
            for key, ids in by_key.items()
            for part, content in _OF_KEY[self.kind](sorted(ids))
            if content not in _EMPTY
        }

    def broadcast_contents(self) -> Contents:
        """Return the expected contents of broadcast state in every subtask."""
        if self.kind != "rules":
            return {}
        ids = sorted(self.broadcast)
        classes = range(_CLASSES)
        marks = {name: f"mark {name}" for name in classes if _is_odd(ids, name)}
        lists = {(name,): listed for name in classes if (listed := _class(ids, name))}
        found = (("broadcast:marks", marks), ("broadcast:lists", lists))
        return {(part, None): content for part, content in found if content not in _EMPTY}


def _typed(ids: Sequence[int]) -> Iterator[tuple[str, Any]]:
    mask = sum(1 << name for name in range(_CLASSES) if _is_odd(ids, name))
    yield "value:mask", Decimal(mask) / 4 if mask else None
    yield "list:ids", ids
    yield "reducing:total", sum(ids) * _US
    yield "map:marks", {f"class {name}": content for name, content in _marks(ids)}


def _pickled(ids: Sequence[int]) -> Iterator[tuple[str, Any]]:
    yield "value:ids", ids
    yield "list:marks", [(name, "mark") for name in range(_CLASSES) if _is_odd(ids, name)]
    yield "reducing:seen", ids
    yield "map:groups", {("class", name): content for name, content in _marks(ids)}


def _counted(ids: Sequence[int]) -> Iterator[tuple[str, Any]]:
    yield "value:count", len(ids)


_OF_KEY: Final[Mapping[str, Callable[[Sequence[int]], Iterable[tuple[str, Any]]]]] = {
    "typed": _typed,
    "pickled": _pickled,
    "rules": _counted,
}


def _class(ids: Sequence[int], name: int) -> list[int]:
    return [row for row in ids if row % _CLASSES == name]


def _is_odd(ids: Sequence[int], name: int) -> bool:
    return len(_class(ids, name)) % 2 == 1


def _marks(ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for name in range(_CLASSES):
        if name % 2 == 0 and (listed := _class(ids, name)):
            yield name, listed
        elif name % 2 and _is_odd(ids, name):
            yield name, [name]


# ---- actual contents ---------------------------------------------------------

TYPES: Final[Mapping[str, pa.DataType]] = {
    "value:mask": pa.decimal128(9, 2),
    "list:ids": pa.int64(),
    "reducing:total": pa.duration("us"),
    "map:marks": pa.large_list(pa.int64()),
    "broadcast:marks": pa.large_string(),
    "value:count": pa.int64(),
    "value:more": pa.int64(),
}
"""The types of values in parts that are not pickled."""
WIDER_TYPES: Final = {**TYPES, "value:mask": pa.decimal128(12, 4), "reducing:total": pa.int64()}
"""Those of the function `TypedWider`."""
RENAMED: Final = {"list:numbers": "list:ids"}
"""The parts that this function has, by the name that others have for the same."""
_KEY_TYPES: Final[Mapping[str, pa.DataType]] = {"map:marks": pa.large_string(), "broadcast:marks": pa.int64()}
"""The types of keys in maps that are not pickled."""
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "typed": ("value:mask", "list:ids", "reducing:total", "map:marks"),
    "pickled": ("value:ids", "list:marks", "reducing:seen", "map:groups"),
    "rules": ("value:count",),
}
MORE: Final = "value:more"
"""A part that only later versions of the program have."""
BROADCAST_PARTS: Final = ("broadcast:marks", "broadcast:lists")


def is_wider(settings: Iterable[tuple[str, str, str]]) -> bool:
    """Whether an operator with these settings runs the function `TypedWider`."""
    return any(part == "value:mask" and text == str(WIDER_TYPES[part]) for part, _, text in settings)


def entries(part: str, table: pa.Table, *, is_wider: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Return the key (None without keys), namespace and value of each row, in the form of the function `Typed`.

    Raises TypeError if a type is not that of the function, `TypedWider` with `is_wider`.
    """
    keys = stored_keys(table.column("key")) if "key" in table.column_names else [None] * table.num_rows
    names: Sequence[Any] = [None] * table.num_rows
    if part.startswith("list:"):
        names = table.column("namespace").to_pylist()
    elif "namespace" in table.column_names:
        names = _values(table.column("namespace"), _KEY_TYPES.get(part), part)
    values = _values(table.column("value"), (WIDER_TYPES if is_wider else TYPES).get(part), part)
    if is_wider and part == "reducing:total":
        values = [value * _US for value in values]
    return zip(keys, names, values, strict=True)


def _values(column: pa.ChunkedArray[Any], kind: pa.DataType | None, part: str) -> list[Any]:
    stored: list[Any] = column.to_pylist()
    if column.type != (kind or pa.large_binary()):
        raise TypeError(f"{part} is stored as {column.type}")
    return stored if kind is not None else [pickle.loads(value) for value in stored]


def collected(part: str, found: Iterable[tuple[Any, Any, Any]]) -> Contents:
    """Return the content for each key; lists are in their order."""
    contents: Contents = {}
    if part.startswith("list:"):
        for key, _, value in sorted(found, key=lambda entry: entry[1]):
            contents.setdefault((part, key), []).append(value)
    elif part.startswith(("map:", "broadcast:")):
        for key, name, value in found:
            contents.setdefault((part, key), {})[name] = value
    else:
        contents.update(((part, key), value) for key, _, value in found)
    return contents


def compared(content: Any) -> Any:
    """Return a content with its lists sorted, since the order in which they were filled is unknown."""
    if isinstance(content, list):
        return sorted(content)
    if isinstance(content, dict):
        return {name: compared(value) for name, value in content.items()}
    return content


def out_of_order(content: Any) -> int | None:
    """Return an id that comes after a later id of its split in a list; None if there is none."""
    if isinstance(content, dict):
        return next((row for value in content.values() if (row := out_of_order(value)) is not None), None)
    if not isinstance(content, list):
        return None
    last: dict[int, int] = {}
    for row in content:
        if not isinstance(row, int):
            return None
        if row <= last.get(row // SPLIT_IDS, -1):
            return row
        last[row // SPLIT_IDS] = row
    return None
