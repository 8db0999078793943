"""Rows for which a process function fails: nothing that it did for them is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import JobError
from midstream.engine.operators.bad_records import TALLY
from midstream.engine.operators.failed_rows import FAIL, FAILED, ErrorPolicy
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.state.keyed_states import ListState, MapState, ReducingState, ValueState

SCHEMA = schema_of([("k", pa.int64()), ("n", pa.int64()), ("at", pa.timestamp("us"))])
OUT = schema_of([("k", pa.int64()), ("seen", pa.int64())])


class Everything(KeyedProcessFunction):
    """Changes all of its states and timers, and then fails for some rows."""

    value = ValueState(int, default=0)
    things = ValueState(default=[])
    highest = ReducingState(max, int)
    together = ReducingState(lambda one, other: one + other)
    numbers = ListState(int)
    lists = ListState()
    counts = MapState(key=int, value=int)
    nested = MapState()

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        n = row["n"]
        yield {"k": ctx.key, "seen": self.value.value}
        ctx.side_output("side", {"k": ctx.key, "seen": n})
        self.value.value += 1
        self.things.value.append(n)
        self.highest.add(n)
        self.together.add([n])
        self.numbers.append(n)
        self.lists.append([n])
        for one in self.lists:
            one.append(n)
        self.counts[n] = self.counts.get(n, 0) + 1
        self.nested.setdefault(n % 3, []).append(n)
        if n % 5 == 0:
            self.nested.clear()
            self.things.clear()
            self.numbers.set([])
        if n % 4 == 0 and 1 in self.nested:
            del self.nested[1]
        ctx.timers.event_time(row["at"] + timedelta(seconds=n))
        ctx.timers.processing_time(row["at"] + timedelta(days=40_000, seconds=n))
        if n % 2:
            ctx.timers.delete_event_time(row["at"] + timedelta(seconds=n - 1))
            ctx.timers.delete_processing_time(row["at"] + timedelta(days=40_000, seconds=n - 1))
        if is_wrong(n) and n % 3 == 0:
            raise ValueError(n)
        if is_wrong(n) and n % 3 == 1:
            ctx.side_output("side", {"k": ctx.key, "seen": "text"})
        yield {"k": ctx.key, "seen": self.value.value + (0.5 if is_wrong(n) else 0)}

    def on_timer(self, time: Any, ctx: Any) -> dict[str, int]:
        self.value.value += 1000
        return {"k": ctx.key, "seen": self.value.value}


def is_wrong(n: int) -> bool:
    return n % 7 in (2, 3)


def operator(policy: ErrorPolicy = FAIL) -> ProcessOperator:
    return ProcessOperator("op", Everything(), [Port("process", ("k",), "at", SCHEMA)], OUT, {"side": OUT}, policy)


def apart(failed_max: tuple[int, int] | None = None) -> ProcessOperator:
    return operator(ErrorPolicy("side_output", failed_max, SCHEMA))


def batch_of(rows: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    found = [{"k": k, "n": n, "at": n * 1_000_000} for k, n in rows]
    return pa.RecordBatch.from_pylist(found, schema=SCHEMA)


def seen(world: World) -> Any:
    function: Any = world.operator
    event, processing = function.timers_set()
    return function.contents(), sorted(event, key=repr), sorted(processing, key=repr)


steps = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=8),
        st.just("restore"),
        st.integers(0, 20),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=examples(150))
@given(steps)
def test_what_fails_leaves_no_trace_in_states_timers_and_output(drawn: list[Any]) -> None:
    world, reference = World(apart()), World(operator())
    failed: list[tuple[int, int]] = []
    for step in drawn:
        if step == "restore":
            for each in (world, reference):
                each.out.clear()
            [world] = restored(apart, [world.snapshot()], 1, 16)
            [reference] = restored(operator, [reference.snapshot()], 1, 16)
            failed = []
        elif isinstance(step, int):
            for each in (world, reference):
                each.advance(step * 1_000_000)
        else:
            world.process(batch_of(step))
            good = [(k, n) for k, n in step if not is_wrong(n)]
            failed += [(k, n) for k, n in step if is_wrong(n)]
            if good:
                reference.process(batch_of(good))
        assert seen(world) == seen(reference)
        assert world.out.rows() == reference.out.rows()
        assert world.out.rows("side") == reference.out.rows("side")
        assert [(one["row"]["k"], one["row"]["n"]) for one in world.out.rows(FAILED)] == failed
    assert world.operator.failed_rows == len(failed)


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=20), st.lists(st.integers(0, 20), max_size=4)
)
def test_what_fails_does_not_depend_on_cuts(rows: list[tuple[int, int]], cuts: list[int]) -> None:
    ends = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    whole, cut = World(apart()), World(apart())
    whole.process(batch_of(rows))
    for first, end in pairwise(ends):
        cut.process(batch_of(rows[first:end]))
    assert seen(whole) == seen(cut)
    assert [whole.out.rows(tag) for tag in (None, "side", FAILED)] == [
        cut.out.rows(tag) for tag in (None, "side", FAILED)
    ]


def test_the_count_of_failed_rows_is_in_the_state() -> None:
    world = World(apart((1, 10)))
    world.process(batch_of([(0, 1), (0, 2)]))
    parts = world.snapshot()
    assert parts[TALLY].table().to_pylist() == [{"records": 2, "bad": 1}]
    with pytest.raises(JobError, match=r"Everything.process.*|2 of the last 3 rows.*allows 1 of 10") as raised:
        World(apart((1, 10)), parts=parts).process(batch_of([(0, 3)]))
    assert raised.value.row == 0
    World(operator(), parts=parts)  # a job that does not count any more


def test_a_failure_of_a_timer_fails_the_job() -> None:
    class Late(KeyedProcessFunction):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.timers.event_time(row["at"])

        def on_timer(self, time: Any, ctx: Any) -> None:
            raise ValueError(time)

    policy = ErrorPolicy("drop", None, SCHEMA)
    world = World(ProcessOperator("op", Late(), [Port("process", ("k",), "at", SCHEMA)], OUT, {}, policy))
    world.process(batch_of([(0, 1)]))
    with pytest.raises(JobError, match="on_timer of 1970-01-01 00:00:01"):
        world.advance(1_000_000)


def test_a_function_has_no_access_to_the_side_output_of_failed_rows() -> None:
    class Emitting(KeyedProcessFunction):
        def process(self, row: Any, ctx: Any) -> None:
            ctx.side_output(FAILED, row)

    policy = ErrorPolicy("side_output", None, SCHEMA)
    world = World(ProcessOperator("op", Emitting(), [Port("process", ("k",), None, SCHEMA)], OUT, {}, policy))
    world.process(batch_of([(0, 1)]))
    [found] = world.out.rows(FAILED)
    assert found["error"] == "side output 'failed rows' is not declared (declared: none)"
    assert found["function"].endswith("Emitting.process")
