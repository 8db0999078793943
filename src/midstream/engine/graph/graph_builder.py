"""Builds the job graph from the logical graph: check, name, chain, connect.

Steps, each of which may refuse the job: the order of nodes (a cycle), use (streams that nobody
reads, no sink), uids, parallelism, partitioning; then chains become vertices and what is left
between them edges.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from midstream.engine.core.config import JobConfig, check_parallelism
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.graph.logical_graph import Input, LogicalGraph, Node
from midstream.engine.graph.projection import with_projection
from midstream.engine.operators.bad_records import BAD_RECORDS
from midstream.engine.operators.watermarks import TimestampsOperator

_COMBINED: Final = (Partitioning.KEYED, Partitioning.GLOBAL)
"""The partitionings where rows of one key or window meet only at the consumer."""


def build_job_graph(logical: LogicalGraph, config: JobConfig) -> JobGraph:
    """Raises JobError, ConfigError or SchemaError naming the invalid operator."""
    config.check()
    order = _in_topological_order(logical)
    _check_all_used(logical)
    uids = assign_uids(logical.nodes)
    parallelism = {node.id: _parallelism_of(node, config) for node in logical.nodes}
    partitionings = {node.id: [_partitioning(node, i, logical, parallelism) for i in node.inputs] for node in order}
    _check_schemas(logical)

    chains = _chains(order, logical, parallelism, partitionings)
    vertex_of = {node.id: vertex for vertex, chain in enumerate(chains) for node in chain}
    vertices = tuple(_vertex(i, chain, uids, parallelism) for i, chain in enumerate(chains))
    edges: list[Edge] = []
    consumers = logical.consumers()
    for vertex, chain in enumerate(chains):
        head = chain[0]
        tags = {origin.tag for _, origin in consumers[head.id] if origin.tag is not None}
        combiner = head.operator.combiner(tags) if head.operator is not None else None
        for origin, partitioning in zip(head.inputs, partitionings[head.id], strict=True):
            edges.append(
                Edge(
                    id=len(edges),
                    source=vertex_of[origin.node],
                    target=vertex,
                    partitioning=partitioning,
                    schema=origin.schema,
                    keys=origin.keys,
                    port=origin.port,
                    tag=origin.tag,
                    combiner=combiner if origin.port == 0 and partitioning in _COMBINED else None,
                )
            )
    graph = JobGraph(vertices=vertices, edges=tuple(edges), max_parallelism=config.max_parallelism)
    check_job_graph(graph)
    return graph


def check_job_graph(graph: JobGraph) -> None:
    """Check what slots and coordinator rely on. A violation is a bug in the code that built the graph, hence
    assertions."""
    for i, vertex in enumerate(graph.vertices):
        assert vertex.id == i, (vertex.id, i)
        assert vertex.source is not None or vertex.operators, vertex
        assert bool(vertex.source) != bool(graph.inputs(i)), f"{vertex.name}: a source has no inputs, all others have"
    for i, edge in enumerate(graph.edges):
        assert edge.id == i, (edge.id, i)
        assert edge.source < edge.target, f"edge {i} from {edge.source} to {edge.target} is not topological"
        assert bool(edge.keys) == (edge.partitioning is Partitioning.KEYED), edge
        source, target = graph.vertices[edge.source], graph.vertices[edge.target]
        if edge.partitioning is Partitioning.FORWARD:
            assert source.parallelism == target.parallelism, edge
    uids = Counter(spec.uid for vertex in graph.vertices for spec in vertex.specs)
    assert all(count == 1 for count in uids.values()), uids


def warnings_of(graph: JobGraph) -> Iterator[str]:
    """Describe event time that does not see a source's splits only because a stream before it has another consumer."""
    for edge in graph.edges:
        before, after = graph.vertices[edge.source], graph.vertices[edge.target]
        others = [
            graph.vertices[each.target].name
            for each in graph.edges
            if each.source == edge.source and each is not edge and each.tag != BAD_RECORDS
        ]
        marks = after.source is None and isinstance(after.operators[0].operator, TimestampsOperator)
        if marks and others and before.source is not None and edge.partitioning is Partitioning.FORWARD:
            yield (
                f"{after.operators[0].name} does not see the splits of {before.source.name} one by one, since the stream before "
                f"it has another consumer ({', '.join(others)}): rows may be late because another split is ahead, or because "
                "of idle_after. Call with_watermarks() before the stream divides"
            )


def assign_uids(nodes: Sequence[Node]) -> dict[int, str]:
    """A uid per node: the explicit one, else kind and a number that counts nodes of that kind.

    Counting per kind keeps `window-1` stable when a filter is inserted before it.
    """
    owner: dict[str, Node] = {}
    for node in nodes:
        if node.uid is None:
            continue
        other = owner.setdefault(node.uid, node)
        if other is not node:
            raise JobError(
                f"uid {node.uid!r} is given to two operators: {other.label} and {node.label}; "
                "the uid identifies the state, so each needs its own"
            )
    result: dict[int, str] = {}
    counts: dict[str, int] = defaultdict(int)
    for node in nodes:
        if node.uid is not None:
            result[node.id] = node.uid
            continue
        counts[node.kind] += 1
        while f"{node.kind}-{counts[node.kind]}" in owner:
            counts[node.kind] += 1
        result[node.id] = f"{node.kind}-{counts[node.kind]}"
    return result


def _in_topological_order(logical: LogicalGraph) -> list[Node]:
    """Inputs first, otherwise in the order of writing. Raises JobError naming the nodes of a cycle."""
    nodes = logical.nodes
    for node in nodes:
        for origin in node.inputs:
            if not 0 <= origin.node < len(nodes):
                raise JobError(f"{node.label}: its input is not part of this job; build it from the same Environment")
    consumers = logical.consumers()
    waiting = {node.id: len(node.inputs) for node in nodes}
    ready = [node_id for node_id, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for consumer, _ in consumers[node.id]:
            waiting[consumer.id] -= 1
            if waiting[consumer.id] == 0:
                heapq.heappush(ready, consumer.id)
    if len(order) < len(nodes):
        cycle = _find_cycle(nodes, {node_id for node_id, count in waiting.items() if count})
        names = " → ".join(repr(node.name) for node in [*cycle, cycle[0]])
        raise JobError(f"the job has a cycle: {names}; streams must flow from sources to sinks without returning")
    return order


def _find_cycle(nodes: Sequence[Node], stuck: set[int]) -> list[Node]:
    """The nodes of one cycle in the direction of the rows. Each stuck node has a stuck input, so walking up must
    repeat."""
    path: list[int] = []
    at = min(stuck)
    while at not in path:
        path.append(at)
        at = next(origin.node for origin in nodes[at].inputs if origin.node in stuck)
    return [nodes[node_id] for node_id in reversed(path[path.index(at) :])]


def _check_all_used(logical: LogicalGraph) -> None:
    if not logical.nodes:
        raise JobError(
            "the job has no streams: begin with a source such as env.read_files(…) and end with a sink such as .print()"
        )
    consumers = logical.consumers()
    unread = [node for node in logical.nodes if node.sink is None and not consumers[node.id]]
    if not any(node.sink is not None for node in logical.nodes):
        raise JobError(
            f"the job has no sink: nothing would come out of {unread[0].label}; "
            "end it with .write_parquet(…), .print(), .collect() or another sink"
        )
    if unread:
        raise JobError(f"{unread[0].label}: its stream is never used; end it with a sink, or remove the operator")


def _parallelism_of(node: Node, config: JobConfig) -> int:
    if node.parallelism is None:
        return config.parallelism
    check_parallelism(node.parallelism, config.max_parallelism, node.label)
    return node.parallelism


def _partitioning(node: Node, origin: Input, logical: LogicalGraph, parallelism: dict[int, int]) -> Partitioning:
    source = logical.nodes[origin.node]
    same = parallelism[source.id] == parallelism[node.id]
    if origin.partitioning is None:
        return Partitioning.FORWARD if same else Partitioning.REBALANCE
    if origin.partitioning is Partitioning.FORWARD and not same:
        raise JobError(
            f"{node.label}: forward() needs the same parallelism on both sides, but {source.name!r} has "
            f"{parallelism[source.id]} and {node.name!r} {parallelism[node.id]}; use rebalance(), or make them equal"
        )
    return origin.partitioning


def _check_schemas(logical: LogicalGraph) -> None:
    """Check schemas again, for graphs that were not built by the API, which checks them with better messages."""
    for node in logical.nodes:
        first: dict[int, Input] = {}
        for origin in node.inputs:
            other = first.setdefault(origin.port, origin)
            if not other.schema.equals(origin.schema):
                raise SchemaError(
                    f"{node.label}: the streams of input {origin.port} have different schemas: "
                    f"{_columns(other)} and {_columns(origin)}"
                )
            for key in origin.keys:
                if origin.schema.get_field_index(key) < 0:
                    raise SchemaError(
                        f"{node.label}: key column {key!r} is not in the stream's schema ({_columns(origin)})"
                    )


def _columns(origin: Input) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in origin.schema)


def _chains(
    order: Sequence[Node],
    logical: LogicalGraph,
    parallelism: dict[int, int],
    partitionings: dict[int, list[Partitioning]],
) -> list[list[Node]]:
    """Groups of nodes that run in one task, heads in topological order.

    A node joins its producer if it has one input, forward, of the main output, and the producer
    has no other reader: neither a second consumer nor one of a side output, so that all edges
    of a chain leave from its end. But a source has a side output of its own, that of its bad records, which
    leaves from its beginning, so a reader of that does not count.
    """
    consumers = logical.consumers()
    chains: list[list[Node]] = []
    chain_of: dict[int, list[Node]] = {}
    for node in order:
        if len(node.inputs) == 1:
            origin = node.inputs[0]
            forward = partitionings[node.id][0] is Partitioning.FORWARD
            readers = [each for _, each in consumers[origin.node] if each.tag != BAD_RECORDS]
            if forward and origin.tag is None and origin.port == 0 and len(readers) == 1:
                assert parallelism[origin.node] == parallelism[node.id]
                chain = chain_of[origin.node]
                chain.append(node)
                chain_of[node.id] = chain
                continue
        chain_of[node.id] = [node]
        chains.append(chain_of[node.id])
    return chains


def _vertex(vertex_id: int, chain: Sequence[Node], uids: dict[int, str], parallelism: dict[int, int]) -> Vertex:
    head = chain[0]
    source = SourceSpec(uids[head.id], head.name, head.source) if head.source is not None else None
    operators = []
    for node in chain[1:] if source else chain:
        assert node.operator is not None, f"{node.label} has no operator"
        operators.append(OperatorSpec(uids[node.id], node.name, node.operator, node.sink))
    return with_projection(Vertex(vertex_id, parallelism[head.id], source, tuple(operators)))
