"""Records that a source cannot read: what is known of each, and how many of them a subtask puts up with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from midstream.core.arrow_types import schema_of
from midstream.core.errors import SchemaError
from midstream.state.parts import Chunk, Redistribute, StatePart

BAD_RECORDS: Final = "bad records"
"""Tag of the side output of records that a source could not read and was told to leave out."""
BAD_RECORDS_SCHEMA: Final = schema_of(
    [
        ("source", pa.large_string()),  # the topic, or the file
        ("partition", pa.int32()),  # of the topic; null for a file
        ("position", pa.int64()),  # the offset in the partition, or the byte of the file at which the line begins
        ("bytes", pa.large_binary()),  # as they came
        ("error", pa.large_string()),
        ("key", pa.large_binary()),  # of the record; null for a file, as is the timestamp
        ("timestamp", pa.timestamp("ms", "UTC")),
    ]
)
TALLY: Final = "tally"
"""The part of a source's state that says how far a subtask is in its window of `bad_records_max`."""
_TALLY_SCHEMA: Final = pa.schema([("records", pa.int64()), ("bad", pa.int64())])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BadRecords:
    """What a reader has left out of one batch.

    `rows`: one of BAD_RECORDS_SCHEMA for each. `at`: where each was among all the records of that batch, good
    and bad, counted from 0; ascending.
    """

    rows: pa.RecordBatch
    at: tuple[int, ...]


class Tally:
    """Counts the bad records of one subtask, and refuses one too many.

    `most`: (bad, records): of each so many records that the subtask reads, so many may be bad. How far the subtask
    is in its window is in the checkpoint with its splits, so records that are read again are not counted twice.
    """

    def __init__(self, most: tuple[int, int] | None) -> None:
        self._most = most
        self._records = 0
        """In the window so far."""
        self._bad = 0
        """Of these."""
        self.total = 0
        """Bad ones since the task was deployed."""

    def count(self, good: int, bad: BadRecords | None) -> None:
        """One batch more. Raises SchemaError for the record that is one too many."""
        if bad is None:
            self._go_on(good)
            return
        before = 0
        for number, at in enumerate(bad.at):
            self._go_on(at - before)
            before = at + 1
            self._bad += 1
            self.total += 1
            if self._most is not None and self._bad > self._most[0]:
                raise SchemaError(self._too_many(bad.rows.slice(number, 1).to_pylist()[0]))
            self._go_on(1)
            if self.total & (self.total - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                row = bad.rows.slice(number, 1).to_pylist()[0]
                _log.warning("%s: left out: %s (bad record %d of this subtask)", _place(row), row["error"], self.total)
        self._go_on(good + len(bad.at) - before)

    def restore(self, part: StatePart) -> None:
        """After a rescale a subtask may get those of several, and goes on with the one that has most bad records."""
        if self._most is not None:
            found = part.table().to_pylist()
            worst = max(found, key=lambda row: row["bad"])
            self._records, self._bad = worst["records"] % self._most[1], worst["bad"]

    def snapshot(self, new_id: Callable[[], str]) -> StatePart | None:
        if self._most is None:
            return None
        table = pa.table({"records": [self._records], "bad": [self._bad]}, schema=_TALLY_SCHEMA)
        return StatePart(Redistribute.SPLIT, (Chunk(new_id(), table),))

    def _go_on(self, records: int) -> None:
        self._records += records
        if self._most is not None and self._records >= self._most[1]:
            self._records %= self._most[1]
            self._bad = 0

    def _too_many(self, row: dict[str, object]) -> str:
        assert self._most is not None
        return (
            f"{_place(row)}: {row['error']}; it is the {self._bad}. bad record of the last {self._records + 1} that this "
            f"subtask has read, and bad_records_max allows {self._most[0]} of {self._most[1]}. Mend the input or schema=, "
            "or allow more of them"
        )


def _place(row: dict[str, object]) -> str:
    if row["partition"] is None:
        return f"{row['source']}, byte {row['position']}"
    return f"topic {row['source']!r}, partition {row['partition']}, offset {row['position']}"
