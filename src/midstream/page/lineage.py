"""What a job reads and writes, and when it starts and ends, as OpenLineage events; the extra `midstream[openlineage]`.

The variables of OpenLineage's own clients enable and configure them. Every start of a job is a run. `RunEvents`, which
decides what is reported, is pure; nothing of OpenLineage is imported unless it is enabled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import pyarrow as pa

from midstream.connectors.common.dataset_uris import without_password
from midstream.engine.core.errors import ConfigError, text_of
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.table_join import TableJoinOperator
from midstream.engine.protocol.job_status import JobStatus
from midstream.page.job_observers import THREAD_END_S

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient

URL: Final = "OPENLINEAGE_URL"
_CONFIGURED_BY: Final = (URL, "OPENLINEAGE_CONFIG", "OPENLINEAGE__TRANSPORT", "OPENLINEAGE__TRANSPORT__TYPE")
RUNNING_EVERY_MS: Final = 60_000
_ENDS: Final = {"finished": "COMPLETE", "stopped": "ABORT", "failed": "FAIL"}
_PATHS_OF_ROOT: Final = ("file", "hdfs")
"""The schemes whose datasets are named by absolute paths."""
_PRODUCER: Final = "https://pypi.org/project/midstream"

_log = logging.getLogger(__name__)


@runtime_checkable
class HasDatasets(Protocol):
    """A source, a sink, or a table that is joined."""

    def datasets(self) -> Sequence[str]: ...


class RunEvents:
    """Decides which events a status is reported by."""

    def __init__(self) -> None:
        self._began = False
        self._running_ms: int | None = None

    def take(self, status: JobStatus) -> list[tuple[str, int]]:
        """Return the types of the events that are due, each with its time in milliseconds since 1970."""
        events = [] if self._began else [("START", status.started_ms)]
        self._began = True
        if status.has_ended:
            return [*events, (_ENDS[status.state], status.now_ms)]
        if status.state == "running" and (
            self._running_ms is None or status.now_ms >= self._running_ms + RUNNING_EVERY_MS
        ):
            self._running_ms = status.now_ms
            events.append(("RUNNING", status.now_ms))
        return events


@dataclass(slots=True)
class _End:
    """A source, a sink or a joined table of the job."""

    name: str
    owner: HasDatasets
    columns: pa.Schema | None
    datasets: Sequence[tuple[str, str]] = ()
    """The namespaces and names of the datasets, once they are known."""


def dataset_of(uri: object) -> tuple[str, str]:
    """Return OpenLineage's namespace and name of a dataset. Raises ValueError for what is no URI."""
    scheme, _, rest = uri.partition("://") if isinstance(uri, str) else ("", "", "")
    if not (scheme and rest):
        raise ValueError(f"{uri!r} is not a URI such as s3://bucket/orders")
    server, _, path = rest.partition("/")  # names of tables and topics are not URLs: '?' and '#' belong to them
    server = without_password(scheme, server)
    namespace = "file" if scheme == "file" and not server else f"{scheme}://{server}"
    return namespace, f"/{path}" if scheme in _PATHS_OF_ROOT else path.lstrip("/") or "/"


def _inputs_of(graph: JobGraph) -> Iterator[_End]:
    for vertex in graph.vertices:
        if vertex.source is not None:
            yield _End(vertex.source.name, vertex.source.source, vertex.source.source.schema)
        for spec in vertex.operators:
            if isinstance(spec.operator, TableJoinOperator) and isinstance(spec.operator.loader, HasDatasets):
                yield _End(spec.name, spec.operator.loader, None)


def _outputs_of(graph: JobGraph) -> Iterator[_End]:
    for vertex in graph.vertices:
        for spec in vertex.operators:
            if spec.sink is not None:
                yield _End(spec.name, spec.sink, getattr(spec.operator, "schema", None))


def open_lineage(graph: JobGraph, environ: Mapping[str, str] = os.environ) -> Lineage | None:
    """Return the lineage of a job, or None unless variables of OpenLineage configure where events go.

    Raises ConfigError without the extra, and for a configuration that OpenLineage refuses.
    """
    set_by = next((name for name in _CONFIGURED_BY if environ.get(name, "").strip()), None)
    if set_by is None or environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return None
    try:
        client = import_module("openlineage.client").OpenLineageClient
    except ImportError as error:
        raise ConfigError(
            f"{set_by} enables lineage events, but a package that they need is missing ({error}): "
            "pip install 'midstream[openlineage]', or set OPENLINEAGE_DISABLED=true"
        ) from error
    try:
        configured = client()
    except Exception as error:  # the transports of others raise what they like
        raise ConfigError(f"{set_by}: OpenLineage refuses its configuration: {text_of(error)}") from error
    return Lineage(configured, graph, environ.get("OPENLINEAGE_NAMESPACE", "").strip() or "default")


class Lineage:
    """Sends the events of one run of a job; a JobObserver.

    An event that cannot be sent is dropped, with a warning for the first of several.
    """

    what = "lineage events"

    def __init__(self, client: OpenLineageClient, graph: JobGraph, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._events = RunEvents()
        self._inputs, self._outputs = list(_inputs_of(graph)), list(_outputs_of(graph))
        sources = [vertex.source.source for vertex in graph.vertices if vertex.source is not None]
        self._processing = "BATCH" if all(source.bounded for source in sources) else "STREAMING"
        self._is_failing = False

    def observe(self, status: JobStatus) -> None:
        for kind, at_ms in self._events.take(status):
            try:
                self._client.emit(self._event(kind, at_ms, status))
            except Exception as error:  # noqa: BLE001 - transports raise what they like; lineage is no reason to end a job
                if not self._is_failing:
                    _log.warning("job %s: the lineage event %s was not sent: %s", status.name, kind, text_of(error))
                self._is_failing = True
            else:
                self._is_failing = False

    def close(self) -> None:
        self._client.close(THREAD_END_S)

    def _event(self, kind: str, at_ms: int, status: JobStatus) -> Any:
        from openlineage.client import event_v2 as events
        from openlineage.client.facet_v2 import error_message_run, job_type_job, processing_engine_run
        from openlineage.client.uuid import generate_static_uuid

        run_facets: dict[str, Any] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(version("midstream"), "midstream")
        }
        if kind == "FAIL" and status.failures:
            failure = status.failures[0]
            run_facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                failure.summary, "python", failure.details
            )
        run_id = generate_static_uuid(_time(status.started_ms), status.job_id.encode())
        job_facets: dict[str, Any] = {"jobType": job_type_job.JobTypeJobFacet(self._processing, "MIDSTREAM", "JOB")}
        return events.RunEvent(
            eventTime=_time(at_ms).isoformat(timespec="milliseconds"),
            eventType=events.RunState[kind],
            producer=_PRODUCER,
            run=events.Run(str(run_id), run_facets),
            job=events.Job(self._namespace, status.name, job_facets),
            inputs=self._datasets(self._inputs, events.InputDataset),
            outputs=self._datasets(self._outputs, events.OutputDataset),
        )

    def _datasets(self, ends: Sequence[_End], make: Callable[..., Any]) -> list[Any]:
        """Return the datasets as OpenLineage has them, each once."""
        made: dict[tuple[str, str], Any] = {}
        for end in ends:
            if not end.datasets:
                try:
                    end.datasets = _datasets_of(end.owner)
                except Exception as error:  # noqa: BLE001 - a user's own source may raise anything; asked again for the next event
                    _log.warning("%s: the datasets are not known for its lineage: %s", end.name, text_of(error))
            for namespace, name in end.datasets:
                made.setdefault((namespace, name), make(namespace, name, facets=_columns(end.columns)))
        return list(made.values())


def _datasets_of(owner: HasDatasets) -> list[tuple[str, str]]:
    uris: object = owner.datasets()
    if isinstance(uris, str) or not isinstance(uris, Iterable):
        raise ValueError(f"datasets() returned {uris!r}, which is not a list of URIs")
    return [dataset_of(uri) for uri in uris]


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _columns(schema: pa.Schema | None) -> dict[str, Any]:
    if schema is None:
        return {}
    from openlineage.client.facet_v2 import schema_dataset

    fields = [schema_dataset.SchemaDatasetFacetFields(field.name, str(field.type)) for field in schema]
    return {"schema": schema_dataset.SchemaDatasetFacet(fields)}
