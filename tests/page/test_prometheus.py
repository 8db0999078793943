"""A real Prometheus scrapes a real job, with the alert rules and the queries of the dashboard in docs/monitoring."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_monitoring_docs import ALERTS, EXPRESSIONS

from machine import limit_s
from midstream import Environment, KeyedProcessFunction
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

pytestmark = pytest.mark.systems

SERVER = shutil.which("prometheus")


class Counted(KeyedProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.metrics.counter("rows.seen").inc()
        ctx.metrics.gauge("last").set(row["n"])
        return row


def asked(url: str) -> Any:
    """The answer's data; None while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=limit_s(10)) as answer:
            found = json.load(answer)
    except OSError:
        return None
    assert found["status"] == "success", found
    return found["data"]


@pytest.mark.skipif(SERVER is None, reason="no prometheus here (Debian, Ubuntu: sudo apt install prometheus)")
def test_prometheus_scrapes_a_job_and_knows_the_rules_and_the_queries(tmp_path: Path):
    assert SERVER is not None
    env = Environment("prices", parallelism=2, checkpoint_dir=tmp_path / "state", checkpoint_interval="1 s")
    rows = env.generate(lambda i: {"k": i % 7, "n": i}, rows_per_s=500)
    rows.key_by("k").process(Counted(), {"k": int, "n": int}).uid("counted").write_parquet(tmp_path / "out")
    job = env.start(slots=ProcessSlots())
    try:
        assert job.page is not None
        at = urllib.parse.urlsplit(job.page).netloc
        scrape = {"job_name": "midstream", "scrape_interval": "1s", "static_configs": [{"targets": [at]}]}
        config = {"scrape_configs": [scrape], "rule_files": [str(ALERTS)]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with (tmp_path / "log").open("wb") as log:
            server = subprocess.Popen(
                [
                    SERVER,
                    f"--config.file={tmp_path / 'prometheus.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            check(f"http://127.0.0.1:{port}/api/v1", server, tmp_path / "log")
        finally:
            server.kill()
            server.wait()
    finally:
        job.cancel()


def check(api: str, server: subprocess.Popen[bytes], log: Path) -> None:
    def query(expression: str) -> Any:
        assert server.poll() is None, log.read_text()
        return (asked(f"{api}/query?{urllib.parse.urlencode({'query': expression})}") or {}).get("result")

    until("the rows to be counted", lambda: query('midstream_user_total{name="rows.seen"} > 0'))
    until("a checkpoint", lambda: query("midstream_checkpoints_completed_total > 0"))
    # a scrape may take longer than its second on a busy machine, and has then failed until the next one
    until(
        "its target to be up", lambda: [each["health"] for each in asked(f"{api}/targets")["activeTargets"]] == ["up"]
    )
    rules = [rule for group in asked(f"{api}/rules")["groups"] for rule in group["rules"]]
    assert len(rules) == ALERTS.read_text(encoding="utf-8").count("- alert:")
    assert [rule for rule in rules if rule["health"] == "err"] == []
    (counter,) = until("the counter", lambda: query('midstream_user_total{name="rows.seen"}'))
    assert (counter["metric"]["operator"], counter["metric"]["job_name"]) == ("counted", "prices")
    until("the gauge", lambda: query("midstream_user_value_max"))
    for expression in EXPRESSIONS:
        plain = expression.replace("$__rate_interval", "1m").replace("$__range", "1h").replace("$job_name", ".*")
        assert query(plain) is not None, plain
