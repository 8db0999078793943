"""Conversion between Protobuf values and columns.

A field without presence is never null: if it is missing it has its default, as Protobuf defines. A field with presence
is null when it is not set, unless it declares a default. A list or map cannot be null in Protobuf, nor can its items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from midstream.connectors.formats.protobuf_types import (
    DURATION,
    TIMESTAMP,
    MessageType,
    arrow_type,
    arrow_type_of_item,
    is_wrapper,
    map_entry,
)
from midstream.engine.core.arrow_types import (
    is_bytes,
    is_list_array,
    is_list_of_any_length,
    is_struct_array,
    is_text,
    list_lengths,
    to_list,
)
from midstream.engine.core.errors import SchemaError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

Values: TypeAlias = "Callable[[list[Any]], pa.Array[Any]]"
"""Builds a column from the values of a field, each None or as in the message. Raises ArrowException or ValueError."""
Fill: TypeAlias = "Callable[[pa.Array[Any]], list[Any]]"
"""Returns what a message's constructor takes for each value of a column; None where the field is not set."""
_PER_S: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_NS: Final = 1_000_000_000
_LEAST_NS: Final = -(2**63)
_INSTANTS_S: Final = (-62_135_596_800, 253_402_300_799)
"""The seconds since 1970 of the years 1 to 9999."""
_DURATIONS_S: Final = (-315_576_000_000, 315_576_000_000)


class ProtobufDecoder:
    def __init__(self, kind: MessageType) -> None:
        self._kind = kind
        self._columns = [_column(field, f"{kind.descriptor.name}.{field.name}") for field in kind.descriptor.fields]

    def decode(self, values: Iterable[bytes]) -> pa.RecordBatch:
        """Decode one row per value. Raises ArrowInvalid for one that is not such a message."""
        from google.protobuf.message import DecodeError

        parse, messages = self._kind.message.FromString, []
        try:
            for value in values:
                message = parse(value)
                if not message.IsInitialized():
                    missing = ", ".join(message.FindInitializationErrors())  # type: ignore[attr-defined]  # its stub lacks it
                    raise pa.ArrowInvalid(f"required fields are missing: {missing}")
                messages.append(message)
            columns = [column(messages) for column in self._columns]
        except DecodeError as error:
            raise pa.ArrowInvalid(f"the bytes are not a {self._kind.name}: {error}") from error
        except (ValueError, OverflowError) as error:
            raise pa.ArrowInvalid(f"the bytes are a {self._kind.name} that a row cannot hold: {error}") from error
        return pa.RecordBatch.from_arrays(columns, schema=self._kind.schema)


def _column(field: FieldDescriptor, where: str) -> Values:
    """Return how to build a column from a field of messages, which may be None."""
    name = field.name
    pair_type = map_entry(field)
    if pair_type is not None:
        parts = [_values(pair_type.fields_by_name[part], f"{where}.{part}") for part in ("key", "value")]
        entry = arrow_type(field, where)

        def maps(messages: list[Any]) -> pa.Array[Any]:
            # A map does not keep the order of the bytes, so it is sorted: every reader gets the same order.
            pairs = [
                () if message is None else sorted(getattr(message, name).items(), key=itemgetter(0))
                for message in messages
            ]
            keys, items = ([pair[at] for pair in chain.from_iterable(pairs)] for at in (0, 1))
            assert is_list_of_any_length(entry)
            both = pa.StructArray.from_arrays([parts[0](keys), parts[1](items)], fields=list(entry.value_type))
            return _lists(pairs, both, entry)

        return maps
    values = _values(field, where)
    if field.is_repeated:
        kind = arrow_type(field, where)

        def lists(messages: list[Any]) -> pa.Array[Any]:
            found = [() if message is None else getattr(message, name) for message in messages]
            return _lists(found, values(list(chain.from_iterable(found))), kind)

        return lists
    if field.has_presence and not field.has_default_value:
        return lambda messages: values(
            [getattr(message, name) if message is not None and message.HasField(name) else None for message in messages]
        )
    return lambda messages: values([None if message is None else getattr(message, name) for message in messages])


def _lists(lists: Sequence[Sequence[Any]], items: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    offsets = [0]
    for each in lists:
        offsets.append(offsets[-1] + len(each))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items).cast(kind)


def _values(field: FieldDescriptor, where: str) -> Values:
    """Return how to build a column of single values, including those within lists and maps."""
    message = field.message_type
    enum = field.enum_type
    if enum is not None:
        names = {value.number: value.name for value in reversed(enum.values)}  # among aliases, the first one counts

        def enums(values: list[Any]) -> pa.Array[Any]:
            try:
                return pa.array([None if value is None else names[value] for value in values], pa.large_string())
            except KeyError as error:
                raise ValueError(f"{where} is {error}, which the enum {enum.full_name} does not have") from None

        return enums
    if message is None:
        kind = arrow_type_of_item(field, where)
        return lambda values: pa.array(values, kind)
    if message.full_name in (TIMESTAMP, DURATION):
        return _times(message.full_name == TIMESTAMP, arrow_type_of_item(field, where), where)
    if is_wrapper(message):
        inner = _values(message.fields_by_name["value"], where)
        return lambda values: inner([None if value is None else value.value for value in values])
    parts = [_column(each, f"{where}.{each.name}") for each in message.fields]
    struct = arrow_type_of_item(field, where)
    assert pa.types.is_struct(struct)
    fields = list(struct)

    def structs(values: list[Any]) -> pa.Array[Any]:
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays([part(values) for part in parts], fields=fields, mask=mask)

    return structs


def _times(is_instant: bool, kind: pa.DataType, where: str) -> Values:
    def times(values: list[Any]) -> pa.Array[Any]:
        found: list[int | None] = []
        for value in values:
            if value is None:
                found.append(None)
                continue
            seconds, nanos = value.seconds, value.nanos
            signs_differ = (seconds < 0 < nanos) or (nanos < 0 < seconds)
            if abs(nanos) >= _NS or (nanos < 0 if is_instant else signs_differ):
                raise ValueError(f"{where} has {seconds} seconds and {nanos} nanos")
            ns = seconds * _NS + nanos
            if not _LEAST_NS < ns < -_LEAST_NS:
                raise ValueError(f"{where} has {seconds} seconds, more than a column of nanoseconds can hold")
            found.append(ns)
        return pa.array(found, pa.int64()).cast(kind)

    return times


class ProtobufEncoder:
    """Encodes rows of `columns` as messages, whose other fields are not set. Raises SchemaError for columns that do not
    fit.
    """

    def __init__(self, columns: pa.Schema, kind: MessageType, where: str) -> None:
        self.kind = kind
        self._where = where
        self._filled = _Filled(kind.descriptor, columns, f"{where}: column ")

    def encode(self, batch: pa.RecordBatch, before: bytes) -> list[bytes]:
        """Encode one value per row, after `before`. Raises SchemaError for a value that the message cannot hold."""
        new = self.kind.message
        try:
            rows = self._filled.rows([batch.column(name) for name in self._filled.names])
        except pa.ArrowException as error:
            raise SchemaError(f"{self._where}: the message {self.kind.name} cannot hold a value: {error}") from error
        encoded = []
        for row in rows:
            try:
                encoded.append(before + new(**row).SerializeToString(deterministic=True))
            except (ValueError, TypeError) as error:
                raise SchemaError(f"{self._where}: {row!r:.300} is not a valid {self.kind.name}: {error}") from error
        return encoded


class _Filled:
    """A message that is filled from columns with the names of its fields."""

    def __init__(self, message: Descriptor, columns: Iterable[pa.Field[Any]], where: str) -> None:
        """`where` precedes the name of a column in messages. Raises SchemaError for columns that do not fit."""
        self._where = where
        self._fills: dict[str, Fill] = {}
        for column in columns:
            field = message.fields_by_name.get(column.name)
            if field is None:
                raise SchemaError(
                    f"{where}{column.name!r}: the message {message.full_name} has no such field; it has "
                    f"{', '.join(each.name for each in message.fields)}. Rename the column, or leave it out with select()"
                )
            self._fills[column.name] = _fill(field, column.type, f"{where}{column.name!r}")
        missing = [each.name for each in message.fields if each.is_required and each.name not in self._fills]
        if missing:
            raise SchemaError(
                f"{where.removesuffix('column ')}the message {message.full_name} requires {', '.join(missing)}, and there is "
                "no such column"
            )
        oneofs = {
            oneof.name: [each.name for each in oneof.fields if each.name in self._fills] for oneof in message.oneofs
        }
        self._oneofs = {name: fields for name, fields in oneofs.items() if len(fields) > 1}

    @property
    def names(self) -> list[str]:
        return list(self._fills)

    def rows(self, columns: Iterable[pa.Array[Any]]) -> list[dict[str, Any]]:
        """Return what the message's constructor takes for each row; `columns` are those of `names`."""
        filled = [fill(column) for fill, column in zip(self._fills.values(), columns, strict=True)]
        rows = [
            {name: value for name, value in zip(self._fills, row, strict=True) if value is not None}
            for row in zip(*filled, strict=True)
        ]
        for oneof, names in self._oneofs.items():
            for row in rows:
                there = [name for name in names if name in row]
                if len(there) > 1:
                    raise SchemaError(
                        f"{self._where}{there[0]!r} and {there[1]!r} both have a value in a row, but oneof {oneof!r} "
                        "holds only one"
                    )
        return rows


def _fill(field: FieldDescriptor, kind: pa.DataType, where: str) -> Fill:
    entry = map_entry(field)
    if entry is not None:
        return _fill_map(field, entry, kind, where)
    if field.is_repeated:
        return _fill_list(field, kind, where)
    fill = _fill_value(field, kind, where)
    if field.has_presence and not field.is_required:
        return fill
    why = (
        "is required"
        if field.is_required
        else "has no presence, so null would be read as its default; declare it optional"
    )

    def always(column: pa.Array[Any]) -> list[Any]:
        if column.null_count:
            raise SchemaError(f"{where} is null in a row, and the field {field.full_name} {why}, or replace null first")
        return fill(column)

    return always


def _fill_list(field: FieldDescriptor, kind: pa.DataType, where: str) -> Fill:
    if not is_list_of_any_length(kind):
        raise _misfit(field, kind, where)
    fill = _fill_value(field, kind.value_type, f"{where}[]")

    def lists(column: pa.Array[Any]) -> list[Any]:
        found = _pieces(column, where)
        return _grouped(found, fill(_without_nulls(column, where)))

    return lists


def _fill_map(field: FieldDescriptor, entry: Descriptor, kind: pa.DataType, where: str) -> Fill:
    pair = kind.value_type if is_list_of_any_length(kind) else None
    if pair is None or not pa.types.is_struct(pair) or [each.name for each in pair] != ["key", "value"]:
        raise _misfit(field, kind, where)
    fills = [_fill_value(entry.fields_by_name[each.name], each.type, f"{where}.{each.name}") for each in pair]

    def maps(column: pa.Array[Any]) -> list[Any]:
        lengths = _pieces(column, where)
        entries = _without_nulls(column, where)
        assert is_struct_array(entries), entries.type
        keys, values = (entries.field(at) for at in (0, 1))
        if keys.null_count or values.null_count:
            raise SchemaError(f"{where} has a null in a map, for which Protobuf has no form")
        pairs = _grouped(lengths, list(zip(fills[0](keys), fills[1](values), strict=True)))
        found = [dict(each) for each in pairs]
        for one, each in zip(found, pairs, strict=True):
            if len(one) < len(each):
                [(twice, _)] = Counter(key for key, _ in each).most_common(1)
                raise SchemaError(f"{where} has the key {twice!r} twice in one map")
        return found

    return maps


def _pieces(column: pa.Array[Any], where: str) -> list[int]:
    if column.null_count:
        raise SchemaError(
            f"{where} is null in a row, and Protobuf cannot distinguish a null list from an empty one; replace null first"
        )
    assert is_list_array(column), column.type
    lengths: list[int] = to_list(list_lengths(column))
    return lengths


def _without_nulls(column: pa.Array[Any], where: str) -> pa.Array[Any]:
    assert is_list_array(column), column.type
    items = column.flatten()
    if items.null_count:
        raise SchemaError(f"{where} has a null in a list, for which Protobuf has no form; remove it first")
    return items


def _grouped(lengths: list[int], items: list[Any]) -> list[list[Any]]:
    found, at = [], 0
    for length in lengths:
        found.append(items[at : at + length])
        at += length
    return found


def _fill_value(field: FieldDescriptor, kind: pa.DataType, where: str) -> Fill:
    message, types = field.message_type, pa.types
    if message is None:
        return _fill_scalar(field, kind, where)
    if message.full_name in (TIMESTAMP, DURATION):
        is_instant = message.full_name == TIMESTAMP
        if is_instant and pa.types.is_timestamp(kind) and kind.tz is not None:
            return _fill_time(_PER_S[kind.unit], _INSTANTS_S, where)
        if not is_instant and pa.types.is_duration(kind):
            return _fill_time(_PER_S[kind.unit], _DURATIONS_S, where)
        raise _misfit(field, kind, where)
    if is_wrapper(message):
        fill = _fill_scalar(message.fields_by_name["value"], kind, where)
        return lambda column: [None if value is None else {"value": value} for value in fill(column)]
    if not types.is_struct(kind) or not kind.num_fields:
        raise _misfit(field, kind, where)
    filled = _Filled(message, kind, f"{where}.")

    def structs(column: pa.Array[Any]) -> list[Any]:
        assert is_struct_array(column), column.type
        there = column.is_valid()
        # values inside a null struct have no meaning, so they are not examined
        kept = column.filter(there)
        assert is_struct_array(kept), kept.type
        made = iter(filled.rows([kept.field(name) for name in filled.names]))
        return [next(made) if each else None for each in there.to_pylist()]

    return structs


def _fill_scalar(field: FieldDescriptor, kind: pa.DataType, where: str) -> Fill:
    types = pa.types
    wanted = arrow_type_of_item(field, where)
    if field.enum_type is not None:
        known, name = frozenset(field.enum_type.values_by_name), field.enum_type.full_name
        if not is_text(kind):
            raise _misfit(field, kind, where)

        def enums(column: pa.Array[Any]) -> list[Any]:
            found = column.to_pylist()
            for value in found:
                if value is not None and value not in known:
                    raise SchemaError(f"{where} is {value!r:.100}, which the enum {name} does not have")
            return found

        return enums
    fits = (
        kind == wanted
        or (is_text(kind) and is_text(wanted))
        or (is_bytes(kind) and is_bytes(wanted))
        or (types.is_integer(kind) and types.is_integer(wanted))
        or (types.is_float32(kind) and types.is_float64(wanted))
    )
    if not fits:
        raise _misfit(field, kind, where)

    def scalars(column: pa.Array[Any]) -> list[Any]:
        try:
            converted: pa.Array[Any] = column.cast(wanted)
        except pa.ArrowInvalid as error:
            raise SchemaError(f"{where} has a value that the field {field.full_name} cannot hold: {error}") from error
        return converted.to_pylist()

    return scalars


def _fill_time(per_s: int, limits_s: tuple[int, int], where: str) -> Fill:
    """Return how to fill seconds and nanoseconds: those of an instant are never negative, those of a duration have its
    sign.
    """
    in_ns, (least_s, most_s) = _NS // per_s, limits_s

    def times(column: pa.Array[Any]) -> list[Any]:
        found: list[Any] = []
        for value in column.cast(pa.int64()).to_pylist():
            if value is None:
                found.append(None)
                continue
            if limits_s is _INSTANTS_S or value >= 0:
                seconds, nanos = value // per_s, value % per_s * in_ns
            else:
                seconds, nanos = -(-value // per_s), -(-value % per_s) * in_ns
            if not least_s <= seconds <= most_s:
                raise SchemaError(
                    f"{where} is {seconds} seconds in a row, beyond what Protobuf has ({least_s} to {most_s})"
                )
            found.append({"seconds": seconds, "nanos": nanos})
        return found

    return times


def _misfit(field: FieldDescriptor, kind: pa.DataType, where: str) -> SchemaError:
    wanted = arrow_type(field, where)
    return SchemaError(
        f"{where} is {kind}, and the field {field.full_name} holds {wanted}; cast it, or leave it out with select()"
    )
