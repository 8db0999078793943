"""The JVM of an embedded Spark: where it may lie, and how what it prints reaches this program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq
import pytest

import midstream
from machine import limit_s
from midstream.engine.core.arrow_types import to_list
from midstream.spark.jvm import Copier, log_option

ODD = "a b %20 #1 'q' é"
"""A name with all that shells, URIs and option lists take for their own."""

JOB = """
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import beside
from midstream import Environment
from midstream.spark.session import get_session

here = Path(__file__).parent
(here / "in").mkdir(exist_ok=True)
pq.write_table(pa.table({"n": range(100)}), here / "in" / "numbers %20 #1.parquet")
env = Environment("odd", parallelism=2, checkpoint_dir=here / "state", checkpoint_interval="300 ms")
env.read_files(here / "in").map(beside.same).write_parquet(here / "out")
env.from_dataframe(get_session("local[2]").range(100)).write_parquet(here / "staged")
"""


def rows_in(directory: Path) -> list[int]:
    return sorted(n for file in directory.glob("*.parquet") for n in to_list(pq.read_table(file).column(0)))


@pytest.mark.spark
@pytest.mark.timeout(200)
def test_a_job_runs_wherever_it_its_data_and_midstream_itself_lie(tmp_path: Path) -> None:
    here = tmp_path / ODD
    here.mkdir()
    (here / "site").mkdir()
    (here / "site" / "midstream").symlink_to(Path(midstream.__file__).parent)
    (here / "job of mine.py").write_text(JOB)
    (here / "beside.py").write_text("def same(row):\n    return row\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from midstream.cli.main import main; sys.exit(main())",
            "run",
            "job of mine.py",
        ],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(here / "site"), "MIDSTREAM_HOME": str(here / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s(180),
    )
    assert done.returncode == 0, done.stderr
    assert rows_in(here / "out") == rows_in(here / "staged") == list(range(100))
    assert "incubator" not in done.stderr


def test_the_log_settings_are_a_uri_in_which_nothing_is_left_that_cuts_an_option(tmp_path: Path) -> None:
    path = tmp_path / ODD / "log4j2.properties"
    option, _, uri = log_option(path).partition("=")
    assert option == "-Dlog4j2.configurationFile"
    assert not set(uri) & set(" '\"#") and uri.isascii()
    assert unquote(urlparse(uri).path) == str(path)


def test_what_the_jvm_prints_is_copied_but_for_its_word_about_incubator_modules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()
    copier = Copier(reading)
    copier.start()
    os.write(writing, b"WARNING: Using incubator modules: jdk.incubator.vector\n{'n': 1}\nno newline at the end")
    os.close(writing)
    copier.join(limit_s(10))
    assert capsys.readouterr().err == "{'n': 1}\nno newline at the end"


def test_at_the_end_what_was_printed_before_is_copied_and_nothing_after(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    copier = Copier(reading)
    copier.start()
    os.write(writing, b"last row\n")
    copier.finish(lambda words: os.write(writing, f"{words}\nERROR while Spark stops\n".encode()))
    os.close(writing)
    copier.join(limit_s(10))
    assert capsys.readouterr().err == "last row\n"


def test_an_end_does_not_wait_for_a_jvm_that_hangs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.spark.jvm.LAST_OUTPUT_WAIT_S", 0.05)
    reading, writing = os.pipe()
    copier = Copier(reading)
    copier.start()
    copier.finish(lambda words: None)
    os.write(writing, b"too late\n")
    os.close(writing)
    copier.join(limit_s(10))
    assert capsys.readouterr().err == ""
