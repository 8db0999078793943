"""Which gate a task reads next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

import pyarrow as pa
import pytest

from midstream.engine.core.ids import TaskId
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.task_input import PRIORITY_MAX, SLICE_S, TaskInput
from recovering import SCHEMA, batch, rows_in

SLOW, RULES = 0, 1


class Gate:
    """One channel in which batches of so many rows lie."""

    def __init__(self, port: int, *batches: int) -> None:
        self.edge = Edge(port, port, 2, Partitioning.BROADCAST if port else Partitioning.REBALANCE, SCHEMA, port=port)
        self.channels: Sequence[Any] = [object()]
        numbers = count()
        self.left = deque(batch([(0, next(numbers)) for _ in range(rows)]) for rows in batches)
        self.current_batch: LeasedBatch | None = None
        self.read_from = [0]

    @property
    def may_have_data(self) -> bool:
        return bool(self.left)

    def poll(self, rows_max: int) -> LeasedBatch | None:
        assert self.current_batch is None
        if self.left:
            self.current_batch = LeasedBatch(self.left.popleft(), 1, self)
        return self.current_batch

    def processed(self) -> None:
        self.current_batch = None

    def freed(self, buffers: int) -> None: ...


class Rows:
    """A chain that notes at which port each row comes in; those of SLOW take `row_s`. It is the clock as well."""

    def __init__(self, call_s: float, row_s: float) -> None:
        self.call_s, self.row_s = call_s, row_s
        self.seen: list[tuple[int, int]] = []
        self.slices: list[tuple[int, int]] = []
        self.now_s = 0.0

    def process(self, part: pa.RecordBatch, port: int) -> None:
        self.slices.append((port, part.num_rows))
        self.seen += [(port, n) for _, n in rows_in(part)]
        self.now_s += self.call_s + part.num_rows * (self.row_s if port == SLOW else 1e-7)

    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return self.now_s

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0


def task_input(
    slow: Sequence[int], rules: Sequence[int], call_s: float = 0.0, row_s: float = 1e-3
) -> tuple[TaskInput, Rows]:
    rows = Rows(call_s, row_s)
    gates = cast("list[InputGate]", [Gate(SLOW, *slow), Gate(RULES, *rules)])
    chain = cast(OperatorChain, rows)
    return TaskInput(
        TaskId(2, 0), gates, [IdleOrigin()] * 2, chain, rows, lambda event: None, lambda: None, rows_max=10
    ), rows


def test_gates_take_turns() -> None:
    task, rows = task_input([1] * 3, [1] * 3)
    while task.work():
        pass
    assert [port for port, _ in rows.seen] == [SLOW, RULES] * 3


def test_a_gate_that_a_checkpoint_waits_for_comes_first_as_long_as_it_has_rows() -> None:
    task, rows = task_input([1] * 3, [1] * 3)
    assert task.work()
    while task.work([RULES]):
        pass
    assert rows.seen == [(SLOW, 0), (RULES, 0), (RULES, 1), (RULES, 2), (SLOW, 1), (SLOW, 2)]


def test_the_others_are_not_starved_by_it() -> None:
    task, rows = task_input([1] * 2, [1] * 3 * PRIORITY_MAX)
    while task.work([RULES]):
        pass
    assert len(rows.seen) == 3 * PRIORITY_MAX + 2
    turns = [at for at, (port, _) in enumerate(rows.seen) if port == SLOW]
    assert all(later - earlier <= 2 * (PRIORITY_MAX + 1) for earlier, later in zip([0, *turns], turns, strict=False))


def test_a_slow_batch_gives_the_other_gate_a_turn_between_its_slices() -> None:
    task, rows = task_input([1000], [1] * 20)
    while task.may_have_data:
        assert task.work()
    assert [n for port, n in rows.seen if port == SLOW] == list(range(1000))
    assert [port for port, _ in rows.slices[:40]] == [SLOW, RULES] * 20


def test_how_fast_the_rows_of_one_gate_are_says_nothing_of_those_of_another() -> None:
    task, rows = task_input([1000, 1000], [5000] * 4)
    while task.work():
        pass
    assert max([size for port, size in rows.slices if port == SLOW][1:]) <= 2 * SLICE_S / 1e-3, "the first is a guess"
    assert (RULES, 5000) in rows.slices


@pytest.mark.parametrize("call_s", [0.003, 0.0095, 0.0105, 0.1])
def test_a_stream_that_begins_with_single_rows_is_not_processed_row_by_row_for_ever(call_s: float) -> None:
    task, rows = task_input([1] * 40 + [100_000], [], call_s, row_s=1e-7)
    while task.work():
        pass
    assert [n for _, n in rows.seen[40:]] == list(range(40, 100_040))
    assert len(rows.slices) < 40 + 200, [size for _, size in rows.slices]


def test_what_is_left_of_each_batch_is_known_by_gate() -> None:
    task, rows = task_input([1000], [5000])
    assert task.rests() == {}
    task.work()
    task.work()
    left = {gate: (current_batch.batch.num_rows, next_row) for gate, (current_batch, next_row) in task.rests().items()}
    assert left == {gate: (whole, dict(rows.slices)[gate]) for gate, whole in ((SLOW, 1000), (RULES, 5000))}
