"""The shell around a coordinator: it carries out the coordinator's instructions, and feeds it events.

The coordinator is a pure machine, and its surroundings differ: threads, sockets and Spark (`midstream.runtime`), a
simulated world (`midstream.simulation`), or a test. The shell is what must be the same in all of them. It feeds one event at
a time and carries out its instructions in order; it matches timers and I/O to their tokens; it lets each requested slot
register once, and reports it lost or abandons it; it answers each request once; and it feeds nothing after the end of
the job. The program
that owns a shell gives it a loop and a `Host`, and reports to it what the host observes. Everything happens on that
loop's thread.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final, Protocol

from midstream.engine.coordinator import events as ev
from midstream.engine.core.errors import ClusterError, InvariantError, assert_never
from midstream.engine.core.interfaces import Clock, Done, Executor, Failed, Timer
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.messages import ClientRequest, FromSlot, Register, Reply, ToSlot

RELEASE_WAIT_S: Final = 10.0
"""The time that the process of a released slot may take to end by itself."""
TIME_INTERVAL_S: Final = 1.0
EXIT_WAIT_S_MAX: Final = 0.8
"""How long the shell waits, once the connection of a slot is closed, for a report of how its process has ended, before
it reports the slot as lost. It is shorter than the coordinator's wait for the cause of a symptom
(`attempt_deployer.CAUSE_WAIT_S`).
"""
_ENDED_HOW: Final = {"finished": "finished", "stopped": "was stopped", "failed": "failed"}


class CoordinatorMachine(Protocol):
    """The interface of `midstream.engine.coordinator.Coordinator`, which tests replace by a probe."""

    def handle(self, event: ev.CoordinatorEvent, now_ms: int) -> list[ev.Instruction]: ...

    def status(self, now_ms: int) -> JobStatus: ...


class ShellLoop(Clock, Executor, Protocol):
    """The loop of the thread on which the shell runs."""


class Connections(Protocol):
    """The connections of registered slots, by the slots' numbers."""

    def send(self, slot: int, message: ToSlot) -> None:
        """Send a message, or drop it if the slot is gone."""
        ...

    def release(self, slot: int) -> None:
        """Send what is queued, then have the slot end; it is not reported lost any more."""
        ...

    def drop(self, slot: int) -> bool:
        """Cut the slot off; it is not reported lost any more. False if it was gone already."""
        ...


class Host(Protocol):
    """The surroundings of a shell: they start slots, and deliver answers, texts and the outcome of the job."""

    @property
    def slots_gone(self) -> str:
        """Why no slot is available any more; empty as long as slots are available. Once set, it stays set."""
        ...

    def request_slot(self, request: str) -> None:
        """Start one more slot. `Shell.slot_failed` follows if that fails, or when its process has ended; before that,
        `Shell.slot_leaving` follows if the host learns that its executor is going to end.

        Raises ClusterError when no slot is available any more.
        """
        ...

    def abandon(self, request: str) -> None:
        """Make sure that the process started for this request ends, even if it hangs."""
        ...

    def last_lines(self, slot: int) -> str:
        """Return the last lines that the slot's tasks have printed and logged, as far as they have arrived."""
        ...

    def answer(self, client: int, reply: Reply) -> None:
        """Deliver the answer to a request. This is called once for each `Shell.request`."""
        ...

    def notify_user(self, text: str) -> None:
        """Show the text to the user immediately."""
        ...

    def ended_with(self, outcome: ev.JobEnded) -> None:
        """The job has ended, and every request has been answered. This is called once."""
        ...


class Shell:
    """Runs a coordinator from `start` until `outcome` is set."""

    def __init__(self, coordinator: CoordinatorMachine, loop: ShellLoop, connections: Connections, host: Host) -> None:
        self.coordinator = coordinator
        self.outcome: ev.JobEnded | None = None
        self._loop = loop
        self._connections = connections
        self._host = host
        self._events: deque[ev.CoordinatorEvent] = deque()
        self._stepping = False
        self._timers: dict[str, Timer] = {}
        self._requests: dict[str, int | None] = {}
        """The requests for slots, each with the slot that has registered for it; None if none has yet."""
        self._answered: dict[int, str] = {}
        """The request of each registered slot."""
        self._lost: dict[int, str] = {}
        """The slots whose connection is closed and that are not reported lost yet, with the reason; see
        `EXIT_WAIT_S_MAX`.
        """
        self._unanswered: dict[int, None] = {}
        """The clients that wait for an answer, in the order of their requests."""

    def start(self) -> None:
        self.feed(ev.Started())
        self._feed_time(self._loop.monotonic_s())

    def cancel(self, reason: str) -> None:
        """End the job now."""
        self.feed(ev.CancelRequested(reason))

    @property
    def slots(self) -> int:
        """The number of slots that are present or requested."""
        return len(self._requests)

    # ---- events and instructions

    def feed(self, event: ev.CoordinatorEvent) -> None:
        """Process an event, or queue it if an instruction of the event that is being processed has led to it."""
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

    def _feed_time(self, since_s: float) -> None:
        """Feed `TimePassed`, of at most two intervals: a suspended computer must not make a wait appear long."""
        if self.outcome is not None:
            return
        now_s = self._loop.monotonic_s()
        self.feed(ev.TimePassed(min(now_s - since_s, 2 * TIME_INTERVAL_S)))
        self._loop.call_later(TIME_INTERVAL_S, partial(self._feed_time, now_s))

    def _execute(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send(slot, message):
                self._connections.send(slot, message)
            case ev.RequestSlot(request):
                self._request_slot(request)
            case ev.CloseSlot(slot, _):
                self._connections.release(slot)
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
            case ev.NotifyUser(text):
                self._host.notify_user(text)
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
        """The process for this request has ended, or could not be started. The arguments are those of `SlotLost`."""
        if self._host.slots_gone:
            self.feed(ev.SlotsGone(self._host.slots_gone))
        if request not in self._requests:
            return
        slot = self._requests.pop(request)
        if slot is not None:
            del self._answered[slot]
        if slot is None:
            self.feed(ev.SlotRequestFailed(request, reason))
        elif self._connections.drop(slot) or self._lost.pop(slot, None) is not None:
            lines = "\n".join(filter(None, (self._host.last_lines(slot), last_lines)))
            self.feed(ev.SlotLost(slot, reason, crash, lines))

    def slot_leaving(self, request: str, reason: str) -> None:
        """The executor or host of the slot for this request is going to end."""
        if request not in self._requests:
            return
        slot = self._requests[request]
        if slot is not None:
            self.feed(ev.SlotLeaving(slot, reason))
        else:  # it has not registered yet: another one is requested in its place
            del self._requests[request]
            self._host.abandon(request)
            self.feed(ev.SlotRequestFailed(request, reason))

    def refusal(self, register: Register) -> str:
        """Return why a slot is refused, "" if it is not: a request is for one slot, but Spark may run its task twice."""
        if self.outcome is not None:
            return "the job has ended"
        if register.request not in self._requests:
            return "its request is closed"
        return "its request was answered before" if self._requests[register.request] is not None else ""

    def slot_registered(self, slot: int, register: Register) -> None:
        """A slot that is not refused has registered. `slot` is a number that no other connection ever gets."""
        assert self._requests[register.request] is None, register
        self._requests[register.request] = slot
        self._answered[slot] = register.request
        self.feed(ev.SlotConnected(slot, register))

    def slot_message(self, slot: int, message: FromSlot) -> None:
        """A slot has sent a message, which is never a `Register`."""
        self.feed(ev.SlotMessage(slot, message))

    def slot_lost(self, slot: int, reason: str) -> None:
        """The connection of a slot is closed. Report it lost after a moment in which its process's end may be reported."""
        self._lost[slot] = reason
        self._loop.call_later(EXIT_WAIT_S_MAX, partial(self._report_lost, slot))

    def _report_lost(self, slot: int) -> None:
        reason = self._lost.pop(slot, None)
        if reason is not None:
            self._abandon(slot)
            self.feed(ev.SlotLost(slot, reason, last_lines=self._host.last_lines(slot)))

    def _abandon(self, slot: int) -> None:
        """Make sure that the process of a lost or released slot ends: it may still run, and occupy a core."""
        request = self._answered.pop(slot, None)
        if request is not None:
            del self._requests[request]
            self._host.abandon(request)

    # ---- clients

    def request(self, client: int, request: ClientRequest) -> None:
        """A client has sent a request. Exactly one `Host.answer` follows, at the latest when the job ends. `client` is
        a number that is never used again.
        """
        if client in self._unanswered:
            raise InvariantError(f"client {client} sends a second request")
        self._unanswered[client] = None
        if self.outcome is not None:
            self._answer(client, self.last_reply)
        else:
            self.feed(ev.ClientRequested(client, request))

    def _answer(self, client: int, reply: Reply) -> None:
        if client not in self._unanswered:
            raise InvariantError(f"client {client} is answered without a request")
        del self._unanswered[client]
        self._host.answer(client, reply)

    @property
    def last_reply(self) -> Reply:
        """The answer to every request to a job that has ended."""
        assert self.outcome is not None
        return Reply(error=f"the job has ended: it {_ENDED_HOW[self.outcome.state]}", status=self.outcome.status)

    # ---- the end

    def conclude(self, outcome: ev.JobEnded) -> None:
        """The job has ended: the coordinator has reported it, or it or its host has failed. The first call counts."""
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
