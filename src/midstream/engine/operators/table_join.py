"""The join of a stream with a table that is loaded as a whole, and again at intervals.

A version of the table is loaded outside of the task's loop, and replaces the one before between two batches. It is state:
a checkpoint has the version with which the rows before it were joined, and a restore continues with this version until
the next is due. A version is one immutable chunk, which is stored once. Subtasks load on their own, so they may have
different versions; at another parallelism all continue with the newest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, check_held_by_polars, single_batch, to_polars
from midstream.engine.core.errors import JobError, MidstreamError, SchemaError, StorageError, text_of
from midstream.engine.core.interfaces import Done, Failed, Timer
from midstream.engine.operators.base import NOTHING, Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.lookup_table import LookupTable, with_columns_of
from midstream.engine.operators.row_conversion import fields_text
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

TableHow: TypeAlias = Literal["inner", "left", "semi", "anti"]
TABLE: Final = "table"
RETRY_S_MAX: Final = 60.0
"""The longest time after which a refresh that has failed is tried again."""
_VERSION: Final = re.compile(r"(\d{15})-.+")
_log = logging.getLogger(__name__)


class TableLoader(Protocol):
    """Loads a table, outside of the loop. It must pickle."""

    @property
    def text(self) -> str:
        """What is loaded, for messages; state that was loaded from something else is not restored."""
        ...

    def load(self) -> pa.Table:
        """Load the table as it is now. Raises any exception if that fails."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """A table that is part of the program."""

    table: pa.RecordBatch
    text: str = "a frame of the program"

    def load(self) -> pa.Table:
        return pa.Table.from_batches([self.table])


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of the table. `chunk`: the same rows as state; None for a table of the program, which is not state."""

    table: LookupTable
    loaded_ms: int
    chunk: Chunk | None = None


class TableJoinOperator(Operator):
    """Joins each row with the row of a table that has its key.

    `columns`: those of the table that are used. `keys`: the key columns of the stream and of the table, of equal types.
    `refresh_s`: how long a version is used until the next is loaded; None: for as long as the job lives.
    """

    keeps_splits = True
    keeps_rows = True

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        loader: TableLoader,
        columns: pa.Schema,
        keys: tuple[Sequence[str], Sequence[str]],
        how: TableHow,
        refresh_s: float | None = None,
        suffix: str = "_right",
    ) -> None:
        self._where = f"operator {name!r}"
        self.loader = loader
        self._keys = tuple(keys[0]), tuple(keys[1])
        right_on = self._keys[1]
        self._how = how
        self._refresh_s = refresh_s
        self._columns = canonical_schema(columns)
        adds = how in ("inner", "left")
        if not adds:  # the keys alone decide
            self._columns = pa.schema([self._columns.field(key) for key in right_on])
        check_held_by_polars(pa.schema([self._columns.field(key) for key in right_on]), f"{self._where}: the table")
        self._added = [field.name for field in self._columns if field.name not in right_on] if adds else []
        fields = list(canonical_schema(schema))
        for added in self._added:
            to = f"{added}{suffix}" if schema.get_field_index(added) >= 0 else added
            fields.append(self._columns.field(added).with_name(to))
        self.schema = pa.schema(fields)
        for to in self.schema.names:
            if self.schema.names.count(to) > 1:
                raise SchemaError(
                    f"{self._where}: two columns of the result would be called {to!r}; give another suffix=, or rename one"
                )
        # The following attributes are set when the operator opens.
        self._version: _Version | None = None
        self._is_loading = False
        self._timer: Timer | None = None
        self._context: OperatorContext
        self._out: Output

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        return {TABLE: {"the table": self.loader.text, "its columns": fields_text(self._columns)}}

    # ---- life ----

    def open(self, context: OperatorContext, out: Output) -> None:
        self._context, self._out = context, out
        self.user_metrics = context.metrics
        self._failures = context.metrics.counter("table_refreshes_failed")
        if isinstance(self.loader, Constant):
            self._replace(_Version(self._indexed(self.loader.load()), context.clock.now_ms()))

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        for name, part in parts.items():
            version = _VERSION.fullmatch(part.chunks[-1].id)
            if name != TABLE or version is None:
                raise StorageError(
                    f"{self._where}: the checkpoint holds state {name!r}, which no version of a table is: it is damaged, or "
                    "midstream has not written it"
                )
            chunk, loaded_ms = part.chunks[-1], int(version[1])
            self._replace(_Version(self._indexed(chunk.table), loaded_ms, chunk))
            age_s = (self._context.clock.now_ms() - loaded_ms) / 1000
            self._load_in(None if self._refresh_s is None else max(0.0, self._refresh_s - max(0.0, age_s)))

    def ready(self, wake: Callable[[], None]) -> bool:
        """No row is let through before the table is there; when it is, the task notices without `wake`."""
        if self._version is None and not self._is_loading:  # not in open(), which a restore may follow
            self._load()
        return self._version is not None

    def close(self) -> None:
        self._load_in(None)

    # ---- rows ----

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        assert self._version is not None, self._where
        table = self._version.table
        positions = table.positions(to_polars(batch.select(list(self._keys[0]))))
        if self._how != "left":
            kept = positions < 0 if self._how == "anti" else positions >= 0
            if not kept.all():
                batch, positions = batch.filter(pa.array(kept)), positions[kept]
                if not batch.num_rows:
                    return
        made = [*batch.columns, *table.columns(self._added, positions)]
        self._out.emit(pa.RecordBatch.from_arrays(made, schema=self.schema))

    # ---- versions ----

    def _load_in(self, delay_s: float | None) -> None:
        """Load the next version after this time, or never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None:
            self._timer = self._context.call_later(delay_s, self._load)

    def _load(self) -> None:
        self._timer, self._is_loading = None, True
        began_ms = self._context.clock.now_ms()
        if self._version is not None:  # the clock may have been set back
            began_ms = max(began_ms, self._version.loaded_ms + 1)
        chunk_id = f"{began_ms:015d}-{self._context.ids.new_id()}"
        loader, columns, where = self.loader, self._columns, f"{self._where}: the table ({self.loader.text})"

        def load() -> _Version:
            rows = with_columns_of(loader.load(), columns, where)
            table = self._indexed(pa.Table.from_batches([rows]))
            return _Version(table, began_ms, Chunk(chunk_id, pa.Table.from_batches([table.rows])))

        self._context.submit(load, self._loaded)

    def _loaded(self, outcome: Done[_Version] | Failed) -> None:
        self._is_loading = False
        if isinstance(outcome, Done):
            self._replace(outcome.value)
            self._load_in(self._refresh_s)
            return
        failure = self._failure(outcome.error)
        if self._version is None or self._refresh_s is None:
            raise JobError(
                f"{failure}. No row is joined before the table is there: repair what it is loaded from; the job then continues "
                "from its newest checkpoint"
            ) from (outcome.error.__cause__ or outcome.error)
        self._failures.inc()
        retry_s = min(self._refresh_s, RETRY_S_MAX)
        _log.warning("%s; rows are joined with the version before, and it is tried again in %g s", failure, retry_s)
        self._load_in(retry_s)

    def _failure(self, error: BaseException) -> MidstreamError:
        where = f"{self._where}: the table ({self.loader.text})"
        text = text_of(error)
        if isinstance(error, MidstreamError) and text.startswith(where):
            return error
        kind = "" if isinstance(error, MidstreamError) else f"{type(error).__name__}: "
        return JobError(f"{where} could not be loaded: {kind}{text}")

    def _indexed(self, table: pa.Table) -> LookupTable:
        where = f"{self._where}: the table ({self.loader.text})"
        rows = single_batch(table.select(self._columns.names))
        return LookupTable.of(rows, self._keys[1], where, may_repeat=self._how in ("semi", "anti"))

    def _replace(self, version: _Version) -> None:
        self._version = version
        gauge = self._context.metrics.gauge
        gauge("table_rows").set(version.table.rows.num_rows)
        gauge("table_bytes").set(version.table.size_bytes)

    # ---- snapshot ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        if self._version is None or self._version.chunk is None:
            return NOTHING
        part = StatePart(Redistribute.NEWEST, (self._version.chunk,))
        return Snapshot(SnapshotResult({TABLE: part}))
