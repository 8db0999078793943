"""State above the limit goes to the disk, oldest first; what changes meanwhile and what fails loses no row."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import IO

import numpy as np
import polars as pl
import pytest

from midstream.engine.core.config import JobConfig
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.tombstones import TombstonedRun
from midstream.engine.worker.state_memory import RETRY_S, WRITES_MAX, RestoredTables, StateMemory, state_bytes_max
from on_disk import MemoryDisk
from recovering import FakeTimer, Steps
from standing_clock import StandingClock

ROWS = 1000
BYTES = ROWS * 8


def frame(start: int = 0) -> pl.DataFrame:
    return pl.DataFrame({"k": np.arange(start, start + ROWS)})


class World:
    def __init__(self, runs: list[FrameRun], limit_bytes: int | None = BYTES) -> None:
        self.runs = runs
        self.io, self.clock, self.disk = Steps(), StandingClock(), MemoryDisk()
        self.disk.file_bytes_min = 100
        self.memory = StateMemory(lambda: self.runs, limit_bytes, self.disk, self.clock, self.io)
        self.memory.poll()

    def poll(self) -> None:
        _, timer = self.io.timers.pop()
        assert isinstance(timer, FakeTimer)
        timer.ring()

    def run_io(self) -> None:
        while self.io.run_io():
            pass

    @property
    def sizes(self) -> tuple[int, int]:
        return self.memory.bytes_in_memory, self.memory.bytes_on_disk


def test_the_oldest_runs_go_to_the_disk_until_the_others_fit() -> None:
    runs = [FrameRun(frame(n)) for n in range(5)]
    before = [run.frame for run in runs]
    world = World([*runs], limit_bytes=2 * BYTES)
    assert world.sizes == (5 * BYTES, 0)
    assert len(world.io.io) == WRITES_MAX, "not all of them together"
    world.run_io()
    assert [run.frame is old for run, old in zip(runs, before, strict=True)] == [False, False, False, True, True]
    assert all(run.frame.equals(old) for run, old in zip(runs, before, strict=True))
    world.poll()
    assert world.sizes == (2 * BYTES, 3 * BYTES) and not world.io.io
    world.runs = runs[3:]
    world.poll()
    assert world.sizes == (2 * BYTES, 0)


@pytest.mark.parametrize("limit_bytes", [None, 5 * BYTES])
def test_nothing_is_written_below_the_limit_and_without_one(limit_bytes: int | None) -> None:
    world = World([FrameRun(frame(n)) for n in range(5)], limit_bytes)
    assert not world.io.io and world.sizes == (5 * BYTES, 0)


def test_small_runs_stay_in_memory() -> None:
    world = World([FrameRun(frame()[:10]), FrameRun(frame()), FrameRun(frame()[:10])], limit_bytes=1)
    assert len(world.io.io) == 1
    world.run_io()
    world.poll()
    assert world.sizes == (160, BYTES) and not world.io.io


def test_what_is_computed_of_a_run_on_disk_follows_it() -> None:
    run = TableRun(frame())
    world = World([run], limit_bytes=1)
    world.run_io()
    there = run.frame
    run.positions(np.array([3], np.uint64), ["k"])
    world.poll()
    assert world.sizes == (2 * BYTES, BYTES), "its index"
    world.run_io()
    world.poll()
    assert world.sizes == (0, 3 * BYTES)
    assert run.frame is there, "it is not written again"
    assert run.positions(np.array([3, 5], np.uint64), ["k"]).tolist() == [3, 5]


def test_an_index_that_is_made_while_its_run_is_written_is_kept() -> None:
    run = TableRun(frame())
    world = World([run], limit_bytes=1)
    run.positions(np.array([3], np.uint64), ["k"])
    index = run._index
    world.run_io()
    assert index is not None and run._index is not None and run._index.codes is index.codes
    assert run.positions(np.array([3], np.uint64), ["k"]).tolist() == [3]


def test_a_run_that_has_got_other_rows_while_it_was_written_keeps_them() -> None:
    run = FrameRun(frame())
    world = World([run], limit_bytes=1)
    run.frame = newer = frame(7)
    world.run_io()
    assert run.frame is newer
    world.poll()
    world.run_io()
    assert run.frame is not newer and run.frame.equals(newer)


def test_a_run_that_is_overwritten_while_it_was_written_is_left_alone() -> None:
    first = TableRun(pl.DataFrame({"k": np.arange(ROWS), "v": np.zeros(ROWS, np.int64)}))
    run = first.overwritten(np.arange(ROWS), {"v": np.ones(ROWS, np.int64)}, np.arange(ROWS))
    assert run is not None
    assert run.frame["v"][0] == 1
    world = World([run], limit_bytes=1)
    again = run.overwritten(np.arange(ROWS), {"v": np.full(ROWS, 9)}, np.arange(ROWS))
    assert again is not None
    world.runs = [again]
    world.run_io()
    world.poll()
    assert not world.io.io, "it is still being overwritten"
    assert again.frame["v"].to_list() == [9] * ROWS
    world.poll()
    world.run_io()
    assert again.frame["v"].to_list() == [9] * ROWS and run.frame["v"].to_list() == [1] * ROWS


def test_rows_that_are_removed_while_their_run_is_written_stay_removed() -> None:
    run = TombstonedRun(frame())
    world = World([run], limit_bytes=1)
    run.remove(np.arange(10))
    world.run_io()
    assert run.living.frame["k"].to_list() == list(range(10, ROWS))


def test_a_full_disk_loses_nothing_is_reported_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    run = FrameRun(frame())
    world = World([run], limit_bytes=1)
    world.disk.is_full = True
    before = run.frame
    for _ in range(3):
        world.run_io()
        world.poll()
        assert not world.io.io, "not in a tight loop"
        assert run.frame is before
        world.clock.passes(RETRY_S)
        world.poll()
        assert len(world.io.io) == 1
    (warning,) = world.memory.warnings
    assert warning == caplog.messages[0] and len(caplog.messages) == 1
    assert warning.startswith("state above state_memory cannot be written to /a/disk, so it stays in memory: ")
    assert "No space left on device" in warning and "Make room" in warning
    world.disk.is_full = False
    world.run_io()
    assert run.frame is not before and run.frame.equals(before)
    assert world.memory.warnings == ()


def test_nothing_is_moved_after_the_end_of_the_attempt() -> None:
    run = FrameRun(frame())
    world = World([run], limit_bytes=1)
    before = run.frame
    world.memory.close()
    world.run_io()
    assert run.frame is before
    (_, timer) = world.io.timers.pop()
    assert isinstance(timer, FakeTimer) and timer.mail is None


def test_files_go_with_the_runs_and_no_run_is_held() -> None:
    files: list[int] = []

    class Counted(bytearray):
        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            files.append(len(data))

        def __del__(self) -> None:
            files.pop()

    class Disk(MemoryDisk):
        def map(self, write: Callable[[IO[bytes]], None]) -> memoryview:
            return memoryview(Counted(bytes(super().map(write))))

    world = World([], limit_bytes=1)
    world.memory.disk = Disk()
    world.runs = [FrameRun(frame())]
    world.poll()
    world.run_io()
    assert len(files) == 1
    world.runs = []
    world.poll()
    gc.collect()
    assert files == [] and world.sizes == (0, 0)


def test_tables_of_a_checkpoint_above_the_limit_lie_on_disk(caplog: pytest.LogCaptureFixture) -> None:
    disk, table = MemoryDisk(), frame().to_arrow()
    disk.file_bytes_min = 100
    restored = RestoredTables(2 * BYTES, disk)
    tables = [restored.keep(table) for _ in range(4)]
    assert [each is table for each in tables] == [True, True, False, False] and disk.files == 2
    assert all(each.equals(table) for each in tables)
    small = table.slice(0, 5)
    assert restored.keep(small) is small
    disk.is_full = True
    assert restored.keep(table) is table
    assert "restored state stays in memory: it cannot be written to /a/disk: " in caplog.text
    assert RestoredTables(None, disk).keep(table) is table


def test_the_limit_is_a_share_of_the_memory_unless_it_is_set() -> None:
    config = JobConfig(name="job")
    assert state_bytes_max(config, 16 * 2**30, 4) == 2 * 2**30
    assert state_bytes_max(config, 0, 4) is None
    assert state_bytes_max(JobConfig(state_memory="unlimited"), 2**30, 1) is None
    assert state_bytes_max(JobConfig(state_memory=5), 2**30, 4) == 5
