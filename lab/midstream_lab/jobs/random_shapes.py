"""The shapes of random jobs: which nodes they have, and what is added to some of them, each from a generator of its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from midstream.engine.operators.windows.window_factory import LATE
from midstream_lab.jobs import (
    timed,
)
from midstream_lab.jobs.days import DAYS
from midstream_lab.jobs.expiring import EXPIRING
from midstream_lab.jobs.key_types import KEY_LAYOUTS
from midstream_lab.jobs.lateness import LENIENT, OWN_GAPS
from midstream_lab.jobs.lookups import LOOKUPS
from midstream_lab.jobs.shapes import (
    BROADCAST,
    FORWARD,
    GLOBAL,
    KEYED,
    REBALANCE,
    SIDE,
    Input,
    Node,
    Shape,
    node_of,
    source_node,
)
from midstream_lab.jobs.states import BRIEF
from midstream_lab.jobs.timely import WITHIN_MS

_LAST: Final = ("pack", "stack", "couple", "sink", "total", *WITHIN_MS, "sorted")
"""The kinds of operators that only sinks read: which rows they emit depends on the order of arrival, or they make new ones."""


def random_shape(random: Random) -> Shape:
    """Draw a shape of one to three sources, up to five nodes downstream, and a sink for every output without a reader.

    Most shapes are small: most bugs need only two or three nodes, and large shapes take most of the time.
    """
    nodes: list[Node] = [
        source_node(
            *random.choice(((), (), ("pass",), ("times",), ("tight",), ("idle",), ("tight", "pass"))),
            rows_share=random.choice((0.1, 0.5, 1.0)),
        )
        for _ in range(random.choice((1, 1, 1, 2, 2, 3)))
    ]
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        kind = random.choice(("pass", "side", "tally", "count", "count", "count", "share", "timer", "windows"))
        inner = [index for index, node in enumerate(nodes) if "pack" not in node.chain]
        first = random.choice(inner)
        if kind in ("count", "timer", "windows"):
            ports = 1 if kind == "count" else 0
            more = [Input(random.choice(inner), KEYED, random.randint(0, ports)) for _ in range(random.randint(0, 2))]
            chain = (random.choice(tuple(timed.WINDOWS)), "pack") if kind == "windows" else (kind,)
            nodes.append(Node(chain, (Input(first, KEYED), *more)))
        elif kind == "share":
            other = random.choice(inner)
            nodes.append(Node((kind,), (Input(first, KEYED), Input(other, BROADCAST, port=1))))
        else:
            partitioning = random.choice((FORWARD, REBALANCE, REBALANCE, GLOBAL, KEYED))
            nodes.append(Node((kind,), (Input(first, partitioning),)))
    for index, node in enumerate(tuple(nodes)):
        read = {i.tag for reader in nodes for i in reader.inputs if i.node == index}
        for tag in (None, SIDE) if "side" in node.chain else (None, LATE) if "pack" in node.chain else (None,):
            if tag not in read or (random.random() < 0.1 and "pack" not in node.chain):
                nodes.append(Node(("sink",), (Input(index, random.choice((FORWARD, REBALANCE, GLOBAL)), 0, tag),)))
    return _without_doubled_broadcast(tuple(nodes))


def with_sieves(shape: Shape, random: Random) -> Shape:
    """Put a filter before some of the generators of watermarks that detect idle splits."""
    return tuple(
        replace(node, chain=("source", "sieve", *node.chain[1:]))
        if node.chain[:2] == ("source", "idle") and random.random() < 0.3
        else node
        for node in shape
    )


def with_tables(shape: Shape, random: Random) -> Shape:
    """Replace half of the timers by tables, and make some of their inputs second ones."""
    return tuple(
        replace(
            node,
            chain=("table",),
            inputs=(node.inputs[0], *(replace(entry, port=random.randrange(2)) for entry in node.inputs[1:])),
        )
        if node.chain == ("timer",) and random.random() < 0.5
        else node
        for node in shape
    )


def with_ends(shape: Shape, random: Random) -> Shape:
    """Replace a third of the timers by alarms on the wall clock, and sometimes add an operator that sums up its input."""
    nodes = [
        replace(node, chain=("alarm",)) if node.chain == ("timer",) and random.random() < 1 / 3 else node
        for node in shape
    ]
    if random.random() < 0.1:
        inner = [index for index, node in enumerate(nodes) if not {"pack", "sink"} & {*node.chain}]
        total = Node(("total",), (Input(random.choice(inner), KEYED),))
        nodes += [total, Node(("sink",), (Input(len(nodes), random.choice((FORWARD, REBALANCE, GLOBAL))),))]
    return tuple(nodes)


def with_running(shape: Shape, random: Random) -> Shape:
    """Replace a counting operator or windows by running aggregates, in one of 15 shapes."""
    found = [index for index, node in enumerate(shape) if node.chain[-1] in ("count", "pack", "stack")]
    if not found or random.random() >= 1 / 15:
        return shape
    index = random.choice(found)
    chain = ("running",) if shape[index].chain == ("count",) else (random.choice(("periodic", "first_rows")), "stack")
    return (*shape[:index], replace(shape[index], chain=chain), *shape[index + 1 :])


def with_expiring(shape: Shape, random: Random) -> Shape:
    """Replace a counting operator, in one of 12 shapes that have some, by a function whose states expire."""
    found = [index for index, node in enumerate(shape) if node.chain == ("count",)]
    if not found or random.random() >= 1 / 12:
        return shape
    index = random.choice(found)
    return (*shape[:index], replace(shape[index], chain=(EXPIRING,)), *shape[index + 1 :])


def with_row_windows(shape: Shape, random: Random) -> Shape:
    """Replace windows, in one of 15 shapes that have some, by windows that are given to a function with all their rows, or
    by sessions with gaps from a column.
    """
    found = [index for index, node in enumerate(shape) if {*node.chain} & {*timed.WINDOWS, *LENIENT}]
    if not found or random.random() >= 1 / 15:
        return shape
    index = random.choice(found)
    kind = f"rows_{LENIENT.get(shape[index].chain[0], shape[index].chain[0])}"
    chain = (OWN_GAPS if kind == "rows_session" and random.random() < 0.5 else kind, "stack")
    return (*shape[:index], replace(shape[index], chain=chain), *shape[index + 1 :])


def with_counted(shape: Shape, random: Random) -> Shape:
    """Add, in one of 15 shapes, windows by count of the rows of a node."""
    if random.random() >= 1 / 15:
        return shape
    made = {*_LAST, "plain", *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    entry = Input(random.choice(inner), KEYED)
    return (*shape, Node(("counted", "stack"), (entry,)), node_of("sink", Input(len(shape), REBALANCE)))


def with_early_results(shape: Shape, random: Random) -> Shape:
    """Replace windows of fixed size, in one of 15 shapes that have some, by windows with early results."""
    kinds = {
        "window": "early_window",
        "late_window": "early_window",
        "slide": "early_slide",
        "late_slide": "early_slide",
    }
    found = [index for index, node in enumerate(shape) if node.chain[0] in kinds]
    if not found or random.random() >= 1 / 15:
        return shape
    index = random.choice(found)
    chain = (kinds[shape[index].chain[0]], "stack")
    return (*shape[:index], replace(shape[index], chain=chain), *shape[index + 1 :])


def with_days(shape: Shape, random: Random, share: float = 1 / 15) -> Shape:
    """Add, to a share of the shapes, windows of local days with all kinds of aggregates, of the rows of one or two nodes."""
    if random.random() >= share:
        return shape
    made = {*_LAST, "plain", *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    entries = tuple(Input(index, KEYED) for index in random.sample(inner, min(len(inner), random.choice((1, 2)))))
    sinks = (Input(len(shape), random.choice((FORWARD, REBALANCE))), Input(len(shape), FORWARD, tag=LATE))
    windows = Node((random.choice(tuple(DAYS)), "stack"), entries)
    return (*shape, windows, *(Node(("sink",), (each,)) for each in sinks))


def with_states(shape: Shape, random: Random) -> Shape:
    """Replace some operators by users' functions with all kinds of state, and some windows by windows with allowed
    lateness; sometimes add keys of other types, or a join."""
    nodes = [_with_states(node, random) for node in shape]
    for index in range(len(shape)):
        if nodes[index].chain[-1] == "tags":
            nodes.append(Node(("plain", "sink"), (Input(index, REBALANCE, tag=BRIEF),)))
    made = {"pack", "stack", "sink", "total"}
    inner = [index for index, node in enumerate(nodes) if made.isdisjoint(node.chain)]
    partitioning = random.choice((FORWARD, REBALANCE, KEYED))
    if random.random() < 0.02:
        layout = random.choice(tuple(KEY_LAYOUTS))
        last = len(nodes)
        nodes += [Node((layout,), (Input(random.choice(inner), partitioning),)) for _ in range(2)]
        kind = random.choice(("typed plain", "pickled plain", "clocks plain", "join couple"))
        nodes.append(node_of(kind, Input(last, KEYED), Input(last + 1, KEYED, port=1)))
        nodes.append(node_of("sink", Input(last + 2, FORWARD)))
    elif random.random() < 0.02:
        pair = [Input(random.choice(inner), KEYED, port=port) for port in (0, 1)]
        nodes += [Node(("join", "couple"), tuple(pair)), node_of("sink", Input(len(nodes), REBALANCE))]
    return tuple(nodes)


def with_timely(shape: Shape, random: Random) -> Shape:
    """Sometimes add an operator that drops duplicates, or sorts rows by time, for the rows of one or two nodes."""
    if random.random() > 1 / 15:
        return shape
    made = {*_LAST, *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    kind = random.choice(("unique", "unique_near", "sorted"))
    entries = tuple(Input(index, KEYED) for index in random.sample(inner, min(len(inner), random.choice((1, 2)))))
    at = len(shape)
    main, late = Input(at, random.choice((FORWARD, REBALANCE))), Input(at, FORWARD, tag=LATE)
    sinks: dict[str, list[tuple[Input, ...]]] = {
        "unique": [(main,)],
        "unique_near": [(main,), (late,)],
        "sorted": [(main, late)],
    }
    return (*shape, Node((kind,), entries), *(Node(("sink",), inputs) for inputs in sinks[kind]))


def with_joins(shape: Shape, random: Random) -> Shape:
    """Add, in some shapes, a join that waits for event time."""
    if random.random() > 1 / 15:
        return shape
    made = {*_LAST, "plain", *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    pair = [Input(random.choice(inner), KEYED, port=port) for port in (0, 1)]
    kind = random.choice(("full_join", "anti_join", "asof_join", "window_join"))
    return (*shape, Node((kind, "couple"), tuple(pair)), node_of("sink", Input(len(shape), REBALANCE)))


def with_failing(shape: Shape, random: Random) -> Shape:
    """Sometimes add a function that fails for some of the rows of a node."""
    if random.random() > 1 / 15:
        return shape
    made = {*_LAST, *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    kind = random.choice(("failing", "failing_batches", "failing_process"))
    partitioning = KEYED if kind == "failing_process" else random.choice((FORWARD, REBALANCE, KEYED))
    entry = Input(random.choice(inner), partitioning)
    at = len(shape)
    sinks = (Input(at, random.choice((FORWARD, REBALANCE))), Input(at, REBALANCE, tag=SIDE))
    return (*shape, Node((kind,), (entry,)), *(Node(("sink",), (each,)) for each in sinks))


def with_enriching(shape: Shape, random: Random) -> Shape:
    """Join, in some shapes, the rows of a source, or those that a node passes on, with a table."""
    if random.random() > 1 / 15:
        return shape
    index = random.choice([at for at, node in enumerate(shape) if node.chain[0] in ("source", "pass")])
    chain = shape[index].chain
    chain = ("source", "enrich", *chain[1:]) if chain[0] == "source" else ("enrich", *chain[1:])
    return (*shape[:index], replace(shape[index], chain=chain), *shape[index + 1 :])


def with_lookups(shape: Shape, random: Random) -> Shape:
    """Sometimes replace an operator that forwards all rows by one that waits for a slow function, or add one."""
    if random.random() > 1 / 15:
        return shape
    chain = tuple(random.choices(LOOKUPS, k=random.choice((1, 1, 2))))
    found = [index for index, node in enumerate(shape) if node.chain == ("pass",)]
    if found:
        index = random.choice(found)
        return (*shape[:index], replace(shape[index], chain=chain), *shape[index + 1 :])
    made = {*_LAST, *KEY_LAYOUTS}
    inner = [index for index, node in enumerate(shape) if made.isdisjoint(node.chain)]
    entry = Input(random.choice(inner), random.choice((FORWARD, REBALANCE, KEYED)))
    return (*shape, Node(chain, (entry,)), node_of("sink", Input(len(shape), REBALANCE)))


def _with_states(node: Node, random: Random) -> Node:
    drawn = random.random()
    match node.chain:
        case ("count",) if drawn < 0.06:
            return replace(node, chain=(("typed",), ("pickled",))[drawn < 0.03])
        case ("share",) if drawn < 0.15:
            return replace(node, chain=("rules",))
        case ("timer",) | ("alarm",) if drawn < 0.3:
            return replace(node, chain=("clocks",))
        case ("side",) if drawn < 0.15:
            return replace(node, chain=("tags",))
        case (kind, "pack") if drawn < 0.15:
            return replace(node, chain=(f"late_{kind}", "stack"))
        case _:  # the others have no such variant
            return node


def _without_doubled_broadcast(shape: Shape) -> Shape:
    """Broadcast only sources: rows that reach a broadcast input twice would need a multiset there."""
    sources = [index for index, node in enumerate(shape) if "source" in node.chain]
    return tuple(
        replace(
            node,
            inputs=tuple(
                replace(i, node=sources[i.node % len(sources)]) if i.partitioning is BROADCAST else i
                for i in node.inputs
            ),
        )
        for node in shape
    )


def varied(shape: Shape, random: Random) -> Shape:
    """Replace some of the edges whose partitioning may be any."""
    return tuple(
        replace(node, inputs=tuple(_varied(entry, random) for entry in node.inputs))
        if node.chain[0] in ("pass", "side", "tally", "sink")
        else node
        for node in shape
    )


def _varied(entry: Input, random: Random) -> Input:
    if random.random() < 0.5:
        return entry
    partitioning = random.choice((REBALANCE, GLOBAL, KEYED, FORWARD, None))
    return replace(entry, partitioning=partitioning or REBALANCE, adapts=partitioning is None)
