"""How many rows at once, against functions that take so much a call and so much a row."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.worker.batch_sizer import CALL_SHARE_MAX, BatchSizer
from midstream.engine.worker.source_rate import FIRST_ROWS, SourceRate

LIMIT = 131_072
SHORT_S = 0.002


def run(
    call_s: float, row_s: float, *, short_budget_s: float | None = None, noise: float = 0.0, calls: int = 300
) -> list[tuple[int, float]]:
    """Rows and seconds of each call; with `short_budget_s` as tasks cut their slices."""
    sizer, random, found = BatchSizer(0.01, short_budget_s), Random(f"{call_s} {row_s} {noise}"), []
    for _ in range(calls):
        rows = min(LIMIT, sizer.rows(256))
        seconds = (call_s + row_s * rows) * (1 + noise * random.random() ** 4)
        sizer.record(rows, seconds)
        found.append((rows, seconds))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("row_s", [1e-8, 1e-6, 1e-4, 1e-3, 0.1])
def test_rows_that_take_their_time_fill_the_budget_and_no_more(row_s: float, noise: float) -> None:
    found = run(0.0, row_s, noise=noise)[20:]
    clean_s = [row_s * rows for rows, _ in found]
    aimed_s = min(max(0.01, row_s), row_s * LIMIT)
    assert max(clean_s) <= (4 if noise < 1 else 8) * aimed_s
    assert sum(clean_s) / len(clean_s) >= aimed_s / 4


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("row_s", [1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("call_s", [0.005, 0.02, 0.1, 2.0])
def test_a_call_that_costs_more_than_the_budget_is_made_with_many_rows(
    call_s: float, row_s: float, noise: float
) -> None:
    found = run(call_s, row_s, noise=noise)[50:]
    rows, seconds = sum(rows for rows, _ in found), sum(seconds for _, seconds in found)
    best = LIMIT / (call_s + row_s * LIMIT)
    half = min(LIMIT, call_s / row_s)
    at_half = half / (call_s + row_s * half)
    assert rows / seconds >= 0.2 * min(best, at_half)


HISTORIES = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 1.0)), max_size=40)


@settings(max_examples=examples(300))
@given(
    budget_s=st.sampled_from([0.01, 0.02, 0.1]),
    is_slice=st.booleans(),
    share=st.floats(0.05, 30.0),
    row_s=st.sampled_from([1e-8, 1e-7, 1e-6, 1e-5, 1e-4]),
    before=st.one_of(HISTORIES, st.tuples(st.integers(1, 5_000), st.integers(1, 60))),
    noise=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_whatever_calls_there_were_before_what_a_call_costs_is_found_out(
    budget_s: float,
    is_slice: bool,
    share: float,
    row_s: float,
    before: list[tuple[int, float]] | tuple[int, int],
    noise: float,
) -> None:
    """A stream that began with single rows, or whose calls have all been alike, is not slow for ever."""
    call_s, random = share * budget_s, Random(f"{share} {row_s}")
    sizer = BatchSizer(budget_s, SHORT_S) if is_slice else BatchSizer(budget_s)

    def seconds(rows: int) -> float:
        return (call_s + row_s * rows) * (1 + noise * random.random() ** 4)

    for rows, took_s in before if isinstance(before, list) else [(before[0], seconds(before[0]))] * before[1]:
        sizer.record(rows, took_s)
    done, spent_s = 0, 0.0
    for call in range(600):
        rows = min(LIMIT, sizer.rows(256))
        took_s = seconds(rows)
        sizer.record(rows, took_s)
        if call >= 200:
            done, spent_s = done + rows, spent_s + took_s
    half = min(LIMIT, max(budget_s, call_s) / row_s)
    assert done / spent_s >= 0.2 * half / (call_s + row_s * half)


@pytest.mark.parametrize("slower", [5, 10, 100, 1000])
@pytest.mark.parametrize("after", [100, 113, 131])
@pytest.mark.parametrize("short_budget_s", [None, SHORT_S])
def test_after_the_first_call_that_is_much_slower_none_is_long(
    slower: int, after: int, short_budget_s: float | None
) -> None:
    sizer, found = BatchSizer(0.01, short_budget_s), []
    for call in range(after + 30):
        rows = min(LIMIT, sizer.rows(256))
        found.append(1e-6 * (slower if call >= after else 1) * rows)
        sizer.record(rows, found[-1])
    assert max(found[after + 1 :]) <= 0.04


@pytest.mark.parametrize("stalled_s", [0.05, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("at", [12, 16, 17, 20, 40])
@pytest.mark.parametrize("row_s", [0.003, 0.01, 0.05])
def test_a_call_that_stalls_does_not_make_slow_rows_come_many_at_a_time(
    row_s: float, at: int, stalled_s: float
) -> None:
    sizer, sizes = BatchSizer(0.01, SHORT_S), []
    for call in range(200):
        sizes.append(sizer.rows(1))
        sizer.record(sizes[-1], row_s * sizes[-1] + (stalled_s if call % 50 == at else 0.0))
    assert max(sizes) <= 4 and sizes.count(1) >= 180


@pytest.mark.parametrize("row_s", [0.003, 0.05, 1.0])
def test_two_rows_are_seldom_tried_where_single_rows_are_slow(row_s: float) -> None:
    sizes = [rows for rows, _ in run(0.0, row_s, short_budget_s=SHORT_S, calls=3_000)[100:]]
    assert max(sizes) <= 2 and sizes.count(2) <= 10


@pytest.mark.parametrize("disturbed_s", [1e-4, 3e-4, 1e-3])
@pytest.mark.parametrize("call_s", [5e-5, 1.5e-4])
def test_disturbances_are_not_taken_for_what_a_call_costs(call_s: float, disturbed_s: float) -> None:
    """On a busy machine three calls of ten take longer by chance; a barrier waits for as many rows as a slice has."""
    sizer, random, sizes = BatchSizer(0.01, SHORT_S), Random(f"{call_s} {disturbed_s}"), []
    for _ in range(3_000):
        sizes.append(min(4, sizer.rows(256, core_share=0.6)))
        disturbance_s = random.expovariate(1 / disturbed_s) if random.random() < 0.3 else 0.0
        sizer.record(sizes[-1], call_s + 6.2e-4 * sizes[-1] + disturbance_s)
    assert sum(rows * rows for rows in sizes[50:]) <= 1.6 * sum(sizes[50:])


@pytest.mark.parametrize(("slower", "disturbed_s"), [(0.5, 0.0), (0.5, 6e-3), (1.0, 2e-3), (2.0, 0.0), (2.0, 1e-3)])
@pytest.mark.parametrize("row_s", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("call_s", [2e-4, 1e-3, 4e-3])
def test_large_batches_among_small_ones_are_not_cut_to_pieces_where_calls_are_disturbed(
    call_s: float, row_s: float, disturbed_s: float, slower: float
) -> None:
    """Pieces would be batches for all tasks downstream. In a wide job on a busy machine nearly all calls are disturbed:
    each takes up to 1 + `slower` times as long, and three of ten take `disturbed_s` longer on average.
    """
    sizer, random = BatchSizer(0.01, SHORT_S), Random(f"{call_s} {row_s} {disturbed_s} {slower}")
    spent_s = fewest_s = 0.0
    for number in range(1_500):
        rest = batch = random.randint(1, 30) if random.random() < 0.85 else random.randint(500, 5_000)
        while rest:
            rows = -(-rest // max(1, round(rest / sizer.rows(128))))
            disturbance_s = random.expovariate(1 / disturbed_s) if disturbed_s and random.random() < 0.3 else 0.0
            sizer.record(rows, (call_s + row_s * rows) * (1 + slower * random.random()) + disturbance_s)
            rest -= rows
            if number >= 100:
                spent_s += call_s + row_s * rows
        if number >= 100:
            fewest_s += call_s + row_s * batch
    assert spent_s <= 3.5 * fewest_s


@pytest.mark.parametrize(("chain_s", "downstream_s"), [(0.0002, 0.18), (0.03, 0.05), (0.03, 0.3), (0.0005, 0.11)])
@pytest.mark.parametrize("first_rows", [1, 20, 1000])
def test_a_source_whose_rows_cost_nothing_downstream_gets_large_batches(
    first_rows: int, chain_s: float, downstream_s: float
) -> None:
    sizer, now_s = SourceRate(LIMIT, None), 0.0
    for call in range(500):
        rows = first_rows if call < 40 else sizer.rows_max
        sizer.record_emitted(rows, now_s, now_s + chain_s)
        now_s += max(chain_s, downstream_s)
    assert sizer.rows_max >= LIMIT // 4  # not all of it where it has just been asked what a call costs


def taken_in_bursts(call_s: float, row_s: float, lag: int, jitter: float, batches: int) -> list[tuple[int, float]]:
    """Rows and seconds of each batch of a source; it emits the next one when all but `lag` batches have been processed,
    or up to `jitter` times as long afterwards as a batch takes. So some leave one right after the other."""
    sizer, random, found = SourceRate(LIMIT, None), Random(f"{call_s} {row_s} {lag} {jitter}"), []
    processed_s: list[float] = []
    now_s = 0.0
    for _ in range(batches):
        rows, emitted_s = sizer.rows_max, now_s
        sizer.record_emitted(rows, now_s, now_s + 0.001)
        takes_s = call_s + row_s * rows
        processed_s.append(max(now_s, processed_s[-1] if processed_s else 0.0) + takes_s)
        room_s = processed_s[-1 - lag] if lag < len(processed_s) else 0.0
        now_s = max(now_s + 0.001, room_s + jitter * random.random() * takes_s)
        found.append((rows, now_s - emitted_s))
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("row_s", [1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("call_s", [0.001, 0.03, 0.12, 0.4])
def test_what_a_batch_costs_downstream_is_found_out_although_batches_are_taken_in_bursts(
    call_s: float, row_s: float, lag: int, jitter: float
) -> None:
    """A job of many tasks whose turns add up to more than the budget is not processed row by row."""
    found = taken_in_bursts(call_s, row_s, lag, jitter, 600)[200:]
    half = min(LIMIT, max(0.1, call_s) / row_s)
    assert sum(rows for rows, _ in found) / sum(s for _, s in found) >= 0.2 * half / (call_s + row_s * half)


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("row_s", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("call_s", [0.0, 0.001, 0.03])
def test_barriers_wait_behind_no_batch_that_takes_several_times_the_budget_downstream(
    call_s: float, row_s: float, lag: int, jitter: float
) -> None:
    longest = sorted(
        (call_s + row_s * rows for rows, _ in taken_in_bursts(call_s, row_s, lag, jitter, 600)), reverse=True
    )
    assert longest[0] <= 1.0 and longest[8] <= 0.4 and longest[60] <= 0.2, "the first queue fills without waiting"


def read_slowly(read_s: float, read_row_s: float, row_s: float, lag: int, batches: int) -> list[tuple[int, float]]:
    """Rows of each batch of a source, and how long it takes downstream. A batch is read while the one before it is
    processed, and emitted when all but `lag` batches have been processed; until it has been read, the source pauses."""
    sizer, found = SourceRate(LIMIT, None), []
    processed_s: list[float] = []
    now_s = 0.0
    for _ in range(batches):
        rows = sizer.rows_max
        sizer.record_emitted(rows, now_s, now_s + 0.0001)
        found.append((rows, row_s * rows))
        processed_s.append(max(now_s, processed_s[-1] if processed_s else 0.0) + row_s * rows)
        room_s = processed_s[-1 - lag] if lag < len(processed_s) else 0.0
        read_at_s = now_s + read_s + read_row_s * sizer.rows_max
        if room_s < read_at_s:
            sizer.pause()
        now_s = max(room_s, read_at_s)
    return found


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("row_s", [0.0, 1e-7, 1e-6])
@pytest.mark.parametrize(("read_s", "read_row_s"), [(0.0008, 5e-7), (0.02, 1e-6), (0.0001, 2e-6)])
def test_a_source_that_reads_more_slowly_than_rows_are_processed_gets_large_batches(
    read_s: float, read_row_s: float, row_s: float, lag: int
) -> None:
    """Otherwise the fixed cost of each read would keep it slow for ever."""
    rows, _ = read_slowly(read_s, read_row_s, row_s, lag, 400)[-1]
    assert read_s <= 0.3 * read_row_s * rows or rows >= LIMIT // 4


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("row_s", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("slower", [0.5, 1.0, 1.1, 3.0])
def test_a_source_that_pauses_gets_no_batches_that_take_long_downstream(slower: float, row_s: float, lag: int) -> None:
    longest = sorted((s for _, s in read_slowly(0.0001, slower * row_s, row_s, lag, 600)), reverse=True)
    first_s = FIRST_ROWS * row_s
    assert longest[0] <= max(1.0, first_s) and longest[8] <= max(0.4, first_s) and longest[60] <= max(0.2, first_s)


def test_rows_that_come_rarely_say_nothing_about_the_size_of_batches() -> None:
    sizer, now_s = SourceRate(LIMIT, None), 0.0
    for _ in range(100):
        sizer.record_emitted(sizer.rows_max, now_s, now_s + 0.0001)
        sizer.pause()
        now_s += 5.0
    assert sizer.rows_max == FIRST_ROWS


@pytest.mark.parametrize("after", range(300, 312))
@pytest.mark.parametrize("slower", [10, 100, 1000])
def test_when_rows_become_slower_downstream_batches_become_smaller(slower: int, after: int) -> None:
    """At once, wherever in a measurement that happens: batches are halved each time."""
    sizer, now_s = SourceRate(LIMIT, None), 0.0
    taken_s: list[float] = []
    for call in range(400):
        rows = sizer.rows_max
        sizer.record_emitted(rows, now_s, now_s + 0.001)
        taken_s.append(2e-6 * rows * (slower if call >= after else 1))
        now_s += max(0.001, taken_s[-1])
    assert sum(s for s in taken_s[after:] if s > 0.4) <= max(12.0, 3.2 * taken_s[after])
    assert max(taken_s[after + 2 :]) <= max(2.0, 0.6 * taken_s[after])  # a measurement may have batches of both kinds


def test_nothing_is_known_at_first_and_a_clock_may_stand_still() -> None:
    sizer = BatchSizer(0.01)
    assert sizer.rows(77) == 77
    for _ in range(30):
        rows = sizer.rows(1)
        sizer.record(rows, 0.0)
    assert rows >= 1 << 20


def test_a_few_rows_in_between_do_not_make_it_start_over() -> None:
    sizer = BatchSizer(0.01)
    for _ in range(20):
        sizer.record(10_000, 0.001)
    sizer.record(1, 0.0001)
    assert sizer.rows(1) >= 10_000


def test_a_function_that_has_become_slow_is_called_with_fewer_rows_at_once() -> None:
    sizer = BatchSizer(0.01)
    for _ in range(50):
        sizer.record(10_000, 0.001)
    sizes = []
    for _ in range(50):
        sizes.append(sizer.rows(1))
        sizer.record(sizes[-1], sizes[-1] * 1e-3)
    assert max(sizes[1:]) <= 30 and max(sizes[30:]) <= 12


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("row_s", [1e-4, 1e-3])
def test_where_calls_cost_nothing_they_are_as_short_as_is_enough(row_s: float, noise: float) -> None:
    sizes = sorted(rows for rows, _ in run(0.0, row_s, short_budget_s=SHORT_S, noise=noise)[20:])
    assert sizes[len(sizes) // 2] * row_s <= SHORT_S


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("row_s", [1e-6, 1e-4, 3e-4])
@pytest.mark.parametrize("call_s", [1e-4, 3e-4, 1e-3, 3e-3])
def test_where_calls_cost_something_there_are_hardly_more_of_them(call_s: float, row_s: float, noise: float) -> None:
    found = run(call_s, row_s, short_budget_s=SHORT_S, noise=noise)[20:]
    rows = sum(rows for rows, _ in found)
    fewest = rows * row_s / (0.01 - call_s)
    share = min(CALL_SHARE_MAX, call_s / SHORT_S)
    assert len(found) * call_s <= 1.5 * max(fewest * call_s, rows * row_s * share / (1 - share))


def test_a_price_of_calls_that_was_none_is_found_out_although_all_calls_are_alike() -> None:
    sizer = BatchSizer(0.01, SHORT_S)
    for rows in (4, 1, 4, 1):
        sizer.record(rows, 0.003)
    assert sizer.rows(1) >= 4
    for _ in range(200):
        rows = min(4, sizer.rows(1))
        sizer.record(rows, rows * 1e-3)
    assert sizer.rows(1) <= 2


def test_who_waits_for_a_short_slice_waits_no_longer_where_others_keep_the_slot_off_its_core() -> None:
    sizer = BatchSizer(0.01, SHORT_S)
    for rows in (80, 20, 80, 20):
        sizer.record(rows, rows * 5e-5)
    assert sizer.rows(1) == pytest.approx(40, abs=1)
    assert sizer.rows(1, core_share=0.5) == pytest.approx(20, abs=1)  # 1 ms on a core of its own


def test_rows_that_are_fast_have_the_whole_budget_of_a_core_of_their_own() -> None:
    sizer = BatchSizer(0.01, SHORT_S)
    for rows in (800, 200, 800, 200):
        sizer.record(rows, rows * 2e-5)
    assert sizer.rows(1, core_share=0.1) == sizer.rows(1) == pytest.approx(500, abs=1)


@pytest.mark.parametrize("call_s", [0.0, 1e-3])
def test_rows_that_are_fast_have_the_whole_budget(call_s: float) -> None:
    found = run(call_s, 1e-5, short_budget_s=SHORT_S)[20:]
    assert sum(seconds < 0.009 for _, seconds in found) <= 12, "but for a few, which ask what a call takes"
