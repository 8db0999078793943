"""A Confluent schema registry: looks up schemas by id, and ids of schemas.

An unknown schema is distinguished from a registry that does not answer: the first concerns the record or the program;
the second is waited for, as for brokers.
"""

from __future__ import annotations

import base64
import binascii
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pyarrow as pa

from midstream.connectors.common.optional_packages import require
from midstream.connectors.kafka.client import OptionValue, resolved_option
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

T = TypeVar("T")
AVRO_EXTRA: Final = "kafka-avro"
PROTOBUF: Final = "PROTOBUF"
HEADER_BYTES: Final = 5
"""The bytes before a value: a byte 0 and the id of its schema, in four bytes."""
_ANSWER_S: Final = 10
_AGAIN_S: Final = 1.0
"""The pause before the next request to a registry that did not answer."""
_REFERENCES_MAX: Final = 100
_NO_ID: Final = 2**31 - 1
"""An id that no schema has."""
_UNKNOWN_S: Final = 30.0
"""The time for which an id that the registry did not have is not requested again."""


class RegistrySilent(StorageError):
    """The registry does not answer, or not like a registry; it may do so later."""


class UnknownSchema(Exception):
    """The registry does not have the schema."""


class Registry:
    """The address and credentials of the registry: the options of confluent-kafka's client. Pickles; `repr` hides them.

    Its methods block, and may be called on any thread.
    """

    def __init__(self, options: Mapping[str, OptionValue], who: str, extra: str = AVRO_EXTRA) -> None:
        require("confluent_kafka.schema_registry.schema_registry_client", extra, who)
        url = options.get("url") if isinstance(options, Mapping) else None
        if not isinstance(url, str) or not url:
            raise ConfigError(f"{who}: registry={{…}} has no 'url', such as registry={{'url': 'http://registry:8081'}}")
        self._options = {"timeout": _ANSWER_S, **options, "max.retries": 0}  # the caller retries
        self._who = who
        self._client: SchemaRegistryClient | None = None
        self._silent_until_s = float("-inf")
        self._why = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_silent_until_s": float("-inf")}

    def __repr__(self) -> str:
        return "Registry(…)"

    def check(self) -> None:
        """Raise RegistrySilent if the registry does not answer, or ConfigError if it refuses the user."""
        try:
            self.schema(_NO_ID)
        except UnknownSchema:
            return

    def schema(self, schema_id: int) -> tuple[str, dict[str, str]]:
        """Return the text of an Avro schema, and of those that it refers to, by name. Raises UnknownSchema or
        RegistrySilent.
        """
        return self._request(lambda client: _avro(client, client.get_schema(schema_id)))

    def latest(self, subject: str) -> tuple[str, dict[str, str]]:
        """Return the newest version of a subject, in the form of `schema`."""
        return self._request(lambda client: _avro(client, client.get_latest_version(subject).schema))

    def descriptors(self, schema_id: int) -> tuple[bytes, dict[str, bytes]]:
        """Return the file descriptor of a Protobuf schema, and those that it refers to, by name, imported ones first."""

        def request(client: SchemaRegistryClient) -> tuple[bytes, dict[str, bytes]]:
            schema = client.get_schema(schema_id, fmt=_SERIALIZED)
            _check_kind(schema, PROTOBUF)
            found = _references(client, schema, _SERIALIZED)
            return _descriptor(schema), {name: _descriptor(other) for name, other in found.items()}

        return self._request(request)

    def register(self, subject: str, text: str) -> int:
        """Register an Avro schema as the newest version of the subject, unless it is one already, and return its id."""
        from confluent_kafka.schema_registry import Schema

        return self._request(lambda client: int(client.register_schema(subject, Schema(text, "AVRO"))))

    def register_descriptors(
        self, subject: str, file: bytes, imported: Mapping[str, tuple[bytes, Sequence[str]]]
    ) -> int:
        """Register a Protobuf schema, and return its id.

        `imported`: the files that it imports, by name, and what those import; each becomes a subject with its name.
        """
        from confluent_kafka.schema_registry import Schema, SchemaReference

        def request(client: SchemaRegistryClient) -> int:
            known: dict[str, SchemaReference] = {}
            for name, (data, names) in imported.items():
                schema = Schema(base64.b64encode(data).decode(), PROTOBUF, [known[each] for each in names])
                client.register_schema(name, schema)
                known[name] = SchemaReference(name, name, client.lookup_schema(name, schema).version)
            schema = Schema(base64.b64encode(file).decode(), PROTOBUF, list(known.values()))
            return int(client.register_schema(subject, schema))

        return self._request(request)

    def _request(self, question: Callable[[SchemaRegistryClient], T]) -> T:
        if time.monotonic() < self._silent_until_s:
            raise RegistrySilent(self._why)
        with self._explained():
            if self._client is None:
                self._client = self._connected()
            return question(self._client)

    def _connected(self) -> SchemaRegistryClient:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        options = {
            name: resolved_option(f"registry option {name!r}", value, self._who)
            for name, value in self._options.items()
        }
        try:
            return SchemaRegistryClient(options)
        except (TypeError, ValueError, OSError) as error:
            text = str(error) if isinstance(error, OSError) or "Unrecognized" in str(error) else type(error).__name__
            raise ConfigError(
                f"{self._who}: registry={{…}}: {text}; its options are those of confluent_kafka's SchemaRegistryClient"
            ) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

        try:
            yield
        except SchemaRegistryError as error:
            status = error.http_status_code
            if status == 404:
                raise UnknownSchema(error.error_message) from error
            if status in (408, 429) or status >= 500:
                raise self._silent(f"answers {status}: {error.error_message}") from error
            what = "refuses the user" if status in (401, 403) else "refuses the request"
            raise ConfigError(f"{self._who}: the schema registry {what}: {error.error_message} ({status})") from error
        except OAuthTokenError as error:
            raise self._silent(f"cannot be queried without a token: {error}") from error
        except Exception as error:
            # an answer that is not JSON, or not the expected JSON, does not come from a registry
            if not isinstance(error, (*_transport_errors(self._client), ValueError, KeyError, TypeError)):
                raise
            raise self._silent(f"does not answer: {type(error).__name__}: {error}") from error

    def _silent(self, what: str) -> RegistrySilent:
        self._why = f"{self._who}: the schema registry {what}"
        self._silent_until_s = time.monotonic() + _AGAIN_S
        return RegistrySilent(self._why)


@contextmanager
def registering(subject: str, who: str) -> Iterator[str]:
    """Convert errors while a schema is registered on the driver: a silent registry to StorageError, a refusal to
    ConfigError.
    """
    try:
        yield subject
    except RegistrySilent as error:
        raise StorageError(str(error)) from error
    except UnknownSchema as error:
        raise ConfigError(f"{who}: the schema registry does not accept subject {subject!r}: {error}") from error


class BySchema(Generic[T]):
    """Results of `make` for schemas, once per id. `make` raises SchemaError for unusable schemas, which is remembered."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: dict[int, T | str] = {}
        """The results; a string is the reason why there is none."""
        self._unknown: dict[int, tuple[float, str]] = {}
        """Ids that the registry did not have: how long that is remembered, and its answer."""
        self._turn = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return BySchema, (self._make,)

    def get(self, schema_id: int) -> T:
        """Return the result. Raises ArrowInvalid if the id has none, RegistrySilent while that is unknown."""
        found = self._made.get(schema_id)
        if found is None:
            with self._turn:
                found = self._made.get(schema_id) or self._new(schema_id)
        if isinstance(found, str):
            raise pa.ArrowInvalid(f"schema {schema_id}: {found}")
        return found

    def _new(self, schema_id: int) -> T | str:
        until_s, reason = self._unknown.get(schema_id, (0.0, ""))
        if time.monotonic() < until_s:
            return reason
        made: T | str
        try:
            made = self._make(schema_id)
        except UnknownSchema as error:
            reason = f"the schema registry does not have it: {error}"
            self._unknown[schema_id] = time.monotonic() + _UNKNOWN_S, reason
            return reason
        except SchemaError as error:
            made = str(error)
        self._made[schema_id] = made
        return made


_SERIALIZED: Final = "serialized"
"""The form of a Protobuf schema as a file descriptor, which can be read without a compiler."""


def _avro(client: SchemaRegistryClient, schema: Schema) -> tuple[str, dict[str, str]]:
    _check_kind(schema, "AVRO")
    found = _references(client, schema, None)
    return str(schema.schema_str), {name: str(other.schema_str) for name, other in found.items()}


def _check_kind(schema: Schema, wanted: str) -> None:
    kind = schema.schema_type or "AVRO"
    if kind != wanted:
        raise UnknownSchema(f"it is {kind}, not {wanted}")


def _descriptor(schema: Schema) -> bytes:
    try:
        return base64.b64decode(str(schema.schema_str), validate=True)
    except binascii.Error:
        raise UnknownSchema("it does not return Protobuf schemas as descriptors (format=serialized)") from None


def _references(client: SchemaRegistryClient, schema: Schema, form: str | None) -> dict[str, Schema]:
    """Return what a schema refers to, by name, each after what it refers to itself."""
    found: dict[str, Schema] = {}

    def follow(each: Schema) -> None:
        for reference in each.references or ():
            if reference.name in found:
                continue
            if len(found) >= _REFERENCES_MAX:
                raise UnknownSchema(f"it refers to more than {_REFERENCES_MAX} others")
            if reference.name is None or reference.subject is None or reference.version is None:
                raise ValueError(f"a reference without its name, subject or version: {reference}")
            other = client.get_version(reference.subject, reference.version, fmt=form).schema
            follow(other)
            found[reference.name] = other

    follow(schema)
    return found


def _transport_errors(client: SchemaRegistryClient | None) -> tuple[type[Exception], ...]:
    """Return the exceptions of the HTTP library that the client uses, whichever of two it is."""
    if client is None:
        return ()
    session = client._rest_client.session
    library: Any = sys.modules[type(session).__module__.partition(".")[0]]
    return library.TransportError, library.InvalidURL


def header(schema_id: int) -> bytes:
    """Return the bytes before a value with this schema."""
    return struct.pack(">bI", 0, schema_id)


def header_id(value: bytes) -> int:
    """Return the id of a value's schema. Raises ValueError for a value that does not begin with one."""
    if len(value) < HEADER_BYTES:
        raise ValueError(f"it has {len(value)} bytes, fewer than the {HEADER_BYTES} before a value with a schema's id")
    magic, schema_id = struct.unpack_from(">bI", value)
    if magic != 0:
        raise ValueError(f"it begins with the byte {value[0]}, not with 0 and a schema's id")
    return int(schema_id)
