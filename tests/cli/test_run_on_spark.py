"""`midstream run` as people run it: a process of its own, on embedded Spark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from machine import limit_s
from midstream.engine.core.arrow_types import to_list
from midstream.engine.protocol.messages import GetStatus
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job_registry import find
from waiting import alive, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

JOB = """
from midstream import Environment, fixed_restarts

env = Environment(
    "counting", parallelism=2, checkpoint_dir="state", checkpoint_interval="300 ms", restart=fixed_restarts(1, "50 ms")
)


def checked(row):
    if row["n"] == BAD:
        raise ValueError("row %d is bad" % row["n"])
    return row


BAD = {bad}
env.generate(lambda i: {{"n": i}}, count={count}, splits=2, rows_per_s={rate}).map(checked).write_parquet("out")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from midstream.cli.main import main; sys.exit(main())", *arguments]


@pytest.fixture
def start(tmp_path: Path):
    """Start `midstream run` on the job above; killed at the end should it still run."""
    processes: list[subprocess.Popen[str]] = []

    def begin(
        *arguments: str, count: int = 2000, rate: float = 4000, bad: int = -1, master: str = "local[2]", job: str = JOB
    ) -> subprocess.Popen[str]:
        (tmp_path / "job.py").write_text(job.format(count=count, rate=rate, bad=bad))
        processes.append(
            subprocess.Popen(
                command("run", "job.py", "--master", master, *arguments),
                cwd=tmp_path,
                env={**os.environ, "COLUMNS": "160"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def rows_in(directory: Path) -> list[int]:
    return sorted(n for file in directory.glob("**/*.parquet") for n in to_list(pq.read_table(file).column("n")))


def test_a_job_runs_to_its_end_and_is_summed_up(start, tmp_path):
    out, err = start().communicate(timeout=limit_s(120))
    assert re.search(r"counting finished: 2,000 rows read in \d", out), err
    assert "counting running" in err
    assert rows_in(tmp_path / "out") == list(range(2000))


def test_a_function_that_raises_again_and_again_is_shown_with_its_traceback_and_status_1(start):
    process = start(bad=77)
    _, err = process.communicate(timeout=limit_s(120))
    assert process.returncode == 1, err
    assert "in checked" in err
    assert err.index("ValueError: row 77 is bad") < err.index("error: ")
    assert "midstream/worker" not in err


def test_ctrl_c_stops_at_a_checkpoint_from_which_the_job_goes_on_without_loss(start, tmp_path):
    process = start(count=6000, rate=1500)
    for line in process.stderr:
        if "counting running" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=limit_s(120))
    assert process.returncode == 130, err
    assert "resume with: midstream run job.py --master 'local[2]' --from latest" in out
    assert len(rows_in(tmp_path / "out")) < 6000
    again = start("--from", "latest", "--json", count=6000, rate=100_000)
    out, err = again.communicate(timeout=limit_s(120))
    assert again.returncode == 0, err
    status = json.loads(out)  # one object on stdout, whatever Spark prints
    assert (status["state"], status["checkpoints_failed"]) == ("finished", 0)
    assert status["restored_from"]
    assert rows_in(tmp_path / "out") == list(range(6000))


def test_a_slot_that_is_killed_on_an_executor_is_told_as_it_happens_and_spark_adds_nothing(start, tmp_path):
    """The executors know none of the directories that the job imports from."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mods_listed.py").write_text("def same(row): return row")
    (tmp_path / "mods_beside.py").write_text("def listed(): return __import__('mods_listed')")
    job = JOB.replace("    return row\n", "    import mods_beside\n\n    return mods_beside.listed().same(row)\n")
    process = start(
        "--py-files", "lib/mods_listed.py", count=6000, rate=1500, master="local-cluster[2,1,1024]", job=job
    )
    for line in process.stderr:
        if "counting running" in line:
            break
    asking = Client(find("counting"))  # at once: a process of its own may begin when the job has ended
    status = asking.request(GetStatus(), 20).status
    asking.close()
    assert status is not None
    os.kill(status.slot_pids[0], signal.SIGKILL)
    out, err = process.communicate(timeout=limit_s(120))
    assert process.returncode == 0, err
    assert re.search(r"job counting: slot \d+ .* is lost: ", err), err
    assert re.search(r"finished: .*1 restart,", out)
    assert not re.search(r"spark (ERROR|WARN)|java|\tat |did not register", err.partition("\n")[2]), err
    assert rows_in(tmp_path / "out") == list(range(6000))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_spark_starts_ends_it_at_once_and_leaves_no_jvm(number, start):
    process = start()
    driver = psutil.Process(process.pid)
    until("the launch of the JVM", driver.children, 60)
    children = driver.children()
    sent_s = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=limit_s(60))
    assert time.monotonic() - sent_s < 10
    assert (process.returncode, out) == (128 + number, "")
    assert err.splitlines()[1:] == ["error: interrupted"]
    until("the end of the JVM", lambda: not any(alive(child.pid) for child in children), 20)
