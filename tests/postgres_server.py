"""A PostgreSQL server of our own, in a directory of its own, on loopback.

python tests/postgres_server.py COMMAND…        runs COMMAND with POSTGRES_DSN, the address of a new server
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import limit_s

PASSWORD = "a-secret-that-is-shown-nowhere"


def find_binaries() -> Path | None:
    """The directory with initdb and pg_ctl: on the PATH, or where Debian puts them."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def _unprivileged_user() -> str | None:
    """The server refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Server:
    """Users `midstream` (a superuser) and, made by tests, others; all with passwords."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries = binaries
        self._user = _unprivileged_user()
        self._data = directory / "data"
        self._log = directory / "log"
        if self._user is not None:
            shutil.chown(directory, self._user)
        password_file = directory / "password"
        password_file.write_text(PASSWORD, encoding="utf-8")
        password_file.chmod(0o644)
        self._run("initdb", "-U", "midstream", "--pwfile", password_file, "-A", "scram-sha-256", "-E", "UTF8", "-N")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "wal_level": "logical",
            "max_replication_slots": 20,
            "max_wal_senders": 20,
        }
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        self.start()

    def dsn(self, database: str = "postgres", user: str = "midstream", password: str = PASSWORD) -> str:
        return f"host=127.0.0.1 port={self.port} dbname={database} user={user} password={password}"

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-t", "60", "-l", self._log)

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is a crash: nothing is written, and connections break."""
        self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode)

    def _run(self, program: str, *args: object) -> None:
        subprocess.run(
            [self._binaries / program, "-D", self._data, *map(str, args)],
            user=self._user,
            cwd="/",
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s(90),
        )


@contextmanager
def running_server(binaries: Path) -> Iterator[Server]:
    """Not below pytest's own directory, which the server's user may not enter."""
    directory = Path(tempfile.mkdtemp(prefix="midstream-postgres-"))
    try:
        server = Server(binaries, directory)
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("no PostgreSQL here; Debian, Ubuntu: sudo apt install postgresql")
    with running_server(binaries) as server:
        return subprocess.run(sys.argv[1:], env={**os.environ, "POSTGRES_DSN": server.dsn()}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
