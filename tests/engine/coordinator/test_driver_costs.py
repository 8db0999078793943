"""What many subtasks cost the driver: counted in steps of the interpreter, messages and bytes, never in time."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine import coordinator
from midstream.engine.coordinator.placement.split_assignment import WaitingReaders
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m
from midstream.runtime.network.message_channel import SharedEncoding

OURS = str(Path(coordinator.__file__).parent)


class OnSlots(Ledger):
    """Each committable is a lane of its own."""

    commits_on_slots = True

    def lane(self, committable: bytes) -> int:
        return int(committable.rpartition(b"/")[2])


class Shared(ScriptedSource):
    """No subtask gets more splits than its share."""

    equal_shares = True


def steps(work: Callable[[], object]) -> int:
    """Instructions of the interpreter that `work` takes in code of the coordinator."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def costs(parallelism: int) -> dict[str, int]:
    """Of each part of a job's life: how many steps of the interpreter the driver takes."""
    source = Shared([f"{i:05d}" for i in range(parallelism)])
    graph = dataclasses.replace(two_vertices(source, OnSlots(), parallelism, parallelism), max_parallelism=4096)
    bench = Bench(graph)
    bench.job.check = lambda: None  # type: ignore[method-assign]
    bench.answers = {}
    found: Counter[str] = Counter()

    def say(part: str, said: Sequence[tuple[int, m.FromSlot]]) -> None:
        def all_of_it() -> None:
            for slot, message in said:
                bench.shell.slot_message(slot, message)

        found[part] += steps(all_of_it)

    def deploy(part: str) -> None:
        number = bench.attempt
        say(part, [(slot, m.Deployed(number)) for slot in bench.slots])
        say(part, [(bench.slots[ref.subtask], m.TaskRunning(number, ref)) for ref in bench.tasks])
        assert bench.state == "running"

    def acknowledge(finished: bool = False) -> None:
        (trigger,) = {(x.attempt, x.checkpoint_id) for x in bench.messages(m.TriggerCheckpoint)[-1:]}
        said: list[tuple[int, m.FromSlot]] = []
        for ref in bench.tasks:
            prepared = (b"%d" % ref.subtask,) if ref.vertex else ()
            operators = (m.OperatorSnapshot("write" if ref.vertex else "read", (), prepared),)
            said.append((bench.slots[ref.subtask], m.CheckpointAck(*trigger, ref, operators, (), 0, finished=finished)))
        say("checkpoint", said)
        answered: set[int] = set()
        while asked := [(slot, x) for slot, x in bench.sent if isinstance(x, m.Commit) and x.request not in answered]:
            answered.update(x.request for _, x in asked)
            say("commits", [(slot, m.CommitDone(x.request)) for slot, x in asked])
        assert bench.job.commits.is_drained

    found["start"] += steps(lambda: bench.start().connect())
    deploy("start")
    first, *others = [TaskId(0, i) for i in range(parallelism)]
    for ref in (*others, *others, first):  # all others have their share, and wait for the first to take its own
        say("splits", [(bench.slots[ref.subtask], m.RequestSplit(bench.attempt, ref))])
    assert len(bench.messages(m.AssignSplit)) == parallelism and len(bench.messages(m.NoMoreSplits)) == len(others)
    say("heartbeats", [(slot, m.SlotStatus(bench.attempt, ())) for slot in bench.slots])
    found["heartbeats"] += steps(lambda: bench.job.status(bench.now_ms))
    found["checkpoint"] += steps(lambda: bench.ask(m.DoCheckpoint()))
    acknowledge()
    lost = bench.slots[0]

    def lose() -> None:
        bench.lose(lost)

    found["failover"] += steps(lose)
    say("failover", [(slot, m.Cancelled(bench.attempt)) for slot in bench.slots if slot != lost])
    found["failover"] += steps(lambda: bench.wait(1))
    found["failover"] += steps(bench.connect)
    deploy("failover")
    say("end", [(bench.slots[ref.subtask], m.TaskEndOfData(bench.attempt, ref)) for ref in bench.tasks])
    acknowledge(finished=True)
    say("end", [(bench.slots[ref.subtask], m.TaskFinished(bench.attempt, ref)) for ref in bench.tasks])
    assert bench.ended is not None and bench.ended.state == "finished"
    return found


@pytest.fixture(scope="module")
def small() -> dict[str, int]:
    costs(2)  # Python 3.12 does not count the steps of code that it traces for the first time
    return costs(16)


@pytest.fixture(scope="module")
def large() -> dict[str, int]:
    return costs(128)


@pytest.mark.parametrize("part", ["start", "splits", "checkpoint", "commits", "heartbeats", "failover", "end"])
def test_what_the_driver_does_grows_no_faster_than_its_subtasks(
    small: dict[str, int], large: dict[str, int], part: str
) -> None:
    """There are eight times as many in the large one: of what is quadratic that is 64 times as many steps."""
    assert 0 < large[part] < 9 * small[part], (small, large)


def test_a_slot_is_sent_the_graph_once_however_often_the_job_is_restarted() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a", "b")), OnSlots())).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, *bench.tasks)
    for _ in range(2):
        bench.fail(TaskId(1, 0))
        for request in range(2):
            bench.feed_from(0, m.CommitDone(request))
            bench.feed_from(1, m.CommitDone(request))
        bench.wait(2)
    bench.lose(1)
    bench.wait(5)
    bench.connect()
    assert bench.state == "running" and bench.attempt == 3 and bench.messages(m.CommitSinks)
    carried = [(slot, x.graph) for slot, x in bench.sent if isinstance(x, (m.Deploy, m.CommitSinks)) and x.graph]
    assert carried == [(0, b"graph"), (1, b"graph"), (2, b"graph")]


def test_what_all_slots_are_told_is_encoded_once() -> None:
    peers = tuple(m.Peer(slot, "10.0.0.1", 40_000 + slot) for slot in range(100))
    encoding, start, other = SharedEncoding(), m.Start(0, peers), m.Heartbeat()
    first = encoding.encode(start)
    assert encoding.encode(start) is first and first == msgspec.msgpack.encode(start)
    assert encoding.encode(other) == msgspec.msgpack.encode(other)
    assert encoding.encode(start) == first


def test_who_waits_for_a_split_is_chosen_as_by_a_search_through_all() -> None:
    dice = random.Random(7)
    for _ in range(200):
        askers, plain = WaitingReaders(), list[TaskId]()
        given: Counter[TaskId] = Counter()
        for _ in range(40):
            ref = TaskId(0, dice.randrange(8))
            assert (ref in askers) == (ref in plain) and len(askers) == len(plain)
            match dice.randrange(4):
                case 0 if ref not in plain:
                    askers.add(ref)
                    plain.append(ref)
                case 1 if plain:
                    assert askers.first() == plain[0]
                    askers.remove(plain.pop(0))
                case 2:
                    share = dice.randrange(1, 4)
                    expected = next((each for each in plain if given[each] < share), None)
                    assert askers.first_below(share, given) == expected
                    if expected is not None:
                        askers.remove(expected)
                        plain.remove(expected)
                        given[expected] += 1
                case _ if dice.random() < 0.1:
                    askers.clear()
                    plain.clear()
