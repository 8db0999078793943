"""How long each operator of a chain was at work: exactly, whatever is nested in what."""

from __future__ import annotations

from typing import cast

import pyarrow as pa

from midstream.engine.core.elements import Event
from midstream.engine.operators.base import Operator
from midstream.engine.operators.stateless import Stateless
from midstream.engine.worker.operator_chain import OperatorChain, TaskOutputs
from standing_clock import StandingClock

ROW = pa.record_batch({"n": pa.array([1])})


class Works(Stateless):
    """So long before it gives out what it was given, and again after that."""

    def __init__(self, clock: StandingClock, seconds: float) -> None:
        super().__init__("works", ROW.schema)
        self._clock, self._seconds = clock, seconds

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._clock.passes(self._seconds)
        self._out.emit(batch)
        self._clock.passes(self._seconds)

    def advance_watermark(self, watermark_us: int) -> bool:
        self._clock.passes(10 * self._seconds)
        return True


class SlowEdges:
    def __init__(self, clock: StandingClock) -> None:
        self._clock = clock

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        self._clock.passes(100.0)

    def broadcast(self, event: Event) -> None:
        self._clock.passes(1000.0)

    def has_reader(self, tag: str | None) -> bool:
        return True


def test_time_is_of_the_innermost_operator() -> None:
    clock = StandingClock()
    operators: list[Operator] = [Works(clock, 1.0), Works(clock, 2.0), Works(clock, 3.0)]
    chain = OperatorChain(operators, cast(TaskOutputs, SlowEdges(clock)), clock)
    for at, operator in enumerate(operators):
        operator.open(None, chain.outputs[at + 1])  # type: ignore[arg-type]  # it looks at no context
    clock.passes(7.0)
    chain.process(ROW, 0)
    assert chain.worked_s == [2.0, 4.0, 6.0, 100.0, 7.0]
    clock.passes(5.0)
    chain.offer(0, 50)
    clock.passes(5.0)
    chain.process(ROW, 0)
    assert chain.worked_s == [14.0, 28.0, 42.0, 200.0, 1017.0], (
        "the time that a watermark takes on the edges belongs to no operator"
    )
