"""Splits whose readers report new rows rest until then, are read together, and their small batches leave as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from test_source import Numbers, NumbersReader, Reader, World

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Done, Failed, Mail
from midstream.engine.operators.source_api import Split, SplitReader
from midstream.engine.worker.source_reader import SPLITS, ReadProgress, splits_of
from midstream.engine.worker.split_reads import FEW_ROWS, READS_APART_S, REPORTED_REST_S_MAX, REPORTED_REST_S_MIN


class Timers(World):
    """With timers that are cancelled one by one."""

    def call_later(self, delay_s: float, mail: Mail) -> Any:
        entry = self.time_s + delay_s, mail
        self.timers.append(entry)
        return Cancel(self, entry)


@dataclass
class Cancel:
    world: World
    entry: tuple[float, Mail]

    def cancel(self) -> None:
        if self.entry in self.world.timers:
            self.world.timers.remove(self.entry)


class Mailbox(Numbers):
    """Splits without an end, whose rows come when a test says so."""

    def __init__(self, *, reports: bool = True, side_by_side: int = 10) -> None:
        super().__init__(blocking=True, side_by_side=side_by_side)
        self.bounded = False
        self.reports = reports
        self.batch_rows = 10**6
        self.arrived: dict[str, int] = {}
        self.wakes: dict[str, Callable[[], None]] = {}
        self.reads: list[str] = []

    def open_split(self, split: Split) -> SplitReader:
        return MailboxReader(self, split)

    def arrive(self, split: str, rows: int, *, is_reported: bool = True) -> None:
        self.arrived[split] = self.arrived.get(split, 0) + rows
        if is_reported:
            self.wakes[split]()


class MailboxReader(NumbersReader):
    def __init__(self, source: Mailbox, split: Split) -> None:
        super().__init__(source, split)
        self._mailbox = source

    def on_rows(self, wake: Callable[[], None]) -> bool:
        self._mailbox.wakes[self._id] = wake
        return self._mailbox.reports

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        self._mailbox.reads.append(self._id)
        there = self._first + self._mailbox.arrived.get(self._id, 0) - self._next
        found = super().read(min(rows_max, there))
        assert found is not None
        return found


def opened(*ids: str, reports: bool = True, rows_max: int = 100) -> tuple[Reader, Mailbox, World]:
    """With splits that have been read once, and had no rows."""
    world, source = Timers(), Mailbox(reports=reports)
    reader = Reader(source, world, rows_max)
    reader.give(*ids)
    reader.run(3)
    assert sorted(source.reads) == sorted(ids)
    source.reads.clear()
    return reader, source, world


def read_together(reader: Reader, world: World) -> None:
    """Let the splits be read that wait for their turn."""
    world.time_s += READS_APART_S
    due = [(at_s, mail) for at_s, mail in world.timers if at_s <= world.time_s]
    world.timers = [timer for timer in world.timers if timer not in due]
    for _, mail in due:
        mail()
    world.run_io()


def fire(world: World) -> None:
    """Let the timer that is due next fire."""
    due = min(world.timers, key=lambda timer: timer[0])
    world.timers.remove(due)
    world.time_s = due[0]
    due[1]()


def test_rows_that_are_reported_are_read_at_once_and_no_split_without() -> None:
    reader, source, world = opened("0:50", "100:150", "200:250")
    source.arrive("100:150", 2)
    assert len(world.io) == 1
    reader.run(3)
    assert reader.rows == [100, 101]
    assert source.reads == ["100:150"], "it had fewer rows than it was asked for, so there are none"
    assert world.time_s == 0


def test_a_split_is_read_once_more_if_rows_come_while_it_is_being_read() -> None:
    reader, source, world = opened("0:50")
    source.arrive("0:50", 2)
    ((work, done),) = world.io
    world.io.clear()
    source.arrive("0:50", 3, is_reported=False)
    outcome = work()
    source.wakes["0:50"]()

    done(Done(outcome))
    reader.run(2)
    assert reader.rows == [0, 1, 2, 3, 4]
    read_together(reader, world)
    assert source.reads == ["0:50", "0:50"]


def test_rows_that_are_not_reported_are_found_all_the_same() -> None:
    reader, source, world = opened("0:50")
    source.arrive("0:50", 2, is_reported=False)
    assert reader.run(2) is ReadProgress.WAITING and reader.rows == []
    fire(world)
    reader.run(3)
    assert reader.rows == [0, 1]
    assert world.time_s == REPORTED_REST_S_MIN


def test_the_rests_of_a_quiet_split_grow() -> None:
    reader, _, world = opened("0:50")
    for _ in range(10):
        fire(world)
        world.run_io()
        reader.run(1)
    before_s = world.time_s
    fire(world)
    assert world.time_s - before_s == pytest.approx(REPORTED_REST_S_MAX)
    assert reader.driver.quiet_until_s(0) == before_s


def test_small_batches_of_several_splits_leave_as_one_and_move_all_offsets() -> None:
    reader, source, world = opened("0:50", "100:150", "200:250")
    sizes: list[int] = []
    parts: list[list[tuple[int, int]]] = []

    def emitted(batch: pa.RecordBatch) -> None:
        sizes.append(batch.num_rows)
        parts.append(list(reader.driver.current))
        rows = to_list(batch.column("n"))
        assert [reader.driver.position_of(at) for at in range(len(rows))] == [
            f"split {100 * (n // 100)}:{100 * (n // 100) + 50}, row {n % 100} after offset 0" for n in rows
        ]
        assert reader.driver.position_of(None).count(" or ") == 2

    reader.driver._emit = emitted
    for split, rows in (("0:50", 2), ("100:150", 3), ("200:250", 1)):
        source.arrive(split, rows)
    assert len(world.io) == 1, "the first report began a read"
    ((work, done),) = world.io
    world.io.clear()
    done(Done(work()))
    read_together(reader, world)  # the rest of them
    assert len(world.io) == 0
    reader.run(1)
    assert sizes == [6] and sorted(parts[0]) == [(0, 2), (1, 3), (2, 1)]
    stored = splits_of(reader.driver.snapshot(lambda: "chunk")[SPLITS])
    assert {split.id: split.offset for split in stored} == {"0:50": 2, "100:150": 3, "200:250": 1}


@pytest.mark.parametrize("every_row_passes", [True, False])
def test_batches_are_of_one_split_where_an_operator_could_not_tell_its_rows_apart(every_row_passes: bool) -> None:
    reader, source, world = opened("0:50", "100:150")
    reader.driver.every_row_passes = every_row_passes
    reader.driver.on_change(lambda: None)
    splits: list[int] = []
    reader.driver._emit = lambda batch: splits.append(len(reader.driver.current))
    source.arrive("0:50", 2)
    source.arrive("100:150", 3)
    world.run_io()
    read_together(reader, world)
    reader.run(6)
    assert splits == ([2] if every_row_passes else [1, 1])


def test_large_batches_are_read_alone_and_leave_alone_and_no_split_waits_for_ever() -> None:
    reader, source, world = opened("0:90000", "100000:190000", "200000:290000", rows_max=10 * FEW_ROWS)
    reader.driver._rate.rows_max = reader.driver._rate._limit
    mixed: list[set[int]] = []
    seen: list[int] = []

    def emitted(batch: pa.RecordBatch) -> None:
        rows = to_list(batch.column("n"))
        seen.extend(rows)
        mixed.append({n // 100_000 for n in rows})
        for split in ("0:90000", "100000:190000"):
            if source.arrived[split] < 200:
                source.arrive(split, 1)

    reader.driver._emit = emitted
    source.arrive("200000:290000", 5 * FEW_ROWS)
    source.arrive("0:90000", 1)
    source.arrive("100000:190000", 1)
    for _ in range(1000):
        reader.run(3)
        read_together(reader, world)
    assert len(seen) == len(set(seen)) == 400 + 5 * FEW_ROWS
    assert {2} in mixed[:20], "the large one had its turn"
    assert all(len(each) == 1 for each in mixed if 2 in each)


@pytest.mark.parametrize("closes", [False, True])
def test_a_read_that_fails_fails_the_task_once_and_every_reader_is_closed(closes: bool) -> None:
    reader, source, world = opened("0:50", "100:150", "200:250")
    reader.driver._rate.rows_max = 2
    for split in ("0:50", "100:150", "200:250"):
        source.arrive(split, 2)
    ((_, done),) = world.io
    world.io.clear()

    if closes:
        reader.driver.close()
    done(Failed(StorageError("gone")))
    world.run_io()
    assert len(reader.failures) == (not closes)
    if not closes:
        reader.driver.close()
    world.run_io()
    assert sorted(source.closed) == ["0:50", "100:150", "200:250"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_when_a_snapshot_at_any_point_goes_on_exactly_after_what_was_emitted(seed: int) -> None:
    random = Random(seed)
    ids = [f"{1000 * n}:{1000 * n + 999}" for n in range(random.choice((1, 2, 5)))]
    rows_max = random.choice((2, 7, 3000))
    world, source = Timers(), Mailbox()
    first = Reader(source, world, rows_max)
    first.give(*ids)
    stop_at = random.randrange(200)
    for _ in range(stop_at):
        _step(random, first, source, world, ids)
    parts = first.driver.snapshot(lambda: "chunk")
    for split in splits_of(parts[SPLITS]):
        begin = int(split.id.split(":")[0])
        mine = [n for n in first.rows if begin <= n < begin + 1000]
        assert mine == [*range(begin, begin + split.offset)], split
    first.driver.close()
    while world.io:
        world.run_io()
    assert sorted(source.closed) == sorted(source.wakes), "every reader that was opened"
    world.timers.clear()
    second = Reader(source, world, rows_max)
    second.driver.restore(parts)
    wanted = sorted(int(split.split(":")[0]) + n for split, rows in source.arrived.items() for n in range(rows))
    for _ in range(20_000):
        if len(first.rows) + len(second.rows) >= len(wanted):
            break
        _step(random, second, source, world, ids, arrives=False)
    assert sorted(first.rows + second.rows) == wanted


def _step(
    random: Random, reader: Reader, source: Mailbox, world: World, ids: list[str], *, arrives: bool = True
) -> None:
    kind = random.random()
    if kind < 0.25 and arrives:
        split = random.choice(ids)
        if source.arrived.get(split, 0) < 900:
            source.arrived[split] = source.arrived.get(split, 0) + random.choice((1, 2, 30))
        if split in source.wakes and random.random() < 0.8:
            source.wakes[split]()
    elif kind < 0.5 and world.io:
        work, done = world.io.pop(random.randrange(len(world.io)))

        done(Done(work()))
    elif kind < 0.6 and world.timers:
        fire(world)
    else:
        reader.driver.step()
    assert not reader.failures
