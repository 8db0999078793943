"""Which task the others wait for, and by how much it is too slow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.engine.protocol.bottleneck import bottleneck_status
from midstream.engine.protocol.job_status import BottleneckStatus, OperatorStatus, SubtaskStatus, VertexStatus


def task(id: int, *shares: tuple[float, float], rows: tuple[int, int] = (0, 0)) -> VertexStatus:
    """`shares`: of each subtask, busy and backpressured."""
    return VertexStatus(
        id=id,
        name=f"task {id}",
        parallelism=len(shares),
        states={"running": len(shares)},
        operators=(OperatorStatus(f"op-{id}", f"op {id}", len(shares), *rows),),
        watermark_us=None,
        busy=sum(busy for busy, _ in shares) / len(shares),
        backpressured=sum(held for _, held in shares) / len(shares),
        subtasks=tuple(SubtaskStatus(i, 0, 0, busy, held, None) for i, (busy, held) in enumerate(shares)),
    )


def found(*tasks: VertexStatus) -> BottleneckStatus | None:
    """Of tasks in a row, each feeding the next."""
    return bottleneck_status(tasks, tuple((i, i + 1, "keyed") for i in range(len(tasks) - 1)))


def test_it_is_the_busy_one_behind_those_that_wait_and_the_factor_is_what_these_could_give():
    slow = found(task(0, (0.05, 0.95)), task(1, (0.1, 0.9)), task(2, (0.75, 0.0)), task(3, (0.05, 0.0)))
    assert slow is not None and (slow.vertex, slow.name, slow.subtask) == (2, "task 2", None)
    assert slow.factor == pytest.approx(10 * 0.95)  # the slot has 5 % of its time left


def test_a_feeder_with_too_little_work_to_be_measured_gives_no_factor():
    slow = found(task(0, (0.001, 0.99)), task(1, (0.95, 0.0)))
    assert slow is not None and slow.factor is None


def test_a_source_that_is_busy_all_the_time_is_one_without_a_factor():
    slow = found(task(0, (0.95, 0.0)), task(1, (0.05, 0.0)))
    assert slow is not None and slow.vertex == 0 and slow.factor is None


def test_where_the_slot_has_no_time_left_the_task_that_takes_most_of_it_is_named():
    slow = found(task(0, (0.04, 0.9), (0.04, 0.9)), task(1, (0.0, 0.0), (0.46, 0.0)), task(2, (0.0, 0.0), (0.42, 0.0)))
    assert slow is not None and slow.vertex == 1 and slow.busy == 0.46 and slow.slot_busy == pytest.approx(0.92)
    slot_has_time = found(task(0, (0.04, 0.9)), task(1, (0.4, 0.0)), task(2, (0.2, 0.0)))
    assert slot_has_time is None


def test_one_busy_subtask_is_named():
    slow = found(task(0, (0.1, 0.9), (0.1, 0.9)), task(1, (0.02, 0.0), (0.85, 0.0)))
    assert slow is not None and (slow.vertex, slow.subtask, slow.busy) == (1, 1, 0.85)


@pytest.mark.parametrize("rows", [(500, 500_000), (100_000, 250_000), (100_000, 0)], ids=["few", "twice", "sink"])
def test_few_more_rows_are_nothing_to_tell(rows: tuple[int, int]):
    slow = found(task(0, (0.1, 0.9), rows=rows), task(1, (0.9, 0.0)))
    assert slow is not None and (slow.multiplier, slow.multiplied) == ("", 1.0)


def test_an_operator_that_multiplies_rows_is_told_beside_it_wherever_it_is_before():
    multiplies = task(0, (0.1, 0.9), rows=(10_000, 400_000))
    slow = found(multiplies, task(1, (0.1, 0.9), rows=(400_000, 400_000)), task(2, (0.9, 0.0), rows=(1_000, 9_000)))
    assert slow is not None and (slow.vertex, slow.multiplier, slow.multiplied) == (2, "op 0", 40.0)
    behind = found(task(0, (0.1, 0.8)), task(1, (0.8, 0.0)), task(2, (0.1, 0.0), rows=(10_000, 400_000)))
    assert behind is not None and (behind.vertex, behind.multiplier) == (1, "")


@pytest.mark.parametrize("tasks", [(), (task(0, (0.3, 0.0)), task(1, (0.3, 0.0)))], ids=["nothing", "idle"])
def test_nothing_is_named_where_nothing_waits(tasks: tuple[VertexStatus, ...]):
    assert found(*tasks) is None


def test_of_a_graph_with_a_circle_it_comes_back():
    tasks = (task(0, (0.1, 0.9)), task(1, (0.9, 0.0)))
    slow = bottleneck_status(tasks, ((0, 1, "keyed"), (1, 0, "keyed")))
    assert slow is not None and slow.vertex == 1


@pytest.mark.parametrize(
    ("work", "named"),
    [((0.1, 0.86, 0.04), ("b", 0.86)), ((0.4, 0.3, 0.3), ("", 0.0)), ((None, None, None), ("", 0.0)), ((1.0,), ("", 0.0))],
    ids=["one", "all", "unknown", "alone"],
)  # fmt: skip
def test_the_operator_of_a_chain_that_takes_most_of_its_time_is_named(work: Any, named: tuple[str, float]):
    chain = tuple(OperatorStatus(name, name, 1, 0, 0, work=part) for name, part in zip("abc", work, strict=False))
    slow = found(task(0, (0.05, 0.9)), msgspec.structs.replace(task(1, (0.9, 0.0)), operators=chain))
    assert slow is not None and (slow.vertex, slow.operator, slow.work) == (1, *named)
