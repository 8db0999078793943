"""Functions on batches of a keyed stream, with their state in tables.

    class RunningTotal(KeyedBatchFunction):
        totals = TableState({"user": int, "total": int})

        def process(self, rows, ctx):
            before = rows.join(self.totals.lookup(rows), on="user", how="left", maintain_order="left")
            made = before.with_columns(total=pl.col("total").fill_null(0) + pl.col("price").cum_sum().over("user"))
            self.totals.upsert(made.select("user", "total").unique("user", keep="last"))
            return made.select("user", "price", "total")

A batch holds rows of many keys. The rows of a key keep the order of their channel, but the engine
decides where batches are cut: the output must not depend on which rows share a batch. A checkpoint
contains only the TableStates declared on the class. All methods return a polars DataFrame (or an
Arrow RecordBatch or Table) with the columns of the schema, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Protocol, TypeAlias

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import check_held_by_polars, concat, to_polars
from midstream.engine.core.errors import JobError
from midstream.engine.operators.bad_records import TALLY
from midstream.engine.operators.base import NOTHING, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.expressions import EXPRESSION_ERRORS
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedRows
from midstream.engine.operators.functions.function_operator import Function, FunctionOperator, Port
from midstream.engine.operators.functions.process_context import TimeContext
from midstream.engine.operators.row_conversion import check_keys
from midstream.engine.operators.stateless import made_batch
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.state_parts import Redistribute, StatePart
from midstream.engine.state.table_state import TableState

Result: TypeAlias = "pl.DataFrame | pa.RecordBatch | pa.Table | None"


class BatchContext(Protocol):
    """The context of a function on batches. It is valid only during the call.

    For example:

        def on_watermark(self, ctx):
            ctx.metrics.gauge("waiting").set(self.waiting.frame.height)
            return self.waiting.frame.filter(pl.col("at") <= ctx.watermark)
    """

    @property
    def watermark(self) -> datetime:
        """The current event time: `datetime.min` until the first watermark since a start, `datetime.max` at the end.

        It is aware, in UTC, if the event time has a zone; polars compares it with a column in another zone only as
        `pl.col("at").dt.convert_time_zone("UTC")`.
        """
        ...

    @property
    def now(self) -> datetime:
        """The wall clock in UTC, to the millisecond."""
        ...

    @property
    def metrics(self) -> UserMetrics:
        """Counters and gauges of the function, for the job's status, its page and `/metrics`."""
        ...


class BatchFunction(Function):
    """Base of functions on batches."""

    def on_watermark(self, ctx: BatchContext) -> Result:
        """React to a new watermark: no more rows up to `ctx.watermark` follow, except late ones.

        Called for each watermark, before it is forwarded; at the end of the input with `datetime.max`. After a restore
        it may be lower than before.

        `ctx`: the watermark, the wall clock and metrics; valid during the call only.

        Return rows as `process` does, or None, as this default does.

            def on_watermark(self, ctx):
                return self.waiting.pop_until("at", ctx.watermark)
        """
        return None


class KeyedBatchFunction(BatchFunction):
    """A function on batches of a keyed stream, whose state is in tables.

    A batch has rows of many keys; those of a key come in the order in which they were sent. Where batches are cut is
    the engine's business: what comes out must not depend on which rows share one. Only tables declared on the class are
    in a checkpoint.

        >>> class RunningTotal(KeyedBatchFunction):
        ...     totals = TableState({"user": str, "total": int})
        ...     def process(self, rows, ctx):
        ...         known = rows.join(self.totals.lookup(rows), on="user", how="left", maintain_order="left")
        ...         sums = pl.col("total").fill_null(0) + pl.col("price").cum_sum().over("user")
        ...         made = known.select("user", total=sums)
        ...         self.totals.upsert(made.unique("user", keep="last"))
        ...         return made
        >>> running = orders.key_by("user").process_batches(RunningTotal(), {"user": str, "total": int})
        >>> testing.run(running, cut="whole").rows
        [{'user': 'ann', 'total': 3}, {'user': 'bob', 'total': 5}, {'user': 'ann', 'total': 7}]
    """

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> Result:
        """Process a batch of rows.

        `rows`: a polars DataFrame with the columns of the stream.
        `ctx`: the watermark, the wall clock and metrics; valid during the call only.

        Return a polars DataFrame, or an Arrow RecordBatch or Table, with the columns of the output, or None.

            def process(self, rows, ctx):
                return rows.join(self.users.lookup(rows), on="user", how="semi")
        """
        raise NotImplementedError


class CoBatchFunction(BatchFunction):
    """A function on batches of two connected keyed streams, which share the tables.

    A key's rows of both streams go to the same subtask, in no particular order between the two. Tables have the key
    columns of the first stream.

        >>> class Known(CoBatchFunction):
        ...     users = TableState({"user": str})
        ...     def process1(self, rows, ctx):
        ...         return rows.join(self.users.lookup(rows), on="user", how="semi")
        ...     def process2(self, rows, ctx):
        ...         self.users.upsert(rows.unique())
        >>> known = testing.harness(Known(), orders.schema, orders.schema, key="user", second={"user": str})
        >>> _ = known.process2({"user": "ann"})
        >>> known.process1([{"user": "ann", "price": 3}, {"user": "bob", "price": 5}])
        [{'user': 'ann', 'price': 3}]
    """

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> Result:
        """Process a batch of rows of the first stream.

        `rows`: a polars DataFrame with the columns of the first stream.
        `ctx`: the watermark, the wall clock and metrics; valid during the call only.

        Return a polars DataFrame, or an Arrow RecordBatch or Table, with the columns of the output, or None.

            def process1(self, rows, ctx):
                return rows.join(self.users.lookup(rows), on="user", how="semi")
        """
        raise NotImplementedError

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> Result:
        """Process a batch of rows of the second stream.

        `rows`: a polars DataFrame with the columns of the second stream.
        `ctx`: the watermark, the wall clock and metrics; valid during the call only.

        Return a polars DataFrame, or an Arrow RecordBatch or Table, with the columns of the output, or None.

            def process2(self, rows, ctx):
                self.users.append(rows.select("user"))
        """
        raise NotImplementedError


class BatchFunctionOperator(FunctionOperator):
    """Runs a function on batches. Raises immediately for keys and states that do not fit together."""

    def __init__(
        self,
        name: str,
        function: BatchFunction,
        ports: Sequence[Port],
        schema: pa.Schema,
        policy: ErrorPolicy = FAIL,
    ) -> None:
        super().__init__(name, function, ports, schema, policy)
        self.side_outputs: dict[str, pa.Schema] = dict(policy.side_outputs)
        for state_name, state in self._declared().items():
            if not isinstance(state, TableState):
                raise JobError(
                    f"{self._where}: {type(state).__name__} {state_name!r} holds the state of one key at a time, but "
                    "this function gets batches of rows of many keys; declare a TableState"
                )
            state.check_keys(state_name, self._key_fields, self._where)
            check_held_by_polars(state.schema, f"{self._where}: TableState {state_name!r}")
        for port in self._ports:
            check_held_by_polars(port.schema, self._where)
        # The following attributes are set when the operator opens.
        self._states: dict[str, TableState] = {}

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        keys = [field.name for field in self._key_fields]
        for name, state in self._declared().items():
            assert isinstance(state, TableState), state
            bound = state.bound(name, keys, context.key_groups, context.max_parallelism)
            self._states[bound.part_name] = bound
            bound.bind(self._function, name)
        self._context = TimeContext(self._calendar, context.clock, context.metrics)
        self._open_function()

    def state_runs(self) -> Iterable[FrameRun]:
        return chain.from_iterable(state.held_runs() for state in self._states.values())

    def stored_runs(self) -> Iterable[tuple[FrameRun, Callable[[], pa.Table]]]:
        return chain.from_iterable(state.stored_runs() for state in self._states.values())

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if self._failed[0] is not None:
            self._failed[0].restore(parts)
        for name, part in parts.items():
            if name == TALLY:
                continue
            if name not in self._states:
                raise self._undeclared(name)
            if part.stored is None:
                self._states[name].restore(part.chunks, self._where)
            else:
                self._states[name].restore_upgraded(part.chunks, part.stored, self._where)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        check_keys(batch, self._ports[port].keys, self._where)
        time = self._times[port]
        if time is not None:
            time.native(batch)  # raises for a row without an event time
        self._call(batch, port)

    def _call(self, batch: pa.RecordBatch, port: int) -> None:
        """Give the function rows that have their keys and event times."""
        failed, method = self._failed[port], self._ports[port].method
        if failed is None:
            self._run(method, lambda: getattr(self._function, method)(to_polars(batch), self._context))
            return
        made = [part for part in self._made_apart(batch, method, failed) if part is not None and part.num_rows]
        if made:
            self._out.emit(concat(made))
        failed.flush(batch, self._out)
        self.failed_rows = failed.total

    def _made_apart(self, batch: pa.RecordBatch, method: str, failed: FailedRows) -> Iterator[pa.RecordBatch | None]:
        """Yield what the function makes of the rows for which it does not fail, and add the others to `failed`.

        What it has done to its tables for a batch that fails is undone, and it is called again with halves of the batch,
        until each row that fails is alone. Since a result must not depend on which rows share a batch, that is what it
        would make of the rows one by one.
        """
        waiting = [(0, batch.num_rows)]
        while waiting:
            first, rows = waiting.pop()
            before = [(state, state.mark()) for state in self._states.values()]
            try:
                returned = getattr(self._function, method)(to_polars(batch.slice(first, rows)), self._context)
                made = None if returned is None else made_batch(returned, self.schema, self._where, method)
            except EXPRESSION_ERRORS as error:
                for state, mark in before:
                    state.roll_back(mark)
                if rows == 1:
                    failed.add(first, error)
                else:
                    half = rows // 2
                    waiting += [(first + half, rows - half), (first, half)]  # the first half is next
            else:
                yield made

    def advance_watermark(self, watermark_us: int) -> bool:
        self._context.watermark_us = watermark_us
        self._run("on_watermark", lambda: self._function.on_watermark(self._context))
        return True

    def _run(self, what: str, call: Callable[[], Any]) -> None:
        try:
            made = call()
        except EXPRESSION_ERRORS as error:
            raise self._user_error(what, error) from error
        if made is None:
            return
        batch = made_batch(made, self.schema, self._where, what)
        if batch.num_rows:
            self._out.emit(batch)

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        """Take references now; key groups and tables are computed later."""
        ids, stored_bytes, where = self._runtime.ids, self._runtime.stored_bytes, self._where
        now = NOTHING if self._failed[0] is None else self._failed[0].snapshot(ids.new_id)
        snapshots = {name: state.snapshot(ids, where, stored_bytes) for name, state in self._states.items()}
        frozen = {name: chunks for name, chunks in snapshots.items() if chunks is not None}
        if not frozen:
            return now
        return Snapshot(
            now.now,
            lambda: SnapshotResult({name: StatePart(Redistribute.KEYED, chunks()) for name, chunks in frozen.items()}),
        )

    def contents(self) -> dict[str, pl.DataFrame]:
        """Return the current rows of each table, by its name."""
        return {state.name: state.frame for state in self._states.values()}
