"""The first rows of a job's streams, from its own sources, in process and within about a second.

Splits are found and assigned as in a job (`engine.coordinator.placement.split_assignment`). Virtual time only passes when there is
nothing else to do. Whatever waits for the wall clock, such as a source with a rate, gets at most TIME_S of it, in one
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import polars as pl
import pyarrow as pa

from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.events import CancelTimer, RunIo, Send, SetTimer
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.notifications import Notification
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
from midstream.engine.core.batches import is_held_by_polars, to_polars
from midstream.engine.core.config import JobConfig, is_whole
from midstream.engine.core.errors import ConfigError, InvariantError, JobError
from midstream.engine.core.interfaces import Done, Failed, Timer
from midstream.engine.core.job_pickle import unpickled_apart
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.graph.logical_graph import LogicalGraph, Node
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.source_api import Source, Split, SplitReader
from midstream.engine.protocol import messages as m
from midstream.inprocess.in_process_job import InProcessFailure, InProcessJob, noted, surfaced
from midstream.inprocess.rewrite import End, KeptOutput, rewritten

TIME_S: Final = 10.0
"""The largest virtual time that passes in one step when there is nothing else to do."""
FIRST_ROW_S: Final = 9.0
"""The additional time allowed for the first row of each source, which a storage may need to answer."""
END_S: Final = 1.0
"""The minimum time for windows and timers to fire after the input's end; `FIRST_ROW_S` more if there is no row yet."""
BATCH_ROWS: Final = 1024
"""Small batches, so that no more is read than is needed."""
BATCH_S: Final = 0.05
"""The desired working time per read; between reads the time limit is checked."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The first rows of one stream; a notebook or a terminal shows it as a table.

    `name`: the stream's operator.
    `table`: the rows, as an Arrow table with the types that they have in the job.
    `note`: what is special about them; "" if nothing is.

        >>> orders.preview(2)
        orders (collection): 2 rows
        ┌──────┬───────┐
        │ user ┆ price │
        │ ---  ┆ ---   │
        │ str  ┆ i64   │
        ╞══════╪═══════╡
        │ ann  ┆ 3     │
        │ bob  ┆ 5     │
        └──────┴───────┘
    """

    name: str
    table: pa.Table
    note: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return table_rows(self.table)

    @property
    def frame(self) -> pl.DataFrame:
        """The rows as a polars DataFrame."""
        return to_polars(self.table)

    def __repr__(self) -> str:
        """Format as a table, for a notebook or a terminal."""
        if all(is_held_by_polars(field.type) for field in self.table.schema):
            with pl.Config(tbl_rows=max(10, self.table.num_rows), tbl_hide_dataframe_shape=True):
                text = str(self.frame)
        else:
            text = "\n".join(map(str, self.rows))
        rows = self.table.num_rows
        return f"{self.name}: {rows} row{'s' * (rows != 1)}\n{text}" + (f"\n({self.note})" if self.note else "")


def preview(
    program: LogicalGraph, config: JobConfig, ends: Sequence[End] | None, rows: int, seconds: float, now_us: int
) -> list[Preview]:
    """Return the first rows of each of these streams, or of all that the program writes to a sink. Sinks are not
    written to.

    Stops once each has `rows` rows, or after `seconds`. Then, and if an unbounded source has no more rows at present,
    the input ends where it is, so that windows emit what they have. Raises JobError naming a source that is read with
    Spark, and whatever a function of the job raises.
    """
    if not is_whole(rows, 1):
        raise ConfigError(f"preview: {rows!r} is not a number of rows")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ConfigError(f"preview: {seconds!r} is not a time in seconds")
    made = rewritten(program, ends, _own_source)
    config = msgspec.structs.replace(config, parallelism=1, batch_rows=min(config.batch_rows, BATCH_ROWS))
    try:
        return _previews(made.graph, made.outputs, config, rows, seconds, now_us)
    except InProcessFailure as failure:
        error = surfaced(failure)
        raise error.with_traceback(error.__traceback__) from error.__cause__


def _own_source(uid: str, node: Node) -> Source:
    source = node.source
    assert source is not None
    if type(source).__module__.startswith("midstream.spark"):
        raise JobError(
            f"source {uid!r} ({type(source).__name__}) is read with Spark, which a preview does not start; run the job, "
            "or put rows of it in a file or a collection"
        )
    return source


def _previews(
    logical: LogicalGraph, outputs: Sequence[KeptOutput], config: JobConfig, rows: int, seconds: float, now_us: int
) -> list[Preview]:
    requests: list[m.RequestSplit] = []
    engine = InProcessJob(
        logical, config, now_us, on_split_request=requests.append, copied=_ReadSizer().keep, passed_s=time.monotonic
    )
    ends = [output for output in outputs if output.is_end]
    sources = _OwnSources(engine)
    try:
        for request in requests:
            sources.request(request)
        engine.on_split_request = sources.request
        deadline_s = time.monotonic() + seconds
        last_s = deadline_s + FIRST_ROW_S
        is_over = False

        def enough() -> bool:
            nonlocal is_over
            if not is_over:
                now_s = time.monotonic()
                is_over = now_s > deadline_s and (now_s > last_s or all(engine.rows_read().values()))
            return is_over or sources.failure is not None or all(_count(engine, end) >= rows for end in ends)

        engine.advance_processing_time(now_us + int(TIME_S * 1e6), enough)
        sources.check()
        note = ""
        if not engine.has_finished and not all(_count(engine, end) >= rows for end in ends):
            read = sum(engine.rows_read().values())
            end_s = time.monotonic() + max(seconds, END_S)

            def has_ended() -> bool:
                counts = [_count(engine, end) for end in ends]
                return all(count >= rows for count in counts) or (
                    time.monotonic() > end_s + FIRST_ROW_S * (not any(counts))
                )

            engine.stop_sources(has_ended)
            note = (
                f"the input ends here after {read:,} row{'s' * (read != 1)}, {_why(is_over, seconds)}: "
                "windows and timers emit what they have of these"
            )
        tables = [pa.Table.from_batches(engine.taken[end.id], schema=end.schema) for end in ends]
        return [
            Preview(end.label, table.slice(0, rows), note if table.num_rows < rows else "")
            for end, table in zip(ends, tables, strict=True)
        ]
    finally:
        engine.close()
        sources.close()


def _why(is_over: bool, seconds: float) -> str:
    return f"since {seconds:g} s have passed" if is_over else "since there are no more at present"


def _count(engine: InProcessJob, output: KeptOutput) -> int:
    return sum(batch.num_rows for batch in engine.taken[output.id])


class _ReadSizer:
    """Sets how many rows are read per call, over all sources: one at first, then as many as take the job `BATCH_S`."""

    def __init__(self) -> None:
        self._rows = 1
        self._read: tuple[int, float] | None = None
        """How many rows were read last, and when they arrived."""

    def keep(self, graph: JobGraph) -> None:
        for vertex in graph.vertices:
            if vertex.source is not None:
                source = vertex.source.source
                source.open_split = partial(self._opened, source.open_split)  # type: ignore[method-assign]

    def _opened(self, open_split: Callable[[Split], SplitReader], split: Split) -> SplitReader:
        return _SizedReader(open_split(split), self)

    def rows(self) -> int:
        if self._read is not None:
            rows, at_s = self._read
            took_s = max(time.monotonic() - at_s, 1e-9)
            self._rows = max(1, min(2 * rows, int(rows * BATCH_S / took_s)))
        return self._rows

    def has_read(self, rows: int) -> None:
        self._read = (rows, time.monotonic()) if rows else None


class _SizedReader(SplitReader):
    def __init__(self, reader: SplitReader, sizer: _ReadSizer) -> None:
        self._reader = reader
        self._sizer = sizer

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        found = self._reader.read(min(rows_max, self._sizer.rows()))
        match found:
            case (pa.RecordBatch() as batch, _):
                self._sizer.has_read(batch.num_rows)
            case _:  # no rows, or something else, which is refused where it is taken
                self._sizer.has_read(0)
        return found

    def bad_records(self) -> BadRecords | None:
        return self._reader.bad_records()

    def close(self) -> None:
        self._reader.close()


class _OwnSources:
    """Runs `engine.coordinator.placement.split_assignment` with the loop of the engine."""

    def __init__(self, engine: InProcessJob) -> None:
        self.failure: Failure | None = None
        self._error: BaseException | None = None
        self._engine = engine
        self._effects = Effects()
        self._effects.notifications.start_failed = Notification((self._fail, "nothing is tried again"))
        self._effects.notifications.warned = Notification()
        self._timers: dict[str, Timer] = {}
        graph: JobGraph = unpickled_apart(engine.graph_bytes)
        self._sources = SplitAssignment(self._effects, graph)
        self._sources.storage = engine.storage
        for vertex in graph.vertices:
            if vertex.source is not None:
                vertex.source.source.prepare(vertex.source.uid, None, False)
        self._sources.reset({}, frozenset())
        self._sources.deployed(Attempt(engine.attempt, graph, (0,) * graph.slots, ()))
        self._carry_out()

    def request(self, request: m.RequestSplit) -> None:
        self._sources.request(request.task)
        self._carry_out()

    def close(self) -> None:
        """Close the sources."""
        self._sources.stop()
        self._carry_out()
        self._engine.loop.run()  # calls of `discover` that are under way return first
        self._sources.close()
        self._carry_out()
        self._engine.loop.run()

    def check(self) -> None:
        """Raise what `discover` of a source has raised."""
        if self._error is not None:
            if self.failure is not None:
                noted(self._error, self.failure.summary)
            raise self._error

    def _fail(self, failure: Failure) -> None:
        self.failure = failure

    def _carry_out(self) -> None:
        for instruction in self._effects.take():
            match instruction:
                case Send(_, m.DriftCeiling()):
                    pass  # in a preview, splits may be any distance apart
                case Send(_, message):
                    self._engine.pass_on(message)
                case SetTimer(token, delay_s):
                    self._timers[token] = self._engine.loop.call_later(delay_s, partial(self._timer_fired, token))
                case CancelTimer(token):
                    self._timers.pop(token).cancel()
                case RunIo(token, work):
                    self._engine.loop.submit(work, partial(self._io_done, token))
                case _:
                    raise InvariantError(f"sources requested {instruction!r}")

    def _timer_fired(self, token: str) -> None:
        self._timers.pop(token)
        self._effects.timer_fired(token)
        self._carry_out()

    def _io_done(self, token: str, outcome: Done[Any] | Failed) -> None:
        if isinstance(outcome, Failed):
            self._error = self._error or outcome.error
        self._effects.io_done(token, outcome)
        self._carry_out()
