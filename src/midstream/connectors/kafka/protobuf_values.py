"""Kafka values in Protobuf: the message alone, or after the id of its schema in a registry and its place in that.

With a registry, the message type of a value is known, and compared with the reader's: a topic may have messages of
several types, and Protobuf silently reads the bytes of one as another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module

import pyarrow as pa

from midstream.connectors.formats.protobuf import ProtobufDecoder, ProtobufEncoder
from midstream.connectors.formats.protobuf_types import EXTRA, MessageType, files_of, message_at, mismatch, pool_of
from midstream.connectors.kafka.client import OptionValue
from midstream.connectors.kafka.record_parser import BoundValues
from midstream.connectors.kafka.schema_registry import (
    HEADER_BYTES,
    BySchema,
    Registry,
    header,
    header_id,
    registering,
)
from midstream.engine.core.errors import SchemaError

_GOOGLE = "google/protobuf/"
_INDEX_MAX = 100
"""The limit on the nesting of message types, and on their number in one."""


class ProtobufValues:
    """Reads a topic's values; `schema` has the columns of the message. Raises ConfigError or SchemaError."""

    def __init__(self, registry: Mapping[str, OptionValue] | None, message: object, who: str) -> None:
        self._type = MessageType(message, who)
        self.schema = self._type.schema
        self._registry = None if registry is None else Registry(registry, who, EXTRA)
        self._writers = BySchema(self._new_writer)
        self._decoder: ProtobufDecoder | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_decoder": None}

    def check(self) -> None:
        """Check that the registry answers and accepts the user."""
        if self._registry is not None:
            self._registry.check()

    def parse(self, values: Sequence[bytes]) -> pa.RecordBatch:
        """Parse one row per value. Raises ArrowInvalid for bad values, RegistrySilent for those whose schema is not
        known yet.
        """
        if self._registry is not None:
            values = [self._message_of(value) for value in values]
        if self._decoder is None:
            self._decoder = ProtobufDecoder(self._type)
        return self._decoder.decode(values)

    def _message_of(self, value: bytes) -> bytes:
        try:
            schema_id = header_id(value)
            index, at = message_index(value)
        except ValueError as error:
            raise pa.ArrowInvalid(str(error)) from error
        if why := self._writers.get(schema_id).why_not(index):
            raise pa.ArrowInvalid(f"schema {schema_id}: {why}")
        return value[at:]

    def _new_writer(self, schema_id: int) -> _ProtobufWriter:
        assert self._registry is not None
        data, imported = self._registry.descriptors(schema_id)
        return _ProtobufWriter(data, imported, self._type)


class _ProtobufWriter:
    """The messages of one schema of the registry, compared with the reader's message."""

    def __init__(self, data: bytes, imported: Mapping[str, bytes], reader: MessageType) -> None:
        from google.protobuf.descriptor_pb2 import FileDescriptorProto
        from google.protobuf.message import DecodeError

        files: dict[str, bytes] = {}
        for name, each in (*imported.items(), ("", data)):
            try:
                file = FileDescriptorProto.FromString(each)
            except DecodeError as error:
                raise SchemaError(f"its descriptors cannot be read: {error}") from error
            file.name = name or "the schema itself"  # the registry does not keep the names of files
            for other in file.dependency:
                if other not in files:
                    files.update(_of_google(other))
            files[file.name] = file.SerializeToString()
        self._file = pool_of(files).FindFileByName("the schema itself")
        self._reader = reader
        self._verdicts: dict[tuple[int, ...], str] = {}

    def why_not(self, index: tuple[int, ...]) -> str:
        """Return why the message at this place cannot be read; empty if it can."""
        if index not in self._verdicts:
            self._verdicts[index] = self._verdict_of(index)
        return self._verdicts[index]

    def _verdict_of(self, index: tuple[int, ...]) -> str:
        written = message_at(self._file, index)
        if written is None:
            return f"it has no message at {list(index)}"
        if written.full_name != self._reader.name:
            return f"it is a {written.full_name}, not a {self._reader.name}"
        return mismatch(written, self._reader.descriptor)


def _of_google(name: str) -> dict[str, bytes]:
    """Return files that belong to Protobuf itself, which registries do not store."""
    if not name.startswith(_GOOGLE):
        raise SchemaError(f"it imports {name!r:.200}, which the schema registry does not return with it")
    try:
        module = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError as error:
        raise SchemaError(f"it imports {name!r:.200}, which is not part of Protobuf") from error
    return dict(files_of(module.DESCRIPTOR))


def message_index(value: bytes) -> tuple[tuple[int, ...], int]:
    """Return which message of the schema a value is, and where its bytes begin. Raises ValueError for invalid values."""
    count, at = _number(value, HEADER_BYTES)
    found = []
    for _ in range(count):
        number, at = _number(value, at)
        found.append(number)
    return tuple(found) or (0,), at


def _number(value: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        if at >= len(value):
            raise ValueError("it ends within the place of its message in the schema")
        byte = value[at]
        at += 1
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 14:
            raise ValueError("the place of its message in the schema is not a number")
    number = (found >> 1) ^ -(found & 1)
    if not 0 <= number <= _INDEX_MAX:
        raise ValueError(f"the place of its message in the schema has the number {number}")
    return number, at


def index_bytes(index: Sequence[int]) -> bytes:
    """Encode an index as `message_index` reads it."""
    if tuple(index) == (0,):
        return b"\x00"
    out = bytearray()
    for number in (len(index), *index):
        left = number << 1
        while left > 0x7F:
            out.append(left & 0x7F | 0x80)
            left >>= 7
        out.append(left)
    return bytes(out)


class ProtobufWriting:
    """Writes a topic's values: with a registry they are registered on the driver, and slots need no registry."""

    def __init__(self, registry: Mapping[str, OptionValue] | None, message: object, topic: str, who: str) -> None:
        self._type = MessageType(message, who)
        self._registry = None if registry is None else Registry(registry, who, EXTRA)
        self._topic = topic
        self._who = who
        self._header: bytes | None = b"" if registry is None else None

    @property
    def fields(self) -> list[str]:
        return self._type.schema.names

    def bound(self, values: pa.Schema) -> BoundValues:
        return BoundValues(self._register, partial(self._values, ProtobufEncoder(values, self._type, self._who)))

    def _register(self) -> None:
        """Register the schema. Raises ConfigError if the registry refuses it as incompatible with earlier versions."""
        if self._registry is None:
            return
        *others, own = (file for file in self._type.files if not file[0].startswith(_GOOGLE))
        imported = {name: (data, _imports(data)) for name, data in others}
        with registering(f"{self._topic}-value", self._who) as subject:
            found = self._registry.register_descriptors(subject, own[1], imported)
        self._header = header(found) + index_bytes(self._type.index)

    def _values(self, encoder: ProtobufEncoder, batch: pa.RecordBatch) -> list[bytes | None]:
        assert self._header is not None, f"{self._who}: the schema is not registered"
        return [*encoder.encode(batch, self._header)]


def _imports(data: bytes) -> list[str]:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    return [name for name in FileDescriptorProto.FromString(data).dependency if not name.startswith(_GOOGLE)]
