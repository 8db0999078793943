"""Commands for jobs whose drivers do not answer: they end in time with a sentence, and hide no healthy job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from midstream.cli.commands import job_commands
from midstream.cli.main import main
from midstream.engine.protocol.handshake import SECRET_BYTES
from midstream.runtime.driver import client, job_registry
from midstream.runtime.network.tls import JobKeys, keys_for

LIMIT_S = 0.3


def never(connection: socket.socket) -> None:
    """Answer nothing; the kernel has accepted the connection."""


def half(connection: socket.socket) -> None:
    """Send the beginning of a TLS record, which is that of a frame as well."""
    connection.sendall(b"\x16\x03\x03")


def closes(connection: socket.socket) -> None:
    connection.close()


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str, Callable[[socket.socket], None]], job_registry.JobEntry]]:
    """Announces a job whose driver does with each connection what it is given."""
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(job_commands, "STATUS_TIMEOUT_S", LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def serve(react: Callable[[socket.socket], None]) -> None:
            with suppress(OSError):
                while True:
                    held.append(listening.accept()[0])
                    with suppress(OSError):
                        react(held[-1])

        def begin(tls: str, react: Callable[[socket.socket], None]) -> job_registry.JobEntry:
            secret = bytes(SECRET_BYTES)
            keys = keys_for(tls, "127.0.0.1", secret) if tls in ("on", "off") else JobKeys(secret, directory=tls)
            port = listening.getsockname()[1]
            entry = job_registry.entry_of_this_process("dddd", "silent", "127.0.0.1", port, keys)
            job_registry.announce(entry)
            threading.Thread(target=serve, args=(react,), daemon=True).start()
            return entry

        yield begin
        listening.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


COMMANDS = (["list"], ["status", "silent"], ["logs", "silent"], ["checkpoint", "silent"], ["stop", "silent"])


@pytest.mark.parametrize("react", [never, half, closes, garbage])
@pytest.mark.parametrize("tls", ["on", "off"])
def test_each_command_ends_in_time_with_a_sentence(start, server, capsys, tls, react):
    start("aaaa1111", "flights")
    server(tls, react)
    for command in COMMANDS:
        began_s = time.monotonic()
        status = main(command)
        told = capsys.readouterr()
        assert time.monotonic() - began_s < LIMIT_S + 10
        assert "Traceback" not in told.err, (command, told.err)
        if command == ["list"]:
            assert status == 0
            assert "flights" in told.out and "silent (dddd): process" in told.out
        else:
            assert status in (1, 2, 75), (command, told.err)
            assert "silent" in told.err
            if react in (never, half):
                assert "is alive but not responding" in told.err and "--from latest" in told.err


def test_a_job_whose_certificates_cannot_be_read_hides_no_other(start, server, capsys, tmp_path):
    start("aaaa1111", "flights")
    server(str(tmp_path / "gone"), never)
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert "flights" in told and "tls.crt" in told


def test_a_request_is_given_up_when_the_driver_freezes_while_it_carries_it_out(start, capsys, monkeypatch):
    monkeypatch.setattr(job_commands, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(job_commands, "SILENCE_S_MAX", 0.2)
    start("aaaa1111", "flights").is_slow = True

    def frozen(entry: job_registry.JobEntry) -> None:
        raise client.ClusterError("its driver is alive but not responding")

    monkeypatch.setattr(job_commands, "status_of", frozen)
    assert main(["stop", "flights"]) == 1
    assert "its driver is alive but not responding" in capsys.readouterr().err
