"""Whole jobs whose checkpoints are in an object store, and what they say when it fails them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import NumbersJob, check_gapless
from machine import limit_s
from midstream import Environment, KeyedProcessFunction, ValueState
from midstream.engine.checkpoint.store import list_checkpoints
from midstream.engine.core.errors import MidstreamError, StorageError
from midstream.runtime.driver.job import Job, start_job
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.storage.file_storage import FileStorage
from object_store import KEY, SECRET, ObjectStore, running_store, use_environment
from waiting import until

pytestmark = pytest.mark.systems


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    use_environment(monkeypatch, server)
    yield server
    server.mend()


class Counts(KeyedProcessFunction):
    seen = ValueState(default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        self.seen.value += 1
        yield {"key": row["key"], "n": row["n"], "nth": self.seen.value}


def counting(where: str) -> tuple[Environment, Any]:
    env = Environment("counting", parallelism=2, checkpoint_dir=where, checkpoint_interval="200 ms")
    numbers = env.generate(lambda i: {"key": i % 97, "n": i}, rows_per_s=20_000)
    return env, numbers.key_by("key").process(Counts(), {"key": int, "n": int, "nth": int}).collect()


def test_a_killed_slot_costs_no_row_and_doubles_none(store: ObjectStore, running: list[Job]) -> None:
    env, result = counting("s3://bucket/jobs/counting/")
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("two checkpoints", lambda: job.status().checkpoints_completed >= 2, 60)
    os.kill(job.status().slot_pids[1], signal.SIGKILL)
    until("the restart", lambda: job.status().restarts == 1)
    before = len(result.rows())
    until("more rows", lambda: len(result.rows()) > before)
    job.stop(drain=True, timeout_s=limit_s(60))
    status = job.status()
    assert status.state == "finished" and status.restarts == 1
    rows = result.rows()
    check_gapless(row["n"] for row in rows)
    nth: dict[int, list[int]] = {}
    for row in rows:
        nth.setdefault(row["key"], []).append(row["nth"])
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in nth.values())
    storage = FileStorage("s3://bucket/jobs/counting")
    assert storage.list("epochs") == ["00000001", "00000001.from"] and len(list_checkpoints(storage)) == 2


def test_a_stopped_job_goes_on_and_its_savepoint_too(store: ObjectStore, running: list[Job]) -> None:
    settings: dict[str, Any] = {"rows_per_s": 50_000, "checkpoint_dir": store.url("jobs/stopped")}
    first = NumbersJob(None, **settings)
    job = start_job(first.plan(), ProcessSlots())
    running.append(job)
    before = until("some rows", first.numbers, 60)
    saved = job.savepoint(timeout_s=limit_s(30))
    job.stop(timeout_s=limit_s(30))
    seen = first.numbers()
    second = NumbersJob(None, **settings)
    job = start_job(second.plan("latest"), ProcessSlots())
    running.append(job)
    until("more rows", second.numbers)
    job.stop(drain=True, timeout_s=limit_s(60))
    check_gapless([*seen, *second.numbers()])
    assert FileStorage(saved).exists("_savepoint") and SECRET not in saved
    third = NumbersJob(None, **{**settings, "checkpoint_dir": "s3://bucket/jobs/from-savepoint"})
    job = start_job(third.plan(saved), ProcessSlots())
    running.append(job)
    until("rows that the savepoint does not hold", third.numbers)
    job.stop(drain=True, timeout_s=limit_s(60))
    rest = third.numbers()
    assert len(rest) == len(set(rest)) and not set(rest) & set(before)
    check_gapless({*seen, *rest})


def test_of_two_drivers_that_start_at_once_one_goes_on_and_the_other_says_that_it_is_fenced(
    store: ObjectStore, running: list[Job]
) -> None:
    where = "s3://bucket/jobs/twice"
    for path in ("_job", "epochs/00000001"):  # each has looked before either writes
        store.fault("PUT", f"/jobs/twice/{path}", "together", times=2)
    together = threading.Barrier(2)
    jobs = [NumbersJob(None, rows_per_s=2_000, checkpoint_dir=where, parallelism=1) for _ in range(2)]
    handles: list[Job] = []

    def begin(numbers: NumbersJob) -> None:
        together.wait(limit_s(30))
        handles.append(start_job(numbers.plan(), ProcessSlots()))

    threads = [threading.Thread(target=begin, args=(numbers,)) for numbers in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s(60))
    running.extend(handles)
    loser, winner = until(
        "one has ended", lambda: [sorted(handles, key=lambda h: not h.ended) for h in handles if h.ended], 90
    )[0]
    with pytest.raises(StorageError, match="another coordinator has taken over this job's checkpoint directory"):
        loser.wait(limit_s(10))
    until("the winner continues", lambda: winner.status().checkpoints_completed >= 2, 60)
    assert not winner.ended
    assert [name for name in FileStorage(where).list("epochs") if "." not in name] == ["00000001", "00000002"]


@pytest.mark.parametrize("fault", ["503 SlowDown", pytest.param("cut", marks=pytest.mark.nightly)])
def test_a_store_that_is_away_in_mid_job_costs_no_row(store: ObjectStore, running: list[Job], fault: str) -> None:
    numbers = NumbersJob(None, rows_per_s=30_000, checkpoint_dir=f"s3://bucket/jobs/away-{fault[:3]}")
    job = start_job(numbers.plan(), ProcessSlots())
    running.append(job)
    until("a checkpoint", lambda: job.status().checkpoints_completed, 60)
    writes = store.fault("PUT", "/jobs/away", fault, times=6)
    for method in ("POST", "GET", "HEAD", "DELETE"):
        store.fault(method, "/jobs/away", fault, times=6)
    store.fault("PUT", "_owner", "lose", times=2)
    until("the store takes writes again", lambda: writes.met > writes.times, 120)
    before = len(numbers.numbers())
    until("more rows", lambda: len(numbers.numbers()) > before, 60)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert job.status().state == "finished"
    check_gapless(numbers.numbers())


RIGHTS = "must allow reading, writing, listing and deleting objects there"


@pytest.mark.parametrize(
    ("where", "faults", "says"),
    [
        ("s3://nowhere/x", [], r"cannot create .* in s3://nowhere/x: HTTP 404 NoSuchBucket: .*; create the bucket"),
        ("s3://bucket/a", [("PUT", "403 AccessDenied")], rf"in s3://bucket/a: HTTP 403 AccessDenied: .* {RIGHTS}"),
        ("s3://bucket/b", [("HEAD", "403 AccessDenied")], rf"cannot look for '_job' in s3://bucket/b: .* {RIGHTS}"),
        ("s3://bucket/c", [("PUT", "ignore")], r"s3://bucket/c: the store ignores the condition of a write"),
        (f"s3://{KEY}:{SECRET}@bucket/d?wrong=1", [], r"storage 's3://bucket/d\?wrong=1': Unexpected query parameter"),
    ],
)
def test_what_is_wrong_is_said_when_the_job_is_started(
    store: ObjectStore, where: str, faults: list[tuple[str, str]], says: str
) -> None:
    for method, what in faults:
        store.fault(method, f"/bucket/{where[-1]}", what, times=100)
    with pytest.raises(MidstreamError, match=says) as caught:
        counting(where)[0].execute(slots=ProcessSlots())
    assert SECRET not in str(caught.value)


def test_an_endpoint_that_is_down_and_missing_credentials_are_said(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StorageError, match=r"cannot look for '_job' in s3://bucket/down: .*; check the endpoint, and that it can"
    ):
        counting("s3://bucket/down")[0].execute(slots=ProcessSlots())
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(
        StorageError, match=r"s3://bucket/nobody.*: no credentials were found for it. Set AWS_ACCESS_KEY_ID"
    ):
        counting(store.url("nobody"))[0].execute(slots=ProcessSlots())
