"""Which files of a watched directory are new: pure; listings and clocks come from outside.

The position, in every checkpoint, has a 64-bit hash of the path of each file that was taken and is
still there, about 6 bytes each. A file that is gone is remembered for `GONE_S` more, as it may only
be missing from a listing; and for as long as nothing that is known is listed, as then the whole
directory is missing. It also has the newest modification time of what was listed: what is known and
newer than that was written while no job was looking. Sizes and times are only in the driver's memory.
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

from midstream.core.errors import StorageError
from midstream.operators.source import decoded

GONE_S: Final = 3600
REST_S: Final = 2.0
"""A file that was modified since is perhaps still being written."""
_WIDTH: Final = 8

Hashes = npt.NDArray[np.uint64]


def _no_hashes() -> Hashes:
    return np.empty(0, np.uint64)


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    files: int
    newest_ns: int
    """Here an older version had bytes: it refuses this form, and this one that."""
    seen: bytes
    gone: bytes = b""
    since_s: tuple[int, ...] = ()
    """Per file that is gone: when it was first missed."""


class _StoredBefore(msgspec.Struct, frozen=True, array_like=True):
    """The form up to 0.1: `seen` is 16 bytes per file, of which the first 8 are its hash here."""

    files: int
    seen: bytes


@dataclass(frozen=True)
class Position:
    files: int = 0
    """How many have been taken."""
    newest_ns: int | None = 0
    """Modification time; None: not known."""
    seen: Hashes = field(default_factory=_no_hashes)
    """Sorted; those of files that are gone too."""
    gone: Hashes = field(default_factory=_no_hashes)
    since_s: tuple[int, ...] = ()

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(
            _Stored(self.files, self.newest_ns or 0, _packed(self.seen), _packed(self.gone), self.since_s)
        )


def decoded_position(data: bytes | None, where: str) -> Position:
    """Raises ConfigError when it is none of this source's."""
    if data is None:
        return Position()
    try:
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except msgspec.DecodeError:
        before = decoded(data, _StoredBefore, where)
        pairs = np.frombuffer(before.seen[: len(before.seen) // 16 * 16], ">u8").astype(np.uint64)
        return Position(before.files, None, np.sort(pairs[::2]))
    return Position(stored.files, stored.newest_ns, _unpacked(stored.seen), _unpacked(stored.gone), stored.since_s)


def hash_of(path: str) -> int:
    return xxhash.xxh3_128_intdigest(path.encode()) >> 64


@dataclass(frozen=True)
class Listing:
    """What there is now: files that have a size."""

    infos: Sequence[Any]
    """pyarrow's."""
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

    def sorted(self) -> Listing:
        """By hash."""
        order = np.argsort(self.hashes)
        infos = [self.infos[at] for at in order.tolist()]
        return Listing(infos, self.hashes[order], self.sizes[order], self.modified_ns[order])


class Watch:
    """The driver's memory of a directory: how its files were when it looked last.

    `appear_whole`: a file has all its bytes from the first moment on, as in an object store.
    """

    def __init__(self, appear_whole: bool) -> None:
        self._appear_whole = appear_whole
        self._last = Listing((), _no_hashes(), np.empty(0, np.int64), np.empty(0, np.int64))
        """Sorted; with those that are gone and remembered; without infos."""
        self._same_since_s: npt.NDArray[np.float64] = np.empty(0)
        """Of those: when each was first seen as it is, by the monotonic clock."""

    def look(self, now: Listing, known: Position, *, now_ns: int, now_s: float) -> tuple[list[Any], Position]:
        """Files to be read now, in order of modification time, and the position after them.

        Raises StorageError when a file that was taken has changed since.
        """
        now = now.sorted()
        since_s = self._compare(now, now_s)
        is_known = _contains(known.seen, now.hashes)
        self._check(now, is_known, known)
        self._remember(now, since_s, known)
        is_taken = ~is_known & self._rests(now, since_s, now_ns, now_s)
        taken = sorted(
            (now.infos[at] for at in np.flatnonzero(is_taken).tolist()), key=lambda info: (info.mtime_ns, info.path)
        )
        listed = now.hashes[is_known]
        seen, gone, gone_since_s = _forget(known, listed, int(now_ns / 1e9))
        counted = is_known | is_taken
        newest_ns = max(known.newest_ns or 0, int(now.modified_ns[counted].max()) if counted.any() else 0)
        seen = np.union1d(seen, now.hashes[is_taken])
        return taken, Position(known.files + len(taken), newest_ns, seen, gone, gone_since_s)

    def _compare(self, now: Listing, now_s: float) -> npt.NDArray[np.float64]:
        """Since when each file is as it is."""
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

    def _check(self, now: Listing, is_known: npt.NDArray[np.bool_], known: Position) -> None:
        """Raises for a file that was taken and is not what it was then."""
        changed = np.zeros(len(is_known), bool)
        if known.newest_ns is not None:
            changed = is_known & (now.modified_ns > known.newest_ns)
        if len(self._last.hashes):
            at = np.minimum(np.searchsorted(self._last.hashes, now.hashes), len(self._last.hashes) - 1)
            differs = (self._last.sizes[at] != now.sizes) | (self._last.modified_ns[at] != now.modified_ns)
            changed |= is_known & (self._last.hashes[at] == now.hashes) & differs
        if changed.any():
            path = now.infos[int(np.flatnonzero(changed)[0])].path
            raise StorageError(
                f"{path}: was taken to be read, and has been written again since; a file must not change any more. Move "
                "it away, and put what is new in it there under another name"
            )

    def _rests(
        self, now: Listing, since_s: npt.NDArray[np.float64], now_ns: int, now_s: float
    ) -> npt.NDArray[np.bool_]:
        """Whether nobody seems to write to it any more. Two clocks: that of the files' system may be wrong."""
        if self._appear_whole:
            return np.ones(len(now.hashes), bool)
        return (now_ns - now.modified_ns >= REST_S * 1e9) | (now_s - since_s >= REST_S)


def _forget(known: Position, listed: Hashes, now_s: int) -> tuple[Hashes, Hashes, tuple[int, ...]]:
    """What is remembered, what of it is gone, and since when. `listed`: what is known and there."""
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
    """Sorted hashes as their differences, byte by byte of all of them: the high ones are zeros."""
    steps = np.diff(hashes, prepend=np.uint64(0)).astype("<u8")
    return zlib.compress(steps.view(np.uint8).reshape(-1, _WIDTH).T.tobytes(), 1)


def _unpacked(data: bytes) -> Hashes:
    planes = np.frombuffer(zlib.decompress(data) if data else b"", np.uint8).reshape(_WIDTH, -1)
    steps = np.ascontiguousarray(planes.T).view("<u8").ravel()
    return np.cumsum(steps, dtype=np.uint64)
