"""An object store of the tests' own: moto on loopback, one request after the other, with faults on request."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from pyarrow import fs

from machine import limit_s

KEY, SECRET = "key-of-the-tests", "a-secret-that-is-shown-nowhere"
BUCKET = "bucket"

Environ = dict[str, Any]
Answer = Callable[..., Any]


@dataclass
class Fault:
    """What happens to the next `times` requests that match."""

    method: str
    path: str
    what: str
    """"together": two wait for each other; "lose": done, never answered; "cut": neither; "wait": answered when the server closes; "ignore": without its
    condition; "409 Code": that answer."""
    times: int
    after: int
    """So many of them pass before."""
    met: int = 0


class ObjectStore:
    """One at a time: what moto does to look whether an object is there and to write it is not one step."""

    def __init__(self) -> None:
        app: Any = import_module("moto.moto_server.werkzeug_app")
        serving: Any = import_module("werkzeug.serving")

        class Quiet(serving.WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self._moto = app.DomainDispatcherApplication(app.create_backend_app)
        self._one_at_a_time = threading.Lock()
        self._closing = threading.Event()
        self._two = threading.Barrier(2)
        self._faults: list[Fault] = []
        self.requests: list[str] = []
        self._server: Any = serving.make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, path: str, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def fault(self, method: str, path: str, what: str, times: int = 1, after: int = 0) -> Fault:
        """`path`: a pattern, searched in path and query."""
        fault = Fault(method, path, what, times, after)
        self._faults.append(fault)
        return fault

    def make_bucket(self, name: str) -> None:
        fs.S3FileSystem(
            endpoint_override=self.endpoint,
            access_key=KEY,
            secret_key=SECRET,
            allow_bucket_creation=True,
            region="us-east-1",
        ).create_dir(name)

    def mend(self) -> None:
        self._faults.clear()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(limit_s(10))

    def _answer(self, environ: Environ, start: Answer) -> Any:
        line = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(f"{environ['REQUEST_METHOD']} {line}")
        fault = self._next_fault(environ["REQUEST_METHOD"], line)
        match fault.what if fault else "":
            case "":
                return self._done(environ, start)
            case "ignore":
                environ.pop("HTTP_IF_NONE_MATCH", None)
                return self._done(environ, start)
            case "lose":
                self._done(environ, lambda *_args: None)
                return self._cut(environ, start)
            case "together":
                with contextlib.suppress(threading.BrokenBarrierError):
                    self._two.wait(limit_s(20))
                return self._done(environ, start)
            case "cut":
                return self._cut(environ, start)
            case "wait":
                self._closing.wait(limit_s(60))
                return self._cut(environ, start)
            case status:
                code = status.partition(" ")[2]
                text = f"<Error><Code>{code}</Code><Message>as the test has it</Message></Error>".encode()
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
                return [text]

    def _done(self, environ: Environ, start: Answer) -> Any:
        with self._one_at_a_time:
            return list(self._moto(environ, start))

    def _cut(self, environ: Environ, start: Answer) -> Any:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start("503 Service Unavailable", [])  # which nobody hears
        return [b""]

    def _next_fault(self, method: str, line: str) -> Fault | None:
        with self._one_at_a_time:
            for fault in self._faults:
                if fault.method == method and re.search(fault.path, line):
                    fault.met += 1
                    if fault.after < fault.met <= fault.after + fault.times:
                        return fault
            return None


@contextmanager
def running_store() -> Iterator[ObjectStore]:
    """With BUCKET in it. Skips the test where moto or what midstream needs for object stores is not installed."""
    for module in ("moto", "flask", "flask_cors", "obstore", "botocore"):
        pytest.importorskip(module, reason=f"the package {module!r} is not installed: pip install 'midstream[dev]'")
    store = ObjectStore()
    try:
        store.make_bucket(BUCKET)
        yield store
    finally:
        store.close()


def use_environment(monkeypatch: pytest.MonkeyPatch, store: ObjectStore | None = None) -> None:
    """The keys of the tests and nothing else; `store`: the endpoint that goes without saying."""
    import os

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nothing")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nothing")
    if store is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
