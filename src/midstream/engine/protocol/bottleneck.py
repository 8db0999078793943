"""Pure functions that find the bottleneck of a job and its cause, from the shares of time in a status."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal

from midstream.engine.protocol.job_status import BottleneckStatus, SubtaskStatus, VertexStatus

BUSY: Final = 0.5
VERY_BUSY: Final = 0.8
BACKPRESSURED: Final = 0.3
"""The share of time from which a task counts as backpressured."""
UNEVEN: Final = 0.25
"""How much busier than the mean the busiest subtask must be for the work to count as unevenly spread."""
MEASURABLE: Final = 0.01
"""Below this share, the busy time of one heartbeat interval is too small to be a divisor."""
MOST: Final = 0.5
"""An operator is named if it takes more than this share of its task's time."""
MULTIPLIES: Final = 3.0
MULTIPLIED_ROWS_MIN: Final = 1000
"""The ratio of output to input rows from which an operator counts as multiplying rows, and the input rows that it needs
first.
"""

Edges = Sequence[tuple[int, int, str]]


def bottleneck_status(vertices: Sequence[VertexStatus], edges: Edges) -> BottleneckStatus | None:
    """Return the bottleneck with its details. None if nothing waits."""
    slow = bottleneck(vertices, edges)
    if slow is None:
        return None
    subtask = uneven(slow)
    slots = _slots_busy(vertices)
    slot_busy = min(1.0, max((slots[each.subtask] for each in slow.subtasks), default=slow.busy))  # calls of several
    multiplier, multiplied = _multiplier(slow, vertices, edges)
    operator, work = _most_of_the_work(slow)
    return BottleneckStatus(
        slow.id,
        slow.name,
        _most(slow, "busy"),
        None if subtask is None else subtask.subtask,
        _factor(slow, slot_busy, vertices, edges),
        multiplier,
        multiplied,
        operator,
        work,
        slot_busy,
    )


def bottleneck(vertices: Sequence[VertexStatus], edges: Edges) -> VertexStatus | None:
    """Return the task that the others wait for, if there is one: it is busy, and its input is backpressured or it is
    the source.

    One busy subtask is enough: where rows are unevenly spread over keys, the others have little to do. Subtask i of
    every task runs on the thread of slot i: if that thread has no time left, the task that takes most of it is
    the bottleneck, even if that is less than half.
    """
    waiting = {v.id for v in vertices if _most(v, "backpressured") >= BACKPRESSURED}
    held_up = {target for source, target, _ in edges if source in waiting}
    slots = _slots_busy(vertices)

    def is_slow(vertex: VertexStatus) -> bool:
        if vertex.id not in held_up:
            return _is_busy(vertex, VERY_BUSY)
        return _is_busy(vertex, BUSY) or any(
            slots[each.subtask] >= VERY_BUSY and each.busy > each.backpressured for each in vertex.subtasks
        )

    return max(filter(is_slow, vertices), key=lambda vertex: _most(vertex, "busy"), default=None)


def _slots_busy(vertices: Sequence[VertexStatus]) -> dict[int, float]:
    """Return the share of time for which each slot's thread works, computed from its subtasks."""
    busy: dict[int, float] = defaultdict(float)
    for vertex in vertices:
        for subtask in vertex.subtasks:
            busy[subtask.subtask] += subtask.busy
    return busy


def uneven(vertex: VertexStatus) -> SubtaskStatus | None:
    """Return the subtask that does most of the vertex's work while others have time left, if there is one."""
    busiest = vertex.busiest
    if busiest is None or vertex.parallelism == 1 or busiest.busy - vertex.busy < UNEVEN:
        return None
    return busiest


def _factor(slow: VertexStatus, slot_busy: float, vertices: Sequence[VertexStatus], edges: Edges) -> float | None:
    """Return the speed-up of the task with which its input would never wait, if it can be determined.

    A feeding task that works for a share b of its time and is backpressured for a share p could emit (b + p) / b times
    as many rows; a task whose slot is busy for a share s of its time could take 1 / s times as many. None without a
    feeding task that waits, or if its work is too small to be measured.
    """
    feeders = {source for source, target, _ in edges if target == slow.id}
    could = [
        (vertex.busy + vertex.backpressured) / vertex.busy
        for vertex in vertices
        if vertex.id in feeders and vertex.backpressured >= BACKPRESSURED and vertex.busy >= MEASURABLE
    ]
    factor = max(could, default=0.0) * slot_busy
    return factor if factor > 1.0 else None


def _multiplier(slow: VertexStatus, vertices: Sequence[VertexStatus], edges: Edges) -> tuple[str, float]:
    """Return the operator in or before the task that multiplies rows the most: its name and the factor. "" for none."""
    before = {slow.id}
    while more := {source for source, target, _ in edges if target in before} - before:
        before |= more
    ratios = [
        (operator.rows_out / operator.rows_in, operator.name)
        for vertex in vertices
        if vertex.id in before
        for operator in vertex.operators
        if operator.rows_in >= MULTIPLIED_ROWS_MIN and operator.rows_out >= MULTIPLIES * operator.rows_in
    ]
    ratio, name = max(ratios, default=(1.0, ""))
    return name, ratio


def _most_of_the_work(slow: VertexStatus) -> tuple[str, float]:
    """Return the operator that takes more than half of its chain's time: its name and its share. "" for none."""
    if len(slow.operators) == 1:
        return "", 0.0
    work, name = max((operator.work or 0.0, operator.name) for operator in slow.operators)
    return (name, work) if work > MOST else ("", 0.0)


def _is_busy(vertex: VertexStatus, at_least: float) -> bool:
    measured: Sequence[VertexStatus | SubtaskStatus] = vertex.subtasks or (vertex,)
    return any(each.busy > each.backpressured and each.busy >= at_least for each in measured)


def _most(vertex: VertexStatus, what: Literal["busy", "backpressured"]) -> float:
    """Return the largest share among the subtasks; that of the vertex while none of them has reported."""
    measured: Sequence[VertexStatus | SubtaskStatus] = vertex.subtasks or (vertex,)
    return max(each.busy if what == "busy" else each.backpressured for each in measured)
