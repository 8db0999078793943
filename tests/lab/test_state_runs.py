"""States and timers of users' functions, joins, late windows and keys of other types hold through failures and restores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.state_files import StateFile
from midstream.engine.state import columnar
from midstream.simulation import chunk_sizes
from midstream.simulation.simulated_slot import SimulatedSlot
from midstream_lab.checkers.checkpoint_checker import CheckpointChecker, Cut
from midstream_lab.chunk_sizes import chunk_sizes_of
from midstream_lab.jobs.days import DAYS
from midstream_lab.jobs.key_types import KEY_LAYOUTS
from midstream_lab.jobs.lateness import LENIENT, wrong_emissions
from midstream_lab.jobs.states import Given
from midstream_lab.jobs.timely import WITHIN_MS
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import taken_over

KINDS = (
    *(
        "typed",
        "pickled",
        "rules",
        "clocks",
        "tags",
        "join",
        "running",
        "periodic",
        "expiring",
        "counted",
        *WITHIN_MS,
        "sorted",
        *(kind for kind in LENIENT if kind not in DAYS),
        *KEY_LAYOUTS,
    ),
)


@pytest.mark.turns(3)
@pytest.mark.parametrize("topology", KINDS)
def test_what_is_kept_is_a_function_of_the_rows_through_failures_and_restores(topology: str) -> None:
    checkpoints = restored = 0
    for seed in range(6):
        outcome = run(draw(seed, topology=topology, rows=60))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        checkpoints += outcome.checkpoints
        restored += outcome.launches - 1
    assert checkpoints > 0
    assert restored > 0


def test_random_runs_draw_every_kind() -> None:
    drawn = Counter(kind for seed in range(1500) for node in draw(seed).shape for kind in node.chain)
    missing = [kind for kind in KINDS if not drawn[kind]]
    assert not missing


def many_checkpoints_of_one_key(seed: int) -> Scenario:
    """All rows of a join are of one key, whose chunks grow slowly, so that most of them outlive a checkpoint."""
    drawn = draw(seed, topology="join", parallelism=2, faults=("kill_slot",), rows=60)
    tempo = replace(drawn.tempo, mail_us=5, control_us=50, data_us=20, io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, interval_s=0.005, min_pause_s=0.0, timeout_s=60.0, aligned_timeout_s=0.0)
    return replace(drawn, batch_rows=3, row_us=4000, text_bytes=200, keys=1, skew=0.0)


def test_small_chunks_are_shared_by_checkpoints_and_end_with_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "SHARE", 1.0)
    before = columnar.OWN_CHUNK_ROWS
    original = CheckpointChecker.check_checkpoint
    shared: Counter[int] = Counter()

    def check_checkpoint(
        self: CheckpointChecker, metadata: CheckpointMetadata, is_copy_of: Cut | None = None
    ) -> list[str]:
        assert before > columnar.OWN_CHUNK_ROWS
        files = {
            chunk.file
            for operator in metadata.operators
            if operator.uid.startswith("join")
            for subtask in operator.subtasks
            for part in subtask.parts
            for chunk in part.chunks
        }
        written = [StateFile.parse(file) for file in sorted(files - {""})]
        shared[seed] += sum(file is not None and file.checkpoint_id < metadata.checkpoint_id for file in written)
        return original(self, metadata, is_copy_of)

    monkeypatch.setattr(CheckpointChecker, "check_checkpoint", check_checkpoint)
    for seed in range(6):
        outcome = run(many_checkpoints_of_one_key(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert before == columnar.OWN_CHUNK_ROWS
    sharing = [seed for seed in shared if shared[seed]]
    assert len(sharing) >= 2, f"checkpoints refer to chunks that earlier ones have written in runs {sharing} only"


@pytest.mark.parametrize("topology", ["typed", "pickled", "clocks"])
def test_checkpoints_of_functions_refer_to_what_earlier_ones_have_stored(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CheckpointChecker.check_checkpoint
    chunks: Counter[int] = Counter()
    """Of the part that has most of them in a checkpoint."""

    def check_checkpoint(
        self: CheckpointChecker, metadata: CheckpointMetadata, is_copy_of: Cut | None = None
    ) -> list[str]:
        parts = (part for operator in metadata.operators for subtask in operator.subtasks for part in subtask.parts)
        own = [len(part.chunks) for part in parts if part.name.startswith(("value:", "list:", "map:", "timers:"))]
        chunks[max(own, default=0)] += 1
        return original(self, metadata, is_copy_of)

    monkeypatch.setattr(CheckpointChecker, "check_checkpoint", check_checkpoint)
    for seed in (0, 4, 9):  # all chunks are in files
        drawn = draw(seed, topology=topology, parallelism=2, faults=("kill_slot",), rows=100)
        assert drawn.inline_bytes == 0
        outcome = run(replace(drawn, interval_s=0.002, timeout_s=60.0))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert sum(times for most, times in chunks.items() if most >= 3) >= 5, chunks


def test_small_chunks_end_with_a_run_that_breaks_off() -> None:
    before = columnar.OWN_CHUNK_ROWS
    with pytest.raises(KeyError), chunk_sizes_of(0, small=True, combined_rows_min=0):
        assert before > columnar.OWN_CHUNK_ROWS
        raise KeyError
    assert before == columnar.OWN_CHUNK_ROWS


def test_what_a_key_has_got_decides_what_is_in_its_states() -> None:
    keys = dict.fromkeys(range(6), 3)
    contents = Given("typed", Counter([0, 1, 2, 3, 4, 5]), keys).contents()
    assert contents["list:ids", 3] == [0, 1, 2, 3, 4, 5]
    assert contents["value:mask", 3] == Decimal("3.00")  # of classes 2 and 3 there is one row each, of the others two
    assert contents["map:marks", 3] == {"class 0": [0, 4], "class 2": [2], "class 3": [3]}
    assert not Given("typed", Counter(), keys).contents()


@pytest.mark.parametrize(
    ("said", "late", "complaint"),
    [
        pytest.param([(1, 0, 1), (1, 0, 2), (2, 0, 2)], [], "", id="a window is emitted again with more"),
        pytest.param([(1, 0, 1)], [2], "", id="a row is late"),
        pytest.param([(1, 0, 1)], [], "row 2 1 times", id="a row is lost"),
        pytest.param([(1, 0, 2)], [2], "has emitted 2 rows instead of 1", id="an emission is not whole"),
        pytest.param([(1, 0, 1), (2, 0, 1)], [], "has emitted 1 rows instead of 2", id="one is emitted twice"),
        pytest.param(
            [(1, 0, 2), (2, 0, 2), (1, 0, 3), (3, 0, 3), (4, 0, 3)],
            [],
            "not always more",
            id="what was emitted is gone",
        ),
    ],
)
def test_windows_that_take_late_rows_say_more_each_time(
    said: list[tuple[int, int, int]], late: list[int], complaint: str
) -> None:
    keys = dict.fromkeys(range(1, 5), 0)
    found = list(
        wrong_emissions("late_window2", "window", Counter([1, 2]), keys, said, Counter(late), never_late=False)
    )
    assert (not found) if not complaint else any(complaint in each for each in found), found


def test_a_join_whose_sources_are_drained_before_their_end_emits_rows_without_the_partners_that_never_come() -> None:
    scenario = draw(940004005, topology="full_join")
    assert scenario.shape[2].chain[0] == "full_join"
    outcome = run(scenario)
    assert not outcome.failures, outcome.failures[0]


def test_state_in_columns_is_taken_over_and_is_what_the_checkpoint_has(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimulatedSlot._check_taken
    taken: Counter[int] = Counter()

    def check_taken(self: SimulatedSlot, *arguments: Any) -> None:
        taken[seed] += 1
        original(self, *arguments)

    monkeypatch.setattr(SimulatedSlot, "_check_taken", check_taken)
    for seed in range(20):
        outcome = run(taken_over(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        if len(taken) == 2:
            return
    pytest.fail(f"only in runs {sorted(taken)}")
