"""Storage in a real object store, moto's, over HTTP: one of many creates a file, whatever becomes of requests and answers."""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from machine import limit_s
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.runtime.storage import exclusive_create
from midstream.runtime.storage.file_storage import FileStorage, RemoteStorage, check_can_create
from object_store import KEY, SECRET, ObjectStore, running_store, use_environment
from storage_contract import check_promises

pytestmark = pytest.mark.systems


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    use_environment(monkeypatch)
    monkeypatch.setattr(exclusive_create, "FIRST_PAUSE_S", 0.001)
    server.requests.clear()
    yield server
    server.mend()


def test_an_object_store_keeps_the_promises_of_every_storage(store: ObjectStore) -> None:
    check_promises(FileStorage(store.url("promises")))


@pytest.mark.parametrize("path", ["", "slash/", "with%20space/%C3%A9%23%2B*~'(%5B1%5D)", "a=b/c@d:e,f"])
def test_prefixes(store: ObjectStore, path: str) -> None:
    storage = FileStorage(store.url(path))
    assert storage.create("epochs/1", b"1") and not storage.create("epochs/1", b"2")
    assert storage.list("epochs") == ["1"] and storage.read("epochs/1") == b"1"
    assert FileStorage(store.url(path.rstrip("/"))).exists("epochs/1")
    storage.delete("epochs")
    assert "epochs" not in storage.list("")


def _create(url: str, rounds: int, start: Any, won: Any, who: int) -> None:
    storage = FileStorage(url)
    for number in range(rounds):
        start.wait(limit_s(60))
        if storage.create(f"epochs/{number:08}", b"the same content"):
            won.put((number, who))


def test_of_eight_processes_that_create_one_file_at_once_one_wins(store: ObjectStore) -> None:
    rounds, spawn = 25, multiprocessing.get_context("spawn")
    start, won = spawn.Barrier(8), spawn.SimpleQueue()
    creators = [spawn.Process(target=_create, args=(store.url("race"), rounds, start, won, who)) for who in range(8)]
    for creator in creators:
        creator.start()
    for creator in creators:
        creator.join(limit_s(120))
    assert [creator.exitcode for creator in creators] == [0] * 8
    winners: dict[int, int] = {}
    while not won.empty():
        number, who = won.get()
        assert number not in winners, f"{winners[number]} and {who} have both created {number}"
        winners[number] = who
    assert sorted(winners) == list(range(rounds)) and len(set(winners.values())) > 1
    assert FileStorage(store.url("race")).list("") == ["epochs"], "nothing is left of the proofs"


@pytest.fixture
def proven(store: ObjectStore) -> RemoteStorage:
    """One that has created a file before."""
    storage = FileStorage(store.url(f"proven-{secrets.token_hex(4)}"))
    assert isinstance(storage, RemoteStorage) and storage.create("first", b"")
    store.requests.clear()
    return storage


def test_an_answer_that_is_lost_does_not_make_the_creator_lose(store: ObjectStore, proven: RemoteStorage) -> None:
    store.fault("PUT", "/epochs/1", "lose", times=2)
    assert proven.create("epochs/1", b"mine")
    assert proven.read("epochs/1") == b"mine" and not proven.create("epochs/1", b"mine")


def test_what_another_has_created_is_not_claimed_though_the_answer_was_lost(
    store: ObjectStore, proven: RemoteStorage
) -> None:
    other = FileStorage(store.url("").replace("/?", f"/{proven._root.partition('/')[2]}?"))
    assert other.create("epochs/1", b"the same content")
    store.fault("PUT", "/epochs/1", "lose")
    assert not proven.create("epochs/1", b"the same content")


def test_what_another_has_written_without_a_name_is_not_claimed(store: ObjectStore, proven: RemoteStorage) -> None:
    proven.write("epochs/1", [b"by another program"])
    store.fault("PUT", "/epochs/1", "lose")
    assert not proven.create("epochs/1", b"by another program")


@pytest.mark.parametrize("fault", ["503 SlowDown", "500 InternalError", "429 TooManyRequests", "cut"])
def test_a_store_that_is_busy_is_asked_again(
    store: ObjectStore, proven: RemoteStorage, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.fault("PUT", "/epochs/1", fault, times=3)
    with caplog.at_level(logging.WARNING, "midstream"):
        assert proven.create("epochs/1", b"mine")
    said = [
        record.getMessage() for record in caplog.records if record.name == "midstream.runtime.storage.exclusive_create"
    ]
    assert len(said) == 3 and all("is retried" in line for line in said)
    if fault == "cut":
        assert all("/epochs/1 failed: no answer" in line for line in said), said
    else:
        status, code = fault.split()
        assert all(f"HTTP {status} {code}: as the test has it" in line for line in said), said


def test_a_store_that_stays_busy_is_given_up_with_the_reason(store: ObjectStore, proven: RemoteStorage) -> None:
    store.fault("PUT", "/epochs/1", "503 SlowDown", times=100)
    with pytest.raises(StorageError) as caught:
        proven.create("epochs/1", b"mine")
    assert "5 tries failed, the last one because HTTP 503 SlowDown: as the test has it" in str(caught.value)
    assert "It is unknown whether it exists now" in str(caught.value)
    assert sum(line.startswith("PUT") and "/epochs/1" in line for line in store.requests) == exclusive_create.TRIES


def test_a_store_that_does_not_answer_is_given_up(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusive_create, "REQUEST_S", 0.3)
    storage = FileStorage(store.url("silent"))
    assert storage.create("first", b"")
    store.fault("PUT", "/epochs/1", "wait", times=2)
    assert storage.create("epochs/1", b"mine")
    store.fault("PUT", "/epochs/2", "wait", times=100)
    with pytest.raises(
        StorageError, match=r"the last one because PUT http://\S+/epochs/2 failed: no answer within 0.3 s"
    ):
        storage.create("epochs/2", b"mine")


def test_the_winner_is_not_known_while_the_store_cannot_be_read(store: ObjectStore, proven: RemoteStorage) -> None:
    proven.create("epochs/1", b"1")
    store.fault("HEAD", "/epochs/1", "503 SlowDown", times=2)
    assert not proven.create("epochs/1", b"2")
    store.mend()
    store.fault("HEAD", "/epochs/1", "503 SlowDown", times=100)
    with pytest.raises(StorageError, match="5 tries failed"):
        proven.create("epochs/1", b"2")


def test_what_is_gone_again_when_it_is_looked_at_is_created(store: ObjectStore, proven: RemoteStorage) -> None:
    store.fault("PUT", "/epochs/1", "412 PreconditionFailed")
    store.fault("PUT", "/epochs/2", "409 ConditionalRequestConflict", times=2)
    assert proven.create("epochs/1", b"1") and proven.create("epochs/2", b"2")


def test_a_store_that_ignores_the_condition_is_refused(store: ObjectStore) -> None:
    store.fault("PUT", "/", "ignore", times=100)
    storage = FileStorage(store.url("old"))
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"s3://bucket/old.*ignores the condition of a write .*Use a store that has"
        ):
            storage.create("_job", b"1")
    assert storage.list("") == []
    store.mend()
    assert storage.create("_job", b"1")


def test_two_libraries_that_see_two_places_are_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exclusive_create._open_s3
    monkeypatch.setattr(exclusive_create, "_open_s3", lambda bucket, *rest: real("other", *rest))
    store.make_bucket("other")
    with pytest.raises(StorageError, match="pyarrow does not find what obstore writes there"):
        FileStorage(store.url("apart")).create("_job", b"1")


def test_a_bucket_that_does_not_exist_is_named(store: ObjectStore) -> None:
    with pytest.raises(
        StorageError, match=r"in s3://nowhere/x.*NoSuchBucket.*; create the bucket, or correct its name"
    ):
        FileStorage(store.url("x", "nowhere")).create("_job", b"1")


def test_missing_rights_are_named_at_once(store: ObjectStore, proven: RemoteStorage) -> None:
    store.fault("PUT", "/epochs/1", "403 AccessDenied", times=100)
    with pytest.raises(
        StorageError, match=r"HTTP 403 AccessDenied: .*; the driver's credentials must allow reading, writing"
    ):
        proven.create("epochs/1", b"1")
    assert sum(line.startswith("PUT") for line in store.requests) == 1, "another try would not help"


def test_no_credentials_are_an_error_that_says_where_they_come_from(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"s3://bucket/x.*: no credentials were found for it. Set AWS_ACCESS_KEY_ID"):
        FileStorage(store.url("x")).create("_job", b"1")


def test_credentials_and_endpoint_come_from_where_pyarrow_has_them(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    use_environment(monkeypatch, store)
    assert FileStorage("s3://bucket/from-the-environment").create("_job", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")  # the URL's goes before it
    assert not FileStorage(store.url("from-the-environment")).create("_job", b"1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    inside = store.url("from-the-url").replace("s3://", f"s3://{KEY}:{SECRET}@")
    assert FileStorage(inside).create("_job", b"1")
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert FileStorage(store.url("from-a-profile")).create("_job", b"1")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(StorageError, match="its credentials cannot be obtained: The config profile"):
        FileStorage(store.url("from-a-profile")).create("_job", b"1")


def test_a_proxy_that_pyarrow_does_not_use_is_not_used(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    storage = FileStorage(store.url("without-a-proxy"))
    storage.write("x", [b"by pyarrow"])
    assert storage.create("_job", b"by obstore") and storage.list("") == ["_job", "x"]


def test_a_place_that_cannot_be_reached_is_said(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, says in (
        ("127.0.0.1:9", "Connection refused"),
        ("no-such-host.invalid", "Name or service not known|.+"),
    ):
        url = store.url("x").replace(f"127.0.0.1:{store.port}", endpoint)
        with pytest.raises(
            StorageError, match=rf"5 tries failed, the last one because PUT http://\S+ failed: ({says})\."
        ):
            FileStorage(url).create("_job", b"1")


def test_no_message_shows_a_password(store: ObjectStore) -> None:
    inside = store.url("x", "nowhere").replace("s3://", f"s3://{KEY}:{SECRET}@")
    for call in (lambda s: s.create("_job", b""), lambda s: s.read("x"), repr, lambda s: s.write("x", [b""])):
        try:
            text = str(call(FileStorage(inside)))
        except StorageError as error:
            text = str(error)
        assert "s3://nowhere/x" in text and KEY not in text and SECRET not in text
    with pytest.raises(ConfigError) as caught:
        FileStorage(f"{inside}&nonsense=1")
    assert SECRET not in str(caught.value) and "nonsense" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/x?region=r", "s3://b/x?region=r"),
        ("s3://key:se/cret@b/x", "s3://b/x"),
        ("hdfs://host:8020/x", "hdfs://host:8020/x"),
        ("hdfs://user@host:8020/x@y", "hdfs://host:8020/x@y"),
        ("abfs://container:secret@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("abfss://:secret@account.dfs.core.windows.net/c/x", "abfss://account.dfs.core.windows.net/c/x"),
        ("abfs://c@a/x?enable_tls=false&account_key=se%3Dcret", "abfs://c@a/x?enable_tls=false&account_key=…"),
        ("/a/plain@path:x", "/a/plain@path:x"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert exclusive_create.without_secrets(url) == shown


@pytest.mark.parametrize("path", ["a//b", "a/../b", "a/./b"])
def test_a_path_that_only_one_of_the_libraries_takes_is_refused_at_once(store: ObjectStore, path: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/a/.*: a part of its path is empty, or \. or \.\."):
        FileStorage(store.url(path)).create("_job", b"")


def test_settings_that_only_obstore_knows_do_not_lead_it_elsewhere(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("AWS_ENDPOINT", "http://127.0.0.1:9"),
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"),
        ("AWS_BUCKET", "other"),
        ("AWS_SESSION_TOKEN", "one that ends"),
    ):
        monkeypatch.setenv(name, value)
    storage = FileStorage(store.url("settings"))
    assert storage.create("_job", b"1") and not storage.create("_job", b"2")


def test_what_is_not_installed_is_named_before_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    for url in ("s3://k:secret@b/x", "gs://b/x", "abfs://c@a.dfs.core.windows.net/x"):
        with pytest.raises(
            ConfigError, match=r"needs the package 'obstore'.*pip install 'midstream\[object-stores\]'"
        ) as caught:
            check_can_create(url)
        assert "secret" not in str(caught.value)
    for url in ("/tmp/x", "file:///tmp/x", "hdfs://host/x", "plain"):
        check_can_create(url)


class _Elsewhere(BaseHTTPRequestHandler):
    """As much of Google's or Azure's store as one file needs to be created."""

    files: dict[str, dict[str, str]]
    seen: list[str]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        conditions = headers.get("x-goog-if-generation-match"), headers.get("if-none-match")
        self.seen.append(f"{self.path} {conditions} {headers.get('authorization', '')[:14]}")
        there = self.path in self.files
        if not there:
            self.files[self.path] = {name: value for name, value in headers.items() if "-meta-" in name}
        azure = headers.get("if-none-match") == "*"
        self._say((409 if azure else 412) if there else 201, {})

    def do_HEAD(self) -> None:
        self._say(200 if self.path in self.files else 404, self.files.get(self.path, {}))

    def _say(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        always = {"Content-Length": "0", "ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 17:00:00 GMT"}
        for name, value in {**headers, **always, "x-goog-generation": "1"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("url", "root", "seen"),
    [
        (
            "gs://anonymous@bucket/x?scheme=http&endpoint_override=127.0.0.1:PORT",
            "bucket/x",
            "/bucket/x%2F1 ('0', None) Bearer ",
        ),
        (
            "abfs://c:a2V5@account.dfs.core.windows.net/x?enable_tls=false&blob_storage_authority=127.0.0.1:PORT",
            "c/x",
            "/account/c/x/1 (None, '*') SharedKey acco",
        ),
    ],
)
def test_google_and_azure_are_asked_in_their_own_words(
    monkeypatch: pytest.MonkeyPatch, url: str, root: str, seen: str
) -> None:
    from pyarrow import fs

    pytest.importorskip("obstore", reason="the package 'obstore' is not installed: pip install 'midstream[dev]'")
    for name in (
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):  # obstore goes by them, as Google's library does
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Elsewhere,), {"files": {}, "seen": []}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        url = url.replace("PORT", str(server.server_port))
        files, found = fs.FileSystem.from_uri(url)
        assert found == root
        writes = exclusive_create.ConditionalWrites(files, root, url)
        store = writes._open()
        assert writes._create(store, f"{root}/1", b"the same") and not writes._create(store, f"{root}/1", b"the same")
        real, lost = exclusive_create.import_module, []

        def import_module(name: str) -> Any:  # whose first put succeeds, and is not heard of
            module = real(name)
            if name != "obstore" or lost:
                return module
            lost.append(name)

            def put(*arguments: Any, **named: Any) -> None:
                module.put(*arguments, **named)
                raise OSError("the answer is lost")

            return SimpleNamespace(put=put)

        monkeypatch.setattr(exclusive_create, "import_module", import_module)
        monkeypatch.setattr(exclusive_create, "FIRST_PAUSE_S", 0.001)
        assert writes._create(store, f"{root}/2", b"the same") and lost
        assert server.RequestHandlerClass.seen[0] == seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(limit_s(10))
