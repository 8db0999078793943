"""A job from Kafka to Kafka whose slots, driver and broker are killed at random moments: every row is there once, in order.

KAFKA_RECORDS and KAFKA_RUNS make more of it: `make nightly` runs it 20 times with 500,000 records.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from kafka_job import WHO, assert_counted_once

from kafka_broker import Broker
from machine import limit_s
from waiting import until

RECORDS = int(os.environ.get("KAFKA_RECORDS", "20000"))
RUNS = int(os.environ.get("KAFKA_RUNS", "1"))
PARTITIONS = 3
READ_S = 8.0 if RUNS == 1 else 30.0
"""What all records take at least."""
DISTURBANCES = (
    ["slot", "driver", "rescale"] if RUNS == 1 else ["slot", "slot", "driver", "broker", "broker", "rescale", "stop"]
)
"""In another order each time."""
LIMIT_S = 400.0
pytestmark = [
    pytest.mark.systems,
    pytest.mark.skipif(
        "KAFKA_BOOTSTRAP" in os.environ, reason="KAFKA_BOOTSTRAP names a broker that tests may not stop"
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


class Driver:
    """The job's driver, started again from its latest checkpoint until the job has finished."""

    def __init__(self, servers: str, source: str, sink: str, directory: Path) -> None:
        self.servers, self.source, self.sink, self.directory = servers, source, sink, directory
        self.parallelism = 3
        self.starts = 0
        self._log = (directory / "log").open("ab")
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self._before = self.log().count("started\n")
        checkpoints = self.directory / "checkpoints"
        restore = "latest" if any(checkpoints.glob("chk-*/_metadata")) else ""
        begun = checkpoints.exists() and not restore
        arguments = [
            self.servers,
            self.source,
            self.sink,
            checkpoints,
            self.parallelism,
            RECORDS / READ_S,
            restore,
        ]
        if begun:
            arguments[-1] = "latest"  # nothing was completed: from the beginning
        return subprocess.Popen(
            [sys.executable, Path(__file__).with_name("kafka_job.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )

    def is_started(self) -> bool:
        return self.process.poll() is None and self.log().count("started\n") - self._before >= 1

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has just ended
            self.process.stdin.write(f"{command}\n".encode())
            self.process.stdin.flush()

    def slots(self) -> list[int]:
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(limit_s(30))

    def has_finished(self) -> bool:
        """Starts it again if it has ended before that."""
        if self.process.poll() is None:
            return False
        if self.process.returncode == 0 and self.log().rstrip().endswith("finished"):
            return True
        self.process = self._started()
        return False

    def log(self) -> str:
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        for pid in self.slots():
            _kill(pid)
        self.kill()
        self._log.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def disturb(driver: Driver, broker: Broker, rng: random.Random, what: str) -> None:
    match what:
        case "slot":
            for pid in driver.slots()[:1]:
                _kill(pid)
        case "driver":
            driver.kill()
        case "broker":
            broker.stop(crash=True)
            time.sleep(rng.uniform(0, 3))  # so long it is gone
            broker.start()
        case "rescale":
            driver.parallelism = rng.choice([1, 2, 3, 4])
            driver.tell(f"rescale {driver.parallelism}")
        case "stop":
            driver.tell("stop")


@pytest.mark.parametrize("run", range(RUNS))
def test_every_record_is_there_once_and_in_order_whatever_is_killed(kafka, kafka_broker: Broker, tmp_path, run):
    rng = random.Random(run)
    source, sink = kafka.topic("in", partitions=PARTITIONS), kafka.topic("out", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        records = [json.dumps({"n": n, "who": n % WHO}).encode() for n in range(partition, RECORDS, PARTITIONS)]
        kafka.produce(source, records, partition=partition)
    driver = Driver(kafka_broker.servers, source, sink, tmp_path)
    left = rng.sample(DISTURBANCES, len(DISTURBANCES))
    began_s = time.monotonic()
    next_s = None
    try:
        while not driver.has_finished():
            assert time.monotonic() - began_s < LIMIT_S, f"not within {LIMIT_S} s, {left} left:\n{driver.log()[-5000:]}"
            if next_s is None and driver.is_started():
                next_s = time.monotonic() + rng.uniform(0, READ_S / len(DISTURBANCES))
            if left and next_s is not None and time.monotonic() > next_s:
                disturb(driver, kafka_broker, rng, left.pop(0))
                next_s = None
            time.sleep(0.05)
    finally:
        driver.close()
    print(f"run {run}: {driver.starts} starts, all but {left}, {time.monotonic() - began_s:.0f} s")
    assert len(left) < len(DISTURBANCES)
    assert_counted_once(kafka.read(sink), RECORDS)
    until("nothing staged is left", lambda: not list((tmp_path / "checkpoints/sinks").glob("*/*.arrow")), 1)
