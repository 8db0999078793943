"""What one subtask tells of itself in each heartbeat."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from midstream.core.ids import TaskId

SPLIT_CHARS_MAX: Final = 200


class EdgeMetrics(msgspec.Struct, frozen=True, array_like=True):
    """What one subtask has emitted on one edge since it was deployed, in bytes as they lie in memory."""

    edge: int
    rows: int
    bytes: int
    batches: int


class InputMetrics(msgspec.Struct, frozen=True, array_like=True):
    """How far event time has come on the channels of one edge into a task, of those that it waits for: not idle, not ended."""

    edge: int
    watermark_us: int
    """The least of them. The lowest int64 while there is none, here and below."""
    producer: int
    """The subtask that has come no further than that."""
    furthest_us: int
    """The most of them."""


class SplitMetrics(msgspec.Struct, frozen=True, array_like=True):
    split: Annotated[str, msgspec.Meta(max_length=SPLIT_CHARS_MAX)]
    """Its id; of a longer one the end."""
    watermark_us: int
    """How far it has come, less the strategy's delay. The lowest int64 before its first row."""
    furthest_us: int
    """The same of the split of that subtask that has come furthest."""


class UserMetric(msgspec.Struct, frozen=True, array_like=True):
    """A counter or gauge of a user's function."""

    uid: str
    """Of the operator."""
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
    """The lowest int64 while there is none."""
    operators: tuple[tuple[str, int, int], ...] = ()
    """Per operator of the chain, the source included: uid, rows in, rows out."""
    worked_us: tuple[int, ...] = ()
    """Of each of `operators`: how long it was at work."""
    to_recover_bytes: int = 0
    """What the checkpoint held in flight for it, as it lies there: rows of other subtasks included."""
    recovered_bytes: int = 0
    """How much of that it has taken up."""
    late: tuple[tuple[str, int], ...] = ()
    """Per operator that has dropped rows as late: uid, rows."""
    timers_dropped: tuple[tuple[str, int], ...] = ()
    """Per operator whose last timers have set others: uid, how many."""
    bad_records: int = 0
    """How many its source has left out."""
    edges: tuple[EdgeMetrics, ...] = ()
    inputs: tuple[InputMetrics, ...] = ()
    """Of each edge on which it waits for a channel."""
    slowest_split: SplitMetrics | None = None
    """Of a source whose event time is known by split: the one that has come the least far, of those waited for."""
    user: tuple[UserMetric, ...] = ()
