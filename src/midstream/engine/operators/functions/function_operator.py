"""The base of operators that run users' functions: inputs and their keys, declared states, `open` and `close`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import JobError, MidstreamError, SchemaError
from midstream.engine.operators.base import KEY, Operator, OperatorContext, Output
from midstream.engine.operators.event_time_column import EventTime, TimeColumn
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedRows
from midstream.engine.operators.functions.process_context import Calendar, TimeContext
from midstream.engine.operators.row_conversion import USER_ERRORS, at_row, fields_text, require_keys, user_error
from midstream.engine.state.declared_state import DeclaredState, check_former_names, declared_states


class Function:
    """Base of all functions with state. A function must pickle until it is opened."""

    def open(self, context: Any) -> None:
        """Prepare the function; called once per subtask before any row.

        What cannot be pickled, such as a connection, is created here.

        `context`: has `uid`, `name`, `subtask`, `parallelism`, `metrics` and `resources`: the addresses of what Spark has
        assigned to the slot, such as `{"gpu": ["0"]}`, for all of its subtasks; {} without Spark.

            def open(self, context):
                self.model = load_model("model.bin")
        """

    def close(self) -> None:
        """Release what the function holds; called once at the end, also after a failure.

        For example:

            def close(self):
                self.connection.close()
        """


@dataclass(frozen=True, slots=True)
class Port:
    """One input of the operator.

    `method`: the method of the function for its rows. Rows of a broadcast input have no key, and may write broadcast
    state.
    """

    method: str
    keys: tuple[str, ...]
    event_time: str | TimeColumn | None
    schema: pa.Schema
    broadcast: bool = False


def two_ports(
    keys: tuple[Sequence[str], Sequence[str]],
    event_times: tuple[str | TimeColumn | None, str | TimeColumn | None],
    input_schemas: tuple[pa.Schema, pa.Schema],
) -> list[Port]:
    """Return the ports of connected streams, for `process1` and `process2`.

    `keys` are of equal types; ((), ()) if the streams are not keyed.
    """
    return [Port(f"process{i + 1}", tuple(keys[i]), event_times[i], input_schemas[i]) for i in (0, 1)]


class FunctionOperator(Operator):
    """Runs a user's function. Raises SchemaError immediately for keys that do not match and event times that are not
    timestamps.

    `policy`: what happens to a row for which the function fails. One of a broadcast input fails the job: subtasks for
    which it does not fail would hold another state than the others.
    """

    runs_users_function: ClassVar[bool] = True
    """False: the function and its state are midstream's own."""

    def __init__(
        self, name: str, function: Any, ports: Sequence[Port], schema: pa.Schema, policy: ErrorPolicy = FAIL
    ) -> None:
        self.schema = canonical_schema(schema)
        self._where = f"operator {name!r}"
        self._function = function
        self._ports = tuple(ports)
        self._key_fields = _key_fields(self._ports, self._where)
        self._times = [
            None if port.event_time is None else EventTime(port.event_time, port.schema, self._where) for port in ports
        ]
        self._calendar = Calendar(aware=any(time is not None and time.kind.tz for time in self._times))
        self._opened = False
        self._policy = policy
        self._failed: list[FailedRows | None] = [None for _ in ports]
        """For each input; None if a row for which the function fails is to fail the job."""
        check_former_names(self._declared(), self._where)
        # The following attributes are set when the operator opens.
        self._runtime: OperatorContext
        self._context: TimeContext
        self._out: Output

    def _declared(self) -> dict[str, DeclaredState]:
        """Return the states of the function's class, by name."""
        return declared_states(type(self._function))

    def upgradable_states(self) -> Mapping[str, DeclaredState] | None:
        if not self.runs_users_function:
            return None
        return {f"{state.kind}:{name}": state for name, state in self._declared().items()}

    def state_forms(self) -> Mapping[str, pa.Schema]:
        forms = {f"{state.kind}:{name}": state.form() for name, state in self._declared().items()}
        return forms | {"": pa.schema(self._key_fields)} if self._key_fields else forms

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = {
            f"{state.kind}:{name}": {f"{state.kind} state {name!r}": state.type_text()}
            for name, state in self._declared().items()
        }
        if self._key_fields:
            settings[""] = self._key_settings()
        return settings

    def _key_settings(self) -> dict[str, str]:
        """Return the key columns to which the state belongs, of both streams."""
        found = {KEY: fields_text(self._key_fields)}
        for port in self._ports[1:]:
            if port.keys:
                found[f"{KEY} of the second stream"] = fields_text(port.schema.field(name) for name in port.keys)
        return found

    def open(self, context: OperatorContext, out: Output) -> None:
        self._runtime = context
        self.user_metrics = context.metrics
        self._out = out
        if self._policy.on_error != "fail":
            names = [f"{type(self._function).__qualname__}.{port.method}" for port in self._ports]
            first = self._failed[0] = FailedRows(self._policy, self._where, names[0])
            if len(self._ports) > 1 and not self._ports[1].broadcast:
                self._failed[1] = FailedRows(self._policy, self._where, names[1], first)

    def _open_function(self) -> None:
        """Open the function, once its states are bound."""
        self._opened = True
        try:
            self._function.open(self._runtime)
        except USER_ERRORS as error:
            raise self._user_error("open", error) from error

    def close(self) -> None:
        if self._opened:
            self._opened = False
            try:
                self._function.close()
            except USER_ERRORS as error:
                failure = self._user_error("close", error)
                failure.__cause__ = error
                self._runtime.fail(failure)  # a task that has failed already keeps its first error

    def _undeclared(self, part: str) -> JobError:
        kind, _, gone = part.partition(":")
        return JobError(
            f"{self._where}: the checkpoint holds {kind} state {gone!r}, which {type(self._function).__name__} "
            "does not declare; declare it as it was, or give the operator a new uid to start without state"
        )

    def _user_error(
        self, what: str, error: BaseException, at: tuple[pa.RecordBatch, int] | None = None
    ) -> MidstreamError:
        made = user_error(self._where, what, error, at)
        watermark_us = self._context.watermark_us
        if not isinstance(error, OverflowError) or MIN_WATERMARK_US < watermark_us < MAX_WATERMARK_US:
            return made
        now = (
            "datetime.min, as before the first watermark"
            if watermark_us < 0
            else "datetime.max, as at the end of input"
        )
        return at_row(
            JobError(
                f"{made} (ctx.watermark is {now}, and no time can be {'subtracted from' if watermark_us < 0 else 'added to'} "
                "it; compare it first, or shift the time that it is compared with)"
            ),
            made.row,
        )


def _key_fields(ports: Sequence[Port], where: str) -> tuple[pa.Field[Any], ...]:
    """Return the key columns, named as on the first port; they must have the same types on every port that has some."""
    keyed = [port for port in ports if port.keys]
    for port in keyed:
        require_keys(port.schema, port.keys, where)
    if not keyed:
        return ()
    types = [[port.schema.field(name).type for name in port.keys] for port in keyed]
    if any(other != types[0] for other in types) or len(keyed) != len([p for p in ports if not p.broadcast]):
        raise SchemaError(
            f"{where}: both inputs must be keyed by columns of the same types; these are "
            + " and ".join(", ".join(str(kind) for kind in kinds) or "not keyed" for kinds in types)
        )
    return tuple(keyed[0].schema.field(name) for name in keyed[0].keys)
