"""Heap state at rest: a table per state, with columns `key`, `namespace` and `value`.

`key` is the key column itself, or a struct of all key columns; `namespace` is the position in a list or the key in a
map. Values without a declared Arrow type are pickled into binary columns. Where entries expire, a column has the time at
which each was last written (`expiring_states.WRITTEN_COLUMNS`). A later table supersedes earlier ones for the
keys that it has; the column `gone` marks rows of keys that were removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import TimestampType, is_struct_array, to_list
from midstream.engine.core.errors import JobError, StorageError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.core.python_values import ValueMisfit, to_array, to_python, zone_of
from midstream.engine.state.changelog import GONE, ChangelogSnapshot
from midstream.engine.state.expiring_states import UNKNOWN_US, ExpiringState
from midstream.engine.state.keyed_states import ListState, MapState, State, StateRow
from midstream.engine.state.safe_pickle import OwnCode, Pickles
from midstream.engine.state.state_parts import KEY_GROUP, check_columns
from midstream.engine.state.state_upgrade import Upgrade, migrated_values
from midstream.engine.state.timers import TimerRow

T = TypeVar("T")

GONE_COLUMN: Final = "gone"
_LAST: Final = (1 << 63) - 1
"""The number of a removed timer: it comes after those that are set."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_instant(kind: pa.DataType) -> bool:
    """Whether keys of this type are held as integers, in the type's unit.

    As datetimes in one zone, the repeated hour at the end of daylight saving time would be one key: Python compares
    them by wall clock.
    """
    return bool(pa.types.is_timestamp(kind) and kind.tz)


class KeyEncoding:
    """How keys are held in memory: one value for one key column, else a tuple, in the types of `fields`. Without
    fields, the state is not keyed.

    Two keys are equal exactly if the values in the stream are; `shown` converts a key to what functions see.
    """

    def __init__(self, fields: Sequence[pa.Field[Any]], max_parallelism: int, where: str = "") -> None:
        self._where = f"{where}: " if where else ""
        self._fields = tuple(fields)
        self._shown = [_Zone(field.type) if is_instant(field.type) else _as_it_is for field in fields]
        self._is_shown_as_it_is = all(shown is _as_it_is for shown in self._shown)
        self._max_parallelism = max_parallelism

    def columns(self, keys: Sequence[Any]) -> dict[str, pa.Array[Any]]:
        """Return the columns `__key_group` and `key` for these keys."""
        if not self._fields:
            return {}
        return encoded_keys(self._arrays(keys), [field.name for field in self._fields], self._max_parallelism)

    def _arrays(self, keys: Sequence[Any]) -> list[pa.Array[Any]]:
        if len(self._fields) == 1:
            return [pa.array(keys, self._fields[0].type)]
        return [pa.array([key[i] for key in keys], field.type) for i, field in enumerate(self._fields)]

    @property
    def is_keyed(self) -> bool:
        return bool(self._fields)

    @property
    def flat_fields(self) -> list[pa.Field[Any]]:
        """The columns of keys in a table that has a column for each; of several they have numbers for names."""
        if len(self._fields) == 1:
            return [pa.field("key", self._fields[0].type)]
        return [pa.field(f"key_{i}", field.type) for i, field in enumerate(self._fields)]

    def flat_batch(self, keys: Sequence[Any]) -> pa.RecordBatch:
        """Return these keys in the columns `flat_fields`."""
        return pa.RecordBatch.from_arrays(self._arrays(keys), schema=pa.schema(self.flat_fields))

    def flat(self, table: pa.Table) -> pa.Table:
        """Return a table that has the columns `flat_fields` in place of `key`."""
        if len(self._fields) == 1:
            return table
        at, key = table.schema.get_field_index("key"), table.column("key").combine_chunks()
        assert is_struct_array(key), key.type
        table = table.remove_column(at)
        for i, field in enumerate(self.flat_fields):
            table = table.add_column(at + i, field, key.field(i))
        return table

    def nested(self, table: pa.Table) -> pa.Table:
        """Return the table of which `flat` makes this one."""
        if len(self._fields) == 1:
            return table
        names = [field.name for field in self.flat_fields]
        at, columns = table.schema.get_field_index(names[0]), [table.column(name).combine_chunks() for name in names]
        key = pa.StructArray.from_arrays(columns, [field.name for field in self._fields])
        return table.drop_columns(names).add_column(at, "key", key)

    def keys(self, table: pa.Table) -> list[Any]:
        """Return the keys of a table made with `columns`. Raises StorageError if they are of another type."""
        if not self._fields:
            return [None] * table.num_rows
        if table.schema.get_field_index("key") < 0:
            check_columns(table, {"key": self._fields[0].type}, f"{self._where}keys")
        column = table.column("key")
        names = [field.name for field in self._fields]
        if not self.is_key_of(table):
            raise StorageError(
                f"{self._where}the keys in the checkpoint are {column.type}, those of the stream are {self._key_type}; "
                "key by the same types, or give the operator a new uid to start without state"
            )
        key = column.combine_chunks()
        return self.of([key.field(i) for i in range(len(names))] if len(names) > 1 and is_struct_array(key) else [key])

    def is_key_of(self, table: pa.Table) -> bool:
        """Whether a table made with `columns` has one column of keys, of the stream's types."""
        at = table.schema.get_field_index("key")
        return at >= 0 and table.schema.field(at).type == self._key_type

    @property
    def _key_type(self) -> pa.DataType:
        if len(self._fields) == 1:
            kind: pa.DataType = self._fields[0].type
            return kind
        return pa.struct([pa.field(f.name, f.type) for f in self._fields])

    def of(self, columns: Sequence[pa.Array[Any]]) -> list[Any]:
        """Return the keys of rows with these key columns. Raises JobError for a value that Python cannot hold."""
        values = []
        for field, column in zip(self._fields, columns, strict=True):
            if is_instant(field.type):
                column = column.view(pa.int64())
            try:
                if pa.types.is_time(field.type):
                    column.validate(full=True)  # Python would accept a value beyond 24 hours as a time of day
                values.append(to_python(column))
            except (ValueError, OverflowError) as error:
                raise JobError(
                    f"{self._where}a value of the key column {field.name!r}, which is {field.type}, cannot be "
                    f"represented in Python: {error}; filter such rows out, or key by another type"
                ) from error
        return values[0] if len(values) == 1 else list(zip(*values, strict=True))

    def shown(self, key: Any) -> Any:
        """Return the key as it is in the stream's rows."""
        if key is None or self._is_shown_as_it_is:
            return key
        if len(self._shown) == 1:
            return self._shown[0](key)
        return tuple(shown(value) for shown, value in zip(self._shown, key, strict=True))


def encoded_keys(
    arrays: Sequence[pa.Array[Any]], names: Sequence[str], max_parallelism: int
) -> dict[str, pa.Array[Any]]:
    """Return the columns `__key_group` and `key` for key columns. Raises JobError for a null key."""
    groups = key_groups(pa.RecordBatch.from_arrays(list(arrays), list(names)), tuple(names), max_parallelism)
    key = arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(list(arrays), list(names))
    return {KEY_GROUP: pa.array(groups), "key": key}


class _Zone:
    """Converts integers to the datetimes of a timestamp type with a zone."""

    def __init__(self, kind: TimestampType) -> None:
        self._zone = zone_of(kind)
        self._us = {"ms": 1000, "us": 1}[kind.unit]

    def __call__(self, value: int) -> datetime:
        return (_EPOCH + timedelta(microseconds=value * self._us)).astimezone(self._zone)


def _as_it_is(value: Any) -> Any:
    return value


def state_table(state: State, taken: ChangelogSnapshot, encoding: KeyEncoding, own: OwnCode, where: str) -> pa.Table:
    """Convert what a snapshot has of a state to a table. Raises JobError naming a value that cannot be stored. Any thread."""
    entries, gone = taken.entries, []
    if taken.stored:
        gone = [key for key, entry in entries.items() if entry is GONE or (state.is_many_rows and not entry)]
        entries = {key: entry for key, entry in entries.items() if entry is not GONE} if gone else entries
    keys, names, values = state.columns_of(entries)
    pickles = Pickles(own)
    columns = encoding.columns([*keys, *gone])
    if isinstance(state, ListState):
        columns["namespace"] = pa.array([*names, *(None for _ in gone)], pa.int64())
    elif isinstance(state, MapState):
        columns["namespace"] = _encode(
            names, len(gone), state.key_type, pickles, f"{where}: a key of state {state.name!r}"
        )
    if isinstance(state, ExpiringState):
        times = pa.array([*(written_us for written_us, _ in values), *(None for _ in gone)], pa.int64())
        columns[state.written_column] = times
        values = [value for _, value in values]
    what = f"{where}: a value of state {state.name!r}"
    columns["value"] = _encode(values, len(gone), state.type, pickles, what)
    return pa.table(columns | _marks(len(keys), len(gone)))


def state_rows(
    state: State, table: pa.Table, encoding: KeyEncoding, own: OwnCode, where: str, upgrade: Upgrade | None = None
) -> tuple[list[Any], Iterator[StateRow]]:
    """Return the keys of such a table, removed ones included, and its rows.

    `upgrade`: how the values are converted if the state was declared otherwise when it was stored.

    Raises StorageError for other types than these, and what `migrated_values` raises.
    """
    keys = encoding.keys(table)
    live, live_keys = _live(table, keys)
    pickles = Pickles(own)
    if upgrade is not None:
        live = upgrade.converted(live, f"{where}: state {state.name!r}")
    named: list[Any] = [None] * live.num_rows
    if isinstance(state, MapState):
        named = _decode(live, "namespace", state.key_type, pickles, f"{where}: keys of state {state.name!r}")
    stored = upgrade.type_of("value") if upgrade is not None and upgrade.migrates else state.type
    values = _decode(live, "value", stored, pickles, f"{where}: state {state.name!r}")
    if upgrade is not None and upgrade.migrates:
        values = migrated_values(state, live_keys, values, state.type, pickles, where)
    if isinstance(state, ExpiringState):
        values = list(zip(_written_us(live, state, where), values, strict=True))
    return keys, zip(live_keys, named, values, strict=True)


def _written_us(table: pa.Table, state: ExpiringState, where: str) -> list[int]:
    """Return when each value was last written; UNKNOWN_US if the program that stored it had no such time to live."""
    name = state.written_column
    if name not in table.column_names:
        return [UNKNOWN_US] * table.num_rows
    check_columns(table, {name: pa.int64()}, f"{where}: state {state.name!r}")
    return to_list(table.column(name))


def timers_table(taken: ChangelogSnapshot, encoding: KeyEncoding) -> pa.Table:
    """Convert what a snapshot has of timers to a table: those that are set in the order in which they were set, then the removed ones."""
    timers = list(taken.entries)
    numbers = [_LAST if number is GONE else number for number in taken.entries.values()]
    in_order = pa.array(numbers, pa.int64()).to_numpy()
    columns = encoding.columns([key for _, key in timers])
    columns["time_us"] = pa.array([time_us for time_us, _ in timers], pa.int64())
    table = pa.table(columns)
    if np.any(in_order[1:] < in_order[:-1]):  # timers were set again, or removed
        table = table.take(np.argsort(in_order, kind="stable"))
    gone = int(np.count_nonzero(in_order == _LAST))
    for name, column in _marks(len(timers) - gone, gone).items():
        table = table.append_column(name, column)
    return table


def timer_rows(table: pa.Table, encoding: KeyEncoding) -> tuple[list[TimerRow], list[TimerRow]]:
    """Return the timers of such a table, removed ones included, and those that are still set."""
    check_columns(table, {"time_us": pa.int64()}, "timers")
    timers = list(zip(to_list(table.column("time_us")), encoding.keys(table), strict=True))
    return timers, _live(table, timers)[1]


def _marks(live: int, gone: int) -> dict[str, pa.Array[Any]]:
    """Return the column that separates rows from the removed keys that follow them; no column if none was removed."""
    return {GONE_COLUMN: pa.array(np.arange(live + gone) >= live)} if gone else {}


def _live(table: pa.Table, keys: list[T]) -> tuple[pa.Table, list[T]]:
    """Return the rows of a table, and their entries in `keys`, without the removed keys at the end."""
    if GONE_COLUMN not in table.column_names:
        return table, keys
    check_columns(table, {GONE_COLUMN: pa.bool_()}, "removed keys")
    live = table.num_rows - int(np.count_nonzero(table.column(GONE_COLUMN).to_numpy()))
    return table.slice(0, live), keys[:live]


def _encode(values: list[Any], nulls: int, kind: pa.DataType | None, pickles: Pickles, what: str) -> pa.Array[Any]:
    """Encode values as a column, with `nulls` nulls appended."""
    if kind is None:
        return pa.array(
            [*(pickles.dumps(value, what) for value in values), *(None for _ in range(nulls))], pa.large_binary()
        )
    try:
        return to_array(values + [None] * nulls, kind)
    except ValueMisfit as misfit:  # the value was changed in place after it had been set
        raise JobError(f"{what}: {misfit}") from misfit


def _decode(table: pa.Table, name: str, kind: pa.DataType | None, pickles: Pickles, what: str) -> list[Any]:
    expected = pa.large_binary() if kind is None else kind
    index = table.schema.get_field_index(name)
    column = table.column(index) if index >= 0 else None
    if column is not None and column.type != expected:
        raise StorageError(f"{what}: stored as {column.type}, now declared as {kind or 'pickled'}")
    if column is None or kind is None:
        check_columns(table, {name: expected}, what)
    assert column is not None
    if kind is not None:
        try:
            return to_python(column)
        except (ValueError, OverflowError) as error:  # no such value is stored
            raise StorageError(
                f"{what}: a value in the checkpoint cannot be represented in Python: {error}; it is damaged"
            ) from error
    return [pickles.loads(value, what) for value in to_list(column)]
