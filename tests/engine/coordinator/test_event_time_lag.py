"""How far event time has come on an edge, and what holds it back, from the reports of tasks."""

from __future__ import annotations

import pyarrow as pa
from coordinator_world import Ledger, ScriptedSource, two_vertices

from midstream.engine.coordinator.requests.event_time_status import edge_watermark_us, held_back
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, Vertex
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.engine.protocol.job_status import HeldBackStatus
from midstream.engine.protocol.task_metrics import InputMetrics, SplitMetrics, TaskMetrics

TWO = two_vertices(ScriptedSource(), Ledger())
READ, WRITE = TWO.vertices
TIMED = pa.schema([("t", pa.timestamp("us"))])


def three() -> JobGraph:
    """As TWO, and a third vertex behind `write`."""
    last = Vertex(2, 1, None, WRITE.operators)
    edge = Edge(1, 1, 2, Partitioning.GLOBAL, TIMED)
    return JobGraph((*TWO.vertices, last), (*TWO.edges, edge), TWO.max_parallelism)


def told(
    vertex: int, subtask: int, *inputs: InputMetrics, mark: int = MIN_WATERMARK_US, split: SplitMetrics | None = None
) -> dict[TaskId, TaskMetrics]:
    ref = TaskId(vertex, subtask)
    return {ref: TaskMetrics(ref, 0, 0, 0, 0, mark, inputs=inputs, slowest_split=split)}


def test_the_least_of_all_consumers_is_that_of_the_edge_once_all_have_told() -> None:
    (edge,) = TWO.edges
    first, second = told(1, 0, InputMetrics(0, 50, 0, 90)), told(1, 1, InputMetrics(0, 40, 1, 90))
    assert edge_watermark_us(TWO, edge, first) is None
    assert edge_watermark_us(TWO, edge, first | second) == 40
    assert edge_watermark_us(TWO, edge, first | told(1, 1)) == 50, "the other one waits for nothing"
    assert edge_watermark_us(TWO, edge, told(1, 0) | told(1, 1)) is None
    before = told(1, 1, InputMetrics(0, MIN_WATERMARK_US, 1, 90))
    assert edge_watermark_us(TWO, edge, first | before) is None


def test_the_split_of_the_subtask_behind_the_slowest_channel_is_named() -> None:
    consumers = told(1, 0, InputMetrics(0, 50, 1, 90)) | told(1, 1, InputMetrics(0, 50, 1, 80))
    sources = told(0, 0, mark=90, split=SplitMetrics("a", 90, 95)) | told(
        0, 1, mark=50, split=SplitMetrics("b", 60, 70)
    )
    assert held_back(TWO, WRITE, consumers) == HeldBackStatus(0, "read", 1, "", 50, 40)
    assert held_back(TWO, WRITE, consumers | sources) == HeldBackStatus(0, "read", 1, "b", 60, 30)
    assert held_back(TWO, READ, consumers | sources) == HeldBackStatus(0, "read", 1, "b", 60, 35)
    assert held_back(TWO, WRITE, {}) is None and held_back(TWO, READ, {}) is None


def test_nothing_is_said_where_none_is_further() -> None:
    even = told(1, 0, InputMetrics(0, 50, 0, 50)) | told(1, 1, InputMetrics(0, 50, 1, 50))
    assert held_back(TWO, WRITE, even) is None
    not_begun = InputMetrics(0, MIN_WATERMARK_US, 0, MIN_WATERMARK_US)
    assert held_back(TWO, WRITE, told(1, 0, not_begun) | told(1, 1, not_begun)) is None
    assert held_back(TWO, WRITE, told(1, 0) | told(1, 1)) is None, "all are idle, or have ended"
    sources = told(0, 0, mark=MAX_WATERMARK_US) | told(0, 1, mark=50, split=SplitMetrics("b", 50, 50))
    assert held_back(TWO, READ, sources) is None, "what has ended is not further"


def test_what_has_had_no_row_is_named_without_a_time() -> None:
    consumers = told(1, 0, InputMetrics(0, MIN_WATERMARK_US, 1, 90)) | told(1, 1)
    assert held_back(TWO, WRITE, consumers) == HeldBackStatus(0, "read", 1, "", None, None)
    source = told(0, 1, split=SplitMetrics("b", MIN_WATERMARK_US, MIN_WATERMARK_US))
    assert held_back(TWO, WRITE, consumers | source) == HeldBackStatus(0, "read", 1, "b", None, None)


def test_the_way_up_goes_over_all_tasks_in_between() -> None:
    graph = three()
    between = told(1, 0, InputMetrics(0, 20, 1, 70)) | told(1, 1, InputMetrics(0, 30, 0, 60))
    last = told(2, 0, InputMetrics(1, 10, 0, 15))
    assert held_back(graph, graph.vertices[2], between | last) == HeldBackStatus(0, "read", 1, "", 20, 50)
    unheard = {ref: each for ref, each in between.items() if ref != TaskId(1, 0)}
    assert held_back(graph, graph.vertices[2], unheard | last) == HeldBackStatus(1, "write", 0, "", 10, 5)


def test_it_ends_where_an_operator_makes_watermarks_of_its_own() -> None:
    times = OperatorSpec("times", "times", TimestampsOperator("times", "t", WatermarkStrategy.monotonous(), TIMED))
    made = Vertex(1, 2, None, (times,))
    graph = JobGraph((READ, made, Vertex(2, 1, None, WRITE.operators)), three().edges, TWO.max_parallelism)
    sources = told(0, 0, split=SplitMetrics("a", 1, 2)) | told(0, 1)
    between = told(1, 0, InputMetrics(0, 1, 0, 9)) | told(1, 1, InputMetrics(0, 1, 0, 9))
    last = told(2, 0, InputMetrics(1, 10, 1, 15))
    assert held_back(graph, graph.vertices[2], sources | between | last) == HeldBackStatus(1, "times", 1, "", 10, 5)
    assert held_back(graph, made, sources | between | last) is None
