"""Early results: if later ones replace earlier ones, each open window has its current result soon after a change."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from operator_world import World
from test_windows_interrupted import AGGREGATES, KEYS, MAX_PARALLELISM, SCHEMA, Job, by_key, ms, rows_of
from test_windows_interrupted import batch_of as batch
from window_oracle import SlidingOracle

from effort import examples
from midstream import testing
from midstream.api.environment import Environment
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import (
    IS_EARLY,
    WINDOW_END,
    WINDOW_START,
    Sliding,
    count,
    session,
    sliding,
    tumbling,
    window_operator,
)

PERIOD_MS = 100

keys = st.one_of(st.just((5,)), st.just((2, 9)), st.just(tuple(KEYS)))
batches = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 50))
slices = st.lists(st.integers(0, 3), min_size=4, max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), batches),
        st.tuples(st.just("rows"), batches),
        st.tuples(st.just("watermark"), st.integers(0, 90)),
        st.tuples(st.just("clock"), st.none()),
        st.tuples(st.just("part of a round"), st.integers(1, 5)),
        st.tuples(st.just("interrupt"), st.tuples(st.integers(0, 90), slices, st.integers(1, 4))),
    ),
    min_size=3,
    max_size=16,
)
Plan = list[tuple[str, Any]]
fired_within_a_round: Plan = [
    ("rows", (1, 60, 0)),
    ("part of a round", 1),
    ("rows", (2, 60, 0)),
    ("watermark", 19),
    ("clock", None),
    ("interrupt", (25, [1, 0, 0, 0], 3)),
    ("clock", None),
]
Result = tuple[Any, ...]


def operator(window: Sliding, lateness: int) -> Any:
    return window_operator(
        "w",
        window=window,
        keys=["k"],
        event_time="t",
        aggregates=AGGREGATES,
        schema=SCHEMA,
        allowed_lateness=lateness / 1000,
        emit_every=PERIOD_MS / 1000,
    )


class Expected(SlidingOracle):
    """Also has the windows whose results have changed, and which are the newest of each key and window."""

    def __init__(self, size: int, slide: int, lateness: int) -> None:
        super().__init__(size, slide, 0, lateness)
        self.changed: set[tuple[int, int]] = set()

    def assign(self, row: Any) -> Any:
        found = super().assign(row)
        self.changed |= {(row[0], window.start) for window in found}
        return found

    def is_open(self, key: int, end: int) -> bool:
        return self.due(end) > self.watermarks[key]

    def open_results(self) -> dict[tuple[int, int], Result]:
        return {
            (key, window.start): self.result(key, window)
            for key, windows in self.windows.items()
            for window in windows
            if self.is_open(key, window.end)
        }

    def early(self) -> Counter[Result]:
        """Return what has changed in open windows since the last call."""
        found = Counter(result for at, result in self.open_results().items() if at in self.changed)
        self.changed.clear()
        return found


def run_clock(job: Job, ms: int) -> None:
    for world in job.worlds:
        world.advance_clock(world.clock.ms + ms)
    job.collect()


def ring_some(job: Job, count: int) -> None:
    """Let the round of each subtask begin, and continue for a few slices."""
    for world in job.worlds:
        for _ in range(count):
            due = [alarm for alarm in world.alarms if not alarm[2].cancelled]
            if due:
                first = min(due, key=lambda alarm: alarm[0])
                world.alarms.remove(first)
                world.clock.ms = max(world.clock.ms, first[0])
                first[1]()
    job.collect()


def split(out: list[dict[str, Any]]) -> tuple[list[Result], list[Result]]:
    """Return the early results and the others."""
    found: tuple[list[Result], list[Result]] = ([], [])
    for row in out:
        bounds = (row["k"], ms(row[WINDOW_START]), ms(row[WINDOW_END]))
        found[not row[IS_EARLY]].append((*bounds, *list(row.values())[4:]))
    return found


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_base, "PIECE_ROWS", 3)
    monkeypatch.setattr(window_base, "SLICE_ROWS", 1)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(60))
@given(st.sampled_from([(10, 10), (20, 5), (7, 3), (40, 10)]), st.sampled_from([0, 0, 5, 25]), keys, steps)
@example((20, 10), 0, tuple(KEYS), fired_within_a_round)
@example((20, 10), 25, tuple(KEYS), fired_within_a_round)
def test_windows_with_early_results(shape: tuple[int, int], lateness: int, of_keys: Any, plan: Plan) -> None:
    size, slide = shape
    oracle = Expected(size, slide, lateness)
    job = Job(lambda: operator(Sliding(size * 1000, slide * 1000), lateness), parallelism=2)
    newest: dict[tuple[int, int], Result] = {}
    ended: set[tuple[int, int]] = set()
    final: Counter[Result] = Counter()
    is_exact = True

    def take(expected: Counter[Result] | None = None) -> None:
        early, others = split(job.out)
        for row in job.out:
            at = (row["k"], ms(row[WINDOW_START]))
            assert not (row[IS_EARLY] and at in ended), "an early result follows the final one"
            if not row[IS_EARLY]:
                ended.add(at)
            newest[at] = split([row])[not row[IS_EARLY]][0]
        final.update(others)
        assert final == Counter(oracle.out)
        if expected is not None:
            assert Counter(early) == expected
        job.out.clear()

    for step, argument in [*plan, ("clock", None), ("watermark", MAX_WATERMARK_US // 1000)]:
        match step:
            case "rows":
                seed, number, first = argument
                rows = rows_of(seed, number, first, of_keys)
                oracle.process(rows)
                job.rows(batch(rows))
                take(Counter())
            case "watermark":
                job.watermark(argument * 1000)
                for key in KEYS:
                    oracle.advance(key, argument)
                take(Counter())
            case "clock":
                run_clock(job, 2 * PERIOD_MS)  # a round that was under way, and one more
                take(oracle.early() if is_exact else None)
                is_exact = True
                assert {at: newest.get(at) for at in oracle.open_results()} == oracle.open_results()
                run_clock(job, 10 * PERIOD_MS)
                take(Counter())
                oracle.changed.clear()
            case "part of a round":
                ring_some(job, argument)
                take()
                is_exact = False
            case "interrupt":
                watermark, counts, parallelism = argument
                marks = job.interrupt(watermark * 1000, counts, parallelism)
                for key, mark in by_key(job, marks):
                    oracle.advance(key, mark)
                take(Counter())
                oracle.changed |= set(oracle.open_results())
    assert {at: newest[at] for at in ended} == dict.fromkeys(ended) | {
        (result[0], result[1]): result for result in oracle.out
    }


def test_a_window_that_has_not_changed_sets_no_timer_and_keeps_nothing() -> None:
    world = World(operator(Sliding(10_000, 10_000), 0), max_parallelism=MAX_PARALLELISM)
    assert not world.alarms
    world.process(batch([(1, 5, 1)]))
    world.process(batch([(1, 6, 1), (2, 7, 1)]))
    assert len(world.alarms) == 1
    world.advance_clock(world.clock.ms + PERIOD_MS)
    assert [(row["k"], row["n"], row[IS_EARLY]) for row in world.out.rows()] == [(1, 2, True), (2, 1, True)]
    assert not world.alarms
    assert not early_of(world)._changed


def test_windows_that_end_within_the_period_keep_no_keys() -> None:
    """A job that catches up passes many windows in one period."""
    world = World(operator(Sliding(10_000, 10_000), 0), max_parallelism=MAX_PARALLELISM)
    for at in range(0, 1000, 10):
        world.process(batch([(1, at, 1)]))
        world.advance((at + 5) * 1000)
    assert len(early_of(world)._changed) == 1
    world.advance(MAX_WATERMARK_US)
    assert not early_of(world)._changed
    world.out.clear()
    world.advance_clock(world.clock.ms + PERIOD_MS)
    assert not world.out.rows()


def test_the_checkpoint_is_that_of_windows_without_early_results() -> None:
    def stored(emit_every: float) -> Any:
        made = window_operator(
            "w",
            window=tumbling(0.01),
            keys=["k"],
            event_time="t",
            aggregates=AGGREGATES,
            schema=SCHEMA,
            emit_every=emit_every,
        )
        world = World(made, max_parallelism=MAX_PARALLELISM)
        world.process(batch(rows_of(1, 50, 0, tuple(KEYS))))
        world.advance(9_000)
        world.advance_clock(world.clock.ms + PERIOD_MS)
        return made.state_settings(), {name: part.table() for name, part in world.snapshot().items()}

    assert stored(0.1) == stored(0)


def early_of(world: World) -> Any:
    operator: Any = world.operator
    return operator._early


ROWS = [{"k": "a", "at": datetime(2024, 1, 1, 12, minute), "v": minute} for minute in (1, 2, 30)]


def timed() -> Any:
    env = Environment("early")
    return env.from_collection(ROWS, splits=1).with_watermarks("at", WatermarkStrategy.bounded("1 s"))


def test_first_rows_and_days_of_a_zone_have_early_results_too() -> None:
    days = timed().key_by("k").window(tumbling("1 d", zone="Europe/Paris")).emit_every("1 min")
    with testing.job(days.top(2, by="v")) as job:
        job.feed(ROWS[0]).feed(ROWS[1]).feed(ROWS[2]).advance_processing_time("1 min")
        assert [(row["rank"], row["v"], row["is_early"]) for row in job.take()] == [(1, 30, True), (2, 2, True)]
        assert [row["is_early"] for row in job.advance_to("2024-01-02 12:00").take()] == [False, False]
    everything = timed().window_all(sliding("1 h", "30 min")).emit_every("1 min").allowed_lateness("1 h")
    made = everything.aggregate(total=Sum("v"))
    assert made.schema.names == ["window_start", "window_end", "is_early", "total"]
    with testing.job(made) as job:
        job.feed(ROWS[0]).advance_processing_time("1 min")
        assert [row["total"] for row in job.take()] == [1, 1]


def test_results_of_a_whole_input_are_the_same_without_the_early_ones() -> None:
    windows = timed().key_by("k").window(tumbling("10 min"))
    plain = testing.run(windows.aggregate(n=Count())).rows
    early = testing.run(windows.emit_every("1 s").aggregate(n=Count())).rows
    assert [{name: row[name] for name in plain[0]} for row in early if not row["is_early"]] == plain


def test_what_makes_no_sense_is_refused() -> None:
    keyed = timed().key_by("k")
    with pytest.raises(ConfigError, match=r"test_early_results\.py.*emit_every: sessions have no early results"):
        keyed.window(session("1 h")).emit_every("10 s")
    with pytest.raises(ConfigError, match=r"emit_every: windows by count have aggregate\(\) only"):
        keyed.window(count(10)).emit_every("10 s")
    with pytest.raises(ConfigError, match="emit_every: 0 is not an interval"):
        keyed.window(tumbling("1 h")).emit_every(0)
    with pytest.raises(ConfigError, match="emit_every: 'soon' is not a duration"):
        keyed.window(tumbling("1 h")).emit_every("soon")
    with pytest.raises(ConfigError, match="two output columns are called 'is_early'; rename"):
        keyed.window(tumbling("1 h")).emit_every("10 s").aggregate(is_early=Count())
    assert "is_early" in keyed.window(tumbling("1 h")).aggregate(is_early=Count()).schema.names
    with pytest.raises(ConfigError, match=r"process: emit_every\(\) is for aggregate\(\) and top\(\)"):
        keyed.window(tumbling("1 h")).emit_every("10 s").process(object(), {"x": pa.int64()})
    with pytest.raises(AttributeError, match="emit_every"):
        keyed.window(tumbling("1 h")).trigger  # noqa: B018
