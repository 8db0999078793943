"""Savepoints made from a checkpoint with other state: states replaced by tables, dropped, or in other key groups.

Parts that stay as they are are copied; all others are chunks with new ids, in files of their own, so that no later
checkpoint takes an old file for the rows of a changed chunk. Chunks are read back and verified before the metadata, which
is written last, makes a savepoint of the directory.

Everything here blocks. The tables are in memory, and the state of one subtask at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint.extents import files_of, inline_bytes_max
from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    OperatorState,
    encode_metadata,
    forms_of,
    layout_of,
    settings_of,
)
from midstream.engine.checkpoint.metadata_checks import first_problem
from midstream.engine.checkpoint.other_key_groups import is_progress, progress_of, regrouped
from midstream.engine.checkpoint.savepoint import SavepointLocation, copied
from midstream.engine.checkpoint.state_columns import (
    KEY_COLUMN,
    TIMERS,
    StateColumns,
    columns_of,
    has_only_keys,
    key_columns,
    kind_of_part,
    name_of_part,
)
from midstream.engine.checkpoint.state_files import (
    StateFile,
    location_of,
    read_parts,
    store_parts,
    verify_chunks,
)
from midstream.engine.checkpoint.state_frames import conformed, divided, parts_by_subtask
from midstream.engine.checkpoint.store import metadata_path
from midstream.engine.checkpoint.stored_states import StoredState, stored_states
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError
from midstream.engine.core.interfaces import Ids, Storage
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.protocol.messages import OperatorSnapshot, PartHandle
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

_KEYED_KINDS: Final = frozenset({"value", "list", "map", "reducing"})
_HEAP_KINDS: Final = _KEYED_KINDS | {TIMERS}
_KINDS: Final = _HEAP_KINDS | {"broadcast", "table"}


@dataclass(frozen=True, slots=True)
class LikeCheckpoint:
    """The checkpoint of which a savepoint is a changed copy."""

    storage: Storage
    metadata: CheckpointMetadata
    where: str
    """How messages name it."""


@dataclass(frozen=True, slots=True)
class SavepointChanges:
    """What a savepoint has otherwise than the checkpoint that it is like."""

    states: Mapping[tuple[str, str], pa.Table] = field(default_factory=dict)
    """The rows of states, by the uid of the operator and the name of the state."""
    dropped: frozenset[str] = frozenset()
    """The uids of operators that have no state."""
    max_parallelism: int | None = None


def beginning_of(graph: JobGraph, job_name: str, job_id: str, now_ms: int) -> CheckpointMetadata:
    """Return a checkpoint of a job that has never run: all of its operators, without state, and no source positions."""
    vertices, edges = layout_of(graph)
    operators = tuple(
        OperatorState(
            spec.uid,
            spec.name,
            vertex.id,
            vertex.parallelism,
            (OperatorSnapshot(spec.uid),) * vertex.parallelism,
            settings=settings_of(spec.operator) if isinstance(spec, OperatorSpec) else (),
            forms=forms_of(spec.operator) if isinstance(spec, OperatorSpec) else (),
        )
        for vertex in graph.vertices
        for spec in vertex.specs
    )
    return CheckpointMetadata(
        job_name=job_name,
        job_id=job_id,
        checkpoint_id=1,
        epoch=1,
        attempt=0,
        created_ms=now_ms,
        completed_ms=now_ms,
        max_parallelism=graph.max_parallelism,
        vertices=vertices,
        edges=edges,
        operators=operators,
        sources=(),
        committables=(),
        state_bytes=0,
        files=(),
    )


Replaced = Mapping[tuple[str, str], Sequence[StatePart | None]]
"""The parts of all subtasks, by the uid of the operator and the name of the part."""


# ---- checking --------------------------------------------------------------


def checked(like: LikeCheckpoint, changes: SavepointChanges, ids: Ids) -> Replaced:
    """Check everything that can be checked before anything is written, and return the parts of replaced states.

    Raises ConfigError for a checkpoint or state that cannot be changed so, SchemaError for a table that does not fit.
    """
    metadata, where = like.metadata, like.where
    if metadata.channels or metadata.committables:
        what = "rows in flight" if metadata.channels else "output to commit"
        raise ConfigError(
            f"{where}: this checkpoint has {what}, which belong to the state as it is; make a savepoint of the job "
            "(midstream savepoint JOB, or stop it with --savepoint), which has neither, and change that one"
        )
    operators = {operator.uid: operator for operator in metadata.operators}
    unknown = sorted(changes.dropped - {uid for uid, operator in operators.items() if _has_state(metadata, operator)})
    if unknown:
        known = ", ".join(repr(uid) for uid, operator in operators.items() if _has_state(metadata, operator)) or "none"
        raise ConfigError(
            f"{where}: drop: no operator with the uid {unknown[0]!r} has state there; with state: {known}"
        )
    _check_key_groups(like, changes)
    stored = {(state.uid, state.part): state for state in stored_states(metadata, where)}
    groups = changes.max_parallelism or metadata.max_parallelism
    replaced: dict[tuple[str, str], Sequence[StatePart | None]] = {}
    for (uid, name), given in changes.states.items():
        at = f"states[{(uid, name)!r}]"
        if uid in changes.dropped:
            raise ConfigError(f"{at}: operator {uid!r} is dropped too; give one of them")
        operator = operators.get(uid)
        if operator is None:
            raise ConfigError(f"{at}: {where} has no operator with the uid {uid!r}; it has {_listed(operators)}")
        part = _part_of(operator, name, at)
        if (uid, part) in replaced:
            raise ConfigError(f"{at}: this state is given twice, under two of its names; leave one out")
        columns = _columns(like, operator, part, stored.get((uid, part)), at)
        batch = conformed(columns, given, at)
        _check_pickled(like, columns, stored.get((uid, part)), batch, at)
        replaced[uid, part] = parts_by_subtask(columns, batch, operator.parallelism, groups, ids.new_id)
    return replaced


def _has_state(metadata: CheckpointMetadata, operator: OperatorState) -> bool:
    is_source = any(position.uid == operator.uid for position in metadata.sources)
    return is_source or any(snapshot.parts for snapshot in operator.subtasks)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _part_of(operator: OperatorState, name: str, at: str) -> str:
    """Return the part that is meant by a name of a state."""
    declared = [part for part, _, _ in operator.settings if part]
    stored = [handle.name for snapshot in operator.subtasks for handle in snapshot.parts]
    has_timers = any(kind_of_part(part) in _KEYED_KINDS for part in (*declared, *stored))
    timers = [f"{TIMERS}:event", f"{TIMERS}:processing"] if has_timers else []
    parts = list(dict.fromkeys([*declared, *stored, *timers]))
    found = [part for part in parts if name in (part, name_of_part(part))]
    if len(found) != 1:
        raise ConfigError(
            f"{at}: operator {operator.uid!r} has no state {name!r}; it has {_listed([name_of_part(each) for each in parts])}"
        )
    [part] = found
    if kind_of_part(part) not in _KINDS or (kind_of_part(part) == "table" and not has_only_keys(operator)):
        raise ConfigError(
            f"{at}: the rows of state {name!r} depend on one another, and on the settings of operator {operator.name!r}, "
            "in ways that a table does not show; states of process functions, timers, and tables of functions on batches "
            "can be written. To begin without this state, drop the operator (drop=[uid])"
        )
    if operator.finished:
        raise ConfigError(
            f"{at}: {'all' if operator.fully_finished else 'some'} subtasks of operator {operator.uid!r} had finished, and "
            "the state of those is never restored; start from a savepoint that was made before the input ended"
        )
    return part


def _columns(
    like: LikeCheckpoint, operator: OperatorState, part: str, stored: StoredState | None, at: str
) -> StateColumns:
    schema = None
    if stored is not None:
        chunk = next(chunk for handle in stored.handles for chunk in handle.chunks if chunk.live_rows)
        handle = PartHandle(part, stored.rule.value, (chunk,))
        read = read_parts(like.storage, [handle], range(like.metadata.max_parallelism), like.where)
        schema = read[part].chunks[0].table.schema
    columns = columns_of(operator, part, schema, like.where)
    if columns is None:
        raise ConfigError(
            f"{at}: {like.where} does not show the types of this state, of which it has no rows; make a savepoint when it "
            "has some, or begin with like=env, the job's Environment"
        )
    return columns


def _check_pickled(
    like: LikeCheckpoint, columns: StateColumns, stored: StoredState | None, batch: pa.RecordBatch, at: str
) -> None:
    """Check that pickled values are among those of the state: others might not even be pickles."""
    if not columns.pickled or not batch.num_rows:
        return
    known = pl.DataFrame(schema=dict.fromkeys(columns.pickled, pl.Binary))
    if stored is not None:
        known = pl.concat([frame.select(known.columns) for frame in stored.frames(like.storage, like.where)])
    for name in columns.pickled:
        column = pl.DataFrame(pl.from_arrow(batch.select([name]))).to_series()
        unknown = (~column.is_in(known.get_column(name).unique().implode())).arg_true()
        if len(unknown):
            raise SchemaError(
                f"{at}: column {name!r}, row {unknown[0]}: these bytes are none that the state has. Its values are pickled, "
                "since it has no type, and can only be kept as read_state returns them. To write others, declare the state "
                "with a type under another name, and write that one"
            )


def _check_key_groups(like: LikeCheckpoint, changes: SavepointChanges) -> None:
    new = changes.max_parallelism
    if new is None or new == like.metadata.max_parallelism:
        return
    wide = [vertex for vertex in like.metadata.vertices if vertex.parallelism > new]
    if wide:
        raise ConfigError(
            f"max_parallelism={new} is less than the parallelism of {wide[0].name!r}, {wide[0].parallelism}, in {like.where}; "
            "resume the job at a lower parallelism first, and make a savepoint of that"
        )
    for operator in like.metadata.operators:
        if operator.finished and not operator.fully_finished and operator.uid not in changes.dropped:
            if any(handle.redistribute == Redistribute.KEYED.value for s in operator.subtasks for handle in s.parts):
                raise ConfigError(
                    f"{like.where}: some subtasks of operator {operator.uid!r} had finished, with the keys that they had, so "
                    "max_parallelism must remain as it is; use a savepoint that was made before the input ended"
                )


# ---- writing ---------------------------------------------------------------


def write_changed(
    like: LikeCheckpoint, changes: SavepointChanges, replaced: Replaced, location: SavepointLocation, ids: Ids
) -> CheckpointMetadata:
    """Write the changed savepoint, and return its metadata. `replaced`: what `checked` has returned.

    If this raises, nothing that could be restored is there.
    """
    parts = _ChangedParts(like, changes, replaced, location.storage, ids)
    metadata = parts.metadata()
    handles = [part for snapshot in _snapshots(metadata) for part in snapshot.parts]
    verify_chunks(location.storage, handles, location.url)
    problem = first_problem(metadata)
    if problem is not None:
        raise InvariantError(f"{location.url}: the savepoint that was made would be refused: {problem}")
    location.storage.write(metadata_path(metadata.checkpoint_id), [encode_metadata(metadata)])
    return metadata


def _snapshots(metadata: CheckpointMetadata) -> Iterator[OperatorSnapshot]:
    for operator in metadata.operators:
        yield from operator.subtasks


class _ChangedParts:
    """Writes the parts of one savepoint, and builds its metadata."""

    def __init__(
        self, like: LikeCheckpoint, changes: SavepointChanges, replaced: Replaced, target: Storage, ids: Ids
    ) -> None:
        self._like = like
        self._changes = changes
        self._replaced = replaced
        self._target = target
        self._ids = ids
        self._groups = changes.max_parallelism or like.metadata.max_parallelism
        self._moves = self._groups != like.metadata.max_parallelism
        moved = (chunk for s in _snapshots(like.metadata) for part in s.parts for chunk in part.chunks)
        files = len(replaced) + (sum(1 for _ in moved) if self._moves else 0)
        self._inline_bytes = inline_bytes_max(JobConfig().inline_bytes, max(files, 1))
        self._files = 0

    def metadata(self) -> CheckpointMetadata:
        like = self._like.metadata
        kept = tuple(map(self._kept, like.operators))
        files = files_of(_snapshots(msgspec.structs.replace(like, operators=kept)))
        names = {path: self._new_file() for path in sorted(files)}
        positions = tuple(position for position in like.sources if position.uid not in self._changes.dropped)
        base = copied(self._like.storage, self._target, msgspec.structs.replace(like, operators=kept), names)
        operators = tuple(
            self._with_parts(operator, old) for operator, old in zip(base.operators, like.operators, strict=True)
        )
        snapshots = list(_snapshots(msgspec.structs.replace(base, operators=operators)))
        chunks = {location_of(c): c.length for s in snapshots for part in s.parts for c in part.extents}
        return msgspec.structs.replace(
            base,
            operators=operators,
            sources=positions,
            max_parallelism=self._groups,
            files=tuple(sorted(files_of(snapshots))),
            state_bytes=sum(chunks.values()),
        )

    def _new_file(self) -> str:
        like = self._like.metadata
        self._files += 1
        return StateFile(like.epoch, like.attempt, like.checkpoint_id, 0, self._files - 1).path

    def _kept(self, operator: OperatorState) -> OperatorState:
        """Return an operator with the parts that stay as they are."""
        if operator.uid in self._changes.dropped:
            nothing = OperatorSnapshot(operator.uid)
            return msgspec.structs.replace(operator, subtasks=(nothing,) * operator.parallelism)
        subtasks = tuple(
            msgspec.structs.replace(
                snapshot, parts=tuple(part for part in snapshot.parts if self._stays(operator, part))
            )
            for snapshot in operator.subtasks
        )
        return msgspec.structs.replace(operator, subtasks=subtasks)

    def _stays(self, operator: OperatorState, part: PartHandle) -> bool:
        is_moved = self._moves and part.redistribute == Redistribute.KEYED.value
        return not is_moved and (operator.uid, part.name) not in self._replaced

    def _with_parts(self, operator: OperatorState, old: OperatorState) -> OperatorState:
        """Return an operator that was copied with the parts that are new, which are written. `old`: as it was."""
        if operator.uid in self._changes.dropped:
            return operator
        added: list[list[PartHandle]] = [[] for _ in range(operator.parallelism)]
        for (uid, name), parts in self._replaced.items():
            if uid == operator.uid:
                self._store(name, parts, added)
        if self._moves and not operator.fully_finished:  # the state of finished subtasks is never restored
            moved = {part.name for snapshot in old.subtasks for part in snapshot.parts if not self._stays(old, part)}
            for name in sorted(moved - {part for uid, part in self._replaced if uid == old.uid}):
                self._move(old, name, added)
        subtasks = tuple(
            msgspec.structs.replace(snapshot, parts=(*snapshot.parts, *parts))
            for snapshot, parts in zip(operator.subtasks, added, strict=True)
        )
        return msgspec.structs.replace(operator, subtasks=subtasks)

    def _store(self, name: str, parts: Sequence[StatePart | None], added: Sequence[list[PartHandle]]) -> None:
        """Write the parts of all subtasks to one file, and add their handles."""
        of_subtasks = [{} if part is None else {name: part} for part in parts]
        stored = store_parts(self._target, of_subtasks, {}, self._new_file(), self._inline_bytes)
        for handles, mine in zip(added, stored.parts, strict=True):
            for handle in mine:
                before = next((each for each in handles if each.name == handle.name), None)
                if before is not None:
                    handles.remove(before)
                    handle = msgspec.structs.replace(handle, chunks=(*before.chunks, *handle.chunks))
                handles.append(handle)

    def _move(self, operator: OperatorState, name: str, added: Sequence[list[PartHandle]]) -> None:
        """Divide a keyed part of an operator by the new key groups, chunk by chunk in their order."""
        like, where = self._like, f"{self._like.where}: state {name!r} of operator {operator.uid!r}"
        keys = [KEY_COLUMN] if kind_of_part(name) in _HEAP_KINDS else [key.name for key in key_columns(operator, where)]
        old, new = like.metadata.max_parallelism, self._groups
        progress = []
        for snapshot in operator.subtasks:
            handles = [handle for handle in snapshot.parts if handle.name == name]
            read = read_parts(like.storage, handles, range(old), where)
            for chunk in read[name].chunks if name in read else ():
                if is_progress(chunk.table):
                    progress.append(chunk.table)
                    continue
                self._store(name, self._divided(regrouped(chunk.table, keys, old, new, where), operator), added)
        if progress:
            self._store(name, self._divided(progress_of(progress, old, new, where), operator), added)

    def _divided(self, table: pa.Table, operator: OperatorState) -> list[StatePart | None]:
        return [
            None if rows is None else StatePart(Redistribute.KEYED, (Chunk(self._ids.new_id(), rows),))
            for rows in divided(table, operator.parallelism, self._groups)
        ]
