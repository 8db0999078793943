"""`midstream new` and `midstream run --preview`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import midstream
from machine import limit_s
from midstream.cli.main import main


def test_what_is_written_passes_its_own_tests_and_can_be_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_shop"]) == 0
    assert "next: cd my_shop && pytest" in capsys.readouterr().out
    path = os.pathsep.join([str(Path(midstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my_shop",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert main(["run", "my_shop/my_shop.py", "--preview", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["streams"]
    assert [len(each["rows"]) for each in shown] == [2, 2]
    assert not (tmp_path / "my_shop" / "spent").exists()


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.py").write_text("mine")
    assert main(["new", "shop"]) == 2
    assert "shop exists already" in capsys.readouterr().err
    assert (tmp_path / "shop" / "shop.py").read_text() == "mine"
    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["shop.py"]


@pytest.mark.parametrize(
    "name",
    [
        "my-shop",
        "../shop",
        "",
        "2shop",
        "_",
        "__init__",
        "__main__",
        "käse",
        "class",
        "match",
        "True",
        "json",
        "JSON",
        "midstream",
        "pytest",
        "PyTest",
        "_pytest",
        "polars",
        "pyarrow",
        "conftest",
        "test_shop",
        "con",
        "a b",
        "shop\n",
    ],
)
def test_a_name_that_is_no_modules_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert "cannot be the name of a job's file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_which_only_the_current_directory_has_a_module_is_free(tmp_path, monkeypatch, capsys):
    (tmp_path / "shop.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["new", "shop"]) == 0


JOB = """
from midstream import Environment

def broken(row):
    return {"n": 1 // row["n"]}

env = Environment("job")
env.from_collection([{"n": 1}, {"n": 0}]).map(broken).print()
"""


@pytest.fixture
def job(tmp_path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def test_a_function_that_fails_in_a_preview_is_told_with_its_line_and_its_row(job, capsys):
    assert main(["run", job, "--preview", "5"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'job.py", line 5, in broken' in err
    assert "{'n': 0}" in err
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preview", "0"], "0 is not a number of rows"),
        (["--preview", "many"], "'many' is not a whole number"),
        (["--preview", "5", "--parallelism", "2"], "--preview starts no job, so --parallelism has no effect"),
        (["--preview", "5", "--from", "latest"], "--preview starts no job, so --from has no effect"),
        (["--preview", "5", "--fresh"], "--preview starts no job, so --fresh has no effect"),
    ],
    ids=["none", "text", "parallelism", "from", "fresh"],
)
def test_arguments_that_make_no_sense_with_a_preview_are_refused(job, capsys, arguments, says):
    assert main(["run", job, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err.replace("\n", " ")
