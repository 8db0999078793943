"""The shell around a coordinator: carries out what it decides, and feeds it what happens.

The coordinator is a pure machine, and what it runs on differs: threads, sockets and Spark
(`midstream.runtime`), a simulated world (`midstream.sim`), a bench of tests. What must not differ is
in here: one event at a time and its instructions in order, timers and I/O by their tokens, slots
that are requested, register once, are lost and abandoned, questions that are answered once each, and
the end of the job, after which the coordinator gets no event. The program that owns a shell gives it a
loop and a `Host`, and reports to it what the host observes. Everything happens on that loop's thread.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final, Protocol

from midstream.coordinator import events as ev
from midstream.core.errors import ClusterError, InvariantError, assert_never
from midstream.core.seams import Clock, Done, Executor, Failed, Timer
from midstream.protocol.job_status import JobStatus
from midstream.protocol.messages import ClientRequest, FromSlot, Register, Reply, ToSlot

RELEASE_WAIT_S: Final = 10.0
"""How long the process of a slot that was released may take to end by itself."""
TELL_TIME_S: Final = 1.0
EXIT_WAIT_S_MAX: Final = 0.8
"""How long a slot whose connection is gone waits for word of how its process has ended, before it counts as lost. Shorter
than the coordinator waits for the cause of what its peers see of it."""
_ENDED_HOW: Final = {"finished": "finished", "stopped": "was stopped", "failed": "failed"}


class CoordinatorMachine(Protocol):
    """`midstream.coordinator.Coordinator`, or a probe in tests."""

    def handle(self, event: ev.CoordinatorEvent, now_ms: int) -> list[ev.Instruction]: ...

    def status(self, now_ms: int) -> JobStatus: ...


class Loop(Clock, Executor, Protocol):
    """The thread that the shell lives on."""


class Lines(Protocol):
    """The connections of registered slots, by their numbers."""

    def send(self, slot: int, message: ToSlot) -> None:
        """To a slot that is gone: dropped."""
        ...

    def release(self, slot: int) -> None:
        """Send what waits, then have the slot end; it is not reported lost any more."""
        ...

    def drop(self, slot: int) -> bool:
        """Cut the slot off; it is not reported lost any more. False if it was gone already."""
        ...


class Host(Protocol):
    """Where slots come from, and who hears of what."""

    @property
    def slots_gone(self) -> str:
        """Why no slot can be had any more; empty as long as there can be some. It never changes back."""
        ...

    def request_slot(self, request: str) -> None:
        """Start one more slot. `Shell.slot_failed` follows when that fails, or when its process has ended, and before
        that `Shell.slot_leaving` if it is known that it will.

        Raises ClusterError when no slot can be had any more.
        """
        ...

    def abandon(self, request: str) -> None:
        """The slot that has answered is lost: see that its process ends, even if it hangs."""
        ...

    def last_lines(self, slot: int) -> str:
        """What its tasks have printed and logged last, as far as it was sent."""
        ...

    def answer(self, client: int, reply: Reply) -> None:
        """Called once for each `Shell.ask`."""
        ...

    def tell(self, text: str) -> None:
        """People are to hear of it now."""
        ...

    def ended_with(self, outcome: ev.JobEnded) -> None:
        """All is over, and everybody who had asked is answered. Called once."""
        ...


class Shell:
    """From `start` to `outcome`."""

    def __init__(self, coordinator: CoordinatorMachine, loop: Loop, lines: Lines, host: Host) -> None:
        self.coordinator = coordinator
        self.outcome: ev.JobEnded | None = None
        self._loop = loop
        self._lines = lines
        self._host = host
        self._events: deque[ev.CoordinatorEvent] = deque()
        self._stepping = False
        self._timers: dict[str, Timer] = {}
        self._requests: dict[str, int | None] = {}
        """Requests that are open (None) or that a registered slot answers."""
        self._answered: dict[int, str] = {}
        """Of the latter: the request of each slot."""
        self._lost: dict[int, str] = {}
        """Slots whose connection is gone, and how; see `EXIT_WAIT_S_MAX`."""
        self._unanswered: dict[int, None] = {}
        """Clients that wait for an answer, in the order in which they have asked."""

    def start(self) -> None:
        self.feed(ev.Started())
        self._tell_time(self._loop.monotonic_s())

    def cancel(self, reason: str) -> None:
        """End the job now."""
        self.feed(ev.CancelRequested(reason))

    @property
    def slots(self) -> int:
        """How many there are, or are asked for."""
        return len(self._requests)

    # ---- events and instructions

    def feed(self, event: ev.CoordinatorEvent) -> None:
        """One event after the other: what an instruction brings about at once waits for its turn."""
        if self.outcome is not None:
            return
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._stepping = False

    def _step(self, event: ev.CoordinatorEvent) -> None:
        for instruction in self.coordinator.handle(event, self._loop.now_ms()):
            self._execute(instruction)

    def _tell_time(self, since_s: float) -> None:
        """As a machine that slept has slept: no wait is longer for it than one interval."""
        if self.outcome is not None:
            return
        now_s = self._loop.monotonic_s()
        self.feed(ev.TimePassed(min(now_s - since_s, 2 * TELL_TIME_S)))
        self._loop.call_later(TELL_TIME_S, partial(self._tell_time, now_s))

    def _execute(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send(slot, message):
                self._lines.send(slot, message)
            case ev.RequestSlot(request):
                self._request_slot(request)
            case ev.CloseSlot(slot, _):
                self._lines.release(slot)
                self._loop.call_later(RELEASE_WAIT_S, partial(self._abandon, slot))
            case ev.SetTimer(token, delay_s):
                assert token not in self._timers, token
                self._timers[token] = self._loop.call_later(delay_s, partial(self._timer_fired, token))
            case ev.CancelTimer(token):
                timer = self._timers.pop(token, None)
                if timer is not None:
                    timer.cancel()
            case ev.RunIo(token, work):
                self._loop.submit(work, partial(self._io_done, token))
            case ev.ReplyTo(client, reply):
                self._answer(client, reply)
            case ev.Tell(text):
                self._host.tell(text)
            case ev.JobEnded():
                self.conclude(instruction)
            case _:
                assert_never(instruction)

    def _timer_fired(self, token: str) -> None:
        del self._timers[token]
        self.feed(ev.TimerFired(token))

    def _io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        self.feed(ev.IoDone(token, outcome))

    # ---- slots

    def _request_slot(self, request: str) -> None:
        assert request not in self._requests, request
        self._requests[request] = None
        try:
            self._host.request_slot(request)
        except ClusterError as error:
            self.feed(ev.SlotsGone(str(error)))

    def slot_failed(self, request: str, reason: str, crash: str = "", last_lines: str = "") -> None:
        """The process of this request is no more, or never was. The arguments are those of `SlotLost`."""
        if self._host.slots_gone:
            self.feed(ev.SlotsGone(self._host.slots_gone))
        if request not in self._requests:
            return
        slot = self._requests.pop(request)
        if slot is not None:
            del self._answered[slot]
        if slot is None:
            self.feed(ev.SlotRequestFailed(request, reason))
        elif self._lines.drop(slot) or self._lost.pop(slot, None) is not None:
            said = "\n".join(filter(None, (self._host.last_lines(slot), last_lines)))
            self.feed(ev.SlotLost(slot, reason, crash, said))

    def slot_leaving(self, request: str, reason: str) -> None:
        """What runs for this request has to leave what it runs on."""
        if request not in self._requests:
            return
        slot = self._requests[request]
        if slot is not None:
            self.feed(ev.SlotLeaving(slot, reason))
        else:  # it has not come yet, and is not worth the trouble
            del self._requests[request]
            self._host.abandon(request)
            self.feed(ev.SlotRequestFailed(request, reason))

    def unwanted(self, register: Register) -> str:
        """Why this slot is not wanted, "" if it is: a request is good for one slot, and Spark may run a task again."""
        if self.outcome is not None:
            return "the job has ended"
        if register.request not in self._requests:
            return "its request is closed"
        return "its request was answered before" if self._requests[register.request] is not None else ""

    def slot_registered(self, slot: int, register: Register) -> None:
        """One that is not unwanted. `slot` is a number that no other connection is ever given."""
        assert self._requests[register.request] is None, register
        self._requests[register.request] = slot
        self._answered[slot] = register.request
        self.feed(ev.SlotConnected(slot, register))

    def slot_said(self, slot: int, message: FromSlot) -> None:
        """Never a `Register`."""
        self.feed(ev.SlotMessage(slot, message))

    def slot_lost(self, slot: int, reason: str) -> None:
        """Its connection is gone. How its process has ended, if it has, says more."""
        self._lost[slot] = reason
        self._loop.call_later(EXIT_WAIT_S_MAX, partial(self._lost_without_a_word, slot))

    def _lost_without_a_word(self, slot: int) -> None:
        reason = self._lost.pop(slot, None)
        if reason is not None:
            self._abandon(slot)
            self.feed(ev.SlotLost(slot, reason, last_lines=self._host.last_lines(slot)))

    def _abandon(self, slot: int) -> None:
        """The slot is lost or does not end although released: its process may live on and hold a core."""
        request = self._answered.pop(slot, None)
        if request is not None:
            del self._requests[request]
            self._host.abandon(request)

    # ---- clients

    def ask(self, client: int, request: ClientRequest) -> None:
        """Exactly one `Host.answer` follows, at the latest when the job ends. `client` is a number that never asks again."""
        if client in self._unanswered:
            raise InvariantError(f"client {client} asks a second time")
        self._unanswered[client] = None
        if self.outcome is not None:
            self._answer(client, self.last_reply)
        else:
            self.feed(ev.ClientAsked(client, request))

    def _answer(self, client: int, reply: Reply) -> None:
        if client not in self._unanswered:
            raise InvariantError(f"client {client} is answered, and does not ask")
        del self._unanswered[client]
        self._host.answer(client, reply)

    @property
    def last_reply(self) -> Reply:
        """What everybody is told who asks something of a job that has ended."""
        assert self.outcome is not None
        return Reply(error=f"the job has ended: it {_ENDED_HOW[self.outcome.state]}", status=self.outcome.status)

    # ---- the end

    def conclude(self, outcome: ev.JobEnded) -> None:
        """The end, by the coordinator's word or because it or its host is broken. The first one counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._events.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for client in list(self._unanswered):
            self._answer(client, self.last_reply)
        self._host.ended_with(outcome)
