"""Mutual authentication: challenge and response over the job's secret, before anything else is read.

    dialer                                  acceptor
    HELLO      magic, version, nonce_d  →
                                        ←   CHALLENGE  magic, version, nonce_a
    PROOF      mac_d, identity          →
                                        ←   VERDICT    mac_a, refusal ("" = welcome)

    mac_d = HMAC-SHA256(secret, "midstream dialer"   | channel | HELLO | CHALLENGE | identity)
    mac_a = HMAC-SHA256(secret, "midstream acceptor" | channel | HELLO | CHALLENGE | identity | refusal)

On an encrypted connection both MACs begin with `channel`, the hash of the certificate that the acceptor has presented.
Each frame of the transcript is included with its length, so no two transcripts read the same. Both nonces are fresh,
which rules out replay; the two labels differ, which rules out reflection. The dialer proves itself first: a dialer
without the secret receives nothing from the acceptor but random bytes. `identity` (role, job, attempt, both slots)
stays opaque until its MAC has been checked.

Sans-I/O: the caller passes nonces and frames (from the type byte on), and gets the bytes to send. Anything else raises
ProtocolViolation, and the connection is closed without an answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from enum import IntEnum
from typing import Final

import msgspec

from midstream.engine.core.errors import UNDECODABLE, ClusterError
from midstream.engine.protocol.framing import ProtocolViolation, frame

MAGIC: Final = b"MDSTREAM"
VERSION: Final = 1
NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 32
MAC_BYTES: Final = 32
REFUSAL_BYTES_MAX: Final = 512

HELLO: Final = 0x01
CHALLENGE: Final = 0x02
PROOF: Final = 0x03
VERDICT: Final = 0x04

_OPENING: Final = MAGIC + bytes((VERSION,))
_DIALER: Final = b"midstream dialer"
_ACCEPTOR: Final = b"midstream acceptor"


class Role(IntEnum):
    """The purpose of a connection."""

    SLOT_CONTROL = 1
    SLOT_DATA = 2
    CLIENT = 3


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The identity that the dialer claims, and the one that it dials. Slots are -1 where there is none (yet)."""

    role: Role
    job_id: str
    attempt: int = 0
    from_slot: int = -1
    to_slot: int = -1


class Refused(ClusterError):
    """The acceptor has the secret and refused this connection, with a reason."""


_encode = msgspec.msgpack.Encoder().encode
_identity_decoder = msgspec.msgpack.Decoder(Identity)


class Dialer:
    """The side that opened the connection. `start`, then `receive` until `done`."""

    def __init__(self, secret: bytes, identity: Identity, nonce: bytes) -> None:
        _check_sizes(secret, nonce)
        self._secret = secret
        self._identity = _encode(identity)
        self._hello = _OPENING + nonce
        self._challenge: bytes | None = None
        self.channel = b""
        """The identity of an encrypted connection, known to both sides; empty without encryption."""
        self.done = False

    def start(self) -> bytes:
        return _bytes_of(HELLO, self._hello)

    def receive(self, received: memoryview) -> bytes:
        """Process a frame and return the bytes to send. Raises ProtocolViolation, or Refused with the acceptor's
        reason.
        """
        assert not self.done
        kind, body = received[0], bytes(received[1:])
        if self._challenge is None:
            self._challenge = _opening(kind, body, CHALLENGE)
            if self._challenge == self._hello:
                raise ProtocolViolation("our own nonce came back: a reflected handshake")
            mac = _mac(self._secret, _DIALER, self.channel, self._hello, self._challenge, self._identity)
            return _bytes_of(PROOF, mac + self._identity)
        if kind != VERDICT or not MAC_BYTES <= len(body) <= MAC_BYTES + REFUSAL_BYTES_MAX:
            raise ProtocolViolation(f"handshake: expected a verdict, got type {kind:#x} of {len(body)} bytes")
        refusal = body[MAC_BYTES:]
        mac = _mac(self._secret, _ACCEPTOR, self.channel, self._hello, self._challenge, self._identity, refusal)
        if not hmac.compare_digest(mac, body[:MAC_BYTES]):
            raise ProtocolViolation("handshake: the peer does not have the job's secret")
        if refusal:
            raise Refused(refusal.decode(errors="replace"))
        self.done = True
        return b""


class Acceptor:
    """The side that was dialled.

    `refusal` receives an identity only once it is proved, and returns "" to accept it, or the reason for the refusal.
    """

    def __init__(self, secret: bytes, nonce: bytes, refusal: Callable[[Identity], str]) -> None:
        _check_sizes(secret, nonce)
        self._secret = secret
        self._challenge = _OPENING + nonce
        self._hello: bytes | None = None
        self.channel = b""
        """See `Dialer.channel`."""
        self._refusal = refusal
        self.identity: Identity | None = None
        """The identity of the peer, once it is proved."""
        self.refusal = ""
        """The reason for a refusal; set together with `done`."""
        self.done = False

    def start(self) -> bytes:
        return b""

    def receive(self, received: memoryview) -> bytes:
        """Process a frame and return the bytes to send. Raises ProtocolViolation.

        If `done` is set with a `refusal`, send the answer and close.
        """
        assert not self.done
        kind, body = received[0], bytes(received[1:])
        if self._hello is None:
            self._hello = _opening(kind, body, HELLO)
            if self._hello == self._challenge:
                raise ProtocolViolation("our own nonce came back: a reflected handshake")
            return _bytes_of(CHALLENGE, self._challenge)
        if kind != PROOF or len(body) <= MAC_BYTES:
            raise ProtocolViolation(f"handshake: expected a proof, got type {kind:#x} of {len(body)} bytes")
        claimed = body[MAC_BYTES:]
        mac = _mac(self._secret, _DIALER, self.channel, self._hello, self._challenge, claimed)
        if not hmac.compare_digest(mac, body[:MAC_BYTES]):
            raise ProtocolViolation("handshake: the peer does not have the job's secret")
        try:
            self.identity = _identity_decoder.decode(claimed)
        except UNDECODABLE as error:
            raise ProtocolViolation(f"handshake: the identity is invalid: {error}") from error
        self.refusal = self._refusal(self.identity)
        refusal = self.refusal.encode()[:REFUSAL_BYTES_MAX]
        self.done = True
        return _bytes_of(
            VERDICT,
            _mac(self._secret, _ACCEPTOR, self.channel, self._hello, self._challenge, claimed, refusal) + refusal,
        )


Handshake = Dialer | Acceptor


def _check_sizes(secret: bytes, nonce: bytes) -> None:
    assert len(secret) == SECRET_BYTES, f"a secret of {len(secret)} bytes"
    assert len(nonce) == NONCE_BYTES, f"a nonce of {len(nonce)} bytes"


def _opening(kind: int, body: bytes, expected: int) -> bytes:
    """Return the body of the peer's first frame, once its protocol and version have been checked."""
    if kind != expected or not body.startswith(MAGIC):
        raise ProtocolViolation("the peer does not use midstream's protocol")
    if not body.startswith(_OPENING):
        raise ProtocolViolation(
            f"the peer uses version {body[len(MAGIC)] if len(body) > len(MAGIC) else 0} of the protocol, and this "
            f"is version {VERSION}; install the same midstream everywhere"
        )
    if len(body) != len(_OPENING) + NONCE_BYTES:
        raise ProtocolViolation(f"handshake: an opening of {len(body)} bytes")
    return body


def _mac(secret: bytes, label: bytes, *transcript: bytes) -> bytes:
    mac = hmac.new(secret, label, "sha256")
    for part in transcript:
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return mac.digest()


def _bytes_of(kind: int, body: bytes) -> bytes:
    return b"".join(frame(kind, body))
