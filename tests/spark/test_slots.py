"""Slots as Spark jobs: a killed one leaves its siblings alone, all end with the job, too few cores are an error."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from machine import limit_s
from midstream.core.errors import ClusterError, ConfigError
from midstream.runtime.driver import Driver
from midstream.runtime.job import Job
from midstream.runtime.provider import SlotLaunch
from midstream.runtime.tls import JobKeys
from midstream.spark.session import active_session, check_java, check_master, get_session, is_local_master
from midstream.spark.slots import SparkSlots, explain
from scripted_coordinator import Scripted, plan
from waiting import alive, until, until_spark_is_idle

pytestmark = pytest.mark.spark


class World:
    def __init__(self, session: Any, slots: int, **config: Any) -> None:
        made: list[Scripted] = []

        def make(plan: Any, now_ms: int) -> Scripted:
            made.append(Scripted(plan, now_ms))
            return made[0]

        self.driver = Driver(plan(slots, **config), SparkSlots(session), make)
        self.driver.start()
        self.coordinator = made[0]

    @property
    def pids(self) -> dict[int, int]:
        return self.coordinator.slots


@pytest.fixture
def world(spark: Any) -> Iterator[World]:
    world = World(spark, 3, heartbeat_timeout_s=3.0)
    yield world
    world.driver.cancel("the test is over")
    assert world.driver.ended.wait(limit_s(20))


def test_a_slot_killed_outright_leaves_its_siblings_alive_and_is_replaced(world: World) -> None:
    until("three slots", lambda: len(world.pids) == 3, 60)
    before = dict(world.pids)
    os.kill(before[1], signal.SIGKILL)
    until("a fourth", lambda: 3 in world.pids)
    assert [lost.slot for lost in world.coordinator.lost] == [1]
    assert world.pids[0] == before[0] and world.pids[2] == before[2]
    assert alive(before[0]) and alive(before[2])
    status = Job(world.driver).stop()
    assert status is None
    assert not world.coordinator.failed


def test_a_slot_that_hangs_is_given_up_and_its_core_is_free_again(spark: Any) -> None:
    world = World(spark, 4, heartbeat_timeout_s=1.5)  # all cores: the successor needs that of the one that hangs
    until("four slots", lambda: len(world.pids) == 4, 60)
    pid = world.pids[2]
    os.kill(pid, signal.SIGSTOP)
    until("a fifth", lambda: 4 in world.pids, 30)
    until("the one that hangs is gone", lambda: not alive(pid))
    Job(world.driver).cancel("the test is over", 20)


def test_the_cores_are_free_for_others_when_the_job_has_ended(world: World, spark: Any) -> None:
    until("three slots", lambda: len(world.pids) == 3, 60)
    Job(world.driver).stop(timeout_s=limit_s(20))
    until_spark_is_idle(spark)
    assert spark.range(100, numPartitions=4).count() == 100


def test_more_slots_than_cores_are_refused_with_both_numbers_and_the_way_out(spark: Any) -> None:
    with pytest.raises(ClusterError, match=r"needs 5 slots .* has 4; lower the parallelism to 4.*'local\[5\]'"):
        World(spark, 5)


def test_a_slot_that_cannot_reach_its_driver_says_so_in_one_line(spark: Any) -> None:
    slots = SparkSlots(spark)
    reasons: list[str] = []
    launch = SlotLaunch("127.0.0.1", 1, JobKeys(bytes(32)), "job", "request")
    slots.request(launch, lambda reason, crash="", last_lines="": reasons.append(reason), lambda reason: None)
    (reason,) = until("the failure", lambda: reasons, 60)
    assert re.fullmatch(
        r"ClusterError: a slot on .* cannot reach its driver at 127.0.0.1:1: .* refused; check .*", reason
    )
    slots.close()


def test_a_session_that_is_there_is_taken(spark: Any) -> None:
    assert active_session() is not None
    assert get_session().sparkContext is spark.sparkContext
    assert get_session("local[4]").sparkContext is spark.sparkContext
    with pytest.raises(ConfigError, match=r"already has a Spark session on 'local\[4\]'"):
        get_session("local[2]")


def test_no_java_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        ClusterError, match=f"or later, and JAVA_HOME is {tmp_path}, which has no bin/java; install one"
    ):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="and there is no java on the PATH; install one"):
        check_java()
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(ClusterError, match="is Java 8; install one"):
        check_java()


def test_which_masters_are_local() -> None:
    assert all(map(is_local_master, ("local", "local[*]", "local[4]", "local[2,3]", "local-cluster[2,2,1024]")))
    with pytest.raises(ConfigError, match=r"master 'local\[0\]' is not a Spark master; use for example 'local\[4\]'"):
        get_session("local[0]")
    assert not any(map(is_local_master, ("yarn", "spark://local:7077", "k8s://https://local", "localhost")))


def test_a_master_that_nobody_listens_on_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]
        check_master(f"spark://127.0.0.1:1,127.0.0.1:{open_port}")
    for master in (f"spark://127.0.0.1:{open_port}", "spark://127.0.0.1"):
        with pytest.raises(ClusterError, match=f"no Spark master listens on '{master}' .*start it, or name another"):
            check_master(master)
    for master in ("yarn", "local[2]", "k8s://https://127.0.0.1:1"):
        check_master(master)


def test_why_a_slots_job_failed_is_what_python_said() -> None:
    text = (
        "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: "
        "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "ModuleNotFoundError: No module named 'midstream'\n\n\tat org.apache.spark.X.y(X.scala:1)\nDriver stacktrace:\n"
    )
    assert explain(RuntimeError(text)).startswith("ModuleNotFoundError: No module named 'midstream'; the executors'")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Starts `own_session.py` with these arguments; gives the process and those of its two slots."""
    script = Path(__file__).with_name("own_session.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent), "MIDSTREAM_HOME": str(tmp_path)}
    environment.pop("PYSPARK_PYTHON", None)
    processes = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), process.communicate(timeout=limit_s(60))
        pids = [int(word) for word in line.split()[1:]]
        assert len(pids) == 2 and all(map(alive, pids))
        return process, pids

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=limit_s(60))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("master", [pytest.param("local[2]", marks=pytest.mark.nightly), "local-cluster[2,2,1024]"])
def test_a_job_survives_the_loss_of_a_slot_and_ctrl_c_leaves_no_worker(
    master: str, program: Callable[..., tuple[subprocess.Popen[str], list[int]]], tmp_path: Path
) -> None:
    process, pids = program(master, str(tmp_path / "checkpoints"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=limit_s(60))
    assert "KeyboardInterrupt" in errors
    until("the end of the workers", lambda: not any(map(alive, pids)), 10)
    assert not list(tmp_path.glob("jobs/*"))
    assert "Exception in task" not in errors, errors


@pytest.mark.timeout(400)
def test_slots_on_executors_end_when_the_driver_is_killed(
    program: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    process, pids = program("local-cluster[2,1,1024]")
    process.kill()
    until("the end of the workers", lambda: not any(map(alive, pids)), 30)
