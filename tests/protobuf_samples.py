"""Protobuf message classes as protoc would generate them, built from descriptors, since there is no compiler here."""

from __future__ import annotations

from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_OF_GOOGLE = (timestamp_pb2, duration_pb2, wrappers_pb2)
SCALARS = [
    "double",
    "float",
    "int64",
    "uint64",
    "int32",
    "fixed64",
    "fixed32",
    "bool",
    "string",
    "bytes",
    "uint32",
    "sfixed32",
    "sfixed64",
    "sint32",
    "sint64",
]


def new_file(
    name: str,
    messages: dict[str, list[str]],
    enums: dict[str, dict[str, int]] | None = None,
    *imports: str,
    **more: Any,
) -> FileDescriptorProto:
    """`messages`: fields as in a .proto file, such as "optional int32 n = 1"; "Outer.Inner" is nested in what came before."""
    of_google = [module.DESCRIPTOR.name for module in _OF_GOOGLE]
    found = FileDescriptorProto(name=name, package="shop", syntax="proto3", dependency=[*of_google, *imports])
    found.MergeFrom(FileDescriptorProto(**more))
    for enum, values in (enums or {}).items():
        entry = found.enum_type.add(name=enum)
        for each, number in values.items():
            entry.value.add(name=each, number=number)
    made: dict[str, DescriptorProto] = {}
    for path, fields in messages.items():
        outer, _, last = path.rpartition(".")
        made[path] = made[outer].nested_type.add(name=last) if outer else found.message_type.add(name=last)
        for text in fields:
            _add(made[path], f"shop.{path}", text, found.syntax)
    return found


def _add(message: DescriptorProto, path: str, text: str, syntax: str) -> None:
    declared, _, number = text.partition(" = ")
    *labels, kind, name = declared.split(" ")
    label = FieldDescriptorProto.LABEL_REPEATED if "repeated" in labels else FieldDescriptorProto.LABEL_OPTIONAL
    if "required" in labels:
        label = FieldDescriptorProto.LABEL_REQUIRED
    field = message.field.add(name=name, number=int(number), label=label)
    if kind.startswith("map<"):
        key, value = kind[4:-1].split(",")
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, path, f"{key} key = 1", syntax)
        _add(entry, path, f"{value} value = 2", syntax)
        kind, field.label = f"{path}.{entry.name}", FieldDescriptorProto.LABEL_REPEATED
    if kind in SCALARS:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    elif kind.startswith("enum:"):
        field.type, field.type_name = FieldDescriptorProto.TYPE_ENUM, f".shop.{kind[5:]}"
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{kind}" if "." in kind else f".shop.{kind}"
    if "optional" in labels and syntax == "proto3":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def message_class(name: str, *files: FileDescriptorProto) -> Any:
    """The class of a message of the package "shop"; files come behind what they import."""
    pool = DescriptorPool()
    for data in (
        *(module.DESCRIPTOR.serialized_pb for module in _OF_GOOGLE),
        *(file.SerializeToString() for file in files),
    ):
        pool.AddSerializedFile(data)
    return GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))


ORDERS = new_file(
    "orders.proto",
    {
        "Line": ["string item = 1", "optional int32 count = 2"],
        "Order": [
            "int64 id = 1",
            "optional string note = 2",
            "google.protobuf.Timestamp at = 3",
            "google.protobuf.Duration took = 4",
            "google.protobuf.Int64Value big = 5",
            "enum:State state = 6",
            "repeated Line lines = 7",
            "map<string,Line> by_name = 8",
            "repeated sint32 numbers = 9",
            "Line first = 10",
            "bytes raw = 11",
            "map<int32,double> weights = 12",
        ],
    },
    {"State": {"NEW": 0, "PAID": 1}},
)
Order = message_class("Order", ORDERS)
