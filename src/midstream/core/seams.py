"""The interfaces through which protocol code reaches the outside world.

Everything that decides (tasks, gates, barrier handlers, coordinator) is confined to one loop thread and sees time,
threads, peers, files and randomness through these alone. Production binds them in `midstream.runtime`, the simulator in
`midstream.sim`.
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
        """The wall clock, in milliseconds since the epoch, for processing time and for display."""
        ...

    def monotonic_s(self) -> float:
        """A clock that never goes back, for timeouts and budgets."""
        ...

    def own_core_s(self) -> float:
        """A clock that slows down while other threads keep the loop's thread off its core; it measures how long work
        takes.

        Loop thread only.
        """
        ...

    def stopwatch_s(self) -> float:
        """Like `monotonic_s`, for figures that are displayed: nothing may be decided by it.

        In the simulator, reading one of the other clocks takes simulated time, since no time passes between two steps
        otherwise.
        """
        ...

    @property
    def core_share(self) -> float:
        """The speed of `own_core_s`: 1 like the others, less while the loop's thread is kept off its core."""
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
        """Run `work` (pure I/O: bytes in, bytes out) on the pool; its outcome, success or failure, arrives as a mail."""
        ...


class Storage(Protocol):
    """A directory tree of immutable files. It blocks: call it only inside `Executor.submit`.

    Paths are relative, with `/`; a path that would leave the root raises StorageError.
    """

    def read(self, path: str) -> bytes: ...

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset`; fewer where the file ends."""
        ...

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file. When this returns, the file is complete, durable, and under its final name.

        `parts` are consumed one after the other, so they need not all be in memory at once.
        """
        ...

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        """Create a small file unless one of that name exists; False if one does.

        With `durable` False the file need not outlive a power failure, for example a claim that is of no use after one.
        """
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents. A path that does not exist is not an error."""
        ...

    def list(self, path: str) -> list[str]:
        """List the names (not paths) of files and directories right under `path`, sorted; [] if the directory does not
        exist.
        """
        ...

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        """Delete unfinished files that killed writers left right under `path`, if their names are `unwanted`."""
        ...

    def exists(self, path: str) -> bool: ...


class Signal(Protocol):
    """A flag that can be set from any thread and is never cleared. `threading.Event` is one."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block for at most `timeout` seconds until the signal is set, and return whether it is. I/O pool only."""
        ...


class Ids(Protocol):
    def new_id(self) -> str:
        """Return a name of 16 hex digits that no other call, here or elsewhere, returns."""
        ...


class LinkEnd(Protocol):
    """The local end of a data connection to one peer slot, for one attempt. Implemented by `exchange`."""

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        """Return whole frames to send now, about `bytes_max` bytes in all; [] when there is nothing to send.

        Each list item is a piece of the byte stream; the pieces together are whole frames, each a little-endian uint32
        length followed by that many bytes.
        """
        ...

    def receive(self, frame: memoryview) -> None:
        """Process one whole frame, without its length prefix. The view must not be kept after the call."""
        ...

    def lost(self, reason: str) -> None:
        """Learn that the connection is gone for good. Called at most once, never after `close`."""
        ...


class DataLink(Protocol):
    """The transport's side of a data connection."""

    def wake(self) -> None:
        """Announce that `pull` has something to send; it is called from the loop, not from inside this call."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Data connections between slots: authenticated, fenced by attempt, FIFO, one per pair of slots."""

    def open(self, slot: int, host: str, port: int, attempt: int, end: LinkEnd) -> DataLink:
        """Open a connection to that peer; both sides call this, and the one with the lower slot id dials.

        Returns at once; frames flow after the handshake. If the handshake does not complete in time, `end.lost` is
        called with the reason.
        """
        ...
