"""Protobuf message types: what is shipped, what they are in Arrow, and which of a writer's can be read as a reader's.

A message class of generated code refers to a file of descriptors. These files travel with a job, so slots need neither
the module nor the compiler. Protobuf's own parser never reports a field whose type differs from the expected one; it
treats the field as unknown, or truncates a number: `mismatch` finds such fields before a value is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from midstream.connectors.common.optional_packages import require
from midstream.engine.core.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
    from google.protobuf.message import Message

EXTRA: Final = "kafka-protobuf"
_DEPTH_MAX: Final = 50
TIMESTAMP: Final = "google.protobuf.Timestamp"
DURATION: Final = "google.protobuf.Duration"
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_DOUBLE, _FLOAT, _INT64, _UINT64, _INT32, _FIXED64, _FIXED32, _BOOL, _STRING, _GROUP = range(1, 11)
_MESSAGE, _BYTES, _UINT32, _ENUM, _SFIXED32, _SFIXED64, _SINT32, _SINT64 = range(11, 19)
_ARROW: Final[Mapping[int, pa.DataType]] = {
    _DOUBLE: pa.float64(),
    _FLOAT: pa.float32(),
    _INT64: pa.int64(),
    _SFIXED64: pa.int64(),
    _SINT64: pa.int64(),
    _UINT64: pa.uint64(),
    _FIXED64: pa.uint64(),
    _INT32: pa.int32(),
    _SFIXED32: pa.int32(),
    _SINT32: pa.int32(),
    _UINT32: pa.uint32(),
    _FIXED32: pa.uint32(),
    _BOOL: pa.bool_(),
    _STRING: pa.large_string(),
    _ENUM: pa.large_string(),
    _BYTES: pa.large_binary(),
}
_NAMES: Final = (
    *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group"),
    *("message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
_READ_AS: Final = {
    _BOOL: {_INT32, _INT64, _UINT32, _UINT64},
    _ENUM: {_INT32, _INT64},
    _INT32: {_INT64},
    _UINT32: {_INT64, _UINT64},
    _SINT32: {_SINT64},
    _STRING: {_BYTES},
}
"""For each type of a writer's field, the other types that read all of its values unchanged."""


class MessageType:
    """A message type, by its name and the descriptors that it needs. Pickles; two are equal if these are."""

    def __init__(self, message: object, who: str) -> None:
        """Take over the descriptors of `message`, a class of generated code. Raises ConfigError for anything else,
        SchemaError for a message that is not a row.
        """
        require("google.protobuf", EXTRA, who)
        from google.protobuf.descriptor import Descriptor

        found = getattr(message, "DESCRIPTOR", None)
        if not isinstance(message, type) or not isinstance(found, Descriptor):
            raise ConfigError(
                f"{who}: message={message!r:.200} is not a Protobuf message class; give one that protoc has generated, such as "
                "message=orders_pb2.Order"
            )
        self.name: str = found.full_name
        self.files: tuple[tuple[str, bytes], ...] = tuple(files_of(found.file))
        self.index: tuple[int, ...] = _index(found)
        self.schema = pa.schema(list(arrow_fields(found, found.full_name)))
        if not self.schema.names:
            raise SchemaError(f"{who}: the message {found.full_name} has no fields; its fields are the columns")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("descriptor", "message")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageType) and (self.name, self.files) == (other.name, other.files)

    def __hash__(self) -> int:
        return hash((self.name, self.files))

    def __repr__(self) -> str:
        return f"MessageType({self.name})"

    @cached_property
    def descriptor(self) -> Descriptor:
        """The descriptor in a pool of its own: the program's own modules may have another file of the same name."""
        found: Descriptor = pool_of(dict(self.files)).FindMessageTypeByName(self.name)
        return found

    @cached_property
    def message(self) -> type[Message]:
        from google.protobuf.message_factory import GetMessageClass

        found: type[Message] = GetMessageClass(self.descriptor)
        return found


def files_of(file: FileDescriptor) -> Iterator[tuple[str, bytes]]:
    """Yield names and descriptors of a file and all its imports; imported files come first."""
    seen: set[str] = set()

    def walk(each: FileDescriptor) -> Iterator[tuple[str, bytes]]:
        if each.name not in seen:
            seen.add(each.name)
            for other in each.dependencies:
                yield from walk(other)
            yield each.name, each.serialized_pb

    return walk(file)


def pool_of(files: dict[str, bytes]) -> Any:
    """Return a descriptor pool with these files, each after what it imports. Raises SchemaError for invalid ones."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for name, data in files.items():
        try:
            pool.AddSerializedFile(data)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"the descriptors of {name!r:.200} cannot be used: {error}") from error
    return pool


def message_at(file: FileDescriptor, index: tuple[int, ...]) -> Descriptor | None:
    """Return the message type that an index denotes: the number in its file, then the number in that message, and so
    on.
    """
    found: Descriptor | None = None
    for number in index:
        inner = list(file.message_types_by_name.values()) if found is None else list(found.nested_types)
        if not 0 <= number < len(inner):
            return None
        found = inner[number]
    return found


def _index(message: Descriptor) -> tuple[int, ...]:
    outer = message.containing_type
    if outer is None:
        return (list(message.file.message_types_by_name).index(message.name),)
    return (*_index(outer), [each.name for each in outer.nested_types].index(message.name))


def map_entry(field: FieldDescriptor) -> Descriptor | None:
    """Return the type of a map's entries, with the fields `key` and `value`; None for a field that is not a map."""
    kind = field.message_type
    return kind if kind is not None and field.is_repeated and kind.GetOptions().map_entry else None


def is_wrapper(message: Descriptor) -> bool:
    return message.full_name in _WRAPPERS


def arrow_fields(message: Descriptor, where: str, depth: int = 0) -> Iterator[pa.Field[Any]]:
    """Yield the Arrow fields of a message. Raises SchemaError for one that no column can hold."""
    for field in message.fields:
        yield pa.field(field.name, arrow_type(field, f"{where}.{field.name}", depth + 1))


def arrow_type(field: FieldDescriptor, where: str, depth: int = 1) -> pa.DataType:
    if depth > _DEPTH_MAX:
        raise SchemaError(
            f"{where}: the message contains itself, or is nested more than {_DEPTH_MAX} deep; a column has no form "
            "for that. "
            "Read format='bytes', and parse them in map_batches()"
        )
    entry = map_entry(field)
    if entry is not None:
        parts = [
            (name, arrow_type(entry.fields_by_name[name], f"{where}.{name}", depth + 1)) for name in ("key", "value")
        ]
        return pa.large_list(pa.struct(parts))
    kind = arrow_type_of_item(field, where, depth)
    return pa.large_list(kind) if field.is_repeated else kind


def arrow_type_of_item(field: FieldDescriptor, where: str, depth: int = 1) -> pa.DataType:
    """Return the Arrow type of one value of a field that is not a map, also if the field is a list of them."""
    message = field.message_type
    if message is None:
        return _ARROW[field.type]
    if message.full_name == TIMESTAMP:
        return pa.timestamp("ns", "UTC")
    if message.full_name == DURATION:
        return pa.duration("ns")
    if is_wrapper(message):
        return _ARROW[message.fields_by_name["value"].type]
    inner = list(arrow_fields(message, where, depth))
    if not inner:
        raise SchemaError(
            f"{where} is the message {message.full_name}, which has no fields; a column has no form for that"
        )
    return pa.struct(inner)


def mismatch(writer: Descriptor, reader: Descriptor) -> str:
    """Return why values of the writer's message would change when read as the reader's; empty if they would not."""
    return _mismatch(writer, reader, reader.name, set())


def _mismatch(writer: Descriptor, reader: Descriptor, where: str, seen: set[tuple[str, str]]) -> str:
    if (writer.full_name, reader.full_name) in seen:
        return ""
    seen.add((writer.full_name, reader.full_name))
    why = _oneof_mismatch(writer, reader, where)
    if why:
        return why
    for field in reader.fields:
        written = writer.fields_by_number.get(field.number)
        if written is None:
            continue
        why = _field_mismatch(written, field)
        if why:
            return f"{where}.{field.name}, number {field.number}, {why}"
        if written.message_type is not None and field.message_type is not None:
            why = _mismatch(written.message_type, field.message_type, f"{where}.{field.name}", seen)
            if why:
                return why
    return ""


def _field_mismatch(written: FieldDescriptor, field: FieldDescriptor) -> str:
    """Compare two fields of one number, without what is inside a message."""
    if _form(written) != _form(field):
        return f"was written as {_form(written)} and is read as {_form(field)}"
    if written.type != field.type and field.type not in _READ_AS.get(written.type, ()):
        return f"was written as {_type_name(written)} and is read as {_type_name(field)}"
    writer, reader = written.containing_type, field.containing_type
    assert writer is not None and reader is not None, (written.full_name, field.full_name)
    if written.name != field.name:
        taken = reader.fields_by_name.get(written.name)
        if taken is not None:
            return f"was written with the name {written.name!r}, which the reader has for number {taken.number}"
        other = writer.fields_by_name.get(field.name)
        if other is not None:
            return f"was written with the name {written.name!r}, and {field.name!r} was number {other.number}"
    if written.message_type is not None and field.message_type is not None:
        names = (written.message_type.full_name, field.message_type.full_name)
        if names[0] != names[1] and any(name.startswith("google.protobuf.") for name in names):
            return (
                f"was written as {names[0]} and is read as {names[1]}; a type of Protobuf itself is only read as itself"
            )
    if written.enum_type is not None and field.enum_type is not None:
        why = _enum_mismatch(written.enum_type, field.enum_type)
        if why:
            return why
    before, after = _when_not_set(written), _when_not_set(field)
    if before != after and not written.is_required and not field.is_required:
        return f"where it is not set, was written as {before:.100} and is read as {after:.100}"
    return ""


def _form(field: FieldDescriptor) -> str:
    if map_entry(field) is not None:
        return "a map"
    return "a list" if field.is_repeated else "one value"


def _when_not_set(field: FieldDescriptor) -> str:
    """Return what a field that is not set is read as; equal for equal values, also of different types."""
    message = field.containing_type
    if field.is_repeated or (message is not None and message.GetOptions().map_entry):
        return ""  # the entries of a map have no presence, whatever their descriptors contain
    if field.has_presence and not field.has_default_value:
        return "null"
    value = field.default_value
    if isinstance(value, str):
        value = value.encode()
    return repr(int(value) if isinstance(value, bool) else value).removeprefix("b")


def _oneof_mismatch(writer: Descriptor, reader: Descriptor, where: str) -> str:
    """Compare oneofs: of several values, a parser keeps the last."""
    for oneof in reader.oneofs:
        both = [field for field in oneof.fields if field.number in writer.fields_by_number]
        for field in both[1:]:
            first = both[0]
            within = [writer.fields_by_number[each.number].containing_oneof for each in (first, field)]
            if within[0] is None or within[0] != within[1]:
                return (
                    f"{where}.{first.name} and {where}.{field.name}, numbers {first.number} and {field.number}, may both "
                    f"have been written, and are read as the oneof {oneof.name!r}, which holds one value"
                )
    return ""


def _enum_mismatch(writer: EnumDescriptor, reader: EnumDescriptor) -> str:
    """Compare enums. Numbers unknown to the reader are refused value by value, except in closed enums, whose parser
    hides them.
    """
    for number in writer.values_by_number:
        written = [value.name for value in writer.values if value.number == number]
        known = [value.name for value in reader.values if value.number == number]
        if not known and reader.is_closed:
            return f"may be {written[0]} ({number}), which the reader's enum {reader.full_name} does not have"
        if known and not set(known) & set(written):
            return f"was written with {written[0]} for {number}, which the reader's enum {reader.full_name} calls {known[0]}"
    return ""


def _type_name(field: FieldDescriptor) -> str:
    return _NAMES[field.type - 1]
