"""From logical nodes to a job graph: chains, edges, uids, and what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from in_memory import NeverRun
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.print_sink import PrintSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.graph.describe import describe_text
from midstream.engine.graph.graph_builder import assign_uids, build_job_graph
from midstream.engine.graph.job_graph import JobGraph, Partitioning
from midstream.engine.graph.logical_graph import Input, LogicalGraph, Node
from midstream.engine.operators.windows.aggregates import Accumulator, AnyAggregate, Count, Last
from midstream.engine.operators.windows.window_factory import LATE, tumbling, window_operator

SCHEMA = schema_of([("k", pa.large_string()), ("v", pa.int64())])
CONFIG = JobConfig(parallelism=2)


def source(graph: LogicalGraph, **settings) -> Node:
    return graph.add(Node("collection", source=from_rows([{"k": "a", "v": 1}]), schema=SCHEMA, **settings))


def step(graph: LogicalGraph, *origins: Node | Input, kind: str = "map", **settings) -> Node:
    inputs = tuple(o if isinstance(o, Input) else Input(o.id, SCHEMA) for o in origins)
    return graph.add(Node(kind, inputs=inputs, operator=NeverRun(), schema=SCHEMA, **settings))


def end(graph: LogicalGraph, *origins: Node | Input, **settings) -> Node:
    inputs = tuple(o if isinstance(o, Input) else Input(o.id, SCHEMA) for o in origins)
    return graph.add(Node("print", inputs=inputs, operator=NeverRun(), sink=PrintSink(), **settings))


def keyed(node: Node, *keys: str, port: int = 0) -> Input:
    return Input(node.id, SCHEMA, partitioning=Partitioning.KEYED, keys=keys or ("k",), port=port)


def chains(job: JobGraph) -> list[str]:
    return [vertex.name for vertex in job.vertices]


def test_forward_edges_of_equal_parallelism_become_one_chain():
    graph = LogicalGraph()
    end(graph, step(graph, step(graph, source(graph))))
    job = build_job_graph(graph, CONFIG)
    assert chains(job) == ["collection → map → map → print"]
    assert job.edges == ()
    assert job.slots == 2


def test_a_keyed_edge_cuts_the_chain_and_carries_keys_and_schema():
    graph = LogicalGraph()
    end(graph, step(graph, keyed(source(graph)), kind="window"))
    job = build_job_graph(graph, CONFIG)
    assert chains(job) == ["collection", "window → print"]
    [edge] = job.edges
    assert (edge.source, edge.target, edge.partitioning, edge.keys) == (0, 1, Partitioning.KEYED, ("k",))
    assert edge.schema == SCHEMA


def test_another_parallelism_cuts_the_chain_with_a_rebalance():
    graph = LogicalGraph()
    end(graph, step(graph, source(graph), parallelism=3), parallelism=3)
    job = build_job_graph(graph, CONFIG)
    assert chains(job) == ["collection", "map → print"]
    assert job.edges[0].partitioning is Partitioning.REBALANCE
    assert [vertex.parallelism for vertex in job.vertices] == [2, 3]
    assert job.slots == 3


def test_two_readers_of_one_stream_are_forward_edges_of_their_own():
    graph = LogicalGraph()
    head = source(graph)
    end(graph, head)
    end(graph, head)
    job = build_job_graph(graph, CONFIG)
    assert chains(job) == ["collection", "print", "print"]
    assert {edge.partitioning for edge in job.edges} == {Partitioning.FORWARD}


def test_a_side_output_is_an_edge_with_its_tag_and_ends_the_chain():
    graph = LogicalGraph()
    window = step(graph, source(graph), kind="window")
    end(graph, window)
    end(graph, Input(window.id, SCHEMA, tag="late"))
    job = build_job_graph(graph, CONFIG)
    assert chains(job) == ["collection → window", "print", "print"]
    assert [edge.tag for edge in job.edges] == [None, "late"]


def test_a_union_is_several_edges_into_one_port_and_connect_is_two_ports():
    graph = LogicalGraph()
    first, second, third = source(graph), source(graph), source(graph)
    both = step(graph, keyed(first), keyed(second), keyed(third, port=1), kind="co_process")
    end(graph, both)
    job = build_job_graph(graph, CONFIG)
    assert [(edge.source, edge.port) for edge in job.edges] == [(0, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("how", [Partitioning.REBALANCE, Partitioning.BROADCAST, Partitioning.GLOBAL])
def test_an_explicit_partitioning_is_kept(how):
    graph = LogicalGraph()
    end(graph, Input(source(graph).id, SCHEMA, partitioning=how))
    job = build_job_graph(graph, CONFIG)
    assert job.edges[0].partitioning is how


def test_forward_between_different_parallelisms_is_refused():
    graph = LogicalGraph()
    head = source(graph)
    end(graph, Input(head.id, SCHEMA, partitioning=Partitioning.FORWARD), parallelism=1, location="job.py:7")
    with pytest.raises(JobError, match=r"operator 'print' \(job.py:7\): forward\(\) needs the same parallelism.*2.*1"):
        build_job_graph(graph, CONFIG)


def test_uids_count_per_kind_and_step_aside_for_explicit_ones():
    graph = LogicalGraph()
    head = source(graph)
    window = step(graph, head, kind="window")
    other = step(graph, head, kind="window")
    named = step(graph, head, kind="window", uid="window-1")
    assert assign_uids(graph.nodes) == {
        head.id: "collection-1",
        window.id: "window-2",
        other.id: "window-3",
        named.id: "window-1",
    }


def test_a_filter_put_in_front_does_not_change_the_uids_of_windows():
    def uids(with_filter: bool) -> set[str]:
        graph = LogicalGraph()
        at = source(graph)
        if with_filter:
            at = step(graph, at, kind="filter")
        end(graph, step(graph, at, kind="window"))
        return set(assign_uids(graph.nodes).values())

    assert uids(True) - uids(False) == {"filter-1"}


def test_two_equal_uids_are_refused_with_both_places():
    graph = LogicalGraph()
    head = source(graph)
    a = step(graph, head, uid="same", location="job.py:3")
    end(graph, step(graph, a, uid="same", name="second", location="job.py:4"))
    with pytest.raises(JobError, match=r"uid 'same' .* operator 'map' \(job.py:3\) and operator 'second' \(job.py:4\)"):
        build_job_graph(graph, CONFIG)


def test_a_cycle_is_refused_naming_its_operators_in_the_direction_of_the_rows():
    graph = LogicalGraph()
    head = source(graph)
    step(graph, head, Input(2, SCHEMA), name="a")
    step(graph, Input(1, SCHEMA), name="b")
    end(graph, Input(2, SCHEMA))
    with pytest.raises(JobError, match=r"cycle: ('a' → 'b' → 'a'|'b' → 'a' → 'b')"):
        build_job_graph(graph, CONFIG)


def test_an_unused_stream_is_refused_with_its_place():
    graph = LogicalGraph()
    head = source(graph)
    end(graph, head)
    step(graph, head, name="forgotten", location="job.py:9")
    with pytest.raises(
        JobError, match=r"operator 'forgotten' \(job.py:9\): its stream is never used; end it with a sink"
    ):
        build_job_graph(graph, CONFIG)


def test_a_job_without_sink_or_without_anything_is_refused():
    graph = LogicalGraph()
    with pytest.raises(JobError, match="no streams: begin with a source"):
        build_job_graph(graph, CONFIG)
    step(graph, source(graph))
    with pytest.raises(JobError, match="no sink: nothing would come out of operator 'map'"):
        build_job_graph(graph, CONFIG)


@pytest.mark.parametrize("parallelism", [0, -1, 200, True])
def test_a_parallelism_that_cannot_be_is_refused(parallelism):
    graph = LogicalGraph()
    end(graph, source(graph), parallelism=parallelism, location="job.py:2")
    with pytest.raises(ConfigError, match=r"operator 'print' \(job.py:2\): parallelism"):
        build_job_graph(graph, CONFIG)


def test_streams_of_one_port_with_different_schemas_and_keys_that_are_missing_are_refused():
    graph = LogicalGraph()
    first, second = source(graph), source(graph)
    step(graph, first, Input(second.id, pa.schema({"k": pa.int64()})))
    end(graph, Input(2, SCHEMA))
    with pytest.raises(SchemaError, match="streams of input 0 have different schemas"):
        build_job_graph(graph, CONFIG)
    graph = LogicalGraph()
    end(graph, keyed(source(graph), "nope"))
    with pytest.raises(
        SchemaError, match=r"key column 'nope' is not in the stream's schema \(k: large_string, v: int64\)"
    ):
        build_job_graph(graph, CONFIG)


def test_descriptions_show_chains_edges_and_columns():
    graph = LogicalGraph()
    window = step(graph, keyed(source(graph, name="flights")), kind="window", parallelism=4)
    end(graph, window, parallelism=4)
    end(graph, Input(window.id, SCHEMA, tag="late"), name="late rows")
    job = build_job_graph(graph, CONFIG)
    text = describe_text(job)
    assert "4 vertices, 4 slots" in text
    assert "[0] ×2  flights" in text
    assert "← [0] keyed(k)" in text
    assert "side output 'late', rebalance" in text


WINDOWED = schema_of([("k", pa.large_string()), ("t", pa.timestamp("us")), ("v", pa.int64())])


class Newest(Accumulator):
    columns = ("v",)
    type = pa.int64()

    def init(self):
        return []

    def add(self, accumulator, row):
        return [row["v"]]

    def merge(self, first, second):
        return second or first

    def result(self, accumulator):
        return accumulator[0]


def of_windows(keys: tuple[str, ...] = ("k",), **aggregates: AnyAggregate) -> LogicalGraph:
    """A source that is read by a window: by key, or by all rows."""
    graph = LogicalGraph()
    read = graph.add(Node("read", source=from_rows([{"k": "a", "v": 1}]), schema=WINDOWED))
    window = window_operator(
        "w", window=tumbling("1 s"), keys=keys, event_time="t", aggregates=aggregates or {"n": Count()}, schema=WINDOWED
    )
    partitioning = Partitioning.KEYED if keys else Partitioning.GLOBAL
    came = Input(read.id, WINDOWED, partitioning=partitioning, keys=keys)
    made = graph.add(
        Node("window", inputs=(came,), operator=window, schema=window.schema, parallelism=2 if keys else 1)
    )
    graph.add(Node("print", inputs=(Input(made.id, window.schema),), operator=NeverRun(), sink=PrintSink()))
    return graph


@pytest.mark.parametrize("keys", [("k",), ()])
def test_rows_are_combined_on_their_way_to_a_window_and_on_no_other(keys):
    job = build_job_graph(of_windows(keys), CONFIG)
    first, *others = job.edges
    assert first.combiner is not None and len(first.layouts) == 2 and {*keys} < {*first.combiner.schema.names}
    assert all(edge.combiner is None and edge.layouts == (edge.schema,) for edge in others)


def test_rows_are_not_combined_if_late_rows_are_read_or_python_keeps_the_parts():
    graph = of_windows()
    window = graph.nodes[1]
    graph.add(Node("late", inputs=(Input(window.id, WINDOWED, tag=LATE),), operator=NeverRun(), sink=PrintSink()))
    assert all(edge.combiner is None for edge in build_job_graph(graph, CONFIG).edges)

    assert build_job_graph(of_windows(n=Count(), own=Newest()), CONFIG).edges[0].combiner is None
    assert build_job_graph(of_windows(n=Count(), own=Last("v")), CONFIG).edges[0].combiner is not None
