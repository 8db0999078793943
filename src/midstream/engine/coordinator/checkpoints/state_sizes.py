"""How much state the operators hold, as of the newest completed checkpoint, and how it has grown since the job began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.state_files import location_of
from midstream.engine.protocol.job_status import StateSize

POINTS_MAX: Final = 64
"""The limit on points: beyond it, every second one is dropped, so that they cover the whole life of a job of any age.
"""


class StateSizes:
    def __init__(self) -> None:
        self.of: Mapping[str, tuple[int, int]] = {}
        """The rows and bytes of each operator, by uid."""
        self._points: list[StateSize] = []
        self._newest: StateSize | None = None
        self._every = 1
        self._left_out = 0

    @property
    def growth(self) -> Sequence[StateSize]:
        """The sizes over time, oldest first; the newest is always included."""
        if self._newest is None or self._points[-1] == self._newest:
            return self._points
        return [*self._points, self._newest]

    def add(self, metadata: CheckpointMetadata, at_ms: int) -> None:
        """Record the sizes of a checkpoint that has completed, or from which the job resumes, at this time."""
        self.of = {operator: sizes for operator, sizes in _sizes(metadata).items() if sizes != (0, 0)}
        self._newest = StateSize(at_ms, sum(size for _, size in self.of.values()))
        self._left_out += 1
        if self._points and self._left_out < self._every:
            return
        self._left_out = 0
        self._points.append(self._newest)
        if len(self._points) > POINTS_MAX:
            self._points = self._points[::2]
            self._every *= 2


def _sizes(metadata: CheckpointMetadata) -> dict[str, tuple[int, int]]:
    """Return the rows and bytes of each operator. A chunk that several subtasks share after a rescale counts once."""
    found = {}
    for operator in metadata.operators:
        chunks = {
            location_of(chunk): (chunk.live_rows, chunk.stored_bytes)
            for subtask in operator.subtasks
            for part in subtask.parts
            for chunk in part.chunks
        }
        found[operator.uid] = (sum(rows for rows, _ in chunks.values()), sum(size for _, size in chunks.values()))
    return found
