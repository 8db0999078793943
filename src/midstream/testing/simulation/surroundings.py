"""The world that users' functions see in a simulated run: a clock, random numbers, hash(), and their effects on it.

During a run `time.time()` and its like, `datetime.now()`, the module `random`, `numpy.random` and `hash()` of strings
return what the run determines; files that are opened for writing, programs that are started and connections that are
made are counted. Only the thread of the run is affected; afterwards everything is as before.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from cloudpickle.cloudpickle import _function_setstate

from midstream.engine.core.site_packages import is_installed
from midstream.simulation.world import World
from midstream.testing.simulation.job_scenario import Outer

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_EFFECTS: Final = {
    "socket.connect": "connects to",
    "subprocess.Popen": "starts",
    "os.remove": "deletes",
    "os.rename": "renames",
    "os.mkdir": "makes",
}


@dataclass(frozen=True, slots=True)
class Effect:
    """An effect of a user's function on the world."""

    what: str
    """The effect, such as "writes to out.txt"."""
    location: str
    """The file and line."""


@dataclass(slots=True)
class Surroundings:
    world: World
    outer: Outer
    effects: Counter[Effect] = field(default_factory=Counter)
    slept_s: float = 0.0
    """The time slept, which only advances the function's clocks: in production, heartbeats continue meanwhile."""
    thread: int = field(default_factory=threading.get_ident)

    def time_s(self) -> float:
        """Return seconds since the epoch."""
        self.world.now_us += 1  # no two readings of a clock are equal
        return self.world.epoch_ms / 1000 + self.slept_s + self.world.now_us / 1e6

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


_present: Surroundings | None = None
"""The surroundings of the current run in this process."""


def _ours() -> Surroundings | None:
    present = _present
    return present if present is not None and present.thread == threading.get_ident() else None


@contextmanager
def surroundings(world: World, outer: Outer) -> Iterator[Surroundings]:
    """Replace the surroundings for the duration of a run."""
    global _present
    _listen()
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(outer.random)
    np.random.seed(outer.random % (1 << 32))
    _present = found = Surroundings(world, outer)
    localtime = time.localtime

    def local(ours: Surroundings) -> time.struct_time:
        return localtime(ours.time_s())

    try:
        with (
            patch.object(time, "time", _clock(time.time, lambda s: s.time_s())),
            patch.object(time, "time_ns", _clock(time.time_ns, lambda s: int(s.time_s() * 1e9))),
            patch.object(time, "monotonic", _clock(time.monotonic, lambda s: s.time_s())),
            patch.object(time, "monotonic_ns", _clock(time.monotonic_ns, lambda s: int(s.time_s() * 1e9))),
            patch.object(time, "perf_counter", _clock(time.perf_counter, lambda s: s.time_s())),
            patch.object(time, "perf_counter_ns", _clock(time.perf_counter_ns, lambda s: int(s.time_s() * 1e9))),
            patch.object(time, "localtime", _present_by_default(time.localtime, 0, Surroundings.time_s)),
            patch.object(time, "gmtime", _present_by_default(time.gmtime, 0, Surroundings.time_s)),
            patch.object(time, "ctime", _present_by_default(time.ctime, 0, Surroundings.time_s)),
            patch.object(time, "asctime", _present_by_default(time.asctime, 0, local)),
            patch.object(time, "strftime", _present_by_default(time.strftime, 1, local)),
            patch.object(time, "sleep", _sleep(time.sleep)),
        ):
            yield found
    finally:
        _present = None
        random.setstate(before)
        np.random.set_state(numpy_before)


def _clock(real: Callable[[], Any], simulated: Callable[[Surroundings], Any]) -> Callable[[], Any]:
    def clock() -> Any:
        ours = _ours()
        return real() if ours is None else simulated(ours)

    return clock


def _present_by_default(
    real: Callable[..., Any], position: int, now: Callable[[Surroundings], float | time.struct_time]
) -> Callable[..., Any]:
    """Wrap a function of a time that means the current time if the argument at `position` is left out."""

    def function(*arguments: Any) -> Any:
        ours = _ours()
        left_out = len(arguments) == position or (len(arguments) == position + 1 and arguments[position] is None)
        return real(*arguments) if ours is None or not left_out else real(*arguments[:position], now(ours))

    return function


def _sleep(real: Callable[[float], None]) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        ours = _ours()
        if ours is None:
            real(seconds)
        else:
            ours.sleep(seconds)

    return sleep


# ---- datetime and hash, in the variables of functions that are shipped


class _Like(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class SimulatedDatetime(datetime, metaclass=_Like):
    """Creates plain datetimes; only its clock differs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return datetime(*args, **kwargs)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        ours = _ours()
        if ours is None:
            return datetime.now(tz)
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=ours.time_s())
        return at.replace(tzinfo=None) if tz is None else at.astimezone(tz)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


class SimulatedDate(date, metaclass=_Like):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return date(*args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        return SimulatedDatetime.now().date()


_CLOCKS: Final = frozenset(("now", "utcnow", "today"))
_STAND_INS: Final[dict[object, tuple[str, object]]] = {
    datetime: ("the run's datetime", SimulatedDatetime),
    date: ("the run's date", SimulatedDate),
}
"""The replacements: for each item, the name of a variable that no program has, and the substitute."""
_INDEX_SHIFT: Final = 1
"""The shift of LOAD_GLOBAL's argument, whose lowest bit has another meaning since 3.11."""
_ARGUMENT_MAX: Final = 255


def by_name(item: object) -> tuple[Any, ...] | None:
    """Return how to pickle a clock, or a function of the module `random`, to which a variable refers: by name.

    Otherwise `from random import random` would be a copy of the generator, and `from time import time` could not be
    pickled while another clock replaces it.
    """
    if not isinstance(item, (BuiltinFunctionType, MethodType)):
        return None
    owner, name = item.__self__, item.__name__
    if owner is time:
        return getattr, (time, name)
    if owner is random._inst:
        return getattr, (random, name)
    if owner is np.random.mtrand._rand:
        return getattr, (np.random, name)
    if (owner is datetime or owner is date) and name in _CLOCKS:
        return getattr, (_STAND_INS[owner][1], name)
    return None


def set_function_state(function: FunctionType, state: Any) -> None:
    """Set a function's state like cloudpickle, but let the clocks and the hash() that it calls become the run's."""
    _function_setstate(function, state)
    variables = function.__globals__
    names = set(_names(function.__code__))
    if not _CLOCKS.isdisjoint(names):
        function.__code__ = _with_the_runs_clocks(function.__code__, variables)
    if "hash" in names and "hash" not in variables:
        variables["hash"] = simulated_hash


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _with_the_runs_clocks(code: CodeType, variables: dict[str, Any]) -> CodeType:
    """Return code that uses the run's clock in `datetime.now()`, and still means datetime in `type(x) is datetime`."""
    instructions = list(dis.get_instructions(code))
    made, names = bytearray(code.co_code), list(code.co_names)
    for at, instruction in enumerate(instructions):
        if instruction.opname != "LOAD_GLOBAL":
            continue
        found = variables.get(instruction.argval)
        reached = [each.argval for each in instructions[at + 1 : at + 3] if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
        is_module = isinstance(found, ModuleType) and found.__name__ == "datetime"
        if is_module and len(reached) == 2 and reached[1] in _CLOCKS:
            name, stand_in = _MODULE
        elif isinstance(found, type) and found in _STAND_INS and reached and reached[0] in _CLOCKS:
            name, stand_in = _STAND_INS[found]
        else:
            continue
        index = names.index(name) if name in names else len(names)
        argument = index << _INDEX_SHIFT | (instruction.arg or 0) & _INDEX_SHIFT
        if (
            max(argument, instruction.arg or 0) > _ARGUMENT_MAX
        ):  # no room: the name then refers to the run's object everywhere
            variables[instruction.argval] = stand_in
            continue
        if index == len(names):
            names.append(name)
        made[instruction.offset + 1] = argument
        variables[name] = stand_in
    constants = [
        _with_the_runs_clocks(each, variables) if isinstance(each, CodeType) else each for each in code.co_consts
    ]
    if len(names) == len(code.co_names) and all(one is two for one, two in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_code=bytes(made), co_names=tuple(names), co_consts=tuple(constants))


def _datetime_module(real: ModuleType) -> ModuleType:
    module = ModuleType("datetime")
    module.__dict__.update(vars(real))
    module.__dict__.update(datetime=SimulatedDatetime, date=SimulatedDate)
    return module


_MODULE: Final[tuple[str, object]] = ("the run's module datetime", _datetime_module(sys.modules["datetime"]))


def simulated_hash(item: object) -> int:
    """Return the hash of another process: it differs for strings and bytes, also in tuples and frozen sets."""
    ours = _ours()
    if ours is None or not ours.outer.hash or not _depends_on_the_process(item):
        return hash(item)
    if sys._getframe(1).f_code.co_name == "__hash__":  # the object may be in a dict already, by its real hash
        return hash(item)
    return hash((ours.outer.hash, item))


def _depends_on_the_process(item: object) -> bool:
    if isinstance(item, (tuple, frozenset)):
        return any(_depends_on_the_process(each) for each in item)
    return isinstance(item, (str, bytes, datetime, date))


# ---- effects


_is_listening = False


def _listen() -> None:
    """Install the audit hook, which cannot be removed, for the rest of the process's life."""
    global _is_listening
    if not _is_listening:
        _is_listening = True
        sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    present = _present
    if present is None or (event != "open" and event not in _EFFECTS) or _ours() is None:
        return
    if event == "open":
        path, mode, flags = arguments
        if not (isinstance(path, (str, bytes, os.PathLike)) and _is_writing(mode, flags)):
            return
        what = f"writes to {os.fsdecode(path)}"
    else:
        what = f"{_EFFECTS[event]} {arguments[1] if event == 'socket.connect' else arguments[0]}"
    location = _users_line()
    if location:
        present.effects[Effect(what, location)] += 1


def _is_writing(mode: object, flags: object) -> bool:
    if isinstance(mode, str):
        return not {"w", "a", "x", "+"}.isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & _WRITING)


def _users_line() -> str:
    """Return the file and line of the running user's function; "" if there is none, or a temporary file is being made."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.basename(file) == "tempfile.py":
            return ""
        if file.startswith(_HERE):
            return ""
        if not file.startswith("<") and not is_installed(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
