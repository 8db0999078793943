"""Rows in flight in a checkpoint as frames, as if they were a state of the operator that they had not reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint.channel_state import channel_text, read_segment, rows_of
from midstream.engine.checkpoint.channel_state_references import each_once, segments_left
from midstream.engine.checkpoint.metadata import CheckpointMetadata, EdgeLayout
from midstream.engine.checkpoint.state_columns import name_of_part
from midstream.engine.core.batches import check_held_by_polars, to_polars
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ChannelState, Segment
from midstream.engine.state.state_upgrade import decoded_form

_KINDS: Final = ("in_flight", "in_flight_combined")
"""What the rows are called, by layout."""


@dataclass(frozen=True, slots=True)
class RowsInFlight:
    """What was on its way to an operator, in one layout of its edge: rows, or what they were combined to before."""

    uid: str
    """That of the operator which the rows had not reached."""
    operator: str
    name: str
    """in_flight, or in_flight_combined for rows that were combined; followed by `:UID`, the operator that had emitted
    them, if there are several.
    """
    edge: EdgeLayout
    layout: int
    channels: tuple[ChannelState, ...]
    max_parallelism: int

    @property
    def part(self) -> str:
        return self.name

    @property
    def rows(self) -> int:
        """At least as many rows as there are: segments that are consumed in part, or have both layouts, count whole."""
        return sum(segment.rows for segment in self._segments())

    @property
    def bytes(self) -> int:
        return sum(segment.length for segment in self._segments())

    def _segments(self) -> Iterator[Segment]:
        for channel in each_once(self.channels):
            yield from (segment for segment in segments_left(channel) if _may_have(segment, self.layout))

    def by_subtask(self) -> list[RowsInFlight]:
        """Return the rows apart for each subtask that was to process them."""
        found: dict[int, list[ChannelState]] = {}
        for channel in self.channels:
            found.setdefault(channel.consumer, []).append(channel)
        return [replace(self, channels=tuple(channels)) for channels in found.values()]

    def frames(self, storage: Storage, where: str) -> Iterator[pl.DataFrame]:
        """Yield the rows, one frame per subtask, which is read when it is requested.

        Raises StorageError for a file that is missing or damaged, SchemaError for a type that polars does not have.
        """
        layouts = self._layouts(where)
        for subtask in self.by_subtask():
            batches = [
                batch
                for channel in subtask.channels
                for batch in subtask._batches(storage, channel, layouts, f"{where}: {channel_text(channel)}")
            ]
            yield to_polars(pa.Table.from_batches(batches, layouts[self.layout]))

    def empty_frame(self, _: Storage, where: str) -> pl.DataFrame:
        """Return a frame with the columns and without rows. Raises as `frames` does."""
        return to_polars(self._layouts(where)[self.layout].empty_table())

    def _layouts(self, where: str) -> list[pa.Schema]:
        where = f"{where}: {self.name!r} of operator {self.uid!r}"
        layouts, keys = [decoded_form(layout, where) for layout in self.edge.layouts], self.edge.keys
        has_keys = keys or all(channel.key_groups is None for channel in self.channels)
        for layout in layouts:
            names = set(layout.names)
            if not has_keys or not names.issuperset(keys) or len(names) < len(layout):
                raise StorageError(
                    f"{where}: the columns {layout.names} with the keys {list(keys)} cannot be read: it is damaged, or "
                    "midstream has not written it"
                )
        check_held_by_polars(layouts[self.layout], where)
        return layouts

    def _batches(
        self, storage: Storage, channel: ChannelState, layouts: list[pa.Schema], where: str
    ) -> Iterator[pa.RecordBatch]:
        first = 0
        for segment in channel.segments:
            consumed = min(max(channel.skip - first, 0), segment.batches)
            if consumed < segment.batches and _may_have(segment, self.layout):
                batches = read_segment(storage, segment, layouts, where)[consumed:]
                kept = rows_of(batches, self.edge.keys, layouts, channel, first + consumed, self.max_parallelism)
                yield from (batch for batch in kept if batch.schema.equals(layouts[self.layout]))
            first += segment.batches


def _may_have(segment: Segment, layout: int) -> bool:
    return segment.combined > 0 if layout else segment.combined < segment.batches


def rows_in_flight(metadata: CheckpointMetadata) -> list[RowsInFlight]:
    """Return the rows in flight of a checkpoint, by edge and layout, in the order of the job's edges.

    Those of early versions are left out, which did not record the columns of an edge.
    """
    channels: dict[int, list[ChannelState]] = {}
    for channel in metadata.channels:
        channels.setdefault(channel.edge, []).append(channel)
    names = {operator.uid: operator.name for operator in metadata.operators}
    inputs = Counter(edge.target for edge in metadata.edges)
    found: list[RowsInFlight] = []
    taken = {
        (operator.uid, name_of_part(part))
        for operator in metadata.operators
        for part in (*dict(operator.forms), *(part.name for subtask in operator.subtasks for part in subtask.parts))
    }
    """Also those of state that has no entries: a name does not depend on that."""
    for edge in metadata.edges:
        uid = metadata.vertices[edge.target].uids[0]
        producer = "" if inputs[edge.target] == 1 else f":{metadata.vertices[edge.source].uids[-1]}"
        for layout, (kind, _) in enumerate(zip(_KINDS, edge.layouts, strict=False)):
            name = kind + producer
            while (uid, name) in taken:  # it has a state of this name, or several inputs from one operator
                name += "_"
            taken.add((uid, name))
            rows = RowsInFlight(
                uid, names.get(uid, uid), name, edge, layout, tuple(channels.get(edge.id, ())), metadata.max_parallelism
            )
            if next(rows._segments(), None) is not None:
                found.append(rows)
    return found
