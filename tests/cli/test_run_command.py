"""`midstream run` around a job: what it prints, says and returns for each way a job can end."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from dataclasses import asdict

import msgspec
import pytest

from midstream.api import job_file
from midstream.cli import follow as following
from midstream.cli.main import main
from midstream.engine.checkpoint.store import FencedError
from midstream.engine.core.errors import ConfigError, JobError
from sample_status import later


class Job:
    """Goes through these statuses; the last one stays."""

    def __init__(self, *statuses, error=None):
        self._statuses = list(statuses)
        self._error = error
        self.cancelled = ""
        self.checkpoint_dir = "/data/flights"
        self.page = None

    def status(self):
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]

    def stop(self, drain=False):
        self._statuses = [msgspec.structs.replace(self._statuses[-1], state="stopped")]
        return "/data/flights/chk-4"

    def awaited(self):
        return nullcontext()

    def wait(self, timeout_s=None):
        if self._error is not None:
            raise self._error
        if self._statuses[-1].state == "failed":
            raise JobError(self._statuses[-1].failures[0].summary)
        return self._statuses[-1]

    def cancel(self, reason):
        self.cancelled = reason


class Running:
    """Runs the command line on a job, and keeps what the job was started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.overrides: dict[str, object] = {}
        self.page: str | None = None

    def __call__(self, job, *arguments, on_start=lambda: None):
        running = self

        class Environment:
            resumption = ""

            def submission(self, options):
                running.overrides = asdict(options)
                return self

            def start(self, page):
                running.page = page
                on_start()
                return job

        self._monkeypatch.setattr(job_file, "load_job", lambda path, modules: Environment())
        status = main(["run", "job.py", *arguments])
        out, err = self._capsys.readouterr()
        return status, " ".join(out.split()), " ".join(err.split())


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line on a job; its exit status, stdout and stderr."""
    monkeypatch.setattr(following, "REFRESH_S", 0.0)
    monkeypatch.setattr(following, "POLL_S", 0.001)

    return Running(monkeypatch, capsys)


def ended(status, state, **changes):
    return msgspec.structs.replace(later(status, 20, 0), state=state, **changes)


def test_a_job_that_finishes_leaves_a_summary_and_status_0(status, run):
    code, out, err = run(Job(status, ended(status, "finished")))
    assert code == 0
    assert (
        "flights finished: 1,234,567 rows read in 1 min 20 s, 1 restart, after which rows are read again and counted again"
        in out
    )
    assert "flights running" in err


def test_a_job_that_had_finished_says_that_nothing_was_run(status, run):
    path = "/data/flights/chk-9"
    last = ended(status, "finished", had_finished=True, restored_from=path)
    code, out, _ = run(Job(last), "--from", "latest")
    assert code == 0
    assert f"it had finished before, in {path}, so nothing was run; to run it again, start it with --fresh" in out


def test_for_machines_the_last_status_is_all_there_is_on_stdout(status, run):
    code, out, err = run(Job(status, ended(status, "finished")), "--json")
    assert code == 0
    assert json.loads(out)["state"] == "finished"
    assert err == ""


def test_what_the_command_line_says_goes_over_what_the_file_says(status, run):
    run(
        Job(ended(status, "finished")),
        "--from",
        "latest",
        "--parallelism",
        "3",
        "--master",
        "local[3]",
        "--aligned-timeout",
        "1 s",
        "--allow-dropped-state",
        "--newer-output",
        "rollback",
        "--page",
        "127.0.0.1:8080",
    )
    assert run.page == "127.0.0.1:8080"
    assert run.overrides == {
        "parallelism": 3,
        "master": "local[3]",
        "restore_from": "latest",
        "allow_dropped_state": True,
        "newer_output": "rollback",
        "fresh": False,
        "resume": False,
        "checkpoint_dir": None,
        "aligned_timeout": "1 s",
        "slots": None,
    }


def test_ctrl_c_stops_the_job_and_says_how_to_go_on(status, run):
    class Interrupted(Job):
        interrupted = False

        def status(self):
            if not self.interrupted:
                self.interrupted = True
                signal.raise_signal(signal.SIGINT)
            return super().status()

    code, out, err = run(Interrupted(status), "--parallelism", "2")
    assert code == 130
    assert "stopping at a checkpoint" in err
    assert "resume with: midstream run job.py --parallelism 2 --from latest" in out


def test_a_job_that_cannot_be_stopped_cleanly_is_cancelled(status, run):
    class Stubborn(Job):
        interrupted = False

        def status(self):
            if not self.interrupted:
                self.interrupted = True
                signal.raise_signal(signal.SIGINT)
            return super().status()

        def stop(self, drain=False):
            raise JobError("the checkpoint failed")

    job = Stubborn(status)
    code, _, err = run(job)
    assert code == 130
    assert job.cancelled
    assert "could not be stopped cleanly: the checkpoint failed" in err
    assert "resume with: midstream run job.py --from latest" in err


def test_a_job_that_fails_shows_the_users_traceback_then_why_and_status_1(status, run):
    code, out, err = run(Job(status, ended(status, "failed")))
    assert code == 1
    assert out == ""
    assert err.index("line 3, in parse") < err.index("error: operator 'parse': ValueError: bad row 17")
    assert "hint: resume with: midstream run job.py --from latest" in err


def test_a_job_that_another_start_has_taken_over_is_not_to_be_resumed(status, run):
    error = FencedError("another coordinator has taken over")
    code, _, err = run(Job(status, ended(status, "failed", restarts=1), error=error))
    assert code == 1
    assert "hint: the newer start runs the job: there is nothing to do here" in err
    assert "--from latest" not in err


def test_a_job_that_was_restarted_says_why_it_is_not_any_more(status, run):
    failed = ended(status, "failed", restarts=9)
    last_word = "the same failure 10 times in a row without a checkpoint in between: bad row 17"
    code, _, err = run(Job(failed, error=JobError(last_word)))
    assert (code, f"error: {last_word}" in err) == (1, True), err
    code, out, _ = run(Job(failed, error=JobError(last_word)), "--json")
    assert (code, json.loads(out)["error"]) == (1, last_word)


def test_a_job_that_never_ran_is_bad_input(status, run):
    failed = ended(status, "failed", failures=())
    code, _, err = run(Job(failed, error=ConfigError("max_parallelism 128 is not 64")))
    assert code == 2
    assert "error: max_parallelism 128 is not 64" in err


def test_without_completed_checkpoints_there_is_nothing_to_go_on_from(status, run):
    none = {"checkpoints_completed": 0, "last_checkpoint": None}
    assert "no checkpoint was completed" in run(Job(ended(status, "failed", **none)))[2]
    assert "no checkpoint directory" in run(Job(ended(status, "failed", checkpoint_dir=None, **none)))[2]


def test_a_signal_while_the_job_is_being_started_is_answered_and_is_the_exit_status(status, run):
    class Starting(Job):
        """Not started yet when the signal comes."""

        @property
        def status(self):
            raise AssertionError("there is no job to ask")

    number = signal.SIGTERM
    code, out, err = run(Starting(status), on_start=lambda: signal.raise_signal(number))
    assert (code, out) == (128 + number, "")
    assert err.endswith("error: interrupted")
