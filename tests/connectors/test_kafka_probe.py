"""Records are read from the client's memory only if a probe shows that this is right; else the log and the status say why."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import confluent_kafka
import pytest
from test_kafka_in_jobs import job, records, written

from kafka_broker import Kafka
from midstream.connectors.common import external_waits
from midstream.connectors.kafka import fetch_probe, fetched_records
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

OTHERWISE = {
    "values are where keys are": ("k._VALUE, k._KEY = k._KEY, k._VALUE", "signal|was read in place of"),
    "a value of 13 bytes has 12": (
        "c = k.copied; k.copied = lambda at, size: c(at, size - (size == 13))",
        "of record 7",
    ),
    "the handle is elsewhere": ("k.object = type('o', (), {'__basicsize__': 24})", "has its handle in another place"),
    "errors come to the client's own callback": ("k.FetchClient.on_errors = lambda *_: None", "signal 6"),
    "a call is missing": ("k._typed = lambda *_: k.ctypes.CDLL(None).rd_kafka_none", "rd_kafka_none"),
    "it hangs": (
        "import threading; k.MemoryFetcher.take = lambda *_: threading.Event().wait()",
        "did not end within 3 s",
    ),
    "it is another client": ("import confluent_kafka; confluent_kafka.__version__ = '0'", 'other libraries: .*"0"'),
}


def test_the_installed_client_is_read_from_memory() -> None:
    assert fetch_probe.refusal() is None
    assert isinstance(fetch_probe.probed_client(), fetched_records.FetchClient)


@pytest.mark.systems
@pytest.mark.parametrize("how", OTHERWISE)
def test_a_client_that_is_otherwise_ends_or_fails_the_probe_and_not_this_process(how: str) -> None:
    change, reason = OTHERWISE[how]
    program = f"from midstream.connectors.kafka import fetched_records as k\n{change}\n{fetch_probe._PROBE}"
    why = fetch_probe.refusal(program, 3 if "hangs" in how else 60)
    assert why is not None and re.search(reason, why), why


def test_a_probe_that_cannot_be_started_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert "could not be started: " in (fetch_probe.refusal() or "")


def test_what_is_refused_is_logged_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch_probe, "refusal", lambda: "it has failed")
    monkeypatch.setattr(external_waits, "_warnings", {})
    fetch_probe._probed.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, fetch_probe.__name__):
            assert [fetch_probe.probed_client(), fetch_probe.probed_client()] == [None, None]
    finally:
        fetch_probe._probed.cache_clear()
    (text,) = external_waits.warnings()
    assert text.startswith("records of Kafka are read as Python objects") and text.endswith("and it has failed")
    assert str(confluent_kafka.__version__) in text
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_job_whose_slots_must_not_read_from_memory_says_so_in_its_status_and_reads_all(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: list[Job]
) -> None:
    refuses = "import sys\nif any('fetch_probe' in part for part in sys.orig_argv): raise SystemExit('not here')\n"
    (tmp_path / "sitecustomize.py").write_text(refuses, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    topic = kafka.topic(partitions=2)
    kafka.produce(topic, records(0, 50), partition=0)
    kafka.produce(topic, records(50, 100), partition=1)
    live = job(kafka, topic, tmp_path).start(slots=ProcessSlots())
    running.append(live)

    def warnings() -> list[str]:
        return [text for text in live.status().warnings if "records of Kafka are read as Python objects" in text]

    until("the status shows it", warnings)
    until("all rows are there", lambda: sorted(written(tmp_path)["n"].to_list()) == [*range(100)])
    (warning,) = warnings()
    assert warning.startswith("slot ") and "the probe failed" in warning
