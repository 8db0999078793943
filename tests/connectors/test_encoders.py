"""What has no form in JSON is refused before it is written; all else reads back as it was."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.files.encoders import new_encoder
from midstream.engine.core.errors import SchemaError

ZONES = ("UTC", "Europe/Berlin", "Africa/Monrovia", "Asia/Kathmandu", "America/St_Johns", "Pacific/Apia")
SURELY_INSIDE = (datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC))
"""In the years 1 to 9999 in all zones."""


def lines_of(column: pa.Array[Any]) -> list[Any]:
    batch = pa.record_batch({"v": column})
    text = io.BytesIO()
    encoder = new_encoder("jsonl", text, batch.schema)
    encoder.write(batch)
    encoder.close()
    return [json.loads(line)["v"] for line in text.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (pa.float64(), math.nan, "nan"),
        (pa.float32(), -math.inf, "-inf"),
        (pa.list_(pa.struct([("x", pa.float64())])), [{"x": 1.0}, {"x": math.inf}], "inf"),
    ],
)
def test_a_float_that_json_does_not_have_is_refused_and_not_made_null(kind, value, shown):
    message = f"column 'v' has the value {shown}, for which JSON has no form; write Parquet"
    with pytest.raises(SchemaError, match=message):
        lines_of(pa.array([None, value], kind))


@pytest.mark.parametrize(
    ("kind", "ticks", "shown"),
    [
        (pa.timestamp("us"), -62_135_596_800_000_001, r"-62135596800000001 as timestamp\[us\], which is outside of"),
        (pa.timestamp("us"), 2**63 - 1, r"9223372036854775807 as timestamp\[us\], which is outside of the years"),
        (
            pa.timestamp("ms", "UTC"),
            253_402_300_800_000,
            r"253402300800000 as timestamp\[ms, tz=UTC\], which is outside",
        ),
        (pa.timestamp("us", "Europe/Berlin"), 253_402_300_799_999_999, "253402300799999999 as .*, which is outside"),
        (pa.timestamp("us", "America/New_York"), -62_135_596_800_000_000, "-62135596800000000 as .*, which is outside"),
        (pa.date32(), 2_932_897, r"2932897 as date32\[day\], which is outside of the years 1 to 9999"),
        (pa.date32(), 2**31 - 1, r"2147483647 as date32\[day\], which is outside of the years 1 to 9999"),
        (pa.timestamp("us", "Africa/Monrovia"), 0, "1969-12-31 23:15:30-00:44:30, whose offset from UTC is not whole"),
        (pa.timestamp("ns", "Europe/Berlin"), -26 * 10**17, r"1887-08-11 10:40:08\+00:53:28, whose offset from UTC"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_time_whose_text_would_be_another_is_refused(kind, ticks, shown, is_nested):
    width = pa.int32() if kind == pa.date32() else pa.int64()
    column = pa.array([None, None, ticks], width).view(kind)
    if is_nested:
        column = pa.ListArray.from_arrays([0, 3, 3], pa.StructArray.from_arrays([column], ["at"]))
    with pytest.raises(
        SchemaError, match=f"column 'v' has the value {shown}.*, for which JSON has no form; write Parquet"
    ):
        lines_of(column)


@settings(max_examples=examples(100))
@given(
    st.sampled_from(ZONES),
    st.lists(
        st.none()
        | st.datetimes(timezones=st.just(UTC))
        | st.datetimes(datetime(1965, 1, 1), datetime(1975, 1, 1), timezones=st.just(UTC))
    ),
)
def test_times_of_a_zone_are_the_same_instants_in_json_or_refused(zone, times):
    column = pa.array(times, pa.timestamp("us", "UTC")).cast(pa.timestamp("us", zone))
    try:
        texts = lines_of(column)
    except SchemaError:
        known = [each for each in times if each is not None]
        inside = [each for each in known if SURELY_INSIDE[0] < each < SURELY_INSIDE[1]]
        offsets = [each.astimezone(ZoneInfo(zone)).utcoffset() or timedelta() for each in inside]
        assert len(inside) < len(known) or any(offset % timedelta(minutes=1) for offset in offsets)
        assert zone != "UTC"
        return
    assert [text and datetime.fromisoformat(text) for text in texts] == times


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_the_first_and_the_last_time_of_the_years_are_written(unit):
    last = 253_402_300_800 * {"ms": 10**3, "us": 10**6}[unit] - 1
    first = -62_135_596_800 * {"ms": 10**3, "us": 10**6}[unit]
    texts = lines_of(pa.array([first, None, last], pa.timestamp(unit)))
    assert texts[:2] == ["0001-01-01 00:00:00", None]
    assert texts[2].startswith("9999-12-31 23:59:59.999")
    assert lines_of(pa.array([-719_162, None, 2_932_896], pa.date32())) == ["0001-01-01", None, "9999-12-31"]
    assert lines_of(pa.array([-(2**63) + 1, 2**63 - 1], pa.timestamp("ns")))[1] == "2262-04-11 23:47:16.854775807"
