"""The rules that a run must satisfy at every completed checkpoint and at its end.

A completed checkpoint is a consistent cut: the positions of its sources define a set of rows, and
every keyed operator's state, every broadcast state and everything that the sinks have prepared up
to then must be exactly the result of a sequential run over those rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    OperatorState,
    SourcePosition,
    VertexLayout,
    decode_metadata,
)
from midstream.engine.checkpoint.state_files import verify_chunks
from midstream.engine.checkpoint.store import is_superseded, jobs_of, list_checkpoints
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.operators.source_api import Split
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot
from midstream.engine.state.state_parts import KEY_GROUP, Redistribute
from midstream.simulation.outside import Staged
from midstream_lab.checkers.content_checker import some
from midstream_lab.checkers.event_time_checker import EventTimeChecker
from midstream_lab.checkers.lineage import After, Lineage
from midstream_lab.checkers.row_inspection import Found, RowInspection
from midstream_lab.checkers.state_checker import StateChecker
from midstream_lab.checkers.window_checker import Made
from midstream_lab.jobs import running
from midstream_lab.jobs.end_operators import decode_count
from midstream_lab.jobs.recorded_rows import Outside, SimSource
from midstream_lab.jobs.shapes import Shape
from midstream_lab.jobs.tables import COUNTED
from midstream_lab.jobs.tally import LIST, UNION, NotifiedSource
from midstream_lab.jobs.topologies import Expectation, expectation

_decode_split = msgspec.msgpack.Decoder(Split).decode
"""The path of a checkpoint's metadata in its directory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows, state and output that a completed checkpoint represents."""

    job_id: str
    """The id of the start that made the checkpoint."""
    expected: Expectation
    output: tuple[str, ...]
    """The names of everything that the sinks have staged up to the checkpoint."""
    operators: tuple[OperatorState, ...]
    sources: tuple[SourcePosition, ...]
    done: Mapping[str, frozenset[int]]
    finished_at: Mapping[str, int]
    """`done` and `finished_at` record the operators that have finished, wholly or in part; see `CheckpointChecker`."""
    ended: Mapping[str, dict[int, int]]
    sums: Mapping[str, tuple[OperatorState, Counter[int]]]
    """`ended` and `sums` record the sources that have ended and the operators that sum up; see `CheckpointChecker`."""
    marks: Mapping[str, tuple[int, int]]
    """See `EventTimeChecker`."""


def at_rest(
    operator: OperatorState, vertices: Iterable[VertexLayout], before: Iterable[OperatorState]
) -> frozenset[int]:
    """Return the subtasks of an operator that must not run again after a checkpoint with the operators `before`.

    They are those that had finished in it at the same parallelism, together with everything that shares their task in
    `vertices`. A task runs as a whole: in a changed program, one that holds a finished subtask runs again if it also
    holds an operator that is new, or of which this subtask had not finished.
    """
    had = {op.uid: op for op in before}
    together = {uid for vertex in vertices if operator.uid in vertex.uids for uid in vertex.uids}
    ended = frozenset(range(operator.parallelism))
    for op in (had.get(uid) for uid in together):
        ended &= frozenset(op.finished if op is not None and op.parallelism == operator.parallelism else ())
    return ended


class CheckpointChecker:
    """The rules for one run. `sources` are by uid. `is_aligned`: barriers overtake nothing."""

    def __init__(
        self,
        shape: Shape,
        sources: Mapping[str, SimSource],
        outside: Outside,
        storage: Storage,
        key_groups: int,
        is_aligned: bool,
    ) -> None:
        self.shape = shape
        self._key_groups = key_groups
        self.checkpoints = 0
        self.finished_in_checkpoint = 0
        """The number of checkpoints with finished subtasks."""
        self.in_flight = 0
        """The number of checkpoints with rows in flight."""
        self.lost = 0
        self.doubled = 0
        self.storage = storage
        """The storage of the job's checkpoint directory."""
        self.reported_late: Callable[[str], int] = lambda uid: 0
        """Returns how many late rows of an operator drivers have reported as dropped, in all starts together."""
        self._sources = sources
        self._outside = outside
        self.lineage = Lineage(outside)
        self._job_id = ""
        """The id of the job's current start."""
        self._cuts: dict[tuple[str, int], Cut] = {}
        """The cut of each completed checkpoint, by job id and checkpoint."""
        self._before: dict[tuple[str, int], Cut | None] = {}
        """The predecessor of each attempt's next checkpoint, by job id and attempt.

        This is the newest checkpoint of the same attempt, or else the one from which it was restored. It is not always
        the last one written, which may belong to an earlier attempt that had given it up.
        """
        self._ended: dict[str, dict[int, int]] = {}
        """The rows of each source that had ended in the preceding checkpoint."""
        self._done: dict[str, frozenset[int]] = {}
        """The key groups of subtasks that had finished in a checkpoint, by operator.

        They receive no more rows, and a restore at another parallelism drops their state, which is no longer needed.
        """
        self._finished_at: dict[str, int] = {}
        """The parallelism at which an operator had finished as a whole; 0 if it has been restored at another one since."""
        self._sums: dict[str, tuple[OperatorState, Counter[int]]] = {}
        """The state of each operator that sums up in the preceding checkpoint, and the ids of the rows that it had
        emitted by then.
        """
        self._last: Cut | None = None
        self._begun_with: Cut | None = None
        """The checkpoint from which this start of the job continues."""
        """The cut of the newest completed checkpoint."""
        self.inspection = RowInspection(shape, sources, outside, key_groups)
        tables = lambda subtask, *parts: self.inspection.tables_of(self.storage, subtask, *parts)  # noqa: E731 - its storage may change
        self._states = StateChecker(shape, sources, tables)
        self._event_times = EventTimeChecker(shape, sources.values(), tables, is_aligned)

    # ---- at every checkpoint

    def check_checkpoint(self, metadata: CheckpointMetadata, is_copy_of: Cut | None = None) -> list[str]:
        """Return complaints about a checkpoint whose metadata has just been written.

        `is_copy_of`: the cut of the savepoint from which it was copied, if it was.
        """
        with self._outside.world.inspecting():
            complaints: list[str] = []
            try:
                for complaint in self._check_checkpoint(metadata, is_copy_of):
                    complaints.append(complaint)
            except StorageError as error:
                complaints.append(f"a completed checkpoint cannot be read: {error}")
            return complaints

    def _check_checkpoint(self, metadata: CheckpointMetadata, is_copy_of: Cut | None) -> Iterator[str]:
        if is_superseded(self.storage, metadata):
            return  # its coordinator has been superseded, so the checkpoint is never reported or restored
        if list_checkpoints(self.storage, newer_than=metadata.checkpoint_id):
            # The checkpoint was given up and written late, when a newer one was complete; it is only an older one.
            lost = [file for file in metadata.files if not self.storage.exists(file)]
            if lost:
                yield f"checkpoint {metadata.checkpoint_id} is written late and refers to {some(lost)}, which is not there"
            return
        self._note_safe(metadata)
        attempt = metadata.job_id, metadata.attempt
        before = self._before[attempt] if is_copy_of is None else is_copy_of
        self._restore(before)
        self.checkpoints += 1
        self.finished_in_checkpoint += any(op.finished for op in metadata.operators)
        where = f"checkpoint {metadata.checkpoint_id}"
        operators = {op.uid: op for op in metadata.operators}
        emitted = yield from self._read_by_then(where, operators, metadata)
        if is_copy_of is not None:
            output = dict.fromkeys(is_copy_of.output)
        else:
            output = self.lineage.output(metadata.job_id)
            yield from self.lineage.check_id(metadata.job_id, metadata.checkpoint_id)
        output.update((item.decode(), None) for entry in metadata.committables for item in entry.items)
        found = Found(
            self._by_sink(output),
            self.inspection.rows_in_flight(self.storage, metadata),
            {
                uid: list(self.inspection.rows_held(self.storage, where, operator))
                for uid, operator in operators.items()
                if uid.startswith(("timer", "alarm", "table", "clocks", "sorted", "lookup"))
            },
        )
        self.in_flight += bool(found.in_flight)
        by_location = self.inspection.ids_by_location(found.in_flight)
        expected = expectation(self.shape, emitted, found.ids_held(), by_location)
        for uid in expected.overdrawn:
            yield f"{where}: {uid} holds rows that it has not got, or has handed on"
        yield from self._event_times.check(where, operators, metadata.vertices)
        yield from self._check_state(where, operators, expected)
        yield from self._check_output(where, output, expected)
        yield from self.inspection.check_on_the_way(where, found)
        yield from self._states.check_joins(where, expected, self._named(output), by_location)
        yield from self._states.check_duplicates(where, expected, self._named(output), by_location)
        yield from self.inspection.check_numbers(where, found, expected)
        for uid, (kind, _) in expected.windowed.items():
            if uid in operators:
                done = self._done.get(uid, frozenset())
                made, wrong = self.inspection.made_by_then(uid, found, expected, self.storage, operators[uid], done)
                yield from (f"{where}: {complaint}" for complaint in wrong)
                yield from self._check_windows(where, uid, kind, made)
        for uid in expected.totals.keys() & operators.keys():
            over = frozenset() if before is None else at_rest(operators[uid], metadata.vertices, before.operators)
            yield from self._check_total(where, operators[uid], expected, output, by_location, over)
        self._remember(metadata, expected, output)
        if is_copy_of is None:
            self._before[attempt] = self._last

    def _read_by_then(
        self, where: str, operators: Mapping[str, OperatorState], metadata: CheckpointMetadata
    ) -> Generator[str, None, dict[str, dict[int, int]]]:
        """Yield complaints, and return the rows that each source has emitted, by uid, in the form of `expectation`."""
        emitted: dict[str, dict[int, int]] = {}
        for uid in self._sources:
            ended = uid in operators and operators[uid].fully_finished
            # Once a source has ended, perhaps by a drain, later checkpoints do not record its position any more.
            before = self._ended.get(uid) if ended else None
            emitted[uid] = self._emitted(uid, metadata) if before is None else before
            if ended:
                self._ended[uid] = emitted[uid]
            else:
                self._ended.pop(uid, None)
            if ended and before is None and metadata.job_id not in self._outside.drained:
                rows = sum(self._sources[uid].rows)
                if len(emitted[uid]) < rows:
                    yield f"{where}: {uid} has ended at {len(emitted[uid])} of {rows} rows without a request to end"
        self._states.is_cut_short = metadata.job_id in self._outside.drained or any(
            len(read) < sum(self._sources[uid].rows) for uid, read in self._ended.items()
        )
        return emitted

    def _remember(self, metadata: CheckpointMetadata, expected: Expectation, output: Iterable[str]) -> None:
        """Record what later checkpoints are compared with."""
        for op in metadata.operators:
            if op.finished:
                gone = (key_group_range(index, op.parallelism, self._key_groups) for index in op.finished)
                self._done[op.uid] = self._done.get(op.uid, frozenset()).union(*gone)
            if op.fully_finished:
                if self._finished_at.setdefault(op.uid, op.parallelism) != op.parallelism:
                    self._finished_at[op.uid] = 0
        self._last = Cut(
            metadata.job_id,
            expected,
            tuple(output),
            metadata.operators,
            metadata.sources,
            dict(self._done),
            dict(self._finished_at),
            dict(self._ended),
            dict(self._sums),
            self._event_times.marks,
        )
        self._cuts[metadata.job_id, metadata.checkpoint_id] = self._last

    def continues(self, job_id: str, cut: Cut | None, after: After | None) -> list[str]:
        """Begin another start of the job from `cut` (None: from the beginning), and return complaints."""
        self._job_id = job_id
        self._last = self._begun_with = cut
        self._restore(cut)
        return list(self.lineage.begins(job_id, () if cut is None else cut.output, after))

    def attempt_begins(
        self, job_id: str, attempt: int, restored: CheckpointMetadata | None, unknown: Container[int]
    ) -> Iterator[str]:
        """Begin an attempt that is restored from this checkpoint (None: it starts at the beginning), and yield
        complaints if that is not the newest checkpoint of its job.

        `unknown`: checkpoints of which the coordinator cannot be sure that they exist.
        """
        self._before[job_id, attempt] = None if restored is None else self.cut_of(restored)
        number = 0 if restored is None else restored.checkpoint_id
        newer = [of for job, of in self._cuts if job == job_id and of > number and of not in unknown]
        if newer:
            yield f"attempt {attempt} of {job_id} resumes from checkpoint {number}, and {max(newer)} is complete"

    def has_begun(self, job_id: str, attempt: int) -> bool:
        return (job_id, attempt) in self._before

    def _restore(self, cut: Cut | None) -> None:
        """Reset everything that is recorded about operators and sources to the state of `cut`."""
        self._done = {} if cut is None else dict(cut.done)
        self._finished_at = {} if cut is None else dict(cut.finished_at)
        self._ended = {} if cut is None else dict(cut.ended)
        self._sums = {} if cut is None else dict(cut.sums)
        self._event_times.marks = {} if cut is None else cut.marks

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
        yield from self._states.check(where, operators, expected)

    def _check_owners(self, where: str, operator: OperatorState) -> Iterator[str]:
        """Yield a complaint for keyed state in a subtask that does not own its key groups."""
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
        """Return the rows before the source's position: the key by id."""
        source = self._sources[uid]
        rows = {f"{source.number}-{i}": count for i, count in enumerate(source.rows)}
        known = next((position for position in metadata.sources if position.uid == uid), None)
        if known is not None and not known.exhausted:
            done = int(known.position) if known.position else 0
            rows = {split: count if int(split.split("-")[1]) < done else 0 for split, count in rows.items()}
        seen: set[str] = set()
        for split in self._open_splits(uid, metadata):
            if split.id in seen:
                self._outside.world.bug(
                    f"checkpoint {metadata.checkpoint_id}: split {split.id} of {uid} is in it twice"
                )
            seen.add(split.id)
            rows[split.id] = split.offset
        return {row: key for name, count in rows.items() for row, key in source.rows_of(int(name.split("-")[1]), count)}

    def _open_splits(self, uid: str, metadata: CheckpointMetadata) -> list[Split]:
        """Return the splits that wait to be assigned and those that are being read."""
        waiting = (encoded for known in metadata.sources if known.uid == uid for encoded in known.pending)
        found = [_decode_split(encoded) for encoded in waiting]
        for operator in metadata.operators:
            if operator.uid == uid:
                for subtask in operator.subtasks:
                    for table in self.inspection.tables_of(self.storage, subtask, "splits"):
                        found += [_decode_split(encoded) for encoded in to_list(table.column("split"))]
        return found

    def _note_safe(self, metadata: CheckpointMetadata) -> None:
        """Record which positions may be reported to a source as complete, if it is a `NotifiedSource`."""
        for known in metadata.sources:
            source = self._sources[known.uid]
            if isinstance(source, NotifiedSource):
                splits = frozenset((split.id, split.offset) for split in self._open_splits(known.uid, metadata))
                self._outside.safe.setdefault(source.number, set()).add((known.position, splits))

    def _check_counts(
        self, where: str, operator: OperatorState, expected: Mapping[int, tuple[int, int]]
    ) -> Iterator[str]:
        found: dict[int, tuple[int, int]] = {}
        group_of = self.inspection.contents.group_of
        for subtask in operator.subtasks:
            for table in self.inspection.tables_of(self.storage, subtask, "keys", COUNTED, running.PARTS):
                counted = running.COLUMNS if running.COLUMNS[0] in table.column_names else ("count", "sum")
                columns = [table.column(name).to_pylist() for name in ("key", KEY_GROUP, *counted)]
                for key, group, count, total in zip(*columns, strict=True):
                    if key in found:
                        yield f"{where}: key {key} is in two subtasks of {operator.uid}"
                    if group != group_of.get(key):
                        yield f"{where}: key {key} of {operator.uid} is in key group {group}"
                    found[key] = (count, total)
        if found == expected:
            return
        done = self._done.get(operator.uid, frozenset())
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
            found = {
                row
                for table in self.inspection.tables_of(self.storage, subtask, "broadcast")
                for row in to_list(table.column("id"))
            }
            if found != expected:
                yield (
                    f"{where}: broadcast state of {operator.uid}/{index} lacks {some(sorted(expected - found))}, "
                    f"has {some(sorted(found - expected))} too many"
                )

    def _check_tally(self, where: str, operator: OperatorState, expected: Counter[int]) -> Iterator[str]:
        ids: Counter[int] = Counter()
        count = 0
        for subtask in operator.subtasks:
            for table in self.inspection.tables_of(self.storage, subtask, LIST):
                ids.update(to_list(table.column("id")))
            for table in self.inspection.tables_of(self.storage, subtask, UNION):
                count += sum(to_list(table.column("count")))
        if ids != expected:
            yield (
                f"{where}: the list of {operator.uid} lacks {some(sorted(expected - ids))}, "
                f"has {some(sorted(ids - expected))} too many"
            )
        if count != expected.total():
            yield f"{where}: {operator.uid} has counted {count} rows instead of {expected.total()}"

    def _check_output(self, where: str, output: Iterable[str], expected: Expectation) -> Iterator[str]:
        """Yield complaints about the sinks' output: what was committed before, and what the checkpoint holds to commit."""
        staged = []
        for name in output:
            if name not in self._outside.staged:
                yield f"{where}: {name} was never staged"
            else:
                staged.append(self._outside.staged[name])
                complaint = self.inspection.complaint_about(name)
                if complaint:
                    yield f"{where}: {staged[-1].sink} has {complaint}"
        yield from self._compare(where, expected.sinks, staged)

    def _check_windows(self, where: str, uid: str, kind: str, made: Made) -> Iterator[str]:
        verdict = self.inspection.check_windows(uid, kind, made)
        self.lost += verdict.lost
        self.doubled += verdict.doubled
        yield from (f"{where}: {uid} has rows {complaint}" for complaint in verdict.complaints)
        if verdict.dropped > (reported := self.reported_late(uid)):
            yield f"{where}: {uid} has dropped {verdict.dropped} late rows, and drivers have reported {reported}"

    def _by_sink(self, output: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in output:
            if name in self._outside.staged:
                found.setdefault(self._outside.staged[name].sink, []).append(name)
        return found

    def _check_total(
        self,
        where: str,
        operator: OperatorState,
        expected: Expectation,
        output: Iterable[str],
        by_location: Mapping[tuple[int, int, int], Counter[int]],
        over: Set[int],
    ) -> Iterator[str]:
        """Yield complaints about an operator that sums up: a finished subtask must emit nothing more, and all of them
        must have counted every row together.

        `over`: the subtasks that must not have run since the preceding checkpoint, see `at_rest`.
        """
        sink, node = expected.total_sinks[operator.uid]
        staged = (self._outside.staged[name] for name in output if name in self._outside.staged)
        sums = Counter(row for part in staged if part.sink == sink for row in part.ids)
        sums += by_location.get((node, 0, 0), Counter())
        before_of, before = self._sums.get(operator.uid, (operator, sums))
        again = {row: sums[row] for row in sums | before if before_of.fully_finished or decode_count(row)[0] in over}
        if again != {row: n for row, n in before.items() if row in again and n}:
            yield f"{where}: {operator.uid} had finished when it had emitted {dict(before)}, and has emitted {dict(sums)}"
        self._sums[operator.uid] = operator, sums
        if operator.fully_finished:
            yield from self._check_sum(where, operator.uid, expected, sums)

    def _check_sum(self, where: str, uid: str, expected: Expectation, sums: Counter[int]) -> Iterator[str]:
        counted = sum(n * decode_count(row)[1] for row, n in sums.items())
        if counted != expected.totals[uid].total():
            yield f"{where}: {uid} has counted {counted} rows instead of {expected.totals[uid].total()}"

    # ---- savepoints

    def cut_of(self, metadata: CheckpointMetadata) -> Cut | None:
        """Return the cut of the completed checkpoint with this metadata, which may be that of a savepoint made of it."""
        return self._cuts.get((metadata.job_id, metadata.checkpoint_id))

    def has_completed(self, job_id: str | None, checkpoint_id: int) -> bool:
        """Whether the start `job_id` has completed this checkpoint; None stands for any start."""
        return any(number == checkpoint_id and job_id in (None, job) for job, number in self._cuts)

    def committed(self) -> Set[str]:
        """Return the names of all committed output."""
        return self._outside.committed.keys()

    def is_late(self, data: bytes) -> bool:
        """Whether a later start has taken over the job's directory from the maker of a savepoint with this metadata.

        If it is written now, then its output may be rolled back, so it must not be reported.
        """
        metadata = decode_metadata(data, "a savepoint")
        with self._outside.world.inspecting():
            jobs = jobs_of(self.storage)
        return jobs.get(metadata.epoch) == metadata.job_id and max(jobs) > metadata.epoch

    def check_savepoint(self, url: str, directory: Storage, data: bytes) -> list[str]:
        """Return complaints about a savepoint whose metadata has just been written to `directory`, which must hold all of
        it.
        """
        is_late = self.is_late(data)
        before, self.storage = self.storage, directory
        with self._outside.world.inspecting():
            try:
                return list(self._check_savepoint(f"savepoint {url}", directory, decode_metadata(data, url), is_late))
            except StorageError as error:
                return [f"savepoint {url} cannot be read: {error}"]
            finally:
                self.storage = before

    def _check_savepoint(
        self, where: str, directory: Storage, metadata: CheckpointMetadata, is_late: bool
    ) -> Iterator[str]:
        cut = self.cut_of(metadata)
        if cut is None:
            yield f"{where}: checkpoint {metadata.checkpoint_id} was never completed"
            return
        missing = [name for name in cut.output if name not in self._outside.committed]
        if missing and not is_late:
            yield f"{where}: of what it covers this is not committed: {some(missing)}"
        if metadata.committables:
            yield f"{where}: holds output to commit, which a job that resumes from it would commit again"
        if metadata.channels:
            yield f"{where}: holds rows in flight, which only the same graph could read"
        lost = [file for file in metadata.files if not directory.exists(file)]
        if lost:
            yield f"{where}: refers to {some(lost)}, which it has not got"
            return
        if _unplaced(metadata.operators) != _unplaced(cut.operators) or metadata.sources != cut.sources:
            yield f"{where}: holds another state than the checkpoint that it was made of"
        verify_chunks(
            directory, [part for op in metadata.operators for task in op.subtasks for part in task.parts], where
        )

    def begin_again(self, storage: Storage, cut: Cut) -> None:
        """Begin another job from `cut`, in its own directory and with only the output of `cut`."""
        self.storage = storage
        self._outside.committed = dict.fromkeys(cut.output)
        self.lineage = Lineage(self._outside)

    def check_stopped_with(self, cut: Cut) -> Iterator[str]:
        """Yield complaints about a job that has stopped with a savepoint: its output must be that of the savepoint."""
        yield from self._compare("stop with a savepoint", cut.expected.sinks, self._committed())

    # ---- at the end

    def check_end(self) -> Iterator[str]:
        """Yield complaints about a job that has finished: its output must be that of all rows, or of those up to the
        point at which it was drained.
        """
        everything = {
            uid: {row: key for i, count in enumerate(source.rows) for row, key in source.rows_of(i, count)}
            for uid, source in self._sources.items()
        }
        expected = expectation(self.shape, {**everything, **self._ended})
        output = self.lineage.output(self._job_id)
        yield from self._check_output("end", output, expected)
        found = Found(self._by_sink(output))
        yield from self.inspection.check_numbers("end", found, expected)
        for uid, (kind, _) in expected.windowed.items():
            made = self.inspection.made_at_the_end(uid, found, expected)
            yield from self._check_windows("end", uid, kind, made)
        yield from self._states.check_joins("end", expected, self._committed(), {})
        yield from self._states.check_duplicates("end", expected, self._committed(), {})
        yield from self._states.check_lenient("end", expected, self._committed())
        for uid, (sink, _) in expected.total_sinks.items():
            sums = Counter(row for part in self._committed() if part.sink == sink for row in part.ids)
            if uid in self._sums and sums != self._sums[uid][1]:
                yield f"end: {uid} has emitted {dict(sums)}, and had finished when it had emitted {dict(self._sums[uid][1])}"
            yield from self._check_sum("end", uid, expected, sums)

    def check_stopped(self, unknown: Container[int]) -> Iterator[str]:
        """Yield complaints about a job that was stopped: its output must be that of its last checkpoint.

        `unknown`: checkpoints of which the coordinator cannot be sure that they exist. It commits none of their output,
        which is left to the start that finds them.
        """
        known = [of for job, of in self._cuts if job == self._job_id and of not in unknown]
        last = self._cuts[self._job_id, max(known)] if known else self._begun_with
        if last is not None:
            yield from self._compare("stop", last.expected.sinks, self._committed())
            yield from self._states.check_joins("stop", last.expected, self._committed(), None)
            committed, due = self.lineage.output(self._job_id), dict.fromkeys(last.output)
            if committed.keys() != due.keys():
                lacking, surplus = (
                    [name for name in a if name not in b] for a, b in ((due, committed), (committed, due))
                )
                yield f"stop: of its last checkpoint this is not committed: {some(lacking)}, and this is besides: {some(surplus)}"

    def _committed(self) -> list[Staged]:
        return self._named(self.lineage.output(self._job_id))

    def _named(self, names: Iterable[str]) -> list[Staged]:
        """Return the output that was staged under these names."""
        return [self._outside.staged[name] for name in names if name in self._outside.staged]

    def _compare(self, where: str, expected: Mapping[str, Counter[int]], staged: Sequence[Staged]) -> Iterator[str]:
        found: dict[str, Counter[int]] = {uid: Counter() for uid in expected}
        for part in staged:
            if part.sink not in found:
                continue
            found[part.sink].update(part.ids)
        for uid, ids in expected.items():
            if dict.__eq__(ids, found[uid]):  # much faster than Counter's own comparison
                continue
            lost, doubled = ids - found[uid], found[uid] - ids
            self.lost += lost.total()
            self.doubled += doubled.total()
            if lost:
                yield f"{where}: {uid} lost {lost.total()} rows: {some(sorted(lost))}"
            if doubled:
                yield f"{where}: {uid} has {doubled.total()} rows too many: {some(sorted(doubled))}"


def _unplaced(operators: Sequence[OperatorState]) -> tuple[OperatorState, ...]:
    """Return the operators without the places of their chunks, which differ in a savepoint since it has copies."""
    return tuple(
        msgspec.structs.replace(operator, subtasks=tuple(map(_unplaced_snapshot, operator.subtasks)))
        for operator in operators
    )


def _unplaced_snapshot(snapshot: OperatorSnapshot) -> OperatorSnapshot:
    replace = msgspec.structs.replace
    parts = (replace(part, chunks=tuple(map(_unplaced_chunk, part.chunks))) for part in snapshot.parts)
    return replace(snapshot, parts=tuple(parts))


def _unplaced_chunk(chunk: ChunkHandle) -> ChunkHandle:
    removed = tuple(map(_unplaced_chunk, chunk.removed))
    return msgspec.structs.replace(chunk, file="", offset=0, removed=removed)
