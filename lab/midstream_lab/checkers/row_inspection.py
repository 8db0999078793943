"""Examines the rows themselves, wherever they are: at the sinks, in flight, held back, in the state of windows."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.engine.checkpoint.channel_state import read_segment, rows_of
from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState
from midstream.engine.checkpoint.state_files import read_parts
from midstream.engine.checkpoint.stored_in_flight import rows_in_flight
from midstream.engine.core.arrow_types import is_struct_array, to_list
from midstream.engine.core.batches import concat, empty_batch
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.key_groups import key_group_range, key_groups
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.operators.windows.window_combiner import ROWS
from midstream.engine.operators.windows.window_operator import PARTS, PROGRESS
from midstream.engine.protocol.messages import OperatorSnapshot
from midstream.engine.state.state_parts import KEY_GROUP
from midstream_lab.checkers.content_checker import (
    MAKING,
    Contents,
    Way,
    check_made,
    check_numbers,
    codes,
    column,
    some,
    ways,
)
from midstream_lab.checkers.window_checker import Made, Spans, WindowVerdict, check_windows, held_in, no_marks, unpacked
from midstream_lab.jobs.key_types import PLAIN, KeyLayout, as_plain, stored_keys
from midstream_lab.jobs.lateness import LENIENT, uncombined
from midstream_lab.jobs.lookups import CALLED
from midstream_lab.jobs.on_time import behind_timers, on_time_at
from midstream_lab.jobs.recorded_rows import SCHEMA, Int64s, Outside, SimSource
from midstream_lab.jobs.shapes import Input, Shape
from midstream_lab.jobs.state_contents import newest
from midstream_lab.jobs.tables import HELD
from midstream_lab.jobs.timed import DELAY_US, WAITING, WINDOWS
from midstream_lab.jobs.timely import SORTING
from midstream_lab.jobs.topologies import Expectation, combiner_of, key_layout_of, uid_of
from midstream_lab.scenarios.changed_programs import RowLocation, RowLocations

_NOTHING: Final[Int64s] = np.empty(0, np.int64)
_NO_ROWS: Final = empty_batch(SCHEMA)


@dataclass(slots=True)
class Found:
    """The places of all rows at one moment."""

    output: Mapping[str, Sequence[str]]
    """The names of each sink's staged output, committed or still to be committed."""
    in_flight: Mapping[RowLocation, pa.RecordBatch] = field(default_factory=dict)
    held: Mapping[str, Sequence[pa.RecordBatch]] = field(default_factory=dict)
    """The rows in each operator that holds rows back."""

    def ids_held(self) -> dict[str, Counter[int]]:
        return {
            uid: Counter(row for rows in batches for row in to_list(rows.column("id")))
            for uid, batches in self.held.items()
        }


class RowInspection:
    """Examines the rows of one run. `sources` are by uid, in the order of the shape."""

    def __init__(self, shape: Shape, sources: Mapping[str, SimSource], outside: Outside, key_groups: int) -> None:
        self.contents = Contents(sources.values(), key_groups)
        self._shape = shape
        self._outside = outside
        self._key_groups = key_groups
        self._locations = RowLocations(shape)
        self._ways = ways(shape)
        self._combiners = [combiner_of(shape, index) for index in range(len(shape))]
        self._sinks = {
            uid_of(index, position, kind): index
            for index, node in enumerate(shape)
            for position, kind in enumerate(node.chain)
            if kind == "sink"
        }
        self._on_time = on_time_at(shape, sources.values())
        self._held_back = behind_timers(shape)
        self._seen: dict[str, Spans | Int64s] = {}
        """The output that has been examined, by name: rows in windows, or keys and numbers of rows."""

    # ---- reading a checkpoint

    def tables_of(self, storage: Storage, subtask: OperatorSnapshot, *parts: str) -> Iterator[pa.Table]:
        """Yield the tables of some parts of a subtask's state. Rows in a wrong key group are reported as a bug."""
        handles = [handle for handle in subtask.parts if handle.name in parts]
        for name, state in read_parts(storage, handles, range(1 << 16), "checker").items():
            for table in newest(name, [chunk.table for chunk in state.chunks]):
                self._check_key_groups(name, table)
                yield table

    def _check_key_groups(self, part: str, table: pa.Table) -> None:
        if not {KEY_GROUP, "key"} <= set(table.column_names):
            return
        key = table.column("key").combine_chunks()
        # an operator that is keyed by two columns has both, in a table or as a struct
        if is_struct_array(key):
            columns = [key.field(i) for i in range(key.type.num_fields)]
        else:
            columns = [table.column(name).combine_chunks() for name in ("key", "half") if name in table.column_names]
        names = [str(index) for index in range(len(columns))]
        groups = key_groups(pa.RecordBatch.from_arrays(columns, names), tuple(names), self._key_groups)
        wrong = groups != table.column(KEY_GROUP).to_numpy()
        if wrong.any():
            keys = to_list(key.filter(pa.array(wrong)))
            self._outside.world.bug(f"{part} has rows of the keys {some(keys)} in key groups that are not theirs")

    def rows_in_flight(self, storage: Storage, metadata: CheckpointMetadata) -> dict[RowLocation, pa.RecordBatch]:
        """Return the rows in flight by place, since an edge may be restored as another one with the same ends."""
        found: dict[RowLocation, list[pa.RecordBatch]] = {}
        locations = self._locations.of(metadata) if metadata.channels else {}
        read: defaultdict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
        for state in metadata.channels:
            location, old = locations[state.edge], metadata.edges[state.edge]
            layout = key_layout_of(self._shape, location.entry)
            combiner = self._combiners[location.node]
            of = state.edge, old.source, old.target, Partitioning(old.partitioning)
            edge = Edge(*of, layout.schema, old.keys, combiner=combiner)
            batches = [b for segment in state.segments for b in read_segment(storage, segment, edge.layouts, "checker")]
            skip = state.skip
            rows = rows_of(batches[skip:], edge.keys, edge.layouts, state, skip, self._key_groups)
            for batch in rows:
                if batch.num_rows:
                    is_combined = edge.layout_of(batch) > 0
                    by_name = batch.column(ROWS if is_combined else "id")
                    read[state.edge, is_combined].update(to_list(by_name))
                    plain = self._uncombined(batch, location.node) if is_combined else self._plain(batch, layout)
                    found.setdefault(location, []).append(plain)
        self._check_tables(storage, metadata, read)
        return {location: concat(batches) for location, batches in found.items() if batches}

    def _check_tables(
        self, storage: Storage, metadata: CheckpointMetadata, expected: Mapping[tuple[int, bool], Counter[int]]
    ) -> None:
        """Check that users who read the checkpoint see these rows in flight. `expected`: ids, or numbers of rows, by edge
        and whether they are combined.
        """
        found: defaultdict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
        for state in rows_in_flight(metadata):
            is_combined = state.layout > 0
            frames = [frame for frame in state.frames(storage, "checker") if frame.height]
            for frame in frames:
                found[state.edge.id, is_combined].update(frame[ROWS if is_combined else "id"].to_list())
            if sum(frame.height for frame in frames) > state.rows:
                self._outside.world.bug(f"{state.name} to {state.uid} has more rows than are announced, {state.rows}")
        if found != expected:
            self._outside.world.bug(f"rows in flight are read as {dict(found)}, and are {dict(expected)}")

    def _plain(self, rows: pa.RecordBatch, layout: KeyLayout) -> pa.RecordBatch:
        """Convert rows of a form to rows of SCHEMA. If their keys have changed, report a bug and return no rows."""
        plain = as_plain(rows, layout)
        if plain is None:
            self._outside.world.bug(f"rows {some(rows.column('id').to_pylist())} have other keys than they had")
            return _NO_ROWS
        return plain

    def _uncombined(self, batch: pa.RecordBatch, node: int) -> pa.RecordBatch:
        """Return the rows that a combined batch stands for. If it has other contents than these, report a bug."""
        kind = self._shape[node].chain[0]
        ids, wrong = uncombined(batch, LENIENT.get(kind, kind))
        positions, known = self.contents.positions(np.array(ids, np.int64))
        rows = self.contents.rows.take(pa.array(positions[known], pa.int64()))
        counts = batch.column(ROWS).to_numpy()
        if not known.all():
            wrong = "rows which there are not"
        elif not wrong and not np.array_equal(column(rows, "key"), np.repeat(column(batch, "key"), counts)):
            wrong = "rows under another key"
        if wrong:
            self._outside.world.bug(f"a combined batch in flight to {kind}{node} has {wrong}")
        return rows

    def ids_by_location(
        self, in_flight: Mapping[RowLocation, pa.RecordBatch]
    ) -> dict[tuple[int, int, int], Counter[int]]:
        """Return the ids of rows in flight, by the node, port and position of the operator that they reach next."""
        found: dict[tuple[int, int, int], Counter[int]] = {}
        for location, rows in in_flight.items():
            at = location.node, location.entry.port, location.position
            found.setdefault(at, Counter()).update(to_list(rows.column("id")))
        return found

    def rows_held(self, storage: Storage, where: str, operator: OperatorState) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are held in an operator."""
        layout = key_layout_of(self._shape, self._shape[self._node_of(operator.uid)].inputs[0])
        for subtask in operator.subtasks:
            for table in self.tables_of(storage, subtask, f"map:{WAITING}"):
                rows = []
                keys = stored_keys(table.column("key"))
                for key, value in zip(keys, to_list(table.column("value")), strict=True):
                    waiting = pickle.loads(value)
                    if any(
                        layout.stored_key(row["id"], row["key" if layout is PLAIN else "was"]) != key for row in waiting
                    ):
                        self._outside.world.bug(f"{where}: {operator.uid} holds {some(waiting)} under key {key}")
                    rows += waiting
                yield self._plain(pa.RecordBatch.from_pylist(rows, schema=layout.schema), layout)
            for table in self.tables_of(storage, subtask, HELD, SORTING):
                yield from table.select(SCHEMA.names).to_batches()
            for table in self.tables_of(storage, subtask, CALLED):
                for chunk in table.column("row").chunks:
                    assert is_struct_array(chunk)
                    yield pa.RecordBatch.from_struct_array(chunk)

    # ---- contents

    def complaint_about(self, name: str) -> str:
        """Describe what is wrong with the contents of a sink's staged output; "" if nothing is, or if it was examined
        before.
        """
        if name in self._seen:
            return ""
        staged = self._outside.staged[name]
        node = self._sinks[staged.sink]
        makers = [kind for entry in self._shape[node].inputs for kind in self._made_by(entry)]
        self._seen[name] = _NOTHING
        if not makers:
            way = self._ways[node]
            if way.whole is not None:
                self._seen[name] = codes(staged.rows)
            return self.contents.check(staged.rows, self._counted(way))
        if makers[0] == "total":
            return check_made(staged.rows)
        if makers[0] in WINDOWS:
            self._seen[name], complaint = unpacked(staged.rows, self.contents)
            return complaint
        return ""

    def _made_by(self, entry: Input) -> list[str]:
        """Return the kinds of operators that make the rows of an input; none if they are rows of the sources."""
        return [kind for kind in self._shape[entry.node].chain if kind in MAKING and entry.tag is None]

    def _counted(self, way: Way) -> list[Set[int] | None]:
        counted = self._outside.counted
        return [None if uid is None else counted.get(uid, frozenset()) for uid in sorted(way.counted, key=str)]

    def check_on_the_way(self, where: str, found: Found) -> Iterator[str]:
        """Yield complaints about the contents of rows in flight, and of rows held in operators."""
        for location, rows in found.in_flight.items():
            makers = self._made_by(location.entry)
            if not makers:
                complaint = self.contents.check(rows, self._counted(self._ways[location.entry.node]))
            elif makers[0] == "total":
                complaint = check_made(rows)
            else:
                complaint = unpacked(rows, self.contents)[1] if makers[0] in WINDOWS else ""
            if complaint:
                yield f"{where}: in flight to {self._shape[location.node].chain[0]}{location.node} there is {complaint}"
        for index, node in enumerate(self._shape):
            for rows in found.held.get(uid_of(index, 0, node.chain[0]), ()):
                complaint = self.contents.check(rows, self._counted(self._ways[index]))
                if complaint:
                    yield f"{where}: {node.chain[0]}{index} holds {complaint}"

    def check_numbers(self, where: str, found: Found, expected: Expectation) -> Iterator[str]:
        """Yield complaints unless each number of a counting operator exists once, if its rows have only one path."""
        for sink, node in self._sinks.items():
            way = self._ways[node]
            if way.whole is None:
                continue
            rows = [seen for name in found.output.get(sink, ()) if isinstance(seen := self._seen[name], np.ndarray)]
            rows += [codes(batch) for location, batch in found.in_flight.items() if location.node in way.nodes]
            for index in way.nodes:
                rows += map(codes, found.held.get(uid_of(index, 0, self._shape[index].chain[0]), ()))
            complaint = check_numbers(rows, expected.counts[way.whole])
            if complaint:
                yield f"{where}: what {way.whole} has counted is at {sink} and on the way there with {complaint}"

    # ---- windows

    def made_at_the_end(self, uid: str, found: Found, expected: Expectation) -> Made:
        """Return everything that exists of a window operator's rows once its input has ended."""
        return self._made(uid, found, expected, no_marks(self._key_groups, all_fired=True))

    def made_by_then(
        self, uid: str, found: Found, expected: Expectation, storage: Storage, operator: OperatorState, done: Set[int]
    ) -> tuple[Made, list[str]]:
        """Return everything that exists of a window operator's rows in a checkpoint, and complaints about its state.

        `done`: the key groups that receive no more rows.
        """
        made = self._made(uid, found, expected, no_marks(self._key_groups))
        held: list[Spans] = []
        complaints: list[str] = []
        for index in operator.running:
            for table in self.tables_of(storage, operator.subtasks[index], PROGRESS):
                made.marks_us[table.column(KEY_GROUP).to_numpy()] = table.column("watermark").to_numpy()
            for table in self.tables_of(storage, operator.subtasks[index], PARTS):
                spans, complaint = held_in(table, self.contents)
                held.append(spans)
                if complaint:
                    complaints.append(f"{uid}/{index} has {complaint}")
        made.held = Spans.joined(held)
        ended = (key_group_range(index, operator.parallelism, self._key_groups) for index in operator.finished)
        made.marks_us[sorted(set(done).union(*ended))] = MAX_WATERMARK_US
        return made, complaints

    def _made(self, uid: str, found: Found, expected: Expectation, marks_us: Int64s) -> Made:
        emitted: list[Spans] = []
        late: list[Int64s] = []
        for sink, (maker, is_late) in expected.window_sinks.items():
            for name in found.output.get(sink, ()) if maker == uid else ():
                if is_late:
                    late.append(self._outside.staged[name].rows.column("id").to_numpy())
                elif isinstance(seen := self._seen[name], Spans):
                    emitted.append(seen)
        node = self._node_of(uid)
        for location, rows in found.in_flight.items():
            if location.entry.node == node and location.entry.tag is not None:
                late.append(rows.column("id").to_numpy())
            elif location.entry.node == node:
                emitted.append(unpacked(rows, self.contents)[0])
        all_late = np.concatenate(late) if late else _NOTHING
        is_read = any(is_late for maker, is_late in expected.window_sinks.values() if maker == uid)
        made = expected.windowed[uid][1]
        return Made(made, Spans.joined(emitted), all_late if is_read else None, marks_us=marks_us)

    def check_windows(self, uid: str, kind: str, made: Made) -> WindowVerdict:
        node = self._node_of(uid)
        on_time = self.contents.are_of(self._on_time[node])
        return check_windows(self.contents, kind, made, on_time, DELAY_US if node in self._held_back else 0)

    def _node_of(self, uid: str) -> int:
        return next(
            index
            for index, node in enumerate(self._shape)
            if any(uid_of(index, position, kind) == uid for position, kind in enumerate(node.chain))
        )
