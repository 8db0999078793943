"""What must be true of event time in completed checkpoints: it never goes back, and what was due has been let go."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from midstream.checkpoint.metadata import OperatorState
from midstream.protocol.messages import OperatorSnapshot
from midstream.sim.rows import SimSource, time_ms
from midstream.sim.timed import DELAY_US, WAITING, rows_waiting
from midstream.sim.topologies import Shape, behind_timers, is_on_time, uid_of

SAMPLES: Final = 5


class EventTimes:
    """`tables` gives the tables of a part of a subtask's state."""

    def __init__(
        self,
        shape: Shape,
        sources: Iterable[SimSource],
        tables: Callable[[OperatorSnapshot, str], Iterator[pa.Table]],
    ) -> None:
        self._tables = tables
        self._marks: dict[str, tuple[int, int]] = {}
        """How far it had come in the newest completed checkpoint, before and behind each operator."""
        held_back = behind_timers(shape)
        timers = [index for index, node in enumerate(shape) if node.chain[0] == "timer" and index not in held_back]
        self._timers = [uid_of(index, 0, "timer") for index in timers] if is_on_time(shape, sources) else []
        """Operators that hold rows, none of which comes late."""

    def begin_again(self) -> None:
        """The job goes on from an older checkpoint."""
        self._marks.clear()

    def check(self, where: str, operators: Mapping[str, OperatorState]) -> Iterator[str]:
        """A restore begins where the last of the subtasks that ran was."""
        marks = {}
        for uid, operator in operators.items():
            running = [operator.subtasks[index] for index in operator.running]
            if running:
                mark = marks[uid] = min(s.watermark_in_us for s in running), min(s.watermark_out_us for s in running)
                was = self._marks.get(uid, mark)
                if mark[0] < was[0] or mark[1] < was[1]:
                    yield f"{where}: event time of {uid} was at {was} (before it, behind it), and is at {mark}"
        self._marks = marks
        for uid in self._timers:
            for subtask in operators[uid].subtasks if uid in operators else ():
                due = [row for row in self._waiting(subtask) if due_us(row) <= subtask.watermark_out_us]
                if due:
                    told = f"has told of event time {subtask.watermark_out_us}"
                    yield f"{where}: {uid} {told}, and holds {due[:SAMPLES]} ({len(due)} rows)"

    def _waiting(self, subtask: OperatorSnapshot) -> Iterator[int]:
        for table in self._tables(subtask, f"map:{WAITING}"):
            for value in table.column("value").to_pylist():
                yield from rows_waiting(pickle.loads(value))


def due_us(row: int) -> int:
    """When a row that waits for event time is let go."""
    return time_ms(row) * 1000 + DELAY_US
