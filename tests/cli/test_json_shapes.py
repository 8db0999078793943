"""`--json` of every command, as docs/json.schema.json says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from test_history_commands import kept

from midstream.cli.commands import job_commands
from midstream.cli.json_schema import SHAPES, schema
from midstream.cli.main import app, main
from midstream.cli.output import Answer, Stream, print_answer
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol.messages import Logged, LogLine
from midstream.page.request_types import FORMAT_VERSION
from sample_status import sample

DOCS = Path(__file__).parent.parent.parent / "docs"
SCHEMA: dict[str, Any] = json.loads((DOCS / "json.schema.json").read_text(encoding="utf-8"))
JOB = """
from midstream import Environment, no_restart
env = Environment(parallelism=1, name="täglich", restart=no_restart())
def failing(row):
    if row["id"] == 7:
        raise ValueError("bad row")
    return row
env.from_collection([{"id": n} for n in range(10)], splits=1).uid("rows").map(%s, {"id": int}).print()
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """The lines that a command prints with --json, each of which has to keep to the schema of that command."""
    assert main([*arguments, "--json"]) == status
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{arguments[0]}", "$defs": SCHEMA["$defs"]})
    for line in lines:
        validator.validate(line)
        assert next(iter(line)) == "format_version" and line["format_version"] == FORMAT_VERSION
    return lines


def test_the_schema_in_the_docs_is_that_of_the_types():
    made = "python -c 'from midstream.cli.json_schema import schema; print(schema().decode(), end=\"\")' makes it"
    assert (DOCS / "json.schema.json").read_bytes() == schema(), made
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_description_has_all_of_a_docstring_but_its_example():
    described = {name: shape.get("description", "") for name, shape in SCHEMA["$defs"].items()}
    assert described["JobStatus"] == "The complete status of a job."
    assert described["StateSize"].endswith("\n\n`bytes`: as they are stored.")


def test_every_command_has_a_shape():
    commands = {name for name in app if not name.startswith("-")}
    assert commands == set(SHAPES)
    for command in SHAPES:
        assert "--json" in {name for argument in app[command].assemble_argument_collection() for name in argument.names}


def test_a_schema_refuses_what_another_command_prints():
    """Else the tests below could not fail."""
    for command, other in (("status", {"jobs": []}), ("list", {"job_id": "a"}), ("stop", {"files": []}), ("page", {})):
        validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{command}", "$defs": SCHEMA["$defs"]})
        assert not validator.is_valid({"format_version": 1, **other})
        assert validator.is_valid({"format_version": 1, "error": "why"})
        assert not validator.is_valid({"error": "why"}), "without a version"


def test_of_running_jobs(start, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    job = start("aaaa1111", "flights [bold]\x1b[31m \u202e é")
    (listed,) = said(capsys, "list")
    assert [each["job_id"] for each in listed["jobs"]] == ["aaaa1111"]
    assert listed["jobs"][0]["name"] == "flights [bold]\x1b[31m \u202e é"
    assert said(capsys, "status") == listed["jobs"] or said(capsys, "status")[0]["job_id"] == "aaaa1111"
    assert said(capsys, "checkpoint")[0]["checkpoint"] == "/data/chk-4"
    assert said(capsys, "savepoint", "aaaa", "saved")[0]["savepoint"] == str(tmp_path / "saved")
    assert said(capsys, "rescale", "--parallelism", "3")[0]["parallelism"] == 3
    assert said(capsys, "rescale", "--parallelism", "2")[0]["checkpoint"] is None
    job.refuses = True
    assert "disk is full" in said(capsys, "checkpoint", status=1)[0]["error"]
    job.refuses = False
    assert said(capsys, "page", "aaaa1111", status=1)[0]["error"].endswith("runs without a page")
    job.driver.logs.add(0, Logged((LogLine(5, "eins", "stdout"), LogLine(6, "zwei", "a.b", 30, "map", "m", 0))))
    assert [line["text"] for line in said(capsys, "logs")] == ["eins", "zwei"]
    (stopped,) = said(capsys, "stop")
    assert (stopped["drained"], stopped["checkpoint"], "savepoint" in stopped) == (False, "/data/chk-5", False)


def test_of_lines_of_a_log_that_were_not_kept(capsys, monkeypatch):
    monkeypatch.setattr(job_commands, "named", lambda job: None)
    monkeypatch.setattr(job_commands, "_log_pieces", lambda *given: iter([(job_commands.DroppedLines(7), "")]))
    assert said(capsys, "logs") == [{"format_version": 1, "dropped": 7}]


def test_a_stream_that_fails_says_so_on_its_last_line(capsys, monkeypatch):
    def breaking() -> Any:
        yield job_commands.DroppedLines(1), ""
        raise ClusterError("the driver is gone")

    monkeypatch.setattr(job_commands, "show_logs", lambda *given: Stream(breaking()))
    first, last = said(capsys, "logs", status=2)
    assert first["dropped"] == 1 and last["error"] == "the driver is gone"


def test_of_no_job_and_of_one_that_has_ended(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    assert said(capsys, "list") == [{"format_version": 1, "jobs": [], "unreachable": [], "unreadable": 0}]
    assert "no job runs" in said(capsys, "status", status=2)[0]["error"]
    assert "error" in said(capsys, "history", "x", status=2)[0]
    kept(msgspec.structs.replace(sample(), job_id="abcd", name="delays", state="failed"))
    (tmp_path / "history" / "x.json").write_text("{}")
    (listed,) = said(capsys, "list", "--all")
    assert ([each["state"] for each in listed["jobs"]], listed["unreadable"]) == (["failed"], 1)
    assert said(capsys, "history", "abcd")[0]["name"] == "delays"
    assert "error" in said(capsys, "page", "none", status=2)[0]


def test_of_a_new_job_its_preview_and_its_runs_good_and_failed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert len(said(capsys, "new", "listed_shop")[0]["files"]) == 4
    assert "exists already" in said(capsys, "new", "listed_shop", status=2)[0]["error"]
    (previewed,) = said(capsys, "run", "listed_shop/listed_shop.py", "--preview", "2")
    assert [len(each["rows"]) for each in previewed["streams"]] == [2, 2]
    Path("good.py").write_text(JOB % "lambda row: row", encoding="utf-8")
    Path("bad.py").write_text(JOB % "failing", encoding="utf-8")
    (ran,) = said(capsys, "run", "good.py", "--slots", "process")
    assert (ran["name"], ran["state"], "error" in ran) == ("täglich", "finished", False)
    (failed,) = said(capsys, "run", "bad.py", "--slots", "process", status=1)
    assert failed["state"] == "failed" and "bad row" in failed["error"]
    assert "error" in said(capsys, "run", "none.py", status=2)[0]
    (found,) = said(capsys, "simulate", "good.py", "--seeds", "0:2", "--jobs", "1")
    assert found["ok"] is True
    assert said(capsys, "simulate", "good.py", "--seed", "1", "--trace")[0]["trace"]


def test_of_this_machine_and_of_what_is_no_checkpoint(capsys, tmp_path):
    (looked,) = said(capsys, "doctor", "--slots", "process", "--checkpoint-dir", str(tmp_path))
    assert looked["ok"] is True and {check["verdict"] for check in looked["checks"]} <= {"ok", "warning"}
    assert "error" in said(capsys, "inspect", str(tmp_path), status=2)[0]
    assert "--nope" in said(capsys, "status", "--nope", status=2)[0]["error"]


def test_an_answer_that_is_no_object_is_a_bug():
    with pytest.raises(TypeError, match="list"):
        print_answer(Answer([], ""), json=True, stream=io.StringIO())
