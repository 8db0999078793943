"""A Confluent schema registry: which schema an id stands for, and the id of a schema.

What it does not know is told apart from that it does not answer: the first is about the record or the program, the
second is waited for like brokers are.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from midstream.connectors.extras import require
from midstream.connectors.kafka_client import OptionValue, looked_up
from midstream.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

T = TypeVar("T")
EXTRA: Final = "kafka-avro"
HEADER_BYTES: Final = 5
"""A value begins with a byte 0 and the id of its schema, in four bytes."""
_ANSWER_S: Final = 10
_AGAIN_S: Final = 1.0
"""A registry that did not answer is not asked again sooner."""
_REFERENCES_MAX: Final = 100
_NO_ID: Final = 2**31 - 1
"""What no schema has as its id."""


class RegistrySilent(StorageError):
    """The registry does not answer, or not as one: it may do so later."""


class UnknownSchema(Exception):
    """The registry does not have it."""


class Registry:
    """The address and credentials of the registry: the options of confluent-kafka's client. Pickles; `repr` hides them.

    Blocking; called on any thread.
    """

    def __init__(self, options: Mapping[str, OptionValue], who: str) -> None:
        require("confluent_kafka.schema_registry.schema_registry_client", EXTRA, who)
        url = options.get("url") if isinstance(options, Mapping) else None
        if not isinstance(url, str) or not url:
            raise ConfigError(f"{who}: registry={{…}} has no 'url', such as registry={{'url': 'http://registry:8081'}}")
        self._options = {"timeout": _ANSWER_S, **options, "max.retries": 0}  # the caller asks again
        self._who = who
        self._client: SchemaRegistryClient | None = None
        self._silent_until_s = float("-inf")
        self._why = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_silent_until_s": float("-inf")}

    def __repr__(self) -> str:
        return "Registry(…)"

    def check(self) -> None:
        """Raises RegistrySilent, or ConfigError when it refuses the user."""
        try:
            self.schema(_NO_ID)
        except UnknownSchema:
            return

    def schema(self, schema_id: int) -> tuple[str, dict[str, str]]:
        """The text of a schema, and those that it refers to, by name. Raises UnknownSchema or RegistrySilent."""
        return self._ask(lambda client: self._with_references(client, client.get_schema(schema_id)))

    def latest(self, subject: str) -> tuple[str, dict[str, str]]:
        """Of the newest version of a subject."""
        return self._ask(lambda client: self._with_references(client, client.get_latest_version(subject).schema))

    def register(self, subject: str, text: str) -> int:
        """The id of a schema, which becomes the newest version of the subject unless it is one already."""
        from confluent_kafka.schema_registry import Schema

        return self._ask(lambda client: int(client.register_schema(subject, Schema(text, "AVRO"))))

    def _with_references(self, client: SchemaRegistryClient, schema: Schema) -> tuple[str, dict[str, str]]:
        found: dict[str, str] = {}
        self._follow(client, schema, found)
        kind = schema.schema_type or "AVRO"
        if kind != "AVRO":
            raise UnknownSchema(f"it is {kind}, not AVRO")
        return str(schema.schema_str), found

    def _follow(self, client: SchemaRegistryClient, schema: Schema, found: dict[str, str]) -> None:
        """Those that others refer to first."""
        for reference in schema.references or ():
            if reference.name in found:
                continue
            if len(found) >= _REFERENCES_MAX:
                raise UnknownSchema(f"it refers to more than {_REFERENCES_MAX} others")
            if reference.name is None or reference.subject is None or reference.version is None:
                raise ValueError(f"a reference without its name, subject or version: {reference}")
            other = client.get_version(reference.subject, reference.version).schema
            self._follow(client, other, found)
            found[reference.name] = str(other.schema_str)

    def _ask(self, question: Callable[[SchemaRegistryClient], T]) -> T:
        if time.monotonic() < self._silent_until_s:
            raise RegistrySilent(self._why)
        with self._explained():
            if self._client is None:
                self._client = self._connected()
            return question(self._client)

    def _connected(self) -> SchemaRegistryClient:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        options = {
            name: looked_up(f"registry option {name!r}", value, self._who) for name, value in self._options.items()
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
            raise self._silent(f"cannot be asked without a token: {error}") from error
        except Exception as error:
            # what is not JSON, or JSON of something else, is no answer of a registry
            if not isinstance(error, (*_transport_errors(self._client), ValueError, KeyError, TypeError)):
                raise
            raise self._silent(f"does not answer: {type(error).__name__}: {error}") from error

    def _silent(self, what: str) -> RegistrySilent:
        self._why = f"{self._who}: the schema registry {what}"
        self._silent_until_s = time.monotonic() + _AGAIN_S
        return RegistrySilent(self._why)


def _transport_errors(client: SchemaRegistryClient | None) -> tuple[type[Exception], ...]:
    """Of the HTTP library that the client uses, whichever of two that is."""
    if client is None:
        return ()
    session = client._rest_client.session
    library: Any = sys.modules[type(session).__module__.partition(".")[0]]
    return library.TransportError, library.InvalidURL


def header(schema_id: int) -> bytes:
    """What a value begins with."""
    return struct.pack(">bI", 0, schema_id)


def header_id(value: bytes) -> int:
    """The id of the schema that a value was written with. Raises ValueError for a value that does not begin so."""
    if len(value) < HEADER_BYTES:
        raise ValueError(f"it has {len(value)} bytes, fewer than the {HEADER_BYTES} before a value with a schema's id")
    magic, schema_id = struct.unpack_from(">bI", value)
    if magic != 0:
        raise ValueError(f"it begins with the byte {value[0]}, not with 0 and a schema's id")
    return int(schema_id)
