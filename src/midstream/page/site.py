"""How the page answers each request: its own files, the job's status and metrics, and actions.

| address | what it is | token |
|---|---|---|
| `/` and the other files of the page: scripts and `page.css` | the page itself, the same for every job | never |
| `GET status.json`, `rates.json`, `metrics[?subtasks=1]` | read only | outside loopback |
| `POST rows` | the next rows that an operator emits | always |
| `openapi.json` | the API of this page, the same for every job | never |
| `GET logs` | read only, and may hold what functions print of the rows | always |
| `POST actions`, `GET actions/ID` | a request to the job, and what has become of it | always |

Without a token a request counts as one from this machine only if it names this machine (`Host`): otherwise a website
could point its own name at loopback and read the data. Actions must also come from the page itself, as far as browsers
report the origin; the token is not in a cookie, so no browser sends it by itself.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Final, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from midstream.engine.core.errors import UNDECODABLE, ConfigError, assert_never
from midstream.engine.core.interfaces import Mail
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import GetRows
from midstream.page.address import PageAddress, is_loopback
from midstream.page.http import Refusal, Request, Response
from midstream.page.prometheus import metrics_text
from midstream.page.rate_history import STEP_S, RateRecorder
from midstream.page.request_types import (
    Action,
    ActionState,
    Checkpoint,
    Drain,
    LiveRowsRequest,
    LogsQuery,
    MetricsQuery,
    Rescale,
    Savepoint,
    StopRequest,
    document,
    logs_of,
)
from midstream.page.routes import (
    ACTION,
    ACTIONS,
    DESCRIPTION,
    JSON,
    LOGS,
    METRICS,
    RATES,
    ROUTES,
    ROWS,
    STATUS,
    Route,
    openapi,
)
from midstream.runtime.driver.control_server import DriverRequest
from midstream.runtime.storage.file_storage import absolute

STATUS_AGE_S_MAX: Final = 0.25
"""How long one status serves all requests: many viewers cost the driver no more than one."""
ANSWER_S_MAX: Final = 5.0
"""The time without an answer of the driver after which readers get the answer that it is busy."""
WAITING_MAX: Final = 64
ACTIONS_OPEN_MAX: Final = 8
ROWS_OPEN_MAX: Final = 8
ROWS_S_MAX: Final = 10.0
ACTIONS_KEPT: Final = 32
LOGS_OPEN_MAX: Final = 8

FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/actions.js": ("actions.js", "text/javascript; charset=utf-8"),
    "/findings.js": ("findings.js", "text/javascript; charset=utf-8"),
    "/graph.js": ("graph.js", "text/javascript; charset=utf-8"),
    "/logs.js": ("logs.js", "text/javascript; charset=utf-8"),
    "/rows.js": ("rows.js", "text/javascript; charset=utf-8"),
    "/text.js": ("text.js", "text/javascript; charset=utf-8"),
}

Respond: TypeAlias = Callable[[Response], None]
_Query = TypeVar("_Query", bound=msgspec.Struct)


class Served(Protocol):
    """The part of a Driver that a page needs. Callable from any thread."""

    @property
    def last(self) -> JobStatus | None:
        """The final status; None while the job runs."""
        ...

    def request(self, request: DriverRequest) -> Future[m.Reply]: ...


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended and is known only by its record."""

    last: JobStatus

    def request(self, request: DriverRequest) -> Future[m.Reply]:
        """Refuse every request: there is no driver any more."""
        refused: Future[m.Reply] = Future()
        refused.set_result(m.Reply(error="the job has ended", status=self.last))
        return refused


class PageLoop(Protocol):
    """The page's own loop."""

    def now_ms(self) -> int: ...

    def monotonic_s(self) -> float: ...

    def post(self, mail: Mail) -> None: ...

    def call_later(self, delay_s: float, mail: Mail) -> object: ...


class Site:
    """Answers requests, on the page's thread. `handle` answers each request once, sooner or later; a refusal is an
    answer too.
    """

    def __init__(self, loop: PageLoop, job: Served, address: PageAddress, token: str) -> None:
        self._loop = loop
        self._job = job
        self._address = address
        self._token = token.encode()
        self._files = {path: (_file(name), kind) for path, (name, kind) in FILES.items()}
        self._status: JobStatus | None = None
        self._status_s = 0.0
        self._is_requesting = False
        self._waiting: OrderedDict[int, tuple[Callable[[JobStatus], Response], Respond]] = OrderedDict()
        """Requests that wait for the status that was requested from the driver."""
        self._count = 0
        self._actions: OrderedDict[int, ActionState] = OrderedDict()
        self._rows: dict[int, Respond] = {}
        """Requests that wait for rows."""
        self._logs: dict[int, Respond] = {}
        """Requests that wait for logs."""
        self._answers: dict[Route, Callable[[Request, str, Respond], None]] = {
            STATUS: self._show_status,
            RATES: self._show_rates,
            METRICS: self._show_metrics,
            LOGS: self._show_logs,
            ROWS: self._show_rows,
            ACTIONS: self._start_action,
            ACTION: self._show_action,
            DESCRIPTION: _describe,
        }
        self.watched_s: float | None = None
        """When the status was last requested."""
        self._rates = RateRecorder()
        self._is_sampling = False
        loop.call_later(STEP_S, self._sample)

    def handle(self, request: Request, respond: Respond) -> None:
        """Answer `request`, with `respond`, now or later. Raises Refusal instead of answering."""
        path = request.path
        if path in self._files:
            _only(request, "GET", "HEAD")
            body, kind = self._files[path]
            respond(Response(200, body, kind))
            return
        for route in ROUTES:
            found = route.match(path)
            if found is not None:
                _only(request, *route.methods)
                if route.who == "readers":
                    self._check_reader(request)
                elif route.who == "actors":
                    self._check_actor(request)
                self._answers[route](request, found, respond)
                return
        raise Refusal(404, "this page has no such address")

    # ---- who may

    def _check_reader(self, request: Request) -> None:
        if "authorization" in request.headers:
            self._check_token(request)
        elif not self._address.is_loopback:
            raise Refusal(401, "this page is served beyond its machine: its data is only shown with the token")
        elif not is_loopback(_host_of(request.headers.get("host", ""))):
            raise Refusal(
                403,
                "without the token this page is for requests to localhost or 127.0.0.1: behind a proxy, open the link "
                "with the token",
            )

    def _check_actor(self, request: Request) -> None:
        self._check_token(request)
        site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        if site is not None:
            foreign = site not in ("same-origin", "none")
        else:
            foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
        if foreign:
            raise Refusal(403, "the request comes from another site")

    def _check_token(self, request: Request) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if not token:
            raise Refusal(401, "this needs the token of the page: open the link that midstream run has printed")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise Refusal(403, "the token is not that of this job: open the link that midstream run has printed")

    # ---- status

    def _show_status(self, request: Request, _: str, respond: Respond) -> None:
        self.watched_s = self._loop.monotonic_s()
        self._with_status(lambda status: Response(200, status_json(status), JSON), respond)

    def _show_rates(self, request: Request, _: str, respond: Respond) -> None:
        respond(Response(200, document(self._rates.history()), JSON))

    def _sample(self) -> None:
        """Add a sample to the history every STEP_S, unless the driver has not answered the last request."""
        if self._job.last is not None:
            self._rates.add(self._job.last)
            return
        self._loop.call_later(STEP_S, self._sample)
        if not self._is_sampling:
            self._is_sampling = True
            self._request(m.GetStatus(), self._add_sample)

    def _add_sample(self, reply: m.Reply) -> None:
        self._is_sampling = False
        if reply.status is not None:
            self._rates.add(reply.status)

    def _show_metrics(self, request: Request, _: str, respond: Respond) -> None:
        per_subtask = _query(request, MetricsQuery).subtasks
        self._with_status(
            lambda status: Response(200, metrics_text(status, per_subtask).encode(), METRICS.kind), respond
        )

    def _with_status(self, view: Callable[[JobStatus], Response], respond: Respond) -> None:
        status = self._recent_status()
        if status is not None:
            respond(view(status))
            return
        if len(self._waiting) >= WAITING_MAX:
            raise Refusal(503, "too many readers wait for the status")
        self._count += 1
        self._waiting[self._count] = view, respond
        self._loop.call_later(ANSWER_S_MAX, partial(self._give_up, self._count))
        if not self._is_requesting:
            self._is_requesting = True
            self._request(m.GetStatus(), self._take)

    def _recent_status(self) -> JobStatus | None:
        """Return the final status, or one that is recent enough."""
        if self._job.last is not None:
            return self._job.last
        if self._status is not None and self._loop.monotonic_s() - self._status_s < STATUS_AGE_S_MAX:
            return self._status
        return None

    def _request(self, request: DriverRequest, then: Callable[[m.Reply], None]) -> None:
        """Send a request to the job, and handle the reply on the page's thread."""
        self._job.request(request).add_done_callback(lambda future: self._loop.post(partial(then, future.result())))

    def _take(self, reply: m.Reply) -> None:
        self._is_requesting = False
        if reply.status is None:
            return  # each request is answered when its time is over
        self._status, self._status_s = reply.status, self._loop.monotonic_s()
        waiting, self._waiting = self._waiting, OrderedDict()
        for view, respond in waiting.values():
            respond(view(reply.status))

    def _give_up(self, number: int) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting[1](_busy(ANSWER_S_MAX))

    def _answer_in_time(
        self,
        request: DriverRequest,
        view: Callable[[m.Reply], Response],
        respond: Respond,
        waiting: dict[int, Respond],
        within_s: float,
    ) -> None:
        """Send a request to the job; respond with the view of its reply, or that the driver is busy if none comes in time."""
        self._count += 1
        number = self._count
        waiting[number] = respond

        def answered(response: Response) -> None:
            if waiting.pop(number, None) is not None:  # else the other response was first
                respond(response)

        self._loop.call_later(within_s, lambda: answered(_busy(within_s)))
        self._request(request, lambda reply: answered(view(reply)))

    # ---- logs

    def _show_logs(self, request: Request, _: str, respond: Respond) -> None:
        query = _query(request, LogsQuery)
        if self._job.last is not None:
            raise Refusal(410, "the job has ended, and its logs with it")
        if len(self._logs) >= LOGS_OPEN_MAX:
            raise Refusal(429, f"{LOGS_OPEN_MAX} requests for logs are not answered yet")

        def view(reply: m.Reply) -> Response:
            if reply.error:
                return Refusal(410, reply.error).response
            return Response(200, document(logs_of(reply.logs, query)), JSON)

        self._answer_in_time(m.GetLogs(query.after), view, respond, self._logs, ANSWER_S_MAX)

    # ---- rows

    def _show_rows(self, request: Request, _: str, respond: Respond) -> None:
        """Answer with the next batch, or when none has come in time."""
        _check_json(request, "a request for rows")
        try:
            look = _rows_requests.decode(request.body)
        except UNDECODABLE as error:
            raise Refusal(400, f"the request for rows is invalid: {error}") from error
        if len(self._rows) >= ROWS_OPEN_MAX:
            raise Refusal(429, f"{ROWS_OPEN_MAX} requests for rows are not answered yet")

        def view(reply: m.Reply) -> Response:
            if reply.rows is None:
                return Refusal(409, reply.error).response
            return Response(200, document(reply.rows), JSON)

        self._answer_in_time(GetRows(look.operator, look.rows), view, respond, self._rows, ROWS_S_MAX)

    # ---- actions

    def _start_action(self, request: Request, _: str, respond: Respond) -> None:
        _check_json(request, "an action")
        try:
            action = _actions.decode(request.body)
            job_request = _request_of(action)
        except (*UNDECODABLE, ConfigError) as error:
            raise Refusal(400, f"the action is invalid: {error}") from error
        if sum(known.state == "waiting" for known in self._actions.values()) >= ACTIONS_OPEN_MAX:
            raise Refusal(429, f"{ACTIONS_OPEN_MAX} actions are not answered yet")
        self._count += 1
        number = self._count
        state = ActionState(number, type(action).__name__.lower(), "waiting", self._loop.now_ms())
        self._actions[number] = state
        while len(self._actions) > ACTIONS_KEPT:
            self._actions.popitem(last=False)
        respond(Response(ACTIONS.status, document(state), JSON))
        self._request(job_request, partial(self._done, number))

    def _done(self, number: int, reply: m.Reply) -> None:
        if number in self._actions:
            self._actions[number] = msgspec.structs.replace(
                self._actions[number],
                state="failed" if reply.error else "done",
                answer=reply.error or reply.checkpoint or "",
            )

    def _show_action(self, request: Request, number: str, respond: Respond) -> None:
        state = self._actions.get(int(number)) if number.isdecimal() and len(number) < 10 else None
        if state is None:
            raise Refusal(404, "there is no such action, or too many have followed it")
        respond(Response(200, document(state), JSON))


_actions: Final = msgspec.json.Decoder(Action)
_rows_requests: Final = msgspec.json.Decoder(LiveRowsRequest)


def _check_json(request: Request, what: str) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refusal(415, f"{what} is sent as {JSON}")


def status_json(status: JobStatus) -> bytes:
    """Return the status as `midstream status --json` prints it; of a long traceback, the end."""
    return document(status.shortened())


def _request_of(action: Action) -> m.ClientRequest:
    match action:
        case Checkpoint():
            return m.DoCheckpoint()
        case Savepoint():
            return m.DoSavepoint(None if action.directory is None else absolute(action.directory))
        case Rescale():
            return m.DoRescale(action.parallelism)
        case StopRequest():
            return m.DoStop(savepoint=None if action.savepoint is None else absolute(action.savepoint))
        case Drain():
            return m.DoStop(drain=True)
        case _:
            assert_never(action)


def _describe(request: Request, _: str, respond: Respond) -> None:
    respond(Response(200, openapi(), JSON))


def _query(request: Request, kind: type[_Query]) -> _Query:
    try:
        return msgspec.convert(request.query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refusal(400, f"invalid query in the address: {error}") from error


def _busy(within_s: float) -> Response:
    return Refusal(503, f"the job's driver has not answered for {within_s:g} s: it is busy").response


def _only(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise Refusal(405, f"this address accepts {' and '.join(methods)}")


def _host_of(header: str) -> str:
    """Return the host of `Host: name:port`; an IPv6 address without its brackets."""
    if header.startswith("["):
        inside, closed, _ = header[1:].partition("]")
        return inside if closed else ""
    return header.rpartition(":")[0] if ":" in header else header


def _file(name: str) -> bytes:
    return resources.files("midstream.page").joinpath("static").joinpath(name).read_bytes()
