"""Regions of scenarios around what is at rest: checkpoints in their directory, output, splits, and state that is redistributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from midstream.simulation.faults import IN_RECOVERY, PARALLELISMS, RECOVERING, Fault
from midstream_lab.fault_kinds import (
    AT_IT,
    BACKLOGGED,
    COMMIT_FROZEN,
    COMMITTING,
    DELETE_FAILS,
    DELETION_FROZEN,
    ENDING,
    HANGS,
    LOADS_FAIL,
    PARTLY_FINISHED,
    SAVEPOINT_SLOW,
    TAKEN_RECOVERING,
)
from midstream_lab.jobs.shapes import FORWARD, KEYED, Input, node_of, source_node
from midstream_lab.scenarios.scenario import Scenario, draw, with_backlog
from midstream_lab.scenarios.targeted import close_behind, hanging


def going_back_and_forth(seed: int) -> Scenario:
    """The job rewinds to older checkpoints and savepoints again and again."""
    drawn = draw(seed, topology="keyed", parallelism=2, faults=("savepoint",), rows=100)
    back = tuple(Fault(150 + 120 * i + seed * 37 % 100, "go_back", seed * 7919 + 104_729 * i) for i in range(5))
    faults = tuple(sorted((*drawn.faults, *back), key=lambda fault: fault.step))
    return replace(drawn, interval_s=0.002, retained=3, sink_rows=1, sink_pause_s=0.003, faults=faults)


def frozen(seed: int) -> Scenario:
    """A driver is frozen between its check of the epochs and the writing of metadata; then slots die."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=100, faults=())
    faults = (
        Fault(60 + seed * 37 % 200, "freeze_at_publish", seed * 7919),
        Fault(500 + seed * 53 % 400, "kill_driver", seed),
        Fault(900 + seed * 53 % 400, "kill_driver", seed),
    )
    tempo = replace(drawn.tempo, io_us=100, control_us=400, clock_tick_us=0)
    return replace(drawn, tempo=tempo, interval_s=0.002, retained=3, sink_rows=1, sink_pause_s=0.01, faults=faults)


def with_requests(*kinds: str) -> Callable[[int], Scenario]:
    """Of a seed: requests and failures follow each other while checkpoints are made."""

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=200)
        faults = tuple(Fault(90 + 45 * i + seed * 37 % 200, kinds[(seed + i) % len(kinds)], seed + i) for i in range(6))
        tempo = replace(drawn.tempo, mail_us=40, io_us=(100, 2000)[seed % 2], clock_tick_us=0)
        drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0)
        return replace(drawn, batch_rows=3, row_us=1000, sink_rows=1, sink_pause_s=0.003)

    return scenario


def intolerant(seed: int) -> Scenario:
    """Now and then a checkpoint cannot be written, and three in a row are too many."""
    drawn = with_requests("write_fails", "publish_fails")(seed)
    return replace(drawn, tolerable_failures=2, interval_s=0.005)


def restarted(kinds: tuple[str, ...], seed: int) -> Scenario:
    drawn = draw(seed, topology=("union", "keyed")[seed % 2], parallelism=2, rescale_to=3, faults=(), rows=60)
    faults = tuple(Fault(60 + 110 * i + seed * 37 % 110, kinds[(seed + i) % len(kinds)], seed + i) for i in range(5))
    tempo = replace(drawn.tempo, mail_us=40, io_us=(100, 2000)[seed % 2], clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.001, min_pause_s=0.0, timeout_s=60.0, row_us=1000)
    return replace(drawn, splits=7, rounds=3, readers=(1, 2)[seed % 3 == 0], batch_rows=3)


def finding(seed: int) -> Scenario:
    """Splits are found one by one, slowly, while attempts fail."""
    drawn = restarted(("user_error", "kill_slot"), seed)
    faults = tuple(replace(fault, step=50 + (fault.step - 60) // 2) for fault in drawn.faults)
    return replace(drawn, faults=faults, tempo=replace(drawn.tempo, io_us=10_000), rounds=7)


def committing(*kinds: str) -> Callable[[int], Scenario]:
    """Of a seed: much is prepared, checkpoints follow each other, and commits take long."""

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=100)
        faults = tuple(
            Fault(120 + 130 * i + seed * 37 % 130, kinds[(seed + i) % len(kinds)], seed + i) for i in range(6)
        )
        tempo = replace(drawn.tempo, mail_us=40, io_us=(2000, 10_000)[seed % 2], clock_tick_us=0, interleave=0.2)
        drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.0005, min_pause_s=0.0, aligned_timeout_s=0.0)
        return replace(drawn, timeout_s=60.0, batch_rows=3, row_us=1000, retained=1)

    return scenario


def outcome_unknown(seed: int) -> Scenario:
    """Metadata is written when it has been given up and the attempt has ended, and then the driver dies."""
    drawn = hanging(seed)
    hang, kill_driver = drawn.faults
    hang = replace(hang, kind=HANGS, victim=1 + 5 * (210_000 + seed * 7919 % 60_000))
    again = replace(hang, step=hang.step + 40, kind="kill_slot")
    late = tuple(replace(again, step=again.step + 60 * i, victim=i) for i in range(4))
    return replace(drawn, faults=(hang, *late, replace(kill_driver, step=kill_driver.step + 300)), rows=200)


def _victim(kind: str, number: int) -> int:
    """The number of a fault that makes this one of `AT_IT` strike."""
    return len(AT_IT) * number + AT_IT.index(kind)


def struck_committing(*kinds: str) -> Callable[[int], Scenario]:
    """Of a seed: all sinks commit on slots, in two lanes or more, and one of `kinds` strikes in the midst, again and again."""

    def scenario(seed: int) -> Scenario:
        topology = ("keyed", "pipeline")[seed % 2]
        drawn = draw(
            seed, topology=topology, parallelism=3, rescale_to=2 if "stop" in kinds else None, faults=(), rows=100
        )
        struck = tuple(
            Fault(40 + 90 * i + seed * 37 % 90, COMMITTING, _victim(kinds[(seed + i) % len(kinds)], seed * 7 + i))
            for i in range(5)
            if kinds[(seed + i) % len(kinds)] in AT_IT
        )
        others = tuple(
            Fault(60 + 110 * i + seed * 31 % 110, kind, seed + i)
            for i in range(5)
            if (kind := kinds[(seed + i) % len(kinds)]) not in AT_IT
        )
        faults = tuple(sorted((*drawn.faults, *struck, *others), key=lambda fault: fault.step))
        tempo = replace(drawn.tempo, mail_us=40, control_us=400, io_us=2000, clock_tick_us=0, interleave=0.2)
        drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.002, min_pause_s=0.0, aligned_timeout_s=0.0)
        return replace(drawn, timeout_s=60.0, batch_rows=3, row_us=1000, retained=1, on_slots=1.0)

    return scenario


def shrinking_committing(seed: int) -> Scenario:
    """All sinks commit on slots, slowly, and the job continues with fewer of them, and with more, again and again."""
    drawn = struck_committing("rescale")(seed)
    steps = (60 + 150 * i + seed * 31 % 150 for i in range(6))
    faults = tuple(Fault(step, "rescale", PARALLELISMS.index(1 + i % 2 * 2)) for i, step in enumerate(steps))
    return replace(drawn, faults=faults)


def loaded_again(seed: int) -> Scenario:
    """All sinks commit on slots, which cannot load them at first."""
    return struck_committing(LOADS_FAIL)(seed)


def deleted_again(seed: int) -> Scenario:
    """No old checkpoint can be deleted at first, not even the last one of a short job."""
    drawn = draw(seed, topology=("keyed", "pipeline")[seed % 2], parallelism=2, faults=(), rows=25)
    tempo = replace(
        drawn.tempo, mail_us=5, control_us=50, io_us=(2000, 10_000)[seed % 2], clock_tick_us=0, interleave=0.0
    )
    drawn = replace(drawn, tempo=tempo, faults=(Fault(20, DELETE_FAILS, 0),), interval_s=0.005, min_pause_s=0.0)
    return replace(drawn, timeout_s=60.0, retained=1, batch_rows=3, row_us=1000)


def dealt_anew(*topologies: str) -> Callable[[int], Scenario]:
    """Of a seed: the job continues at another parallelism, with more keys than key groups."""

    def scenario(seed: int) -> Scenario:
        before, after = ((3, 2), (2, 3), (1, 4), (4, 3))[seed % 4]
        topology = topologies[seed % len(topologies)]
        drawn = draw(seed, topology=topology, parallelism=before, rescale_to=after, faults=(), rows=100)
        tempo = replace(drawn.tempo, mail_us=40, io_us=100, clock_tick_us=0)
        stops = tuple(Fault(200 + 300 * i + seed * 37 % 200, "stop", 0) for i in range(3))
        drawn = replace(drawn, tempo=tempo, faults=stops, interval_s=0.002, timeout_s=60.0, batch_rows=3, row_us=1000)
        return replace(drawn, keys=50, skew=0.0, key_groups=16, splits=7, readers=2)

    return scenario


def windowed(*topologies: str) -> Callable[[int], Scenario]:
    """Of a seed: slots die while windows of several keys are open, and the job continues at another parallelism."""

    def scenario(seed: int) -> Scenario:
        topology = topologies[seed % len(topologies)]
        before, after = ((3, 2), (2, 3), (2, 1), (1, 3))[seed % 4]
        drawn = draw(seed, topology=topology, parallelism=before, rescale_to=after, faults=(), rows=200)
        kinds = ("kill_slot", "stop", "kill_slot", "stop")
        faults = tuple(Fault(150 + 200 * i + seed * 37 % 150, kind, seed + i) for i, kind in enumerate(kinds))
        tempo = replace(drawn.tempo, mail_us=40, io_us=100, clock_tick_us=0)
        drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.002, timeout_s=60.0, row_us=1000)
        drawn = replace(drawn, readers=1, rounds=2)  # what is found later is late
        return replace(drawn, keys=3, skew=0.0, key_groups=16, splits=2, batch_rows=(3, 10)[seed % 2], text_bytes=0)

    return scenario


def uneven(seed: int) -> Scenario:
    """The job continues at another parallelism while its subtasks have come to different times."""
    drawn = windowed("window", "sliding")(seed)
    stop = Fault(100, BACKLOGGED, 1)
    more = tuple(Fault(200 * i, RECOVERING, 1 + 9 * i) for i in range(1, 4))
    faults = tuple(sorted((stop, *more, *drawn.faults), key=lambda fault: fault.step))
    return replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003, faults=faults)


def behind_closely(scenario_of: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    """The same, where event time follows the rows so closely that windows fire all the while, not only at the end."""

    def scenario(seed: int) -> Scenario:
        drawn = scenario_of(seed)
        return replace(drawn, shape=close_behind(drawn.shape), rescaled=drawn.rescaled and close_behind(drawn.rescaled))

    return scenario


def firing_slowly(seed: int) -> Scenario:
    """Windows of many keys fire, and reading the clock takes long: barriers come between the key groups of a firing."""
    drawn = behind_closely(windowed("sliding", "window"))(seed)
    steps = (100 + 150 * i + seed * 37 % 150 for i in range(12))
    faults = tuple(Fault(step, ("kill_slot", "stop")[i % 2], seed + i) for i, step in enumerate(steps))
    drawn = replace(drawn, faults=faults, rows=100, keys=50, aligned_timeout_s=0.0)
    return replace(drawn, small_chunks=True, tempo=replace(drawn.tempo, clock_tick_us=2000))


def dropping_late(seed: int) -> Scenario:
    """Windows drop many late rows, which no side output takes, and slots are killed, or the job ends, soon afterwards."""
    random = Random(f"dropping late {seed}")
    drawn = windowed("combined_window", "combined_slide", "combined_session")(seed)
    steps = sorted(random.randrange(100, 4_000) for _ in range(6))
    faults = tuple(Fault(step, random.choice(("kill_slot", "user_error")), seed + i) for i, step in enumerate(steps))
    drawn = replace(drawn, rows=400, splits=7, rounds=7, batch_rows=10, row_us=0)
    if random.random() >= 0.7:
        return replace(drawn, faults=(), has_checkpoints=False)
    return replace(drawn, faults=faults, interval_s=0.002)


def partly_finished(seed: int) -> Scenario:
    """The driver dies when some of the subtasks that got the same broadcast have finished and others have not."""
    drawn = draw(seed, topology="broadcast", parallelism=4, rows=100, faults=())
    faults = (Fault(50, PARTLY_FINISHED, 0),)
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.002, min_pause_s=0.0, timeout_s=60.0)
    # Sources are soon at their end, and what is in flight then has the keys of one subtask.
    drawn = replace(drawn, splits=14, rounds=1, keys=10, skew=0.9, key_groups=16, text_bytes=0, pool_buffers=1024)
    return replace(drawn, queue_time_s=None, aligned_timeout_s=0.0, row_us=4000, sink_rows=0, batch_rows=3)


def rejoined_with_gaps(seed: int) -> Scenario:
    """The rows of one subtask are recovered by several; the driver dies when some have read all of them and others have not.

    One subtask continues then, with what is left, and again several.
    """
    drawn = draw(seed, topology="keyed", parallelism=1, rescale_to=5, faults=())
    drawn = replace(with_backlog(drawn, Random(seed)), sink_pause_s=0.003)
    stop = Fault(60, BACKLOGGED, IN_RECOVERY.index("stop"))
    faults = (stop, *(Fault(100 * i, TAKEN_RECOVERING, 0) for i in range(1, 12)))
    drawn = replace(drawn, faults=faults, rows=800, batch_rows=100, row_us=1000, aligned_timeout_s=0.0)
    return replace(drawn, keys=50, skew=0.0, key_groups=16, text_bytes=0, pool_buffers=1024, interval_s=0.002)


def learning_late(seed: int) -> Scenario:
    """Barriers are faster than the notification that the checkpoint before has completed; only one is kept, and rows are rare."""
    drawn = draw(seed, topology="keyed", parallelism=3, faults=(), rows=30)
    tempo = replace(drawn.tempo, mail_us=5, control_us=1500, data_us=20, io_us=100, clock_tick_us=0, interleave=0.0)
    drawn = replace(drawn, tempo=tempo, aligned_timeout_s=0.0, interval_s=0.0002, min_pause_s=0.0, timeout_s=60.0)
    drawn = replace(drawn, retained=1, inline_bytes=0, keys=10, skew=0.0, row_us=0, sink_rows=0)
    return replace(drawn, splits=15, rounds=15, readers=1)  # found one by one, so rows are rare


def waiting_in_runs(seed: int) -> Scenario:
    """Rows of a join wait for others, in runs that are merged with the next rows as soon as a checkpoint has stored them."""
    drawn = draw(seed, topology="join", parallelism=1 + seed % 2, faults=(), rows=100)
    tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, interval_s=0.0005, min_pause_s=0.0, timeout_s=60.0, inline_bytes=0)
    drawn = replace(drawn, keys=(1, 3)[seed % 2], batch_rows=3, row_us=1000, sink_rows=0, small_chunks=True)
    return replace(drawn, splits=3, rounds=1, readers=3)  # event time of each is at its own pace, so that rows wait


def ending_with_generators(seed: int) -> Scenario:
    """The driver dies when event time has ended in a source whose consumer is slow, and another source has not ended.

    The program that continues has generators of watermarks in other places.
    """
    shape = (
        source_node("pass"),
        source_node("pass", rows_share=2.0),
        source_node(rows_share=4.0),
        node_of("timer", Input(0, KEYED), Input(1, KEYED), Input(2, KEYED)),
        node_of("sink", Input(3, FORWARD)),
    )
    drawn = draw(seed, topology="timers", parallelism=1, rows=25, faults=())
    faults = tuple(Fault(20 + 200 * i, ENDING, 0) for i in range(2))
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(
        drawn, shape=shape, tempo=tempo, faults=faults, changes=1.0, new_generators=True, splits=1, rounds=1
    )
    drawn = replace(drawn, interval_s=0.01, min_pause_s=0.0, timeout_s=60.0, aligned_timeout_s=None, keys=10, skew=0.0)
    drawn = replace(drawn, text_bytes=2000, buffer_bytes=4096, pool_buffers=1, batch_rows=3, row_us=2000)
    return replace(drawn, sink_rows=0, queue_time_s=None)


def given_up_and_frozen(seed: int) -> Scenario:
    """A driver gives up writing metadata, completes the next checkpoint, is frozen, and then the metadata is written."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=400, faults=())
    random = Random(f"given up and frozen {seed}")
    hang_us, frozen_us = random.randrange(400_000, 900_000), random.randrange(700_000, 1_200_000)
    hangs = Fault(60 + seed * 37 % 200, HANGS, 5 * (hang_us + hang_us % 2) + 5)
    frozen = Fault(hangs.step + random.randrange(150, 600), "stop_driver", frozen_us)
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=(hangs, frozen), interval_s=0.02, timeout_s=0.2, retained=3)
    return replace(drawn, inline_bytes=0, batch_rows=3, sink_rows=1, sink_pause_s=0.01, row_us=0)


def back_to_pending(seed: int) -> Scenario:
    """The job is started over while commits fail, rewinds to a checkpoint whose output is pending, and rewinds again."""
    drawn = draw(seed, topology="keyed", parallelism=1, rows=100, faults=())
    random = Random(f"back to pending {seed}")
    fails = tuple(Fault(40 + 30 * i, "commit_fails", 2) for i in range(8))
    over = Fault(120 + random.randrange(60), "go_back", _back_by_death(3 + 4 * random.randrange(1000)))
    first = Fault(over.step + 150 + random.randrange(60), "go_back", _back_by_death(4 * random.randrange(1000)))
    second = Fault(first.step + 250 + random.randrange(200), "go_back", _back_by_death(4 * random.randrange(1000)))
    faults = tuple(sorted((*fails, over, first, second), key=lambda fault: fault.step))
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.005, min_pause_s=0.0, timeout_s=60.0, retained=10)
    return replace(drawn, batch_rows=3, row_us=1000, sink_rows=0, aligned_timeout_s=0.0)


def back_to_pending_keeping(seed: int) -> Scenario:
    """The same, where only the first start cannot commit: the others have committed what is kept, or rolled back."""
    drawn = back_to_pending(seed)
    random = Random(f"back to pending beside kept {seed}")
    back = [Fault(120 + random.randrange(60), "go_back", _back_by_death(3 + 4 * random.randrange(1000)))]
    for _ in range(3):
        step = back[-1].step + 100 + random.randrange(150)
        back.append(Fault(step, "go_back", _back_by_death(4 * random.randrange(1000))))
    return replace(drawn, faults=(Fault(20, "commit_fails", 0), *back))


def _back_by_death(where: int) -> int:
    """The number of a fault that kills the driver and lets the next start rewind; to the beginning if `where` is 4 n + 3."""
    return 5 * where + 2


def cancelled_and_frozen(seed: int) -> Scenario:
    """The job rewinds again and again, its driver is cancelled or frozen, and one checkpoint is retained."""
    drawn = draw(seed, topology="keyed", parallelism=1, rows=50, faults=())
    random = Random(f"back behind the frozen {seed}")
    steps = sorted([random.randrange(20, 800) for _ in range(12)])
    faults = tuple(Fault(step, "go_back", 5 * random.randrange(1 << 20) + random.choice((0, 4))) for step in steps)
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=10_000, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.02, min_pause_s=0.0, timeout_s=1.0, retained=1)
    return replace(drawn, batch_rows=3, row_us=1000, sink_rows=1, sink_pause_s=0.003)


def back_behind_a_commit(seed: int) -> Scenario:
    """A driver is frozen in the middle of a commit, and the next one rewinds to before it; drivers are killed meanwhile."""
    drawn = draw(seed, topology="keyed", parallelism=1, rows=100, faults=())
    random = Random(f"back behind a commit {seed}")
    faults = []
    for i in range(5):
        frozen = Fault(40 + 150 * i + random.randrange(60), COMMIT_FROZEN, random.randrange(1 << 22))
        faults += [frozen, Fault(frozen.step + random.randrange(5, 120), "kill_driver", random.randrange(1 << 20))]
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=random.choice((100, 2000)))
    drawn = replace(drawn, tempo=tempo, faults=tuple(sorted(faults, key=lambda fault: fault.step)), interval_s=0.02)
    drawn = replace(drawn, min_pause_s=0.0, timeout_s=60.0, retained=4, aligned_timeout_s=0.0)
    return replace(drawn, batch_rows=3, row_us=3000, sink_rows=0)


def back_to_the_deleted(seed: int) -> Scenario:
    """A driver is frozen while it deletes a checkpoint, to which the next one rewinds, again and again."""
    drawn = draw(seed, topology="keyed", parallelism=1, rows=100, faults=())
    random = Random(f"back to the deleted {seed}")
    faults = tuple(Fault(20 + 120 * i, DELETION_FROZEN, random.randrange(1 << 20)) for i in range(6))
    # Nothing happens between the operations of a piece of I/O, but for this fault.
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, data_us=200, io_us=2000, clock_tick_us=0, interleave=0.0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.02, min_pause_s=0.0, timeout_s=60.0, retained=1)
    return replace(drawn, inline_bytes=0, batch_rows=3, row_us=4000, sink_rows=0, aligned_timeout_s=0.0)


def saved_too_late(seed: int) -> Scenario:
    """A driver is frozen while it copies a savepoint to a slow place, and continues when another one has taken over."""
    drawn = draw(seed, topology="keyed", parallelism=2, rows=400, faults=())
    random = Random(f"saved too late {seed}")
    faults: list[Fault] = []
    for i in range(5):
        savepoint = Fault(60 + 300 * i + random.randrange(100), SAVEPOINT_SLOW, 4000 + 2 * random.randrange(3000))
        faults += (
            savepoint,
            Fault(savepoint.step + random.randrange(60, 180), "stop_driver", random.randrange(60_000)),
        )
    faults.sort(key=lambda fault: fault.step)
    tempo = replace(drawn.tempo, mail_us=40, control_us=50, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=tuple(faults), interval_s=0.1, timeout_s=60.0, inline_bytes=0)
    return replace(drawn, batch_rows=3, sink_rows=1, sink_pause_s=0.003)


def taken_over(seed: int) -> Scenario:
    """Tables, joins and running aggregates in small chunks, all of them in files, while slots die and the job is rescaled:
    the slots that stay take over what they still hold.
    """
    random = Random(f"taken over {seed}")
    topology = ("tables", "running", "tables", "join")[seed % 4]
    drawn = draw(seed, topology=topology, parallelism=random.choice((2, 3)), faults=(), rows=200)
    kinds = ("kill_slot", "kill_slot", "rescale")
    found = [Fault(random.randrange(200, 3000), random.choice(kinds), random.randrange(1 << 20)) for _ in range(5)]
    tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, faults=tuple(sorted(found, key=lambda fault: fault.step)), tempo=tempo, interval_s=0.002)
    drawn = replace(drawn, min_pause_s=0.0, timeout_s=60.0, aligned_timeout_s=0.0, small_chunks=True, inline_bytes=0)
    return replace(drawn, batch_rows=3, row_us=500, keys=20, splits=4, key_groups=16)
