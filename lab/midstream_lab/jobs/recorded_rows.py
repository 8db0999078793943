"""The rows of a simulated job, which can be distinguished, and the operators that keep account of them.

Every row has a unique id and, within its split and key, a sequence number. So a lost row, a doubled
row and a change of order are noticed where they happen (in the keyed operators) and at the end (in
the ledger, which stands for an external transactional system).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import StorageError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute, StatePart
from midstream.simulation import outside as simulation
from midstream.simulation.network import SIM
from midstream.simulation.outside import SOURCE_IDS, SPLIT_IDS
from midstream.simulation.trace import Kind
from midstream.simulation.world import World

if TYPE_CHECKING:
    from midstream_lab.real_targets import Target

Int64s = npt.NDArray[np.int64]
N_BITS: Final = 20
"""The number of bits for an operator's count; no operator counts further."""
_TIMESTAMP: Final = pa.timestamp("us")
_TEXT: Final = pa.large_string()
SCHEMA: Final = schema_of(
    [
        ("id", pa.int64()),
        ("key", pa.int64()),
        ("sequence", pa.int64()),
        ("ts", _TIMESTAMP),
        ("n", pa.int64()),
        ("text", _TEXT),
    ]
)
"""`id` = source * 10^7 + split * 10^4 + offset; `sequence` counts the rows of the key in its split;
`n` is what the last keyed operator on the way has counted for the key; `text` makes rows large."""


IN_PARTS: Final = 100
"""Sources from this number on read files in two parts, one split each."""


def is_ordered(source: int) -> bool:
    """Whether the splits of a source follow each other in event time. Otherwise all files begin at time 0, and advance
    at different speeds.
    """
    return source % 2 == 1 and source < IN_PARTS


def time_ms(row: int) -> int:
    """Return the event time of a row. It grows through a split, and through the parts of a file."""
    source, split, offset = row // SOURCE_IDS, row % SOURCE_IDS // SPLIT_IDS, row % SPLIT_IDS
    if is_ordered(source):
        return row % SOURCE_IDS
    part = split % 2 if source >= IN_PARTS else 0
    return (part * SPLIT_IDS + offset) * step_ms(row)


def step_ms(row: int) -> int:
    """Return the event time between two consecutive rows of the row's split."""
    source, split = row // SOURCE_IDS, row % SOURCE_IDS // SPLIT_IDS
    if is_ordered(source):
        return 1
    return 1 + 3 * ((split // 2 if source >= IN_PARTS else split) % 3)


def text_of(row: int, length: int) -> str:
    """Return the last digits of the row's id, so that neighbours differ, padded with letters to `length`."""
    return str(row).rjust(length, "x")[-length:] if length else ""


class Outside(simulation.Outside):
    """With what the operators and sources of the laboratory report there."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.targets: dict[str, Target] = {}
        """The real targets of the job's sinks, by uid; none if it writes to the ledger only."""
        self.table_loads: dict[str, int] = {}
        """How many times the table of each join was loaded, by uid."""
        self.table_versions: dict[str, int] = {}
        """The version of each chunk that checkpoints hold of such tables, by the chunk's id."""
        self.row_us = 0
        """The time that user functions take for a row; slow batches are processed in slices."""
        self.counted: dict[str, set[int]] = {}
        """The numbers that each counting operator has assigned to rows, in any attempt; see `numbered`."""
        self.safe: dict[int, set[tuple[bytes | None, frozenset[tuple[str, int]]]]] = {}
        """The position and the unfinished splits in each checkpoint that was written, by the number of the source."""

    def work(self, rows: int) -> None:
        """Let the time pass that a user's function takes for `rows` rows."""
        self.world.now_us += rows * self.row_us


def numbered(ids: Int64s, n: Int64s) -> list[int]:
    """Return each row's id and number as one integer."""
    found: list[int] = (ids << N_BITS | n).tolist()
    return found


# ---- source ----------------------------------------------------------------


class _Plan(msgspec.Struct, frozen=True):
    source: int
    split: int
    rows: int


class SimSource(Source):
    """A source whose split i has `rows[i]` rows, with `keys` different keys; splits are found in `rounds` discoveries."""

    schema = SCHEMA

    def __init__(  # noqa: PLR0913 - what scenarios draw
        self,
        outside: Outside,
        number: int,
        rows: Sequence[int],
        *,
        keys: int,
        skew: float = 0.0,
        text_bytes: int = 0,
        blocking: bool = True,
        rounds: int = 1,
        readers: int = 1,
        rows_per_s: float | None = None,
        ends: str = "bounded",
        has_chaff: bool = False,
        is_found_late: bool = False,
        knows_times: bool = False,
    ) -> None:
        """`ends`: "bounded", "splits" if only those end, "" if neither, as far as the job is informed; or "lulls" or "many
        lulls", if then there are no rows of a split for a while now and then. `has_chaff`: at the start of a split and in
        lulls there may be rows that `Sieve` removes. `is_found_late`: some discoveries after the first find nothing for a
        while. `knows_times`: most splits have the earliest time that a row may have, and if they follow each other they are
        listed in any order.
        """
        self.outside = outside
        self.bounded, self.splits_end = ends == "bounded", ends == "splits"
        self._lulls = {"lulls": 2, "many lulls": 12}.get(ends, 0)
        self._lull_ends_us: dict[tuple[int, int], int] = {}
        """When the lull at an offset of a split that has begun is over."""
        self.has_chaff = has_chaff
        self._is_found_late = is_found_late
        self._knows_times = knows_times
        self.splits_unordered = knows_times and number % 3 == 1
        self._found_us: dict[int, int] = {}
        """When the next splits are found, by the number of those found before."""
        self.number = number
        self.rows = tuple(rows)
        self.keys = keys
        self.skew = skew
        self.text_bytes = text_bytes
        self.blocking = blocking
        self.rounds = rounds
        self.readers = readers
        self.rows_per_s = rows_per_s
        self.discovery_interval_s = 0.002
        self._columns: dict[int, tuple[Int64s, Int64s, Int64s]] = {}
        self._splits: dict[int, pa.RecordBatch] = {}
        self._rows_of: dict[int, list[tuple[int, int]]] = {}

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        self.outside.world.io_point()
        done = int(position) if position else 0
        total = len(self.rows)
        if self._is_found_late and position is not None:
            now_us, late_us = self.outside.world.now_us, Random(f"late {self.number} {done}").choice((0, 5_000, 30_000))
            if now_us < self._found_us.setdefault(done, now_us + late_us):
                return Discovery((), position, exhausted=False)
        end = min(total, done + max(1, -(-total // self.rounds)))
        splits = [
            Split(
                f"{self.number}-{i}",
                msgspec.msgpack.encode(_Plan(self.number, i, self.rows[i])),
                follows=self.number >= IN_PARTS and i % 2 == 1 and i > done,
                min_time_us=self._min_time_us(i) if context.event_time == "ts" else None,
            )
            for i in range(done, end)
        ]
        if self._knows_times and is_ordered(self.number):
            Random(f"order {self.number} {done}").shuffle(splits)
        return Discovery(tuple(splits), str(end).encode(), exhausted=end == total)

    def _min_time_us(self, split: int) -> int | None:
        """Return the earliest time that a row of the split has, or a time before it; None if it is not known."""
        random = Random(f"times {self.number} {split}")
        if not self._knows_times or random.random() < 0.15:
            return None
        return time_ms(self.number * SOURCE_IDS + split * SPLIT_IDS) * 1000 - random.choice((0, 0, 1, 500, 40_000))

    def splits_per_reader(self, parallelism: int) -> int:
        return self.readers

    def open_split(self, split: Split) -> SplitReader:
        plan = msgspec.msgpack.decode(split.payload, type=_Plan)
        return _RecordedReader(self, plan, split.offset)

    def batch(self, split: int, start: int, stop: int) -> pa.RecordBatch:
        """Return rows `start` to `stop` of a split."""
        if split not in self._splits:
            self._splits[split] = self._make_split(split)
        return self._splits[split].slice(start, stop - start)

    def _make_split(self, split: int) -> pa.RecordBatch:
        rows = self.rows[split]
        ids, keys, sequence = self.columns(split, rows)
        first = int(ids[0]) if rows else 0
        ts = (time_ms(first) + (ids - first) * step_ms(first)) * 1000
        text = [text_of(i, self.text_bytes * (1 + i % 7) // 4) for i in ids.tolist()]
        columns = [
            pa.array(ids),
            pa.array(keys),
            pa.array(sequence),
            pa.array(ts).view(_TIMESTAMP),
            pa.array(np.zeros(rows, dtype=np.int64)),
            pa.array(text, _TEXT),
        ]
        return pa.record_batch(columns, schema=SCHEMA)

    def rows_of(self, split: int, stop: int) -> list[tuple[int, int]]:
        """Return the id and the key of the first `stop` rows of a split."""
        if split not in self._rows_of:
            ids, keys, _ = self.columns(split, self.rows[split])
            self._rows_of[split] = list(zip(ids.tolist(), keys.tolist(), strict=True))
        return self._rows_of[split][:stop]

    def reports_rows(self, split: int) -> bool:
        """Whether readers of the split report when rows have come."""
        return Random(f"reports {self.number} {split}").random() < 0.5

    def lull_left_us(self, split: int, at: int) -> int:
        """Return how long there are no rows after those before `at`; 0 if there are some now."""
        return 0 if self.lull(split, at, at + 1) > at else self._lull_ends_us[split, at] - self.outside.world.now_us

    def lull(self, split: int, start: int, stop: int) -> int:
        """Return where a batch from `start` to `stop` is cut: at the next lull, or at `start` during one."""
        if not self._lulls:
            return stop
        random = Random(f"lulls {self.number} {split}")
        for at in sorted({random.randrange(self.rows[split]) for _ in range(self._lulls)}):
            lasts_us = random.choice((500, 5_000, 30_000))
            if start < at:
                return min(at, stop)
            now_us = self.outside.world.now_us
            if start == at and now_us < self._lull_ends_us.setdefault((split, at), now_us + lasts_us):
                return start
        return stop

    def chaff(self, split: int, read: int, *, is_lull: bool) -> bool:
        """Return whether this read of a reader has nothing but rows that a filter removes."""
        random = Random(f"chaff {self.number} {split}")
        in_lulls, at_start = random.random() < 0.7, random.choice((0, 1, 10))
        return self.has_chaff and ((is_lull and in_lulls) or read < at_start)

    def columns(self, split: int, stop: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the ids, keys and sequence numbers of the first `stop` rows of a split."""
        if split not in self._columns:
            self._columns[split] = self._make_columns(split)
        ids, keys, sequence = self._columns[split]
        return ids[:stop], keys[:stop], sequence[:stop]

    def _make_columns(self, split: int) -> tuple[Int64s, Int64s, Int64s]:
        stop = self.rows[split]
        ids = self.number * SOURCE_IDS + split * SPLIT_IDS + np.arange(stop, dtype=np.int64)
        mixed = (ids * 2654435761) & 0xFFFFFFFF
        keys = (mixed >> 7) % self.keys
        if self.skew:
            keys = np.where((mixed >> 3) % 1000 < self.skew * 1000, 0, keys)
        sequence = np.zeros(stop, dtype=np.int64)
        counts: dict[int, int] = {}
        for index, key in enumerate(keys.tolist()):
            sequence[index] = counts.get(key, 0)
            counts[key] = counts.get(key, 0) + 1
        return ids, keys, sequence


CHAFF: Final = pa.RecordBatch.from_pylist(
    [{"id": -1, "key": 0, "sequence": 0, "ts": 0, "n": 0, "text": ""}] * 3, schema=SCHEMA
)
"""Rows that a filter removes."""


class _RecordedReader(SplitReader):
    def __init__(self, source: SimSource, plan: _Plan, offset: int) -> None:
        self._source = source
        self._plan = plan
        self._offset = offset
        self._reads = 0
        self._wake: Callable[[], None] | None = None
        self.without_rows_us = (0, 0)
        """When the last two reads returned no rows, or only such as a filter removes."""

    def on_rows(self, wake: Callable[[], None]) -> bool:
        if not self._source.reports_rows(self._plan.split):
            return False
        self._wake = wake
        return True

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        found = self._read(rows_max)
        if self._wake is not None and found is not None and found[0].num_rows < rows_max:
            left_us = 0 if found[1] == self._plan.rows else self._source.lull_left_us(self._plan.split, found[1])
            self._source.outside.world.schedule(left_us, None, Kind.CLUSTER, self._wake)
        return found

    def _read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        outside = self._source.outside
        if self._source.blocking:
            outside.world.io_point()
            if outside.read_failures:
                outside.read_failures -= 1
                raise StorageError(f"cannot read split {self._plan.split} {SIM}")
        stop = min(self._plan.rows, self._offset + rows_max)
        is_at_end = stop == self._offset
        if not is_at_end:
            stop = self._source.lull(self._plan.split, self._offset, stop)
        self._reads += 1
        is_lull = not is_at_end and stop == self._offset
        is_chaff = self._source.chaff(self._plan.split, self._reads - 1, is_lull=is_lull)
        if is_chaff or is_lull:
            self.without_rows_us = self.without_rows_us[1], outside.world.now_us
        if is_chaff:
            return CHAFF, self._offset
        if is_at_end:
            return None
        batch = self._source.batch(self._plan.split, self._offset, stop)
        self._offset = stop
        return batch, stop


# ---- operators -------------------------------------------------------------


class Sieve(Operator):
    """Removes the chaff of a source."""

    keeps_splits = True

    def input_column(self, name: str) -> str | None:
        return name

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        kept = batch.filter(pa.array(batch.column("id").to_numpy() >= 0))
        if kept.num_rows:
            self._out.emit(kept)


class Pass(Operator):
    """Forwards every row; with `side`, rows whose id is divisible by 3 go to that side output instead."""

    keeps_splits = True

    def input_column(self, name: str) -> str | None:
        return name

    def __init__(self, outside: Outside, side: str | None = None) -> None:
        self._outside = outside
        self._side = side
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open(context)
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        ids = batch.column("id").to_numpy()
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(ids.tolist())
        if self._side is None:
            self._out.emit(batch)
            return
        aside = ids % 3 == 0
        self._out.emit(batch.filter(pa.array(~aside)))
        self._out.emit(batch.filter(pa.array(aside)), self._side)


_KEY_STATE: Final = schema_of(
    [(KEY_GROUP, pa.int32()), ("key", pa.int64()), ("count", pa.int64()), ("sum", pa.int64())]
)
_ORDER_STATE: Final = schema_of(
    [(KEY_GROUP, pa.int32()), ("key", pa.int64()), ("origin", pa.int64()), ("next", pa.int64())]
)
_N: Final = SCHEMA.get_field_index("n")
_NONE_YET: Final = (0, 0)
_BROADCAST_STATE: Final = pa.schema([("id", pa.int64())])


class KeyCounter(Operator):
    """Counts the rows of each key over both ports and puts the count in column `n`.

    `is_ordered`: rows of one key and split must come in their order, without gaps.
    `broadcast_port`: the ids of rows of that port are kept as broadcast state, and the rows are not forwarded.
    `on_time`: no row of these sources may arrive once event time is `late_us` past it.
    """

    def __init__(
        self,
        outside: Outside,
        *,
        is_ordered: bool,
        broadcast_port: int | None = None,
        on_time: frozenset[int] = frozenset(),
        late_us: int = 0,
    ) -> None:
        self._outside = outside
        self._is_ordered = is_ordered
        self._on_time = sorted(on_time)
        self._late_us = late_us
        self._watermark_us: int | None = None
        self._broadcast_port = broadcast_port
        self._counts: dict[int, tuple[int, int]] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._broadcast: set[int] = set()
        self._group_of: dict[int, int] = {}
        """The key group of each known key."""
        self._chunks: dict[str, Chunk] = {}
        """The chunks of parts that have not changed since their snapshot, which are reused."""
        self._out: Output
        self._context: OperatorContext

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open(context)
        self._out = out
        self._context = context

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if "keys" in parts:
            for row in parts["keys"].table().to_pylist():
                self._check_owner(row[KEY_GROUP])
                if row["key"] in self._counts:
                    self._bug(f"key {row['key']} is restored twice")
                self._counts[row["key"]] = (row["count"], row["sum"])
        if "order" in parts:
            for row in parts["order"].table().to_pylist():
                self._next[row["key"], row["origin"]] = row["next"]
        if "broadcast" in parts:
            self._broadcast.update(to_list(parts["broadcast"].table().column("id")))

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        each = batch.column("id").to_numpy()
        ids = each.tolist()
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(ids)
        if port == self._broadcast_port:
            self._chunks.pop("broadcast", None)
            for row in ids:
                if row in self._broadcast:
                    self._bug(f"row {row} is broadcast twice")
                self._broadcast.add(row)
            return
        if self._on_time and self._watermark_us is not None:
            self._check_time(each, batch.column("ts").view(pa.int64()).to_numpy() + self._late_us, self._watermark_us)
        keys = batch.column("key").to_numpy().tolist()
        if not self._group_of.keys() >= set(keys):
            for group in self._groups(sorted(set(keys) - self._group_of.keys())):
                self._check_owner(group)
        counts, counted = self._counts, []
        self._chunks.pop("keys", None)
        self._chunks.pop("order", None)
        for row, key in zip(ids, keys, strict=True):
            count, total = counts.get(key, _NONE_YET)
            count += 1
            counts[key] = (count, total + row)
            counted.append(count)
        if self._is_ordered:
            self._check_order(ids, keys, batch.column("sequence").to_numpy().tolist())
        n = np.array(counted, dtype=np.int64)
        self._outside.counted.setdefault(self._context.uid, set()).update(numbered(each, n))
        self._out.emit(batch.set_column(_N, "n", pa.array(n)))

    def advance_watermark(self, watermark_us: int) -> bool:
        self._watermark_us = watermark_us
        return True

    def _check_time(self, ids: Int64s, due_us: Int64s, watermark_us: int) -> None:
        late = due_us <= watermark_us
        if late.any():
            late &= np.isin(ids // SOURCE_IDS, self._on_time)
        if late.any():
            self._bug(
                f"row {ids[late][0]}, which was due by {due_us[late][0]}, comes when event time is {watermark_us}"
            )

    def _check_order(self, ids: list[int], keys: list[int], sequence: list[int]) -> None:
        following = self._next
        for row, key, number in zip(ids, keys, sequence, strict=True):
            place = key, row // SPLIT_IDS
            due = following.get(place, 0)
            if number != due:
                self._bug(f"row {row} of key {key} is number {number} of its split, due was {due}")
            following[place] = number + 1

    def _check_owner(self, group: int) -> None:
        if group not in self._context.key_groups:
            self._bug(f"key group {group} is not one of {self._context.key_groups}")

    def _bug(self, what: str) -> None:
        self._outside.world.bug(f"{self._context.uid}/{self._context.subtask}: {what}")

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        parts: dict[str, StatePart] = {}
        if self._counts:
            parts["keys"] = self._part("keys", Redistribute.KEYED, self._count_table)
        if self._next:
            parts["order"] = self._part("order", Redistribute.KEYED, self._order_table)
        if self._broadcast:
            parts["broadcast"] = self._part("broadcast", Redistribute.BROADCAST, self._broadcast_table)
        return Snapshot(SnapshotResult(parts))

    def _part(self, name: str, redistribute: Redistribute, table: Callable[[], pa.Table]) -> StatePart:
        if name not in self._chunks:
            self._chunks[name] = Chunk(self._context.ids.new_id(), table())
        return StatePart(redistribute, (self._chunks[name],))

    def _count_table(self) -> pa.Table:
        keys = sorted(self._counts)
        counts = [self._counts[key] for key in keys]
        columns = [self._groups(keys), keys, [count for count, _ in counts], [total for _, total in counts]]
        return pa.table(columns, schema=_KEY_STATE)

    def _order_table(self) -> pa.Table:
        places = sorted(self._next)
        keys = [key for key, _ in places]
        columns = [self._groups(keys), keys, [origin for _, origin in places], [self._next[place] for place in places]]
        return pa.table(columns, schema=_ORDER_STATE)

    def _broadcast_table(self) -> pa.Table:
        return pa.table([sorted(self._broadcast)], schema=_BROADCAST_STATE)

    def _groups(self, keys: list[int]) -> list[int]:
        unknown = [key for key in keys if key not in self._group_of]
        if unknown:
            batch = pa.record_batch({"key": pa.array(unknown, pa.int64())})
            groups = key_groups(batch, ("key",), self._context.max_parallelism).tolist()
            self._group_of.update(zip(unknown, groups, strict=True))
        return [self._group_of[key] for key in keys]
