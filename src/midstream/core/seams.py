"""The interfaces through which protocol code meets the world.

Everything that decides (tasks, gates, barrier handlers, coordinator) is confined to one loop
thread and sees time, threads, peers, files and randomness through these alone. Production binds
them in `midstream.runtime`, the simulator in `midstream.sim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
Mail = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch. For processing time and for people."""
        ...

    def monotonic_s(self) -> float:
        """Never goes back. For timeouts and budgets."""
        ...

    def own_core_s(self) -> float:
        """Likewise, but as slow as the loop's thread is where others keep it off its core. For how long work takes.

        Loop thread only.
        """
        ...

    def stopwatch_s(self) -> float:
        """Like `monotonic_s`, for figures that people see: nothing may be decided by it.

        In the simulator a look at the other clocks takes time, as there is none between two steps otherwise.
        """
        ...

    @property
    def core_share(self) -> float:
        """How fast `own_core_s` goes: 1 like the others, less where the loop's thread is kept off its core."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Executor(Protocol):
    """The loop thread's queue of mails, and the pool that does pure I/O for it."""

    def post(self, mail: Mail) -> None:
        """Run `mail` on the loop thread, after the mails already posted. Callable from any thread."""
        ...

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        """Run `mail` on the loop thread once `delay_s` has passed. Loop thread only."""
        ...

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        """Run `work` (pure I/O: bytes in, bytes out) on the pool; its outcome, good or bad, is a mail."""
        ...


class Storage(Protocol):
    """A directory tree of immutable files. Blocking: call it inside `Executor.submit` only.

    Paths are relative, with `/`; one that would leave the root raises StorageError.
    """

    def read(self, path: str) -> bytes: ...

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer where the file ends."""
        ...

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file; it is durable, under its final name and whole, when this returns.

        `parts` are taken one after the other: what makes them need not have all of them at once.
        """
        ...

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        """Write a small file only if none of that name exists; False if one does.

        `durable` False: it need not outlive a power failure, as a claim that is of no use after one.
        """
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with what is in it. Deleting nothing is fine."""
        ...

    def list(self, path: str) -> list[str]:
        """Names (not paths) of files and directories right under `path`, sorted; [] if there is none."""
        ...

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        """Delete what writers that were killed have left unfinished right under `path`, of names that are `unwanted`."""
        ...

    def exists(self, path: str) -> bool: ...


class Signal(Protocol):
    """Set once, and never taken back; from any thread. `threading.Event` is one."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block for at most `timeout` seconds until it is set; whether it is. I/O pool only."""
        ...


class Ids(Protocol):
    def new_id(self) -> str:
        """A name that no other call, here or elsewhere, is given: 16 hex digits."""
        ...


class LinkEnd(Protocol):
    """Our side of a data connection to one peer slot, for one attempt. Implemented by `exchange`."""

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        """Whole frames to send now, about `bytes_max` bytes in all; [] when there is nothing to send.

        Each list item is a piece of the byte stream; the pieces together are whole frames, each
        a little-endian uint32 length, then that many bytes.
        """
        ...

    def receive(self, frame: memoryview) -> None:
        """One whole frame, without its length prefix. Must not be kept after the call."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is gone and will not come back. Called at most once, never after `close`."""
        ...


class DataLink(Protocol):
    """The transport's side of a data connection."""

    def wake(self) -> None:
        """`pull` has something to give; it will be called from the loop, not from inside this call."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Data connections between slots: authenticated, fenced by attempt, FIFO, one per pair of slots."""

    def open(self, slot: int, host: str, port: int, attempt: int, end: LinkEnd) -> DataLink:
        """A connection to that peer; both sides call this, and the one with the lower slot id dials.

        Returns at once; frames flow when the handshake is through. If it does not come about in
        time, `end.lost` says why.
        """
        ...
