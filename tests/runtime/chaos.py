"""Runs random programs on real processes while these are killed, frozen, rescaled and stopped; the output has to be exact.

    python chaos.py DIRECTORY FIRST_SEED SECONDS [MASTER]

MASTER: of Spark, whose executors are killed and frozen too; by default, slots are processes of their own.

The simulator runs the protocols with a scheduler of its own; here are the operating system's, and all that lies around the
protocols: connections, shared memory, files, threads, the registry. What happens is drawn from the seed, when it happens
is not. A failing run leaves its directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import polars as pl
import psutil

from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol import messages as m
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job_registry import JobEntry, list_jobs

PROGRAM: Final = Path(__file__).with_name("random_program.py")
COLUMNS: Final = ("key", "id", "at", "x")
RUN_S_MAX: Final = 300.0
PAUSES_S: Final = (0.05, 0.3, 0.7, 1.0, 2.0)
FREEZES_S: Final = (0.2, 1.0, 3.0, 7.0)
"""The last is longer than the heartbeat timeout."""
FAULTS: Final[tuple[str, ...]] = (
    *("kill a slot", "kill a slot", "kill a slot", "kill all slots", "kill the driver", "kill the driver"),
    *("freeze a slot", "freeze the driver", "rescale", "rescale", "stop", "checkpoint", "savepoint"),
)
FAULTS_OF_SPARK: Final = ("kill an executor", "kill an executor", "freeze an executor")
PROCESSES: Final = "processes"


class Run:
    """One program: its output undisturbed, then while faults happen to it."""

    def __init__(self, directory: Path, seed: int, master: str = PROCESSES) -> None:
        self.directory = directory
        self.seed = seed
        self._master = master
        self._faults, self._run_s_max = FAULTS, RUN_S_MAX
        if master != PROCESSES:  # Spark takes its time to start again and again
            self._faults, self._run_s_max = FAULTS + FAULTS_OF_SPARK, 3 * RUN_S_MAX
        self.random = Random(f"faults {seed}")
        self.said: list[str] = []
        self._home = str(directory / "home")
        self._frozen: list[tuple[psutil.Process, float]] = []

    def go(self) -> str:
        """What is wrong with the run, or ""."""
        alone = self.directory / "undisturbed"
        alone.mkdir(parents=True)
        job = self._begin(alone, PROCESSES, "undisturbed")
        if job.wait(RUN_S_MAX) or self._log(alone)[-1] != "finished":
            return f"undisturbed: {self._log(alone)[-1]}"
        self.said.append(self._log(alone)[0])
        why = self._disturbed()
        return why or compared(rows_of(alone / "out"), rows_of(self.directory / "out"))

    def _begin(self, directory: Path, *words: str) -> subprocess.Popen[bytes]:
        parallelism = self.random.randint(1, 4)
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM), str(self.seed), str(directory), str(parallelism), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "MIDSTREAM_HOME": self._home, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def _log(self, directory: Path) -> list[str]:
        return (directory / "log").read_text(errors="replace").splitlines()

    def _disturbed(self) -> str:
        began_s = time.monotonic()
        left, due_s = self.random.randint(2, 10), began_s + 2
        job = self._begin(self.directory, self._master)
        try:
            while True:
                now_s = time.monotonic()
                if job.poll() is not None:
                    if self._log(self.directory)[-1] == "finished":
                        return ""
                    if job.returncode not in (0, -signal.SIGKILL):
                        return f"the job ended with status {job.returncode}: {self._log(self.directory)[-1]}"
                    job = self._begin(self.directory, self._master)
                if now_s > began_s + self._run_s_max:
                    return f"the job has not ended within {self._run_s_max:.0f} s"
                self._thaw(now_s)
                if left and now_s >= due_s and (entries := self._entries()):
                    left, due_s = left - 1, now_s + self.random.choice(PAUSES_S)
                    self._strike(self.random.choice(self._faults), job, entries[0], now_s - began_s)
                with suppress(subprocess.TimeoutExpired):
                    job.wait(0.02)
        finally:
            self._thaw(float("inf"))
            if job.poll() is None:
                job.kill()
                job.wait()

    def _entries(self) -> list[JobEntry]:
        os.environ["MIDSTREAM_HOME"] = self._home
        return list_jobs()

    def _thaw(self, now_s: float) -> None:
        for frozen in [each for each in self._frozen if each[1] <= now_s]:
            self._frozen.remove(frozen)
            with suppress(psutil.NoSuchProcess):
                frozen[0].resume()

    def _strike(self, fault: str, job: subprocess.Popen[bytes], entry: JobEntry, at_s: float) -> None:
        self.said.append(f"{at_s:.1f} s: {fault}")
        with suppress(
            psutil.NoSuchProcess, ClusterError
        ):  # a job that is just ending, or stands still, does not answer
            match fault:
                case "kill the driver":
                    job.kill()
                    job.wait()
                case "freeze the driver":
                    self._freeze(job.pid)
                case "kill all slots":
                    for pid in self._slots(entry):
                        psutil.Process(pid).kill()
                case "kill a slot":
                    psutil.Process(self.random.choice(self._slots(entry))).kill()
                case "freeze a slot":
                    self._freeze(self.random.choice(self._slots(entry)))
                case "kill an executor":
                    psutil.Process(self._executor(entry)).kill()
                case "freeze an executor":
                    self._freeze(self._executor(entry))
                case _:
                    requests: dict[str, Callable[[], m.ClientRequest]] = {
                        "rescale": lambda: m.DoRescale(self.random.randint(1, 4)),
                        "stop": m.DoStop,
                        "checkpoint": m.DoCheckpoint,
                        "savepoint": m.DoSavepoint,
                    }
                    self._ask(entry, requests[fault](), 30.0 if fault == "stop" else self.random.choice((0.1, 5.0)))

    def _freeze(self, pid: int) -> None:
        process = psutil.Process(pid)
        process.suspend()
        self._frozen.append((process, time.monotonic() + self.random.choice(FREEZES_S)))

    def _slots(self, entry: JobEntry) -> list[int]:
        status = self._ask(entry, m.GetStatus(), 5.0).status
        pids = [] if status is None else [pid for pid in status.slot_pids if pid]
        if not pids:
            raise ClusterError("there are no slots")
        return pids

    def _executor(self, entry: JobEntry) -> int:
        """The process of Spark in which one of the slots runs."""
        slot = psutil.Process(self.random.choice(self._slots(entry)))
        return next(each.pid for each in slot.parents() if each.name() == "java")

    def _ask(self, entry: JobEntry, request: m.ClientRequest, timeout_s: float) -> m.Reply:
        client = Client(entry)
        try:
            return client.request(request, timeout_s)
        finally:
            client.close()


def rows_of(out: Path) -> pl.DataFrame:
    """The rows in the files of a sink, each with the number of times that it is there."""
    empty = pl.DataFrame(schema={"key": pl.String, "id": pl.Int64, "at": pl.String, "x": pl.Int64})
    parquet = [pl.read_parquet(path).cast({"at": pl.String}) for path in out.glob("*.parquet")]
    lines = [pl.read_ndjson(path) for path in out.glob("*.jsonl")]
    frames = [frame.select(COLUMNS) for frame in (*parquet, *lines) if frame.height]
    return pl.concat([empty, *frames]).group_by(COLUMNS).len().sort(COLUMNS)


def compared(expected: pl.DataFrame, found: pl.DataFrame) -> str:
    if found.equals(expected):
        return ""
    by = (*COLUMNS, "len")
    lost, more = expected.join(found, on=by, how="anti"), found.join(expected, on=by, how="anti")
    return f"the output differs: expected {lost.head(3).rows()} ({lost.height} such rows), found {more.head(3).rows()} ({more.height})"


def main(directory: Path, seed: int, seconds: float, master: str = PROCESSES) -> int:
    end_s, failed = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        run = Run(directory / str(seed), seed, master)
        began_s = time.monotonic()
        why = run.go()
        print(
            f"{'FAILED: ' + why if why else 'exact'}, {time.monotonic() - began_s:.0f} s; {'; '.join(run.said)}",
            flush=True,
        )
        if why:
            failed += 1
        else:
            shutil.rmtree(run.directory)
        seed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]) > 0)
