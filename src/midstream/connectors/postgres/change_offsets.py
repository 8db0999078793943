"""Offsets of a stream of changes: positions in a snapshot, then in the server's log, each as one whole number.

An offset up to the number of the snapshot's rows counts those that have been read. After them it has a position in the
log, in units of 8 bytes (to which the log aligns its records) from where changes begin, and the number of changes that
were read of the transaction that is committed there. That number has 17 bits: below 8192 it is exact, above it has 13
significant bits. So a very large transaction is cut only after some changes: every 256 at a million, every 4096 at 16
million. The log may grow by 2**49 bytes (563 TB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from midstream.connectors.postgres.replication_messages import lsn_text
from midstream.engine.core.errors import DataError
from midstream.engine.operators.source_api import OFFSET_MAX

_ALIGNMENT: Final = 8
_CHANGES_BITS: Final = 17
_MANTISSA_BITS: Final = 13
_HALF: Final = 1 << (_MANTISSA_BITS - 1)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """After `changes` changes of the transaction whose commit is at `lsn`, or before whatever is committed from there on."""

    lsn: int
    changes: int = 0

    def __str__(self) -> str:
        return lsn_text(self.lsn) + (f", after change {self.changes} of a transaction" if self.changes else "")


def is_exact(changes: int) -> bool:
    """Whether a transaction may be cut after this number of changes."""
    return changes & ((1 << _exponent(changes)) - 1) == 0


def _exponent(changes: int) -> int:
    return max(0, changes.bit_length() - _MANTISSA_BITS)


@dataclass(frozen=True, slots=True)
class ChangeOffsets:
    """The offsets of one split: `snapshot_rows` rows, then changes that are committed from `base_lsn` on."""

    snapshot_rows: int
    base_lsn: int

    def encode(self, position: LogPosition) -> int:
        """Raises DataError for a position that no offset has."""
        exponent = _exponent(position.changes)
        if not is_exact(position.changes) or position.lsn % _ALIGNMENT or position.lsn < self.base_lsn:
            raise DataError(f"the server's log has no position {position} after {lsn_text(self.base_lsn)}")
        changes = (exponent * _HALF) + (position.changes >> exponent)
        units = (position.lsn - self.base_lsn) // _ALIGNMENT
        offset = self.snapshot_rows + (units << _CHANGES_BITS | changes)
        if offset > OFFSET_MAX or changes >> _CHANGES_BITS:
            raise DataError(
                f"the position {position} is more than {OFFSET_MAX >> _CHANGES_BITS + 1} x 16 bytes after {lsn_text(self.base_lsn)}, where "
                "this source began to read; start again with --fresh"
            )
        return offset

    def decode(self, offset: int) -> LogPosition:
        """Return the position in the log; for an offset within the snapshot, where changes begin."""
        units, code = divmod(max(0, offset - self.snapshot_rows), 1 << _CHANGES_BITS)
        exponent = max(0, code // _HALF - 1)
        changes = (code - exponent * _HALF) << exponent
        return LogPosition(self.base_lsn + units * _ALIGNMENT, changes)

    def aligned(self, lsn: int) -> int:
        """Return the last position at or before this one that an offset has; no record begins in between."""
        return lsn - lsn % _ALIGNMENT
