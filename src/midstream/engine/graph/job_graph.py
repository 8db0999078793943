"""The job graph: vertices (chains of operators) and the edges between them.

It is made once on the driver, checked, and sent to every slot as one pickle; a slot unpickles a
vertex once per subtask, so that no two subtasks share an operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from midstream.engine.operators.base import Combiner, Operator
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.source_api import Source
from midstream.engine.state.safe_pickle import OwnCode


class Partitioning(Enum):
    FORWARD = "forward"
    """Producer i to consumer i; both have the same parallelism."""
    KEYED = "keyed"
    """To the owner of the row's key group."""
    REBALANCE = "rebalance"
    """Whole batches (large ones in parts) to the consumers in turn."""
    BROADCAST = "broadcast"
    """To every consumer."""
    GLOBAL = "global"
    """To consumer 0."""

    @property
    def all_to_all(self) -> bool:
        return self is not Partitioning.FORWARD

    @property
    def redistributable(self) -> bool:
        """Whether in-flight rows of such an edge can be moved to other consumers (else it always aligns)."""
        return self in _REDISTRIBUTABLE


_REDISTRIBUTABLE = (Partitioning.KEYED, Partitioning.REBALANCE, Partitioning.GLOBAL)


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    uid: str
    """Stable across versions of the job: it identifies the state."""
    name: str
    operator: Operator
    sink: Sink | None = None
    """Set when the operator is a sink: its committer runs on the driver."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    uid: str
    name: str
    source: Source
    columns: pa.Schema | None = None
    """Those of the source's columns that are read, if the operators of its task use no others; None: all."""


@dataclass(frozen=True, slots=True)
class Vertex:
    """A chain of operators that run in one task: `source` (if it has one), then `operators` in order."""

    id: int
    parallelism: int
    source: SourceSpec | None
    operators: tuple[OperatorSpec, ...]

    @property
    def name(self) -> str:
        return " → ".join(spec.name for spec in self.specs)

    @property
    def specs(self) -> tuple[SourceSpec | OperatorSpec, ...]:
        """The source, if it has one, and the operators."""
        return self.operators if self.source is None else (self.source, *self.operators)


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows from the last operator of `source` (its side output `tag`, if set) to the first of `target`."""

    id: int
    source: int
    target: int
    partitioning: Partitioning
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    port: int = 0
    tag: str | None = None
    combiner: Combiner | None = None
    """Reduces rows before they are sent. Batches on the edge are rows of `schema`, or combined."""

    @property
    def layouts(self) -> tuple[pa.Schema, ...]:
        """The schemas that batches on this edge may have; stored and sent batches name theirs by its index."""
        return (self.schema,) if self.combiner is None else (self.schema, self.combiner.schema)

    def layout_of(self, batch: pa.RecordBatch) -> int:
        """Return the index of the batch's schema in `layouts`."""
        return int(self.combiner is not None and batch.schema.equals(self.combiner.schema))


@dataclass(frozen=True, slots=True)
class JobGraph:
    """Vertices are in topological order and `vertices[i].id == i`; likewise `edges[i].id == i`."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    max_parallelism: int

    def inputs(self, vertex: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.target == vertex]

    def outputs(self, vertex: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == vertex]

    def consumers(self, edge: Edge, producer: int) -> range:
        """The subtasks that producer subtask `producer` reaches over `edge`."""
        if not edge.partitioning.all_to_all:
            return range(producer, producer + 1)
        return range(self.vertices[edge.target].parallelism)

    def producers(self, edge: Edge, consumer: int) -> range:
        """The subtasks that reach consumer subtask `consumer` over `edge`."""
        if not edge.partitioning.all_to_all:
            return range(consumer, consumer + 1)
        return range(self.vertices[edge.source].parallelism)

    def set_own_code(self, own: OwnCode) -> None:
        """Set the job's own code, whose objects may be in pickles, on all sources, operators and sinks."""
        for vertex in self.vertices:
            if vertex.source is not None:
                vertex.source.source.own = own
            for spec in vertex.operators:
                spec.operator.own = own
                if spec.sink is not None:
                    spec.sink.own = own

    @property
    def slots(self) -> int:
        """The number of slots that the job needs: subtask i of every vertex shares slot i."""
        return max(vertex.parallelism for vertex in self.vertices)
