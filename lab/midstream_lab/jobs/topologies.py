"""The jobs of runs: random shapes, the job graph of each, and its expected results.

The expectation is computed sequentially, from only the shape and a set of source rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Final

from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.base import Combiner, Operator
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.operators.windows.window_factory import LATE
from midstream_lab.jobs import (
    clocks,
    counted,
    early,
    end_operators,
    enriching,
    expiring,
    failing,
    joins,
    lateness,
    lookups,
    running,
    states,
    tables,
    timed,
    timely,
)
from midstream_lab.jobs.days import DAYS
from midstream_lab.jobs.joins import Joined
from midstream_lab.jobs.key_types import KEY_LAYOUTS, PLAIN, KeyLayout, Plain, Rekey
from midstream_lab.jobs.on_time import behind_timers, on_time_at
from midstream_lab.jobs.recorded_rows import SCHEMA, KeyCounter, Outside, Pass, Sieve, SimSource
from midstream_lab.jobs.shapes import (
    FORWARD,
    KEYED,
    REBALANCE,
    SIDE,
    Input,
    Node,
    Shape,
)
from midstream_lab.jobs.states import BRIEF, BRIEF_LAYOUT, Given
from midstream_lab.jobs.tally import Tally
from midstream_lab.jobs.timely import Sifted
from midstream_lab.slot_ledger_sink import RowLedgerSink


def with_parallelism(shape: Shape, limit: int, random: Random, same: bool, spread: bool = False) -> Shape:
    """Draw a parallelism from 1 to `limit` for each node: `limit` for all if `same`, otherwise for at least one. The
    ends of a forward edge get the same one. `spread`: each is `limit`, one more, or twice as much.
    """
    group = list(range(len(shape)))
    for index, node in enumerate(shape):
        for entry in node.inputs:
            if entry.partitioning is FORWARD and not entry.adapts:
                joined, kept = group[entry.node], group[index]
                group = [kept if g == joined else g for g in group]
    if spread:
        some = (limit, limit + 1, 2 * limit)
        first = random.randrange(3)
        drawn = {g: some[(first + i) % 3] for i, g in enumerate(dict.fromkeys(group))}
    else:
        drawn = {g: limit if same else random.randint(1, limit) for g in dict.fromkeys(group)}
        drawn[group[random.randrange(len(shape))]] = limit
    parallelism = [drawn[g] for g in group]
    return tuple(
        replace(
            node,
            parallelism=parallelism[index],
            inputs=tuple(
                replace(e, partitioning=FORWARD if parallelism[e.node] == parallelism[index] else REBALANCE)
                if e.adapts
                else e
                for e in node.inputs
            ),
        )
        for index, node in enumerate(shape)
    )


# ---- expectation -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected results for a set of source rows, by uid."""

    keys: Mapping[int, int]
    """The keys of all rows, by id."""
    counts: dict[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """For each keyed operator: the rows and the sum of their ids, by key."""
    broadcast: dict[str, frozenset[int]] = field(default_factory=dict)
    tallies: dict[str, Counter[int]] = field(default_factory=dict)
    """The row ids that each operator with state without a key has received."""
    sinks: dict[str, Counter[int]] = field(default_factory=dict)
    """The row ids of each sink, each as often as the sink must have it."""
    windowed: dict[str, tuple[str, Counter[int]]] = field(default_factory=dict)
    """The kind of each window operator, and the ids of its rows."""
    window_sinks: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """For each sink of a window operator: the operator, and whether the sink receives late rows."""
    totals: dict[str, Counter[int]] = field(default_factory=dict)
    """The ids of the rows of each operator that sums up its input."""
    total_sinks: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The sink of each of these operators, and its node."""
    given: dict[str, Given] = field(default_factory=dict)
    """The rows that operators with states of users' functions have received."""
    joined: dict[str, Joined] = field(default_factory=dict)
    join_sinks: dict[str, str] = field(default_factory=dict)
    """The join from which each sink receives pairs."""
    lenient: dict[str, tuple[str, Counter[int]]] = field(default_factory=dict)
    """The kind of each window operator with allowed lateness, and the ids of its rows."""
    lenient_sinks: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """The sinks of these operators, as in `window_sinks`."""
    sifted: dict[str, Sifted] = field(default_factory=dict)
    """The rows that operators which drop duplicates have received."""
    sifted_sinks: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """The sinks of these operators, as in `window_sinks`."""
    overdrawn: list[str] = field(default_factory=list)
    """The operators and inputs that hold rows which they cannot have received."""


def uid_of(node: int, position: int, kind: str) -> str:
    return f"{kind}{node}" if position == 0 else f"{kind}{node}.{position}"


def expectation(
    shape: Shape,
    rows: Mapping[str, Mapping[int, int]],
    held: Mapping[str, Counter[int]] = MappingProxyType({}),
    in_flight: Mapping[tuple[int, int, int], Counter[int]] = MappingProxyType({}),
) -> Expectation:
    """Compute the expected results. `rows`: for each source, the key by id of the rows that it has emitted.

    `held`: the ids in operators that hold rows back. `in_flight`: the ids on their way to a node's port or, within a
    node, to the operator at a position (an edge may be restored as another one with the same ends).
    """
    walk = _Walk(shape, rows, held, in_flight)
    for index, node in enumerate(shape):
        walk.through(index, node)
    return walk.expected


class _Walk:
    """Takes the rows of the sources through the nodes of a shape, in their order."""

    def __init__(
        self,
        shape: Shape,
        rows: Mapping[str, Mapping[int, int]],
        held: Mapping[str, Counter[int]],
        in_flight: Mapping[tuple[int, int, int], Counter[int]],
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._held = held
        self._in_flight = in_flight
        self._ordered = ordered_nodes(shape)
        self.expected = Expectation({row: key for part in rows.values() for row, key in part.items()})
        self._outputs: list[dict[str | None, Counter[int]]] = []
        """The outputs of each node so far, by side output."""
        self._makers: dict[int, str] = {}
        """The nodes that emit other rows than those of the sources, and the operators that make these."""

    def through(self, index: int, node: Node) -> None:
        is_made = any(entry.node in self._makers for entry in node.inputs)
        by_port = self._received(index, node, is_made)
        outputs = {None: by_port[0] + by_port[1] if by_port[1] else by_port[0], SIDE: Counter[int](), BRIEF: Counter()}
        for position, kind in enumerate(node.chain):
            uid = uid_of(index, position, kind)
            on_the_way = self._in_flight.get((index, 0, position)) if position else None
            if on_the_way and not is_made:
                outputs[None] = self._without(on_the_way, outputs[None], uid)
            self._operator(kind, uid, index, node, by_port, outputs)
        self._outputs.append(outputs)

    def _received(self, index: int, node: Node, is_made: bool) -> dict[int, Counter[int]]:
        """Return the rows that each port has received, without those in flight."""
        by_port: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
        for entry in node.inputs:
            comes = self._outputs[entry.node].get(entry.tag, Counter())
            by_port[entry.port] = by_port[entry.port] + comes if by_port[entry.port] else comes
        for port, came in by_port.items():
            on_the_way = self._in_flight.get((index, port, 0))
            if on_the_way and not is_made:
                by_port[port] = self._without(on_the_way, came, f"input {port} of {node.chain[0]}{index}")
        return by_port

    def _without(self, some: Counter[int], stream: Counter[int], where: str) -> Counter[int]:
        if not some <= stream:
            self.expected.overdrawn.append(where)
        return stream - some

    def _operator(  # noqa: PLR0912 - one arm for each kind of operator
        self,
        kind: str,
        uid: str,
        index: int,
        node: Node,
        by_port: Mapping[int, Counter[int]],
        outputs: dict[str | None, Counter[int]],
    ) -> None:
        """Apply an operator to `outputs`: at first the rows that reach it, afterwards those that it has emitted."""
        expected, stream = self.expected, outputs[None]
        match kind:
            case "source":
                outputs[None] = Counter(dict.fromkeys(self._rows[uid], 1))
            case "side" | "failing" | "failing_batches" | "failing_process":
                outputs[SIDE] = Counter({row: n for row, n in stream.items() if row % 3 == 0})
                outputs[None] = Counter({row: n for row, n in stream.items() if row % 3})
            case "count" | "running":
                expected.counts[uid] = _counted(stream, expected.keys)
            case "share":
                outputs[None] = by_port[0]
                expected.broadcast[uid] = frozenset(by_port[1])
                expected.counts[uid] = _counted(by_port[0], expected.keys)
            case "tally":
                expected.tallies[uid] = stream
            case "total":
                expected.totals[uid] = stream
                self._makers[index] = uid
            case "typed" | "pickled" | "rules":
                if kind == "rules":
                    outputs[None] = stream = by_port[0]
                in_order = kind != "rules" and self._ordered[index]
                layout, others = self._layout(node), frozenset(by_port[1])
                expected.given[uid] = Given(kind, stream, expected.keys, layout, others, in_order)
            case "tags":
                outputs[SIDE] = Counter({row: n for row, n in stream.items() if row % 3 == 0})
                outputs[BRIEF] = Counter({row: n for row, n in stream.items() if row % 3 == 1})
                outputs[None] = stream - outputs[SIDE] - outputs[BRIEF]
            case _ if kind in joins.HOW:
                expected.joined[uid] = Joined(
                    joins.HOW[kind], by_port[0], by_port[1], expected.keys, self._layout(node)
                )
                self._makers[index] = uid
            case _ if kind in lateness.LENIENT or kind in ("periodic", "first_rows", "counted"):
                expected.lenient[uid] = lateness.LENIENT.get(kind, kind), stream
                self._makers[index] = uid
            case "unique" | "unique_near":
                expected.sifted[uid] = Sifted(kind, stream, expected.keys)
                self._makers[index] = uid
            case "timer" | "alarm" | "table" | "clocks" | "sorted" | "lookup" | "lookup_in_order":
                if kind == "table":
                    expected.counts[uid] = _counted(stream, expected.keys)
                outputs[None] = self._without(self._held.get(uid, Counter()), stream, uid)
            case "window" | "slide" | "session":
                expected.windowed[uid] = kind, stream
                self._makers[index] = uid
            case "sink":
                self._sink(uid, index, node, stream)
            case _:  # the others forward all rows
                pass

    def _sink(self, uid: str, index: int, node: Node, stream: Counter[int]) -> None:
        expected = self.expected
        makers = {(self._makers[e.node], e.tag == LATE) for e in node.inputs if e.node in self._makers}
        summed = expected.totals.keys() & {maker for maker, _ in makers}
        if summed:
            expected.total_sinks[summed.pop()] = uid, index
        elif makers and min(makers)[0] in expected.joined:
            expected.join_sinks[uid] = makers.pop()[0]
        elif makers and min(makers)[0] in expected.sifted:
            expected.sifted_sinks[uid] = makers.pop()
        elif makers and min(makers)[0] in expected.lenient:
            expected.lenient_sinks[uid] = makers.pop()
        elif makers:
            expected.window_sinks[uid] = makers.pop()
        else:
            expected.sinks[uid] = stream

    def _layout(self, node: Node) -> KeyLayout:
        return key_layout_of(self._shape, node.inputs[0]) if node.inputs else PLAIN


def _counted(stream: Counter[int], key_of: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the number of rows and the sum of their ids, by key."""
    per_key: dict[int, tuple[int, int]] = {}
    for row, n in stream.items():
        key = key_of[row]
        count, total = per_key.get(key, (0, 0))
        per_key[key] = (count + n, total + n * row)
    return per_key


# ---- job graph -------------------------------------------------------------


def job_graph(
    shape: Shape,
    outside: Outside,
    sources: Sequence[SimSource],
    sink: RowLedgerSink,
    groups: int,
    drift_us: int | None = None,
) -> JobGraph:
    """Build the job graph of a shape; `sources` are in the order of its source nodes. `drift_us`: how far splits may be
    apart in event time; None: any distance.
    """
    remaining = list(sources)
    on_time, held_back = on_time_at(shape, sources), behind_timers(shape)
    vertices = []
    edges: list[Edge] = []
    ordered = ordered_nodes(shape)
    for index, node in enumerate(shape):
        layout = key_layout_of(shape, node.inputs[0]) if node.inputs else PLAIN
        spec: SourceSpec | None = None
        late_us = timed.DELAY_US if index in held_back else 0
        operators = []
        for position, kind in enumerate(node.chain):
            uid = uid_of(index, position, kind)
            if kind == "source":
                spec = SourceSpec(uid, uid, remaining.pop(0))
                continue
            place = ordered[index], on_time[index], late_us, layout
            made = _operator(kind, uid, outside, sink, *place, combines=combines(shape, index))
            if isinstance(made, timed.Timestamps) and spec is not None:
                made.splits_end = spec.source.splits_end
                made.strategy = replace(made.strategy, drift_us=drift_us)
            operators.append(OperatorSpec(uid, uid, made, sink.at(uid) if kind == "sink" else None))
        vertices.append(Vertex(index, node.parallelism, spec, tuple(operators)))
        combiner = operators[0].operator.combiner(()) if combines(shape, index) else None
        for entry in node.inputs:
            edges.append(replace(edge_of(shape, len(edges), index, entry), combiner=combiner))
    return JobGraph(tuple(vertices), tuple(edges), groups)


def combines(shape: Shape, index: int) -> bool:
    """Return whether the rows that reach a node may be combined: it begins with a window whose late rows are not
    read, whose state is not its rows, whose gaps are not in a column, and whose rows are at the times of the run.
    """
    kind = shape[index].chain[0]
    read = any(entry.node == index and entry.tag == LATE for node in shape for entry in node.inputs)
    return (
        kind in timed.WINDOWS or kind in lateness.LENIENT.keys() - {*lateness.OF_ROWS, lateness.OWN_GAPS, *DAYS}
    ) and not read


def combiner_of(shape: Shape, index: int) -> Combiner | None:
    """Return what combines the rows that reach a node."""
    if not combines(shape, index):
        return None
    kind = shape[index].chain[0]
    return timed.window(uid_of(index, 0, kind), lateness.LENIENT.get(kind, kind), combines=True).combiner(())


def key_layout_of(shape: Shape, entry: Input) -> KeyLayout:
    """Return the form of the rows of an input."""
    return BRIEF_LAYOUT if entry.tag == BRIEF else KEY_LAYOUTS.get(shape[entry.node].chain[-1], PLAIN)


def edge_of(shape: Shape, number: int, index: int, entry: Input) -> Edge:
    """Return the edge for an input of node `index`."""
    layout = key_layout_of(shape, entry)
    keys = layout.keys if entry.partitioning is KEYED else ()
    return Edge(number, entry.node, index, entry.partitioning, layout.schema, keys, entry.port, entry.tag)


_MIXES: Final = frozenset(
    (
        *("side", "timer", "alarm", "table", "total", "clocks", "tags", "unique", "unique_near", "sorted"),
        *("failing", "failing_batches", "failing_process", *lookups.LOOKUPS),
        *joins.HOW,
        *KEY_LAYOUTS,
    )
)
"""The kinds of operators whose output may have the rows of a key and a split in another order, or lack some."""


def ordered_nodes(shape: Shape) -> list[bool]:
    """Return for each node whether the rows of a key and a split reach it in order, without gaps."""
    ordered: list[bool] = []
    """Whether they also leave each node in order."""
    comes: list[bool] = []
    roots: list[list[int]] = []
    for index, node in enumerate(shape):
        root = [r for entry in node.inputs for r in roots[entry.node]] or [index]
        roots.append(root)
        comes.append(
            len(set(root)) == len(root)
            and all(
                ordered[entry.node] and entry.partitioning is not REBALANCE and not entry.adapts and entry.tag is None
                for entry in node.inputs
            )
        )
        ordered.append(comes[-1] and _MIXES.isdisjoint(node.chain))
    return comes


def _operator(  # noqa: PLR0912 - one arm for each kind of operator
    kind: str,
    uid: str,
    outside: Outside,
    sink: RowLedgerSink,
    is_ordered: bool,
    on_time: frozenset[int],
    late_us: int,
    layout: KeyLayout,
    *,
    combines: bool,
) -> Operator:
    """Return an operator of this kind. `layout`: the form of its input rows. `combines`: whether these are combined."""
    match kind:
        case "typed" | "pickled" | "rules" | "tags":
            return states.operator(kind, uid, outside, layout)
        case "clocks":
            return clocks.clocks(uid, outside, layout)
        case _ if kind in joins.HOW:
            return joins.Join(uid, outside, layout, joins.HOW[kind])
        case "couple":
            return joins.Couple(outside, layout)
        case "unique" | "unique_near" | "sorted":
            return timely.Timely(kind, uid, outside, frozenset() if late_us else on_time)
        case "lookup" | "lookup_in_order":
            return lookups.Lookup(kind, uid, outside)
        case "expiring":
            return expiring.expiring(uid, outside, frozenset() if late_us else on_time)
        case "stack":
            return lateness.Stack()
        case "enrich":
            return enriching.Enrich(uid, outside)
        case "plain":
            return Plain(outside, layout)
        case _ if kind in KEY_LAYOUTS:
            return Rekey(outside, KEY_LAYOUTS[kind])
        case "pass":
            return Pass(outside)
        case "sieve":
            return Sieve()
        case "side":
            return Pass(outside, SIDE)
        case "failing" | "failing_batches" | "failing_process":
            return failing.Failing(kind, uid, outside)
        case "count":
            return KeyCounter(outside, is_ordered=is_ordered, on_time=on_time, late_us=late_us)
        case "running":
            return running.Running(uid, outside)
        case "periodic" | "first_rows":
            return running.Periodic(uid, outside, kind)
        case "counted":
            return counted.Counted(uid, outside)
        case "share":
            return KeyCounter(outside, is_ordered=is_ordered, broadcast_port=1, on_time=on_time, late_us=late_us)
        case "times" | "tight" | "idle":
            return timed.timestamps(uid, kind, outside)
        case "timer":
            return timed.delay(uid, outside)
        case "alarm":
            return end_operators.alarm(uid, outside)
        case "total":
            return end_operators.total(uid, outside)
        case "table":
            return tables.hold(uid, outside)
        case "early_window" | "early_slide":
            return early.EarlyWindow(uid, outside, kind, combines=combines)
        case _ if kind in timed.WINDOWS or kind in lateness.LENIENT:
            return lateness.checked_window(uid, outside, kind, combines=combines)
        case "pack":
            return timed.Pack()
        case "tally":
            return Tally(outside)
        case "sink":
            return SinkOperator(uid, sink.at(uid), SCHEMA)
        case _:
            raise AssertionError(kind)
