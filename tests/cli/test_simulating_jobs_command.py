"""`midstream simulate JOB.py` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from midstream.cli.main import main

GOOD = """
from midstream import Environment
env = Environment("good")
env.from_collection([{"id": i} for i in range(20)], splits=1).uid("rows").map(lambda row: row, {"id": int}).print()
"""
WRONG = """
from midstream import Environment
env = Environment("wrong")
seen = []

def numbered(row):
    seen.append(row["id"])
    return {"id": row["id"], "n": len(seen)}

rows = env.from_collection([{"id": i} for i in range(60)], splits=1).uid("rows")
rows.map(numbered, {"id": int, "n": int}).print().uid("out")
"""


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    return str(path)


def test_a_good_job_is_said_to_be_good(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", good, "--seeds", "0:4", "--jobs", "1"]) == 0
    assert "good: the output with failures equals the output without: 4 runs over 20 rows" in capsys.readouterr().out


def test_a_wrong_job_is_found_explained_and_replayed(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", wrong, "--jobs", "2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["kind"], found["cause"], found["operator"]) == (False, "differs", "state", "map-1")
    assert found["look_at"] == [f"{wrong}:7"]
    seed = found["seed"]
    assert found["replay"] == f"midstream simulate {wrong} --seed {seed}"
    assert main(found["replay"].split()[1:]) == 1
    out = capsys.readouterr().out
    assert f"wrong: seed {seed}: the output is not that of the run without failures" in out
    assert "keeps state in a global variable: seen.append" in out
    assert main(["simulate", wrong, "--seed", str(seed), "--trace", "--tail", "3"]) == 1
    traced = capsys.readouterr().out
    assert traced.startswith(f"seed {seed}: ")
    assert "job ended: finished" in traced


def test_rows_of_a_file_and_columns_that_may_differ(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.DataFrame({"id": [5, 6, 7]}).write_parquet(tmp_path / "rows.parquet")
    arguments = ["simulate", wrong, "--rows", f"rows={tmp_path}/rows.parquet", "--ignore", "out=n", "--seeds", "0:5"]
    assert main([*arguments, "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "5"], "--rows: '5' is not UID=FILE"),
        (["--latest", "out"], "--latest: 'out' is not SINK=COLUMN"),
        (["--seed", "1", "--seeds", "0:3"], "--seeds: give either this or --seed"),
        (["--trace"], "--trace shows a single run"),
        (["--tail", "3"], "--tail: filters the lines of a trace"),
        (["--seconds", "0"], "--seconds: 0"),
        (["--seeds", "3:3"], "is empty"),
        (["--jobs", "0"], "jobs: 0"),
    ],
)
def test_what_cannot_be_is_refused(
    good: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", good, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.py"]) == 2
    assert "no such file" in capsys.readouterr().err
