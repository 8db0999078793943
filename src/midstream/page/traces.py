"""Checkpoints and restarts of a job as OpenTelemetry spans; the extra `midstream[otel]`.

The variable `OTEL_TRACES_EXPORTER` enables them, as for every program with OpenTelemetry. `Watch`, which makes
spans of what is new in a status, is pure; nothing of OpenTelemetry is imported unless it is enabled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final

import msgspec

from midstream.engine.core.errors import ConfigError
from midstream.engine.protocol.job_status import CheckpointStatus, FailureStatus, JobStatus

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

VARIABLE: Final = "OTEL_TRACES_EXPORTER"


@dataclass(frozen=True, slots=True)
class Span:
    """A span. `began_ms` and `ended_ms` are since 1970. `error`: why what it stands for failed."""

    name: str
    began_ms: int
    ended_ms: int
    attributes: dict[str, str | int | float | bool]
    error: str = ""
    exception: FailureStatus | None = None
    """The failure with which the span begins."""
    children: tuple[Span, ...] = ()


@dataclass(slots=True)
class Watch:
    """Yields each checkpoint that has completed or failed, and each finished restart, once."""

    _reported: set[tuple[int, int]] = field(default_factory=set)
    """Reported checkpoints by id and beginning, as far as the status still has them."""
    _failures: tuple[FailureStatus, ...] = ()
    _restarting: list[FailureStatus] = field(default_factory=list)

    def take(self, status: JobStatus) -> list[Span]:
        """Return the spans that `status` has and no earlier one had, oldest first."""
        over = [each for each in reversed(status.checkpoints) if each.state in ("completed", "failed")]
        spans = [_of_checkpoint(status, each) for each in over if (each.id, each.created_ms) not in self._reported]
        self._reported = {(each.id, each.created_ms) for each in over}
        self._restarting += [each for each in reversed(status.failures) if each not in self._failures]
        self._failures = status.failures
        if status.state == "running" or status.has_ended:
            spans += [_of_restart(status, each) for each in self._restarting]
            self._restarting.clear()
        return spans


def _of_checkpoint(status: JobStatus, checkpoint: CheckpointStatus) -> Span:
    stored_ms = checkpoint.created_ms + checkpoint.duration_ms
    ended_ms = stored_ms + checkpoint.metadata_ms
    failed = checkpoint.state == "failed"
    children = [
        Span(
            "subtasks",
            checkpoint.created_ms,
            stored_ms,
            {
                "midstream.checkpoint.subtasks": checkpoint.tasks,
                "midstream.checkpoint.subtasks_done": checkpoint.tasks_done,
                "midstream.checkpoint.last_subtask": checkpoint.last,
                "midstream.checkpoint.alignment_max_ms": checkpoint.alignment_ms,
            },
            children=_phases(checkpoint),
        )
    ]
    if not failed:
        children.append(Span("metadata", stored_ms, ended_ms, {}))
    attributes = {
        **_job(status),
        "midstream.checkpoint.id": checkpoint.id,
        "midstream.checkpoint.savepoint": checkpoint.is_savepoint,
        "midstream.checkpoint.state_bytes": checkpoint.state_bytes,
        "midstream.checkpoint.in_flight_bytes": checkpoint.in_flight_bytes,
    }
    error = (checkpoint.reason or "the checkpoint failed") if failed else ""
    return Span("checkpoint", checkpoint.created_ms, ended_ms, attributes, error, children=tuple(children))


def _phases(checkpoint: CheckpointStatus) -> tuple[Span, ...]:
    """Return the consecutive phases of the subtask that acknowledged last."""
    if checkpoint.phases is None:
        return ()
    spans: list[Span] = []
    began_ms = float(checkpoint.created_ms)
    for name, took_ms in msgspec.structs.asdict(checkpoint.phases).items():
        spans.append(Span(name.removesuffix("_ms"), round(began_ms), round(began_ms + took_ms), {}))
        began_ms += took_ms
    return tuple(spans)


def _of_restart(status: JobStatus, failure: FailureStatus) -> Span:
    """Return the span from the failure until the job was seen to run again, or had ended."""
    return Span(
        "restart",
        failure.at_ms,
        max(failure.at_ms, status.now_ms),
        {**_job(status), "midstream.attempt": failure.attempt},
        failure.summary if status.has_ended else "",
        failure,
    )


def _job(status: JobStatus) -> dict[str, str | int | float | bool]:
    return {"midstream.job.name": status.name, "midstream.job.id": status.job_id}


def open_traces(environ: Mapping[str, str] = os.environ) -> Traces | None:
    """Return the traces, or None unless OTEL_TRACES_EXPORTER enables them.

    Spans go to the tracer provider that the program has set; if it has set none, to the endpoint
    OTEL_EXPORTER_OTLP_ENDPOINT. Raises ConfigError without the extra, and for an unknown exporter or protocol.
    """
    exporter = environ.get(VARIABLE, "").strip()
    if exporter in ("", "none"):
        return None
    try:
        trace = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        exporting = import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"{VARIABLE}={exporter} enables traces, but a package that they need is missing ({error}): "
            f"pip install 'midstream[otel]', or set {VARIABLE}=none"
        ) from error
    provider = trace.get_tracer_provider()
    if isinstance(provider, sdk.TracerProvider):  # the program's own; it is also the program's to shut down
        return Traces(provider)
    if exporter != "otlp":
        raise ConfigError(
            f"{VARIABLE}: {exporter!r} is neither otlp nor none, and the program has set no tracer provider"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise ConfigError(
                f"{name}: {protocol!r}; traces are sent as http/protobuf, to port 4318 of most collectors"
            )
    name = environ.get("OTEL_SERVICE_NAME") or "midstream"
    resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": name})
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(exporting.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return Traces(provider, provider.shutdown)


class Traces:
    """Sends the spans of one job to a tracer provider; a JobObserver.

    `shutdown`: for a provider that is for this job alone; it sends what is left.
    """

    what = "traces"

    def __init__(self, provider: TracerProvider, shutdown: Callable[[], None] = lambda: None) -> None:
        self._provider = provider
        self._watch = Watch()
        self.close = shutdown

    def observe(self, status: JobStatus) -> None:
        for span in self._watch.take(status):
            self.export(span)

    def export(self, span: Span, parent: object = None) -> None:
        """Pass one span and its children to the provider."""
        from opentelemetry import context as otel_context
        from opentelemetry import trace

        tracer = self._provider.get_tracer("midstream")
        context = otel_context.Context() if parent is None else trace.set_span_in_context(parent)  # type: ignore[arg-type]
        made = tracer.start_span(span.name, context, attributes=span.attributes, start_time=span.began_ms * 1_000_000)
        if span.exception is not None:
            described = {
                "exception.type": span.exception.summary.partition(":")[0],
                "exception.message": span.exception.summary,
                "exception.stacktrace": span.exception.details,
            }
            made.add_event("exception", described, span.began_ms * 1_000_000)
        for child in span.children:
            self.export(child, made)
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        made.end(span.ended_ms * 1_000_000)
