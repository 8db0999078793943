"""Event-time windows: what declares one, and the operator that aggregates rows in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from midstream.engine.core.config import Duration, duration_us
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.session_windows import SessionWindowOperator
from midstream.engine.operators.windows.top_rows import TopAggregation
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.operators.windows.window_specs import (
    IS_EARLY,
    LATE,
    LATE_RIGHT,
    WINDOW_END,
    WINDOW_START,
    CountWindow,
    Session,
    Sliding,
    Window,
    count,
    session,
    sliding,
    tumbling,
)

__all__ = [
    "IS_EARLY",
    "LATE",
    "LATE_RIGHT",
    "WINDOW_END",
    "WINDOW_START",
    "CountWindow",
    "Session",
    "Sliding",
    "Window",
    "count",
    "operator_of",
    "session",
    "sliding",
    "top_operator",
    "tumbling",
    "window_operator",
]


def window_operator(
    name: str,
    *,
    window: Window,
    keys: Sequence[str],
    event_time: str | TimeColumn,
    aggregates: Mapping[str, AnyAggregate],
    schema: pa.Schema,
    allowed_lateness: Duration = 0,
    emit_every: Duration = 0,
) -> WindowOperator:
    """Return the operator for `window`; its attribute `schema` is the schema of what it emits.

    Emitted columns: `keys`, `window_start`, `window_end` (timestamps of the type of the event-time column), then one
    per aggregate, in the order given. `keys` may be empty: one window for all rows, and the operator must then run with
    parallelism 1. `schema` is that of the input rows.

    A window is emitted when the watermark reaches its end. A row that arrives later, but within `allowed_lateness`,
    causes its windows to be emitted again, updated, once per batch that changed them. A row that is later still goes to
    the side output LATE, unchanged; a late row of a session only if the session that it would join is late as a whole.
    With `emit_every`, the results so far of windows that have changed are emitted this long after the change, by processing
    time, while they have not ended: the column `is_early`, after `window_end`, tells these from the others. Not for sessions.
    After a restore the watermark continues from where it was, so late rows stay late, and nothing fires twice.

    Raises immediately: SchemaError for missing columns, keys of unsupported types, an event-time column that is not a
    timestamp, aggregates that do not fit their column; ConfigError for two output columns of one name, no aggregates,
    or a window finer than the event time's unit; JobError for aggregates whose expressions depend on the cut of batches.
    """
    aggregation = WindowAggregation(name, keys, event_time, aggregates, schema)
    aggregation.check_expressions()
    return operator_of(aggregation, window, allowed_lateness, emit_every)


def top_operator(
    name: str,
    *,
    window: Window,
    keys: Sequence[str],
    event_time: str | TimeColumn,
    count: int,
    by: Sequence[str],
    descending: bool,
    schema: pa.Schema,
    allowed_lateness: Duration = 0,
    emit_every: Duration = 0,
) -> WindowOperator:
    """Return the operator that emits the first `count` rows of each key and window, in the order of the columns `by`.

    It emits `keys`, `window_start`, `window_end`, `rank`, and the other columns of each row. All else is as in
    `window_operator`.
    """
    aggregation = TopAggregation(name, keys, event_time, count, by, descending, schema)
    return operator_of(aggregation, window, allowed_lateness, emit_every)


def operator_of(
    aggregation: WindowAggregation, window: Window, allowed_lateness: Duration, emit_every: Duration = 0
) -> WindowOperator:
    """Return the operator of this kind of windows. Raises ConfigError for sessions with early results."""
    lateness_us = duration_us(allowed_lateness, "allowed_lateness")
    emit_every_us = duration_us(emit_every, "emit_every")
    if isinstance(window, Session):
        if emit_every_us:
            raise ConfigError(f"{aggregation.where}: emit_every: sessions have no early results")
        return SessionWindowOperator(aggregation, window, lateness_us)
    return PaneWindowOperator(aggregation, window, lateness_us, emit_every_us)
