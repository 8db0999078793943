"""One run as data, drawn by a seed or requested by a user. A run depends on its scenario and on nothing else.

This is swarm testing: every seed enables a random subset of faults and sizes, so that each run is
extreme in some respects and ordinary in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from midstream.simulation.faults import IN_FLIGHT, RECOVERING, Fault
from midstream.simulation.world import Tempo
from midstream_lab.fault_kinds import (
    BACKLOGGED,
    CLUSTER_GONE,
    COMMITTING,
    FAULTS,
    HANGS,
    LEAVING,
    LOADS_FAIL,
    LONG_CALL,
    RARE,
    SAVEPOINTS,
    STALLS,
    WITHOUT_CHECKPOINTS,
)
from midstream_lab.jobs.random_shapes import (
    random_shape,
    varied,
    with_counted,
    with_days,
    with_early_results,
    with_ends,
    with_enriching,
    with_expiring,
    with_failing,
    with_joins,
    with_lookups,
    with_row_windows,
    with_running,
    with_sieves,
    with_states,
    with_tables,
    with_timely,
)
from midstream_lab.jobs.shapes import COMBINED, SHAPES, TIMED_SOURCES, Shape
from midstream_lab.jobs.topologies import with_parallelism

CHECKPOINTS_MAX: Final = 30
"""The approximate number of checkpoints above which a run finds nothing new, and only takes longer."""

INLINE_BYTES: Final = (0, 0, 1500, 64 * 2**10)
"""The values of `inline_bytes`, chosen by seed: all state is in files, or some of it, or none."""

ROWS: Final = {1: (10, 25, 50), 3: (25, 50, 100), 10: (50, 100, 200), 50: (100, 200, 400)}
"""The possible numbers of rows, by the rows in a batch: batches, not rows, take time and can be reordered."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    topology: str
    shape: Shape
    rescaled: Shape | None
    """The shape, at another parallelism, with which the job continues after a stop or the death of its driver."""
    rows: int
    splits: int
    keys: int
    skew: float
    text_bytes: int
    blocking: bool
    rounds: int
    readers: int
    key_groups: int
    buffer_bytes: int
    pool_buffers: int
    batch_rows: int
    wire_bytes: int
    interval_s: float | None
    """None: never, unless a checkpoint is waited for."""
    timeout_s: float
    min_pause_s: float
    retained: int
    inline_bytes: int
    sink_rows: int
    sink_pause_s: float
    tempo: Tempo
    faults: tuple[Fault, ...]
    aligned_timeout_s: float | None = None
    has_checkpoints: bool = True
    queue_time_s: float | None = None
    row_us: int = 0
    """The time that user functions take for a row."""
    tolerable_failures: int = 1000
    """The number of consecutive failed checkpoints that the job tolerates."""
    changes: float = 0.0
    """The share of its starts that have a changed program."""
    new_generators: bool = False
    """Whether changed programs differ in generators of watermarks, which the original does not have, and in nothing else."""
    small_chunks: bool = False
    """Whether chunks are small; a tenth of the other runs have small chunks by chance (`midstream.simulation.chunk_sizes`)."""
    on_disk: bool = False
    """Whether state lies on the slots' local disks; in a tenth of the other runs it does by chance (`local_disk`)."""
    is_scaling: bool = False
    """Whether the job scales itself; a tenth of the other runs do by chance (`autoscaling`)."""
    combined_rows_min: int = 0
    """The rows from which on every batch is combined; 0: that is drawn, and that more than a share of them must be saved."""
    on_slots: float = 0.0
    """The share of the sinks that commit on slots."""
    is_scant: bool = False
    """Whether a slot has no buffer more than its tasks need, whatever `pool_buffers` is."""
    has_lulls: bool = False
    """Whether every source that may be idle has no end and many lulls; otherwise that is drawn."""
    is_watched: bool = False
    """Whether every source that may be idle has splits that end, like the files of a directory that is watched; all splits
    of a discovery are later than those found before, and some come after a pause. Otherwise that is drawn."""
    drift_us: int | None = None
    """How far splits may be apart in event time; None: any distance."""
    target: str = ""
    """The kind of real targets that the job's sinks write to as well (`real_targets.TARGETS`); none if it is empty."""
    restart_delay_s: float = 0.001
    """The pause before the first restart; later ones are up to ten times as long."""
    heartbeat_timeout_s: float = 3.0
    steps_max: int = 400_000


def draw(
    seed: int,
    *,
    topology: str = "random",
    parallelism: int | None = None,
    rescale_to: int | None = None,
    faults: Sequence[str] | None = None,
    rows: int | None = None,
) -> Scenario:
    """Draw the scenario of a seed. Arguments that are given are not drawn; `faults` are the kinds to draw from."""
    random = Random(f"scenario {seed}")
    choice = random.choice
    base, shape, rescaled, clock_tick_us = _shapes(random, seed, topology, parallelism, rescale_to)
    limit = max(node.parallelism for node in shape)
    buffer_bytes = choice((4096, 4096, 8192, 32768))
    batch_rows = choice(tuple(ROWS))
    count = rows if rows is not None else choice(ROWS[batch_rows])
    mode = Random(f"mode {seed}")
    aligned_timeout_s = mode.choice((None, 0.0, 0.0, 0.001, 0.01))
    has_checkpoints = rescaled is not None or faults is not None or mode.random() < 0.85
    drawn = _first_faults(seed, faults, has_checkpoints, count)
    if rescaled is not None and (faults is None or rescale_to is not None):
        kind = "stop" if rescale_to is not None else choice(("stop", "stop", "kill_driver", "stop_driver"))
        drawn = tuple(sorted((*drawn, Fault(random.randrange(120, 600), kind, 0)), key=lambda fault: fault.step))
    if faults is None:
        drawn = _with_more_faults(drawn, seed, has_checkpoints, count)
    scenario = Scenario(
        seed=seed,
        topology=topology,
        shape=shape,
        rescaled=rescaled,
        rows=count,
        splits=choice((1, 2, 3, 7)),
        keys=choice((1, 3, 10, 50)),
        skew=choice((0.0, 0.0, 0.9)),
        text_bytes=choice((0, 10, 200, 2000)),
        blocking=random.random() < 0.5,
        rounds=choice((1, 1, 2, 3)),
        readers=choice((1, 1, 2)),
        key_groups=max(choice((4, 7, 16, 128)), limit, *(node.parallelism for node in rescaled or ())),
        buffer_bytes=buffer_bytes,
        pool_buffers=choice((0, 0, 16, 1024)),
        batch_rows=batch_rows,
        wire_bytes=choice((2048, 16384, 262144)),
        interval_s=(interval_s := choice((0.0005, 0.002, 0.005, 0.02))),
        timeout_s=choice((10.0, 60.0) if clock_tick_us else (0.2, 1.0, 60.0)),
        min_pause_s=choice((0.0, 0.0, 0.002)),
        retained=choice((1, 2, 3)),
        inline_bytes=INLINE_BYTES[seed % len(INLINE_BYTES)],
        sink_rows=choice((0, 0, 1, 10)),
        sink_pause_s=choice((0.0005, 0.003, 0.01)),
        tempo=Tempo(
            mail_us=choice((5, 40, 400)),
            control_us=choice((50, 400, 5000)),
            data_us=choice((20, 200, 3000)),
            io_us=choice((100, 2000, 10_000)),
            clock_tick_us=clock_tick_us,
            interleave=choice((0.0, 0.0, 0.2)),
        ),
        faults=drawn,
        aligned_timeout_s=aligned_timeout_s,
        queue_time_s=Random(f"queue {seed}").choice((None, None, 0.0002, 0.002, 0.01)),
        row_us=Random(f"slow {seed}").choice((0, 0, 0, 1000, 4000)),
        has_checkpoints=has_checkpoints,
    )
    scenario = replace(scenario, interval_s=max(interval_s, _least_s(scenario) / CHECKPOINTS_MAX))
    if topology == "random" and parallelism is None and rescale_to is None and faults is None and rows is None:
        return _with_more(scenario, base, seed)
    deep = Random(f"deep {seed}")
    if rescale_to is not None and deep.random() < 0.6:
        scenario = with_backlog(scenario, deep, struck=faults is None or RECOVERING in faults)
        return scenario if rows is None else replace(scenario, rows=rows)
    return scenario


def _shapes(
    random: Random, seed: int, topology: str, parallelism: int | None, rescale_to: int | None
) -> tuple[Shape, Shape, Shape | None, int]:
    """Draw the shape without a parallelism, at that of the first start, and at that of later starts (or None); and the
    time that reading the clock takes.
    """
    limit = parallelism or random.choice((1, 2, 2, 2, 3, 3, 4))
    if topology == "random":
        base = with_ends(with_tables(random_shape(random), Random(f"tables {seed}")), Random(f"ends {seed}"))
        base = with_states(base, Random(f"states {seed}"))
        base = with_timely(base, Random(f"timely {seed}"))
        base = with_joins(base, Random(f"joins {seed}"))
        base = with_running(base, Random(f"running {seed}"))
        base = with_expiring(base, Random(f"expiring {seed}"))
        base = with_row_windows(base, Random(f"row windows {seed}"))
        base = with_failing(base, Random(f"failing {seed}"))
        base = with_lookups(base, Random(f"slow answers {seed}"))
        base = with_enriching(base, Random(f"enriching {seed}"))
        base = with_counted(base, Random(f"counted {seed}"))
        base = with_early_results(base, Random(f"early results {seed}"))
        base = with_days(base, Random(f"local days {seed}"))
    elif topology == "days":
        base = with_days(TIMED_SOURCES, Random(f"local days {seed}"), share=1)
    else:
        base = COMBINED[topology] if topology in COMBINED else SHAPES[topology]
    base = with_sieves(base, Random(f"sieves {seed}"))
    wide = Random(f"wide {seed}")
    if parallelism is None and wide.random() < 0.05:
        limit = wide.choice((5, 6, 7, 8))
    if wide.random() < 0.3:
        base = varied(base, wide)
    spread = parallelism is None and limit <= 4 and wide.random() < 0.1
    shape = with_parallelism(base, limit, random, same=parallelism is not None, spread=spread)
    clock_tick_us = random.choice((0, 0, 0, 100, 2000))
    rescaled = None
    if rescale_to is not None:
        rescaled = with_parallelism(base, rescale_to, random, same=True)
    elif parallelism is None and random.random() < 0.5:
        to = random.choice((1, 2, 3, 4)) if wide.random() < 0.9 else wide.choice((5, 6, 7, 8))
        rescaled = with_parallelism(base, to, random, same=False)
    return base, shape, rescaled, clock_tick_us


def _first_faults(seed: int, given: Sequence[str] | None, has_checkpoints: bool, rows: int) -> tuple[Fault, ...]:
    kinds = tuple(f for f in FAULTS if f not in (*SAVEPOINTS, *RARE)) if given is None else tuple(given)
    if not has_checkpoints:
        kinds = tuple(kind for kind in kinds if kind in WITHOUT_CHECKPOINTS)
    return draw_faults(Random(f"faults {seed}"), kinds, rows)


def _with_more_faults(drawn: tuple[Fault, ...], seed: int, has_checkpoints: bool, rows: int) -> tuple[Fault, ...]:
    """Add faults of further kinds. Each kind has its own random source, so that a new kind does not change the others."""
    savepoints = SAVEPOINTS if has_checkpoints else tuple(kind for kind in SAVEPOINTS if kind in WITHOUT_CHECKPOINTS)
    drawn = with_savepoints(drawn, Random(f"savepoints {seed}"), savepoints, rows)
    kinds = (HANGS, LONG_CALL) if has_checkpoints else (LONG_CALL,)
    drawn = with_hangs(drawn, Random(f"hangs {seed}"), kinds, rows)
    drawn = with_stalls(drawn, Random(f"stalls {seed}"), rows)
    drawn = with_cluster_gone(drawn, Random(f"cluster {seed}"), rows)
    drawn = with_leaving(drawn, Random(f"leaving {seed}"), rows)
    return with_rare(drawn, Random(f"rare {seed}"), RARE, rows) if has_checkpoints else drawn


def _least_s(scenario: Scenario) -> float:
    """Return the least time that the run takes, in the world's time: that of its slowest node."""
    functions_s = scenario.rows * scenario.row_us / 1e6
    sink_s = scenario.rows / scenario.sink_rows * scenario.sink_pause_s if scenario.sink_rows else 0.0
    return max(functions_s, sink_s)


BEHIND: Final = 0.27
"""The share of runs without given arguments that have a backlog, fail, and are rescaled in the middle of recovery."""

BEHIND_NODES_MAX: Final = 9
"""The largest shape of such a run, in nodes: larger ones take most of the time and find nothing more."""

CHANGED: Final = 0.25
"""The share of runs without given arguments, but with checkpoints, that have starts with changed programs."""

COMMIT_ON_SLOTS: Final = 0.25
"""The share of runs without given arguments that have sinks which commit on slots."""

IN_STEP: Final = 0.25
"""The share of runs without given arguments whose sources are kept in step."""

DRIFTS_US: Final = (1, 3_000, 10_000, 40_000, 1_000_000)
"""The drifts of these: event time advances by 1 to 10 ms from row to row."""

CROWDED: Final = 0.25
"""The share of runs that continue at another parallelism in which there are certainly more keys than key groups."""


def _with_more(scenario: Scenario, base: Shape, seed: int) -> Scenario:
    """Add, to some runs without given arguments, circumstances that would hardly ever arise by chance."""
    random = Random(f"behind {seed}")
    if scenario.has_checkpoints and len(scenario.shape) <= BEHIND_NODES_MAX and random.random() < BEHIND:
        scenario = _behind(scenario, base, random)
    crowded = Random(f"crowded {seed}")
    if scenario.rescaled is not None and crowded.random() < CROWDED:
        needed = max(node.parallelism for node in (*scenario.shape, *scenario.rescaled))
        groups = max(crowded.choice((4, 7, 16)), needed)
        scenario = replace(scenario, keys=50, skew=0.0, key_groups=groups)
    changes = Random(f"changes {seed}")
    if scenario.has_checkpoints and changes.random() < CHANGED:
        scenario = replace(scenario, changes=changes.choice((0.3, 0.8)))
    drift = Random(f"drift {seed}")
    if drift.random() < IN_STEP:
        scenario = replace(scenario, drift_us=drift.choice(DRIFTS_US))
    on_slots = Random(f"on slots {seed}")
    if on_slots.random() < COMMIT_ON_SLOTS:
        scenario = with_commits_on_slots(scenario, on_slots)
    return scenario


def with_commits_on_slots(scenario: Scenario, random: Random) -> Scenario:
    """Return the scenario with some or all sinks committing on slots, often struck in the middle of a commit."""
    horizon = random.choice((100, 300, 300 + scenario.rows * 4))
    found = (
        Fault(random.randrange(horizon), COMMITTING, random.randrange(1 << 20))
        for _ in range(random.choice((0, 1, 1, 2, 3)))
    )
    faults, share = (*scenario.faults, *found), random.choice((0.5, 1.0))
    if scenario.has_checkpoints and random.random() < 0.1:
        faults += (Fault(random.randrange(horizon), LOADS_FAIL, random.randrange(1 << 20)),)
    return replace(scenario, on_slots=share, faults=tuple(sorted(faults, key=lambda fault: fault.step)))


def _behind(scenario: Scenario, base: Shape, random: Random) -> Scenario:
    """Return the scenario with a job that fails as soon as a checkpoint has rows in flight, and fails again, or is
    rescaled, while they are being recovered.
    """
    rescaled = scenario.rescaled or with_parallelism(base, random.choice((1, 2, 3, 4)), random, same=False)
    deep = with_backlog(scenario, random, struck=False)
    kept = tuple(f for f in scenario.faults if not f.kind.startswith(("cancel", "drain")) and random.random() < 0.2)
    kinds = (IN_FLIGHT, *(RECOVERING,) * random.choice((2, 3, 5)))
    struck = (Fault(20 + i, kind, random.randrange(1 << (10, 14, 17)[i % 3])) for i, kind in enumerate(kinds))
    return replace(
        deep,
        interval_s=0.005,
        min_pause_s=0.005,
        sink_pause_s=0.01,
        row_us=0,
        rescaled=rescaled,
        key_groups=max(scenario.key_groups, *(node.parallelism for node in rescaled)),
        rows=deep.batch_rows * random.choice((15, 30)),  # queues get deep by batches, not by rows
        faults=tuple(sorted((*kept, *struck), key=lambda fault: fault.step)),
    )


def with_backlog(scenario: Scenario, random: Random, *, struck: bool = True) -> Scenario:
    """Return the scenario with a slow sink after deep queues, barriers that overtake, and frequent checkpoints.

    `struck`: also with failures, stops and rescales in the middle of recovery, and of the recovery after that.
    """
    found = scenario.faults
    if struck:
        found = tuple(f for f in found if not f.kind.startswith(("cancel", "drain")) and random.random() < 0.2)
        kinds = (BACKLOGGED, *(RECOVERING,) * random.choice((1, 2, 4)))
        found += tuple(Fault(100 * i, kind, random.randrange(1 << 20)) for i, kind in enumerate(kinds, 1))
    return replace(
        scenario,
        rows=random.choice((100, 200)),
        batch_rows=random.choice((1, 3, 10)),
        sink_rows=1,
        sink_pause_s=random.choice((0.003, 0.01)),
        pool_buffers=random.choice((16, 1024)),
        interval_s=random.choice((0.002, 0.005, 0.02, 0.02)),
        tempo=replace(
            scenario.tempo,
            mail_us=random.choice((5, 40)),
            control_us=random.choice((50, 400)),
            io_us=random.choice((100, 2000)),
            clock_tick_us=random.choice((0, 0, 0, 100)),
        ),
        aligned_timeout_s=random.choice((0.0, 0.0, 0.001)),
        queue_time_s=None,
        timeout_s=max(1.0, scenario.timeout_s),
        faults=tuple(sorted(found, key=lambda fault: fault.step)),
    )


def with_savepoints(faults: tuple[Fault, ...], random: Random, kinds: tuple[str, ...], rows: int) -> tuple[Fault, ...]:
    """Add requests for savepoints, at any moment, in a third of all runs."""
    if random.random() > 1 / 3:
        return faults
    kinds = tuple(kind for kind in kinds if random.random() < 0.5) or kinds
    return _with(faults, random, kinds, (300, 600, 300 + rows * 4), (1, 1, 2, 4))


def with_hangs(faults: tuple[Fault, ...], random: Random, kinds: tuple[str, ...], rows: int) -> tuple[Fault, ...]:
    """Add late writes of metadata, or long calls of functions, once or twice, in a tenth of all runs."""
    if random.random() > 0.1:
        return faults
    return _with(faults, random, kinds, (100, 300, 300 + rows * 4), (1, 1, 2))


def with_stalls(faults: tuple[Fault, ...], random: Random, rows: int) -> tuple[Fault, ...]:
    """Add connections that deliver nothing for a while, once or several times, in a tenth of all runs."""
    if random.random() > 0.1:
        return faults
    return _with(faults, random, (STALLS,), (100, 300, 300 + rows * 4), (1, 2, 4, 8))


def with_cluster_gone(faults: tuple[Fault, ...], random: Random, rows: int) -> tuple[Fault, ...]:
    """Add the end of the cluster, once, in one run of 25."""
    if random.random() > 0.04:
        return faults
    return _with(faults, random, (CLUSTER_GONE,), (100, 300, 300 + rows * 4), (1,))


def with_leaving(faults: tuple[Fault, ...], random: Random, rows: int) -> tuple[Fault, ...]:
    """Add nodes that are drained, so that slots have to leave them sooner or later, in a tenth of all runs."""
    if random.random() > 0.1:
        return faults
    return _with(faults, random, (LEAVING,), (100, 300, 300 + rows * 4), (1, 1, 2, 4))


def with_rare(faults: tuple[Fault, ...], random: Random, kinds: tuple[str, ...], rows: int) -> tuple[Fault, ...]:
    """Add rare actions of users and storage, once or twice, at any moment, in a fifth of all runs."""
    if random.random() > 0.2:
        return faults
    return _with(faults, random, kinds, (200, 500, 300 + rows * 4), (1, 1, 2))


def _with(
    faults: tuple[Fault, ...], random: Random, kinds: Sequence[str], horizons: Sequence[int], counts: Sequence[int]
) -> tuple[Fault, ...]:
    """Return the faults and some more of these kinds, which strike before one of the `horizons` (in steps)."""
    horizon, count = random.choice(horizons), random.choice(counts)
    more = (Fault(random.randrange(horizon), random.choice(kinds), random.randrange(1 << 20)) for _ in range(count))
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def draw_faults(random: Random, kinds: tuple[str, ...], rows: int) -> tuple[Fault, ...]:
    if not kinds or random.random() < 0.1:
        return ()
    kinds = tuple(kind for kind in kinds if random.random() < 0.35) or (random.choice(kinds),)
    horizon = random.choice((200, 500, 300 + rows * 4))
    count = random.choice((1, 2, 3, 5, 8, 13))
    return tuple(
        sorted(
            (Fault(random.randrange(horizon), random.choice(kinds), random.randrange(1 << 20)) for _ in range(count)),
            key=lambda fault: fault.step,
        )
    )
