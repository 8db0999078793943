"""Connections in the replication protocol: a slot with a snapshot is created, and changes are received."""

from __future__ import annotations

import select
from typing import Any, Final

from psycopg import Error
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PGconn
from psycopg.pq.abc import PGconn as Connected
from psycopg.pq.abc import PGresult

from midstream.connectors.postgres import replication_messages as m
from midstream.connectors.postgres.change_values import SETTINGS
from midstream.connectors.postgres.connections import PATIENCE
from midstream.connectors.postgres.replicated_table import PLUGIN
from midstream.engine.core.errors import ConfigError, DataError, MidstreamError, StorageError

_WALSENDER: Final = {
    "wal_sender_timeout": "0",  # a reader that waits for the job does not answer; a dead one is found as below
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
_IN_USE: Final = "55006"
_CONFIG_ERRORS: Final = ("28", "3D", "42", "55", "0A")
_NO_SLOT_FREE: Final = "53400"


class SlotInUse(StorageError):
    """Another connection reads the slot at present."""


class ReplicationConnection:
    """A connection in the replication protocol. Raises StorageError if there is none, or if it is lost."""

    def __init__(self, dsn: str, where: str) -> None:
        self._where = where
        said = conninfo_to_dict(dsn)
        settings = " ".join(f"-c {name}={value}" for name, value in {**SETTINGS, **_WALSENDER}.items())
        defaults = {name: value for name, value in PATIENCE.items() if name not in said}
        conninfo = make_conninfo(
            dsn,
            replication="database",
            client_encoding="utf8",
            options=f"{said.get('options') or ''} {settings}".strip(),
            fallback_application_name="midstream",
            **defaults,
        )
        try:
            self.connection: Connected = PGconn.connect(conninfo.encode())
        except Error as error:
            raise StorageError(f"{where}: cannot connect: {' '.join(str(error).split())}") from error
        if self.connection.status != ConnStatus.OK:
            text = " ".join(self.connection.error_message.decode(errors="replace").split())
            self.connection.finish()
            raise StorageError(f"{where}: cannot connect for replication: {text}")

    def run(self, command: str) -> PGresult:
        """Run a command of the replication protocol. Raises ConfigError or StorageError if the server refuses it."""
        try:
            result = self.connection.exec_(command.encode())
        except Error as error:
            raise StorageError(f"{self._where}: {error}") from error
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.COPY_BOTH):
            raise refused(result, self._where)
        return result

    def system(self) -> str:
        """Return the identifier of the server's database cluster."""
        return (self.run("IDENTIFY_SYSTEM").get_value(0, 0) or b"").decode()

    def create_slot(self, slot: str) -> tuple[int, str]:
        """Create a slot. Returns where changes begin, and the name of a snapshot before them, which is valid until the
        next command.
        """
        made = self.run(f"CREATE_REPLICATION_SLOT {_quoted(slot)} LOGICAL {PLUGIN} EXPORT_SNAPSHOT")
        return m.parse_lsn((made.get_value(0, 1) or b"").decode()), (made.get_value(0, 2) or b"").decode()

    def cancel(self) -> None:
        """Cancel the command that another thread waits for."""
        self.connection.get_cancel().cancel()

    def close(self) -> None:
        self.connection.finish()


class ChangeStream:
    """The changes of a slot from `start_lsn` on."""

    def __init__(
        self, connection: ReplicationConnection, slot: str, publication: str, start_lsn: int, where: str
    ) -> None:
        self._where = where
        self._connection = connection
        self._pg = connection.connection
        named = _quoted(publication).replace("'", "''")
        connection.run(
            f"START_REPLICATION SLOT {_quoted(slot)} LOGICAL {m.lsn_text(start_lsn)} "
            f"(proto_version '1', publication_names '{named}')"
        )
        self._poll = select.poll()
        self._poll.register(self._pg.socket, select.POLLIN)

    def next(self, timeout_s: float) -> m.Message | m.Keepalive | None:
        """Return the next message; None if there is none within this time."""
        while True:
            try:
                size, data = self._pg.get_copy_data(1)
                if size == 0:
                    self._pg.consume_input()
                    size, data = self._pg.get_copy_data(1)
                if size == 0:
                    if not self._poll.poll(timeout_s * 1000):
                        return None
                    timeout_s = 0
                    continue
            except Error as error:
                raise self._lost(error) from error
            if size < 0:
                raise self._ended()
            message = m.decode_stream(bytes(data))
            if isinstance(message, m.Keepalive):
                return message
            decoded = m.decode(message)
            if decoded is not None:
                return decoded

    def confirm(self, received: int, confirmed: int) -> None:
        """Report what has been received, and which part of the log the server may forget."""
        try:
            self._pg.put_copy_data(m.status_update(received, confirmed))
            self._pg.flush()
        except Error as error:
            raise self._lost(error) from error

    def close(self) -> None:
        self._connection.close()

    def _lost(self, error: Exception) -> MidstreamError:
        return StorageError(f"{self._where}: the stream of changes has broken off: {' '.join(str(error).split())}")

    def _ended(self) -> MidstreamError:
        result = self._pg.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            return refused(result, self._where)
        return StorageError(f"{self._where}: the server has ended the stream of changes")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def refused(result: Any, where: str) -> MidstreamError:
    """Return the error for what the server has refused: whether to wait, to change something, or to try again."""
    sqlstate = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    message = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b""
    hint = result.error_field(DiagnosticField.MESSAGE_HINT) or b""
    text = f"{where}: {message.decode(errors='replace').strip()}" + (
        f" ({hint.decode(errors='replace')})" if hint else ""
    )
    if sqlstate == _IN_USE:
        return SlotInUse(text)
    if sqlstate[:2] == "22":
        return DataError(text)
    is_refusal = sqlstate[:2] in _CONFIG_ERRORS or sqlstate == _NO_SLOT_FREE
    return ConfigError(text) if is_refusal else StorageError(text)
