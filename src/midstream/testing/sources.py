"""Checks the contract of a `Source`, on which a job relies when it is restarted or rescaled, or reads other batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.error_rows import counted
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.inprocess.virtual_loop import MemoryStorage
from midstream.testing.inputs import as_sent

UID: Final = "source"
ROWS_MAX: Final = (1000, 1, 7)
"""The batch sizes that are requested: one way of reading, and others that must give the same rows."""
QUIET_S: Final = 1.0
"""A reader without rows for this long, which is not known to have more, has returned all that exists at present."""
MISSING_S: Final = 10.0
"""How long rows that the same split has had before, and the end of a bounded source, are awaited."""
PAUSE_S: Final = 0.004
"""The pause before a reader that had nothing is called again, as in an engine."""
OFFSETS_MAX: Final = 50
"""The limit on offsets of a split from which reading resumes."""
PARALLELISMS: Final = (1, 4)


def check_source(source: Source, *, rows_max: int = 10_000, discoveries: int = 3) -> pa.Table:
    """Check that a source of your own keeps what a job relies on.

    `source`: it must have some rows to read, and must not get others meanwhile. Readers that return batches without
    rows for a second have no more at present; those of a bounded source must reach their end.
    `rows_max`: the approximate limit on rows read per split.
    `discoveries`: how often `discover` of an unbounded source is called.

    Returns its rows, for you to compare. Raises AssertionError naming which rule is broken, and by which call: it
    pickles; `discover`, called again with a position, finds the same rows; batches have the schema; `open_split` at any
    offset that was returned resumes exactly after the preceding rows, in batches of any size; all of this holds for a
    copy without knowledge of earlier calls. A source that `supports_projection` reads each column alone with the same
    values and offsets.

        >>> from midstream.connectors import FileSource
        >>> pl.DataFrame({"n": [1, 2, 3]}).write_parquet("numbers.parquet")
        >>> testing.check_source(FileSource("numbers.parquet")).column("n").to_pylist()
        [1, 2, 3]
    """
    if not isinstance(source, Source):
        raise AssertionError(f"check_source: {source!r} is not a Source; subclass it and give an instance")
    name = type(source).__name__
    _check_settings(source, name)
    made = _copy(source, name)
    found = _discover(made, name, PARALLELISMS[0], discoveries)
    parts = {split.id: _check_split(source, name, split, rows_max) for split in found}
    table = pa.Table.from_batches([batch for part in parts.values() for batch in part], schema=source.schema)
    counts = {split_id: sum(batch.num_rows for batch in part) for split_id, part in parts.items()}
    _check_discovery(source, name, counts, discoveries, rows_max, table)
    _check_settled(source, name, rows_max)
    made.close()
    return table


def _check_settings(source: Source, name: str) -> None:
    schema = getattr(source, "schema", None)
    _require(isinstance(schema, pa.Schema), f"{name}.schema is {schema!r}, not a pyarrow.Schema of its rows")
    assert isinstance(schema, pa.Schema)
    canonical = canonical_schema(schema)
    differing = [field.name for field in schema if field.type != canonical.field(field.name).type]
    if differing:
        column = differing[0]
        raise AssertionError(
            f"{name}.schema: column {column!r} is {schema.field(column).type}; the engine's type for it is "
            f"{canonical.field(column).type}: convert it when reading, and declare that type in the schema"
        )


def _copy(source: Source, name: str) -> Source:
    """Return a copy, as a slot gets it."""
    advice = "; open connections and files in discover() and open_split(), and leave them out in __getstate__()"
    return as_sent(source, name, advice)


def _discover(
    source: Source, name: str, parallelism: int, discoveries: int, position: bytes | None = None
) -> list[Split]:
    """Return all splits beyond `position`, as far as they are searched."""
    context = DiscoveryContext(UID, parallelism, MemoryStorage())
    splits: list[Split] = []
    calls = 0
    while source.bounded or calls < discoveries:
        calls += 1
        found = _one_discovery(source, name, position, context)
        splits += found.splits
        position = found.position
        if found.exhausted:
            break
        _require(
            not source.bounded or calls < 10_000,
            f"{name}.discover has not returned exhausted=True after {calls} calls, but the source is bounded",
        )
    _require(bool(source.bounded) or not splits or position is not None, f"{name}.discover returned no position")
    ids = [split.id for split in splits]
    twice = next((split_id for split_id, times in Counter(ids).items() if times > 1), None)
    _require(twice is None, f"{name}.discover: two splits have the id {twice!r}; each needs one of its own")
    return splits


def _one_discovery(source: Source, name: str, position: bytes | None, context: DiscoveryContext) -> Discovery:
    found = source.discover(position, context)
    _require(isinstance(found, Discovery), f"{name}.discover({position!r}) returned {found!r}, not a Discovery")
    _require(
        isinstance(found.position, bytes),
        f"{name}.discover: the position is {found.position!r}; it is stored in checkpoints, so it must be bytes",
    )
    for split in found.splits:
        _require(isinstance(split, Split), f"{name}.discover: {split!r} is not a Split")
        _require(
            isinstance(split.id, str) and isinstance(split.payload, bytes),
            f"{name}.discover: split {split!r}: the id must be a string and the payload bytes, since checkpoints hold "
            "them",
        )
        _require(
            split.offset == 0, f"{name}.discover: split {split.id!r} is new, and has the offset {split.offset}, not 0"
        )
    return found


def _read(
    source: Source, name: str, split: Split, batch_rows: int, rows_max: int, expected: int | None = None
) -> tuple[list[pa.RecordBatch], list[int]]:
    """Return batches from the split's offset on, and the offset after each; fewer if there are very many.

    `expected`: the number of rows of the split, if it is known.
    """
    where = f"{name}: split {split.id!r} from offset {split.offset}"
    try:
        reader = source.open_split(split)
    except Exception as error:
        raise AssertionError(
            f"{where}: open_split raised {type(error).__name__}: {error}; it is called in another process than discover, and "
            "again after a restart: all that it needs must be in the source's settings and in the split"
        ) from error
    batches: list[pa.RecordBatch] = []
    offsets: list[int] = []
    rows = 0
    quiet_since_s: float | None = None
    while rows < rows_max:
        answer = reader.read(batch_rows)
        if answer is None:
            break
        _require(
            isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], pa.RecordBatch),
            f"{where}: read({batch_rows}) returned {type(answer).__name__}; return (a pyarrow.RecordBatch, the offset "
            "after it), or None at the end",
        )
        batch, offset = answer
        _require(
            batch.schema.equals(source.schema),
            f"{where}: a batch has the columns {_columns(batch.schema)}, but the source's schema has "
            f"{_columns(source.schema)}",
        )
        _require(
            batch.num_rows <= batch_rows,
            f"{where}: read({batch_rows}) returned {counted(batch.num_rows, 'row')}, more than requested",
        )
        _require(
            isinstance(offset, int) and not isinstance(offset, bool) and -(2**63) <= offset < 2**64,
            f"{where}: read returned the offset {offset!r}; it is stored in checkpoints, so it must be a whole number "
            "of 64 bits",
        )
        before = offsets[-1] if offsets else split.offset
        _require(
            not batch.num_rows or offset != before,
            f"{where}: read returned {counted(batch.num_rows, 'row')} and the offset before, {offset}: after a restart the same rows "
            "would come again",
        )
        if batch.num_rows or offset != before:
            batches.append(batch)
            offsets.append(offset)
            rows += batch.num_rows
        if batch.num_rows or (source.bounded and offset != before):
            quiet_since_s = None
        else:
            now_s = time.monotonic()
            quiet_since_s = now_s if quiet_since_s is None else quiet_since_s
            if _is_all_there_is(source, where, now_s - quiet_since_s, rows, expected):
                break
            time.sleep(PAUSE_S)
    reader.close()
    return batches, offsets


def _is_all_there_is(source: Source, where: str, quiet_s: float, rows: int, expected: int | None) -> bool:
    """Whether a reader without rows need not be awaited. Raises AssertionError for one that must not have none."""
    _require(
        source.blocking or quiet_s < QUIET_S,
        f"{where}: read returned nothing but empty batches for {QUIET_S:g} s after {counted(rows, 'row')}, which means "
        "that there are none at present; a source with blocking = False is called again immediately, and so takes all "
        "of the processor's time: return None at the end of the split, or set blocking = True",
    )
    if source.bounded:
        _require(
            quiet_s < MISSING_S,
            f"{where}: read returned nothing but empty batches for {MISSING_S:g} s after {counted(rows, 'row')}, but "
            "the source is bounded; return None at the end of the split",
        )
        return False
    if expected is not None and rows >= expected:
        return True
    return quiet_s >= (QUIET_S if expected is None else MISSING_S)


def _check_split(source: Source, name: str, split: Split, rows_max: int) -> list[pa.RecordBatch]:
    """Return the rows of a split, which must be the same for all batch sizes, and from each offset on."""
    batches, _ = _read(_copy(source, name), name, split, ROWS_MAX[0], rows_max)
    whole = _rows(source, batches)
    for batch_rows in ROWS_MAX[1:]:
        parts, offsets = _read(_copy(source, name), name, split, batch_rows, rows_max, len(whole))
        limit = min(len(whole), sum(part.num_rows for part in parts))
        _same(
            whole[:limit],
            _rows(source, parts)[:limit],
            f"{name}: split {split.id!r} read {batch_rows} rows at a time has other rows than read {ROWS_MAX[0]} at a time",
        )
        step = max(1, len(offsets) // OFFSETS_MAX)
        done = 0
        for number, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            done += part.num_rows
            if number % step == 0 or number == len(offsets) - 1:
                resumed = msgspec.structs.replace(split, offset=offset)
                rest = _rows(
                    source, _read(_copy(source, name), name, resumed, ROWS_MAX[0], rows_max, len(whole) - done)[0]
                )
                limit = len(whole) - done
                _same(
                    whole[done:],
                    rest[:limit] if len(whole) >= rows_max else rest,
                    f"{name}.open_split at offset {offset} of split {split.id!r}, which read returned after row "
                    f"{done}, does not resume with the row after that: after a restart rows would be lost or "
                    "duplicated",
                )
    if source.supports_projection:
        _check_projection(source, name, split, rows_max, batches)
    return batches


class _Projected(Source):
    """A source for a job that uses some of its columns."""

    def __init__(self, source: Source, columns: pa.Schema) -> None:
        self._source = source
        self.schema = columns
        self.blocking, self.bounded = source.blocking, source.bounded

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        return self._source.discover(position, context)

    def open_split(self, split: Split) -> SplitReader:
        return self._source.open_projected(split, self.schema)


def _check_projection(source: Source, name: str, split: Split, rows_max: int, whole: Sequence[pa.RecordBatch]) -> None:
    """Check that each column alone is read as it is with all, and with the same offsets."""
    rows = sum(batch.num_rows for batch in whole)
    _, offsets = _read(_copy(source, name), name, split, ROWS_MAX[0], rows_max, rows)
    for field in source.schema:
        alone = _Projected(_copy(source, name), pa.schema([field]))
        batches, found = _read(alone, name, split, ROWS_MAX[0], rows_max, rows)
        where = f"{name}.open_projected of split {split.id!r} with the column {field.name!r}"
        _same(
            _rows(alone, [batch.select([field.name]) for batch in whole]),
            _rows(alone, batches),
            f"{where} has other values than open_split",
        )
        _require(found == offsets, f"{where} has the offsets {found[:5]}, and open_split has {offsets[:5]}")


def _check_discovery(
    source: Source, name: str, counts: Mapping[str, int], discoveries: int, rows_max: int, table: pa.Table
) -> None:
    """Call `discover` again, without knowledge of earlier calls, from the beginning and from each position in between.

    `counts`: the number of rows each split had the first time, by its id.
    """
    expected = _counted(table)
    for parallelism in PARALLELISMS:
        other = _copy(source, name)
        again = _discover(other, name, parallelism, discoveries)
        what = f"{name}.discover, called again from the beginning (parallelism {parallelism})"
        _compare(other, name, again, expected, counts, rows_max, what)
    context = DiscoveryContext(UID, PARALLELISMS[0], MemoryStorage())
    position: bytes | None = None
    one = _copy(source, name)
    before: list[Split] = []
    for call in range(discoveries):
        step = _one_discovery(one, name, position, context)
        before += step.splits
        position = step.position
        if step.exhausted:
            break
        other = _copy(source, name)
        left = discoveries - call - 1
        after = _discover(other, name, PARALLELISMS[0], left, position) if source.bounded or left else []
        what = f"{name}.discover, called by a new driver from the position {position!r} after {counted(len(before), 'split')}"
        _compare(other, name, [*before, *after], expected, counts, rows_max, what)


def _compare(
    source: Source,
    name: str,
    splits: Sequence[Split],
    expected: Counter[str],
    counts: Mapping[str, int],
    rows_max: int,
    what: str,
) -> None:
    batches = [
        batch
        for split in splits
        for batch in _read(source, name, split, ROWS_MAX[0], rows_max, counts.get(split.id))[0]
    ]
    other = _counted(pa.Table.from_batches(batches, schema=source.schema))
    missing, extra = expected - other, other - expected
    if missing or extra:
        raise AssertionError(
            f"{what}, stands for other rows than the first time: {_some(missing, 'missing')}{_some(extra, 'new')}; "
            "after a restart, splits assigned since the last checkpoint are searched again"
        )


def _check_settled(source: Source, name: str, rows_max: int) -> None:
    """Check that a source that was notified of a checkpoint can still read the unfinished splits in it."""
    if type(source).checkpoint_completed is Source.checkpoint_completed:
        return
    made = _copy(source, name)
    context = DiscoveryContext(UID, PARALLELISMS[0], MemoryStorage())
    step = _one_discovery(made, name, None, context)
    rows = [_rows(source, _read(_copy(source, name), name, split, ROWS_MAX[0], rows_max)[0]) for split in step.splits]
    made.checkpoint_completed(step.position, list(step.splits))
    made.checkpoint_completed(step.position, list(step.splits))
    for split, before in zip(step.splits, rows, strict=True):
        _same(
            before,
            _rows(source, _read(_copy(source, name), name, split, ROWS_MAX[0], rows_max, len(before))[0]),
            f"{name}: split {split.id!r} has other rows after checkpoint_completed, which named it as unfinished",
        )


def _rows(source: Source, batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return table_rows(pa.Table.from_batches(list(batches), schema=source.schema))


def _counted(table: pa.Table) -> Counter[str]:
    return Counter(map(repr, table_rows(table)))


def _same(expected: Sequence[Any], found: Sequence[Any], what: str) -> None:
    if list(map(repr, expected)) == list(map(repr, found)):
        return
    pairs = zip(expected, found, strict=False)
    at = next((at for at, (one, two) in enumerate(pairs) if repr(one) != repr(two)), min(len(expected), len(found)))
    shown = [repr(rows[at]) if at < len(rows) else "nothing more" for rows in (expected, found)]
    raise AssertionError(f"{what}: row {at} should be {shown[0]}, but is {shown[1]}")


def _some(rows: Counter[str], kind: str) -> str:
    if not rows:
        return ""
    return f"{rows.total()} {kind}, such as {next(iter(rows))} "


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(broken)
