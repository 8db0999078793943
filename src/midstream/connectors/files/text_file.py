"""The decompressed bytes of a text file, from any position, and the line number of a position."""

from __future__ import annotations

import io
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.fs

from midstream.connectors.files.file_formats import compression_of
from midstream.engine.core.errors import ConfigError

_PIECE_BYTES: Final = 4 * 2**20


@dataclass(frozen=True)
class TextFile:
    filesystem: pyarrow.fs.FileSystem
    path: str

    def open(self, stack: ExitStack, at: int = 0) -> Any:
        """Open a stream of the bytes from `at` on, decompressed according to the suffix."""
        stream = self._open(stack)
        _skip(stream, at)
        return stream

    def read(self, at: int, count: int) -> bytes:
        with ExitStack() as stack:
            return bytes(self.open(stack, at).read(count))

    def line_at(self, at: int) -> int:
        """Return the number, from 1, of the line that begins at this byte. Reads everything before it."""
        lines, ends_with_cr = 1, False
        with ExitStack() as stack:
            stream = self._open(stack)
            while at and (data := stream.read(min(at, _PIECE_BYTES))):
                lines += data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
                lines -= ends_with_cr and data[:1] == b"\n"
                ends_with_cr = data[-1:] == b"\r"
                at -= len(data)
        return lines

    def _open(self, stack: ExitStack) -> Any:
        compression = compression_of(self.path)
        if compression is None:
            return stack.enter_context(self.filesystem.open_input_file(self.path))
        if compression != "zip":
            return stack.enter_context(self.filesystem.open_input_stream(self.path, compression=compression))
        archive = stack.enter_context(
            zipfile.ZipFile(
                io.BufferedReader(cast("io.RawIOBase", stack.enter_context(self.filesystem.open_input_file(self.path))))
            )
        )
        members = [name for name in archive.namelist() if not name.endswith("/")]
        if len(members) != 1:
            raise ConfigError(
                f"{self.path}: a zip archive of {len(members)} files; only archives of one file can be read"
            )
        return stack.enter_context(
            pa.PythonFile(cast("io.IOBase", stack.enter_context(archive.open(members[0]))), mode="r")
        )


def _skip(stream: Any, count: int) -> None:
    if not count:
        return
    if stream.seekable():
        stream.seek(count)
        return
    while count:
        got = len(stream.read(min(count, _PIECE_BYTES)))
        if not got:
            return
        count -= got
