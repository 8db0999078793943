"""Schemas and durations as users write them, and the place a call came from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any, Optional, TypedDict, get_type_hints

import polars as pl
import pyarrow as pa
import pytest

from midstream import Environment
from midstream.api.argument_checks import calling_file, calling_line, check_uid, raised_at
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import duration_s
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.core.schemas import as_schema
from midstream.runtime.process.process_slots import ProcessSlots


def test_a_schema_may_be_written_with_python_arrow_and_polars_types():
    written = {
        "flag": bool,
        "n": int,
        "x": float,
        "s": str,
        "raw": bytes,
        "at": datetime,
        "day": date,
        "clock": time,
        "span": timedelta,
        "small": pa.int8(),
        "text": pa.string(),
        "zoned": pl.Datetime("ms", "UTC"),
        "list": pl.List(pl.Int32),
        "float32": pl.Float32,
    }
    expected: dict[str, pa.DataType] = {
        "flag": pa.bool_(),
        "n": pa.int64(),
        "x": pa.float64(),
        "s": pa.large_string(),
        "raw": pa.large_binary(),
        "at": pa.timestamp("us"),
        "day": pa.date32(),
        "clock": pa.time64("us"),
        "span": pa.duration("us"),
        "small": pa.int8(),
        "text": pa.large_string(),
        "zoned": pa.timestamp("ms", "UTC"),
        "list": pa.large_list(pa.int32()),
        "float32": pa.float32(),
    }
    assert as_schema(written, "here") == schema_of(list(expected.items()))


@dataclass
class Point:
    x: float
    tags: list[str]
    seen: dict[str, int] | None = None


class Order(TypedDict):
    at: datetime
    where: Point
    note: Optional[str]  # noqa: UP045 - the older form


def test_a_dataclass_or_typed_dict_is_a_schema():
    point = pa.schema(
        [("x", pa.float64()), ("tags", pa.list_(pa.string())), ("seen", pa.map_(pa.large_string(), pa.int64()))]
    )
    assert as_schema(Point, "here") == canonical_schema(point)
    order = pa.schema([("at", pa.timestamp("us")), ("where", pa.struct(list(point))), ("note", pa.string())])
    assert as_schema(Order, "here") == canonical_schema(order) == as_schema({**get_type_hints(Order)}, "here")


def test_arrow_and_polars_schemas_are_taken_in_canonical_form():
    assert as_schema(pa.schema({"s": pa.string()}), "here") == pa.schema({"s": pa.large_string()})
    assert as_schema(pl.Schema({"s": pl.String}), "here") == pa.schema({"s": pa.large_string()})


@dataclass
class Unfinished:
    later: Later  # type: ignore[name-defined]  # noqa: F821 - the mistake under test


@dataclass
class Empty:
    pass


@dataclass
class Person:
    name: str
    children: list[Person] | None


class Tree(TypedDict):
    left: Node
    right: Node


@dataclass
class Node:
    of: dict[str, Tree]


@dataclass
class Misspelt:
    at: datetime.now  # type: ignore[valid-type]  # the mistakes under test
    kind: pa.nothing  # type: ignore[name-defined]


@dataclass
class Unreadable:
    n: "1 +"  # type: ignore  # noqa: F722


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, r"here: \{\} is not a schema; write for example"),
        (pa.schema([]), "here: the schema has no columns"),
        ("n int", "'n int' is not a schema"),
        ({"n": "int"}, "column 'n': 'int' is not a type; use a pyarrow type, a polars type, one of bool, int"),
        ({"n": dict}, "column 'n': <class 'dict'> is not a type; declare what it contains"),
        ({"n": int | str}, r"column 'n': int \| str is not a type"),
        ({"n": list[object]}, "column 'n': <class 'object'> is not a type"),
        (Unfinished, "here: the fields of Unfinished: name 'Later' is not defined"),
        (Empty, "here: .* is not a schema"),
        (Person, "column 'children': Person contains itself"),
        ({"n": Tree}, "column 'n': Tree contains itself"),
        (Misspelt, "here: the fields of Misspelt: module 'pyarrow' has no attribute 'nothing'"),
        (Unreadable, "here: the fields of Unreadable: "),
        ({1: int}, "1 is not a column name"),
        ({"o": pl.Object}, "column 'o': the polars type Object has no Arrow form"),
        (pa.schema([("n", pa.int64()), ("n", pa.int8())]), "here: has more than one column 'n'; rename one"),
    ],
)
def test_what_is_no_schema_is_refused_naming_the_column(written, message):
    with pytest.raises(SchemaError, match=message):
        as_schema(written, "here")


def test_uids_are_plain_names():
    for uid in ("a", "visits-per_minute", "v1.2:x", "9"):
        check_uid(uid, "here")
    uids: list[Any] = ["", "a b", "-a", "ä", "x" * 129, 7]
    for uid in uids:
        with pytest.raises(ConfigError, match="cannot be one; use up to 128 letters"):
            check_uid(uid, "here")


def test_places_are_the_users_file_and_line():
    assert calling_file() == __file__
    name, line = calling_line().split(":")
    assert name == Path(__file__).name
    assert int(line) > 1
    with pytest.raises(ConfigError) as caught:
        duration_s("soon", "interval")
    assert raised_at(caught.value).startswith(f"{name}:")


def test_where_a_job_begins_is_checked_immediately_and_starting_over_is_explicit(tmp_path, monkeypatch, caplog):
    started = []
    monkeypatch.setattr("midstream.api.submit.start_job", lambda plan, slots, page: started.append(plan))
    monkeypatch.chdir(tmp_path)

    def env():
        made = Environment("begins", checkpoint_dir="state")
        made.from_collection([{"n": 1}]).write_jsonl(tmp_path / "out")
        return made

    env().start(restore_from="latest", slots=ProcessSlots())
    said = f"no checkpoint has been completed in {tmp_path}/state yet: starting from the beginning"
    assert [record.getMessage() for record in caplog.records] == [f"job begins: {said}"]
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "old.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        env().start(restore_from="latest", slots=ProcessSlots())
    with pytest.raises(ConfigError, match="newer_output: 'delete' is neither 'rollback' nor 'keep'"):
        env().start(restore_from="3", newer_output="delete", slots=ProcessSlots())
    with pytest.raises(ConfigError, match=r"applies only when resuming from a named checkpoint; name it \(--from"):
        env().start(newer_output="keep", slots=ProcessSlots())
    with pytest.raises(ConfigError, match="--from 'latest' and --fresh cannot be combined"):
        env().start(restore_from="latest", fresh=True, slots=ProcessSlots())
    for contradiction in ({"restore_from": "3"}, {"newer_output": "keep"}, {"fresh": True}):
        with pytest.raises(ConfigError, match=r"--resume \(resume=True\) resumes from the newest checkpoint"):
            env().start(resume=True, slots=ProcessSlots(), **contradiction)
    without = Environment("without")
    without.from_collection([{"n": 1}]).print()
    with pytest.raises(JobError, match="has no checkpoint_dir, so there is nothing to resume from"):
        without.start(resume=True, slots=ProcessSlots())
    assert len(started) == 1
