"""Why no slots come, as far as Spark and the page of a standalone master show it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from midstream.engine.core.interfaces import SlotAvailability
from midstream.spark import spark_slots, standalone


class Page:
    """The page of a master."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(page.answer).encode() if page.answer is not None else b"<html>login</html>"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def apps(self, *apps: tuple[str, int], status: str = "ALIVE") -> None:
        self.answer = {"status": status, "activeapps": [{"id": name, "cores": cores} for name, cores in apps]}


class Context:
    """A Spark context with a number of registered executors."""

    applicationId = "app-1"

    def __init__(self, master: str, page_port: int) -> None:
        self.master = master
        self._page_port = str(page_port)
        self.executors = 0

    def getConf(self) -> dict[str, str]:
        return {"spark.master.ui.port": self._page_port}


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    yield made
    made.server.shutdown()
    made.server.server_close()


def provider(master: str, page_port: int, monkeypatch: pytest.MonkeyPatch) -> spark_slots.SparkSlots:
    made = object.__new__(spark_slots.SparkSlots)
    made._context = cast(Any, Context(master, page_port))
    made._master, made._times_without, made.gone = master, 0, ""
    monkeypatch.setattr(spark_slots, "how_spark_ended", lambda _: "")
    monkeypatch.setattr(spark_slots, "registered", lambda context: context.executors)
    return made


@pytest.fixture
def standalone_slots(page: Page, monkeypatch: pytest.MonkeyPatch) -> spark_slots.SparkSlots:
    return provider("spark://127.0.0.1:7077", page.server.server_address[1], monkeypatch)


def test_an_application_that_the_master_does_not_know_is_gone(
    standalone_slots: spark_slots.SparkSlots, page: Page
) -> None:
    page.apps(("app-0", 4))
    gone = standalone_slots.availability().gone
    assert "spark://127.0.0.1:7077 does not know this application" in gone and "recoveryMode" in gone


def test_cores_without_a_registered_executor_are_starting(standalone_slots: spark_slots.SparkSlots, page: Page) -> None:
    page.apps(("app-1", 4))
    for _ in range(5):
        assert standalone_slots.availability() == SlotAvailability(
            starting="executors are starting (4 cores launched, 0 executors registered with this program)"
        )


def test_an_application_that_waits_for_cores_waits_as_long_as_it_takes(
    standalone_slots: spark_slots.SparkSlots, page: Page
) -> None:
    page.apps(("app-1", 0), ("app-0", 4))
    assert [standalone_slots.availability() for _ in range(5)] == [SlotAvailability()] * 5


@pytest.mark.parametrize("status", ["", "STANDBY"])
def test_without_an_answer_of_the_master_the_second_wait_without_executors_is_the_last(
    standalone_slots: spark_slots.SparkSlots, page: Page, status: str
) -> None:
    if status:
        page.apps(status=status)
    assert standalone_slots.availability() == SlotAvailability()
    standalone_slots._context.executors = 1  # type: ignore[attr-defined]
    assert standalone_slots.availability() == SlotAvailability(), "there are executors, so it is not the application"
    standalone_slots._context.executors = 0  # type: ignore[attr-defined]
    assert standalone_slots.availability() == SlotAvailability()
    assert "has no executor on spark://127.0.0.1:7077" in standalone_slots.availability().gone


@pytest.mark.parametrize("master", ["yarn", "k8s://https://host", "local-cluster[2,1,1024]"])
def test_other_clusters_start_executors_again_by_themselves(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = provider(master, 1, monkeypatch)
    assert [made.availability() for _ in range(3)] == [SlotAvailability()] * 3
    assert standalone.at_master(cast(Any, Context(master, 1))) is None
