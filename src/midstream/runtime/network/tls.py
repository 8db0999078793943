"""Encrypted connections between the processes of one job: TLS 1.3, both sides show a certificate.

By default the driver makes one certificate, with its key, at each start of a job. It reaches slots and commands as the
job's secret does, every process of the job presents it, and all of them trust it alone: a peer without the key fails
the TLS handshake. With a directory of the user's own, every process presents the certificate found there on its own
machine, and trusts what the authority there has signed.

The owner of a certificate does not matter: the handshake over the job's secret follows inside TLS, and its proofs are
bound to the certificate that the acceptor has presented. So another certificate of the same authority does not allow
relaying the proofs between two honest sides.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from midstream.engine.core.errors import ClusterError, ConfigError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""The file names, as in a Kubernetes secret of the type kubernetes.io/tls."""
WRITE_BYTES_MAX: Final = 256 * 2**10
_VALID: Final = timedelta(days=36_500)
_log = logging.getLogger(__name__)
_CLOCKS_DIFFER_AT_MOST: Final = timedelta(days=30)


class JobKeys(msgspec.Struct, frozen=True):
    """The keys shared by all processes of a job, and by no others. They travel only over private channels."""

    secret: bytes
    certificate: bytes = b""
    """PEM of a certificate and its key, which all processes share; empty without encryption, or with `directory`."""
    directory: str = ""
    """The directory in which each process has its own certificate, key and authority."""

    def __repr__(self) -> str:
        return f"JobKeys({'encrypted' if self.certificate or self.directory else 'not encrypted'})"


def keys_for(tls: str, bind_host: str, secret: bytes) -> JobKeys:
    """Return the job's keys. `tls`: "auto" (off if the driver listens on loopback), "on", "off", or a directory.

    Raises ConfigError for an unusable directory.
    """
    if tls == "off" or (tls == "auto" and _is_loopback(bind_host)):
        return JobKeys(secret)
    if tls in ("auto", "on"):
        return JobKeys(secret, _new_certificate())
    keys = JobKeys(secret, directory=tls)
    tls_of(keys)
    _check_dates(tls)
    _check_chain(tls)
    return keys


def tls_shown(keys: JobKeys) -> str:
    """Return how a job's status shows the encryption."""
    return keys.directory or ("on" if keys.certificate else "off")


class Tls:
    """The contexts with which a process encrypts its connections, as either side."""

    def __init__(self, keys: JobKeys) -> None:
        """Raises ConfigError for files in `keys.directory` that are missing or do not match."""
        if keys.directory:
            certificate, key, authority = (Path(keys.directory, name) for name in (CERTIFICATE, KEY, AUTHORITY))
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority)
            shown = certificate.read_text()
        else:
            with tempfile.NamedTemporaryFile(prefix="midstream-", suffix=".pem") as file:  # readable by this user only
                file.write(keys.certificate)
                file.flush()
                path = Path(file.name)
                self.server = _context(ssl.PROTOCOL_TLS_SERVER, path, path, path)
                self.client = _context(ssl.PROTOCOL_TLS_CLIENT, path, path, path)
            shown = keys.certificate.decode()
        self.server.num_tickets = 0  # sessions are not resumed
        end = shown.index(_PEM_END) + len(_PEM_END)
        self._shown = ssl.PEM_cert_to_DER_cert(shown[shown.index(_PEM_BEGIN) : end])

    def wrap(self, sock: socket.socket, *, accepted: bool) -> TlsSocket:
        """Return the same connection, encrypted after `do_handshake`. Raises OSError if it is broken."""
        context = self.server if accepted else self.client
        wrapped = context.wrap_socket(sock, server_side=accepted, do_handshake_on_connect=False)
        assert isinstance(wrapped, TlsSocket)
        return wrapped

    def connect(self, sock: socket.socket) -> TlsSocket:
        """Encrypt a blocking connection, as its dialer.

        Raises ClusterError if the peer is not one of the job's processes, ConnectionError if it goes away.
        """
        try:
            wrapped = self.wrap(sock, accepted=False)
            wrapped.do_handshake()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionAbortedError(explained(error)) from error
        except ssl.SSLError as error:
            raise ClusterError(explained(error)) from error
        return wrapped

    def channel(self, sock: TlsSocket) -> bytes:
        """Return the hash of the certificate that the acceptor has presented, as both sides see it after the handshake."""
        shown = self._shown if sock.server_side else sock.getpeercert(binary_form=True)
        assert shown is not None
        return hashlib.sha256(shown).digest()


def tls_of(keys: JobKeys) -> Tls | None:
    """Return the contexts for new connections, reading renewed certificates; None without encryption.

    Raises ConfigError for a directory that cannot be used, unless an earlier call could use it.
    """
    if not keys.directory:
        return _of_certificate(keys) if keys.certificate else None
    changed = _changed(keys.directory)
    before, known = _of_directory.get(keys, (None, None))
    if known is None or before != changed:
        try:
            known = Tls(keys)
        except ConfigError as error:  # its files may be half replaced
            if known is None:
                raise
            _log.warning("%s; new connections use the certificate that was read before", error)
        _of_directory[keys] = changed, known
    return known


_of_certificate: Final = lru_cache(maxsize=8)(Tls)
_of_directory: Final[dict[JobKeys, tuple[tuple[int, ...], Tls]]] = {}


def _changed(directory: str) -> tuple[int, ...]:
    """Return when the files were changed, in nanoseconds; 0 for missing ones."""
    times = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        try:
            times.append(os.stat(os.path.join(directory, name)).st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that, if nonblocking, behaves like a plain nonblocking socket as far as `Connection` uses it.

    Two threads may use it at the same time. OpenSSL does not allow that, so they take turns.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> TlsSocket:
        """Initialise here, since wrapping a socket does not call `__init__`."""
        made = super().__new__(cls, *arguments, **options)
        made._turns = threading.RLock()  # a signal handler may print, and so send, while its own thread is sending
        made._begun = b""
        return made

    _turns: threading.RLock
    _begun: bytes
    """Bytes that OpenSSL could not send yet: some of them may be in transit, so the same bytes must be sent before
    anything else.
    """

    @property
    def has_begun(self) -> bool:
        """Whether bytes are pending that it has not yet reported as sent."""
        return bool(self._begun)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive as much as there is (nonblocking), not only one TLS record. 0: the peer has closed."""
        if self.gettimeout() != 0.0:
            return super().recv_into(buffer, nbytes, flags)
        view = memoryview(buffer)
        count = 0
        with self._turns:
            while count < len(view):
                try:
                    received = super().recv_into(view[count:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not count:
                        raise BlockingIOError from None
                    return count
                except OSError:
                    if not count:
                        raise
                    return count  # the next call finds it again
                if not received:
                    return count
                count += received
        return count

    def sendmsg(self, buffers: Iterable[Any], *_unused: Any) -> int:  # type: ignore[override]  # ssl has none
        """Return how many bytes of `buffers` were accepted, from their beginning. The others must be passed again."""
        with self._turns:
            self._begun = self._begun or _first_of(buffers, WRITE_BYTES_MAX)
            if not self._begun:
                return 0
            try:
                self.send(self._begun)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            sent, self._begun = len(self._begun), b""
            return sent

    def pending(self) -> int:
        """Return the number of bytes that have been received and decrypted, which the selector does not see."""
        with self._turns:
            return super().pending()


def explained(error: OSError) -> str:
    """Explain why an encrypted connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the peer's certificate is not accepted: {error.verify_message}"
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return "TLS: the peer closed the connection"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return f"the connection broke: {error.strerror or error}"


def is_final(error: OSError) -> bool:
    """Whether the error is caused by the peer's identity, not by the network, so that a retry would end in the same
    way.
    """
    return isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))


_PEM_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_PEM_END: Final = "-----END CERTIFICATE-----"


def _first_of(buffers: Iterable[Any], bytes_max: int) -> bytes:
    pieces: list[Any] = []
    room = bytes_max
    for buffer in buffers:
        if len(buffer) >= room:
            pieces.append(memoryview(buffer)[:room])
            break
        pieces.append(buffer)
        room -= len(buffer)
    return b"".join(pieces)


def _context(protocol: int, certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    for path in (certificate, key, authority):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"tls: {path} {'may not be read' if path.exists() else 'does not exist'} on {socket.gethostname()}; a "
                f"directory for TLS holds {CERTIFICATE}, {KEY} and {AUTHORITY} on every machine of the job (tls='auto', 'on' and "
                "'off' need none)"
            )
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except (ssl.SSLError, ValueError) as error:
        reason = _reason(error)
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls: {key} is not the key of {certificate}") from error
        raise ConfigError(f"tls: {certificate} and {key} are not a certificate and key in PEM: {reason}") from error
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise ConfigError(f"tls: {authority} holds no certificate in PEM: {_reason(error)}") from error
    return context


def _reason(error: ssl.SSLError | ValueError) -> str:
    """Return the reason of OpenSSL, which has none for a file without any PEM."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "no line of -----BEGIN …----- is in it"
    return str(error)


def _refuse_password(key: Path) -> str:
    raise ValueError(f"{key} has a password; give a key without one, readable by the job's user only")


def _check_dates(directory: str) -> None:
    from cryptography import x509

    path = Path(directory, CERTIFICATE)
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    ends = certificate.not_valid_after_utc
    if ends < datetime.now(UTC):
        raise ConfigError(f"tls: {path} has expired on {ends:%Y-%m-%d %H:%M} UTC; renew it on every machine")


def _check_chain(directory: str) -> None:
    """Raise ConfigError unless the directory's own authority has signed its certificate: no peer would accept it."""
    contexts = [
        _context(protocol, *(Path(directory, name) for name in (CERTIFICATE, KEY, AUTHORITY)))
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
    ]
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[0].wrap_bio(to_client, to_server)
    server = contexts[1].wrap_bio(to_server, to_client, server_side=True)
    is_done = {client: False, server: False}
    try:
        while not all(is_done.values()):
            for end in is_done:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    is_done[end] = True
        with suppress(ssl.SSLWantReadError):
            client.read(1)  # in TLS 1.3 the dialer learns only now that it is refused
    except ssl.SSLError as error:
        certificate, authority = (Path(directory, name) for name in (CERTIFICATE, AUTHORITY))
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else explained(error)
        raise ConfigError(
            f"tls: {certificate} is not accepted by processes that trust {authority}: {why}; {AUTHORITY} must be the "
            f"authority that has signed it, {CERTIFICATE} must also hold the certificates between the two, and the "
            "certificate must be valid for both sides of a connection"
        ) from error


def _new_certificate() -> bytes:
    """Return a new self-signed certificate with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a midstream job")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_AT_MOST)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)


def _is_loopback(host: str) -> bool:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)
    return False
