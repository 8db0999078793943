"""What `midstream doctor` makes of what it finds."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkConf

from midstream.cli.commands import doctor
from midstream.cli.commands.doctor import Check, CheckResult, _Checks
from midstream.cli.main import main
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.storage.file_storage import FileStorage
from midstream.runtime.storage.local_disk import DiskProbe
from midstream.spark.cluster_probe import PACKAGES, ClusterProbe, Found, ProbedSlot, Tried
from object_store import KEY, SECRET, running_store, use_environment

VERSIONS: dict[str, str | None] = {package: metadata.version(package) for package in PACKAGES}
JOB = """
from midstream import Environment

env = Environment("fine"{more})
env.from_collection([{{"a": 1}}]).print()
"""


NO_TROUBLE = Tried({}, "")


def slot(name: str, number: int, tried: Tried | None = NO_TROUBLE, **other: Any) -> ProbedSlot:
    values = {"python": platform.python_version(), "packages": VERSIONS, "clock_s": 1000.05, **other}
    return ProbedSlot(Found(f"192.0.2.{number}", 4000 + number, name, 100 + number, **values), 1000.0, 1000.1, tried)


class Elsewhere(ProcessSlots):
    driver_host = "192.0.2.99"


def judged(*slots: ProbedSlot, needed: int | None = None, failure: str = "", storage: str = "/data") -> list[Check]:
    checks = _Checks([])
    needed = len(slots) if needed is None else needed
    doctor._judge(checks, ClusterProbe(slots, failure), needed, 60.0, Elsewhere(), storage)
    return checks.made


def problems(checks: list[Check]) -> dict[str, Check]:
    return {check.what: check for check in checks if check.verdict is not CheckResult.OK}


def test_a_cluster_without_a_fault_has_no_problem() -> None:
    checks = judged(slot("a", 1), slot("a", 2), slot("b", 3))
    assert not problems(checks)
    said = {check.what: check.found for check in checks}
    assert said["cores"] == "3 slots at the same time: 2 on a, 1 on b; each reaches the driver at 192.0.2.99"
    assert said["connections between slots"] == "all 6 can be made"


def test_a_pair_that_cannot_connect_is_named() -> None:
    bad = problems(judged(slot("a", 1, Tried({1: "timed out"}, "")), slot("b", 2)))
    assert list(bad) == ["connections between slots"]
    check = bad["connections between slots"]
    assert check.verdict is CheckResult.ERROR
    assert check.found == "a (192.0.2.1, process 101) cannot connect to b (192.0.2.2, process 102): timed out"
    assert check.change.endswith(
        "between the machines of the cluster, or set spark.blockManager.port to have fixed ones"
    )


def test_many_pairs_are_counted() -> None:
    everyone = dict.fromkeys(range(8), "refused")
    checks = judged(*(slot(f"n{i}", i, Tried(everyone, "")) for i in range(8)))
    named = [check for check in checks if check.what == "connections between slots"]
    assert len(named) == doctor.NAMED_MAX + 1 and named[-1].found == "60 more pairs cannot connect"


def test_a_storage_that_some_do_not_see_names_one_of_them() -> None:
    bad = problems(judged(slot("a", 1), slot("b", 2, Tried({}, "not mounted"))))
    assert bad["checkpoint directory /data"].found == (
        "1 of 2 slots cannot use it, such as the one on b (192.0.2.2, process 102): not mounted"
    )


def test_other_versions_and_missing_packages_are_told_apart() -> None:
    bad = problems(judged(slot("a", 1, packages={**VERSIONS, "polars": "0.1"}), slot("b", 2)))
    assert bad["packages on the executors"].verdict is CheckResult.WARNING
    assert f"polars 0.1 on a, {VERSIONS['polars']} here" in bad["packages on the executors"].found
    bad = problems(judged(slot("a", 1, packages={**VERSIONS, "polars": None})))
    assert bad["packages on the executors"].verdict is CheckResult.ERROR
    assert bad["packages on the executors"].found == "polars not installed"


def test_another_minor_version_of_python_is_an_error_and_another_patch_is_not() -> None:
    bad = problems(judged(slot("a", 1, python="3.9.1")))
    assert bad["Python on the executors"].found.startswith("3.9.1 on a (192.0.2.1, process 101); the driver has ")
    patch = ".".join((*platform.python_version_tuple()[:2], "99"))
    assert not problems(judged(slot("a", 1, python=patch)))


@pytest.mark.parametrize(("clock_s", "says"), [(1007.1, "7.0 s ahead"), (990.0, "10.0 s behind"), (1000.9, "")])
def test_a_clock_is_wrong_by_what_cannot_be_the_way(clock_s: float, says: str) -> None:
    bad = problems(judged(slot("a", 1, clock_s=clock_s), slot("b", 2)))
    assert [check.found for check in bad.values()] == (
        [f"the clock of a (192.0.2.1, process 101) is {says}"] if says else []
    )


def test_too_few_slots_are_an_error_with_what_spark_says() -> None:
    [check] = problems(judged(slot("a", 1), needed=3)).values()
    assert check.what == "cores" and check.found == "the job needs 3 slots at the same time, but 1 came within 60 s"
    [check] = problems(judged(needed=2, failure="its executor was lost")).values()
    assert check.found.endswith("0 came within 60 s: its executor was lost") and "192.0.2.99" in check.change


def test_a_machine_without_a_certificate_is_named() -> None:
    why = "tls: /tls/tls.crt does not exist on b"
    bad = problems(judged(slot("a", 1), slot("b", 2, Tried({}, "", why)), slot("c", 3, Tried({}, "", why))))
    assert bad["certificate"].found == f"{why} (process 102)"


def test_a_slot_that_hangs_is_an_error() -> None:
    [check] = problems(judged(slot("a", 1, None), slot("b", 2))).values()
    assert check.what == "slots" and "a (192.0.2.1, process 101)" in check.found


def test_local_directories_are_named_that_hold_no_state() -> None:
    good = DiskProbe("/disk", "ext4", 20 * 2**30, 500 * 2**20)
    slow = DiskProbe("/disk", "ext4", 10 * 2**30, 2 * 2**20)
    checks = judged(slot("a", 1, Tried({}, "", disks=(good,))), slot("b", 2, Tried({}, "", disks=(slow,))))
    assert not problems(checks)
    assert {check.what: check.found for check in checks}["local directories"] == (
        "at least 10.0 GiB are free for state (/disk), written at 2.0 MiB/s or faster (slowest: /disk on b)"
    )
    in_memory, full = DiskProbe("/shm", "tmpfs", 1, 1.0), DiskProbe("/full", "ext4", 0, 0.0, "No space left on device")
    both = Tried({}, "", disks=(in_memory, full))
    checks = judged(slot("a", 1, both), slot("a", 2, both))
    warned = [check for check in checks if check.verdict is CheckResult.WARNING]
    assert [check.found.split(", so")[0] for check in warned] == [
        "/shm on a lies in memory (tmpfs)",
        "/full on a cannot be used: No space left on device",
    ]
    assert all("spark.local.dir" in check.change for check in warned) and len(problems(checks)) == 1


def settings(master: str, tls: str = "auto", **given: str) -> dict[str, Check]:
    conf = SparkConf(loadDefaults=False, _jvm=None)
    conf.set("spark.decommission.enabled", "true")
    conf.setAll([(f"spark.{name.replace('__', '.')}", value) for name, value in given.items()])
    checks = _Checks([])
    doctor._check_settings(checks, conf, master, tls)
    return problems(checks.made)


def test_settings_that_harm_long_jobs_are_named() -> None:
    assert not settings("local[4]")
    assert list(settings("local[4]", excludeOnFailure__enabled="true", executor__pyspark__memory="1g")) == [
        "spark.excludeOnFailure.enabled",
        "spark.executor.pyspark.memory",
    ]
    assert not settings("local[4]", decommission__enabled="false")
    assert "spark.decommission.enabled" in settings("yarn", decommission__enabled="false")
    assert "spark.yarn.executor.decommission.enabled" in settings("yarn")
    assert "spark.yarn.executor.decommission.enabled" not in settings("k8s://a:6443")
    assert "spark.executor.memoryOverhead" in settings("yarn")
    assert "spark.executor.memoryOverhead" not in settings("yarn", executor__memoryOverhead="1g")
    assert "spark.executor.failuresValidityInterval" in settings("yarn")
    for interval in ("executor__failuresValidityInterval", "yarn__executor__failuresValidityInterval"):
        assert "spark.executor.failuresValidityInterval" not in settings("yarn", **{interval: "1h"})


def test_what_is_encrypted_is_said_of_a_cluster() -> None:
    assert list(settings("spark://a:7077")) == ["spark.authenticate"]
    assert list(settings("spark://a:7077", authenticate="true")) == ["spark.network.crypto.enabled"]
    assert not settings("spark://a:7077", authenticate="true", network__crypto__enabled="true")
    assert list(settings("spark://a:7077", "off", authenticate="true", network__crypto__enabled="true")) == [
        "encryption"
    ]


# ---- the command ----


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", *arguments, "--slots", "process", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_job_and_its_directory_are_looked_at_and_left_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, directory = tmp_path / "job.py", tmp_path / "checkpoints"
    job.write_text(JOB.format(more=f", checkpoint_dir={str(directory)!r}"))
    status, answer = run(capsys, str(job))
    assert status == 0 and answer["ok"]
    said = {check["what"]: check["found"] for check in answer["checks"]}
    assert said["job job.py"] == "'fine' can start from the beginning, on 1 slots"
    assert said[f"checkpoint directory {directory}"] == "the driver can write to it, and create files exclusively"
    assert os.listdir(tmp_path) == ["job.py"]
    directory.mkdir()
    (directory / "mine").write_text("kept")
    assert run(capsys, str(job))[0] == 0
    assert os.listdir(directory) == ["mine"]


def test_a_job_that_cannot_start_is_an_error_and_the_rest_is_looked_at_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.py"
    job.write_text("raise RuntimeError('not today')\n")
    status, answer = run(capsys, str(job), "--checkpoint-dir", str(tmp_path / "c"))
    assert status == 1 and not answer["ok"]
    bad = [check for check in answer["checks"] if check["verdict"] == "error"]
    assert [check["what"] for check in bad] == ["job job.py"] and "not today" in bad[0]["found"]
    assert any(check["what"].startswith("checkpoint directory") for check in answer["checks"])


def test_a_job_without_checkpoints_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB.format(more=""))
    status, answer = run(capsys, str(job))
    assert status == 0
    warned = [check["what"] for check in answer["checks"] if check["verdict"] == "warning"]
    assert [what for what in warned if what != "local directories"] == ["checkpoints"]  # TMPDIR may lie in memory


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    status, answer = run(capsys, "--checkpoint-dir", str(tmp_path / "file" / "below"))
    assert status == 1
    [bad] = [check for check in answer["checks"] if check["verdict"] == "error"]
    assert bad["what"].startswith("checkpoint directory") and bad["change"]


def test_people_get_lines_with_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB.format(more=""))
    assert main(["doctor", str(job), "--slots", "process"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok      Python: ")
    assert "warning checkpoints: the job has no checkpoint directory" in lines[-3]
    assert lines[-2].strip().startswith("give Environment(checkpoint_dir=") and lines[-1] == "0 errors, 1 warning"


def test_an_object_store_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_store() as store:
        use_environment(monkeypatch, store)
        said = {c["what"]: c for c in run(capsys, "--checkpoint-dir", "s3://bucket/new")[1]["checks"]}
        assert said["checkpoint directory s3://bucket/new"]["found"].endswith("and create files exclusively")
        assert FileStorage("s3://bucket/new").list("") == []
        store.fault("PUT", "/bucket/old", "ignore", times=100)
        status, answer = run(capsys, "--checkpoint-dir", f"s3://{KEY}:{SECRET}@bucket/old")
        said = {c["what"]: c for c in answer["checks"]}
        assert status == 1 and SECRET not in str(answer)
        assert "ignores the condition of a write" in said["checkpoint directory s3://bucket/old"]["found"]
        assert "only one of two drivers" in said["checkpoint directory s3://bucket/old"]["change"]
