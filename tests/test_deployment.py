"""What docs/deploy gives people to copy says what midstream does: options, ports, times, exit statuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machine import limit_s
from midstream import Environment
from midstream.cli.main import app
from midstream.cli.output import Exit

DEPLOY = Path(__file__).parent.parent / "docs" / "deploy"
UNIT = DEPLOY / "midstream-job.service"
LOAD = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(sys.stdin)), sys.stdout)"
CHECKPOINT_TIMEOUT_S = 600
"""Of an Environment that sets none."""


def manifests(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file, by whichever Python here can read YAML."""
    for python in filter(None, (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin"))):
        read = subprocess.run(
            [python, "-c", LOAD],
            input=(DEPLOY / "kubernetes" / name).read_text(encoding="utf-8"),
            capture_output=True,
            text=True,
            check=False,
        )
        if read.returncode == 0:
            found: list[dict[str, Any]] = json.loads(read.stdout)
            return found
        if "No module named 'yaml'" not in read.stderr:
            pytest.fail(f"{name}: {read.stderr}")
    pytest.skip("no Python here has PyYAML")


def of_kind(kind: str, name: str = "job.yaml") -> list[dict[str, Any]]:
    return [each for each in manifests(name) if each["kind"] == kind]


def unit() -> dict[str, str]:
    lines = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if "=" in line and line[0] != "#"]
    return {key: value for key, _, value in (line.partition("=") for line in lines) if key != "Environment"}


def options(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of them. Raises what it refuses."""
    command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert command.__name__ == "run"
    return dict(bound.arguments)


def test_the_checkpoint_timeout_is_what_the_grace_periods_are_made_for() -> None:
    assert Environment("any").program.config.checkpoint_timeout_s == CHECKPOINT_TIMEOUT_S


# ---- systemd ----


def test_the_unit_starts_a_job_that_resumes_and_knows_the_exit_statuses() -> None:
    found = unit()
    program, *arguments = shlex.split(found["ExecStart"])
    given = options(arguments)
    assert program.endswith("/bin/midstream") and given["resume"] and "supervise" not in given
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"] == str(int(Exit.JOB_FAILED))
    assert found["SuccessExitStatus"] == "143"
    assert found["KillMode"] == "mixed"
    minutes = re.fullmatch(r"(\d+)min", found["TimeoutStopSec"])
    assert minutes is not None and int(minutes[1]) * 60 > CHECKPOINT_TIMEOUT_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    program = shlex.split(unit()["ExecStart"])[0]
    here = (
        text.replace(program, "/bin/true").replace("User=midstream", "User=root").replace("/srv/visits", str(tmp_path))
    )

    def verified(content: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "midstream-job.service"
        path.write_text(content)
        return subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=limit_s(120)
        )

    broken = verified(here.replace("KillMode=mixed", "KillMode=sometimes"))
    if "kill mode" not in broken.stderr.lower():
        pytest.skip(f"systemd-analyze verifies nothing here: {broken.stderr.strip()}")
    said = verified(here)
    assert said.returncode == 0 and "midstream-job.service" not in said.stderr, said.stderr


# ---- Kubernetes ----


def settings() -> dict[str, str]:
    (config,) = of_kind("ConfigMap")
    lines = config["data"]["spark-defaults.conf"].splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def test_the_pod_runs_a_job_that_resumes_and_may_take_as_long_to_stop_as_a_checkpoint_takes() -> None:
    (job,) = of_kind("Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["midstream"]
    given = options(container["args"])
    spark = settings()
    cores = int(spark["spark.executor.instances"]) * int(spark["spark.executor.cores"])
    assert given["resume"] and "supervise" not in given and given["parallelism"] == cores
    assert pod["terminationGracePeriodSeconds"] > CHECKPOINT_TIMEOUT_S
    assert pod["restartPolicy"] == "Never", "the only one with which a Job looks at exit statuses"


def test_only_a_job_that_has_failed_by_its_own_fault_ends_the_job_of_kubernetes() -> None:
    (job,) = of_kind("Job")
    fails, ignored = job["spec"]["podFailurePolicy"]["rules"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert fails["action"] == "FailJob"
    assert fails["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [int(Exit.JOB_FAILED)],
    }
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 1


def test_the_network_policies_let_through_the_ports_that_are_set_and_no_others() -> None:
    spark = settings()
    retries = int(spark["spark.port.maxRetries"])

    def ports(*names: str) -> list[tuple[int, int]]:
        return [(int(spark[name]), int(spark[name]) + retries) for name in names]

    policies = {
        policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy", "network-policy.yaml")
    }
    wanted = {
        "visits-driver": ports("spark.driver.port", "spark.driver.blockManager.port"),
        "visits-executors": ports("spark.blockManager.port"),
    }
    assert policies.keys() == wanted.keys()
    for name, policy in policies.items():
        assert policy["policyTypes"] == ["Ingress"]
        (rule,) = policy["ingress"]
        assert [(each["port"], each["endPort"]) for each in rule["ports"]] == wanted[name]
        assert all(each["protocol"] == "TCP" for each in rule["ports"])


def test_the_policies_select_the_pods_that_the_manifests_make() -> None:
    (job,) = of_kind("Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    label = settings()["spark.kubernetes.executor.label.job"]
    driver, executors = (
        policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind("NetworkPolicy", "network-policy.yaml")
    )
    assert driver == labels
    assert executors == {"job": label, "spark-role": "executor"} and label == labels["job"]
    (binding,) = of_kind("RoleBinding")
    assert binding["subjects"][0]["name"] == job["spec"]["template"]["spec"]["serviceAccountName"]


# ---- pages ----


def test_the_page_on_supervision_has_every_exit_status() -> None:
    page = (DEPLOY / "supervision.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert rows == [str(int(status)) for status in Exit]


def test_the_job_of_the_page_on_standalone_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DEPLOY / "standalone.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(program)
    from midstream.api.job_file import load_job
    from midstream.api.submit import StartOptions

    submission = load_job(Path("job.py"), []).submission(StartOptions(resume=True))
    assert submission.plan.graph.slots == 3 and submission.checkpoint is None
    for command in re.findall(r"^midstream (run .*?)(?: +#.*)?$", page, re.MULTILINE):
        assert options(shlex.split(command))["master"] == "spark://HOST:7077"
