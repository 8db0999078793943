"""Finds where the lines of a text begin, and cuts a stream into blocks of whole lines.

A line ends with LF, CR LF or CR. In CSV, line ends within a quoted value do not count. Quotes follow the rules of
pyarrow's parser: a quote begins a value only where a field begins, so that an inch mark in a plain value is an inch
mark, and within a quoted value two quotes stand for one.

Following all quotes costs a third of the time of parsing. So a block ends where the quotes near its end suggest that a
line ends, and the parser checks this by appending a line of its own, which must be parsed as one. If it is not, the
block is cut again with all of its quotes.

A part of a file begins at the first line after a given byte, as judged by the quotes just before that byte. The reader
of the preceding part ends there by the same judgement, and parses what comes before: either all parts are cut
correctly, or one of the readers raises.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from midstream.connectors.files.text_file import TextFile
from midstream.engine.core.errors import ConfigError, DataError

BLOCK_BYTES: Final = 4 * 2**20
LINE_BYTES_MAX: Final = 64 * 2**20
JUDGED_BYTES: Final = 64 * 2**10
"""The number of bytes before a part that are examined to judge whether the part begins in a quoted value."""
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True)
class Quotes:
    """Finds quoted values. The delimiter and the quote are one byte each."""

    quote: bytes
    delimiter: bytes

    def edges(self, data: bytes, inside: bool = False) -> npt.NDArray[np.int64]:
        """Return the positions of the quotes at which quoted values begin and end, alternately.

        `inside`: `data` begins in a quoted value; otherwise it begins with a field.
        """
        if self.quote not in data:
            return _NONE
        found, fits = self._scan(data, inside)
        return found if fits else self._one_by_one(data, inside)

    def rather_inside(self, window: bytes) -> bool:
        """Whether `window`, which begins anywhere, probably begins in a quoted value: only that would explain its
        quotes.
        """
        if self.quote not in window:
            return False
        return not self._scan(window, False, strictly=True)[1] and self._scan(window, True, strictly=True)[1]

    def _scan(self, data: bytes, inside: bool, *, strictly: bool = False) -> tuple[npt.NDArray[np.int64], bool]:
        """Return all quotes, and whether they are valid edges: every second one begins a value, where a field begins.

        A doubled quote in a quoted value counts as an end and a beginning. `strictly`: the ends must be where a field
        ends.
        """
        array = np.frombuffer(data, np.uint8)
        found = np.flatnonzero(array == self.quote[0])
        around = np.zeros(256, bool)
        around[[self.delimiter[0], 10, 13]] = True
        begins = slice(int(inside), None, 2)
        is_double = np.diff(found, prepend=-2) == 1
        fits = bool(np.all(around[array[found[begins] - 1]] | is_double[begins] | (found[begins] == 0)))
        if fits and strictly:
            ends = slice(1 - int(inside), None, 2)
            last = len(data) - 1
            is_double = np.diff(found, append=last + 2) == 1
            fits = bool(
                np.all(around[array[np.minimum(found[ends] + 1, last)]] | is_double[ends] | (found[ends] == last))
            )
        return found, fits

    def _one_by_one(self, data: bytes, inside: bool) -> npt.NDArray[np.int64]:
        quote, before = re.escape(self.quote), re.escape(self.delimiter)
        begin = re.compile(rb"(?<![^%b\r\n])%b" % (before, quote))
        value = re.compile(rb"[^%b]*(?:%b%b[^%b]*)*" % (quote, quote, quote, quote))
        any_quote = re.compile(quote)
        edges: list[int] = []
        at = 0
        while True:
            if not inside:
                found = begin.search(data, at)
                if found is None:
                    break
                edges.append(found.start())
                at = found.end()
            inside = False
            rest = value.match(data, at)
            assert rest is not None
            edges += [each.start() for each in any_quote.finditer(data, at, rest.end())]
            if rest.end() == len(data):
                break
            edges.append(rest.end())
            at = rest.end() + 1
        return np.array(edges, np.int64)


def edges_of(quotes: Quotes | None, data: bytes, inside: bool = False) -> npt.NDArray[np.int64]:
    return _NONE if quotes is None else quotes.edges(data, inside)


def next_line(data: bytes, at: int, edges: npt.NDArray[np.int64], begins_inside: bool = False) -> int:
    """Return the first byte at or after `at` (at least 1) where a line begins, possibly after the last line; 0 if there
    is none.
    """
    at -= 1
    while (end := _LINE_END.search(data, at)) is not None:
        before = int(np.searchsorted(edges, end.start()))
        if (before + begins_inside) % 2 == 0:
            return end.end()
        if before == len(edges):
            break
        at = int(edges[before])
    return 0


def last_line(data: bytes, edges: npt.NDArray[np.int64], begins_inside: bool = False) -> int:
    """Return the position after the last line end that more data would not change; 0 if there is none."""
    stop = len(data)
    while True:
        end = data.rfind(b"\n", 0, stop) + 1
        if not end:
            end = data.rfind(b"\r", 0, stop) + 1
            if end == len(data):  # a line feed may follow, which belongs to it
                end = data.rfind(b"\r", 0, max(0, end - 1)) + 1
        before = int(np.searchsorted(edges, end - 1))
        if not end or (before + begins_inside) % 2 == 0:
            return end
        if not before:
            return 0
        stop = int(edges[before - 1])


def line_begins(data: bytes, edges: npt.NDArray[np.int64]) -> list[int]:
    """Return where each line of `data` begins, and where the last one ends."""
    ends = np.array([found.end() for found in _LINE_END.finditer(data)], np.int64)
    ends = ends[np.searchsorted(edges, ends - 1) % 2 == 0]
    begins = [0, *ends.tolist()]
    return begins if begins[-1] == len(data) else [*begins, len(data)]


class LineSplitter:
    """Cuts a part of a text into blocks: from the first line at or after byte `first` to the first at or after `last`.

    `begin`: where the first line of the file begins, after a header; `position`: where a block begins at which reading
    resumes; `stack`: closes what was opened. Raises DataError for a line that is too long or never ends, ConfigError
    for a part that was cut incorrectly.
    """

    def __init__(
        self,
        file: TextFile,
        quotes: Quotes | None,
        stack: ExitStack,
        *,
        begin: int,
        position: int,
        first: int,
        last: int | None,
    ) -> None:
        self.position = max(position, begin)
        """The position where the next block begins."""
        self.is_done = False
        """There are no more blocks."""
        self._file = file
        self._quotes = quotes
        self._begin = begin
        self._last = last
        self._read = b""
        """The bytes read from `position` on."""
        is_cut = position == 0 and first > begin
        start = self._judged_from(first) if is_cut else self.position
        self._stream = file.open(stack, start)
        if is_cut:
            self.position = self._find(first, read_from=start)
            self._read = self._read[self.position - start :]

    def next_block(self) -> bytes | None:
        """Return a block that ends with a line, unless `recut` follows."""
        if self.is_done:
            return None
        if self._last is not None and self.position >= self._last:
            if self._find(self._last, self.position) != self.position:
                raise self._cut_wrongly()
            self.is_done = True
            return None
        at_end = self._fill(BLOCK_BYTES)
        if self._last is not None and self.position + len(self._read) >= self._last:
            end = self._end_of_part(self._last)
        elif at_end:
            end = len(self._read)
            self.is_done = True
        else:
            end = self._probable_end()
            if not end:
                return self._taken(self._certain_end())
        return self._taken(end) or None

    def recut(self, block: bytes) -> bytes:
        """Replace `block`, the last one, which does not end with a line."""
        self.position -= len(block)
        if self.is_done and self._last is not None:
            raise self._cut_wrongly()
        self._read = block + self._read
        return self._taken(self._certain_end())

    def ends_with_line(self, block: bytes) -> bool:
        return len(edges_of(self._quotes, block)) % 2 == 0

    def _taken(self, end: int) -> bytes:
        block, self._read = self._read[:end], self._read[end:]
        self.position += end
        return block

    def _probable_end(self) -> int:
        """Return the probable end of a block in the bytes read, judged by the last of them; 0 if there is no line end
        in those.
        """
        if self._quotes is None:
            return last_line(self._read, _NONE)
        tail = self._read[-JUDGED_BYTES:]
        before = len(self._read) - len(tail)
        inside = before > 0 and self._quotes.rather_inside(tail)
        end = last_line(tail, self._quotes.edges(tail, inside), inside)
        return before + end if end else 0

    def _certain_end(self) -> int:
        wanted = BLOCK_BYTES
        while True:
            at_end = self._fill(wanted)
            if self._last is not None and self.position + len(self._read) >= self._last:
                return self._end_of_part(self._last)
            edges = edges_of(self._quotes, self._read)
            if at_end:
                if len(edges) % 2:
                    line = self._file.line_at(self.position + int(edges[-1]))
                    raise DataError(
                        f"{self._file.path}, line {line}: a quoted value begins and never ends; the file is "
                        "incomplete, or has a quote too many"
                    )
                self.is_done = True
                return len(self._read)
            end = last_line(self._read, edges)
            if end:
                return end
            if wanted >= LINE_BYTES_MAX:
                raise self._too_long(self.position)
            wanted += BLOCK_BYTES

    # ---- parts ----

    def _judged_from(self, cut: int) -> int:
        """Return where to begin reading to find the first line at or after `cut`."""
        return max(self._begin, cut - 1 - (JUDGED_BYTES if self._quotes is not None else 0))

    def _end_of_part(self, last: int) -> int:
        self.is_done = True
        return self._find(last, self.position) - self.position

    def _find(self, cut: int, read_from: int) -> int:
        """Return where the first line at or after `cut` begins, else the end of the file. The bytes read begin at
        `read_from`.

        The readers of the parts before and after find the same line, since they examine the same bytes.
        """
        if cut <= self._begin:
            return self._begin
        start = self._judged_from(cut)
        before = self._file.read(start, read_from - start) if start < read_from else b""
        skipped = max(0, start - read_from)
        ahead = JUDGED_BYTES
        while True:
            wanted = max(0, cut - read_from + ahead)
            at_end = self._fill(wanted) and len(self._read) < wanted
            data = before + self._read[skipped:wanted]
            inside = False
            if self._quotes is not None and start > self._begin:
                inside = self._quotes.rather_inside(data[: cut - 1 - start])
            end = next_line(data, cut - start, edges_of(self._quotes, data, inside), inside)
            if end == len(data) and data[-1:] == b"\r" and not at_end:
                end = 0  # a line feed may follow, which belongs to it
            if end or at_end:
                return start + (end or len(data))
            if ahead >= LINE_BYTES_MAX:
                raise self._too_long(cut)
            ahead *= 4

    def _cut_wrongly(self) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: cannot be read in parts: whether a quoted value with line ends lies across byte "
            f"{self._last} cannot be determined from the quotes around it; read the file again with "
            "csv=CsvOptions(newlines_in_values=True), which reads each file in one piece"
        )

    # ---- reading ----

    def _too_long(self, at: int) -> DataError:
        return DataError(
            f"{self._file.path}, line {self._file.line_at(at)}: has more than {LINE_BYTES_MAX} bytes; check that this "
            f"is a file of lines{', and whether it has a quote too many' if self._quotes is not None else ''}"
        )

    def _fill(self, wanted: int) -> bool:
        """Read until `wanted` bytes are available; return whether the stream ended before."""
        while len(self._read) < wanted:
            more = self._stream.read(wanted - len(self._read))
            if not more:
                return True
            self._read += more
        return False
