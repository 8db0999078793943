"""The rules for the states of process functions, pending timers and the sides of joins in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import pyarrow as pa

from midstream.engine.checkpoint.metadata import OperatorState
from midstream.engine.core.arrow_types import to_list
from midstream.engine.protocol.messages import OperatorSnapshot
from midstream.simulation.outside import Staged
from midstream_lab.jobs import clocks, states
from midstream_lab.jobs.counted import wrong_windows
from midstream_lab.jobs.joins import HOW, LEFT, RIGHT, Joined, wrong_results, wrong_sides
from midstream_lab.jobs.key_types import stored_keys
from midstream_lab.jobs.lateness import wrong_emissions
from midstream_lab.jobs.on_time import behind_timers, on_time_at
from midstream_lab.jobs.recorded_rows import SimSource
from midstream_lab.jobs.shapes import Shape
from midstream_lab.jobs.states import Contents, Given, collected, compared, entries, out_of_order
from midstream_lab.jobs.timely import wrong_duplicates
from midstream_lab.jobs.topologies import Expectation, expectation, uid_of

_SAMPLES = 5
Tables: TypeAlias = Callable[..., Iterator[pa.Table]]
"""Yields all tables of these parts, given a subtask's snapshot and the names of the parts."""
TIMED = ("timer", "alarm", "clocks")


class StateChecker:
    """Checks the states of all operators of a run. `tables`: reads the tables of state parts."""

    def __init__(self, shape: Shape, sources: Mapping[str, SimSource], tables: Tables) -> None:
        self._shape = shape
        self._sources = sources
        self._tables = tables
        self._never_late = never_late(shape, sources)
        """The operators that no row can reach late."""
        self._complete = self._all_joined()
        """The rows that each join that no row can reach late will have received at the end."""
        self.is_cut_short = False
        """Whether sources were drained before their end: then a join may have received all that it ever will."""
        self._waiting: set[str] = set()
        """The joins whose pairs were in flight to the sink in the newest checkpoint."""
        self._dropped: dict[str, set[Any]] = {}
        """The keys of each operator's subtasks that had finished in a checkpoint; a restore drops their state."""

    def _all_joined(self) -> Mapping[str, Joined]:
        if not any(HOW.keys() & {*node.chain} for node in self._shape):
            return {}
        joined = expectation(self._shape, every_row(self._sources)).joined
        return {uid: found for uid, found in joined.items() if uid in self._never_late}

    def _then(self, uid: str) -> Joined | None:
        """Return what a join will have received at the end; None if that is not known."""
        return None if self.is_cut_short else self._complete.get(uid)

    def check(self, where: str, operators: Mapping[str, OperatorState], expected: Expectation) -> Iterator[str]:
        """Yield complaints about the operators of a checkpoint or savepoint."""
        for uid, operator in operators.items():
            for complaint in self._check(uid, operator, expected):
                yield f"{where}: {complaint}"

    def _check(self, uid: str, operator: OperatorState, expected: Expectation) -> Iterator[str]:
        if uid in expected.given:
            yield from self._check_given(operator, expected.given[uid])
        elif uid in expected.joined:
            then = None if operator.finished else self._then(uid)
            left, right = (list(self._ids(operator, parts)) for parts in (LEFT, RIGHT))
            yield from wrong_sides(uid, expected.joined[uid], then, left, right)
        elif uid.startswith(TIMED):
            kind = next(kind for kind in TIMED if uid.startswith(kind))
            for index, subtask in enumerate(operator.subtasks):
                for complaint in clocks.wrong_timers(kind, self._by_part(subtask, clocks.PARTS)):
                    yield f"{uid}/{index}: {complaint}"

    def check_joins(
        self,
        where: str,
        expected: Expectation,
        staged: Sequence[Staged],
        in_flight: Mapping[tuple[int, int, int], Counter[int]] | None,
    ) -> Iterator[str]:
        """Yield complaints about the pairs that were emitted. `in_flight`: rows by place; None: as at the last call."""
        found: dict[str, Counter[tuple[int, int]]] = {uid: Counter() for uid in expected.joined}
        for part in staged:
            if part.sink in expected.join_sinks:
                found[expected.join_sinks[part.sink]].update((row, partner) for row, _, partner in _rows(part))
        if in_flight is not None:
            sinks = (uid_of(index, 0, "sink") for index, _, _ in in_flight)
            self._waiting = {expected.join_sinks[uid] for uid in sinks if uid in expected.join_sinks}
        for uid, pairs in found.items():
            is_exact = uid in self._never_late and uid not in self._waiting
            then, is_over = self._then(uid), where == "end"
            if is_over and is_exact:  # of a job that was drained, there are no more rows
                then = expected.joined[uid]
            for complaint in wrong_results(uid, expected.joined[uid], then, pairs, is_exact=is_exact, is_over=is_over):
                yield f"{where}: {complaint}"

    def check_duplicates(
        self,
        where: str,
        expected: Expectation,
        staged: Sequence[Staged],
        in_flight: Mapping[tuple[int, int, int], Counter[int]],
    ) -> Iterator[str]:
        """Yield complaints about the rows that operators which drop duplicates have emitted."""
        for uid, sifted in expected.sifted.items():
            found: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
            sinks = {sink: is_late for sink, (of, is_late) in expected.sifted_sinks.items() if of == uid}
            for part in staged:
                if part.sink in sinks:
                    found[sinks[part.sink]].update(part.ids)
            for (index, _, _), ids in in_flight.items():
                is_late = sinks.get(uid_of(index, 0, "sink"))
                if is_late is not None:
                    found[is_late].update(ids)
            for complaint in islice(wrong_duplicates(uid, sifted, found[False], found[True]), _SAMPLES):
                yield f"{where}: {complaint}"

    def check_lenient(self, where: str, expected: Expectation, staged: Sequence[Staged]) -> Iterator[str]:
        """Yield complaints about windows with allowed lateness at the end of a run."""
        for uid, (kind, got) in expected.lenient.items():
            sinks = {sink: is_late for sink, (of, is_late) in expected.lenient_sinks.items() if of == uid}
            emitted = [row for part in staged if sinks.get(part.sink) is False for row in _rows(part)]
            late = None
            if True in sinks.values():
                late = Counter(row for part in staged if sinks.get(part.sink) is True for row in part.ids)
            never = uid in self._never_late
            if kind == "counted":
                complaints = wrong_windows(uid, got, expected.keys, emitted)
            else:
                complaints = wrong_emissions(uid, kind, got, expected.keys, emitted, late, never_late=never)
            for complaint in islice(complaints, 5):
                yield f"{where}: {complaint}"

    def _check_given(self, operator: OperatorState, given: Given) -> Iterator[str]:  # noqa: PLR0912 - one arm for each kind of state
        found: Contents = {}
        is_wider = states.is_wider(operator.settings)
        for index, subtask in enumerate(operator.subtasks):
            tables = self._by_part(subtask, (*states.PARTS[given.kind], *states.RENAMED))
            tables = {states.RENAMED.get(part, part): table for part, table in tables.items()}
            if index in operator.finished:
                keys = (key for table in tables.values() for key in stored_keys(table.column("key")))
                self._dropped.setdefault(operator.uid, set()).update(keys)
            for part, table in tables.items():
                try:
                    contents = collected(part, entries(part, table, is_wider=is_wider))
                except TypeError as error:
                    yield f"{operator.uid}: {error}"
                    continue
                doubled = contents.keys() & found.keys()
                if doubled:
                    yield f"{operator.uid}: these are in two subtasks: {sorted(doubled)[:_SAMPLES]}"
                found |= contents
            if index in operator.running:
                yield from self._check_broadcast(f"{operator.uid}/{index}", subtask, given)
        contents = given.contents()
        yield from self._compare(operator.uid, contents, found, self._dropped.get(operator.uid, set()))
        for index in operator.running:
            for part, table in self._by_part(operator.subtasks[index], (states.MORE,)).items():
                for key, _, count in entries(part, table):
                    if count != len(contents["list:ids", key]):
                        yield f"{operator.uid}/{index}: {part} of {key!r} is {count}, and there were {contents['list:ids', key]}"
        if given.is_ordered:
            for (part, key), content in found.items():
                row = out_of_order(content)
                if row is not None:
                    yield f"{operator.uid}: {part} of key {key!r} has row {row} after a later one of its split"

    def _check_broadcast(self, who: str, subtask: OperatorSnapshot, given: Given) -> Iterator[str]:
        expected = given.broadcast_contents()
        if not expected and given.kind != "rules":
            return
        found: Contents = {}
        for part, table in self._by_part(subtask, states.BROADCAST_PARTS).items():
            found |= collected(part, entries(part, table))
        yield from self._compare(who, expected, found, set())

    def _compare(self, who: str, expected: Contents, found: Contents, dropped: set[Any]) -> Iterator[str]:
        found = {at: compared(content) for at, content in found.items()}
        if found == expected:
            return
        wrong = [
            f"{part} of {key!r} is {found.get((part, key))} instead of {expected.get((part, key))}"
            for part, key in sorted({*found, *expected}, key=repr)
            if found.get((part, key)) != expected.get((part, key)) and ((part, key) in found or key not in dropped)
        ]
        if wrong:
            yield f"{who}: " + "; ".join(wrong[:_SAMPLES]) + f" ({len(wrong)})"

    def _ids(self, operator: OperatorState, parts: Sequence[str]) -> Iterator[int]:
        for subtask in operator.subtasks:
            for table in self._tables(subtask, *parts):
                name = "id" if parts is LEFT else "id2"
                yield from to_list(table.column(name)) if name in table.schema.names else ()

    def _by_part(self, subtask: OperatorSnapshot, parts: Sequence[str]) -> dict[str, pa.Table]:
        found = {}
        names = [handle.name for handle in subtask.parts if handle.name in parts]
        for name in names:
            chunks = list(self._tables(subtask, name))
            if chunks:
                found[name] = pa.concat_tables(chunks)
        return found


def every_row(sources: Mapping[str, SimSource]) -> dict[str, dict[int, int]]:
    """Return, for each source, the key of all its rows by id."""
    return {
        uid: {row: key for split, count in enumerate(source.rows) for row, key in source.rows_of(split, count)}
        for uid, source in sources.items()
    }


def _rows(part: Staged) -> Iterator[tuple[int, int, int]]:
    """Yield the id, the key and the n of each row."""
    return zip(*(part.rows.column(name).to_pylist() for name in ("id", "key", "n")), strict=True)


def never_late(shape: Shape, sources: Mapping[str, SimSource]) -> frozenset[str]:
    """Return the operators that no row can reach late: the first operators of nodes where all sources are on time."""
    numbers = iter([source.number for source in sources.values()])
    come: list[frozenset[int]] = []
    """The numbers of the sources whose rows reach each node."""
    for node in shape:
        own = frozenset((next(numbers),)) if node.chain[0] == "source" else frozenset[int]()
        come.append(own.union(*(come[entry.node] for entry in node.inputs)))
    held_back, on_time = behind_timers(shape), on_time_at(shape, sources.values())
    return frozenset(
        uid_of(index, 0, node.chain[0])
        for index, node in enumerate(shape)
        if index not in held_back and on_time[index] == come[index]
    )
