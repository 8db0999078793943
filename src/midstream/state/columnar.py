"""Columnar state: logs of immutable frames, merged when they have doubled.

A snapshot only refers to frames; turning them into tables with key groups is for the I/O pool.
A large frame keeps the id under which a checkpoint first stored it, so that it is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.core.batches import from_polars
from midstream.core.keys import key_groups
from midstream.core.seams import Ids
from midstream.state.parts import KEY_GROUP, Chunk

STAGED_ROWS = 16_384
"""So many rows may lie unmerged, or as many as are merged, if those are more."""
STAGED_RUNS = 64
"""So many frames may lie unmerged, however small."""
OWN_CHUNK_ROWS = 8_192
"""Frames from this size on are chunks of their own in a snapshot; smaller ones share one."""

Int32s = npt.NDArray[np.int32]
Merge = Callable[[Sequence[pl.DataFrame]], pl.DataFrame]
Ordered = tuple[pl.DataFrame, Int32s]
"""Rows by key group, and the key group of each."""


class Run:
    """A frame that never changes (of windows: with at most one part per key and window).

    Its two memos only ever go from None to the one right value.
    """

    __slots__ = ("chunk_id", "frame", "groups", "rows")

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame
        self.rows = frame.height
        self.chunk_id: str | None = None
        self.groups: Int32s | None = None


class PartLog:
    """Frames of parts in the order they were made: a merged one, then those that came since."""

    __slots__ = ("_merge", "rows", "runs")

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.runs: list[Run] = []
        self.rows = 0

    def append(self, frame: pl.DataFrame) -> None:
        self.runs.append(Run(frame))
        self.rows += frame.height
        merged = self.runs[0].frame.height
        if self.rows - merged > max(merged, STAGED_ROWS) or len(self.runs) > STAGED_RUNS:
            self.merged()

    def restore(self, frame: pl.DataFrame) -> None:
        """Append a frame of several runs, as `freeze` makes them."""
        self.append(self._merge([frame]))

    def merged(self) -> pl.DataFrame:
        """All parts in one frame; it takes the place of the others."""
        if len(self.runs) > 1:
            self.replace([self._merge([run.frame for run in self.runs])])
        return self.runs[0].frame

    def by_group(self, form: StateForm) -> Ordered:
        """All parts in one frame by key group; it takes the place of the others, so that it is sorted once."""
        self.merged()
        groups = form.groups_of(self.runs[0])
        if (groups[1:] < groups[:-1]).any():
            frame, groups = by_group(self.runs[0].frame, groups)
            self.replace([frame])
            self.runs[0].groups = groups
        return self.runs[0].frame, groups

    def replace(self, frames: Iterable[pl.DataFrame]) -> None:
        kept = {id(run.frame): run for run in self.runs}
        self.runs = [kept.get(id(frame)) or Run(frame) for frame in frames if frame.height]
        self.rows = sum(run.frame.height for run in self.runs)

    def frames(self) -> list[pl.DataFrame]:
        return [run.frame for run in self.runs]


def by_group(frame: pl.DataFrame, groups: Int32s) -> Ordered:
    """Rows of one key group stay in their order."""
    order = groups.astype(np.uint16).argsort(kind="stable")  # 16 bits are counted, not compared: 20 times as fast
    return frame[order], groups[order]


class StateForm:
    """How frames become tables at rest: columns `__key_group`, `log` if there are several logs, then those of `schema`.

    `log`: what tells the logs apart, a column of a type that is an int64 at heart.
    """

    def __init__(
        self, schema: pa.Schema, keys: tuple[str, ...], max_parallelism: int, log: pa.Field[Any] | None = None
    ) -> None:
        self.schema = schema
        self.keys = keys
        self._key_schema = pa.schema([schema.field(key) for key in keys])
        self._max_parallelism = max_parallelism
        first = [pa.field(KEY_GROUP, pa.int32()), *([] if log is None else [log])]
        self._log = log
        self._at_rest = pa.schema([*first, *schema])

    def groups(self, frame: pl.DataFrame) -> Int32s:
        """The key group of each row; 0 for all where there are no keys."""
        if not self.keys:
            return np.zeros(frame.height, np.int32)
        # In the stream's own types, in which rows are dealt out too.
        keys = from_polars(frame.select(self.keys), self._key_schema, "keys of state")
        return key_groups(keys, self.keys, self._max_parallelism)

    def groups_of(self, run: Run) -> Int32s:
        if run.groups is None:
            run.groups = self.groups(run.frame)
        return run.groups

    def table(self, runs: Sequence[tuple[int, Run]]) -> pa.Table:
        """All rows of these runs, each with the number of its log, in their order.

        They are joined first: turning a frame into a table takes the same time for a row as for a thousand.
        """
        frames = [run.frame for _, run in runs]
        batch = from_polars(frames[0] if len(frames) == 1 else pl.concat(frames), self.schema, "state")
        columns: list[pa.Array[Any]] = [pa.array(self._groups_of_all([run for _, run in runs], batch))]
        if self._log is not None:
            numbers = np.repeat([number for number, _ in runs], [frame.height for frame in frames])
            columns.append(pa.array(numbers, pa.int64()).view(self._log.type))
        return pa.Table.from_arrays([*columns, *batch.columns], schema=self._at_rest)

    def _groups_of_all(self, runs: Sequence[Run], rows: pa.RecordBatch) -> Int32s:
        """The key group of each of `rows`, which are those of `runs`."""
        known = [run.groups for run in runs if run.groups is not None]
        if len(known) == len(runs):
            return known[0] if len(known) == 1 else np.concatenate(known)
        if not self.keys:
            return np.zeros(rows.num_rows, np.int32)
        groups = key_groups(rows, self.keys, self._max_parallelism)
        start = 0
        for run in runs:
            run.groups = groups[start : start + run.rows]
            start += run.rows
        return groups


def freeze(logs: Sequence[tuple[int, Sequence[Run]]], form: StateForm, ids: Ids) -> Callable[[], tuple[Chunk, ...]]:
    """The runs of all logs as chunks, to be made on the I/O pool; each log with its number (any, if there is one log).

    The parts of a log stay in order: a shared chunk ends where one of its logs has a chunk of its own.
    """
    planned: list[tuple[str, list[tuple[int, Run]]]] = []
    shared: list[tuple[int, Run]] = []
    for number, runs in logs:
        first_shared = len(shared)
        for run in runs:
            if run.rows < OWN_CHUNK_ROWS:
                shared.append((number, run))
                continue
            if len(shared) > first_shared:
                planned.append((ids.new_id(), shared))
                shared, first_shared = [], 0
            run.chunk_id = run.chunk_id or ids.new_id()
            planned.append((run.chunk_id, [(number, run)]))
    if shared:
        planned.append((ids.new_id(), shared))
    return lambda: tuple(Chunk(chunk_id, form.table(runs)) for chunk_id, runs in planned)
