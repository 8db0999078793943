"""Shapes of jobs: their parts, and the shapes that have a name.

A `Shape` is data: nodes in topological order, each a chain of operator kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.operators.windows.window_factory import LATE
from midstream_lab.jobs.states import BRIEF

SIDE: Final = "side"
FORWARD, KEYED, REBALANCE, BROADCAST, GLOBAL = (
    Partitioning.FORWARD,
    Partitioning.KEYED,
    Partitioning.REBALANCE,
    Partitioning.BROADCAST,
    Partitioning.GLOBAL,
)


@dataclass(frozen=True, slots=True)
class Input:
    node: int
    partitioning: Partitioning
    port: int = 0
    tag: str | None = None
    adapts: bool = False
    """Whether the partitioning is chosen as for streams that do not set one: forward between equal parallelisms,
    otherwise rebalance.
    """


@dataclass(frozen=True, slots=True)
class Node:
    """A chain of operators. The kinds of operators in `chain` are:

    "source", "sieve" (removes the chaff of its source, directly after it), "pass", "side" (rows whose id is divisible by 3 go to the side output), "count" (keyed), "share" (keyed on
    port 0, broadcast state of port 1), "times", "tight", "idle" (watermarks), "timer" (keyed, holds rows until a timer
    fires), "alarm" (the same by the wall clock), "total" (keyed, emits at its end how many rows it has received),
    "table" (the same as "timer" in tables, on both ports, with a count of each key), "window", "slide", "session"
    (keyed, late rows go to a side output) followed by "pack" (windows as rows), "tally" (state without a key), "sink";

    "running" ("count" by running aggregates), "periodic", "first_rows" (the rows of each key at multiples of event time) followed by
    "stack",

    "typed", "pickled" (keyed, states of all kinds), "rules" ("share" as a user's function), "clocks" (keyed, holds rows
    by event time and the wall clock), "tags" (side outputs `SIDE` and `BRIEF` of a user's function), "join", "full_join",
    "anti_join", "asof_join", "window_join" (keyed, of both ports) followed by "couple" (their results as rows),
    "late_window", "late_slide", "late_session" (with allowed lateness), "rows_window", "rows_slide", "rows_session" (the
    same, by a function that gets all rows), "early_window", "early_slide" (with early results), "gap_session" (sessions with
    gaps from a column), "counted" (windows by count), "days_00" and further ones (windows of local days, see `days`), all
    followed by "stack" (their emissions as rows), "unique", "unique_near" (keyed, drop duplicates, the second those that are
    near by event time), "sorted" (keyed, by event time); late rows of the last two go to a side output, "expiring" (keyed,
    states that expire), "lookup",
    "lookup_in_order" (a slow function), "failing",
    "failing_batches" and "failing_process" (keyed; functions on rows, on batches and with state, which fail for the rows
    that "side" takes aside), "enrich" (a join with a table that changes, which passes on all rows as they are).

    If a chain ends with one of `KEY_LAYOUTS`, its rows are keyed by other columns, and its readers begin with a keyed user's
    function or a join. "plain" converts them to ordinary rows again.
    """

    chain: tuple[str, ...]
    inputs: tuple[Input, ...] = ()
    parallelism: int = 1
    rows_share: float = 1.0
    """The number of rows of a source, relative to the scenario's."""


Shape = tuple[Node, ...]


def source_node(*more: str, rows_share: float = 1.0) -> Node:
    return Node(("source", *more), rows_share=rows_share)


def node_of(chain: str, *inputs: Input) -> Node:
    return Node(tuple(chain.split()), inputs)


def of_two(
    first: str,
    second: str,
    chain: str,
    sink: Partitioning,
    *,
    late: Partitioning | None = None,
    port: int = 0,
    rows_share: float = 0.5,
) -> Shape:
    """Return a chain that reads two sources by key, the second one at `port`, and the sinks of its rows and its late rows.

    `first`, `second`: the operators after each source. `rows_share`: the rows of the second source.
    """
    return (
        source_node(*first.split()),
        source_node(*second.split(), rows_share=rows_share),
        node_of(chain, Input(0, KEYED), Input(1, KEYED, port=port)),
        node_of("sink", Input(2, sink)),
        *(() if late is None else (node_of("sink", Input(2, late, tag=LATE)),)),
    )


TIMED_SOURCES: Final[Shape] = (source_node("tight"), source_node("idle", rows_share=0.5))
"""What the drawn nodes of the shape "days" read."""
COMBINED: Final[Mapping[str, Shape]] = {
    "combined_window": of_two("tight", "times", "window pack", FORWARD),
    "combined_slide": of_two("pass tight", "idle", "slide pack", REBALANCE),
    "combined_session": of_two("tight", "tight", "session pack", GLOBAL),
    "combined_late_slide": of_two("tight", "idle", "late_slide stack", FORWARD),
    "combined_late_session": of_two("idle", "tight", "late_session stack", REBALANCE),
}
"""The shapes in which rows are combined before they are sent: no node reads the windows' late rows, and none counts the
rows before these windows, since a combined batch does not have the numbers.
"""
SHAPES: Final[Mapping[str, Shape]] = {
    "pipeline": (source_node("pass"), node_of("pass", Input(0, REBALANCE)), node_of("sink", Input(1, REBALANCE))),
    "keyed": (source_node(), node_of("count", Input(0, KEYED)), node_of("sink", Input(1, FORWARD))),
    "union": (
        source_node(),
        source_node("pass", rows_share=0.3),
        source_node(),
        node_of("count", Input(0, KEYED), Input(1, KEYED), Input(2, KEYED)),
        node_of("sink", Input(3, REBALANCE)),
    ),
    "multi_input": of_two("", "", "count", KEYED, port=1),
    "broadcast": (
        source_node(),
        source_node(rows_share=0.2),
        node_of("share", Input(0, KEYED), Input(1, BROADCAST, port=1)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "keyed_broadcast": (
        source_node(),
        source_node(rows_share=0.2),
        node_of("count", Input(0, KEYED)),
        node_of("share", Input(2, KEYED), Input(1, BROADCAST, port=1)),
        node_of("sink", Input(3, GLOBAL)),
    ),
    "same_upstream": (
        source_node("pass"),
        node_of("pass", Input(0, REBALANCE)),
        node_of("count", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "held": (  # at node 3, the keyed rows of node 1 wait for those that node 1 broadcasts
        source_node("pass"),
        node_of("pass", Input(0, FORWARD)),
        node_of("pass", Input(1, KEYED)),
        node_of("share", Input(2, KEYED), Input(1, BROADCAST, port=1)),
        node_of("sink", Input(3, REBALANCE)),
    ),
    "mixed": (
        source_node("side"),
        source_node(rows_share=0.4),
        node_of("count", Input(0, KEYED), Input(1, KEYED)),
        node_of("pass", Input(0, REBALANCE, tag=SIDE)),
        node_of("share", Input(2, KEYED), Input(1, BROADCAST, port=1)),
        node_of("sink", Input(3, GLOBAL)),
        node_of("pass sink", Input(4, FORWARD)),
        node_of("sink", Input(0, FORWARD), Input(1, REBALANCE)),
    ),
    "window": of_two("times", "times", "window pack", FORWARD, late=REBALANCE),
    "sliding": of_two("tight", "idle", "slide pack", FORWARD, late=REBALANCE),
    "session": of_two("times", "tight", "session pack", REBALANCE, late=GLOBAL),
    "timers": (
        source_node("tight"),
        source_node("idle", rows_share=0.3),
        node_of("timer", Input(0, KEYED), Input(1, KEYED)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "quiet": (
        source_node("idle"),
        node_of("timer", Input(0, KEYED)),
        node_of("count", Input(1, KEYED)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "quiet_twice": (
        source_node("idle"),
        node_of("timer", Input(0, KEYED)),
        node_of("count", Input(1, KEYED), Input(0, KEYED, port=1)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "alarms": (
        source_node(),
        source_node(rows_share=0.3),
        node_of("alarm", Input(0, KEYED), Input(1, KEYED)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "totals": (
        source_node(rows_share=0.1),
        source_node(),
        node_of("total", Input(0, KEYED)),
        node_of("count", Input(1, KEYED)),
        node_of("sink", Input(2, REBALANCE)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "tables": (
        source_node("tight"),
        source_node("idle", rows_share=0.3),
        node_of("table", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "running": (
        source_node("tight"),
        source_node("idle", rows_share=0.3),
        node_of("running", Input(0, KEYED), Input(1, KEYED)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(2, REBALANCE)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "periodic": of_two("tight", "idle", "periodic stack", FORWARD, late=REBALANCE),
    "first_rows": of_two("tight", "idle", "first_rows stack", FORWARD, late=REBALANCE),
    "splits": (
        source_node("tight"),
        source_node("pass", "tight", rows_share=0.5),
        node_of("window pack", Input(0, KEYED), Input(1, KEYED)),
        node_of("count", Input(0, KEYED)),
        node_of("sink", Input(2, FORWARD)),
        node_of("sink", Input(2, REBALANCE, tag=LATE)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "tally": (
        source_node(),
        source_node(rows_share=0.3),
        node_of("tally", Input(0, REBALANCE, adapts=True), Input(1, REBALANCE)),
        node_of("tally", Input(2, GLOBAL)),
        node_of("sink", Input(3, REBALANCE, adapts=True)),
    ),
    "adapting": (
        source_node("tight"),
        node_of("pass", Input(0, REBALANCE, adapts=True)),
        node_of("pass", Input(1, REBALANCE, adapts=True)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(1, REBALANCE, adapts=True)),
        node_of("sink", Input(3, REBALANCE, adapts=True)),
    ),
    "typed": (
        source_node(),
        source_node(rows_share=0.5),
        node_of("typed", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "expiring": (
        source_node("tight"),
        source_node("times", rows_share=0.5),
        node_of("expiring", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "pickled": (
        source_node(),
        source_node(rows_share=0.5),
        node_of("pickled", Input(0, KEYED), Input(1, KEYED)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "rules": (
        source_node(),
        source_node(rows_share=0.3),
        node_of("rules", Input(0, KEYED), Input(1, BROADCAST, port=1)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "clocks": (
        source_node("tight"),
        source_node("times", rows_share=0.3),
        node_of("clocks", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "tags": (
        source_node("tags"),
        node_of("tags", Input(0, KEYED)),
        node_of("sink", Input(1, FORWARD)),
        node_of("sink", Input(0, FORWARD, tag=SIDE), Input(1, REBALANCE, tag=SIDE)),
        node_of("plain", Input(0, KEYED, tag=BRIEF), Input(1, REBALANCE, tag=BRIEF)),
        node_of("sink", Input(4, REBALANCE)),
    ),
    "join": of_two("tight", "tight", "join couple", FORWARD, port=1),
    "unique": of_two("", "pass", "unique", REBALANCE),
    "unique_near": of_two("tight", "idle", "unique_near", FORWARD, late=REBALANCE),
    "sorted": (
        source_node("tight"),
        source_node("idle", rows_share=0.5),
        node_of("sorted", Input(0, KEYED), Input(1, KEYED)),
        node_of("sink", Input(2, REBALANCE), Input(2, FORWARD, tag=LATE)),
    ),
    "lookup": (
        source_node("tight"),
        source_node("idle", rows_share=0.5),
        node_of("lookup", Input(0, REBALANCE), Input(1, REBALANCE)),
        node_of("timer", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "lookup_in_order": (
        source_node("tight"),
        source_node(rows_share=0.5),
        node_of("lookup lookup_in_order", Input(0, FORWARD), Input(1, REBALANCE)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "full_join": of_two("tight", "tight", "full_join couple", FORWARD, port=1),
    "anti_join": of_two("tight", "tight", "anti_join couple", REBALANCE, port=1),
    "asof_join": of_two("tight", "tight", "asof_join couple", FORWARD, port=1),
    "window_join": of_two("tight", "tight", "window_join couple", FORWARD, port=1),
    "late_window": of_two("tight", "idle", "late_window stack", FORWARD, late=REBALANCE),
    "late_slide": of_two("tight", "idle", "late_slide stack", REBALANCE, late=FORWARD),
    "late_session": of_two("tight", "idle", "late_session stack", REBALANCE, late=FORWARD),
    "early_window": of_two("tight", "idle", "early_window stack", FORWARD, late=REBALANCE),
    "early_slide": of_two("tight", "tight", "early_slide stack", REBALANCE),
    "rows_window": (
        source_node("tight"),
        node_of("rows_window stack", Input(0, KEYED)),
        node_of("sink", Input(1, REBALANCE)),
        node_of("sink", Input(1, FORWARD, tag=LATE)),
    ),
    "rows_slide": of_two("tight", "idle", "rows_slide stack", FORWARD, late=REBALANCE),
    "rows_session": of_two("idle", "tight", "rows_session stack", REBALANCE, late=FORWARD),
    "gap_session": of_two("tight", "idle", "gap_session stack", FORWARD, late=REBALANCE),
    "counted": of_two("tight", "idle", "counted stack", REBALANCE),
    "by_zone": of_two("by_zone", "by_zone", "typed plain", FORWARD, port=1),
    "by_text": (
        source_node("tight", "by_text"),
        node_of("clocks plain", Input(0, KEYED)),
        node_of("count", Input(1, KEYED)),
        node_of("sink", Input(2, FORWARD)),
    ),
    "by_time": of_two("tight by_time", "tight by_time", "join couple", REBALANCE, port=1),
    "by_flag": (
        source_node("tight", "by_flag"),
        node_of("pickled plain", Input(0, KEYED)),
        node_of("sink", Input(1, REBALANCE)),
    ),
    "by_two": (
        source_node("tight", "by_two"),
        source_node("tight", "by_two", rows_share=0.5),
        node_of("typed plain", Input(0, KEYED)),
        node_of("join couple", Input(0, KEYED), Input(1, KEYED, port=1)),
        node_of("sink", Input(2, REBALANCE)),
        node_of("sink", Input(3, REBALANCE)),
    ),
    "by_id": (
        source_node("by_id"),
        node_of("pickled plain", Input(0, KEYED)),
        node_of("sink", Input(1, REBALANCE)),
    ),
    "failing": (
        source_node("pass"),
        source_node("failing_batches", rows_share=0.5),
        node_of("failing", Input(0, REBALANCE), Input(1, KEYED)),
        node_of("sink", Input(2, FORWARD)),
        node_of("count", Input(2, KEYED, tag=SIDE), Input(1, KEYED, tag=SIDE)),
        node_of("failing_process", Input(0, KEYED)),
        node_of("sink", Input(4, REBALANCE), Input(5, FORWARD)),
        node_of("sink", Input(5, REBALANCE, tag=SIDE)),
    ),
    "enriched": (
        source_node("enrich", "tight"),
        source_node("pass", rows_share=0.5),
        node_of("enrich", Input(0, REBALANCE), Input(1, KEYED)),
        node_of("count", Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    ),
    "finishing": (
        source_node(rows_share=0.05),
        source_node(),
        node_of("pass", Input(0, FORWARD)),
        node_of("count", Input(2, KEYED), Input(1, KEYED, port=1)),
        node_of("sink", Input(0, FORWARD)),
        node_of("sink", Input(3, REBALANCE)),
    ),
}
