"""A driver and its slots as real processes: they come, are lost, are asked for again, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from machine import limit_s
from midstream.engine.coordinator.events import (
    ClientRequested,
    CloseSlot,
    CoordinatorEvent,
    Instruction,
    JobPlan,
    SlotsGone,
    Started,
)
from midstream.engine.core.errors import ClusterError, InvariantError, JobError
from midstream.engine.protocol.framing import MESSAGE, ProtocolViolation, frame
from midstream.engine.protocol.handshake import Dialer, Identity, Role
from midstream.engine.protocol.messages import Deployed, DoStop, GetStatus, Register, SlotStatus
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.control_server import ControlServer
from midstream.runtime.driver.driver import Driver
from midstream.runtime.driver.job import Job
from midstream.runtime.network.tls import JobKeys
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.process.slot_main import run_slot
from midstream.runtime.process.slot_provider import OnFailed, OnLeaving, SlotLaunch
from scripted_coordinator import Scripted, plan
from waiting import alive, until

Start = Callable[[JobPlan], tuple[Driver, Scripted]]


@pytest.fixture
def start() -> Iterator[Start]:
    drivers: list[Driver] = []

    def begin(job: JobPlan) -> tuple[Driver, Scripted]:
        scripted: list[Scripted] = []

        def make(plan: JobPlan, now_ms: int) -> Scripted:
            scripted.append(Scripted(plan, now_ms))
            return scripted[0]

        driver = Driver(job, ProcessSlots(), make)
        driver.start()
        drivers.append(driver)
        return driver, scripted[0]

    yield begin
    for driver in drivers:
        driver.cancel("the test is over")
        assert driver.ended.wait(limit_s(20))


def test_slots_register_say_that_they_live_and_are_gone_when_the_job_ends(start: Start) -> None:
    driver, coordinator = start(plan(slots=2, heartbeat_timeout_s=2.0))
    job = Job(driver)
    until("two slots", lambda: len(coordinator.slots) == 2)
    pids = list(coordinator.slots.values())
    until("heartbeats of both", lambda: {said.slot for said in coordinator.said} == {0, 1})
    beat = next(said.message for said in coordinator.said)
    assert isinstance(beat, SlotStatus) and beat.memory_bytes > 10**7
    assert job.status().slots_needed == 2 and not job.ended
    assert job.stop() is None
    assert job.ended and not any(alive(pid) for pid in pids)
    assert job.wait(1).job_id == "job-0001"
    assert not coordinator.lost and not coordinator.failed
    with pytest.raises(JobError, match="has ended: it was stopped"):
        job.checkpoint()


def test_a_status_that_is_the_last_one_comes_when_everything_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[Callable[[], None]] = []
    monkeypatch.setattr(ControlServer, "release_all", lambda _server, done: released.append(done))
    driver, coordinator = start(plan(slots=1))
    until("the slot", lambda: coordinator.slots)
    driver.cancel("it is enough")
    until("the end, with slots that are not released yet", lambda: released)
    status = driver.request(GetStatus()).result().status
    assert status is not None and status.state == "failed" and not driver.ended.is_set()
    job, seen = Job(driver), list[tuple[str, bool]]()
    asking = threading.Thread(target=lambda: seen.append((job.status().state, job.ended)))
    asking.start()
    until("the request", lambda: driver._client_count == 2)
    released[0]()
    asking.join(limit_s(20))
    assert seen == [("failed", True)]


def test_a_killed_slot_is_lost_and_another_takes_its_place_while_its_sibling_stays(start: Start) -> None:
    _, coordinator = start(plan(slots=2))
    until("two slots", lambda: len(coordinator.slots) == 2)
    sibling, killed = coordinator.slots[0], coordinator.slots[1]
    os.kill(killed, signal.SIGKILL)
    until("a third slot", lambda: 2 in coordinator.slots)
    assert [lost.slot for lost in coordinator.lost] == [1]
    assert alive(sibling) and coordinator.slots[0] == sibling and coordinator.slots[2] != killed


def test_a_stopped_slot_is_lost_after_the_heartbeat_timeout_and_its_process_is_ended(start: Start) -> None:
    _, coordinator = start(plan(slots=1, heartbeat_timeout_s=1.0))
    until("the slot", lambda: coordinator.slots)
    pid = coordinator.slots[0]
    os.kill(pid, signal.SIGSTOP)
    until("its successor", lambda: 1 in coordinator.slots)
    assert "nothing was received from it" in coordinator.lost[0].reason
    until("the end of the stopped process", lambda: not alive(pid))


def test_a_process_that_cannot_be_a_slot_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.runtime.process.process_slots.ProcessSlots.driver_host", "no-such-host.invalid")
    _, coordinator = start(plan(slots=1))
    failed = until("the failure", lambda: coordinator.failed)[0]
    assert "ended with status 1" in failed.reason and "cannot find the driver's host" in failed.reason


class Ending(ProcessSlots):
    """Processes of something that can end."""

    def request(self, launch: SlotLaunch, on_failed: OnFailed, on_leaving: OnLeaving) -> None:
        if self.gone:
            raise ClusterError(self.gone)
        super().request(launch, on_failed, on_leaving)


def test_the_coordinator_is_told_when_no_slot_can_be_had_any_more() -> None:
    slots, made = Ending(), []

    def make(plan: JobPlan, now_ms: int) -> Scripted:
        made.append(Scripted(plan, now_ms))
        return made[0]

    driver = Driver(plan(slots=1), slots, make)
    driver.start()
    until("the slot", lambda: made[0].slots)
    slots.gone = "what they ran on has ended"
    os.kill(made[0].slots[0], signal.SIGKILL)
    told = until("the news", lambda: made[0].of_type(SlotsGone))
    assert told[0] == SlotsGone("what they ran on has ended")
    driver.cancel("the test is over")
    assert driver.ended.wait(limit_s(20))


def test_process_slots_of_a_job_that_has_ended_are_refused_before_anything_starts():
    slots = ProcessSlots()
    slots.check(2)
    slots.close()
    with pytest.raises(ClusterError, match="belong to a job that has ended; give each job its own"):
        slots.check(2)


def test_more_slots_than_there_can_be_are_refused_before_anything_starts() -> None:
    with pytest.raises(ClusterError, match="needs 3 slots, but there are 2"):
        Driver(plan(slots=3), ProcessSlots(slots_max=2), Scripted)
    assert job_registry.list_jobs() == []


class LetsGo(Scripted):
    """Releases slot 0 when it is asked for its status."""

    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]:
        instructions = super().handle(event, now_ms)
        if isinstance(event, ClientRequested) and self.slots.pop(0, None) is not None:
            instructions.append(CloseSlot(0, "not needed"))
        return instructions


def test_a_released_slot_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.engine.coordinator.shell.RELEASE_WAIT_S", 0.3)
    made: list[LetsGo] = []

    def make(plan: JobPlan, now_ms: int) -> LetsGo:
        made.append(LetsGo(plan, now_ms))
        return made[0]

    driver = Driver(plan(slots=1), ProcessSlots(), make)
    driver.start()
    job = Job(driver)
    until("the slot", lambda: made and made[0].slots)
    pid = made[0].slots[0]
    os.kill(pid, signal.SIGSTOP)
    job.status()
    until("the end of its process", lambda: not alive(pid), 10)
    job.cancel("the test is over", 20)


class Broken(Scripted):
    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]:
        if isinstance(event, Started):
            return super().handle(event, now_ms)
        raise ZeroDivisionError("a bug")


def test_a_bug_in_the_coordinator_ends_the_job_and_its_slots() -> None:
    slots = ProcessSlots()
    driver = Driver(plan(slots=1), slots, Broken)
    driver.start()
    with pytest.raises(InvariantError, match="ZeroDivisionError: a bug"):
        Job(driver).wait(limit_s(20))
    assert not slots.pids
    assert "ZeroDivisionError" in Job(driver).status().failures[0].details


def test_a_second_run_of_a_slots_task_is_turned_away(start: Start) -> None:
    """Spark runs a failed task again: that one answers a request which was answered before."""
    _, coordinator = start(plan(slots=1))
    until("the slot", lambda: coordinator.slots)
    (entry,) = job_registry.list_jobs()
    again = SlotLaunch(entry.host, entry.port, entry.keys, entry.job_id, "job-0001-request-1")
    run_slot(again)  # ends in good order: Spark would run a failed task a third time
    assert list(coordinator.slots) == [0] and not coordinator.lost


class Rude(threading.Thread):
    """Closes the first two connections, as a driver does with the oldest in a flood, and passes on those that follow."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target = port
        self.port: int = self._server.getsockname()[1]
        self.came = 0

    def run(self) -> None:
        while True:
            try:
                one, _ = self._server.accept()
            except OSError:  # closed
                return
            self.came += 1
            if self.came <= 2:
                one.close()
                continue
            two = socket.create_connection(("127.0.0.1", self._target))
            for ends in ((one, two), (two, one)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.join(limit_s(10))

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_slots_and_commands_whose_connection_is_closed_before_they_are_known_come_again(start: Start) -> None:
    _, coordinator = start(plan(slots=1))
    until("the slot", lambda: coordinator.slots)
    (entry,) = job_registry.list_jobs()
    for tells in ("slot", "command"):
        rude = Rude(entry.port)
        rude.start()
        if tells == "slot":
            run_slot(SlotLaunch(entry.host, rude.port, entry.keys, entry.job_id, "job-0001-request-1"))  # turned away
        else:
            with Client(msgspec.structs.replace(entry, port=rude.port)) as client:
                assert client.request(GetStatus()).status is not None
        assert rude.came == 3
        rude.close()


def test_a_message_before_registering_or_a_second_registration_ends_the_line(start: Start) -> None:
    _, coordinator = start(plan(slots=1))
    until("the slot", lambda: coordinator.slots)
    (entry,) = job_registry.list_jobs()
    for said in (Deployed(0), Register("127.0.0.1", 1, 1, "3.11", "unheard-of")):
        with socket.create_connection((entry.host, entry.port), timeout=limit_s(10)) as sock:
            dialer = Dialer(entry.keys.secret, Identity(Role.SLOT_CONTROL, entry.job_id), os.urandom(32))
            sock.sendall(dialer.start())
            sock.sendall(dialer.receive(memoryview(sock.recv(4096))[4:]))
            dialer.receive(memoryview(sock.recv(4096))[4:])
            sock.sendall(b"".join(frame(MESSAGE, msgspec.msgpack.encode(said))))
            while sock.recv(4096):
                pass
    assert list(coordinator.slots) == [0] and not coordinator.lost


def test_a_slot_imports_the_library_that_starts_threads_only_after_they_are_limited() -> None:
    program = "import sys, midstream.spark.spark_slots, midstream.runtime.process.process_slots; assert 'polars' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=limit_s(60))


# ---- the command line's way in ---------------------------------------------------


def test_a_client_finds_the_job_by_name_and_asks(start: Start) -> None:
    start(plan(slots=1, name="flights"))
    with Client(job_registry.find("flights")) as client:
        status = client.request(GetStatus()).status
        assert status is not None and status.job_id == "job-0001"
        assert client.request(GetStatus(), timeout_s=limit_s(5)).status is not None
        assert client.request(DoStop(), timeout_s=limit_s(10)).error == ""
    until("the entry to be withdrawn", lambda: not job_registry.list_jobs())


def test_two_jobs_at_once_do_not_meet(start: Start) -> None:
    first, _ = start(plan(slots=1, job_id="aaaa-1", name="same"))
    second, other = start(plan(slots=1, job_id="aaaa-2", name="same"))
    with pytest.raises(JobError, match=r"'same' matches 2 running jobs \(aaaa-1, aaaa-2\)"):
        job_registry.find("same")
    with pytest.raises(JobError, match="matches 2 running jobs"):
        job_registry.find("aaaa")
    with Client(job_registry.find("aaaa-2")) as client:
        client.request(DoStop())
    assert second.ended.wait(limit_s(10)) and not first.ended.is_set()
    assert not other.lost
    assert [entry.job_id for entry in job_registry.list_jobs()] == ["aaaa-1"]


def test_who_does_not_know_the_secret_gets_nowhere_and_who_knows_another_jobs_is_turned_away(start: Start) -> None:
    start(plan(slots=1))
    entry = job_registry.list_jobs()[0]
    with pytest.raises((ClusterError, ProtocolViolation)):
        Client(msgspec.structs.replace(entry, keys=JobKeys(bytes(32))))
    with pytest.raises(ClusterError, match="not its driver: this is the driver of job job-0001"):
        Client(msgspec.structs.replace(entry, job_id="another"))
    with Client(entry) as client:
        assert client.request(GetStatus()).status is not None


def test_the_entry_is_private_and_a_dead_drivers_is_removed(start: Start) -> None:
    start(plan(slots=1))
    (entry,) = job_registry.list_jobs()
    directory = job_registry.home() / "jobs"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "job-0001.json").stat().st_mode) == 0o600
    assert entry.keys.secret.hex() not in repr(entry) and str(entry.keys.secret) not in repr(entry)
    # our process number, but of a process that began at another time
    job_registry.announce(msgspec.structs.replace(entry, job_id="dead", process_started="another boot 1"))
    job_registry.announce(msgspec.structs.replace(entry, job_id="elsewhere", machine="another", pid=1))
    (directory / "torn.json").write_bytes(b'{"job_id"')
    assert [found.job_id for found in job_registry.list_jobs()] == ["job-0001"]
    assert sorted(path.name for path in directory.glob("*.json")) == ["elsewhere.json", "job-0001.json"]
    (directory / "elsewhere.json").unlink()
    with pytest.raises(JobError, match=r"no running job 'dead' on this machine; running: scripted \(job-0001\)"):
        job_registry.find("dead")
