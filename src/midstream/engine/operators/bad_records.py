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
"""The part of the state that holds a subtask's position in its block of `bad_records_max` or `failed_max`."""
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


class Tally:
    """Counts the rows or records that one subtask has given up, and whether there are too many of them.

    `most`: (lost, all): how many may be lost in each block of `all` that the subtask processes; None: any number. The
    position in the block is in the checkpoint, so what is processed again is not counted twice.
    """

    def __init__(self, most: tuple[int, int] | None) -> None:
        self.most = most
        self.block = 0
        """Rows in the current block."""
        self.lost = 0
        """Those of them that are lost."""
        self.total = 0
        """Lost rows since the task was deployed."""

    def advance(self, rows: int) -> None:
        """Count rows of any kind."""
        self.block += rows
        if self.most is not None and self.block >= self.most[1]:
            self.block %= self.most[1]
            self.lost = 0

    def lose(self) -> bool:
        """Count one more lost row, before it is counted by `advance`. Returns whether this is one too many."""
        self.lost += 1
        self.total += 1
        return self.most is not None and self.lost > self.most[0]

    @property
    def is_reported(self) -> bool:
        """Whether the last lost row is logged: the 1st, 2nd, 4th, 8th … is."""
        return self.total & (self.total - 1) == 0

    def restore(self, part: StatePart) -> None:
        """Restore the tally. After a rescale a subtask may get several tallies; it continues with the one that has lost
        most.
        """
        if self.most is not None:
            for chunk in part.chunks:
                check_columns(
                    chunk.table,
                    dict(zip(_TALLY_SCHEMA.names, _TALLY_SCHEMA.types, strict=True)),
                    "the tally of records",
                )
            found = part.table().to_pylist()
            worst = max(found, key=lambda row: row["bad"])
            self.block, self.lost = worst["records"] % self.most[1], worst["bad"]

    def snapshot(self, new_id: Callable[[], str]) -> StatePart | None:
        if self.most is None:
            return None
        table = pa.table({"records": [self.block], "bad": [self.lost]}, schema=_TALLY_SCHEMA)
        return StatePart(Redistribute.SPLIT, (Chunk(new_id(), table),))


class BadRecordCount(Tally):
    """The tally of a source's bad records."""

    def count(self, good: int, bad: BadRecords | None) -> None:
        """Count one more batch. Raises SchemaError for the record that exceeds the limit."""
        if bad is None:
            self.advance(good)
            return
        before = 0
        for number, at in enumerate(bad.at):
            self.advance(at - before)
            before = at + 1
            if self.lose():
                raise SchemaError(self._too_many(bad.rows.slice(number, 1).to_pylist()[0]))
            self.advance(1)
            if self.is_reported:
                row = bad.rows.slice(number, 1).to_pylist()[0]
                _log.warning(
                    "%s: dropped: %s (bad record %d of this subtask)", _position(row), row["error"], self.total
                )
        self.advance(good + len(bad.at) - before)

    def _too_many(self, row: dict[str, object]) -> str:
        assert self.most is not None
        return (
            f"{_position(row)}: {row['error']}; {self.lost} of the last {self.block + 1} records read by this subtask are "
            f"bad, and bad_records_max allows {self.most[0]} of {self.most[1]}. Repair the input or schema=, or allow "
            "more of them"
        )


def _position(row: dict[str, object]) -> str:
    if row["partition"] is None:
        return f"{row['source']}, byte {row['position']}"
    return f"topic {row['source']!r}, partition {row['partition']}, offset {row['position']}"
