"""Rewrites a program to keep its outputs in memory: sinks are replaced, loose ends and side outputs are kept too.

Everything in between is the program's own: the same operators with the same uids, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from midstream.engine.core.errors import JobError
from midstream.engine.graph.graph_builder import assign_uids
from midstream.engine.graph.logical_graph import Input, LogicalGraph, Node
from midstream.engine.operators.base import Operator
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.operators.source_api import Source
from midstream.inprocess.endpoints import TakingSink


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """An output of the program that is kept."""

    id: str
    node: int
    """The node in the program as it was written."""
    tag: str | None
    uid: str
    name: str
    schema: pa.Schema
    sink: Sink | None
    """The program's sink that is replaced."""
    is_end: bool
    """Whether it is a sink or the end of a stream, rather than a side output that other operators may read as well."""

    @property
    def label(self) -> str:
        shown = self.uid if self.name in self.uid else f"{self.uid} ({self.name})"
        return shown if self.tag is None else f"{shown}, side output {self.tag!r}"


@dataclass(frozen=True, slots=True)
class Rewritten:
    graph: LogicalGraph
    outputs: tuple[KeptOutput, ...]


@dataclass(frozen=True, slots=True)
class End:
    """A stream whose rows are requested, with the outputs that make it up; a union has several."""

    origins: tuple[tuple[int, str | None], ...]
    schema: pa.Schema


def rewritten(
    program: LogicalGraph,
    ends: Sequence[End] | None,
    source_of: Callable[[str, Node], Source],
) -> Rewritten:
    """Return the program with its outputs kept. `ends`: only these streams and what they need; None: all of it.

    `source_of(uid, node)`: the source to read instead. All operators except those with one subtask have the parallelism
    with which the job is run, whatever they set. Raises JobError if there is nothing to run.
    """
    if not program.nodes:
        raise JobError("the job has no streams: begin with a source, such as env.from_collection([…])")
    uids = assign_uids(program.nodes)
    kept = program.nodes if ends is None else needed(program, [node for end in ends for node, _ in end.origins])
    numbers = {node.id: number for number, node in enumerate(kept)}
    outputs: list[KeptOutput] = []
    nodes: list[Node] = []
    for node in kept:
        made = replace(
            node,
            id=numbers[node.id],
            uid=uids[node.id],
            parallelism=1 if node.parallelism == 1 else None,
            inputs=tuple(replace(origin, node=numbers[origin.node]) for origin in node.inputs),
        )
        if node.source is not None:
            made = replace(made, source=source_of(uids[node.id], node))
        if node.sink is not None:
            output = KeptOutput(
                uids[node.id], node.id, None, uids[node.id], node.name, node.inputs[0].schema, node.sink, True
            )
            sink = TakingSink(output.id)
            outputs.append(output)
            made = replace(made, sink=sink, operator=SinkOperator(node.name, sink, output.schema))
        nodes.append(made)
    for end in _loose_ends(program, kept) if ends is None else ends:
        _take(nodes, outputs, numbers, program, uids, end, is_end=True)
    for node in kept:
        for tag, schema in side_outputs(node.operator).items():
            if not any((node.id, tag) == (output.node, output.tag) for output in outputs):
                _take(nodes, outputs, numbers, program, uids, End(((node.id, tag),), schema), is_end=False)
    return Rewritten(LogicalGraph(nodes), tuple(outputs))


def side_outputs(operator: Operator | None) -> Mapping[str, pa.Schema]:
    """Return the side outputs of windows (late rows) and of functions that declare some: columns by tag."""
    return getattr(operator, "side_outputs", {})


def needed(program: LogicalGraph, ends: Sequence[int]) -> list[Node]:
    """Return the nodes with these ids, and all from which their rows come, in the order of the program."""
    found: set[int] = set()
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [origin.node for origin in program.nodes[node].inputs]
    return [node for node in program.nodes if node.id in found]


def _loose_ends(program: LogicalGraph, kept: Sequence[Node]) -> list[End]:
    """Return the streams that end without a sink, which a test may examine nevertheless."""
    consumers = program.consumers()
    return [
        End(((node.id, None),), node.schema)
        for node in kept
        if node.schema is not None and not any(origin.tag is None for _, origin in consumers[node.id])
    ]


def _take(
    nodes: list[Node],
    outputs: list[KeptOutput],
    numbers: Mapping[int, int],
    program: LogicalGraph,
    uids: Mapping[int, str],
    end: End,
    *,
    is_end: bool,
) -> None:
    node_id, tag = end.origins[0]
    node = program.nodes[node_id]
    output = KeptOutput(
        f"taken:{len(outputs)}:{uids[node_id]}", node_id, tag, uids[node_id], node.name, end.schema, None, is_end
    )
    outputs.append(output)
    sink = TakingSink(output.id)
    nodes.append(
        Node(
            id=len(nodes),
            kind="taken",
            name=f"output of {node.name}",
            uid=output.id,
            parallelism=nodes[numbers[node_id]].parallelism,
            inputs=tuple(Input(numbers[origin], end.schema, from_tag) for origin, from_tag in end.origins),
            operator=SinkOperator(node.name, sink, end.schema),
            sink=sink,
        )
    )
