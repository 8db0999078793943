"""What a changed program makes of a checkpoint: state that it would read wrongly is refused, naming then and now."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from checkpoint_samples import MAX_PARALLELISM, SCHEMA, NoRows, metadata_of, pipeline
from midstream.engine.checkpoint.metadata import CheckpointMetadata, forms_of, settings_of
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.coordinator.checkpoints.metadata_builder import operator_states
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, CoBatchFunction
from midstream.engine.operators.functions.duplicates import drop_duplicates_operator
from midstream.engine.operators.functions.function_operator import Port, two_ports
from midstream.engine.operators.functions.process_functions import CoProcessFunction, KeyedProcessFunction
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.windows.aggregates import Count, Max, Sum
from midstream.engine.operators.windows.window_factory import session, sliding, tumbling, window_operator
from midstream.engine.protocol.messages import (
    ChannelState,
    CheckpointAck,
    ChunkHandle,
    OperatorSnapshot,
    PartHandle,
    Segment,
)
from midstream.engine.state.keyed_states import ListState, MapState, ValueState
from midstream.engine.state.table_state import TableState
from process_operators import process_operator

ROWS = schema_of([("at", pa.timestamp("us")), ("user", pa.string()), ("n", pa.int64()), ("m", pa.int64())])


class Remembers(KeyedProcessFunction):
    seen = ValueState(pa.int64())
    names = MapState(key=pa.int64(), value=pa.string())


class RemembersMore(KeyedProcessFunction):
    seen = ValueState(pa.int64())
    names = MapState(key=pa.int64(), value=pa.string())
    last = ListState()


class RemembersWider(KeyedProcessFunction):
    seen = ValueState(pa.float64(), migrate=float)
    names = MapState(key=pa.int64(), value=pa.string())


class RemembersText(KeyedProcessFunction):
    seen = ValueState(pa.string())
    names = MapState(key=pa.int64(), value=pa.string())


class RemembersPickles(KeyedProcessFunction):
    seen = ValueState()
    names = MapState(key=pa.int64(), value=pa.string())


class RemembersNoNames(KeyedProcessFunction):
    seen = ValueState(pa.int64())


class RemembersOtherKeys(KeyedProcessFunction):
    seen = ValueState(pa.int64())
    names = MapState(value=pa.string())


def windows(
    window: Any = None, keys: tuple[str, ...] = ("user",), schema: pa.Schema = ROWS, **aggregates: Any
) -> Operator:
    return window_operator(
        "visits",
        window=window or tumbling("1 h"),
        keys=keys,
        event_time="at",
        aggregates=aggregates or {"total": Sum("n")},
        schema=schema,
    )


def process(function: KeyedProcessFunction, keys: tuple[str, ...] = ("user",), schema: pa.Schema = ROWS) -> Operator:
    return process_operator("visits", function, keys=keys, event_time=None, input_schema=schema, schema=ROWS)


class RemembersBoth(CoProcessFunction):
    seen = ValueState(pa.int64())


def joined(second: tuple[str, ...]) -> Operator:
    return ProcessOperator("visits", RemembersBoth(), two_ports((("n",), second), (None, None), (ROWS, ROWS)), ROWS, {})


def joined_in_tables(second: tuple[str, ...]) -> Operator:
    ports = two_ports((("n", "m"), second), ("at", "at"), (ROWS, ROWS))
    return BatchFunctionOperator("visits", RemembersTables(), ports, ROWS)


class RemembersTables(CoBatchFunction):
    seen = TableState({"n": int, "m": int})


def graph_with(operator: Operator) -> JobGraph:
    return JobGraph(
        (
            Vertex(0, 2, SourceSpec("read", "Read", NoRows()), ()),
            Vertex(1, 2, None, (OperatorSpec("visits", "visits", operator),)),
        ),
        (Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("n",)),),
        MAX_PARALLELISM,
    )


def part(name: str) -> PartHandle:
    return PartHandle(name, "keyed", (ChunkHandle(f"c-{name}", "f", 0, 1, 0, 1, 0, 15),))


def checkpoint_with(operator: Operator, *parts: str) -> CheckpointMetadata:
    snapshots = (OperatorSnapshot("visits", tuple(part(name) for name in parts)), OperatorSnapshot("visits"))
    return metadata_of(
        graph_with(operator),
        {"visits": snapshots},
        settings={"visits": settings_of(operator)},
        forms={"visits": forms_of(operator)},
    )


OTHER_KEY = ROWS.set(1, pa.field("user", pa.int64()))


@pytest.mark.parametrize(
    ("before", "after", "what", "was", "now"),
    [
        (windows(), windows(tumbling("2 h")), "the window", "tumbling windows of 1 h", "tumbling windows of 2 h"),
        (
            windows(),
            windows(sliding("1 h", "5 min")),
            "the window",
            "tumbling windows of 1 h",
            "sliding windows of 1 h every 5 min",
        ),
        (
            windows(tumbling("1 d", offset="1500 ms")),
            windows(tumbling("1 d")),
            "the window",
            "tumbling windows of 1 d shifted by 1500 ms",
            "tumbling windows of 1 d",
        ),
        (
            windows(session("30 s")),
            windows(session("1 min")),
            "the window",
            "sessions with a gap of 30 s",
            "sessions with a gap of 1 min",
        ),
        (windows(), windows(keys=("n",)), "the key", "user large_string", "n int64"),
        (windows(), windows(schema=OTHER_KEY), "the key", "user large_string", "user int64"),
        (
            windows(rows=Count()),
            windows(rows=Count(), most=Max("n")),
            "the aggregates' state",
            "rows:n int64",
            "rows:n int64, most:max int64",
        ),
        (process(Remembers()), process(Remembers(), schema=OTHER_KEY), "the key", "user string", "user int64"),
        (
            process(Remembers(), keys=("n", "user")),
            process(Remembers(), keys=("m", "user")),
            "the key",
            "n int64, user string",
            "m int64, user string",
        ),
        (process(Remembers(), keys=("n",)), process(Remembers(), keys=("m",)), "the key", "n int64", "m int64"),
        (joined(("n",)), joined(("m",)), "the key of the second stream", "n int64", "m int64"),
        (
            joined_in_tables(("n", "m")),
            joined_in_tables(("m", "n")),
            "the key of the second stream",
            "n int64, m int64",
            "m int64, n int64",
        ),
        (process(Remembers()), process(RemembersText()), "value state 'seen'", "int64", "large_string"),
        (process(Remembers()), process(RemembersPickles()), "value state 'seen'", "int64", "pickled"),
        (
            process(Remembers()),
            process(RemembersOtherKeys()),
            "map state 'names'",
            "int64 to large_string",
            "pickled to large_string",
        ),
    ],
)
def test_other_settings_are_refused_naming_the_operator_then_and_now(before, after, what, was, now) -> None:
    metadata = checkpoint_with(before, "parts", "value:seen", "map:names", "table:seen")
    assign_state(metadata, graph_with(before))
    with pytest.raises(ConfigError) as caught:
        assign_state(metadata, graph_with(after))
    text = str(caught.value)
    assert text.startswith("operator 'visits' (uid 'visits'): in checkpoint 1 ")
    assert f"{what} was {was}" in text and f"now it is {now}" in text


def test_another_key_column_of_the_same_type_is_refused_with_the_way_out_though_rows_are_in_flight() -> None:
    before, after = process(Remembers(), keys=("n",)), process(Remembers(), keys=("m",))
    in_flight = ChannelState(0, 0, 0, False, (Segment("f", 0, 1, 0, 1, 1),))
    metadata = msgspec.structs.replace(checkpoint_with(before, "value:seen"), channels=(in_flight,))
    assert assign_state(metadata, graph_with(before)).channels
    with pytest.raises(ConfigError, match=r"rename it back before key_by\(\)\), or give the operator a new uid"):
        assign_state(metadata, graph_with(after))


def test_state_that_is_declared_no_more_is_refused_and_new_state_begins_empty() -> None:
    metadata = checkpoint_with(process(Remembers()), "value:seen", "map:names")
    with pytest.raises(
        ConfigError, match=r"holds map state 'names' \(int64 to large_string\), which it does not have now"
    ):
        assign_state(metadata, graph_with(process(RemembersNoNames())))
    assign_state(metadata, graph_with(process(RemembersMore())))


def test_tables_of_midstreams_own_operators_are_never_converted() -> None:
    port = Port("process", ("n",), "at", ROWS)
    always, within = (drop_duplicates_operator("visits", port, us) for us in (None, 1_000_000))
    for before, after in ((always, within), (within, always)):
        with pytest.raises(ConfigError, match=r"table state 'kept' was .*; its state cannot be read as that"):
            assign_state(checkpoint_with(before, "table:kept"), graph_with(after), allow_dropped_state=True)
    for operator in (always, within, windows()):
        assert operator.upgradable_states() is None


def test_another_kind_of_operator_under_the_same_uid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the window \(tumbling windows of 1 h\), which it does not have now"):
        assign_state(checkpoint_with(windows(), "parts"), graph_with(process(Remembers())))


def test_what_holds_no_state_may_change() -> None:
    assign_state(checkpoint_with(windows()), graph_with(windows(tumbling("2 h"))))
    assign_state(checkpoint_with(process(Remembers()), "value:seen"), graph_with(process(RemembersNoNames())))


def test_how_long_late_rows_are_taken_may_change() -> None:
    later = window_operator(
        "visits",
        window=tumbling("1 h"),
        keys=("user",),
        event_time="at",
        aggregates={"total": Sum("n")},
        schema=ROWS,
        allowed_lateness="1 min",
    )
    assign_state(checkpoint_with(windows(), "parts"), graph_with(later))


def test_a_uid_that_is_gone_is_compared_with_the_new_ones() -> None:
    state = (OperatorSnapshot("daily-visits", (part("s"),)), OperatorSnapshot("daily-visits"))
    metadata = metadata_of(pipeline(uids=("daily-visits",)), {"daily-visits": state})
    with pytest.raises(ConfigError, match=r"\(Daily-Visits: 1 bytes, 1 rows; was it renamed to 'daily-visit'\?\)"):
        assign_state(metadata, pipeline(uids=("daily-visit", "totals")))
    with pytest.raises(ConfigError, match=r"\(Daily-Visits: 1 bytes, 1 rows\), which the job no longer has"):
        assign_state(metadata, pipeline(uids=("something-else",)))


def test_what_a_finished_subtask_held_is_kept_if_it_has_the_form_of_the_rest() -> None:
    """It is never restored, but `midstream state` reads the parts of all subtasks together."""
    before = process(Remembers())
    held = OperatorSnapshot("visits", (part("value:seen"), part("map:names"), part("timers:event")))
    metadata = metadata_of(
        graph_with(before),
        {"visits": (held, OperatorSnapshot("visits"))},
        finished={"visits": (0,)},
        settings={"visits": settings_of(before)},
        forms={"visits": forms_of(before)},
    )
    for operator, parts in ((before, held.parts), (process(RemembersWider()), held.parts[1:])):
        plan = JobPlan("job", graph_with(operator), b"", JobConfig(name="job"))
        finished = {TaskId(1, 0)}
        acks = {ref: CheckpointAck(0, 2, ref, (), (), 0) for ref in (TaskId(0, 0), TaskId(0, 1), TaskId(1, 1))}
        (visits,) = (op for op in operator_states(plan, acks, finished, metadata) if op.uid == "visits")
        assert visits.subtasks[0].parts == parts


# ---- partly finished -------------------------------------------------------


def partly_finished(rule: str) -> CheckpointMetadata:
    """Subtask 1 of 4 had finished; what it had held then is still there, and must not come back."""
    groups = [key_group_range(i, 4, MAX_PARALLELISM) for i in range(4)]
    snapshots = tuple(
        OperatorSnapshot(
            "count",
            (PartHandle("s", rule, (ChunkHandle(f"c{i}", "f", i, 1, 0, 3, groups[i].start, groups[i].stop - 1),)),),
            watermark_in_us=100 * i,
            watermark_out_us=100 * i,
        )
        for i in range(4)
    )
    graph = pipeline(4, 4, keyed=False)
    return metadata_of(graph, {"count": snapshots}, finished={"read": (1,), "count": (1,)})


def given(metadata: CheckpointMetadata, parallelism: int) -> list[list[PartHandle]]:
    graph = pipeline(parallelism, parallelism, keyed=False)
    tasks = assign_state(metadata, graph).tasks
    return [[part for snapshot in tasks.get(TaskId(1, i), ()) for part in snapshot.parts] for i in range(parallelism)]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 7])
def test_keyed_state_of_those_that_still_ran_goes_to_the_owners_of_its_keys(parallelism: int) -> None:
    parts = given(partly_finished("keyed"), parallelism)
    owners: dict[str, list[int]] = {}
    for subtask, found in enumerate(parts):
        for chunk in (chunk for part in found for chunk in part.chunks):
            owners.setdefault(chunk.id, []).append(subtask)
    assert owners.keys() == {"c0", "c2", "c3"}
    for i in (0, 2, 3):
        mine = key_group_range(i, 4, MAX_PARALLELISM)
        theirs = [j for j in range(parallelism) if set(key_group_range(j, parallelism, MAX_PARALLELISM)) & set(mine)]
        assert owners[f"c{i}"] == theirs


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_split_state_of_those_that_still_ran_is_dealt_out_once(parallelism: int) -> None:
    dealt = []
    for found in given(partly_finished("split"), parallelism):
        for part in found:
            rows = [(chunk.id, row) for chunk in part.chunks for row in range(chunk.rows)]
            dealt += rows[part.index :: part.stride]
    assert sorted(dealt) == [(f"c{i}", row) for i in (0, 2, 3) for row in range(3)]


def test_split_state_at_the_same_parallelism_stays_where_it_was() -> None:
    assert [[c.id for p in found for c in p.chunks] for found in given(partly_finished("split"), 4)] == [
        ["c0"],
        [],
        ["c2"],
        ["c3"],
    ]


@pytest.mark.parametrize("parallelism", [1, 2, 4, 7])
def test_broadcast_state_comes_from_a_subtask_that_still_ran(parallelism: int) -> None:
    metadata = partly_finished("broadcast")
    found = [[c.id for p in parts for c in p.chunks] for parts in given(metadata, parallelism)]
    if parallelism == 4:
        assert found.pop(1) == [], "it is not run again"
    assert all(len(ids) == 1 and ids[0] != "c1" for ids in found)


def test_event_time_is_that_of_those_that_still_ran() -> None:
    metadata = partly_finished("keyed")
    tasks = assign_state(metadata, pipeline(2, 2, keyed=False)).tasks
    assert {snapshot.watermark_in_us for snapshots in tasks.values() for snapshot in snapshots} == {0}
