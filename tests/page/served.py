"""A job as a page sees it, without one: it answers what the test has it answer, when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import GetRows
from midstream.engine.protocol.messages import ClientRequest, GetLogs, Reply
from midstream.page.address import PageAddress
from midstream.page.http import Refusal, Request, Response
from midstream.page.site import Site

TOKEN = "a-token-of-the-tests"
WITH_TOKEN = {"authorization": f"Bearer {TOKEN}", "host": "localhost:1"}


class FakeJob:
    """`asked` holds the questions that are not answered; `status`, if given, answers those for the status at once."""

    def __init__(self, status: JobStatus | None = None) -> None:
        self.last: JobStatus | None = None
        self.asked: list[tuple[ClientRequest | GetLogs | GetRows, Future[Reply]]] = []
        self.times_asked = 0
        self._status = status

    def request(self, request: ClientRequest | GetLogs | GetRows) -> Future[Reply]:
        future: Future[Reply] = Future()
        self.times_asked += 1
        if self._status is not None and type(request).__name__ == "GetStatus":
            future.set_result(Reply(status=self._status))
        else:
            self.asked.append((request, future))
        return future


class FakeLoop:
    """Time passes when the test says so; mails are run at once."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def post(self, mail: Callable[[], None]) -> None:
        mail()

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> object:
        self._timers.append((self.now_s + delay_s, mail))
        return None

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = [mail for at_s, mail in self._timers if at_s <= self.now_s]
        self._timers = [(at_s, mail) for at_s, mail in self._timers if at_s > self.now_s]
        for mail in due:
            mail()


class Asking:
    """A site over a FakeJob, and what it has answered."""

    def __init__(self, job: FakeJob, host: str = "127.0.0.1") -> None:
        self.loop = FakeLoop()
        self.job = job
        self.site = Site(self.loop, job, PageAddress(host, 8080), TOKEN)
        self.answers: list[Response] = []

    def get(self, path: str, headers: dict[str, str] | None = None, **query: str) -> Response | None:
        """The answer, if there is one yet."""
        return self.request(Request("GET", path, query, {"host": "localhost:8080"} if headers is None else headers))

    def act(self, body: bytes, headers: dict[str, str] | None = None) -> Response | None:
        return self.request(
            Request("POST", "/actions", {}, {**WITH_TOKEN, "content-type": "application/json", **(headers or {})}, body)
        )

    def request(self, request: Request) -> Response | None:
        before = len(self.answers)
        try:
            self.site.handle(request, self.answers.append)
        except Refusal as refusal:
            assert len(self.answers) == before, "it was answered and refused"
            return refusal.response
        return self.answers[before] if len(self.answers) > before else None
