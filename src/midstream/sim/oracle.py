"""What must be true of a run, at every completed checkpoint and at its end.

A completed checkpoint is a consistent cut: the positions of its sources name a set of rows, and
every keyed operator's state, every broadcast state and what the sinks have prepared up to then
must be exactly what a sequential run over those rows gives.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from midstream.checkpoint.channel_state import read_segment, rows_of
from midstream.checkpoint.metadata import CheckpointMetadata, OperatorState, decode_metadata
from midstream.checkpoint.state_files import read_parts
from midstream.checkpoint.store import is_superseded, list_checkpoints
from midstream.core.errors import StorageError
from midstream.core.seams import Storage
from midstream.graph.job_graph import Edge, Partitioning
from midstream.operators.source import Split
from midstream.protocol.messages import OperatorSnapshot
from midstream.sim.ends import said_by
from midstream.sim.lines import After, Lines
from midstream.sim.rows import SCHEMA, Outside, SimSource, Staged, time_ms
from midstream.sim.tables import COUNTED, HELD
from midstream.sim.tally import LIST, UNION
from midstream.sim.timed import WAITING, rows_waiting, windows_of
from midstream.sim.topologies import Expectation, Shape, behind_timers, expectation, is_on_time, uid_of

_decode_split = msgspec.msgpack.Decoder(Split).decode
CHECKPOINT: Final = re.compile(r"chk-\d+/_metadata")
"""In the job's own directory."""
SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Cut:
    """What a completed checkpoint stands for."""

    expected: Expectation
    output: tuple[str, ...]
    """Names of all that the sinks have staged up to it."""
    ended: Mapping[str, dict[int, int]]
    said: Mapping[str, tuple[OperatorState, Counter[int]]]
    """What is known of its sources and of operators that sum up, see `Oracle`."""


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
        self.lines = Lines(outside)
        self._job_id = ""
        """Of the start that the job is in now."""
        self._cuts: dict[tuple[str, int], Cut] = {}
        """By job id and checkpoint."""
        self._ended: dict[str, dict[int, int]] = {}
        """Rows of the sources that were at their end in the newest completed checkpoint."""
        self._done_with: dict[str, set[int]] = {}
        """Keys of subtasks that had finished in a checkpoint: a restore drops their state, which nobody needs."""
        self._said: dict[str, tuple[OperatorState, Counter[int]]] = {}
        """Of each operator that sums up: as it was in the newest completed checkpoint, and ids of what it had said then."""
        self._last: Expectation | None = None
        """What the newest completed checkpoint must hold."""

    # ---- at every checkpoint

    def check_checkpoint(self, metadata: CheckpointMetadata, is_copy_of: Cut | None = None) -> list[str]:
        """Complaints about a checkpoint whose metadata has just been written; `is_copy_of`: what it was copied from."""
        with self._outside.world.looking():
            complaints = []
            try:
                for complaint in self._check_checkpoint(metadata, is_copy_of):
                    complaints.append(complaint)
            except StorageError as error:
                complaints.append(f"a completed checkpoint cannot be read: {error}")
            return complaints

    def _check_checkpoint(self, metadata: CheckpointMetadata, is_copy_of: Cut | None) -> Iterator[str]:
        if is_superseded(self.storage, metadata):
            return  # of a coordinator that had been superseded: never offered, nobody is told
        if any(entry.checkpoint_id > metadata.checkpoint_id for entry in list_checkpoints(self.storage)):
            # Given up, written late, and newer ones have been committed: one of the older ones, no more.
            lost = [file for file in metadata.files if not self.storage.exists(file)]
            if lost:
                yield f"checkpoint {metadata.checkpoint_id} is written late and refers to {_some(lost)}, which is not there"
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
        held = {
            uid: self._held(operator)
            for uid, operator in operators.items()
            if uid.startswith(("timer", "alarm", "table"))
        }
        in_flight = self._in_flight(metadata)
        self.in_flight += bool(in_flight)
        expected = expectation(self.shape, emitted, held, in_flight)
        self._last = expected
        for uid in expected.overdrawn:
            yield f"{where}: {uid} holds rows that it has not got, or has handed on"
        for uid in expected.counts:
            if uid in operators:
                done = [operators[uid].subtasks[index] for index in operators[uid].finished]
                done_with = self._done_with.setdefault(uid, set())
                for subtask in done:
                    for table in self._tables(subtask, "keys", COUNTED):
                        done_with.update(table.column("key").to_pylist())
        if is_copy_of is not None:
            self._ended, self._said = dict(is_copy_of.ended), dict(is_copy_of.said)
            output = dict.fromkeys(is_copy_of.output)
        else:
            output = self.lines.output(metadata.job_id)
            yield from self.lines.check_id(metadata.job_id, metadata.checkpoint_id)
        output.update((item.decode(), None) for entry in metadata.committables for item in entry.items)
        yield from self._check_state(where, operators, expected)
        yield from self._check_prepared(where, output, expected)
        for uid in expected.totals.keys() & operators.keys():
            yield from self._check_total(where, operators[uid], expected, output, in_flight)
        cut = Cut(expected, tuple(output), dict(self._ended), dict(self._said))
        self._cuts[metadata.job_id, metadata.checkpoint_id] = cut

    def goes_on(self, job_id: str, cut: Cut | None, after: After | None) -> list[str]:
        """The job begins another start, from what stands for `cut` (None: from the beginning). Complaints."""
        self._job_id = job_id
        self._last = None if cut is None else cut.expected
        self._ended = {} if cut is None else dict(cut.ended)
        self._said = {} if cut is None else dict(cut.said)
        return list(self.lines.begins(job_id, () if cut is None else cut.output, after))

    def _check_state(self, where: str, operators: Mapping[str, OperatorState], expected: Expectation) -> Iterator[str]:
        for uid, counts in expected.counts.items():
            if uid in operators and not operators[uid].finished:
                yield from self._check_counts(where, operators[uid], counts)
        for uid, ids in expected.broadcast.items():
            if uid in operators:
                yield from self._check_broadcast(where, operators[uid], ids)
        for uid, seen in expected.tallies.items():
            if uid in operators and not operators[uid].finished:
                yield from self._check_tally(where, operators[uid], seen)

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

    def _in_flight(self, metadata: CheckpointMetadata) -> dict[tuple[int, int], Counter[int]]:
        """By node and port: ids of the rows that are on their way."""
        found: dict[tuple[int, int], Counter[int]] = {}
        edges = [(index, entry) for index, node in enumerate(self.shape) for entry in node.inputs]
        for state in metadata.channels:
            index, entry = edges[state.edge]
            keys = ("key",) if entry.partitioning is Partitioning.KEYED else ()
            edge = Edge(state.edge, entry.node, index, entry.partitioning, SCHEMA, keys)
            batches = [b for segment in state.segments for b in read_segment(self.storage, segment, SCHEMA, "oracle")]
            for rows in rows_of(batches[state.skip :], edge, state, state.skip, self._key_groups):
                found.setdefault((index, entry.port), Counter()).update(rows.column("id").to_pylist())
        return {place: rows for place, rows in found.items() if rows}

    def _held(self, operator: OperatorState) -> Counter[int]:
        """Ids of the rows that wait in it."""
        held: Counter[int] = Counter()
        for subtask in operator.subtasks:
            for table in self._tables(subtask, f"map:{WAITING}"):
                for value in table.column("value").to_pylist():
                    held.update(rows_waiting(pickle.loads(value)))
            for table in self._tables(subtask, HELD):
                held.update(table.column("id").to_pylist())
        return held

    def _check_counts(
        self, where: str, operator: OperatorState, expected: Mapping[int, tuple[int, int]]
    ) -> Iterator[str]:
        found: dict[int, tuple[int, int]] = {}
        for subtask in operator.subtasks:
            for table in self._tables(subtask, "keys", COUNTED):
                columns = [table.column(name).to_pylist() for name in ("key", "count", "sum")]
                for key, count, total in zip(*columns, strict=True):
                    if key in found:
                        yield f"{where}: key {key} is in two subtasks of {operator.uid}"
                    found[key] = (count, total)
        if found == expected:
            return
        done_with = self._done_with[operator.uid]
        wrong = {
            key: f"{found.get(key)} instead of {expected.get(key)}"
            for key in sorted({*found, *expected})
            if found.get(key) != expected.get(key) and (key in found or key not in done_with)
        }
        if wrong:
            yield f"{where}: state of {operator.uid} is wrong for {_some(wrong.items())} (rows, sum of ids)"

    def _check_broadcast(self, where: str, operator: OperatorState, expected: frozenset[int]) -> Iterator[str]:
        for index in operator.running:
            subtask = operator.subtasks[index]
            found = {row for table in self._tables(subtask, "broadcast") for row in table.column("id").to_pylist()}
            if found != expected:
                yield (
                    f"{where}: broadcast state of {operator.uid}/{index} lacks {_some(sorted(expected - found))}, "
                    f"has {_some(sorted(found - expected))} too many"
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
                f"{where}: the list of {operator.uid} lacks {_some(sorted(expected - ids))}, "
                f"has {_some(sorted(ids - expected))} too many"
            )
        if count != expected.total():
            yield f"{where}: {operator.uid} has counted {count} rows instead of {expected.total()}"

    def _check_prepared(self, where: str, output: Iterable[str], expected: Expectation) -> Iterator[str]:
        """What was committed before, and what the checkpoint holds for commit: together its sinks' output."""
        staged = []
        for name in output:
            if name not in self._outside.staged:
                yield f"{where}: {name} was never staged"
            else:
                staged.append(self._outside.staged[name])
        yield from self._compare(where, expected.sinks, staged)

    def _check_total(
        self,
        where: str,
        operator: OperatorState,
        expected: Expectation,
        output: Iterable[str],
        in_flight: Mapping[tuple[int, int], Counter[int]],
    ) -> Iterator[str]:
        """What a subtask has said when it had finished is all it ever says; together they have counted every row."""
        sink, node = expected.total_sinks[operator.uid]
        staged = (self._outside.staged[name] for name in output if name in self._outside.staged)
        said = Counter(row for part in staged if part.sink == sink for row in part.ids)
        said += in_flight.get((node, 0), Counter())
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

    def committed(self) -> Set[str]:
        """Names of all output that is committed."""
        return self._outside.committed.keys()

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
            yield f"{where}: of what it covers this is not committed: {_some(missing)}"
        if metadata.committables:
            yield f"{where}: holds output to commit, which whoever goes on from it would commit again"
        if metadata.channels:
            yield f"{where}: holds rows in flight, which only the same graph could read"
        lost = [file for file in metadata.files if not place.exists(file)]
        if lost:
            yield f"{where}: refers to {_some(lost)}, which it has not got"
            return
        yield from self._check_state(where, {op.uid: op for op in metadata.operators}, cut.expected)

    def begin_again(self, storage: Storage, cut: Cut) -> None:
        """Another job begins in a directory of its own from what stands for `cut`: its output is all there is."""
        self.storage = storage
        self._outside.committed = dict.fromkeys(cut.output)
        self.lines = Lines(self._outside)

    def check_stopped_with(self, cut: Cut) -> Iterator[str]:
        """Complaints about the output of a job that has stopped with a savepoint: it is that of the savepoint."""
        yield from self._compare("stop with a savepoint", cut.expected.sinks, self._committed())

    # ---- at the end

    def check_end(self) -> Iterator[str]:
        """Complaints about the output of a job that has finished."""
        everything = {
            uid: {row: key for i, count in enumerate(source.rows) for row, key in source.rows_of(i, count)}
            for uid, source in self._sources.items()
        }
        expected = expectation(self.shape, everything)
        yield from self._compare("end", expected.sinks, self._committed())
        yield from self._check_windows("end", expected)
        for uid, (sink, _) in expected.total_sinks.items():
            said = Counter(row for part in self._committed() if part.sink == sink for row in part.ids)
            if uid in self._said and said != self._said[uid][1]:
                yield f"end: {uid} has said {dict(said)}, and had finished when it had said {dict(self._said[uid][1])}"
            yield from self._check_sum("end", uid, expected, said)

    def check_stopped(self) -> Iterator[str]:
        """Complaints about the output of a job that was stopped: it is that of its last checkpoint."""
        if self._last is not None:
            yield from self._compare("stop", self._last.sinks, self._committed())

    def _check_windows(self, where: str, expected: Expectation) -> Iterator[str]:
        """Each row is in its windows, or late; in none of them twice, and in no other.

        Only the first windows of a row may lack it, which had ended when it came; if all do, it is late. Where
        event time never runs ahead of the rows there are no such rows.
        """
        late: dict[str, Counter[int]] = {uid: Counter() for uid in expected.windowed}
        windows: dict[str, dict[int, Counter[int]]] = {uid: {} for uid in expected.windowed}
        for staged in self._committed():
            if staged.sink in expected.window_sinks:
                uid, is_late = expected.window_sinks[staged.sink]
                for row, _, n in staged.rows:
                    if is_late:
                        late[uid][row] += 1
                    else:
                        windows[uid].setdefault(row, Counter())[n - 1] += 1
        held_back = {uid_of(index, 0, self.shape[index].chain[0]) for index in behind_timers(self.shape)}
        on_time = is_on_time(self.shape, self._sources.values())
        for uid, (kind, ids) in expected.windowed.items():
            wrong = []
            never_late = on_time and uid not in held_back
            for row in sorted({*ids, *windows[uid], *late[uid]}):
                found = windows[uid].get(row, Counter())
                due = windows_of(kind, time_ms(row))
                counts = [found.total()] if due is None else [found[start] for start in due]
                surplus = counts[-1] + late[uid][row] - ids[row]
                self.lost += max(0, -surplus)
                self.doubled += max(0, surplus)
                behind = late[uid][row] > 0 or counts[0] < counts[-1]
                has_gap = counts != sorted(counts) or sum(counts) != found.total()
                if surplus or has_gap or (behind and never_late):
                    wrong.append((row, dict(found), late[uid][row], ids[row]))
            for row, starts, times_late, times in wrong[:SAMPLES]:
                yield (
                    f"{where}: {uid} has got row {row} {times} times; it is in windows {starts} (start in ms: how "
                    f"often), late {times_late} times ({len(wrong)} such rows)"
                )

    def _committed(self) -> list[Staged]:
        return [self._outside.staged[name] for name in self.lines.output(self._job_id)]

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
                yield f"{where}: {uid} lost {lost.total()} rows: {_some(sorted(lost))}"
            if doubled:
                yield f"{where}: {uid} has {doubled.total()} rows too many: {_some(sorted(doubled))}"


def _some(items: object) -> str:
    listed = list(items)  # type: ignore[call-overload]
    shown = ", ".join(str(item) for item in listed[:SAMPLES])
    return f"{shown}, … ({len(listed)})" if len(listed) > SAMPLES else shown or "nothing"
