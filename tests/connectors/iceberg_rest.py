"""A REST catalog for tests: the part of Iceberg's HTTP API that a sink needs, on loopback, before another catalog."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table


class RestCatalogServer:
    """`before_answer` is called with each commit that was applied, and returns the status to answer with instead."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.lock = threading.Lock()
        self.before_answer: Callable[[], int | None] = lambda: None
        self.commits = 0

    def answer(self, method: str, path: list[str], body: Any) -> tuple[int, Any]:
        if path == ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        if path == ["namespaces"]:
            try:
                self.catalog.create_namespace(tuple(body["namespace"]))
            except NamespaceAlreadyExistsError as error:
                return 409, refusal(error, 409)
            return 200, {"namespace": body["namespace"], "properties": {}}
        namespace = path[1]
        if len(path) == 2:
            there = self.catalog.namespace_exists(namespace)
            return (200, {"namespace": [namespace]}) if there else (404, refusal(NoSuchNamespaceError(namespace), 404))
        if method == "POST" and len(path) == 3:
            schema = Schema.model_validate(body["schema"])
            spec = PartitionSpec.model_validate(body["partition-spec"])
            return 200, described(self.catalog.create_table((namespace, body["name"]), schema, partition_spec=spec))
        try:
            table = self.catalog.load_table((namespace, path[3]))
        except NoSuchTableError as error:
            return 404, refusal(error, 404)
        if method == "GET":
            return 200, described(table)
        return self.commit(table, CommitTableRequest.model_validate(body))

    def commit(self, table: Table, request: CommitTableRequest) -> tuple[int, Any]:
        try:
            done = self.catalog.commit_table(table, request.requirements, request.updates)
        except CommitFailedException as error:
            return 409, refusal(error, 409)
        self.commits += 1
        status = self.before_answer()
        if status is not None:
            return status, refusal(RuntimeError("the answer was lost"), status)
        return 200, {
            "metadata-location": done.metadata_location,
            "metadata": json.loads(done.metadata.model_dump_json()),
        }


def refusal(error: Exception, status: int) -> Any:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": status}}


def described(table: Table) -> Any:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


@contextmanager
def rest_catalog(catalog: Catalog) -> Iterator[tuple[RestCatalogServer, str]]:
    """Serve `catalog`, and yield the server and its URL."""
    served = RestCatalogServer(catalog)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("GET")

        def do_HEAD(self) -> None:
            self.reply("HEAD")

        def do_POST(self) -> None:
            self.reply("POST")

        def reply(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.partition("?")[0].removeprefix("/v1/").split("/")
            with served.lock:
                status, answer = served.answer(method, path, body)
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if method != "HEAD":
                self.wfile.write(payload)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
