"""A gate's recovered rows: what has been taken and what remains are the whole, at every moment."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from in_memory import MemoryStorage
from midstream.engine.checkpoint.channel_state import Captured
from midstream.engine.core.errors import StorageError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.protocol.messages import ChannelState
from recovering import SCHEMA, Recovering, batch, rows_in, store

EDGE = Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("key",))
Rows = list[tuple[int, int]]


def some(storage: MemoryStorage, sizes: list[list[int]], segment_bytes: int = 1) -> tuple[Rows, list[ChannelState]]:
    """States with batches of these sizes, and all their rows in order."""
    rows: Rows = []
    captured = []
    for producer, of_state in enumerate(sizes):
        batches = []
        for size in of_state:
            fresh = [((len(rows) + i) * 7 % 50, len(rows) + i) for i in range(size)]
            rows += fresh
            batches.append(batch(fresh))
        captured.append(Captured(0, producer, 0, False, tuple(batches)))
    return rows, list(store(storage, captured, "f", segment_bytes))


def test_batches_come_in_the_order_of_states_segments_and_batches() -> None:
    storage = MemoryStorage()
    rows, states = some(storage, [[3, 2], [4], [1, 1, 1]])
    gate = Recovering(EDGE, states, storage)
    assert gate.drain() == rows
    assert gate.gate.is_over and gate.gate.remaining() == ()


def test_nothing_is_given_before_it_is_read_and_the_task_is_woken_when_it_is() -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[3]])
    gate = Recovering(EDGE, states, storage)
    assert gate.gate.take() is None and not gate.gate.is_over
    gate.steps.run_io()
    assert gate.woken == 1
    assert gate.take() is not None and gate.gate.is_over
    assert gate.pool.in_use == 1, "the last batch is charged until it is processed"
    gate.processed()
    assert gate.pool.in_use == 0


def test_without_states_it_is_over_at_once() -> None:
    gate = Recovering(EDGE, [], MemoryStorage())
    assert gate.gate.is_over and not gate.steps.io


def test_at_most_one_segment_is_read_ahead() -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[2] * 10], segment_bytes=500)
    gate = Recovering(EDGE, states, storage)
    segment = states[0].segments[0].batches
    assert 1 < segment < 5
    gate.steps.run_io()
    assert not gate.steps.io and gate.pool.in_use == segment
    for left in reversed(range(segment)):
        assert gate.take() is not None
        gate.processed()
        assert bool(gate.steps.io) == (left == 0)


@settings(max_examples=examples(200))
@given(
    data=st.data(),
    sizes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=4),
    segment_bytes=st.sampled_from([1, 500, 10**6]),
    groups=st.one_of(st.none(), st.tuples(st.integers(0, 15), st.integers(1, 16)).filter(lambda g: g[0] < g[1])),
)
def test_taken_and_remaining_are_the_whole_at_every_step(
    data: st.DataObject, sizes: list[list[int]], segment_bytes: int, groups: tuple[int, int] | None
) -> None:
    """Whatever is being read, queued or skipped, filtered or empty."""
    storage = MemoryStorage()
    rows, states = some(storage, sizes, segment_bytes)
    skips = [data.draw(st.integers(0, len(of_state)), "skip") for of_state in sizes]
    whole: Rows = []
    for index, (of_state, skip) in enumerate(zip(sizes, skips, strict=True)):
        before = sum(map(sum, sizes[:index])) + sum(of_state[:skip])
        whole += rows[before : sum(map(sum, sizes[: index + 1]))]
    if groups is not None:
        whole = [row for row in whole if groups[0] <= key_groups(batch([row]), ("key",), 16)[0] < groups[1]]
    states = [
        msgspec.structs.replace(state, skip=skip, key_groups=groups) for state, skip in zip(states, skips, strict=True)
    ]
    gate = Recovering(EDGE, states, storage)
    taken: Rows = []
    while True:
        rest = Recovering(EDGE, gate.gate.remaining(), storage).drain()
        assert taken + rest == whole
        assert sum(len(state.segments) for state in gate.gate.remaining()) <= sum(len(s.segments) for s in states)
        if gate.gate.is_over:
            break
        found = gate.gate.take() if not gate.steps.io or data.draw(st.booleans()) else None
        if found is None:
            assert gate.steps.run_io(), "nothing is being read"
            continue
        taken += rows_in(found.batch)
        if data.draw(st.booleans(), "the checkpoint comes while it is processed"):
            assert taken + Recovering(EDGE, gate.gate.remaining(), storage).drain() == whole
        found.release()
    assert taken == whole
    assert gate.pool.in_use == 0


def test_segments_that_have_been_taken_are_not_referred_to_any_more() -> None:
    """So what is in flight gets less from checkpoint to checkpoint, even within one state."""
    storage = MemoryStorage()
    rows, states = some(storage, [[2] * 10, [1]], segment_bytes=500)
    batches = states[0].segments[0].batches
    gate = Recovering(EDGE, states, storage)
    for taken in range(1, 11):
        gate.take()
        gate.processed()
        remaining = gate.gate.remaining()
        left = sum(segment.rows for state in remaining for segment in state.segments)
        assert len(rows) - 2 * taken <= left < len(rows) - 2 * taken + 2 * batches
        assert all(state.skip < batches for state in remaining)


def test_progress_goes_from_nothing_to_all() -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[2] * 10, [1, 3]], segment_bytes=500)
    states[0] = msgspec.structs.replace(states[0], skip=4)
    gate = Recovering(EDGE, states, storage)
    total = gate.gate.total_bytes
    left = [gate.gate.left_bytes()]
    assert left[0] == total < sum(segment.length for state in states for segment in state.segments)
    while gate.take() is not None:
        gate.processed()
        left.append(gate.gate.left_bytes())
    assert left == sorted(left, reverse=True) and len(set(left)) == len(left) == 9
    assert left[-1] == 0


def test_segments_without_a_row_for_this_subtask_are_passed_over() -> None:
    storage = MemoryStorage()
    captured = [Captured(0, i, 0, False, tuple(batch([(key, key)]) for key in range(30))) for i in range(2)]
    states = store(storage, captured, "f", 1)
    own = [key for key in range(30) if key_groups(batch([(key, 0)]), ("key",), 16)[0] == 3]
    assert 0 < len(own) < 6
    gate = Recovering(EDGE, [msgspec.structs.replace(state, key_groups=(3, 4)) for state in states], storage)
    assert gate.drain() == [(key, key) for key in own] * 2


def test_what_is_skipped_is_not_read() -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[2, 2, 2], [1]])
    del storage.files["f"]
    states = [msgspec.structs.replace(state, skip=9) for state in states]
    assert Recovering(EDGE, states, storage).gate.is_over


@pytest.mark.parametrize("when", [0, 1])
def test_a_read_that_fails_fails_the_task_with_its_cause(when: int) -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[2], [2]])
    gate = Recovering(EDGE, states, storage)
    if when:
        gate.take()
        gate.processed()
    content = bytearray(storage.files["f"])
    content[-5 if when else 10] ^= 1
    storage.files["f"] = bytes(content)
    with pytest.raises(StorageError, match=rf"edge 0, subtask {when} to 0.*its checksum is wrong"):
        gate.take()
    assert not gate.gate.is_over, "nothing behind it may be read"
    assert gate.gate.take() is None
    gate.gate.discard()
    assert gate.pool.in_use == 0


def test_what_is_discarded_during_a_read_stays_silent_and_leaks_nothing() -> None:
    storage = MemoryStorage()
    _, states = some(storage, [[2, 2], [2]])
    gate = Recovering(EDGE, states, storage)
    gate.take()
    gate.processed()
    assert gate.steps.io
    gate.gate.discard()
    assert gate.pool.in_use == 0
    gate.steps.run_io()
    assert gate.pool.in_use == 0 and not gate.steps.io and not gate.failures
    assert gate.woken == 1


def test_a_batch_that_a_checkpoint_holds_is_charged_until_that_releases_it_even_after_discard() -> None:
    storage = MemoryStorage()
    rows, states = some(storage, [[2]])
    gate = Recovering(EDGE, states, storage)
    gate.take()
    assert gate.current_batch is not None
    held = gate.current_batch.rest(1)
    gate.processed()
    assert gate.pool.in_use == 1 and rows_in(held.batch) == rows[1:]
    gate.gate.discard()
    assert gate.pool.in_use == 0
    held.release()
    gate.pool.check()
    assert gate.pool.in_use == 0
