"""The state in a checkpoint as frames, for those who look into it: without the job's code, and without unpickling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import polars as pl

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.state_columns import NAMESPACES, TIMERS, kind_of_part, name_of_part, shown_names
from midstream.engine.checkpoint.state_files import read_parts, rule_of
from midstream.engine.checkpoint.stored_in_flight import RowsInFlight
from midstream.engine.core.batches import check_held_by_polars, to_polars
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import PartHandle
from midstream.engine.state.expiring_states import UNKNOWN_US, WRITTEN_COLUMNS
from midstream.engine.state.heap_snapshot import GONE_COLUMN
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute

_HEAP_KINDS: Final = frozenset({"value", "list", "map", "reducing", "broadcast", "timers"})
"""The states of which a later chunk supersedes what earlier ones have of its keys."""
_CHUNK: Final = "__chunk"
_WRITTEN_US: Final = "__written_us"


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one operator."""

    uid: str
    operator: str
    """The name of the operator."""
    part: str
    """Its name in the checkpoint, such as value:seen."""
    rule: Redistribute
    handles: tuple[PartHandle, ...]
    """One for each subtask that has any of it."""
    key: str
    """The key column, for state that does not have the names of several."""
    max_parallelism: int

    @property
    def kind(self) -> str:
        return kind_of_part(self.part)

    @property
    def name(self) -> str:
        return name_of_part(self.part)

    @property
    def rows(self) -> int:
        """At least as many rows as it has: outdated entries count until they are overwritten in files."""
        return sum(chunk.live_rows for handle in self.handles for chunk in handle.chunks)

    @property
    def bytes(self) -> int:
        return sum(chunk.stored_bytes for handle in self.handles for chunk in handle.chunks)

    def by_subtask(self) -> list[StoredState]:
        """Return what each subtask has of it apart."""
        return [replace(self, handles=(handle,)) for handle in self.handles]

    def frames(self, storage: Storage, where: str) -> Iterator[pl.DataFrame]:
        """Yield the rows, one frame per subtask, which is read when it is requested.

        Raises StorageError for a file that is missing or damaged, SchemaError for a type that polars does not have.
        """
        schema = self.empty_frame(storage, where).schema
        columns = schema.names()
        for handle in self.handles:
            frame = _frame(storage, self, handle, where)
            if frame.columns == columns[:-1]:  # from before the state had a time to live
                frame = frame.with_columns(pl.lit(None, pl.Datetime("us", "UTC")).alias(columns[-1]))
            rows = frame.select(name for name in columns if name in frame.columns)
            if rows.schema != schema:
                raise StorageError(
                    f"{_where(self, where)}: the columns of one subtask are {frame.schema}, and those of another {schema}: "
                    "it is damaged, or midstream has not written it"
                )
            yield rows

    def empty_frame(self, storage: Storage, where: str) -> pl.DataFrame:
        """Return a frame with the columns and without rows. Reads one chunk; raises as `frames` does."""
        first, *_ = self.handles
        chunk = next(chunk for chunk in first.chunks if chunk.live_rows)
        return _frame(storage, self, PartHandle(first.name, first.redistribute, (chunk,)), where).clear()


Readable: TypeAlias = StoredState | RowsInFlight
"""What can be read from a checkpoint as a table."""


def stored_states(metadata: CheckpointMetadata, where: str) -> list[StoredState]:
    """Return every state of operators that a checkpoint has, in the order of these. Raises StorageError."""
    keys = {edge.target: edge.keys for edge in reversed(metadata.edges) if edge.keys}
    found = []
    for operator in metadata.operators:
        by_name: dict[str, list[PartHandle]] = {}
        for subtask in operator.subtasks:
            for handle in subtask.parts:
                if any(chunk.live_rows for chunk in handle.chunks):
                    by_name.setdefault(handle.name, []).append(handle)
        for name, handles in by_name.items():
            rule = rule_of(handles[0], where)
            if rule is Redistribute.BROADCAST:
                handles = handles[:1]  # each subtask has the same rows
            elif rule is Redistribute.NEWEST:
                handles = [max(handles, key=lambda handle: max(chunk.id for chunk in handle.chunks))]
            key = keys.get(operator.vertex, ("key",))[0]
            found.append(
                StoredState(operator.uid, operator.name, name, rule, tuple(handles), key, metadata.max_parallelism)
            )
    return found


def chosen_state(states: Sequence[Readable], uid: str, name: str | None, where: str) -> Readable:
    """Return a state by the uid of its operator and its name. Without a name, it is the only state of the operator; rows in
    flight do not count.

    Raises ConfigError with the names that exist.
    """
    of_operator = [state for state in states if state.uid == uid]
    if not of_operator:
        uids = ", ".join(dict.fromkeys(repr(state.uid) for state in states)) or "none"
        raise ConfigError(f"{where}: no operator with the uid {uid!r} has state there; operators with state: {uids}")
    found: list[Readable] = [state for state in of_operator if name in (state.name, state.part)]
    if name is None:
        found = [state for state in of_operator if isinstance(state, StoredState)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(state.name) for state in of_operator)
    if name is None:
        has = "several states" if found else "no state there but rows in flight"
        raise ConfigError(f"{where}: operator {uid!r} has {has}, so name one of them: {names}")
    raise ConfigError(
        f"{where}: operator {uid!r} has no state {name!r} there; it has {names}. State without any entry is not stored"
    )


def _frame(storage: Storage, state: StoredState, handle: PartHandle, where: str) -> pl.DataFrame:
    where = _where(state, where)
    part = read_parts(storage, [handle], range(state.max_parallelism), where).get(state.part)
    if part is None:
        raise StorageError(f"{where}: its rows are in no key group: it is damaged, or midstream has not written it")
    return frame_of(part.chunks, state, where)


def _where(state: StoredState, where: str) -> str:
    return f"{where}: state {state.part!r} of operator {state.uid!r}"


def frame_of(chunks: Sequence[Chunk], state: StoredState, where: str) -> pl.DataFrame:
    """Return the rows of the chunks that one subtask has of a state. Raises as `StoredState.frames` does."""
    if state.rule is Redistribute.NEWEST:
        chunks = (max(chunks, key=lambda chunk: chunk.id),)
    is_heap = state.kind in _HEAP_KINDS
    has_ttl = False
    frames: list[pl.DataFrame] = []
    for number, chunk in enumerate(chunks):
        table = chunk.table.select([name for name in chunk.table.column_names if name != KEY_GROUP])
        check_held_by_polars(table.schema, where)
        if not table.num_columns:
            raise StorageError(f"{where}: a chunk has no columns: it is damaged, or midstream has not written it")
        frame = to_polars(table)
        if is_heap:
            times = [name for name in WRITTEN_COLUMNS if frame.schema.get(name) == pl.Int64]
            written_us = pl.lit(None, pl.Int64) if not times else pl.col(times[0]).replace(UNKNOWN_US, None)
            has_ttl = has_ttl or bool(times)
            gone = pl.lit(value=False) if GONE_COLUMN not in table.column_names else pl.col(GONE_COLUMN)
            frame = frame.with_columns(gone.alias(GONE_COLUMN), written_us.alias(_WRITTEN_US)).drop(times)
            frame = frame.with_columns(pl.lit(number).alias(_CHUNK))
        if frames and frame.schema != frames[0].schema:
            raise StorageError(
                f"{where}: its chunks have different columns: {table.schema} differs from the first: damaged"
            )
        frames.append(frame)
    rows = pl.concat(frames)
    if not is_heap:
        return rows
    return _entries(rows if has_ttl else rows.drop(_WRITTEN_US), state, where)


def _entries(rows: pl.DataFrame, state: StoredState, where: str) -> pl.DataFrame:
    """Return the entries that are current, with columns that have the names of the keys and of the state."""
    needed = ("time_us",) if state.kind == TIMERS else ("value", "namespace")[: 1 + (state.kind in NAMESPACES)]
    missing = [name for name in needed if name not in rows.columns]
    if missing or rows.schema[GONE_COLUMN] != pl.Boolean or rows.schema.get("time_us", pl.Int64) != pl.Int64:
        raise StorageError(f"{where}: its columns are {rows.schema}: it is damaged, or midstream has not written it")
    identity = [name for name in ("key", "time_us") if name in rows.columns]
    newest = pl.col(_CHUNK).max()
    rows = rows.filter(pl.col(_CHUNK) == (newest.over(identity) if identity else newest), ~pl.col(GONE_COLUMN))
    key = rows.schema.get("key")
    keys: dict[str, pl.Expr] = {}
    if isinstance(key, pl.Struct):
        keys = {field.name: pl.col("key").struct.field(field.name) for field in key.fields}
    elif key is not None:
        keys = {state.key: pl.col("key")}
    if state.kind == TIMERS:
        others = [pl.col("time_us").cast(pl.Datetime("us", "UTC"))]
    else:
        others = [pl.col(name) for name in ("namespace", "value") if name in needed]
    has_times = _WRITTEN_US in rows.columns
    if has_times:
        others.append(pl.col(_WRITTEN_US).cast(pl.Datetime("us", "UTC")))
    names = shown_names(list(keys), state.part, has_times=has_times)
    return rows.select(column.alias(name) for name, column in zip(names, [*keys.values(), *others], strict=True))
