"""The operator that runs all process functions: it processes one row or timer at a time, with its key set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import count, repeat
from types import GeneratorType
from typing import Any

import pyarrow as pa

from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import JobError, MidstreamError, SchemaError
from midstream.engine.core.interfaces import Timer
from midstream.engine.core.python_values import kind_of
from midstream.engine.operators.bad_records import TALLY
from midstream.engine.operators.base import NOTHING, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedRows
from midstream.engine.operators.functions.entry_restore import restore_entries, restore_timers
from midstream.engine.operators.functions.function_operator import FunctionOperator, Port
from midstream.engine.operators.functions.process_context import Context, ContextTimers
from midstream.engine.operators.functions.row_rollback import RowRollback
from midstream.engine.operators.functions.state_expiry import StateExpiry
from midstream.engine.operators.functions.state_spill import StateSpill
from midstream.engine.operators.row_conversion import (
    USER_ERRORS,
    Origin,
    Row,
    as_it_is_now,
    check_keys,
    nested_columns,
    to_batch,
    to_rows,
    yielded,
)
from midstream.engine.operators.row_functions import rows_apart
from midstream.engine.state.changelog import Changelog, ChangelogSnapshot
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.expiring_states import bound_state, plain_entry
from midstream.engine.state.heap_snapshot import KeyEncoding, state_table, timers_table
from midstream.engine.state.keyed_states import KeyScope, State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.engine.state.timers import TimerQueue

TIMERS_PER_SLICE = 16_384
"""The largest number of timers that fire in one slice, however fast they are."""

TIMERS_PER_FETCH = 512
"""The largest number of timers whose entries are fetched together."""

Handler = Callable[[Row, Context], Any]


class ProcessOperator(FunctionOperator):
    """Runs a process function. Raises immediately for keys, columns and states that do not fit together."""

    def __init__(
        self,
        name: str,
        function: Any,
        ports: Sequence[Port],
        schema: pa.Schema,
        side_outputs: Mapping[str, pa.Schema],
        policy: ErrorPolicy = FAIL,
    ) -> None:
        super().__init__(name, function, ports, schema, policy)
        self.side_outputs = {
            tag: canonical_schema(side) for tag, side in (*side_outputs.items(), *policy.side_outputs.items())
        }
        self.keeps_splits = len(ports) == 1 and not self._key_fields
        self._check_keys()
        has_time = any(time is not None for time in self._times)
        for state_name, state in self._declared().items():
            _check_state(state_name, state, f"{self._where}: ", bool(self._key_fields), has_time, self._ports)
        # The following attributes are set when the operator opens.
        self._states: dict[str, State] = {}
        self._scope = KeyScope()
        self._broadcast_scope = KeyScope(is_set=True, writable=False)
        self._wake: Timer | None = None
        self._wake_ms = 0
        self._as_it_is_now = as_it_is_now(self.schema)
        self._side_as_it_is_now = {tag: as_it_is_now(side) for tag, side in side_outputs.items()}
        self._rows: list[Row] = []
        self._origin: list[Origin] = []
        self._side_rows: dict[str, list[Row]] = {}
        self._encoding: KeyEncoding
        self._timers: ContextTimers
        self._logs: list[Changelog] = []
        self._expiry: StateExpiry
        self._spill: StateSpill
        self._context: Context

    def _check_keys(self) -> None:
        for field in self._key_fields:
            if getattr(field.type, "unit", None) == "ns":
                raise SchemaError(
                    f"{self._where}: key column {field.name!r} is {field.type}; Python datetimes have no nanoseconds: cast it to "
                    "microseconds or int64"
                )

    # ---- life ----

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        self._encoding = KeyEncoding(self._key_fields, context.max_parallelism, self._where)
        for name, state in self._declared().items():
            assert isinstance(state, State), state
            bound = bound_state(state, name, self._scope if state.is_keyed else self._broadcast_scope)
            self._states[name] = bound
            bound.bind(self._function, name)
        self._expiry = StateExpiry(self._states.values(), context)
        self._timers = ContextTimers(self._scope, self._arm)
        self._spill = StateSpill(self._states.values(), self._queues(), self._encoding, self.own, self._where, context)
        self._logs = [state.log for state in self._states.values()] + [queue.log for queue in self._queues().values()]
        self._context = Context(
            self._scope,
            self._encoding.shown,
            self._timers,
            self._calendar,
            context.clock,
            context.metrics,
            self._side_output,
        )
        self._open_function()

    @property
    def holds_entries(self) -> bool:
        return bool(self._key_fields)

    def state_runs(self) -> Iterable[FrameRun]:
        return self._spill.runs()

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if self._failed[0] is not None:
            self._failed[0].restore(parts)
        parts = {name: part for name, part in parts.items() if name != TALLY}
        expected = {state.part_name: state for state in self._states.values()}
        timers = {name: queue for name, queue in self._queues().items() if name in parts}
        for name, queue in timers.items():
            restore_timers(name, queue, parts[name], self._encoding, self._spill)
        for name in (name for name in parts if name not in timers):
            state = expected.get(name)
            if state is None:
                raise self._undeclared(name)
            restore_entries(state, parts[name], encoding_of(state, self._encoding), self.own, self._where, self._spill)
        self._expiry.restored()
        self._arm()

    def close(self) -> None:
        self._disarm()
        super().close()

    # ---- rows ----

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        failed = self._failed[port]
        if failed is not None:
            self._process_apart(batch, port, failed)
            return
        spec = self._ports[port]
        handler = self._handler(spec)
        keys = self._keys(batch, spec)
        times = self._times[port]
        times_us: Iterable[int | None] = repeat(None) if times is None else times.us(batch).tolist()
        scope, context, made, origin = self._scope, self._context, self._rows, self._origin
        scope.is_set = keys is not None
        self._broadcast_scope.writable = spec.broadcast
        copied = self._as_it_is_now if nested_columns(self.schema) else dict.copy
        index = 0
        rows = to_rows(batch, self._where)
        try:
            for index, row, scope.key, context.time_us in zip(count(), rows, keys or repeat(None), times_us):
                result = handler(row, context)
                if type(result) is dict:
                    made.append(copied(result))
                    origin.append(index)
                elif result is not None:
                    self._take(result, index, spec.method)
        except USER_ERRORS as error:
            raise self._user_error(spec.method, error, (batch, index)) from error
        finally:
            self._leave()
        self._flush(batch)

    def _process_apart(self, batch: pa.RecordBatch, port: int, failed: FailedRows) -> None:
        """Process the rows of an input one by one, and undo what the function has done for those that fail."""
        spec, times = self._ports[port], self._times[port]
        handler = self._handler(spec)
        keys = self._keys(batch, spec)
        times_us = None if times is None else times.us(batch).tolist()
        scope, context = self._scope, self._context
        sides: dict[str, list[Row]] = {tag: [] for tag in self._side_as_it_is_now}
        rollback = RowRollback([state for state in self._states.values() if state.is_keyed], self._timers)
        self._side_rows = sides
        scope.is_set = keys is not None
        try:
            for index, row in rows_apart(batch, self._where, failed):
                scope.key = None if keys is None else keys[index]
                context.time_us = None if times_us is None else times_us[index]
                rollback.begin((self._rows, self._origin, *sides.values()))
                first, of_sides = len(self._rows), {tag: len(rows) for tag, rows in sides.items()}
                try:
                    result = handler(row, context)
                    if result is not None:
                        self._take(result, index, spec.method)
                    to_batch(self._rows[first:], self.schema, self._where, self._origin[first:], batch)
                    for tag, rows in sides.items():
                        self._side_batch(rows[of_sides[tag] :], tag)
                except USER_ERRORS as error:
                    rollback.undo()
                    failed.add(index, error)
                else:
                    rollback.keep()
        finally:
            self._leave()
        self._flush(batch)
        failed.flush(batch, self._out)
        self.failed_rows = failed.total

    def _handler(self, spec: Port) -> Handler:
        """Return the function's method for the rows of a batch, before which the entries of a row's key expire."""
        handler: Handler = getattr(self._function, spec.method)
        return self._expiry.before_each(handler) if self._expiry and spec.keys else handler

    def _keys(self, batch: pa.RecordBatch, spec: Port) -> list[Any] | None:
        if not spec.keys:
            return None
        check_keys(batch, spec.keys, self._where)
        keys = self._encoding.of([batch.column(name) for name in spec.keys])
        if self._spill:
            self._spill.fetch(keys)
        return keys

    def _leave(self) -> None:
        self._scope.is_set = False
        self._scope.key = None
        self._broadcast_scope.writable = False
        self._context.time_us = None

    def _take(self, result: Any, index: Origin, method: str) -> None:
        """Take the rows that the function returned; a generator runs here, while the key is still set."""
        if type(result) is GeneratorType:  # the usual case; the other checks take as long as a row
            self._rows.extend(map(self._as_it_is_now, yielded(result)))
        elif isinstance(result, dict):
            self._rows.append(self._as_it_is_now(result))
        elif isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
            raise JobError(
                f"{self._where}: {method} returned {kind_of(result)}; return a dict, an iterable of dicts, or None"
            )
        else:
            self._rows.extend(map(self._as_it_is_now, result))
        self._origin.extend([index] * (len(self._rows) - len(self._origin)))

    def _side_output(self, tag: str, row: Row) -> None:
        if tag not in self._side_as_it_is_now:
            declared = ", ".join(map(repr, self._side_as_it_is_now)) or "none"
            raise JobError(f"side output {tag!r} is not declared (declared: {declared})")
        self._side_rows.setdefault(tag, []).append(self._side_as_it_is_now[tag](row))

    def _flush(self, given: pa.RecordBatch | None = None) -> None:
        rows, origin, sides = self._rows, self._origin, self._side_rows
        self._rows, self._origin, self._side_rows = [], [], {}
        if rows:
            self._out.emit(to_batch(rows, self.schema, self._where, origin, given))
        for tag, side in sides.items():
            if side:
                self._out.emit(self._side_batch(side, tag), tag)
        self._spill.settle(0 if given is None else given.num_rows)
        for log in self._logs:
            log.settle()
        if self._expiry:
            self._arm()

    def _side_batch(self, rows: Sequence[Row], tag: str) -> pa.RecordBatch:
        return to_batch(rows, self.side_outputs[tag], f"{self._where}: side output {tag!r}", ())

    # ---- timers ----

    def advance_watermark(self, watermark_us: int) -> bool:
        self._context.watermark_us = watermark_us
        all_fired = self._fire(watermark_us, event_time=True)
        if all_fired and watermark_us == MAX_WATERMARK_US:
            all_fired = self._fire_last()
        elif all_fired:
            all_fired = self._expiry.advance_watermark(watermark_us)
        self._flush()
        self.timers_dropped = self._timers.processing.dropped
        return all_fired

    def _fire_last(self) -> bool:
        """Fire the timers that are still set at the end of the input, which also ends processing time. Returns False if
        more are left to fire.

        Event-time timers that these set fire too, since event time is at its end. Processing-time timers are dropped:
        one that sets itself again each time would never end.
        """
        self._disarm()
        self._timers.has_ended = True
        return self._fire(MAX_WATERMARK_US, event_time=False) and self._fire(MAX_WATERMARK_US, event_time=True)

    def _fire(self, until_us: int, *, event_time: bool) -> bool:
        """Fire the timers that are due. Returns False if the slice was used up first."""
        queue = self._timers.event if event_time else self._timers.processing
        if queue.next_us() is None:  # always so for a function without keys, which has no on_timer
            return True
        on_timer, context, scope, clock = self._function.on_timer, self._context, self._scope, self._runtime.clock
        end_s = clock.monotonic_s() + self._runtime.slice_s
        fired = 0
        has_spilled, fetched = bool(self._spill), set[Any]()  # nothing is spilled before this slice ends
        expiry = self._expiry
        if expiry:
            expiry.read_clock()
        scope.is_set = True
        try:
            while (timer := queue.pop(until_us)) is not None:
                context.time_us, scope.key = timer
                if has_spilled and timer[1] not in fetched:
                    next_keys = [timer[1], *queue.soonest_keys(TIMERS_PER_FETCH)]
                    self._spill.fetch(next_keys)
                    # The fetch may have taken a whole slice, after which what was fetched may be spilled again.
                    end_s = end_s if fetched else clock.monotonic_s() + self._runtime.slice_s
                    fetched.update(next_keys)
                if expiry:
                    expiry.begin_call(timer[0] if event_time else expiry.event_time_us)
                at = self._calendar.datetime(timer[0])
                try:
                    result = on_timer(at, context)
                    if result is not None:
                        self._take(result, at, "on_timer")
                except USER_ERRORS as error:
                    raise self._user_error(f"on_timer of {at}", error) from error
                fired += 1
                if fired >= TIMERS_PER_SLICE or clock.monotonic_s() >= end_s:
                    return False
        finally:
            self._leave()
        return True

    def _arm(self) -> None:
        """Set the wake-up for the earliest processing-time timer, or for the entries that expire first by the clock."""
        times_us = (self._timers.processing.next_us(), self._expiry.next_sweep_us())
        next_us = min((time_us for time_us in times_us if time_us is not None), default=None)
        if next_us is None or self._timers.has_ended:
            return
        at_ms = max(-(-next_us // 1000), 0)
        if self._wake is None or at_ms < self._wake_ms:
            self._disarm()
            self._wake_ms = at_ms
            self._wake = self._runtime.call_at(at_ms, self._on_wake)

    def _disarm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _on_wake(self) -> None:
        self._wake = None
        if not self._opened:
            return
        self._fire(self._runtime.clock.now_ms() * 1000, event_time=False)
        self._expiry.sweep()
        self._flush()
        self._arm()

    # ---- snapshot ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        """Take references now and make tables later; engine.state.keyed_states explains why that is safe."""
        new_id, stored_bytes = self._runtime.ids.new_id, self._runtime.stored_bytes
        of_states = [(state, state.snapshot(new_id, stored_bytes)) for state in self._states.values()]
        of_timers = [(name, queue.log.snapshot(new_id, stored_bytes)) for name, queue in self._queues().items()]
        now = NOTHING if self._failed[0] is None else self._failed[0].snapshot(new_id)
        spilled = self._spill.chunks(self._runtime.ids, stored_bytes)
        if not spilled and not any(part for _, part in (*of_states, *of_timers)):
            return now
        return Snapshot(
            now.now, partial(_stored_parts, of_states, of_timers, spilled, self._encoding, self.own, self._where)
        )

    def _queues(self) -> dict[str, TimerQueue]:
        """Return the timer queues, by the name of their state part."""
        return {"timers:event": self._timers.event, "timers:processing": self._timers.processing}

    def contents(self) -> dict[str, dict[Any, Any]]:
        """Return a copy of what each state holds, by its name: by key, as the function sees it, or all of a broadcast
        state.
        """
        found = {}
        self._spill.fetch_all()
        for state in self._states.values():
            try:
                entries = {key: copy.deepcopy(plain_entry(state, entry)) for key, entry in state.entries().items()}
            except Exception as error:  # of the value's own class
                raise JobError(f"{self._where}: a value of state {state.name!r} cannot be copied: {error}") from error
            if state.is_keyed:
                found[state.name] = {self._encoding.shown(key): value for key, value in entries.items()}
            else:
                found[state.name] = entries.get(None, {})
        return found

    def timers_set(self) -> tuple[list[tuple[datetime, Any]], list[tuple[datetime, Any]]]:
        """Return the event-time and the processing-time timers that are set: the time and the key of each."""
        self._spill.fetch_all()
        event, processing = (
            [(self._calendar.datetime(time_us), self._encoding.shown(key)) for time_us, key in queue.timers()]
            for queue in (self._timers.event, self._timers.processing)
        )
        return event, processing

    # ---- errors ----

    def _user_error(
        self, what: str, error: BaseException, at: tuple[pa.RecordBatch, int] | None = None
    ) -> MidstreamError:
        key = f" (key {self._context.key!r})" if self._scope.is_set else ""
        return super()._user_error(f"{what}{key}", error, at)


def _check_state(
    name: str, state: DeclaredState, where: str, is_keyed: bool, has_event_time: bool, ports: Sequence[Port]
) -> None:
    """Raise JobError or SchemaError for a state that the function cannot have."""
    if not isinstance(state, State):
        raise JobError(
            f"{where}{type(state).__name__} {name!r} is for functions on batches "
            "(process_batches()); a function on single rows has ValueState, ListState and MapState"
        )
    if state.is_keyed and not is_keyed:
        raise JobError(
            f"{where}{type(state).__name__} {name!r} needs a key, but the stream has none; call "
            "key_by() first (by a column with one value for a state of the whole stream: "
            "with_columns(all=pl.lit(0)).key_by('all'))"
        )
    if state.ttl is not None and state.ttl.by == "event_time" and not has_event_time:
        raise SchemaError(
            f"{where}{type(state).__name__} {name!r} has a ttl by event time, and the stream has none; "
            f"call with_watermarks(), or declare ttl=StateTtl({state.ttl.duration!r}, by='clock')"
        )
    if not state.is_keyed and not any(port.broadcast for port in ports):
        raise JobError(f"{where}BroadcastState {name!r} needs a broadcast input; use connect_broadcast()")


def encoding_of(state: State, encoding: KeyEncoding) -> KeyEncoding:
    return encoding if state.is_keyed else KeyEncoding((), 1)


def _stored_parts(
    of_states: Sequence[tuple[State, ChangelogSnapshot | None]],
    of_timers: Sequence[tuple[str, ChangelogSnapshot | None]],
    spilled: Mapping[str, Callable[[], tuple[Chunk, ...]]],
    encoding: KeyEncoding,
    own: OwnCode,
    where: str,
) -> SnapshotResult:
    """Make the parts of a snapshot: chunks of objects, and after them those of what is spilled. On the I/O pool."""
    parts = {}
    for state, taken in of_states:
        chunks: tuple[Chunk, ...] = ()
        if taken is not None:
            chunks = _chunks(taken, state_table(state, taken, encoding_of(state, encoding), own, where))
        if state.part_name in spilled:
            chunks += spilled[state.part_name]()
        rule = Redistribute.KEYED if state.is_keyed else Redistribute.BROADCAST
        parts[state.part_name] = StatePart(rule, chunks)
    for name, taken in of_timers:
        chunks = () if taken is None else _chunks(taken, timers_table(taken, encoding))
        if name in spilled:
            chunks += spilled[name]()
        parts[name] = StatePart(Redistribute.KEYED, chunks)
    return SnapshotResult({name: part for name, part in parts.items() if part.chunks})


def _chunks(taken: ChangelogSnapshot, table: pa.Table) -> tuple[Chunk, ...]:
    chunks = tuple(Chunk(chunk_id) for chunk_id in taken.stored)
    return (*chunks, Chunk(taken.chunk_id, table)) if table.num_rows else chunks
