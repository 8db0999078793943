"""The watermarks that an operator has reached, per key group: what had fired, and which rows are late.

Within one run all key groups have the same watermark, except while the firing of one window is interrupted. After a
rescale a subtask owns key groups of several old subtasks, which stopped at different watermarks; what had fired must
not fire again, and what was late stays late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.state.state_parts import KEY_GROUP, StatePart, check_columns

Int32s = npt.NDArray[np.int32]
_AT_REST: Final = pa.schema([(KEY_GROUP, pa.int32()), ("watermark", pa.int64())])


class KeyGroupWatermarks:
    """The watermarks of the key groups `owned`, in the unit of the event-time column."""

    def __init__(self, owned: range) -> None:
        self._owned = owned
        self._marks = np.full(max(1, len(owned)), MIN_WATERMARK_US, np.int64)
        self._key_groups = pa.array(np.array(owned, np.int32))
        self.lowest = MIN_WATERMARK_US
        self.is_even = True

    def reach(self, watermark: int) -> None:
        """Raise the watermarks of all key groups to at least this one."""
        if not self.is_even:
            self._set(np.maximum(self._marks, watermark))
        elif watermark > self.lowest:
            self._marks = np.full_like(self._marks, watermark)
            self.lowest = watermark

    def reach_up_to(self, key_group: int, watermark: int) -> None:
        """Raise the watermarks of the key groups up to and including `key_group`."""
        marks = self._marks.copy()
        count = key_group + 1 - self._owned.start
        marks[:count] = np.maximum(marks[:count], watermark)
        self._set(marks)

    def _set(self, marks: npt.NDArray[np.int64]) -> None:
        self._marks = marks
        self.lowest = int(marks.min())
        self.is_even = bool((marks == self.lowest).all())

    def of(self, key_groups: Int32s) -> npt.NDArray[np.int64]:
        """Return the watermark of each of these key groups."""
        marks: npt.NDArray[np.int64] = self._marks[key_groups - self._owned.start]
        return marks

    def levels(self, key_groups: Int32s) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        """Yield each distinct watermark of rows with these key groups, and which rows have it."""
        marks = self.of(key_groups)
        for mark in np.unique(marks):
            yield int(mark), marks == mark

    def table(self) -> pa.Table | None:
        """Return the watermarks as a table; None if there has been no watermark yet."""
        if self.is_even and self.lowest == MIN_WATERMARK_US:
            return None
        return pa.Table.from_arrays([self._key_groups, pa.array(self._marks)], schema=_AT_REST)

    def restore(self, part: StatePart) -> None:
        """Raises StorageError for a part with other columns than `table` has."""
        marks = self._marks.copy()
        for chunk in part.chunks:
            table = chunk.table
            check_columns(table, dict(zip(_AT_REST.names, _AT_REST.types, strict=True)), "the progress of event time")
            groups = table.column(KEY_GROUP).to_numpy()
            marks[groups - self._owned.start] = table.column("watermark").to_numpy()
        self._set(marks)
