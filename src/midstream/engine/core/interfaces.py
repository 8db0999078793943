"""The interfaces through which protocol code reaches the outside world.

Everything that decides (tasks, gates, barrier handlers, coordinator) is confined to one loop thread and reaches time,
threads, peers, files and randomness through these alone. Production binds them in `midstream.runtime`, the simulator in
`midstream.simulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Generic, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Mail = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The outcome of work that succeeded: `value` is what it returned.

    For example:

        def uploaded(self, outcome):
            if isinstance(outcome, Done):
                self.committables.append(outcome.value)
    """

    value: T


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of work that raised `error`.

    For example:

        def uploaded(self, outcome):
            if isinstance(outcome, Failed):
                self.context.fail(outcome.error)
    """

    error: BaseException


class Clock(Protocol):
    def now_ms(self) -> int:
        """The wall clock, in milliseconds since the epoch, for processing time and for display."""
        ...

    def monotonic_s(self) -> float:
        """A clock that never moves back, for timeouts and budgets."""
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

    def processor_s(self) -> float:
        """The processor time of the calling thread, which may be any thread; for figures that are displayed."""
        ...

    @property
    def core_share(self) -> float:
        """The speed of `own_core_s`: 1 like the others, less while the loop's thread is kept off its core."""
        ...


class Timer(Protocol):
    """A call that is due later.

    For example:

        timer = self.executor.call_later(1.0, self.flush)
    """

    def cancel(self) -> None:
        """Prevent the call. Without effect if it was made.

        For example:

            self.timer.cancel()
        """
        ...


class Executor(Protocol):
    """The loop thread's queue of mails, and the pool that does pure I/O for it; `context.executor` of a writer is one.

    For example:

        def write(self, batch):
            self.executor.submit(lambda: self.upload(batch), self.uploaded)
    """

    def post(self, mail: Mail) -> None:
        """Run a function on the loop thread, after what was already posted. Callable from any thread.

        `mail`: a function without parameters.

            self.executor.post(self.wake)
        """
        ...

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        """Run a function on the loop thread after a time. Loop thread only.

        `delay_s`: the time, in seconds.
        `mail`: a function without parameters.

        Returns a timer, whose `cancel()` prevents the call.

            timer = self.executor.call_later(1.0, self.flush)
        """
        ...

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        """Run work on the pool.

        `work`: pure I/O, bytes in and bytes out; a function without parameters.
        `done`: called on the loop thread with `Done(value)`, or `Failed(error)` for what `work` raised.

            self.executor.submit(lambda: self.upload(data), self.uploaded)
        """
        ...


class WallClockExecutor(Executor, Protocol):
    """The executor of a process that also calls at times of the wall clock, which may be set, or jump after a suspend."""

    def call_at(self, time_ms: int, mail: Mail) -> Timer:
        """Run a function on the loop thread once the wall clock has reached `time_ms`. Loop thread only.

        If the wall clock jumps forward past it, the call follows within `WALL_CLOCK_CHECK_S`; if the clock is set back,
        the call may come before that time, or wait until it is reached again.
        """
        ...


Call: TypeAlias = tuple[int, Callable[[], Any]]
"""A call outside of the loop: its number, and what is called. It returns the value, or a coroutine that does."""
Outcomes: TypeAlias = Sequence[tuple[int, Done[Any] | Failed]]
"""The outcomes of calls, by number."""


class FunctionCalls(Protocol):
    """Calls of one user's function outside of the loop, concurrently. Loop thread only."""

    def start(self, calls: Sequence[Call]) -> None:
        """Begin these calls."""
        ...

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancel calls where that is possible: a coroutine, or a call that has not begun. An outcome may still come."""
        ...

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Cancel all calls; no outcome comes any more. Then await the coroutine that `last` returns, if there is one, for some seconds."""
        ...


class OpenCalls(Protocol):
    """Opens the calls of one function."""

    def __call__(self, of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]) -> FunctionCalls:
        """`of_coroutines`: the calls return coroutines, which all run on one thread; otherwise each call takes one of
        `threads_max` threads. `completed`: takes the outcomes of some calls at a time, on the loop thread.
        """
        ...


WALL_CLOCK_CHECK_S: Final = 1.0
"""How soon a jump of the wall clock is noticed."""


class Storage(Protocol):
    """A directory tree of immutable files: the job's checkpoint storage. It blocks: call it only on the I/O pool.

    Paths are relative, with `/`; a path that would leave the root raises StorageError.

        def commit(self, checkpoint_id, committables):
            if self.storage.create(f"mine/{checkpoint_id}", b""):
                self.send(committables)
    """

    def read(self, path: str) -> bytes:
        """Return the contents of a file.

        `path`: the file; StorageError is raised if it does not exist.

            data = self.storage.read("mine/plan")
        """
        ...

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of a file.

        `path`: the file.
        `offset`, `length`: at most `length` bytes from `offset`; fewer where the file ends.

            header = self.storage.read_range("mine/plan", 0, 8)
        """
        ...

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file. When this returns, the file is complete, durable, and under its final name.

        `path`: the file.
        `parts`: its bytes; consumed one after the other, so they need not all be in memory together.

            self.storage.write("mine/plan", [header, body])
        """
        ...

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        """Create a small file unless one of that name exists.

        `path`: the file.
        `data`: its bytes.
        `durable`: if False, the file need not outlive a power failure, for example a claim that is of no use after one.

        Returns whether it was created; False if one exists.

            is_first = self.storage.create("mine/claim", b"")
        """
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents.

        `path`: one that does not exist is not an error.

            self.storage.delete("mine")
        """
        ...

    def list(self, path: str) -> list[str]:
        """Return the names (not paths) of files and directories right under a directory, sorted.

        `path`: the directory; the list is empty if it does not exist.

            names = self.storage.list("mine")
        """
        ...

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        """Delete unfinished files that killed writers left right under a directory.

        `path`: the directory.
        `unwanted`: takes a file's name, and returns whether it must be deleted.

            self.storage.sweep("mine", lambda name: name.startswith(self.job_id))
        """
        ...

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory.

        `path`: its location.

            is_planned = self.storage.exists("mine/plan")
        """
        ...


def no_limit() -> None:
    """Return that there is no limit."""
    return


class LocalDisk(Protocol):
    """A disk of the slot's machine, for what must not outlive the process. It blocks: call it only on the I/O pool."""

    @property
    def place(self) -> str:
        """The directory, as messages name it."""
        ...

    @property
    def file_bytes_min(self) -> int:
        """The size from which something is worth a file of its own."""
        ...

    def map(self, write: Callable[[IO[bytes]], None]) -> memoryview:
        """Return the bytes of a new file, mapped into memory. The file is gone as soon as nothing refers to them.

        `write`: writes the file. Raises OSError if the disk is full or fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class SlotAvailability:
    """Why no slots have come. At most one of these is set.

    For example:

        availability = SlotAvailability(starting="executors are starting (4 cores launched, 0 registered)")
    """

    gone: str = ""
    """Why none will come any more, so that only another start of the program can have slots."""
    starting: str = ""
    """What is starting, and will bring slots when it has started."""


class Signal(Protocol):
    """A flag that can be set from any thread and is never cleared. `threading.Event` is one.

    For example:

        while not self.server_has_answered():
            if self.stopped.wait(1.0):
                raise StorageError("the commit is no longer needed")
    """

    def set(self) -> None:
        """Set the flag.

        For example:

            stopped.set()
        """
        ...

    def is_set(self) -> bool:
        """Return whether the flag is set.

        For example:

            if self.stopped.is_set():
                raise StorageError("the commit is no longer needed")
        """
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the flag is set. I/O pool only.

        `timeout`: how long at most, in seconds; None for no limit.

        Returns whether it is set.

            if self.stopped.wait(1.0):
                raise StorageError("the commit is no longer needed")
        """
        ...


class Ids(Protocol):
    def new_id(self) -> str:
        """Return a name of 16 hex digits that no other call, here or elsewhere, returns."""
        ...


class ConnectionEnd(Protocol):
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
        """Handle the permanent loss of the connection. Called at most once, never after `close`."""
        ...


class DataConnection(Protocol):
    """The transport's side of a data connection."""

    def wake(self) -> None:
        """Announce that `pull` has something to send; it is called from the loop, not from inside this call."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Data connections between slots: authenticated, fenced by attempt, FIFO, one per pair of slots."""

    def open(self, slot: int, host: str, port: int, attempt: int, end: ConnectionEnd) -> DataConnection:
        """Open a connection to that peer; both sides call this, and the one with the lower slot id dials.

        Returns immediately; frames flow after the handshake. If the handshake does not complete in time, `end.lost` is
        called with the reason.
        """
        ...
