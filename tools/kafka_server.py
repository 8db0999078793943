"""Kafka brokers of our own, each a process in KRaft mode, on loopback, with their data in a temporary directory.

    python tools/kafka_server.py COMMAND…        runs COMMAND with KAFKA_BOOTSTRAP, the address of a new broker
    python tools/kafka_server.py --brokers 3 …   of a cluster of three

The brokers end with the command, whose exit status is that of the program, and leave nothing behind. Where
KAFKA_BOOTSTRAP is set, that cluster is used. `tools/kafka_jars.sh` brings the brokers' jars.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

USER, PASSWORD = "etl", "a-secret-that-is-shown-nowhere"
JARS = Path(__file__).with_name("kafka_jars.sh")
START_S = 90.0
_LOOK_S = 0.05


def find_jars() -> Path | str:
    """The directory with the broker's jars, brought there if need be; or why there is none."""
    if shutil.which("java") is None:
        return "no java here to run a Kafka broker; Debian, Ubuntu: sudo apt install openjdk-17-jre-headless"
    done = subprocess.run([JARS], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return f"no Kafka broker here: {done.stderr.strip()[-500:] or JARS.name + ' failed'}"
    return Path(done.stdout.strip())


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def quiet(servers: str) -> dict[str, Any]:
    """What makes a client that says no word of every connection that is refused."""
    return {"bootstrap.servers": servers, "log_level": 0, "error_cb": lambda _: None}


class Broker:
    """One of a cluster. `stop(crash=True)` is a kill -9; `start` brings it back with what it had, at the same address."""

    def __init__(self, jars: Path, directory: Path, number: int, voters: dict[int, int]) -> None:
        """`voters`: the controllers' ports by the number of their broker. Every broker is a controller too."""
        port, secured = free_ports(2)
        directory.mkdir()
        self.number = number
        self.servers = f"127.0.0.1:{port}"
        self.secured = f"127.0.0.1:{secured}"
        """For the user USER with PASSWORD, by SASL PLAIN; he has no rights but those that are given to him."""
        self._classpath = f"{jars}/*"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        listeners = f"PLAINTEXT://{self.servers},SASL_PLAINTEXT://{self.secured}"
        copies = len(voters)
        in_sync_min = 1 if copies == 1 else copies - 1
        settings = {
            "process.roles": "broker,controller",
            "node.id": number,
            "controller.quorum.voters": ",".join(f"{voter}@127.0.0.1:{at}" for voter, at in voters.items()),
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{voters[number]}",
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
            "default.replication.factor": copies,
            "min.insync.replicas": in_sync_min,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync_min,
            "transaction.state.log.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "true",  # so that tests see who makes topics by asking for them
            "log.retention.check.interval.ms": 1000,
            "log.segment.delete.delay.ms": 0,
            "log.cleaner.backoff.ms": 100,  # by default 15 s, for which a test would wait until a topic is compacted
            "broker.session.timeout.ms": 3000,  # by default 9 s, in which a broker that was killed leads its partitions
            "broker.heartbeat.interval.ms": 500,
        }
        self._properties = directory / "server.properties"
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")

    def format(self) -> None:
        """Begin to prepare its directory; `launch` waits for that."""
        cluster = base64.urlsafe_b64encode(b"midstream-tests.").rstrip(b"=").decode()  # a random one may begin with "-"
        self._process = self._java("kafka.tools.StorageTool", "format", "-t", cluster, "-c", self._properties)

    def launch(self) -> None:
        if self._process is not None:
            assert self._process.wait(START_S) == 0, self.log()
        self._process = self._java("kafka.Kafka", self._properties)

    def start(self) -> None:
        self.launch()
        self.wait()

    def wait(self) -> None:
        """Until it answers."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient(quiet(self.servers))
        deadline_s = time.monotonic() + START_S
        while True:
            assert self._process is not None and self._process.poll() is None, self.log()
            try:
                if admin.list_topics(timeout=1).brokers:
                    return
            except KafkaException:  # not yet
                assert time.monotonic() < deadline_s, f"no answer within {START_S} s: {self.log()}"
                time.sleep(_LOOK_S)

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and has not been stopped or ended since."""
        return self._process is not None and self._process.poll() is None

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
def running_brokers(jars: Path, count: int = 1) -> Iterator[list[Broker]]:
    """One, or three of which any two do without the third: what they hold is on all of them."""
    assert count in (1, 3), count
    directory = Path(tempfile.mkdtemp(prefix="midstream-kafka-"))
    brokers: list[Broker] = []
    try:
        voters = dict(enumerate(free_ports(count), 1))
        for number in voters:
            brokers.append(Broker(jars, directory / str(number), number, voters))
            brokers[-1].format()
        for broker in brokers:
            broker.launch()
        for broker in brokers:
            broker.wait()
        yield brokers
    finally:
        for broker in brokers:
            broker.stop(crash=True)
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--brokers", type=int, default=1, choices=(1, 3))
    arguments.add_argument("command", nargs=argparse.REMAINDER)
    options = arguments.parse_args()
    if not options.command:
        arguments.error("which command?")
    if "KAFKA_BOOTSTRAP" in os.environ:
        return subprocess.run(options.command, check=False).returncode
    jars = find_jars()
    if isinstance(jars, str):
        print(jars, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with running_brokers(jars, options.brokers) as brokers:
        servers = ",".join(broker.servers for broker in brokers)
        command = subprocess.Popen(options.command, env={**os.environ, "KAFKA_BOOTSTRAP": servers})
        try:
            return command.wait()
        except KeyboardInterrupt:  # the command has been told too
            return command.wait(60)
        finally:
            if command.poll() is None:
                command.terminate()
                try:
                    command.wait(60)
                except subprocess.TimeoutExpired:
                    command.kill()
                    command.wait()


if __name__ == "__main__":
    sys.exit(main())
