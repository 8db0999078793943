"""The events of the auction house in closed form: event n is always the same, without state.

Of 50 events, one is a new person, three are new auctions, 46 are bids; ten occur per millisecond. Half of the bids go
to one auction in a hundred; three quarters come from one person in a hundred; half come through one of four channels,
the others through one of ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import join_texts
from midstream.engine.core.errors import ConfigError

Int64s: TypeAlias = npt.NDArray[np.int64]

PERSON, AUCTION, BID = 0, 1, 2
EPOCH: Final = 50
"""The number of events in an epoch: a person, `EPOCH_AUCTIONS` auctions, then bids."""
EPOCH_AUCTIONS: Final = 3
EVENTS_PER_MS: Final = 10
FIRST_ID: Final = 1000
FIRST_CATEGORY: Final = 10
HOT: Final = 100
"""One of this many auctions, and of this many persons, is a hot one."""
ACTIVE_PERSONS: Final = 1000
ACTIVE_AUCTIONS: Final = 100
LIFE_MS: Final = 167
"""The average life of an auction: the time in which `ACTIVE_AUCTIONS` more begin."""
SALTS: Final = 16

_FIRST_NAMES = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
_LAST_NAMES = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
NAMES: Final = pa.array([f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES], pa.large_string())
CITIES: Final = pa.array(
    ["Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"],
    pa.large_string(),
)
STATES: Final = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"], pa.large_string())
HOT_CHANNELS: Final = ["Google", "Facebook", "Baidu", "Apple"]
OTHER_CHANNELS: Final = 10_000
DIRECTORIES: Final = 3
DIRECTORY_LETTERS: Final = 5
EXTRAS: Final = 4096
"""The number of different texts that a bid can have as its `extra`."""
EXTRA_LETTERS: Final = range(54, 82)
PRICES: Final = np.array([100 * int(10 ** (i / 4096 * 6) + 1e-9) for i in range(4096)], np.int64)


class Column(NamedTuple):
    """Values or, with `texts`, positions in them."""

    values: Int64s
    texts: pa.Array[Any] | None = None


Columns: TypeAlias = Mapping[str, Callable[[], Column]]

_TEXT: Final[pa.DataType] = pa.large_string()
_NUMBER: Final[pa.DataType] = pa.int64()
_TIME: Final[pa.DataType] = pa.timestamp("ms")
SCHEMA: Final = pa.schema(
    {
        "kind": pa.int8(),
        "time": _TIME,
        "person": _NUMBER,
        "name": _TEXT,
        "city": _TEXT,
        "state": _TEXT,
        "email": _TEXT,
        "credit_card": _TEXT,
        "auction": _NUMBER,
        "item": _TEXT,
        "seller": _NUMBER,
        "category": _NUMBER,
        "initial_bid": _NUMBER,
        "reserve": _NUMBER,
        "expires": _TIME,
        "bid_auction": _NUMBER,
        "bidder": _NUMBER,
        "price": _NUMBER,
        "channel": _TEXT,
        "url": _TEXT,
        "extra": _TEXT,
    }
)
"""One stream of all kinds of events; the columns of the other kinds are null."""


def draw(n: Int64s, salt: int, below: int | Int64s) -> Int64s:
    """Return the `salt`-th random number of each event, from 0 to `below` - 1: the upper 31 bits of splitmix64, modulo
    `below`.
    """
    z = (n * SALTS + salt).view(np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    shifted = z >> np.uint64(30)  # in place from here on: fresh memory costs more than the arithmetic
    z ^= shifted
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= np.right_shift(z, np.uint64(27), out=shifted)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    z >>= np.uint64(33)
    if isinstance(below, np.ndarray):
        z %= below.view(np.uint64)
    elif below & (below - 1) == 0:
        z &= np.uint64(below - 1)
    else:  # numpy divides by a constant several times as fast as it takes a remainder
        np.floor_divide(z, np.uint64(below), out=shifted)
        shifted *= np.uint64(below)
        z -= shifted
    return z.view(np.int64)


def epoch_of(n: Int64s) -> Int64s:
    """Return the number of the epoch of each event; once per row if each row of `n` has events of one epoch."""
    return (n[:, :1] if n.ndim == 2 else n) // EPOCH


def time_ms(n: Int64s) -> Int64s:
    return n // EVENTS_PER_MS


def kind_of(n: Int64s) -> npt.NDArray[np.int8]:
    """Return PERSON, AUCTION or BID."""
    place = n % EPOCH
    return (place > 0).astype(np.int8) + (place > EPOCH_AUCTIONS)


def last_auction(n: Int64s) -> Int64s:
    """Return the number of the newest auction at event n."""
    return n // EPOCH * EPOCH_AUCTIONS + np.minimum(n % EPOCH, EPOCH_AUCTIONS) - 1


def _letters(salt: int, count: int) -> str:
    return (draw(np.arange(count), salt, 26) + ord("a")).astype(np.uint8).tobytes().decode()


@cache
def channels() -> pa.Array[Any]:
    """Return the names of all channels."""
    return pa.array([*HOT_CHANNELS, *(f"channel-{i}" for i in range(OTHER_CHANNELS))], pa.large_string())


@cache
def urls() -> pa.Array[Any]:
    """Return the URL of each channel. Those of nine in ten channels that are not hot name the channel's number."""
    made, size = [], DIRECTORY_LETTERS
    letters = _letters(14, len(channels()) * DIRECTORIES * size)
    for channel in range(len(channels())):
        first = channel * DIRECTORIES * size
        path = "/".join(letters[first + k * size : first + (k + 1) * size] for k in range(DIRECTORIES))
        other = channel - len(HOT_CHANNELS)
        named = f"&channel_id={other}" if other >= 0 and other % 10 else ""
        made.append(f"https://www.nexmark.com/{path}/item.htm?query=1{named}")
    return pa.array(made, pa.large_string())


@cache
def extras() -> pa.Array[Any]:
    """Return the texts without a meaning that make bids as long as they are."""
    ends = np.cumsum([EXTRA_LETTERS[i % len(EXTRA_LETTERS)] for i in range(EXTRAS)]).tolist()
    letters = _letters(15, ends[-1])
    return pa.array([letters[a:b] for a, b in pairwise((0, *ends))], pa.large_string())


def _recent(n: Int64s, salt: int, newest: Int64s, active: int) -> Int64s:
    """Return one of the `active` newest numbers."""
    if newest.min(initial=active) >= active - 1:
        return newest - draw(n, salt, active)
    return newest - draw(n, salt, np.minimum(newest, active - 1) + 1)


def persons(n: Int64s) -> Columns:
    """Return the columns of events n, which are persons, in the order of SCHEMA."""
    number = epoch_of(n)
    return {
        "person": lambda: Column(FIRST_ID + number),
        "name": lambda: Column(draw(n, 0, len(_FIRST_NAMES)) * len(_LAST_NAMES) + draw(n, 1, len(_LAST_NAMES)), NAMES),
        "city": lambda: Column(draw(n, 2, len(CITIES)), CITIES),
        "state": lambda: Column(draw(n, 3, len(STATES)), STATES),
        "email": lambda: _each(join_texts("user", _decimal(number), "@example.com", "")),
        "credit_card": lambda: _each(
            pc.utf8_lpad(_decimal(draw(n, 4, 10**8) * 10**8 + draw(n, 5, 10**8)), width=16, padding="0")
        ),
    }


def auctions(n: Int64s) -> Columns:
    """Return the columns of events n, which are auctions, in the order of SCHEMA."""
    number, newest = last_auction(n), epoch_of(n)
    return {
        "auction": lambda: Column(FIRST_ID + number),
        "item": lambda: _each(join_texts("item-", _decimal(number), "")),
        "seller": lambda: Column(
            FIRST_ID + np.where(draw(n, 0, 4) > 0, newest // HOT * HOT, _recent(n, 1, newest, ACTIVE_PERSONS))
        ),
        "category": lambda: Column(FIRST_CATEGORY + draw(n, 2, 5)),
        "initial_bid": lambda: Column(100 + draw(n, 3, 10**6)),
        "reserve": lambda: Column(100 + draw(n, 3, 10**6) + draw(n, 5, 10**6)),
        "expires": lambda: Column(time_ms(n) + 1 + draw(n, 4, 2 * LIFE_MS)),
    }


def bids(n: Int64s) -> Columns:
    """Return the columns of events n, which are bids, in the order of SCHEMA."""
    person = epoch_of(n)
    auction = person * EPOCH_AUCTIONS + EPOCH_AUCTIONS - 1

    @cache
    def channel() -> Int64s:
        """Name and URL go together: draw once."""
        hot = draw(n, 6, len(HOT_CHANNELS))
        return np.where(draw(n, 5, 2) > 0, hot, len(HOT_CHANNELS) + draw(n, 7, OTHER_CHANNELS))

    return {
        "bid_auction": lambda: Column(
            FIRST_ID + np.where(draw(n, 0, 2) > 0, auction // HOT * HOT, _recent(n, 1, auction, ACTIVE_AUCTIONS))
        ),
        "bidder": lambda: Column(
            FIRST_ID
            + np.where(
                draw(n, 2, 4) > 0,
                np.minimum(person // HOT * HOT + 1, person),
                _recent(n, 3, person, ACTIVE_PERSONS),
            )
        ),
        "price": lambda: Column(PRICES[draw(n, 4, len(PRICES))]),
        "channel": lambda: Column(channel(), channels()),
        "url": lambda: Column(channel(), urls()),
        "extra": lambda: Column(draw(n, 8, EXTRAS), extras()),
    }


COLUMNS: Final = {PERSON: persons, AUCTION: auctions, BID: bids}
KINDS: Final = kind_of(np.arange(EPOCH))
PLACES: Final = {
    PERSON: slice(0, 1),
    AUCTION: slice(1, 1 + EPOCH_AUCTIONS),
    BID: slice(1 + EPOCH_AUCTIONS, EPOCH),
}
"""The places of each kind in an epoch."""
EPOCHS_AT_ONCE: Final = 320
"""The epochs of which bids are made at a time, so that what is computed on the way fits into a core's cache. Their texts
are the same arrays each time; those of persons and auctions are made again, and so all together.
"""


def _decimal(number: Int64s) -> pa.Array[Any]:
    return pa.array(number.ravel()).cast(pa.string())


def _each(texts: pa.Array[Any]) -> Column:
    return Column(np.arange(len(texts)), texts.cast(pa.large_string()))


class Events:
    """`count` events, distributed by epochs over `lanes` equal parts: call it with indices, part by part."""

    def __init__(self, count: int, *, lanes: int, columns: Sequence[str] = SCHEMA.names) -> None:
        """Generate only `columns`, and those of every event."""
        if count <= 0 or count % (lanes * EPOCH):
            raise ConfigError(f"{count:,} events are not a multiple of {lanes * EPOCH}, {EPOCH} for each subtask")
        self.count = count
        self.lanes = lanes
        self.schema = pa.schema([field for field in SCHEMA if field.name in ("kind", "time", *columns)])

    def starts(self, epochs: Int64s) -> Int64s:
        """Return the numbers of the first events of epochs; part k has the epochs k, k + lanes, k + 2 * lanes …"""
        lane, within = np.divmod(epochs, self.count // self.lanes // EPOCH)
        start: Int64s = (within * self.lanes + lane) * EPOCH
        return start

    def __call__(self, i: Int64s) -> pa.RecordBatch:
        """Return the events of indices that follow each other; there is at least one."""
        first, last = int(i[0]), int(i[-1])
        if not np.array_equal(i, np.arange(first, first + len(i))):
            raise ConfigError(f"{len(i):,} indices from {first} to {last} do not follow each other")
        start = self.starts(np.arange(first // EPOCH, last // EPOCH + 1))[:, None]
        requested = slice(first % EPOCH, first % EPOCH + len(i))  # of all events of these epochs
        kind = np.tile(KINDS, len(start))[requested]
        arrays = [pa.array(kind), pa.array(time_ms(start + np.arange(EPOCH)).ravel()[requested].view("M8[ms]"))]
        for number, columns_of in COLUMNS.items():
            place = PLACES[number]
            numbers = start + np.arange(place.start, place.stop)
            names = [name for name in columns_of(numbers) if name in self.schema.names]
            together = EPOCHS_AT_ONCE if number == BID else len(start)
            valid = pa.array(kind == number).buffers()[1]
            values = {name: np.zeros((len(start), EPOCH), np.int64) for name in names}
            texts: dict[str, pa.Array[Any] | None] = {}
            for at in range(0, len(start) if names else 0, together):
                columns = columns_of(numbers[at : at + together])
                for name in names:
                    column = columns[name]()
                    values[name][at : at + together, place] = column.values.reshape(-1, numbers.shape[1])
                    texts[name] = column.texts
            for name in names:
                arrays.append(_column(values[name].ravel()[requested], valid, SCHEMA.field(name).type, texts[name]))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _column(values: Int64s, valid: pa.Buffer | None, kind: pa.DataType, texts: pa.Array[Any] | None) -> pa.Array[Any]:
    buffers = [valid, pa.py_buffer(values.data)]
    if texts is None:
        return pa.Array.from_buffers(kind, len(values), buffers)
    return texts.take(pa.Array.from_buffers(pa.int64(), len(values), buffers))
