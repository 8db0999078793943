"""The metrics of one subtask in each heartbeat."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from midstream.engine.core.ids import TaskId

SPLIT_CHARS_MAX: Final = 200


class EdgeMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The output of one subtask on one edge since it was deployed; bytes as in memory."""

    edge: int
    rows: int
    bytes: int
    batches: int


class InputMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The event time of the channels of one edge into a task for which it waits: not idle, not ended."""

    edge: int
    watermark_us: int
    """The lowest watermark; here and below, the lowest int64 if there is none."""
    producer: int
    """The subtask whose watermark that is."""
    furthest_us: int
    """The highest watermark."""


class SplitMetrics(msgspec.Struct, frozen=True, array_like=True):
    split: Annotated[str, msgspec.Meta(max_length=SPLIT_CHARS_MAX)]
    """The id of the split; of a longer one, the end."""
    watermark_us: int
    """Its event time, less the strategy's delay; the lowest int64 before its first row."""
    furthest_us: int
    """The event time of the most advanced split of that subtask."""


class UserMetric(msgspec.Struct, frozen=True, array_like=True):
    """A counter or gauge of a user's function."""

    uid: str
    """The uid of the operator."""
    name: str
    is_counter: bool
    value: float


class TaskMetrics(msgspec.Struct, frozen=True):
    """Totals since the task was deployed."""

    task: TaskId
    rows_in: int
    rows_out: int
    busy_ms: int
    backpressured_ms: int
    watermark_us: int
    """The watermark; the lowest int64 if there is none."""
    operators: tuple[tuple[str, int, int], ...] = ()
    """For each operator of the chain, the source included: uid, rows in, rows out."""
    worked_us: tuple[int, ...] = ()
    """The working time of each of `operators`."""
    to_recover_bytes: int = 0
    """The bytes in flight to it in the checkpoint, as stored: rows of other subtasks included."""
    recovered_bytes: int = 0
    """The bytes of those that it has read."""
    late: tuple[tuple[str, int], ...] = ()
    """For each operator that has dropped rows as late: uid, rows."""
    failed: tuple[tuple[str, int], ...] = ()
    """For each operator that has dropped rows for which its function failed, or emitted them apart: uid, rows."""
    timers_dropped: tuple[tuple[str, int], ...] = ()
    """For each operator whose last timers have set others: uid, number of those."""
    bad_records: int = 0
    """The number of records that its source has dropped."""
    edges: tuple[EdgeMetrics, ...] = ()
    inputs: tuple[InputMetrics, ...] = ()
    """The event time of each edge on which it waits for a channel."""
    slowest_split: SplitMetrics | None = None
    """The least advanced split that is waited for, of a source whose event time is tracked by split."""
    user: tuple[UserMetric, ...] = ()
    splits_ahead: int = 0
    """The number of splits that are not read at present, because they are further ahead than the drift allows."""
