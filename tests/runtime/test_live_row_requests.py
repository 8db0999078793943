"""Questions for live rows at the driver: which operator is meant, and one answer for each, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from in_memory import NoRows
from machine import limit_s
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.base import Operator
from midstream.engine.operators.sink_api import Sink
from midstream.engine.protocol.live_rows import GetRows, LiveRows, RowSample, SampleRows
from midstream.engine.protocol.messages import Reply
from midstream.runtime.driver.live_row_requests import EVERY_S, REQUESTS_MAX, LiveRowRequests, meant_by
from midstream.runtime.event_loop import EventLoop


def graph() -> JobGraph:
    """source → map | keyed | map → sink, and the late rows of the second map into a sink of their own."""
    operator, ledger = cast(Operator, object()), cast(Sink, object())
    first = Vertex(0, 2, SourceSpec("orders", "read", NoRows()), (OperatorSpec("map-1", "map", operator),))
    second = Vertex(
        1, 2, None, (OperatorSpec("map-2", "map", operator), OperatorSpec("store", "files", operator, sink=ledger))
    )
    late = Vertex(2, 1, None, (OperatorSpec("late", "late files", operator, sink=ledger),))
    schema = schema_of([])
    edges = (
        Edge(0, 0, 1, Partitioning.KEYED, schema),
        Edge(1, 0, 2, Partitioning.GLOBAL, schema, tag="late"),
    )
    return JobGraph((first, second, late), edges, 128)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.sent: list[SampleRows] = []
        self.answers: dict[int, Reply] = {}
        self.looks = LiveRowRequests(cast(EventLoop, self), graph(), self.sent.append, self.answer)

    def monotonic_s(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay_s, mail))

    def answer(self, client: int, reply: Reply) -> None:
        assert client not in self.answers, "answered twice"
        self.answers[client] = reply

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [mail for at_s, mail in self.timers if at_s <= self.now_s]
        self.timers = [each for each in self.timers if each[0] > self.now_s]
        for mail in due:
            mail()


def of_batch(number: int, subtask: int) -> RowSample:
    return RowSample(number, subtask, (), (), 5)


def test_the_first_subtask_that_has_rows_answers_and_the_others_are_dropped() -> None:
    world = World()
    world.looks.request(1, GetRows("map-1", 3))
    assert world.sent == [SampleRows(0, "map-1", None, 3)]
    world.looks.handle_sample(of_batch(0, 1))
    world.looks.handle_sample(of_batch(0, 0))
    world.looks.handle_sample(of_batch(99, 0))
    assert world.answers == {1: Reply(rows=LiveRows("map-1", "map", "map", of_batch(0, 1)))}
    world.wait(limit_s(60))


def test_when_nothing_passes_that_is_the_answer() -> None:
    world = World()
    world.looks.request(1, GetRows("orders"))
    world.wait(5.1)
    assert world.answers == {}
    world.wait(1)
    assert world.answers == {1: Reply(rows=LiveRows("orders", "read", "read", None))}
    world.looks.handle_sample(of_batch(0, 1))


def test_of_a_sink_the_rows_are_those_that_it_takes_in() -> None:
    world = World()
    for client, operator in enumerate(("files", "late")):
        world.looks.request(client, GetRows(operator))
        world.wait(EVERY_S)
    assert [(asked.operator, asked.side_output) for asked in world.sent] == [("map-2", None), ("map-1", "late")]
    world.looks.handle_sample(of_batch(1, 0))
    assert world.answers == {1: Reply(rows=LiveRows("late", "late files", "map", of_batch(1, 0)))}


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("nothing", "there is no operator 'nothing'; the uids of all are: orders, map-1, map-2, store, late"),
        ("map", "2 operators have the name 'map'; the uids of those are: map-1, map-2"),
    ],
    ids=["unknown", "ambiguous"],
)
def test_an_operator_that_is_not_clear_is_refused_by_naming_those_that_are(operator: str, said: str) -> None:
    assert meant_by(graph(), operator) == said
    world = World()
    world.looks.request(1, GetRows(operator))
    assert world.answers == {1: Reply(error=said)} and world.sent == []


def test_looks_are_few_and_not_at_once() -> None:
    world = World()
    world.looks.request(0, GetRows("orders"))
    for client in range(1, 1 + REQUESTS_MAX):
        world.looks.request(client, GetRows("orders"))
    assert "try again" in world.answers.pop(REQUESTS_MAX).error and world.answers == {}
    for begun in range(1, REQUESTS_MAX):
        assert len(world.sent) == begun
        world.wait(EVERY_S)
    assert len(world.sent) == REQUESTS_MAX
    world.wait(5.6)
    assert set(world.answers) == set(range(REQUESTS_MAX))
    world.looks.request(50, GetRows("orders"))
    assert len(world.sent) == REQUESTS_MAX + 1
