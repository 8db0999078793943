"""Rows in flight find their way, each exactly once and in order, whatever the parallelism becomes, and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_samples import chain, metadata_of
from effort import examples
from in_memory import MemoryStorage, NeverRun, NoRows
from midstream.engine.checkpoint.channel_state import Captured, store_channels
from midstream.engine.checkpoint.channel_state_references import InFlight, each_once, left_bytes
from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.redistribute_channel_state import assign_channels
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.key_groups import key_group_range, key_groups, subtask_of
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.protocol.messages import ChannelState
from recovering import SCHEMA, Recovering, SameRows, batch, store

MAX_PARALLELISM = 16
Rows = list[tuple[int, int]]


def graph(
    producers: int,
    consumers: int,
    kind: Partitioning = Partitioning.KEYED,
    keys: str = "key",
    combiner: SameRows | None = None,
) -> JobGraph:
    return JobGraph(
        (
            Vertex(0, producers, SourceSpec("read", "read", NoRows()), ()),
            Vertex(1, consumers, None, chain("work")),
        ),
        (Edge(0, 0, 1, kind, SCHEMA, (keys,) if kind is Partitioning.KEYED else (), combiner=combiner),),
        MAX_PARALLELISM,
    )


def checkpoint(of: JobGraph, channels: tuple[ChannelState, ...]) -> CheckpointMetadata:
    return msgspec.structs.replace(metadata_of(of), channels=channels)


def owner(key: int, parallelism: int) -> int:
    groups = key_groups(batch([(key, 0)]), ("key",), MAX_PARALLELISM)
    return int(subtask_of(groups, parallelism, MAX_PARALLELISM)[0])


class World:
    """Rows (key, n), n growing from each producer; what was consumed, and what is in flight."""

    def __init__(self, data: st.DataObject, kind: Partitioning, producers: int) -> None:
        self.data = data
        self.kind = kind
        self.producers = producers
        self.storage = MemoryStorage()
        self.may_be_inline = data.draw(st.booleans())
        self.combiner = SameRows() if data.draw(st.booleans()) else None
        self.emitted: Rows = []
        self.consumed: list[tuple[int, int, int]] = []
        """(key, n, subtask), in the order of each subtask."""
        self._files = 0

    def emit(self, producer: int, rows: int, consumers: int) -> dict[int, list[Rows]]:
        """New rows of one producer, by consumer, in batches. n names the producer: n % 100."""
        parts: dict[int, list[Rows]] = {}
        for _ in range(rows):
            key, n = self.data.draw(st.integers(0, 30)), (len(self.emitted) + 1) * 100 + producer
            self.emitted.append((key, n))
            match self.kind:
                case Partitioning.KEYED:
                    to = owner(key, consumers)
                case Partitioning.GLOBAL:
                    to = 0
                case _:
                    to = self.data.draw(st.integers(0, consumers - 1))
            batches = parts.setdefault(to, [[]])
            if batches[-1] and self.data.draw(st.booleans()):  # type: ignore[arg-type]  # mypy takes the type of the first draw
                batches.append([])
            batches[-1].append((key, n))
        return parts

    def store(self, captured: list[Captured]) -> tuple[ChannelState, ...]:
        self._files += 1
        segment_bytes = self.data.draw(st.sampled_from([1, 500, 5000]))
        inline_bytes_max = self.data.draw(st.sampled_from([0, 2000, 10**6])) if self.may_be_inline else 0
        return store_channels(self.storage, captured, f"shared/{self._files}", segment_bytes, inline_bytes_max)[0]

    def in_flight(self, consumers: int) -> list[Captured]:
        """Some rows on every channel, some received and some not."""
        captured = []
        for producer in range(self.producers):
            for consumer, batches in sorted(self.emit(producer, self.data.draw(st.integers(0, 6)), consumers).items()):
                cut = self.data.draw(st.integers(0, len(batches)))
                for is_output, part in ((False, batches[:cut]), (True, batches[cut:])):
                    layouts = tuple(self.data.draw(st.integers(0, 1)) if self.combiner else 0 for _ in part)
                    sent = zip(map(batch, part), layouts, strict=True)
                    batches_sent = tuple(self.combiner.combine(rows) if layout else rows for rows, layout in sent)  # type: ignore[union-attr]
                    captured.append(Captured(0, producer, consumer, is_output, batches_sent, layouts=layouts))
        return captured

    def recover(self, metadata: CheckpointMetadata, consumers: int, *, all_of_it: bool) -> tuple[ChannelState, ...]:
        """Every consumer works off some of what it gets; the channel states of a checkpoint then."""
        now = graph(self.producers, consumers, self.kind, combiner=self.combiner)
        assigned = assign_channels(metadata, now)
        assert all(ref.vertex == 1 and 0 <= ref.subtask < consumers for ref in assigned)
        for ref, states in assigned.items():
            assert all(state.consumer == ref.subtask for state in states)
            places = [(segment.file, segment.offset) for state in states for segment in state.segments if segment.file]
            assert len(places) == len(set(places)), f"{ref} reads a segment twice"
        left: tuple[ChannelState, ...] = ()
        live = [] if all_of_it else self.in_flight(consumers)
        for subtask in range(consumers):
            gate = Recovering(now.edges[0], assigned.get(TaskId(1, subtask), ()), self.storage)
            inputs: list[Captured] = []
            takes = 10**9 if all_of_it else self.data.draw(st.integers(0, 5))
            for _ in range(takes):
                rows = gate.take()
                if rows is None:
                    break
                whole = all_of_it or self.data.draw(st.booleans())
                cut = len(rows) if whole else self.data.draw(st.integers(0, len(rows)))
                self.consumed += [(key, n, subtask) for key, n in rows[:cut]]
                if rows[cut:]:
                    assert gate.current_batch is not None
                    rest = gate.current_batch.rest(cut)
                    inputs.append(Captured(0, subtask, subtask, False, (rest.batch,), layouts=(rest.layout,)))
                    break  # a slice of it is still to be worked when the checkpoint comes
                gate.processed()
            inputs.append(Captured(0, 0, subtask, False, stored=gate.gate.remaining()))
            inputs += [item for item in live if item.consumer == subtask and not item.is_output]
            left += self.store(inputs)
        left += self.store([item for item in live if item.is_output])
        in_flight = InFlight()
        in_flight.add(left)
        there = {(s.file, s.offset) if s.file else s.inline: s.length for state in left for s in state.segments}
        assert in_flight.bytes == left_bytes(each_once(left))
        if not self.may_be_inline:  # equal bytes may well be those of two
            assert in_flight.bytes <= sum(there.values()), "more is in flight than there is"
        return left


@settings(max_examples=examples(120), deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from([Partitioning.KEYED, Partitioning.KEYED, Partitioning.REBALANCE, Partitioning.GLOBAL]),
    parallelisms=st.lists(st.integers(1, 8), min_size=2, max_size=7),
    producers=st.integers(1, 3),
)
def test_every_row_arrives_exactly_once_through_any_restores_of_restores(
    data: st.DataObject, kind: Partitioning, parallelisms: list[int], producers: int
) -> None:
    world = World(data, kind, producers)
    channels = world.store(world.in_flight(parallelisms[0]))
    for before, after in pairwise(parallelisms):
        world.producers = data.draw(st.integers(1, 3))
        metadata = checkpoint(graph(world.producers, before, kind, combiner=world.combiner), channels)
        channels = world.recover(metadata, after, all_of_it=False)
    last = parallelisms[-1]
    written = graph(world.producers, last, kind, combiner=world.combiner)
    world.recover(checkpoint(written, channels), last, all_of_it=True)
    assert sorted((key, n) for key, n, _ in world.consumed) == sorted(world.emitted)
    if kind is Partitioning.KEYED:
        newest: dict[tuple[int, int], int] = {}
        for key, n, _ in world.consumed:
            assert newest.get((key, n % 100), -1) < n, f"row {n} of key {key} has been overtaken"
            newest[key, n % 100] = n


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), before=st.integers(1, 8), after=st.integers(1, 8))
def test_keyed_rows_reach_the_owner_of_their_key(data: st.DataObject, before: int, after: int) -> None:
    world = World(data, Partitioning.KEYED, 2)
    metadata = checkpoint(graph(2, before, combiner=world.combiner), world.store(world.in_flight(before)))
    world.recover(metadata, after, all_of_it=True)
    for key, _, subtask in world.consumed:
        assert subtask == owner(key, after)


def test_what_each_consumer_reads_does_not_grow_with_the_number_of_rescales() -> None:
    """Each has come another way when the next rescale comes; the last batches are still there for all of them."""
    storage = MemoryStorage()
    rows = [[(key, n) for key in range(30)] for n in range(8)]
    whole = [Captured(0, producer, 0, False, tuple(map(batch, rows))) for producer in range(3)]
    channels = store(storage, whole, "shared/1", 1)
    now = 1
    read: dict[int, set[int]] = {}
    for step, parallelism in enumerate([4, 1, 4, 1, 3, 4, 1, 8, 1, 8, 3]):
        assigned = assign_channels(checkpoint(graph(1, now), channels), graph(1, parallelism))
        read.setdefault(parallelism, set()).update(left_bytes(states) for states in assigned.values())
        channels = ()
        for subtask in range(parallelism):
            gate = Recovering(graph(1, parallelism).edges[0], assigned[TaskId(1, subtask)], storage)
            for _ in range(subtask % 3 if step < 6 else 0):
                assert gate.take() is not None
                gate.processed()
            channels += gate.gate.remaining()
        now = parallelism
        assert left_bytes(each_once(channels)) <= sum(map(len, storage.files.values()))
    total = sum(map(len, storage.files.values()))
    assert all(size <= total for sizes in read.values() for size in sizes), (total, read)


@settings(max_examples=examples(60), deadline=None)
@given(stored_at=st.integers(1, 8), through=st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_a_segment_is_read_by_the_owners_of_its_key_groups_whatever_the_parallelism_was_in_between(
    stored_at: int, through: list[int]
) -> None:
    """So all together read no more than (p + q - 1) / p times the bytes from p to q, as of equally long segments."""
    storage = MemoryStorage()
    whole = [Captured(0, 0, consumer, consumer % 2 == 0, (batch([(1, 1)]),)) for consumer in range(stored_at)]
    channels = store(storage, whole, "shared/1", 1)
    now = stored_at
    for parallelism in through:
        assigned = assign_channels(checkpoint(graph(1, now), channels), graph(1, parallelism))
        channels = tuple(state for states in assigned.values() for state in states)
        now = parallelism
    reads = [(segment.offset, state.consumer) for state in channels for segment in state.segments]
    had, own = ([set(key_group_range(i, p, MAX_PARALLELISM)) for i in range(p)] for p in (stored_at, now))
    offsets = sorted({offset for offset, _ in reads})
    assert sorted(reads) == [
        (offsets[consumer], i) for consumer in range(stored_at) for i in range(now) if own[i] & had[consumer]
    ]
    assert len(reads) <= stored_at + now - 1


def one_state(rows: Rows, consumer: int = 0, **fields: object) -> tuple[MemoryStorage, tuple[ChannelState, ...]]:
    storage = MemoryStorage()
    states = store(storage, [Captured(0, 0, consumer, False, (batch(rows),))], "shared/f")
    return storage, tuple(msgspec.structs.replace(state, **fields) for state in states)


def test_with_the_parallelism_it_had_a_consumer_gets_what_was_its_own() -> None:
    for kind in (Partitioning.REBALANCE, Partitioning.FORWARD):
        _, states = one_state([(1, 1)], consumer=2)
        found = assign_channels(checkpoint(graph(3, 3, kind), states), graph(3, 3, kind))
        assert list(found) == [TaskId(1, 2)]


def test_what_was_not_received_comes_behind_what_was_even_when_it_is_handed_on_once_more() -> None:
    """Recovered output that a checkpoint during recovery refers to is older than what has arrived since."""
    storage = MemoryStorage()
    old = store(
        storage, [Captured(0, 0, 0, False, (batch([(1, 1)]),)), Captured(0, 0, 0, True, (batch([(1, 2)]),))], "f"
    )
    first = assign_channels(checkpoint(graph(1, 1), old), graph(1, 1))[TaskId(1, 0)]
    arrived = store(
        storage, [Captured(0, 0, 0, False, (batch([(1, 3)]),)), Captured(0, 0, 0, True, (batch([(1, 4)]),))], "g"
    )
    second = assign_channels(checkpoint(graph(1, 1), (*first, *arrived)), graph(1, 1))[TaskId(1, 0)]
    assert Recovering(graph(1, 1).edges[0], second, storage).drain() == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_rows_on_an_edge_that_is_gone_are_refused_unless_they_may_be_given_up() -> None:
    _, states = one_state([(1, 1), (2, 2)])
    metadata = checkpoint(graph(1, 1), states)
    elsewhere = replace(graph(1, 1), vertices=(*graph(1, 1).vertices[:1], Vertex(1, 1, None, chain("other"))))
    with pytest.raises(ConfigError, match=r"2 rows in flight from 'read' to 'work', but they are no longer connected"):
        assign_channels(metadata, elsewhere)
    assert assign_channels(metadata, elsewhere, allow_dropped_state=True) == {}


def test_rows_cannot_go_to_an_edge_that_has_become_a_broadcast() -> None:
    _, states = one_state([(1, 1)])
    with pytest.raises(ConfigError, match="that edge is a broadcast now"):
        assign_channels(checkpoint(graph(1, 2), states), graph(1, 2, Partitioning.BROADCAST))


def test_rows_of_other_columns_are_refused_naming_them() -> None:
    """Bytes of one schema can be read as another without an error: the rows would be wrong."""
    _, states = one_state([(1, 1)])
    now = graph(1, 1)
    changed = pa.schema([("key", pa.timestamp("us")), ("n", pa.int64())])
    now = replace(now, edges=(replace(now.edges[0], schema=changed),))
    with pytest.raises(ConfigError, match=r"columns key int64, n int64; they are now key timestamp\[us\], n int64"):
        assign_channels(checkpoint(graph(1, 1), states), now)


class Window(NeverRun):
    """An operator whose rows may have been combined for it."""

    def __init__(self, size: str) -> None:
        self.size = size

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        return {"": {"the window": self.size, "the event time": "us"}, "a part": {"its type": "int64"}}


def windowed(size: str, combiner: SameRows | None) -> JobGraph:
    made = graph(1, 1, combiner=combiner)
    work = Vertex(1, 1, None, (OperatorSpec("work", "work", Window(size)),))
    return replace(made, vertices=(made.vertices[0], work))


def test_combined_rows_are_refused_by_a_program_that_would_combine_them_otherwise_and_only_they() -> None:
    rows = batch([(1, 1)])
    for combined in (False, True):
        sent = SameRows().combine(rows) if combined else rows
        states = store(
            MemoryStorage(), [Captured(0, 0, 0, False, (rows, sent), layouts=(0, int(combined)))], "f", 10**6
        )
        metadata = checkpoint(windowed("10 s", SameRows()), states)
        assert assign_channels(metadata, windowed("10 s", SameRows()))
        for now, why in (
            (windowed("20 s", SameRows()), "the window was 10 s then, and is 20 s now"),
            (windowed("10 s", None), "they would not be now"),
        ):
            if combined:
                with pytest.raises(ConfigError, match=f"from 'read' to 'work' that were combined .*; {why}. Resume"):
                    assign_channels(metadata, now)
            else:
                assert assign_channels(metadata, now), "no row in flight is combined"
    rows_only = store(MemoryStorage(), [Captured(0, 0, 0, False, (rows,))], "f")
    assert assign_channels(checkpoint(windowed("10 s", None), rows_only), windowed("20 s", SameRows()))


def test_combined_rows_that_were_consumed_do_not_hinder_another_program() -> None:
    rows = batch([(1, 1)])
    captured = [Captured(0, 0, 0, False, (SameRows().combine(rows), rows), layouts=(1, 0))]
    (state,) = store(MemoryStorage(), captured, "f", 1)
    left = msgspec.structs.replace(state, skip=1)
    assert assign_channels(checkpoint(windowed("10 s", SameRows()), (left,)), windowed("20 s", None))


def test_other_keys_are_no_hindrance_unless_rows_are_still_being_recovered_by_the_old_ones() -> None:
    storage, states = one_state([(1, 5), (2, 6), (3, 7)], consumer=1)
    now = graph(1, 3, keys="n")
    found = assign_channels(checkpoint(graph(1, 2), states), now)
    rows = [row for states in found.values() for row in Recovering(now.edges[0], states, storage).drain()]
    assert sorted(rows) == [(1, 5), (2, 6), (3, 7)]
    _, states = one_state([(1, 1)], key_groups=(0, 5))
    for other in (now, graph(1, 1, Partitioning.REBALANCE)):
        with pytest.raises(ConfigError, match="were keyed by other columns"):
            assign_channels(checkpoint(graph(1, 2), states), other)


def test_two_edges_with_the_same_ends_are_told_apart() -> None:
    """A stream that is united with itself, by two different keys."""
    _, (state,) = one_state([(1, 5)], consumer=0)
    base = graph(1, 2)
    both = replace(base, edges=(base.edges[0], Edge(1, 0, 1, Partitioning.REBALANCE, SCHEMA)))
    found = assign_channels(checkpoint(both, (state, msgspec.structs.replace(state, edge=1))), both)
    assert sorted(s.edge for states in found.values() for s in states) == [0, 1]
