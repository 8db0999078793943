"""Without schema=, an integer that a float would round is refused: two ids must not become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from connector_worlds import read_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.files.file_source import FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import SchemaError

BEYOND = 2**53 + 1


def written(path: Path, format: str, values: list[Any]) -> Path:
    file = path / f"a.{format}"
    lines = [json.dumps({"n": i, "x": value}) for i, value in enumerate(values)]
    if format == "csv":
        lines = ["n,x", *(f"{i},{'' if value is None else json.dumps(value)}" for i, value in enumerate(values))]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.mark.parametrize("format", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ([2**64 - 1, 2**64 - 2], 2**64 - 1),
        ([None, BEYOND, 0.5], BEYOND),
        ([0.5, -BEYOND], -BEYOND),
        ([10**300], 10**300),
    ],
)
def test_an_integer_that_the_inferred_type_would_round_is_refused(tmp_path, format, values, refused):
    file = written(tmp_path, format, values)
    with pytest.raises(
        SchemaError, match=f"{file}: conversion error to double.* integer {refused} in column 'x' would"
    ):
        FileSource(file)
    declared = schema_of([("n", pa.int64()), ("x", pa.float64())])
    assert [row["x"] for row in read_all(FileSource(file, schema=declared), 10)] == [
        value if value is None else float(value) for value in values
    ]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_later_files_are_held_to_it_too(tmp_path, format):
    for name, values in (("1", [0.5]), ("2", [1, BEYOND + 1, BEYOND])):
        (tmp_path / name).mkdir()
        written(tmp_path / name, format, values)
    source = FileSource(tmp_path)
    with pytest.raises(SchemaError, match=f"2/a.{format}, line .: .*the integer {BEYOND} in column 'x' would become"):
        read_all(source, 10)
    dropping = FileSource(tmp_path, on_bad_record="drop")
    assert [row["x"] for row in read_all(dropping, 10)] == [0.5, 1.0, float(BEYOND + 1)]


@pytest.mark.parametrize(
    ("format", "text", "kind"),
    [
        ("csv", "1.005", pa.decimal128(10, 2)),
        ("csv", "123456789012.00", pa.decimal128(5, 2)),
        ("jsonl", "1e400", pa.float64()),
    ],
)
def test_a_number_that_does_not_fit_is_no_damage_to_the_file(tmp_path, format, text, kind):
    (tmp_path / f"a.{format}").write_text(f"x\n{text}\n" if format == "csv" else f'{{"x": {text}}}\n')
    source = FileSource(tmp_path / f"a.{format}", schema=pa.schema([("x", kind)]))
    with pytest.raises(SchemaError, match=r"a\.\w+, line \d: .*declare other types for its columns in schema="):
        read_all(source, 10)


def test_integers_within_lists_and_structs_are_refused_too(tmp_path):
    inner = [{"a": {"b": [{"c": 0.5}, {"c": 1}]}}, {"a": {"b": [{"c": BEYOND}]}}, {"a": None}]
    with pytest.raises(SchemaError, match=f"the integer {BEYOND} in column 'x'"):
        FileSource(written(tmp_path, "jsonl", inner))
    inner[1] = {"a": {"b": [{"c": BEYOND + 1}, None]}}
    assert [row["x"] for row in read_all(FileSource(written(tmp_path, "jsonl", inner)), 10)] == inner


def test_the_types_that_the_message_gives_keep_the_integers(tmp_path):
    values = [2**64 - 1, 2**64 - 2]
    for format in ("csv", "jsonl"):
        file = written(tmp_path, format, values)
        kinds: tuple[pa.DataType, ...] = (pa.uint64(), pa.decimal128(38, 0))
        for kind in kinds:
            declared = schema_of([("n", pa.int64()), ("x", kind)])
            assert [row["x"] for row in read_all(FileSource(file, schema=declared), 10)] == values


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["csv", "jsonl"]),
    st.lists(
        st.none() | st.integers(-(2**66), 2**66) | st.integers(2**53 - 3, 2**53 + 3) | st.floats(-1e20, 1e20),
        min_size=1,
    ),
)
def test_numbers_are_read_as_they_are_written_or_refused(tmp_path, format, values):
    file = written(tmp_path, format, values)
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values) or any(
        isinstance(value, float) for value in values
    ):
        rounded = [value for value in values if isinstance(value, int) and float(value) != value]
        if rounded:
            with pytest.raises(SchemaError, match=f"the integer {rounded[0]} in column 'x' would"):
                FileSource(file)
            return
    source = FileSource(file)
    if any(value is not None for value in values):
        assert [row["x"] for row in read_all(source, 1000)] == values
