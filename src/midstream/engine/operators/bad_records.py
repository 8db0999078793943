"""Records that a source cannot read: what is reported about each, and how many of them a subtask tolerates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import SchemaError
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart, check_columns

BAD_RECORDS: Final = "bad records"
"""The tag of the side output of records that a source could not read and was configured to drop."""
BAD_RECORDS_SCHEMA: Final = schema_of(
    [
        ("source", pa.large_string()),  # the topic, or the file
        ("partition", pa.int32()),  # of the topic; null for a file
        ("position", pa.int64()),  # the offset in the partition, or the byte of the file at which the line begins
        ("bytes", pa.large_binary()),  # the unchanged record
        ("error", pa.large_string()),
        ("key", pa.large_binary()),  # of the record; null for a file, as is the timestamp
        ("timestamp", pa.timestamp("ms", "UTC")),
    ]
)
TALLY: Final = "tally"
"""The part of a source's state that holds the subtask's position in its window of `bad_records_max`."""
_TALLY_SCHEMA: Final = pa.schema([("records", pa.int64()), ("bad", pa.int64())])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BadRecords:
    """The records that a reader has dropped from one batch; returned by `SplitReader.bad_records`.

    `rows`: a record batch with one row of the columns of `side_output(BAD_RECORDS)` for each: source, partition,
    position, bytes, error, key, timestamp.
    `at`: the position of each among all records of the batch, good and bad, counted from 0; ascending.

        def bad_records(self):
            return BadRecords(self.dropped_rows, tuple(self.dropped_at)) if self.dropped_at else None
    """

    rows: pa.RecordBatch
    at: tuple[int, ...]


class BadRecordCount:
    """Counts the bad records of one subtask, and fails when there are too many.

    `most`: (bad, records): how many bad records are allowed in each block of `records` records that the subtask reads.
    The position in the window is in the checkpoint with the splits, so records that are read again are not counted
    twice.
    """

    def __init__(self, most: tuple[int, int] | None) -> None:
        self._most = most
        self._records = 0
        """Records in the current window."""
        self._bad = 0
        """Bad records in the current window."""
        self.total = 0
        """Bad records since the task was deployed."""

    def count(self, good: int, bad: BadRecords | None) -> None:
        """Count one more batch. Raises SchemaError for the record that exceeds the limit."""
        if bad is None:
            self._advance(good)
            return
        before = 0
        for number, at in enumerate(bad.at):
            self._advance(at - before)
            before = at + 1
            self._bad += 1
            self.total += 1
            if self._most is not None and self._bad > self._most[0]:
                raise SchemaError(self._too_many(bad.rows.slice(number, 1).to_pylist()[0]))
            self._advance(1)
            if self.total & (self.total - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                row = bad.rows.slice(number, 1).to_pylist()[0]
                _log.warning(
                    "%s: dropped: %s (bad record %d of this subtask)", _position(row), row["error"], self.total
                )
        self._advance(good + len(bad.at) - before)

    def restore(self, part: StatePart) -> None:
        """Restore the tally. After a rescale a subtask may get several tallies; it continues with the one that has the
        most bad records.
        """
        if self._most is not None:
            for chunk in part.chunks:
                check_columns(
                    chunk.table,
                    dict(zip(_TALLY_SCHEMA.names, _TALLY_SCHEMA.types, strict=True)),
                    "the tally of records",
                )
            found = part.table().to_pylist()
            worst = max(found, key=lambda row: row["bad"])
            self._records, self._bad = worst["records"] % self._most[1], worst["bad"]

    def snapshot(self, new_id: Callable[[], str]) -> StatePart | None:
        if self._most is None:
            return None
        table = pa.table({"records": [self._records], "bad": [self._bad]}, schema=_TALLY_SCHEMA)
        return StatePart(Redistribute.SPLIT, (Chunk(new_id(), table),))

    def _advance(self, records: int) -> None:
        self._records += records
        if self._most is not None and self._records >= self._most[1]:
            self._records %= self._most[1]
            self._bad = 0

    def _too_many(self, row: dict[str, object]) -> str:
        assert self._most is not None
        return (
            f"{_position(row)}: {row['error']}; {self._bad} of the last {self._records + 1} records read by this subtask are "
            f"bad, and bad_records_max allows {self._most[0]} of {self._most[1]}. Repair the input or schema=, or allow "
            "more of them"
        )


def _position(row: dict[str, object]) -> str:
    if row["partition"] is None:
        return f"{row['source']}, byte {row['position']}"
    return f"topic {row['source']!r}, partition {row['partition']}, offset {row['position']}"
