"""What must be true of a run, at every completed checkpoint and at its end.

A completed checkpoint is a consistent cut: the positions of its sources name a set of rows, and
every keyed operator's state, every broadcast state and what the sinks have prepared up to then
must be exactly what a sequential run over those rows gives.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from midstream.checkpoint.channel_state import read_segment, rows_of
from midstream.checkpoint.metadata import CheckpointMetadata, OperatorState, decode_metadata
from midstream.checkpoint.state_files import SHARED, read_parts
from midstream.checkpoint.store import is_superseded, list_checkpoints
from midstream.core.batches import concat
from midstream.core.elements import MAX_WATERMARK_US
from midstream.core.errors import StorageError
from midstream.core.keys import key_group_range
from midstream.core.seams import Storage
from midstream.graph.job_graph import Edge, Partitioning
from midstream.operators.source import Split
from midstream.operators.window_base import PARTS, PROGRESS
from midstream.protocol.messages import OperatorSnapshot
from midstream.sim.contents import MAKING, Contents, Way, check_made, check_numbers, codes, some, ways
from midstream.sim.ends import said_by
from midstream.sim.rows import SCHEMA, Int64s, Outside, SimSource, Staged
from midstream.sim.tables import COUNTED, HELD
from midstream.sim.tally import LIST, UNION
from midstream.sim.timed import DELAY_US, WAITING, WINDOWS
from midstream.sim.topologies import Expectation, Input, Shape, behind_timers, expectation, on_time_at, uid_of
from midstream.sim.windowed import Made, Spans, check_windows, held_in, no_marks, unpacked
from midstream.state.parts import KEY_GROUP, Redistribute

_decode_split = msgspec.msgpack.Decoder(Split).decode
CHECKPOINT: Final = re.compile(r"chk-\d+/_metadata")
"""In the job's own directory."""
_NOTHING: Final[Int64s] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a completed checkpoint stands for."""

    expected: Expectation
    output: tuple[str, ...]
    """Names of all that the sinks have staged up to it."""


class Oracle:
    """`sources` by uid. `complain` takes every broken rule."""

    def __init__(
        self, shape: Shape, sources: Mapping[str, SimSource], outside: Outside, storage: Storage, key_groups: int
    ) -> None:
        self.shape = shape
        self._key_groups = key_groups
        self.checkpoints = 0
        self.finished_in_checkpoint = 0
        """How many checkpoints held finished subtasks."""
        self.in_flight = 0
        """How many held rows in flight."""
        self.lost = 0
        self.doubled = 0
        self.storage = storage
        """Of the job's checkpoint directory."""
        self._sources = sources
        self._outside = outside
        self._cuts: dict[tuple[str, int], Cut] = {}
        """By job id and checkpoint."""
        self._ended: dict[str, dict[int, int]] = {}
        """Rows of the sources that were at their end in the newest completed checkpoint."""
        self._done: dict[str, set[int]] = {}
        """Key groups of subtasks that had finished in a checkpoint: nothing comes to them any more, and a restore at
        another parallelism drops their state, which nobody needs."""
        self._finished_at: dict[str, int] = {}
        """At which parallelism an operator had finished as a whole."""
        self._said: dict[str, tuple[OperatorState, Counter[int]]] = {}
        """Of each operator that sums up: as it was in the newest completed checkpoint, and ids of what it had said then."""
        self._last: Cut | None = None
        """The newest completed checkpoint."""
        self._edges = [(index, entry) for index, node in enumerate(shape) for entry in node.inputs]
        self._contents = Contents(sources.values(), key_groups)
        self._ways = ways(shape)
        self._sinks = {
            uid_of(index, position, kind): index
            for index, node in enumerate(shape)
            for position, kind in enumerate(node.chain)
            if kind == "sink"
        }
        held_back = behind_timers(shape)
        self._punctual = [
            (self._contents.are_of(on_time), DELAY_US if index in held_back else 0)
            for index, on_time in enumerate(on_time_at(shape, sources.values()))
        ]
        """Of each node: which rows are never late there, and by how much event time may be past them."""
        self._seen: dict[str, Spans | Int64s] = {}
        """By name of what has been looked at of the sinks' output: the rows of windows, or the numbers of rows."""

    # ---- at every checkpoint

    def check_checkpoint(self, data: bytes) -> list[str]:
        """Complaints about a checkpoint whose metadata has just been written."""
        with self._outside.world.looking():
            complaints = []
            try:
                for complaint in self._check_checkpoint(data):
                    complaints.append(complaint)
            except StorageError as error:
                complaints.append(f"a completed checkpoint cannot be read: {error}")
            return complaints

    def _check_checkpoint(self, data: bytes) -> Iterator[str]:
        metadata = decode_metadata(data, "oracle")
        if is_superseded(self.storage, metadata):
            return  # of a coordinator that had been superseded: never offered, nobody is told
        if any(entry.checkpoint_id > metadata.checkpoint_id for entry in list_checkpoints(self.storage)):
            # Given up, written late, and newer ones have been committed: one of the older ones, no more.
            lost = [file for file in metadata.files if not self.storage.exists(file)]
            if lost:
                yield f"checkpoint {metadata.checkpoint_id} is written late and refers to {some(lost)}, which is not there"
            return
        self.checkpoints += 1
        self.finished_in_checkpoint += any(op.finished for op in metadata.operators)
        where = f"checkpoint {metadata.checkpoint_id}"
        operators = {op.uid: op for op in metadata.operators}
        emitted: dict[str, dict[int, int]] = {}
        for uid in self._sources:
            ended = uid in operators and operators[uid].fully_finished
            # Of a source that had ended before, perhaps by a drain, later checkpoints no longer say where.
            before = self._ended.get(uid) if ended else None
            emitted[uid] = self._emitted(uid, metadata) if before is None else before
            if ended:
                self._ended[uid] = emitted[uid]
            else:
                self._ended.pop(uid, None)
            if ended and before is None and metadata.job_id not in self._outside.drained:
                rows = sum(self._sources[uid].rows)
                if len(emitted[uid]) < rows:
                    yield f"{where}: {uid} has ended at {len(emitted[uid])} of {rows} rows, and nobody has asked for that"
        held = {
            uid: list(self._held(where, operator))
            for uid, operator in operators.items()
            if uid.startswith(("timer", "alarm", "table"))
        }
        in_flight = self.rows_in_flight(metadata)
        self.in_flight += bool(in_flight)
        by_port: dict[tuple[int, int], Counter[int]] = {}
        for edge, rows in in_flight.items():
            index, entry = self._edges[edge]
            by_port.setdefault((index, entry.port), Counter()).update(rows.column("id").to_pylist())
        waiting = {
            uid: Counter(row for rows in batches for row in rows.column("id").to_pylist())
            for uid, batches in held.items()
        }
        expected = expectation(self.shape, emitted, waiting, by_port)
        for uid in expected.overdrawn:
            yield f"{where}: {uid} holds rows that it has not got, or has handed on"
        output = dict(self._outside.committed)
        output.update((item.decode(), None) for entry in metadata.committables for item in entry.items)
        self._last = self._cuts[metadata.job_id, metadata.checkpoint_id] = Cut(expected, tuple(output))
        yield from self._check_state(where, operators, expected)
        yield from self._check_output(where, output, expected)
        yield from self._check_on_the_way(where, in_flight, held)
        yield from self._check_numbers(where, output, expected, in_flight, held)
        for uid, (kind, _) in expected.windowed.items():
            if uid in operators:
                yield from self._check_windows(where, uid, kind, output, expected, in_flight, operators[uid])
        for uid in expected.totals.keys() & operators.keys():
            yield from self._check_total(where, operators[uid], expected, output, by_port)
        for uid, operator in operators.items():
            for index in operator.finished:
                groups = key_group_range(index, operator.parallelism, self._key_groups)
                self._done.setdefault(uid, set()).update(groups)
            if operator.fully_finished:
                self._finished_at.setdefault(uid, operator.parallelism)

    def _check_state(self, where: str, operators: Mapping[str, OperatorState], expected: Expectation) -> Iterator[str]:
        for operator in operators.values():
            yield from self._check_owners(where, operator)
        for uid, counts in expected.counts.items():
            if uid in operators:
                yield from self._check_counts(where, operators[uid], counts)
        for uid, ids in expected.broadcast.items():
            if uid in operators:
                yield from self._check_broadcast(where, operators[uid], ids)
        for uid, seen in expected.tallies.items():
            if uid in operators:
                if self._finished_at.get(uid, operators[uid].parallelism) == operators[uid].parallelism:
                    yield from self._check_tally(where, operators[uid], seen)

    def _check_owners(self, where: str, operator: OperatorState) -> Iterator[str]:
        """Keyed state lies with the subtask that owns its key groups."""
        for index in operator.running:
            own = key_group_range(index, operator.parallelism, self._key_groups)
            for part in operator.subtasks[index].parts:
                for chunk in part.chunks if part.redistribute == Redistribute.KEYED.value else ():
                    if chunk.rows and not own.start <= chunk.key_group_min <= chunk.key_group_max < own.stop:
                        yield (
                            f"{where}: {operator.uid}/{index} has {part.name} of the key groups {chunk.key_group_min} to "
                            f"{chunk.key_group_max}, and owns {own.start} to {own.stop - 1}"
                        )

    def _emitted(self, uid: str, metadata: CheckpointMetadata) -> dict[int, int]:
        """id to key of the rows that lie before the source's position."""
        source = self._sources[uid]
        rows = {f"{source.number}-{i}": count for i, count in enumerate(source.rows)}
        known = next((position for position in metadata.sources if position.uid == uid), None)
        if known is not None and not known.exhausted:
            done = int(known.position) if known.position else 0
            rows = {split: count if int(split.split("-")[1]) < done else 0 for split, count in rows.items()}
        open_splits = [_decode_split(encoded) for encoded in (known.pending if known else ())]
        for operator in metadata.operators:
            if operator.uid == uid:
                for subtask in operator.subtasks:
                    for table in self._tables(subtask, "splits"):
                        open_splits += [_decode_split(encoded) for encoded in table.column("split").to_pylist()]
        seen: set[str] = set()
        for split in open_splits:
            if split.id in seen:
                self._outside.world.bug(
                    f"checkpoint {metadata.checkpoint_id}: split {split.id} of {uid} is in it twice"
                )
            seen.add(split.id)
            rows[split.id] = split.offset
        return {row: key for name, count in rows.items() for row, key in source.rows_of(int(name.split("-")[1]), count)}

    def rows_in_flight(self, metadata: CheckpointMetadata) -> dict[int, pa.RecordBatch]:
        """By edge: the rows that are on their way."""
        found: dict[int, list[pa.RecordBatch]] = {}
        for state in metadata.channels:
            index, entry = self._edges[state.edge]
            keys = ("key",) if entry.partitioning is Partitioning.KEYED else ()
            edge = Edge(state.edge, entry.node, index, entry.partitioning, SCHEMA, keys)
            batches = [b for segment in state.segments for b in read_segment(self.storage, segment, SCHEMA, "oracle")]
            rows = rows_of(batches[state.skip :], edge, state, state.skip, self._key_groups)
            found.setdefault(state.edge, []).extend(batch for batch in rows if batch.num_rows)
        return {edge: concat(batches) for edge, batches in sorted(found.items()) if batches}

    def _held(self, where: str, operator: OperatorState) -> Iterator[pa.RecordBatch]:
        """The rows that wait in it."""
        for subtask in operator.subtasks:
            for table in self._tables(subtask, f"map:{WAITING}"):
                rows = []
                for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True):
                    waiting = pickle.loads(value)
                    if any(row["key"] != key for row in waiting):
                        self._outside.world.bug(f"{where}: {operator.uid} holds {some(waiting)} under key {key}")
                    rows += waiting
                yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
            for table in self._tables(subtask, HELD):
                yield from table.select(SCHEMA.names).to_batches()

    def _check_counts(
        self, where: str, operator: OperatorState, expected: Mapping[int, tuple[int, int]]
    ) -> Iterator[str]:
        found: dict[int, tuple[int, int]] = {}
        group_of = self._contents.group_of
        for subtask in operator.subtasks:
            for table in self._tables(subtask, "keys", COUNTED):
                columns = [table.column(name).to_pylist() for name in ("key", KEY_GROUP, "count", "sum")]
                for key, group, count, total in zip(*columns, strict=True):
                    if key in found:
                        yield f"{where}: key {key} is in two subtasks of {operator.uid}"
                    if group != group_of.get(key):
                        yield f"{where}: key {key} of {operator.uid} is in key group {group}"
                    found[key] = (count, total)
        if found == expected:
            return
        done = self._done.get(operator.uid, set())
        wrong = {
            key: f"{found.get(key)} instead of {expected.get(key)}"
            for key in sorted({*found, *expected})
            if found.get(key) != expected.get(key) and (key in found or group_of[key] not in done)
        }
        if wrong:
            yield f"{where}: state of {operator.uid} is wrong for {some(wrong.items())} (rows, sum of ids)"

    def _check_broadcast(self, where: str, operator: OperatorState, expected: frozenset[int]) -> Iterator[str]:
        for index in operator.running:
            subtask = operator.subtasks[index]
            found = {row for table in self._tables(subtask, "broadcast") for row in table.column("id").to_pylist()}
            if found != expected:
                yield (
                    f"{where}: broadcast state of {operator.uid}/{index} lacks {some(sorted(expected - found))}, "
                    f"has {some(sorted(found - expected))} too many"
                )

    def _check_tally(self, where: str, operator: OperatorState, expected: Counter[int]) -> Iterator[str]:
        ids: Counter[int] = Counter()
        count = 0
        for subtask in operator.subtasks:
            for table in self._tables(subtask, LIST):
                ids.update(table.column("id").to_pylist())
            for table in self._tables(subtask, UNION):
                count += sum(table.column("count").to_pylist())
        if ids != expected:
            yield (
                f"{where}: the list of {operator.uid} lacks {some(sorted(expected - ids))}, "
                f"has {some(sorted(ids - expected))} too many"
            )
        if count != expected.total():
            yield f"{where}: {operator.uid} has counted {count} rows instead of {expected.total()}"

    # ---- contents

    def _check_output(self, where: str, output: Iterable[str], expected: Expectation) -> Iterator[str]:
        """What was committed before, and what a checkpoint holds for commit: together its sinks' output."""
        staged = []
        for name in output:
            if name not in self._outside.staged:
                yield f"{where}: {name} was never staged"
            else:
                staged.append(self._outside.staged[name])
                if name not in self._seen:
                    complaint = self._look_at(name)
                    if complaint:
                        yield f"{where}: {staged[-1].sink} has {complaint}"
        yield from self._compare(where, expected.sinks, staged)

    def _look_at(self, name: str) -> str:
        """What is wrong with the contents of what a sink has staged; "" for nothing."""
        staged = self._outside.staged[name]
        node = self._sinks[staged.sink]
        maker = self._maker(node)
        if maker == "":
            way = self._ways[node]
            self._seen[name] = codes(staged.rows) if way.whole else _NOTHING
            return self._contents.check(staged.rows, self._counted(way))
        self._seen[name] = _NOTHING
        if maker == "total":
            return check_made(staged.rows)
        if maker in WINDOWS:
            self._seen[name], complaint = unpacked(staged.rows, self._contents)
            return complaint
        return ""

    def _maker(self, node: int) -> str:
        """What makes the rows that a sink gets; "" for nothing, where they are those of the sources."""
        return next((kind for entry in self.shape[node].inputs for kind in self._made_by(entry)), "")

    def _made_by(self, entry: Input) -> list[str]:
        return [kind for kind in self.shape[entry.node].chain if kind in MAKING and entry.tag is None]

    def _counted(self, way: Way) -> list[Set[int] | None]:
        counted = self._outside.counted
        return [None if uid is None else counted.get(uid, frozenset()) for uid in sorted(way.counted, key=str)]

    def _check_on_the_way(
        self, where: str, in_flight: Mapping[int, pa.RecordBatch], held: Mapping[str, Sequence[pa.RecordBatch]]
    ) -> Iterator[str]:
        """Contents of the rows in flight, and of those that wait in operators."""
        for edge, rows in in_flight.items():
            index, entry = self._edges[edge]
            makers = self._made_by(entry)
            if not makers:
                complaint = self._contents.check(rows, self._counted(self._ways[entry.node]))
            elif makers[0] == "total":
                complaint = check_made(rows)
            else:
                complaint = unpacked(rows, self._contents)[1] if makers[0] in WINDOWS else ""
            if complaint:
                yield f"{where}: in flight to {self.shape[index].chain[0]}{index} there is {complaint}"
        for index, node in enumerate(self.shape):
            for rows in held.get(uid_of(index, 0, node.chain[0]), ()):
                complaint = self._contents.check(rows, self._counted(self._ways[index]))
                if complaint:
                    yield f"{where}: {node.chain[0]}{index} holds {complaint}"

    def _check_numbers(
        self,
        where: str,
        output: Iterable[str],
        expected: Expectation,
        in_flight: Mapping[int, pa.RecordBatch] = MappingProxyType({}),
        held: Mapping[str, Sequence[pa.RecordBatch]] = MappingProxyType({}),
    ) -> Iterator[str]:
        """What a counting operator has given out is all there, each number once, where there is but one way for it."""
        for sink, node in self._sinks.items():
            way = self._ways[node]
            if way.whole is None:
                continue
            found = [seen for name in output if isinstance(seen := self._of(sink, name), np.ndarray)]
            found += [codes(rows) for edge, rows in in_flight.items() if self._edges[edge][0] in way.nodes]
            for index in way.nodes:
                found += map(codes, held.get(uid_of(index, 0, self.shape[index].chain[0]), ()))
            complaint = check_numbers(found, expected.counts[way.whole])
            if complaint:
                yield f"{where}: what {way.whole} has counted is at {sink} and on the way there with {complaint}"

    def _of(self, sink: str, name: str) -> Spans | Int64s | None:
        """What was seen of what `sink` has staged under that name."""
        staged = self._outside.staged.get(name)
        return self._seen.get(name) if staged is not None and staged.sink == sink else None

    def _check_windows(
        self,
        where: str,
        uid: str,
        kind: str,
        output: Iterable[str],
        expected: Expectation,
        in_flight: Mapping[int, pa.RecordBatch] = MappingProxyType({}),
        operator: OperatorState | None = None,
    ) -> Iterator[str]:
        """`operator`: None at the end, when there is no state."""
        emitted: list[Spans] = []
        late: list[Int64s] = []
        for sink, (maker, is_late) in expected.window_sinks.items():
            if maker != uid:
                continue
            for name in output:
                seen = self._of(sink, name)
                if is_late and seen is not None:
                    late.append(self._outside.staged[name].rows.column("id").to_numpy())
                elif isinstance(seen, Spans):
                    emitted.append(seen)
        node = next(index for index, entry in enumerate(self.shape) if uid_of(index, 0, entry.chain[0]) == uid)
        for edge, rows in in_flight.items():
            entry = self._edges[edge][1]
            if entry.node == node and entry.tag is not None:
                late.append(rows.column("id").to_numpy())
            elif entry.node == node:
                emitted.append(unpacked(rows, self._contents)[0])
        made = Made(expected.windowed[uid][1], Spans.joined(emitted), np.concatenate(late) if late else _NOTHING)
        made.marks_us = no_marks(self._key_groups, all_fired=operator is None)
        if operator is not None:
            yield from self._add_state(where, made, operator)
        verdict = check_windows(self._contents, kind, made, *self._punctual[node])
        self.lost += verdict.lost
        self.doubled += verdict.doubled
        for complaint in verdict.complaints:
            yield f"{where}: {uid} has rows {complaint}"

    def _add_state(self, where: str, made: Made, operator: OperatorState) -> Iterator[str]:
        held: list[Spans] = []
        for index in operator.running:
            for table in self._tables(operator.subtasks[index], PROGRESS):
                made.marks_us[table.column(KEY_GROUP).to_numpy()] = table.column("watermark").to_numpy()
            for table in self._tables(operator.subtasks[index], PARTS):
                spans, complaint = held_in(table, self._contents)
                held.append(spans)
                if complaint:
                    yield f"{where}: {operator.uid}/{index} has {complaint}"
        made.held = Spans.joined(held)
        done = self._done.get(operator.uid, set()).union(
            *(key_group_range(index, operator.parallelism, self._key_groups) for index in operator.finished)
        )
        made.marks_us[sorted(done)] = MAX_WATERMARK_US

    def _check_total(
        self,
        where: str,
        operator: OperatorState,
        expected: Expectation,
        output: Iterable[str],
        by_port: Mapping[tuple[int, int], Counter[int]],
    ) -> Iterator[str]:
        """What a subtask has said when it had finished is all it ever says; together they have counted every row."""
        sink, node = expected.total_sinks[operator.uid]
        staged = (self._outside.staged[name] for name in output if name in self._outside.staged)
        said = Counter(row for part in staged if part.sink == sink for row in part.ids)
        said += by_port.get((node, 0), Counter())
        before_of, before = self._said.get(operator.uid, (operator, said))
        final = before_of.fully_finished
        if final or before_of.parallelism == operator.parallelism:
            again = {row: said[row] for row in said | before if final or said_by(row)[0] in before_of.finished}
            if again != {row: n for row, n in before.items() if row in again and n}:
                yield f"{where}: {operator.uid} had finished when it had said {dict(before)}, and has said {dict(said)}"
        self._said[operator.uid] = operator, said
        if operator.fully_finished:
            yield from self._check_sum(where, operator.uid, expected, said)

    def _check_sum(self, where: str, uid: str, expected: Expectation, said: Counter[int]) -> Iterator[str]:
        counted = sum(n * said_by(row)[1] for row, n in said.items())
        if counted != expected.totals[uid].total():
            yield f"{where}: {uid} has counted {counted} rows instead of {expected.totals[uid].total()}"

    def _tables(self, subtask: OperatorSnapshot, *parts: str) -> Iterator[pa.Table]:
        handles = [handle for handle in subtask.parts if handle.name in parts]
        for state in read_parts(self.storage, handles, range(1 << 16), "oracle").values():
            for chunk in state.chunks:
                yield chunk.table

    # ---- savepoints

    def cut_of(self, metadata: CheckpointMetadata) -> Cut | None:
        """Of the completed checkpoint that a savepoint was made of."""
        return self._cuts.get((metadata.job_id, metadata.checkpoint_id))

    def has_completed(self, job_id: str, checkpoint_id: int) -> bool:
        return (job_id, checkpoint_id) in self._cuts

    def check_savepoint(self, url: str, place: Storage, data: bytes) -> list[str]:
        """Complaints about a savepoint whose metadata has just been written to `place`, to which it must be confined."""
        before, self.storage = self.storage, place
        with self._outside.world.looking():
            try:
                return list(self._check_savepoint(f"savepoint {url}", place, decode_metadata(data, url)))
            except StorageError as error:
                return [f"savepoint {url} cannot be read: {error}"]
            finally:
                self.storage = before

    def _check_savepoint(self, where: str, place: Storage, metadata: CheckpointMetadata) -> Iterator[str]:
        cut = self.cut_of(metadata)
        if cut is None:
            yield f"{where}: checkpoint {metadata.checkpoint_id} was never completed"
            return
        missing = [name for name in cut.output if name not in self._outside.committed]
        if missing:
            yield f"{where}: of what it covers this is not committed: {some(missing)}"
        if metadata.committables:
            yield f"{where}: holds output to commit, which whoever goes on from it would commit again"
        if metadata.channels:
            yield f"{where}: holds rows in flight, which only the same graph could read"
        lost = [file for file in metadata.files if not place.exists(file)]
        if lost:
            yield f"{where}: refers to {some(lost)}, which it has not got"
            return
        yield from self._check_state(where, {op.uid: op for op in metadata.operators}, cut.expected)

    def begin_again(self, storage: Storage, cut: Cut) -> None:
        """Another job begins in a directory of its own from what stands for `cut`: its output is all there is."""
        self.storage = storage
        self._ended.clear()
        self._said.clear()
        self._done.clear()
        self._finished_at.clear()
        self._last = cut
        self._outside.committed = dict.fromkeys(cut.output)

    def check_stopped_with(self, cut: Cut) -> Iterator[str]:
        """Complaints about the output of a job that has stopped with a savepoint: it is that of the savepoint."""
        yield from self._compare("stop with a savepoint", cut.expected.sinks, self._committed())

    # ---- at the end

    def check_end(self) -> Iterator[str]:
        """Complaints about the output of a job that has finished: of all rows, or of those up to where it was drained."""
        everything = {
            uid: {row: key for i, count in enumerate(source.rows) for row, key in source.rows_of(i, count)}
            for uid, source in self._sources.items()
        }
        expected = expectation(self.shape, {**everything, **self._ended})
        output = self._outside.committed
        yield from self._check_output("end", output, expected)
        yield from self._check_numbers("end", output, expected)
        for uid, (kind, _) in expected.windowed.items():
            yield from self._check_windows("end", uid, kind, output, expected)
        for uid, (sink, _) in expected.total_sinks.items():
            said = Counter(row for part in self._committed() if part.sink == sink for row in part.ids)
            if uid in self._said and said != self._said[uid][1]:
                yield f"end: {uid} has said {dict(said)}, and had finished when it had said {dict(self._said[uid][1])}"
            yield from self._check_sum("end", uid, expected, said)

    def check_left_over(self, files: Collection[str], retained: int) -> Iterator[str]:
        """Complaints about files of a job that has ended without any fault."""
        metadata = [path for path in files if CHECKPOINT.fullmatch(path)]
        if len(metadata) > retained:
            yield f"{len(metadata)} checkpoints are left, {retained} are to be retained"
        with self._outside.world.looking():
            kept = {f for path in metadata for f in decode_metadata(self.storage.read(path), path).files}
        left = sorted(path for path in files if path.startswith(f"{SHARED}/") and path not in kept)
        if left:
            yield f"state files that no checkpoint refers to are left: {some(left)}"

    def check_stopped(self) -> Iterator[str]:
        """Complaints about the output of a job that was stopped: it is that of its last checkpoint."""
        if self._last is not None:
            yield from self._compare("stop", self._last.expected.sinks, self._committed())
            committed, due = self._outside.committed, dict.fromkeys(self._last.output)
            if committed.keys() != due.keys():
                lacking, surplus = (
                    [name for name in a if name not in b] for a, b in ((due, committed), (committed, due))
                )
                yield f"stop: of its last checkpoint this is not committed: {some(lacking)}, and this is besides: {some(surplus)}"

    def _committed(self) -> list[Staged]:
        return [self._outside.staged[name] for name in self._outside.committed]

    def _compare(self, where: str, expected: Mapping[str, Counter[int]], staged: Sequence[Staged]) -> Iterator[str]:
        found: dict[str, Counter[int]] = {uid: Counter() for uid in expected}
        for part in staged:
            if part.sink not in found:
                continue
            found[part.sink].update(part.ids)
        for uid, ids in expected.items():
            if dict.__eq__(ids, found[uid]):  # Counter's own goes through them one by one
                continue
            lost, doubled = ids - found[uid], found[uid] - ids
            self.lost += lost.total()
            self.doubled += doubled.total()
            if lost:
                yield f"{where}: {uid} lost {lost.total()} rows: {some(sorted(lost))}"
            if doubled:
                yield f"{where}: {uid} has {doubled.total()} rows too many: {some(sorted(doubled))}"
