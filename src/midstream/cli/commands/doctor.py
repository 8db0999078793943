"""`midstream doctor`: finds problems that would occur later; it runs and changes nothing.

Every check reports what it has found and, if that is a problem, what to change.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.commands.run import Overrides, load_with_its_own_logging
from midstream.cli.output import Answer, Exit, busy_with
from midstream.engine.core.error_rows import counted
from midstream.engine.core.errors import ClusterError, MidstreamError
from midstream.engine.core.interfaces import Storage
from midstream.runtime.network.tls import keys_for
from midstream.runtime.storage.exclusive_create import without_secrets
from midstream.runtime.storage.file_storage import FileStorage, absolute, is_exclusive
from midstream.runtime.storage.local_disk import IN_MEMORY, DiskProbe, probe_directories

if TYPE_CHECKING:
    from pyspark import SparkConf

    from midstream.api.submit import Submission
    from midstream.runtime.network.ports import Ports
    from midstream.runtime.process.slot_provider import SlotProvider
    from midstream.spark.cluster_probe import ClusterProbe, ProbedSlot

CLOCKS_APART_S: Final = 1.0
"""The tolerated difference of clocks. Event time follows rows, but latency, lag and processing-time timers follow
clocks.
"""
NAMED_MAX: Final = 4


class CheckResult(Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


STYLE: Final = {CheckResult.OK: "green", CheckResult.WARNING: "bold yellow", CheckResult.ERROR: "bold red"}


class Check(msgspec.Struct, frozen=True):
    what: str
    """The subject of the check."""
    verdict: CheckResult
    found: str
    change: str = ""
    """The remedy; "" if none is needed."""


class Doctored(msgspec.Struct, frozen=True):
    ok: bool
    checks: tuple[Check, ...]


@dataclass(slots=True)
class _Checks:
    made: list[Check]

    def ok(self, what: str, found: str) -> None:
        self.made.append(Check(what, CheckResult.OK, found))

    def warn(self, what: str, found: str, change: str) -> None:
        self.made.append(Check(what, CheckResult.WARNING, found, change))

    def fail(self, what: str, found: str, change: str = "") -> None:
        self.made.append(Check(what, CheckResult.ERROR, found, change))

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Report what is raised in the block as an error of `what`."""
        try:
            yield
        except MidstreamError as error:
            self.fail(what, str(error))


def run_doctor(path: Path | None, overrides: Overrides, json: bool) -> Answer:
    """Check the surroundings, and the job in `path` if given. Not ok (exit status 1) if there is any error."""
    checks = _Checks([])
    _check_this_machine(checks)
    if overrides.slots == "process":
        _judge_disks(checks, [("this machine", probe) for probe in probe_directories(os.environ)])
    submission = None if path is None else _load(checks, path, overrides)
    storage = _storage_of(submission, overrides)
    if overrides.slots == "process":
        _check_storage(checks, storage, lambda url, probe, token: None)
    else:
        with busy_with("starting Spark, and a process on each core that the job needs", silent=json):
            _check_spark(checks, submission, overrides, storage)
    failed = any(check.verdict is CheckResult.ERROR for check in checks.made)
    return Answer(Doctored(not failed, tuple(checks.made)), _view(checks.made), Exit.JOB_FAILED if failed else Exit.OK)


def _view(checks: Sequence[Check]) -> Text:
    view = Text()
    for check in checks:
        view.append(f"{check.verdict.value:8}", style=STYLE[check.verdict])
        view.append(f"{formatting.printable(check.what)}: {formatting.printable(check.found)}\n")
        if check.change:
            view.append(f"        {formatting.printable(check.change)}\n", style="dim")
    problems = Counter(check.verdict for check in checks)
    errors, warnings = problems[CheckResult.ERROR], problems[CheckResult.WARNING]
    view.append(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}", style="bold")
    return view


# ---- this machine, and the job ----


def _check_this_machine(checks: _Checks) -> None:
    checks.ok("Python", f"{platform.python_version()} at {sys.executable}")
    checks.ok(
        "midstream",
        f"{metadata.version('midstream')}, polars {metadata.version('polars')}, pyarrow {metadata.version('pyarrow')}",
    )


def _load(checks: _Checks, path: Path, overrides: Overrides) -> Submission | None:
    with checks.of(f"job {path.name}"):
        submission = load_with_its_own_logging(path, overrides.modules).submission(overrides.start)
        plan = submission.plan
        start = f"from {plan.restore}" if plan.restore else "from the beginning"
        checks.ok(f"job {path.name}", f"{plan.config.name!r} can start {start}, on {plan.graph.slots} slots")
        if plan.config.checkpoint_dir is None:
            checks.warn(
                "checkpoints",
                "the job has no checkpoint directory: after a failure it starts over, and it cannot be rescaled",
                "give Environment(checkpoint_dir=…) or --checkpoint-dir",
            )
        return submission
    return None


def _storage_of(submission: Submission | None, overrides: Overrides) -> str | None:
    if submission is not None:
        return submission.plan.config.checkpoint_dir
    directory = overrides.start.checkpoint_dir
    return None if directory is None else absolute(os.fspath(directory))


# ---- checkpoint storage ----


def _check_storage(checks: _Checks, url: str | None, use: Callable[[str, str, str], None]) -> None:
    """Write a probe into the checkpoint directory, and have `use` examine it: its directory, the probe's, its content."""
    if url is None:
        use("", "", secrets.token_hex(32))
        return
    what = f"checkpoint directory {without_secrets(url)}"
    probe, token = f".tmp-doctor-{secrets.token_hex(8)}", secrets.token_hex(32)
    is_new = "://" not in url and not os.path.exists(url)
    try:
        storage = FileStorage(url)
        storage.write(f"{probe}/driver", [token.encode()])
    except MidstreamError as error:
        checks.fail(what, str(error), "give a directory or storage URL that the driver and all slots can write to")
        use("", "", token)
        return
    try:
        _check_claims(checks, what, storage, is_exclusive(url), f"{probe}/claim")
        use(url, probe, token)
    finally:
        with checks.of(what):
            storage.delete(probe)
        if is_new:
            with contextlib.suppress(OSError):  # a job has begun to use it meanwhile
                os.rmdir(url)


def _check_claims(checks: _Checks, what: str, storage: Storage, exclusive: bool, claim: str) -> None:
    try:
        first, second = storage.create(claim, b""), storage.create(claim, b"")
    except MidstreamError as error:
        checks.fail(
            what, str(error), "no job can use it as it is: only one of two drivers that start together may continue"
        )
        return
    if exclusive and first and not second:
        checks.ok(what, "the driver can write to it, and create files exclusively")
    else:
        checks.warn(
            what,
            "files cannot be created exclusively there",
            "two drivers that start at the same moment may both continue; make sure that only one is started",
        )


# ---- Spark ----


def _check_spark(checks: _Checks, submission: Submission | None, overrides: Overrides, storage: str | None) -> None:
    try:
        from midstream.spark.session import get_session
        from midstream.spark.spark_slots import BLOCK_MANAGER_PORT, SparkSlots
    except ModuleNotFoundError as error:
        checks.fail("PySpark", f"{sys.executable} has no module {error.name!r}", "pip install 'pyspark>=4.0'")
        _check_storage(checks, storage, lambda url, probe, token: None)
        return
    slots = submission.plan.slots_max if submission is not None else overrides.start.parallelism or 1
    timeout_s = submission.plan.config.slot_timeout_s if submission is not None else 60.0
    with checks.of("Spark"):
        session = get_session(overrides.start.master, slots=slots)
        context = session.sparkContext
        checks.ok("Spark", f"{context.version} on {context.master}")
        conf = context.getConf()
        tls = submission.plan.config.tls if submission is not None else "auto"
        _check_settings(checks, conf, context.master or "", tls)
        certificates = "" if tls in ("auto", "on", "off") else tls
        if certificates:
            with checks.of("certificate"):
                keys_for(tls, "", b"")
        provider = SparkSlots(session)
        firewall = "" if provider.slot_ports.first else f" (for a firewall between them, set {BLOCK_MANAGER_PORT})"
        checks.ok("ports", f"the driver takes {provider.driver_ports}, each slot {provider.slot_ports}{firewall}")
        with checks.of("cores"):
            provider.check(slots)
            from midstream.spark.cluster_probe import survey

            def use(url: str, probe: str, token: str) -> None:
                try:
                    found = survey(context, provider, slots, timeout_s, url or None, probe, token, certificates)
                except ClusterError as error:
                    checks.fail(
                        "driver",
                        str(error),
                        f"its address is that of spark.driver.bindAddress, its port one that {BLOCK_MANAGER_PORT} sets",
                    )
                    return
                _judge(checks, found, slots, timeout_s, provider, url)

            _check_storage(checks, storage, use)


DECOMMISSION: Final = "spark.decommission.enabled"
DECOMMISSION_ON_YARN: Final = "spark.yarn.executor.decommission.enabled"
_LONG_RUNNING: Final = ("yarn", "k8s")
_FAILURES: Final = "spark.executor.failuresValidityInterval"
_FAILURES_ON_YARN: Final = "spark.yarn.executor.failuresValidityInterval"
"""The name before Spark 3.5, which newer versions still accept."""
_OVERHEAD: Final = "spark.executor.memoryOverhead"


def _check_settings(checks: _Checks, conf: SparkConf, master: str, tls: str) -> None:
    def given(name: str) -> str:
        return (conf.get(name, "") or "").strip()

    def is_on(name: str) -> bool:
        return given(name).lower() == "true"

    for name in ("spark.excludeOnFailure.enabled", "spark.excludeOnFailure.application.enabled"):
        if is_on(name):
            checks.warn(
                name,
                "slots that end count as failed tasks, and Spark takes their executors and nodes away from the job",
                "leave it out",
            )
    if given("spark.executor.pyspark.memory"):
        checks.warn(
            "spark.executor.pyspark.memory",
            f"{given('spark.executor.pyspark.memory')} limits the address space of a slot, of which Arrow and polars "
            "reserve more than they use",
            "leave it out, and limit the container",
        )
    if master.startswith(_LONG_RUNNING) and not (given(_FAILURES) or given(_FAILURES_ON_YARN)):
        checks.warn(
            _FAILURES,
            "without it Spark counts the failures of executors over the whole life of the job, up to "
            "spark.executor.maxNumFailures",
            f"set {_FAILURES}=1h",
        )
    if master.startswith("yarn") and not (given(_OVERHEAD) or given(f"{_OVERHEAD}Factor")):
        checks.warn(
            _OVERHEAD,
            "without it YARN kills executors that use more than a tenth of spark.executor.memory (or 384 MB) in addition to Java's "
            "own, and the Python of their slots is in that",
            f"set {_OVERHEAD} to 500 MB for each core, and your state on top",
        )
    if master.startswith(("local[", "local-cluster[")) or master == "local":
        return
    announced_by = (DECOMMISSION, DECOMMISSION_ON_YARN) if master.startswith("yarn") else (DECOMMISSION,)
    off = next((name for name in announced_by if not is_on(name)), "")
    if off:
        checks.warn(
            off,
            "without it Spark does not announce that an executor has to end: the job then restarts when it is gone",
            f"set {off}=true, so that the job moves to other executors before that",
        )
    if not is_on("spark.authenticate"):
        checks.warn(
            "spark.authenticate",
            "the job's keys travel in Spark's own channel, which anyone in the network can join",
            "set spark.authenticate=true and spark.network.crypto.enabled=true, or use a network that you trust",
        )
    elif not is_on("spark.network.crypto.enabled") and not is_on("spark.ssl.rpc.enabled"):
        checks.warn(
            "spark.network.crypto.enabled",
            "the job's keys travel in Spark's own channel unencrypted",
            "set it to true",
        )
    else:
        checks.ok("spark.network.crypto.enabled", "Spark encrypts what it sends")
    if tls == "off":
        checks.warn(
            "encryption",
            "the job's own connections authenticate, and with tls='off' do not encrypt",
            "leave tls out, or use a network that you trust",
        )
    else:
        checks.ok("encryption", "the job's own connections between machines use TLS")


# ---- what was found on the executors ----


def _judge(
    checks: _Checks, found: ClusterProbe, slots: int, timeout_s: float, provider: SlotProvider, storage: str
) -> None:
    came, driver_host = found.slots, provider.driver_host
    if len(came) < slots:
        why = f": {found.failure}" if found.failure else ""
        checks.fail(
            "cores",
            f"the job needs {slots} slots at the same time, but {len(came)} came within {timeout_s:g} s{why}",
            "give Spark more free cores or the job less parallelism"
            if came
            else f"check that executors start, and that they can reach this program at {driver_host}, {provider.driver_ports}",
        )
    if not came:
        return
    machines = Counter(slot.found.name for slot in came)
    placed = ", ".join(f"{count} on {name}" for name, count in machines.most_common(NAMED_MAX))
    more = f" and {len(machines) - NAMED_MAX} more machines" if len(machines) > NAMED_MAX else ""
    if len(came) == slots:
        checks.ok(
            "cores",
            f"{slots} slot{'s' * (slots > 1)} at the same time: {placed}{more}; each reaches the driver at {driver_host}",
        )
    _judge_versions(checks, came)
    _judge_clocks(checks, came)
    _judge_connections(checks, came, provider.slot_ports)
    for slot in came:
        if slot.tried is not None and slot.tried.tls:
            checks.fail(
                "certificate", f"{slot.tried.tls} (process {slot.found.pid})", "every machine needs one of its own"
            )
            break
    if storage:
        failed = [(slot, slot.tried.storage) for slot in came if slot.tried is not None and slot.tried.storage]
        if failed:
            slot, why = failed[0]
            checks.fail(
                f"checkpoint directory {storage}",
                f"{len(failed)} of {len(came)} slots cannot use it, such as the one on {_location(slot)}: {why}",
                "give a directory that is mounted on all machines, or a storage URL",
            )
        else:
            checks.ok(
                f"checkpoint directory {storage}", f"all {len(came)} slots can read what the driver writes, and write"
            )
    _judge_disks(
        checks, [(slot.found.name, probe) for slot in came if slot.tried is not None for probe in slot.tried.disks]
    )
    silent = [slot for slot in came if slot.tried is None]
    if silent:
        checks.fail(
            "slots",
            f"{len(silent)} of {len(came)} did not finish the tests, such as the one on {_location(silent[0])}",
            "storage or network hang there",
        )


def _judge_disks(checks: _Checks, probed: Sequence[tuple[str, DiskProbe]]) -> None:
    """Judge the local directories of machines, each once; every slot of a machine has probed them."""
    what, remedy = "local directories", "name a directory on a local disk in spark.local.dir, or TMPDIR without Spark"
    bad = {(name, probe.directory): probe for name, probe in probed if probe.failure or probe.kind in IN_MEMORY}
    for (name, directory), probe in list(bad.items())[:NAMED_MAX]:
        problem = f"cannot be used: {probe.failure}" if probe.failure else f"lies in memory ({probe.kind})"
        checks.warn(
            what,
            f"{directory} on {name} {problem}, so that state above the limit of state_memory stays in memory",
            remedy,
        )
    if len(bad) > NAMED_MAX:
        checks.warn(what, f"{len(bad) - NAMED_MAX} more cannot be used either", remedy)
    if probed and not bad:
        _, least = min(probed, key=lambda each: each[1].free_bytes)
        where, slowest = min(probed, key=lambda each: each[1].bytes_per_s)
        checks.ok(
            what,
            f"at least {formatting.size(least.free_bytes)} are free for state ({least.directory}), written at "
            f"{formatting.size(slowest.bytes_per_s)}/s or faster (slowest: {slowest.directory} on {where})",
        )


def _location(slot: ProbedSlot) -> str:
    return f"{slot.found.name} ({slot.found.host}, process {slot.found.pid})"


def _judge_versions(checks: _Checks, came: Sequence[ProbedSlot]) -> None:
    ours = ".".join(platform.python_version_tuple()[:2])
    wrong = [slot for slot in came if ".".join(slot.found.python.split(".")[:2]) != ours]
    if wrong:
        checks.fail(
            "Python on the executors",
            f"{wrong[0].found.python} on {_location(wrong[0])}; the driver has {platform.python_version()}",
            "set PYSPARK_PYTHON to the same minor version everywhere",
        )
    own: dict[str, str | None] = {}
    for package in came[0].found.packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            own[package] = metadata.version(package)
    missing = {p for slot in came for p, version in slot.found.packages.items() if version is None and p in own}
    if missing:
        checks.fail(
            "packages on the executors",
            f"{', '.join(sorted(missing))} not installed",
            "install midstream, with what it needs, for the Python that PYSPARK_PYTHON names",
        )
    other = sorted(
        {
            f"{package} {version} on {slot.found.name}, {own[package]} here"
            for slot in came
            for package, version in slot.found.packages.items()
            if version is not None and package in own and version != own[package]
        }
    )
    if other:
        checks.warn("packages on the executors", "; ".join(other[:NAMED_MAX]), "install the same versions everywhere")
    if not wrong and not missing and not other:
        checks.ok("Python on the executors", f"{platform.python_version()}, with the driver's versions of all packages")


def _judge_clocks(checks: _Checks, came: Sequence[ProbedSlot]) -> None:
    apart: list[tuple[float, ProbedSlot]] = []
    for slot in came:
        clock_s = slot.found.clock_s
        ahead_s = max(clock_s - slot.answered_s, min(clock_s - slot.asked_s, 0.0))
        apart.append((ahead_s, slot))
    ahead_s, slot = max(apart, key=lambda pair: abs(pair[0]))
    if abs(ahead_s) > CLOCKS_APART_S:
        checks.warn(
            "clocks",
            f"the clock of {_location(slot)} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}",
            "synchronise clocks: processing-time timers, lag and latency follow them",
        )
    else:
        checks.ok("clocks", f"within {CLOCKS_APART_S:g} s of the driver's")


def _judge_connections(checks: _Checks, came: Sequence[ProbedSlot], ports: Ports) -> None:
    broken = [
        (slot, came[peer], why)
        for slot in came
        if slot.tried is not None
        for peer, why in slot.tried.unreachable.items()
        if peer < len(came)
    ]
    for slot, peer, why in broken[:NAMED_MAX]:
        checks.fail(
            "connections between slots",
            f"{_location(slot)} cannot connect to {_location(peer)}: {why}",
            f"slots listen on {ports}: open that between the machines of the cluster"
            + ("" if ports.first else ", or set spark.blockManager.port to have fixed ones"),
        )
    if len(broken) > NAMED_MAX:
        checks.fail("connections between slots", f"{len(broken) - NAMED_MAX} more pairs cannot connect")
    if not broken and len(came) > 1:
        checks.ok("connections between slots", f"all {len(came) * (len(came) - 1)} can be made")
