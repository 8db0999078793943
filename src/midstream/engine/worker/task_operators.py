"""Runs the source and the operators of one task: opens them with their state, calls timers, takes snapshots, closes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, FunctionCalls, Outcomes, Timer
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Vertex
from midstream.engine.operators.bad_records import BAD_RECORDS
from midstream.engine.operators.base import Operator, OperatorContext, Snapshot, SnapshotResult, Splits
from midstream.engine.operators.source_api import Source
from midstream.engine.protocol import messages as m
from midstream.engine.state.state_parts import StatePart
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.operator_chain import NO_OPERATOR, OperatorChain, TaskOutputs
from midstream.engine.worker.source_reader import SourceReader
from midstream.engine.worker.task_input import SLICE_S

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoredOperators:
    """The restored state of a task's operators and its source."""

    parts: dict[str, dict[str, StatePart]] = field(default_factory=dict)
    known: dict[str, m.ChunkHandle] = field(default_factory=dict)
    """The handles of those chunks that the checkpoint has in files, by the chunk's id."""
    watermarks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The last watermark offered to each operator, and the last one that left it, by uid."""


class TaskOperators:
    """The source and the operators of one task.

    `is_bounded`: every source that they depend on is bounded.
    `wake` is called when a timer is due, and `fail` when something fails on another thread.
    """

    def __init__(
        self,
        ref: TaskId,
        vertex: Vertex,
        is_bounded: bool,
        services: TaskServices,
        partitions: list[ResultPartition],
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._ref = ref
        self._vertex = vertex
        self._is_bounded = is_bounded
        self._services = services
        self._wake = wake
        self._fail = fail
        self.outputs = TaskOutputs(partitions)
        self.chain = OperatorChain([spec.operator for spec in vertex.operators], self.outputs, services.clock)
        self.uids = [spec.uid for spec in vertex.operators]
        self.source: SourceReader | None = None
        self._may_be_busy = [
            (index, op) for index, op in enumerate(self.chain.operators) if type(op).ready is not Operator.ready
        ]
        """The operators that at times are not ready for rows, with their indexes."""
        self.due: deque[tuple[int, Callable[[], None]]] = deque()
        """The callbacks of timers that are due, and of work that has completed, each with its operator's index. They may
        emit, so they wait until there is room in the output."""
        self._timers: set[Timer] = set()
        self._takes_timers = True
        """Whether timers may be set. After the end of the data, a timer would never be called."""

    def open(self, restored: RestoredOperators, stored_bytes: Callable[[str], int | None]) -> None:
        """Open every operator and give it its state. Raises any exception that an operator raises."""
        vertex, services, head = self._vertex, self._services, self._vertex.source
        if head is not None:
            self.source = self._new_source(head.source)
            if head.uid in restored.parts:
                self.source.restore(restored.parts[head.uid])
        splits: Splits | None = self.source
        for index, spec in enumerate(vertex.operators):
            context = OperatorContext(
                uid=spec.uid,
                name=spec.name,
                subtask=self._ref.subtask,
                parallelism=vertex.parallelism,
                max_parallelism=services.config.max_parallelism,
                key_groups=key_group_range(self._ref.subtask, vertex.parallelism, services.config.max_parallelism),
                slice_s=SLICE_S,
                clock=services.clock,
                executor=services.executor,
                ids=services.ids,
                storage=services.storage,
                call_at=partial(self._call_at, index),
                call_later=partial(self._call_later, index),
                submit=partial(self._submit, index),
                open_calls=partial(self._open_calls, index),
                watermark_us=restored.watermarks.get(spec.uid, (MIN_WATERMARK_US, 0))[0],
                fail=self._fail,
                job_id=services.job_id,
                attempt=services.attempt,
                stored_bytes=stored_bytes,
                splits=splits,
                is_bounded=self._is_bounded,
                resources=services.resources,
                entry_bytes=services.entry_bytes,
            )
            if not spec.operator.keeps_splits:
                splits = None
            self.chain.current = index, -1
            spec.operator.open(context, self.chain.outputs[index + 1])
            if self.source is not None:
                self.source.every_row_passes &= spec.operator.keeps_every_row
            if spec.uid in restored.parts:
                spec.operator.restore(restored.parts[spec.uid])
            self.chain.current = NO_OPERATOR
        watermarks = restored.watermarks
        self.chain.restore({i: watermarks[uid] for i, uid in enumerate(self.uids) if uid in watermarks})
        if not self.uids and head is not None and head.uid in watermarks:
            self.chain.offered_us[0] = watermarks[head.uid][1]

    def _new_source(self, source: Source) -> SourceReader:
        services = self._services
        return SourceReader(
            source,
            self._vertex.parallelism,
            services,
            columns=self._vertex.source.columns if self._vertex.source is not None else None,
            emit=self.chain.outputs[0].emit,
            emit_bad=lambda rows: self.outputs.emit(rows, BAD_RECORDS),
            request_split=lambda: services.send(m.RequestSplit(services.attempt, self._ref)),
            limit=DriftLimit(
                lambda lowest_us, splits: services.send(
                    m.SourceProgress(services.attempt, self._ref, lowest_us, splits)
                )
            ),
            wake=self._wake,
            fail=self._fail,
        )

    def snapshot(self, checkpoint_id: int) -> list[tuple[m.OperatorSnapshot, Snapshot]]:
        """The event time and the state of the source and of each operator, in the order of the chain."""
        offered_us = self.chain.offered_us
        snapshots = []
        if self.source is not None and self._vertex.source is not None:
            self.source.begin_checkpoint(checkpoint_id)
            uid, parts = self._vertex.source.uid, self.source.snapshot(self._services.ids.new_id)
            head = m.OperatorSnapshot(uid, watermark_in_us=offered_us[0], watermark_out_us=offered_us[0])
            snapshots.append((head, Snapshot(SnapshotResult(parts=parts))))
        for index, operator in enumerate(self.chain.operators):
            head = m.OperatorSnapshot(
                self.uids[index], watermark_in_us=offered_us[index], watermark_out_us=offered_us[index + 1]
            )
            snapshots.append((head, operator.snapshot(checkpoint_id)))
        return snapshots

    @property
    def current_operator(self) -> tuple[str, str]:
        """The name and the uid of the operator that runs now, or that has failed.

        Where no operator runs they are those of the task's source, and empty in a task without a source.
        """
        index = min(self.chain.current[0], len(self._vertex.operators) - 1)
        if index >= 0:
            spec = self._vertex.operators[index]
            return spec.name, spec.uid
        source = self._vertex.source
        return ("", "") if source is None else (source.name, source.uid)

    def close(self) -> None:
        self.stop_timers()
        if self.source is not None:
            self.source.close()
        for spec in self._vertex.operators:
            try:
                spec.operator.close()
            except BaseException:  # noqa: BLE001 - the other operators must be closed too
                _log.warning("%s: closing it failed", spec.name, exc_info=True)

    # ---- rows ----

    def are_ready(self, after: int) -> bool:
        """Whether all operators after the one at this index can take rows. If not, `wake` will be called."""
        return all(operator.ready(self._wake) for index, operator in self._may_be_busy if index > after)

    def at_work(self) -> int | None:
        """The operator that takes no rows because of its own work outside of the loop; None if it waits for a later one."""
        busy = [(index, operator) for index, operator in self._may_be_busy if not operator.ready(self._wake)]
        return busy[-1][0] if busy and busy[-1][1].awaits_work else None

    # ---- timers, and work outside of the loop ----

    def next_due(self) -> int | None:
        """The position in `due` of what can be called next; None if there is nothing. If so, `wake` will be called.

        That is the first one, if all operators after its own take rows now. If not, it is the first one of the last
        operator in the chain that has any, because the operators that take no rows may wait for exactly that call.
        """
        if not self.due or self.are_ready(self.due[0][0]):
            return 0 if self.due else None
        last = max(index for index, _ in self.due)
        return next(at for at, (index, _) in enumerate(self.due) if index == last) if self.are_ready(last) else None

    def call_due(self, position: int) -> None:
        """Call a timer that is due, or the completion of work, in the name of its operator."""
        index, mail = self.due[position]
        del self.due[position]
        before = self.chain.enter((index, -1))
        mail()
        self.chain.enter(before)

    def _call_at(self, index: int, time_ms: int, mail: Callable[[], None]) -> Timer:
        return self._timer(index, f"at {time_ms} ms", partial(self._services.executor.call_at, time_ms), mail)

    def _call_later(self, index: int, delay_s: float, mail: Callable[[], None]) -> Timer:
        return self._timer(index, f"in {delay_s} s", partial(self._services.executor.call_later, delay_s), mail)

    def _timer(
        self, index: int, when: str, start: Callable[[Callable[[], None]], Timer], mail: Callable[[], None]
    ) -> Timer:
        if not self._takes_timers:
            raise InvariantError(f"task {self._ref} has ended its data, and sets a timer {when}")
        timer: Timer

        def fire() -> None:
            self._timers.discard(timer)
            self._add_due(index, mail)

        timer = start(fire)
        self._timers.add(timer)
        return timer

    def _submit(self, index: int, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        self._services.executor.submit(work, lambda outcome: self._add_due(index, partial(done, outcome)))

    def _open_calls(
        self, index: int, of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]
    ) -> FunctionCalls:
        return self._services.open_calls(
            of_coroutines, threads_max, lambda outcomes: self._add_due(index, partial(completed, outcomes))
        )

    def _add_due(self, index: int, mail: Callable[[], None]) -> None:
        if self._takes_timers:
            self.due.append((index, mail))
            self._wake()

    def stop_timers(self) -> None:
        """Cancel all timers, and drop the outcome of work under way. From now on no timer can be set."""
        self._takes_timers = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.due.clear()
