"""Known bugs of sources: how splits are found, handed out, read, and kept; to be put back on purpose, see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from midstream.engine.checkpoint.metadata import SourcePosition
from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
from midstream.engine.core.interfaces import Done
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.worker import task
from midstream.engine.worker.source_reader import SourceReader
from midstream.engine.worker.split_reads import Reading, SplitReads
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream.simulation.faults import Fault
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import finding, restarted

# ---- in the coordinator


def position_before_its_splits() -> Replacements:
    """The position of the discovery moves when it answers, and its splits are there a little later."""
    return [(SplitAssignment, "_discovered", _in_two_steps(_take_position))]


def exhausted_before_its_splits() -> Replacements:
    """The end of discovery is noted when it answers, and its last splits are there a little later."""
    return [(SplitAssignment, "_discovered", _in_two_steps(_take_exhausted))]


def _take_position(state: Any, found: Any) -> None:
    state.position = found.position


def _take_exhausted(state: Any, found: Any) -> None:
    state.exhausted = found.exhausted


def _in_two_steps(first: Callable[[Any, Any], None]) -> Callable[..., None]:
    original = SplitAssignment._discovered

    def discovered(self: Any, state: Any, generation: int, outcome: Any) -> None:
        if generation != state.generation or not self._discovers or not isinstance(outcome, Done):
            original(self, state, generation, outcome)
            return
        first(state, outcome.value)
        state.busy = False

        def later() -> None:
            state.timer = None
            original(self, state, generation, outcome)

        state.timer = self._effects.set_timer(f"found:{state.spec.uid}", 0.002, later)

    return discovered


def found_before_the_reset() -> Replacements:
    """What a discovery found for the attempt before is handed out in this one."""

    def discovered(self: Any, state: Any, generation: int, outcome: Any) -> None:
        if not state.pending:
            generation = state.generation
        original(self, state, generation, outcome)

    original = SplitAssignment._discovered
    return [(SplitAssignment, "_discovered", discovered)]


def handed_out_before_the_restart() -> Replacements:
    """Splits that wait to be assigned are kept for the next attempt, besides those of the checkpoint."""

    def reset(self: Any, positions: Mapping[str, SourcePosition], finished: Any) -> None:
        now = {uid: state.pending for uid, state in self._states.items()}
        both = {
            uid: SourcePosition(
                uid, old.position, old.exhausted, (*old.pending, *(s for s in now[uid] if s not in old.pending))
            )
            for uid, old in positions.items()
        }
        original(self, both, finished)

    original = SplitAssignment.reset
    return [(SplitAssignment, "reset", reset)]


def pending_of_the_last_round() -> Replacements:
    """A checkpoint holds the splits that wait only once no more can be found."""

    def snapshot(self: Any) -> tuple[SourcePosition, ...]:
        return tuple(
            position if position.exhausted else SourcePosition(position.uid, position.position, False, ())
            for position in original(self)
        )

    original = SplitAssignment.snapshot
    return [(SplitAssignment, "snapshot", snapshot)]


def told_of_now() -> Replacements:
    """A source gets its current position, not that in the checkpoint that has completed."""

    def completed(self: Any, event: Any) -> None:
        original(self, event)
        for state in self._states.values():
            if state.notice is not None:
                state.notice = replace(state.notice, position=state.position, pending=tuple(state.pending))

    original = SplitAssignment.checkpoint_completed
    return [(SplitAssignment, "checkpoint_completed", completed)]


# ---- in the reader


def last_batch_again() -> Replacements:
    """The offset of a split is that of the last batch, not the one after it."""

    def snapshot(self: Any, new_id: Any) -> Any:
        now = [current.split for current in self._splits]
        for current in self._splits:
            current.split = current.before_last_batch
        parts = original(self, new_id)
        for current, split in zip(self._splits, now, strict=True):
            current.split = split
        return parts

    original = SourceReader.snapshot
    return [(SourceReader, "snapshot", snapshot)]


def split_that_is_read_only() -> Replacements:
    """Of several splits that are open the one that has its turn is in the snapshot."""

    def snapshot(self: Any, new_id: Any) -> Any:
        everything = self._splits
        self._splits = deque(list(everything)[:1])
        parts = original(self, new_id)
        self._splits = everything
        return parts

    original = SourceReader.snapshot
    return [(SourceReader, "snapshot", snapshot)]


def split_being_read_is_left_out() -> Replacements:
    """A split is left out of the snapshot while its next batch is being read."""

    def snapshot(self: Any, new_id: Any) -> Any:
        everything = self._splits
        self._splits = deque(current for current in everything if current.state is not Reading.UNDER_WAY)
        parts = original(self, new_id)
        self._splits = everything
        return parts

    original = SourceReader.snapshot
    return [(SourceReader, "snapshot", snapshot)]


def restored_splits_are_all() -> Replacements:
    """A reader with splits from a checkpoint assumes that all have been assigned."""

    def restore(self: Any, parts: Any) -> None:
        original(self, parts)
        self._assignment = self._assignment._replace(is_complete=bool(self._splits))

    original = SourceReader.restore
    return [(SourceReader, "restore", restore)]


# ---- idleness


def read_under_way_is_idle() -> Replacements:
    """A split counts as having no rows while it is being read, of a bounded source as well."""
    original = SourceReader.quiet_until_s

    def quiet_until_s(self: Any, split: int) -> float:
        current = next(current for current in self._splits if current.number == split)
        return float("inf") if current.state is Reading.UNDER_WAY else original(self, split)

    return [(task, "is_bounded", lambda graph, vertex: False), (SourceReader, "quiet_until_s", quiet_until_s)]


def open_split_is_never_idle() -> Replacements:
    """A split that is open holds event time back, of a source without an end as well."""
    return [(SourceReader, "quiet_until_s", lambda self, split: float("-inf"))]


def filtered_rows_are_no_evidence() -> Replacements:
    """Rows that a filter removes do not show that a split has no others."""
    original = SourceReader._emit_timed

    def emit_timed(self: Any, open_splits: Any, batches: Any) -> None:
        for current in open_splits:
            current.quiet_until_s = float("-inf")
        original(self, open_splits, batches)

    return [(SourceReader, "_emit_timed", emit_timed)]


def assignment_is_a_row() -> Replacements:
    """A subtask that has read its splits to the end becomes idle `idle_after` later, though none of them had rows."""
    original = TimestampsOperator._begin

    def begin(self: Any, split: int, reached_us: int) -> None:
        self._newest_row_s = self._context.clock.monotonic_s()
        original(self, split, reached_us)

    return [(TimestampsOperator, "_begin", begin)]


def nothing_waits_unanswered() -> Replacements:
    """A subtask that has read its splits to the end is idle before its next request has been answered."""
    return [(SourceReader, "none_waits", property(lambda self: True))]


def time_waits_for_rows_without_it() -> Replacements:
    """Event time waits for a channel without event time, as long as its source has no end."""
    original = WatermarkValve.__init__

    def init(self: Any, origins: Any) -> None:
        original(self, [IdleOrigin(frozenset((-1,))) if origin.is_empty else origin for origin in origins])

    return [(WatermarkValve, "__init__", init)]


# ---- splits that are read together


def joined_batch_is_of_one_split() -> Replacements:
    """A batch with rows of several splits counts as one of the first of them."""

    def current(self: Any) -> list[tuple[int, int]]:
        return [(self._emitting[0][0].number, self.emitting_rows)]

    return [(SourceReader, "current", property(current))]


def joined_across_a_filter() -> Replacements:
    """Batches of several splits are emitted as one, although rows are removed before event time is made of them."""
    original = SourceReader.on_change

    def on_change(self: Any, changed: Any) -> None:
        self.every_row_passes = True
        original(self, changed)

    return [(SourceReader, "on_change", on_change)]


def one_offset_of_a_joined_batch() -> Replacements:
    """Of the splits whose rows are emitted as one batch, only the first has moved on."""
    original = SourceReader._small_ones

    def small_ones(self: Any, rows_max: int) -> Any:
        taken = original(self, rows_max)
        for open_split, _ in taken:
            open_split.split = open_split.before_last_batch
        return taken

    return [(SourceReader, "_small_ones", small_ones)]


def unread_splits_are_forgotten() -> Replacements:
    """Splits that were to be read together, and were not as there were rows enough, are never read again."""
    original = SplitReads._read_some

    def read_some(self: Any) -> None:
        self._to_read = self._to_read[:1]
        original(self)

    return [(SplitReads, "_read_some", read_some)]


# ---- where they are searched


def _together(seed: int) -> Scenario:
    """A subtask reads several splits with few rows at a time, and slots die."""
    drawn = restarted(("kill_slot", "user_error", "kill_driver"), seed)
    return replace(drawn, splits=6, rounds=1, readers=6, blocking=True, batch_rows=3 + seed % 20)


def _sieved(seed: int) -> Scenario:
    drawn = _idling(seed)
    return replace(drawn, readers=6, batch_rows=3 + seed % 20)


_found = partial(restarted, ("kill_slot", "user_error", "kill_driver"))
_dealt = partial(restarted, ("stop", "kill_slot"))


def _in_line(seed: int) -> Scenario:
    """Splits follow each other in event time, no row may be late, and slots die while some wait to be handed out."""
    drawn = draw(seed, topology="splits", parallelism=2, faults=(), rows=60)
    faults = tuple(
        Fault(100 + 120 * i + seed * 37 % 120, ("kill_slot", "user_error")[i % 2], seed + i) for i in range(5)
    )
    tempo = replace(drawn.tempo, mail_us=40, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, faults=faults, interval_s=0.003, min_pause_s=0.0, timeout_s=60.0, row_us=1000)
    return replace(drawn, splits=7, rounds=1, readers=1, batch_rows=3)


def _idling(seed: int) -> Scenario:
    """A source may be idle, with and without an end; some splits have no rows, and reads take up to ten times as long as
    it takes to be idle. In some seeds the other source has no event time.
    """
    drawn = draw(seed, topology="timers", parallelism=2, faults=(), rows=60)
    shape = drawn.shape
    if seed % 4 == 3:
        shape = (replace(shape[0], chain=("source",)), *shape[1:])
    tempo = replace(drawn.tempo, mail_us=40, control_us=400, io_us=(100, 2000, 10_000)[seed % 3], clock_tick_us=0)
    rounds = (1, 2, 5)[seed // 3 % 3]
    return replace(drawn, shape=shape, tempo=tempo, splits=5, rounds=rounds, readers=1, batch_rows=3, blocking=True)


MUTATIONS: Final = named(
    Mutation("a discovery's position is in a checkpoint without its splits", position_before_its_splits, _found),
    Mutation("a source is at its end before its last splits are there", exhausted_before_its_splits, _found),
    Mutation("splits found by the attempt before are handed out", found_before_the_reset, finding),
    Mutation("splits that wait stay when the job rewinds", handed_out_before_the_restart, _found),
    Mutation("splits that wait are not in a checkpoint", pending_of_the_last_round, _found),
    Mutation("the last batch of a split is read again", last_batch_again, _found),
    Mutation("of several open splits one is in a checkpoint", split_that_is_read_only, _dealt),
    Mutation("a split that is being read is not in a checkpoint", split_being_read_is_left_out, _found),
    Mutation("event time does not wait for other splits", restored_splits_are_all, _in_line),
    Mutation("a split is idle while it is being read", read_under_way_is_idle, _idling),
    Mutation("a split is never idle", open_split_is_never_idle, _idling),
    Mutation("a split is not idle while a filter removes all of its rows", filtered_rows_are_no_evidence, _idling),
    Mutation("splits without rows keep a subtask from being idle", assignment_is_a_row, _idling),
    Mutation("a subtask is idle while it requests a split", nothing_waits_unanswered, _idling),
    Mutation("event time waits for a source without event time and end", time_waits_for_rows_without_it, _idling),
    Mutation("a source is notified of more than the completed checkpoint holds", told_of_now, _found),
    Mutation("a batch of several splits counts as one of the first", joined_batch_is_of_one_split, _sieved),
    Mutation("rows of several splits are joined before a filter", joined_across_a_filter, _sieved),
    Mutation("of the splits of a batch, one moves on", one_offset_of_a_joined_batch, _together),
    Mutation("splits that were not read with others are forgotten", unread_splits_are_forgotten, _together),
)
