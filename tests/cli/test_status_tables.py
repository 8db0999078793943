"""What people see of a JobStatus."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console, RenderableType

from midstream.cli import formatting
from midstream.cli.rates import Rates
from midstream.cli.status_tables import (
    LiveView,
    bar,
    bottleneck,
    checkpoint_line,
    job_view,
    jobs_table,
    progress_line,
    recovered_share,
)
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.protocol.bottleneck import uneven
from midstream.engine.protocol.job_status import (
    AutoscaleStatus,
    CheckpointStatus,
    FlowStatus,
    GaugeStatus,
    HeldBackStatus,
    JobStatus,
    OperatorStatus,
    RecoveryStatus,
    SubtaskStatus,
    VertexStatus,
    WaitStatus,
)
from sample_status import NOW_MS, later


def render(view: RenderableType, width: int = 160, height: int = 50) -> str:
    console = Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=False)
    console.print(view)
    return console.export_text()


def test_a_job_shows_its_operators_checkpoints_and_failures(status):
    shown = render(job_view(status))
    assert "flights" in shown
    assert "running" in shown
    assert "1,234,567" in shown
    assert "2013-01-01 07:00:00" in shown
    assert " 75%" in shown
    assert "3 completed, 1 failed; last: 3 (120 ms, 1.2 MiB), 5.0 s ago" in shown
    assert "restarts 1" in shown
    assert "last failure 20 s ago: operator 'parse': ValueError: bad row 17" in shown
    assert "slot memory 200.0 MiB, 210.0 MiB" in shown
    with_pids = msgspec.structs.replace(status, slot_pids=(11, 12), slot_hosts=("10.0.0.1", "10.0.0.1"))
    assert "slot memory 200.0 MiB (process 11), 210.0 MiB (process 12)" in render(job_view(with_pids))
    apart = msgspec.structs.replace(with_pids, slot_hosts=("10.0.0.1", "10.0.0.2"))
    assert "200.0 MiB (process 11 on 10.0.0.1), 210.0 MiB (process 12 on 10.0.0.2)" in render(job_view(apart))


def test_a_job_shows_what_has_passed_each_edge_and_how_large_batches_were(status):
    for width in (80, 160):
        (line,) = [line for line in render(job_view(status), width=width).splitlines() if "keyed" in line]
        assert re.sub(" +", " ", line).strip() == "parse [bold]x[/] → write keyed 1,200,000 96.0 MiB 800 –"
    unused = msgspec.structs.replace(status, flows=(FlowStatus(0, 0, 0),))
    (line,) = [line for line in render(job_view(unused)).splitlines() if "keyed" in line]
    assert line.split()[-4:] == ["0", "0", "B", "–"]


def test_what_holds_event_time_back_is_named_once_and_only_when_it_is_far_behind(status):
    def shown(first: HeldBackStatus | None, second: HeldBackStatus | None, **changes: object) -> list[str]:
        read, write = status.vertices
        read, write = (msgspec.structs.replace(v, held_back=h) for v, h in ((read, first), (write, second)))
        view = render(job_view(msgspec.structs.replace(status, vertices=(read, write), **changes)))
        return [line.strip() for line in view.splitlines() if "held back" in line]

    slow = HeldBackStatus(0, "read", 1, "read-\x1b[2J3", 1_000_000, 840_000_000)
    (line,) = shown(slow, slow)
    assert line.startswith("event time of write is held back by read, subtask 1, split read-")
    assert line.endswith("3: 14 min behind the most advanced") and "\x1b" not in line
    (line,) = shown(slow, None)
    assert line.startswith("event time of read → parse is held back by read, subtask 1")
    near = msgspec.structs.replace(slow, behind_us=299_000_000)
    assert shown(near, near) == [] and shown(slow, slow, state="restarting") == []
    silent = HeldBackStatus(0, "read", 1, "", None, None)
    assert shown(None, silent) == [
        "event time of write is held back by read, subtask 1: no watermark of it has arrived"
    ]
    assert shown(None, silent, started_ms=NOW_MS - 5_000) == []
    one = HeldBackStatus(1, "write", 0, "f", None, None)
    assert shown(None, one) == ["event time of write is held back by write, split f: no row of it has arrived"]


def test_a_source_whose_splits_wait_for_slower_ones_is_named(status):
    read, write = status.vertices
    ahead = msgspec.structs.replace(status, vertices=(msgspec.structs.replace(read, splits_ahead=3), write))
    assert "read → parse: 3 of its splits wait, ahead by more than drift" in render(job_view(ahead))
    assert "ahead by more than drift" not in render(job_view(status))


def test_a_job_that_scales_itself_says_why_it_runs_as_it_does(status):
    reason = "the busiest slot works 99% of the time"
    scaled = msgspec.structs.replace(status, autoscale=AutoscaleStatus(1, 8, False, 2, 5, reason))
    assert f"autoscale: the job runs at parallelism 2, of 1 to 8: {reason}" in render(job_view(scaled), width=200)
    advised = msgspec.structs.replace(status, autoscale=AutoscaleStatus(1, 8, True, 2, 5, reason))
    assert f"autoscale: parallelism 5 would be better than 2: {reason}" in render(job_view(advised), width=200)
    content = msgspec.structs.replace(status, autoscale=AutoscaleStatus(1, 8, True, 2, 2, reason))
    assert f"autoscale: parallelism 2 is right: {reason}" in render(job_view(content), width=200)
    assert "autoscale" not in render(job_view(status))


def test_a_name_in_a_job_is_printed_as_it_is_and_cannot_steer_the_terminal(status):
    assert "parse [bold]x[/]" in render(job_view(status))
    evil = msgspec.structs.replace(status, name="a\x1b[2Jb")
    assert "\x1b" not in render(job_view(evil))
    assert "\x1b" not in render(jobs_table([evil]))


def test_a_narrow_terminal_still_shows_operators_rates_and_pressure(status):
    rates = Rates()
    rates.add(status)
    after = later(status, 2, rows=20_000)
    rates.add(after)
    shown = render(job_view(after, rates), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("parse [bold]x[/]", "1,254,567", "10.0 k", "2013-01-01 07:00:00", " 75%", " 10%"):
        assert part in shown


def test_rates_are_rows_per_second_of_the_last_seconds(status):
    rates = Rates()
    rates.add(status)
    assert rates.rows_per_s("read") is None
    for second in range(1, 9):
        rates.add(later(status, second, rows=second * second * 1000))
    assert rates.rows_per_s("read") == pytest.approx((64 - 25) * 1000 / 3)
    shown = render(job_view(later(status, 8, 64_000), rates))
    assert "13.0 k" in shown


def test_a_progress_line_names_sources_and_sinks(status):
    rates = Rates()
    rates.add(status)
    after = later(status, 2, rows=20_000)
    rates.add(after)
    line = progress_line(after, rates)
    assert "\n" not in line
    assert "read 1,254,567 rows (10.0 k/s)" in line
    assert "write 1,220,000 rows (10.0 k/s)" in line
    assert "parse" not in line
    assert "checkpoint 3 (120 ms, 1.2 MiB)" in line
    assert "restarts 1" in line


def test_the_list_has_one_row_per_job(status):
    shown = render(jobs_table([status, msgspec.structs.replace(status, job_id="f" * 16, name="other")]))
    assert shown.count("running") == 2
    assert "other" in shown
    assert "1,234,567" in shown


def test_operators_of_the_same_name_are_told_apart(status):
    read, write = status.vertices
    twins = tuple(OperatorStatus(uid, "parquet", 1, 5, 0) for uid in ("parquet-1", "flights"))
    twice = msgspec.structs.replace(status, vertices=(read, msgspec.structs.replace(write, operators=twins)))
    shown = render(job_view(twice), width=140)
    assert "parquet-1  " in shown and "parquet (flights)  " in shown and "read" in shown
    assert "parquet (flights) 5 rows" in progress_line(twice, Rates())


def test_a_checkpoint_that_takes_long_is_said_to_be_in_progress(status):
    for took_ms, is_shown in ((1500, False), (12_000, True)):
        slow = CheckpointStatus(4, "in_progress", NOW_MS - took_ms, took_ms, 0)
        view = render(job_view(msgspec.structs.replace(status, checkpoints=(slow, *status.checkpoints))))
        assert ("checkpoint 4 has been in progress for 12 s" in view) == is_shown


def test_a_failed_checkpoint_says_why(status):
    failed = CheckpointStatus(4, "failed", NOW_MS - 1000, 0, 0, "timed out")
    assert "last: 4 failed: timed out" in render(job_view(msgspec.structs.replace(status, last_checkpoint=failed)))


def test_recovery_of_rows_in_flight_is_shown_while_it_lasts(status):
    read, write = status.vertices
    part = (RecoveryStatus(0, 600, 100), RecoveryStatus(1, 400, 275))
    recovering = msgspec.structs.replace(status, vertices=(msgspec.structs.replace(read, recovering=part), write))
    assert recovered_share(recovering.vertices) == 0.375 and recovered_share([write]) is None
    shown = render(job_view(recovering), width=140)
    assert "running  recovering 37 %" in shown.splitlines()[0]
    assert "read  recovering 37 %" in shown
    assert "recovering 37 %" in progress_line(recovering, Rates())
    assert "recovering" not in render(job_view(status)) and "recovering" not in progress_line(status, Rates())


def test_subtasks_that_do_not_run_are_counted(status):
    first, second = status.vertices
    mixed = msgspec.structs.replace(first, states={"running": 1, "finished": 1})
    done = msgspec.structs.replace(second, states={"finished": 1})
    shown = render(job_view(msgspec.structs.replace(status, vertices=(mixed, done))))
    assert "1 finished" in shown
    assert "write  finished" in shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0123, "12 ms"), (2.44, "2.4 s"), (59.9, "1 min"), (200, "3 min 20 s"), (100_000, "1 d 3 h"), (-2, "-2.0 s")],
)
def test_spans_have_their_two_most_significant_units(seconds, expected):
    assert formatting.span(seconds) == expected


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (None, "–"),
        (MIN_WATERMARK_US, "–"),
        (MAX_WATERMARK_US, "end of data"),
        (0, "1970-01-01 00:00:00"),
        (MAX_WATERMARK_US - 1, f"{MAX_WATERMARK_US - 1} µs"),
    ],
)
def test_watermarks_are_moments_where_a_calendar_reaches(mark, expected):
    assert formatting.watermark(mark) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(950, "950"), (12_400, "12.4 k"), (3_100_000, "3.1 M"), (999_950, "1.0 M"), (0, "0")]
)
def test_rates_are_short(number, expected):
    assert formatting.short(number) == expected


def test_what_functions_count_is_shown(status):
    read = status.vertices[0]
    parse = msgspec.structs.replace(
        read.operators[1],
        counters={"calls": 1_204, "cost": 0.1 + 0.2},
        gauges={"depth": GaugeStatus(1, 2, 3), "same": GaugeStatus(4, 4, 4)},
    )
    many = msgspec.structs.replace(read.operators[0], counters={f"c{i}": i for i in range(10)})
    vertices = (msgspec.structs.replace(read, operators=(many, parse)), *status.vertices[1:])
    shown = render(job_view(msgspec.structs.replace(status, vertices=vertices)))
    assert "metrics of parse [bold]x[/]: calls 1,204, cost 0.3, depth 3 (1 to 2), same 4" in shown
    assert "metrics of read: c0 0, c1 1, c2 2, c3 3, c4 4, c5 5, c6 6, c7 7, 2 more (--json)" in shown
    assert "metrics of" not in render(job_view(status))


def test_rows_dropped_as_late_are_seen_wherever_one_looks(status):
    (read, write) = status.vertices
    dropping = msgspec.structs.replace(write.operators[0], late_rows=1_234)
    vertices = (read, msgspec.structs.replace(write, operators=(dropping,)))
    late = msgspec.structs.replace(status, vertices=vertices, warnings=("operator 'write' has dropped 1234 rows",))
    shown = render(job_view(late))
    assert "write  1,234 late rows dropped" in shown
    assert "warning: operator 'write' has dropped 1234 rows" in shown
    assert "dropped 1,234 late rows" in progress_line(late, Rates())
    assert "late" not in render(job_view(status)) + progress_line(status, Rates())


def test_bad_records_are_seen_wherever_one_looks(status):
    (read, write) = status.vertices
    dropping = msgspec.structs.replace(read.operators[0], bad_records=1_234)
    bad = msgspec.structs.replace(status, vertices=(msgspec.structs.replace(read, operators=(dropping,)), write))
    assert "1,234 bad records dropped" in render(job_view(bad))
    assert "dropped 1,234 bad records" in progress_line(bad, Rates())
    assert "bad records" not in render(job_view(status)) + progress_line(status, Rates())


def test_failed_rows_are_seen_wherever_one_looks(status):
    (read, write) = status.vertices
    failing = msgspec.structs.replace(read.operators[0], failed_rows=1_234)
    failed = msgspec.structs.replace(status, vertices=(msgspec.structs.replace(read, operators=(failing,)), write))
    assert "1,234 rows failed" in render(job_view(failed))
    assert "1,234 rows failed" in progress_line(failed, Rates())
    assert "rows failed" not in render(job_view(status)) + progress_line(status, Rates())


def test_what_is_waited_for_is_seen_wherever_one_looks(status):
    waits = (
        WaitStatus("sink 'write' to commit what it wrote", 42_000, 600_000),
        WaitStatus("operator 'slow' (subtask 1) (job.py:7 in fetch)", 40_100, is_call=True),
    )
    waiting = msgspec.structs.replace(status, waiting=waits)
    shown = " ".join(render(job_view(waiting)).split())
    assert "waiting for sink 'write' to commit what it wrote, 42 s so far (given up after 600 s)" in shown
    assert "operator 'slow' (subtask 1) (job.py:7 in fetch) has been in one call for 40 s" in shown
    assert "waiting for sink 'write' to commit what it wrote, 42 s so far" in progress_line(waiting, Rates())


def test_a_checkpoint_that_had_to_wait_for_its_barriers_says_how_long():
    done = CheckpointStatus(3, "completed", 0, 2_400, 0, alignment_ms=1_200.0)
    assert checkpoint_line(done) == "3 (2.4 s, 0 B, aligned in 1.2 s)"


def chain(status: JobStatus, length: int, slow: int) -> JobStatus:
    """A line of operators with long names, all of them held up by one."""
    vertices = tuple(
        VertexStatus(
            at,
            f"operator {at}",
            8,
            {"running": 8},
            (OperatorStatus(f"op-{at}", f"operator {at} whose name says all that it does", 8, 1_234_567, 1_234_567),),
            1_357_023_600_000_000,
            busy=0.86 if at == slow else 0.1,
            backpressured=0.9 if at < slow else 0.0,
        )
        for at in range(length)
    )
    edges = tuple((at, at + 1, "keyed") for at in range(length - 1))
    return msgspec.structs.replace(
        status,
        name="a job whose name has more than fifty characters, which is long",
        vertices=vertices,
        edges=edges,
        slots=8,
        slots_needed=8,
        slot_memory_bytes=(200 * 2**20,) * 8,
        slot_pids=tuple(range(12_345, 12_353)),
        warnings=("operator 'operator 3' has dropped 12 rows that came late, and this sentence is longer than a line",),
    )


@pytest.mark.parametrize(("length", "height"), [(12, 24), (12, 14), (60, 24), (60, 12)])
def test_in_a_small_terminal_the_bottleneck_the_ends_and_all_facts_are_seen(status, length, height):
    job = chain(status, length, slow=length // 2)
    lines = render(LiveView(job, Rates()), width=80, height=height).splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= 80
    assert lines[0].startswith("a job whose name") and lines[0].rstrip().endswith(
        "…  running  1 min  slots 8/8  0123456789abcdef"
    )
    names = [found.group() for line in lines if (found := re.match(r"operator \d+", line))]
    assert {"operator 0", f"operator {length // 2}", f"operator {length - 1}"} <= set(names)
    [slow] = [line for line in lines if "bottleneck" in line]
    assert slow.startswith(f"operator {length // 2} ") and "86%" in slow
    left_out = sum(int(line.split()[1]) for line in lines if line.startswith("… "))
    assert len(names) + left_out == length
    for fact in ("checkpoints 3 completed", "restarts 1  last failure", "warning: operator"):
        assert any(line.startswith(fact) for line in lines), fact


def test_a_bottleneck_is_what_others_wait_for_or_a_source_that_does_all_it_can(status):
    job = chain(status, 4, slow=2)
    assert bottleneck(job) is job.vertices[2]
    busy_source = chain(status, 4, slow=0)
    assert bottleneck(busy_source) is busy_source.vertices[0]
    idle = [msgspec.structs.replace(vertex, busy=0.6, backpressured=0.0) for vertex in job.vertices]
    assert bottleneck(msgspec.structs.replace(job, vertices=tuple(idle))) is None


def skewed(status, parallelism=4):
    """All rows but a few have one key: subtask 2 of the second vertex does all the work."""
    busy = [0.98 if subtask == 2 else 0.01 for subtask in range(parallelism)]
    subtasks = tuple(SubtaskStatus(i, 9_000 if i == 2 else 250, 0, busy[i], 0.0, None) for i in range(parallelism))
    source, slow = chain(status, 2, slow=1).vertices
    slow = msgspec.structs.replace(slow, parallelism=parallelism, subtasks=subtasks, busy=sum(busy) / parallelism)
    source = msgspec.structs.replace(source, backpressured=0.97, busy=0.02)
    return msgspec.structs.replace(status, vertices=(source, slow), edges=((0, 1, "keyed"),))


def test_one_busy_subtask_is_a_bottleneck_and_is_named_with_its_share_of_the_rows(status):
    job = skewed(status)
    slow = job.vertices[1]
    assert uneven(slow) is slow.subtasks[2] and bottleneck(job) is slow
    shown = render(LiveView(job, Rates()), width=160, height=40)
    assert "bottleneck in subtask 2" in shown
    assert "operator 1: subtask 2 is 98% busy, the other 3 are 1% on average; it has taken 92% of the rows" in shown


def test_a_task_whose_subtasks_are_alike_has_no_uneven_one(status):
    job = skewed(status)
    source, slow = job.vertices
    even = tuple(msgspec.structs.replace(subtask, busy=0.9) for subtask in slow.subtasks)
    slow = msgspec.structs.replace(slow, subtasks=even, busy=0.9)
    job = msgspec.structs.replace(job, vertices=(source, slow))
    assert uneven(slow) is None and bottleneck(job) is slow
    shown = render(LiveView(job, Rates()), width=160, height=40)
    assert "bottleneck" in shown and "subtask" not in shown


def test_bars_say_something_without_colour():
    assert [bar(part, "green").plain for part in (0.0, 0.5, 1.0)] == ["······   0%", "━━━···  50%", "━━━━━━ 100%"]


def test_two_jobs_of_one_name_are_told_apart_in_a_list_of_80_columns(status):
    one = msgspec.structs.replace(status, name="n" * 70, checkpoint_dir="/data/one")
    two = msgspec.structs.replace(one, job_id="f" * 16, checkpoint_dir=None, restarts=0)
    lines = render(jobs_table([one, two]), width=80).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    assert "0123456789abcdef nnn" in lines[1] and "running 2023-11-1" in lines[1] and "2/2 1,234,567" in lines[1]
    assert lines[3].rstrip() == "0123456789abcdef has 1 restart and 3 checkpoints in /data/one"
    assert lines[4].rstrip() == "ffffffffffffffff has no restarts, and no checkpoint directory"


def test_event_time_of_another_year_has_no_lag():
    assert formatting.lag(NOW_MS * 1000 - 90_000_000, NOW_MS) == "1 min 30 s"
    assert formatting.lag(0, NOW_MS) == "–"
