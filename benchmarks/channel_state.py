"""What channel state costs one core, off the loop: to write, compressed or not; to read, check and filter by key group.

python benchmarks/channel_state.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from midstream.engine.checkpoint.channel_state import Captured, read_segment, rows_of, store_channels
from midstream.engine.checkpoint.state_files import WrittenExtent
from midstream.engine.core.interfaces import Storage
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.protocol.messages import ChannelState
from midstream.runtime.process.thread_limits import limit_threads
from midstream.runtime.storage.file_storage import FileStorage

TOTAL_BYTES = 64 * 2**20
BUFFER_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10)
ROUNDS = 3
SEGMENT_BUFFERS = 16
MAX_PARALLELISM = 128
COLUMNS: dict[str, pa.DataType] = {
    "key": pa.int64(),
    "ts": pa.int64(),
    "value": pa.float64(),
    "text": pa.large_string(),
}
SCHEMA = pa.schema(COLUMNS)
EDGE = Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("key",))
ROW_BYTES = 3 * 8 + 8 + 40


def rows(count: int, seed: int) -> pa.RecordBatch:
    """Events as they are: keys at random, times that grow, values with a few digits, words."""
    random = np.random.default_rng(seed)
    words = np.array(["GET /index.html", "POST /api/v1/orders", "timeout after 30 s", "user-agent Mozilla/5.0"])
    text = [
        f"{word} {n:020}" for word, n in zip(random.choice(words, count), random.integers(0, 2**40, count), strict=True)
    ]
    columns: list[pa.Array[Any]] = [
        pa.array(random.integers(0, 10_000, count)),
        pa.array(1_700_000_000_000_000 + np.cumsum(random.integers(0, 1000, count))),
        pa.array(random.integers(0, 100_000, count) / 100),
        pa.array(text, pa.large_string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def best_s(work: Callable[[], object], cpu: bool = True) -> float:
    clock = time.thread_time if cpu else time.perf_counter
    took = []
    for _ in range(ROUNDS):
        began = clock()
        work()
        took.append(clock() - began)
    return min(took)


def _each(call: Callable[..., object], *arguments: Sequence[object]) -> None:
    for given in zip(*arguments, strict=True):
        call(*given)


def measure(storage: Storage, buffer_bytes: int) -> None:
    per_batch = buffer_bytes // ROW_BYTES
    some = [rows(per_batch, seed) for seed in range(64)]
    count = TOTAL_BYTES // some[0].nbytes
    captured = [Captured(0, 0, 0, False, tuple(some[i % len(some)] for i in range(count)))]
    number = iter(range(1000))
    segment_bytes = SEGMENT_BUFFERS * buffer_bytes

    def write() -> tuple[Sequence[ChannelState], WrittenExtent]:
        return store_channels(storage, captured, f"{next(number)}", segment_bytes)

    (state,), written = write()
    mib = written.stored_bytes / 2**20
    print(f"buffers of {buffer_bytes >> 10} KiB: {count} batches of {per_batch} rows, {len(state.segments)} segments")
    print(
        f"  encode and write: {mib / best_s(write):.0f} MiB/s of CPU, {mib / best_s(write, cpu=False):.0f} MiB/s with fsync"
    )
    half = msgspec.structs.replace(state, key_groups=(0, MAX_PARALLELISM // 2))

    def read(of: ChannelState) -> None:
        for segment in state.segments:
            rows_of(read_segment(storage, segment, [SCHEMA], "here"), EDGE.keys, [SCHEMA], of, 0, MAX_PARALLELISM)

    segments = [read_segment(storage, segment, [SCHEMA], "here") for segment in state.segments]
    print(f"  read and check: {mib / best_s(lambda: read(state)):.0f} MiB/s")
    filtered = best_s(lambda: [rows_of(batches, EDGE.keys, [SCHEMA], half, 0, MAX_PARALLELISM) for batches in segments])
    print(
        f"  filter by key group, half is ours: {mib / filtered:.0f} MiB/s; with reading {mib / best_s(lambda: read(half)):.0f}"
    )
    data = [storage.read_range(s.file, s.offset, s.length) for s in state.segments]
    for codec in ("lz4", "zstd"):
        small = [pa.compress(piece, codec, asbytes=True) for piece in data]
        took = best_s(partial(_each, partial(pa.compress, codec=codec), data))
        sizes = [len(piece) for piece in data]
        back = best_s(partial(_each, partial(pa.decompress, codec=codec), small, sizes))
        share = sum(map(len, small)) / sum(map(len, data))
        print(f"  {codec}: to {share:.0%}, {mib / took:.0f} MiB/s, back {mib / back:.0f} MiB/s")


def main() -> None:
    limit_threads()
    with tempfile.TemporaryDirectory() as directory:
        for buffer_bytes in BUFFER_BYTES:
            measure(FileStorage(directory), buffer_bytes)


if __name__ == "__main__":
    main()
