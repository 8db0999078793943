"""The logical graph: one node per operator as the program wrote it, before chaining.

The API appends nodes while the program runs, so ids count from 0 in the order of writing and a
node's inputs come before it. `graph_builder` does not rely on that: a graph may be made by other means.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.operators.base import Operator
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.source_api import Source


@dataclass(frozen=True, slots=True)
class Input:
    """Rows of node `node` (of its side output `tag`, if set) that flow into input `port`.

    `partitioning` None: FORWARD where both sides have the same parallelism, else REBALANCE.
    Several inputs with the same port are a union.
    """

    node: int
    schema: pa.Schema
    tag: str | None = None
    partitioning: Partitioning | None = None
    keys: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One operator, source or sink. `operator` is None for a source and set for all others.

    `schema` is that of the main output, None for a sink. `uid`, `parallelism`: None if the
    program does not set it. `location` is the user's file and line, for messages.
    """

    kind: str
    name: str = ""
    uid: str | None = None
    parallelism: int | None = None
    inputs: tuple[Input, ...] = ()
    schema: pa.Schema | None = None
    source: Source | None = None
    operator: Operator | None = None
    sink: Sink | None = None
    location: str = ""
    id: int = -1
    """Its position among the nodes of the graph to which it was added."""

    @property
    def label(self) -> str:
        """The name in messages."""
        location = f" ({self.location})" if self.location else ""
        return f"operator {self.name!r}{location}"


@dataclass(slots=True)
class LogicalGraph:
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> Node:
        """Append a node, with the next id. The default for its name is its kind."""
        added = replace(node, id=len(self.nodes), name=node.name or node.kind)
        self.nodes.append(added)
        return added

    def consumers(self) -> dict[int, list[tuple[Node, Input]]]:
        """Return, for each node id, its consumers with their inputs."""
        found: dict[int, list[tuple[Node, Input]]] = {node.id: [] for node in self.nodes}
        for node in self.nodes:
            for origin in node.inputs:
                found[origin.node].append((node, origin))
        return found
