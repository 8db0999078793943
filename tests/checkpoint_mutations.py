"""Mutations of checkpoints whose checksums are right: of decoded metadata, of Arrow streams, and of pickles in them.

A checkpoint is here what its metadata decodes to without types: dicts and lists. All choices are those of one `Random`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import xxhash

from midstream.engine.checkpoint.metadata import VERSION
from midstream.engine.core.batch_framing import PREFIX_BYTES, prefix

Tree = Any
_HEADER = struct.Struct("<8sIQQ")
INTEGERS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    7,
    255,
    65_536,
    10**6,
    2**31 - 1,
    2**31,
    2**40,
    2**63 - 1,
    2**64 - 1,
)
TEXTS = (
    "",
    "x",
    "union",
    "keyed",
    "../../../etc/passwd",
    "/etc/passwd",
    "shared/../_job",
    "a\0b",
    "\x1b[31m",
    "n" * 5000,
)
PICKLES = (
    b"\x80\x05\x8fr\x00\x00\x00\x20.",  # an index of the memo
    b"\x80\x05\x8e" + (2**40).to_bytes(8, "little") + b"x.",
    b"\x80\x05\x95" + (2**62).to_bytes(8, "little") + b"N.",
    b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
    b"\x80\x04\x8c\x08builtins\x8c\x09bytearray\x93J\x00\x00\x00\x7f\x85R.",
    b"\x80\x04\x8c\x08builtins\x8c\x04list\x93\x8c\x08builtins\x8c\x05range\x93\x8a\x06\x00\xe4\x0b\x54\x02\x00\x85R\x85R.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    b"\x80\x04" + b"(" * 3000 + b"t" * 3000 + b".",
    b"\x80\x04" + b")" + b"\x85" * 30_000 + b".",
    b"\x80\x04" + b"]" * 2000 + b"a" * 1999 + b".",
    b"\x80\x04\x8c\x07decimal\x8c\x07Decimal\x93\x8c\x0a1e99999999\x85R.",
    b"\x80\x04\x8c\x08datetime\x8c\x04date\x93C\x04\xff\xff\xff\xff\x85R.",
    b"\x80\x05N.",
    b"\x80\x05}.",
    b"\x80\x05K\x01.",
    b"",
)


@dataclass
class Mutant:
    """A checkpoint: its metadata, and its files by path."""

    metadata: Tree
    files: dict[str, bytes]
    story: list[str] = field(default_factory=list)
    """What was changed."""

    def write(self, directory: Path) -> None:
        for path, data in {**self.files, "chk-1/_metadata": self.metadata_file(VERSION)}.items():
            with suppress(OSError):  # of a name that no file can have
                (directory / path).parent.mkdir(exist_ok=True)
                (directory / path).write_bytes(data)

    def metadata_file(self, version: int) -> bytes:
        payload = msgspec.msgpack.encode(self.metadata)
        digest = xxhash.xxh3_64(struct.pack("<IQ", version, len(payload)))
        digest.update(payload)
        return _HEADER.pack(b"MIDSTRM\0", version, len(payload), digest.intdigest()) + payload


def mutate(mutant: Mutant, random: Random) -> None:
    """Change one thing, and make the checksums right again."""
    extents = list(_extents(mutant.metadata))
    if not extents or random.random() < 0.45:
        _mutate_tree(mutant, random)
        return
    by_kind: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for kind, extent in extents:
        by_kind.setdefault(kind, []).append((kind, extent))
    kind, extent = random.choice(random.choice(list(by_kind.values())))
    data = _data_of(mutant, extent)
    if random.random() < 0.08:
        other = random.choice(extents)[1]
        changed, what = _data_of(mutant, other), "the bytes of another extent"
    elif random.random() < 0.4:
        changed, what = _raw(data, random)
    elif kind == "segments":
        changed, what = _segment(data, random)
    else:
        changed, what = _stream(data, extent, random)
    mutant.story.append(f"{kind} of {len(data)} bytes: {what}")
    _put(mutant, extent, changed)


# ---- metadata


def _mutate_tree(mutant: Mutant, random: Random) -> None:
    places: dict[str, list[tuple[Any, Any]]] = {}
    for name, container, key in _walk(mutant.metadata, ""):
        places.setdefault(name, []).append((container, key))
    name = random.choice(sorted(places))
    container, key = random.choice(places[name])
    old = container[key]
    if random.random() < 0.06:
        new: Any = random.choice((None, True, -1, 2.5, "x", b"x", [], {}, [[]]))
    elif random.random() < 0.15:
        other, at = random.choice(places[random.choice(sorted(places))])
        new = msgspec.msgpack.decode(msgspec.msgpack.encode(other[at]))
    else:
        new = _other(old, random)
    mutant.story.append(f"metadata {name}: {str(old)[:80]} -> {str(new)[:80]}")
    container[key] = new


def _walk(tree: Tree, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the container and the key of everything in a tree; all items of a list have one name."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        below = f"{name}.{key}" if isinstance(tree, dict) else f"{name}[]"
        yield below, tree, key
        yield from _walk(value, below)


def _other(old: Any, random: Random) -> Any:
    """Return another value of the same type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        near = (old + 1, old - 1, old * 2, -old)
        return random.choice((*INTEGERS, *(number for number in near if -(2**63) <= number < 2**64)))
    if isinstance(old, str):
        return random.choice((*TEXTS, old + "x", old[:-1]))
    if isinstance(old, bytes):
        return random.choice((b"", old[:-1], random.randbytes(len(old)), _raw(old, random)[0], _raw(old, random)[0]))
    if isinstance(old, list):
        return random.choice((_without_one, _with_one_twice, _shuffled, lambda items, _: []))(old, random)
    if isinstance(old, dict) and old:
        left_out = random.choice(sorted(old))
        return {key: value for key, value in old.items() if key != left_out}
    return random.choice((0, "x", b"x", []))


def _without_one(items: list[Any], random: Random) -> list[Any]:
    at = random.randrange(len(items) + 1)
    return items[:at] + items[at + 1 :]


def _with_one_twice(items: list[Any], random: Random) -> list[Any]:
    return [*items, random.choice(items)] if items else [0]


def _shuffled(items: list[Any], random: Random) -> list[Any]:
    return random.sample(items, len(items))


# ---- extents


def _extents(tree: Tree, kind: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the places of bytes in some metadata that has not been mutated beyond recognition."""
    if isinstance(tree, dict):
        if isinstance(tree.get("checksum"), int) and isinstance(tree.get("length"), int):
            yield kind, tree
        for key, value in tree.items():
            yield from _extents(value, f"{kind.partition('/')[0]}/{tree.get('name')}" if key == "chunks" else key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _extents(value, kind)


def _data_of(mutant: Mutant, extent: dict[str, Any]) -> bytes:
    inline, file, offset = extent.get("inline"), extent.get("file"), extent.get("offset")
    if isinstance(inline, bytes) and inline:
        return inline
    if isinstance(file, str) and isinstance(offset, int) and offset >= 0:
        return mutant.files.get(file, b"")[offset : offset + max(extent["length"], 0)]
    return b""


def _put(mutant: Mutant, extent: dict[str, Any], data: bytes) -> None:
    extent["length"], extent["checksum"] = len(data), xxhash.xxh3_64_intdigest(data)
    if extent.get("file") and isinstance(extent["file"], str):
        old = mutant.files.get(extent["file"], b"")
        extent["offset"] = len(old)  # other extents lie where they lay
        mutant.files[extent["file"]] = old + data
    else:
        extent["inline"] = data


def _raw(data: bytes, random: Random) -> tuple[bytes, str]:
    """Change bytes without regard to what they mean."""
    if not data:
        return random.randbytes(8), "bytes where there were none"
    changed, at = bytearray(data), random.randrange(len(data))
    match random.randrange(6):
        case 0:
            changed[at] ^= 1 << random.randrange(8)
            return bytes(changed), f"a bit of byte {at}"
        case 1:
            return data[:at], f"cut at {at}"
        case 2:
            at -= at % 4
            width = random.choice((4, 8))
            number = random.choice(INTEGERS) % 2 ** (8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
            return bytes(changed), f"the number {number} at {at}"
        case 3:
            end = random.randrange(at, len(data)) + 1
            return data[:at] + data[end:], f"without {at} to {end}"
        case 4:
            end = random.randrange(at, len(data)) + 1
            return data[:end] + data[at:], f"{at} to {end} twice"
        case _:
            for _ in range(random.randrange(2, 30)):
                changed[random.randrange(len(changed))] = random.randrange(256)
            return bytes(changed), "some bytes"


def _stream(data: bytes, extent: dict[str, Any], random: Random) -> tuple[bytes, str]:
    """Change the table in an Arrow stream."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        in_place = _buffers(data, table, random) if table.num_columns and random.random() < 0.25 else None
        if in_place is not None:
            return in_place
        changed, what = _table(table, random)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, changed.schema) as writer:
            writer.write_table(changed)
    except (pa.ArrowException, OSError, ValueError):  # it has been mutated before
        return _raw(data, random)
    if random.random() < 0.95:
        extent["rows"] = changed.num_rows
    return sink.getvalue().to_pybytes(), what


def _segment(data: bytes, random: Random) -> tuple[bytes, str]:
    """Change the bytes of one batch in flight, whose length is right afterwards."""
    if len(data) < PREFIX_BYTES:
        return _raw(data, random)
    changed, what = _raw(data[PREFIX_BYTES:], random)
    return bytes(prefix(len(changed), random.choice((0, 0, 0, 1, 200)))) + changed, f"batches: {what}"


def _table(table: pa.Table, random: Random) -> tuple[pa.Table, str]:
    if not table.num_columns or not table.num_rows:
        return table.append_column("x", pa.array([0] * table.num_rows, pa.int64())), "another column"
    at = random.randrange(table.num_columns)
    name, column = table.schema.field(at).name, table.column(at).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    where = f"column {name!r} ({column.type})"
    match random.randrange(9):
        case 0:
            return table.remove_column(at), f"without {where}"
        case 1:
            kinds = (pa.string(), pa.int64(), pa.int32(), pa.binary(), pa.float64(), pa.list_(pa.int64()), pa.null())
            kind = random.choice(kinds)
            return _with(table, at, pa.nulls(len(column), kind)), f"{where} of nulls of {kind}"
        case 2:
            items = column.to_pylist()
            items[random.randrange(len(items))] = None
            return _with(table, at, pa.array(items, column.type)), f"a null in {where}"
        case 3:
            rows = [random.randrange(table.num_rows) for _ in range(random.randrange(2 * table.num_rows))]
            return table.take(pa.array(rows, pa.int64())), "rows more than once, or not at all"
        case 4:
            return table.rename_columns([f"{n}x" if i == at else n for i, n in enumerate(table.column_names)]), where
        case 5:
            other = table.column(random.randrange(table.num_columns))
            return _with(table, at, other), f"another column as {where}"
        case _:
            return _with(table, at, _values(column, random)), f"values of {where}"


def _with(table: pa.Table, at: int, column: Any) -> pa.Table:
    return table.set_column(at, table.schema.field(at).name, column)


def _buffers(data: bytes, table: pa.Table, random: Random) -> tuple[bytes, str] | None:
    """Replace numbers within a buffer of a column, such as offsets, where it lies in the stream."""
    at = random.randrange(table.num_columns)
    chunks = table.column(at).chunks
    buffers = (
        [buffer for buffer in random.choice(chunks).buffers() if buffer is not None and buffer.size] if chunks else []
    )
    found = data.rfind((buffer := random.choice(buffers)).to_pybytes()) if buffers else -1
    if found < 0:
        return None
    changed = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        place = found + random.randrange(max(buffer.size // 4, 1)) * 4
        changed[place : place + 4] = (random.choice(INTEGERS) % 2**32).to_bytes(4, "little")
    return bytes(changed[: len(data)]), f"a buffer of column {table.schema.field(at)}"


def _values(column: pa.Array[Any], random: Random) -> pa.Array[Any]:
    kind, items = column.type, column.to_pylist()
    place = random.randrange(len(items))
    change: Callable[[Any], Any] = lambda item: _other(item, random)  # noqa: E731
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        if random.random() < 0.4:
            items[place] = random.choice(PICKLES)
        else:
            items[place] = _raw(items[place] or b"", random)[0]
    elif pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        numbers = column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(kind) else items
        number = change(numbers[place] or 0)
        bits = kind.bit_width
        low, high = (0, 2**bits - 1) if str(kind).startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        numbers[place] = min(max(number, low), high)
        return pa.array(numbers, pa.int64() if pa.types.is_timestamp(kind) else kind).cast(kind)
    else:
        items[place] = items[random.randrange(len(items))]
        items[0] = change(items[0]) if isinstance(items[0], (str, bool)) else items[0]
    return pa.array(items, kind)
