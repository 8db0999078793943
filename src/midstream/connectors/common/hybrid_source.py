"""Sources that are read one after the other, as one: a table or files up to now, then a topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
)
from midstream.engine.state.safe_pickle import OwnCode


class _HybridSplit(msgspec.Struct, frozen=True, array_like=True):
    source: int
    split_id: str
    payload: bytes


class _HybridPosition(msgspec.Struct, frozen=True, array_like=True):
    source: int
    position: bytes | None


class HybridSource(Source):
    """Reads sources one after the other, as one stream with one event time.

    The next source begins when the splits of the one before have all been assigned; which one is read, and where, is in
    every checkpoint. What both have is read twice: let the next one begin where the one before ends, for example a
    topic at the time of the table's newest row. A start of "latest" is when it begins, so what comes before is missed.

    `sources`: two or more with the same columns; all but the last must end.
    `rows_per_s`: a limit for all subtasks together, in rows per second; None for none. The sources have none of their
    own.

    Raises ConfigError for other sources, SchemaError if their columns differ.

        history = FileSource("s3://lake/clicks", schema=clicks)
        live = KafkaSource("kafka-1:9092", "clicks", schema=clicks, start=datetime(2024, 5, 1, tzinfo=UTC))
        env.source(HybridSource(history, live)).uid("clicks")
    """

    def __init__(self, *sources: Source, rows_per_s: float | None = None) -> None:
        check_rate(rows_per_s, "HybridSource")
        _check(sources)
        self.sources = sources
        self.schema = sources[0].schema
        self.rows_per_s = rows_per_s
        self.blocking = any(source.blocking for source in sources)
        self.bounded = sources[-1].bounded
        self.continues_past_end = sources[-1].continues_past_end
        self.splits_end = all(source.bounded or source.splits_end for source in sources)
        self.equal_shares = any(source.equal_shares for source in sources)
        self.drops_bad_records = any(source.drops_bad_records for source in sources)
        self.bad_records_max = next((source.bad_records_max for source in sources if source.drops_bad_records), None)

    @property
    def own(self) -> OwnCode:
        return self.sources[0].own

    @own.setter
    def own(self, own: OwnCode) -> None:
        for source in self.sources:
            source.own = own

    @property
    def discovery_interval_s(self) -> float:  # type: ignore[override]  # read-only: it follows the sources, which adapt theirs
        return min(source.discovery_interval_s for source in self.sources)

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        for index, source in enumerate(self.sources):
            source.prepare(_uid_of(uid, index), checkpoint_dir, restoring)

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        at = _HybridPosition(0, None) if position is None else self._position(position)
        source = self.sources[at.source]
        uid = _uid_of(context.uid, at.source)
        found = source.discover(at.position, replace(context, uid=uid))
        splits = tuple(_outer(at.source, split) for split in found.splits)
        is_last = at.source == len(self.sources) - 1
        if found.exhausted and not is_last:
            after = _HybridPosition(at.source + 1, None)
        else:
            after = _HybridPosition(at.source, found.position)
        return Discovery(splits, msgspec.msgpack.encode(after), exhausted=found.exhausted and is_last)

    def datasets(self) -> Sequence[str]:
        return [uri for source in self.sources for uri in source.datasets()]

    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError if the source that was being read cannot continue, or is not there any more."""
        at = self._position(position)
        if at.position is not None:
            self._source(at.source).check_resume(at.position)

    def open_split(self, split: Split) -> SplitReader:
        source, inner = self._inner(split)
        return source.open_split(inner)

    def begin_split(self, split: Split) -> Split:
        part = decoded(split.payload, _HybridSplit, "HybridSource")
        source, inner = self._inner(split)
        return _outer(part.source, source.begin_split(inner))

    def place(self, split: Split, first: int, last: int) -> str:
        source, inner = self._inner(split)
        return source.place(inner, first, last)

    def splits_per_reader(self, parallelism: int) -> int:
        return max(source.splits_per_reader(parallelism) for source in self.sources)

    def splits_per_reader_of(self, split: Split, parallelism: int) -> int:
        source, inner = self._inner(split)
        return source.splits_per_reader_of(inner, parallelism)

    def readers_max(self, parallelism: int) -> int:
        return max(source.readers_max(parallelism) for source in self.sources)

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        at = _HybridPosition(0, None) if position is None else self._position(position)
        of_source = None if unfinished is None else [*self._inner_of(unfinished, at.source)]
        self.sources[at.source].checkpoint_completed(at.position, of_source)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def _position(self, position: bytes) -> _HybridPosition:
        at = decoded(position, _HybridPosition, "HybridSource")
        self._source(at.source)
        return at

    def _source(self, index: int) -> Source:
        if not 0 <= index < len(self.sources):
            raise ConfigError(
                f"HybridSource: the checkpoint has a position in source {index + 1}, and there are {len(self.sources)} now; "
                "resume with the sources that it was made with"
            )
        return self.sources[index]

    def _inner(self, split: Split) -> tuple[Source, Split]:
        part = decoded(split.payload, _HybridSplit, "HybridSource")
        return self._source(part.source), msgspec.structs.replace(split, id=part.split_id, payload=part.payload)

    def _inner_of(self, splits: Sequence[Split], index: int) -> Iterator[Split]:
        for split in splits:
            if decoded(split.payload, _HybridSplit, "HybridSource").source == index:
                yield self._inner(split)[1]


def _outer(index: int, split: Split) -> Split:
    payload = msgspec.msgpack.encode(_HybridSplit(index, split.id, split.payload))
    return msgspec.structs.replace(split, id=f"{index}:{split.id}", payload=payload)


def _uid_of(uid: str, index: int) -> str:
    return f"{uid}.{index}" if index else uid


def _check(sources: Iterable[object]) -> None:
    made: list[Source] = []
    for source in sources:
        if not isinstance(source, Source):
            raise ConfigError(
                f"HybridSource: {source!r} is not a Source; give sources of midstream.connectors, or your own: "
                "HybridSource(FileSource(…), KafkaSource(…))"
            )
        made.append(source)
    if len(made) < 2:
        raise ConfigError(
            f"HybridSource: has {len(made)} sources; give at least two, in the order in which they are read"
        )
    for index, source in enumerate(made, 1):
        name = f"source {index} ({type(source).__name__})"
        if index < len(made) and not source.bounded:
            raise ConfigError(f"HybridSource: {name} never ends, so what follows would not be read; only the last may")
        if source.rows_per_s is not None:
            raise ConfigError(f"HybridSource: {name} has rows_per_s; give it to HybridSource, for all of them")
        if not source.schema.equals(made[0].schema):
            raise SchemaError(
                f"HybridSource: {name} has the columns ({_columns(source)}), and the first ({_columns(made[0])}); they must "
                "be the same, in the same order"
            )
    limits = {source.bad_records_max for source in made if source.drops_bad_records}
    if len(limits) > 1:
        raise ConfigError(
            "HybridSource: the sources that drop bad records have different bad_records_max; give the same"
        )


def _columns(source: Source) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in source.schema)
