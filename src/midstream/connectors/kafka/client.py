"""The connection to a Kafka cluster: the user's options, their secrets, and the errors of the client.

Options are librdkafka's. A value `env:NAME` or `file:/path` stands for the content of that variable or file in the
process that connects: it is read when it connects, and stored nowhere else. No message shows a value.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer

from midstream.connectors.common.dataset_uris import server_uri
from midstream.connectors.common.external_waits import ExternalWait
from midstream.engine.core.errors import ConfigError, StorageError

OptionValue: TypeAlias = str | int | float | bool | Callable[..., Any]
Record: TypeAlias = "tuple[bytes | None, bytes | None, int, list[Any] | None]"
"""The value, the key, the partition (`NO_PARTITION`: by the key) and the headers, None if there are none."""
NO_PARTITION: Final = -1
_PORT: Final = 9092
ANSWER_S: Final = 15.0
"""The time that a broker may take for an answer."""
_SILENCE_S: Final = 5.0
"""Silence of this length is reported."""
_AGAIN_S: Final = 60.0
"""The client reports silent brokers every few seconds; a report after a longer pause is a new silence."""
_GETTING_IN: Final = (
    "sasl.",
    "security.",
    "ssl.",
    "enable.ssl.",
    "oauth_cb",
    "broker.",
    "client.",
    "socket.",
    "reconnect.",
    "debug",
)
_CALLBACKS: Final = ("oauth_cb",)
_OURS: Final = {
    "bootstrap.servers": "give it as servers=",
    "metadata.broker.list": "give it as servers=",
    "client.rack.id": "the option is client.rack",
}
_log = logging.getLogger(__name__)
_client_log = logging.getLogger(f"{__name__}.librdkafka")
"""The log of the clients themselves, except each failed connection: `BrokerSilence` receives those, and reports less.

It also omits each request to try again for a transactional id: a failure that persists is raised.
"""
_client_log.addFilter(lambda record: not record.getMessage().startswith(("FAIL ", "ERROR ", "GETPID ")))


class ClientConfig:
    """The address of a cluster, and the credentials. Pickles; its repr does not show the options."""

    def __init__(
        self,
        servers: str | Sequence[str],
        options: Mapping[str, OptionValue] | None,
        ours: Mapping[str, str],
        who: str,
    ) -> None:
        """`ours`: options that the user must not set, each with what to do instead."""
        listed = [servers] if isinstance(servers, str) else list(servers)
        if not listed or not all(isinstance(each, str) and each.strip() for each in listed):
            raise ConfigError(
                f"{who}: servers={servers!r} names no broker; write for example 'kafka-1:9092,kafka-2:9092'"
            )
        self.servers = ",".join(listed)
        self._who = who
        self._options = dict(options or {})
        for name, value in self._options.items():
            reason = {**_OURS, **ours}.get(name)
            if reason is not None:
                raise ConfigError(f"{who}: option {name!r} cannot be set: {reason}")
            if name in _CALLBACKS and callable(value):
                continue
            if name.endswith("_cb") or name == "logger" or not isinstance(value, (str, int, float)):
                raise ConfigError(
                    f"{who}: option {name!r} is a {type(value).__name__}; options are strings, numbers and booleans; "
                    f"the only functions allowed are {', '.join(_CALLBACKS)}"
                )

    def __repr__(self) -> str:
        return f"Connection({self.servers!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientConfig) and (self.servers, self._options) == (other.servers, other._options)

    __hash__ = None  # type: ignore[assignment]

    def datasets(self, topics: Iterable[str]) -> list[str]:
        """Return the URIs of topics, with the first of the servers."""
        return [server_uri("kafka", self.servers.partition(",")[0], _PORT, topic) for topic in topics]

    def option(self, name: str) -> OptionValue | None:
        """Return an option as the user gave it."""
        return self._options.get(name)

    def config(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a client in this process; `ours` override the user's. Raises ConfigError for a missing
        secret.
        """
        found = {name: self._resolved(name, value) for name, value in self._options.items()}
        return {**self._defaults, **found, **ours}

    def admin_config(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's options for connecting; others are for readers or for writers."""
        kept = {name: value for name, value in self._options.items() if name.startswith(_GETTING_IN)}
        resolved = {name: self._resolved(name, value) for name, value in kept.items()}
        return {**self._defaults, **resolved, **ours}

    @property
    def _defaults(self) -> dict[str, Any]:
        return {
            "client.id": "midstream",
            "bootstrap.servers": self.servers,
            "logger": _client_log,
            "reconnect.backoff.ms": 20,  # half of it is between a client's first connection and the one that it keeps
        }

    def _resolved(self, name: str, value: OptionValue) -> OptionValue:
        return resolved_option(f"option {name!r}", value, self._who)


def resolved_option(what: str, value: OptionValue, who: str) -> OptionValue:
    """Resolve a value `env:NAME` or `file:/path` in this process; any other is returned. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    kind, colon, rest = value.partition(":")
    if not colon or kind not in ("env", "file"):
        return value
    if kind == "env":
        if rest not in os.environ:
            raise ConfigError(
                f"{who}: {what} refers to the environment variable {rest!r}, which is not set in "
                f"the process {os.getpid()} that connects; set it on the driver and wherever slots run"
            )
        return os.environ[rest]
    try:
        return Path(rest).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{who}: {what} refers to the file {rest!r}, which cannot be read where the job "
            f"connects ({type(error).__name__}); put it on the driver's machine and wherever slots run"
        ) from None


class BrokerSilence:
    """Receives errors of silent brokers (`error_cb`), and logs one message per silence.

    librdkafka calls it from inside calls made here, so there is only one thread.
    """

    def __init__(
        self, where: str, servers: str, now_s: Callable[[], float] = time.monotonic, *, what_for: str = ""
    ) -> None:
        """`what_for` follows "waiting for brokers …" in the job's status; if empty, the status does not show it."""
        self._what = f"brokers {servers} {what_for}" if what_for else ""
        self._wait = ExternalWait(now_s)
        self._where = where
        self._servers = servers
        self._now_s = now_s
        self._since_s: float | None = None
        self._answered_s = 0.0
        self.is_doubted = False
        """A connection has failed since a broker last answered.

        librdkafka reports that all brokers are down only if it finds all connections down at the same instant, so a
        reader or writer that waits also queries a broker, and concludes from a missing answer.
        """
        self._unanswered_s: float | None = None
        self._is_reported = False
        self.why = ""
        """The last report about a broker that does not answer."""
        self._refused = ""

    def on_error(self, error: KafkaError) -> None:
        """Process an error; the callback of librdkafka."""
        now_s = self._now_s()
        match error.code():
            case KafkaError._AUTHENTICATION:
                self._refused = error.str()
            case KafkaError._ALL_BROKERS_DOWN:
                if self._since_s is None or now_s - self._answered_s > _AGAIN_S:
                    self._begin(now_s)
                self._answered_s, self.is_doubted = now_s, True
            case _:  # of one broker: the others may do
                self.why, self.is_doubted = error.str(), True

    def _begin(self, since_s: float) -> None:
        self._since_s, self._is_reported = since_s, False
        self._wait.end()  # of another silence
        if self._what:
            self._wait.begin(self._what)

    def close(self) -> None:
        """End the wait; the client may still report errors while it closes."""
        self._what = ""
        self._wait.end()

    def polled(self, has_answered: bool) -> None:
        """Note whether a poll brought anything. Raises StorageError if the cluster refuses the user."""
        if self._refused:
            raise StorageError(f"{self._where}: {self._servers} refuses the user: {self._refused}")
        if not self.is_doubted:
            return
        now_s = self._now_s()
        if self._since_s is None and not has_answered:
            self._unanswered_s = now_s if self._unanswered_s is None else self._unanswered_s
            if now_s - self._unanswered_s >= _SILENCE_S:
                self._begin(self._unanswered_s)
        gone_s = 0.0 if self._since_s is None else now_s - self._since_s
        if has_answered:
            if self._is_reported:
                _log.warning("%s: %s answers again after %.0f s; continuing", self._where, self._servers, gone_s)
            self._since_s, self._is_reported = None, False
            self.is_doubted, self._unanswered_s = False, None
            self._wait.end()
        elif gone_s >= _SILENCE_S and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "%s: %s does not answer; waiting (%s)", self._where, self._servers, self.why or "all brokers are down"
            )


def send_all(producer: Producer, topic: str, records: Iterable[Record], wait: Callable[[], object]) -> None:
    """Pass records to a producer. While its queue is full, `wait` is called until there is room."""
    produce = producer.produce
    for value, key, partition, headers in records:
        while True:
            try:
                if headers is None:
                    produce(topic, value, key, partition)
                else:
                    produce(topic, value, key, partition, headers=headers)
                break
            except BufferError:
                wait()
    producer.poll(0)


def as_headers(headers: list[dict[str, Any]] | None) -> list[Any] | None:
    """Convert a row's headers to the form of `Record`."""
    return None if not headers else [(each["name"], each["value"]) for each in headers]


@contextmanager
def convert_errors(where: str) -> Iterator[None]:
    """Convert exceptions of Kafka's client: ConfigError for what a retry cannot fix, else StorageError."""
    gone = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
    try:
        yield
    except KafkaException as error:
        about = error.args[0]
        kind = ConfigError if is_for_the_user(about) or about.code() in gone else StorageError
        raise kind(f"{where}: {about.str()}{_hint(about)}") from error


def is_for_the_user(error: KafkaError) -> bool:
    """Whether a retry is useless. An unknown topic may only be unknown for a moment, while brokers start."""
    return error.code() in (
        KafkaError._INVALID_ARG,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.UNSUPPORTED_VERSION,
    )


def _hint(error: KafkaError) -> str:
    """Return what to do about an error whose own text does not name it."""
    match error.code():
        case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return "; the user needs Write and Describe on transactional ids that begin with midstream-"
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            return "; the user needs Read on the group (of exactly-once sinks: on groups that begin with midstream-)"
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return "; the user needs Write, and for exactly once also Read, on a topic that is written to; Read on one that is read"
        case KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return "; give a transaction.timeout.ms that is not above the brokers' transaction.max.timeout.ms"
        case KafkaError._UNSUPPORTED_FEATURE | KafkaError.UNSUPPORTED_VERSION:
            return "; exactly once needs brokers of Kafka 2.5 or later: use these with guarantee='at_least_once'"
        case _:  # the other errors describe themselves what is wrong
            return ""


@contextmanager
def convert_option_errors(where: str) -> Iterator[None]:
    """Convert errors from creating a client: an unknown option of librdkafka, or an invalid value."""
    try:
        yield
    except (KafkaException, TypeError, ValueError) as error:
        why = error.args[0].str() if isinstance(error, KafkaException) else error
        raise ConfigError(f"{where}: {why}; options are those of librdkafka's CONFIGURATION.md") from None


def topic_error(error: KafkaError, topic: str, where: str) -> ConfigError | StorageError:
    """Return the error that a cluster's answer about one topic means."""
    if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
        return ConfigError(f"{where}: there is no topic {topic!r}; create it first, or correct its name")
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return ConfigError(f"{where}: topic {topic!r} is not permitted: {error.str()}")
    if error.code() == KafkaError.TOPIC_EXCEPTION:
        return ConfigError(f"{where}: {topic!r} is not a valid topic name: {error.str()}")
    return StorageError(f"{where}: no answer about topic {topic!r}: {error.str()}")
