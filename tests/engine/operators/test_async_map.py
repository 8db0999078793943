"""Rows that are called outside of the loop: each result once, in its order, on its side of every watermark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import FakeClock, Parts, World, stored

from in_memory import CountingIds
from midstream.api.function_checks import call_limits
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.interfaces import Call, Done, Failed, Outcomes
from midstream.engine.operators.async_map import IN_FLIGHT, AsyncMapOperator, CallLimits
from midstream.engine.operators.failed_rows import FAIL, FAILED, ErrorPolicy
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

GIVEN = pa.schema([("n", pa.int64()), ("tags", pa.large_list(pa.large_string()))])
MADE = pa.schema([("n", pa.int64()), ("twice", pa.int64())])

DEFAULT = CallLimits()


def twice(row: dict[str, Any]) -> dict[str, Any]:
    row["tags"].append("called")  # the row of the next call of it must not have it
    return {"n": row["n"], "twice": 2 * row["n"]}


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "tags": ["new"]} for n in numbers], schema=GIVEN)


class FakeCalls:
    """Calls that complete when the test decides it."""

    def __init__(self, completed: Callable[[Outcomes], None]) -> None:
        self.completed = completed
        self.begun: dict[int, Callable[[], Any]] = {}
        self.cancelled: list[int] = []
        self.closed = False

    def start(self, calls: Sequence[Call]) -> None:
        self.begun.update(calls)

    def cancel(self, numbers: Collection[int]) -> None:
        self.cancelled += numbers

    def close(self, last: Callable[[], Any] | None = None) -> None:
        self.closed = True


class Async(World):
    """One subtask of the operator. `rows_under_way`: the rows that are called now, by the number of the call."""

    calls: FakeCalls

    def __init__(
        self,
        limits: CallLimits = DEFAULT,
        policy: ErrorPolicy = FAIL,
        parts: Parts | None = None,
        ids: CountingIds | None = None,
        clock: FakeClock | None = None,
        watermark_us: int = MIN_WATERMARK_US,
    ) -> None:
        def open_calls(of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]) -> FakeCalls:
            self.calls = FakeCalls(completed)
            return self.calls

        self.submitted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        super().__init__(
            AsyncMapOperator("lookup", twice, MADE, GIVEN, limits, policy),
            parts=parts,
            ids=ids,
            clock=clock,
            open_calls=open_calls,
            submit=lambda work, done: self.submitted.append((work, done)),
            watermark_us=watermark_us,
        )
        for work, done in self.submitted:
            done(Done(work()))

    @property
    def under_way(self) -> dict[int, int]:
        """The numbers of the rows under way, by that of the call, without those that have timed out."""
        return {number: work.args[-1]["n"] for number, work in self.calls.begun.items()}  # type: ignore[attr-defined]

    def complete(self, *numbers: int) -> None:
        """Complete the calls of these rows, together."""
        of = {n: number for number, n in self.under_way.items()}
        self.calls.completed([(of[n], Done(self.calls.begun.pop(of[n])())) for n in numbers])

    def fail(self, *numbers: int, error: BaseException | None = None) -> None:
        of = {n: number for number, n in self.under_way.items()}
        found = []
        for n in numbers:
            self.calls.begun.pop(of[n])()  # it changes its row before it fails
            found.append((of[n], Failed(error or OSError("no answer"))))
        self.calls.completed(found)

    @property
    def results(self) -> list[int]:
        found = self.out.rows()
        assert all(row["twice"] == 2 * row["n"] for row in found)
        return [row["n"] for row in found]

    def restored(self, limits: CallLimits, policy: ErrorPolicy = FAIL, watermark_us: int = MIN_WATERMARK_US) -> Async:
        parts = {
            name: StatePart(part.redistribute, tuple(Chunk(c.id, stored(c.table)) for c in part.chunks))
            for name, part in self.snapshot().items()
        }
        return Async(limits, policy, parts, self.ids, self.clock, watermark_us)


def test_results_have_the_order_of_the_rows() -> None:
    world = Async()
    world.process(rows(1, 2, 3))
    world.process(rows(4))
    world.complete(3, 2, 4)
    assert world.results == []
    world.complete(1)
    assert world.results == [1, 2, 3, 4]
    assert not world.operator.awaits_work


def test_results_come_as_they_complete_if_order_does_not_matter() -> None:
    world = Async(CallLimits(ordered=False))
    world.process(rows(1, 2, 3))
    world.complete(3)
    world.complete(2)
    assert world.results == [3, 2]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_watermark_waits_for_the_rows_before_it_and_later_rows_for_it(ordered: bool) -> None:
    world = Async(CallLimits(ordered=ordered))
    world.advance(5)
    assert world.out.watermarks == [5]
    world.process(rows(1, 2))
    world.advance(10)
    world.advance(11)
    world.process(rows(3))
    world.complete(3, 2)
    assert world.results == ([] if ordered else [2])
    assert world.out.watermarks == [5]
    world.complete(1)
    assert sorted(world.results) == [1, 2, 3] and world.results[-1] == 3
    assert world.out.watermarks == [5, 11]
    assert not world.operator.awaits_work


def test_no_more_rows_are_called_than_the_capacity_allows() -> None:
    world = Async(CallLimits(capacity=2))
    assert world.operator.ready(lambda: None)
    world.process(rows(1, 2, 3, 4))
    assert sorted(world.under_way.values()) == [1, 2] and not world.operator.ready(lambda: None)
    world.complete(2)
    assert sorted(world.under_way.values()) == [1], "2 has its turn after 1"
    world.complete(1)
    assert sorted(world.under_way.values()) == [3, 4] and not world.operator.ready(lambda: None)
    world.complete(3)
    assert world.operator.ready(lambda: None)


def test_a_row_is_called_again_after_a_pause_that_grows_and_then_fails_the_job() -> None:
    world = Async(CallLimits(retries=2))
    world.process(rows(7, 8))
    world.complete(8)
    for pause_ms in (100, 200):
        began_ms = world.clock.ms
        world.fail(7)
        assert world.under_way == {}
        world.advance_clock(began_ms + pause_ms - 1)
        assert world.under_way == {}
        world.advance_clock(began_ms + pause_ms)
        assert list(world.under_way.values()) == [7]
        [work] = world.calls.begun.values()
        assert work.args[-1]["tags"] == ["new"]  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"'lookup': the function raised OSError for the row .*7.*: no answer") as raised:
        world.fail(7)
    assert isinstance(raised.value.__cause__, OSError) and raised.value.row == 0
    assert world.results == []


@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_that_takes_too_long_is_cancelled_and_what_it_returns_later_is_ignored(ordered: bool) -> None:
    world = Async(CallLimits(timeout_s=5, retries=1, ordered=ordered), ErrorPolicy("side_output", schema=GIVEN))
    world.process(rows(1))
    began_ms = world.clock.ms
    world.advance_clock(began_ms + 3_000)
    world.process(rows(2))
    world.advance_clock(began_ms + 5_000)
    [first] = world.calls.cancelled
    late = world.calls.begun.pop(first)
    world.advance_clock(began_ms + 6_000)
    assert sorted(world.under_way.values()) == [1, 2]
    world.calls.completed([(first, Done(late()))])
    assert world.results == []
    world.complete(2)
    world.advance_clock(began_ms + 20_000)
    [failed] = world.out.rows(FAILED)
    assert failed["row"]["n"] == 1 and failed["error_type"] == "TimeoutError"
    assert "longer than its timeout of 5 s" in failed["error"] and failed["function"] == "twice"
    assert world.results == [2] and world.operator.failed_rows == 1
    assert not world.operator.awaits_work


def test_rows_in_flight_are_called_again_after_a_restore() -> None:
    limits = CallLimits(capacity=3)
    world = Async(limits)
    world.advance(5)
    world.process(rows(1, 2))
    world.advance(10)
    world.process(rows(3, 4, 5))
    world.complete(1, 3)
    assert world.results == [1]
    after = world.restored(limits, watermark_us=10)
    assert after.out.watermarks == [] and after.results == []
    assert sorted(after.under_way.values()) == [2, 3, 4]
    after.advance(10)  # as the task does, since it has not left
    after.complete(3, 4)
    assert after.results == []
    after.complete(2)
    after.complete(5)
    assert after.results == [2, 3, 4, 5]
    assert after.out.watermarks[0] == 10
    assert after.snapshot() == {}


def test_rows_after_a_restore_have_the_watermark_before_them_in_the_next_checkpoint() -> None:
    limits = CallLimits(capacity=3)
    world = Async(limits)
    world.advance(5)
    world.process(rows(1))
    world.complete(1)
    after = world.restored(limits, watermark_us=5)  # nothing was in flight, and the watermark has left
    after.process(rows(2))
    (chunk,) = after.snapshot()[IN_FLIGHT].chunks
    assert chunk.table.column("watermark_us").to_pylist() == [5]


def test_no_row_of_another_subtask_brings_a_watermark_that_this_one_was_not_offered() -> None:
    first, second = Async(), Async()
    first.advance(20)
    first.process(rows(1))
    second.advance(10)
    second.process(rows(2))
    chunks = tuple(world.snapshot()[IN_FLIGHT].chunks[0] for world in (first, second))
    after = Async(parts={IN_FLIGHT: StatePart(Redistribute.SPLIT, chunks)}, watermark_us=10)
    after.complete(2, 1)
    assert after.out.watermarks == []
    assert after.results == [2, 1]


def test_a_result_that_does_not_fit_is_not_repaired_by_another_call() -> None:
    world = Async()
    world.process(rows(1))
    [number] = world.calls.begun
    with pytest.raises(JobError, match=r"the result for the row .* has no column 'twice'"):
        world.calls.completed([(number, Done({"n": 1}))])
    world = Async(CallLimits(ordered=False), ErrorPolicy("drop"))
    world.process(rows(1, 2))
    world.calls.completed([(1, Done(None))])
    world.complete(2)
    assert world.results == [2] and world.operator.failed_rows == 1


@given(data=st.data(), ordered=st.booleans(), capacity=st.integers(1, 5), drops=st.booleans())
def test_each_row_once_in_its_order_between_its_watermarks_through_failures_and_restores(
    data: st.DataObject, ordered: bool, capacity: int, drops: bool
) -> None:
    limits = CallLimits(capacity=capacity, retries=1, ordered=ordered)
    policy = ErrorPolicy("drop") if drops else FAIL
    world = Async(limits, policy)
    events: list[tuple[str, int]] = []
    n = watermark_us = 0
    bad: set[int] = set()
    came: list[tuple[str, int]] = []

    def collect() -> None:
        events.extend(("row", each) for each in world.results)
        world.out.clear()

    class Events:
        """Keeps results and watermarks in the order in which they are emitted."""

        def watermark(self, watermark_us: int) -> None:
            collect()
            events.append(("watermark", watermark_us))

    world.out.watermark = Events().watermark  # type: ignore[method-assign]
    for action in data.draw(
        st.lists(st.sampled_from(["rows", "watermark", "complete", "fail", "restore"]), max_size=40)
    ):
        if action == "rows" and world.operator.ready(lambda: None):
            count = data.draw(st.integers(1, 7))
            new = list(range(n, n + count))
            n += count
            bad |= {each for each in new if drops and data.draw(st.booleans())}
            came += [("row", each) for each in new]
            world.process(rows(*new))
        elif action == "watermark":
            watermark_us += 1
            came.append(("watermark", watermark_us))
            world.advance(watermark_us)
        elif action in ("complete", "fail") and world.under_way:
            some = data.draw(st.lists(st.sampled_from(sorted(world.under_way.values())), min_size=1, unique=True))
            if action == "fail":
                world.fail(*some)
                world.advance_clock(world.clock.ms + 150)
            else:
                world.complete(*[each for each in some if each not in bad])
        elif action == "restore":
            collect()
            left = max((at for kind, at in events if kind == "watermark"), default=0)
            world = world.restored(limits, policy, watermark_us or MIN_WATERMARK_US)
            world.out.watermark = Events().watermark  # type: ignore[method-assign]
            if watermark_us > left:
                world.advance(watermark_us)
        if not drops and action == "fail":
            break  # the second failure of a row fails the job, which another test is about
        assert world.operator.awaits_work or not world.under_way
        in_flight = len(world.under_way)
        assert in_flight <= capacity
    for _ in range(1_000):
        if not world.operator.awaits_work:
            break
        world.complete(*[each for each in world.under_way.values() if each not in bad])
        failing = [each for each in world.under_way.values() if each in bad]
        if failing:
            world.fail(*failing)
        world.advance_clock(world.clock.ms + 150)
    collect()
    emitted = [each for kind, each in events if kind == "row"]
    expected = [each for kind, each in came if kind == "row" and each not in bad]
    failed = {each for kind, each in came if kind == "row"} - set(emitted)
    assert Counter(emitted) == Counter(set(emitted)), "no row twice"
    assert set(expected) <= set(emitted) | failed
    if not drops:
        assert sorted(emitted) == expected
    if ordered:
        assert emitted == sorted(emitted)
    for position, (kind, at) in enumerate(events):
        if kind == "watermark":
            before = {each for k, each in events[:position] if k == "row"}
            must = came[: came.index(("watermark", at))]
            assert {each for k, each in must if k == "row"} - failed <= before, "a watermark has overtaken a row"
    reached = [at for kind, at in events if kind == "watermark"]
    assert max(reached, default=0) == watermark_us
    for kind, at in came:
        if kind == "watermark" and at in reached and not ordered:
            later = {each for k, each in came[came.index((kind, at)) :] if k == "row"}
            earlier = {each for k, each in events[: events.index((kind, at))] if k == "row"}
            assert not later & earlier, "a row has overtaken a watermark"


def test_arguments_that_make_no_sense_are_refused() -> None:
    for wrong in ((0, "5 s", 3, True), (True, "5 s", 3, True), (1, 0, 3, True), (1, "5 s", -1, True), (1, "5 s", 0, 1)):
        with pytest.raises(ConfigError, match="map_async"):
            call_limits(*wrong)
