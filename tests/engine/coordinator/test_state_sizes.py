"""How much state there is, by operator, and how it has grown."""

from __future__ import annotations

import itertools

import msgspec

from checkpoint_samples import metadata_of, pipeline
from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.coordinator.checkpoints.state_sizes import POINTS_MAX, StateSizes
from midstream.engine.protocol.job_status import StateSize
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot, PartHandle


def chunk(name: str, length: int, rows: int) -> ChunkHandle:
    return ChunkHandle(name, f"shared/{name}.state", 0, length, 0, rows)


def held(*chunks: ChunkHandle) -> OperatorSnapshot:
    return OperatorSnapshot("count", (PartHandle("state", "keyed", chunks),))


def at(ms: int, *subtasks: OperatorSnapshot) -> CheckpointMetadata:
    metadata = metadata_of(pipeline(workers=max(1, len(subtasks))), {"count": subtasks})
    return msgspec.structs.replace(metadata, completed_ms=ms)


def test_chunks_that_subtasks_share_count_once() -> None:
    sizes = StateSizes()
    sizes.add(at(7, held(chunk("a", 100, 5), chunk("b", 10, 1)), held(chunk("b", 10, 1), chunk("c", 1, 2))), 7)
    assert sizes.of == {"count": (8, 111)}
    assert sizes.growth == [StateSize(7, 111)]


def test_state_that_is_gone_is_not_there_any_more() -> None:
    sizes = StateSizes()
    sizes.add(at(1, held(chunk("a", 100, 5))), 50)
    sizes.add(at(60, held()), 60)
    assert sizes.of == {}
    assert sizes.growth == [StateSize(50, 100), StateSize(60, 0)]


def test_growth_reaches_from_the_beginning_to_now_however_long_that_is() -> None:
    sizes = StateSizes()
    for n in range(1, 20_001):
        sizes.add(at(n, held(chunk("a", n, 1))), n)
        if n in (1, POINTS_MAX, POINTS_MAX + 1, 1_000, 19_999, 20_000):
            growth = sizes.growth
            assert len(growth) <= POINTS_MAX + 1
            assert growth[0] == StateSize(1, 1) and growth[-1] == StateSize(n, n)
            steps = [after.at_ms - before.at_ms for before, after in itertools.pairwise(growth[:-1])]
            assert len(set(steps)) <= 1, "evenly over time"
            assert n < 10 or len(growth) >= min(n, POINTS_MAX // 2)
