"""Runs one Flink benchmark once and prints its figures as the last line of stdout, a JSON object.

    .venv/bin/python benchmarks/peers/flink/run.py WORKLOAD [--engine java|python] [--variant V] [--events N] ...

Everything it starts has ended when it ends. README.md has the workloads and variants.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from definitions import expected, halves, require, require_rate, sum_of_values

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[2] / ".peers" / "flink"
MAIN = "midstream.peers.Main"
SAMPLE_S = 0.2
STOP_S = 10.0
RELATIVE = {"udf": 1e-6, "q1": 1e-9, "q14": 1e-9}
"""How exact a result must be if it need not be right to the last bit; numpy's round() is not Python's."""
RELATIVE_OF_PANDAS = 1e-5
OPENED = "java.base/{}=ALL-UNNAMED"
PACKAGES = ("java.lang", "java.net", "java.io", "java.nio", "sun.nio.ch", "java.lang.reflect", "java.text",
            "java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic",
            "java.util.concurrent.locks")  # fmt: skip
"""Those that Flink's own config.yaml opens."""


def main() -> int:
    options = _parsed()
    if not (HOME / "benchmarks.jar").exists():
        print("error: Flink is not set up here; do that with:  tools/peers_flink.sh", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as an exception: children must end
    with tempfile.TemporaryDirectory(prefix="flink-bench-") as directory, _children() as children:
        try:
            if options.engine == "python":
                command, environment = _python_command(options, directory)
            else:
                command = [*_java(options.heap, directory), MAIN, *_arguments(options, directory)]
                environment = dict(os.environ)
            if options.variant == "parquet":
                environment |= _files(options)
            if options.workload == "kafka":
                figures = _kafka_figures(options, command, environment, children)
            elif options.workload == "latency_kafka":
                figures = _latency_kafka_figures(options, command, environment, children, directory)
            elif options.workload == "lakehouse":
                figures = _lakehouse_figures(options, command, environment, children, directory)
            else:
                figures = checked(_figures(command, environment, options.timeout, children))
        except (BenchmarkError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


class BenchmarkError(Exception):
    """The run has no figures: it failed, was wrong, or took too long."""


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One Flink benchmark, once.")
    parser.add_argument("workload")
    parser.add_argument("--engine", choices=["java", "python"])
    parser.add_argument("--variant", default="")
    parser.add_argument("--cluster", choices=["local", "tcp"], default="tcp")
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--parallelism", type=int, default=0)
    parser.add_argument("--heap", default="4g", help="of each JVM that works")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which everything is killed")
    options = parser.parse_args()
    if options.engine is None:
        options.engine = "python" if options.workload == "udf" else "java"
    if options.max_seconds is None:
        options.max_seconds = 30.0 if options.engine == "python" else 0.0
    return options


def _java(heap: str, directory: str) -> list[str]:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    if shutil.which(java) is None:
        raise BenchmarkError(f"{java} was not found: Flink needs Java 17")
    opened = [f"--add-opens={OPENED.format(package)}" for package in PACKAGES]
    return [java, f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseParallelGC", f"-Djava.io.tmpdir={directory}", *opened, f"-Dlog4j.configurationFile={HERE}/log4j.properties",
            "-Dlog4j2.disableJmx=true", "-cp", os.pathsep.join([str(HOME / "benchmarks.jar"), f"{_pyflink()}/lib/*", f"{HOME}/connector/*"])]  # fmt: skip


def _pyflink() -> str:
    found = glob.glob(str(HOME / "lib" / "python*" / "site-packages" / "pyflink"))
    if not found:
        raise BenchmarkError(f"there is no pyflink in {HOME}; set it up with:  tools/peers_flink.sh")
    return found[0]


def _arguments(options: argparse.Namespace, directory: str) -> list[str]:
    return [
        options.workload,
        *("--directory", directory),
        *("--cluster", options.cluster),
        *("--variant", options.variant),
        *("--events", str(options.events)),
        *("--max-seconds", str(options.max_seconds)),
        *("--parallelism", str(options.parallelism)),
    ]


def _python_command(options: argparse.Namespace, directory: str) -> tuple[list[str], dict[str, str]]:
    environment = dict(os.environ)
    environment["JVM_ARGS"] = f"-Xms{options.heap} -Xmx{options.heap} -XX:+UseParallelGC -Djava.io.tmpdir={directory}"
    environment["PEER_PYTHON"] = str(HOME / "bin" / "python")
    environment["HADOOP_CLASSPATH"] = str(HOME / "benchmarks.jar")  # the one way onto the class path of PyFlink's JVM
    environment["TMPDIR"] = directory  # what PyFlink leaves behind
    python = str(HOME / "bin" / "python")
    environment["PATH"] = f"{HOME / 'bin'}{os.pathsep}{environment['PATH']}"
    return [python, str(HERE / "pyflink_jobs.py"), *_arguments(options, directory)], environment


class _Children:
    """Processes that this one has started, each with a group of its own, and how much memory they took."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []
        self._peak_kb: dict[int, int] = {}
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.started.append(child)
        return child

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for pid in _sessions({child.pid for child in self.started}):
                self._peak_kb[pid] = max(self._peak_kb.get(pid, 0), _peak_kb(pid))

    def peak_bytes(self) -> int:
        return sum(self._peak_kb.values()) * 1024

    def end(self) -> None:
        """Also what they started: processes of their sessions."""
        self._over.set()
        sessions = {child.pid for child in self.started}
        for ask in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + STOP_S
            for pid in _sessions(sessions):
                _kill(pid, ask)
            while any(_sessions(sessions)) and time.monotonic() < deadline_s:
                for child in self.started:
                    child.poll()
                time.sleep(0.05)


@contextmanager
def _children() -> Iterator[_Children]:
    children = _Children()
    try:
        yield children
    finally:
        children.end()


def _sessions(sessions: set[int]) -> list[int]:
    """All processes of these sessions that are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != "Z" and int(fields[3]) in sessions:
            found.append(int(path.parent.name))
    return found


def _kill(pid: int, ask: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, ask)


def _peak_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _figures(
    command: Sequence[str], environment: dict[str, str], timeout_s: float, children: _Children
) -> dict[str, Any]:
    child = children.start(command, environment)
    try:
        printed, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"it had not ended after {timeout_s:g} s") from None
    lines = printed.splitlines()
    if child.returncode != 0 or not lines:
        raise BenchmarkError(f"{command[0]} ended with status {child.returncode}; what it said is above")
    print(*lines[:-1], sep="\n", end="\n" if lines[:-1] else "", file=sys.stderr)
    figures: dict[str, Any] = json.loads(lines[-1])
    figures["memory_mb"] = round(children.peak_bytes() / 1e6)
    return figures


WARM_UP_EVENTS = 1_000_000
"""Those of NexmarkJobs."""


def _files(options: argparse.Namespace) -> dict[str, str]:
    """The environment in which NexmarkJobs finds the events in files, and the columns of a query."""
    from midstream_lab.bench.nexmark.files import written
    from midstream_lab.bench.nexmark.generator import Events
    from midstream_lab.bench.nexmark.queries import QUERIES
    from midstream_lab.bench.nexmark.running import EVENTS

    counts = (options.events or EVENTS, min(options.events or EVENTS, WARM_UP_EVENTS))
    columns = Events(50, lanes=1, columns=QUERIES[options.workload].reads).schema.names
    return {f"NEXMARK_FILES_{count}": str(written(count)) for count in counts} | {"NEXMARK_COLUMNS": ",".join(columns)}


def _servers(environment: dict[str, str]) -> str:
    servers = environment.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise BenchmarkError("it needs brokers: tools/kafka_server.py starts one, or KAFKA_BOOTSTRAP=host:9092")
    return servers


def _kafka_figures(
    options: argparse.Namespace, command: Sequence[str], environment: dict[str, str], children: _Children
) -> dict[str, Any]:
    """With the topics and the records that midstream's own benchmark has; what has come out is read back and checked."""
    from midstream.engine.core.errors import InvariantError
    from midstream_lab.bench import kafka

    servers = _servers(environment)
    names = ("KAFKA_WARM_IN", "KAFKA_WARM_OUT", "KAFKA_IN", "KAFKA_OUT")
    with kafka.topics(servers, "warm-in", "warm-out", "in", "out") as topics:
        workload = kafka.fill(servers, topics[2], options.events or kafka.EVENTS)
        kafka.fill(servers, topics[0], kafka.WARM_UP_EVENTS)
        command = [*command, "--events", str(workload.count)]
        figures = _figures(command, environment | dict(zip(names, topics, strict=True)), options.timeout, children)
        try:
            return figures | {"result_rows": kafka.check(servers, topics[3], workload), "correct": True}
        except InvariantError as error:
            raise BenchmarkError(str(error)) from error


def _latency_kafka_figures(
    options: argparse.Namespace,
    command: Sequence[str],
    environment: dict[str, str],
    children: _Children,
    directory: str,
) -> dict[str, Any]:
    """With the topics, the records and the measurement of midstream's own benchmark; a job for each guarantee."""
    from midstream.engine.core.errors import InvariantError
    from midstream_lab.bench import kafka, latency_kafka

    servers = _servers(environment)
    found: dict[str, Any] = {}
    for guarantee, every_ms in latency_kafka.INTERVALS_MS.items():
        running, stop = Path(directory, "running"), Path(directory, "stop")
        with kafka.topics(servers, "in", "out", partitions=latency_kafka.PARTITIONS) as (source, sink):
            given = environment | {
                "KAFKA_IN": source,
                "KAFKA_OUT": sink,
                "GUARANTEE": guarantee,
                "CHECKPOINT_MS": str(every_ms),
            }
            child = children.start(command, given)
            _await_running(child, running, options.timeout)
            try:
                rate = latency_kafka.RATE_PER_S
                found[guarantee] = latency_kafka.figures(
                    latency_kafka.latencies_at_rate(servers, source, sink, options.variant, rate)
                )
            except InvariantError as error:
                raise BenchmarkError(str(error)) from error
            stop.touch()
            child.communicate(timeout=options.timeout)
        running.unlink()
        stop.unlink()
    memory_mb = round(children.peak_bytes() / 1e6)
    return {"workload": options.workload, "variant": options.variant, **found, "memory_mb": memory_mb, "correct": True}


def _await_running(child: subprocess.Popen[str], running: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not running.exists():
        if child.poll() is not None or time.monotonic() > deadline_s:
            raise BenchmarkError("the job whose delays are measured has not started; what it said is above")
        time.sleep(0.05)


def _lakehouse_figures(
    options: argparse.Namespace,
    command: Sequence[str],
    environment: dict[str, str],
    children: _Children,
    directory: str,
) -> dict[str, Any]:
    """With the topics, the records and the checks of midstream's own benchmark; delays are those of a second job."""
    from midstream.engine.core.errors import InvariantError
    from midstream_lab.bench import kafka, lakehouse

    servers = _servers(environment)
    tables = {name: f"{directory}/{name}" for name in ("warm", "run", "delay")}
    where = {name: f"file://{lakehouse.table_in(table)}" for name, table in tables.items()}
    with kafka.topics(servers, "warm-in", "in", "delay-in") as (warm_in, source, delay_in):
        events = options.events or lakehouse.EVENTS
        kafka.fill(servers, source, events)
        kafka.fill(servers, warm_in, kafka.WARM_UP_EVENTS)
        given = environment | {
            "KAFKA_WARM_IN": warm_in,
            "KAFKA_IN": source,
            "TABLE_WARM": where["warm"],
            "TABLE": where["run"],
            "CHECKPOINT_MS": str(round(lakehouse.CHECKPOINT_INTERVAL_S * 1000)),
        }
        figures = _figures([*command, "--events", str(events)], given, options.timeout, children)
        given |= {
            "KAFKA_IN": delay_in,
            "TABLE": where["delay"],
            "CHECKPOINT_MS": str(round(lakehouse.DELAY_INTERVAL_S * 1000)),
        }
        try:
            rows = lakehouse.check("iceberg", tables["run"], events)
            running, stop = Path(directory, "running"), Path(directory, "stop")
            child = children.start([*command, "--variant", "delay"], given)
            _await_running(child, running, options.timeout)
            rate = lakehouse.RATE_PER_S
            delays = lakehouse.delays_at_rate("iceberg", servers, delay_in, tables["delay"], rate)
            stop.touch()
            child.communicate(timeout=options.timeout)
        except InvariantError as error:
            raise BenchmarkError(str(error)) from error
    return figures | {"result_rows": rows, "rate_per_s": rate, **delays, "correct": True}


def checked(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures without the job's result, which must be right. Raises ValueError."""
    from midstream_lab.bench import operators

    workload = figures["workload"]
    if workload in ("checkpoint", "recovery"):  # without an end, and so without a result
        return figures | {"correct": True}
    events, found = figures["events"], figures.pop("result")
    if workload in ("window", "window_keys", "udf", "keyed_process", "strings", "sliding"):
        ranges = halves(events)
        if "read" in figures:  # of each half so many from its beginning
            read = [int(count) for count in figures.pop("read")]
            ranges = [(first, first + count) for (first, _), count in zip(ranges, read, strict=True)]
            rate = round(sum(read) / figures["seconds"], 1)
            figures |= {"events": sum(read), "events_per_s": rate, "bounded": sum(read) < events}
        if workload == "keyed_process":  # how many rows there are depends on the order in which events come
            wanted = {"rows": found[0], "total": sum_of_values(ranges)}
        else:
            wanted = expected(workload, ranges)
    elif workload in ("exchange", "latency"):
        wanted = {"rows": events}
        if workload == "latency":
            require_rate(events, figures["seconds"])
    elif workload in operators.CASES:
        wanted = operators.expected(workload, events)
    else:
        from midstream_lab.bench.nexmark.expected import EXPECTED
        from midstream_lab.bench.nexmark.queries import QUERIES

        wanted = dict(zip(("rows", *QUERIES[workload].checked), EXPECTED[workload](events), strict=True))
    relative = RELATIVE_OF_PANDAS if figures["variant"] == "table_pandas" else RELATIVE.get(workload, 0.0)
    require(wanted, dict(zip(wanted, found, strict=True)), relative=relative)
    return figures | {"result_rows": int(found[0]), "correct": True}


if __name__ == "__main__":
    sys.exit(main())
