"""Files that a sink fills with rows, one after the other, each until it is large enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pyarrow as pa
import pyarrow.fs

from midstream.connectors.common.filesystem import delete_if_there, make_directory, make_durable
from midstream.connectors.files.encoders import OutputFormat, new_encoder
from midstream.engine.core.batches import batch_bytes, concat
from midstream.engine.core.config import Size, size_bytes
from midstream.engine.core.errors import ConfigError, StorageError

HELD_BYTES: Final = 16 * 2**20
HELD_ROWS: Final = 131_072
"""The number of rows that become a row group of their own."""


def roll_bytes_of(size: Size) -> int:
    """Return the size at which a file is closed. Raises ConfigError for an invalid one."""
    found = size_bytes(size, "roll_size")
    if found < 1:
        raise ConfigError("roll_size: 0 bytes is not a valid file size; give for example '128 MiB'")
    return found


class OpenFile:
    """A file that is being written; `name` is relative to `directory`."""

    def __init__(
        self, filesystem: pyarrow.fs.FileSystem, directory: str, name: str, format: OutputFormat, schema: pa.Schema
    ) -> None:
        self.name = name
        self.rows = 0
        self.size = 0
        self.writes = 0
        """How often rows were written, each time as a row group."""
        self._filesystem = filesystem
        self._path = f"{directory}/{name}"
        make_directory(filesystem, self._path.rpartition("/")[0])
        self._stream = filesystem.open_output_stream(self._path)
        self._encoder = new_encoder(format, self._stream, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._encoder.write(batch)
        self.writes += 1
        self.rows += batch.num_rows
        self.size = self._stream.tell()

    def end(self) -> None:
        self._encoder.close()
        self.size = self._stream.tell()
        self._stream.close()
        make_durable(self._filesystem, self._path)
        make_durable(self._filesystem, self._path.rpartition("/")[0])

    def discard(self) -> None:
        """Close and delete the file. If it cannot be deleted now it is an orphan, which the sink removes in another
        way.
        """
        with suppress(OSError, pa.ArrowException):
            if not self._stream.closed:
                self._encoder.close()
                self._stream.close()
        with suppress(OSError):
            delete_if_there(self._filesystem, self._path)


class RollingFiles:
    """Writes one file after the other, each up to about `roll_bytes`. `arranged`: returns rows that are written together in
    another order.
    """

    def __init__(
        self,
        next_file: Callable[[], OpenFile],
        roll_bytes: int,
        arranged: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None,
    ) -> None:
        self._next_file = next_file
        self._roll_bytes = roll_bytes
        self._arranged = arranged
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self.held_bytes = 0
        self._file: OpenFile | None = None
        self._finished: list[OpenFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self.held_bytes += batch_bytes(batch)
        self._held_rows += batch.num_rows
        if self.held_bytes >= HELD_BYTES or self._held_rows >= HELD_ROWS:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        batch, self._held, self.held_bytes, self._held_rows = concat(self._held), [], 0, 0
        if self._file is None:
            self._file = self._next_file()
        self._file.write(batch if self._arranged is None else self._arranged(batch))
        if self._file.size >= self._roll_bytes:
            self._end_file()

    def end(self) -> list[OpenFile]:
        """Make everything durable, and return the files."""
        self.flush()
        self._end_file()
        return self._finished

    def discard(self) -> None:
        self._held.clear()
        for file in self._finished if self._file is None else [*self._finished, self._file]:
            file.discard()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.end()
            self._finished.append(self._file)
            self._file = None


@contextmanager
def explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error
