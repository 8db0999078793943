"""Keyed states whose entries expire: each value is stored with the time at which it was last written.

The time of a call is that of its row or timer; of a row that is late, the watermark. What has expired of a key by then
is removed before the function is called, so what the function finds does not depend on where batches are cut. The times
of an entry never go back: a row that is out of order writes at the latest time of what it writes to.

What no call meets leaves by a sweep through all keys, those that are spilled too, in pieces, once the watermark (or the clock) has advanced by 1/8
of the time to live since the last one; so an entry stays in memory at most that much longer.

Values whose time is unknown (from a checkpoint of a program without the time to live, or written before the first
watermark by a row without event time) get the time of the first sweep; items of a list at most that of the item after
them. In an entry they come before values of known times.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.state.keyed_states import (
    IMMUTABLE_TYPES,
    KeyScope,
    ListState,
    MapState,
    ReducingState,
    SingleState,
    State,
    ValueState,
)
from midstream.engine.state.time_to_live import StateTtl

E = TypeVar("E", bound="ExpiringState")
Stamped: TypeAlias = tuple[int, Any]
"""When it was last written, in microseconds since 1970, and the value."""

UNKNOWN_US: Final = MIN_WATERMARK_US
WRITTEN_COLUMNS: Final = ("written_at_event_time_us", "written_at_clock_us")
"""The columns in which a table at rest has the times at which values were last written, by event time or the clock."""
SWEEPS_PER_TTL: Final = 8
CHECK_KEYS: Final = 256
"""The number of keys that are swept between two looks at the clock."""
_WRITTEN_US = itemgetter(0)
_VALUE = itemgetter(1)


class SpilledValues(Protocol):
    """Values of a state that are not in its dict."""

    @property
    def first_us(self) -> int:
        """When the first of them was written; MAX_WATERMARK_US or later if there are none."""
        ...

    def fetch_written(self, until_us: int, number: int) -> list[Any]:
        """Move up to `number` entries with a value that was written by then into the dict, and return their keys."""
        ...


class ExpiringState(State):
    """Base of the bound states with a time to live."""

    ttl: StateTtl
    spilled: SpilledValues | None = None

    def __init__(self, declared: State) -> None:
        vars(self).update(vars(declared))
        self._ttl_us = self.ttl.duration_us
        self._renews_on_read = self.ttl.on == "read"
        self._now_us = UNKNOWN_US
        self._oldest_us = MAX_WATERMARK_US
        """No value is older; UNKNOWN_US if there may be some of unknown time."""
        self._swept_us = UNKNOWN_US
        """The time of the last sweep, or of the one that has begun."""
        self._to_sweep: list[Any] = []
        """The keys to which the sweep that has begun has yet to come."""
        self._is_sweeping = False

    @property
    def written_column(self) -> str:
        """The name of the column in which a table at rest has the times."""
        return WRITTEN_COLUMNS[self.ttl.by == "clock"]

    # ---- for the operator ----

    def begin_call(self, now_us: int) -> None:
        """Begin a call at this time: remove what has expired of the current key's entry."""
        self._now_us = now_us
        self._expire(now_us - self._ttl_us)

    def next_sweep_us(self) -> int | None:
        """Return when something is to be swept; None if there is nothing."""
        if self._is_sweeping:
            return self._swept_us
        if not self.entries() and (self.spilled is None or self.spilled.first_us >= MAX_WATERMARK_US):
            return None
        return max(self._oldest_us + self._ttl_us, self._swept_us + self._ttl_us // SWEEPS_PER_TTL)

    def sweep(self, now_us: int, is_over: Callable[[], bool]) -> bool:
        """Remove what has expired at this time, if it is time for that.

        Returns False if `is_over` has returned True before all keys were swept: call it again.
        """
        due_us = self.next_sweep_us()
        if due_us is None or now_us < due_us or now_us == UNKNOWN_US:
            return True
        if not self._is_sweeping:
            self._to_sweep, self._swept_us, self._oldest_us = list(self.entries()), now_us, MAX_WATERMARK_US
            self._is_sweeping = True
        scope = self._scope
        scope.is_set = True
        try:
            while keys := self._next_to_sweep(now_us):
                for key in keys:
                    scope.key = key
                    self._sweep_key(now_us)
                if (self._to_sweep or self.spilled is not None) and is_over():
                    return False
        finally:
            scope.is_set, scope.key = False, None
        if self.spilled is not None:
            self._oldest_us = min(self._oldest_us, self.spilled.first_us)
        self._is_sweeping = False
        return True

    def _next_to_sweep(self, now_us: int) -> list[Any]:
        """Return some keys to sweep; none if the sweep is over. What is spilled comes last, if any of it expires."""
        entries = self.entries()
        while self._to_sweep:
            keys = [key for key in self._to_sweep[-CHECK_KEYS:] if key in entries]
            del self._to_sweep[-CHECK_KEYS:]
            if keys:
                return keys
        return [] if self.spilled is None else self.spilled.fetch_written(now_us - self._ttl_us, CHECK_KEYS)

    def _sweep_key(self, now_us: int) -> None:
        entries, key = self._here()
        self._expire(now_us - self._ttl_us)
        entry = entries.get(key)
        if entry:
            if self._oldest_of(entry) == UNKNOWN_US:
                entry = entries[key] = self.log.changed[key] = self._dated(entry, now_us)
            self._oldest_us = min(self._oldest_us, self._oldest_of(entry))
        elif entry is not None:  # an empty list
            State.clear(self)

    def restored(self) -> None:
        """Note how old the entries are. Called once all are restored."""
        self._oldest_us = min(map(self._oldest_of, filter(None, self.entries().values())), default=MAX_WATERMARK_US)
        if self.spilled is not None:
            self._oldest_us = min(self._oldest_us, self.spilled.first_us)

    # ---- for the kinds of states ----

    @abstractmethod
    def plain(self, entry: Any) -> Any:
        """Return an entry without its times."""

    def _stamp(self, last_us: int) -> int:
        """Return the time of a write of the current key, whose entry was last written at `last_us`."""
        written_us = max(self._now_us, last_us)
        self._oldest_us = min(self._oldest_us, written_us)
        return written_us

    @abstractmethod
    def _expire(self, until_us: int) -> None:
        """Remove what the current key's entry has that was last written by then. Unknown times do not expire."""

    @abstractmethod
    def _dated(self, entry: Any, now_us: int) -> Any:
        """Return an entry with `now_us` for unknown times."""

    @abstractmethod
    def _oldest_of(self, entry: Any) -> int: ...


class _ExpiringSingle(ExpiringState, SingleState[Any]):
    def _get(self, default: Any) -> Any:
        entries, key = self._here()
        found = entries.get(key)
        value = default if found is None else found[1]
        if type(value) not in IMMUTABLE_TYPES:
            return self._own_copy(value)
        if found is not None and self._renews_on_read:
            self._put(value)
        return value

    def _own_copy(self, value: Any) -> Any:
        key = self._scope.key
        if key not in self._own:
            value = copy.deepcopy(value)
            self._own.add(key)
        self._put(value)
        return value

    def _set(self, value: Any) -> None:
        self._here()
        kept = self._keep(value)
        self._put(kept)
        if type(kept) not in IMMUTABLE_TYPES:
            self._own.add(self._scope.key)

    def _put(self, value: Any) -> None:
        entries, key = self._here()
        found = entries.get(key)
        entries[key] = self.log.changed[key] = self._stamp(UNKNOWN_US if found is None else found[0]), value

    def plain(self, entry: Stamped) -> Any:
        return entry[1]

    def _expire(self, until_us: int) -> None:
        entries, key = self._here()
        found = entries.get(key)
        if found is not None and UNKNOWN_US < found[0] <= until_us:
            State.clear(self)

    def _dated(self, entry: Stamped, now_us: int) -> Stamped:
        return (now_us, entry[1]) if entry[0] == UNKNOWN_US else entry

    def _oldest_of(self, entry: Stamped) -> int:
        return entry[0]


class ExpiringValue(_ExpiringSingle, ValueState[Any]):
    """A bound ValueState with a time to live."""


class ExpiringReducing(_ExpiringSingle, ReducingState[Any]):
    """A bound ReducingState with a time to live."""


class ExpiringList(ExpiringState, ListState[Any]):
    """A bound ListState whose items have times of their own; they are in the order of these times."""

    def _keep(self, value: Any) -> Stamped:
        kept = super()._keep(value)
        entries, key = self._here()
        found = entries.get(key)
        return self._stamp(found[-1][0] if found else UNKNOWN_US), kept

    def set(self, values: Iterable[Any]) -> None:
        super().set(values)
        entries, key = self._here()
        if not entries[key]:
            self.clear()

    def __iter__(self) -> Iterator[Any]:
        if not self:
            return iter(())
        items = cast("list[Stamped]", self._list())
        if self._renews_on_read:
            written_us = self._stamp(items[-1][0])
            items[:] = [(written_us, value) for _, value in items]
        return map(_VALUE, items)

    def _copied(self, values: list[Stamped]) -> list[Stamped]:
        plain = [value for _, value in values]
        copied = super()._copied(plain)
        return [(written_us, value) for (written_us, _), value in zip(values, copied, strict=True)]

    def plain(self, entry: list[Stamped]) -> list[Any]:
        return [value for _, value in entry]

    def _expire(self, until_us: int) -> None:
        entries, key = self._here()
        found = entries.get(key)
        if not found or found[0][0] > until_us:
            return
        first = bisect_right(found, until_us, key=_WRITTEN_US)
        if found[first - 1][0] == UNKNOWN_US:
            return
        if first == len(found):
            self.clear()
        else:
            del self._list()[:first]

    def _dated(self, entry: list[Stamped], now_us: int) -> list[Stamped]:
        known_us = next((us for us, _ in entry if us != UNKNOWN_US), now_us)
        return [(min(now_us, known_us) if us == UNKNOWN_US else us, value) for us, value in entry]

    def _oldest_of(self, entry: list[Stamped]) -> int:
        return entry[0][0]


class ExpiringMap(ExpiringState, MapState[Any, Any]):
    """A bound MapState whose entries have times of their own; they are in the order of these times."""

    def __getitem__(self, name: Any) -> Any:
        name = self._named(name)
        value = self._read()[name][1]
        if type(value) in IMMUTABLE_TYPES:
            if self._renews_on_read:
                self._put(name, value)
            return value
        at = (self._scope.key, name)
        if at not in self._own_values:
            value = copy.deepcopy(value)
            self._own_values.add(at)
        self._put(name, value)
        return value

    def __setitem__(self, name: Any, value: Any) -> None:
        name, value = self._named(name), self._keep(value)
        self._put(name, value)
        if type(value) not in IMMUTABLE_TYPES:
            self._own_values.add((self._scope.key, name))

    def __contains__(self, name: object) -> bool:
        name = self._named(name)
        found = self._read().get(name)
        if found is not None and self._renews_on_read:
            self._put(name, found[1])
        return found is not None

    def _put(self, name: Any, value: Any) -> None:
        written = self._write()
        written_us = self._stamp(next(reversed(written.values()))[0] if written else UNKNOWN_US)
        written.pop(name, None)
        written[name] = written_us, value

    def plain(self, entry: dict[Any, Stamped]) -> dict[Any, Any]:
        return {name: value for name, (_, value) in entry.items()}

    def _expire(self, until_us: int) -> None:
        found = self._read()
        if not found or self._oldest_of(found) > until_us:
            return
        if self._oldest_of(found) == UNKNOWN_US:
            known = takewhile(lambda item: item[1][0] != UNKNOWN_US, reversed(found.items()))
            gone = [name for name, (written_us, _) in known if written_us <= until_us]
        else:
            gone = [name for name, _ in takewhile(lambda item: item[1][0] <= until_us, found.items())]
        if not gone:
            return
        if len(gone) == len(found):
            State.clear(self)
        else:
            written = self._write()
            for name in gone:
                del written[name]
        self._own_values.difference_update([(self._scope.key, name) for name in gone])

    def _dated(self, entry: dict[Any, Stamped], now_us: int) -> dict[Any, Stamped]:
        dated = [(now_us if us == UNKNOWN_US else us, name, value) for name, (us, value) in entry.items()]
        return {name: (us, value) for us, name, value in sorted(dated, key=_WRITTEN_US)}

    def _oldest_of(self, entry: dict[Any, Stamped]) -> int:
        return next(iter(entry.values()))[0]


_KINDS: Final[Mapping[type[State], type[ExpiringState]]] = {
    ValueState: ExpiringValue,
    ReducingState: ExpiringReducing,
    ListState: ExpiringList,
    MapState: ExpiringMap,
}


def bound_state(declared: State, name: str, scope: KeyScope) -> State:
    """Return a declared state with entries, which expire if it has a time to live."""
    if declared.ttl is None:
        return declared.bound(name, scope)
    kind = next(expiring for plain, expiring in _KINDS.items() if isinstance(declared, plain))
    return kind(declared).bound(name, scope)


def plain_entry(state: State, entry: Any) -> Any:
    """Return an entry as the function sees it."""
    return state.plain(entry) if isinstance(state, ExpiringState) else entry
