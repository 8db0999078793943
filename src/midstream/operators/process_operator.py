"""The operator behind all process functions: one row, one timer at a time, with the key set around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from midstream.core.batches import canonical_schema
from midstream.core.errors import JobError, MidstreamError, SchemaError
from midstream.core.seams import Timer
from midstream.operators.base import NOTHING, Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.operators.event_time import EventTime
from midstream.operators.process_context import Calendar, Context, Timers
from midstream.operators.rows import (
    Row,
    as_it_is_now,
    check_keys,
    fields_text,
    kind_of,
    python_values,
    require_keys,
    to_batch,
    to_rows,
    user_error,
)
from midstream.state.heap import KeyForm, state_rows, state_table, timer_rows, timers_table
from midstream.state.keyed import KeyScope, MapState, State
from midstream.state.parts import Chunk, Redistribute, StatePart

TIMERS_PER_SLICE = 16_384
"""Timers that fire in one slice at most, however fast."""

Handler = Callable[[Row, Context], Any]


@dataclass(frozen=True, slots=True)
class Port:
    """One input. `method`: the function's method for its rows. Broadcast: its rows have no key, and may write broadcast state."""

    method: str
    keys: tuple[str, ...]
    event_time: str | None
    schema: pa.Schema
    broadcast: bool = False


class ProcessOperator(Operator):
    """Raises, at once, for keys, columns and states that do not go together."""

    def __init__(
        self,
        name: str,
        function: Any,
        ports: Sequence[Port],
        schema: pa.Schema,
        side_outputs: Mapping[str, pa.Schema],
    ) -> None:
        self.schema = canonical_schema(schema)
        self.side_outputs = {tag: canonical_schema(side) for tag, side in side_outputs.items()}
        self._where = f"operator {name!r}"
        self._function = function
        self._ports = tuple(ports)
        self._times = [
            None if port.event_time is None else EventTime(port.event_time, port.schema, self._where) for port in ports
        ]
        self._key_fields = _key_fields(self._ports, self._where)
        self._check_states()
        # from here on: set when it opens
        self._states: dict[str, State] = {}
        self._scope = KeyScope()
        self._broadcast_scope = KeyScope(is_set=True, writable=False)
        self._opened = False
        self._wake: Timer | None = None
        self._wake_ms = 0
        self._rows: list[Row] = []
        self._origin: list[int] = []
        self._side_rows: dict[str, list[Row]] = {}
        self._runtime: OperatorContext
        self._out: Output
        self._form: KeyForm
        self._timers: Timers
        self._context: Context

    def _check_states(self) -> None:
        for name, state in declared_states(type(self._function)).items():
            if state.is_keyed and not self._key_fields:
                raise JobError(
                    f"{self._where}: {type(state).__name__} {name!r} needs a key, but the stream has none; "
                    "put key_by() in front"
                )
            if not state.is_keyed and not any(port.broadcast for port in self._ports):
                raise JobError(
                    f"{self._where}: BroadcastState {name!r} needs a broadcast input; use connect_broadcast()"
                )

    # ---- life ----

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = {
            f"{state.kind}:{name}": {f"{state.kind} state {name!r}": _type_text(state)}
            for name, state in declared_states(type(self._function)).items()
        }
        if self._key_fields:
            one = len(self._key_fields) == 1  # its name does not matter, as it does in a struct
            settings[""] = {"the key": str(self._key_fields[0].type) if one else fields_text(self._key_fields)}
        return settings

    def open(self, context: OperatorContext, out: Output) -> None:
        self._runtime = context
        self._out = out
        self._form = KeyForm(self._key_fields, context.max_parallelism, self._where)
        for name, state in declared_states(type(self._function)).items():
            bound = state.bound(name, self._scope if state.is_keyed else self._broadcast_scope)
            self._states[name] = bound
            setattr(self._function, name, bound)
        self._timers = Timers(self._scope, self._arm)
        calendar = Calendar(aware=any(time is not None and time.kind.tz for time in self._times))
        self._context = Context(self._scope, self._timers, calendar, context.clock, self._side_output)
        self._opened = True
        self._call("open", lambda: self._function.open(context))

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        expected = {_part_name(state): state for state in self._states.values()}
        for name, part in parts.items():
            table = part.table()
            if name == "timers:event":
                self._timers.event.thaw(timer_rows(table, self._form))
            elif name == "timers:processing":
                self._timers.processing.thaw(timer_rows(table, self._form))
            elif name in expected:
                state = expected[name]
                state.thaw(state_rows(state, table, self._form_of(state), self._where))
            else:
                kind, _, gone = name.partition(":")
                raise JobError(
                    f"{self._where}: the checkpoint holds {kind} state {gone!r}, which {type(self._function).__name__} "
                    "does not declare; declare it as it was, or give the operator a new uid to start without state"
                )
        self._arm()

    def finish(self) -> None:
        """Processing-time timers that are not due by the end of the input never fire."""
        self._disarm()

    def close(self) -> None:
        self._disarm()
        if self._opened:
            self._opened = False
            try:
                self._function.close()
            except Exception as error:  # noqa: BLE001 - any user code may raise anything
                failure = self._user_error("close", error)
                failure.__cause__ = error
                self._runtime.fail(failure)  # a task that has failed already keeps its first error

    # ---- rows ----

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        spec = self._ports[port]
        handler: Handler = getattr(self._function, spec.method)
        keys = self._keys(batch, spec)
        times = self._times[port]
        times_us: Sequence[int | None] = [None] * batch.num_rows if times is None else times.us(batch).tolist()
        scope, context, made, origin = self._scope, self._context, self._rows, self._origin
        scope.is_set = keys is not None
        self._broadcast_scope.writable = spec.broadcast
        index = 0
        try:
            for index, row in enumerate(to_rows(batch)):
                scope.key = None if keys is None else keys[index]
                context.time_us = times_us[index]
                result = handler(row, context)
                if type(result) is dict:
                    made.append(result.copy())  # see `as_it_is_now`
                    origin.append(index)
                elif result is not None:
                    self._take(result, index, spec.method)
        except Exception as error:
            raise self._user_error(spec.method, error, row=index) from error
        finally:
            self._leave()
        self._flush()

    def _keys(self, batch: pa.RecordBatch, spec: Port) -> list[Any] | None:
        if not spec.keys:
            return None
        check_keys(batch, spec.keys, self._where)
        values = [python_values(batch.column(name)) for name in spec.keys]
        return values[0] if len(values) == 1 else list(zip(*values, strict=True))

    def _leave(self) -> None:
        self._scope.is_set = False
        self._scope.key = None
        self._broadcast_scope.writable = False
        self._context.time_us = None

    def _take(self, result: Any, index: int, method: str) -> None:
        """Rows that the function returned; a generator runs here, while the key is still set."""
        if isinstance(result, dict):
            self._rows.append(result.copy())
        elif isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
            raise JobError(
                f"{self._where}: {method} returned {kind_of(result)}; return a dict, an iterable of dicts, or None"
            )
        else:
            self._rows.extend(map(as_it_is_now, result))
        self._origin.extend([index] * (len(self._rows) - len(self._origin)))

    def _side_output(self, tag: str, row: Row) -> None:
        if tag not in self.side_outputs:
            declared = ", ".join(map(repr, self.side_outputs)) or "none"
            raise JobError(f"side output {tag!r} is not declared (declared: {declared})")
        self._side_rows.setdefault(tag, []).append(as_it_is_now(row))

    def _flush(self) -> None:
        rows, origin, sides = self._rows, self._origin, self._side_rows
        self._rows, self._origin, self._side_rows = [], [], {}
        if rows:
            self._out.emit(to_batch(rows, self.schema, self._where, origin))
        for tag, side in sides.items():
            where = f"{self._where}: side output {tag!r}"
            self._out.emit(to_batch(side, self.side_outputs[tag], where), tag)

    # ---- timers ----

    def advance_watermark(self, watermark_us: int) -> bool:
        self._context.watermark_us = watermark_us
        all_fired = self._fire(watermark_us, event_time=True)
        self._flush()
        return all_fired

    def _fire(self, until_us: int, *, event_time: bool) -> bool:
        """Fire what is due. False when the slice was used up first."""
        queue = self._timers.event if event_time else self._timers.processing
        clock = self._runtime.clock
        end_s = clock.monotonic_s() + self._runtime.slice_s
        fired = 0
        self._scope.is_set = True
        try:
            while (due_us := queue.next_us()) is not None and due_us <= until_us:
                if fired and (fired >= TIMERS_PER_SLICE or clock.monotonic_s() >= end_s):
                    return False
                time_us, key = queue.pop()
                self._scope.key = key
                self._context.time_us = time_us
                self._call_timer(time_us, fired)
                fired += 1
        finally:
            self._leave()
        return True

    def _call_timer(self, time_us: int, index: int) -> None:
        at = self._context.timestamp
        try:
            result = self._function.on_timer(at, self._context)
            if result is not None:
                self._take(result, index, "on_timer")
        except Exception as error:
            raise self._user_error(f"on_timer of {at}", error) from error

    def _arm(self) -> None:
        """Have the earliest processing-time timer wake us."""
        next_us = self._timers.processing.next_us()
        if next_us is None:
            return
        at_ms = -(-next_us // 1000)
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
        self._flush()
        self._arm()

    # ---- snapshot ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        """References now, tables later: see state.keyed for why that is safe."""
        ids, form, where = self._runtime.ids, self._form, self._where
        frozen = [(state, ids.new_id(), entries) for state in self._states.values() if (entries := state.freeze())]
        queues = {"timers:event": self._timers.event, "timers:processing": self._timers.processing}
        timers = [(name, ids.new_id(), queue.freeze()) for name, queue in queues.items() if len(queue)]
        if not frozen and not timers:
            return NOTHING

        def later() -> SnapshotResult:
            parts = {}
            for state, chunk_id, entries in frozen:
                rule = Redistribute.KEYED if state.is_keyed else Redistribute.BROADCAST
                table = state_table(state, entries, self._form_of(state), where)
                if table.num_rows:
                    parts[_part_name(state)] = StatePart(rule, (Chunk(chunk_id, table),))
            for name, chunk_id, rows in timers:
                parts[name] = StatePart(Redistribute.KEYED, (Chunk(chunk_id, timers_table(rows, form)),))
            return SnapshotResult(parts)

        return Snapshot(later=later)

    def _form_of(self, state: State) -> KeyForm:
        return self._form if state.is_keyed else KeyForm((), 1)

    # ---- errors ----

    def _call(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            raise self._user_error(what, error) from error

    def _user_error(self, what: str, error: BaseException, row: int | None = None) -> MidstreamError:
        key = f" (key {self._scope.key!r})" if self._scope.is_set else ""
        return user_error(self._where, f"{what}{key}", error, row)


def declared_states(function: type) -> dict[str, State]:
    """The states on a class and its bases, by attribute name, in order."""
    found: dict[str, State] = {}
    for base in reversed(function.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, State):
                found[name] = value
            else:
                found.pop(name, None)
    return found


def _type_text(state: State) -> str:
    value = "pickled" if state.type is None else str(state.type)
    if isinstance(state, MapState):
        return f"{'pickled' if state.key_type is None else state.key_type} to {value}"
    return value


def _part_name(state: State) -> str:
    return f"{state.kind}:{state.name}"


def _key_fields(ports: Sequence[Port], where: str) -> tuple[pa.Field, ...]:
    """The key columns, which are the same on every port that has some."""
    keyed = [port for port in ports if port.keys]
    for port in keyed:
        require_keys(port.schema, port.keys, where)
        for name in port.keys:
            kind = port.schema.field(name).type
            if getattr(kind, "unit", None) == "ns":
                raise SchemaError(
                    f"{where}: key column {name!r} is {kind}; Python has no nanoseconds: cast it to microseconds or int64"
                )
    if not keyed:
        return ()
    types = [[port.schema.field(name).type for name in port.keys] for port in keyed]
    if any(other != types[0] for other in types) or len(keyed) != len([p for p in ports if not p.broadcast]):
        raise SchemaError(
            f"{where}: both inputs must be keyed by columns of the same types, these are "
            + " and ".join(", ".join(str(kind) for kind in kinds) or "not keyed" for kinds in types)
        )
    return tuple(keyed[0].schema.field(name) for name in keyed[0].keys)
