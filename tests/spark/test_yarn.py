"""A job on a cluster of YARN of our own, in client mode and in cluster mode: what is killed comes back, the output is exact.

About three minutes, with YARN's jars, which Maven brings once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pyspark
import pytest

import midstream
from waiting import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from yarn_cluster import YarnCluster, find_jars, running_below, running_yarn

from machine import limit_s

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

USERS: Final = 1000
WAIT_S: Final = 150.0
TOKEN: Final = "only-for-this-test"
SPARK: Final = Path(pyspark.__file__).parent
SOURCES: Final = Path(midstream.__file__).parents[1]

JOB: Final = f"""
import pyarrow as pa
from midstream import Environment, KeyedProcessFunction, ValueState

import beside


class Visits(KeyedProcessFunction):
    seen = ValueState(pa.int64(), default=0)

    def process(self, row, ctx):
        self.seen.value += 1
        return {{"user": row["user"], "n": beside.same(row["n"]), "visits": self.seen.value}}


env = Environment("visits", parallelism=3, checkpoint_dir="@HERE@/checkpoints", checkpoint_interval="1 s")
visits = env.generate(lambda i: {{"n": i, "user": i % {USERS}}}, splits=1, rows_per_s=1000)
visits.key_by("user").process(Visits(), {{"user": int, "n": int, "visits": int}}).write_jsonl("@HERE@/out")

if __name__ == "__main__":
    env.execute(resume=True)
"""


@pytest.fixture(scope="module")
def yarn() -> Iterator[YarnCluster]:
    jars = find_jars()
    if isinstance(jars, str):
        pytest.skip(jars)
    with running_yarn(jars, nodes=3, cores=3, memory_mb=4096) as cluster:
        yield cluster


class Place:
    """A directory with the job, Spark's settings for it, and what it writes."""

    def __init__(self, stack: ExitStack, yarn: YarnCluster, directory: Path) -> None:
        self.directory, self._stack = directory, stack
        (directory / "job.py").write_text(JOB.replace("@HERE@", str(directory)))
        (directory / "beside.py").write_text("def same(n):\n    return n\n")
        settings = {
            "spark.yarn.jars": f"local:{SPARK}/jars/*",
            "spark.yarn.stagingDir": directory / "staging",
            "spark.submit.deployMode": "cluster",  # for spark-submit: midstream run is its own driver
            "spark.authenticate": "true",
            "spark.network.crypto.enabled": "true",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.memoryOverhead": "600m",
            "spark.pyspark.python": sys.executable,
            "spark.executorEnv.PYTHONPATH": SOURCES,
            "spark.yarn.appMasterEnv.PYTHONPATH": SOURCES,
        }
        (directory / "conf").mkdir()
        text = "".join(f"{name} {value}\n" for name, value in settings.items())
        (directory / "conf" / "spark-defaults.conf").write_text(text)
        self.environment = {
            **os.environ,
            "HADOOP_CONF_DIR": str(yarn.settings),
            "SPARK_CONF_DIR": str(directory / "conf"),
            "SPARK_HOME": str(SPARK),
            "PYTHONPATH": str(SOURCES),
            "MIDSTREAM_HOME": str(directory / "home"),
            "MIDSTREAM_PAGE_TOKEN": TOKEN,
        }

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.directory / "log").open("wb"))
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=self.directory,
            start_new_session=True,
        )
        self._stack.callback(end, process)
        return process

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-3000:]

    def status(self, job: str) -> dict[str, Any]:
        """Nothing if the job is not there."""
        words = [sys.executable, "-m", "midstream", "status", job, "--json"]
        done = subprocess.run(
            words, capture_output=True, text=True, env=self.environment, timeout=limit_s(60), check=False
        )
        said: dict[str, Any] = json.loads(done.stdout)
        return {} if "error" in said else said

    def running(self, job: str, not_as: str = "") -> dict[str, Any]:
        """The status of a job that has completed a checkpoint since it was started, and is not that one."""

        def runs() -> dict[str, Any]:
            said = self.status(job)
            ready = said.get("state") == "running" and said["checkpoints_completed"] and said["job_id"] != not_as
            return said if ready else {}

        found: dict[str, Any] = until("the job to run", runs, WAIT_S, found=self.log)
        return found

    def stop(self, job: str) -> None:
        """At a checkpoint; all rows before it, and no others, are in the output."""
        words = [sys.executable, "-m", "midstream", "stop", job]
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr

    def check_output(self) -> None:
        lines = [line for file in (self.directory / "out").glob("*.jsonl") for line in file.read_text().splitlines()]
        rows = sorted(map(json.loads, lines), key=lambda row: row["n"])
        assert len(rows) > USERS
        assert rows == [{"user": n % USERS, "n": n, "visits": n // USERS + 1} for n in range(len(rows))]


@pytest.fixture
def place(yarn: YarnCluster, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, yarn, tmp_path)


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def below(yarn: YarnCluster, program: str, word: str) -> list[psutil.Process]:
    """Processes of that program in containers, with that word in their command lines."""
    found = []
    for pid in running_below(yarn.directory):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            if words and Path(words[0]).name.startswith(program) and any(word in each for each in words):
                found.append(process)
    return found


def test_in_client_mode_an_executor_is_killed_and_a_node_decommissioned(yarn: YarnCluster, place: Place) -> None:
    job = place.start(sys.executable, "-m", "midstream", "run", "job.py", "--master", "yarn", "--resume")
    place.running("visits")
    executors = below(yarn, "java", "CoarseGrainedExecutorBackend")
    assert len(executors) == 3
    executors[0].kill()
    until("the restart", lambda: place.status("visits").get("restarts") == 1, WAIT_S, found=place.log)
    status = place.running("visits")
    directories = {pid: psutil.Process(pid).environ()["PWD"] for pid in status["slot_pids"]}
    node = next(each for each in yarn.nodes if directories[status["slot_pids"][0]].startswith(f"{each.directory}/"))
    leaving = {pid for pid, directory in directories.items() if directory.startswith(f"{node.directory}/")}
    yarn.decommission(node)

    def moved() -> bool:
        return leaving.isdisjoint(place.status("visits").get("slot_pids", leaving))

    until("the move", moved, WAIT_S, found=place.log)
    status = place.running("visits")
    assert status["restarts"] == 1
    assert any("is being vacated: Spark ends its executor" in warning for warning in status["warnings"])
    place.stop("visits")
    assert job.wait(WAIT_S) == 0, place.log()
    place.check_output()


def test_in_cluster_mode_the_application_master_is_killed_and_then_the_driver(yarn: YarnCluster, place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = {
        "spark.yarn.maxAppAttempts": "10",
        "spark.yarn.appMasterEnv.MIDSTREAM_PAGE": f"0.0.0.0:{port}",
        "spark.yarn.appMasterEnv.MIDSTREAM_PAGE_TOKEN": TOKEN,
    }
    given = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    submit = [str(SPARK / "bin" / "spark-submit"), "--master", "yarn", "--deploy-mode", "cluster"]
    job = place.start(*submit, *given, "--py-files", "beside.py", "job.py")
    page = f"http://127.0.0.1:{port}/"
    first = place.running(page)["job_id"]
    (master,) = below(yarn, "java", "ApplicationMaster")
    master.kill()
    second = place.running(page, not_as=first)
    assert second["restored_from"]
    (driver,) = below(yarn, "python", "job.py")
    driver.kill()
    place.running(page, not_as=second["job_id"])
    place.stop(page)
    assert job.wait(WAIT_S) == 0, place.log()
    (application,) = (each for each in yarn.ask("apps")["apps"]["app"] if each["name"] == "job.py")
    assert (application["state"], application["finalStatus"]) == ("FINISHED", "SUCCEEDED")
    place.check_output()
