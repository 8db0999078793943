"""Converters of Arrow types that have no inner types; engine/core/python_values.py explains what they accept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from operator import index as as_index
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import DecimalType, TimestampType, TimeType
from midstream.engine.core.errors import SchemaError

_FIRST_S: Final = -62_135_596_800
_END_S: Final = 253_402_300_800
"""The end of the year 9999, the last that a datetime can hold, in seconds since 1970."""
_STEP_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
_SHOWN_MAX: Final = 80

LEAST_DIGIT: Final = -(2**30) + 1
ONE_DIGIT: Final = 2**30 - 1
"""Python compares integers up to this size several times as fast as larger ones."""
_EXACT: Final = Context(prec=100, traps=[Inexact, InvalidOperation])
"""A context with more digits than any decimal has, in which rounding is an error."""
_NO_NUMBERS: Final = (bool, np.bool_, np.timedelta64)
"""Classes that pass for integers in Python or numpy but are not meant as numbers."""

ARROW_ERRORS: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""The exceptions that pyarrow raises for a value that it cannot convert."""


_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ValueMisfit(ValueError):
    """`value` cannot be stored as `kind`.

    `index`: the position, among the values given, of the one that is or contains it; `path`: the position in that one.
    """

    def __init__(self, value: object, kind: pa.DataType, reason: str, index: int = 0, path: str = "") -> None:
        at = f"at {path.lstrip('.')}: " if path else ""
        super().__init__(f"{at}{shown(value)}, declared as {kind}: {reason}")
        self.value, self.kind, self.reason, self.index, self.path = value, kind, reason, index, path

    def at(self, index: int, path: str) -> ValueMisfit:
        """Return the same misfit, located in the enclosing value."""
        return ValueMisfit(self.value, self.kind, self.reason, index, path + self.path)


def shown(value: object) -> str:
    """Format a value for a message: its repr, shortened."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - any __repr__ may raise anything
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 1]}…"


def kind_of(value: object) -> str:
    """Return the value's class with its article, such as "an int" or "a Decimal", or "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class ValueConverter:
    """Converts Python values to the Python form of one Arrow type, and to columns of it."""

    plain: type | None = None
    """Each value of exactly this class fits, so no call is needed for it."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind

    def keep(self, value: Any) -> Any:
        """Return `value` in the form of this type; None stays None. Raises ValueMisfit.

        A list or dict remains the same object, so a later change of it still changes what is stored.
        """
        return value if value is None or type(value) is self.plain else self._kept(value)

    def array(self, values: Sequence[Any]) -> pa.Array[Any]:
        """Convert `values` to a column. Raises ValueMisfit for the first one that does not fit."""
        try:
            column = self._convert_all(values)
            if column is not None:
                return column
        except ARROW_ERRORS:
            pass  # the value is found below
        kept = [self._kept_at(index, value) for index, value in enumerate(values)]
        try:
            return pa.array(kept, self.kind)
        except ARROW_ERRORS as error:
            for index, value in enumerate(kept):
                try:
                    pa.array([value], self.kind)
                except ARROW_ERRORS as misfit:
                    raise ValueMisfit(values[index], self.kind, str(misfit), index) from misfit
            raise ValueMisfit(values, self.kind, str(error)) from error

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        """Convert all values in one call, where pyarrow can be trusted with them; otherwise None or an error of
        pyarrow's.
        """
        return None

    def _kept(self, value: Any) -> Any:
        raise NotImplementedError

    def _kept_at(self, index: int, value: Any) -> Any:
        try:
            return self.keep(value)
        except ValueMisfit as misfit:
            raise misfit.at(index, "") from None

    def misfit(self, value: object, reason: str) -> ValueMisfit:
        return ValueMisfit(value, self.kind, reason)


class NullConverter(ValueConverter):
    def _kept(self, value: Any) -> Any:
        raise self.misfit(value, "only None fits")


class BoolConverter(ValueConverter):
    plain = bool

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _are_all(values, bool) else None

    def _kept(self, value: Any) -> Any:
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise self.misfit(value, f"{kind_of(value)} is not a bool; write bool(x)")


class IntConverter(ValueConverter):
    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        self._low = -(1 << bits - 1) if signed else 0
        self._high = (1 << bits - 1) - 1 if signed else (1 << bits) - 1

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _are_all(values, int) else None

    def keep(self, value: Any) -> Any:
        if type(value) is int and self._low <= value <= self._high:
            return value
        return None if value is None else self._kept(value)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _NO_NUMBERS):
            raise self.misfit(value, f"{kind_of(value)} is not an integer; write int(x)")
        if not isinstance(value, (int, np.integer)):
            way = "; round it, or declare a float" if isinstance(value, (float, np.floating)) else ""
            way = "; declare a decimal" if isinstance(value, Decimal) else way
            raise self.misfit(value, f"{kind_of(value)} is not an integer{way}")
        kept = as_index(value)
        if not self._low <= kept <= self._high:
            raise self.misfit(value, f"it is beyond {self._low} to {self._high}")
        return kept


class FloatConverter(ValueConverter):
    plain = float

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _are_all(values, float) or _classes(values) <= {float, int} else None

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _NO_NUMBERS) or not isinstance(value, (float, int, np.floating, np.integer)):
            way = "; write float(x), or declare a decimal" if isinstance(value, Decimal) else ""
            raise self.misfit(value, f"{kind_of(value)} is not a float{way}")
        if isinstance(value, np.integer):
            value = as_index(value)  # numpy would compare it as a float
        try:
            kept = float(value)
        except OverflowError:
            kept = math.inf
        if kept != value and not math.isnan(kept):
            raise self.misfit(value, f"a float holds {kept!r} instead; write float(x) if that is meant")
        return kept


class NarrowFloatConverter(ValueConverter):
    """The converter of float32 and float16, which accept only what they hold exactly."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._dtype: type[np.floating[Any]] = np.float16 if pa.types.is_float16(kind) else np.float32
        self._wide = FloatConverter(pa.float64())

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        if not _classes(values) <= {float, int}:
            return None
        wide = pa.array(values, pa.float64())
        with np.errstate(over="ignore"):
            given = wide.to_numpy(zero_copy_only=False)
            held = given.astype(self._dtype)
        if not ((held == given) | np.isnan(given)).all():
            return None
        return pa.array(held, self.kind, mask=None if not wide.null_count else np.asarray(wide.is_null()))

    def _kept(self, value: Any) -> Any:
        kept = self._wide.keep(value)
        with np.errstate(over="ignore"):
            held = float(self._dtype(kept))
        if held != kept and not math.isnan(kept):
            exact = f"numpy.float{self.kind.bit_width}(x)"
            raise self.misfit(value, f"it holds {held!r} instead; declare float64, or give {exact} if that is meant")
        return kept


class DecimalConverter(ValueConverter):
    """The converter of decimals.

    pyarrow is never given a value with more decimal places than the type has: it would turn some of them into 0.
    """

    kind: DecimalType

    def __init__(self, kind: DecimalType) -> None:
        super().__init__(kind)
        self._last = Decimal((0, (1,), -kind.scale))

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        if not _classes(values) <= {Decimal, int}:
            return None
        last = -self.kind.scale
        if any(type(value) is Decimal and value.as_tuple()[2] < last for value in values):
            return None
        return pa.array(values, self.kind)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _NO_NUMBERS) or not isinstance(value, (Decimal, int, np.integer)):
            way = "; write Decimal(str(x)), rounded as you mean it" if isinstance(value, (float, np.floating)) else ""
            raise self.misfit(value, f"{kind_of(value)} is not a Decimal{way}")
        exact = value if isinstance(value, Decimal) else Decimal(as_index(value))
        try:
            return pa.scalar(exact.quantize(self._last, context=_EXACT), self.kind).as_py()
        except (*ARROW_ERRORS, Inexact, InvalidOperation):
            raise self.misfit(
                value,
                f"it has more than {self.kind.precision} digits, or more than {self.kind.scale} decimal places"
                if exact.is_finite()
                else "an Arrow decimal is a finite number",
            ) from None


class TextConverter(ValueConverter):
    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _are_all(values, str) else None

    def keep(self, value: Any) -> Any:
        if type(value) is str and value.isascii():
            return value
        return None if value is None else self._kept(value)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, str):
            way = "; write x.decode()" if isinstance(value, (bytes, bytearray)) else "; write str(x)"
            raise self.misfit(value, f"{kind_of(value)} is not a str{way}")
        kept = str.__str__(value)
        try:
            kept.encode()
        except UnicodeEncodeError as error:
            raise self.misfit(
                value, f"it has an unpaired surrogate at index {error.start}, which UTF-8 cannot encode"
            ) from error
        return kept


class BytesConverter(ValueConverter):
    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else None
        if self._width is None:
            self.plain = bytes

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _are_all(values, bytes) else None

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise self.misfit(
                value, f"{kind_of(value)} is not bytes{'; write x.encode()' if isinstance(value, str) else ''}"
            )
        kept = bytes(value)
        if self._width not in (None, len(kept)):
            raise self.misfit(value, f"it has {len(kept)} bytes instead of {self._width}")
        return kept


class DateConverter(ValueConverter):
    plain = date

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return pa.array(values, self.kind) if _classes(values) <= {date} else None

    def _kept(self, value: Any) -> Any:
        if isinstance(value, datetime) or not isinstance(value, date):
            way = "; write x.date()" if isinstance(value, datetime) else ""
            raise self.misfit(value, f"{kind_of(value)} is not a date{way}")
        return date(value.year, value.month, value.day)


class TimeConverter(ValueConverter):
    kind: TimeType

    def __init__(self, kind: TimeType) -> None:
        super().__init__(kind)
        self._step_us = _STEP_US[kind.unit]

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        if _classes(values) <= {time} and _zones(values) <= {None}:
            return pa.array(values, pa.time64("us")).cast(self.kind)
        return None

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, time):
            raise self.misfit(value, f"{kind_of(value)} is not a datetime.time")
        if value.tzinfo is not None:
            raise self.misfit(value, "Arrow's times of day have no zone; write x.replace(tzinfo=None)")
        if value.microsecond % self._step_us:
            raise _too_fine(self, value)
        return time(value.hour, value.minute, value.second, value.microsecond)


class DurationConverter(ValueConverter):
    kind: pa.DurationType[Any]

    def __init__(self, kind: pa.DurationType[Any]) -> None:
        super().__init__(kind)
        self._per_us = {"ns": 1000, "us": 1}.get(kind.unit, 0)  # coarser units hold every timedelta
        self._step_us = _STEP_US[kind.unit]

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        return (
            pa.array(values, pa.duration("us")).cast(self.kind)
            if _classes(values) <= {timedelta} and self.kind.unit != "ns"
            else None
        )

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, timedelta):
            raise self.misfit(value, f"{kind_of(value)} is not a timedelta")
        if value.microseconds % self._step_us:
            raise _too_fine(self, value)
        _no_nanoseconds(self, value, "nanoseconds")
        kept = timedelta(value.days, value.seconds, value.microseconds)
        if not -(1 << 63) <= kept // timedelta(microseconds=1) * self._per_us < 1 << 63:
            raise self.misfit(value, f"it is beyond what 64 bits of {self.kind.unit} hold")
        return kept


class TimestampConverter(ValueConverter):
    """The converter of timestamps: naive datetimes for a type without a zone, aware ones converted to the type's zone."""

    kind: TimestampType

    def __init__(self, kind: TimestampType) -> None:
        super().__init__(kind)
        self._step_us = _STEP_US[kind.unit]
        self._micros = pa.timestamp("us", kind.tz)
        try:
            self._zone = None if kind.tz is None else zone_of(kind)
        except ARROW_ERRORS as error:
            raise SchemaError(f"{kind}: unknown time zone: {error}") from error
        self._is_fixed = self._zone is None or is_fixed(self._zone)
        self._has_plain = self._is_fixed and kind.unit == "us"

    def _convert_all(self, values: Sequence[Any]) -> pa.Array[Any] | None:
        if _classes(values) <= {datetime} and self._is_fixed and self.kind.unit != "ns":
            zones = _zones(values)
            if zones <= {None} if self._zone is None else None not in zones and all(map(is_fixed, zones)):
                column: pa.Array[Any] = pa.array(values, self._micros)
                if self._zone is None or fits_datetime(column, margin_s=86_400):  # a margin for any zone's offset
                    return column.cast(self.kind)
        return None

    def keep(self, value: Any) -> Any:
        if self._has_plain and type(value) is datetime and value.tzinfo is self._zone:
            return value
        return None if value is None else self._kept(value)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, datetime) or isinstance(value.year, float):  # pandas' NaT is a datetime
            raise self.misfit(value, f"{kind_of(value)} is not a datetime")
        _no_nanoseconds(self, value, "nanosecond")
        if value.microsecond % self._step_us:
            raise _too_fine(self, value)
        kept = _plain_datetime(value)
        if self._zone is None:
            if kept.tzinfo is not None:
                raise self.misfit(
                    value,
                    f"it has the zone {kept.tzinfo}, and the type has none; write x.replace(tzinfo=None), or declare one",
                )
        else:
            if kept.tzinfo is None:
                raise self.misfit(value, f"it has no zone, and the type has {self.kind.tz}; write x.replace(tzinfo=…)")
            kept = self._in_zone(kept)
        if self.kind.unit == "ns":
            since = kept.replace(tzinfo=UTC) if kept.tzinfo is None else kept
            if not -(1 << 63) <= (since - _EPOCH_UTC) // timedelta(microseconds=1) * 1000 < 1 << 63:
                raise self.misfit(value, "it is beyond what 64 bits of nanoseconds hold (the years 1678 to 2262)")
        return kept

    def _in_zone(self, value: datetime) -> datetime:
        try:
            utc = value.astimezone(UTC)
            back = utc.astimezone(value.tzinfo)
            kept = utc.astimezone(self._zone)
        except OverflowError:
            raise self.misfit(value, "in UTC, or in the zone of the type, it is beyond the years 1 to 9999") from None
        if back.replace(tzinfo=None, fold=0) != value.replace(tzinfo=None, fold=0):
            raise self.misfit(value, f"this local time does not exist in {value.tzinfo}: the clock skips it")
        return kept


def zone_of(kind: TimestampType) -> Any:
    """Return the tzinfo of the values of a timestamp type with a zone."""
    in_us: pa.DataType = kind if kind.unit != "ns" else pa.timestamp("us", kind.tz)
    return pa.scalar(0, in_us).as_py().tzinfo


def is_fixed(zone: Any) -> bool:
    """Whether the clock of a zone is never changed, so that each local time exists exactly once."""
    return isinstance(zone, timezone) or getattr(zone, "key", None) == "UTC"


def _classes(values: Iterable[Any]) -> set[type]:
    return set(map(type, values)) - {type(None)}


def _are_all(values: Sequence[Any], kind: type) -> bool:
    """Whether all values are of exactly this class, or None. Called for each column of each batch that functions
    return.
    """
    classes = list(map(type, values))
    return classes.count(kind) == len(values) or set(classes) <= {kind, type(None)}


def _zones(values: Iterable[Any]) -> set[Any]:
    return {value.tzinfo for value in values if value is not None}


def _plain_datetime(value: datetime) -> datetime:
    if type(value) is datetime:
        return value
    return datetime(*value.timetuple()[:6], microsecond=value.microsecond, tzinfo=value.tzinfo, fold=value.fold)


def _no_nanoseconds(converter: ValueConverter, value: Any, name: str) -> None:
    """Refuse a pandas time that has nanoseconds."""
    if getattr(value, name, 0):
        raise converter.misfit(value, "it has nanoseconds, which Python's times do not have; round it to microseconds")


def _too_fine(converter: TimeConverter | DurationConverter | TimestampConverter, value: object) -> ValueMisfit:
    return converter.misfit(value, f"it is finer than {converter.kind.unit}; round it, or declare microseconds")


def is_nan(value: object) -> bool:
    """Whether the value is a number that does not equal itself, and so is never found as a key."""
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, (float, np.floating)) and math.isnan(value)


def fits_datetime(column: pa.Array[Any] | pa.ChunkedArray[Any], margin_s: int = 0) -> bool:
    """Whether all times lie in the years 1 to 9999; numpy turns others into integers."""
    if isinstance(column, pa.ChunkedArray):
        return False
    extremes = pc.min_max(column.view(pa.int64()))
    if not extremes["min"].is_valid:
        return True
    per_s = {"s": 1, "ms": 10**3, "us": 10**6}[column.type.unit]
    first, last = (extremes[name].as_py() for name in ("min", "max"))
    return bool((_FIRST_S + margin_s) * per_s <= first and last < (_END_S - margin_s) * per_s)
