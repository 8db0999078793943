"""A blocking connection to a running job on another machine, for the command line: like `runtime.driver.client`, but through a
page.

The link to a job's page identifies the job. The token comes from the link, or from MIDSTREAM_PAGE_TOKEN, since other users of
the machine can read command lines.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from midstream.engine.core.errors import UNDECODABLE, ClusterError, ConfigError, JobError, assert_never
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import GetRows, LiveRows
from midstream.page.address import TOKEN_VARIABLE
from midstream.page.request_types import (
    ActionState,
    Checkpoint,
    Drain,
    LiveRowsRequest,
    Logs,
    Rescale,
    Savepoint,
    StopRequest,
)
from midstream.page.routes import ACTIONS, JSON, LOGS, ROWS, STATUS

ANSWER_BYTES_MAX: Final = 64 * 2**20
TIMEOUT_S: Final = 10.0
"""The timeout of one answer of the page; rows and actions take several answers."""
ROWS_TIMEOUT_S: Final = 20.0
POLL_INTERVAL_S: Final = 0.5
"""The interval at which the state of an action is requested. A page in use waits at the end of its job for the last
request.
"""
SILENCE_S: Final = 30.0
"""How long a page may be unreachable during an action before the action fails."""

_Document = TypeVar("_Document")


def is_link(job: str) -> bool:
    return job.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class PageJob:
    """A job that is reached through its page; its repr does not show the token."""

    job_id: str
    name: str
    page: str
    """The address without the token; it ends in /."""
    token: str | None

    def __repr__(self) -> str:
        return f"PageJob({self.job_id!r}, {self.name!r}, {self.page})"


def job_at(link: str, environ: Mapping[str, str] = os.environ) -> PageJob:
    """Return the job whose page has that link. Raises ConfigError for an invalid link, and otherwise like
    `RemoteClient.ask`.
    """
    try:
        parts = urlsplit(link)
        is_link_to_a_page = bool(parts.hostname) and parts.port != 0 and parts.username is None
    except ValueError:
        is_link_to_a_page = False
    if not is_link_to_a_page:
        raise ConfigError("this is not the link to a job's page, which has the form http://HOST:PORT/#token=…")
    token = next(iter(parse_qs(parts.fragment).get("token", ())), None) or environ.get(TOKEN_VARIABLE)
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ConfigError("the token in the link has characters that are not allowed in tokens; copy the whole link")
    path = parts.path if parts.path.endswith("/") else f"{parts.path}/"
    job = PageJob("", parts.netloc, f"{parts.scheme}://{parts.netloc}{path}", token)
    with RemoteClient(job) as client:
        status = client.request(m.GetStatus(), TIMEOUT_S).status
    assert status is not None
    return PageJob(status.job_id, status.name, job.page, token)


class RemoteClient:
    """Sends requests to a page as `runtime.driver.client.Client` does to a driver, with the same answers. Not thread-safe.

    Raises JobError if the page refuses, ClusterError if it does not answer.
    """

    def __init__(self, job: PageJob) -> None:
        self._job = job
        parts = urlsplit(job.page)
        assert parts.hostname is not None
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._is_tls = parts.scheme == "https"

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each request has a connection of its own."""

    def request(self, request: m.ClientRequest | m.GetLogs | GetRows, timeout_s: float | None = None) -> m.Reply:
        """Send a request and wait for the answer; a checkpoint is answered when it is complete, a stop when the job has
        ended.
        """
        match request:
            case m.GetStatus():
                return m.Reply(status=self._get(STATUS.path, JobStatus))
            case m.GetLogs(after):
                return self._logs(after)
            case GetRows(operator, rows):
                status, body = self._send("POST", ROWS.path, LiveRowsRequest(operator, rows), ROWS_TIMEOUT_S)
                if status == 409:
                    return m.Reply(error=_text(body))
                return m.Reply(rows=self._document(status, body, LiveRows))
            case m.DoCheckpoint():
                return self._act(Checkpoint(), timeout_s)
            case m.DoSavepoint(directory):
                return self._act(Savepoint(directory), timeout_s)
            case m.DoRescale(parallelism):
                return self._act(Rescale(parallelism), timeout_s)
            case m.DoStop(drain, savepoint):
                return self._act(Drain() if drain else StopRequest(savepoint), timeout_s)
            case _:
                assert_never(request)

    def _logs(self, after: int) -> m.Reply:
        status, body = self._send("GET", f"{LOGS.path}?after={after}")
        if status == 410:
            return m.Reply(error=_text(body))
        lines = self._document(status, body, Logs).lines
        return m.Reply(
            logs=tuple(
                m.LogEntry(
                    each.number,
                    each.slot,
                    m.LogLine(each.at_ms, each.text, each.logger, each.level, each.operator, each.uid, each.subtask),
                )
                for each in lines
            )
        )

    def _act(self, action: Checkpoint | Savepoint | Rescale | StopRequest | Drain, timeout_s: float | None) -> m.Reply:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        status, body = self._send("POST", ACTIONS.path, action)
        state = self._document(status, body, ActionState)
        answered_s = time.monotonic()
        while state.state == "waiting":
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise ClusterError(f"job {self._job.name} ({self._job.job_id}) did not answer in time")
            time.sleep(POLL_INTERVAL_S)  # the interval of requests
            try:
                self._get(STATUS.path, JobStatus)  # a page in use serves its final status before it ends
                state = self._get(f"{ACTIONS.path}/{state.id}", ActionState)
                answered_s = time.monotonic()
            except (ClusterError, JobError) as error:  # another driver may have taken its place, without this request
                if isinstance(error, JobError) or time.monotonic() - answered_s > SILENCE_S:
                    raise ClusterError(
                        f"{error}; whether the job has carried out the request ({state.action}) is unknown"
                    ) from error
        if state.state == "failed":
            return m.Reply(error=state.answer or f"{state.action} failed")
        return m.Reply(checkpoint=state.answer or None)

    # ---- HTTP

    def _get(self, path: str, kind: type[_Document]) -> _Document:
        return self._document(*self._send("GET", path), kind)

    def _send(self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Raises ClusterError if there is none."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        headers = {"Accept": JSON}
        if self._job.token is not None:
            headers["Authorization"] = f"Bearer {self._job.token}"
        if body is not None:
            headers["Content-Type"] = JSON
        try:
            encoded = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._path + path.removeprefix("/"), encoded, headers)
            response = connection.getresponse()
            received = response.read(ANSWER_BYTES_MAX + 1)
        except ssl.SSLError as error:
            raise ClusterError(
                f"{self._job.page}: no TLS connection: {error}; check whether https is served there"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            hint = "; check whether https is served there" if self._is_tls and isinstance(error, TimeoutError) else ""
            raise ClusterError(
                f"{self._job.page} does not answer: {_why(error)}; the job may have ended{hint}"
            ) from error
        finally:
            connection.close()
        if len(received) > ANSWER_BYTES_MAX:
            raise ClusterError(
                f"{self._job.page}: an answer of more than {ANSWER_BYTES_MAX >> 20} MiB cannot come from a page"
            )
        return response.status, received

    def _document(self, status: int, body: bytes, kind: type[_Document]) -> _Document:
        page = self._job.page
        if status in (401, 403):
            hint = f"give the whole link that midstream run has printed, with #token=…, or set {TOKEN_VARIABLE}"
            why = "this needs the token of the page" if self._job.token is None else _text(body).partition(":")[0]
            raise JobError(f"{page}: {why}; {hint}")
        if status in (429, 503):
            raise ClusterError(f"{page}: {_text(body)}")
        if status not in (200, 202):
            raise JobError(
                f"{page} answers with status {status}: {_text(body) or 'nothing'}; check that this is the page of a job"
            )
        try:
            return msgspec.json.decode(body, type=kind)
        except UNDECODABLE as error:
            raise JobError(f"{page} is not the page of a job, or of another version of midstream: {error}") from error


def _why(error: Any) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no such host ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "it took too long"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _text(body: bytes) -> str:
    return body[:1000].decode("utf-8", "replace").strip()
