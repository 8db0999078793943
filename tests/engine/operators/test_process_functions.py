"""Process functions: states, timers, side outputs, snapshots in between, errors."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, deal_out

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.key_groups import key_group_range, key_groups, subtask_of
from midstream.engine.operators.functions import process_operator as machine
from midstream.engine.operators.functions.function_operator import two_ports
from midstream.engine.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedProcessFunction,
)
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.state.keyed_states import BroadcastState, ListState, MapState, ReducingState, ValueState
from process_operators import broadcast_process_operator, process_operator

IN = schema_of([("k", pa.large_string()), ("t", pa.timestamp("ms")), ("v", pa.int64())])
OUT = schema_of([("k", pa.large_string()), ("what", pa.large_string()), ("n", pa.int64())])
EPOCH = datetime(1970, 1, 1)
MAX_PARALLELISM = 8


def batch(*rows: tuple[str, int, int | None]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(list(values), field.type) for values, field in zip(columns, IN, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=IN)


def operator_of(function: KeyedProcessFunction, **options: Any) -> Any:
    arguments: dict[str, Any] = {"keys": ["k"], "event_time": "t", "input_schema": IN, "schema": OUT} | options
    return process_operator("visits", function, **arguments)


class Everything(KeyedProcessFunction):
    """Uses every kind of state and both kinds of timer change."""

    count = ValueState(type=pa.int64(), default=0)
    boxes: ValueState[list[int]] = ValueState(default=[])
    seen: ListState[int] = ListState(type=pa.int64())
    pages: MapState[int, list[int]] = MapState()
    total: ReducingState[int] = ReducingState(lambda a, b: a + b)

    def process(self, row: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        value = row["v"]
        self.count.value += 1
        self.boxes.value.append(value)  # in place
        self.seen.append(value)
        if value % 3 == 0:
            self.pages.setdefault(value % 2, []).append(value)
        self.total.add(value)
        if value == 5:
            self.pages.pop(0, None)
        if value == 7:
            self.count.clear()
            self.seen.clear()
        due = ctx.timestamp + timedelta(milliseconds=10)
        ctx.timers.event_time(due)
        ctx.timers.event_time(due)
        if value == 8:
            ctx.timers.delete_event_time(due)
        yield {"k": ctx.key, "what": "row", "n": self.total.value}

    def on_timer(self, time: datetime, ctx: Any) -> list[dict[str, Any]]:
        summary = f"{self.count.value} {self.boxes.value} {list(self.seen)} {sorted(self.pages.items())}"
        self.boxes.value = self.boxes.value[-3:]
        return [{"k": ctx.key, "what": summary, "n": (time - EPOCH) // timedelta(milliseconds=1)}]


class EverythingInPython:
    """The same without an engine."""

    def __init__(self) -> None:
        self.count: dict[str, int] = defaultdict(int)
        self.boxes: dict[str, list[int]] = defaultdict(list)
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.pages: dict[str, dict[int, list[int]]] = defaultdict(dict)
        self.total: dict[str, int] = defaultdict(int)
        self.timers: dict[str, set[int]] = defaultdict(set)
        self.out: list[tuple[str, str, int]] = []

    def process(self, key: str, time: int, value: int) -> None:
        self.count[key] += 1
        self.boxes[key].append(value)
        self.seen[key].append(value)
        if value % 3 == 0:
            self.pages[key].setdefault(value % 2, []).append(value)
        self.total[key] += value
        if value == 5:
            self.pages[key].pop(0, None)
        if value == 7:
            self.count[key] = 0
            self.seen[key] = []
        self.timers[key].add(time + 10)
        if value == 8:
            self.timers[key].discard(time + 10)
        self.out.append((key, "row", self.total[key]))

    def advance(self, watermark: int) -> None:
        for key, timers in self.timers.items():
            for time in sorted(time for time in timers if time <= watermark):
                timers.discard(time)
                summary = f"{self.count[key]} {self.boxes[key]} {self.seen[key]} {sorted(self.pages[key].items())}"
                self.boxes[key] = self.boxes[key][-3:]
                self.out.append((key, summary, time))


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("rows"),
            st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-30, 60), st.integers(0, 9)), max_size=8),
        ),
        st.tuples(st.just("watermark"), st.integers(-30, 90)),
        st.tuples(st.just("snapshot"), st.none()),
        st.tuples(st.just("rescale"), st.integers(1, 4)),
        st.tuples(st.just("interrupt"), st.tuples(st.integers(-30, 90), st.integers(1, 4))),
    ),
    max_size=12,
)


@settings(max_examples=examples(120))
@given(steps)
def test_states_and_timers_equal_plain_python_through_snapshots_and_rescales(plan: list[tuple[str, Any]]) -> None:
    expected = EverythingInPython()
    worlds = [World(operator_of(Everything()), max_parallelism=MAX_PARALLELISM)]
    pending: list[tuple[Any, dict[str, pa.Table]]] = []
    out: list[dict[str, Any]] = []

    def rescale(parallelism: int) -> None:
        snapshots = [world.snapshot() for world in worlds]
        for world in worlds:
            out.extend(world.out.rows())
        worlds[:] = [
            World(
                operator_of(Everything()),
                subtask=subtask,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                parts=deal_out(snapshots, key_group_range(subtask, parallelism, MAX_PARALLELISM)),
            )
            for subtask in range(parallelism)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "TIMERS_PER_SLICE", 2)
        for step, argument in [*plan, ("watermark", 10**6)]:
            match step:
                case "rows":
                    for row in argument:
                        expected.process(*row)
                    rows = batch(*argument)
                    owners = subtask_of(key_groups(rows, ("k",), MAX_PARALLELISM), len(worlds), MAX_PARALLELISM)
                    for subtask, world in enumerate(worlds):
                        world.process(rows.filter(pa.array(owners == subtask)))
                case "watermark":
                    expected.advance(argument)
                    for world in worlds:
                        world.advance(argument * 1000)
                case "snapshot":
                    # completed only after all later changes: it must still be that of now
                    for world in worlds:
                        snapshot = world.operator.snapshot(1)
                        now = {name: part.table() for name, part in snapshot.complete().parts.items()}
                        pending.append((snapshot, now))
                case "rescale":
                    rescale(argument)
                case "interrupt":
                    watermark, parallelism = argument
                    expected.advance(watermark)
                    for world in worlds:
                        world.operator.advance_watermark(watermark * 1000)
                    rescale(parallelism)
                    for world in worlds:
                        world.advance(watermark * 1000)
    for world in worlds:
        out.extend(world.out.rows())
    assert Counter((row["k"], row["what"], row["n"]) for row in out) == Counter(expected.out)
    for snapshot, now in pending:
        later = {name: part.table() for name, part in snapshot.complete().parts.items()}
        assert later == now


class Alarms(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> None:
        at = ctx.now + timedelta(milliseconds=row["v"])
        ctx.timers.processing_time(at)
        if row["v"] == 3:
            ctx.timers.delete_processing_time(at)

    def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
        return {"k": ctx.key, "what": "alarm", "n": (ctx.now - EPOCH) // timedelta(milliseconds=1)}


def test_processing_time_timers_fire_when_the_clock_gets_there_and_survive_a_restore() -> None:
    world = World(operator_of(Alarms()))
    world.process(batch(("a", 0, 20), ("b", 0, 10), ("b", 0, 10), ("a", 0, 3)))
    world.advance_clock(1_000_009)
    assert world.out.rows() == []
    world.advance_clock(1_000_010)
    assert [(row["k"], row["n"]) for row in world.out.rows()] == [("b", 1_000_010)]
    restored = World(operator_of(Alarms()), parts=world.snapshot())
    restored.advance_clock(1_000_050)
    assert [(row["k"], row["n"]) for row in restored.out.rows()] == [("a", 1_000_020)]


class Rings(KeyedProcessFunction):
    """A timer of each kind; each of processing time sets one of both, until `limit` have fired for the key."""

    fired = ValueState(default=0)

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        ctx.timers.processing_time(row["v"])
        ctx.timers.event_time(row["v"])

    def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
        at = (time - EPOCH) // timedelta(microseconds=1)
        self.fired.value += 1
        if self.fired.value < self.limit:
            ctx.timers.processing_time(at + 7)
        return {"k": ctx.key, "what": str(ctx.watermark.year), "n": at}


def test_processing_time_timers_fire_at_the_end_of_the_input_in_order_of_time_after_those_of_event_time() -> None:
    far = 10**17
    world = World(operator_of(Rings(limit=0)))
    world.process(batch(("a", 0, far), ("b", 0, far - 1)))
    world.advance(5)
    assert world.out.rows() == []
    world.advance(MAX_WATERMARK_US)
    assert [(row["k"], row["n"]) for row in world.out.rows()] == [("b", far - 1), ("a", far)] * 2
    assert {row["what"] for row in world.out.rows()} == {"9999"}
    world.advance_clock(10**15)
    assert len(world.out.rows()) == 4, "they have fired"
    assert world.operator.timers_dropped == 0
    assert not world.snapshot().keys() & {"timers:processing", "timers:event"}


def test_a_timer_that_sets_itself_again_does_not_keep_the_input_from_ending() -> None:
    world = World(operator_of(Rings()))
    world.process(batch(("a", 0, 100), ("b", 0, 200)))
    world.advance(MAX_WATERMARK_US)
    # event time first; what it sets for processing time is set before the end of that
    assert [(row["k"], row["n"]) for row in world.out.rows()] == [
        *(("a", 100), ("b", 200)),
        *(("a", 100), ("a", 107), ("b", 200), ("b", 207)),
    ]
    assert world.operator.timers_dropped == 2, "114 of a and 214 of b; 107 and 207 were set already"


def test_a_timer_of_event_time_that_the_last_ones_set_fires() -> None:
    class Forth(KeyedProcessFunction):
        def process(self, row: dict[str, Any], ctx: Any) -> None:
            ctx.timers.processing_time(10)

        def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
            at = (time - EPOCH) // timedelta(microseconds=1)
            if at == 10:
                ctx.timers.event_time(20)
            return {"k": ctx.key, "what": "", "n": at}

    world = World(operator_of(Forth()))
    world.process(batch(("a", 0, 1)))
    world.advance(MAX_WATERMARK_US)
    assert [row["n"] for row in world.out.rows()] == [10, 20]


def test_the_last_timers_fire_in_slices_and_a_checkpoint_between_them_holds_the_others() -> None:
    world = World(operator_of(Alarms()))
    world.process(batch(*[("a", 0, 100 + i) for i in range(1000)]))
    world.clock.step_s = 0.004
    for _ in range(10):
        assert not world.operator.advance_watermark(MAX_WATERMARK_US)
    before = len(world.out.rows())
    assert 0 < before < 1000
    restored = World(operator_of(Alarms()), parts=world.snapshot())
    restored.advance(MAX_WATERMARK_US)
    assert before + len(restored.out.rows()) == 1000


@dataclass
class Replaces(KeyedProcessFunction):
    total: ValueState[int] = ValueState(pa.int64())  # noqa: RUF009

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        self.total = row["v"]


def test_a_value_in_the_place_of_its_state_is_refused_for_no_checkpoint_would_have_it() -> None:
    world = World(operator_of(Replaces()))
    with pytest.raises(
        JobError, match=r"'total' of Replaces is a ValueState, which cannot be replaced.*total\.value ="
    ):
        world.process(batch(("a", 0, 1)))


class Chained(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> None:
        ctx.timers.event_time(row["v"])

    def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
        at = (time - EPOCH) // timedelta(microseconds=1)
        if at < 5:
            ctx.timers.event_time(at + 1)
        return {"k": ctx.key, "what": str(ctx.watermark), "n": at}


def test_a_timer_set_by_a_timer_fires_with_the_same_watermark_in_order_of_time() -> None:
    world = World(operator_of(Chained()))
    world.process(batch(("a", 0, 3), ("b", 0, 4), ("c", 0, 50)))
    world.advance(10)
    assert [row["n"] for row in world.out.rows()] == [3, 4, 4, 5, 5]
    world.advance(MAX_WATERMARK_US)
    assert world.out.rows()[-1] == {"k": "c", "what": str(datetime.max), "n": 50}


def test_many_due_timers_fire_in_slices() -> None:
    world = World(operator_of(Chained()))
    world.process(batch(*[("a", 0, 100 + i) for i in range(1000)]))
    world.clock.step_s = 0.004
    assert world.advance(10_000) > 100
    assert [row["n"] for row in world.out.rows()] == list(range(100, 1100))


def test_times_of_a_stream_with_a_zone_are_aware_and_an_hour_is_an_hour_when_summer_time_begins() -> None:
    zoned = schema_of([("k", pa.large_string()), ("t", pa.timestamp("us", "Europe/Berlin")), ("v", pa.int64())])

    class InAnHour(KeyedProcessFunction):
        def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
            assert row["t"] == ctx.timestamp
            ctx.timers.event_time(ctx.timestamp + timedelta(hours=1))
            return {"k": ctx.key, "what": "row", "n": 0}

        def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
            return {"k": ctx.key, "what": time.astimezone(UTC).isoformat(), "n": 1}

    before = datetime(2024, 3, 31, 0, 30, tzinfo=UTC)  # half an hour before the clocks change
    world = World(operator_of(InAnHour(), input_schema=zoned))
    world.process(pa.RecordBatch.from_pylist([{"k": "a", "t": before, "v": 1}], schema=zoned))
    world.advance(MAX_WATERMARK_US)
    assert world.out.rows()[1]["what"] == "2024-03-31T01:30:00+00:00"


# ---- two inputs ----

RIGHT = schema_of([("id", pa.large_string()), ("t", pa.timestamp("us")), ("name", pa.large_string())])


class Join(CoProcessFunction):
    name: ValueState[str | None] = ValueState(pa.large_string())
    waiting: ListState[int] = ListState(pa.int64())

    def process1(self, row: dict[str, Any], ctx: Any) -> Any:
        if self.name.value is None:
            self.waiting.append(row["v"])
            return None
        return {"k": ctx.key, "what": self.name.value, "n": row["v"]}

    def process2(self, row: dict[str, Any], ctx: Any) -> Any:
        self.name.value = row["name"]
        for value in self.waiting:
            yield {"k": ctx.key, "what": row["name"], "n": value}
        self.waiting.clear()


def join() -> Any:
    return ProcessOperator("join", Join(), two_ports((["k"], ["id"]), ("t", "t"), (IN, RIGHT)), OUT, {})


def test_two_keyed_inputs_share_the_states_of_a_key() -> None:
    world = World(join())
    world.process(batch(("a", 0, 1), ("b", 0, 2)), 0)
    world = World(join(), parts=world.snapshot())
    world.process(pa.RecordBatch.from_pylist([{"id": "a", "t": EPOCH, "name": "Ada"}], schema=RIGHT), 1)
    world.process(batch(("a", 0, 3), ("b", 0, 4)), 0)
    assert [(row["k"], row["what"], row["n"]) for row in world.out.rows()] == [("a", "Ada", 1), ("a", "Ada", 3)]


def test_inputs_keyed_by_different_types_are_refused() -> None:
    with pytest.raises(SchemaError, match="same types"):
        ProcessOperator("join", Join(), two_ports((["k"], ["t"]), ("t", "t"), (IN, RIGHT)), OUT, {})


class Enrich(BroadcastProcessFunction):
    names: BroadcastState[str, str] = BroadcastState()
    count = ValueState(pa.int64(), default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        self.count.value += 1
        return {"k": ctx.key, "what": self.names.get(row["k"], "?"), "n": self.count.value}

    def process_broadcast(self, row: dict[str, Any], ctx: Any) -> None:
        self.names[row["id"]] = row["name"]


def enrich(function: Any) -> Any:
    return broadcast_process_operator(
        "enrich", function, keys=["k"], event_times=("t", None), input_schemas=(IN, RIGHT), schema=OUT
    )


def test_broadcast_state_is_the_same_everywhere_after_a_rescale() -> None:
    names = pa.RecordBatch.from_pylist([{"id": key, "t": EPOCH, "name": key.upper()} for key in "abcde"], schema=RIGHT)
    worlds = [World(enrich(Enrich()), subtask=i, parallelism=2, max_parallelism=MAX_PARALLELISM) for i in range(2)]
    for world in worlds:
        world.process(names, 1)
    snapshots = [world.snapshot() for world in worlds]
    for subtask in range(3):
        parts = deal_out(snapshots, key_group_range(subtask, 3, MAX_PARALLELISM))
        world = World(enrich(Enrich()), subtask=subtask, parallelism=3, max_parallelism=MAX_PARALLELISM, parts=parts)
        world.process(batch(("a", 0, 1), ("e", 0, 1), ("z", 0, 1)), 0)
        assert [row["what"] for row in world.out.rows()] == ["A", "E", "?"]


def test_broadcast_state_cannot_be_written_for_a_row_of_the_other_stream() -> None:
    class Wrong(Enrich):
        def process(self, row: dict[str, Any], ctx: Any) -> Any:
            self.names["x"] = "y"

    with pytest.raises(JobError, match="can only be changed in process_broadcast"):
        World(enrich(Wrong())).process(batch(("a", 0, 1)), 0)


def test_keyed_state_cannot_be_used_for_a_row_of_the_broadcast_stream() -> None:
    class Wrong(Enrich):
        def process_broadcast(self, row: dict[str, Any], ctx: Any) -> None:
            self.count.value = 1

    rows = pa.RecordBatch.from_pylist([{"id": "a", "t": EPOCH, "name": "A"}], schema=RIGHT)
    with pytest.raises(JobError, match="no current key"):
        World(enrich(Wrong())).process(rows, 1)


# ---- side outputs and errors ----


class Sides(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> None:
        ctx.side_output("odd" if row["v"] % 2 else "even", {"v": row["v"]})


def test_side_outputs_carry_their_tag_and_their_schema() -> None:
    side = pa.schema([("v", pa.int64())])
    world = World(operator_of(Sides(), side_outputs={"odd": side, "even": side}))
    world.process(batch(("a", 0, 1), ("a", 0, 2), ("a", 0, 3)))
    assert world.out.rows("odd") == [{"v": 1}, {"v": 3}]
    assert world.out.rows("even") == [{"v": 2}]
    with pytest.raises(JobError, match="'even' is not declared"):
        World(operator_of(Sides(), side_outputs={"odd": side})).process(batch(("a", 0, 2)))


class SameDict(KeyedProcessFunction):
    """Continues with the dicts that it has handed out: its state's own, and one that it fills again and again."""

    sums = ValueState()

    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        found = self.sums.value
        if found is None:
            found = self.sums.value = {"k": ctx.key, "what": "sum", "n": 0}
        found["n"] += row["v"]
        ctx.side_output("side", found)
        return found if row["v"] < 10 else self.twice(found)

    def twice(self, found: dict[str, Any]) -> Any:
        for _ in range(2):
            found["n"] += 1
            yield found


def test_a_row_is_taken_as_it_was_when_it_was_returned() -> None:
    world = World(operator_of(SameDict(), side_outputs={"side": OUT}))
    world.process(batch(("a", 0, 1), ("a", 0, 2), ("a", 0, 10)))
    assert [row["n"] for row in world.out.rows()] == [1, 3, 14, 15]
    assert [row["n"] for row in world.out.rows("side")] == [1, 3, 13]


class Fails(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        if row["v"] == 13:
            raise ValueError("unlucky")
        return [{"k": ctx.key, "what": "ok", "n": 1}] if row["v"] != 4 else 4


def test_an_error_names_operator_method_key_and_row_and_keeps_the_users_traceback() -> None:
    world = World(operator_of(Fails()))
    with pytest.raises(
        JobError,
        match=r"operator 'visits': process \(key 'b'\) raised ValueError for the row {'k': 'b', .*'v': 13}: unlucky",
    ) as e:
        world.process(batch(("a", 0, 1), ("b", 0, 13)))
    text = "".join(traceback.format_exception(e.value))
    assert text.index("raise ValueError") < text.index("JobError")
    with pytest.raises(JobError, match="returned an int; return a dict"):
        world.process(batch(("a", 0, 4)))


def test_null_keys_and_null_times_are_refused_with_their_row() -> None:
    world = World(operator_of(Everything()))
    with pytest.raises(JobError, match=r"key 'k' is null in the row {'k': None, "):
        world.process(batch(("a", 0, 1), (None, 0, 1)))  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"event-time column 't' is null in the row {'k': 'a', 't': None, 'v': 1}"):
        world.process(batch(("a", 0, 1), ("a", None, 1)))  # type: ignore[arg-type]


def test_a_state_without_a_key_and_a_removed_state_are_refused() -> None:
    with pytest.raises(JobError, match=r"'count' needs a key"):
        operator_of(Everything(), keys=[])
    world = World(operator_of(Everything()))
    world.process(batch(("a", 0, 1)))
    with pytest.raises(JobError, match="value state 'count', which Fails does not declare"):
        World(operator_of(Fails()), parts=world.snapshot())


def test_a_value_that_does_not_fit_its_state_is_refused_where_it_is_given() -> None:
    class Wrong(KeyedProcessFunction):
        number = ValueState(pa.int64())

        def process(self, row: dict[str, Any], ctx: Any) -> None:
            self.number.value = row["v"] * 1.5

    message = (
        r"operator 'visits': process \(key 'a'\) raised JobError for the row {'k': 'a', 't': .*, 'v': 1}: "
        r"ValueState 'number': 1.5, declared as int64: a float is not an integer; round it, or declare a float"
    )
    with pytest.raises(JobError, match=message):
        World(operator_of(Wrong())).process(batch(("a", 0, 1)))


def test_a_value_that_was_changed_in_place_is_refused_by_the_checkpoint() -> None:
    class Wrong(KeyedProcessFunction):
        numbers = ValueState(pa.list_(pa.int64()), default=[])

        def process(self, row: dict[str, Any], ctx: Any) -> None:
            self.numbers.value.append("seven")

    world = World(operator_of(Wrong()))
    world.process(batch(("a", 0, 1)))
    with pytest.raises(JobError, match=r"a value of state 'numbers': at \[0\]: 'seven', declared as int64"):
        world.snapshot()


def test_composite_keys_of_all_types_come_back() -> None:
    schema = schema_of([("d", pa.date32()), ("b", pa.large_binary()), ("u", pa.uint8()), ("t", pa.timestamp("ms"))])

    class Count(KeyedProcessFunction):
        n = ValueState(pa.int64(), default=0)

        def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
            self.n.value += 1
            return {"k": str(ctx.key[2]), "what": str(ctx.key[0]), "n": self.n.value}

    rows = pa.RecordBatch.from_pylist(
        [{"d": datetime(2020, 1, d).date(), "b": b"x", "u": u, "t": EPOCH} for d in (1, 2) for u in (1, 2)],
        schema=schema,
    )

    def counting() -> Any:
        return operator_of(Count(), keys=["d", "b", "u"], input_schema=schema)

    world = World(counting())
    world.process(rows)
    restored = World(counting(), parts=world.snapshot())
    restored.process(rows)
    assert [row["n"] for row in restored.out.rows()] == [2, 2, 2, 2]


def test_an_error_in_close_is_reported_but_does_not_take_the_place_of_an_earlier_one() -> None:
    class Half(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            raise OSError("no database")

        def close(self) -> None:
            self.connection.close()  # type: ignore[attr-defined]

    operator = operator_of(Half())
    with pytest.raises(JobError, match="operator 'visits': open raised OSError: no database"):
        World(operator)

    class Closing(KeyedProcessFunction):
        def close(self) -> None:
            raise OSError("too late")

    world = World(operator_of(Closing()))
    world.operator.close()
    world.operator.close()
    assert [str(error) for error in world.failures] == ["operator 'visits': close raised OSError: too late"]


def test_a_list_of_a_state_in_a_row_is_taken_as_it_is_then() -> None:
    out = pa.schema([("k", pa.large_string()), ("seen", pa.list_(pa.int64()))])

    class Growing(KeyedProcessFunction):
        seen = ValueState(pa.list_(pa.int64()), default=[])

        def process(self, row: dict[str, Any], ctx: Any) -> Any:
            self.seen.value.append(row["v"])
            made = {"k": row["k"], "seen": self.seen.value}
            ctx.side_output("same", made)
            return made if row["v"] % 2 else [made]

    world = World(operator_of(Growing(), schema=out, side_outputs={"same": out}))
    world.process(batch(("a", 0, 1), ("a", 0, 2), ("a", 0, 3)))
    expected = [{"k": "a", "seen": [*range(1, n + 1)]} for n in (1, 2, 3)]
    assert world.out.rows() == expected
    assert world.out.rows("same") == expected


def test_an_error_in_a_row_of_a_timer_or_of_a_side_output_names_it() -> None:
    class Wrong(KeyedProcessFunction):
        def process(self, row: dict[str, Any], ctx: Any) -> None:
            if row["v"] == 1:
                ctx.side_output("aside", {"k": 5})
            ctx.timers.event_time(row["t"])

        def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
            return {"k": ctx.key, "what": "timer", "n": 1.5}

    world = World(operator_of(Wrong(), side_outputs={"aside": pa.schema([("k", pa.large_string())])}))
    with pytest.raises(JobError, match=r"side output 'aside': row 0 of those emitted for this batch: column 'k': 5"):
        world.process(batch(("a", 0, 1)))
    world = World(operator_of(Wrong()))
    world.process(batch(("a", 7, 2)))
    with pytest.raises(JobError, match=r"the result for the timer of 1970-.*: column 'n': 1.5, declared as int64"):
        world.advance(MAX_WATERMARK_US)
