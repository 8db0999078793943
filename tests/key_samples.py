"""Keys of every type that there can be, the values that are easily mistaken for one another among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import TimestampType, TimeType

FOLD_S: Final = 1_793_511_000
"""05:30 UTC on 1 November 2026: in New York half an hour after one o'clock, as an hour later once more."""
_PER_S: Final[dict[Literal["s", "ms", "us", "ns"], int]] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _integers(kind: pa.DataType, count: int) -> pa.Array[Any]:
    """The extremes first."""
    limits: Any = np.iinfo(kind.to_pandas_dtype())
    low, high = int(limits.min), int(limits.max)
    half = min(count, high - low + 1) // 2
    return pa.array([*range(low, low + half), *range(high - half + 1, high + 1)], kind)


def _times(kind: TimeType, count: int) -> pa.Array[Any]:
    """To the second, and of finer units their neighbours too: all of a day at most."""
    unit = _PER_S[kind.unit]
    values = np.unique(np.concatenate([np.arange(count) % 86_400 * unit, np.arange(min(count, unit))]))[:count]
    return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)


def _timestamps(kind: TimestampType, count: int) -> pa.Array[Any]:
    unit = _PER_S[kind.unit]
    finest = FOLD_S * unit + np.arange(count // 2)
    seconds = (FOLD_S + 1000 + 10 * np.arange(count - count // 2)) * unit
    return pa.array(np.unique(np.concatenate([finest, seconds])), pa.int64()).cast(kind)


def _durations(kind: pa.DurationType[Any], count: int) -> pa.Array[Any]:
    unit = _PER_S[kind.unit]
    values = np.concatenate([np.arange(-(count // 4), count // 4), (np.arange(count // 2) + 86_400) * unit])
    return pa.array(np.unique(values), pa.int64()).cast(kind)


def _texts(count: int) -> list[str]:
    odd = ["", "\0", "\0\0", "a", "a\0", "\u00e9", "e\u0301", "\ufeff", " ", "\U0001f600", "A"]
    return [*odd, *(f"key-{i}" for i in range(count - len(odd)))]


def key_samples(count: int) -> Mapping[str, pa.Array[Any]]:
    """By the name of the type, in which sources give it: distinct values, `count` of them where there are so many."""
    integers = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    times: list[TimeType] = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
    timestamps: list[TimestampType] = [
        pa.timestamp(unit, zone) for unit in _PER_S for zone in (None, "America/New_York")
    ]
    timestamps += [pa.timestamp("us", zone) for zone in ("UTC", "+02:00")]
    durations = [pa.duration(unit) for unit in _PER_S]
    texts, data = _texts(count), [b"", b"\0", b"\xff", *(f"{i}".encode() for i in range(count - 3))]
    days = pa.array(np.arange(-(count // 2), count - count // 2), pa.int32()).cast(pa.date32())
    samples: list[pa.Array[Any]] = [pa.array([False, True]), days, days.cast(pa.date64())]
    samples += [_integers(kind, count) for kind in integers]
    samples += [_times(kind, count) for kind in times]
    samples += [_timestamps(kind, count) for kind in timestamps]
    samples += [_durations(kind, count) for kind in durations]
    samples += [pa.array(texts, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    samples += [pa.array(data, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())]
    samples.append(pa.array(texts).dictionary_encode())
    named = {str(values.type).split(", indices")[0]: values for values in samples}
    assert len(named) == len(samples)
    return named


def is_of_python(kind: pa.DataType) -> bool:
    """Whether Python has all values of that type: it has no nanoseconds."""
    return getattr(kind, "unit", "") != "ns"
