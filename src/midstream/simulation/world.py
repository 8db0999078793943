"""One seeded world: virtual time, chance, and processes that are only queues of steps.

A step is one thing that happens to one process: a mail, a timer, an arrival, an I/O completion.
Every step is scheduled with a delay drawn from the world's random source, and steps happen in the
order of their times; this is how a seed chooses the order of everything. Only two orders are
preserved: mails of one process run as posted, messages of one connection arrive as sent.

A run is a pure function of the seed and the parameters: nothing here depends on the hash of a
string, an object's address, a clock, or the environment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any, Final, TypeVar

from midstream.engine.core.interfaces import Done, Failed, Mail
from midstream.simulation.trace import Kind, Trace

T = TypeVar("T")

EPOCH_MS: Final = 1_700_000_000_000
NESTING_MAX: Final = 3
WAIT_S_MAX: Final = 600.0
"""The longest wait for a signal if none is given; a wait that takes longer hangs."""
_MASK: Final = (1 << 61) - 1
_MAIL: Final = Kind.MAIL  # looking a member up in its class takes ten times as long
_TIMER: Final = Kind.TIMER
_IO: Final = Kind.IO
_IO_DONE: Final = Kind.IO_DONE


class Killed(BaseException):
    """Ends the I/O of a process that has just crashed. Code under test must not catch it."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """The longest durations, in µs. Each actual duration is drawn, skewed towards the short end."""

    mail_us: int = 40
    control_us: int = 400
    data_us: int = 200
    io_us: int = 2_000
    clock_tick_us: int = 0
    """The longest time that reading the monotonic clock takes: work seems slow, and is cut into more slices."""
    interleave: float = 0.0
    """The probability that other processes run between two file operations of one piece of I/O."""


class Bug(Exception):
    """A rule was broken, which ends the run."""


class World:
    """Time, chance, and the queue of what happens next."""

    def __init__(self, seed: int, tempo: Tempo = Tempo(), *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.tempo = tempo
        self._random = Random(seed)
        self.chance: Callable[[], float] = self._random.random
        """Draws a number in [0, 1); the only source of randomness."""
        self.now_us = 0
        self.epoch_ms = EPOCH_MS
        """The time on wall clocks when the world begins, apart from their skew."""
        self.step_number = 0
        self.trace = Trace() if keep_trace else None
        self.hash = seed & _MASK
        self.bugs: list[str] = []
        self.processes: list[Process] = []
        self._queue: list[tuple[int, int, Process | None, Kind, Callable[[], None], Any, int]] = []
        self._scheduled = 0
        self._current_io: _Io | None = None
        self._nesting = 0
        self.is_held_up = False
        """Whether an operation takes its time (`hang`) while others that began before it cannot continue, because they are
        beneath it on the stack."""
        self._until: Callable[[], bool] = lambda: False
        """The condition that ends the current `run`; it is checked between any two steps, even in the middle of I/O."""
        self._acting = ""
        """The name of the process of the current step, for the trace."""
        self._ids = 0

    # ---- chance

    def below(self, limit: int) -> int:
        """Draw a whole number in [0, limit)."""
        return int(self.chance() * limit)

    def delay(self, max_us: int) -> int:
        """Draw a delay, mostly short, sometimes as long as `max_us`."""
        x = self.chance()
        return int(max_us * x * x * x)

    def new_id(self) -> str:
        self._ids += 1
        return f"{(self._ids * 0x9E3779B97F4A7C15) & (2**64 - 1):016x}"

    # ---- what happens next

    def schedule(
        self, delay_us: int, process: Process | None, kind: Kind, call: Callable[[], None], detail: Any = None
    ) -> int:
        """Run `call` as a step of `process`, if that still lives, after `delay_us`; return the time of the step."""
        at_us = self.now_us + delay_us
        self._scheduled += 1
        heappush(self._queue, (at_us, self._scheduled, process, kind, call, detail, self.step_number))
        return at_us

    def step(self, until_us: float = inf) -> bool:
        """Run the next step; return False if none is left that is due by `until_us`."""
        queue = self._queue
        while queue and queue[0][0] <= until_us:
            entry = heappop(queue)
            at_us, number, process, kind, call, detail, cause = entry
            if process is not None:
                if not process.alive:
                    continue
                if process.paused:
                    process.backlog.append(entry)
                    continue
            if kind is _TIMER and call.mail is None:  # type: ignore[attr-defined]
                continue
            self.now_us = max(self.now_us, at_us)
            self.step_number += 1
            self.hash = (self.hash * 1_000_003 + number * 64 + kind + self.now_us) & _MASK
            if self.trace is not None:
                name = process.name if process is not None else "world"
                self.trace.add(self.step_number, cause, self.now_us, name, kind, call if detail is None else detail)
                self._acting = name
            if process is None:
                call()
                return True
            try:
                call()
                if process.after_step is not None and process.alive:
                    process.after_step()
            except Exception as error:  # noqa: BLE001 - the border to the code under test
                self.report_escape(process, error)
            return True
        return False

    def run(self, until: Callable[[], bool], steps_max: int) -> bool:
        """Run steps until `until()` is true; return False if `steps_max` steps, a bug or a lack of steps ended the run
        before.
        """
        step = self.step
        self._until = until
        while not until():
            if self.step_number >= steps_max or self.bugs or not step():
                return until()
        return True

    def requeue(self, process: Process) -> None:
        """Queue the steps that came due while `process` was stopped; they keep their order."""
        for entry in process.backlog:
            heappush(self._queue, entry)
        process.backlog.clear()

    def waiting(self) -> list[str]:
        """Describe the steps that are still scheduled, for a report."""
        lines = []
        for at_us, _, process, kind, call, detail, cause in sorted(self._queue, key=lambda entry: entry[:2]):
            if process is not None and not process.alive:
                continue
            if kind is Kind.TIMER and call.mail is None:  # type: ignore[attr-defined]
                continue
            name = process.name if process is not None else "world"
            entry = (0, cause, at_us, name, kind, call if detail is None else detail)
            lines.append(entry)
        from midstream.simulation.trace import format_entry

        return [format_entry(entry)[8:] for entry in lines]

    # ---- broken rules

    def bug(self, text: str) -> None:
        """Note that a rule was broken; the run ends after this step."""
        self.bugs.append(text)
        self.note("BUG: " + text)

    def report_escape(self, process: Process, error: Exception) -> None:
        import traceback

        frames = "".join(traceback.format_exception(error))
        self.bug(f"{process.name}: {type(error).__name__} escaped a step: {error}\n{frames}")

    def note(self, detail: Any) -> None:
        """Put a line into the trace that belongs to the current step."""
        if self.trace is not None:
            self.trace.add(self.step_number, self.step_number, self.now_us, self._acting, Kind.NOTE, detail)

    # ---- inside I/O

    def io_point(self) -> None:
        """Mark a point between two file operations, where the process may die and other processes may run.

        Everything that protocol code may do only on its I/O pool must call it.
        """
        io = self._current_io
        if io is None:
            self.bug("blocking I/O on a loop thread")
            raise Bug(self.bugs[-1])
        if io.operations_left is not None:
            io.operations_left -= 1
            if io.operations_left < 0:
                raise Killed
        if (
            self.tempo.interleave
            and io.operations_left is None
            and self._nesting < NESTING_MAX
            and self.chance() < self.tempo.interleave
        ):
            self._let_others_on(io)

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """Let a checker read files without taking time and without being struck by faults."""
        before, self._current_io = self._current_io, _INSPECTION
        interleave, self._nesting = self._nesting, NESTING_MAX
        try:
            yield
        finally:
            self._current_io = before
            self._nesting = interleave

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let no other process run between the file operations of what holds a lock; the process may die in them."""
        before, self._nesting = self._nesting, NESTING_MAX
        try:
            yield
        finally:
            self._nesting = before

    @property
    def is_inspecting(self) -> bool:
        """Whether a checker is reading."""
        return self._current_io is _INSPECTION

    @property
    def writer(self) -> Process | None:
        """The process whose I/O is under way; None if there is none."""
        return None if self._current_io is None else self._current_io.process

    @property
    def torn(self) -> bool:
        """Whether the process dies in the current operation, which is its last."""
        io = self._current_io
        return io is not None and io.operations_left == 0

    def hang(self, for_us: int) -> None:
        """Let the current operation take this long while all other processes run.

        It does nothing if too many operations are already nested.
        """
        io = self._current_io
        if io is None or io.operations_left is not None or self._nesting >= NESTING_MAX:
            return
        self._current_io = None
        held_up, self.is_held_up = self.is_held_up, self._nesting > 0
        self._nesting += 1
        until_us = self.now_us + for_us
        try:
            while io.process.alive and not self.bugs and not self._until() and self.step(until_us):
                pass
        finally:
            self._nesting -= 1
            self.is_held_up = held_up
            self._current_io = io
        if not io.process.alive:
            raise Killed

    def _let_others_on(self, io: _Io) -> None:
        self._current_io = None
        self._nesting += 1
        try:
            until_us = self.now_us + io.process.io_us  # short, so that no process misses a heartbeat because of it
            for _ in range(1 + self.below(30)):
                if self.bugs or self._until() or not self.step(until_us):
                    break
            while io.process.paused and io.process.alive and not self.bugs and not self._until() and self.step():
                pass
        finally:
            self._nesting -= 1
            self._current_io = io
        if not io.process.alive:
            raise Killed


class SimTimer:
    __slots__ = ("mail",)

    def __init__(self, mail: Mail) -> None:
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None

    def __call__(self) -> None:
        mail, self.mail = self.mail, None
        assert mail is not None
        mail()


class _Io:
    """One piece of work on a process's I/O pool."""

    __slots__ = ("done", "operations_left", "outcome", "process", "work")

    def __init__(self, process: Process, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.process = process
        self.work = work
        self.done = done
        self.outcome: Done[Any] | Failed | None = None
        self.operations_left: int | None = None
        """The number of file operations that still succeed, if the process dies in the middle; otherwise None."""

    def start(self) -> None:
        process = self.process
        world = process.world
        del process.ios[self]
        before, world._current_io = world._current_io, self
        try:
            self.outcome = Done(self.work())
        except Killed:
            return
        except Exception as error:  # noqa: BLE001 - a failure is an outcome, too
            self.outcome = Failed(error)
        finally:
            world._current_io = before
        if process.alive:
            world.schedule(world.delay(process.io_us), process, _IO_DONE, self.finish, self.done)

    def finish(self) -> None:
        assert self.outcome is not None
        self.done(self.outcome)

    def die_within(self, operations: int) -> None:
        self.operations_left = operations
        world = self.process.world
        before, world._current_io = world._current_io, self
        try:
            self.work()
        except (Exception, Killed):  # noqa: BLE001 - the process is dead, so the outcome has no recipient
            return
        finally:
            world._current_io = before


class _Inspection(_Io):
    """Stands for a checker's reading, which is not I/O of the simulated world."""

    def __init__(self) -> None:
        self.operations_left = None


_INSPECTION: Final = _Inspection()


class Process:
    """Clock, Executor and Ids (engine.core.interfaces) of one simulated process: a loop thread and an I/O pool."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.backlog: list[Any] = []
        self.ios: dict[_Io, None] = {}
        """The I/O that was submitted and has not begun."""
        self.on_death: list[Callable[[], None]] = []
        self.after_step: Callable[[], None] | None = None
        """Called after each step, to check invariants."""
        self.mail_us = max(1, world.tempo.mail_us)
        self.io_us = max(1, world.tempo.io_us)
        self.skew_ms = world.below(400)
        """The offset of this process's wall clock, since real ones differ too."""
        self._clock_tick_us = world.tempo.clock_tick_us
        self._mails: deque[tuple[Mail, int]] = deque()
        self._turn_is_due = False
        world.processes.append(self)

    # ---- Clock

    def now_ms(self) -> int:
        return self.world.epoch_ms + self.skew_ms + self.world.now_us // 1000

    def monotonic_s(self) -> float:
        world = self.world
        if self._clock_tick_us:
            world.now_us += world.delay(self._clock_tick_us)
        return world.now_us / 1e6

    def stopwatch_s(self) -> float:
        return self.world.now_us / 1e6

    own_core_s = monotonic_s
    processor_s = stopwatch_s
    core_share = 1.0

    # ---- Ids

    def new_id(self) -> str:
        return self.world.new_id()

    # ---- Executor

    def post(self, mail: Mail) -> None:
        world = self.world
        self._mails.append((mail, world.step_number))
        if not self._turn_is_due:
            self._turn_is_due = True
            world.schedule(1 + int(world.chance() * self.mail_us), self, _MAIL, self._turn, mail)

    def call_later(self, delay_s: float, mail: Mail) -> SimTimer:
        timer = SimTimer(mail)
        late_us = self.world.delay(self.mail_us * 4)
        self.world.schedule(int(delay_s * 1e6) + late_us, self, _TIMER, timer, mail)
        return timer

    def call_at(self, time_ms: int, mail: Mail) -> SimTimer:
        return self.call_later(max(0.0, (time_ms - self.now_ms()) / 1000), mail)

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        io = _Io(self, work, done)
        self.ios[io] = None
        world = self.world
        world.schedule(world.delay(self.io_us), self, _IO, io.start, work)

    def _turn(self) -> None:
        mail, _ = self._mails.popleft()
        if self._mails:
            world = self.world
            following, cause = self._mails[0]
            at_us = world.now_us + 1 + int(world.chance() * self.mail_us)
            world._scheduled += 1
            heappush(world._queue, (at_us, world._scheduled, self, _MAIL, self._turn, following, cause))
        else:
            self._turn_is_due = False
        mail()

    # ---- faults and the end

    def crash(self) -> None:
        """Lose memory, queues and timers. Submitted I/O may still make some progress, and end torn."""
        world = self.world
        self._die(lambda: world.below(6) if world.chance() < 0.5 else None)

    def end(self) -> None:
        """End in good order: submitted I/O still runs to its end, but its outcome is dropped."""
        if self.alive:
            self._die(lambda: 1_000_000)
            self.world.note(f"{self.name} has ended")

    def _die(self, operations_left: Callable[[], int | None]) -> None:
        """End, if it lives. `operations_left`: how many operations a piece of I/O still makes; None if it never begins."""
        if not self.alive:
            return
        ios = list(self.ios)
        self.ios.clear()
        self.alive = False
        for io in ios:
            operations = operations_left()
            if operations is not None:
                io.die_within(operations)
        self._mails.clear()
        self.backlog.clear()
        for callback in self.on_death:
            callback()

    def pause(self) -> None:
        """Stop the process, like SIGSTOP: none of its steps run, and its connections remain."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.world.requeue(self)


class SimSignal:
    """A Signal (engine.core.interfaces); while a process waits for it, other processes run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._world.hang(int((WAIT_S_MAX if timeout is None else min(timeout, WAIT_S_MAX)) * 1e6))
        return self._is_set
