"""State files: immutable chunks of state, written once, verified before they are used.

A task writes at most one file per checkpoint. It is a series of Arrow IPC streams, one per chunk that is not yet in a
file of a completed checkpoint; the others are reused by handle, which makes checkpoints incremental. If there is little
to write, it goes into the metadata (see `extents`). Everything here is pure or blocking I/O: for I/O threads only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.checkpoint.extents import WrittenExtent, check_extent, with_extent, write_extents
from midstream.engine.checkpoint.held_chunks import HeldChunk, HeldChunks
from midstream.engine.core.arrow_bytes import NOT_ARROW, read_table
from midstream.engine.core.errors import InvariantError, StorageError, assert_never
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ChunkHandle, PartHandle
from midstream.engine.state.state_parts import (
    KEY_GROUP,
    Chunk,
    Redistribute,
    StatePart,
    WholeChunk,
    check_columns,
    filtered,
    rows_left,
)

# Measured on 52 MB of window state (one core): lz4 writes 1 GB/s and reads 4 GB/s at 42 % of the
# size, zstd 0.6 and 1.6 GB/s at 25 %. lz4 keeps up with a disk and halves what is written.
# Below this size its framing costs more than it saves.
COMPRESS_FROM_BYTES = 64 * 2**10

WINDOW_BYTES: Final = 64 * 2**20
"""At most this much of a file is read at a time, or one chunk that is larger."""
GAP_BYTES_MAX: Final = 2**18
"""Chunks that lie closer together are read together, with what is between them."""

SHARED = "shared"
_NAME = re.compile(r"e(\d+)-a(\d+)-c(\d+)-v(\d+)-s(\d+)\.(state|channels(?:-[1-9]\d*)?)")


@dataclass(frozen=True, slots=True, order=True)
class StateFile:
    """The writer of a state file: no two writers share a name."""

    epoch: int
    attempt: int
    checkpoint_id: int
    vertex: int
    subtask: int
    kind: str = "state"
    """The kind, "state", or "channels", "channels-1", … for what was in flight, see
    `engine.checkpoint.channel_state`."""

    @property
    def path(self) -> str:
        name = f"e{self.epoch}-a{self.attempt}-c{self.checkpoint_id}-v{self.vertex}-s{self.subtask}.{self.kind}"
        return f"{SHARED}/{name}"

    @classmethod
    def parse(cls, path: str) -> StateFile | None:
        """Parse a path; None if it is not the path of a state file."""
        directory, _, name = path.rpartition("/")
        match = _NAME.fullmatch(name) if directory == SHARED else None
        if match is None:
            return None
        epoch, attempt, checkpoint_id, vertex, subtask = map(int, match.groups()[:5])
        file = cls(epoch, attempt, checkpoint_id, vertex, subtask, match[6])
        return file if file.path == path else None


def state_file(epoch: int, attempt: int, checkpoint_id: int, vertex: int, subtask: int) -> str:
    """Return the path of the one file for operator state that a subtask writes for a checkpoint."""
    return StateFile(epoch, attempt, checkpoint_id, vertex, subtask).path


def channel_file(epoch: int, attempt: int, checkpoint_id: int, vertex: int, subtask: int, part: int = 0) -> str:
    """Return the path of file number `part` for what was in flight."""
    kind = f"channels-{part}" if part else "channels"
    return StateFile(epoch, attempt, checkpoint_id, vertex, subtask, kind).path


# ---- writing ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredParts:
    parts: tuple[tuple[PartHandle, ...], ...]
    """The handles of each operator."""
    written: WrittenExtent

    @property
    def in_files(self) -> dict[str, ChunkHandle]:
        """The chunks, by id, that need not be written again once the checkpoint has completed."""
        return in_files(handle for handles in self.parts for handle in handles)


def store_parts(
    storage: Storage,
    operators: Sequence[Mapping[str, StatePart]],
    known: Mapping[str, ChunkHandle],
    file: str,
    inline_bytes_max: int = 0,
) -> StoredParts:
    """Write the unknown chunks of each operator's parts to `file`, and return the handles of all parts.

    `known` maps chunk ids to handles in files that a *completed* checkpoint references. Handles of a checkpoint whose
    outcome is unknown to the task must not be in it: its files may have been deleted. Raises StorageError or OSError.
    """
    new: dict[str, tuple[Chunk, bool]] = {}
    for parts in operators:
        for part in parts.values():
            for chunk in part.chunks:
                new.setdefault(chunk.id, (chunk, part.redistribute is Redistribute.KEYED))
                new.update({vector.id: (vector, False) for vector in chunk.removed})
    drafts: list[ChunkHandle] = []
    unknown = ((chunk, is_keyed) for chunk, is_keyed in new.values() if chunk.id not in known)
    written = write_extents(storage, file, _encoded(unknown, drafts), inline_bytes_max)
    handles = dict(known)
    for draft, extent in zip(drafts, written.extents, strict=True):
        handles[draft.id] = with_extent(draft, extent)
    return StoredParts(
        tuple(
            tuple(
                PartHandle(name, part.redistribute.value, tuple(_handle(chunk, handles) for chunk in part.chunks))
                for name, part in parts.items()
            )
            for parts in operators
        ),
        written,
    )


def _handle(chunk: Chunk, handles: Mapping[str, ChunkHandle]) -> ChunkHandle:
    """Return the handle of a chunk with those of its deletion vectors, which are other ones than when it was written."""
    removed = tuple(handles[vector.id] for vector in chunk.removed)
    return msgspec.structs.replace(handles[chunk.id], removed=removed)


def _encoded(chunks: Iterable[tuple[Chunk, bool]], drafts: list[ChunkHandle]) -> Iterator[Sequence[memoryview]]:
    """Make and encode one table after the other, and add the handles, without a location, to `drafts`.

    The flag of a chunk: whether its rows have key groups.
    """
    for chunk, is_keyed in chunks:
        table = chunk.stored
        drafts.append(_draft(chunk, table, is_keyed))
        pieces = (_encode_table(table),)
        del table
        yield pieces


def _encode_table(table: pa.Table) -> memoryview:
    is_large = table.get_total_buffer_size() >= COMPRESS_FROM_BYTES  # at least nbytes, which reads every offset
    compression: Literal["lz4"] | None = "lz4" if is_large and table.nbytes >= COMPRESS_FROM_BYTES else None
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _draft(chunk: Chunk, table: pa.Table, is_keyed: bool) -> ChunkHandle:
    """Return the handle of a chunk, without a location."""
    low, high = -1, -1
    if is_keyed:
        if table.schema.get_field_index(KEY_GROUP) < 0:
            raise InvariantError(f"chunk {chunk.id} of keyed state has no column {KEY_GROUP}")
        if table.num_rows:
            groups = table.column(KEY_GROUP).to_numpy()
            low, high = _clipped(int(groups.min()), int(groups.max()), chunk.key_groups)
    return ChunkHandle(chunk.id, "", 0, 0, 0, table.num_rows, low, high)


def _clipped(low: int, high: int, key_groups: range | None) -> tuple[int, int]:
    """Return those of the key groups from `low` to `high` that a subtask has: all other rows have been removed, and no other
    subtask has to restore the chunk because of them.
    """
    return (low, high) if key_groups is None else (max(low, key_groups.start), min(high, key_groups.stop - 1))


# ---- reading ---------------------------------------------------------------


Keep: TypeAlias = Callable[[pa.Table], pa.Table]
"""Takes a table that was read, and returns an equal one, which perhaps lies elsewhere."""


def in_memory(table: pa.Table) -> pa.Table:
    """Keep a table where it is."""
    return table


def read_parts(
    storage: Storage,
    handles: Sequence[PartHandle],
    key_groups: range,
    where: str,
    keep: Keep = in_memory,
    held: HeldChunks | None = None,
) -> dict[str, StatePart]:
    """Read the rows of `handles` that belong to a subtask which owns `key_groups`, by part name.

    Handles with the same name and rule are joined. A part that has no row for this subtask is left out, unless its rule is
    NEWEST. Rows that were removed after their chunk was stored are left out. A chunk of which only some rows are kept gets
    an id of its own, derived from the old one, since the same id must always mean the same rows. `keep` is
    called with each table once it is read. Chunks of keyed state that are `held` are not read.

    Raises StorageError naming `where` and the file if a file is missing, short or corrupt; every chunk is checked
    before any of its bytes are parsed.
    """
    parts: dict[str, tuple[Redistribute, list[tuple[ChunkHandle, _Owned]]]] = {}
    for handle in handles:
        rule = rule_of(handle, where)
        first_rule, selected = parts.setdefault(handle.name, (rule, []))
        if rule is not first_rule:
            raise StorageError(
                f"{where}: state {handle.name!r} is {first_rule.value} in one subtask and {rule.value} in another"
            )
        selected.extend(_selected(handle, rule, key_groups))
    forms = {handle.name: handle.stored for handle in handles}
    found = {} if held is None else _held_among(held, storage, parts.values())
    chunks = [chunk for _, selected in parts.values() for chunk, _ in selected]
    to_read = [each for chunk in chunks for each in (chunk, *chunk.removed) if location_of(each) not in found]
    tables = _read_tables(storage, to_read, where, keep)
    read = {}
    for name, (rule, selected) in parts.items():
        of_state = f"{where}: state {name!r}"
        kept = []
        for chunk, owned in selected:
            if rule is Redistribute.KEYED:
                kept.append(_keyed_rows_of(tables, found, chunk, owned, of_state))
            else:
                table = tables[location_of(chunk)]
                _check_unkeyed(table, chunk, rule, of_state)
                kept.append(_select(table, chunk, owned))
        if restored := tuple(chunk for chunk in kept if chunk is not None):
            read[name] = StatePart(rule, restored, forms[name])
    return read


def _held_among(
    held: HeldChunks, storage: Storage, parts: Iterable[tuple[Redistribute, list[tuple[ChunkHandle, _Owned]]]]
) -> dict[tuple[str, int, str], HeldChunk]:
    """Return the chunks of keyed state that are held, by location."""
    found = {}
    for rule, selected in parts:
        for chunk, _ in selected if rule is Redistribute.KEYED else ():
            one = held.take(chunk, storage)
            if one is not None:
                found[location_of(chunk)] = one
    return found


def _keyed_rows_of(
    tables: Mapping[tuple[str, int, str], pa.Table],
    found: Mapping[tuple[str, int, str], HeldChunk],
    chunk: ChunkHandle,
    owned: _Owned,
    where: str,
) -> Chunk | None:
    """Return the rows of a chunk that have not been removed and belong to the subtask; None if there are none.

    Positions of removed rows count all rows of a chunk.
    """
    one = found.get(location_of(chunk))
    made = tables[location_of(chunk)] if one is None else one.made
    groups = _groups_of(made, where) if one is None or one.run.groups is None else one.run.groups
    vectors = [Chunk(each.id, tables[location_of(each)]) for each in chunk.removed]
    stored = [vector.stored for vector in vectors]
    left = rows_left(len(groups), stored, f"{where}: chunk {chunk.id}") if vectors else None
    _check_groups(groups if left is None else groups[left], chunk, where)
    chunk_id, kept = chunk.id, left
    if vectors:
        chunk_id = f"{chunk_id}-{vectors[-1].id}"
    if owned.key_groups is not None:
        is_owned = (groups >= owned.key_groups.start) & (groups < owned.key_groups.stop)
        kept = is_owned if left is None else is_owned & left
        chunk_id = f"{chunk_id}/{owned.key_groups.start}-{owned.key_groups.stop}"
    rows = len(groups) if kept is None else int(np.count_nonzero(kept))
    if not rows:
        return None
    if 2 * rows > len(groups):
        run = None if one is None else one.run
        whole = WholeChunk(chunk.id, made, groups, tuple(vectors), left, kept, owned.key_groups, run)
        return Chunk(chunk_id, made if kept is None else partial(_kept_of, made, kept), whole=whole)
    assert kept is not None
    return Chunk(chunk_id, _kept_of(made, kept))


def _kept_of(made: pa.Table | Callable[[], pa.Table], kept: npt.NDArray[np.bool_]) -> pa.Table:
    return filtered(made() if callable(made) else made, kept)


def _groups_of(made: pa.Table | Callable[[], pa.Table], where: str) -> npt.NDArray[np.int32]:
    table = made() if callable(made) else made
    check_columns(table, {KEY_GROUP: pa.int32()}, where)
    groups: npt.NDArray[np.int32] = table.column(KEY_GROUP).to_numpy()
    return groups


def known_chunks(handles: Sequence[PartHandle], parts: Mapping[str, StatePart]) -> dict[str, ChunkHandle]:
    """Return the chunks that `read_parts` restored whole from a file, which need not be written again.

    The handle of one of which only some rows are restored has their key groups alone, so that later only those subtasks
    restore it to which these belong.
    """
    stored = in_files(handles)
    restored = [chunk for part in parts.values() for chunk in part.chunks]
    known = {chunk.id: stored[chunk.id] for chunk in restored if chunk.id in stored}
    for whole in (chunk.whole for chunk in restored if chunk.whole is not None):
        if whole.id in stored:
            handle = stored[whole.id]
            low, high = _clipped(handle.key_group_min, handle.key_group_max, whole.key_groups)
            known[whole.id] = msgspec.structs.replace(handle, key_group_min=low, key_group_max=high)
            known.update((vector.id, stored[vector.id]) for vector in whole.removed if vector.id in stored)
    return known


def in_files(handles: Iterable[PartHandle]) -> dict[str, ChunkHandle]:
    """Return the chunks of `handles` that are not inline, by id."""
    return {extent.id: extent for handle in handles for extent in handle.extents if extent.file}


def verify_chunks(storage: Storage, handles: Sequence[PartHandle], where: str) -> int:
    """Read and check every chunk, without parsing it; return the number of bytes. Raises StorageError."""
    unique = {location_of(extent): extent for handle in handles for extent in handle.extents}
    files = _Files(storage, where, unique.values())
    return sum(files.bytes_of(unique[location]).nbytes for location in sorted(unique))


def location_of(chunk: ChunkHandle) -> tuple[str, int, str]:
    """Return a key that identifies a chunk, ordered by file; chunks without a file are identified by their id."""
    return chunk.file, chunk.offset, chunk.id


def _read_tables(
    storage: Storage, chunks: Sequence[ChunkHandle], where: str, keep: Keep
) -> dict[tuple[str, int, str], pa.Table]:
    """Read each chunk once, file by file, so that at most one file, or part of a long one, is in memory besides the
    tables.
    """
    unique = {location_of(chunk): chunk for chunk in chunks}
    files = _Files(storage, where, unique.values())
    return {location: keep(files.read(unique[location])) for location in sorted(unique)}


@dataclass(frozen=True, slots=True)
class _Owned:
    """Which rows of a chunk to keep: those of `key_groups`, or every `stride`-th from `index`."""

    key_groups: range | None = None
    index: int = 0
    stride: int = 1


_ALL = _Owned()


def rule_of(handle: PartHandle, where: str) -> Redistribute:
    """Return the rule of a part. Raises StorageError for one that this version does not have."""
    try:
        return Redistribute(handle.redistribute)
    except ValueError as error:
        raise StorageError(f"{where}: state {handle.name!r} has the unknown rule {handle.redistribute!r}") from error


def _selected(handle: PartHandle, rule: Redistribute, key_groups: range) -> list[tuple[ChunkHandle, _Owned]]:
    """Return the chunks of a part with the rows of each that belong to a subtask, without those that have none."""
    match rule:
        case Redistribute.KEYED:
            return _keyed_chunks(handle, key_groups)
        case Redistribute.NEWEST:
            return [(chunk, _ALL) for chunk in handle.chunks]  # a version may have no rows
        case Redistribute.SPLIT | Redistribute.UNION | Redistribute.BROADCAST:
            return _strided_chunks(handle)
        case _:
            assert_never(rule)


def _keyed_chunks(handle: PartHandle, key_groups: range) -> list[tuple[ChunkHandle, _Owned]]:
    return [(c, _keyed_rows(c, key_groups)) for c in handle.chunks if intersects(c, key_groups)]


def _keyed_rows(chunk: ChunkHandle, key_groups: range) -> _Owned:
    whole = key_groups.start <= chunk.key_group_min and chunk.key_group_max < key_groups.stop
    return _ALL if whole else _Owned(key_groups=key_groups)


def intersects(chunk: ChunkHandle, key_groups: range) -> bool:
    """Whether a chunk of keyed state may hold rows of these key groups."""
    return chunk.rows > 0 and chunk.key_group_min < key_groups.stop and chunk.key_group_max >= key_groups.start


def _strided_chunks(handle: PartHandle) -> list[tuple[ChunkHandle, _Owned]]:
    """Return the chunks with the rows that `index` and `stride` assign to this handle; both count over all chunks."""
    selected = []
    before = 0
    for chunk in handle.chunks:
        first = (handle.index - before) % handle.stride
        if first < chunk.rows:
            selected.append((chunk, _ALL if handle.stride == 1 else _Owned(index=first, stride=handle.stride)))
        before += chunk.rows
    return selected


def _check_groups(groups: npt.NDArray[np.int32], chunk: ChunkHandle, where: str) -> None:
    """Check that rows have the key groups for which their chunk is read. Raises StorageError."""
    if len(groups) and not chunk.key_group_min <= groups.min() <= groups.max() <= chunk.key_group_max:
        raise StorageError(
            f"{where}: chunk {chunk.id} has rows of the key groups {groups.min()} to {groups.max()}, and the metadata "
            f"has {chunk.key_group_min} to {chunk.key_group_max}: it is damaged, or midstream has not written it"
        )


def _check_unkeyed(table: pa.Table, chunk: ChunkHandle, rule: Redistribute, where: str) -> None:
    """Check that state which is not keyed has no key groups. Raises StorageError."""
    if KEY_GROUP in table.column_names:
        raise StorageError(
            f"{where}: chunk {chunk.id} has rows of keys, and according to the metadata it is redistributed as "
            f"{rule.value!r}: it is damaged, or midstream has not written it"
        )


def _select(table: pa.Table, chunk: ChunkHandle, owned: _Owned) -> Chunk:
    """Return the rows to keep of state that is not keyed."""
    if owned is _ALL:
        return Chunk(chunk.id, table)
    rows = np.arange(owned.index, table.num_rows, owned.stride)
    return Chunk(f"{chunk.id}/{owned.index}%{owned.stride}", table.take(pa.array(rows, pa.int64())))


class _Files:
    """Reads some of `chunks`, and caches what was read last, since they are requested in the order of their places.

    Neighbouring chunks are read together, and what lies between others is not read.
    """

    def __init__(self, storage: Storage, where: str, chunks: Iterable[ChunkHandle]) -> None:
        self._storage = storage
        self._where = where
        self._ends: dict[tuple[str, int], int] = {}
        """By file and offset of each chunk, the end of the read that begins there."""
        first = "", 0
        for file, offset, end in sorted({(each.file, each.offset, each.offset + each.length) for each in chunks}):
            is_near = file == first[0] and offset <= self._ends.get(first, 0) + GAP_BYTES_MAX
            if not is_near or end - first[1] > WINDOW_BYTES:
                first = file, offset
            self._ends[first] = max(end, self._ends.get(first, 0))
        self._path: str | None = None
        self._start = 0
        """Where in the file `_data` begins."""
        self._data = memoryview(b"")

    def read(self, chunk: ChunkHandle) -> pa.Table:
        """Return the chunk's table. Raises StorageError."""
        data = self.bytes_of(chunk)
        if data.nbytes < COMPRESS_FROM_BYTES:
            data = memoryview(bytes(data))  # the table refers to these bytes: it must not keep the whole file in memory
        try:
            table = read_table(data)
        except NOT_ARROW as error:
            raise self._error(chunk, f"its bytes are intact but are not an Arrow stream: {error}") from error
        if table.num_rows != chunk.rows:
            raise self._error(chunk, f"it holds {table.num_rows} rows, not {chunk.rows}")
        return table

    def bytes_of(self, chunk: ChunkHandle) -> memoryview:
        """Return the chunk's bytes, with length and checksum verified. Raises StorageError."""
        if chunk.inline:
            data = memoryview(chunk.inline)
        else:
            data = self._load(chunk)
        problem = check_extent(data, chunk.length, chunk.checksum)
        if problem:
            raise self._error(chunk, problem)
        return data

    def _load(self, chunk: ChunkHandle) -> memoryview:
        file, offset, end = chunk.file, chunk.offset, chunk.offset + chunk.length
        if self._path != file or not self._start <= offset <= end <= self._start + len(self._data):
            self._path, self._data, self._start = None, memoryview(b""), offset
            try:
                stop = self._ends.get((file, offset), end)  # of a file that is too short, parts are requested again
                self._data = memoryview(self._storage.read_range(file, offset, stop - offset))
            except StorageError as error:
                raise StorageError(f"{self._where}: {error}") from error
            except OSError as error:
                raise StorageError(f"{self._where}: state file {file} cannot be read: {error}") from error
            self._path = file
        return self._data[offset - self._start : end - self._start]

    def _error(self, chunk: ChunkHandle, what: str) -> StorageError:
        location = f"state file {chunk.file}, bytes {chunk.offset} to {chunk.offset + chunk.length}"
        return StorageError(
            f"{self._where}: chunk {chunk.id} ({location if chunk.file else 'in the metadata'}): {what}. "
            "This checkpoint cannot be restored; to rewind to an older one, name it with --from."
        )
