"""The rules for event time in completed checkpoints: it never decreases, and rows that were due are no longer held."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from midstream.engine.checkpoint.metadata import OperatorState, VertexLayout
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.protocol.messages import OperatorSnapshot
from midstream.simulation.outside import SOURCE_IDS
from midstream_lab.jobs.on_time import behind_timers, on_time_at
from midstream_lab.jobs.recorded_rows import SimSource, time_ms
from midstream_lab.jobs.shapes import Shape
from midstream_lab.jobs.timed import DELAY_US, WAITING
from midstream_lab.jobs.topologies import uid_of

SAMPLES: Final = 5


class EventTimeChecker:
    """Checks event time in the checkpoints of one run. `tables` returns the tables of a part of a subtask's state."""

    def __init__(
        self,
        shape: Shape,
        sources: Iterable[SimSource],
        tables: Callable[[OperatorSnapshot, str], Iterator[pa.Table]],
        is_aligned: bool,
    ) -> None:
        self._tables = tables
        self.marks: Mapping[str, tuple[int, int]] = {}
        """How far event time had come in the preceding checkpoint: in the input and in the output of each operator."""
        held_back = behind_timers(shape)
        self._timers = {
            uid_of(index, 0, "timer"): on_time
            for index, on_time in enumerate(on_time_at(shape, sources))
            if shape[index].chain[0] == "timer" and index not in held_back
        }
        """The operators that hold rows, and the sources whose rows never reach them late."""

        self._readers = [
            (uid_of(index, 0, node.chain[0]), [_last_of(shape, entry.node) for entry in node.inputs])
            for index, node in enumerate(shape)
            if node.inputs and is_aligned
        ]
        """The operators with the producers of their input, in jobs whose barriers overtake nothing; empty in others."""

    def check(
        self, where: str, operators: Mapping[str, OperatorState], vertices: Iterable[VertexLayout]
    ) -> Iterator[str]:
        """Yield complaints about a checkpoint. The marks of an operator are the lowest ones of its running subtasks,
        since a restore begins there.

        A source has no event time of its own: its marks repeat those of the first operator in its task, if there is
        one. That operator may be new, and begins again until the source ends once more. So only the operator is checked.
        """
        repeated = {vertex.source for vertex in vertices if len(vertex.uids) > 1}
        marks = {}
        for uid, operator in operators.items():
            running = [operator.subtasks[index] for index in operator.running]
            if running:
                mark = marks[uid] = min(s.watermark_in_us for s in running), min(s.watermark_out_us for s in running)
                was = self.marks.get(uid, mark)
                if uid not in repeated and (mark[0] < was[0] or mark[1] < was[1]):
                    yield f"{where}: event time of {uid} was at {was} (before it, after it), and is at {mark}"
        self.marks = marks
        for uid, producers in self._readers:
            if uid in operators and all(producer in operators for producer in producers):
                reported_us = min(mark for producer in producers for mark in _reported_us(operators[producer]))
                received_us = {
                    index: operators[uid].subtasks[index].watermark_in_us for index in operators[uid].running
                }
                lagging = [index for index, mark_us in received_us.items() if mark_us < reported_us]
                if lagging:
                    yield f"{where}: event time stands still: {uid}/{lagging[0]} is at {received_us[lagging[0]]}, all have reported {reported_us}"
        for uid, on_time in self._timers.items():
            for subtask in operators[uid].subtasks if uid in operators else ():
                waiting = (row for row in self._waiting(subtask) if row // SOURCE_IDS in on_time)
                due = [row for row in waiting if due_us(row) <= subtask.watermark_out_us]
                if due:
                    reported = f"has reported event time {subtask.watermark_out_us}"
                    yield f"{where}: {uid} {reported}, and holds {due[:SAMPLES]} ({len(due)} rows)"

    def _waiting(self, subtask: OperatorSnapshot) -> Iterator[int]:
        for table in self._tables(subtask, f"map:{WAITING}"):
            for value in to_list(table.column("value")):
                yield from (row["id"] for row in pickle.loads(value))


def _last_of(shape: Shape, node: int) -> str:
    chain = shape[node].chain
    return uid_of(node, len(chain) - 1, chain[-1])


def _reported_us(operator: OperatorState) -> Iterator[int]:
    """Yield how far event time has come in the output of each subtask."""
    for index, subtask in enumerate(operator.subtasks):
        yield MAX_WATERMARK_US if index in operator.finished else subtask.watermark_out_us


def due_us(row: int) -> int:
    """Return the event time at which a held row is emitted."""
    return time_ms(row) * 1000 + DELAY_US
