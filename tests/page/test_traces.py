"""Spans of checkpoints and restarts: what is made of a status, and what a collector gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from collectors import collecting

from machine import limit_s
from midstream import Environment
from midstream.engine.core.errors import ConfigError
from midstream.engine.protocol.job_status import CheckpointPhases, CheckpointStatus, FailureStatus, JobStatus
from midstream.page import job_observers, traces
from midstream.page.job_observers import begin_observing, end_observing
from midstream.page.traces import Span, Traces, Watch, open_traces
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample
from waiting import until

MONITORING = Path(__file__).parents[2] / "docs" / "operations" / "monitoring.md"
DONE = CheckpointStatus(4, "completed", 1_000, 200, 5_000, "", 70, 40.0, 30, 6, 6, "write/1")
FAILED = CheckpointStatus(5, "failed", 2_000, 500, 0, "the disk is full", tasks=6, tasks_done=2, last="read/0")
UNDER_WAY = CheckpointStatus(6, "in_progress", 3_000, 10, 0)
BROKEN = FailureStatus(2_500, 0, "ValueError: bad row 7", "Traceback …\nValueError: bad row 7")


def at(*checkpoints: CheckpointStatus, **more: Any) -> JobStatus:
    """Newest first, as a status has them."""
    return msgspec.structs.replace(sample(), **{"checkpoints": checkpoints, "failures": (), **more})


# ---- what is made of a status


def test_a_checkpoint_that_is_over_is_one_span_with_its_phases():
    (span,) = Watch().take(at(UNDER_WAY, DONE))
    assert (span.name, span.began_ms, span.ended_ms, span.error) == ("checkpoint", 1_000, 1_230, "")
    assert span.attributes["midstream.checkpoint.id"] == 4 and span.attributes["midstream.job.name"] == "flights"
    subtasks, metadata = span.children
    assert (subtasks.name, subtasks.began_ms, subtasks.ended_ms) == ("subtasks", 1_000, 1_200)
    assert subtasks.attributes["midstream.checkpoint.last_subtask"] == "write/1"
    assert subtasks.attributes["midstream.checkpoint.alignment_max_ms"] == 40.0
    assert (metadata.name, metadata.began_ms, metadata.ended_ms) == ("metadata", 1_200, 1_230)
    (span,) = Watch().take(at(msgspec.structs.replace(DONE, phases=CheckpointPhases(10.0, 40.0, 50.0, 100.0))))
    assert [(each.name, each.began_ms, each.ended_ms) for each in span.children[0].children] == [
        ("barrier", 1_000, 1_010),
        ("alignment", 1_010, 1_050),
        ("snapshot", 1_050, 1_100),
        ("storing", 1_100, 1_200),
    ]


def test_each_checkpoint_is_told_once_and_those_that_end_between_two_looks_in_order():
    watch = Watch()
    assert watch.take(at(UNDER_WAY)) == []
    ended = msgspec.structs.replace(UNDER_WAY, state="completed")
    assert [span.attributes["midstream.checkpoint.id"] for span in watch.take(at(ended, FAILED, DONE))] == [
        4,
        5,
        6,
    ]
    assert watch.take(at(ended, FAILED, DONE)) == []
    assert watch.take(at(ended)) == []
    again = msgspec.structs.replace(FAILED, created_ms=9_000)
    assert len(watch.take(at(again, ended))) == 1, "a number may be given again after a restart"


def test_a_failed_checkpoint_says_why_and_has_no_metadata():
    (span,) = Watch().take(at(FAILED))
    assert span.error == "the disk is full" and [child.name for child in span.children] == ["subtasks"]


def test_a_restart_lasts_until_the_job_runs_again():
    watch = Watch()
    assert watch.take(at(state="restarting", failures=(BROKEN,), now_ms=2_600)) == []
    assert watch.take(at(state="deploying", failures=(BROKEN,), now_ms=2_900)) == []
    (span,) = watch.take(at(state="running", failures=(BROKEN,), now_ms=3_500))
    assert (span.name, span.began_ms, span.ended_ms, span.exception, span.error) == (
        "restart",
        2_500,
        3_500,
        BROKEN,
        "",
    )
    assert watch.take(at(state="running", failures=(BROKEN,), now_ms=9_500)) == []


def test_a_failure_that_ends_the_job_is_an_error_and_a_clock_that_went_back_makes_no_negative_span():
    (span,) = Watch().take(at(state="failed", failures=(BROKEN,), now_ms=2_000))
    assert span.error == BROKEN.summary and span.ended_ms == span.began_ms


# ---- who asks for it


@pytest.mark.parametrize("environ", [{}, {"OTEL_TRACES_EXPORTER": ""}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}])  # fmt: skip
def test_without_being_asked_for_nothing_is_traced_or_imported(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traces, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert open_traces(environ) is None


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(traces, "import_module", missing)
    with pytest.raises(
        ConfigError, match=r"opentelemetry.*pip install 'midstream\[otel\]', or set OTEL_TRACES_EXPORTER=none"
    ):
        open_traces({"OTEL_TRACES_EXPORTER": "otlp"})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "'jaeger' is neither otlp nor none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc'",
        ),
    ],
)
def test_what_traces_cannot_be_sent_by_is_refused(environ: dict[str, str], says: str):
    pytest.importorskip("opentelemetry.sdk")
    with pytest.raises(ConfigError, match=says):
        open_traces(environ)


# ---- what a collector gets


@pytest.fixture
def collected() -> Iterator[tuple[str, list[Any]]]:
    """The address of a collector, and the spans that came to it."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans: list[Any] = []

    def received(body: bytes) -> None:
        request = messages.ExportTraceServiceRequest()
        request.ParseFromString(body)
        spans.extend(
            span for of_resource in request.resource_spans for scope in of_resource.scope_spans for span in scope.spans
        )

    with collecting(received) as address:
        yield address, spans


def attribute(span: Any, name: str) -> Any:
    (value,) = [each.value for each in span.attributes if each.key == name]
    return getattr(value, value.WhichOneof("value"))


def test_spans_of_a_real_job_reach_a_collector(collected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    address, spans = collected
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    env = Environment(parallelism=1, name="getraced ü", checkpoint_dir=tmp_path / "state", checkpoint_interval=None)
    env.generate(lambda i: {"n": i}, count=10_000_000, rows_per_s=100).map(lambda row: row, {"n": int}).print()
    job = env.start(slots=ProcessSlots())
    path = job.checkpoint(timeout_s=limit_s(120))
    job.stop(timeout_s=limit_s(120))

    def checkpoints_and_children() -> tuple[list[Any], list[Any]]:
        found = list({span.span_id: span for span in spans}.values())  # an exporter that had no answer sends them again
        parents = [span for span in found if span.name == "checkpoint"]
        ids = {span.span_id for span in parents}
        return parents, [span for span in found if span.parent_span_id in ids]

    until(
        "all spans have come", lambda: [len(each) for each in checkpoints_and_children()] == [2, 4], found=lambda: spans
    )
    checkpoints, _ = checkpoints_and_children()
    assert path.endswith(f"chk-{attribute(checkpoints[0], 'midstream.checkpoint.id')}")
    for checkpoint in checkpoints:
        assert attribute(checkpoint, "midstream.job.name") == "getraced ü" and not checkpoint.parent_span_id
        children = {span.name: span for span in spans if span.parent_span_id == checkpoint.span_id}
        assert set(children) == {"subtasks", "metadata"}
        assert attribute(children["subtasks"], "midstream.checkpoint.last_subtask")
        assert checkpoint.start_time_unix_nano == children["subtasks"].start_time_unix_nano
        assert checkpoint.end_time_unix_nano == children["metadata"].end_time_unix_nano


def test_spans_of_the_function_that_the_page_shows_reach_a_collector(
    collected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    address, spans = collected
    (example,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", MONITORING.read_text(), re.S)
        if "OTLPSpanExporter" in block
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(example.replace("...", 'return {"customer": row["customer"]}'), names)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    env = Environment(parallelism=2, name="enriched", checkpoint_dir=tmp_path / "state", checkpoint_interval=None)
    customers = env.generate(lambda i: {"customer": i % 5}, count=20)
    customers.key_by("customer").process(names["Enrich"](), {"customer": int}).print()
    env.execute(slots=ProcessSlots())
    assert sorted(attribute(span, "customer") for span in spans) == sorted(4 * [0, 1, 2, 3, 4])
    assert {span.name for span in spans} == {"call model"}


def test_a_failure_is_an_exception_of_its_span(monkeypatch: pytest.MonkeyPatch):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporting = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(exporting.SimpleSpanProcessor(exporter))
    Traces(provider).export(Span("restart", 2_500, 2_600, {}, BROKEN.summary, BROKEN))
    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert (event.name, event.attributes["exception.type"], event.timestamp) == (
        "exception",
        "ValueError",
        2_500_000_000,
    )
    assert not span.status.is_ok and span.status.description == "ValueError: bad row 7"


def test_a_job_whose_status_cannot_be_read_ends_its_traces_and_nothing_else(caplog: pytest.LogCaptureFixture):
    class Broken:
        name = "broken"
        ended = False

        def status(self) -> JobStatus:
            raise RuntimeError("no status")

    before = list(job_observers._threads)
    closed: list[bool] = []
    begin_observing(Broken(), Traces(None, lambda: closed.append(True)))  # type: ignore[arg-type]
    (thread,) = [each for each in job_observers._threads if each not in before]
    thread.join(limit_s(30))
    assert not thread.is_alive() and "the traces of job broken have failed" in caplog.text
    assert closed == [True]
    end_observing()  # of a job that has not ended nothing is waited for


def test_spans_go_to_the_provider_that_the_program_has_set_which_stays_open(monkeypatch: pytest.MonkeyPatch):
    api = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporting = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(exporting.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)

    class Ended:
        name = "ended"
        ended = True

        def status(self) -> JobStatus:
            return at(FAILED, DONE)

    for _ in range(2):  # a second job of the same program
        found = open_traces({"OTEL_TRACES_EXPORTER": "console"})
        assert found is not None
        begin_observing(Ended(), found)
        end_observing()
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["subtasks", "metadata", "checkpoint", "subtasks", "checkpoint"] * 2


def test_a_collector_that_is_not_there_keeps_no_job_from_ending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("opentelemetry.sdk.trace")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    env = Environment(parallelism=1, name="alone", checkpoint_dir=str(tmp_path / "state"))
    env.generate(lambda i: {"n": i}, count=10).map(lambda row: row, {"n": int}).print()
    job = env.start(slots=ProcessSlots())
    job.wait(timeout_s=limit_s(120))
    assert job.status().state == "finished"
