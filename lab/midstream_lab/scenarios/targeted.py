"""Regions of all scenarios in which bugs have been found: each draws of a seed what brings its bugs out soon.

Known bugs that were put back (`midstream_lab.mutations.catalog`) are searched in the region of each. The random campaign
visits all of them, too: what it takes to meet a rare bug by chance is what it took to find the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from midstream.simulation.faults import IN_FLIGHT, IN_RECOVERY, PARALLELISMS, RECOVERING, WITH_IN_FLIGHT, Fault
from midstream_lab.fault_kinds import (
    BACKLOGGED,
    HANGS,
    LEAVING,
    LONG_CALL,
    PUBLISH_LIES,
    SAVEPOINT_SLOW,
    SAVEPOINTS,
    STALLS,
    UNREADABLE,
)
from midstream_lab.jobs.shapes import SHAPES, Shape
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.scenarios.scenario import Scenario, draw, with_backlog


def backpressured(seed: int) -> Scenario:
    """Slow functions and sinks, barriers that overtake, restores at another parallelism."""
    topology = ("keyed", "pipeline", "keyed_broadcast", "keyed")[seed % 4]
    drawn = draw(seed, topology=topology, parallelism=3, rescale_to=2, rows=100)
    return replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003)


def superseded(seed: int) -> Scenario:
    """A driver is stopped, wakes up late, and then a slot of its own dies."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=100, faults=())
    step = 100 + seed % 200
    faults = (
        Fault(step, "stop_driver", seed * 7919),
        Fault(step + 10, "kill_slot", seed),
        Fault(step + 200, "kill_slot", 0),
    )
    return replace(drawn, interval_s=0.0005, retained=1, faults=faults)


def hanging(seed: int) -> Scenario:
    """Metadata is written when it has been given up, some of it after a restart, and then the driver dies."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, rows=100, faults=())
    step = 150 + seed % 200
    random = Random(f"hanging {seed}")
    faults = (
        Fault(step, HANGS, random.randrange(1 << 20)),
        Fault(step + 200 + random.randrange(2000), "kill_driver", seed),
    )
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=100, clock_tick_us=0)
    return replace(
        drawn, tempo=tempo, timeout_s=0.2, interval_s=0.02, sink_rows=1, sink_pause_s=0.01, faults=faults, row_us=0
    )


def barriers_first(seed: int) -> Scenario:
    """Barriers are faster than the notification that the checkpoint before has completed, and only one is kept."""
    drawn = draw(seed, topology="keyed", parallelism=4, faults=(), rows=200)
    tempo = replace(drawn.tempo, mail_us=40, control_us=5000, data_us=20, io_us=100)
    return replace(drawn, tempo=tempo, interval_s=0.001, min_pause_s=0.0, retained=1, aligned_timeout_s=0.0)


def poisoned(seed: int) -> Scenario:
    """One row after the other fails in a function, and checkpoints complete in between."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=100, faults=())
    faults = tuple(Fault(100 + 150 * n, "user_error", seed * 7919 + 104_729 * n) for n in range(8))
    return replace(drawn, interval_s=0.001, faults=faults)


def on_time(seed: int) -> Scenario:
    """Sources of one split each, so that no row is ever late, and much in flight when slots die."""
    kinds = ("kill_slot", "cut_link", "user_error")
    drawn = draw(seed, topology=("timers", "random")[seed % 2], parallelism=3, faults=kinds, rows=100)
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.002, row_us=1000, sink_rows=1, sink_pause_s=0.003)
    return replace(drawn, shape=without_idle(drawn.shape), splits=1, rounds=1)


def several_splits(seed: int, splits: int = 3) -> Scenario:
    return replace(draw(seed, topology="splits", rows=100), splits=splits, rounds=1)


def many_splits(seed: int) -> Scenario:
    """Many splits, of several files, are handed out one by one over slow lines, and opening each takes its time."""
    drawn = draw(seed, topology="splits", parallelism=3, faults=(), rows=200)
    tempo = replace(drawn.tempo, mail_us=40, control_us=5000, data_us=20, io_us=10_000, clock_tick_us=0)
    return replace(drawn, tempo=tempo, splits=20, rounds=1, readers=1, blocking=True, batch_rows=10, row_us=0)


def always_due(seed: int) -> Scenario:
    """Splits are soon idle where reading the clock takes long and checkpoints follow immediately: timers are always due."""
    drawn = draw(seed, topology="sliding", parallelism=1, faults=(), rows=10)
    shape = tuple(
        replace(node, chain=tuple("idle" if kind == "tight" else kind for kind in node.chain)) for node in drawn.shape
    )
    tempo = replace(drawn.tempo, mail_us=400, control_us=50, data_us=20, io_us=100, clock_tick_us=2000)
    drawn = replace(drawn, shape=shape, tempo=tempo, splits=1, rounds=1, readers=1, batch_rows=1)
    return replace(drawn, interval_s=0.0005, min_pause_s=0.0, timeout_s=60.0, steps_max=20_000)


def quiet(topology: str) -> Callable[[int], Scenario]:
    """The only split of a job, which has many lulls, is idle now and then, and timers hold rows of it then.

    The rows take their time from task to task, so that one way may be two lulls later than another.
    """

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=topology, parallelism=2 + seed % 3, faults=(), rows=100)
        tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=3000, io_us=100, clock_tick_us=0, interleave=0.0)
        drawn = replace(drawn, splits=1, rounds=1, blocking=True, batch_rows=3, interval_s=0.02, tempo=tempo)
        return replace(drawn, has_lulls=True, inline_bytes=2**16, row_us=0)

    return scenario


def close_behind(shape: Shape) -> Shape:
    """The same with event time that follows the rows closely."""
    return tuple(
        replace(node, chain=tuple("tight" if kind == "times" else kind for kind in node.chain)) for node in shape
    )


def without_idle(shape: Shape) -> Shape:
    return tuple(
        replace(node, chain=tuple("tight" if kind == "idle" else kind for kind in node.chain)) for node in shape
    )


def in_pieces(scenario_of: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    """The same, with sizes from which on state is cut, shared and merged that small runs come to."""

    def scenario(seed: int) -> Scenario:
        return replace(scenario_of(seed), small_chunks=True)

    return scenario


def far_behind(seed: int) -> Scenario:
    """Sinks that hardly take anything: what waits for credit waits for longer than a checkpoint may take."""
    drawn = draw(seed, topology="pipeline", parallelism=2, faults=(), rows=60)
    drawn = replace(
        drawn,
        shape=with_parallelism(SHAPES["pipeline"], 2, Random(seed), same=True),
        text_bytes=2000,
        buffer_bytes=4096,
        pool_buffers=0,
        batch_rows=10,
        rounds=1,
    )
    return replace(
        drawn,
        aligned_timeout_s=0.0,
        sink_rows=1,
        sink_pause_s=90.0,
        interval_s=20.0,
        timeout_s=60.0,
        splits=2,
        row_us=0,
    )


def sent_at_the_end(seed: int) -> Scenario:
    """Slow sinks: when a task has ended, and a checkpoint with that is complete, rows of it still wait for credit."""
    drawn = draw(seed, topology="pipeline", parallelism=2, faults=(), rows=60)
    drawn = replace(drawn, shape=with_parallelism(SHAPES["pipeline"], 2, Random(seed), same=True), rounds=1, splits=2)
    drawn = replace(drawn, text_bytes=2000, buffer_bytes=4096, pool_buffers=0, batch_rows=1, row_us=0, sink_rows=1)
    return replace(drawn, aligned_timeout_s=0.0, sink_pause_s=0.1, interval_s=0.01, timeout_s=60.0)


def writing_at_the_end(seed: int) -> Scenario:
    """The same; and the last of it is sent while the task is writing what it has to store for the next checkpoint."""
    drawn = sent_at_the_end(seed)
    tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=20, io_us=2000, clock_tick_us=0)
    return replace(drawn, tempo=tempo, interval_s=0.0005, min_pause_s=0.0, sink_pause_s=0.02)


def of(*kinds: str, topology: str = "keyed", **changes: Any) -> Callable[[int], Scenario]:
    """Of a seed: many faults of these kinds."""

    def scenario(seed: int) -> Scenario:
        return replace(draw(seed, topology=topology, faults=kinds, rows=100), **changes)

    return scenario


def recovering(seed: int) -> Scenario:
    """The storage is gone for a while as soon as the job recovers rows in flight, of which there are many segments."""
    drawn = backpressured(seed)
    gone_soon = IN_RECOVERY.index("disk_gone") + len(IN_RECOVERY) * (1 + seed % 97) * 7
    gone = tuple(Fault(fault.step + 20 * i, RECOVERING, gone_soon) for fault in drawn.faults for i in range(3))
    drawn = replace(drawn, faults=tuple(sorted((*drawn.faults, *gone), key=lambda fault: fault.step)))
    return replace(drawn, rows=400, text_bytes=2000, buffer_bytes=4096, pool_buffers=0, batch_rows=10)


def rejoined(seed: int) -> Scenario:
    """Again and again the job continues at another parallelism while it recovers; of many rows, all on one keyed edge."""
    before, after = ((3, 2), (2, 3), (1, 4), (2, 5))[seed % 4]
    drawn = with_backlog(draw(seed, topology="keyed", parallelism=before, rescale_to=after, faults=()), Random(seed))
    random = Random(f"rejoined {seed}")
    stop = IN_RECOVERY.index("stop")
    faults = tuple(
        Fault(100 * i, RECOVERING if i > 1 else BACKLOGGED, stop + len(IN_RECOVERY) * random.randrange(7 * 20_000))
        for i in range(1, 7)
    )
    slow = replace(drawn, rows=400, batch_rows=20, row_us=1000, sink_rows=0, aligned_timeout_s=0.0, faults=faults)
    return replace(slow, keys=50, skew=0.0, key_groups=16, text_bytes=200, pool_buffers=1024, interval_s=0.005)


def dealt_by_groups(seed: int) -> Scenario:
    """The job continues at another parallelism, and its counts are in chunks of several key groups each."""
    before, after = ((3, 2), (2, 3), (1, 4), (4, 3))[seed % 4]
    drawn = draw(seed, topology="tables", parallelism=before, rescale_to=after, faults=(), rows=100)
    stops = tuple(Fault(200 + 300 * i + seed * 37 % 200, "stop", 0) for i in range(3))
    return replace(drawn, faults=stops, interval_s=0.002, batch_rows=3, row_us=1000, keys=50, skew=0.0, key_groups=16)


def failing_alone(seed: int) -> Scenario:
    """Some checkpoints cannot be written, while barriers wait to be aligned."""
    drawn = draw(seed, topology="broadcast", parallelism=2, faults=("write_fails",), rows=100)
    faults = tuple(Fault(100 + 100 * i + seed * 37 % 100, "write_fails", seed + i) for i in range(4))
    return replace(drawn, aligned_timeout_s=None, interval_s=0.002, timeout_s=60.0, faults=faults)


def cancelled_late(seed: int) -> Scenario:
    """Notifications of a failed checkpoint come by slow connections, and barriers of the next one by quick ones."""
    drawn = draw(seed, topology="same_upstream", parallelism=2, faults=(), rows=200)
    tempo = replace(drawn.tempo, mail_us=5, control_us=5000, data_us=20, io_us=100, clock_tick_us=0)
    faults = tuple(Fault(100 + 80 * i + seed * 37 % 80, "write_fails", seed + i) for i in range(6))
    drawn = replace(drawn, tempo=tempo, aligned_timeout_s=None, interval_s=0.0005, min_pause_s=0.0, faults=faults)
    return replace(drawn, timeout_s=60.0, rounds=1, batch_rows=3)


def lying(seed: int) -> Scenario:
    """The storage writes metadata and reports that it has not; state is inline, so that little else is written."""
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=200)
    faults = tuple(Fault(100 + 40 * i + seed * 37 % 40, "storage_lies", 1 + i % 2) for i in range(8))
    return replace(drawn, faults=faults, aligned_timeout_s=None, interval_s=0.0005, min_pause_s=0.0, keys=3)


def denied(seed: int) -> Scenario:
    """Metadata is written, and reported as not written."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=100)
    faults = tuple(Fault(60 + 150 * i + seed * 37 % 150, PUBLISH_LIES, 0) for i in range(4))
    return replace(drawn, faults=faults, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0, row_us=1000)


def unheard(seed: int) -> Scenario:
    """Slots die while reads take their time: a source reports nothing yet, and another one is ahead of where it was."""
    drawn = draw(seed, topology=("timers", "tables", "session")[seed % 3], parallelism=1 + seed % 2, rows=200)
    struck = tuple(Fault(300 + 300 * i + seed * 37 % 200, "kill_slot", seed * 31 + i) for i in range(8))
    tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=20, io_us=2000, clock_tick_us=0)
    drawn = replace(drawn, shape=close_behind(without_idle(drawn.shape)), faults=struck, tempo=tempo, blocking=True)
    drawn = replace(drawn, aligned_timeout_s=None, interval_s=0.0005, min_pause_s=0.0, sink_rows=0)
    return replace(drawn, batch_rows=1, row_us=0, splits=2, rounds=1)


def segmented(seed: int) -> Scenario:
    """Likewise, of rows so large that what is stored of a channel has several segments."""
    return replace(rejoined(seed), text_bytes=2000, buffer_bytes=4096)


def unreadable(seed: int) -> Scenario:
    """The same; once it has died, the job recovers without a further failure but that of the storage, again and again."""
    random = Random(f"unreadable {seed}")
    gone = IN_RECOVERY.index("disk_gone")
    faults = [Fault(100, BACKLOGGED, 0), Fault(101, IN_FLIGHT, 0)]
    faults += (Fault(110 + i, RECOVERING, gone + len(IN_RECOVERY) * random.randrange(7 * 5000)) for i in range(8))
    drawn = replace(segmented(seed), faults=tuple(faults), timeout_s=60.0)
    return replace(drawn, pool_buffers=0, batch_rows=10, interval_s=0.02)


def sliced(seed: int) -> Scenario:
    """Slow functions and large batches: barriers come in the middle of them."""
    return replace(backpressured(seed), batch_rows=50, row_us=2000, sink_rows=0, interval_s=0.0005)


def tight_pool(seed: int) -> Scenario:
    """More rows than the pool has room for, and producers with several outputs."""
    drawn = backpressured(seed)
    if seed % 2:
        drawn = draw(seed, topology="same_upstream", parallelism=3, rescale_to=2, rows=100)
        drawn = replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003)
    return replace(drawn, rows=400, text_bytes=2000, buffer_bytes=4096, pool_buffers=0, batch_rows=10)


def scant(seed: int) -> Scenario:
    """No buffer more than a slot's tasks need, slow sinks, and jobs that die with more rows in flight than fit in there."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=200)
    inputs = (
        (node.parallelism, drawn.shape[input_.node].parallelism) for node in drawn.shape for input_ in node.inputs
    )
    spare = sum(consumers + 1 + 2 * producers for consumers, producers in inputs)  # see `run.least_buffers`
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    faults = (Fault(100, BACKLOGGED, 0), *(Fault(101 + 300 * i, IN_FLIGHT, 0) for i in range(6)))
    drawn = replace(drawn, pool_buffers=-spare, tempo=tempo, faults=faults, timeout_s=60.0, interval_s=0.02)
    drawn = replace(drawn, aligned_timeout_s=0.0, queue_time_s=None, sink_rows=1, sink_pause_s=0.003, row_us=0)
    return replace(drawn, text_bytes=2000, buffer_bytes=4096, batch_rows=3, blocking=False, rounds=1)


def read_badly(seed: int) -> Scenario:
    """The same; nothing befalls the job then but that rows in flight cannot be read at first."""
    drawn = scant(seed)
    random = Random(f"read badly {seed}")
    faults = tuple(Fault(102 + 900 * i, UNREADABLE, random.randrange(1 << 20)) for i in range(3))
    faults += tuple(Fault(101 + 900 * i, IN_FLIGHT, 0) for i in range(3))
    faults = tuple(sorted(faults, key=lambda fault: fault.step))
    return replace(drawn, faults=faults, tempo=replace(drawn.tempo, io_us=10_000))


def ending(topology: str) -> Callable[[int], Scenario]:
    """Of a seed: slots die while some subtasks are at their end and others have much in flight."""

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=topology, parallelism=3, rows=100, faults=())
        kills = tuple(Fault(300 + 350 * i + seed * 37 % 350, "kill_slot", seed * 31 + i) for i in range(8))
        drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.0005, splits=2, faults=kills, keys=10, skew=0.9)
        return replace(drawn, row_us=4000, sink_rows=1, sink_pause_s=0.003)

    return scenario


def ending_rescaled(seed: int) -> Scenario:
    """The job stops while some subtasks are at their end, and continues at another parallelism: there all run again."""
    drawn = draw(seed, topology="tally", parallelism=3, rescale_to=(2, 4)[seed % 2], rows=100)
    stops = tuple(replace(fault, step=600 + seed * 37 % 2500) for fault in drawn.faults if fault.kind == "stop")
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.0005, splits=2, faults=stops[:1], keys=10, skew=0.9)
    return replace(drawn, row_us=4000, sink_rows=1, sink_pause_s=0.003)


def draining(seed: int) -> Scenario:
    """The driver dies soon after the job got the request to drain, while some sources still have rows that nobody takes."""
    drawn = draw(seed, topology=("union", "multi_input")[seed % 2], parallelism=2, rows=400, faults=())
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.0005, min_pause_s=0.0, timeout_s=60.0, splits=2)
    drain = Fault(150 + seed * 37 % 300, "drain", 0)
    kill = Fault(drain.step + 20 + seed * 53 % 200, "kill_driver", 0)
    return replace(drawn, row_us=1000, sink_rows=1, sink_pause_s=0.003, text_bytes=2000, faults=(drain, kill))


def dying_drained(seed: int) -> Scenario:
    """The same of a short job, whose sources end one after the other."""
    drawn = draining(seed)
    drain = Fault(60 + seed * 37 % 120, "drain", 0)
    kill = Fault(drain.step + 40 + seed * 53 % 120, "kill_driver", 0)
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, io_us=100, clock_tick_us=0)
    return replace(
        drawn, faults=(drain, kill), tempo=tempo, rows=60, interval_s=0.002, batch_rows=1, sink_pause_s=0.002
    )


def changing(seed: int) -> Scenario:
    """The job dies with rows in flight, and continues with another program each time."""
    topology = ("same_upstream", "union", "pipeline", "multi_input", "mixed")[seed % 5]
    drawn = with_backlog(draw(seed, topology=topology, parallelism=2, rescale_to=2, faults=()), Random(seed))
    kills = tuple(Fault(400 * i + seed * 37 % 400, "kill_driver", seed + i) for i in range(1, 6))
    return replace(drawn, changes=0.8, aligned_timeout_s=0.0, interval_s=0.002, faults=kills)


def changing_at_the_end(seed: int) -> Scenario:
    """The same where some of it has finished."""
    drawn = draw(seed, topology=("finishing", "totals", "tally")[seed % 3], parallelism=2, rows=200, faults=())
    kills = tuple(Fault(300 * i + seed * 37 % 300, "kill_driver", seed + i) for i in range(1, 8))
    drawn = replace(drawn, changes=0.8, aligned_timeout_s=None, interval_s=0.001, faults=kills)
    return replace(drawn, splits=2, sink_rows=1, sink_pause_s=0.003)


def widening(seed: int) -> Scenario:
    """The job continues with a program that declares a state more, or others wider, or no longer; all state is in files."""
    drawn = draw(seed, topology=("typed", "by_zone")[seed % 2], parallelism=2, rows=200, faults=())
    kills = tuple(Fault(300 * i + seed * 37 % 300, "kill_driver", seed + i) for i in range(1, 8))
    drawn = replace(drawn, changes=0.8, aligned_timeout_s=None, interval_s=0.001, faults=kills, inline_bytes=0)
    return replace(drawn, splits=2, sink_rows=1, sink_pause_s=0.003)


def rescaled(seed: int) -> Scenario:
    return draw(seed, topology="keyed", faults=("rescale", "rescale_struck"), rows=100)


def summed(seed: int) -> Scenario:
    """Slots die while one source has ended and the other has not."""
    drawn = draw(seed, topology="totals", parallelism=2, faults=("kill_slot",), rows=400)
    return replace(drawn, interval_s=0.002, sink_rows=1, sink_pause_s=0.003)


def alarmed(seed: int) -> Scenario:
    """Rows wait for the clock while slots die."""
    return replace(draw(seed, topology="alarms", parallelism=2, faults=("kill_slot",), rows=100), interval_s=0.002)


def in_tables(seed: int) -> Scenario:
    """Rows wait in tables while slots die, and the job continues with fewer subtasks. Half of the seeds have tables of
    many short runs, which change while they are written.
    """
    drawn = draw(seed, topology="tables", parallelism=3, rescale_to=2, faults=("kill_slot",), rows=100)
    if seed % 2:
        tempo = replace(drawn.tempo, io_us=10_000, clock_tick_us=0)
        drawn = replace(drawn, tempo=tempo, small_chunks=True, timeout_s=60.0, batch_rows=3, keys=10, splits=2)
    return replace(drawn, interval_s=0.002, key_groups=16)


def in_running(seed: int) -> Scenario:
    """Running aggregates while slots die, and the job continues with fewer subtasks."""
    drawn = draw(seed, topology="running", parallelism=3, rescale_to=2, faults=("kill_slot",), rows=100)
    return replace(drawn, interval_s=0.002, key_groups=16)


def at_multiples(seed: int) -> Scenario:
    """The same with aggregates at multiples of event time."""
    drawn = draw(seed, topology="periodic", parallelism=3, rescale_to=2, faults=("kill_slot",), rows=100)
    return replace(drawn, interval_s=0.002, key_groups=16)


def leaving(seed: int) -> Scenario:
    """Slots have to leave, one after the other, and the job is rescaled, or gets the request to stop, meanwhile."""
    random = Random(f"leaving {seed}")
    drawn = draw(seed, topology="keyed", parallelism=3, faults=(), rows=100)
    kinds = (LEAVING, LEAVING, LEAVING, "rescale", "stop")
    found = [Fault(random.randrange(10, 400), random.choice(kinds), random.randrange(1 << 20)) for _ in range(4)]
    return replace(drawn, timeout_s=60.0, faults=tuple(sorted(found, key=lambda fault: fault.step)))


def given_up(seed: int) -> Scenario:
    """A rescale is given up when its checkpoint is under way: a slot of it ends, and the one in its place comes too late."""
    random = Random(f"given up {seed}")
    drawn = draw(seed, topology="keyed", parallelism=3, faults=(), rows=200)
    step = random.randrange(50, 200)
    faults = (
        Fault(step, "rescale", PARALLELISMS.index(7)),
        Fault(step + random.randrange(20, 400), "slots_late", random.choice((3, 15, 27))),
    )
    tempo = replace(drawn.tempo, io_us=10_000, mail_us=40, control_us=400)
    return replace(drawn, timeout_s=60.0, faults=faults, rows=400, batch_rows=1, row_us=0, interval_s=5.0, tempo=tempo)


def saving(seed: int) -> Scenario:
    """Savepoints are requested again and again, while checkpoints and commits follow each other and the disk is slow."""
    drawn = draw(seed, topology="keyed", faults=SAVEPOINTS, rows=100)
    savepoints = tuple(
        Fault(60 + seed * 37 % 300 + 90 * i, SAVEPOINTS[(seed + i) % 4], seed * 31 + i) for i in range(4)
    )
    if seed % 4 == 3:
        savepoints += tuple(Fault(fault.step + 10 + seed * 17 % 120, "cancel", 0) for fault in savepoints)
    drawn = replace(drawn, interval_s=0.0005, min_pause_s=0.0, retained=1, sink_rows=1, sink_pause_s=0.003)
    return replace(
        drawn,
        tempo=replace(drawn.tempo, io_us=(100, 10_000)[seed % 2], interleave=0.2),
        aligned_timeout_s=0.0,
        queue_time_s=None,
        timeout_s=60.0,
        faults=tuple(sorted((*drawn.faults, *savepoints), key=lambda fault: fault.step)),
    )


def saving_slowly(seed: int) -> Scenario:
    """Savepoints are copied to slow places, while checkpoints follow immediately and only one is kept; or the job ends meanwhile."""
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=200)
    faults = tuple(Fault(60 + seed * 37 % 100 + 200 * i, SAVEPOINT_SLOW, seed * 7919 + i) for i in range(3))
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, timeout_s=60.0, retained=1, interval_s=0.0005, min_pause_s=0.0)
    drawn = replace(drawn, aligned_timeout_s=0.0, queue_time_s=None)
    return replace(drawn, batch_rows=3, row_us=1000, sink_rows=0, rounds=1, keys=10, skew=0.0)


def held(seed: int) -> Scenario:
    """Rows go two ways to a slow task, one of which aligns, and downstream of a task that aligns itself."""
    drawn = draw(seed, topology="held", parallelism=2 + seed % 2, faults=(), rows=200)
    slow = replace(drawn, row_us=1000, sink_rows=0, batch_rows=3, text_bytes=2000, pool_buffers=0, buffer_bytes=4096)
    return replace(slow, aligned_timeout_s=0.0, interval_s=0.005, min_pause_s=0.0, timeout_s=60.0)


def held_and_changed(seed: int) -> Scenario:
    """The same; with rows in flight the job mostly continues in another program, where not all of them could be."""
    kill_driver = WITH_IN_FLIGHT.index("kill_driver")
    kills = tuple(Fault(100 * i, IN_FLIGHT, kill_driver + len(WITH_IN_FLIGHT) * (31 * seed + i)) for i in range(1, 7))
    return replace(held(seed), changes=0.8, faults=kills)


def stalled(seed: int) -> Scenario:
    """A slot receives nothing for a while, and a checkpoint fails: its notification comes when the next one is on its way."""
    drawn = draw(seed, topology=("same_upstream", "pipeline")[seed % 2], parallelism=2, faults=(), rows=400)
    random = Random(f"stalled {seed}")
    faults = []
    for i in range(6):
        to_slot = 2 * (6 * random.randrange(1 << 14) + random.randrange(2)) + 1  # two slots have six ways
        faults += [Fault(100 + 150 * i, STALLS, to_slot), Fault(101 + 150 * i, "write_fails", random.randrange(15))]
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=20, io_us=2000, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, aligned_timeout_s=(None, 0.0)[seed // 2 % 2], interval_s=0.0005, timeout_s=60.0)
    return replace(drawn, min_pause_s=0.0, rounds=1, batch_rows=3, row_us=1000, sink_rows=0, faults=tuple(faults))


def timed_out(seed: int) -> Scenario:
    """Barriers wait their turn, and overtake the rows when their time has come."""
    return replace(backpressured(seed), aligned_timeout_s=(0.001, 0.01)[seed % 2], interval_s=0.005)


def shared(seed: int) -> Scenario:
    """Large batches of a broadcast are processed slowly while barriers come."""
    drawn = draw(seed, topology="keyed_broadcast", parallelism=2, rows=100)
    drawn = replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003)
    return replace(drawn, batch_rows=50, row_us=2000, interval_s=0.0005)


def firing(seed: int) -> Scenario:
    """Watermarks take many slices to fire: reading the clock takes long, and slots die meanwhile."""
    drawn = draw(
        seed, topology=("timers", "sliding", "window")[seed % 3], parallelism=2, faults=("kill_slot",), rows=100
    )
    drawn = replace(drawn, shape=without_idle(drawn.shape), splits=1, rounds=1, interval_s=0.002, timeout_s=60.0)
    return replace(drawn, tempo=replace(drawn.tempo, clock_tick_us=2000), aligned_timeout_s=0.0)


def fired_unevenly(seed: int) -> Scenario:
    """The job is stopped while windows fire, and continues at another parallelism."""
    drawn = draw(seed, topology=("sliding", "window", "session")[seed % 3], parallelism=3, rescale_to=2, rows=100)
    drawn = replace(drawn, shape=without_idle(drawn.shape), splits=1, rounds=1, interval_s=0.002, timeout_s=60.0)
    if drawn.rescaled is not None:
        drawn = replace(drawn, rescaled=without_idle(drawn.rescaled))
    return replace(drawn, tempo=replace(drawn.tempo, clock_tick_us=2000), aligned_timeout_s=0.0)


def adapting(seed: int) -> Scenario:
    """Rows of an edge are in flight when the job continues at a parallelism at which they could not be."""
    drawn = draw(seed, topology="adapting", rescale_to=(2, 3)[seed % 2], rows=200)
    drawn = replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003, interval_s=0.002)
    return replace(drawn, queue_time_s=None, row_us=1000)


def unwritable(seed: int) -> Scenario:
    """Now and then nothing can be written of what is in flight to the sinks, which have prepared output."""
    drawn = backpressured(seed)
    random = Random(f"unwritable {seed}")
    faults = tuple(
        Fault(100 + 60 * i, ("write_fails", "disk_full")[i % 2], random.randrange(1 << 20)) for i in range(8)
    )
    return replace(drawn, interval_s=0.002, rounds=1, text_bytes=2000, faults=faults)


def captured_in_vain(seed: int) -> Scenario:
    """Sources are notified of a checkpoint one long after the other, and what is captured meanwhile cannot be written."""
    drawn = draw(seed, topology="keyed", parallelism=3 + seed % 2, faults=(), rows=200)
    random = Random(f"captured in vain {seed}")
    faults = tuple(Fault(60 + 40 * i, "write_fails", random.randrange(15)) for i in range(20))
    tempo = replace(drawn.tempo, mail_us=40, control_us=1_000_000, data_us=200, io_us=100_000, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, aligned_timeout_s=0.0, timeout_s=60.0, inline_bytes=0)
    return replace(drawn, splits=6, rounds=1, readers=2, blocking=True, batch_rows=1, row_us=0, sink_rows=0)


def undisturbed(seed: int) -> Scenario:
    """Nothing happens to the job, whose checkpoints follow immediately, with state in files that take their time."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=100, faults=())
    tempo = replace(drawn.tempo, io_us=2000, clock_tick_us=0)
    return replace(drawn, tempo=tempo, interval_s=0.0005, min_pause_s=0.0, timeout_s=60.0, keys=50)


def cut_short(seed: int) -> Scenario:
    """Connections are cut while batches of many buffers are on their way."""
    drawn = draw(seed, topology="keyed", parallelism=3, rows=100, faults=())
    cuts = tuple(Fault(100 + 60 * i + seed % 50, "cut_link", seed * 31 + i) for i in range(8))
    drawn = replace(drawn, text_bytes=2000, buffer_bytes=4096, wire_bytes=2048, batch_rows=50, pool_buffers=1024)
    return replace(drawn, rounds=1, row_us=0, sink_rows=0, queue_time_s=None, faults=cuts)


def timely(seed: int) -> Scenario:
    """Windows of several splits, none of whose rows may be late, and slots that die."""
    drawn = draw(
        seed, topology=("splits", "window")[seed % 2], parallelism=3, faults=("kill_slot", "user_error"), rows=100
    )
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.002, row_us=1000, shape=without_idle(drawn.shape))
    return replace(drawn, splits=3, rounds=1)


def tight(seed: int) -> Scenario:
    """Batches of several buffers each, and no buffer more than it takes, in a job to which nothing happens."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, rows=100, faults=())
    drawn = replace(drawn, text_bytes=2000, buffer_bytes=4096, pool_buffers=0, batch_rows=(3, 10)[seed % 2], row_us=0)
    return replace(drawn, rounds=1, sink_rows=1, sink_pause_s=0.003)


def dawdling(seed: int) -> Scenario:
    """Slots are in a long call while others wait for their barriers, and hold rows for the checkpoint meanwhile."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=3, rows=200, faults=())
    random = Random(f"dawdling {seed}")
    calls = tuple(Fault(100 + 150 * i, LONG_CALL, 3 * random.randrange(1000)) for i in range(5))
    kill = Fault(400 + random.randrange(600), "kill_slot", seed)
    faults = tuple(sorted((*calls, kill), key=lambda fault: fault.step))
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0, faults=faults)
    return replace(drawn, sink_rows=1, sink_pause_s=0.003, rounds=1, batch_rows=3)


def joining(seed: int) -> Scenario:
    """Small batches wait in many channels, some of them after barriers that were aligned: slots take long for every mail."""
    topology, parallelism = (("keyed", 4), ("union", 3))[seed % 2]
    drawn = draw(seed, topology=topology, parallelism=parallelism, rows=300, faults=())
    tempo = replace(drawn.tempo, mail_us=400, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, aligned_timeout_s=None, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0)
    return replace(drawn, batch_rows=10, splits=7, rounds=1, row_us=0, sink_rows=0, queue_time_s=None)


def joining_tight(seed: int) -> Scenario:
    """As `joining`, with no buffer more than it takes."""
    return replace(joining(seed), pool_buffers=0)
