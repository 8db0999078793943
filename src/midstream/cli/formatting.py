"""Numbers, sizes, spans and moments as users read them; text from jobs made safe to print."""

from __future__ import annotations

from datetime import UTC, datetime

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.error_rows import printable as _printable
from midstream.engine.protocol.job_status import event_time_lag_s

NOTHING = "–"
printable = _printable
_SPANS_S = ((365 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def on_one_line(text: str) -> str:
    """Make text safe to print in a cell of a table."""
    return printable(text).replace("\n", "⏎")


def rows(count: int) -> str:
    return f"{count:,}"


def figure(number: float) -> str:
    """Format a number with six digits of a fraction, all of an integer: 1,204, 0.333333, 1.5e+20."""
    is_whole = float(number).is_integer() and abs(number) < 2**53
    return f"{int(number):,}" if is_whole else f"{number:,.6g}"


def short(number: float) -> str:
    """Format a number with three or four characters and a unit: 950, 12.4 k, 3.1 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def size(count_bytes: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count_bytes >= limit:
            return f"{count_bytes / limit:.1f} {unit}"
    return f"{count_bytes:.0f} B"


def span(seconds: float) -> str:
    """Format a time with its two most significant units: 120 ms, 2.4 s, 3 min 20 s, 1 d 4 h."""
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    for index, (unit_s, unit) in enumerate(_SPANS_S):
        if left >= unit_s:
            whole, rest = divmod(left, unit_s)
            if index + 1 == len(_SPANS_S):
                return f"{whole} {unit}"
            next_s, next_unit = _SPANS_S[index + 1]
            more = rest // next_s
            return f"{whole} {unit} {more} {next_unit}" if more else f"{whole} {unit}"
    return "0 s"


def moment(time_us: int) -> str:
    """Format a time in UTC, to the second; the raw number if no calendar reaches it."""
    try:
        return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{time_us} µs"


def watermark(watermark_us: int | None) -> str:
    if watermark_us is None or watermark_us == MIN_WATERMARK_US:
        return NOTHING
    return "end of data" if watermark_us == MAX_WATERMARK_US else moment(watermark_us)


def lag(watermark_us: int | None, now_ms: int) -> str:
    """Format how far event time is behind the wall clock; nothing if it is of another year, synthetic or old data."""
    lag_s = event_time_lag_s(watermark_us, now_ms)
    return NOTHING if lag_s is None else span(lag_s)


def clock(now_ms: int) -> str:
    """Format the local time of day."""
    return datetime.fromtimestamp(now_ms / 1e3).astimezone().strftime("%H:%M:%S")


def minute(at_ms: int) -> str:
    """Format the local date and time."""
    return datetime.fromtimestamp(at_ms / 1e3).astimezone().strftime("%Y-%m-%d %H:%M")
