"""Kafka values in Avro, each with the id that its schema has in a registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from midstream.connectors.formats.avro import AvroDecoder, AvroEncoder
from midstream.connectors.formats.avro_types import arrow_fields, parse_schema
from midstream.connectors.kafka.client import OptionValue
from midstream.connectors.kafka.record_parser import BoundValues
from midstream.connectors.kafka.schema_registry import (
    HEADER_BYTES,
    BySchema,
    Registry,
    UnknownSchema,
    header,
    header_id,
    registering,
)
from midstream.engine.core.batches import single_batch
from midstream.engine.core.errors import ConfigError


class AvroValues:
    """Reads a topic's values; `schema` has the columns of the reader's schema.

    Raises ConfigError, SchemaError, or StorageError if the newest schema is needed and the registry does not answer.
    """

    def __init__(
        self, registry: Mapping[str, OptionValue] | None, text: str | None, subject: str | None, who: str
    ) -> None:
        if registry is None:
            raise ConfigError(f"{who}: format='avro' needs registry={{'url': …}}, the schema registry of the values")
        self._registry = Registry(registry, who)
        known: dict[str, str] = {}
        where = f"{who}: schema="
        if text is None:
            if subject is None:
                raise ConfigError(
                    f"{who}: format='avro' of several topics needs schema=, the text of the schema with which to read "
                    "them"
                )
            try:
                text, known = self._registry.latest(subject)
            except UnknownSchema as error:
                raise ConfigError(
                    f"{who}: the schema registry has no subject {subject!r} ({error}); give schema=, the text of an Avro schema"
                ) from error
            where = f"{who}: the newest schema of {subject!r}"
        self._reader = parse_schema(text, where, known)
        self.schema = pa.schema(list(arrow_fields(self._reader, self._reader.name)))
        self._decoders = BySchema(self._new_decoder)
        """Decoders by the id of the writer's schema."""

    def check(self) -> None:
        """Check that the registry answers and accepts the user."""
        self._registry.check()

    def parse(self, values: Sequence[bytes]) -> pa.RecordBatch:
        """Parse one row per value. Raises ArrowInvalid for bad values, RegistrySilent for those whose schema is not
        known yet.
        """
        by_id: dict[int, list[int]] = {}
        for at, value in enumerate(values):
            try:
                by_id.setdefault(header_id(value), []).append(at)
            except ValueError as error:
                raise pa.ArrowInvalid(str(error)) from error
        pieces = []
        for schema_id, places in by_id.items():
            decoder = self._decoders.get(schema_id)
            try:
                pieces.append(decoder.decode([values[at] for at in places], HEADER_BYTES))
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"schema {schema_id}: {error}") from error
        if len(pieces) == 1:
            return pieces[0]
        order = np.argsort(np.concatenate([np.array(places, np.int64) for places in by_id.values()]))
        return single_batch(pa.Table.from_batches(pieces, self.schema).take(pa.array(order, pa.int64())))

    def _new_decoder(self, schema_id: int) -> AvroDecoder:
        text, known = self._registry.schema(schema_id)
        return AvroDecoder(parse_schema(text, "its schema", known), self._reader, self._reader.name)


class AvroWriting:
    """Writes a topic's values: created and registered on the driver, used in the slots, which need no registry."""

    def __init__(self, registry: Mapping[str, OptionValue] | None, topic: str, who: str) -> None:
        if registry is None:
            raise ConfigError(f"{who}: format='avro' needs registry={{'url': …}}, to register the schema of the values")
        self._registry = Registry(registry, who)
        self._topic = topic
        self._who = who
        self._id: int | None = None

    @property
    def fields(self) -> None:
        """None: a record may have any columns."""

    def bound(self, values: pa.Schema) -> BoundValues:
        encoder = AvroEncoder(values, self._topic, self._who)
        return BoundValues(partial(self._register, encoder), partial(self._values, encoder))

    def _register(self, encoder: AvroEncoder) -> None:
        """Register the schema. Raises ConfigError if the registry refuses it as incompatible with earlier versions."""
        text = msgspec.json.encode(encoder.avro_schema).decode()
        with registering(f"{self._topic}-value", self._who) as subject:
            self._id = self._registry.register(subject, text)

    def _values(self, encoder: AvroEncoder, batch: pa.RecordBatch) -> list[bytes | None]:
        assert self._id is not None, f"{self._who}: the schema is not registered"
        return [*encoder.encode(batch, header(self._id))]
