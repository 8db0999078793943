"""The addresses for programs: one table, which dispatches requests and from which `openapi.json` is generated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import msgspec

from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import LiveRows
from midstream.page.prometheus import CONTENT_TYPE as METRICS_TYPE
from midstream.page.rate_history import RateHistory
from midstream.page.request_types import (
    FORMAT_VERSION,
    Action,
    ActionState,
    FormatVersion,
    LiveRowsRequest,
    Logs,
    LogsQuery,
    MetricsQuery,
    components,
)

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Route:
    """An address. `path` may end in `/{id}`, which stands for digits. Refusals are sentences in plain text."""

    path: str
    method: Literal["GET", "POST"]
    who: Literal["everybody", "readers", "actors"]
    """Who may use a route: readers need the token beyond loopback, actors always."""
    summary: str
    kind: str = JSON
    """The content type of the answer."""
    answer: object = None
    """The type of the answer, if it is a document."""
    query: type[msgspec.Struct] | None = None
    """The type of the query; without one, a query is ignored."""
    body: object = None
    status: int = 200
    refusals: tuple[int, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods; HEAD is GET without the body, except where the token is always needed."""
        return (self.method, "HEAD") if self.method == "GET" and self.who != "actors" else (self.method,)

    def match(self, path: str) -> str | None:
        """Return the `{id}` in `path` (empty if this route has none), or None if it belongs to another route."""
        base, _, parameter = self.path.partition("{")
        if not parameter:
            return "" if path == self.path else None
        return path.removeprefix(base) if path.startswith(base) else None


STATUS: Final = Route(
    "/status.json",
    "GET",
    "readers",
    "The complete status of the job, as midstream status --json prints it",
    answer=JobStatus,
    refusals=(401, 403, 503),
)
RATES: Final = Route(
    "/rates.json",
    "GET",
    "readers",
    "Rates and lag of the last hour, a sample every ten seconds",
    answer=RateHistory,
    refusals=(401, 403),
)
METRICS: Final = Route(
    "/metrics",
    "GET",
    "readers",
    "Metrics in the text format of Prometheus",
    kind=METRICS_TYPE,
    query=MetricsQuery,
    refusals=(400, 401, 403, 503),
)
LOGS: Final = Route(
    "/logs",
    "GET",
    "actors",
    "What the job's functions have printed and logged, as far back as the driver keeps it",
    answer=Logs,
    query=LogsQuery,
    refusals=(400, 401, 403, 410, 429, 503),
)
ROWS: Final = Route(
    "/rows",
    "POST",
    "actors",
    "The next rows that an operator emits or, for a sink, receives. Answered when they arrive, or after 5 s",
    answer=LiveRows,
    body=LiveRowsRequest,
    refusals=(400, 401, 403, 409, 413, 415, 429, 503),
)
ACTIONS: Final = Route(
    "/actions",
    "POST",
    "actors",
    "Request an action; its outcome appears at actions/{id} after a while",
    answer=ActionState,
    body=Action,
    status=202,
    refusals=(400, 401, 403, 413, 415, 429),
)
ACTION: Final = Route(
    "/actions/{id}",
    "GET",
    "actors",
    "The state of an action; the newest ones are kept",
    answer=ActionState,
    refusals=(401, 403, 404),
)
DESCRIPTION: Final = Route("/openapi.json", "GET", "everybody", "This description")
ROUTES: Final = (STATUS, RATES, METRICS, LOGS, ROWS, ACTIONS, ACTION, DESCRIPTION)

_REFUSALS: Final = {
    400: "the request is malformed, or a value in it is invalid",
    401: "the token is needed",
    403: "the token is wrong, or the request comes from a forbidden origin",
    404: "nothing exists there, or no longer",
    409: "there is no such operator, or the job does not run; the text lists the operators",
    410: "the job has ended",
    413: "the body is too large",
    415: "the body is not sent as application/json",
    429: "too many are not answered yet",
    503: "the job's driver is busy: ask again",
}
_DESCRIPTION: Final = (
    "The interface of one job, served by its driver. The token is in the link that midstream run prints, or set by "
    "MIDSTREAM_PAGE_TOKEN. Documents begin with format_version; it grows when a field is removed or changes its "
    "meaning, not when fields are added."
)
_REF: Final = "#/components/schemas/{name}"


@cache
def openapi() -> bytes:
    """Return the OpenAPI 3.1 description of ROUTES; its schemas are those of the types that check requests and write
    answers.
    """
    types = [each for route in ROUTES for each in (route.answer, route.body, route.query) if each is not None]
    schemas, defined = components([*types, FormatVersion], _REF)
    schema_of = dict(zip(map(id, types), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        operation: dict[str, Any] = {
            "operationId": route.path.strip("/").replace("/{", "_").rstrip("}").partition(".")[0],
            "summary": route.summary,
            "security": {"everybody": [], "readers": [{}, {"token": []}], "actors": [{"token": []}]}[route.who],
            "responses": _responses(route, None if route.answer is None else schema_of[id(route.answer)]),
        }
        parameters = [] if route.query is None else _parameters(defined.pop(route.query.__name__))
        if "{id}" in route.path:
            parameters.append(
                {"name": "id", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 1}}
            )
        if parameters:
            operation["parameters"] = parameters
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[id(route.body)]}}}
        paths[route.path] = {route.method.lower(): operation}
    description = {
        "openapi": "3.1.0",
        "info": {"title": "A job of midstream", "version": str(FORMAT_VERSION), "description": _DESCRIPTION},
        "servers": [{"url": ".", "description": "beside this file, below whichever path a proxy has it"}],
        "paths": paths,
        "components": {"schemas": defined, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
    return msgspec.json.format(msgspec.json.encode(description)) + b"\n"


def _responses(route: Route, schema: dict[str, Any] | None) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if schema is not None:
        content["schema"] = {"allOf": [{"$ref": _REF.format(name=FormatVersion.__name__)}, schema]}
    elif route.kind == JSON:
        content["schema"] = {"type": "object"}
    good = {"description": route.summary, "content": {route.kind: content}}
    refused = {
        str(status): {"description": _REFUSALS[status], "content": {TEXT: {"schema": {"type": "string"}}}}
        for status in route.refusals
    }
    return {str(route.status): good, **refused}


def _parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": each}
        for name, each in schema["properties"].items()
    ]
