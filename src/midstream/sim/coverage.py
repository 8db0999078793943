"""Which pairs of state and event each state machine has met, and which it never has.

While a `recording` lasts, the methods by which events reach the machines are wrapped; the machines
themselves know nothing of it. What states and events there are is read from the code (enums, unions
of messages), so that new ones are missing from the report only if nothing ever meets them. A pair
that cannot come about is named as such, with the reason; should one be seen, the reason is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, get_args
from unittest.mock import patch
from weakref import ReferenceType, WeakKeyDictionary, ref

import msgspec

from midstream.checkpoint import barriers
from midstream.coordinator import events as ev
from midstream.coordinator.attempt import Attempt, TaskPhase
from midstream.coordinator.checkpoints import Checkpoints
from midstream.coordinator.machine import Coordinator
from midstream.coordinator.phase import Phase
from midstream.coordinator.savepoints import Savepoints, Stage
from midstream.core import elements
from midstream.core.seams import Failed
from midstream.exchange.channel import LocalChannel, RemoteChannel
from midstream.exchange.gate import InputGate
from midstream.protocol import messages as m
from midstream.worker.inputs import TaskInput
from midstream.worker.slot import SlotMachine, SlotState
from midstream.worker.task import Task, TaskState

Pair: TypeAlias = tuple[str, str, str]
"""machine, state, event"""
Record: TypeAlias = Callable[[str, str], None]
"""Called with a state and an event."""
Watched: TypeAlias = tuple[type, str, Callable[..., tuple[str, str]]]
"""A method, and what state and event a call of it is, from its arguments."""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    states: tuple[str, ...]
    events: tuple[str, ...]
    watched: Callable[[], Sequence[Watched]]
    """Made anew for each recording."""
    impossible: tuple[tuple[str, str, str], ...] = ()
    """States and events (words separated by |, * for all), and why they never meet."""

    def why_impossible(self, state: str, event: str) -> str | None:
        for states, events, why in self.impossible:
            if (states == "*" or state in states.split("|")) and (events == "*" or event in events.split("|")):
                return why
        return None

    @property
    def possible(self) -> list[tuple[str, str]]:
        return [(s, e) for s in self.states for e in self.events if self.why_impossible(s, e) is None]


@contextmanager
def recording() -> Iterator[Counter[Pair]]:
    """Counts all that happens in this process until the end of the context. Contexts must not overlap."""
    seen: Counter[Pair] = Counter()
    with ExitStack() as stack:
        for machine in MACHINES:
            for owner, method, of_call in machine.watched():
                wrapped = _recorded(machine.name, getattr(owner, method), of_call, seen)
                stack.enter_context(patch.object(owner, method, wrapped))
        yield seen


def _recorded(
    machine: str, method: Callable[..., Any], of_call: Callable[..., tuple[str, str]], seen: Counter[Pair]
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        state, event = of_call(*arguments, **named)
        seen[machine, state, event] += 1
        return method(*arguments, **named)

    return call


# ---- the report --------------------------------------------------------------


class MachineCoverage(msgspec.Struct, frozen=True):
    machine: str
    possible: int
    seen: int
    unseen: tuple[tuple[str, str], ...]
    """(state, event)"""
    surprising: tuple[tuple[str, str, str], ...]
    """(state, event, why it was held to be impossible)"""
    counts: tuple[tuple[str, str, int], ...]
    """(state, event, how often)"""


def report(seen: Mapping[Pair, int]) -> list[MachineCoverage]:
    found = []
    for machine in MACHINES:
        counts = {(state, event): n for (name, state, event), n in seen.items() if name == machine.name and n}
        possible = machine.possible
        order = {pair: index for index, pair in enumerate(possible)}
        surprising = tuple((*pair, why) for pair in counts if (why := machine.why_impossible(*pair)) is not None)
        listed = sorted(counts, key=lambda pair: (order.get(pair, len(order)), pair))
        found.append(
            MachineCoverage(
                machine=machine.name,
                possible=len(possible),
                seen=sum(pair in counts for pair in possible),
                unseen=tuple(pair for pair in possible if pair not in counts),
                surprising=surprising,
                counts=tuple((*pair, counts[pair]) for pair in listed),
            )
        )
    return found


def lines_of(coverage: Sequence[MachineCoverage]) -> Iterator[str]:
    """For people: per machine one line a state, then what was never seen."""
    for machine in coverage:
        yield f"{machine.machine}: {machine.seen} of {machine.possible} pairs of state and event seen"
        by_state: dict[str, list[str]] = {}
        for state, event, count in machine.counts:
            by_state.setdefault(state, []).append(f"{event} {count:,}")
        yield from (f"  {state}: {', '.join(events)}" for state, events in by_state.items())
        unseen: dict[str, list[str]] = {}
        for state, event in machine.unseen:
            unseen.setdefault(state, []).append(event)
        yield from (f"  never in {state}: {', '.join(events)}" for state, events in unseen.items())
        for state, event, why in machine.surprising:
            yield f"  SURPRISING: {event} in {state}, though {why}"


# ---- the machines --------------------------------------------------------------


def _names(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(member.name for member in enum)


def _classes(union: Any) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in get_args(union))


_RELATIONS: Final = ("older", "same", "newer")


def _watch_barriers() -> Sequence[Watched]:
    newest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def of_call(handler: Any, event: Any) -> tuple[str, str]:
        state = "IDLE" if handler.pending_id is None else "ALIGNING"
        name = type(event).__name__
        checkpoint_id = getattr(event, "checkpoint_id", None)
        if checkpoint_id is None:
            checkpoint_id = getattr(getattr(event, "barrier", None), "checkpoint_id", None)
        if checkpoint_id is None:
            return state, name
        known = newest.get(handler, -1)
        newest[handler] = max(known, checkpoint_id)
        return state, f"{name} {_RELATIONS[1 + (checkpoint_id > known) - (checkpoint_id < known)]}"

    return [(barriers.BarrierHandler, "handle", of_call)]


def _barrier_events() -> tuple[str, ...]:
    events: list[str] = []
    for kind in get_args(barriers.BarrierEvent):
        has_id = {"checkpoint_id", "barrier"} & set(getattr(kind, "__dataclass_fields__", {}))
        events += [f"{kind.__name__} {relation}" for relation in _RELATIONS] if has_id else [kind.__name__]
    return tuple(events)


_TASK_MAILS: Final = (
    "open",
    "start",
    "trigger_checkpoint",
    "checkpoint_completed",
    "checkpoint_aborted",
    "add_split",
    "no_more_splits",
    "stop_source",
    "fail",
    "close",
)
_ELEMENTS: Final = ("rows", *_classes(elements.Event))


def _watch_tasks() -> Sequence[Watched]:
    tasks: WeakKeyDictionary[Any, ReferenceType[Task]] = WeakKeyDictionary()
    """By their inputs."""

    def of_element(task_input: Any, *arguments: Any) -> tuple[str, str]:
        task = tasks[task_input]()
        assert task is not None
        name = type(arguments[-1]).__name__
        return task.state.name, name if name in _ELEMENTS else "rows"

    def of_mail(mail: str) -> Callable[..., tuple[str, str]]:
        def of_call(task: Any, *_: Any, **__: Any) -> tuple[str, str]:
            tasks[task._input] = ref(task)
            return task.state.name, mail

        return of_call

    return [(TaskInput, "_on_element", of_element), *((Task, mail, of_mail(mail)) for mail in _TASK_MAILS)]


def _watch_slots() -> Sequence[Watched]:
    return [(SlotMachine, "handle", lambda slot, message: (slot.state.name, type(message).__name__))]


_IO: Final = ("open", "publish", "commit", "abort", "clean", "epoch", "discover", "settled", "rescale") + (
    "savepoint-place",
    "savepoint",
    "savepoint-discard",
)
_COORDINATOR_EVENTS: Final = (
    "Started",
    "SlotConnected",
    "SlotLost",
    "SlotRequestFailed",
    *(name for name in _classes(m.FromSlot) if name != "Register"),
    *_classes(m.ClientRequest),
    "CancelRequested",
    "TimePassed",
    *(f"timer {name}" for name in ("wake", "checkpoint", "commit", "symptom", "restart", "cancel", "end", "slots")),
    *(f"timer {name}" for name in ("slot-retry", "discover")),
    *(f"{name} {outcome}" for outcome in ("done", "failed") for name in _IO),
    "close done",
)


def _coordinator_event(event: ev.CoordinatorEvent) -> str:
    match event:
        case ev.SlotMessage(_, message):
            return type(message).__name__
        case ev.ClientAsked(_, request):
            return type(request).__name__
        case ev.TimerFired(token):
            return f"timer {_token_name(token)}"
        case ev.IoDone(token, outcome):
            return f"{_token_name(token)} {'failed' if isinstance(outcome, Failed) else 'done'}"
        case _:
            return type(event).__name__


def _token_name(token: str) -> str:
    return token.rpartition("-")[0].partition(":")[0]


def _watch_coordinator() -> Sequence[Watched]:
    return [(Coordinator, "handle", lambda machine, event, _: (machine.phase.name, _coordinator_event(event)))]


def _watch_attempt_tasks() -> Sequence[Watched]:
    return [(Attempt, "advance", lambda attempt, ref, phase: (attempt.phases[ref].name, phase.name))]


def _watch_checkpoints() -> Sequence[Watched]:
    def state(checkpoints: Any) -> str:
        pending = checkpoints.pending
        if pending is None:
            return "NONE"
        over = ", attempt over" if pending.attempt_is_over else ""
        return ("PUBLISHING" if pending.publishing else "COLLECTING") + over

    def of_message(what: str, at: int) -> Callable[..., tuple[str, str]]:
        def of_call(checkpoints: Any, *arguments: Any) -> tuple[str, str]:
            message, pending = arguments[at], checkpoints.pending
            if pending is None or pending.checkpoint_id != message.checkpoint_id:
                return state(checkpoints), f"{what} of another"
            again = what == "ack" and message.task in pending.acks
            return state(checkpoints), f"{what} again" if again else what

        return of_call

    def of_published(checkpoints: Any, *arguments: Any) -> tuple[str, str]:
        outcome = arguments[-1]
        if checkpoints.pending is not arguments[0]:
            return state(checkpoints), "outcome of one given up"
        if not isinstance(outcome, Failed):
            return state(checkpoints), "published"
        return state(checkpoints), f"not published: {type(outcome.error).__name__}"

    def plain(what: str) -> Callable[..., tuple[str, str]]:
        return lambda checkpoints, *_, **__: (state(checkpoints), what)

    return [
        (Checkpoints, "trigger", plain("trigger")),
        (Checkpoints, "acknowledge", of_message("ack", 1)),
        (Checkpoints, "decline", of_message("decline", 0)),
        (Checkpoints, "task_finished", plain("task finished")),
        (Checkpoints, "attempt_over", plain("attempt over")),
        (Checkpoints, "_expired", plain("timeout")),
        (Checkpoints, "_published", of_published),
    ]


def _watch_savepoints() -> Sequence[Watched]:
    def of_outcome(done: str, failed: str) -> Callable[..., tuple[str, str]]:
        return lambda _, savepoint, outcome: (savepoint.stage.name, failed if isinstance(outcome, Failed) else done)

    return [
        (Savepoints, "_claimed", of_outcome("claimed", "not claimed")),
        (Savepoints, "_copied", of_outcome("copied", "not copied")),
        (Savepoints, "_discarded", of_outcome("discarded", "not discarded")),
        (Savepoints, "_refuse", lambda _, savepoint, *__: (savepoint.stage.name, "refused")),
    ]


def _watch_channels() -> Sequence[Watched]:
    def remote(what: str) -> Callable[..., tuple[str, str]]:
        def of_call(channel: Any, *_: Any, inside: bool = False, **__: Any) -> tuple[str, str]:
            part = " and a part" if channel._partial is not None else ""
            event = f"{what} inside a batch" if inside else what
            return f"remote: {'data' if channel.has_data() else 'empty'}{part}", event

        return of_call

    def local(what: str) -> Callable[..., tuple[str, str]]:
        return lambda channel, *_: (f"local: {'data' if channel.has_data() else 'empty'}", what)

    def gate(what: str) -> Callable[..., tuple[str, str]]:
        def of_call(gate: Any, index: int) -> tuple[str, str]:
            channel = gate.channels[index]
            where = "remote" if isinstance(channel, RemoteChannel) else "local"
            part = " and a part" if getattr(channel, "_partial", None) is not None else ""
            return f"{where}: {'data' if channel.has_data() else 'empty'}{part}", what

        return of_call

    return [
        (RemoteChannel, "receive_data", remote("buffer")),
        (RemoteChannel, "receive_event", remote("event")),
        *((RemoteChannel, method, remote(method)) for method in ("take", "done", "discard")),
        *((LocalChannel, method, local(method)) for method in ("take", "done", "discard")),
        *((InputGate, method, gate(method)) for method in ("block", "resume")),
    ]


_FROM_TASKS: Final = "|".join(name for name in _classes(m.FromSlot) if name not in ("Register", "SlotStatus", "InCall"))
_AFTER_START: Final = "TaskRunning|TaskEndOfData|TaskFinished|TaskFailed|CheckpointAck|CheckpointDecline|RequestSplit"
_REQUESTS: Final = (*_classes(m.ClientRequest), "CancelRequested")
_TIMERS: Final = "|".join(name for name in _COORDINATOR_EVENTS if name.startswith("timer") and name != "timer end")
_IO_LATER: Final = "|".join(
    name for name in _COORDINATOR_EVENTS if name.endswith((" done", " failed")) and not name.startswith("open")
)
_SETTLED_BEFORE: Final = "commit done|commit failed|abort done|abort failed"
_NOT_LIVE: Final = "CREATED|FINISHED|CLOSED"
_AFTER_DATA: Final = "rows|Watermark|WatermarkStatus|EndOfData"

MACHINES: Final[tuple[Machine, ...]] = (
    Machine(
        "barrier handler",
        ("IDLE", "ALIGNING"),
        _barrier_events(),
        _watch_barriers,
        (
            ("*", "TriggerReceived older|TriggerReceived same", "a task is triggered once, in order, and then only"),
            ("ALIGNING", "TriggerReceived newer", "nobody triggers while a checkpoint is in progress"),
        ),
    ),
    Machine(
        "task",
        _names(TaskState),
        (*_TASK_MAILS, *_ELEMENTS),
        _watch_tasks,
        (
            (_NOT_LIVE, "|".join(_ELEMENTS), "only a live task reads"),
            ("FINISHING", _AFTER_DATA, "all its data has ended"),
            ("RUNNING|FINISHING|FINISHED|CLOSED", "open|start", "it happens once"),
            ("CREATED", "trigger_checkpoint|checkpoint_completed|checkpoint_aborted", "all tasks run before the first"),
            ("CREATED", "fail", "a failure to open is the slot's"),
            ("CREATED", "add_split|no_more_splits|stop_source", "sent behind Start, in order"),
            ("FINISHING|FINISHED", "add_split", "a source that wants splits has not ended"),
            ("FINISHED|CLOSED", "fail", "nothing of it runs any more"),
        ),
    ),
    Machine(
        "slot",
        _names(SlotState),
        tuple(name for name in _classes(m.ToSlot) if name not in ("Release", "Heartbeat")),
        _watch_slots,
        (
            ("DEPLOYING|DEPLOYED|RUNNING", "Welcome", "it comes first"),
            ("DEPLOYING|DEPLOYED|RUNNING", "Deploy", "the attempt before is cancelled first"),
            ("IDLE|DEPLOYING", "Start", "all slots have answered Deployed by then"),
            ("RUNNING", "Start", "it comes once"),
            (
                "DEPLOYING|DEPLOYED",
                "TriggerCheckpoint|CheckpointCompleted|CheckpointAborted|AssignSplit|NoMoreSplits|StopSources",
                "sent behind Start, in order",
            ),
            ("DEPLOYING", "SplitsAssigned", "all slots have answered Deployed by then"),
        ),
    ),
    Machine(
        "coordinator",
        _names(Phase),
        _COORDINATOR_EVENTS,
        _watch_coordinator,
        (
            ("OPENING|GATHERING|DEPLOYING|STARTING|RUNNING|CANCELLING|ENDING|ENDED", "Started", "it comes first"),
            ("CREATED", "|".join(e for e in _COORDINATOR_EVENTS[1:] if e not in _REQUESTS), "Started comes first"),
            (
                "OPENING",
                f"SlotConnected|SlotLost|SlotRequestFailed|SlotStatus|InCall|{_FROM_TASKS}",
                "no slot is asked for yet",
            ),
            ("OPENING", f"{_TIMERS}|{_IO_LATER}", "nothing but opening is under way"),
            ("GATHERING|DEPLOYING|STARTING|RUNNING|CANCELLING", "open done|open failed", "it has been opened"),
            ("GATHERING", _FROM_TASKS, "no attempt yet, or all slots have said Cancelled, the last of their messages"),
            ("DEPLOYING", _AFTER_START, "sent after Start"),
            ("STARTING", "CheckpointAck|CheckpointDecline", "nothing has been triggered"),
            ("STARTING|RUNNING", "Deployed|DeployFailed|Cancelled", "all slots have answered"),
            ("DEPLOYING", "Cancelled", "nothing was cancelled"),
            ("RUNNING", "TaskRunning", "all tasks have said so"),
            ("ENDING|ENDED", f"SlotLost|SlotStatus|InCall|{_FROM_TASKS}", "all slots have been released"),
            ("ENDED", "TimePassed", "nobody waits any more"),
            ("ENDED", "SlotConnected", "whoever runs the coordinator knows that it has ended"),
            ("ENDED", f"{_TIMERS}|timer end", "all timers are cancelled"),
            ("ENDING", _TIMERS, "all other timers are cancelled"),
            ("OPENING|GATHERING|DEPLOYING|STARTING|RUNNING|CANCELLING", "timer end", "it is set when the job ends"),
            ("DEPLOYING|STARTING", "timer checkpoint", "one that outlives its attempt is waited for before"),
            ("GATHERING|DEPLOYING|CANCELLING", "timer symptom", "of an attempt that runs"),
            ("GATHERING|DEPLOYING|STARTING|RUNNING", "timer cancel", "of an attempt that is being cancelled"),
            ("DEPLOYING|STARTING|RUNNING", "timer restart", "deploying waits for it, or ends it"),
            ("DEPLOYING|STARTING", "timer slots", "deploying waits for it, or ends it"),
            ("DEPLOYING|STARTING", f"timer commit|{_SETTLED_BEFORE}", "deploying waits for their outcome"),
            ("GATHERING|DEPLOYING|STARTING|RUNNING|CANCELLING", "close done", "sources are closed at the end"),
        ),
    ),
    Machine(
        "task, to the coordinator",
        _names(TaskPhase),
        tuple(name for name in _names(TaskPhase) if name != "DEPLOYING"),
        _watch_attempt_tasks,
        (
            ("RUNNING|FINISHING|FINISHED", "RUNNING", "it is said once"),
            ("DEPLOYING", "FINISHING|FINISHED", "it runs first"),
            ("FINISHING|FINISHED", "FINISHING", "it is said once"),
            ("FINISHED", "FINISHED", "it is said once"),
        ),
    ),
    Machine(
        "checkpoint",
        ("NONE", "COLLECTING", "PUBLISHING", "PUBLISHING, attempt over"),
        (
            *("trigger", "ack", "ack again", "ack of another", "decline", "decline of another", "task finished"),
            *("attempt over", "timeout", "published", "outcome of one given up"),
            *(f"not published: {kind}" for kind in ("StorageError", "UnknownOutcomeError", "FencedError")),
        ),
        _watch_checkpoints,
        (
            ("COLLECTING|PUBLISHING|PUBLISHING, attempt over", "trigger", "one at a time"),
            ("NONE", "ack|ack again|decline|timeout", "they belong to one in progress"),
            (
                "NONE|COLLECTING",
                "published|not published: StorageError|not published: UnknownOutcomeError|not published: FencedError",
                "it is not being published",
            ),
            ("PUBLISHING|PUBLISHING, attempt over", "ack", "all have answered"),
            ("*", "ack again", "a task answers once, on a connection without duplicates"),
            ("PUBLISHING|PUBLISHING, attempt over", "decline", "a task answers once"),
        ),
    ),
    Machine(
        "savepoint",
        _names(Stage),
        ("claimed", "not claimed", "copied", "not copied", "refused", "discarded", "not discarded"),
        _watch_savepoints,
        (
            ("WAITING|STORING|COMMITTING|COPYING|COPIED|DISCARDING", "claimed|not claimed", "it comes first, once"),
            (
                "CLAIMING|WAITING|STORING|COMMITTING|COPIED|DISCARDING",
                "copied|not copied",
                "what is copied stays until then",
            ),
            ("CLAIMING|WAITING|STORING|COMMITTING|COPYING|COPIED", "not discarded", "nothing is given back"),
            ("WAITING|STORING|COMMITTING|COPYING|COPIED", "discarded", "nothing is given back"),
            ("WAITING", "refused", "a failure before its checkpoint only delays it"),
            ("DISCARDING", "refused", "it has been"),
        ),
    ),
    Machine(
        "channel",
        ("remote: empty", "remote: data", "remote: empty and a part", "remote: data and a part", "local: empty")
        + ("local: data",),
        ("buffer", "event", "event inside a batch", "take", "done", "discard", "block", "resume"),
        _watch_channels,
        (
            ("local: empty|local: data", "buffer|event|event inside a batch", "they come by reference"),
            ("local: empty|remote: empty|remote: empty and a part", "take", "only what is ready is polled"),
            ("remote: empty and a part|remote: data and a part", "event", "only what overtakes cuts in"),
            ("remote: empty|remote: data", "event inside a batch", "there is no batch that it could be inside of"),
        ),
    ),
)
