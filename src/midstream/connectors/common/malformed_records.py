"""Records that do not parse: separated from good ones, and reported.

A batch is parsed in one piece. Only a batch with a bad record is cut in pieces; those that contain one are bisected
until each bad record stands alone. So the good records around it are not lost, and reading stays columnar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.bad_records import BAD_RECORDS_SCHEMA, BadRecords

OnBadRecord: TypeAlias = Literal["fail", "drop"]
BadRecordsMax: TypeAlias = tuple[int, int]
T = TypeVar("T")
_ERROR_CHARS_MAX: Final = 1_000
_PIECE: Final = 256
"""The size of the first pieces, in records: good ones of a large batch are parsed twice, not once for each bisection."""
_FEW: Final = 4
"""This many records or fewer are parsed one by one."""


class BadRecord(msgspec.Struct, frozen=True):
    """A record that does not parse. `at`: its position among the records read with it, from 0. See BAD_RECORDS_SCHEMA."""

    at: int
    source: str
    partition: int | None
    position: int
    data: bytes | None
    error: str
    key: bytes | None = None
    timestamp_ms: int | None = None


def check_on_bad_record(on_bad_record: object, most: object, who: str) -> None:
    """Raise ConfigError for invalid values of `on_bad_record` and `bad_records_max`."""
    if on_bad_record not in ("fail", "drop"):
        raise ConfigError(
            f"{who}: on_bad_record {on_bad_record!r} is not one of fail, drop; with 'drop' they go to "
            "side_output(BAD_RECORDS)"
        )
    if most is None:
        return
    is_pair = isinstance(most, (tuple, list)) and len(most) == 2 and all(map(is_whole, most))
    if not is_pair or not 0 <= most[0] < most[1]:  # type: ignore[index]
        raise ConfigError(
            f"{who}: bad_records_max={most!r} is not a pair (bad records, records) of which the first is less, such as (100, 10_000)"
        )
    if on_bad_record == "fail":
        raise ConfigError(
            f"{who}: bad_records_max= requires on_bad_record='drop'; with 'fail' the first bad record fails the job"
        )


def parsed_apart(parse: Callable[[int, int], T], first: int, last: int, error: str) -> Iterator[T | tuple[int, str]]:
    """Parse the records `first` up to `last`, which `parse` has refused as a whole, giving the reason.

    Yields, in order, the results of `parse` for records that parse, and for each other record its number and the
    reason.
    """
    if last - first == 1:
        yield first, error
        return
    count = last - first
    together = _PIECE if count > 2 * _PIECE else (count + 1) // 2 if count > _FEW else 1
    for begin in range(first, last, together):
        end = min(begin + together, last)
        try:
            made = parse(begin, end)
        except pa.ArrowException as cause:
            yield from parsed_apart(parse, begin, end, str(cause))
        else:
            yield made


def reported(bad: Sequence[BadRecord], base: int = 0) -> BadRecords | None:
    """Return what a reader reports about bad records, or None if there are none.

    `base`: the number, among the records counted, of the first one in the batch.
    """
    if not bad:
        return None
    columns: list[list[Any]] = [
        [each.source for each in bad],
        [each.partition for each in bad],
        [each.position for each in bad],
        [each.data for each in bad],
        [_shortened(each.error) for each in bad],
        [each.key for each in bad],
        [each.timestamp_ms for each in bad],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, BAD_RECORDS_SCHEMA, strict=True)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=BAD_RECORDS_SCHEMA)
    return BadRecords(rows, tuple(each.at - base for each in bad))


def _shortened(error: str) -> str:
    """Return the text in a form that Arrow accepts, shortened: a parser may quote part of the record."""
    text = error.encode(errors="replace").decode()
    return text if len(text) <= _ERROR_CHARS_MAX else f"{text[:_ERROR_CHARS_MAX]} …"
