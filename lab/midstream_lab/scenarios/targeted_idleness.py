"""Regions of scenarios whose source subtasks are idle between one discovery and the next."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from midstream.engine.operators.windows.window_factory import LATE
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import STALLS
from midstream_lab.jobs.shapes import FORWARD, KEYED, REBALANCE, Input, Shape, node_of, source_node
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.scenarios.scenario import Scenario, draw

_OTHER: Final = (source_node(rows_share=0.1), source_node("idle"), node_of("sink", Input(0, REBALANCE)))
"""Only sources with an odd number have splits that follow each other in event time."""
WATCHED: Final[tuple[Shape, ...]] = (
    (*_OTHER, node_of("count", Input(1, KEYED)), node_of("sink", Input(3, FORWARD))),
    (
        *_OTHER,
        node_of("pass", Input(1, FORWARD)),
        node_of("window pack", Input(3, KEYED)),
        node_of("sink", Input(4, FORWARD)),
        node_of("sink", Input(4, REBALANCE, tag=LATE)),
    ),
    (
        *_OTHER,
        node_of("pass", Input(1, FORWARD)),
        node_of("count", Input(3, KEYED), Input(1, KEYED)),
        node_of("sink", Input(4, FORWARD)),
    ),
    (
        *_OTHER,
        node_of("pass", Input(1, REBALANCE)),
        node_of("pass", Input(1, FORWARD), Input(1, FORWARD)),
        node_of("count", Input(3, KEYED), Input(4, KEYED), Input(1, KEYED)),
        node_of("sink", Input(5, FORWARD)),
    ),
    (
        *_OTHER,
        node_of("pass", Input(1, REBALANCE)),
        node_of("pass", Input(1, FORWARD), Input(3, FORWARD)),
        node_of("count", Input(4, KEYED)),
        node_of("sink", Input(5, FORWARD)),
    ),
    (
        *_OTHER,
        node_of("lookup", Input(1, FORWARD)),
        node_of("count", Input(3, KEYED), Input(1, KEYED)),
        node_of("sink", Input(4, FORWARD)),
    ),
)
"""A source on its own, by one way or by several of different lengths."""
_FAULTS: Final = ("kill_slot", "user_error", "kill_driver", "rescale", "stop", "checkpoint", "cut_control")


def watching(seed: int) -> Scenario:
    """Files of different times are found together while all subtasks are idle, and messages to slots are slow. In every
    other run the job fails, and some connections deliver nothing for a while. In a few runs splits have no end.
    """
    random = Random(f"watching {seed}")
    parallelism, is_disturbed, has_lulls = random.choice((2, 3, 4)), seed % 2 == 1, seed % 10 == 4
    drawn = draw(seed, topology="splits", parallelism=parallelism, faults=_FAULTS if is_disturbed else ())
    shape = with_parallelism(WATCHED[seed // 2 % len(WATCHED)], parallelism, random, same=random.random() < 0.5)
    faults = list(drawn.faults)
    if is_disturbed:
        stalls = random.choice((0, 3, 6))
        faults += (Fault(random.randrange(50, 800), STALLS, random.randrange(1 << 20)) for _ in range(stalls))
    tempo = replace(
        drawn.tempo,
        mail_us=random.choice((5, 40)),
        control_us=random.choice((400, 5000)),
        data_us=random.choice((20, 200, 3000)),
        io_us=100,
        clock_tick_us=0,
    )
    return replace(
        drawn,
        shape=shape,
        rescaled=None,
        is_watched=not has_lulls,
        has_lulls=has_lulls,
        blocking=has_lulls or drawn.blocking,
        faults=tuple(sorted(faults, key=lambda fault: fault.step)),
        tempo=tempo,
        splits=random.choice((6, 9, 12)),
        rounds=random.choice((2, 3, 4)),
        readers=12 if has_lulls else random.choice((1, 1, 2)),
        rows=random.choice((25, 50)),
        batch_rows=random.choice((1, 3)),
        sink_rows=0,
        row_us=0,
        pool_buffers=1024,
        interval_s=random.choice((0.002, 0.02)),
        timeout_s=60.0,
        key_groups=max(7, drawn.key_groups),
    )
