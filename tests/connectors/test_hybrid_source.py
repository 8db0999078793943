"""Sources that are read one after the other, as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from machine import limit_s
from midstream import LATE, Count, Environment, WatermarkStrategy, testing, tumbling
from midstream.connectors import FileSource, HybridSource
from midstream.connectors.files import directory_watch
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split
from midstream.engine.state.safe_pickle import OwnCode
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

CONTEXT = DiscoveryContext("in", 2, None)


def numbers(*values: int) -> Source:
    return from_rows([{"n": value} for value in values])


def endless(rows_per_s: float | None = None) -> Source:
    return GeneratorSource(lambda i: {"n": np.asarray(i)}, rows_per_s=rows_per_s)


def test_its_rows_are_those_of_its_sources() -> None:
    assert testing.check_source(HybridSource(numbers(1, 2), numbers(3), numbers(4, 5))).column("n").to_pylist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    source = HybridSource(numbers(1, 2), endless())
    assert not source.bounded
    assert HybridSource(numbers(1), numbers(2)).bounded


def test_the_next_source_begins_when_the_one_before_has_found_all_its_splits() -> None:
    source = HybridSource(numbers(1, 2), numbers(3, 4))
    first = source.discover(None, CONTEXT)
    assert first.splits
    assert not first.exhausted
    second = source.discover(first.position, CONTEXT)
    assert second.exhausted
    assert {split.id for split in first.splits}.isdisjoint(split.id for split in second.splits)
    again = HybridSource(numbers(1, 2), numbers(3, 4))
    assert again.discover(first.position, CONTEXT) == second, "a checkpoint has which source is read"


class Counted(GeneratorSource):
    """Ends, and notes what it is told."""

    def __init__(self, name: str, told: list[object]) -> None:
        super().__init__(lambda i: {"n": np.asarray(i)}, count=10)
        self.name, self.told = name, told

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        self.told.append((self.name, "prepare", uid))

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        self.told.append((self.name, position, [split.id for split in unfinished or ()]))

    def begin_split(self, split: Split) -> Split:
        return Split(split.id, split.payload, split.offset + 1)

    def close(self) -> None:
        self.told.append((self.name, "close"))


def test_its_sources_are_told_what_concerns_them() -> None:
    told: list[object] = []
    one, two = Counted("one", told), Counted("two", told)
    source = HybridSource(one, two)
    source.prepare("in", None, False)
    first = source.discover(None, CONTEXT)
    second = source.discover(first.position, CONTEXT)
    begun = source.begin_split(second.splits[0])
    assert (begun.id, begun.offset) == (second.splits[0].id, 1)
    assert source.place(begun, 0, 0) == two.place(Split("0", two.discover(None, CONTEXT).splits[0].payload, 1), 0, 0)
    source.checkpoint_completed(None)
    source.checkpoint_completed(second.position, [*first.splits, second.splits[0]])
    source.close()
    source.own = own = OwnCode()
    assert one.own is two.own is source.own is own
    inner = two.discover(None, CONTEXT)
    assert told == [
        ("one", "prepare", "in"), ("two", "prepare", "in.1"), ("one", None, []),
        ("two", inner.position, [inner.splits[0].id]), ("one", "close"), ("two", "close"),
    ]  # fmt: skip


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    for made, error, message in (
        (HybridSource, ConfigError, "has 0 sources; give at least two"),
        (lambda: HybridSource(numbers(1)), ConfigError, "has 1 sources"),
        (lambda: HybridSource(numbers(1), cast(Any, "topic")), ConfigError, "'topic' is not a Source"),
        (lambda: HybridSource(endless(), numbers(1)), ConfigError, r"source 1 \(GeneratorSource\) never ends"),
        (lambda: HybridSource(numbers(1), endless(5)), ConfigError, r"source 2 \(GeneratorSource\) has rows_per_s"),
        (lambda: HybridSource(numbers(1), from_rows([{"n": "x"}])), SchemaError, r"source 2 \(CollectionSource\) has the columns \(n: large_string\), and the first \(n: int64\)"),
        (lambda: HybridSource(numbers(1), from_rows([{"n": 1, "m": 1}])), SchemaError, "must be the same, in the same order"),
        (lambda: HybridSource(numbers(1), numbers(1), rows_per_s=0), ConfigError, "rows_per_s 0 is not a positive number"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            made()
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    lines = [
        FileSource(tmp_path / "a.jsonl", on_bad_record="drop", bad_records_max=most) for most in ((1, 10), (2, 10))
    ]
    with pytest.raises(ConfigError, match="have different bad_records_max"):
        HybridSource(*lines)
    assert HybridSource(lines[0], numbers(1)).bad_records_max == (1, 10)


def test_a_position_of_others_is_refused() -> None:
    source = HybridSource(numbers(1), numbers(2))
    position = numbers(1).discover(None, CONTEXT).position
    with pytest.raises(ConfigError, match=r"HybridSource: .*was written by another kind of source"):
        source.discover(position, CONTEXT)
    three = HybridSource(numbers(1), numbers(2), numbers(3))
    first = three.discover(None, CONTEXT)
    third = three.discover(three.discover(first.position, CONTEXT).position, CONTEXT)
    with pytest.raises(ConfigError, match="has a position in source 3, and there are 2 now"):
        source.discover(third.position, CONTEXT)
    with pytest.raises(ConfigError, match="has a position in source 3, and there are 2 now"):
        source.open_split(third.splits[0])
    with pytest.raises(ConfigError, match="has a position in source 0"):
        source.discover(msgspec.msgpack.encode((-1, None)), CONTEXT)


START = datetime(2024, 1, 1)


def at(first: int, count: int) -> list[dict[str, object]]:
    return [{"n": n, "at": START + timedelta(seconds=n)} for n in range(first, first + count)]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_one_event_time_runs_through_all_of_it(parallelism: int) -> None:
    env = Environment("history", parallelism=parallelism)
    schema = pa.schema({"n": pa.int64(), "at": pa.timestamp("us")})
    history, live = from_rows(at(0, 600), schema, splits=5), from_rows(at(600, 600), schema, splits=5)
    rows = env.source(HybridSource(history, live)).uid("in").with_watermarks("at", WatermarkStrategy.bounded("10 min"))
    windows = rows.key_by("n").window(tumbling("1 h")).aggregate(rows=Count())
    found, late = windows.collect(), windows.side_output(LATE).collect()
    env.execute(slots=ProcessSlots())
    assert sorted(row["n"] for row in found.rows()) == list(range(1200))
    assert late.rows() == []


@pytest.mark.parametrize("parallelism", [1, 2])
def test_no_split_stays_unread_and_those_that_end_are_read_one_at_a_time(tmp_path: Path, parallelism: int) -> None:
    history = GeneratorSource(lambda i: {"n": np.asarray(i)}, count=600, splits=30)
    live = GeneratorSource(lambda i: {"n": np.asarray(i)}, splits=16)
    source = HybridSource(history, live, rows_per_s=20_000)
    context = DiscoveryContext("in", parallelism, None)
    first = source.discover(None, context)
    assert {source.splits_per_reader_of(split, parallelism) for split in first.splits} == {1}
    second = source.discover(first.position, context)
    assert {source.splits_per_reader_of(split, parallelism) for split in second.splits} == {-(-16 // parallelism)}
    env = Environment("history", parallelism=parallelism, checkpoint_dir=tmp_path, checkpoint_interval="200 ms")
    found = env.source(source).uid("in").collect()
    running = env.start(slots=ProcessSlots())
    until("all splits", lambda: sum(row["n"] < 16 for row in found.rows()) >= 2 * 16)
    running.stop(timeout_s=limit_s(60))


@pytest.mark.systems
def test_files_then_a_directory_exactly_once_although_a_slot_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(directory_watch, "REST_S", 0.0)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    for part in range(4):
        pl.DataFrame({"n": range(part * 2000, part * 2000 + 2000)}).write_parquet(tmp_path / f"old/{part}.parquet")

    def job() -> Environment:
        env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="200 ms")
        columns = pa.schema({"n": pa.int64()})
        live = FileSource(tmp_path / "new", format="parquet", schema=columns, watch=True, interval="50 ms")
        source = HybridSource(FileSource(tmp_path / "old"), live, rows_per_s=6000)
        env.source(source).uid("in").write_parquet(tmp_path / "out").uid("out")
        return env

    def committed() -> list[int]:
        return sorted(n for path in (tmp_path / "out").glob("*.parquet") for n in pl.read_parquet(path)["n"].to_list())

    def add(part: int) -> None:
        hidden = tmp_path / f"new/.{part}"
        pl.DataFrame({"n": range(part * 2000, part * 2000 + 2000)}).write_parquet(hidden)
        hidden.rename(tmp_path / f"new/{part}.parquet")

    running = job().start(slots=ProcessSlots())
    until("something committed", lambda: len(committed()) > 0)
    os.kill(next(pid for pid in running.status().slot_pids if pid), signal.SIGKILL)
    until("the restart", lambda: running.status().restarts)
    add(4)
    until("the directory", lambda: len(committed()) > 8000)
    running.stop(timeout_s=limit_s(60))
    add(5)
    running = job().start(slots=ProcessSlots(), restore_from="latest")
    until("the rest", lambda: len(committed()) >= 12_000)
    running.stop(drain=True, timeout_s=limit_s(60))
    assert committed() == list(range(12_000))
