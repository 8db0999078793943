"""A job whose operator in front of the sink is slow, so that rows pile up before it: numbers, each exactly once."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import polars as pl

from jobs import check_gapless
from machine import limit_s
from midstream import CollectSink, Environment, KeyedProcessFunction, Tuning, ValueState
from midstream.connectors.files.file_sink import FileSink
from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.engine.checkpoint.state_files import StateFile
from midstream.runtime.driver.job import Job
from midstream.runtime.process.slot_provider import SlotProvider
from waiting import until

PADDING = "x" * 100
BUFFER_BYTES = 4096
WIDE = "w" * 8 * BUFFER_BYTES
KEYS = 101
SPLITS = 4
HELD_S = 120.0
"""No row is held back for longer: a test that has failed does not leave its slots waiting."""


class Slow:
    """Takes `row_us` for a row until `hurry` is there.

    What is deployed while there is a file `hold` lets no row through for as long as the file says the same.
    """

    def __init__(self, row_us: float, hurry: Path, hold: Path) -> None:
        self._row_us = row_us
        self._hurry = hurry
        self._hold = hold

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held_by = self._said()

    def _said(self) -> str | None:
        try:
            return self._hold.read_text()
        except FileNotFoundError:
            return None

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        until_s = time.monotonic() + HELD_S
        while self._held_by is not None and self._said() == self._held_by:
            if time.monotonic() >= until_s:
                raise AssertionError(f"{self._hold} is still there after {HELD_S} s: go_on() has not been called")
            time.sleep(0.005)
        if not self._hurry.exists():
            time.sleep(len(frame) * self._row_us / 1e6)  # not a wait: this is the work that makes rows pile up
        return frame


def texts(numbers: Any, wide_every: int | None) -> Any:
    """What stands beside each number: a line, or now and then something that fills eight buffers."""
    found = np.full(len(numbers), PADDING, dtype=object)
    if wide_every is not None:
        found[numbers % wide_every == 0] = WIDE
    return found


class Numbered(KeyedProcessFunction):
    """Which one of its key a row is."""

    count = ValueState(default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.count.value += 1
        return {**row, "nth": self.count.value}


class Backpressured:
    """source → keyed: running count per key → rebalance → slow operator and sink, unaligned checkpoints.

    `rows`: None for no end. `out`: Parquet files there, instead of memory. `wide_every`: each row of so many fills
    eight buffers.
    """

    def __init__(
        self,
        directory: Path,
        rows: int | None,
        *,
        row_us: float = 50.0,
        out: Path | None = None,
        wide_every: int | None = None,
        batch_rows: int = 2000,
        **settings: Any,
    ) -> None:
        import backpressured

        cloudpickle.register_pickle_by_value(backpressured)  # slots of Spark do not find the tests
        self.rows = rows
        self.wide_every = wide_every
        self._out = out
        self._hurry = directory.with_name(f"{directory.name}-hurry")
        self._hold = directory.with_name(f"{directory.name}-hold")
        self.sink = CollectSink() if out is None else FileSink(out)
        self.env = Environment(
            "backpressured",
            checkpoint_dir=directory,
            tuning=Tuning(queue_time=None, buffer_size=BUFFER_BYTES, batch_rows=batch_rows),
            **{"checkpoint_interval": None, "aligned_timeout": 0, **settings},
        )
        (
            self.env.generate(
                lambda i: {"n": i, "key": i % KEYS, "text": texts(i, wide_every)}, count=rows, splits=SPLITS
            )
            .uid("numbers")
            .key_by("key")
            .process(Numbered(), schema={"n": int, "key": int, "nth": int, "text": str})
            .uid("keyed")
            .rebalance()
            .map_batches(Slow(row_us, self._hurry, self._hold))
            .uid("slow")
            .sink(self.sink)
            .uid("sink")
        )

    def start(self, parallelism: int, slots: SlotProvider | None = None, **arguments: Any) -> Job:
        return self.env.start(parallelism=parallelism, slots=slots, **arguments)

    def hurry(self) -> None:
        """From now on no row takes long."""
        self._hurry.touch()

    def drain(self, job: Job) -> None:
        """A job whose source has no end finishes what it has read, and no row takes long any more."""
        with ThreadPoolExecutor(1) as thread:
            drained = thread.submit(job.stop, drain=True, timeout_s=limit_s(60))
            self.hurry()
            drained.result()

    def hold(self) -> None:
        """The slow operators of the attempts that come let no row through until `go_on` is called; those that there are continue."""
        made = self._hold.with_name(f"{self._hold.name}.new")
        made.write_text(secrets.token_hex(4))
        made.replace(self._hold)

    def go_on(self) -> None:
        self._hold.unlink()

    def frame(self) -> pl.DataFrame:
        """Rows that have been committed."""
        if isinstance(self.sink, CollectSink):
            return self.sink.frame()
        files = sorted(self._out.glob("*.parquet")) if self._out is not None else []
        return pl.concat(map(pl.read_parquet, files)) if files else pl.DataFrame()


def check_exact(rows: int | None, *parts: pl.DataFrame, wide_every: int | None = None) -> None:
    """All parts together: every number once, as it was, and in each key every count once. `rows`: as of the job."""
    frame = pl.concat(part for part in parts if len(part))
    if rows is None:
        check_gapless(frame["n"].to_list(), SPLITS)
    else:
        assert sorted(frame["n"].to_list()) == list(range(rows))
    assert (frame["key"] == frame["n"] % KEYS).all()
    assert (frame["text"] == texts(frame["n"].to_numpy(), wide_every)).all()
    for (key,), of_key in frame.group_by("key"):
        assert sorted(of_key["nth"].to_list()) == list(range(1, len(of_key) + 1)), key


def rows_out(job: Job, uid: str) -> int:
    return sum(o.rows_out for v in job.status().vertices for o in v.operators if o.uid == uid)


def until_more_rows(job: Job, uid: str) -> None:
    """Come out of that operator than have so far."""
    before = rows_out(job, uid)
    until("rows", lambda: rows_out(job, uid) > before)


def metadata_of(path: str) -> CheckpointMetadata:
    return decode_metadata(Path(path, "_metadata").read_bytes(), path)


def rows_in_flight(path: str) -> int:
    """At most; some batches may have been consumed."""
    return sum(segment.rows for state in metadata_of(path).channels for segment in state.segments)


def rows_still_to_recover(path: str) -> int:
    """The rows in flight that the checkpoint refers to in files of earlier ones: it was taken while they were recovered."""
    metadata = metadata_of(path)
    files = {segment.file: StateFile.parse(segment.file) for state in metadata.channels for segment in state.segments}
    earlier = {name for name, file in files.items() if file and file.checkpoint_id < metadata.checkpoint_id}
    return sum(s.rows for state in metadata.channels for s in state.segments if s.file in earlier)
