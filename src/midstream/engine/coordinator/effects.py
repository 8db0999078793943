"""The effects of the coordinator's parts: their notifications, the instructions of one step, and the callbacks of those
instructions that have an outcome.

`Effects` makes all tokens, so that none is used twice. A part that sets a timer or runs I/O passes the callback for the
outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from midstream.engine.coordinator import events as ev
from midstream.engine.coordinator.notifications import Notifications
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.protocol.messages import Reply, ToSlot

T = TypeVar("T")


class TimerKind(Enum):
    """The purpose of a timer, which is the first word of its token."""

    WAKE = "wake"
    """The next checkpoint may be due."""
    CHECKPOINT = "checkpoint"
    """A checkpoint has not completed in time."""
    COMMIT = "commit"
    """A commit that has failed is tried again."""
    DISCOVER = "discover"
    """A source discovers splits again."""
    SYMPTOM = "symptom"
    """A task has reported that a peer is gone, and the cause has not been reported since."""
    CANCEL = "cancel"
    """Slots have not cancelled their tasks in time."""
    SLOTS = "slots"
    """Slots have not come in time."""
    SLOT_RETRY = "slot-retry"
    RESTART = "restart"
    """The pause before the next attempt is over."""
    END = "end"
    """I/O that is still under way keeps the job from ending no longer."""


class IoKind(Enum):
    """The purpose of a piece of I/O, which is the first word of its token."""

    OPEN = "open"
    DISTRIBUTE = "distribute"
    """The state of a checkpoint is distributed to the tasks that resume from it."""
    PUBLISH = "publish"
    COMMIT = "commit"
    ABORT = "abort"
    CLEAN = "clean"
    EPOCH = "epoch"
    DISCOVER = "discover"
    NOTIFY = "notify"
    """A source is notified of a completed checkpoint."""
    CLOSE = "close"
    """A source or a committer is closed."""
    RESCALE = "rescale"
    SAVEPOINT_LOCATION = "savepoint-location"
    SAVEPOINT = "savepoint"
    SAVEPOINT_DISCARD = "savepoint-discard"
    AVAILABILITY = "availability"
    """The cluster reports why no slots have come in time."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """I/O that has not returned, on the driver's I/O pool or on a slot."""

    waits_for: str
    """Completes "waiting for …"."""
    began_s: float
    """When the call began, on the clock of `Effects.elapsed_s`."""
    done: Callable[[Done[object] | Failed], None] | None
    """The callback for its outcome. None: a slot does it, and answers with a message."""
    has_limit: bool
    """See `Effects.run_io`."""


class Effects:
    def __init__(self) -> None:
        self.notifications = Notifications()
        """What any part may notify the others of."""
        self.cause = 0
        """The number of the event that is being handled."""
        self.now_ms = 0
        """The time at which it is being handled: wall clock, in milliseconds."""
        self._out: list[ev.Instruction] = []
        self._tokens = 0
        self._timers: dict[str, Callable[[], None]] = {}
        self.elapsed_s = 0.0
        """The sum of all `TimePassed`: waits are measured on it, because a wall clock may be set."""
        self._calls: dict[str, OpenCall] = {}

    # ---- instructions ----

    def send(self, slot: int, message: ToSlot) -> None:
        self._out.append(ev.Send(slot, message, cause=self.cause))

    def request_slot(self, request: str) -> None:
        self._out.append(ev.RequestSlot(request, cause=self.cause))

    def close_slot(self, slot: int, reason: str) -> None:
        self._out.append(ev.CloseSlot(slot, reason, cause=self.cause))

    def reply(self, client: int, reply: Reply) -> None:
        self._out.append(ev.ReplyTo(client, reply, cause=self.cause))

    def notify_user(self, text: str) -> None:
        self._out.append(ev.NotifyUser(text, cause=self.cause))

    def end(self, ended: ev.JobEnded) -> None:
        self._out.append(ended)

    def set_timer(self, kind: TimerKind, delay_s: float, then: Callable[[], None], about: object = None) -> str:
        """Set a timer and return its token, for `cancel_timer`. `about` is part of the token, for readers of a trace."""
        token = self._token(kind, about)
        self._timers[token] = then
        self._out.append(ev.SetTimer(token, max(0.0, delay_s), cause=self.cause))
        return token

    def cancel_timer(self, token: str | None) -> None:
        """Cancel a timer. Nothing happens if `token` is None or the timer has fired."""
        if token is not None and self._timers.pop(token, None) is not None:
            self._out.append(ev.CancelTimer(token, cause=self.cause))

    def run_io(
        self,
        kind: IoKind,
        work: Callable[[], T],
        done: Callable[[Done[T] | Failed], None],
        *,
        about: object = None,
        waits_for: str,
        has_limit: bool = False,
    ) -> None:
        """Run `work` on the I/O pool, then call `done` with its outcome. `waits_for` completes "waiting for …".

        `has_limit`: the job can neither continue without the outcome nor repeat the call, so the wait for it is limited
        (see `engine.coordinator.requests.pending_waits`).
        """
        token = self._token(kind, about)
        on_done = cast("Callable[[Done[object] | Failed], None]", done)
        self._calls[token] = OpenCall(waits_for, self.elapsed_s, on_done, has_limit)
        self._out.append(ev.RunIo(token, work, cause=self.cause))

    def wait_for_slot(self, waits_for: str) -> str:
        """Register a limited wait for something that a slot has been sent; `slot_is_done` ends it, given the token."""
        self._tokens += 1
        token = f"slot-{self._tokens}"
        self._calls[token] = OpenCall(waits_for, self.elapsed_s, None, has_limit=True)
        return token

    def slot_is_done(self, token: str) -> None:
        """End a wait: the slot has answered, or will not answer any more."""
        del self._calls[token]

    def _token(self, kind: TimerKind | IoKind, about: object) -> str:
        self._tokens += 1
        return f"{kind.value}:{about}-{self._tokens}" if about is not None else f"{kind.value}-{self._tokens}"

    # ---- outcomes ----

    def timer_fired(self, token: str) -> None:
        then = self._timers.pop(token, None)
        if then is not None:  # else it was cancelled while it fired
            then()

    def io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        call = self._calls.pop(token, None)
        if call is not None and call.done is not None:
            call.done(outcome)

    @property
    def calls(self) -> tuple[OpenCall, ...]:
        """The calls that have not returned, oldest first."""
        return tuple(self._calls.values())

    @property
    def io_in_flight(self) -> int:
        return len(self._calls)

    def cancel_all_timers(self) -> None:
        for token in list(self._timers):
            self.cancel_timer(token)

    def take(self) -> list[ev.Instruction]:
        out, self._out = self._out, []
        return out


def timer_kind(token: str) -> TimerKind:
    return TimerKind(_first_word(token))


def io_kind(token: str) -> IoKind:
    return IoKind(_first_word(token))


def _first_word(token: str) -> str:
    return token.rpartition("-")[0].partition(":")[0]
