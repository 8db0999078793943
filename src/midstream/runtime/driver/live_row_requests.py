"""Requests for live rows: finds the operator, tracks the waiting clients, and answers if no row comes in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.protocol.live_rows import WAIT_S, GetRows, LiveRows, RowSample, SampleRows
from midstream.engine.protocol.messages import Reply
from midstream.runtime.event_loop import EventLoop

REQUESTS_MAX: Final = 4
"""The number of requests that may wait at a time."""
EVERY_S: Final = 0.2
"""The pause after each request: however many there are, a job shows at most five batches per second."""
SLACK_S: Final = 0.5
"""The time that a slot's answer may still be under way after the wait has ended."""


@dataclass(frozen=True, slots=True)
class _Meant:
    """The operator of a request, by `uid` and `name`, and the one whose output is shown for it."""

    uid: str
    name: str
    shown_uid: str
    shown_name: str
    side_output: str | None


@dataclass(slots=True)
class LiveRowRequests:
    """The open requests. Loop thread only. Each `request` leads to exactly one `answer` to its client, in time."""

    loop: EventLoop
    graph: JobGraph
    send_all: Callable[[SampleRows], None]
    answer: Callable[[int, Reply], None]
    _open: dict[int, tuple[int, _Meant]] = field(default_factory=dict)
    _count: int = 0
    _next_s: float = float("-inf")
    """The next request does not begin before this time."""

    def request(self, client: int, request: GetRows) -> None:
        meant = meant_by(self.graph, request.operator)
        if isinstance(meant, str):
            self.answer(client, Reply(error=meant))
            return
        if len(self._open) >= REQUESTS_MAX:
            self.answer(
                client, Reply(error=f"{REQUESTS_MAX} requests for rows are open already; try again in a moment")
            )
            return
        number = self._count
        self._count += 1
        self._open[number] = client, meant
        begin = partial(self._begin, SampleRows(number, meant.shown_uid, meant.side_output, request.rows))
        now_s = self.loop.monotonic_s()
        delay_s = max(0.0, self._next_s - now_s)
        self._next_s = now_s + delay_s + EVERY_S
        if delay_s:
            self.loop.call_later(delay_s, begin)
        else:
            begin()

    def _begin(self, request: SampleRows) -> None:
        self.loop.call_later(WAIT_S + SLACK_S, partial(self._end, request.number, None))
        self.send_all(request)

    def handle_sample(self, sample: RowSample) -> None:
        """Answer with the rows of the first subtask that had some; later ones are dropped."""
        self._end(sample.number, sample)

    def _end(self, number: int, shown: RowSample | None) -> None:
        waiting = self._open.pop(number, None)
        if waiting is not None:
            client, meant = waiting
            self.answer(client, Reply(rows=LiveRows(meant.uid, meant.name, meant.shown_name, shown)))


def meant_by(graph: JobGraph, operator: str) -> _Meant | str:
    """Return the operator of that uid, or the only one of that name; otherwise a sentence that lists the available
    ones.
    """
    places = [(vertex, at) for vertex in graph.vertices for at in range(len(vertex.specs))]
    found = [(v, at) for v, at in places if v.specs[at].uid == operator]
    found = found or [(v, at) for v, at in places if v.specs[at].name == operator]
    if len(found) != 1:
        uids = ", ".join(v.specs[at].uid for v, at in found or places)
        what = "there is no operator" if not found else f"{len(found)} operators have the name"
        return f"{what} {operator!r}; the uids of {'those' if found else 'all'} are: {uids}"
    ((vertex, at),) = found
    spec = vertex.specs[at]
    if not isinstance(spec, OperatorSpec) or spec.sink is None:
        return _Meant(spec.uid, spec.name, spec.uid, spec.name, None)
    if at > 0:
        before = vertex.specs[at - 1]
        return _Meant(spec.uid, spec.name, before.uid, before.name, None)
    edge = graph.inputs(vertex.id)[0]
    before = graph.vertices[edge.source].specs[-1]
    return _Meant(spec.uid, spec.name, before.uid, before.name, edge.tag)
