"""A Kafka broker of our own: one process in KRaft mode, in a directory of its own, on loopback."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import until

USER, PASSWORD = "etl", "a-secret-that-is-shown-nowhere"
TOOL = Path(__file__).parent.parent / "tools" / "kafka_jars.sh"
START_S = 90.0


def find_jars() -> Path | str:
    """The directory with the broker's jars, brought there if need be; or why there is none."""
    if shutil.which("java") is None:
        return "no java here to run a Kafka broker; Debian, Ubuntu: sudo apt install openjdk-17-jre-headless"
    done = subprocess.run([TOOL], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return f"no Kafka broker here: {done.stderr.strip()[-500:] or TOOL.name + ' failed'}"
    return Path(done.stdout.strip())


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _quiet(servers: str) -> dict[str, Any]:
    """What makes a client that says no word of every connection that is refused."""
    return {"bootstrap.servers": servers, "log_level": 0, "error_cb": lambda _: None}


class Broker:
    """`stop(crash=True)` is a kill -9; `start` brings it back with what it had, at the same address."""

    def __init__(self, jars: Path, directory: Path) -> None:
        port, secured, controller = _free_ports(3)
        self.servers = f"127.0.0.1:{port}"
        self.secured = f"127.0.0.1:{secured}"
        """For the user USER with PASSWORD, by SASL PLAIN; he has no rights but those of `Kafka.allow`."""
        self._classpath = f"{jars}/*"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        listeners = f"PLAINTEXT://{self.servers},SASL_PLAINTEXT://{self.secured}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": listeners,
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule"
            f' required user_{USER}="{PASSWORD}";',
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": ",".join(
                f"{name}:{name.replace('CONTROLLER', 'PLAINTEXT')}"
                for name in ("PLAINTEXT", "SASL_PLAINTEXT", "CONTROLLER")
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "log.dirs": directory / "data",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "true",  # so that tests see who makes topics by asking for them
            "log.retention.check.interval.ms": 1000,
            "log.segment.delete.delay.ms": 0,
        }
        self._properties = directory / "server.properties"
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
        cluster = base64.urlsafe_b64encode(b"midstream-tests.").rstrip(b"=").decode()  # a random one may begin with "-"
        format = self._java("kafka.tools.StorageTool", "format", "-t", cluster, "-c", self._properties)
        assert format.wait(START_S) == 0, self.log()
        self.start()

    def start(self) -> None:
        from confluent_kafka.admin import AdminClient

        self._process = self._java("kafka.Kafka", self._properties)
        admin = AdminClient(_quiet(self.servers))

        def answers() -> bool:
            assert self._process is not None and self._process.poll() is None, self.log()
            try:
                return bool(admin.list_topics(timeout=1).brokers)
            except Exception:  # noqa: BLE001
                return False

        until("the broker answers", answers, START_S)

    def stop(self, *, crash: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL if crash else signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)

    def log(self) -> str:
        return (self._directory / "log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def _java(self, program: str, *args: object) -> subprocess.Popen[bytes]:
        heap = ["-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        with (self._directory / "log").open("ab") as log:
            return subprocess.Popen(
                ["java", *heap, quiet, "-cp", self._classpath, program, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextmanager
def running_broker(jars: Path) -> Iterator[Broker]:
    directory = Path(tempfile.mkdtemp(prefix="midstream-kafka-"))
    try:
        broker = Broker(jars, directory)
        try:
            yield broker
        finally:
            broker.stop(crash=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Kafka:
    """What tests do to a broker beside the job; topics of a test have names of their own."""

    def __init__(self, servers: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.servers = servers
        self.admin = AdminClient(_quiet(servers))
        self._prefix = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def topic(self, name: str = "in", partitions: int = 1, **config: Any) -> str:
        from confluent_kafka.admin import NewTopic

        topic = f"{self._prefix}-{name}"
        config = {"retention_ms": -1, **config}  # records of tests have times of long ago
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=settings)
        self.admin.create_topics([new])[topic].result(30)
        until(f"{topic} is known", lambda: self._partitions(topic) == partitions)
        return topic

    def allow(self, name: str, *operations: str, kind: str = "topic") -> None:
        """To USER; `name` is that of a topic, or what those of another kind (group, transactional_id) begin with."""
        from confluent_kafka.admin import (
            AclBinding,
            AclOperation,
            AclPermissionType,
            ResourcePatternType,
            ResourceType,
        )

        bindings = [
            AclBinding(
                ResourceType[kind.upper()],
                name,
                ResourcePatternType.LITERAL if kind == "topic" else ResourcePatternType.PREFIXED,
                f"User:{USER}",
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
        for done in self.admin.create_acls(bindings).values():
            done.result(30)

    def grow(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import NewPartitions

        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(30)
        until(f"{topic} has {partitions} partitions", lambda: self._partitions(topic) == partitions)

    def _partitions(self, topic: str) -> int:
        found = self.admin.list_topics(topic, timeout=10).topics[topic].partitions.values()
        return sum(partition.leader >= 0 for partition in found)

    def forget(self, topic: str, before: int, partition: int = 0) -> None:
        """As retention does: records before this offset are gone."""
        from confluent_kafka import TopicPartition

        at = TopicPartition(topic, partition, before)
        self.admin.delete_records([at])[at].result(30)

    def produce(self, topic: str, values: Sequence[bytes | None], **more: Any) -> None:
        """`more`: what `Producer.produce` takes, or `config`."""
        from confluent_kafka import Producer

        config: Mapping[str, Any] = more.pop("config", {})
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 0, **config})
        self._send(producer, topic, values, more)
        assert producer.flush(30) == 0

    def transaction(self, topic: str, values: Sequence[bytes], *, commit: bool, **more: Any) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(30)
        producer.begin_transaction()
        self._send(producer, topic, values, more)
        assert producer.flush(30) == 0
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
        # It is answered before the partitions show it.
        until("the transaction is over", lambda: self._end(topic, stable=True) == self._end(topic, stable=False))

    def _end(self, topic: str, *, stable: bool) -> list[int]:
        """Of each partition: behind the last record, or (stable) what is before any open transaction."""
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
        places = [TopicPartition(topic, partition) for partition in range(self._partitions(topic))]
        asked = self.admin.list_offsets(dict.fromkeys(places, OffsetSpec.latest()), isolation_level=level)
        return [asked[place].result().offset for place in places]

    @staticmethod
    def _send(producer: Any, topic: str, values: Sequence[bytes | None], more: Mapping[str, Any]) -> None:
        failed: list[Any] = []
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, on_delivery=lambda error, _: error and failed.append(error), **more)
                    break
                except BufferError:
                    producer.poll(1)
        producer.flush(30)
        assert failed == []

    def read(self, topic: str) -> list[Any]:
        """All messages that a reader of committed ones finds now, partition after partition."""
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "tests",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        messages: list[Any] = []
        left = set(self.admin.list_topics(topic, timeout=10).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in left])

        def read_on() -> bool:
            while got := consumer.consume(10_000, 0):
                for message in got:
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    else:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        left.discard(message.partition())
            return not left

        try:
            until(f"the ends of {topic}", read_on)
        finally:
            consumer.close()
        return sorted(messages, key=lambda message: (message.partition(), message.offset()))
