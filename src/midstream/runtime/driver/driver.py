"""The driver's side of a job: a coordinator in its shell, on a thread of its own.

`engine.coordinator.shell` defines what happens between the two. This module provides what the shell needs: an event loop, a
SlotProvider, the control port at which slots authenticate and register, and users. Requests come from the `Job` handle
(any thread) or over a connection of the command line. When the job has ended, for whatever reason, everything that was
opened for it is closed before the end is reported.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import JobEnded, JobPlan
from midstream.engine.coordinator.shell import CoordinatorMachine, Shell
from midstream.engine.core.error_rows import printable
from midstream.engine.core.errors import InvariantError, MidstreamError, StorageError
from midstream.engine.core.tracebacks import users_part
from midstream.engine.protocol.handshake import SECRET_BYTES, Identity, Role
from midstream.engine.protocol.job_status import FailureStatus, JobStatus
from midstream.engine.protocol.live_rows import GetRows
from midstream.engine.protocol.messages import GetLogs, Reply
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.control_server import ClientConnection, ControlServer, DriverRequest
from midstream.runtime.driver.job_history import KEEP_EVERY_S, HistoryWriter
from midstream.runtime.driver.job_logs import JobLogs
from midstream.runtime.driver.live_row_requests import LiveRowRequests
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.tls import keys_for, tls_shown
from midstream.runtime.process.open_file_limit import DRIVER_OWN, PER_SLOT, allow
from midstream.runtime.process.slot_output import levels_set
from midstream.runtime.process.slot_provider import SlotLaunch, SlotProvider
from midstream.runtime.storage.file_storage import FileStorage

END_TIMEOUT_S: Final = 6.0
"""How long peers may take to learn of the end before they are cut off."""
EXIT_WAIT_S: Final = 20.0
"""How long the end of the program waits for its jobs to end."""

_log = logging.getLogger(__name__)
_user_log = logging.getLogger("midstream")
"""The logger of what users of a job should see."""


class DriverPage(Protocol):
    """Shows the job to users, on a separate thread; see `midstream.page`."""

    link: str

    def begin(self, job: Driver) -> None: ...

    def end(self) -> None:
        """Note that the job has ended; returns immediately."""
        ...


class Driver:
    """Runs one job from `start` to its end. Everything but `start`, `request`, `cancel` and `ended` belongs to the loop."""

    def __init__(
        self,
        plan: JobPlan,
        slots: SlotProvider,
        make_coordinator: Callable[[JobPlan, int], CoordinatorMachine] | None = None,
        page: DriverPage | None = None,
    ) -> None:
        """Listen for slots and commands, without starting the job.

        Raises ClusterError if the cluster cannot have as many slots as the job needs, or no port is free. Raises
        ConfigError if the job's certificate cannot be used.
        """
        slots.check(plan.graph.slots)
        if make_coordinator is None:
            make_coordinator = partial(
                Coordinator, open_storage=FileStorage, stopped=threading.Event(), availability=slots.availability
            )
        keys = keys_for(plan.config.tls, slots.bind_host, secrets.token_bytes(SECRET_BYTES))
        plan = replace(plan, config=msgspec.structs.replace(plan.config, tls=tls_shown(keys)))
        self.plan = plan
        self.page = page
        self.ended = threading.Event()
        """Set once everything is over and closed; then `outcome` is available."""
        self.awaited = 0
        """The number of callers that wait for the end, and learn of a failure from it."""
        self._slots = slots
        self._loop = EventLoop("driver", fatal=self._fatal)
        coordinator = make_coordinator(plan, self._loop.now_ms())
        self._log_levels = levels_set()
        self._keys = keys
        self._server = ControlServer(
            self._loop,
            self._keys,
            slots.bind_host,
            plan.config.heartbeat_timeout_s,
            self,
            modules=plan.modules,
            ports=slots.driver_ports,
        )
        self.shell = Shell(coordinator, self._loop, self._server, self)
        self.logs = JobLogs()
        self.live_rows = LiveRowRequests(self._loop, plan.graph, self._server.send_all, self.answer)
        self._few_descriptors = False
        """Whether the user was warned that there may not be enough descriptors for all slots."""
        self._client_count = 0
        self._clients: dict[int, ClientConnection | Future[Reply]] = {}
        """The recipient of each answer, by request."""
        self._questions: dict[int, Future[Reply]] = {}
        """Unanswered requests of other threads, to be answered when the loop has ended."""
        self._announced: Path | None = None
        self._history: HistoryWriter | None = None
        self._thread = threading.Thread(target=self._run, name=f"midstream-{plan.config.name}", daemon=True)

    @property
    def outcome(self) -> JobEnded | None:
        return self.shell.outcome

    @property
    def last(self) -> JobStatus | None:
        """The final status; None while the job runs and while it is wound up."""
        return self.outcome.status if self.outcome is not None and self.ended.is_set() else None

    # ---- for other threads

    def start(self) -> None:
        """Start the job, even if it cannot be announced to the command line: a service may have no writable home."""
        try:
            entry = job_registry.entry_of_this_process(
                self.plan.job_id,
                self.plan.config.name,
                self._server.host,
                self._server.port,
                self._keys,
                self.page.link if self.page else "",
            )
            self._announced = job_registry.announce(entry)
            self._history = HistoryWriter(entry)
        except StorageError as error:
            _log.warning("%s; the job runs nevertheless, but midstream list, status and stop do not find it", error)
        except BaseException:
            self._server.close()
            self._slots.close()
            self._loop.close()
            raise
        _running.add(self)
        self._loop.post(self._begin)
        if self._history is not None:
            self._history.start()
        self._thread.start()
        if self.page is not None:
            self.page.begin(self)

    def request(self, request: DriverRequest) -> Future[Reply]:
        """Send a request, and return its future answer, an error if the job has ended before it."""
        future: Future[Reply] = Future()
        self._questions[id(future)] = future
        self._loop.post(partial(self.client_requested, future, request))
        if self.ended.is_set():  # the loop may have run its last mail before ours
            self._answer_unanswered()
        return future

    def cancel(self, reason: str) -> None:
        """End the job now; returns immediately."""
        self._loop.post(partial(self.shell.cancel, reason))

    # ---- the thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - any error must be reported as the end of the job
            self._conclude_on(error)
        finally:
            self._wind_up()

    def _wind_up(self) -> None:
        """Close everything, then report the end. Each step runs even if an earlier one has failed."""
        for step in (
            self._keep_last,  # first, since clients that lose the connection look up there how the job ended
            self._server.close,
            self._slots.close,
            self._loop.close,
            self._withdraw,
        ):
            try:
                step()
            except Exception:  # noqa: BLE001 - logged, so that the other steps run
                _log.exception("job %s: ending went wrong", self.plan.job_id)
        assert self.outcome is not None
        _running.discard(self)
        self.ended.set()
        self._answer_unanswered()
        if self.page is not None:
            self.page.end()

    def _withdraw(self) -> None:
        if self._announced is not None:
            job_registry.withdraw(self._announced)

    def _keep_last(self) -> None:
        if self._history is not None and self.outcome is not None:
            self._history.end(msgspec.structs.replace(self.outcome.status, state=self.outcome.state))

    def _answer_unanswered(self) -> None:
        while self._questions:
            try:
                _, future = self._questions.popitem()
            except KeyError:  # another thread took the last one
                return
            if not future.done():
                future.set_result(self.shell.last_reply)

    def _begin(self) -> None:
        self._server.start()
        self.shell.start()
        self._keep()

    def _keep(self) -> None:
        if self._history is not None and self.outcome is None:
            self._history.keep(self.shell.coordinator.status(self._loop.now_ms()))
            self._loop.call_later(KEEP_EVERY_S, self._keep)

    # ---- for the shell: slots

    @property
    def slots_gone(self) -> str:
        return self._slots.gone

    def request_slot(self, request: str) -> None:
        needed = DRIVER_OWN + PER_SLOT * self.shell.slots
        allowed = allow(needed)
        if allowed < needed and not self._few_descriptors:
            self._few_descriptors = True
            self.notify_user(
                f"{self.shell.slots} slots or more need some {needed} open files and connections in this program, "
                f"but {allowed} are allowed: slots above that cannot connect. Raise the hard limit (ulimit -Hn, "
                "LimitNOFILE= of a systemd unit), or lower the parallelism"
            )
        launch = SlotLaunch(
            self._slots.driver_host,
            self._server.port,
            self._keys,
            self.plan.job_id,
            request,
            self._log_levels,
            self._slots.slot_ports,
        )

        def failed(reason: str, crash: str = "", last_lines: str = "") -> None:
            self._loop.post(partial(self.shell.slot_failed, request, reason, crash, last_lines))

        def leaving(reason: str) -> None:
            self._loop.post(partial(self.shell.slot_leaving, request, reason))

        self._slots.request(launch, failed, leaving)

    def abandon(self, request: str) -> None:
        self._slots.abandon(request)

    def last_lines(self, slot: int) -> str:
        return self.logs.last_of(slot)

    # ---- what the connections report

    def identity_refusal(self, identity: Identity) -> str:
        if identity.job_id != self.plan.job_id:
            return f"this is the driver of job {self.plan.job_id}"
        if identity.role not in (Role.SLOT_CONTROL, Role.CLIENT):
            return "this is a driver's port, which accepts slots and clients"
        return ""

    def client_requested(self, client: ClientConnection | Future[Reply], request: DriverRequest) -> None:
        self._client_count += 1
        self._clients[self._client_count] = client
        if isinstance(request, GetLogs):
            self.answer(self._client_count, Reply(logs=self.logs.since(request.after)))
        elif isinstance(request, GetRows):
            self.live_rows.request(self._client_count, request)
        else:
            self.shell.request(self._client_count, request)

    # ---- for the shell: users, and the end

    def answer(self, client: int, reply: Reply) -> None:
        requester = self._clients.pop(client)
        if isinstance(requester, ClientConnection):
            requester.answer(reply)
            return
        self._questions.pop(id(requester), None)
        if not requester.done():
            requester.set_result(reply)

    def notify_user(self, text: str) -> None:
        _user_log.warning("job %s: %s", printable(self.plan.config.name), printable(text))

    def ended_with(self, outcome: JobEnded) -> None:
        if outcome.error is not None and not self.awaited:
            _user_log.warning("job %s failed: %s", printable(self.plan.config.name), printable(str(outcome.error)))
        self._loop.call_later(END_TIMEOUT_S, self._loop.stop)
        self._server.release_all(self._loop.stop)

    def _fatal(self, error: BaseException) -> None:
        """Fail the job because of a bug, in midstream or its environment, rather than let it hang."""
        _log.error("job %s: the driver failed", self.plan.job_id, exc_info=error)
        self._conclude_on(error)

    def _conclude_on(self, error: BaseException) -> None:
        if not isinstance(error, MidstreamError):
            cause = error
            error = InvariantError(f"the driver of job {self.plan.job_id} failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        self.shell.conclude(JobEnded("failed", error, self._last_status(error)))

    def _last_status(self, error: BaseException) -> JobStatus:
        now_ms = self._loop.now_ms()
        try:
            status = msgspec.structs.replace(self.shell.coordinator.status(now_ms), state="failed")
        except Exception as second:  # noqa: BLE001 - the coordinator itself failed; the job must end nevertheless
            _log.error("job %s: no status available: %s", self.plan.job_id, second)
            status = _empty_status(self.plan, now_ms)
        details = "".join(traceback.format_exception(error))
        failure = FailureStatus(
            now_ms, status.attempt, f"{type(error).__name__}: {error}", details, users_part(details)
        )
        return msgspec.structs.replace(status, failures=(failure, *status.failures))


_running: set[Driver] = set()
"""Drivers whose thread is alive. Their jobs end with the program."""


@atexit.register
def end_jobs() -> None:
    """End all jobs of this process, with the program. Daemon threads are still running when this is called."""
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
