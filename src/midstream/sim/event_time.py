"""What must be true of event time in completed checkpoints: it never goes back, and what was due has been let go."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from midstream.checkpoint.metadata import OperatorState
from midstream.protocol.messages import OperatorSnapshot
from midstream.sim.rows import SOURCE_IDS, SimSource, time_ms
from midstream.sim.shapes import Shape
from midstream.sim.timed import DELAY_US, WAITING
from midstream.sim.topologies import behind_timers, on_time_at, uid_of

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
        self._timers = {
            uid_of(index, 0, "timer"): on_time
            for index, on_time in enumerate(on_time_at(shape, sources))
            if shape[index].chain[0] == "timer" and index not in held_back
        }
        """Operators that hold rows, and the sources whose rows never come late to them."""

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
        for uid, on_time in self._timers.items():
            for subtask in operators[uid].subtasks if uid in operators else ():
                waiting = (row for row in self._waiting(subtask) if row // SOURCE_IDS in on_time)
                due = [row for row in waiting if due_us(row) <= subtask.watermark_out_us]
                if due:
                    told = f"has told of event time {subtask.watermark_out_us}"
                    yield f"{where}: {uid} {told}, and holds {due[:SAMPLES]} ({len(due)} rows)"

    def _waiting(self, subtask: OperatorSnapshot) -> Iterator[int]:
        for table in self._tables(subtask, f"map:{WAITING}"):
            for value in table.column("value").to_pylist():
                yield from (row["id"] for row in pickle.loads(value))


def due_us(row: int) -> int:
    """When a row that waits for event time is let go."""
    return time_ms(row) * 1000 + DELAY_US
