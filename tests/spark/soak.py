"""A supervised job on a standalone cluster of two workers, while something befalls it again and again.

Run in network and mount namespaces of its own (`unshare --net --mount`), with a directory, a number of faults and a seed.
Master and driver are at 10.77.0.1, the workers on two nodes (`nodes`); checkpoints and output are on a disk of their own.
After each fault the job has to complete checkpoints again, no process of it may be left, and memory and descriptors
stay below limits. At the end it is drained, and its output is exact. Prints a line for each fault, and JSON at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import psutil
import pyspark

from machine import limit_s
from nodes import DRIVER, Nodes, command
from waiting import alive, until

MASTER: Final = f"spark://{DRIVER}:7077"
BIN: Final = Path(sys.executable).parent
NODES: Final = 2
SLOTS: Final = 3
HEARTBEAT_S: Final = 6
SETTLED_S: Final = 180.0
DRIVER_BYTES_MAX: Final = 600 * 2**20
SLOT_BYTES_MAX: Final = 400 * 2**20
DESCRIPTORS_MAX: Final = 256

JOB: Final = f'''
import pyarrow as pa
from midstream import Environment, KeyedProcessFunction, Tuning, ValueState, fixed_restarts


class Visits(KeyedProcessFunction):
    seen = ValueState(pa.int64(), default=0)

    def process(self, row, ctx):
        self.seen.value += 1
        return {{"user": row["user"], "n": row["n"], "visits": self.seen.value}}


env = Environment(
    "soak", parallelism={SLOTS}, checkpoint_dir="disk/checkpoints", checkpoint_interval="1 s",
    tuning=Tuning(heartbeat_timeout="{HEARTBEAT_S} s"), restart=fixed_restarts(1000, "1 s"),
)
visits = env.generate(lambda i: {{"n": i, "user": i % 1000}}, splits=1, rows_per_s=1000)
visits.key_by("user").process(Visits(), {{"user": int, "n": int, "visits": int}}).write_jsonl("disk/out")

if __name__ == "__main__":
    env.execute(resume=True)
'''


class Soak:
    def __init__(self, stack: ExitStack, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.directory = directory
        self.seen: set[int] = set()
        """Processes of slots."""
        self._stack = stack
        self._nodes = Nodes(stack)
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_OPTS": "-Dspark.decommission.enabled=true",
            "PYSPARK_PYTHON": sys.executable,
            "MIDSTREAM_HOME": str(directory / "home"),
        }
        (directory / "job.py").write_text(JOB)
        self.disk = directory / "disk"
        self.disk.mkdir()
        command("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(self.disk))
        stack.callback(command, "umount", "--lazy", str(self.disk))
        self._popen("master", [str(BIN / "spark-class"), "org.apache.spark.deploy.master.Master", "--host", DRIVER])
        until("the master", lambda: "I have been elected leader" in self._log("master"), 60)
        self.workers = [self._worker(number) for number in range(NODES)]
        until("the workers", lambda: self._log("master").count("Registering worker") == NODES, 60)
        words = [str(BIN / "midstream"), "run", "job.py", "--master", MASTER, "--supervise"]
        self.supervisor = self._popen("job", words)

    def _popen(self, name: str, words: list[str], node: int | None = None) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.directory / f"{name}.log").open("ab"))
        named: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "env": {**self._environment, "SPARK_LOCAL_IP": DRIVER if node is None else address(node)},
            "cwd": self.directory,
            "start_new_session": True,
        }
        process = subprocess.Popen(words, **named) if node is None else self._nodes.on(node, words, **named)
        self._stack.callback(end, process)
        return process

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _worker(self, node: int) -> subprocess.Popen[bytes]:
        words = ["org.apache.spark.deploy.worker.Worker", "--host", address(node), "--cores", str(SLOTS)]
        words += ["--memory", "4g", "--work-dir", str(self.directory / f"work{node}"), MASTER]
        return self._popen(f"worker{node}", [str(BIN / "spark-class"), *words], node)

    # ---- what is seen of it

    def ask(self, *arguments: str) -> dict[str, Any]:
        """What a command says; nothing if the job is not there."""
        words = [str(BIN / "midstream"), *arguments, "--json"]
        done = subprocess.run(
            words, capture_output=True, text=True, env=self._environment, cwd=self.directory, check=False
        )
        try:
            said: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            return {}
        return {} if "error" in said else said

    def status(self) -> dict[str, Any]:
        status = self.ask("status", "soak")
        self.seen.update(status.get("slot_pids", ()))
        return status

    def settled(self) -> dict[str, Any]:
        """The job runs on all its slots and has completed three more checkpoints than before; nothing of it is left over."""
        first: list[tuple[str, int]] = []

        def runs() -> dict[str, Any]:
            status = self.status()
            if status.get("state") != "running" or status["slots"] != SLOTS or status["last_checkpoint"] is None:
                first.clear()
                return {}
            now = status["job_id"], status["last_checkpoint"]["id"]
            if not first or first[0][0] != now[0]:
                first[:] = [now]
            return status if now[1] >= first[0][1] + 3 else {}

        status: dict[str, Any] = until("three checkpoints", runs, SETTLED_S, found=lambda: self._log("job")[-3000:])
        mine = set(status["slot_pids"])
        until("the end of all other slots", lambda: not any(map(alive, self.seen - mine)), 60)
        self.seen = mine
        return status

    def check_sizes(self, status: dict[str, Any]) -> tuple[int, int, int]:
        """MiB of the driver, of the largest slot, and the most descriptors."""
        driver, slots = self.driver(), [psutil.Process(pid) for pid in status["slot_pids"]]
        own, most = driver.memory_full_info().pss, max(slot.memory_full_info().pss for slot in slots)
        descriptors = max(process.num_fds() for process in (driver, *slots))
        assert own < DRIVER_BYTES_MAX and most < SLOT_BYTES_MAX and descriptors < DESCRIPTORS_MAX, (
            own,
            most,
            descriptors,
        )
        return own // 2**20, most // 2**20, descriptors

    def driver(self) -> psutil.Process:
        (driver,) = [p for p in psutil.Process(self.supervisor.pid).children() if "--resume" in p.cmdline()]
        return driver

    def slot(self) -> int:
        return int(self.random.choice(self.status()["slot_pids"]))

    # ---- what befalls it

    def faults(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each kind in turn, in an order of the seed's."""
        kinds = {
            "a slot is killed": lambda: os.kill(self.slot(), signal.SIGKILL),
            "an executor is killed": lambda: executor_of(self.slot()).kill(),
            "a worker dies with all that is on it": self.worker_dies,
            "a worker is drained": self.worker_is_drained,
            "the driver is killed": lambda: self.driver().kill(),
            "the nodes are cut off from each other": self.cut,
            "a slot stands still": self.slot_stands_still,
            "the disk takes nothing": self.disk_takes_nothing,
        }
        while True:
            for name in self.random.sample(sorted(kinds), len(kinds)):
                yield name, kinds[name]

    def worker_dies(self) -> None:
        number = self.random.randrange(NODES)
        of = psutil.Process(self.workers[number].pid)
        for process in [of, *of.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.workers[number].wait()
        self.workers[number] = self._worker(number)

    def worker_is_drained(self) -> None:
        """Its slots move, without a restart, its executors end, and another worker comes."""
        pid = self.slot()
        executor = executor_of(pid)
        (number,) = [i for i, worker in enumerate(self.workers) if worker.pid in [p.pid for p in executor.parents()]]
        before = self.status()
        os.kill(self.workers[number].pid, signal.SIGPWR)
        until("the move", lambda: pid not in self.status().get("slot_pids", [pid]), SETTLED_S)
        executor.wait(limit_s(60))
        after = self.status()
        assert (after["job_id"], after["restarts"]) == (before["job_id"], before["restarts"]), after["failures"]
        end(self.workers[number])
        self.workers[number] = self._worker(number)

    def cut(self) -> None:
        self._nodes.cut(True)
        pause(self.random.choice((1.0, HEARTBEAT_S / 2, 2.0 * HEARTBEAT_S)))
        self._nodes.cut(False)

    def slot_stands_still(self) -> None:
        pid = self.slot()
        os.kill(pid, signal.SIGSTOP)
        pause(self.random.choice((1.0, HEARTBEAT_S / 2, 2.0 * HEARTBEAT_S)))
        with suppress(ProcessLookupError):  # it was given up, and killed
            os.kill(pid, signal.SIGCONT)

    def disk_takes_nothing(self) -> None:
        """As a file system that the kernel has mounted read-only; what is open for writing would forbid that."""
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(2**20))
        pause(self.random.choice((1.0, 5.0)))
        filler.unlink()

    # ---- the end

    def output(self) -> list[tuple[int, int]]:
        rows = []
        for file in (self.disk / "out").glob("*.jsonl"):
            rows += [(row["n"], row["visits"]) for row in map(json.loads, file.read_text().splitlines())]
        return sorted(rows)


def address(node: int) -> str:
    return f"10.77.0.{10 + node}"


def executor_of(slot: int) -> psutil.Process:
    return next(p for p in psutil.Process(slot).parents() if "--executor-id" in p.cmdline() and "java" in p.name())


def pause(seconds: float) -> None:
    """How long a fault lasts."""
    time.sleep(seconds)


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def main(directory: Path, faults: int, seed: int) -> dict[str, Any]:
    with ExitStack() as stack:
        soak = Soak(stack, directory, seed)
        sizes = [soak.check_sizes(soak.settled())]
        for (name, befall), number in zip(soak.faults(), range(faults), strict=False):
            began_s = time.monotonic()
            befall()
            sizes.append(soak.check_sizes(soak.settled()))
            print(f"{number + 1}: {name}; well again after {time.monotonic() - began_s:.0f} s; {sizes[-1]}", flush=True)
        assert soak.ask("stop", "soak", "--drain"), soak._log("job")[-3000:]
        soak.supervisor.wait(limit_s(120))
        output = soak.output()
        expected = [(n, n // 1000 + 1) for n in range(len(output))]
        return {
            "rows": len(output),
            "exact": output == expected,
            "status": soak.supervisor.returncode,
            "sizes": sizes,
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
