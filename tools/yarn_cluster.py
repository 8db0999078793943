"""A cluster of YARN of our own: a resource manager and node managers as plain processes on loopback, with their data in a
temporary directory.

    python tools/yarn_cluster.py COMMAND…        runs COMMAND with HADOOP_CONF_DIR, the configuration of a new cluster
    python tools/yarn_cluster.py --nodes 3 …     of three nodes; --cores 4 --memory 4096: what each of them has

Everything that was started ends with the command, whose exit status is that of the program, and leaves nothing behind.
The jars are those of tools/yarn/pom.xml; Maven brings them once (89 MB) to a directory below $XDG_CACHE_HOME.

Containers run under the user of the node manager, on its cores, of which it may use more than it has, and in its memory, of which it may not. The file
system is the machine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

POM = Path(__file__).with_name("yarn") / "pom.xml"
START_S = 120.0
MAVEN_S = 600.0
END_S = 10.0
CORES, MEMORY_MB = 4, 6144
"""Of each node."""
_LOOK_S = 0.1
_LOGGING = """
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{HH:mm:ss,SSS} %p %c{1}: %m%n
"""


def find_jars() -> Path | str:
    """The directory with the jars of YARN's servers, brought there if need be; or why there is none."""
    if shutil.which("java") is None:
        return "no java here to run YARN; Debian, Ubuntu: sudo apt install openjdk-17-jre-headless"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midstream"
    home = caches / f"yarn-{zlib.crc32(POM.read_bytes())}"
    if home.is_dir():
        return home
    if shutil.which("mvn") is None:
        return "no mvn here to bring YARN's jars; Debian, Ubuntu: sudo apt install maven"
    caches.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{home.name}.", dir=caches) as new:
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={new}/jars"]
        command = ["mvn", "--quiet", "--batch-mode", "--file", str(POM), *goal]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAVEN_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no YARN here: mvn has not brought its jars within {MAVEN_S:.0f} s"
        if done.returncode:
            return f"no YARN here: {(done.stdout + done.stderr).strip()[-500:] or 'mvn failed'}"
        try:
            (Path(new) / "jars").rename(home)
        except OSError:
            if not home.is_dir():  # else somebody else was first
                raise
    return home


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _write_settings(path: Path, settings: dict[str, Any]) -> None:
    properties = "".join(
        f"  <property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f'<?xml version="1.0"?>\n<configuration>\n{properties}</configuration>\n', encoding="utf-8")


class Node:
    """A node manager. `kill` is a kill -9 of it and of the containers on it; nothing else ends with it."""

    def __init__(self, cluster: YarnCluster, number: int) -> None:
        self.host = f"127.0.0.{10 + number}"
        """Of its own: YARN decommissions hosts, and Spark counts executors by host."""
        port, localizer, web = free_ports(3)
        self.directory = cluster.directory / f"node{number}"
        settings, home = self.directory / "conf", self.directory / "home"
        settings.mkdir(parents=True)
        home.mkdir()
        shutil.copy(cluster.settings / "core-site.xml", settings)
        _write_settings(
            settings / "yarn-site.xml",
            {
                **cluster.of_all,
                "yarn.nodemanager.hostname": self.host,
                "yarn.nodemanager.address": f"{self.host}:{port}",
                "yarn.nodemanager.localizer.address": f"{self.host}:{localizer}",
                "yarn.nodemanager.webapp.address": f"{self.host}:{web}",
                "yarn.nodemanager.local-dirs": self.directory / "local",
                "yarn.nodemanager.log-dirs": self.directory / "logs",
                "yarn.nodemanager.resource.cpu-vcores": cluster.cores,
                "yarn.nodemanager.resource.memory-mb": cluster.memory_mb,
                "yarn.nodemanager.vmem-check-enabled": "false",
                "yarn.nodemanager.delete.debug-delay-sec": 600,  # what containers print is there until the cluster ends
                "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": 99.9,
                "yarn.nodemanager.disk-health-checker.enable": "false",
                "yarn.nodemanager.collector-service.address": f"{self.host}:0",
                "yarn.nodemanager.user-home-dir": home,
                "yarn.nodemanager.env-whitelist": "JAVA_HOME,HADOOP_CONF_DIR",
                "yarn.nodemanager.sleep-delay-before-sigkill.ms": 250,
            },
        )
        self.process = cluster.start_java(
            "org.apache.hadoop.yarn.server.nodemanager.NodeManager", settings, self.directory
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        end_below(self.directory)


def running_below(directory: Path) -> list[int]:
    """The process ids of what was started in a directory below that one, as containers are."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                environment = (each / "environ").read_bytes()
            except OSError:
                continue
            if f"PWD={directory}/".encode() in environment:
                found.append(int(each.name))
    return found


def end_below(directory: Path) -> None:
    """Until there are none: they start others."""
    deadline_s = time.monotonic() + END_S
    while (found := running_below(directory)) and time.monotonic() < deadline_s:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_S)


class YarnCluster:
    def __init__(self, jars: Path, cores: int, memory_mb: int, directory: Path) -> None:
        self.jars, self.cores, self.memory_mb, self.directory = jars, cores, memory_mb, directory
        self.settings = directory / "conf"
        """The HADOOP_CONF_DIR of its users."""
        self.settings.mkdir(parents=True)
        self.nodes: list[Node] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._excluded = directory / "excluded.xml"
        client, scheduler, tracker, admin, web = (f"127.0.0.1:{port}" for port in free_ports(5))
        self._web = web
        self.of_all: dict[str, Any] = {
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.address": client,
            "yarn.resourcemanager.scheduler.address": scheduler,
            "yarn.resourcemanager.resource-tracker.address": tracker,
            "yarn.resourcemanager.admin.address": admin,
            "yarn.resourcemanager.webapp.address": web,
            "yarn.resourcemanager.bind-host": "127.0.0.1",
            "yarn.resourcemanager.am.max-attempts": 100,  # by default 2; the application master looks at it, too
        }
        _write_settings(self.settings / "core-site.xml", {"fs.defaultFS": "file:///"})
        _write_settings(self.settings / "yarn-site.xml", self.of_all)
        manager = directory / "manager"
        (manager / "conf").mkdir(parents=True)
        shutil.copy(self.settings / "core-site.xml", manager / "conf")
        self._excluded.write_text("<hosts></hosts>\n")
        (manager / "conf" / "capacity-scheduler.xml").write_text("<configuration></configuration>\n")
        _write_settings(
            manager / "conf" / "yarn-site.xml",
            {
                **self.of_all,
                "yarn.resourcemanager.scheduler.class": "org.apache.hadoop.yarn.server.resourcemanager.scheduler.capacity.CapacityScheduler",
                "yarn.scheduler.capacity.root.queues": "default",
                "yarn.scheduler.capacity.root.default.capacity": 100,
                "yarn.scheduler.capacity.maximum-am-resource-percent": 0.6,
                "yarn.scheduler.capacity.resource-calculator": "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
                "yarn.scheduler.minimum-allocation-mb": 128,
                "yarn.scheduler.maximum-allocation-mb": memory_mb,
                "yarn.scheduler.maximum-allocation-vcores": cores,
                "yarn.nm.liveness-monitor.expiry-interval-ms": 20_000,
                "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": 200,
                "yarn.resourcemanager.nodes.exclude-path": self._excluded,
                "yarn.resourcemanager.nodemanager-graceful-decommission-timeout-secs": 600,
                "yarn.resourcemanager.fs.state-store.uri": manager / "store",
            },
        )

    def start(self, nodes: int) -> None:
        """Returns when all are there. What runs then, however this ends, `close` ends."""
        manager = self.directory / "manager"
        self.manager = self.start_java(
            "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager", manager / "conf", manager
        )
        for number in range(1, nodes + 1):
            self.nodes.append(Node(self, number))
        self._wait()

    def start_java(self, program: str, settings: Path, directory: Path) -> subprocess.Popen[bytes]:
        (settings / "log4j.properties").write_text(_LOGGING)
        heap = ["-Xmx384m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        opened = [f"--add-opens=java.base/{each}=ALL-UNNAMED" for each in ("java.lang", "java.util", "java.net")]
        where = [f"-Dyarn.log.dir={directory}", f"-Djava.io.tmpdir={directory}"]
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(
                ["java", *heap, *opened, *where, "-cp", f"{settings}:{self.jars}/*", program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={**os.environ, "HADOOP_CONF_DIR": str(settings)},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def ask(self, path: str) -> Any:
        """What the resource manager answers: https://hadoop.apache.org/docs/stable/hadoop-yarn/hadoop-yarn-site/ResourceManagerRest.html"""
        with urllib.request.urlopen(f"http://{self._web}/ws/v1/cluster/{path}", timeout=10) as answer:
            return json.load(answer)

    def _wait(self) -> None:
        def are_there() -> bool:
            for each in self._started:
                assert each.poll() is None, self.log()
            try:
                return int(self.ask("metrics")["clusterMetrics"]["activeNodes"]) == len(self.nodes)
            except (OSError, urllib.error.URLError):
                return False

        until(are_there, self.log)

    def decommission(self, node: Node, timeout_s: int = 600) -> None:
        """Gracefully: nothing new is placed there, and what runs there has so long to end."""
        self._excluded.write_text(
            f"<hosts><host><name>{node.host}</name><timeout>{timeout_s}</timeout></host></hosts>\n"
        )
        self.run("rmadmin", "-refreshNodes", "-g", str(timeout_s), "-server")

    def run(self, tool: str, *arguments: str) -> str:
        """What one of YARN's own commands prints: `rmadmin`, `application`, `node`."""
        programs = {"rmadmin": "RMAdminCLI", "application": "ApplicationCLI", "node": "NodeCLI"}
        classpath = f"{self.settings}:{self.jars}/*"
        start = ["java", "-cp", classpath, f"org.apache.hadoop.yarn.client.cli.{programs[tool]}"]
        first = [tool] if tool == "application" else []
        done = subprocess.run([*start, *first, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self) -> str:
        logs = [self.directory / "manager" / "log", *(node.directory / "log" for node in self.nodes)]
        return "\n".join(each.read_text(encoding="utf-8", errors="replace")[-3000:] for each in logs)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        end_below(self.directory)


def until(holds: Callable[[], bool], otherwise: Callable[[], str], timeout_s: float = START_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {otherwise()}"
        time.sleep(_LOOK_S)


@contextmanager
def running_yarn(jars: Path, nodes: int = 2, cores: int = CORES, memory_mb: int = MEMORY_MB) -> Iterator[YarnCluster]:
    directory = Path(tempfile.mkdtemp(prefix="midstream-yarn-"))
    cluster = YarnCluster(jars, cores, memory_mb, directory)
    try:
        cluster.start(nodes)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--nodes", type=int, default=2)
    arguments.add_argument("--cores", type=int, default=CORES)
    arguments.add_argument("--memory", type=int, default=MEMORY_MB, help="in MB")
    arguments.add_argument("command", nargs=argparse.REMAINDER)
    options = arguments.parse_args()
    if not options.command:
        arguments.error("which command?")
    jars = find_jars()
    if isinstance(jars, str):
        print(jars, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with running_yarn(jars, options.nodes, options.cores, options.memory) as cluster:
        print(
            f"the resource manager's page: http://{cluster._web}/; what containers print: {cluster.directory}/node*/logs",
            file=sys.stderr,
        )
        command = subprocess.Popen(options.command, env={**os.environ, "HADOOP_CONF_DIR": str(cluster.settings)})
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
