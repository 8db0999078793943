"""Changed programs: other tasks and edges around the same operators; and the reasons why a job cannot use one.

The results stay the same, so everything is compared as before, by uid. Tasks are in another order, cut in two or
joined into one, and operators without state are added and removed, in a task or as a separate one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias

from midstream.engine.checkpoint.metadata import CheckpointMetadata, EdgeLayout, OperatorState, settings_of
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream_lab.checkers.content_checker import MAKING
from midstream_lab.jobs import states
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside, Pass
from midstream_lab.jobs.shapes import FORWARD, KEYED, Input, Shape
from midstream_lab.jobs.timed import STRATEGIES
from midstream_lab.jobs.topologies import key_layout_of, uid_of

NEW: Final = "new"
"""The prefix of the uids of operators that the original program does not have."""
_PLAIN: Final = frozenset(("pass", "sink"))
"""The kinds of operators that may begin a separate task: they depend neither on event time by splits nor on keys."""

_FAR_BEHIND: Final = WatermarkStrategy.bounded("36500 d")
"""Event time that is before every row until the input ends, as it is without a generator."""

Spec: TypeAlias = SourceSpec | OperatorSpec
Ends: TypeAlias = tuple[str, str, int, str | None, int]
"""The uids of the last operator before an edge and of the first one after it, the input port, the side output, and a
number that distinguishes edges for which these are equal.
"""


class _Task:
    def __init__(self, parallelism: int, specs: Sequence[Spec]) -> None:
        self.parallelism = parallelism
        self.specs = list(specs)


@dataclass(eq=False, slots=True)
class _Way:
    source: _Task
    target: _Task
    edge: Edge
    adapts: bool = False


class _Program:
    """A program that is being changed."""

    def __init__(self, graph: JobGraph, shape: Shape, outside: Outside, seed: int, version: int) -> None:
        self._random = Random(f"program {seed} {version}")
        self._typed = Random(f"typed {seed} {version}")
        self._shape = shape
        self._outside = outside
        self._version = version
        self._made = 0
        self.tasks = [_Task(vertex.parallelism, vertex.specs) for vertex in graph.vertices]
        entries = [entry for node in shape for entry in node.inputs]
        self.ways = [
            _Way(self.tasks[edge.source], self.tasks[edge.target], edge, entry.adapts)
            for edge, entry in zip(graph.edges, entries, strict=True)
        ]
        self.kinds = {uid_of(i, at, kind): kind for i, node in enumerate(shape) for at, kind in enumerate(node.chain)}

    def _often(self) -> bool:
        return self._random.random() < 0.3

    def _seldom(self) -> bool:
        return self._random.random() < 0.1

    def _new(self) -> OperatorSpec:
        self._made += 1
        uid = f"{NEW}{self._version}-{self._made}"
        return OperatorSpec(uid, uid, Pass(self._outside))

    def change(self) -> None:
        for task, node in zip(self.tasks, self._shape, strict=True):
            uid = task.specs[0].uid
            if self.kinds[uid] == "typed" and self._random.random() < 0.5:
                layout = key_layout_of(self._shape, node.inputs[0])
                kind = self._typed.choice(("typed more", "typed wider"))
                task.specs[0] = OperatorSpec(uid, uid, states.operator(kind, uid, self._outside, layout))
        for task in list(self.tasks):
            task.specs[1:] = [spec for spec in task.specs[1:] if self.kinds[spec.uid] != "pass" or not self._often()]
            self._insert(task)
            self._cut(task)
        for way in list(self.ways):
            if self._seldom():
                self._put_between(way)
        for way in list(self.ways):
            if self._often():
                self._join(way)

    def _insert(self, task: _Task) -> None:
        for at in range(len(task.specs), 0, -1):
            before = task.specs[at - 1].uid
            if self.kinds[before] != "sink" and self.kinds[before] not in MAKING and self._seldom():
                task.specs.insert(at, self._new())

    def _cut(self, task: _Task) -> None:
        for at in range(1, len(task.specs)):
            if all(self.kinds.get(spec.uid, "pass") in _PLAIN for spec in task.specs[at:]) and self._often():
                rest = _Task(task.parallelism, task.specs[at:])
                del task.specs[at:]
                self.tasks.append(rest)
                for way in self.ways:
                    if (
                        way.source is task and way.edge.tag is None
                    ):  # side outputs belong to operators that stay in the task
                        way.source = rest
                self.ways.append(_Way(task, rest, Edge(0, 0, 0, FORWARD, SCHEMA)))
                return

    def _put_between(self, way: _Way) -> None:
        """Put a new task, with the parallelism of the producer, on an edge."""
        task = _Task(way.source.parallelism, [self._new()])
        self.tasks.append(task)
        self.ways.append(
            _Way(way.source, task, replace(way.edge, partitioning=FORWARD, keys=(), port=0, combiner=None))
        )
        way.source, way.edge = task, replace(way.edge, tag=None)

    def _join(self, way: _Way) -> None:
        """Join two tasks if the first has no other output and the second no other input."""
        alone = sum(w.source is way.source for w in self.ways) == 1 == sum(w.target is way.target for w in self.ways)
        edge = way.edge
        if not alone or way.adapts or edge.partitioning is not FORWARD or edge.port or edge.tag is not None:
            return
        way.source.specs += way.target.specs
        self.ways.remove(way)
        self.tasks.remove(way.target)
        for other in self.ways:
            if other.source is way.target:
                other.source = way.source

    def put_generators(self) -> None:
        """Put generators into a program without any: event time comes to its end, as before, and to no row until then."""
        assert STRATEGIES.keys().isdisjoint(self.kinds.values()), self.kinds
        random = Random(f"generators {self._version}")
        for task in self.tasks:
            if self.kinds[task.specs[-1].uid] == "pass" and random.random() < 0.9:
                self._made += 1
                uid = f"{NEW}{self._version}-{self._made}"
                task.specs.append(OperatorSpec(uid, uid, TimestampsOperator(uid, "ts", _FAR_BEHIND, SCHEMA)))

    def graph(self, max_parallelism: int) -> JobGraph:
        """Return the job graph, with the tasks in a random topological order."""
        ordered: list[_Task] = []
        while len(ordered) < len(self.tasks):
            ready = [
                task
                for task in self.tasks
                if task not in ordered and all(w.source in ordered for w in self.ways if w.target is task)
            ]
            ordered.append(self._random.choice(ready))
        number = {id(task): at for at, task in enumerate(ordered)}
        vertices = []
        for at, task in enumerate(ordered):
            source = task.specs[0] if isinstance(task.specs[0], SourceSpec) else None
            operators = tuple(spec for spec in task.specs if isinstance(spec, OperatorSpec))
            vertices.append(Vertex(at, task.parallelism, source, operators))
        lots = {task: self._random.random() for task in number.values()}
        ways = sorted(
            self.ways, key=lambda way: lots[number[id(way.source)]]
        )  # stable: edges with the same ends keep their order
        edges = (
            replace(way.edge, id=at, source=number[id(way.source)], target=number[id(way.target)])
            for at, way in enumerate(ways)
        )
        return JobGraph(tuple(vertices), tuple(edges), max_parallelism)


def changed(
    graph: JobGraph, shape: Shape, outside: Outside, seed: int, version: int, *, generators: bool = False
) -> JobGraph:
    """Return a version of the program of `shape`; 0 is the original. A version is the same at every parallelism.

    `generators`: the only change is that it has generators of watermarks.
    """
    if version == 0:
        return graph
    program = _Program(graph, shape, outside, seed, version)
    if generators:
        program.put_generators()
    else:
        program.change()
    return program.graph(graph.max_parallelism)


# ---- where rows in flight are ----------------------------------------------


@dataclass(frozen=True, slots=True)
class RowLocation:
    """A place for rows in flight, before the operator at `position` of a node's chain. `entry` defines their form."""

    node: int
    position: int
    entry: Input


class RowLocations:
    """Finds the place in the original program to which an edge of a changed one leads."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._at = {uid_of(i, at, kind): (i, at) for i, node in enumerate(shape) for at, kind in enumerate(node.chain)}

    def of(self, metadata: CheckpointMetadata) -> dict[int, RowLocation]:
        """Return the place for each edge of a checkpoint, by its id.

        Edges that lead only to new operators have none: they are forward, so no rows are in flight there.
        """
        uids = [vertex.uids for vertex in metadata.vertices]
        found: dict[int, RowLocation] = {}
        for edge in metadata.edges:
            first, last = edge, edge
            while all(uid.startswith(NEW) for uid in uids[first.source]):
                first = next(e for e in metadata.edges if e.target == first.source)
            while all(uid.startswith(NEW) for uid in uids[last.target]):
                following = next((e for e in metadata.edges if e.source == last.target), None)
                if following is None:
                    break
                last = following
            else:
                found[edge.id] = self._location(first, last, uids)
        return found

    def _location(self, first: EdgeLayout, last: EdgeLayout, uids: Sequence[Sequence[str]]) -> RowLocation:
        source, _ = next(self._at[uid] for uid in reversed(uids[first.source]) if uid in self._at)
        node, position = next(self._at[uid] for uid in uids[last.target] if uid in self._at)
        if source == node:
            return RowLocation(node, position, Input(node, FORWARD))
        ends = source, last.port, first.tag
        entries = (entry for entry in self._shape[node].inputs if (entry.node, entry.port, entry.tag) == ends)
        return RowLocation(node, position, next(entries))


# ---- why a job cannot continue ---------------------------------------------


def contradictions(operators: Sequence[OperatorState], in_flight: Set[Ends], graph: JobGraph) -> Iterator[str]:
    """Yield the reasons why `graph` cannot continue from a checkpoint with these operators and these edges with rows in
    flight.
    """
    for ends in in_flight - set(_ends(graph)):
        yield f"rows in flight from {ends[0]} to {ends[1]}"
    old = {operator.uid: operator for operator in operators}
    for spec in (spec for vertex in graph.vertices for spec in vertex.operators if spec.uid in old):
        subtasks = (old[spec.uid].subtasks[index] for index in old[spec.uid].running)
        held = {part.name for subtask in subtasks for part in subtask.parts}
        now = settings_of(spec.operator)
        if states.MORE in held and states.MORE not in {part for part, _, _ in now}:
            yield f"{spec.uid} has state {states.MORE}"
        if held and states.is_wider(old[spec.uid].settings) and not states.is_wider(now):
            yield f"{spec.uid} has state of wider types"
    finished = set[int]()
    for vertex in graph.vertices:
        shares = {spec.uid: _share(old, spec.uid) for spec in vertex.specs}
        if set(shares.values()) == {"fully"}:
            finished.add(vertex.id)
        elif "fully" in shares.values():
            yield f"of {', '.join(shares)} only some had finished"
    for edge in graph.edges:
        fed = graph.vertices[edge.target].specs[0].uid
        if edge.source not in finished and edge.target in finished:
            yield f"{fed} had finished, and is fed by what had not"
        elif edge.source not in finished and edge.partitioning is KEYED and _share(old, fed) == "partly":
            yield f"{fed} had finished in part, and keys may come to it"


def _share(operators: Mapping[str, OperatorState], uid: str) -> str:
    """Return whether an operator had finished: "fully", "partly", or "not"."""
    operator = operators.get(uid)
    if operator is None or not operator.finished:
        return "not"
    return "fully" if operator.fully_finished else "partly"


def _ends(graph: JobGraph) -> list[Ends]:
    specs = [vertex.specs for vertex in graph.vertices]
    return _numbered((specs[e.source][-1].uid, specs[e.target][0].uid, e.port, e.tag) for e in graph.edges)


def ends_in_flight(metadata: CheckpointMetadata) -> frozenset[Ends]:
    """Return the ends of the edges with rows in flight."""
    ids = {state.edge for state in metadata.channels}
    uids = [vertex.uids for vertex in metadata.vertices]
    ends = _numbered((uids[e.source][-1], uids[e.target][0], e.port, e.tag) for e in metadata.edges)
    return frozenset(found for found, edge in zip(ends, metadata.edges, strict=True) if edge.id in ids)


def _numbered(ends: Iterable[tuple[str, str, int, str | None]]) -> list[Ends]:
    seen: Counter[tuple[str, str, int, str | None]] = Counter()
    found = []
    for end in ends:
        found.append((*end, seen[end]))
        seen[end] += 1
    return found
