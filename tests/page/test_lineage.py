"""Lineage events: which are due, how datasets are called, and what a collector gets of real jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pytest
from collectors import collecting

from midstream import Environment, no_restart
from midstream.connectors import (
    DeltaSink,
    DeltaSource,
    HybridSource,
    IcebergSink,
    IcebergSource,
    KafkaSink,
    KafkaSource,
    PrintSink,
)
from midstream.connectors.common.dataset_uris import file_uri, location_uri, server_uri
from midstream.connectors.postgres.connections import dataset
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol.job_status import JobStatus
from midstream.page import lineage
from midstream.page.job_observers import end_observing
from midstream.page.lineage import Lineage, RunEvents, dataset_of, open_lineage
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample
from waiting import until

NOTHING = JobGraph((), (), 128)


def at(now_ms: int, state: str) -> JobStatus:
    return msgspec.structs.replace(sample(), started_ms=1_000, now_ms=now_ms, state=state)


# ---- which events are due


def test_a_run_starts_runs_and_ends_once() -> None:
    events = RunEvents()
    assert events.take(at(1_500, "deploying")) == [("START", 1_000)]
    assert events.take(at(2_500, "running")) == [("RUNNING", 2_500)]
    assert events.take(at(62_499, "running")) == []
    assert events.take(at(62_500, "running")) == [("RUNNING", 62_500)]
    assert events.take(at(200_000, "restarting")) == []
    assert events.take(at(200_001, "finished")) == [("COMPLETE", 200_001)]


@pytest.mark.parametrize(("state", "event"), [("finished", "COMPLETE"), ("stopped", "ABORT"), ("failed", "FAIL")])
def test_a_job_that_has_ended_before_it_was_seen_has_a_start_and_an_end(state: str, event: str) -> None:
    assert RunEvents().take(at(1_001, state)) == [("START", 1_000), (event, 1_001)]


# ---- how datasets are called


@pytest.mark.parametrize(
    ("uri", "namespace", "name"),
    [
        ("file:///data/in put/x#1?.csv", "file", "/data/in put/x#1?.csv"),
        ("s3://bucket/a/b", "s3://bucket", "a/b"),
        ("hdfs://name:8020/a", "hdfs://name:8020", "/a"),
        ("kafka://broker:9092/orders?", "kafka://broker:9092", "orders?"),
        ("postgres://db:5432/shop.public.orders", "postgres://db:5432", "shop.public.orders"),
        ("abfss://in@account.dfs.core.windows.net/x", "abfss://in@account.dfs.core.windows.net", "x"),
        ("abfss://in:secret@a.dfs.core.windows.net/x", "abfss://in@a.dfs.core.windows.net", "x"),
        ("mysql://root:secret@db:3306/shop.orders", "mysql://db:3306", "shop.orders"),
        ("s3://bucket", "s3://bucket", "/"),
        ("file://nas/share", "file://nas", "/share"),
    ],
)
def test_a_uri_is_split_as_openlineage_names_datasets(uri: str, namespace: str, name: str) -> None:
    assert dataset_of(uri) == (namespace, name)


@pytest.mark.parametrize(
    "uris", [None, 7, "s3://bucket/a", b"s3://b/a", [None], [b"s3://b/a"], ["orders"], [""], ["s3://"]]
)
def test_what_is_no_list_of_uris_is_no_dataset_and_hides_no_other(
    uris: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openlineage.client")
    monkeypatch.setattr(PrintSink, "datasets", lambda self: uris)
    env = Environment("rubbish")
    numbers = env.generate(lambda i: {"n": i}, count=10)
    numbers.print()
    numbers.write_parquet("out").uid("out")
    sent: list[Any] = []
    observer = Lineage(
        cast("Any", SimpleNamespace(emit=sent.append)), build_job_graph(env.program.graph, env.program.config), "shop"
    )
    observer.observe(at(1_500, "finished"))
    assert [[each.name for each in event.outputs] for event in sent] == 2 * [[str(Path("out").absolute())]]
    assert any("print: the datasets are not known" in record.message for record in caplog.records)


class Abroad:
    """Stands for a filesystem that is not local."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name


@pytest.mark.parametrize(
    ("given", "kind", "path", "uri"),
    [
        ("s3://key:se%40cret@bucket/a/?endpoint_override=x&secret_key=y", "s3", "bucket/a", "s3://bucket/a"),
        ("s3a://bucket/a", "s3", "bucket/a", "s3://bucket/a"),
        ("bucket/a", "s3", "bucket/a", "s3://bucket/a"),
        ("gs://bucket", "gcs", "bucket", "gs://bucket"),
        ("hdfs://name:8020/a/", "hdfs", "/a", "hdfs://name:8020/a"),
        ("abfss://in:secret@acc.dfs.core.windows.net/x", "abfs", "in/x", "abfss://in@acc.dfs.core.windows.net/x"),
    ],
)
def test_uris_of_files_have_neither_passwords_nor_options(given: str, kind: str, path: str, uri: str) -> None:
    assert file_uri(given, Abroad(kind), path) == uri  # type: ignore[arg-type]


def test_a_local_file_is_named_by_its_absolute_path() -> None:
    assert file_uri("x", pyarrow.fs.LocalFileSystem(), "/data/x") == "file:///data/x"


@pytest.mark.parametrize(
    ("location", "uri"),
    [
        ("file:/lake/s/t", "file:///lake/s/t"),
        ("/lake/s/t:1", "file:///lake/s/t:1"),
        ("file:///lake/s/t", "file:///lake/s/t"),
        ("s3a://bucket/s/t/", "s3://bucket/s/t"),
        ("hdfs://name:8020/s/t", "hdfs://name:8020/s/t"),
    ],
)
def test_locations_of_tables_are_named_as_files_are(location: str, uri: str) -> None:
    assert location_uri(location) == uri


@pytest.mark.parametrize(
    ("server", "uri"),
    [
        ("b", "kafka://b:9092/t"),
        ("b:1", "kafka://b:1/t"),
        (" [::1]:7 ", "kafka://[::1]:7/t"),
        ("[::1]", "kafka://[::1]:9092/t"),
    ],
)
def test_a_server_without_a_port_has_the_usual_one(server: str, uri: str) -> None:
    assert server_uri("kafka", server, 9092, "t") == uri


def test_topics_are_named_with_the_first_server() -> None:
    pytest.importorskip("confluent_kafka")
    servers = "k-1:9094,k-2:9094"
    source = KafkaSource(servers, ["a", "b"], schema=pa.schema({"n": pa.int64()}))
    assert source.datasets() == ["kafka://k-1:9094/a", "kafka://k-1:9094/b"]
    assert KafkaSink(servers, "c").datasets() == ["kafka://k-1:9094/c"]


@pytest.mark.parametrize(
    ("dsn", "uri"),
    [
        ("postgresql://etl:secret@db/shop", "postgres://db:5432/shop.s.t"),
        ("host=a,b port=6000,6001 user=etl password=secret", "postgres://a:6000/etl.s.t"),
        ("postgresql://etl:secret@[::1]/shop", "postgres://[::1]:5432/shop.s.t"),
        ("host=/run/postgresql dbname=shop", "postgres://localhost:5432/shop.s.t"),
        ("", "postgres://from-env:5433/db-env.s.t"),
    ],
)
def test_tables_are_named_with_their_server_and_without_the_password(
    dsn: str, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    if not dsn:
        monkeypatch.setenv("PGHOST", "from-env")
        monkeypatch.setenv("PGPORT", "5433")
        monkeypatch.setenv("PGDATABASE", "db-env")
    assert dataset(dsn, "s.t") == uri


def test_tables_are_named_by_their_locations(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")
    pl.DataFrame({"n": [1]}).write_delta(tmp_path / "delta")
    delta, at_delta = DeltaSource(str(tmp_path / "delta")), [f"file://{tmp_path}/delta"]
    assert delta.datasets() == DeltaSink(tmp_path / "delta").datasets() == at_delta
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog", "warehouse": f"file://{tmp_path}/lake"}
    sink = IcebergSink("s.t", catalog=catalog)
    sink.validate(pa.schema({"n": pa.int64()}), restoring=False)
    assert IcebergSource("s.t", catalog=catalog).datasets() == sink.datasets() == [f"file://{tmp_path}/lake/s/t"]
    both = HybridSource(delta, DeltaSource(str(tmp_path / "delta"), watch=True))
    assert both.datasets() == 2 * at_delta


# ---- who enables it


@pytest.mark.parametrize(
    "environ",
    [{}, {"OPENLINEAGE_URL": " "}, {"OPENLINEAGE_NAMESPACE": "x"}, {"OPENLINEAGE_URL": "http://x", "OPENLINEAGE_DISABLED": "True"}],
)  # fmt: skip
def test_unless_it_is_configured_nothing_is_sent_or_imported(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert open_lineage(NOTHING, environ) is None


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(lineage, "import_module", missing)
    with pytest.raises(
        ConfigError, match=r"OPENLINEAGE_URL enables.*openlineage.*pip install 'midstream\[openlineage\]'"
    ):
        open_lineage(NOTHING, {"OPENLINEAGE_URL": "http://x"})


def test_a_configuration_that_openlineage_refuses_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "pigeon")
    with pytest.raises(ConfigError, match=r"OPENLINEAGE__TRANSPORT__TYPE: OpenLineage refuses"):
        open_lineage(NOTHING, {"OPENLINEAGE__TRANSPORT__TYPE": "pigeon"})


# ---- what a collector gets


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    pytest.importorskip("openlineage.client")
    found: list[dict[str, Any]] = []
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    with collecting(lambda body: found.append(json.loads(body))) as address:
        monkeypatch.setenv("OPENLINEAGE_URL", address)
        yield found


def is_over(events: list[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["eventType"] in ("COMPLETE", "ABORT", "FAIL")


def test_a_job_is_reported_with_what_it_reads_and_writes(events: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("orders", "customers"):
        (tmp_path / name).mkdir()
    pl.DataFrame({"id": [1, 2], "by": [7, 7]}).write_parquet(tmp_path / "orders" / "1.parquet")
    pl.DataFrame({"by": [7], "name": ["ü"]}).write_parquet(tmp_path / "customers" / "1.parquet")
    env = Environment("enriched ü", parallelism=1, checkpoint_dir=tmp_path / "state")
    orders = env.read_files(str(tmp_path / "orders" / "*.parquet"))
    joined = orders.join_table(str(tmp_path / "customers"), on="by", how="left")
    joined.write_parquet(tmp_path / "out").uid("out")
    joined.print()
    env.execute(slots=ProcessSlots())
    end_observing()
    until("the end", lambda: is_over(events), found=lambda: events)
    kinds = [event["eventType"] for event in events]
    assert kinds[0] == "START" and kinds[-1] == "COMPLETE"
    assert {event["run"]["runId"] for event in events} == {events[0]["run"]["runId"]}
    last = events[-1]
    assert (last["job"]["namespace"], last["job"]["name"]) == ("shop", "enriched ü")
    assert last["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    assert last["run"]["facets"]["processing_engine"]["name"] == "midstream"
    assert [(each["namespace"], each["name"]) for each in last["inputs"]] == [
        ("file", f"{tmp_path}/orders"),
        ("file", f"{tmp_path}/customers"),
    ]
    (output,) = last["outputs"]
    assert (output["namespace"], output["name"]) == ("file", f"{tmp_path}/out")
    fields = {field["name"]: field["type"] for field in output["facets"]["schema"]["fields"]}
    assert fields == {"id": "int64", "by": "int64", "name": "large_string"}


def test_a_failure_is_reported_with_its_message(events: list[dict[str, Any]], tmp_path: Path) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("bad ü")

    env = Environment("failing", parallelism=1, checkpoint_dir=tmp_path / "state", restart=no_restart())
    env.generate(lambda i: {"n": i}, count=10).map(fails, {"n": int}).print()
    with pytest.raises(JobError, match="bad ü"):
        env.execute(slots=ProcessSlots())
    until("the end", lambda: is_over(events), found=lambda: events)
    assert events[-1]["eventType"] == "FAIL"
    error = events[-1]["run"]["facets"]["errorMessage"]
    assert (
        "bad ü" in error["message"] and "in fails" in error["stackTrace"] and error["programmingLanguage"] == "python"
    )


def test_a_collector_that_is_not_there_and_a_source_that_raises_keep_no_job_from_ending(
    events: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OPENLINEAGE_URL")
    for name, value in {"TYPE": "http", "URL": "http://127.0.0.1:1", "RETRY": '{"total": 0}'}.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)

    def raises(self: object) -> list[str]:
        raise RuntimeError("no datasets")

    monkeypatch.setattr(PrintSink, "datasets", raises)
    env = Environment("alone", parallelism=1, checkpoint_dir=str(tmp_path / "state"))
    env.generate(lambda i: {"n": i}, count=10).print()
    env.execute(slots=ProcessSlots())
    warnings = lambda: [each.message for each in caplog.records if each.name == lineage.__name__]  # noqa: E731
    until("a warning", lambda: any("START was not sent" in text for text in warnings()), found=warnings)
    assert any("the datasets are not known for its lineage: no datasets" in text for text in warnings())
    assert not events
