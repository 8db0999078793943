"""The state machines of the engine as coverage sees them: the methods by which events reach them, and their states.

The possible states and events are read from the code: states from enums; events from unions of messages, from the
kinds of timers and I/O, and from the methods by which one package calls another, which are found in the syntax tree of
the caller. So new states and events appear by themselves, as pairs that were never seen. If a machine runs on a
table, the table defines the possible pairs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import ModuleType
from typing import Any, Final, TypeAlias, get_args
from weakref import ReferenceType, WeakKeyDictionary, ref

from midstream.engine.checkpoint import barrier_handler
from midstream.engine.coordinator import coordinator as machine
from midstream.engine.coordinator import events as ev
from midstream.engine.coordinator import notifications
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.coordinator.effects import IoKind, TimerKind, io_kind, timer_kind
from midstream.engine.coordinator.placement import rescale as rescaling
from midstream.engine.coordinator.placement.attempt import Attempt, TaskReport
from midstream.engine.coordinator.placement.rescale import Rescaling
from midstream.engine.coordinator.requests import savepoints
from midstream.engine.coordinator.requests.savepoints import Savepoints
from midstream.engine.coordinator.shell import Shell
from midstream.engine.core import elements
from midstream.engine.core.interfaces import Failed
from midstream.engine.core.state_machine import TransitionTable, name_of
from midstream.engine.exchange.input_channel import LocalChannel, RemoteChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.protocol import messages as m
from midstream.engine.worker import deployment
from midstream.engine.worker import slot_machine as slot
from midstream.engine.worker.slot_machine import SlotMachine
from midstream.engine.worker.task import LIVE, Task, TaskState
from midstream.engine.worker.task_input import TaskInput


@dataclass(frozen=True, slots=True)
class Watched:
    """A method of `owner` by which events reach a machine.

    `of_call` returns the state and the event of a call from its arguments. `events`: all possible events.
    """

    owner: type
    method: str
    of_call: Callable[..., tuple[str, str] | None]
    """Returns None if the call concerns another machine."""
    events: tuple[str, ...]


Watch: TypeAlias = Callable[[], Sequence[Watched]]


@dataclass(frozen=True)
class Machine:
    name: str
    states: tuple[str, ...]
    watched: Watch
    """Returns the methods to watch, once for each recording."""
    impossible: tuple[tuple[str, str, str], ...] = ()
    """States and events (separated by |, * for all; RUNNING is every "RUNNING, …"), and why they never meet."""
    table: TransitionTable[Any, Any] | None = None
    """The table on which the machine runs, if it has one: a pair without a row is impossible."""
    row_of: Callable[[str], str] = str
    """Returns the table's name for an event."""

    @cached_property
    def events(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(event for watched in self.watched() for event in watched.events))

    @cached_property
    def _pairs(self) -> frozenset[tuple[str, str]]:
        return frozenset((row.state.name, name_of(row.event)) for row in self.table.rows) if self.table else frozenset()

    def why_impossible(self, state: str, event: str) -> str | None:
        if self.table is not None and (state.partition(",")[0], self.row_of(event)) not in self._pairs:
            return "its table has no such row"
        for states, events, why in self.impossible:
            if _is_one_of(state, states) and _is_one_of(event, events):
                return why
        return None

    def lists(self, state: str, event: str) -> bool:
        return state in self.states and event in self.events

    @property
    def possible(self) -> list[tuple[str, str]]:
        return [(s, e) for s in self.states for e in self.events if self.why_impossible(s, e) is None]


def _is_one_of(name: str, names: str) -> bool:
    return names == "*" or not {name, name.partition(",")[0]}.isdisjoint(names.split("|"))


def machine_of(table: TransitionTable[Any, Any]) -> Machine:
    """Return the coverage of a table: which of its rows the machine has looked up."""

    def of_call(used: Any, state: Enum, event: object, *_: Any) -> tuple[str, str] | None:
        return (state.name, name_of(event)) if used is table else None

    events = tuple(dict.fromkeys(name_of(row.event) for row in table.rows))
    states = names_of(type(table.rows[0].state))
    return Machine(
        f"{table.machine}, by its table",
        states,
        lambda: [Watched(TransitionTable, "row", of_call, events)],
        table=table,
    )


# ---- reading the code ---------------------------------------------------------


def names_of(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(member.name for member in enum)


def classes_of(union: Any) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in get_args(union))


def methods_called(callers: Iterable[ModuleType], owner: type, receivers: Iterable[str]) -> tuple[str, ...]:
    """Return the methods of `owner` that these modules call on one of these expressions, in the order of `owner`."""
    called = {
        node.func.attr
        for caller in callers
        for node in ast.walk(ast.parse(inspect.getsource(caller)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in set(receivers)
    }
    return tuple(name for name, value in vars(owner).items() if name in called and inspect.isfunction(value))


def callbacks(module: ModuleType, owner: type) -> tuple[str, ...]:
    """Return the methods of `owner` that it passes on as callbacks, in its order."""
    handed_out = {
        argument.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
        if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "self"
    }
    return tuple(name for name, value in vars(owner).items() if name in handed_out and inspect.isfunction(value))


def subscribers(owner: type, part: str) -> tuple[str, ...]:
    """Return the methods of `owner`, a part of the coordinator, that subscribe to notifications, in its order."""
    found = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(notifications)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == part
    }
    return tuple(name for name, value in vars(owner).items() if name in found and inspect.isfunction(value))


def _outcome(name: str, outcome: object) -> str:
    return f"not {name}" if isinstance(outcome, Failed) else name


# ---- tasks and slots ---------------------------------------------------------


def _barrier_events() -> Iterable[str]:
    for kind in get_args(barrier_handler.BarrierEvent):
        about = kind.__dataclass_fields__
        yield kind.__name__
        if "barrier" in about or "checkpoint_id" in about:
            yield f"{kind.__name__}, over"
        if "barrier" in about:
            yield f"{kind.__name__}, newer"


def barrier_row(event: str) -> str:
    name, _, other = event.partition(", ")
    return other.upper() or name


def watch_barriers() -> Sequence[Watched]:
    def of_call(handler: Any, kind: Any, event: Any) -> tuple[str, str]:
        name = type(event).__name__
        return handler.state.name, name if kind is type(event) else f"{name}, {kind.name.lower()}"

    return [Watched(barrier_handler.BarrierHandler, "_step", of_call, tuple(_barrier_events()))]


NO_MAILS: Final = frozenset(("metrics", "check"))
"""The methods of a task that only read."""
TASK_MAILS: Final = tuple(
    name
    for name in methods_called((slot, deployment), Task, ("task", "self._task(ref)", "self.tasks[ref]"))
    if name not in NO_MAILS
)
ELEMENTS: Final = ("rows", *classes_of(elements.Event))
_LIVE: Final = {state: [f"{state.name}, {name}" for name in names_of(barrier_handler.Alignment)] for state in TaskState}
TASK_STATES: Final = tuple(name for state in TaskState for name in (_LIVE[state] if state in LIVE else [state.name]))


def _task_state(task: Task) -> str:
    return f"{task.state.name}, {task._checkpoints._handler.state.name}" if task.is_live else task.state.name


def watch_tasks() -> Sequence[Watched]:
    tasks: WeakKeyDictionary[Any, ReferenceType[Task]] = WeakKeyDictionary()
    """The tasks, by their inputs."""

    def of_element(task_input: Any, *arguments: Any) -> tuple[str, str]:
        task = tasks[task_input]()
        assert task is not None
        name = type(arguments[-1]).__name__
        return _task_state(task), name if name in ELEMENTS else "rows"

    def of_mail(mail: str) -> Callable[..., tuple[str, str]]:
        def of_call(task: Any, *_: Any, **__: Any) -> tuple[str, str]:
            tasks[task.input] = ref(task)
            return _task_state(task), mail

        return of_call

    return [
        Watched(TaskInput, "_on_event", of_element, ELEMENTS[1:]),
        Watched(TaskInput, "_on_batch", of_element, ("rows",)),
        *(Watched(Task, mail, of_mail(mail), (mail,)) for mail in TASK_MAILS),
    ]


_SLOT_MESSAGES: Final = tuple(name for name in classes_of(m.ToSlot) if name != "Heartbeat")


def watch_slots() -> Sequence[Watched]:
    def of_call(machine: Any, message: Any) -> tuple[str, str]:
        return machine.state.name, type(message).__name__

    return [Watched(SlotMachine, "handle", of_call, _SLOT_MESSAGES)]


# ---- the coordinator ---------------------------------------------------------


def _coordinator_events() -> Iterable[str]:
    """Yield the names of all events that the coordinator distinguishes."""
    for kind in get_args(ev.CoordinatorEvent):
        if kind is ev.SlotMessage:
            yield from (name for name in classes_of(m.FromSlot) if name != "Register")
        elif kind is ev.ClientRequested:
            yield from classes_of(m.ClientRequest)
        elif kind is ev.TimerFired:
            yield from (f"timer {timer.value}" for timer in TimerKind)
        elif kind is ev.IoDone:
            yield from (f"{io.value} {outcome}" for outcome in ("done", "failed") for io in IoKind)
        else:
            yield kind.__name__


COORDINATOR_EVENTS: Final = tuple(_coordinator_events())


def coordinator_event(event: ev.CoordinatorEvent) -> str:
    match event:
        case ev.SlotMessage(_, message):
            return type(message).__name__
        case ev.ClientRequested(_, request):
            return type(request).__name__
        case ev.TimerFired(token):
            return f"timer {timer_kind(token).value}"
        case ev.IoDone(token, outcome):
            return f"{io_kind(token).value} {'failed' if isinstance(outcome, Failed) else 'done'}"
        case _:  # the others are distinguished only by their class
            return type(event).__name__


def watch_coordinator() -> Sequence[Watched]:
    def of_call(machine: Any, event: Any, _: int) -> tuple[str, str]:
        return machine.phase.name, coordinator_event(event)

    return [Watched(Coordinator, "handle", of_call, COORDINATOR_EVENTS)]


def watch_attempt_tasks() -> Sequence[Watched]:
    def of_call(attempt: Any, task: Any, event: Any) -> tuple[str, str]:
        return attempt.phases[task].name, event.__name__

    return [Watched(Attempt, "advance", of_call, classes_of(TaskReport))]


_CHECKPOINT_READS: Final = frozenset(
    ("storage_opened", "path_of", "in_progress", "unanswered", "take_to_abort", "referenced_files", "retain", "check")
    + ("drop_older_attempts",)
)
"""The methods that do not change the checkpoint in progress."""
CHECKPOINT_METHODS: Final = tuple(
    name
    for name in (
        *methods_called((machine,), CheckpointCoordinator, ("self.checkpoints",)),
        *subscribers(CheckpointCoordinator, "job.checkpoints"),
        *callbacks(checkpoints, CheckpointCoordinator),
    )
    if name not in _CHECKPOINT_READS
)
NOT_PUBLISHED: Final = ("StorageError", "UnknownOutcomeError", "FencedError")


def watch_checkpoints() -> Sequence[Watched]:
    """Watch all methods that the coordinator calls, and all callbacks; messages and outcomes are distinguished."""

    def state(of: Any) -> str:
        return str(of.progress.name)

    def of_message(what: str, at: int) -> Callable[..., tuple[str, str]]:
        def of_call(of: Any, *arguments: Any) -> tuple[str, str]:
            message, pending = arguments[at], of.pending
            if pending is None or pending.checkpoint_id != message.checkpoint_id:
                return state(of), f"{what} of another"
            again = what == "acknowledge" and message.task in pending.acks
            return state(of), f"{what} again" if again else what

        return of_call

    def of_published(of: Any, *arguments: Any) -> tuple[str, str]:
        outcome = arguments[-1]
        if of.pending is not arguments[0]:
            return state(of), "outcome of one given up"
        if not isinstance(outcome, Failed):
            return state(of), "published"
        return state(of), f"not published: {type(outcome.error).__name__}"

    def plain(what: str) -> Callable[..., tuple[str, str]]:
        return lambda of, *_, **__: (state(of), what)

    more: dict[str, tuple[Callable[..., tuple[str, str]], tuple[str, ...]]] = {
        "acknowledge": (
            of_message("acknowledge", 1),
            ("acknowledge", "acknowledge again", "acknowledge of another"),
        ),
        "decline": (of_message("decline", 0), ("decline", "decline of another")),
        "_published": (
            of_published,
            ("published", "outcome of one given up", *(f"not published: {kind}" for kind in NOT_PUBLISHED)),
        ),
    }
    return [
        Watched(CheckpointCoordinator, name, *more.get(name, (plain(name.strip("_")), (name.strip("_"),))))
        for name in CHECKPOINT_METHODS
    ]


def watch_savepoints() -> Sequence[Watched]:
    def of_outcome(name: str) -> Callable[..., tuple[str, str]]:
        return lambda _, savepoint, outcome: (savepoint.stage.name, _outcome(name, outcome))

    return [
        *(
            Watched(Savepoints, name, of_outcome(name.strip("_")), (name.strip("_"), f"not {name.strip('_')}"))
            for name in callbacks(savepoints, Savepoints)
        ),
        Watched(Savepoints, "_refuse", lambda _, savepoint, *__: (savepoint.stage.name, "refuse"), ("refuse",)),
    ]


RESCALE_STATES: Final = names_of(rescaling.RescaleStage)
RESCALE_METHODS: Final = (
    *methods_called((machine,), Rescaling, ("self.rescaling",)),
    *(name for name in methods_called((rescaling,), Rescaling, ("self",)) if name in ("stored", "checkpoint_failed")),
    *(name for name in subscribers(Rescaling, "job.rescaling") if not name.startswith("checkpoint")),
    *callbacks(rescaling, Rescaling),
)


def watch_rescales() -> Sequence[Watched]:
    def of_method(name: str) -> Callable[..., tuple[str, str]]:
        def of_call(rescaling: Any, *arguments: Any, **_: Any) -> tuple[str, str]:
            state = rescaling.stage.name
            if not name.startswith("_"):
                return state, name
            is_old = rescaling._current is not arguments[0]
            return state, f"{name[1:]} of another" if is_old else _outcome(name[1:], arguments[-1])

        return of_call

    return [
        Watched(
            Rescaling,
            name,
            of_method(name),
            (name[1:], f"not {name[1:]}", f"{name[1:]} of another") if name.startswith("_") else (name,),
        )
        for name in RESCALE_METHODS
    ]


# ---- the driver's shell ------------------------------------------------------


class Request(Enum):
    """The states of a request for a slot, as the shell tracks them."""

    OPEN = "open"
    ANSWERED = "answered"
    LOST = "lost"
    """The connection of the slot is gone, and the shell waits for a report on its process."""
    CLOSED = "closed"
    ENDED = "ended"
    """The job has ended."""


_SHELL_METHODS: Final[Mapping[str, str]] = {
    "slot_failed": "report of the process",
    "refusal": "a slot comes",
    "slot_lost": "the connection is gone",
    "_report_lost": "waited for the report",
    "_abandon": "abandon",
}


def watch_requests() -> Sequence[Watched]:
    def state(shell: Any, request: str | None) -> str:
        if shell.outcome is not None:
            return Request.ENDED.name
        if request not in shell._requests:
            return Request.CLOSED.name
        slot = shell._requests[request]
        if slot is None:
            return Request.OPEN.name
        return Request.LOST.name if slot in shell._lost else Request.ANSWERED.name

    def of_method(name: str) -> Callable[..., tuple[str, str]]:
        def of_call(shell: Any, about: Any, *_: Any) -> tuple[str, str]:
            if name == "slot_failed":
                request = about
            elif name == "refusal":
                request = about.request
            else:
                request = next((r for r, slot in shell._requests.items() if slot == about), None)
            return state(shell, request), _SHELL_METHODS[name]

        return of_call

    return [Watched(Shell, name, of_method(name), (event,)) for name, event in _SHELL_METHODS.items()]


# ---- channels ----------------------------------------------------------------


def watch_channels() -> Sequence[Watched]:
    """Watch channels; their states show whether they hold data, and a part of a batch."""

    def remote(what: str) -> Callable[..., tuple[str, str]]:
        def of_call(channel: Any, *_: Any, inside: bool = False, **__: Any) -> tuple[str, str]:
            part = " and a part" if channel._partial is not None else ""
            event = f"{what} inside a batch" if inside else what
            return f"remote: {'data' if channel.queue else 'empty'}{part}", event

        return of_call

    def local(what: str) -> Callable[..., tuple[str, str]]:
        return lambda channel, *_: (f"local: {'data' if channel.queue else 'empty'}", what)

    def gate(what: str) -> Callable[..., tuple[str, str]]:
        def of_call(gate: Any, index: int) -> tuple[str, str]:
            channel = gate.channels[index]
            where = "remote" if isinstance(channel, RemoteChannel) else "local"
            part = " and a part" if getattr(channel, "_partial", None) is not None else ""
            return f"{where}: {'data' if channel.queue else 'empty'}{part}", what

        return of_call

    return [
        Watched(RemoteChannel, "receive_data", remote("buffer"), ("buffer",)),
        Watched(RemoteChannel, "receive_event", remote("event"), ("event", "event inside a batch")),
        *(Watched(RemoteChannel, method, remote(method), (method,)) for method in ("take", "freed", "discard")),
        *(Watched(LocalChannel, method, local(method), (method,)) for method in ("take", "discard")),
        *(Watched(InputGate, method, gate(method), (method,)) for method in ("block", "resume")),
    ]
