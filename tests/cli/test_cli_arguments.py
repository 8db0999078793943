"""What the command line says to arguments that it cannot take: a clear error, exit status 2, nothing on stdout."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from midstream.cli.main import main

COMMANDS = ("run", "new", "list", "status", "checkpoint", "savepoint", "stop", "inspect", "simulate")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu", "job.py"], ['Unknown command "rnu"', 'Did you mean "run"?']),
        (["frobnicate"], ['Unknown command "frobnicate"', "run, new, list, status"]),
        (["--hlep"], ["Unknown option: --hlep", "Did you mean --help?"]),
        (["run", "job.py", "--paralelism", "3"], ["--paralelism", "Did you mean --parallelism?"]),
        (["run", "job.py", "--parallelism", "two"], ["--parallelism", "'two' is not a whole number"]),
        (["run", "job.py", "--parallelism", "1.5"], ["--parallelism", "'1.5' is not a whole number"]),
        (["run", "job.py", "--parallelism"], ["--parallelism requires an argument"]),
        (["run"], ["JOB requires an argument", "midstream run --help"]),
        (["run", "a.py", "b.py"], ["midstream run takes no further argument: b.py"]),
        (["stop", "--drian"], ["Did you mean --drain?"]),
        (["simulate"], ["JOB requires an argument", "midstream simulate --help"]),
        (["simulate", "job.py", "--seed", "0", "--seeds", "0:3"], ["--seeds: give either this or --seed"]),
        (["simulate", "job.py", "--tail", "0", "--channel", "1::"], ["--channel, --tail: filters", "add --trace"]),
        (["rescale"], ["give the new parallelism", "midstream rescale --parallelism 4"]),
        (["rescale", "--parallelism", "0"], ["parallelism 0 is not a positive whole number"]),
        (["rescale", "--parallelism", "40000"], ["parallelism 40000 is above max_parallelism 32768"]),
        (["inspect"], ["CHECKPOINT requires an argument"]),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_what_to_do(arguments, says, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in says:
        assert part in err.replace("\n", " ")


def test_machines_get_the_problem_as_an_object(capsys):
    assert main(["status", "--json", "--nope"]) == 2
    out, err = capsys.readouterr()
    assert "--nope" in json.loads(out)["error"]
    assert err.startswith("error: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_speaks_to_machines(command, capsys):
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_help_fills_its_lines_and_keeps_the_options_of_a_trace_apart(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", "--help"]) == 0
    out = capsys.readouterr().out
    described = out[out.index("Its sources") : out.index("╭")].strip().splitlines()
    assert all(len(line) > 60 for line in described[:-1]), described
    before, of_a_trace = out.split("Options for the trace of one run")
    assert "--ignore" in before and "--tail" in of_a_trace and "--tail" not in before


def test_the_package_can_be_run_like_the_command():
    done = subprocess.run([sys.executable, "-m", "midstream", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("midstream 0.")


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert command in out


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("midstream 0.")


def test_a_reader_that_goes_away_is_no_error():
    code = "import sys; from midstream.cli.main import main; sys.exit(main(['--help']))"
    done = subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "{code}" | true'], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("parallelism", ["0", "-1"])
def test_a_parallelism_that_cannot_be_is_refused_before_spark_is_started(parallelism, tmp_path, capsys):
    job = tmp_path / "job.py"
    job.write_text("from midstream import Environment\nenv = Environment()\nenv.from_collection([{'n': 1}]).print()\n")
    assert main(["run", str(job), f"--parallelism={parallelism}"]) in (1, 2)
    assert f"parallelism {parallelism} is not a positive whole number" in capsys.readouterr().err


def test_inspecting_a_plain_file_says_that_it_is_no_directory(tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("nothing")
    assert main(["inspect", str(file)]) == 2
    assert f"{file}: a part of the path is a file, not a directory" in capsys.readouterr().err
