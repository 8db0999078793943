"""Any PySpark Python Data Source as an exactly-once source, through its batch reader or its stream reader.

The driver plans: it requests offsets and partitions, and makes a planned range durable before any of it is read, since
`latestOffset` may return a different result each time. The partitions are the splits; a split's offset counts the rows
emitted, and a restored partition is read again without those.

    <checkpoint storage>/plans/<uid>/<lineage>-<n>     range n of the job and of all restored from it

Partitions are objects of the user's own classes; they are stored pickled, as in Spark.
"""

from __future__ import annotations

import inspect
import json
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeGuard

import msgspec
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.types import StructType

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.interfaces import Storage
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
    rows_text,
)
from midstream.engine.state.safe_pickle import OwnCode, Pickles
from midstream.spark.datasource_rows import arrow_schema, make_data_source, struct_of
from midstream.spark.datasource_tuples import batches_of

_FIRST: Final = b"all"


class PartitionSplit(msgspec.Struct, frozen=True, array_like=True):
    partition: bytes
    """The pickled partition."""
    range: int = 0
    start: str = ""
    """The offset, as JSON, at which the range begins."""


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A plan: the rows from `start` to `end`, both JSON."""

    start: str
    end: str
    partitions: tuple[bytes, ...]


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    lineage: str
    ranges: int
    """The number of ranges that have been planned."""
    end: str


class _PartitionReader(Protocol):
    def read(self, partition: Any) -> Iterable[Any]: ...


def _pickled(partitions: Iterable[InputPartition], own: OwnCode, where: str) -> tuple[bytes, ...]:
    pickles = Pickles(own)
    return tuple(pickles.dumps(each, f"{where}: a partition") for each in partitions)


class _DataSourceSource(Source):
    """The base of both kinds: a data source, its schema, and reading a partition."""

    def __init__(
        self,
        data_source: type[DataSource] | DataSource,
        options: Mapping[str, str] | None,
        schema: StructType | str | None,
        rows_per_s: float | None,
    ) -> None:
        self._data_source = make_data_source(data_source, options)
        self._where = f"data source {self._data_source.name()!r}"
        check_rate(rows_per_s, self._where)
        self.rows_per_s = rows_per_s
        self._struct = struct_of(self._data_source, schema)
        self.schema = canonical_schema(arrow_schema(self._struct, self._where))

    def _has(self, method: str) -> bool:
        return getattr(type(self._data_source), method) is not getattr(DataSource, method)

    @abstractmethod
    def _partition_reader(self) -> _PartitionReader: ...

    def open_split(self, split: Split) -> SplitReader:
        part = decoded(split.payload, PartitionSplit, self._where)
        rows = self._partition_reader().read(Pickles(self.own).loads(part.partition, f"{self._where}: a partition"))
        if not hasattr(rows, "__iter__"):
            raise JobError(f"{self._where}: read() returned {type(rows).__name__}; it must return an iterator")
        where = f"{self._where}, partition {split.id}"
        batches = batches_of(rows, self._struct, self.schema, where)
        return BatchCursor(batches, where=where, offset_rows=split.offset, skip_rows=split.offset)

    def place(self, split: Split, first: int, last: int) -> str:
        rows = rows_text(split.offset + first, split.offset + last)
        return f"{self._where}, partition {split.id}, {rows}, counted from 0"


class DataSourceBatchSource(_DataSourceSource):
    """The partitions of `data_source.reader(schema)`, read once to the end.

    `data_source`: a subclass of DataSource, instantiated with `options`, or an instance. `schema`: a StructType or DDL
    string, by default the result of its `schema()`. `read(partition)` must return the same rows in the same order when
    it is called again. Raises ConfigError if there is no batch reader.
    """

    def __init__(
        self,
        data_source: type[DataSource] | DataSource,
        *,
        options: Mapping[str, str] | None = None,
        schema: StructType | str | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        super().__init__(data_source, options, schema, rows_per_s)
        if not self._has("reader"):
            raise ConfigError(f"{self._where}: has no reader(); it can only be read as a stream, if at all")

    def _partition_reader(self) -> _PartitionReader:
        reader: _PartitionReader = self._data_source.reader(self._struct)
        return reader

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if position is not None:
            return Discovery((), position, exhausted=True)
        try:
            partitions = list(self._data_source.reader(self._struct).partitions())
        except NotImplementedError:  # what the default does, and how Spark recognises a reader of one partition
            partitions = []
        pickled = _pickled(partitions or [InputPartition(None)], self.own, self._where)
        splits = tuple(
            Split(f"{at:06d}", msgspec.msgpack.encode(PartitionSplit(each))) for at, each in enumerate(pickled)
        )
        return Discovery(splits, _FIRST, exhausted=True)


class DataSourceStreamSource(_DataSourceSource):
    """The offset ranges of `data_source.streamReader(schema)` (or `simpleStreamReader`), without end.

    `interval`: how often the latest offset is requested. Other arguments as for the batch source. `commit(end)` is
    called once a completed checkpoint holds every row before `end`. Raises ConfigError if there is no stream reader.
    """

    bounded, splits_end = False, True

    def __init__(
        self,
        data_source: type[DataSource] | DataSource,
        *,
        options: Mapping[str, str] | None = None,
        schema: StructType | str | None = None,
        interval: Duration = "1 s",
        rows_per_s: float | None = None,
    ) -> None:
        super().__init__(data_source, options, schema, rows_per_s)
        if not (self._has("streamReader") or self._has("simpleStreamReader")):
            raise ConfigError(f"{self._where}: has neither streamReader() nor simpleStreamReader(); read it as a batch")
        self.discovery_interval_s = interval_s(interval, "interval")
        self._planner: _Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def _stream_reader(self) -> Any:
        try:
            return self._data_source.streamReader(self._struct)
        except PySparkNotImplementedError:  # likewise: a source without the one has the other
            return _SimpleReader(self._data_source.simpleStreamReader(self._struct), self._where)

    def _partition_reader(self) -> _PartitionReader:
        reader: _PartitionReader = self._stream_reader()
        return reader

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if self._planner is None:
            self._planner = _Planner(self._stream_reader(), self.own, self._where)
        return self._planner.discover(position, context)

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        if self._planner is not None and position is not None and unfinished is not None:
            self._planner.settle(decoded(position, StreamPosition, self._where), unfinished)

    def close(self) -> None:
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.reader.stop()


class _Planner:
    """The driver's side of a stream: one reader for as long as the job runs."""

    def __init__(self, reader: Any, own: OwnCode, where: str) -> None:
        self.reader = reader
        self._own = own
        self._where = where
        self._first: StreamPosition | None = None
        """Where this job began; it begins there again if it fails before its first checkpoint."""
        self._plans: Storage | None = None
        self._folder = ""
        self._committed_ranges = 0

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        self._plans, self._folder = context.storage, f"plans/{context.uid}"
        if position is not None:
            before = decoded(position, StreamPosition, self._where)
        else:
            if self._first is None:
                self._first = StreamPosition(secrets.token_hex(8), 0, self._json(self.reader.initialOffset()))
            before = self._first
        planned = self._known(before) or self._plan(before)
        if planned is None:
            return Discovery((), msgspec.msgpack.encode(before), exhausted=False)
        splits = tuple(
            Split(
                f"{before.ranges:08d}:{at:06d}",
                msgspec.msgpack.encode(PartitionSplit(each, before.ranges, planned.start)),
            )
            for at, each in enumerate(planned.partitions)
        )
        after = StreamPosition(before.lineage, before.ranges + 1, planned.end)
        return Discovery(splits, msgspec.msgpack.encode(after), exhausted=False)

    def _path(self, position: StreamPosition) -> str:
        return f"{self._folder}/{position.lineage}-{position.ranges:08d}"

    def _known(self, position: StreamPosition) -> Range | None:
        """Return the range after `position` as it was planned before a failure."""
        if self._plans is None or not self._plans.exists(self._path(position)):
            return None
        return msgspec.msgpack.decode(self._plans.read(self._path(position)), type=Range)

    def _plan(self, position: StreamPosition) -> Range | None:
        start = json.loads(position.end)
        end = self._latest_offset(start)
        if end is None or self._json(end) == position.end:
            return None
        if _is_before(end, start):
            raise JobError(
                f"{self._where}: latestOffset() returned {self._json(end)} after {position.end}, which is a step "
                "back: rows would be read twice. It must never go back; if the source was reset, give it a new uid in "
                "a new job"
            )
        pickled = _pickled(self.reader.partitions(start, end), self._own, self._where)
        planned = Range(position.end, self._json(end), pickled)
        if self._plans is not None and not self._plans.create(self._path(position), msgspec.msgpack.encode(planned)):
            return self._known(position)
        return planned

    def _latest_offset(self, start: dict[str, Any]) -> dict[str, Any] | None:
        ask = self.reader.latestOffset
        if not inspect.signature(ask).parameters:  # before Spark 4.2
            end = ask()
        else:
            end = ask(start, self.reader.getDefaultReadLimit())
        if end is not None and not isinstance(end, dict):
            raise JobError(f"{self._where}: latestOffset() returned {type(end).__name__}; an offset is a dict")
        return end

    def _json(self, offset: Any) -> str:
        try:
            return json.dumps(offset, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise JobError(f"{self._where}: the offset {offset!r} has no JSON form: {error}") from error

    def settle(self, position: StreamPosition, unfinished: Sequence[Split]) -> None:
        """Commit up to the first range that is not fully read; drop the plans that no restore will need."""
        ranges, end = position.ranges, position.end
        for split in unfinished:
            part = decoded(split.payload, PartitionSplit, self._where)
            if part.range < ranges:
                ranges, end = part.range, part.start
        if ranges > self._committed_ranges:
            self.reader.commit(json.loads(end))
            self._committed_ranges = ranges
        if self._plans is not None:
            for name in self._plans.list(self._folder):
                lineage, _, number = name.rpartition("-")
                if lineage == position.lineage and int(number) < position.ranges:
                    self._plans.delete(f"{self._folder}/{name}")


class _SimpleReader:
    """Adapts a SimpleDataSourceStreamReader to a stream reader: a range is one partition, read again by its offsets."""

    def __init__(self, reader: Any, where: str) -> None:
        self._reader = reader
        self._where = where
        self.initialOffset = reader.initialOffset
        self.commit = reader.commit

    def latestOffset(self, start: dict[str, Any], limit: object) -> Any:
        rows, end = self._reader.read(start)
        if end == start:
            for _ in rows:
                raise JobError(f"{self._where}: read({start}) returned rows, but an end offset equal to its start")
        return end

    def getDefaultReadLimit(self) -> None:
        return None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(start, end)]

    def read(self, partition: tuple[dict[str, Any], dict[str, Any]]) -> Iterable[Any]:
        rows: Iterable[Any] = self._reader.readBetweenOffsets(*partition)
        return rows

    def stop(self) -> None: ...


def _is_before(end: dict[str, Any], start: dict[str, Any]) -> bool:
    """Whether numbers have become smaller, none larger, and nothing else has changed: what the offset counts goes back.

    An offset with strings in it has a meaning only for its source.
    """
    changes = list(_changes(end, start))
    return bool(changes) and all(changes)


def _changes(end: object, start: object) -> Iterator[bool]:
    """Yield, for each changed part of an offset, whether it is a number that has become smaller."""
    if isinstance(end, dict) and isinstance(start, dict) and end.keys() == start.keys():
        for name in end:
            yield from _changes(end[name], start[name])
    elif end != start:
        yield _is_number(end) and _is_number(start) and end < start


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
