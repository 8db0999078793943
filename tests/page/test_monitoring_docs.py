"""docs/operations/monitoring.md, its alert rules, and the metrics that there are, say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_page_metrics import full

from machine import limit_s
from midstream.page.prometheus import families, metrics_text

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operations" / "monitoring.md"
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
DASHBOARD: dict[str, Any] = json.loads((ALERTS.parent / "dashboard.json").read_text(encoding="utf-8"))
NAMES = {family.name for family in families(full(), per_subtask=True)}
PROMTOOL = shutil.which("promtool")


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bmidstream_[a-z_]+[a-z]\b", text))


def test_the_page_explains_every_metric_and_no_other():
    of_subtasks = {name for name in NAMES if name.startswith("midstream_subtask_")}
    assert named_in(PAGE.read_text(encoding="utf-8")) - {"midstream_subtask"} == NAMES - of_subtasks
    assert of_subtasks


def test_the_alerts_are_about_metrics_that_there_are_and_each_is_explained():
    rules = ALERTS.read_text(encoding="utf-8")
    assert named_in(rules) <= NAMES
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) == len(set(alerts)) == rules.count("expr:")
    assert re.findall(r"^\| `(Midstream\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M) == alerts
    tested = (Path(__file__).parent / "alerts_test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'alertname="(\w+)"', tested)) == set(alerts)


EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_shows_metrics_that_there_are_by_labels_that_they_have():
    labels = {
        family.name: {name for labels, _ in family.samples for name, _ in labels} | {"job_name", "job_id"}
        for family in families(full(), per_subtask=False)
    }
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = named_in(target["expr"])
            assert shown and shown <= labels.keys(), target["expr"]
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) | set(
                re.findall(r"(\w+)(?:=~?\"|,|\) \()", " ".join(re.findall(r"by \(.*?\) \(|{.*?}", target["expr"])))
            )
            assert used <= set.intersection(*(labels[name] for name in shown)), target["expr"]
    assert named_in(DASHBOARD["templating"]["list"][1]["query"]["query"]) <= labels.keys()


def test_the_panels_of_the_dashboard_lie_side_by_side():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers) == len({panel["title"] + panel["type"] for panel in DASHBOARD["panels"]})


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian, Ubuntu: sudo apt install prometheus)")
def test_prometheus_itself_reads_the_expressions_of_the_dashboard(tmp_path: Path):
    assert PROMTOOL is not None
    plain = [each.replace("$__rate_interval", "1m").replace("$__range", "1h") for each in EXPRESSIONS]
    rules = [{"record": f"dashboard:{n}", "expr": expression} for n, expression in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True,
        text=True,
        timeout=limit_s(120),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian, Ubuntu: sudo apt install prometheus)")
def test_prometheus_itself_takes_the_metrics_and_fires_the_alerts_when_it_should():
    assert PROMTOOL is not None
    for arguments, given in (
        (["check", "metrics"], metrics_text(full(), per_subtask=True)),
        (["test", "rules", str(Path(__file__).parent / "alerts_test.yml")], ""),
    ):
        done = subprocess.run(
            [PROMTOOL, *arguments], input=given, capture_output=True, text=True, timeout=limit_s(120), check=False
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
