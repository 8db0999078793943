"""One source subtask: whatever it has emitted is exactly what its snapshot says is behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from midstream.connectors.common.malformed_records import BadRecord, reported
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.core.interfaces import Done, Failed, Mail
from midstream.engine.operators.bad_records import TALLY, BadRecords
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    decoded_splits,
)
from midstream.engine.state.state_parts import StatePart
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.source_reader import SPLITS, ReadProgress, SourceReader, splits_of
from midstream.engine.worker.split_reads import REST_S_MAX, REST_S_MIN
from recovering import task_seams
from scarce_cores import Machine


@dataclass
class World:
    """Clock and executor; I/O outcomes wait in `io` until the test lets them happen."""

    time_s: float = 0.0
    io: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)
    timers: list[tuple[float, Mail]] = field(default_factory=list)

    def now_ms(self) -> int:
        return int(self.time_s * 1000)

    def monotonic_s(self) -> float:
        return self.time_s

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0

    def post(self, mail: Mail) -> None:
        mail()

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.io.append((work, done))

    def call_at(self, time_ms: int, mail: Mail) -> World:
        raise AssertionError("a source does not wait for the wall clock")

    def call_later(self, delay_s: float, mail: Mail) -> World:
        self.timers.append((self.time_s + delay_s, mail))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def run_io(self) -> None:
        waiting, self.io = self.io, []
        for work, done in waiting:
            try:
                outcome: Any = Done(work())
            except StorageError as error:
                outcome = Failed(error)
            done(outcome)


class Numbers(Source):
    """Split "a:b" has the rows a … b-1."""

    def __init__(self, blocking: bool, side_by_side: int = 1) -> None:
        self.schema = pa.schema([("n", pa.int64())])
        self.blocking = blocking
        self.side_by_side = side_by_side
        self.batch_rows = 7
        self.closed: list[str] = []

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("on the driver only")

    def splits_per_reader(self, parallelism: int) -> int:
        return self.side_by_side

    def open_split(self, split: Split) -> SplitReader:
        if split.id == "gone":
            raise StorageError("gone: no such file")
        return NumbersReader(self, split)


class NumbersReader(SplitReader):
    def __init__(self, source: Numbers, split: Split) -> None:
        first, self._end = map(int, split.id.split(":"))
        self._next = first + split.offset
        self._first = first
        self._source, self._id = source, split.id

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        if self._next >= self._end:
            return None
        rows = min(rows_max, self._end - self._next, self._source.batch_rows)
        batch = pa.RecordBatch.from_pydict(
            {"n": list(range(self._next, self._next + rows))}, schema=self._source.schema
        )
        self._next += rows
        return batch, self._next - self._first

    def close(self) -> None:
        self._source.closed.append(self._id)


class Reader:
    """A driver with everything that it calls."""

    def __init__(
        self, source: Source, world: World, rows_max: int = 100, own_core_s: Callable[[], float] | None = None
    ) -> None:
        if own_core_s is not None:
            world.own_core_s = own_core_s  # type: ignore[method-assign]
        self.rows: list[int] = []
        self.bad: list[int] = []
        self.requests = 0
        self.progress: list[tuple[int, int]] = []
        """The event time of the slowest split, and the number of assigned splits, in each report."""
        self.failures: list[BaseException] = []
        self.world = world
        self.driver = SourceReader(
            source,
            1,
            task_seams(world, None, clock=world, config=JobConfig(name="job", batch_rows=rows_max)),
            emit=lambda batch: self.rows.extend(to_list(batch.column("n"))),
            emit_bad=lambda rows: self.bad.extend(to_list(rows.column("position"))),
            request_split=self._requested,
            limit=DriftLimit(lambda lowest_us, splits: self.progress.append((lowest_us, splits))),
            wake=lambda: None,
            fail=self.failures.append,
        )

    def _requested(self) -> None:
        self.requests += 1

    def give(self, *ids: str) -> None:
        for split_id in ids:
            self.driver.add_split(msgspec.msgpack.encode(Split(split_id, b"")))

    def run(self, steps: int) -> ReadProgress:
        progress = ReadProgress.WAITING
        for _ in range(steps):
            progress = self.driver.step()
            if progress is ReadProgress.ENDED or self.failures:
                break
            if progress is ReadProgress.WAITING:
                self.world.run_io()
        return progress


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("side_by_side", [1, 2])
def test_a_snapshot_at_any_point_goes_on_exactly_behind_what_was_emitted(blocking: bool, side_by_side: int) -> None:
    steps = 0
    while True:
        world = World()
        source = Numbers(blocking, side_by_side)
        first = Reader(source, world)
        first.give("0:20", "20:23")
        first.driver.no_more_splits()
        ended = first.run(steps) is ReadProgress.ENDED
        parts = first.driver.snapshot(lambda: "chunk")
        second = Reader(source, world)
        second.driver.restore(parts)
        second.driver.no_more_splits()
        assert second.run(1000) is ReadProgress.ENDED
        assert sorted(first.rows + second.rows) == list(range(23)), f"restored after {steps} steps"
        if ended:
            break
        steps += 1
    assert steps > 4
    assert not parts, "nothing is left of a source that has ended"


class Ending(Numbers):
    """Splits that were found without an end get one from the job that reads them."""

    def begin_split(self, split: Split) -> Split:
        return split if ":" in split.id else Split(f"{split.id}:9", split.payload, split.offset)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_checkpoint_has_a_split_as_the_job_reads_it_even_before_anything_is_read(blocking: bool) -> None:
    reader = Reader(Ending(blocking, 2), World())
    reader.give("0", "3:5")
    stored = reader.driver.snapshot(lambda: "chunk")
    assert sorted(split.id for split in splits_of(stored[SPLITS])) == ["0:9", "3:5"]
    restored = Reader(Ending(blocking, 2), World())
    restored.driver.restore(stored)
    restored.run(20)
    assert sorted(restored.rows) == sorted([*range(9), 3, 4])


def test_a_split_whose_rows_may_have_any_order_keeps_their_latest_time_through_a_restore() -> None:
    def reading(split: Split, *, unordered: bool = True, bounded: bool = False, ends: bool = True) -> SourceReader:
        source = Numbers(blocking=False)
        source.splits_unordered, source.bounded, source.splits_end = unordered, bounded, ends
        reader = Reader(source, World())
        reader.driver.add_split(msgspec.msgpack.encode(split))
        return reader.driver

    timed = Split("0:9", b"", min_time_us=5)
    reader = reading(timed)
    (number,) = reader.open
    assert reader.is_held_to_its_end(number) and reader.latest_us(number) is None
    reader.note_latest_us(number, 77)
    stored = reader.snapshot(lambda: "chunk")
    restored = Reader(Numbers(blocking=False), World()).driver
    restored.restore(stored)
    (number,) = restored.open
    assert restored.latest_us(number) == 77
    assert reading(timed, bounded=True, ends=False).is_held_to_its_end(0)
    assert not reading(timed, ends=False).is_held_to_its_end(0), "it would be held for ever"
    assert not reading(timed, unordered=False).is_held_to_its_end(0)
    assert not reading(Split("0:9", b"")).is_held_to_its_end(0), "nothing is known of its times"


@pytest.mark.parametrize("latest", [2**62, "77", 7.5])
def test_a_latest_time_that_no_row_may_have_is_damage(latest: object) -> None:
    stored = msgspec.msgpack.encode({"id": "a", "payload": b"", "latest_us": latest})
    with pytest.raises(StorageError, match="the splits in the checkpoint are damaged"):
        decoded_splits([stored], "source 'a'")


class Noting(Numbers):
    """Its readers take note of completed checkpoints."""

    def __init__(self, blocking: bool, side_by_side: int) -> None:
        super().__init__(blocking, side_by_side)
        self.completed: list[tuple[str, int]] = []

    def open_split(self, split: Split) -> SplitReader:
        return NotingReader(self, split)


class NotingReader(NumbersReader):
    def __init__(self, source: Noting, split: Split) -> None:
        super().__init__(source, split)
        self._noted, self._split_id = source.completed, split.id

    def checkpointed(self, offset: int) -> None:
        self._noted.append((self._split_id, offset))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_gets_the_offset_that_a_completed_checkpoint_has(blocking: bool) -> None:
    source = Noting(blocking, 1)
    reader = Reader(source, World())
    reader.driver.begin_checkpoint(1)
    reader.give("0:100")
    reader.run(4)
    in_second = len(reader.rows)
    assert 0 < in_second < 100
    reader.driver.begin_checkpoint(2)
    reader.run(4)
    in_third = len(reader.rows)
    reader.driver.begin_checkpoint(3)
    reader.driver.begin_checkpoint(4)
    reader.run(2)
    for completed in (1, 2):
        reader.driver.checkpoint_completed(completed)
    assert source.completed == [("0:100", in_second)]
    reader.driver.checkpoint_aborted(4)
    reader.driver.checkpoint_completed(4)
    assert source.completed == [("0:100", in_second)]
    reader.driver.begin_checkpoint(5)
    reader.driver.begin_checkpoint(6)
    reader.driver.checkpoint_completed(6)
    reader.driver.checkpoint_completed(5)  # of several, the newest counts
    assert source.completed == [("0:100", in_second), ("0:100", len(reader.rows))]
    reader.driver.begin_checkpoint(7)
    reader.run(100)  # to the end
    reader.driver.checkpoint_completed(7)
    assert len(reader.rows) == 100 > in_third
    assert len(source.completed) == 2


def test_a_split_is_asked_for_once_and_again_when_it_is_read() -> None:
    reader = Reader(Numbers(blocking=False), World())
    assert reader.run(3) is ReadProgress.WAITING
    assert reader.requests == 1
    reader.give("0:3")
    reader.run(10)
    assert reader.rows == [0, 1, 2]
    assert reader.requests == 2
    reader.driver.no_more_splits()
    assert reader.run(2) is ReadProgress.ENDED


def test_a_split_that_is_gone_fails_the_task_with_its_reason() -> None:
    reader = Reader(Numbers(blocking=True), World())
    reader.give("gone")
    reader.run(5)
    assert [str(error) for error in reader.failures] == ["gone: no such file"]


class Misread(Numbers):
    """Its reader returns something else than rows and an offset."""

    def open_split(self, split: Split) -> SplitReader:
        reader = super().open_split(split)
        reader.read = lambda rows_max: {"n": [1]}  # type: ignore[method-assign, assignment, return-value]
        return reader


def test_a_read_that_returns_no_rows_fails_the_task_and_not_its_process() -> None:
    reader = Reader(Misread(blocking=True), World())
    reader.give("0:3")
    with pytest.raises(ConfigError, match="split '0:3': read returned dict"):
        reader.run(5)  # the I/O pool of these tests catches what storage raises only


@pytest.mark.parametrize("wanted", [0, -1])
def test_a_source_that_would_read_no_split_is_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match=f"splits_per_reader returned {wanted}"):
        Reader(Numbers(blocking=True, side_by_side=wanted), World())


class OneAfterTheOther(Numbers):
    """Splits that begin with 0 are read one at a time, and others together."""

    def splits_per_reader_of(self, split: Split, parallelism: int) -> int:
        return 1 if split.id.startswith("0:") else self.side_by_side


def test_how_many_splits_are_read_together_depends_on_those_that_are_open() -> None:
    reader = Reader(OneAfterTheOther(blocking=False, side_by_side=3), World())
    reader.run(1)
    assert reader.requests == 1
    reader.give("0:20")
    reader.run(3)
    assert reader.requests == 1, "it is read alone"
    reader.run(3)
    assert reader.requests == 2, "it has ended"
    reader.give("1:90")
    reader.run(2)
    assert reader.requests == 3
    reader.give("0:90")
    reader.run(2)
    assert reader.requests == 4, "one that others are read with is open"
    reader.give("2:90")
    reader.run(9)
    assert reader.requests == 4


def test_closing_while_a_read_is_under_way_closes_the_reader_once() -> None:
    world = World()
    source = Numbers(blocking=True)
    reader = Reader(source, world)
    reader.give("0:30")
    reader.driver.step()
    reader.driver.close()
    assert source.closed == []
    for _ in range(3):
        world.run_io()
    assert source.closed == ["0:30"]
    assert reader.failures == []


class Failing(Numbers):
    """Every read after the first so many fails."""

    good_reads = 0

    def open_split(self, split: Split) -> SplitReader:
        return FailingReader(self, split)


class FailingReader(NumbersReader):
    def __init__(self, source: Failing, split: Split) -> None:
        super().__init__(source, split)
        self._left = source.good_reads

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        self._left -= 1
        if self._left < 0:
            raise StorageError("it cannot be read")
        return super().read(rows_max)


@pytest.mark.parametrize("good_reads", [0, 1])
@pytest.mark.parametrize("is_closed_before", [False, True])
def test_a_reader_whose_read_fails_is_closed_once(good_reads: int, is_closed_before: bool) -> None:
    world = World()
    source = Failing(blocking=True)
    source.good_reads = good_reads
    reader = Reader(source, world)
    reader.give("0:30")
    reader.driver.step()
    for _ in range(good_reads):
        world.run_io()
        reader.driver.step()
    if is_closed_before:
        reader.driver.close()
        assert source.closed == [], "it is being read"
        world.run_io()
    else:
        world.run_io()
        reader.driver.close()
    world.run_io()
    assert source.closed == ["0:30"] and world.io == []
    assert [str(error) for error in reader.failures] == ([] if is_closed_before else ["it cannot be read"])


class Visitors(Numbers):
    """A split whose rows come late: `arrived` of them are there; two offsets go by without a row at every look in vain."""

    arrived = 0

    def open_split(self, split: Split) -> SplitReader:
        return VisitorsReader(self, split)


class VisitorsReader(NumbersReader):
    def __init__(self, source: Visitors, split: Split) -> None:
        super().__init__(source, split)
        self._visitors = source
        self._skipped = 0

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        if self._next < self._first + self._visitors.arrived:
            got = super().read(rows_max)
            assert got is not None
            return got[0], got[1] + self._skipped
        self._skipped += 2
        return pa.RecordBatch.from_pydict({"n": []}, schema=self._visitors.schema), self._next + self._skipped


def _ring(world: World) -> float:
    """The one timer that is set; how long it was."""
    ((when_s, mail),) = world.timers
    took_s, world.time_s = round(when_s - world.time_s, 6), when_s
    world.timers.clear()
    mail()
    return took_s


def test_a_split_without_rows_for_now_is_asked_again_less_and_less_often_and_its_offset_moves_on() -> None:
    world = World()
    source = Visitors(blocking=True)
    source.bounded = False
    reader = Reader(source, world)
    reader.give("0:100")
    assert reader.run(3) is ReadProgress.WAITING
    rests_s = []
    for _ in range(8):
        assert reader.driver.quiet_until_s(0) == world.time_s, "it is the input that has nothing"
        rests_s.append(_ring(world))
        world.run_io()
    assert rests_s == sorted(rests_s) and rests_s[0] == REST_S_MIN and rests_s[-1] == REST_S_MAX
    assert [split.offset for split in splits_of(reader.driver.snapshot(lambda: "chunk")[SPLITS])] == [18]
    source.arrived = 7
    _ring(world)
    world.run_io()
    reader.run(2)
    assert reader.rows == list(range(7))
    assert _ring(world) == REST_S_MIN, "what has rows is asked again at once"


def test_closing_while_a_split_rests_closes_its_reader_and_asks_no_more() -> None:
    world = World()
    source = Visitors(blocking=True)
    reader = Reader(source, world)
    reader.give("0:100")
    reader.run(3)
    assert world.timers
    reader.driver.close()
    world.run_io()
    assert (world.timers, world.io, source.closed) == ([], [], ["0:100"])


def test_stopping_ends_in_the_middle_of_a_split() -> None:
    reader = Reader(Numbers(blocking=False), World())
    reader.give("0:30")
    reader.run(2)
    reader.driver.stop()
    assert reader.driver.step() is ReadProgress.ENDED
    assert 0 < len(reader.rows) < 30


@pytest.mark.parametrize(("rate", "together"), [(100.0, 5), (2000.0, 8), (20_000.0, 20)])
def test_a_rate_is_kept_over_time_and_in_small_steps(rate: float, together: int) -> None:
    """Steps of a millisecond, or of 8 rows where those are within 50 ms."""
    world = World()
    source = Numbers(blocking=False)
    source.rows_per_s, source.batch_rows = rate, 100
    reader = Reader(source, world)
    reader.give("0:100000")
    most = 0
    for _ in range(100_000):
        before = len(reader.rows)
        if reader.driver.step() is ReadProgress.WAITING:
            due, mail = world.timers.pop(0)
            assert due >= world.time_s and not world.timers
            if due > 2:
                break
            world.time_s = due
            mail()
        most = max(most, len(reader.rows) - before)
    assert len(reader.rows) == pytest.approx(2 * rate, rel=0.05)
    assert most == together


@pytest.mark.parametrize("blocking", [True, False])
def test_operators_know_the_split_of_every_batch_and_hear_of_changes_before_its_rows(blocking: bool) -> None:
    world = World()
    reader = Reader(Numbers(blocking, side_by_side=3), world)
    driver = reader.driver
    seen: list[tuple[list[int], bool]] = []
    splits: dict[int, list[int]] = {}

    def emitted(batch: pa.RecordBatch) -> None:
        rows = to_list(batch.column("n"))
        for number, count in driver.current:
            assert number in seen[-1][0], "the listener knows it"
            splits.setdefault(number, []).extend(rows[:count])
            del rows[:count]
        assert not rows

    driver._emit = emitted
    driver.on_change(lambda: seen.append((list(driver.open), driver.waiting_from_us == MAX_WATERMARK_US)))
    reader.run(1)
    assert seen == [([], False)]
    driver.add_split(msgspec.msgpack.encode(Split("0:20", b"")), waiting_from_us=MIN_WATERMARK_US)
    driver.add_split(msgspec.msgpack.encode(Split("20:30", b"")), waiting_from_us=MIN_WATERMARK_US)
    reader.run(4)
    assert seen[-1] == ([0, 1], False)
    driver.splits_assigned(False)
    reader.run(40)
    assert ([0, 1], True) in [(sorted(numbers), assigned) for numbers, assigned in seen]
    assert seen[-1] == ([], True)
    assert splits == {0: list(range(20)), 1: list(range(20, 30))}


def test_splits_take_turns() -> None:
    reader = Reader(Numbers(blocking=False, side_by_side=2), World())
    reader.give("0:21", "100:121")
    reader.run(5)
    assert [row // 100 for row in reader.rows[::7]] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("blocking", [True, False])
def test_of_a_split_is_known_that_it_had_no_rows_only_when_a_read_has_returned(blocking: bool) -> None:
    world, source = World(), Numbers(blocking)
    source.bounded = False
    driver = Reader(source, world).driver
    driver.add_split(msgspec.msgpack.encode(Split("0:100", b"")))
    assert driver.quiet_until_s(0) < 0.0, "its turn has not come yet"
    driver.step()
    if blocking:
        world.time_s = 1.0
        assert driver.quiet_until_s(0) < 0.0, "it is being read"
        world.run_io()
        assert driver.quiet_until_s(0) < 0.0, "rows wait"
        driver.step()
    assert driver.quiet_until_s(0) == world.time_s, "what has been read is emitted"
    world.time_s = 5.0
    assert driver.quiet_until_s(0) <= 1.0, "the next rows are being read"


@pytest.mark.parametrize("ends", ["bounded", "splits_end"])
def test_a_split_that_ends_is_never_known_to_have_no_rows(ends: str) -> None:
    world = World()
    source = Visitors(blocking=True)
    source.bounded = False
    setattr(source, ends, True)
    reader = Reader(source, world)
    reader.give("0:100")
    reader.run(3)
    _ring(world)
    world.run_io()
    assert reader.driver.quiet_until_s(0) == float("-inf")


def test_no_split_waits_only_if_that_is_the_answer_to_the_last_request() -> None:
    driver = Reader(Numbers(blocking=False), World()).driver
    driver.step()
    driver.splits_assigned(False)
    assert not driver.none_waits, "splits that follow others may wait"
    driver.splits_assigned(True)
    assert driver.none_waits
    driver.add_split(msgspec.msgpack.encode(Split("0:1", b"")))
    assert not driver.none_waits, "others may have been found with it"
    for _ in range(4):
        driver.step()
    assert not list(driver.open) and not driver.none_waits, "the next request has no answer yet"


@pytest.mark.parametrize("blocking", [False, True])
def test_batches_are_those_of_a_tenth_of_a_second_however_slowly_they_are_taken(blocking: bool) -> None:
    world = World()
    source = Numbers(blocking=blocking)
    source.batch_rows = 100
    reader = Reader(source, world)
    reader.give("0:5000")
    sizes = []
    while len(reader.rows) < 4000:
        before = len(reader.rows)
        assert reader.driver.step() is not ReadProgress.ENDED
        world.run_io()  # what a blocking source reads ahead is there when its rows can be taken
        sizes.append(len(reader.rows) - before)
        world.time_s += sizes[-1] / 200  # rows/s
    usual = [size for size in sizes[-50:] if size in (19, 20, 21)]
    assert max(sizes[:3]) == 100 and max(sizes[-50:]) <= 21
    assert len(usual) >= 38, "all but a few, which ask what a call takes"


def test_a_source_that_had_nothing_for_long_goes_on_with_batches_of_full_size() -> None:
    world = World()
    source = Numbers(blocking=False)
    source.batch_rows = 100
    reader = Reader(source, world)
    for first in (0, 1000, 2000):
        reader.give(f"{first}:{first + 1000}")
        before = len(reader.rows)
        while reader.driver.step() is ReadProgress.EMITTED:
            world.time_s += 0.001
        assert len(reader.rows) - before == 1000
        world.time_s += 1000.0
    sizes = [len(reader.rows)]
    reader.give("3000:3100")
    reader.driver.step()
    assert len(reader.rows) - sizes[0] == 100


def test_a_source_with_a_rate_makes_up_for_a_stall_and_then_takes_small_steps_again() -> None:
    world = World()
    source = Numbers(blocking=False)
    source.rows_per_s, source.batch_rows = 10_000.0, 100
    reader = Reader(source, world)
    reader.give("0:100000")
    sizes: list[int] = []

    def run_until(end_s: float) -> None:
        while world.time_s < end_s:
            before = len(reader.rows)
            if reader.driver.step() is ReadProgress.WAITING:
                due_s, mail = world.timers.pop(0)
                world.time_s = max(world.time_s, due_s) + 1e-9
                mail()
            sizes.append(len(reader.rows) - before)

    run_until(0.5)
    assert max(sizes) <= 10
    sizes.clear()
    world.time_s += 0.05
    run_until(0.75)
    made_up = len(sizes) - sizes[::-1].index(max(sizes))
    assert max(sizes) == 100 and max(sizes[made_up + 2 :]) <= 10, "as soon as the last 50 rows are made up for"
    assert abs(len(reader.rows) - 10_000 * world.time_s) < 50


def test_batches_do_not_shrink_where_the_slots_get_no_core_for_most_of_the_time() -> None:
    """A row takes 0.1 ms on a core of its own; a batch of a tenth of a second is the largest that there is."""

    def sizes(share: float, judged_by_its_share: bool) -> list[int]:
        machine, world = Machine(share), World()
        clock = machine.clock()
        source = Numbers(blocking=False)
        source.batch_rows = 800
        reader = Reader(source, world, rows_max=800, own_core_s=clock.own_core_s if judged_by_its_share else None)
        reader.give("0:1000000")
        found = []
        for _ in range(200):
            before = len(reader.rows)
            assert reader.driver.step() is not ReadProgress.ENDED
            found.append(len(reader.rows) - before)
            for _ in range(10):
                machine.work(found[-1] / 10 * 1e-4)
                clock.own_core_s()
            world.time_s = machine.now_s
        return found[100:]

    assert sum(size < 800 for size in sizes(1.0, True)) <= 18, "but for a few, which ask what a call takes"
    assert sum(size < 400 for size in sizes(0.1, True)) <= 18
    assert max(sizes(0.1, False)) <= 200, "by the wall clock they do"


def test_a_rate_is_made_up_for_up_to_a_second_and_not_before_the_first_rows() -> None:
    world = World(time_s=1000.0)
    source = Numbers(blocking=False)
    source.rows_per_s, source.batch_rows = 1000.0, 100
    reader = Reader(source, world)
    reader.give("0:100000")

    def run_until(end_s: float) -> int:
        before = len(reader.rows)
        while world.time_s < end_s:
            if reader.driver.step() is ReadProgress.WAITING:
                due_s, mail = world.timers.pop(0)
                world.time_s = max(world.time_s, due_s) + 1e-9
                mail()
        return len(reader.rows) - before

    assert run_until(1001.0) <= 1020, "nothing was late"
    world.time_s += 0.8
    assert run_until(1002.0) == pytest.approx(1000, abs=20), "0.8 s of it are made up for"
    world.time_s += 100.0
    assert run_until(1103.0) == pytest.approx(2000, abs=20), "a second of it"


@pytest.mark.parametrize(
    ("source", "parallelism", "readers"),
    [
        (GeneratorSource(lambda i: {"n": i}), 20, 16),
        (GeneratorSource(lambda i: {"n": i}), 16, 16),
        (GeneratorSource(lambda i: {"n": i}), 3, 3),
        (GeneratorSource(lambda i: {"n": i}, splits=2), 3, 2),
        (GeneratorSource(lambda i: {"n": i}, count=1000), 20, 20),
        (GeneratorSource(lambda i: {"n": i}, count=2), 20, 2),
        (GeneratorSource(lambda i: {"n": i}, count=0), 20, 1),
        (from_rows([{"n": 1}] * 5), 20, 5),
        (from_rows([{"n": 1}] * 5, splits=1), 20, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Source) else str(value),
)
def test_those_that_have_a_split_share_the_rate_of_all(source: Source, parallelism: int, readers: int) -> None:
    context = DiscoveryContext("numbers", parallelism, None)
    assert source.readers_max(parallelism) == readers
    assert min(parallelism, max(1, len(source.discover(None, context).splits))) == readers


class Odd(Numbers):
    """Of the rows of `Numbers`, the odd ones are bad records."""

    drops_bad_records = True

    def open_split(self, split: Split) -> SplitReader:
        return _OddReader(super().open_split(split), int(split.id.split(":")[0]) + split.offset)


class _OddReader(SplitReader):
    def __init__(self, numbers: SplitReader, first: int) -> None:
        self._numbers = numbers
        self._next = first
        self._bad: list[BadRecord] = []

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        got = self._numbers.read(rows_max)
        if got is None:
            return None
        batch, offset = got
        found = to_list(batch.column("n"))
        self._bad = [BadRecord(at, "here", None, n, b"%d" % n, "odd") for at, n in enumerate(found) if n % 2]
        return batch.filter(pa.array([n % 2 == 0 for n in found])), offset

    def bad_records(self) -> BadRecords | None:
        return reported(self._bad)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("batch_rows", [1, 2, 5])
def test_bad_records_are_emitted_once_in_whatever_step_a_job_is_restored(blocking: bool, batch_rows: int) -> None:
    """Batches of one row have bad records and no rows, or the other way around."""
    for steps in range(40):
        world = World()
        source = Odd(blocking)
        source.batch_rows = batch_rows
        first = Reader(source, world)
        first.give("0:12")
        first.driver.no_more_splits()
        first.run(steps)
        second = Reader(source, world)
        second.driver.restore(first.driver.snapshot(lambda: "chunk"))
        second.driver.no_more_splits()
        assert second.run(1000) is ReadProgress.ENDED
        assert first.rows + second.rows == list(range(0, 12, 2)), steps
        assert first.bad + second.bad == list(range(1, 12, 2)), steps
        assert first.driver.tally.total + second.driver.tally.total == 6


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 100])
def test_a_bad_record_too_many_in_a_window_fails_whatever_the_batches_and_restores_are(batch_rows: int) -> None:
    """Windows of 7: 0-6 and 14-20 have three odd numbers, 7-13 and 21-27 have four, beginning with 7 and 21."""
    for restored_after in range(6):
        world = World()
        source = Odd(blocking=False)
        source.batch_rows = batch_rows
        source.bad_records_max = (3, 7)
        first = Reader(source, world)
        first.give("0:28")
        first.driver.no_more_splits()
        try:
            first.run(restored_after)
        except SchemaError:
            continue
        second = Reader(source, world)
        second.driver.restore(first.driver.snapshot(lambda: "chunk"))
        second.driver.no_more_splits()
        with pytest.raises(SchemaError, match=r"here, byte 13: odd; 4 of the last 7 records .*allows 3 of 7"):
            second.run(1000)
    source.bad_records_max = (4, 7)
    reader = Reader(source, World())
    reader.give("0:28")
    reader.driver.no_more_splits()
    assert reader.run(1000) is ReadProgress.ENDED
    assert reader.bad == list(range(1, 28, 2))


def test_after_a_rescale_a_subtask_goes_on_with_the_worst_of_the_windows_that_it_gets() -> None:
    source = Odd(blocking=False)
    source.bad_records_max = (3, 100)
    readers = [Reader(source, World()) for _ in range(2)]
    for reader, split in zip(readers, ("0:2", "10:16"), strict=True):
        reader.give(split)
        reader.driver.no_more_splits()
        assert reader.run(100) is ReadProgress.ENDED
    parts = [reader.driver.snapshot(lambda i=i: f"chunk{i}")[TALLY] for i, reader in enumerate(readers)]  # type: ignore[misc]  # mypy infers no lambda with defaults
    after = Reader(source, World())
    after.driver.restore({TALLY: StatePart(parts[0].redistribute, parts[0].chunks + parts[1].chunks)})
    after.give("20:22")
    with pytest.raises(SchemaError, match=r"byte 21: odd; 4 of the last 8 records "):
        after.run(100)


class Times:
    """How far each split is: as many microseconds as rows of it have been emitted."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def progress_us(self, split: int) -> int:
        rows = [row for row in self._reader.rows if row // 1000 == split]
        return len(rows) or MIN_WATERMARK_US


def in_step(*ids: str, blocking: bool, drift_us: int = 8, world: World | None = None) -> Reader:
    """A reader of several splits, of which split i has the rows from 1000 * i on."""
    reader = Reader(Numbers(blocking, len(ids)), world or World())
    reader.driver.limit_drift(Times(reader), drift_us)
    reader.give(*ids)
    return reader


@pytest.mark.parametrize("blocking", [True, False])
def test_a_split_above_the_ceiling_is_not_read_and_the_others_are(blocking: bool) -> None:
    reader = in_step("0:40", "1000:1040", blocking=blocking)
    reader.run(20)
    assert sorted(reader.rows) == [*range(7), *range(1000, 1007)], "one batch of each, until there is a ceiling"
    assert reader.progress[-1] == (7, 2) and reader.driver.splits_ahead == 2
    assert reader.run(3) is ReadProgress.WAITING
    reader.driver.set_ceiling(7)
    reader.run(20)
    assert sorted(reader.rows) == [*range(14), *range(1000, 1014)], "a batch may go beyond it"
    reader.driver.set_ceiling(MAX_WATERMARK_US)
    reader.driver.no_more_splits()
    assert reader.run(200) is ReadProgress.ENDED
    assert len(reader.rows) == 80 and reader.driver.splits_ahead == 0
    assert reader.progress[-1] == (MAX_WATERMARK_US, 2)


@pytest.mark.parametrize("blocking", [True, False])
def test_splits_that_are_held_back_keep_nothing_from_happening(blocking: bool) -> None:
    reader = in_step("0:7", "1000:1040", blocking=blocking)
    reader.run(20)
    assert (reader.driver.splits_ahead, reader.requests) == (1 if blocking else 2, 1 if blocking else 0)
    assert len(splits_of(reader.driver.snapshot(lambda: "chunk")[SPLITS])) == (1 if blocking else 2)
    reader.give("2000:2003")
    assert reader.progress[-1] == (MIN_WATERMARK_US, 3), "the coordinator gets to know that the split is known"
    reader.run(20)
    assert [row for row in reader.rows if row >= 2000] == [2000, 2001, 2002], "a new one is read up to its first rows"
    reader.driver.stop()
    assert reader.run(3) is ReadProgress.ENDED
    assert reader.progress[-1] == (MAX_WATERMARK_US, 3)
