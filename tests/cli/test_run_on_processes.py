"""`midstream run --slots process`: whole jobs from the command line, without Spark and Java."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from midstream.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"

JOB = """
from midstream import Environment, no_restart

env = Environment("counting", checkpoint_dir="state", restart=no_restart())
env.generate(lambda i: {{"n": i}}, count=1000).map(lambda row: {{"n": 10 // (row["n"] - {bad})}}).write_jsonl("out")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write the job above, whose row `bad` divides by zero; its path."""
    monkeypatch.chdir(tmp_path)

    def make(bad: int = -1) -> str:
        (tmp_path / "job.py").write_text(JOB.format(bad=bad))
        return "job.py"

    return make


def test_the_quickstart_needs_no_java(monkeypatch, capfd):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert main(["run", str(EXAMPLES / "quickstart.py"), "--slots", "process"]) == 0
    out, err = capfd.readouterr()
    assert out.count("'page': '/page/1', ") == 6 and "quickstart finished: 12,000 rows read" in out
    assert "Spark" not in err


def test_the_link_to_the_page_is_printed_unless_there_is_none(job, capsys):
    assert main(["run", job(), "--slots", "process", "--page", "70000"]) == 2
    assert "--page: '70000' is not PORT, HOST:PORT or off" in capsys.readouterr().err
    assert main(["run", job(), "--slots", "process"]) == 0
    assert re.search(r"^page: http://127\.0\.0\.1:\d+/#token=[\w-]{32}$", capsys.readouterr().err, re.M)
    shutil.rmtree("out")
    assert main(["run", job(), "--slots", "process", "--page", "off", "--checkpoint-dir", "other"]) == 0
    assert "page: " not in capsys.readouterr().err


def test_what_can_be_seen_without_spark_is_said_before_spark_is_started(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "midstream.api.submit._spark_slots", lambda master, slots: pytest.fail("Spark was to be started")
    )
    (tmp_path / "state").mkdir()
    assert main(["run", job(), "--from", "17"]) == 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-1.jsonl").write_text("{}\n")
    assert main(["run", job()]) == 2
    assert main(["run", job(), "--slots", "yarn"]) == 2
    assert main(["run", job(), "--slots", "process", "--master", "local[2]"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "starting" not in err
    assert [line[:7] for line in err.splitlines()] == ["error: "] * 4


def test_for_machines_a_failed_job_has_an_error_beside_its_status(job, capsys):
    assert main(["run", job(bad=500), "--slots", "process", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["name"]) == ("failed", "counting")
    assert "ZeroDivisionError" in answer["error"] and answer["error"] == answer["failures"][0]["summary"]


def test_lines_in_a_file_are_not_broken_so_that_a_command_can_be_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    deep = Path("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (deep / "job.py").write_text(JOB.format(bad=500))
    assert main(["run", str(deep / "job.py"), "--slots", "process", "--checkpoint-dir", str(deep / "state")]) == 1
    assert "job.py" in capsys.readouterr().err
    (deep / "job.py").write_text(JOB.format(bad=-1))
    assert main(["run", str(deep / "job.py"), "--slots", "process", "--checkpoint-dir", str(deep / "state")]) == 0
    out = capsys.readouterr().out
    assert any(line.endswith(f"in {tmp_path / deep / 'state'}") for line in out.splitlines()), out
