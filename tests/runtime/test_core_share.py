"""A clock that is as slow as its thread is kept off its core: what is judged by it does not shrink on a busy machine."""

from __future__ import annotations

import threading
import time

import pytest

from midstream.runtime.core_share import POLL_INTERVAL_S, SHARE_MIN, CoreShare, Schedule
from scarce_cores import Machine


def took_s(machine: Machine, clock: CoreShare, seconds: float, steps: int) -> float:
    began_s = clock.own_core_s()
    for _ in range(steps):
        machine.work(seconds)
        clock.own_core_s()
    return clock.own_core_s() - began_s


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_work_takes_as_long_as_on_a_core_of_its_own(share: float) -> None:
    machine = Machine(share)
    clock = machine.clock()
    took_s(machine, clock, 0.004, 500)
    assert took_s(machine, clock, 0.004, 500) == pytest.approx(2.0, rel=0.1)


def test_waiting_for_peers_that_are_kept_off_their_cores_as_well_counts_as_little() -> None:
    machine = Machine(0.1)
    clock = machine.clock()
    took_s(machine, clock, 0.004, 500)
    began_s = clock.own_core_s()
    machine.sleep(0.2)
    assert clock.own_core_s() - began_s == pytest.approx(0.02, rel=0.5)


def test_on_a_quiet_machine_sleeping_is_no_wait_for_a_core() -> None:
    machine = Machine(1.0)
    clock = machine.clock()
    began_s = clock.own_core_s()
    for _ in range(100):
        machine.work(0.001)
        machine.sleep(0.05)
        clock.own_core_s()
    assert clock.own_core_s() - began_s == pytest.approx(5.1)


def test_the_clock_is_never_slower_than_its_bound_and_is_right_again_when_the_machine_is_quiet() -> None:
    machine = Machine(0.001)
    clock = machine.clock()
    took_s(machine, clock, 0.001, 100)
    assert clock.share == SHARE_MIN
    machine.share = 1.0
    took_s(machine, clock, 0.01, 500)
    assert clock.share > 0.95


def test_it_never_goes_back_when_the_share_falls() -> None:
    machine = Machine(1.0)
    clock = machine.clock()
    said = []
    for step in range(2000):
        machine.share = 1.0 if step % 100 < 50 else 0.02
        machine.work(POLL_INTERVAL_S * (step % 7) / 13)
        said.append(clock.own_core_s())
    assert said == sorted(said)


def test_where_the_system_does_not_say_it_is_the_monotonic_clock() -> None:
    machine = Machine(0.1, known=False)
    clock = machine.clock()
    assert took_s(machine, clock, 0.004, 500) == pytest.approx(20.0)


def test_the_system_says_how_long_this_thread_has_worked_and_waited() -> None:
    schedule = Schedule()
    before = schedule.read()
    if before is None:
        pytest.skip("this system does not say")
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass
    after = schedule.read()
    assert after is not None
    assert after[0] - before[0] >= 0.03 and after[1] >= before[1]
    heard: list[tuple[float, float] | None] = []
    other = threading.Thread(target=lambda: heard.append(schedule.read()))
    other.start()
    other.join()
    assert heard[0] is not None and heard[0] >= after, "it stays with the thread that has read first"
    schedule.close()
    schedule.close()


def test_a_file_that_is_not_there_or_says_something_else_is_no_schedule(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("midstream.runtime.core_share.SCHEDSTAT", str(tmp_path / "gone"))
    assert Schedule().read() is None
    (tmp_path / "odd").write_text("nothing\n")
    monkeypatch.setattr("midstream.runtime.core_share.SCHEDSTAT", str(tmp_path / "odd"))
    odd = Schedule()
    assert odd.read() is None and odd.read() is None
    odd.close()
