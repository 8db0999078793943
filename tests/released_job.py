"""The job whose checkpoint each release leaves in `tests/released`: `.venv/bin/python tests/released_job.py` stores that
of this version.

The checkpoint is taken while rows are in flight, a split waits for a subtask, and output is prepared and not committed.
Later versions restore it with this program: a change to it must leave the state of what is there already as it is.
"""

from __future__ import annotations

import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import polars as pl
import pyarrow as pa

from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    Count,
    DataStream,
    Environment,
    First,
    JobError,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    Mean,
    ReducingState,
    StorageError,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    session,
    sliding,
    tumbling,
)
from midstream.connectors.files import file_sink
from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

FOLDER = Path(__file__).parent / "released"
NAME = "released"
SPLITS = 3
OF_SPLIT = 16
KEYS = 2
"""The number of keys of each split: the rows of a key come in one order."""
START = datetime(2024, 1, 1)
FOR_THE_END = datetime(2099, 1, 1)
"""The timer fires when all rows have been read."""
OUT = {"operator": str, "k": int, "n": int, "text": str}
STATE = {
    "rows": ("splits",),
    "keyed": ("value:number", "value:thing", "value:nested", "list:items", "list:things", "map:typed", "map:untyped")
    + ("reducing:most", "timers:event", "timers:processing"),
    "tables": ("table:totals", "table:waiting"),
    "ruled": ("broadcast:rules", "value:seen"),
    "tumbling-windows": ("parts",),
    "sliding-windows": ("parts",),
    "session-windows": ("parts",),
    "joined": ("table:left", "table:right"),
}
"""The parts of state that a stored checkpoint has, by uid."""
PAUSE_S = 0.05
"""The time that the checkpoint's job takes for a row before its sink, so that rows pile up."""


def first_rows(i: Any) -> pl.DataFrame:
    """Rows of the first source: each split has keys of its own."""
    split, number = i // OF_SPLIT, i % OF_SPLIT
    frame = pl.DataFrame({"k": split * KEYS + number % KEYS, "number": number, "x": i})
    name, at = pl.format("n{}", pl.col("number") % 5), pl.lit(START) + pl.duration(seconds=7 * pl.col("number"))
    return frame.select("k", "x", name=name, at=at)


def other_rows(i: Any) -> pl.DataFrame:
    """The same rows, with other names."""
    return first_rows(i).rename({"name": "other", "at": "began"})


@dataclass
class Box:
    content: Any


def larger(one: Any, other: Any) -> Any:
    return max(one, other)


class Keyed(KeyedProcessFunction):
    """Has state of each kind, typed and pickled, and timers of both kinds; emits all of it at the end."""

    number = ValueState(pa.int64(), default=0)
    thing = ValueState()
    items = ListState(pa.string())
    things = ListState()
    typed = MapState(key=pa.string(), value=pa.decimal128(12, 2))
    untyped = MapState()
    most = ReducingState(larger)
    nested = ValueState(pa.struct([("a", pa.list_(pa.int32())), ("b", pa.timestamp("us"))]))

    def process(self, row: Any, ctx: Any) -> Any:
        self.number.value += 1
        self.thing.value = Box({"x": row["x"], "all": [1.5, None, b"b"]})
        self.items.append(row["name"])
        self.things.append((row["x"], Decimal("1.5"), frozenset((1,))))
        self.typed[row["name"]] = self.typed.get(row["name"], Decimal(0)) + row["x"]
        self.untyped[row["x"] % 3, "y"] = [row["at"]]
        self.most.add(row["x"])
        self.nested.value = {"a": [1, row["x"]], "b": row["at"]}
        ctx.timers.event_time(row["at"] + timedelta(minutes=1))
        ctx.timers.event_time(FOR_THE_END)
        ctx.timers.processing_time(FOR_THE_END)
        return None

    def on_timer(self, at: datetime, ctx: Any) -> Any:
        if at != FOR_THE_END:  # how many rows there are by then depends on the other splits
            return {"operator": "keyed", "k": ctx.key, "n": 0, "text": str(at)}
        lists = list(self.items), list(self.things), sorted(self.typed.items()), sorted(self.untyped.items())
        text = str((self.thing.value, *lists, self.most.value, self.nested.value))
        return {"operator": "keyed", "k": ctx.key, "n": self.number.value, "text": text}


class Tables(KeyedBatchFunction):
    totals = TableState({"k": int, "total": int})
    waiting = TableState({"k": int, "name": str, "at": datetime})

    def process(self, rows: Any, ctx: Any) -> Any:
        before = rows.join(self.totals.lookup(rows), on="k", how="left", maintain_order="left")
        made = before.with_columns(total=pl.col("total").fill_null(0) + pl.col("x").cum_sum().over("k"))
        self.totals.upsert(made.select("k", "total").unique("k", keep="last"))
        self.waiting.append(rows.select("k", "name", "at"))
        return made.select(operator=pl.lit("tables"), k="k", n="total", text=pl.lit("total"))

    def on_watermark(self, ctx: Any) -> Any:
        due = self.waiting.pop_until("at", ctx.watermark)
        return due.select(operator=pl.lit("tables"), k="k", n=pl.lit(-1, pl.Int64), text="name")


class Ruled(BroadcastProcessFunction):
    rules = BroadcastState()
    seen = ValueState(default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.value += 1
        ctx.timers.event_time(FOR_THE_END)

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        self.rules[row["x"]] = Box(row["other"])

    def on_timer(self, at: datetime, ctx: Any) -> Any:
        return {"operator": "ruled", "k": ctx.key, "n": self.seen.value, "text": str(sorted(self.rules.items()))}


class Paused:
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def __call__(self, row: Any) -> Any:
        time.sleep(self._pause_s)  # not a wait: this is the work that makes rows pile up
        return row


def program(env: Environment, pause_s: float = 0.0) -> DataStream:
    """Define the job, without its sink. `pause_s`: above 0, rows come slowly, and pile up before the sink."""
    rate = OF_SPLIT / 2 if pause_s else None
    bounded = WatermarkStrategy.bounded("20 s")
    rows = env.generate(first_rows, SPLITS * OF_SPLIT, splits=SPLITS, rows_per_s=rate).uid("rows")
    others = env.generate(other_rows, OF_SPLIT, splits=1, rows_per_s=rate).uid("others")
    timed = rows.with_watermarks("at", bounded).uid("times")
    keyed = timed.key_by("k")
    others = others.with_watermarks("began", bounded).uid("other-times")
    made = {
        "keyed": keyed.process(Keyed(), OUT),
        "tables": keyed.process_batches(Tables(), OUT),
        "ruled": keyed.connect(others.broadcast()).process(Ruled(), OUT),
    }
    windows: list[tuple[str, Any]] = [
        ("tumbling", tumbling("30 s")),
        ("sliding", sliding("1 min", "20 s")),
        ("session", session("15 s")),
    ]
    for name, window in windows:
        fired = keyed.window(window).aggregate(n=Count(), s=Sum("x"), f=First("name"), m=Mean("x"))
        columns = pl.lit(name).alias("operator"), pl.format("{} {} {}", "s", "f", "m").alias("text")
        made[name] = fired.uid(f"{name}-windows").select("k", "n", *columns)
    right = others.select("k", "began", "other").uid("right")
    joined = timed.join(right, on="k", within=("-30 s", "10 s"))
    made["join"] = joined.uid("joined").select("k", operator=pl.lit("join"), n=pl.col("x"), text=pl.col("other"))
    first, *more = (stream.uid(name).select(*OUT).uid(f"{name}-columns") for name, stream in made.items())
    return first.union(*more).rebalance().map(Paused(pause_s), OUT).uid("paused")


def environment(directory: Path, parallelism: int = 2) -> Environment:
    env = Environment(
        NAME, parallelism=parallelism, checkpoint_dir=directory / "state", checkpoint_interval=None, aligned_timeout=0
    )
    env.program.config = msgspec.structs.replace(
        env.program.config, inline_bytes=2 * 2**10
    )  # so some state is in files
    return env


def missing(metadata: CheckpointMetadata) -> list[str]:
    """Return what the checkpoint lacks of what a stored one must have."""
    held = {
        (operator.uid, part.name)
        for operator in metadata.operators
        for snapshot in operator.subtasks
        for part in snapshot.parts
        if any(chunk.rows for chunk in part.chunks)
    }
    found = [f"state {part} of {uid}" for uid, parts in STATE.items() for part in parts if (uid, part) not in held]
    found += [] if any(source.pending for source in metadata.sources) else ["splits that wait for a subtask"]
    found += [] if metadata.channels else ["rows in flight"]
    found += [] if metadata.committables else ["output to commit"]
    found += [] if any(file.endswith(".state") for file in metadata.files) else ["state in files"]
    return found


def metadata_in(directory: Path) -> CheckpointMetadata:
    (path,) = (directory / "state").glob("chk-*/_metadata")
    return decode_metadata(path.read_bytes(), str(path))


def make(archive: Path) -> None:
    """Run the job, take a checkpoint whose output is never committed, and store it."""

    def never(self: Any, *arguments: Any) -> None:
        raise StorageError("the checkpoint that is to be stored has its output still to be committed")

    with tempfile.TemporaryDirectory() as made, patch.object(file_sink._FileCommitter, "commit", never):
        directory = Path(made)
        env = environment(directory)
        program(env, PAUSE_S).write_jsonl(directory / "out").uid("out")
        job = env.start(slots=ProcessSlots())
        until("rows have been written", lambda: _rows_of("paused", job) > 2 * OF_SPLIT)
        job.checkpoint(timeout_s=60)
        job.cancel()
        lacks = missing(metadata_in(directory))
        if lacks:
            raise JobError(f"the checkpoint has no {', no '.join(lacks)}: run this again")
        archive.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
            for path in sorted((*directory.glob("state/**/*"), *directory.glob(".out.midstream/**/*"))):
                into.write(path, path.relative_to(directory))


def _rows_of(uid: str, job: Any) -> int:
    return sum(o.rows_out for v in job.status().vertices for o in v.operators if o.uid == uid)


if __name__ == "__main__":
    import released_job  # classes in state belong to a module, not to __main__

    project = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    released_job.make(FOLDER / f"{project['version']}.zip")
