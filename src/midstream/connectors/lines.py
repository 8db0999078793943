"""Where the lines of a text begin: blocks of whole lines, cut out of a stream.

A line ends with LF, CR LF or CR. In CSV, those within a quoted value end nothing. Quotes are taken
as pyarrow's parser takes them: one begins a value only where a field begins, so that an inch mark
in a plain value is an inch mark, and within a quoted value two of them stand for one.

To follow all quotes costs a third of what parsing costs. So a block ends where the quotes near its end
say that a line does, and whoever parses it sees whether it does: then a line of his own, put behind
it, is one. If it is not, the block is cut again by all of its quotes.

A part of a file begins at a line behind a given byte, as the quotes just before that byte tell. The
reader of the part before ends there by the same judgement, and parses what is before it: all parts
are cut rightly, or one of them raises.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from midstream.connectors.text_file import TextFile
from midstream.core.errors import ConfigError, StorageError

BLOCK_BYTES: Final = 4 * 2**20
LINE_BYTES_MAX: Final = 64 * 2**20
JUDGED_BYTES: Final = 64 * 2**10
"""So much before a part is looked at to judge whether it begins in a quoted value."""
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True)
class Quotes:
    """Both are one byte."""

    quote: bytes
    delimiter: bytes

    def edges(self, data: bytes, inside: bool = False) -> npt.NDArray[np.int64]:
        """Positions of the quotes at which a quoted value begins or ends, in turns.

        `inside`: `data` begins in a quoted value; else it begins with a field.
        """
        if self.quote not in data:
            return _NONE
        found, fits = self._look(data, inside)
        return found if fits else self._one_by_one(data, inside)

    def rather_inside(self, window: bytes) -> bool:
        """Whether `window`, which begins anywhere, rather begins in a quoted value: only that explains its quotes."""
        if self.quote not in window:
            return False
        return not self._look(window, False, strictly=True)[1] and self._look(window, True, strictly=True)[1]

    def _look(self, data: bytes, inside: bool, *, strictly: bool = False) -> tuple[npt.NDArray[np.int64], bool]:
        """All quotes, and whether they are edges, each second one a beginning: it stands where a field begins.

        Two for one in a quoted value are an end and a beginning. `strictly`: the ends stand where a field ends.
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
    """The first byte from `at` (at least 1) on at which a line begins, perhaps that behind the last; 0 if there is none."""
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
    """Behind the last line end, which more data would not change; 0 if there is none."""
    stop = len(data)
    while True:
        end = data.rfind(b"\n", 0, stop) + 1
        if not end:
            end = data.rfind(b"\r", 0, stop) + 1
            if end == len(data):  # it may belong to a line feed to come
                end = data.rfind(b"\r", 0, max(0, end - 1)) + 1
        before = int(np.searchsorted(edges, end - 1))
        if not end or (before + begins_inside) % 2 == 0:
            return end
        if not before:
            return 0
        stop = int(edges[before - 1])


def line_begins(data: bytes, edges: npt.NDArray[np.int64]) -> list[int]:
    """Where each line of `data` begins, and where the last one ends."""
    ends = np.array([found.end() for found in _LINE_END.finditer(data)], np.int64)
    ends = ends[np.searchsorted(edges, ends - 1) % 2 == 0]
    begins = [0, *ends.tolist()]
    return begins if begins[-1] == len(data) else [*begins, len(data)]


class Lines:
    """Cuts the part of a text from the first line at byte `first` or later up to that at `last` or later into blocks.

    `begin`: where the first line of the file begins, behind a header; `position`: where a block begins,
    when reading goes on there; `stack`: what is to be closed in the end.
    Raises StorageError for a line that is too long or never ends, ConfigError for a part that was cut wrongly.
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
        """Where the next block begins."""
        self.is_done = False
        """There is no more."""
        self._file = file
        self._quotes = quotes
        self._begin = begin
        self._last = last
        self._read = b""
        """Read, from `position` on."""
        is_cut = position == 0 and first > begin
        start = self._judged_from(first) if is_cut else self.position
        self._stream = file.open(stack, start)
        if is_cut:
            self.position = self._find(first, read_from=start)
            self._read = self._read[self.position - start :]

    def next_block(self) -> bytes | None:
        """A block that ends with a line, unless `recut` says otherwise."""
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
        """In place of `block`, the last one, which does not end with a line."""
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
        """Of a block in what is read, by the last of it; 0 if there is no line end in that."""
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
                    raise StorageError(
                        f"{self._file.path}, line {line}: a quoted value begins and never ends; half-written, or a quote "
                        "too much"
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
        """Where one begins to read who looks for the first line at `cut` or later."""
        return max(self._begin, cut - 1 - (JUDGED_BYTES if self._quotes is not None else 0))

    def _end_of_part(self, last: int) -> int:
        self.is_done = True
        return self._find(last, self.position) - self.position

    def _find(self, cut: int, read_from: int) -> int:
        """Where the first line at `cut` or later begins; else the end of the file. What is read begins at `read_from`.

        The reader of the part that ends there and that of the next one find the same, as they look at the same bytes.
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
                end = 0  # it may belong to a line feed to come
            if end or at_end:
                return start + (end or len(data))
            if ahead >= LINE_BYTES_MAX:
                raise self._too_long(cut)
            ahead *= 4

    def _cut_wrongly(self) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: cannot be read in parts: whether a quoted value with line ends lies across byte "
            f"{self._last} is not to be seen from the quotes around it; read the file anew with "
            "csv=CsvOptions(newlines_in_values=True), which reads each file in one piece"
        )

    # ---- reading ----

    def _too_long(self, at: int) -> StorageError:
        return StorageError(
            f"{self._file.path}, line {self._file.line_at(at)}: has more than {LINE_BYTES_MAX} bytes; is this a file of "
            f"lines{', or has it a quote too much' if self._quotes is not None else ''}?"
        )

    def _fill(self, wanted: int) -> bool:
        """Whether the stream ended before so many bytes."""
        while len(self._read) < wanted:
            more = self._stream.read(wanted - len(self._read))
            if not more:
                return True
            self._read += more
        return False
