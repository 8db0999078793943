"""In-flight data written to memory and recovered from it, step by step as a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from in_memory import CountingIds, MemoryStorage
from midstream.engine.checkpoint.channel_state import Captured, store_channels
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.config import JobConfig
from midstream.engine.core.interfaces import Done, Failed, Mail, Storage, Timer, WallClockExecutor
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.graph.job_graph import Edge
from midstream.engine.protocol.messages import ChannelState
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.source_reads import SourceReads
from midstream.runtime.calls_in_turn import CallsInTurn
from standing_clock import StandingClock

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])


def batch(rows: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Rows of (key, n)."""
    return pa.RecordBatch.from_pydict({"key": [key for key, _ in rows], "n": [n for _, n in rows]}, schema=SCHEMA)


class SameRows:
    """A combiner of which each row stands for one row: so it can be seen where each of them gets to."""

    schema = pa.schema([("rows", pa.int64()), ("n", pa.int64()), ("key", pa.int64())])

    def combine(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        ones = pa.array([1] * rows.num_rows, pa.int64())
        return pa.RecordBatch.from_arrays([ones, rows.column("n"), rows.column("key")], schema=self.schema)


def rows_in(found: pa.RecordBatch) -> list[tuple[int, int]]:
    return list(zip(to_list(found.column("key")), to_list(found.column("n")), strict=True))


class Steps:
    """core.interfaces.WallClockExecutor: I/O, mails and timers happen when the test says."""

    def __init__(self) -> None:
        self.io: deque[Callable[[], None]] = deque()
        self.mails: deque[Mail] = deque()
        self.timers: list[tuple[float, FakeTimer]] = []

    def post(self, mail: Mail) -> None:
        self.mails.append(mail)

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        timer = FakeTimer(mail)
        self.timers.append((delay_s, timer))
        return timer

    def call_at(self, time_ms: int, mail: Mail) -> Timer:
        return self.call_later(time_ms / 1000, mail)

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def both() -> None:
            try:
                outcome: Done[Any] | Failed = Done(work())
            except Exception as error:  # noqa: BLE001 - an outcome like another
                outcome = Failed(error)
            done(outcome)

        self.io.append(both)

    def run_io(self) -> bool:
        """One piece of I/O, if there is any."""
        if not self.io:
            return False
        self.io.popleft()()
        return True


def task_seams(executor: WallClockExecutor, storage: Storage | None, **more: Any) -> TaskServices:
    """Of attempt 0 and epoch 1; `more`: fields that are to be otherwise."""
    fields: dict[str, Any] = {
        "config": JobConfig(name="job"),
        "clock": StandingClock(),
        "ids": CountingIds(),
        "unaligned_edges": frozenset(),
        "inline_bytes_max": 0,
        "send": lambda message: None,
        "open_calls": partial(CallsInTurn, executor),
        "source_reads": SourceReads(executor),
        "schedule": lambda task: None,
    }
    return TaskServices("job", attempt=0, epoch=1, executor=executor, storage=storage, **{**fields, **more})


class FakeTimer:
    def __init__(self, mail: Mail) -> None:
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None

    def ring(self) -> None:
        mail, self.mail = self.mail, None
        assert mail is not None
        mail()


def store(
    storage: MemoryStorage, captured: Sequence[Captured], file: str, segment_bytes: int = 600
) -> tuple[ChannelState, ...]:
    return store_channels(storage, captured, file, segment_bytes)[0]


class Recovering:
    """One gate that recovers `states`."""

    def __init__(
        self, edge: Edge, states: Sequence[ChannelState], storage: MemoryStorage, max_parallelism: int = 16
    ) -> None:
        self.steps = Steps()
        self.pool = BufferPool(1 << 20, 4096)
        self.woken = 0
        self.failures: list[BaseException] = []
        self.current_batch: LeasedBatch | None = None
        self.gate = GateRecovery(
            edge,
            states,
            quota=self.pool.quota("recovered", 1),
            services=task_seams(self.steps, storage, config=JobConfig(name="job", max_parallelism=max_parallelism)),
            read_ahead={},
            wake=self._wake,
            fail=self.failures.append,
        )
        self.gate.start()

    def _wake(self) -> None:
        self.woken += 1

    def take(self) -> list[tuple[int, int]] | None:
        """The rows of the next batch, whatever has to be read for it; None at the end."""
        while not self.gate.is_over:
            self.current_batch = self.gate.take()
            if self.current_batch is not None:
                return rows_in(self.current_batch.batch)
            assert self.steps.run_io(), "nothing is being read"
            if self.failures:
                raise self.failures[0]
            self.pool.check()
        return None

    def processed(self) -> None:
        assert self.current_batch is not None
        self.current_batch.release()
        self.current_batch = None
        self.pool.check()

    def drain(self) -> list[tuple[int, int]]:
        rows: list[tuple[int, int]] = []
        while (found := self.take()) is not None:
            rows += found
            self.processed()
        assert self.pool.in_use == 0
        return rows
