"""`midstream inspect JOB.py --from CHECKPOINT`: what becomes of each state, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from midstream import testing
from midstream.api.job_file import load_job
from midstream.cli.json_schema import schema
from midstream.cli.main import main
from midstream.engine.checkpoint.store import claim_directory, publish, take_epoch
from midstream.runtime.storage.file_storage import FileStorage

PROGRAM = """
from dataclasses import dataclass
import pyarrow as pa
from midstream import Count, Environment, KeyedProcessFunction, ListState, ValueState, count

@dataclass
class Visit:
    page: str
    %(field)s

class Visits(KeyedProcessFunction):
    %(states)s

    def process(self, row, ctx):
        %(body)s
        yield row

env = Environment("visits", checkpoint_dir=%(directory)r)
rows = env.from_collection([{"k": n %% 3, "n": n} for n in range(6)], splits=1).uid("rows").key_by("k")
rows.process(Visits(), {"k": int, "n": int}).uid("visits").print().uid("out")
%(more)s
"""
BEFORE = {
    "field": "seconds: float",
    "states": """n = ValueState(pa.int32())
    visits = ListState(Visit)
    last = ValueState(int)""",
    "body": """self.n.value = self.last.value = row["n"]
        self.visits.append({"page": "a", "seconds": 1.5})""",
    "more": 'rows.window(count(5)).aggregate(c=Count()).uid("fives").print().uid("printed")',
}
AFTER = {
    "field": "pages: int = 1",
    "states": """n = ValueState(int)
    visits = ListState(Visit)
    newest = ValueState(str, was="last", migrate=str)
    more = ValueState(int)""",
    "body": "pass",
    "more": BEFORE["more"],
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A checkpoint directory with one checkpoint of BEFORE."""
    directory = tmp_path / "state"
    with testing.job(load_job(program(tmp_path, **BEFORE), [])) as job:
        metadata = job.feed_all().snapshot().metadata
    storage = FileStorage(str(directory))
    claim_directory(storage, "visits")
    publish(storage, msgspec.structs.replace(metadata, epoch=take_epoch(storage, metadata.job_id)))
    return directory


def program(tmp_path: Path, **parts: str) -> Path:
    path = tmp_path / f"visits_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(PROGRAM % {"directory": str(tmp_path / "state"), **parts}, encoding="utf-8")
    return path


def report(capsys: pytest.CaptureFixture[str], status: int, path: Path, *options: str) -> dict[str, Any]:
    assert main(["inspect", str(path), *options, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    shape = {"$ref": "#/$defs/inspect", "$defs": json.loads(schema())["$defs"]}
    jsonschema.Draft202012Validator(shape).validate(found)
    return found


def test_what_becomes_of_each_state_is_shown(checkpoints, tmp_path, capsys):
    path = program(tmp_path, **AFTER)
    found = report(capsys, 2, path)
    assert "list state 'visits' has what would be lost: field seconds dropped" in found["problem"]
    found = report(capsys, 0, path, "--allow-dropped-state", "--from", str(checkpoints / "chk-1"))
    assert (found["ok"], found["problem"], found["checkpoint_id"], found["job_name"]) == (True, "", 1, "visits")
    states = {(state["uid"], state["state"]): state for state in found["states"]}
    n = states["visits", "value state 'n'"]
    assert (n["outcome"], n["changes"], n["rows"]) == ("converted", ["widened int32 → int64"], 3)
    visits = states["visits", "list state 'visits'"]
    assert (visits["changes"], visits["losses"]) == (["field pages added (default 1)"], ["field seconds dropped"])
    newest = states["visits", "value state 'newest'"]
    assert (newest["was"], newest["changes"]) == ("last", ["converted by migrate (int64 → large_string)"])
    assert states["visits", "value state 'more'"]["outcome"] == "new"
    assert states["fives", "its state"]["outcome"] == "restored"
    assert main(["inspect", str(path), "--from", "latest", "--allow-dropped-state"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for line in (
        "visits value state 'n' 3 widened int32 → int64",
        "visits list state 'visits' 6 field pages added (default 1); field seconds dropped",
        "visits value state 'newest' 3 renamed from last; converted by migrate (int64 → large_string)",
        "visits value state 'more' 0 new, starts empty",
        "the job can resume there",
    ):
        assert line in out


def test_what_is_refused_is_shown_with_the_way_out(checkpoints, tmp_path, capsys):
    few = program(tmp_path, **{**BEFORE, "states": "n = ValueState(pa.int16())", "body": "pass", "more": ""})
    found = report(capsys, 2, few)
    outcomes = {(state["uid"], state["state"]): (state["outcome"], state["refusal"]) for state in found["states"]}
    assert found["ok"] is False and "'fives'" in found["problem"]
    outcome, refusal = outcomes["visits", "value state 'n'"]
    assert (
        outcome == "refused" and "int32 cannot be converted to int16 without loss; convert the values with" in refusal
    )
    assert outcomes["visits", "value state 'last'"][0] == outcomes["fives", "its state"][0] == "refused"
    found = report(capsys, 2, few, "--allow-dropped-state")
    dropped = {(state["uid"], state["state"]) for state in found["states"] if state["outcome"] == "dropped"}
    assert dropped >= {("visits", "value state 'last'"), ("fives", "its state")}
    assert main(["inspect", str(few)]) == 2
    assert "the job cannot resume there: " in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    for arguments, match in (
        ([str(tmp_path), "--from", "latest"], "is not the Python file of a job"),
        ([str(program(tmp_path, **BEFORE))], "no checkpoint has been completed here yet"),
        ([str(program(tmp_path, **BEFORE)), "--from", str(tmp_path / "nothing")], "no checkpoint has been completed"),
        ([str(tmp_path / "none.py")], "none.py"),
    ):
        assert main(["inspect", *arguments]) == 2
        assert match in " ".join(capsys.readouterr().err.split())
