"""The operators of one task in a chain: an operator's output is the next operator's input, in the same call.

A watermark moves down the chain only as fast as it fires: an operator with more results due than fit in a slice keeps
its watermark pending, and `pump` continues with it later. An operator never gets rows while an earlier watermark is
still pending for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from midstream.engine.core.elements import (
    MAX_WATERMARK_US,
    MIN_WATERMARK_US,
    Assigned,
    Event,
    Watermark,
    WatermarkStatus,
)
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Clock
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.operators.base import Operator
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT

NO_OPERATOR: Final = (-1, -1)


class TaskOutputs:
    """The partitions of a task, by the side output that they carry. Rows leave the task here."""

    def __init__(self, partitions: Sequence[ResultPartition]) -> None:
        self._all = partitions
        self._by_tag: dict[str | None, list[ResultPartition]] = {}
        for partition in partitions:
            self._by_tag.setdefault(partition.edge.tag, []).append(partition)

    def emit(self, batch: pa.RecordBatch, tag: str | None) -> None:
        for partition in self._by_tag.get(tag, ()):
            partition.emit(batch)

    def has_reader(self, tag: str) -> bool:
        """Whether some edge carries the rows of this side output."""
        return tag in self._by_tag

    def broadcast(self, event: Event) -> None:
        for partition in self._all:
            partition.broadcast(event)


class ChainOutput:
    """The output of the operator at `index - 1` (or of the source): the operator at `index`, or the edges."""

    __slots__ = ("_chain", "_index", "_is_last", "_task_outputs", "late_rows", "rows_out", "tap")

    def __init__(self, chain: OperatorChain, index: int, task_outputs: TaskOutputs) -> None:
        self._chain = chain
        self._index = index
        self._task_outputs = task_outputs
        self._is_last = index == len(chain.operators)
        self.rows_out = 0
        self.late_rows = 0
        """Rows that were dropped because they were late, and no edge carries the side output of late rows."""
        self.tap: Callable[[pa.RecordBatch, str | None], None] | None = None
        """Called with each batch and its side output before it is forwarded, while a user requests rows (see
        `engine.worker.live_row_sample`)."""

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        rows = batch.num_rows
        if rows == 0:
            return
        if tag in (LATE, LATE_RIGHT) and not self._task_outputs.has_reader(tag):
            self.late_rows += rows
            return
        self.rows_out += rows
        if self.tap is not None:
            self.tap(batch, tag)
        if self._is_last or tag is not None:
            chain = self._chain
            before = chain.enter((self._index, rows))
            self._task_outputs.emit(batch, tag)
            chain.enter(before)
        else:
            self._chain.process_at(self._index, batch, 0)

    def watermark(self, watermark_us: int) -> None:
        self._chain.offer(self._index, watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._chain.idle(self._index, idle, assigned)


class OperatorChain:
    """The chain of `operators`. `outputs[i]` is the input of operator i, and the last one leads to the edges."""

    def __init__(self, operators: Sequence[Operator], task_outputs: TaskOutputs, clock: Clock) -> None:
        self.operators = tuple(operators)
        self._with_work = [op for op in self.operators if type(op).awaits_work is not Operator.awaits_work]
        self._clock = clock
        self._task_outputs = task_outputs
        self.outputs = [ChainOutput(self, index, task_outputs) for index in range(len(self.operators) + 1)]
        self.rows_in = [0] * len(self.operators)
        self._pending: dict[int, int] = {}
        """The watermark that an operator has not finished firing for, by the operator's index."""
        self.offered_us = [MIN_WATERMARK_US] * (len(self.operators) + 1)
        """The last watermark that was offered to each operator. The last entry is the one that left the chain."""
        self._status = self._status_sent = WatermarkStatus(idle=False)
        """The idleness of the chain, and what was last sent of it over the edges."""
        self.current: tuple[int, int] = NO_OPERATOR
        """The index of the current operator, and how many rows it was given (-1 for a watermark, or for nothing). The
        index after the last operator's stands for the edges. A failure does not change it, so that it names the failed
        operator."""
        self.worked_s = [0.0] * (len(self.operators) + 2)
        """How long each operator has worked, then the edges. The last entry is the time when none of them did."""
        self._entered_s = clock.stopwatch_s()
        """When `current` last changed, by the stopwatch."""

    def enter(self, current: tuple[int, int]) -> tuple[int, int]:
        """Make this the current operator. Returns the previous one, which is charged with the time since it began."""
        before, now_s = self.current, self._clock.stopwatch_s()
        self.worked_s[before[0]] += now_s - self._entered_s
        self.current, self._entered_s = current, now_s
        return before

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if self.operators:
            self.process_at(0, batch, port)
        else:
            self.outputs[0].emit(batch)

    def process_at(self, index: int, batch: pa.RecordBatch, port: int) -> None:
        if self._pending:
            self._finish_pending(index)
        rows = batch.num_rows
        self.rows_in[index] += rows
        before = self.enter((index, rows))
        self.operators[index].process(batch, port)
        self.enter(before)

    def offer(self, index: int, watermark_us: int) -> None:
        """Offer a watermark to the operator at `index` and, once that has fired, to the operators after it."""
        while index < len(self.operators):
            operator = self.operators[index]
            if operator.makes_watermarks and watermark_us != MAX_WATERMARK_US:
                return
            if watermark_us <= self.offered_us[index]:
                return
            self.offered_us[index] = watermark_us
            if index in self._pending or not self._fire(index, watermark_us):
                self._pending[index] = watermark_us
                return
            if operator.holds_watermarks:
                return
            watermark_us = self._leaving(index, watermark_us)
            index += 1
        if watermark_us > self.offered_us[-1]:
            self.offered_us[-1] = watermark_us
            self._task_outputs.broadcast(Watermark(watermark_us))

    def _leaving(self, index: int, watermark_us: int) -> int:
        """Return the watermark that leaves the operator at `index` once it has fired this one."""
        delay_us = self.operators[index].watermark_delay_us
        return watermark_us if watermark_us == MAX_WATERMARK_US else max(MIN_WATERMARK_US, watermark_us - delay_us)

    def idle(self, index: int, idle: bool, assigned: Assigned = ()) -> None:
        """Handle a change of the input of the operator at `index`: it has become idle or active, or considers more splits."""
        if not any(operator.makes_watermarks for operator in self.operators[index:]):
            self._status = WatermarkStatus(idle, assigned)
            self._broadcast_idle()

    @property
    def awaits_work(self) -> bool:
        """Whether an operator will emit rows when work outside of the loop completes."""
        return any(operator.awaits_work for operator in self._with_work)

    def completed_work(self) -> None:
        """Handle that timers or completions have emitted what they had to."""
        self._broadcast_idle()

    def _broadcast_idle(self) -> None:
        """Send the chain's idleness over the edges if it has changed.

        A chain that still fires a watermark, or awaits work, does not report that it is idle: its consumers would advance
        event time without waiting for the rows that are still to come. But it reports which splits it considers, as the
        next watermark may depend on them.
        """
        status, sent = self._status, self._status_sent
        if status == sent:
            return
        if status.idle and (self._pending or self.awaits_work):
            if status.assigned == sent.assigned:
                return
            status = WatermarkStatus(False, status.assigned)
        self._status_sent = status
        self._task_outputs.broadcast(status)

    @property
    def watermark_us(self) -> int:
        """The last watermark that left the chain."""
        return self.offered_us[-1]

    def restore(self, marks: Mapping[int, tuple[int, int]]) -> None:
        """Restore event time: `marks` has, by operator index, the watermark offered to it and the one that left it.

        An operator continues to fire the watermark that was offered to it and has not left it. If the operator before
        it was in another task then, a newer one may have left that operator: then it fires that one. An operator whose
        index is not in `marks` is new. An operator that makes watermarks fires none, except for `MAX_WATERMARK_US`: it
        passes that one on, as in `offer`, and would not be offered it again.
        """
        for index, operator in enumerate(self.operators):
            offered_us, left_us = marks.get(index, (MIN_WATERMARK_US, MIN_WATERMARK_US))
            self.offered_us[index] = offered_us = max(offered_us, self.offered_us[index])
            self.offered_us[index + 1] = left_us
            if left_us < self._leaving(index, offered_us) and (
                offered_us == MAX_WATERMARK_US or not operator.makes_watermarks
            ):
                self._pending[index] = offered_us

    @property
    def is_firing(self) -> bool:
        """Whether a watermark is pending. Then `pump` must be called before any row is processed."""
        return bool(self._pending)

    @property
    def firing(self) -> int:
        """The index of the operator that `pump` fires next."""
        return max(self._pending)

    def pump(self) -> None:
        """Fire one more slice of the pending watermark of the operator that is closest to the edges."""
        self._fire_pending(self.firing)
        self._broadcast_idle()

    def _fire_pending(self, index: int) -> None:
        watermark_us = self._pending[index]
        if self._fire(index, watermark_us):
            del self._pending[index]
            if not self.operators[index].holds_watermarks:
                self.offer(index + 1, self._leaving(index, watermark_us))

    def _fire(self, index: int, watermark_us: int) -> bool:
        before = self.enter((index, -1))
        all_fired = self.operators[index].advance_watermark(watermark_us)
        self.enter(before)
        return all_fired

    def row_in_batch(self, rows: int, row: int | None) -> int | None:
        """The position, among the `rows` that entered the chain, of row `row` of the current operator.

        None if it is unknown, because an operator in between has added, removed or merged rows.
        """
        index, given = self.current
        if row is None or given != rows or not all(operator.keeps_rows for operator in self.operators[:index]):
            return None
        return row

    @property
    def processes_batch(self) -> bool:
        """Whether the current operator has rows that were made from the batch that entered the chain last."""
        index, given = self.current
        return given >= 0 and all(operator.keeps_splits for operator in self.operators[:index])

    def end_input(self, port: int) -> None:
        if self.operators:
            self.operators[0].end_input(port)

    def finish(self) -> None:
        """Finish all operators: every input has ended and every watermark has fired."""
        assert not self._pending, self._pending
        for index, operator in enumerate(self.operators):
            if index:
                operator.end_input(0)
            before = self.enter((index, -1))
            operator.finish()
            self.enter(before)
            self._finish_pending(index + 1)

    def _finish_pending(self, index: int) -> None:
        """Let the operator at `index` finish firing, because rows are about to reach it."""
        while index in self._pending:
            self._fire_pending(index)

    def check(self) -> None:
        """Check that every operator without a pending watermark has forwarded the watermark that it was offered, and that
        consumers know which splits the chain considers, and whether it is idle.
        """
        status, sent = self._status, self._status_sent
        if status.assigned != sent.assigned or (status.idle != sent.idle and not (self._pending or self.awaits_work)):
            raise InvariantError(f"a chain is {status}, has reported {sent}, and will not report again")
        if self.offered_us[0] == self.offered_us[-1]:
            return  # nearly always: the last watermark has left the chain
        for index, operator in enumerate(self.operators):
            mark, left = self.offered_us[index], self.offered_us[index + 1]
            may_keep = operator.makes_watermarks or operator.holds_watermarks
            if self._leaving(index, mark) > left and index not in self._pending and not may_keep:
                following = self.operators[index + 1 : index + 2]
                if mark == MAX_WATERMARK_US or not any(each.makes_watermarks for each in following):
                    raise InvariantError(
                        f"operator {index} was offered {mark}, has forwarded {left}, and none is pending"
                    )
