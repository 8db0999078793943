"""`midstream run --supervise` and `--resume`: drivers that die are started again, with nothing lost and nothing doubled."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import waiting
from machine import limit_s
from midstream.cli.main import main
from midstream.cli.supervisor import BackOff, Signals, supervise
from midstream.runtime.driver.job_registry import list_jobs
from waiting import alive

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]

KEYS = 7
JOB = """
import pyarrow as pa
from midstream import Environment, KeyedProcessFunction, ValueState, no_restart


class Nth(KeyedProcessFunction):
    seen = ValueState(pa.int64(), default=0)

    def process(self, row, ctx):
        if row["n"] == {bad}:
            raise ValueError("row %d is bad" % row["n"])
        self.seen.value += 1
        return {{"n": row["n"], "key": row["key"], "nth": self.seen.value}}


env = Environment(
    "watched", parallelism=2, checkpoint_dir="state", checkpoint_interval="300 ms", restart=no_restart()
)
rows = env.generate(lambda i: {{"n": i, "key": i % {keys}}}, count={count}, splits={splits}, rows_per_s={rate})
rows.key_by("key").process(Nth(), {{"n": int, "key": int, "nth": int}}).write_jsonl("out")
"""
COMMAND = [sys.executable, "-c", "import sys; from midstream.cli.main import main; sys.exit(main())"]
IMPATIENT = """
import sys
from midstream.cli.supervisor import BackOff, Signals, supervise

signals = Signals()
with signals.noted():
    sys.exit(supervise(sys.argv[1:], signals, BackOff(restarts_max=100, first_s=0.01), None))
"""
"""A supervisor that hardly waits, on the command line after it."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, in which `list_jobs` finds its jobs; the job runs beside it."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command on the job above; at the end nothing of it is left."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        command: list[str], *, count: int | None = 6000, rate: float = 2000, bad: int = -1
    ) -> subprocess.Popen[str]:
        splits = 2 if count else 1  # of one split without an end, rows come in order
        Path("job.py").write_text(JOB.format(keys=KEYS, count=count, splits=splits, rate=rate, bad=bad))
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=limit_s(240))
    for job in list_jobs():
        os.kill(job.pid, signal.SIGKILL)


def until(what: str, condition: Callable[[], object]) -> Any:
    """Drivers are started many times here, which takes long on a machine that is busy."""
    return waiting.until(what, condition, 180)


def run(*options: str) -> list[str]:
    return [*COMMAND, "run", "job.py", "--slots", "process", *options]


def driver_of(supervisor: subprocess.Popen[str]) -> int:
    """The process of the driver that has announced itself; 0 as long as none has."""
    children = {child.pid for child in psutil.Process(supervisor.pid).children()}
    return next((job.pid for job in list_jobs() if job.pid in children and alive(job.pid)), 0)


def checkpoints() -> int:
    """The newest that is complete."""
    return max((int(path.parent.name[4:]) for path in Path("state").glob("chk-*/_metadata")), default=0)


def is_beyond(checkpoint: int) -> bool:
    return checkpoints() > checkpoint


def has_ended(pid: int) -> bool:
    return not alive(pid)


def drain(supervisor: subprocess.Popen[str]) -> str:
    """End a job that has no end of its own, and check what has come of it; what it said on standard error."""
    assert main(["stop", "--drain", "watched"]) == 0
    _, err = supervisor.communicate(timeout=limit_s(240))
    assert supervisor.returncode == 0, err
    is_exactly_once()
    return err


def is_exactly_once(count: int | None = None) -> None:
    """Each row once, and each key's counter as if nothing had ever failed. None: rows up to any."""
    rows = [json.loads(line) for file in Path("out").glob("*.jsonl") for line in file.read_text().splitlines()]
    count = count or len(rows)
    assert sorted(row["n"] for row in rows) == list(range(count))
    expected = Counter(n % KEYS for n in range(count))
    for key in range(KEYS):
        assert sorted(row["nth"] for row in rows if row["key"] == key) == list(range(1, expected[key] + 1))


# ---- when it is started again ----


def test_the_delay_doubles_and_there_is_a_limit_within_a_time() -> None:
    back_off = BackOff(restarts_max=8, within_s=600.0)
    assert [back_off.next_s(now_s) for now_s in (0, 5, 10, 20, 40, 80, 160, 300)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert back_off.next_s(599.0) is None
    assert back_off.next_s(604.0) == 60, "the first is forgotten"
    assert back_off.next_s(5000.0) == 1, "all are forgotten"


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 1", 1, 1),
        ("exit 2", 2, 1),
        ("exit 130", 130, 1),
        ("exit 143", 143, 1),
        ("kill -TERM $$", 143, 1),
        ("exit 75; exit 0", 0, 2),
        ("exit 70; exit 0", 0, 2),
        ("kill -KILL $$; exit 1", 1, 2),
        ("kill -SEGV $$; exit 75; exit 0", 0, 3),
        ("exit 75; exit 2; exit 0", 0, 3),
        ("exit 75; kill -KILL $$; exit 75; exit 75", 75, 4),
        ("exit 75; exit 75; exit 75; kill -KILL $$", 137, 4),
    ],
)
def test_how_a_driver_ends_says_whether_it_is_started_again(
    ends: str, status: int, starts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "driver.sh"
    lines = "".join(f"  {number}) {end} ;;\n" for number, end in enumerate(ends.split("; "), 1))
    script.write_text(f"echo started >> {tmp_path}/starts\ncase $(wc -l < {tmp_path}/starts) in\n{lines}esac\n")
    assert supervise(["sh", str(script)], Signals(), BackOff(restarts_max=3, first_s=0.0), None) == status
    assert (tmp_path / "starts").read_text() == "started\n" * starts
    told = [record.getMessage() for record in caplog.records]
    assert sum("it is started again in" in text for text in told) == starts - 1
    assert any("not started again after 3 restarts within 10 min" in text for text in told) == (starts == 4)


def test_a_driver_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    assert supervise(["/nowhere/python"], Signals(), BackOff(restarts_max=1, first_s=0.0), None) == 75
    assert "could not be started (No such file or directory)" in caplog.text


def test_a_signal_while_it_waits_to_start_again_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT.replace("0.01", "600.0"), "sh", "-c", "exit 75"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "is started again in 60 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit_s(240)) == 143
    process.stderr.close()


# ---- jobs ----


def test_a_driver_killed_again_and_again_at_any_moment_loses_and_doubles_nothing(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    dice = random.Random(20261122)
    supervisor = start([sys.executable, "-c", IMPATIENT, *run("--resume")], count=None)
    slots: set[int] = set()
    before = 0
    for kill in range(6):
        driver = until("a driver", lambda: driver_of(supervisor))
        if kill % 2:  # while it runs, at any moment between two checkpoints or in one
            before = checkpoints()
            until("another checkpoint", partial(is_beyond, before))
            time.sleep(dice.uniform(0, 0.4))
        else:  # while it starts
            time.sleep(dice.uniform(0, 1.5))
        if not alive(driver):
            supervisor.kill()
            pytest.fail(f"driver {driver} has died by itself: {supervisor.communicate(timeout=limit_s(60))}")
        slots |= {child.pid for child in psutil.Process(driver).children()}
        os.kill(driver, signal.SIGKILL)
        until("its end", partial(has_ended, driver))
    until("the last driver's checkpoint", lambda: driver_of(supervisor) and checkpoints() > before)
    err = drain(supervisor)
    assert err.count("was killed by SIGKILL") == 6
    assert "resumes from checkpoint" in err
    until("the end of all slots", lambda: not any(map(alive, slots)))
    assert slots and list_jobs() == []


def test_slots_of_a_dead_driver_end_before_the_job_goes_on_for_long(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    """One is stopped meanwhile, as on a machine that stands still: it wakes up to a job that others run."""
    supervisor = start(run("--supervise"), count=None)
    until("a checkpoint", checkpoints)
    driver = driver_of(supervisor)
    zombie, other = (child.pid for child in psutil.Process(driver).children())
    os.kill(zombie, signal.SIGSTOP)
    os.kill(driver, signal.SIGKILL)
    until("the end of the other", lambda: not alive(other))
    before = checkpoints()
    until("checkpoints of the next driver", lambda: checkpoints() > before + 1)
    os.kill(zombie, signal.SIGCONT)
    until("the end of the zombie", lambda: not alive(zombie))
    assert drain(supervisor).count("it is started again in 1 s (restart 1)") == 1


def test_sigterm_stops_at_a_checkpoint_and_resume_goes_on_from_it(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(run("--supervise"), count=None)
    until("a checkpoint", checkpoints)
    supervisor.send_signal(signal.SIGTERM)
    out, err = supervisor.communicate(timeout=limit_s(240))
    assert supervisor.returncode == 143, err
    assert "watched stopped" in out and "started again" not in err
    newest = checkpoints()
    again = start(run("--resume"), count=None)
    until("another checkpoint", lambda: checkpoints() > newest)
    err = drain(again)
    assert f"job watched resumes from checkpoint {newest} in {Path.cwd()}/state" in err
    finished = start(run("--supervise"), count=None)
    out, err = finished.communicate(timeout=limit_s(240))
    assert finished.returncode == 0, err
    assert "it had finished before" in out


def test_a_second_signal_kills_the_driver_and_its_slots_end(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(run("--supervise"), count=None)
    until("a checkpoint", checkpoints)
    driver = psutil.Process(driver_of(supervisor))
    pids = [driver.pid, *(child.pid for child in driver.children())]
    driver.suspend()  # it neither stops at a checkpoint nor hears any signal
    supervisor.send_signal(signal.SIGINT)
    supervisor.send_signal(signal.SIGTERM)
    # of two signals that wait for a process, the later one may be handled first
    assert supervisor.wait(limit_s(240)) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    until("the end of the slots", lambda: not any(map(alive, pids)))


def test_a_supervisor_that_is_killed_takes_its_driver_along_which_stops_at_a_checkpoint(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    supervisor = start(run("--supervise"), count=None)
    until("a checkpoint", checkpoints)
    driver = driver_of(supervisor)
    supervisor.kill()
    out, err = supervisor.communicate(
        timeout=limit_s(240)
    )  # until its driver, which has its outputs, has ended as well
    assert not alive(driver) and "watched stopped" in out, err
    newest = checkpoints()
    again = start(run("--resume"), count=None)
    until("another checkpoint", lambda: checkpoints() > newest)
    drain(again)


def test_a_job_that_fails_by_its_own_fault_is_not_started_again_and_machines_get_one_answer(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    supervisor = start(run("--supervise", "--json"), bad=500)
    out, err = supervisor.communicate(timeout=limit_s(240))
    assert supervisor.returncode == 1, err
    assert "started again" not in err
    answer = json.loads(out)
    assert answer["state"] == "failed" and "row 500 is bad" in answer["error"]


def test_machines_get_the_answer_of_the_last_driver_alone(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(run("--supervise", "--json"), count=None)
    until("a checkpoint", checkpoints)
    newest = checkpoints()
    os.kill(driver_of(supervisor), signal.SIGKILL)
    until("another checkpoint", lambda: checkpoints() > newest + 1)
    assert main(["stop", "--drain", "watched"]) == 0
    out, err = supervisor.communicate(timeout=limit_s(240))
    assert supervisor.returncode == 0, err
    answer = json.loads(out)
    assert answer["state"] == "finished" and re.search(r"chk-\d+$", answer["restored_from"])
    is_exactly_once()


def test_a_job_that_is_started_twice_is_left_to_the_later_one(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Two supervisors do not take the job from each other again and again."""
    first = start(run("--supervise"), count=None)
    until("a checkpoint", checkpoints)
    second = start(run("--supervise"), count=None)
    _, err = first.communicate(timeout=limit_s(240))
    assert first.returncode == 1
    assert "another coordinator has taken over" in err and "started again" not in err
    assert "resume with" not in err, "that would take the job away again"
    drain(second)


# ---- what is refused ----


@pytest.mark.parametrize("options", [("--from", "latest"), ("--fresh",), ("--newer-output", "keep")])
def test_where_to_start_from_is_not_for_a_driver_that_is_started_again(
    options: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.py").write_text(JOB.format(keys=KEYS, count=10, splits=2, rate=10, bad=-1))
    for way in ("--supervise", "--resume"):
        assert main(["run", "job.py", "--slots", "process", way, *options]) == 2
        assert f"leave {options[0]} out" in capsys.readouterr().err


def test_a_job_that_is_refused_is_not_started_again(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start([*COMMAND, "run", "nowhere.py", "--supervise=true"])
    _, err = supervisor.communicate(timeout=limit_s(240))
    assert supervisor.returncode == 2
    assert "nowhere.py" in err and "started again" not in err


def test_without_a_checkpoint_directory_there_is_nothing_to_resume(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.py").write_text(
        JOB.format(keys=KEYS, count=10, splits=2, rate=10, bad=-1).replace('checkpoint_dir="state", ', "")
    )
    assert main(["run", "job.py", "--slots", "process", "--resume"]) == 2
    assert "has no checkpoint_dir, so there is nothing to resume from" in capsys.readouterr().err


def test_a_bug_of_ours_is_shown_and_does_not_look_like_a_failed_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torn(also_ended: bool) -> None:
        raise MemoryError("no more of it")

    monkeypatch.setattr("midstream.cli.commands.job_commands.list_jobs", torn)
    assert main(["list"]) == 70
    assert "MemoryError: no more of it" in capsys.readouterr().err
