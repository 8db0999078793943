"""Decides which files of a watched directory are new; listings and clocks come from outside.

The position, in every checkpoint, has a 64-bit hash of the path of each file that was taken and still exists, and a
hash of 16 bits of its size and time: about 8 bytes each. A file that has disappeared is remembered for `GONE_S` more,
since it may only be missing from a listing; and for as long as no known file is listed, since then the whole directory
is missing. A known file was written while no job was running if its second hash differs, in which times are whole
seconds, since copies of directories seldom keep more; or if it is newer than the newest file listed, whose exact time
the position has. Other exact times and sizes are only in the driver's memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from midstream.engine.core.errors import DataError, StorageError
from midstream.engine.operators.source_api import decoded

GONE_S: Final = 3600
REST_S: Final = 2.0
"""A file modified less than this long ago may still be being written."""
_WIDTH: Final = 8

Hashes = npt.NDArray[np.uint64]
States = npt.NDArray[np.uint16]
"""For each file, a hash of its size and its modification time in whole seconds; 0: unknown."""


def _no_hashes() -> Hashes:
    return np.empty(0, np.uint64)


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    files: int
    newest_ns: int
    seen: bytes
    gone: bytes
    since_s: tuple[int, ...]
    """For each missing file, when it was first missing."""
    states: bytes
    """For each of `seen`, its state."""


@dataclass(frozen=True)
class Position:
    files: int = 0
    """The number of files taken so far."""
    newest_ns: int = 0
    """The newest modification time."""
    seen: Hashes = field(default_factory=_no_hashes)
    """Sorted hashes of files taken, including those that have disappeared."""
    gone: Hashes = field(default_factory=_no_hashes)
    since_s: tuple[int, ...] = ()
    states: States = field(default_factory=lambda: np.empty(0, np.uint16))
    """The states of `seen` when these were taken."""

    def encoded(self) -> bytes:
        states = self.states.astype("<u2").tobytes()
        return msgspec.msgpack.encode(
            _Stored(self.files, self.newest_ns, _packed(self.seen), _packed(self.gone), self.since_s, states)
        )

    def states_of(self, hashes: Hashes) -> States:
        """Return the state of each file with one of these hashes when it was taken."""
        found = np.zeros(len(hashes), np.uint16)
        is_known = _contains(self.seen, hashes)
        found[is_known] = self.states[np.searchsorted(self.seen, hashes[is_known])]
        return found


def decoded_position(data: bytes | None, where: str) -> Position:
    """Decode a position. Raises ConfigError if another kind of source wrote it, StorageError if it is damaged."""
    if data is None:
        return Position()
    stored = decoded(data, _Stored, where)
    seen, states = _unpacked(stored.seen), np.frombuffer(stored.states, "<u2").astype(np.uint16)
    if len(states) != len(seen):
        raise StorageError(
            f"{where}: the position in the checkpoint is damaged: it has {len(states)} states of {len(seen)} files"
        )
    return Position(stored.files, stored.newest_ns, seen, _unpacked(stored.gone), stored.since_s, states)


def hash_of(path: str) -> int:
    return xxhash.xxh3_128_intdigest(path.encode()) >> 64


@dataclass(frozen=True)
class Listing:
    """The files that exist now and have a size."""

    infos: Sequence[Any]
    """The FileInfos of pyarrow."""
    hashes: Hashes
    sizes: npt.NDArray[np.int64]
    modified_ns: npt.NDArray[np.int64]

    @classmethod
    def of(cls, infos: Sequence[Any]) -> Listing:
        return cls(
            infos,
            np.fromiter((hash_of(info.path) for info in infos), np.uint64, len(infos)),
            np.fromiter((info.size for info in infos), np.int64, len(infos)),
            np.fromiter((info.mtime_ns or 0 for info in infos), np.int64, len(infos)),
        )

    def states(self) -> States:
        mixed = self.sizes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += (self.modified_ns // 10**9).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        states: States = ((mixed >> np.uint64(32)) % np.uint64(65535) + np.uint64(1)).astype(np.uint16)
        return states

    def sorted(self) -> Listing:
        """Return the listing sorted by hash."""
        order = np.argsort(self.hashes)
        infos = [self.infos[at] for at in order.tolist()]
        return Listing(infos, self.hashes[order], self.sizes[order], self.modified_ns[order])


class DirectoryWatch:
    """The driver's memory of a directory: how its files were at the last listing.

    `appear_whole`: a file is complete from the first moment, as in an object store.
    """

    def __init__(self, appear_whole: bool) -> None:
        self._appear_whole = appear_whole
        self._last = Listing((), _no_hashes(), np.empty(0, np.int64), np.empty(0, np.int64))
        """The last listing, sorted, including remembered files that have disappeared; without FileInfos."""
        self._same_since_s: npt.NDArray[np.float64] = np.empty(0)
        """When each of these was first seen in its current state, by the monotonic clock."""

    def poll(self, now: Listing, known: Position, *, now_ns: int, now_s: float) -> tuple[list[Any], Position]:
        """Return the files to read now, in order of modification time, and the position after them.

        Raises DataError if a file that was taken has changed since.
        """
        now = now.sorted()
        since_s = self._compare(now, now_s)
        is_known = _contains(known.seen, now.hashes)
        states, states_then = now.states(), known.states_of(now.hashes)
        self._check(now, is_known, known, (states_then != 0) & (states != states_then))
        self._remember(now, since_s, known)
        is_taken = ~is_known & self._rests(now, since_s, now_ns, now_s)
        taken = sorted(
            (now.infos[at] for at in np.flatnonzero(is_taken).tolist()), key=lambda info: (info.mtime_ns, info.path)
        )
        listed = now.hashes[is_known]
        seen, gone, gone_since_s = _forget(known, listed, int(now_ns / 1e9))
        counted = is_known | is_taken
        newest_ns = max(known.newest_ns, int(now.modified_ns[counted].max()) if counted.any() else 0)
        seen = np.union1d(seen, now.hashes[is_taken])
        all_states = known.states_of(seen)
        all_states[np.searchsorted(seen, now.hashes[counted])] = states[counted]
        return taken, Position(known.files + len(taken), newest_ns, seen, gone, gone_since_s, all_states)

    def _compare(self, now: Listing, now_s: float) -> npt.NDArray[np.float64]:
        """Return since when each file has been in its current state."""
        since_s = np.full(len(now.hashes), now_s)
        if not len(self._last.hashes):
            return since_s
        at = np.minimum(np.searchsorted(self._last.hashes, now.hashes), len(self._last.hashes) - 1)
        is_same = (
            (self._last.hashes[at] == now.hashes)
            & (self._last.sizes[at] == now.sizes)
            & (self._last.modified_ns[at] == now.modified_ns)
        )
        return np.where(is_same, self._same_since_s[at], since_s)

    def _remember(self, now: Listing, since_s: npt.NDArray[np.float64], known: Position) -> None:
        last = self._last
        gone = ~_contains(now.hashes, last.hashes) & _contains(known.seen, last.hashes)
        hashes = np.concatenate([now.hashes, last.hashes[gone]])
        order = np.argsort(hashes)
        self._last = Listing(
            (),
            hashes[order],
            np.concatenate([now.sizes, last.sizes[gone]])[order],
            np.concatenate([now.modified_ns, last.modified_ns[gone]])[order],
        )
        self._same_since_s = np.concatenate([since_s, self._same_since_s[gone]])[order]

    def _check(
        self, now: Listing, is_known: npt.NDArray[np.bool_], known: Position, changed: npt.NDArray[np.bool_]
    ) -> None:
        """Raise DataError for a file that has changed since it was taken. `changed`: by the states in the position."""
        changed |= is_known & (now.modified_ns > known.newest_ns)
        if len(self._last.hashes):
            at = np.minimum(np.searchsorted(self._last.hashes, now.hashes), len(self._last.hashes) - 1)
            differs = (self._last.sizes[at] != now.sizes) | (self._last.modified_ns[at] != now.modified_ns)
            changed |= is_known & (self._last.hashes[at] == now.hashes) & differs
        if changed.any():
            path = now.infos[int(np.flatnonzero(changed)[0])].path
            raise DataError(
                f"{path}: was changed after it was taken; files must not change. Move it away, and add its new rows "
                "as a file with another name; then resume with --from latest"
            )

    def _rests(
        self, now: Listing, since_s: npt.NDArray[np.float64], now_ns: int, now_s: float
    ) -> npt.NDArray[np.bool_]:
        """Whether each file seems complete. Two clocks are used, since that of the file system may be wrong."""
        if self._appear_whole:
            return np.ones(len(now.hashes), bool)
        return (now_ns - now.modified_ns >= REST_S * 1e9) | (now_s - since_s >= REST_S)


def _forget(known: Position, listed: Hashes, now_s: int) -> tuple[Hashes, Hashes, tuple[int, ...]]:
    """Return the remembered hashes, those of missing files, and since when each is missing.

    `listed`: the known files that exist.
    """
    missing = np.setdiff1d(known.seen, listed)
    before = dict(zip(known.gone.tolist(), known.since_s, strict=True))
    since = {each: before.get(each, now_s) for each in missing.tolist()}
    forgotten = {each for each, first_s in since.items() if now_s - first_s >= GONE_S} if len(listed) else set()
    gone = [each for each in since if each not in forgotten]
    seen = np.setdiff1d(known.seen, np.fromiter(forgotten, np.uint64, len(forgotten)))
    return seen, np.array(gone, np.uint64), tuple(since[each] for each in gone)


def _contains(within: Hashes, values: Hashes) -> npt.NDArray[np.bool_]:
    if not len(within):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(within, values), len(within) - 1)
    found: npt.NDArray[np.bool_] = within[at] == values
    return found


def _packed(hashes: Hashes) -> bytes:
    """Encode sorted hashes as their differences, grouped by byte: the high bytes are mostly zeros."""
    steps = np.diff(hashes, prepend=np.uint64(0)).astype("<u8")
    return zlib.compress(steps.view(np.uint8).reshape(-1, _WIDTH).T.tobytes(), 1)


def _unpacked(data: bytes) -> Hashes:
    planes = np.frombuffer(zlib.decompress(data) if data else b"", np.uint8).reshape(_WIDTH, -1)
    steps = np.ascontiguousarray(planes.T).view("<u8").ravel()
    return np.cumsum(steps, dtype=np.uint64)
