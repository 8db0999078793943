"""The driver's side of a job: carries out what the Coordinator decides, on a thread of its own.

The Coordinator is a pure machine. This feeds it one event at a time and executes its instructions
in order: slots are asked for from a SlotProvider, connect to our control port, prove themselves and
register; their messages, losses and silences become events; timers and I/O too. Questions come from
the `Job` handle (any thread) or over a connection of the command line. When the job has ended, for
whatever reason, everything that was opened for it is closed before anyone hears of it.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from midstream.coordinator import Coordinator
from midstream.coordinator.events import (
    CancelRequested,
    CancelTimer,
    ClientAsked,
    CloseSlot,
    CoordinatorEvent,
    Instruction,
    IoDone,
    JobEnded,
    JobPlan,
    ReplyTo,
    RequestSlot,
    RunIo,
    Send,
    SetTimer,
    SlotConnected,
    SlotLost,
    SlotMessage,
    SlotRequestFailed,
    SlotsGone,
    Started,
    Tell,
    TimePassed,
    TimerFired,
)
from midstream.core.errors import ClusterError, InvariantError, MidstreamError, StorageError
from midstream.core.row_text import printable
from midstream.core.seams import Done, Failed, Timer
from midstream.protocol.handshake import SECRET_BYTES, Identity, Role
from midstream.protocol.job_status import FailureStatus, JobStatus
from midstream.protocol.messages import ClientRequest, FromSlot, GetLogs, Logged, Register, Reply
from midstream.runtime import registry
from midstream.runtime.capture import levels_set
from midstream.runtime.lines import ClientLine, Lines
from midstream.runtime.logs import JobLogs
from midstream.runtime.loop import EventLoop
from midstream.runtime.provider import SlotLaunch, SlotProvider
from midstream.runtime.storage import FileStorage

END_TIMEOUT_S: Final = 6.0
"""How long peers may take to hear of the end, before they are cut off."""
RELEASE_WAIT_S: Final = 10.0
"""How long the process of a slot that was released may take to end by itself."""
EXIT_WAIT_S: Final = 20.0
"""How long the end of the program waits for its jobs to end."""
TELL_TIME_S: Final = 1.0
EXIT_WAIT_S_MAX: Final = 0.8
"""How long a slot whose connection is gone waits for word of how its process has ended, before it counts as lost. Shorter
than the coordinator waits for the cause of what its peers see of it."""
_ENDED_HOW: Final = {"finished": "finished", "stopped": "was stopped", "failed": "failed"}

_log = logging.getLogger(__name__)
_told = logging.getLogger("midstream")
"""What the users of a job are to hear."""


class CoordinatorMachine(Protocol):
    """`midstream.coordinator.Coordinator`, or a probe in tests."""

    def handle(self, event: CoordinatorEvent, now_ms: int) -> list[Instruction]: ...

    def status(self, now_ms: int) -> JobStatus: ...


class Driver:
    """One job from `start` to its end. Everything but `start`, `ask`, `cancel` and `ended` is the loop's."""

    def __init__(
        self,
        plan: JobPlan,
        slots: SlotProvider,
        make_coordinator: Callable[[JobPlan, int], CoordinatorMachine] | None = None,
    ) -> None:
        """Raises ClusterError when the cluster cannot have as many slots as the job needs."""
        slots.check(plan.graph.slots)
        if make_coordinator is None:
            make_coordinator = partial(Coordinator, open_storage=FileStorage)
        self.plan = plan
        self.ended = threading.Event()
        """Set once all is over and closed; `outcome` is there then."""
        self.awaited = 0
        """How many wait for the end, and hear of a failure from there."""
        self.outcome: JobEnded | None = None
        self._slots = slots
        self._loop = EventLoop("driver", fatal=self._fatal)
        self._coordinator = make_coordinator(plan, self._loop.now_ms())
        self._log_levels = levels_set()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lines = Lines(
            self._loop, self._secret, slots.bind_host, plan.config.heartbeat_timeout_s, self, modules=plan.modules
        )
        self._events: deque[CoordinatorEvent] = deque()
        self._stepping = False
        self._timers: dict[str, Timer] = {}
        self._requests: dict[str, int | None] = {}
        """Requests that are open (None) or that a connected slot answers."""
        self._lost: dict[int, str] = {}
        """Slots whose connection is gone, and how; see `EXIT_WAIT_S_MAX`."""
        self._logs = JobLogs()
        self._client_count = 0
        self._clients: dict[int, ClientLine | Future[Reply]] = {}
        """Who waits for the answer to which question."""
        self._questions: dict[int, Future[Reply]] = {}
        """Questions of other threads that are not answered; their last resort when the loop has ended."""
        self._announced: Path | None = None
        self._thread = threading.Thread(target=self._run, name=f"midstream-{plan.config.name}", daemon=True)

    # ---- for other threads

    def start(self) -> None:
        """The job runs even if the command line cannot be told of it: a service may have no home to write to."""
        try:
            self._announced = registry.announce(
                registry.entry_of_this_process(
                    self.plan.job_id, self.plan.config.name, self._lines.host, self._lines.port, self._secret
                )
            )
        except StorageError as error:
            _log.warning("%s; the job runs all the same, but midstream list, status and stop do not find it", error)
        except BaseException:
            self._lines.close()
            self._slots.close()
            self._loop.close()
            raise
        _running.add(self)
        self._loop.post(self._begin)
        self._thread.start()

    def ask(self, request: ClientRequest) -> Future[Reply]:
        """The answer, in time; an error reply when the job has ended before it."""
        future: Future[Reply] = Future()
        self._questions[id(future)] = future
        self._loop.post(partial(self.client_asked, future, request))
        if self.ended.is_set():  # the loop may have run its last mail before ours
            self._answer_unanswered()
        return future

    def cancel(self, reason: str) -> None:
        """End the job now; returns at once."""
        self._loop.post(partial(self._feed, CancelRequested(reason)))

    # ---- the thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - the job's end must be told whatever it was
            self._conclude_on(error)
        finally:
            self._wind_up()

    def _wind_up(self) -> None:
        """Close everything, then say that it is over. Each step whatever became of the one before."""
        for step in (
            self._lines.close,
            self._slots.close,
            self._loop.close,
            self._withdraw,
        ):
            try:
                step()
            except Exception:  # noqa: BLE001 - logged; the other steps matter as much
                _log.exception("job %s: ending went wrong", self.plan.job_id)
        assert self.outcome is not None
        _running.discard(self)
        self.ended.set()
        self._answer_unanswered()

    def _withdraw(self) -> None:
        if self._announced is not None:
            registry.withdraw(self._announced)

    def _answer_unanswered(self) -> None:
        while self._questions:
            try:
                _, future = self._questions.popitem()
            except KeyError:  # another thread took the last one
                return
            if not future.done():
                future.set_result(self._ended_reply())

    # ---- events and instructions

    def _begin(self) -> None:
        self._lines.start()
        self._feed(Started())
        self._tell_time(self._loop.monotonic_s())

    def _feed(self, event: CoordinatorEvent) -> None:
        """One event after the other: what an instruction brings about at once waits for its turn."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events and self.outcome is None:
                for instruction in self._coordinator.handle(self._events.popleft(), self._loop.now_ms()):
                    self._execute(instruction)
        finally:
            self._stepping = False

    def _tell_time(self, since_s: float) -> None:
        """As a machine that slept has slept: no wait is longer for it than one interval."""
        if self.outcome is not None:
            return
        now_s = self._loop.monotonic_s()
        self._feed(TimePassed(min(now_s - since_s, 2 * TELL_TIME_S)))
        self._loop.call_later(TELL_TIME_S, partial(self._tell_time, now_s))

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Send(slot, message):
                self._lines.send(slot, message)
            case RequestSlot(request):
                self._request_slot(request)
            case CloseSlot(slot, _):
                self._lines.release(slot)
                self._loop.call_later(RELEASE_WAIT_S, partial(self._abandon, slot))
            case SetTimer(token, delay_s):
                assert token not in self._timers, token
                self._timers[token] = self._loop.call_later(delay_s, partial(self._timer_fired, token))
            case CancelTimer(token):
                timer = self._timers.pop(token, None)
                if timer is not None:
                    timer.cancel()
            case RunIo(token, work):
                self._loop.submit(work, partial(self._io_done, token))
            case ReplyTo(client, reply):
                self._reply(client, reply)
            case Tell(text):
                _told.warning("job %s: %s", printable(self.plan.config.name), printable(text))
            case JobEnded():
                self._conclude(instruction)
            case _:
                raise InvariantError(f"the driver does not know the instruction {instruction!r}")

    def _timer_fired(self, token: str) -> None:
        del self._timers[token]
        self._feed(TimerFired(token))

    def _io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        self._feed(IoDone(token, outcome))

    # ---- slots

    def _request_slot(self, request: str) -> None:
        assert request not in self._requests, request
        self._requests[request] = None
        launch = SlotLaunch(
            self._slots.driver_host, self._lines.port, self._secret, self.plan.job_id, request, self._log_levels
        )

        def failed(reason: str, crash: str = "", last_lines: str = "") -> None:
            self._loop.post(partial(self._slot_failed, request, reason, crash, last_lines))

        try:
            self._slots.request(launch, failed)
        except ClusterError as error:
            self._feed(SlotsGone(str(error)))

    def _slot_failed(self, request: str, reason: str, crash: str, last_lines: str) -> None:
        """The provider says that the process of this request is no more, or never was."""
        if self._slots.gone:
            self._feed(SlotsGone(self._slots.gone))
        if request not in self._requests:
            return
        slot = self._requests.pop(request)
        if slot is None:
            self._feed(SlotRequestFailed(request, reason))
        elif self._lines.drop(slot) or self._lost.pop(slot, None) is not None:
            said = "\n".join(filter(None, (self._logs.last_of(slot), last_lines)))
            self._feed(SlotLost(slot, reason, crash, said))

    def _abandon(self, slot: int) -> None:
        """The slot is lost or does not end although released: its process may live on and hold a core."""
        for request, answered_by in list(self._requests.items()):
            if answered_by == slot:
                del self._requests[request]
                self._slots.abandon(request)

    # ---- what the lines tell

    def judge(self, identity: Identity) -> str:
        if identity.job_id != self.plan.job_id:
            return f"this is the driver of job {self.plan.job_id}"
        if identity.role not in (Role.SLOT_CONTROL, Role.CLIENT):
            return "this is a driver's port; it takes slots and clients"
        return ""

    def unwanted(self, register: Register) -> str:
        """A request is good for one slot: a task that Spark runs a second time is turned away."""
        if register.request not in self._requests:
            return "its request is closed"
        return "its request was answered before" if self._requests[register.request] is not None else ""

    def slot_registered(self, slot: int, register: Register) -> None:
        self._requests[register.request] = slot
        self._feed(SlotConnected(slot, register))

    def slot_said(self, slot: int, message: FromSlot) -> None:
        self._feed(SlotMessage(slot, message))

    def slot_logged(self, slot: int, logged: Logged) -> None:
        self._logs.add(slot, logged)

    def slot_lost(self, slot: int, reason: str) -> None:
        """How its process has ended, if it has, says more than that its connection has."""
        self._lost[slot] = reason
        self._loop.call_later(EXIT_WAIT_S_MAX, partial(self._lost_without_a_word, slot))

    def _lost_without_a_word(self, slot: int) -> None:
        reason = self._lost.pop(slot, None)
        if reason is not None:
            self._abandon(slot)
            self._feed(SlotLost(slot, reason, last_lines=self._logs.last_of(slot)))

    def client_asked(self, client: ClientLine | Future[Reply], request: ClientRequest | GetLogs) -> None:
        self._client_count += 1
        self._clients[self._client_count] = client
        if isinstance(request, GetLogs):
            self._reply(self._client_count, Reply(logs=self._logs.since(request.after)))
        elif self.outcome is not None:
            self._reply(self._client_count, self._ended_reply())
        else:
            self._feed(ClientAsked(self._client_count, request))

    def _reply(self, client: int, reply: Reply) -> None:
        asker = self._clients.pop(client)
        if isinstance(asker, ClientLine):
            asker.answer(reply)
            return
        self._questions.pop(id(asker), None)
        if not asker.done():
            asker.set_result(reply)

    def _ended_reply(self) -> Reply:
        assert self.outcome is not None
        return Reply(error=f"the job has ended: it {_ENDED_HOW[self.outcome.state]}", status=self.outcome.status)

    # ---- the end

    def _conclude(self, outcome: JobEnded) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        if outcome.error is not None and not self.awaited:
            _told.warning("job %s failed: %s", printable(self.plan.config.name), printable(str(outcome.error)))
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for client in list(self._clients):
            self._reply(client, self._ended_reply())
        self._loop.call_later(END_TIMEOUT_S, self._loop.stop)
        self._lines.release_all(self._loop.stop)

    def _fatal(self, error: BaseException) -> None:
        """A bug, in midstream or its environment: the job fails with it rather than hang."""
        _log.error("job %s: the driver failed", self.plan.job_id, exc_info=error)
        self._conclude_on(error)

    def _conclude_on(self, error: BaseException) -> None:
        if not isinstance(error, MidstreamError):
            cause = error
            error = InvariantError(f"the driver of job {self.plan.job_id} failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        self._conclude(JobEnded("failed", error, self._last_status(error)))

    def _last_status(self, error: BaseException) -> JobStatus:
        now_ms = self._loop.now_ms()
        try:
            status = msgspec.structs.replace(self._coordinator.status(now_ms), state="failed")
        except Exception as second:  # noqa: BLE001 - the coordinator is what broke; the job must end all the same
            _log.error("job %s: no status to be had: %s", self.plan.job_id, second)
            status = _empty_status(self.plan, now_ms)
        details = "".join(traceback.format_exception(error))
        failure = FailureStatus(now_ms, status.attempt, f"{type(error).__name__}: {error}", details)
        return msgspec.structs.replace(status, failures=(failure, *status.failures))


_running: set[Driver] = set()
"""Drivers whose thread lives. Their jobs end with the program."""


@atexit.register
def end_jobs() -> None:
    """All of this process, with the program. Daemon threads are still running when this is called."""
    drivers = list(_running)
    for driver in drivers:
        driver.cancel("the program that runs the job ends")
    deadline_s = time.monotonic() + EXIT_WAIT_S
    for driver in drivers:
        driver.ended.wait(max(0.0, deadline_s - time.monotonic()))


def _empty_status(plan: JobPlan, now_ms: int) -> JobStatus:
    return JobStatus(
        job_id=plan.job_id,
        name=plan.config.name,
        state="failed",
        attempt=0,
        started_ms=now_ms,
        now_ms=now_ms,
        slots=0,
        slots_needed=plan.graph.slots,
        vertices=(),
        edges=(),
        checkpoints_completed=0,
        checkpoints_failed=0,
        last_checkpoint=None,
        checkpoints=(),
        failures=(),
        restarts=0,
        restored_from=None,
        checkpoint_dir=plan.config.checkpoint_dir,
    )
