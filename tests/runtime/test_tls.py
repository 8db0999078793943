"""Encrypted connections: who gets in, what strangers hear, and that nothing of it can be read on the way."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from jobs import check_gapless
from machine import limit_s
from midstream import Environment, KeyedProcessFunction
from midstream.engine.core.errors import ClusterError, ConfigError
from midstream.engine.protocol.framing import ProtocolViolation, frame
from midstream.engine.protocol.handshake import Dialer, Identity, Role
from midstream.engine.protocol.messages import GetStatus
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job import Job
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.connection import Connection, dial
from midstream.runtime.network.listener import Listener
from midstream.runtime.network.tls import WRITE_BYTES_MAX, JobKeys, keys_for, tls_of
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

SECRET = bytes(range(32))
IDENTITY = Identity(Role.SLOT_DATA, "job", 0, 0, 1)
OURS, OTHERS = keys_for("on", "127.0.0.1", SECRET), keys_for("on", "127.0.0.1", SECRET)
PLAIN = JobKeys(SECRET)


class Authority:
    """Signs certificates, and writes them as midstream reads them."""

    def __init__(self) -> None:
        self._key = generate_private_key(SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's authority")])
        self._certificate = self._signed(self._name, self._key, timedelta(days=10), is_authority=True)

    def issue(
        self,
        directory: Path,
        ends_in: timedelta = timedelta(days=1),
        protection: KeySerializationEncryption | None = None,
    ) -> str:
        directory.mkdir()
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, directory.name)])
        certificate = self._signed(name, key, ends_in, is_authority=False)
        (directory / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        (directory / "tls.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection or NoEncryption())
        )
        (directory / "ca.crt").write_bytes(self._certificate.public_bytes(Encoding.PEM))
        return str(directory)

    def _signed(
        self, name: x509.Name, key: EllipticCurvePrivateKey, ends_in: timedelta, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
        return (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=20))
            .not_valid_after(now + ends_in)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self._key, SHA256())
        )


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


class Side:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.fatal: list[BaseException] = []
        self.loop = EventLoop("test", fatal=self.fatal.append)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()
        self.opened: list[Connection] = []
        self.failed: list[tuple[str, bool]] = []

    def listen(self, keys: JobKeys) -> Listener:
        listener = Listener(
            self.loop,
            "127.0.0.1",
            keys,
            lambda _: "",
            lambda connection, _: self.opened.append(connection),
            frame_bytes_max=2**24,
            buffer_bytes=2**16,
            handshake_timeout_s=2.0,
        )
        self.loop.post(listener.start)
        return listener

    def dial(self, keys: JobKeys, port: int) -> None:
        def begin() -> None:
            Connection(
                self.loop,
                dial("127.0.0.1", port),
                Dialer(keys.secret, IDENTITY, os.urandom(32)),
                self.opened.append,
                lambda connection, reason: self.failed.append((reason, connection.is_judged)),
                frame_bytes_max=2**24,
                buffer_bytes=2**16,
                tls=tls_of(keys),
                handshake_timeout_s=5.0,
                connecting=True,
            )

        self.loop.post(begin)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(limit_s(10))
        assert not self._thread.is_alive()
        self.loop.close()
        assert not self.fatal, self.fatal


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    sides = Side(), Side()
    yield sides
    for side in sides:
        side.close()


def refused(sides: tuple[Side, Side], listens: JobKeys, dials: JobKeys) -> tuple[str, bool]:
    """Why the dialer was not let in, and whether it knows better than to dial again."""
    there, here = sides
    listener = there.listen(listens)
    here.failed.clear()
    here.dial(dials, listener.port)
    until("the dialer to be turned away", lambda: here.failed)
    assert not here.opened and not there.opened
    until("the listener to have forgotten it", lambda: listener.unauthenticated == 0)
    return here.failed[0]


# ---- who gets in


def test_a_certificate_of_another_job_is_not_accepted(sides: tuple[Side, Side]) -> None:
    reason, is_final = refused(sides, OURS, OTHERS)
    assert "TLS: the peer's certificate is not accepted: self-signed certificate" in reason
    assert is_final


def test_who_has_the_certificate_and_not_the_secret_is_not_let_in(sides: tuple[Side, Side]) -> None:
    reason, _ = refused(sides, OURS, msgspec.structs.replace(OURS, secret=bytes(32)))
    assert "closed the connection" in reason


def test_one_that_encrypts_and_one_that_does_not_part_in_time(sides: tuple[Side, Side]) -> None:
    reason, _ = refused(sides, OURS, PLAIN)
    assert reason  # of a plain peer's own words: what it gets is an alert of TLS
    reason, _ = refused(sides, PLAIN, OURS)
    assert reason == "TLS: the peer closed the connection" or "reset" in reason


def test_a_stranger_without_a_certificate_is_not_let_in(sides: tuple[Side, Side]) -> None:
    listener = sides[0].listen(OURS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection((listener.host, listener.port), timeout=limit_s(10))
    with context.wrap_socket(plain) as sock, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        sock.recv(1)
    until("it to be forgotten", lambda: listener.unauthenticated == 0)
    assert not sides[0].opened


def test_certificates_of_one_authority_let_each_other_in_and_no_others(
    sides: tuple[Side, Side], authority: Authority, tmp_path: Path
) -> None:
    there, here = sides
    first, second = (keys_for(authority.issue(tmp_path / name), "127.0.0.1", SECRET) for name in ("one", "two"))
    here.dial(second, there.listen(first).port)
    until("both", lambda: here.opened and there.opened)
    stranger = keys_for(Authority().issue(tmp_path / "stranger"), "127.0.0.1", SECRET)
    here.opened.clear()
    there.opened.clear()
    assert "TLS: the peer's certificate is not accepted: " in refused(sides, first, stranger)[0]


def test_a_man_in_the_middle_with_a_certificate_of_the_same_authority_cannot_pass_proofs_on(
    sides: tuple[Side, Side], authority: Authority, tmp_path: Path
) -> None:
    there, here = sides
    ours, his = (keys_for(authority.issue(tmp_path / name), "127.0.0.1", SECRET) for name in ("ours", "his"))
    port = there.listen(ours).port
    tls = tls_of(his)
    assert tls is not None
    with socket.create_server(("127.0.0.1", 0)) as trap:
        here.dial(ours, trap.getsockname()[1])
        plain, _ = trap.accept()
        plain.settimeout(10)
        with tls.wrap(plain, accepted=True) as victim:
            victim.do_handshake()
            with tls.connect(socket.create_connection(("127.0.0.1", port), timeout=limit_s(10))) as target:
                target.sendall(victim.recv(4096))  # HELLO
                victim.sendall(target.recv(4096))  # CHALLENGE
                target.sendall(victim.recv(4096))  # PROOF, of a connection that ends at another certificate
                assert not target.recv(4096)
    until("the dialer to hear of it", lambda: here.failed)
    assert not here.opened and not there.opened


# ---- what a directory must hold


def spoiled(directory: str, how: Callable[[Path], Any]) -> str:
    how(Path(directory))
    return directory


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda d: (d / "tls.key").unlink(), r"tls\.key does not exist on .*; a directory for TLS holds tls\.crt"),
        (lambda d: (d / "ca.crt").write_text("no certificate"), r"ca\.crt holds no certificate in PEM: NO_CERT"),
        (lambda d: (d / "tls.crt").write_text("no certificate"), r"are not a certificate and key in PEM: no line"),
        (lambda d: (d / "tls.key").write_text(""), r"are not a certificate and key in PEM"),
    ],
    ids=["missing", "authority", "certificate", "key"],
)
def test_a_directory_that_cannot_be_used_is_refused_with_the_file(
    authority: Authority, tmp_path: Path, how: Callable[[Path], Any], said: str
) -> None:
    directory = spoiled(authority.issue(tmp_path / "certificate"), how)
    with pytest.raises(ConfigError, match=said):
        keys_for(directory, "127.0.0.1", SECRET)


def test_a_key_of_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    one, two = Path(authority.issue(tmp_path / "one")), Path(authority.issue(tmp_path / "two"))
    (one / "tls.key").write_bytes((two / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match=r"tls\.key is not the key of .*one/tls\.crt"):
        keys_for(str(one), "127.0.0.1", SECRET)


def test_a_certificate_that_its_own_authority_has_not_signed_is_refused(authority: Authority, tmp_path: Path) -> None:
    own, other = Path(authority.issue(tmp_path / "own")), Path(Authority().issue(tmp_path / "other"))
    (own / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match=r"own/tls\.crt is not accepted by processes that trust .*own/ca\.crt: .*"):
        keys_for(str(own), "127.0.0.1", SECRET)


def test_an_expired_certificate_is_refused_with_its_date(authority: Authority, tmp_path: Path) -> None:
    directory = authority.issue(tmp_path / "old", timedelta(days=-1))
    with pytest.raises(ConfigError, match=r"old/tls\.crt has expired on 20\d\d-\d\d-\d\d .* UTC; renew it"):
        keys_for(directory, "127.0.0.1", SECRET)


def test_a_certificate_that_expires_while_the_job_runs_is_named_by_the_peer(
    sides: tuple[Side, Side], authority: Authority, tmp_path: Path
) -> None:
    good = keys_for(authority.issue(tmp_path / "good"), "127.0.0.1", SECRET)
    old = JobKeys(SECRET, directory=authority.issue(tmp_path / "old", timedelta(days=-1)))
    assert refused(sides, old, good) == ("TLS: the peer's certificate is not accepted: certificate has expired", True)


def test_who_shows_an_expired_certificate_is_told_and_does_not_dial_again(
    sides: tuple[Side, Side], authority: Authority, tmp_path: Path
) -> None:
    good = keys_for(authority.issue(tmp_path / "good"), "127.0.0.1", SECRET)
    old = JobKeys(SECRET, directory=authority.issue(tmp_path / "old", timedelta(days=-1)))
    reason, is_final = refused(sides, good, old)
    assert "expired" in reason and is_final


def test_a_renewed_certificate_is_used_at_once_and_a_half_renewed_one_not_at_all(
    sides: tuple[Side, Side], authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = sides
    peer = keys_for(authority.issue(tmp_path / "peer"), "127.0.0.1", SECRET)
    renewed, new = Path(authority.issue(tmp_path / "renewed")), Path(authority.issue(tmp_path / "new"))
    keys = keys_for(str(renewed), "127.0.0.1", SECRET)
    listener = there.listen(keys)

    def shown() -> bytes:
        """The certificate that the listener shows now."""
        tls = tls_of(peer)
        assert tls is not None
        with tls.connect(socket.create_connection((listener.host, listener.port), timeout=limit_s(10))) as sock:
            found = sock.getpeercert(binary_form=True)
        assert found is not None
        return found

    first = shown()
    (renewed / "tls.crt").write_bytes((new / "tls.crt").read_bytes())
    os.utime(renewed / "tls.crt", ns=(1, 1))
    assert shown() == first and "tls.key is not the key of" in caplog.text
    (renewed / "tls.key").write_bytes((new / "tls.key").read_bytes())
    os.utime(renewed / "tls.key", ns=(1, 1))
    assert shown() == ssl.PEM_cert_to_DER_cert((new / "tls.crt").read_text()) != first
    here.dial(keys, listener.port)
    until("both", lambda: here.opened and there.opened)


def test_a_key_with_a_password_is_refused(authority: Authority, tmp_path: Path) -> None:
    directory = authority.issue(tmp_path / "secret", protection=BestAvailableEncryption(b"nobody asks"))
    with pytest.raises(ConfigError, match=r"tls\.key has a password; give a key without one"):
        keys_for(directory, "127.0.0.1", SECRET)


@pytest.mark.parametrize(
    ("tls", "host", "encrypted"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "localhost", False),
        ("auto", "0.0.0.0", True),
        ("auto", "10.1.2.3", True),
        ("auto", "::", True),
        ("off", "10.1.2.3", False),
        ("on", "127.0.0.1", True),
    ],
)
def test_connections_are_encrypted_unless_all_are_on_one_machine(tls: str, host: str, encrypted: bool) -> None:
    assert (tls_of(keys_for(tls, host, SECRET)) is not None) == encrypted


def test_keys_are_not_shown() -> None:
    assert repr(OURS) == "JobKeys(encrypted)" and repr(PLAIN) == "JobKeys(not encrypted)"


# ---- traffic


class Keeps:
    """A ConnectionEnd: sends what it is given and keeps what it gets."""

    def __init__(self) -> None:
        self.queue: list[list[bytes | memoryview]] = []
        self.received: list[bytes] = []
        self.reasons: list[str] = []

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        return self.queue.pop(0) if self.queue else []

    def receive(self, frame: memoryview) -> None:
        self.received.append(bytes(frame))

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)


def test_frames_far_larger_than_a_record_cross_each_other_whole(sides: tuple[Side, Side]) -> None:
    """Neither side can take all that the other sends: both have to wait in the midst of a frame, again and again."""
    there, here = sides
    here.dial(OURS, there.listen(OURS).port)
    until("both", lambda: here.opened and there.opened)
    bodies = [bytes((n,)) * (WRITE_BYTES_MAX * n + n) for n in range(1, 12)]
    ends = Keeps(), Keeps()
    for side, end in zip(sides, ends, strict=True):
        end.queue = [frame(0x11, memoryview(body)) for body in bodies]
        side.loop.post(lambda side=side, end=end: side.opened[0].carry(end))  # type: ignore[misc]  # mypy infers no lambda with defaults
        side.loop.post(lambda side=side: side.opened[0].wake())  # type: ignore[misc]  # as above
    until("all", lambda: all(len(end.received) == len(bodies) for end in ends), 60)
    for end in ends:
        assert end.received == [b"\x11" + body for body in bodies]
        assert not end.reasons


class Tap(threading.Thread):
    """Passes a connection on to `port`, and keeps what goes over it."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._target = port
        self.seen = bytearray()

    def run(self) -> None:
        one, _ = self._server.accept()
        two = socket.create_connection(("127.0.0.1", self._target))
        back = threading.Thread(target=self._copy, args=(two, one), daemon=True)
        back.start()
        self._copy(one, two)
        back.join()
        for sock in (one, two, self._server):
            sock.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # either side may close at any time
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Same(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        return row


@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_command_sees_the_job_and_who_listens_sees_nothing_of_it(tls: str, running: list[Job]) -> None:
    env = Environment("a-name-to-look-for", parallelism=2, tls=tls)
    numbers = env.generate(lambda i: {"n": i % 10}, rows_per_s=100)
    numbers.key_by("n").process(Same(), schema={"n": int}).print(limit=1)
    running.append(env.start(slots=ProcessSlots()))
    until("the job to run", lambda: running[0].status().state == "running")
    (entry,) = job_registry.list_jobs()
    tap = Tap(entry.port)
    tap.start()
    with Client(msgspec.structs.replace(entry, port=tap.port)) as client:
        status = client.request(GetStatus()).status
    tap.join(limit_s(10))
    assert status is not None and status.name == "a-name-to-look-for" and status.tls == tls
    assert (b"a-name-to-look-for" in tap.seen) == (tls == "off")
    if tls == "on":
        with pytest.raises((ProtocolViolation, ClusterError)):
            Client(msgspec.structs.replace(entry, keys=JobKeys(entry.keys.secret)))


@pytest.mark.systems
def test_a_job_with_encrypted_connections_loses_nothing_when_a_slot_is_killed(
    running: list[Job], authority: Authority, tmp_path: Path
) -> None:
    env = Environment(
        "encrypted",
        parallelism=2,
        checkpoint_dir=tmp_path / "state",
        checkpoint_interval="100 ms",
        tls=authority.issue(tmp_path / "certificate"),
    )
    numbers = env.generate(lambda i: {"n": i}, rows_per_s=1500)
    numbers.key_by("n").process(Same(), schema={"n": int}).write_jsonl(tmp_path / "out")
    slots = ProcessSlots()
    job = env.start(slots=slots)
    running.append(job)
    until("a checkpoint", lambda: job.status().checkpoints_completed >= 2)
    assert job.status().tls == str(tmp_path / "certificate")

    def written() -> list[int]:
        return [
            msgspec.json.decode(line)["n"]
            for file in (tmp_path / "out").glob("*.jsonl")
            for line in file.read_bytes().splitlines()
        ]

    os.kill(next(iter(slots.pids.values())), 9)
    until("the restart", lambda: job.status().restarts == 1)
    before = len(written())
    until("more rows", lambda: len(written()) > before)
    job.stop(drain=True, timeout_s=limit_s(60))
    check_gapless(written())
    assert job.status().restarts == 1
