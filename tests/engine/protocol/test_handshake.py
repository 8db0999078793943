"""Nobody gets through without the job's secret: neither by guessing, replaying, nor reflecting."""

from __future__ import annotations

import os

import pytest

from midstream.engine.protocol.framing import LENGTH_BYTES, ProtocolViolation
from midstream.engine.protocol.handshake import (
    CHALLENGE,
    HELLO,
    MAC_BYTES,
    PROOF,
    VERDICT,
    Acceptor,
    Dialer,
    Identity,
    Refused,
    Role,
)

SECRET = bytes(range(32))
IDENTITY = Identity(Role.SLOT_DATA, "job-1", attempt=3, from_slot=1, to_slot=2)


def nonce() -> bytes:
    return os.urandom(32)


def dialer(secret: bytes = SECRET, identity: Identity = IDENTITY) -> Dialer:
    return Dialer(secret, identity, nonce())


def acceptor(secret: bytes = SECRET, refusal: str = "") -> Acceptor:
    return Acceptor(secret, nonce(), lambda _: refusal)


def content(data: bytes) -> memoryview:
    """The frame in `data`, without its length."""
    assert int.from_bytes(data[:LENGTH_BYTES], "little") == len(data) - LENGTH_BYTES
    return memoryview(data)[LENGTH_BYTES:]


def exchange(a: Dialer, b: Acceptor) -> list[bytes]:
    """All frames of a handshake between the two."""
    hello = a.start()
    challenge = b.receive(content(hello))
    proof = a.receive(content(challenge))
    verdict = b.receive(content(proof))
    a.receive(content(verdict))
    return [hello, challenge, proof, verdict]


def test_both_sides_that_know_the_secret_get_through_and_the_acceptor_knows_whom_it_has() -> None:
    a, b = dialer(), acceptor()
    frames = exchange(a, b)
    assert a.done and b.done and b.identity == IDENTITY
    assert [frame[LENGTH_BYTES] for frame in frames] == [HELLO, CHALLENGE, PROOF, VERDICT]
    assert all(SECRET not in frame for frame in frames)


def test_a_dialer_with_the_wrong_secret_is_found_out_before_its_identity_is_parsed() -> None:
    judged: list[Identity] = []
    a = dialer(secret=bytes(32))
    b = Acceptor(SECRET, nonce(), lambda identity: judged.append(identity) or "")
    proof = a.receive(content(b.receive(content(a.start()))))
    with pytest.raises(ProtocolViolation, match="does not have the job's secret"):
        b.receive(content(proof))
    assert b.identity is None and not judged and not b.done


def test_an_acceptor_with_the_wrong_secret_is_found_out() -> None:
    a = dialer()
    impostor = acceptor(secret=bytes(32))
    a.receive(content(impostor.receive(content(a.start()))))
    forged = bytes((VERDICT,)) + os.urandom(MAC_BYTES)
    with pytest.raises(ProtocolViolation, match="does not have the job's secret"):
        a.receive(memoryview(forged))
    assert not a.done


def test_a_recorded_handshake_proves_nothing_to_another_acceptor() -> None:
    hello, _, proof, _ = exchange(dialer(), acceptor())
    b = acceptor()
    b.receive(content(hello))
    with pytest.raises(ProtocolViolation, match="secret"):
        b.receive(content(proof))


def test_a_recorded_handshake_proves_nothing_to_another_dialer() -> None:
    _, challenge, _, verdict = exchange(dialer(), acceptor())
    a = dialer()
    a.start()
    a.receive(content(challenge))
    with pytest.raises(ProtocolViolation, match="secret"):
        a.receive(content(verdict))


def test_a_dialer_is_not_fooled_by_its_own_messages() -> None:
    a = dialer()
    hello = content(a.start())
    with pytest.raises(ProtocolViolation, match="protocol"):
        a.receive(hello)
    a = dialer()
    reflected = bytes((CHALLENGE,)) + bytes(content(a.start())[1:])
    with pytest.raises(ProtocolViolation, match="reflected"):
        a.receive(memoryview(reflected))


def test_a_dialer_s_proof_sent_back_is_no_verdict() -> None:
    a, b = dialer(), acceptor()
    proof = content(a.receive(content(b.receive(content(a.start())))))
    reflected = bytes((VERDICT,)) + bytes(proof[1 : 1 + MAC_BYTES])
    with pytest.raises(ProtocolViolation, match="secret"):
        a.receive(memoryview(reflected))


def test_an_acceptor_is_not_fooled_by_its_own_challenge() -> None:
    b = acceptor()
    challenge = b.receive(content(dialer().start()))
    other = Acceptor(SECRET, bytes(content(challenge)[-32:]), lambda _: "")
    reflected = bytes((HELLO,)) + bytes(content(challenge)[1:])
    with pytest.raises(ProtocolViolation, match="reflected"):
        other.receive(memoryview(reflected))


@pytest.mark.parametrize(
    "changed",
    [
        Identity(Role.SLOT_CONTROL, "job-1", attempt=3, from_slot=1, to_slot=2),
        Identity(Role.SLOT_DATA, "job-2", attempt=3, from_slot=1, to_slot=2),
        Identity(Role.SLOT_DATA, "job-1", attempt=4, from_slot=1, to_slot=2),
        Identity(Role.SLOT_DATA, "job-1", attempt=3, from_slot=0, to_slot=2),
        Identity(Role.SLOT_DATA, "job-1", attempt=3, from_slot=1, to_slot=3),
    ],
)
def test_every_part_of_the_identity_is_bound_by_the_proof(changed: Identity) -> None:
    a, b = dialer(), acceptor()
    proof = bytes(content(a.receive(content(b.receive(content(a.start()))))))
    other, other_b = dialer(identity=changed), acceptor()
    claimed = bytes(content(other.receive(content(other_b.receive(content(other.start()))))))[1 + MAC_BYTES :]
    with pytest.raises(ProtocolViolation, match="secret"):
        b.receive(memoryview(proof[: 1 + MAC_BYTES] + claimed))


def test_a_refusal_says_why_and_cannot_be_forged_into_a_welcome() -> None:
    a, b = dialer(), acceptor(refusal="attempt 3 is over")
    verdict = b.receive(content(a.receive(content(b.receive(content(a.start()))))))
    assert b.done and b.refusal
    with pytest.raises(ProtocolViolation, match="secret"):
        a.receive(content(verdict)[: 1 + MAC_BYTES])
    with pytest.raises(Refused, match="attempt 3 is over"):
        a.receive(content(verdict))
    assert not a.done


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x01",
        b"G" + b"ET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x01MDSTREAM",
        b"\x01MDSTREAM\x01" + b"short",
        b"\x01MDSTREAM\x01" + b"x" * 33,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x04" + b"x" * 32,
        b"\xff" * 100,
    ],
)
def test_garbage_is_refused_by_both_sides(garbage: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        acceptor().receive(memoryview(garbage))
    a = dialer()
    a.start()
    with pytest.raises(ProtocolViolation):
        a.receive(memoryview(garbage))


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolViolation, match="version 9 of the protocol, and this is version 1"):
        acceptor().receive(memoryview(b"\x01MDSTREAM\x09" + b"x" * 32))


def test_a_proof_before_the_hello_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        acceptor().receive(memoryview(bytes((PROOF,)) + b"x" * 80))


def test_an_identity_that_is_none_is_refused_even_with_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = dialer(), acceptor()
    a._identity = b"\xc1 this is no msgpack"
    proof = a.receive(content(b.receive(content(a.start()))))
    with pytest.raises(ProtocolViolation, match="identity"):
        b.receive(content(proof))
