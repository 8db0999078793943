"""The states that a process function declares: values, lists, maps and reductions, per key.

A declaration is a class attribute; when the operator opens, its function gets a bound copy of it,
which reads and writes the entry of the current key. Entries are plain Python objects. If a type is
declared, entries are converted to the Python form of that type as soon as they are set (engine/core/python_values.py),
and values that do not fit are refused then: a restore must not change a value.

Snapshots are copy-on-write: taking one copies only references, and the first access to an entry
after it makes a copy with which the operator continues, so the contents of a snapshot never change.
A value may be changed in place during the call that fetched it, but not kept for a later one.
A snapshot holds the entries that were touched since the one before (engine/state/changelog.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, ClassVar, Final, Generic, Never, TypeVar, cast

import pyarrow as pa

from midstream.engine.core.config import Duration
from midstream.engine.core.errors import JobError, SchemaError, StorageError
from midstream.engine.core.python_values import ValueConverter, ValueMisfit, converter_of, is_fixed_zone, is_nan
from midstream.engine.core.schemas import TypeLike, as_type, field_defaults
from midstream.engine.core.value_converters import LEAST_DIGIT, ONE_DIGIT
from midstream.engine.state.changelog import GONE, Changelog, ChangelogSnapshot
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.time_to_live import StateTtl, ttl_of

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound="State")

StateRow = tuple[Any, Any, Any]
"""The key, the namespace (None, the position in the list, or the key in the map), and the value."""

IMMUTABLE_TYPES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, date, datetime, time, timedelta, Decimal}
)
"""Types whose values cannot be changed in place, so snapshots share them."""


_NONE: Any = None
_NOT_LOGGED: Final = object()


class KeyScope:
    """Holds the current key. One per operator, shared by all its keyed states."""

    __slots__ = ("is_set", "key", "writable")

    def __init__(self, key: Any = None, *, is_set: bool = False, writable: bool = True) -> None:
        self.key = key
        self.is_set = is_set
        self.writable = writable


class State(DeclaredState):
    """Base of the states that have one entry per key.

    `type`: the type of the values; without one they are pickled.
    `ttl`: how long entries live; None: until they are removed.
    """

    is_keyed: ClassVar[bool] = True
    is_many_rows: ClassVar[bool] = False
    """An entry is a collection, stored as one row for each of its items; it may have none."""

    def __init__(
        self,
        type: TypeLike | None = None,
        *,
        ttl: StateTtl | Duration | None = None,
        was: str | None = None,
        migrate: Callable[[Any], Any] | None = None,
    ) -> None:
        self._set_upgrade(was, migrate)
        declared, type = type, _type_of(self, type)
        self.type = type
        self.ttl = ttl_of(ttl)
        if ttl is not None and not self.is_keyed:
            raise SchemaError(
                f"{self.__class__.__name__} has no ttl: subtasks differ in time, and the state is the same in all of them; "
                "remove entries in process_broadcast"
            )
        self.defaults = field_defaults(declared)
        self.name = ""
        self._declared_as = self.__class__.__name__
        self._converter = _converter_of(self, type)
        self._plain = None if self._converter is None else self._converter.plain
        """Each value of exactly this class fits and cannot be changed in place."""
        self._whole = int if type == pa.int64() else None
        self._text = str if type == pa.large_string() else None
        """An int fits if it has 64 bits, and a text if it is ASCII; a call would cost as much as the rest of a write."""
        self._kept: Callable[[Any], Any] | None = None
        """Converts all other values, once the state is bound; raises ValueMisfit."""
        self._scope = KeyScope()
        self._entries: dict[Any, Any] | None = None
        self._own: set[Any] = set()
        """Keys of entries that can be changed in place and that no snapshot refers to."""
        self.log: Changelog

    def bound(self: S, name: str, scope: KeyScope) -> S:
        """Return a copy that holds entries; called by the operator."""
        state = copy.copy(self)
        state.name, state._scope, state._entries, state._own = name, scope, {}, set()
        state.log = Changelog(state._entries, is_many_rows=state.is_many_rows)
        state._kept = None if self._converter is None else self._converter.keep
        return state

    def _here(self) -> tuple[dict[Any, Any], Any]:
        """Return all entries, and the current key."""
        if self._entries is None:
            raise JobError(
                f"{self._declared_as} only works inside a process function, declared as an attribute of its class"
            )
        if not self._scope.is_set:
            raise JobError(
                f"state {self.name!r}: there is no current key here; use it while a row or a timer is processed"
            )
        return self._entries, self._scope.key

    def _keep(self, value: Any) -> Any:
        """Return `value` as it is stored. Raises JobError if it is not of the declared type."""
        kept = self._kept
        if kept is None or type(value) is self._plain:
            return value
        try:
            return kept(value)
        except ValueMisfit as misfit:
            raise self._refusal(misfit) from misfit

    def _refusal(self, misfit: ValueMisfit, what: str = "") -> JobError:
        return JobError(f"{self._declared_as} {self.name!r}: {what}{misfit}")

    def clear(self) -> None:
        """Remove the entry of the current key. Without an entry, nothing changes.

        Raises JobError outside of a call with a key.

            def on_timer(self, time, ctx):
                self.total.clear()
        """
        entries, key = self._here()
        if key in entries:
            del entries[key]
            self._own.discard(key)
            self.log.changed[key] = GONE

    # ---- for the operator ----

    def begin_row(self) -> tuple[Any, Any]:
        """Return the current key's entry, and what the log has of it; what is changed from now on is a copy."""
        entries, key = self._here()
        self._own.discard(key)
        return entries.get(key, GONE), self.log.changed.get(key, _NOT_LOGGED)

    def roll_back(self, before: tuple[Any, Any]) -> None:
        """Undo all changes of the current key's entry since `begin_row`, which has returned `before`."""
        entries, key = self._here()
        for found, value, missing in ((entries, before[0], GONE), (self.log.changed, before[1], _NOT_LOGGED)):
            if value is missing:
                found.pop(key, None)
            else:
                found[key] = value
        self._own.discard(key)

    def type_text(self) -> str:
        return "pickled" if self.type is None else str(self.type)

    def form(self) -> pa.Schema:
        return pa.schema([] if self.type is None else [pa.field("value", self.type)])

    def snapshot(
        self, new_id: Callable[[], str], stored_bytes: Callable[[str], int | None]
    ) -> ChangelogSnapshot | None:
        """Return what a snapshot has to hold, or None if that is nothing. None of it changes afterwards."""
        self._own = set()
        return self.log.snapshot(new_id, stored_bytes)

    def entries(self) -> dict[Any, Any]:
        """Return all entries by key, which must not be changed."""
        assert self._entries is not None
        return self._entries

    def columns_of(self, entries: Mapping[Any, Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return entries as rows: their keys, namespaces (if there are any) and values. Any thread."""
        return list(entries), [], list(entries.values())

    def restore(self, rows: Iterable[StateRow]) -> None:
        """Restore rows as `columns_of` returns them, for keys that have no entry."""
        assert self._entries is not None
        self._entries.update((key, value) for key, _, value in rows)

    def forget(self, keys: Iterable[Any]) -> None:
        """Remove the entries of these keys, before newer rows of them are restored, or because they were removed."""
        assert self._entries is not None
        if self._entries:
            for key in keys:
                self._entries.pop(key, None)


class SingleState(State, Generic[T]):
    """One value per key. It is read for each row, so the path to a plain value is short."""

    def _get(self, default: T) -> T:
        scope = self._scope
        if not scope.is_set:
            self._here()
        value: T = self._entries.get(scope.key, default)  # type: ignore[union-attr]
        return value if type(value) in IMMUTABLE_TYPES else self._own_copy(value)

    def _own_copy(self, value: T) -> T:
        """Return a value that may be changed in place and that no snapshot refers to."""
        entries, key = self._here()
        if key not in self._own:
            value = copy.deepcopy(value)
            entries[key] = self.log.changed[key] = value  # a default is stored too, since it may be changed in place
            self._own.add(key)
        return value

    def _set(self, value: T) -> None:
        scope = self._scope
        if not scope.is_set:
            self._here()
        kind = type(value)
        if (
            kind is self._plain
            or (kind is self._whole and (LEAST_DIGIT <= value <= ONE_DIGIT or -(1 << 63) <= value < 1 << 63))  # type: ignore[operator]
            or (kind is self._text and value.isascii())  # type: ignore[attr-defined]
        ):
            self._entries[scope.key] = self.log.changed[scope.key] = value  # type: ignore[index]
            return
        kept = value if self._kept is None else self._keep(value)
        self._entries[scope.key] = self.log.changed[scope.key] = kept  # type: ignore[index]
        if type(kept) not in IMMUTABLE_TYPES:
            self._own.add(scope.key)


class ValueState(SingleState[T]):
    """One value per key, for process functions; declared as an attribute of the class.

    `type`: the type of the value; a value of another type is refused. Without it the value is pickled.
    `default`: what reading returns for a key without a value.
    `ttl`: the value expires this long after it was last written, by event time; `StateTtl` for other rules.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: converts a value of an older checkpoint that has it under another type, or under the name `was`.

    Raises SchemaError for a type without a Python form, and if the default does not fit the type; ConfigError for a
    `ttl` that is no duration.

        >>> class Total(KeyedProcessFunction):
        ...     total = ValueState(int, default=0)
        ...     def process(self, row, ctx):
        ...         self.total.value += row["price"]
        ...         return {"user": ctx.key, "total": self.total.value}
        >>> total = testing.harness(Total(), orders.schema, {"user": str, "total": int}, key="user")
        >>> total.process([{"user": "ann", "price": 3}, {"user": "ann", "price": 4}])
        [{'user': 'ann', 'total': 3}, {'user': 'ann', 'total': 7}]

    In a later version of the program, whose checkpoints then have cents:

        cents = ValueState(int, default=0, was="total", migrate=lambda total: 100 * total)
    """

    kind = "value"

    def __init__(
        self,
        type: TypeLike | None = None,
        default: T = _NONE,
        *,
        ttl: StateTtl | Duration | None = None,
        was: str | None = None,
        migrate: Callable[[Any], T] | None = None,
    ) -> None:
        super().__init__(type, ttl=ttl, was=was, migrate=migrate)
        try:
            self.default: T = default if self._converter is None else self._converter.keep(default)
        except ValueMisfit as misfit:
            raise SchemaError(f"ValueState: the default: {misfit}") from misfit

    @property
    def value(self) -> T:
        """The value of the current key; `default` if there is none. Assigning one that does not fit the type raises
        JobError.
        """
        return self._get(self.default)

    @value.setter
    def value(self, value: T) -> None:
        self._set(value)


class ReducingState(SingleState[T]):
    """One value per key, to which each added value is applied; declared as an attribute of the class.

    `reduce`: takes the value and the added one, and returns the new value. The first value that is added is the first
    value.
    `type`: the type of the value; without it the value is pickled.
    `ttl`: as for ValueState.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: converts a value of an older checkpoint that has it under another type, or under the name `was`.

    Raises SchemaError for a type without a Python form.

        >>> class Highest(KeyedProcessFunction):
        ...     highest = ReducingState(max, int)
        ...     def process(self, row, ctx):
        ...         self.highest.add(row["price"])
        ...         return {"user": ctx.key, "highest": self.highest.value}
        >>> highest = testing.harness(Highest(), orders.schema, {"user": str, "highest": int}, key="user")
        >>> highest.process([{"user": "ann", "price": 4}, {"user": "ann", "price": 3}])
        [{'user': 'ann', 'highest': 4}, {'user': 'ann', 'highest': 4}]
    """

    kind = "reducing"

    def __init__(
        self,
        reduce: Callable[[T, T], T],
        type: TypeLike | None = None,
        *,
        ttl: StateTtl | Duration | None = None,
        was: str | None = None,
        migrate: Callable[[Any], T] | None = None,
    ) -> None:
        super().__init__(type, ttl=ttl, was=was, migrate=migrate)
        self._reduce = reduce

    def add(self, value: T) -> None:
        """Apply the reduction to the value of the current key.

        `value`: the second argument of `reduce`; the value itself if there is none yet.

            def process(self, row, ctx):
                self.highest.add(row["price"])
        """
        entries, key = self._here()
        self._set(self._reduce(self._get(value), value) if key in entries else value)

    @property
    def value(self) -> T | None:
        """The reduced value of the current key; None if nothing has been added."""
        return cast("SingleState[T | None]", self)._get(None)


class ListState(State, Generic[T]):
    """A list per key, empty at first; declared as an attribute of the class.

    It is read by iterating and by `len()`. A checkpoint writes the lists of keys whose lists were read or changed.

    `type`: the type of the items; an item of another type is refused. Without it items are pickled.
    `ttl`: as for ValueState, for each item from the time at which it was added.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: converts an item of an older checkpoint that has it under another type, or under the name `was`.

    Raises SchemaError for a type without a Python form.

        >>> class LastTwo(KeyedProcessFunction):
        ...     prices = ListState(int)
        ...     def process(self, row, ctx):
        ...         self.prices.append(row["price"])
        ...         self.prices.set(list(self.prices)[-2:])
        ...         return {"user": ctx.key, "sum": sum(self.prices)}
        >>> last_two = testing.harness(LastTwo(), orders.schema, {"user": str, "sum": int}, key="user")
        >>> last_two.process([{"user": "ann", "price": price} for price in (3, 4, 5)])
        [{'user': 'ann', 'sum': 3}, {'user': 'ann', 'sum': 7}, {'user': 'ann', 'sum': 9}]
    """

    kind = "list"

    def append(self, value: T) -> None:
        """Add an item to the end of the current key's list.

        `value`: an item of the declared type; another raises JobError.

            def process(self, row, ctx):
                self.prices.append(row["price"])
        """
        self._list().append(self._keep(value))

    def extend(self, values: Iterable[T]) -> None:
        """Add items to the end of the current key's list.

        `values`: items of the declared type; another raises JobError, and then none is added.

            def process(self, row, ctx):
                self.prices.extend(row["prices"])
        """
        kept = [self._keep(value) for value in values]  # first, as making them may change this very list
        self._list().extend(kept)

    def set(self, values: Iterable[T]) -> None:
        """Replace the whole list of the current key.

        `values`: items of the declared type; another raises JobError, and then nothing is replaced.

            def process(self, row, ctx):
                self.prices.set([row["price"]])
        """
        entries, key = self._here()
        kept = [self._keep(value) for value in values]
        entries[key] = self.log.changed[key] = kept
        self._own.add(key)

    def __iter__(self) -> Iterator[T]:
        return iter(self._list()) if self else iter(())

    def __len__(self) -> int:
        entries, key = self._here()
        return len(entries.get(key, ()))

    def _list(self) -> list[T]:
        entries, key = self._here()
        found: list[T] | None = entries.get(key)
        if key not in self._own or found is None:
            found = [] if found is None else self._copied(found)
            entries[key] = self.log.changed[key] = found
            self._own.add(key)
        return found

    def _copied(self, values: list[T]) -> list[T]:
        """Return a list whose items may be changed in place."""
        return list(values) if all(type(value) in IMMUTABLE_TYPES for value in values) else copy.deepcopy(values)

    is_many_rows = True

    def columns_of(self, entries: Mapping[Any, Any]) -> tuple[list[Any], list[Any], list[Any]]:
        keys = [key for key, values in entries.items() for _ in values]
        return keys, [at for each in entries.values() for at in range(len(each))], [*chain(*entries.values())]

    def restore(self, rows: Iterable[StateRow]) -> None:
        assert self._entries is not None
        for key, _, value in rows:
            self._entries.setdefault(key, []).append(value)


class MapState(State, MutableMapping[K, V]):
    """A dict per key, empty at first; declared as an attribute of the class.

    It is read and changed like a dict. A checkpoint writes all entries of a key of which one was changed.

    `key`: the type of the map's keys; a key of another type is refused. Without it they are pickled.
    `value`: the type of the values; a value of another type is refused. Without it they are pickled.
    `ttl`: as for ValueState, for each entry of the map; it is then in the order in which its entries were last written.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: converts a value of an older checkpoint that has it under another type, or under the name `was`.
    `wrong`: nothing; types without a name are refused.

    Raises SchemaError for a type without a Python form, and for keys of a nested type or of a time zone with daylight
    saving time.

        >>> class Visits(KeyedProcessFunction):
        ...     pages = MapState(key=str, value=int)
        ...     def process(self, row, ctx):
        ...         self.pages[row["page"]] = self.pages.get(row["page"], 0) + 1
        ...         return {"user": ctx.key, "pages": len(self.pages)}
        >>> visits = testing.harness(Visits(), {"user": str, "page": str}, {"user": str, "pages": int}, key="user")
        >>> visits.process([{"user": "ann", "page": page} for page in ("a", "b", "a")])
        [{'user': 'ann', 'pages': 1}, {'user': 'ann', 'pages': 2}, {'user': 'ann', 'pages': 2}]
        >>> visits.state
        {'pages': {'ann': {'a': 2, 'b': 1}}}
    """

    kind = "map"

    def __init__(
        self,
        *wrong: Never,
        key: TypeLike | None = None,
        value: TypeLike | None = None,
        ttl: StateTtl | Duration | None = None,
        was: str | None = None,
        migrate: Callable[[Any], V] | None = None,
    ) -> None:
        name = type(self).__name__
        if wrong:
            raise SchemaError(f"{name}: the types have names: write for example {name}(key=str, value=int)")
        super().__init__(value, ttl=ttl, was=was, migrate=migrate)
        key_type = _type_of(self, key)
        self.key_type = key_type
        self._key_converter = _converter_of(self, key_type)
        if key_type is not None and pa.types.is_timestamp(key_type) and not is_fixed_zone(key_type):
            raise SchemaError(
                f"{self.__class__.__name__} with keys of the type {key_type}: Python treats the repeated "
                f"hour at the end of daylight saving time as one key; use {pa.timestamp(key_type.unit, 'UTC')}"
            )
        if key_type is not None and pa.types.is_nested(key_type):
            raise SchemaError(f"{self.__class__.__name__}: the keys of a dict cannot be {key_type}")
        self._own_values: set[tuple[Any, Any]] = set()

    def bound(self, name: str, scope: KeyScope) -> MapState[K, V]:
        state = super().bound(name, scope)
        state._own_values = set()
        return state

    def type_text(self) -> str:
        return f"{'pickled' if self.key_type is None else self.key_type} to {super().type_text()}"

    def form(self) -> pa.Schema:
        form = super().form()
        return form if self.key_type is None else form.append(pa.field("namespace", self.key_type))

    is_many_rows = True

    def begin_row(self) -> tuple[Any, Any]:
        self._own_values.clear()
        return super().begin_row()

    def roll_back(self, before: tuple[Any, Any]) -> None:
        self._own_values.clear()
        super().roll_back(before)

    def snapshot(
        self, new_id: Callable[[], str], stored_bytes: Callable[[str], int | None]
    ) -> ChangelogSnapshot | None:
        self._own_values = set()
        return super().snapshot(new_id, stored_bytes)

    def _read(self) -> dict[K, V]:
        entries, key = self._here()
        return cast("dict[K, V]", entries.get(key, {}))

    def _write(self) -> dict[K, V]:
        entries, key = self._here()
        if not self._scope.writable:
            raise JobError(f"state {self.name!r} can only be changed in process_broadcast")
        if key not in self._own or key not in entries:
            entries[key] = self.log.changed[key] = dict(entries.get(key, {}))
            self._own.add(key)
        return cast("dict[K, V]", entries[key])

    def _named(self, name: Any) -> Any:
        """Return a key of the map as it is stored. Raises JobError if it is not of the declared type."""
        if is_nan(name):
            raise JobError(
                f"state {self.name!r}: {name!r} as a key equals nothing, not even itself, so it would never be found"
            )
        if self._key_converter is None:
            return name
        try:
            return self._key_converter.keep(name)
        except ValueMisfit as misfit:
            raise self._refusal(misfit, "a key: ") from misfit

    def __getitem__(self, name: K) -> V:
        name = self._named(name)
        value = self._read()[name]
        if type(value) in IMMUTABLE_TYPES:
            return value
        if not self._scope.writable:
            return copy.deepcopy(value)
        at = (self._scope.key, name)
        if at not in self._own_values:
            value = copy.deepcopy(value)
            self._write()[name] = value
            self._own_values.add(at)
        return value

    def __setitem__(self, name: K, value: V) -> None:
        name, value = self._named(name), self._keep(value)
        self._write()[name] = value
        if type(value) not in IMMUTABLE_TYPES:
            self._own_values.add((self._scope.key, name))

    def __delitem__(self, name: K) -> None:
        name = self._named(name)
        if name not in self._read():
            raise KeyError(name)
        written = self._write()
        del written[name]
        self._own_values.discard((self._scope.key, name))
        if not written:
            super().clear()

    def setdefault(self, name: K, default: V = _NONE) -> V:
        """Return the value under a key of the map, which is set to a default first if there is none.

        `name`: the key in the map.
        `default`: the value to set.

        Raises JobError for a key or value that is not of the declared type.

            def process(self, row, ctx):
                self.pages.setdefault(row["page"], []).append(row["at"])
        """
        if name not in self:
            self[name] = default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return self._named(name) in self._read()

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._read()))

    def __len__(self) -> int:
        return len(self._read())

    def clear(self) -> None:
        """Remove all entries of the current key's map.

        For example:

            def on_timer(self, time, ctx):
                self.pages.clear()
        """
        written = self._write()
        self._own_values.difference_update([(self._scope.key, name) for name in written])
        super().clear()

    def columns_of(self, entries: Mapping[Any, Any]) -> tuple[list[Any], list[Any], list[Any]]:
        keys = [key for key, values in entries.items() for _ in values]
        values = [value for each in entries.values() for value in each.values()]
        return keys, [*chain(*entries.values())], values

    def restore(self, rows: Iterable[StateRow]) -> None:
        assert self._entries is not None
        try:
            for key, name, value in rows:
                self._entries.setdefault(key, {})[name] = value
        except Exception as error:  # damaged keys may raise anything from their hash, and so may the job's classes
            raise StorageError(
                f"state {self.name!r}: what the checkpoint has as a key of the map cannot be one: "
                f"{type(error).__name__}: {error}"
            ) from error


class BroadcastState(MapState[K, V]):
    """A dict that is the same in every subtask, for BroadcastProcessFunction; written only in `process_broadcast`.

    `key`: the type of the map's keys; a key of another type is refused. Without it they are pickled.
    `value`: the type of the values; a value of another type is refused. Without it they are pickled.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: converts a value of an older checkpoint that has it under another type, or under the name `was`.
    `ttl`, `wrong`: nothing; a time to live and types without a name are refused.

    Raises SchemaError as MapState does; writing elsewhere raises JobError.

        >>> class Known(BroadcastProcessFunction):
        ...     users = BroadcastState(key=str, value=bool)
        ...     def process_broadcast(self, row, ctx):
        ...         self.users[row["user"]] = True
        ...     def process(self, row, ctx):
        ...         return row if row["user"] in self.users else None
        >>> known = testing.harness(Known(), orders.schema, orders.schema, second={"user": str})
        >>> known.process_broadcast({"user": "bob"})
        []
        >>> known.process([{"user": "ann", "price": 3}, {"user": "bob", "price": 5}])
        [{'user': 'bob', 'price': 5}]
    """

    kind = "broadcast"
    is_keyed = False


def _type_of(state: State, kind: TypeLike | None) -> pa.DataType | None:
    """Return the type that was declared, the same for `str`, `pa.string()` and `pl.String`: a job may write another."""
    return None if kind is None else as_type(kind, state.__class__.__name__)


def _converter_of(state: State, type: pa.DataType | None) -> ValueConverter | None:
    """Return the converter of values of `type`; None if values are pickled, which accepts any type.

    Raises SchemaError for a type that has no Python form.
    """
    try:
        return None if type is None else converter_of(type)
    except SchemaError as error:
        raise SchemaError(f"{state.__class__.__name__}: {error}") from None
