"""Sinks that commit on slots, in real jobs on processes: slots and drivers die in the midst, every row is there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import slot_committing
from slot_committing import book_of, hold, job, rows_at

from jobs import check_gapless
from machine import limit_s
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import alive, until

pytestmark = pytest.mark.systems

ROWS = 20_000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def held(place: Path) -> list[dict[str, Any]]:
    """Commits that wait, as `hold` says."""
    open_: dict[tuple[int, int, int], dict[str, Any]] = {}
    for line in book_of(place):
        if line["what"] in ("hold", "end"):
            key = line["pid"], line["lane"], line["checkpoint"]
            if line["what"] == "hold":
                open_[key] = line
            else:
                open_.pop(key, None)
    return list(open_.values())


def test_commits_run_in_slots_each_lane_in_its_own_and_in_the_order_of_checkpoints(place, checkpoints):
    running = job(place, checkpoints).start(slots=ProcessSlots())
    until("slots are there", lambda: len(set(running.status().slot_pids) - {0}) == 2)
    slots = set(running.status().slot_pids)
    until("rows are committed", lambda: len(rows_at(place)) >= ROWS)
    running.stop(drain=True, timeout_s=limit_s(60))
    status = running.status()
    assert status.state == "finished" and status.restarts == 0
    check_gapless(rows_at(place))
    book = book_of(place)
    assert os.getpid() not in slots
    assert {line["pid"] for line in book} == slots
    for lane in (0, 1):
        of_lane = [line for line in book if line.get("lane") == lane]
        assert len({line["pid"] for line in of_lane}) == 1, "one slot commits it from the first to the last"
        steps = [(line["checkpoint"], line["what"]) for line in of_lane]
        assert steps == sorted(steps), "a commit begins when the one before has ended"
    assert len([line for line in book if line["what"] == "open"]) == 2


def test_a_slot_that_is_killed_in_the_midst_of_a_commit_leaves_no_row_behind_and_doubles_none(place, checkpoints):
    hold(place, from_checkpoint=3)
    running = job(place, checkpoints).start(slots=ProcessSlots())
    victim = until("a commit is held", lambda: held(place))[0]
    os.kill(victim["pid"], signal.SIGKILL)
    until("the job restarts", lambda: running.status().restarts >= 1)
    (place / "hold").unlink()
    until("rows are committed", lambda: len(rows_at(place)) >= ROWS)
    running.stop(drain=True, timeout_s=limit_s(60))
    assert running.status().state == "finished"
    check_gapless(rows_at(place))
    again = [line for line in book_of(place) if line["what"] == "end" and line["checkpoint"] == victim["checkpoint"]]
    assert victim["lane"] in {line["lane"] for line in again}
    assert victim["pid"] not in {line["pid"] for line in again if line["lane"] == victim["lane"]}


def test_commits_are_told_to_stop_with_their_attempt_and_their_committers_closed(place, checkpoints):
    hold(place, from_checkpoint=3)
    running = job(place, checkpoints).start(slots=ProcessSlots())
    until("both lanes are held", lambda: len({line["lane"] for line in held(place)}) == 2)
    victim, other = (line["pid"] for line in held(place)[:2])
    os.kill(victim, signal.SIGKILL)
    until("the other's is closed", lambda: {"what": "close", "pid": other} in book_of(place))
    (place / "hold").unlink()
    until("rows are committed", lambda: len(rows_at(place)) >= ROWS)
    running.stop(drain=True, timeout_s=limit_s(60))
    assert running.status().state == "finished"
    check_gapless(rows_at(place))


def test_what_a_killed_driver_has_not_committed_is_committed_by_slots_of_the_next_start(place, checkpoints):
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "from pathlib import Path; from slot_committing import job; from midstream.runtime.process.process_slots import ProcessSlots; "
        f"job(Path({str(place)!r}), Path({str(checkpoints)!r}), rows_per_s=4_000).execute(slots=ProcessSlots())"
    )
    directory = str(Path(slot_committing.__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join([directory, environment["PYTHONPATH"]])
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until("something is committed", lambda: rows_at(place))
        hold(place)
        until("a commit is held", lambda: held(place))
    finally:
        driver.kill()
        driver.wait(limit_s(30))
    orphans = {line["pid"] for line in book_of(place)}
    until("its slots have ended", lambda: not any(map(alive, orphans)))
    before = rows_at(place)
    assert len(before) > 0
    (place / "hold").unlink()
    running = job(place, checkpoints).start(slots=ProcessSlots(), restore_from="latest")
    until("more is committed", lambda: len(rows_at(place)) > len(before) + ROWS)
    running.stop(drain=True, timeout_s=limit_s(60))
    assert running.status().state == "finished"
    assert set(before) < set(rows_at(place))
    check_gapless(rows_at(place))
    assert os.getpid() not in {line["pid"] for line in book_of(place)}


def test_a_stopped_job_has_committed_all_of_its_last_checkpoint_and_goes_on_at_another_parallelism(place, checkpoints):
    running = job(place, checkpoints, rows_per_s=4_000).start(slots=ProcessSlots())
    until("something is committed", lambda: rows_at(place))
    running.stop(timeout_s=limit_s(60))
    assert not held(place)
    stopped = rows_at(place)
    check_gapless(stopped)
    running = job(place, checkpoints).start(slots=ProcessSlots(), restore_from="latest", parallelism=3)
    until("more is committed", lambda: len(rows_at(place)) > len(stopped) + ROWS)
    running.stop(drain=True, timeout_s=limit_s(60))
    assert running.status().state == "finished"
    check_gapless(rows_at(place))
    assert {line["lane"] for line in book_of(place) if line["what"] == "end"} == {0, 1, 2}
